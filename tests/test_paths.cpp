// The two paths: the naive one against Transformers, the cached one against the naive one.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN

#include "../commands/options.h"
#include "program.h"
#include "scene.h"

using namespace scene;
using reference::relative_error;
using reference::same_bits;

#ifdef PLAIN
constexpr bool slow = true;
#else
constexpr bool slow = false;
#endif
static const std::string stories = "../shared/checkpoints/stories260K", builtin = "weights_tools/builtin";

TEST_CASE("for every family, naive is Transformers in float32, and cached is naive, in any layout, chunks and steps") {
    for (const std::string &name : fixture_names()) {
        CAPTURE(name);
        Json expected = parse_json(name, slurp(fixtures + name + "/expected.json"));
        Tokens prompt = program::ids(expected, "prompt_ids"), greedy = program::ids(expected, "greedy_ids");
        Vector reference = read_npy(fixtures + name + "/expected_logits.npy").values;
        Engine engine = engine_of(fixtures + name, 2);
        int count = (int)greedy.size();

        Tokens tokens = prompt;
        append(tokens, greedy);
        tokens.resize(reference.size() / engine.model.config.vocabulary);
        expect_positions(engine, (int)tokens.size());
        Vector naive = naive_rows(engine, tokens);
        CHECK(relative_error(naive, reference) <= 1e-5);
        CHECK(greedy_naive(engine, prompt, count) == greedy);

        Cache cache = cache_for(engine, F32{}, F32{}, (int)prompt.size() + count);
        CHECK(greedy_cached(engine, cache, prompt, count) == greedy);
        auto rows = [&](const Precision &type_k, const Precision &type_v, const Place &place, int chunk) {
            Cache cache = cache_for(engine, type_k, type_v, (int)tokens.size(), place, 2);
            prefill(engine, cache, 0, part(tokens, 5, 30));  // the other one's pages do not begin with the first
            return cached_rows(engine, cache, 1, tokens, chunk, (int)prompt.size());
        };
        const Vector blocks = rows(Int4{}, F16{}, {}, 512);
        for (const Layout &layout : all_of<Layout>()) {  // also one that is new
            const Place place = {layout, 7, (int)tokens.size() - 4, 4};
            CAPTURE(place.name());
            for (int chunk : {1, 5, 16}) CHECK(same_bits(rows(F32{}, F32{}, place, chunk), naive));
            CHECK(same_bits(rows(Int4{}, F16{}, place, 11), blocks));
        }
    }
}

// A layer's keys and values depend on earlier layers, and so on more than the window; with one layer they do not. There
// the logits behind sinks and a window are those of a text of these tokens alone, whatever stood between.
TEST_CASE("with one layer, a ring far behind its window is a new text of the sinks and the window") {
    for (std::string name : {"head_dim_64", "head_dim_80"}) {
        Engine engine = engine_of(fixtures + name);
        REQUIRE(engine.model.config.layers == 1);
        for (int sinks : {0, 1, 4}) {
            for (int window : {1, 31, 64, 100}) {
                CAPTURE(ring(window, sinks).name());
                Cache cache = cache_for(engine, F32{}, F32{}, 1, ring(window, sinks));
                Tokens tokens = random_tokens(engine, 800);
                Vector row = prefill(engine, cache, 0, tokens);
                for (int step = 0; step < 20; step++) {
                    tokens.push_back(step * 7 % 64);
                    row = decode(engine, cache, {0}, {tokens.back()});
                }
                Tokens text = part(tokens, 0, sinks);
                text.insert(text.end(), tokens.end() - window, tokens.end());
                CHECK(largest_difference(row, forward_naive(engine, text)) <= 1e-4);
            }
        }
    }
}

TEST_CASE("generation goes on for thousands of steps behind the context, and stays what the naive path computes") {
    Engine engine = engine_of(fixtures + "llama_gqa_9_on_3");
    int vocabulary = engine.model.config.vocabulary;
    for (const Precision &type : all_of<Precision>()) {
        CAPTURE(std::string(name_of(type)));
        Cache cache = cache_for(engine, type, type, 1, ring(64, 4));
        Tokens tokens = random_tokens(engine, 10);
        Vector row = prefill(engine, cache, 0, tokens), rows;
        for (int step = 0; step < 3000; step++) {
            require_finite(row, (int)tokens.size() - 1, &cache);
            append(rows, row);
            tokens.push_back(argmax(row.data(), vocabulary));
            row = decode(engine, cache, {0}, {tokens.back()});
        }
        CHECK(cache.lengths[0] == 3010);
        if (!std::holds_alternative<F32>(type)) continue;
        tokens.pop_back();
        Vector naive = naive_rows(engine, tokens, opened_ring(64, 4));
        naive.erase(naive.begin(), naive.begin() + 9 * vocabulary);
        CHECK(largest_difference(rows, naive) <= 1e-4);
    }
}

TEST_CASE("a model's sliding window in a ring of that size is the contiguous cache bit for bit") {
    Engine engine = engine_of(fixtures + "mistral_window");
    Tokens tokens = random_tokens(engine, 200);
    for_each_pair([&](const Precision &type_k, const Precision &type_v) {
        auto rows = [&](const Place &place) {
            Cache cache = cache_for(engine, type_k, type_v, 200, place);
            return cached_rows(engine, cache, 0, tokens, 150, 150);
        };
        CHECK(same_bits(rows({}), rows(ring(engine.model.config.kinds[0].window, 0))));
    });
}

TEST_CASE("prefill() hands a ring no more positions at once than it has rows to spare") {
    Engine engine = engine_of(random_model({1, 8, 8, 1, 1, 4, 8}));
    Tokens tokens = random_tokens(engine, 1100);
    auto chunks = [&](const Place &place) {
        Cache cache = cache_for(engine, F16{}, F16{}, 1100, place);
        Tokens sizes;
        prefill_pass(engine, cache, 0, tokens, [&](int rows) { sizes.push_back(rows); });
        return sizes;
    };
    for (const Place &place : {Place{}, paged(16), ring(100000, 0)}) CHECK(chunks(place) == Tokens{512, 512, 76});
    for (int window : {1, 100, 300, 1024}) {
        CAPTURE(window);
        int sum = 0, slots = std::get<Ring>(opened_ring(window, 4)).slots;
        for (int size : chunks(ring(window, 4))) {
            CHECK(size <= slots - window - 4 + 1);
            sum += size;
        }
        CHECK(sum == 1100);
    }
}

TEST_CASE("stories260K: 200 greedy ids and 8 rows of logits as llama2.c has them, by both paths" *
          doctest::skip(!fs::exists(stories))) {
    Json expected = parse_json(stories, slurp(stories + "/expected.json"));
    Tokens prompt = program::ids(expected, "greedy.prompt_ids"), ids = program::ids(expected, "greedy.ids");
    REQUIRE(ids.size() == 200);
    Engine engine = engine_of(stories, 2);
    CHECK(greedy_naive(engine, prompt, 200) == ids);
    Cache cache = cache_for(engine, F32{}, F32{}, 256);
    CHECK(greedy_cached(engine, cache, prompt, 200) == ids);
    Vector numbers;
    for (const Json *row : items_of(program::at(expected, "logits.logits")))
        for (const Json *logit : items_of(row)) numbers.push_back((float)logit->number);
    CHECK(largest_difference(naive_rows(engine, program::ids(expected, "logits.ids")), numbers) <= 1e-4);
}

// How far the logits of one cache may be from the naive ones, ||difference|| / ||naive||: a tenth more than the most
// that was measured over the contexts below.
static const std::map<std::string, double> measured_errors = {{"f16", 3.01e-4}, {"bf16", 2.70e-3}, {"int8", 3.96e-3},
                                                              {"fp8", 2.46e-2}, {"int4", 4.86e-2}, {"int2", 0.515}};

// Decodes greedily to the end of the context: with an f32 cache as the naive path does, and with each of `types`. All
// but the smallest (fp8: 1 step of 3,155 differs; int4: 4; int2: 1,565) decode the same tokens.
static void check_whole_context(Engine &engine, const Tokens &prompt, const std::vector<std::string> &types) {
    const Config &config = engine.model.config;
    int count = config.context - (int)prompt.size();
    Cache exact = cache_for(engine, F32{}, F32{}, config.context);
    Tokens tokens = prompt, ids = greedy_cached(engine, exact, prompt, count);
    append(tokens, ids);
    auto greedy_ids = [&](const Vector &rows) {
        Tokens found;
        for (int i = 0; i < count; i++)
            found.push_back(argmax(&rows[(prompt.size() - 1 + i) * (size_t)config.vocabulary], config.vocabulary));
        return found;
    };
    // The naive path's logits at a position depend on nothing behind it, so one pass has those of every step.
    Vector naive = naive_rows(engine, tokens);
    CHECK(greedy_ids(naive) == ids);
    for (const std::string &name : types) {
        CAPTURE(name);
        Precision type = parse_precision("", name);
        Cache cache = cache_for(engine, type, type, config.context);
        Vector rows = cached_rows(engine, cache, 0, tokens, config.context, (int)prompt.size());
        CHECK(relative_error(rows, naive) <= 1.1 * measured_errors.at(name));
        if (name == "f16" || name == "bf16" || name == "int8") CHECK(greedy_ids(rows) == ids);
    }
}

TEST_CASE("the built-in checkpoint over its whole context: f16, bf16 and int8 decode the naive path's greedy tokens" *
          doctest::skip(slow)) {
    Engine engine = engine_of(builtin);
    TokenizerPointer tokenizer = load_tokenizer(builtin);
    const std::vector<std::string> same = {"f16", "bf16", "int8"}, all = {"f16", "bf16", "int8", "fp8", "int4", "int2"};
    check_whole_context(engine, encode(tokenizer.get(), "Once upon a time"), same);
    std::ifstream stories(builtin + "/heldout.jsonl");
    std::string line;
    for (size_t length : {40, 640}) {  // beginnings of stories that it has not seen
        REQUIRE(std::getline(stories, line));
        Json story = parse_json("heldout.jsonl", line);
        Tokens ids = encode(tokenizer.get(), member(&story, "text")->text);
        REQUIRE(ids.size() > length);
        check_whole_context(engine, part(ids, 0, (int)length), length > 100 ? all : same);
    }
}

// ---- All or nothing ------------------------------------------------------------------------------------------

TEST_CASE("a block that was full before a pass failed after it: a text that goes back into it reads it again") {
    Engine engine = engine_of(fixtures + "llama_gqa_9_on_3");
    for (const Precision &type : all_of<Precision>()) {
        CAPTURE(std::string(name_of(type)));
        Cache never = cache_for(engine, type, type, 100), failed = cache_for(engine, type, type, 100);
        const Tokens tokens = random_tokens(engine, 64);
        prefill(engine, never, 0, part(tokens, 0, 63)), prefill(engine, failed, 0, tokens);
        CHECK_THROWS_AS(prefill_pass(engine, failed, 0, {1, 2, 3}, [](int) { throw Interrupted(); }), Interrupted);
        const int kept = rewind(failed, 0, 63);
        CHECK(kept == (blocks_of(failed) ? 32 : 63));
        prefill_pass(engine, failed, 0, part(tokens, kept, 63));
        CHECK(same_bits(decode(engine, never, {0}, {1}), decode(engine, failed, {0}, {1})));
    }
}

TEST_CASE("Ctrl-C at any time ends a pass soon; what its chunks have read stays, and going on gives the same bits") {
    Engine engine = engine_of(random_model({6, 64, 192, 4, 2, 16, 300}), 2);
    reference::Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    const Tokens tokens = random_tokens(engine, 700);
    int ended = 0;
    for (const Precision &type : {Precision(F16{}), Precision(Int8{}), Precision(Int4{}), Precision(Int2{})}) {
        for (const Place &place : {Place{}, paged(7), ring(200, 4)}) {
            CAPTURE(std::string(name_of(type)));
            CAPTURE(place.name());
            Cache never = cache_for(engine, type, type, 800, place), often = cache_for(engine, type, type, 800, place);
            Vector right, found;
            int whole = 0;
            {
                const InterruptAfter press(INT_MAX);
                right = prefill(engine, never, 0, tokens);
                whole = press.count;
            }
            for (int tries = 0; found.empty(); tries++) {
                const int before = often.lengths[0];
                const InterruptAfter press(tries < 8 ? 1 + (int)(random.bits() % (uint64_t)(whole / 2)) : INT_MAX);
                try {
                    found = prefill(engine, often, 0, part(tokens, often.lengths[0], 700));
                } catch (Interrupted) {
                    ended++;
                    CHECK((often.lengths[0] >= before && often.lengths[0] < 700));
                }
            }
            CHECK(same_bits(right, found));
            CHECK(same_bits(decode(engine, never, {0}, {1}), decode(engine, often, {0}, {1})));
        }
    }
    CHECK(ended > 0);
}

TEST_CASE("Ctrl-C: a thread leaves out the rest of an operation, so what it wrote stays") {
    for (const char *weights : {"stored", "int8"}) {
        Engine engine = engine_of(random_model({1, 64, 96, 2, 1, 32, 41}), 1, weights);
        Cpu &m = std::get<Cpu>(*engine.machine);
        const Linear &gate = engine.model.layers[0].gate;
        const int count = 100;
        int calls = 0;
        Vector x((size_t)count * 64, 1), y((size_t)count * 96, 7);
        interrupts = 1;
        m.for_each(9, [&](int64_t, Alone) { calls++; });
        m.run([&] { m.for_each_in_turn(9, [&](int64_t, Alone) { calls++; }); });
        best::linear(m, x.data(), count, {{gate, y.data()}});
        plain::linear(m, x.data(), count, {{gate, y.data()}});
        interrupts = 0;
        CHECK(calls == 0);
        CHECK(std::count(y.begin(), y.end(), 7) == (long)y.size());
        best::linear(m, x.data(), count, {{gate, y.data()}});
        CHECK(std::count(y.begin(), y.end(), 7) == 0);
    }
}
