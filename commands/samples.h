// llm generate --samples N: several continuations of one prompt. The prompt is read once. Each continuation is a fork
// that shares the prompt's pages, and copies the last of them when it writes there.
#pragma once

#include <numeric>

#include "about.h"

inline int run_samples(const Options &options) {
    Session session = open_session(options);
    Engine &engine = session.engine;
    Cache &cache = session.caches[0];
    const Config &config = engine.model.config;
    std::vector<Request> samples((size_t)options.sequences);
    double start = now(), prefill_seconds = 0;
    auto take = [&](int i, const std::vector<float> &logits) {
        require_finite(logits, cache.lengths[i] - 1, &cache);
        take_token(samples[i], config, options.ignore_end, logits);
        return samples[i].stop.empty() ? samples[i].tokens.back() : -1;
    };
    for (size_t i = 0; i < samples.size(); i++) {
        Request &sample = samples[i];
        sample.tokens = session.tokens, sample.prompt = session.prompt;
        sample.count = room_for(session.prompt, options.count, session.limit);
        sample.fills = sample.count < options.count;
        sample.sampler = {options.temperature, options.top_p, options.min_p, options.top_k, (uint64_t)options.seed + i};
        sample.writer = std::make_unique<Writer>(session.tokenizer.get(), sample.tokens, options.stops);
    }
    try {
        const std::vector<float> first = prefill(engine, cache, 0, session.tokens);
        prefill_seconds = now() - start, start = now();
        for (int i = 1; i < options.sequences; i++) fork(cache, 0, i);
        for (int i = 0; i < options.sequences; i++) take(i, first);
        Progress progress("samples", (double)samples.size() * options.count);
        while (true) {
            std::vector<Text> running;
            for (int i = 0; i < options.sequences; i++)
                if (samples[i].stop.empty()) running.push_back({i, {samples[i].tokens.back()}});
            if (running.empty()) break;
            step(engine, cache, running, [&](int i, const auto &logits) { return take(running[i].sequence, logits); });
        }
    } catch (Interrupted) {
        for (Request &sample : samples)
            if (sample.stop.empty()) sample.text += sample.writer->flush(), sample.stop = "interrupted";
    }
    const double seconds = now() - start;
    std::string prompt, texts;
    TextStream stream(session.tokenizer.get(), false);
    const int before = options.has("--ids") ? 0 : tokenizer_before(session.tokenizer.get());
    for (int i = before; i < session.prompt && !options.hide_prompt; i++) prompt += stream.next(session.tokens[i]);
    std::vector<Report> rows;
    int64_t generated = 0, decoded = 0;
    for (const Request &sample : samples) {
        const std::vector<int> tokens(sample.tokens.begin() + session.prompt, sample.tokens.end());
        generated += (int64_t)tokens.size(), decoded += std::max<int64_t>(0, (int64_t)tokens.size() - 1);
        Report &row = rows.emplace_back();
        row.show("seed", (long long)sample.sampler.seed, "== seed %lld\n").add("tokens", tokens);
        row.add("text", sample.text, prompt + sample.text + "\n").add("stop", sample.stop);
        texts += row.text;
    }
    if (!options.json) fputs(texts.c_str(), stdout), flush_output();
    Report report = prompt_of(session.tokens, session.prompt);
    report.list("samples", rows).add("device", engine.name());
    const double all = prefill_seconds + seconds;
    report.say("\n" + counted(generated, "token")).add("seconds", all, " in " + in_digits(all) + " s\n");
    Report prefill = phase("prefill", prefill_seconds > 0 ? session.prompt : 0, prefill_seconds, 0);
    Report decode = phase("decode", decoded, seconds, 0);
    prefill.text.clear(), decode.text.clear();
    report.add("prefill", prefill).add("decode", decode);
    report.add("cache", about_cache(config, &cache));
    if (cache.pages) {
        int held = 0, alone = 0;
        for (const PagePool &pool : cache.pages->pools) {
            held += pool.used();
            alone = std::accumulate(pool.references.begin(), pool.references.end(), alone);
        }
        report.show("pages_held", held, "pages    %d held, ");
        report.show("pages_alone", alone, "%d if each text were alone\n");
    }
    return report.print(options.json, stderr);
}
