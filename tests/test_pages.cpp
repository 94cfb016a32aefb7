// Who holds which page (pages.h): whole numbers alone, no bytes and no model.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <cstdlib>
#include <ctime>

#include "check_pages.h"
#include "reference.h"

using Tokens = std::vector<int>;

// ---- A random walk against a plain memory ------------------------------------------------------------------------

// A memory of labels in place of the rows: position t of a sequence holds a label of its salt and its tokens 0 .. t.
// Whatever a sequence sees must read as if it had been computed alone, and by one of its own salt.
struct Walk {
    reference::Random random;
    int page, step;
    Pages pages;
    std::vector<std::vector<uint64_t>> memory;  // (kind): (page, position in it)
    std::map<int, Tokens> live;                 // by sequence: what its positions hold
    std::map<int, int> salt;                    // by sequence
    int sequences = 8, found = 0, copies = 0, refused = 0, forks = 0, evicted = 0;

    explicit Walk(uint64_t seed) : random{seed}, page(1 + below(6)), step(below(2) ? 1 : 2) {
        std::vector<PagePool> pools;
        for (int count = 1 + below(3), kind = 0; kind < count; kind++) {
            const int window = kind == 0 && below(4) ? 0 : below(3) ? 1 + below(60) : 0, size = 30 + below(60);
            pools.push_back(open_pages(sequences, 200, page, size, window));
            memory.emplace_back(size * page);
        }
        pages.open(sequences, pools, step);
    }
    int below(int end) { return (int)(random.bits() % (uint64_t)end); }
    static uint64_t label(int salt, const Tokens &tokens, int t) {
        uint64_t hash = 1 + (uint64_t)salt;
        for (int i = 0; i <= t; i++) hash = hash * 6364136223846793005 + (uint64_t)tokens[i] + 1;
        return hash | 1;
    }
    void carry_out() {
        for (const PageEvent &event : pages.events) {
            auto rows = memory[event.kind].begin();
            auto to = rows + event.page * page;
            if (event.what == PageEvent::freed || event.what == PageEvent::evicted) std::fill(to, to + page, 0);
            if (event.what == PageEvent::copied) {
                std::copy(rows + event.from * page, rows + event.from * page + event.count, to);
                copies++;
                REQUIRE(event.count < page);
            }
            evicted += event.what == PageEvent::evicted;
        }
        pages.events.clear();
    }
    // As a pass would: room, rows, and then they can be found. False where there is no room.
    bool append(int sequence, const Tokens &tokens) {
        Tokens &known = live[sequence];
        const int from = (int)known.size(), to = from + (int)tokens.size();
        for (int kind = 0; kind < (int)pages.pools.size(); kind++)
            if (pages.needed(kind, sequence, from, to) > pages.pools[kind].available()) return refused++, false;
        pages.grow(sequence, from, to);
        carry_out();
        known.insert(known.end(), tokens.begin(), tokens.end());
        for (size_t kind = 0; kind < memory.size(); kind++)
            for (int t = from; t < to; t++)
                memory[kind][pages.pools[kind].entry(sequence, t / page) * page + t % page] =
                    label(salt[sequence], known, t);
        pages.publish(sequence, known, to);
        carry_out();
        return true;
    }
    void end(int sequence) {
        pages.shrink(sequence, (int)live[sequence].size(), 0);
        carry_out();
        live.erase(sequence);
    }
    int unused() const {
        int sequence = 0;
        while (live.count(sequence)) sequence++;
        return sequence;
    }
    // Where a window has left pages that would be seen again, a sequence cannot go back.
    bool can_go_back(int sequence, int length) {
        for (const PagePool &pool : pages.pools)
            if (length && pool.first[sequence] > pool.first_seen(length)) return false;
        return true;
    }
    void verify() {
        const std::string wrong = check(pages);
        REQUIRE_MESSAGE(wrong.empty(), wrong);
        for (auto &[sequence, tokens] : live)
            for (size_t kind = 0; kind < memory.size(); kind++) {
                const PagePool &pool = pages.pools[kind];
                const int length = (int)tokens.size();
                bool right = true;
                for (int t = pool.window ? std::max(0, length - pool.window + 1) : 0; t < length; t++) {
                    const int held = pool.entry(sequence, t / page);
                    right =
                        right && held >= 0 && memory[kind][held * page + t % page] == label(salt[sequence], tokens, t);
                }
                REQUIRE(right);
            }
    }
    void one_step() {
        const int what = below(10);
        const int sequence = live.empty() ? -1 : std::next(live.begin(), below((int)live.size()))->first;
        if ((what < 3 || sequence < 0) && (int)live.size() < sequences) {  // few tokens, so that many begin alike
            const int begun = unused();
            Tokens tokens(1 + below(40));
            for (size_t t = 0; t < tokens.size(); t++) tokens[t] = t < 16 && below(8) ? (int)t % 3 : below(2);
            salt[begun] = below(3) / 2;
            const int known = pages.find(begun, tokens, salt[begun] ? "b" : "");
            carry_out();
            REQUIRE((known >= 0 && known < (int)tokens.size()));
            REQUIRE((known % page == 0 || known % page % step == 0));
            found += known;
            live[begun] = {tokens.begin(), tokens.begin() + known};
            verify();
            for (int done = known, count; done < (int)tokens.size(); done += count) {
                count = std::min((int)tokens.size() - done, 1 + below(9));
                if (!append(begun, {tokens.begin() + done, tokens.begin() + done + count})) break;
            }
        } else if (what < 7) {
            if (!append(sequence, {below(2)})) end(sequence);
        } else if (what == 7) {
            const int length = below((int)live[sequence].size() + 1);
            if (!can_go_back(sequence, length)) return;
            pages.shrink(sequence, (int)live[sequence].size(), length);
            carry_out();
            live[sequence].resize(length);
            if (length == 0) live.erase(sequence);
        } else if (what == 8 && (int)live.size() < sequences) {
            const int to = unused();
            pages.fork(sequence, to, (int)live[sequence].size());
            carry_out();
            live[to] = live[sequence], salt[to] = salt[sequence], forks++;
        } else {
            end(sequence);
        }
        verify();
    }
};

TEST_CASE("whatever a sequence sees reads as if it had been computed alone, and no page is lost") {
    const uint64_t seed = getenv("SEED") ? strtoull(getenv("SEED"), nullptr, 0) : (uint64_t)time(nullptr);
    CAPTURE(seed);
    int found = 0, copies = 0, forks = 0, refused = 0, evicted = 0;
    for (int round = 0; round < 60; round++) {
        CAPTURE(round);
        Walk walk(seed + (uint64_t)round * 1000003);
        for (int i = 0; i < 400; i++) walk.one_step();
        while (!walk.live.empty()) walk.end(walk.live.begin()->first), walk.verify();
        for (const PagePool &pool : walk.pages.pools) CHECK(pool.used() == 0);
        found += walk.found, copies += walk.copies, forks += walk.forks, refused += walk.refused;
        evicted += walk.evicted;
    }
    CHECK((found > 10000 && copies > 500 && forks > 500 && refused > 100 && evicted > 1000));
}

// ---- What broke elsewhere ------------------------------------------------------------------------------------------

// Pages of 4 of one kind of layers, without a cache: what a test says is stored there.
struct Scene {
    Pages pages;
    std::vector<int> lengths;
    Scene(int count, int sequences = 4) : lengths(sequences) {
        pages.open(sequences, {open_pages(sequences, 100, 4, count)});
    }
    PagePool &pool() { return pages.pools[0]; }
    int find(int sequence, const Tokens &tokens, const std::string &salt = "") {
        return lengths[sequence] = pages.find(sequence, tokens, salt);
    }
    bool grow(int sequence, int length) {
        if (pages.needed(0, sequence, lengths[sequence], length) > pool().available()) return false;
        pages.grow(sequence, lengths[sequence], length);
        lengths[sequence] = length;
        return true;
    }
    bool compute(int sequence, const Tokens &tokens) {
        if (!grow(sequence, (int)tokens.size())) return false;
        pages.publish(sequence, tokens, (int)tokens.size());
        return true;
    }
    void end(int sequence, int length = 0) {
        pages.shrink(sequence, lengths[sequence], length);
        lengths[sequence] = length;
    }
    int count(PageEvent::What what) const {
        return (int)std::count_if(pages.events.begin(), pages.events.end(),
                                  [&](const PageEvent &event) { return event.what == what; });
    }
};

Tokens counted(int count, int first = 0) {
    Tokens tokens(count);
    for (int i = 0; i < count; i++) tokens[i] = first + i;
    return tokens;
}

TEST_CASE("tokens are compared, not hashed: no page is taken for another (vLLM 12621)") {
    // All pages of four tokens 0 or 1 after the same page, and every pair in another order: each is found as itself.
    Scene scene(40, 40);
    for (int i = 0; i < 16; i++) REQUIRE(scene.compute(i, {7, 7, 7, 7, i >> 3 & 1, i >> 2 & 1, i >> 1 & 1, i & 1}));
    CHECK(scene.pool().used() == 17);  // the first page is one
    for (int i = 0; i < 16; i++) {
        CHECK(scene.find(20 + i, {7, 7, 7, 7, i >> 3 & 1, i >> 2 & 1, i >> 1 & 1, i & 1, 5}) == 8);
        CHECK(scene.pool().entry(20 + i, 1) == scene.pool().entry(i, 1));
    }
}

TEST_CASE("a sequence that was cut is not found under its old tokens (nano-vllm 163, vLLM 52806)") {
    for (int cut : {4, 5, 7, 8}) {
        CAPTURE(cut);
        Scene scene(20);
        Tokens old = counted(12), other = counted(cut);
        REQUIRE(scene.compute(0, old));
        scene.end(0, cut);
        for (int i = 0; i < 8; i++) other.push_back(100 + i);
        REQUIRE(scene.compute(0, other));
        CHECK(check(scene.pages).empty());
        old.push_back(0), other.push_back(0);
        const int same = scene.find(1, other), page = scene.pool().entry(0, cut / 4);
        CHECK(same / 4 == (cut + 8) / 4);
        CHECK(scene.pool().entry(1, cut / 4) == page);
        const int known = scene.find(2, old);  // what is cached of it, or only what both share
        for (int i = cut / 4; i < pages_for(known, 4); i++) CHECK(scene.pool().entry(2, i) != page);
        CHECK(check(scene.pages).empty());
    }
}

TEST_CASE("who has another salt finds nothing: no page, no part of one, not by a fork and not by a place used before") {
    Scene scene(40, 8);
    auto compute = [&](int sequence, const std::string &salt) {
        const int known = scene.find(sequence, counted(10), salt);
        REQUIRE(scene.compute(sequence, counted(10)));
        return known;
    };
    CHECK(compute(0, "") == 0);
    CHECK(compute(1, "a") == 0);
    CHECK(compute(2, "b") == 0);
    CHECK(scene.pool().used() == 9);
    scene.pages.fork(1, 3, 10), scene.lengths[3] = 10;  // it goes on under the same salt
    Tokens longer = counted(16);
    REQUIRE(scene.compute(3, longer));
    for (const auto &[salt, known] : std::map<std::string, int>{{"", 8}, {"a", 15}, {"b", 8}, {"ab", 0}, {"c", 0}}) {
        CHECK(scene.find(4, longer, salt) == known);
        CHECK((int)scene.pages.known_pages(longer, salt).size() == known / 4);
        CHECK(check(scene.pages).empty());
        scene.end(4);
    }
    scene.end(2);  // its place is taken by one without a salt, which looks for nothing first
    REQUIRE(scene.compute(2, counted(8, 50)));
    CHECK(scene.find(4, counted(9, 50)) == 8);
    scene.end(4);
    CHECK(scene.find(4, counted(9, 50), "b") == 0);
    CHECK(check(scene.pages).empty());
}

TEST_CASE("what is not computed yet is not found (vLLM 49377)") {
    Scene scene(20);
    REQUIRE(scene.grow(0, 12));
    CHECK(scene.find(1, counted(12)) == 0);
    scene.end(1);
    scene.pages.publish(0, counted(12), 7);  // a pass has read 7 of them: one full page
    CHECK(scene.find(1, counted(12)) == 4);
}

TEST_CASE("a page that stands in a table is not free, whoever else gives it back (mini-sglang 142)") {
    Scene scene(6);
    REQUIRE(scene.compute(0, counted(12)));
    REQUIRE(scene.find(1, counted(12)) == 11);  // two pages, and three positions of the third copied
    scene.end(0);
    REQUIRE(scene.grow(2, 12));
    CHECK(!scene.grow(2, 16));  // the two that sequence 1 holds are not to be had
    CHECK(check(scene.pages).empty());
    CHECK(scene.find(3, counted(9)) == 8);
}

TEST_CASE("of a prompt that is known as a whole the last token is computed (nano-vllm 144)") {
    for (int length : {1, 4, 5, 8, 9}) {
        Scene scene(20);
        REQUIRE(scene.compute(0, counted(length)));
        CHECK(scene.find(1, counted(length)) == (length - 1) / 4 * 4 + (length % 4 == 0 ? 3 : 0));
        CHECK(check(scene.pages).empty());
    }
}

TEST_CASE("a copy does not evict what it was to copy, nor a page that was just found (vLLM 42948)") {
    Scene scene(3);
    REQUIRE(scene.compute(0, counted(12)));
    scene.end(0);
    CHECK(scene.find(0, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 100}) == 8);  // no page is left for a copy of half the third
    CHECK((scene.pool().entry(0, 0) == 0 && scene.pool().entry(0, 1) == 1));
    REQUIRE(scene.grow(0, 11));
    CHECK(scene.count(PageEvent::evicted) == 1);
    CHECK(check(scene.pages).empty());
}

TEST_CASE("least recently used is forgotten first, and a tail before its head") {
    Scene scene(6);
    REQUIRE(scene.compute(0, counted(12, 100)));
    REQUIRE(scene.compute(1, counted(12, 200)));
    scene.end(1), scene.end(0);
    REQUIRE(scene.find(1, counted(13, 200)) == 12);  // used again
    scene.end(1);
    REQUIRE(scene.grow(2, 8));
    CHECK(scene.find(0, counted(13, 100)) == 4);
    CHECK(scene.find(1, counted(13, 200)) == 12);
}

TEST_CASE("a forked sequence writes into a copy; the last that holds a page writes in place") {
    Scene scene(8);
    REQUIRE(scene.grow(0, 6));
    scene.pages.fork(0, 1, 6), scene.lengths[1] = 6;
    CHECK(scene.pool().used() == 2);
    scene.pages.events.clear();
    REQUIRE(scene.grow(1, 7));
    REQUIRE(scene.grow(0, 7));
    CHECK(scene.count(PageEvent::copied) == 1);
    CHECK((scene.pool().used() == 3 && scene.pool().entry(0, 0) == scene.pool().entry(1, 0)));
    CHECK(check(scene.pages).empty());
}

TEST_CASE("check() tells each kind of fault (mini-sglang 149)") {
    auto told = [](auto fault) {
        Scene scene(8);
        REQUIRE(scene.compute(0, counted(8)));
        REQUIRE(scene.compute(1, counted(8, 50)));
        scene.end(1);
        REQUIRE(check(scene.pages).empty());
        fault(scene.pool());
        const std::string wrong = check(scene.pages);
        return wrong;
    };
    CHECK(told([](PagePool &pool) { pool.references[0]++; }) == "references are not the occurrences in tables");
    CHECK(told([](PagePool &pool) { pool.entry(0, 1) = -1; }) == "references are not the occurrences in tables");
    CHECK(told([](PagePool &pool) { pool.entry(2, 0) = 0; }) == "references are not the occurrences in tables");
    CHECK(told([](PagePool &pool) { pool.free.push_back(0); }) == "a free page is not in its list once");
    CHECK(told([](PagePool &pool) { pool.free.pop_back(); }) == "a free page is not in its list once");
    CHECK(told([](PagePool &pool) { pool.free.push_back(pool.free[0]); }) == "a free page is not in its list once");
    CHECK(told([](PagePool &pool) { pool.cached.clear(); }) == "a cached page is not in its list once");
    CHECK(told([](PagePool &pool) { pool.left[2] += 9; }) == "a cached page is not in its list once");
    CHECK(told([](PagePool &pool) { std::swap(pool.node[0], pool.node[1]); }) ==
          "a page is published where it does not stand");
    CHECK(told([](PagePool &pool) { pool.node[0] = nullptr; }) == "a node has a page that is published elsewhere");
}
