// Many requests through one cache (batch.h): a request's text and logits are the same to the last bit, alone or in
// company, shared or not, preempted or not. Everything here is ==.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <thread>

#include "kinds.h"

// ---- A request alone, and in company -------------------------------------------------------------------------------

// A cache, and how requests go through it.
struct Setting {
    Precision type_k = F32{}, type_v = F32{};
    Place place = paged(4);
    int sequences = 3, pass_tokens = 64;
    bool optimistic = false, ignore_end = true;
    int capacity = 160;
    std::string name() const {
        return std::string(name_of(type_k)) + " " + name_of(type_v) + " " + place.name() + ", " +
               std::to_string(place.pages) + " pages, " + std::to_string(sequences) + " sequences, passes of " +
               std::to_string(pass_tokens) + (optimistic ? ", optimistic" : "");
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
        if ((int)tokens.size() == request.prompt + request.count) stop = "-n";
        if (!setting.ignore_end && std::count(ends.begin(), ends.end(), tokens.back())) stop = "end id";
        for (const std::string &end : request.stops)
            if (text.find(end) != std::string::npos) text.resize(text.find(end)), stop = "stop";
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
    Schedule schedule = {cache, setting.pass_tokens, setting.optimistic, {}, {}};
    std::deque<Request> requests;
    std::vector<Request *> ended;
    int passes = 0, copies = 0, evicted = 0, most_used = 0;

    Company(Engine &of, const Setting &with)
        : engine(of), setting(with),
          cache(cache_for(of, with.type_k, with.type_v, with.capacity, with.place, with.sequences)) {
        schedule.checks = true;
        cache.tell = [&](const PageEvent &event) {
            copies += event.what == PageEvent::copied, evicted += event.what == PageEvent::evicted;
            if (pool()) most_used = std::max(most_used, pool()->used());
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
                  const std::vector<std::string> &stops = {}) {
        Request &request = requests.emplace_back();
        request.id = "request " + std::to_string(requests.size() - 1);
        request.tokens = prompt, request.prompt = (int)prompt.size(), request.count = count;
        request.sampler = sampler, request.stops = stops, request.number = (int)requests.size() - 1;
        request.stream = std::make_unique<TextStream>(nullptr);
        submit(schedule, request);
        return request;
    }
    // Pages, tables, and the machine's tables.
    void verify() const {
        std::vector<int> lengths(cache.lengths.size());
        for (const Request *request : schedule.running) lengths[request->sequence] = cache.lengths[request->sequence];
        REQUIRE(lengths == cache.lengths);
        if (!cache.pages) return;
        const char *wrong = cache.pages->check();
        REQUIRE_MESSAGE(!wrong, wrong);
        bool right = true;
        for (const Store &store : cache.stores)
            for (int i = 0; i < (int)store.pool->table.size(); i++) {
                const int sequence = i / (int)store.pool->pages_per_sequence;
                const int logical = i % (int)store.pool->pages_per_sequence, page = store.pool->table[i];
                const bool held = logical >= store.pool->first[sequence] &&
                                  logical < pages_for(lengths[sequence], store.pool->page);
                right = right && (page >= 0) == held && (page < 0 || store.page_table[i] == page);
            }
        REQUIRE(right);
    }
    std::vector<Piece> next() {
        const Request *first = schedule.running.empty() ? nullptr : schedule.running[0];
        const int preempted = first ? first->preemptions : 0;
        std::vector<Piece> pass = next_pass(schedule);
        verify();
        int count = 0, least = 1;
        for (const Piece &piece : pass) count += piece.count, least = std::min(least, piece.count);
        REQUIRE((count <= schedule.pass_tokens && least > 0));
        for (const Request *running : schedule.running) {  // whoever is decoded is in each pass
            auto is_it = [&](const Piece &piece) { return piece.request == running; };
            REQUIRE((schedule.unread(*running) > 1 || std::any_of(pass.begin(), pass.end(), is_it)));
        }
        REQUIRE((!first || first->preemptions == preempted));
        if (!setting.optimistic) REQUIRE(preemptions() == 0);
        if (!setting.optimistic && pool())
            REQUIRE(peak_pages(schedule, *pool()) <= (int64_t)pool()->references.size());
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
        for (const Store &store : cache.stores) CHECK((!store.pool || store.pool->used() == 0));
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
    const int page = blocks ? one_of(random, {32, 64}) : 1 + below(random, below(random, 3) ? 16 : 64);
    setting.place = below(random, 8) ? paged(page) : below(random, 2) ? ring(8 + below(random, 90), below(random, 5)) : Place{};
    setting.place.all = below(random, 4) == 0;
    const int largest = pages_for(100, page);
    setting.place.pages = largest + below(random, below(random, 3) ? 2 + largest / 2 : 4 * largest);
    return setting;
}

static Sampler random_sampler(Random &random) {
    Sampler sampler;
    if (below(random, 3) == 0) return sampler;
    sampler.temperature = random.uniform(0.3, 2), sampler.seed = random.bits();
    if (below(random, 2)) sampler.top_k = 1 + below(random, 30);
    if (below(random, 2)) sampler.top_p = random.uniform(0.3, 1);
    if (below(random, 2)) sampler.min_p = random.uniform(0, 0.3);
    return sampler;
}

// Of few stems and random ends; or all that was asked and answered before, and something new.
static Tokens random_prompt(Engine &engine, const std::vector<Tokens> &stems, const Company &company, Random &random) {
    Tokens prompt = stems[below(random, (int)stems.size())];
    if (!company.ended.empty() && below(random, 5) == 0) prompt = company.ended[below(random, (int)company.ended.size())]->tokens;
    if (below(random, 3) == 0) prompt.resize(1 + below(random, (int)prompt.size()));
    const Tokens end = random_tokens(engine, below(random, 3) ? below(random, 20) : 0, random.bits());
    prompt.insert(prompt.end(), end.begin(), end.end());
    return prompt;
}

TEST_CASE("random requests in any company have the text and the logits that each has alone") {
    Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    std::vector<Engine> engines;
    for (const char *name : {"gemma3", "gemma4_shared", "granite_swa", "qwen2_window_16", "mistral_window",
                             "llama_gqa_9_on_3", "qwen3_layer_types"})
        engines.push_back(engine_of(fixtures + name, 1 + (int)engines.size() % 2));
    engines.push_back(engine_of(random_model({2, 32, 48, 4, 2, 20, 40})));
    engines.push_back(engine_of(random_model(mixed_shape())));
    const int wanted = getenv("REQUESTS") ? atoi(getenv("REQUESTS")) : plain_path ? 150 : 1500;
    int requests = 0, refused = 0, preemptions = 0, hits = 0, copies = 0, evicted = 0, stopped = 0;
    for (int round = 0; requests < wanted; round++) {
        CAPTURE(round);
        Engine &engine = engines[below(random, (int)engines.size())];
        const Setting setting = random_setting(random);
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
                for (int i = below(random, 3); i > 0; i--) stops.push_back(std::to_string(below(random, 50)) + " ");
                const PagePool *pool = company.pool();
                const bool fits = positions <= limit_of(company.cache) &&
                                  (!pool || pages_for(positions, pool->page) <= (int)pool->references.size());
                const Sampler sampler = random_sampler(random);
                if (fits)
                    company.come(prompt, count, sampler, stops);
                else
                    CHECK_THROWS_AS(company.come(prompt, count, sampler, stops), Error);
                if (!fits) company.requests.pop_back(), refused++;
            }
            company.one_pass();
        }
        company.finish(), company.check_all();
        requests += (int)company.requests.size(), preemptions += company.preemptions(), hits += company.hits();
        copies += company.copies, evicted += company.evicted;
        for (const Request &request : company.requests) stopped += request.stop == "stop";
    }
    if (getenv("REQUESTS"))
        MESSAGE(requests << " requests, " << refused << " refused, " << stopped << " stopped; " << preemptions
                         << " preemptions, " << hits << " tokens found, " << copies << " copies, " << evicted << " evicted");
    CHECK((refused > wanted / 200 && preemptions > wanted / 50 && hits > wanted && copies > wanted / 20));
    CHECK((stopped > wanted / 20 && evicted > wanted / 10));
}
