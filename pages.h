// Who holds which page: handed out, shared, copied before it is written, forgotten, found again.
//
// A paged cache is cut into pages of P positions. They are handed out as sequences grow, and a page table for each
// sequence says which ones it holds, in the order of its positions:
//   table 91 17 44 203, P = 16: positions 0 .. 15 are in page 91, positions 32 .. 47 in page 44
// What a page holds follows from the tokens up to its end, and from nothing else. So a full page can be published under
// them, and a sequence that begins with the same tokens holds the same page instead of computing it anew. Published
// pages are a trie (Zheng et al. 2024, SGLang's RadixAttention): a node is its parent and the tokens of one page.
//
//   pages of 4, after "the cat sat on the mat" and "the cat ran":    root -- the cat sat on -- the mat ..
//                                                                         \- the cat ran ..
// A page is in one of three states:
//   held     by n tables; it may be published or not. Who writes into a page that others hold gets a copy first
//   cached   by no table, but published: found again until it is handed out anew, least recently used first
//   free     by no table, and not published
// Layers of different kinds have pools of their own; those that look back over a window give pages back behind it.
// Pages are whole numbers here. What is in them, and where, is the cache's own (cache.h), which carries out what is
// decided here; so whoever decides about pages needs no memory for them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

inline int pages_for(int positions, int page) { return (int)(((int64_t)positions + page - 1) / page); }

// The pages of one kind of layers.
struct PagePool {
    int page = 16;   // P: positions of a page
    int window = 0;  // positions that these layers look back; 0: all
    int64_t pages_per_sequence = 0;
    std::vector<int> table;                     // (sequence, pages_per_sequence): the page, or -1 where none is held
    std::vector<int> first;                     // (sequence): its first logical page; those before it were given back
    std::vector<int> references;                // (page): sequences whose table holds it
    std::vector<int> node;                      // (page): where it is published, or -1
    std::vector<uint64_t> left;                 // (page): when its last holder went
    std::vector<int> free;                      // the last one is handed out next
    std::set<std::pair<uint64_t, int>> cached;  // left, page

    int available() const { return (int)(free.size() + cached.size()); }
    int used() const { return (int)references.size() - available(); }
    // Pages that a sequence takes, or gives back, from one length to another.
    int between(int shorter, int longer) const { return pages_for(longer, page) - pages_for(shorter, page); }
    int &entry(int sequence, int logical) { return table[sequence * pages_per_sequence + logical]; }
    int entry(int sequence, int logical) const { return table[sequence * pages_per_sequence + logical]; }
    // The first logical page that the query behind `length` positions sees; of 32 positions it sees all or none, as
    // some precisions store them together.
    int first_seen(int length) const { return window ? std::max(0, length - window + 1) / 32 * 32 / page : 0; }
};

// All are free; page 0 is handed out first.
inline PagePool open_pages(int sequences, int64_t pages_per_sequence, int page, int pages, int window = 0) {
    PagePool pool;
    pool.page = page, pool.window = window, pool.pages_per_sequence = pages_per_sequence;
    pool.table.assign(sequences * pages_per_sequence, -1);
    pool.first.assign(sequences, 0);
    pool.references.assign(pages, 0), pool.node.assign(pages, -1), pool.left.assign(pages, 0);
    for (int i = pages - 1; i >= 0; i--) pool.free.push_back(i);
    return pool;
}

// What happened to a page, in order. The cache carries out the copies; all of it can be told and drawn.
struct PageEvent {
    enum What { taken, shared, copied, published, released, freed, evicted } what;
    int kind, page, sequence = -1;
    int from = -1, count = 0;  // copied: the first `count` positions of page `from`
};

class Pages {
public:
    std::vector<PagePool> pools;    // (kind), of pages of one size
    std::vector<PageEvent> events;  // since somebody emptied the list

    // copy_step: of a page that matches in part, so many positions are copied, or twice as many, and so on.
    void open(int sequences, std::vector<PagePool> opened, int copy_step = 1) {
        pools = std::move(opened), copy_step_ = copy_step;
        paths_.assign(sequences, {0});
        nodes_.assign(1, Node{-1, {}, std::vector<int>(pools.size(), -1)});
    }

    // How many of a new sequence's first tokens are known; it holds their pages from now on. At most all but one are,
    // as the last one's logits are wanted.
    int find(int sequence, const std::vector<int> &tokens) {
        std::vector<int> &path = paths_[sequence];
        const int page = pools[0].page, most = std::max(0, (int)tokens.size() - 1);
        for (int end = page; end <= most; end += page) {
            auto next = children_.find({path.back(), {tokens.begin() + end - page, tokens.begin() + end}});
            if (next == children_.end()) break;
            path.push_back(next->second);
        }
        while (!all_there(path)) path.pop_back();
        const int logical = (int)path.size() - 1, length = logical * page;
        for (int i = 1; i <= logical; i++) nodes_[path[i]].uses++;
        for (int kind = 0; kind < kinds(); kind++) {
            const int first = pools[kind].first[sequence] = pools[kind].first_seen(length);
            for (int i = first; i < logical; i++) hold(kind, sequence, i, nodes_[path[i + 1]].page[kind]);
        }
        const auto begin = tokens.begin() + length;
        return length + find_part(sequence, logical, {begin, begin + std::min(most - length, page)});
    }

    // Pages that a sequence needs to grow: new ones, and a copy of the one that it goes on in, if others hold that.
    int needed(int kind, int sequence, int from, int to) const {
        const PagePool &pool = pools[kind];
        const bool goes_on = to > from && from % pool.page;
        return pool.between(from, to) + (goes_on && pool.references[pool.entry(sequence, from / pool.page)] > 1);
    }

    // Room for the positions [from, to) of a sequence. There are as many pages as needed() says.
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

    // The full pages of a sequence can be found by others from now on: after the pass that filled them, never before.
    // Of two pages that hold the same one stays.
    void publish(int sequence, const std::vector<int> &tokens, int length) {
        std::vector<int> &path = paths_[sequence];
        const int page = pools[0].page;
        for (int i = (int)path.size() - 1; (i + 1) * page <= length; i++) {
            const Key key = {path[i], {tokens.begin() + i * page, tokens.begin() + (i + 1) * page}};
            auto [place, is_new] = children_.try_emplace(key, -1);
            if (is_new) place->second = new_node(key);
            const int node = place->second;
            path.push_back(node), nodes_[node].uses++;
            for (int kind = 0; kind < kinds(); kind++) {
                const int mine = pools[kind].entry(sequence, i);
                int &known = nodes_[node].page[kind];
                if (mine == -1) continue;  // a window has left it
                if (known == -1) {
                    known = mine, pools[kind].node[mine] = node, nodes_[node].uses++;
                    events.push_back({PageEvent::published, kind, mine, sequence});
                } else if (known != mine) {
                    release(kind, sequence, i, i + 1), hold(kind, sequence, i, known);
                }
            }
        }
    }

    // Sequence `to`, which is empty, gets all that sequence `from` has.
    void fork(int from, int to, int length) {
        for (int kind = 0; kind < kinds(); kind++) {
            PagePool &pool = pools[kind];
            pool.first[to] = pool.first[from];
            for (int i = pool.first[to]; i < pages_for(length, pool.page); i++) hold(kind, to, i, pool.entry(from, i));
        }
        paths_[to] = paths_[from];
        for (int node : paths_[to]) nodes_[node].uses += node > 0;
    }

    // Gives back what lies behind the first `length` positions, of `from`: the tail first, so that it is forgotten
    // first, and what is free is handed out again in the order of its positions.
    void shrink(int sequence, int from, int length) {
        for (int kind = 0; kind < kinds(); kind++) {
            PagePool &pool = pools[kind];
            const int begin = std::max(pages_for(length, pool.page), pool.first[sequence]);
            release(kind, sequence, begin, pages_for(from, pool.page));
            if (length == 0) pool.first[sequence] = 0;
        }
        std::vector<int> &path = paths_[sequence];
        for (; (int)path.size() > length / pools[0].page + 1; path.pop_back()) drop(path.back());
    }

    // What must be true at any time: the first thing that is not, or "".
    std::string check() const {
        for (int kind = 0; kind < kinds(); kind++) {
            const PagePool &pool = pools[kind];
            const int pages = (int)pool.references.size();
            std::vector<int> held(pages), free(pages), cached(pages);
            for (int page : pool.table)
                if (page >= 0) held[page]++;
            for (int page : pool.free) free[page]++;
            for (auto [left, page] : pool.cached) cached[page] += left == pool.left[page];
            for (int page = 0; page < pages; page++) {
                const int node = pool.node[page];
                if (pool.references[page] != held[page]) return "references are not the occurrences in tables";
                if (free[page] != (held[page] == 0 && node == -1)) return "a free page is not in its list once";
                if (cached[page] != (held[page] == 0 && node >= 0)) return "a cached page is not in its list once";
                if (node >= 0 && nodes_[node].page[kind] != page) return "a page is published where it does not stand";
            }
            for (size_t node = 0; node < nodes_.size(); node++)
                if (int page = nodes_[node].page[kind]; page >= 0 && pool.node[page] != (int)node)
                    return "a node has a page that is published elsewhere";
        }
        std::vector<int> uses(nodes_.size());
        for (const std::vector<int> &path : paths_)
            for (int node : path) uses[node] += node > 0;
        for (auto &[key, node] : children_) {
            if (nodes_[node].uses == 0) return "a node that nobody uses is known";
            uses[key.first]++;
            for (int page : nodes_[node].page) uses[node] += page >= 0;
        }
        for (size_t node = 0; node < nodes_.size(); node++)
            if (nodes_[node].uses != uses[node]) return "a node has lost count of its uses";
        if (children_.size() + unused_.size() + 1 != nodes_.size()) return "a node is neither known nor unused";
        return "";
    }

private:
    using Key = std::pair<int, std::vector<int>>;  // parent; the tokens of a page: compared, so nothing is mistaken
    struct Node {
        int parent;
        std::vector<int> tokens;
        std::vector<int> page;  // (kind), or -1
        int uses = 0;           // by pages, by nodes below, by paths of sequences
    };
    std::vector<Node> nodes_;
    std::vector<int> unused_;              // of nodes_
    std::map<Key, int> children_;          // in the order of tokens: those that begin alike are neighbours
    std::vector<std::vector<int>> paths_;  // (sequence): the nodes of its published pages, from the root on
    uint64_t clock_ = 0;
    int copy_step_ = 1;

    int kinds() const { return (int)pools.size(); }

    // Of each kind all pages that are seen from the end of a path.
    bool all_there(const std::vector<int> &path) const {
        const int logical = (int)path.size() - 1;
        for (int kind = 0; kind < kinds(); kind++)
            for (int i = pools[kind].first_seen(logical * pools[kind].page); i < logical; i++)
                if (nodes_[path[i + 1]].page[kind] == -1) return false;
        return true;
    }

    // The page that begins with most of `tokens`, at most one page of them, is copied as far as they are the same.
    int find_part(int sequence, int logical, const std::vector<int> &tokens) {
        const int parent = paths_[sequence].back();
        int best = -1, most = 0;
        auto next = children_.lower_bound({parent, tokens});
        for (auto place : {next, next == children_.begin() ? children_.end() : std::prev(next)}) {
            if (place == children_.end() || place->first.first != parent) continue;
            const std::vector<int> &there = place->first.second;
            auto differs = std::mismatch(tokens.begin(), tokens.end(), there.begin(), there.end()).first;
            const int same = (int)(differs - tokens.begin()) / copy_step_ * copy_step_;
            bool possible = same > most;
            for (int kind = 0; kind < kinds(); kind++)
                possible &= nodes_[place->second].page[kind] >= 0 && pools[kind].available() > 1;
            if (possible) best = place->second, most = same;
        }
        for (int kind = 0; best >= 0 && kind < kinds(); kind++) {
            hold(kind, sequence, logical, nodes_[best].page[kind]);  // so that it is not taken for its own copy
            copy(kind, sequence, logical, most);
        }
        return most;
    }

    // One page.
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
    // A page of the sequence's own with the first `count` positions of the one that it holds there.
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
        if (pool.node[page] >= 0)
            pool.cached.insert({pool.left[page], page});
        else
            pool.free.push_back(page), events.push_back({PageEvent::freed, kind, page});
    }
    // Nobody finds it any more.
    void unpublish(int kind, int page) {
        PagePool &pool = pools[kind];
        const int node = std::exchange(pool.node[page], -1);
        if (node == -1) return;
        if (pool.references[page] == 0) {
            pool.cached.erase({pool.left[page], page});
            pool.free.push_back(page);
            events.push_back({PageEvent::evicted, kind, page});
        }
        nodes_[node].page[kind] = -1;
        drop(node);
    }

    // One node.
    int new_node(const Key &key) {
        nodes_[key.first].uses++;
        Node node = {key.first, key.second, std::vector<int>(pools.size(), -1)};
        if (unused_.empty()) return nodes_.push_back(node), (int)nodes_.size() - 1;
        const int place = unused_.back();
        unused_.pop_back();
        return nodes_[place] = node, place;
    }
    // One use less. A node that has none is forgotten, and is no use of its parent any more. The root stays.
    void drop(int place) {
        while (--nodes_[place].uses == 0 && place > 0) {
            children_.erase({nodes_[place].parent, nodes_[place].tokens});
            unused_.push_back(place);
            place = nodes_[place].parent;
        }
    }
};
