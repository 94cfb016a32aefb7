// Attention of decoding on the GPU: one token of each sequence against a long cache.
//
// Decoding reads each number of the cache once, for a few queries, so memory must never be idle. Positions are cut into
// splits, one for a block of threads (Dao et al. 2023, Flash-Decoding), which are merged from first to last. All query
// heads of a KV head share one read. A warp's rows come to shared memory in asynchronous copies of 16 bytes: the next
// keys while it computes with values, the next values while it computes with keys.
//
// A tile is 32 positions. A warp multiplies it by its 8 query heads on the tensor cores: scores (positions, heads) =
// K q, then values (channels, heads) += V^T weights. Tensor cores take 16-bit numbers, in which 16-bit rows and codes
// are exact. Queries and weights are cut into two or three parts, each the rounded rest of those before it, so all is
// as exact as float32. Scales of rows and of values multiply scores and weights; scales of keys in groups multiply
// queries. Only how a lane gets its numbers depends on the format. docs/gpu.md says what it costs.
#pragma once

#include "../attention.cu"
#include "linear.cu"

#ifdef HAS_CUDA
namespace fast {

constexpr float log2_e = 1.44269504f;  // scores are exponents of 2

// ---- Splits ------------------------------------------------------------------------------------------------
//
// The number of splits is fixed, so a row has the same bits alone and in a batch. Their length is computed from the
// row's position, so a recorded pass can be replayed at the next position.

constexpr int batch_heads = 8;   // query heads of a KV head that share one read of the cache
constexpr int least_split = 64;  // positions: shorter ones cost more to merge than they save
constexpr int attend_threads = 128, decode_warps = attend_threads / warp_size;
constexpr int most_width = 128, columns = most_width / warp_size;  // channels of a value; in 32s

// Partial results of a pass.
struct Parts {
    plain::Softmax *partials;  // (row, query head, split), with scores as exponents of 2
    float *values;             // (row, query head, split, value_width)
    int splits, value_width;
    HOST_DEVICE int64_t index(int64_t query_head, int split) const { return query_head * splits + split; }
};

HOST_DEVICE inline int batches_of(const Heads &heads) { return (heads.per_kv() + batch_heads - 1) / batch_heads; }

// The positions that a row's query sees, without sinks, cut at multiples of 32 into at most `splits` splits.
struct Splits {
    int first, end, origin, length, used;
    HOST_DEVICE Splits(const Visible &visible, int position, int splits)
        : first(visible.first(position)), end(position + 1), origin(first / group_size * group_size) {
        int even = (end - origin + splits - 1) / splits;
        int step = even > attend_threads ? attend_threads : group_size;  // long ones: all warps have equally many tiles
        length = (even + step - 1) / step * step;
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

// Memory for the results of a pass: enough splits for a single sequence to fill the GPU, at most most_splits.
inline Parts parts_of(Gpu &m, const Attention &task, int count, int most_splits = INT_MAX) {
    constexpr int resident = 3;  // blocks on a multiprocessor
    int64_t fill = m.properties.multiProcessorCount * resident / (task.heads.kv * batches_of(task.heads));
    int64_t visible = task.visible.window ? task.visible.window : task.cache.keys.rows_per_layer;
    int64_t most = std::min<int64_t>((visible + group_size - 1 + least_split - 1) / least_split, most_splits);
    int splits = (int)std::max<int64_t>(1, std::min(fill, most)), width = task.values.width;
    PartsMemory &memory = m.kept<PartsMemory>();
    size_t parts = (size_t)count * task.heads.query * splits;
    memory.partials.resize(m, parts);
    memory.values.resize(m, parts * width);
    return {memory.partials.data(), memory.values.data(), splits, width};
}

// out = a query head's sinks and splits, merged in this order.
template <int columns = fast::columns>
void merge_parts(Gpu &m, const Attention &task, const Pass &pass, const Parts &from) {
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
                                  pass.frequencies, task.heads.rotary, team);
        float before = softmax.max_score * log2_e, max_score = before;
        const plain::Softmax *partials = from.partials + from.index(item, 0);
        for (int i = 0; i < used; i++) max_score = fmaxf(max_score, partials[i].max_score);
        float rescale = exp2f(before - max_score), sum = softmax.sum * rescale;
        for (int i = 0; i < used; i++) sum += partials[i].sum * exp2f(partials[i].max_score - max_score);
        float value[columns] = {};  // several channels at a time: their loads need not wait for one another
        auto channels = [&](auto use) {
            for (int j = 0; j < columns; j++) {
                int c = team.first() + j * team.step();
                if (c < width) use(value[j], c);
            }
        };
        channels([&](float &x, int c) { x = out[c] * rescale; });
        for (int i = 0; i < used; i++) {
            const float *part = from.values + from.index(item, i) * width;
            float factor = exp2f(partials[i].max_score - max_score);
            channels([&](float &x, int c) { x += part[c] * factor; });
        }
        channels([&](float &x, int c) { out[c] = x / sum; });
    });
}

// ---- Rows in shared memory ---------------------------------------------------------------------------------

// Whether the kernel reads the rows of a format, by its base.
template <class Number>
std::true_type is_readable(const PlainRow<Number> *);
template <int largest, int divisor>
std::true_type is_readable(const ScaledRow<int8_t, largest, divisor> *);
template <int largest, int divisor>
std::true_type is_readable(const ScaledRow<fp8, largest, divisor> *);
template <int bits>
std::bool_constant<bits == 2 || bits == 4> is_readable(const GroupedRow<bits> *);
std::false_type is_readable(const void *);
template <class Format>
constexpr bool readable = decltype(is_readable((const Format *)nullptr))::value;

constexpr int piece = 16, together = 4;  // bytes of a copy; channels that a lane reads at once

// How many pieces of 16 bytes a row touches. Memory begins at a piece, and rows at multiples of row_bytes.
HOST_DEVICE inline int pieces_of(const CacheRows &rows) {
    return (int)((rows.row_bytes + (rows.row_bytes % piece ? piece - 1 : 0) + piece - 1) / piece);
}

// A warp's keys or values of 32 positions, in the bytes of their rows. They are copied in whole pieces, so a row begins
// as far from the start of a piece as it does in the cache.
struct Tile {
    const CacheRows &stored, &residual;
    bool in_residual = false;       // whether these positions are in the residual block, at f16
    int pitch;                      // bytes from one row to the next: an odd number of pieces, to use all banks
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

    // Starts the copies of positions begin to begin + 31, of which [low, high) are visible; of none if begin >= high.
    template <bool keys>
    __device__ void ask(const Attention &task, const Span &query, int kv_head, int begin, int low, int high) {
        if (begin < high) {
            in_residual = residual.data && begin / group_size == query.position / group_size;
            const CacheRows &side = in_residual ? residual : stored;
            // A visible position takes the place of one that is not, with no weight. A block of keys is in all rows.
            int t = begin + lane_id();
            if (!keys || !residual.data || in_residual) t = min(max(t, low), high - 1);
            int64_t at = in_residual ? (int64_t)query.sequence * group_size + t % group_size
                                     : task.cache.row_of(query.sequence, t);
            in_cache[lane_id()] = side.at(task.layer, at, kv_head);
            __syncwarp();
            const int pieces = pieces_of(side), down = warp_size / pieces, across = warp_size % pieces;
            int row = lane_id() / pieces, i = lane_id() % pieces, to = row * pitch + i * piece;
            while (row < warp_size) {
                auto from = (uintptr_t)(const char *)in_cache[row];
                unsigned before = from % piece, first = (unsigned)(i * piece);  // before: the row begins
                int there = max(0, min(piece, (int)(side.row_bytes + before - first)));
                copy_async16(bytes, to, (const char *)(from - before + first), there);
                row += down, i += across, to += down * pitch + across * piece;
                if (i >= pieces) i -= pieces, row++, to += pitch - pieces * piece;
            }
        }
        commit_copies();
    }

    // Calls use(format) with the format of the rows.
    template <class Use>
    __device__ void visit(const Choice<Precision> &type, Use use) const {
        if (in_residual) return use(F16{});
        type.visit([&](auto format) {
            if constexpr (readable<decltype(format)>) use(format);
        });
    }
};

// ---- Factors of 16 bits ------------------------------------------------------------------------------------
//
// g = lane_row() is 0 to 7, c = lane_column() 0 to 3. In `a` of a product (16, 16) a lane has four columns of rows g
// and g + 8. Which positions and channels they are is free, as long as both factors agree.
//   keys    rows are positions, g and g + 8 of each 16; columns are channels, 4 c to 4 c + 3 of each 16
//   values  rows are channels, 4 g to 4 g + 3 of each 32, in two matrices; columns are positions, value_position()
__device__ inline int lane_row() { return lane_id() / 4; }
__device__ inline int lane_column() { return lane_id() % 4; }
__device__ inline int key_position(int i) { return 8 * i + lane_row(); }
__device__ inline int value_position(int i) { return 2 * lane_column() + i / 2 * 8 + i % 2; }

// f16 numbers are multiplied as they are, all others as bf16, which has the range of float32: bf16 numbers and codes
// exactly, float32 in three parts. Queries and weights have two parts of f16 or three of bf16.
template <class Number>
Number plain_number(const PlainRow<Number> *);
void plain_number(const void *);
template <class Format, class Number>
constexpr bool is_of = std::is_same_v<decltype(plain_number((const Format *)nullptr)), Number>;
template <class Format>
constexpr bool is_plain = is_of<Format, f16> || is_of<Format, bf16>;
template <class Format>
constexpr int stored_parts = is_of<Format, float> ? 3 : 1;
template <class Format>
using Factor = std::conditional_t<is_of<Format, f16>, f16, bf16>;
template <class Number>
constexpr int factor_parts = std::is_same_v<Number, f16> ? 2 : 3;

// Cuts two numbers into parts: each is the rest that those before it leave, rounded.
template <class Number, int count>
__device__ inline void split(uint32_t (&parts)[count], float x, float y) {
    UNROLL for (int i = 0; i < count; i++) {
        parts[i] = pack<Number>(x, y);
        x -= to_float(Number{(uint16_t)parts[i]}), y -= to_float(Number{(uint16_t)(parts[i] >> 16)});
    }
}

constexpr uint32_t bf16_ones = 0x3f803f80;

// The codes in bytes 0 and 2 as two bf16 numbers, exactly; fp8 as the numbers that they encode.
template <int largest, int divisor>
__device__ inline uint32_t two_codes(const ScaledRow<int8_t, largest, divisor> &, uint32_t x) {
    return fma_bf16((x & 0x007f007f) | 0x43004300, bf16_ones, (x & 0x00800080) | 0xc300c300);  // 128 + .. - 128 or 256
}
template <int largest, int divisor>
__device__ inline uint32_t two_codes(const ScaledRow<fp8, largest, divisor> &, uint32_t x) {
    return fma_bf16((x & 0x00800080) << 8 | (x & 0x007f007f) << 4, 0x7b807b80, 0x80008000);  // times 2^120
}
template <int bits>
__device__ inline uint32_t two_codes(const GroupedRow<bits> &, uint32_t x) {
    return fma_bf16((x & Packed<bits>::largest * 0x10001) | 0x43004300, bf16_ones, 0xc300c300);
}

// The codes of channels c to c + 3 of the row that begins at `at`, a byte each; codes of groups have others above them.
template <class Code, int largest, int divisor>
__device__ inline uint32_t four_codes(const ScaledRow<Code, largest, divisor> &, const Tile &tile, int at, int c) {
    at += (int)sizeof(f16) + c;  // such rows are aligned to 2 bytes only
    return tile.bytes.read<uint16_t>(at) | (uint32_t)tile.bytes.read<uint16_t>(at + 2) << 16;
}
template <int bits>
__device__ inline uint32_t four_codes(const GroupedRow<bits> &, const Tile &tile, int at, int c) {
    constexpr int size = Packed<bits>::size;
    at += c / group_size * (int)sizeof(Group<bits>) + (int)sizeof(ScaleAndZero);
    return tile.bytes.read<uint32_t>(at + c % size) >> bits * (c % group_size / size);
}
// The float32 numbers of channels c to c + 3 of the row that begins at `at`.
__device__ inline void read_four(float (&x)[4], const Tile &tile, int at, int c) {
    auto four = tile.bytes.read<float4>(at + c * 4);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}
__device__ inline ScaleAndZero scale_and_zero(const Tile &tile, int at) {
    return bit_cast<ScaleAndZero>(tile.bytes.read<uint32_t>(at));
}

// Keys: channels c to c + 3 of the lane's four positions, whose rows begin at `at`, as two matrices. For keys in groups
// also the scales and zeros of the channels.
template <class Format>
__device__ inline void read_keys(uint32_t (&a)[2][stored_parts<Format>][4], float (&scale)[4], float (&zero)[4],
                                 const Format &format, const Tile &tile, const int (&at)[4], int c) {
    if constexpr (Format::blocks) {
        constexpr int bits = (int)Format::code_bits, size = Packed<bits>::size;
        uint32_t codes[4];
        const int groups = format.groups(tile.stored.width);
        int row = format.row_of_channel(c, tile.stored.width), group = c - row * groups;
        UNROLL for (int k = 0; k < 4; k++, group++) {
            if (group == groups) row++, group = 0;
            int start = tile.start(row) + group * (int)sizeof(Group<bits>);
            ScaleAndZero both = scale_and_zero(tile, start);
            scale[k] = to_float(both.scale), zero[k] = to_float(both.zero);
            // Position g in byte 0 and g + 8 in byte 1, from two bytes or one; positions 16 further in higher bits.
            int near = start + (int)sizeof both + lane_row(), far = near + 8 % size;
            codes[k] = tile.bytes.read<uint8_t>(near) | (uint32_t)tile.bytes.read<uint8_t>(far) >> 8 / size * bits << 8;
        }
        UNROLL for (int i = 0; i < 8; i++) {
            int k = i % 4 / 2 * 2, shift = i / 4 * 16 / size * bits;
            uint32_t two = __byte_perm(codes[k] >> shift, codes[k + 1] >> shift, i % 2 ? 0x5511 : 0x4400);
            a[i / 4][0][i % 4] = two_codes(format, two);
        }
    } else {
        UNROLL for (int i = 0; i < 4; i++) {
            auto &to = a[i / 2];
            if constexpr (is_plain<Format>) {
                auto four = tile.bytes.read<uint64_t>(at[i] + c * 2);
                to[0][i % 2] = (uint32_t)four, to[0][2 + i % 2] = (uint32_t)(four >> 32);
            } else if constexpr (is_of<Format, float>) {
                float x[4];
                uint32_t low[3], high[3];
                read_four(x, tile, at[i], c);
                split<bf16>(low, x[0], x[1]), split<bf16>(high, x[2], x[3]);
                UNROLL for (int part = 0; part < 3; part++) to[part][i % 2] = low[part],
                                                                         to[part][2 + i % 2] = high[part];
            } else {
                uint32_t four = four_codes(format, tile, at[i], c);
                to[0][i % 2] = two_codes(format, __byte_perm(four, 0, 0x1100));
                to[0][2 + i % 2] = two_codes(format, __byte_perm(four, 0, 0x3322));
            }
        }
    }
}

// Values: channels c to c + 3 at the lane's four positions, whose rows begin at `at`, as two matrices.
template <class Format>
__device__ inline void read_values(uint32_t (&a)[2][stored_parts<Format>][4], const Format &format, const Tile &tile,
                                   const int (&at)[4], int c) {
    UNROLL for (int i = 0; i < 4; i += 2) {
        if constexpr (is_plain<Format>) {
            auto x = tile.bytes.read<uint64_t>(at[i] + c * 2), y = tile.bytes.read<uint64_t>(at[i + 1] + c * 2);
            UNROLL for (int k = 0; k < 4; k++) a[k / 2][0][i + k % 2] =
                __byte_perm((uint32_t)(x >> k / 2 * 32), (uint32_t)(y >> k / 2 * 32), k % 2 ? 0x7632 : 0x5410);
        } else if constexpr (is_of<Format, float>) {
            float x[4], y[4];
            read_four(x, tile, at[i], c), read_four(y, tile, at[i + 1], c);
            UNROLL for (int k = 0; k < 4; k++) {
                uint32_t parts[3];
                split<bf16>(parts, x[k], y[k]);
                UNROLL for (int part = 0; part < 3; part++) a[k / 2][part][i + k % 2] = parts[part];
            }
        } else {
            uint32_t x = four_codes(format, tile, at[i], c), y = four_codes(format, tile, at[i + 1], c);
            UNROLL for (int k = 0; k < 4; k++) a[k / 2][0][i + k % 2] =
                two_codes(format, __byte_perm(x, y, 0x4400 + k * 0x1111));
        }
    }
}

// The factor by which to multiply the row that begins at `at`.
template <class Number>
__device__ inline float row_scale(const PlainRow<Number> &, const Tile &, int) {
    return 1;
}
template <int bits>
__device__ inline float row_scale(const GroupedRow<bits> &, const Tile &, int) {
    return 1;
}
template <class Code, int largest, int divisor>
__device__ inline float row_scale(const ScaledRow<Code, largest, divisor> &, const Tile &tile, int at) {
    return to_float(tile.bytes.read<f16>(at)) / divisor;
}

// ---- The kernel --------------------------------------------------------------------------------------------

constexpr float weight_unit = 0x1p14f;  // weights are multiplied by it, so that parts of f16 stay normal numbers

__device__ inline float column_max(float x) {
    for (int step = 16; step >= 4; step /= 2) x = fmaxf(x, __shfl_xor_sync(all_lanes, x, step));
    return x;
}
__device__ inline float column_sum(float x) {
    for (int step = 16; step >= 4; step /= 2) x += __shfl_xor_sync(all_lanes, x, step);
    return x;
}

// The block's queries, each times a power of 2 that brings its largest number to 2^13, then zeros.
struct Queries {
    int width, pitch;
    Shared<float> numbers, back;  // (batch_heads, pitch); (batch_heads): from products to exponents of 2
    __device__ Queries(SharedMemory &memory, int width)
        : width(width),
          pitch(pitch_of(width)),
          numbers(memory.take<float>(batch_heads * pitch)),
          back(memory.take<float>(batch_heads)) {}
    HOST_DEVICE static int pitch_of(int width) { return (width + 15) / 16 * 16 + 16; }
    static size_t memory_for(int width) {
        return shared_size(batch_heads * pitch_of(width) * sizeof(float)) + shared_size(batch_heads * sizeof(float));
    }
    __device__ void put(const float *queries, int count, float scale) const {
        for (int h = warp_id(); h < batch_heads; h += decode_warps) {
            float largest = 0;
            auto number = [&](int c) { return h < count && c < width ? queries[h * width + c] : 0; };
            for (int c = lane_id(); c < width; c += warp_size) largest = fmaxf(largest, fabsf(number(c)));
            int exponent = (int)(bit_cast<uint32_t>(warp_max(largest)) >> 23);
            float factor = bit_cast<float>((uint32_t)max(1, min(254, 127 + 127 + 13 - exponent)) << 23);
            for (int c = lane_id(); c < pitch; c += warp_size) numbers[h * pitch + c] = number(c) * factor;
            if (lane_id() == 0) back[h] = log2_e * scale / factor;
        }
        __syncthreads();
    }
};

// A warp's results for its query heads so far; a lane has heads 2 c and 2 c + 1. Unrolled loops index registers.
struct WarpHeads {
    float back[2], max_score[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // sum: of the lane's own positions
    float values[columns][2][4] = {};  // for each 32 channels: rows g, g + 8 of two products, for both heads
    float zeros[columns][2] = {};      // weights times zeros of values in groups, of the lane's own positions

    // scores = K q of the lane's positions, as two matrices (16, 8): rows g, g + 8 of each, for both heads.
    template <class Format>
    __device__ void score(float (&scores)[2][4], const Format &format, const Tile &keys, const Queries &queries) const {
        using Number = Factor<Format>;
        constexpr int count = stored_parts<Format>, parts = factor_parts<Number>;
        int at[4], width = keys.stored.width;
        float of_zeros = 0;
        uint32_t b[2][parts];
        auto multiply = [&](const uint32_t(&a)[2][count][4]) {
            UNROLL for (int i = 0; i < count; i++) {
                UNROLL for (int part = 0; part + i < parts; part++) {
                    const uint32_t two[2] = {b[0][part], b[1][part]};
                    UNROLL for (int j = 0; j < 2; j++) multiply_matrices<Number>(scores[j], a[j][i], two);
                }
            }
        };
        UNROLL for (int i = 0; i < 4; i++) at[i] = keys.start(key_position(i));
        for (int first = 0; first < width; first += 16) {
            uint32_t a[2][count][4];
            float scale[4] = {1, 1, 1, 1}, zero[4] = {};
            int c = first + 4 * lane_column();
            auto q = queries.numbers.read<float4>(lane_row() * queries.pitch + c);
            read_keys(a, scale, zero, format, keys, at, min(c, width - 4));  // q is 0 from `width` on
            if (Format::blocks) of_zeros += q.x * zero[0] + q.y * zero[1] + q.z * zero[2] + q.w * zero[3];
            split<Number>(b[0], q.x * scale[0], q.y * scale[1]);
            split<Number>(b[1], q.z * scale[2], q.w * scale[3]);
            multiply(a);
        }
        if constexpr (Format::blocks) {
            const uint32_t ones[2][1][4] = {{{bf16_ones, bf16_ones, bf16_ones, bf16_ones}},
                                            {{bf16_ones, bf16_ones, bf16_ones, bf16_ones}}};
            split<Number>(b[0], of_zeros, 0), split<Number>(b[1], 0, 0);
            multiply(ones);
        }
        UNROLL for (int i = 0; i < 8; i++) scores[i / 4][i % 4] *= back[i % 2] * row_scale(format, keys, at[i / 2]);
    }

    // Turns scores into weights and rescales all sums so far. [low, high): visible positions of the tile.
    __device__ void softmax(float (&scores)[2][4], int low, int high) {
        UNROLL for (int h = 0; h < 2; h++) {
            float largest = max_score[h], before = largest;
            UNROLL for (int i = 0; i < 4; i++) {
                float &score = scores[i / 2][i % 2 * 2 + h];
                if (key_position(i) < low || key_position(i) >= high) score = -INFINITY;
                largest = fmaxf(largest, score);
            }
            max_score[h] = column_max(largest);
            float rescale = exp2_fast(before - max_score[h]);
            sum[h] *= rescale;
            UNROLL for (int i = 0; i < 4; i++) {
                float &score = scores[i / 2][i % 2 * 2 + h];
                sum[h] += score = exp2_fast(score - max_score[h]);
            }
            UNROLL for (int j = 0; j < columns; j++) {
                UNROLL for (int i = h; i < 8; i += 2) values[j][i / 4][i % 4] *= rescale;
                zeros[j][h] *= rescale;
            }
        }
    }

    // b = the lane's weights times the factors of their positions.
    template <class Number, int parts>
    __device__ void factors_of(uint32_t (&b)[2][parts][2], const float (&weights)[2][4],
                               const float (&factors)[4]) const {
        UNROLL for (int i = 0; i < 4; i++) {
            uint32_t two[parts];
            split<Number>(two, weights[i / 2][i % 2 * 2] * factors[i], weights[i / 2][i % 2 * 2 + 1] * factors[i]);
            UNROLL for (int part = 0; part < parts; part++) b[i / 2][part][i % 2] = transposed(two[part]);
        }
    }

    // values += V^T weights.
    template <class Format>
    __device__ void add(const Format &format, const Tile &tile, const float (&weights)[2][4]) {
        using Number = Factor<Format>;
        constexpr int count = stored_parts<Format>, parts = factor_parts<Number>;
        float factors[4];
        uint32_t b[2][parts][2];
        int width = tile.stored.width, own[4], at[2][4];
        UNROLL for (int i = 0; i < 4; i++) {
            own[i] = tile.start(key_position(i)), factors[i] = row_scale(format, tile, own[i]) * weight_unit;
            at[0][i] = tile.start(value_position(i)), at[1][i] = tile.start(16 + value_position(i));
        }
        if (!Format::blocks) factors_of<Number>(b, weights, factors);
        UNROLL for (int j = 0; j < columns; j++) {
            if (j * 32 >= width) continue;
            if constexpr (Format::blocks) {
                UNROLL for (int i = 0; i < 4; i++) {
                    ScaleAndZero both = scale_and_zero(tile, own[i] + j * (int)sizeof(typename Format::G));
                    factors[i] = to_float(both.scale) * weight_unit;
                    UNROLL for (int h = 0; h < 2; h++) zeros[j][h] +=
                        weights[i / 2][i % 2 * 2 + h] * to_float(both.zero);
                }
                factors_of<Number>(b, weights, factors);
            }
            UNROLL for (int step = 0; step < 2; step++) {
                uint32_t a[2][count][4];
                read_values(a, format, tile, at[step], min(j * 32 + 4 * lane_row(), width - 4));
                UNROLL for (int i = 0; i < count; i++) {
                    UNROLL for (int part = 0; part + i < parts; part++) {
                        UNROLL for (int k = 0; k < 2; k++)
                            multiply_matrices<Number>(values[j][k], a[k][i], b[step][part]);
                    }
                }
            }
        }
    }
};

// The results of a block's warps for its query heads, next to one another in shared memory.
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
        UNROLL for (int h = 0; h < 2; h++) {
            int at = warp_id() * batch_heads + 2 * lane_column() + h;
            float total = column_sum(heads.sum[h]);
            if (lane_row() == 0) max_score[at] = heads.max_score[h], sum[at] = total;
            UNROLL for (int j = 0; j < columns; j++) {
                float zero = column_sum(heads.zeros[j][h]);
                UNROLL for (int i = 0; i < 4; i++) {
                    int c = j * 32 + 4 * lane_row() + i;
                    if (c < width) values[at * width + c] = heads.values[j][i / 2][i % 2 * 2 + h] / weight_unit + zero;
                }
            }
        }
    }
    // Returns the softmax of head h over all warps; value = its channel c. Warps without positions have the weight 0.
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

// One block for each split, batch of query heads that read one KV head, and row.
__global__ void __launch_bounds__(attend_threads, 3) decode_kernel(Attention task, Parts to, const Span *rows) {
    const CacheView &cache = task.cache;
    SharedMemory memory;
    Tile keys(memory, cache.keys, cache.residual_keys), values(memory, cache.values, cache.residual_values);
    Queries queries(memory, task.heads.width);
    wait_for_previous();
    let_next_start();
    Span row = rows[blockIdx.z];
    Splits splits(task.visible, row.position, to.splits);
    int split = blockIdx.x, batches = batches_of(task.heads), kv_head = blockIdx.y / batches;
    if (split >= splits.used) return;
    int begin_head = blockIdx.y % batches * batch_heads, first_head = kv_head * task.heads.per_kv() + begin_head;
    int64_t query_head = (int64_t)blockIdx.z * task.heads.query + first_head;
    int count = min(batch_heads, task.heads.per_kv() - begin_head);
    int low = splits.begin_of(split), high = splits.end_of(split);
    int begin = splits.origin + split * splits.length + warp_id() * warp_size;
    keys.ask<true>(task, row, kv_head, begin, low, high);
    values.ask<false>(task, row, kv_head, begin, low, high);
    queries.put(task.query + query_head * task.heads.width, count, task.scale);
    WarpHeads heads;
    UNROLL for (int h = 0; h < 2; h++) heads.back[h] = queries.back[2 * lane_column() + h];
    for (; begin < high; begin += attend_threads) {
        float scores[2][4] = {};
        wait_copies<1>();  // the keys have come, the values are on their way
        __syncwarp();
        keys.visit(cache.type_k, [&](auto format) { heads.score(scores, format, keys, queries); });
        __syncwarp();
        keys.ask<true>(task, row, kv_head, begin + attend_threads, low, high);
        heads.softmax(scores, low - begin, high - begin);
        wait_copies<1>();  // the values have come, the next keys are on their way
        __syncwarp();
        values.visit(cache.type_v, [&](auto format) { heads.add(format, values, scores); });
        __syncwarp();
        values.ask<false>(task, row, kv_head, begin + attend_threads, low, high);
    }
    __syncthreads();  // results are written over the tiles
    WarpResults results(SharedMemory(), to.value_width);
    results.put(heads);
    __syncthreads();
    for (int i = threadIdx.x; i < count * to.value_width; i += blockDim.x) {
        int h = i / to.value_width, c = i % to.value_width;
        int64_t at = to.index(query_head + h, split);
        plain::Softmax partial = results.merge(h, c, to.values[at * to.value_width + c]);
        if (c == 0) to.partials[at] = partial;
    }
}

// attention() where each token is the newest of its sequence and all keys and values, those of the residual block too,
// are stored. False if the kernel cannot read such rows or has no shared memory for them.
inline bool decode_attention(Gpu &m, const Attention &task, const Pass &pass) {
    const CacheView &cache = task.cache;
    auto fits = [](const Choice<Precision> &type, int width) {
        return width % 8 == 0 && width <= most_width &&
               type.visit([](auto format) { return readable<decltype(format)>; });
    };
    size_t bytes = Tile::memory_for(cache.keys, cache.residual_keys) +
                   Tile::memory_for(cache.values, cache.residual_values) + Queries::memory_for(task.heads.width);
    bytes = std::max(bytes, WarpResults::memory_for(task.values.width));
    if (!fits(cache.type_k, task.keys.width) || !fits(cache.type_v, task.values.width)) return false;
    if (bytes > m.properties.sharedMemPerBlockOptin) return false;
    Parts parts = parts_of(m, task, pass.count);
    dim3 blocks(parts.splits, task.heads.kv * batches_of(task.heads), pass.count);
    m.launch({blocks, attend_threads, bytes}, decode_kernel, task, parts, pass.spans);
    merge_parts<>(m, task, pass, parts);
    return true;
}

}  // namespace fast
#endif
