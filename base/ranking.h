// Tokens by probability, without a sort: to sort a large vocabulary takes longer than a model of 10^8 weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "formats.h"

// Returns the token with the largest logit, the first of equals.
inline int argmax(const float *logits, int count) { return (int)(std::max_element(logits, logits + count) - logits); }

// a b + c, rounded once where that is one instruction.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// e^x for x from -87 to 0, within two units in the last place: x = n ln 2 + r, and e^r by its series. A compiler
// vectorizes a loop of it, unlike one of the library's exp. The caller bounds x, because g++ would make a branch of a
// bound in here.
inline float exp_below_one(float x) {
    constexpr float shift = 0x1.8p23f, log2_e = 0x1.715476p0f, ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
    float shifted = multiply_add(x, log2_e, shift), n = shifted - shift;
    float r = multiply_add(n, -ln2_low, multiply_add(n, -ln2_high, x)), power = 1.0f / 5040;
    auto horner = [&](auto... factorials) { ((power = multiply_add(power, r, 1 / factorials)), ...); };
    horner(720.0f, 120.0f, 24.0f, 6.0f, 2.0f, 1.0f, 1.0f);
    return bit_cast<float>(bit_cast<uint32_t>(power) + (bit_cast<uint32_t>(shifted) << 23));
}

// Returns the largest number; 16 are compared at a time.
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

// Tokens from the likeliest to the least likely, the first of equals first. p is a token's probability before it is
// normalised: the likeliest token has 1, and a token below 2^-48 is never drawn. Tokens are put into buckets by p, 128
// for each factor of 2, and only those of a bucket that is searched are compared. If two p are equal in float32, the
// token with the larger logit is likelier.
//
// The p of a bucket share their upper 16 bits. So each is the bucket's largest number minus some steps in the last
// place, and their sum follows from their count and the sum of their steps. Both are whole numbers, so they are exact,
// and one instruction adds both.
class Ranking {
public:
    double total = 0;   // the sum of all p
    double likely = 0;  // the sum of the p that are `least` or more
    // scale: 1 / temperature. Works on stretches of 1,024 tokens, which stay in the L1 cache.
    Ranking(const std::vector<float> &logits, float scale, double least)
        : logits_(logits),
          largest_(largest_logit(logits)),
          scale_(scale),
          bucket_(new uint16_t[logits.size()]),
          tally_(buckets),
          sums_(buckets) {
        constexpr size_t stretch = 1024;
        float p[stretch];
        uint32_t steps[stretch];  // in the last place, from p up to 1
        for (size_t i = 0; i < logits.size(); i += stretch) {
            const size_t count = std::min(stretch, logits.size() - i);
            uint16_t *bucket = &bucket_[i];
            for (size_t j = 0; j < count; j++) p[j] = exponent(logits[i + j]);
            for (size_t j = 0; j < count; j++) p[j] = exp_below_one(p[j]);
            for (size_t j = 0; least > 0 && j < count; j++) likely += p[j] >= least ? p[j] : 0;
            for (size_t j = 0; j < count; j++)
                steps[j] = (uint32_t)std::min((int)(bits_of_one - bit_cast<uint32_t>(p[j])), last << steps_bits);
            for (size_t j = 0; j < count; j++) bucket[j] = (uint16_t)(steps[j] >> steps_bits);
            for (size_t j = 0; j < count; j++) tally_[steps[j] >> steps_bits] += one + (steps[j] & most_steps);
        }
        for (int b = 0; b < last; b++) {
            if (tally_[b] == 0) continue;
            const uint32_t bits = bits_of_one - ((uint32_t)b << steps_bits);
            const double most = bit_cast<float>(bits), step = most - bit_cast<float>(bits - 1);
            total += sums_[b] = (double)(tally_[b] / one) * most - (double)(tally_[b] % one) * step;
        }
    }
    // Returns a token's p; 0 if it is never drawn.
    double p(int token) const { return bucket_[token] == last ? 0 : p_of({-logits_[token], token}); }
    struct Place {
        int token = 0;
        size_t count = 0;  // tokens up to this one, with it
        double sum = 0;    // the sum of their p
    };
    // Returns the first place for which reached(place) is true, or the last one.
    template <class Reached>
    Place find(Reached reached) const {
        Place place, before;  // before: the buckets so far
        for (int b = 0; b < last; b++) {
            const Place after = {0, before.count + tally_[b] / one, before.sum + sums_[b]};
            if (sums_[b] != 0 && reached(after)) {
                auto tokens = tokens_of(b);
                auto first = tokens.begin(), end = tokens.end();
                for (place = before; end - first > 1;) {  // each time half of them is left; the rest needs no order
                    auto middle = first + (end - first) / 2;
                    std::nth_element(first, middle, end);
                    Place half = {0, place.count + (middle - first), place.sum};
                    for (auto token = first; token < middle; token++) half.sum += p_of(*token);
                    if (reached(half))
                        end = middle;
                    else
                        first = middle, place = half;
                }
                place = {first->second, place.count + 1, place.sum + p_of(*first)};
                if (reached(place)) return place;
            }
            before = after;
        }
        return {place.token, before.count, before.sum};
    }

private:
    static constexpr uint32_t bits_of_one = 0x3f800000;  // of float32; a larger p has larger bits
    static constexpr int steps_bits = 16, most_steps = (1 << steps_bits) - 1;
    static constexpr int buckets = 48 << (23 - steps_bits), last = buckets - 1;  // p below 2^-48, which counts as 0
    static constexpr uint64_t one = 1ull << 40;  // the unit of a tally's count, below 2^24; the lower bits sum steps
    const std::vector<float> &logits_;
    const float largest_, scale_;
    std::unique_ptr<uint16_t[]> bucket_;  // (token)
    std::vector<uint64_t> tally_;         // (bucket)
    std::vector<double> sums_;            // (bucket): the sum of p

    float exponent(float logit) const { return std::max(-87.0f, (logit - largest_) * scale_); }  // p is e^ this
    using Ranked = std::pair<float, int>;  // -logit, token: sorted, the likeliest is the first
    float p_of(const Ranked &token) const { return exp_below_one(exponent(-token.first)); }
    std::vector<Ranked> tokens_of(int bucket) const {
        std::vector<Ranked> tokens;
        for (size_t i = 0, end; i < logits_.size(); i = end) {  // most stretches have none: many compared at a time
            end = std::min(logits_.size(), i + 64);
            uint16_t some = 0;
            for (size_t j = i; j < end; j++) some |= bucket_[j] == (uint16_t)bucket;
            for (size_t j = some ? i : end; j < end; j++)
                if (bucket_[j] == bucket) tokens.push_back({-logits_[j], (int)j});
        }
        return tokens;
    }
};
