// What the engine computes, once more: in double precision, straight from the definitions, without a line of the
// engine. Beside each result stands a bound of the error that float32 may make, whatever the order of its sums
// (Higham 2002, Accuracy and Stability of Numerical Algorithms, §3.1), so that no test needs a tolerance of its own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
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

// Pair i of (x[i], x[i + D / 2]) turns by position * frequency[i]. The angle is rounded, cos and sin are within an
// ulp, and two products are added.
inline void rope(Expected &out, const float *x, int position, const std::vector<float> &frequencies) {
    size_t half = frequencies.size();
    for (int second = 0; second < 2; second++) {
        for (size_t i = 0; i < half; i++) {
            double angle = (double)position * frequencies[i], a = x[i], b = x[i + half];
            double turned = second ? a * std::sin(angle) + b * std::cos(angle)  //
                                   : a * std::cos(angle) - b * std::sin(angle);
            out.add(turned, (unit * angle + gamma(4)) * (std::fabs(a) + std::fabs(b)));
        }
    }
}

// silu(gate) * up. Below -88 the engine divides by e^88 instead of more.
inline void swiglu(Expected &out, double gate, double up) {
    double number = gate / (1 + std::exp(-gate)) * up;
    out.add(number, gamma(10) * std::fabs(number) + (gate < -88 ? 2 * std::fabs(gate * up) * std::exp(-88) : 0));
}

// ---- Attention ---------------------------------------------------------------------------------------------

// One KV head's rows of one sequence: position t begins at start + t * stride.
struct Rows {
    const float *start;
    size_t stride;
    int width;
    double at(int position, int channel) const { return start[position * stride + channel]; }
};

// One query head at `position`. A score is off by at most gamma(D + 8) sum |q k| / sqrt(D), call it e, for the dot
// product, its scaling and the distance to the maximum; a weight therefore by a factor of e^(2 e), as its denominator
// is a sum of such weights. Then come the sum over the positions, merges and exp itself.
inline void attention(Expected &out, const float *query, Rows keys, Rows values, int position, int window) {
    int first = window ? std::max(0, position - window + 1) : 0;
    std::vector<double> weight(position + 1);
    double most = -INFINITY, size = 0, total = 0;
    for (int t = first; t <= position; t++) {
        double score = 0, magnitude = 0;
        for (int i = 0; i < keys.width; i++) {
            double product = query[i] * keys.at(t, i);
            score += product, magnitude += std::fabs(product);
        }
        weight[t] = score / std::sqrt((double)keys.width);
        most = std::max(most, weight[t]);
        size = std::max(size, magnitude / std::sqrt((double)keys.width));
    }
    for (int t = first; t <= position; t++) total += weight[t] = std::exp(weight[t] - most);

    std::vector<double> sum(values.width), magnitude(values.width);
    for (int t = first; t <= position; t++) {
        for (int i = 0; i < values.width; i++) {
            double term = weight[t] / total * values.at(t, i);
            sum[i] += term, magnitude[i] += std::fabs(term);
        }
    }
    double relative = std::expm1(2 * gamma(keys.width + 8) * size) + gamma(2 * (position - first + 1) + 40);
    for (int i = 0; i < values.width; i++) out.add(sum[i], relative * magnitude[i] + 1e-36);
}

}  // namespace reference
