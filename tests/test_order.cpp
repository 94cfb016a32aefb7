// One order of sums: the logits of a token have the same bits however it came about. Prefilled in any chunks, decoded
// one by one, alone or in a batch, with any number of threads, in any layout. Everything here is ==.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "scene.h"

using namespace scene;
using reference::Random;

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

// A kind of cache, and the text whose logits are asked for.
struct Case {
    Teams &teams;
    Precision type_k, type_v;
    Place place;
    Tokens tokens;
    Cache cache(int sequences = 1) {
        return cache_for(teams.of(1), type_k, type_v, (int)tokens.size() + 64, place, sequences);
    }
    // In passes of `chunk` tokens at most.
    Vector prefilled(int chunk, int threads) {
        Engine &engine = teams.of(threads);
        engine.chunk = chunk;
        Cache cache = this->cache();
        return prefilled_rows(engine, cache, tokens);
    }
    Vector decoded(int threads) {
        Cache cache = this->cache();
        return cached_rows(teams.of(threads), cache, 0, tokens, 1, 0);
    }
    // In passes of any length, among none to 16 other sequences that get some tokens or none.
    Vector among_others(uint64_t seed) {
        Random random{seed};
        auto up_to = [&](int most) { return (int)(random.bits() % (uint64_t)(most + 1)); };
        Cache cache = this->cache(17);
        int mine = up_to(16), done = 0, total = (int)tokens.size();
        Vector rows;
        while (done < total) {
            Batch batch;
            Engine &engine = teams.of(1 + up_to(3));
            int most = std::min({total - done, chunk_of(cache), up_to(2) ? 1 + up_to(8) : total});
            int others = up_to(16), first = 0, count = 1 + up_to(most - 1);
            for (int i = 0; i < 17; i++) {
                int sequence = (mine + 1 + i) % 17, length = sequence == mine ? count : i < others ? up_to(3) : 0;
                if (sequence == mine) first = batch.count();
                if (sequence != mine) length = std::min(length, total - cache.lengths[sequence]);
                int position = grow(cache, sequence, length);
                for (int t = 0; t < length; t++)
                    batch.add(tokens[sequence == mine ? position + t : up_to(total - 1)], sequence, position + t);
            }
            forward(engine, batch, cache.stores);
            Vector found = logits(engine, first, count);
            rows.insert(rows.end(), found.begin(), found.end());
            done += count;
        }
        return rows;
    }
};

// Every way to the same tokens. `expected`: of the same tokens in another layout, or empty.
static void check_ways(Case one, const std::vector<int> &chunks, bool decode, const Vector &expected = {}) {
    CAPTURE(std::string(name_of(one.type_k)));
    CAPTURE(std::string(name_of(one.type_v)));
    CAPTURE(one.place.name());
    Vector whole = one.prefilled(whole_text, 1);
    if (!expected.empty()) CHECK(reference::same_bits(whole, expected));
    int threads = 1;
    for (int chunk : chunks) {
        CAPTURE(chunk);
        CHECK(reference::same_bits(whole, one.prefilled(chunk, threads = threads % 4 + 1)));
    }
    if (decode) CHECK(reference::same_bits(whole, one.decoded(2)));
    uint64_t seed = seed_of_run();
    CAPTURE(seed);
    CHECK(reference::same_bits(whole, one.among_others(seed)));
}

TEST_CASE("every layout with every pair of precisions") {
    Teams teams(engine_of(random_model({2, 32, 48, 4, 2, 20, 40})));
    Tokens tokens = random_tokens(teams.of(1), 75);
    for_each_pair([&](const Precision &type_k, const Precision &type_v) {
        Vector expected = Case{teams, type_k, type_v, {}, tokens}.prefilled(whole_text, 1);
        check_ways({teams, type_k, type_v, {}, tokens}, {7, 64}, true);
        check_ways({teams, type_k, type_v, paged(7), tokens}, {7}, false, expected);
        check_ways({teams, type_k, type_v, ring(75, 0), tokens}, {7}, false, expected);
        check_ways({teams, type_k, type_v, ring(40, 3), tokens}, {7, 31}, true);  // drops positions from 43 on
    });
}

TEST_CASE("every type of weights, a model with sliding windows, one with normed queries and keys") {
    auto check = [](Engine engine, int count) {
        Teams teams(std::move(engine));
        Tokens tokens = random_tokens(teams.of(1), count);
        for (auto [type_k, type_v] : {std::pair<Precision, Precision>{F32{}, F32{}}, {F16{}, Int4{}}, {Int2{}, FP8{}}})
            for (const Place &place : {Place{}, paged(16), ring(33, 4)})
                check_ways({teams, type_k, type_v, place, tokens}, {1, 7, 13, 25, 64}, place.window == 33);
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
    if (!multiplies_pairs) return;
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
        Vector expected = Case{teams, type_k, type_v, {}, tokens}.prefilled(whole_text, 1);
        for (const Place &place : {paged(16), ring(600, 0), ring(120, 0), ring(300, 4)})
            check_ways({teams, type_k, type_v, place, tokens}, {1, 7, 64}, place.window == 120, expected);
    }
}

TEST_CASE("the beginning of a longer prompt, and more tokens than a pass takes") {
    Teams teams(engine_of(random_model({1, 32, 48, 4, 2, 34, 40})));
    Tokens tokens = random_tokens(teams.of(1), 700);
    for (auto [type_k, type_v] : {std::pair<Precision, Precision>{F32{}, F32{}}, {F16{}, Int4{}}, {Int4{}, BF16{}}}) {
        Case all{teams, type_k, type_v, {}, tokens}, beginning{teams, type_k, type_v, {}, part(tokens, 0, 513)};
        Vector expected = all.prefilled(512, 2);
        CHECK(reference::same_bits(expected, all.prefilled(64, 1)));
        expected.resize(513 * (size_t)teams.of(1).model.config.vocabulary);
        check_ways(beginning, {512}, false, expected);
    }
}

TEST_CASE("the naive path, whatever the number of threads, and of a longer text") {
    for (const char *name : {"llama_gqa_9_on_3", "mistral_window", "qwen3", "head_dim_80"}) {
        CAPTURE(std::string(name));
        Teams teams(engine_of(fixtures + name));
        Tokens tokens = random_tokens(teams.of(1), 75);
        Vector naive = naive_rows(teams.of(1), tokens);
        for (int threads : {2, 3}) CHECK(reference::same_bits(naive, naive_rows(teams.of(threads), tokens)));
        Vector beginning = naive_rows(teams.of(1), part(tokens, 0, 40));
        naive.resize(beginning.size());
        CHECK(reference::same_bits(naive, beginning));
    }
}
