// The KV cache: where does position 37 live. Layouts, then the bytes that their rows take, then growing and shrinking.
//
// A row is one position's vector of one KV head of one layer. A layout says in which row a position is, a precision
// (precision.h) what bytes a row takes. K and V lie in memory of their own, each as rows of row_bytes in the order
// (layer, row, kv_head). Of 3 tokens, 2 KV heads and 4 numbers in bf16, 8 bytes a row:
//   token 1, head 1 is at bytes (1 * 2 + 1) * 8 = 24 .. 31
// The formula of the whole:
//   bytes = 2 * sequences * capacity * layers * kv_heads * head_dim * bytes_per_number
//
// Another layout is one struct and one entry of `Layout` below: the flags, their help and error messages, the choice at
// run time, the tables and the tests go through that list. docs/09_make_your_own.md adds one step by step.
#pragma once

#include <climits>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "pages.h"
#include "precision.h"

// ---- Layout: which row holds position t of sequence s ------------------------------------------------------

// What a cache is made for. The widths of K and V are apart: they need not be the same.
struct CacheShape {
    int layers = 0, kv_heads = 0;
    int key_width = 0, value_width = 0;  // numbers in a row
    int sequences = 1, capacity = 0;     // positions each sequence can hold
    int page = 16;                       // paged: positions per page
    int pages = 0;                       // paged: in all; 0: enough for every sequence at its capacity
    int window = 1024, sinks = 4;        // ring
};

// What a query at `position` sees: everything before it, or the last `window` positions and the first `sinks`. Once
// positions between the two are dropped, the sinks stand just before the window, with their keys rotated to there: no
// distance is larger than window + sinks.
struct Visible {
    int window = 0, sinks = 0;  // window 0: everything
    HOST_DEVICE bool dropped(int position) const { return window && position >= window + sinks; }
    // First position of the window; 0 while it reaches back to the sinks.
    HOST_DEVICE int first(int position) const { return dropped(position) ? position - window + 1 : 0; }
    // By how many positions the sinks have moved.
    HOST_DEVICE int shift(int position) const { return dropped(position) ? first(position) - sinks : 0; }
};

// Each sequence has `capacity` rows of its own, reserved from the start: the simplest layout, and the one that
// keeps memory for positions that may never come.
struct Contiguous {
    static constexpr const char *name = "contiguous";
    int capacity = 0;  // positions per sequence
    void open(const CacheShape &shape) { capacity = shape.capacity; }
    HOST_DEVICE int64_t row(int sequence, int position) const { return (int64_t)sequence * capacity + position; }
    // From this position on, so many positions have rows that follow one another.
    HOST_DEVICE int run(int position) const { return capacity - position; }
    int64_t rows(const CacheShape &shape) const { return (int64_t)shape.sequences * capacity; }
    int limit() const { return capacity; }  // positions a sequence can grow to
    int chunk() const { return INT_MAX; }   // positions a sequence may grow by in one pass
    HOST_DEVICE Visible visible(int layer_window) const { return {layer_window, 0}; }
};

// Fixed pages of P positions, handed out from one pool as sequences grow; a page table per sequence maps logical to
// physical pages (pages.h; Kwon et al. 2023, PagedAttention, §4).
//   table 91 17 44 203, P = 16, position 37  ->  logical page 2, offset 5  ->  row 44 * 16 + 5
struct Paged {
    static constexpr const char *name = "paged";
    int page = 16;                   // P
    int capacity = 0;                // positions per sequence
    int64_t pages_per_sequence = 0;  // entries of a sequence's table
    const int *table = nullptr;      // (sequence, pages_per_sequence): physical page, or -1 where none was handed out
    void open(const CacheShape &shape) {
        page = shape.page;
        capacity = shape.capacity;
        pages_per_sequence = ((int64_t)capacity + page - 1) / page;
    }
    HOST_DEVICE int64_t row(int sequence, int position) const {
        return (int64_t)table[sequence * pages_per_sequence + position / page] * page + position % page;
    }
    HOST_DEVICE int run(int position) const { return page - position % page; }
    int64_t rows(const CacheShape &shape) const { return pages(shape) * page; }
    int limit() const { return capacity; }
    int chunk() const { return INT_MAX; }
    int64_t pages(const CacheShape &shape) const {
        return shape.pages ? shape.pages : shape.sequences * pages_per_sequence;
    }
    HOST_DEVICE Visible visible(int layer_window) const { return {layer_window, 0}; }
};

// The last `window` positions and the first `sinks` (Xiao et al. 2024, StreamingLLM): a sequence goes on without end.
// Position t is in row t % slots, where position t - slots was. Why not `window` slots: all of a pass is stored before
// its first query reads, and must not overwrite what that one sees. With a window of 40, 3 sinks, and a pass of 32:
//   0 .. 41    what the query at 42 sees before itself. No query sees more in the ring: 42 is the last one for which
//              nothing is dropped, and until then the sinks are read from the ring like all others.
//   42 .. 73   a pass that begins there: in all 74 rows at least, 96 in whole blocks of 32
// A key in the window keeps the rotation of its own position: only the distance to the query counts. The sinks, which
// stand just before a window that moves, have rows of their own, too (CacheView::sink_keys), and are rotated when read.
struct Ring {
    static constexpr const char *name = "ring";
    int window = 0, sinks = 0;
    int slots = 0;  // rows per sequence, a multiple of 32
    void open(const CacheShape &shape) {
        window = shape.window;
        sinks = shape.sinks;
        slots = (int)(((int64_t)sinks + window + chunk() - 1 + group_size - 1) / group_size * group_size);
    }
    HOST_DEVICE int64_t row(int sequence, int position) const { return (int64_t)sequence * slots + position % slots; }
    HOST_DEVICE int run(int position) const { return slots - position % slots; }
    int64_t rows(const CacheShape &shape) const { return (int64_t)shape.sequences * slots; }
    int limit() const { return INT_MAX; }
    int chunk() const { return std::min(512, std::max(group_size, window / 8 / group_size * group_size)); }
    // A layer that looks back no further than the ring needs no sinks: it never saw what the ring drops.
    HOST_DEVICE Visible visible(int layer_window) const {
        return layer_window && layer_window <= window ? Visible{layer_window, 0} : Visible{window, sinks};
    }
};

using Layout = std::variant<Contiguous, Paged, Ring>;

// What a layout answers, whichever was chosen.
inline Layout open_layout(const CacheShape &shape, Layout layout) {
    std::visit([&](auto &chosen) { chosen.open(shape); }, layout);
    return layout;
}

inline int64_t rows_of(const CacheShape &shape, const Layout &layout) {
    return std::visit([&](auto &chosen) { return chosen.rows(shape); }, layout);
}

inline Visible visible_of(const Choice<Layout> &layout, int layer_window) {
    return layout.visit([&](auto &chosen) { return chosen.visible(layer_window); });
}

// ---- The cache: where a row begins ---------------------------------------------------------------------------------

// K or V: the memory, and where a row begins in it. All index arithmetic on cache memory is here.
struct CacheRows {
    char *data = nullptr;
    size_t row_bytes = 0;
    int width = 0, kv_heads = 0;
    int64_t rows_per_layer = 0;
    HOST_DEVICE char *at(int layer, int64_t row, int kv_head) const {
        return data + row * stride() + (layer * rows_per_layer * kv_heads + kv_head) * row_bytes;
    }
    HOST_DEVICE size_t stride() const { return kv_heads * row_bytes; }  // bytes from a row to the next one's
    size_t bytes(int layers) const { return (size_t)layers * (size_t)rows_per_layer * stride(); }
};

// What operations are told of a cache, on both machines.
struct CacheView {
    Choice<Layout> layout;
    Choice<Precision> type_k, type_v;
    CacheRows keys, values;  // without memory on the naive path
    // Where a precision quantizes blocks of 32 positions: each sequence's residual block, its newest positions at f16;
    // position t in row sequence * 32 + t % 32.
    CacheRows residual_keys, residual_values;
    // Of a ring the sinks at f32, keys not rotated; sink t in row sequence * sinks + t.
    CacheRows sink_keys, sink_values;
    int sinks = 0;
    HOST_DEVICE int64_t row_of(int sequence, int position) const {
        return layout.visit([&](auto &chosen) { return chosen.row(sequence, position); });
    }
};

struct Cache {
    CacheShape shape;
    Layout layout;
    Precision type_k, type_v;
    CacheView view;
    std::vector<int> lengths;                  // (sequence): positions that are filled
    std::vector<int> reached;                  // (sequence): the most that were filled since it was empty
    std::vector<std::shared_ptr<void>> owned;  // the memory of all of them
    std::shared_ptr<PagePool> pool;            // of a paged cache
    Memory *memory = nullptr;                  // the machine's
    int *page_table = nullptr;                 // there: a copy of pool->table
};

inline int64_t row_of(const Cache &cache, int sequence, int position) {
    return std::visit([&](auto &layout) { return layout.row(sequence, position); }, cache.layout);
}

inline int limit_of(const Cache &cache) {
    return std::visit([](auto &layout) { return layout.limit(); }, cache.layout);
}

inline int chunk_of(const Cache &cache) {
    return std::visit([](auto &layout) { return layout.chunk(); }, cache.layout);
}

// ---- How many bytes ------------------------------------------------------------------------------------------

// Bytes of a cache. Payload: the numbers at their precision, the formula on top of this file. Metadata: all that
// is needed beside them, which is scales, zero points, residual blocks at f16, sinks at f32, page tables.
struct CacheBytes {
    double payload = 0, metadata = 0;
    double total() const { return payload + metadata; }
};

// What a cache of `rows` rows takes; `rows` of a layer, all sequences together.
inline CacheBytes bytes_of(const CacheShape &shape, const Layout &layout, const Precision &type_k,
                           const Precision &type_v, double rows) {
    CacheBytes bytes;
    auto add = [&](const Precision &type, int width) {
        if (width == 0) return;  // MLA: a value is a part of its key
        double heads = (double)shape.layers * shape.kv_heads, sinks = 0;
        if (auto *ring = std::get_if<Ring>(&layout)) sinks = ring->sinks;
        bytes.payload += heads * rows * row_payload(type, width);
        bytes.metadata += heads * rows * ((double)row_bytes(type, width) - row_payload(type, width));
        bytes.metadata += heads * shape.sequences * sinks * width * sizeof(float);
        if (has_blocks(type)) bytes.metadata += heads * shape.sequences * group_size * width * sizeof(f16);
    };
    add(type_k, shape.key_width);
    add(type_v, shape.value_width);
    if (auto *paged = std::get_if<Paged>(&layout))
        bytes.metadata +=
            sizeof(int) * ((double)shape.sequences * (double)paged->pages_per_sequence + 2.0 * paged->pages(shape));
    return bytes;
}

// What a cache takes now: of a paged one the pages that were handed out, of the others all rows.
inline CacheBytes bytes_of(const Cache &cache) {
    double rows = cache.pool ? (double)cache.pool->used() * cache.pool->page : (double)cache.view.keys.rows_per_layer;
    return bytes_of(cache.shape, cache.layout, cache.type_k, cache.type_v, rows);
}

// ---- Opening ---------------------------------------------------------------------------------------------------

// Memory for `count` rows of each layer at a precision; none if it is 0. `what` is said where it cannot be had.
inline CacheRows open_rows(Cache &cache, const std::string &what, const Precision &type, int width, int64_t count) {
    CacheRows rows = {nullptr, row_bytes(type, width), width, cache.shape.kv_heads, count};
    if (count == 0) return rows;
    cache.owned.push_back(
        cache.memory->reserve(rows.bytes(cache.shape.layers), what.c_str(), "lower -c or --window, or free some"));
    rows.data = (char *)cache.owned.back().get();
    return rows;
}

// The pool of a paged cache, and its page table twice: where the host counts pages, and where the machine reads rows.
inline void open_page_table(Cache &cache, Paged &paged) {
    int64_t most = INT_MAX, wanted = paged.pages(cache.shape);
    if (wanted > most)
        fail("the KV cache has %lld pages, expected at most %lld: raise --page", (long long)wanted, (long long)most);
    cache.pool = std::make_shared<PagePool>(
        open_pages(cache.shape.sequences, paged.pages_per_sequence, paged.page, (int)wanted));
    std::vector<int> &table = cache.pool->table;
    cache.owned.push_back(cache.memory->reserve(table.size() * sizeof(int), "the page table", "raise --page"));
    cache.page_table = (int *)cache.owned.back().get();
    cache.memory->write(cache.page_table, table.data(), table.size() * sizeof(int));
    Paged there = paged;
    paged.table = table.data(), there.table = cache.page_table;
    cache.view.layout = Layout(there);
}

// An empty cache. Its memory is a machine's, which lives longer.
inline Cache open_cache(Memory &memory, const CacheShape &shape, Layout layout, Precision type_k, Precision type_v) {
    Cache cache;
    cache.memory = &memory, cache.shape = shape, cache.layout = open_layout(shape, layout);
    cache.type_k = type_k, cache.type_v = type_v;
    cache.lengths.assign(shape.sequences, 0);
    cache.reached.assign(shape.sequences, 0);
    int64_t rows = rows_of(shape, cache.layout), sequences = shape.sequences;
    double bytes = bytes_of(shape, cache.layout, type_k, type_v, (double)rows).total();
    Room room = memory.room();
    if (bytes > room.bytes)
        fail(
            "the KV cache needs %.1f GiB for %lld positions, %s has %.1f GiB, enough for %.0f: lower -c or --window, "
            "or "
            "choose a smaller --kv type",
            bytes / 0x1p30, (long long)rows, room.name.c_str(), room.bytes / 0x1p30,
            std::floor((double)rows * room.bytes / bytes));
    CacheView &view = cache.view;
    view.layout = cache.layout, view.type_k = type_k, view.type_v = type_v;
    const std::string what = formatted("the KV cache of %.1f GiB, its keys or values", bytes / 0x1p30);
    auto open = [&](const Precision &type, int width, int64_t count) {
        return open_rows(cache, what, type, width, count);
    };
    view.keys = open(type_k, shape.key_width, rows);
    view.values = open(type_v, shape.value_width, rows);
    view.residual_keys = open(F16{}, shape.key_width, has_blocks(type_k) ? sequences * group_size : 0);
    view.residual_values = open(F16{}, shape.value_width, has_blocks(type_v) ? sequences * group_size : 0);
    if (auto *ring = std::get_if<Ring>(&cache.layout)) {
        view.sinks = ring->sinks;
        view.sink_keys = open(F32{}, shape.key_width, sequences * ring->sinks);
        view.sink_values = open(F32{}, shape.value_width, sequences * ring->sinks);
    }
    if (auto *paged = std::get_if<Paged>(&cache.layout)) open_page_table(cache, *paged);
    return cache;
}

// ---- Growing and shrinking ---------------------------------------------------------------------------------

// Fails unless the cache has room for `count` more positions of a sequence.
inline void require_room(const Cache &cache, int sequence, int count) {
    int first = cache.lengths.at(sequence);
    if (count > limit_of(cache) - first)
        fail("the cache holds %d positions, %lld are needed: shorten the prompt or raise -c", limit_of(cache),
             (long long)first + count);
    if (!cache.pool) return;
    const PagePool &pool = *cache.pool;
    if (int pages = pool.between(first, first + count); pages > (int)pool.free.size())
        fail("the cache has %zu free pages of %d positions, %d are needed: end a sequence, or make the pool larger",
             pool.free.size(), pool.page, pages);
}

// Makes room for `count` more positions of a sequence and returns the first of them; they are then to be stored. Why
// not position by position, as they are stored: a pass gets all its pages or none, and what cannot be had is refused
// before anything is computed.
inline int grow(Cache &cache, int sequence, int count) {
    require_room(cache, sequence, count);
    const int first = cache.lengths[sequence], end = cache.lengths[sequence] += count;
    cache.reached[sequence] = std::max(cache.reached[sequence], end);
    if (!cache.pool) return first;
    PagePool &pool = *cache.pool;
    if (const int taken = take_pages(pool, sequence, first, end)) {  // the machine's table follows
        const int *changed = &pool.entry(sequence, pages_for(first, pool.page));
        cache.memory->write(cache.page_table + (changed - pool.table.data()), changed, taken * sizeof(int));
    }
    return first;
}

// Gives back a sequence's pages behind `length` positions.
inline void shrink_pages(Cache &cache, int sequence, int from, int length) {
    if (!cache.pool) return;
    [[maybe_unused]] const std::vector<int> freed = release_pages(*cache.pool, sequence, from, length);
#ifdef POISON_FREED_PAGES  // in tests: every precision reads these bytes as NaN
    for (int page : freed)
        for (const CacheRows *rows : {&cache.view.keys, &cache.view.values})
            for (int layer = 0; layer < cache.shape.layers; layer++)
                memset(rows->at(layer, (int64_t)page * cache.pool->page, 0), 0xff, cache.pool->page * rows->stride());
#endif
}

// The keys or the values of a cut sequence's last block go from codes to the residual block, as they read: where a cut
// ends within a block that was full, nothing else has its positions. An int4 cache of 70 positions, cut to 40:
//   before   [0, 32) codes   [32, 64) codes   [64, 70) residual block
//   after    [0, 32) codes   [32, 40) residual block
// Why row by row through the machine's memory, without a kernel: cuts are rare.
template <bool keys>
void restore_residual(Cache &cache, int sequence, int length) {
    const CacheRows &rows = keys ? cache.view.keys : cache.view.values;
    const CacheRows &residual = keys ? cache.view.residual_keys : cache.view.residual_values;
    const int begin = (length - 1) / group_size * group_size, width = rows.width;
    std::vector<char> block(group_size * rows.stride());      // (32, kv_heads): its rows
    std::vector<f16> vectors((size_t)rows.kv_heads * width);  // (kv_heads, width): those of a position
    auto restore = [&](auto format, int layer) {
        for (int i = 0; i < group_size; i++)
            cache.memory->read(&block[i * rows.stride()], rows.at(layer, row_of(cache, sequence, begin + i), 0),
                               rows.stride());
        for (int t = begin; t < length; t++) {
            for (int i = 0; i < rows.kv_heads * width; i++) {
                auto row_at = [&](int at) { return &block[(at - begin) * rows.stride() + i / width * rows.row_bytes]; };
                float x = stored_number<keys, decltype(format)>(row_at, t, i % width, width);
                // The largest f16 may read as half a step more, which f16 has not.
                from_float(vectors[i], x > 65504 ? 65504 : x < -65504 ? -65504 : x);
            }
            cache.memory->write(residual.at(layer, sequence * group_size + t - begin, 0), vectors.data(),
                                residual.stride());
        }
    };
    auto restore_layers = [&](auto format) {
        for (int layer = 0; decltype(format)::blocks && layer < cache.shape.layers; layer++) restore(format, layer);
    };
    std::visit(restore_layers, keys ? cache.type_k : cache.type_v);
}

inline void restore_residuals(Cache &cache, int sequence, int length) {
    restore_residual<true>(cache, sequence, length);
    restore_residual<false>(cache, sequence, length);
}

// Forgets the positions of a sequence from `length` on. Why not by its length alone: pages go back to the pool; a block
// of codes that is cut goes back to the residual block; and a ring cannot go back further than its rows. It holds the
// positions [reached - slots, reached), and the last one that stays has seen back to length - sinks - window:
//
//   ----|--------------------|------------------------|-------------|
//       reached - slots  <=  length - sinks - window  length        reached
inline void shrink(Cache &cache, int sequence, int length) {
    const int from = cache.lengths.at(sequence);
    if (length >= from) return;
    if (auto *ring = std::get_if<Ring>(&cache.layout)) {
        int &reached = cache.reached[sequence];
        if (length > 0 && reached > ring->slots && reached - length > ring->slots - ring->sinks - ring->window)
            fail("a ring of %d rows cannot go back from %d positions to %d: the rows were used again", ring->slots,
                 reached, length);
        if (length == 0) reached = 0;
    }
    if (length > 0 && (length - 1) / group_size != (from - 1) / group_size)
        restore_residuals(cache, sequence, length);  // while its pages are there
    shrink_pages(cache, sequence, from, length);
    cache.lengths[sequence] = length;
}

// Calls pass(), which lets sequences grow and stores their new positions: all of them or none. If it fails, for want of
// pages or by Ctrl-C, each sequence has its old length and pages again, and may go on. What the failed pass overwrote
// needs no copy:
//   rows behind the old length   are written anew before they are read
//   a ring's rows to spare       held what is not seen from there on; `reached` stays, so shrink() knows of them
//   a residual block             keeps its positions while a pass that begins within a block ends in it, too
//                                (prefill_pass); if the old length ends a block, it is read back from its codes
template <class Pass>
void all_or_nothing(Cache &cache, Pass pass) {
    const std::vector<int> lengths = cache.lengths;
    try {
        pass();
    } catch (...) {
        for (int sequence = cache.shape.sequences - 1; sequence >= 0; sequence--) {
            int from = cache.lengths[sequence], length = lengths[sequence];
            shrink_pages(cache, sequence, from, length);
            cache.lengths[sequence] = length;
            if (from > length && length > 0 && length % group_size == 0) restore_residuals(cache, sequence, length);
        }
        throw;
    }
}
