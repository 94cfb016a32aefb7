// Tokens by their probability, for a vocabulary so large that to sort it takes longer than a model of 10^8 weights.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "formats.h"

// The likeliest token: where the largest logit is, the first of equals.
inline int argmax(const float *logits, int count) { return (int)(std::max_element(logits, logits + count) - logits); }

// e^x for x from -87 to 0, within two units of its last digit: x = n ln 2 + r, and e^r by its series. A compiler
// computes several at a time in a loop of it, which it cannot with the library's, nor where x is bounded in here: of a
// bound g++ makes a branch.
inline float exp_below_one(float x) {
    constexpr float shift = 0x1.8p23f, log2_e = 0x1.715476p0f, ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
    float shifted = x * log2_e + shift, n = shifted - shift, r = x - n * ln2_high - n * ln2_low;
    float power = 1.0f / 5040;
    auto horner = [&](auto... factorials) { ((power = power * r + 1 / factorials), ...); };
    horner(720.0f, 120.0f, 24.0f, 6.0f, 2.0f, 1.0f, 1.0f);
    return bit_cast<float>(bit_cast<uint32_t>(power) + (bit_cast<uint32_t>(shifted) << 23));
}

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

// From the likeliest token to the least likely, the first of equals first. They are put into buckets by the size of p,
// 128 for each factor of 2, and only a bucket in which something is looked for is sorted. p: the probability, not
// normalised: the likeliest token has 1, none has less than e^-87. Of equals in float32, the one of the larger logit is
// likelier.
class Ranking {
public:
    double total = 0;   // of all p
    double likely = 0;  // of those that are `least` or more
    // scale: 1 / temperature. Stretch by stretch, as it stays in the L1 while it is gone through.
    Ranking(const std::vector<float> &logits, float scale, double least)
        : logits_(logits), largest_(largest_logit(logits)), scale_(scale), bucket_(logits.size()), sums_(buckets) {
        constexpr size_t stretch = 1024;
        std::vector<std::array<double, ways>> sums(buckets);
        float p[stretch];
        for (size_t i = 0; i < logits.size(); i += stretch) {
            const size_t count = std::min(stretch, logits.size() - i), whole = count / ways * ways;
            for (size_t j = 0; j < count; j++) p[j] = exponent(logits[i + j]);
            for (size_t j = 0; j < count; j++) p[j] = exp_below_one(p[j]);
            for (size_t j = 0; least > 0 && j < count; j++) likely += p[j] >= least ? p[j] : 0;
            uint16_t *bucket = &bucket_[i];
            for (size_t j = 0; j < count; j++) {
                const uint32_t below_one = bit_cast<uint32_t>(1.0f) - bit_cast<uint32_t>(p[j]);  // bits rise with p
                bucket[j] = (uint16_t)std::min((int)(below_one >> 16), last);
            }
            for (size_t j = 0; j < whole; j += ways)
                for (size_t way = 0; way < ways; way++) sums[bucket[j + way]][way] += p[j + way];
            for (size_t j = whole; j < count; j++) sums[bucket[j]][0] += p[j];
        }
        for (int b = 0; b < buckets; b++) total += sums_[b] = std::accumulate(sums[b].begin(), sums[b].end(), 0.0);
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
            auto tokens = tokens_of(b);
            std::sort(tokens.begin(), tokens.end());
            place.sum = sum;
            for (auto &[minus_logit, token] : tokens) {
                place = {token, place.sum + exp_below_one(exponent(-minus_logit))};
                if (reached(place.sum)) return place;
            }
        }
        return place;
    }
    // Of the p of the `count` likeliest: the very sum that find() has at the last of them.
    double sum_of(size_t count) const {
        std::vector<size_t> counts(buckets);
        for (uint16_t b : bucket_) counts[b]++;
        int b = 0;
        double sum = 0;
        for (; counts[b] < count; count -= counts[b++]) sum += sums_[b];
        auto tokens = tokens_of(b);
        std::partial_sort(tokens.begin(), tokens.begin() + count, tokens.end());
        for (size_t i = 0; i < count; i++) sum += exp_below_one(exponent(-tokens[i].first));
        return sum;
    }

private:
    static constexpr int buckets = 40 * 128, last = buckets - 1;  // the last one: all below 2^-40
    static constexpr size_t ways = 2;  // sums a bucket: one would wait for each addition where neighbours share it
    const std::vector<float> &logits_;
    const float largest_, scale_;
    std::vector<uint16_t> bucket_;
    std::vector<double> sums_;  // (bucket): of p
    float exponent(float logit) const { return std::max(-87.0f, (logit - largest_) * scale_); }  // p is e^ this
    std::vector<std::pair<float, int>> tokens_of(int bucket) const {  // -logit, token: sorted, the likeliest is first
        std::vector<std::pair<float, int>> tokens;
        for (size_t i = 0, end; i < bucket_.size(); i = end) {  // most stretches hold none: several compared at a time
            end = std::min(bucket_.size(), i + 64);
            uint16_t some = 0;
            for (size_t j = i; j < end; j++) some |= bucket_[j] == (uint16_t)bucket;
            for (size_t j = some ? i : end; j < end; j++)
                if (bucket_[j] == bucket) tokens.push_back({-logits_[j], (int)j});
        }
        return tokens;
    }
};
