// llm memory: the formula. Bytes of a cache, for every layout and precision; what fits; how fast it is read.
#pragma once

#include "info.h"

// What is asked about. A shape that the flags give is that of a model without weights, whose layers all look back to
// the first position.
struct MemoryQuestion {
    std::string model;  // its directory; "": the flags give the shape
    CacheShape shape;
    std::map<int, int> windows;  // positions that a layer looks back, 0: to the first -> layers that do
    double weights = 0;          // bytes that a decoding step reads of them; 0: not known
};

inline MemoryQuestion memory_question(const Options &options) {
    MemoryQuestion question;
    CacheSizes sizes;
    if (options.has("--layers")) {
        sizes.layers = options.layers;
        sizes.kv_heads = options.kv_heads;
        sizes.key_width = sizes.value_width = options.head_dim;
        sizes.windows.resize(1);
        question.windows[0] = sizes.layers;
    } else {
        question.model = checkpoint_directory(options);
        sizes = load_cache_sizes(question.model);
        for (int window : sizes.windows) question.windows[window]++;
        if (sizes.why_not.empty()) question.weights = weights_read(load_model(question.model));
    }
    if (question.weights && options.weight_bytes)
        fail("--weight-bytes: %s tells them, %.0f: drop the flag", question.model.c_str(), question.weights);
    if (!question.weights) question.weights = options.weight_bytes;
    if (!options.context && !sizes.context)
        fail("%s: config.json does not say for how many positions: add -c N", question.model.c_str());
    if (!sizes.value_width && options.has("-ctv"))
        fail("-ctv: the values of %s are a part of its keys (MLA): use --kv", question.model.c_str());
    Config config;
    config.layers = sizes.layers;
    config.kv_heads = sizes.kv_heads;
    config.head_dim = sizes.key_width;
    config.context = options.context && options.has("--layers") ? options.context : sizes.context;
    config.window = *std::max_element(sizes.windows.begin(), sizes.windows.end());
    question.shape = cache_shape(options, config, options.context ? options.context : config.context);
    question.shape.value_width = sizes.value_width;
    question.shape.sequences = options.batch;
    return question;
}

// Of `rows` rows of a layer.
inline CacheBytes bytes_in(const CacheShape &shape, CacheChoice cache, double rows) {
    if (!shape.value_width) cache.type_v = F32{};  // of which no numbers take no bytes
    return bytes_of(shape, open_layout(shape, cache.layout), cache.type_k, cache.type_v, rows);
}
inline double bytes_per_token(const CacheShape &shape, const CacheChoice &cache) {
    return bytes_in(shape, cache, 1).total() - bytes_in(shape, cache, 0).total();
}

// The whole of a cache: of a paged one all pages. Allocates nothing.
inline CacheBytes full_bytes(const CacheShape &shape, const CacheChoice &cache) {
    return bytes_in(shape, cache, (double)rows_of(shape, open_layout(shape, cache.layout)));
}

// Bytes that a decoding step reads of one sequence's cache with all its positions there: the rows that each layer
// sees, of int4 and int2 the newest block at f16, of a ring the sinks at f32.
inline double read_at_capacity(const MemoryQuestion &question, const CacheChoice &cache) {
    const CacheShape &shape = question.shape;
    const int end = shape.capacity, last = end - 1, block = last / group_size * group_size;
    double bytes = 0;
    for (auto &[window, layers] : question.windows) {
        Visible visible = visible_of(open_layout(shape, cache.layout), window);
        const double heads = (double)layers * shape.kv_heads;
        int first = visible.first(last), sinks = visible.dropped(last) ? visible.sinks : 0;
        auto add = [&](const Precision &type, int width) {
            int stored = has_blocks(type) ? std::max(first, block) : end;
            bytes += heads * ((double)(stored - first) * (double)row_bytes(type, width) +
                              (double)width * ((double)(end - stored) * sizeof(f16) + (double)sinks * sizeof(float)));
        };
        add(cache.type_k, shape.key_width);
        if (shape.value_width) add(cache.type_v, shape.value_width);
    }
    return bytes;
}

// ---- What fits in a budget ----

// A cache made for `count` units, at most `most` of them, and the positions that all its sequences together then hold.
// A unit is a position of every sequence; paged: a page of the pool, which the sequences share evenly; ring: a position
// of the window beyond as many as there are sinks.
struct Sized {
    CacheShape shape;
    int64_t most;
    double tokens;
};

inline Sized sized(CacheShape shape, const Layout &layout, int64_t count) {
    const int64_t limit = 1 << 30, sequences = shape.sequences;  // positions of a sequence: -c goes no further
    if (std::holds_alternative<Paged>(layout)) {
        shape.pages = (int)count;
        shape.capacity = (int)((count + sequences - 1) / sequences * shape.page);
        return {shape, std::min(limit, limit / shape.page * sequences), (double)count * shape.page};
    }
    if (std::holds_alternative<Ring>(layout)) {
        shape.window = shape.sinks + (int)count;
        return {shape, limit - 2 * shape.sinks, (double)sequences * (shape.window + shape.sinks)};
    }
    shape.capacity = (int)count;
    return {shape, limit, (double)sequences * (double)count};
}

// Positions in the largest cache that takes at most `budget` bytes; 0: not even the smallest does.
inline double tokens_in(double budget, const CacheShape &shape, const CacheChoice &cache) {
    int64_t fits = 0, above = sized(shape, cache.layout, 1).most + 1;
    while (above - fits > 1) {
        int64_t middle = fits + (above - fits) / 2;
        bool enough = full_bytes(sized(shape, cache.layout, middle).shape, cache).total() <= budget;
        (enough ? fits : above) = middle;
    }
    return fits ? sized(shape, cache.layout, fits).tokens : 0;
}

// ---- The table ----

inline std::string in_figures(double number) {
    return number > 0 && number < 0.005 ? "~0" : formatted(number < 999.5 ? "%.3g" : "%.0f", number);
}

// Refuses what no page table, or no double, can tell.
inline void check_size(const CacheShape &shape, const CacheChoice &cache) {
    if (auto *paged = std::get_if<Paged>(&cache.layout)) {
        double pages = (double)shape.sequences * pages_for(*paged, shape.capacity);
        if (pages > INT_MAX)
            fail("--batch %d: needs %.0f pages, a page table numbers %d: raise --page, or lower --batch or -c",
                 shape.sequences, pages, INT_MAX);
    }
    double bytes = full_bytes(shape, cache).total();
    if (bytes >= 0x1p53)
        fail("%s %s/%s: %.3g bytes, fewer than 2^53 can be told: lower --layers, --kv-heads, --head-dim, --batch or -c",
             name_of(cache.layout), name_of(cache.type_k), name_of(cache.type_v), bytes);
}

// The cells of a cache's row, and its part of the JSON.
inline Report memory_row(const MemoryQuestion &question, const CacheChoice &cache, const Options &options) {
    CacheShape shape = question.shape;
    const Layout opened = open_layout(shape, cache.layout);
    check_size(shape, {opened, cache.type_k, cache.type_v});
    CacheBytes bytes = full_bytes(shape, cache);
    std::string layout = name_of(cache.layout), k = name_of(cache.type_k), v = name_of(cache.type_v);
    auto cell = [](const std::string &text) { return formatted(" %9s", text.c_str()); };
    double per_token = bytes_per_token(shape, cache), rows = (double)rows_of(shape, opened);
    double percent = 100 * bytes.metadata / bytes.payload;
    double smaller = full_bytes(shape, {cache.layout, F32{}, F32{}}).total() / bytes.total();
    double read = question.weights + shape.sequences * read_at_capacity(question, cache);

    Report row;
    row.add("layout", layout).add("type_k", k, formatted("%-9s", (k == v ? k : k + "/" + v).c_str()), "K / V");
    row.add("type_v", v).add("payload_bytes", bytes.payload, cell(in_units(bytes.payload)), "payload");
    row.add("metadata_bytes", bytes.metadata, cell(in_units(bytes.metadata)), "metadata");
    row.add("bytes", bytes.total(), cell(in_units(bytes.total())), "total");
    row.add("metadata_percent", percent, cell(in_figures(percent)), "metad. %");
    row.add("times_smaller", smaller, cell(in_figures(smaller)), "x less");
    row.add("bytes_per_token", per_token, cell(in_units(per_token)), "a token");
    auto of_layers = [&](int layers) { return shape.layers = layers, full_bytes(shape, cache).total(); };
    double per_layer = of_layers(1) - of_layers(0);  // page tables, which all layers share, are not in it
    shape = question.shape;
    row.add("bytes_per_layer", per_layer, cell(in_units(per_layer)), "a layer").add("rows", rows);
    if (auto *paged = std::get_if<Paged>(&opened)) row.add("pages", paged->pages(shape));
    row.add("bytes_read_per_token", read / shape.sequences, cell(in_units(read / shape.sequences)), "read");
    row.add("bytes_read_per_step", read);
    double rate = options.bandwidth * 1e9 * shape.sequences / read;
    if (options.bandwidth && question.weights)
        row.add("tokens_per_second", rate, cell(in_figures(rate)), "tokens/s");
    else if (options.bandwidth)
        row.add("cache_only_tokens_per_second", rate, formatted(" %12s", in_figures(rate).c_str()), "cache only/s");
    if (options.budget) {
        double fits = tokens_in(options.budget, shape, cache);
        row.add("tokens_in_budget", fits, formatted(" %11.0f", fits), "fits");
    }
    return row;
}

// The lines above the table; in the JSON the question, and the bytes of the cache that the flags name.
inline void add_question(Report &report, const MemoryQuestion &question, const CacheChoice &named,
                         const Options &options) {
    const CacheShape &shape = question.shape;
    const std::string all = shape.sequences > 1 ? ", " + counted(shape.sequences, "sequence") + " together" : "";
    auto times = [](int count, const char *what) { return " x " + counted(count, what); };
    if (!question.model.empty()) report.add("model", question.model, question.model + "\n");
    report.say("payload = " + std::string(shape.value_width ? "2 (K, V)" : "1 (MLA)"));
    report.add("layers", shape.layers, times(shape.layers, "layer"));
    report.add("kv_heads", shape.kv_heads, times(shape.kv_heads, "KV head"));
    report.add("head_dim", shape.key_width, times(shape.key_width, "number")).add("value_width", shape.value_width);
    report.add("batch", shape.sequences, times(shape.sequences, "sequence"));
    report.add("positions", shape.capacity, times(shape.capacity, "position") + " x bytes a number\n");
    report.add("page", shape.page).add("window", shape.window).add("sinks", shape.sinks);
    report.add("weight_bytes_read", question.weights);
    if (options.bandwidth)
        report.add("bandwidth_gb_per_second", options.bandwidth,
                   formatted("tokens/s: decoding at %g GB/s%s%s\n", options.bandwidth, all.c_str(),
                             question.weights ? "" : "; no weights are counted, the cache only"));
    std::string fits = "fits: positions in a cache of " + in_units(options.budget) + all + ", at most 2^30 each";
    if (options.budget) report.add("budget_bytes", options.budget, fits + "; paged: pages; ring: window and sinks\n");
    report.add("layout", std::string(name_of(named.layout)));
    report.add("type_k", std::string(name_of(named.type_k))).add("type_v", std::string(name_of(named.type_v)));
    CacheBytes bytes = full_bytes(shape, named);
    report.add("bytes", bytes.total()).add("payload_bytes", bytes.payload).add("metadata_bytes", bytes.metadata);
    report.add("bytes_per_token", bytes_per_token(shape, named));
}

inline std::string layout_line(const CacheShape &shape, const Layout &layout) {
    std::string line = formatted("%s: %s a layer", name_of(layout), counted(rows_of(shape, layout), "row").c_str());
    if (auto *paged = std::get_if<Paged>(&layout))
        line += ", " + counted(paged->pages(shape), "page") + formatted(" of %d", shape.page);
    if (std::holds_alternative<Ring>(layout))
        line += formatted(": a window of %d, ", shape.window) + counted(shape.sinks, "sink") + ", and room for a pass";
    return line + "\n";
}

inline int run_memory(const Options &options) {
    MemoryQuestion question = memory_question(options);
    const CacheShape &shape = question.shape;
    std::vector<CacheChoice> caches = options.caches();
    auto named = caches[0];
    if (!options.has("--kv") && !options.has("-ctk") && !options.has("-ctv")) {
        caches.clear();
        for (const Layout &layout : options.layouts)
            for_each_type<Precision>([&](auto type) { caches.push_back({layout, type, type}); });
    }
    std::vector<Report> rows;
    double least = INFINITY;  // bytes of the smallest cache that holds anything
    std::string above;
    for (const CacheChoice &cache : caches) {
        rows.push_back(memory_row(question, cache, options));
        std::string line = layout_line(shape, open_layout(shape, cache.layout));
        if (line != above) rows.back().text = line + rows.back().text;
        above = line;
        least = std::min(least, full_bytes(sized(shape, cache.layout, 1).shape, cache).total());
    }
    if (options.budget && options.budget < least)
        fail("--budget: %.0f bytes; the smallest of these needs %.0f: raise it, or lower --kv, --page or --batch",
             options.budget, least);
    Report report;
    add_question(report, question, named, options);
    report.say("\n").table("results", rows);
    report.say("\nmetadata: scales, zero points, padding, page tables, f16 blocks and sinks; % of the payload\n");
    report.say("x less: than f32 in the same layout\na token: a position in all layers, K and V with their scales\n");
    report.say("a layer: without page tables, which all layers share\nread: for a token decoded at position ");
    report.say(std::to_string(shape.capacity - 1) + ", what its sequence sees of the cache");
    if (question.weights) report.say(", and " + in_units(question.weights) + " of weights");
    if (question.weights && shape.sequences > 1) report.say(formatted(" shared by %d", shape.sequences));
    report.say("\n").print(options.json);
    return 0;
}
