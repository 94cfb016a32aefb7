// From logits to a token: the likeliest one, or a drawn one; and rejection sampling, a rule to check guesses.
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

// Returns a random number in [0, 1), a function of seed and position alone (splitmix64, Steele et al. 2014). So a text
// does not depend on what else is computed, or on where generation began.
inline double draw(uint64_t seed, int position) {
    uint64_t z = seed * 0x9e3779b97f4a7c15 + (uint64_t)position;
    for (int i = 0; i < 2; i++) {  // twice, so that neighbouring seeds and positions are unrelated
        z += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        z ^= z >> 31;
    }
    return (double)(z >> 11) * 0x1p-53;
}

// Ranks tokens by their probability in softmax(logits / T), from which a sampler draws after top-k, then top-p
// (Holtzman et al. 2020), then min-p (Nguyen et al. 2024) have cut the tail. Probabilities are float32, summed in
// buckets and not sorted (base/ranking.h). So a draw or a cut within 10^-6 of the border between two tokens may take
// the other one than double precision would.
inline Ranking ranking_of(const Sampler &sampler, const std::vector<float> &logits) {
    return Ranking(logits, (float)std::min(1 / sampler.temperature, (double)FLT_MAX), sampler.min_p);
}

// Returns the last token that top-k, then top-p keep (-1: they keep all), and the sum of probabilities up to it.
inline Ranking::Place cut_of(const Sampler &sampler, const Ranking &ranking) {
    Ranking::Place cut = {-1, SIZE_MAX, ranking.total};
    if (sampler.top_k > 0) cut = ranking.find([&](auto &place) { return place.count >= (size_t)sampler.top_k; });
    if (cut.count < (size_t)sampler.top_k) cut.token = -1;  // there are fewer tokens
    if (const double all = cut.sum; sampler.top_p < 1)
        cut = ranking.find([&](auto &place) { return place.sum >= sampler.top_p * all; });
    return cut;
}

// Returns the token after `position`. At temperature 0 it is the likeliest one, the first of equals. Otherwise a point
// is drawn below the sum of the kept probabilities: the token on which it falls, counted from the likeliest.
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
// Another rule to check guesses (Leviathan et al. 2023, section 2.3 and appendix A.1; Chen et al. 2023). The text
// differs from the one without guesses, but is drawn from the same distribution: p, the target's. A guess is drawn from
// q, the draft's.
//   A guess x is taken with probability min(1, p(x) / q(x)). Otherwise a token is drawn from max(p - q, 0), normalised.
//   Together x has the probability
//     = min(p(x), q(x)) + max(p(x) - q(x), 0) = p(x),   as both sums of the second term are the same number.

// Returns probabilities (vocabulary): 1 for `token`, 0 for all others.
inline std::vector<double> point_mass(int token, size_t vocabulary) {
    std::vector<double> p(vocabulary);
    p[token] = 1;
    return p;
}

// Returns the probabilities (vocabulary) that sample() draws with.
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

// Returns the token on which a point in [0, 1) falls, with tokens in the order of ids. p need not sum to 1.
inline int draw_from(const std::vector<double> &p, double point) {
    double left = point * std::accumulate(p.begin(), p.end(), 0.0);
    int last = 0;
    for (size_t token = 0; token < p.size(); token++) {
        if (p[token] > 0) last = (int)token;
        if ((left -= p[token]) < 0) break;
    }
    return last;
}

// Returns max(p - q, 0) for each token.
inline std::vector<double> rest(const std::vector<double> &p, const std::vector<double> &q) {
    std::vector<double> more(p.size());
    for (size_t token = 0; token < p.size(); token++) more[token] = std::max(0.0, p[token] - q[token]);
    return more;
}

// Returns the guess, or the token drawn in its place. `chance` and `again`: two draws from [0, 1).
inline int take_or_replace(const std::vector<double> &p, const std::vector<double> &q, int guess, double chance,
                           double again) {
    if (chance * q[guess] < p[guess]) return guess;
    const std::vector<double> more = rest(p, q);
    return draw_from(more, again);
}

// Returns the token after `position`. `guess` was drawn from q, which is empty without one. Draws are not sample()'s.
inline int check_guess(const Sampler &sampler, const std::vector<float> &logits, int position, int guess,
                       const std::vector<double> &q) {
    const std::vector<double> p = distribution(sampler, logits);
    const double again = draw(~sampler.seed, position);
    if (q.empty()) return draw_from(p, again);
    return take_or_replace(p, q, guess, draw(sampler.seed ^ 0x5555555555555555, position), again);
}
