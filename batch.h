// Many requests, one cache: who is admitted, what the next pass computes, who is preempted.
//
// Requests come, run and end at any pass (Yu et al. 2022, Orca). A pass takes one token of each request that decodes,
// and fills up with pieces of prompts (Agrawal et al. 2024, Sarathi-Serve). Requests need not have the same length:
// there is no padding. With passes of 8 tokens, where A and B decode and the prompt of C has 9:
//   pass 1   A B C C C C C C      pass 2   A B C C C      pass 3   A B C
// A text does not depend on the other requests: a token's vectors have the same bits in any pass, and the draw for a
// position is a function of seed and position alone. So requests may share pages, wait, or be computed again without a
// change of their texts; on a GPU the last bits change (docs/gpu.md).
#pragma once

#include <deque>

#include "base/text.h"
#include "draft.h"

// What is asked for, and what has come of it so far.
struct Request {
    std::string id, name = "";  // name: in messages; "": its id
    std::vector<int> tokens;    // the prompt, then what was generated
    int prompt = 0, count = 0;  // tokens of the prompt; tokens to generate at most
    bool fills = false;         // count was set to what the context has room for
    Sampler sampler = {};
    std::vector<std::string> stops = {};  // texts that end it; they are cut from its text
    std::string salt;                     // it shares pages only with requests of the same salt
    double at = 0;                        // when it arrives, in seconds
    int number = 0;                       // in order of arrival
    int sequence = -1;                    // its sequence in the cache; -1: it waits
    int known = -1;                       // tokens found in the cache when it was first admitted; -1: never yet
    int preemptions = 0, overtaken = 0;   // times preempted; times a later one was admitted first
    std::string text, stop, error;        // stop: why it ended; error: the message, if "error"
    uint64_t bits = 0;                    // checksum of all its logits
    std::unique_ptr<Writer> writer = nullptr;
    std::vector<double> times = {};  // (generated token): when it was drawn, by now()

    // Positions that it takes in the cache at most. Its last token is never read, so it takes none.
    int positions() const { return prompt + std::max(count, 1) - 1; }
};

// One request's share of a pass: its next `count` tokens, then at most `guesses` guesses.
struct Piece {
    Request *request;
    int count, guesses = 0;
};

struct Schedule {
    Cache &cache;
    int pass_tokens = 512;                // most tokens of a pass, no fewer than sequences
    bool optimistic = false;              // admits by the pages needed now, not by the peak
    bool prefix_first = false;            // --order prefix: admits who has most known pages first,
    int patience = 16;                    // but the oldest before it, if it was overtaken so often
    Drafter drafter = {};                 // makes no guesses unless --draft is set
    std::deque<Request *> waiting = {};   // in order of arrival
    std::vector<Request *> running = {};  // in order of arrival
    bool changed = true;                  // a waiting request may have room now
    bool checks = false;                  // fill Request::bits
    int held = 0;                         // pages in use in the last pass
    double bytes = 0;                     // bytes of the cache in the last pass
    // Called when a request is admitted ("admit"), preempted ("preempt") or has ended ("end").
    std::function<void(const std::string &what, const Request &)> tell = [](auto &, auto &) {};
    int unread(const Request &request) const { return (int)request.tokens.size() - cache.lengths[request.sequence]; }
};

inline Request *admit(Schedule &schedule);
inline int64_t spare_pages(const Schedule &schedule, const std::vector<Piece> &pass);
inline void add_guesses(const Schedule &schedule, std::vector<Piece> &pass, int left);
inline void preempt(Schedule &schedule);

// Returns the pieces of the next pass, empty if there is nothing to do: a token of each request that decodes, then
// pieces of prompts, first come, first served. So a request that decodes gets its token in each pass, however long a
// prompt is. A waiting request is admitted only when a pass has tokens left for it. So if requests that begin alike
// come together, the later ones find what the first has read. If pages are short, a request is preempted.
inline std::vector<Piece> next_pass(Schedule &schedule) {
    while (true) {
        std::vector<Piece> pass;
        int left = schedule.pass_tokens;
        auto add = [&](Request *request) {
            const int count = std::min(schedule.unread(*request), left);
            pass.push_back({request, tokens_of_pass(schedule.cache, request->sequence, count), 0});
            left -= pass.back().count;
        };
        for (bool prompts : {false, true})
            for (Request *request : schedule.running)
                if (left > 0 && (schedule.unread(*request) > 1) == prompts) add(request);
        while (Request *request = left > 0 ? admit(schedule) : nullptr) add(request);
        if (spare_pages(schedule, pass) >= 0) return add_guesses(schedule, pass, left), pass;
        preempt(schedule);
    }
}

// ---- Who may come in -------------------------------------------------------------------------------------------

// Returns the pool that can run out, of layers that see everything, or nullptr. With a window there is always a page.
inline PagePool *scarce_pool(const Cache &cache) {
    for (const Store &store : cache.stores)
        if (store.pool && !store.pool->window) return store.pool;
    return nullptr;
}

// Returns the most pages that the running requests can hold at once, if each generates all that it may. In t passes a
// request grows by at most t tokens; then it ends, and gives its pages back. So the most are held just before one ends,
// by that one and all that end later (LightLLM's scheduler). Three that decode:
//
//   positions now   to come   held when A ends   when C ends   when B ends
//   A       5          1             5+1
//   C       2          3             2+1             2+3
//   B       4          7             4+1             4+3           4+7        the most: max(14, 12, 11)
//
// The same in pages; a shared page counts once. A prompt may take one pass or many, and guesses may save some, so a
// request that still reads its prompt, or has guesses, counts whenever another one ends.
inline int64_t peak_pages(const Schedule &schedule, const PagePool &pool) {
    auto length = [&](const Request *request) { return schedule.cache.lengths[request->sequence]; };
    auto to_come = [&](const Request *request) {  // passes until it ends
        const bool any = schedule.unread(*request) > 1 || schedule.drafter.most > 0;
        return any ? INT_MAX : request->positions() - (int)request->tokens.size() + 1;
    };
    std::vector<const Request *> order(schedule.running.begin(), schedule.running.end());
    std::stable_sort(order.begin(), order.end(), [&](auto *a, auto *b) { return to_come(a) > to_come(b); });
    std::vector<bool> counted(pool.references.size());
    int64_t held = 0, most = 0;
    for (size_t last = 0; last < order.size(); last++) {
        for (int i = 0; i < pages_for(length(order[last]), pool.page); i++) {
            const int page = pool.entry(order[last]->sequence, i);
            held += !counted[page], counted[page] = true;
        }
        int64_t then = held;
        for (size_t i = 0; i <= last; i++) {
            const int64_t end = (int64_t)order[i]->tokens.size() - 1 + to_come(order[last]);
            then += pool.between(length(order[i]), (int)std::min<int64_t>(end, order[i]->positions()));
        }
        most = std::max(most, then);
    }
    return most;
}

// Fails if a request could never fit, even alone.
inline void require_fit(const Schedule &schedule, const Request &request) {
    auto require = [&](int takes, const char *what, int there, const char *flag) {
        const std::string &name = request.name.empty() ? request.id : request.name;
        if (takes > there)
            fail("%s: %s and %d more take %d %s %d: shorten it, or raise %s", name.c_str(),
                 counted(request.prompt, "token").c_str(), request.count, takes, what, there, flag);
    };
    const int positions = request.positions();
    require(positions, "positions, a sequence has", limit_of(schedule.cache), "-c");
    if (const PagePool *pool = scarce_pool(schedule.cache))
        require(pages_for(positions, pool->page), "pages, the pool has", (int)pool->references.size(), "--pool");
}
inline void submit(Schedule &schedule, Request &request) {
    require_fit(schedule, request);
    schedule.waiting.push_back(&request);
}

// Inserts a request in order of arrival: one that was preempted comes back before later ones.
template <class List>
void insert_by_number(List &list, Request *request) {
    auto later = [](const Request *a, const Request *b) { return a->number < b->number; };
    list.insert(std::upper_bound(list.begin(), list.end(), request, later), request);
}

// Takes a request that ended or is preempted out of those that run: gives back its pages and its sequence.
inline void leave(Schedule &schedule, Request &request) {
    rewind(schedule.cache, request.sequence, 0);
    request.sequence = -1;
    schedule.running.erase(std::find(schedule.running.begin(), schedule.running.end(), &request));
    schedule.changed = true;
}

// Returns the waiting request to admit next: the first. With prefix_first it is the one with the most known pages, the
// first of equals (SGLang's cache-aware order), so these pages are used before they are evicted. `patience` limits how
// long a request without known pages waits. Only the first 128 are compared, since each comparison walks the trie.
inline std::deque<Request *>::iterator next_to_admit(Schedule &schedule) {
    auto best = schedule.waiting.begin();
    if (!schedule.prefix_first || !schedule.cache.pages || (*best)->overtaken >= schedule.patience) return best;
    auto known = [&](const Request *it) { return schedule.cache.pages->known_pages(it->tokens, it->salt).size(); };
    size_t most = known(*best);
    for (size_t i = 1; i < std::min<size_t>(128, schedule.waiting.size()); i++)
        if (const size_t pages = known(schedule.waiting[i]); pages > most)
            most = pages, best = schedule.waiting.begin() + i;
    return best;
}

// Admits one waiting request and returns it, or nullptr if sequences or pages are short: the peak must fit or, if
// optimistic, the tokens so far. The prefix hit is taken first, so the page count is exact; a refusal gives it back.
inline Request *admit(Schedule &schedule) {
    Cache &cache = schedule.cache;
    const PagePool *pool = scarce_pool(cache);
    std::vector<bool> taken(cache.lengths.size());
    for (const Request *running : schedule.running) taken[running->sequence] = true;
    const size_t unused = std::find(taken.begin(), taken.end(), false) - taken.begin();
    if (!schedule.changed || schedule.waiting.empty() || unused == taken.size()) return nullptr;
    const auto place = next_to_admit(schedule);
    Request &request = **place;
    request.sequence = (int)unused;
    insert_by_number(schedule.running, &request);
    const int known = find_known(cache, request.sequence, request.tokens, request.salt);
    int64_t now = 0;  // new pages for the tokens of the running requests
    for (const Request *running : schedule.running)
        if (pool) now += pool->between(cache.lengths[running->sequence], (int)running->tokens.size());
    bool enough = !pool || now <= pool->available();
    if (pool && !schedule.optimistic) enough = peak_pages(schedule, *pool) <= (int64_t)pool->references.size();
    if (!enough) return leave(schedule, request), schedule.changed = false, nullptr;
    for (auto before = schedule.waiting.begin(); before != place; ++before) (*before)->overtaken++;
    schedule.waiting.erase(place);
    if (request.known < 0) request.known = known;
    schedule.tell("admit", request);
    return &request;
}

// ---- Who must make room ------------------------------------------------------------------------------------------

// Returns the pages left after a pass; if negative, so many are missing.
inline int64_t spare_pages(const Schedule &schedule, const std::vector<Piece> &pass) {
    const PagePool *pool = scarce_pool(schedule.cache);
    if (!pool) return INT_MAX;
    int64_t spare = pool->available();
    for (const Piece &piece : pass) {
        const int length = schedule.cache.lengths[piece.request->sequence];
        spare -= pool->between(length, length + piece.count);
    }
    return spare;
}

// Gives guesses the tokens and pages that a pass leaves, so no request waits for them.
inline void add_guesses(const Schedule &schedule, std::vector<Piece> &pass, int left) {
    const PagePool *pool = scarce_pool(schedule.cache);
    int64_t spare = schedule.drafter.most ? spare_pages(schedule, pass) : 0;
    for (Piece &piece : pass) {
        const Request &request = *piece.request;
        const int first = schedule.cache.lengths[request.sequence], end = first + piece.count;
        if (end < (int)request.tokens.size()) continue;  // it still reads its prompt
        int most = std::min({schedule.drafter.most, left, request.positions() - end});
        most = guesses_of_pass(schedule.cache, first, end, most);
        while (pool && pool->between(end, end + most) > spare) most--;
        piece.guesses = most, left -= most;
        if (pool) spare -= pool->between(end, end + most);
    }
}

// Preempts the running request with the fewest positions, the cheapest to compute again: it waits, and later finds
// those of its pages that were not evicted. It is never the first of those that run, so each comes to its end. No one
// is admitted until a request ends: the victim would take its pages back. A request alone has room (require_fit).
inline void preempt(Schedule &schedule) {
    if (schedule.running.size() < 2) fail("the pages do not suffice for one request, which was let in: a fault here");
    auto fewer = [&](const Request *a, const Request *b) {
        return schedule.cache.lengths[a->sequence] < schedule.cache.lengths[b->sequence];
    };
    Request &victim = **std::min_element(schedule.running.begin() + 1, schedule.running.end(), fewer);
    victim.preemptions++;
    schedule.tell("preempt", victim);
    leave(schedule, victim);
    insert_by_number(schedule.waiting, &victim);
    schedule.changed = false;
}

// ---- A pass ------------------------------------------------------------------------------------------------------

inline uint64_t checksum(uint64_t sum, const std::vector<float> &numbers) {  // FNV-1a, of words
    for (float number : numbers) sum = (sum ^ bit_cast<uint32_t>(number)) * 0x100000001b3;
    return sum;
}

// Draws a request's next token and adds it. Sets `stop` if the request ends.
inline void take_token(Request &request, const Config &config, bool ignore_end, const std::vector<float> &logits) {
    const int token = sample(request.sampler, logits, (int)request.tokens.size() - 1);
    request.tokens.push_back(token), request.times.push_back(now());
    request.text += request.writer->next(token);
    if ((int)request.tokens.size() - request.prompt >= request.count)
        request.stop = request.fills ? "context full" : "length";
    if (!ignore_end && config.ends(token)) request.stop = "end id";
    if (!request.stop.empty()) request.text += request.writer->flush();
    if (request.writer->stopped) request.stop = "stop";
}

// Calls what(). An error in it ends this request only.
template <class Do>
void blamed(Request &request, Do what) {
    try {
        what();
    } catch (const Error &error) {
        request.stop = "error", request.error = error.what();
    }
}

// Runs a pass, draws the next token of each request that is read to its end, publishes full pages, and calls
// show(request) for each that ends. If logits are not finite, or guesses fail, only that request ends, with the error.
template <class Show>
void run_pass(Engine &engine, Schedule &schedule, const std::vector<Piece> &pass, bool ignore_end, Show show) {
    Cache &cache = schedule.cache;
    const double start = now();
    bool decodes = true;  // no prompt is read
    std::vector<Text> texts;
    std::vector<Guesses> guesses(pass.size());
    std::vector<size_t> sizes;  // (piece): tokens of its request before the pass
    for (const Piece &piece : pass) {
        Request &request = *piece.request;
        Guesses &own = guesses[texts.size()];
        blamed(request, [&] {
            own = propose(schedule.drafter, request.sequence, request.tokens, request.sampler, piece.guesses);
        });
        const auto next = request.tokens.begin() + cache.lengths[request.sequence], end = next + piece.count;
        texts.push_back({request.sequence, {next, end}, own.tokens, end == request.tokens.end()});
        sizes.push_back(request.tokens.size());
        decodes &= piece.count == 1;
    }
    PassLog log{0, 0, 0, {}, false, 0, now() - start};
    auto take = [&](int i, const std::vector<float> &logits) {
        Request &request = *pass[i].request;
        if (request.error.empty()) blamed(request, [&] {
            require_finite(logits, (int)request.tokens.size() - 1, &cache);
            if (schedule.checks) request.bits = checksum(request.bits, logits);
            take_token(request, engine.model.config, ignore_end, logits);
        });
        return request.stop.empty() ? request.tokens.back() : -1;
    };
    step(engine, cache, texts, take, /*grown=*/[&] {
        schedule.bytes = bytes_of(cache).total();
        if (const PagePool *pool = scarce_pool(cache)) schedule.held = pool->used();
    });
    // A GPU decodes with other instructions than it prefills with: there only pages of prompts are published.
    const bool alike = std::holds_alternative<Cpu>(*engine.machine);
    for (size_t i = 0; i < pass.size(); i++) {
        Request &request = *pass[i].request;
        if (texts[i].is_read) {
            // Its prompt is published now, so one that waits with the same prompt may need few pages. Not if
            // optimistic: preempted requests would be tried again too soon.
            if ((int)sizes[i] == request.prompt) schedule.changed |= !schedule.optimistic;
            log.guesses.insert(log.guesses.end(), guesses[i].tokens.begin(), guesses[i].tokens.end());
            log.right += count_right(guesses[i], request.tokens, sizes[i]);
            log.tokens += (int)(request.tokens.size() - sizes[i]), log.paused |= guesses[i].paused;
        }
        const int length = cache.lengths[request.sequence];
        if (request.error.empty())
            publish(cache, request.sequence, request.tokens, alike ? length : std::min(length, request.prompt));
        if (request.stop.empty()) continue;
        schedule.tell("end", request);
        leave(schedule, request);
        show(request);
    }
    if (decodes) log.seconds = now() - start;
    schedule.drafter.add(log);
}
