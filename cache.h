// The KV cache: in which row a position lives (layout), and how a row is stored (precision).
//
// A row is one position's vector of one KV head of one layer. K and V lie in memory of their own, each as
//   (layer, row, kv_head) rows of row_bytes        so, of 3 tokens, 2 KV heads and 4 numbers in bf16,
//   token 1, head 1 is at bytes (1 * 2 + 1) * 8 = 24..31.
// The formula of the whole:  bytes = 2 * sequences * capacity * layers * kv_heads * head_dim * bytes_per_number.
//
// Another layout or precision is one struct, and one entry of `Layout` or `Precision` below: the flags, their
// help and error messages, the choice at run time, the tables and the tests go through these lists. docs/precision.md
// adds one step by step.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cfloat>
#include <climits>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "device.h"
#include "model.h"
#include "numbers.h"

// ---- Precision: a row of `width` numbers as bytes ----------------------------------------------------------
//
struct ScaleAndZero {
    f16 scale, zero;
};

// A row format says how many bytes a row takes, encodes one, and decodes a Vec of numbers at a time (see PlainRow in
// numbers.h). Where numbers share a scale, decode() gives them without it: what was stored, number(row, channel), is
//   scale * decode(row, channel) + zero      with the two of scale_and_zero(row, channel)
// so that attention can apply the scale of a whole row to its score or weight, once. Rows of groups (GroupedRow) are
// read group by group instead. A number that is not finite, or too large for its scale, makes all that share the scale
// NaN: better seen than wrong.

// Codes with one f16 scale before them. With the scale rounded up no code is cut off, and a number is off by at most
// half the distance of two codes: for int8 scale / 2, where scale <= max|x| / 127 * (1 + 2^-10) + 2^-24.
// decode() gives codes divided by `divisor`; the stored scale is as much larger.
template <class Code, int largest, int divisor = 1>
struct ScaledRow {
    static constexpr int scale_channels = 1 << 30;  // all of a row share a scale
    static constexpr int line_numbers = cache_line / (int)sizeof(Code);
    static constexpr bool key_groups = false;
    HOST_DEVICE static size_t row_bytes(int width) { return sizeof(f16) + (size_t)width * sizeof(Code); }
    HOST_DEVICE static const Code *codes(const char *row) { return (const Code *)(row + sizeof(f16)); }
    template <class Values, class Team = Alone>
    HOST_DEVICE static void encode(char *row, const Values &values, int width, Team team = {}) {
        float most = 0;
        for (int i = team.first(); i < width; i += team.step) {
            float magnitude = std::fabs(values[i]);
            if (!(magnitude <= FLT_MAX)) magnitude = INFINITY;
            most = magnitude > most ? magnitude : most;
        }
        f16 scale = f16_above(team.largest(most) / largest * divisor);
        float step = to_float(scale) / divisor;
        if (!(step <= FLT_MAX)) from_float(scale, NAN);
        bool usable = step > 0 && step <= FLT_MAX;
        if (team.first() == 0) memcpy(row, &scale, sizeof scale);
        Code *code = (Code *)(row + sizeof(f16));
        for (int i = team.first(); i < width; i += team.step) from_float(code[i], usable ? values[i] / step : 0);
    }
    HOST_DEVICE static ScaleAndZero scale_and_zero(const char *row, int) {
        ScaleAndZero result = {};
        memcpy(&result.scale, row, sizeof(f16));  // rows of an odd width are not aligned
        return result;
    }
    HOST_DEVICE static float number(const char *row, int channel) {
        return to_float(scale_and_zero(row, channel).scale) / divisor * to_float(codes(row)[channel]);
    }
    static Vec decode(const char *row, int channel) { return load(codes(row) + channel); }
    static Vec decode_part(const char *row, int channel, int count) { return load_part(codes(row) + channel, count); }
};

// 32 numbers that share an f16 scale and an f16 zero point: x ~ zero + scale * code, codes from 0 to 2^bits - 1. The
// zero point is rounded down and the scale up, so a number is off by at most scale / 2, where scale <= (max - min +
// |min| * 2^-10 + 2^-24) / (2^bits - 1) * (1 + 2^-10) + 2^-24.
template <int bits>
struct Group {
    ScaleAndZero both;
    Packed<bits> codes;
    HOST_DEVICE float number(int i) const { return to_float(both.zero) + to_float(both.scale) * (float)codes.code(i); }
};

constexpr int group_size = 32;

// Of `count` <= 32 numbers x(0), x(1), ...
template <int bits, class Numbers>
HOST_DEVICE inline Group<bits> quantize(Numbers x, int count) {
    float low = FLT_MAX, high = -FLT_MAX;
    bool finite = true;
    for (int i = 0; i < count; i++) {
        float number = x(i);
        finite &= std::fabs(number) <= FLT_MAX;
        low = number < low ? number : low;
        high = number > high ? number : high;
    }
    Group<bits> group = {};
    group.both.zero = f16_below(finite ? low : NAN);
    float zero = to_float(group.both.zero);
    group.both.scale = f16_above((high - zero) / Packed<bits>::largest);
    float scale = to_float(group.both.scale);
    if (!(scale <= FLT_MAX)) {  // infinite or NaN, or the zero point was
        from_float(group.both.scale, NAN);
        from_float(group.both.zero, NAN);
        return group;
    }
    for (int i = 0; i < count && scale > 0; i++) {
        int8_t code;
        from_float(code, (x(i) - zero) / scale);
        group.codes.set(i, code > Packed<bits>::largest ? Packed<bits>::largest : code);
    }
    return group;
}

// Asymmetric, in groups of 32, as KIVI (Liu et al. 2024): values per token, keys per channel, because a few channels of
// the keys are much larger than the others at every token.
//
// A row of values is ceil(width / 32) groups, each of 32 channels of the token. Keys are quantized 32 positions at a
// time, in groups of one channel at 32 positions. Such a block takes the rows of its 32 positions, of the same size:
// row i of the block holds, for all 32 positions, the channels [i * n, i * n + n), n = ceil(width / 32). So neither
// pages nor rings need to know of groups. Until its 32 positions are there, a block's keys and values are kept at f16
// (Cache::recent_keys, recent_values).
template <int bits>
struct GroupedRow {
    static constexpr int scale_channels = group_size;
    static constexpr bool key_groups = true;
    using G = Group<bits>;
    HOST_DEVICE static int groups(int width) { return (width + group_size - 1) / group_size; }
    HOST_DEVICE static size_t row_bytes(int width) { return groups(width) * sizeof(G); }
    HOST_DEVICE static const G &group(const char *row, int i) { return ((const G *)row)[i]; }
    HOST_DEVICE static float number(const char *row, int channel) {  // of values
        return group(row, channel / group_size).number(channel % group_size);
    }
    template <class Values, class Team = Alone>
    HOST_DEVICE static void encode(char *row, const Values &values, int width, Team team = {}) {
        for (int g = team.first(); g < groups(width); g += team.step) {
            int first = g * group_size, count = width - first < group_size ? width - first : group_size;
            ((G *)row)[g] = quantize<bits>([&](int i) -> float { return values[first + i]; }, count);
        }
    }
    // Row i of a block of keys: its channels of 32 positions, (32, width).
    template <class Keys, class Team = Alone>
    HOST_DEVICE static void encode_keys(char *row, int i, const Keys &keys, int width, Team team = {}) {
        int n = groups(width);
        for (int g = team.first(); g < n && i * n + g < width; g += team.step)
            ((G *)row)[g] = quantize<bits>([&](int t) -> float { return keys[t * width + i * n + g]; }, group_size);
    }
};

// code_bits: of a number alone. bits: with its share of scales and zero points, 128 numbers a row. With u,
// unit_roundoff, a stored number is off by at most u times itself; where numbers share a scale, u (1 + 2^-10) times the
// largest of them.
struct F32 : PlainRow<float> {
    static constexpr const char *name = "f32";
    static constexpr double code_bits = 32, bits = 32, unit_roundoff = 0x1p-24;
};
struct F16 : PlainRow<f16> {
    static constexpr const char *name = "f16";
    static constexpr double code_bits = 16, bits = 16, unit_roundoff = 0x1p-11;
};
struct BF16 : PlainRow<bf16> {
    static constexpr const char *name = "bf16";
    static constexpr double code_bits = 16, bits = 16, unit_roundoff = 0x1p-8;
};
struct FP8 : ScaledRow<fp8, 448, 256> {  // load(fp8) is a code / 256; rows of up to 114,632
    static constexpr const char *name = "fp8";
    static constexpr double code_bits = 8, bits = 8.125, unit_roundoff = 0x1p-4;
};
struct Int8 : ScaledRow<int8_t, 127> {
    static constexpr const char *name = "int8";
    static constexpr double code_bits = 8, bits = 8.125, unit_roundoff = 0.5 / 127;
};
struct Int4 : GroupedRow<4> {
    static constexpr const char *name = "int4";
    static constexpr double code_bits = 4, bits = 5, unit_roundoff = 1.0 / 15;
};
struct Int2 : GroupedRow<2> {
    static constexpr const char *name = "int2";
    static constexpr double code_bits = 2, bits = 3, unit_roundoff = 1.0 / 3;
};

using Precision = std::variant<F32, F16, BF16, FP8, Int8, Int4, Int2>;

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
// positions between the two are dropped, the sinks stand just before the window, with their keys rotated to there.
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
    Visible visible(int layer_window) const { return {layer_window, 0}; }
};

// Fixed pages of P positions, handed out from one pool as sequences grow; a page table per sequence maps logical to
// physical pages (Kwon et al. 2023, PagedAttention, §4).
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
    Visible visible(int layer_window) const { return {layer_window, 0}; }
};

// The last `window` positions and the first `sinks` (Xiao et al. 2024, StreamingLLM): a sequence goes on without end.
// A key in the window keeps the rotation of its own position: only the distance to the query counts. The sinks, which
// stand just before a window that moves, have rows of their own (Cache::sink_keys), not rotated, and are rotated when
// they are read. The ring has `chunk` rows more than the window, so that the rows of one pass can be stored before its
// queries have read the past.
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
    Visible visible(int layer_window) const {
        return layer_window && layer_window <= window ? Visible{layer_window, 0} : Visible{window, sinks};
    }
};

using Layout = std::variant<Contiguous, Paged, Ring>;

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

// The pages of a paged cache: who has them, and which are free.
struct PagePool {
    std::vector<int> table;       // (sequence, pages_per_sequence): physical page or -1
    std::vector<int> references;  // (page): sequences whose table holds it; 0: free
    std::vector<int> free;        // pages that nobody holds; the last one is handed out next
};

struct Cache {
    CacheShape shape;
    Layout layout;
    Precision type_k, type_v;
    CacheRows keys, values;
    // Where a precision quantizes keys in blocks: the newest block of each sequence at f16, row sequence * 32 + t % 32.
    CacheRows recent_keys, recent_values;
    // Ring: the sinks at f32, row sequence * sinks + t; keys not rotated.
    CacheRows sink_keys, sink_values;
    std::vector<int> lengths;                  // (sequence): positions that are filled
    std::vector<int> reached;                  // (sequence): the most there were since it was empty
    std::vector<std::shared_ptr<void>> owned;  // the memory of all of them
    std::shared_ptr<PagePool> pool;
    const Device *device = nullptr;  // whose memory it is; nullptr: the CPU's
    int *device_table = nullptr;     // a copy of the page tables there
};

// Bytes of a cache. Payload: the numbers at their precision, the formula on top of this file. Metadata: all that
// is needed beside them, which is scales, zero points, recent blocks at f16, sinks at f32, page tables.
struct CacheBytes {
    double payload = 0, metadata = 0;
    double total() const { return payload + metadata; }
};

inline bool has_blocks(const Precision &type) {
    return std::visit([](auto format) { return decltype(format)::key_groups; }, type);
}

inline double row_payload(const Precision &type, int width) {
    return std::visit([&](auto format) { return std::ceil(decltype(format)::code_bits * width / 8); }, type);
}

// What a cache of `rows` rows takes; `rows` of a layer, all sequences together.
inline CacheBytes bytes_of(const CacheShape &shape, const Layout &layout, const Precision &type_k,
                           const Precision &type_v, double rows) {
    CacheBytes bytes;
    auto add = [&](const Precision &type, int width) {
        double row_bytes = (double)std::visit([&](auto format) { return format.row_bytes(width); }, type);
        double heads = (double)shape.layers * shape.kv_heads, sinks = 0;
        if (auto *ring = std::get_if<Ring>(&layout)) sinks = ring->sinks;
        bytes.payload += heads * rows * row_payload(type, width);
        bytes.metadata += heads * rows * (row_bytes - row_payload(type, width));
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

// Now: of a paged cache the pages that were handed out, of the others all rows.
inline CacheBytes bytes_of(const Cache &cache) {
    double rows = (double)cache.keys.rows_per_layer;
    if (auto *paged = std::get_if<Paged>(&cache.layout))
        rows = ((double)cache.pool->references.size() - (double)cache.pool->free.size()) * paged->page;
    return bytes_of(cache.shape, cache.layout, cache.type_k, cache.type_v, rows);
}

// Of 4 KiB, or of 2 MiB where they lie within the memory and the kernel can give them. Whoever reads much looks up
// small pages so often that it costs a tenth of the time and more (Linux, Documentation/admin-guide/mm/transhuge.rst).
enum class Pages { small, huge };

// Zeroed memory whose pages are taken only when they are first written.
inline std::shared_ptr<void> reserve(size_t bytes, const char *what, Pages pages = Pages::huge) {
    void *data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
        fail("%s: %.1f GiB of memory cannot be had (%s): free some, or lower -c or --window", what,
             (double)bytes / 0x1p30, strerror(errno));
    }
    if (pages == Pages::huge) madvise(data, bytes, MADV_HUGEPAGE);  // refused by kernels that have none: small ones do
    return std::shared_ptr<void>(data, [bytes](void *start) { munmap(start, bytes); });
}

inline Layout open_layout(const CacheShape &shape, Layout layout) {
    std::visit([&](auto &chosen) { chosen.open(shape); }, layout);
    return layout;
}

inline int64_t rows_of(const CacheShape &shape, const Layout &layout) {
    return std::visit([&](auto &chosen) { return chosen.rows(shape); }, layout);
}

inline void open_pages(Cache &cache, Paged &paged) {
    cache.pool = std::make_shared<PagePool>();
    int64_t most = INT_MAX, wanted = paged.pages(cache.shape);
    if (wanted > most)
        fail("the KV cache has %lld pages, expected at most %lld: raise --page", (long long)wanted, (long long)most);
    int pages = (int)wanted;
    cache.pool->table.assign((size_t)cache.shape.sequences * paged.pages_per_sequence, -1);
    cache.pool->references.assign(pages, 0);
    for (int page = pages - 1; page >= 0; page--) cache.pool->free.push_back(page);  // page 0 goes first
    paged.table = cache.pool->table.data();
}

// What a cache must fit into, in bytes, and what that is.
struct Room {
    double bytes;
    std::string name;
};

inline Room room_for_cache([[maybe_unused]] const Device *device) {
#ifdef HAS_CUDA
    if (device) return {(double)free_memory(), std::string("the free memory of ") + device->properties.name};
#endif
    return {(double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGE_SIZE), "this machine"};
}

inline std::shared_ptr<void> reserve_on([[maybe_unused]] const Device *device, size_t bytes) {
#ifdef HAS_CUDA
    if (device) {  // zeros: rows that nobody wrote yet are read, too, and count for nothing
        auto memory = device_memory(*device, bytes, "the KV cache", "lower -c or --window");
        check(cudaMemsetAsync(memory.get(), 0, bytes, device->stream), "cudaMemsetAsync");
        return memory;
    }
#endif
    return reserve(bytes, "the KV cache");
}

// With a `device`, its memory is there.
inline Cache open_cache(const CacheShape &shape, Layout layout, Precision type_k, Precision type_v,
                        const Device *device = nullptr) {
    Cache cache{shape,
                open_layout(shape, layout),
                type_k,
                type_v,
                {},
                {},
                {},
                {},
                {},
                {},
                std::vector<int>(shape.sequences, 0),
                std::vector<int>(shape.sequences, 0),
                {},
                {},
                device,
                nullptr};
    int64_t rows = rows_of(shape, cache.layout);
    double bytes = bytes_of(shape, cache.layout, type_k, type_v, (double)rows).total();
    Room room = room_for_cache(device);
    if (bytes > room.bytes) {
        fail(
            "the KV cache needs %.1f GiB for %lld positions, %s has %.1f GiB, enough for %.0f: lower -c or --window, "
            "or choose a smaller --kv type",
            bytes / 0x1p30, (long long)rows, room.name.c_str(), room.bytes / 0x1p30,
            std::floor((double)rows * room.bytes / bytes));
    }
    auto take = [&](CacheRows &side, const Precision &type, int width, int64_t count) {
        size_t row_bytes = std::visit([&](auto format) { return format.row_bytes(width); }, type);
        side = {nullptr, row_bytes, width, shape.kv_heads, count};
        if (count == 0) return;
        cache.owned.push_back(reserve_on(device, side.bytes(shape.layers)));
        side.data = (char *)cache.owned.back().get();
    };
    take(cache.keys, type_k, shape.key_width, rows);
    take(cache.values, type_v, shape.value_width, rows);
    take(cache.recent_keys, F16{}, shape.key_width, has_blocks(type_k) ? (int64_t)shape.sequences * group_size : 0);
    take(cache.recent_values, F16{}, shape.value_width, has_blocks(type_v) ? (int64_t)shape.sequences * group_size : 0);
    if (auto *ring = std::get_if<Ring>(&cache.layout)) {
        take(cache.sink_keys, F32{}, shape.key_width, (int64_t)shape.sequences * ring->sinks);
        take(cache.sink_values, F32{}, shape.value_width, (int64_t)shape.sequences * ring->sinks);
    }
    if (auto *paged = std::get_if<Paged>(&cache.layout)) open_pages(cache, *paged);
    if (device && cache.pool) {
        cache.owned.push_back(reserve_on(device, cache.pool->table.size() * sizeof(int)));
        cache.device_table = (int *)cache.owned.back().get();
    }
    return cache;
}

inline int64_t row_of(const Cache &cache, int sequence, int position) {
    return std::visit([&](auto &layout) { return layout.row(sequence, position); }, cache.layout);
}

inline int limit_of(const Cache &cache) {
    return std::visit([](auto &layout) { return layout.limit(); }, cache.layout);
}

inline int chunk_of(const Cache &cache) {
    return std::visit([](auto &layout) { return layout.chunk(); }, cache.layout);
}

inline Visible visible_of(const Layout &layout, int layer_window) {
    return std::visit([&](auto &chosen) { return chosen.visible(layer_window); }, layout);
}

// Positions that follow one another, as their rows do.
struct Run {
    int position, count;
    int64_t row;  // of the first
};

// The runs that hold the positions [begin, end) of a sequence. Pages that happen to follow one another are one run.
inline void find_runs(std::vector<Run> &runs, const Cache &cache, int sequence, int begin, int end) {
    runs.clear();
    std::visit(
        [&](auto &layout) {
            for (int t = begin; t < end;) {
                int64_t row = layout.row(sequence, t);
                int count = std::min(end - t, layout.run(t));
                bool follows = !runs.empty() && runs.back().row + runs.back().count == row;
                if (follows)
                    runs.back().count += count;
                else
                    runs.push_back({t, count, row});
                t += count;
            }
        },
        cache.layout);
}

// ---- As kernels see it -------------------------------------------------------------------------------------

#ifdef HAS_CUDA
// One of the types of a list, as std::variant holds it: kernels can visit this. Two are equal if their bytes are: the
// types have no padding.
template <class List>
struct OnDevice;
template <class... Types>
struct OnDevice<std::variant<Types...>> {
    using List = std::variant<Types...>;
    int index = 0;
    alignas(Types...) char bytes[std::max({sizeof(Types)...})] = {};
    OnDevice() = default;
    OnDevice(const List &choice) : index((int)choice.index()) {
        static_assert(((std::is_empty_v<Types> || std::has_unique_object_representations_v<Types>)&&...));
        auto keep = [&](auto &chosen) {
            if (!std::is_empty_v<std::decay_t<decltype(chosen)>>) memcpy(bytes, &chosen, sizeof chosen);
        };
        std::visit(keep, choice);
    }
    bool operator==(const OnDevice &other) const {
        return index == other.index && memcmp(bytes, other.bytes, sizeof bytes) == 0;
    }
    // use(chosen). All threads of a warp take the same way.
    template <int i = 0, class Use>
    __device__ auto visit(Use use) const {
        if constexpr (i + 1 < (int)sizeof...(Types))
            if (index != i) return visit<i + 1>(use);
        return use(*(const std::variant_alternative_t<i, List> *)bytes);
    }
};

// A cache on the card: what is passed to kernels. Page tables are there, too.
struct CacheView {
    OnDevice<Layout> layout;
    OnDevice<Precision> type_k, type_v;
    CacheRows keys, values, recent_keys, recent_values, sink_keys, sink_values;
    int sinks = 0;  // of a ring
    __device__ int64_t row_of(int sequence, int position) const {
        return layout.visit([&](auto &chosen) { return chosen.row(sequence, position); });
    }
};

inline CacheView view_of(const Cache &cache) {
    CacheView view{cache.layout,      cache.type_k,        cache.type_v,    cache.keys,        cache.values,
                   cache.recent_keys, cache.recent_values, cache.sink_keys, cache.sink_values, 0};
    if (auto *ring = std::get_if<Ring>(&cache.layout)) view.sinks = ring->sinks;
    if (auto *paged = std::get_if<Paged>(&cache.layout)) {
        Paged there = *paged;
        there.table = cache.device_table;
        view.layout = Layout(there);
    }
    return view;
}
#endif

// ---- Growing and shrinking ---------------------------------------------------------------------------------

inline int pages_for(const Paged &paged, int positions) {
    return (int)(((int64_t)positions + paged.page - 1) / paged.page);
}

// Hands out the pages that a sequence needs to grow from `from` to `to` positions, or fails and changes nothing.
inline void take_pages(Cache &cache, const Paged &paged, int sequence, int from, int to) {
    PagePool &pool = *cache.pool;
    int first = pages_for(paged, from), last = pages_for(paged, to);
    if (last - first > (int)pool.free.size()) {
        fail("the cache has %zu free pages of %d positions, %d are needed: end a sequence, or make the pool larger",
             pool.free.size(), paged.page, last - first);
    }
    for (int logical = first; logical < last; logical++) {
        int page = pool.free.back();
        pool.free.pop_back();
        pool.references[page] = 1;
        pool.table[(size_t)sequence * paged.pages_per_sequence + logical] = page;
    }
#ifdef HAS_CUDA
    size_t changed = (size_t)sequence * paged.pages_per_sequence + first;
    if (cache.device && last > first)
        copy(*cache.device, cache.device_table + changed, &pool.table[changed], (last - first) * sizeof(int));
#endif
}

// Takes a sequence's pages behind `length` positions from its table; a page that no table holds any more is free.
inline void release_pages(Cache &cache, const Paged &paged, int sequence, int from, int length) {
    PagePool &pool = *cache.pool;
    for (int logical = pages_for(paged, from) - 1; logical >= pages_for(paged, length); logical--) {
        int &entry = pool.table[(size_t)sequence * paged.pages_per_sequence + logical], page = entry;
        entry = -1;
        if (--pool.references[page] > 0) continue;
        pool.free.push_back(page);
#ifdef POISON_FREED_PAGES  // in tests: every precision reads these bytes as NaN
        for (const CacheRows *side : {&cache.keys, &cache.values})
            for (int layer = 0; layer < cache.shape.layers; layer++)
                memset(side->at(layer, (int64_t)page * paged.page, 0), 0xff, paged.page * side->stride());
#endif
    }
}

// Makes room for `count` more positions of a sequence and returns the first of them; they are then to be stored.
inline int grow(Cache &cache, int sequence, int count) {
    int first = cache.lengths.at(sequence);
    if (count > limit_of(cache) - first) {
        fail("the cache holds %d positions, %lld are needed: shorten the prompt or raise -c", limit_of(cache),
             (long long)first + count);
    }
    if (auto *paged = std::get_if<Paged>(&cache.layout)) take_pages(cache, *paged, sequence, first, first + count);
    cache.lengths[sequence] += count;
    cache.reached[sequence] = std::max(cache.reached[sequence], cache.lengths[sequence]);
    return first;
}

// Calls use(keys, type, rows, recent) for K, then for V; `keys` is std::true_type or std::false_type.
template <class Use>
void for_each_side(Cache &cache, Use use) {
    use(std::true_type{}, cache.type_k, cache.keys, cache.recent_keys);
    use(std::false_type{}, cache.type_v, cache.values, cache.recent_values);
}

// Channel c of position t in a full block is in the row of which position, and what it reads as.
template <class Format, bool keys>
HOST_DEVICE int holder_of(int t, int c, int width) {
    return keys ? t / group_size * group_size + c / Format::groups(width) : t;
}
template <class Format, bool keys>
HOST_DEVICE f16 restored(const char *row, int t, int c, int width) {
    const auto &group = Format::group(row, keys ? c % Format::groups(width) : c / group_size);
    float number = group.number(keys ? t % group_size : c % group_size);
    f16 result;  // the largest f16 may read as half a step more, which f16 has not
    from_float(result, number > 65504 ? 65504 : number < -65504 ? -65504 : number);
    return result;
}

#ifdef HAS_CUDA
// restore_recent() on the card: a block of threads for each layer and KV head.
template <bool keys>
__device__ void restore_side(const CacheView &cache, int sequence, int length) {
    const CacheRows &rows = keys ? cache.keys : cache.values, &recent = keys ? cache.recent_keys : cache.recent_values;
    int begin = (length - 1) / group_size * group_size, layer = blockIdx.x, head = blockIdx.y, width = rows.width;
    auto restore = [&](auto format) {
        using Format = decltype(format);
        if constexpr (Format::key_groups) {
            for (int i = threadIdx.x; i < (length - begin) * width; i += blockDim.x) {
                int t = begin + i / width, c = i % width;
                int64_t row = cache.row_of(sequence, holder_of<Format, keys>(t, c, width));
                f16 *to = (f16 *)recent.at(layer, sequence * group_size + t - begin, head);
                to[c] = restored<Format, keys>(rows.at(layer, row, head), t, c, width);
            }
        }
    };
    (keys ? cache.type_k : cache.type_v).visit(restore);
}

__global__ void restore_recent_kernel(CacheView cache, int sequence, int length) {
    wait_for_previous();
    let_next_start();
    restore_side<true>(cache, sequence, length);
    restore_side<false>(cache, sequence, length);
}

inline void restore_recent(const Device &device, const Cache &cache, int sequence, int length) {
    dim3 blocks(cache.shape.layers, cache.shape.kv_heads);
    launch(device, {blocks, 128}, restore_recent_kernel, view_of(cache), sequence, length);
}
#endif

// The block in which a cut sequence ends may be quantized already: its positions become recent again, as they read.
inline void restore_recent(Cache &cache, int sequence, int length) {
#ifdef HAS_CUDA
    if (cache.device) return restore_recent(*cache.device, cache, sequence, length);
#endif
    int begin = (length - 1) / group_size * group_size;
    for_each_side(cache, [&](auto keys, const Precision &type, const CacheRows &rows, const CacheRows &recent) {
        auto restore = [&](auto format, int layer, int head) {
            using Format = decltype(format);
            for (int t = begin; t < length; t++) {
                f16 *to = (f16 *)recent.at(layer, sequence * group_size + t - begin, head);
                for (int c = 0; c < rows.width; c++) {
                    int position = holder_of<Format, keys>(t, c, rows.width);
                    to[c] = restored<Format, keys>(rows.at(layer, row_of(cache, sequence, position), head), t, c,
                                                   rows.width);
                }
            }
        };
        std::visit(
            [&](auto format) {
                if constexpr (decltype(format)::key_groups)
                    for (int layer = 0; layer < cache.shape.layers; layer++)
                        for (int head = 0; head < cache.shape.kv_heads; head++) restore(format, layer, head);
            },
            type);
    });
}

// Forgets the positions of a sequence from `length` on.
inline void shrink(Cache &cache, int sequence, int length) {
    int from = cache.lengths.at(sequence);
    if (length >= from) return;
    if (auto *ring = std::get_if<Ring>(&cache.layout)) {
        int &reached = cache.reached[sequence];
        if (length > 0 && reached > ring->slots && reached - length > ring->slots - ring->sinks - ring->window)
            fail("a ring of %d rows cannot go back from %d positions to %d: the rows were used again", ring->slots,
                 reached, length);
        if (length == 0) reached = 0;
    }
    if (length > 0 && (length - 1) / group_size != (from - 1) / group_size) restore_recent(cache, sequence, length);
    if (auto *paged = std::get_if<Paged>(&cache.layout)) release_pages(cache, *paged, sequence, from, length);
    cache.lengths[sequence] = length;
}

// ---- Storing -----------------------------------------------------------------------------------------------

// Some positions that follow one another in a sequence, and their rows in a pass.
struct Span {
    int row, count;  // rows [row, row + count) of the pass
    int sequence, position;
    int first, end;  // positions [first, end) of the sequence are in this pass: what lies before is in the cache
};

// Vectors of a pass: (rows, kv_heads, width).
struct PassVectors {
    float *start;
    int kv_heads, width;
    float *at(const Span &span, int position, int kv_head) const {
        return start + ((size_t)(span.row + position - span.position) * kv_heads + kv_head) * width;
    }
};

// The block in which a span ends, if it is full now: (32, width) numbers, all of them as f16 has them; else nullptr.
// The vectors of this pass are rounded in place, so that its queries see them as later ones will.
inline const float *full_block(const CacheRows &recent, int layer, const Span &span, int kv_head,
                               const PassVectors &vectors) {
    int width = recent.width, begin = span.position / group_size * group_size;
    thread_local Floats block;
    block.resize((size_t)group_size * width);
    for (int t = span.position; t < span.position + span.count; t++) {
        float *vector = vectors.at(span, t, kv_head);
        for (int i = 0; i < width; i++) {
            f16 number;
            from_float(number, vector[i]);
            vector[i] = to_float(number);
        }
    }
    if (span.position + span.count < begin + group_size) return nullptr;
    for (int t = begin; t < begin + group_size; t++) {
        float *to = &block[(size_t)(t - begin) * width];
        const f16 *row = (const f16 *)recent.at(layer, span.sequence * group_size + t - begin, kv_head);
        for (int i = 0; i < width; i++) to[i] = t < span.first ? to_float(row[i]) : vectors.at(span, t, kv_head)[i];
    }
    return block.data();
}

// Encodes the keys and values of a span, both (rows of the pass, kv_heads, width), into their rows. Where a precision
// has blocks, the span must lie in one of them (spans_of); it is stored when it is full, and kept at f16 until then.
inline void store_span(Cache &cache, int layer, const Span &span, int kv_head, float *key, float *value) {
    auto store = [&](auto format, auto keys, const CacheRows &rows, const CacheRows &recent) {
        using Format = decltype(format);
        PassVectors vectors = {keys ? key : value, rows.kv_heads, rows.width};
        if constexpr (Format::key_groups) {
            const float *block = full_block(recent, layer, span, kv_head, vectors);
            for (int i = 0; block && i < group_size; i++) {
                int position = span.position / group_size * group_size + i;
                char *row = rows.at(layer, row_of(cache, span.sequence, position), kv_head);
                if constexpr (keys)
                    Format::encode_keys(row, i, block, rows.width);
                else
                    Format::encode(row, block + (size_t)i * rows.width, rows.width);
            }
        } else {
            for (int t = span.position; t < span.position + span.count; t++) {
                char *row = rows.at(layer, row_of(cache, span.sequence, t), kv_head);
                Format::encode(row, vectors.at(span, t, kv_head), rows.width);
            }
        }
    };
    for_each_side(cache, [&](auto keys, const Precision &type, const CacheRows &rows, const CacheRows &recent) {
        std::visit([&](auto format) { store(format, keys, rows, recent); }, type);
    });
}

// Keeps a sink: `turn` are the angles by which its key (key_width) is rotated, and from which it is turned back.
inline void store_sink(Cache &cache, int layer, int sequence, int position, int kv_head, const float *key,
                       const float *turn, const float *value) {
    int64_t row = (int64_t)sequence * std::get<Ring>(cache.layout).sinks + position;
    rotate((float *)cache.sink_keys.at(layer, row, kv_head), key, turn, cache.sink_keys.width, -1);
    std::copy(value, value + cache.sink_values.width, (float *)cache.sink_values.at(layer, row, kv_head));
}

// After all queries of a pass have read: keeps the vectors of a sequence's newest block at f16.
inline void keep_recent(Cache &cache, int layer, const Span &span, int kv_head, float *key, float *value) {
    if (span.position / group_size != (span.end - 1) / group_size) return;
    for_each_side(cache, [&](auto keys, const Precision &, const CacheRows &rows, const CacheRows &recent) {
        if (!recent.data) return;
        PassVectors vectors = {keys ? key : value, rows.kv_heads, rows.width};
        for (int t = span.position; t < span.position + span.count; t++) {
            char *row = recent.at(layer, span.sequence * group_size + t % group_size, kv_head);
            F16::encode(row, vectors.at(span, t, kv_head), recent.width);
        }
    });
}
