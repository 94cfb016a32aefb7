// llm info: what is in a checkpoint, what its cache costs, and whether it runs here. It needs a config.json alone.
#pragma once

#include "memory.h"

// Adds what is known of a model that runs here. `window`: the widest window of a layer; 0: none has one.
inline void add_config(Report &report, const Model &model, int window, int tokenizer_ids) {
    const Config &config = model.config;
    const Kind &kind = config.kinds[0];
    const std::string rope = std::vector<std::string>{"none", "linear", "llama3", "yarn", "longrope"}[kind.rope.kind];
    report.add("tied", config.tied, config.tied ? ", tied" : "");
    report.say(formatted(", %s weights\n", dtype_name(model.layers[0].query.weight.type)));
    report.add("parameters", model.parameters, formatted("  parameters     %.4g M", (double)model.parameters / 1e6));
    report.add("weight_bytes", model.weight_bytes, " in " + in_units((double)model.weight_bytes) + "\n");
    report.add("hidden", config.hidden, formatted("  layers         %d, %d wide", config.layers, config.hidden));
    report.show("ffn", config.ffn, ", ffn %d").add("head_dim", kind.key_width);
    report.add("heads", config.heads, ", " + counted(config.heads, "query head") + "\n").add("window", window);
    report.show("rope_theta", kind.rope_theta, "  RoPE           theta %g");
    report.add("rope_scaling", rope, ", scaling " + rope + "\n");
    report.show("vocabulary", config.vocabulary, "  vocabulary     %d");
    report.add("tokenizer_size", tokenizer_ids,
               tokenizer_ids ? formatted(" (tokenizer: %d), end ids:", tokenizer_ids)
                             : " (no tokenizer.json: fetch it, or give prompts as --ids), end ids:");
    report.add("end_ids", config.end_ids);
    for (int id : config.end_ids) report.say(" " + std::to_string(id));
}

// Returns 1 if the checkpoint does not run here, else 0.
inline int run_info(const Options &options) {
    const std::string &directory = options.directory;
    CacheSizes sizes = load_cache_sizes(directory);
    Model model;
    int tokenizer_ids = 0;
    try {
        if (file_exists(join_path(directory, "tokenizer.json")))
            tokenizer_ids = tokenizer_size(load_tokenizer(directory).get());
    } catch (const Error &error) {
        if (sizes.why_not.empty()) sizes.why_not = error.what();
    }
    bool runs = sizes.why_not.empty();
    if (runs) model = load_model(directory);
    Report report;
    report.add("architecture", sizes.architecture, directory + "\n  architecture   " + sizes.architecture);

    int furthest = 0, windowed = 0, layers = 0, convolving = 0, taps = 0;
    for (const Kind &kind : sizes.kinds) {
        layers += kind.layers;
        if (kind.taps)
            convolving += kind.layers, taps = kind.taps;
        else if (kind.window)
            windowed += kind.layers, furthest = std::max(furthest, kind.window);
    }
    if (runs) add_config(report, model, furthest, tokenizer_ids);
    const CacheChoice f16 = {Contiguous{}, F16{}, F16{}};
    const std::vector<CacheShape> shapes = cache_shapes(options, sizes.kinds, sizes.context, sizes.context);
    const double a_token = bytes_per_token(shapes, f16), whole = full_bytes(shapes, f16).total();
    const Kind first = sizes.kinds.empty() ? Kind{} : sizes.kinds[0];
    double weights = (double)model.weight_bytes;
    const Room free = free_memory_of_host();
    const bool several = sizes.kinds.size() > 1;
    auto known = [&](double number) { return sizes.no_size.empty() ? number : NAN; };
    auto of_one = [&](const std::string &text) { return several ? "" : text; };
    report.add("context", sizes.context ? sizes.context : NAN);
    report.say("\n  positions      " + (sizes.context ? std::to_string(sizes.context) : "not said"));
    const std::string above = report.say("\n  KV cache       ").text;
    report.add("layers", known(layers), counted(layers, "layer"));
    report.add("kv_heads", known(first.kv_heads), of_one(", " + counted(first.kv_heads, "KV head")));
    report.add("key_width", known(first.key_width), of_one(formatted(" of %d", first.key_width)));
    report.add("value_width", known(first.value_width),
               first.value_width ? "" : of_one(", whose values are a part of them (MLA)"));
    if (several) report.say(formatted(" of %zu kinds", sizes.kinds.size()));
    if (windowed) report.say(formatted("; %d of the layers look back %d", windowed, furthest));
    if (convolving)
        report.say(formatted("; %d of %d layers are short convolutions of %s", convolving, layers,
                             counted(taps, "position").c_str()));
    const std::vector<Report> kinds =
        kinds_of(sizes.kinds, sizes.rows, stores_of(shapes, f16.layout), f16, sizes.context);
    const std::string indent(17, ' ');
    report.list("kinds", kinds).say("\n" + lines_of(kinds, indent));
    report.add("cache_bytes_per_token_f16", known(a_token), indent + in_units(a_token) + " a token in f16");
    if (sizes.context) report.say(", " + in_units(whole) + " for all positions");
    report.add("no_size", sizes.no_size);
    if (!sizes.no_size.empty()) report.text = above + "not known: " + sizes.no_size;
    report.say("\n  will it run    ");
    report.add("runs", runs).add("why_not", sizes.why_not, runs ? "" : "no: " + sizes.why_not + "\n");
    bool fits = weights + whole <= free.bytes, some_fit = weights + a_token <= free.bytes;
    report.add("fits", runs && fits);
    std::string answer = fits ? "yes: " + in_units(weights + whole) + " for weights and all positions"
                         : some_fit
                             ? formatted("yes, with -c %.0f or fewer", std::floor((free.bytes - weights) / a_token))
                             : "slowly, its weights read from the disk again and again: " + in_units(weights);
    if (runs) report.say(answer + ", " + free.name + " has " + in_units(free.bytes) + " free\n");
    return report.print(options.json, stdout, !runs);
}
