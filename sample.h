// From logits to a token: the likeliest, or one that is drawn; and the rule by which others check guesses.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "base/ranking.h"

struct Sampler {
    double temperature = 0, top_p = 1, min_p = 0;
    int top_k = 0;
    uint64_t seed = 0;
};

// From 0 to below 1, a function of seed and position alone: so a text does not depend on what else is computed, or
// where it began (splitmix64, Steele et al. 2014).
inline double draw(uint64_t seed, int position) {
    uint64_t z = seed * 0x9e3779b97f4a7c15 + (uint64_t)position;
    for (int i = 0; i < 2; i++) {  // twice: neighbouring seeds and positions have nothing to do with each other
        z += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        z ^= z >> 31;
    }
    return (double)(z >> 11) * 0x1p-53;
}

// A sampler draws from softmax(logits / T) after top-k, then top-p (Holtzman et al. 2020), then min-p (Nguyen et al.
// 2024) have cut its tail. Probabilities are float32, and base/ranking.h sums them in buckets where others sort: where
// the point that is drawn, or a cut, is within 10^-6 of the border of two tokens, the token may be another one than by
// the definition in double precision.
inline Ranking ranking_of(const Sampler &sampler, const std::vector<float> &logits) {
    return Ranking(logits, (float)std::min(1 / sampler.temperature, (double)FLT_MAX), sampler.min_p);
}

// The last token that top-k, then top-p leave, or -1 if that is all, and the sum of the probabilities up to it.
inline Ranking::Place cut_of(const Sampler &sampler, const Ranking &ranking) {
    Ranking::Place cut = {-1, SIZE_MAX, ranking.total};
    if (sampler.top_k > 0) cut = ranking.find([&](auto &place) { return place.count >= (size_t)sampler.top_k; });
    if (cut.count < (size_t)sampler.top_k) cut.token = -1;  // there are fewer tokens
    if (const double all = cut.sum; sampler.top_p < 1)
        cut = ranking.find([&](auto &place) { return place.sum >= sampler.top_p * all; });
    return cut;
}

// The token after `position`. At temperature 0 the likeliest one, the first of equals. Otherwise a point is drawn in
// the sum of what is kept: the token is the one that it falls on, from the likeliest on.
inline int sample(const Sampler &sampler, const std::vector<float> &logits, int position) {
    if (sampler.temperature == 0) return argmax(logits.data(), (int)logits.size());
    const Ranking ranking = ranking_of(sampler, logits);
    double kept = cut_of(sampler, ranking).sum;
    if (sampler.min_p > 0) kept = std::min(kept, ranking.likely);
    const double point = draw(sampler.seed, position) * kept;
    return ranking.find([&](auto &place) { return place.sum > point; }).token;
}

// ---- Rejection sampling ----------------------------------------------------------------------------------------
//
// The rule by which others check guesses (Leviathan et al. 2023, section 2.3 and appendix A.1; Chen et al. 2023): the
// text is another one than without guesses, but drawn from the same distribution.
//   A guess x, drawn from q, is taken with probability min(1, p(x) / q(x)); else a token is drawn from what p has more
//   than q, max(p - q, 0), normalised. Together x has the probability
//     q(x) min(1, p(x) / q(x)) + (1 - sum of min(p, q)) max(p(x) - q(x), 0) / (sum of max(p - q, 0))
//     = min(p(x), q(x)) + max(p(x) - q(x), 0) = p(x),   as both sums of the second term are the same number.

// Token `token` has probability 1.
inline std::vector<double> point_mass(int token, size_t vocabulary) {
    std::vector<double> p(vocabulary);
    p[token] = 1;
    return p;
}

// (vocabulary): the probabilities that sample() draws with.
inline std::vector<double> distribution(const Sampler &sampler, const std::vector<float> &logits) {
    if (sampler.temperature == 0) return point_mass(argmax(logits.data(), (int)logits.size()), logits.size());
    const Ranking ranking = ranking_of(sampler, logits);
    const int last = cut_of(sampler, ranking).token;
    std::vector<double> p(logits.size());
    double kept = 0;
    for (int token = 0; token < (int)logits.size(); token++) {
        const bool cut = last >= 0 && std::pair(-logits[token], token) > std::pair(-logits[last], last);
        if (!cut && ranking.p(token) >= sampler.min_p) kept += p[token] = ranking.p(token);
    }
    for (double &x : p) x /= kept;
    return p;
}

// The token on which a point in [0, 1) falls, in the order of ids; the sum of p need not be 1.
inline int draw_from(const std::vector<double> &p, double point) {
    double left = point * std::accumulate(p.begin(), p.end(), 0.0);
    int last = 0;
    for (size_t token = 0; token < p.size(); token++) {
        if (p[token] > 0) last = (int)token;
        if ((left -= p[token]) < 0) break;
    }
    return last;
}

// What p has more than q.
inline std::vector<double> rest(const std::vector<double> &p, const std::vector<double> &q) {
    std::vector<double> more(p.size());
    for (size_t token = 0; token < p.size(); token++) more[token] = std::max(0.0, p[token] - q[token]);
    return more;
}

// `chance` and `again`: two draws from [0, 1).
inline int take_or_replace(const std::vector<double> &p, const std::vector<double> &q, int guess, double chance,
                           double again) {
    if (chance * q[guess] < p[guess]) return guess;
    const std::vector<double> more = rest(p, q);
    return draw_from(more, again);
}

// The token after `position`, where `guess` was drawn from q; without one, q is empty. Its draws are not sample()'s.
inline int check_guess(const Sampler &sampler, const std::vector<float> &logits, int position, int guess,
                       const std::vector<double> &q) {
    const std::vector<double> p = distribution(sampler, logits);
    const double again = draw(~sampler.seed, position);
    if (q.empty()) return draw_from(p, again);
    return take_or_replace(p, q, guess, draw(sampler.seed ^ 0x5555555555555555, position), again);
}
