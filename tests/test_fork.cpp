// fork() (cache.h): two sequences that begin alike share what they have, and go on as if each had been read alone.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "../fast/attend.h"
#include "kinds.h"

// After a fork at `length` two sequences go on with other tokens, by turns and together.
static void check_fork(Engine &engine, const Precision &type_k, const Precision &type_v, const Place &place, int length,
                       Random &random) {
    CAPTURE(std::string(name_of(type_k)) + " " + name_of(type_v) + " " + place.name());
    CAPTURE(length);
    const Tokens begin = random_tokens(engine, length, 1);
    const Tokens rest[] = {random_tokens(engine, 75, 2), random_tokens(engine, 75, 3)};
    Cache cache = cache_for(engine, type_k, type_v, 240, place, 3);
    prefill(engine, cache, 2, random_tokens(engine, 3, 9));
    // It may have been longer: what was overwritten then does not come back by a fork.
    const int longer = below(random, 2) ? below(random, 70) : 0;
    auto back = [&](Cache &any, int sequence, int to) {
        const int kept = rewind(any, sequence, to);
        prefill_pass(engine, any, sequence, part(begin, kept, to));
        return kept;
    };
    auto begun = [&](Cache &any) {
        prefill(engine, any, 0, begin);
        if (longer) prefill(engine, any, 0, random_tokens(engine, longer, 4));
        back(any, 0, length);
    };
    begun(cache);
    const bool pages = cache.pages != nullptr;
    const PagePool *pool = pages ? &cache.pages->pools[0] : nullptr;
    const int used = pages ? pool->used() : 0;
    fork(cache, 0, 1);
    CHECK((cache.lengths == Tokens{length, length, 3} && cache.reached[1] == cache.reached[0]));
    if (pages) CHECK(pool->used() == used);
    const int cut = below(random, 3) ? 0 : below(random, std::min(length, 20)), of = below(random, 2);
    const int kept = back(cache, of, length - cut);
    Vector found[2], expected[2];
    auto right = [&] { return !pages || check(*cache.pages).empty(); };
    for (int sequence : {0, 1}) {  // alone
        Cache alone = cache_for(engine, type_k, type_v, 240, place);
        begun(alone);
        if (sequence == of) CHECK(back(alone, 0, length - cut) == kept);
        expected[sequence] = cached_rows(engine, alone, 0, rest[sequence], 33, 33);
    }
    const int first = below(random, 2);
    for (int sequence : {first, 1 - first}) {
        found[sequence] = cached_rows(engine, cache, sequence, part(rest[sequence], 0, 33), 33, 33);
        REQUIRE(right());
    }
    if (pages && !pool->window) {  // those that were full at the fork once, and one of sequence 2
        const int others = pages_for(length - cut + 33, place.page) - kept / place.page;
        CHECK(pool->used() == pages_for(length + 33, place.page) + others + pages_for(3, place.page));
    }
    for (int t = 33; t < 75; t++) {
        const Vector both = decode(engine, cache, {1, 0}, {rest[1][t], rest[0][t]});
        append(found[1], Vector(both.begin(), both.begin() + both.size() / 2));
        append(found[0], Vector(both.begin() + both.size() / 2, both.end()));
    }
    REQUIRE(right());
    for (int sequence : {0, 1}) CHECK(same_bits(found[sequence], expected[sequence]));
    for (int sequence : {0, 1, 2}) rewind(cache, sequence, 0);
    REQUIRE(right());
    for (int kind = 0; pages && kind < (int)cache.stores.size(); kind++) CHECK(cache.pages->pools[kind].used() == 0);
}

TEST_CASE("a forked sequence goes on as if it had been read alone: every layout and pair of precisions") {
    Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    Engine engines[] = {engine_of(random_model({2, 32, 48, 4, 2, 20, 40})), engine_of(random_model(mixed_shape()))};
    int turn = 0;
    for_each_pair([&](const Precision &type_k, const Precision &type_v) {
        const bool blocks = has_blocks(Choice<Precision>(type_k)) || has_blocks(Choice<Precision>(type_v));
        for (const Place &place : {Place{}, paged(blocks ? 32 : 1 + below(random, 20)), paged(64), ring(40, 3),
                                   keeping_all(paged(32)), keeping_all(Place{})}) {
            if (left_out()) continue;
            const int length = turn++ % 3 ? 1 + below(random, 140) : one_of(random, {31, 32, 33, 64, 96, 100});
            check_fork(engines[below(random, 2)], type_k, type_v, place, length, random);
        }
    });
}

// Three texts that begin alike for 1 to 700 positions, and two others, in passes of one to four tokens of each, in any
// order.
// Returns how many parts of attention were those of several texts.
static int check_shared_splits(Engine &engine, const Precision &type_k, const Precision &type_v, const Place &place,
                               Random &random) {
    CAPTURE(std::string(name_of(type_k)) + " " + name_of(type_v) + " " + place.name());
    constexpr int texts = 5, longest = 800;
    const Tokens begins[] = {random_tokens(engine, 700, 1), random_tokens(engine, 700, 2)};
    Cache cache = cache_for(engine, type_k, type_v, longest, place, texts);
    Tokens tokens[texts];
    Vector found[texts];
    int lengths[texts], order[texts] = {0, 1, 2, 3, 4};
    prefill(engine, cache, 0, begins[0]), prefill(engine, cache, 3, begins[1]);
    fork(cache, 0, 1), fork(cache, 0, 2), fork(cache, 3, 4);
    int long_ones[2] = {};  // that have all of the first split, and the pages that hold it
    for (int i = 0; i < texts; i++) {
        tokens[i] = random_tokens(engine, longest, 10 + i);
        lengths[i] = below(random, 3) ? 1 + below(random, 700) : 700;
        const int kept = rewind(cache, i, lengths[i]);
        prefill_pass(engine, cache, i, part(begins[i / 3], kept, lengths[i]));
        std::copy_n(begins[i / 3].begin(), lengths[i], tokens[i].begin());
        long_ones[i / 3] += kept >= fast::split_positions + 96;
    }
    int shared = 0;
    for (int pass = 0; pass < 6; pass++) {
        Batch batch;
        std::vector<std::pair<int, int>> rows;  // text, tokens
        std::swap(order[below(random, texts)], order[below(random, texts)]);
        for (int i : order) {
            const int count = std::min(tokens_of_pass(cache, i, 1 + below(random, 4)), chunk_of(cache));
            const int first = grow(cache, i, count);
            for (int t = first; t < first + count; t++) batch.add(tokens[i][t], i, t);
            rows.push_back({i, count});
        }
        forward(engine, batch, cache.stores);
        const Vector all = logits(engine, 0, batch.count());
        auto from = all.begin();
        for (auto [i, count] : rows) {
            const auto to = from + count * engine.model.config.vocabulary;
            found[i].insert(found[i].end(), from, to), from = to;
        }
        int most = 1;
        for (const fast::AttentionPlan &plan : *(fast::Plans *)std::get<Cpu>(*engine.machine).plan.get())
            for (const auto &parts : plan.parts) shared += parts.tiles > 1, most = std::max(most, parts.tiles);
        CHECK(most >= std::max(long_ones[0], long_ones[1]));
    }
    for (int i = 0; i < texts; i++) {
        Cache alone = cache_for(engine, type_k, type_v, longest, place);
        prefill(engine, alone, 0, part(begins[i / 3], 0, lengths[i]));
        const Tokens rest = part(tokens[i], lengths[i], cache.lengths[i]);
        CHECK(same_bits(found[i], cached_rows(engine, alone, 0, rest, 1, (int)rest.size())));
    }
    return shared;
}

TEST_CASE("what several texts share is read once for all of them, and each has the bits that it has alone") {
    Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    Engine engines[] = {engine_of(random_model({2, 32, 48, 4, 2, 20, 40})),
                        engine_of(random_model({2, 48, 48, 6, 1, 8, 40})), engine_of(random_model(mixed_shape()))};
    int shared = 0;
    for_each_pair([&](const Precision &type_k, const Precision &type_v) {
        const bool blocks = has_blocks(Choice<Precision>(type_k)) || has_blocks(Choice<Precision>(type_v));
        const Place place = paged(blocks ? 32 * (1 + below(random, 3)) : 1 + below(random, 70));
        shared += check_shared_splits(engines[below(random, 3)], type_k, type_v, place, random);
    });
    CHECK(shared > 100);
}

TEST_CASE("pages that hold parts of blocks of 32 are not shared") {
    Engine engine = engine_of(random_model({2, 32, 48, 4, 2, 20, 40}));
    Cache cache = cache_for(engine, F16{}, Int4{}, 100, paged(16), 2);
    prefill(engine, cache, 0, random_tokens(engine, 48));
    CHECK_THROWS_WITH_AS(
        fork(cache, 0, 1),
        "pages of 16 positions cannot be shared where 32 are stored together: make --page a multiple of 32", Error);
    CHECK((cache.lengths == Tokens{48, 0}));
    publish(cache, 0, random_tokens(engine, 48), 48);
    CHECK(find_known(cache, 1, random_tokens(engine, 49)) == 0);
}
