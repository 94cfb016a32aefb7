// llm batch: many requests through one cache. Reads JSON lines, prints one for each request that ends, then a summary.
#pragma once

#include "about.h"
#include "files.h"
#include "template.h"

// ---- Requests ------------------------------------------------------------------------------------------------------

constexpr double exact_end = 0x1p53 - 1;  // JSON's numbers are read as doubles; whole ones are exact up to here

// A key that a request may have. The table has the order of the help.
struct RequestKey {
    const char *name, *type, *help;
    const char *elsewhere = "";  // names that other programs use
};
constexpr RequestKey request_keys[] = {
    {"id", "text or whole number", "what its line is called; its number where there is none", "custom_id request_id"},
    {"prompt", "text", "read as it stands; either this, or messages, or ids", "input text"},
    {"messages", "list", "of {\"role\", \"content\"}: a conversation, by the checkpoint's chat template"},
    {"ids", "list of whole numbers", "a prompt as ids; nothing is put before them",
     "prompt_ids input_ids prompt_token_ids"},
    {"n", "whole number", "tokens to generate at most; without it what -n says, and as many as the context holds",
     "max_tokens max_completion_tokens max_new_tokens n_predict num_predict"},
    {"temp", "number", "temperature; 0 (default) takes the likeliest token", "temperature"},
    {"top_k", "whole number", "draws from so many of the likeliest tokens; 0 (default): from all"},
    {"top_p", "number", "draws from the likeliest that reach this probability; default 1"},
    {"min_p", "number", "drops tokens below this share of the likeliest one's; default 0"},
    {"seed", "whole number", "for the same text again, below 2^53; default: by -s and the line, said in the answer"},
    {"stop", "text or list of texts", "ends the answer before it", "stop_sequences stop_strings"},
    {"salt", "text", "it shares pages with requests of the same salt alone; default \"\"", "cache_salt"},
    {"at", "number", "when it comes, in seconds; default 0"},
};
inline std::string names_of_keys() {
    std::string names;
    for (const RequestKey &key : request_keys) names += (names.empty() ? "" : " ") + std::string(key.name);
    return names;
}

// Fails on a key that no request has, and names the one that was probably meant.
inline void require_known_keys(const std::string &name, const Json *request) {
    for (const Json *item : items_of(request)) {
        if (has(names_of_keys(), item->key)) continue;
        std::string known = "known are " + names_of_keys();
        for (const RequestKey &key : request_keys)
            if (has(key.elsewhere, item->key)) known = formatted("here it is \"%s\"", key.name);
        fail("%s: unknown key \"%s\"; %s", name.c_str(), printable(item->key).c_str(), known.c_str());
    }
}

// Reads the requests of a file and encodes them for a model.
struct RequestReader {
    const Options &options;
    const Tokenizer *tokenizer;
    const Config &config;
    int positions;                          // most positions of a sequence
    std::optional<ChatTemplate> form = {};  // opened by the first request with messages
    bool any_text = false;                  // some request has a prompt, to which no template is applied

    std::vector<int> ids_of_messages(const Section &of, const Json *list);
    std::vector<int> tokens_of(const Section &of);
    Request read(const std::string &name, int number, const std::string &line);
};

// The ids of a conversation, in the form of the checkpoint's chat template.
inline std::vector<int> RequestReader::ids_of_messages(const Section &of, const Json *list) {
    if (!is_list(list)) of.refuse("messages", list, "a list of {\"role\", \"content\"}");
    if (!form) form.emplace(open_template(options.directory, "", tokenizer));
    std::vector<Message> messages;
    for (const Json *item : items_of(list)) {
        const Section said = {of.name + ": messages", item};
        if (!is_object(item)) of.refuse("messages", list, "a list of {\"role\", \"content\"}");
        said.need("role");
        messages.push_back(message_of(*form, said));
    }
    std::vector<int> ids = encode(tokenizer, render(*form, messages), "messages");
    if (ids.empty()) fail("messages: the template makes no tokens of them");
    return require_ids(ids, config), ids;
}

// The tokens of a request, which has exactly one of a text, a conversation and ids.
inline std::vector<int> RequestReader::tokens_of(const Section &of) {
    const char *name = of.name.c_str();
    const Json *prompt = of.find("prompt"), *messages = of.find("messages"), *ids = of.find("ids");
    if (!!prompt + !!messages + !!ids != 1) fail("%s: expected one of \"prompt\", \"messages\" and \"ids\"", name);
    if (!ids && !tokenizer) fail("%s: this model has no tokenizer.json: fetch it, or give \"ids\"", name);
    if (ids && !is_list(ids)) of.refuse("ids", ids, "a list of whole numbers");
    std::vector<int> given;
    for (const Json *id : items_of(ids)) {
        if (!is_whole(id, 0, INT_MAX)) of.refuse("ids", id, "a list of whole numbers");
        given.push_back((int)id->number);
    }
    if (ids && given.empty()) of.refuse("ids", ids, "one at least");
    const std::string text = of.text("prompt", "");
    any_text |= prompt != nullptr;
    try {
        return messages ? ids_of_messages(of, messages)
                        : prompt_tokens(text, ids ? &given : nullptr, tokenizer, config);
    } catch (const Error &error) {
        if (strncmp(error.what(), name, of.name.size()) == 0) throw;
        fail("%s: %s", name, error.what());
    }
}

inline std::vector<std::string> stops_of(const Section &of) {
    const Json *stop = of.find("stop");
    std::vector<std::string> stops;
    for (const Json *item : entries_of(stop)) {
        if (!is_text(item) || item->text.empty()) of.refuse("stop", item, "a text, or a list of texts");
        stops.push_back(item->text);
    }
    return stops;
}

// Reads line `number` of the file; `name` is what messages call it. Without "seed" its seed is that of -s, or the one
// drawn for the file, plus one for each line above it, so that no two requests draw alike.
inline Request RequestReader::read(const std::string &name, int number, const std::string &line) {
    const Json json = parse_json(name, line);
    const Section of = {name, &json};
    require_known_keys(name, &json);
    Request request;
    const Json *id = of.find("id");
    if (id && !is_text(id) && !is_whole(id, 0, exact_end))
        of.refuse("id", id, "a text, or a whole number from 0 to 2^53 - 1");
    request.name = name;
    request.id = is_whole(id, 0, exact_end) ? json_of(id->number) : of.text("id", "");
    if (request.id.empty()) request.id = std::to_string(number);
    request.tokens = tokens_of(of);
    request.prompt = (int)request.tokens.size();
    request.count = of.integer("n", 1, INT_MAX / 2, std::min(options.count, INT_MAX / 2));
    if (const int room = room_for(request.prompt, request.count, positions); !of.find("n") && room < request.count)
        request.count = std::max(1, room), request.fills = true;
    const Json *seed = of.find("seed");
    if (seed && !is_whole(seed, 0, exact_end)) of.refuse("seed", seed, "a whole number from 0 to 2^53 - 1");
    const uint64_t own = ((uint64_t)options.seed + (uint64_t)number - 1) & (uint64_t)exact_end;
    request.sampler = {of.number("temp", 0, 1000, 0), of.number("top_p", 0, 1, 1), of.number("min_p", 0, 1, 0),
                       of.integer("top_k", 0, 1 << 30, 0), seed ? (uint64_t)seed->number : own};
    request.at = of.number("at", 0, 1e9, 0);
    request.stops = stops_of(of), request.salt = of.text("salt", "");
    return request;
}

// Ends the program with a request's error, or with --keep-going notes it and counts it in `wrong`.
inline void leave_out(const Options &options, const Error &error, int &wrong) {
    if (!options.keep_going) throw error;
    begin_work(), note(error.what());
    wrong++;
}

// All requests of the file, ordered by the time at which they come. A wrong line ends the program before anything runs;
// with --keep-going it is noted, left out and counted in `wrong`.
inline std::vector<std::unique_ptr<Request>> read_requests(const Options &options, Session &session, int &wrong) {
    std::vector<std::unique_ptr<Request>> requests;
    std::map<std::string, int> lines;  // id -> line number
    Config &config = session.engine.model.config;
    const bool endless = std::holds_alternative<Ring>(options.layouts[0]);
    const int limit = options.context ? options.context : config.context;
    if (limit > config.context)
        fail("-c %d: this model was made for %d positions: lower -c, or use --cache ring", limit, config.context);
    RequestReader reader{options, session.tokenizer.get(), config, endless ? INT_MAX : limit};
    int number = 0;
    for (const std::string &line : split(options.prompt, '\n')) {
        number++;
        if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
        try {
            const std::string name = formatted("%s: line %d", options.prompt_file.c_str(), number);
            Request request = reader.read(name, number, line);
            if (!lines.emplace(request.id, number).second)
                fail("%s: id \"%s\" stands on line %d, too: give each its own", name.c_str(),
                     printable(request.id).c_str(), lines[request.id]);
            const int64_t positions = (int64_t)request.prompt + request.count - 1;
            if (positions > limit && !endless)
                fail("%s: %s and %d more take %lld positions, a sequence has %d: shorten it%s", name.c_str(),
                     counted(request.prompt, "token").c_str(), request.count, (long long)positions, limit,
                     limit < config.context ? " or raise -c" : "");
            request.writer = std::make_unique<Writer>(session.tokenizer.get(), request.tokens, request.stops);
            requests.push_back(std::make_unique<Request>(std::move(request)));
        } catch (const Error &error) {
            leave_out(options, error, wrong);
        }
    }
    if (reader.any_text) note_template(options.directory);
    if (const int end = reader.form ? end_id(*reader.form, session.tokenizer.get()) : -1; end >= 0)
        config.end_ids.push_back(end);
    if (requests.empty()) fail("%s: no request is there, expected a JSON object a line", options.prompt_file.c_str());
    std::stable_sort(requests.begin(), requests.end(), [](auto &a, auto &b) { return a->at < b->at; });
    for (size_t i = 0; i < requests.size(); i++) requests[i]->number = (int)i;
    return requests;
}

// The smallest value that at least `percent` % of all do not exceed (nearest rank); NAN if there are none.
inline double percentile(std::vector<double> values, int percent) {
    if (values.empty()) return NAN;
    const auto place = values.begin() + ((std::ptrdiff_t)values.size() * percent - 1) / 100;
    std::nth_element(values.begin(), place, values.end());
    return *place;
}

// ---- llm batch -----------------------------------------------------------------------------------------------------

using Requests = std::vector<std::unique_ptr<Request>>;

struct BatchRun {
    const Options &options;
    Session &session;
    Cache &cache;
    Schedule &schedule;
    const PagePool *pool;                        // nullptr: the layout has no pages
    std::unique_ptr<PartFile> events = nullptr;  // --events: what happens, as JSON lines
    const double start = now();
    double seconds = 0, planning = 0, next_line = start + 0.5;
    size_t come = 0, ended = 0;
    int64_t generated = 0, found = 0, preemptions = 0, passes = 0;
    std::vector<double> to_first = {}, between = {};  // seconds: to a request's first token; from a token to the next
    int most_pages = 0, errors = 0;
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
        event.add("event", std::string("pass")).add("count", tokens).add("pieces", pieces);
        event.add("running", (int)schedule.running.size()).add("waiting", (int)schedule.waiting.size());
        tell(event.add("pages", schedule.held));
    }
    void open_events() {
        if (!options.has("--events")) return;
        events = std::make_unique<PartFile>(options.events, "--events");
        cache.tell = [&](const PageEvent &page) { tell_page(page); };
        // `known`: positions of the request in the cache; when it is admitted, those found there (the prefix hit).
        schedule.tell = [&](const std::string &what, const Request &request) {
            tell(Report().add("event", what).add("id", request.id).add("known", cache.lengths[request.sequence]));
        };
    }

    // Prints the line of a request that has ended, and adds its numbers to the summary's.
    void end(Request &request) {
        if (has("interrupted error", request.stop)) request.text += request.writer->flush();  // no stop text can follow
        const double time = now() - start;
        const auto middle = request.tokens.begin() + request.prompt;
        generated += request.tokens.end() - middle, found += std::max(0, request.known);
        preemptions += request.preemptions, errors += !request.error.empty(), ended++;
        if (!request.times.empty()) to_first.push_back(request.times[0] - start - request.at);
        for (size_t i = 1; i < request.times.size(); i++) between.push_back(request.times[i] - request.times[i - 1]);
        Report line;
        line.add("id", request.id).add("prompt_tokens", request.prompt);
        line.add("cached_tokens", std::max(0, request.known));
        line.add("tokens", std::vector<int>(middle, request.tokens.end())).add("text", request.text);
        line.add("stop", request.stop);
        if (!request.error.empty()) line.add("error", request.error);
        // At temperature 0 nothing is drawn, so the seed is null.
        line.add("seed", request.sampler.temperature > 0 ? (double)request.sampler.seed : NAN);
        line.add("preemptions", request.preemptions);
        line.add("seconds_to_first_token", request.times.empty() ? NAN : to_first.back());
        line.add("seconds", time >= request.at ? time - request.at : NAN);
        const std::vector<double> &times = request.times;
        line.add("tokens_per_second", times.size() > 1 ? (double)(times.size() - 1) / (times.back() - times[0]) : NAN);
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
            line += formatted(", %d of %zu pages held, %s found", pool->used(), pool->references.size(),
                              counted(hits, "token").c_str());
        show_progress(line);
    }

    void run(const Requests &requests) {
        while (ended < requests.size()) {
            const double time = now() - start;
            for (; come < requests.size() && requests[come]->at <= time; come++) submit(schedule, *requests[come]);
            const std::vector<Piece> pass = next_pass(schedule);
            planning += now() - start - time;
            if (pass.empty()) {  // waits for the next request
                usleep((useconds_t)(1e6 * std::min(0.02, std::max(0.0, requests.at(come)->at - time))));
                stop_if_interrupted();
                continue;
            }
            run_pass(session.engine, schedule, pass, options.ignore_end, [&](Request &request) { end(request); });
            passes++;
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
        all.add("tokens", (long long)generated, counted(generated, "token"));
        all.add("seconds", seconds, " in " + in_digits(seconds) + " s: ");
        all.show("tokens_per_second", (double)generated / seconds, "%.1f tokens/s\n").add("passes", passes);
        all.show("hit_tokens", (long long)found, "%lld of ").say(counted(prompts, "prompt token"));
        all.add("preemptions", (long long)preemptions, " were found in the cache; ")
            .say(counted(preemptions, "preemption") + "\n");
        all.add("failed", errors);
        if (errors) all.say(counted(errors, "request") + " ended by an error, which its line says\n");
        const auto add_times = [&](const std::string &key, const char *what, const std::vector<double> &times,
                                   const char *after) {
            const double median = percentile(times, 50), most = percentile(times, 99);
            const std::string shown = in_digits(median) + " s (median), " + in_digits(most) + " s (p99)" + after;
            all.add((key + "_p50").c_str(), median);
            all.add((key + "_p99").c_str(), most, times.empty() ? "" : what + shown);
        };
        add_times("seconds_to_first_token", "the first token after ", to_first, between.empty() ? "\n" : "; ");
        add_times("seconds_between_tokens", "the next one after ", between, "\n");
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

// Runs a request again, alone in a cache of its own. True: tokens, text and logits are the same, to the last bit.
inline bool same_alone(const Options &options, Session &session, const Request &request) {
    Engine &engine = session.engine;
    Cache cache = open_cache(options, engine, options.caches()[0], request.positions());
    Request alone;
    alone.tokens.assign(request.tokens.begin(), request.tokens.begin() + request.prompt);
    alone.prompt = request.prompt, alone.count = request.count;
    alone.sampler = request.sampler, alone.stops = request.stops;
    alone.writer = std::make_unique<Writer>(session.tokenizer.get(), alone.tokens, alone.stops);
    blamed(alone, [&] {
        std::vector<float> logits = prefill(engine, cache, 0, alone.tokens);
        while (true) {
            require_finite(logits, (int)alone.tokens.size() - 1, &cache);
            alone.bits = checksum(alone.bits, logits);
            take_token(alone, engine.model.config, options.ignore_end, logits);
            if (!alone.stop.empty()) break;
            logits = decode(engine, cache, {0}, {alone.tokens.back()});
        }
    });
    return alone.tokens == request.tokens && alone.bits == request.bits && alone.text == request.text;
}

// Chooses RoPE's frequencies for all requests; fails if LongRoPE asks for different ones, for short and long requests.
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
    Schedule schedule{cache, options.pass_tokens, options.admission == "optimistic", options.order == "prefix"};
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
    if (!options.json) fputs(wrapped(summary.text, columns_of(stderr)).c_str(), stderr);
    if (interrupted()) return 130;
    return wrong || run.errors || (schedule.checks && same < requests.size());
}
