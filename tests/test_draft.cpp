// Drafts (draft.h): a text with guesses is the text without, to the last bit of its logits, whoever guesses; the rule
// of others draws from the same distribution; and what went wrong elsewhere.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "kinds.h"

// ---- With guesses and without -------------------------------------------------------------------------------------

struct Drawn {
    Tokens tokens;  // the prompt, then `count` more
    Vector rows;    // the logits from which each was taken
};

static Drawn plainly(Engine &engine, Cache &cache, const Tokens &prompt, const Sampler &sampler, int count) {
    Drawn text{prompt, {}};
    for (int i = 0; i < count; i++) {
        const Vector row = i ? decode(engine, cache, {0}, {text.tokens.back()}) : prefill(engine, cache, 0, prompt);
        append(text.rows, row);
        text.tokens.push_back(sample(sampler, row, (int)text.tokens.size() - 1));
    }
    return text;
}

// The last token of the prompt is read with the first guesses.
static Drawn with_guesses(Engine &engine, Cache &cache, Drafter &drafter, const Tokens &prompt, const Sampler &sampler,
                         int count) {
    Drawn text{prompt, {}};
    if (prompt.size() > 1) prefill(engine, cache, 0, part(prompt, 0, (int)prompt.size() - 1));
    const int end = (int)prompt.size() + count;
    while ((int)text.tokens.size() < end) {
        const int size = (int)text.tokens.size();
        step_with_guesses(engine, cache, drafter, sampler, text.tokens, end - size - 1, [&](const Vector &row) {
            append(text.rows, row);
            CHECK(text.rows.size() / row.size() == text.tokens.size() - prompt.size());
            return true;
        });
        const int drawn = (int)text.tokens.size() - size;
        REQUIRE((drawn > 0 && drawn <= 1 + drafter.most));
        CHECK(cache.lengths[0] == (int)text.tokens.size() - 1);  // drafts' keys are gone (vLLM 9730, 40149)
        check_pages(cache);
    }
    CHECK((int)text.tokens.size() == end);  // not one more (mlx-examples 149)
    return text;
}

// n-grams, where there is no model.
static Drafter drafter_of(const Engine &target, std::optional<Model> model, int most, int sequences = 1,
                          const Place &place = {}) {
    Drafter drafter;
    drafter.most = most, drafter.vocabulary = target.model.config.vocabulary;
    if (!model) return drafter;
    drafter.engine = std::make_unique<Engine>(engine_of(std::move(*model)));
    drafter.cache = cache_for(*drafter.engine, F32{}, F32{}, 400, place, sequences);
    drafter.held.resize(sequences);
    return drafter;
}

static Tokens guessed(Drafter &drafter, int sequence, const Tokens &text, int most) {
    return propose(drafter, sequence, text, {}, most).tokens;
}
static int right_in(const Drafter &drafter) { return drafter.counts.accepted; }
static int guessed_in(const Drafter &drafter) { return drafter.counts.drafted; }

TEST_CASE("a text with guesses is the text without: any model, cache, sampler, number of guesses, and who guesses") {
    Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    int right[3] = {}, wrong[3] = {};
    for (int round = 0; round < (plain_path ? 20 : getenv("ROUNDS") ? atoi(getenv("ROUNDS")) : 80); round++) {
        CAPTURE(round);
        const Shape shape = random_shape(random);
        const uint64_t seed = random.bits();
        Engine engine = engine_of(random_model(shape, seed), 1 + round % 2);
        const std::vector<Precision> types = all_of<Precision>();
        auto type = [&] { return types[below(random, (int)types.size())]; };
        const Precision type_k = type(), type_v = below(random, 2) ? type() : type_k;
        const Place place = random_place(random, 1 + below(random, 20));
        CAPTURE(std::string(name_of(type_k)) + " " + name_of(type_v) + " " + place.name());
        Tokens prompt = random_tokens(engine, 1 + below(random, 80), random.bits());
        if (below(random, 2)) append(prompt, Tokens(prompt));  // to look up
        const int count = 1 + below(random, 70), who = below(random, 3);
        const Sampler sampler = random_sampler(random);
        Cache plain = cache_for(engine, type_k, type_v, 300, place);
        Cache cache = cache_for(engine, type_k, type_v, 300, place);
        const Drawn expected = plainly(engine, plain, prompt, sampler, count);
        std::optional<Model> model;  // nobody; the target itself, always right but for its f32 cache; another one
        if (who == 1) model.emplace(random_model(shape, seed));
        if (who == 2) model.emplace(random_model(random_shape(random), seed + 1));
        Drafter drafter = drafter_of(engine, std::move(model), 1 + below(random, 9));
        drafter.pauses = below(random, 4) == 0;
        const Drawn found = with_guesses(engine, cache, drafter, prompt, sampler, count);
        CHECK(found.tokens == expected.tokens);
        CHECK(same_bits(found.rows, expected.rows));
        const Tokens more = random_tokens(engine, 40, 5);  // and what comes after reads the same rows
        for (const Tokens &next : {Tokens{found.tokens.back()}, more})
            CHECK(same_bits(cached_rows(engine, cache, 0, next, 20, std::min(20, (int)next.size())),
                            cached_rows(engine, plain, 0, next, 20, std::min(20, (int)next.size()))));
        const bool exact = type_k.index() == 0 && type_v.index() == 0 && !std::holds_alternative<Ring>(cache.layout);
        if (who == 1 && exact && sampler.temperature == 0) CHECK(right_in(drafter) == guessed_in(drafter));
        right[who] += right_in(drafter), wrong[who] += guessed_in(drafter) - right_in(drafter);
    }
    for (int who : {0, 1, 2}) CHECK((right[who] > 10 && wrong[who] > 10));
    CHECK(right[1] > 100);
}

// ---- What went wrong elsewhere ------------------------------------------------------------------------------------

static Model small_model(uint64_t seed = 1) { return random_model({2, 32, 48, 4, 2, 20, 40}, seed); }

TEST_CASE("the draft has read the last token, too, when all its guesses were right (gpt-fast)") {
    Engine engine = engine_of(small_model());
    for (int most : {1, 2, 5}) {
        Drafter drafter = drafter_of(engine, small_model(), most);
        Cache cache = cache_for(engine, F32{}, F32{}, 200, {});
        const Drawn text = with_guesses(engine, cache, drafter, random_tokens(engine, 9), {}, 61);
        CHECK(right_in(drafter) == guessed_in(drafter));
        CHECK(drafter.counts.passes == (60 + most) / (most + 1) + (60 % (most + 1) == 0));
        // What it guesses next is what it would if it had read all of the text in one go.
        Drafter other = drafter_of(engine, small_model(), most);
        const Tokens next = guessed(drafter, 0, text.tokens, most), again = guessed(other, 0, text.tokens, most);
        CHECK((next == again && drafter.held == other.held));
    }
}

TEST_CASE("the draft's cache goes back where its guesses were wrong, and begins anew where the text is another one") {
    Engine engine = engine_of(small_model());
    for (const Place &place : {Place{}, ring(40, 2)}) {
        Drafter drafter = drafter_of(engine, small_model(2), 4, 2, place);
        for (int turn = 0; turn < 6; turn++) {
            const int sequence = turn % 2;
            Tokens text = random_tokens(engine, 300 + turn, turn / 2 + 1);
            const Tokens begin = random_tokens(engine, 20);  // of all: a ring cannot go back so far
            std::copy(begin.begin(), begin.end(), text.begin());
            const Tokens guesses = guessed(drafter, sequence, text, 4);
            Drafter fresh = drafter_of(engine, small_model(2), 4, 1, place);
            CHECK((guesses.size() == 4 && guesses == guessed(fresh, 0, text, 4)));
            CHECK(drafter.cache.lengths[sequence] == (int)drafter.held[sequence].size());
        }
    }
}

TEST_CASE("a draft with windows: texts that are one another's beginnings, in any order, and reading that was ended") {
    Engine engine = engine_of(small_model());
    Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    int ended = 0, reread = 0;
    for (int narrow : {2, 33})
        for (const Place &place : {Place{}, paged(4), ring(40, 2)}) {
            CAPTURE(place.name());
            Shape shape = mixed_shape(narrow, 50);
            shape.vocabulary = 40;
            auto draft = [&] { return drafter_of(engine, random_model(shape, 2), 4, 1, place); };
            Drafter drafter = draft();
            drafter.engine->chunk = 20;
            const Tokens longest = random_tokens(engine, 350);
            for (int turn = 0; turn < 42; turn++) {  // each a little shorter than the one before, then any
                const Tokens text = part(longest, 0, turn < 30 ? 350 - 4 * turn : 2 + below(random, 349));
                const int had = (int)drafter.held[0].size();
                if (turn > 30 && turn % 3 == 1) {  // within its first passes, or the next ones
                    const InterruptAfter press(1 + below(random, 30));
                    try {
                        guessed(drafter, 0, text, 4);
                    } catch (Interrupted) {
                        ended++;
                    }
                    continue;
                }
                const Tokens guesses = guessed(drafter, 0, text, 4);
                Drafter fresh = draft();
                reread += had > (int)text.size();
                CHECK((guesses.size() == 4 && guesses == guessed(fresh, 0, text, 4)));
                CHECK(drafter.cache.lengths[0] == (int)drafter.held[0].size());
            }
        }
    CHECK((ended > 4 && reread > 4));
}

TEST_CASE("guesses that were wrong are gone from a convolution's state") {
    Shape shape = {0, 16, 24, 4, 0, 0, 23};
    const Layer states = {convolution_of(3, 16)}, attends = {kind_of(1, 16)};
    shape.list = {states, attends, states};
    Engine engine = engine_of(random_model(shape));
    const Tokens prompt = random_tokens(engine, 45);
    for (const Precision &type : {Precision(F32{}), Precision(Int4{})})
        for (const Place &place : {Place{}, paged(1), paged(3), paged(16), paged(32), ring(60, 2)})
            for (int most : {1, 2, 3, 4}) {
                CAPTURE(std::string(name_of(type)) + " " + place.name() + " " + std::to_string(most));
                Cache plain = cache_for(engine, type, type, 300, place);
                Cache cache = cache_for(engine, type, type, 300, place);
                Drafter drafter = drafter_of(engine, random_model(shape, 2), most);
                const Drawn expected = plainly(engine, plain, prompt, {}, 120);
                const Drawn found = with_guesses(engine, cache, drafter, prompt, {}, 120);
                CHECK((found.tokens == expected.tokens && same_bits(found.rows, expected.rows)));
                CHECK(guessed_in(drafter) - right_in(drafter) > 30);
            }
}

TEST_CASE("each seed has its text, with guesses and without (vLLM 13196)") {
    Engine engine = engine_of(small_model());
    std::vector<Tokens> texts;
    for (uint64_t seed = 0; seed < 5; seed++) {
        const Sampler sampler{1, 1, 0, 0, seed};
        Drafter drafter = drafter_of(engine, small_model(), 3);
        Cache plain = cache_for(engine, F16{}, F16{}, 100, {}), cache = cache_for(engine, F16{}, F16{}, 100, {});
        texts.push_back(with_guesses(engine, cache, drafter, random_tokens(engine, 5), sampler, 40).tokens);
        CHECK(texts.back() == plainly(engine, plain, random_tokens(engine, 5), sampler, 40).tokens);
        for (uint64_t other = 0; other < seed; other++) CHECK(texts[other] != texts[seed]);
    }
}

// What generate() makes of a prompt.
static Generation generated(Session &session, Drafter drafter) {
    Engine &engine = session.engine;
    session.tokens.resize(session.prompt);
    session.caches.clear();
    session.caches.push_back(cache_for(engine, F16{}, F16{}, session.limit, {}));
    session.drafter = std::move(drafter);
    return generate(session, {nullptr, {}}, nullptr, [](const std::string &) {});
}

TEST_CASE("an end id, -n and the context end a text where they end it without guesses (mlx-examples 149)") {
    Session session{engine_of(small_model()), {nullptr, tokenizer_free}};
    session.tokens = random_tokens(session.engine, 6);
    session.prompt = 6;
    session.sampler = {0.3, 1, 0, 0, 3};
    int inside = 0;  // end ids that were guessed
    for (int end = -1; end < 40; end += 4)
        for (int limit : {7, 8, 12, 30, 100})
            for (int count : {1, 2, 3, 7, 25}) {
                session.limit = limit, session.count = count;
                session.engine.model.config.end_ids = {end};
                const Generation plain = generated(session, Drafter{});
                const Tokens expected = session.tokens;
                for (int most : {1, 4, 64}) {
                    Drafter drafter = drafter_of(session.engine, small_model(), most);
                    const Generation found = generated(session, std::move(drafter));
                    CHECK((session.tokens == expected && found.text == plain.text && found.stop == plain.stop));
                    CHECK((int)expected.size() == session.prompt + 1 + found.decoded);
                    CHECK(session.caches[0].lengths[0] <= (int)expected.size());
                    if (found.stop != "end id" || session.drafter.log.empty()) continue;
                    const PassLog &last = session.drafter.log.back();
                    inside += last.right && last.guesses[last.right - 1] == end;
                }
            }
    CHECK(inside >= 10);
}

TEST_CASE("guesses go no further than a cache goes back") {
    Engine engine = engine_of(small_model());
    auto guesses = [&](const Precision &type, const Place &place, int end, int most) {
        return guesses_of_pass(cache_for(engine, type, type, 100, place), end - 1, end, most);
    };
    CHECK((guesses(F16{}, {}, 40, 9) == 9 && guesses(F16{}, {}, 95, 9) == 5 && guesses(F16{}, {}, 100, 9) == 0));
    CHECK((guesses(F16{}, {}, 50, -1) == 0 && guesses(F16{}, ring(64, 0), 500, 99) == 31));
    // A block is stored when it is full, and is full of tokens that are certain.
    CHECK((guesses(Int4{}, {}, 1, 40) == 30 && guesses(Int4{}, {}, 30, 4) == 1 && guesses(Int4{}, {}, 31, 4) == 0));
    CHECK((guesses(Int4{}, {}, 32, 4) == 0 && guesses(Int4{}, {}, 33, 4) == 4));
}

TEST_CASE("ids that only one of the two models knows are not guessed, and not read") {
    Shape wide = {2, 32, 48, 4, 2, 20, 40}, narrow = wide;
    narrow.vocabulary = 37;
    for (bool draft_is_wide : {true, false}) {
        Engine engine = engine_of(random_model(draft_is_wide ? narrow : wide));
        for (double temperature : {0.0, 5.0}) {
            const Sampler sampler{temperature, 1, 0, 0, 1};
            Drafter drafter = drafter_of(engine, random_model(draft_is_wide ? wide : narrow), 3);
            Cache plain = cache_for(engine, F16{}, F16{}, 150, {}), cache = cache_for(engine, F16{}, F16{}, 150, {});
            const Tokens prompt = random_tokens(engine, 5);
            const Drawn text = with_guesses(engine, cache, drafter, prompt, sampler, 100);
            CHECK(text.tokens == plainly(engine, plain, prompt, sampler, 100).tokens);
            size_t read = prompt.size();  // of the text, before a pass
            for (const PassLog &pass : drafter.log) {
                const int largest = *std::max_element(text.tokens.begin(), text.tokens.begin() + (int64_t)read);
                CHECK((draft_is_wide || largest < 37 || pass.guesses.empty()));
                for (int guess : pass.guesses) CHECK(guess < 37);
                read += pass.right + 1;
            }
        }
    }
}

TEST_CASE("behind its context, a draft guesses no more") {
    Engine engine = engine_of(small_model());
    Drafter drafter = drafter_of(engine, small_model(), 3);
    drafter.cache = cache_for(*drafter.engine, F32{}, F32{}, 40, {});
    Cache plain = cache_for(engine, F16{}, F16{}, 150, {}), cache = cache_for(engine, F16{}, F16{}, 150, {});
    const Tokens prompt = random_tokens(engine, 5);
    CHECK(with_guesses(engine, cache, drafter, prompt, {}, 100).tokens ==
          plainly(engine, plain, prompt, {}, 100).tokens);
    CHECK((guessed_in(drafter) > 20 && guessed_in(drafter) < 40));
}

// ---- n-grams ------------------------------------------------------------------------------------------------------

TEST_CASE("n-grams: what followed the longest of the last three, two, one tokens where it stood last") {
    Random random{3};
    Drafter drafter;
    for (int round = 0; round < 3000; round++) {
        Tokens text(1 + below(random, 30));
        for (int &token : text) token = below(random, 2 + round % 5);
        const int size = (int)text.size(), most = below(random, 8);
        Tokens expected = text;
        int from = -1;
        for (int length = 3; length > 0 && from < 0; length--)
            for (int at = 0; at + length < size; at++)  // the last one counts
                if (length < size && part(text, at, at + length) == part(text, size - length, size)) from = at + length;
        for (int i = 0; from >= 0 && i < most; i++) expected.push_back(expected[from + i]);
        CHECK(guessed(drafter, 0, text, most) == part(expected, size, (int)expected.size()));
    }
}

TEST_CASE("n-grams stop while they cost more time than they save, and are tried again") {
    const Tokens text = {1, 2, 3, 1, 2, 3, 1, 2};
    bool paused = false;
    auto guesses = [&](Drafter &drafter) {
        const Guesses found = propose(drafter, 0, text, {}, 4);
        CHECK((found.match == 3 && (!found.paused || found.tokens.empty())));
        paused = found.paused;
        return (int)found.tokens.size();
    };
    auto pass = [](int match, int right, double seconds) {
        return PassLog{match, right + 1, right, Tokens(match ? 4 : 0), false, seconds, 0};
    };
    Drafter drafter;
    drafter.most = 4;
    CHECK(guesses(drafter) == 4);
    drafter.pauses = true;
    CHECK((guesses(drafter) == 0 && !paused));  // what a token takes without guesses is not known yet
    drafter.log = {pass(0, 0, 1)};
    CHECK(guesses(drafter) == 1);            // not tried yet
    drafter.log.push_back(pass(3, 0, 1.3));  // a token for 1.3
    CHECK((guesses(drafter) == 0 && paused));
    drafter.log.back().tokens = 2;  // two for 1.3
    CHECK((guesses(drafter) == 4 && !paused));
    drafter.log.back() = pass(2, 0, 1.3);  // of another match
    CHECK(guesses(drafter) == 1);
    drafter.log.back() = pass(3, 0, 1.3);
    for (int i = 0; i < 127; i++) drafter.add(pass(0, 0, 1));
    CHECK(guesses(drafter) == 0);
    drafter.add(pass(0, 0, 1));
    CHECK((guesses(drafter) == 1 && drafter.log.size() == 128));  // it was long ago, and is forgotten
    // Passes of many texts: 8 tokens without guesses; 9 with, of any match; prompts that are read take no part.
    drafter.log = {{0, 8, 0, {}, false, 1, 0}, {0, 9, 1, {5, 6}, false, 1.2, 0}, {0, 8, 0, {}, false, 0, 0}};
    CHECK((guesses(drafter) == 0 && paused));
    drafter.log[1].tokens = 10;
    CHECK(guesses(drafter) == 4);
}

TEST_CASE("what guesses brought: passes, guesses by their place, pauses") {
    Drafter drafter;
    drafter.most = 2;
    const std::vector<PassLog> passes = {
        {1, 3, 2, {7, 8}, false, 1, 0}, {1, 1, 0, {7, 8}, false, 1, 0}, {1, 1, 0, {}, true, 1, 0},
        {0, 1, 0, {}, false, 1, 0},     {1, 2, 1, {7, 8}, false, 1, 0}, {0, 9, 3, Tokens(9), false, 1, 0}};
    for (const PassLog &pass : passes) drafter.add(pass);
    const Drafter::Counts &counts = drafter.counts;
    CHECK((counts.passes == 6 && counts.guessed == 4 && counts.paused == 1));
    CHECK((counts.drafted == 15 && counts.accepted == 6));
    CHECK((counts.tried == std::vector<int>{4, 3} && counts.right == std::vector<int>{3, 2}));
}

// ---- The rule of others -------------------------------------------------------------------------------------------

static std::vector<double> random_distribution(Random &random, int count) {
    std::vector<double> p(count);
    double sum = 0;
    for (double &x : p) sum += x = below(random, 4) ? random.uniform(0, 1) : 0;
    if (sum == 0) sum = p[below(random, count)] = 1;
    for (double &x : p) x /= sum;
    return p;
}

// The distribution of take_or_replace(), enumerated: its thresholds lie where the definition says.
static std::vector<double> outcome(const std::vector<double> &p, const std::vector<double> &q) {
    std::vector<double> all(p.size());
    for (int guess = 0; guess < (int)p.size(); guess++) {
        if (q[guess] == 0) continue;
        const double taken = std::min(1.0, p[guess] / q[guess]);
        all[guess] += q[guess] * taken;
        if (taken > 0) CHECK(take_or_replace(p, q, guess, taken * (1 - 1e-9), 0) == guess);
        if (taken == 1) continue;
        const std::vector<double> more = rest(p, q);
        const double sum = std::accumulate(more.begin(), more.end(), 0.0);
        double before = 0;
        for (int token = 0; token < (int)p.size(); token++) {
            if (more[token] < 1e-9) continue;
            const double part = more[token] / sum;
            for (double point : {before + part * 1e-6, before + part * (1 - 1e-6)})
                CHECK(take_or_replace(p, q, guess, taken + (1 - taken) * 1e-6, point) == token);
            all[token] += q[guess] * (1 - taken) * part;
            before += part;
        }
        for (int token = 0; token < (int)p.size(); token++)
            if (more[token] < 1e-9 && more[token] > 0) all[token] += q[guess] * (1 - taken) * more[token] / sum;
    }
    return all;
}

TEST_CASE("leviathan: whatever was guessed, the outcome has the target's distribution, by enumeration") {
    Random random{1};
    for (int round = 0; round < 2000; round++) {
        const std::vector<double> p = random_distribution(random, 5), q = random_distribution(random, 5);
        const std::vector<double> found = outcome(p, q), certain = outcome(p, point_mass(below(random, 5), 5));
        for (int token = 0; token < 5; token++) {
            CHECK(std::fabs(found[token] - p[token]) < 1e-12);
            CHECK(std::fabs(certain[token] - p[token]) < 1e-12);  // n-grams: all of q on one token
        }
    }
}

TEST_CASE("leviathan: distribution() is what sample() draws from") {
    Random random{2};
    for (int round = 0; round < 40; round++) {
        Vector logits(5);
        for (float &x : logits) x = (float)random.uniform(-3, 3);
        Sampler sampler = random_sampler(random);
        const std::vector<double> p = distribution(sampler, logits);
        std::vector<double> drawn(5);
        for (int i = 0; i < 2000; i++) sampler.seed = round * 2000 + i, drawn[sample(sampler, logits, 7)] += 1 / 2000.0;
        for (int token = 0; token < 5; token++) {
            CHECK(std::fabs(drawn[token] - p[token]) < 5 * std::sqrt(p[token] * (1 - p[token]) / 2000) + 1e-9);
            CHECK(((p[token] > 0 || drawn[token] == 0) && (p[token] < 0.01 || drawn[token] > 0)));
        }
    }
}

TEST_CASE("leviathan: 100,000 draws of the built-in pair, chi-square beside the target's distribution") {
    Engine engine = engine_of("weights_tools/builtin");
    Drafter drafter = drafter_of(engine, load_model("weights_tools/draft"), 1);
    drafter.rejection = true;
    const Tokens text = {0, 52, 302, 399, 259, 365, 427, 272, 259, 580, 14, 430, 394, 285};
    Cache cache = cache_for(engine, F32{}, F32{}, 50, {});
    const Vector row = prefill(engine, cache, 0, text);
    const Vector draft_row = prefill(*drafter.engine, drafter.cache, 0, text);
    Sampler sampler{1.2, 1, 0, 12};
    const std::vector<double> p = distribution(sampler, row), q = distribution(sampler, draft_row);
    std::vector<double> drawn(p.size());
    int taken = 0;
    const int draws = 100000;
    for (int i = 0; i < draws; i++) {
        sampler.seed = i;
        const int position = (int)text.size() - 1, guess = draw_from(q, draw(sampler.seed, position));
        const int token = check_guess(sampler, row, position, guess, q);
        drawn[token]++, taken += token == guess;
    }
    double chi_square = 0;
    int tokens = 0;
    for (size_t token = 0; token < p.size(); token++) {
        if (p[token] == 0) CHECK(drawn[token] == 0);
        if (p[token] > 0) tokens++, chi_square += std::pow(drawn[token] - draws * p[token], 2) / (draws * p[token]);
    }
    CHECK((tokens == 12 && chi_square < 40));  // 11 degrees of freedom: once in 30,000 by chance
    double alike = 0;
    for (size_t token = 0; token < p.size(); token++) alike += std::min(p[token], q[token]);
    CHECK(std::fabs((double)taken / draws - alike) < 0.01);
    CHECK((alike > 0.2 && alike < 0.95));
}

TEST_CASE("leviathan: the tokens of whole passes have the target's distribution, one after the other") {
    Shape shape = {1, 16, 16, 2, 1, 8, 5};  // a vocabulary of 5: 25 pairs of tokens
    Engine engine = engine_of(random_model(shape, 4));
    const Tokens prompt = {1, 2, 1};  // n-grams guess: 2, 1
    Cache cache = cache_for(engine, F32{}, F32{}, 20, {});
    Sampler sampler{1.5, 1, 0, 0};
    std::vector<double> expected(25);
    const std::vector<double> first = distribution(sampler, prefill(engine, cache, 0, prompt));
    for (int a = 0; a < 5; a++) {
        rewind(cache, 0, 3);
        const std::vector<double> second = distribution(sampler, decode(engine, cache, {0}, {a}));
        for (int b = 0; b < 5; b++) expected[a * 5 + b] = first[a] * second[b];
    }
    for (bool model : {true, false})
        for (int most : {1, 2}) {  // after one guess that is right the second token is one more than was guessed
            CAPTURE(model);
            CAPTURE(most);
            std::optional<Model> draft;
            if (model) draft.emplace(random_model(shape, 5));
            Drafter drafter = drafter_of(engine, std::move(draft), most);
            drafter.rejection = true;
            std::vector<double> drawn(25);
            const int draws = 20000;
            for (int i = 0; i < draws; i++) {
                sampler.seed = i;
                rewind(cache, 0, 2);
                Tokens text = prompt;
                while (text.size() < 5)
                    step_with_guesses(engine, cache, drafter, sampler, text, 2, [](const Vector &) { return true; });
                drawn[text[3] * 5 + text[4]]++;
            }
            double chi_square = 0;
            for (int i = 0; i < 25; i++)
                chi_square += std::pow(drawn[i] - draws * expected[i], 2) / (draws * expected[i]);
            CHECK(chi_square < 62);  // 24 degrees of freedom: once in 30,000 by chance
            CHECK((right_in(drafter) > draws / 20 && guessed_in(drafter) - right_in(drafter) > draws / 10));
        }
}
