// RoPE for long contexts: the frequencies with which a head's pairs rotate (layers.cu has the equation), a factor of
// queries, and how a config.json asks for these.
#pragma once

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "formats.h"
#include "json.h"

// The frequency of pair i is f_i = theta^(-2i/rotary) radians a position. To let a model read further than it was
// trained at first, it is stretched. With n turns of pair i within the original context, it becomes
//   linear    f_i / factor (Chen et al. 2023, Position Interpolation)
//   llama3    f_i / factor if n < low_turns, f_i if n > high_turns, and between them
//             (1 - s) f_i / factor + s f_i,  s = (n - low_turns) / (high_turns - low_turns)
//   yarn      likewise, but s is linear in i: 1 at the pair with high_turns, 0 at the one with low_turns; `truncate`:
//             these two are rounded to whole numbers, away from each other (Peng et al. 2023)
//   longrope  f_i / short_factors[i], or f_i / long_factors[i] for texts beyond the original context
//             (Ding et al. 2024)
struct RopeScaling {
    enum Kind { none, linear, llama3, yarn, longrope } kind = none;
    double factor = 1, low_turns = 1, high_turns = 4;
    int original_context = 0;
    bool truncate = true;
    std::vector<double> short_factors, long_factors;  // (rotary / 2)
    double rotary = 1;  // the share of a head's numbers, the first ones, that are pairs; the others stay (Phi-4-mini)
    double turned = 1;  // the share of the pairs, the first ones, that rotate; the others have f_i = 0 (Gemma 4)
    double attention_factor = 1;  // yarn and longrope: factor of queries and keys where they rotate
    double query_growth = 0;      // see QueryScale
    auto all() const {
        return std::tie(kind, factor, low_turns, high_turns, original_context, truncate, short_factors, long_factors,
                        rotary, turned, attention_factor, query_growth);
    }
};

// Returns s for pair i, whose frequency is f. It may be outside of 0 .. 1.
inline double kept_part(double theta, int rotary, const RopeScaling &rope, size_t i, double f) {
    if (rope.kind == RopeScaling::llama3)
        return (rope.original_context * f / (2 * M_PI) - rope.low_turns) / (rope.high_turns - rope.low_turns);
    auto pair_with = [&](double turns) {  // the one with so many turns; it may have a fraction
        return rotary * std::log(rope.original_context / (turns * 2 * M_PI)) / (2 * std::log(theta));
    };
    double first = pair_with(rope.high_turns), last = pair_with(rope.low_turns);
    if (rope.truncate) first = std::floor(first), last = std::ceil(last);
    first = std::max(first, 0.0), last = std::min(last, rotary - 1.0);
    return 1 - ((double)i - first) / (last == first ? 0.001 : last - first);
}

// Returns the frequencies for texts of up to `positions`: (rotary / 2). If theta is 0, all are 0.
inline std::vector<float> rope_frequencies(double theta, int rotary, const RopeScaling &rope, int positions = 0) {
    std::vector<float> frequencies(rotary / 2, 0.0f);
    for (size_t i = 0; theta && i < frequencies.size() && i < (size_t)(rope.turned * rotary / 2); i++) {
        float f = 1 / std::pow((float)theta, 2 * (float)i / (float)rotary);
        if (rope.kind == RopeScaling::linear) f /= (float)rope.factor;
        if (rope.kind == RopeScaling::longrope)
            f /= (float)(positions > rope.original_context ? rope.long_factors : rope.short_factors)[i];
        if (rope.kind == RopeScaling::llama3 || rope.kind == RopeScaling::yarn) {
            const double s = std::min(1.0, std::max(0.0, kept_part(theta, rotary, rope, i, f)));
            f = (float)((1 - s) * f / rope.factor + s * f);
        }
        frequencies[i] = f;
    }
    return frequencies;
}

// Factor of a query, so that the scores of a long text stay apart: at position p all of the query is multiplied by
// 1 + growth ln(1 + floor(p / context)) (Ministral 3), and its rotated part also by attention_factor^2. The square
// includes the factor of the keys, so a cache's rows need none.
struct QueryScale {
    float turned = 1, growth = 0;
    int context = 1;
    HOST_DEVICE bool needed() const { return turned != 1 || growth != 0; }
    HOST_DEVICE float at(int position, bool turns) const {
        if (!needed()) return 1;
        return (turns ? turned : 1) * (1 + growth * logf(1 + (float)(position / context)));
    }
};

// ---- From config.json --------------------------------------------------------------------------------------

// Reads `rope`, a section of a config. `part`: the default share of a head's numbers that rotate; `width`: D;
// `context`: the model's; `original`: the original context that all models of the family have, or 0.
inline RopeScaling read_scaling(const Section &config, const Section &rope, const std::string &type, double part,
                                int width, int context, int original) {
    const char *name = rope.name.c_str(), *original_key = "original_max_position_embeddings";
    if (type == "dynamic")
        fail("%s: rope_type dynamic is not supported: its frequencies change as a text grows, and %s", name,
             "keys that a cache holds would be wrong");
    rope.require_known("rope_type", type, "default linear llama3 proportional yarn longrope");
    RopeScaling to;
    (type == "proportional" ? to.turned : to.rotary) = rope.number("partial_rotary_factor", 0, 1, part);
    const int rotary = (int)(width * to.rotary);
    if (rotary % 2) fail("%s: in a head %d of %d numbers turn, expected an even number", name, rotary, width);
    if (rope.find("factor") || type == "llama3" || type == "linear") to.factor = rope.number("factor", 1e-6, 1e6);
    if (type == "linear" || (type == "proportional" && to.factor != 1)) to.kind = RopeScaling::linear;
    const bool yarn = type == "yarn", longrope = type == "longrope";
    if (type != "llama3" && !yarn && !longrope) return to;

    // These types need an original context.
    if (!original) original = rope.integer(original_key, 1, 1 << 30, context);
    to.original_context = config.integer(original_key, longrope ? 2 : 1, 1 << 30, original);
    if (!rope.find("factor")) to.factor = (double)context / to.original_context;
    auto attention_factor = [&](double otherwise) {
        to.attention_factor = rope.number("attention_factor", 1e-3, 1e3, to.factor <= 1 ? 1 : otherwise);
    };
    if (longrope) {
        to.kind = RopeScaling::longrope;
        attention_factor(std::sqrt(1 + std::log(to.factor) / std::log(to.original_context)));
        to.short_factors = rope.numbers("short_factor", rotary / 2, 1e-6, 1e6);
        to.long_factors = rope.numbers("long_factor", rotary / 2, 1e-6, 1e6);
        return to;
    }
    const char *low = yarn ? "beta_slow" : "low_freq_factor", *high = yarn ? "beta_fast" : "high_freq_factor";
    auto if_yarn = [&](double value) { return yarn ? std::optional<double>(value) : std::nullopt; };
    to.kind = yarn ? RopeScaling::yarn : RopeScaling::llama3;
    to.low_turns = rope.number(low, 1e-6, 1e6, if_yarn(1)), to.high_turns = rope.number(high, 1e-6, 1e6, if_yarn(32));
    if (to.high_turns <= to.low_turns)
        fail("%s: %s is %g, expected more than %s, %g", name, high, to.high_turns, low, to.low_turns);
    if (!yarn) return to;
    to.truncate = rope.flag("truncate", !rope.has_null("truncate"));
    const double scale = rope.number("mscale", 0, 1e3, 0), all = rope.number("mscale_all_dim", 0, 1e3, 0);
    auto grown = [&](double by) { return 1 + 0.1 * by * std::log(to.factor); };
    attention_factor(scale && all ? grown(scale) / grown(all) : grown(1));
    return to;
}
