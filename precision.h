// How is a row stored: as numbers, as codes with a scale, as groups of codes.
//
// A row is one position's vector of one KV head of one layer: `width` numbers, which a precision stores as bytes. The
// precision says how many bytes a row takes, encodes it, and reads one number of it. It does not know where rows are.
//
// To add a precision, write one struct and list it in `Precision` below: flags, help, error messages, the choice at run
// time, tables and tests go through that list. docs/09_make_your_own.md adds one step by step.
//
// If a number is not finite, or too large for its scale, all that share the scale become NaN: better seen than wrong.
#pragma once

#include <cfloat>
#include <cmath>
#include <string>
#include <variant>

#include "base/choice.h"
#include "base/formats.h"
#include "base/team.h"

// ---- Numbers -----------------------------------------------------------------------------------------------

// Numbers one after another, in a format that the machine converts itself. A stored number is off by at most u times
// itself, where u is the unit roundoff, half the distance from 1 to the next number.
template <class Number>
struct PlainRow {
    static constexpr bool blocks = false;
    HOST_DEVICE static size_t row_bytes(int width) { return (size_t)width * sizeof(Number); }
    template <class Values, class Team = Alone>
    HOST_DEVICE static void encode(char *row, const Values &values, int width, Team team = {}) {
        for (int i = team.first(); i < width; i += team.step()) from_float(((Number *)row)[i], values[i]);
    }
    HOST_DEVICE static float number(const char *row, int channel) { return to_float(((const Number *)row)[channel]); }
};

// ---- Codes, one scale a row ---------------------------------------------------------------------------------
//
// A row begins with an f16 scale. The largest magnitude of the row becomes the code `largest`, and a number is
// code * scale / divisor. Why a divisor: f16 has no positive number below 2^-24, and a stored scale that is `divisor`
// times as large reaches that limit only with rows that are `divisor` times as small.
HOST_DEVICE inline f16 scale_of_row(const char *row) {
    f16 scale;
    memcpy(&scale, row, sizeof scale);  // rows of an odd width are not aligned
    return scale;
}

// Writes the scale of `values` and returns the distance of two codes, by which numbers are divided; 0: all codes are 0.
template <class Values, class Team>
HOST_DEVICE inline float encode_scale(char *row, const Values &values, int width, int largest, int divisor, Team team) {
    float max = 0;
    for (int i = team.first(); i < width; i += team.step()) {
        float magnitude = fabsf(values[i]);
        if (!(magnitude <= FLT_MAX)) magnitude = INFINITY;  // NaN, too
        max = magnitude > max ? magnitude : max;
    }
    f16 scale = f16_above(team.largest(max) / (float)largest * (float)divisor);
    float step = to_float(scale) / (float)divisor;
    if (!(step <= FLT_MAX)) from_float(scale, NAN), step = 0;
    if (team.first() == 0) memcpy(row, &scale, sizeof scale);
    return step;
}

// Codes of a byte or more, with one scale before them. The scale is rounded up, so no code is cut off, and a number is
// off by at most half the distance of two codes: for int8 scale / 2, where scale <= max|x| / 127 * (1 + 2^-10) + 2^-24.
template <class Code, int largest, int divisor = 1>
struct ScaledRow {
    static constexpr bool blocks = false;
    HOST_DEVICE static size_t row_bytes(int width) { return sizeof(f16) + (size_t)width * sizeof(Code); }
    HOST_DEVICE static const Code *codes(const char *row) { return (const Code *)(row + sizeof(f16)); }
    template <class Values, class Team = Alone>
    HOST_DEVICE static void encode(char *row, const Values &values, int width, Team team = {}) {
        float step = encode_scale(row, values, width, largest, divisor, team);
        Code *code = (Code *)(row + sizeof(f16));
        for (int i = team.first(); i < width; i += team.step()) from_float(code[i], step > 0 ? values[i] / step : 0);
    }
    HOST_DEVICE static float number(const char *row, int channel) {
        return to_float(scale_of_row(row)) / divisor * to_float(codes(row)[channel]);
    }
};

// An 8-bit float as a code.
struct fp8 {  // e4m3 (Micikevicius et al. 2022, FP8 Formats): 1 sign, 4 exponent, 3 fraction bits; 2^-9 .. 448
    uint8_t bits;
};

// The same bits are an f16 that is 2^8 times as small, except for NaN, which fp8 has in the place of 480.
HOST_DEVICE inline float to_float(fp8 x) {
    if ((x.bits & 0x7f) == 0x7f) return bit_cast<float>(0x7fc00000u);
    return 256 * to_float(f16{(uint16_t)((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)});
}

// A number that is too large becomes 448, infinity too. NaN stays NaN.
HOST_DEVICE inline void from_float(fp8 &to, float x) {
    uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    bool nan = magnitude > 0x7f800000, large = magnitude >= 0x43e00000;
    to.bits = (uint8_t)(sign | (nan ? 0x7f : large ? 0x7e : shortened(magnitude, 0x3c800000, 20)));
}

// ---- Groups of 32 codes -------------------------------------------------------------------------------------

// The largest f16 at or below x.
HOST_DEVICE inline f16 f16_below(float x) {
    f16 above = f16_above(-x);
    return {(uint16_t)(above.bits ^ 0x8000)};
}

struct ScaleAndZero {
    f16 scale, zero;
};

// 32 whole numbers of 2 or 4 bits. A byte holds numbers that are far apart, so one shift of a register of bytes gives a
// register of neighbours. With 4 bits byte i has the numbers i and i + 16; with 2 bits i, i + 8, i + 16 and i + 24.
template <int bits>
struct Packed {
    static constexpr int count = 32, largest = (1 << bits) - 1, size = 4 * bits;
    uint8_t bytes[size];
    HOST_DEVICE int code(int i) const { return bytes[i % size] >> bits * (i / size) & largest; }
    HOST_DEVICE void set(int i, int code) { bytes[i % size] |= (uint8_t)(code << bits * (i / size)); }  // was 0
};

// 32 numbers that share an f16 scale and an f16 zero point: x ~ zero + scale * code, with codes from 0 to 2^bits - 1.
// The zero point is rounded down and the scale up, so a number is off by at most scale / 2, where
//   scale <= (max - min + |min| * 2^-10 + 2^-24) / (2^bits - 1) * (1 + 2^-10) + 2^-24
constexpr int group_size = 32;

template <int bits>
struct Group {
    ScaleAndZero both;
    Packed<bits> codes;
    HOST_DEVICE float number(int i) const { return to_float(both.zero) + to_float(both.scale) * (float)codes.code(i); }
};

// Returns the group of the `count` <= 32 numbers x(0), x(1), ...
template <int bits, class Numbers>
HOST_DEVICE inline Group<bits> quantize(Numbers x, int count) {
    float low = FLT_MAX, high = -FLT_MAX;
    bool finite = true;
    for (int i = 0; i < count; i++) {
        float number = x(i);
        finite &= fabsf(number) <= FLT_MAX;
        low = number < low ? number : low;
        high = number > high ? number : high;
    }
    Group<bits> group = {};
    group.both.zero = f16_below(finite ? low : NAN);
    float zero = to_float(group.both.zero);
    group.both.scale = f16_above((high - zero) / Packed<bits>::largest);
    float scale = to_float(group.both.scale);
    if (!(scale <= FLT_MAX)) {  // infinite or NaN, or the zero point was
        from_float(group.both.scale, NAN);
        from_float(group.both.zero, NAN);
        return group;
    }
    for (int i = 0; i < count && scale > 0; i++) {
        int8_t code;
        from_float(code, (x(i) - zero) / scale);
        group.codes.set(i, code > Packed<bits>::largest ? Packed<bits>::largest : code);
    }
    return group;
}

// Groups of 32, as in KIVI (Liu et al. 2024): values per token, keys per channel, because a few channels of keys are
// much larger than the others at every token. Groups fill rows like any other codes, so pages and rings work unchanged.
//
// A row of values is n = ceil(width / 32) groups, each of 32 channels of its token. Keys are quantized 32 positions at
// a time: a group is one channel at 32 positions. Such a block is stored transposed in the rows of its 32 positions:
// row i holds the channels [i * n, i * n + n) of all 32. With D = 64, so n = 2, positions 32 to 63 are stored as
//            keys                                    values
//   row 32   channels 0, 1 of positions 32 .. 63     position 32: channels 0 .. 31, channels 32 .. 63
//   row 33   channels 2, 3 of positions 32 .. 63     position 33: channels 0 .. 31, channels 32 .. 63
//   ...
//   row 63   channels 62, 63 of positions 32 .. 63   position 63: channels 0 .. 31, channels 32 .. 63
// Until a block has its 32 positions, its keys and values are kept at f16 in the sequence's residual block
// (CacheView::residual_keys, residual_values).
template <int bits>
struct GroupedRow {
    static constexpr bool blocks = true;
    using G = Group<bits>;
    HOST_DEVICE static int groups(int width) { return (width + group_size - 1) / group_size; }
    HOST_DEVICE static size_t row_bytes(int width) { return groups(width) * sizeof(G); }
    HOST_DEVICE static const G &group(const char *row, int i) { return ((const G *)row)[i]; }
    // Encodes row i of a block; number(t, channel) is a number of the block's position t.
    template <bool keys, class Numbers, class Team>
    HOST_DEVICE static void encode_row(char *row, int i, const Numbers &number, int width, Team team) {
        const int n = groups(width);
        for (int g = team.first(); g < n; g += team.step()) {
            const int first = keys ? i * n + g : g * group_size, left = width - first;  // channels
            auto x = [&](int k) -> float { return keys ? number(k, first) : number(i, first + k); };
            if (left > 0) ((G *)row)[g] = quantize<bits>(x, keys || left > group_size ? group_size : left);
        }
    }
    template <class Values, class Team = Alone>
    HOST_DEVICE static void encode(char *row, const Values &values, int width, Team team = {}) {  // a row of values
        auto number = [&](int, int channel) -> float { return values[channel]; };
        encode_row<false>(row, 0, number, width, team);
    }
    HOST_DEVICE static float number(const char *row, int channel) {
        return group(row, channel / group_size).number(channel % group_size);
    }
    // The row of a block in which key_number() finds the numbers of a channel of its keys.
    HOST_DEVICE static int row_of_channel(int channel, int width) { return channel / groups(width); }
    HOST_DEVICE static float key_number(const char *row, int t, int channel, int width) {
        return group(row, channel % groups(width)).number(t);
    }
};

// ---- The precisions ------------------------------------------------------------------------------------------
//
// code_bits: bits of a number alone. bits: with its share of scales and zero points, for rows of 128 numbers. A stored
// number is off by at most unit_roundoff times itself; where numbers share a scale, by unit_roundoff (1 + 2^-10) times
// the largest of them.
struct F32 : PlainRow<float> {
    static constexpr const char *name = "f32";
    static constexpr double code_bits = 32, bits = 32, unit_roundoff = 0x1p-24;
};
struct F16 : PlainRow<f16> {
    static constexpr const char *name = "f16";
    static constexpr double code_bits = 16, bits = 16, unit_roundoff = 0x1p-11;
};
struct BF16 : PlainRow<bf16> {
    static constexpr const char *name = "bf16";
    static constexpr double code_bits = 16, bits = 16, unit_roundoff = 0x1p-8;
};
struct FP8 : ScaledRow<fp8, 448, 256> {  // magnitudes of up to 114,632
    static constexpr const char *name = "fp8";
    static constexpr double code_bits = 8, bits = 8.125, unit_roundoff = 0x1p-4;
};
struct Int8 : ScaledRow<int8_t, 127> {
    static constexpr const char *name = "int8";
    static constexpr double code_bits = 8, bits = 8.125, unit_roundoff = 0.5 / 127;
};
struct Int4 : GroupedRow<4> {
    static constexpr const char *name = "int4";
    static constexpr double code_bits = 4, bits = 5, unit_roundoff = 1.0 / 15;
};
struct Int2 : GroupedRow<2> {
    static constexpr const char *name = "int2";
    static constexpr double code_bits = 2, bits = 3, unit_roundoff = 1.0 / 3;
};

using Precision = std::variant<F32, F16, BF16, FP8, Int8, Int4, Int2>;

// Whether 32 positions are stored together.
HOST_DEVICE inline bool has_blocks(const Choice<Precision> &type) {
    return type.visit([](auto format) { return decltype(format)::blocks; });
}

inline size_t row_bytes(const Precision &type, int width) {
    return std::visit([&](auto format) { return format.row_bytes(width); }, type);
}

inline double row_payload(const Precision &type, int width) {
    return std::visit([&](auto format) { return std::ceil(decltype(format)::code_bits * width / 8); }, type);
}

// Number `channel` of the key (keys) or the value of position t, dequantized; row_at(i) is the row of position i. Where
// a format has blocks, the block of t is full.
template <bool keys, class Format, class RowAt>
HOST_DEVICE float stored_number(RowAt row_at, int t, int channel, int width) {
    if constexpr (keys && Format::blocks) {
        const char *row = row_at(t / group_size * group_size + Format::row_of_channel(channel, width));
        return Format::key_number(row, t % group_size, channel, width);
    } else {
        return Format::number(row_at(t), channel);
    }
}

// The largest number that reads back as finite. Types with blocks keep the newest positions at f16: it is that of f16.
inline float largest_of(const Precision &type) {
    auto of = [](auto format) {
        auto stored = [&](uint32_t magnitude) {  // as it reads back
            float x = bit_cast<float>(magnitude);
            std::vector<char> row(format.row_bytes(1));
            format.encode(row.data(), &x, 1);
            return format.number(row.data(), 0);
        };
        uint32_t below = 0, beyond = 0x7f800000;  // infinity: magnitudes are in the order of their bits
        while (beyond - below > 1) {
            uint32_t middle = below + (beyond - below) / 2;
            (stored(middle) <= FLT_MAX ? below : beyond) = middle;
        }
        return stored(below);
    };
    return std::visit([&](auto format) { return decltype(format)::blocks ? of(F16()) : of(format); }, type);
}
