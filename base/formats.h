// Numbers as they are stored: 16-bit floats, int8 weights; and aligned memory for them. One number at a time: registers
// full of them are fast/simd.h's. Everything here runs on both machines.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#define CALLS_ITS_ARGUMENT _Pragma("nv_exec_check_disable")  // which may be for the host alone
#else
#define HOST_DEVICE
#define CALLS_ITS_ARGUMENT
#endif

template <class To, class From>
HOST_DEVICE inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// ---- Formats ----------------------------------------------------------------------------------------------

struct f16 {  // IEEE binary16: 1 sign, 5 exponent, 10 fraction bits; 6e-8 .. 65,504
    uint16_t bits;
};
struct bf16 {  // the upper half of a float32: 1 sign, 8 exponent, 7 fraction bits
    uint16_t bits;
};
struct paired_bf16 : bf16 {};  // of a row of weights whose products take two neighbours at a time (add_pair)

HOST_DEVICE inline float to_float(float x) { return x; }

HOST_DEVICE inline float to_float(bf16 x) { return bit_cast<float>((uint32_t)x.bits << 16); }

HOST_DEVICE inline float to_float(f16 x) {
#if defined(__CUDA_ARCH__)
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(x.bits));
    return number;
#else
    uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
    if (magnitude >= 0x7c00)  // infinity and NaN: exponent 31 becomes 255
        return bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    // Read with a float32 exponent the number is 2^(15 - 127) too small; the product is exact, denormals too.
    return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(magnitude << 13) * 0x1p112f));
#endif
}

HOST_DEVICE inline float to_float(int8_t x) { return x; }

HOST_DEVICE inline void from_float(float &to, float x) { to = x; }

// Rounds to nearest, ties to even. NaN stays NaN; what is too large becomes infinity.
HOST_DEVICE inline void from_float(bf16 &to, float x) {
    uint32_t bits = bit_cast<uint32_t>(x);
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    to.bits = nan ? (uint16_t)(bits >> 16 | 0x40) : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Whether this processor has an instruction for add_pair(). Whether it is a fast one, pairs_gain() measures.
#if defined(__AVX512BF16__)
constexpr bool multiplies_pairs = true;
#else
constexpr bool multiplies_pairs = false;
#endif

// sum + a[0] b[0] + a[1] b[1] as x86's VDPBF16PS: the second product first, each rounded once; below 2^-126 is zero.
HOST_DEVICE inline float add_pair(float sum, const bf16 *a, const bf16 *b) {
    auto normal = [](float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; };
    for (int i = 1; i >= 0; i--)
        sum = normal(fmaf(normal(to_float(a[i])), normal(to_float(b[i])), normal(sum)));
    return sum;
}

// A float32's exponent and fraction as those of a shorter format with `dropped` bits less of fraction, rounded to
// nearest, ties to even. `normal`: the format's smallest normal number. What is smaller becomes a multiple of
// 2^(dropped - 23) times that: adding 2^dropped times it leaves the multiple, rounded, in the lowest bits.
HOST_DEVICE inline uint32_t shortened(uint32_t magnitude, uint32_t normal, int dropped) {
    const uint32_t one_exponent = 1 << 23, half = (1 << (dropped - 1)) - 1, above = normal + dropped * one_exponent;
    if (magnitude < normal) return bit_cast<uint32_t>(bit_cast<float>(magnitude) + bit_cast<float>(above)) - above;
    return (magnitude + half + (magnitude >> dropped & 1) - (normal - one_exponent)) >> dropped;
}

// NaN stays NaN; 65,520 and more becomes infinity.
HOST_DEVICE inline void from_float(f16 &to, float x) {
    uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    bool nan = magnitude > 0x7f800000, large = magnitude >= 0x477ff000;
    uint32_t rounded = nan ? 0x7e00 | (magnitude >> 13 & 0x3ff) : large ? 0x7c00 : shortened(magnitude, 0x38800000, 13);
    to.bits = (uint16_t)(sign | rounded);
}

// Rounds to nearest, ties to even; what is too large becomes 127. x is a number.
HOST_DEVICE inline void from_float(int8_t &to, float x) {
    // Between 2^23 and 2^24 float32 counts in ones: the sum is rounded to a whole number.
    float whole = (x + 0x1.8p23f) - 0x1.8p23f;
    to = (int8_t)(whole > 127 ? 127 : whole < -127 ? -127 : whole);
}

// The smallest f16 at or above x; infinity beyond 65,504, NaN stays NaN.
HOST_DEVICE inline f16 f16_above(float x) {
    f16 near;
    from_float(near, x);
    if (to_float(near) < x) near.bits = (uint16_t)(near.bits & 0x8000 ? near.bits - 1 : near.bits + 1);
    return near;
}

// ---- Int8 weights -------------------------------------------------------------------------------------------
//
// --weights int8: each 32 neighbours of a row become whole numbers, at most 127, times a scale of their own, and so
// does what they are multiplied with, for each token anew. Their products are then exact and four of them take an
// instruction or two, where the machine has them for bytes; a weight takes 1.0625 bytes from memory.
constexpr int int8_rows = 16, int8_group = 32;

// 32 channels of 16 rows. Four channels of all rows stand together, so that each lane of a register sums up a row of
// its own and no sum has to be folded; and a thread reads its rows from memory from first to last.
struct Int8Block {
    f16 scale[int8_rows];
    int8_t weight[int8_group / 4][int8_rows][4];
    int8_t &at(int row, int channel) { return weight[channel / 4][row][channel % 4]; }
    HOST_DEVICE int at(int row, int channel) const { return weight[channel / 4][row][channel % 4]; }
};

HOST_DEVICE inline int64_t int8_groups(int64_t inputs) { return (inputs + int8_group - 1) / int8_group; }
inline int64_t int8_panels(int64_t outputs) { return (outputs + int8_rows - 1) / int8_rows; }
inline size_t int8_bytes(int64_t outputs, int64_t inputs) {
    return (size_t)(int8_panels(outputs) * int8_groups(inputs)) * sizeof(Int8Block);
}

// The largest magnitude of a group; NaN if one of its numbers is infinite or NaN.
HOST_DEVICE inline float largest_magnitude(const float (&group)[int8_group]) {
    uint32_t most = 0;  // magnitudes are in the order of their bits
    for (float number : group) {
        uint32_t magnitude = bit_cast<uint32_t>(number) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    return bit_cast<float>(most < 0x7f800000 ? most : 0x7fc00000u);
}

// The whole numbers next to a group's over its scale; zeros if that is 0 or NaN. By a denormal scale one may pass 127.
HOST_DEVICE inline void round_group(int8_t (&to)[int8_group], const float (&group)[int8_group], float scale) {
    for (int i = 0; i < int8_group; i++) from_float(to[i], scale > 0 ? group[i] / scale : 0);
}

// What a product with int8 weights reads: the whole numbers of `count` <= 32 numbers of a vector, zeros behind them.
// Returns their scale; if one of them is infinite or NaN, that is NaN.
HOST_DEVICE inline float quantize(int8_t (&to)[int8_group], const float *x, int count) {
    float padded[int8_group] = {};
    memcpy(padded, x, (size_t)count * sizeof(float));
    float scale = largest_magnitude(padded) / 127;
    round_group(to, padded, scale);
    return scale;
}

// The blocks of up to 16 rows (rows, inputs) of a weight, zeros beyond. False: a number is not finite, or beyond 8.3e6.
template <class Number>
bool quantize(Int8Block *blocks, const Number *weight, int rows, int64_t inputs) {
    bool good = true;
    for (int64_t first = 0; first < inputs; first += int8_group, blocks++) {
        *blocks = {};
        for (int row = 0; row < rows; row++) {
            float group[int8_group] = {};
            int8_t rounded[int8_group];
            for (int i = 0; i < int8_group && first + i < inputs; i++)
                group[i] = to_float(weight[row * inputs + first + i]);
            f16 scale = blocks->scale[row] = f16_above(largest_magnitude(group) / 127);
            good = good && to_float(scale) <= 65504;
            round_group(rounded, group, to_float(scale));
            for (int i = 0; i < int8_group; i++) blocks->at(row, i) = rounded[i];
        }
    }
    return good;
}

// ---- Memory --------------------------------------------------------------------------------------------------

constexpr int cache_line = 64;  // bytes

// Starts on a cache line: otherwise every load of 16 lanes would touch two lines.
template <class T>
struct CacheLineAligned {
    using value_type = T;
    CacheLineAligned() = default;
    template <class U>
    explicit CacheLineAligned(const CacheLineAligned<U> &) {}
    T *allocate(size_t count) { return (T *)::operator new(count * sizeof(T), std::align_val_t(cache_line)); }
    void deallocate(T *p, size_t) { ::operator delete(p, std::align_val_t(cache_line)); }
    bool operator==(const CacheLineAligned &) const { return true; }
    bool operator!=(const CacheLineAligned &) const { return false; }
};
template <class T>
using Aligned = std::vector<T, CacheLineAligned<T>>;
using Floats = Aligned<float>;
