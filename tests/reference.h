// What the engine computes, once more: in double precision, straight from the definitions, without a line of the
// engine. Beside each result stands a bound of the error that float32 may make, whatever the order of its sums
// (Higham 2002, Accuracy and Stability of Numerical Algorithms, §3.1), so that no test needs a tolerance of its own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace reference {

// ---- Random numbers, the same on every machine (splitmix64, Steele et al. 2014) ----------------------------

struct Random {
    uint64_t state;
    uint64_t bits() {
        uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
    }
    double uniform(double low, double high) { return low + (high - low) * (double)(bits() >> 11) * 0x1p-53; }
};

inline std::vector<float> random_floats(Random &random, size_t count, double low = -1, double high = 1) {
    std::vector<float> numbers(count);
    for (float &number : numbers) number = (float)random.uniform(low, high);
    return numbers;
}

// ---- Errors ------------------------------------------------------------------------------------------------

constexpr double unit = 0x1p-24;  // unit roundoff of float32

// Bound of the relative error of n roundings in a row.
inline double gamma(double n) { return n * unit / (1 - n * unit); }

// ||values - expected|| / ||expected||: of a NaN it is one, too; infinity where they are not as many.
template <class Numbers>
double relative_error(const std::vector<float> &values, const Numbers &expected) {
    if (values.size() != expected.size()) return INFINITY;
    double difference = 0, size = 0;
    for (size_t i = 0; i < values.size(); i++) {
        difference += std::pow((double)values[i] - expected[i], 2);
        size += std::pow((double)expected[i], 2);
    }
    return std::sqrt(difference / size);
}

// Numbers, and how far from each of them a float32 computation may end.
struct Expected {
    std::vector<double> value, bound;
    void add(double number, double error) {
        value.push_back(number);
        bound.push_back(error);
    }
};

// The largest error as a share of its bound: at most 1 if all is well, infinity where a number is not one.
inline double worst(const std::vector<float> &got, const Expected &expected) {
    if (got.size() != expected.value.size()) return INFINITY;
    double most = 0;
    for (size_t i = 0; i < got.size(); i++) {
        double error = std::fabs(got[i] - expected.value[i]);
        if (error == 0) continue;
        most = std::isfinite(error) ? std::max(most, error / expected.bound[i]) : INFINITY;
    }
    return most;
}

inline bool same_bits(const std::vector<float> &a, const std::vector<float> &b) {
    return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// ---- Formats -----------------------------------------------------------------------------------------------
//
// What is read of numbers that were stored, from the definitions alone. They round to float32 where precision.h
// computes in it: differences and quotients. A double's quotient of two float32 numbers, rounded again, is float32's
// own (Figueroa 1995), so every bit is determined.

// The value of a bit pattern with so many exponent and fraction bits, from the definition of the format.
inline double value_of(uint16_t bits, int exponent_bits, int fraction_bits) {
    int most = (1 << exponent_bits) - 1, exponent = bits >> fraction_bits & most;
    double fraction = bits & ((1 << fraction_bits) - 1), sign = bits & 0x8000 ? -1 : 1;
    if (exponent == most) return fraction ? NAN : sign * INFINITY;
    int power = std::max(exponent, 1) - (most >> 1) - fraction_bits;
    return sign * std::ldexp(fraction + (exponent ? 1 << fraction_bits : 0), power);
}

// x rounded to a format of so many fraction bits whose smallest normal number is 2^least; nearest: ties to even.
enum class Way { nearest, up, down };
inline double to_format(double x, int fraction_bits, int least, Way way = Way::nearest) {
    if (x == 0 || !std::isfinite(x)) return x;
    double distance = std::ldexp(1, std::max(std::ilogb(x), least) - fraction_bits), steps = x / distance;
    return (way == Way::up     ? std::ceil(steps)
            : way == Way::down ? std::floor(steps)
                               : std::nearbyint(steps)) *
           distance;
}

// Beyond the largest number comes infinity; rounded towards zero, the largest number.
inline double to_f16(double x, Way way = Way::nearest) {
    double y = to_format(x, 10, -14, way);
    if (std::fabs(y) <= 65504 || !std::isfinite(x)) return y;
    return std::copysign(way == (x > 0 ? Way::down : Way::up) ? 65504 : INFINITY, x);
}
inline double to_bf16(double x) {
    double y = to_format(x, 7, -126);
    return std::fabs(y) >= 0x1p128 ? std::copysign(INFINITY, x) : y;
}
inline double to_fp8(double x) {
    double y = to_format(x, 3, -6);
    return std::fabs(y) > 448 ? std::copysign(448, x) : y;
}

// Numbers that share a scale, and a zero point where the format has one: x ~ zero + scale * code.
struct Shared {
    double scale = 0, zero = 0;
    std::vector<double> codes;
    float number(size_t i) const { return (float)(zero + scale * codes[i]); }
};

// The scale takes the largest magnitude to the largest code, or a little below. All is NaN if there is no such scale.
// It is stored `times` as large.
template <class ToCode>
Shared symmetric(const std::vector<float> &x, double largest, double times, ToCode to_code) {
    Shared shared;
    double most = 0;
    for (float number : x) most = std::isfinite(number) ? std::max(most, (double)std::fabs(number)) : NAN;
    shared.scale = to_f16(most / largest * times, Way::up) / times;
    if (!std::isfinite(shared.scale)) shared.scale = NAN;
    for (float number : x)
        shared.codes.push_back(shared.scale == 0 ? 0 : to_code((float)((double)number / shared.scale)));
    return shared;
}

inline Shared symmetric_int8(const std::vector<float> &x) {
    return symmetric(x, 127, 1, [](double quotient) { return std::nearbyint(quotient); });
}

// The zero point is the lowest number, or a little below; the scale takes the highest to the last code, or below.
inline Shared asymmetric(const std::vector<float> &x, double largest) {
    Shared shared;
    double low = INFINITY, high = -INFINITY, sum = 0;
    for (float number : x) low = std::min(low, (double)number), high = std::max(high, (double)number), sum += number;
    if (!std::isfinite(sum)) low = NAN;
    shared.zero = to_f16(low, Way::down);
    shared.scale = to_f16((float)(high - shared.zero) / largest, Way::up);
    if (!std::isfinite(shared.zero) || !std::isfinite(shared.scale)) shared.scale = shared.zero = NAN;
    for (float number : x) {
        double quotient = (float)((float)(number - shared.zero) / shared.scale);
        shared.codes.push_back(shared.scale == 0 ? 0 : std::min(std::nearbyint(quotient), largest));
    }
    return shared;
}

// How many numbers of a vector share a scale; 32 means that 32 positions of a key's channel share one, too.
inline size_t sharing(const std::string &format, size_t width) {
    if (format == "int4" || format == "int2") return 32;
    if (format == "fp8" || format == "int8") return width;
    return 1;
}

// Numbers that share a scale, as they read. Empty where the format has no definition here.
inline std::vector<float> read_shared(const std::string &format, const std::vector<float> &x) {
    std::vector<float> read;
    Shared shared;
    if (format == "fp8") shared = symmetric(x, 448, 256, to_fp8);
    if (format == "int8") shared = symmetric_int8(x);
    if (format == "int4") shared = asymmetric(x, 15);
    if (format == "int2") shared = asymmetric(x, 3);
    for (size_t i = 0; i < shared.codes.size(); i++) read.push_back(shared.number(i));
    if (format == "f32") read = x;
    if (format == "f16")
        for (float number : x) read.push_back((float)to_f16(number));
    if (format == "bf16")
        for (float number : x) read.push_back((float)to_bf16(number));
    return read;
}

// A vector stored by itself, as it reads.
inline std::vector<float> read_vector(const std::string &format, const std::vector<float> &x) {
    std::vector<float> read;
    for (size_t i = 0, size; i < x.size(); i += size) {
        size = std::min(sharing(format, x.size()), x.size() - i);
        std::vector<float> part = read_shared(format, {x.begin() + i, x.begin() + i + size});
        read.insert(read.end(), part.begin(), part.end());
    }
    return read;
}

// The vectors of a block of keys, (32, width), where each channel shares a scale.
inline std::vector<std::vector<float>> read_block(const std::string &format, std::vector<std::vector<float>> block) {
    for (size_t c = 0; c < block[0].size(); c++) {
        std::vector<float> channel;
        for (const std::vector<float> &vector : block) channel.push_back(vector[c]);
        channel = read_shared(format, channel);
        for (size_t t = 0; t < block.size(); t++) block[t][c] = channel[t];
    }
    return block;
}

// ---- The layers --------------------------------------------------------------------------------------------

// before + weight x + bias; weight (outputs, inputs), bias and before (outputs) or empty.
inline void linear(Expected &y, const std::vector<float> &weight, const float *x, const std::vector<float> &bias,
                   const float *before, int outputs, int inputs) {
    for (int o = 0; o < outputs; o++) {
        double sum = 0, size = 0;
        for (int i = 0; i < inputs; i++) {
            double product = (double)weight[(size_t)o * inputs + i] * x[i];
            sum += product, size += std::fabs(product);
        }
        for (double term : {bias.empty() ? 0.0 : (double)bias[o], before ? (double)before[o] : 0.0})
            sum += term, size += std::fabs(term);
        y.add(sum, gamma(inputs + 2) * size);
    }
}

inline void rms_norm(Expected &out, const float *x, const std::vector<float> &gain, double epsilon) {
    double squares = 0;
    size_t width = gain.size();
    for (size_t i = 0; i < width; i++) squares += (double)x[i] * x[i];
    double factor = 1 / std::sqrt(squares / (double)width + epsilon);
    for (size_t i = 0; i < width; i++) {
        double number = x[i] * factor * gain[i];
        out.add(number, gamma((double)width + 8) * std::fabs(number));
    }
}

// Radians a position of each pair of channels (Su et al. 2021, RoFormer, theta 10,000).
inline std::vector<float> frequencies_of(int width) {
    std::vector<float> frequencies(width / 2);
    for (int i = 0; i < width / 2; i++) frequencies[i] = (float)std::pow(10000.0, -2.0 * i / width);
    return frequencies;
}

// Pair i of (x[i], x[i + D / 2]) turns by position * frequency[i]. The angle is rounded, cos and sin are within an
// ulp, and two products are added.
inline void rope(Expected &out, const float *x, int position, const std::vector<float> &frequencies) {
    size_t half = frequencies.size();
    for (int second = 0; second < 2; second++) {
        for (size_t i = 0; i < half; i++) {
            double angle = (double)position * frequencies[i], a = x[i], b = x[i + half];
            double turned = second ? a * std::sin(angle) + b * std::cos(angle)  //
                                   : a * std::cos(angle) - b * std::sin(angle);
            // Beyond 2^20 positions an angle has whole turns taken off before it is rounded.
            double rounded = position < 1 << 20 ? angle : M_PI;
            out.add(turned, (unit * rounded + gamma(4)) * (std::fabs(a) + std::fabs(b)));
        }
    }
}

// silu(gate) * up. Below -88 the engine divides by e^88 instead of more.
inline void swiglu(Expected &out, double gate, double up) {
    double number = gate / (1 + std::exp(-gate)) * up;
    out.add(number, gamma(10) * std::fabs(number) + (gate < -88 ? 2 * std::fabs(gate * up) * std::exp(-88) : 0));
}

// gelu(gate) * up, by tanh (Hendrycks and Gimpel 2016). Its argument is a sum of two products of up to three numbers;
// the engine divides by 1 + e^-2u in place of the tanh, which is the same but for small factors.
inline void geglu(Expected &out, double gate, double up) {
    double u = std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate);
    double number = gate / (1 + std::exp(-2 * u)) * up;
    out.add(number, (gamma(10) + std::fabs(2 * u) * gamma(8)) * std::fabs(number) +
                        (u < -44 ? 2 * std::fabs(gate * up) * std::exp(-88) : 0));
}

// ---- Attention ---------------------------------------------------------------------------------------------

// A number of the cache as a query reads it; what it is summed up from, |zero point| + scale * code; how far from it
// the engine's may be; and of numbers in groups the scale times the largest code.
struct Reading {
    double value = 0, size = 0, off = 0, reach = 0;
};

inline Reading exact(double x) { return {x, std::fabs(x), 0}; }

// `count` numbers, `step` apart, that are encoded together (a row, or a group of 32), as they come back.
inline void read_back(Reading *out, const float *x, size_t count, size_t step, const std::string &format, bool keys) {
    std::vector<float> part;
    for (size_t i = 0; i < count; i++) part.push_back(x[i * step]);
    if (format == "int4" || format == "int2") {
        int largest = format == "int4" ? 15 : 3;
        Shared group = asymmetric(part, largest);
        for (size_t i = 0; i < count; i++) {
            double rest = group.scale * group.codes[i];
            out[i * step] = {group.zero + rest, std::fabs(group.zero) + rest, 0, group.scale * largest};
        }
    } else {
        std::vector<float> read = read_shared(format, part);
        if (read.empty()) throw std::runtime_error("read_shared() in tests/reference.h does not know " + format);
        double reach = keys && format == "int8" ? 127 * symmetric_int8(part).scale : 0;
        for (size_t i = 0; i < count; i++) out[i * step] = {read.at(i), std::fabs(read.at(i)), 0, reach};
    }
}

// K or V of one sequence, one position after another. Formats with blocks take the numbers as f16 has them; a
// position's own block of 32 reads them so, later blocks read codes.
struct Side {
    std::string format;
    bool keys;
    size_t kv_heads, width;
    bool blocks = format == "int4" || format == "int2";
    std::vector<float> kept = {};                    // (position, kv_heads, width)
    std::vector<Reading> recent = {}, stored = {};   // the same, as own and as later blocks read
    size_t row() const { return kv_heads * width; }  // numbers of a position
    int length() const { return (int)(kept.size() / row()); }

    void add(const float *numbers) {
        for (size_t i = 0; i < row(); i++) {
            kept.push_back(blocks ? (float)to_f16(numbers[i]) : numbers[i]);
            recent.push_back(exact(kept.back()));
        }
        stored.resize(kept.size());
        size_t last = kept.size() - row(), block = last - (blocks ? 31 : 0) * row(), group = blocks ? 32 : width;
        if (blocks && keys) {
            if (length() % 32) return;
            for (size_t i = 0; i < row(); i++) read_back(&stored[block + i], &kept[block + i], 32, row(), format, keys);
        } else {
            for (size_t head = last; head < kept.size(); head += width)
                for (size_t i = 0; i < width; i += group)
                    read_back(&stored[head + i], &kept[head + i], std::min(group, width - i), 1, format, keys);
        }
    }
    // The vector of position t as the query at position `reader` reads it.
    const Reading *at(int reader, int t, int head) const {
        return &(blocks && t / 32 == reader / 32 ? recent : stored)[t * row() + head * width];
    }
};

// A key that stood at `position`, rotated by `shift` positions more. The engine turns it back by position * frequency
// and then to position + shift; both angles are rounded, as are cos, sin and two sums of two products.
inline std::vector<Reading> moved_key(const float *key, size_t width, int position, int shift,
                                      const std::vector<float> &frequencies) {
    size_t half = frequencies.size();
    std::vector<Reading> out(width);
    for (size_t i = 2 * half; i < width; i++) out[i] = exact(key[i]);  // behind what RoPE turns
    for (size_t i = 0; i < half; i++) {
        double angle = (double)shift * frequencies[i], a = key[i], b = key[i + half];
        double off = (unit * (2.0 * position + shift) * frequencies[i] + gamma(12)) * (std::fabs(a) + std::fabs(b));
        out[i] = exact(a * std::cos(angle) - b * std::sin(angle));
        out[i + half] = exact(b * std::cos(angle) + a * std::sin(angle));
        out[i].off = out[i + half].off = off;
    }
    return out;
}

// What a query sees: the last `window` positions (0: all) and the first `sinks`.
struct View {
    int window = 0, sinks = 0;
};

struct Seen {
    std::vector<Reading> moved;  // of a sink: its key
    const Reading *key, *value;
};

// With all there is room for, positions are where they are. Behind that the sinks stand just before the window.
inline std::vector<Seen> seen_by(int position, const View &view, const Side &keys, const Side &values, int kv_head,
                                 const std::vector<float> &frequencies) {
    std::vector<Seen> seen;
    bool all = view.window == 0 || position < view.window + view.sinks;
    int first = all ? 0 : position - view.window + 1;
    for (int i = 0; !all && i < view.sinks; i++) {
        const float *key = &keys.kept[i * keys.row() + kv_head * keys.width];
        seen.push_back({moved_key(key, keys.width, i, first - view.sinks, frequencies), nullptr,
                        &values.recent[i * values.row() + kv_head * values.width]});
    }
    for (int t = first; t <= position; t++)
        seen.push_back({{}, keys.at(position, t, kv_head), values.at(position, t, kv_head)});
    return seen;
}

// One query head. A score is off by at most gamma(17 D / 16 + 14) times what it is summed up from, and by what its key
// is off: zero points are summed first and pass through all D further sums (D / 16 + 5 and D roundings), then come the
// scaling and the distance to the maximum. Call it e; a weight is off by a factor of e^(2 e), as its denominator is a
// sum of such weights. Then come the sum over the positions, merges and exp itself.
//
// The CPU rounds what codes in groups are multiplied with, query * scale and weight * scale, and queries of int8 keys,
// to whole numbers: each is off by at most `factor_rounding` times the largest of a sum, or 2^-110 if that is more, and
// the product by that times the largest code.
inline void attention(Expected &out, const float *query, const std::vector<Seen> &seen, int key_width, int value_width,
                      double factor_rounding = 0, double scale = 0, double sink = -INFINITY) {
    double most = sink, error = 0, root = scale ? 1 / scale : std::sqrt((double)key_width);
    double rounding = gamma(17.0 / 16 * key_width + 14);
    std::vector<double> weight;
    for (const Seen &one : seen) {
        const Reading *key = one.key ? one.key : one.moved.data();
        double score = 0, off = 0, reach = 15 * 0x1p-110;
        for (int i = 0; i < key_width; i++) {
            score += query[i] * key[i].value;
            off += std::fabs(query[i]) * (rounding * key[i].size + key[i].off);
            reach = std::max(reach, std::fabs(query[i]) * key[i].reach);
        }
        off += key_width * factor_rounding * reach;
        weight.push_back(score / root);
        most = std::max(most, weight.back());
        error = std::max(error, off / root);
    }
    double total = std::exp(sink - most);
    for (double &score : weight) total += score = std::exp(score - most);

    std::vector<double> sum(value_width), magnitude(value_width), reach(value_width, 15 * 0x1p-110);
    for (size_t t = 0; t < seen.size(); t++) {
        for (int i = 0; i < value_width; i++) {
            sum[i] += weight[t] / total * seen[t].value[i].value;
            magnitude[i] += weight[t] / total * seen[t].value[i].size;
            reach[i] = std::max(reach[i], weight[t] / total * seen[t].value[i].reach);
        }
    }
    double relative = std::expm1(2 * error) + gamma(2.0 * (double)seen.size() + 40);
    for (int i = 0; i < value_width; i++) {
        double rounded = (double)seen.size() * factor_rounding * reach[i];
        out.add(sum[i], relative * magnitude[i] + rounded + 1e-36);
    }
}

}  // namespace reference
