// llm diff: each cache compared with the naive path, or the full f32 cache, in lockstep: a line a token, and a verdict.
#pragma once

#include "bench.h"

// How one cache compares.
struct DiffResult {
    const Cache &cache;
    std::string name;  // "int8", "ring int8"
    std::vector<DiffStep> steps = {};
    std::vector<int> stored = {};          // (step): read_as_stored()
    int tested = 0, most_stored = 0;       // steps with stored > 0; the largest stored
    int dropped = 0;                       // positions that the model sees at the last step and this cache does not
    int divergence = -1;                   // the first step at which the likeliest tokens differ
    bool same_bits = true;                 // of all logits of all steps
    double difference = 0, allowed = NAN;  // the largest of a logit; NAN: any is allowed
    double kl = 0, most_kl = 0, tv = 0;    // of the tested steps: mean, largest, mean
    double reference_seconds = 0, cached_seconds = 0;  // of all steps
    bool good = false;
    std::string verdict = "";
    // Milliseconds of each step but the first, which is the prefill and reads the weights for the first time.
    std::vector<double> later(double DiffStep::*seconds) const {
        std::vector<double> times;
        for (size_t i = 1; i < steps.size(); i++) times.push_back(steps[i].*seconds * 1e3);
        return times;
    }
    std::string faster() const {  // by medians: other programs make single steps slow
        const double times = median(later(&DiffStep::reference_seconds)) / median(later(&DiffStep::cached_seconds));
        return steps.size() > 1 ? formatted(", %.1f x without step 0", times) : "";
    }
};

// How many positions the query at `position` reads in the cache's own types, in the layer that looks back furthest. The
// newest block of int4 and int2, at f16, and the sinks of a ring, at f32, do not count.
inline int read_as_stored(const Cache &cache, const Config &config, int position) {
    const int end = blocks_of(cache) ? position / group_size * group_size : position + 1;
    int most = 0;
    for (const Kind &kind : config.kinds)
        most = std::max(most, end - visible_of(cache.layout, kind.window).first(position));
    return most;
}

inline void sum_up(DiffResult &result, const Config &config, int prompt) {
    const int count = (int)result.steps.size(), last = prompt - 1 + count - 1;
    for (int i = 0; i < count; i++) {
        const DiffStep &step = result.steps[i];
        result.stored.push_back(read_as_stored(result.cache, config, prompt - 1 + i));
        result.most_stored = std::max(result.most_stored, result.stored[i]);
        if (result.divergence < 0 && step.token != step.cached_token) result.divergence = i;
        result.same_bits &= step.same_bits;
        result.difference = std::max(result.difference, step.difference);
        result.reference_seconds += step.reference_seconds, result.cached_seconds += step.cached_seconds;
        if (result.stored[i] == 0) continue;
        result.tested++;
        result.kl += step.kl, result.tv += step.tv;
        result.most_kl = std::max(result.most_kl, step.kl);
    }
    result.kl /= result.tested, result.tv /= result.tested;  // NAN: nothing was tested
    for (const Kind &kind : config.kinds) {
        const Visible seen = visible_of(result.cache.layout, kind.window), all = {kind.window, 0};
        result.dropped = std::max(result.dropped, seen.first(last) - std::max(all.first(last), seen.sinks));
    }
}

// True: both paths multiply the same numbers. Otherwise rounding makes a last digit that differs large: a GPU and
// --activations bf16 round activations to 16 bits if weights have 16; int8 weights take int8 activations.
inline bool exact_products(const Engine &engine) {
    const DType weights = engine.model.layers[0].query.weight.type;
    return weights == DType::f32 || (std::holds_alternative<Cpu>(*engine.machine) && weights != DType::int8 &&
                                      weights != DType::bf16_pairs);
}

// What a cache changes is measured in two ways, over the steps that read positions as they are stored:
//   words        the mean total variation of the next token's two distributions: the share of words that differ if both
//                are drawn to agree as often as they can (Levin and Peres 2017, Proposition 4.7)
//   perplexity   grows by the factor e^(mean KL), for a text that the model itself would write
// In runs of 100 steps or more, f16 changed at most a word in 3,400 on the built-in checkpoint, stories260K and the
// tests' random ones, except with int8 weights or huge keys. So fewer than one in 3,000 is as good as f16. Three
// percent more perplexity break a model: 20 stories of the built-in one got at most 1.1 % by int4, 0.4 by fp8, and 6 to
// 160 by int2. One unlucky word decides a shorter run: over 50 steps int2 gave 0.05 to 19 %.
constexpr double good_as_f16 = 3000, broken = 0.0296;  // 1 / total variation; KL in nats, ln 1.03
constexpr int enough_steps = 100;

inline std::string measured(const DiffResult &result) {
    const double every = std::stod(formatted("%.1e", 1 / result.tv));  // to two digits
    const bool breaks = result.kl > broken, good = every >= good_as_f16;
    std::string said = breaks ? "breaks it: " : good ? "as good as f16: " : "";
    said += good ? "changes less than a word in 3,000" : formatted("changes a word in %g", every);
    if (breaks) said += formatted(", perplexity + %.0f %%", 100 * std::expm1(result.kl));
    if (result.dropped) said += "; up to " + counted(result.dropped, "position was", "positions were") + " dropped";
    return said;
}

// Sets the verdict, on what was tested. That a cache holds the same numbers can be proved; less than that is measured.
inline void judge(DiffResult &result, const Session &session, const Options &options) {
    const Config &config = session.engine.model.config;
    const bool given = options.tolerance >= 0, f32 = types_of(result.cache) == "f32";
    const bool proof = f32 && !result.dropped && (result.same_bits || exact_products(session.engine));
    if (proof || given) result.allowed = given ? options.tolerance : 1e-4;
    const bool beyond = result.difference > result.allowed, identical = result.divergence < 0;
    const std::string off = formatted("a logit is %.3g off, allowed is %.3g", result.difference, result.allowed);
    const std::string tokens =
        identical ? "identical tokens" : "the tokens part at step " + std::to_string(result.divergence);
    if (const int needed = proof || given ? 1 : enough_steps; result.tested < needed) {
        int tested = result.tested, next = session.prompt + (int)result.steps.size() - 1;  // position of the next step
        for (; tested < needed && next < config.context; next++)
            tested += read_as_stored(result.cache, config, next) > 0;
        const int count = next - session.prompt + 1;
        const bool fits = next < config.context;
        const std::string stop = reason_to_stop(session);
        std::vector<std::string> cures;
        if (!fits) cures.push_back(given || proof ? "a longer context" : "--tolerance, as the context is too short");
        if (fits && options.count < count) cures.push_back(formatted("-n %d or more", count));
        if (stop == "end id") cures.push_back("--ignore-eos");
        if (fits && stop == "context full") cures.push_back("a larger -c");
        if (cures.empty()) cures.push_back("it time");  // it was interrupted
        result.verdict =
            formatted("no verdict: %s tested, it takes %d: ", counted(result.tested, "step").c_str(), needed);
        result.verdict += "give " + joined(cures, " and ");
    } else if (proof) {
        result.good = result.same_bits || (identical && !beyond);
        result.verdict = result.same_bits ? "the same: all logits have the same bits"
                                          : (result.good ? "the same: " : "NOT the same: ") + tokens + "; " + off;
    } else {
        result.good = !beyond && result.kl <= broken;
        result.verdict = (beyond ? "beyond --tolerance: " + off + "; " : "") + measured(result) + "; " + tokens;
    }
}

inline std::string coloured(const DiffResult &result) { return painted(result.good ? "32" : "31", result.verdict); }

// A step of one cache. Its text is the table's line if one cache is compared.
inline Report step_row(size_t count, const DiffStep &step, const std::string &against) {
    const char mark = step.token == step.cached_token ? ' ' : '!';
    Report row;
    row.say(formatted("%5zu  ", count), " step  ").show("token", step.token, "%8d ", against + " id ");
    row.add("cached_token", step.cached_token, formatted("%9d%c ", step.cached_token, mark), "cached id  ");
    row.show("max_abs_logit_diff", step.difference, "%10.2e ", "logit diff ");
    row.show("kl", step.kl, "%8.2e ", "KL, nats ").add("tv", step.tv);
    row.add((against + "_seconds").c_str(), step.reference_seconds, formatted("%8.3f ", step.reference_seconds * 1e3),
            against + " ms ");
    return row.add("cached_seconds", step.cached_seconds, formatted("%9.3f ", step.cached_seconds * 1e3), "cached ms ");
}

// The table's line if several caches are compared: a column each.
inline Report columns_row(const std::vector<DiffResult> &results, const std::string &against) {
    Report row;
    row.say(formatted("%5zu  ", results[0].steps.size() - 1), " step  ");
    row.show("token", results[0].steps.back().token, "%8d", against + " id");
    for (const DiffResult &result : results) {
        const DiffStep &step = result.steps.back();
        const char mark = step.token == step.cached_token ? ' ' : '!';
        int width = std::max(8, (int)result.name.size());
        row.add("", step.difference, formatted(" %*.2e%c", width, step.difference, mark), result.name + " ");
    }
    return row;
}

// "naive 1.37 -> 5.76": the median of the first and of the last quarter of some times.
inline std::string growth(const std::string &name, const std::vector<double> &times) {
    const auto begin = times.begin(), end = times.end();
    const auto quarter = (end - begin) / 4;
    return formatted("%s %.2f -> %.2f", name.c_str(), median({begin, begin + quarter}), median({end - quarter, end}));
}

// Adds the whole report on one cache.
inline void add_result(Report &report, const DiffResult &result, const Config &config, const std::string &against) {
    const Cache &cache = result.cache;
    const bool same = result.divergence < 0;
    std::vector<Report> rows;
    for (size_t i = 0; i < result.steps.size(); i++)
        rows.push_back(step_row(i, result.steps[i], against).add("stored", result.stored[i]));
    report.list("steps", rows);
    report.add("identical", same, same ? "tokens      identical\n" : "");
    report.add("first_divergence", same ? NAN : result.divergence);
    if (!same)
        report.say(formatted("tokens      differ first at step %d, where %.3g lies between their %s logits\n",
                             result.divergence, result.steps[result.divergence].margin, against.c_str()));
    report.show("max_abs_logit_diff", result.difference, "logits      difference %.3g");
    report.add("tolerance", result.allowed, result.allowed >= 0 ? formatted(", allowed %.3g", result.allowed) : "");
    report.show("mean_kl", result.kl, result.tested ? "; mean KL %.3g nats" : "");
    report.show("max_kl", result.most_kl, result.tested ? ", largest %.3g\n" : "\n");
    report.add("mean_tv", result.tv).add("dropped_positions", result.dropped);
    report.say(formatted("cache       K %s, V %s: ", name_of(cache.type_k), name_of(cache.type_v)));
    report.show("tested_steps", result.tested, "%d of ").say(counted((int64_t)result.steps.size(), "step"));
    report.show("stored_positions", result.most_stored, " read positions as stored, %d at the most\n");
    report.add((against + "_seconds").c_str(), result.reference_seconds,
               formatted("time        %s %.3f s", against.c_str(), result.reference_seconds));
    report.show("cached_seconds", result.cached_seconds, ", cached %.3f s").say(result.faster() + "\n");
    report.add("tokens_per_second", 1e3 / median(result.later(&DiffStep::cached_seconds)));  // without step 0
    if (result.steps.size() > 8)
        report.say("growth      " + growth(against, result.later(&DiffStep::reference_seconds)) + " ms a token, " +
                   growth("cached", result.later(&DiffStep::cached_seconds)) + " (medians, first and last quarter)\n");
    Report about = about_cache(config, &cache);
    about.text = "";
    report.add("cache", about).add("verdict", result.verdict, "verdict     " + coloured(result) + "\n");
}

// Returns 0 if all verdicts are good, else 1.
inline int run_diff(const Options &options) {
    Session session = open_session(options);
    stop_if_interrupted();  // at least one step is compared
    const std::string &against = options.against;
    std::vector<DiffResult> results;
    int width = 11;  // columns of the longest name
    for (size_t i = against == "full"; i < session.caches.size(); i++) {
        const Cache &cache = session.caches[i];
        std::string layout = options.layouts.size() > 1 ? name_of(cache.layout) + std::string(" ") : "";
        results.push_back({cache, layout + types_of(cache)});
        width = std::max(width, (int)results.back().name.size());
    }
    const bool several = results.size() > 1;
    TextStream text(session.tokenizer.get(), session.tokens);
    auto show = [&](const std::vector<DiffStep> &steps) {
        for (size_t i = 0; i < steps.size(); i++) results[i].steps.push_back(steps[i]);
        if (options.json) return;
        const size_t count = results[0].steps.size() - 1;
        Report line = several ? columns_row(results, against) : step_row(count, steps[0], against);
        line.say(" ", " text").text += on_one_line(text.next(steps[0].token));
        TextStream other(session.tokenizer.get());  // what the cache alone would have said
        if (!several && steps[0].token != steps[0].cached_token)
            line.text += "   cached: " + on_one_line(other.next(steps[0].cached_token) + other.flush());
        const std::string about = "The largest difference of a logit; !: another token\n";
        if (count == 0 && several) printf("%s", wrapped(about, columns_of(stdout)).c_str());
        printf("%s%s", count ? "" : line.folded(true).c_str(), line.folded(false).c_str());
        flush_output();
    };
    try {
        run_lockstep(session, options.against == "full", show);
    } catch (Interrupted) {  // reports what was compared so far
        if (results[0].steps.empty()) throw;
    }
    const int64_t compared = (int64_t)session.tokens.size() - session.prompt;
    const std::string stop = reason_to_stop(session);
    Report all = prompt_of(session.tokens, session.prompt).add("against", against);
    all.add("compared", compared, "\ncompared    " + counted(compared, "step") + ", stopped: " + stop + "\n");
    all.show("device", session.engine.name(), "device      %s\n");
    bool good = true;
    std::string verdicts;
    std::vector<Report> reports;
    for (DiffResult &result : results) {
        sum_up(result, session.engine.model.config, session.prompt);
        judge(result, session, options);
        good &= result.good;
        reports.push_back(all);
        add_result(reports.back(), result, session.engine.model.config, against);
        const std::string kl = result.tested ? formatted("; mean KL %.2e", result.kl) : "";
        verdicts += formatted("%-*s %s%s%s, %d of %zu steps tested\n", width, result.name.c_str(),
                              coloured(result).c_str(), kl.c_str(), result.faster().c_str(), result.tested,
                              result.steps.size());
    }
    return (several ? all.say(verdicts).list("caches", reports) : reports[0]).print(options.json, stdout, !good);
}
