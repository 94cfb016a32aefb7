// Attention on the GPU's tensor cores: the ladder of attention.cu goes on. Rung 3 decodes, bound by memory: a token's
// queries against a long cache. Rung 4 prefills, bound by arithmetic: many tokens' queries against each other. Each
// gives what the plain rungs give, within the bound that stands with it.
#pragma once

#include "attention.cu"

#ifdef HAS_CUDA
// ---- Rung 3: decoding on the GPU, on tensor cores ----------------------------------------------------------
//
// Decoding reads each number of the cache once, for a few queries: what counts is that memory is never idle, and that
// it costs next to nothing to decode a number. So a warp multiplies 8 or 16 positions at a time by all query heads of a
// batch on the tensor cores, straight from the registers into which they came, in two products:
//   scores (8 heads, 8 positions) = q K^T      and      values (16 channels, 8 heads) += V^T weights (16 positions).
// The lane that gets a score from the first has it where the second wants a weight. While a warp computes with keys,
// values are on their way, and the other way round (Dao 2023, FlashAttention-2, whose running maximum each warp has).
// Queries are in shared memory: registers are for what comes from the cache.
//
// A product takes 16-bit numbers. What rounding leaves of a query or a weight is multiplied as well: two numbers of f16
// hold one within 2^-22 of itself, of bf16 within 2^-16. Codes are exact in f16. A row's scale goes into its score or
// its weight, and that of a group of keys into the queries, which it leaves within 2^-20. Values of groups are rounded
// to f16 once more, by at most 2^-11 of themselves. These are the errors of this rung beside those of the plain one.
//
// Which position and which channel stands where in a matrix is free, as long as both factors agree. So a lane reads
// bytes that lie side by side, and codes stand in the order in which they come out of their words. Of 16 positions the
// even ones come first. With g = lane / 4 and c = lane % 4,
//   of keys     a lane has channels 8 c to 8 c + 7 of each 32, for the positions 2 g and 2 g + 1;
//   of values   channels 8 g to 8 g + 7 of each 64, or 4 of each half of a group, for the positions 4 c to 4 c + 3.
//
// Predicted, not yet measured, for 32 query heads on 8 KV heads of 128, 8 sequences of 32,768 positions, on a card of
// 132 multiprocessors, 4.8 TB/s and 1.8 GHz: 88 % of its bandwidth with bf16, 80 with int8 and fp8, 65 with int4. If
// memory answers after 0.8 us, 29 KB must be on their way to each multiprocessor. Its 12 warps ask for up to 8 KB each
// with bf16, 4 with int8, 3.7 with int4. A tile of 32 positions takes a warp about 630 instructions with bf16, 1,190
// with int8, 1,310 with fp8 and 1,070 with int4, as the compiler has them for 9.0; at the whole bandwidth there is time
// for 3,200, 1,650, 1,650 and 1,010, and 7 of 10 issue slots may be filled. So int4 waits for instructions. (It took
// 1,470, and int8 1,500: masks and constants apart, each byte read by two lanes, scales into each number, scales and
// visibility where there are none.)

constexpr int half_tile = 16;  // positions of a product; a tile has 32, one for each lane
constexpr int fast_warps = attend_threads / warp_size;
constexpr int f16_index = (int)Precision(F16{}).index(), bf16_index = (int)Precision(BF16{}).index();

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

template <class Format>
constexpr bool has_row_scales = Format::scale_channels > group_size;

__device__ inline bool scaled(const OnDevice<Precision> &type) {
    return type.visit([](auto format) { return has_row_scales<decltype(format)>; });
}

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
    // ones than 2^-24. But where scales of groups are to be multiplied with it, it is 1 at most: they go up to 2^15.4.
    template <class Number>
    __device__ void take(Number, const float *queries, int count, const Order &order) const {
        int g = lane_row(), c = lane_column();
        const float *query = queries + g * order.width;
        float largest = 0x1p-112f;
        for (int i = c; g < count && i < order.width; i += 4) largest = fmaxf(largest, fabsf(query[i]));
        for (int lane = 1; lane < 4; lane *= 2) largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, lane));
        float power = power_below(largest), up = inverse(power) * (order.groups > 0 ? grouped_query : plain_query);
        for (int i = warp_id(); i < Order::products; i += fast_warps) {
            auto number = [&](int h, int r) {
                return g < count && order.has(i, h, r) ? query[order.channel(i, h, r)] * up : 0;
            };
            uint4 four;
            pack_both<Number>(four.x, four.y, number(0, 2 * c), number(0, 2 * c + 1));
            pack_both<Number>(four.z, four.w, number(1, 2 * c), number(1, 2 * c + 1));
            numbers[((order.groups > 0) * Order::products + i) * warp_size + lane_id()] = four;
        }
        if (warp_id() == 0 && c == 0) factors[g] = power / plain_query * 1.44269504f / sqrtf((float)order.width);
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
        if constexpr (has_factors<decltype(format)>) use(format);
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
        const CacheRows &side = recent_values ? cache.recent_values : cache.values;
        return {side, width, value_offset, (bool)cache.recent_values.data};
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
        if constexpr (has_row_scales<Format>) scale = *(const f16 *)(rows.side.data + rows.offset);
    }
    // The position of column 2 c + e in eighth j, counted from `begin`.
    __device__ static int place_of(int j, int e) { return j / 2 * half_tile + lane_column() * 4 + 2 * e + j % 2; }
    __device__ bool visible(int i) const { return low <= begin + i && begin + i < high; }
    __device__ bool all_visible() const { return low <= begin && begin + warp_size <= high; }
};

// What a warp knows of its query heads: lane (g, c) the maximum of head g, and the values of heads 2 c and 2 c + 1.
template <int widest>
struct FastHeads {
    static constexpr int products = widest / 16;
    float most = -INFINITY, sum = 0;  // sum: of the lane's own positions
    float values[products][4] = {};   // sums[..] of multiply_matrices: rows are channels, columns are heads
    float unit = 0x1p-24f;            // in which values are counted: the power of two below the largest scale of a row

    template <class Use>
    __device__ static void for_each_place(Use use) {
        UNROLL for (int i = 0; i < 8; i++) use(i / 2, i % 2);
    }

    // scores[j][e], of head g and position place_of(j, e) of a tile, become weights. These are times 2^14: f16 has no
    // smaller numbers than 2^-24, and none larger than 65,504.
    __device__ void softmax(float (&scores)[4][2], float factor, const FastTile &tile, bool scaled) {
        float before = most, shrink = unit, largest = 1, value_scales[4][2];
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
        for_each_place([&](int j, int e) { most = fmaxf(most, scores[j][e]); });
        for (int lane = 1; lane < 4; lane *= 2) most = fmaxf(most, __shfl_xor_sync(all_lanes, most, lane));
        float fade = before == most ? 1 : exp2_fast(before - most);
        sum *= fade;
        for_each_place([&](int j, int e) {
            float weight = exp2_fast(scores[j][e] - most);
            sum += weight;
            scores[j][e] = weight * (0x1p14f * inverse(unit));
        });
        if (scaled) for_each_place([&](int j, int e) { scores[j][e] *= value_scales[j][e]; });
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
                heads.softmax(weights, queries.factors[lane_row()], tile, scaled(cache.type_k) || scaled(cache.type_v));
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
    __device__ void put(const FastHeads<widest> &heads, bool in_groups) const {
        int g = lane_row(), c = lane_column(), first = warp_id() * batch_heads + 2 * c;
        float total = heads.sum;
        for (int lane = 1; lane < 4; lane *= 2) total += __shfl_xor_sync(all_lanes, total, lane);
        if (c == 0) most[warp_id() * batch_heads + g] = heads.most, sum[warp_id() * batch_heads + g] = total;
        UNROLL for (int i = 0; i < heads.products; i++) {
            UNROLL for (int j = 0; j < 4; j++) {
                int channel = value_channel(i, g, in_groups) + j / 2;
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

// A block for each split, batch of query heads, and row. With 168 registers three blocks share a multiprocessor; a
// dozen words, flags for the most part, find no room in them.
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
        queries.take(bf16{}, query, batch.count, {width});
    else
        queries.take(f16{}, query, batch.count, {width, 0, scaled(task.cache.type_k)});
    if (groups > 0) queries.take(f16{}, query, batch.count, {width, groups});
    __syncthreads();
    FastHeads<widest> heads;
    attend_tiles<widest, exact>(heads, queries, task, row, batch.kv_head, first, splits.begin_of(split),
                                splits.end_of(split));
    results.put(heads, task.cache.recent_values.data);
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
        int index = 0;
        bool fast = false;
        for_each_type<Precision>([&](auto format) {
            if (index++ == type.index) fast = has_factors<decltype(format)>;
        });
        return fast && width % 8 == 0 && width <= 128;
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

// ---- Rung 4: tiles on tensor cores, for many tokens --------------------------------------------------------
//
// In prefill many queries read the same keys and values: what counts is no longer how fast those come out of memory,
// but how many multiply-adds are done with each one that has come. A row is one query head at one token; the rows of
// all query heads of a KV head are computed together, tile by tile of positions.
//
// Predicted, not yet measured, for 8,192 tokens and heads of 128 on a Hopper card: 45 % of the rate of cuBLAS. mma has
// two thirds of what its wgmma instructions have, and the softmax of a tile waits for the products of the same warp.

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

// to (D) = the key of sink i, turned to where a query at `position` sees it. By one warp, as is what follows, where
// each lane reads the channels that it wrote here.
__device__ inline void turn_sink(Shared<float> to, const ChunkHead &head, int i, int position) {
    for (int c = lane_id(); c < head.task.heads.width; c += warp_size)
        to[c] = sink_key(head.task, head.cached(position), i, c);
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

// The blocks of a chunk: `each` rows of a KV head, the heads side by side, and late tokens first, which read most.
inline dim3 chunk_blocks(const Heads &heads, const Span &chunk, int each) {
    return dim3(heads.kv * blocks_for((int64_t)chunk.count * heads.group(), each));
}
__device__ inline int first_row(const Heads &heads, int each) {
    return (int)((gridDim.x - 1 - blockIdx.x) / heads.kv) * each;
}

__global__ void __launch_bounds__(plain_threads) attend_chunk_plain_kernel(DeviceAttention task, Span chunk) {
    wait_for_previous();
    let_next_start();
    ChunkHead head(task, chunk, blockIdx.x % task.heads.kv);
    const int key_width = task.heads.width, value_width = task.cache.values.width, warp = warp_id();
    const int first = first_row(task.heads, plain_rows), last = min(first + plain_rows, head.rows()) - 1;
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
    dim3 blocks = chunk_blocks(task.heads, chunk, plain_rows);
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

// The same of any format.
template <class Format>
__device__ inline float2 read_two(const Format &format, const char *row, int channel) {
    if constexpr (in_family<Format>)
        return two_numbers(format, row, channel);
    else
        return {format.number(row, channel), format.number(row, channel + 1)};
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
            auto read = [&](int, const char *vector, int channel) { return read_two(format, vector, channel); };
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
        if (lane_id() < rows) tokens[lane_id()] = head.position(row(lane_id()));  // read behind the block's barrier
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
    ChunkHead head(task, chunk, blockIdx.x % task.heads.kv);
    int first = first_row(task.heads, chunk_warps * Rows::rows);
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

// Large tiles where nothing is decoded and two blocks of threads fit on a multiprocessor: the block meets, and a thread
// rescales its sums (64 multiplications at D = 128), half as often. Predicted: of a tile of 32 positions that is 90
// instructions beside some 400 cycles of products, so 1.1 x.
template <class Number, int D>
void attend_chunk_tiles(const Device &device, const DeviceAttention &task, const Span &chunk) {
    constexpr int rows = chunk_warps * WarpRows<Number, D, small_tile>::rows;
    dim3 blocks = chunk_blocks(task.heads, chunk, rows);
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
