// Layers of several kinds, going back: sequences that are cut or end, and passes that fail.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "kinds.h"

// What a text that was cut reads next. Without blocks it is what a cache reads that was never longer; with them, where
// a block was cut, what a cache reads that keeps all positions and was cut, too. What cannot be is refused.
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
    int refused = 0;
    for (int i = 0; i < cuts; i++) {
        const int most = i % 2 ? reached - 1 : 75;  // what a block of codes lost with its first page: beside 64
        const int length = std::min(reached - 1, std::max(1, most - below(random, i % 4 ? 30 : reached)));
        CAPTURE(reached);
        CAPTURE(length);
        Cache cut = begun(place, reached, 2);
        prefill_pass(engine, cut, 1, part(others, 0, 20));
        // Some go back twice, and a step between: what was overwritten does not come back with that.
        const int middle = length + below(random, reached - length);
        const bool twice = i % 3 == 0 && middle > length && error_of([&] { shrink(cut, 0, middle); }).empty();
        if (twice) decode(engine, cut, {0}, {others[0]});
        const Everything before(cut);
        const std::string line = error_of([&] { shrink(cut, 0, length); });
        check_pages(cut);
        if (!line.empty()) {
            refused++;
            CHECK(contains(line, "back from " + std::to_string(reached) + " positions to " + std::to_string(length) +
                                     ": layers that see "));
            CHECK((Everything(cut) == before));
            // What the last pass brought can always go: the last of its chunks of 32, or of its steps.
            CHECK((twice || length < (steps ? reached - 1 : (reached - 1) / 32 * 32)));
            continue;
        }
        CHECK((cut.lengths == Tokens{length, 20}));
        const bool same_block = !twice && (length - 1) / 32 == (reached - 1) / 32;
        Cache other = begun(keeping_all(place.window ? place : Place{}), blocks && !same_block ? reached : length);
        if (blocks && twice) shrink(other, 0, middle), decode(engine, other, {0}, {others[0]});
        shrink(other, 0, length);
        CHECK(same_bits(rest(cut), rest(other)));
        check_pages(cut);
    }
    if (place.all && !place.window) CHECK(refused == 0);
    return refused;
}

TEST_CASE("a cut sequence reads as if it had never been longer, or is refused and nothing has changed") {
    Random random{seed_of_run()};
    CAPTURE(random.state);
    int refused = 0;
    for (int narrow : {1, 5, 33}) {
        CAPTURE(narrow);
        Engine engine = engine_of(random_model(mixed_shape(narrow)));
        const std::pair<Precision, Precision> pairs[] = {
            {F32{}, F32{}}, {Int4{}, Int2{}}, {F16{}, Int4{}}, {Int2{}, FP8{}}};
        for (const auto &[type_k, type_v] : pairs)
            for (const Place &place :
                 {Place{}, keeping_all(paged(7)), paged(1), paged(3), paged(16), paged(48), ring(60, 2)})
                refused += left_out() ? 0 : check_cuts(engine, type_k, type_v, place, plain_path ? 4 : 8, random);
        for (const Precision &type : all_of<Precision>())
            if (!left_out()) check_cuts(engine, type, type, paged(5), 4, random);
    }
    CHECK(refused > (plain_path ? 2 : 20));
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
                shrink(cache, 0, 0);
                check_pages(cache), check_all_free(cache);
                CHECK((cache.lengths[0] == 0 && cache.reached[0] == 0));
                CHECK(same_bits(right, cached_rows(engine, cache, 0, others, 150, 120)));
                shrink(cache, 0, 0);
            }
        }
}

// ---- All or nothing ----------------------------------------------------------------------------------------

TEST_CASE("a pass that failed in any layer, or was ended: lengths are the old ones, and going on has the same bits") {
    for (const auto &[narrow, wide] : {std::pair{1, 2}, {7, 40}}) {
        Engine engine = engine_of(random_model(mixed_shape(narrow, wide)));
        const int layers = engine.model.config.layers, total = 170;
        const Tokens tokens = random_tokens(engine, total), others = random_tokens(engine, total, 9);
        auto rows_of = [&](Cache &cache, bool failing) {
            auto try_in_vain = [&](int count) {
                const Tokens lengths = cache.lengths, wrong = part(others, 0, count);
                for (int through = 0; through <= layers; through += 3) {
                    engine.model.config.layers = through;
                    auto fail_in_first = [&](int) { throw Interrupted(); };
                    CHECK_THROWS_AS(prefill_pass(engine, cache, 0, wrong, fail_in_first), Interrupted);
                    engine.model.config.layers = layers;
                    CHECK(cache.lengths == lengths);
                    check_pages(cache);
                }
                interrupts = 1;  // Ctrl-C
                CHECK_THROWS_AS(decode(engine, cache, {0}, {wrong[0]}), Interrupted);
                interrupts = 0;
                CHECK(cache.lengths == lengths);
                check_pages(cache);
            };
            Vector rows;
            int begin = 0;
            for (int stop : {5, 31, 64, 96, 128, 150, 169}) {
                if (failing) try_in_vain(stop - begin), try_in_vain(1);
                prefill_pass(engine, cache, 0, part(tokens, begin, stop), [&](int count) {
                    const Vector found = logits(engine, 0, count);
                    rows.insert(rows.end(), found.begin(), found.end());
                });
                if (failing) try_in_vain(1);
                const Vector found = decode(engine, cache, {0}, {tokens[stop]});
                rows.insert(rows.end(), found.begin(), found.end());
                begin = stop + 1;
            }
            return rows;
        };
        const std::pair<Precision, Precision> pairs[] = {
            {F32{}, F32{}}, {Int4{}, Int4{}}, {F16{}, Int2{}}, {Int2{}, Int8{}}};
        for (const auto &pair : pairs)
            for (const Place &place : {Place{}, paged(1), paged(3), paged(32), paged(48), ring(20, 2)}) {
                if (left_out()) continue;
                const auto &type_k = pair.first, &type_v = pair.second;
                CAPTURE(std::string(name_of(type_k)) + " " + name_of(type_v) + " " + place.name());
                Cache never = cache_for(engine, type_k, type_v, total, place),
                      often = cache_for(engine, type_k, type_v, total, place);
                CHECK(same_bits(rows_of(never, false), rows_of(often, true)));
            }
    }
}

TEST_CASE("the pool of the layers that see all runs out in the middle of a pass: the local layers' pages stay right") {
    Engine engine = engine_of(random_model(mixed_shape()));
    for (const Precision &type : {Precision(F16{}), Precision(Int4{}), Precision(Int2{})})
        for (int page : {1, 8, 16}) {
            CAPTURE(std::string(name_of(type)) + " " + paged(page).name());
            Place few = paged(page), enough = paged(page);
            few.pages = 128 / page + 1;  // one more than both hold
            Cache small = cache_for(engine, type, type, 160, few, 2),
                  large = cache_for(engine, type, type, 160, enough, 2);
            for (Cache *cache : {&small, &large})
                for (int i : {0, 1}) prefill(engine, *cache, i, random_tokens(engine, 64, i + 1));
            const Tokens lengths = small.lengths;
            for (int tries = 0; tries < 2; tries++) {
                CHECK_THROWS_AS(decode(engine, small, {0, 1}, {6, 7}), Error);
                CHECK(small.lengths == lengths);
                check_pages(small);
            }
            CHECK_THROWS_AS(prefill(engine, small, 1, random_tokens(engine, page + 1)), Error);
            check_pages(small);
            shrink(small, 0, 0);  // as the message says
            CHECK(same_bits(prefill(engine, small, 1, random_tokens(engine, 50)),
                            prefill(engine, large, 1, random_tokens(engine, 50))));
            check_pages(small);
            CHECK(same_bits(decode(engine, small, {1}, {8}), decode(engine, large, {1}, {8})));
        }
}
