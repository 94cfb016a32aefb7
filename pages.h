// Who holds which page.
//
// A paged cache is cut into pages of P positions. They are handed out as sequences grow, and a page table for each
// sequence says which ones it holds, in the order of its positions:
//   table 91 17 44 203, P = 16: positions 0 .. 15 are in page 91, positions 32 .. 47 in page 44
//
// Pages are whole numbers here. What is in them, and where, is the cache's own (cache.h); so whoever decides about
// pages needs no memory for them.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

inline int pages_for(int positions, int page) { return (int)(((int64_t)positions + page - 1) / page); }

struct PagePool {
    int page = 16;  // P: positions of a page
    int64_t pages_per_sequence = 0;
    std::vector<int> table;       // (sequence, pages_per_sequence): the page, or -1 where none was handed out
    std::vector<int> references;  // (page): sequences whose table holds it; 0: free
    std::vector<int> free;        // pages that nobody holds; the last one is handed out next
    std::vector<int> first;       // (sequence): its first logical page; those before it were given back

    int used() const { return (int)(references.size() - free.size()); }
    // Pages that a sequence takes, or gives back, from one length to another.
    int between(int shorter, int longer) const { return pages_for(longer, page) - pages_for(shorter, page); }
    int &entry(int sequence, int logical) { return table[sequence * pages_per_sequence + logical]; }
};

// All are free; page 0 is handed out first.
inline PagePool open_pages(int sequences, int64_t pages_per_sequence, int page, int pages) {
    PagePool pool;
    pool.page = page, pool.pages_per_sequence = pages_per_sequence;
    pool.table.assign(sequences * pages_per_sequence, -1);
    pool.references.assign(pages, 0);
    pool.first.assign(sequences, 0);
    for (int i = pages - 1; i >= 0; i--) pool.free.push_back(i);
    return pool;
}

// Hands out the pages that a sequence needs to grow from `from` to `to` positions: as many are free. Returns how many.
inline int take_pages(PagePool &pool, int sequence, int from, int to) {
    const int first = pages_for(from, pool.page), count = pool.between(from, to);
    for (int i = 0; i < count; i++) {
        int page = pool.entry(sequence, first + i) = pool.free.back();
        pool.free.pop_back();
        pool.references[page] = 1;
    }
    return count;
}

// Takes the pages [begin, end) of a sequence from its table, the last one first, so that they are handed out again in
// the order of its positions. Returns those that no table holds any more: they are free.
inline std::vector<int> release(PagePool &pool, int sequence, int begin, int end) {
    std::vector<int> freed;
    for (int logical = end - 1; logical >= begin; logical--) {
        int page = std::exchange(pool.entry(sequence, logical), -1);
        if (--pool.references[page] == 0) freed.push_back(page);
    }
    pool.free.insert(pool.free.end(), freed.begin(), freed.end());
    return freed;
}

// Those behind the first `length` positions, of `from`.
inline std::vector<int> release_pages(PagePool &pool, int sequence, int from, int length) {
    const int begin = std::max(pages_for(length, pool.page), pool.first[sequence]);
    if (length == 0) pool.first[sequence] = 0;
    return release(pool, sequence, begin, pages_for(from, pool.page));
}

// Those that lie wholly before a position, from which on a window sees.
inline std::vector<int> release_before(PagePool &pool, int sequence, int position) {
    const int end = std::max(pool.first[sequence], position / pool.page);
    return release(pool, sequence, std::exchange(pool.first[sequence], end), end);
}
