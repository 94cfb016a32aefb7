// Matrix products on the CPU: the twin of plain::linear.
//
// One order of sums (simd.h): the product of a row and a token has the same bits with any number of rows, tokens and
// threads. Two ways lead to the same sums:
//   few tokens    Memory is the limit. Channels are in the lanes. Rows are read as they are stored, each once, as four
//                 streams, and at the end the lanes of each sum are folded.
//   many tokens   Multiply-adds are the limit. Rows are in the lanes, and the residues (panels.h) come one after the
//                 other. Nothing is left to fold, but rows and tokens must be transposed first.
// docs/where_the_time_goes.md says what this was predicted to give, and what was measured.
#include <algorithm>
#include <initializer_list>
#include <type_traits>
#include <utility>

#include "../base/progress.h"
#include "../layers.cu"
#include "fast.h"
#include "panels.h"

namespace fast {

constexpr int streams = 4, stream_tokens = many_registers ? 8 : 6;
constexpr int near_bytes = 256 << 10;  // of panels that stay in the L2 while all tokens pass; a fourth of stored rows

// The most tokens for which the first way is faster. Transposing a matrix takes as long as the products of some tokens,
// and of more tokens where products of pairs are fast. With 16 registers the second way gains less.
inline int few_tokens(DType type) {
    if (!many_registers) return type == DType::f32 ? 24 : 40;
    return type == DType::bf16_pairs ? 30 : type == DType::f32 ? 32 : 40;
}

// y = or += sums + bias, for one token and `count` rows from `row` on, every `apart`th.
inline void put(const Product &product, Into how, int64_t token, int64_t row, float *sums, int count, int apart = 1) {
    const Tensor bias = product.linear.bias;
    float *y = product.y + token * product.linear.weight.rows + row;
    for (int i = 0; bias.data && i < count; i++) sums[i] += number_of(bias, row + i * apart);
    int i = 0;
    for (; apart == 1 && i + lanes <= count; i += lanes)
        store(y + i, how == Into::add ? add(load(y + i), load(sums + i)) : load(sums + i));
    for (; i < count; i++) y[i * apart] = how == Into::add ? y[i * apart] + sums[i] : sums[i];
}

// ---- Few tokens: channels in the lanes -----------------------------------------------------------------------

// Adds the products of a Vec of channels, of R rows and T tokens, to totals (T, R). Why not a lambda in stream_tile():
// g++ would store the sums in memory, too.
template <int R, int T, class Number, class Input, class Load>
inline void add_products(Vec (&totals)[T * R], const Number *const (&rows)[R], const Input *const (&tokens)[T],
                         Load load_from) {
    constexpr int few = std::min(R, T), more = std::max(R, T);
    auto number = [&](bool of_row, int i) { return of_row ? load_from(rows[i]) : load_from(tokens[i]); };
    Vec held[few];  // of the rows, or of the tokens if those are fewer
    unrolled<few>([&](auto i) { held[i] = number(R < T, i); });
    unrolled<more>([&](auto j) {
        Vec next = number(R >= T, j);
        unrolled<few>([&](auto i) {
            Vec &sum = totals[R < T ? j * R + i : i * R + j];
            sum = R < T ? add_product<Number>(held[i], next, sum) : add_product<Number>(next, held[i], sum);
        });
    });
}

// sums (T, R) = R rows, `apart` numbers from one to the next, times T tokens (T, channels). Each of several batches
// prefetches a share of the cache lines `ahead` bytes further: memory is busy all the time, not for the first alone.
template <int R, int T, class Number, class Input>
__attribute__((flatten)) void stream_tile(float *sums, const Number *weight, int64_t apart, const Input *x,
                                          int channels, int64_t ahead, int batches, int batch) {
    constexpr int line = cache_line / (int)sizeof(Number), step = lanes * per_lane<Number>;
    const Number *rows[R];
    const Input *tokens[T];
    Vec totals[T * R];
    unrolled<R>([&](auto r) { rows[r] = weight + r * apart; });
    unrolled<T>([&](auto t) { tokens[t] = x + (int64_t)t * channels; });
    unrolled<T * R>([&](auto i) { totals[i] = set(0); });
    // Loading numbers once makes a tile up to twice as fast. Where it waits for memory, it only costs a tenth.
    constexpr bool once = T > 3 + many_registers - (sizeof(Number) == 2);
    auto add_channels = [&](int64_t c) {
        add_products<R, T>(totals, rows, tokens, [&](auto *p) { return once ? load_once(p + c) : load(p + c); });
    };
    int64_t c = 0;
    for (int turn = batch; c + line <= channels; c += line) {
        const bool mine = turn == 0;
        turn = mine ? batches - 1 : turn - 1;
        // Lines that take many instructions are prefetched on every processor (simd.h): else the next loads begin too
        // late. Not a lambda: g++ removes one that only prefetches.
        for (int r = 0; r < R; r++) {
            const char *at = (const char *)(rows[r] + c);
            if (prefetch_distance || T > 1) {
                if (mine) __builtin_prefetch(at + ahead, 0, 2);
                __builtin_prefetch(at + 1024);
            } else if (sizeof(Number) == 2) {
                __builtin_prefetch(at + 384);
            }
        }
        if constexpr (R * T <= 8)
            unrolled<line / step>([&](auto i) { add_channels(c + i * step); });
        else
#pragma GCC unroll 1  // else g++ loads so far ahead that sums leave the registers
            for (int i = 0; i < line; i += step) add_channels(c + i);
    }
    for (; c + step <= channels; c += step) add_channels(c);
    const int rest = (int)(channels - c);
    if (rest > 0) add_products<R, T>(totals, rows, tokens, [&](auto *p) { return load_part(p + c, rest); });
    constexpr int fours = T * R / 4 * 4;
    unrolled<T * R / 4>(
        [&](auto i) { sum4(sums + 4 * i, totals[4 * i], totals[4 * i + 1], totals[4 * i + 2], totals[4 * i + 3]); });
    unrolled<T * R - fours>([&](auto i) { sums[fours + i] = sum(totals[fours + i]); });
}

// Returns x rounded to paired_bf16, in memory of this thread.
inline const paired_bf16 *rounded(const float *x, int64_t count) {
    thread_local std::vector<paired_bf16> numbers;
    numbers.resize((size_t)count);
    for (int64_t i = 0; i < count; i++) from_float(numbers[i], x[i]);
    return numbers.data();
}

// y of one matrix, for batches of T tokens, each over as many rows as the L2 holds. Why not all batches over one tile
// of rows: the L1 does not hold all tokens. The last batch begins earlier if it would be smaller. The R rows of a tile
// are spread over the thread's share: memory comes as R streams that do not end with a row; one has 0.7 of the speed.
template <int T, class Number, class Input>
void linear_streams(Cpu &m, const Number *weight, const Input *x, int count, const Product &product, Into how) {
    const int64_t inputs = product.linear.weight.cols;
    const Share share = m.share(product.linear.weight.rows);
    // As many rows as leave T R sums, and all else, in registers.
    constexpr int R = T < 4 || (many_registers && T < 7) ? streams : T < 5 || many_registers ? 3 : 2;
    const int apart = share.count() / R;
    // max(): a layer that reads another layer's rows has a K and V of no inputs.
    const int near = std::max(1, near_bytes / 4 / std::max(1, R * (int)inputs * (int)sizeof(Number)));
    const int batches = (int)pieces(count, T);
    const int64_t ahead = batches == 1 ? 2048 : near * inputs * (int64_t)sizeof(Number);
    float sums[T * R];
    auto multiply = [&](auto rows, int first, int last) {
        for (int next = 0; next < count; next += T) {
            const int begin = std::min(next, count - T);
            for (int64_t row = share.first + first; row < share.first + last; row++) {
                stream_tile<rows, T>(sums, weight + row * inputs, apart * inputs, x + begin * inputs, (int)inputs,
                                     ahead, batches, next / T);
                for (int t = next - begin; t < T; t++) put(product, how, begin + t, row, sums + t * rows, rows, apart);
            }
        }
    };
    for (int row = 0; row < apart; row += near)
        multiply(std::integral_constant<int, R>(), row, std::min(row + near, apart));
    multiply(std::integral_constant<int, 1>(), apart * R, share.count());
}

// ---- Many tokens: rows in the lanes --------------------------------------------------------------------------

// y of one matrix, whose rows are shared by the threads. As many panels of rows as the L2 holds are transposed, then
// multiplied by all tokens, tile by tile; meanwhile the rows of the next panels come from memory.
template <class Number>
void linear_panels(Cpu &m, const Number *weight, const Tiles &x, const Product &product, Into how) {
    const int64_t outputs = product.linear.weight.rows;
    const Share share = m.share(pieces(outputs, lanes));
    const int64_t end_row = std::min(share.last * lanes, outputs);
    const int64_t apart = (int64_t)(x.steps + 1) * panel_rows, panel_size = apart * lanes;
    const int64_t near = std::max<int64_t>(1, near_bytes / (panel_size * (int)sizeof(float)));
    const int ahead_bytes = panel_rows * (int)sizeof(Number) / x.tiles;
    thread_local Floats panels;
    panels.resize(near * panel_size);
    auto at = [&](int64_t i) { return Transposed{panels.data() + i * panel_size, apart, panel_rows}; };
    for (int64_t row = share.first * lanes; row < end_row && !interrupted(); row += near * panel_rows) {
        const int64_t stop = std::min(row + near * panel_rows, end_row);
        for (int64_t r = row; r < stop; r += lanes)
            transpose(at((r - row) / panel_rows), (int)(r - row) % panel_rows, weight + r * x.channels, x.channels,
                 (int)std::min<int64_t>(lanes, stop - r), x.channels);
        auto multiply = [&](auto size, int tile) {
            alignas(cache_line) float sums[size * panel_rows];
            for (int64_t r = row; r < stop; r += panel_rows) {
                const Number *next = weight + (r + near * panel_rows) * x.channels;
                for (int t = 0; t < size; t++) {  // else results wait for the old contents of their cache lines
                    const float *y = product.y + (x.first(tile) + t) * outputs + r;
                    __builtin_prefetch(y, 1), __builtin_prefetch(y + lanes, 1);
                }
                panel_tile<Number, size>(sums, at((r - row) / panel_rows), x.at(tile), x.steps,
                                         (const char *)next + (int64_t)tile * ahead_bytes * x.channels, ahead_bytes);
                auto put_rows = [&](int rows) {
                    for (int t = 0; t < size; t++) put(product, how, x.first(tile) + t, r, sums + t * panel_rows, rows);
                };
                stop - r >= panel_rows ? put_rows(panel_rows) : put_rows((int)(stop - r));
            }
        };
        for (int tile = 0; tile < x.tiles && !interrupted(); tile++)
            in_batches<tile_vectors>(x.first(tile + 1) - x.first(tile), [&](auto size, int) { multiply(size, tile); });
    }
}

// ---- Int8 weights (formats.h) ------------------------------------------------------------------------------------

struct Int8Group {  // of a token
    float scale;
    int total;
    Int8x4 four[int8_group / 4];
};

// sums (T, P, int8_rows) = P panels of rows, `apart` blocks from one to the next, times T tokens, group after group.
template <int P, int T>
__attribute__((flatten)) void int8_tile(float *sums, const Int8Block *blocks, size_t apart, const Int8Group *x,
                                        int64_t groups) {
    constexpr int vecs = int8_rows / lanes;
    Vec totals[T * P * vecs];
    unrolled<T * P * vecs>([&](auto i) { totals[i] = set(0); });
    for (int64_t g = 0; g < groups; g++) {
        Ints products[T * P * vecs];
        unrolled<T * P * vecs>([&](auto i) { products[i] = begin_products(x[i / (P * vecs) * groups + g].total); });
        unrolled<int8_group / 4>([&](auto step) {
            unrolled<P>([&](auto p) {
                const auto *weights = blocks[p * apart + g].weight[step];
                if (T == 1 && prefetch_distance)  // the L2 can wait for more requests at a time than the L1
                    __builtin_prefetch((const char *)weights + 2 * prefetch_distance, 0, 2),
                        __builtin_prefetch((const char *)weights + prefetch_distance);
                unrolled<T * vecs>([&](auto i) {
                    Ints &sum = products[(i / vecs * P + p) * vecs + i % vecs];
                    sum = add_products(sum, weights + i % vecs * lanes, x[i / vecs * groups + g].four[step]);
                });
            });
        });
        unrolled<T * P * vecs>([&](auto i) {
            Vec scale = load(blocks[i / vecs % P * apart + g].scale + i % vecs * lanes);
            totals[i] = fma(to_floats(products[i]), mul(scale, set(x[i / (P * vecs) * groups + g].scale)), totals[i]);
        });
    }
    unrolled<T * P * vecs>([&](auto i) { store(sums + i * lanes, totals[i]); });
}

// y of one matrix; threads share its panels. For one token a thread reads four streams, for more two panels at a time.
inline void linear_int8(Cpu &m, const Int8Group *x, int count, const Product &product, Into how) {
    constexpr int most_tokens = 4, block = 2;
    const int64_t outputs = product.linear.weight.rows, groups = int8_groups(product.linear.weight.cols);
    const Int8Block *blocks = (const Int8Block *)product.linear.weight.data;
    const Share share = m.share(int8_panels(outputs));
    auto compute = [&](auto panels, auto size, int64_t panel, int apart, int t) {
        float sums[size * panels * int8_rows];
        int8_tile<panels, size>(sums, blocks + panel * groups, apart * groups, x + t * groups, groups);
        for (int i = 0; i < size * panels; i++) {
            int64_t row = (panel + i % panels * apart) * int8_rows;
            put(product, how, t + i / panels, row, sums + i * int8_rows,
                (int)std::min<int64_t>(int8_rows, outputs - row));
        }
    };
    std::integral_constant<int, 1> one;
    const int apart = share.count() / streams;
    int64_t panel = share.first;
    if (count == 1) {
        for (; panel < share.first + apart; panel++)
            compute(std::integral_constant<int, streams>(), one, panel, apart, 0);
        panel = share.first + apart * streams;
    }
    for (; panel < share.last && !interrupted(); panel += block)
        in_batches<most_tokens>(count, [&](auto size, int t) {
            for (int64_t p = panel; p < std::min(panel + block, share.last); p++) compute(one, size, p, 0, t);
        });
}

// Returns the tokens as groups of int8 numbers, (count, groups); threads share the work.
inline const Int8Group *int8_inputs(Cpu &m, const float *x, int count, int64_t inputs) {
    const int64_t groups = int8_groups(inputs);
    Int8Group *numbers = m.shared<Int8Group>(count * groups);
    m.for_each(count * groups, [&](int64_t item, Alone) {
        int64_t first = item % groups * int8_group;
        int8_t rounded[int8_group];
        Int8Group &group = numbers[item];
        group.scale =
            quantize(rounded, x + item / groups * inputs + first, (int)std::min<int64_t>(int8_group, inputs - first));
        group.total = 0;
        for (int i = 0; i < int8_group; i++) {
            group.total += rounded[i];
            group.four[i / 4].number[i % 4] = rounded[i];
            group.four[i / 4].magnitude[i % 4] = (uint8_t)std::abs(rounded[i]);
        }
    });
    return numbers;
}

// y (count, outputs) = or += W x + bias for each of the products; x (count, inputs).
void linear(Cpu &m, const float *x, int count, std::initializer_list<Product> products, Into how) {
    const Tensor &first = products.begin()->linear.weight;
    const int inputs = (int)first.cols;
    const bool pairs = multiplies_pairs && first.type == DType::bf16_pairs;
    auto each = [&](auto use) {
        for (const Product &product : products) {
            if constexpr (multiplies_pairs)
                if (pairs) use((const paired_bf16 *)product.linear.weight.data, product);
            if (!pairs) with_numbers(product.linear.weight, [&](auto *numbers) { use(numbers, product); });
        }
    };
    if (first.type == DType::int8) {
        const Int8Group *numbers = int8_inputs(m, x, count, first.cols);
        for (const Product &product : products) linear_int8(m, numbers, count, product, how);
    } else if (count > few_tokens(first.type)) {
        Tiles tokens(count, inputs, pairs ? 2 : 1);
        tokens.numbers = m.shared<float>(tokens.floats());
        m.for_each(tokens.tiles, [&](int64_t tile, Alone) {
            pairs ? tokens.fill((int)tile, x, rounded) : tokens.fill((int)tile, x, [](auto *p, int64_t) { return p; });
        });
        each([&](auto *numbers, const Product &product) { linear_panels(m, numbers, tokens, product, how); });
    } else {
        // The size of a batch with which the fewest tokens are computed twice, the largest of equals. With 16 lanes,
        // eight long tokens in f32 do not fit the L1 together with their rows.
        const bool large = lanes == 16 && !pairs && inputs > 1024;
        int batch = std::min(count, large ? 6 : stream_tokens);
        for (int size = batch - 1; size > 3; size--)
            if (pieces(count, size) * size < pieces(count, batch) * batch) batch = size;
        in_batches<stream_tokens>(batch, [&](auto size, int) {
            each([&](auto *numbers, const Product &p) {
                if constexpr (std::is_same_v<decltype(numbers), const paired_bf16 *>)
                    linear_streams<size>(m, numbers, rounded(x, (int64_t)count * inputs), count, p, how);
                else
                    linear_streams<size>(m, numbers, x, count, p, how);
            });
        });
    }
    m.wait();
}

// Seconds for many products of registers of Numbers, the least of five tries; enough chains hide a product's latency.
template <class Number>
double product_seconds() {
    constexpr int chains = 12, rounds = 20000;
    const Vec one = set(bit_cast<float>(per_lane<Number> == 2 ? 0x3f803f80u : 0x3f800000u));
    double least = INFINITY;
    float total = 0;  // read at the end, so that the compiler keeps the sums
    for (int i = 0; i < 5; i++) {
        Vec sums[chains];
        unrolled<chains>([&](auto c) { sums[c] = set(c); });
        const double start = now();
        for (int round = 0; round < rounds; round++)
            unrolled<chains>([&](auto c) { sums[c] = add_product<Number>(one, one, sums[c]); });
        unrolled<chains>([&](auto c) { total += sum(sums[c]); });
        least = std::min(least, now() - start);
    }
    return total > 0 ? least : NAN;
}

// How many times as fast products of pairs are, 0 without the instruction. Measured, as it is 0.5 on some, 2 on others.
double pairs_gain() { return multiplies_pairs ? 2 * product_seconds<float>() / product_seconds<paired_bf16>() : 0; }

// out = silu(gate) * up, or gelu(gate) * up; `out` may be `gate`.
void swiglu(Cpu &m, float *out, const float *gate, const float *up, int64_t count, bool gelu) {
    constexpr int piece = 256;
    m.for_each((count + piece - 1) / piece, [=](int64_t item, Alone) {
        const int64_t end = std::min(count, (item + 1) * piece);
        for (int64_t i = item * piece; i < end; i += lanes) {
            int rest = (int)std::min<int64_t>(lanes, end - i);
            Vec x = rest == lanes ? load(gate + i) : load_part(gate + i, rest);
            Vec y = rest == lanes ? load(up + i) : load_part(up + i, rest);
            Vec z = gelu ? mul(x, fma(set(0.071354814f), mul(x, x), set(1.5957691f))) : x;
            Vec result = mul(div(x, add(set(1), exp(mul(max(set(-88), z), set(-1))))), y);
            rest == lanes ? store(out + i, result) : store_part(out + i, result, rest);
        }
    });
}

}  // namespace fast
