// What puts numbers on a cache and on the machine under it, out of the reader's way. Included by llm.cu. A part for
// each command: llm info, llm memory (bytes by the formula), llm diff (beside the naive path), llm bench (beside the
// roofline), llm eval (what a cache does to the text). Each ends in run_COMMAND(), where reading it begins.
#pragma once

#include <sys/resource.h>

// ---- llm info ------------------------------------------------------------------------------------------------

inline int run_info(const Options &options) {
    std::string directory = checkpoint_directory(options);
    Model model = load_model(directory);
    bool has_tokenizer = file_exists(join_path(directory, "tokenizer.json"));
    TokenizerPointer tokenizer = has_tokenizer ? load_tokenizer(directory) : TokenizerPointer(nullptr, tokenizer_free);
    int tokenizer_ids = has_tokenizer ? tokenizer_size(tokenizer.get()) : 0;
    const Config &config = model.config;
    double machine = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGE_SIZE);
    double per_position = 2.0 * config.layers * config.kv_heads * config.head_dim * 2;  // K and V in f16, bytes
    double needed = (double)model.weight_bytes + per_position * config.context;
    static const char *const ropes[] = {"none", "linear", "llama3"};
    if (options.json) {
        Json object = json_object();
        cJSON_AddStringToObject(object.get(), "architecture", config.architecture.c_str());
        auto add = [&](const char *key, double value) { cJSON_AddNumberToObject(object.get(), key, value); };
        add("parameters", (double)model.parameters);
        add("weight_bytes", (double)model.weight_bytes);
        add("layers", config.layers);
        add("hidden", config.hidden);
        add("ffn", config.ffn);
        add("heads", config.heads);
        add("kv_heads", config.kv_heads);
        add("head_dim", config.head_dim);
        add("vocabulary", config.vocabulary);
        add("tokenizer_size", tokenizer_ids);
        add("context", config.context);
        add("window", config.window);
        add("rope_theta", config.rope_theta);
        cJSON_AddStringToObject(object.get(), "rope_scaling", ropes[config.rope.kind]);
        cJSON_AddBoolToObject(object.get(), "tied", config.tied);
        add_ids(object.get(), "end_ids", config.end_ids);
        add("cache_bytes_per_token_f16", per_position);
        cJSON_AddBoolToObject(object.get(), "fits", needed <= machine);
        print_json(object.get());
        return 0;
    }
    printf("%s\n", directory.c_str());
    printf("  architecture   %s, %s%s weights\n", config.architecture.c_str(), config.tied ? "tied, " : "",
           dtype_name(model.layers[0].query.weight.type));
    printf("  parameters     %.3f M in %.3f MB\n", (double)model.parameters / 1e6, (double)model.weight_bytes / 1e6);
    printf("  layers         %d, %d wide, ffn %d\n", config.layers, config.hidden, config.ffn);
    printf("  attention      %d query heads on %d KV heads of %d", config.heads, config.kv_heads, config.head_dim);
    printf(config.window ? ", window %d\n" : "\n", config.window);
    printf("  positions      %d, RoPE theta %g, scaling %s\n", config.context, config.rope_theta,
           ropes[config.rope.kind]);
    printf("  vocabulary     %d (tokenizer: %d), end ids:", config.vocabulary, tokenizer_ids);
    for (int id : config.end_ids) printf(" %d", id);
    printf("\n  KV cache       %.0f bytes a token in f16, %.3f GiB for the whole context\n", per_position,
           per_position * config.context / 0x1p30);
    printf("  will it run    %s: %.2f GiB for weights and whole context, this machine has %.2f\n",
           needed <= machine ? "yes" : "only with a smaller context (-c)", needed / 0x1p30, machine / 0x1p30);
    return 0;
}

// ---- llm memory --------------------------------------------------------------------------------------------

// The shape that is asked about. One that the flags give is that of a model without weights, and each of its layers
// looks back to the first position.
struct MemoryQuestion {
    std::string model;  // its directory; "": the flags give the shape
    CacheShape shape;
    std::map<int, int> windows;  // positions that a layer looks back, 0: to the first -> layers that do
    double weights = 0;          // bytes that a decoding step reads of them
};

inline MemoryQuestion memory_question(const Options &options) {
    MemoryQuestion question;
    Config config;
    std::string given, missing;
    for (const char *flag : {"--layers", "--kv-heads", "--head-dim"})
        (options.given.count(flag) ? given : missing) += std::string(" ") + flag;
    if (given.empty()) {
        question.model = checkpoint_directory(options);
        Model model = load_model(question.model);
        config = model.config;
        for (const LayerWeights &layer : model.layers) question.windows[layer.window]++;
        question.weights = weights_read(model);
    } else {
        if (options.given.count("-m"))
            fail("-m %s: a model has a shape of its own: drop -m or%s", options.directory.c_str(), given.c_str());
        if (!options.given.count("-c")) missing += " -c";
        if (!missing.empty()) {
            fail("%s: missing; a shape is --layers L --kv-heads H --head-dim D -c POSITIONS, or give -m DIR alone",
                 missing.c_str() + 1);
        }
        config.layers = options.layers;
        config.kv_heads = options.kv_heads;
        config.head_dim = options.head_dim;
        config.context = options.context;
        question.windows[0] = config.layers;
    }
    question.shape = cache_shape(options, config, options.given.count("-c") ? options.context : config.context);
    question.shape.sequences = options.batch;
    return question;
}

// The whole of a cache: of a paged one all pages. Allocates nothing.
inline CacheBytes full_bytes(const CacheShape &shape, const Layout &layout, const Precision &type_k,
                             const Precision &type_v) {
    Layout opened = open_layout(shape, layout);
    return bytes_of(shape, opened, type_k, type_v, (double)rows_of(shape, opened));
}

// Bytes that a decoding step reads of one sequence's cache, with all its positions there.
inline double read_at_capacity(const MemoryQuestion &question, const Layout &opened, const Precision &type_k,
                               const Precision &type_v) {
    const CacheShape &shape = question.shape;
    char there;  // rows have no memory here: cache_read() asks for their size, and whether there are recent ones
    auto rows = [&](const Precision &type, int width, bool exist = true) {
        size_t row_bytes = std::visit([&](auto format) { return format.row_bytes(width); }, type);
        return CacheRows{exist ? &there : nullptr, row_bytes, width, shape.kv_heads, 0};
    };
    Cache cache;
    cache.layout = opened;
    cache.keys = rows(type_k, shape.key_width);
    cache.values = rows(type_v, shape.value_width);
    cache.recent_keys = rows(F16{}, shape.key_width, has_blocks(type_k));
    cache.recent_values = rows(F16{}, shape.value_width, has_blocks(type_v));
    cache.sink_keys = rows(F32{}, shape.key_width);
    cache.sink_values = rows(F32{}, shape.value_width);
    double bytes = 0;
    for (auto &[window, layers] : question.windows) {
        Model layer;
        layer.layers.resize(1);
        layer.layers[0].window = window;
        bytes += layers * cache_read(layer, cache, shape.capacity);
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
inline double tokens_in(double budget, const CacheShape &shape, const Layout &layout, const Precision &type_k,
                        const Precision &type_v) {
    int64_t fits = 0, above = sized(shape, layout, 1).most + 1;
    while (above - fits > 1) {
        int64_t middle = fits + (above - fits) / 2;
        bool enough = full_bytes(sized(shape, layout, middle).shape, layout, type_k, type_v).total() <= budget;
        (enough ? fits : above) = middle;
    }
    return fits ? sized(shape, layout, fits).tokens : 0;
}

// ---- The table ----

struct MemoryRow {
    Layout layout;  // opened
    Precision type_k, type_v;
    CacheBytes bytes;
    double rows = 0, pages = 0;  // rows of a layer, pages in all
    double per_token = 0;        // what a row takes in all layers, K and V with their scales
    double per_layer = 0;        // page tables, which all layers share, are not in it
    double times_smaller = 0;    // than f32 in the same layout
    double read = 0;             // bytes that a decoding step reads, all sequences and the weights
    double fits = 0;             // positions in the budget
};

inline MemoryRow memory_row(const MemoryQuestion &question, const Layout &layout, const Precision &type_k,
                            const Precision &type_v, const Options &options) {
    CacheShape shape = question.shape;
    MemoryRow row;
    row.layout = open_layout(shape, layout);
    row.type_k = type_k;
    row.type_v = type_v;
    if (auto *paged = std::get_if<Paged>(&row.layout)) {
        double pages = (double)shape.sequences * pages_for(*paged, shape.capacity);
        if (pages > INT_MAX) {
            fail("--batch %d: needs %.0f pages, a page table numbers %d: raise --page, or lower --batch or -c",
                 shape.sequences, pages, INT_MAX);
        }
        row.pages = paged->pages(shape);
    }
    row.rows = (double)rows_of(shape, row.layout);
    row.bytes = full_bytes(shape, layout, type_k, type_v);
    if (row.bytes.total() >= 0x1p53) {
        fail("%s %s/%s: %.3g bytes, fewer than 2^53 can be told: lower --layers, --kv-heads, --head-dim, --batch or -c",
             name_of(layout), name_of(type_k), name_of(type_v), row.bytes.total());
    }
    auto of_rows = [&](double rows) { return bytes_of(shape, row.layout, type_k, type_v, rows).total(); };
    row.per_token = of_rows(1) - of_rows(0);
    row.times_smaller = full_bytes(shape, layout, F32{}, F32{}).total() / row.bytes.total();
    row.read = question.weights + shape.sequences * read_at_capacity(question, row.layout, type_k, type_v);
    if (options.given.count("--budget")) row.fits = tokens_in(options.budget, shape, layout, type_k, type_v);
    auto of_layers = [&](int layers) {
        shape.layers = layers;
        return full_bytes(shape, layout, type_k, type_v).total();
    };
    row.per_layer = of_layers(1) - of_layers(0);
    return row;
}

// All layouts with all precisions, K as V, and with the pair that the flags name.
inline std::vector<MemoryRow> memory_rows(const MemoryQuestion &question, const Options &options) {
    std::vector<MemoryRow> rows;
    for_each_type<Layout>([&](auto layout) {
        for_each_type<Precision>([&](auto type) { rows.push_back(memory_row(question, layout, type, type, options)); });
        if (options.type_k != options.type_v)
            rows.push_back(memory_row(question, layout, parse_precision("-ctk", options.type_k),
                                      parse_precision("-ctv", options.type_v), options));
    });
    return rows;
}

// The row of the cache that the flags name.
inline const MemoryRow &chosen_row(const std::vector<MemoryRow> &rows, const Options &options) {
    return *std::find_if(rows.begin(), rows.end(), [&](const MemoryRow &row) {
        return name_of(row.layout) == options.layout && name_of(row.type_k) == options.type_k &&
               name_of(row.type_v) == options.type_v;
    });
}

inline double tokens_per_second(const MemoryRow &row, const Options &options) {
    return options.bandwidth * 1e9 * options.batch / row.read;
}

// Four digits and a unit: "1.25 GiB".
inline std::string in_units(double bytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    int unit = 0;
    for (; bytes >= 1024 && unit < 5; unit++) bytes /= 1024;
    char text[32];
    snprintf(text, sizeof text, "%.4g %s", bytes, units[unit]);
    return text;
}

// "1 layer", "80 layers"
inline std::string counted(double count, const std::string &what) {
    char digits[32];
    snprintf(digits, sizeof digits, "%.0f ", count);
    return digits + what + (count == 1 ? "" : "s");
}

inline void print_memory_header(const MemoryQuestion &question, const Options &options) {
    const CacheShape &shape = question.shape;
    std::string all = counted(shape.sequences, "sequence");
    if (!question.model.empty()) printf("%s\n", question.model.c_str());
    printf("payload = 2 (K, V) x %s x %s x %s x %s x %s x bytes a number\n", counted(shape.layers, "layer").c_str(),
           counted(shape.kv_heads, "KV head").c_str(), counted(shape.key_width, "number").c_str(), all.c_str(),
           counted(shape.capacity, "position").c_str());
    if (options.given.count("--bandwidth"))
        printf("tokens/s: decoding at %g GB/s, %s together\n", options.bandwidth, all.c_str());
    if (options.given.count("--budget")) {
        printf("fits: positions in a cache of %s, %s together, at most 2^30 each; paged: whole pages, at most 2^30;\n",
               in_units(options.budget).c_str(), all.c_str());
        printf("      ring: window and sinks, with the window as large as can be\n");
    }
    printf("\n%-9s %9s %9s %9s %9s %7s %9s %9s %9s", "K / V", "payload", "metadata", "total", "metad. %", "x less",
           "a token", "a layer", "read");
    if (options.given.count("--bandwidth")) printf(" %9s", "tokens/s");
    if (options.given.count("--budget")) printf(" %12s", "fits");
    puts("");
}

inline void print_layout(const MemoryRow &row, const CacheShape &shape) {
    printf("%s: %s a layer", name_of(row.layout), counted(row.rows, "row").c_str());
    if (row.pages > 0) printf(", %s of %d", counted(row.pages, "page").c_str(), shape.page);
    if (std::holds_alternative<Ring>(row.layout))
        printf(": a window of %d, %s, and room for a pass", shape.window, counted(shape.sinks, "sink").c_str());
    puts("");
}

inline void print_memory(const MemoryQuestion &question, const std::vector<MemoryRow> &rows, const Options &options) {
    const CacheShape &shape = question.shape;
    print_memory_header(question, options);
    size_t layout = std::variant_npos;
    for (const MemoryRow &row : rows) {
        if (row.layout.index() != layout) print_layout(row, shape);
        layout = row.layout.index();
        bool same = row.type_k.index() == row.type_v.index();
        std::string types = name_of(row.type_k) + (same ? std::string() : std::string("/") + name_of(row.type_v));
        printf("%-9s %9s %9s %9s %9.4f %7.2f %9s %9s %9s", types.c_str(), in_units(row.bytes.payload).c_str(),
               in_units(row.bytes.metadata).c_str(), in_units(row.bytes.total()).c_str(),
               100 * row.bytes.metadata / row.bytes.payload, row.times_smaller, in_units(row.per_token).c_str(),
               in_units(row.per_layer).c_str(), in_units(row.read / shape.sequences).c_str());
        if (options.given.count("--bandwidth")) printf(" %9.4g", tokens_per_second(row, options));
        if (options.given.count("--budget")) printf(" %12.0f", row.fits);
        puts("");
    }
    printf("\nmetadata: scales, zero points, padding, page tables, f16 blocks and sinks; %% of the payload\n");
    printf("x less: than f32 in the same layout\n");
    printf("a token: a position of a sequence in all layers, K and V with scales; no page table, f16 block or sink\n");
    printf("a layer: without page tables, which all layers share\n");
    printf("read: for a token decoded at position %d, what its sequence sees of the cache", shape.capacity - 1);
    if (!question.model.empty()) printf(", and %s of weights", in_units(question.weights).c_str());
    if (!question.model.empty() && shape.sequences > 1) printf(" shared by %d", shape.sequences);
    puts("");
}

// With all its digits: cJSON rounds numbers to 15 or leaves the last of 17 to chance.
inline void add_exact(cJSON *object, const char *key, double number) {
    char digits[32];
    snprintf(digits, sizeof digits, number == std::floor(number) ? "%.0f" : "%.17g", number);
    cJSON_AddRawToObject(object, key, digits);
}

inline void add_memory_row(cJSON *object, const MemoryRow &row) {
    cJSON_AddStringToObject(object, "layout", name_of(row.layout));
    cJSON_AddStringToObject(object, "type_k", name_of(row.type_k));
    cJSON_AddStringToObject(object, "type_v", name_of(row.type_v));
    add_exact(object, "bytes", row.bytes.total());
    add_exact(object, "payload_bytes", row.bytes.payload);
    add_exact(object, "metadata_bytes", row.bytes.metadata);
    add_exact(object, "bytes_per_token", row.per_token);
}

inline void print_memory_json(const MemoryQuestion &question, const std::vector<MemoryRow> &rows,
                              const Options &options) {
    const CacheShape &shape = question.shape;
    Json object = json_object();
    if (!question.model.empty()) add_text(object.get(), "model", question.model);
    auto add = [&](const char *key, double number) { add_exact(object.get(), key, number); };
    add("layers", shape.layers);
    add("kv_heads", shape.kv_heads);
    add("head_dim", shape.key_width);
    add("batch", shape.sequences);
    add("positions", shape.capacity);
    add("page", shape.page);
    add("window", shape.window);
    add("sinks", shape.sinks);
    add("weight_bytes_read", question.weights);
    if (options.given.count("--budget")) add("budget_bytes", options.budget);
    if (options.given.count("--bandwidth")) add("bandwidth_gb_per_second", options.bandwidth);
    add_memory_row(object.get(), chosen_row(rows, options));
    cJSON *list = cJSON_AddArrayToObject(object.get(), "results");
    for (const MemoryRow &row : rows) {
        cJSON *item = cJSON_CreateObject();
        add_memory_row(item, row);
        add_exact(item, "bytes_per_layer", row.per_layer);
        add_exact(item, "rows", row.rows);
        if (row.pages > 0) add_exact(item, "pages", row.pages);
        if (options.given.count("--budget")) add_exact(item, "tokens_in_budget", row.fits);
        add_exact(item, "bytes_read_per_step", row.read);
        add_exact(item, "bytes_read_per_token", row.read / shape.sequences);
        if (options.given.count("--bandwidth")) add_exact(item, "tokens_per_second", tokens_per_second(row, options));
        cJSON_AddItemToArray(list, item);
    }
    print_json(object.get());
}

inline int run_memory(const Options &options) {
    require_cache(options);
    MemoryQuestion question = memory_question(options);
    std::vector<MemoryRow> rows = memory_rows(question, options);
    const MemoryRow &chosen = chosen_row(rows, options);
    if (options.given.count("--budget") && chosen.fits == 0) {
        Sized least = sized(question.shape, chosen.layout, 1);
        double bytes = full_bytes(least.shape, chosen.layout, chosen.type_k, chosen.type_v).total();
        fail("--budget: %.0f bytes; %s %s/%s needs %.0f for %s: raise it, or lower --kv, --page or --batch",
             options.budget, name_of(chosen.layout), name_of(chosen.type_k), name_of(chosen.type_v), bytes,
             counted(least.tokens, "position").c_str());
    }
    if (options.json)
        print_memory_json(question, rows, options);
    else
        print_memory(question, rows, options);
    return 0;
}

// ---- llm diff ----------------------------------------------------------------------------------------------

struct DiffStep {
    int token = 0, cached_token = 0;               // what each path finds likeliest
    double difference = 0, kl = 0;                 // max |logit - logit|; Kullback-Leibler divergence, nats
    double naive_seconds = 0, cached_seconds = 0;  // for the logits of this step
};

inline double largest_difference(const std::vector<float> &a, const std::vector<float> &b) {
    double most = 0;
    for (size_t i = 0; i < a.size(); i++) most = std::max(most, std::fabs((double)a[i] - b[i]));
    return most;
}

inline double log_sum_exp(const float *logits, int count) {
    double most = *std::max_element(logits, logits + count), total = 0;
    for (int i = 0; i < count; i++) total += std::exp(logits[i] - most);
    return most + std::log(total);
}

// sum p log(p / q) for p, q = softmax(a), softmax(b), in double precision.
inline double divergence(const std::vector<float> &a, const std::vector<float> &b) {
    double a_sum = log_sum_exp(a.data(), (int)a.size()), b_sum = log_sum_exp(b.data(), (int)b.size()), total = 0;
    for (size_t i = 0; i < a.size(); i++) total += std::exp(a[i] - a_sum) * ((a[i] - a_sum) - (b[i] - b_sum));
    return std::max(0.0, total);
}

// How far logits may lie apart. With an f32 cache both paths compute the same numbers in another order: 1e-4. Otherwise
// a stored key or value is off by at most u of itself (PlainRow), and a logit by a multiple of u. Over the whole
// context of the built-in model (llm diff -n 2000 -p "Once upon a time") it is off by 57 u at most, 0.028, in f16 and
// by 56 u, 0.22, in bf16; 128 u passes.
//
// On a card with 16-bit weights activations are rounded to these 16 bits before each product of many rows, in both
// paths, but not to the same numbers: there u is at least that of the weights. So it is with int8 weights, whose
// products round activations to whole numbers of at most 127.
inline double default_tolerance(const Cache &cache, const Engine &engine) {
    auto roundoff = [](auto type) { return decltype(type)::unit_roundoff; };
    double u = std::max(std::visit(roundoff, cache.type_k), std::visit(roundoff, cache.type_v));
    DType weights = engine.model.layers[0].query.weight.type;
    if (weights == DType::int8) u = std::max(u, 1.0 / 254);
    if (engine.device() && weights == DType::f16) u = std::max(u, F16::unit_roundoff);
    if (engine.device() && weights == DType::bf16) u = std::max(u, BF16::unit_roundoff);
    return u <= F32::unit_roundoff ? 1e-4 : 128 * u;
}

// Both paths get the tokens that the naive one finds likeliest. show(step) is called after each.
inline std::vector<DiffStep> run_lockstep(Session &session, const Options &options,
                                          const std::function<void(const DiffStep &)> &show) {
    std::vector<DiffStep> steps;
    while (!reason_to_stop(session, options)) {
        DiffStep step;
        double start = now();
        std::vector<float> naive = forward_naive(session.engine, session.tokens, session.cache.layout);
        step.naive_seconds = now() - start;
        start = now();
        std::vector<float> cached = steps.empty() ? prefill(session.engine, session.cache, 0, session.tokens)
                                                  : decode(session.engine, session.cache, {0}, {session.tokens.back()});
        step.cached_seconds = now() - start;
        require_finite(naive, (int)session.tokens.size() - 1);
        require_finite(cached, (int)session.tokens.size() - 1);
        step.token = argmax(naive.data(), (int)naive.size());
        step.cached_token = argmax(cached.data(), (int)cached.size());
        step.difference = largest_difference(naive, cached);
        step.kl = divergence(naive, cached);
        session.tokens.push_back(step.token);
        steps.push_back(step);
        show(step);
    }
    return steps;
}

// Text of a token on one line: what would break the line or the column is shown as an escape.
inline std::string on_one_line(const std::string &text) {
    std::string result;
    for (char c : text) {
        char escape[8];
        snprintf(escape, sizeof escape, c == '\n' ? "\\n" : "\\x%02x", (unsigned char)c);
        result += (unsigned char)c < ' ' || c == 127 ? escape : std::string(1, c);
    }
    return result;
}

struct DiffTotals {
    double difference = 0, naive = 0, cached = 0;  // largest; seconds of all steps
    int divergence = -1;                           // first step at which the likeliest tokens differ
    // Milliseconds a token over the first and the last quarter of the decoding steps:
    double naive_early = 0, naive_late = 0, cached_early = 0, cached_late = 0;
};

inline DiffTotals sum_up(const std::vector<DiffStep> &steps) {
    DiffTotals totals;
    int count = (int)steps.size(), quarter = std::max(1, (count - 1) / 4);
    for (int i = 0; i < count; i++) {
        const DiffStep &step = steps[i];
        totals.difference = std::max(totals.difference, step.difference);
        if (totals.divergence < 0 && step.token != step.cached_token) totals.divergence = i;
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

inline void print_totals(const DiffTotals &totals, const Session &session, size_t steps, double tolerance, bool good) {
    printf("\ntokens      %s\n",
           totals.divergence < 0 ? "identical" : ("differ first at step " + std::to_string(totals.divergence)).c_str());
    printf("device      %s\n", session.engine.device_name.c_str());
    printf("logits      largest difference %.3g, tolerance %.3g\n", totals.difference, tolerance);
    printf("time        naive %.3f s, cached %.3f s (cache: K %s, V %s): %.1f x\n", totals.naive, totals.cached,
           name_of(session.cache.type_k), name_of(session.cache.type_v), totals.naive / totals.cached);
    if (steps >= 8) {
        printf("growth      naive %.2f -> %.2f ms a token, cached %.2f -> %.2f (first and last quarter)\n",
               totals.naive_early, totals.naive_late, totals.cached_early, totals.cached_late);
    }
    printf("verdict     %s\n", good ? "the same" : "NOT the same");
}

inline void print_diff_json(const std::vector<DiffStep> &steps, const DiffTotals &totals, const Session &session,
                            const Options &options, double tolerance) {
    Json object = json_object();
    add_ids(object.get(), "prompt_tokens", {session.tokens.begin(), session.tokens.begin() + session.prompt});
    cJSON *list = cJSON_AddArrayToObject(object.get(), "steps");
    for (const DiffStep &step : steps) {
        cJSON *item = cJSON_CreateObject();
        cJSON_AddNumberToObject(item, "token", step.token);
        cJSON_AddNumberToObject(item, "cached_token", step.cached_token);
        cJSON_AddNumberToObject(item, "max_abs_logit_diff", step.difference);
        cJSON_AddNumberToObject(item, "kl", step.kl);
        cJSON_AddNumberToObject(item, "naive_seconds", step.naive_seconds);
        cJSON_AddNumberToObject(item, "cached_seconds", step.cached_seconds);
        cJSON_AddItemToArray(list, item);
    }
    cJSON_AddStringToObject(object.get(), "device", session.engine.device_name.c_str());
    cJSON_AddNumberToObject(object.get(), "max_abs_logit_diff", totals.difference);
    cJSON_AddNumberToObject(object.get(), "tolerance", tolerance);
    if (totals.divergence < 0)
        cJSON_AddNullToObject(object.get(), "first_divergence");
    else
        cJSON_AddNumberToObject(object.get(), "first_divergence", totals.divergence);
    cJSON_AddBoolToObject(object.get(), "identical", totals.divergence < 0);
    cJSON_AddNumberToObject(object.get(), "naive_seconds", totals.naive);
    cJSON_AddNumberToObject(object.get(), "cached_seconds", totals.cached);
    add_cache(object.get(), options, session.cache);
    print_json(object.get());
}

// 0 if the likeliest tokens are the same at every step and no logit is further off than the tolerance, else 1.
inline int run_diff(const Options &options) {
    require_cache(options);
    if (options.count == 0) fail("-n 0: diff needs a step to compare, expected 1 or more");
    Session session = open_session(options);
    if (reason_to_stop(session, options)) {
        fail("the prompt has %d tokens and fills the context: shorten it, so that a step can be compared",
             session.prompt);
    }
    double tolerance =
        options.given.count("--tolerance") ? options.tolerance : default_tolerance(session.cache, session.engine);
    TextStream text(session.tokenizer.get());
    for (int token : session.tokens) text.next(token);
    if (!options.json)
        printf("%5s  %6s %6s  %10s %10s  %9s %9s  %s\n", "step", "naive", "cached", "max diff", "KL", "naive ms",
               "cached ms", "text");
    int index = 0;
    std::vector<DiffStep> steps = run_lockstep(session, options, [&](const DiffStep &step) {
        if (options.json) return;
        printf("%5d  %6d %6d%c %10.2e %10.2e  %9.3f %9.3f  %s\n", index++, step.token, step.cached_token,
               step.token == step.cached_token ? ' ' : '!', step.difference, step.kl, step.naive_seconds * 1e3,
               step.cached_seconds * 1e3, on_one_line(text.next(step.token)).c_str());
        flush_output();
    });
    DiffTotals totals = sum_up(steps);
    bool good = totals.divergence < 0 && totals.difference <= tolerance;
    if (options.json)
        print_diff_json(steps, totals, session, options, tolerance);
    else
        print_totals(totals, session, steps.size(), tolerance, good);
    return good ? 0 : 1;
}

// ---- llm bench ---------------------------------------------------------------------------------------------

// Measures the bytes a second that all threads together read from a buffer. It is as large as the model's weights and
// in pages like theirs, so that of the one as of the other the caches of this machine may hold a part.
class ReadBandwidth {
public:
    ReadBandwidth(size_t bytes, int threads, Pages pages)
        : blocks(std::max<int64_t>(bytes / block, 64)), threads(threads) {
        buffer = reserve((size_t)blocks * block, "the buffer of the bandwidth measurement", pages);
        for_each_block([](float *at, size_t count) {  // first touch, by the thread that will read
            std::fill(at, at + count, 1.0f);
            return 0.0f;
        });
    }
    double bytes() const { return (double)blocks * block; }
    // Over three passes.
    double measure() const {
        constexpr int passes = 3;
        double start = now(), total = 0;
        for (int pass = 0; pass < passes; pass++) total += for_each_block(read_block);
        double read = passes * bytes();
        if (total != read / sizeof(float)) fail("the bandwidth measurement misread its buffer");
        return read / (now() - start);
    }

private:
    static constexpr size_t block = 1 << 20;
    // As four streams, as the weights are read: of what was tried this reads fastest.
    static float read_block(const float *at, size_t count) {
        constexpr int line = cache_line / sizeof(float);
        Vec sums[streams] = {set(0), set(0), set(0), set(0)};
        for (size_t i = 0; i < count / streams; i += line) {
            for (int s = 0; s < streams; s++) {
                const float *from = at + s * (count / streams) + i;
                ask_stream_twice(from);
                for (int part = 0; part < line; part += lanes) sums[s] = add(sums[s], load(from + part));
            }
        }
        return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    }
    template <class Use>
    double for_each_block(Use use) const {
        double total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
        for (int64_t b = 0; b < blocks; b++)
            total += use((float *)((char *)buffer.get() + (size_t)b * block), block / sizeof(float));
        return total;
    }
    int64_t blocks;
    [[maybe_unused]] int threads;
    std::shared_ptr<void> buffer;
};

// Operations a second, a multiply-add being two, of all threads on numbers in registers (float32) or, for bf16 weights
// where the machine has matrix tiles, in the L1. linear() takes three products of bf16 for each of float32: there a
// third of the rate is the most that it can reach.
inline double measure_matrix_rate(bool tiles, [[maybe_unused]] int threads) {
    constexpr int rounds = 2000000, chains = 10, steps = 2;  // chains: more than the latency of one covers
    double total = 0, start = now();
#pragma omp parallel num_threads(threads) reduction(+ : total)
    if (tiles) {
        Aligned<bf16> tokens((size_t)bf16_parts * amx_side * amx_depth * steps);
        Aligned<uint32_t> weights((size_t)amx_side * amx_depth * steps / 2);
        alignas(64) float out[amx_side * amx_side] = {};
        size_t stride = (size_t)amx_depth * steps;
        amx_begin();
        for (int round = 0; round < rounds / 100; round++)
            amx_products(out, tokens.data(), stride, amx_side * stride, weights.data(), steps);
        amx_end();
        total += 2.0 * bf16_parts * amx_side * amx_side * amx_depth * steps * (rounds / 100);
    } else {
        Vec sums[chains], factor = set(0.5f), more = set(1);
        for (Vec &chain : sums) chain = set(0);
        for (int round = 0; round < rounds; round++)
            for (Vec &chain : sums) chain = fma(chain, factor, more);
        float largest_sum = 0;
        for (const Vec &chain : sums) largest_sum = std::max(largest_sum, sum(chain));
        if (largest_sum > 2 * lanes) fail("the measurement of the matrix rate miscalculated");
        total += 2.0 * rounds * chains * lanes;
    }
    return total / (now() - start);
}

inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// Ids that look like a text to the machine: anything but one row of the embedding again and again.
inline std::vector<int> bench_tokens(int count, int vocabulary) {
    std::vector<int> tokens(count);
    for (int i = 0; i < count; i++) tokens[i] = (int)((i * 7919LL + 13) % vocabulary);
    return tokens;
}

// What the machine gives: bytes and operations a second.
struct Rates {
    double bandwidth, matrix;
};

// One line of the table. The machine is measured anew before and after each run: other programs on it make its rates
// change within seconds.
struct BenchResult {
    std::string name;
    CacheChoice cache;
    int tokens, depth;
    double bytes = 0, operations = 0;  // of all tokens: what must be read from memory, and computed, at least
    std::vector<double> seconds = {}, shares = {};
    // The roofline (Williams et al. 2009): whichever of the two takes longer.
    double least_seconds(const Rates &rates) const {
        return std::max(bytes / rates.bandwidth, operations / rates.matrix);
    }
    void add(double taken, const Rates &rates) {
        seconds.push_back(taken);
        shares.push_back(least_seconds(rates) / taken);
    }
};

// Operations of `count` tokens after `depth` others: two for each weight of the layers, and for each number of each
// visible key and value; and the head for `heads_of` of the tokens.
inline double operations_of(const Model &model, const Layout &layout, int depth, int count, int heads_of) {
    const Config &config = model.config;
    double weights = 0, seen = 0;
    for (const LayerWeights &layer : model.layers) {
        for (const Linear *linear :
             {&layer.query, &layer.key, &layer.value, &layer.output, &layer.gate, &layer.up, &layer.down})
            weights += (double)linear->weight.rows * linear->weight.cols;
        Visible visible = visible_of(layout, layer.window);
        for (int t = depth; t < depth + count; t++)
            seen += t + 1 - visible.first(t) + (visible.dropped(t) ? visible.sinks : 0);
    }
    return 2 * (weights * count + 2 * seen * config.heads * config.head_dim +
                (double)model.head.rows * model.head.cols * heads_of);
}

inline void show_progress(const std::string &text) {
    if (isatty(2)) fprintf(stderr, "\r%-60s\r", text.c_str());
}

// A cache under measurement.
struct BenchCache {
    CacheChoice choice;
    Cache cache;
};

// Fills a cache up to `depth` positions with random numbers: what they are does not change the time that reading takes.
// One on a card is filled by a prompt.
inline void fill(Engine &engine, Cache &cache, int depth) {
    const CacheShape &shape = cache.shape;
    int first = cache.lengths[0];
    if (cache.device && depth > first)
        prefill_pass(engine, cache, 0, bench_tokens(depth - first, engine.model.config.vocabulary));
    if (cache.device) return;
    grow(cache, 0, std::max(0, depth - first));
#pragma omp parallel for num_threads(engine.threads)
    for (int layer = 0; layer < shape.layers; layer++) {
        std::mt19937 random(layer);
        Floats keys((size_t)group_size * shape.kv_heads * shape.key_width);
        Floats values((size_t)group_size * shape.kv_heads * shape.value_width);
        for (Floats *vectors : {&keys, &values})
            for (float &number : *vectors) number = (float)random() * 0x1p-31f - 1;
        for (int t = first, count; t < depth; t += count) {
            count = std::min(depth - t, group_size - t % group_size);
            Span span = {0, count, 0, t, t, t + count};
            for (int head = 0; head < shape.kv_heads; head++) {
                store_span(cache, layer, span, head, keys.data(), values.data());
                keep_recent(cache, layer, span, head, keys.data(), values.data());
            }
        }
    }
}

// What the roofline is made of, measured: for the CPU, or for a card.
struct Machine {
    std::string about;        // what computes
    std::string matrix_type;  // of the numbers that are multiplied
    double buffer_bytes;      // that measuring takes
    std::function<double()> bandwidth, matrix_rate;
};

inline Machine cpu_of(const Engine &engine) {
    bool tiles = amx_allowed() && engine.model.layers[0].up.weight.type == DType::bf16;
    Pages pages = engine.weights ? Pages::huge : Pages::small;
    auto memory = std::make_shared<ReadBandwidth>((size_t)engine.model.weight_bytes, engine.threads, pages);
    int threads = engine.threads;
    return {engine.device_name, tiles ? "bf16" : "f32", memory->bytes(), [memory] { return memory->measure(); },
            [=] { return measure_matrix_rate(tiles, threads); }};
}

#ifdef HAS_CUDA
// Operations a second of a large matrix product on the card, on random numbers: zeros run faster.
template <class Number>
class MatrixRate {
public:
    explicit MatrixRate(const Device &card) : device(card) {
        std::vector<Number> numbers((size_t)side * side);
        std::mt19937 random(0);
        for (Number &number : numbers) from_float(number, (float)random() * 0x1p-31f - 1);
        weight = upload(device, numbers);
        x = upload(device, numbers);
        y.resize(device, numbers.size());
        measure();  // the library loads its kernels
    }
    double measure() const {
        constexpr int products = 3;
        Linear square = {{weight.data(), DType::f32, side, side}, {}};
        device.wait();
        double start = now();
        for (int i = 0; i < products; i++) linear(device, y.data(), x.data(), square, side);
        device.wait();
        return products * 2.0 * side * side * side / (now() - start);
    }

private:
#ifdef CUDA_ON_CPU
    static constexpr int side = 64;
#else
    static constexpr int side = 8192;
#endif
    const Device &device;
    DeviceArray<Number> weight, x;
    DeviceArray<float> y;
};

inline Machine gpu_of(const Engine &engine) {
    const Device &device = engine.gpu->device;
    Machine machine{engine.device_name, "", 0, [&device] { return copy_bandwidth(device); }, {}};
    with_numbers(engine.gpu->model.layers[0].up.weight, [&](auto *weight) {
        auto rate = std::make_shared<MatrixRate<std::decay_t<decltype(*weight)>>>(device);
        machine.matrix_rate = [rate] { return rate->measure(); };
    });
    machine.matrix_type = dtype_name(engine.model.layers[0].up.weight.type);
    return machine;
}
#endif

inline Machine machine_of(const Engine &engine) {
#ifdef HAS_CUDA
    if (engine.gpu) return gpu_of(engine);
#endif
    return cpu_of(engine);
}

// Runs that take turns with measurements of the bandwidth.
struct Bench {
    Engine &engine;
    const Options &options;
    Machine &machine;
    std::vector<double> bandwidths = {}, matrix_rates = {};
    void measure_machine() {
        bandwidths.push_back(machine.bandwidth());
        matrix_rates.push_back(machine.matrix_rate());
    }
    // Measures run(), of which a warm-up is not added to `result`.
    template <class Run>
    void measure(BenchResult &result, bool warm_up, Run run) {
        if (bandwidths.empty()) measure_machine();
        Rates before{bandwidths.back(), matrix_rates.back()};
        double start = now();
        run();
        double taken = now() - start;
        measure_machine();
        Rates mean{(before.bandwidth + bandwidths.back()) / 2, (before.matrix + matrix_rates.back()) / 2};
        if (!warm_up) result.add(taken, mean);
    }
};

// Rounds over all caches, with `steps` tokens decoded in each at this depth.
inline std::vector<BenchResult> bench_decode(Bench &bench, std::vector<BenchCache> &caches, int depth, int steps) {
    Engine &engine = bench.engine;
    std::vector<BenchResult> results;
    double weights = weights_read(engine.model);
    for (BenchCache &entry : caches) {
        fill(engine, entry.cache, depth);
        BenchResult result{"decode", entry.choice, steps, depth, weights * steps};
        result.operations = operations_of(engine.model, entry.cache.layout, depth, steps, steps);
        for (int step = 1; step <= steps; step++) result.bytes += cache_read(engine.model, entry.cache, depth + step);
        results.push_back(result);
    }
    for (int round = 0; round <= bench.options.repeats; round++) {
        show_progress("depth " + std::to_string(depth) + ", round " + std::to_string(round));
        for (size_t i = 0; i < caches.size(); i++) {
            bench.measure(results[i], round == 0, [&] {
                Sampler greedy{};
                for (int token : bench_tokens(steps, engine.model.config.vocabulary)) {
                    decode_pass(engine, caches[i].cache, {0}, {token});
                    next_token(engine, greedy, 0, depth);
                }
            });
            if (limit_of(caches[i].cache) < INT_MAX) shrink(caches[i].cache, 0, depth);  // a ring goes on
        }
    }
    return results;
}

inline BenchResult bench_prefill(Bench &bench, BenchCache &entry, int prompt) {
    Engine &engine = bench.engine;
    double chunks = std::ceil((double)prompt / std::min(chunk_tokens(engine), chunk_of(entry.cache)));
    BenchResult result{"prefill", entry.choice, prompt, 0, weights_read(engine.model) * chunks};
    result.operations = operations_of(engine.model, entry.cache.layout, 0, prompt, 1);
    for (int round = 0; round <= bench.options.repeats; round++) {
        show_progress("prefill of " + std::to_string(prompt) + ", round " + std::to_string(round));
        shrink(entry.cache, 0, 0);
        bench.measure(result, round == 0,
                      [&] { prefill(engine, entry.cache, 0, bench_tokens(prompt, engine.model.config.vocabulary)); });
    }
    shrink(entry.cache, 0, 0);
    return result;
}

// The naive path's next token: a pass over all tokens so far.
inline BenchResult bench_naive(Bench &bench, int depth) {
    Engine &engine = bench.engine;
    BenchResult result{"naive", {"none", "none", "none"}, 1, depth, weights_read(engine.model)};
    result.operations = operations_of(engine.model, Contiguous{}, 0, depth + 1, 1);
    for (int round = 0; round <= bench.options.repeats; round++) {
        show_progress("naive, depth " + std::to_string(depth) + ", round " + std::to_string(round));
        std::vector<int> tokens = bench_tokens(depth + 1, engine.model.config.vocabulary);
        bench.measure(result, round == 0, [&] { forward_naive(engine, tokens); });
    }
    return result;
}

// What is asked once: how long it takes until a prompt could begin, and the most memory that was held.
struct BenchTotals {
    double model_seconds = 0, tokenizer_seconds = 0;  // 0: there is no tokenizer
    double peak_bytes = 0, weight_bytes = 0, cache_bytes = 0, buffer_bytes = 0;
};

inline double peak_memory() {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss * 1024.0;
}

inline cJSON *bench_item(const BenchResult &result) {
    cJSON *item = cJSON_CreateObject();
    double seconds = median(result.seconds);
    auto add = [&](const char *key, double value) { cJSON_AddNumberToObject(item, key, value); };
    cJSON_AddStringToObject(item, "name", result.name.c_str());
    cJSON_AddStringToObject(item, "layout", result.cache.layout.c_str());
    cJSON_AddStringToObject(item, "type_k", result.cache.type_k.c_str());
    cJSON_AddStringToObject(item, "type_v", result.cache.type_v.c_str());
    auto [least, most] = std::minmax_element(result.shares.begin(), result.shares.end());
    add("tokens", result.tokens);
    add("depth", result.depth);
    add("seconds", seconds);
    add("tokens_per_second", result.tokens / seconds);
    add("bytes", result.bytes);
    add("gb_per_second", result.bytes / seconds / 1e9);
    add("operations", result.operations);
    add("gflops", result.operations / seconds / 1e9);
    add("of_roofline", median(result.shares));
    add("of_roofline_least", *least);
    add("of_roofline_most", *most);
    return item;
}

inline void print_bench_json(const std::vector<BenchResult> &results, const Bench &bench, const BenchTotals &totals) {
    Json object = json_object();
    cJSON *list = cJSON_AddArrayToObject(object.get(), "results");
    for (const BenchResult &result : results) cJSON_AddItemToArray(list, bench_item(result));
    cJSON *roofline = cJSON_AddObjectToObject(object.get(), "roofline");
    cJSON_AddNumberToObject(roofline, "read_gb_per_second", median(bench.bandwidths) / 1e9);
    cJSON_AddNumberToObject(roofline, "matrix_gflops", median(bench.matrix_rates) / 1e9);
    cJSON *start = cJSON_AddObjectToObject(object.get(), "start");
    cJSON_AddNumberToObject(start, "model_seconds", totals.model_seconds);
    cJSON_AddNumberToObject(start, "tokenizer_seconds", totals.tokenizer_seconds);
    cJSON *memory = cJSON_AddObjectToObject(object.get(), "memory");
    cJSON_AddNumberToObject(memory, "peak_bytes", totals.peak_bytes);
    cJSON_AddNumberToObject(memory, "weight_bytes", totals.weight_bytes);
    cJSON_AddNumberToObject(memory, "cache_bytes", totals.cache_bytes);
    cJSON_AddNumberToObject(memory, "measuring_bytes", totals.buffer_bytes);
    cJSON_AddNumberToObject(object.get(), "threads", bench.options.threads);
    cJSON_AddStringToObject(object.get(), "device", bench.machine.about.c_str());
    print_json(object.get());
}

// "21.14 GB/s (14.57 .. 25.12)"
inline std::string with_spread(const std::vector<double> &rates, const char *unit) {
    auto [least, most] = std::minmax_element(rates.begin(), rates.end());
    char line[96];
    snprintf(line, sizeof line, "%.2f %s (%.2f .. %.2f)", median(rates) / 1e9, unit, *least / 1e9, *most / 1e9);
    return line;
}

inline void print_bench(const std::vector<BenchResult> &results, const Bench &bench, const BenchTotals &totals) {
    printf("read bandwidth %s, matrix rate %s in %s, measured %zu times, %s\n",
           with_spread(bench.bandwidths, "GB/s").c_str(), with_spread(bench.matrix_rates, "GFLOPS").c_str(),
           bench.machine.matrix_type.c_str(), bench.bandwidths.size(), bench.machine.about.c_str());
    printf("start: %.1f ms for the model, %.1f ms for the tokenizer\n", totals.model_seconds * 1e3,
           totals.tokenizer_seconds * 1e3);
    printf("peak memory %s: weights %s, caches %s, measuring the bandwidth %s\n\n", in_units(totals.peak_bytes).c_str(),
           in_units(totals.weight_bytes).c_str(), in_units(totals.cache_bytes).c_str(),
           in_units(totals.buffer_bytes).c_str());
    printf("%-8s %6s %6s  %-10s %-4s %-4s %10s %8s %8s  %s\n", "", "tokens", "depth", "cache", "K", "V", "tokens/s",
           "GB/s", "GFLOPS", "of the roofline (least .. most)");
    for (const BenchResult &result : results) {
        double seconds = median(result.seconds);
        auto [low, high] = std::minmax_element(result.shares.begin(), result.shares.end());
        printf("%-8s %6d %6d  %-10s %-4s %-4s %10.1f %8.2f %8.1f  %5.1f %% (%.1f .. %.1f)\n", result.name.c_str(),
               result.tokens, result.depth, result.cache.layout.c_str(), result.cache.type_k.c_str(),
               result.cache.type_v.c_str(), result.tokens / seconds, result.bytes / seconds / 1e9,
               result.operations / seconds / 1e9, 100 * median(result.shares), 100 * *low, 100 * *high);
    }
    printf(
        "\nThe roofline: bytes that must be read (weights, and the cache as it is stored) / read bandwidth, or "
        "operations / matrix rate, whichever is longer; both rates as they were just before and after.\n");
}

// The lengths of a list that leave room for `beside` positions more in a model's context: all of them, or fail, if a
// flag gave the list.
inline std::vector<int> that_fit(const Options &options, const char *flag, const std::vector<int> &list, int context,
                                 int beside, const std::string &what) {
    std::vector<int> fitting;
    for (int length : list) {
        bool fits = length + (int64_t)beside <= context;
        if (!fits && options.given.count(flag))
            fail("%s %d%s: expected together at most the model's %d positions", flag, length, what.c_str(), context);
        if (fits) fitting.push_back(length);
    }
    return fitting;
}

inline int run_bench(const Options &options) {
    std::string directory = checkpoint_directory(options);
    BenchTotals totals;
    double start = now();
    Engine engine = open_engine(options, directory);
    totals.model_seconds = now() - start;
    if (file_exists(join_path(directory, "tokenizer.json"))) {
        start = now();
        load_tokenizer(directory);
        totals.tokenizer_seconds = now() - start;
    }
    const Config &config = engine.model.config;
    int steps = options.given.count("-n") ? options.count : 64;
    if (steps < 1 || steps > config.context)
        fail("-n %d: expected at least one step, and at most the model's %d positions", steps, config.context);
    std::vector<int> depths =
        that_fit(options, "--depth", options.depths, config.context, steps, " and -n " + std::to_string(steps));
    std::vector<int> prompts = that_fit(options, "--prefill", options.prompts, config.context, 0, "");
    if (prompts.empty()) prompts = {config.context};
    std::vector<BenchCache> caches;
    int capacity = std::max(prompts.back(), depths.back() + steps);
    std::vector<std::string> layouts = split(options.layout);
    bool naive = std::count(layouts.begin(), layouts.end(), "none") > 0;
    for (const CacheChoice &choice : cache_choices(options, config)) {
        caches.push_back({choice, open_choice(options, engine, choice, capacity)});
        totals.cache_bytes += bytes_of(caches.back().cache).total();
    }
    totals.weight_bytes = (double)engine.model.weight_bytes;
    Machine machine = machine_of(engine);
    Bench bench{engine, options, machine};
    totals.buffer_bytes = machine.buffer_bytes;
    std::vector<BenchResult> results;
    for (int prompt : prompts)
        if (!caches.empty()) results.push_back(bench_prefill(bench, caches[0], prompt));
    for (int depth : depths) {
        if (naive) results.push_back(bench_naive(bench, depth));
        for (const BenchResult &result : bench_decode(bench, caches, depth, steps)) results.push_back(result);
    }
    show_progress("");
    totals.peak_bytes = peak_memory();
    options.json ? print_bench_json(results, bench, totals) : print_bench(results, bench, totals);
    return 0;
}

// ---- llm eval ----------------------------------------------------------------------------------------------

// A question in a text: the tokens [start, end) are its answer, which was told `distance` tokens before.
struct Recall {
    int start, end, distance;
};

struct EvalText {
    std::vector<int> tokens;
    std::vector<Recall> questions;
};

constexpr int recall_step = 200;  // tokens: distances are shown in classes of this width
constexpr int recall_classes = 6;

// What one cache did with the texts.
struct EvalResult {
    CacheChoice choice;
    Cache cache;
    double loss = 0, loss_squares = 0, kl = 0;  // sums over the predicted tokens, nats
    int predicted = 0;
    int asked[recall_classes] = {}, right[recall_classes] = {};
    int longest = 0;             // tokens of the longest text
    double bytes_per_token = 0;  // of that text
    std::vector<double> rates;   // decode, tokens/s
    double perplexity() const { return std::exp(loss / predicted); }
    // The standard error of the mean loss, carried over to the perplexity.
    double standard_error() const {
        double mean = loss / predicted, variance = std::max(0.0, loss_squares / predicted - mean * mean);
        return perplexity() * std::sqrt(variance / predicted);
    }
};

// Tokens of a question's answer and of the fact it asks for; `ends` (token): characters of the text up to its end.
inline Recall read_question(const std::string &where, const cJSON *question, const std::vector<size_t> &ends) {
    auto token_of = [&](const char *key) {
        const cJSON *number = cJSON_GetObjectItem(question, key);
        if (!cJSON_IsNumber(number))
            fail("%s: a question's \"%s\" is not a number, expected a place in the text", where.c_str(), key);
        if (!(number->valuedouble > 0 && number->valuedouble + 1 < (double)ends.back())) {
            fail("%s: a question's \"%s\" is %g, expected a place in the text of %zu characters", where.c_str(), key,
                 number->valuedouble, ends.back());
        }
        return (int)(std::upper_bound(ends.begin(), ends.end(), (size_t)number->valuedouble) - ends.begin());
    };
    int fact = token_of("fact_char"), start = token_of("answer_char");
    Recall recall{start, token_of("place_char") + 2, start - fact};  // up to the full stop behind the place
    if (recall.distance <= 0)
        fail("%s: a question's \"fact_char\" does not stand before its \"answer_char\"", where.c_str());
    if (recall.end > (int)ends.size() || recall.end <= recall.start)
        fail("%s: a question's answer ends before it begins, or behind the text", where.c_str());
    return recall;
}

// A line of heldout_mixed.jsonl (weights_tools/README.md).
inline EvalText read_story(const std::string &where, const std::string &line, const Tokenizer *tokenizer) {
    if (line.find("\\u0000") != std::string::npos)
        fail("%s: has a NUL character, expected text without", where.c_str());
    Json story = parse_json(where, line);
    const cJSON *text = cJSON_GetObjectItem(story.get(), "text"), *question;
    const cJSON *questions = cJSON_GetObjectItem(story.get(), "questions");
    if (!cJSON_IsString(text)) fail("%s: has no \"text\", expected a string", where.c_str());
    if (questions && !cJSON_IsArray(questions)) fail("%s: \"questions\" is no list", where.c_str());
    EvalText result;
    result.tokens = encode(tokenizer, text->valuestring, where);
    std::vector<size_t> ends;
    TextStream stream(tokenizer);
    size_t characters = 0;
    for (int token : result.tokens) {
        for (char byte : stream.next(token)) characters += (byte & 0xc0) != 0x80;  // not inside a UTF-8 character
        ends.push_back(characters);
    }
    cJSON_ArrayForEach(question, questions) {
        if (!cJSON_IsObject(question)) fail("%s: a question is no object", where.c_str());
        result.questions.push_back(read_question(where, question, ends));
    }
    return result;
}

// The texts of a .jsonl file with their questions; or any other file, in pieces as long as the context.
inline std::vector<EvalText> eval_texts(const Options &options, const std::string &directory, const Config &config,
                                        const Tokenizer *tokenizer) {
    std::vector<EvalText> texts;
    size_t context = options.given.count("-c") ? options.context : config.context;
    std::string file = options.prompt_file, content;
    bool from_ids = options.given.count("--ids");
    if (file.empty() && !from_ids) {
        file = join_path(directory, "heldout_mixed.jsonl");
        if (!file_exists(file)) fail("%s: no such file: give a text with -f FILE or --ids 1,2,3", file.c_str());
    }
    if (from_ids || file.size() < 6 || file.compare(file.size() - 6, 6, ".jsonl") != 0) {
        if (!from_ids) content = read_file(file, 1 << 30);
        if (!from_ids && content.empty()) fail("%s: is empty, expected a text", file.c_str());
        std::vector<int> tokens =
            from_ids ? prompt_tokens(options, tokenizer, config) : encode(tokenizer, content, file);
        if (tokens.size() < 2) fail("%s: one token, expected two or more", from_ids ? "--ids" : file.c_str());
        for (size_t begin = 0; begin + 1 < tokens.size(); begin += context) {
            size_t end = std::min(begin + context, tokens.size());
            texts.push_back({{tokens.begin() + (int64_t)begin, tokens.begin() + (int64_t)end}, {}});
        }
        return texts;
    }
    content = read_file(file, 1 << 28);
    for (size_t begin = 0, line = 1; begin < content.size(); line++) {
        size_t end = std::min(content.find('\n', begin), content.size());
        std::string where = file + " line " + std::to_string(line);
        texts.push_back(read_story(where, content.substr(begin, end - begin), tokenizer));
        size_t tokens = texts.back().tokens.size();
        if (tokens < 2 || tokens > context)
            fail("%s: has %zu tokens, expected 2 to the %zu of the context", where.c_str(), tokens, context);
        begin = end + 1;
    }
    if (texts.empty()) fail("%s: is empty, expected a text", file.c_str());
    return texts;
}

// A pass over the next tokens of sequence 0, in as many chunks as the cache needs: use(row, logits) for each.
template <class Use>
void for_each_row(Engine &engine, Cache &cache, const int *tokens, int count, Use use) {
    int chunk = chunk_of(cache), vocabulary = engine.model.config.vocabulary;
    for (int begin = 0, size; begin < count; begin += size) {
        size = std::min(chunk, count - begin);
        prefill(engine, cache, 0, {tokens + begin, tokens + begin + size});
        std::vector<float> rows = logits(engine, 0, size);
        for (int row = 0; row < size; row++) use(begin + row, &rows[(size_t)row * vocabulary]);
    }
}

// What the f32 cache predicts at one position: logits less the logarithm of the sum of their exponentials.
struct Prediction {
    std::vector<double> log_probability, probability;
};

inline Prediction predict(const float *logits, int count, double log_sum) {
    Prediction result;
    for (int i = 0; i < count; i++) {
        result.log_probability.push_back(logits[i] - log_sum);
        result.probability.push_back(std::exp(result.log_probability[i]));
    }
    return result;
}

// One text through all caches, a chunk at a time: what the first, in f32, predicts is what the others are held against.
// The true token comes next, whatever was predicted.
inline void eval_text(Engine &engine, std::vector<EvalResult> &results, const EvalText &text) {
    constexpr int chunk = 128;
    int count = (int)text.tokens.size(), vocabulary = engine.model.config.vocabulary;
    for (EvalResult &result : results) shrink(result.cache, 0, 0);
    std::vector<std::vector<char>> hits(results.size(), std::vector<char>(count));  // token t was the likeliest
    std::vector<Prediction> reference(chunk);
    for (int begin = 0; begin < count; begin += chunk) {
        for (size_t i = 0; i < results.size(); i++) {
            EvalResult &result = results[i];
            auto use = [&](int row, const float *logits) {
                int next = begin + row + 1;
                if (next == count) return;
                require_finite({logits, logits + vocabulary}, next - 1);
                double log_sum = log_sum_exp(logits, vocabulary), loss = log_sum - logits[text.tokens[next]];
                if (i == 0) reference[row] = predict(logits, vocabulary, log_sum);
                const Prediction &f32 = reference[row];
                for (int id = 0; id < vocabulary && i > 0; id++)
                    result.kl += f32.probability[id] * (f32.log_probability[id] - (logits[id] - log_sum));
                result.loss += loss;
                result.loss_squares += loss * loss;
                result.predicted++;
                hits[i][next] = argmax(logits, vocabulary) == text.tokens[next];
            };
            for_each_row(engine, result.cache, &text.tokens[begin], std::min(chunk, count - begin), use);
        }
    }
    for (size_t i = 0; i < results.size(); i++) {
        for (const Recall &recall : text.questions) {
            int in = std::min(recall.distance / recall_step, recall_classes - 1);
            results[i].asked[in]++;
            results[i].right[in] +=
                std::all_of(hits[i].begin() + recall.start, hits[i].begin() + recall.end, [](char hit) { return hit; });
        }
        double bytes = bytes_of(results[i].cache).total();
        if (count >= results[i].longest) results[i].bytes_per_token = bytes / count, results[i].longest = count;
    }
}

constexpr int eval_steps = 32;  // tokens decoded for the time a token takes

// Decoding behind the last text, in rounds over all caches.
inline void eval_decode(Engine &engine, std::vector<EvalResult> &results, int repeats) {
    for (int round = 0; round <= repeats; round++) {
        for (EvalResult &result : results) {
            int length = result.cache.lengths[0], room = limit_of(result.cache) - eval_steps;
            if (length > room) shrink(result.cache, 0, room);
            double start = now();
            Sampler greedy{};
            for (int token : bench_tokens(eval_steps, engine.model.config.vocabulary)) {
                decode_pass(engine, result.cache, {0}, {token});
                next_token(engine, greedy, 0, result.cache.lengths[0] - 1);
            }
            if (round > 0) result.rates.push_back(eval_steps / (now() - start));
        }
    }
}

// What --all measures: each precision, some pairs that differ, a page table, and rings of a quarter of the context.
inline std::vector<CacheChoice> standard_set(const Config &config) {
    std::vector<CacheChoice> list;
    for_each_type<Precision>([&](auto type) { list.push_back({Contiguous::name, type.name, type.name}); });
    list.push_back({Contiguous::name, Int8::name, Int4::name});
    list.push_back({Contiguous::name, Int4::name, Int2::name});
    list.push_back({Paged::name, Int4::name, Int4::name});
    int window = std::max(8, config.context / 4);
    for (int sinks : {0, 4}) list.push_back({Ring::name, F16::name, F16::name, window, sinks});
    list.push_back({Ring::name, Int4::name, Int4::name, window, 4});
    return list;
}

inline void print_eval(const std::vector<EvalResult> &results, const Engine &engine) {
    int asked = 0;
    for (int count : results[0].asked) asked += count;
    printf("%-18s %-4s %-4s %8s %6s %9s %7s %9s ", "cache", "K", "V", "B/token", "x", "perplex.", "+-", "KL to f32");
    for (int i = 0; asked && i < recall_classes; i++)
        printf(i + 1 < recall_classes ? " <%-4d" : " %d+", (i + (i + 1 < recall_classes)) * recall_step);
    printf(" %9s\n", "tokens/s");
    for (const EvalResult &result : results) {
        std::string name = result.choice.layout;
        if (name == Ring::name)
            name += " " + std::to_string(result.choice.window) + " + " + std::to_string(result.choice.sinks);
        printf("%-18s %-4s %-4s %8.1f %6.2f %9.4f %7.4f %9.2e ", name.c_str(), result.choice.type_k.c_str(),
               result.choice.type_v.c_str(), result.bytes_per_token,
               results[0].bytes_per_token / result.bytes_per_token, result.perplexity(), result.standard_error(),
               result.kl / result.predicted);
        for (int i = 0; asked && i < recall_classes; i++)
            result.asked[i] ? printf(" %3.0f %%", 100.0 * result.right[i] / result.asked[i]) : printf("     -");
        printf(" %9.1f\n", median(result.rates));
    }
    printf("\n%d tokens predicted; B/token: of the longest text, metadata included; x: times smaller than f32",
           results[0].predicted);
    if (asked) printf(";\nrecall: %d questions by the distance, in tokens, of the fact they ask for", asked);
    printf("\ndevice: %s\n", engine.device_name.c_str());
}

inline void print_eval_json(const std::vector<EvalResult> &results, size_t texts, const Engine &engine) {
    Json object = json_object();
    cJSON_AddStringToObject(object.get(), "device", engine.device_name.c_str());
    cJSON_AddNumberToObject(object.get(), "texts", (double)texts);
    cJSON_AddNumberToObject(object.get(), "predicted_tokens", results[0].predicted);
    cJSON *list = cJSON_AddArrayToObject(object.get(), "results");
    for (const EvalResult &result : results) {
        cJSON *item = cJSON_CreateObject();
        cJSON_AddItemToArray(list, item);
        auto add = [&](const char *key, double value) { cJSON_AddNumberToObject(item, key, value); };
        cJSON_AddStringToObject(item, "layout", result.choice.layout.c_str());
        cJSON_AddStringToObject(item, "type_k", result.choice.type_k.c_str());
        cJSON_AddStringToObject(item, "type_v", result.choice.type_v.c_str());
        if (result.choice.layout == Ring::name) {
            add("window", result.choice.window);
            add("sinks", result.choice.sinks);
        }
        add("bytes_per_token", result.bytes_per_token);
        add("times_smaller", results[0].bytes_per_token / result.bytes_per_token);
        add("perplexity", result.perplexity());
        add("standard_error", result.standard_error());
        add("kl", result.kl / result.predicted);
        add("tokens_per_second", median(result.rates));
        cJSON *recall = cJSON_AddArrayToObject(item, "recall");
        for (int i = 0; i < recall_classes; i++) {
            if (!result.asked[i]) continue;
            cJSON *entry = cJSON_CreateObject();
            cJSON_AddNumberToObject(entry, "distance", i * recall_step);
            cJSON_AddNumberToObject(entry, "questions", result.asked[i]);
            cJSON_AddNumberToObject(entry, "right", result.right[i]);
            cJSON_AddItemToArray(recall, entry);
        }
    }
    print_json(object.get());
}

inline int run_eval(const Options &options) {
    require_cache(options);
    std::string directory = checkpoint_directory(options);
    Engine engine = open_engine(options, directory);
    const Config &config = engine.model.config;
    TokenizerPointer tokenizer(nullptr, tokenizer_free);
    if (!options.given.count("--ids") && !file_exists(join_path(directory, "tokenizer.json")))
        fail("%s/tokenizer.json: No such file; fetch it, or give the text as --ids 1,2,3", directory.c_str());
    if (!options.given.count("--ids")) tokenizer = load_tokenizer(directory);
    if (options.given.count("-c") && (options.context > config.context || options.context < 2))
        fail("-c %d: expected 2 to %d positions, for which this model was made", options.context, config.context);
    std::vector<EvalText> texts = eval_texts(options, directory, config, tokenizer.get());
    int longest = 0;
    for (const EvalText &text : texts) longest = std::max(longest, (int)text.tokens.size());
    std::vector<CacheChoice> choices = {{Contiguous::name, F32::name, F32::name}};
    for (const CacheChoice &choice : options.standard_set ? standard_set(config) : cache_choices(options, config))
        if (choice.layout != Contiguous::name || choice.type_k != F32::name || choice.type_v != F32::name)
            choices.push_back(choice);
    std::vector<EvalResult> results;
    for (const CacheChoice &choice : choices) {
        results.emplace_back();
        results.back().choice = choice;
        results.back().cache = open_choice(options, engine, choice, std::max(longest, eval_steps));
    }
    for (size_t i = 0; i < texts.size(); i++) {
        show_progress("text " + std::to_string(i + 1) + " of " + std::to_string(texts.size()));
        eval_text(engine, results, texts[i]);
    }
    eval_decode(engine, results, options.repeats);
    show_progress("");
    options.json ? print_eval_json(results, texts.size(), engine) : print_eval(results, engine);
    return 0;
}
