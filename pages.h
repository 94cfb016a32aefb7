// Which sequence holds which page: pages are handed out, shared, copied before a write, freed, found again.
//
// A paged cache is cut into pages of P positions. They are handed out as sequences grow, and a page table for each
// sequence says which ones it holds, in the order of its positions:
//   table 91 17 44 203, P = 16: positions 0 .. 15 are in page 91, positions 32 .. 47 in page 44
// The rows of a page are a function of the tokens up to its end. So a full page can be published under these tokens,
// and a sequence that begins with them holds the same page instead of computing it again. Published pages are a trie
// (Zheng et al. 2024, SGLang's RadixAttention): the key of a node is its parent and the tokens of one page.
//
//   pages of 4, after "the cat sat on the mat" and "the cat ran":    root -- the cat sat on -- the mat ..
//                                                                         \- the cat ran ..
// A salt (of a tenant, an adapter, an image) is a part of the key. Texts with different salts share no page, so none
// can tell by its own speed what another one has read.
// A page is in one of three states:
//   held     in the tables of n sequences, published or not. One that writes into a shared page gets a copy first
//   cached   in no table, but published: can be found until it is evicted, least recently used first
//   free     in no table, and not published
// When the last sequence lets a page go (let_go), the page becomes cached or free. Each kind of layers has its own
// pool, and pages before its window are given back. Pages are numbers here: cache.h has their bytes, and carries out
// what is decided here. So this file needs neither memory nor a model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

inline int pages_for(int positions, int page) { return (int)(((int64_t)positions + page - 1) / page); }

// A published page in the trie.
struct Node {
    struct Key {
        Node *before;  // parent: the page before, or nullptr
        std::string salt;
        std::vector<int> tokens;  // of this page
        bool operator<(const Key &other) const {
            return std::tie(before, salt, tokens) < std::tie(other.before, other.salt, other.tokens);
        }
    };
    const Key *key = nullptr;
    std::vector<int> page = {};  // (kind): the page, or -1
    int uses = 0;                // reference count: published pages + child nodes + sequences whose path has it
};

// The pages of one kind of layers.
struct PagePool {
    int page = 16;   // P: positions of a page
    int window = 0;  // positions that these layers look back; 0: all
    int64_t pages_per_sequence = 0;
    std::vector<int> table;                     // (sequence, pages_per_sequence): the page, or -1 where none is held
    std::vector<int> first;                     // (sequence): its first logical page; those before it were given back
    std::vector<int> references;                // (page): sequences whose table holds it
    std::vector<Node *> node;                   // (page): where it is published, or nullptr
    std::vector<uint64_t> left;                 // (page): clock when the last sequence let it go
    std::vector<int> free;                      // the last one is handed out next
    std::set<std::pair<uint64_t, int>> cached;  // (left, page), oldest first

    int available() const { return (int)(free.size() + cached.size()); }
    int used() const { return (int)references.size() - available(); }
    // Pages that a sequence takes if it grows from one length to another, or gives back if it is cut.
    int between(int shorter, int longer) const { return pages_for(longer, page) - pages_for(shorter, page); }
    int &entry(int sequence, int logical) { return table[sequence * pages_per_sequence + logical]; }
    int entry(int sequence, int logical) const { return table[sequence * pages_per_sequence + logical]; }
    // First logical page that the query at position `length` can see, rounded down to 32 positions because int4 and
    // int2 store 32 together.
    int first_seen(int length) const { return window ? std::max(0, length - window + 1) / 32 * 32 / page : 0; }
};

// Returns a pool of free pages; page 0 is handed out first.
inline PagePool open_pages(int sequences, int64_t pages_per_sequence, int page, int pages, int window = 0) {
    PagePool pool;
    pool.page = page, pool.window = window, pool.pages_per_sequence = pages_per_sequence;
    pool.table.assign(sequences * pages_per_sequence, -1);
    pool.first.assign(sequences, 0);
    pool.references.assign(pages, 0), pool.node.assign(pages, nullptr), pool.left.assign(pages, 0);
    for (int i = pages - 1; i >= 0; i--) pool.free.push_back(i);
    return pool;
}

// What happened to a page. The cache carries out the copies; other events are for those who print or draw them.
struct PageEvent {
    enum What { taken, shared, copied, published, released, freed, evicted } what;
    int kind, page, sequence = -1;
    int from = -1, count = 0;  // copied: the first `count` positions of page `from`
};

class Pages {
public:
    std::vector<PagePool> pools;    // (kind), of pages of one size
    std::vector<PageEvent> events;  // in order; the cache carries them out and clears the list
    // Keys are tokens, not hashes: no page is taken for another. Among the children of a node, neighbours begin alike.
    std::map<Node::Key, Node> trie;
    std::vector<std::vector<Node *>> paths;  // (sequence): its published pages, from the first on
    std::vector<std::string> salts;          // (sequence)

    // A partial match is copied in multiples of copy_step positions (32 for int4 and int2, else 1).
    void open(int sequences, std::vector<PagePool> opened, int copy_step = 1) {
        pools = std::move(opened), copy_step_ = copy_step;
        paths.assign(sequences, {}), salts.assign(sequences, ""), trie.clear();
    }

    // Returns the published pages with the first tokens of a text, from the first on. The last token is not looked for:
    // its logits must be computed.
    std::vector<Node *> known_pages(const std::vector<int> &tokens, const std::string &salt) {
        std::vector<Node *> path;
        const int page = pools[0].page, most = std::max(0, (int)tokens.size() - 1);
        for (int end = page; end <= most; end += page) {
            auto next = trie.find({last_of(path), salt, {tokens.begin() + end - page, tokens.begin() + end}});
            if (next == trie.end()) break;
            path.push_back(&next->second);
        }
        while (!all_there(path)) path.pop_back();
        return path;
    }

    // Prefix hit: an empty sequence gets the pages of its known first tokens. Returns how many tokens these are.
    int find(int sequence, const std::vector<int> &tokens, const std::string &salt = "") {
        const std::vector<Node *> &path = paths[sequence] = known_pages(tokens, salt);
        salts[sequence] = salt;
        const int page = pools[0].page, most = std::max(0, (int)tokens.size() - 1);
        const int logical = (int)path.size(), length = logical * page;
        for (Node *node : path) node->uses++;
        for (int kind = 0; kind < kinds(); kind++) {
            const int first = pools[kind].first[sequence] = pools[kind].first_seen(length);
            for (int i = first; i < logical; i++) hold(kind, sequence, i, path[i]->page[kind]);
        }
        const auto begin = tokens.begin() + length;
        return length + find_part(sequence, logical, {begin, begin + std::min(most - length, page)});
    }

    // Pages that a sequence needs to grow: new ones, and one for a copy of its last page if others hold that, too.
    int needed(int kind, int sequence, int from, int to) const {
        const PagePool &pool = pools[kind];
        const bool goes_on = to > from && from % pool.page;
        return pool.between(from, to) + (goes_on && pool.references[pool.entry(sequence, from / pool.page)] > 1);
    }

    // Makes room for positions [from, to) and gives back pages before a window. The caller has checked needed().
    void grow(int sequence, int from, int to) {
        for (int kind = 0; kind < kinds(); kind++) {
            PagePool &pool = pools[kind];
            const int seen = std::max(pool.first[sequence], pool.first_seen(from));
            release(kind, sequence, std::exchange(pool.first[sequence], seen), seen);
            if (to > from && from % pool.page) {  // it goes on in a page that it has
                const int logical = from / pool.page, held = pool.entry(sequence, logical);
                pool.references[held] > 1 ? copy(kind, sequence, logical, from % pool.page) : unpublish(kind, held);
            }
            for (int i = pages_for(from, pool.page); i < pages_for(to, pool.page); i++) take(kind, sequence, i);
        }
    }

    // Publishes the full pages of a sequence, so that others find them. Call it after the pass that filled them. If a
    // page with the same tokens is known, the sequence holds that one and gives its own back.
    void publish(int sequence, const std::vector<int> &tokens, int length) {
        std::vector<Node *> &path = paths[sequence];
        const int page = pools[0].page;
        for (int i = (int)path.size(); (i + 1) * page <= length; i++) {
            const auto begin = tokens.begin() + i * page;
            auto [place, is_new] = trie.try_emplace({last_of(path), salts[sequence], {begin, begin + page}});
            Node &node = place->second;
            if (is_new) node = {&place->first, std::vector<int>(pools.size(), -1)};
            if (is_new && i > 0) path.back()->uses++;
            path.push_back(&node), node.uses++;
            for (int kind = 0; kind < kinds(); kind++) {
                const int mine = pools[kind].entry(sequence, i);
                int &known = node.page[kind];
                if (mine == -1) continue;  // given back: it was before the window
                if (known == -1) {
                    known = mine, pools[kind].node[mine] = &node, node.uses++;
                    events.push_back({PageEvent::published, kind, mine, sequence});
                } else if (known != mine) {
                    release(kind, sequence, i, i + 1), hold(kind, sequence, i, known);
                }
            }
        }
    }

    // An empty sequence `to` shares all pages of sequence `from`.
    void fork(int from, int to, int length) {
        for (int kind = 0; kind < kinds(); kind++) {
            PagePool &pool = pools[kind];
            pool.first[to] = pool.first[from];
            for (int i = pool.first[to]; i < pages_for(length, pool.page); i++) hold(kind, to, i, pool.entry(from, i));
        }
        paths[to] = paths[from], salts[to] = salts[from];
        for (Node *node : paths[to]) node->uses++;
    }

    // Cuts a sequence from `from` positions to `length` and gives back the other pages, the last one first: it is
    // evicted first, and free pages are handed out again in the order of positions.
    void shrink(int sequence, int from, int length) {
        for (int kind = 0; kind < kinds(); kind++) {
            PagePool &pool = pools[kind];
            const int begin = std::max(pages_for(length, pool.page), pool.first[sequence]);
            release(kind, sequence, begin, pages_for(from, pool.page));
            if (length == 0) pool.first[sequence] = 0;
        }
        std::vector<Node *> &path = paths[sequence];
        for (; (int)path.size() > length / pools[0].page; path.pop_back()) drop(path.back());
        if (length == 0) salts[sequence].clear();
    }

private:
    uint64_t clock_ = 0;
    int copy_step_ = 1;

    int kinds() const { return (int)pools.size(); }

    static Node *last_of(const std::vector<Node *> &path) { return path.empty() ? nullptr : path.back(); }

    // Whether each kind has all pages that the query after a path sees.
    bool all_there(const std::vector<Node *> &path) const {
        const int logical = (int)path.size();
        for (int kind = 0; kind < kinds(); kind++)
            for (int i = pools[kind].first_seen(logical * pools[kind].page); i < logical; i++)
                if (path[i]->page[kind] == -1) return false;
        return true;
    }

    // Copies from the known page that shares most first tokens with `tokens`. Returns how many positions it copied.
    int find_part(int sequence, int logical, const std::vector<int> &tokens) {
        Node *const before = last_of(paths[sequence]), *best = nullptr;
        int most = 0;
        auto next = trie.lower_bound({before, salts[sequence], tokens});
        for (auto place : {next, next == trie.begin() ? trie.end() : std::prev(next)}) {
            if (place == trie.end() || place->first.before != before || place->first.salt != salts[sequence]) continue;
            const std::vector<int> &there = place->first.tokens;
            auto differs = std::mismatch(tokens.begin(), tokens.end(), there.begin(), there.end()).first;
            const int same = (int)(differs - tokens.begin()) / copy_step_ * copy_step_;
            bool possible = same > most;
            for (int kind = 0; kind < kinds(); kind++)
                possible &= place->second.page[kind] >= 0 && pools[kind].available() > 1;
            if (possible) best = &place->second, most = same;
        }
        for (int kind = 0; best && kind < kinds(); kind++) {
            hold(kind, sequence, logical, best->page[kind]);  // so that take() does not evict it for the copy
            copy(kind, sequence, logical, most);
        }
        return most;
    }

    // hold() puts an existing page into a table, take() a free one or the least recently used cached one.
    void hold(int kind, int sequence, int logical, int page) {
        PagePool &pool = pools[kind];
        if (pool.references[page]++ == 0) pool.cached.erase({pool.left[page], page});
        pool.entry(sequence, logical) = page;
        events.push_back({PageEvent::shared, kind, page, sequence});
    }
    void take(int kind, int sequence, int logical) {
        PagePool &pool = pools[kind];
        if (pool.free.empty()) unpublish(kind, pool.cached.begin()->second);
        const int page = pool.entry(sequence, logical) = pool.free.back();
        pool.free.pop_back();
        pool.references[page] = 1;
        events.push_back({PageEvent::taken, kind, page, sequence});
    }
    // Replaces a page by one of the sequence's own, with a copy of the first `count` positions.
    void copy(int kind, int sequence, int logical, int count) {
        const int from = pools[kind].entry(sequence, logical);
        take(kind, sequence, logical);
        events.push_back({PageEvent::copied, kind, pools[kind].entry(sequence, logical), sequence, from, count});
        let_go(kind, sequence, from);
    }
    void release(int kind, int sequence, int begin, int end) {
        for (int i = end - 1; i >= begin; i--)
            let_go(kind, sequence, std::exchange(pools[kind].entry(sequence, i), -1));
    }
    void let_go(int kind, int sequence, int page) {
        PagePool &pool = pools[kind];
        events.push_back({PageEvent::released, kind, page, sequence});
        if (--pool.references[page] > 0) return;
        pool.left[page] = clock_++;
        if (pool.node[page])
            pool.cached.insert({pool.left[page], page});
        else
            pool.free.push_back(page), events.push_back({PageEvent::freed, kind, page});
    }
    // Takes a page out of the trie. If it was cached, it is free now.
    void unpublish(int kind, int page) {
        PagePool &pool = pools[kind];
        Node *node = std::exchange(pool.node[page], nullptr);
        if (!node) return;
        if (pool.references[page] == 0) {
            pool.cached.erase({pool.left[page], page});
            pool.free.push_back(page);
            events.push_back({PageEvent::evicted, kind, page});
        }
        node->page[kind] = -1;
        drop(node);
    }

    // Takes one use from a node. Without uses it is erased, and its parent has one use less.
    void drop(Node *node) {
        while (node && --node->uses == 0) {
            const auto place = trie.find(*node->key);
            node = node->key->before;
            trie.erase(place);
        }
    }
};
