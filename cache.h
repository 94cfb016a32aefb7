// The KV cache: where does position 37 live. Layouts, then the bytes that their rows take, then growing and going back.
//
// A row is one position's vector of one KV head of one layer. A layout says in which row a position is, a precision
// (precision.h) how a row is stored as bytes. K and V have memory of their own: rows of row_bytes in the order
// (layer, row, kv_head). With 2 KV heads and 4 numbers in bf16, 8 bytes a row,
//   token 1, head 1 is at bytes (1 * 2 + 1) * 8 = 24 .. 31
// Each kind of layers (base/kinds.h, Kind) has a store: its own layout and rows. Bytes are a sum over kinds; where
// layers look back over a window, the capacity is the window:
//   bytes = 2 * sequences * capacity * layers * kv_heads * head_dim * bytes_per_number
// To add a layout, write one struct and list it in `Layout` below: flags, help, messages, the choice at run time,
// tables and tests go through that list. docs/09_make_your_own.md adds one step by step.
#pragma once

#include <climits>
#include <functional>
#include <memory>
#include <string>
#include <variant>

#include "pages.h"
#include "precision.h"

// ---- Layout: which row holds position t of sequence s ------------------------------------------------------

// The size of a kind's store. Keys and values need not have the same width.
struct CacheShape {
    int layers = 0, kv_heads = 0;
    int key_width = 0, value_width = 0;  // numbers in a row
    int sequences = 1, capacity = 0;     // positions each sequence can hold
    int page = 16;                       // paged: positions per page
    int pages = 0;                       // paged: in all; 0: enough for every sequence at its capacity
    int window = 1024, sinks = 4;        // ring
    int local = 0;  // the window of these layers: no earlier positions are kept; 0: all are
    int taps = 0;   // L of a convolution, whose rows are states (base/kinds.h, Kind); 0: attention
};

// What a query at `position` sees: all positions up to its own, or the last `window` and the first `sinks`. Once
// positions between the two are dropped, the keys of the sinks are rotated to the positions just before the window, so
// no distance is larger than window + sinks.
struct Visible {
    int window = 0, sinks = 0;  // window 0: everything
    HOST_DEVICE bool dropped(int position) const { return window && position >= window + sinks; }
    // First position of the window; 0 while it reaches back to the sinks.
    HOST_DEVICE int first(int position) const { return dropped(position) ? position - window + 1 : 0; }
    // How many positions the sinks have moved.
    HOST_DEVICE int shift(int position) const { return dropped(position) ? first(position) - sinks : 0; }
};

// Each sequence has `capacity` rows of its own, reserved from the start. The simplest layout; it keeps memory for
// positions that may never come.
struct Contiguous {
    static constexpr const char *name = "contiguous";
    int capacity = 0;  // positions per sequence
    void open(const CacheShape &shape) { capacity = shape.capacity; }
    HOST_DEVICE int64_t row(int sequence, int position) const { return (int64_t)sequence * capacity + position; }
    // How many positions from this one on have consecutive rows.
    HOST_DEVICE int run(int position) const { return capacity - position; }
    int64_t rows(const CacheShape &shape) const { return (int64_t)shape.sequences * capacity; }
    int limit() const { return capacity; }  // positions a sequence can grow to
    int chunk() const { return INT_MAX; }   // positions a sequence may grow by in one pass
    HOST_DEVICE Visible visible(int layer_window) const { return {layer_window, 0}; }
};

// Most tokens of a pass where only a window is kept: window / 8 in whole blocks of 32, from 32 to 512. More would need
// more spare rows; fewer would read the weights more often. A convolution's window is 3 or 4, so it takes 128.
constexpr int chunk_beside(int window, bool convolution = false) {
    if (convolution) return 128;
    return std::min(512, std::max(group_size, window / 8 / group_size * group_size));
}

// Fixed pages of P positions, handed out from one pool as sequences grow; a page table per sequence maps logical to
// physical pages (pages.h; Kwon et al. 2023, PagedAttention, §4).
//   table 91 17 44 203, P = 16, position 37  ->  logical page 2, offset 5  ->  row 44 * 16 + 5
struct Paged {
    static constexpr const char *name = "paged";
    int page = 16;                   // P
    int capacity = 0;                // positions per sequence
    int window = 0;                  // pages wholly before it are given back; 0: none is
    int pass = INT_MAX;              // positions a sequence may grow by in one pass
    int64_t pages_per_sequence = 0;  // entries of a sequence's table
    const int *table = nullptr;      // (sequence, pages_per_sequence): physical page, or -1 if none was handed out
    void open(const CacheShape &shape) {
        page = shape.page;
        capacity = shape.capacity;
        window = shape.local;
        pass = window ? chunk_beside(window, shape.taps) : INT_MAX;
        pages_per_sequence = pages_for(capacity, page);
    }
    HOST_DEVICE int64_t row(int sequence, int position) const {
        return (int64_t)table[(int64_t)sequence * pages_per_sequence + position / page] * page + position % page;
    }
    HOST_DEVICE int run(int position) const { return page - position % page; }
    int64_t rows(const CacheShape &shape) const { return pages(shape) * page; }
    int limit() const { return capacity; }
    int chunk() const { return pass; }
    // Pages in the pool. With a window: as many as the window and one pass may touch, so that grow() always finds one.
    int64_t pages(const CacheShape &shape) const {
        const int64_t touched = ((int64_t)window + chunk() + group_size - 2) / page + 2;
        if (window) return shape.sequences * std::min<int64_t>(pages_per_sequence, touched);
        return shape.pages ? shape.pages : (int64_t)shape.sequences * pages_per_sequence;
    }
    HOST_DEVICE Visible visible(int layer_window) const { return {layer_window, 0}; }
};

// Keeps the last `window` positions and the first `sinks` (Xiao et al. 2024, StreamingLLM), so a sequence can go on
// without end. Position t is in row t % slots, where position t - slots was. Why not `window` slots: a whole pass is
// stored before its first query reads, and must not overwrite what that query sees. With a window of 40, 3 sinks and a
// pass of 32:
//   0 .. 41    all positions before the query at 42, which sees them all. From 43 on, some are dropped, and
//              sinks are read from rows of their own. So no query sees more earlier positions in the ring.
//   42 .. 73   a pass that begins there: in all at least 74 rows, which is 96 in whole blocks of 32
// A key in the window keeps the rotation of its own position, as only the distance to the query counts. The sinks move
// with the window, so they have rows of their own, too (CacheView::sink_keys), and are rotated when read.
struct Ring {
    static constexpr const char *name = "ring";
    int window = 0, sinks = 0;
    int slots = 0;       // rows per sequence, a multiple of 32
    int most = INT_MAX;  // positions a sequence can grow to
    int pass = 0;        // positions a sequence may grow by in one pass
    void open(const CacheShape &shape) {
        window = shape.window;
        sinks = shape.sinks;
        pass = chunk_beside(window, shape.taps);
        slots = (int)(((int64_t)sinks + window + chunk() - 1 + group_size - 1) / group_size * group_size);
    }
    HOST_DEVICE int64_t row(int sequence, int position) const { return (int64_t)sequence * slots + position % slots; }
    HOST_DEVICE int run(int position) const { return slots - position % slots; }
    int64_t rows(const CacheShape &shape) const { return (int64_t)shape.sequences * slots; }
    int limit() const { return most; }
    int chunk() const { return pass; }
    // A layer that looks back no further than the ring needs no sinks: it never sees what the ring drops.
    HOST_DEVICE Visible visible(int layer_window) const {
        return layer_window && layer_window <= window ? Visible{layer_window, 0} : Visible{window, sinks};
    }
};

using Layout = std::variant<Contiguous, Paged, Ring>;

// Returns the layout of one kind's store; `layout` is the one asked for, that of layers that see everything. Layers
// with a window keep what they see, and room for a pass: in a ring without sinks, unless contiguous takes fewer rows;
// or in pages, given back before the window. A ring is made no shorter than a convolution's taps.
inline Layout open_layout(CacheShape shape, Layout layout) {
    const bool paged = std::holds_alternative<Paged>(layout), ring = std::holds_alternative<Ring>(layout);
    if (ring && shape.taps) shape.local = shape.taps, shape.window = std::max(shape.window, shape.taps);
    if (shape.local && !paged && (!ring || shape.local <= shape.window)) {
        Ring local;
        shape.window = shape.local, shape.sinks = 0;
        local.open(shape);
        if (!ring) local.most = shape.capacity;
        if (ring || local.slots < shape.capacity) return local;
    }
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
    HOST_DEVICE size_t stride() const { return kv_heads * row_bytes; }  // bytes from one row to the next
    size_t bytes(int layers) const { return (size_t)layers * (size_t)rows_per_layer * stride(); }
};

// What the operations of a pass know of a store, on a CPU or a GPU.
struct CacheView {
    Choice<Layout> layout;
    Choice<Precision> type_k, type_v;
    CacheRows keys, values;  // without memory on the naive path
    // Where a precision has blocks of 32 positions: each sequence's residual block, its newest positions at f16, with
    // position t in row sequence * 32 + t % 32.
    CacheRows residual_keys, residual_values;
    // A ring's sinks at f32, keys not rotated; sink t in row sequence * sinks + t.
    CacheRows sink_keys, sink_values;
    int sinks = 0;
    HOST_DEVICE int64_t row_of(int sequence, int position) const {
        return layout.visit([&](auto &chosen) { return chosen.row(sequence, position); });
    }
};

// The rows of all layers of a kind. The naive path's has no memory: it stores nothing, and its layout says what a query
// sees.
struct Store {
    CacheShape shape = {};
    Layout layout = {};
    CacheView view = {};
    PagePool *pool = nullptr;   // where it is paged: its pool in Cache::pages
    int *page_table = nullptr;  // the machine's copy of pool->table
};

// What a cache is opened with.
struct CacheChoice {
    Layout layout;  // of layers that see everything
    Precision type_k, type_v;
};

// It can be moved, not copied: two copies would share their memory.
struct Cache : CacheChoice {
    std::vector<Store> stores;                 // (kind)
    std::unique_ptr<Pages> pages;              // where it is paged: which sequence holds which page
    std::vector<int> lengths;                  // (sequence): positions that are filled
    std::vector<int> reached;                  // (sequence): the most that were filled since it was empty
    std::vector<std::shared_ptr<void>> owned;  // the memory of all stores
    Memory *memory = nullptr;                  // the machine's
    std::function<void(const PageEvent &)> tell = nullptr;  // called with each event of a page, if it is set
};

// Whether positions are encoded 32 together, in blocks.
inline bool blocks_of(const Cache &cache) { return has_blocks(cache.type_k) || has_blocks(cache.type_v); }

inline int64_t row_of(const Store &store, int sequence, int position) {
    return std::visit([&](auto &layout) { return layout.row(sequence, position); }, store.layout);
}

// The least of answer(layout) over the layouts of all stores.
template <class Answer>
int least_of(const Cache &cache, Answer answer) {
    int least = INT_MAX;
    for (const Store &store : cache.stores) least = std::min(least, std::visit(answer, store.layout));
    return least;
}
inline int limit_of(const Cache &cache) {
    return least_of(cache, [](auto &layout) { return layout.limit(); });
}
inline int chunk_of(const Cache &cache) {
    return least_of(cache, [](auto &layout) { return layout.chunk(); });
}

// ---- How many bytes ------------------------------------------------------------------------------------------

// Bytes of a cache. Payload: the numbers at their precision, by the formula on top of this file. Metadata: the rest, as
// scales, zero points, residual blocks at f16, sinks at f32, page tables, and the spare rows of a window.
struct CacheBytes {
    double payload = 0, metadata = 0;
    double total() const { return payload + metadata; }
    void operator+=(const CacheBytes &more) { payload += more.payload, metadata += more.metadata; }
};

// Positions of a sequence that a layout keeps for its queries; INT_MAX: all.
inline int kept_by(const Layout &layout) {
    if (auto *ring = std::get_if<Ring>(&layout)) return ring->window + ring->sinks;
    auto *paged = std::get_if<Paged>(&layout);
    return paged && paged->window ? paged->window : INT_MAX;
}

// The precision of a store: the one asked for, but f32 for states. States are few, so rounding them saves nothing.
inline Precision precision_of(const CacheShape &shape, const Precision &asked) {
    return shape.taps ? Precision(F32{}) : asked;
}

// Bytes of a store with `rows` rows in each layer, all sequences together.
inline CacheBytes bytes_of(const CacheShape &shape, const Layout &layout, const Precision &type_k,
                           const Precision &type_v, double rows) {
    CacheBytes bytes;
    auto add = [&](const Precision &type, int width) {
        if (width == 0) return;  // MLA: a value is a part of its key
        double heads = (double)shape.layers * shape.kv_heads, sinks = 0;
        double kept = std::min(rows, (double)shape.sequences * kept_by(layout));
        if (auto *ring = std::get_if<Ring>(&layout)) sinks = ring->sinks;
        bytes.payload += heads * kept * row_payload(type, width);
        bytes.metadata += heads * (rows * (double)row_bytes(type, width) - kept * row_payload(type, width));
        bytes.metadata += heads * shape.sequences * sinks * width * sizeof(float);
        if (has_blocks(type)) bytes.metadata += heads * shape.sequences * group_size * width * sizeof(f16);
    };
    add(precision_of(shape, type_k), shape.key_width);
    add(precision_of(shape, type_v), shape.value_width);
    if (auto *paged = std::get_if<Paged>(&layout))
        bytes.metadata +=
            sizeof(int) * ((double)shape.sequences * (double)paged->pages_per_sequence + 2.0 * paged->pages(shape));
    return bytes;
}

// Returns how many rows of a layer are in use: in a paged store those of held pages, in any other all.
inline int64_t rows_now(const Store &store) {
    return store.pool ? (int64_t)store.pool->used() * store.pool->page : store.view.keys.rows_per_layer;
}
inline CacheBytes bytes_of(const Store &store, const Precision &type_k, const Precision &type_v) {
    return bytes_of(store.shape, store.layout, type_k, type_v, (double)rows_now(store));
}
inline CacheBytes bytes_of(const Cache &cache) {
    CacheBytes bytes;
    for (const Store &store : cache.stores) bytes += bytes_of(store, cache.type_k, cache.type_v);
    return bytes;
}

// ---- Opening ---------------------------------------------------------------------------------------------------

// Opens the pools of paged stores, and each page table twice: for the host, which hands out pages, and for the machine,
// which reads rows.
inline void open_page_tables(Cache &cache) {
    std::vector<PagePool> pools;
    for (const Store &store : cache.stores) {
        auto *paged = std::get_if<Paged>(&store.layout);
        if (!paged) return;
        const int64_t most = INT_MAX, wanted = paged->pages(store.shape);
        if (wanted > most)
            fail("the KV cache has %lld pages, expected at most %lld: raise --page", (long long)wanted,
                 (long long)most);
        pools.push_back(open_pages(store.shape.sequences, paged->pages_per_sequence, paged->page, (int)wanted,
                                   store.shape.local));
    }
    cache.pages = std::make_unique<Pages>();
    cache.pages->open((int)cache.lengths.size(), std::move(pools), blocks_of(cache) ? group_size : 1);
    for (size_t kind = 0; kind < cache.stores.size(); kind++) {
        Store &store = cache.stores[kind];
        store.pool = &cache.pages->pools[kind];
        std::vector<int> &table = store.pool->table;
        cache.owned.push_back(cache.memory->reserve(table.size() * sizeof(int), "the page table", "raise --page"));
        store.page_table = (int *)cache.owned.back().get();
        cache.memory->write(store.page_table, table.data(), table.size() * sizeof(int));
        Paged &paged = std::get<Paged>(store.layout), there = paged;
        paged.table = table.data(), there.table = store.page_table;
        store.view.layout = Layout(there);
    }
}

// Reserves the memory of a store; `what` names it in the error if there is too little.
inline void open_store(Cache &cache, Store &store, const std::string &what) {
    const CacheShape &shape = store.shape;
    const int64_t rows = rows_of(shape, store.layout), sequences = shape.sequences;
    CacheView &view = store.view;
    const Precision type_k = precision_of(shape, cache.type_k), type_v = precision_of(shape, cache.type_v);
    view.layout = store.layout, view.type_k = type_k, view.type_v = type_v;
    auto open = [&](const Precision &type, int width, int64_t count) {  // count: rows of each layer
        CacheRows rows = {nullptr, row_bytes(type, width), width, shape.kv_heads, count};
        if (count == 0 || width == 0) return rows;
        const char *cure = "lower -c or --window, or free some";
        cache.owned.push_back(cache.memory->reserve(rows.bytes(shape.layers), what.c_str(), cure));
        rows.data = (char *)cache.owned.back().get();
        return rows;
    };
    view.keys = open(type_k, shape.key_width, rows);
    view.values = open(type_v, shape.value_width, rows);
    view.residual_keys = open(F16{}, shape.key_width, has_blocks(type_k) ? sequences * group_size : 0);
    view.residual_values = open(F16{}, shape.value_width, has_blocks(type_v) ? sequences * group_size : 0);
    if (auto *ring = std::get_if<Ring>(&store.layout)) {
        view.sinks = ring->sinks;
        view.sink_keys = open(F32{}, shape.key_width, sequences * ring->sinks);
        view.sink_values = open(F32{}, shape.value_width, sequences * ring->sinks);
    }
}

// Bytes of a cache of these shapes, all its rows counted.
inline CacheBytes full_bytes(const std::vector<CacheShape> &shapes, const CacheChoice &cache) {
    CacheBytes bytes;
    for (const CacheShape &shape : shapes) {
        const Layout opened = open_layout(shape, cache.layout);
        bytes += bytes_of(shape, opened, cache.type_k, cache.type_v, (double)rows_of(shape, opened));
    }
    return bytes;
}

// Returns an empty cache, with a store for each kind of layers. Its memory belongs to a machine, which must outlive it.
inline Cache open_cache(Memory &memory, const std::vector<CacheShape> &shapes, Layout layout, Precision type_k,
                        Precision type_v) {
    Cache cache;
    cache.memory = &memory, cache.layout = layout, cache.type_k = type_k, cache.type_v = type_v;
    CacheShape whole = shapes[0];  // of layers that see everything
    whole.local = 0;
    std::visit([&](auto &chosen) { chosen.open(whole); }, cache.layout);
    cache.lengths.assign(shapes[0].sequences, 0);
    cache.reached.assign(shapes[0].sequences, 0);
    const double bytes = full_bytes(shapes, {layout, type_k, type_v}).total();
    const int64_t rows = rows_of(whole, cache.layout);
    Room room = memory.room();
    if (bytes > room.bytes)
        fail("the KV cache needs %.1f GiB for %lld positions, %s has %.1f GiB, enough for %.0f: lower -c or --window, "
             "or choose a smaller --kv type",
             bytes / 0x1p30, (long long)rows, room.name.c_str(), room.bytes / 0x1p30,
             std::floor((double)rows * room.bytes / bytes));
    const std::string what = formatted("the KV cache of %.1f GiB, its keys or values", bytes / 0x1p30);
    for (const CacheShape &shape : shapes) cache.stores.push_back({shape, open_layout(shape, layout)});
    for (Store &store : cache.stores) open_store(cache, store, what);
    open_page_tables(cache);
    return cache;
}

// ---- Growing and going back --------------------------------------------------------------------------------

// Fails unless the cache has room for `count` more positions of a sequence. Where pages before a window are given back,
// the pool always has enough.
inline void require_room(const Cache &cache, int sequence, int count) {
    int first = cache.lengths.at(sequence), limit = limit_of(cache);
    if (count > limit - first)
        fail("the cache holds %s, %lld are needed: shorten the prompt or raise -c", counted(limit, "position").c_str(),
             (long long)first + count);
    for (size_t kind = 0; cache.pages && kind < cache.stores.size(); kind++) {
        const PagePool &pool = cache.pages->pools[kind];
        const int pages = cache.pages->needed((int)kind, sequence, first, first + count);
        if (!pool.window && pages > pool.available())
            fail("the cache has %s of %s, %d are needed: end a sequence, or make the pool larger",
                 counted(pool.available(), "free page").c_str(), counted(pool.page, "position").c_str(), pages);
    }
}

// Copies `count` rows of each layer, from row `from` to row `to`. On a GPU the bytes stay there and the host does not
// wait, since prefix hits and copies before a write are frequent.
inline void copy_rows(Memory &memory, const CacheRows &rows, int layers, int64_t from, int64_t to, int64_t count) {
    for (int layer = 0; rows.data && layer < layers; layer++)
        memory.write(rows.at(layer, to, 0), rows.at(layer, from, 0), count * rows.stride());
}

// Copies rows as pages.h decided, event by event, then updates the machine's page table of a sequence, for positions
// [begin, end).
inline void carry_out(Cache &cache, int sequence, int begin, int end) {
    if (cache.pages->events.empty()) return;
    for (const PageEvent &event : cache.pages->events) {
        const Store &store = cache.stores[event.kind];
        const int64_t page = store.pool->page;
        if (event.what == PageEvent::copied)
            for (const CacheRows *rows : {&store.view.keys, &store.view.values})
                copy_rows(*cache.memory, *rows, store.shape.layers, event.from * page, event.page * page, event.count);
        if (cache.tell) cache.tell(event);
    }
    cache.pages->events.clear();
    for (const Store &store : cache.stores) {
        const int first = begin / store.pool->page, count = pages_for(end, store.pool->page) - first;
        const int *changed = store.pool->table.data() + sequence * store.pool->pages_per_sequence + first;
        cache.memory->write(store.page_table + (changed - store.pool->table.data()), changed, count * sizeof(int));
    }
}

// Makes room for `count` more positions of a sequence and returns the first of them; the caller then stores them. Why
// not one by one as they are stored: a pass gets all its pages or none, and is refused before anything is computed.
// Where layers keep a window, `count` is that of one pass, at most chunk_of(cache).
inline int grow(Cache &cache, int sequence, int count) {
    require_room(cache, sequence, count);
    const int first = cache.lengths[sequence], end = cache.lengths[sequence] += count;
    cache.reached[sequence] = std::max(cache.reached[sequence], end);
    if (cache.pages) {
        cache.pages->grow(sequence, first, end);
        carry_out(cache, sequence, first, end);
    }
    return first;
}

// Cuts a sequence to `length` positions, and gives the pages of the others back to the pool.
inline void give_back(Cache &cache, int sequence, int length) {
    const int from = std::exchange(cache.lengths.at(sequence), length);
    if (!cache.pages) return;
    cache.pages->shrink(sequence, from, length);
    carry_out(cache, sequence, length, length);
}

// The first position of a sequence that a store still holds. Earlier ones were overwritten in a ring, or their pages
// were given back. A block of codes that lost one of its pages is lost as a whole.
inline int first_kept(const Cache &cache, const Store &store, int sequence) {
    if (auto *ring = std::get_if<Ring>(&store.layout)) return std::max(0, cache.reached[sequence] - ring->slots);
    const int first = store.pool ? store.pool->first[sequence] * store.pool->page : 0;
    return blocks_of(cache) ? (first + group_size - 1) / group_size * group_size : first;
}

// Forgets the positions of a sequence from `length` on, and sometimes earlier ones. Returns how many are left: the
// caller reads the others again, and then the cache is as if it had never been longer. Two things cannot be undone:
//   a full block   has only codes, so it goes as a whole. An int4 cache of 70 positions, cut to 40, has 32 left. Cut to
//                  66 it has 66: the third block, [64, 70), is still at f16
//   a window       that moved overwrote the positions before it, or gave them back. If the next query sees one of
//                  them, all positions go:
//                    ----|--------------|---------------------------|-------------|
//                        first_kept <=  what the next query sees    length        reached
inline int rewind(Cache &cache, int sequence, int length) {
    const int from = cache.lengths.at(sequence);
    if (length >= from) return from;
    if (blocks_of(cache) && length / group_size < from / group_size) length = length / group_size * group_size;
    for (const Store &store : cache.stores)
        if (first_kept(cache, store, sequence) > visible_of(store.view.layout, store.shape.local).first(length))
            length = 0;
    if (length == 0) cache.reached[sequence] = 0;
    give_back(cache, sequence, length);
    return length;
}

// ---- Sharing -------------------------------------------------------------------------------------------------

// Takes the prefix hit of `tokens`: an empty sequence gets the pages of others that began with these tokens and `salt`.
// Returns how many tokens need not be computed; 0 where the cache is not paged.
inline int find_known(Cache &cache, int sequence, const std::vector<int> &tokens, const std::string &salt = "") {
    if (!cache.pages) return 0;
    const int known = cache.pages->find(sequence, tokens, salt);
    carry_out(cache, sequence, 0, known);
    cache.lengths[sequence] = cache.reached[sequence] = known;
    return known;
}

// Where 32 positions are stored together, a shared page must hold whole blocks: one that ends within a block would be
// written again, as codes, when the block is full.
inline bool can_share_pages(const Cache &cache) {
    return cache.pages && !(blocks_of(cache) && cache.pages->pools[0].page % group_size);
}

// Lets other sequences find the full pages of a sequence's first `length` positions, which hold these tokens.
inline void publish(Cache &cache, int sequence, const std::vector<int> &tokens, int length) {
    if (!can_share_pages(cache)) return;
    cache.pages->publish(sequence, tokens, length);
    carry_out(cache, sequence, 0, length);
}

// Calls use(store, rows, row, count) for all that a cache holds of a sequence's positions [begin, end): `count`
// consecutive rows of keys or values, in each layer of a store. They are the stored rows, in the order of the layout
// (all of a block of codes); the residual block, with position t in row t % 32 of the sequence's 32; and the sinks.
template <class Use>
void for_each_range(const Cache &cache, int sequence, int begin, int end, Use use) {
    end = std::min(end, cache.lengths.at(sequence));
    for (const Store &store : cache.stores) {
        const CacheView &view = store.view;
        auto walk = [&](const CacheRows &rows, const auto &layout, int first, int last) {
            for (int t = std::max(first, begin), count; rows.data && t < std::min(last, end); t += count)
                use(store, rows, layout.row(sequence, t), count = std::min(layout.run(t), std::min(last, end) - t));
        };
        Ring block;
        block.slots = group_size;
        const int newest = cache.lengths[sequence] / group_size * group_size;
        int kept = first_kept(cache, store, sequence);
        if (blocks_of(cache)) kept = kept / group_size * group_size;  // a ring overwrites a block when another is full
        for (const CacheRows *rows : {&view.keys, &view.values})
            std::visit([&](auto &layout) { walk(*rows, layout, kept, end); }, store.layout);
        for (const CacheRows *rows : {&view.residual_keys, &view.residual_values}) walk(*rows, block, newest, end);
        for (const CacheRows *rows : {&view.sink_keys, &view.sink_values})
            walk(*rows, Contiguous{view.sinks}, 0, view.sinks);
    }
}

// Gives an empty sequence all that another one has. Pages are shared, until one of the two copies a page to write into
// it. All other rows are copied now.
inline void fork(Cache &cache, int from, int to) {
    const int length = cache.lengths.at(from);
    if (cache.pages && !can_share_pages(cache))
        fail("pages of %d positions cannot be shared where %d are stored together: make --page a multiple of %d",
             cache.pages->pools[0].page, group_size, group_size);
    if (cache.pages) {
        cache.pages->fork(from, to, length);
        carry_out(cache, to, 0, length);
    }
    cache.lengths.at(to) = length, cache.reached.at(to) = cache.reached[from];
    std::vector<int64_t> there;  // (range): its first row
    for_each_range(cache, from, 0, length, [&](auto &, auto &, int64_t row, int) { there.push_back(row); });
    auto next = there.begin();
    for_each_range(cache, to, 0, length, [&](const Store &store, const CacheRows &rows, int64_t row, int count) {
        if (*next != row) copy_rows(*cache.memory, rows, store.shape.layers, *next, row, count);  // not a shared page
        next++;
    });
}

// ---- All of a pass or nothing --------------------------------------------------------------------------------

// Calls pass(), which grows sequences and stores their new positions: all of them or none. If it fails, for lack of
// pages or by Ctrl-C, each sequence has its old length and pages again, and can go on. What the failed pass overwrote
// needs no copy:
//   rows after the old length    are written again before they are read
//   spare rows of a ring         held positions that no later query sees, like pages that were given back; `reached`
//                                stays, so rewind() knows of them
//   a residual block             keeps its positions, as a pass that begins within a block ends in it, too
//                                (tokens_of_pass); if the old length ends a block, it is not read any more
template <class Pass>
auto all_or_nothing(Cache &cache, Pass pass) {
    const std::vector<int> lengths = cache.lengths;
    try {
        return pass();
    } catch (...) {
        for (int sequence = (int)lengths.size() - 1; sequence >= 0; sequence--)
            give_back(cache, sequence, lengths[sequence]);
        throw;
    }
}
