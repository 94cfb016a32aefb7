// Attention on the CPU: the twin of plain::attention.
//
// A row of the cache is read once for all query heads of its KV head, and for the tokens of a tile, in the form in
// which it is stored. Positions are cut into splits at multiples of 256, each with a softmax of its own: partial
// results (largest score, sum, weighted values) that are then merged (Milakov and Gimelshein 2018, online softmax; Dao
// et al. 2023, Flash-Decoding), so that threads can share one long sequence.
//
// One order of sums: within a split everything has a lane or a turn that its position alone decides, and partial
// results are merged from the first to the last. So a token's result has the same bits in any batch, in a prompt of
// any chunks, with any number of threads.
//
// Its parts: where the rows of a split are; rows of numbers; groups of 32 codes; one split; who computes what.
#include "attend.h"

#include <cstring>
#include <memory>
#include <type_traits>

#include "fast.h"
#include "panels.h"

namespace fast {

// ---- Where the rows of a split are -------------------------------------------------------------------------

// A split's rows are read as four streams, a fourth of it apart, which the processor's own prefetcher follows.
constexpr int stream_positions = split_positions / 4;

// Positions [begin, end) of a split whose rows are of one type; those of KV head i are i * head_step bytes further on.
struct Piece {
    int begin, end;
    Choice<Precision> type;
    size_t head_step;
};

// The keys or the values of a split, of the first of some KV heads: row[t] is that of its position t. Pieces follow one
// another; where there are several, all but the first are of at most 32 positions, in one block: the residual block and
// the pass's own vectors. Beyond them it is any row: what is asked for is not always read.
struct SplitRows {
    int width = 0, count = 0, begin = 0, end = 0;
    size_t bytes = 0;  // of a position's rows
    Piece pieces[4];
    const char *row[split_positions];
};

// The rows of positions [begin, end) of the split that begins at `origin`. Of a block of keys all are found, as they
// share what it is stored in.
template <bool keys>
void find_rows(SplitRows &rows, const Segments &seen, int kv_heads, int heads, int origin, int begin, int end) {
    const char *start = nullptr;
    rows.count = rows.begin = rows.end = 0;
    for (int i = 0; i < seen.count; i++) {
        const Source &from = keys ? seen.list[i].keys : seen.list[i].values;
        int first = std::max(begin, seen.list[i].begin), last = std::min(end, seen.list[i].end);
        if (first >= last) continue;
        if (keys && has_blocks(from.type)) first = first / group_size * group_size;
        from.layout.visit([&](auto &layout) {
            for (int t = first, next; t < last; t = next) {
                next = t + std::max(1, std::min(last - t, layout.run(t)));  // it ends, whatever run() says
                const char *row = from.start + layout.row(from.sequence, t) * (int64_t)from.stride;
                for (int k = t; k < next; k++, row += from.stride) rows.row[k - origin] = row;
            }
        });
        Piece &before = rows.pieces[std::max(0, rows.count - 1)];
        if (rows.count && from.start == start && before.type == from.type)
            before.end = last - origin;
        else
            rows.pieces[rows.count++] = {first - origin, last - origin, from.type, from.stride / kv_heads};
        start = from.start;
        rows.width = from.width, rows.bytes = heads * rows.pieces[0].head_step;
        rows.begin = rows.pieces[0].begin, rows.end = last - origin;
    }
    const char *const any = rows.count ? rows.row[rows.begin] : nullptr;
    std::fill(rows.row, rows.row + rows.begin, any);
    std::fill(rows.row + rows.end, rows.row + split_positions, any);
}

// While the keys of a split are computed with, its values are asked for, and meanwhile the next split's keys: `then`,
// at place i of the streams. To GCC a function that only asks has no effect, and its calls would be removed.
__attribute__((always_inline)) inline void prefetch_rows(const SplitRows &then, int i) {
    if (prefetch_distance == 0) return;
    for (int t = i; t < then.end; t += stream_positions)
        for (size_t at = 0; at < then.bytes; at += cache_line) __builtin_prefetch(then.row[t] + at, 0, 2);
}

// ---- Rows of numbers ---------------------------------------------------------------------------------------
//
// A few of each stream at a time, which the L1 holds. They become lanes as they are read; only rows that do not fill
// Vecs are widened to float32 first.

constexpr int near_positions = 16, near_rows = 4 * near_positions;

// Queries and Vecs of channels whose sums stay in registers, of which there are 32 or 16.
constexpr int score_queries = many_registers ? 6 : 3, value_queries = score_queries, value_vecs = 4;
constexpr int value_rows = 8;  // whose values are added up for one KV head before the next one's

// The order in which a split's positions are read, and their values added up: of each stream the next one, in turn.
struct Turns {
    int at[split_positions] = {};
    constexpr Turns() {
        for (int i = 0; i < split_positions; i++) at[i] = i / 4 + i % 4 * stream_positions;
    }
};
constexpr Turns turns;

// Some rows in that order: those at the split's positions at[0 .. count).
struct Rows {
    const int *at;  // up to a multiple of four, which count as one
    int count;
    const char *const *row, *const *then;  // of a position: its numbers, and what is asked for while they are read
    size_t offset, head_step;              // to those of the first KV head, and from one head's to the next one's
    // `most` of them at most, of a KV head.
    Rows part(int first, int most, int head) const {
        return {at + first, std::min(most, count - first), row, then, offset + head * head_step, head_step};
    }
    // Those in [begin, end), listed in `some`.
    Rows within(int begin, int end, int *some) const {
        int n = 0;
        for (int i = 0; i < count; i++)
            if (at[i] >= begin && at[i] < end) some[n++] = at[i];
        for (int i = n; i % 4; i++) some[i] = some[n - 1];
        return {some, n, row, then, offset, head_step};
    }
};

// scores[q * split_positions + at] = row . query q, for four rows; queries (Queries, stride).
template <class Number, int Queries, class Stride>
inline void score_tile(float *scores, const Rows &rows, const float *queries, Stride stride) {
    Vec sums[Queries * 4];
    const Number *start[4];
    const char *then[4];
    unrolled<4>([&](auto r) {
        start[r] = (const Number *)(rows.row[rows.at[r]] + rows.offset);
        then[r] = rows.then[rows.at[r]] + rows.offset;
    });
    unrolled<Queries * 4>([&](auto i) { sums[i] = set(0); });
    for (int c = 0; c < stride; c += lanes) {
        Vec query[Queries];
        unrolled<Queries>([&](auto q) { query[q] = load(queries + q * stride + c); });
        unrolled<4>([&](auto r) {
            if (prefetch_distance && c * sizeof(Number) % cache_line == 0)
                __builtin_prefetch(then[r] + c * sizeof(Number), 0, 2);
            Vec key = load(start[r] + c);
            unrolled<Queries>([&](auto q) { sums[q * 4 + r] = fma(key, query[q], sums[q * 4 + r]); });
        });
    }
    unrolled<Queries>([&](auto q) {
        float four[4];
        sum4(four, sums[q * 4], sums[q * 4 + 1], sums[q * 4 + 2], sums[q * 4 + 3]);
        for (int r = 0; r < 4; r++) scores[q * split_positions + rows.at[r]] = four[r];
    });
}

// The raw scores q . k of some rows, (head, query, split_positions), still without the rows' scales. Heads lie side by
// side in memory, so a position's are read together.
template <class Number, class Stride>
__attribute__((flatten, noinline)) void score_rows(float *scores, const float *queries, int heads, int count,
                                                   Stride stride, const Rows &rows) {
    for (int first = 0; first < rows.count; first += 4)
        for (int head = 0; head < heads; head++)
            in_batches<score_queries, score_queries / 2>(count, [&](auto size, int q) {
                const size_t query = (size_t)head * count + q;
                score_tile<Number, size>(scores + query * split_positions, rows.part(first, 4, head),
                                         queries + query * stride, stride);
            });
}

// values (Queries, stride) += the rows times their weights (Queries, split_positions), for `Vecs` Vecs of channels.
template <class Number, int Queries, int Vecs>
inline void accumulate_tile(float *values, size_t stride, const float *weights, const Rows &rows, int channel) {
    Vec sums[Queries * Vecs];
    unrolled<Queries * Vecs>([&](auto i) { sums[i] = load(values + i / Vecs * stride + i % Vecs * lanes); });
    for (int i = 0; i < rows.count; i++) {
        const int t = rows.at[i];
        const Number *numbers = (const Number *)(rows.row[t] + rows.offset) + channel;
        const char *then = rows.then[t] + rows.offset;
        unrolled<Vecs>([&](auto c) {
            if (prefetch_distance && c * lanes * sizeof(Number) % cache_line == 0)
                __builtin_prefetch(then + (channel + c * lanes) * sizeof(Number), 0, 2);
            Vec lane = load(numbers + c * lanes);
            unrolled<Queries>([&](auto q) {
                sums[q * Vecs + c] = fma(set(weights[q * split_positions + t]), lane, sums[q * Vecs + c]);
            });
        });
    }
    unrolled<Queries * Vecs>([&](auto i) { store(values + i / Vecs * stride + i % Vecs * lanes, sums[i]); });
}

// values (head, query, stride), `step` numbers from head to head, += the rows times their weights (head, query,
// split_positions), `weights_step` from head to head: those of a few positions for all heads.
template <class Number>
__attribute__((flatten, noinline)) void accumulate_rows(float *values, size_t step, size_t stride, const float *weights,
                                                        size_t weights_step, int heads, int count, const Rows &rows,
                                                        int width) {
    const int each = heads > 1 ? value_rows : near_rows;
    for (int first = 0; first < rows.count; first += each)
        for (int head = 0; head < heads; head++)
            in_batches<value_queries, value_queries / 2>(count, [&](auto size, int q) {
                in_batches<value_vecs, value_vecs / 2>(padded(width, lanes) / lanes, [&](auto vecs, int vec) {
                    accumulate_tile<Number, size, vecs>(values + head * step + q * stride + vec * lanes, stride,
                                                        weights + head * weights_step + q * split_positions,
                                                        rows.part(first, each, head), vec * lanes);
                });
            });
}

// How a format's rows become lanes: of which numbers, and whether behind a scale that remains to be multiplied by.
// load() of a code is the code over the format's divisor. A precision of another kind is read number by number.
template <class Type, bool is_scaled>
struct Stored {
    using Number = Type;
    static constexpr bool scaled = is_scaled;
};
template <class Number>
Stored<Number, false> stored_as(const PlainRow<Number> *);
template <class Code, int largest, int divisor>
Stored<Code, true> stored_as(const ScaledRow<Code, largest, divisor> *);
Stored<void, false> stored_as(const void *);

template <int bits>
constexpr bool grouped(const GroupedRow<bits> *) {
    return true;
}
constexpr bool grouped(const void *) { return false; }

// to (padded width) = the row of position t, whose numbers are `offset` bytes on, zeros behind them.
template <bool keys, class Format>
inline void widen_row(float *to, const SplitRows &all, int t, size_t offset) {
    using Number = typename decltype(stored_as((const Format *)nullptr))::Number;
    const int width = all.width;
    int c = 0;
    if constexpr (std::is_void_v<Number>) {
        auto row_at = [&](int k) { return all.row[k] + offset; };  // a split begins with a block
        for (; c < width; c++) to[c] = stored_number<keys, Format>(row_at, t, c, width);
        std::fill(to + width, to + padded(width, lanes), 0.0f);
    } else {
        auto *numbers = (const Number *)(all.row[t] + offset);
        for (; c + lanes <= width; c += lanes) store(to + c, load(numbers + c));
        if (c < width) store(to + c, load_part(numbers + c, width - c));
    }
}

// The rows of a piece at places [first, first + near_positions) of the streams.
struct NearRows {
    Rows rows;
    int first, begin, end;                  // of the places, and of the piece
    Floats wide;                            // (stream, near_positions, padded width)
    const char *wide_row[split_positions];  // where they are there
    int some[near_rows];

    int position(int i) const { return i / near_positions * stream_positions + first + i % near_positions; }
    void find(const SplitRows &all, const Piece &piece, int place, const SplitRows &then) {
        first = place, begin = piece.begin, end = piece.end;
        rows = {turns.at + 4 * first, near_rows, all.row, then.row, 0, piece.head_step};
        if (begin > first || end <= position(near_rows - 1)) rows = rows.within(begin, end, some);
    }
    // Calls use(rows, Number(), head, heads) for those of `heads` KV heads from `head` on, with the type of their
    // numbers; offset: to the numbers of a row.
    template <bool keys, class Format, class Use>
    void of_heads(const SplitRows &all, int heads, Use use) {
        using As = decltype(stored_as((const Format *)nullptr));
        rows.offset = As::scaled ? sizeof(f16) : 0;
        if constexpr (!std::is_void_v<typename As::Number>)
            if (all.width % lanes == 0) return use(rows, typename As::Number(), 0, heads);
        for (int head = 0; head < heads; head++) {
            widen_rows<keys, Format>(all, rows.part(0, near_rows, head));
            use(Rows{rows.at, rows.count, wide_row, wide_row, 0, 0}, float(), head, 1);
        }
    }
    template <bool keys, class Format>
    void widen_rows(const SplitRows &all, const Rows &from) {
        const int stride = padded(all.width, lanes);
        wide.resize(near_rows * (size_t)stride);
        for (int i = 0; i < from.count; i++) {
            const int t = from.at[i], place = t / stream_positions * near_positions + t % stream_positions - first;
            wide_row[t] = (const char *)&wide[place * (size_t)stride];
            widen_row<keys, Format>(&wide[place * (size_t)stride], all, t, from.offset);
        }
    }
    // numbers (query, split_positions) times the scales of a KV head's rows, where they have some.
    template <class Format>
    void scale(float *numbers, int head, int queries) const {
        if constexpr (decltype(stored_as((const Format *)nullptr))::scaled) {
            f16 scales[near_rows];
            auto scale_of = [&](int t) { return scale_of_row(rows.row[t] + head * rows.head_step); };
            if (rows.count == near_rows) {
                for (int s = 0; s < 4; s++)
                    for (int i = 0; i < near_positions; i++)
                        scales[s * near_positions + i] = scale_of(s * stream_positions + first + i);
            } else {
                for (int i = 0; i < near_rows; i++) {
                    const int t = position(i);
                    scales[i] = t >= begin && t < end ? scale_of(t) : f16{0x3c00};  // 1 for rows of another piece
                }
            }
            for (int i = 0; i < near_rows; i += lanes) {
                const Vec by = load(scales + i);
                for (int q = 0; q < queries; q++) {
                    float *at = numbers + q * split_positions + position(i);
                    store(at, mul(load(at), by));
                }
            }
        }
    }
};

// ---- Many queries: keys of neighbouring positions side by side -----------------------------------------------

constexpr int many_queries = 32;  // of one KV head; for fewer, to turn the keys takes longer than it saves

// score_rows() of a piece of one KV head, times the rows' scales: a lane is a position (panels.h). Rows of numbers that
// lie evenly are turned where they are, all others are widened first.
template <class Format>
void score_panels(float *scores, const Tiles &queries, const SplitRows &rows, const Piece &piece,
                  const SplitRows &then) {
    using As = decltype(stored_as((const Format *)nullptr));
    constexpr bool widen = As::scaled || std::is_void_v<typename As::Number>;
    using Number = std::conditional_t<widen, float, typename As::Number>;
    const int stride = padded(rows.width, lanes), apart = (queries.steps + 1) * panel_rows;
    thread_local Floats numbers, wide;
    numbers.resize(apart * lanes), wide.resize(panel_rows * stride);
    const Turned panel = {numbers.data(), apart, panel_rows};
    for (int first = piece.begin; first < piece.end; first += panel_rows) {
        const int count = std::min(panel_rows, piece.end - first);
        const char *const *row = rows.row + first;
        // Of one KV head alone rows are parts of what follows one another, which no processor's own prefetcher sees.
        for (int t = first; t < first + count; t++)
            for (size_t at = 0; at < then.bytes; at += cache_line) {
                __builtin_prefetch(then.row[t] + at, 0, 2);
                if (t + panel_rows < piece.end) __builtin_prefetch(rows.row[t + panel_rows] + at, 0, 2);
            }
        const int64_t step = count > 1 ? row[1] - row[0] : 0;
        bool even = !widen && step % (int)sizeof(Number) == 0;
        for (int r = 1; even && r < count; r++) even = row[r] == row[0] + r * step;
        for (int r = 0; !even && r < count; r++)
            widen_row<true, Format>(&wide[r * stride], rows, first + r, As::scaled ? sizeof(f16) : 0);
        for (int r = 0; r < count; r += lanes) {
            const int some = std::min(lanes, count - r), numbers_apart = (int)(step / (int)sizeof(Number));
            even ? turn(panel, r, (const Number *)row[r], numbers_apart, some, rows.width)
                 : turn(panel, r, &wide[r * stride], stride, some, stride);
        }
        f16 scales[panel_rows];
        for (int r = 0; As::scaled && r < panel_rows; r++) scales[r] = scale_of_row(row[std::min(r, count - 1)]);
        for (int tile = 0; tile < queries.tiles; tile++) {
            const int begin = queries.first(tile);
            in_batches<tile_vectors>(queries.first(tile + 1) - begin, [&](auto size, int) {
                alignas(cache_line) float sums[size * panel_rows];
                auto multiply = [&](auto steps) {  // a constant where it is the usual one
                    panel_tile<float, size>(sums, panel, queries.at(tile), steps, row[0], /*ahead_bytes=*/0);
                };
                constexpr std::integral_constant<int, 64 / lanes> usual;
                queries.channels == 64 ? multiply(usual) : multiply(queries.steps);
                for (int i = 0; As::scaled && i < size * panel_rows; i += lanes)
                    store(sums + i, mul(load(sums + i), load(scales + i % panel_rows)));
                for (int q = 0; q < size; q++) {
                    float *from = sums + q * panel_rows, *to = scores + (begin + q) * split_positions + first;
                    count == panel_rows ? std::copy_n(from, panel_rows, to) : std::copy_n(from, count, to);
                }
            });
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

// Groups [first, count) of a sum, group i `offset` bytes behind start[i]; and their factors: that of group i and query
// q is about units[q] times whole[q * stride + i]. zeros[q] is the sum of what the zero points add.
template <class G>
struct Groups {
    const char *const *start;
    size_t offset;
    int first, count, stride;
    Aligned<ScaleAndZero> pairs;
    Aligned<int16_t> whole;  // (query, stride)
    Floats exact;            // the same before they are rounded
    float units[value_queries], zeros[value_queries];

    const G &at(int i) const { return *(const G *)(start[i] + offset); }
    void find(const char *const *from, size_t bytes, int begin, int end) {
        start = from, offset = bytes, first = begin, count = end, stride = padded(count, lanes) + lanes;
        pairs.resize(stride), whole.resize(value_queries * (size_t)stride);
        exact.resize(value_queries * (size_t)stride);
        ScaleAndZero *pair = pairs.data();
        std::fill(pair, pair + begin, ScaleAndZero{});
        for (int i = begin; i < end; i++) pair[i] = at(i).both;
        std::fill(pair + end, pair + stride, ScaleAndZero{});
    }

    // The factors of `Queries` queries, numbers (query, numbers_stride).
    template <int Queries>
    void fold_scales(const float *numbers, size_t numbers_stride) {
        constexpr float least_factor = 0x1p-110f;                             // so that 1 / unit is finite
        const float most_whole = std::min(32767.0f, 0x1p27f / (float)count);  // so that 32 bits hold the sum
        Vec totals[Queries], most[Queries];
        unrolled<Queries>([&](auto q) { totals[q] = set(0), most[q] = set(least_factor); });
        const ScaleAndZero *pair = pairs.data();
        const int end = count, by_stride = stride;  // where the compiler need not fear that a store changes them
        float *factors = exact.data();
        for (int i = 0; i < end; i += lanes) {
            Vec scale, zero;
            load_pairs(&pair[i].scale, scale, zero);
            unrolled<Queries>([&](auto q) {
                Vec number = load(numbers + q * numbers_stride + i), factor = mul(number, scale);
                store(factors + q * by_stride + i, factor);
                totals[q] = fma(number, zero, totals[q]);
                most[q] = max(magnitude(factor), most[q]);
            });
        }
        unrolled<Queries>([&](auto q) {
            units[q] = largest(most[q]) / most_whole;
            Vec inverse = set(1 / units[q]);
            int16_t *to = &whole[q * stride];
            for (int i = 0; i < end; i += lanes) store(to + i, mul(load(factors + q * by_stride + i), inverse));
            to[end] = 0;
            zeros[q] = sum(totals[q]);
        });
    }

    // to[q * to_stride + i] = or += units[q] * (sum over groups g of factor g of query q * code i of group g) +
    // zeros[q], for the codes of Vecs p and p + group_vecs / 2, which come out of the same bytes. Half of a group's
    // sums or less at a time: with 16 registers there is no room for more.
    template <int Queries, int p>
    __attribute__((noinline)) void add_codes(Into how, float *to, size_t to_stride) const {
        Ints low[Queries], high[Queries];
        unrolled<Queries>([&](auto q) { low[q] = high[q] = to_ints(set(0)); });
        const int16_t *factor = whole.data();
        const int by_stride = stride, end = count;
        for (int i = first / 2 * 2; i < end; i += 2) {  // beyond them there are rows too, and factors of 0
            const auto &a = at(i).codes, &b = at(i + 1).codes;
            Pairs low_codes = load_pairs(&a, &b, p), high_codes = load_pairs(&a, &b, p + group_vecs / 2);
            unrolled<Queries>([&](auto q) {
                Pairs factors = set_pair(factor + q * by_stride + i);
                low[q] = add_products(low[q], factors, low_codes);
                high[q] = add_products(high[q], factors, high_codes);
            });
        }
        unrolled<Queries>([&](auto q) {
            auto put = [&](int vec, Ints sum) {
                float *at = to + q * to_stride + vec * lanes;
                Vec total = fma(to_floats(sum), set(units[q]), set(zeros[q]));
                store(at, how == Into::add ? add(load(at), total) : total);
            };
            put(p, low[q]);
            put(p + group_vecs / 2, high[q]);
        });
    }

    // The same for all codes.
    void add_to(float *to, size_t to_stride, Into how, const float *numbers, size_t numbers_stride, int queries) {
        in_batches<value_queries, value_queries / 2>(queries, [&](auto size, int q) {
            fold_scales<size>(numbers + q * numbers_stride, numbers_stride);
            unrolled<group_vecs / 2>([&](auto p) { add_codes<size, p>(how, to + q * to_stride, to_stride); });
        });
    }
};

// Calls use_piece(format, piece) for each piece; where it returns false, use_rows(format, near, rows, Number(), piece,
// head, heads) for its rows.
template <bool keys, class UsePiece, class UseRows>
void for_each_piece(const SplitRows &rows, int heads, const SplitRows &then, UsePiece use_piece, UseRows use_rows) {
    thread_local NearRows near;
    for (int i = 0; i < rows.count; i++) {
        const Piece &piece = rows.pieces[i];
        piece.type.visit([&](auto format) {
            using Format = decltype(format);
            if (use_piece(format, piece)) return;
            if constexpr (!grouped((Format *)nullptr)) {
                for (int first = 0; first < stream_positions; first += near_positions) {
                    near.find(rows, piece, first, then);
                    if (near.rows.count == 0) continue;
                    near.of_heads<keys, Format>(rows, heads, [&](const Rows &some, auto number, int head, int heads) {
                        use_rows(format, near, some, number, piece, head, heads);
                    });
                }
            }
        });
    }
}

// The raw scores of a piece of groups: a group of 32 positions for each channel. Of a block all positions are scored.
template <class Format>
void score_groups(float *scores, const float *queries, int count, const SplitRows &rows, const Piece &piece, int heads,
                  const SplitRows &then) {
    thread_local Groups<typename Format::G> groups;
    thread_local std::vector<const char *> channel;  // where its group is, of the first KV head
    const int width = rows.width, stride = padded(width, lanes), n = Format::groups(width);
    channel.resize(width + 1);
    for (int t = piece.begin; t < piece.end; t += group_size) {
        for (int c = 0; c < width; c++) channel[c] = rows.row[t + c / n] + c % n * sizeof(typename Format::G);
        channel[width] = channel[width - 1];
        for (int head = 0; head < heads; head++) {
            for (int i = head; i < group_size / 4; i += heads) prefetch_rows(then, t / 4 + i);
            groups.find(channel.data(), head * piece.head_step, 0, width);
            groups.add_to(scores + (size_t)head * count * split_positions + t, split_positions, Into::set,
                          queries + (size_t)head * count * stride, stride, count);
        }
    }
}

// values (head, query, stride), `step` numbers from head to head, += the weighted rows of a piece of groups: for each
// 32 channels a group of each position. stride is a multiple of 32.
template <class Format>
void accumulate_groups(float *values, size_t step, size_t stride, const float *weights, int count,
                       const SplitRows &rows, const Piece &piece, int heads, const SplitRows &then) {
    thread_local Groups<typename Format::G> groups;
    const int n = Format::groups(rows.width), passes = heads * n;
    for (int pass = 0; pass < passes; pass++) {
        const int head = pass / n;
        for (int i = pass; i < stream_positions; i += passes) prefetch_rows(then, i);
        groups.find(rows.row, head * piece.head_step + pass % n * sizeof(typename Format::G), piece.begin, piece.end);
        groups.add_to(values + head * step + pass % n * group_size, stride, Into::add,
                      weights + (size_t)head * count * split_positions, split_positions, count);
    }
}

// ---- One split ---------------------------------------------------------------------------------------------

// The queries of a tile of tokens that read some KV heads.
struct Tile {
    Span span;  // of several tiles that are computed as one: the first one's, with the tokens of all
    int first_head, heads, per_kv;
    const Span *spans;  // each of them
    int64_t row(int token) const {
        const Span *of = spans;
        for (; token >= of->count; of++) token -= of->count;
        return of->row + token;
    }
    int queries() const { return span.count * per_kv; }  // of each KV head; query q is that of token q / per_kv
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
    thread_local Floats queries, turned, scores;
    const int count = tile.queries(), all = tile.heads * count, width = task.heads.width;
    const int stride = padded(width, lanes), read = padded(std::max(0, end - origin), group_size);
    for (int i = 0; i < all; i++) {
        size_t at = i / count * to.step + i % count;
        to.partials[at] = {};
        std::fill_n(to.values + at * to.stride, to.stride, 0.0f);
    }
    if (begin >= end) return;
    find_rows<true>(keys, seen, task.heads.kv, tile.heads, origin, begin, end);
    find_rows<false>(values, seen, task.heads.kv, tile.heads, origin, begin, end);
    scores.resize(std::max(scores.size(), (size_t)all * split_positions));
    queries.assign((size_t)all * stride, 0);
    for (int i = 0; i < all; i++) {
        int head = (tile.first_head + i / count) * tile.per_kv + i % count % tile.per_kv;
        int64_t row = tile.row(i % count / tile.per_kv);
        const float *from = task.query + (row * task.heads.query + head) * width;
        std::copy(from, from + width, &queries[(size_t)i * stride]);
    }
    Tiles tiles(count, stride);
    const bool many = tile.heads == 1 && count >= many_queries;
    turned.resize(many ? tiles.floats() : 0), tiles.numbers = turned.data();
    for (int i = 0; many && i < tiles.tiles; i++)
        tiles.fill(i, queries.data(), [](auto *p, int64_t) { return p; });
    for_each_piece<true>(
        keys, tile.heads, values,
        [&](auto format, const Piece &piece) {
            using Format = decltype(format);
            if constexpr (grouped((Format *)nullptr))
                score_groups<Format>(scores.data(), queries.data(), count, keys, piece, tile.heads, values);
            else if (many)
                score_panels<Format>(scores.data(), tiles, keys, piece, values);
            return many || grouped((Format *)nullptr);
        },
        [&](auto format, const NearRows &near, const Rows &rows, auto number, const Piece &, int head, int heads) {
            float *numbers = &scores[(size_t)head * count * split_positions];
            const float *query = &queries[(size_t)head * count * stride];
            auto score = [&](auto stride) {  // a constant where it is the usual one: then no loop over it is left
                score_rows<decltype(number)>(numbers, query, heads, count, stride, rows);
            };
            stride == 64 ? score(std::integral_constant<int, 64>()) : score(stride);
            for (int i = 0; i < heads; i++)
                near.scale<decltype(format)>(numbers + (size_t)i * count * split_positions, head + i, count);
        });
    auto seen_by = [&](int token) {
        auto [low, high] = range(token);
        return std::pair<int, int>(std::max(low, origin) - origin, std::min(high, end) - origin);
    };
    for (int i = 0; i < all; i++) {
        auto [low, high] = seen_by(i % count / tile.per_kv);
        to.partials[i / count * to.step + i % count] =
            softmax_split(&scores[(size_t)i * split_positions], low, high, read, task.scale);
    }
    find_rows<true>(next, seen, task.heads.kv, tile.heads, origin + split_positions, end, end + split_positions);
    // What a token does not see has no weight, but may be NaN.
    const int low = seen_by(tile.span.count - 1).first, high = seen_by(0).second;
    for_each_piece<false>(
        values, tile.heads, next,
        [&](auto format, const Piece &piece) {
            using Format = decltype(format);
            if constexpr (grouped((Format *)nullptr))
                accumulate_groups<Format>(to.values, to.step * to.stride, to.stride, scores.data(), count, values,
                                          piece, tile.heads, next);
            return grouped((Format *)nullptr);
        },
        [&](auto format, const NearRows &near, const Rows &rows, auto number, const Piece &, int first, int heads) {
            int list[near_rows];
            const bool same = tile.span.count == 1 || rows.within(low, high, list).count == rows.count;
            float *weights = &scores[(size_t)first * count * split_positions];
            for (int i = 0; i < heads; i++)
                near.scale<decltype(format)>(weights + (size_t)i * count * split_positions, first + i, count);
            for (int q = 0, size = same ? count : tile.per_kv; q < count; q += size) {
                auto [low, high] = seen_by(q / tile.per_kv);
                accumulate_rows<decltype(number)>(to.values + (first * to.step + q) * to.stride, to.step * to.stride,
                                                  to.stride, weights + q * split_positions, count * split_positions,
                                                  heads, size, same ? rows : rows.within(low, high, list),
                                                  values.width);
            }
        });
}

// ---- Who computes what -------------------------------------------------------------------------------------

constexpr int tile_queries = 96;         // of a KV head: their scores stay in the L2
constexpr int together_queries = 32;     // of all KV heads: with more, each KV head is read by itself
constexpr size_t most_shared = 1 << 22;  // floats of partial results, 16 MiB, however long the context is

// Whether two sequences have the same rows for the positions of a split, as they do where they share its pages.
inline bool same_rows(const CacheView &cache, int a, int b, int begin, int end) {
    return a != b && cache.layout.visit([&](auto &layout) {
        while (begin < end && layout.row(a, begin) == layout.row(b, begin)) begin += layout.run(begin);
        return begin >= end;
    });
}

void plan_attention(AttentionPlan &plan, const Pass &pass, const CacheView &cache, int threads) {
    plan.tiles.clear();
    plan.parts.clear();
    plan.most_queries = plan.slots = 0;
    const bool cached = cache.keys.data;
    const Heads heads = plan.heads = pass.heads;
    plan.widest = visible_of(cache.layout, pass.window);
    plan.stride = padded(cache.values.width ? cache.values.width : heads.width, group_size);
    const int most = std::max(1, tile_queries / heads.per_kv());
    const bool blocks = cached && (has_blocks(cache.type_k) || has_blocks(cache.type_v));
    for (int row = 0; row < pass.count; row++) {
        const Span &span = pass.spans[row];
        Span *tile = plan.tiles.empty() || span.position == span.first ? nullptr : &plan.tiles.back();
        if (tile && tile->count < most && !(blocks && span.position % group_size == 0))
            tile->count++;
        else
            plan.tiles.push_back(span);
        plan.most_queries = std::max(plan.most_queries, plan.tiles.back().count * heads.per_kv());
        plan.slots = std::max(plan.slots, plan.parts_of(plan.tiles.back()));
    }
    const int tiles = (int)plan.tiles.size();
    auto order = [&](const Span &tile) { return std::pair(cache.row_of(tile.sequence, 0), -tile.first); };
    if (cached && !plan.widest.window)  // texts that begin in the same pages stand side by side, the longest first
        std::stable_sort(plan.tiles.begin(), plan.tiles.end(),
                         [&](const Span &a, const Span &b) { return order(a) < order(b); });
    plan.heads_together = plan.most_queries * heads.kv <= together_queries ? heads.kv : 1;
    const size_t results = (size_t)tiles * heads.kv * plan.most_queries;
    // How many tiles, from one on, have the same rows for a split, which the cache had before this pass. All their
    // queries are one tile for it: pages that several texts share are read once (Juravsky et al. 2024, Hydragen).
    auto alike = [&](int tile, int split) {
        const Span &one = plan.tiles[tile];
        const int begin = split * split_positions, end = begin + split_positions;
        int some = 1;
        for (; cached && !plan.widest.window && tile + some < tiles; some++) {
            const Span &next = plan.tiles[tile + some];
            if (std::min(one.first, next.first) < end || plan.tokens_of(tile, some + 1) > most) break;
            if (!same_rows(cache, one.sequence, next.sequence, begin, end)) break;
        }
        return some;
    };
    bool shared = false;
    for (int tile = 0; tile < tiles; tile++) shared |= alike(tile, 0) > 1;
    const bool few = tiles * heads.kv < 4 * threads * plan.heads_together;
    plan.share_splits = (few || shared) && results * plan.slots * plan.stride <= most_shared;
    plan.in_turn = shared || !plan.share_splits;
    if (!plan.share_splits) plan.slots = 1;
    plan.partials.resize(std::max(plan.partials.size(), results * plan.slots));
    plan.values.resize(std::max(plan.values.size(), results * plan.slots * plan.stride));
    auto add_parts = [&](int tile, int some, int first, int last) {
        const bool apart = some > 1 && plan.tokens_of(tile, some) * heads.per_kv() >= many_queries;
        const int together = apart ? 1 : plan.heads_together;
        for (int head = 0; head < heads.kv; head += together)
            plan.parts.push_back({tile, some, head, std::min(together, heads.kv - head), first, last});
        return some;
    };
    for (int tile = tiles; !plan.share_splits && tile-- > 0;)  // a prompt's longest first
        add_parts(tile, 1, 0, plan.parts_of(plan.tiles[tile]));
    for (int part = 0; plan.share_splits && part < plan.slots; part++)
        for (int tile = 0; tile < tiles;)
            tile += part < plan.parts_of(plan.tiles[tile]) ? add_parts(tile, alike(tile, part), part, part + 1) : 1;
    const int half = heads.rotary / 2, places = cached ? plan.widest.sinks : 1;  // naive: keys that are rotated already
    plan.first_place.resize(pass.count);
    plan.sink_cos_sin.clear();
    for (int row = 0; plan.widest.sinks && row < pass.count; row++) {
        const int position = pass.spans[row].position, shift = plan.widest.shift(position);
        if (!plan.widest.dropped(position)) continue;
        const bool follows = position > pass.spans[row].first && plan.widest.dropped(position - 1);
        size_t at = plan.sink_cos_sin.size();
        plan.first_place[row] = follows ? plan.first_place[row - 1] + 1 : (int)(at / heads.width);
        for (int i = follows ? places - 1 : 0; i < places; i++, at += heads.width) {
            plan.sink_cos_sin.resize(at + heads.width);
            for (int c = 0; c < half; c++) {
                float angle = rope_angle(shift + i, pass.frequencies[c]);
                plan.sink_cos_sin[at + c] = std::cos(angle), plan.sink_cos_sin[at + half + c] = std::sin(angle);
            }
        }
    }
}

// Some of the sinks, for those tokens of a tile between which and the sinks positions were dropped: each token sees
// their keys rotated to another place.
inline void attend_sinks(const Partials &to, const Attention &task, const AttentionPlan &plan, const Tile &tile,
                         int origin) {
    thread_local Floats rotated;  // (split_positions, kv_head, D)
    const int width = task.heads.width, half = task.heads.rotary / 2, heads = task.heads.kv;
    const int end = std::min(task.visible.sinks, origin + split_positions);
    rotated.resize((size_t)split_positions * heads * width);
    Ring of_split;
    of_split.slots = split_positions;
    for (int token = 0; token < tile.span.count; token++) {
        Tile one = tile;
        one.span.row += token, one.span.position += token, one.span.count = 1, one.spans = &one.span;
        Segments seen;
        add_sinks(seen, {task.cache, task.layer, tile.first_head, task.keys, task.values}, one.span, task.visible);
        Source &keys = seen.list[0].keys;
        const int first = plan.first_place[one.span.row];
        const bool cached = seen.list[0].unrotated;
        for (int i = origin * tile.heads; seen.count && i < end * tile.heads; i++) {
            const int sink = i / tile.heads, head = i % tile.heads;
            const float *key = (const float *)(keys.row(sink) + head * keys.stride / heads);
            const float *cos_sin = &plan.sink_cos_sin[(size_t)(first + (cached ? sink : 0)) * width];
            float *moved = &rotated[((size_t)(sink - origin) * heads + head) * width];
            for (int c = 0; c < half; c++) {
                float a = key[c], b = key[c + half], cosine = cos_sin[c], sine = cos_sin[c + half];
                moved[c] = a * cosine - b * sine;
                moved[c + half] = b * cosine + a * sine;
            }
            std::copy(key + 2 * half, key + width, moved + 2 * half);
        }
        keys.start = (const char *)rotated.data(), keys.stride = heads * width * sizeof(float);
        keys.layout = Choice<Layout>::of(of_split), keys.sequence = 0;
        attend_split(to.from((size_t)token * tile.per_kv), task, one, seen, origin, origin, seen.count ? end : origin,
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
    // A layer may see less than others. What it does not see has no weight anyway: this saves time alone.
    int begin = std::max(origin, task.visible.first(span.position));
    Segments seen;
    add_rows(seen, {task.cache, task.layer, tile.first_head, task.keys, task.values}, span, task.visible);
    attend_split(to, task, tile, seen, origin, begin, end, [&](int token) {
        int position = span.position + token;
        return std::pair<int, int>(task.visible.first(position), position + 1);
    });
}


void plan(Cpu &m, const std::vector<Pass> &passes, const std::vector<Store> &stores) {
    if (!m.plan) m.plan = std::make_shared<Plans>();  // its memory is used again
    Plans &plans = *(Plans *)m.plan.get();
    if (plans.size() < passes.size()) plans.resize(passes.size());
    for (size_t i = 0; i < passes.size(); i++)
        if (!passes[i].taps) plan_attention(plans[i], passes[i], stores[i].view, m.threads);
}

void attention(Cpu &m, const Attention &task, const Pass &pass) {
    AttentionPlan &plan = (*(Plans *)m.plan.get())[pass.kind];
    const Heads &heads = task.heads;
    const int width = task.values.width;
    // A query's values, divided by the sum, in which a learned sink has its part.
    auto finish = [&](int tile, int kv_head, int q) {
        const Partials total = plan.at(tile, kv_head, 0).from(q);
        const int per_kv = heads.per_kv(), head = kv_head * per_kv + q % per_kv;
        float *out = task.out + width * ((plan.tiles[tile].row + q / per_kv) * (int64_t)heads.query + head);
        // Beside a sink that is far above all scores the sum is infinite, and nothing is left of the values.
        const float sum = total.partials->sum + std::exp(task.sink(head) - total.partials->max_score);
        for (int c = 0; c < width; c++) out[c] = total.values[c] / sum;
    };
    auto attend = [&](int64_t item, Alone) {
        thread_local std::vector<Partial> partials;  // of one part
        thread_local Floats values;
        const AttentionPlan::Parts &parts = plan.parts[item];
        Tile tile = {plan.tiles[parts.tile], parts.head, parts.heads, heads.per_kv(), &plan.tiles[parts.tile]};
        tile.span.count = plan.tokens_of(parts.tile, parts.tiles);
        const int count = tile.queries();
        partials.resize(std::max(partials.size(), (size_t)tile.heads * count));
        values.resize(std::max(values.size(), (size_t)tile.heads * count * plan.stride));
        const Partials to = plan.at(parts.tile, parts.head, plan.share_splits ? parts.first : 0),
                       one = {partials.data(), values.data(), (size_t)count, (size_t)plan.stride};
        attend_part(parts.tiles > 1 ? one : to, task, plan, tile, parts.first);
        for (int i = 0, q = 0; parts.tiles > 1 && i < parts.tiles; i++) {  // what is each tile's
            const int own = plan.tokens_of(parts.tile + i, 1) * heads.per_kv();
            for (int head = 0; head < tile.heads; head++) {
                const Partials its = plan.at(parts.tile + i, parts.head + head, parts.first);
                std::fill_n(its.partials, own, Partial());
                merge(its, one.from(head * count + q), own);
            }
            q += own;
        }
        for (int part = parts.first + 1; part < parts.last; part++) {
            attend_part(one, task, plan, tile, part);
            for (int head = 0; head < tile.heads; head++) merge(to.from(head * to.step), one.from(head * count), count);
        }
        for (int i = 0; plan.slots == 1 && i < tile.heads * count; i++)
            finish(parts.tile, parts.head + i / count, i % count);
    };
    const int64_t items = (int64_t)plan.parts.size();
    plan.in_turn ? m.for_each_in_turn(items, attend) : m.for_each(items, attend);
    if (plan.slots == 1) return;
    m.for_each((int64_t)plan.tiles.size() * heads.kv * plan.most_queries, [&](int64_t item, Alone) {
        const int q = (int)(item % plan.most_queries), head = (int)(item / plan.most_queries % heads.kv);
        const int tile = (int)(item / plan.most_queries / heads.kv);
        if (q >= plan.tiles[tile].count * heads.per_kv()) return;
        for (int slot = 1; slot < plan.parts_of(plan.tiles[tile]); slot++)
            merge(plan.at(tile, head, 0).from(q), plan.at(tile, head, slot).from(q), 1);
        finish(tile, head, q);
    });
}

}  // namespace fast
