// The table of docs/gpu.md: decoding, prefill, and attention alone, beside what this card copies and multiplies, which
// is measured in the same run and stands in the last column. Models have the shapes of Llama 3.2 1B and 3.1 8B and
// random weights, made on the card. `make bench-gpu` builds and runs it; --small is for trying it where there is none.
#define LLM_WITHOUT_MAIN
#ifndef __CUDACC__
#include "cuda_on_cpu.h"
#endif
#include "../commands/bench.h"

// ---- Random models and caches, made on the card ------------------------------------------------------------

struct Shape {
    const char *name;
    int layers, hidden, ffn, heads, kv_heads, head_dim, vocabulary;
    bool tied;
};

static void randomize(Gpu &m, bf16 *numbers, int64_t count, float scale) {
    m.for_each((count + 1023) / 1024, [=] HOST_DEVICE(int64_t item, Warp team) {
        for (int64_t i = item * 1024 + team.first(); i < count && i < (item + 1) * 1024; i += team.step()) {
            uint64_t x = (uint64_t)i * 0x9e3779b97f4a7c15ull;  // splitmix64
            x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
            x = (x ^ x >> 27) * 0x94d049bb133111ebull;
            from_float(numbers[i], ((float)(x >> 40) * 0x1p-23f - 1) * scale);
        }
    });
}

// Tensors without numbers: where they would stand in `bytes` bytes, which are counted.
static Model shape_of(const Shape &s, size_t &bytes) {
    Model model;
    Config &c = model.config;
    c.layers = s.layers, c.hidden = s.hidden, c.ffn = s.ffn, c.heads = s.heads;
    c.vocabulary = s.vocabulary, c.context = 131072, c.tied = s.tied;
    c.norm_epsilon = 1e-5;
    Kind kind = {s.kv_heads, s.head_dim, s.head_dim};
    kind.rope_theta = 500000;
    for (int layer = 0; layer < s.layers; layer++) add_layer(c.kinds, c.rows, kind);
    auto tensor = [&](int64_t rows, int64_t cols) {
        Tensor tensor = {(char *)(uintptr_t)bytes, DType::bf16, rows, cols};
        bytes += ((size_t)(rows * cols) * sizeof(bf16) + 255) / 256 * 256;
        return tensor;
    };
    bytes = 256;  // so that nothing is at nullptr
    model.embedding = model.head = tensor(s.vocabulary, s.hidden);
    if (!s.tied) model.head = tensor(s.vocabulary, s.hidden);
    model.final_norm = tensor(1, s.hidden);
    for (int i = 0, width = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim; i < s.layers; i++) {
        LayerWeights w;
        w.attention_norm = tensor(1, s.hidden), w.mlp_norm = tensor(1, s.hidden);
        w.query.weight = tensor(width, s.hidden), w.key.weight = tensor(kv, s.hidden);
        w.value.weight = tensor(kv, s.hidden), w.output.weight = tensor(s.hidden, width);
        w.gate.weight = tensor(s.ffn, s.hidden), w.up.weight = tensor(s.ffn, s.hidden);
        w.down.weight = tensor(s.hidden, s.ffn);
        model.layers.push_back(w);
    }
    model.weight_bytes = (int64_t)bytes;
    return model;
}

static Engine random_engine(const Shape &shape) {
    size_t bytes = 0;
    Engine engine{open_machine("cuda", 1), shape_of(shape, bytes)};
    Gpu &m = std::get<Gpu>(*engine.machine);
    engine.weights = m.reserve(bytes, "the weights", "take a larger card");
    randomize(m, (bf16 *)engine.weights.get(), (int64_t)(bytes / sizeof(bf16)), 1.7f / std::sqrt((float)shape.hidden));
    for_each_tensor(engine.model, [&](Tensor &tensor, bool) {
        if (tensor.data) tensor.data = (char *)engine.weights.get() + (size_t)tensor.data;
    });
    std::vector<float> frequencies = rope_frequencies(500000, engine.model.config.kinds[0].key_width, {});
    engine.a.kinds.resize(1);
    engine.a.kinds[0].frequencies.resize(m, frequencies.size());
    m.write(engine.a.kinds[0].frequencies.data(), frequencies.data(), frequencies.size() * sizeof(float));
    return engine;
}

// ---- Measuring ---------------------------------------------------------------------------------------------

static double bandwidth, matrix_rate;  // as they were last measured: bytes and operations a second

// Seconds of one run of work(i), the median of some.
template <class Work>
static double seconds_of(Gpu &m, int runs, Work work) {
    std::vector<double> seconds;
    for (int i = 0; i < runs + 3; i++) {
        m.wait();
        double start = now();
        work(i);
        m.wait();
        if (i > 2) seconds.push_back(now() - start);  // the first warm up
    }
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
}

static void print_line(const std::string &work, double seconds, double share, double bar, const char *of) {
    printf("%-66s %10.3f ms %6.1f %% of %s, bar %3.0f %%  %s\n", work.c_str(), seconds * 1e3, 100 * share, of,
           100 * bar, share >= bar ? "met" : "missed");
    fflush(stdout);
}

static Cache cache_of(Engine &engine, const Layout &layout, const Precision &type, int sequences, int capacity) {
    const Config &c = engine.model.config;
    const Kind &kind = c.kinds[0];
    CacheShape shape = {c.layers, kind.kv_heads, kind.key_width, kind.value_width, sequences, capacity};
    return open_cache(engine.memory(), {shape}, layout, type, type);
}

// Attention of one layer of a decoding step over `sequences` of `length` positions: all layers, recorded and replayed
// as a step is, so that none is in the L2; and a layer's share of the time.
static double attention_of(Engine &engine, const Layout &layout, const Precision &type, int sequences, int length,
                           double bar) {
    Gpu &m = std::get<Gpu>(*engine.machine);
    Cache cache = cache_of(engine, layout, type, sequences, length + 1);
    Batch batch;
    for (int t = 0; t < length; t += 64)  // in turn, so that pages of a sequence do not stand together
        for (int i = 0; i < sequences; i++) grow(cache, i, std::min(64, length - t));
    for (int i = 0; i < sequences; i++) batch.add(1, i, length - 1);
    Pass pass = begin_pass(engine.a, engine.memory(), engine.model.config, batch)[0];
    m.kept<fast::Between>().decoding = true;
    const int layers = cache.stores[0].shape.layers;
    auto all_layers = [&] {
        for (int layer = 0; layer < layers; layer++)
            fast::attention(m, ::attention_of(engine.a, engine.model, layer, cache.stores), pass);
    };
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t step = nullptr;
    all_layers();  // takes the memory that it needs
    check(cudaStreamBeginCapture(m.stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    all_layers();
    check(cudaStreamEndCapture(m.stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&step, graph, 0), "cudaGraphInstantiate");
    double taken = seconds_of(m, 20, [&](int) { check(cudaGraphLaunch(step, m.stream), "cudaGraphLaunch"); }) / layers;
    cudaGraphExecDestroy(step);
    cudaGraphDestroy(graph);
    const CacheView &view = cache.stores[0].view;
    double bytes = (double)sequences * length * (double)(view.keys.stride() + view.values.stride());
    std::string work = "attention of decoding, " + std::to_string(sequences) + " x " + std::to_string(length) +
                       " positions, " + name_of(type) + ", " + name_of(layout);
    print_line(work, taken, bytes / taken / bandwidth, bar, "the copies' bandwidth");
    return taken;
}

// Attention of one layer of a prompt of `tokens` tokens.
static void prefill_attention(Engine &engine, Cache &cache, int tokens) {
    Gpu &m = std::get<Gpu>(*engine.machine);
    Batch batch;
    for (int t = 0; t < tokens; t++) batch.add(1, 0, t);
    Pass pass = begin_pass(engine.a, engine.memory(), engine.model.config, batch)[0];
    m.kept<fast::Between>().decoding = false;
    double taken = seconds_of(m, 5, [&](int) {
        fast::attention(m, ::attention_of(engine.a, engine.model, 0, cache.stores), pass);
    });
    double operations = 4.0 * pass.heads.query * pass.heads.width * tokens * (tokens + 1) / 2.0;
    print_line("attention of prefill, a layer, " + std::to_string(tokens) + " tokens", taken,
               operations / taken / matrix_rate, 0.50, "the products' rate");
}

// A step of `sequences` sequences at short contexts: all layers, then with the logits, which come to the host. The
// bound: weights are read once, or multiplied with each sequence's vectors.
static void bench_company(Engine &engine, int sequences, int steps) {
    Gpu &m = std::get<Gpu>(*engine.machine);
    const Tensor &head = engine.model.head;
    Cache cache = cache_of(engine, Contiguous{}, BF16{}, sequences, 2 * steps + 16);
    std::vector<int> all, tokens(sequences, 1);
    for (int i = 0; i < sequences; i++) all.push_back(i), grow(cache, i, 8);
    auto print = [&](const char *what, double taken, double bytes, double bar) {
        double least = std::max(bytes / bandwidth, bytes * sequences / matrix_rate);
        print_line("decode, bf16, " + std::to_string(sequences) + " sequences, " + what, taken, least / taken, bar,
                   "the roofline");
    };
    double bytes = (double)engine.model.weight_bytes, of_head = (double)(head.rows * head.cols) * sizeof(bf16);
    auto layers = [&](int) {
        Batch batch;
        for (int i : all) batch.add(tokens[i], i, grow(cache, i, 1));
        forward(engine, batch, cache.stores);
    };
    print("layers", seconds_of(m, steps, layers), bytes - of_head, 0.50);
    print("logits, too", seconds_of(m, steps, [&](int) { decode(engine, cache, all, tokens); }), bytes, 0.50);
}

static void bench_all(bool small) {
    Shape one = {"Llama 3.2 1B", 16, 2048, 8192, 32, 8, 64, 128256, true};
    Shape eight = {"Llama 3.1 8B", 32, 4096, 14336, 32, 8, 128, 128256, false};
    int length = 32768, sequences = 8, tokens = 8192, steps = 128;
    if (small) {
        one = {"a tiny model", 2, 64, 128, 4, 2, 16, 100, true}, eight = {"another", 2, 64, 128, 4, 2, 16, 100, false};
        length = 256, sequences = 2, tokens = 128, steps = 8;
    }
    for (const Shape &shape : {one, eight}) {
        Engine engine = random_engine(shape);
        Gpu &m = std::get<Gpu>(*engine.machine);
        Roofline roofline = roofline_of(m, engine);
        bandwidth = roofline.bandwidth(), matrix_rate = roofline.matrix_rate();
        printf("%s, on %s: copies at %.0f GB/s, products at %.1f TFLOPS\n", shape.name, m.name().c_str(),
               bandwidth / 1e9, matrix_rate / 1e12);
        Cache cache = cache_of(engine, Contiguous{}, BF16{}, 1, std::max(tokens, 16 + steps));
        std::vector<int> prompt(tokens, 5);
        prefill_pass(engine, cache, 0, {1, 2, 3, 4, 5, 6, 7, 8});
        double taken = seconds_of(m, steps - 3, [&](int) { decode(engine, cache, {0}, {1}); });
        print_line("decode, bf16, batch 1, short context", taken, (double)engine.model.weight_bytes / taken / bandwidth,
                   shape.tied ? 0.80 : 0.90, "the copies' bandwidth");
        for (int company : {1, 4, 16, 64})
            if (shape.tied) bench_company(engine, company, small ? 1 : 20);
        if (shape.tied) continue;
        engine.chunk = tokens;
        taken = seconds_of(m, 3, [&](int) { rewind(cache, 0, 0), prefill_pass(engine, cache, 0, prompt); });
        double operations = (double)engine.model.weight_bytes * tokens +
                            4.0 * shape.layers * shape.heads * shape.head_dim * tokens * (tokens + 1) / 2.0;
        print_line("prefill, " + std::to_string(tokens) + " tokens", taken, operations / taken / matrix_rate, 0.60,
                   "the products' rate");
        prefill_attention(engine, cache, tokens);
        attention_of(engine, Contiguous{}, BF16{}, 1, length, 0.75);
        for (auto &[type, bar] :
             std::vector<std::pair<Precision, double>>{{BF16{}, 0.88}, {Int8{}, 0.80}, {FP8{}, 0.80}, {Int4{}, 0.65}})
            attention_of(engine, Contiguous{}, type, sequences, length, bar);
        attention_of(engine, Paged{}, BF16{}, sequences, length, 0.85);
    }
}

int main(int argc, char **argv) {
    try {
        bench_all(argc > 1 && !strcmp(argv[1], "--small"));
    } catch (const std::exception &error) {
        fprintf(stderr, "bench_gpu: %s\n", error.what());
        return 2;
    }
}
