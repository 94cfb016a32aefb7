// base/formats.h: the stored formats to the last bit. fast/simd.h: its lanes against double precision.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "../fast/simd.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <limits>

#include "reference.h"

using reference::Random;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

// ---- Helpers -----------------------------------------------------------------------------------------------

// From the definitions of the formats.
double value_of(f16 x) { return reference::value_of(x.bits, 5, 10); }
double value_of(bf16 x) { return reference::value_of(x.bits, 8, 7); }
// fp8 e4m3 has no infinity, and NaN only where all bits are set; its largest number is 448.
double value_of(fp8 x) {
    int exponent = x.bits >> 3 & 15, fraction = x.bits & 7;
    double magnitude = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
    return (x.bits & 0x7f) == 0x7f ? NAN : x.bits & 0x80 ? -magnitude : magnitude;
}

template <class Number>
Number encoded(float x) {
    Number number;
    from_float(number, x);
    return number;
}

// Equal bits, or both NaN.
bool same(float a, float b) {
    return (std::isnan(a) && std::isnan(b)) || bit_cast<uint32_t>(a) == bit_cast<uint32_t>(b);
}

// Room for `count` numbers that end where the readable memory ends: what touches the next one crashes.
template <class Number>
struct Guarded {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *mapping = (char *)mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    Guarded() { REQUIRE(mprotect(mapping + page, page, PROT_NONE) == 0); }
    ~Guarded() { munmap(mapping, 2 * page); }
    Number *room(size_t count) const { return (Number *)(mapping + page) - count; }
};

template <class Number>
void fill(Number *to, Random &random, int count) {
    for (int i = 0; i < count; i++) from_float(to[i], (float)random.uniform(-2, 2));
}

Vec lanes_of(const std::vector<float> &numbers) { return load(numbers.data()); }

std::vector<float> numbers_of(Vec vec) {
    std::vector<float> numbers(lanes);
    store(numbers.data(), vec);
    return numbers;
}

// ---- Formats -----------------------------------------------------------------------------------------------

TEST_CASE_TEMPLATE("every bit pattern decodes to its value, every number encodes to itself, and NaN to NaN", Number,
                   f16, bf16, fp8) {
    int wrong = 0;
    for (int bits = 0; bits < 1 << 8 * sizeof(Number); bits++) {
        Number number, again;
        number.bits = (decltype(number.bits))bits, again = encoded<Number>(to_float(number));
        wrong += !same(to_float(number), (float)value_of(number));
        wrong += std::isnan(value_of(number)) ? !std::isnan(value_of(again)) : again.bits != number.bits;
    }
    CHECK(wrong == 0);
    for (uint32_t sign : {0u, 0x80000000u})  // what tells this NaN from infinity is cut off with the low bits
        CHECK(std::isnan(value_of(encoded<Number>(bit_cast<float>(sign | 0x7f800001)))));
}

TEST_CASE_TEMPLATE("between two neighbours, encoding rounds to the nearest and ties to even", Number, f16, bf16, fp8) {
    using Bits = decltype(Number::bits);
    Bits sign_bit = (Bits)(1 << (8 * sizeof(Bits) - 1));
    Bits end = encoded<Number>(infinity).bits;  // as if it were the next number; fp8 has none there
    int wrong = 0;
    for (Bits sign : {Bits(0), sign_bit}) {
        for (Bits low = 0; low < end; low++) {
            Bits high = (Bits)(low + 1), even = low & 1 ? high : low;
            double below = value_of(Number{low}), above = value_of(Number{high});
            if (std::isinf(above)) above = 2 * below - value_of(Number{(Bits)(low - 1)});
            float middle = (float)((below + above) / 2), factor = sign ? -1 : 1;
            wrong += encoded<Number>(factor * middle).bits != (sign | even);
            wrong += encoded<Number>(factor * std::nextafter(middle, 0.0f)).bits != (sign | low);
            wrong += encoded<Number>(factor * std::nextafter(middle, infinity)).bits != (sign | high);
        }
    }
    CHECK(wrong == 0);
}

TEST_CASE("the ends of the range") {
    const std::pair<float, int> f16_ends[] = {{65504, 0x7bff},      {65519.996f, 0x7bff}, {65520, 0x7c00},
                                              {-1e30f, 0xfc00},     {0x1p-24f, 1},        {0x1p-25f, 0},
                                              {0x1.000002p-25f, 1}, {-1e-30f, 0x8000}};
    for (auto [x, bits] : f16_ends) CHECK(encoded<f16>(x).bits == bits);
    const std::pair<float, int> bf16_ends[] = {{std::numeric_limits<float>::max(), 0x7f80},
                                               {-infinity, 0xff80},
                                               {bit_cast<float>(0x8000), 0},
                                               {bit_cast<float>(0x8001), 1},
                                               {-0.0f, 0x8000}};
    for (auto [x, bits] : bf16_ends) CHECK(encoded<bf16>(x).bits == bits);
    for (float large : {448.0f, 448.00003f, 463.0f, 464.0f, 480.0f, 1e30f, infinity})
        CHECK((encoded<fp8>(large).bits == 0x7e && encoded<fp8>(-large).bits == 0xfe));
    for (float small : {0.0f, 1e-45f, 1e-30f, 0x1p-10f})
        CHECK((encoded<fp8>(small).bits == 0 && encoded<fp8>(-small).bits == 0x80));
}

TEST_CASE("every format rounds as the definition in double precision does, over all magnitudes of float32") {
    Random random{9};
    int wrong = 0;
    for (uint32_t i = 0; i < 0x20000; i++) {
        float x = bit_cast<float>(i << 15 | (uint32_t)(random.bits() & 0x7fff));
        if (std::isnan(x)) continue;
        wrong += !same(to_float(encoded<f16>(x)), (float)reference::to_f16(x));
        wrong += !same(to_float(encoded<bf16>(x)), (float)reference::to_bf16(x));
        wrong += !same(to_float(encoded<fp8>(x)), (float)reference::to_fp8(x));
    }
    CHECK(wrong == 0);
}

TEST_CASE("f16_above() and f16_below() are the nearest f16 on either side, for all f16 and between them") {
    int wrong = 0;
    auto check = [&](float x, float below, float above) {
        wrong += to_float(f16_above(x)) != above || to_float(f16_below(x)) != below;
        wrong += to_float(f16_above(-x)) != -below || to_float(f16_below(-x)) != -above;
    };
    for (uint16_t bits = 0; bits < 0x7c00; bits++) {
        float low = to_float(f16{bits}), high = to_float(f16{(uint16_t)(bits + 1)});  // infinity at last
        check(low, low, low);
        check(std::nextafter(low, infinity), low, high);
        check(std::isinf(high) ? 65520 : (low + high) / 2, low, high);
        check(std::nextafter(high, 0.0f), std::isinf(high) ? 65504 : low, high);
    }
    for (float large : {65504.004f, 1e30f}) check(large, 65504, infinity);
    check(infinity, infinity, infinity);
    check(1e-45f, 0, 0x1p-24f);
    CHECK(wrong == 0);
    CHECK(std::isnan(to_float(f16_above(not_a_number))));
    CHECK(std::isnan(to_float(f16_below(not_a_number))));
}

TEST_CASE("int8 rounds to the nearest whole number, ties to even, and ends at 127 on both sides") {
    for (int n = -127; n <= 127; n++) {
        CAPTURE(n);
        float at = (float)n;
        CHECK((int)encoded<int8_t>(at) == n);
        CHECK(to_float((int8_t)n) == at);
        for (float tie : {at + 0.5f, at - 0.5f}) CHECK((int)encoded<int8_t>(std::nextafter(tie, at)) == n);
        if (n < 127) CHECK((int)encoded<int8_t>(at + 0.5f) == (n % 2 ? n + 1 : n));
        if (n < 127) CHECK((int)encoded<int8_t>(std::nextafter(at + 0.5f, infinity)) == n + 1);
    }
    for (float large : {127.5f, 128.0f, 1000.0f, 4e6f}) {
        CHECK((int)encoded<int8_t>(large) == 127);
        CHECK((int)encoded<int8_t>(-large) == -127);
    }
}

TEST_CASE_TEMPLATE("packed codes: each place holds each code and leaves the others alone", Codes, Packed<4>,
                   Packed<2>) {
    CHECK(sizeof(Codes) == (size_t)Codes::size);
    for (int background : {0, +Codes::largest}) {
        for (int place = 0; place < Codes::count; place++) {
            for (int code = 0; code <= Codes::largest; code++) {
                Codes codes = {};
                for (int i = 0; i < Codes::count; i++) codes.set(i, i == place ? code : background);
                for (int i = 0; i < Codes::count; i++) {
                    int expected = i == place ? code : background;
                    REQUIRE(codes.code(i) == expected);
                    REQUIRE(numbers_of(load(&codes, i / lanes))[i % lanes] == expected);
                }
            }
        }
    }
}

// ---- Vec ---------------------------------------------------------------------------------------------------

TEST_CASE_TEMPLATE("load() and load_part() give what to_float() gives, for fp8 a 2^-8th of it", Number, float, f16,
                   bf16, fp8, int8_t) {
    std::vector<Number> numbers(sizeof(Number) == 1 ? 256 : 0x10000);
    for (size_t i = 0; i < numbers.size(); i++) {
        uint32_t pattern = sizeof(Number) == 4 ? (uint32_t)i << 16 | 0x1234 : (uint32_t)i;
        memcpy(&numbers[i], &pattern, sizeof(Number));  // the low bytes
    }
    const float factor = std::is_same_v<Number, fp8> ? 256 : 1;
    auto expected = [&](size_t i) { return to_float(numbers[i]); };
    auto differ = [&](float got, float want) {  // fp8 has no NaN in a row: the scale tells it
        return !same(factor * got, want) && !(factor > 1 && std::isnan(want));
    };
    int wrong = 0;
    for (size_t i = 0; i < numbers.size(); i += lanes) {
        std::vector<float> whole = numbers_of(load(&numbers[i]));
        for (int lane = 0; lane < lanes; lane++) wrong += differ(whole[lane], expected(i + lane));
        for (int count = 0; count < lanes; count++) {
            std::vector<float> part = numbers_of(load_part(&numbers[i], count));
            for (int lane = 0; lane < lanes; lane++) wrong += differ(part[lane], lane < count ? expected(i + lane) : 0);
        }
    }
    CHECK(wrong == 0);
}

TEST_CASE("load_pairs() of f16 takes pairs apart, lane by lane, infinities too") {
    for (int first = 0; first < 0x10000; first += 2 * lanes) {
        std::vector<f16> pairs(2 * lanes);
        for (int i = 0; i < 2 * lanes; i++) pairs[i] = {(uint16_t)(first + i)};
        Vec even, odd;
        load_pairs(pairs.data(), even, odd);
        int wrong = 0;
        for (int i = 0; i < lanes; i++)
            wrong += !same(numbers_of(even)[i], to_float(pairs[2 * i])) +
                     !same(numbers_of(odd)[i], to_float(pairs[2 * i + 1]));
        REQUIRE_MESSAGE(wrong == 0, "from bits ", first);
    }
}

TEST_CASE("store_part() writes its part and nothing behind it") {
    Random random{2};
    std::vector<float> from = reference::random_floats(random, lanes);
    Guarded<float> guarded;
    for (int count = 0; count < lanes; count++) {
        float *to = guarded.room(count);
        store_part(to, lanes_of(from), count);
        CHECK(memcmp(to, from.data(), count * sizeof(float)) == 0);
    }
}

TEST_CASE("lane by lane: add, mul, div, fma, max, round, scale") {
    Random random{3};
    std::vector<float> a = reference::random_floats(random, lanes, -9, 9), b = reference::random_floats(random, lanes);
    std::vector<float> c = reference::random_floats(random, lanes),
                       n = {-250, -149, -127, -126, -25, -24, -2, -1, 0, 1, 2, 3, 24, 25, 126, 127};
    Vec x = lanes_of(a), y = lanes_of(b);
    std::vector<float> sum = numbers_of(add(x, y)), product = numbers_of(mul(x, y)), ratio = numbers_of(div(x, y));
    std::vector<float> fused = numbers_of(fma(x, y, lanes_of(c))), most = numbers_of(max(x, y));
    std::vector<float> whole = numbers_of(round(x)), scaled = numbers_of(scale(x, lanes_of(n)));
    for (int i = 0; i < lanes; i++) {
        CHECK(same(sum[i], a[i] + b[i]));
        CHECK(same(product[i], a[i] * b[i]));
        CHECK(same(ratio[i], a[i] / b[i]));
        CHECK(std::fabs(fused[i] - ((double)a[i] * b[i] + c[i])) <= reference::gamma(2) * 10);
        CHECK(same(most[i], std::max(a[i], b[i])));
        CHECK(same(whole[i], std::nearbyint(a[i])));
        float expected = std::ldexp(a[i], (int)n[i]);
        CHECK((same(scaled[i], expected) || (n[i] < -126 && scaled[i] == 0)));
    }
}

TEST_CASE("max() takes its second argument where one is NaN; round() takes halves to even") {
    CHECK(std::isnan(numbers_of(max(set(1), set(not_a_number)))[0]));
    CHECK(numbers_of(max(set(not_a_number), set(1)))[0] == 1);
    CHECK(numbers_of(round(set(0.5f)))[0] == 0);
    CHECK(numbers_of(round(set(-1.5f)))[0] == -2);
    CHECK(numbers_of(round(set(2.5f)))[0] == 2);
}

TEST_CASE("sum() folds the lanes in halves, sum4() is sum() of each of four, and largest() looks at every lane") {
    Random random{4};
    for (int round = 0; round < 1000; round++) {
        Vec four[4];
        float sums[4];
        for (Vec &vec : four) vec = lanes_of(reference::random_floats(random, lanes));
        sum4(sums, four[0], four[1], four[2], four[3]);
        for (int i = 0; i < 4; i++) {
            std::vector<float> fold = numbers_of(four[i]);
            REQUIRE(largest(four[i]) == *std::max_element(fold.begin(), fold.end()));
            for (int half = lanes / 2; half > 0; half /= 2)
                for (int k = 0; k < half; k++) fold[k] += fold[k + half];
            REQUIRE(same(sum(four[i]), fold[0]));
            REQUIRE(same(sums[i], fold[0]));
        }
    }
}

// ---- exp ---------------------------------------------------------------------------------------------------

// Distance to e^x in units of the last place that float32 has there, or of 2^-127 where that is more.
double exp_error(float got, float x) {
    double exact = std::exp((double)x);
    int exponent;
    std::frexp(exact, &exponent);
    return std::fabs(got - exact) / std::ldexp(1, std::max(exponent - 24, -127));
}

// Products of bf16 numbers are exact in double, and so is their sum with a float unless it is rounded once more.
TEST_CASE("add_pair() adds the second product first, each with one rounding, and takes less than 2^-126 for 0") {
    auto pair = [](float sum, float a0, float b0, float a1, float b1) {
        bf16 a[2], b[2];
        from_float(a[0], a0), from_float(a[1], a1), from_float(b[0], b0), from_float(b[1], b1);
        return add_pair(sum, a, b);
    };
    CHECK(pair(1, 2, 3, 5, 7) == 42);
    CHECK(pair(0x1p24f, 1, 1, 1, 1) == 0x1p24f);        // each 1 is lost by itself: ties to even
    CHECK(pair(-0x1p24f, 1, 1, 0x1p12f, 0x1p12f) == 1);  // the second product goes first
    CHECK(pair(-0x1p24f, 0x1p12f, 0x1p12f, 1, 1) == 1);
    CHECK(pair(0x1p24f, -0x1p12f, 0x1p12f, 1, 1) == 0);
    CHECK(pair(0x1p-127f, 0, 0, 0, 0) == 0);
    CHECK(pair(0, 0x1p-127f, 0x1p10f, 0, 0) == 0);
    CHECK(pair(0, 0x1p-70f, 0x1p-70f, 0, 0) == 0);
    CHECK(std::isnan(pair(0, INFINITY, 0, 1, 1)));
    // What the processor adds, to the last bit: small and large, denormal and infinite.
    if (!multiplies_pairs) return;
    Random random{17};
    for (int round = 0; round < 20000; round++) {
        paired_bf16 a[2 * lanes], b[2 * lanes];
        float sums[lanes], found[lanes];
        const uint32_t lowest = round % 3 == 0 ? 0 : 100, range = round % 3 == 2 ? 60 : 255 - lowest;
        auto bits = [&] { return (uint32_t)random.bits(); };
        auto number = [&] { return (bits() & 0x807fffff) | (lowest + bits() % range) << 23; };
        for (paired_bf16 &x : a) x.bits = (uint16_t)(number() >> 16);
        for (paired_bf16 &x : b) x.bits = (uint16_t)(number() >> 16);
        for (float &sum : sums) sum = bit_cast<float>(number());
        store(found, add_product<paired_bf16>(load(a), load(b), load(sums)));
        for (int i = 0; i < lanes; i++) {
            float expected = add_pair(sums[i], a + 2 * i, b + 2 * i);
            REQUIRE((memcmp(&found[i], &expected, 4) == 0 || (std::isnan(found[i]) && std::isnan(expected))));
        }
    }
}

TEST_CASE("exp() is within 2 ulp, or 2^-126, from -104 to 88, and where its range reduction changes over") {
    std::vector<float> x;
    for (float end : {-104.0f, 88.0f})
        for (uint32_t last = bit_cast<uint32_t>(end), bits = last & 0x80000000; bits <= last; bits += 331)
            x.push_back(bit_cast<float>(bits));
    for (int n = -149; n < 126; n++) {
        float between = (float)((n + 0.5) * std::log(2.0));
        for (float near : {std::nextafter(between, -infinity), between, std::nextafter(between, infinity)})
            x.push_back(near);
    }
    x.insert(x.end(), {-104, 88});
    x.resize((x.size() + lanes - 1) / lanes * lanes);
    double most = 0;
    for (size_t i = 0; i < x.size(); i += lanes) {
        std::vector<float> e = numbers_of(exp(load(&x[i])));
        for (int lane = 0; lane < lanes; lane++) most = std::max(most, exp_error(e[lane], x[i + lane]));
    }
    CHECK(most <= 2);
}

TEST_CASE("exp() at its ends: 0 far below, 1 at 0, NaN for NaN") {
    for (float x : {-104.5f, -105.0f, -106.0f, -1000.0f, -1e30f, -infinity}) CHECK(same(numbers_of(exp(set(x)))[3], 0));
    for (float x : {0.0f, -0.0f, 1e-30f, -1e-30f}) CHECK(numbers_of(exp(set(x)))[0] == 1);
    CHECK(std::isnan(numbers_of(exp(set(not_a_number)))[0]));
    CHECK(std::isnan(numbers_of(exp(set(-not_a_number)))[lanes - 1]));
    CHECK(exp_error(numbers_of(exp(set(88)))[0], 88) <= 2);
}

// ---- Whole numbers of 16 bits ------------------------------------------------------------------------------

TEST_CASE("store() rounds to whole numbers of 16 bits, ties to even, and writes no more than a Vec of them") {
    for (float base : {-32767.0f, -1000.5f, -8.0f, 0.5f, 1.49f, 32750.0f}) {
        std::vector<float> x(lanes);
        for (int i = 0; i < lanes; i++) x[i] = base + (float)i;
        int16_t whole[lanes + 2];
        std::fill(whole, whole + lanes + 2, (int16_t)77);
        store(whole + 1, lanes_of(x));
        for (int i = 0; i < lanes; i++) CHECK(whole[i + 1] == std::nearbyint(x[i]));
        CHECK((whole[0] == 77 && whole[lanes + 1] == 77));
    }
}

TEST_CASE_TEMPLATE("pairs of packed codes times pairs of factors are exact sums, lane by lane", Codes, Packed<4>,
                   Packed<2>) {
    Random random{17};
    auto pick = [&](int low, int high) { return (int)std::floor(random.uniform(low, high + 1)); };
    for (int round = 0; round < 100; round++) {
        Codes a = {}, b = {};
        for (int i = 0; i < 32; i++) a.set(i, pick(0, Codes::largest)), b.set(i, pick(0, Codes::largest));
        int16_t factors[2] = {(int16_t)pick(-32767, 32767), (int16_t)pick(-32767, 32767)};
        if (round == 0) factors[0] = factors[1] = 32767;
        for (int part = 0; part < 32 / lanes; part++) {
            Ints sums = to_ints(set(5));
            for (int times = 0; times < 3; times++)
                sums = add_products(sums, set_pair(factors), load_pairs(&a, &b, part));
            std::vector<float> got = numbers_of(to_floats(sums));
            for (int i = 0; i < lanes; i++) {
                int at = lanes * part + i;
                REQUIRE(got[i] == (float)(5 + 3 * (a.code(at) * factors[0] + b.code(at) * factors[1])));
            }
        }
    }
}

TEST_CASE("int8 weights times four int8 numbers are exact sums, a row to each lane") {
    Random random{18};
    int8_t weights[lanes][4];
    for (int round = 0; round < 100; round++) {
        Int8x4 x;
        auto pick = [&] { return (int8_t)(round == 0 ? -127 : std::floor(random.uniform(-127, 128))); };
        int total = 0;
        for (int i = 0; i < 4; i++) {
            x.number[i] = round == 1 ? 127 : pick();
            x.magnitude[i] = (uint8_t)std::abs(x.number[i]);
            total += x.number[i];
            for (int lane = 0; lane < lanes; lane++) weights[lane][i] = pick();
        }
        Ints sums = begin_products(2 * total);
        for (int times = 0; times < 2; times++) sums = add_products(sums, weights, x);
        std::vector<float> got = numbers_of(to_floats(sums));
        for (int lane = 0; lane < lanes; lane++) {
            int exact = 0;
            for (int i = 0; i < 4; i++) exact += weights[lane][i] * x.number[i];
            REQUIRE(got[lane] == 2.0f * (float)exact);
        }
    }
}

// ---- Int8 weights --------------------------------------------------------------------------------------------------

TEST_CASE(
    "a group becomes whole numbers times a scale: within half a step of each number, NaN where one is not finite") {
    Random random{21};
    for (int count = 0; count <= int8_group; count++) {
        Guarded<float> guarded;  // reads nothing behind them
        float *x = guarded.room(count), most = 0;
        fill(x, random, count);
        for (int i = 0; i < count; i++) most = std::max(most, std::fabs(x[i]));
        int8_t to[int8_group];
        float scale = quantize(to, x, count);
        CHECK(scale == most / 127);
        for (int i = 0; i < int8_group; i++)
            REQUIRE(std::fabs(to[i] * scale - (i < count ? x[i] : 0)) <= scale * (0.5f + 127 * reference::gamma(2)));
        for (float broken : {infinity, -infinity, not_a_number}) {
            if (count == 0) continue;
            x[count / 2] = broken;
            CHECK(std::isnan(quantize(to, x, count)));
            CHECK(to[0] == 0);
        }
    }
    float tiny[] = {1e-45f, -1e-45f};  // a scale below all numbers
    int8_t to[int8_group];
    CHECK((quantize(to, tiny, 2) == 0 && to[0] == 0 && to[1] == 0));
}

TEST_CASE("blocks of int8 weights hold each number where at() finds it, zeros beyond, and refuse what has no scale") {
    Random random{22};
    const int rows = 11, inputs = 75;
    std::vector<float> weight = reference::random_floats(random, rows * inputs);
    std::vector<Int8Block> blocks(int8_groups(inputs));
    CHECK(blocks.size() * sizeof(Int8Block) == int8_bytes(rows, inputs));
    REQUIRE(quantize(blocks.data(), weight.data(), rows, inputs));
    for (int row = 0; row < int8_rows; row++) {
        for (int c = 0; c < 96; c++) {
            const Int8Block &block = blocks[c / int8_group];
            float scale = to_float(block.scale[row]), number = scale * (float)block.at(row, c % int8_group);
            if (row < rows && c < inputs)
                REQUIRE(std::fabs(number - weight[row * inputs + c]) <= 0.51f * scale);
            else
                REQUIRE(number == 0);
        }
    }
    for (float broken : {infinity, not_a_number, 8.4e6f}) {
        weight[40] = broken;
        CHECK(!quantize(blocks.data(), weight.data(), rows, inputs));
    }
}
