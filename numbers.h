// Numbers: the formats that weights and caches are stored in, and `Vec`, the 16, 8 or 4 float32 lanes in which it
// is computed. The only file with CPU intrinsics.
//
// On one machine a sum over a row of `Vec`s always goes the same way, whatever is computed beside it: lane i adds up
// the elements i, i + lanes, i + 2 lanes, ...; then the lanes are folded in halves (8, 4, 2, 1), and last comes the sum
// of what does not fill a Vec. So a result does not depend on the number of threads, nor on how many tokens share a
// pass. Products of many tokens, of int8 weights and matrix tiles (below) have orders of their own, as fixed; sums of
// whole numbers are exact.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <new>
#include <vector>
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__AVX2__)
#pragma GCC diagnostic push  // g++ 12 takes its own _mm512_undefined_ps() for a mistake of ours (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
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
struct fp8 {  // e4m3 (Micikevicius et al. 2022, FP8 Formats): 1 sign, 4 exponent, 3 fraction bits; 2^-9 .. 448
    uint8_t bits;
};

HOST_DEVICE inline float to_float(float x) { return x; }

HOST_DEVICE inline float to_float(bf16 x) { return bit_cast<float>((uint32_t)x.bits << 16); }

HOST_DEVICE inline float to_float(f16 x) {
#if defined(__CUDA_ARCH__)
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(x.bits));
    return number;
#elif defined(__F16C__)
    return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
    return bit_cast<__fp16>(x.bits);
#else
    uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
    if (magnitude >= 0x7c00)  // infinity and NaN: exponent 31 becomes 255
        return bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    // Read with a float32 exponent the number is 2^(15 - 127) too small; the product is exact, denormals too.
    return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(magnitude << 13) * 0x1p112f));
#endif
}

// The same bits are an f16 2^8 times as small, but for NaN, which fp8 keeps in the place of 480.
HOST_DEVICE inline float to_float(fp8 x) {
    if ((x.bits & 0x7f) == 0x7f) return bit_cast<float>(0x7fc00000u);
    return 256 * to_float(f16{(uint16_t)((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)});
}

HOST_DEVICE inline float to_float(int8_t x) { return x; }

HOST_DEVICE inline void from_float(float &to, float x) { to = x; }

// Rounds to nearest, ties to even. NaN stays NaN; what is too large becomes infinity.
HOST_DEVICE inline void from_float(bf16 &to, float x) {
    uint32_t bits = bit_cast<uint32_t>(x);
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    to.bits = nan ? (uint16_t)(bits >> 16 | 0x40) : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounds to nearest, ties to even. NaN stays NaN; 65,520 and more becomes infinity.
HOST_DEVICE inline void from_float(f16 &to, float x) {
    uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        to.bits = (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    } else if (magnitude >= 0x477ff000) {
        to.bits = (uint16_t)(sign | 0x7c00);
    } else if (magnitude >= 0x38800000) {  // 2^-14, the smallest normal f16
        to.bits = (uint16_t)(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13));
    } else {  // adding 0.5 leaves the multiple of 2^-24, rounded, in the lowest bits
        to.bits = (uint16_t)(sign | (bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000));
    }
}

// Rounds to nearest, ties to even; what is too large becomes 448, infinity too. NaN stays NaN.
HOST_DEVICE inline void from_float(fp8 &to, float x) {
    uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        to.bits = (uint8_t)(sign | 0x7f);
    } else if (magnitude >= 0x43e00000) {  // 448
        to.bits = (uint8_t)(sign | 0x7e);
    } else if (magnitude >= 0x3c800000) {  // 2^-6, the smallest normal number
        to.bits = (uint8_t)(sign | ((magnitude + 0x7ffff + (magnitude >> 20 & 1) - 0x3c000000) >> 20));
    } else {  // adding 2^14 leaves the multiple of 2^-9, rounded, in the lowest bits
        to.bits = (uint8_t)(sign | (bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000));
    }
}

// Rounds to nearest, ties to even; what is too large becomes 127. x is a number.
HOST_DEVICE inline void from_float(int8_t &to, float x) {
    // Between 2^23 and 2^24 float32 counts in ones: the sum is rounded to a whole number.
    float whole = (x + 0x1.8p23f) - 0x1.8p23f;
    to = (int8_t)(whole > 127 ? 127 : whole < -127 ? -127 : whole);
}

// The smallest f16 at or above x, and the largest at or below it; infinity beyond 65,504, NaN stays NaN.
HOST_DEVICE inline f16 f16_above(float x) {
    f16 near;
    from_float(near, x);
    if (to_float(near) < x) near.bits = (uint16_t)(near.bits & 0x8000 ? near.bits - 1 : near.bits + 1);
    return near;
}
HOST_DEVICE inline f16 f16_below(float x) {
    f16 above = f16_above(-x);
    return {(uint16_t)(above.bits ^ 0x8000)};
}

// 32 whole numbers of 2 or 4 bits. A byte holds numbers that are far apart, so that a register of bytes, shifted, is a
// register of neighbours: with 4 bits byte i has the numbers i and i + 16, with 2 bits i, i + 8, i + 16 and i + 24.
template <int bits>
struct Packed {
    static constexpr int count = 32, largest = (1 << bits) - 1, size = 4 * bits;
    uint8_t bytes[size];
    HOST_DEVICE int code(int i) const { return bytes[i % size] >> bits * (i / size) & largest; }
    HOST_DEVICE void set(int i, int code) { bytes[i % size] |= (uint8_t)(code << bits * (i / size)); }  // was 0
};

// Four int8 numbers, and their magnitudes beside them: x86 multiplies bytes only if one of the two has no sign, so the
// sign goes over to the other. -128 is not among them.
struct Int8x4 {
    int8_t number[4];
    uint8_t magnitude[4];
};

inline int word(const void *four_bytes) {
    int result;
    memcpy(&result, four_bytes, sizeof result);
    return result;
}

// ---- Native pieces: what one register of this machine holds ------------------------------------------------

#if defined(__AVX512BW__)
using Piece = __m512;
constexpr int piece_lanes = 16;
inline Piece piece_set(float x) { return _mm512_set1_ps(x); }
inline Piece piece_load(const float *p) { return _mm512_loadu_ps(p); }
inline Piece piece_load(const f16 *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
inline Piece piece_load(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
// The number times 2^-8: its bits, shifted, as f16.
inline Piece piece_load(const fp8 *p) {
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80)));
}
inline Piece piece_load(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
inline void piece_load_pairs(const f16 *p, Piece &first, Piece &second) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    Piece a = piece_load(p), b = piece_load(p + piece_lanes);
    first = _mm512_permutex2var_ps(a, even, b);
    second = _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
}
inline void piece_load_pairs(const bf16 *p, Piece &first, Piece &second) {
    __m512i pairs = _mm512_loadu_si512(p);
    first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(~0xffff)));
}
inline void piece_store(float *p, Piece a) { _mm512_storeu_ps(p, a); }
inline Piece piece_add(Piece a, Piece b) { return _mm512_add_ps(a, b); }
inline Piece piece_mul(Piece a, Piece b) { return _mm512_mul_ps(a, b); }
inline Piece piece_div(Piece a, Piece b) { return _mm512_div_ps(a, b); }
inline Piece piece_fma(Piece a, Piece b, Piece c) { return _mm512_fmadd_ps(a, b, c); }
inline Piece piece_max(Piece a, Piece b) { return _mm512_max_ps(a, b); }
inline Piece piece_magnitude(Piece a) { return _mm512_abs_ps(a); }
inline Piece piece_round(Piece a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Piece piece_scale(Piece a, Piece exponent) {  // 0 for n < -126: a result below the normal numbers takes 100 ns
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(exponent, _mm512_set1_ps(-126), _CMP_NLT_UQ), a, exponent);
}
inline float piece_sum(Piece a) {
    __m256 b =
        _mm256_add_ps(_mm512_castps512_ps256(a), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
using IntPiece = __m512i;
inline Piece piece_floats(IntPiece a) { return _mm512_cvtepi32_ps(a); }
inline IntPiece piece_whole(Piece a) { return _mm512_cvtps_epi32(a); }
inline IntPiece piece_add_products(IntPiece sums, const int8_t (*weights)[4], const Int8x4 &x) {
    __m512i number = _mm512_set1_epi32(word(x.number)), weight = _mm512_loadu_si512(weights);
    __m512i magnitude = _mm512_set1_epi32(word(x.magnitude));
    weight = _mm512_mask_sub_epi8(weight, _mm512_movepi8_mask(number), _mm512_setzero_si512(), weight);
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sums, magnitude, weight);
#else
    __m512i pairs = _mm512_maddubs_epi16(magnitude, weight);  // at most 2 x 127 x 127, which 16 bits hold
    return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}
using PairPiece = __m512i;
inline PairPiece piece_set_pair(const int16_t *two) { return _mm512_set1_epi32(word(two)); }
inline PairPiece piece_load_pairs(const Packed<4> *a, const Packed<4> *b, int i) {
    __m128i x = _mm_loadu_si128((const __m128i *)a->bytes), y = _mm_loadu_si128((const __m128i *)b->bytes);
    __m512i both = _mm512_cvtepu8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(x, y), _mm_unpacklo_epi8(x, y)));
    return i == 0 ? _mm512_and_si512(both, _mm512_set1_epi16(15)) : _mm512_srli_epi16(both, 4);
}
inline PairPiece piece_load_pairs(const Packed<2> *a, const Packed<2> *b, int i) {
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    __m128i both =
        _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)a->bytes), _mm_loadl_epi64((const __m128i *)b->bytes));
    __m512i codes = _mm512_srlv_epi16(_mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(both)), shifts);
    return _mm512_and_si512(_mm512_srli_epi16(codes, 4 * i), _mm512_set1_epi16(3));
}
inline PairPiece piece_load_neighbours(const int8_t *p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
inline PairPiece piece_load_neighbours(const int16_t *p) { return _mm512_loadu_si512(p); }
inline IntPiece piece_add_products(IntPiece sums, PairPiece a, PairPiece b) {
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sums, a, b);
#else
    return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
#endif
}
inline void piece_store(int16_t *p, Piece a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a)));
}
inline float piece_largest(Piece a) { return _mm512_reduce_max_ps(a); }
inline IntPiece piece_add(IntPiece a, IntPiece b) { return _mm512_add_epi32(a, b); }
inline int piece_sum(IntPiece a) {
    int numbers[piece_lanes], total = 0;
    _mm512_storeu_si512(numbers, a);
    for (int number : numbers) total += number;
    return total;
}
// The sums of four, each folded by add() as piece_sum() does. Together they take 14 instructions instead of 36, which
// is 5 % of the prefill of a model 576 wide.
template <class Add>
inline __m128 piece_fold4(__m512 x, __m512 y, __m512 z, __m512 w, Add add) {
    x = add(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));  // 8 lanes of x, 8 of y
    z = add(_mm512_shuffle_f32x4(z, w, 0x44), _mm512_shuffle_f32x4(z, w, 0xee));
    x = add(_mm512_shuffle_f32x4(x, z, 0x88), _mm512_shuffle_f32x4(x, z, 0xdd));  // 4 lanes of each
    x = add(x, _mm512_permute_ps(x, 0x4e));
    x = add(x, _mm512_permute_ps(x, 0xb1));
    const __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, x));
}
inline Piece piece_float_bits(IntPiece a) { return _mm512_castsi512_ps(a); }
inline IntPiece piece_int_bits(Piece a) { return _mm512_castps_si512(a); }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
using Piece = __m256;
constexpr int piece_lanes = 8;
inline Piece piece_set(float x) { return _mm256_set1_ps(x); }
inline Piece piece_load(const float *p) { return _mm256_loadu_ps(p); }
inline Piece piece_load(const f16 *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
inline Piece piece_load(const bf16 *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
// The number times 2^-8: its bits, shifted, as f16.
inline Piece piece_load(const fp8 *p) {
    __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((short)0xbf80)));
}
inline Piece piece_load(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
inline void piece_load_pairs(const f16 *p, Piece &first, Piece &second) {
    auto in_order = [](Piece x) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8)); };
    Piece a = piece_load(p), b = piece_load(p + piece_lanes);
    first = in_order(_mm256_shuffle_ps(a, b, 0x88));
    second = in_order(_mm256_shuffle_ps(a, b, 0xdd));
}
inline void piece_load_pairs(const bf16 *p, Piece &first, Piece &second) {
    __m256i pairs = _mm256_loadu_si256((const __m256i *)p);
    first = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    second = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(~0xffff)));
}
inline void piece_store(float *p, Piece a) { _mm256_storeu_ps(p, a); }
inline Piece piece_add(Piece a, Piece b) { return _mm256_add_ps(a, b); }
inline Piece piece_mul(Piece a, Piece b) { return _mm256_mul_ps(a, b); }
inline Piece piece_div(Piece a, Piece b) { return _mm256_div_ps(a, b); }
inline Piece piece_fma(Piece a, Piece b, Piece c) { return _mm256_fmadd_ps(a, b, c); }
inline Piece piece_max(Piece a, Piece b) { return _mm256_max_ps(a, b); }
inline Piece piece_magnitude(Piece a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline Piece piece_round(Piece a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Piece piece_scale(Piece a, Piece exponent) {  // 2^n as its bits; 0 for n <= -127
    __m256i n = _mm256_cvtps_epi32(_mm256_max_ps(exponent, _mm256_set1_ps(-127)));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)));
}
inline float piece_sum(Piece a) {
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
using IntPiece = __m256i;
inline Piece piece_floats(IntPiece a) { return _mm256_cvtepi32_ps(a); }
inline IntPiece piece_whole(Piece a) { return _mm256_cvtps_epi32(a); }
inline IntPiece piece_add_products(IntPiece sums, const int8_t (*weights)[4], const Int8x4 &x) {
    __m256i number = _mm256_set1_epi32(word(x.number)), magnitude = _mm256_set1_epi32(word(x.magnitude));
    __m256i weight = _mm256_sign_epi8(_mm256_loadu_si256((const __m256i *)weights), number);
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, magnitude, weight);
#else
    __m256i pairs = _mm256_maddubs_epi16(magnitude, weight);  // at most 2 x 127 x 127, which 16 bits hold
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}
using PairPiece = __m256i;
inline PairPiece piece_set_pair(const int16_t *two) { return _mm256_set1_epi32(word(two)); }
inline PairPiece piece_beside(const uint8_t *a, const uint8_t *b) {  // eight bytes of each
    return _mm256_cvtepu8_epi16(
        _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)a), _mm_loadl_epi64((const __m128i *)b)));
}
inline PairPiece piece_load_pairs(const Packed<4> *a, const Packed<4> *b, int i) {
    __m256i codes = piece_beside(a->bytes + 8 * (i % 2), b->bytes + 8 * (i % 2));
    return i < 2 ? _mm256_and_si256(codes, _mm256_set1_epi16(15)) : _mm256_srli_epi16(codes, 4);
}
inline PairPiece piece_load_pairs(const Packed<2> *a, const Packed<2> *b, int i) {
    __m256i codes = _mm256_srli_epi16(piece_beside(a->bytes, b->bytes), 2 * i);
    return i < 3 ? _mm256_and_si256(codes, _mm256_set1_epi16(3)) : codes;
}
inline PairPiece piece_load_neighbours(const int8_t *p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
}
inline PairPiece piece_load_neighbours(const int16_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline IntPiece piece_add_products(IntPiece sums, PairPiece a, PairPiece b) {
#if defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(sums, a, b);
#else
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
}
inline void piece_store(int16_t *p, Piece a) {
    __m256i whole = _mm256_cvtps_epi32(a);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
}
inline float piece_largest(Piece a) {
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
inline IntPiece piece_add(IntPiece a, IntPiece b) { return _mm256_add_epi32(a, b); }
inline int piece_sum(IntPiece a) {
    __m128i c = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    __m128i d = _mm_add_epi32(c, _mm_unpackhi_epi64(c, c));
    return _mm_cvtsi128_si32(_mm_add_epi32(d, _mm_shuffle_epi32(d, 1)));
}
// As above. What both sides of an addition need of two registers is one blend and one shuffle, not two shuffles, of
// which a cycle starts fewer.
template <class Add>
inline __m128 piece_fold4(__m256 a, __m256 b, __m256 c, __m256 d, Add add) {
    auto halves = [&](__m256 p, __m256 q) {  // 4 lanes of p, 4 of q
        return _mm256_castps_pd(add(_mm256_blend_ps(p, q, 0xf0), _mm256_permute2f128_ps(p, q, 0x21)));
    };
    __m256d x = halves(a, b), y = halves(c, d);
    __m256 z = add(_mm256_castpd_ps(_mm256_blend_pd(x, y, 0xa)), _mm256_castpd_ps(_mm256_shuffle_pd(x, y, 0x5)));
    z = add(z, _mm256_permute_ps(z, 0xb1));  // the sums of a, a, c, c, b, b, d, d
    return _mm_blend_ps(_mm256_castps256_ps128(z), _mm256_extractf128_ps(z, 1), 0xa);
}
inline Piece piece_float_bits(IntPiece a) { return _mm256_castsi256_ps(a); }
inline IntPiece piece_int_bits(Piece a) { return _mm256_castps_si256(a); }
#elif defined(__ARM_NEON) && defined(__aarch64__)
using Piece = float32x4_t;
constexpr int piece_lanes = 4;
inline Piece piece_set(float x) { return vdupq_n_f32(x); }
inline Piece piece_load(const float *p) { return vld1q_f32(p); }
inline Piece piece_load(const f16 *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p))); }
inline Piece piece_load(const bf16 *p) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16((const uint16_t *)p)), 16));
}
// Four bytes as whole numbers of 16 bits.
inline int16x4_t piece_wide(int bytes) { return vget_low_s16(vmovl_s8(vcreate_s8((uint32_t)bytes))); }
// The number times 2^-8: its bits, shifted, as f16.
inline Piece piece_load(const fp8 *p) {
    int16x4_t wide = vand_s16(vshl_n_s16(piece_wide(word(p)), 7), vdup_n_s16((int16_t)0xbf80));
    return vcvt_f32_f16(vreinterpret_f16_s16(wide));
}
inline Piece piece_load(const int8_t *p) { return vcvtq_f32_s32(vmovl_s16(piece_wide(word(p)))); }
inline void piece_load_pairs(const f16 *p, Piece &first, Piece &second) {
    uint16x4x2_t pairs = vld2_u16((const uint16_t *)p);
    first = vcvt_f32_f16(vreinterpret_f16_u16(pairs.val[0]));
    second = vcvt_f32_f16(vreinterpret_f16_u16(pairs.val[1]));
}
inline void piece_load_pairs(const bf16 *p, Piece &first, Piece &second) {
    uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16((const uint16_t *)p));
    first = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
    second = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(~0xffffu)));
}
inline void piece_store(float *p, Piece a) { vst1q_f32(p, a); }
inline Piece piece_add(Piece a, Piece b) { return vaddq_f32(a, b); }
inline Piece piece_mul(Piece a, Piece b) { return vmulq_f32(a, b); }
inline Piece piece_div(Piece a, Piece b) { return vdivq_f32(a, b); }
inline Piece piece_fma(Piece a, Piece b, Piece c) { return vfmaq_f32(c, a, b); }
inline Piece piece_max(Piece a, Piece b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // vmaxq_f32 gives NaN for NaN
inline Piece piece_magnitude(Piece a) { return vabsq_f32(a); }
inline Piece piece_round(Piece a) { return vrndnq_f32(a); }
inline Piece piece_scale(Piece a, Piece exponent) {  // as above
    int32x4_t n = vcvtq_s32_f32(vmaxq_f32(exponent, vdupq_n_f32(-127)));
    return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)));
}
inline float piece_sum(Piece a) { return vaddv_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a))); }
using IntPiece = int32x4_t;
inline Piece piece_floats(IntPiece a) { return vcvtq_f32_s32(a); }
inline IntPiece piece_whole(Piece a) { return vcvtnq_s32_f32(a); }
inline IntPiece piece_add_products(IntPiece sums, const int8_t (*weights)[4], const Int8x4 &x) {
    int8x16_t weight = vld1q_s8(weights[0]), number = vreinterpretq_s8_s32(vdupq_n_s32(word(x.number)));
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sums, weight, number);
#else
    int16x8_t low = vmull_s8(vget_low_s8(weight), vget_low_s8(number)), high = vmull_high_s8(weight, number);
    return vpadalq_s16(sums, vpaddq_s16(low, high));  // pairs: at most 2 x 127 x 127, which 16 bits hold
#endif
}
using PairPiece = int16x8_t;
inline PairPiece piece_set_pair(const int16_t *two) { return vreinterpretq_s16_s32(vdupq_n_s32(word(two))); }
template <int bits>
inline PairPiece piece_load_pairs(const Packed<bits> *a, const Packed<bits> *b, int i) {
    constexpr int words = Packed<bits>::size / 4;
    auto codes = [&](const Packed<bits> *p) {
        return vcreate_s8((uint32_t)(word(p->bytes + 4 * (i % words)) >> bits * (i / words) & 0x01010101 * p->largest));
    };
    return vmovl_s8(vzip1_s8(codes(a), codes(b)));
}
inline PairPiece piece_load_neighbours(const int8_t *p) { return vmovl_s8(vld1_s8(p)); }
inline PairPiece piece_load_neighbours(const int16_t *p) { return vld1q_s16(p); }
inline IntPiece piece_add_products(IntPiece sums, PairPiece a, PairPiece b) {
    int32x4_t low = vmull_s16(vget_low_s16(a), vget_low_s16(b)), high = vmull_high_s16(a, b);
    return vaddq_s32(sums, vpaddq_s32(low, high));
}
inline void piece_store(int16_t *p, Piece a) { vst1_s16(p, vqmovn_s32(vcvtnq_s32_f32(a))); }
inline float piece_largest(Piece a) { return vmaxvq_f32(a); }
inline IntPiece piece_add(IntPiece a, IntPiece b) { return vaddq_s32(a, b); }
inline int piece_sum(IntPiece a) { return vaddvq_s32(a); }
#else
using Piece = float;
constexpr int piece_lanes = 1;
inline Piece piece_set(float x) { return x; }
template <class Number>
inline Piece piece_load(const Number *p) {
    return to_float(*p);
}
inline Piece piece_load(const fp8 *p) { return to_float(*p) / 256; }
template <class Number>
inline void piece_load_pairs(const Number *p, Piece &first, Piece &second) {
    first = to_float(p[0]);
    second = to_float(p[1]);
}
inline void piece_store(float *p, Piece a) { *p = a; }
inline Piece piece_add(Piece a, Piece b) { return a + b; }
inline Piece piece_mul(Piece a, Piece b) { return a * b; }
inline Piece piece_div(Piece a, Piece b) { return a / b; }
inline Piece piece_fma(Piece a, Piece b, Piece c) { return a * b + c; }
inline Piece piece_max(Piece a, Piece b) { return a > b ? a : b; }
inline Piece piece_magnitude(Piece a) { return std::fabs(a); }
inline Piece piece_round(Piece a) { return std::nearbyint(a); }
inline Piece piece_scale(Piece a, Piece exponent) {
    return exponent == exponent ? std::ldexp(a, (int)exponent) : exponent;
}
inline float piece_sum(Piece a) { return a; }
using IntPiece = int32_t;
inline Piece piece_floats(IntPiece a) { return (float)a; }
inline IntPiece piece_whole(Piece a) { return (IntPiece)std::nearbyint(a == a ? a : 0); }
inline IntPiece piece_add_products(IntPiece sum, const int8_t (*weights)[4], const Int8x4 &x) {
    for (int i = 0; i < 4; i++) sum += weights[0][i] * x.number[i];
    return sum;
}
struct PairPiece {
    int16_t first, second;
};
inline PairPiece piece_set_pair(const int16_t *two) { return {two[0], two[1]}; }
template <int bits>
inline PairPiece piece_load_pairs(const Packed<bits> *a, const Packed<bits> *b, int i) {
    return {(int16_t)a->code(i), (int16_t)b->code(i)};
}
template <class Number>
inline PairPiece piece_load_neighbours(const Number *p) {
    return {p[0], p[1]};
}
inline IntPiece piece_add_products(IntPiece sum, PairPiece a, PairPiece b) {
    return sum + a.first * b.first + a.second * b.second;
}
inline void piece_store(int16_t *p, Piece a) { *p = (int16_t)std::nearbyint(a == a ? a : 0); }
inline float piece_largest(Piece a) { return a; }
inline IntPiece piece_add(IntPiece a, IntPiece b) { return a + b; }
inline int piece_sum(IntPiece a) { return a; }
#endif

// out[0..4) = the sums of four pieces.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
inline void piece_sum4(float *out, Piece a, Piece b, Piece c, Piece d) {
    _mm_storeu_ps(out, piece_fold4(a, b, c, d, [](Piece p, Piece q) { return piece_add(p, q); }));
}
inline void piece_sum4(float *out, IntPiece a, IntPiece b, IntPiece c, IntPiece d) {
    auto bits = [](IntPiece p) { return piece_float_bits(p); };
    auto add = [&](Piece p, Piece q) { return bits(piece_add(piece_int_bits(p), piece_int_bits(q))); };
    __m128 sums = piece_fold4(bits(a), bits(b), bits(c), bits(d), add);
    _mm_storeu_ps(out, _mm_cvtepi32_ps(_mm_castps_si128(sums)));
}
#else
template <class AnyPiece>
inline void piece_sum4(float *out, AnyPiece a, AnyPiece b, AnyPiece c, AnyPiece d) {
    out[0] = (float)piece_sum(a), out[1] = (float)piece_sum(b), out[2] = (float)piece_sum(c),
    out[3] = (float)piece_sum(d);
}
#endif

inline void pause_briefly() {  // between two looks at a variable that another core will change
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    // As long as x86's pause, about; `yield` takes no time on most cores.
    __asm__ volatile("isb");
#endif
}

// ---- Vec: a register of the machine, or sixteen floats where there is none that this code knows ---------------------

constexpr int lanes = piece_lanes > 1 ? piece_lanes : 16;
constexpr int pieces = lanes / piece_lanes;

struct Vec {
    Piece piece[pieces];
};

// Applies a piece's operation to all pieces; the loop is gone after unrolling.
#define EACH_PIECE(result)                                    \
    Vec vec;                                                  \
    for (int i = 0; i < pieces; i++) vec.piece[i] = (result); \
    return vec

inline Vec set(float x) { EACH_PIECE(piece_set(x)); }
template <class Number>
inline Vec load(const Number *p) {
    EACH_PIECE(piece_load(p + i * piece_lanes));
}
// Lane i of `first` becomes p[2 i], and of `second` p[2 i + 1].
template <class Number>
inline void load_pairs(const Number *p, Vec &first, Vec &second) {
    for (int i = 0; i < pieces; i++) piece_load_pairs(p + 2 * i * piece_lanes, first.piece[i], second.piece[i]);
}
inline Vec add(Vec a, Vec b) { EACH_PIECE(piece_add(a.piece[i], b.piece[i])); }
inline Vec mul(Vec a, Vec b) { EACH_PIECE(piece_mul(a.piece[i], b.piece[i])); }
inline Vec div(Vec a, Vec b) { EACH_PIECE(piece_div(a.piece[i], b.piece[i])); }
inline Vec fma(Vec a, Vec b, Vec c) { EACH_PIECE(piece_fma(a.piece[i], b.piece[i], c.piece[i])); }  // a * b + c
inline Vec max(Vec a, Vec b) { EACH_PIECE(piece_max(a.piece[i], b.piece[i])); }  // b where one of them is NaN
inline Vec magnitude(Vec a) { EACH_PIECE(piece_magnitude(a.piece[i])); }
inline Vec round(Vec a) { EACH_PIECE(piece_round(a.piece[i])); }
// a * 2^n for whole n <= 127; for n < -126 it may be 0.
inline Vec scale(Vec a, Vec n) { EACH_PIECE(piece_scale(a.piece[i], n.piece[i])); }

inline void store(float *p, Vec a) {
    for (int i = 0; i < pieces; i++) piece_store(p + i * piece_lanes, a.piece[i]);
}

// The first `count` < lanes numbers, zeros behind them; reads nothing beyond.
template <class Number>
inline Vec load_part(const Number *p, int count) {
    Number padded[lanes] = {};
    memcpy(padded, p, (size_t)count * sizeof(Number));
    return load(padded);
}

inline void store_part(float *p, Vec a, int count) {
    float whole[lanes];
    store(whole, a);
    memcpy(p, whole, (size_t)count * sizeof(float));
}

// The sum of all lanes, of Vec or of Ints.
template <class AnyVec>
inline auto sum_of_pieces(AnyVec a) {
    for (int half = pieces / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) a.piece[i] = piece_add(a.piece[i], a.piece[i + half]);
    return a.piece[0];
}
template <class AnyVec>
inline auto sum(AnyVec a) {
    return piece_sum(sum_of_pieces(a));
}

// out[0..4) = the sums of four.
template <class AnyVec>
inline void sum4(float *out, AnyVec a, AnyVec b, AnyVec c, AnyVec d) {
    piece_sum4(out, sum_of_pieces(a), sum_of_pieces(b), sum_of_pieces(c), sum_of_pieces(d));
}

// to[i] = four[i], in one conversion.
inline void to_floats(float *to, const f16 (&four)[4]) {
#if defined(__F16C__)
    uint64_t low = four[0].bits | (uint64_t)four[1].bits << 16, high = four[2].bits | (uint64_t)four[3].bits << 16;
    _mm_storeu_ps(to, _mm_cvtph_ps(_mm_cvtsi64_si128((long long)(low | high << 32))));
#else
    for (int i = 0; i < 4; i++) to[i] = to_float(four[i]);
#endif
}

inline float largest(Vec a) {
    for (int half = pieces / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) a.piece[i] = piece_max(a.piece[i], a.piece[i + half]);
    return piece_largest(a.piece[0]);
}

// to[c * to_stride + r] = from[r * from_stride + c], 8 x 8 numbers.
inline void transpose8(float *to, size_t to_stride, const float *from, size_t from_stride) {
#if defined(__AVX2__)
    __m256 a[8], b[8];
    for (int i = 0; i < 4; i++) {  // rows i and i + 4, four columns of each: first those on the left
        const float *row = from + i * from_stride, *below = from + (i + 4) * from_stride;
        a[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row)), _mm_loadu_ps(below), 1);
        a[i + 4] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row + 4)), _mm_loadu_ps(below + 4), 1);
    }
    for (int i = 0; i < 8; i += 2) {  // columns of two rows
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {  // and of four, in each half of the register
        for (int half = 0; half < 2; half++) {
            __m256d above = _mm256_castps_pd(b[i + half]), below = _mm256_castps_pd(b[i + half + 2]);
            float *column = to + (i + 2 * half) * to_stride;
            _mm256_storeu_ps(column, _mm256_castpd_ps(_mm256_unpacklo_pd(above, below)));
            _mm256_storeu_ps(column + to_stride, _mm256_castpd_ps(_mm256_unpackhi_pd(above, below)));
        }
    }
#else
    for (int c = 0; c < 8; c++)
        for (int r = 0; r < 8; r++) to[c * to_stride + r] = from[r * from_stride + c];
#endif
}

// e^x for x <= 88, within 2 units in the last place, or 2^-126 where that is more; 0 for x < -104 and for -infinity;
// NaN stays NaN. x = n ln 2 + r with |r| <= ln 2 / 2: e^x = 2^n e^r, and e^r is its Taylor polynomial up to r^7 / 7!.
inline Vec exp(Vec x) {
    x = max(set(-105.0f), x);
    Vec n = round(mul(x, set(1.44269504f)));
    Vec r = fma(n, set(-0.693359375f), x);  // ln 2 in two parts, the first short, so that n times it is exact
    r = fma(n, set(2.12194440e-4f), r);
    Vec e = set(1.0f / 5040);
    for (float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        e = fma(e, r, set(coefficient));
    return scale(e, n);
}

// sum of a[i] * b[i], i < n
template <class A, class B>
inline float dot(const A *a, const B *b, int n) {
    Vec total = set(0);
    int i = 0;
    for (; i + lanes <= n; i += lanes) total = fma(load(a + i), load(b + i), total);
    float rest = i < n ? sum(mul(load_part(a + i, n - i), load_part(b + i, n - i))) : 0;
    return sum(total) + rest;
}

// y[i] += factor * x[i], i < n
template <class Number>
inline void axpy(float *y, float factor, const Number *x, int n) {
    int i = 0;
    for (; i + lanes <= n; i += lanes) store(y + i, fma(set(factor), load(x + i), load(y + i)));
    if (i < n) store_part(y + i, fma(set(factor), load_part(x + i, n - i), load_part(y + i, n - i)), n - i);
}

// out[i] = a[i] * b[i], i < n; `out` may be `a`
template <class Number>
inline void multiply(float *out, const float *a, const Number *b, int n) {
    int i = 0;
    for (; i + lanes <= n; i += lanes) store(out + i, mul(load(a + i), load(b + i)));
    if (i < n) store_part(out + i, mul(load_part(a + i, n - i), load_part(b + i, n - i)), n - i);
}

// x[i] *= factor, i < n
inline void multiply(float *x, float factor, int n) {
    int i = 0;
    for (; i + lanes <= n; i += lanes) store(x + i, mul(load(x + i), set(factor)));
    if (i < n) store_part(x + i, mul(load_part(x + i, n - i), set(factor)), n - i);
}

// out = x with its pairs (x[i], x[i + head_dim / 2]) rotated by angles, or back by them (direction -1). turn: cosines
// of the head_dim / 2 angles, then sines. `out` may be `x`.
inline void rotate(float *out, const float *x, const float *turn, int head_dim, float direction = 1) {
    int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], cosine = turn[i], sine = direction * turn[i + half];
        out[i] = a * cosine - b * sine;
        out[i + half] = b * cosine + a * sine;
    }
}

// ---- Whole numbers --------------------------------------------------------------------------------------------

struct Ints {
    IntPiece piece[pieces];
};

// Lane i of the result is that of `sums` plus the four products of weights[i] and x: a row of a matrix to each lane.
inline Ints add_products(Ints sums, const int8_t (*weights)[4], const Int8x4 &x) {
    for (int i = 0; i < pieces; i++) sums.piece[i] = piece_add_products(sums.piece[i], weights + i * piece_lanes, x);
    return sums;
}

// 16-bit whole numbers, two to each lane.
struct Pairs {
    PairPiece piece[pieces];
};

inline Pairs set_pair(const int16_t *two) {
    Pairs pairs;
    for (int i = 0; i < pieces; i++) pairs.piece[i] = piece_set_pair(two);
    return pairs;
}

// Numbers [lanes * part, lanes * part + lanes) of 32 packed ones of `a`, beside each that of `b`.
template <int bits>
inline Pairs load_pairs(const Packed<bits> *a, const Packed<bits> *b, int part) {
    Pairs pairs;
    for (int i = 0; i < pieces; i++) pairs.piece[i] = piece_load_pairs(a, b, part * pieces + i);
    return pairs;
}

// 2 * lanes numbers that follow one another.
template <class Number>
inline Pairs load_neighbours(const Number *p) {
    Pairs pairs;
    for (int i = 0; i < pieces; i++) pairs.piece[i] = piece_load_neighbours(p + 2 * i * piece_lanes);
    return pairs;
}

// Lane i of the result is that of `sums` plus both products of the pairs there.
inline Ints add_products(Ints sums, Pairs a, Pairs b) {
    for (int i = 0; i < pieces; i++) sums.piece[i] = piece_add_products(sums.piece[i], a.piece[i], b.piece[i]);
    return sums;
}

// Rounds to whole numbers, ties to even; they must be ones that 16 bits hold.
inline void store(int16_t *p, Vec a) {
    for (int i = 0; i < pieces; i++) piece_store(p + i * piece_lanes, a.piece[i]);
}

inline Ints to_ints(Vec a) {
    Ints whole;
    for (int i = 0; i < pieces; i++) whole.piece[i] = piece_whole(a.piece[i]);
    return whole;
}
inline Vec to_floats(Ints a) { EACH_PIECE(piece_floats(a.piece[i])); }
#undef EACH_PIECE

// Numbers [lanes * part, lanes * part + lanes) of 32 packed ones, for a format that is made of such parts
// (docs/precision.md).
template <int bits>
inline Vec load(const Packed<bits> *p, int part) {
    const int16_t first_alone[2] = {1, 0};
    return to_floats(add_products(to_ints(set(0)), load_pairs(p, p, part), set_pair(first_alone)));
}

// ---- Matrix tiles (AMX) ------------------------------------------------------------------------------------

// A tile register holds 16 rows of 64 bytes; one instruction multiplies a tile of 16 x 32 bf16 by one of 32 x 16 and
// adds the result to 16 x 16 float32. Products of bf16 are exact in float32.
constexpr int amx_side = 32;   // results are computed 32 x 32 at a time, in four tiles
constexpr int amx_depth = 32;  // numbers of a row that one step takes
constexpr int bf16_parts = 3;  // bf16 numbers that add up to a float32: 3 x 8 bits of fraction

#if defined(__AMX_BF16__)
struct alignas(64) AmxConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Asks the kernel, once: the state of the tile registers is large, and programs that use it say so.
inline bool amx_allowed() {
    static const bool allowed = syscall(SYS_arch_prctl, /*ARCH_REQ_XCOMP_PERM*/ 0x1023, /*tile data*/ 18) == 0;
    return allowed;
}
inline void amx_begin() {
    static const AmxConfig config;
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
inline void amx_end() { _tile_release(); }

// out (32 tokens, 32 outputs) = the sum over `steps` blocks of 32 numbers and all parts of tokens times weights.
// tokens: part p of token t begins at tokens + p * part_stride + t * stride, counted in numbers.
// weights: for each step two tiles (16 pairs of numbers, 16 outputs, 2), as amx_weights() leaves them.
inline void amx_products(float *out, const bf16 *tokens, size_t stride, size_t part_stride, const uint32_t *weights,
                         int steps) {
    __asm__ volatile("" ::: "memory");  // what the tile loads read has been written
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int s = 0; s < steps; s++) {
        _tile_loadd(6, weights + s * 512, 64);
        _tile_loadd(7, weights + s * 512 + 256, 64);
        for (int p = 0; p < bf16_parts; p++) {
            const bf16 *part = tokens + p * part_stride + s * amx_depth;
            _tile_loadd(4, part, stride * sizeof(bf16));
            _tile_loadd(5, part + 16 * stride, stride * sizeof(bf16));
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, amx_side * sizeof(float));
    _tile_stored(1, out + 16, amx_side * sizeof(float));
    _tile_stored(2, out + 16 * amx_side, amx_side * sizeof(float));
    _tile_stored(3, out + 16 * amx_side + 16, amx_side * sizeof(float));
    __asm__ volatile("" ::: "memory");
}

// 32 rows of weights, `inputs` numbers each, as the tiles that amx_products() wants: pairs of numbers stay together,
// and pair i of all rows comes before pair i + 1. `to` holds 32 * inputs / 2 words.
inline void amx_weights(uint32_t *to, const bf16 *rows, int inputs) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i index = _mm512_mullo_epi32(lane, _mm512_set1_epi32(inputs * (int)sizeof(bf16)));
    for (int i = 0; i < inputs; i += amx_depth) {
        for (int half = 0; half < 2; half++) {
            for (int pair = 0; pair < 16; pair++, to += 16) {
                const bf16 *from = rows + (size_t)half * 16 * inputs + i + 2 * pair;
                _mm512_storeu_si512(to, _mm512_i32gather_epi32(index, (const int *)from, 1));
            }
        }
    }
}
#else
inline bool amx_allowed() { return false; }
inline void amx_begin() {}
inline void amx_end() {}
inline void amx_products(float *, const bf16 *, size_t, size_t, const uint32_t *, int) {}
inline void amx_weights(uint32_t *, const bf16 *, int) {}
#endif

// ---- Floats ------------------------------------------------------------------------------------------------

constexpr int cache_line = 64;  // bytes

// How far ahead of its use a stream of memory is asked for, in bytes. Intel's own prefetcher fills the L2 only, and
// stops at each page of 4 KiB; 2 threads of an Emerald Rapids server, asking 1 KiB ahead on each of four streams,
// read 1.06 x as fast where nothing is computed, and weights 1.17 x. 0: a Zen's prefetcher does better unasked (Zen 3:
// attention 0.8 to 0.93 x where it was asked).
#if defined(__AVX512BW__) && !defined(__znver4__) && !defined(__znver5__)
constexpr int stream_ahead = 1024;
#else
constexpr int stream_ahead = 0;
#endif

inline void ask_stream(const void *p) {
    if (stream_ahead) __builtin_prefetch((const char *)p + stream_ahead);
}

// The same, and twice as far ahead for the L2, which has room for more requests on their way than the L1: weights in
// bf16 came at 0.91 of the speed of plain reading, as whatever else a line needs, even seven nops, left loads less room
// to run ahead. Predicted: at 1.0. Measured: that; decoding in bf16 1.06 x.
inline void ask_stream_twice(const void *p) {
    if (stream_ahead) __builtin_prefetch((const char *)p + 2 * stream_ahead, 0, 2);
    ask_stream(p);
}

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

// ---- Rows --------------------------------------------------------------------------------------------------

// Who encodes a row: one thread, or a warp (device.h) whose lanes share the work.
struct Alone {
    static constexpr int step = 1;
    HOST_DEVICE int first() const { return 0; }
    HOST_DEVICE float largest(float x) const { return x; }
};

// Numbers one after another, in a format that the machine converts itself. With u, the unit roundoff (half the
// distance from 1 to the next number), a stored number is off by at most u times itself.
template <class Number>
struct PlainRow {
    static constexpr int scale_channels = 0;  // numbers that share a scale: none
    static constexpr int line_numbers = cache_line / (int)sizeof(Number);
    static constexpr bool key_groups = false;
    HOST_DEVICE static size_t row_bytes(int width) { return (size_t)width * sizeof(Number); }
    template <class Values, class Team = Alone>
    HOST_DEVICE static void encode(char *row, const Values &values, int width, Team team = {}) {
        for (int i = team.first(); i < width; i += team.step) from_float(((Number *)row)[i], values[i]);
    }
    // One number of a row, as it reads.
    HOST_DEVICE static float number(const char *row, int channel) { return to_float(((const Number *)row)[channel]); }
    // Numbers [channel, channel + lanes) of a row.
    static Vec decode(const char *row, int channel) { return load((const Number *)row + channel); }
    // Numbers [channel, channel + count), zeros behind them.
    static Vec decode_part(const char *row, int channel, int count) {
        return load_part((const Number *)row + channel, count);
    }
};

// Rows of bf16, of which two Vecs are decoded together: of 2 * lanes numbers first those in even places, then those in
// odd ones. What they are multiplied with must stand in that order, too: in_pairs(). A line of memory then takes a load
// and two instructions, not two loads and four. Predicted, with AVX-512: products of one vector, with 5 instructions a
// line instead of 8, 1.03 x as fast. Measured: 1.01 x, with AVX2 1.03 x; attention over a bf16 cache in the L2 1.13 x.
struct PairedRow : PlainRow<bf16> {
    static void decode_two(Vec &first, Vec &second, const char *row, int channel) {
        load_pairs((const bf16 *)row + channel, first, second);
    }
};

// Vecs of a row that are decoded together.
template <class Format>
constexpr int vecs_together = 1;
template <>
constexpr int vecs_together<PairedRow> = 2;

// Numbers [channel, channel + together * lanes) of a row.
template <class Format, int together>
inline void decode(Vec (&to)[together], const char *row, int channel) {
    if constexpr (together == 2)
        Format::decode_two(to[0], to[1], row, channel);
    else
        to[0] = Format::decode(row, channel);
}

// to = x (n) in that order; n is a multiple of 2 * lanes.
inline void in_pairs(float *to, const float *x, size_t n) {
    for (size_t first = 0; first < n; first += 2 * lanes) {
        for (int i = 0; i < lanes; i++) {
            to[first + i] = x[first + 2 * i];
            to[first + lanes + i] = x[first + 2 * i + 1];
        }
    }
}

// And back.
inline void out_of_pairs(float *to, const float *x, size_t n) {
    for (size_t first = 0; first < n; first += 2 * lanes) {
        for (int i = 0; i < lanes; i++) {
            to[first + 2 * i] = x[first + i];
            to[first + 2 * i + 1] = x[first + lanes + i];
        }
    }
}
