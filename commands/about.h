// Reports that several commands share: on a cache, a prompt, the time of a phase, and drafts.
#pragma once

#include "open.h"

// Names of the types of K and V: "int8" where they are equal, else "int8/int4".
inline std::string types_of(const CacheChoice &cache) {
    std::string k = name_of(cache.type_k), v = name_of(cache.type_v);
    return k == v ? k : k + "/" + v;
}

// Adds a cache's layout and types ("none" for nullptr); a ring as "ring 124 + 4", window + sinks. `heads`: above them.
inline void add_names(Report &report, const Cache *cache, const char *layout_format, const char *k_format,
                      const char *v_format, const std::vector<std::string> &heads = {"", "", ""}) {
    auto name = [&](auto choice) { return std::string(cache ? name_of(cache->*choice) : "none"); };
    const Ring *ring = cache ? std::get_if<Ring>(&cache->layout) : nullptr;
    if (ring) report.add("window", ring->window).add("sinks", ring->sinks);
    const std::string shown = name(&Cache::layout) + (ring ? formatted(" %d + %d", ring->window, ring->sinks) : "");
    report.add("layout", name(&Cache::layout), formatted(layout_format, shown.c_str()), heads[0]);
    report.show("type_k", name(&Cache::type_k), k_format, heads[1]);
    report.show("type_v", name(&Cache::type_v), v_format, heads[2]);
}

// How many positions are stored, for the kind of layers that keeps most: in a ring the last ones and the sinks.
inline std::string positions_stored(const Cache &cache) {
    const int all = cache.lengths[0];
    auto keeps_less = [](const Store &a, const Store &b) { return kept_by(a.layout) < kept_by(b.layout); };
    const auto most = std::max_element(cache.stores.begin(), cache.stores.end(), keeps_less);
    const Ring *ring = std::get_if<Ring>(&most->layout);
    if (!ring || all <= ring->slots) return ", with " + counted(all, "position") + " stored";
    std::string first = ring->sinks ? formatted("the first %d and ", ring->sinks) : "";
    return formatted(", with %sthe last %d of %d positions stored", first.c_str(), ring->slots, all);
}

// The stores of a cache with all its rows, but without memory: for counting rows and bytes.
inline std::vector<Store> stores_of(const std::vector<CacheShape> &shapes, const Layout &layout) {
    std::vector<Store> stores;
    for (const CacheShape &shape : shapes) {
        stores.push_back({shape, open_layout(shape, layout)});
        stores.back().view.keys.rows_per_layer = rows_of(shape, stores.back().layout);
    }
    return stores;
}

// How many layers read rows that others of their kind store.
inline int shared_of(const std::vector<LayerRows> &rows, size_t kind) {
    return (int)std::count_if(rows.begin(), rows.end(), [&](auto &it) { return it.kind == (int)kind && !it.own; });
}

// A line for each kind of layers: what it keeps of `positions`. In the JSON it is a list, even of one kind.
inline std::vector<Report> kinds_of(const std::vector<Kind> &kinds, const std::vector<LayerRows> &rows,
                                    const std::vector<Store> &stores, const CacheChoice &cache, int positions) {
    std::vector<Report> list;
    for (size_t i = 0; i < kinds.size(); i++) {
        const Kind &kind = kinds[i];
        const CacheBytes bytes = bytes_of(stores[i], cache.type_k, cache.type_v);
        const int kept = std::min(positions, kept_by(stores[i].layout)), others = shared_of(rows, i);
        Report line;
        line.add("layers", kind.layers + others, counted(kind.layers, "layer"));
        line.show("shared_layers", others, others ? " (and %d that read their rows)" : "");
        line.add("taps", kind.taps);
        line.add("kv_heads", kind.kv_heads,
                 kind.taps ? " of short convolutions" : " x " + counted(kind.kv_heads, "KV head"));
        const bool apart = kind.value_width && kind.value_width != kind.key_width;
        line.show("key_width", kind.key_width, " x %d").show("value_width", kind.value_width, apart ? " + %d" : "");
        const std::string numbers = kind.taps ? " numbers at f32" : " numbers";
        line.show("window", kind.window, (numbers + (kind.window ? ", looking back %d" : "")).c_str());
        line.add("positions", kept).add("rows", rows_now(stores[i])).add("bytes", bytes.total());
        line.add("payload_bytes", bytes.payload).add("metadata_bytes", bytes.metadata);
        if (positions) line.say(kept < positions ? formatted(": %d of ", kept) : ": ");
        if (positions) line.say(counted(positions, "position") + ", " + in_units(bytes.payload));
        if (bytes.metadata > 0) line.say(" + " + in_units(bytes.metadata) + " of metadata");
        list.push_back(line);
    }
    return list;
}
inline std::vector<Report> kinds_of(const Config &config, const Cache &cache) {
    return kinds_of(config.kinds, config.rows, cache.stores, cache, cache.lengths[0]);
}

// The lines of kinds_of(), indented; "" for one kind, as other lines already say all about it.
inline std::string lines_of(const std::vector<Report> &kinds, const std::string &indent) {
    std::string lines;
    for (const Report &kind : kinds) lines += kinds.size() > 1 ? indent + kind.text + "\n" : "";
    return lines;
}

// What a cache is and how many bytes it holds. nullptr: no cache, every token was computed from all before it.
inline Report about_cache(const Config &config, const Cache *cache) {
    CacheBytes bytes = cache ? bytes_of(*cache) : CacheBytes{};
    Report about;
    add_names(about, cache, "cache    %s", ", K %s", ", V %s");
    about.show("bytes", bytes.total(), ": %.0f bytes").add("payload_bytes", bytes.payload);
    about.show("metadata_bytes", bytes.metadata, ", %.0f of them metadata");
    about.say(cache ? positions_stored(*cache) + "\n" : "\n");
    const std::vector<Report> kinds = cache ? kinds_of(config, *cache) : std::vector<Report>{};
    about.list("kinds", kinds).say(lines_of(kinds, "         "));
    if (!cache) about.text = "cache    none: every token was computed from all before it\n";
    return about;
}

// The prompt's length and ids: the first `prompt` of `tokens`, which may go on.
inline Report prompt_of(const std::vector<int> &tokens, int prompt) {
    const std::vector<int> ids(tokens.begin(), tokens.begin() + prompt);
    return Report().add("prompt_tokens", prompt).add("prompt_ids", ids);
}

// Tokens, seconds and rate of a phase. The text has no rate for fewer than `least` tokens.
inline Report phase(const char *name, int64_t count, double seconds, int least, const std::string &before = "") {
    Report part;
    part.add("tokens", count, formatted("%-9s", name) + counted(count, "token", 6) + before).add("seconds", seconds);
    const double rate = count ? (double)count / seconds : NAN;
    return part.add("tokens_per_second", rate, count < least ? "" : formatted(" %9.1f tokens/s", rate));
}

inline Report about_draft(const Drafter &drafter) {
    const Drafter::Counts &counts = drafter.counts;
    Report about;
    about.add("passes", counts.passes, "draft    " + counted(counts.passes, "pass", "passes"));
    about.show("drafted", counts.drafted, ", %d drafted");
    about.show("accepted", counts.accepted, ", %d accepted");
    const std::string paused = "; " + counted(counts.paused, "pass without guesses", "passes without guesses") +
                               ", which cost more time than they saved";
    const double bytes = drafter.engine ? bytes_of(drafter.cache).total() : 0;
    about.add("paused", counts.paused, counts.paused ? paused : "");
    return about.add("cache_bytes", bytes, bytes ? "; the draft's cache has " + in_units(bytes) : "").say("\n");
}
