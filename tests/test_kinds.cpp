// Layers of several kinds: with a window or none, with rows of their own or an earlier layer's, of other widths, heads
// and rotations, with learned sinks. The naive path against double precision; the cached path against the naive one,
// and every way to a cache against every other, bit for bit.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "kinds.h"

TEST_CASE(
    "models drawn anew in each run: naive is double precision, an f32 cache is naive, every way has the same bits") {
    const uint64_t seed = seed_of_run();
    CAPTURE(seed);
    Random random{seed};
    const std::vector<Precision> types = all_of<Precision>();
    for (int round = 0; round < (plain_path ? 6 : 30); round++) {
        CAPTURE(round);
        const Shape shape = random_shape(random);
        Engine alone = engine_of(random_model(shape, random.bits()));
        for (int layer = 0; layer < (int)shape.list.size(); layer++) {  // none was taken for another one's kind
            const Kind &kind = alone.model.config.kind(layer), &drawn = shape.list[layer].kind;
            CHECK(
                (kind.kv_heads == drawn.kv_heads && kind.key_width == drawn.key_width && kind.window == drawn.window));
            CHECK((kind.rope_theta == drawn.rope_theta && kind.rope.all() == drawn.rope.all()));
        }
        Engine two = with_threads(alone, 2), three = with_threads(alone, 3);
        auto engine = [&]() -> Engine & { return below(random, 8) ? alone : below(random, 2) ? two : three; };
        const Tokens tokens = random_tokens(alone, 30 + below(random, round % 8 ? 130 : 600), random.bits());
        const Vector naive = naive_rows(engine(), tokens);
        CHECK(relative_error(naive, reference::logits_of(alone.model, tokens)) <= 1e-5);
        CHECK(same_bits(naive, naive_rows(engine(), tokens)));
        auto check = [&](const Precision &type_k, const Precision &type_v, const Vector &expected, bool is_naive) {
            const Place place = random_place(random, (int)tokens.size());
            CAPTURE(std::string(name_of(type_k)) + " " + name_of(type_v) + " " + place.name());
            const int chunk = 1 + below(random, 64), decoded = below(random, (int)tokens.size() + 1);
            const Vector one = cached(engine(), type_k, type_v, place, tokens, chunk, decoded);
            CHECK((is_naive ? agree(expected, one) : same_bits(expected, one)));
            CHECK(same_bits(one, among_others(engine(), type_k, type_v, place, tokens, random)));
        };
        for (int i = 0; i < 3; i++) check(F32{}, F32{}, naive, true);
        for (int i = 0; i < 3; i++) {
            const Precision &type_k = types[below(random, (int)types.size())];
            const Precision &type_v = types[below(random, (int)types.size())];
            const Vector whole = cached(engine(), type_k, type_v, keeping_all({}), tokens, 512, (int)tokens.size());
            for (int k = 0; k < 3; k++) check(type_k, type_v, whole, false);
        }
    }
}

TEST_CASE("every pair of precisions: chunks, steps, company, pages and rings have the bits of all rows kept") {
    Engine engine = engine_of(random_model(mixed_shape()));
    const Tokens tokens = random_tokens(engine, 130);
    const int total = (int)tokens.size();
    Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    for_each_pair([&](const Precision &type_k, const Precision &type_v) {
        if (left_out()) return;
        const Vector whole = cached(engine, type_k, type_v, keeping_all({}), tokens, 512, total);
        CHECK(finite(whole));
        CHECK(same_bits(whole, cached(engine, type_k, type_v, {}, tokens, 1, 0)));
        for (const Place &place : {Place{}, paged(1), paged(3), paged(16), paged(48), ring(300, 2)}) {
            CAPTURE(place.name());
            const int chunk = 1 + below(random, 64);
            CHECK(same_bits(whole, cached(engine, type_k, type_v, place, tokens, chunk, total - 20)));
            CHECK(same_bits(whole, among_others(engine, type_k, type_v, place, tokens, random)));
        }
    });
}

TEST_CASE("a ring that drops positions of some layers is the naive path over what it still shows") {
    std::vector<std::string> models = {"mixed_shape()"};
    if (!plain_path)
        for (const char *name :
             {"llama_gqa_9_on_3", "qwen3", "qwen3_layer_types", "llama_bf16", "llama_rope_llama3", "gemma3",
              "gemma4_shared", "granite_swa", "phi3_longrope_short", "qwen2_yarn", "ministral3", "lfm2", "gemma4"})
            models.push_back(fixtures + name);
    for (const std::string &model : models) {
        CAPTURE(model);
        Engine engine = engine_of(&model == &models[0] ? random_model(mixed_shape()) : load_model(model));
        const Tokens tokens = random_tokens(engine, 300);  // a fixture's context is 128
        for (int window : {1, 20, 31, 64, 100})            // layers that look back 40 see less with the first ones
            for (int sinks : {0, 1, 4}) {
                CAPTURE(ring(window, sinks).name());
                const Vector naive = naive_rows(engine, tokens, opened_ring(window, sinks));
                for (const Place &place : {ring(window, sinks), keeping_all(ring(window, sinks))}) {
                    const Vector rows = cached(engine, F32{}, F32{}, place, tokens, 90, 200);
                    CHECK((relative_error(rows, naive) <= 1e-5 && largest_difference(rows, naive) <= 1e-4));
                    if (sinks == 0) CHECK(agree(naive, rows));  // else their keys are turned back first
                }
            }
    }
}

// litgpt 2182 and mlxcel 412: a prompt longer than the window, read at once into a cache as long as the window, broke
// causality; LLMs-from-scratch 925: a query whose window held nothing was NaN.
TEST_CASE("a prompt longer than the window in one pass: causal, finite, and no query sees behind its window") {
    for (int window : {1, 2, 7, 32, 100}) {
        CAPTURE(window);
        Engine engine = engine_of(random_model(mixed_shape(window, window + 1)));
        const Tokens tokens = random_tokens(engine, 250);
        const Vector naive = naive_rows(engine, tokens);
        REQUIRE(finite(naive));
        CHECK(relative_error(naive, reference::logits_of(engine.model, tokens)) <= 1e-5);
        for (const Place &place : {keeping_all({}), keeping_all(paged(16)), Place{}, paged(16)})
            CHECK(agree(naive, cached(engine, F32{}, F32{}, place, tokens, 512, 250)));
        Vector beginning = naive;
        beginning.resize(120 * 23);
        CHECK(same_bits(beginning, naive_rows(engine, part(tokens, 0, 120))));
        // Of one layer, a position that lies just behind the window changes nothing, and the window's last one does.
        Shape one = mixed_shape(window);
        one.list = {one.list[1]};
        Engine local = engine_of(random_model(one));
        auto last_row = [&](int changed) {
            Tokens other = tokens;
            if (changed >= 0) other[changed] = (other[changed] + 1) % 23;
            Vector rows = cached(local, F32{}, F32{}, keeping_all({}), other, 512, 250);
            return Vector(rows.end() - 23, rows.end());
        };
        CHECK(same_bits(last_row(-1), last_row(249 - window)));
        CHECK(!same_bits(last_row(-1), last_row(250 - window)));
    }
}

// vllm-ascend 11791: rows were allocated and stored for layers that read another one's; vLLM 43185: these skipped to
// the wrong one.
TEST_CASE(
    "layers that share rows: nothing is kept for them, nothing is stored by them, and they read the last of their "
    "kind") {
    const Kind global = kind_of(2, 8), local = kind_of(1, 12, 9);
    Shape shape = {0, 16, 24, 4, 0, 0, 23};
    shape.list = {{global},        {local}, {global},       {local, false},
                  {global, false}, {local}, {local, false}, {global, false}};
    Shape without = shape;
    without.list = {{global}, {local}, {global}, {local}};
    Engine engine = engine_of(random_model(shape)), fewer = engine_of(random_model(without));
    const Tokens tokens = random_tokens(engine, 60);
    for (const auto &[layer, kind, index, own] : std::vector<std::array<int, 4>>{{0, 0, 0, 1},
                                                                                 {1, 1, 0, 1},
                                                                                 {2, 0, 1, 1},
                                                                                 {3, 1, 0, 0},
                                                                                 {4, 0, 1, 0},
                                                                                 {5, 1, 1, 1},
                                                                                 {6, 1, 1, 0},
                                                                                 {7, 0, 1, 0}}) {
        const LayerRows &rows = engine.model.config.rows[layer];
        CHECK((rows.kind == kind && rows.index == index && rows.own == (own == 1)));
    }
    CHECK(relative_error(naive_rows(engine, tokens), reference::logits_of(engine.model, tokens)) <= 1e-5);
    for (const Precision &type : all_of<Precision>())
        for (const Place &place : {Place{}, paged(16), ring(20, 2)}) {
            CAPTURE(std::string(name_of(type)) + " " + place.name());
            auto open = [&](Engine &e) { return cache_for(e, type, type, 60, place); };
            Cache cache = open(engine), as_much = open(fewer), first = open(engine);
            CHECK(cache.stores.size() == 2);
            CHECK((cache.stores[0].shape.layers == 2 && cache.stores[1].shape.layers == 2));
            CHECK(bytes_of(cache).total() == bytes_of(as_much).total());
            // What the first six layers store, the last two leave as it is.
            const Vector rows = prefilled_rows(engine, cache, tokens);
            engine.model.config.layers = 6;
            prefilled_rows(engine, first, tokens);
            engine.model.config.layers = 8;
            CHECK((stored_bytes(cache) == stored_bytes(first)));
            if (!place.window) CHECK(same_bits(rows, cached(engine, type, type, keeping_all({}), tokens, 5, 20)));
            if (cache.stores[0].pool) continue;  // the next pass gives some of its pages back
            // If no layer had rows of its own, a pass would leave the cache's as they are.
            Engine readers = engine_of(random_model(shape));
            for (int layer = 0; layer < 8; layer++) {
                readers.model.config.rows[layer].own = false;
                readers.model.layers[layer].key = readers.model.layers[layer].value = {};
            }
            const std::vector<std::string> before = stored_bytes(cache);
            rewind(cache, 0, 59);
            decode(readers, cache, {0}, {tokens[3]});
            CHECK((stored_bytes(cache) == before));
        }
}

TEST_CASE("what layers with a window keep: a ring of it and a chunk, without sinks, or all where that is less") {
    Engine engine = engine_of(random_model(mixed_shape(7, 300)));
    for (const Place &place : {Place{}, ring(600, 4)}) {
        const Cache cache = cache_for(engine, F16{}, F16{}, 330, place);
        for (int kind : {1, 2}) {
            CAPTURE(kind);
            const Store &store = cache.stores[kind];
            const bool all = kind == 2 && !place.window;  // of 300 + 32 rows
            if (all) CHECK(std::get<Contiguous>(store.layout).capacity == 330);
            if (!all) CHECK(std::get<Ring>(store.layout).slots == (kind == 1 ? 64 : 352));
            CHECK((store.view.sinks == 0 && !store.view.sink_keys.data));
            CHECK(store.view.keys.rows_per_layer == (all ? 330 : kind == 1 ? 64 : 352));
        }
        CHECK(limit_of(cache) == (place.window ? INT_MAX : 330));
    }
    Shape alone = mixed_shape();
    alone.list = {alone.list[1]};
    Engine local = engine_of(random_model(alone));
    CHECK(limit_of(cache_for(local, F16{}, F16{}, 330)) == 330);  // as -c says, though there are rows for more
}

TEST_CASE("pages behind a window go back to the pool as soon as no query sees them, and are not read again") {
    for (const Precision &type : {Precision(F32{}), Precision(Int8{}), Precision(Int4{}), Precision(Int2{})})
        for (int page : {1, 3, 16, 48}) {
            if (left_out()) continue;
            CAPTURE(std::string(name_of(type)) + " " + paged(page).name());
            Engine engine = engine_of(random_model(mixed_shape()));
            const Tokens tokens = random_tokens(engine, 230);
            const Vector all = cached(engine, type, type, keeping_all(paged(page)), tokens, 32, 150);
            Cache cache = cache_for(engine, type, type, 230, paged(page), 2);
            prefill(engine, cache, 1, part(tokens, 0, 100));  // another one's pages lie between
            Vector rows = cached_rows(engine, cache, 0, part(tokens, 0, 150), 150, 150);
            for (int t = 150; t < 230; t++) {
                append(rows, decode(engine, cache, {0}, {tokens[t]}));
                check_pages(cache);
                for (const Store &store : cache.stores) {
                    const int window = store.shape.local, seen = window ? (t - window + 1) / 32 * 32 : 0;
                    REQUIRE(store.pool->first[0] == seen / page);  // whole blocks of 32
                }
            }
            CHECK(same_bits(all, rows));
            CHECK(cache.stores[1].pool->used() < cache.stores[2].pool->used());
            CHECK(cache.stores[2].pool->used() < cache.stores[0].pool->used());
            for (int sequence : {0, 1}) rewind(cache, sequence, 0);
            check_pages(cache), check_all_free(cache);
        }
}

TEST_CASE("a learned sink takes its part of each head's softmax, and brings nothing") {
    Shape shape = mixed_shape();
    shape.list.resize(6);  // no convolutions
    for (Layer &layer : shape.list) layer.sinks = true;
    Engine engine = engine_of(random_model(shape));
    const Tokens tokens = random_tokens(engine, 90);
    auto set_sinks = [&](float low, float high) {  // of the even heads, of the odd ones
        for (LayerWeights &w : engine.model.layers)
            for (int head = 0; head < 4; head++) ((float *)w.sinks.data)[head] = head % 2 ? high : low;
    };
    for (float sink : {-1e30f, -5.0f, 0.0f, 3.0f, 30.0f}) {
        CAPTURE(sink);
        set_sinks(sink, sink + 2);
        const Vector naive = naive_rows(engine, tokens);
        CHECK(relative_error(naive, reference::logits_of(engine.model, tokens)) <= 1e-5);
        for (const Place &place : {Place{}, paged(3), ring(100, 2)})
            CHECK(agree(naive, cached(engine, F32{}, F32{}, place, tokens, 11, 60)));
    }
    set_sinks(-1e30f, -1e30f);  // no part at all
    const Vector nothing = cached(engine, F16{}, Int4{}, {}, tokens, 11, 60);
    set_sinks(1e4f, 1e4f);  // all of it: a token sees itself in the residual stream alone
    const Vector all = cached(engine, F32{}, F32{}, {}, tokens, 11, 60);
    CHECK(agree(naive_rows(engine, tokens), all));
    for (int t = 1; t < 90; t++)
        for (int u = 0; u < t; u++)
            if (tokens[t] == tokens[u])
                REQUIRE(!memcmp(&all[(size_t)t * 23], &all[(size_t)u * 23], 23 * sizeof(float)));
    for (LayerWeights &w : engine.model.layers) w.sinks = {};
    CHECK(same_bits(nothing, cached(engine, F16{}, Int4{}, {}, tokens, 11, 60)));
}
