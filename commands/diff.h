// llm diff: each cache beside the naive path, or beside the full f32 cache, in lockstep: a line a token, and a verdict.
#pragma once

#include "generate.h"

// What one cache did.
struct DiffResult {
    const Cache &cache;
    std::string name;  // "int8", "ring int8"
    std::vector<DiffStep> steps = {};
    int divergence = -1;                         // the first step at which the likeliest tokens differ
    double difference = 0, allowed = 0, kl = 0;  // of the step nearest to, or furthest beyond, what is allowed; mean
    double reference_seconds = 0, cached_seconds = 0;  // of all steps
    bool good = false;
    std::string verdict = "";
    double times() const { return reference_seconds / cached_seconds; }
    int stored() const {  // positions that are there at the cache's types; the others are in the residual block
        const int length = cache.lengths[0];
        return has_blocks(cache.type_k) || has_blocks(cache.type_v) ? length / group_size * group_size : length;
    }
};

// With an f32 cache both paths compute the same numbers in another order: logits may lie 1e-4 apart. Otherwise a stored
// key or value is off by at most u of itself (unit_roundoff), and logits by a multiple of u and of their own spread; at
// the most by their spread, as they would be if they had little to do with each other. Where products round activations
// to 16 bits (a GPU with such weights) or to whole numbers (int8 weights), u is at least that.
inline double allowed_share(const Cache &cache, const Engine &engine) {
    auto roundoff = [](auto type) { return decltype(type)::unit_roundoff; };
    double u = std::max(std::visit(roundoff, cache.type_k), std::visit(roundoff, cache.type_v));
    DType weights = engine.model.layers[0].query.weight.type;
    bool cpu = std::holds_alternative<Cpu>(*engine.machine);
    if (weights == DType::int8) u = std::max(u, 1.0 / 254);
    if (!cpu && weights == DType::f16) u = std::max(u, F16::unit_roundoff);
    if (!cpu && weights == DType::bf16) u = std::max(u, BF16::unit_roundoff);
    return u <= F32::unit_roundoff ? 0 : std::min(1.0, 48 * u);
}

// `share`: of the logits' spread, that they may be off; or `tolerance`, if it is not negative.
inline void sum_up(DiffResult &result, double share, const Options &options) {
    const int count = (int)result.steps.size();
    for (int i = 0; i < count; i++) {
        const DiffStep &step = result.steps[i];
        double allowed = options.tolerance >= 0 ? options.tolerance : std::max(1e-4, share * step.spread);
        if (i == 0 || step.difference * result.allowed > result.difference * allowed)
            result.difference = step.difference, result.allowed = allowed;
        if (result.divergence < 0 && step.token != step.cached_token) result.divergence = i;
        result.kl += step.kl / count;
        result.reference_seconds += step.reference_seconds;
        result.cached_seconds += step.cached_seconds;
    }
    result.good = result.divergence < 0 && result.difference <= result.allowed;
    result.verdict = (result.good ? "the same: the tokens are identical, " : "NOT the same: ") +
                     formatted("the logits by %.3g of %.3g allowed", result.difference, result.allowed);
    if (result.divergence >= 0)
        result.verdict =
            formatted("NOT the same: the tokens differ at step %d, where %.3g lies between their %s logits",
                      result.divergence, result.steps[result.divergence].margin, options.against.c_str());
}

// The verdict, green or red on a terminal whose user did not set NO_COLOR (no-color.org).
inline std::string coloured(const DiffResult &result) {
    const char *none = getenv("NO_COLOR");
    if (!isatty(1) || (none && *none)) return result.verdict;
    return (result.good ? "\033[32m" : "\033[31m") + result.verdict + "\033[0m";
}

// Text of a token on one line: what would break the line or the column is shown as an escape.
inline std::string on_one_line(const std::string &text) {
    std::string result;
    for (char c : text) {
        bool shown = (unsigned char)c >= ' ' && c != 127;
        result += shown ? std::string(1, c) : c == '\n' ? "\\n" : formatted("\\x%02x", (unsigned char)c);
    }
    return result;
}

// A step of one cache; the line of the table, if there is no other.
inline Report step_row(const DiffStep &step, const std::string &against) {
    const char mark = step.token == step.cached_token ? ' ' : '!';
    Report row;
    row.show("token", step.token, "%6d ", against + " ");
    row.add("cached_token", step.cached_token, formatted("%6d%c ", step.cached_token, mark), "cached  ");
    row.show("max_abs_logit_diff", step.difference, "%10.2e ", "max diff ");
    row.show("kl", step.kl, "%10.2e  ", "KL  ");
    row.add((against + "_seconds").c_str(), step.reference_seconds, formatted("%9.3f ", step.reference_seconds * 1e3),
            against + " ms ");
    return row.add("cached_seconds", step.cached_seconds, formatted("%9.3f  ", step.cached_seconds * 1e3),
                   "cached ms  ");
}

// The line of several: a column each.
inline Report columns_row(const std::vector<DiffResult> &results, const std::string &against) {
    Report row;
    const int token = results[0].steps.back().token;
    row.show("token", token, "%6d ", against + " ");
    for (const DiffResult &result : results) {
        const DiffStep &step = result.steps.back();
        const char mark = step.token == step.cached_token ? ' ' : '!';
        int width = std::max(10, (int)result.name.size());
        row.add("", step.difference, formatted("%*.2e%c ", width, step.difference, mark), result.name + "  ");
    }
    return row;
}

// What is said of one cache.
inline void add_result(Report &report, const DiffResult &result, const std::string &against) {
    const Cache &cache = result.cache;
    const int count = (int)result.steps.size(), quarter = std::max(1, (count - 1) / 4);
    const bool same = result.divergence < 0;
    const std::string first = "differ first at step " + std::to_string(result.divergence);
    const std::string length = counted(cache.lengths[0], "position");
    std::vector<Report> rows;
    for (const DiffStep &step : result.steps) rows.push_back(step_row(step, against));
    report.list("steps", rows);
    report.add("identical", same, "tokens      " + (same ? "identical" : first) + "\n");
    report.add("first_divergence", same ? NAN : result.divergence);
    report.show("max_abs_logit_diff", result.difference, "logits      difference %.3g");
    report.show("tolerance", result.allowed, ", allowed %.3g");
    report.show("mean_kl", result.kl, "; mean KL %.3g nats\n");
    report.say(formatted("cache       K %s, V %s", name_of(cache.type_k), name_of(cache.type_v)));
    report.add("stored_positions", result.stored(), formatted(": %d of ", result.stored()) + length);
    report.say(" as stored, the others at f16\n");
    report.add((against + "_seconds").c_str(), result.reference_seconds,
               formatted("time        %s %.3f s", against.c_str(), result.reference_seconds));
    report.add("cached_seconds", result.cached_seconds,
               formatted(", cached %.3f s: %.1f x\n", result.cached_seconds, result.times()));
    // Milliseconds a token over the first and the last quarter of the decoding steps. Step 0 is the prefill.
    auto growth = [&](const std::string &name, double DiffStep::*seconds) {
        double early = 0, late = 0;
        for (int i = 0; i < quarter; i++) {
            early += result.steps[1 + i].*seconds * 1e3 / quarter;
            late += result.steps[count - 1 - i].*seconds * 1e3 / quarter;
        }
        return formatted("%s %.2f -> %.2f", name.c_str(), early, late);
    };
    if (count >= 8)
        report.say("growth      " + growth(against, &DiffStep::reference_seconds) + " ms a token, " +
                   growth("cached", &DiffStep::cached_seconds) + " (first and last quarter)\n");
    Report about = about_cache(&cache);
    about.text = "";
    report.add("cache", about).add("verdict", result.verdict, "verdict     " + coloured(result) + "\n");
}

// 0 if the likeliest tokens are the same at every step and no logit is further off than is allowed, else 1.
inline int run_diff(const Options &options) {
    Session session = open_session(options);
    if (reason_to_stop(session, options))
        fail("the prompt has %d tokens and fills the context: shorten it, so that a step can be compared",
             session.prompt);
    const std::string &against = options.against;
    std::vector<DiffResult> results;
    int width = 11, count = 0;  // columns of the longest name; steps so far
    for (size_t i = against == "full"; i < session.caches.size(); i++) {
        const Cache &cache = session.caches[i];
        std::string layout = options.layouts.size() > 1 ? name_of(cache.layout) + std::string(" ") : "";
        results.push_back({cache, layout + types_of(cache.type_k, cache.type_v)});
        width = std::max(width, (int)results.back().name.size());
    }
    const bool several = results.size() > 1;
    TextStream text(session.tokenizer.get());
    for (int token : session.tokens) text.next(token);
    auto show = [&](const std::vector<DiffStep> &steps) {
        for (size_t i = 0; i < steps.size(); i++) results[i].steps.push_back(steps[i]);
        if (options.json) return;
        Report line = several ? columns_row(results, against) : step_row(steps[0], against);
        if (count == 0) printf(" step  %stext\n", line.heads.c_str());
        line.text += on_one_line(text.next(steps[0].token));
        TextStream other(session.tokenizer.get());  // what the cache alone would have said
        if (!several && steps[0].token != steps[0].cached_token)
            line.text += "   cached: " + on_one_line(other.next(steps[0].cached_token) + other.flush());
        printf("%5d  %s\n", count++, line.text.c_str());
        flush_output();
    };
    try {
        run_lockstep(session, options, show);
    } catch (Interrupted) {  // what was compared so far is said
        if (results[0].steps.empty()) throw;
    }
    auto begin = session.tokens.begin(), middle = begin + session.prompt;
    const int64_t compared = session.tokens.end() - middle;
    const std::string stop = reason_to_stop(session, options);
    Report all;
    all.add("prompt_tokens", std::vector<int>(begin, middle)).add("against", against);
    all.add("compared", compared, "\ncompared    " + counted(compared, "step") + ", stopped: " + stop + "\n");
    all.show("device", session.engine.name(), "device      %s\n");
    bool good = true;
    std::string verdicts;
    std::vector<Report> reports;
    for (DiffResult &result : results) {
        sum_up(result, allowed_share(result.cache, session.engine), options);
        good &= result.good;
        reports.push_back(all);
        add_result(reports.back(), result, against);
        verdicts +=
            formatted("%-*s %s; mean KL %.2e, %.1f x, %d of %d as stored\n", width, result.name.c_str(),
                      coloured(result).c_str(), result.kl, result.times(), result.stored(), result.cache.lengths[0]);
    }
    (several ? all.say(verdicts).list("caches", reports) : reports[0]).print(options.json);
    return interrupted() ? 130 : good ? 0 : 1;
}
