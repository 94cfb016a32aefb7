// llm diff: naive and cached path in lockstep, a line a token, and a verdict.
#pragma once

#include "generate.h"

struct DiffTotals {
    int steps = 0, divergence = -1;              // of which first the likeliest tokens differ
    double difference = 0, allowed = 0, kl = 0;  // of the step nearest to, or furthest beyond, what is allowed; mean
    double naive = 0, cached = 0;                // seconds of all steps
    // Milliseconds a token over the first and the last quarter of the decoding steps:
    double naive_early = 0, naive_late = 0, cached_early = 0, cached_late = 0;
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

inline DiffTotals sum_up(const std::vector<DiffStep> &steps, double share, double tolerance) {
    DiffTotals totals;
    int count = totals.steps = (int)steps.size(), quarter = std::max(1, (count - 1) / 4);
    for (int i = 0; i < count; i++) {
        const DiffStep &step = steps[i];
        double allowed = tolerance >= 0 ? tolerance : std::max(1e-4, share * step.spread);
        if (i == 0 || step.difference * totals.allowed > totals.difference * allowed)
            totals.difference = step.difference, totals.allowed = allowed;
        if (totals.divergence < 0 && step.token != step.cached_token) totals.divergence = i;
        totals.kl += step.kl / count;
        totals.naive += step.naive_seconds;
        totals.cached += step.cached_seconds;
        if (i >= 1 && i <= quarter) {  // step 0 is the prefill
            totals.naive_early += step.naive_seconds * 1e3 / quarter;
            totals.cached_early += step.cached_seconds * 1e3 / quarter;
        }
        if (i >= count - quarter) {
            totals.naive_late += step.naive_seconds * 1e3 / quarter;
            totals.cached_late += step.cached_seconds * 1e3 / quarter;
        }
    }
    return totals;
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

inline std::string verdict_of(const DiffTotals &totals, const std::vector<DiffStep> &steps) {
    std::string logits = formatted("the logits by %.3g of %.3g allowed", totals.difference, totals.allowed);
    if (totals.divergence >= 0)
        return formatted("NOT the same: the tokens differ at step %d, where %.3g lies between their naive logits",
                         totals.divergence, steps[totals.divergence].margin);
    return (totals.difference <= totals.allowed ? "the same: the tokens are identical, " : "NOT the same: ") + logits;
}

inline Report diff_report(const DiffTotals &totals, const Session &session, const std::vector<Report> &rows,
                          const std::string &verdict, const std::string &stop) {
    Report report;
    int positions = session.cache.lengths[0], stored = positions;
    if (has_blocks(session.cache.type_k) || has_blocks(session.cache.type_v))
        stored = positions / group_size * group_size;
    report.add("prompt_tokens", std::vector<int>(session.tokens.begin(), session.tokens.begin() + session.prompt));
    report.list("steps", rows).say("\n");
    report.add("compared", totals.steps, "compared    " + counted(totals.steps, "step") + ", stopped: " + stop + "\n");
    report.add("device", session.engine.name(), "device      " + session.engine.name() + "\n");
    std::string tokens = totals.divergence < 0 ? "identical" : formatted("differ first at step %d", totals.divergence);
    report.add("identical", totals.divergence < 0, "tokens      " + tokens + "\n");
    if (totals.divergence < 0)
        report.add("first_divergence", NAN);
    else
        report.add("first_divergence", totals.divergence);
    report.add("max_abs_logit_diff", totals.difference, formatted("logits      difference %.3g", totals.difference));
    report.add("tolerance", totals.allowed, formatted(", allowed %.3g", totals.allowed));
    report.add("mean_kl", totals.kl, formatted("; mean KL %.3g nats\n", totals.kl));
    report.add("stored_positions", stored,
               formatted("cache       K %s, V %s: %s as stored, the others at f16\n", name_of(session.cache.type_k),
                         name_of(session.cache.type_v),
                         (std::to_string(stored) + " of " + counted(positions, "position")).c_str()));
    report.add("naive_seconds", totals.naive, formatted("time        naive %.3f s", totals.naive));
    report.add("cached_seconds", totals.cached,
               formatted(", cached %.3f s: %.1f x\n", totals.cached, totals.naive / totals.cached));
    if (totals.steps >= 8)
        report.say(
            formatted("growth      naive %.2f -> %.2f ms a token, cached %.2f -> %.2f (first and last quarter)\n",
                      totals.naive_early, totals.naive_late, totals.cached_early, totals.cached_late));
    Report cache = about_cache(session);
    cache.text = "";
    return report.add("cache", cache).add("verdict", verdict, "verdict     " + verdict + "\n");
}

// 0 if the likeliest tokens are the same at every step and no logit is further off than is allowed, else 1.
inline int run_diff(const Options &options) {
    Session session = open_session(options);
    if (reason_to_stop(session, options)) {
        fail("the prompt has %d tokens and fills the context: shorten it, so that a step can be compared",
             session.prompt);
    }
    TextStream text(session.tokenizer.get());
    for (int token : session.tokens) text.next(token);
    std::vector<Report> rows;
    std::vector<DiffStep> steps = run_lockstep(session, options, [&](const DiffStep &step) {
        TextStream other(session.tokenizer.get());  // what the cached path would have said
        bool same = step.token == step.cached_token;
        std::string instead = same ? "" : "   cached: " + on_one_line(other.next(step.cached_token) + other.flush());
        Report row;
        row.say(formatted("%5zu  ", rows.size()));
        row.add("token", step.token, formatted("%6d ", step.token), "naive ");
        row.add("cached_token", step.cached_token, formatted("%6d%c ", step.cached_token, same ? ' ' : '!'),
                "cached  ");
        row.add("max_abs_logit_diff", step.difference, formatted("%10.2e ", step.difference), "max diff ");
        row.add("kl", step.kl, formatted("%10.2e  ", step.kl), "KL  ");
        row.add("naive_seconds", step.naive_seconds, formatted("%9.3f ", step.naive_seconds * 1e3), "naive ms ");
        row.add("cached_seconds", step.cached_seconds, formatted("%9.3f  ", step.cached_seconds * 1e3), "cached ms  ");
        row.say(on_one_line(text.next(step.token)) + instead);
        if (!options.json && rows.empty())
            printf(" step%s text\n", row.heads.substr(5, row.heads.find("cached ms") + 5).c_str());
        if (!options.json) printf("%s\n", row.text.c_str());
        if (!options.json) flush_output();
        rows.push_back(row);
    });
    double tolerance = options.has("--tolerance") ? options.tolerance : -1;
    DiffTotals totals = sum_up(steps, allowed_share(session.cache, session.engine), tolerance);
    bool good = totals.divergence < 0 && totals.difference <= totals.allowed;
    diff_report(totals, session, rows, verdict_of(totals, steps), reason_to_stop(session, options)).print(options.json);
    return interrupted() ? 130 : good ? 0 : 1;
}
