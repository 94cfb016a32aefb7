// The table of docs/gpu.md: decoding, prefill, and attention alone, beside what this card copies and multiplies, which
// is measured in the same run, just before each line, and stands in its last column. Models have the shapes of
// Llama 3.2 1B and 3.1 8B and random weights, made on the card. `make bench-gpu` builds and runs it; --small is for
// trying it where there is no card.
#define LLM_WITHOUT_MAIN
#ifndef __CUDACC__
#include "cuda_on_cpu.h"
#endif
#include "../llm.cu"

// ---- Random models and caches, made on the card ------------------------------------------------------------

struct Shape {
    const char *name;
    int layers, hidden, ffn, heads, kv_heads, head_dim, vocabulary, context;
    bool tied;
};

__global__ void random_weights_kernel(bf16 *weights, int64_t count, float scale) {
    wait_for_previous();
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t x = (uint64_t)i * 0x9e3779b97f4a7c15ull;  // splitmix64
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ x >> 27) * 0x94d049bb133111ebull;
        from_float(weights[i], ((float)(x >> 40) * 0x1p-23f - 1) * scale);
    }
}

// Tensors and memory for them, of which the first `total` bytes are taken.
struct Weights {
    const Device &device;
    std::shared_ptr<void> memory;
    size_t total = 0;
    Tensor add(int64_t rows, int64_t cols, float scale) {
        Tensor tensor = {(char *)memory.get() + total, DType::bf16, rows, cols};
        total += ((size_t)(rows * cols) * sizeof(bf16) + 255) / 256 * 256;
        if (memory) launch(device, {dim3(1024), 256}, random_weights_kernel, (bf16 *)tensor.data, rows * cols, scale);
        return tensor;
    }
};

static void add_weights(Weights &weights, Model &model) {
    const Config &c = model.config;
    int queries = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
    auto matrix = [&](int rows, int cols) {
        return Linear{weights.add(rows, cols, 1.7f / std::sqrt((float)cols)), {}};
    };
    model.embedding = model.head = weights.add(c.vocabulary, c.hidden, 1);
    if (!c.tied) model.head = weights.add(c.vocabulary, c.hidden, 0.03f);
    model.final_norm = weights.add(1, c.hidden, 1);
    model.layers.assign(c.layers, {});
    for (LayerWeights &layer : model.layers) {
        layer.attention_norm = weights.add(1, c.hidden, 1);
        layer.mlp_norm = weights.add(1, c.hidden, 1);
        layer.query = matrix(queries, c.hidden);
        layer.key = matrix(kv, c.hidden), layer.value = matrix(kv, c.hidden);
        layer.output = matrix(c.hidden, queries);
        layer.gate = matrix(c.ffn, c.hidden), layer.up = matrix(c.ffn, c.hidden);
        layer.down = matrix(c.hidden, c.ffn);
    }
}

static Engine random_engine(const Shape &shape) {
    Model model;
    model.config.layers = shape.layers, model.config.hidden = shape.hidden, model.config.ffn = shape.ffn;
    model.config.heads = shape.heads, model.config.kv_heads = shape.kv_heads, model.config.head_dim = shape.head_dim;
    model.config.vocabulary = shape.vocabulary, model.config.context = shape.context, model.config.tied = shape.tied;
    model.config.norm_epsilon = 1e-5, model.config.rope_theta = 500000;
    auto gpu = std::make_unique<Gpu>();
    Weights counted{gpu->device, nullptr};
    add_weights(counted, model);
    model.weight_bytes = (int64_t)counted.total;
    Weights weights{gpu->device, device_memory(gpu->device, counted.total, "the weights", "take a larger card")};
    gpu->weights = weights.memory;
    add_weights(weights, model);
    gpu->model.config = model.config;
    gpu->model.embedding = model.embedding, gpu->model.head = model.head, gpu->model.final_norm = model.final_norm;
    gpu->model.layers = model.layers;
    Engine engine(std::move(model), 1);
    gpu->frequencies = upload(gpu->device, engine.frequencies);
    engine.gpu = std::move(gpu);
    return engine;
}

// Fills all rows of a cache on the card with blocks of 32 positions that the CPU encoded from random vectors.
static void fill_rows(const Device &device, Cache &cache) {
    const CacheShape &s = cache.shape;
    CacheShape one{1, s.kv_heads, s.key_width, s.value_width, 1, group_size};
    Cache block = open_cache(one, Contiguous{}, cache.type_k, cache.type_v);
    std::mt19937 random(0);
    std::vector<float> keys(group_size * s.kv_heads * s.key_width), values(group_size * s.kv_heads * s.value_width);
    for (auto *vectors : {&keys, &values})
        for (float &number : *vectors) number = (float)random() * 0x1p-31f - 1;
    for (int head = 0; head < s.kv_heads; head++)
        store_span(block, 0, {0, group_size, 0, 0, 0, group_size}, head, keys.data(), values.data());
    auto repeat = [&](const CacheRows &from, const CacheRows &to) {
        size_t have = std::min(from.bytes(1), to.bytes(s.layers)), all = to.bytes(s.layers);
        copy(device, to.data, from.data, have);
        for (; have < all; have *= 2) copy(device, to.data + have, to.data, std::min(have, all - have));
    };
    repeat(block.keys, cache.keys);
    repeat(block.values, cache.values);
    device.wait();
}

// ---- Measuring ---------------------------------------------------------------------------------------------

static double bandwidth, matrix_rate;  // as they were last measured: bytes and operations a second

static void measure_card(const Device &device) {
    bandwidth = copy_bandwidth(device);
    matrix_rate = MatrixRate<bf16>(device).measure();
}

// Seconds of one run of work(), on the card's own clock: the median of some batches of runs.
template <class Work>
static double seconds_of(const Device &device, int runs, Work work) {
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "cudaEventCreate");
    check(cudaEventCreate(&end), "cudaEventCreate");
    std::vector<double> seconds;
    for (int batch = 0; batch < 8; batch++) {
        float milliseconds = 0;
        check(cudaEventRecord(begin, device.stream), "cudaEventRecord");
        for (int i = 0; i < runs; i++) work(i);
        check(cudaEventRecord(end, device.stream), "cudaEventRecord");
        check(cudaEventSynchronize(end), "cudaEventSynchronize");
        check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
        if (batch > 0) seconds.push_back(milliseconds / 1e3 / runs);  // the first warms up
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return median(seconds);
}

// `of`: what the share is a share of, in words.
static void print_line(const char *work, double seconds, double rate, const char *unit, double share, double bar,
                       const std::string &of) {
    printf("%-58s %10.3f %10.1f %-8s %6.1f %%  %4.0f %%  %-6s  %s\n", work, seconds * 1e3, rate, unit, 100 * share,
           100 * bar, share >= bar ? "met" : "missed", of.c_str());
    fflush(stdout);
}

static std::string copies() { return std::to_string((int)(bandwidth / 1e9)) + " GB/s copied"; }
static std::string products() { return std::to_string((int)(matrix_rate / 1e12)) + " TFLOPS multiplied"; }

static void bench_decoding(Engine &engine, const Shape &shape, int steps, double bar) {
    const Config &config = engine.model.config;
    CacheShape room{config.layers, config.kv_heads, config.head_dim, config.head_dim, 1, 16 + steps};
    Cache cache = open_cache(room, Contiguous{}, BF16{}, BF16{}, engine.device());
    prefill_pass(engine, cache, 0, bench_tokens(8, config.vocabulary));
    Sampler greedy{};
    std::vector<double> seconds;
    int token = 1;
    for (int i = 0; i < steps; i++) {
        double start = now();
        decode_pass(engine, cache, {0}, {token});
        token = next_token(engine, greedy, 0, 8 + i);
        if (i > 2) seconds.push_back(now() - start);
    }
    double bytes = weights_read(engine.model) + cache_read(engine.model, cache, 8 + steps / 2), taken = median(seconds);
    char work[100];
    snprintf(work, sizeof work, "decode, %s, bf16, batch 1, short context", shape.name);
    print_line(work, taken, 1 / taken, "tokens/s", bytes / taken / bandwidth, bar, copies());
}

static void bench_prefill(Engine &engine, const Shape &shape, int tokens, double bar) {
    const Config &config = engine.model.config;
    CacheShape room{config.layers, config.kv_heads, config.head_dim, config.head_dim, 1, tokens};
    Cache cache = open_cache(room, Contiguous{}, BF16{}, BF16{}, engine.device());
    std::vector<int> prompt = bench_tokens(tokens, config.vocabulary);
    double taken = seconds_of(engine.gpu->device, 1, [&](int) {
        shrink(cache, 0, 0);
        prefill_pass(engine, cache, 0, prompt);
    });
    char work[100];
    snprintf(work, sizeof work, "prefill, %s, %d tokens", shape.name, tokens);
    double operations = operations_of(engine.model, cache.layout, 0, tokens, 1);
    print_line(work, taken, operations / taken / 1e12, "TFLOPS", operations / taken / matrix_rate, bar, products());
}

// Attention of one decoding step over `sequences` of `length` positions. Several layers, so that none is left in the
// L2.
static double bench_attention(const Device &device, const Layout &layout, const Precision &type, const Heads &heads,
                              int sequences, int length, int layers, double bar) {
    CacheShape shape{layers, heads.kv, heads.width, heads.width, sequences, length};
    Cache cache = open_cache(shape, layout, type, type, &device);
    fill_rows(device, cache);
    std::vector<int> order(sequences), positions(sequences, length - 1);
    for (int i = 0; i < sequences; i++) order[i] = i;
    for (int t = 0; t < length; t += 64)  // in turn, so that pages of a sequence do not stand together
        for (int i = 0; i < sequences; i++) grow(cache, i, std::min(64, length - t));
    std::vector<Span> spans = spans_of(order.data(), positions.data(), sequences, 1, false);
    DeviceArray<Span> rows = upload(device, spans);
    size_t width = (size_t)sequences * heads.query * heads.width;
    DeviceArray<float> query = upload(device, std::vector<float>(width, 0.1f)),
                       out = upload(device, std::vector<float>(width));
    DeviceScratch scratch;
    prepare_scratch(device, scratch, heads, heads.width, sequences, length);
    double taken = seconds_of(device, 4 * layers, [&](int i) {
        attend_rows(device, scratch,
                    {out.data(), query.data(), nullptr, nullptr, view_of(cache), i % layers, {}, heads, nullptr},
                    rows.data(), sequences);
    });
    double bytes = (double)sequences * length * (cache.keys.stride() + cache.values.stride());
    char work[100];
    snprintf(work, sizeof work, "attention of decoding, %d x %d positions, %s, %s", sequences, length, name_of(type),
             name_of(layout));
    if (bar > 0) print_line(work, taken, bytes / taken / 1e9, "GB/s", bytes / taken / bandwidth, bar, copies());
    return taken;
}

static void bench_chunk(const Device &device, const Heads &heads, int tokens, double bar) {
    CacheShape shape{1, heads.kv, heads.width, heads.width, 1, tokens};
    Cache cache = open_cache(shape, Contiguous{}, BF16{}, BF16{}, &device);
    fill_rows(device, cache);
    grow(cache, 0, tokens);
    size_t width = (size_t)tokens * heads.query * heads.width;
    DeviceArray<float> query = upload(device, std::vector<float>(width, 0.1f)),
                       out = upload(device, std::vector<float>(width));
    double taken = seconds_of(device, 2, [&](int) {
        attend_chunk(device, {out.data(), query.data(), nullptr, nullptr, view_of(cache), 0, {}, heads, nullptr},
                     {0, tokens, 0, 0, 0, tokens}, false);
    });
    double operations = 4.0 * heads.query * heads.width * ((double)tokens * (tokens + 1) / 2);
    char work[100];
    snprintf(work, sizeof work, "attention of prefill, %d tokens, %d heads on %d of %d", tokens, heads.query, heads.kv,
             heads.width);
    print_line(work, taken, operations / taken / 1e12, "TFLOPS", operations / taken / matrix_rate, bar, products());
}

// ---- The table ---------------------------------------------------------------------------------------------

static void bench_all(bool small) {
    Shape one = {"Llama 3.2 1B", 16, 2048, 8192, 32, 8, 64, 128256, 131072, true};
    Shape eight = {"Llama 3.1 8B", 32, 4096, 14336, 32, 8, 128, 128256, 131072, false};
    Heads heads = {32, 8, 128};
    int length = 32768, sequences = 8, tokens = 8192, steps = 128;
    if (small) {
        one = {"a tiny model", 2, 64, 128, 4, 2, 16, 100, 512, true};
        eight = {"another", 2, 64, 128, 4, 2, 16, 100, 512, false};
        heads = {4, 2, 16}, length = 256, sequences = 2, tokens = 128, steps = 8;
    }
    {
        Device device;
        int driver = 0;
        check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
        char date[16];
        time_t now = time(nullptr);
        strftime(date, sizeof date, "%F", localtime(&now));
        printf("make bench-gpu, %s, %s, driver for CUDA %d.%d\n", date, device.properties.name, driver / 1000,
               driver / 10 % 100);
        printf("%-58s %10s %10s %-8s %8s  %6s  %-6s  %s\n", "", "ms", "rate", "", "share", "bar", "", "of");
        auto attention = [&](const Layout &layout, const Precision &type, int count, int layers, double bar) {
            measure_card(device);
            return bench_attention(device, layout, type, heads, count, length, layers, bar);
        };
        attention(Contiguous{}, BF16{}, sequences, 2, 0.88);
        attention(Contiguous{}, Int8{}, sequences, 2, 0.80);
        attention(Contiguous{}, FP8{}, sequences, 2, 0.80);
        attention(Contiguous{}, Int4{}, sequences, 2, 0.65);
        attention(Contiguous{}, BF16{}, 1, 8, 0.75);
        double contiguous = attention(Contiguous{}, BF16{}, sequences, 2, 0);
        double paged = attention(Paged{}, BF16{}, sequences, 2, 0);
        print_line("pages of 16 against contiguous, bf16", paged, contiguous / paged, "x", contiguous / paged, 0.97,
                   "contiguous");
        measure_card(device);
        bench_chunk(device, heads, tokens, 0.50);
    }
    for (const Shape &shape : {one, eight}) {
        Engine engine = random_engine(shape);
        measure_card(engine.gpu->device);
        bench_decoding(engine, shape, steps, shape.tied ? 0.80 : 0.90);
        if (shape.tied) continue;
        measure_card(engine.gpu->device);
        bench_prefill(engine, shape, tokens, 0.60);
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
