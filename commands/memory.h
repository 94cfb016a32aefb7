// llm memory: the formula. Bytes of a cache, for every layout and precision; what fits; how fast it is read.
#pragma once

#include "about.h"
#include "reads.h"
#include "sizes.h"

// What is asked about: a model, or a shape by flags, which has no weights, and whose layers see all positions.
struct MemoryQuestion {
    std::string model;               // its directory; "": the flags give the shape
    CacheSizes sizes;
    std::vector<CacheShape> shapes;  // (kind)
    double weights = 0;              // bytes that a decoding step reads of them; 0: not known
    bool several() const { return shapes.size() > 1 || shapes[0].local; }  // the formula is a sum, or has a window
};

inline MemoryQuestion memory_question(const Options &options) {
    MemoryQuestion question;
    CacheSizes &sizes = question.sizes;
    if (options.has("--layers")) {
        sizes.context = options.context;
        sizes.kinds = {{options.kv_heads, options.head_dim, options.head_dim}};
        sizes.kinds[0].layers = options.layers;
    } else {
        question.model = options.directory;
        sizes = load_cache_sizes(question.model);
        if (!sizes.no_size.empty()) fail("%s", sizes.no_size.c_str());
        if (sizes.why_not.empty()) question.weights = weights_read(load_model(question.model));
    }
    if (options.has("--weight-bytes")) question.weights = options.weight_bytes;  // replaces a model's own
    if (!options.context && !sizes.context)
        fail("%s: config.json does not say for how many positions: add -c N", question.model.c_str());
    if (!sizes.kinds[0].value_width && options.has("-ctv"))
        fail("-ctv: the values of %s are a part of its keys (MLA): use --kv", question.model.c_str());
    question.shapes =
        cache_shapes(options, sizes.kinds, sizes.context, options.context ? options.context : sizes.context);
    for (CacheShape &shape : question.shapes) shape.sequences = options.batch;
    return question;
}

// Bytes that one position takes in all layers.
inline double bytes_per_token(const std::vector<CacheShape> &shapes, const CacheChoice &cache) {
    double bytes = 0;
    for (const CacheShape &shape : shapes) {
        if (shape.taps) continue;  // a state does not grow
        const Layout layout = open_layout(shape, cache.layout);
        auto of = [&](double rows) { return bytes_of(shape, layout, cache.type_k, cache.type_v, rows).total(); };
        bytes += of(1) - of(0);
    }
    return bytes;
}

// ---- What fits in a budget ----

// A cache of `count` units: its shapes, the most units it could have, and the positions that all its sequences hold
// together. A unit is a position of every sequence; paged: a page of the pool, which the sequences share evenly; ring:
// a position of the window after the first ones, as many as there are sinks.
struct Sized {
    std::vector<CacheShape> shapes;
    int64_t most;
    double tokens;
};

inline Sized sized(const std::vector<CacheShape> &shapes, const Layout &layout, int64_t count) {
    const int64_t limit = 1 << 30, sequences = shapes[0].sequences;  // positions of a sequence: -c goes no further
    const int page = shapes[0].page, sinks = shapes[0].sinks;
    Sized result = {shapes, limit, (double)sequences * (double)count};
    for (CacheShape &shape : result.shapes) {
        if (std::holds_alternative<Paged>(layout)) {
            shape.pages = (int)count;
            shape.capacity = (int)((count + sequences - 1) / sequences * page);
            result.most = std::min(limit, limit / page * sequences), result.tokens = (double)count * page;
        } else if (std::holds_alternative<Ring>(layout)) {
            shape.window = sinks + (int)count;
            result.most = limit - 2 * sinks, result.tokens = (double)sequences * (shape.window + sinks);
        } else {
            shape.capacity = (int)count;
        }
    }
    return result;
}

// Positions in the largest cache that takes at most `budget` bytes; 0: even the smallest takes more.
inline double tokens_in(double budget, const std::vector<CacheShape> &shapes, const CacheChoice &cache) {
    int64_t fits = 0, above = sized(shapes, cache.layout, 1).most + 1;
    while (above - fits > 1) {
        int64_t middle = fits + (above - fits) / 2;
        bool enough = full_bytes(sized(shapes, cache.layout, middle).shapes, cache).total() <= budget;
        (enough ? fits : above) = middle;
    }
    return fits ? sized(shapes, cache.layout, fits).tokens : 0;
}

// ---- The table ----

inline std::string in_figures(double number) {
    return number > 0 && number < 0.005 ? "~0" : in_digits(number);
}

// Fails if a page table cannot number all pages, or a double cannot hold all bytes exactly.
inline void check_size(const std::vector<CacheShape> &shapes, const CacheChoice &cache) {
    const CacheShape &shape = shapes[0];
    if (std::holds_alternative<Paged>(cache.layout)) {
        double pages = (double)shape.sequences * pages_for(shape.capacity, shape.page);
        if (pages > INT_MAX)
            fail("--batch %d: needs %.0f pages, a page table numbers %d: raise --page, or lower --batch or -c",
                 shape.sequences, pages, INT_MAX);
    }
    double bytes = full_bytes(shapes, cache).total();
    if (bytes >= 0x1p53)
        fail("%s %s/%s: %.3g bytes, fewer than 2^53 can be told: lower --layers, --kv-heads, --head-dim, --batch or -c",
             name_of(cache.layout), name_of(cache.type_k), name_of(cache.type_v), bytes);
}

// A cache's row of the table, and its part of the JSON.
inline Report memory_row(const MemoryQuestion &question, const CacheChoice &cache, const Options &options) {
    const CacheSizes &sizes = question.sizes;
    const std::vector<CacheShape> &shapes = question.shapes;
    const int sequences = shapes[0].sequences, capacity = shapes[0].capacity;
    check_size(shapes, cache);
    const std::vector<Store> stores = stores_of(shapes, cache.layout);
    const CacheBytes bytes = full_bytes(shapes, cache);
    double percent = 100 * bytes.metadata / bytes.payload, read = question.weights;
    double smaller = full_bytes(shapes, {cache.layout, F32{}, F32{}}).total() / bytes.total();
    std::vector<CacheShape> no_layers = shapes;  // for the bytes of page tables, which all layers share
    int64_t layers = 0, rows = 0, pages = 0;     // rows: of a layer that keeps most
    for (size_t i = 0; i < stores.size(); i++) {
        const CacheChoice opened = {stores[i].layout, cache.type_k, cache.type_v};
        const double readers = sizes.kinds[i].layers + shared_of(sizes.rows, i);
        read += sequences * readers * layer_read(shapes[i], opened, sizes.kinds[i].window, capacity);
        layers += std::exchange(no_layers[i].layers, 0);
        rows = std::max(rows, rows_now(stores[i]));
        if (auto *paged = std::get_if<Paged>(&stores[i].layout)) pages += paged->pages(shapes[i]);
    }

    Report row;
    auto add = [&](const char *key, double value, const std::string &shown, const char *head) {
        row.add(key, value, formatted(" %9s", shown.c_str()), head);
    };
    auto add_bytes = [&](const char *key, double value, const char *head) { add(key, value, in_units(value), head); };
    row.add("layout", name_of(cache.layout)).add("type_v", name_of(cache.type_v));
    row.add("type_k", name_of(cache.type_k), formatted("%-9s", types_of(cache).c_str()), "K / V");
    add_bytes("payload_bytes", bytes.payload, "payload");
    add_bytes("metadata_bytes", bytes.metadata, "metadata");
    add_bytes("bytes", bytes.total(), "total");
    add("metadata_percent", percent, in_figures(percent), "metad. %");
    add("times_smaller", smaller, in_figures(smaller), "smaller");
    add_bytes("bytes_per_token", bytes_per_token(shapes, cache), "a token");
    add_bytes("bytes_per_layer", (bytes.total() - full_bytes(no_layers, cache).total()) / layers, "a layer");
    row.add("rows", rows).add("bytes_read_per_step", read);
    row.list("kinds", kinds_of(sizes.kinds, sizes.rows, stores, cache, capacity));
    if (pages) row.add("pages", pages);
    add_bytes("bytes_read_per_token", read / sequences, "read");
    double rate = options.bandwidth * 1e9 * sequences / read;
    if (options.bandwidth && question.weights)
        add("tokens_per_second", rate, in_figures(rate), "tokens/s");
    else if (options.bandwidth)
        row.add("cache_only_tokens_per_second", rate, formatted(" %12s", in_figures(rate).c_str()), "cache only/s");
    if (options.budget) row.show("tokens_in_budget", tokens_in(options.budget, shapes, cache), " %11.0f", "fits");
    return row;
}

// Adds the lines above the table; to the JSON the question, and the bytes of the cache that the flags name.
inline void add_question(Report &report, const MemoryQuestion &question, const CacheChoice &named,
                         const Options &options) {
    const CacheShape &shape = question.shapes[0];
    const std::string all = shape.sequences > 1 ? ", " + counted(shape.sequences, "sequence") + " together" : "";
    const bool several = question.several();
    auto times = [&](int count, const char *what) { return several ? "" : " x " + counted(count, what); };
    int layers = 0;
    for (const Kind &kind : question.sizes.kinds) layers += kind.layers;
    if (!question.model.empty()) report.add("model", question.model, question.model + "\n");
    auto is_state = [](const CacheShape &shape) { return shape.taps > 0; };
    const bool states = std::any_of(question.shapes.begin(), question.shapes.end(), is_state);
    const char *vectors = states ? "2 (K, V; states: 1)" : shape.value_width ? "2 (K, V)" : "1 (MLA)";
    report.say(std::string("payload = ") + vectors);
    if (several) report.say(" x the sum over kinds of layers, x " + counted(shape.sequences, "sequence"));
    report.add("layers", layers, times(layers, "layer"));
    report.add("kv_heads", shape.kv_heads, times(shape.kv_heads, "KV head"));
    report.add("head_dim", shape.key_width, times(shape.key_width, "number")).add("value_width", shape.value_width);
    report.add("batch", shape.sequences, times(shape.sequences, "sequence"));
    report.add("positions", shape.capacity, times(shape.capacity, "position") + " x bytes a number");
    const std::vector<Report> kinds = kinds_of(question.sizes.kinds, question.sizes.rows,
                                               stores_of(question.shapes, named.layout), named, shape.capacity);
    if (several) report.say(std::string(", as ") + name_of(named.layout) + " " + types_of(named));
    report.list("kinds", kinds).say(several ? ":\n" : "\n");
    for (const Report &kind : kinds) report.say(several ? "  " + kind.text + "\n" : "");
    report.add("page", shape.page).add("window", shape.window).add("sinks", shape.sinks);
    report.add("weight_bytes_read", question.weights);
    if (options.bandwidth)
        report.add("bandwidth_gb_per_second", options.bandwidth,
                   formatted("tokens/s: decoding at %g GB/s%s%s\n", options.bandwidth, all.c_str(),
                             question.weights ? "" : "; no weights are counted, the cache only"));
    std::string fits = "fits: positions in a cache of " + in_units(options.budget) + all + ", at most 2^30 each";
    if (options.budget) report.add("budget_bytes", options.budget, fits + "; paged: pages; ring: window and sinks\n");
    report.add("layout", name_of(named.layout));
    report.add("type_k", name_of(named.type_k)).add("type_v", name_of(named.type_v));
    CacheBytes bytes = full_bytes(question.shapes, named);
    report.add("bytes", bytes.total()).add("payload_bytes", bytes.payload).add("metadata_bytes", bytes.metadata);
    report.add("bytes_per_token", bytes_per_token(question.shapes, named));
}

// A layout's line: how many rows a layer of each kind has, and its pages or window.
inline std::string layout_line(const std::vector<CacheShape> &shapes, const Layout &layout) {
    std::vector<std::string> parts;
    for (const Store &store : stores_of(shapes, layout)) {
        std::string part = counted(rows_now(store), "row") + " a layer";
        if (auto *paged = std::get_if<Paged>(&store.layout))
            part += ", " + counted(paged->pages(store.shape), "page") + formatted(" of %d", paged->page);
        if (auto *ring = std::get_if<Ring>(&store.layout))
            part += formatted(": a window of %d, %s, and room for a pass", ring->window,
                              counted(ring->sinks, "sink").c_str());
        parts.push_back(part);
    }
    return std::string(name_of(layout)) + ": " + joined(parts, ";\n  ") + "\n";
}

// Names the types that take more bytes than a type of more bits, and why; "" if none does.
inline std::string larger_line(const std::vector<CacheShape> &shapes, const std::vector<CacheChoice> &caches) {
    auto bits = [](const Precision &type) { return std::visit([](auto of) { return of.bits; }, type); };
    auto larger = [&](const CacheChoice &a, const CacheChoice &b) {
        return a.layout.index() == b.layout.index() &&
               bits(a.type_k) + bits(a.type_v) < bits(b.type_k) + bits(b.type_v) &&
               full_bytes(shapes, a).total() > full_bytes(shapes, b).total();
    };
    std::set<std::string> names;
    for (const CacheChoice &a : caches)
        for (const CacheChoice &b : caches)
            if ((has_blocks(a.type_k) || has_blocks(a.type_v)) && larger(a, b)) names.insert(types_of(a));
    if (names.empty()) return "";
    const int width = shapes[0].key_width, rest = width % group_size;
    return joined({names.begin(), names.end()}, ", ") +
           formatted(": more than a larger type, as %d positions are stored together, the newest ones at f16%s\n",
                     group_size,
                     rest ? formatted(", and %d numbers as %d", width, width - rest + group_size).c_str() : "");
}

inline int run_memory(const Options &options) {
    MemoryQuestion question = memory_question(options);
    const CacheShape &shape = question.shapes[0];
    std::vector<CacheChoice> caches = options.caches();
    const CacheChoice named = caches[0];
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
        std::string line = layout_line(question.shapes, cache.layout);
        if (line != above) rows.back().above = line;
        above = line;
        // A ring may need less with a larger window: layers that look back no further need no sinks then.
        for (const auto &shapes : {question.shapes, sized(question.shapes, cache.layout, 1).shapes})
            least = std::min(least, full_bytes(shapes, cache).total());
    }
    if (options.budget && options.budget < least)
        fail("--budget: %.0f bytes; the smallest of these needs %.0f: raise it, or lower --kv, --page or --batch",
             options.budget, least);
    Report report;
    add_question(report, question, named, options);
    report.say("\n").table("results", rows).say(larger_line(question.shapes, caches));
    report.say(
        "\nmetadata: scales, zero points, padding, page tables, f16 blocks, sinks, spare rows; % of the payload\n");
    report.say("smaller: how many times, than f32\na token: a position in all layers, K and V with their scales\n");
    report.say(question.sizes.kinds.size() > 1 ? "a layer: the mean, without" : "a layer: without");
    report.say(" page tables, which all layers share\nread: for a token decoded at position ");
    report.say(std::to_string(shape.capacity - 1) + ", what its sequence sees of the cache");
    if (question.weights) report.say(", and " + in_units(question.weights) + " of weights");
    if (question.weights && shape.sequences > 1) report.say(formatted(" shared by %d", shape.sequences));
    return report.say("\n").print(options.json);
}
