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

// The tile of sums that stays in registers, beside the numbers of its tokens and of a row: of 32 registers, or of 16.
constexpr bool many_registers = HWY_ARCH_ARM || lanes == 16;
constexpr int tile_rows = many_registers ? 8 : 6, tile_tokens = many_registers ? 3 : 2;
constexpr int streams = 4, few_tokens = many_registers ? 6 : 3;  // a tile of these, where rows come from memory

// Numbers that a tile reads, a Vec of row or token i from channel c on: as they lie in a matrix, `stride` apart; or N
// of them copied side by side, Vec for Vec.
template <class Number>
struct Strided {
    const Number *start;
    int64_t stride;
    Vec at(int i, int c) const { return load(start + i * stride + c); }
    Vec part(int i, int c, int count) const { return load_part(start + i * stride + c, count); }
    // Where the processor's prefetcher is better off unasked (simd.h), numbers of 16 bits are asked for all the same: a
    // line of them takes so many instructions that few lines are begun before the first is there.
    void ask(int i, int c) const {
        const Number *p = start + i * stride + c;
        if (prefetch_distance || sizeof(Number) > 2)
            prefetch_twice(p);
        else
            __builtin_prefetch((const char *)p + 384);
    }
};
template <int N>
struct SideBySide {
    const float *start;
    Vec at(int i, int c) const { return load(start + c * N + i * lanes); }
    void ask(int i, int c) const { prefetch(start + c * N + i * lanes); }
};

// sums (T, R) = R rows times T tokens, over some channels. Lanes of sums that were begun in other channels come from
// `partial` (T, R, lanes), and those that go on there, go to it.
template <int R, int T, int line, class Rows, class Tokens>
__attribute__((flatten)) void tile(float *sums, float *partial, bool first, bool last, Rows rows, Tokens tokens,
                                   int channels) {
    Vec totals[T * R];
    unrolled<T * R>([&](auto i) { totals[i] = first ? set(0) : load(partial + i * lanes); });
    auto add_products = [&](auto row_at, auto token_at) {
        Vec token[T];
        unrolled<T>([&](auto t) { token[t] = token_at(t); });
        unrolled<R>([&](auto r) {
            Vec row = row_at(r);
            unrolled<T>([&](auto t) { totals[t * R + r] = fma(row, token[t], totals[t * R + r]); });
        });
    };
    auto add_channels = [&](int c) {
        add_products([&](int r) { return rows.at(r, c); }, [&](int t) { return tokens.at(t, c); });
    };
    int c = 0;
    if constexpr (line > 0) {
        for (; c + line <= channels; c += line) {
            for (int r = 0; r < R; r++) rows.ask(r, c);  // no lambda: g++ takes one that does only this for useless
            unrolled<line / lanes>([&](auto i) { add_channels(c + i * lanes); });
        }
        for (; c + lanes <= channels; c += lanes) add_channels(c);
        const int rest = channels - c;
        if (rest > 0)
            add_products([&](int r) { return rows.part(r, c, rest); }, [&](int t) { return tokens.part(t, c, rest); });
    } else {
        for (; c < channels; c += lanes) {
            for (int t = 0; t < T; t++) tokens.ask(t, c);
            add_channels(c);
        }
    }
    if (!last) return unrolled<T * R>([&](auto i) { store(partial + i * lanes, totals[i]); });
    constexpr int fours = T * R / 4 * 4;
    unrolled<T * R / 4>(
        [&](auto i) { sum4(sums + 4 * i, totals[4 * i], totals[4 * i + 1], totals[4 * i + 2], totals[4 * i + 3]); });
    unrolled<T * R - fours>([&](auto i) { sums[fours + i] = sum(totals[fours + i]); });
}

// The results of a token with `count` rows from `row` on.
inline void put(const Product &product, Store how, int64_t token, int64_t row, const float *sums, int count) {
    const Tensor bias = product.linear.bias;
    float *y = product.y + token * product.linear.weight.rows + row;
    for (int i = 0; i < count; i++) {
        float result = bias.data ? sums[i] + number_of(bias, row + i) : sums[i];
        y[i] = how == Store::add ? y[i] + result : result;
    }
}

// Few tokens. The rows of a tile lie a fourth of the thread's share apart, so that memory is read as four streams that
// do not end with a row: as one, it comes at 0.7 of the speed.
template <int T, class Number>
void linear_streams(Cpu &m, const Number *weight, const float *x, const Product &product, Store how) {
    const int64_t inputs = product.linear.weight.cols;
    const Share share = m.share(product.linear.weight.rows);
    const int apart = share.count() / streams;
    thread_local Floats out;  // (T, rows of the share)
    out.resize((size_t)T * share.count());
    float sums[T * streams];
    auto compute = [&](auto rows, int first) {
        tile<rows, T, cache_line / (int)sizeof(Number)>(
            sums, nullptr, true, true, Strided<Number>{weight + (share.first + first) * inputs, apart * inputs},
            Strided<float>{x, inputs}, (int)inputs);
        for (int i = 0; i < T * rows; i++) out[i / rows * share.count() + first + i % rows * apart] = sums[i];
    };
    for (int r = 0; r < apart; r++) compute(std::integral_constant<int, streams>(), r);
    for (int r = apart * streams; r < share.count(); r++) compute(std::integral_constant<int, 1>(), r);
    for (int t = 0; t < T; t++) put(product, how, t, share.first, &out[t * (size_t)share.count()], share.count());
}

// ---- Many tokens ---------------------------------------------------------------------------------------------

// A number of items in equal parts of a multiple of `unit`, at most `most` each; the last may be smaller.
inline int part_of(int64_t items, int64_t most, int64_t unit) {
    int64_t parts = (items + most - 1) / most, each = (items + parts - 1) / parts;
    return (int)((each + unit - 1) / unit * unit);
}
inline int64_t pieces(int64_t items, int64_t each) { return (items + each - 1) / each; }

// x (count, inputs), copied: blocks of tokens, in them blocks of channels, in those tiles of tokens, side by side.
// Zeros make the channels whole Vecs.
constexpr int block_tokens = 96, block_channels = 576, block_rows = 8 * tile_rows, near_bytes = 2 << 20;
struct TokenBlocks {
    const float *numbers;
    int count, tokens, channels, inputs, padded;  // tokens and channels of a block
    TokenBlocks(Cpu &m, const float *x, int count, int inputs)
        : count(count),
          tokens(part_of(count, block_tokens, tile_tokens)),
          channels(part_of(inputs, block_channels, lanes)),
          inputs(inputs),
          padded((inputs + lanes - 1) / lanes * lanes) {
        float *to = m.shared<float>((size_t)count * padded);
        numbers = to;
        m.for_each(pieces(count, tile_tokens), [&](int64_t item, Alone) {
            int first = (int)item * tile_tokens, size = std::min(tile_tokens, count - first);
            for (int c = 0; c < padded; c += lanes) {
                float *vec = to + (at(first, c / channels * channels) - numbers) + c % channels * size;
                for (int t = 0; t < size; t++) {
                    const float *from = x + (size_t)(first + t) * inputs + c;
                    store(vec + t * lanes, c + lanes <= inputs ? load(from) : load_part(from, inputs - c));
                }
            }
        });
    }
    // The tile that starts with token t in the channels of the block that starts with c.
    const float *at(int t, int c) const {
        int block = t / tokens * tokens, size = std::min(tokens, count - block), depth = std::min(channels, padded - c);
        return numbers + (size_t)block * padded + (size_t)c * size + (size_t)(t - block) * depth;
    }
};

// wide = tile_rows rows of a matrix, side by side: those that there are, and the last of them for the others. Zeros
// make the channels whole Vecs.
template <class Number>
inline void widen(float *wide, const Number *weight, int rows, int64_t stride, int channels) {
    const Number *row[tile_rows];
    for (int r = 0; r < tile_rows; r++) row[r] = weight + std::min(r, rows - 1) * stride;
    int c = 0;
    for (; c + lanes <= channels; c += lanes)
        unrolled<tile_rows>([&](auto r) {
            __builtin_prefetch(row[r] + tile_rows * stride + c, 0, 2);
            store(wide + c * tile_rows + r * lanes, load(row[r] + c));
        });
    for (int r = 0; c < channels && r < tile_rows; r++)
        store(wide + c * tile_rows + r * lanes, load_part(row[r] + c, channels - c));
}

// Threads share the tiles of rows.
template <class Number>
void linear_blocks(Cpu &m, const Number *weight, const TokenBlocks &x, const Product &product, Store how) {
    const int64_t outputs = product.linear.weight.rows;
    // (channels, tile_rows); (block_rows, tokens, lanes); (tokens, block_rows): results leave a token's rows at a time.
    thread_local Floats wide, partials, out;
    wide.resize((size_t)tile_rows * x.channels);
    partials.resize((size_t)x.tokens * block_rows * lanes);
    out.resize((size_t)x.tokens * block_rows);
    // Tiles of tokens, from `begin` on, times the rows from `row` on, in some channels.
    auto multiply_block = [&](int64_t row, int in_block, int begin, int count, int c) {
        const int rows = (int)std::min<int64_t>(tile_rows, outputs - row),
                  channels = std::min(x.channels, x.inputs - c);
        const bool first = c == 0, last = c + channels == x.inputs;
        widen(wide.data(), weight + row * x.inputs + c, rows, x.inputs, channels);
        in_batches<tile_tokens>(count, [&](auto size, int t) {
            float sums[size * tile_rows];
            float *partial = &partials[((size_t)in_block * x.tokens + t * tile_rows) * lanes];
            tile<tile_rows, size, 0>(sums, partial, first, last, SideBySide<tile_rows>{wide.data()},
                                     SideBySide<size>{x.at(begin + t, c)}, channels);
            for (int i = 0; last && i < size; i++)
                memcpy(&out[(size_t)(t + i) * block_rows + in_block], sums + i * tile_rows, sizeof sums / size);
        });
    };
    const Share share = m.share(pieces(outputs, tile_rows));
    const int64_t first_row = share.first * tile_rows, end_row = std::min(share.last * tile_rows, outputs);
    // From the outside in: tokens that the L2 holds for all rows; then blocks of rows, of tokens, of channels, and
    // tiles.
    const int64_t near = std::max<int64_t>(1, near_bytes / (x.padded * (int)sizeof(float) * x.tokens)) * x.tokens;
    for (int64_t start = 0; start < x.count; start += near) {
        const int stop = (int)std::min<int64_t>(start + near, x.count);
        for (int64_t block = first_row; block < end_row; block += block_rows) {
            const int64_t end = std::min<int64_t>(block + block_rows, end_row);
            for (int begin = (int)start; begin < stop && !interrupted(); begin += x.tokens) {
                const int count = std::min(x.tokens, stop - begin);
                for (int c = 0; c < x.inputs; c += x.channels)
                    for (int64_t row = block; row < end; row += tile_rows)
                        multiply_block(row, (int)(row - block), begin, count, c);
                for (int t = 0; t < count; t++)
                    put(product, how, begin + t, block, &out[(size_t)t * block_rows], (int)(end - block));
            }
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
        TokenBlocks tokens(m, x, count, (int)first.cols);
        each([&](const Product &product) {
            with_numbers(product.linear.weight,
                         [&](auto *numbers) { linear_blocks(m, numbers, tokens, product, how); });
        });
    } else {
        each([&](const Product &product) {
            with_numbers(product.linear.weight, [&](auto *numbers) {
                in_batches<few_tokens>(count,
                                       [&](auto size, int) { linear_streams<size>(m, numbers, x, product, how); });
            });
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
