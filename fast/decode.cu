// Attention of decoding on the GPU: one token of each sequence against a long cache.
//
// Decoding reads each number of the cache once, for a few queries: what counts is that memory is never idle. So the
// positions are cut into splits, one for a block of threads (Dao et al. 2023, Flash-Decoding), merged from the first to
// the last; all query heads of a KV head share what is read; and a warp's rows come in asynchronous copies of 16 bytes
// to shared memory, the next keys while it computes with values, and the other way round.
//
// A tile is 32 positions. For scores a lane has one position of it, and reads its key; for values a lane has channels
// of all positions. In between, the weights meet in shared memory. So no sum over channels goes from lane to lane, and
// only a key, a value and a row's scale depend on the format. All is float32, as in the plain twin. What it should cost
// stands in docs/gpu.md.
#pragma once

#include "../attention.cu"
#include "linear.cu"

#ifdef HAS_CUDA
namespace fast {

constexpr float log2_e = 1.44269504f;  // scores are exponents of 2

// ---- Splits ------------------------------------------------------------------------------------------------
//
// Their number is fixed, so a row has the same bits alone and in company; how long they are is computed from the row's
// position, so that a recorded pass can be replayed at the next one.

constexpr int batch_heads = 8;   // query heads of a KV head that share one read of the cache
constexpr int least_split = 64;  // positions: shorter ones cost more to merge than they save
constexpr int attend_threads = 128, decode_warps = attend_threads / warp_size;

// Partial results of a pass.
struct Parts {
    plain::Softmax *partials;  // (row, query head, split); of exponents of 2
    float *values;             // (row, query head, split, value_width)
    int splits, value_width;
    HOST_DEVICE int64_t index(int64_t query_head, int split) const { return query_head * splits + split; }
};

HOST_DEVICE inline int batches_of(const Heads &heads) { return (heads.per_kv() + batch_heads - 1) / batch_heads; }

// The positions that a row's query sees, without sinks, cut into at most so many splits; cuts are at multiples of 32.
struct Splits {
    int first, end, origin, length, used;
    HOST_DEVICE Splits(const Visible &visible, int position, int splits)
        : first(visible.first(position)), end(position + 1), origin(first / group_size * group_size) {
        int even = (end - origin + splits - 1) / splits;
        length = (even + group_size - 1) / group_size * group_size;
        length = length < least_split ? least_split : length;
        used = (end - origin + length - 1) / length;
    }
    HOST_DEVICE int begin_of(int split) const { return split == 0 ? first : origin + split * length; }
    HOST_DEVICE int end_of(int split) const { return split + 1 == used ? end : origin + (split + 1) * length; }
};

struct PartsMemory {
    Buffer<plain::Softmax> partials;
    Buffer<float> values;
};

// There are as many splits as let a single sequence fill the card.
inline Parts parts_of(Gpu &m, const Attention &task, int count) {
    constexpr int resident = 3;  // blocks on a multiprocessor
    int64_t fill = m.properties.multiProcessorCount * resident / (task.heads.kv * batches_of(task.heads));
    int64_t visible = task.visible.window ? task.visible.window : task.cache.keys.rows_per_layer;
    int64_t most = (visible + group_size - 1 + least_split - 1) / least_split;
    int splits = (int)std::max<int64_t>(1, std::min(fill, most)), width = task.values.width;
    PartsMemory &memory = m.kept<PartsMemory>();
    size_t parts = (size_t)count * task.heads.query * splits;
    memory.partials.resize(m, parts);
    memory.values.resize(m, parts * width);
    return {memory.partials.data(), memory.values.data(), splits, width};
}

// out = the sinks, then the splits of a query head.
inline void merge_parts(Gpu &m, const Attention &task, const Pass &pass, const Parts &from) {
    m.for_each((int64_t)pass.count * task.heads.query, [=] HOST_DEVICE(int64_t item, Warp team) {
        const Span &span = pass.spans[item / task.heads.query];
        int width = from.value_width, kv_head = task.heads.kv_head((int)(item % task.heads.query));
        int used = Splits(task.visible, span.position, from.splits).used;
        float *out = task.out + item * width;
        for (int c = team.first(); c < width; c += team.step()) out[c] = 0;
        Segments sinks;
        plain::Softmax softmax = plain::Softmax::begin(task.sink((int)(item % task.heads.query)));
        add_sinks(sinks, {task.cache, task.layer, kv_head, task.keys, task.values}, span, task.visible);
        if (sinks.count > 0)
            plain::attend_segment(softmax, out, task.query + item * task.heads.width, sinks.list[0], task.scale,
                                  pass.frequencies, team);
        float before = softmax.max_score * log2_e, max_score = before;
        const plain::Softmax *partials = from.partials + from.index(item, 0);
        for (int i = 0; i < used; i++) max_score = fmaxf(max_score, partials[i].max_score);
        float rescale = exp2f(before - max_score), sum = softmax.sum * rescale;
        for (int i = 0; i < used; i++) sum += partials[i].sum * exp2f(partials[i].max_score - max_score);
        for (int c = team.first(); c < width; c += team.step()) {
            float value = out[c] * rescale;
            for (int i = 0; i < used; i++)
                value += from.values[from.index(item, i) * width + c] * exp2f(partials[i].max_score - max_score);
            out[c] = value / sum;
        }
    });
}

// ---- Rows in shared memory ---------------------------------------------------------------------------------

// Formats whose rows the kernel reads, by the kind that they are of.
template <class Number>
std::true_type is_readable(const PlainRow<Number> *);
template <class Code, int largest, int divisor>
std::true_type is_readable(const ScaledRow<Code, largest, divisor> *);
template <int bits>
std::true_type is_readable(const GroupedRow<bits> *);
std::false_type is_readable(const void *);
template <class Format>
constexpr bool readable = decltype(is_readable((const Format *)nullptr))::value;

constexpr int piece = 16, together = 8;  // bytes of a copy, channels of a key that a lane reads at once

// Pieces that a row touches; in memory that begins at a piece's beginning all rows begin at multiples of row_bytes.
HOST_DEVICE inline int pieces_of(const CacheRows &rows) {
    return (int)((rows.row_bytes + (rows.row_bytes % piece ? piece - 1 : 0) + piece - 1) / piece);
}

// 32 positions' keys or values of a warp, in the rows' own bytes: copied in whole pieces, so that each begins as far
// behind a piece's beginning as it does in the cache.
struct Tile {
    const CacheRows &stored, &residual;
    bool in_residual = false;       // where the newest 32 positions are kept at f16: whether these are they
    int pitch;                      // bytes from a row to the next one's; an odd number of pieces, for all banks
    int own = 0;                    // where the row of the lane's position begins
    Shared<char> bytes;             // (32, pitch)
    Shared<const char *> in_cache;  // (32): where each row is
    __device__ Tile(SharedMemory &memory, const CacheRows &stored, const CacheRows &residual)
        : stored(stored),
          residual(residual),
          pitch(pitch_of(stored, residual)),
          bytes(memory.take<char>(attend_threads * pitch).from(warp_id() * warp_size * pitch)),
          in_cache(memory.take<const char *>(attend_threads).from(warp_id() * warp_size)) {}
    HOST_DEVICE static int pitch_of(const CacheRows &stored, const CacheRows &residual) {
        int pieces = pieces_of(stored), more = residual.data ? pieces_of(residual) : 0;
        return piece * ((more > pieces ? more : pieces) | 1);
    }
    static size_t memory_for(const CacheRows &stored, const CacheRows &residual) {
        return shared_size((size_t)attend_threads * pitch_of(stored, residual)) +
               shared_size(attend_threads * sizeof(const char *));
    }
    __device__ int start(int i) const { return i * pitch + (int)((uintptr_t)(const char *)in_cache[i] % piece); }

    // Starts the copies of positions begin to begin + 31, of which [low, high) are visible; of none behind them.
    template <bool keys>
    __device__ void ask(const Attention &task, const Span &query, int kv_head, int begin, int low, int high) {
        if (begin < high) {
            in_residual = residual.data && begin / group_size == query.position / group_size;
            const CacheRows &side = in_residual ? residual : stored;
            // What is not visible is not read: a visible position stands in for it, and has no weight there. But a
            // block of keys is in all its rows.
            int t = begin + lane_id();
            if (!keys || !residual.data || in_residual) t = min(max(t, low), high - 1);
            int64_t at = in_residual ? (int64_t)query.sequence * group_size + t % group_size
                                     : task.cache.row_of(query.sequence, t);
            const char *row = side.at(task.layer, at, kv_head);
            in_cache[lane_id()] = row;
            own = lane_id() * pitch + (int)((uintptr_t)row % piece);
            __syncwarp();
            int pieces = pieces_of(side);
            for (int i = lane_id(); i < warp_size * pieces; i += warp_size) {
                const char *from = in_cache[i / pieces], *end = from + side.row_bytes;
                from += i % pieces * piece - (int)((uintptr_t)from % piece);
                int there = max(0, min(piece, (int)(end - from)));
                copy_async16(bytes, i / pieces * pitch + i % pieces * piece, from, there);
            }
        }
        commit_copies();
    }

    // use(format), of what the rows are.
    template <class Use>
    __device__ void visit(const Choice<Precision> &type, Use use) const {
        if (in_residual) return use(F16{});
        type.visit([&](auto format) {
            if constexpr (readable<decltype(format)>) use(format);
        });
    }
};

// Number i of the group that begins at byte `at`.
template <int bits>
__device__ inline float group_number(const Tile &tile, int at, int i) {
    using Codes = Packed<bits>;
    auto both = bit_cast<ScaleAndZero>(tile.bytes.read<uint32_t>(at));
    int codes = tile.bytes.read<uint8_t>(at + (int)sizeof both + i % Codes::size);
    return to_float(both.zero) + to_float(both.scale) * (float)(codes >> bits * (i / Codes::size) & Codes::largest);
}

// For each kind of format: x = channels c to c + 7 of the key of the lane's position; channel c of the value that
// begins at byte `at`; and by what both are to be multiplied yet.
template <class Number>
__device__ inline void read_key(float (&x)[together], const PlainRow<Number> &, const Tile &tile, int c) {
    UNROLL for (int i = 0; i < together; i += piece / (int)sizeof(Number))
        unpack<Number>(x + i, tile.bytes.read<uint4>(tile.own + (c + i) * (int)sizeof(Number)));
}
template <class Number>
__device__ inline float read_value(const PlainRow<Number> &, const Tile &tile, int at, int c) {
    return to_float(tile.bytes.read<Number>(at + c * (int)sizeof(Number)));
}
template <class Number>
__device__ inline float row_scale(const PlainRow<Number> &, const Tile &) {
    return 1;
}

template <class Code, int largest, int divisor>
__device__ inline void read_key(float (&x)[together], const ScaledRow<Code, largest, divisor> &, const Tile &tile,
                                int c) {
    UNROLL for (int i = 0; i < together; i += 2) {  // all that such rows are aligned to
        uint16_t two = tile.bytes.read<uint16_t>(tile.own + (int)sizeof(f16) + c + i);
        UNROLL for (int k = 0; k < 2; k++) x[i + k] = to_float(bit_cast<Code>((uint8_t)(two >> 8 * k)));
    }
}
template <class Code, int largest, int divisor>
__device__ inline float read_value(const ScaledRow<Code, largest, divisor> &, const Tile &tile, int at, int c) {
    return to_float(tile.bytes.read<Code>(at + (int)sizeof(f16) + c));
}
template <class Code, int largest, int divisor>
__device__ inline float row_scale(const ScaledRow<Code, largest, divisor> &, const Tile &tile) {
    return to_float(tile.bytes.read<f16>(tile.own)) / divisor;
}

template <int bits>
__device__ inline void read_key(float (&x)[together], const GroupedRow<bits> &format, const Tile &tile, int c) {
    int groups = format.groups(tile.stored.width);
    UNROLL for (int i = 0; i < together; i++) {
        int row = format.row_of_channel(c + i, tile.stored.width);
        int at = tile.start(row) + (c + i) % groups * (int)sizeof(Group<bits>);
        x[i] = group_number<bits>(tile, at, lane_id());
    }
}
template <int bits>
__device__ inline float read_value(const GroupedRow<bits> &, const Tile &tile, int at, int c) {
    return group_number<bits>(tile, at + c / group_size * (int)sizeof(Group<bits>), c % group_size);
}
template <int bits>
__device__ inline float row_scale(const GroupedRow<bits> &, const Tile &) {
    return 1;
}

// ---- The kernel --------------------------------------------------------------------------------------------

constexpr int most_width = 128, columns = most_width / warp_size;  // of values: channels of a lane

// What a warp has of its `count` query heads so far. Loops over batch_heads are unrolled: what they count is in
// registers.
struct WarpHeads {
    int count;
    float max_score[batch_heads], sum[batch_heads] = {};  // sum: of the lane's own positions
    float values[batch_heads][columns] = {};              // channels lane, lane + 32, ...
    __device__ explicit WarpHeads(int count) : count(count) {
        UNROLL for (int h = 0; h < batch_heads; h++) max_score[h] = -INFINITY;
    }

    // scores = q K^T, of the lane's position.
    template <class Format>
    __device__ void score(float (&scores)[batch_heads], const Format &format, const Tile &keys,
                          const float *queries, float scale) const {
        int width = keys.stored.width;
        for (int c = 0; c < width; c += together) {
            float x[together];
            read_key(x, format, keys, c);
            UNROLL for (int h = 0; h < batch_heads; h++) {
                if (h >= count) continue;
                auto *query = (const float4 *)(queries + h * width + c);  // the same for all lanes
                float4 a = query[0], b = query[1];
                scores[h] += a.x * x[0] + a.y * x[1] + a.z * x[2] + a.w * x[3];
                scores[h] += b.x * x[4] + b.y * x[5] + b.z * x[6] + b.w * x[7];
            }
        }
        float factor = row_scale(format, keys) * log2_e * scale;
        UNROLL for (int h = 0; h < batch_heads; h++) scores[h] *= factor;
    }

    // Scores become weights; what was summed up so far is rescaled.
    __device__ void softmax(float (&scores)[batch_heads], bool visible) {
        UNROLL for (int h = 0; h < batch_heads; h++) {
            if (h >= count) continue;
            float score = visible ? scores[h] : -INFINITY, before = max_score[h];
            max_score[h] = fmaxf(before, warp_max(score));
            float rescale = exp2_fast(before - max_score[h]);
            scores[h] = exp2_fast(score - max_score[h]);
            sum[h] = sum[h] * rescale + scores[h];
            UNROLL for (int j = 0; j < columns; j++) values[h][j] *= rescale;
        }
    }

    // values += weights V; `shared` (position, head) is where the weights of all lanes meet.
    template <class Format>
    __device__ void add(const Format &format, const Tile &tile, const float (&weights)[batch_heads],
                        const Shared<float> &shared) {
        float scale = row_scale(format, tile);
        UNROLL for (int h = 0; h < batch_heads; h += 4) {
            float4 four = {weights[h] * scale, weights[h + 1] * scale, weights[h + 2] * scale, weights[h + 3] * scale};
            shared.write(lane_id() * batch_heads + h, four);
        }
        __syncwarp();
        for (int t = 0; t < warp_size; t++) {
            auto a = shared.read<float4>(t * batch_heads), b = shared.read<float4>(t * batch_heads + 4);
            const float weight[batch_heads] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
            int at = tile.start(t);
            UNROLL for (int j = 0; j < columns; j++) {
                int c = j * warp_size + lane_id();
                if (c >= tile.stored.width) continue;
                float x = read_value(format, tile, at, c);
                UNROLL for (int h = 0; h < batch_heads; h++) {
                    if (h < count) values[h][j] += weight[h] * x;
                }
            }
        }
    }
};

// What the warps of a block have of its query heads, side by side.
struct WarpResults {
    int width;
    Shared<float> max_score, sum, values;  // (warp, batch_heads) and (warp, batch_heads, width)
    __device__ WarpResults(SharedMemory memory, int width)
        : width(width),
          max_score(memory.take<float>(decode_warps * batch_heads)),
          sum(memory.take<float>(decode_warps * batch_heads)),
          values(memory.take<float>(decode_warps * batch_heads * width)) {}
    static size_t memory_for(int width) {
        size_t heads = decode_warps * batch_heads * sizeof(float);
        return 2 * shared_size(heads) + shared_size(heads * width);
    }
    __device__ void put(const WarpHeads &heads) const {
        UNROLL for (int h = 0; h < batch_heads; h++) {
            if (h >= heads.count) continue;
            int at = warp_id() * batch_heads + h;
            float total = warp_sum(heads.sum[h]);
            if (lane_id() == 0) max_score[at] = heads.max_score[h], sum[at] = total;
            UNROLL for (int j = 0; j < columns; j++) {
                int c = j * warp_size + lane_id();
                if (c < width) values[at * width + c] = heads.values[h][j];
            }
        }
    }
    // The partial result of head h, of which `value` is channel c. Warps without positions have the weight 0.
    __device__ plain::Softmax merge(int h, int c, float &value) const {
        plain::Softmax all;
        for (int i = h; i < decode_warps * batch_heads; i += batch_heads)
            all.max_score = fmaxf(all.max_score, max_score[i]);
        value = 0;
        for (int i = h; i < decode_warps * batch_heads; i += batch_heads) {
            float factor = exp2_fast(max_score[i] - all.max_score);
            all.sum += sum[i] * factor;
            value += values[i * width + c] * factor;
        }
        return all;
    }
};

// A block for each split, batch of query heads that read one KV head, and row.
__global__ void __launch_bounds__(attend_threads, 3) decode_kernel(Attention task, Parts to, const Span *rows) {
    const CacheView &cache = task.cache;
    SharedMemory memory;
    Tile keys(memory, cache.keys, cache.residual_keys), values(memory, cache.values, cache.residual_values);
    Shared<float> weights = memory.take<float>(attend_threads * batch_heads).from(warp_id() * warp_size * batch_heads);
    wait_for_previous();
    let_next_start();
    Span row = rows[blockIdx.z];
    Splits splits(task.visible, row.position, to.splits);
    int split = blockIdx.x, batches = batches_of(task.heads), kv_head = blockIdx.y / batches;
    if (split >= splits.used) return;
    int begin_head = blockIdx.y % batches * batch_heads, first_head = kv_head * task.heads.per_kv() + begin_head;
    int64_t query_head = (int64_t)blockIdx.z * task.heads.query + first_head;
    const float *queries = task.query + query_head * task.heads.width;
    int low = splits.begin_of(split), high = splits.end_of(split);
    int begin = splits.origin + split * splits.length + warp_id() * warp_size;
    WarpHeads heads(min(batch_heads, task.heads.per_kv() - begin_head));
    keys.ask<true>(task, row, kv_head, begin, low, high);
    values.ask<false>(task, row, kv_head, begin, low, high);
    for (; begin < high; begin += attend_threads) {
        float scores[batch_heads] = {};
        wait_copies<1>();  // the keys have come, the values are on their way
        __syncwarp();
        keys.visit(cache.type_k, [&](auto format) { heads.score(scores, format, keys, queries, task.scale); });
        __syncwarp();
        keys.ask<true>(task, row, kv_head, begin + attend_threads, low, high);
        heads.softmax(scores, low <= begin + lane_id() && begin + lane_id() < high);
        wait_copies<1>();  // the other way round
        __syncwarp();
        values.visit(cache.type_v, [&](auto format) { heads.add(format, values, scores, weights); });
        __syncwarp();
        values.ask<false>(task, row, kv_head, begin + attend_threads, low, high);
    }
    __syncthreads();  // the results take the tiles' place
    WarpResults results(SharedMemory(), to.value_width);
    results.put(heads);
    __syncthreads();
    for (int i = threadIdx.x; i < heads.count * to.value_width; i += blockDim.x) {
        int h = i / to.value_width, c = i % to.value_width;
        int64_t at = to.index(query_head + h, split);
        plain::Softmax partial = results.merge(h, c, to.values[at * to.value_width + c]);
        if (c == 0) to.partials[at] = partial;
    }
}

// attention() where each token is the newest one of its sequence and all of them, the newest block's too, have been
// stored. False where the kernel has no place for the cache's rows.
inline bool decode_attention(Gpu &m, const Attention &task, const Pass &pass) {
    const CacheView &cache = task.cache;
    auto fits = [](const Choice<Precision> &type, int width) {
        return width % together == 0 && width <= most_width &&
               type.visit([](auto format) { return readable<decltype(format)>; });
    };
    size_t bytes = Tile::memory_for(cache.keys, cache.residual_keys) +
                   Tile::memory_for(cache.values, cache.residual_values) +
                   shared_size(attend_threads * batch_heads * sizeof(float));
    bytes = std::max(bytes, WarpResults::memory_for(task.values.width));
    if (!fits(cache.type_k, task.keys.width) || !fits(cache.type_v, task.values.width)) return false;
    if (bytes > m.properties.sharedMemPerBlockOptin) return false;
    Parts parts = parts_of(m, task, pass.count);
    dim3 blocks(parts.splits, task.heads.kv * batches_of(task.heads), pass.count);
    m.launch({blocks, attend_threads, bytes}, decode_kernel, task, parts, pass.spans);
    merge_parts(m, task, pass, parts);
    return true;
}

}  // namespace fast
#endif
