// A whole model on the card beside the same model on the CPU: naive and cached, every layout, recorded steps, and what
// is told when there is no card or no room. The CPU runs it with tests/cuda_on_cpu.h; nvcc, for a card.
// Run from the repository's root.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#ifndef __CUDACC__
#include "cuda_on_cpu.h"
#endif
#include "scene.h"

using namespace scene;
using reference::relative_error;

// ---- Helpers -----------------------------------------------------------------------------------------------

static Engine on_card(const std::string &name) {
    return open_engine(load_model(fixtures + name), open_machine("cuda", 1));
}

static Cache open_for(Engine &engine, const Layout &layout, const Precision &type_k, const Precision &type_v,
                      int capacity, int sequences = 1) {
    return cache_for(engine, type_k, type_v, capacity, {layout, 4, 34, 2}, sequences);
}

// Two ways of summing float32 stay within 1e-5 of each other, as the CPU and the reference outside do. With 16-bit
// weights passes of many tokens round what each product reads to u of itself: five times a layer and once before the
// head, independent of each other; and attention rounds queries, keys, weights and values, four more a layer.
static double allowed_error(const Engine &engine) {
    DType type = engine.model.layers[0].query.weight.type;
    double u = type == DType::bf16 ? 0x1p-9 : 0x1p-12;
    return type == DType::f32 ? 1e-5 : u * std::sqrt(9.0 * engine.model.config.layers + 1);
}

static Gpu &gpu_of(Engine &engine) { return std::get<Gpu>(*engine.machine); }
static fast::StepGraphs &graphs_of(Engine &engine) { return gpu_of(engine).kept<fast::StepGraphs>(); }
static int recorded(Engine &engine) {
    int count = 0;
    for (const fast::StepGraph &graph : graphs_of(engine).list) count += graph.step != nullptr;
    return count;
}

// ---- The two paths -----------------------------------------------------------------------------------------

TEST_CASE("naive and cached path on the card give the CPU's logits: every family") {
    for (const char *name : {"llama_gqa_9_on_3",
                             "llama_bias",
                             "llama_f16",
                             "llama_bf16",
                             "mistral_window",
                             "qwen2_14_on_2",
                             "qwen3",
                             "llama_tied_with_head",
                             "head_dim_80",
                             "qwen2_window",
                             "gemma3",
                             "gemma3_vision",
                             "gemma4_shared",
                             "granite_swa",
                             "granite",
                             "smollm3",
                             "olmo2",
                             "phi3",
                             "phi3_longrope_short",
                             "ministral3",
                             "qwen2_yarn",
                             "gemma4",
                             "lfm2",
                             "lfm2_bias"}) {
        CAPTURE(name);
        Engine cpu = engine_of(fixtures + name), card = on_card(name);
        Tokens tokens = random_tokens(cpu, 45);
        double allowed = allowed_error(cpu);
        Vector truth = naive_rows(cpu, tokens);
        CHECK(relative_error(naive_rows(card, tokens), truth) <= allowed);
        Cache cache = open_for(card, Contiguous{}, F32{}, F32{}, 45);
        Vector rows = cached_rows(card, cache, 0, tokens, 33, 38);
        CHECK(relative_error(rows, truth) <= allowed);
        double most = 0;
        for (size_t i = 0; i < rows.size(); i++) most = std::max(most, (double)std::fabs(rows[i] - truth[i]));
        if (allowed == 1e-5) CHECK(most <= 1e-4);
    }
}

TEST_CASE("short convolutions on the card give the CPU's logits, in every layout, prefilled, decoded, recorded") {
    for (DType type : {DType::f32, DType::bf16}) {
        Shape shape = {0, 64, 96, 4, 0, 0, 50, type};
        Layer biased = {convolution_of(4, 64)}, states = {convolution_of(3, 64)};
        biased.biased = true;
        shape.list = {biased, {kind_of(2, 16)}, states, states};
        Engine cpu = engine_of(random_model(shape)), card = open_engine(random_model(shape), open_machine("cuda", 1));
        Tokens tokens = random_tokens(cpu, 45);
        const double allowed = allowed_error(cpu);
        const Vector truth = naive_rows(cpu, tokens);
        CHECK(relative_error(naive_rows(card, tokens), truth) <= allowed);
        for (const Layout &layout : all_of<Layout>()) {
            Cache cache = cache_for(card, F32{}, F32{}, 45, {layout, 4, 60, 2}, 2);
            prefill(card, cache, 1, {1, 2, 3});
            CHECK(relative_error(cached_rows(card, cache, 0, tokens, 33, 38), truth) <= allowed);
        }
        CHECK(recorded(card) > 0);
    }
}

// With the same cache both compute the same but for rounding: a stored number may fall on the other side of a border
// between two codes, which moves it by one step; that is a relative 2 u of the number, or of the largest in its group.
TEST_CASE("every layout and precision on the card is close to the same on the CPU") {
    Engine cpu = engine_of(fixtures + "llama_gqa_9_on_3"), card = on_card("llama_gqa_9_on_3");
    Tokens tokens = random_tokens(cpu, 70);
    for (const Layout &layout : all_of<Layout>()) {
        for_each_type<Precision>([&](auto type) {
            CAPTURE(name_of(layout));
            CAPTURE(std::string(type.name));
            Cache there = open_for(card, layout, type, type, 70), here = open_for(cpu, layout, type, type, 70);
            Vector rows = cached_rows(card, there, 0, tokens, 30, 60);
            CHECK(relative_error(rows, cached_rows(cpu, here, 0, tokens, 30, 60)) <= 1e-5 + 0.2 * type.unit_roundoff);
        });
    }
}

#ifdef CUDA_ON_CPU
TEST_CASE("no kernel touches what those before it write until it has waited for them") {
    for (const char *name : {"qwen3", "llama_bf16", "gemma4_shared", "granite_swa", "lfm2_bias"}) {
        CAPTURE(name);
        Engine card = on_card(name);
        Tokens tokens = random_tokens(card, 45);
        auto all_rows = [&] {
            Vector rows = forward_naive(card, part(tokens, 0, 20));
            auto add = [&](auto layout, auto type_k, auto type_v) {
                Cache cache = open_for(card, layout, type_k, type_v, 45);
                append(rows, cached_rows(card, cache, 0, tokens, 33, 41));
            };
            add(Contiguous{}, F32{}, BF16{});
            add(Ring{}, Int4{}, Int2{});
            return rows;
        };
        Vector rows = all_rows();
        cuda_on_cpu::early_start = true;
        CHECK(all_rows() == rows);
        cuda_on_cpu::early_start = false;
    }
}
#endif

TEST_CASE("layouts agree bit for bit, and a sequence has its bits alone and in a batch") {
    Engine card = on_card("qwen2_14_on_2");
    Tokens tokens = random_tokens(card, 33), others = random_tokens(card, 33, 2);
    Cache contiguous = open_for(card, Contiguous{}, F16{}, Int8{}, 40),
          ring = open_for(card, Ring{}, F16{}, Int8{}, 40);
    Cache paged = open_for(card, Paged{}, F16{}, Int8{}, 40), batch = open_for(card, Paged{}, F16{}, Int8{}, 40, 3);
    prefill(card, paged, 0, {1});
    rewind(paged, 0, 0);
    Vector rows = cached_rows(card, contiguous, 0, tokens, 20, 20);
    CHECK(reference::same_bits(rows, cached_rows(card, paged, 0, tokens, 20, 20)));
    CHECK(reference::same_bits(rows, cached_rows(card, ring, 0, tokens, 20, 20)));
    prefill(card, batch, 2, part(others, 0, 25));
    prefill(card, batch, 1, part(tokens, 0, 20));
    size_t vocabulary = card.model.config.vocabulary;
    for (int t = 20; t < 28; t++) {
        Vector both = decode(card, batch, {2, 1}, {others[t + 5], tokens[t]});
        Vector alone(rows.begin() + t * vocabulary, rows.begin() + (t + 1) * vocabulary);
        CHECK(reference::same_bits({both.begin() + vocabulary, both.end()}, alone));
    }
}

TEST_CASE("a fork on the card goes on with the bits of the text that it is a copy of") {
    Engine card = on_card("llama_gqa_9_on_3");
    for (const Precision &type : {Precision(F16{}), Precision(Int4{})})
        for (const Place &place : {Place{}, ring(33, 2), paged(32)}) {
            CAPTURE(std::string(name_of(type)) + " " + place.name());
            Cache cache = cache_for(card, type, type, 80, place, 2);
            prefill(card, cache, 0, random_tokens(card, 41));
            fork(cache, 0, 1);
            for (int token = 1; token < 26; token++) {
                const Vector both = decode(card, cache, {0, 1}, {token, token});
                const auto half = both.begin() + (std::ptrdiff_t)both.size() / 2;
                CHECK(reference::same_bits(Vector(both.begin(), half), Vector(half, both.end())));
            }
        }
}

// ---- Recorded steps ----------------------------------------------------------------------------------------

// Requests of the first `prompt` tokens and one more, together; then one that begins with all that the first one has.
static std::vector<Tokens> company(Engine &engine, int &known) {
    const Tokens tokens = random_tokens(engine, 20);
    Cache cache = cache_for(engine, F16{}, F16{}, 60, {Paged{}, 4, 34, 2}, 3);
    Schedule schedule{cache};
    schedule.pass_tokens = 8;
    std::vector<Request> requests(4);
    auto run = [&](int first, int end) {
        for (int i = first; i < end; i++) {
            Request &request = requests[i];
            request.number = i, request.count = 12, request.prompt = (int)request.tokens.size();
            request.writer = std::make_unique<Writer>(nullptr, Tokens{});
            submit(schedule, request);
        }
        for (std::vector<Piece> pass; !(pass = next_pass(schedule)).empty();)
            run_pass(engine, schedule, pass, true, [](Request &) {});
    };
    for (int i = 0; i < 3; i++) requests[i].tokens = tokens, requests[i].tokens.push_back(i);
    run(0, 3);
    requests[3].tokens = requests[0].tokens;
    run(3, 4);
    CHECK((check(*cache.pages).empty() && cache.pages->pools[0].used() == 0));
    known = requests[3].known;
    std::vector<Tokens> found;
    for (const Request &request : requests) found.push_back(request.tokens);
    return found;
}

TEST_CASE("requests in company on the card have the CPU's tokens; there only what was prefilled is found by others") {
    Engine cpu = engine_of(fixtures + "llama_gqa_9_on_3"), card = on_card("llama_gqa_9_on_3");
    int here = 0, there = 0;
    CHECK(company(cpu, here) == company(card, there));
    CHECK((here == 32 && there == 20));  // all but the last token; the first one's prompt of 21, in pages of 4
}

TEST_CASE("steps of caches that take turns are recorded once each, also with a naive pass between") {
    Engine card = on_card("llama_gqa_9_on_3");
    std::vector<Cache> caches;
    caches.push_back(open_for(card, Contiguous{}, F32{}, F32{}, 64));
    caches.push_back(open_for(card, Paged{}, F32{}, F32{}, 64));
    caches.push_back(open_for(card, Ring{}, Int4{}, Int2{}, 64));
    for (Cache &cache : caches) prefill(card, cache, 0, {1, 2});
    forward_naive(card, Tokens(12, 3));  // room for as many tokens as come
    auto round = [&] {
        std::vector<Vector> logits;
        for (Cache &cache : caches) logits.push_back(decode(card, cache, {0}, {3})), forward_naive(card, {1, 2, 3});
        return logits;
    };
    auto first = round();
    round(), round();  // splits and logits have all the memory they need; then each is recorded
    REQUIRE(recorded(card) == (int)caches.size());
    std::shared_ptr<void> newest = graphs_of(card).list.front().step;
    for (int i = 0; i < 3; i++) round();
    CHECK((graphs_of(card).list.size() == caches.size() && graphs_of(card).list.front().step == newest));
    for (Cache &cache : caches) rewind(cache, 0, 2);
    CHECK(round() == first);  // replayed
    // Memory that moves takes all of them with it, and the next steps are right again.
    for (Cache &cache : caches) rewind(cache, 0, 2);
    forward_naive(card, Tokens(60, 5));
    CHECK(round() == first);
    CHECK(recorded(card) == 0);
}

TEST_CASE("a recorded step is for one cache, down to its sinks and its newest blocks") {
    Engine card = on_card("llama_gqa_9_on_3");
    Cache cache = open_for(card, Ring{}, Int4{}, Int2{}, 64);
    prefill(card, cache, 0, {1, 2});
    for (int i = 0; i < 2; i++) decode(card, cache, {0}, {3});
    const fast::StepGraph &graph = graphs_of(card).list.front();
    CHECK(graph.is_for(graph.pass, cache.stores));
    Pass larger = graph.pass;
    larger.count++;
    CHECK_FALSE(graph.is_for(larger, cache.stores));
    for (auto side : {&CacheView::keys, &CacheView::values, &CacheView::residual_keys, &CacheView::residual_values,
                      &CacheView::sink_keys, &CacheView::sink_values}) {
        std::vector<Store> other = cache.stores;
        (other[0].view.*side).data++;
        CHECK_FALSE(graph.is_for(graph.pass, other));
    }
    std::vector<Store> other = cache.stores;
    other[0].view.type_v = Precision(Int4{});
    CHECK_FALSE(graph.is_for(graph.pass, other));
}

// ---- What is told ------------------------------------------------------------------------------------------

#ifdef CUDA_ON_CPU
TEST_CASE("without a card, or one the program was built for, the CPU computes, and says why if it was to be a GPU") {
    auto opened = [](const std::string &device) { return open_machine(device, 1); };
    int cards = std::exchange(cuda_on_cpu::devices, 0);
    CHECK(std::holds_alternative<Cpu>(*opened("auto")));
    CHECK(error_of([&] { opened("cuda"); }) ==
          "--device cuda: no CUDA-capable device is detected: --device auto computes on the CPU then");
    cuda_on_cpu::devices = cards;
    int driver = std::exchange(cuda_on_cpu::driver, 0);
    CHECK(std::holds_alternative<Cpu>(*opened("auto")));
    CHECK(error_of([&] { opened("cuda"); }) ==
          "--device cuda: no NVIDIA driver: --device auto computes on the CPU then");
    cuda_on_cpu::driver = driver;
    cudaGetLastError();
    bool built = std::exchange(cuda_on_cpu::built_for_card, false);
    CHECK(std::holds_alternative<Cpu>(*opened("auto")));
    CHECK(error_of([&] { opened("cuda"); }) ==
          "--device cuda: a CPU that plays a GPU has compute capability 9.0; this program was built for others: "
          "--device auto computes on the CPU then");
    cuda_on_cpu::built_for_card = built;
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(std::holds_alternative<Gpu>(*opened("auto")));
    CHECK(std::holds_alternative<Cpu>(*opened("cpu")));
}

TEST_CASE("a model or a cache without room on the card is told in one line") {
    std::string line = error_of([&] {
        Engine card = on_card("llama_bf16");
        cache_for(card, F32{}, F32{}, 1, ring(16000000, 2));
    });
    CHECK((contains(line, "the KV cache needs") && contains(line, "lower -c or --window")));
    size_t all = std::exchange(cuda_on_cpu::properties.totalGlobalMem, 1000);
    line = error_of([&] { on_card("llama_bf16"); });
    cuda_on_cpu::properties.totalGlobalMem = all;
    CHECK((contains(line, "the weights need 0.000 GiB") && contains(line, "--device")));
}
#endif

TEST_CASE("a function of a library is found, and one that is not there named, with what helps") {
    auto *cosine = (double (*)(double))library_function("libm.so.6", "cos");
    CHECK(cosine(0) == 1);
    for (const char *library : {"libm.so.6", "libnobody_has.so.1"}) {
        std::string line = error_of([&] { library_function(library, "nobody_has_this"); });
        CHECK(contains(line, library));
        CHECK(contains(line, "install it, or add --device cpu"));
    }
}

TEST_CASE("an error of the card is told with the call and what helps against it") {
    CHECK(error_of([] { check(cudaSuccess, "cudaCall"); }) == "");
    CHECK(error_of([] { check(cudaErrorMemoryAllocation, "cudaCall"); }) ==
          "CUDA: cudaCall: out of memory: lower -c, or free memory of the card; --device cpu needs no card");
    CHECK(contains(error_of([] { check(cudaErrorIllegalAddress, "cudaCall"); }), "this program is at fault"));
    CHECK(contains(error_of([] { check(cudaErrorInvalidValue, "cudaCall"); }), "another driver or card may help"));
}
