// Vec: the 16, 8 or 4 float32 lanes that a register of this machine holds (Google Highway). Here stored numbers become
// lanes, and here are the few instructions that Highway lacks, or has slower: products of int8.
//
// On one machine a sum over a row of `Vec`s always has the same order: lane i adds the elements i, i + lanes,
// On one machine a sum over a row of `Vec`s always has the same order: lane i adds elements i, i + lanes,
// neither on the number of threads nor on how many tokens share a pass. Sums of whole numbers are exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../precision.h"

#define HWY_COMPILE_ONLY_STATIC  // for the machine that -march names
#define HWY_DISABLE_PCLMUL_AES   // AVX2 is used even on a machine without instructions for ciphers
#define HWY_BROKEN_EMU128 0      // on a machine that Highway does not know, four lanes in a loop (not GCC bug 106322)
#if defined(__aarch64__)         // a compiler does not know the size of SVE's registers, so no arrays of them
#define TOOLCHAIN_MISS_SYS_AUXV_H  // the program asks nothing of the machine when it runs
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#pragma GCC diagnostic push  // g++ 12 warns of its own _mm512_undefined_ps() (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <hwy/highway.h>
#pragma GCC diagnostic pop

// Calls body(0), body(1), ... body(n - 1), each with a constant, so arrays of registers stay in registers.
template <class Body, int... i>
inline void each_of([[maybe_unused]] Body body, std::integer_sequence<int, i...>) {
    (body(std::integral_constant<int, i>()), ...);
}
template <int n, class Body>
inline void unrolled(Body body) {
    each_of(body, std::make_integer_sequence<int, n>());
}

// Calls use(size, first) for batches of `most` of `count` items, then of `next`, next - 1, ..., 1; size is a constant.
template <int most, int next = most - 1, class Use>
inline void in_batches(int count, Use use, int first = 0) {
    for (; count - first >= most; first += most) use(std::integral_constant<int, most>(), first);
    if constexpr (most > 1) in_batches<next>(count, use, first);
}

namespace hn = hwy::HWY_NAMESPACE;
using Lanes = hn::ScalableTag<float>;
template <class T>
using As = hn::Rebind<T, Lanes>;  // as many T as a Vec has floats
using Vec = hn::Vec<Lanes>;
using Ints = hn::Vec<As<int32_t>>;
constexpr int lanes = (int)hn::MaxLanes(Lanes());

// ---- Lanes from memory and back ----------------------------------------------------------------------------

inline Vec set(float x) { return hn::Set(Lanes(), x); }
inline Vec to_floats(Ints a) { return hn::ConvertTo(Lanes(), a); }
inline Ints to_ints(Vec a) { return hn::NearestInt(a); }

inline Vec load(const float *p) { return hn::LoadU(Lanes(), p); }
// One by one if the machine has no instruction for it, as Highway's substitute knows neither infinity nor NaN.
inline Vec from_halves(hn::Vec<As<uint16_t>> halves) {
#if defined(__F16C__) || defined(__aarch64__)
    return hn::PromoteTo(Lanes(), hn::BitCast(As<hwy::float16_t>(), halves));
#else
    f16 stored[lanes];
    float wide[lanes];
    hn::StoreU(halves, As<uint16_t>(), &stored[0].bits);
    for (int i = 0; i < lanes; i++) wide[i] = to_float(stored[i]);
    return load(wide);
#endif
}
inline Vec load(const f16 *p) { return from_halves(hn::LoadU(As<uint16_t>(), &p->bits)); }
inline Vec load(const bf16 *p) {
    return hn::PromoteTo(Lanes(), hn::LoadU(As<hwy::bfloat16_t>(), (const hwy::bfloat16_t *)p));
}
inline Vec load(const int8_t *p) { return to_floats(hn::PromoteTo(As<int32_t>(), hn::LoadU(As<int8_t>(), p))); }
// Each number times 2^-8: its bits, shifted, read as f16.
inline Vec load(const fp8 *p) {
    As<int16_t> halves;
    auto wide = hn::ShiftLeft<7>(hn::PromoteTo(halves, hn::LoadU(As<int8_t>(), (const int8_t *)p)));
    wide = hn::And(wide, hn::Set(halves, (int16_t)0xbf80));
    return hn::PromoteTo(Lanes(), hn::BitCast(As<hwy::float16_t>(), wide));
}

// How many numbers of a row a lane of a product takes: one, or two neighbours of paired_bf16.
template <class Number>
constexpr int per_lane = std::is_same_v<Number, paired_bf16> ? 2 : 1;
inline Vec load(const paired_bf16 *p) { return load((const float *)p); }

// Loads what is used more than once. g++ would load it again for each use, and a product waits for its loads.
template <class Number>
inline Vec load_once(const Number *p) {
    Vec a = load(p);
#if HWY_ARCH_X86 && HWY_STATIC_TARGET != HWY_EMU128
    asm("" : "+v"(a.raw));
#endif
    return a;
}

// Splits 2 * lanes numbers into those at even and those at odd places.
inline void load_pairs(const f16 *p, Vec &even, Vec &odd) {
    auto both = hn::LoadU(As<uint32_t>(), (const uint32_t *)p);
    even = from_halves(hn::TruncateTo(As<uint16_t>(), both));
    odd = from_halves(hn::TruncateTo(As<uint16_t>(), hn::ShiftRight<16>(both)));
}

// The first or the second number of each lane.
template <class Number, class Which>
inline Vec number_in(Vec words, Which which) {
    auto bits = hn::BitCast(As<uint32_t>(), words);
    if constexpr (sizeof(Number) == 4 || per_lane<Number> == 2)
        return words;
    else if constexpr (std::is_same_v<Number, bf16>)
        return hn::BitCast(
            Lanes(), which ? hn::And(bits, hn::Set(As<uint32_t>(), 0xffff0000u)) : hn::ShiftLeft<16>(bits));
    else
        return from_halves(hn::TruncateTo(As<uint16_t>(), which ? hn::ShiftRight<16>(bits) : bits));
}

inline void store(float *p, Vec a) { hn::StoreU(a, Lanes(), p); }
// Rounds to whole numbers, ties to even, which 16 bits must hold. Between 2^23 and 2^24 float32 has only whole numbers,
// so the sum has them in its lowest bits.
inline void store(int16_t *p, Vec a) {
    auto bits = hn::BitCast(As<uint32_t>(), hn::Add(a, hn::Set(Lanes(), 0x1.8p23f)));
    hn::StoreU(hn::TruncateTo(As<uint16_t>(), bits), As<uint16_t>(), (uint16_t *)p);
}

// The first `count` < lanes numbers, then zeros; reads no byte after them.
template <class Number>
inline Vec load_part(const Number *p, int count) {
    Number padded[lanes * per_lane<Number>] = {};
    memcpy(padded, p, (size_t)count * sizeof(Number));
    return load(padded);
}

inline void store_part(float *p, Vec a, int count) {
    float whole[lanes];
    store(whole, a);
    memcpy(p, whole, (size_t)count * sizeof(float));
}

// ---- Lane by lane --------------------------------------------------------------------------------------------

inline Vec add(Vec a, Vec b) { return hn::Add(a, b); }
inline Vec mul(Vec a, Vec b) { return hn::Mul(a, b); }
inline Vec div(Vec a, Vec b) { return hn::Div(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return hn::MulAdd(a, b, c); }  // a * b + c
// sum + row * x, for rows of Numbers; a lane of paired_bf16 adds two products.
template <class Number>
inline Vec add_product(Vec row, Vec x, Vec sum) {
#if defined(__AVX512BF16__)
    if constexpr (per_lane<Number> == 2)
        return Vec{_mm512_dpbf16_ps(sum.raw, (__m512bh)_mm512_castps_si512(row.raw),
                                    (__m512bh)_mm512_castps_si512(x.raw))};
#endif
    return fma(row, x, sum);
}
inline Vec max(Vec a, Vec b) {  // b where one of them is NaN, like x86's instruction
    constexpr bool own = HWY_ARCH_X86 && HWY_STATIC_TARGET != HWY_EMU128 && HWY_STATIC_TARGET != HWY_SCALAR;
    return own ? hn::Max(a, b) : hn::IfThenElse(hn::Gt(a, b), a, b);
}
inline Vec magnitude(Vec a) { return hn::Abs(a); }
inline Vec round(Vec a) { return hn::Round(a); }
// a * 2^n for whole n <= 127; 0 for n < -126.
inline Vec scale(Vec a, Vec n) {
#if defined(__AVX512BW__)
    return Vec{_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n.raw, _mm512_set1_ps(-126), _CMP_NLT_UQ), a.raw, n.raw)};
#else
    Ints exponent = hn::Add(to_ints(max(n, set(-127))), hn::Set(As<int32_t>(), 127));
    return mul(a, hn::BitCast(Lanes(), hn::ShiftLeft<23>(exponent)));
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

// ---- Across lanes --------------------------------------------------------------------------------------------

template <class AnyVec>
inline auto sum(AnyVec a) {
    using D = hn::DFromV<AnyVec>;
    if constexpr (hn::MaxLanes(D()) > 4) {
        hn::Half<D> half;
        return sum(hn::Add(hn::LowerHalf(half, a), hn::UpperHalf(half, a)));
    } else {
        a = hn::Add(a, hn::Shuffle1032(a));
        return hn::GetLane(hn::Add(a, hn::Shuffle2301(a)));
    }
}
inline float largest(Vec a) { return hn::GetLane(hn::MaxOfLanes(Lanes(), a)); }

template <class AnyVec>
inline auto first_four(AnyVec a) {
    using D = hn::DFromV<AnyVec>;
    if constexpr (hn::MaxLanes(D()) > 4)
        return first_four(hn::LowerHalf(hn::Half<D>(), a));
    else
        return a;
}

// out[0..4) = sum(a), sum(b), sum(c), sum(d). Together they take half the instructions: an addition folds two
// registers, with a blend for one operand and a shuffle for the other.
inline void sum4(float *out, Vec a, Vec b, Vec c, Vec d) {
    if constexpr (lanes == 4) {
        out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
    } else {
        Lanes f;
        hn::Repartition<double, Lanes> two;
        auto halves = [&](Vec p, Vec q) {  // half of the lanes for p, half for q
            return hn::Add(hn::ConcatUpperLower(f, q, p), hn::ConcatLowerUpper(f, q, p));
        };
        Vec x = halves(a, b), y = halves(c, d);
        if constexpr (lanes == 16) {  // four lanes for each of a, c, b, d
            x = hn::Add(hn::OddEvenBlocks(y, x), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(x, y)));
            x = hn::Add(x, hn::Shuffle1032(x));
        } else {  // two lanes
            auto p = hn::BitCast(two, x), q = hn::BitCast(two, y);
            x = hn::Add(hn::BitCast(f, hn::OddEven(q, p)), hn::BitCast(f, hn::Shuffle01(hn::OddEven(p, q))));
        }
        x = hn::Add(x, hn::Shuffle2301(x));
        alignas(64) constexpr int32_t sums[16] = {0, lanes / 2, lanes / 4, lanes / 2 + lanes / 4};
        x = hn::TableLookupLanes(x, hn::SetTableIndices(f, sums));
        hn::StoreU(first_four(x), hn::Full128<float>(), out);
    }
}

// The first 16 bytes of as many rows as fill a D; rows are `apart` numbers from one to the next.
template <class D, class Number>
inline auto load_blocks(D d, const Number *row, int64_t apart) {
    if constexpr (hn::MaxLanes(d) > 4) {
        hn::Half<D> half;
        return hn::Combine(d, load_blocks(half, row + (int)hn::MaxLanes(half) / 4 * apart, apart),
                           load_blocks(half, row, apart));
    } else {
        hn::Repartition<uint8_t, D> bytes;
        return hn::BitCast(d, hn::LoadU(bytes, (const uint8_t *)row));
    }
}

// Transposes the first 16 bytes of rows, `apart` numbers from one to the next: lane r of out[i] = word i of row r, a
// number of 4 bytes or two of 2. Each Vec loads every fourth row, so words only move within 16 bytes.
template <class Number>
inline void load_transposed(Vec (&out)[4], const Number *rows, int64_t apart) {
    Vec row[4], even[2], odd[2];
    unrolled<4>([&](auto i) { row[i] = load_blocks(Lanes(), rows + i * apart, 4 * apart); });
    auto interleave = [](Vec a, Vec b, Vec *out) {
        out[0] = hn::InterleaveLower(a, b), out[1] = hn::InterleaveUpper(Lanes(), a, b);
    };
    interleave(row[0], row[2], even);
    interleave(row[1], row[3], odd);
    interleave(even[0], odd[0], out);
    interleave(even[1], odd[1], out + 2);
}

// ---- Packed codes: 16-bit whole numbers, two to each lane ---------------------------------------------------------

using Pairs = hn::Vec<hn::Repartition<int16_t, Lanes>>;

inline int word(const void *four_bytes) {
    int result;
    memcpy(&result, four_bytes, sizeof result);
    return result;
}

inline Pairs set_pair(const int16_t *two) {
    return hn::BitCast(hn::Repartition<int16_t, Lanes>(), hn::Set(As<int32_t>(), word(two)));
}

// Lane i of the result is that of `sums` plus both products of pair i.
inline Ints add_products(Ints sums, Pairs a, Pairs b) {
#if defined(__AVX512VNNI__)
    return Ints{_mm512_dpwssd_epi32(sums.raw, a.raw, b.raw)};
#else
    As<int32_t> d;
    Ints rest = hn::Zero(d), first = hn::ReorderWidenMulAccumulate(d, a, b, hn::Zero(d), rest);
    return hn::Add(sums, hn::RearrangeToOddPlusEven(first, rest));
#endif
}

// Numbers [lanes * part, lanes * part + lanes) of the 32 packed in `a`, each paired with that of `b`.
template <int bits>
inline Pairs load_pairs(const Packed<bits> *a, const Packed<bits> *b, int part) {
    constexpr int size = Packed<bits>::size;  // bytes; 16 numbers may be in 8 of them, which are read once
    As<uint32_t> whole;
    std::conditional_t<(lanes > size), hn::Half<decltype(whole)>, decltype(whole)> d;
    auto wide = [&](const uint8_t *bytes) {
        return hn::PromoteTo(d, hn::LoadU(hn::Rebind<uint8_t, decltype(d)>(), bytes + lanes * part % size));
    };
    auto both = hn::Or(wide(a->bytes), hn::ShiftLeft<16>(wide(b->bytes)));
    auto shifted = [&](int i) { return hn::ShiftRightSame(both, bits * ((lanes * part + i) / size)); };
    auto neighbours = [&] {
        if constexpr (lanes > size)
            return hn::Combine(whole, shifted(size), shifted(0));
        else
            return shifted(0);
    }();
    auto codes = hn::And(neighbours, hn::Set(whole, 0x10001u * Packed<bits>::largest));
    return hn::BitCast(hn::Repartition<int16_t, Lanes>(), codes);
}

// The same numbers of `p` alone, for a format that is made of such parts (docs/09_make_your_own.md).
template <int bits>
inline Vec load(const Packed<bits> *p, int part) {
    As<int32_t> d;
    return to_floats(hn::And(hn::BitCast(d, load_pairs(p, p, part)), hn::Set(d, Packed<bits>::largest)));
}

// ---- Int8 weights --------------------------------------------------------------------------------------------

// x86 multiplies a byte with a sign by one without. VNNI takes weights + 128. This adds 128 times all numbers to a sum,
// so it begins with minus that. AVX2 adds two products in 16 bits, too few for weights + 128: there the number's sign
// moves to the weight. No number is -128.
struct Int8x4 {
    int8_t number[4];
    uint8_t magnitude[4];
};
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int int8_offset = 128;
#else
constexpr int int8_offset = 0;
#endif

// The first value of a sum whose numbers add up to `total`.
inline Ints begin_products(int total) { return hn::Set(As<int32_t>(), -int8_offset * total); }

// Lane i of the result is that of `sums` plus the four products of weights[i] and x: a row of a matrix to each lane.
inline Ints add_products(Ints sums, const int8_t (*weights)[4], const Int8x4 &x) {
    hn::Repartition<int8_t, Lanes> bytes;
    auto weight = hn::LoadU(bytes, weights[0]), number = hn::BitCast(bytes, hn::Set(As<int32_t>(), word(x.number)));
#if defined(__AVX512VNNI__)
    return Ints{_mm512_dpbusd_epi32(sums.raw, hn::Xor(weight, hn::Set(bytes, -128)).raw, number.raw)};
#elif defined(__AVXVNNI__)
    return Ints{_mm256_dpbusd_avx_epi32(sums.raw, hn::Xor(weight, hn::Set(bytes, -128)).raw, number.raw)};
#elif defined(__AVX2__) && !defined(__AVX512BW__)
    auto magnitude = _mm256_set1_epi32(word(x.magnitude));
    auto pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(weight.raw, number.raw));
    return hn::Add(sums, Ints{_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))});
#elif defined(__ARM_FEATURE_DOTPROD)
    return Ints(vdotq_s32(sums.raw, weight.raw, number.raw));
#else
    hn::Repartition<int16_t, Lanes> wide;
    auto odd = [&](auto a) { return hn::ShiftRight<8>(hn::BitCast(wide, a)); };
    auto even = [&](auto a) { return odd(hn::ShiftLeft<8>(hn::BitCast(wide, a))); };
    auto pairs = hn::Add(hn::Mul(even(weight), even(number)), hn::Mul(odd(weight), odd(number)));
    return add_products(sums, pairs, hn::Set(wide, 1));
#endif
}

// ---- Prefetch ----------------------------------------------------------------------------------------------------

// How many bytes ahead of its use a stream of memory is prefetched. Intel's own prefetcher fills the L2 only, and stops
// at each page of 4 KiB. 0: a Zen's does better without help (docs/where_the_time_goes.md).
#if defined(__AVX512BW__) && !defined(__znver4__) && !defined(__znver5__)
constexpr int prefetch_distance = 1024;
#else
constexpr int prefetch_distance = 0;
#endif
