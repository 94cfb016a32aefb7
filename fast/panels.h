// Products of many rows with many vectors: a matrix with tokens (linear.cpp), keys with queries (attend.cpp). With a
// row in each lane no sum is folded within a register, and one number of a vector serves two registers. The sums
// have the same bits as those of simd.h.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace fast {

// A tile of sums stays in registers, next to the numbers that it reads: there are 32 registers, or 16.
constexpr bool many_registers = HWY_ARCH_ARM || lanes == 16;
constexpr int panel_rows = 2 * lanes, tile_vectors = many_registers ? 12 : 6;

inline int64_t pieces(int64_t items, int64_t each) { return (items + each - 1) / each; }

// One token alone has residue j in lane j of 8: the sum of channels j, j + 8, j + 16, ... Then the lanes are folded in
// halves: 0 + 4, 1 + 5, 2 + 6, 3 + 7; these in halves again; then the last two. With rows in the lanes, the residues of
// a row come one after the other, in an order that gives the same folds:
//
//   residue   0   4   2   6   1   5   3   7    0 .. 7 with their three bits reversed
//             +-+-+   +-+-+   +-+-+   +-+-+    every second residue is folded with the one before it
//               +---+---+       +---+---+      every fourth then with the two before these
//                   +-------+-------+          the eighth then with the first four
//   waiting   1   1   2   1   2   2   3        sums on the stack, each a tile, until they are folded
constexpr int reversed(int lane) {
    int result = 0;
    for (int bit = 1; bit < lanes; bit *= 2) result = 2 * result + (lane & bit ? 1 : 0);
    return result;
}

// Rows or tokens, transposed: (residue in that order, step, width). Step i of residue j is channel j + i * lanes of
// `width` rows. From one residue to the next it is `apart` numbers.
struct Transposed {
    float *numbers;
    int64_t apart;
    int width;
};

// Transposes up to `lanes` rows, `stride` numbers apart, into the numbers from `first` on of each step. Zeros fill up
// the last Vec of channels, as for one token. 16-bit numbers move in pairs, in half the time. A step's numbers past
// `width` are overwritten by the next step, so the last rows come first, and a residue ends with `lanes` spare numbers.
template <class Number>
__attribute__((flatten)) void transpose(const Transposed &to, int first, const Number *from, int64_t stride, int rows,
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
            load_transposed(words, (whole ? from + c : copy) + four * 4 * together, whole ? stride : block);
            unrolled<4 * parts>([&](auto i) {
                constexpr int place = four * 4 * parts + i;  // a channel of the block, or a pair of them
                store(out + reversed(place % lanes) * to.apart + place / lanes * to.width,
                      number_in<Number>(words[i / parts], std::integral_constant<int, i % parts>()));
            });
        });
    }
}

// Vectors (count, channels), transposed in tiles of nearly equal size. `numbers` has room for floats().
struct Tiles {
    int count, channels, steps, tiles, size;  // size: vectors of the largest tile
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
    Transposed at(int tile) const { return {numbers + tile * lanes * apart, apart, size}; }
    // Transposes the vectors of a tile; as_read(p, n) returns n numbers from p on in the type that products read.
    template <class AsRead>
    void fill(int tile, const float *vectors, AsRead as_read) const {
        for (int i = (size - 1) / lanes * lanes; i >= 0; i -= lanes) {
            const int v = first(tile) + i, some = std::min(lanes, count - v);
            const auto *from = as_read(vectors + (int64_t)v * channels, (int64_t)some * channels);
            transpose(at(tile), i, from, channels, some, channels);
        }
    }
};

// sums (T, panel_rows) = a panel of rows times T vectors. Meanwhile prefetches the next tile of vectors, and the memory
// from `ahead` on: ahead_bytes for each step.
template <class Number, int T, class Steps>
__attribute__((flatten)) void panel_tile(float *sums, const Transposed &panel, const Transposed &vectors, Steps steps,
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
        for (int folds = i; folds & 1; folds >>= 1) {  // a fold for each 1 at the end of the number's bits
            depth--;
            unrolled<vecs>([&](auto v) { totals[v] = add(load(stack[depth] + v * lanes), totals[v]); });
        }
        float *to = i == lanes - 1 ? sums : stack[depth++];
        unrolled<vecs>([&](auto v) { store(to + v * lanes, totals[v]); });
    }
}

}  // namespace fast
