// What puts numbers on a cache and on the machine under it, out of the reader's way. Included by llm.cu.
#pragma once

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

// sum p log(p / q) for p, q = softmax(a), softmax(b), in double precision.
inline double divergence(const std::vector<float> &a, const std::vector<float> &b) {
    auto log_sum = [](const std::vector<float> &logits) {
        double most = *std::max_element(logits.begin(), logits.end()), total = 0;
        for (float logit : logits) total += std::exp(logit - most);
        return most + std::log(total);
    };
    double a_sum = log_sum(a), b_sum = log_sum(b), total = 0;
    for (size_t i = 0; i < a.size(); i++) total += std::exp(a[i] - a_sum) * ((a[i] - a_sum) - (b[i] - b_sum));
    return std::max(0.0, total);
}

// How far logits may lie apart. With an f32 cache both paths compute the same numbers in another order: 1e-4. Otherwise
// a stored key or value is off by at most u of itself (PlainRow), and a logit by a multiple of u. Over the whole
// context of the built-in model (llm diff -n 2000 -p "Once upon a time") it is off by 57 u at most, 0.028, in f16 and
// by 56 u, 0.22, in bf16; 128 u passes.
inline double default_tolerance(const Cache &cache) {
    auto roundoff = [](auto type) { return decltype(type)::unit_roundoff; };
    double u = std::max(std::visit(roundoff, cache.type_k), std::visit(roundoff, cache.type_v));
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
    if (options.layout == "none")
        fail("--cache none: diff compares the naive path with a cache: %s", layout_names().c_str());
    if (options.count == 0) fail("-n 0: diff needs a step to compare, expected 1 or more");
    Session session = open_session(options);
    if (reason_to_stop(session, options)) {
        fail("the prompt has %d tokens and fills the context: shorten it, so that a step can be compared",
             session.prompt);
    }
    double tolerance = options.given.count("--tolerance") ? options.tolerance : default_tolerance(session.cache);
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

// Bytes a second that all threads together read from a buffer of `bytes`. It is as large as the model's weights, so
// that of the one as of the other the caches of this machine may hold a part.
inline double read_bandwidth(size_t bytes, int threads, int repeats) {
    constexpr size_t block = 1 << 20;
    const int64_t blocks = (int64_t)std::max<size_t>(bytes / block, 64);
    std::shared_ptr<void> buffer = reserve((size_t)blocks * block, "the buffer of the bandwidth measurement");
    std::vector<double> rates;
    double total = 0;
    for (int repeat = 0; repeat <= 3 * repeats; repeat++) {
        double start = now();
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
        for (int64_t b = 0; b < blocks; b++) {
            float *at = (float *)((char *)buffer.get() + (size_t)b * block);
            const size_t count = block / sizeof(float);
            if (repeat == 0) std::fill(at, at + count, 1.0f);  // first touch, by the thread that will read
            Vec sums[4] = {set(0), set(0), set(0), set(0)};
            for (size_t i = 0; i < count; i += 4 * lanes) {
                for (int v = 0; v < 4; v++) {
                    __builtin_prefetch(at + i + v * lanes + 1024);
                    sums[v] = add(sums[v], load(at + i + v * lanes));
                }
            }
            total += sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
        }
        if (repeat > 0) rates.push_back((double)blocks * block / (now() - start));
    }
    if (total != (double)(3 * repeats + 1) * (double)blocks * (block / sizeof(float)))
        fail("the bandwidth measurement misread its buffer");
    return *std::max_element(rates.begin(), rates.end());
}

inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

struct BenchResult {
    std::string name;
    int tokens, depth;
    double seconds, bytes;  // of all tokens: what must be read from memory at least
};

// Ids that look like a text to the machine: anything but one row of the embedding again and again.
inline std::vector<int> bench_tokens(int count, int vocabulary) {
    std::vector<int> tokens(count);
    for (int i = 0; i < count; i++) tokens[i] = (int)((i * 7919LL + 13) % vocabulary);
    return tokens;
}

inline std::vector<BenchResult> measure_model(Engine &engine, const Options &options, int prompt, int steps) {
    const Config &config = engine.model.config;
    Cache cache = open_cache(cache_shape(options, config, std::max(prompt, options.depth + steps)), parse_layout("--cache", options.layout), parse_precision("--kv", options.type_k),
                             parse_precision("--kv", options.type_v));
    double weights = weights_read(engine.model);
    std::vector<double> prefill_seconds, decode_seconds;
    for (int repeat = 0; repeat <= options.repeats; repeat++) {  // the first is a warm-up
        shrink(cache, 0, 0);
        double start = now();
        prefill(engine, cache, 0, bench_tokens(prompt, config.vocabulary));
        if (repeat > 0) prefill_seconds.push_back(now() - start);
        shrink(cache, 0, 0);
        if (options.depth) prefill(engine, cache, 0, bench_tokens(options.depth, config.vocabulary));
        start = now();
        for (int token : bench_tokens(steps, config.vocabulary)) decode(engine, cache, {0}, {token});
        if (repeat > 0) decode_seconds.push_back(now() - start);
        if (isatty(2)) fprintf(stderr, "\rrepeat %d of %d", repeat, options.repeats);
    }
    if (isatty(2)) fprintf(stderr, "\r%30s\r", "");
    double chunks = (prompt + chunk_tokens - 1) / chunk_tokens;
    double cached = 0;
    for (int step = 1; step <= steps; step++) cached += cache_read(engine.model, cache, options.depth + step);
    return {{"prefill", prompt, 0, median(prefill_seconds), weights * chunks},
            {"decode", steps, options.depth, median(decode_seconds), weights * steps + cached}};
}

inline int run_bench(const Options &options) {
    if (options.layout == "none") fail("--cache none: bench measures the cached path: %s", layout_names().c_str());
    Engine engine(load_model(checkpoint_directory(options)), options.threads);
    int context = engine.model.config.context;
    int steps = options.given.count("-n") ? options.count : 64, prompt = std::min(512, context);
    if (steps < 1 || options.depth + (int64_t)steps > context) {
        fail("--depth %d and -n %d: expected at least one step, and together at most the model's %d positions",
             options.depth, steps, context);
    }
    double bandwidth = read_bandwidth((size_t)engine.model.weight_bytes, options.threads, options.repeats);
    std::vector<BenchResult> results = measure_model(engine, options, prompt, steps);
    double per_token[2] = {results[0].seconds / results[0].tokens, results[1].seconds / results[1].tokens};
    if (!options.json) {
        printf("read bandwidth %.2f GB/s, %d threads; cache K %s, V %s\n", bandwidth / 1e9, options.threads,
               options.type_k.c_str(), options.type_v.c_str());
        for (const BenchResult &result : results) {
            double rate = result.bytes / result.seconds;
            printf("%-8s %5d tokens at depth %5d  %9.1f tokens/s  %7.2f GB/s  %5.1f %% of the bandwidth\n",
                   result.name.c_str(), result.tokens, result.depth, result.tokens / result.seconds, rate / 1e9,
                   100 * rate / bandwidth);
        }
        printf("a token is %.1f x faster in prefill than in decode\n", per_token[1] / per_token[0]);
        return 0;
    }
    Json object = json_object();
    cJSON *list = cJSON_AddArrayToObject(object.get(), "results");
    for (const BenchResult &result : results) {
        cJSON *item = cJSON_CreateObject();
        cJSON_AddStringToObject(item, "name", result.name.c_str());
        cJSON_AddNumberToObject(item, "tokens", result.tokens);
        cJSON_AddNumberToObject(item, "depth", result.depth);
        cJSON_AddNumberToObject(item, "seconds", result.seconds);
        cJSON_AddNumberToObject(item, "tokens_per_second", result.tokens / result.seconds);
        cJSON_AddNumberToObject(item, "bytes", result.bytes);
        cJSON_AddNumberToObject(item, "gb_per_second", result.bytes / result.seconds / 1e9);
        cJSON_AddItemToArray(list, item);
    }
    cJSON_AddNumberToObject(cJSON_AddObjectToObject(object.get(), "roofline"), "read_gb_per_second", bandwidth / 1e9);
    print_json(object.get());
    return 0;
}
