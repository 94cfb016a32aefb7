// RoPE of long contexts: with which frequencies a head's pairs turn (layers.cu has the equation), what queries are
// multiplied with beside it, and how a config.json asks for this.
#pragma once

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "formats.h"
#include "json.h"

// The frequency of pair i is f_i = theta^(-2i/rotary) radians a position. So that a model reads further than it was
// trained at first, it is stretched; of a pair that turns n times within the original context to
//   linear    f_i / factor (Chen et al. 2023, Position Interpolation)
//   llama3    f_i / factor where n < low_turns, f_i where n > high_turns, and between them
//             (1 - s) f_i / factor + s f_i,  s = (n - low_turns) / (high_turns - low_turns)
//   yarn      likewise, but s goes evenly from the pair with high_turns, 1, to that with low_turns, 0; `truncate`: from
//             and to whole numbers of pairs (Peng et al. 2023)
//   longrope  f_i / short_factors[i], or, of texts beyond the original context, f_i / long_factors[i] (Ding et al.
//   2024)
struct RopeScaling {
    enum Kind { none, linear, llama3, yarn, longrope } kind = none;
    double factor = 1, low_turns = 1, high_turns = 4;
    int original_context = 0;
    bool truncate = true;
    std::vector<double> short_factors, long_factors;  // (rotary / 2)
    double rotary = 1;  // the part of a head's numbers that are pairs, the first ones; the others stay (Phi-4-mini)
    double turned = 1;  // the part of the pairs that turn, the first ones; f_i of the others is 0 (Gemma 4)
    double attention_factor = 1;  // of yarn and longrope: what queries and keys are multiplied with where they turn
    double query_growth = 0;      // see QueryScale
    auto all() const {
        return std::tie(kind, factor, low_turns, high_turns, original_context, truncate, short_factors, long_factors,
                        rotary, turned, attention_factor, query_growth);
    }
};

// s, for the pair of frequency f, number i.
inline double kept_part(double theta, int rotary, const RopeScaling &rope, size_t i, double f) {
    if (rope.kind == RopeScaling::llama3)
        return (rope.original_context * f / (2 * M_PI) - rope.low_turns) / (rope.high_turns - rope.low_turns);
    auto pair_with = [&](double turns) {  // the one that turns so often, a number with a fraction
        return rotary * std::log(rope.original_context / (turns * 2 * M_PI)) / (2 * std::log(theta));
    };
    double first = pair_with(rope.high_turns), last = pair_with(rope.low_turns);
    if (rope.truncate) first = std::floor(first), last = std::ceil(last);
    first = std::max(first, 0.0), last = std::min(last, rotary - 1.0);
    return 1 - ((double)i - first) / (last == first ? 0.001 : last - first);
}

// The frequencies for texts of up to `positions`: (rotary / 2). With a theta of 0 nothing turns.
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

// What a query is multiplied with so that the scores of a long text stay apart: all of it at position p with
// 1 + growth ln(1 + floor(p / context)) (Ministral 3), and where RoPE turns it with attention_factor^2 besides. That is
// the keys' factor, too: so a cache's rows are as they would be without one.
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

// What `rope`, a part of a config, asks for. `part`: of a head's numbers, those that turn where it is silent; `width`:
// D; `context`: the model's; `original`: the only original one that its family has, or 0.
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

    // These speak of an original context.
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
