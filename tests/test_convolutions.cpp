// Short convolutions: layers that keep a state of fixed size in place of keys and values. Their states are rows of a
// window, at f32 whatever the others' precision is; so of a model that has no other layers every cache is the naive
// path, bit for bit.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "kinds.h"

static Shape convolutions_of(const Tokens &taps, bool biased = false) {
    Shape shape = {0, 16, 24, 4, 0, 0, 23};
    for (int length : taps) {
        shape.list.push_back({convolution_of(length, 16)});
        shape.list.back().biased = biased;
    }
    return shape;
}

static const std::vector<Place> places = {Place{},
                                          keeping_all({}),
                                          paged(1),
                                          paged(3),
                                          paged(16),
                                          paged(48),
                                          keeping_all(paged(16)),
                                          ring(1, 0),
                                          ring(2, 1),
                                          ring(40, 3),
                                          keeping_all(ring(2, 1))};

TEST_CASE("the equation in double precision, for any number of taps, with a bias and without") {
    for (int taps : {1, 2, 3, 4, 7, 33, 200})
        for (bool biased : {false, true}) {
            CAPTURE(taps);
            Engine engine = engine_of(random_model(convolutions_of({taps, 3}, biased)));
            const Tokens tokens = random_tokens(engine, 90);
            CHECK(relative_error(naive_rows(engine, tokens), reference::logits_of(engine.model, tokens)) <= 1e-5);
        }
}

TEST_CASE(
    "a state across chunks of 1, 2, 3, 31, 32, 33 tokens is the naive path's, bit for bit, in every layout and "
    "precision") {
    Engine engine = engine_of(random_model(convolutions_of({3, 4, 1}))), two = with_threads(engine, 2);
    const Tokens tokens = random_tokens(engine, 140);
    const Vector naive = naive_rows(engine, tokens);
    Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    for (const Precision &type_k : all_of<Precision>())
        for (const Precision &type_v : {type_k, Precision(F16{})})
            for (const Place &place : places) {
                CAPTURE(std::string(name_of(type_k)) + " " + name_of(type_v) + " " + place.name());
                for (int chunk : {1, 2, 3, 31, 32, 33}) {
                    CAPTURE(chunk);
                    const Vector rows = cached(chunk % 2 ? engine : two, type_k, type_v, place, tokens, chunk, 120);
                    CHECK(same_bits(naive, rows));
                }
                CHECK(same_bits(naive, among_others(engine, type_k, type_v, place, tokens, random)));
            }
}

TEST_CASE("what a token sees: its own state and those of the last L - 1, and of no token before") {
    for (int taps : {1, 2, 3, 7}) {
        CAPTURE(taps);
        Engine engine = engine_of(random_model(convolutions_of({taps})));
        const Tokens tokens = random_tokens(engine, 60);
        for (const Place &place : {Place{}, paged(3)}) {
            auto last_row = [&](const Tokens &text) {
                const Vector rows = cached(engine, F16{}, F16{}, place, text, 5, 40);
                return Vector(rows.end() - 23, rows.end());
            };
            for (int back : {0, taps - 1, taps, 30}) {
                Tokens other = tokens;
                other[59 - back] = (other[59 - back] + 1) % 23;
                CHECK(same_bits(last_row(tokens), last_row(other)) == (back >= taps));
            }
        }
    }
}

TEST_CASE("the state of a pass that failed is that before it") {
    Engine engine = engine_of(random_model(convolutions_of({3, 4})));
    const Tokens tokens = random_tokens(engine, 130), wrong = random_tokens(engine, 128, 9);
    const Vector naive = naive_rows(engine, tokens);
    for (const Place &place : places)
        for (int count : {1, 2, 3, 31, 127, 128}) {
            CAPTURE(place.name());
            CAPTURE(count);
            Cache cache = cache_for(engine, F16{}, F16{}, 400, place);
            Vector rows;
            for (int t = 0; t < 130; t++) {
                if (t % 9 == 0 || t > 120)
                    CHECK_THROWS_AS(prefill_pass(engine, cache, 0, part(wrong, 0, std::min(count, chunk_of(cache))),
                                                 [](int) { throw Interrupted(); }),
                                    Interrupted);
                check_pages(cache);
                append(rows, decode(engine, cache, {0}, {tokens[t]}));
            }
            CHECK(same_bits(naive, rows));
        }
}

TEST_CASE("a text that begins like another one finds its states in pages, or computes them") {
    Engine engine = engine_of(random_model(convolutions_of({3, 4})));
    const Tokens tokens = random_tokens(engine, 150);
    const Vector naive = naive_rows(engine, tokens);
    int known = 0;
    for (int page : {1, 2, 3, 16, 32})
        for (int length : {1, 2, 5, 33, 64, 96, 128}) {
            CAPTURE(page);
            CAPTURE(length);
            Cache cache = cache_for(engine, F16{}, F16{}, 200, paged(page), 2);
            prefill(engine, cache, 0, part(tokens, 0, length));
            publish(cache, 0, tokens, length);
            if (length % 2) rewind(cache, 0, 0);
            const int found = find_known(cache, 1, tokens);
            known += found > 0;
            const Vector rows = cached_rows(engine, cache, 1, part(tokens, found, 150), 20, 150 - found);
            CHECK(same_bits(Vector(naive.begin() + found * 23, naive.end()), rows));
            check_pages(cache);
        }
    CHECK(known > 10);
}

TEST_CASE("a store of states: f32, no values, no residual block, no sinks; L and a pass of 128 in a ring") {
    Engine engine = engine_of(random_model(convolutions_of({3})));
    for (const Precision &type : all_of<Precision>())
        for (const Place &place : places) {
            CAPTURE(std::string(name_of(type)) + " " + place.name());
            const Cache cache = cache_for(engine, type, type, 1000, place, 2);
            const CacheView &view = cache.stores[0].view;
            CHECK((view.keys.data && view.keys.row_bytes == 16 * 4));
            for (const CacheRows *none : {&view.values, &view.residual_keys, &view.residual_values, &view.sink_keys})
                CHECK((!none->data && none->bytes(1) == 0));
            const bool paged = cache.pages != nullptr, keeps_all = place.all && !place.window;
            const double rows = paged ? 0 : keeps_all ? 1000 : 160;  // 3 + 128 - 1, in 32s
            const double tables =
                paged ? 4.0 * (2 * pages_for(1000, place.page) + 2 * (double)cache.pages->pools[0].references.size())
                      : 0;
            CHECK(bytes_of(cache).total() == 2 * rows * 64 + tables);
            if (!paged) CHECK(bytes_of(cache).payload == 2 * (keeps_all ? 1000 : 3) * 64);
            CHECK(chunk_of(cache) == (keeps_all ? INT_MAX : 128));
            if (paged && !keeps_all) {
                const int pages = std::min(pages_for(1000, place.page), (3 + 128 + 30) / place.page + 2);
                CHECK((int)cache.pages->pools[0].references.size() == 2 * pages);
            }
        }
}
