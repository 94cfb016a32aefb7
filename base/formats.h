// Number formats as they are stored (16-bit floats, int8 weights), and aligned memory. Functions here take one number
// at a time, on CPU and GPU; fast/simd.h has registers full of numbers.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#define CALLS_ITS_ARGUMENT _Pragma("nv_exec_check_disable")  // which may be host-only
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
struct paired_bf16 : bf16 {};  // a weight whose products take two neighbours at a time (add_pair)

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
    // Read as a float32 the number is 2^(127 - 15) times too small; the product is exact, also for denormals.
    return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(magnitude << 13) * 0x1p112f));
#endif
}

HOST_DEVICE inline float to_float(int8_t x) { return x; }

HOST_DEVICE inline void from_float(float &to, float x) { to = x; }

// Rounds to nearest, ties to even. NaN stays NaN; numbers too large become infinity.
HOST_DEVICE inline void from_float(bf16 &to, float x) {
    uint32_t bits = bit_cast<uint32_t>(x);
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    to.bits = nan ? (uint16_t)(bits >> 16 | 0x40) : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Whether this processor has an instruction for add_pair(). pairs_gain() measures whether it is fast.
#if defined(__AVX512BF16__)
constexpr bool multiplies_pairs = true;
#else
constexpr bool multiplies_pairs = false;
#endif

// sum + a[0] b[0] + a[1] b[1] as in x86's VDPBF16PS: the second product first, each rounded once, denormals as zero.
HOST_DEVICE inline float add_pair(float sum, const bf16 *a, const bf16 *b) {
    auto normal = [](float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; };
    for (int i = 1; i >= 0; i--)
        sum = normal(fmaf(normal(to_float(a[i])), normal(to_float(b[i])), normal(sum)));
    return sum;
}

// Returns a float32's exponent and fraction in a format with `dropped` fewer bits of fraction, rounded to nearest, ties
// to even. `normal`: the bits of n, the format's smallest normal number. Smaller numbers become multiples of
// 2^(dropped - 23) n: adding 2^dropped n leaves the rounded multiple in the lowest bits.
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

// Rounds to nearest, ties to even, and clamps to -127 .. 127. x must not be NaN.
HOST_DEVICE inline void from_float(int8_t &to, float x) {
    // Between 2^23 and 2^24 float32 has steps of 1: the sum is rounded to a whole number.
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
// --weights int8: each group of 32 neighbours in a row becomes whole numbers, at most 127, and a scale. The vector that
// they are multiplied by is quantized in the same way for each token. Products are then exact, and a processor with
// instructions for bytes does four of them in one or two. A weight takes 1.0625 bytes of memory.
constexpr int int8_rows = 16, int8_group = 32;

// 32 channels of 16 rows. Four channels of all rows are stored together: each lane of a register sums its own row, so
// no sum has to be folded, and a thread reads its rows in the order of memory.
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
    uint32_t most = 0;  // magnitudes have the order of their bits
    for (float number : group) {
        uint32_t magnitude = bit_cast<uint32_t>(number) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    return bit_cast<float>(most < 0x7f800000 ? most : 0x7fc00000u);
}

// to = group / scale, rounded; zeros if the scale is 0 or NaN. A denormal scale may take one past 127: it is clamped.
HOST_DEVICE inline void round_group(int8_t (&to)[int8_group], const float (&group)[int8_group], float scale) {
    for (int i = 0; i < int8_group; i++) from_float(to[i], scale > 0 ? group[i] / scale : 0);
}

// Quantizes `count` <= 32 numbers of a vector for a product with int8 weights, and pads them with zeros. Returns their
// scale, which is NaN if one of them is infinite or NaN.
HOST_DEVICE inline float quantize(int8_t (&to)[int8_group], const float *x, int count) {
    float padded[int8_group] = {};
    memcpy(padded, x, (size_t)count * sizeof(float));
    float scale = largest_magnitude(padded) / 127;
    round_group(to, padded, scale);
    return scale;
}

// Quantizes up to 16 rows (rows, inputs) of a weight, padded with zeros. False: one is not finite, or beyond 8.3e6.
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

// Allocates from the start of a cache line: otherwise every load of 16 lanes would touch two lines.
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
