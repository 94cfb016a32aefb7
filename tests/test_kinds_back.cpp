// Layers of several kinds, going back: sequences that are cut or end, and passes that fail.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "kinds.h"

// A text that went back, and read what it lost with that once more, reads what a cache does that was never longer.
// Returns how many went back further than they were told to.
static int check_cuts(Engine &engine, const Precision &type_k, const Precision &type_v, const Place &place, int cuts,
                      Random &random) {
    CAPTURE(std::string(name_of(type_k)) + " " + name_of(type_v) + " " + place.name());
    const int reached = 60 + below(random, 110), steps = below(random, 12);
    const Tokens tokens = random_tokens(engine, reached), others = random_tokens(engine, 45, 7);
    auto begun = [&](const Place &where, int length, int sequences = 1) {  // by a prompt, and by some steps behind it
        Cache cache = cache_for(engine, type_k, type_v, 230, where, sequences);
        const int prompt = std::min(length, reached - steps);
        prefill_pass(engine, cache, 0, part(tokens, 0, prompt));
        for (int t = prompt; t < length; t++) decode(engine, cache, {0}, {tokens[t]});
        return cache;
    };
    auto rest = [&](Cache &cache) { return cached_rows(engine, cache, 0, others, 40, 40); };
    const bool blocks = has_blocks(type_k) || has_blocks(type_v);
    int further = 0;
    for (int i = 0; i < cuts; i++) {
        const int most = i % 2 ? reached - 1 : 75;  // what a block of codes lost with its first page: beside 64
        const int length = std::min(reached - 1, std::max(1, most - below(random, i % 4 ? 30 : reached)));
        CAPTURE(reached);
        CAPTURE(length);
        Cache cut = begun(place, reached, 2);
        prefill_pass(engine, cut, 1, part(others, 0, 20));
        // Some go back twice, and a step between: what was overwritten does not come back with that.
        const int middle = length + below(random, reached - length);
        const bool twice = i % 3 == 0 && middle > length;
        auto back = [&](int to) {
            const int from = cut.lengths[0], whole = blocks && to / 32 < from / 32 ? to / 32 * 32 : to;
            const int kept = rewind(cut, 0, to);
            check_pages(cut);
            CHECK((cut.lengths == Tokens{kept, 20}));
            // What the last pass brought can always go: the last of its chunks of 32, or of its steps, unless a block of
            // codes goes with it that is older. And all can go where no window was left.
            CHECK((kept == whole || kept == 0));
            if (place.all && !place.window) CHECK(kept == whole);
            if (!twice && whole >= (steps ? reached - 1 : (reached - 1) / 32 * 32)) CHECK(kept == whole);
            further += kept < whole;
            prefill_pass(engine, cut, 0, part(tokens, kept, to));
        };
        if (twice) back(middle), decode(engine, cut, {0}, {others[0]});
        back(length);
        Cache other = begun(keeping_all(place.window ? place : Place{}), length);
        CHECK(same_bits(rest(cut), rest(other)));
        check_pages(cut);
    }
    return further;
}

TEST_CASE("a sequence that went back, and read again what it lost, reads as if it had never been longer") {
    Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    int further = 0;
    for (int narrow : {1, 5, 33}) {
        CAPTURE(narrow);
        Engine engine = engine_of(random_model(mixed_shape(narrow)));
        const std::pair<Precision, Precision> pairs[] = {
            {F32{}, F32{}}, {Int4{}, Int2{}}, {F16{}, Int4{}}, {Int2{}, FP8{}}};
        for (const auto &[type_k, type_v] : pairs)
            for (const Place &place :
                 {Place{}, keeping_all(paged(7)), paged(1), paged(3), paged(16), paged(48), ring(60, 2)})
                further += left_out() ? 0 : check_cuts(engine, type_k, type_v, place, plain_path ? 4 : 8, random);
        for (const Precision &type : all_of<Precision>())
            for (const Place &place : {Place{}, paged(5), ring(50, 2)})
                if (!left_out()) check_cuts(engine, type, type, place, 4, random);
    }
    CHECK(further > (plain_path ? 2 : 20));
}

TEST_CASE("a sequence that ends gives everything back and begins anew, in every precision") {
    Engine engine = engine_of(random_model(mixed_shape()));
    const Tokens tokens = random_tokens(engine, 200), others = random_tokens(engine, 150, 5);
    for (const Precision &type : all_of<Precision>())
        for (const Place &place : {Place{}, paged(3), paged(48), ring(60, 2)}) {
            if (left_out()) continue;
            CAPTURE(std::string(name_of(type)) + " " + place.name());
            Cache cache = cache_for(engine, type, type, 200, place), fresh = cache_for(engine, type, type, 200, place);
            const Vector right = cached_rows(engine, fresh, 0, others, 150, 120);
            for (int length : {200, 33, 1}) {
                prefill(engine, cache, 0, part(tokens, 0, length));
                rewind(cache, 0, 0);
                check_pages(cache), check_all_free(cache);
                CHECK((cache.lengths[0] == 0 && cache.reached[0] == 0));
                CHECK(same_bits(right, cached_rows(engine, cache, 0, others, 150, 120)));
                rewind(cache, 0, 0);
            }
        }
}

// ---- All or nothing ----------------------------------------------------------------------------------------

// Reads a text with passes that fail between those that do not, and without; into a cache that has room for the longest
// of them.
static void check_failures(Engine &engine, const Precision &type_k, const Precision &type_v) {
    const int layers = engine.model.config.layers, total = 170;
    const Tokens tokens = random_tokens(engine, total), others = random_tokens(engine, total, 9);
    auto rows_of = [&](Cache &cache, const Tokens &stops, bool failing) {
        // Other tokens, through some of the layers or all, and Ctrl-C.
        auto try_in_vain = [&](int count) {
            const Tokens before = tables_of(cache, false), wrong = part(others, 0, count);
            auto check_refused = [&](auto pass) {
                CHECK_THROWS_AS(pass(), Interrupted);
                CHECK(tables_of(cache, false) == before);
                check_pages(cache);
            };
            auto fail = [](int) { throw Interrupted(); };
            for (int through = 0; failing && through <= layers; through += layers > 2 ? 3 : 1) {
                engine.model.config.layers = through;
                check_refused([&] { prefill_pass(engine, cache, 0, wrong, fail); });
                check_refused([&] { all_or_nothing(cache, [&] { decode(engine, cache, {0}, {7}), fail(1); }); });
                engine.model.config.layers = layers;
            }
            interrupts = failing;
            if (failing) check_refused([&] { decode(engine, cache, {0}, {wrong[0]}); });
            interrupts = 0;
        };
        Vector rows;
        int begin = 0;
        for (int stop : stops) {
            try_in_vain(stop - begin);
            prefill_pass(engine, cache, 0, part(tokens, begin, stop),
                         [&](int count) { append(rows, logits(engine, 0, count)); });
            try_in_vain(70);
            append(rows, decode(engine, cache, {0}, {tokens[stop]}));
            begin = stop + 1;
        }
        return rows;
    };
    for (const Tokens &stops : {Tokens{5, 31, 64, 96, 128, 150, 169}, Tokens{32, 63, 100, 140}})
        for (const Place &place :
             {Place{}, paged(1), paged(3), paged(7), paged(32), paged(48), ring(20, 2), ring(1, 0), ring(64, 4)}) {
            if (left_out()) continue;
            CAPTURE(place.name());
            Cache never = cache_for(engine, type_k, type_v, total + 70, place),
                  often = cache_for(engine, type_k, type_v, total + 70, place);
            CHECK(same_bits(rows_of(never, stops, false), rows_of(often, stops, true)));
        }
}

TEST_CASE("a pass that failed in any layer, or was ended: tables are the old ones, and going on has the same bits") {
    for (const auto &[narrow, wide] : {std::pair{1, 2}, {7, 40}}) {
        Engine engine = engine_of(random_model(mixed_shape(narrow, wide)));
        check_failures(engine, F32{}, F32{}), check_failures(engine, Int4{}, Int4{});
        check_failures(engine, F16{}, Int2{}), check_failures(engine, Int2{}, Int8{});
    }
    if (plain_path) return;
    Engine engine = engine_of(fixtures + "llama_gqa_9_on_3");  // layers of one kind
    for_each_pair([&](const Precision &type_k, const Precision &type_v) { check_failures(engine, type_k, type_v); });
}

TEST_CASE("a pool that runs out in the middle of a pass: all sequences or none, of each kind, and going on is right") {
    for (bool kinds : {true, false})
        for (const Precision &type : all_of<Precision>())
            for (int page : {1, 8, 16}) {
                CAPTURE(std::string(name_of(type)) + " " + paged(page).name());
                Engine engine = engine_of(kinds ? random_model(mixed_shape()) : load_model(fixtures + "llama_mqa"));
                Place few = paged(page);
                few.pages = 128 / page + pages_for(9, page) + 1;  // one more than the three hold
                Cache small = cache_for(engine, type, type, 160, few, 3),
                      large = cache_for(engine, type, type, 160, paged(page), 3);
                for (Cache *cache : {&small, &large})
                    for (int i : {0, 1, 2}) prefill(engine, *cache, i, random_tokens(engine, i < 2 ? 64 : 9, i + 1));
                const Tokens before = tables_of(small, false);
                auto check_refused = [&](auto pass, int pages) {
                    CHECK(error_of(pass) ==
                          formatted("the cache has %s of %s, %d are needed: end a sequence, or make the pool larger",
                                    counted(pages - 1, "free page").c_str(), counted(page, "position").c_str(), pages));
                    CHECK(tables_of(small, false) == before);
                    check_pages(small);
                };
                // With pages of 8 and 16 the third has room for one more; then one takes the last page, one asks.
                for (int tries = 0; tries < 2; tries++)
                    check_refused([&] { decode(engine, small, {2, 0, 1}, {6, 7, 8}); }, 1);
                check_refused([&] { prefill(engine, small, 1, random_tokens(engine, page + 1)); }, 2);
                rewind(small, 0, 0);  // as the message says
                CHECK(same_bits(prefill(engine, small, 1, random_tokens(engine, 50)),
                                prefill(engine, large, 1, random_tokens(engine, 50))));
                check_pages(small);
                CHECK(same_bits(decode(engine, small, {2, 1}, {8, 9}), decode(engine, large, {2, 1}, {8, 9})));
            }
}
