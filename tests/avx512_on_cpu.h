// AVX-512 for numbers.h on a machine that has AVX2: included before everything else (make test-simd), it takes the
// intrinsics from SIMDe, and says that the machine has them, with -DVNNI also VNNI. What SIMDe has not, or computes
// otherwise than the machine, is here, from its definition.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cmath>
#include <cstring>

namespace avx512_on_cpu {

// The register whose number i, of 16, is number(i).
template <class Register, class Function>
Register each(Function number) {
    decltype(number(0)) numbers[16];
    for (int i = 0; i < 16; i++) numbers[i] = number(i);
    Register result;
    memcpy(&result, numbers, sizeof result);
    return result;
}

// 16 numbers of type From, in a register of their size, as int32.
template <class From, class Register>
__m512i widen(Register a) {
    static_assert(sizeof a == 16 * sizeof(From), "a full register");
    return each<__m512i>([&](int i) { return (int32_t)((From *)&a)[i]; });
}

inline __m512i cvtepi8_epi32(__m128i a) { return widen<int8_t>(a); }
inline __m512i cvtepu16_epi32(__m256i a) { return widen<uint16_t>(a); }
inline __m512 cvtepi32_ps(__m512i a) {
    return each<__m512>([&](int i) { return (float)((int32_t *)&a)[i]; });
}
inline __m512i cvtps_epi32(__m512 a) {  // what is not a number, or too large, becomes the least
    return each<__m512i>([&](int i) { return std::fabs(a[i]) < 0x1p31f ? (int32_t)std::nearbyint(a[i]) : INT32_MIN; });
}
inline __m256i cvtepi32_epi16(__m512i a) {
    return each<__m256i>([&](int i) { return (int16_t)((int32_t *)&a)[i]; });
}
// 32 bytes as 16 bits each: the two of a lane are made together.
inline __m512i cvtepu8_epi16(__m256i a) {
    return each<__m512i>([&](int i) { return ((uint8_t *)&a)[2 * i] | ((uint8_t *)&a)[2 * i + 1] << 16; });
}
inline float reduce_max_ps(__m512 a) {
    float most = a[0];
    for (int i = 1; i < 16; i++) most = a[i] > most ? a[i] : most;
    return most;
}
inline __m512 cvtph_ps(__m256i a) {
    return each<__m512>([&](int i) { return _cvtsh_ss(((uint16_t *)&a)[i]); });
}
inline __m512 permute_ps(__m512 a, int order) {
    return each<__m512>([&](int i) { return a[i / 4 * 4 + (order >> 2 * (i % 4) & 3)]; });
}
// SIMDe rounds twice.
inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return each<__m512>([&](int i) { return std::fma(a[i], b[i], c[i]); });
}
// SIMDe has no 2^n beyond float32's.
inline __m512 scalef_ps(__m512 a, __m512 n) {
    return each<__m512>([&](int i) { return std::isnan(n[i]) ? n[i] : std::ldexp(a[i], (int)std::floor(n[i])); });
}

}  // namespace avx512_on_cpu

// These two SIMDe has, but without the machine's name, or with a mask's parameters. (clang's are macros.)
#undef _mm512_madd_epi16
#undef _mm512_shuffle_f32x4
#define _mm512_madd_epi16 simde_mm512_madd_epi16
#define _mm512_shuffle_f32x4 simde_mm512_shuffle_f32x4

#undef _mm512_permute_ps
#undef _mm512_fmadd_ps
#undef _mm512_scalef_ps
#define _mm512_cvtepi8_epi32 avx512_on_cpu::cvtepi8_epi32
#define _mm512_cvtepu16_epi32 avx512_on_cpu::cvtepu16_epi32
#define _mm512_cvtepi32_ps avx512_on_cpu::cvtepi32_ps
#define _mm512_cvtps_epi32 avx512_on_cpu::cvtps_epi32
#define _mm512_cvtepi32_epi16 avx512_on_cpu::cvtepi32_epi16
#define _mm512_cvtepu8_epi16 avx512_on_cpu::cvtepu8_epi16
#define _mm512_reduce_max_ps avx512_on_cpu::reduce_max_ps
#define _mm512_cvtph_ps avx512_on_cpu::cvtph_ps
#define _mm512_permute_ps avx512_on_cpu::permute_ps
#define _mm512_fmadd_ps avx512_on_cpu::fmadd_ps
#define _mm512_scalef_ps avx512_on_cpu::scalef_ps

#define __AVX512BW__ 1
#ifdef VNNI
#define __AVX512VNNI__ 1
#endif
