// Attention: the equation, then the rungs of the ladder. Every rung gives what rung 1 gives, up to the rounding of its
// sums, and where the CPU multiplies codes as whole numbers (int8 keys; int4, int2), of what they are multiplied with.
//
//   o = softmax(q K^T / sqrt(D)) V        for each query head; K and V of the positions the query may see
//
// A query at position p sees 0 .. p, or what `Visible` (cache.h) says of windows and sinks. With grouped queries
// (Ainslie et al. 2023, GQA), query head h reads KV head h / (heads / kv_heads).
//
// Its parts: what a pass stores, on the GPU (the CPU's is in cache.h); rung 1, the equation, on the CPU and, over a
// cache and number by number, on the GPU; rung 2, over cached rows in splits, on the CPU. The GPU's fast rungs, 3 and
// 4, are in tensor_cores.cu.
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

// x (width) = RMSNorm(x) where there is one, rotated to `position`; by a warp. A lane takes pairs of numbers, and reads
// nothing here that another lane writes.
__device__ inline void norm_and_rope(float *x, const Tensor &norm, float epsilon, const float *frequencies,
                                     int position, int width) {
    const int half = width / 2;
    float squares = 0, factor = 1;
    for (int i = lane_id(); i < half; i += warp_size) squares += x[i] * x[i] + x[i + half] * x[i + half];
    if (norm.data) factor = 1 / sqrtf(warp_sum(squares) / width + epsilon);
    for (int i = lane_id(); i < half; i += warp_size) {
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
    if (task.keep) keep_vectors(task, span);
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

// Formats whose codes the fast rungs decode in registers. Another one is read number by number.
template <class Number>
std::true_type is_family(const PlainRow<Number> *);
template <class Code, int largest, int divisor>
std::true_type is_family(const ScaledRow<Code, largest, divisor> *);
template <int bits>
std::true_type is_family(const GroupedRow<bits> *);
std::false_type is_family(const void *);
template <class Format>
constexpr bool in_family = decltype(is_family((const Format *)nullptr))::value;
// And whose numbers are factors of 16 bits.
template <class Format>
constexpr bool has_factors = in_family<Format> && !std::is_same_v<Format, F32>;

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
// Returns whether anything is elsewhere now.
inline bool prepare_scratch(const Device &device, DeviceScratch &scratch, const Heads &heads, int value_width,
                            int count, int64_t capacity) {
    constexpr int resident = 3;
    int64_t fill = device.multiprocessors() * resident / (heads.kv * batches_of(heads));
    int64_t most = (capacity + group_size - 1 + least_split - 1) / least_split;
    scratch.splits = (int)std::max<int64_t>(1, std::min(fill, most));
    scratch.value_width = value_width;
    size_t parts = (size_t)count * heads.query * scratch.parts().count();
    bool moved = scratch.partials.resize(device, parts);
    return scratch.values.resize(device, parts * value_width) || moved;
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
constexpr int stream_positions = split_positions / tile_rows;
constexpr int tile_queries = 32;    // query vectors that share a read of the cache; their scores stay in the L2
constexpr int prompt_queries = 96;  // the same in a pass over many tokens, where rows are decoded for more of them

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
constexpr int weigh_queries = lanes == 16 ? 6 : 3;
constexpr int weigh_vecs = 4;

// values[q * stride + ..] += sum over rows r of weights[q * split_positions + r] * row r, for `Vecs` Vecs of channels
// from `channel` on and `Queries` queries: each row is decoded once for all of them.
template <int Queries, int Vecs, class Rows>
inline void weigh_tile(float *values, size_t stride, const float *weights, const Rows &rows, int row_count,
                       int channel) {
    Vec sums[Queries][Vecs];
    for (int q = 0; q < Queries; q++)
        for (int c = 0; c < Vecs; c++) sums[q][c] = load(values + q * stride + c * lanes);
    for (int r = 0; r < row_count; r++) {
        for (int c = 0; c < Vecs; c++) {
            Vec row = rows.load(r, channel + c * lanes);
            for (int q = 0; q < Queries; q++)
                sums[q][c] = fma(set(weights[(size_t)q * split_positions + r]), row, sums[q][c]);
        }
    }
    for (int q = 0; q < Queries; q++)
        for (int c = 0; c < Vecs; c++) store(values + q * stride + c * lanes, sums[q][c]);
}

// The same for `channels` channels of any number of queries.
template <class Rows>
inline void weigh(float *values, size_t stride, const float *weights, const Rows &rows, int row_count, int queries,
                  int channels) {
    int whole = channels / lanes * lanes;
    in_batches<weigh_queries>(queries, [&](auto size, int q) {
        in_batches<weigh_vecs>(channels / lanes, [&](auto vecs, int first) {
            weigh_tile<size, vecs>(values + q * stride + first * lanes, stride, weights + (size_t)q * split_positions,
                                   rows, row_count, first * lanes);
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

struct KVHeads {
    int first, count;
};

// What one layer's attention reads and writes. query, key and value are of this pass.
struct AttentionTask {
    float *out;          // (rows, query_heads, value_width)
    const float *query;  // (rows, query_heads, D), rotated
    PassVectors key, value;
    const Cache &cache;
    int layer;
    Visible visible;
    bool many = false;  // a pass over many tokens of a sequence: see score_panels()
};

// ---- The rows of a split -----------------------------------------------------------------------------------

// Where the rows of the split's positions [begin, end) are, those of the first of some KV heads; zeros elsewhere.
struct SplitRows {
    const CacheRows *side;  // keys or values
    int origin, begin, end;
    const char *start[split_positions];  // (position - origin)
    // Positions that are read: where some lie in all streams, all, else whole groups. What none needs is not touched,
    // as after a layer's weights the lines have left the caches.
    int read() const {
        return end - origin > stream_positions ? split_positions : padded_count(end - origin, group_size);
    }
};

inline void find_rows(SplitRows &rows, const AttentionTask &task, const CacheRows &side, const Span &tile, int kv_head,
                      int origin, int begin, int end) {
    thread_local std::vector<Run> runs;
    thread_local std::vector<char> zeros;
    zeros.resize(side.stride());
    rows.side = &side;
    rows.origin = origin, rows.begin = begin, rows.end = end;
    std::fill(rows.start, rows.start + (begin - origin), zeros.data());
    std::fill(rows.start + (end - origin), rows.start + rows.read(), zeros.data());
    find_runs(runs, task.cache, tile.sequence, begin, end);
    for (const Run &run : runs) {
        const char *row = side.at(task.layer, run.row, kv_head);
        for (int i = 0; i < run.count; i++, row += side.stride()) rows.start[run.position - origin + i] = row;
    }
}

// Some of them, of one KV head: row r is that of position r * apart from the first one on.
template <class RowFormat>
struct TableRows {
    using Format = RowFormat;
    const char *const *start;
    size_t offset;  // of the KV head
    int apart = 1;
    template <int Rows>
    void ask(int r, int line) const {
        ask_stream(row(r) + line * cache_line);
    }
    const char *row(int r) const { return start[r * apart] + offset; }
    Vec load(int r, int i) const { return Format::decode(row(r), i); }
    Vec load_part(int r, int i, int count) const { return Format::decode_part(row(r), i, count); }
    f16 scale(int r) const { return Format::scale_and_zero(row(r), 0).scale; }
};

// What is asked for while groups are read: `step` bytes for each.
struct Ahead {
    const char *start;
    size_t step = 0;
};

// What is read at a time, where a split is not read as streams: its positions [begin, end) of one KV head. `ahead` is
// what will be read from memory after them, or nullptr: position t's share of it is `ahead_stride` bytes.
struct Stretch {
    const AttentionTask &task;
    const SplitRows &rows;
    const Span &tile;
    int kv_head;
    size_t offset;  // of its rows from `rows`
    int begin, end;
    const char *ahead;
    size_t ahead_stride;
    // Of a format with blocks, the tile's own block is not read as stored, but at f16: from here on.
    template <class Format>
    int recent() const {
        return Format::key_groups ? std::min(end, tile.position / group_size * group_size) : end;
    }
    int in_split(int t) const { return t - rows.origin; }
    const char *const *starts(int t) const { return rows.start + in_split(t); }
    // What lies ahead of `count` positions from t on, to be asked for in `steps` steps; or what is read anyway.
    Ahead ahead_of(int t, int count, int steps) const {
        if (!ahead || t < begin) return {*starts(t)};
        return {ahead + (t - begin) * ahead_stride, count * ahead_stride / steps};
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
        const char *start =
            recent.at(stretch.task.layer, tile.sequence * group_size + from % group_size, stretch.kv_head);
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

// The factors of 16 bits of some queries' products with codes: factor i of query q is about units[q] times
// whole[q * stride + i]. Behind the last there is a zero.
struct Factors {
    int16_t *whole;  // (query, stride)
    float *exact;    // the same factors before they are rounded
    size_t stride;
    float *units, *zeros;  // (query)
    Factors from(int i) const { return {whole + i, exact + i, stride, units, zeros}; }
};

inline Factors room_for_factors(int count) {
    thread_local Aligned<int16_t> whole;
    thread_local Floats exact;
    thread_local float units[weigh_queries], zeros[weigh_queries];
    size_t stride = whole_vecs(count) + lanes, size = weigh_queries * stride;
    if (whole.size() < size) whole.resize(size), exact.resize(size);
    return {whole.data(), exact.data(), stride, units, zeros};
}

// to[i] = round(x[i] / unit) for the unit that is returned, with which `most`, the largest magnitude among them,
// becomes `most_whole`; x is read, and `to` written, up to a whole Vec.
inline float round_factors(int16_t *to, const float *x, int count, float most, float most_whole) {
    float unit = most / most_whole;
    Vec inverse = set(1 / unit);
    for (int i = 0; i < count; i += lanes) store(to + i, mul(load(x + i), inverse));
    return unit;
}
constexpr float least_factor = 0x1p-110f;  // so that 1 / unit is finite

// numbers(q)[i] * scale i as whole numbers, the largest of a query 32,767 or less, and in `zeros` the sums of
// numbers(q)[i] * zero i, for `Queries` queries; `pairs` goes on to a whole Vec with zeros. What is not a number is so
// in its group's zero point too, and in the sum of these.
template <int Queries, class Numbers>
inline void fold_scales(const Factors &to, Numbers numbers, const ScaleAndZero *pairs, int count) {
    Vec totals[Queries], most[Queries], scale, zero;
    for (int q = 0; q < Queries; q++) totals[q] = set(0), most[q] = set(least_factor);
    auto fold = [&](int i, auto read) {
        load_pairs(&pairs[i].scale, scale, zero);
        for (int q = 0; q < Queries; q++) {
            Vec number = read(numbers(q) + i), factor = mul(number, scale);
            store(to.exact + q * to.stride + i, factor);
            totals[q] = fma(number, zero, totals[q]);
            most[q] = max(magnitude(factor), most[q]);
        }
    };
    const int whole = count / lanes * lanes;
    for (int i = 0; i < whole; i += lanes) fold(i, [](const float *from) { return load(from); });
    if (whole < count) fold(whole, [&](const float *from) { return load_part(from, count - whole); });
    const float most_whole = std::min(32767.0f, 0x1p27f / (float)count);  // so that 32 bits hold the sum
    for (int q = 0; q < Queries; q++) {
        int16_t *rounded = to.whole + q * to.stride;
        to.units[q] = round_factors(rounded, to.exact + q * to.stride, count, largest(most[q]), most_whole);
        rounded[count] = 0;
        to.zeros[q] = sum(totals[q]);
    }
}

// A row has one scale: scaled = numbers * scales, both (queries, split_positions), for the first `count` rows and their
// positions; times units (queries), where there are some.
template <class Format>
inline void scale_rows(float *scaled, const float *numbers, int queries, TableRows<Format> rows, int count,
                       const float *units = nullptr) {
    alignas(cache_line) float scales[split_positions];
    int r = 0;
    for (; r + 4 <= count; r += 4) {
        const f16 four[4] = {rows.scale(r), rows.scale(r + 1), rows.scale(r + 2), rows.scale(r + 3)};
        to_floats(scales + r, four);
    }
    for (; r < count; r++) scales[r] = to_float(rows.scale(r));
    for (int q = 0; q < queries; q++) {
        float *to = scaled + (size_t)q * split_positions;
        multiply(to, numbers + (size_t)q * split_positions, scales, count);
        if (units) multiply(to, units[q], count);
    }
}

// ---- Groups of 32 numbers ----------------------------------------------------------------------------------
//
// Scores of a block of keys and weighted values are the same sum: over groups of 32 codes, each times a factor, for
// each query; a group is a channel at 32 positions, or 32 channels at a position. Scales go into the factors
// beforehand, 8 or 16 at a time; and factors become whole numbers of 16 bits, so that the codes of two groups, side by
// side, take one instruction for both products, and none to become floats. The sum is then exact. What a factor loses
// by it is 2^-16 of the largest: some thousandth of what its codes of 2 or 4 bits lost before.
//
// Predicted, for 64 codes and 3 queries: AVX-512 12 instructions instead of 22, AVX2 34 instead of 50. Measured, one
// thread of an Emerald Rapids, 1,024 positions of SmolLM2-135M's shape in the L2, for 8 numbers: 1.06 -> 0.78 ns, with
// AVX2 alone 1.43 -> 1.13.

constexpr int group_vecs = group_size / lanes;

// Where groups are: PerRow of them in each row, which is 1 or even.
template <class Group, int PerRow>
struct GroupTable {
    const char *const *rows;
    size_t offset;  // in a row
    const Group &at(int g) const { return ((const Group *)(rows[g / PerRow] + offset))[g % PerRow]; }
    // Groups 2 i and 2 i + 1.
    const Group &first(int i) const { return at(2 * i); }
    const Group &second(int i) const {
        if constexpr (PerRow == 1) return at(2 * i + 1);
        return (&first(i))[1];
    }
    void take_pairs(ScaleAndZero *pairs, int count) const {
        for (int i = 0; i < count / 2; i++) pairs[2 * i] = first(i).both, pairs[2 * i + 1] = second(i).both;
        if (count % 2) pairs[count - 1] = at(count - 1).both;
    }
};

// to[q * to_stride + i] = or += units[q] * (sum over groups g of factor g of query q * code i of group g) + zeros[q],
// for the codes of Vecs p and p + group_vecs / 2, which come out of the same bytes, and `Queries` queries. Half of a
// group's sums or less at a time: with 16 registers there is no room for more. Meanwhile `ahead` is asked for.
template <int p, int Queries, class Table>
__attribute__((noinline)) void add_codes(Store how, float *to, size_t to_stride, Table groups, int count,
                                         const Factors &by, Ahead ahead) {
    Ints low[Queries], high[Queries];
    for (int q = 0; q < Queries; q++) low[q] = high[q] = to_ints(set(0));
    auto add_two = [&](const auto &a, const auto &b, const int16_t *two) {
        Pairs low_codes = load_pairs(&a.codes, &b.codes, p);
        Pairs high_codes = load_pairs(&a.codes, &b.codes, p + group_vecs / 2);
        for (int q = 0; q < Queries; q++) {
            Pairs factors = set_pair(two + q * by.stride);
            low[q] = add_products(low[q], factors, low_codes);
            high[q] = add_products(high[q], factors, high_codes);
        }
    };
    for (int i = 0; i < count / 2; i++, ahead.start += 2 * ahead.step) {
        __builtin_prefetch(ahead.start);
        __builtin_prefetch(ahead.start + ahead.step);
        add_two(groups.first(i), groups.second(i), by.whole + 2 * i);
    }
    if (count % 2) add_two(groups.at(count - 1), groups.at(count - 1), by.whole + count - 1);  // and a factor of 0
    for (int q = 0; q < Queries; q++) {
        auto put = [&](int vec, Ints sum) {
            float *at = to + q * to_stride + vec * lanes;
            Vec total = fma(to_floats(sum), set(by.units[q]), set(by.zeros[q]));
            store(at, how == Store::add ? add(load(at), total) : total);
        };
        put(p, low[q]);
        put(p + group_vecs / 2, high[q]);
    }
}

// The same for all codes.
template <int Queries, class Table, int... p>
inline void add_groups(Store how, float *to, size_t to_stride, Table groups, int count, const Factors &by, Ahead ahead,
                       std::integer_sequence<int, p...>) {
    (add_codes<p, Queries>(how, to, to_stride, groups, count, by, p == 0 ? ahead : Ahead{*groups.rows}), ...);
}
constexpr std::make_integer_sequence<int, group_vecs / 2> each_half;

// Room for the scales and zero points of `count` groups, zeros for the first `missing` and behind the last.
inline ScaleAndZero *room_for_pairs(int missing, int count) {
    thread_local Aligned<ScaleAndZero> pairs;
    pairs.resize(std::max<size_t>(pairs.size(), whole_vecs(count)));
    std::fill_n(pairs.begin(), missing, ScaleAndZero{});
    std::fill(pairs.begin() + count, pairs.begin() + whole_vecs(count), ScaleAndZero{});
    return pairs.data();
}

// Calls use(table) with the groups of a block of keys, one for each channel. How many a row has is a constant where
// rows have 64 or 128 numbers.
template <class Format, class Use>
inline void with_key_groups(const char *const *rows, size_t offset, int width, Use use) {
    using G = typename Format::G;
    int per_row = Format::groups(width);
    if (per_row == 2) return use(GroupTable<G, 2>{rows, offset});
    if (per_row == 4) return use(GroupTable<G, 4>{rows, offset});
    thread_local std::vector<const char *> groups;
    groups.resize(width);
    for (int c = 0; c < width; c++) groups[c] = rows[c / per_row] + offset + c % per_row * sizeof(G);
    use(GroupTable<G, 1>{groups.data(), 0});
}

// Scores of the block of keys that begins at position `begin`: a group of codes for each channel.
template <class Format>
inline void score_block(float *scores, const float *const *queries, int query_count, const Stretch &stretch,
                        int begin) {
    int width = stretch.task.cache.keys.width;
    const char *const *rows = stretch.starts(begin);
    ScaleAndZero *pairs = room_for_pairs(0, width);
    Factors by = room_for_factors(width);
    with_key_groups<Format>(rows, stretch.offset, width, [&](auto groups) {
        groups.take_pairs(pairs, width);
        in_batches<weigh_queries>(query_count, [&](auto size, int q) {
            auto numbers = [&](int i) { return queries[q + i]; };
            fold_scales<size>(by, numbers, pairs, width);
            add_groups<size>(Store::set, scores + (size_t)q * split_positions, split_positions, groups, width, by,
                             q ? Ahead{*rows} : stretch.ahead_of(begin, group_size, width), each_half);
        });
    });
}

// values (queries, width) += the weighted rows of a stretch's positions up to `end`: for each 32 channels a group of
// each position.
template <class Format>
inline void weigh_groups(float *values, const float *weights, int queries, const Stretch &stretch, int end) {
    using G = typename Format::G;
    int width = stretch.task.cache.values.width, first = stretch.begin / lanes * lanes;
    int missing = stretch.begin - first, count = end - first;
    const char *const *rows = stretch.starts(stretch.begin);
    ScaleAndZero *pairs = room_for_pairs(missing, count);
    Factors by = room_for_factors(count);
    for (int c = 0; c < width; c += group_size) {
        int channels = std::min(group_size, width - c);
        GroupTable<G, 1> groups{rows, stretch.offset + c / group_size * sizeof(G)};
        groups.take_pairs(pairs + missing, count - missing);
        Ahead ahead = c ? Ahead{*rows} : stretch.ahead_of(stretch.begin, count - missing, count - missing);
        in_batches<weigh_queries>(queries, [&](auto size, int q) {
            auto numbers = [&](int i) { return weights + (size_t)(q + i) * split_positions + stretch.in_split(first); };
            fold_scales<size>(by, numbers, pairs, count);
            auto add = [&](Store how, float *to, size_t stride) {
                add_groups<size>(how, to, stride, groups, count - missing, by.from(missing), q ? Ahead{*rows} : ahead,
                                 each_half);
            };
            float *to = values + (size_t)q * width + c;
            if (channels == group_size) return add(Store::add, to, width);
            float part[size][group_size];
            add(Store::set, part[0], group_size);
            for (int i = 0; i < size; i++) axpy(to + (size_t)i * width, 1, part[i], channels);
        });
    }
}

// ---- A stretch in any format -------------------------------------------------------------------------------

// Scores of stored rows with the many queries of a tile of a prompt, which stand in tiles as in linear_panels(): the
// rows are decoded once for all of them, and no sum has to be folded. SmolLM2-135M's shape, 2,048 tokens, one thread:
// predicted 8 % of the prefill; measured 17.6 -> 11.7 % of its time.
template <class Rows>
inline void score_panels(float *scores, const float *query_tiles, int query_count, Rows rows, int row_count,
                         int width) {
    thread_local Floats panel;
    float out[panel_tokens * panel_rows];
    int whole = width / lanes * lanes;
    for (int first = 0; first < row_count; first += panel_rows) {
        int some = std::min(panel_rows, row_count - first);
        fill_panel(panel, some, width, [&](float *to, int r) {
            for (int i = 0; i < whole; i += lanes) store(to + i, rows.load(first + r, i));
            if (whole < width) store_part(to + whole, rows.load_part(first + r, whole, width - whole), width - whole);
        });
        for (int q = 0; q < query_count; q += panel_tokens) {
            panel_products(out, panel.data(), query_tiles + (size_t)q * width, width, false);
            for (int i = 0; i < std::min(panel_tokens, query_count - q); i++) {
                const float *from = out + i * panel_rows;
                float *to = scores + (size_t)(q + i) * split_positions + first;
                for (int r = 0; r < some / lanes * lanes; r += lanes) store(to + r, load(from + r));
                for (int r = some / lanes * lanes; r < some; r++) to[r] = from[r];
            }
        }
    }
}

// The raw scores q . k of a stretch of groups, or in a pass over many tokens: query q's score of position t at
// scores[q * split_positions + t - origin]. Of a block of keys all 32 are scored if one of them is visible.
inline void score_stretch(float *scores, const float *const *queries, int query_count, const float *query_tiles,
                          const Stretch &stretch, const PassVectors &fresh) {
    const Cache &cache = stretch.task.cache;
    int width = cache.keys.width;
    auto at = [&](int t) { return scores + t - stretch.rows.origin; };
    auto score_many = [&](int t, auto rows, int count) {
        score_panels(at(t), query_tiles, query_count, rows, count, width);
    };
    auto score_recent = [&](int t, auto rows, int count) {
        if (query_tiles) return score_many(t, rows, count);
        dots(at(t), split_positions, rows, count, queries, query_count, width);
    };
    auto score_stored = [&](auto format) {
        using Format = decltype(format);
        int recent = stretch.recent<Format>();
        if constexpr (Format::key_groups) {
            for (int t = stretch.begin / group_size * group_size; t < recent; t += group_size)
                score_block<Format>(at(t), queries, query_count, stretch, t);
        } else {
            TableRows<Format> stored{stretch.starts(stretch.begin), stretch.offset};
            score_many(stretch.begin, stored, recent - stretch.begin);
            if constexpr (Format::scale_channels > 0)
                scale_rows(at(stretch.begin), at(stretch.begin), query_count, stored, recent - stretch.begin);
        }
        for_each_recent_run(stretch, cache.recent_keys, fresh, std::max(stretch.begin, recent), score_recent);
    };
    std::visit(score_stored, cache.type_k);
}

// values (queries, width) += the weighted rows of a stretch; weights (queries, split_positions).
inline void weigh_stretch(float *values, const float *weights, int queries, const Stretch &stretch,
                          const PassVectors &fresh) {
    const Cache &cache = stretch.task.cache;
    int width = cache.values.width;
    auto weigh_stored = [&](auto format) {
        using Format = decltype(format);
        int recent = std::max(stretch.begin, stretch.recent<Format>());
        const float *factors = weights;
        auto weigh_rows = [&](int t, auto rows, int count) {
            weigh(values, width, factors + t - stretch.rows.origin, rows, count, queries, width);
        };
        if constexpr (Format::key_groups) {
            if (recent > stretch.begin) weigh_groups<Format>(values, weights, queries, stretch, recent);
        } else {
            TableRows<Format> stored{stretch.starts(stretch.begin), stretch.offset};
            if constexpr (Format::scale_channels > 0) {
                thread_local Floats scaled;  // (queries, split_positions)
                scaled.resize((size_t)queries * split_positions);
                size_t at = stretch.in_split(stretch.begin);
                scale_rows(&scaled[at], weights + at, queries, stored, recent - stretch.begin);
                factors = scaled.data();
            }
            weigh_rows(stretch.begin, stored, recent - stretch.begin);
        }
        factors = weights;
        for_each_recent_run(stretch, cache.recent_values, fresh, recent, weigh_rows);
    };
    std::visit(weigh_stored, cache.type_v);
}

// ---- A split as four streams -------------------------------------------------------------------------------
//
// Rows of numbers and codes (not groups), for few queries: four positions at a time, a fourth of the split apart, and
// all heads' rows of each, so that memory is read as four streams that the processor's own prefetcher follows (see
// linear_streams()). Predicted: 1.4 x at every type. Measured, attention over 8,000 positions by 2 threads of a Zen 3,
// against one stream that was asked for ahead: f32 1.4 to 1.5 x as fast, bf16 and f16 1.1 to 1.25 x, fp8 1.03 x, int8
// the same: they wait for their arithmetic. Asking for the next tiles as well made all of them slower.

// Tiles that are read between two looks at their scales: 16 positions of each stream, which stay in the L1.
constexpr int scaled_tiles = 16;

// use(count, t) for tile i, if there is something in it: `count` rows from position t of the split on, a stream apart,
// of which it is a constant whether there is one or more.
template <class Use>
inline void with_tile(const SplitRows &rows, int i, Use use) {
    int begin = rows.begin - rows.origin, end = rows.end - rows.origin, t = i;
    while (t < begin) t += stream_positions;
    if (t + stream_positions < end)
        use(std::integral_constant<int, tile_rows>{}, i);
    else if (t < end)
        use(std::integral_constant<int, 1>{}, t);
}

inline bool as_streams(const AttentionTask &task, const Precision &type) { return !task.many && !has_blocks(type); }

// Calls use(format, width) for a format of such rows; their width is a constant where it is 64 or 128, so that no loop
// over it is left, and rows of bf16 are then read in pairs. Measured, one thread of a Zen 3, f16: scores 1.06 -> 0.78
// ns for 8 numbers, values 0.58 -> 0.52.
template <class Use>
inline void with_rows(const Precision &type, int width, Use use) {
    auto with_width = [&](auto format) {
        if constexpr (!decltype(format)::key_groups) {
            using Constant = std::conditional_t<std::is_same_v<decltype(format), BF16>, PairedRow, decltype(format)>;
            if (width == 64) return use(Constant(), std::integral_constant<int, 64>{});
            if (width == 128) return use(Constant(), std::integral_constant<int, 128>{});
            use(format, width);
        }
    };
    std::visit(with_width, type);
}

// ---- Keys of int8: products of whole numbers ----
//
// The queries become whole numbers of 16 bits, too, with a unit each, so that two products take one instruction and the
// codes need not become floats. What is lost by it, 2^-16 of a query's largest number, is a hundredth of what its keys
// lost as codes of 8 bits.
//
// Predicted, for 4 rows of 64 and 3 queries with AVX-512: 86 instructions instead of 130. Measured, one thread of an
// Emerald Rapids, keys and values in the L2, for 8 numbers: 1.05 -> 0.96 ns, with AVX2 alone 1.34 -> 1.22. Then the
// sums were folded as whole numbers, too, and scales applied a Vec of positions at a time: scale_tiles().

// Vectors as whole numbers of 16 bits: number i of vector v is about units[v] * whole[v * stride + i], up to stride.
struct WholeVectors {
    const int16_t *whole;  // (vector, stride)
    const float *units;
    size_t stride;  // `width`, filled up with zeros
};

inline WholeVectors whole_vectors(const float *const *vectors, int count, int width) {
    thread_local Aligned<int16_t> whole;
    thread_local Floats padded, units;
    size_t stride = padded_count(width, 2 * lanes);
    whole.resize(count * stride);
    units.resize(count);
    padded.assign(stride, 0);
    for (int v = 0; v < count; v++) {
        std::copy_n(vectors[v], width, padded.data());
        Vec most = set(least_factor), nan = set(0);
        for (size_t i = 0; i < stride; i += lanes) {
            most = max(magnitude(load(&padded[i])), most);
            nan = fma(load(&padded[i]), set(0), nan);
        }
        float most_whole =
            std::min(32767.0f, 0x1p24f / (float)width);  // so that 32 bits hold the sum of 127 times them
        units[v] = round_factors(&whole[v * stride], padded.data(), (int)stride, largest(most), most_whole) + sum(nan);
    }
    return {whole.data(), units.data(), stride};
}

// As dot_tile(), of rows of codes with the vectors from `first` on.
template <int Rows, int Vectors, class Width>
inline void dot_codes_tile(float *out, size_t out_stride, TableRows<Int8> rows, const WholeVectors &vectors, int first,
                           Width width, size_t row_stride) {
    Ints sums[Vectors][Rows];
    for (int v = 0; v < Vectors; v++)
        for (int r = 0; r < Rows; r++) sums[v][r] = to_ints(set(0));
    const int16_t *whole = vectors.whole + first * vectors.stride;
    auto add_row = [&](int r, int i, const int8_t *codes) {
        Pairs row = load_neighbours(codes);
        for (int v = 0; v < Vectors; v++)
            sums[v][r] = add_products(sums[v][r], row, load_neighbours(whole + v * vectors.stride + i));
    };
    int i = 0;
    for (; i + 2 * lanes <= width; i += 2 * lanes) {
        for (int r = 0; r < Rows; r++) {
            if (i % cache_line == 0) rows.template ask<Rows>(r, i / cache_line);
            add_row(r, i, Int8::codes(rows.row(r)) + i);
        }
    }
    for (int r = 0; i < width && r < Rows; r++) {
        int8_t rest[2 * lanes] = {};
        memcpy(rest, Int8::codes(rows.row(r)) + i, width - i);
        add_row(r, i, rest);
    }
    float finished[Vectors * Rows];
    fold_sums<Vectors * Rows>(finished, [&](int i) { return sums[i / Rows][i % Rows]; });
    for (int v = 0; v < Vectors; v++)
        for (int r = 0; r < Rows; r++) out[v * out_stride + r * row_stride] = finished[v * Rows + r];
}

// Asks for row i of each stream of what is read next: the values while the keys are read, and the next split's keys
// while the values are. Otherwise each of them begins with 1.2 us of waiting (f16: 5.8 us of reading), as what is asked
// for ahead ends with the stream. Predicted: half of that. Measured, 2 threads of an Emerald Rapids, 8,000 positions:
// attention over f16 1.36 -> 1.26 ns for 8 numbers, int8 1.09 -> 1.00, f32 the same. To GCC a function that only asks
// has no effect: if it is not inlined before that is noticed, its calls are removed.
__attribute__((always_inline)) inline void ask_rows(const SplitRows &rows, int i, int heads) {
    for (int t = i; i < stream_positions && t < rows.end - rows.origin; t += stream_positions)
        for (size_t at = 0; at < heads * rows.side->row_bytes; at += cache_line)
            __builtin_prefetch(rows.start[t] + at, 0, 2);
}

// Whether it does so while rows of this type are computed with. A Zen's prefetcher (stream_ahead) is disturbed by it
// where rows wait for memory, but those of 8 bits wait for their arithmetic: 2 threads of a Zen 3, as above, f32 0.75 x
// as fast, f16 and bf16 0.85 x, fp8 and int8 1.1 x. Where it does not, the values' first rows are asked for while the
// softmax is computed: 1.02 x.
inline bool asks_meanwhile(const Precision &type) {
    return std::visit([](auto format) { return stream_ahead > 0 || decltype(format)::scale_channels > 0; }, type);
}

// The vectors in the order of PairedRow. They stay until the thread's next call.
inline const float *const *vectors_in_pairs(const float *const *vectors, int count, int width) {
    thread_local std::vector<const float *> starts;
    thread_local Floats ordered;
    starts.resize(count);
    ordered.resize((size_t)count * width);
    for (int v = 0; v < count; v++) {
        in_pairs(&ordered[(size_t)v * width], vectors[v], width);
        starts[v] = &ordered[(size_t)v * width];
    }
    return starts.data();
}

// What belongs to the rows of some tiles from `first` on, numbers (head, query, split_positions), times the rows'
// scales, where rows have any, and times units (head, query), if there are some. A Vec of positions at a time, as one
// product for each row and query and its broadcast were a fifth of the instructions. Predicted: 1.2 x as fast, with the
// fold of whole numbers 1.3 x. Measured, int8 as above: 0.99 -> 0.92 ns.
template <class Format>
inline void scale_tiles(float *numbers, int queries, const SplitRows &rows, int first, int heads,
                        const float *units = nullptr) {
    if constexpr (Format::scale_channels > 0) {
        for (int i = 0; i < heads * tile_rows; i++) {
            int head = i / tile_rows, t = first + i % tile_rows * stream_positions;
            if (t + scaled_tiles <= rows.begin - rows.origin || t >= rows.end - rows.origin) continue;
            float *at = numbers + (size_t)head * queries * split_positions + t;
            TableRows<Format> of_head{rows.start + t, head * rows.side->row_bytes};
            scale_rows(at, at, queries, of_head, scaled_tiles, units ? units + head * queries : nullptr);
        }
    }
}

// The raw scores q . k of a split, (head, query, split_positions). `then`, if anything, is what is read after it.
template <class Format, class Width>
__attribute__((flatten, noinline)) void score_streams(float *scores, const float *const *vectors, int queries,
                                                      const SplitRows &rows, const SplitRows *then, int heads,
                                                      Width width) {
    WholeVectors whole{};
    if constexpr (std::is_same_v<Format, Int8>) whole = whole_vectors(vectors, heads * queries, width);
    if constexpr (vecs_together<Format> == 2) vectors = vectors_in_pairs(vectors, heads * queries, width);
    auto score_tile = [&](auto count, int t) {
        if (then) ask_rows(*then, t, heads);
        for (int head = 0; head < heads; head++) {
            TableRows<Format> tile{rows.start + t, head * rows.side->row_bytes, stream_positions};
            in_batches<tile_vectors>(queries, [&](auto size, int q) {
                int first = head * queries + q;
                float *to = scores + (size_t)first * split_positions + t;
                if constexpr (std::is_same_v<Format, Int8>)
                    dot_codes_tile<count, size>(to, split_positions, tile, whole, first, width, stream_positions);
                else
                    dot_tile<count, size>(to, split_positions, tile, vectors + first, width, stream_positions);
            });
        }
    };
    for (int i = 0; i < stream_positions; i++) {
        with_tile(rows, i, score_tile);
        if (i % scaled_tiles == scaled_tiles - 1)
            scale_tiles<Format>(scores, queries, rows, i + 1 - scaled_tiles, heads, whole.units);
    }
}

// values (Queries, width) += the rows of a tile, times weights[q * split_positions + r * stream_positions].
template <int Rows, int Queries, class Format, class Width>
inline void weigh_rows(float *values, const float *weights, TableRows<Format> rows, Width width) {
    Vec weight[Queries][Rows];
    for (int q = 0; q < Queries; q++)
        for (int r = 0; r < Rows; r++) weight[q][r] = set(weights[q * split_positions + r * stream_positions]);
    auto add = [&](Vec sum, Vec row, int q, int r) { return fma(weight[q][r], row, sum); };
    constexpr int together = vecs_together<Format>;
    int c = 0;
    for (; c + together * lanes <= width; c += together * lanes) {
        Vec sums[Queries][together], row[together];
        auto each_sum = [&](auto use) {
            for (int q = 0; q < Queries; q++)
                for (int k = 0; k < together; k++) use(sums[q][k], values + q * (size_t)width + c + k * lanes);
        };
        each_sum([](Vec &sum, const float *at) { sum = load(at); });
        for (int r = 0; r < Rows; r++) {
            decode<Format>(row, rows.row(r), c);
            for (int q = 0; q < Queries; q++)
                for (int k = 0; k < together; k++) sums[q][k] = add(sums[q][k], row[k], q, r);
        }
        each_sum([](const Vec &sum, float *at) { store(at, sum); });
    }
    for (int q = 0; c < width && q < Queries; q++) {
        float *at = values + q * (size_t)width + c;
        Vec sum = load_part(at, width - c);
        for (int r = 0; r < Rows; r++) sum = add(sum, rows.load_part(r, c, width - c), q, r);
        store_part(at, sum, width - c);
    }
}

// to (head, query, width), `step` numbers from head to head, += the weighted rows of a split; weights (head, query,
// split_positions).
template <class Format, class Width>
__attribute__((flatten, noinline)) void weigh_streams(float *to, size_t step, float *weights, int queries,
                                                      const SplitRows &rows, const SplitRows *then, int heads,
                                                      Width width) {
    auto weigh_tile = [&](auto count, int t) {
        if (then) ask_rows(*then, t, heads);
        for (int head = 0; head < heads; head++) {
            TableRows<Format> tile{rows.start + t, head * rows.side->row_bytes, stream_positions};
            in_batches<weigh_queries>(queries, [&](auto size, int q) {
                weigh_rows<count, size>(to + head * step + q * (size_t)width,
                                        weights + (size_t)(head * queries + q) * split_positions + t, tile, width);
            });
        }
    };
    for (int i = 0; i < stream_positions; i++) {
        if (i % scaled_tiles == 0) scale_tiles<Format>(weights, queries, rows, i, heads);
        with_tile(rows, i, weigh_tile);
    }
    for (int q = 0; vecs_together<Format> == 2 && q < heads * queries; q++) {
        thread_local Floats ordered;
        float *values = to + q / queries * step + q % queries * (size_t)width;
        ordered.assign(values, values + width);
        out_of_pairs(values, ordered.data(), width);
    }
}

// Prepares the scores of a split's first `count` positions, of which [low, high) are visible, and finds the largest
// factor * score.
inline float largest_score(float *scores, int low, int high, int count, float factor) {
    const float invisible = -std::numeric_limits<float>::infinity();
    std::fill(scores, scores + low, invisible);
    std::fill(scores + high, scores + count, invisible);
    Vec most = set(invisible);
    for (int i = 0; i < high; i += lanes) most = max(most, mul(set(factor), load(scores + i)));
    return largest(most);
}

// Those scores become e^(factor * score - most), and 0 behind them as far as values are read: 0 times what another
// sequence left there could be NaN. A position's lane is fixed by its place in the split: no bound moves the sum.
inline Partial softmax_split(float *scores, float most, int count, int read, float factor) {
    std::fill(scores + count, scores + read, 0.0f);
    Vec total = set(0);
    for (int i = 0; i < count; i += lanes) {
        // Rounded as for the maximum: with fma(), scores of 10^10 would leave it by more than e^x can hold.
        Vec weight = exp(add(mul(set(factor), load(scores + i)), set(-most)));
        store(scores + i, weight);
        total = add(total, weight);
    }
    return {most, sum(total)};
}

constexpr size_t most_shared = (size_t)1 << 22;  // floats of partial results, 16 MiB, however long the context is

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
    int first_part() const { return widest.sinks ? 0 : 1; }
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
                                    const Cache &cache, const std::vector<float> &frequencies, int threads,
                                    bool many = false) {
    AttentionPlan plan;
    const int most_queries = many ? prompt_queries : tile_queries;
    plan.blocks = has_blocks(cache.type_k) || has_blocks(cache.type_v);
    plan.heads = heads;
    plan.stored = spans_of(sequences, positions, count, group_size, true);
    plan.tiles = spans_of(sequences, positions, count, std::max(1, most_queries / heads.group()), plan.blocks);
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
        for (int part = plan.first_part(); part < plan.parts_of(plan.tiles[tile]); part++)
            for (int set = 0; set < plan.head_sets(); set++) plan.parts.push_back({tile, set, part});
    std::vector<int> sinks;
    for (int row = 0; row < count; row++)
        for (int i = 0; i < plan.widest.sinks; i++) sinks.push_back(plan.widest.shift(positions[row]) + i);
    plan.sink_turn.resize(sinks.size() * heads.width);
    rope_angles(plan.sink_turn.data(), frequencies, sinks.data(), (int)sinks.size());
    return plan;
}

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

// So many positions are read head by head before the next ones: their rows of `heads` KV heads, and as many more, stay
// in the L1.
inline int positions_together(const CacheRows &side, const Precision &type, int heads) {
    int positions = split_positions / 2, least = has_blocks(type) ? group_size : tile_rows;
    while (positions > least && positions * heads * side.row_bytes > 16384) positions /= 2;
    return positions;
}

// Calls use(stretch, i) for the KV heads of `some`, and for positions [begin, end) of a split in stretches that fit
// into the L1. While one stretch is computed with, the next one is asked for, line after line in the order of memory;
// while the last one is, what `then` begins with at position `after`.
//
// When each head was read alone, a third of the lines at a time, one thread of a Zen 3 got 8 GB/s out of memory that
// reads at 13, and what it waited came on top of what it computed (8,000 positions at f16: 2.1 ns for 8 numbers, 1.2 of
// them without the waiting). Predicted: the longer of the two, 1.2. Measured: 1.45; both threads 12.2 -> 9.9 ms. Of
// rows at f16, that is, which are now read as streams; groups still come this way.
template <class Use>
inline void for_each_stretch(const AttentionTask &task, const Span &tile, const SplitRows &rows, int begin,
                             const KVHeads &some, const CacheRows &then, int after, Use use) {
    bool all = some.count == then.kv_heads, keys = rows.side == &task.cache.keys;
    int step = positions_together(*rows.side, keys ? task.cache.type_k : task.cache.type_v, some.count);
    size_t row_bytes = rows.side->row_bytes;
    for (int t = begin, next; t < rows.end; t = next) {
        next = std::min(rows.end, (t / step + 1) * step);
        const char *ahead = nullptr;
        size_t ahead_stride = row_bytes;
        if (all && next < rows.end) {
            ahead = rows.start[next - rows.origin];
        } else if (all && after < tile.position + tile.count) {
            ahead = then.at(task.layer, row_of(task.cache, tile.sequence, after), 0);
            ahead_stride = then.row_bytes;
        }
        for (int i = 0; i < some.count; i++) {
            use(Stretch{task, rows, tile, some.first + i, i * row_bytes, t, next, ahead, ahead_stride}, i);
            if (ahead) ahead += step * ahead_stride;
        }
    }
}

// What a thread needs room for while it computes a split.
struct SplitRoom {
    Floats scores;                       // (head, query, split_positions)
    std::vector<const float *> vectors;  // (head, query)
    Floats tiles;                        // (head, query / panel_tokens, D, panel_tokens), in a pass over many tokens
    SplitRows keys, values;
};

// One split of the positions, for all queries of a tile that read some KV heads.
struct Split {
    const AttentionTask &task;
    const Heads &heads;
    const Span &tile;
    const KVHeads &some;
    int origin, begin, end;  // its first position; what is read of it
    SplitRoom &room;
    int queries() const { return tile.count * heads.group(); }
    float *scores(int head, int query) const {
        return &room.scores[((size_t)head * queries() + query) * split_positions];
    }
    const float *const *vectors(int head) const { return &room.vectors[(size_t)head * queries()]; }
    size_t tiles_of_head() const { return (size_t)padded_count(queries(), panel_tokens) * heads.width; }
    float *tiles(int head) const { return task.many ? &room.tiles[head * tiles_of_head()] : nullptr; }
    bool keys_as_streams() const { return as_streams(task, task.cache.type_k); }
    bool values_as_streams() const { return as_streams(task, task.cache.type_v); }
    // Values are asked for while keys are read.
    bool values_meanwhile() const {
        return keys_as_streams() && values_as_streams() && asks_meanwhile(task.cache.type_k);
    }
};

inline void take_queries(const Split &split) {
    const Span &tile = split.tile;
    int queries = split.queries(), width = split.heads.width, heads = split.some.count;
    split.room.scores.resize((size_t)heads * queries * split_positions);
    split.room.vectors.resize(heads * queries);
    split.room.tiles.resize(split.task.many ? heads * split.tiles_of_head() : 0);
    for (int i = 0; i < heads; i++) {
        const float **vectors = &split.room.vectors[i * queries];
        for (int q = 0; q < queries; q++)
            vectors[q] = split.task.query + query_head(tile, split.some.first + i, q, split.heads) * width;
        for (int q = 0; split.task.many && q < queries; q += panel_tokens)
            fill_tile(split.tiles(i) + (size_t)q * width, std::min(panel_tokens, queries - q), width,
                      [&](int t) { return vectors[q + t]; });
    }
}

inline void score_split(const Split &split) {
    const Cache &cache = split.task.cache;
    int queries = split.queries();
    if (split.keys_as_streams())
        return with_rows(cache.type_k, cache.keys.width, [&](auto format, auto width) {
            score_streams<decltype(format)>(split.scores(0, 0), split.vectors(0), queries, split.room.keys,
                                            split.values_meanwhile() ? &split.room.values : nullptr, split.some.count,
                                            width);
        });
    for_each_stretch(split.task, split.tile, split.room.keys, split.begin, split.some, cache.values, split.begin,
                     [&](const Stretch &stretch, int i) {
                         score_stretch(split.scores(i, 0), split.vectors(i), queries, split.tiles(i), stretch,
                                       split.task.key);
                     });
}

// First all maxima: a query's exponentials need not wait until the lanes of its own are folded. Predicted: 0.5 % of a
// token at 8,000 positions. Measured: 1.002 to 1.007 x, Emerald Rapids; a Zen 3 in the L2 1.007 to 1.014 x.
inline void softmax_of_queries(const Results &to, const Split &split) {
    const SplitRows &values = split.room.values;
    int queries = split.queries(), count = padded_count(split.end - split.origin, group_size);
    float factor = 1 / std::sqrt((float)split.heads.width);
    auto for_each_query = [&](auto use) {
        for (int item = 0; item < split.some.count * queries; item++) {
            int q = item % queries, position = split.tile.position + q / split.heads.group();
            int low = std::max(0, split.task.visible.first(position) - split.origin);
            int high = std::min(split.end, position + 1) - split.origin;
            use(item, to.of(item / queries)[q], split.scores(0, item), low, high);
        }
    };
    for_each_query([&](int, Partial &partial, float *scores, int low, int high) {
        partial = Partial();
        if (low < high) partial.most = largest_score(scores, low, high, count, factor);
    });
    for_each_query([&](int item, Partial &partial, float *scores, int low, int high) {
        if (split.values_as_streams() && !split.values_meanwhile()) ask_rows(values, item, split.some.count);
        partial = softmax_split(scores, partial.most, low < high ? count : 0, values.read(), factor);
    });
}

// `more`: this thread goes on with the split behind this one.
inline void weigh_split(const Results &to, const Split &split, bool more) {
    const Cache &cache = split.task.cache;
    int queries = split.queries(), end = split.end;
    for (int i = 0; i < split.some.count; i++) std::fill(to.values_of(i), to.values_of(i) + queries * to.width, 0.0f);
    if (!split.values_as_streams())
        return for_each_stretch(split.task, split.tile, split.room.values, split.begin, split.some, cache.keys, end,
                                [&](const Stretch &stretch, int i) {
                                    weigh_stretch(to.values_of(i), split.scores(i, 0), queries, stretch,
                                                  split.task.value);
                                });
    bool keys_meanwhile = more && split.keys_as_streams() && asks_meanwhile(cache.type_v);
    if (keys_meanwhile)
        find_rows(split.room.keys, split.task, cache.keys, split.tile, split.some.first, end, end,
                  std::min(end + split_positions, split.tile.position + split.tile.count));
    with_rows(cache.type_v, cache.values.width, [&](auto format, auto width) {
        weigh_streams<decltype(format)>(to.values, to.step * to.width, split.scores(0, 0), queries, split.room.values,
                                        keys_meanwhile ? &split.room.keys : nullptr, split.some.count, width);
    });
}

inline void attend_split(const Results &to, const AttentionTask &task, const Heads &heads, const Span &tile,
                         const KVHeads &some, int index, bool more) {
    thread_local SplitRoom room;
    const Cache &cache = task.cache;
    int origin = index * split_positions, end = std::min(origin + split_positions, tile.position + tile.count);
    int begin = std::min(end, std::max(origin, task.visible.first(tile.position)));  // a layer may see less than others
    auto first_row = [&](const Precision &type) { return has_blocks(type) ? begin / group_size * group_size : begin; };
    find_rows(room.keys, task, cache.keys, tile, some.first, origin, first_row(cache.type_k), end);
    find_rows(room.values, task, cache.values, tile, some.first, origin, first_row(cache.type_v), end);
    Split split = {task, heads, tile, some, origin, begin, end, room};
    take_queries(split);
    score_split(split);
    softmax_of_queries(to, split);
    weigh_split(to, split, more);
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

// One part of a tile; `more`: this thread goes on with the next one. The merge always goes through them in their order.
inline void attend_part(const Results &to, const AttentionTask &task, const AttentionPlan &plan, const Span &tile,
                        const KVHeads &some, int part, bool more) {
    for (int i = 0; i < some.count && part == 0; i++)
        attend_sinks(to.of(i), to.values_of(i), task, plan, tile, some.first + i);
    if (part > 0) attend_split(to, task, plan.heads, tile, some, plan.first_split(tile) + part - 1, more);
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
    attend_part(all, task, plan, tile, some, 0, false);
    int skipped = task.visible.first(tile.position) / split_positions - plan.first_split(tile);
    for (int i = 1 + skipped; i < plan.parts_of(tile); i++) {
        attend_part(one, task, plan, tile, some, i, i + 1 < plan.parts_of(tile));
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
    Share share = share_of((int)plan.parts.size());
    for (int item = share.first; item < share.last; item++) {
        const Part &part = plan.parts[item];
        const Part *next = item + 1 < share.last ? &plan.parts[item + 1] : nullptr;
        bool more = next && next->tile == part.tile && next->head_set == part.head_set;
        KVHeads some = plan.head_set(part.head_set);
        size_t at = plan.index(part.tile, some.first, part.part);
        size_t step = plan.index(part.tile, some.first + 1, part.part) - at;
        Results to{&plan.partials[at], &plan.values[at * width], step, (size_t)width};
        attend_part(to, task, plan, plan.tiles[part.tile], some, part.part, more);
    }
    barrier();
#pragma omp for schedule(static) nowait
    for (int item = 0; item < tiles * kv_heads; item++) {
        int kv_head = item % kv_heads, tile = item / kv_heads, queries = plan.tiles[tile].count * plan.heads.group();
        size_t total = plan.index(tile, kv_head, plan.first_part());
        for (int i = plan.first_part() + 1; i < plan.parts_of(plan.tiles[tile]); i++) {
            size_t part = plan.index(tile, kv_head, i);
            merge_part(&plan.partials[total], &plan.values[total * width], &plan.partials[part],
                       &plan.values[part * width], queries, width);
        }
        store_attention(task.out, &plan.partials[total], &plan.values[total * width], plan.tiles[tile], kv_head,
                        plan.heads, width);
    }
}
