// Products of many rows with many vectors: of a matrix with tokens (linear.cpp), of keys with queries (attend.cpp).
// With a row in each lane no sum has to be folded within a register, and a number of a vector serves two registers of
// rows. The sums are those of simd.h to the last bit.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace fast {

// A tile of sums stays in registers, beside the numbers that it reads: of 32 registers, or of 16.
constexpr bool many_registers = HWY_ARCH_ARM || lanes == 16;
constexpr int panel_rows = 2 * lanes, tile_vectors = many_registers ? 12 : 6;

inline int64_t pieces(int64_t items, int64_t each) { return (items + each - 1) / each; }

// Alone, a token's product has in lane j of 8 the sum of channels j, j + 8, j + 16, ...: residue j. Lanes are folded in
// halves: 0 + 4, 2 + 6, 1 + 5, 3 + 7, then the first two of these and the others, then both. With rows in the lanes, a
// row's residues come one after the other, and in the order 0 4 2 6 1 5 3 7, of reversed bits, each is folded with what
// came just before: unfinished sums wait on a stack of as many tiles as there are halvings.
constexpr int reversed(int lane) {
    int result = 0;
    for (int bit = 1; bit < lanes; bit *= 2) result = 2 * result + (lane & bit ? 1 : 0);
    return result;
}

// Rows or tokens, turned: the residues in that order, `apart` numbers from one another; in each its steps (channel j,
// then j + lanes, ...), and in each step `width` numbers, one of each row.
struct Turned {
    float *numbers;
    int64_t apart;
    int width;
};

// Up to `lanes` rows, `stride` numbers from one another, become the numbers `first` and following of each step. Zeros
// make the channels whole Vecs, as they do for one token. Numbers of 16 bits are turned as pairs, in half the time.
// What is written behind `width` is overwritten by the next step, and by rows before these, which come after them; so a
// residue has `lanes` numbers more than its steps.
template <class Number>
__attribute__((flatten)) void turn(const Turned &to, int first, const Number *from, int64_t stride, int rows,
                                   int channels) {
    constexpr int together = 4 / sizeof(Number), block = together * lanes, parts = together / per_lane<Number>;
    Number copy[lanes * block] = {};  // of rows or channels that are not whole
    for (int c = 0; c < channels; c += block) {
        const int rest = std::min(block, channels - c);
        const bool whole = rows >= lanes && rest == block;
        if (rest < block) memset(copy, 0, sizeof copy);
        for (int r = 0; !whole && r < rows; r++)
            memcpy(copy + r * block, from + c + r * stride, rest * sizeof(Number));
        float *out = to.numbers + (int64_t)(c / block) * parts * to.width + first;
        unrolled<lanes / 4>([&](auto four) {
            Vec words[4];
            load_turned(words, (whole ? from + c : copy) + four * 4 * together, whole ? stride : block);
            unrolled<4 * parts>([&](auto i) {
                constexpr int place = four * 4 * parts + i;  // a channel of the block, or a pair of them
                store(out + reversed(place % lanes) * to.apart + place / lanes * to.width,
                      number_in<Number>(words[i / parts], std::integral_constant<int, i % parts>()));
            });
        });
    }
}

// Vectors (count, channels), turned: tiles of as equal a number of them as can be. `numbers` has room for floats().
struct Tiles {
    int count, channels, steps, tiles, size;  // vectors of the largest tile
    int64_t apart;
    float *numbers = nullptr;
    explicit Tiles(int count, int channels, int per_lane = 1)
        : count(count),
          channels(channels),
          steps((int)pieces(channels, lanes * per_lane)),
          tiles((int)pieces(count, tile_vectors)),
          size((int)pieces(count, tiles)),
          apart((int64_t)steps * size + lanes) {}
    size_t floats() const { return (size_t)tiles * lanes * apart; }
    int first(int tile) const { return (int)((int64_t)tile * count / tiles); }
    Turned at(int tile) const { return {numbers + tile * lanes * apart, apart, size}; }
    // as_read(p, n): n numbers from p on, in the type in which products read them.
    template <class AsRead>
    void fill(int tile, const float *vectors, AsRead as_read) const {
        for (int i = (size - 1) / lanes * lanes; i >= 0; i -= lanes) {  // the last first: see turn()
            const int v = first(tile) + i, some = std::min(lanes, count - v);
            turn(at(tile), i, as_read(vectors + (int64_t)v * channels, (int64_t)some * channels), channels, some,
                 channels);
        }
    }
};

// sums (T, panel_rows) = a panel of rows times T vectors. Meanwhile the next tile of vectors is asked for, and what
// lies `ahead`: some bytes for each step.
template <class Number, int T, class Steps>
__attribute__((flatten)) void panel_tile(float *sums, const Turned &panel, const Turned &vectors, Steps steps,
                                         const char *ahead, int ahead_bytes) {
    constexpr int vecs = 2 * T;
    alignas(cache_line) float stack[4][vecs * lanes];
    for (int i = 0, depth = 0; i < lanes; i++) {
        Vec totals[vecs];
        unrolled<vecs>([&](auto v) { totals[v] = set(0); });
        const float *row = panel.numbers + i * panel.apart, *vector = vectors.numbers + i * vectors.apart;
        for (int step = 0; step < steps; step++) {
            __builtin_prefetch(ahead, 0, 2);
            __builtin_prefetch(vector + lanes * vectors.apart, 0, 2);
            Vec low = load(row), high = load(row + lanes);
            unrolled<T>([&](auto t) {
                Vec number = set(vector[t]);
                totals[2 * t] = add_product<Number>(low, number, totals[2 * t]);
                totals[2 * t + 1] = add_product<Number>(high, number, totals[2 * t + 1]);
            });
            row += panel_rows, vector += vectors.width, ahead += ahead_bytes;
        }
        for (int folds = i; folds & 1; folds >>= 1) {  // each one at the end of the number is a fold
            depth--;
            unrolled<vecs>([&](auto v) { totals[v] = add(load(stack[depth] + v * lanes), totals[v]); });
        }
        float *to = i == lanes - 1 ? sums : stack[depth++];
        unrolled<vecs>([&](auto v) { store(to + v * lanes, totals[v]); });
    }
}

}  // namespace fast
