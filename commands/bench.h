// llm bench: prefill and decode at some depths, compared with what memory and processor can give: the roofline.
#pragma once

#include <sys/resource.h>

#include <numeric>
#include <random>

#include "info.h"

inline double median(std::vector<double> values) {
    if (values.empty()) return NAN;
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// ---- What the machine gives --------------------------------------------------------------------------------

// Measures the two limits of the roofline. Each call measures again.
struct Roofline {
    std::function<double()> bandwidth;    // bytes read per second
    std::function<double()> matrix_rate;  // operations per second; a multiply-add is two
    std::string number;                   // the type of the numbers that are multiplied
    double buffer_bytes;                  // memory that measuring takes
};

// Chains of multiply-adds, a register each: enough to hide the latency of one, few enough to stay in registers.
#if defined(__AVX512F__)
constexpr int chain_count = 12, chain_width = 16;
#elif defined(__AVX__)
constexpr int chain_count = 12, chain_width = 8;
#elif defined(__aarch64__)
constexpr int chain_count = 20, chain_width = 4;
#else
constexpr int chain_count = 12, chain_width = 4;
#endif

// Runs multiply-adds in registers. True: the sums 1 + 1/2 + 1/4 ... are right, just below 2 or rounded to it. Unless
// told, compilers avoid 512-bit registers, which made old processors clock down.
#ifdef __clang__
__attribute__((min_vector_width(512)))
#elif defined(__AVX512F__)
__attribute__((target("prefer-vector-width=512")))
#endif
inline bool
multiply_add(int rounds) {
    typedef float Chain __attribute__((vector_size(chain_width * sizeof(float))));
    Chain sums[chain_count] = {};
    bool right = true;
    for (int round = 0; round < rounds; round++)
        for (Chain &chain : sums)
            for (int i = 0; i < chain_width; i++) chain[i] = __builtin_fmaf(chain[i], 0.5f, 1);
    for (const Chain &chain : sums)
        for (int i = 0; i < chain_width; i++) right &= chain[i] > 1.9f && chain[i] <= 2;
    return right;
}

// A CPU's roofline. The bandwidth is that of a buffer as large as the model's weights and in the same kind of pages, so
// that the processor's caches hold about the same share of both.
inline Roofline roofline_of(Cpu &cpu, const Engine &engine) {
    constexpr int words = 1 << 18, stream = words / 4, passes = 3, rounds = 2000000;
    using Block = uint32_t[words];
    int64_t blocks = std::max<int64_t>(engine.model.weight_bytes / (int64_t)sizeof(Block), 64);
    double bytes = (double)blocks * sizeof(Block);
    auto buffer = map_memory((size_t)bytes, "measuring the bandwidth", "free some", engine.weights != nullptr);
    Block *block = (Block *)buffer.get();
    // Each block is first written by the thread that will read it.
    cpu.run([&] { cpu.for_each(blocks, [&](int64_t b, Alone) { std::fill(block[b], block[b] + words, 1); }); });
    auto bandwidth = [=, &cpu, keep = buffer] {
        std::atomic<int64_t> sum{0};
        auto add_block = [&](int64_t b, Alone) {
            uint32_t part = 0;  // four streams: the fastest of what was tried
            for (const uint32_t *at = block[b], *end = at + stream; at < end; at++)
                part += at[0] + at[stream] + at[2 * stream] + at[3 * stream];
            sum += part;
        };
        double start = now();
        for (int pass = 0; pass < passes; pass++) cpu.run([&] { cpu.for_each(blocks, add_block); });
        stop_if_interrupted();
        if (sum != passes * blocks * words) fail("the bandwidth measurement misread its buffer");
        return passes * bytes / (now() - start);
    };
    auto matrix_rate = [&cpu] {
        std::atomic<int> threads{0};
        double start = now();
        cpu.run([&] { threads += multiply_add(rounds); });
        return 2.0 * rounds * chain_count * chain_width * threads / (now() - start);
    };
    return {bandwidth, matrix_rate, "f32", bytes};
}

// A GPU's roofline: the bandwidth of copies (bytes read and written), and the rate of a large product of such weights.
template <class M>
Roofline roofline_of(M &gpu, const Engine &engine) {
    const int side = gpu.room().bytes > 4e9 ? 8192 : 64;  // the emulated GPU is slow
    DType type = engine.model.layers[0].up.weight.type;
    std::vector<uint32_t> bits((size_t)side * side);
    size_t bytes = 4 * bits.size();
    std::mt19937 random(0);  // random signs and fractions: zeros would be multiplied faster
    for (uint32_t &word : bits) word = (random() & 0x83ff83ff) | 0x3c003c00;
    auto x = gpu.reserve(bytes, "measuring the matrix rate", "free some"), y = x;
    y = gpu.reserve(bytes, "measuring the matrix rate", "free some");
    gpu.write(x.get(), bits.data(), bytes);
    auto rate_of = [=, &gpu](double amount, auto work) {
        constexpr int times = 5;
        float end;
        auto wait = [&] { gpu.read(&end, y.get(), sizeof end); };
        gpu.run(work), wait();  // the first call loads the libraries' kernels
        double start = now();
        for (int i = 0; i < times; i++) gpu.run(work);
        wait();
        return times * amount / (now() - start);
    };
    auto copy = [=, &gpu] { gpu.write(y.get(), x.get(), bytes); };
    auto multiply = [=, &gpu] {
        Linear square = {{x.get(), type, side, side}, {}};
        best::linear(gpu, (const float *)x.get(), side, {{square, (float *)y.get()}});
    };
    return {[=] { return rate_of(2.0 * (double)bytes, copy); },
            [=] { return rate_of(2.0 * side * side * side, multiply); }, dtype_name(type), 0};
}

// ---- What is measured --------------------------------------------------------------------------------------

struct BenchRow {
    std::string name;
    const Cache *cache;  // nullptr on the naive path
    int tokens, depth, sequences;  // tokens: of all sequences
    double bytes, operations;            // of all tokens: the least to be read from memory, and to be computed
    std::function<void()> prepare, run;  // prepare is not timed: it goes to where run begins
    std::vector<double> seconds = {}, shares = {};
    // The roofline (Williams et al. 2009): the time to read the bytes or to compute, whichever is longer.
    double least_seconds(double bandwidth, double matrix_rate) const {
        return std::max(bytes / bandwidth, operations / matrix_rate);
    }
};

// Operations of `count` tokens after `depth` others: 2 for each weight of the layers and for each number of a visible
// key and value, plus those of the head for `heads_of` of the tokens.
inline double operations_of(const Model &model, const Layout &layout, int depth, int count, int heads_of) {
    const Config &config = model.config;
    double weights = 0, seen = 0;
    for_each_tensor(model, [&](const Tensor &tensor, bool matrix) {
        if (matrix && &tensor != &model.head) weights += (double)tensor.rows * tensor.cols;
    });
    for (int layer = 0; layer < config.layers; layer++) {
        const Kind &kind = config.kind(layer);
        Visible visible = visible_of(layout, kind.window);
        const double numbers = (double)::heads_of(config, kind).query * (kind.key_width + kind.value_width);
        for (int t = depth; t < depth + count; t++)
            seen += numbers * (t + 1 - visible.first(t) + (visible.dropped(t) ? visible.sinks : 0));
    }
    return 2 * (weights * count + seen + (double)model.head.rows * model.head.cols * heads_of);
}

// `count` ids that load the machine as a text does: many rows of the embedding, not one row again and again.
inline std::vector<int> bench_tokens(int count, int vocabulary) {
    std::vector<int> tokens(count);
    for (int i = 0; i < count; i++) tokens[i] = (int)((i * 7919LL + 13) % vocabulary);
    return tokens;
}

// Fills each sequence up to `depth` positions with random keys and values, which take the same time as real ones.
inline void fill(Engine &engine, Cache &cache, int depth) {
    int chunk = std::min(engine.chunk, chunk_of(cache)), widest = 0;
    for (const Store &store : cache.stores) widest = std::max(widest, store.shape.kv_heads * store.shape.key_width);
    std::vector<float> numbers((size_t)chunk * widest);
    std::mt19937 random(0);
    for (float &number : numbers) number = (float)random() * 0x1p-31f - 1;
    Buffer<float> there;
    there.assign(engine.memory(), numbers);
    for (int sequence = 0; sequence < (int)cache.lengths.size();) {
        Batch batch;
        int count = std::min(chunk, depth - cache.lengths[sequence]);
        if (count <= 0 && ++sequence) continue;
        int first = grow(cache, sequence, count);
        for (int t = 0; t < count; t++) batch.add(0, sequence, first + t);
        const std::vector<Pass> passes = begin_pass(engine.a, engine.memory(), engine.model.config, batch);
        auto store = [&](auto &m) {
            for (const Pass &pass : passes) best::rope_angles(m, pass);
            for (int layer = 0; layer < engine.model.config.layers; layer++) {
                const LayerRows &rows = engine.model.config.rows[layer];
                const Pass &pass = passes[rows.kind];
                Attention task = attention_of(engine.a, engine.model, layer, cache.stores);
                task.keys.start = task.values.start = there.data();
                if (!rows.own) continue;
                best::store_rows(m, task, pass);
                best::keep_residual(m, task, pass);
            }
        };
        std::visit([&](auto &m) { m.run([&] { store(m); }); }, *engine.machine);
        stop_if_interrupted();
    }
}

// Decodes `steps` tokens of all sequences at once. Takes the argmax, as greedy decoding does, but feeds fixed tokens.
inline void decode_some(Engine &engine, Cache &cache, int steps) {
    const int vocabulary = engine.model.config.vocabulary, depth = cache.lengths[0];
    const std::vector<int> tokens = bench_tokens(steps, vocabulary);
    std::vector<int> sequences(cache.lengths.size());
    std::iota(sequences.begin(), sequences.end(), 0);
    std::vector<float> found;
    for (int token : tokens) {
        found = decode(engine, cache, sequences, std::vector<int>(sequences.size(), token));
        for (int i : sequences) argmax(&found[(size_t)i * vocabulary], vocabulary);
    }
    require_finite(found, depth + steps - 1, &cache);
}

// Times runs in rounds and measures the machine after each run, as other programs change its rates within seconds.
struct Bench {
    Engine &engine;
    const Options &options;
    Roofline roofline;
    std::vector<BenchRow> rows = {};
    std::vector<double> bandwidths = {}, matrix_rates = {};

    void measure_machine() {
        bandwidths.push_back(roofline.bandwidth());
        matrix_rates.push_back(roofline.matrix_rate());
    }
    // Times the rows from `first` on, `repeats` rounds of all; one round more, before these, warms up.
    void measure(size_t first) {
        auto mean = [](const std::vector<double> &rates) { return (rates.end()[-2] + rates.end()[-1]) / 2; };
        if (bandwidths.empty()) measure_machine();
        for (int round = 0; round <= options.repeats; round++) {
            for (size_t i = first; i < rows.size(); i++) {
                BenchRow &row = rows[i];
                double least = row.least_seconds(bandwidths.back(), matrix_rates.back());
                show_progress(formatted("%s at depth %d, round %d of %d: %.2f s or more", row.name.c_str(), row.depth,
                                        round, options.repeats, round > 1 ? row.seconds.back() : least));
                row.prepare();
                double start = now();
                row.run();
                double taken = now() - start;
                measure_machine();
                if (round == 0) continue;
                row.seconds.push_back(taken);
                row.shares.push_back(row.least_seconds(mean(bandwidths), mean(matrix_rates)) / taken);
            }
        }
    }
    void time_prefill(Cache &cache, int prompt) {
        std::vector<int> tokens = bench_tokens(prompt, engine.model.config.vocabulary);
        double chunks = std::ceil((double)prompt / std::min(engine.chunk, chunk_of(cache)));
        rows.push_back({"prefill", &cache, prompt, 0, 1, weights_read(engine.model) * chunks,
                        operations_of(engine.model, cache.layout, 0, prompt, 1), [&] { rewind(cache, 0, 0); },
                        [&] {
                            const std::vector<float> found = prefill(engine, cache, 0, tokens);
                            require_finite(found, prompt - 1, &cache);
                        }});
        measure(rows.size() - 1);
    }
    // Times the naive path's next token: one pass over all tokens so far.
    void time_naive(int depth) {
        std::vector<int> tokens = bench_tokens(depth + 1, engine.model.config.vocabulary);
        rows.push_back({"naive", nullptr, 1, depth, 1, weights_read(engine.model),
                        operations_of(engine.model, Contiguous{}, 0, depth + 1, 1), [] {},
                        [&] { require_finite(forward_naive(engine, tokens), depth, nullptr); }});
        measure(rows.size() - 1);
    }
    void time_decode(std::vector<Cache> &caches, int depth, int steps) {
        size_t first = rows.size();
        for (Cache &cache : caches) {
            const int sequences = (int)cache.lengths.size();
            double bytes = weights_read(engine.model) * steps;
            for (int step = 1; step <= steps; step++)
                bytes += sequences * cache_read(engine.model, cache, depth + step);
            auto prepare = [=, &cache] {
                for (int i = 0; i < sequences; i++) rewind(cache, i, depth);
                fill(engine, cache, depth);
            };
            rows.push_back({"decode", &cache, steps * sequences, depth, sequences, bytes,
                            sequences * operations_of(engine.model, cache.layout, depth, steps, steps), prepare,
                            [this, &cache, steps] { decode_some(engine, cache, steps); }});
        }
        measure(first);
    }
};

// ---- What is said ------------------------------------------------------------------------------------------

inline std::string percent(double share) { return formatted(share < 1 ? "%.1f" : "%.0f", 100 * share); }

inline Report bench_row(const BenchRow &row) {
    double seconds = median(row.seconds), share = median(row.shares);
    auto [least, most] = std::minmax_element(row.shares.begin(), row.shares.end());
    Report report;
    report.show("name", row.name, "%-7s");
    report.show("tokens", row.tokens, " %6d", "tokens").show("depth", row.depth, " %6d ", "depth ");
    const bool many = row.cache && row.cache->lengths.size() > 1;
    report.add("sequences", row.sequences, many ? formatted("%9d ", row.sequences) : "", many ? "sequences " : "");
    add_names(report, row.cache, " %-13s", " %-4s", " %-4s", {"cache", "K", "V"});
    report.add("seconds", seconds).add("bytes", row.bytes).add("operations", row.operations);
    report.show("tokens_per_second", row.tokens / seconds, " %10.1f", "tokens/s");
    report.show("gb_per_second", row.bytes / seconds / 1e9, " %8.2f", "GB/s");
    report.show("gflops", row.operations / seconds / 1e9, " %8.1f", "GFLOPS");
    const char *head = "  of the roofline (least .. most)";
    report.add("of_roofline", share, formatted("  %5s %%", percent(share).c_str()), head);
    report.add("of_roofline_least", *least, " (" + percent(*least));
    return report.add("of_roofline_most", *most, " .. " + percent(*most) + ")");
}

// The whole report of the command. `start`: the seconds that loading took.
inline Report bench_report(const Bench &bench, const Report &start, double cache_bytes) {
    Report report, roofline, memory;
    std::vector<Report> rows;
    for (const BenchRow &row : bench.rows)
        if (!row.seconds.empty()) rows.push_back(bench_row(row));
    auto add_rate = [&](const char *key, const char *name, const std::vector<double> &rates, const char *unit) {
        if (rates.empty()) return;  // interrupted before the first
        auto [least, most] = std::minmax_element(rates.begin(), rates.end());
        double rate = median(rates) / 1e9;
        roofline.add(key, rate, formatted("%s %.2f %s (%.2f .. %.2f)", name, rate, unit, *least / 1e9, *most / 1e9));
    };
    auto add_bytes = [&](const char *key, const char *name, double bytes) {
        memory.add(key, bytes, name + in_units(bytes));
    };
    add_rate("read_gb_per_second", "read bandwidth", bench.bandwidths, "GB/s");
    add_rate("matrix_gflops", ", matrix rate", bench.matrix_rates, "GFLOPS");
    roofline.say(" in " + bench.roofline.number + ", measured " + counted((int64_t)bench.bandwidths.size(), "time"));
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    add_bytes("peak_bytes", "\npeak memory ", (double)usage.ru_maxrss * rusage_unit);
    add_bytes("weight_bytes", ": weights ", (double)bench.engine.model.weight_bytes);
    add_bytes("cache_bytes", ", caches ", cache_bytes);
    add_bytes("measuring_bytes", ", measuring the bandwidth ", bench.roofline.buffer_bytes);
    report.show("device", bench.engine.name(), "device: %s\n").add("threads", bench.options.threads);
    report.add("roofline", roofline).add("start", start).add("memory", memory).say("\n\n").table("results", rows);
    if (interrupted()) report.add("interrupted", true, "interrupted\n");
    return report.say(R"(
The roofline: bytes that must be read (weights, and the cache as it is stored)
/ read bandwidth, or operations / matrix rate, whichever is longer; both rates
as they were just before and after. int8 weights are multiplied as whole
numbers, and --activations bf16 as pairs, which may go faster than that rate;
weights that fit the processor's cache are read faster.
)");
}

// The lengths of `list`, sorted, that fit the context together with the other positions. If `flag` gave the list, fails
// on one that does not.
inline std::vector<int> that_fit(const Options &options, const char *flag, const std::vector<int> &list, int context,
                                 int beside, const std::string &what) {
    std::vector<int> fitting;
    for (int length : list) {
        bool fits = length + (int64_t)beside <= context;
        if (!fits && options.has(flag))
            fail("%s %d%s: expected together at most the model's %d positions", flag, length, what.c_str(), context);
        if (fits) fitting.push_back(length);
    }
    std::sort(fitting.begin(), fitting.end());
    return fitting;
}

inline int run_bench(const Options &options) {
    const std::string &directory = options.directory;
    double begin = now(), cache_bytes = 0;
    Engine engine = open_engine(options, directory);
    double loaded = now();
    const bool has_tokenizer = file_exists(join_path(directory, "tokenizer.json"));
    if (has_tokenizer) load_tokenizer(directory);
    Report start;
    auto add_start = [&](const char *key, double seconds, const char *format) {
        start.add(key, seconds, formatted(format, seconds * 1e3));
    };
    add_start("model_seconds", loaded - begin, "\nstart: %.1f ms for the model");
    add_start("tokenizer_seconds", has_tokenizer ? now() - loaded : 0, ", %.1f ms for the tokenizer");
    int context = engine.model.config.context, steps = options.count;
    if (steps > context) fail("-n %d: expected at most the model's %d positions", steps, context);
    std::vector<int> depths =
        that_fit(options, "--depth", options.depths, context, steps, " and -n " + std::to_string(steps));
    std::vector<int> prompts = that_fit(options, "--prefill", options.prompts, context, 0, "");
    if (prompts.empty()) prompts = {context};
    std::vector<Cache> caches;
    for (const CacheChoice &choice : options.caches()) {
        caches.push_back(open_cache(options, engine, choice, std::max(prompts.back(), depths.back() + steps)));
        cache_bytes += bytes_of(caches.back()).total();
    }
    Bench bench{engine, options, std::visit([&](auto &m) { return roofline_of(m, engine); }, *engine.machine)};
    try {
        for (int prompt : prompts)
            if (!caches.empty()) bench.time_prefill(caches[0], prompt);
        for (int depth : depths) {
            if (options.naive) bench.time_naive(depth);
            bench.time_decode(caches, depth, steps);
        }
    } catch (Interrupted) {
    }
    erase_progress();
    return bench_report(bench, start, cache_bytes).print(options.json);
}
