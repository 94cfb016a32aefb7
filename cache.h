// The KV cache: in which row a position lives (layout), and how a row is stored (precision).
//
// A row is one position's vector of one KV head of one layer. K and V lie in memory of their own, each as
//   (layer, row, kv_head) rows of row_bytes        so, of 3 tokens, 2 KV heads and 4 numbers in bf16,
//   token 1, head 1 is at bytes (1 * 2 + 1) * 8 = 24..31.
// The formula of the whole:  bytes = 2 * sequences * capacity * layers * kv_heads * head_dim * bytes_per_number.
//
// Another layout or precision is one struct, and one entry of `Layout` or `Precision` below: the flags, their
// help and error messages, the choice at run time and the tests go through these lists.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "model.h"
#include "numbers.h"

// ---- Precision: a row of `width` numbers as bytes ----------------------------------------------------------

// Formats that the machine converts itself: PlainRow of numbers.h.
struct F32 : PlainRow<float> {
    static constexpr const char *name = "f32";
    static constexpr double bits = 32, unit_roundoff = 0x1p-24;
};
struct F16 : PlainRow<f16> {
    static constexpr const char *name = "f16";
    static constexpr double bits = 16, unit_roundoff = 0x1p-11;
};
struct BF16 : PlainRow<bf16> {
    static constexpr const char *name = "bf16";
    static constexpr double bits = 16, unit_roundoff = 0x1p-8;
};

using Precision = std::variant<F32, F16, BF16>;

// ---- Layout: which row holds position t of sequence s ------------------------------------------------------

// Each sequence has `capacity` rows of its own, reserved from the start: the simplest layout, and the one that
// keeps memory for positions that may never come.
struct Contiguous {
    static constexpr const char *name = "contiguous";
    int capacity = 0;  // positions per sequence
    HOST_DEVICE int64_t row(int sequence, int position) const { return (int64_t)sequence * capacity + position; }
    // From this position on, so many positions have rows that follow one another.
    HOST_DEVICE int run(int position) const { return capacity - position; }
    HOST_DEVICE int64_t rows(int sequences) const { return (int64_t)sequences * capacity; }
};

using Layout = std::variant<Contiguous>;

// ---- The lists, at run time --------------------------------------------------------------------------------

// Calls visit(Type{}) for each type of a list.
template <class List, class Visit, size_t... index>
void for_each_type(Visit visit, std::index_sequence<index...>) {
    (visit(std::variant_alternative_t<index, List>{}), ...);
}
template <class List, class Visit>
void for_each_type(Visit visit) {
    for_each_type<List>(visit, std::make_index_sequence<std::variant_size_v<List>>{});
}

template <class List>
const char *name_of(const List &choice) {
    return std::visit([](auto type) { return decltype(type)::name; }, choice);
}

inline std::string layout_names() {
    std::string names;
    for_each_type<Layout>([&](auto layout) { names += std::string(names.empty() ? "" : " ") + layout.name; });
    return names;
}

// "f32 (32 bits a value) f16 (16) ..."
inline std::string precision_names() {
    std::string names;
    for_each_type<Precision>([&](auto type) {
        char entry[64];
        snprintf(entry, sizeof entry, names.empty() ? "%s (%g bits a value)" : " %s (%g)", type.name, type.bits);
        names += entry;
    });
    return names;
}

// The entry of a list by its name. `flag` is where the name stood, for the message.
inline Precision parse_precision(const std::string &flag, const std::string &name) {
    std::unique_ptr<Precision> found;
    for_each_type<Precision>([&](auto type) {
        if (name == type.name) found = std::make_unique<Precision>(type);
    });
    if (!found) fail("%s %s: unknown type; known are %s", flag.c_str(), name.c_str(), precision_names().c_str());
    return *found;
}

inline Layout parse_layout(const std::string &flag, const std::string &name) {
    std::unique_ptr<Layout> found;
    for_each_type<Layout>([&](auto layout) {
        if (name == layout.name) found = std::make_unique<Layout>(layout);
    });
    if (!found) {
        fail("%s %s: unknown layout; known are none (recompute everything) %s", flag.c_str(), name.c_str(),
             layout_names().c_str());
    }
    return *found;
}

// ---- The cache ---------------------------------------------------------------------------------------------

// What a cache is made for. The widths of K and V are apart: they need not be the same.
struct CacheShape {
    int layers = 0, kv_heads = 0;
    int key_width = 0, value_width = 0;  // numbers in a row
    int sequences = 1, capacity = 0;     // positions each sequence can hold
};

// K or V: the memory, and where a row begins in it. All index arithmetic on cache memory is here.
struct CacheRows {
    char *data = nullptr;
    size_t row_bytes = 0;
    int width = 0, kv_heads = 0;
    int64_t rows_per_layer = 0;
    HOST_DEVICE char *at(int layer, int64_t row, int kv_head) const {
        return data + ((layer * rows_per_layer + row) * kv_heads + kv_head) * row_bytes;
    }
    HOST_DEVICE size_t stride() const { return kv_heads * row_bytes; }  // bytes from a row to the next one's
};

struct Cache {
    CacheShape shape;
    Layout layout;
    Precision type_k, type_v;
    CacheRows keys, values;
    std::vector<int> lengths;                  // (sequence): positions that are filled
    std::vector<std::shared_ptr<void>> owned;  // the memory of K and of V
    size_t payload_bytes = 0, metadata_bytes = 0;
};

// Zeroed memory whose pages are taken only when they are first written.
inline std::shared_ptr<void> reserve(size_t bytes, const char *what) {
    void *data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
        fail("%s: %.1f GiB of memory cannot be had (%s): free some, or lower -c", what, (double)bytes / 0x1p30,
             strerror(errno));
    }
    return std::shared_ptr<void>(data, [bytes](void *start) { munmap(start, bytes); });
}

inline Cache open_cache(const CacheShape &shape, Layout layout, Precision type_k, Precision type_v) {
    Cache cache{shape, layout, type_k, type_v, {}, {}, std::vector<int>(shape.sequences, 0), {}};
    int64_t rows = std::visit(
        [&](auto &chosen) {
            chosen.capacity = shape.capacity;
            return chosen.rows(shape.sequences);
        },
        cache.layout);
    auto describe = [&](const Precision &type, int width) {
        size_t row_bytes = std::visit([&](auto format) { return format.row_bytes(width); }, type);
        return CacheRows{nullptr, row_bytes, width, shape.kv_heads, rows};
    };
    cache.keys = describe(type_k, shape.key_width);
    cache.values = describe(type_v, shape.value_width);

    double rows_in_all = (double)shape.layers * (double)rows * shape.kv_heads;
    double bytes = rows_in_all * (double)(cache.keys.row_bytes + cache.values.row_bytes);
    double machine = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGE_SIZE);
    if (bytes > machine) {
        fail(
            "the KV cache needs %.1f GiB for %d positions, this machine has %.1f GiB: lower -c or choose a smaller "
            "--kv "
            "type",
            bytes / 0x1p30, shape.capacity, machine / 0x1p30);
    }
    cache.payload_bytes = (size_t)bytes;
    for (CacheRows *side : {&cache.keys, &cache.values}) {
        cache.owned.push_back(reserve((size_t)rows_in_all * side->row_bytes, "the KV cache"));
        side->data = (char *)cache.owned.back().get();
    }
    return cache;
}

inline int64_t row_of(const Cache &cache, int sequence, int position) {
    return std::visit([&](auto &layout) { return layout.row(sequence, position); }, cache.layout);
}

inline int run_of(const Cache &cache, int position) {
    return std::visit([&](auto &layout) { return layout.run(position); }, cache.layout);
}

// Makes room for `count` more positions of a sequence and returns the first of them; they are then to be stored.
inline int grow(Cache &cache, int sequence, int count) {
    int first = cache.lengths.at(sequence);
    if (count > cache.shape.capacity - first) {
        fail("the cache holds %d positions, %d are needed: shorten the prompt or raise -c", cache.shape.capacity,
             first + count);
    }
    cache.lengths[sequence] += count;
    return first;
}

// Forgets the positions of a sequence from `length` on.
inline void shrink(Cache &cache, int sequence, int length) {
    cache.lengths.at(sequence) = std::min(cache.lengths.at(sequence), length);
}

// Encodes the K and V vectors of one position and head (key_width and value_width floats) into their rows.
inline void store_row(Cache &cache, int layer, int sequence, int position, int kv_head, const float *key,
                      const float *value) {
    int64_t row = row_of(cache, sequence, position);
    auto encode = [&](const CacheRows &side, const Precision &type, const float *vector) {
        std::visit([&](auto format) { format.encode(side.at(layer, row, kv_head), vector, side.width); }, type);
    };
    encode(cache.keys, cache.type_k, key);
    encode(cache.values, cache.type_v, value);
}
