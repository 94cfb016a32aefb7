// llm generate: streams a text, and reports times, rates and the cache. llm tokenize.
#pragma once

#include "about.h"
#include "files.h"
#include "reads.h"
#include "samples.h"

inline int run_generate(const Options &options) {
    if (options.forks()) return run_samples(options);
    Session session = open_session(options);
    const Cache *cache = session.caches.empty() ? nullptr : &session.caches[0];
    LogitsFile dump(options, session.engine.model.config.vocabulary);
    auto show = [&](const std::string &piece) {
        if (!options.json) fwrite(piece.data(), 1, piece.size(), stdout), flush_output();
    };
    TextStream prompt(session.tokenizer.get(), false);  // special tokens as they are spelled
    const int before = options.has("--ids") ? 0 : tokenizer_before(session.tokenizer.get());
    for (int i = before; i < session.prompt && !options.hide_prompt; i++) show(prompt.next(session.tokens[i]));
    Writer text(session.tokenizer.get(), session.tokens, options.stops);
    Generation result = generate(session, std::move(text), dump.add(), show);
    dump.finish();
    if (!options.json) puts("");

    const std::string first_token = formatted("  %9.1f ms", result.prefill_seconds * 1e3) +
                                    (result.prefilled == session.prompt ? " to the first token" : "");
    // A prompt's rate is shown from 64 tokens on: the first pass also reads the weights for the first time.
    Report prefill = phase("prefill", result.prefilled, result.prefill_seconds, 64, first_token).say("\n");
    Report decode = phase("decode", result.decoded, result.decode_seconds, 1);
    Report report = prompt_of(session.tokens, session.prompt);
    report.add("tokens", std::vector<int>(session.tokens.begin() + session.prompt, session.tokens.end()));
    report.add("text", result.text);
    report.show("stop", result.stop, "\nstopped: %s\n").show("device", session.engine.name(), "device   %s\n");
    if (options.temperature > 0) report.show("seed", (long long)options.seed, "seed     %lld\n");
    double bytes = 0;
    for (int positions : result.passes) {
        bytes += weights_read(session.engine.model);
        if (cache) bytes += cache_read(session.engine.model, *cache, positions);
    }
    const double speed = bytes / result.decode_seconds / 1e9;
    decode.add("bytes", bytes, result.decoded ? formatted("  %6.2f GB/s read\n", speed) : "\n");
    report.add("prefill", prefill).add("decode", decode);
    if (session.drafter.most) report.add("draft", about_draft(session.drafter));
    report.add("cache", about_cache(session.engine.model.config, cache));
    return report.print(options.json, stderr);
}

// ---- llm tokenize ------------------------------------------------------------------------------------------

inline int run_tokenize(const Options &options) {
    TokenizerPointer tokenizer = open_tokenizer(options, options.directory);
    bool from_ids = options.has("--ids");
    std::vector<int> ids = from_ids ? options.prompt_ids : encode(tokenizer.get(), options.prompt);
    for (int id : ids)
        if (id >= tokenizer_size(tokenizer.get()))
            fail("--ids: id %d, the tokenizer has ids 0 .. %d", id, tokenizer_size(tokenizer.get()) - 1);
    std::string text = from_ids ? decode(tokenizer.get(), ids) : options.prompt, list = json_of(ids);
    Report report;
    list.erase(std::remove_if(list.begin(), list.end(), [](char c) { return strchr("[ ]", c); }), list.end());
    if (!from_ids && isatty(fileno(stdout))) {  // each piece next to its id; as spelled, if part of a character
        TextStream pieces(tokenizer.get(), false);
        list.clear();
        for (int id : ids) {
            std::string piece = pieces.next(id);
            piece = piece.empty() ? tokenizer_token(tokenizer.get(), id) : '"' + on_one_line(piece) + '"';
            list += formatted("%8d  ", id) + piece + "\n";
        }
        list.resize(list.size() - !list.empty());
    }
    report.add("ids", ids, from_ids ? "" : list + "\n").add("text", text, from_ids ? text + "\n" : "");
    return report.print(options.json);
}
