// Matrix products on the CPU: the twin of plain::linear.
//
// One order of sums (simd.h): a product of a row and a token is the same to the last bit however many rows, tokens and
// threads it is computed among. Two things are left to choose, where the numbers come from and in which order tiles of
// rows x tokens are gone through:
//   few tokens: memory is what counts. Rows are read as stored, each once, as four streams.
//   many: multiply-adds are. Blocks of tokens x rows x channels that the caches hold, the weights of a block widened to
//   float32 once, and the lanes of sums that the channels of a block do not finish kept from one block to the next.
// What that was predicted and measured to give: docs/where_the_time_goes.md.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <type_traits>
#include <utility>

#include "../layers.cu"
#include "simd.h"

namespace fast {

// The tile of sums that stays in registers, beside a token's numbers and a row's: of 32 registers, or of 16.
constexpr bool many_registers = HWY_ARCH_ARM || lanes == 16;
constexpr int tile_rows = many_registers ? 8 : 4, tile_tokens = 3;
constexpr int streams = 4, few_tokens = many_registers ? 6 : 3;  // a tile of these, where rows come from memory

// sums (T, R) = R rows, `stride` numbers apart, times T tokens, over some channels. Lanes of sums that were begun in
// other channels come from `partial` (T, R, lanes), and those that go on there, go to it.
template <int R, int T, bool from_memory, class Number>
__attribute__((flatten)) void tile(float *sums, float *partial, bool first, bool last, const Number *rows,
                                   size_t stride, const float *x, size_t x_stride, int channels) {
    Vec totals[T * R];
    unrolled<T * R>([&](auto i) { totals[i] = first ? set(0) : load(partial + i * lanes); });
    auto add_products = [&](int c) {
        Vec token[T];
        unrolled<T>([&](auto t) { token[t] = load(x + t * x_stride + c); });
        unrolled<R>([&](auto r) {
            Vec row = load(rows + r * stride + c);
            unrolled<T>([&](auto t) { totals[t * R + r] = fma(row, token[t], totals[t * R + r]); });
        });
    };
    constexpr int line = cache_line / (int)sizeof(Number);
    int c = 0;
    if (from_memory) {
        for (; c + line <= channels; c += line) {
            unrolled<R>([&](auto r) { prefetch_twice(rows + r * stride + c); });
            unrolled<line / lanes>([&](auto i) { add_products(c + i * lanes); });
        }
    }
    for (; c + lanes <= channels; c += lanes) add_products(c);
    if (!last) return unrolled<T * R>([&](auto i) { ::store(partial + i * lanes, totals[i]); });
    constexpr int fours = T * R / 4 * 4;
    unrolled<T * R / 4>(
        [&](auto i) { sum4(sums + 4 * i, totals[4 * i], totals[4 * i + 1], totals[4 * i + 2], totals[4 * i + 3]); });
    unrolled<T * R - fours>([&](auto i) { sums[fours + i] = sum(totals[fours + i]); });
    for (int i = 0; c < channels && i < T * R; i++) {
        Vec row = load_part(rows + i % R * stride + c, channels - c);
        sums[i] += sum(mul(row, load_part(x + i / R * x_stride + c, channels - c)));
    }
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
    float sums[T * streams];
    auto compute = [&](auto rows, int first) {
        tile<rows, T, true>(sums, nullptr, true, true, weight + (share.first + first) * inputs, apart * inputs, x,
                            inputs, (int)inputs);
        for (int i = 0; i < T * rows; i++)
            put(product, how, i / rows, share.first + first + i % rows * apart, sums + i, 1);
    };
    for (int r = 0; r < apart; r++) compute(std::integral_constant<int, streams>(), r);
    for (int r = apart * streams; r < share.count(); r++) compute(std::integral_constant<int, 1>(), r);
}

// Many. Threads share the blocks of tokens x rows.
constexpr int block_tokens = 126, block_channels = 768;
template <class Number>
void linear_blocks(Cpu &m, const Number *weight, const float *x, int count, const Product &product, Store how) {
    auto parts = [](int64_t whole, int64_t most, int64_t unit) {  // of equal size, but for the last
        int64_t pieces = (whole + most - 1) / most, size = (whole + pieces - 1) / pieces;
        return (int)((size + unit - 1) / unit * unit);
    };
    const int64_t outputs = product.linear.weight.rows, inputs = product.linear.weight.cols;
    const int tokens = parts(count, block_tokens, tile_tokens), depth = parts(inputs, block_channels, lanes);
    const int64_t row_blocks = (outputs + tile_rows - 1) / tile_rows;
    thread_local Floats wide, partial;
    wide.resize(tile_rows * block_channels);
    partial.resize((size_t)block_tokens * tile_rows * lanes);
    const Share share = m.share((count + tokens - 1) / tokens * row_blocks);
    for (int64_t item = share.first; item < share.last; item++) {
        const int64_t begin = item / row_blocks * tokens, row = item % row_blocks * tile_rows;
        const int rows = (int)std::min<int64_t>(tile_rows, outputs - row);
        for (int64_t c = 0; c < inputs; c += depth) {
            const int channels = (int)std::min<int64_t>(depth, inputs - c);
            for (int r = 0; r < rows; r++) {
                const Number *from = weight + (row + r) * inputs + c;
                int i = 0;
                for (; i + lanes <= channels; i += lanes) ::store(&wide[r * depth + i], load(from + i));
                for (; i < channels; i++) wide[r * depth + i] = to_float(from[i]);
            }
            const bool last = c + channels == inputs;
            in_batches<tile_tokens>((int)std::min<int64_t>(tokens, count - begin), [&](auto size, int t) {
                float sums[size * tile_rows];
                tile<tile_rows, size, false>(sums, &partial[(size_t)t * tile_rows * lanes], c == 0, last, wide.data(),
                                             depth, x + (begin + t) * inputs + c, inputs, channels);
                for (int i = 0; last && i < size; i++)
                    put(product, how, begin + t + i, row, sums + i * tile_rows, rows);
            });
        }
    }
}

// ---- Int8 weights (formats.h) ------------------------------------------------------------------------------------

struct Int8Group {  // of a token
    float scale;
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
        unrolled<T * P * vecs>([&](auto i) { products[i] = to_ints(set(0)); });
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
    unrolled<T * P * vecs>([&](auto i) { ::store(sums + i * lanes, totals[i]); });
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
    for (; panel < share.last; panel += block)
        in_batches<most_tokens>(count, [&](auto size, int t) {
            for (int64_t p = panel; p < std::min(panel + block, share.last); p++) compute(one, size, p, 0, t);
        });
}

// The tokens as products with int8 weights read them; threads share the groups.
inline const Int8Group *int8_inputs(Cpu &m, const float *x, int count, int64_t inputs) {
    static Aligned<Int8Group> numbers;  // of the team: there is one at a time
    const int64_t groups = int8_groups(inputs);
    if (numbers.size() < (size_t)(count * groups)) {
        m.wait();
        if (m.index() == 0) numbers.resize(count * groups);
        m.wait();
    }
    m.for_each(count * groups, [&](int64_t item, Alone) {
        int64_t first = item % groups * int8_group;
        int8_t rounded[int8_group];
        Int8Group &group = numbers[item];
        group.scale =
            quantize(rounded, x + item / groups * inputs + first, (int)std::min<int64_t>(int8_group, inputs - first));
        for (int i = 0; i < int8_group; i++) {
            group.four[i / 4].number[i % 4] = rounded[i];
            group.four[i / 4].magnitude[i % 4] = (uint8_t)std::abs(rounded[i]);
        }
    });
    return numbers.data();
}

// y (count, outputs) = or += W x + bias for each of some matrices; x (count, inputs).
inline void linear(Cpu &m, const float *x, int count, std::initializer_list<Product> products, Store how = Store::set) {
    const Int8Group *int8 = nullptr;
    for (const Product &product : products) {
        const Tensor &weight = product.linear.weight;
        if (weight.type == DType::int8) {
            if (!int8) int8 = int8_inputs(m, x, count, weight.cols);
            linear_int8(m, int8, count, product, how);
        } else if (count > few_tokens) {
            with_numbers(weight, [&](auto *numbers) { linear_blocks(m, numbers, x, count, product, how); });
        } else {
            with_numbers(weight, [&](auto *numbers) {
                in_batches<few_tokens>(count,
                                       [&](auto size, int) { linear_streams<size>(m, numbers, x, product, how); });
            });
        }
    }
    m.wait();
}

}  // namespace fast
