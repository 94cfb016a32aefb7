// The KV cache: in which row a position lives (layout), and how a row is stored (precision).
//
// A row is one position's vector of one KV head of one layer. K and V lie in memory of their own, each as
//   (layer, row, kv_head) rows of row_bytes        so, of 3 tokens, 2 KV heads and 4 numbers in bf16,
//   token 1, head 1 is at bytes (1 * 2 + 1) * 8 = 24..31.
// The formula of the whole:  bytes = 2 * sequences * capacity * layers * kv_heads * head_dim * bytes_per_number.
//
// Another layout or precision is one struct, and one entry of `Layout` or `Precision` below: the flags, their
// help and error messages, the choice at run time, the tables and the tests go through these lists.
// docs/09_make_your_own.md adds one step by step.
//
// Its parts: precisions; layouts; the lists of both; the cache and its memory; growing and shrinking; what a query
// sees, as a list of segments; storing.
#pragma once

#include <cfloat>
#include <climits>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/formats.h"
#include "base/team.h"

// ---- Precision: a row of `width` numbers as bytes ----------------------------------------------------------
//
// A row format says how many bytes a row takes, encodes one, and reads one number of it. A number that is not finite,
// or too large for its scale, makes all that share the scale NaN: better seen than wrong.

// Numbers one after another, in a format that the machine converts itself. With u, the unit roundoff (half the
// distance from 1 to the next number), a stored number is off by at most u times itself.
template <class Number>
struct PlainRow {
    static constexpr bool blocks = false;
    HOST_DEVICE static size_t row_bytes(int width) { return (size_t)width * sizeof(Number); }
    template <class Values, class Team = Alone>
    HOST_DEVICE static void encode(char *row, const Values &values, int width, Team team = {}) {
        for (int i = team.first(); i < width; i += team.step()) from_float(((Number *)row)[i], values[i]);
    }
    HOST_DEVICE static float number(const char *row, int channel) { return to_float(((const Number *)row)[channel]); }
};

// An f16 scale stands at the beginning of a row, and its largest magnitude becomes the code `largest`. A number is
// code * scale / divisor: the stored scale is `divisor` times as large, so that small rows have one.
HOST_DEVICE inline f16 scale_of_row(const char *row) {
    f16 scale;
    memcpy(&scale, row, sizeof scale);  // rows of an odd width are not aligned
    return scale;
}

// Writes the scale, and returns the distance of two codes, which a number is divided by; 0: all codes are 0.
template <class Values, class Team>
HOST_DEVICE inline float encode_scale(char *row, const Values &values, int width, int largest, int divisor, Team team) {
    float max = 0;
    for (int i = team.first(); i < width; i += team.step()) {
        float magnitude = fabsf(values[i]);
        if (!(magnitude <= FLT_MAX)) magnitude = INFINITY;  // NaN, too
        max = magnitude > max ? magnitude : max;
    }
    f16 scale = f16_above(team.largest(max) / (float)largest * (float)divisor);
    float step = to_float(scale) / (float)divisor;
    if (!(step <= FLT_MAX)) from_float(scale, NAN), step = 0;
    if (team.first() == 0) memcpy(row, &scale, sizeof scale);
    return step;
}

// Codes of a byte or more, with one scale before them. With the scale rounded up no code is cut off, and a number is
// off by at most half the distance of two codes: for int8 scale / 2, where scale <= max|x| / 127 * (1 + 2^-10) + 2^-24.
template <class Code, int largest, int divisor = 1>
struct ScaledRow {
    static constexpr bool blocks = false;
    static constexpr float code_unit = 1.0f / divisor;
    HOST_DEVICE static size_t row_bytes(int width) { return sizeof(f16) + (size_t)width * sizeof(Code); }
    HOST_DEVICE static const Code *codes(const char *row) { return (const Code *)(row + sizeof(f16)); }
    template <class Values, class Team = Alone>
    HOST_DEVICE static void encode(char *row, const Values &values, int width, Team team = {}) {
        float step = encode_scale(row, values, width, largest, divisor, team);
        Code *code = (Code *)(row + sizeof(f16));
        for (int i = team.first(); i < width; i += team.step()) from_float(code[i], step > 0 ? values[i] / step : 0);
    }
    HOST_DEVICE static float number(const char *row, int channel) {
        return to_float(scale_of_row(row)) / divisor * to_float(codes(row)[channel]);
    }
};

struct ScaleAndZero {
    f16 scale, zero;
};

// 32 numbers that share an f16 scale and an f16 zero point: x ~ zero + scale * code, codes from 0 to 2^bits - 1. The
// zero point is rounded down and the scale up, so a number is off by at most scale / 2, where scale <= (max - min +
// |min| * 2^-10 + 2^-24) / (2^bits - 1) * (1 + 2^-10) + 2^-24.
constexpr int group_size = 32;

template <int bits>
struct Group {
    ScaleAndZero both;
    Packed<bits> codes;
    HOST_DEVICE float number(int i) const { return to_float(both.zero) + to_float(both.scale) * (float)codes.code(i); }
};

// Of `count` <= 32 numbers x(0), x(1), ...
template <int bits, class Numbers>
HOST_DEVICE inline Group<bits> quantize(Numbers x, int count) {
    float low = FLT_MAX, high = -FLT_MAX;
    bool finite = true;
    for (int i = 0; i < count; i++) {
        float number = x(i);
        finite &= fabsf(number) <= FLT_MAX;
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
// A row of values is n = ceil(width / 32) groups, each of 32 channels of the token. Keys are quantized 32 positions at
// a time, in groups of one channel at 32 positions. Such a block takes the rows of its 32 positions; row i of it holds,
// for all 32 positions, the channels [i * n, i * n + n). So with D = 64, n = 2, and positions 32 .. 63:
//   row of 32: K of channels 0, 1      row of 33: channels 2, 3      ...      row of 63: channels 62, 63
// and neither pages nor rings need to know of groups. Until its 32 positions are there, a block's keys and values are
// kept at f16, in the sequence's residual block (Cache::residual_keys, residual_values).
template <int bits>
struct GroupedRow {
    static constexpr bool blocks = true;
    using G = Group<bits>;
    HOST_DEVICE static int groups(int width) { return (width + group_size - 1) / group_size; }
    HOST_DEVICE static size_t row_bytes(int width) { return groups(width) * sizeof(G); }
    HOST_DEVICE static const G &group(const char *row, int i) { return ((const G *)row)[i]; }
    template <class Values, class Team = Alone>
    HOST_DEVICE static void encode(char *row, const Values &values, int width, Team team = {}) {
        for (int g = team.first(); g < groups(width); g += team.step()) {
            int first = g * group_size, count = width - first < group_size ? width - first : group_size;
            ((G *)row)[g] = quantize<bits>([&](int i) -> float { return values[first + i]; }, count);
        }
    }
    HOST_DEVICE static float number(const char *row, int channel) {  // of a value
        return group(row, channel / group_size).number(channel % group_size);
    }
    // Row i of a block of keys: its channels of 32 positions; key(t, channel) is the number of its position t.
    template <class Keys, class Team = Alone>
    HOST_DEVICE static void encode_keys(char *row, int i, Keys key, int width, Team team = {}) {
        int n = groups(width);
        for (int g = team.first(); g < n && i * n + g < width; g += team.step())
            ((G *)row)[g] = quantize<bits>([&](int t) -> float { return key(t, i * n + g); }, group_size);
    }
    // In the row of which position of the block a channel of its keys is, and the number of position t there.
    HOST_DEVICE static int row_of_channel(int channel, int width) { return channel / groups(width); }
    HOST_DEVICE static float key_number(const char *row, int t, int channel, int width) {
        return group(row, channel % groups(width)).number(t);
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
struct FP8 : ScaledRow<fp8, 448, 256> {  // rows of up to 114,632
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
    HOST_DEVICE Visible visible(int layer_window) const { return {layer_window, 0}; }
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
    HOST_DEVICE Visible visible(int layer_window) const { return {layer_window, 0}; }
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
    HOST_DEVICE Visible visible(int layer_window) const {
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

// One of the types of a list, as std::variant holds it, for both machines: kernels cannot visit a variant. Two are
// equal if their bytes are: the types have no padding.
template <class List>
struct Choice;
template <class... Types>
struct Choice<std::variant<Types...>> {
    using List = std::variant<Types...>;
    int index = 0;
    alignas(Types...) char bytes[std::max({sizeof(Types)...})] = {};
    Choice() = default;
    template <class T, size_t i = 0>
    HOST_DEVICE static Choice of(const T &chosen) {
        if constexpr (std::is_same_v<T, std::variant_alternative_t<i, List>>) {
            Choice choice;
            choice.index = (int)i;
            if (!std::is_empty_v<T>) memcpy(choice.bytes, &chosen, sizeof chosen);
            return choice;
        } else {
            return of<T, i + 1>(chosen);
        }
    }
    Choice(const List &chosen) {
        static_assert(((std::is_empty_v<Types> || std::has_unique_object_representations_v<Types>)&&...));
        *this = std::visit([](auto &type) { return of(type); }, chosen);
    }
    bool operator==(const Choice &other) const {
        return index == other.index && memcmp(bytes, other.bytes, sizeof bytes) == 0;
    }
    // use(chosen). All threads of a warp take the same way.
    CALLS_ITS_ARGUMENT
    template <int i = 0, class Use>
    HOST_DEVICE auto visit(Use use) const {
        if constexpr (i + 1 < (int)sizeof...(Types))
            if (index != i) return visit<i + 1>(use);
        return use(*(const std::variant_alternative_t<i, List> *)bytes);
    }
};

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

// What operations are told of a cache, on both machines.
struct CacheView {
    Choice<Layout> layout;
    Choice<Precision> type_k, type_v;
    CacheRows keys, values;  // without memory on the naive path
    // Where a precision quantizes blocks of positions: each sequence's newest one at f16, row sequence * 32 + t % 32.
    CacheRows residual_keys, residual_values;
    // Ring: the sinks at f32, row sequence * sinks + t; keys not rotated.
    CacheRows sink_keys, sink_values;
    int sinks = 0;
    HOST_DEVICE int64_t row_of(int sequence, int position) const {
        return layout.visit([&](auto &chosen) { return chosen.row(sequence, position); });
    }
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
    CacheView view;
    std::vector<int> lengths;                  // (sequence): positions that are filled
    std::vector<int> reached;                  // (sequence): the most there were since it was empty
    std::vector<std::shared_ptr<void>> owned;  // the memory of all of them
    std::shared_ptr<PagePool> pool;
    Memory *memory = nullptr;   // the machine's
    int *page_table = nullptr;  // there: a copy of pool->table
};

// Bytes of a cache. Payload: the numbers at their precision, the formula on top of this file. Metadata: all that
// is needed beside them, which is scales, zero points, residual blocks at f16, sinks at f32, page tables.
struct CacheBytes {
    double payload = 0, metadata = 0;
    double total() const { return payload + metadata; }
};

inline bool has_blocks(const Precision &type) {
    return std::visit([](auto format) { return decltype(format)::blocks; }, type);
}

inline size_t row_bytes(const Precision &type, int width) {
    return std::visit([&](auto format) { return format.row_bytes(width); }, type);
}

inline double row_payload(const Precision &type, int width) {
    return std::visit([&](auto format) { return std::ceil(decltype(format)::code_bits * width / 8); }, type);
}

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

// Now: of a paged cache the pages that were handed out, of the others all rows.
inline CacheBytes bytes_of(const Cache &cache) {
    double rows = (double)cache.view.keys.rows_per_layer;
    if (auto *paged = std::get_if<Paged>(&cache.layout))
        rows = ((double)cache.pool->references.size() - (double)cache.pool->free.size()) * paged->page;
    return bytes_of(cache.shape, cache.layout, cache.type_k, cache.type_v, rows);
}

inline Layout open_layout(const CacheShape &shape, Layout layout) {
    std::visit([&](auto &chosen) { chosen.open(shape); }, layout);
    return layout;
}

inline int64_t rows_of(const CacheShape &shape, const Layout &layout) {
    return std::visit([&](auto &chosen) { return chosen.rows(shape); }, layout);
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

inline Visible visible_of(const Choice<Layout> &layout, int layer_window) {
    return layout.visit([&](auto &chosen) { return chosen.visible(layer_window); });
}

// Memory for `count` rows of each layer at a precision; none if it is 0. `what` is said where it cannot be had.
inline CacheRows open_rows(Cache &cache, const std::string &what, const Precision &type, int width, int64_t count) {
    CacheRows side = {nullptr, row_bytes(type, width), width, cache.shape.kv_heads, count};
    if (count == 0) return side;
    cache.owned.push_back(cache.memory->reserve(side.bytes(cache.shape.layers), what.c_str(),
                                                "lower -c or --window, or free some"));
    side.data = (char *)cache.owned.back().get();
    return side;
}

inline void open_pages(Cache &cache, Paged &paged) {
    cache.pool = std::make_shared<PagePool>();
    int64_t most = INT_MAX, wanted = paged.pages(cache.shape);
    if (wanted > most)
        fail("the KV cache has %lld pages, expected at most %lld: raise --page", (long long)wanted, (long long)most);
    PagePool &pool = *cache.pool;
    pool.table.assign((size_t)cache.shape.sequences * paged.pages_per_sequence, -1);
    pool.references.assign((size_t)wanted, 0);
    for (int page = (int)wanted - 1; page >= 0; page--) pool.free.push_back(page);  // page 0 goes first
    paged.table = pool.table.data();
    size_t bytes = pool.table.size() * sizeof(int);
    cache.owned.push_back(cache.memory->reserve(bytes, "the page table", "raise --page"));
    cache.page_table = (int *)cache.owned.back().get();
    cache.memory->write(cache.page_table, pool.table.data(), bytes);
    Paged there = paged;
    there.table = cache.page_table;
    cache.view.layout = Layout(there);
}

// Its memory is a machine's, which lives longer.
inline Cache open_cache(Memory &memory, const CacheShape &shape, Layout layout, Precision type_k, Precision type_v) {
    Cache cache;
    cache.shape = shape;
    cache.layout = open_layout(shape, layout);
    cache.type_k = type_k;
    cache.type_v = type_v;
    cache.memory = &memory;
    cache.lengths.assign(shape.sequences, 0);
    cache.reached.assign(shape.sequences, 0);
    int64_t rows = rows_of(shape, cache.layout), sequences = shape.sequences;
    double bytes = bytes_of(shape, cache.layout, type_k, type_v, (double)rows).total();
    Room room = memory.room();
    if (bytes > room.bytes) {
        fail(
            "the KV cache needs %.1f GiB for %lld positions, %s has %.1f GiB, enough for %.0f: lower -c or --window, "
            "or choose a smaller --kv type",
            bytes / 0x1p30, (long long)rows, room.name.c_str(), room.bytes / 0x1p30,
            std::floor((double)rows * room.bytes / bytes));
    }
    CacheView &view = cache.view;
    view.layout = cache.layout;
    view.type_k = type_k;
    view.type_v = type_v;
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
    if (auto *paged = std::get_if<Paged>(&cache.layout)) open_pages(cache, *paged);
    return cache;
}

// ---- Growing and shrinking ---------------------------------------------------------------------------------

inline int pages_for(const Paged &paged, int positions) {
    return (int)(((int64_t)positions + paged.page - 1) / paged.page);
}

// Hands out the pages that a sequence needs to grow from `from` to `to` positions: there are as many.
inline void take_pages(Cache &cache, const Paged &paged, int sequence, int from, int to) {
    PagePool &pool = *cache.pool;
    int first = pages_for(paged, from), last = pages_for(paged, to);
    size_t changed = (size_t)sequence * paged.pages_per_sequence + first;
    for (int i = 0; i < last - first; i++) {
        int page = pool.free.back();
        pool.free.pop_back();
        pool.references[page] = 1;
        pool.table[changed + i] = page;
    }
    if (last > first)
        cache.memory->write(cache.page_table + changed, &pool.table[changed], (last - first) * sizeof(int));
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
        for (const CacheRows *side : {&cache.view.keys, &cache.view.values})
            for (int layer = 0; layer < cache.shape.layers; layer++)
                memset(side->at(layer, (int64_t)page * paged.page, 0), 0xff, paged.page * side->stride());
#endif
    }
}

// Fails unless the cache has room for `count` more positions of a sequence.
inline void require_room(const Cache &cache, int sequence, int count) {
    int first = cache.lengths.at(sequence);
    if (count > limit_of(cache) - first) {
        fail("the cache holds %d positions, %lld are needed: shorten the prompt or raise -c", limit_of(cache),
             (long long)first + count);
    }
    auto *paged = std::get_if<Paged>(&cache.layout);
    int pages = paged ? pages_for(*paged, first + count) - pages_for(*paged, first) : 0;
    if (paged && pages > (int)cache.pool->free.size()) {
        fail("the cache has %zu free pages of %d positions, %d are needed: end a sequence, or make the pool larger",
             cache.pool->free.size(), paged->page, pages);
    }
}

// Makes room for `count` more positions of a sequence and returns the first of them; they are then to be stored.
inline int grow(Cache &cache, int sequence, int count) {
    require_room(cache, sequence, count);
    int first = cache.lengths[sequence];
    if (auto *paged = std::get_if<Paged>(&cache.layout)) take_pages(cache, *paged, sequence, first, first + count);
    cache.lengths[sequence] += count;
    cache.reached[sequence] = std::max(cache.reached[sequence], cache.lengths[sequence]);
    return first;
}

// Number `channel` of position t (of its block) of K or V in a block that is full; row_at(i) is the row of position i.
template <bool keys, class Format, class RowAt>
HOST_DEVICE float stored_number(RowAt row_at, int t, int channel, int width) {
    if constexpr (keys && Format::blocks)
        return Format::key_number(row_at(Format::row_of_channel(channel, width)), t, channel, width);
    else
        return Format::number(row_at(t), channel);
}

// The block in which a cut sequence ends may be quantized already: its positions go back to the residual block, as they
// read. The rows come from the machine's memory one by one: this is rare.
template <bool keys>
void restore_residual(Cache &cache, int sequence, int length) {
    const CacheRows &rows = keys ? cache.view.keys : cache.view.values;
    const CacheRows &residual = keys ? cache.view.residual_keys : cache.view.residual_values;
    int begin = (length - 1) / group_size * group_size, width = rows.width, heads = rows.kv_heads;
    std::vector<char> block(group_size * rows.stride()), row(residual.stride());
    auto restore = [&](auto format, int layer) {
        for (int i = 0; i < group_size; i++)
            cache.memory->read(&block[i * rows.stride()], rows.at(layer, row_of(cache, sequence, begin + i), 0),
                               rows.stride());
        for (int t = 0; t < length - begin; t++) {
            for (int i = 0; i < heads * width; i++) {
                auto row_at = [&](int at) { return &block[at * rows.stride() + i / width * rows.row_bytes]; };
                float x = stored_number<keys, decltype(format)>(row_at, t, i % width, width);
                // The largest f16 may read as half a step more, which f16 has not.
                from_float(((f16 *)row.data())[i], x > 65504 ? 65504 : x < -65504 ? -65504 : x);
            }
            cache.memory->write(residual.at(layer, sequence * group_size + t, 0), row.data(), residual.stride());
        }
    };
    std::visit(
        [&](auto format) {
            for (int layer = 0; decltype(format)::blocks && layer < cache.shape.layers; layer++) restore(format, layer);
        },
        keys ? cache.type_k : cache.type_v);
}

// Calls pass(), which lets sequences grow and stores their new positions: all of them or none. If it fails, for want of
// pages or by Ctrl-C, each sequence has its old length and pages again, and may go on. What the pass did write is
// written anew before it is read: rows behind the old length, and of a ring those that it has to spare, since the rows
// that the last pass overwrote are not seen from the old length on. `reached` stays, so that shrink() knows of them.
// A residual block keeps what it had as long as a pass that begins within a block ends in it, too (prefill_pass);
// where the old length ends a block, the pass used it for the next one: its positions come back as they read.
template <class Pass>
void all_or_nothing(Cache &cache, Pass pass) {
    const std::vector<int> lengths = cache.lengths;
    try {
        pass();
    } catch (...) {
        for (int sequence = cache.shape.sequences - 1; sequence >= 0; sequence--) {
            int from = cache.lengths[sequence], length = lengths[sequence];
            if (auto *paged = std::get_if<Paged>(&cache.layout)) release_pages(cache, *paged, sequence, from, length);
            cache.lengths[sequence] = length;
            if (from == length || length == 0 || length % group_size) continue;
            restore_residual<true>(cache, sequence, length);
            restore_residual<false>(cache, sequence, length);
        }
        throw;
    }
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
    if (length > 0 && (length - 1) / group_size != (from - 1) / group_size) {
        restore_residual<true>(cache, sequence, length);
        restore_residual<false>(cache, sequence, length);
    }
    if (auto *paged = std::get_if<Paged>(&cache.layout)) release_pages(cache, *paged, sequence, from, length);
    cache.lengths[sequence] = length;
}

// ---- What a query sees -------------------------------------------------------------------------------------

// Some positions that follow one another in a sequence, and their rows in a pass.
struct Span {
    int row, count;  // rows [row, row + count) of the pass
    int sequence, position;
    int first, end;  // positions [first, end) of the sequence are in this pass: what lies before is in the cache
};

// Keys or values of a pass: (rows, heads, width).
struct PassVectors {
    float *start;
    int heads, width;
    HOST_DEVICE float *at(const Span &span, int position, int head) const {
        return start + ((int64_t)(span.row + position - span.position) * heads + head) * width;
    }
};

// Where the keys or the values of a segment are: those of position t in row layout.row(sequence, t).
struct Side {
    const char *start;  // row 0 of a layer and KV head
    size_t stride;      // bytes from a row to the next one's
    int width;
    Choice<Precision> type;
    Choice<Layout> layout;
    int sequence;
    HOST_DEVICE const char *row(int t) const {
        return start + layout.visit([&](auto &chosen) { return chosen.row(sequence, t); }) * (int64_t)stride;
    }
};

// Positions [begin, end) that a query sees, in one kind of memory. Keys are rotated by `shift` positions more when they
// are read, or, if they are unrotated, by their own position and `shift`.
struct Segment {
    int begin, end;
    Side keys, values;
    int shift = 0;
    bool unrotated = false;
};

// A query reads a short list of them, from the first position to the last.
struct Segments {
    Segment list[4];
    int count = 0;
    HOST_DEVICE void add(int begin, int end, const Side &keys, const Side &values, int shift = 0,
                         bool unrotated = false) {
        if (begin < end) list[count++] = {begin, end, keys, values, shift, unrotated};
    }
};

// What the keys and values of a layer and KV head are read from: the cache's rows, the residual block, the sinks, and
// the pass's own vectors, as if they were an f32 cache.
struct HeadRows {
    const CacheView &cache;
    int layer, kv_head;
    PassVectors own_keys, own_values;

    HOST_DEVICE Side stored(const CacheRows &rows, const Choice<Precision> &type, int sequence) const {
        return {rows.at(layer, 0, kv_head), rows.stride(), rows.width, type, cache.layout, sequence};
    }
    HOST_DEVICE Side residual(const CacheRows &rows, int sequence) const {  // a ring of 32
        Ring ring;
        ring.slots = group_size;
        return {rows.at(layer, 0, kv_head), rows.stride(), rows.width, Choice<Precision>::of(F16{}),
                Choice<Layout>::of(ring),   sequence};
    }
    HOST_DEVICE Side sink(const CacheRows &rows, int sequence) const {
        return {rows.at(layer, 0, kv_head),
                rows.stride(),
                rows.width,
                Choice<Precision>::of(F32{}),
                Choice<Layout>::of(Contiguous{cache.sinks}),
                sequence};
    }
    HOST_DEVICE Side own(const PassVectors &vectors, const Span &span) const {  // position t is row t + row - position
        int64_t first = (int64_t)(span.row - span.position) * vectors.heads + kv_head;
        return {(const char *)(vectors.start + first * vectors.width),
                (size_t)vectors.heads * vectors.width * sizeof(float),
                vectors.width,
                Choice<Precision>::of(F32{}),
                Choice<Layout>::of(Contiguous{INT_MAX}),
                0};
    }
};

HOST_DEVICE inline bool has_blocks(const Choice<Precision> &type) {
    return type.visit([](auto format) { return decltype(format)::blocks; });
}

// What the queries of a span see, without sinks: from the first one's first position to the last one's own. Where a
// precision has blocks, the span lies in one of 32 positions, and reads its own block at f16: what earlier passes left
// in the residual block, then the pass's own vectors.
HOST_DEVICE inline void add_rows(Segments &seen, const HeadRows &head, const Span &span, const Visible &visible) {
    const CacheView &cache = head.cache;
    int first = visible.first(span.position), end = span.position + span.count;
    Side own_keys = head.own(head.own_keys, span), own_values = head.own(head.own_values, span);
    if (!cache.keys.data) return seen.add(first, end, own_keys, own_values);  // the naive path
    bool key_blocks = has_blocks(cache.type_k), value_blocks = has_blocks(cache.type_v);
    Side keys = head.stored(cache.keys, cache.type_k, span.sequence);
    Side values = head.stored(cache.values, cache.type_v, span.sequence);
    if (!key_blocks && !value_blocks) return seen.add(first, end, keys, values);
    int block = span.position / group_size * group_size, begin = first > block ? first : block;
    seen.add(first, block, keys, values);
    seen.add(begin, span.first, key_blocks ? head.residual(cache.residual_keys, span.sequence) : keys,
             value_blocks ? head.residual(cache.residual_values, span.sequence) : values);
    seen.add(begin > span.first ? begin : span.first, end, key_blocks ? own_keys : keys,
             value_blocks ? own_values : values);
}

// And the sinks, where positions between them and the window of the query at `position` were dropped.
HOST_DEVICE inline void add_sinks(Segments &seen, const HeadRows &head, const Span &span, const Visible &visible) {
    if (visible.sinks == 0 || !visible.dropped(span.position)) return;
    bool cached = head.cache.keys.data;
    Side keys = cached ? head.sink(head.cache.sink_keys, span.sequence) : head.own(head.own_keys, span);
    Side values = cached ? head.sink(head.cache.sink_values, span.sequence) : head.own(head.own_values, span);
    seen.add(0, visible.sinks, keys, values, visible.shift(span.position), cached);
}

// ---- Storing -----------------------------------------------------------------------------------------------

// A block of 32 positions that is full with this pass: (t, channel), all numbers as f16 has them. What earlier passes
// left is in the residual block.
struct FullBlock {
    const char *residual;  // row 0 of the sequence's
    size_t stride;
    PassVectors own;
    Span span;
    int kv_head;
    HOST_DEVICE float operator()(int t, int channel) const {
        int position = span.position / group_size * group_size + t;
        if (position < span.first) return F16::number(residual + t * stride, channel);
        return own.at(span, position, kv_head)[channel];
    }
};

struct BlockVector {  // position t of it
    const FullBlock &block;
    int t;
    HOST_DEVICE float operator[](int channel) const { return block(t, channel); }
};

// Encodes the key or value of one position (a span of 1) into its row. Where a precision has blocks, the whole block is
// encoded when its last position comes.
template <bool keys, class Team>
HOST_DEVICE void store_side(const CacheView &cache, int layer, const Span &span, int kv_head, const PassVectors &own,
                            Team team) {
    const CacheRows &rows = keys ? cache.keys : cache.values;
    const CacheRows &residual = keys ? cache.residual_keys : cache.residual_values;
    auto row_at = [&](int t) { return rows.at(layer, cache.row_of(span.sequence, t), kv_head); };
    auto store = [&](auto format) {
        using Format = decltype(format);
        if constexpr (!Format::blocks) {
            Format::encode(row_at(span.position), own.at(span, span.position, kv_head), rows.width, team);
        } else if (span.position % group_size == group_size - 1) {
            const char *kept = residual.at(layer, (int64_t)span.sequence * group_size, kv_head);
            FullBlock block = {kept, residual.stride(), own, span, kv_head};
            for (int i = 0; i < group_size; i++) {
                char *row = row_at(span.position - group_size + 1 + i);
                if constexpr (keys)
                    Format::encode_keys(row, i, block, rows.width, team);
                else
                    Format::encode(row, BlockVector{block, i}, rows.width, team);
            }
        }
    };
    (keys ? cache.type_k : cache.type_v).visit(store);
}

// Keeps a sink: its key turned back by its angles, cos_sin (D), from which it was rotated.
template <class Team>
HOST_DEVICE void store_sink(const CacheView &cache, int layer, const Span &span, int kv_head, const float *key,
                            const float *value, const float *cos_sin, Team team) {
    int64_t row = (int64_t)span.sequence * cache.sinks + span.position;
    float *to_key = (float *)cache.sink_keys.at(layer, row, kv_head), *to_value = nullptr;
    int half = cache.sink_keys.width / 2;
    for (int i = team.first(); i < half; i += team.step()) {
        float a = key[i], b = key[i + half], cosine = cos_sin[i], sine = cos_sin[i + half];
        to_key[i] = a * cosine + b * sine;
        to_key[i + half] = b * cosine - a * sine;
    }
    to_value = (float *)cache.sink_values.at(layer, row, kv_head);
    for (int i = team.first(); i < cache.sink_values.width; i += team.step()) to_value[i] = value[i];
}

// Stores one position of a layer and KV head, before the queries of the pass read.
template <class Team>
HOST_DEVICE void store_position(const CacheView &cache, int layer, const Span &span, int kv_head,
                                const PassVectors &keys, const PassVectors &values, const float *cos_sin, Team team) {
    store_side<true>(cache, layer, span, kv_head, keys, team);
    store_side<false>(cache, layer, span, kv_head, values, team);
    if (span.position < cache.sinks)
        store_sink(cache, layer, span, kv_head, keys.at(span, span.position, kv_head),
                   values.at(span, span.position, kv_head), cos_sin, team);
}

// And after they have read: a position of the sequence's newest block goes to the residual block.
template <class Team>
HOST_DEVICE void keep_position(const CacheView &cache, int layer, const Span &span, int kv_head,
                               const PassVectors &keys, const PassVectors &values, Team team) {
    if (span.position / group_size != (span.end - 1) / group_size) return;
    int64_t row = (int64_t)span.sequence * group_size + span.position % group_size;
    auto keep = [&](const CacheRows &residual, const PassVectors &own) {
        if (!residual.data) return;
        F16::encode(residual.at(layer, row, kv_head), own.at(span, span.position, kv_head), residual.width, team);
    };
    keep(cache.residual_keys, keys);
    keep(cache.residual_values, values);
}
