// Attention on the CPU: the twin of plain::attention.
//
// Each row of the cache is read once, as it is stored, for all query heads of its KV head and all tokens of a tile.
// Positions are cut into splits at multiples of 256. A split has a softmax of its own, and its partial results (largest
// score, sum, weighted values) are merged with those of the others, so threads can share one long sequence (Milakov and
// Gimelshein 2018, online softmax; Dao et al. 2023, Flash-Decoding).
//
// One order of sums: within a split, a position alone decides in which lane and in which order its numbers are added.
// Splits are merged from first to last. So a token's result has the same bits in any batch, in a prompt of any chunks,
// with any number of threads.
#include "attend.h"

#include <array>
#include <memory>
#include <type_traits>

#include "fast.h"
#include "panels.h"

namespace fast {

// ---- The rows of a split -----------------------------------------------------------------------------------

// A split is read as four streams, each a fourth of it, which the processor's own prefetcher follows: in turn the next
// position of each stream. This is also the order in which values are added.
constexpr int stream_positions = split_positions / 4;
constexpr auto reading_order = [] {
    std::array<int, split_positions> at = {};
    for (int i = 0; i < split_positions; i++) at[i] = i / 4 + i % 4 * stream_positions;
    return at;
}();

// Positions [begin, end) of a split, whose rows have one type. The row of KV head i begins i * head_step bytes further.
struct Stretch {
    int begin, end;
    Choice<Precision> type;
    size_t head_step;
};

// The keys or the values of a split: row[t] is the row at its position t, for the first KV head of some. Stretches
// follow one another, and all but the first are within one block of 32: the residual block, then this pass's vectors.
// Outside [begin, end) row[t] is some valid row, so prefetches need no check.
struct SplitRows {
    int width = 0, count = 0, begin = 0, end = 0;
    size_t bytes = 0;  // of all those KV heads at one position
    Stretch stretches[4];
    const char *row[split_positions];
};

// Finds the rows of positions [begin, end), which lie in one split, for `heads` KV heads. A block of keys is found as a
// whole, as its positions share rows.
inline void find_rows(SplitRows &rows, bool is_key, const Segments &seen, int kv_heads, int heads, int begin, int end) {
    const int origin = begin / split_positions * split_positions;
    const char *start = nullptr;
    rows.count = rows.begin = rows.end = 0;
    for (int i = 0; i < seen.count; i++) {
        const Source &from = is_key ? seen.list[i].keys : seen.list[i].values;
        int first = std::max(begin, seen.list[i].begin), last = std::min(end, seen.list[i].end);
        if (first >= last) continue;
        if (is_key && has_blocks(from.type)) first = first / group_size * group_size;
        from.layout.visit([&](auto &layout) {
            for (int t = first, next; t < last; t = next) {
                next = t + std::max(1, std::min(last - t, layout.run(t)));  // at least 1, so the loop ends
                const char *row = from.start + layout.row(from.sequence, t) * (int64_t)from.stride;
                for (int k = t; k < next; k++, row += from.stride) rows.row[k - origin] = row;
            }
        });
        Stretch &before = rows.stretches[std::max(0, rows.count - 1)];
        if (rows.count && from.start == start && before.type == from.type)
            before.end = last - origin;
        else
            rows.stretches[rows.count++] = {first - origin, last - origin, from.type, from.stride / kv_heads};
        start = from.start;
        rows.width = from.width, rows.bytes = heads * rows.stretches[0].head_step;
        rows.begin = rows.stretches[0].begin, rows.end = last - origin;
    }
    const char *const any = rows.count ? rows.row[rows.begin] : nullptr;
    std::fill(rows.row, rows.row + rows.begin, any);
    std::fill(rows.row + rows.end, rows.row + split_positions, any);
}

// Prefetches the rows at place i of the four streams. While keys are read, `then` is the values of the split; while
// values are read, the keys of the next one. Always inlined: g++ removes calls of a function that only prefetches.
__attribute__((always_inline)) inline void prefetch_rows(const SplitRows &then, int i) {
    if (prefetch_distance == 0) return;
    for (int t = i; t < then.end; t += stream_positions)
        for (size_t at = 0; at < then.bytes; at += cache_line) __builtin_prefetch(then.row[t] + at, 0, 2);
}

// ---- Rows of numbers ---------------------------------------------------------------------------------------
//
// 16 positions of each stream are computed at a time, which the L1 holds. Their numbers become lanes as they are read;
// only rows that do not fill Vecs are widened to float32 first.

constexpr int near_positions = 16, near_rows = 4 * near_positions;

// Queries, and Vecs of channels, whose sums stay in registers, of which there are 32 or 16.
constexpr int score_queries = many_registers ? 6 : 3, value_queries = score_queries, value_vecs = 4;
constexpr int value_rows = 8;  // rows whose values are added for one KV head before those of the next

// Some rows of one type, in the order in which they are read: at positions at[0], ... at[count - 1] of the split.
struct Rows {
    const int *at;  // the last one is repeated up to a multiple of four
    int count;
    const char *const *row, *const *then;  // (position): the numbers, and what is prefetched while they are read
    size_t offset, head_step;              // bytes to the numbers of the first KV head, and from one head to the next
    // At most `most` of them from the one with index `first`, for one KV head.
    Rows part(int first, int most, int head) const {
        return {at + first, std::min(most, count - first), row, then, offset + head * head_step, head_step};
    }
    // Those at positions [begin, end), which `list` holds.
    Rows within(int begin, int end, int *list) const {
        int n = 0;
        for (int i = 0; i < count; i++)
            if (at[i] >= begin && at[i] < end) list[n++] = at[i];
        for (int i = n; i % 4; i++) list[i] = list[n - 1];
        return {list, n, row, then, offset, head_step};
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

// scores (head, query, split_positions) = q . k of some rows, not yet times the rows' scales. KV heads are read
// together, as those of a position are next to one another in memory.
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

// values (Queries, stride) += rows times weights (Queries, split_positions), for `Vecs` Vecs from `channel` on.
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

// values (head, query, stride) += rows times weights (head, query, split_positions). `step` and `weights_step`: numbers
// from one head to the next. A few positions are added for all heads before the next few.
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

// What the rows of a format are: numbers of this type, or codes of it after a scale (load() gives a code divided by the
// format's divisor); void: groups, or what is read one number at a time.
template <class Number>
Number number_in_rows(const PlainRow<Number> *);
template <class Code, int largest, int divisor>
Code number_in_rows(const ScaledRow<Code, largest, divisor> *);
void number_in_rows(const void *);
template <class Format>
using NumberOf = decltype(number_in_rows((const Format *)nullptr));
template <class Format>
constexpr bool scaled = !std::is_void_v<NumberOf<Format>> && !std::is_base_of_v<PlainRow<NumberOf<Format>>, Format>;

template <int bits>
std::true_type is_grouped(const GroupedRow<bits> *);
std::false_type is_grouped(const void *);
template <class Format>
constexpr bool grouped = decltype(is_grouped((const Format *)nullptr))::value;

// to (padded width) = the row at position t, whose numbers begin at byte `offset`, then zeros.
template <bool keys, class Format>
inline void widen_row(float *to, const SplitRows &all, int t, size_t offset) {
    const int width = all.width;
    if constexpr (std::is_void_v<NumberOf<Format>>) {
        auto row_at = [&](int k) { return all.row[k] + offset; };  // a split begins with a block
        for (int c = 0; c < width; c++) to[c] = stored_number<keys, Format>(row_at, t, c, width);
        std::fill(to + width, to + padded(width, lanes), 0.0f);
    } else {
        auto *numbers = (const NumberOf<Format> *)(all.row[t] + offset);
        int c = 0;
        for (; c + lanes <= width; c += lanes) store(to + c, load(numbers + c));
        if (c < width) store(to + c, load_part(numbers + c, width - c));
    }
}

// numbers (query, split_positions) *= the scales of one KV head's rows, near_positions of each stream from `first` on.
// Positions outside the stretch have the scale 1.
inline void scale_rows(float *numbers, int queries, const Rows &rows, const Stretch &stretch, int first, int head) {
    auto position = [&](int i) { return i / near_positions * stream_positions + first + i % near_positions; };
    auto scale_at = [&](int t) { return scale_of_row(rows.row[t] + head * rows.head_step); };
    f16 scales[near_rows];
    for (int i = 0; rows.count < near_rows && i < near_rows; i++)
        scales[i] = position(i) >= stretch.begin && position(i) < stretch.end ? scale_at(position(i)) : f16{0x3c00};
    for (int s = 0; rows.count == near_rows && s < 4; s++)  // half the time of the loop above
        for (int i = 0; i < near_positions; i++)
            scales[s * near_positions + i] = scale_at(s * stream_positions + first + i);
    for (int i = 0; i < near_rows; i += lanes) {
        const Vec by = load(scales + i);
        for (int q = 0; q < queries; q++) {
            float *at = numbers + q * split_positions + position(i);
            store(at, mul(load(at), by));
        }
    }
}

// Calls use(rows, Number(), head, heads, scale) for the rows of a stretch, near_positions of each stream at a time. All
// KV heads come together, or one by one if rows must be widened first. scale(numbers, queries) multiplies numbers
// (head, query, split_positions) by the rows' scales, if they have some.
template <bool keys, class Format, class Use>
void for_each_near(const SplitRows &all, const Stretch &stretch, int heads, const SplitRows &then, Use use) {
    thread_local Floats wide;  // (near_rows, padded width)
    const char *wide_row[split_positions];
    const size_t stride = padded(all.width, lanes);
    int list[near_rows];
    for (int first = 0; first < stream_positions; first += near_positions) {
        Rows rows = {&reading_order[4 * first], near_rows, all.row, then.row, scaled<Format> ? sizeof(f16) : 0,
                     stretch.head_step};
        if (stretch.begin > first || stretch.end < first + 3 * stream_positions + near_positions)
            rows = rows.within(stretch.begin, stretch.end, list);
        if (rows.count == 0) continue;
        auto use_heads = [&](const Rows &some, auto number, int head, int heads) {
            use(some, number, head, heads, [&](float *numbers, int queries) {
                for (int i = 0; scaled<Format> && i < heads; i++, numbers += queries * split_positions)
                    scale_rows(numbers, queries, rows, stretch, first, head + i);
            });
        };
        const bool as_stored = !std::is_void_v<NumberOf<Format>> && all.width % lanes == 0;
        if constexpr (!std::is_void_v<NumberOf<Format>>)
            if (as_stored) use_heads(rows, NumberOf<Format>(), 0, heads);
        for (int head = 0; !as_stored && head < heads; head++) {
            wide.resize(near_rows * stride);
            for (int i = 0; i < rows.count; i++) {
                wide_row[rows.at[i]] = (const char *)&wide[i * stride];
                widen_row<keys, Format>(&wide[i * stride], all, rows.at[i], rows.offset + head * rows.head_step);
            }
            use_heads(Rows{rows.at, rows.count, wide_row, wide_row, 0, 0}, float(), head, 1);
        }
    }
}

// ---- Many queries: keys of neighbouring positions side by side -----------------------------------------------

constexpr int many_queries = 32;  // of one KV head; with fewer, transposing the keys takes longer than it saves

// panel = `count` keys of one KV head from position `first` on, transposed; widened first if they are unevenly spaced.
template <class Format>
void fill_panel(const Transposed &panel, const SplitRows &rows, int first, int count) {
    constexpr bool widen = scaled<Format> || std::is_void_v<NumberOf<Format>>;
    using Number = std::conditional_t<widen, float, NumberOf<Format>>;
    const int stride = padded(rows.width, lanes);
    const char *const *row = rows.row + first;
    thread_local Floats wide;
    wide.resize(panel_rows * stride);
    const int64_t step = count > 1 ? row[1] - row[0] : 0;
    bool even = !widen && step % (int)sizeof(Number) == 0;
    for (int r = 1; even && r < count; r++) even = row[r] == row[0] + r * step;
    for (int r = 0; !even && r < count; r++)
        widen_row<true, Format>(&wide[r * stride], rows, first + r, scaled<Format> ? sizeof(f16) : 0);
    for (int r = 0; r < count; r += lanes) {
        const int some = std::min(lanes, count - r);
        even ? transpose(panel, r, (const Number *)row[r], step / (int)sizeof(Number), some, rows.width)
             : transpose(panel, r, &wide[r * stride], stride, some, stride);
    }
}

// scores (query, split_positions) = q . k for the keys of a stretch of one KV head, times their scales. A lane is a
// position (panels.h).
template <class Format>
void score_panels(float *scores, const Tiles &queries, const SplitRows &rows, const Stretch &stretch,
                  const SplitRows &then) {
    const int apart = (queries.steps + 1) * panel_rows;
    thread_local Floats numbers;
    numbers.resize(apart * lanes);
    const Transposed panel = {numbers.data(), apart, panel_rows};
    for (int first = stretch.begin; first < stretch.end; first += panel_rows) {
        const int count = std::min(panel_rows, stretch.end - first);
        const char *const *row = rows.row + first;
        // The rows of one KV head have gaps between them, which no processor's own prefetcher follows.
        for (int t = first; t < first + count; t++)
            for (size_t at = 0; at < then.bytes; at += cache_line) {
                __builtin_prefetch(then.row[t] + at, 0, 2);
                if (t + panel_rows < stretch.end) __builtin_prefetch(rows.row[t + panel_rows] + at, 0, 2);
            }
        fill_panel<Format>(panel, rows, first, count);
        f16 scales[panel_rows];
        for (int r = 0; scaled<Format> && r < panel_rows; r++) scales[r] = scale_of_row(row[std::min(r, count - 1)]);
        for (int tile = 0; tile < queries.tiles; tile++) {
            const int begin = queries.first(tile);
            in_batches<tile_vectors>(queries.first(tile + 1) - begin, [&](auto size, int) {
                alignas(cache_line) float sums[size * panel_rows];
                auto multiply = [&](auto steps) {  // 64 channels are usual: then `steps` is a constant
                    panel_tile<float, size>(sums, panel, queries.at(tile), steps, row[0], /*ahead_bytes=*/0);
                };
                constexpr std::integral_constant<int, 64 / lanes> usual;
                queries.channels == 64 ? multiply(usual) : multiply(queries.steps);
                for (int i = 0; scaled<Format> && i < size * panel_rows; i += lanes)
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
// Keys and values in groups are computed by the same sum: over groups of 32 codes, each times a factor, for each query.
//   scores   a group is a channel at 32 positions   the factor is a number of the query   the sum: a block of keys
//   values   a group is 32 channels at a position   the factor is the position's weight   the sum: a split
// A term factor * (scale * code + zero) is (factor * scale) * code + factor * zero. The products factor * scale are
// rounded to 16-bit whole numbers. Then one instruction adds both products of the codes of two groups, codes need not
// become floats, and the sum is exact. The rounding costs 2^-16 of the largest factor of a sum: about a thousandth of
// what codes of 2 or 4 bits cost. A sum is a whole block or split, so the rounding depends on nothing but the query.

constexpr int group_vecs = group_size / lanes;

// Groups [first, count) of a sum, where group i begins `offset` bytes after start[i], and their factors: units[q] times
// whole[q * stride + i] approximates that of query q and group i. zeros[q] is the sum of factor * zero.
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

    // Computes the factors of `Queries` queries; numbers (query, numbers_stride) are theirs before scales.
    template <int Queries>
    void fold_scales(const float *numbers, size_t numbers_stride) {
        constexpr float least_factor = 0x1p-110f;                             // so that 1 / unit is finite
        const float most_whole = std::min(32767.0f, 0x1p27f / (float)count);  // so that 32 bits hold the sum
        Vec totals[Queries], most[Queries];
        unrolled<Queries>([&](auto q) { totals[q] = set(0), most[q] = set(least_factor); });
        const ScaleAndZero *pair = pairs.data();
        const int end = count, by_stride = stride;  // copies: no store can change them
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

    // to[q * to_stride + i] = or += units[q] * (sum over groups g of whole[q, g] * code i of group g) + zeros[q], for
    // the codes of Vecs p and p + group_vecs / 2, which come out of the same bytes. At most half of a group's sums at a
    // time: with 16 registers there is no room for more.
    template <int Queries, int p>
    __attribute__((noinline)) void add_codes(Into how, float *to, size_t to_stride) const {
        Ints low[Queries], high[Queries];
        unrolled<Queries>([&](auto q) { low[q] = high[q] = to_ints(set(0)); });
        const int16_t *factor = whole.data();
        const int by_stride = stride, end = count;
        for (int i = first / 2 * 2; i < end; i += 2) {  // the last may be count: a valid row, factor 0
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

    // to (query, to_stride) = or += the sums of all 32 codes.
    void add_to(float *to, size_t to_stride, Into how, const float *numbers, size_t numbers_stride, int queries) {
        in_batches<value_queries, value_queries / 2>(queries, [&](auto size, int q) {
            fold_scales<size>(numbers + q * numbers_stride, numbers_stride);
            unrolled<group_vecs / 2>([&](auto p) { add_codes<size, p>(how, to + q * to_stride, to_stride); });
        });
    }
};

// scores (head, query, split_positions) = queries (head, query, padded width) . k of groups, for whole blocks of 32.
template <class Format>
void score_groups(float *scores, const float *queries, int count, const SplitRows &rows, const Stretch &stretch,
                  int heads, const SplitRows &then) {
    thread_local Groups<typename Format::G> groups;
    thread_local std::vector<const char *> channel;  // (width + 1): where its group is, for the first KV head
    const int width = rows.width, stride = padded(width, lanes), n = Format::groups(width);
    channel.resize(width + 1);
    for (int t = stretch.begin; t < stretch.end; t += group_size) {
        for (int c = 0; c < width; c++) channel[c] = rows.row[t + c / n] + c % n * sizeof(typename Format::G);
        channel[width] = channel[width - 1];
        for (int head = 0; head < heads; head++) {
            for (int i = head; i < group_size / 4; i += heads) prefetch_rows(then, t / 4 + i);
            groups.find(channel.data(), head * stretch.head_step, 0, width);
            groups.add_to(scores + (size_t)head * count * split_positions + t, split_positions, Into::set,
                          queries + (size_t)head * count * stride, stride, count);
        }
    }
}

// values (head, query, stride) += weights (head, query, split_positions) times a stretch of groups; `step` numbers from
// one head to the next, stride a multiple of 32.
template <class Format>
void accumulate_groups(float *values, size_t step, size_t stride, const float *weights, int count,
                       const SplitRows &rows, const Stretch &stretch, int heads, const SplitRows &then) {
    thread_local Groups<typename Format::G> groups;
    const int n = Format::groups(rows.width), passes = heads * n;
    for (int pass = 0; pass < passes; pass++) {
        const int head = pass / n;
        const size_t offset = head * stretch.head_step + pass % n * sizeof(typename Format::G);
        for (int i = pass; i < stream_positions; i += passes) prefetch_rows(then, i);
        groups.find(rows.row, offset, stretch.begin, stretch.end);
        groups.add_to(values + head * step + pass % n * group_size, stride, Into::add,
                      weights + (size_t)head * count * split_positions, split_positions, count);
    }
}

// ---- One split ---------------------------------------------------------------------------------------------

// The queries of a tile of tokens that read some KV heads. Query q of a KV head is one of token q / per_kv.
struct Tile {
    Span span;  // where several tiles are computed as one: the first one's, with the tokens of all
    int first_head, heads, per_kv;
    const Span *spans;  // each of those tiles
    int queries() const { return span.count * per_kv; }  // of each KV head
    // to (head, query, stride) = the queries, with zeros after the `width` numbers of each.
    void gather(Floats &to, const Attention &task, int stride) const {
        to.assign((size_t)heads * queries() * stride, 0);
        const Span *tile = spans;
        for (int token = 0, i = 0; token < span.count; token++, i++) {
            if (i == tile->count) tile++, i = 0;
            const float *from = task.query + ((tile->row + i) * (int64_t)task.heads.query + first_head * per_kv) *
                                                 task.heads.width;
            for (int q = 0; q < heads * per_kv; q++, from += task.heads.width) {
                const int at = q / per_kv * queries() + token * per_kv + q % per_kv;
                std::copy_n(from, task.heads.width, &to[(size_t)at * stride]);
            }
        }
    }
};

// Makes e^(factor * score - largest) of a split's visible scores, [low, high), and 0 of all others; only the first
// `count` were computed. The lane of a position is its place in the split.
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
        // The product is rounded as above: with fma(), a score of 10^10 would exceed it by more than e^x can hold.
        Vec weight = exp(add(mul(set(factor), load(scores + i)), set(-max_score)));
        store(scores + i, weight);
        total = add(total, weight);
    }
    return {max_score, sum(total)};
}

// scores (head, query, split_positions) = q . k of a tile's queries (head, query, padded width) and a split's keys.
inline void score_split(float *scores, const Floats &queries, const Tile &tile, const SplitRows &keys,
                        const SplitRows &then) {
    thread_local Floats transposed;
    const int count = tile.queries(), stride = padded(keys.width, lanes);
    const bool many = tile.heads == 1 && count >= many_queries;
    Tiles tiles(count, stride);
    transposed.resize(many ? tiles.floats() : 0), tiles.numbers = transposed.data();
    for (int i = 0; many && i < tiles.tiles; i++)
        tiles.fill(i, queries.data(), [](auto *p, int64_t) { return p; });
    auto score_stretch = [&](auto format, const Stretch &stretch) {
        using Format = decltype(format);
        if constexpr (grouped<Format>)
            return score_groups<Format>(scores, queries.data(), count, keys, stretch, tile.heads, then);
        else if (many)
            return score_panels<Format>(scores, tiles, keys, stretch, then);
        else
            for_each_near<true, Format>(
                keys, stretch, tile.heads, then,
                [&](const Rows &rows, auto number, int head, int heads, auto scale) {
                    float *to = scores + (size_t)head * count * split_positions;
                    const float *query = &queries[(size_t)head * count * stride];
                    auto score = [&](auto stride) {  // 64 is usual: as a constant it leaves no loop over channels
                        score_rows<decltype(number)>(to, query, heads, count, stride, rows);
                    };
                    stride == 64 ? score(std::integral_constant<int, 64>()) : score(stride);
                    scale(to, count);
                });
    };
    for (int i = 0; i < keys.count; i++)
        keys.stretches[i].type.visit([&](auto format) { score_stretch(format, keys.stretches[i]); });
}

// to.values += weights (head, query, split_positions) times a split's values. seen_by(token) is the range of positions
// that a token of the tile sees.
template <class SeenBy>
void accumulate_split(const Partials &to, float *weights, const Tile &tile, SeenBy seen_by, const SplitRows &values,
                      const SplitRows &then) {
    const int count = tile.queries();
    const size_t step = to.step * to.stride;
    // What a token does not see has no weight, but may be NaN: all tokens see [low, high).
    const int low = seen_by(tile.span.count - 1).first, high = seen_by(0).second;
    auto accumulate_stretch = [&](auto format, const Stretch &stretch) {
        using Format = decltype(format);
        if constexpr (grouped<Format>)
            accumulate_groups<Format>(to.values, step, to.stride, weights, count, values, stretch, tile.heads, then);
        else
            for_each_near<false, Format>(
                values, stretch, tile.heads, then,
                [&](const Rows &rows, auto number, int head, int heads, auto scale) {
                    int list[near_rows];
                    const bool same = tile.span.count == 1 || rows.within(low, high, list).count == rows.count;
                    float *from = weights + (size_t)head * count * split_positions;
                    scale(from, count);
                    for (int q = 0, size = same ? count : tile.per_kv; q < count; q += size) {
                        auto [low, high] = seen_by(q / tile.per_kv);
                        accumulate_rows<decltype(number)>(
                            to.values + head * step + q * to.stride, step, to.stride, from + q * split_positions,
                            count * split_positions, heads, size, same ? rows : rows.within(low, high, list),
                            values.width);
                    }
                });
    };
    for (int i = 0; i < values.count; i++)
        values.stretches[i].type.visit([&](auto format) { accumulate_stretch(format, values.stretches[i]); });
}

// to = attention of a tile over positions [begin, end) of `seen`, which lie in one split. A token sees those of them
// that `visible` allows, up to its own.
inline void attend_split(const Partials &to, const Attention &task, const Tile &tile, const Segments &seen,
                         const Visible &visible, int begin, int end) {
    thread_local SplitRows keys, values, next;
    thread_local Floats queries, scores;
    const int count = tile.queries(), all = tile.heads * count, origin = begin / split_positions * split_positions;
    auto at = [&](int i) { return i / count * to.step + i % count; };
    for (int i = 0; i < all; i++) {
        to.partials[at(i)] = {};
        std::fill_n(to.values + at(i) * to.stride, to.stride, 0.0f);
    }
    if (begin >= end) return;
    find_rows(keys, true, seen, task.heads.kv, tile.heads, begin, end);
    find_rows(values, false, seen, task.heads.kv, tile.heads, begin, end);
    find_rows(next, true, seen, task.heads.kv, tile.heads, end, end + split_positions);
    scores.resize(std::max(scores.size(), (size_t)all * split_positions));
    tile.gather(queries, task, padded(task.heads.width, lanes));
    score_split(scores.data(), queries, tile, keys, values);
    auto seen_by = [&](int token) {  // places in the split
        const int position = tile.span.position + token;
        return std::pair(std::max(visible.first(position), origin) - origin, std::min(position + 1, end) - origin);
    };
    for (int i = 0; i < all; i++) {
        auto [low, high] = seen_by(i % count / tile.per_kv);
        to.partials[at(i)] = softmax_split(&scores[(size_t)i * split_positions], low, high,
                                           padded(end - origin, group_size), task.scale);
    }
    accumulate_split(to, scores.data(), tile, seen_by, values, next);
}

// ---- Who computes what -------------------------------------------------------------------------------------

constexpr int tile_queries = 96;         // of a KV head: their scores stay in the L2
constexpr int together_queries = 32;     // of all KV heads: with more, each KV head is read by itself
constexpr size_t most_shared = 1 << 22;  // floats of partial results, 16 MiB, however long the context is

inline int most_tokens(const Heads &heads) { return std::max(1, tile_queries / heads.per_kv()); }  // of a tile

// Cuts a pass into tiles: consecutive tokens of a sequence, within one block where a precision has blocks. Tiles of
// texts that begin with the same pages become neighbours, the longest first.
inline void cut_into_tiles(AttentionPlan &plan, const Pass &pass, const CacheView &cache) {
    const bool blocks = cache.keys.data && (has_blocks(cache.type_k) || has_blocks(cache.type_v));
    plan.tiles.clear();
    plan.most_queries = plan.slots = 0;
    for (int row = 0; row < pass.count; row++) {
        const Span &span = pass.spans[row];
        Span *tile = plan.tiles.empty() || span.position == span.first ? nullptr : &plan.tiles.back();
        if (tile && tile->count < most_tokens(plan.heads) && !(blocks && span.position % group_size == 0))
            tile->count++;
        else
            plan.tiles.push_back(span);
        plan.most_queries = std::max(plan.most_queries, plan.tiles.back().count * plan.heads.per_kv());
        plan.slots = std::max(plan.slots, plan.parts_of(plan.tiles.back()));
    }
    if (!cache.keys.data || plan.widest.window) return;
    auto order = [&](const Span &tile) { return std::pair(cache.row_of(tile.sequence, 0), -tile.first); };
    std::stable_sort(plan.tiles.begin(), plan.tiles.end(),
                     [&](const Span &a, const Span &b) { return order(a) < order(b); });
}

// How many tiles from this one on have the same rows in a split that was stored before this pass. There all their
// queries become one tile: pages that several texts share are read once (Juravsky et al. 2024, Hydragen).
inline int tiles_alike(const AttentionPlan &plan, const CacheView &cache, int tile, int split) {
    const Span &one = plan.tiles[tile];
    const int begin = split * split_positions, end = begin + split_positions, tiles = (int)plan.tiles.size();
    int some = 1;
    for (; cache.keys.data && !plan.widest.window && tile + some < tiles; some++) {
        const Span &next = plan.tiles[tile + some];
        if (std::min(one.first, next.first) < end || plan.tokens_of(tile, some + 1) > most_tokens(plan.heads)) break;
        const bool same = one.sequence != next.sequence && cache.layout.visit([&](auto &layout) {
            int t = begin;
            while (t < end && layout.row(one.sequence, t) == layout.row(next.sequence, t)) t += layout.run(t);
            return t >= end;
        });
        if (!same) break;
    }
    return some;
}

// Computes the angles by which each token of a pass rotates the sinks, if positions after them were dropped for it.
inline void find_sink_angles(AttentionPlan &plan, const Pass &pass, bool cached) {
    const int half = pass.heads.rotary / 2, width = pass.heads.width;
    const int places = cached ? plan.widest.sinks : 1;  // naive: keys are rotated already, all by the same angles
    plan.first_place.resize(pass.count);
    plan.sink_cos_sin.clear();
    for (int row = 0; row < pass.count; row++) {
        const int position = pass.spans[row].position, shift = plan.widest.shift(position);
        if (plan.widest.sinks == 0 || !plan.widest.dropped(position)) continue;
        const bool follows = position > pass.spans[row].first && plan.widest.dropped(position - 1);
        size_t at = plan.sink_cos_sin.size();
        plan.first_place[row] = follows ? plan.first_place[row - 1] + 1 : (int)(at / width);
        for (int i = follows ? places - 1 : 0; i < places; i++, at += width) {
            plan.sink_cos_sin.resize(at + width);
            for (int c = 0; c < half; c++) {
                float angle = rope_angle(shift + i, pass.frequencies[c]);
                plan.sink_cos_sin[at + c] = std::cos(angle), plan.sink_cos_sin[at + half + c] = std::sin(angle);
            }
        }
    }
}

void plan_attention(AttentionPlan &plan, const Pass &pass, const CacheView &cache, int threads) {
    const Heads heads = plan.heads = pass.heads;
    plan.widest = visible_of(cache.layout, pass.window);
    plan.stride = padded(cache.values.width ? cache.values.width : heads.width, group_size);
    cut_into_tiles(plan, pass, cache);
    const int tiles = (int)plan.tiles.size();
    plan.heads_together = plan.most_queries * heads.kv <= together_queries ? heads.kv : 1;
    bool shared = false;
    for (int tile = 0; tile < tiles; tile++) shared |= tiles_alike(plan, cache, tile, 0) > 1;
    const bool few = tiles * heads.kv < 4 * threads * plan.heads_together;
    const size_t results = (size_t)tiles * heads.kv * plan.most_queries;
    plan.share_splits = (few || shared) && results * plan.slots * plan.stride <= most_shared;
    plan.in_turn = shared || !plan.share_splits;
    if (!plan.share_splits) plan.slots = 1;
    plan.partials.resize(std::max(plan.partials.size(), results * plan.slots));
    plan.values.resize(std::max(plan.values.size(), results * plan.slots * plan.stride));
    plan.parts.clear();
    auto add_parts = [&](int tile, int some, int first, int last) {
        const bool apart = some > 1 && plan.tokens_of(tile, some) * heads.per_kv() >= many_queries;
        const int together = apart ? 1 : plan.heads_together;
        for (int head = 0; head < heads.kv; head += together)
            plan.parts.push_back({tile, some, head, std::min(together, heads.kv - head), first, last});
        return some;
    };
    for (int tile = tiles; !plan.share_splits && tile-- > 0;)  // the longest of a prompt first
        add_parts(tile, 1, 0, plan.parts_of(plan.tiles[tile]));
    for (int part = 0; plan.share_splits && part < plan.slots; part++)
        for (int tile = 0; tile < tiles;) {
            const bool has = part < plan.parts_of(plan.tiles[tile]);
            tile += has ? add_parts(tile, tiles_alike(plan, cache, tile, part), part, part + 1) : 1;
        }
    find_sink_angles(plan, pass, cache.keys.data);
}

// One part of a tile, over sinks. Tokens are computed one by one, as each sees the keys rotated to other positions; one
// for which no position was dropped sees the sinks as rows.
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
        attend_split(to.from((size_t)token * tile.per_kv), task, one, seen, /*visible: all of them*/ {}, origin,
                     seen.count ? end : origin);
    }
}

// One part of a tile, for some KV heads.
inline void attend_part(const Partials &to, const Attention &task, const AttentionPlan &plan, const Tile &tile,
                        int part) {
    if (part < plan.sink_parts()) return attend_sinks(to, task, plan, tile, part * split_positions);
    const Span &span = tile.span;
    const int origin = (plan.first_split(span) + part - plan.sink_parts()) * split_positions;
    const int end = std::min(origin + split_positions, span.position + span.count);
    // A layer may see less than the widest. What it does not see has no weight anyway: to skip it only saves time.
    const int begin = std::max(origin, task.visible.first(span.position));
    Segments seen;
    add_rows(seen, {task.cache, task.layer, tile.first_head, task.keys, task.values}, span, task.visible);
    attend_split(to, task, tile, seen, task.visible, begin, end);
}

// Computes some parts of a tile for some KV heads: merges all of them, or puts one into its own slot. Where several
// tiles share a part, each gets the results of its own queries.
inline void attend_parts(AttentionPlan &plan, const Attention &task, const AttentionPlan::Parts &parts) {
    thread_local std::vector<Partial> partials;  // of one part
    thread_local Floats values;
    const int per_kv = task.heads.per_kv();
    Tile tile = {plan.tiles[parts.tile], parts.head, parts.heads, per_kv, &plan.tiles[parts.tile]};
    tile.span.count = plan.tokens_of(parts.tile, parts.tiles);
    const int count = tile.queries();
    partials.resize(std::max(partials.size(), (size_t)tile.heads * count));
    values.resize(std::max(values.size(), (size_t)tile.heads * count * plan.stride));
    const Partials to = plan.at(parts.tile, parts.head, plan.share_splits ? parts.first : 0),
                   one = {partials.data(), values.data(), (size_t)count, (size_t)plan.stride};
    attend_part(parts.tiles > 1 ? one : to, task, plan, tile, parts.first);
    for (int i = 0, q = 0; parts.tiles > 1 && i < parts.tiles; i++) {
        const int own = plan.tokens_of(parts.tile + i, 1) * per_kv;
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
}

// Writes the output of a query: its values divided by the sum, of which a learned sink is a part.
inline void finish(AttentionPlan &plan, const Attention &task, int tile, int kv_head, int q) {
    const Partials total = plan.at(tile, kv_head, 0).from(q);
    const int per_kv = task.heads.per_kv(), head = kv_head * per_kv + q % per_kv, width = task.values.width;
    float *out = task.out + width * ((plan.tiles[tile].row + q / per_kv) * (int64_t)task.heads.query + head);
    // With a sink that is far above all scores the sum is infinite, and all values become 0.
    const float sum = total.partials->sum + std::exp(task.sink(head) - total.partials->max_score);
    for (int c = 0; c < width; c++) out[c] = total.values[c] / sum;
}

void plan(Cpu &m, const std::vector<Pass> &passes, const std::vector<Store> &stores) {
    if (!m.plan) m.plan = std::make_shared<Plans>();  // kept, so its memory is reused
    Plans &plans = *(Plans *)m.plan.get();
    if (plans.size() < passes.size()) plans.resize(passes.size());
    for (size_t i = 0; i < passes.size(); i++)
        if (!passes[i].taps) plan_attention(plans[i], passes[i], stores[i].view, m.threads);
}

void attention(Cpu &m, const Attention &task, const Pass &pass) {
    AttentionPlan &plan = (*(Plans *)m.plan.get())[pass.kind];
    const int per_kv = task.heads.per_kv();
    auto attend = [&](int64_t item, Alone) {
        const AttentionPlan::Parts &parts = plan.parts[item];
        attend_parts(plan, task, parts);
        const int count = plan.tiles[parts.tile].count * per_kv;
        for (int i = 0; plan.slots == 1 && i < parts.heads * count; i++)
            finish(plan, task, parts.tile, parts.head + i / count, i % count);
    };
    const int64_t items = (int64_t)plan.parts.size();
    plan.in_turn ? m.for_each_in_turn(items, attend) : m.for_each(items, attend);
    if (plan.slots == 1) return;
    m.for_each((int64_t)plan.tiles.size() * task.heads.kv * plan.most_queries, [&](int64_t item, Alone) {
        const int q = (int)(item % plan.most_queries), head = (int)(item / plan.most_queries % task.heads.kv);
        const int tile = (int)(item / plan.most_queries / task.heads.kv);
        if (q >= plan.tiles[tile].count * per_kv) return;
        for (int slot = 1; slot < plan.parts_of(plan.tiles[tile]); slot++)
            merge(plan.at(tile, head, 0).from(q), plan.at(tile, head, slot).from(q), 1);
        finish(plan, task, tile, head, q);
    });
}

}  // namespace fast
