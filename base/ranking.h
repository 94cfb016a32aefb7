// Tokens by their probability, for a vocabulary so large that to sort it takes longer than a model of 10^8 weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "formats.h"

// e^x for x from -693 to 0, off by a few units of its last digit: x = n ln 2 + r, and e^r by its series. A compiler
// computes several at a time in a loop of it, which it cannot with the library's, nor where x is bounded in here: of a
// bound g++ makes a branch.
inline double exp_below_one(double x) {
    constexpr double shift = 0x1.8p52, ln2_high = 0x1.62e42fee00000p-1, ln2_low = 0x1.a39ef35793c76p-33;
    double shifted = x * M_LOG2E + shift, n = shifted - shift, r = x - n * ln2_high - n * ln2_low;
    double power = 1.0 / 479001600;
    auto horner = [&](auto... factorials) { ((power = power * r + 1 / factorials), ...); };
    horner(39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0);
    return bit_cast<double>(bit_cast<uint64_t>(power) + (bit_cast<uint64_t>(shifted) << 52));
}

// From the likeliest token to the least likely, the first of equals first. They are put into buckets by the size of p,
// 128 for each factor of 2, and only a bucket in which something is looked for is sorted.
class Ranking {
public:
    double total = 0;
    // p (token): probability, not normalised: the likeliest has 1.
    explicit Ranking(std::vector<double> probabilities)
        : p_(std::move(probabilities)), bucket_(p_.size()), sums_(buckets) {
        for (size_t i = 0; i < p_.size(); i++) {
            const uint64_t below_one = bit_cast<uint64_t>(1.0) - bit_cast<uint64_t>(p_[i]);  // bits have the order of p
            bucket_[i] = (uint16_t)std::min((int)(below_one >> 45), last);
        }
        // Most of a vocabulary may be in the last bucket, and one sum would wait for each addition.
        const size_t side = 8, whole = p_.size() / side * side;
        double tiny[side] = {};
        for (size_t i = 0; i < whole; i += side)
            for (size_t j = 0; j < side; j++) tiny[j] += bucket_[i + j] == last ? p_[i + j] : 0;
        for (size_t i = 0; i < p_.size(); i++)
            if (i >= whole || bucket_[i] < last) sums_[bucket_[i]] += p_[i];
        for (double sum : tiny) sums_[last] += sum;
        for (double sum : sums_) total += sum;
    }
    struct Place {
        int token = 0;
        double sum = 0;  // of the p of all up to this one
    };
    // The first place whose sum is reached, or the last one.
    template <class Reached>
    Place find(Reached reached) const {
        Place place;
        double sum = 0;  // of the buckets before
        for (int b = 0; b < buckets; sum += sums_[b++]) {
            if (sums_[b] == 0 || !reached(sum + sums_[b])) continue;
            std::vector<std::pair<double, int>> tokens;  // -p, token
            for (size_t i = 0, end; i < p_.size(); i = end) {  // most stretches hold none: several compared at a time
                end = std::min(p_.size(), i + 64);
                uint16_t some = 0;
                for (size_t j = i; j < end; j++) some |= bucket_[j] == (uint16_t)b;
                for (size_t j = some ? i : end; j < end; j++)
                    if (bucket_[j] == b) tokens.push_back({-p_[j], (int)j});
            }
            std::sort(tokens.begin(), tokens.end());
            place.sum = sum;
            for (auto &[minus_p, token] : tokens) {
                place = {token, place.sum - minus_p};
                if (reached(place.sum)) return place;
            }
        }
        return place;
    }

private:
    static constexpr int buckets = 40 * 128, last = buckets - 1;  // the last one: all below 2^-40
    std::vector<double> p_;
    std::vector<uint16_t> bucket_;
    std::vector<double> sums_;  // (bucket): of p
};

// The largest of some numbers, several at a time.
inline float largest_logit(const std::vector<float> &numbers) {
    constexpr size_t side = 16;
    float largest[side];
    std::fill(largest, largest + side, -INFINITY);
    size_t whole = numbers.size() / side * side;
    for (size_t i = 0; i < whole; i += side)
        for (size_t j = 0; j < side; j++) largest[j] = std::max(largest[j], numbers[i + j]);
    for (size_t i = whole; i < numbers.size(); i++) largest[0] = std::max(largest[0], numbers[i]);
    return *std::max_element(largest, largest + side);
}
