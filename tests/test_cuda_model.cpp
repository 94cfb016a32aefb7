// A whole model on the card beside the same model on the CPU: naive and cached, every layout, the tokens that are
// generated, and what is told when there is no room. The CPU runs it with tests/cuda_on_cpu.h; nvcc, for a card.
// Run from the repository's root.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#define LLM_WITHOUT_MAIN
#ifndef __CUDACC__
#include "cuda_on_cpu.h"
#endif
#include "../llm.cu"

#include <doctest/doctest.h>

#include "reference.h"

static const std::string fixtures = "tests/fixtures/models/";

// ---- Helpers -----------------------------------------------------------------------------------------------

static Engine on_cpu(const std::string &name) { return Engine(load_model(fixtures + name), 1); }

static Engine on_card(const std::string &name) {
    Engine engine = on_cpu(name);
    move_to_gpu(engine);
    return engine;
}

static std::vector<int> random_tokens(const Engine &engine, int count, uint64_t seed = 1) {
    reference::Random random{seed};
    std::vector<int> tokens;
    for (int i = 0; i < count; i++) tokens.push_back((int)(random.bits() % (uint64_t)engine.model.config.vocabulary));
    return tokens;
}

static std::vector<int> part(const std::vector<int> &tokens, int begin, int end) {
    return {tokens.begin() + begin, tokens.begin() + end};
}

static Cache open_for(const Engine &engine, const Layout &layout, const Precision &type_k, const Precision &type_v,
                      int capacity, int sequences = 1) {
    const Config &config = engine.model.config;
    CacheShape shape{config.layers, config.kv_heads, config.head_dim, config.head_dim, sequences, capacity};
    shape.page = 4;
    shape.window = 34;
    shape.sinks = 2;
    return open_cache(shape, layout, type_k, type_v, engine.device());
}

static double relative_error(const std::vector<float> &values, const std::vector<float> &truth) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < truth.size(); i++) {
        difference += ((double)values[i] - truth[i]) * ((double)values[i] - truth[i]);
        size += (double)truth[i] * truth[i];
    }
    return std::sqrt(difference / size);
}

// Two ways of summing float32 stay within 1e-5 of each other, as the CPU and the reference outside do. With 16-bit
// weights passes of many rows round what each product reads to u of itself: five times a layer and once before the
// head, independent of each other; and attention rounds queries, keys, weights and values, four more a layer.
static double allowed_error(const Engine &engine) {
    DType type = engine.model.layers[0].query.weight.type;
    double u = type == DType::bf16 ? 0x1p-9 : 0x1p-12;
    return type == DType::f32 ? 1e-5 : u * std::sqrt(9.0 * engine.model.config.layers + 1);
}

// Logits of every position of a sequence: [0, decoded) in passes of `piece` tokens, then token by token.
static std::vector<float> cached_rows(Engine &engine, Cache &cache, int sequence, const std::vector<int> &tokens,
                                      int piece, int decoded) {
    std::vector<float> all;
    auto add = [&](const std::vector<float> &rows) { all.insert(all.end(), rows.begin(), rows.end()); };
    for (int begin = 0; begin < decoded; begin += piece) {
        std::vector<int> prompt = part(tokens, begin, std::min(begin + piece, decoded));
        prefill(engine, cache, sequence, prompt, [&](int rows) { add(logits(engine, 0, rows)); });
    }
    for (int t = decoded; t < (int)tokens.size(); t++) add(decode(engine, cache, {sequence}, {tokens[t]}));
    return all;
}

// ---- The two paths -----------------------------------------------------------------------------------------

TEST_CASE("naive and cached path on the card give the CPU's logits: every family") {
    for (const char *name : {"llama_gqa_9_on_3", "llama_bias", "llama_f16", "llama_bf16", "llama_rope_llama3",
                             "mistral_window", "qwen2_14_on_2", "qwen3", "llama_tied_with_head", "head_dim_80"}) {
        CAPTURE(name);
        Engine cpu = on_cpu(name), card = on_card(name);
        std::vector<int> tokens = random_tokens(cpu, 45);
        double allowed = allowed_error(cpu);
        forward_naive(cpu, tokens);
        std::vector<float> truth = logits(cpu, 0, (int)tokens.size());
        forward_naive(card, tokens);
        CHECK(relative_error(logits(card, 0, (int)tokens.size()), truth) <= allowed);
        Cache cache = open_for(card, Contiguous{}, F32{}, F32{}, 45);
        CHECK(relative_error(cached_rows(card, cache, 0, tokens, 33, 38), truth) <= allowed);
    }
}

#ifdef CUDA_ON_CPU
TEST_CASE("no kernel touches what those before it write until it has waited for them") {
    for (const char *name : {"qwen3", "llama_bf16", "llama_f16"}) {
        CAPTURE(name);
        Engine card = on_card(name);
        std::vector<int> tokens = random_tokens(card, 45);
        auto all_rows = [&] {
            std::vector<float> rows = forward_naive(card, part(tokens, 0, 20));
            auto add = [&](auto layout, auto type_k, auto type_v) {
                Cache cache = open_for(card, layout, type_k, type_v, 45);
                std::vector<float> more = cached_rows(card, cache, 0, tokens, 33, 41);
                rows.insert(rows.end(), more.begin(), more.end());
            };
            add(Contiguous{}, F32{}, BF16{});
            add(Paged{}, Int8{}, F16{});
            add(Ring{}, Int4{}, Int2{});
            return rows;
        };
        std::vector<float> rows = all_rows();
        cuda_on_cpu::early_start = true;
        CHECK(all_rows() == rows);
        cuda_on_cpu::early_start = false;
    }
}
#endif

TEST_CASE("a model in f32 is exact on the card: cached within 1e-4 of naive") {
    Engine card = on_card("llama_gqa_9_on_3");
    std::vector<int> tokens = random_tokens(card, 40);
    Cache cache = open_for(card, Contiguous{}, F32{}, F32{}, 40);
    std::vector<float> rows = cached_rows(card, cache, 0, tokens, 7, 30);
    forward_naive(card, tokens);
    std::vector<float> naive = logits(card, 0, 40);
    double most = 0;
    for (size_t i = 0; i < naive.size(); i++) most = std::max(most, (double)std::fabs(naive[i] - rows[i]));
    CHECK(most <= 1e-4);
}

// With the same cache both compute the same but for rounding: a stored number may fall on the other side of a border
// between two codes, which moves it by one step; that is a relative 2 u of the number, or of the largest in its group.
TEST_CASE("every layout and precision on the card is close to the same on the CPU") {
    Engine cpu = on_cpu("llama_gqa_9_on_3"), card = on_card("llama_gqa_9_on_3");
    std::vector<int> tokens = random_tokens(cpu, 75);
    for_each_type<Layout>([&](auto layout) {
        for_each_type<Precision>([&](auto type) {
            CAPTURE(layout.name);
            CAPTURE(type.name);
            Cache there = open_for(card, layout, type, type, 75), here = open_for(cpu, layout, type, type, 75);
            std::vector<float> rows = cached_rows(card, there, 0, tokens, 30, 60);
            std::vector<float> truth = cached_rows(cpu, here, 0, tokens, 30, 60);
            CHECK(relative_error(rows, truth) <= 1e-5 + 2 * type.unit_roundoff * 0.1);
        });
    });
}

TEST_CASE("layouts agree bit for bit, and a sequence has its bits alone and in a batch") {
    Engine card = on_card("qwen2_14_on_2");
    std::vector<int> tokens = random_tokens(card, 33), others = random_tokens(card, 33, 2);
    Cache contiguous = open_for(card, Contiguous{}, F16{}, Int8{}, 40),
          paged = open_for(card, Paged{}, F16{}, Int8{}, 40);
    Cache ring = open_for(card, Ring{}, F16{}, Int8{}, 40);
    Cache batch = open_for(card, Paged{}, F16{}, Int8{}, 40, 3);
    prefill(card, paged, 0, {1});
    shrink(paged, 0, 0);
    std::vector<float> rows = cached_rows(card, contiguous, 0, tokens, 20, 20);
    CHECK(reference::same_bits(rows, cached_rows(card, paged, 0, tokens, 20, 20)));
    CHECK(reference::same_bits(rows, cached_rows(card, ring, 0, tokens, 20, 20)));
    prefill(card, batch, 2, part(others, 0, 25));
    prefill(card, batch, 1, part(tokens, 0, 20));
    size_t vocabulary = card.model.config.vocabulary;
    for (int t = 20; t < 28; t++) {
        std::vector<float> both = decode(card, batch, {2, 1}, {others[t + 5], tokens[t]});
        std::vector<float> alone(rows.begin() + t * vocabulary, rows.begin() + (t + 1) * vocabulary);
        CHECK(reference::same_bits({both.begin() + vocabulary, both.end()}, alone));
    }
}

TEST_CASE("a cut sequence goes on as one that never was longer; a recorded step serves one cache after another") {
    Engine card = on_card("llama_gqa_9_on_3");
    std::vector<int> tokens = random_tokens(card, 60);
    for_each_type<Precision>([&](auto type) {
        CAPTURE(type.name);
        Cache whole = open_for(card, Paged{}, type, type, 60), cut = open_for(card, Paged{}, type, type, 60);
        std::vector<float> straight = cached_rows(card, whole, 0, part(tokens, 0, 42), 38, 38);
        cached_rows(card, cut, 0, part(tokens, 0, 38), 38, 38);
        cached_rows(card, cut, 0, part(tokens, 42, 46), 38, 0);
        shrink(cut, 0, 38);
        std::vector<float> again = cached_rows(card, cut, 0, part(tokens, 38, 42), 38, 0);
        std::vector<float> last(straight.end() - (std::ptrdiff_t)again.size(), straight.end());
        CHECK(reference::same_bits(again, last));
    });
}

// ---- The program -------------------------------------------------------------------------------------------

static Generation generated(const std::vector<std::string> &flags, std::vector<int> &tokens) {
    Options options = parse_options(flags);
    Session session = open_session(options);
    Generation result = generate(session, options, nullptr, [](const std::string &) {});
    tokens = session.tokens;
    return result;
}

TEST_CASE("the same tokens are generated, greedy and sampled, naive and cached") {
    for (std::vector<std::string> more : {std::vector<std::string>{},
                                          {"--cache", "none"},
                                          {"--kv", "int8"},
                                          {"--temp", "1", "--seed", "3"},
                                          {"--cache", "ring", "--window", "30"}}) {
        std::vector<std::string> flags = {
            "generate", "-m", fixtures + "llama_gqa_9_on_3", "--ids", "1,2,3,4,5", "-n", "12", "--ignore-eos"};
        flags.insert(flags.end(), more.begin(), more.end());
        std::vector<int> here, there;
        flags.insert(flags.end(), {"--device", "cpu"});
        generated(flags, here);
        flags.back() = "cuda";
        CHECK(generated(flags, there).decoded == 11);
        CHECK(here == there);
    }
}

TEST_CASE("diff, eval and bench run on the card") {
    const std::string model = fixtures + "llama_bf16";
    CHECK(run({"diff", "-m", model, "--ids", "1,2,3,4,5,6,7", "-n", "6", "--ignore-eos", "--device", "cuda"}) == 0);
    CHECK(run({"diff", "-m", model, "--ids", "1,2,3", "-n", "40", "--ignore-eos", "--cache", "ring", "--window", "20",
               "--sinks", "2", "--kv", "bf16", "--device", "cuda"}) == 0);
    CHECK(run({"eval", "-m", model, "--ids", "1,2,3,4,5,6,7,8,9", "--kv", "int4", "--repeats", "1", "--device", "cuda",
               "--json"}) == 0);
    CHECK(run({"bench", "-m", model, "--kv", "f16,int4", "-n", "2", "--depth", "0,40", "--prefill", "33", "--repeats",
               "1", "--device", "cuda"}) == 0);
}

static std::string failure_of(const std::vector<std::string> &arguments) {
    try {
        run(arguments);
    } catch (const Error &error) {
        return error.what();
    }
    return "";
}

TEST_CASE("steps of caches that take turns are recorded once each, also with a naive pass between") {
    Engine card = on_card("llama_gqa_9_on_3");
    std::vector<Cache> caches;
    caches.push_back(open_for(card, Contiguous{}, F32{}, F32{}, 64));
    caches.push_back(open_for(card, Paged{}, F32{}, F32{}, 64));
    caches.push_back(open_for(card, Ring{}, Int4{}, Int2{}, 64));
    for (Cache &cache : caches) prefill(card, cache, 0, {1, 2});
    forward_naive(card, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});  // room for as many rows as come
    auto round = [&] {
        std::vector<std::vector<float>> logits;
        for (Cache &cache : caches) {
            logits.push_back(decode(card, cache, {0}, {3}));
            forward_naive(card, {1, 2, 3});
        }
        return logits;
    };
    auto first = round();
    REQUIRE(card.gpu->graphs.size() == caches.size());
    const StepGraph *newest = &card.gpu->graphs.front();
    for (int i = 0; i < 3; i++) round();
    CHECK(card.gpu->graphs.size() == caches.size());
    CHECK(&card.gpu->graphs.front() == newest);
    // Room that moves takes all of them with it, and the next steps are right again.
    for (Cache &cache : caches) shrink(cache, 0, 2);
    forward_naive(card, std::vector<int>(60, 5));
    CHECK(card.gpu->graphs.empty());
    CHECK(round() == first);
}

TEST_CASE("a recorded step is for one cache, down to its sinks and its newest blocks") {
    Engine card = on_card("llama_gqa_9_on_3");
    Cache cache = open_for(card, Ring{}, Int4{}, Int2{}, 64);
    prefill(card, cache, 0, {1, 2});
    decode_pass(card, cache, {0}, {3});
    const StepGraph &graph = card.gpu->graphs.front();
    const CacheView view = view_of(cache);
    CHECK(graph.is_for(view, 1));
    CHECK_FALSE(graph.is_for(view, 2));
    for (auto side : {&CacheView::keys, &CacheView::values, &CacheView::recent_keys, &CacheView::recent_values,
                      &CacheView::sink_keys, &CacheView::sink_values}) {
        CacheView other = view;
        (other.*side).data++;
        CHECK_FALSE(graph.is_for(other, 1));
        (other.*side) = view.*side;
        (other.*side).rows_per_layer++;
        CHECK_FALSE(graph.is_for(other, 1));
    }
    CacheView other = view;
    other.type_v = Precision(Int4{});
    CHECK_FALSE(graph.is_for(other, 1));
}

// Leaves a byte where the next call will have its own.
__attribute__((noinline)) static void soil_stack(char byte) {
    volatile char below[4096];
    for (volatile char &place : below) place = byte;
}

TEST_CASE("a recorded step is for a cache's view, whatever was in memory before the view") {
    Engine card = on_card("llama_gqa_9_on_3");
    for_each_type<Layout>([&](auto layout) {
        CAPTURE(layout.name);
        Cache cache = open_for(card, layout, F16{}, Int8{}, 64);
        prefill(card, cache, 0, {1, 2});
        Sampler greedy{};
        soil_stack(1);
        decode_pass(card, cache, {0}, {3});
        next_token(card, greedy, 0, 3);
        const StepGraph &graph = card.gpu->graphs.front();
        for (char byte : {'\0', '\x5a', '\xff'}) {
            alignas(CacheView) char bytes[sizeof(CacheView)];
            memset(bytes, byte, sizeof bytes);
            soil_stack(byte);
            CHECK(graph.is_for(*new (bytes) CacheView(view_of(cache)), 1));
        }
        size_t recorded = card.gpu->graphs.size();
        decode_pass(card, cache, {0}, {4});
        CHECK(card.gpu->graphs.size() == recorded);
    });
}

TEST_CASE("damaged weights are told, whoever computes") {
    Engine card = on_card("llama_gqa_9_on_3");
    Cache cache = open_for(card, Contiguous{}, F32{}, F32{}, 8);
    prefill(card, cache, 0, {1, 2});
    float bad = NAN;
    copy(card.gpu->device, (char *)card.gpu->model.final_norm.data, &bad, sizeof bad);
    decode_pass(card, cache, {0}, {3});
    Sampler greedy{};
    CHECK_THROWS_WITH_AS(next_token(card, greedy, 0, 2), doctest::Contains("are the weights damaged?"), Error);
}

#ifdef CUDA_ON_CPU
TEST_CASE("without a card the same program computes on the CPU and says why in one line") {
    Options options;
    options.threads = 1;
    int cards = std::exchange(cuda_on_cpu::devices, 0);
    Engine engine = open_engine(options, fixtures + "llama_bf16");
    std::string line = failure_of({"generate", "-m", fixtures + "llama_bf16", "--ids", "1", "--device", "cuda"});
    cuda_on_cpu::devices = cards;
    CHECK(engine.gpu == nullptr);
    CHECK(engine.device_name == "CPU, 1 thread (no CUDA-capable device is detected)");
    CHECK(line == "--device cuda: no CUDA-capable device is detected: --device auto computes on the CPU then");
    CHECK(cudaGetLastError() == cudaErrorNoDevice);
}

TEST_CASE("a card for which the program was not built is as good as none") {
    bool built = std::exchange(cuda_on_cpu::built_for_card, false);
    Engine engine = open_engine(Options(), fixtures + "llama_bf16");
    std::string line = failure_of({"generate", "-m", fixtures + "llama_bf16", "--ids", "1", "--device", "cuda"});
    cuda_on_cpu::built_for_card = built;
    CHECK(engine.gpu == nullptr);
    CHECK(line ==
          "--device cuda: a CPU that plays a GPU has compute capability 9.0; this program was built for others: "
          "--device auto computes on the CPU then");
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("an error of the card is told with the call and what helps against it") {
    auto line = [](cudaError_t error) {
        try {
            check(error, "cudaCall");
        } catch (const Error &error) {
            return std::string(error.what());
        }
        return std::string();
    };
    CHECK(line(cudaSuccess) == "");
    CHECK(line(cudaErrorMemoryAllocation) ==
          "CUDA: cudaCall: out of memory: lower -c, or free memory of the card; --device cpu needs no card");
    CHECK(line(cudaErrorIllegalAddress) ==
          "CUDA: cudaCall: an illegal memory access was encountered: this program is at fault, make sanitize-gpu says "
          "where; --device cpu needs no card");
    CHECK(line(cudaErrorInvalidValue) ==
          "CUDA: cudaCall: invalid argument: another driver or card may help; --device cpu needs no card");
}
#endif

TEST_CASE("a model or a cache without room on the card is told in one line") {
    std::string line = failure_of({"generate", "-m", fixtures + "llama_bf16", "--ids", "1", "--device", "cuda",
                                   "--cache", "ring", "--window", "16000000", "--kv", "f32"});
    if (!line.empty()) {  // a card may be that large
        CHECK(line.find("the KV cache needs") != std::string::npos);
        CHECK(line.find("lower -c or --window") != std::string::npos);
    }
#ifdef CUDA_ON_CPU
    Engine engine = on_cpu("llama_bf16");
    size_t card = std::exchange(cuda_on_cpu::properties.totalGlobalMem, 1000);
    line = failure_of({"generate", "-m", fixtures + "llama_bf16", "--ids", "1", "--device", "cuda"});
    cuda_on_cpu::properties.totalGlobalMem = card;
    CHECK(line.find("the weights need 0.000 GiB") != std::string::npos);
    CHECK(line.find("parameters of this type") != std::string::npos);
    CHECK(line.find("--device cpu") != std::string::npos);
#endif
}
