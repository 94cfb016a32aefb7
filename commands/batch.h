// llm batch: many requests through one cache, from a file of JSON lines; a line for each that ends, a summary.
#pragma once

#include "generate.h"

// ---- Requests ------------------------------------------------------------------------------------------------------

// What a line asks for. `name` is what messages call it. Without "n" as many tokens as -n says.
inline Request read_request(const std::string &name, const std::string &line, const Options &options,
                            const Tokenizer *tokenizer, const Config &config) {
    for (size_t at = 0; at < line.size(); at += line[at] == '\\' ? 2 : 1)
        if (line.compare(at, 6, "\\u0000") == 0) fail("%s: \\u0000 ends a text here: leave it out", name.c_str());
    require_utf8(name, line);
    const Json json = parse_json(name, line);
    const Section of = {name, json.get()};
    for (const cJSON *item : items_of(json.get()))
        if (!has("id prompt ids n temp top_k top_p min_p seed stop at", item->string))
            fail("%s: unknown key \"%s\"; known are id prompt ids n temp top_k top_p min_p seed stop at", name.c_str(),
                 printable(std::string(item->string)).c_str());
    Options one;
    const cJSON *ids = of.find("ids");
    if (!of.find("prompt") == !ids) fail("%s: expected either \"prompt\" or \"ids\"", name.c_str());
    if (ids) one.given["--ids"] = "";
    if (ids && !cJSON_IsArray(ids)) of.refuse("ids", ids, "a list of whole numbers");
    for (const cJSON *id : items_of(ids)) {
        if (!is_whole(id, 0, INT_MAX)) of.refuse("ids", id, "a list of whole numbers");
        one.prompt_ids.push_back((int)id->valuedouble);
    }
    if (ids && one.prompt_ids.empty()) of.refuse("ids", ids, "one at least");
    if (!ids && !tokenizer) fail("%s: this model has no tokenizer.json: fetch it, or give \"ids\"", name.c_str());
    one.prompt = of.text("prompt", "");
    Request request;
    request.id = of.text("id", "");
    try {
        request.tokens = prompt_tokens(one, tokenizer, config);
    } catch (const Error &error) {
        fail("%s: %s", name.c_str(), error.what());
    }
    request.prompt = (int)request.tokens.size();
    request.count = of.integer("n", 1, INT_MAX / 2, std::min(options.count, INT_MAX / 2));
    const cJSON *seed = of.find("seed");
    if (seed && !is_whole(seed, 0, 0x1p53)) of.refuse("seed", seed, "a whole number from 0 to 2^53");
    request.sampler = {of.number("temp", 0, 1000, 0), of.number("top_p", 0, 1, 1), of.number("min_p", 0, 1, 0),
                       of.integer("top_k", 0, 1 << 30, 0), (uint64_t)of.number("seed", 0, 0x1p53, 0)};
    for (const char *key : {"top_k", "top_p", "min_p"})
        if (of.find(key) && request.sampler.temperature == 0) of.refuse(key, of.find(key), "none where \"temp\" is 0");
    request.at = of.number("at", 0, 1e9, 0);
    const cJSON *stop = of.find("stop");
    std::vector<const cJSON *> stops = items_of(stop);
    if (stop && !cJSON_IsArray(stop)) stops = {stop};
    for (const cJSON *item : stops) {
        if (!cJSON_IsString(item) || !*item->valuestring) of.refuse("stop", item, "a text, or a list of texts");
        request.stops.push_back(item->valuestring);
    }
    return request;
}

// What is wrong with a request ends the program, or is said and counted.
inline void leave_out(const Options &options, const Error &error, int &wrong) {
    if (!options.keep_going) throw error;
    begin_work(), note(error.what());
    wrong++;
}

// All requests of the file, in the order that they come. Lines that are wrong end the program before anything runs;
// with --keep-going they are said and left out, and `wrong` counts them.
inline std::vector<std::unique_ptr<Request>> read_requests(const Options &options, const Session &session, int &wrong) {
    std::vector<std::unique_ptr<Request>> requests;
    std::map<std::string, int> lines;  // by id
    const Config &config = session.engine.model.config;
    const bool endless = std::holds_alternative<Ring>(options.layouts[0]);
    const int limit = options.context ? options.context : config.context;
    if (limit > config.context)
        fail("-c %d: this model was made for %d positions: lower -c, or use --cache ring", limit, config.context);
    int number = 0;
    for (const std::string &line : split(options.prompt, '\n')) {
        number++;
        if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
        try {
            const std::string name = formatted("%s: line %d", options.prompt_file.c_str(), number);
            Request request = read_request(name, line, options, session.tokenizer.get(), config);
            if (request.id.empty()) request.id = std::to_string(number);
            if (!lines.emplace(request.id, number).second)
                fail("%s: id \"%s\" stands on line %d, too: give each its own", name.c_str(),
                     printable(request.id).c_str(), lines[request.id]);
            const int64_t positions = (int64_t)request.prompt + request.count - 1;
            if (positions > limit && !endless)
                fail("%s: %d tokens and %d more take %lld positions, a sequence has %d: shorten it%s", name.c_str(),
                     request.prompt, request.count, (long long)positions, limit,
                     limit < config.context ? " or raise -c" : "");
            request.writer = std::make_unique<Writer>(session.tokenizer.get(), request.tokens, request.stops);
            requests.push_back(std::make_unique<Request>(std::move(request)));
        } catch (const Error &error) {
            leave_out(options, error, wrong);
        }
    }
    if (requests.empty()) fail("%s: no request is there, expected a JSON object a line", options.prompt_file.c_str());
    std::stable_sort(requests.begin(), requests.end(), [](auto &a, auto &b) { return a->at < b->at; });
    for (size_t i = 0; i < requests.size(); i++) requests[i]->number = (int)i;
    return requests;
}

// ---- llm batch -----------------------------------------------------------------------------------------------------

using Requests = std::vector<std::unique_ptr<Request>>;

struct BatchRun {
    const Options &options;
    Session &session;
    Cache &cache;
    Schedule &schedule;
    const PagePool *pool;  // nullptr: the layout has no pages
    std::unique_ptr<PartFile> events = nullptr;  // --events: what happens, as JSON lines
    const double start = now();
    double seconds = 0, planning = 0, next_line = start + 0.5;
    size_t come = 0, ended = 0;
    int64_t generated = 0, found = 0, preemptions = 0, passes = 0;
    int most_pages = 0;
    double most_bytes = 0;

    void tell(Report event) { events->write(event.add("seconds", now() - start).json() + "\n"); }
    void tell_page(const PageEvent &page) {
        const char *const names[] = {"take", "share", "copy", "publish", "release", "free", "evict"};
        Report event;
        event.add("event", std::string(names[page.what])).add("kind", page.kind).add("page", page.page);
        for (const Request *request : schedule.running)
            if (request->sequence == page.sequence) event.add("id", request->id);
        if (page.what == PageEvent::copied) event.add("from", page.from).add("count", page.count);
        tell(event);
    }
    void tell_pass(const std::vector<Piece> &pass) {
        Report event, pieces;
        int tokens = 0;
        for (const Piece &piece : pass) tokens += piece.count, pieces.add(piece.request->id.c_str(), piece.count);
        event.add("event", std::string("pass")).add("tokens", tokens).add("pieces", pieces);
        event.add("running", (int)schedule.running.size()).add("waiting", (int)schedule.waiting.size());
        tell(event.add("pages", schedule.held));
    }
    void open_events() {
        if (!options.has("--events")) return;
        events = std::make_unique<PartFile>(options.events, "--events");
        cache.tell = [&](const PageEvent &page) { tell_page(page); };
        // `known`: positions that it has in the cache, for one that comes in those that were found.
        schedule.tell = [&](const std::string &what, const Request &request) {
            tell(Report().add("event", what).add("id", request.id).add("known", cache.lengths[request.sequence]));
        };
    }

    // A line of what it has, as soon as it ends.
    void end(Request &request) {
        request.ended = now() - start;
        const auto first = request.tokens.begin(), middle = first + request.prompt;
        const bool any = middle < request.tokens.end();
        generated += request.tokens.end() - middle, found += std::max(0, request.known);
        preemptions += request.preemptions, ended++;
        Report line;
        line.add("id", request.id).add("prompt_tokens", request.prompt);
        line.add("cached_tokens", std::max(0, request.known));
        line.add("tokens", std::vector<int>(middle, request.tokens.end())).add("text", request.text);
        line.add("stop", request.stop).add("preemptions", request.preemptions);
        if (any && request.first_token == 0) request.first_token = request.ended;
        line.add("seconds_to_first_token", any ? request.first_token - request.at : NAN);
        line.add("seconds", request.ended >= request.at ? request.ended - request.at : NAN);
        erase_progress();
        puts(line.json().c_str());
        flush_output();
    }

    void say_progress(const Requests &requests) {
        const double time = now();
        if (time < next_line) return;
        next_line = time + 0.1;
        int64_t tokens = generated, hits = found;
        for (const Request *request : schedule.running)
            tokens += (int64_t)request->tokens.size() - request->prompt, hits += std::max(0, request->known);
        std::string line =
            formatted("%zu running, %zu waiting, %zu of %zu ended, %.0f tokens/s", schedule.running.size(),
                      schedule.waiting.size(), ended, requests.size(), (double)tokens / (time - start));
        if (pool)
            line += formatted(", %d of %zu pages held, %lld tokens found", pool->used(), pool->references.size(),
                              (long long)hits);
        show_progress(line);
    }

    void run(const Requests &requests) {
        while (ended < requests.size()) {
            const double time = now() - start;
            for (; come < requests.size() && requests[come]->at <= time; come++) submit(schedule, *requests[come]);
            const std::vector<Piece> pass = next_pass(schedule);
            planning += now() - start - time;
            if (pass.empty()) {  // until the next one comes
                usleep((useconds_t)(1e6 * std::min(0.02, std::max(0.0, requests[come]->at - time))));
                stop_if_interrupted();
                continue;
            }
            run_pass(session.engine, schedule, pass, options.ignore_end, [&](Request &request) { end(request); });
            passes++;
            for (const Piece &piece : pass)
                if (Request &it = *piece.request; it.first_token == 0 && (int)it.tokens.size() > it.prompt)
                    it.first_token = now() - start;
            most_pages = std::max(most_pages, schedule.held), most_bytes = std::max(most_bytes, schedule.bytes);
            if (events) tell_pass(pass);
            say_progress(requests);
        }
    }

    Report summary(const Requests &requests) const {
        int64_t prompts = 0;
        for (auto &request : requests) prompts += request->prompt;
        Report all;
        all.add("requests", (int)requests.size(), counted((int64_t)requests.size(), "request") + ", ");
        all.add("prompt_tokens", prompts);
        all.show("tokens", (long long)generated, "%lld tokens").show("seconds", seconds, " in %.3g s: ");
        all.show("tokens_per_second", (double)generated / seconds, "%.1f tokens/s\n").add("passes", passes);
        all.show("hit_tokens", (long long)found, "%lld of ").say(counted(prompts, "prompt token"));
        all.show("preemptions", (long long)preemptions, " were found in the cache; %lld preemptions\n");
        Report of;
        add_names(of, &cache, "cache %s", ", K %s", ", V %s: ");
        of.add("peak_bytes", most_bytes, in_units(most_bytes));
        all.add("cache", of).say(" at the most");
        if (pool) {
            all.show("peak_pages", most_pages, ", in %d of ");
            all.show("pages", (int)pool->references.size(), "%d pages");
        } else {
            all.add("peak_pages", NAN);
        }
        all.say("\n");
        if (schedule.drafter.most) all.add("draft", about_draft(schedule.drafter));
        return all.add("schedule_seconds", planning);
    }
};

// Whether a request alone, with a cache of its own, has the same tokens, text and logits, to the last bit.
inline bool same_alone(const Options &options, Session &session, const Request &request) {
    Engine &engine = session.engine;
    Cache cache = open_cache(options, engine, options.caches()[0], request.positions());
    Request alone;
    alone.tokens.assign(request.tokens.begin(), request.tokens.begin() + request.prompt);
    alone.prompt = request.prompt, alone.count = request.count;
    alone.sampler = request.sampler, alone.stops = request.stops;
    alone.writer = std::make_unique<Writer>(session.tokenizer.get(), alone.tokens, alone.stops);
    std::vector<float> logits = prefill(engine, cache, 0, alone.tokens);
    while (true) {
        alone.bits = checksum(alone.bits, logits);
        take_token(alone, engine.model.config, options.ignore_end, logits);
        if (!alone.stop.empty()) break;
        logits = decode(engine, cache, {0}, {alone.tokens.back()});
    }
    return alone.tokens == request.tokens && alone.bits == request.bits && alone.text == request.text;
}

// A text alone has the frequencies of its length (longrope); in company all have the same, which then must be those.
inline void require_one_rope(const Options &options, Engine &engine, const Requests &requests) {
    int longest = 0, shortest = INT_MAX;
    for (auto &request : requests) {
        const int positions = options.context ? options.context : request->positions() + 1;
        longest = std::max(longest, positions), shortest = std::min(shortest, positions);
    }
    for (const Kind &kind : engine.model.config.kinds)
        if (const int original = kind.rope.original_context;
            !kind.rope.long_factors.empty() && shortest <= original && longest > original)
            fail(
                "%s: requests of up to %d positions and beyond, which this model computes otherwise (longrope): give "
                "them in two files, or -c %d to compute all as long ones",
                options.prompt_file.c_str(), original, longest);
    expect_positions_of(engine, longest);
}

inline int run_batch(const Options &options) {
    Session session = open_model(options);
    int wrong = 0, longest = 1;
    Requests requests = read_requests(options, session, wrong);
    for (auto &request : requests) longest = std::max(longest, request->positions());
    require_one_rope(options, session.engine, requests);
    Options many = options, one = options;
    many.sequences = std::min(options.sequences, (int)requests.size());
    one.sequences = 1, one.pool = 0;
    Cache cache = open_cache(many, session.engine, options.caches()[0], options.context ? options.context : longest);
    Schedule schedule{cache, options.pass_tokens, options.admission == "optimistic"};
    schedule.checks = options.against == "alone";
    const int capacity = options.context ? options.context : longest;
    schedule.drafter = open_drafter(options, session, cache, many.sequences, capacity);
    for (auto &request : std::exchange(requests, {})) {
        try {
            require_fit(schedule, *request);
            requests.push_back(std::move(request));
        } catch (const Error &error) {
            leave_out(options, error, wrong);
        }
    }
    if (requests.empty()) fail("%s: no request is left that fits", options.prompt_file.c_str());
    BatchRun run{options, session, cache, schedule, scarce_pool(cache)};
    run.open_events();
    try {
        run.run(requests);
    } catch (Interrupted) {
        for (auto &request : requests)
            if (request->stop.empty()) {
                if (request->sequence >= 0) schedule.tell("end", *request), leave(schedule, *request);
                request->stop = "interrupted", run.end(*request);
            }
    }
    run.seconds = now() - run.start;
    erase_progress();
    if (run.events) run.events->finish();
    Report summary = run.summary(requests);
    size_t same = 0;
    if (schedule.checks && !interrupted()) {
        Progress progress("each alone", (double)requests.size(), "requests");
        try {
            for (auto &request : requests) same += same_alone(one, session, *request), Progress::add(1);
            summary.show("same_alone", (int)same, "beside each alone: %d of ");
            summary.say(counted((int64_t)requests.size(), "request") + " the same, to the last bit\n");
        } catch (Interrupted) {
        }
    }
    puts(summary.json().c_str());
    flush_output();
    fputs(wrapped(summary.text, columns_of(stderr)).c_str(), stderr);
    if (interrupted()) return 130;
    return wrong || (schedule.checks && same < requests.size());
}
