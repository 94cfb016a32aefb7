// Attention of decoding on the GPU: one token of each sequence against a long cache.
//
// Decoding reads each number of the cache once, for a few queries: what counts is that memory is never idle, and that
// it costs next to nothing to decode a number. So the positions are cut into splits, one for a block of threads (Dao et
// al. 2023, Flash-Decoding), and merged from the first to the last. Of 16-bit numbers and codes a warp multiplies 8 or
// 16 positions at a time by all query heads of a group on the tensor cores, straight from the registers into which they
// came, in two products:
//   scores (8 heads, 8 positions) = q K^T      and      values (16 channels, 8 heads) += V^T weights (16 positions).
// The lane that gets a score from the first has it where the second wants a weight. While a warp computes with keys,
// values are on their way, and the other way round (Dao 2023, FlashAttention-2, whose running maximum each warp has).
//
// A product takes 16-bit numbers. What rounding leaves of a query or a weight is multiplied as well: two numbers of f16
// hold one within 2^-22 of itself, of bf16 within 2^-16. Codes are exact in f16. A row's scale goes into its score or
// its weight, and that of a group of keys into the queries, which it leaves within 2^-20. Values of groups are rounded
// to f16 once more, by at most 2^-11 of themselves. These are the errors of this twin beside those of the plain one.
//
// Which position and which channel stands where in a matrix is free, as long as both factors agree. So a lane reads
// bytes that lie side by side, and codes stand in the order in which they come out of their words. Of 16 positions the
// even ones come first. With g = lane / 4 and c = lane % 4,
//   of keys     a lane has channels 8 c to 8 c + 7 of each 32, for the positions 2 g and 2 g + 1;
//   of values   channels 8 g to 8 g + 7 of each 64, or 4 of each half of a group, for the positions 4 c to 4 c + 3.
// What it should cost stands in docs/gpu.md.
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

constexpr int batch_heads = 8;   // query heads of a group that share one read of the cache
constexpr int least_split = 64;  // positions: shorter ones cost more to merge than they save
constexpr int attend_threads = 128, decode_warps = attend_threads / warp_size;

// Partial results of a pass.
struct Parts {
    plain::Softmax *partials;  // (row, query head, split); of exponents of 2
    float *values;             // (row, query head, split, value_width)
    int splits, value_width;
    HOST_DEVICE int64_t index(int64_t query_head, int split) const { return query_head * splits + split; }
};

HOST_DEVICE inline int batches_of(const Heads &heads) { return (heads.group() + batch_heads - 1) / batch_heads; }

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

// The story's bodies, a warp for each split of a query head: any format, any width.
inline void attend_splits(Gpu &m, const Attention &task, const Pass &pass, const Parts &to) {
    m.for_each((int64_t)pass.count * task.heads.query * to.splits, [=] HOST_DEVICE(int64_t item, Warp team) {
        int64_t query_head = item / to.splits;
        int split = (int)(item % to.splits), head = (int)(query_head % task.heads.query), width = to.value_width;
        const Span &span = pass.spans[query_head / task.heads.query];
        Splits splits(task.visible, span.position, to.splits);
        if (split >= splits.used) return;
        Segments seen;
        add_rows(seen, {task.cache, task.layer, task.heads.kv_head(head), task.keys, task.values}, span, task.visible);
        plain::Softmax softmax;
        float *out = to.values + item * width;
        for (int c = team.first(); c < width; c += team.step()) out[c] = 0;
        int begin = splits.begin_of(split), end = splits.end_of(split);
        for (int i = 0; i < seen.count; i++) {
            Segment &segment = seen.list[i];
            segment.begin = segment.begin < begin ? begin : segment.begin;
            segment.end = segment.end > end ? end : segment.end;
            const float *query = task.query + query_head * task.heads.width;
            plain::attend_segment(softmax, out, query, segment, pass.frequencies, team);
        }
        if (team.first() == 0) to.partials[item] = {softmax.max_score * log2_e, softmax.sum};
    });
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
        plain::Softmax softmax;
        add_sinks(sinks, {task.cache, task.layer, kv_head, task.keys, task.values}, span, task.visible);
        if (sinks.count > 0)
            plain::attend_rows<F32, F32>(softmax, out, task.query + item * task.heads.width, sinks.list[0],
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

// ---- What tensor cores take --------------------------------------------------------------------------------

// Formats whose codes are decoded in registers, to factors of 16 bits.
template <class Number>
std::true_type is_family(const PlainRow<Number> *);
template <class Code, int largest, int divisor>
std::true_type is_family(const ScaledRow<Code, largest, divisor> *);
template <int bits>
std::true_type is_family(const GroupedRow<bits> *);
std::false_type is_family(const void *);
template <class Format>
constexpr bool has_factors = decltype(is_family((const Format *)nullptr))::value && !std::is_same_v<Format, F32>;

template <class Code, int largest, int divisor>
std::true_type is_scaled(const ScaledRow<Code, largest, divisor> *);
std::false_type is_scaled(const void *);
template <class Format>
constexpr bool has_row_scales = decltype(is_scaled((const Format *)nullptr))::value;

__device__ inline bool scaled(const Choice<Precision> &type) {
    return type.visit([](auto format) { return has_row_scales<decltype(format)>; });
}

template <class Format>
constexpr int index_of = (int)Precision(Format{}).index();

constexpr int half_tile = 16;  // positions of a product; a tile has 32, one for each lane
// A lane's bytes of 16 keys or values as they come from memory, of heads up to `widest` channels, which is 64 or 128.
template <int widest>
struct Asked {
    uint32_t words[widest / 4];
};

__device__ inline uint32_t word_at(const char *from) { return *(const uint32_t *)from; }

__device__ inline void put(uint32_t *to, uint4 bytes) {
    to[0] = bytes.x, to[1] = bytes.y, to[2] = bytes.z, to[3] = bytes.w;
}
__device__ inline void put(uint32_t *to, uint2 bytes) { to[0] = bytes.x, to[1] = bytes.y; }

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
    bool in_groups = false;  // values: whether the channels are in the order of groups: see value_channel()
    __device__ const char *of(int lane) const { return side.data + __shfl_sync(all_lanes, (long long)offset, lane); }
};

// ---- Codes ----

// The codes in bytes `byte` and `byte` + 2 of a word, as two f16; `byte` is 0 or 1. With a code in its lowest bits,
// 0x6400 is 1024 + code.
constexpr uint32_t two_ones = 0x3c003c00;
template <int largest, int divisor>
__device__ inline uint32_t f16_of_codes(const ScaledRow<int8_t, largest, divisor> &, uint32_t codes, int byte) {
    uint32_t shifted = masked_and_flipped(codes >> 8 * byte, 0x00ff00ff, 0x64806480);
    return fma_f16(shifted, two_ones, 0xe480e480);  // - 1152: the sign bit, turned round, counts 128
}
template <int largest, int divisor>
__device__ inline uint32_t f16_of_codes(const ScaledRow<fp8, largest, divisor> &, uint32_t codes, int byte) {
    uint32_t upper = byte == 1 ? codes : codes << 8;
    return (upper & 0x80008000) | (upper >> 1 & 0x3f803f80);  // divided by 256: see to_float(fp8)
}
// Of the codes in the lowest bits of these bytes, or of those 4 bits above them: (1024 + 16 code) / 16 - 64.
template <int bits>
__device__ inline uint32_t f16_of_codes(const GroupedRow<bits> &, uint32_t codes, int byte, bool above) {
    uint32_t mask = Packed<bits>::largest * (above ? 0x00100010 : 0x00010001);
    uint32_t shifted = masked_and_flipped(codes >> 8 * byte, mask, 0x64006400);
    return above ? fma_f16(shifted, 0x2c002c00, 0xd400d400) : fma_f16(shifted, two_ones, 0xe400e400);
}

// The word of 32 packed codes that holds 4 q to 4 q + 3 and those 16 behind: after a shift, in the lowest bits of its
// bytes and 4 bits above them.
template <int bits>
__device__ inline uint32_t quarter_of(const Packed<bits> &codes, int q) {
    return word_at((const char *)codes.bytes + 4 * q % Packed<bits>::size);
}
template <int bits>
__device__ inline int quarter_shift(int q) {
    return bits * (4 * q / Packed<bits>::size);
}

// 8 codes begin at `from`, `behind` bytes after a word does, 0 or 2: the words that hold them, up to the last code.
__device__ inline void ask_codes(uint32_t *to, const char *from, uint32_t behind) {
    const char *words = from - behind;
    to[0] = word_at(words);
    to[1] = word_at(words + 4);
    to[2] = *(const uint16_t *)(from + 6);
}

// Word i of the codes that were asked for.
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
    int width, groups = 0;  // groups: of a row, where keys are quantized in blocks
    bool bytes = false;     // keys are codes of a byte: of four in a word the even ones come first
    __device__ int channel(int i, int h, int r) const {
        if (groups > 0) return (i / abreast * 8 + r) * groups + i % abreast * 2 + h;
        return i / 2 * 32 + r / 2 * 8 + i % 2 * 4 + (bytes ? r % 2 * 2 + h : h * 2 + r % 2);
    }
    __device__ bool has(int i, int h, int r) const {
        return channel(i, h, r) < width && (groups == 0 || i % abreast * 2 + h < groups);
    }
};

// The first of a lane's 8 channels of each 32. Those behind the last one are read as the last: their queries are 0.
template <int widest>
__device__ inline int key_channel(int stretch, int width) {
    int channel = 32 * stretch + lane_column() * 8;
    return width == widest ? channel : min(channel, width - 8);
}

template <int widest, class Number>
__device__ inline void ask_keys(Asked<widest> &asked, const PlainRow<Number> &, const LaneRows &rows, int place) {
    UNROLL for (int r = 0; r < 2; r++) {
        const char *from = rows.of(place + lane_row() * 2 + r);
        UNROLL for (int s = 0; s < widest / 32; s++) {
            uint4 bytes = load_once(from + key_channel<widest>(s, rows.width) * sizeof(Number));
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
        uint32_t behind = (uintptr_t)from & 2;
        UNROLL for (int s = 0; s < widest / 32; s++)
            ask_codes(&asked.words[3 * (widest / 32 * r + s)], from + key_channel<widest>(s, rows.width), behind);
        asked.words[3 * (widest / 16) + r] = behind;
    }
}
template <int widest, class Code, int largest, int divisor>
__device__ inline void key_fragment(uint32_t (&b)[2], const ScaledRow<Code, largest, divisor> &format,
                                    const Asked<widest> &asked, int i, int r) {
    const uint32_t *eight = &asked.words[3 * (widest / 32 * r + i / 2)];
    uint32_t codes = codes_of(eight, i % 2, asked.words[3 * (widest / 16) + r]);
    UNROLL for (int h = 0; h < 2; h++) b[h] = f16_of_codes(format, codes, h);
}

// A whole block, whatever `place` is. Column g of a matrix is a group of row g, g + 8, ..., of which a lane asks for
// the codes of positions 4 c to 4 c + 3 and those 16 behind, and for scale and zero point.
template <int widest, int bits>
__device__ inline void ask_keys(Asked<widest> &asked, const GroupedRow<bits> &format, const LaneRows &rows, int) {
    constexpr int columns = widest / 8, abreast = widest / 32;
    int groups = format.groups(rows.width);
    UNROLL for (int i = 0; i < columns; i += abreast) {
        int row = i / abreast * 8 + lane_row();
        int there = rows.width == widest ? abreast : min(rows.width - row * groups, groups);  // groups that hold keys
        const char *from = rows.of(row);
        UNROLL for (int j = 0; j < abreast; j++) {
            const auto &group = format.group(from, j);
            asked.words[i + j] = j < there ? quarter_of(group.codes, lane_column()) : 0;
            asked.words[columns + i + j] = j < there ? word_at((const char *)&group.both) : 0;
        }
    }
}

// The matrices of product i for all four eighths of a block, of codes alone; those of their channels' zero points,
// which are the same in all columns; and the scales of a lane's channels. As the lowest bits of an f16 a code is 2^-24
// of itself, 4 bits above them 2^-20. Transposed, a lane has bytes 2 g and 2 g + 1 of two channels, and in them the
// positions 2 g, 2 g + 16, 2 g + 1 and 2 g + 17.
template <int widest, int bits>
__device__ inline void block_fragments(uint32_t (&b)[4][2], uint32_t (&zeros)[2], uint32_t (&scales)[2],
                                       const GroupedRow<bits> &, const Asked<widest> &asked, int i) {
    constexpr uint32_t mask = Packed<bits>::largest;
    int c = lane_column();
    UNROLL for (int h = 0; h < 2; h++) {
        uint32_t codes = transpose_matrix(asked.words[2 * i + h] >> quarter_shift<bits>(c));
        uint32_t both = asked.words[widest / 8 + 2 * i + h];
        uint32_t even = __shfl_sync(all_lanes, both, 8 * c), odd = __shfl_sync(all_lanes, both, 8 * c + 4);
        scales[h] = low_halves(even, odd), zeros[h] = high_halves(even, odd);
        UNROLL for (int r = 0; r < 2; r++) {
            b[r][h] = codes >> 8 * r & mask * 0x00010001;
            b[2 + r][h] = codes >> 8 * r & mask * 0x00100010;
        }
    }
}

// Queries and their rests times the scales of their channels: again numbers and rests. Together they are within 2^-20
// of the product, or within 2^-24 of the largest query.
__device__ inline void scale_queries(uint32_t (&a)[4], const uint32_t (&scales)[2]) {
    UNROLL for (int h = 0; h < 2; h++) {
        uint32_t &number = a[2 * h], &rest = a[2 * h + 1], product = fma_f16(number, scales[h], 0);
        rest = fma_f16(rest, scales[h], rest_of_product(number, scales[h], product));
        number = product;
    }
}

// ---- Values ----
//
// ask_values() starts the loads for half a tile, four positions in a lane; value_pair() gives, of those at `k` and
// k + 2, channel value_channel(i, g) and the next one.

__device__ inline int value_channel(int i, int g, bool in_groups) {
    if (in_groups) return i / 4 * 64 + g / 4 * 32 + i % 4 / 2 * 16 + g % 4 * 4 + i % 2 * 2;
    return i / 4 * 64 + 8 * g + i % 4 * 2;
}

// The first of `count` channels that a lane has from product i on. Behind the last one the last ones are read, for
// nobody.
template <int widest>
__device__ inline int first_channel(int i, int width, int count, bool in_groups) {
    int channel = value_channel(i, lane_row(), in_groups);
    return width == widest ? channel : min(channel, width - count);
}

template <int widest, class Number>
__device__ inline void ask_values(Asked<widest> &asked, const PlainRow<Number> &, const LaneRows &rows, int place) {
    UNROLL for (int k = 0; k < 4; k++) {
        const char *from = rows.of(place + lane_column() * 4 + k);
        auto ask = [&](auto bytes, int count, bool in_groups) {
            UNROLL for (int i = 0; i < widest / 16; i += count / 2) {
                int channel = first_channel<widest>(i, rows.width, count, in_groups);
                put(&asked.words[widest / 16 * k + i], bytes(from + channel * sizeof(Number)));
            }
        };
        if (std::is_same_v<Number, f16> && rows.in_groups)
            ask([](const char *at) { return *(const uint2 *)at; }, 4, true);
        else
            ask([](const char *at) { return load_once(at); }, 8, false);
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
        uint32_t behind = (uintptr_t)from & 2;
        UNROLL for (int s = 0; s < widest / 64; s++) {
            int channel = first_channel<widest>(4 * s, rows.width, 8, false);
            ask_codes(&asked.words[3 * (widest / 64 * k + s)], from + channel, behind);
        }
        asked.words[3 * (widest / 16) + k] = behind;
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
    UNROLL for (int odd = 0; odd < 2; odd++) pair[odd] = f16_of_codes(format, codes, odd);
}

// A lane has bytes 4 (g % 4) to 4 (g % 4) + 3 of group g / 4 of each 64 channels: all codes of a byte are its own.
template <int widest, int bits>
__device__ inline void ask_values(Asked<widest> &asked, const GroupedRow<bits> &format, const LaneRows &rows,
                                  int place) {
    int last = format.groups(rows.width) - 1;
    UNROLL for (int k = 0; k < 4; k++) {
        const char *from = rows.of(place + lane_column() * 4 + k);
        UNROLL for (int s = 0; s < widest / 64; s++) {
            const auto &group = format.group(from, min(2 * s + lane_row() / 4, last));
            asked.words[2 * (widest / 64 * k + s)] = quarter_of(group.codes, lane_row() % 4);
            asked.words[2 * (widest / 64 * k + s) + 1] = word_at((const char *)&group.both);
        }
    }
}
template <int widest, int bits>
__device__ inline void value_pair(uint32_t (&pair)[2], const GroupedRow<bits> &format, const Asked<widest> &asked,
                                  int i, int k) {
    const uint32_t *a = &asked.words[2 * (widest / 64 * k + i / 4)];
    const uint32_t *b = &asked.words[2 * (widest / 64 * (k + 2) + i / 4)];
    uint32_t codes = (i % 2 ? high_halves(*a, *b) : low_halves(*a, *b)) >> quarter_shift<bits>(lane_row() % 4);
    uint32_t scales = low_halves(a[1], b[1]), zeros = high_halves(a[1], b[1]);
    UNROLL for (int odd = 0; odd < 2; odd++) {
        uint32_t two = f16_of_codes(format, codes, odd, i % 4 > 1);
        pair[odd] = fma_f16(two, scales, zeros);
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

constexpr float plain_query = 0x1p13f, grouped_query = 0x1p-1f;

// The queries of a batch as the products' left factors: row g is query head g, and row g + 8 what rounding left of it.
// All warps share them.
template <int widest>
struct DecodeQueries {
    using Order = KeyOrder<widest>;
    Shared<uint4> numbers;  // (rows or blocks of keys, product, lane)
    Shared<float> factors;  // (batch_heads): of scores
    __device__ explicit DecodeQueries(SharedMemory &memory)
        : numbers(memory.take<uint4>(2 * Order::products * warp_size)), factors(memory.take<float>(batch_heads)) {}
    static size_t bytes() {
        return shared_size(2 * Order::products * warp_size * sizeof(uint4)) + shared_size(batch_heads * sizeof(float));
    }
    // A query is multiplied by a power of two, so that its largest number is 2^13 or somewhat more: f16 has no smaller
    // ones than 2^-24. But where scales of groups are to be multiplied with it, it is 1 at max_score: they go up to
    // 2^15.4.
    template <class Number>
    __device__ void take(Number, const float *queries, int count, const Order &order) const {
        int g = lane_row(), c = lane_column();
        const float *query = queries + g * order.width;
        float largest = 0x1p-112f;
        for (int i = c; g < count && i < order.width; i += 4) largest = fmaxf(largest, fabsf(query[i]));
        for (int lane = 1; lane < 4; lane *= 2) largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, lane));
        float power = power_below(largest), up = inverse(power) * (order.groups > 0 ? grouped_query : plain_query);
        for (int i = warp_id(); i < Order::products; i += decode_warps) {
            auto number = [&](int h, int r) {
                return g < count && order.has(i, h, r) ? query[order.channel(i, h, r)] * up : 0;
            };
            uint4 four;
            pack_both<Number>(four.x, four.y, number(0, 2 * c), number(0, 2 * c + 1));
            pack_both<Number>(four.z, four.w, number(1, 2 * c), number(1, 2 * c + 1));
            numbers[((order.groups > 0) * Order::products + i) * warp_size + lane_id()] = four;
        }
        if (warp_id() == 0 && c == 0) factors[g] = power / plain_query * log2_e / sqrtf((float)order.width);
    }
    // Those of product i.
    template <class Format>
    __device__ void fragment(uint32_t (&a)[4], const Format &, int i) const {
        put(a, numbers[(Format::blocks * Order::products + i) * warp_size + lane_id()]);
    }
};

// Calls use(format), of f16 where a block is not full yet; not of f32, which has no place in a product.
template <class Use>
__device__ inline void visit_factors(const Choice<Precision> &stored, bool residual, Use use) {
    Choice<Precision> type = stored;
    if (residual) type.index = index_of<F16>;
    type.visit([&](auto format) {
        if constexpr (has_factors<decltype(format)>) use(format);
    });
}

// 32 positions of a row's sequence, of which [low, high) are visible.
struct DecodeTile {
    int begin, low, high;
    int64_t key_offset, value_offset;     // of the position `begin` + lane
    f16 key_scale, value_scale;           // of its whole rows; 1 where they have none
    bool residual_keys, residual_values;  // read at f16: their block is not full yet

    __device__ LaneRows keys(const CacheView &cache, int width) const {
        return {residual_keys ? cache.residual_keys : cache.keys, width, key_offset};
    }
    __device__ LaneRows values(const CacheView &cache, int width) const {
        const CacheRows &side = residual_values ? cache.residual_values : cache.values;
        return {side, width, value_offset, (bool)cache.residual_values.data};
    }
    // What is not visible is not read: a visible position stands in for it, and has no weight there. But a block of
    // keys is in all its rows.
    __device__ void find(const Attention &task, const Span &row, int kv_head) {
        const CacheView &cache = task.cache;
        int t = begin + lane_id(), there = min(max(t, low), high - 1);
        int64_t kept = (int64_t)row.sequence * group_size + there % group_size;
        int64_t at = cache.row_of(row.sequence, there);
        bool own = row.position / group_size == begin / group_size;
        residual_keys = own && cache.residual_keys.data, residual_values = own && cache.residual_values.data;
        auto offset = [&](const CacheRows &side, int64_t row) { return side.at(task.layer, row, kv_head) - side.data; };
        value_offset = residual_values ? offset(cache.residual_values, kept) : offset(cache.values, at);
        if (cache.residual_keys.data && !own) at = cache.row_of(row.sequence, t);
        key_offset = residual_keys ? offset(cache.residual_keys, kept) : offset(cache.keys, at);
        visit_factors(cache.type_k, residual_keys, [&](auto format) { take_scale(key_scale, format, keys(cache, 0)); });
        visit_factors(cache.type_v, residual_values,
                      [&](auto format) { take_scale(value_scale, format, values(cache, 0)); });
    }
    template <class Format>
    __device__ static void take_scale(f16 &scale, const Format &, const LaneRows &rows) {
        if constexpr (has_row_scales<Format>) scale = *(const f16 *)(rows.side.data + rows.offset);
    }
    // The position of column 2 c + e in eighth j, counted from `begin`.
    __device__ static int place_of(int j, int e) { return j / 2 * half_tile + lane_column() * 4 + 2 * e + j % 2; }
    __device__ bool visible(int i) const { return low <= begin + i && begin + i < high; }
    __device__ bool all_visible() const { return low <= begin && begin + warp_size <= high; }
};

// What a warp knows of its query heads: lane (g, c) the maximum of head g, and the values of heads 2 c and 2 c + 1.
template <int widest>
struct DecodeHeads {
    static constexpr int products = widest / 16;
    float max_score = -INFINITY, sum = 0;  // sum: of the lane's own positions
    float values[products][4] = {};        // sums[..] of multiply_matrices: rows are channels, columns are heads
    float unit = 0x1p-24f;  // in which values are counted: the power of two below the largest scale of a row

    template <class Use>
    __device__ static void for_each_place(Use use) {
        UNROLL for (int i = 0; i < 8; i++) use(i / 2, i % 2);
    }

    // scores[j][e], of head g and position place_of(j, e) of a tile, become weights. These are times 2^14: f16 has no
    // smaller numbers than 2^-24, and none larger than 65,504.
    __device__ void softmax(float (&scores)[4][2], float factor, const DecodeTile &tile, bool scaled) {
        float before = max_score, shrink = unit, largest = 1, value_scales[4][2];
        if (scaled) {
            largest = warp_max(to_float(tile.value_scale));
            uint32_t scales = tile.key_scale.bits | (uint32_t)tile.value_scale.bits << 16;
            for_each_place([&](int j, int e) {
                uint32_t both = __shfl_sync(all_lanes, scales, tile.place_of(j, e));
                scores[j][e] *= half_of<f16>(both, 0);
                value_scales[j][e] = half_of<f16>(both, 1);
            });
        }
        unit = fmaxf(unit, power_below(largest));
        shrink *= inverse(unit);
        for_each_place([&](int j, int e) { scores[j][e] *= factor; });
        if (!tile.all_visible()) {
            for_each_place([&](int j, int e) {
                if (!tile.visible(tile.place_of(j, e))) scores[j][e] = -INFINITY;
            });
        }
        for_each_place([&](int j, int e) { max_score = fmaxf(max_score, scores[j][e]); });
        for (int lane = 1; lane < 4; lane *= 2)
            max_score = fmaxf(max_score, __shfl_xor_sync(all_lanes, max_score, lane));
        float rescale = before == max_score ? 1 : exp2_fast(before - max_score);
        sum *= rescale;
        for_each_place([&](int j, int e) {
            float weight = exp2_fast(scores[j][e] - max_score);
            sum += weight;
            scores[j][e] = weight * (0x1p14f * inverse(unit));
        });
        if (scaled) for_each_place([&](int j, int e) { scores[j][e] *= value_scales[j][e]; });
        rescale *= shrink;
        if (!__any_sync(all_lanes, rescale != 1)) return;
        UNROLL for (int e = 0; e < 2; e++) {
            float of_head = __shfl_sync(all_lanes, rescale, lane_column() * 8 + 4 * e);
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
                                  const LaneRows &rows, const DecodeQueries<widest> &queries) {
    uint32_t a[4], b[4][2];
    if constexpr (Format::blocks) {
        float sums[4][4] = {}, zero_sums[4] = {}, of_zeros[2];
        uint32_t zeros[2], scales[2];
        UNROLL for (int i = 0; i < widest / 16; i++) {
            queries.fragment(a, format, i);
            block_fragments(b, zeros, scales, format, keys, i);
            multiply_matrices<f16>(zero_sums, a, zeros);
            scale_queries(a, scales);
            UNROLL for (int j = 0; j < 4; j++) multiply_matrices<f16>(sums[j], a, b[j]);
        }
        constexpr float query = plain_query / grouped_query;
        take_scores(of_zeros, zero_sums);
        UNROLL for (int j = 0; j < 4; j++) {
            take_scores(scores[j], sums[j]);
            float code = j < 2 ? 0x1p24f : 0x1p20f;
            UNROLL for (int e = 0; e < 2; e++) scores[j][e] = fmaf(code * query, scores[j][e], query * of_zeros[e]);
        }
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
__device__ void attend_tiles(DecodeHeads<widest> &heads, const DecodeQueries<widest> &queries, const Attention &task,
                             const Span &row, int kv_head, int first, int low, int high) {
    const CacheView &cache = task.cache;
    int key_width = exact ? widest : cache.keys.width, value_width = exact ? widest : cache.values.width;
    constexpr f16 one = {0x3c00};
    DecodeTile tile = {first, low, high, 0, 0, one, one, false, false};
    Asked<widest> keys, values;
    float weights[4][2];  // the first two of the half that values were asked for
    auto ask_keys_of = [&](auto format) { ask_keys(keys, format, tile.keys(cache, key_width), 0); };
    auto score = [&](auto format) { score_keys(weights, format, keys, tile.keys(cache, key_width), queries); };
    auto add = [&](auto format) { heads.add(format, values, weights); };
    for (bool asked = false;; tile.begin += decode_warps * warp_size) {
        bool more = tile.begin < high, were_residual = tile.residual_values;
        if (more) {
            tile.find(task, row, kv_head);
            visit_factors(cache.type_k, tile.residual_keys, ask_keys_of);
        }
        for (int place = 0; place < warp_size; place += half_tile) {
            if (asked) visit_factors(cache.type_v, were_residual, add);
            if (!more) return;
            asked = true;
            were_residual = tile.residual_values;
            visit_factors(cache.type_v, tile.residual_values,
                          [&](auto format) { ask_values(values, format, tile.values(cache, value_width), place); });
            if (place == 0) {
                visit_factors(cache.type_k, tile.residual_keys, score);
                heads.softmax(weights, queries.factors[lane_row()], tile, scaled(cache.type_k) || scaled(cache.type_v));
            }
            UNROLL for (int i = 0; place > 0 && i < 4; i++) weights[i / 2][i % 2] = weights[2 + i / 2][i % 2];
        }
    }
}

// What the warps of a block know of their query heads, one after another.
struct WarpResults {
    int width;
    Shared<float> max_score, sum, values;  // (warp, batch_heads) and (warp, batch_heads, width)
    __device__ WarpResults(SharedMemory &memory, int width)
        : width(width),
          max_score(memory.take<float>(decode_warps * batch_heads)),
          sum(memory.take<float>(decode_warps * batch_heads)),
          values(memory.take<float>(decode_warps * batch_heads * width)) {}
    static size_t bytes(int width) {
        size_t heads = decode_warps * batch_heads * sizeof(float);
        return 2 * shared_size(heads) + shared_size(heads * width);
    }
    template <int widest>
    __device__ void put(const DecodeHeads<widest> &heads, bool in_groups) const {
        int g = lane_row(), c = lane_column(), first = warp_id() * batch_heads + 2 * c;
        float total = heads.sum;
        for (int lane = 1; lane < 4; lane *= 2) total += __shfl_xor_sync(all_lanes, total, lane);
        if (c == 0) max_score[warp_id() * batch_heads + g] = heads.max_score, sum[warp_id() * batch_heads + g] = total;
        UNROLL for (int i = 0; i < heads.products; i++) {
            UNROLL for (int j = 0; j < 4; j++) {
                int channel = value_channel(i, g, in_groups) + j / 2;
                float value = heads.values[i][j] * 0x1p-14f * heads.unit;
                if (channel < width) values[(first + j % 2) * width + channel] = value;
            }
        }
    }
    // The partial result of head h, of which `value` is channel c. Warps without positions have the weight 0.
    __device__ plain::Softmax merge(int h, int c, float &value) const {
        plain::Softmax all;
        for (int w = 0; w < decode_warps; w++) all.max_score = fmaxf(all.max_score, max_score[w * batch_heads + h]);
        value = 0;
        for (int w = 0; w < decode_warps; w++) {
            float factor = exp2_fast(max_score[w * batch_heads + h] - all.max_score);
            all.sum += sum[w * batch_heads + h] * factor;
            value += values[(w * batch_heads + h) * width + c] * factor;
        }
        return all;
    }
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

// A block for each split, batch of query heads, and row. With 168 registers three blocks share a multiprocessor; a
// dozen words, flags for the max_score part, find no room in them.
template <int widest, bool exact>
__global__ void __launch_bounds__(attend_threads, exact ? 3 : 2)
    decode_kernel(Attention task, Parts to, const Span *rows) {
    SharedMemory memory;
    DecodeQueries<widest> queries(memory);
    WarpResults results(memory, to.value_width);
    wait_for_previous();
    let_next_start();
    Span row = rows[blockIdx.z];
    HeadBatch batch(task.heads, blockIdx.y);
    Splits splits(task.visible, row.position, to.splits);
    int split = blockIdx.x, first = splits.origin + split * splits.length + warp_id() * warp_size;
    if (split >= splits.used) return;
    int width = task.heads.width, groups = task.cache.residual_keys.data ? (width + group_size - 1) / group_size : 0;
    const float *query = task.query + ((size_t)row.row * task.heads.query + batch.first) * width;
    if (task.cache.type_k.index == index_of<BF16>)
        queries.take(bf16{}, query, batch.count, {width});
    else
        queries.take(f16{}, query, batch.count, {width, 0, scaled(task.cache.type_k)});
    if (groups > 0) queries.take(f16{}, query, batch.count, {width, groups});
    __syncthreads();
    DecodeHeads<widest> heads;
    attend_tiles<widest, exact>(heads, queries, task, row, batch.kv_head, first, splits.begin_of(split),
                                splits.end_of(split));
    results.put(heads, task.cache.residual_values.data);
    __syncthreads();
    for (int i = threadIdx.x; i < batch.count * to.value_width; i += blockDim.x) {
        int h = i / to.value_width, c = i % to.value_width;
        int64_t at = to.index((int64_t)blockIdx.z * task.heads.query + batch.first + h, split);
        float value;
        plain::Softmax partial = results.merge(h, c, value);
        to.values[at * to.value_width + c] = value;
        if (c == 0) to.partials[at] = partial;
    }
}

// Launches the kernel for the widest heads that it has registers for, 64 or 128; exact: all are as wide. False where
// tensor cores do not take the cache.
inline bool decode_on_tensor_cores(Gpu &m, const Attention &task, const Pass &pass, const Parts &parts) {
    int keys = task.keys.width, values = task.values.width;
    auto fits = [](const Choice<Precision> &type, int width) {
        bool fast = false;
        for_each_type<Precision>([&](auto format) {
            using Format = decltype(format);
            fast |= has_factors<Format> && type.index == index_of<Format>;
        });
        return fast && width % 8 == 0 && width <= 128;
    };
    if (!fits(task.cache.type_k, keys) || !fits(task.cache.type_v, values)) return false;
    dim3 blocks(parts.splits, task.heads.kv * batches_of(task.heads), pass.count);
    auto start = [&](auto widest, auto exact) {
        size_t bytes = WarpResults::bytes(values) + DecodeQueries<widest>::bytes();
        m.launch({blocks, attend_threads, bytes}, decode_kernel<widest, exact>, task, parts, pass.spans);
    };
    using std::integral_constant;
    if (keys == 64 && values == 64)
        start(integral_constant<int, 64>(), std::true_type());
    else if (keys == 128 && values == 128)
        start(integral_constant<int, 128>(), std::true_type());
    else
        start(integral_constant<int, 128>(), std::false_type());
    return true;
}

// attention() where each token is the newest one of its sequence and all of them, the newest block's too, have been
// stored.
inline void decode_attention(Gpu &m, const Attention &task, const Pass &pass) {
    Parts parts = parts_of(m, task, pass.count);
    if (!decode_on_tensor_cores(m, task, pass, parts)) attend_splits(m, task, pass, parts);
    merge_parts(m, task, pass, parts);
}

}  // namespace fast
#endif
