// cache.h: how many bytes a cache takes, where each row lies in them, and what comes back from a row. The tests go
// through the lists of layouts and precisions, so that a new one is tested from its first day. Its parts: bytes, where
// rows are, what comes back, numbers at the edge, growing and shrinking, pages, the ring, names and what cannot be had.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#define POISON_FREED_PAGES
#include "../cache.h"

#include <doctest/doctest.h>

#include <climits>
#include <functional>
#include <limits>
#include <map>
#include <set>

#include "../attention.cu"
#include "reference.h"

using reference::Random;
using Vector = std::vector<float>;

constexpr float infinity = std::numeric_limits<float>::infinity();

// ---- Helpers -----------------------------------------------------------------------------------------------

template <class List>
std::vector<List> all_of() {
    std::vector<List> all;
    for_each_type<List>([&](auto type) { all.push_back(type); });
    return all;
}

// Calls use(layout, type_k, type_v) for all combinations there are.
template <class Use>
void for_each_cache(Use use) {
    for (const Layout &layout : all_of<Layout>()) {
        for (const Precision &type_k : all_of<Precision>()) {
            for (const Precision &type_v : all_of<Precision>()) {
                std::string names = std::string(name_of(layout)) + " " + name_of(type_k) + " " + name_of(type_v);
                CAPTURE(names);
                use(layout, type_k, type_v);
            }
        }
    }
}

bool same(float a, float b) {
    return (std::isnan(a) && std::isnan(b)) || bit_cast<uint32_t>(a) == bit_cast<uint32_t>(b) || (a == 0 && b == 0);
}
// How many of the numbers differ.
int differing(const Vector &a, const Vector &b) {
    int differing = (int)std::max(a.size(), b.size()) - (int)std::min(a.size(), b.size());
    for (size_t i = 0; i < std::min(a.size(), b.size()); i++) differing += !same(a[i], b[i]);
    return differing;
}

// The one line that `action` fails with; "" when it does not fail.
std::string error_of(const std::function<void()> &action) {
    try {
        action();
    } catch (const Error &error) {
        return error.what();
    }
    return "";
}

bool contains(const std::string &line, const std::string &part) { return line.find(part) != std::string::npos; }

int block_begin(int position) { return position / 32 * 32; }

// What a row has instead of numbers at the channels [c, c + count), count <= lanes, as attention loads it.
template <class Format>
void load_codes(float *piece, const char *row, int c, int count) {
    if constexpr (Format::key_groups)
        store(piece, load(&Format::group(row, c / 32).codes, c % 32 / lanes));
    else
        store(piece, count == lanes ? Format::decode(row, c) : Format::decode_part(row, c, count));
}

template <class Format>
ScaleAndZero scale_and_zero(const char *row, int channel) {
    if constexpr (Format::key_groups)
        return Format::group(row, channel / 32).both;
    else
        return Format::scale_and_zero(row, channel);
}

// A row of its own, decoded a Vec at a time.
template <class Format>
Vector decoded_row(const char *row, int width) {
    Vector numbers(width);
    for (int c = 0; c < width; c += lanes) {
        float piece[lanes];
        int count = std::min(lanes, width - c);
        load_codes<Format>(piece, row, c, count);
        for (int i = 0; i < count; i++) {
            numbers[c + i] = piece[i];
            if constexpr (Format::scale_channels > 0) {
                ScaleAndZero both = scale_and_zero<Format>(row, c + i);
                numbers[c + i] = to_float(both.zero) + to_float(both.scale) * piece[i];
            }
        }
    }
    return numbers;
}

// A vector as it reads when it is stored by itself, as a value.
template <class Format>
Vector round_trip(const Vector &numbers) {
    int width = (int)numbers.size();
    std::vector<char> row(Format::row_bytes(width));
    Format::encode(row.data(), numbers.data(), width);
    return decoded_row<Format>(row.data(), width);
}

// The same by the definition. A precision that reference.h does not define yet is taken at its word here, and held to
// its unit roundoff, its bytes and its neighbours below.
Vector defined_vector(const Precision &type, const Vector &numbers) {
    Vector read = reference::read_vector(name_of(type), numbers);
    if (!read.empty()) return read;
    return std::visit([&](auto format) { return round_trip<decltype(format)>(numbers); }, type);
}

// A position's key out of the rows of its block: channel c is in row c / n, group c % n.
template <class Format>
Vector decoded_key(const Cache &cache, int layer, int sequence, int position, int head) {
    int width = cache.keys.width, n = (width + 31) / 32, t = position % 32;
    Vector numbers(width);
    for (int c = 0; c < width; c++) {
        const char *row = cache.keys.at(layer, row_of(cache, sequence, block_begin(position) + c / n), head);
        const auto &group = Format::group(row, c % n);
        float codes[lanes];
        store(codes, load(&group.codes, t / lanes));
        numbers[c] = to_float(group.both.zero) + to_float(group.both.scale) * codes[t % lanes];
        REQUIRE(same(numbers[c], group.number(t)));
    }
    return numbers;
}

// What is stored of a position, in a full block if the precision has blocks.
Vector stored_vector(const Cache &cache, bool keys, int layer, int sequence, int position, int head) {
    const CacheRows &side = keys ? cache.keys : cache.values;
    auto read = [&](auto format) {
        using Format = decltype(format);
        if constexpr (Format::key_groups)
            if (keys) return decoded_key<Format>(cache, layer, sequence, position, head);
        return decoded_row<Format>(side.at(layer, row_of(cache, sequence, position), head), side.width);
    };
    return std::visit(read, keys ? cache.type_k : cache.type_v);
}

// What is kept of a position of the newest block.
Vector recent_vector(const Cache &cache, bool keys, int layer, int sequence, int position, int head) {
    const CacheRows &recent = keys ? cache.recent_keys : cache.recent_values;
    return decoded_row<F16>(recent.at(layer, sequence * 32 + position % 32, head), recent.width);
}

// One side, layer and head of a sequence as the definitions have it.
struct Column {
    Precision type;
    bool keys, blocks;
    std::vector<Vector> recent;  // (position): as the queries of the same block read it
    std::vector<Vector> stored;  // (position): as all others do; where there are blocks, of full ones
    int kept = -1;               // the block whose positions are kept at f16

    void append(const Vector &x) {
        recent.push_back(blocks ? reference::read_vector("f16", x) : x);
        kept = (int)(recent.size() - 1) / 32;
        if (!blocks) stored.push_back(defined_vector(type, x));
        if (!blocks || recent.size() % 32) return;
        std::vector<Vector> block(recent.end() - 32, recent.end());
        if (keys) block = reference::read_block(name_of(type), block);
        for (const Vector &vector : block) stored.push_back(keys ? vector : defined_vector(type, vector));
    }
    void shrink(int length) {
        for (int t = block_begin(length); blocks && kept != length / 32 && t < length; t++)
            recent[t] = reference::read_vector("f16", stored[t]);
        if (length % 32) kept = length / 32;
        recent.resize(length);
        stored.resize(blocks ? block_begin(length) : length);
    }
};

// A cache, and beside it what it must hold.
struct Scene {
    Cache cache;
    std::vector<Column> columns;  // (side, layer, kv_head, sequence)
    uint64_t stored = 0;          // vectors so far: no two get the same numbers
    std::function<Vector(Random &, int width)> numbers;

    Scene(const CacheShape &shape, const Layout &layout, const Precision &type_k, const Precision &type_v)
        : cache(open_cache(shape, layout, type_k, type_v)) {
        for (bool keys : {true, false}) {
            const Precision &type = keys ? type_k : type_v;
            for (int i = 0; i < shape.layers * shape.kv_heads * shape.sequences; i++)
                columns.push_back({type, keys, has_blocks(type), {}, {}, -1});
        }
        numbers = [](Random &random, int width) {
            Vector vector = reference::random_floats(random, width, -4, 4);
            vector[width / 2] *= 50;  // a few channels are large at every position
            return vector;
        };
    }
    Column &column(bool keys, int layer, int head, int sequence) {
        const CacheShape &s = cache.shape;
        return columns[(((keys ? 0 : s.layers) + layer) * s.kv_heads + head) * s.sequences + sequence];
    }

    // One pass of the engine: all layers store, read and keep. `counts` new positions of each of `sequences`.
    void pass(const std::vector<int> &sequences, const std::vector<int> &counts) {
        const CacheShape &s = cache.shape;
        std::vector<int> row_sequence, row_position;
        for (size_t i = 0; i < sequences.size(); i++) {
            int length = (int)column(true, 0, 0, sequences[i]).recent.size();
            for (int t = length; t < length + counts[i]; t++) {
                row_sequence.push_back(sequences[i]);
                row_position.push_back(t);
            }
        }
        int rows = (int)row_sequence.size();
        std::vector<Span> spans = spans_of(row_sequence.data(), row_position.data(), rows, 32, true);
        for (int layer = 0; layer < s.layers; layer++) {
            Vector pass_keys = pass_side(true, layer, row_sequence),
                   pass_values = pass_side(false, layer, row_sequence);
            for (const Span &span : spans)
                for (int head = 0; head < s.kv_heads; head++)
                    store_span(cache, layer, span, head, pass_keys.data(), pass_values.data());
            for (size_t i = 0; i < sequences.size(); i++) {
                int end = (int)column(true, layer, 0, sequences[i]).recent.size();
                REQUIRE(wrong(sequences[i], layer, end - counts[i], end) == 0);
            }
            for (int row = 0; row < rows; row++)
                REQUIRE(wrong_fresh(layer, row_sequence[row], row_position[row], row, pass_keys, pass_values) == 0);
            std::reverse(spans.begin(), spans.end());  // threads take them in any order
            for (const Span &span : spans)
                for (int head = 0; head < s.kv_heads; head++)
                    keep_recent(cache, layer, span, head, pass_keys.data(), pass_values.data());
        }
    }
    // Vectors of one side of a pass, (rows, kv_heads, width), which the columns take, too.
    Vector pass_side(bool keys, int layer, const std::vector<int> &row_sequence) {
        Vector pass;
        int width = keys ? cache.keys.width : cache.values.width;
        for (int sequence : row_sequence) {
            for (int head = 0; head < cache.shape.kv_heads; head++) {
                Random random{++stored};
                Vector vector = numbers(random, width);
                column(keys, layer, head, sequence).append(vector);
                pass.insert(pass.end(), vector.begin(), vector.end());
            }
        }
        return pass;
    }
    // Grows a sequence and stores, in passes as long as the layout allows.
    void append(int sequence, int count) {
        grow(cache, sequence, count);
        for (int size; count > 0; count -= size) pass({sequence}, {size = std::min(count, chunk_of(cache))});
    }
    void shrink_to(int sequence, int length) {
        shrink(cache, sequence, length);
        for (size_t i = sequence; i < columns.size(); i += cache.shape.sequences)
            if ((int)columns[i].recent.size() > length) columns[i].shrink(length);
    }

    // Numbers of the past that the queries at [first, end) read wrongly, when what they store is stored.
    int wrong(int sequence, int layer, int first, int end) {
        int wrong = 0, visible = visible_of(cache.layout, 0).first(first);
        for (bool keys : {true, false}) {
            for (int head = 0; head < cache.shape.kv_heads; head++) {
                const Column &c = column(keys, layer, head, sequence);
                for (int t = c.blocks ? block_begin(visible) : visible; t < (c.blocks ? block_begin(end) : end); t++)
                    wrong += differing(stored_vector(cache, keys, layer, sequence, t, head), c.stored[t]);
                for (int t = block_begin(first); c.blocks && t < first; t++)
                    wrong += differing(recent_vector(cache, keys, layer, sequence, t, head), c.recent[t]);
            }
        }
        return wrong;
    }
    int wrong(int sequence) {
        int wrong_numbers = 0, length = cache.lengths[sequence];
        for (int layer = 0; layer < cache.shape.layers; layer++)
            wrong_numbers += wrong(sequence, layer, length, length);
        return wrong_numbers;
    }
    // And of this pass's own vectors, which are left as later queries will see them.
    int wrong_fresh(int layer, int sequence, int position, int row, const Vector &keys, const Vector &values) {
        int wrong = 0;
        for (bool side : {true, false}) {
            size_t width = side ? cache.keys.width : cache.values.width;
            for (int head = 0; head < cache.shape.kv_heads; head++) {
                const float *x = &(side ? keys : values)[(row * cache.shape.kv_heads + head) * width];
                wrong += differing({x, x + width}, column(side, layer, head, sequence).recent[position]);
            }
        }
        return wrong;
    }
};

// Bytes of memory that a cache has taken, rows and tables.
double memory_of(const Cache &cache) {
    double bytes = 0;
    for (const CacheRows *rows :
         {&cache.keys, &cache.values, &cache.recent_keys, &cache.recent_values, &cache.sink_keys, &cache.sink_values})
        bytes += (double)rows->bytes(cache.shape.layers);
    if (cache.pool) bytes += sizeof(int) * (double)(cache.pool->table.size() + 2 * cache.pool->references.size());
    return bytes;
}

// ---- Bytes -------------------------------------------------------------------------------------------------

CacheBytes bytes_for(const CacheShape &shape, const Layout &layout, const Precision &type_k, const Precision &type_v) {
    Layout opened = open_layout(shape, layout);
    return bytes_of(shape, opened, type_k, type_v, (double)rows_of(shape, opened));
}

TEST_CASE("3 tokens, 2 KV heads, 4 numbers in bf16: 48 bytes of K and 48 of V, and where they are") {
    Cache cache = open_cache({1, 2, 4, 4, 1, 3}, Contiguous{}, BF16{}, BF16{});
    CHECK(bytes_of(cache).payload == 96);
    CHECK(bytes_of(cache).metadata == 0);
    CHECK(cache.keys.bytes(1) == 48);
    CHECK(cache.values.bytes(1) == 48);
    CHECK(cache.keys.at(0, row_of(cache, 0, 1), 1) - cache.keys.data == 24);
    CHECK(cache.keys.row_bytes == 8);
    CHECK(cache.values.at(0, row_of(cache, 0, 0), 0) == cache.values.data);
    CHECK(cache.values.at(0, row_of(cache, 0, 2), 1) - cache.values.data == 40);
    CHECK(cache.keys.stride() == 16);
}

TEST_CASE("bytes follow the formula for the models people ask about") {
    struct Case {
        int layers, kv_heads, width, sequences, capacity;
        Precision type;
        double payload;
    };
    const double GiB = 0x1p30, MiB = 0x1p20;
    const std::vector<Case> cases = {
        {80, 64, 128, 1, 32768, BF16{}, 85899345920},    // 80 GiB
        {1, 64, 128, 1, 32768, BF16{}, GiB},             // a layer of it
        {80, 8, 128, 1, 32768, BF16{}, 10 * GiB},        // GQA
        {80, 1, 128, 1, 32768, BF16{}, 1.25 * GiB},      // MQA
        {80, 64, 128, 1, 32768, Int8{}, 40 * GiB},       //
        {80, 8, 128, 1, 32768, Int8{}, 5 * GiB},         //
        {80, 64, 128, 1, 32768, Int4{}, 20 * GiB},       //
        {80, 64, 128, 1, 32768, Int2{}, 10 * GiB},       //
        {80, 64, 128, 1, 16384, BF16{}, 40 * GiB},       // what 40 GiB hold
        {32, 32, 128, 4, 4096, BF16{}, 8 * GiB},         // a batch
        {32, 8, 128, 1, 8192, BF16{}, GiB},              //
        {32, 32, 128, 1, 8192, BF16{}, 4 * GiB},         //
        {32, 32, 128, 1, 1, F16{}, 524288},              // one token
        {48, 56, 128, 128, 1024, F16{}, 180388626432},   //
        {1, 8, 128, 1, 16, BF16{}, 65536},               // 16 positions of a layer
        {80, 8, 128, 1, 16, BF16{}, 5 * MiB},            //
        {80, 8, 128, 1, 57 * 16, BF16{}, 285 * MiB},     //
        {80, 64, 128, 1, 32768, F32{}, 2 * 85899345920}  //
    };
    for (const Case &c : cases) {
        CacheShape shape = {c.layers, c.kv_heads, c.width, c.width, c.sequences, c.capacity};
        CacheBytes bytes = bytes_for(shape, Contiguous{}, c.type, c.type);
        CHECK(bytes.payload == c.payload);
        if (!has_blocks(c.type))
            CHECK(bytes.total() ==
                  2.0 * c.sequences * c.capacity * c.layers * c.kv_heads *
                      std::visit([&](auto format) { return (double)format.row_bytes(c.width); }, c.type));
        // Pages of 16, which divides all of these but one token, take the same, and their tables.
        if (c.capacity % 16) continue;
        CacheBytes paged = bytes_for(shape, Paged{}, c.type, c.type);
        CHECK(paged.payload == c.payload);
        CHECK(paged.metadata - bytes.metadata == sizeof(int) * 3.0 * c.sequences * c.capacity / 16);
    }
}

TEST_CASE("scales, zero points, recent blocks, sinks and tables are metadata") {
    CacheShape shape = {80, 64, 128, 128, 1, 32768};
    double rows = 2.0 * 80 * 64 * 32768;
    CacheBytes int8 = bytes_for(shape, Contiguous{}, Int8{}, Int8{});
    CHECK(int8.metadata / int8.payload == 0.015625);  // an f16 a row of 128
    CHECK(int8.metadata == 2 * rows);
    CHECK(row_payload(Int4{}, 33) == 17);  // whole bytes
    CHECK(row_payload(Int2{}, 37) == 10);
    // Four groups a row, each with two f16; and 32 positions at f16.
    CHECK(bytes_for(shape, Contiguous{}, Int4{}, Int4{}).metadata == rows * 16 + 2.0 * 80 * 64 * 32 * 128 * 2);
    CHECK(bytes_for(shape, Contiguous{}, Int2{}, F16{}).metadata == rows / 2 * 16 + 80.0 * 64 * 32 * 128 * 2);
    shape.window = 1000, shape.sinks = 4;
    double ring_rows = (double)rows_of(shape, open_layout(shape, Ring{}));
    CHECK(ring_rows >= 1004);
    CacheBytes ring = bytes_for(shape, Ring{}, F16{}, F16{});
    CHECK(ring.payload == 2.0 * 80 * 64 * ring_rows * 128 * 2);
    CHECK(ring.metadata == 2.0 * 80 * 64 * 4 * 128 * 4);
    // One sequence of 100 positions at 7 a page, and a pool of 9 pages: 15 entries, then a counter and a place each.
    shape.page = 7, shape.capacity = 100, shape.pages = 9;
    CacheBytes paged = bytes_for(shape, Paged{}, BF16{}, BF16{});
    CHECK(paged.payload == 2.0 * 80 * 64 * 63 * 128 * 2);
    CHECK(paged.metadata == 4 * (15 + 2 * 9));
}

TEST_CASE("40 GiB hold 16,384 positions of 80 layers, 64 heads of 128, bf16; a fourfold at int4, but for its scales") {
    auto positions = [](const Precision &type) {
        CacheShape shape = {80, 64, 128, 128, 1, 1};
        Layout layout = open_layout(shape, Contiguous{});
        double one = bytes_of(shape, layout, type, type, 2).total() - bytes_of(shape, layout, type, type, 1).total();
        return std::floor(40 * 0x1p30 / one);
    };
    CHECK(positions(BF16{}) == 16384);
    CHECK(positions(Int4{}) == std::floor(16384 * 16 / 5.0));
}

TEST_CASE("widths of K and V are apart: one row of 576 serves as K, its first 512 as V") {
    CacheShape shape = {60, 1, 576, 512, 1, 1000};
    CacheBytes bytes = bytes_for(shape, Contiguous{}, BF16{}, Int8{});
    CHECK(bytes.payload == 60.0 * 1000 * (576 * 2 + 512));
    CHECK(bytes.metadata == 60.0 * 1000 * 2);
    for_each_cache([&](const Layout &layout, const Precision &type_k, const Precision &type_v) {
        CacheBytes both = bytes_for(shape, layout, type_k, type_v);
        CacheShape only_k = shape, only_v = shape;
        only_k.value_width = only_v.key_width = 0;
        CacheBytes k = bytes_for(only_k, layout, type_k, type_v), v = bytes_for(only_v, layout, type_k, type_v);
        CHECK(both.payload == k.payload + v.payload);
    });
}

TEST_CASE("64 query heads on 8 KV heads read the KV heads 0, 0, 1, 3, 7") {
    Heads heads = {64, 8, 128};
    CHECK(heads.group() == 8);
    CHECK(heads.kv_head(0) == 0);
    CHECK(heads.kv_head(7) == 0);
    CHECK(heads.kv_head(8) == 1);
    CHECK(heads.kv_head(31) == 3);
    CHECK(heads.kv_head(63) == 7);
}

TEST_CASE("bytes are those of the memory that was taken; of pages, those that were handed out") {
    for_each_cache([](const Layout &layout, const Precision &type_k, const Precision &type_v) {
        CacheShape shape = {3, 2, 20, 37, 3, 70};
        shape.page = 7, shape.window = 40, shape.sinks = 3;
        Cache cache = open_cache(shape, layout, type_k, type_v);
        for (int sequence = 0; sequence < 3; sequence++) grow(cache, sequence, 70);
        CacheBytes now = bytes_of(cache);
        CHECK(now.total() == memory_of(cache));
        CHECK(now.payload == bytes_for(shape, layout, type_k, type_v).payload);
    });
    CacheShape shape = {80, 8, 128, 128, 2, 900};
    Cache cache = open_cache(shape, Paged{}, BF16{}, BF16{});
    CHECK(bytes_of(cache).payload == 0);
    grow(cache, 0, 1);
    CHECK(bytes_of(cache).payload == 5 * 0x1p20);
    grow(cache, 0, 15);
    CHECK(bytes_of(cache).payload == 80 * 65536);
    grow(cache, 0, 884);
    CHECK(bytes_of(cache).payload == 57 * 5 * 0x1p20);
    CHECK(cache.pool->free.size() == 57);
    grow(cache, 1, 17);
    CHECK(bytes_of(cache).payload == 59 * 5 * 0x1p20);
    shrink(cache, 0, 0);
    CHECK(bytes_of(cache).payload == 2 * 5 * 0x1p20);
}

// ---- Where rows are ----------------------------------------------------------------------------------------

TEST_CASE("page table 91 17 44 203, pages of 16: position 37 is in row 44 * 16 + 5") {
    const int table[] = {91, 17, 44, 203, 5, 6, 7, -1};
    Paged paged;
    paged.open({1, 1, 8, 8, 2, 50});
    CHECK(paged.pages_per_sequence == 4);
    paged.table = table;
    CHECK(paged.row(0, 37) == 44 * 16 + 5);
    CHECK(paged.row(0, 0) == 91 * 16);
    CHECK(paged.row(0, 49) == 203 * 16 + 1);
    CHECK(paged.row(1, 31) == 6 * 16 + 15);
    CHECK(paged.run(37) == 11);
    CHECK(paged.run(48) == 16);
}

// Shapes that put every layout at its edges: pages of one position, pages that divide nothing, a page larger than a
// sequence; rings with a window of one, and those that end beside a block of 32.
std::vector<CacheShape> edge_shapes(int key_width, int value_width, int sequences, int capacity) {
    std::vector<CacheShape> shapes;
    const int pages[] = {1, 7, 16, 64, 1000}, windows[] = {1, 31, 32, 33, 100}, sinks[] = {0, 4, 4, 1, 7};
    for (int i = 0; i < 5; i++) {
        CacheShape shape = {2, 2, key_width, value_width, sequences, capacity};
        shape.page = pages[i], shape.window = windows[i], shape.sinks = sinks[i];
        shapes.push_back(shape);
    }
    return shapes;
}

TEST_CASE("rows never overlap and stay inside the memory") {
    for_each_cache([](const Layout &layout, const Precision &type_k, const Precision &type_v) {
        for (const CacheShape &shape : edge_shapes(20, 6, 3, 37)) {
            Cache cache = open_cache(shape, layout, type_k, type_v);
            int positions = std::min(37, (int)(rows_of(shape, cache.layout) / shape.sequences));
            for (int sequence = 0; sequence < shape.sequences; sequence++) grow(cache, sequence, 37);
            for (const CacheRows *side : {&cache.keys, &cache.values}) {
                std::set<int64_t> begins;
                for (int layer = 0; layer < shape.layers; layer++)
                    for (int sequence = 0; sequence < shape.sequences; sequence++)
                        for (int position = 37 - positions; position < 37; position++)
                            for (int head = 0; head < shape.kv_heads; head++)
                                begins.insert(side->at(layer, row_of(cache, sequence, position), head) - side->data);
                REQUIRE((int)begins.size() == shape.layers * shape.sequences * positions * shape.kv_heads);
                for (int64_t begin : begins) REQUIRE(begin % (int64_t)side->row_bytes == 0);
                REQUIRE(*begins.begin() >= 0);
                REQUIRE(*begins.rbegin() + side->row_bytes <= side->bytes(shape.layers));
                memset(side->data, 1, side->bytes(shape.layers));  // all of it is there
            }
            std::set<std::pair<char *, char *>> memory;  // of all sides: apart from each other
            for (const CacheRows *side : {&cache.keys, &cache.values, &cache.recent_keys, &cache.recent_values,
                                          &cache.sink_keys, &cache.sink_values})
                if (side->data) memory.insert({side->data, side->data + side->bytes(shape.layers)});
            for (auto a = memory.begin(), b = std::next(a); b != memory.end(); a++, b++) REQUIRE(a->second <= b->first);
        }
    });
}

TEST_CASE("contiguous rows fill the memory to the last byte") {
    Cache cache = open_cache({3, 2, 20, 6, 3, 5}, Contiguous{}, Int8{}, BF16{});
    CHECK(cache.keys.at(2, row_of(cache, 2, 4), 1) + 22 == cache.keys.data + cache.keys.bytes(3));
    CHECK(cache.values.at(2, row_of(cache, 2, 4), 1) + 12 == cache.values.data + cache.values.bytes(3));
    CHECK(cache.keys.bytes(3) == 3 * 3 * 5 * 2 * 22);
}

TEST_CASE("find_runs() holds each position once, in order, and a run's rows follow one another") {
    std::vector<Run> runs;
    for (const Layout &layout : all_of<Layout>()) {
        CAPTURE(std::string(name_of(layout)));
        for (const CacheShape &shape : edge_shapes(8, 8, 3, 137)) {
            Cache cache = open_cache(shape, layout, F32{}, F32{});
            for (int sequence : {2, 0, 1}) grow(cache, sequence, 70);
            for (int sequence : {0, 1, 2}) grow(cache, sequence, 67);  // pages of the three alternate
            for (auto [begin, end] : {std::pair{0, 137}, {5, 6}, {31, 97}, {64, 128}, {136, 137}, {9, 9}}) {
                for (int sequence = 0; sequence < shape.sequences; sequence++) {
                    int next = begin;
                    find_runs(runs, cache, sequence, begin, end);
                    for (const Run &run : runs) {
                        REQUIRE(run.position == next);
                        REQUIRE(run.count >= 1);
                        for (int i = 0; i < run.count; i++)
                            REQUIRE(run.row + i == row_of(cache, sequence, run.position + i));
                        next = run.position + run.count;
                    }
                    REQUIRE(next == end);
                    if (std::holds_alternative<Contiguous>(layout)) REQUIRE(runs.size() == (begin < end));
                }
            }
        }
    }
    CHECK(Contiguous{37}.run(0) == 37);
    CHECK(Contiguous{37}.run(36) == 1);
}

TEST_CASE("a long cache's rows are addressed beyond 32 bits") {
    CacheShape shape = {1, 1, 8, 8, 5001, 1 << 20};
    Contiguous layout;
    layout.open(shape);
    CHECK(layout.row(5000, 3) == ((int64_t)5000 << 20) + 3);
    CHECK(layout.rows(shape) == (int64_t)5001 << 20);
    std::vector<int> table(4, 1 << 30);
    Paged paged;
    paged.page = 16, paged.pages_per_sequence = 4, paged.table = table.data();
    CHECK(paged.row(0, 17) == ((int64_t)1 << 34) + 1);
    Ring ring;
    ring.slots = 1 << 20;
    CHECK(ring.row(5000, (1 << 20) + 3) == ((int64_t)5000 << 20) + 3);
    char origin;
    CacheRows side = {&origin, 256, 128, 8, (int64_t)1 << 20};
    CHECK((size_t)(side.at(79, 1 << 19, 7) - side.data) == ((79ull * (1 << 20) + (1 << 19)) * 8 + 7) * 256);
}

TEST_CASE("what a query sees: all, the layer's window, or a window and sinks that stand just before it") {
    Visible all = visible_of(Layout(Paged{}), 0), layer = visible_of(Layout(Contiguous{}), 10);
    CHECK(all.first(1000000) == 0);
    CHECK(layer.first(9) == 0);
    CHECK(layer.first(10) == 1);
    CHECK(layer.sinks == 0);
    CacheShape shape;
    shape.window = 100, shape.sinks = 4;
    Layout ring = open_layout(shape, Ring{});
    Visible seen = visible_of(ring, 0);
    CHECK(seen.first(103) == 0);  // 104 positions: the window and the sinks
    CHECK(!seen.dropped(103));
    CHECK(seen.dropped(104));
    CHECK(seen.first(104) == 5);  // 5 .. 104, and the sinks
    CHECK(seen.shift(104) == 1);  // the sinks at 1 .. 4
    CHECK(seen.shift(1000) == 897);
    CHECK(seen.first(1000) == 901);
    CHECK(visible_of(ring, 100).sinks == 0);  // such a layer never saw what the ring drops
    CHECK(visible_of(ring, 60).first(1000) == 941);
    CHECK(visible_of(ring, 101).sinks == 4);
    CHECK(visible_of(ring, 101).first(1000) == 901);
}

// ---- What comes back ---------------------------------------------------------------------------------------

const int widths[] = {1, 20, 31, 32, 33, 64, 80, 96, 128, 256};

TEST_CASE("every stored number comes back with the bits that the definition of its precision gives it") {
    for (const Precision &type : all_of<Precision>()) {
        CAPTURE(std::string(name_of(type)));
        for (int width : widths) {
            CAPTURE(width);
            Scene scene({1, 2, width, width, 1, 100}, Contiguous{}, type, type);
            scene.numbers = [](Random &random, int width) {  // some vectors large, some small, some of both
                Vector vector = reference::random_floats(random, width);
                double size = std::exp2(random.uniform(-16, 15)), spread = random.uniform(0, 1) < 0.5 ? 0 : 12;
                for (float &x : vector) x *= (float)(size * std::exp2(-random.uniform(0, spread)));
                return vector;
            };
            scene.append(0, 100);
            CHECK(scene.wrong(0) == 0);
        }
    }
}

TEST_CASE("every layout, K and V hold what was stored, over several passes and a batch") {
    for_each_cache([](const Layout &layout, const Precision &type_k, const Precision &type_v) {
        CacheShape shape = {2, 2, 33, 20, 2, 110};
        shape.page = 7, shape.window = 60, shape.sinks = 3;
        Scene scene(shape, layout, type_k, type_v);
        for (int count : {1, 30, 1, 33}) scene.append(0, count);
        scene.append(1, 31);
        for (int i = 0; i < 3; i++) {
            for (int sequence : {1, 0}) grow(scene.cache, sequence, 1 + sequence * i);
            scene.pass({1, 0}, {1 + i, 1});
        }
        scene.append(0, 42);
        for (int sequence : {0, 1}) CHECK(scene.wrong(sequence) == 0);
    });
}

// Half the distance of the two codes that a number lies between, and what float32 rounds: the quotient, and the sum of
// a zero point and scaled codes.
template <class Format>
double error_bound(const char *row, int channel, double number, double largest) {
    if constexpr (Format::scale_channels == 0) {
        return Format::unit_roundoff * std::fabs(number);
    } else {
        double scale = to_float(scale_and_zero<Format>(row, channel).scale), half = 0.5, codes = 127;
        if constexpr (std::is_same_v<Format, FP8>) {  // codes of 4 bits, from 2^-6 on; the scale is 256 times as large
            scale /= 256, codes = 448;
            half = std::ldexp(0.5, std::max(-6, std::min(8, std::ilogb(number / scale))) - 3);
        }
        return scale * (half + codes * reference::unit) + reference::unit * largest;
    }
}

TEST_CASE("a number is off by at most half the distance of two codes and by the unit roundoff, and some nearly are") {
    for_each_type<Precision>([](auto type) {
        using Format = decltype(type);
        CAPTURE(std::string(type.name));
        Random random{1};
        std::vector<char> row(type.row_bytes(32));
        double worst = 0, worst_unit = 0;
        for (int round = 0; round < 20000; round++) {
            Vector numbers = reference::random_floats(random, 32);
            if (round % 2) numbers[7] = 1, numbers[9] = -1;  // as wide as they can be
            double size = std::exp2(random.uniform(-8, 14.9)), largest = 0;
            for (float &x : numbers) {
                x = (float)reference::to_f16(x * size);  // as blocks keep them
                if (Format::scale_channels == 0) x = (float)(size * random.uniform(1, 2));
                largest = std::max(largest, (double)std::fabs(x));
            }
            type.encode(row.data(), numbers.data(), 32);
            Vector got = decoded_row<Format>(row.data(), 32);
            for (int i = 0; i < 32; i++) {
                double error = std::fabs((double)got[i] - numbers[i]);
                double shared = Format::scale_channels ? largest : std::fabs(numbers[i]);
                worst = std::max(worst, error / error_bound<Format>(row.data(), i, numbers[i], largest));
                // A scale is rounded up, by at most 2^-10 of itself or to the next multiple of 2^-24.
                double most = Format::unit_roundoff * shared,
                       up = Format::scale_channels ? most * 0x1p-10 + 0x1p-25 : 0;
                worst_unit = std::max(worst_unit, error / (most + up));
            }
        }
        CHECK(worst <= 1);
        CHECK(worst_unit <= 1);
        if (Format::code_bits == 32) return;  // nothing is rounded
        CHECK(worst >= 0.99);
        CHECK(worst_unit >= (std::is_same_v<Format, FP8> ? 0.5 : 0.99));  // fp8: half a step of the largest, 16 of 448
    });
}

// ---- Numbers at the edge -----------------------------------------------------------------------------------

TEST_CASE("what is not finite or too large makes all that share its scale NaN, and nothing else") {
    const int positions = 64, heads = 2, width = 80;
    for_each_type<Precision>([&](auto type) {
        CAPTURE(std::string(type.name));
        for (float bad : {(float)NAN, infinity, -infinity, 3e38f, -1e30f}) {
            CAPTURE(bad);
            Scene scene({1, heads, width, width, 1, positions}, Contiguous{}, type, type);
            int calls = 0;  // (side, position, head)
            scene.numbers = [&](Random &random, int) {
                Vector vector = reference::random_floats(random, width);
                if (calls++ % (positions * heads) == 5 * heads + 1) vector[40] = bad;
                return vector;
            };
            scene.append(0, positions);
            for (bool keys : {true, false}) {
                for (int t = 0; t < positions; t++) {
                    for (int head = 0; head < heads; head++) {
                        Vector got = stored_vector(scene.cache, keys, 0, 0, t, head);
                        for (int c = 0; c < width; c++) {
                            bool itself = t == 5 && head == 1 && c == 40, shared = itself;
                            if (has_blocks(type))
                                shared = head == 1 && (keys ? t < 32 && c == 40 : t == 5 && c / 32 == 1);
                            if (type.scale_channels > width) shared = t == 5 && head == 1;
                            bool nan = type.scale_channels ? shared : itself && std::isnan(bad);
                            REQUIRE(std::isnan(got[c]) == nan);
                            if (!itself) REQUIRE(!std::isinf(got[c]));
                        }
                    }
                }
            }
        }
    });
}

TEST_CASE("the largest number that a scale can take, and the next") {
    for (float sign : {1.0f, -1.0f}) {
        float int8 = sign * 127 * 65504, fp8 = sign * 448 * 65504 / 256, f16 = sign * 65504;
        CHECK(round_trip<Int8>({1, int8})[1] == int8);
        CHECK(std::isnan(round_trip<Int8>({1, std::nextafter(int8, 2 * int8)})[0]));
        CHECK(round_trip<FP8>({1, fp8})[1] == fp8);
        CHECK(std::isnan(round_trip<FP8>({1, std::nextafter(fp8, 2 * fp8)})[0]));
        CHECK(round_trip<Int4>({0, f16})[sign < 0] == std::min(0.0f, f16));  // the zero point
        CHECK(!std::isnan(round_trip<Int4>({f16, -f16})[0]));
    }
    CHECK(!std::isnan(round_trip<Int2>({65504, -65504})[0]));
    CHECK(std::isnan(round_trip<Int4>({0, -65520})[0]));
    CHECK(std::isnan(round_trip<Int2>({0, 1e30f})[0]));
}

TEST_CASE("rows of one number, tiny ones, zeros and denormal ones read as the definition says") {
    for_each_type<Precision>([](auto type) {
        using Format = decltype(type);
        CAPTURE(std::string(type.name));
        for (float x : {0.0f, -0.0f, 1.0f, -1.0f, 0.3f, -0.7f, 1e-9f, -1e-9f, 1e-40f, -1e-45f, 6e-8f, 448.0f, 65504.0f,
                        -65504.0f, 1e6f}) {
            CAPTURE(x);
            for (int width : {1, 20, 33}) {
                Vector equal(width, x), among_zeros(width);
                among_zeros[width / 2] = x;
                for (const Vector &numbers : {equal, among_zeros})
                    CHECK(differing(round_trip<Format>(numbers), defined_vector(type, numbers)) == 0);
                for (float number : round_trip<Format>(equal)) {
                    // Half a step of the smallest scale, 2^-24, and never the other sign.
                    if (std::fabs(x) <= 1e-9f) CHECK(std::fabs(number - x) <= 0x1p-25f);
                    if (number != 0 && !std::isnan(number) && !Format::key_groups)
                        CHECK(std::signbit(number) == std::signbit(x));
                    if (x == 0) CHECK(number == 0);
                }
            }
        }
    });
    CHECK(round_trip<Int4>({0.5f, 0.5f, 0.5f}) == Vector(3, 0.5f));  // no scale: all are the zero point
    CHECK(round_trip<Int2>({-65504, -65504}) == Vector(2, -65504));
}

TEST_CASE("plain formats keep the signs of zeros, infinities and what is too small") {
    const Vector numbers = {0.0f, -0.0f, 1e-40f, -1e-30f, 1e30f, -1e38f, infinity, -infinity, NAN, 1};
    for_each_type<Precision>([&](auto type) {
        using Format = decltype(type);
        if constexpr (Format::scale_channels == 0) {
            CAPTURE(std::string(type.name));
            Vector got = round_trip<Format>(numbers);
            for (int i = 0; i < 8; i++) CHECK(std::signbit(got[i]) == std::signbit(numbers[i]));
            for (int i : {0, 1}) CHECK(got[i] == 0);
            for (int i : {2, 3}) CHECK(std::fabs(got[i]) <= 2e-30f);
            for (int i : {4, 5})
                CHECK((std::isinf(got[i]) ||
                       std::fabs(got[i] - numbers[i]) <= Format::unit_roundoff * std::fabs(numbers[i])));
            for (int i : {6, 7}) CHECK(std::isinf(got[i]));
            CHECK(std::isnan(got[8]));
            CHECK(got[9] == 1);
        }
    });
}

TEST_CASE("a row is written and read to its last byte and not beyond") {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *memory = (char *)mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(mprotect(memory + page, page, PROT_NONE) == 0);  // what touches it crashes
    for_each_type<Precision>([&](auto type) {
        using Format = decltype(type);
        CAPTURE(std::string(type.name));
        Random random{2};
        for (int width = 2; width <= 130; width += 2) {
            Vector numbers = reference::random_floats(random, width);
            char *row = memory + page - Format::row_bytes(width);
            row[-1] = 77;
            Format::encode(row, numbers.data(), width);
            CHECK(row[-1] == 77);
            float last[lanes];
            if (width % lanes) load_codes<Format>(last, row, width / lanes * lanes, width % lanes);
            for (int i = width % lanes; width % lanes && i < lanes; i++) CHECK(last[i] == 0);
            CHECK(differing(decoded_row<Format>(row, width), defined_vector(type, numbers)) == 0);
        }
    });
    munmap(memory, 2 * page);
}

// ---- Growing and shrinking ---------------------------------------------------------------------------------

TEST_CASE("a new cache is empty, and zero where nothing was stored") {
    for_each_cache([](const Layout &layout, const Precision &type_k, const Precision &type_v) {
        Cache cache = open_cache({1, 1, 4, 4, 2, 3}, layout, type_k, type_v);
        CHECK(cache.lengths == std::vector<int>{0, 0});
        grow(cache, 1, 3);
        for (bool keys : {true, false}) CHECK(stored_vector(cache, keys, 0, 1, 2, 0) == Vector(4));
    });
}

TEST_CASE("growing beyond the capacity fails in one line and changes nothing") {
    for (const Layout &layout : all_of<Layout>()) {
        CAPTURE(std::string(name_of(layout)));
        Cache cache = open_cache({1, 1, 4, 4, 2, 10}, layout, F16{}, F16{});
        if (limit_of(cache) == INT_MAX) {  // a ring goes on
            CHECK(grow(cache, 0, 100000) == 0);
            CHECK(grow(cache, 0, 1) == 100000);
            continue;
        }
        CHECK(grow(cache, 0, 7) == 0);
        CHECK(grow(cache, 1, 10) == 0);
        std::string line = error_of([&] { grow(cache, 0, 4); });
        CHECK(contains(line, "holds 10 positions"));
        CHECK(contains(line, "11 are needed"));
        CHECK(contains(line, "-c"));
        CHECK(!contains(line, "\n"));
        CHECK(cache.lengths == std::vector<int>{7, 10});
        CHECK(error_of([&] { grow(cache, 1, 1); }) != "");
        CHECK(grow(cache, 0, 3) == 7);
        CHECK(grow(cache, 0, 0) == 10);
        CHECK(cache.lengths == std::vector<int>{10, 10});
    }
}

TEST_CASE("a sequence that shrank reads as before, and grows again over its old rows") {
    for_each_cache([](const Layout &layout, const Precision &type_k, const Precision &type_v) {
        CacheShape shape = {1, 1, 20, 33, 2, 200};
        shape.page = 7, shape.window = 120, shape.sinks = 2;
        Scene scene(shape, layout, type_k, type_v);
        scene.append(1, 40);
        // Into the newest block and into older ones, at their edges too, and twice without storing in between.
        for (auto [grown, lengths] : std::vector<std::pair<int, std::vector<int>>>{{70, {69}},
                                                                                   {1, {65, 64}},
                                                                                   {32, {96, 70}},
                                                                                   {30, {40}},
                                                                                   {25, {64, 33, 32}},
                                                                                   {33, {64, 40}},
                                                                                   {60, {100, 31, 1}},
                                                                                   {9, {20, 0}},
                                                                                   {64, {63}},
                                                                                   {3, {}}}) {
            scene.append(0, grown);
            for (int length : lengths) {
                CAPTURE(length);
                scene.shrink_to(0, length);
                REQUIRE(scene.wrong(0) == 0);
            }
        }
        scene.shrink_to(0, 1000);  // no change
        CHECK(scene.cache.lengths == std::vector<int>{66, 40});
        CHECK(scene.wrong(1) == 0);
    });
}

TEST_CASE("what a cut block restores at f16 is what was read of it, also at the largest numbers of f16") {
    for (const Precision &type : {Precision(Int4{}), Precision(Int2{})}) {
        CAPTURE(std::string(name_of(type)));
        Scene scene({1, 1, 32, 32, 1, 80}, Contiguous{}, type, type);
        scene.numbers = [](Random &random, int width) {
            Vector vector(width);
            for (float &x : vector) x = random.uniform(0, 1) < 0.5 ? 0 : (float)random.uniform(65000, 65504);
            return vector;
        };
        scene.append(0, 70);
        scene.shrink_to(0, 20);
        for (int t = 0; t < 20; t++)
            for (float x : recent_vector(scene.cache, true, 0, 0, t, 0)) REQUIRE(std::isfinite(x));
    }
}

// ---- Pages -------------------------------------------------------------------------------------------------

// What a pool must be, told without one: each sequence's pages in their order.
struct Tables {
    int page, pages;
    std::vector<std::vector<int>> held;  // (sequence)

    int free() const {
        int taken = 0;
        for (const std::vector<int> &pages_of : held) taken += (int)pages_of.size();
        return pages - taken;
    }
    // Every page is in one table or free, once; tables keep what they had and have nothing behind their lengths.
    void check(const Cache &cache) {
        const PagePool &pool = *cache.pool;
        std::multiset<int> seen(pool.free.begin(), pool.free.end());
        for (int page : pool.free) REQUIRE(pool.references[page] == 0);
        int per_sequence = std::get<Paged>(cache.layout).pages_per_sequence;
        for (size_t sequence = 0; sequence < held.size(); sequence++) {
            std::vector<int> &mine = held[sequence];
            size_t needed = (cache.lengths[sequence] + page - 1) / page;
            mine.resize(std::min(mine.size(), needed), -1);
            for (int i = 0; i < per_sequence; i++) {
                int entry = pool.table[sequence * per_sequence + i];
                if ((size_t)i < mine.size()) REQUIRE(entry == mine[i]);
                REQUIRE((entry >= 0) == ((size_t)i < needed));
                if (entry < 0) continue;
                REQUIRE(entry < pages);
                REQUIRE(pool.references[entry] == 1);
                seen.insert(entry);
                if ((size_t)i >= mine.size()) mine.push_back(entry);
            }
        }
        REQUIRE((int)seen.size() == pages);
        for (int i = 0; i < pages; i++) REQUIRE(seen.count(i) == 1);
        REQUIRE((int)pool.references.size() == pages);
        REQUIRE((int)pool.free.size() == free());
    }
};

// `steps` times a sequence grows, shrinks or ends, in a pool that cannot hold all of them.
void live(Scene &scene, int steps, uint64_t seed) {
    Cache &cache = scene.cache;
    const CacheShape &shape = cache.shape;
    Tables tables{shape.page, shape.pages, std::vector<std::vector<int>>(shape.sequences)};
    Random random{seed};
    int refused = 0;
    for (int step = 0; step < steps; step++) {
        CAPTURE(step);
        int sequence = (int)random.uniform(0, shape.sequences), length = cache.lengths[sequence];
        double choice = random.uniform(0, 1);
        if (choice < 0.65 && length < shape.capacity) {
            int count = 1 + (int)random.uniform(0, std::min(40, shape.capacity - length));
            int needed = (length + count + shape.page - 1) / shape.page - (int)tables.held[sequence].size();
            if (needed > tables.free()) {
                PagePool before = *cache.pool;
                std::vector<int> lengths = cache.lengths;
                std::string line = error_of([&] { grow(cache, sequence, count); });
                REQUIRE(contains(line, std::to_string(tables.free()) + " free pages of " + std::to_string(shape.page) +
                                           " positions, " + std::to_string(needed) + " are needed"));
                REQUIRE(!contains(line, "\n"));
                REQUIRE((before.table == cache.pool->table && before.free == cache.pool->free));
                REQUIRE((before.references == cache.pool->references && lengths == cache.lengths));
                refused++;
            } else {
                scene.append(sequence, count);
            }
        } else {
            scene.shrink_to(sequence, choice > 0.9 ? 0 : (int)random.uniform(0, length + 1));
        }
        tables.check(cache);
        REQUIRE(scene.wrong(sequence) == 0);
        for (int other = 0; step % 8 == 0 && other < shape.sequences; other++) REQUIRE(scene.wrong(other) == 0);
    }
    CHECK(refused > steps / 100);
}

TEST_CASE("thousands of grown, cut and ended sequences lose no page, share none and read none that is not theirs") {
    for (int page : {1, 7, 16, 64, 128}) {
        CAPTURE(page);
        CacheShape shape = {2, 2, 3, 5, 6, 100};
        shape.page = page;
        shape.pages = std::max(2, 250 / page);  // of 600 positions
        Scene scene(shape, Paged{}, F32{}, F32{});
        live(scene, 3000, page);
    }
}

TEST_CASE("the same in every precision") {
    for (const Precision &type_k : all_of<Precision>()) {
        for (const Precision &type_v : all_of<Precision>()) {
            CAPTURE(std::string(name_of(type_k)));
            CAPTURE(std::string(name_of(type_v)));
            CacheShape shape = {1, 2, 20, 33, 4, 100};
            shape.page = 7, shape.pages = 30;
            Scene scene(shape, Paged{}, type_k, type_v);
            live(scene, 60, 5);
        }
    }
}

TEST_CASE("a page that was freed reads as NaN in every precision") {
    for (const Precision &type : all_of<Precision>()) {
        CAPTURE(std::string(name_of(type)));
        CacheShape shape = {2, 2, 20, 33, 1, 64};
        Scene scene(shape, Paged{}, type, type);
        scene.append(0, 64);
        shrink(scene.cache, 0, 17);  // pages 0 and 1 stay
        shrink(scene.cache, 0, 16);
        grow(scene.cache, 0, 48);  // the same pages, nothing stored in them yet
        for (bool keys : {true, false})
            for (int t = 32; t < 64; t++)
                for (int layer : {0, 1})
                    for (float x : stored_vector(scene.cache, keys, layer, 0, t, 1)) REQUIRE(std::isnan(x));
    }
}

TEST_CASE("a page that two tables hold survives the release by one") {
    CacheShape shape = {2, 1, 8, 8, 2, 64};
    Scene scene(shape, Paged{}, F32{}, F32{});
    Cache &cache = scene.cache;
    PagePool &pool = *cache.pool;
    scene.append(0, 40);  // pages 0, 1, 2
    for (int i = 0; i < 2; i++) {
        pool.table[4 + i] = pool.table[i];  // sequence 1 begins with the same 32 positions
        pool.references[pool.table[i]]++;
    }
    cache.lengths[1] = 32;
    for (bool keys : {true, false})
        for (int layer : {0, 1}) {
            Column &from = scene.column(keys, layer, 0, 0), &to = scene.column(keys, layer, 0, 1);
            to.stored.assign(from.stored.begin(), from.stored.begin() + 32);
            to.recent.assign(from.recent.begin(), from.recent.begin() + 32);
        }
    CHECK(bytes_of(cache).payload == 3 * 16 * 2 * 2 * 8 * 4);
    std::set<int> shared = {pool.table[0], pool.table[1]};
    scene.shrink_to(0, 0);
    CHECK(pool.free.size() == 6);
    for (int page : shared) CHECK(pool.references[page] == 1);
    for (int page : pool.free) CHECK(shared.count(page) == 0);
    CHECK(scene.wrong(1) == 0);
    scene.append(0, 64);  // the rest of the pool, not what sequence 1 holds
    CHECK(scene.wrong(1) == 0);
    CHECK(scene.wrong(0) == 0);
    scene.append(1, 20);
    CHECK(scene.wrong(0) == 0);
    scene.shrink_to(1, 0);
    for (int page : shared) CHECK(pool.references[page] == 0);
    CHECK(pool.free.size() == 4);
}

// ---- Ring --------------------------------------------------------------------------------------------------

TEST_CASE("no row is overwritten that a query of the same pass may see, whatever the window and the chunks") {
    const std::pair<Precision, Precision> types[] = {{F32{}, F16{}}, {Int4{}, F32{}}, {Int2{}, Int4{}}};
    for (int window : {1, 31, 32, 33, 100, 1000}) {
        CacheShape shape = {1, 1, 4, 3, 2, 0};
        shape.window = window, shape.sinks = 0;
        int past_block = (window + std::get<Ring>(open_layout(shape, Ring{})).chunk() - 1) % 32;
        for (int sinks : {0, 4, (33 - past_block) % 32}) {  // the last needs one row beyond whole blocks
            for (const auto &types_kv : types) {
                CAPTURE(window);
                CAPTURE(sinks);
                CAPTURE(std::string(name_of(types_kv.first)));
                shape.sinks = sinks;
                Scene scene(shape, Ring{}, types_kv.first, types_kv.second);
                int chunk = chunk_of(scene.cache), end = 3 * window + 400;
                Random random{(uint64_t)window};
                // A chunk that begins with the last query that sees all, chunks of a prompt, single positions.
                scene.append(0, std::max(1, window + sinks - 1));
                scene.append(1, 7);
                for (int i = 0; scene.cache.lengths[0] < end; i++)
                    scene.append(0, i == 0 ? chunk : i % 3 ? 1 + (int)random.uniform(0, chunk) : 1);
                CHECK(scene.wrong(0) == 0);
                CHECK(scene.wrong(1) == 0);
            }
        }
    }
}

TEST_CASE("a ring goes back as far as its rows are there, and refuses to go further in one line") {
    for (const Precision &type : {Precision(F32{}), Precision(Int4{})}) {
        for (int window : {1, 33, 100}) {
            CAPTURE(std::string(name_of(type)));
            CAPTURE(window);
            CacheShape shape = {1, 1, 4, 3, 1, 0};
            shape.window = window, shape.sinks = 2;
            Scene scene(shape, Ring{}, type, type);
            int slots = std::get<Ring>(scene.cache.layout).slots, chunk = chunk_of(scene.cache), refused = 0;
            Random random{(uint64_t)window};
            scene.append(0, slots);
            scene.shrink_to(0, 5);  // nothing was overwritten yet
            CHECK(scene.wrong(0) == 0);
            scene.append(0, slots);
            int stored = slots + 5;  // the end of what was ever stored
            for (int step = 0; step < 400; step++) {
                int length = scene.cache.lengths[0], back = (int)random.uniform(0, 1.2 * slots);
                if (random.uniform(0, 1) < 0.4 || back >= length) {
                    scene.append(0, 1 + (int)random.uniform(0, step % 5 ? 4 : 2 * chunk));
                    stored = std::max(stored, scene.cache.lengths[0]);
                    continue;
                }
                std::string line = error_of([&] { scene.shrink_to(0, length - back); });
                if (line == "") {
                    REQUIRE(scene.wrong(0) == 0);
                    continue;
                }
                refused++;
                REQUIRE(scene.cache.lengths[0] == length);
                REQUIRE(stored - (length - back) >=
                        chunk);  // no further than a pass may have stored is always possible
                REQUIRE(contains(line, "cannot go back from"));
                REQUIRE(contains(line, std::to_string(length - back)));
                REQUIRE(!contains(line, "\n"));
                REQUIRE(scene.wrong(0) == 0);
            }
            CHECK(refused > 10);
            scene.shrink_to(0, 0);  // ending is always possible
            scene.append(0, 3 * slots);
            CHECK(scene.wrong(0) == 0);
        }
    }
}

TEST_CASE("sinks keep their values and, turned back, their keys, apart for each layer, sequence and head") {
    CacheShape shape = {2, 2, 8, 6, 3, 0};
    shape.window = 10, shape.sinks = 3;
    Cache cache = open_cache(shape, Ring{}, Int2{}, Int2{});
    auto vectors = [&](int layer, int sequence, int position, int head, Vector &key, Vector &value) {
        Random random{(uint64_t)(1 + head + 2 * (position + 3 * (sequence + 3 * layer)))};
        key = reference::random_floats(random, 8), value = reference::random_floats(random, 6);
    };
    auto turn_at = [](int position) {
        Vector turn(8);
        for (int i = 0; i < 4; i++)
            turn[i] = std::cos(position * (i + 1.0f)), turn[4 + i] = std::sin(position * (i + 1.0f));
        return turn;
    };
    for (bool check : {false, true}) {
        for (int i = 0; i < 2 * 3 * 3 * 2; i++) {
            int layer = i % 2, sequence = i / 2 % 3, position = i / 6 % 3, head = i / 18;
            Vector key, value, turned(8), turn = turn_at(position);
            vectors(layer, sequence, position, head, key, value);
            if (!check) {
                for (int c = 0; c < 4; c++) {
                    turned[c] = key[c] * turn[c] - key[c + 4] * turn[c + 4];
                    turned[c + 4] = key[c + 4] * turn[c] + key[c] * turn[c + 4];
                }
                store_sink(cache, layer, sequence, position, head, turned.data(), turn.data(), value.data());
                continue;
            }
            const float *got = (const float *)cache.sink_keys.at(layer, sequence * 3 + position, head);
            for (int c = 0; c < 8; c++) {  // two rotations, of rounded angles
                double size = std::fabs(key[c]) + std::fabs(key[(c + 4) % 8]);
                CHECK(std::fabs(got[c] - key[c]) <= 2 * reference::gamma(6) * size);
            }
            const float *got_value = (const float *)cache.sink_values.at(layer, sequence * 3 + position, head);
            CHECK(Vector(got_value, got_value + 6) == value);
        }
    }
}

// ---- Names and what cannot be had --------------------------------------------------------------------------

TEST_CASE("each layout and precision is found by its name, and says the bits that its rows take") {
    for_each_type<Precision>([](auto type) {
        CAPTURE(std::string(type.name));
        CHECK(std::string(name_of(parse_precision("--kv", type.name))) == type.name);
        char bits[64];
        snprintf(bits, sizeof bits, "%s (%g", type.name, type.bits);
        CHECK(contains(precision_names(), bits));
        CHECK(type.row_bytes(128) * 8 == type.bits * 128);
        CHECK(row_payload(type, 128) * 8 == type.code_bits * 128);
        CHECK(type.code_bits <= type.bits);
    });
    for_each_type<Layout>([](auto layout) {
        CHECK(std::string(name_of(parse_layout("--cache", layout.name))) == layout.name);
        CHECK(contains(layout_names(), layout.name));
    });
    CHECK(precision_names().find("f32 (32 bits a value)") == 0);
    for (const char *entry : {"f16 (16)", "bf16 (16)", "fp8 (8.125)", "int8 (8.125)", "int4 (5)", "int2 (3)"})
        CHECK(contains(precision_names(), std::string(" ") + entry));
    CHECK(contains(layout_names(), "contiguous paged ring"));
}

TEST_CASE("an unknown name is answered with the known ones") {
    for (std::string name : {"f17", "", "F16", "f16 ", "bf", "int", "int44"}) {
        std::string line = error_of([&] { parse_precision("-ctk", name); });
        CHECK(contains(line, "-ctk " + name + ": unknown type; known are " + precision_names()));
        CHECK(!contains(line, "\n"));
    }
    std::string line = error_of([] { parse_layout("--cache", "heap"); });
    CHECK(contains(line, "--cache heap: unknown layout"));
    CHECK(contains(line, layout_names()));
    CHECK(!contains(line, "\n"));
}

TEST_CASE("memory that cannot be had is one line") {
    for (const Layout &layout : all_of<Layout>()) {
        CAPTURE(std::string(name_of(layout)));
        double machine = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGE_SIZE);
        // K and V each fit into this machine, but not both.
        int some = (int)(0.6 * machine / (1024 * sizeof(float) * 64));
        for (CacheShape shape :
             {CacheShape{80, 64, 128, 128, 1, INT_MAX}, CacheShape{80, 64, 128, 128, 4096, INT_MAX},
              CacheShape{INT_MAX, INT_MAX, 128, 128, 1, INT_MAX}, CacheShape{1, 64, 1024, 1024, 1, some}}) {
            shape.window = shape.capacity - 1000;
            std::string line = error_of([&] { open_cache(shape, layout, F32{}, F32{}); });
            CHECK(contains(line, "the KV cache"));
            CHECK(contains(line, "lower -c"));
            CHECK(!contains(line, "\n"));
        }
    }
}
