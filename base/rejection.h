// The rule by which others check guesses (Leviathan et al. 2023, §2.3 and appendix A.1; Chen et al. 2023): the text is
// another one than without guesses, but drawn from the same distribution.
//   A guess x, drawn from q, is taken with probability min(1, p(x) / q(x)); else a token is drawn from what p has more
//   than q, max(p - q, 0), normalised. Together x has the probability
//     q(x) min(1, p(x) / q(x)) + (1 - sum of min(p, q)) max(p(x) - q(x), 0) / (sum of max(p - q, 0))
//     = min(p(x), q(x)) + max(p(x) - q(x), 0) = p(x),   as both sums of the second term are the same number.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

// What a sampler draws from, in double precision: softmax(logits / T) of the tokens that top-k, then top-p, then min-p
// leave. At temperature 0 the likeliest token, the first of equals, has all.
inline std::vector<double> only(int token, size_t vocabulary) {
    std::vector<double> p(vocabulary);
    p[token] = 1;
    return p;
}
template <class Sampler>
std::vector<double> distribution(const Sampler &cut, const std::vector<float> &logits) {
    std::vector<int> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    if (cut.temperature == 0) return only(order[0], logits.size());
    auto weight = [&](int token) { return std::exp(((double)logits[token] - logits[order[0]]) / cut.temperature); };
    if (cut.top_k > 0 && (size_t)cut.top_k < order.size()) order.resize(cut.top_k);
    double all = 0, kept = 0, sum = 0;
    for (int token : order) all += weight(token);
    std::vector<double> p(logits.size());
    for (int token : order) {
        if (sum >= cut.top_p * all && sum > 0) break;
        sum += weight(token);
        if (weight(token) >= cut.min_p) kept += p[token] = weight(token);
    }
    for (double &x : p) x /= kept;
    return p;
}

// The token on which a point in [0, 1) falls, in the order of ids; of a sum that need not be 1.
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
    return chance * q[guess] < p[guess] ? guess : draw_from(rest(p, q), again);
}

// The token that stands after a row of a pass (draft.h), with draws of its own. A guess by n-grams has all of q.
template <class Proposal, class Draw>
int by_rejection(const Proposal &proposal, int row, const std::vector<float> &logits, Draw draw) {
    const int position = (int)proposal.tokens.size() - 1 + row;
    const uint64_t seed = proposal.sampler.seed;
    const std::vector<double> p = distribution(proposal.sampler, logits);
    const double again = draw(~seed, position);
    if (row == (int)proposal.guesses.size()) return draw_from(p, again);
    const int guess = proposal.guesses[row];
    const std::vector<double> q = proposal.drawn.empty() ? only(guess, p.size()) : proposal.drawn[row];
    return take_or_replace(p, q, guess, draw(seed ^ 0x5555555555555555, position), again);
}
