// Many requests through one cache (batch.h): a request's text and logits are the same to the last bit, alone or in
// company, shared or not, preempted or not. Everything here is ==.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "../commands/batch.h"
#include "kinds.h"

// ---- A request alone, and in company -------------------------------------------------------------------------------

// A cache, and how requests go through it.
struct Setting {
    Precision type_k = F32{}, type_v = F32{};
    Place place = paged(4);
    int sequences = 3, pass_tokens = 64;
    bool optimistic = false, ignore_end = true, prefix_first = false;
    int capacity = 160;
    int guesses = 0;                         // of a pass
    std::function<Model()> draft = nullptr;  // who does; or n-grams
    std::string name() const {
        return std::string(name_of(type_k)) + " " + name_of(type_v) + " " + place.name() + ", " +
               std::to_string(place.pages) + " pages, " + std::to_string(sequences) + " sequences, passes of " +
               std::to_string(pass_tokens) + (optimistic ? ", optimistic" : "") + (prefix_first ? ", by prefix" : "") +
               (draft ? ", a draft's " : ", ") + std::to_string(guesses) + " guesses";
    }
};

// What a request has in the end if it has a cache of its own, by prefill() and decode().
static void check_alone(Engine &engine, const Setting &setting, const Request &request) {
    Place place = setting.place;
    place.pages = 0;
    Cache cache = cache_for(engine, setting.type_k, setting.type_v, setting.capacity, place);
    Tokens tokens = part(request.tokens, 0, request.prompt);
    const Tokens &ends = engine.model.config.end_ids;
    std::string text, stop;
    Vector row = prefill(engine, cache, 0, tokens);
    uint64_t bits = checksum(0, row);
    while (true) {
        tokens.push_back(sample(request.sampler, row, (int)tokens.size() - 1));
        text += std::to_string(tokens.back()) + " ";
        if ((int)tokens.size() == request.prompt + request.count) stop = "length";
        if (!setting.ignore_end && std::count(ends.begin(), ends.end(), tokens.back())) stop = "end id";
        size_t first = std::string::npos;  // of several that the text has: also of "8 " and "48 "
        for (const std::string &end : request.stops) first = std::min(first, text.find(end));
        if (first != std::string::npos) text.resize(first), stop = "stop";
        if (!stop.empty()) break;
        row = decode(engine, cache, {0}, {tokens.back()});
        bits = checksum(bits, row);
    }
    CAPTURE(request.number);
    CHECK((request.tokens == tokens && request.text == text && request.stop == stop));
    CHECK(request.bits == bits);
}

// Requests that share a cache, pass by pass. Before and after each pass all is true that always must be.
struct Company {
    Engine &engine;
    Setting setting;
    Cache cache;
    Schedule schedule{cache, setting.pass_tokens, setting.optimistic, setting.prefix_first};
    std::deque<Request> requests;
    std::vector<Request *> ended;
    int passes = 0, copies = 0, evicted = 0, most_used = 0;
    bool made_room = false;  // somebody did, for others

    Company(Engine &of, const Setting &with)
        : engine(of),
          setting(with),
          cache(cache_for(of, with.type_k, with.type_v, with.capacity, with.place, with.sequences)) {
        schedule.checks = true;
        Drafter &drafter = schedule.drafter;
        drafter.most = with.guesses, drafter.vocabulary = of.model.config.vocabulary;
        if (with.draft) {
            drafter.engine = std::make_unique<Engine>(engine_of(with.draft()));
            drafter.cache = cache_for(*drafter.engine, F32{}, F32{}, with.capacity, {}, with.sequences);
            drafter.held.resize(with.sequences);
        }
        cache.tell = [&, poison = cache.tell](const PageEvent &event) {
            poison(event);
            copies += event.what == PageEvent::copied, evicted += event.what == PageEvent::evicted;
            if (pool()) most_used = std::max(most_used, pool()->used());
        };
        schedule.tell = [&](const std::string &what, const Request &) {
            REQUIRE((what != "admit" || !made_room));  // until one ends
            made_room = what == "preempt" || (made_room && what != "end");
        };
    }
    Company(const Company &) = delete;
    PagePool *pool() const { return scarce_pool(cache); }
    int preemptions() const {
        int sum = 0;
        for (const Request &request : requests) sum += request.preemptions;
        return sum;
    }
    int hits() const {
        int sum = 0;
        for (const Request &request : requests) sum += std::max(0, request.known);
        return sum;
    }

    Request &come(const Tokens &prompt, int count, const Sampler &sampler = {},
                  const std::vector<std::string> &stops = {}, const std::string &salt = "") {
        Request &request = requests.emplace_back();
        request.id = "request " + std::to_string(requests.size() - 1);
        request.tokens = prompt, request.prompt = (int)prompt.size(), request.count = count;
        request.sampler = sampler, request.stops = stops, request.salt = salt,
        request.number = (int)requests.size() - 1;
        request.writer = std::make_unique<Writer>(nullptr, Tokens{}, stops);
        submit(schedule, request);
        return request;
    }
    // Pages, tables, and the machine's tables.
    void verify() const {
        std::vector<int> lengths(cache.lengths.size());
        for (const Request *request : schedule.running) lengths[request->sequence] = cache.lengths[request->sequence];
        REQUIRE(lengths == cache.lengths);
        auto earlier = [](const Request *a, const Request *b) { return a->number < b->number; };
        REQUIRE(std::is_sorted(schedule.waiting.begin(), schedule.waiting.end(), earlier));
        REQUIRE(std::is_sorted(schedule.running.begin(), schedule.running.end(), earlier));
        check_pages(cache);
    }
    std::vector<Piece> next() {
        const Request *first = schedule.running.empty() ? nullptr : schedule.running[0];  // of all that have not ended
        if (!schedule.waiting.empty() && (!first || schedule.waiting[0]->number < first->number)) first = nullptr;
        const int preempted = first ? first->preemptions : 0;
        const std::vector<Request *> before = schedule.running;
        const Tokens lengths = cache.lengths;
        Tokens sequences;
        for (const Request *request : before) sequences.push_back(request->sequence);
        std::vector<Piece> pass = next_pass(schedule);
        verify();
        int longest = 0, shortest = INT_MAX;  // of those that had to go; of those that stay, but for the first
        for (size_t i = 0; i < before.size(); i++) {
            if (before[i]->sequence == -1) longest = std::max(longest, lengths[sequences[i]]);
            if (before[i]->sequence != -1 && before[i] != schedule.running[0])
                shortest = std::min(shortest, lengths[sequences[i]]);
        }
        REQUIRE(longest <= shortest);
        int count = 0, least = 1;
        int64_t pages = 0;  // that the pass takes
        for (const Piece &piece : pass) {
            count += piece.count + piece.guesses, least = std::min(least, piece.count);
            REQUIRE((piece.guesses >= 0 && piece.guesses <= setting.guesses));
            const int length = cache.lengths[piece.request->sequence], read = length + piece.count;
            REQUIRE((piece.guesses == 0 || read == (int)piece.request->tokens.size()));  // not behind an unread prompt
            REQUIRE(read + piece.guesses <= std::max(read, piece.request->positions()));
            if (pool()) pages += pool()->between(length, read + piece.guesses);
        }
        if (pool()) REQUIRE(pages <= pool()->available());
        REQUIRE((count <= schedule.pass_tokens && least > 0));
        for (const Request *running : schedule.running) {  // whoever is decoded is in each pass
            auto is_it = [&](const Piece &piece) { return piece.request == running; };
            REQUIRE((schedule.unread(*running) > 1 || std::any_of(pass.begin(), pass.end(), is_it)));
        }
        REQUIRE((!first || first->preemptions == preempted));
        if (!setting.optimistic) REQUIRE(preemptions() == 0);
        if (!setting.optimistic && pool()) REQUIRE(peak_pages(schedule, *pool()) <= (int64_t)pool()->references.size());
        return pass;
    }
    bool one_pass() {
        const std::vector<Piece> pass = next();
        if (pass.empty()) {
            REQUIRE((schedule.running.empty() && schedule.waiting.empty()));
            return false;
        }
        run_pass(engine, schedule, pass, setting.ignore_end, [&](Request &request) { ended.push_back(&request); });
        verify();
        return ++passes;
    }
    void finish() {
        while (one_pass()) continue;
        CHECK(ended.size() == requests.size());
        for (const Store &store : cache.stores)
            CHECK((!store.pool || (store.pool->used() == 0 && store.pool->first == Tokens(cache.lengths.size()))));
    }
    void check_all() {
        for (const Request &request : requests) check_alone(engine, setting, request);
    }
};

// ---- Random company ------------------------------------------------------------------------------------------------

static Setting random_setting(Random &random) {
    const std::vector<Precision> types = all_of<Precision>();
    Setting setting;
    auto type = [&] { return types[below(random, (int)types.size())]; };
    setting.type_k = type(), setting.type_v = below(random, 2) ? type() : setting.type_k;
    const bool blocks = has_blocks(setting.type_k) || has_blocks(setting.type_v);
    setting.sequences = 1 + below(random, 8);
    setting.pass_tokens = setting.sequences + below(random, below(random, 2) ? 12 : 120);
    setting.optimistic = below(random, 2), setting.ignore_end = below(random, 2);
    setting.prefix_first = below(random, 2);
    const int page = blocks ? one_of(random, {32, 32, 64, 64, 16, 40}) : 1 + below(random, below(random, 3) ? 16 : 64);
    if (below(random, 2)) setting.guesses = 1 + below(random, 8);
    setting.place = below(random, 8) ? paged(page) : Place{};
    if (below(random, 16) == 0) setting.place = ring(8 + below(random, 90), below(random, 5));
    setting.place.all = below(random, 4) == 0;
    const int largest = pages_for(one_of(random, {60, 100, 150}), page);
    setting.place.pages = largest + below(random, below(random, 3) ? 2 + largest / 2 : 4 * largest);
    return setting;
}

// Of few stems and random ends; or all that was asked and answered before, and something new.
static Tokens random_prompt(Engine &engine, const std::vector<Tokens> &stems, const Company &company, Random &random) {
    Tokens prompt = stems[below(random, (int)stems.size())];
    const int ended = (int)company.ended.size();
    if (ended && below(random, 5) == 0) prompt = company.ended[below(random, ended)]->tokens;
    if (below(random, 3) == 0) prompt.resize(1 + below(random, (int)prompt.size()));
    append(prompt, random_tokens(engine, below(random, 3) ? below(random, 20) : 0, random.bits()));
    return prompt;
}

TEST_CASE("random requests in any company have the text and the logits that each has alone") {
    Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    std::vector<std::function<Model()>> models;
    for (const char *name : {"gemma3", "gemma4_shared", "granite_swa", "lfm2_bias", "qwen2_window_16", "mistral_window",
                             "llama_gqa_9_on_3", "qwen3_layer_types"})
        models.push_back([=] { return load_model(fixtures + name); });
    models.push_back([] { return random_model({2, 32, 48, 4, 2, 20, 40}); });
    models.push_back([] { return random_model(mixed_shape()); });
    models.push_back([] {  // as LFM2 has them
        Shape shape = {0, 16, 24, 4, 0, 0, 23};
        const Layer states = {convolution_of(3, 16)}, attends = {kind_of(1, 16)};
        shape.list = {states, attends, states, states, attends};
        return random_model(shape);
    });
    std::vector<Engine> engines;
    for (auto &model : models) engines.push_back(engine_of(model(), 1 + (int)engines.size() % 2));
    const int wanted = getenv("REQUESTS") ? atoi(getenv("REQUESTS")) : plain_path ? 150 : 1000;
    int requests = 0, refused = 0, preemptions = 0, hits = 0, copies = 0, evicted = 0, stopped = 0;
    int right = 0, wrong = 0;  // guesses
    // Some seeds draw few pools that run out: then a few requests more.
    for (int round = 0; requests < wanted || (preemptions <= wanted / 50 && requests < 2 * wanted); round++) {
        CAPTURE(round);
        const int which = below(random, (int)engines.size());
        Engine &engine = engines[which];
        Setting setting = random_setting(random);
        if (below(random, 3) == 0) setting.draft = models[which];  // the model itself: often right
        CAPTURE(setting.name());
        Company company(engine, setting);
        std::vector<Tokens> stems(1 + below(random, 4));
        for (Tokens &stem : stems) stem = random_tokens(engine, 1 + below(random, 90), random.bits());
        const bool often = below(random, 2);
        for (int to_come = 1 + below(random, 24); to_come > 0;) {
            for (; to_come > 0 && below(random, often ? 2 : 8) == 0; to_come--) {
                const Tokens prompt = random_prompt(engine, stems, company, random);
                const int count = 1 + below(random, 40), positions = (int)prompt.size() + count - 1;
                std::vector<std::string> stops;
                for (int i = below(random, 3); i > 0; i--) {  // within a token and its end, or across two
                    stops.push_back(std::to_string(below(random, 50)) + " ");
                    if (below(random, 2)) stops.back() += std::to_string(below(random, 10));
                }
                const PagePool *pool = company.pool();
                const bool fits = positions <= limit_of(company.cache) &&
                                  (!pool || pages_for(positions, pool->page) <= (int)pool->references.size());
                const Sampler sampler = random_sampler(random);
                const std::string salt = below(random, 6) ? "" : "a";
                if (fits)
                    company.come(prompt, count, sampler, stops, salt);
                else
                    CHECK_THROWS_AS(company.come(prompt, count, sampler, stops, salt), Error);
                if (!fits) company.requests.pop_back(), refused++;
            }
            company.one_pass();
        }
        company.finish(), company.check_all();
        if (!can_share_pages(company.cache)) CHECK(company.hits() == 0);
        requests += (int)company.requests.size(), preemptions += company.preemptions(), hits += company.hits();
        copies += company.copies, evicted += company.evicted;
        const Drafter::Counts &counts = company.schedule.drafter.counts;
        right += counts.accepted, wrong += counts.drafted - counts.accepted;
        for (const Request &request : company.requests) stopped += request.stop == "stop";
    }
    if (getenv("REQUESTS"))
        MESSAGE(requests << " requests, " << refused << " refused, " << stopped << " stopped; " << preemptions
                         << " preemptions, " << hits << " tokens found, " << copies << " copies, " << evicted
                         << " evicted");
    CHECK((refused > wanted / 200 && preemptions > wanted / 50 && hits > wanted && copies > wanted / 20));
    CHECK((right > wanted / 2 && wrong > wanted / 2));
    CHECK((stopped > wanted / 20 && evicted > wanted / 10));
}

TEST_CASE("guesses are never published: who says what was guessed, and not said, finds what was said") {
    Engine engine = engine_of(random_model({2, 32, 48, 4, 2, 20, 40}));
    Setting setting;
    setting.place = paged(1), setting.guesses = 3, setting.draft = [] {
        return random_model({2, 32, 48, 4, 2, 20, 40}, 2);
    };
    Company company(engine, setting);
    const Request &request = company.come(random_tokens(engine, 6), 40);
    int looked_at = 0;
    for (Tokens before = request.tokens; company.one_pass() && request.sequence >= 0; before = request.tokens) {
        const PassLog &pass = company.schedule.drafter.log.back();
        if (pass.right == (int)pass.guesses.size()) continue;
        Tokens other = before;
        append(other, part(pass.guesses, 0, pass.right + 1));
        other.push_back(0);  // the last token is always computed
        const int known = find_known(company.cache, 1, other);
        CHECK(known == (int)before.size() + pass.right);
        rewind(company.cache, 1, 0);
        looked_at++;
    }
    CHECK(looked_at > 10);
}

TEST_CASE("--against alone tells a token, a text or a bit of the logits that is another one") {
    Options options;
    options.layouts = {Paged{}};
    Session session{engine_of(random_model({2, 32, 48, 4, 2, 20, 40})), {nullptr, tokenizer_free}};
    Setting setting;
    setting.type_k = setting.type_v = F16{}, setting.place = paged(options.page);
    Company company(session.engine, setting);
    Request &request = company.come(random_tokens(session.engine, 6), 9, {1, 1, 0, 0, 3});
    options.ignore_end = setting.ignore_end;
    company.finish();
    CHECK(same_alone(options, session, request));
    request.bits ^= 1;
    CHECK(!same_alone(options, session, request));
    request.bits ^= 1, request.text += " ";
    CHECK(!same_alone(options, session, request));
    request.text.pop_back(), request.tokens.back()++;
    CHECK(!same_alone(options, session, request));
    request.tokens.back()--;
    CHECK(same_alone(options, session, request));
}

// ---- Who may come in, who must make room ---------------------------------------------------------------------------

static Engine small_engine() { return engine_of(random_model({2, 32, 48, 4, 2, 20, 40})); }

static Setting with_pages(int page, int pages, int sequences = 4) {
    Setting setting;
    setting.place = paged(page), setting.place.pages = pages, setting.sequences = sequences;
    return setting;
}

TEST_CASE("what can never fit is refused when it comes, with both numbers (nano-vllm 274)") {
    Engine engine = small_engine();
    Company company(engine, with_pages(4, 5));
    CHECK(error_of([&] { company.come(random_tokens(engine, 15), 7); }) ==
          "request 0: 15 tokens and 7 more take 6 pages, the pool has 5: shorten it, or raise --pool");
    CHECK(error_of([&] { company.come(random_tokens(engine, 150), 12); }) ==
          "request 1: 150 tokens and 12 more take 161 positions, a sequence has 160: shorten it, or raise -c");
    CHECK((company.schedule.waiting.empty() && company.next().empty()));
    company.requests.clear();
    company.come(random_tokens(engine, 15), 6);  // 20 positions, as nobody asks what follows the last token
    company.come(random_tokens(engine, 20, 2), 1);
    company.finish(), company.check_all();
    CHECK(company.most_used == 5);
    Company alone(engine, {F32{}, F32{}, Place{}});  // without pages
    CHECK_THROWS_WITH_AS(
        alone.come(random_tokens(engine, 161), 1),
        "request 0: 161 tokens and 1 more take 161 positions, a sequence has 160: shorten it, or raise -c", Error);
}

TEST_CASE("guesses that are right take pages sooner: who comes in may need all of them at once") {
    Engine engine = small_engine();
    Setting setting = with_pages(1, 21, 2);
    setting.guesses = 4, setting.draft = [] { return random_model({2, 32, 48, 4, 2, 20, 40}); };
    Company company(engine, setting);
    company.come(random_tokens(engine, 5), 6, {5, 1, 0, 0, 1});  // 10 positions; its guesses are mostly wrong
    company.one_pass();
    // 16 positions. Token by token it would have 9 of them when the other one ends.
    Request &quick = company.come(random_tokens(engine, 5, 2), 12);
    for (int pass = 0; quick.known < 0; pass++) REQUIRE((company.one_pass() && pass < 9));
    CHECK(!company.requests[0].stop.empty());  // it had to wait
    company.finish(), company.check_all();
    CHECK(company.preemptions() == 0);
}

// `count` requests of 8 tokens that generate 36 more, in a pool for little more than one of them.
static void ask_for_too_much(Company &company, int count) {
    for (int i = 0; i < count; i++) company.come(random_tokens(company.engine, 8, 10 + i), 36);
}

TEST_CASE("optimists: all come to their end, the first is never preempted, nobody for ever (vLLM 18115, 21809)") {
    Engine engine = small_engine();
    for (int page : {1, 4}) {
        Setting setting = with_pages(page, 52 / page, 6);
        setting.optimistic = true;
        Company company(engine, setting);
        ask_for_too_much(company, 8);
        company.finish(), company.check_all();
        CHECK((company.requests[0].preemptions == 0 && company.preemptions() > 8));
        // One that was preempted comes back after another has ended, and not before.
        for (const Request &request : company.requests) CHECK(request.preemptions < 8);
        CHECK(company.ended[0]->number == 0);
        CHECK(company.passes < 8 * 37);
    }
    {  // Two had to go, of which the shorter one would find room as soon as somebody comes.
        Setting setting = with_pages(1, 52, 6);
        setting.optimistic = true;
        Company company(engine, setting);
        for (int i = 0; i < 5; i++) company.come(random_tokens(engine, i < 3 ? 12 : 2, i), 30);
        while (company.one_pass() && company.requests.size() < 20)
            if (company.made_room) company.come(random_tokens(engine, 2, 7), 10);
        company.finish(), company.check_all();
        CHECK((company.requests.size() == 20 && company.preemptions() > 4));
    }
    Setting setting = with_pages(4, 4);
    setting.optimistic = true;
    Company company(engine, setting);
    company.come(random_tokens(engine, 12), 4), company.one_pass();
    CHECK(error_of([&] { preempt(company.schedule); }).find("a fault here") != std::string::npos);  // one runs alone
    Request &other = company.come(random_tokens(engine, 5, 2), 2);  // needs 2 pages, 1 is there
    company.finish(), company.check_all();
    CHECK((other.preemptions == 0 && company.evicted > 0));
}

TEST_CASE("exact admission: the same requests run one after another, without a preemption") {
    Engine engine = small_engine();
    Company company(engine, with_pages(4, 13, 6));
    ask_for_too_much(company, 8);
    company.finish(), company.check_all();
    CHECK((company.preemptions() == 0 && company.most_used <= 13));
    for (int i = 0; i < 8; i++) CHECK(company.ended[i]->number == i);
}

TEST_CASE("the peak is the table in its comment: A 5 and 1, C 2 and 3, B 4 and 7, pages of 1: max(14, 12, 11)") {
    Engine engine = small_engine();
    Company company(engine, with_pages(1, 40));
    auto held = [&](int length, int to_come, int like) {  // of one that is being decoded
        Request &request = company.come(random_tokens(engine, length + 1, like), to_come);
        company.schedule.waiting.clear();
        company.schedule.running.push_back(&request);
        request.sequence = request.number;
        grow(company.cache, request.sequence, length);
    };
    auto peak = [&] { return peak_pages(company.schedule, *company.pool()); };
    CHECK(peak() == 0);
    held(5, 1, 1);
    CHECK(peak() == 6);
    held(2, 3, 2);
    CHECK(peak() == 6 + 3);
    held(4, 7, 3);
    CHECK(peak() == 14);
    std::rotate(company.schedule.running.begin(), company.schedule.running.begin() + 1, company.schedule.running.end());
    CHECK(peak() == 14);             // whatever their order
    company.requests[1].count += 2;  // C 2 and 5: 6 + 3 + 5, 7 + 9, 11
    CHECK(peak() == 16);
    company.requests[2].count += 7;  // B 4 and 14: 18 in the end
    CHECK(peak() == 18);
}

TEST_CASE("as many pages as the peak says are held, and no more") {
    Engine engine = small_engine();
    Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    for (int round = 0; round < 10; round++) {
        CAPTURE(round);
        const int page = 1 + below(random, 5);
        CAPTURE(page);
        Company company(engine, with_pages(page, 400 / page, 5));
        const Tokens stem = random_tokens(engine, 20, random.bits());
        for (int i = 0; i < 5; i++) {
            Tokens prompt = stem;
            prompt.push_back(i);  // so that no two texts come to the same page by chance, and then share it
            for (int token : random_tokens(engine, below(random, 20), random.bits())) prompt.push_back(token);
            company.come(prompt, 2 + below(random, 40));
            company.one_pass();
        }
        company.most_used = company.pool()->used();
        const auto peak = peak_pages(company.schedule, *company.pool());
        company.finish();
        CHECK(company.most_used == peak);
    }
}

// ---- What is found -------------------------------------------------------------------------------------------------

TEST_CASE("a preempted request finds its own old pages (nano-vllm 211)") {
    Engine engine = small_engine();
    Setting setting = with_pages(4, 12, 2);
    setting.optimistic = true;
    Company company(engine, setting);
    company.come(random_tokens(engine, 33, 1), 10);  // 42 positions, 11 pages
    Request &victim = company.come(random_tokens(engine, 7, 2), 20);
    Tokens pages;
    while (victim.preemptions == 0) {
        PagePool &pool = *company.pool();
        if (victim.sequence >= 0) pages = {&pool.entry(victim.sequence, 0), &pool.entry(victim.sequence, 10)};
        REQUIRE(company.one_pass());
    }
    const int generated = (int)victim.tokens.size() - victim.prompt;
    CHECK((generated > 0 && victim.sequence == -1 && pages[1] >= 0));
    int shared = 0;
    auto tell = company.cache.tell;
    company.cache.tell = [&](const PageEvent &event) {
        if (event.what == PageEvent::shared && event.page == pages[shared]) shared++;
        tell(event);
    };
    while (victim.sequence == -1) {
        const std::vector<Piece> pass = company.next();
        if (victim.sequence >= 0) CHECK((company.cache.lengths[victim.sequence] == 4 * shared && shared > 0));
        run_pass(engine, company.schedule, pass, true, [&](Request &request) { company.ended.push_back(&request); });
    }
    CHECK(victim.known == 0);  // of its prompt, when it came
    company.finish(), company.check_all();
}

TEST_CASE(
    "pages that two share count once: where one runs, another with the same long prompt runs too (SGLang 35270)") {
    Engine engine = small_engine();
    for (bool optimistic : {false, true})
        for (int pages : {7, 6}) {  // of 71 positions one holds 5; another one the first 3 of them and 2 of its own
            CAPTURE(pages);
            Setting setting = with_pages(16, pages, 2);
            setting.optimistic = optimistic, setting.pass_tokens = 100;
            Company company(engine, setting);
            const Tokens prompt = random_tokens(engine, 64);
            company.come(prompt, 8), company.one_pass();
            company.come(prompt, 7), company.next();
            CHECK(company.schedule.running.size() == (pages == 7 || optimistic ? 2 : 1));
            if (company.schedule.running.size() == 2) CHECK(company.requests[1].known == 63);
            company.finish(), company.check_all();
            CHECK((company.most_used <= pages && company.requests[1].known == 63));
        }
    const Tokens prompt = random_tokens(engine, 64);
    for (int left : {0, 36}) {  // that come at once: the other one when the first has read it, also if it was refused
        Setting setting = with_pages(16, 7, 2);
        setting.pass_tokens = 64 + left;
        Company both(engine, setting);
        both.come(prompt, 8), both.come(prompt, 7);
        REQUIRE(both.one_pass());
        CHECK(both.schedule.running.size() == 1);
        CHECK((both.next().size() == 2 && both.requests[1].known == 63));
        both.finish(), both.check_all();
    }
    Company ample(engine, with_pages(16, 20, 2));  // both have read it: of two pages that hold the same one is left
    ample.setting.pass_tokens = ample.schedule.pass_tokens = 128;
    ample.come(prompt, 8), ample.come(prompt, 7);
    REQUIRE(ample.one_pass());
    CHECK((ample.requests[1].known == 0 && ample.most_used == 8 && ample.pool()->used() == 4));
    ample.finish(), ample.check_all();
}

TEST_CASE("a request with another salt takes as many passes to its first token as if nobody had been there before") {
    Engine engine = small_engine();
    const Tokens prompt = random_tokens(engine, 64);
    auto passes = [&](const std::vector<std::string> &salts) {  // of the last one
        Setting setting = with_pages(16, 40, 2);
        setting.pass_tokens = 8;
        Company company(engine, setting);
        for (const std::string &salt : salts) {
            company.come(prompt, 1, {}, {}, salt);
            for (company.passes = 0; company.requests.back().times.empty();) REQUIRE(company.one_pass());
        }
        company.finish(), company.check_all();
        CHECK((company.requests.back().known > 0) == (salts.size() > 1 && salts[0] == salts.back()));
        return company.passes;
    };
    CHECK(passes({"a", "a"}) < passes({"a"}));
    for (const std::vector<std::string> &salts :
         {std::vector<std::string>{"a", "b"}, {"", "b"}, {"b", ""}, {"a", "aa"}, {"a", "c", "b"}})
        CHECK(passes(salts) == passes({"b"}));
}

TEST_CASE("--order prefix: the longest known beginning comes in first, and no one is overtaken for ever") {
    Engine engine = small_engine();
    Setting setting = with_pages(4, 40, 1);
    setting.prefix_first = true;
    Company company(engine, setting);
    const Tokens stem = random_tokens(engine, 24, 1), other = random_tokens(engine, 24, 2);
    auto with = [&](const Tokens &stem, int count, int end) {
        Tokens prompt = part(stem, 0, count);
        append(prompt, random_tokens(engine, 5, end));
        return prompt;
    };
    company.come(stem, 1), company.finish();
    company.come(other, 1);               // 1: nothing is known of it
    company.come(with(stem, 8, 3), 1);    // 2: two pages
    company.come(with(stem, 20, 4), 1);   // 3: five
    company.come(with(stem, 20, 5), 1);   // 4: five
    company.come(with(other, 24, 6), 1);  // 5: none, and six when 1 has been there
    company.finish();
    std::vector<int> order;
    for (const Request *request : company.ended) order.push_back(request->number);
    CHECK(order == std::vector<int>{0, 3, 4, 2, 1, 5});
    CHECK((company.requests[1].overtaken == 3 && company.requests[4].overtaken == 0));
    // Ever more requests come that begin as known: the other one waits for `patience` of them.
    company.come(random_tokens(engine, 9, 7), 1);
    Request &waits = company.requests.back();
    for (int i = 0; waits.stop.empty(); i++) {
        REQUIRE(i < 3 * company.schedule.patience);
        company.come(with(stem, 20, 100 + 2 * i), 1), company.come(with(stem, 20, 101 + 2 * i), 1);
        company.one_pass();
    }
    CHECK(waits.overtaken == company.schedule.patience);
    company.finish();
    company.check_all();
    for (const Request &request : company.requests) CHECK(request.overtaken <= company.schedule.patience);
}

TEST_CASE("an error ends the request that it is of; the others go on, and share no page with it") {
    Model model = random_model({2, 32, 48, 4, 2, 20, 40});
    auto fill = [&](const Tensor &table, float number) {  // the row of token 39
        float *row = const_cast<float *>((const float *)table.data) + 39 * table.cols;
        std::fill(row, row + table.cols, number);
    };
    fill(model.embedding, INFINITY), fill(model.head, 0);  // who reads it has no finite logit; no one generates it
    Engine engine = engine_of(std::move(model));
    for (int guesses : {0, 3}) {
        Setting setting = with_pages(4, 40, 3);
        setting.guesses = guesses;
        Company company(engine, setting);
        auto without = [&](int count, int like) {
            Tokens tokens = random_tokens(engine, count, like);
            std::replace(tokens.begin(), tokens.end(), 39, 38);
            return tokens;
        };
        Tokens wrong = without(12, 1);
        wrong.back() = 39;
        company.come(without(9, 2), 12), company.come(wrong, 12), company.come(without(14, 3), 12);
        company.finish();
        CHECK((company.ended[0]->number == 1 && company.ended[0]->stop == "error" && company.ended.size() == 3));
        check_contains(company.requests[1].error, "position 11: a logit is ");
        CHECK((company.requests[1].tokens == wrong && company.requests[1].text.empty()));
        for (int i : {0, 2}) CHECK((company.requests[i].stop == "length" && company.requests[i].error.empty()));
        for (int i : {0, 2}) check_alone(engine, setting, company.requests[i]);
        wrong.push_back(1);
        CHECK(find_known(company.cache, 0, wrong) < 12);
        rewind(company.cache, 0, 0);
    }
}

TEST_CASE("where all of a prompt is known a row is left to compute, in every precision") {
    Engine engine = small_engine();
    for (const Precision &type : all_of<Precision>())
        for (int length : {1, 31, 32, 33, 64, 65, 96}) {
            CAPTURE(length);
            const bool blocks = has_blocks(Choice<Precision>(type));
            Setting setting = with_pages(blocks ? 32 : 8, 0);
            setting.type_k = setting.type_v = type;
            Company company(engine, setting);
            const Tokens prompt = random_tokens(engine, length);
            company.come(prompt, 3), company.finish();
            company.come(prompt, 3);
            const std::vector<Piece> pass = company.next();
            const int full = (length + 2) / 8 * 8, most = length - 1;  // with two tokens that were generated
            CHECK(company.requests[1].known == (blocks ? most / 32 * 32 : std::min(full, most)));
            REQUIRE(pass.size() == 1);
            CHECK(pass[0].count == length - company.requests[1].known);
            company.finish(), company.check_all();
        }
}

// ---- A pass --------------------------------------------------------------------------------------------------------

TEST_CASE("the passes of the comment; a long prompt does not hold up who is being decoded") {
    Engine engine = small_engine();
    Setting setting = with_pages(4, 0);
    setting.pass_tokens = 8;
    Company company(engine, setting);
    Request &a = company.come(random_tokens(engine, 3, 1), 40), &b = company.come(random_tokens(engine, 3, 2), 40);
    REQUIRE(company.one_pass());
    Request &c = company.come(random_tokens(engine, 9, 3), 40);
    auto expect = [&](std::vector<std::pair<Request *, int>> expected) {
        const std::vector<Piece> pass = company.next();
        REQUIRE(pass.size() == expected.size());
        for (size_t i = 0; i < pass.size(); i++)
            CHECK((pass[i].request == expected[i].first && pass[i].count == expected[i].second));
        REQUIRE(company.one_pass());
    };
    expect({{&a, 1}, {&b, 1}, {&c, 6}});
    expect({{&a, 1}, {&b, 1}, {&c, 3}});
    expect({{&a, 1}, {&b, 1}, {&c, 1}});
    const size_t before = a.tokens.size();
    Request &long_one = company.come(random_tokens(engine, 100, 4), 5);
    for (int pass = 1; pass <= 20; pass++) {
        REQUIRE(company.one_pass());
        CHECK((a.tokens.size() == before + pass && b.tokens.size() == before + pass));
        CHECK(company.cache.lengths[long_one.sequence] == 5 * pass);
    }
    company.finish(), company.check_all();
}

TEST_CASE("a pass that failed in any layer, or by Ctrl-C: tables are as they were, and going on gives the same text") {
    Engine engine = engine_of(random_model(mixed_shape()));
    const int layers = engine.model.config.layers;
    for (const Precision &type : {Precision(F16{}), Precision(Int4{}), Precision(Int2{})})
        for (const Place &place : {paged(32), Place{}, ring(40, 2)}) {
            CAPTURE(std::string(name_of(type)) + " " + place.name());
            Setting setting;
            setting.type_k = setting.type_v = type, setting.place = place, setting.sequences = 3;
            setting.place.pages = 9, setting.optimistic = true, setting.pass_tokens = 40;
            Company company(engine, setting);
            Cache &cache = company.cache;
            auto tables = [&] {
                Tokens all = cache.lengths;
                if (company.pool()) append(all, company.pool()->table);
                return all;
            };
            auto end = [&](Request &request) { company.ended.push_back(&request); };
            for (int i = 0; i < 5; i++) company.come(random_tokens(engine, 90, 1 + i / 2), 20 + i);
            for (int turn = 0; company.ended.size() < 5; turn++) {
                const std::vector<Piece> pass = company.next();
                const Tokens before = tables();
                engine.model.config.layers = turn % (layers + 1);  // so many store other tokens
                auto in_vain = [&] {
                    Batch batch;
                    for (const Piece &piece : pass)
                        for (int t = grow(cache, piece.request->sequence, piece.count), i = 0; i < piece.count; i++)
                            batch.add(7, piece.request->sequence, t + i);
                    forward(engine, batch, cache.stores);
                    throw Interrupted();
                };
                CHECK_THROWS_AS(all_or_nothing(cache, in_vain), Interrupted);
                engine.model.config.layers = layers;
                CHECK(tables() == before);
                interrupts = 1;
                CHECK_THROWS_AS(run_pass(engine, company.schedule, pass, true, end), Interrupted);
                interrupts = 0;
                CHECK(tables() == before);
                company.verify();
                run_pass(engine, company.schedule, pass, true, end);
            }
            company.finish(), company.check_all();
        }
}

TEST_CASE("what a pass was to compute is not found if it failed, nor before it is computed (vLLM 49377)") {
    Engine engine = small_engine();
    Company company(engine, with_pages(8, 0));
    const Tokens prompt = random_tokens(engine, 64);
    company.setting.pass_tokens = company.schedule.pass_tokens = 40;
    company.come(prompt, 5);
    auto known = [&] {
        const int found = find_known(company.cache, 3, prompt);
        rewind(company.cache, 3, 0);
        return found;
    };
    auto run = [&] { run_pass(engine, company.schedule, company.next(), true, [](Request &) {}); };
    for (int computed : {0, 40, 64}) {
        CHECK(known() == std::min(computed, 63));
        interrupts = 1;
        CHECK_THROWS_AS(run(), Interrupted);
        interrupts = 0;
        CHECK(known() == std::min(computed, 63));
        run();
    }
    company.ended.push_back(&company.requests[0]);
    while (!company.schedule.running.empty()) run();
    company.finish(), company.check_all();
}
