// One order of sums: the logits of a token have the same bits however it came about. Prefilled in any chunks, decoded
// one by one, alone or in a batch, with any number of threads, in any layout. Everything here is ==.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "kinds.h"

constexpr int whole_text = 1 << 20;  // a chunk that holds it

// The same weights with 1 to 4 threads.
struct Teams {
    std::vector<Engine> engines;
    explicit Teams(Engine first) {
        engines.push_back(std::move(first));
        for (int threads = 2; threads <= 4; threads++) engines.push_back(with_threads(engines[0], threads));
    }
    Engine &of(int threads) { return engines[threads - 1]; }
};

// Every way to the same tokens has the bits of the text read at once, and of `expected`, the same in another layout, if
// there is one. What these are.
static Vector check_ways(Teams &teams, const Precision &type_k, const Precision &type_v, const Place &place,
                         const Tokens &tokens, const std::vector<int> &chunks, bool decode,
                         const Vector &expected = {}) {
    CAPTURE(std::string(name_of(type_k)) + " " + name_of(type_v) + " " + place.name());
    const int total = (int)tokens.size();
    auto rows = [&](int threads, int chunk, int prefilled) {
        return cached(teams.of(threads), type_k, type_v, place, tokens, chunk, prefilled);
    };
    const Vector whole = rows(1, whole_text, total);
    if (!expected.empty()) CHECK(same_bits(whole, expected));
    int threads = 1;
    for (int chunk : chunks) {
        CAPTURE(chunk);
        CHECK(same_bits(whole, rows(threads = threads % 4 + 1, chunk, total)));
    }
    if (decode) CHECK(same_bits(whole, rows(2, 1, 0)));
    Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    auto any = [&]() -> Engine & { return teams.of(1 + below(random, 4)); };
    CHECK(same_bits(whole, among_others(any, type_k, type_v, place, tokens, random, 17)));
    return whole;
}

TEST_CASE("every layout with every pair of precisions") {
    Teams teams(engine_of(random_model({2, 32, 48, 4, 2, 20, 40})));
    Tokens tokens = random_tokens(teams.of(1), 75);
    for_each_pair([&](const Precision &type_k, const Precision &type_v) {
        const Vector expected = check_ways(teams, type_k, type_v, {}, tokens, {7, 64}, true);
        check_ways(teams, type_k, type_v, paged(7), tokens, {7}, false, expected);
        check_ways(teams, type_k, type_v, ring(75, 0), tokens, {7}, false, expected);
        check_ways(teams, type_k, type_v, ring(40, 3), tokens, {7, 31}, true);  // drops positions from 43 on
    });
}

TEST_CASE("every type of weights, a model with sliding windows, one with normed queries and keys") {
    auto check = [](Engine engine, int count) {
        Teams teams(std::move(engine));
        Tokens tokens = random_tokens(teams.of(1), count);
        for (auto [type_k, type_v] : {std::pair<Precision, Precision>{F32{}, F32{}}, {F16{}, Int4{}}, {Int2{}, FP8{}}})
            for (const Place &place : {Place{}, paged(16), ring(33, 4)})
                check_ways(teams, type_k, type_v, place, tokens, {1, 7, 13, 25, 64}, place.window == 33);
    };
    for (const char *name : {"llama_bf16", "llama_f16", "mistral_window", "qwen3_layer_types", "llama_gqa_9_on_3",
                             "gemma3", "gemma4_shared", "granite_swa", "lfm2_bias"}) {
        CAPTURE(std::string(name));
        check(engine_of(fixtures + name), 75);
    }
    // Of a bf16 model, rows that fill no group of 32, and matrices that fill no tile.
    for (std::string weights : {"stored", "int8"}) {
        CAPTURE(weights);
        check(engine_of(random_model({1, 97, 131, 3, 1, 34, 41, DType::bf16}), 1, weights), 140);
    }
    if (!why_no_pairs(best::pairs_gain()).empty()) return;
    Model paired = random_model({1, 97, 131, 3, 1, 34, 41, DType::bf16});
    check(open_engine(std::move(paired), open_machine("cpu", 1), "stored", "bf16"), 140);
    Model mixed = random_model({1, 97, 131, 3, 1, 34, 41, DType::bf16});
    mixed.layers[0].down.weight.type = DType::f16;
    CHECK_THROWS_WITH_AS(open_engine(std::move(mixed), open_machine("cpu", 1), "stored", "bf16"),
                         "--activations bf16: belongs to weights in bf16, here are some in f16: leave it out", Error);
}

// Heads as wide as real models have them: what is read together must not depend on how many rows a pass has.
TEST_CASE("8 heads on 2 KV heads of 128: K at f16, V at int4, and neighbours of them") {
    Teams teams(engine_of(random_model({2, 64, 96, 8, 2, 128, 64})));
    Tokens tokens = random_tokens(teams.of(1), 100);
    for (auto [type_k, type_v] : {std::pair<Precision, Precision>{F16{}, Int4{}}, {Int4{}, Int2{}}, {Int8{}, Int4{}}}) {
        const Vector expected = check_ways(teams, type_k, type_v, {}, tokens, {}, false);
        for (const Place &place : {paged(16), ring(600, 0), ring(120, 0), ring(300, 4)})
            check_ways(teams, type_k, type_v, place, tokens, {1, 7, 64}, place.window == 120, expected);
    }
}

TEST_CASE("the beginning of a longer prompt, and more tokens than a pass takes") {
    Teams teams(engine_of(random_model({1, 32, 48, 4, 2, 34, 40})));
    Tokens tokens = random_tokens(teams.of(1), 700);
    for (auto [type_k, type_v] : {std::pair<Precision, Precision>{F32{}, F32{}}, {F16{}, Int4{}}, {Int4{}, BF16{}}}) {
        Vector expected = cached(teams.of(2), type_k, type_v, {}, tokens, 512, 700);
        CHECK(same_bits(expected, cached(teams.of(1), type_k, type_v, {}, tokens, 64, 700)));
        expected.resize(513 * (size_t)teams.of(1).model.config.vocabulary);
        check_ways(teams, type_k, type_v, {}, part(tokens, 0, 513), {512}, false, expected);
    }
}

TEST_CASE("the naive path, whatever the number of threads, and of a longer text") {
    for (const char *name : {"llama_gqa_9_on_3", "mistral_window", "qwen3", "head_dim_80"}) {
        CAPTURE(std::string(name));
        Teams teams(engine_of(fixtures + name));
        Tokens tokens = random_tokens(teams.of(1), 75);
        Vector naive = naive_rows(teams.of(1), tokens);
        for (int threads : {2, 3}) CHECK(same_bits(naive, naive_rows(teams.of(threads), tokens)));
        Vector beginning = naive_rows(teams.of(1), part(tokens, 0, 40));
        naive.resize(beginning.size());
        CHECK(same_bits(naive, beginning));
    }
}

// Seconds of a prompt of 64 tokens through a matrix, by this thread's clock, which a busy machine does not lengthen.
static double product_seconds(Cpu &m, DType type) {
    constexpr int tokens = 64, rows = 1536, inputs = 576;
    const std::vector<uint16_t> ones((size_t)rows * inputs, 0x3f80);
    std::vector<float> x((size_t)tokens * inputs, 1.0f), y((size_t)tokens * rows);
    const Linear linear = {{(const char *)ones.data(), type, rows, inputs}, {}};
    auto time = [] {
        timespec time;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
    };
    double least = INFINITY;
    for (int i = 0; i < 20; i++) {
        const double start = time();
        const std::initializer_list<Product> one = {{linear, y.data()}};
        m.run([&] { best::linear(m, x.data(), tokens, one, Into::set); });
        least = std::min(least, time() - start);
        REQUIRE(y.back() == inputs);
    }
    return least;
}

TEST_CASE("the gain of bf16 pairs is the same whenever it is measured, and that of a prompt is on its side of one") {
    if (!multiplies_pairs) return;
    Vector gains;
    for (int i = 0; i < 20; i++) gains.push_back((float)best::pairs_gain());
    std::sort(gains.begin(), gains.end());
    CAPTURE(gains);
    CHECK((gains[0] > 0 && std::isfinite(gains[19])));
    CHECK(gains[15] < 1.25f * gains[5]);
    Cpu cpu(1);
    const double faster = product_seconds(cpu, DType::bf16) / product_seconds(cpu, DType::bf16_pairs);
    CAPTURE(faster);
    if (why_no_pairs(gains[10]).empty()) CHECK(faster > 0.9);  // reading weights and rounding inputs take some of it
    if (gains[10] < 0.7f) CHECK(faster < 1);
}

TEST_CASE("rounded activations are refused where the processor's products of bf16 pairs are the slower ones") {
    CHECK((best::pairs_gain() > 0) == multiplies_pairs);
    CHECK(why_no_pairs(0) == "this processor has no instruction for it (AVX512_BF16)");
    const double sapphire_rapids = 2 * 1.40e9 / 5.59e9, zen5 = 2;  // as measured there
    CHECK(why_no_pairs(sapphire_rapids) ==
          "this processor does 0.50 times as many products a second in bf16 as in f32, so it is slower");
    CHECK(why_no_pairs(zen5).empty());
}
