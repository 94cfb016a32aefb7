// Attention: the equation, then the rungs of the ladder. Every rung gives what rung 1 gives.
//
//   o = softmax(q K^T / sqrt(D)) V        for each query head; K and V of the positions the query may see
//
// A query at position p sees 0 .. p, or what `Visible` (cache.h) says of windows and sinks. With grouped queries
// (Ainslie et al. 2023, GQA), query head h reads KV head h / (heads / kv_heads).
#pragma once

#include <limits>

#include "cache.h"
#include "layers.cu"

struct Heads {
    int query = 0, kv = 0, width = 0;  // query heads, KV heads, D
    HOST_DEVICE int group() const { return query / kv; }
    HOST_DEVICE int kv_head(int query_head) const { return query_head / group(); }
};

#ifdef HAS_CUDA
// What one layer's attention reads and writes, on the card. query, key and value are of this pass.
struct DeviceAttention {
    float *out;                // (rows, query_heads, value_width)
    const float *query;        // (rows, query_heads, D), rotated
    const float *key, *value;  // (rows, kv_heads, width), the keys rotated
    CacheView cache;
    int layer;
    Visible visible;
    Heads heads;
    const float *frequencies;   // (D / 2): radians per position, by which sinks are turned
    bool sinks_turned = false;  // the sinks' keys are those of `cache.sink_keys` already rotated to their positions
};
// ---- Storing on the GPU ------------------------------------------------------------------------------------

// What a pass turns and stores in one layer, on the card.
struct DeviceStore {
    float *query;                 // (rows, query_heads, D): normed and rotated in place
    float *key, *value;           // (rows, kv_heads, width): keys too; what a block keeps at f16 is rounded in place
    Tensor query_norm, key_norm;  // (1, D), or absent
    float epsilon;
    CacheView cache;  // without memory on the naive path, which stores nothing
    int layer;
    Heads heads;
    int value_width;
    const float *frequencies;  // (D / 2): radians per position
    bool keep;                 // decoding: the newest block takes its vectors now, not after attention
};

// x (width) = RMSNorm(x) where there is one, rotated to `position`; by a warp, a pair of numbers in each lane.
__device__ inline void norm_and_rope(float *x, const Tensor &norm, float epsilon, const float *frequencies,
                                     int position, int width) {
    float squares = 0, factor = 1;
    for (int i = lane_id(); i < width; i += warp_size) squares += x[i] * x[i];
    if (norm.data) factor = 1 / sqrtf(warp_sum(squares) / width + epsilon);
    __syncwarp();
    for (int i = lane_id(), half = width / 2; i < half; i += warp_size) {
        float a = x[i], b = x[i + half], sine, cosine;
        if (norm.data) a *= factor * number_of(norm, i), b *= factor * number_of(norm, i + half);
        sincosf(rope_angle(position, frequencies[i]), &sine, &cosine);
        x[i] = a * cosine - b * sine;
        x[i + half] = b * cosine + a * sine;
    }
    __syncwarp();
}

// numbers[i] = x[i], rounded to f16 in both places if `round`; by a warp.
__device__ inline void take_vector(const Shared<float> &numbers, float *x, int width, bool round) {
    for (int i = lane_id(); i < width; i += warp_size) {
        if (round) {
            f16 rounded;
            from_float(rounded, x[i]);
            x[i] = to_float(rounded);
        }
        numbers[i] = x[i];
    }
}

// Encodes the vectors of a span, `numbers` (positions of its block or span, width), into their rows: store_span().
template <bool keys>
__device__ void store_vectors(const DeviceStore &task, const Span &span, const Shared<float> &numbers) {
    const CacheView &cache = task.cache;
    const CacheRows &rows = keys ? cache.keys : cache.values, &recent = keys ? cache.recent_keys : cache.recent_values;
    int head = blockIdx.y, warps = blockDim.x / warp_size;
    auto row_at = [&](int t) { return rows.at(task.layer, cache.row_of(span.sequence, t), head); };
    auto store = [&](auto format) {
        using Format = decltype(format);
        if constexpr (Format::key_groups) {
            int begin = span.position / group_size * group_size;
            if (span.position + span.count < begin + group_size) return;
            for (int i = threadIdx.x; i < (span.position - begin) * rows.width; i += blockDim.x) {
                const char *row = recent.at(task.layer, span.sequence * group_size + i / rows.width, head);
                numbers[i] = to_float(((const f16 *)row)[i % rows.width]);
            }
            __syncthreads();
            for (int i = warp_id(); i < group_size; i += warps) {
                if constexpr (keys)
                    Format::encode_keys(row_at(begin + i), i, numbers, rows.width, Warp{});
                else
                    Format::encode(row_at(begin + i), numbers.from(i * rows.width), rows.width, Warp{});
            }
        } else {
            for (int t = warp_id(); t < span.count; t += warps)
                Format::encode(row_at(span.position + t), numbers.from(t * rows.width), rows.width, Warp{});
        }
    };
    (keys ? cache.type_k : cache.type_v).visit(store);
}

// Keeps the sinks that a span holds: store_sink().
__device__ inline void store_sinks(const DeviceStore &task, const Span &span, const float *key, const float *value) {
    const CacheView &cache = task.cache;
    int head = blockIdx.y, width = task.heads.width, half = width / 2;
    for (int t = span.position; t < min(span.position + span.count, cache.sinks); t++) {
        int64_t sink = (int64_t)span.sequence * cache.sinks + t;
        size_t at = (size_t)(span.row + t - span.position) * task.heads.kv + head;
        float *sink_key = (float *)cache.sink_keys.at(task.layer, sink, head);
        float *sink_value = (float *)cache.sink_values.at(task.layer, sink, head);
        for (int i = threadIdx.x; i < half; i += blockDim.x) {
            float a = key[at * width + i], b = key[at * width + i + half], sine, cosine;
            sincosf(-rope_angle(t, task.frequencies[i]), &sine, &cosine);
            sink_key[i] = a * cosine - b * sine;
            sink_key[i + half] = b * cosine + a * sine;
        }
        for (int i = threadIdx.x; i < task.value_width; i += blockDim.x)
            sink_value[i] = value[at * task.value_width + i];
    }
}

// The vectors of a span into the rows of the newest block, at f16: keep_recent().
__device__ inline void keep_vectors(const DeviceStore &task, const Span &span) {
    auto keep = [&](const CacheRows &recent, const float *vectors, int width) {
        for (int i = threadIdx.x; recent.data && i < span.count * width; i += blockDim.x) {
            int t = i / width, c = i % width, row = span.sequence * group_size + (span.position + t) % group_size;
            const float *vector = vectors + ((size_t)(span.row + t) * task.heads.kv + blockIdx.y) * width;
            from_float(((f16 *)recent.at(task.layer, row, blockIdx.y))[c], vector[c]);
        }
    };
    keep(task.cache.recent_keys, task.key, task.heads.width);
    keep(task.cache.recent_values, task.value, task.value_width);
}

// A block for each span of at most 32 positions (in one block of 32, where a format has blocks) and KV head, with the
// query heads of its group: q/k norm, rotation, and the cache's new rows, in one launch.
__global__ void rope_and_store_kernel(DeviceStore task, const Span *spans, int room) {
    SharedMemory memory;
    Shared<float> keys = memory.take<float>(room * task.heads.width);
    Shared<float> values = memory.take<float>(room * task.value_width);
    wait_for_previous();
    let_next_start();
    Span span = spans[blockIdx.x];
    const Heads &heads = task.heads;
    int head = blockIdx.y, group = heads.group(), width = heads.width, vectors = group + 2;
    bool round_keys = task.cache.recent_keys.data, round_values = task.cache.recent_values.data;
    for (int item = warp_id(); item < span.count * vectors; item += blockDim.x / warp_size) {
        int t = item / vectors, which = item % vectors, position = span.position + t;
        size_t row = span.row + t;
        float *query = task.query + (row * heads.query + head * group + which) * width;
        float *key = task.key + (row * heads.kv + head) * width;
        float *value = task.value + (row * heads.kv + head) * task.value_width;
        if (which < group) norm_and_rope(query, task.query_norm, task.epsilon, task.frequencies, position, width);
        if (which == group) {
            norm_and_rope(key, task.key_norm, task.epsilon, task.frequencies, position, width);
            take_vector(keys.from((round_keys ? position % group_size : t) * width), key, width, round_keys);
        }
        if (which > group) {
            int at = round_values ? position % group_size : t;
            take_vector(values.from(at * task.value_width), value, task.value_width, round_values);
        }
    }
    __syncthreads();
    if (!task.cache.keys.data) return;
    store_vectors<true>(task, span, keys);
    store_vectors<false>(task, span, values);
    store_sinks(task, span, task.key, task.value);
    if (!task.keep) return;
    __syncthreads();  // the full block has been read
    keep_vectors(task, span);
}

__global__ void keep_recent_kernel(DeviceStore task, const Span *spans) {
    wait_for_previous();
    let_next_start();
    Span span = spans[blockIdx.x];
    if (span.position / group_size == (span.end - 1) / group_size) keep_vectors(task, span);
}

// `spans` are on the card, `count` of them, each of at most `most` positions.
inline void rope_and_store(const Device &device, const DeviceStore &task, const Span *spans, int count, int most) {
    int room = task.cache.recent_keys.data || task.cache.recent_values.data ? group_size : most;
    size_t bytes = shared_size(room * task.heads.width * sizeof(float));
    bytes += shared_size(room * task.value_width * sizeof(float));
    launch(device, {dim3(count, task.heads.kv), 128, bytes}, rope_and_store_kernel, task, spans, room);
}

// After all queries of a pass of many tokens have read.
inline void keep_recent(const Device &device, const DeviceStore &task, const Span *spans, int count) {
    launch(device, {dim3(count, task.heads.kv), 128}, keep_recent_kernel, task, spans);
}
#endif

// ---- Rung 1: the equation ----------------------------------------------------------------------------------

// All tokens of one sequence at once, from keys and values that were just computed; there is no cache. Reads K and V
// once for each query head, keeps a score per visible position.
inline void attend_plain(float *out,           // (tokens, query_heads, D)
                         const float *query,   // (tokens, query_heads, D), rotated
                         const float *keys,    // (tokens, kv_heads, D), rotated
                         const float *values,  // (tokens, kv_heads, D)
                         const Heads &heads, int tokens, const Visible &visible,
                         const float *shift_turn) {  // (tokens, D): angles by which a token's sinks move; or nullptr
    int width = heads.width;
    float factor = 1 / std::sqrt((float)width);
    std::vector<float> weight(tokens), moved(width);
#pragma omp for schedule(dynamic) nowait
    for (int64_t item = 0; item < (int64_t)tokens * heads.query; item++) {
        int position = (int)(item / heads.query), kv_head = heads.kv_head((int)(item % heads.query));
        int first = visible.first(position), sinks = visible.dropped(position) ? visible.sinks : 0;
        auto row = [&](const float *rows, int t) { return rows + ((size_t)t * heads.kv + kv_head) * width; };
        auto for_each_visible = [&](auto use) {
            for (int t = 0; t < sinks; t++) use(t);
            for (int t = first; t <= position; t++) use(t);
        };

        float most = -std::numeric_limits<float>::infinity(), total = 0;
        for_each_visible([&](int t) {
            const float *key = row(keys, t);
            if (t < sinks) {
                rotate(moved.data(), key, shift_turn + (size_t)position * width, width);
                key = moved.data();
            }
            weight[t] = factor * dot(query + item * width, key, width);
            most = std::max(most, weight[t]);
        });
        for_each_visible([&](int t) { total += weight[t] = std::exp(weight[t] - most); });

        std::fill(out + item * width, out + (item + 1) * width, 0.0f);
        for_each_visible([&](int t) { axpy(out + item * width, weight[t] / total, row(values, t), width); });
    }
}

// What one query head knows after some splits. Unnormalised: the attention output is values / sum.
struct Partial {
    float most = -std::numeric_limits<float>::infinity();  // largest score
    float sum = 0;                                         // of e^(score - most)
};

#ifdef HAS_CUDA
// ---- One number of the cache, on the GPU -------------------------------------------------------------------

// Keys and values of one sequence, layer and KV head, one number at a time, as the query at position `reader` sees
// them. Where a format has blocks of 32 positions, the reader's own block is read at f16; all of it that is visible
// must have been stored there.
struct CachedHead {
    const CacheView &cache;
    int layer, sequence, kv_head, reader;

    __device__ bool recent(int t) const { return t / group_size == reader / group_size; }
    __device__ const char *row(const CacheRows &side, int t) const {
        return side.at(layer, cache.row_of(sequence, t), kv_head);
    }
    __device__ float recent_number(const CacheRows &side, int t, int channel) const {
        return F16::number(side.at(layer, (int64_t)sequence * group_size + t % group_size, kv_head), channel);
    }
    // Number `channel` of the key at position t; `format` is the one of type_k.
    template <class Format>
    __device__ float key(const Format &, int t, int channel) const {
        if constexpr (Format::key_groups) {
            if (recent(t)) return recent_number(cache.recent_keys, t, channel);
            int width = cache.keys.width, holder = holder_of<Format, true>(t, channel, width);
            return Format::group(row(cache.keys, holder), channel % Format::groups(width)).number(t % group_size);
        } else {
            return Format::number(row(cache.keys, t), channel);
        }
    }
    // The same of the value; `format` is the one of type_v.
    template <class Format>
    __device__ float value(const Format &, int t, int channel) const {
        if constexpr (Format::key_groups)
            if (recent(t)) return recent_number(cache.recent_values, t, channel);
        return Format::number(row(cache.values, t), channel);
    }
};

// ---- Decoding on the GPU, number by number -----------------------------------------------------------------
//
// The queries of single rows over their cached positions. These are cut into splits, one for a block of threads
// (Dao et al. 2023, Flash-Decoding), whose partial results a second kernel merges from the first to the last. The
// number of splits is fixed, so a row has the same bits alone and in company; how long they are is computed from the
// row's position, so that a captured graph can be replayed at the next one.
//
// Scores are counted in powers of two: score = log2(e) q . k / sqrt(D), and a weight is 2^(score - most).

constexpr int batch_heads = 8;   // query heads of a group that share one read of the cache
constexpr int least_split = 64;  // positions: shorter ones cost more to merge than they save
constexpr int attend_threads = 128;

// Partial results of a pass. Part 0 is that of the sinks, part 1 the first split.
struct Parts {
    Partial *partials;  // (row, query head, part)
    float *values;      // (row, query head, part, value_width)
    int splits, value_width;
    HOST_DEVICE int count() const { return splits + 1; }
    HOST_DEVICE size_t index(size_t query_head, int part) const { return query_head * count() + part; }
};

// The memory of parts, enough for any pass of a cache.
struct DeviceScratch {
    int splits = 0, value_width = 0;
    DeviceArray<Partial> partials;
    DeviceArray<float> values;
    Parts parts() const { return {partials.data(), values.data(), splits, value_width}; }
};

HOST_DEVICE inline int batches_of(const Heads &heads) { return (heads.group() + batch_heads - 1) / batch_heads; }

// For passes of up to `count` rows, of sequences of up to `capacity` visible positions. There are as many splits as let
// a single sequence fill the card, `resident` blocks on a multiprocessor. Allocates: not while a graph is captured.
inline void prepare_scratch(const Device &device, DeviceScratch &scratch, const Heads &heads, int value_width,
                            int count, int64_t capacity) {
    constexpr int resident = 3;
    int64_t fill = device.multiprocessors() * resident / (heads.kv * batches_of(heads));
    int64_t most = (capacity + group_size - 1 + least_split - 1) / least_split;
    scratch.splits = (int)std::max<int64_t>(1, std::min(fill, most));
    scratch.value_width = value_width;
    size_t parts = (size_t)count * heads.query * scratch.parts().count();
    scratch.partials.resize(device, parts);
    scratch.values.resize(device, parts * value_width);
}

// The positions that a row's query sees, cut into at most so many splits; cuts are at multiples of 32.
struct Splits {
    int first, end, origin, length, used;
    __device__ Splits(const Visible &visible, int position, int splits)
        : first(visible.first(position)), end(position + 1), origin(first / group_size * group_size) {
        int even = (end - origin + splits - 1) / splits;
        length = max(least_split, (even + group_size - 1) / group_size * group_size);
        used = (end - origin + length - 1) / length;
    }
    __device__ int begin_of(int split) const { return max(first, origin + split * length); }
    __device__ int end_of(int split) const { return min(end, origin + (split + 1) * length); }
};

// The query heads of a block: batch `i` of those of all groups, up to 8 that read one KV head.
struct HeadBatch {
    int kv_head, first, count;
    __device__ HeadBatch(const Heads &heads, int i) {
        int begin = i % batches_of(heads) * batch_heads;
        kv_head = i / batches_of(heads);
        first = kv_head * heads.group() + begin;
        count = min(batch_heads, heads.group() - begin);
    }
};

// Number `channel` of sink i's key, turned to where the query of `head` sees it.
__device__ inline float sink_key(const DeviceAttention &task, const CachedHead &head, int i, int channel) {
    int half = task.heads.width / 2, shift = task.visible.shift(head.reader);
    int64_t row = task.sinks_turned ? i : (int64_t)head.sequence * task.cache.sinks + i;
    const float *key = (const float *)task.cache.sink_keys.at(task.layer, row, head.kv_head);
    float sine, cosine, other = channel < half ? -key[channel + half] : key[channel - half];
    sincosf(rope_angle(task.sinks_turned ? shift : shift + i, task.frequencies[channel % half]), &sine, &cosine);
    return key[channel] * cosine + other * sine;
}

__device__ inline float sink_value(const DeviceAttention &task, const CachedHead &head, int i, int channel) {
    int64_t row = task.sinks_turned ? i : (int64_t)head.sequence * task.cache.sinks + i;
    return ((const float *)task.cache.sink_values.at(task.layer, row, head.kv_head))[channel];
}

// What a block of threads knows of its query heads.
struct HeadsInShared {
    int key_width, value_width;
    Shared<float> query;            // (batch_heads, key_width)
    Shared<float> weights;          // (batch_heads, 32): first the scores of a tile of positions
    Shared<float> most, sum, fade;  // (batch_heads); fade: what becomes of earlier weights as `most` grows
    Shared<float> values;           // (batch_heads, value_width)
    __device__ HeadsInShared(int key_width, int value_width) : key_width(key_width), value_width(value_width) {
        SharedMemory memory;
        query = memory.take<float>(batch_heads * key_width);
        weights = memory.take<float>(batch_heads * warp_size);
        most = memory.take<float>(batch_heads);
        sum = memory.take<float>(batch_heads);
        fade = memory.take<float>(batch_heads);
        values = memory.take<float>(batch_heads * value_width);
    }
    static size_t bytes(int key_width, int value_width) {
        size_t all = 0;
        for (int numbers : {key_width, warp_size, 1, 1, 1, value_width})
            all += shared_size(batch_heads * numbers * sizeof(float));
        return all;
    }
};

// weights = the scores of positions [begin, begin + count), a position for each warp in turn.
template <class Key>
__device__ void score_tile(const HeadsInShared &heads, int begin, int count, Key key) {
    float factor = 1.44269504f / sqrtf((float)heads.key_width);
    for (int i = warp_id(); i < count; i += blockDim.x / warp_size) {
        float scores[batch_heads] = {};
        for (int c = lane_id(); c < heads.key_width; c += warp_size) {
            float number = key(begin + i, c);
            UNROLL for (int h = 0; h < batch_heads; h++) scores[h] += heads.query[h * heads.key_width + c] * number;
        }
        UNROLL for (int h = 0; h < batch_heads; h++) {
            float score = factor * warp_sum(scores[h]);
            if (lane_id() == h) heads.weights[h * warp_size + i] = score;
        }
    }
}

// Scores become weights: online softmax (Milakov and Gimelshein 2018), a warp for each head, a lane for each position.
__device__ inline void softmax_tile(const HeadsInShared &heads, int count) {
    for (int h = warp_id(); h < batch_heads; h += blockDim.x / warp_size) {
        bool there = lane_id() < count;
        float score = there ? heads.weights[h * warp_size + lane_id()] : -INFINITY, before = heads.most[h];
        float most = fmaxf(before, warp_max(score)), weight = there ? exp2_fast(score - most) : 0;
        float fade = exp2_fast(before - most), sum = heads.sum[h] * fade + warp_sum(weight);
        heads.weights[h * warp_size + lane_id()] = weight;
        __syncwarp();
        if (lane_id() == 0) heads.most[h] = most, heads.sum[h] = sum, heads.fade[h] = fade;
    }
}

// values += the weighted values of positions [begin, begin + count), a channel for each thread in turn.
template <class Value>
__device__ void add_tile(const HeadsInShared &heads, int begin, int count, Value value) {
    for (int c = threadIdx.x; c < heads.value_width; c += blockDim.x) {
        float sums[batch_heads];
        UNROLL for (int h = 0; h < batch_heads; h++) sums[h] = heads.values[h * heads.value_width + c] * heads.fade[h];
        for (int i = 0; i < count; i++) {
            float number = value(begin + i, c);
            UNROLL for (int h = 0; h < batch_heads; h++) sums[h] += heads.weights[h * warp_size + i] * number;
        }
        UNROLL for (int h = 0; h < batch_heads; h++) heads.values[h * heads.value_width + c] = sums[h];
    }
}

// score(begin, count) and add(begin, count) for the positions [begin, end), 32 at a time.
template <class Score, class Add>
__device__ void attend_tiles(const HeadsInShared &heads, int begin, int end, Score score, Add add) {
    for (int tile = begin; tile < end; tile += warp_size) {
        int count = min(warp_size, end - tile);
        score(tile, count);
        __syncthreads();
        softmax_tile(heads, count);
        __syncthreads();
        add(tile, count);
        __syncthreads();
    }
}

__device__ inline void begin_heads(const HeadsInShared &heads, const DeviceAttention &task, const HeadBatch &batch,
                                   int row) {
    const float *query = task.query + ((size_t)row * task.heads.query + batch.first) * heads.key_width;
    for (int i = threadIdx.x; i < batch_heads * heads.key_width; i += blockDim.x)
        heads.query[i] = i < batch.count * heads.key_width ? query[i] : 0;
    for (int i = threadIdx.x; i < batch_heads * heads.value_width; i += blockDim.x) heads.values[i] = 0;
    if (threadIdx.x < batch_heads) heads.most[threadIdx.x] = -INFINITY, heads.sum[threadIdx.x] = 0;
    __syncthreads();
}

__device__ inline void store_part(const Parts &to, const HeadsInShared &heads, size_t query_head, int count, int part) {
    int width = heads.value_width;
    for (int i = threadIdx.x; i < count * width; i += blockDim.x)
        to.values[to.index(query_head + i / width, part) * width + i % width] = heads.values[i];
    if ((int)threadIdx.x < count) {
        Partial &partial = to.partials[to.index(query_head + threadIdx.x, part)];
        partial.most = heads.most[threadIdx.x];
        partial.sum = heads.sum[threadIdx.x];
    }
}

// A block for each part from `first_part` on, for each batch of query heads and each row.
__global__ void attend_plain_kernel(DeviceAttention task, Parts to, const Span *rows, int first_part) {
    HeadsInShared heads(task.heads.width, to.value_width);
    wait_for_previous();
    let_next_start();
    Span row = rows[blockIdx.z];
    HeadBatch batch(task.heads, blockIdx.y);
    Splits splits(task.visible, row.position, to.splits);
    int part = first_part + blockIdx.x, sinks = task.visible.dropped(row.position) ? task.visible.sinks : 0;
    int begin = part == 0 ? 0 : splits.begin_of(part - 1), end = part == 0 ? sinks : splits.end_of(part - 1);
    if (begin >= end) return;
    begin_heads(heads, task, batch, row.row);
    CachedHead head = {task.cache, task.layer, row.sequence, batch.kv_head, row.position};
    if (part == 0) {
        auto key = [&](int i, int c) { return sink_key(task, head, i, c); };
        auto value = [&](int i, int c) { return sink_value(task, head, i, c); };
        auto score = [&](int begin, int count) { score_tile(heads, begin, count, key); };
        auto add = [&](int begin, int count) { add_tile(heads, begin, count, value); };
        attend_tiles(heads, begin, end, score, add);
    } else {
        auto score = [&](int begin, int count) {
            task.cache.type_k.visit([&](auto format) {
                score_tile(heads, begin, count, [&](int t, int c) { return head.key(format, t, c); });
            });
        };
        auto add = [&](int begin, int count) {
            task.cache.type_v.visit([&](auto format) {
                add_tile(heads, begin, count, [&](int t, int c) { return head.value(format, t, c); });
            });
        };
        attend_tiles(heads, begin, end, score, add);
    }
    store_part(to, heads, (size_t)blockIdx.z * task.heads.query + batch.first, batch.count, part);
}

// out = the parts of a query head together, always added up from the first to the last. A block for each query head
// and row.
__global__ void merge_parts_kernel(DeviceAttention task, Parts from, const Span *rows) {
    wait_for_previous();
    let_next_start();
    Span row = rows[blockIdx.y];
    int width = from.value_width, head = blockIdx.x, end = 1 + Splits(task.visible, row.position, from.splits).used;
    int begin = task.visible.sinks > 0 && task.visible.dropped(row.position) ? 0 : 1;
    size_t at = from.index((size_t)blockIdx.y * task.heads.query + head, 0);
    float most = -INFINITY;
    for (int part = begin + lane_id(); part < end; part += warp_size) most = fmaxf(most, from.partials[at + part].most);
    most = warp_max(most);
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float sum = 0, value = 0;
        for (int part = begin; part < end; part++) {
            const Partial &partial = from.partials[at + part];
            float factor = exp2_fast(partial.most - most);
            sum += partial.sum * factor;
            value += from.values[(at + part) * width + c] * factor;
        }
        task.out[((size_t)row.row * task.heads.query + head) * width + c] = value / sum;
    }
}

// attend() for single rows: rows[0, count) on the card, each with the row of the pass, sequence and position of a query
// whose key and value have been stored.
//
// Where the CPU's result is within a bound of the equation (tests/reference.h), so is this one, within the same: its
// sums are shorter chains.
inline void attend_rows_plain(const Device &device, DeviceScratch &scratch, const DeviceAttention &task,
                              const Span *rows, int count) {
    Parts parts = scratch.parts();
    int first = task.visible.sinks > 0 ? 0 : 1;
    dim3 blocks(parts.count() - first, task.heads.kv * batches_of(task.heads), count);
    size_t shared_bytes = HeadsInShared::bytes(task.heads.width, parts.value_width);
    launch(device, {blocks, attend_threads, shared_bytes}, attend_plain_kernel, task, parts, rows, first);
    launch(device, {dim3(task.heads.query, count), attend_threads}, merge_parts_kernel, task, parts, rows);
}
#endif

// ---- Rung 2: over cached rows, in splits -------------------------------------------------------------------
//
// Three changes. A cached row is read once for all query heads of its group, and for several tokens of a chunk, in
// the form in which it is stored. The positions are cut into splits of fixed length, each with a softmax of its own:
// partial results (maximum, sum, weighted values) that are then merged (Milakov and Gimelshein 2018, online softmax;
// Dao et al. 2023, Flash-Decoding), so that threads can share one long sequence. And the merge always goes from
// the first split to the last, so the bits depend neither on the threads nor on what else is in the batch.
//
// Measured, the whole pass over a prompt of SmolLM2-135M's shape in bf16, 2 threads (llm generate --cache none and
// contiguous, -n 0): 512 tokens 0.39 -> 0.30 s, 2,048 tokens 4.9 -> 1.7 s.

constexpr int split_positions = 256;
constexpr int tile_queries = 32;  // query vectors that share a read of the cache; their scores stay in the L2

// The rows of a pass as spans of at most `most` positions; with `blocks` a span lies in one block of 32 positions. A
// sequence's rows come one after another.
inline std::vector<Span> spans_of(const int *sequences, const int *positions, int count, int most, bool blocks) {
    std::vector<Span> spans;
    for (int begin = 0, end; begin < count; begin = end) {
        for (end = begin + 1; end < count && sequences[end] == sequences[begin];) end++;
        int first = positions[begin], last = first + end - begin;
        for (int t = first, size; t < last; t += size) {
            size = std::min(most, last - t);
            if (blocks) size = std::min(size, group_size - t % group_size);
            spans.push_back({begin + t - first, size, sequences[begin], t, first, last});
        }
    }
    return spans;
}

inline int splits_of(const Span &tile) { return (tile.position + tile.count - 1) / split_positions + 1; }

// (a, a_values) becomes the partial result of both stretches of positions.
inline void merge(Partial &a, float *a_values, const Partial &b, const float *b_values, int width) {
    if (b.sum == 0) return;  // nothing visible there
    if (a.sum == 0) {
        a = b;
        std::copy(b_values, b_values + width, a_values);
        return;
    }
    float most = std::max(a.most, b.most), a_factor = std::exp(a.most - most), b_factor = std::exp(b.most - most);
    a = {most, a.sum * a_factor + b.sum * b_factor};
    for (int i = 0; i < width; i++) a_values[i] = a_values[i] * a_factor + b_values[i] * b_factor;
}

// Queries and Vecs of channels whose sums stay in registers, of which there are 32 or 16.
constexpr int weigh_queries = lanes == 16 ? 4 : 3;
constexpr int weigh_vecs = 4;

// values[q * stride + channel ..] += sum over rows r of weights[q * split_positions + r] * row r, for `Vecs` Vecs of
// channels of `Queries` queries: each row is decoded once for all of them.
template <int Queries, int Vecs, class Format>
inline void weigh_tile(float *values, size_t stride, const float *weights, StoredRows<Format> rows, int row_count) {
    Vec sums[Queries][Vecs];
    for (int q = 0; q < Queries; q++)
        for (int c = 0; c < Vecs; c++) sums[q][c] = load(values + q * stride + c * lanes);
    for (int r = 0; r < row_count; r++) {
        for (int c = 0; rows.ahead && c < Vecs * lanes; c += Format::line_numbers) rows.prefetch(r, c);
        for (int c = 0; c < Vecs; c++) {
            Vec row = rows.load(r, c * lanes);
            for (int q = 0; q < Queries; q++)
                sums[q][c] = fma(set(weights[(size_t)q * split_positions + r]), row, sums[q][c]);
        }
    }
    for (int q = 0; q < Queries; q++)
        for (int c = 0; c < Vecs; c++) store(values + q * stride + c * lanes, sums[q][c]);
}

// The same for `channels` channels of any number of queries.
template <class Format>
inline void weigh(float *values, size_t stride, const float *weights, StoredRows<Format> rows, int row_count,
                  int queries, int channels) {
    int whole = channels / lanes * lanes;
    in_batches<weigh_queries>(queries, [&](auto size, int q) {
        in_batches<weigh_vecs>(channels / lanes, [&](auto vecs, int first) {
            weigh_tile<size, vecs>(values + q * stride + first * lanes, stride, weights + (size_t)q * split_positions,
                                   rows.from_channel(first * lanes), row_count);
        });
    });
    for (int q = 0; whole < channels && q < queries; q++) {
        float *to = values + q * stride + whole;
        Vec total = load_part(to, channels - whole);
        for (int r = 0; r < row_count; r++) {
            Vec weight = set(weights[(size_t)q * split_positions + r]);
            total = fma(weight, rows.load_part(r, whole, channels - whole), total);
        }
        store_part(to, total, channels - whole);
    }
}

// What is asked for while groups are read: `step` bytes for each.
struct Ahead {
    const char *start = nullptr;
    size_t step = 0;
};

// What is read at a time: the positions [begin, end) of a tile's sequence, one layer and KV head, inside the split that
// begins at `origin`. `runs` hold them, and all of the block of keys in which they begin. `ahead`: see StoredRows.
struct Stretch {
    const Cache &cache;
    const std::vector<Run> &runs;
    int layer;
    const Span &tile;
    int kv_head, origin, begin, end;
    const char *ahead;
    size_t ahead_stride;
    // Of a format with blocks, the tile's own block is not read as stored, but at f16: from here on.
    template <class Format>
    int recent() const {
        return Format::key_groups ? std::min(end, tile.position / group_size * group_size) : end;
    }
    // use(t, start, count) for each run of stored rows from position `from` up to `to`.
    template <class Use>
    void for_each_run(const CacheRows &side, int from, int to, Use use) const {
        for (const Run &run : runs) {
            int first = std::max(from, run.position), last = std::min(to, run.position + run.count);
            if (first < last) use(first, side.at(layer, run.row + first - run.position, kv_head), last - first);
        }
    }
    // What lies ahead of `count` positions from t on, to be asked for in `steps` steps.
    Ahead ahead_of(int t, int count, int steps) const {
        if (!ahead || t < begin) return {};
        return {ahead + (t - begin) * ahead_stride, count * ahead_stride / steps};
    }
    // The rows of a run that starts at position t.
    template <class Format>
    StoredRows<Format> rows(const CacheRows &side, int t, const char *start) const {
        return {start, side.stride(), ahead ? ahead + (t - begin) * ahead_stride : nullptr, ahead_stride};
    }
};

// The rows of the tile's own block, from position `from` on: use(t, rows, count) gets those that earlier passes left at
// f16, and then those of this pass.
template <class Use>
inline void for_each_recent_run(const Stretch &stretch, const CacheRows &recent, const PassVectors &vectors, int from,
                                Use use) {
    const Span &tile = stretch.tile;
    int kept = std::min(stretch.end, tile.first);
    if (from < kept) {
        const char *start = recent.at(stretch.layer, tile.sequence * group_size + from % group_size, stretch.kv_head);
        use(from, StoredRows<PlainRow<f16>>{start, recent.stride()}, kept - from);
    }
    from = std::max(from, kept);
    if (from < stretch.end) {
        const char *start = (const char *)vectors.at(tile, from, stretch.kv_head);
        use(from, StoredRows<PlainRow<float>>{start, vectors.kv_heads * vectors.width * sizeof(float)},
            stretch.end - from);
    }
}

// ---- Scales ------------------------------------------------------------------------------------------------
//
// A sum of factor * (scale * code + zero) is one of (factor * scale) * code, and one of factor * zero.

constexpr int whole_vecs(int count) { return (count + lanes - 1) / lanes * lanes; }

// scaled[q * stride + i] = factors(q)[i] * scale i, and zeros[q] = sum of factors(q)[i] * zero i, for `Queries`
// queries. `scaled` may be `factors`, and is written up to a whole Vec; `pairs` goes on to one with zeros.
template <int Queries, class Factors>
inline void fold_scales(float *scaled, size_t stride, float *zeros, Factors factors, const ScaleAndZero *pairs,
                        int count) {
    Vec totals[Queries], scale, zero;
    for (int q = 0; q < Queries; q++) totals[q] = set(0);
    for (int i = 0; i < count; i += lanes) {
        int rest = std::min(lanes, count - i);
        load_pairs(&pairs[i].scale, scale, zero);
        for (int q = 0; q < Queries; q++) {
            Vec factor = rest == lanes ? load(factors(q) + i) : load_part(factors(q) + i, rest);
            store(scaled + q * stride + i, mul(factor, scale));
            totals[q] = fma(factor, zero, totals[q]);
        }
    }
    for (int q = 0; q < Queries; q++) zeros[q] = sum(totals[q]);
}

// A row has one scale: scaled = numbers * scales, both (queries, split_positions), for the positions [begin, end) of a
// stretch, and zeros for what stands before `begin` in the same Vec.
template <class Format>
inline void scale_rows(float *scaled, const float *numbers, int queries, const CacheRows &side, const Stretch &stretch,
                       int begin, int end) {
    static_assert(Format::scale_channels >= 1 << 30, "numbers that share a scale in parts of a row are groups");
    thread_local Aligned<ScaleAndZero> pairs;
    int first = begin / lanes * lanes, at = first - stretch.origin;
    pairs.resize(split_positions + lanes);
    std::fill_n(pairs.begin(), begin - first, ScaleAndZero{});
    stretch.for_each_run(side, begin, end, [&](int t, const char *row, int count) {
        ScaleAndZero *to = &pairs[t - first];
        for (int i = 0; i < count; i++, row += side.stride()) to[i] = Format::scale_and_zero(row, 0);
    });
    std::fill_n(pairs.begin() + (end - first), lanes, ScaleAndZero{});
    in_batches<weigh_queries>(queries, [&](auto size, int q) {
        float zeros[size], *to = scaled + (size_t)q * split_positions + at;
        auto from = [&](int i) { return numbers + (size_t)(q + i) * split_positions + at; };
        fold_scales<size>(to, split_positions, zeros, from, pairs.data(), end - first);
    });
}

// ---- Groups of 32 numbers ----------------------------------------------------------------------------------
//
// Scores of a block of keys and weighted values are the same sum: over groups of 32 codes, each times a factor, for
// each query; a group is a channel at 32 positions, or 32 channels at a position. Scales go into the factors
// beforehand, 8 or 16 at a time. Predicted, against scale and zero point applied to each code: of 40 instructions for
// 32 numbers and 3 queries 8 less, and no sum in memory any more for want of a register, which was what each group
// waited for. Measured, int4, one thread of a Zen 3, 8,000 positions: 1.36 -> 1.22 ns for 8 numbers.

constexpr int group_vecs = group_size / lanes;

// sums[q][..] += by[q * stride] * the 32 codes of a group. Vec p and Vec p + group_vecs / 2 come out of the same bytes.
template <int Queries, int bits>
inline void add_codes(Vec (&sums)[Queries][group_vecs], const Packed<bits> *codes, const float *by, size_t stride) {
    for (int p = 0; p < group_vecs / 2; p++) {
        Vec low = load(codes, p), high = load(codes, p + group_vecs / 2);
        for (int q = 0; q < Queries; q++) {
            Vec factor = set(by[q * stride]);
            sums[q][p] = fma(factor, low, sums[q][p]);
            sums[q][p + group_vecs / 2] = fma(factor, high, sums[q][p + group_vecs / 2]);
        }
        by = disguise(by), codes = disguise(codes);  // read again: with 16 registers, all but 4 hold sums
    }
}

// to[q * to_stride + i] = or += zeros[q] + sum over groups g of by[q * by_stride + g] * code i of group g, for its 32
// codes and `Queries` queries; meanwhile the bytes from `ahead` on are asked for, `step` of them a group. Not inlined:
// around it, something always wanted one more register.
template <int Queries, int bits>
__attribute__((noinline)) void add_groups(Store how, float *to, size_t to_stride, const float *zeros,
                                          const Group<bits> *const *groups, int count, const float *by,
                                          size_t by_stride, const char *ahead, size_t step) {
    Vec sums[Queries][group_vecs];
    for (int q = 0; q < Queries; q++)
        for (int p = 0; p < group_vecs; p++) sums[q][p] = set(zeros[q]);
    for (int g = 0; g < count; g++, ahead += step) {
        __builtin_prefetch(ahead);
        add_codes(sums, &groups[g]->codes, by + g, by_stride);
    }
    for (int q = 0; q < Queries; q++) {
        for (int p = 0; p < group_vecs; p++) {
            float *at = to + q * to_stride + p * lanes;
            store(at, how == Store::add ? add(load(at), sums[q][p]) : sums[q][p]);
        }
    }
}

// Lists of groups that are read one after another, each with a factor for each query. In a list the first `lane` groups
// are not there.
template <class G>
struct GroupLists {
    int count = 0, lane = 0;
    std::vector<const G *> groups;  // (list, count)
    Aligned<ScaleAndZero> pairs;    // (list, padded): theirs; zeros for those that are not there
    Floats scaled;                  // (query, padded): factors times scales
    int padded() const { return whole_vecs(count); }
    void resize(int lists, int wanted, int missing) {
        count = wanted;
        lane = missing;
        if ((int)groups.size() < lists * count) groups.resize(lists * count);
        if ((int)pairs.size() < lists * padded()) pairs.resize(lists * padded());
        if ((int)scaled.size() < weigh_queries * padded()) scaled.resize(weigh_queries * padded());
        for (int list = 0; list < lists; list++) {
            std::fill_n(pairs.begin() + list * padded(), lane, ScaleAndZero{});
            std::fill_n(pairs.begin() + list * padded() + count, padded() - count, ScaleAndZero{});
        }
    }
    // Of a single list only `wanted` groups are there.
    void cut(int wanted) {
        std::fill(pairs.begin() + wanted, pairs.begin() + count, ScaleAndZero{});
        count = wanted;
    }
    void put(int list, int i, const G *group) {
        groups[list * count + i] = group;
        pairs[list * padded() + i] = group->both;
    }
};

// Calls use(n), n as a constant where rows are of 64 or 128 numbers, so that the loop over them is none.
template <class Use>
inline void with_groups(int n, Use use) {
    if (n == 2) return use(std::integral_constant<int, 2>{});
    if (n == 4) return use(std::integral_constant<int, 4>{});
    use(n);
}

// to[q * stride + i] = or += the sum over the groups g of a list of factors(q)[g] * number i of group g.
template <int Queries, class G, class Factors>
inline void add_list(Store how, float *to, size_t stride, GroupLists<G> &lists, int list, Factors factors,
                     const Ahead &ahead) {
    int padded = lists.padded(), lane = lists.lane, count = lists.count;
    const G *const *groups = &lists.groups[list * count + lane];
    float zeros[Queries];
    fold_scales<Queries>(lists.scaled.data(), padded, zeros, factors, &lists.pairs[list * padded], count);
    const char *start = ahead.start ? ahead.start : (const char *)groups[0];
    add_groups<Queries>(how, to, stride, zeros, groups, count - lane, &lists.scaled[lane], padded, start,
                        ahead.start ? ahead.step : 0);
}

// Scores of the block of keys that begins at position `begin`: a group of codes for each channel.
template <class Format>
inline void score_block(float *scores, const float *const *queries, int query_count, const Stretch &stretch,
                        int begin) {
    const CacheRows &side = stretch.cache.keys;
    thread_local GroupLists<typename Format::G> lists;
    lists.resize(1, Format::groups(side.width) * group_size, 0);
    with_groups(Format::groups(side.width), [&](auto per_row) {
        stretch.for_each_run(side, begin, begin + group_size, [&](int t, const char *row, int count) {
            for (int i = t - begin; i < t - begin + count; i++, row += side.stride())
                for (int g = 0; g < per_row; g++) lists.put(0, i * per_row + g, &Format::group(row, g));
        });
    });
    lists.cut(side.width);
    Ahead ahead = stretch.ahead_of(begin, group_size, side.width);
    in_batches<weigh_queries>(query_count, [&](auto size, int q) {
        auto factors = [&](int i) { return queries[q + i]; };
        add_list<size>(Store::set, scores + (size_t)q * split_positions, split_positions, lists, 0, factors,
                       q ? Ahead{} : ahead);
    });
}

// values (queries, width) += the weighted rows of a stretch's positions up to `end`: for each 32 channels a list of
// groups, one for each position. A position's lane in sums depends on nothing but the position.
template <class Format>
inline void weigh_groups(float *values, const float *weights, int queries, const Stretch &stretch, int end) {
    const CacheRows &side = stretch.cache.values;
    size_t width = side.width;
    int first = stretch.begin / lanes * lanes, n = Format::groups(side.width);
    thread_local GroupLists<typename Format::G> lists;
    lists.resize(n, end - first, stretch.begin - first);
    with_groups(n, [&](auto per_row) {
        stretch.for_each_run(side, stretch.begin, end, [&](int t, const char *row, int count) {
            for (int i = t - first; i < t - first + count; i++, row += side.stride())
                for (int g = 0; g < per_row; g++) lists.put(g, i, &Format::group(row, g));
        });
    });
    Ahead ahead = stretch.ahead_of(stretch.begin, end - stretch.begin, end - stretch.begin);
    for (int c = 0; c < side.width; c += group_size) {
        int channels = std::min(group_size, side.width - c);
        in_batches<weigh_queries>(queries, [&](auto size, int q) {
            auto factors = [&](int i) { return weights + (size_t)(q + i) * split_positions + first - stretch.origin; };
            auto add = [&](Store how, float *to, size_t stride) {
                add_list<size>(how, to, stride, lists, c / group_size, factors, q || c ? Ahead{} : ahead);
            };
            float *to = values + q * width + c;
            if (channels == group_size) {
                add(Store::add, to, width);
            } else {
                float part[size][group_size];
                add(Store::set, part[0], group_size);
                for (int i = 0; i < size; i++) axpy(to + i * width, 1, part[i], channels);
            }
        });
    }
}

// ---- A stretch in any format -------------------------------------------------------------------------------

// The raw scores q . k of a stretch: query q's score of position t at scores[q * split_positions + t - origin]. Of a
// block of keys all 32 are scored if one of them is visible.
inline void score_stretch(float *scores, const float *const *queries, int query_count, const Stretch &stretch,
                          const PassVectors &fresh) {
    const CacheRows &side = stretch.cache.keys;
    auto at = [&](int t) { return scores + t - stretch.origin; };
    auto score = [&](int t, auto rows, int count) {
        dots(at(t), split_positions, rows, count, queries, query_count, side.width);
    };
    auto score_stored = [&](auto format) {
        using Format = decltype(format);
        int recent = stretch.recent<Format>();
        if constexpr (Format::key_groups) {
            for (int t = stretch.begin / group_size * group_size; t < recent; t += group_size)
                score_block<Format>(at(t), queries, query_count, stretch, t);
        } else {
            stretch.for_each_run(side, stretch.begin, recent, [&](int t, const char *start, int count) {
                score(t, stretch.rows<Format>(side, t, start), count);
            });
            if constexpr (Format::scale_channels > 0)
                scale_rows<Format>(scores, scores, query_count, side, stretch, stretch.begin, recent);
        }
        for_each_recent_run(stretch, stretch.cache.recent_keys, fresh, std::max(stretch.begin, recent), score);
    };
    std::visit(score_stored, stretch.cache.type_k);
}

// values (queries, width) += the weighted rows of a stretch; weights (queries, split_positions).
inline void weigh_stretch(float *values, const float *weights, int queries, const Stretch &stretch,
                          const PassVectors &fresh) {
    const CacheRows &side = stretch.cache.values;
    auto weigh_stored = [&](auto format) {
        using Format = decltype(format);
        int recent = std::max(stretch.begin, stretch.recent<Format>());
        const float *factors = weights;
        auto weigh_rows = [&](int t, auto rows, int count) {
            weigh(values, side.width, factors + t - stretch.origin, rows, count, queries, side.width);
        };
        if constexpr (Format::key_groups) {
            if (recent > stretch.begin) weigh_groups<Format>(values, weights, queries, stretch, recent);
        } else {
            if constexpr (Format::scale_channels > 0) {
                thread_local Floats scaled;  // (queries, split_positions)
                scaled.resize((size_t)queries * split_positions);
                scale_rows<Format>(scaled.data(), weights, queries, side, stretch, stretch.begin, recent);
                factors = scaled.data();
            }
            stretch.for_each_run(side, stretch.begin, recent, [&](int t, const char *start, int count) {
                weigh_rows(t, stretch.rows<Format>(side, t, start), count);
            });
        }
        factors = weights;
        for_each_recent_run(stretch, stretch.cache.recent_values, fresh, recent, weigh_rows);
    };
    std::visit(weigh_stored, stretch.cache.type_v);
}

// The scores of a split, of which the positions [low, high) are visible, become e^(factor * score - most), and 0
// where nothing is visible. A position's lane is fixed by its place in the split: low and high do not move the sum.
inline Partial softmax_split(float *scores, int low, int high, float factor) {
    Partial partial;
    if (low >= high) {
        std::fill(scores, scores + split_positions, 0.0f);
        return partial;
    }
    const float invisible = -std::numeric_limits<float>::infinity();
    std::fill(scores, scores + low, invisible);
    std::fill(scores + high, scores + split_positions, invisible);
    Vec most = set(invisible), total = set(0);
    for (int i = 0; i < high; i += lanes) most = max(most, mul(set(factor), load(scores + i)));
    partial.most = largest(most);
    for (int i = 0; i < split_positions; i += lanes) {
        // Rounded as for the maximum: with fma(), scores of 10^10 would leave it by more than e^x can hold.
        Vec weight = exp(add(mul(set(factor), load(scores + i)), set(-partial.most)));
        store(scores + i, weight);
        total = add(total, weight);
    }
    partial.sum = sum(total);
    return partial;
}

constexpr size_t most_shared = (size_t)1 << 22;  // floats of partial results, 16 MiB, however long the context is

struct KVHeads {
    int first, count;
};

// Part 0 of a tile is that of the sinks, part 1 its first split.
struct Part {
    int tile, head_set, part;
};

// How one pass shares its attention among the threads, and the room for partial results where it must.
struct AttentionPlan {
    Heads heads;
    bool blocks = false;        // keys or values are quantized in blocks of positions
    std::vector<Span> stored;   // the rows of the pass, for store_span()
    std::vector<Span> tiles;    // the same, few enough that a tile's scores stay in the L2
    int splits = 0;             // most that a tile has
    bool share_splits = false;  // few tiles: threads take single splits, which are merged afterwards
    std::vector<Part> parts;    // those splits, and before them each tile's sinks
    int heads_together = 1;     // KV heads that a thread reads side by side
    int queries = 0, value_width = 0;
    Visible widest;                 // what the layer sees that sees most
    Floats sink_turn;               // (row, sink, D): angles of the sinks where a row's query sees them
    std::vector<Partial> partials;  // (tile, kv_head, part, query); part 0 is that of the sinks, then come the splits
    Floats values;                  // (tile, kv_head, part, query, value_width)
    int first_split(const Span &tile) const { return widest.first(tile.position) / split_positions; }
    int parts_of(const Span &tile) const { return splits_of(tile) - first_split(tile) + 1; }
    size_t index(int tile, int kv_head, int part) const {
        return (((size_t)tile * heads.kv + kv_head) * (splits + 1) + part) * queries;
    }
    int head_sets() const { return (heads.kv + heads_together - 1) / heads_together; }
    KVHeads head_set(int i) const {
        return {i * heads_together, std::min(heads_together, heads.kv - i * heads_together)};
    }
};

// `sequences` and `positions` of the rows of a pass; a sequence's rows come one after another.
inline AttentionPlan plan_attention(const int *sequences, const int *positions, int count, const Heads &heads,
                                    const Cache &cache, const std::vector<float> &frequencies, int threads) {
    AttentionPlan plan;
    plan.blocks = has_blocks(cache.type_k) || has_blocks(cache.type_v);
    plan.heads = heads;
    plan.stored = spans_of(sequences, positions, count, group_size, true);
    plan.tiles = spans_of(sequences, positions, count, std::max(1, tile_queries / heads.group()), plan.blocks);
    plan.value_width = cache.values.width;
    plan.widest = visible_of(cache.layout, 0);
    for (const Span &tile : plan.tiles) {
        plan.splits = std::max(plan.splits, splits_of(tile) - plan.first_split(tile));
        plan.queries = std::max(plan.queries, tile.count * heads.group());
    }
    // Where a row of the cache is used a few times only, memory is what counts, and all heads are read as they lie in
    // it. A large tile reads it for many queries, and its scores are to stay in the L2.
    plan.heads_together = plan.queries * heads.kv <= tile_queries ? heads.kv : 1;
    size_t room = plan.index((int)plan.tiles.size(), 0, 0);
    plan.share_splits =
        (int)plan.tiles.size() * plan.head_sets() < 4 * threads && room * plan.value_width <= most_shared;
    plan.partials.resize(plan.share_splits ? room : 0);
    plan.values.resize(plan.share_splits ? room * plan.value_width : 0);
    for (int tile = 0; plan.share_splits && tile < (int)plan.tiles.size(); tile++)
        for (int part = 0; part < plan.parts_of(plan.tiles[tile]); part++)
            for (int set = 0; set < plan.head_sets(); set++) plan.parts.push_back({tile, set, part});
    std::vector<int> sinks;
    for (int row = 0; row < count; row++)
        for (int i = 0; i < plan.widest.sinks; i++) sinks.push_back(plan.widest.shift(positions[row]) + i);
    plan.sink_turn.resize(sinks.size() * heads.width);
    rope_angles(plan.sink_turn.data(), frequencies, sinks.data(), (int)sinks.size());
    return plan;
}

// What one layer's attention reads and writes. query, key and value are of this pass.
struct AttentionTask {
    float *out;          // (rows, query_heads, value_width)
    const float *query;  // (rows, query_heads, D), rotated
    PassVectors key, value;
    const Cache &cache;
    int layer;
    Visible visible;
};

// The vector of a tile's query q, which is query head kv_head * group + q % group of its token q / group.
HOST_DEVICE inline size_t query_head(const Span &tile, int kv_head, int q, const Heads &heads) {
    int group = heads.group();
    return (size_t)(tile.row + q / group) * heads.query + kv_head * group + q % group;
}

// Where the partial results of some KV heads of a tile go: head i's, one for each query, are `step` from head i + 1's.
struct Results {
    Partial *partials;
    float *values;  // (query, width) for each partial result
    size_t step, width;
    Partial *of(int head) const { return partials + head * step; }
    float *values_of(int head) const { return values + head * step * width; }
};

// So many positions are read head by head before the next ones: all heads' rows of them, and of as many more, stay in
// the L1.
inline int positions_together(const CacheRows &side, const Precision &type) {
    int positions = split_positions / 2, least = has_blocks(type) ? group_size : tile_rows;
    while (positions > least && positions * side.stride() > 16384) positions /= 2;
    return positions;
}

// Calls use(stretch, i) for the KV heads of `some`, and for positions [begin, end) of a split in stretches that fit
// into the L1. While one stretch is computed with, the next one is asked for, line after line in the order of memory;
// while the last one is, what `then` begins with at position `after`.
//
// When each head was read alone, a third of the lines at a time, one thread of a Zen 3 got 8 GB/s out of memory that
// reads at 13, and what it waited came on top of what it computed (8,000 positions at f16: 2.1 ns for 8 numbers, 1.2 of
// them without the waiting). Predicted: the longer of the two, 1.2. Measured: 1.45; both threads 12.2 -> 9.9 ms.
template <class Use>
inline void for_each_stretch(const AttentionTask &task, const Span &tile, const CacheRows &side, int origin, int begin,
                             int end, const KVHeads &some, const CacheRows &then, int after, Use use) {
    auto row = [&](const CacheRows &of, int position) {
        return of.at(task.layer, row_of(task.cache, tile.sequence, position), 0);
    };
    bool all = some.count == side.kv_heads;
    bool keys = &side == &task.cache.keys;
    int step = positions_together(side, keys ? task.cache.type_k : task.cache.type_v);
    int last = tile.position + tile.count;
    thread_local std::vector<Run> runs;
    for (int t = begin, next; t < end; t = next) {
        next = std::min(end, (t / step + 1) * step);
        find_runs(runs, task.cache, tile.sequence, t / group_size * group_size, next);
        const CacheRows &following = next < end ? side : then;
        int position = next < end ? next : after;
        const char *ahead = all && position < last ? row(following, position) : nullptr;
        for (int i = 0; i < some.count; i++) {
            use(Stretch{task.cache, runs, task.layer, tile, some.first + i, origin, t, next, ahead,
                        following.row_bytes},
                i);
            if (ahead) ahead += step * following.row_bytes;
        }
    }
}

// One split for all queries of a tile that read some KV heads.
inline void attend_split(const Results &to, const AttentionTask &task, const Heads &heads, const Span &tile,
                         const KVHeads &some, int split) {
    const CacheRows &keys = task.cache.keys, &values = task.cache.values;
    int queries = tile.count * heads.group(), origin = split * split_positions;
    int end = std::min(origin + split_positions, tile.position + tile.count);
    int begin = std::max(origin, task.visible.first(tile.position));
    size_t of_head = (size_t)queries * split_positions;
    thread_local Floats scores;                       // (head, query, split_positions)
    thread_local std::vector<const float *> vectors;  // (head, query)
    scores.resize(some.count * of_head);
    vectors.resize(some.count * queries);
    for (int i = 0; i < some.count; i++) {
        std::fill(to.values_of(i), to.values_of(i) + queries * to.width, 0.0f);
        for (int q = 0; q < queries; q++)
            vectors[i * queries + q] = task.query + query_head(tile, some.first + i, q, heads) * heads.width;
    }
    for_each_stretch(task, tile, keys, origin, begin, end, some, values, begin, [&](const Stretch &stretch, int i) {
        score_stretch(&scores[i * of_head], &vectors[i * queries], queries, stretch, task.key);
    });
    for (int item = 0; item < some.count * queries; item++) {
        int q = item % queries, position = tile.position + q / heads.group();
        int low = std::max(0, task.visible.first(position) - origin), high = std::min(end, position + 1) - origin;
        to.of(item / queries)[q] =
            softmax_split(&scores[(size_t)item * split_positions], low, high, 1 / std::sqrt((float)heads.width));
    }
    for_each_stretch(task, tile, values, origin, begin, end, some, keys, end, [&](const Stretch &stretch, int i) {
        weigh_stretch(to.values_of(i), &scores[i * of_head], queries, stretch, task.value);
    });
}

// The sinks, for those queries of a tile between which and the sinks positions were dropped.
inline void attend_sinks(Partial *partials, float *values, const AttentionTask &task, const AttentionPlan &plan,
                         const Span &tile, int kv_head) {
    const Cache &cache = task.cache;
    const Heads &heads = plan.heads;
    int sinks = task.visible.sinks, key_width = heads.width, value_width = cache.values.width;
    thread_local Floats keys;    // (sinks, D), rotated to where the token sees them
    thread_local Floats scores;  // (sinks)
    keys.resize((size_t)sinks * key_width);
    scores.resize(sinks);
    std::fill(values, values + (size_t)tile.count * heads.group() * value_width, 0.0f);
    auto row = [&](const CacheRows &side, int i) {
        return (const float *)side.at(task.layer, (int64_t)tile.sequence * sinks + i, kv_head);
    };
    for (int q = 0; q < tile.count * heads.group(); q++) {
        int token = q / heads.group();
        partials[q] = Partial();
        if (!task.visible.dropped(tile.position + token)) continue;
        for (int i = 0; i < sinks && q % heads.group() == 0; i++) {
            const float *turn = &plan.sink_turn[((size_t)(tile.row + token) * sinks + i) * key_width];
            rotate(&keys[(size_t)i * key_width], row(cache.sink_keys, i), turn, key_width);
        }
        const float *query = task.query + query_head(tile, kv_head, q, heads) * key_width;
        for (int i = 0; i < sinks; i++) {
            scores[i] = dot(query, &keys[(size_t)i * key_width], key_width) / std::sqrt((float)key_width);
            partials[q].most = std::max(partials[q].most, scores[i]);
        }
        for (int i = 0; i < sinks; i++) {
            float weight = std::exp(scores[i] - partials[q].most);
            partials[q].sum += weight;
            axpy(values + (size_t)q * value_width, weight, row(cache.sink_values, i), value_width);
        }
    }
}

// One part of a tile. The merge always goes through them in their order.
inline void attend_part(const Results &to, const AttentionTask &task, const AttentionPlan &plan, const Span &tile,
                        const KVHeads &some, int part) {
    for (int i = 0; i < some.count && part == 0; i++)
        attend_sinks(to.of(i), to.values_of(i), task, plan, tile, some.first + i);
    if (part > 0) attend_split(to, task, plan.heads, tile, some, plan.first_split(tile) + part - 1);
}

// The results of `part` are merged into those of a tile's earlier parts.
inline void merge_part(Partial *total, float *total_values, const Partial *part, const float *part_values, int queries,
                       int width) {
    for (int q = 0; q < queries; q++)
        merge(total[q], total_values + (size_t)q * width, part[q], part_values + (size_t)q * width, width);
}

// Divides the finished sums into out (rows, query_heads, value_width).
inline void store_attention(float *out, const Partial *partials, const float *values, const Span &tile, int kv_head,
                            const Heads &heads, int value_width) {
    for (int q = 0; q < tile.count * heads.group(); q++) {
        float *to = out + query_head(tile, kv_head, q, heads) * value_width;
        for (int i = 0; i < value_width; i++) to[i] = values[(size_t)q * value_width + i] / partials[q].sum;
    }
}

// All parts of a tile and some KV heads by one thread.
inline void attend_tile(const AttentionTask &task, const AttentionPlan &plan, const Span &tile, const KVHeads &some) {
    int queries = tile.count * plan.heads.group(), width = plan.value_width, count = some.count * queries;
    thread_local std::vector<Partial> total, part;
    thread_local Floats total_values, part_values;
    total.resize(count);
    part.resize(count);
    total_values.resize((size_t)count * width);
    part_values.resize((size_t)count * width);
    Results all{total.data(), total_values.data(), (size_t)queries, (size_t)width};
    Results one{part.data(), part_values.data(), (size_t)queries, (size_t)width};
    attend_part(all, task, plan, tile, some, 0);
    int skipped = task.visible.first(tile.position) / split_positions - plan.first_split(tile);
    for (int i = 1 + skipped; i < plan.parts_of(tile); i++) {
        attend_part(one, task, plan, tile, some, i);
        merge_part(all.partials, all.values, one.partials, one.values, count, width);
    }
    for (int i = 0; i < some.count; i++)
        store_attention(task.out, all.of(i), all.values_of(i), tile, some.first + i, plan.heads, width);
}

// out = attention of the queries of a pass over the cached positions. The pass's keys and values must have been stored.
inline void attend(const AttentionTask &task, AttentionPlan &plan) {
    int kv_heads = plan.heads.kv, tiles = (int)plan.tiles.size(), width = plan.value_width;
    int sets = plan.head_sets();
    if (!plan.share_splits) {
#pragma omp for schedule(dynamic) nowait
        for (int item = 0; item < tiles * sets; item++)
            attend_tile(task, plan, plan.tiles[item / sets], plan.head_set(item % sets));
        return;
    }
    // A thread's parts follow one another in memory: each asks for the beginning of the next.
#pragma omp for schedule(static) nowait
    for (int item = 0; item < (int)plan.parts.size(); item++) {
        const Part &part = plan.parts[item];
        KVHeads some = plan.head_set(part.head_set);
        size_t at = plan.index(part.tile, some.first, part.part);
        size_t step = plan.index(part.tile, some.first + 1, part.part) - at;
        Results to{&plan.partials[at], &plan.values[at * width], step, (size_t)width};
        attend_part(to, task, plan, plan.tiles[part.tile], some, part.part);
    }
    barrier();
#pragma omp for schedule(static) nowait
    for (int item = 0; item < tiles * kv_heads; item++) {
        int kv_head = item % kv_heads, tile = item / kv_heads, queries = plan.tiles[tile].count * plan.heads.group();
        size_t total = plan.index(tile, kv_head, 0);
        for (int i = 1; i < plan.parts_of(plan.tiles[tile]); i++) {
            size_t part = plan.index(tile, kv_head, i);
            merge_part(&plan.partials[total], &plan.values[total * width], &plan.partials[part],
                       &plan.values[part * width], queries, width);
        }
        store_attention(task.out, &plan.partials[total], &plan.values[total * width], plan.tiles[tile], kv_head,
                        plan.heads, width);
    }
}

#ifdef HAS_CUDA
// ---- Rung 3: decoding on the GPU, on tensor cores ----------------------------------------------------------
//
// Decoding reads each number of the cache once, for a few queries: what counts is that memory is never idle, and that
// it costs next to nothing to decode a number. So a warp multiplies 16 positions at a time by all query heads of a
// batch on the tensor cores, straight from the registers into which they came, in two products:
//   scores (16 positions, 8 heads) = K (16, D) q      and      values (D, 8 heads) += V^T (D, 16) weights (16, 8).
// While it computes with one of K and V, the other is on its way (Dao 2023, FlashAttention-2, whose running maximum
// each warp has). Queries are in shared memory: registers are for what comes from the cache.
//
// A product takes 16-bit numbers. What rounding leaves of a query or a weight is multiplied as well: two numbers of f16
// hold one within 2^-22 of itself, of bf16 within 2^-16. Codes are exact in f16; a row's scale goes into its score or
// its weight. Numbers of groups are rounded to f16 once more, by at most 2^-11 of themselves. These are the errors of
// this rung beside those of the plain one.
//
// Which position and which channel stands where in a matrix is free, as long as both factors agree. So a lane reads
// bytes that lie side by side. Row r of 16 is position 2 (r % 8) + r / 8: so codes of keys come out of their bytes.
// With g = lane / 4 and c = lane % 4,
//   of keys     a lane has channels 8 c to 8 c + 7 of each 32, for the positions 2 g and 2 g + 1;
//   of values   it has channels 8 g to 8 g + 7 of each 64, for the positions 4 c to 4 c + 3.
//
constexpr int half_tile = 16;  // positions of a product; a tile has 32, one for each lane
constexpr int fast_warps = attend_threads / warp_size;
constexpr int f32_index = (int)Precision(F32{}).index(), f16_index = (int)Precision(F16{}).index(),
              bf16_index = (int)Precision(BF16{}).index();

// A lane's bytes of 16 keys or values as they come from memory, of heads up to `widest` channels, which is 64 or 128.
template <int widest>
struct Asked {
    uint32_t words[widest / 4];
};

__device__ inline uint32_t word_at(const char *from) { return *(const uint32_t *)from; }

__device__ inline void put(uint32_t *to, uint4 bytes) {
    to[0] = bytes.x, to[1] = bytes.y, to[2] = bytes.z, to[3] = bytes.w;
}

__device__ inline uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ inline uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

// g and c: a lane's place in the matrices of products.
__device__ inline int lane_row() { return (int)(threadIdx.x / 4 % 8); }
__device__ inline int lane_column() { return (int)(threadIdx.x % 4); }

// Rows of a tile: each lane knows where the one of its position begins.
struct LaneRows {
    const CacheRows &side;
    int width;
    int64_t offset;
    __device__ const char *of(int lane) const { return side.data + __shfl_sync(all_lanes, (long long)offset, lane); }
};

// ---- Codes ----

// Two codes as f16; they are in the lower bytes of the halves of a register. With a code in its lowest bits, 0x6400 is
// 1024 + code.
constexpr uint32_t two_ones = 0x3c003c00;
template <int largest, int divisor>
__device__ inline uint32_t f16_of_codes(const ScaledRow<int8_t, largest, divisor> &, uint32_t codes) {
    return fma_f16(codes ^ 0x64806480, two_ones, 0xe480e480);  // - 1152: the sign bit, turned round, counts 128
}
template <int largest, int divisor>
__device__ inline uint32_t f16_of_codes(const ScaledRow<fp8, largest, divisor> &, uint32_t codes) {
    return (codes << 8 & 0x80008000) | (codes << 7 & 0x3f803f80);  // divided by 256: see to_float(fp8)
}
template <int bits>
__device__ inline uint32_t f16_of_codes(const GroupedRow<bits> &, uint32_t codes) {
    return fma_f16(codes | 0x64006400, two_ones, 0xe400e400);  // - 1024
}
// Of codes in bits 4 to 7: (1024 + 16 code) / 16 - 64.
__device__ inline uint32_t f16_of_high_codes(uint32_t codes) {
    return fma_f16(codes | 0x64006400, 0x2c002c00, 0xd400d400);
}

// 8 codes of a row begin at `from`, a multiple of 2: the words that hold them, up to the last code.
__device__ inline void ask_codes(uint32_t *to, const char *from) {
    const char *words = from - ((uintptr_t)from & 2);
    to[0] = word_at(words);
    to[1] = word_at(words + 4);
    to[2] = *(const uint16_t *)(from + 6);
}

// Word i of the codes that were asked for; they begin `behind` bytes after the first word does.
__device__ inline uint32_t codes_of(const uint32_t *asked, int i, uint32_t behind) {
    return __funnelshift_r(asked[i], asked[i + 1], 8 * behind);
}

// ---- Keys ----
//
// ask_keys() starts the loads for the half of a tile that begins at `place`. key_fragment() gives the matrix of product
// i, which is 16 channels in two halves of 8 columns.

// Which channel column r of half h in product i is.
template <int widest>
struct KeyOrder {
    static constexpr int products = widest / 16, abreast = widest / 64;
    int width, groups;  // groups: of a row, where keys are quantized in blocks; else 0
    __device__ int channel(int i, int h, int r) const {
        if (groups == 0) return i / 2 * 32 + r / 2 * 8 + i % 2 * 4 + h * 2 + r % 2;
        return (i / abreast * 8 + r) * groups + i % abreast * 2 + h;
    }
    __device__ bool has(int i, int h, int r) const {
        return channel(i, h, r) < width && (groups == 0 || i % abreast * 2 + h < groups);
    }
};

// The first of a lane's 8 channels of each 32. Those behind the last one are read as the last: their queries are 0.
__device__ inline int key_channel(int stretch, int width) { return min(32 * stretch + lane_column() * 8, width - 8); }

template <int widest, class Number>
__device__ inline void ask_keys(Asked<widest> &asked, const PlainRow<Number> &, const LaneRows &rows, int place) {
    UNROLL for (int r = 0; r < 2; r++) {
        const char *from = rows.of(place + lane_row() * 2 + r);
        UNROLL for (int s = 0; s < widest / 32; s++) {
            uint4 bytes = load_once(from + key_channel(s, rows.width) * sizeof(Number));
            put(&asked.words[widest / 8 * r + 4 * s], bytes);
        }
    }
}
template <int widest, class Number>
__device__ inline void key_fragment(uint32_t (&b)[2], const PlainRow<Number> &, const Asked<widest> &asked, int i,
                                    int r) {
    UNROLL for (int h = 0; h < 2; h++) b[h] = asked.words[widest / 8 * r + 2 * i + h];
}

template <int widest, class Code, int largest, int divisor>
__device__ inline void ask_keys(Asked<widest> &asked, const ScaledRow<Code, largest, divisor> &format,
                                const LaneRows &rows, int place) {
    UNROLL for (int r = 0; r < 2; r++) {
        const char *from = (const char *)format.codes(rows.of(place + lane_row() * 2 + r));
        UNROLL for (int s = 0; s < widest / 32; s++)
            ask_codes(&asked.words[3 * (widest / 32 * r + s)], from + key_channel(s, rows.width));
        asked.words[3 * (widest / 16) + r] = (uintptr_t)from & 2;
    }
}
template <int widest, class Code, int largest, int divisor>
__device__ inline void key_fragment(uint32_t (&b)[2], const ScaledRow<Code, largest, divisor> &format,
                                    const Asked<widest> &asked, int i, int r) {
    const uint32_t *eight = &asked.words[3 * (widest / 32 * r + i / 2)];
    uint32_t codes = codes_of(eight, i % 2, asked.words[3 * (widest / 16) + r]);
    b[0] = f16_of_codes(format, __byte_perm(codes, 0, 0x4140));
    b[1] = f16_of_codes(format, __byte_perm(codes, 0, 0x4342));
}

// A whole block, whatever `place` is. Column g of a matrix is a group of row g, g + 8, ..., of which a lane asks for
// bytes 4 c to 4 c + 3 of the codes, and for scale and zero point. Where a code has 2 bits, those that 4 bits would
// have there: positions t and t + 16 in byte t.
template <int widest, int bits>
__device__ inline void ask_keys(Asked<widest> &asked, const GroupedRow<bits> &format, const LaneRows &rows, int) {
    constexpr int columns = widest / 8, abreast = widest / 32;
    int first = lane_column() * 4 % Packed<bits>::size, groups = format.groups(rows.width);
    UNROLL for (int i = 0; i < columns; i += abreast) {
        int row = i / abreast * 8 + lane_row();
        int there = rows.width == widest ? abreast : min(rows.width - row * groups, groups);  // groups that hold keys
        const char *from = rows.of(row);
        UNROLL for (int j = 0; j < abreast; j++) {
            const auto &group = format.group(from, j);
            asked.words[i + j] = j < there ? word_at((const char *)group.codes.bytes + first) : 0;
            asked.words[columns + i + j] = j < there ? word_at((const char *)&group.both) : 0;
        }
    }
}

// The matrices of product i for all four eighths of a block. Transposed, a lane has bytes 2 g and 2 g + 1 of two
// channels, and in them the positions 2 g, 2 g + 16, 2 g + 1 and 2 g + 17.
template <int widest, int bits>
__device__ inline void block_fragments(uint32_t (&b)[4][2], const GroupedRow<bits> &format, const Asked<widest> &asked,
                                       int i) {
    constexpr uint32_t mask = Packed<bits>::largest;
    int c = lane_column(), shift = bits * (4 * c / Packed<bits>::size);
    UNROLL for (int h = 0; h < 2; h++) {
        uint32_t codes = transpose_matrix(asked.words[2 * i + h] >> shift & mask * 0x11111111);
        uint32_t both = asked.words[widest / 8 + 2 * i + h];
        uint32_t even = __shfl_sync(all_lanes, both, 8 * c), odd = __shfl_sync(all_lanes, both, 8 * c + 4);
        uint32_t scales = low_halves(even, odd), zeros = high_halves(even, odd);
        UNROLL for (int r = 0; r < 2; r++) {
            uint32_t low = f16_of_codes(format, codes >> 8 * r & mask * 0x00010001);
            uint32_t high = f16_of_high_codes(codes >> 8 * r & mask * 0x00100010);
            b[r][h] = fma_f16(low, scales, zeros);
            b[2 + r][h] = fma_f16(high, scales, zeros);
        }
    }
}

// ---- Values ----
//
// ask_values() starts the loads for half a tile, four positions in a lane; value_pair() gives, of those at `k` and
// k + 2, channel value_channel(i, g) and the next one.

__device__ inline int value_channel(int i, int g) { return i / 4 * 64 + 8 * g + i % 4 * 2; }

// The first of a lane's 8 channels of each 64. Behind the last one the last ones are read, for nobody.
__device__ inline int first_channel(int stretch, int width) {
    return min(value_channel(4 * stretch, lane_row()), width - 8);
}

template <int widest, class Number>
__device__ inline void ask_values(Asked<widest> &asked, const PlainRow<Number> &, const LaneRows &rows, int place) {
    UNROLL for (int k = 0; k < 4; k++) {
        const char *from = rows.of(place + lane_column() * 4 + k);
        UNROLL for (int s = 0; s < widest / 64; s++) {
            uint4 bytes = load_once(from + first_channel(s, rows.width) * sizeof(Number));
            put(&asked.words[4 * (widest / 64 * k + s)], bytes);
        }
    }
}
template <int widest, class Number>
__device__ inline void value_pair(uint32_t (&pair)[2], const PlainRow<Number> &, const Asked<widest> &asked, int i,
                                  int k) {
    uint32_t a = asked.words[widest / 16 * k + i], b = asked.words[widest / 16 * (k + 2) + i];
    pair[0] = low_halves(a, b), pair[1] = high_halves(a, b);
}

template <int widest, class Code, int largest, int divisor>
__device__ inline void ask_values(Asked<widest> &asked, const ScaledRow<Code, largest, divisor> &format,
                                  const LaneRows &rows, int place) {
    UNROLL for (int k = 0; k < 4; k++) {
        const char *from = (const char *)format.codes(rows.of(place + lane_column() * 4 + k));
        UNROLL for (int s = 0; s < widest / 64; s++)
            ask_codes(&asked.words[3 * (widest / 64 * k + s)], from + first_channel(s, rows.width));
        asked.words[3 * (widest / 16) + k] = (uintptr_t)from & 2;
    }
}
template <int widest, class Code, int largest, int divisor>
__device__ inline void value_pair(uint32_t (&pair)[2], const ScaledRow<Code, largest, divisor> &format,
                                  const Asked<widest> &asked, int i, int k) {
    auto word = [&](int k) {
        const uint32_t *eight = &asked.words[3 * (widest / 64 * k + i / 4)];
        return codes_of(eight, i % 4 / 2, asked.words[3 * (widest / 16) + k]);
    };
    uint32_t codes = i % 2 ? high_halves(word(k), word(k + 2)) : low_halves(word(k), word(k + 2));
    UNROLL for (int odd = 0; odd < 2; odd++) pair[odd] = f16_of_codes(format, codes >> 8 * odd & 0x00ff00ff);
}

template <int widest, int bits>
__device__ inline void ask_values(Asked<widest> &asked, const GroupedRow<bits> &format, const LaneRows &rows,
                                  int place) {
    UNROLL for (int k = 0; k < 4; k++) {
        const char *from = rows.of(place + lane_column() * 4 + k);
        UNROLL for (int s = 0; s < widest / 64; s++) {
            int channel = first_channel(s, rows.width);
            const auto &group = format.group(from, channel / group_size);
            const char *codes = (const char *)group.codes.bytes + channel % group_size % Packed<bits>::size;
            uint32_t *to = &asked.words[3 * (widest / 64 * k + s)];
            to[0] = word_at(codes);
            to[1] = word_at(codes + 4);
            to[2] = word_at((const char *)&group.both);
        }
    }
}
template <int widest, int bits>
__device__ inline void value_pair(uint32_t (&pair)[2], const GroupedRow<bits> &format, const Asked<widest> &asked,
                                  int i, int k) {
    const uint32_t *a = &asked.words[3 * (widest / 64 * k + i / 4)];
    const uint32_t *b = &asked.words[3 * (widest / 64 * (k + 2) + i / 4)];
    uint32_t codes = i % 2 ? high_halves(a[i % 4 / 2], b[i % 4 / 2]) : low_halves(a[i % 4 / 2], b[i % 4 / 2]);
    int shift = bits * (value_channel(0, lane_row()) % group_size / Packed<bits>::size);
    UNROLL for (int odd = 0; odd < 2; odd++) {
        uint32_t two = f16_of_codes(format, codes >> (shift + 8 * odd) & Packed<bits>::largest * 0x00010001u);
        pair[odd] = fma_f16(two, low_halves(a[2], b[2]), high_halves(a[2], b[2]));
    }
}

// ---- Queries and results of a warp ----

// The type of 16-bit numbers in which stored ones are multiplied.
template <class Format>
using Factor = std::conditional_t<std::is_same_v<Format, BF16>, bf16, f16>;

template <class Number>
__device__ inline float half_of(uint32_t two, int i) {
    return to_float(Number{(uint16_t)(two >> 16 * i)});
}

// Two numbers, and what rounding left of them.
template <class Number>
__device__ inline void pack_both(uint32_t &rounded, uint32_t &rest, float first, float second) {
    rounded = pack<Number>(first, second);
    rest = pack<Number>(first - half_of<Number>(rounded, 0), second - half_of<Number>(rounded, 1));
}

// The largest power of two that is not above x > 0, and one over a power of two.
__device__ inline float power_below(float x) { return bit_cast<float>(bit_cast<uint32_t>(x) & 0x7f800000); }
__device__ inline float inverse(float power) { return bit_cast<float>(0x7f000000 - bit_cast<uint32_t>(power)); }

// The queries of a batch as the products' left factors: row g is query head g, and row g + 8 what rounding left of it.
// All warps share them.
template <int widest>
struct FastQueries {
    using Order = KeyOrder<widest>;
    Shared<uint4> numbers;  // (rows or blocks of keys, product, lane)
    Shared<float> factors;  // (batch_heads): of scores
    __device__ explicit FastQueries(SharedMemory &memory)
        : numbers(memory.take<uint4>(2 * Order::products * warp_size)), factors(memory.take<float>(batch_heads)) {}
    static size_t bytes() {
        return shared_size(2 * Order::products * warp_size * sizeof(uint4)) + shared_size(batch_heads * sizeof(float));
    }
    // A query is multiplied by a power of two, so that its largest number is 2^13 or somewhat more: f16 has no smaller
    // ones than 2^-24.
    template <class Number>
    __device__ void take(Number, const float *queries, int count, const Order &order) const {
        int g = lane_row(), c = lane_column();
        const float *query = queries + g * order.width;
        float largest = 0x1p-112f;
        for (int i = c; g < count && i < order.width; i += 4) largest = fmaxf(largest, fabsf(query[i]));
        for (int lane = 1; lane < 4; lane *= 2) largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, lane));
        float power = power_below(largest), up = inverse(power) * 0x1p13f;
        for (int i = warp_id(); i < Order::products; i += fast_warps) {
            auto number = [&](int h, int r) {
                return g < count && order.has(i, h, r) ? query[order.channel(i, h, r)] * up : 0;
            };
            uint4 four;
            pack_both<Number>(four.x, four.y, number(0, 2 * c), number(0, 2 * c + 1));
            pack_both<Number>(four.z, four.w, number(1, 2 * c), number(1, 2 * c + 1));
            numbers[((order.groups > 0) * Order::products + i) * warp_size + lane_id()] = four;
        }
        if (warp_id() == 0 && c == 0) factors[g] = power * 0x1p-13f * 1.44269504f / sqrtf((float)order.width);
    }
    // Those of product i.
    template <class Format>
    __device__ void fragment(uint32_t (&a)[4], const Format &, int i) const {
        put(a, numbers[(Format::key_groups * Order::products + i) * warp_size + lane_id()]);
    }
};

// Calls use(format), of f16 where a block is not full yet; not of f32, which has no place in a product.
template <class Use>
__device__ inline void visit_fast(const OnDevice<Precision> &stored, bool recent, Use use) {
    OnDevice<Precision> type = stored;
    if (recent) type.index = f16_index;
    type.visit([&](auto format) {
        if constexpr (!std::is_same_v<decltype(format), F32>) use(format);
    });
}

// 32 positions of a row's sequence, of which [low, high) are visible.
struct FastTile {
    int begin, low, high;
    int64_t key_offset, value_offset;  // of the position `begin` + lane
    f16 key_scale, value_scale;        // of its whole rows; 1 where they have none
    bool recent_keys, recent_values;   // read at f16: their block is not full yet

    __device__ LaneRows keys(const CacheView &cache, int width) const {
        return {recent_keys ? cache.recent_keys : cache.keys, width, key_offset};
    }
    __device__ LaneRows values(const CacheView &cache, int width) const {
        return {recent_values ? cache.recent_values : cache.values, width, value_offset};
    }
    // What is not visible is not read: a visible position stands in for it, and has no weight there. But a block of
    // keys is in all its rows.
    __device__ void find(const DeviceAttention &task, const Span &row, int kv_head) {
        const CacheView &cache = task.cache;
        int t = begin + lane_id(), there = min(max(t, low), high - 1);
        int64_t kept = (int64_t)row.sequence * group_size + there % group_size;
        int64_t at = cache.row_of(row.sequence, there);
        bool own = row.position / group_size == begin / group_size;
        recent_keys = own && cache.recent_keys.data, recent_values = own && cache.recent_values.data;
        auto offset = [&](const CacheRows &side, int64_t row) { return side.at(task.layer, row, kv_head) - side.data; };
        value_offset = recent_values ? offset(cache.recent_values, kept) : offset(cache.values, at);
        if (cache.recent_keys.data && !own) at = cache.row_of(row.sequence, t);
        key_offset = recent_keys ? offset(cache.recent_keys, kept) : offset(cache.keys, at);
        visit_fast(cache.type_k, recent_keys, [&](auto format) { take_scale(key_scale, format, keys(cache, 0)); });
        visit_fast(cache.type_v, recent_values,
                   [&](auto format) { take_scale(value_scale, format, values(cache, 0)); });
    }
    template <class Format>
    __device__ static void take_scale(f16 &scale, const Format &, const LaneRows &rows) {
        if constexpr (Format::scale_channels > group_size) scale = *(const f16 *)(rows.side.data + rows.offset);
    }
    // The position of column 2 c + e in eighth j, counted from `begin`.
    __device__ static int place_of(int j, int e) { return j / 2 * half_tile + lane_column() * 4 + 2 * e + j % 2; }
    __device__ bool visible(int i) const { return low <= begin + i && begin + i < high; }
};

// What a warp knows of its query heads: lane (g, c) the maximum of head g, and the values of heads 2 c and 2 c + 1.
template <int widest>
struct FastHeads {
    static constexpr int products = widest / 16;
    float most = -INFINITY, sum = 0;  // sum: of the lane's own positions
    float values[products][4] = {};   // sums[..] of multiply_matrices: rows are channels, columns are heads
    float unit = 0x1p-24f;            // in which values are counted: the power of two below the largest scale of a row

    // scores[j][e], of head g and position place_of(j, e) of a tile, become weights. These are times 2^14: f16 has no
    // smaller numbers than 2^-24, and none larger than 65,504.
    __device__ void softmax(float (&scores)[4][2], float factor, const FastTile &tile) {
        float before = most, shrink = unit, share[4][2];
        unit = fmaxf(unit, power_below(warp_max(to_float(tile.value_scale))));
        shrink *= inverse(unit);
        uint32_t scales = tile.key_scale.bits | (uint32_t)tile.value_scale.bits << 16;
        UNROLL for (int j = 0; j < 4; j++) {
            UNROLL for (int e = 0; e < 2; e++) {
                uint32_t both = __shfl_sync(all_lanes, scales, tile.place_of(j, e));
                scores[j][e] *= factor * half_of<f16>(both, 0);
                share[j][e] = half_of<f16>(both, 1) * inverse(unit) * 0x1p14f;
                if (tile.visible(tile.place_of(j, e))) most = fmaxf(most, scores[j][e]);
            }
        }
        for (int lane = 1; lane < 4; lane *= 2) most = fmaxf(most, __shfl_xor_sync(all_lanes, most, lane));
        float fade = before == most ? 1 : exp2_fast(before - most);
        sum *= fade;
        UNROLL for (int j = 0; j < 4; j++) {
            UNROLL for (int e = 0; e < 2; e++) {
                float weight = tile.visible(tile.place_of(j, e)) ? exp2_fast(scores[j][e] - most) : 0;
                sum += weight;
                scores[j][e] = weight * share[j][e];
            }
        }
        fade *= shrink;
        if (!__any_sync(all_lanes, fade != 1)) return;
        UNROLL for (int e = 0; e < 2; e++) {
            float of_head = __shfl_sync(all_lanes, fade, lane_column() * 8 + 4 * e);
            UNROLL for (int i = 0; i < products; i++) values[i][e] *= of_head, values[i][2 + e] *= of_head;
        }
    }

    // values += V^T weights, both of the half tile that was asked for.
    template <class Format>
    __device__ void add(const Format &format, const Asked<widest> &asked, const float (&weights)[4][2]) {
        using Number = Factor<Format>;
        uint32_t rounded[2], rest[2];
        UNROLL for (int r = 0; r < 2; r++) pack_both<Number>(rounded[r], rest[r], weights[r][0], weights[r][1]);
        UNROLL for (int i = 0; i < products; i++) {
            uint32_t even[2], odd[2];
            value_pair(even, format, asked, i, 0), value_pair(odd, format, asked, i, 1);
            const uint32_t a[4] = {even[0], even[1], odd[0], odd[1]};
            multiply_matrices<Number>(values[i], a, rounded);
            multiply_matrices<Number>(values[i], a, rest);
        }
    }
};

// What the queries and their rests have as scores, together.
__device__ inline void take_scores(float (&scores)[2], const float (&sums)[4]) {
    UNROLL for (int e = 0; e < 2; e++) scores[e] = sums[e] + sums[2 + e];
}

// scores = q K^T for a tile, of which the keys of the first half, or of the whole block, were asked for.
template <int widest, class Format>
__device__ inline void score_keys(float (&scores)[4][2], const Format &format, Asked<widest> &keys,
                                  const LaneRows &rows, const FastQueries<widest> &queries) {
    uint32_t a[4], b[4][2];
    if constexpr (Format::key_groups) {
        float sums[4][4] = {};
        UNROLL for (int i = 0; i < widest / 16; i++) {
            queries.fragment(a, format, i);
            block_fragments(b, format, keys, i);
            UNROLL for (int j = 0; j < 4; j++) multiply_matrices<f16>(sums[j], a, b[j]);
        }
        UNROLL for (int j = 0; j < 4; j++) take_scores(scores[j], sums[j]);
    } else {
        UNROLL for (int half = 0; half < 2; half++) {
            float sums[2][4] = {};
            if (half == 1) ask_keys(keys, format, rows, half_tile);
            UNROLL for (int i = 0; i < widest / 16; i++) {
                queries.fragment(a, format, i);
                UNROLL for (int r = 0; r < 2; r++) {
                    key_fragment(b[r], format, keys, i, r);
                    multiply_matrices<Factor<Format>>(sums[r], a, b[r]);
                }
            }
            UNROLL for (int r = 0; r < 2; r++) take_scores(scores[2 * half + r], sums[r]);
        }
    }
}

// The tiles of a warp in the positions [low, high) of a split: the one that begins at `first`, and every fourth after.
template <int widest, bool exact>
__device__ void attend_tiles(FastHeads<widest> &heads, const FastQueries<widest> &queries, const DeviceAttention &task,
                             const Span &row, int kv_head, int first, int low, int high) {
    const CacheView &cache = task.cache;
    int key_width = exact ? widest : cache.keys.width, value_width = exact ? widest : cache.values.width;
    constexpr f16 one = {0x3c00};
    FastTile tile = {first, low, high, 0, 0, one, one, false, false};
    Asked<widest> keys, values;
    float weights[4][2];  // the first two of the half that values were asked for
    auto ask_keys_of = [&](auto format) { ask_keys(keys, format, tile.keys(cache, key_width), 0); };
    auto score = [&](auto format) { score_keys(weights, format, keys, tile.keys(cache, key_width), queries); };
    auto add = [&](auto format) { heads.add(format, values, weights); };
    for (bool asked = false;; tile.begin += fast_warps * warp_size) {
        bool more = tile.begin < high, were_recent = tile.recent_values;
        if (more) {
            tile.find(task, row, kv_head);
            visit_fast(cache.type_k, tile.recent_keys, ask_keys_of);
        }
        for (int place = 0; place < warp_size; place += half_tile) {
            if (asked) visit_fast(cache.type_v, were_recent, add);
            if (!more) return;
            asked = true;
            were_recent = tile.recent_values;
            visit_fast(cache.type_v, tile.recent_values,
                       [&](auto format) { ask_values(values, format, tile.values(cache, value_width), place); });
            if (place == 0) {
                visit_fast(cache.type_k, tile.recent_keys, score);
                heads.softmax(weights, queries.factors[lane_row()], tile);
            }
            UNROLL for (int i = 0; place > 0 && i < 4; i++) weights[i / 2][i % 2] = weights[2 + i / 2][i % 2];
        }
    }
}

// What the warps of a block know of their query heads, one after another.
struct WarpResults {
    int width;
    Shared<float> most, sum, values;  // (warp, batch_heads) and (warp, batch_heads, width)
    __device__ WarpResults(SharedMemory &memory, int width)
        : width(width),
          most(memory.take<float>(fast_warps * batch_heads)),
          sum(memory.take<float>(fast_warps * batch_heads)),
          values(memory.take<float>(fast_warps * batch_heads * width)) {}
    static size_t bytes(int width) {
        size_t heads = fast_warps * batch_heads * sizeof(float);
        return 2 * shared_size(heads) + shared_size(heads * width);
    }
    template <int widest>
    __device__ void put(const FastHeads<widest> &heads) const {
        int g = lane_row(), c = lane_column(), first = warp_id() * batch_heads + 2 * c;
        float total = heads.sum;
        for (int lane = 1; lane < 4; lane *= 2) total += __shfl_xor_sync(all_lanes, total, lane);
        if (c == 0) most[warp_id() * batch_heads + g] = heads.most, sum[warp_id() * batch_heads + g] = total;
        UNROLL for (int i = 0; i < heads.products; i++) {
            UNROLL for (int j = 0; j < 4; j++) {
                int channel = value_channel(i, g) + j / 2;
                float value = heads.values[i][j] * 0x1p-14f * heads.unit;
                if (channel < width) values[(first + j % 2) * width + channel] = value;
            }
        }
    }
    // The partial result of head h, of which `value` is channel c. Warps without positions have the weight 0.
    __device__ Partial merge(int h, int c, float &value) const {
        Partial all;
        for (int w = 0; w < fast_warps; w++) all.most = fmaxf(all.most, most[w * batch_heads + h]);
        value = 0;
        for (int w = 0; w < fast_warps; w++) {
            float factor = exp2_fast(most[w * batch_heads + h] - all.most);
            all.sum += sum[w * batch_heads + h] * factor;
            value += values[(w * batch_heads + h) * width + c] * factor;
        }
        return all;
    }
};

// A block for each split, batch of query heads, and row. With 168 registers three blocks share a multiprocessor.
template <int widest, bool exact>
__global__ void __launch_bounds__(attend_threads, exact ? 3 : 2)
    attend_fast_kernel(DeviceAttention task, Parts to, const Span *rows) {
    SharedMemory memory;
    FastQueries<widest> queries(memory);
    WarpResults results(memory, to.value_width);
    wait_for_previous();
    let_next_start();
    Span row = rows[blockIdx.z];
    HeadBatch batch(task.heads, blockIdx.y);
    Splits splits(task.visible, row.position, to.splits);
    int split = blockIdx.x, first = splits.origin + split * splits.length + warp_id() * warp_size;
    if (split >= splits.used) return;
    int width = task.heads.width, groups = task.cache.recent_keys.data ? (width + group_size - 1) / group_size : 0;
    const float *query = task.query + ((size_t)row.row * task.heads.query + batch.first) * width;
    if (task.cache.type_k.index == bf16_index)
        queries.take(bf16{}, query, batch.count, {width, 0});
    else
        queries.take(f16{}, query, batch.count, {width, 0});
    if (groups > 0) queries.take(f16{}, query, batch.count, {width, groups});
    __syncthreads();
    FastHeads<widest> heads;
    attend_tiles<widest, exact>(heads, queries, task, row, batch.kv_head, first, splits.begin_of(split),
                                splits.end_of(split));
    results.put(heads);
    __syncthreads();
    for (int i = threadIdx.x; i < batch.count * to.value_width; i += blockDim.x) {
        int h = i / to.value_width, c = i % to.value_width;
        size_t at = to.index((size_t)blockIdx.z * task.heads.query + batch.first + h, 1 + split);
        float value;
        Partial partial = results.merge(h, c, value);
        to.values[at * to.value_width + c] = value;
        if (c == 0) to.partials[at] = partial;
    }
}

// Calls use() with the widest heads that a kernel has registers for, 64 or 128, and whether all are as wide. False
// where tensor cores do not take the cache.
template <class Use>
bool on_tensor_cores(const CacheView &cache, Use use) {
    int keys = cache.keys.width, values = cache.values.width;
    auto fits = [](const OnDevice<Precision> &type, int width) {
        return type.index != f32_index && width % 8 == 0 && width <= 128;
    };
    if (!fits(cache.type_k, keys) || !fits(cache.type_v, values)) return false;
    if (keys == 64 && values == 64)
        use(std::integral_constant<int, 64>(), std::true_type());
    else if (keys == 128 && values == 128)
        use(std::integral_constant<int, 128>(), std::true_type());
    else
        use(std::integral_constant<int, 128>(), std::false_type());
    return true;
}

// attend_rows_plain(), on tensor cores where they take the cache.
inline void attend_rows(const Device &device, DeviceScratch &scratch, const DeviceAttention &task, const Span *rows,
                        int count) {
    Parts parts = scratch.parts();
    unsigned batches = task.heads.kv * batches_of(task.heads);
    bool done = on_tensor_cores(task.cache, [&](auto widest, auto exact) {
        if (task.visible.sinks > 0)
            launch(device,
                   {dim3(1, batches, count), attend_threads, HeadsInShared::bytes(task.heads.width, parts.value_width)},
                   attend_plain_kernel, task, parts, rows, 0);
        size_t bytes = WarpResults::bytes(parts.value_width) + FastQueries<widest>::bytes();
        Grid grid = {dim3(parts.splits, batches, count), attend_threads, bytes};
        launch(device, grid, attend_fast_kernel<widest, exact>, task, parts, rows);
        launch(device, {dim3(task.heads.query, count), attend_threads}, merge_parts_kernel, task, parts, rows);
    });
    if (!done) attend_rows_plain(device, scratch, task, rows, count);
}
#endif

// ---- Rung 4: tiles on tensor cores, for many tokens --------------------------------------------------------
//
// In prefill many queries read the same keys and values: what counts is no longer how fast those come out of memory,
// but how many multiply-adds are done with each one that has come. A row is one query head at one token; the rows of
// all query heads of a KV head are computed together, tile by tile of positions.

#ifdef HAS_CUDA
struct Positions {  // [begin, end)
    int begin, end;
};

__device__ inline bool has_blocks(const OnDevice<Precision> &type) {
    return type.visit([](auto &format) { return std::decay_t<decltype(format)>::key_groups; });
}

// The queries of a pass that read one KV head: row token * group + i is the group's query head i at that token.
struct ChunkHead {
    const DeviceAttention &task;
    const Span &chunk;
    int kv_head;
    bool blocks;  // keys or values are quantized in blocks of 32 positions

    __device__ ChunkHead(const DeviceAttention &task, const Span &chunk, int kv_head)
        : task(task), chunk(chunk), kv_head(kv_head) {
        blocks = has_blocks(task.cache.type_k) || has_blocks(task.cache.type_v);
    }
    __device__ int rows() const { return chunk.count * task.heads.group(); }
    __device__ int position(int row) const { return chunk.position + row / task.heads.group(); }
    __device__ const float *query(int row) const {
        return task.query + query_head(chunk, kv_head, row, task.heads) * task.heads.width;
    }
    __device__ float *out(int row) const {
        return task.out + query_head(chunk, kv_head, row, task.heads) * task.cache.values.width;
    }
    __device__ CachedHead cached(int reader) const { return {task.cache, task.layer, chunk.sequence, kv_head, reader}; }
    // The positions that the query at `position` reads as they are stored or, `own`, those of its own block at f16.
    __device__ Positions seen(int position, bool own) const {
        int first = task.visible.first(position), block = blocks ? position / group_size * group_size : position + 1;
        return own ? Positions{max(first, block), position + 1} : Positions{first, block};
    }
};

struct Tile {
    int start;        // positions [start, start + size), `size` divides start;
    Positions there;  // those before and behind are not read
    bool own;         // where a format has blocks, f16 is read
    __device__ bool holds(int i) const { return start + i >= there.begin && start + i < there.end; }
};

// The tiles that the rows from `first` to `last` read: as stored, then their own blocks. A row goes through its
// positions in the same tiles whatever rows are beside it, so its bits do not depend on them.
template <int size>
struct TileWalk {
    Positions stored, own;
    int stored_tiles, own_tiles;
    __device__ TileWalk(const ChunkHead &head, int first, int last) {
        int low = head.position(first), high = head.position(last);
        stored = {head.seen(low, false).begin, head.seen(high, false).end};
        own = {head.seen(low, true).begin, head.seen(high, true).end};
        stored_tiles = tiles_of(stored);
        own_tiles = head.blocks ? tiles_of(own) : 0;
    }
    __device__ static int tiles_of(const Positions &some) {
        return some.begin < some.end ? (some.end - 1) / size - some.begin / size + 1 : 0;
    }
    __device__ int count() const { return stored_tiles + own_tiles; }
    __device__ Tile operator[](int i) const {
        bool is_own = i >= stored_tiles;
        const Positions &there = is_own ? own : stored;
        return {(there.begin / size + i - (is_own ? stored_tiles : 0)) * size, there, is_own};
    }
};

// K or V, and the pass's own vectors (rows, kv_heads, width).
struct ChunkSide {
    const CacheRows &rows, &recent;
    const OnDevice<Precision> &type;
    const float *pass;
    __device__ ChunkSide(const DeviceAttention &task, bool keys)
        : rows(keys ? task.cache.keys : task.cache.values),
          recent(keys ? task.cache.recent_keys : task.cache.recent_values),
          type(keys ? task.cache.type_k : task.cache.type_v),
          pass(keys ? task.key : task.value) {}
    __device__ const float *pass_vector(const ChunkHead &head, int t) const {
        size_t row = (size_t)(head.chunk.row + t - head.chunk.position);
        return pass + (row * rows.kv_heads + head.kv_head) * rows.width;
    }
};

// to (D) = the key of sink i, turned to where a query at `position` sees it. By one warp, as is what follows.
__device__ inline void turn_sink(Shared<float> to, const ChunkHead &head, int i, int position) {
    __syncwarp();
    for (int c = lane_id(); c < head.task.heads.width; c += warp_size)
        to[c] = sink_key(head.task, head.cached(position), i, c);
    __syncwarp();
}

// Query . key; `key` is a sink's that was turned.
__device__ inline float sink_score(const ChunkHead &head, int row, Shared<float> key) {
    const float *query = head.query(row);
    float sum = 0;
    for (int c = lane_id(); c < head.task.heads.width; c += warp_size) sum += query[c] * key[c];
    return warp_sum(sum);
}

// ---- The plain twin ----
//
// A warp for each row, 8 rows of a KV head together, float32 throughout. A tile is decoded once for all of them; a lane
// computes the score of one position, then weighs channels. Any format, head dim and group size. Models with float32
// weights take this twin, and the tensor cores must agree with it.
//
// A result is off as on the CPU: a score by (D + 8) 2^-24 of what it is summed up from, the weighted values by
// (positions + 40) 2^-24 and what their weights are off.

constexpr int plain_rows = 8, plain_threads = plain_rows * warp_size, plain_positions = warp_size;

// One number of a key or value, as a tile reads it.
template <bool keys, class Format>
__device__ inline float number_of_tile(const Format &format, const ChunkHead &head, const Tile &tile, int t, int c) {
    const Span &chunk = head.chunk;
    if (Format::key_groups && tile.own && t >= chunk.first) return ChunkSide(head.task, keys).pass_vector(head, t)[c];
    // Who reads: a position of the same block, or of the next one.
    CachedHead cached = head.cached(tile.own ? t : t + group_size);
    return keys ? cached.key(format, t, c) : cached.value(format, t, c);
}

// to (32, stride) = a tile's keys or values as float32, zeros where none are read. By the whole block.
template <bool keys>
__device__ inline void read_tile(Shared<float> to, int stride, const ChunkHead &head, const Tile &tile) {
    ChunkSide side(head.task, keys);
    int width = side.rows.width;
    auto read = [&](auto &format) {
        for (int item = threadIdx.x; item < plain_positions * width; item += plain_threads) {
            int i = item / width, c = item % width;
            to[i * stride + c] = tile.holds(i) ? number_of_tile<keys>(format, head, tile, tile.start + i, c) : 0;
        }
    };
    side.type.visit(read);
}

// Lane i has the score of position i, whose value is value(i, channel): sums (width) grow by the weighted values
// (online softmax).
template <class Value>
__device__ inline void add_scores(Partial &total, Shared<float> sums, int width, float score, Shared<float> weights,
                                  int count, Value value) {
    float most = fmaxf(total.most, warp_max(score));
    if (most == -INFINITY) return;
    float factor = exp2_fast(total.most - most), weight = exp2_fast(score - most);
    total = {most, total.sum * factor + warp_sum(weight)};
    weights[lane_id()] = weight;
    __syncwarp();
    for (int c = lane_id(); c < width; c += warp_size) {
        float sum = sums[c] * factor;
        for (int i = 0; i < count; i++) sum += weights[i] * value(i, c);
        sums[c] = sum;
    }
    __syncwarp();
}

__global__ void __launch_bounds__(plain_threads) attend_chunk_plain_kernel(DeviceAttention task, Span chunk) {
    wait_for_previous();
    let_next_start();
    ChunkHead head(task, chunk, blockIdx.x);
    const int key_width = task.heads.width, value_width = task.cache.values.width, warp = warp_id();
    const int first = (int)(gridDim.y - 1 - blockIdx.y) * plain_rows, last = min(first + plain_rows, head.rows()) - 1;
    const int row = min(first + warp, last), position = head.position(row);
    SharedMemory memory;
    Shared<float> keys = memory.take<float>(plain_positions * (key_width + 1));  // lanes are in different banks
    Shared<float> values = memory.take<float>(plain_positions * value_width);
    Shared<float> query = memory.take<float>(plain_rows * key_width).from(warp * key_width);
    Shared<float> key = memory.take<float>(plain_rows * key_width).from(warp * key_width);
    Shared<float> sums = memory.take<float>(plain_rows * value_width).from(warp * value_width);
    Shared<float> weights = memory.take<float>(plain_threads).from(warp * warp_size);
    float factor = 1.44269504f / sqrtf((float)key_width);
    for (int c = lane_id(); c < key_width; c += warp_size) query[c] = head.query(row)[c] * factor;
    for (int c = lane_id(); c < value_width; c += warp_size) sums[c] = 0;
    __syncwarp();

    Partial total;
    for (int i = 0; i < task.visible.sinks && task.visible.dropped(position); i++) {
        turn_sink(key, head, i, position);
        float score = factor * sink_score(head, row, key);
        add_scores(total, sums, value_width, lane_id() == 0 ? score : -INFINITY, weights, 1,
                   [&](int, int c) { return sink_value(task, head.cached(position), i, c); });
    }
    TileWalk<plain_positions> tiles(head, first, last);
    for (int i = 0; i < tiles.count(); i++) {
        Tile tile = tiles[i];
        __syncthreads();
        read_tile<true>(keys, key_width + 1, head, tile);
        read_tile<false>(values, value_width, head, tile);
        __syncthreads();
        Positions seen = head.seen(position, tile.own);
        int t = tile.start + lane_id();
        float score = 0;
        for (int c = 0; c < key_width; c++) score += query[c] * keys[lane_id() * (key_width + 1) + c];
        if (t < seen.begin || t >= seen.end) score = -INFINITY;
        add_scores(total, sums, value_width, score, weights, plain_positions,
                   [&](int j, int c) -> float { return values[j * value_width + c]; });
    }
    for (int c = lane_id(); c < value_width && first + warp <= last; c += warp_size)
        head.out(row)[c] = sums[c] / total.sum;
}

inline void attend_chunk_plain(const Device &device, const DeviceAttention &task, const Span &chunk) {
    int key_width = task.heads.width, value_width = task.cache.values.width;
    dim3 blocks(task.heads.kv, blocks_for((int64_t)chunk.count * task.heads.group(), plain_rows));
    size_t numbers[] = {(size_t)plain_positions * (key_width + 1),
                        (size_t)plain_positions * value_width,
                        (size_t)plain_rows * key_width,
                        (size_t)plain_rows * key_width,
                        (size_t)plain_rows * value_width,
                        (size_t)plain_threads};
    size_t shared = 0;
    for (size_t count : numbers) shared += shared_size(count * sizeof(float));
    launch(device, {blocks, plain_threads, shared}, attend_chunk_plain_kernel, task, chunk);
}

// ---- The tile's numbers, two at a time ----

// Of a row: the numbers `channel` (even) and the next one.
template <class Number>
__device__ inline float2 two_numbers(const PlainRow<Number> &, const char *row, int channel) {
    if constexpr (sizeof(Number) == 4) {
        return *(const float2 *)(row + channel * sizeof(float));
    } else {
        uint32_t two = *(const uint32_t *)(row + channel * sizeof(Number));
        return {to_float(Number{(uint16_t)two}), to_float(Number{(uint16_t)(two >> 16)})};
    }
}

template <class Code, int largest, int divisor>
__device__ inline float2 two_numbers(const ScaledRow<Code, largest, divisor> &, const char *row, int channel) {
    float scale = to_float(*(const f16 *)row) / divisor;
    uint16_t two = *(const uint16_t *)(row + sizeof(f16) + channel);
    return {scale * to_float(bit_cast<Code>((uint8_t)two)), scale * to_float(bit_cast<Code>((uint8_t)(two >> 8)))};
}

// A group's scale and zero point, and its codes, as words. Rows of groups are aligned to 4 bytes.
template <int bits>
__device__ inline float2 two_numbers(const GroupedRow<bits> &format, const char *row, int channel) {
    const Group<bits> &group = format.group(row, channel / group_size);
    float scale = to_float(group.both.scale), zero = to_float(group.both.zero);
    int i = channel % group_size, size = Packed<bits>::size, largest = Packed<bits>::largest;
    int codes = *(const uint16_t *)(group.codes.bytes + i % size) >> bits * (i / size);
    return {zero + scale * (float)(codes & largest), zero + scale * (float)(codes >> 8 & largest)};
}

// ---- A tile in shared memory ----

constexpr int chunk_warps = 4, chunk_threads = chunk_warps * warp_size;
constexpr int small_tile = 32, large_tile = 64;  // positions

// Rows of 16-bit numbers; 16 bytes behind each row let the 8 rows of a matrix begin in different banks.
template <int D>
constexpr int padded = D + 8;

// What one warp brings of a tile: up to 32 vectors of K or of V, from position tile.start + first on.
struct TilePart {
    const ChunkHead &head;
    const ChunkSide &side;
    const Tile &tile;
    int first;
    bool own;       // they are read at f16, while others of the cache are codes
    int64_t found;  // where vector `lane` begins: in the cache, in its recent rows, or in the pass

    __device__ TilePart(const ChunkHead &head, const ChunkSide &side, const Tile &tile, int first)
        : head(head), side(side), tile(tile), first(first), own(tile.own && has_blocks(side.type)) {
        const Span &chunk = head.chunk;
        int t = position(lane_id()), layer = head.task.layer;
        int64_t row =
            own ? (int64_t)chunk.sequence * group_size + t % group_size : head.task.cache.row_of(chunk.sequence, t);
        found = own && in_pass(lane_id()) ? (int64_t)side.pass_vector(head, t)
                                          : (int64_t)(own ? side.recent : side.rows).at(layer, row, head.kv_head);
    }
    __device__ bool holds(int i) const { return tile.holds(first + i); }
    // Of vector i; for one that is not read the nearest that is, so that something can be loaded.
    __device__ int position(int i) const {
        return min(max(tile.start + first + i, tile.there.begin), tile.there.end - 1);
    }
    __device__ bool in_pass(int i) const { return position(i) >= head.chunk.first; }
    __device__ const char *vector(int i) const { return (const char *)__shfl_sync(all_lanes, found, i); }
};

// Vectors that are stored as the products want them.
template <class Number, int D, int count>
__device__ inline void copy_vectors(Shared<Number> to, const TilePart &part) {
    constexpr int together = 8;  // lanes that copy a vector, 16 bytes at a time
    for (int i = lane_id() / together; i < count; i += warp_size / together) {
        const char *vector = part.vector(i);
        for (int channel = lane_id() % together * 8; channel < D; channel += together * 8)
            copy_async16(to, i * padded<D> + channel, vector + channel * sizeof(Number), part.holds(i));
    }
}

// Others are decoded and rounded: read(i, vector, channel) gives two numbers of vector i. Those of several vectors are
// asked for before the first is waited for.
template <class Number, int D, int count, class Read>
__device__ inline void decode_vectors(Shared<Number> to, const TilePart &part, Read read) {
    constexpr int together = D <= 128 ? 8 : 4, pairs = (D / 2 + warp_size - 1) / warp_size;  // of a lane in a vector
    for (int first = 0; first < count; first += together) {
        float2 numbers[together][pairs];
        UNROLL for (int i = 0; i < together; i++) {
            const char *vector = part.vector(first + i);
            UNROLL for (int p = 0; p < pairs; p++) {
                int channel = 2 * (lane_id() + p * warp_size);
                numbers[i][p] = read(first + i, vector, channel < D ? channel : 0);
            }
        }
        UNROLL for (int i = 0; i < together; i++) {
            UNROLL for (int p = 0; p < pairs; p++) {
                int channel = 2 * (lane_id() + p * warp_size);
                uint32_t two = part.holds(first + i) ? pack<Number>(numbers[i][p].x, numbers[i][p].y) : 0;
                if (channel < D) to.template write<uint32_t>((first + i) * padded<D> + channel, two);
            }
        }
    }
}

// Keys in groups of 32 positions: a lane decodes 16 of them for two channels at a time.
template <class Number, int D, int count, int bits>
__device__ inline void decode_block(Shared<Number> to, const TilePart &part, const GroupedRow<bits> &format) {
    constexpr int size = Packed<bits>::size;
    const ChunkHead &head = part.head;
    for (int channel = 2 * lane_id(); channel < D; channel += 2 * warp_size) {
        uint32_t words[2][bits + 1];  // of a group: scale and zero point, then the codes
        UNROLL for (int c = 0; c < 2; c++) {
            int holder = holder_of<GroupedRow<bits>, true>(part.tile.start, channel + c, D);
            const char *row =
                part.side.rows.at(head.task.layer, head.task.cache.row_of(head.chunk.sequence, holder), head.kv_head);
            const uint32_t *group = (const uint32_t *)&format.group(row, (channel + c) % format.groups(D));
            UNROLL for (int i = 0; i < bits + 1; i++) { words[c][i] = group[i]; }
        }
        UNROLL for (int i = 0; i < count; i++) {
            auto number = [&](const uint32_t(&group)[bits + 1]) {
                uint32_t shifted = group[1 + i % size / 4] >> part.first / size * bits;
                uint32_t code = shifted >> (8 * (i % 4) + bits * (i / size)) & Packed<bits>::largest;
                return to_float(f16{(uint16_t)(group[0] >> 16)}) + to_float(f16{(uint16_t)group[0]}) * (float)code;
            };
            to.template write<uint32_t>(i * padded<D> + channel, pack<Number>(number(words[0]), number(words[1])));
        }
    }
}

// Half of a block's warps bring a tile of K, the others one of V, by copies that go on while something else is
// computed, or by decoding. They are there after wait_copies() and a barrier.
template <class Number, int D, int positions>
__device__ inline void bring_tile(Shared<Number> keys, Shared<Number> values, const ChunkHead &head, const Tile &tile) {
    constexpr int count = positions / (chunk_warps / 2);
    bool is_key = warp_id() < chunk_warps / 2;
    ChunkSide side(head.task, is_key);
    int first = warp_id() % (chunk_warps / 2) * count;
    TilePart part(head, side, tile, first);
    Shared<Number> to = (is_key ? keys : values).from(first * padded<D>);
    if constexpr (positions == large_tile) {
        copy_vectors<Number, D, count>(to, part);
    } else if (part.own) {
        decode_vectors<Number, D, count>(to, part, [&](int i, const char *vector, int channel) {
            return part.in_pass(i) ? two_numbers(F32(), vector, channel) : two_numbers(F16(), vector, channel);
        });
    } else {
        side.type.visit([&](auto &format) {
            using Format = std::decay_t<decltype(format)>;
            auto read = [&](int, const char *vector, int channel) { return two_numbers(format, vector, channel); };
            if constexpr (std::is_base_of_v<PlainRow<Number>, Format>) return copy_vectors<Number, D, count>(to, part);
            if constexpr (Format::key_groups)
                if (is_key) return decode_block<Number, D, count>(to, part, format);
            decode_vectors<Number, D, count>(to, part, read);
        });
    }
    commit_copies();
}

// ---- On tensor cores ----

// 16 or 32 rows of one warp (parts of 16), their scores against a tile, and what they have seen so far; as fragments.
// Of part m a lane holds the rows 16 m + lane / 4 (h = 0) and 8 below (h = 1), and of each 8 columns 2 (lane % 4) and
// the next one. Scores are exponents of 2: the queries have been multiplied by log2(e) / sqrt(D).
template <class Number, int D, int positions>
struct WarpRows {
    static constexpr int parts = D <= 128 ? 2 : 1, rows = 16 * parts;
    const ChunkHead &head;
    int first;           // row
    Shared<int> tokens;  // (rows): their positions
    using Scores = float[parts][positions / 8][4];
    float out[parts][D / 8][4] = {}, most[parts][2], sum[parts][2] = {};
    using Weights = uint32_t[parts][positions / 16][4];

    __device__ WarpRows(const ChunkHead &head, int first, Shared<int> tokens)
        : head(head), first(first), tokens(tokens) {
        UNROLL for (int m = 0; m < parts; m++) { most[m][0] = most[m][1] = -INFINITY; }
        if (lane_id() < rows) tokens[lane_id()] = head.position(row(lane_id()));
        __syncwarp();
    }
    // Behind the last row there are copies of it, which are not stored.
    __device__ int row(int r) const { return min(first + r, head.rows() - 1); }
    __device__ static float factor() { return 1.44269504f / sqrtf((float)D); }

    // How many some row sees.
    __device__ int sinks() const {
        const Visible &visible = head.task.visible;
        return first < head.rows() && visible.dropped(tokens[rows - 1]) ? visible.sinks : 0;
    }

    // The warp's rows of `queries`, rounded.
    __device__ void read_queries(Shared<Number> queries) const {
        for (int r = 0; r < rows; r++) {
            const float *query = head.query(row(r));
            for (int c = 2 * lane_id(); c < D; c += 2 * warp_size)
                queries.template write<uint32_t>(r * padded<D> + c,
                                                 pack<Number>(query[c] * factor(), query[c + 1] * factor()));
        }
    }

    // From now on weights are 2^(score - latest): what is summed up so far shrinks.
    __device__ void raise(const float (&latest)[parts][2]) {
        bool higher = false;
        UNROLL for (int m = 0; m < parts; m++) { higher |= latest[m][0] > most[m][0] || latest[m][1] > most[m][1]; }
        if (!__any_sync(all_lanes, higher)) return;
        UNROLL for (int m = 0; m < parts; m++) {
            UNROLL for (int h = 0; h < 2; h++) {
                float shrink = most[m][h] == -INFINITY ? 0 : exp2_fast(most[m][h] - latest[m][h]);
                UNROLL for (int n = 0; n < D / 8; n++) {
                    out[m][n][2 * h] *= shrink;
                    out[m][n][2 * h + 1] *= shrink;
                }
                sum[m][h] *= shrink;
                most[m][h] = latest[m][h];
            }
        }
    }

    // score = Q K^T
    __device__ void multiply_keys(Scores &score, Shared<Number> queries, Shared<Number> keys) const {
        int lane = lane_id(), row = lane % 8, side = lane / 8 % 2, below = lane / 16;
        UNROLL for (int k = 0; k < D; k += 16) {
            uint32_t query[parts][4];
            UNROLL for (int m = 0; m < parts; m++) {
                load_matrices(query[m], queries, (16 * m + 8 * side + row) * padded<D> + k + 8 * below);
            }
            UNROLL for (int n = 0; n < positions / 8; n += 2) {
                uint32_t key[4];
                load_matrices(key, keys, (8 * (n + below) + row) * padded<D> + k + 8 * side);
                const uint32_t left[2] = {key[0], key[1]}, right[2] = {key[2], key[3]};
                UNROLL for (int m = 0; m < parts; m++) {
                    multiply_matrices<Number>(score[m][n], query[m], left);
                    multiply_matrices<Number>(score[m][n + 1], query[m], right);
                }
            }
        }
    }

    // What a row does not see weighs nothing.
    __device__ void mask(Scores &score, const Tile &tile) const {
        UNROLL for (int m = 0; m < parts; m++) {
            UNROLL for (int h = 0; h < 2; h++) {
                Positions seen = head.seen(tokens[16 * m + 8 * h + lane_id() / 4], tile.own);
                UNROLL for (int n = 0; n < positions / 8; n++) {
                    UNROLL for (int i = 0; i < 2; i++) {
                        int t = tile.start + 8 * n + 2 * (lane_id() % 4) + i;
                        if (t < seen.begin || t >= seen.end) score[m][n][2 * h + i] = -INFINITY;
                    }
                }
            }
        }
    }

    // weights = 2^(score - most). The fragments of the scores are, rounded, those of the weights.
    __device__ void weigh_scores(Weights &weights, const Scores &score) {
        float latest[parts][2];
        UNROLL for (int m = 0; m < parts; m++) {
            UNROLL for (int h = 0; h < 2; h++) {
                float largest = most[m][h];
                UNROLL for (int n = 0; n < positions / 8; n++) {
                    largest = fmaxf(largest, fmaxf(score[m][n][2 * h], score[m][n][2 * h + 1]));
                }
                largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 1));
                latest[m][h] = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 2));
            }
        }
        raise(latest);
        UNROLL for (int m = 0; m < parts; m++) {
            UNROLL for (int h = 0; h < 2; h++) {
                float origin = most[m][h] == -INFINITY ? 0 : most[m][h];
                UNROLL for (int n = 0; n < positions / 8; n++) {
                    float first = exp2_fast(score[m][n][2 * h] - origin);
                    float second = exp2_fast(score[m][n][2 * h + 1] - origin);
                    sum[m][h] += first + second;
                    weights[m][n / 2][n % 2 * 2 + h] = pack<Number>(first, second);
                }
            }
        }
    }

    // out += weights V
    __device__ void multiply_values(const Weights &weights, Shared<Number> values) {
        int lane = lane_id(), row = lane % 8, side = lane / 8 % 2, right = lane / 16;
        UNROLL for (int k = 0; k < positions / 16; k++) {
            UNROLL for (int n = 0; n < D / 8; n += 2) {
                uint32_t value[4];
                load_matrices_transposed(value, values, (16 * k + 8 * side + row) * padded<D> + 8 * (n + right));
                const uint32_t left[2] = {value[0], value[1]}, next[2] = {value[2], value[3]};
                UNROLL for (int m = 0; m < parts; m++) {
                    multiply_matrices<Number>(out[m][n], weights[m][k], left);
                    multiply_matrices<Number>(out[m][n + 1], weights[m][k], next);
                }
            }
        }
    }

    __device__ void add_tile(const Tile &tile, Shared<Number> queries, Shared<Number> keys, Shared<Number> values) {
        Positions lowest = head.seen(tokens[0], tile.own), highest = head.seen(tokens[rows - 1], tile.own);
        int end = tile.start + positions;
        if (first >= head.rows() || tile.start >= highest.end || end <= lowest.begin) return;
        Scores score = {};
        multiply_keys(score, queries, keys);
        if (tile.start < highest.begin || end > lowest.end) mask(score, tile);
        Weights weights;
        weigh_scores(weights, score);
        multiply_values(weights, values);
    }

    // One sink in float32: few rows see one, and none sees many. `key` and `scores` have room for D and `rows` numbers.
    __device__ void add_sink(int i, Shared<float> key, Shared<float> scores) {
        int turned = -1;
        for (int r = 0; r < rows; r++) {
            int at = tokens[r];
            bool dropped = head.task.visible.dropped(at);
            if (dropped && turned != at) turn_sink(key, head, i, turned = at);
            float score = dropped ? factor() * sink_score(head, row(r), key) : -INFINITY;
            if (lane_id() == 0) scores[r] = score;
        }
        __syncwarp();
        float score[parts][2], latest[parts][2];
        UNROLL for (int m = 0; m < parts; m++) {
            UNROLL for (int h = 0; h < 2; h++) {
                score[m][h] = scores[16 * m + 8 * h + lane_id() / 4];
                latest[m][h] = fmaxf(most[m][h], score[m][h]);
            }
        }
        raise(latest);
        UNROLL for (int m = 0; m < parts; m++) {
            UNROLL for (int h = 0; h < 2; h++) {
                float weight = score[m][h] == -INFINITY ? 0 : exp2_fast(score[m][h] - most[m][h]);
                sum[m][h] += lane_id() % 4 == 0 ? weight : 0;  // the four lanes of a row are added up in the end
                UNROLL for (int n = 0; n < D / 8; n++) {
                    for (int j = 0; j < 2; j++) {
                        float value = sink_value(head.task, head.cached(0), i, 8 * n + 2 * (lane_id() % 4) + j);
                        out[m][n][2 * h + j] += weight * value;
                    }
                }
            }
        }
        __syncwarp();
    }

    __device__ void store() const {
        UNROLL for (int m = 0; m < parts; m++) {
            UNROLL for (int h = 0; h < 2; h++) {
                float total = sum[m][h];
                total += __shfl_xor_sync(all_lanes, total, 1);
                total += __shfl_xor_sync(all_lanes, total, 2);
                float share = 1 / total;
                int r = 16 * m + 8 * h + lane_id() / 4;
                float *to = head.out(row(r)) + 2 * (lane_id() % 4);
                UNROLL for (int n = 0; n < D / 8; n++) {
                    float2 two = {out[m][n][2 * h] * share, out[m][n][2 * h + 1] * share};
                    if (first + r < head.rows()) *(float2 *)(to + 8 * n) = two;
                }
            }
        }
    }
};

template <class Number, int D, int positions>
__global__ void __launch_bounds__(chunk_threads) attend_chunk_kernel(DeviceAttention task, Span chunk) {
    wait_for_previous();
    let_next_start();
    using Rows = WarpRows<Number, D, positions>;
    constexpr int tile_numbers = positions * padded<D>;
    ChunkHead head(task, chunk, blockIdx.x);
    // Late tokens read most: they go first.
    int first = (int)(gridDim.y - 1 - blockIdx.y) * chunk_warps * Rows::rows;
    TileWalk<positions> tiles(head, first, min(first + chunk_warps * Rows::rows, head.rows()) - 1);
    SharedMemory memory;
    Shared<Number> queries = memory.take<Number>(chunk_warps * Rows::rows * padded<D>);
    Shared<Number> keys = memory.take<Number>(2 * tile_numbers), values = memory.take<Number>(2 * tile_numbers);
    Shared<float> sink = memory.take<float>(chunk_warps * D).from(warp_id() * D);
    Shared<float> sink_scores = memory.take<float>(chunk_warps * Rows::rows).from(warp_id() * Rows::rows);
    Shared<int> tokens = memory.take<int>(chunk_warps * Rows::rows).from(warp_id() * Rows::rows);
    Rows rows(head, first + warp_id() * Rows::rows, tokens);
    queries = queries.from(warp_id() * Rows::rows * padded<D>);
    for (int i = 0; i <= tiles.count(); i++) {
        wait_copies<0>();
        __syncthreads();
        int next = i % 2 * tile_numbers, at = tile_numbers - next;
        if (i < tiles.count()) bring_tile<Number, D, positions>(keys.from(next), values.from(next), head, tiles[i]);
        // While tile i comes, what must come before all tiles is done, or tile i - 1.
        if (i == 0) {
            rows.read_queries(queries);
            for (int s = 0; s < rows.sinks(); s++) rows.add_sink(s, sink, sink_scores);
        } else {
            rows.add_tile(tiles[i - 1], queries, keys.from(at), values.from(at));
        }
    }
    rows.store();
}

template <class Number, int D, int positions>
constexpr size_t chunk_shared() {
    constexpr int rows = chunk_warps * WarpRows<Number, D, positions>::rows;
    return shared_size(rows * padded<D> * sizeof(Number)) +
           2 * shared_size(2 * positions * padded<D> * sizeof(Number)) + shared_size(chunk_warps * D * sizeof(float)) +
           shared_size(rows * sizeof(float)) + shared_size(rows * sizeof(int));
}

// Whether a type is a format, or one derived from it.
template <class Format>
bool holds(const OnDevice<Precision> &type) {
    bool found = false;
    for_each_type<Precision>([&](auto other) {
        found |= std::is_base_of_v<Format, decltype(other)> && type.index == (int)Precision(other).index();
    });
    return found;
}

// Large tiles where nothing is decoded and two blocks of threads fit on a multiprocessor.
template <class Number, int D>
void attend_chunk_tiles(const Device &device, const DeviceAttention &task, const Span &chunk) {
    constexpr int rows = chunk_warps * WarpRows<Number, D, small_tile>::rows;
    dim3 blocks(task.heads.kv, blocks_for((int64_t)chunk.count * task.heads.group(), rows));
    if constexpr (D <= 128) {
        size_t room = chunk_shared<Number, D, large_tile>(), twice = 2 * (room + 1024);  // the card keeps 1 KiB a block
        bool copied = holds<PlainRow<Number>>(task.cache.type_k) && holds<PlainRow<Number>>(task.cache.type_v);
        if (copied && twice <= device.properties.sharedMemPerMultiprocessor)
            return launch(device, {blocks, chunk_threads, room}, attend_chunk_kernel<Number, D, large_tile>, task,
                          chunk);
    }
    size_t room = chunk_shared<Number, D, small_tile>();
    if (room > device.properties.sharedMemPerBlockOptin) return attend_chunk_plain(device, task, chunk);
    launch(device, {blocks, chunk_threads, room}, attend_chunk_kernel<Number, D, small_tile>, task, chunk);
}

// out = attention of the rows of a chunk, which are one sequence's share of a pass. Its keys and values have been
// stored; of formats with blocks only those of full blocks. `products`: what the numbers are rounded to, f16 or bf16;
// exact: they stay float32.
inline void attend_chunk(const Device &device, const DeviceAttention &task, const Span &chunk, bool exact,
                         DType products = DType::f16) {
    bool wide = products == DType::bf16 || holds<BF16>(task.cache.type_k) || holds<BF16>(task.cache.type_v);
    int width = exact || task.cache.values.width != task.heads.width ? 0 : task.heads.width;
    auto with = [&](auto D) {
        wide ? attend_chunk_tiles<bf16, D>(device, task, chunk) : attend_chunk_tiles<f16, D>(device, task, chunk);
    };
    switch (width) {
        case 64:
            return with(std::integral_constant<int, 64>());
        case 80:
            return with(std::integral_constant<int, 80>());
        case 96:
            return with(std::integral_constant<int, 96>());
        case 128:
            return with(std::integral_constant<int, 128>());
        case 256:
            return with(std::integral_constant<int, 256>());
    }
    attend_chunk_plain(device, task, chunk);
}
#endif
