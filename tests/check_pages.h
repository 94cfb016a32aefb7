// What must be true of pages (pages.h) at any time, and caches whose free pages nobody can read. For tests alone.
#pragma once

#include "../cache.h"

// The first thing that is not true, or "": each page is in exactly one of free, cached and tables, it has as many
// references as tables have it, and a node of the trie is there for as long as somebody uses it.
inline std::string check(const Pages &all) {
    for (size_t kind = 0; kind < all.pools.size(); kind++) {
        const PagePool &pool = all.pools[kind];
        const int pages = (int)pool.references.size();
        std::vector<int> held(pages), free(pages), cached(pages);
        for (int page : pool.table)
            if (page >= 0) held[page]++;
        for (int page : pool.free) free[page]++;
        for (auto [left, page] : pool.cached) cached[page] += left == pool.left[page];
        for (int page = 0; page < pages; page++) {
            const Node *node = pool.node[page];
            if (pool.references[page] != held[page]) return "references are not the occurrences in tables";
            if (free[page] != (held[page] == 0 && !node)) return "a free page is not in its list once";
            if (cached[page] != (held[page] == 0 && node)) return "a cached page is not in its list once";
            if (node && node->page[kind] != page) return "a page is published where it does not stand";
        }
        for (auto &[key, node] : all.trie)
            if (int page = node.page[kind]; page >= 0 && pool.node[page] != &node)
                return "a node has a page that is published elsewhere";
    }
    std::map<const Node *, int> uses;
    for (size_t sequence = 0; sequence < all.paths.size(); sequence++)
        for (const Node *node : all.paths[sequence]) {
            uses[node]++;
            if (node->key->salt != all.salts[sequence]) return "a sequence holds a page of another salt";
        }
    for (auto &[key, node] : all.trie) {
        uses[key.before]++;
        for (int page : node.page) uses[&node] += page >= 0;
    }
    for (auto &[key, node] : all.trie) {
        if (node.uses == 0) return "a node that nobody uses is known";
        if (node.uses != uses[&node]) return "a node has lost count of its uses";
    }
    return "";
}

// Nothing of a page that is free can be read: every precision reads these bytes as NaN.
inline Cache poisoned(Cache cache) {
    cache.tell = [&memory = *cache.memory, stores = cache.stores](const PageEvent &event) {
        if (event.what != PageEvent::freed && event.what != PageEvent::evicted) return;
        const Store &store = stores[event.kind];
        for (const CacheRows *rows : {&store.view.keys, &store.view.values}) {
            const std::vector<char> bytes(store.pool->page * rows->stride(), '\xff');
            for (int layer = 0; rows->data && layer < store.shape.layers; layer++)
                memory.write(rows->at(layer, (int64_t)event.page * store.pool->page, 0), bytes.data(), bytes.size());
        }
    };
    return cache;
}
