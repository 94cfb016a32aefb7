// Matrix products on the CPU: the twin of plain::linear.
//
// One order of sums (simd.h): a product of a row and a token is the same to the last bit however many rows, tokens and
// threads it is computed among. Two things are left to choose, where the numbers come from and in which order tiles of
// rows x tokens are gone through:
//   few tokens: memory is what counts. Rows are read as stored, each once, as four streams.
//   many: multiply-adds are. Blocks of tokens x rows x channels that the caches hold, the weights of a block widened to
//   float32 once, and the lanes of sums that the channels of a block do not finish kept from one block to the next.
// What that was predicted and measured to give: docs/where_the_time_goes.md.
#include <algorithm>
#include <initializer_list>
#include <type_traits>
#include <utility>

#include "../layers.cu"
#include "fast.h"
#include "simd.h"

namespace fast {

// A tile of sums stays in registers, beside the numbers that it reads: of 32 registers, or of 16.
constexpr bool many_registers = HWY_ARCH_ARM || lanes == 16;
constexpr int streams = 4, stream_tokens = many_registers ? 6 : 3;             // with channels in the lanes
constexpr int panel_rows = 2 * lanes, tile_tokens = many_registers ? 12 : 6;  // with rows in them
constexpr int few_tokens = 24;

inline int64_t pieces(int64_t items, int64_t each) { return (items + each - 1) / each; }

// The results of a token with `count` rows from `row` on. Each loop is one that the compiler turns into Vecs.
inline void put(const Product &product, Store how, int64_t token, int64_t row, float *sums, int count) {
    const Tensor bias = product.linear.bias;
    float *y = product.y + token * product.linear.weight.rows + row;
    for (int i = 0; bias.data && i < count; i++) sums[i] += number_of(bias, row + i);
    if (how == Store::add)
        for (int i = 0; i < count; i++) y[i] += sums[i];
    else
        memcpy(y, sums, (size_t)count * sizeof(float));
}

// ---- Few tokens: channels in the lanes -----------------------------------------------------------------------

template <int R, int T, class Number>
inline void add_products(Vec (&totals)[T * R], const Number *const (&rows)[R], const float *const (&tokens)[T],
                         int64_t c) {
    Vec row[R];
    unrolled<R>([&](auto r) { row[r] = load(rows[r] + c); });
    unrolled<T>([&](auto t) {
        Vec token = load(tokens[t] + c);
        unrolled<R>([&](auto r) { totals[t * R + r] = fma(row[r], token, totals[t * R + r]); });
    });
}

// sums (T, R) = R rows, `apart` numbers from one another, times T tokens. ask(p) is called for each line of the rows.
template <int R, int T, class Number, class Ask>
__attribute__((flatten)) void stream_tile(float *sums, const Number *weight, int64_t apart, const float *x,
                                          int channels, Ask ask) {
    constexpr int line = cache_line / (int)sizeof(Number);
    const Number *rows[R];
    const float *tokens[T];
    Vec totals[T * R];
    unrolled<R>([&](auto r) { rows[r] = weight + r * apart; });
    unrolled<T>([&](auto t) { tokens[t] = x + (int64_t)t * channels; });
    unrolled<T * R>([&](auto i) { totals[i] = set(0); });
    int64_t c = 0;
    for (; c + line <= channels; c += line) {
        for (int r = 0; r < R; r++) ask(rows[r] + c);  // no lambda: g++ takes one that does only this for useless
        unrolled<line / lanes>([&](auto i) { add_products<R, T>(totals, rows, tokens, c + i * lanes); });
    }
    for (; c + lanes <= channels; c += lanes) add_products<R, T>(totals, rows, tokens, c);
    if (c < channels) {  // copied, with zeros behind them
        Number row_ends[R * lanes] = {};
        float token_ends[T * lanes] = {};
        const size_t rest = (size_t)(channels - c);
        for (int r = 0; r < R; r++) memcpy(row_ends + r * lanes, rows[r] + c, rest * sizeof(Number));
        for (int t = 0; t < T; t++) memcpy(token_ends + t * lanes, tokens[t] + c, rest * sizeof(float));
        unrolled<R>([&](auto r) { rows[r] = row_ends + r * lanes; });
        unrolled<T>([&](auto t) { tokens[t] = token_ends + t * lanes; });
        add_products<R, T>(totals, rows, tokens, 0);
    }
    constexpr int fours = T * R / 4 * 4;
    unrolled<T * R / 4>(
        [&](auto i) { sum4(sums + 4 * i, totals[4 * i], totals[4 * i + 1], totals[4 * i + 2], totals[4 * i + 3]); });
    unrolled<T * R - fours>([&](auto i) { sums[fours + i] = sum(totals[fours + i]); });
}

// The rows of a tile lie a fourth of the thread's share apart, so that memory is read as four streams that do not end
// with a row: as one, it comes at 0.7 of the speed. More tokens than a tile holds come in equal batches, and find the
// rows of the first in the caches.
template <class Number>
void linear_streams(Cpu &m, const Number *weight, const float *x, int count, const Product &product, Store how) {
    const int64_t inputs = product.linear.weight.cols;
    const Share share = m.share(product.linear.weight.rows);
    const int apart = share.count() / streams, batches = (int)pieces(count, stream_tokens);
    thread_local Floats out;  // (count, rows of the share)
    out.resize((size_t)count * share.count());
    auto multiply = [&](auto rows, auto size, int first, int t, auto ask) {
        float sums[size * rows];
        stream_tile<rows, size>(sums, weight + (share.first + first) * inputs, apart * inputs, x + t * inputs,
                                (int)inputs, ask);
        for (int i = 0; i < size * rows; i++)
            out[(size_t)(t + i / rows) * share.count() + first + i % rows * apart] = sums[i];
    };
    // Where the processor's prefetcher is better off unasked (simd.h), numbers of 16 bits are asked for all the same: a
    // line of them takes so many instructions that few lines are begun before the first is there.
    auto ask = [](const Number *p) {
        if (prefetch_distance || sizeof(Number) > 2)
            prefetch_twice(p);
        else
            __builtin_prefetch((const char *)p + 384);
    };
    auto all_tokens = [&](auto rows, int first) {
        for (int b = 0; b < batches; b++) {
            const int t = b * count / batches, size = (b + 1) * count / batches - t;
            in_batches<stream_tokens>(size, [&](auto size, int) { multiply(rows, size, first, t, ask); });
        }
    };
    for (int r = 0; r < apart; r++) all_tokens(std::integral_constant<int, streams>(), r);
    for (int r = apart * streams; r < share.count(); r++) all_tokens(std::integral_constant<int, 1>(), r);
    for (int t = 0; t < count; t++)
        put(product, how, t, share.first, &out[(size_t)t * share.count()], share.count());
}

// ---- Many tokens: rows in the lanes --------------------------------------------------------------------------

constexpr int reversed(int lane) {  // its bits in the opposite order
    int result = 0;
    for (int bit = 1; bit < lanes; bit *= 2) result = 2 * result + (lane & bit ? 1 : 0);
    return result;
}

// Rows as tiles read them: for each residue `apart` numbers, in them for each step `width`, one of each row.
struct Turned {
    float *numbers;
    int64_t apart;
    int width;
};

// Up to `lanes` rows become lanes `first` and following of `to`. Zeros make their channels whole Vecs.
template <class Number>
__attribute__((flatten)) void turn(const Turned &to, int first, const Number *from, int64_t stride, int rows,
                                   int channels) {
    constexpr int together = 4 / sizeof(Number), block = together * lanes;
    Number copy[lanes * block] = {};
    for (int c = 0; c < channels; c += block) {
        const Number *start = from + c;
        int64_t apart = stride;
        if (c + block > channels) {
            memset(copy, 0, sizeof copy);
            for (int r = 0; r < rows; r++)
                memcpy(copy + r * block, start + r * stride, (size_t)(channels - c) * sizeof(Number));
            start = copy, apart = block;
        } else if (rows < lanes) {
            for (int r = 0; r < rows; r++) memcpy(copy + r * block, start + r * stride, block * sizeof(Number));
            start = copy, apart = block;
        }
        float *out = to.numbers + (int64_t)(c / lanes) * to.width + first;
        unrolled<lanes / 4>([&](auto four) {
            Vec words[4];
            load_turned(words, start + four * 4 * together, apart);
            unrolled<4 * together>([&](auto i) {
                constexpr int channel = four * 4 * together + i;
                store(out + reversed(channel % lanes) * to.apart + channel / lanes * to.width,
                      number_in<Number>(words[i / together], std::integral_constant<int, i % together>()));
            });
        });
    }
}

// The tokens, in tiles of equal size, turned.
struct Tiles {
    float *numbers;
    int count, inputs, steps, tiles, size;
    int64_t apart;
    int first(int tile) const { return (int)((int64_t)tile * count / tiles); }
    Turned at(int tile) const { return {numbers + tile * lanes * apart, apart, size}; }
    Tiles(Cpu &m, const float *x, int count, int inputs)
        : count(count),
          inputs(inputs),
          steps((int)pieces(inputs, lanes)),
          tiles((int)pieces(count, tile_tokens)),
          size((int)pieces(count, tiles)),
          apart((int64_t)steps * size + lanes) {
        numbers = m.shared<float>((size_t)tiles * lanes * apart);
        m.for_each(tiles, [&](int64_t tile, Alone) {
            for (int t = first((int)tile), i = 0; i < size; i += lanes)
                turn(at((int)tile), i, x + (int64_t)(t + i) * inputs, inputs, std::min(lanes, count - t - i), inputs);
        });
    }
};

// sums (T, panel_rows) = a panel of rows times T tokens.
template <int T>
__attribute__((flatten)) void panel_tile(float *sums, const Turned &panel, const Turned &tokens, int steps,
                                         const char *ahead, int ahead_step) {
    constexpr int vecs = 2 * T;
    alignas(64) float stack[4][vecs * lanes];
    for (int residue = 0, depth = 0; residue < lanes; residue++) {
        Vec totals[vecs];
        unrolled<vecs>([&](auto i) { totals[i] = set(0); });
        const float *row = panel.numbers + residue * panel.apart, *token = tokens.numbers + residue * tokens.apart;
        for (int step = 0; step < steps; step++, row += panel_rows, token += tokens.width, ahead += ahead_step) {
            __builtin_prefetch(ahead, 0, 2);
            __builtin_prefetch(token + lanes * tokens.apart, 0, 2);
            Vec low = load(row), high = load(row + lanes);
            unrolled<T>([&](auto t) {
                Vec number = set(token[t]);
                totals[2 * t] = fma(low, number, totals[2 * t]);
                totals[2 * t + 1] = fma(high, number, totals[2 * t + 1]);
            });
        }
        for (int folds = residue; folds & 1; folds >>= 1) {
            depth--;
            unrolled<vecs>([&](auto i) { totals[i] = add(load(stack[depth] + i * lanes), totals[i]); });
        }
        float *to = residue == lanes - 1 ? sums : stack[depth++];
        unrolled<vecs>([&](auto i) { store(to + i * lanes, totals[i]); });
    }
}

constexpr int near_bytes = 256 << 10;
template <class Number>
void linear_panels(Cpu &m, const Number *weight, const Tiles &x, const Product &product, Store how) {
    const int64_t outputs = product.linear.weight.rows;
    const Share share = m.share(pieces(outputs, lanes));
    const int64_t first_row = share.first * lanes, end_row = std::min(share.last * lanes, outputs);
    const int64_t apart = (int64_t)(x.steps + 1) * panel_rows, size = apart * lanes;
    const int64_t near = std::max<int64_t>(1, near_bytes / (size * (int)sizeof(float)));
    thread_local Floats panels;
    panels.resize(size * near);
    for (int64_t row = first_row; row < end_row && !interrupted(); row += near * panel_rows) {
        const int count = (int)std::min(near, pieces(end_row - row, panel_rows));
        auto at = [&](int i) { return Turned{panels.data() + i * size, apart, panel_rows}; };
        for (int i = 0; i < 2 * count; i++) {
            const int64_t first = row + i * lanes;
            turn(at(i / 2), i % 2 * lanes, weight + first * x.inputs, x.inputs,
                 (int)std::min<int64_t>(lanes, end_row - first), x.inputs);
        }
        for (int tile = 0; tile < x.tiles; tile++) {
            const int first = x.first(tile);
            in_batches<tile_tokens>(x.first(tile + 1) - first, [&](auto size, int) {
                for (int i = 0; i < count; i++) {
                    alignas(64) float sums[size * panel_rows];
                    const int64_t start = row + i * panel_rows;
                    const int ahead_step = panel_rows * (int)sizeof(Number) / x.tiles;
                    panel_tile<size>(sums, at(i), x.at(tile), x.steps,
                        (const char *)(weight + (start + count * panel_rows) * x.inputs) + (int64_t)tile * ahead_step * x.inputs, ahead_step);
                    for (int t = 0; t < size; t++)
                        put(product, how, first + t, start, sums + t * panel_rows,
                            (int)std::min<int64_t>(panel_rows, end_row - start));
                }
            });
        }
    }
}

// ---- Int8 weights (formats.h) ------------------------------------------------------------------------------------

struct Int8Group {  // of a token
    float scale;
    int total;
    Int8x4 four[int8_group / 4];
};

// sums (T, P, int8_rows) = P panels of rows, `apart` blocks from one another, times T tokens. Sums go group after
// group.
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
                if (T == 1) prefetch_twice(weights);
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

// Panels are shared by the threads: for one token each reads four streams of them, for more two stay in the caches.
inline void linear_int8(Cpu &m, const Int8Group *x, int count, const Product &product, Store how) {
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

// The tokens as products with int8 weights read them; threads share the groups.
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

// y (count, outputs) = or += W x + bias for each of some matrices; x (count, inputs).
void linear(Cpu &m, const float *x, int count, std::initializer_list<Product> products, Store how) {
    const Tensor &first = products.begin()->linear.weight;
    auto each = [&](auto use) {
        for (const Product &product : products) use(product);
    };
    if (first.type == DType::int8) {
        const Int8Group *numbers = int8_inputs(m, x, count, first.cols);
        each([&](const Product &product) { linear_int8(m, numbers, count, product, how); });
    } else if (count > few_tokens) {
        Tiles tokens(m, x, count, (int)first.cols);
        each([&](const Product &product) {
            with_numbers(product.linear.weight,
                         [&](auto *numbers) { linear_panels(m, numbers, tokens, product, how); });
        });
    } else {
        each([&](const Product &product) {
            with_numbers(product.linear.weight,
                         [&](auto *numbers) { linear_streams(m, numbers, x, count, product, how); });
        });
    }
    m.wait();
}

// out = silu(gate) * up; `out` may be `gate`.
void swiglu(Cpu &m, float *out, const float *gate, const float *up, int64_t count) {
    constexpr int piece = 256;
    m.for_each((count + piece - 1) / piece, [=](int64_t item, Alone) {
        const int64_t end = std::min(count, (item + 1) * piece);
        for (int64_t i = item * piece; i < end; i += lanes) {
            int rest = (int)std::min<int64_t>(lanes, end - i);
            Vec x = rest == lanes ? load(gate + i) : load_part(gate + i, rest);
            Vec y = rest == lanes ? load(up + i) : load_part(up + i, rest);
            Vec result = mul(div(x, add(set(1), exp(mul(max(set(-88), x), set(-1))))), y);
            rest == lanes ? store(out + i, result) : store_part(out + i, result, rest);
        }
    });
}

}  // namespace fast
