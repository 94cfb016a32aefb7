// What the command line asks for (flags.h reads it), and the names of layouts and types that it may use.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "../cache.h"

// The names of all layouts: "contiguous paged ring".
inline std::string layout_names() {
    std::string names;
    for_each_type<Layout>([&](auto layout) { names += std::string(names.empty() ? "" : " ") + layout.name; });
    return names;
}

// The names and sizes of all types: "f32 (32 bits a value) f16 (16) ...".
inline std::string precision_names() {
    std::string names;
    for_each_type<Precision>([&](auto type) {
        names += formatted(names.empty() ? "%s (%g bits a value)" : " %s (%g)", type.name, type.bits);
    });
    return names;
}

// The type called `name` in a list of types. For the message: the flag that gave the name, and the names `known`.
template <class List>
List parse_name(const std::string &flag, const std::string &name, const std::string &known) {
    std::optional<List> found;
    for_each_type<List>([&](auto type) {
        if (name == type.name) found = type;
    });
    if (!found) fail("%s %s: unknown %s", flag.c_str(), name.c_str(), known.c_str());
    return *found;
}
inline Precision parse_precision(const std::string &flag, const std::string &name) {
    return parse_name<Precision>(flag, name, "type; known are " + precision_names());
}
inline Layout parse_layout(const std::string &flag, const std::string &name) {
    return parse_name<Layout>(flag, name, "layout; known are none (recompute everything) " + layout_names());
}

struct Options {
    std::string command;                       // "generate"
    std::map<std::string, std::string> given;  // flags on the command line: first name -> value
    bool help = false, version = false, json = false;

    std::string directory;            // of the checkpoint
    std::string prompt, prompt_file;  // the text of -p or of the file
    std::vector<int> prompt_ids;
    int count = 256, context = 0;  // tokens to generate at most; positions the cache holds, 0: as many as are needed
    int threads = std::min(256, usable_threads());
    int chunk = 0;  // tokens of a prefill pass at most; 0: the machine's choice
    std::string device = "auto", weights = "stored", activations = "f32", dump_logits;
    bool ignore_end = false, hide_prompt = false;  // go on after an end id; print the new text alone
    std::vector<std::string> stops = {};           // texts that end what is generated

    // The caches: diff, eval, bench and memory take several.
    bool naive = false;  // --cache none is among the layouts: no cache
    std::vector<Layout> layouts = {Contiguous{}};
    std::vector<Precision> types_k = {F16{}}, types_v = {F16{}};
    bool keep_all = false;  // --swa-full
    int page = 16, window = 0, sinks = -1;  // window 0, sinks -1: the model's

    double temperature = 0, top_p = 1, min_p = 0;
    int top_k = 0;
    int64_t seed = 0;  // drawn at random if tokens are drawn and no seed is given

    int sequences = 1;                // batch, bench: at once; generate, show: that share a prompt
    int pass_tokens = 512, pool = 0;  // batch: tokens of a pass; positions in all pages, 0: enough for all
    bool keep_going = false;                         // batch: leaves wrong lines out
    std::string admission = "exact", order = "fcfs", events;  // batch

    std::string draft, draft_rule = "exact";  // what guesses: a directory, or "ngram"; "": nothing
    int draft_tokens = 4;                     // at most, in a pass

    std::string system, chat_template, when_full = "stop";  // chat
    std::vector<std::string> template_arguments = {};       // chat: NAME=VALUE

    double tolerance = -1;                                                        // diff; -1: by the cache's types
    std::string against = "naive";                                                // diff: what caches are compared with
    std::vector<int> depths = {0, 1024, 4096, 8000}, prompts = {128, 512, 2048};  // bench
    int repeats = 3;                                                              // bench, eval
    bool standard_set = false;                                                    // eval

    int layer = 0, head = 0, position = 0;  // show; without --position: the last one

    // memory: a shape in place of a model's; bytes; 10^9 bytes a second; 0: not given
    int layers = 0, kv_heads = 0, head_dim = 0, batch = 1;
    double weight_bytes = 0, budget = 0, bandwidth = 0;

    bool has(const std::string &flag) const { return given.count(flag) > 0; }
    bool forks() const { return has("--samples") && sequences > 1; }  // several samples of one prompt

    // Each layout with each pair of types; --kv pairs a type with itself.
    std::vector<CacheChoice> caches() const {
        std::vector<CacheChoice> list;
        for (const Layout &layout : layouts)
            for (size_t k = 0; k < types_k.size(); k++)
                for (size_t v = 0; v < types_v.size(); v++)
                    if (!has("--kv") || k == v) list.push_back({layout, types_k[k], types_v[v]});
        return list;
    }
};
