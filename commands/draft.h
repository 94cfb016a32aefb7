// --draft: what a number of guesses saves (llm bench --draft), and what each pass does with them (llm diff --draft).
#pragma once

#include "bench.h"

// ---- llm bench --draft ---------------------------------------------------------------------------------------------

// Decodes -n tokens after the prompt with at most `guesses` a pass. Returns the seconds of a token after the first
// pass. By the exact rule the text is the same in all runs.
inline double time_drafts(Session &session, int guesses, bool pauses) {
    Cache &cache = session.caches[0];
    Drafter &drafter = session.drafter;
    std::vector<int> &tokens = session.tokens;
    tokens.resize(session.prompt);
    drafter.most = guesses, drafter.pauses = pauses;
    auto go_on = [&] {
        step_with_guesses(session.engine, cache, drafter, session.sampler, tokens, session.left() - 1,
                          [](const auto &) { return true; });
    };
    rewind(cache, 0, 0);
    if (session.prompt > 1) prefill_pass(session.engine, cache, 0, {tokens.begin(), tokens.end() - 1});
    go_on();  // from here on the draft, too, has read the prompt
    drafter.log.clear(), drafter.counts = {};
    const int before = (int)tokens.size();
    const double start = now();
    while (session.left() > 0) go_on();
    const double seconds = (now() - start) / ((int)tokens.size() - before);
    return seconds;
}

// What a number of guesses a pass costs and saves. `seconds` (round): of a token.
struct DraftRow {
    int guesses;
    bool pauses;
    std::vector<double> seconds = {}, checking = {}, guessing = {};  // (round): seconds of a pass, of guessing in it
    Drafter::Counts counts = {};
    double share() const {  // alpha: how many of the checked guesses are right
        const double looked_at = std::accumulate(counts.tried.begin(), counts.tried.end(), 0.0);
        return looked_at ? counts.accepted / looked_at : NAN;
    }
    double check() const {  // seconds of a pass
        return counts.guessed ? counts.checking[1] / counts.guessed : counts.checking[0] / counts.passes;
    }
    double tokens() const { return 1 + (double)counts.accepted / counts.passes; }  // per pass
    double with() const { return (double)counts.guessed / counts.passes; }         // the share of passes with guesses
    // Tokens per pass if each guess were right with the same probability, share() (Leviathan et al. 2023, equation 1).
    // A pass without guesses brings one token.
    double expected_tokens() const {
        const double a = share(), k = (double)counts.drafted / std::max(1, counts.guessed);
        return with() > 0 ? 1 - with() + with() * (a < 1 ? (1 - std::pow(a, k + 1)) / (1 - a) : k + 1) : 1;
    }
};

inline int run_bench_draft(const Options &options) {
    Session session = open_session(options);
    if (session.limit - session.prompt < options.draft_tokens + 2)
        fail("-n: the prompt has %s, and the context %d: too few are left to guess %d of them",
             counted(session.prompt, "token").c_str(), session.limit, options.draft_tokens);
    std::vector<DraftRow> rows;
    for (int guesses = 0; guesses <= options.draft_tokens; guesses++) rows.push_back({guesses, false});
    if (session.drafter.pauses) rows.push_back({options.draft_tokens, true});
    for (int round = 0; round <= options.repeats; round++)  // the first one warms up
        for (DraftRow &row : rows) {
            show_progress(formatted("%d guesses, round %d of %d", row.guesses, round, options.repeats));
            const double seconds = time_drafts(session, row.guesses, row.pauses);
            if (round == 0) continue;
            row.counts = session.drafter.counts;
            row.seconds.push_back(seconds);
            row.checking.push_back(row.check());
            row.guessing.push_back(row.counts.guessing / row.counts.passes);
        }
    erase_progress();
    const double alone = median(rows[0].checking);
    std::vector<Report> table;
    const DraftRow *best = &rows[0];
    double most = 1;
    for (const DraftRow &row : rows) {
        std::vector<double> ratios;
        for (size_t i = 0; i < row.seconds.size(); i++) ratios.push_back(rows[0].seconds[i] / row.seconds[i]);
        const double check = median(row.checking) / alone, guess = median(row.guessing) / alone;
        const double cost = 1 - row.with() + row.with() * check + guess;
        const double predicted = row.expected_tokens() / cost, measured = median(ratios);
        if (measured > most) most = measured, best = &row;
        std::vector<double> shares;
        std::string by_guess;
        for (size_t i = 0; i < row.counts.tried.size(); i++) {
            shares.push_back((double)row.counts.right[i] / row.counts.tried[i]);
            if (row.counts.tried[i]) by_guess += formatted(" %.2f", shares.back());
        }
        Report line;
        line.show("guesses", row.guesses, row.pauses ? "%5d, with pauses" : "%5d             ", "guesses          ");
        line.show("tokens_per_second", 1 / median(row.seconds), "%9.1f", "tokens/s");
        line.show("tokens_per_pass", row.tokens(), "%7.2f", "a pass");
        line.show("expected_tokens_per_pass", row.expected_tokens(), "%9.2f", "expected");
        line.show("check_cost", check, "%7.2f", "check").show("guess_cost", guess, "%7.2f", "guess");
        line.show("predicted", predicted, "%8.2f x", "predicted").show("measured", measured, "%8.2f x", "measured");
        line.add("shares_right", shares, "   " + by_guess, "   right, of the first guess, the second, ...");
        line.add("share_right", row.share()).add("share_with_guesses", row.with());
        table.push_back(line.add("paused", row.counts.paused));
    }
    Report report = prompt_of(session.tokens, session.prompt).add("draft_model", options.draft);
    report.show("device", session.engine.name(), "device: %s\n").table("results", table);
    report.add("best_guesses", best->guesses,
               best == &rows[0] ? "No guesses pay here.\n"
                                : formatted("Best here: %d a pass, %.2f x.\n", best->guesses, most));
    report.say(R"(
a pass: tokens that a pass brings. expected: (1 - a^(k+1)) / (1 - a), if each of
k guesses were right with the same probability a. check: a pass with guesses,
guess: what a pass takes to guess, both beside a pass without. predicted: by
these. measured: by the time that a token takes without guesses.
)");
    return report.print(options.json);
}

// ---- llm diff --draft ----------------------------------------------------------------------------------------------

// Prints a line a pass: the right guesses, the first wrong one in [], and the model's own token. A second cache reads
// the same text token by token, without guesses: its tokens and logits must be the same.
inline int run_diff_draft(const Options &options) {
    Session session = open_session(options);
    Engine &engine = session.engine;
    Cache &cache = session.caches[0];
    std::vector<int> &tokens = session.tokens;
    Cache plain = open_cache(options, engine, options.caches()[0], session.limit);
    auto said = [&](const std::vector<int> &ids) {
        return on_one_line(decode(session.tokenizer.get(), ids, /*skip_special=*/false));
    };
    int compared = 0, same_tokens = 0, same_bits = 0;
    double difference = 0;
    std::vector<Report> passes;
    const char *stop = nullptr;
    try {
        std::vector<float> expected = prefill(engine, plain, 0, tokens);
        if (session.prompt > 1) prefill_pass(engine, cache, 0, {tokens.begin(), tokens.end() - 1});
        while (!(stop = reason_to_stop(session))) {
            const int size = (int)tokens.size();
            std::vector<std::vector<float>> rows;
            auto take = [&](const std::vector<float> &row) { return rows.push_back(row), !reason_to_stop(session); };
            step_with_guesses(engine, cache, session.drafter, Sampler{}, tokens, session.left() - 1, take);
            const std::vector<int> next(tokens.begin() + size, tokens.end());
            for (size_t i = 0; i < next.size(); i++) {
                if (i > 0) expected = decode(engine, plain, {0}, {next[i - 1]});
                const DiffStep step = compare(expected, rows[i]);
                compared++, same_bits += step.same_bits, same_tokens += step.token == next[i];
                difference = std::max(difference, step.difference);
            }
            const PassLog &pass = session.drafter.log.back();
            const auto guesses = pass.guesses.begin(), wrong = guesses + pass.right, end = pass.guesses.end();
            Report line;
            line.show("position", size, "%9d  ", "position  ").add("guessed", pass.guesses);
            line.add("accepted", pass.right, formatted("%3d of %-3zu ", pass.right, pass.guesses.size()),
                     "right      ");
            std::string words = painted("32", said({guesses, wrong}));
            if (wrong < end) words += painted("31", "[" + said({wrong, wrong + 1}) + "]");
            words += said({next.begin() + pass.right, next.end()});
            line.add("tokens", next).add("corrected", wrong < end ? next.back() : NAN);
            if (!options.json && passes.empty()) printf(" pass  %stext\n", line.heads.c_str());
            if (!options.json) printf("%5zu  %s%s\n", passes.size(), line.text.c_str(), words.c_str()), flush_output();
            passes.push_back(line);
            if (!reason_to_stop(session)) expected = decode(engine, plain, {0}, {next.back()});
        }
    } catch (Interrupted) {
        if (passes.empty()) throw;
        stop = "interrupted";
    }
    const bool card = !std::holds_alternative<Cpu>(*engine.machine);
    const bool good = same_tokens == compared && (card || same_bits == compared);
    std::string verdict = "the same: all logits have the same bits as without guesses";
    if (same_bits < compared)
        verdict = (good ? "the same tokens as without guesses; "
                        : formatted("NOT the same: %d of %d tokens differ from those without guesses, ",
                                    compared - same_tokens, compared)) +
                  formatted("a logit is %.3g off", difference);
    Report report = prompt_of(tokens, session.prompt);
    report.add("compared", compared, "\ncompared " + counted(compared, "token") + ", stopped: " + stop + "\n");
    report.show("device", engine.name(), "device   %s\n").list("steps", passes);
    report.add("draft", about_draft(session.drafter)).add("identical", same_tokens == compared);
    report.add("max_abs_logit_diff", difference);
    report.add("verdict", verdict, "verdict  " + painted(good ? "32" : "31", verdict) + "\n");
    return report.print(options.json, stdout, !good);
}
