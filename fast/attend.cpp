// Attention on the CPU: the twin of plain::attention.
//
// A row of the cache is read once for all query heads of its group, and for the tokens of a tile, in the form in which
// it is stored. Positions are cut into splits at multiples of 256, each with a softmax of its own: partial results
// (largest score, sum, weighted values) that are then merged (Milakov and Gimelshein 2018, online softmax; Dao et al.
// 2023, Flash-Decoding), so that threads can share one long sequence.
//
// One order of sums: within a split everything has a lane or a turn that its position alone decides, and partial
// results are merged from the first to the last. So a token's result has the same bits in any batch, in a prompt of
// any chunks, with any number of threads.
//
// Its parts: where the rows of a split are; rows of numbers and codes; groups of 32 codes; one split; who computes
// what.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "attend.h"
#include "fast.h"
#include "simd.h"

namespace fast {

// A split's rows are read as four streams, a fourth of it apart, which the processor's own prefetcher follows.
constexpr int stream_positions = split_positions / 4;
constexpr int near_positions = 16;  // of each stream: what is read twice stays in the L1

// ---- Kinds of rows -----------------------------------------------------------------------------------------
//
// Plain numbers and codes with a row's scale become lanes as they are read, groups of codes are multiplied as whole
// numbers. A precision of no such kind is read number by number.

enum class Kind { plain, scaled, grouped, other };
template <class Number>
constexpr Kind kind_of(const PlainRow<Number> *) {
    return Kind::plain;
}
template <class Code, int largest, int divisor>
constexpr Kind kind_of(const ScaledRow<Code, largest, divisor> *) {
    return Kind::scaled;
}
template <int bits>
constexpr Kind kind_of(const GroupedRow<bits> *) {
    return Kind::grouped;
}
constexpr Kind kind_of(const void *) { return Kind::other; }
template <class Format>
constexpr Kind kind = kind_of((const Format *)nullptr);

// What a row's lanes are loaded from; load() of a code is the code over the format's divisor.
template <class Number>
const Number *numbers_of(const PlainRow<Number> *, const char *row) {
    return (const Number *)row;
}
template <class Code, int largest, int divisor>
const Code *numbers_of(const ScaledRow<Code, largest, divisor> *, const char *row) {
    return ScaledRow<Code, largest, divisor>::codes(row);
}

// ---- Where the rows of a split are -------------------------------------------------------------------------

// Positions [begin, end) of a split whose rows are of one type; those of KV head i are i * head_step bytes further on.
struct Piece {
    int begin, end;
    Choice<Precision> type;
    size_t head_step;
};

// The keys or the values of a split, of the first of some KV heads: row[t] is that of its position t, zeros where
// nothing is read. Pieces follow one another; where there are several, all but the first are of at most 32 positions,
// in one block: the residual block and the pass's own vectors.
struct SplitRows {
    int width = 0, count = 0, end = 0;
    size_t bytes = 0;  // of a position's rows
    Piece pieces[4];
    const char *row[split_positions];
    Floats dequantized;  // (position, head, width), of rows that are read number by number
    std::vector<char> zeros;
};

// A piece of a precision of no known kind, as f32.
template <bool keys, class Format>
void dequantize(SplitRows &rows, Piece &piece, int heads) {
    const size_t width = (size_t)rows.width;
    rows.dequantized.resize(split_positions * heads * width);
    for (int t = piece.begin; t < piece.end; t++) {
        int block = Format::blocks ? t / group_size * group_size : t;
        for (int i = 0; i < heads; i++) {
            auto row_at = [&](int at) { return rows.row[block + at] + i * piece.head_step; };
            float *to = &rows.dequantized[(t * (size_t)heads + i) * width];
            for (int c = 0; c < rows.width; c++) to[c] = stored_number<keys, Format>(row_at, t - block, c, rows.width);
        }
    }
    for (int t = piece.begin; t < piece.end; t++) rows.row[t] = (char *)&rows.dequantized[t * (size_t)heads * width];
    piece.type = Choice<Precision>::of(F32{});
    piece.head_step = width * sizeof(float);
}

// The rows of positions [begin, end) of the split that begins at `origin`. Of a block of keys all are found, as they
// share what it is stored in.
template <bool keys>
void find_rows(SplitRows &rows, const Segments &seen, int kv_heads, int heads, int origin, int begin, int end) {
    const char *start = nullptr;
    rows.count = 0;
    for (int i = 0; i < seen.count; i++) {
        const Side &side = keys ? seen.list[i].keys : seen.list[i].values;
        int first = std::max(begin, seen.list[i].begin), last = std::min(end, seen.list[i].end);
        if (first >= last) continue;
        if (keys && has_blocks(side.type)) first = first / group_size * group_size;
        side.layout.visit([&](auto &layout) {
            for (int t = first, next; t < last; t = next) {
                next = t + std::min(last - t, layout.run(t));
                const char *row = side.start + layout.row(side.sequence, t) * (int64_t)side.stride;
                for (int k = t; k < next; k++, row += side.stride) rows.row[k - origin] = row;
            }
        });
        Piece &before = rows.pieces[std::max(0, rows.count - 1)];
        if (rows.count && side.start == start && before.type == side.type)
            before.end = last - origin;
        else
            rows.pieces[rows.count++] = {first - origin, last - origin, side.type, side.stride / kv_heads};
        start = side.start;
        rows.width = side.width;
        rows.zeros.resize(std::max({rows.zeros.size(), side.stride, heads * side.width * sizeof(float)}));
    }
    for (int i = 0; i < rows.count; i++) {
        rows.pieces[i].type.visit([&](auto format) {
            if constexpr (kind<decltype(format)> == Kind::other)
                dequantize<keys, decltype(format)>(rows, rows.pieces[i], heads);
        });
    }
    int from = rows.count ? rows.pieces[0].begin : 0, to = rows.count ? rows.pieces[rows.count - 1].end : 0;
    rows.end = to, rows.bytes = rows.count ? heads * rows.pieces[0].head_step : 0;
    std::fill(rows.row, rows.row + from, rows.zeros.data());
    std::fill(rows.row + to, rows.row + split_positions, rows.zeros.data());
}

// ---- Rows of numbers and codes -----------------------------------------------------------------------------

// While the keys of a split are computed with, its values are asked for, and meanwhile the next split's keys: `then`,
// at place i of the streams. To GCC a function that only asks has no effect, and its calls would be removed.
__attribute__((always_inline)) inline void prefetch_rows(const SplitRows &then, int i) {
    if (prefetch_distance == 0) return;
    for (int t = i; t < then.end; t += stream_positions)
        for (size_t at = 0; at < then.bytes; at += cache_line) __builtin_prefetch(then.row[t] + at, 0, 2);
}

// Queries and Vecs of channels whose sums stay in registers, of which there are 32 or 16.
constexpr bool wide_machine = HWY_ARCH_ARM || lanes == 16;
constexpr int score_queries = wide_machine ? 6 : 3, value_queries = score_queries, value_vecs = wide_machine ? 4 : 3;

// use(count, t) for what the piece has at place i of the streams: `count` rows from position t on, a stream apart, of
// which it is a constant whether there is one or all four.
template <class Use>
inline void with_tile(const Piece &piece, int i, Use use) {
    int t = i;
    while (t < piece.begin) t += stream_positions;
    if (t + stream_positions < piece.end)
        use(std::integral_constant<int, 4>(), i);
    else if (t < piece.end)
        use(std::integral_constant<int, 1>(), t);
}

// Calls use(format, width) for a piece of numbers or codes; where the width is 64 or 128 it is a constant, so that no
// loop over it is left.
template <class Use>
inline void with_format(const Choice<Precision> &type, int width, Use use) {
    type.visit([&](auto format) {
        if constexpr (kind<decltype(format)> == Kind::plain || kind<decltype(format)> == Kind::scaled) {
            if (width == 64) return use(format, std::integral_constant<int, 64>());
            if (width == 128) return use(format, std::integral_constant<int, 128>());
            use(format, width);
        }
    });
}

// What belongs to near_positions of each stream, from `first` on, times their rows' scales, where rows have any;
// numbers (head, query, split_positions).
template <class Format>
inline void scale_rows(float *numbers, int queries, const SplitRows &rows, const Piece &piece, int heads, int first) {
    if constexpr (kind<Format> == Kind::scaled) {
        for (int i = 0; i < heads * 4; i++) {
            int head = i / 4, t = first + i % 4 * stream_positions;
            if (t + near_positions <= piece.begin || t >= piece.end) continue;
            alignas(cache_line) float scales[near_positions];
            auto scale = [&](int k) { return Format::scale(rows.row[t + k] + head * piece.head_step); };
            for (int k = 0; k < near_positions; k += 4) {
                const f16 four[4] = {scale(k), scale(k + 1), scale(k + 2), scale(k + 3)};
                to_floats(scales + k, four);
            }
            for (int q = 0; q < queries; q++) {
                float *at = numbers + (size_t)(head * queries + q) * split_positions + t;
                multiply(at, at, scales, near_positions);
            }
        }
    }
}

// scores[q * split_positions + r * stream_positions] = row r . query q; queries (Queries, padded width).
template <class Format, int Rows, int Queries, class Width>
inline void score_tile(float *scores, const char *const *row, size_t offset, const char *const *then,
                       const float *queries, Width width) {
    const int stride = padded(width, lanes), whole = width / lanes * lanes;
    Vec sums[Rows * Queries];
    unrolled<Rows * Queries>([&](auto i) { sums[i] = set(0); });
    auto add_products = [&](int c, auto read) {
        Vec query[Queries];
        unrolled<Queries>([&](auto q) { query[q] = load(queries + q * stride + c); });
        unrolled<Rows>([&](auto r) {
            auto *numbers = numbers_of((const Format *)nullptr, row[r * stream_positions] + offset) + c;
            if (prefetch_distance && c * sizeof(*numbers) % cache_line == 0)
                __builtin_prefetch(then[r * stream_positions] + offset + c * sizeof(*numbers), 0, 2);
            Vec key = read(numbers);
            unrolled<Queries>([&](auto q) { sums[q * Rows + r] = fma(key, query[q], sums[q * Rows + r]); });
        });
    };
    for (int c = 0; c < whole; c += lanes) add_products(c, [](auto *numbers) { return load(numbers); });
    if (whole < width) add_products(whole, [&](auto *numbers) { return load_part(numbers, width - whole); });
    unrolled<Queries>([&](auto q) {
        float *to = scores + q * split_positions;
        if constexpr (Rows == 4) {
            float four[4];
            sum4(four, sums[q * 4], sums[q * 4 + 1], sums[q * 4 + 2], sums[q * 4 + 3]);
            for (int r = 0; r < 4; r++) to[r * stream_positions] = four[r];
        } else {
            *to = sum(sums[q]);
        }
    });
}

// The raw scores q . k of a piece, (head, query, split_positions).
template <class Format, class Width>
__attribute__((flatten, noinline)) void score_rows(float *scores, const float *queries, int count,
                                                   const SplitRows &rows, const Piece &piece, int heads,
                                                   const SplitRows &then, Width width) {
    for (int i = 0; i < stream_positions; i++) {
        with_tile(piece, i, [&](auto tile, int t) {
            for (int head = 0; head < heads; head++) {
                in_batches<score_queries, score_queries / 2>(count, [&](auto size, int q) {
                    size_t first = (size_t)head * count + q;
                    score_tile<Format, tile, size>(scores + first * split_positions + t, rows.row + t,
                                                   head * piece.head_step, then.row + t,
                                                   queries + first * padded(width, lanes), width);
                });
            }
        });
        if (i % near_positions == near_positions - 1)
            scale_rows<Format>(scores, count, rows, piece, heads, i + 1 - near_positions);
    }
}

// ---- Many queries: keys of neighbouring positions side by side -----------------------------------------------
//
// A lane is a position then, and no sum has to be folded. The sums are the same: what would be lane i's of score_tile()
// is summed up by itself, and then added in the order in which sum() folds lanes.

constexpr int many_queries = 16, panel_positions = 2 * lanes;

// panel (stride, panel_positions) = the keys of so many positions from `first` on, those of the piece.
template <class Format, class Width>
inline void fill_panel(float *panel, const SplitRows &rows, const Piece &piece, size_t offset, int first, Width width) {
    const hn::Full128<float> four;
    const int stride = padded(width, lanes), whole = width / lanes * lanes;
    thread_local Floats keys;  // (4, stride)
    keys.resize((size_t)4 * stride);
    for (int t = 0; t < panel_positions; t += 4) {
        for (int i = 0; i < 4; i++) {
            int at = first + t + i;
            const char *row = at >= piece.begin && at < piece.end ? rows.row[at] + offset : rows.zeros.data();
            auto *numbers = numbers_of((const Format *)nullptr, row);
            for (int c = 0; c < whole; c += lanes) store(&keys[i * stride + c], load(numbers + c));
            if (whole < width) store(&keys[i * stride + whole], load_part(numbers + whole, width - whole));
        }
        for (int c = 0; c < stride; c += 4) {
            auto key = [&](int i) { return hn::LoadU(four, &keys[i * stride + c]); };
            auto put = [&](int i, auto lower, auto upper) {
                hn::StoreU(hn::InterleaveLower(four, lower, upper), four, panel + (c + i) * panel_positions + t);
                hn::StoreU(hn::InterleaveUpper(four, lower, upper), four, panel + (c + i + 1) * panel_positions + t);
            };
            put(0, hn::InterleaveLower(four, key(0), key(2)), hn::InterleaveLower(four, key(1), key(3)));
            put(2, hn::InterleaveUpper(four, key(0), key(2)), hn::InterleaveUpper(four, key(1), key(3)));
        }
    }
}

// sums (Queries, panel_positions) = the products of the channels i, i + n, i + 2 n, ...
template <int Queries, int n, int i, class Width>
inline void panel_products(Vec (&sums)[2 * Queries], const float *panel, const float *queries, Width width) {
    const int stride = padded(width, lanes);
    if constexpr (n == lanes) {
        unrolled<2 * Queries>([&](auto k) { sums[k] = set(0); });
        for (int c = i; c < stride; c += lanes) {
            Vec first = load(panel + c * panel_positions), second = load(panel + c * panel_positions + lanes);
            unrolled<Queries>([&](auto q) {
                Vec query = set(queries[q * stride + c]);
                sums[2 * q] = fma(first, query, sums[2 * q]);
                sums[2 * q + 1] = fma(second, query, sums[2 * q + 1]);
            });
        }
    } else {
        Vec more[2 * Queries];
        panel_products<Queries, 2 * n, i>(sums, panel, queries, width);
        panel_products<Queries, 2 * n, i + n>(more, panel, queries, width);
        unrolled<2 * Queries>([&](auto k) { sums[k] = add(sums[k], more[k]); });
    }
}

// score_rows() for many queries.
template <class Format, class Width>
__attribute__((flatten, noinline)) void score_panels(float *scores, const float *queries, int count,
                                                     const SplitRows &rows, const Piece &piece, int heads,
                                                     Width width) {
    const int stride = padded(width, lanes);
    thread_local Floats panel;
    panel.resize((size_t)stride * panel_positions);
    for (int head = 0; head < heads; head++) {
        for (int t = piece.begin / panel_positions * panel_positions; t < piece.end; t += panel_positions) {
            fill_panel<Format>(panel.data(), rows, piece, head * piece.head_step, t, width);
            in_batches<2, 2 / 2>(count, [&](auto size, int q) {
                Vec sums[2 * size];
                float result[2 * size * lanes];
                size_t first = (size_t)head * count + q;
                panel_products<size, 1, 0>(sums, panel.data(), queries + first * stride, width);
                unrolled<2 * size>([&](auto k) { store(result + k * lanes, sums[k]); });
                int begin = std::max(t, piece.begin), end = std::min(t + panel_positions, piece.end);
                for (int i = 0; i < size; i++)
                    memcpy(scores + (first + i) * split_positions + begin, result + i * panel_positions + begin - t,
                           (size_t)(end - begin) * sizeof(float));
            });
        }
    }
    for (int i = 0; i < stream_positions; i += near_positions) scale_rows<Format>(scores, count, rows, piece, heads, i);
}

// A row of values whose turn it is, and its position in the split.
struct Turn {
    const char *row;
    int at;
};

// values (Queries, stride) += the rows of `count` turns times their weights (Queries, split_positions), for `Vecs` Vecs
// of channels, or of one Vec `part` channels. Meanwhile `then` is asked for.
template <class Format, int Queries, int Vecs>
inline void accumulate_tile(float *values, size_t stride, const float *weights, const Turn *turns, int count,
                            size_t offset, const SplitRows &then, int channel, int part) {
    Vec sums[Queries * Vecs];
    unrolled<Queries * Vecs>([&](auto i) { sums[i] = load(values + i / Vecs * stride + i % Vecs * lanes); });
    for (int k = 0; k < count; k++) {
        const int at = turns[k].at;
        auto *numbers = numbers_of((const Format *)nullptr, turns[k].row + offset) + channel;
        unrolled<Vecs>([&](auto c) {
            if (prefetch_distance && c * lanes * sizeof(*numbers) % cache_line == 0)
                __builtin_prefetch(then.row[at] + offset + (channel + c * lanes) * sizeof(*numbers), 0, 2);
            Vec row = part ? load_part(numbers, part) : load(numbers + c * lanes);
            unrolled<Queries>([&](auto q) {
                Vec &total = sums[q * Vecs + c];
                total = fma(set(weights[q * split_positions + at]), row, total);
            });
        });
    }
    unrolled<Queries * Vecs>([&](auto i) { store(values + i / Vecs * stride + i % Vecs * lanes, sums[i]); });
}

// values (head, query, stride), `step` numbers from head to head, += the weighted rows of a piece; weights (head,
// query, split_positions). For many queries rows are widened first.
template <class Format, class Width>
__attribute__((flatten, noinline)) void accumulate_rows(float *values, size_t step, size_t stride, float *weights,
                                                        int count, const SplitRows &rows, const Piece &piece, int heads,
                                                        const SplitRows &then, Width width) {
    thread_local Floats wide;  // (turn, stride)
    Turn turns[4 * near_positions], wide_turns[4 * near_positions];
    const int whole = width / lanes * lanes;
    for (int i = 0; i < stream_positions; i += near_positions) {
        int n = 0;
        for (int k = i; k < i + near_positions; k++)
            for (int t = k; t < piece.end; t += stream_positions)
                if (t >= piece.begin) turns[n++] = {rows.row[t], t};
        scale_rows<Format>(weights, count, rows, piece, heads, i);
        for (int head = 0; n && head < heads; head++) {
            auto accumulate = [&](auto format, const Turn *from, size_t offset) {
                in_batches<value_queries, value_queries / 2>(count, [&](auto size, int q) {
                    auto add = [&](auto vecs, int c, int part) {
                        accumulate_tile<decltype(format), size, vecs>(
                            values + head * step + q * stride + c, stride,
                            weights + (size_t)(head * count + q) * split_positions, from, n, offset, then, c, part);
                    };
                    in_batches<value_vecs, value_vecs / 2>(width / lanes,
                                                           [&](auto vecs, int c) { add(vecs, c * lanes, 0); });
                    if (whole < width) add(std::integral_constant<int, 1>(), whole, width - whole);
                });
            };
            if (count < many_queries) {
                accumulate(Format(), turns, head * piece.head_step);
                continue;
            }
            wide.resize(4 * near_positions * stride);
            for (int k = 0; k < n; k++) {
                float *to = &wide[k * stride];
                auto *numbers = numbers_of((const Format *)nullptr, turns[k].row + head * piece.head_step);
                for (int c = 0; c < whole; c += lanes) store(to + c, load(numbers + c));
                if (whole < width) store(to + whole, load_part(numbers + whole, width - whole));
                wide_turns[k] = {(const char *)to, turns[k].at};
            }
            accumulate(PlainRow<float>(), wide_turns, 0);
        }
    }
}

// ---- Groups of 32 codes ------------------------------------------------------------------------------------
//
// Scores of a block of keys and weighted values are the same sum: over groups of 32 codes, each times a factor, for
// each query; a group is a channel at 32 positions, or 32 channels at a position. A sum of factor * (scale * code +
// zero) is one of (factor * scale) * code, and one of factor * zero. The products of factor and scale become whole
// numbers of 16 bits, so that the codes of two groups, side by side, take one instruction for both products, and none
// to become floats; the sum is then exact. What a factor loses by it is 2^-16 of the largest of its sum: some
// thousandth of what its codes of 2 or 4 bits lost before. A sum is a block of keys or a whole split of values, so it
// depends on nothing but the query.

constexpr int group_vecs = group_size / lanes;

// Where groups are: per_row of them in each row, or `n` where that is 0.
template <class G, int per_row>
struct Groups {
    const char *const *row;
    size_t offset;  // in a row
    unsigned n;
    const G &at(unsigned g) const {
        const unsigned in_row = per_row ? per_row : n;
        return ((const G *)(row[g / in_row] + offset))[g % in_row];
    }
    // Groups 2 i and 2 i + 1.
    template <class Use>
    void with_two(unsigned i, Use use) const {
        if constexpr (per_row == 0 || per_row % 2) return use(at(2 * i), at(2 * i + 1));
        const G *first = (const G *)(row[2 * i / std::max(1, per_row)] + offset) + 2 * i % std::max(1, per_row);
        use(first[0], first[1]);
    }
};

// Factor i of query q is about units[q] times whole[q * stride + i], a zero behind the last; zeros[q] is the sum of
// what the zero points add.
struct Factors {
    Aligned<int16_t> whole;  // (query, stride)
    Floats exact;            // the same before they are rounded
    Aligned<ScaleAndZero> pairs;
    int stride = 0;
    float units[value_queries], zeros[value_queries];
    void resize(int count) {
        stride = padded(count, lanes) + lanes;
        whole.resize(std::max(whole.size(), (size_t)value_queries * stride));
        exact.resize(std::max(exact.size(), (size_t)value_queries * stride));
        pairs.resize(std::max(pairs.size(), (size_t)stride));
    }
};

// The factors of `Queries` queries, numbers (query, stride), with the pairs from 0 to `count`.
template <int Queries>
inline void fold_scales(Factors &to, const float *numbers, size_t stride, int count) {
    constexpr float least_factor = 0x1p-110f;                             // so that 1 / unit is finite
    const float most_whole = std::min(32767.0f, 0x1p27f / (float)count);  // so that 32 bits hold the sum
    Vec totals[Queries], most[Queries];
    unrolled<Queries>([&](auto q) { totals[q] = set(0), most[q] = set(least_factor); });
    const ScaleAndZero *pairs = to.pairs.data();
    const int to_stride = to.stride;
    float *exact = to.exact.data();
    for (int i = 0; i < count; i += lanes) {
        Vec scale, zero;
        load_pairs(&pairs[i].scale, scale, zero);
        unrolled<Queries>([&](auto q) {
            Vec number = load(numbers + q * stride + i), factor = mul(number, scale);
            store(exact + q * to_stride + i, factor);
            totals[q] = fma(number, zero, totals[q]);
            most[q] = max(magnitude(factor), most[q]);
        });
    }
    unrolled<Queries>([&](auto q) {
        to.units[q] = largest(most[q]) / most_whole;
        Vec inverse = set(1 / to.units[q]);
        int16_t *whole = &to.whole[q * to_stride];
        for (int i = 0; i < count; i += lanes) store(whole + i, mul(load(exact + q * to_stride + i), inverse));
        whole[count] = 0;
        to.zeros[q] = sum(totals[q]);
    });
}

// to[q * stride + i] = or += units[q] * (sum over groups g of factor g of query q * code i of group g) + zeros[q], for
// the codes of Vecs p and p + group_vecs / 2, which come out of the same bytes. Half of a group's sums or less at a
// time: with 16 registers there is no room for more.
template <int Queries, int p, class Table>
__attribute__((noinline)) void add_codes(Store how, float *to, size_t stride, const Table &groups, int first, int count,
                                         const Factors &by) {
    Ints low[Queries], high[Queries];
    unrolled<Queries>([&](auto q) { low[q] = high[q] = to_ints(set(0)); });
    const int by_stride = by.stride;
    auto add_two = [&](const auto &a, const auto &b, const int16_t *two) {
        Pairs low_codes = load_pairs(&a.codes, &b.codes, p);
        Pairs high_codes = load_pairs(&a.codes, &b.codes, p + group_vecs / 2);
        unrolled<Queries>([&](auto q) {
            Pairs factors = set_pair(two + q * by_stride);
            low[q] = add_products(low[q], factors, low_codes);
            high[q] = add_products(high[q], factors, high_codes);
        });
    };
    const int16_t *whole = by.whole.data();
    const unsigned pairs = (unsigned)count / 2;
    for (unsigned i = (unsigned)first / 2; i < pairs; i++)
        groups.with_two(i, [&](const auto &a, const auto &b) { add_two(a, b, whole + 2 * i); });
    if (count % 2) add_two(groups.at(count - 1), groups.at(count - 1), whole + count - 1);  // and a factor of 0
    unrolled<Queries>([&](auto q) {
        auto put = [&](int vec, Ints sum) {
            float *at = to + q * stride + vec * lanes;
            Vec total = fma(to_floats(sum), set(by.units[q]), set(by.zeros[q]));
            store(at, how == Store::add ? add(load(at), total) : total);
        };
        put(p, low[q]);
        put(p + group_vecs / 2, high[q]);
    });
}

// The same for all codes of groups [first, count), of which the factors are computed from numbers (query,
// numbers_stride).
template <class Table>
inline void add_groups(Store how, float *to, size_t stride, const Table &groups, int first, int count, Factors &by,
                       const float *numbers, size_t numbers_stride, int queries) {
    in_batches<value_queries, value_queries / 2>(queries, [&](auto size, int q) {
        fold_scales<size>(by, numbers + q * numbers_stride, numbers_stride, count);
        unrolled<group_vecs / 2>(
            [&](auto p) { add_codes<size, p>(how, to + q * stride, stride, groups, first, count, by); });
    });
}

// Calls use(groups) for a block of keys: the groups of its channels.
template <class Format, class Use>
inline void with_key_groups(const char *const *row, size_t offset, int width, Use use) {
    using G = typename Format::G;
    unsigned n = (unsigned)Format::groups(width);
    if (n == 2) return use(Groups<G, 2>{row, offset, n});
    if (n == 4) return use(Groups<G, 4>{row, offset, n});
    use(Groups<G, 0>{row, offset, n});
}

// The raw scores of a piece of groups: a group of 32 positions for each channel. Of a block all positions are scored.
template <class Format>
void score_groups(float *scores, const float *queries, int count, const SplitRows &rows, const Piece &piece, int heads,
                  const SplitRows &then) {
    thread_local Factors by;
    const int width = rows.width, stride = padded(width, lanes);
    by.resize(width);
    std::fill(by.pairs.begin() + width, by.pairs.begin() + stride, ScaleAndZero{});
    for (int t = piece.begin; t < piece.end; t += group_size) {
        for (int head = 0; head < heads; head++) {
            for (int i = head; i < group_size / 4; i += heads) prefetch_rows(then, t / 4 + i);
            with_key_groups<Format>(rows.row + t, head * piece.head_step, width, [&](const auto &groups) {
                ScaleAndZero *pairs = by.pairs.data();
                for (unsigned i = 0; i < (unsigned)width / 2; i++)
                    groups.with_two(i, [&](auto &a, auto &b) { pairs[2 * i] = a.both, pairs[2 * i + 1] = b.both; });
                if (width % 2) pairs[width - 1] = groups.at(width - 1).both;
                size_t first = (size_t)head * count;
                add_groups(Store::set, scores + first * split_positions + t, split_positions, groups, 0, width, by,
                           queries + first * stride, stride, count);
            });
        }
    }
}

// values += the weighted rows of a piece of groups: for each 32 channels a group of each position. stride is a multiple
// of 32.
template <class Format>
void accumulate_groups(float *values, size_t step, size_t stride, const float *weights, int count,
                       const SplitRows &rows, const Piece &piece, int heads, const SplitRows &then) {
    thread_local Factors by;
    const int begin = piece.begin / lanes * lanes, end = piece.end;
    by.resize(split_positions);
    std::fill(by.pairs.begin(), by.pairs.begin() + begin, ScaleAndZero{});
    std::fill(by.pairs.begin() + end, by.pairs.begin() + padded(end, lanes), ScaleAndZero{});
    const int passes = heads * Format::groups(rows.width);
    for (int head = 0; head < heads; head++) {
        for (int g = 0; g < Format::groups(rows.width); g++) {
            Groups<typename Format::G, 1> groups{rows.row, head * piece.head_step + g * sizeof(typename Format::G), 1};
            const int pass = head * Format::groups(rows.width) + g, places = stream_positions;
            for (int i = places * pass / passes; i < places * (pass + 1) / passes; i++) prefetch_rows(then, i);
            ScaleAndZero *pairs = by.pairs.data();
            for (int t = begin; t < end; t++) pairs[t] = groups.at(t).both;
            add_groups(Store::add, values + head * step + g * group_size, stride, groups, begin, end, by,
                       weights + (size_t)head * count * split_positions, split_positions, count);
        }
    }
}

// ---- One split ---------------------------------------------------------------------------------------------

// The queries of a tile of tokens that read some KV heads.
struct Tile {
    Span span;
    int first_head, heads, group;
    int queries() const { return span.count * group; }  // of each KV head; query q is that of token q / group
};

// A split's first `count` scores, of which [low, high) are visible, become e^(factor * score - largest), zeros behind
// them. A position's lane is its place in the split.
inline Partial softmax_split(float *scores, int low, int high, int count, float factor) {
    if (low >= high) count = 0;
    std::fill(scores + count, scores + split_positions, 0.0f);
    if (count == 0) return {};
    std::fill(scores, scores + low, -INFINITY);
    std::fill(scores + high, scores + count, -INFINITY);
    Vec most = set(-INFINITY), total = set(0);
    for (int i = 0; i < high; i += lanes) most = max(most, mul(set(factor), load(scores + i)));
    float max_score = largest(most);
    for (int i = 0; i < count; i += lanes) {
        // Rounded as for the maximum: with fma(), scores of 10^10 would leave it by more than e^x can hold.
        Vec weight = exp(add(mul(set(factor), load(scores + i)), set(-max_score)));
        store(scores + i, weight);
        total = add(total, weight);
    }
    return {max_score, sum(total)};
}

// Positions [begin, end) of `seen` for the queries of a tile; all lie in the split that begins at `origin`. Token i
// sees of them those that range(i) gives, from the first to before the second.
template <class Range>
void attend_split(const Partials &to, const Attention &task, const Tile &tile, const Segments &seen, int origin,
                  int begin, int end, Range range) {
    thread_local SplitRows keys, values, next;
    thread_local Floats queries, scores;
    const int count = tile.queries(), all = tile.heads * count, width = task.heads.width;
    const int stride = padded(width, lanes), read = padded(std::max(0, end - origin), group_size);
    for (int i = 0; i < all; i++)
        std::fill_n(to.values + (i / count * to.step + i % count) * to.stride, to.stride, 0.0f);
    if (begin >= end) {
        for (int i = 0; i < all; i++) to.partials[i / count * to.step + i % count] = {};
        return;
    }
    find_rows<true>(keys, seen, task.heads.kv, tile.heads, origin, begin, end);
    find_rows<false>(values, seen, task.heads.kv, tile.heads, origin, begin, end);
    scores.resize(std::max(scores.size(), (size_t)all * split_positions));
    queries.resize(std::max(queries.size(), (size_t)all * stride));
    for (int i = 0; i < all; i++) {
        int head = (tile.first_head + i / count) * tile.group + i % count % tile.group;
        int64_t row = tile.span.row + i % count / tile.group;
        const float *from = task.query + (row * task.heads.query + head) * width;
        std::copy(from, from + width, &queries[(size_t)i * stride]);
        std::fill(&queries[(size_t)i * stride] + width, &queries[(size_t)i * stride] + stride, 0.0f);
    }
    for (int i = 0; i < keys.count; i++) {
        const Piece &piece = keys.pieces[i];
        piece.type.visit([&](auto format) {
            if constexpr (kind<decltype(format)> == Kind::grouped)
                score_groups<decltype(format)>(scores.data(), queries.data(), count, keys, piece, tile.heads, values);
        });
        with_format(piece.type, width, [&](auto format, auto width) {
            if (count >= many_queries)
                return score_panels<decltype(format)>(scores.data(), queries.data(), count, keys, piece, tile.heads,
                                                      width);
            score_rows<decltype(format)>(scores.data(), queries.data(), count, keys, piece, tile.heads, values, width);
        });
    }
    for (int i = 0; i < all; i++) {
        auto [low, high] = range(i % count / tile.group);
        low = std::max(low, origin) - origin, high = std::min(high, end) - origin;
        to.partials[i / count * to.step + i % count] =
            softmax_split(&scores[(size_t)i * split_positions], low, high, read, 1 / std::sqrt((float)width));
    }
    find_rows<true>(next, seen, task.heads.kv, tile.heads, origin + split_positions, end, end + split_positions);
    for (int i = 0; i < values.count; i++) {
        const Piece &piece = values.pieces[i];
        piece.type.visit([&](auto format) {
            if constexpr (kind<decltype(format)> == Kind::grouped)
                accumulate_groups<decltype(format)>(to.values, to.step * to.stride, to.stride, scores.data(), count,
                                                    values, piece, tile.heads, next);
        });
        with_format(piece.type, values.width, [&](auto format, auto width) {
            accumulate_rows<decltype(format)>(to.values, to.step * to.stride, to.stride, scores.data(), count, values,
                                              piece, tile.heads, next, width);
        });
    }
}

// ---- Who computes what -------------------------------------------------------------------------------------

constexpr int tile_queries = 96;         // of a KV head: their scores stay in the L2
constexpr int together_queries = 32;     // of all KV heads: with more, each KV head is read by itself
constexpr size_t most_shared = 1 << 22;  // floats of partial results, 16 MiB, however long the context is

// Tiles lie in one block of 32 positions where a precision has blocks.
void plan_attention(AttentionPlan &plan, const Pass &pass, const CacheView &cache, int threads) {
    plan.tiles.clear();
    plan.parts.clear();
    plan.most_queries = plan.most_parts = 0;
    const bool cached = cache.keys.data;
    const Heads heads = plan.heads = pass.heads;
    plan.widest = visible_of(cache.layout, 0);
    plan.stride = padded(cache.values.width ? cache.values.width : heads.width, group_size);
    const int most = std::max(1, tile_queries / heads.group());
    const bool blocks = cached && (has_blocks(cache.type_k) || has_blocks(cache.type_v));
    for (int row = 0; row < pass.count; row++) {
        const Span &span = pass.spans[row];
        Span *tile = plan.tiles.empty() || span.position == span.first ? nullptr : &plan.tiles.back();
        if (tile && tile->count < most && !(blocks && span.position % group_size == 0))
            tile->count++;
        else
            plan.tiles.push_back(span);
        plan.most_queries = std::max(plan.most_queries, plan.tiles.back().count * heads.group());
        plan.most_parts = std::max(plan.most_parts, plan.parts_of(plan.tiles.back()));
    }
    plan.heads_together = plan.most_queries * heads.kv <= together_queries ? heads.kv : 1;
    size_t room = plan.tiles.size() * heads.kv * plan.most_parts * plan.most_queries;
    plan.share_splits = (int)plan.tiles.size() * plan.sets() < 4 * threads && room * plan.stride <= most_shared;
    if (plan.share_splits) {
        plan.partials.resize(std::max(plan.partials.size(), room));
        plan.values.resize(std::max(plan.values.size(), room * plan.stride));
        for (int tile = 0; tile < (int)plan.tiles.size(); tile++)
            for (int set = 0; set < plan.sets(); set++)
                for (int part = 0; part < plan.parts_of(plan.tiles[tile]); part++)
                    plan.parts.push_back({tile, set, part});
    }
    const int half = heads.width / 2;
    plan.sink_cos_sin.resize((size_t)pass.count * plan.widest.sinks * heads.width);
    for (int64_t item = 0; item < (int64_t)pass.count * plan.widest.sinks; item++) {
        int position = pass.spans[item / plan.widest.sinks].position, shift = plan.widest.shift(position);
        if (!plan.widest.dropped(position)) continue;
        float *cos_sin = &plan.sink_cos_sin[item * heads.width];
        for (int c = 0; c < half; c++) {
            float angle = rope_angle(shift + (cached ? (int)(item % plan.widest.sinks) : 0), pass.frequencies[c]);
            cos_sin[c] = std::cos(angle), cos_sin[c + half] = std::sin(angle);
        }
    }
}

// Some of the sinks, for those tokens of a tile between which and the sinks positions were dropped: each token sees
// their keys rotated to another place.
inline void attend_sinks(const Partials &to, const Attention &task, const AttentionPlan &plan, const Tile &tile,
                         int origin) {
    thread_local Floats rotated;  // (sink, kv_head, D)
    const int sinks = task.visible.sinks, width = task.heads.width, half = width / 2;
    const int end = std::min(sinks, origin + split_positions);
    rotated.resize((size_t)sinks * task.heads.kv * width);
    for (int token = 0; token < tile.span.count; token++) {
        Tile one = {
            {tile.span.row + token, 1, tile.span.sequence, tile.span.position + token, tile.span.first, tile.span.end},
            tile.first_head,
            tile.heads,
            tile.group};
        Segments seen;
        add_sinks(seen, {task.cache, task.layer, tile.first_head, task.keys, task.values}, one.span, task.visible);
        Side &keys = seen.list[0].keys;
        for (int i = origin; seen.count && i < end * tile.heads; i++) {
            const int sink = i / tile.heads, head = i % tile.heads;
            const float *key = (const float *)(keys.row(sink) + head * keys.stride / task.heads.kv);
            const float *cos_sin = &plan.sink_cos_sin[((size_t)one.span.row * plan.widest.sinks + sink) * width];
            float *moved = &rotated[((size_t)sink * task.heads.kv + head) * width];
            for (int c = 0; c < half; c++) {
                float a = key[c], b = key[c + half], cosine = cos_sin[c], sine = cos_sin[c + half];
                moved[c] = a * cosine - b * sine;
                moved[c + half] = b * cosine + a * sine;
            }
        }
        if (seen.count) {
            keys.start = (const char *)rotated.data(), keys.stride = task.heads.kv * width * sizeof(float);
            keys.layout = Choice<Layout>::of(Contiguous{sinks}), keys.sequence = 0;
        }
        attend_split(to.from((size_t)token * tile.group), task, one, seen, origin, origin, seen.count ? end : origin,
                     [&](int) { return std::pair<int, int>(origin, end); });
    }
}

// One part of a tile, for some KV heads.
inline void attend_part(const Partials &to, const Attention &task, const AttentionPlan &plan, const Tile &tile,
                        int part) {
    if (part < plan.sink_parts()) return attend_sinks(to, task, plan, tile, part * split_positions);
    const Span &span = tile.span;
    int origin = (plan.first_split(span) + part - plan.sink_parts()) * split_positions;
    int end = std::min(origin + split_positions, span.position + span.count);
    int begin = std::max(origin, task.visible.first(span.position));  // a layer may see less than others
    Segments seen;
    add_rows(seen, {task.cache, task.layer, tile.first_head, task.keys, task.values}, span, task.visible);
    attend_split(to, task, tile, seen, origin, begin, end, [&](int token) {
        int position = span.position + token;
        return std::pair<int, int>(task.visible.first(position), position + 1);
    });
}

// Divides the finished sums of a tile's queries that read one KV head into task.out.
inline void finish(const Attention &task, const Span &tile, int kv_head, const Partials &from) {
    const int group = task.heads.group(), width = task.values.width;
    for (int q = 0; q < tile.count * group; q++) {
        int64_t row = tile.row + q / group;
        float *out = task.out + (row * task.heads.query + kv_head * group + q % group) * width;
        for (int c = 0; c < width; c++) out[c] = from.values[q * from.stride + c] / from.partials[q].sum;
    }
}

// All parts of a tile and some KV heads by one thread.
inline void attend_tile(const Attention &task, const AttentionPlan &plan, const Tile &tile) {
    thread_local std::vector<Partial> partials;
    thread_local Floats values;
    const size_t count = tile.queries(), all = tile.heads * count, stride = plan.stride;
    partials.assign(2 * all, {});
    values.resize(std::max(values.size(), 2 * all * stride));
    Partials total = {partials.data(), values.data(), count, stride}, one = total.from(all);
    for (int part = 0; part < plan.parts_of(tile.span); part++) {
        attend_part(one, task, plan, tile, part);
        for (size_t i = 0; i < all; i++)
            merge(total.partials[i], total.values + i * stride, one.partials[i], one.values + i * stride, (int)stride);
    }
    for (int i = 0; i < tile.heads; i++) finish(task, tile.span, tile.first_head + i, total.from(i * count));
}

void plan(Cpu &m, const Pass &pass, const CacheView &cache) {
    if (!m.plan) m.plan = std::make_shared<AttentionPlan>();  // its memory is used again
    plan_attention(*(AttentionPlan *)m.plan.get(), pass, cache, m.threads);
}

void attention(Cpu &m, const Attention &task, const Pass &) {
    AttentionPlan &plan = *(AttentionPlan *)m.plan.get();
    auto tile_of = [&](int tile, int set) {
        int first = set * plan.heads_together;
        return Tile{plan.tiles[tile], first, std::min(plan.heads_together, task.heads.kv - first), task.heads.group()};
    };
    const int64_t tiles = (int64_t)plan.tiles.size(), sets = plan.sets();
    if (!plan.share_splits) {
        m.for_each_in_turn(tiles * sets, [&](int64_t item, Alone) {
            item = tiles * sets - 1 - item;  // a prompt's longest first
            attend_tile(task, plan, tile_of((int)(item / sets), (int)(item % sets)));
        });
        return;
    }
    m.for_each((int64_t)plan.parts.size(), [&](int64_t item, Alone) {
        const AttentionPlan::Part &part = plan.parts[item];
        Tile tile = tile_of(part.tile, part.set);
        attend_part(plan.at(part.tile, tile.first_head, part.part), task, plan, tile, part.part);
    });
    m.for_each(tiles * task.heads.kv, [&](int64_t item, Alone) {
        int tile = (int)(item / task.heads.kv), kv_head = (int)(item % task.heads.kv);
        const Span &span = plan.tiles[tile];
        Partials total = plan.at(tile, kv_head, 0);
        for (int part = 1; part < plan.parts_of(span); part++) {
            Partials one = plan.at(tile, kv_head, part);
            for (int q = 0; q < span.count * task.heads.group(); q++)
                merge(total.partials[q], total.values + q * total.stride, one.partials[q], one.values + q * one.stride,
                      plan.stride);
        }
        finish(task, span, kv_head, total);
    });
}

}  // namespace fast
