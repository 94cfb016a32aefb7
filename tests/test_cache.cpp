// cache.h: how many bytes a cache takes, where each row lies in them, what a query reads of it, and what comes back of
// a number. All goes through the lists of layouts and precisions, so that a new one is tested from its first day. Its
// parts: bytes, where rows are, numbers, a cache and beside it what it must hold, pages and rings, names and errors.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#ifndef PLAIN  // fast/ has no part in this
#define PLAIN
#endif
#include <set>

#include "../commands/options.h"
#include "scene.h"

using namespace scene;
using reference::Random;

static Cpu cpu(1);

static Cache opened(const CacheShape &shape, const Layout &layout, const Precision &type_k, const Precision &type_v) {
    return open_cache(cpu, shape, layout, type_k, type_v);
}
static Cache opened(const CacheShape &shape, const Layout &layout, const Precision &type) {
    return opened(shape, layout, type, type);
}

template <class Use>
static void for_each_cache(Use use) {
    for (const Layout &layout : all_of<Layout>()) {
        for_each_pair([&](const Precision &type_k, const Precision &type_v) {
            std::string names = std::string(name_of(layout)) + " " + name_of(type_k) + " " + name_of(type_v);
            CAPTURE(names);
            use(layout, type_k, type_v);
        });
    }
}

// Bits; zeros of both signs are equal, and so are NaNs. How many of the numbers differ.
static int differing(const Vector &a, const Vector &b) {
    REQUIRE(a.size() == b.size());
    int count = 0;
    for (size_t i = 0; i < a.size(); i++) count += !(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])));
    return count;
}

// ---- Bytes -------------------------------------------------------------------------------------------------
// What the formula gives: tests/test_memory.cpp.

TEST_CASE("3 tokens, 2 KV heads, 4 numbers in bf16: 48 bytes of K and 48 of V, and where they are") {
    Cache cache = opened({1, 2, 4, 4, 1, 3}, Contiguous{}, BF16{});
    const CacheRows &keys = cache.stores[0].view.keys, &values = cache.stores[0].view.values;
    CHECK(bytes_of(cache).payload == 96);
    CHECK(bytes_of(cache).metadata == 0);
    CHECK((keys.bytes(1) == 48 && values.bytes(1) == 48));
    CHECK(keys.at(0, row_of(cache.stores[0], 0, 1), 1) - keys.data == 24);
    CHECK(values.at(0, row_of(cache.stores[0], 0, 0), 0) == values.data);
    CHECK(values.at(0, row_of(cache.stores[0], 0, 2), 1) - values.data == 40);
    CHECK((keys.row_bytes == 8 && keys.stride() == 16));
}

TEST_CASE("widths of K and V are apart: one row of 576 serves as K, its first 512 as V") {
    CacheShape shape = {60, 1, 576, 512, 1, 1000};
    CacheBytes bytes = full_bytes({shape}, {Contiguous{}, BF16{}, Int8{}});
    CHECK(bytes.payload == 60.0 * 1000 * (576 * 2 + 512));
    CHECK(bytes.metadata == 60.0 * 1000 * 2);
}

static std::vector<const CacheRows *> memories(const Cache &cache) {
    const CacheView &view = cache.stores[0].view;
    return {&view.keys, &view.values, &view.residual_keys, &view.residual_values, &view.sink_keys, &view.sink_values};
}

TEST_CASE("bytes are those of the memory that was taken; of pages, those that were handed out") {
    for_each_cache([](const Layout &layout, const Precision &type_k, const Precision &type_v) {
        CacheShape shape = {3, 2, 20, 37, 3, 70, 7, 0, 40, 3};
        Cache cache = opened(shape, layout, type_k, type_v);
        for (int sequence = 0; sequence < 3; sequence++) grow(cache, sequence, 70);
        double taken = 0;
        for (const CacheRows *rows : memories(cache)) taken += (double)rows->bytes(shape.layers);
        if (cache.stores[0].pool)
            taken += sizeof(int) *
                     (double)(cache.stores[0].pool->table.size() + 2 * cache.stores[0].pool->references.size());
        CHECK(bytes_of(cache).total() == taken);
        CHECK(bytes_of(cache).payload == full_bytes({shape}, {layout, type_k, type_v}).payload);
    });
    Cache cache = opened({8, 8, 128, 128, 2, 900}, Paged{}, BF16{});
    auto pages = [&] { return bytes_of(cache).payload / (8 * 65536); };
    CHECK(pages() == 0);
    for (auto [count, expected] : {std::pair{1, 1}, {15, 1}, {884, 57}}) {
        grow(cache, 0, count);
        CHECK(pages() == expected);
    }
    CHECK(cache.stores[0].pool->free.size() == 57);
    grow(cache, 1, 17);
    CHECK(pages() == 59);
    rewind(cache, 0, 0);
    CHECK(pages() == 2);
}

// ---- Where rows are ----------------------------------------------------------------------------------------

// Of shapes that put every layout at its edges: pages of one position, pages that divide nothing, a page larger than a
// sequence; rings with a window of one, and those that end beside a block of 32.
TEST_CASE("rows never overlap, stay inside the memory, and follow one another as long as run() says") {
    for (const Layout &layout : all_of<Layout>()) {
        for (const Precision &type : all_of<Precision>()) {
            for (int edge = 0; edge < 5; edge++) {
                const int pages[] = {1, 7, 16, 64, 1000}, windows[] = {1, 31, 32, 33, 100}, sinks[] = {0, 4, 4, 1, 7};
                CacheShape shape = {2, 2, 20, 6, 3, 37, pages[edge], 0, windows[edge], sinks[edge]};
                CAPTURE(std::string(name_of(layout)) + " " + name_of(type));
                Cache cache = opened(shape, layout, type);
                int rows = (int)(rows_of(shape, cache.layout) / shape.sequences), from = std::max(0, 37 - rows);
                for (int sequence : {2, 0, 1}) grow(cache, sequence, 20);
                for (int sequence : {0, 1, 2}) grow(cache, sequence, 17);  // pages of the three alternate
                for (const CacheRows *side : {&cache.stores[0].view.keys, &cache.stores[0].view.values}) {
                    std::set<int64_t> begins;
                    for (int i = 0; i < 2 * 3 * 2; i++)
                        for (int t = from; t < 37; t++)
                            begins.insert(side->at(i % 2, row_of(cache.stores[0], i / 4, t), i / 2 % 2) - side->data);
                    REQUIRE((int)begins.size() == 2 * 3 * (37 - from) * 2);
                    for (int64_t begin : begins) REQUIRE(begin % (int64_t)side->row_bytes == 0);
                    REQUIRE(*begins.begin() >= 0);
                    REQUIRE(*begins.rbegin() + side->row_bytes <= side->bytes(shape.layers));
                    memset(side->data, 1, side->bytes(shape.layers));  // all of it is there
                }
                for (int t = from; t < 37; t++) {
                    int run = std::visit([&](auto &chosen) { return chosen.run(t); }, cache.layout);
                    REQUIRE(run >= 1);
                    for (int i = 0; i < std::min(run, 37 - t); i++)
                        REQUIRE(row_of(cache.stores[0], 1, t + i) == row_of(cache.stores[0], 1, t) + i);
                }
                std::set<std::pair<char *, char *>> memory;  // of all sides: apart from each other
                for (const CacheRows *side : memories(cache))
                    if (side->data) memory.insert({side->data, side->data + side->bytes(shape.layers)});
                for (auto a = memory.begin(), b = std::next(a); b != memory.end(); a++, b++)
                    REQUIRE(a->second <= b->first);
            }
        }
    }
    Cache cache = opened({3, 2, 20, 6, 3, 5}, Contiguous{}, Int8{}, BF16{});  // fills its memory to the last byte
    CHECK(cache.stores[0].view.keys.at(2, row_of(cache.stores[0], 2, 4), 1) + 22 ==
          cache.stores[0].view.keys.data + cache.stores[0].view.keys.bytes(3));
    CHECK(cache.stores[0].view.values.at(2, row_of(cache.stores[0], 2, 4), 1) + 12 ==
          cache.stores[0].view.values.data + 3 * 3 * 5 * 2 * 12);
}

TEST_CASE(
    "page table 91 17 44 203, pages of 16: position 37 is in row 44 * 16 + 5; rows beyond 32 bits have addresses") {
    std::vector<int> table = {91, 17, 44, 203, 5, 6, 7, 1 << 30};
    Paged paged{16, 50, 0, INT_MAX, 4, table.data()};
    for (auto [position, row] : {std::pair{37, 44 * 16 + 5}, {0, 91 * 16}, {49, 203 * 16 + 1}})
        CHECK(paged.row(0, position) == row);
    CHECK(paged.row(1, 31) == 6 * 16 + 15);
    CHECK(paged.row(1, 49) == ((int64_t)1 << 34) + 1);
    CHECK(Contiguous{1 << 20}.row(5000, 3) == ((int64_t)5000 << 20) + 3);
    CHECK(Contiguous{1 << 20}.rows({1, 1, 8, 8, 5001}) == (int64_t)5001 << 20);
    CHECK(Ring{0, 0, 1 << 20}.row(5000, (1 << 20) + 3) == ((int64_t)5000 << 20) + 3);
    char origin;
    CacheRows side = {&origin, 256, 128, 8, (int64_t)1 << 20};
    CHECK((size_t)(side.at(79, 1 << 19, 7) - side.data) == ((79ull * (1 << 20) + (1 << 19)) * 8 + 7) * 256);
}

TEST_CASE("what a query sees: all, the layer's window, or a window and sinks that stand just before it") {
    Visible all = visible_of(Layout(Paged{}), 0), layer = visible_of(Layout(Contiguous{}), 10);
    CHECK(all.first(1000000) == 0);
    CHECK((layer.first(9) == 0 && layer.first(10) == 1 && layer.sinks == 0));
    Layout ring = opened_ring(100, 4);
    Visible seen = visible_of(ring, 0);
    CHECK((seen.first(103) == 0 && !seen.dropped(103)));  // 104 positions: the window and the sinks
    CHECK((seen.first(104) == 5 && seen.dropped(104)));   // 5 .. 104, and the sinks
    CHECK((seen.shift(104) == 1 && seen.shift(1000) == 897 && seen.first(1000) == 901));  // the sinks at 1 .. 4, ...
    CHECK(visible_of(ring, 100).sinks == 0);  // such a layer never saw what the ring drops
    CHECK(visible_of(ring, 60).first(1000) == 941);
    CHECK((visible_of(ring, 101).sinks == 4 && visible_of(ring, 101).first(1000) == 901));
}

// ---- Numbers -----------------------------------------------------------------------------------------------

// A vector as it reads when it is stored by itself, as a value; in `row`, if there is one.
static Vector round_trip(const Precision &type, const Vector &numbers, char *row = nullptr) {
    std::vector<char> own(row_bytes(type, (int)numbers.size()));
    Vector read;
    auto store = [&](auto format) {
        if (!row) row = own.data();
        format.encode(row, numbers.data(), (int)numbers.size());
        for (int c = 0; c < (int)numbers.size(); c++) read.push_back(format.number(row, c));
    };
    std::visit(store, type);
    return read;
}

// The same by the definition. A precision that reference.h does not define is taken at its word here, and held to its
// unit roundoff, its bytes and its neighbours by what follows.
static Vector defined_vector(const Precision &type, const Vector &numbers) {
    Vector read = reference::read_vector(name_of(type), numbers);
    return read.empty() ? round_trip(type, numbers) : read;
}
// How many numbers of a row share a scale; all of them, where nothing is known.
static int sharing(const Precision &type, int width) {
    bool known = !reference::read_vector(name_of(type), {1}).empty();
    return known ? (int)reference::sharing(name_of(type), width) : width;
}

TEST_CASE("a number is off by at most the unit roundoff of what shares its scale, and some nearly are") {
    for (const Precision &type : all_of<Precision>()) {
        CAPTURE(std::string(name_of(type)));
        double unit = std::visit([](auto format) { return decltype(format)::unit_roundoff; }, type), worst = 0;
        bool shared = sharing(type, 32) > 1;
        Random random{1};
        for (int round = 0; round < 4000; round++) {
            Vector numbers = reference::random_floats(random, 32);
            if (round % 2) numbers[7] = 1, numbers[9] = -1;  // as wide as they can be
            double size = std::exp2(random.uniform(-8, 14.9)), largest = 0;
            for (float &x : numbers) {
                x = (float)reference::to_f16(x * size);  // as blocks keep them
                if (!shared) x = (float)(size * random.uniform(1, 2));
                largest = std::max(largest, (double)std::fabs(x));
            }
            Vector got = round_trip(type, numbers);
            for (int i = 0; i < 32; i++) {
                // A scale is rounded up, by at most 2^-10 of itself or to the next multiple of 2^-24.
                double most = unit * (shared ? largest : std::fabs(numbers[i]));
                double bound = most + (shared ? most * 0x1p-10 + 0x1p-25 : 0);
                worst = std::max(worst, std::fabs((double)got[i] - numbers[i]) / bound);
            }
        }
        CHECK(worst <= 1);
        // f32 rounds nothing; of fp8's 16 steps between powers of 2, the largest number is not the furthest.
        CHECK(worst >= (unit == F32::unit_roundoff ? 0 : std::holds_alternative<FP8>(type) ? 0.5 : 0.98));
    }
}

TEST_CASE("the largest number that a scale can take, and the next") {
    auto last = [](const Precision &type, float x) { return round_trip(type, {1, x})[1]; };
    for (float sign : {1.0f, -1.0f}) {
        for (auto [type, most] : {std::pair<Precision, float>{Int8{}, sign * 127 * 65504}, {FP8{}, sign * 114632}}) {
            CHECK(last(type, most) == most);
            CHECK(std::isnan(last(type, std::nextafter(most, 2 * most))));
        }
        for (const Precision &type : {Precision(Int4{}), Precision(Int2{})}) {
            CHECK(last(type, sign * 65504) == (sign < 0 ? -65504 : doctest::Approx(65504).epsilon(1e-3)));
            CHECK(std::isnan(last(type, sign * 1e30f)));
        }
    }
    CHECK(std::isnan(last(Int4{}, -65520)));
}

TEST_CASE("rows of one number, tiny ones, zeros and denormal ones read as the definition says") {
    for (const Precision &type : all_of<Precision>()) {
        CAPTURE(std::string(name_of(type)));
        for (float x : {0.0f, -0.0f, 1.0f, -1.0f, 0.3f, -0.7f, 1e-9f, -1e-9f, 1e-40f, -1e-45f, 6e-8f, 448.0f, 65504.0f,
                        -65504.0f, 1e6f}) {
            for (int width : {1, 20, 33}) {
                CAPTURE(x);
                Vector equal(width, x), among_zeros(width);
                among_zeros[width / 2] = x;
                for (const Vector &numbers : {equal, among_zeros})
                    CHECK(differing(round_trip(type, numbers), defined_vector(type, numbers)) == 0);
                float first = round_trip(type, equal)[0];  // half a step of the smallest scale, 2^-24, may be lost
                if (std::fabs(x) <= 1e-9f) CHECK(std::fabs(first - x) <= 0x1p-25f);
                if (first != 0 && std::isfinite(first) && !has_blocks(type))
                    CHECK(std::signbit(first) == std::signbit(x));
                if (x == 0) CHECK(first == 0);
            }
        }
    }
    CHECK(round_trip(Int4{}, {0.5f, 0.5f, 0.5f}) == Vector(3, 0.5f));  // no scale: all are the zero point
    CHECK(round_trip(Int2{}, {-65504, -65504}) == Vector(2, -65504));
    for (const Precision &type : {Precision(F32{}), Precision(F16{}), Precision(BF16{})}) {
        Vector got = round_trip(type, {0.0f, -0.0f, -1e-40f, 1e38f, INFINITY, -INFINITY, NAN, 1});
        for (int i = 0; i < 6; i++) CHECK(std::signbit(got[i]) == (i == 1 || i == 2 || i == 5));
        CHECK((std::isinf(got[4]) && std::isinf(got[5]) && std::isnan(got[6]) && got[7] == 1));
    }
}

TEST_CASE("a row is written and read to its last byte and not beyond, and reads as the definition says") {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *memory = (char *)mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(mprotect(memory + page, page, PROT_NONE) == 0);  // what touches it crashes
    for (const Precision &type : all_of<Precision>()) {
        CAPTURE(std::string(name_of(type)));
        Random random{2};
        for (int width = 1; width <= 260; width++) {
            Vector numbers = reference::random_floats(random, width);
            double size = std::exp2(random.uniform(-16, 15)), spread = random.uniform(0, 1) < 0.5 ? 0 : 12;
            for (float &x : numbers) x *= (float)(size * std::exp2(-random.uniform(0, spread)));
            char *row = memory + page - row_bytes(type, width);
            row[-1] = 77;
            CHECK(differing(round_trip(type, numbers, row), defined_vector(type, numbers)) == 0);
            CHECK(row[-1] == 77);
        }
    }
    munmap(memory, 2 * page);
}

// ---- A cache, and beside it what it must hold --------------------------------------------------------------

static int block_of(int position) { return position / 32; }

// One side, layer and head of a sequence as the definitions have it.
struct Column {
    Precision type;
    bool keys, blocks;
    std::vector<Vector> fresh = {};   // (position): as the queries of the same block read it
    std::vector<Vector> stored = {};  // (position): as all others do; where there are blocks, of full ones
    std::vector<Vector> sinks = {};   // (position): as it was when it came

    void append(const Vector &x) {
        fresh.push_back(blocks ? reference::read_vector("f16", x) : x);
        sinks.resize(std::max(sinks.size(), fresh.size()));
        sinks[fresh.size() - 1] = fresh.back();
        if (!blocks) stored.push_back(defined_vector(type, x));
        if (!blocks || fresh.size() % 32) return;
        std::vector<Vector> block(fresh.end() - 32, fresh.end());
        if (keys) block = reference::read_block(name_of(type), block);
        for (const Vector &vector : block) stored.push_back(keys ? vector : defined_vector(type, vector));
    }
    void rewind(int length) {
        fresh.resize(length);
        stored.resize(blocks ? block_of(length) * 32 : length);
    }
    // What the query at `reader` reads of position t.
    const Vector &read(int t, int reader) const {
        return blocks && block_of(t) == block_of(reader) ? fresh[t] : stored[t];
    }
};

struct Scene {
    Cache cache;
    std::vector<Column> columns;  // (side, layer, kv_head, sequence)
    uint64_t vectors = 0;         // so far: no two get the same numbers
    std::function<Vector(Random &, int width)> numbers;
    int refusals = 0, rewinds = 0;  // of walk(); rewinds: that went further back than was asked for

    Scene(const CacheShape &shape, const Layout &layout, const Precision &type_k, const Precision &type_v)
        : cache(opened(shape, layout, type_k, type_v)) {
        for (bool keys : {true, false}) {
            const Precision &type = keys ? type_k : type_v;
            for (int i = 0; i < shape.layers * shape.kv_heads * shape.sequences; i++)
                columns.push_back({type, keys, has_blocks(type)});
        }
        numbers = [](Random &random, int width) {
            Vector vector = reference::random_floats(random, width, -4, 4);
            vector[width / 2] *= 50;  // a few channels are large at every position
            return vector;
        };
    }
    Column &column(bool keys, int layer, int head, int sequence) {
        const CacheShape &s = cache.stores[0].shape;
        return columns[(((keys ? 0 : s.layers) + layer) * s.kv_heads + head) * s.sequences + sequence];
    }

    // ---- Storing: one pass of the engine, `counts` new positions of each of `sequences` ----
    void pass(const std::vector<int> &sequences, const std::vector<int> &counts) {
        const CacheShape &s = cache.stores[0].shape;
        Batch batch;
        for (size_t i = 0; i < sequences.size(); i++)
            for (int t = 0; t < counts[i]; t++)
                batch.add(0, sequences[i], (int)column(true, 0, 0, sequences[i]).fresh.size() + t);
        std::vector<Span> spans = spans_of(batch);
        Vector cos_sin;  // no rotation, so that sinks are what was stored
        for (int i = 0; i < batch.count() * s.key_width; i++) cos_sin.push_back(i % s.key_width < s.key_width / 2);
        Pass pass = {batch.count(), nullptr, spans.data(), cos_sin.data(), nullptr};
        for (int layer = 0; layer < s.layers; layer++) {
            Vector keys = vectors_of(true, layer, batch), values = vectors_of(false, layer, batch);
            PassVectors own_keys = {keys.data(), s.kv_heads, s.key_width};
            PassVectors own_values = {values.data(), s.kv_heads, s.value_width};
            Attention task = {nullptr,    nullptr, own_keys, own_values,
                              cache.stores[0].view, layer, {}, {1, s.kv_heads, s.key_width}, 1, {}};
            plain::store_rows(cpu, task, pass);
            for (int row = 0; row < pass.count; row += 1 + row % 7)
                REQUIRE(wrong(layer, spans[row], own_keys, own_values, spans[row].position + 1) == 0);
            REQUIRE(wrong(layer, spans.back(), own_keys, own_values, spans.back().position + 1) == 0);
            plain::keep_residual(cpu, task, pass);
        }
    }
    // Vectors of one side of a pass, (rows, kv_heads, width), which the columns take, too.
    Vector vectors_of(bool keys, int layer, const Batch &batch) {
        Vector all;
        for (int sequence : batch.sequences) {
            for (int head = 0; head < cache.stores[0].shape.kv_heads; head++) {
                Random random{++vectors};
                Vector vector =
                    numbers(random, keys ? cache.stores[0].shape.key_width : cache.stores[0].shape.value_width);
                column(keys, layer, head, sequence).append(vector);
                scene::append(all, vector);
            }
        }
        return all;
    }
    // Grows a sequence and stores, in passes as long as the layout allows.
    void append(int sequence, int count) {
        grow(cache, sequence, count);
        for (int size; count > 0; count -= size) pass({sequence}, {size = std::min(count, chunk_of(cache))});
    }
    int rewind_to(int sequence, int length) {
        const int kept = rewind(cache, sequence, length);
        for (size_t i = sequence; i < columns.size(); i += cache.stores[0].shape.sequences) columns[i].rewind(kept);
        return kept;
    }

    // ---- Reading: how much of what a query finds in its segments is not as defined, positions before `end` ----
    int wrong(int layer, const Span &span, const PassVectors &own_keys, const PassVectors &own_values, int end) {
        Visible visible = visible_of(cache.layout, 0);
        std::vector<float> frequencies(cache.stores[0].shape.key_width / 2);
        std::vector<std::pair<int, bool>> expected;  // position, a sink?
        int window = visible.window, sinks = visible.sinks, p = span.position, first = 0;
        if (window && p >= window + sinks) {
            first = p - window + 1;
            for (int t = 0; t < sinks; t++) expected.push_back({t, true});
        }
        for (int t = first; t <= p; t++) expected.push_back({t, false});
        int count = 0;
        for (int head = 0; head < cache.stores[0].shape.kv_heads; head++) {
            Segments seen;
            HeadRows rows = {cache.stores[0].view, layer, head, own_keys, own_values};
            add_sinks(seen, rows, span, visible);
            add_rows(seen, rows, span, visible);
            const Column &keys = column(true, layer, head, span.sequence);
            const Column &values = column(false, layer, head, span.sequence);
            size_t at = 0;
            for (int i = 0; i < seen.count; i++) {
                const Segment &segment = seen.list[i];
                for (int t = segment.begin; t < segment.end; t++, at++) {
                    REQUIRE((at < expected.size() && expected[at].first == t));
                    bool sink = expected[at].second;
                    if (segment.unrotated != sink) count++;
                    if (segment.shift != (sink ? first - sinks : 0)) count++;
                    if (t >= end) continue;
                    count +=
                        differing(read(segment, true, t, frequencies.data()), sink ? keys.sinks[t] : keys.read(t, p));
                    count += differing(read(segment, false, t, nullptr), sink ? values.sinks[t] : values.read(t, p));
                }
            }
            count += at != expected.size();
        }
        return count;
    }
    static Vector read(const Segment &segment, bool keys, int t, const float *frequencies) {
        Vector numbers;
        (keys ? segment.keys : segment.values).type.visit([&](auto format) {
            for (int c = 0; c < (keys ? segment.keys : segment.values).width; c++)
                numbers.push_back(
                    keys ? plain::key_number<decltype(format)>(segment, t, c, frequencies, segment.keys.width)
                         : format.number(segment.values.row(t), c));
        });
        return numbers;
    }
    // What the next query of a sequence would read of the past.
    int wrong(int sequence) {
        int count = 0, length = cache.lengths[sequence];
        Vector nothing((size_t)cache.stores[0].shape.kv_heads *
                       std::max(cache.stores[0].shape.key_width, cache.stores[0].shape.value_width));
        for (int layer = 0; layer < cache.stores[0].shape.layers; layer++)
            count += wrong(layer, {0, 1, sequence, length, length, length + 1},
                           {nothing.data(), cache.stores[0].shape.kv_heads, cache.stores[0].shape.key_width},
                           {nothing.data(), cache.stores[0].shape.kv_heads, cache.stores[0].shape.value_width}, length);
        return count;
    }

    void walk(int steps, uint64_t seed);
};

// `steps` times sequences grow, go back or end. What cannot be is refused in one line and changes nothing; what each
// sequence reads is right after every step.
void Scene::walk(int steps, uint64_t seed) {
    CAPTURE(seed);
    const CacheShape &s = cache.stores[0].shape;
    Random random{seed};
    auto below = [&](int end) { return (int)(random.bits() % (uint64_t)end); };
    bool is_paged = std::holds_alternative<Paged>(cache.layout), is_ring = std::holds_alternative<Ring>(cache.layout);
    std::vector<int> reached = cache.lengths;
    auto refused = [&](auto action, const std::string &part) {
        std::vector<int> lengths = cache.lengths;
        PagePool before = is_paged ? *cache.stores[0].pool : PagePool{};
        std::string line = error_of(action);
        if (line.empty()) return false;
        REQUIRE(contains(line, part));
        REQUIRE(!contains(line, "\n"));
        REQUIRE(cache.lengths == lengths);
        if (is_paged)
            REQUIRE((before.table == cache.stores[0].pool->table && before.free == cache.stores[0].pool->free));
        refusals++;
        return true;
    };
    for (int step = 0; step < steps; step++) {
        CAPTURE(step);
        int sequence = below(s.sequences), length = cache.lengths[sequence], what = below(20);
        if (what < 13) {
            int count = 1 + below(what < 3 ? 1 : what == 12 && is_ring ? 2 * s.window + 40 : 40);
            int page = s.page, needed = (length + count + page - 1) / page - (length + page - 1) / page;
            int free = is_paged ? (int)cache.stores[0].pool->free.size() : needed;
            std::string part;
            if (needed > free)
                part = counted(free, "free page") + " of " + counted(page, "position") + ", " + std::to_string(needed) +
                       " are needed";
            if (!is_ring && length + count > s.capacity)
                part = "holds " + counted(s.capacity, "position") + ", " + std::to_string(length + count);
            int other = below(s.sequences);
            if (!part.empty()) {
                REQUIRE(refused([&] { grow(cache, sequence, count); }, part));
            } else if (other != sequence && count < 5 && !is_paged && cache.lengths[other] < s.capacity) {
                grow(cache, sequence, count), grow(cache, other, 1);
                pass({other, sequence}, {1, count});
            } else {
                append(sequence, count);
            }
            for (int i : {sequence, other}) reached[i] = std::max(reached[i], cache.lengths[i]);
        } else {
            int to = what > 17 ? 0 : is_ring && below(4) ? std::max(0, length - below(60)) : below(length + 1);
            const int whole = blocks_of(cache) && block_of(to) < block_of(length) ? to / 32 * 32 : to;
            const int kept = rewind_to(sequence, to);
            // A ring can always go back by what one pass may have stored.
            const bool far = is_ring && reached[sequence] - whole >= chunk_of(cache);
            REQUIRE((kept == whole || (kept == 0 && far)));
            rewinds += kept < to, reached[sequence] = kept ? reached[sequence] : 0;
        }
        check_pages(cache);
        if (is_paged) REQUIRE((int)cache.stores[0].pool->references.size() == s.pages);
        for (int i = 0; is_paged && i < s.pages; i++) REQUIRE(cache.stores[0].pool->references[i] <= 1);
        for (int i = 0; i < s.sequences; i++)
            if (i == sequence || step % 8 == 0) REQUIRE(wrong(i) == 0);
    }
}

TEST_CASE("sequences that grow, go back and end read what they stored, in every layout and precision") {
    uint64_t seed = seed_of_run();
    Random random{seed};
    for_each_cache([&](const Layout &layout, const Precision &type_k, const Precision &type_v) {
        int page = 1 + (int)(random.bits() % 40), window = 1 + (int)(random.bits() % 70);
        CacheShape shape = {2, 2, 34, 21, 3, 110, page, 0, window, (int)(random.bits() % 9)};
        shape.pages = std::max(2, 220 / shape.page);
        CAPTURE(page);
        CAPTURE(window);
        Scene(shape, layout, type_k, type_v).walk(25, random.bits());
    });
}

TEST_CASE("there is one of a cache: it moves, and is not copied") {
    CHECK((std::is_move_constructible_v<Cache> && !std::is_copy_constructible_v<Cache>));
    CHECK((std::is_move_assignable_v<Cache> && !std::is_copy_assignable_v<Cache>));
}

TEST_CASE("thousands of steps in pages of any size: none is lost, shared, or read by whom it is not") {
    for (int page : {1, 7, 16, 64, 128}) {
        CAPTURE(page);
        Scene scene({2, 2, 4, 5, 6, 100, page, std::max(2, 250 / page)}, Paged{}, F32{}, F32{});  // of 600 positions
        scene.walk(1500, seed_of_run() + (uint64_t)page);
        CHECK(scene.refusals > 15);
    }
}

TEST_CASE("thousands of steps in rings of any size: no row is overwritten that a query may still see") {
    const std::pair<Precision, Precision> types[] = {{F32{}, F16{}}, {Int4{}, F32{}}, {Int2{}, Int4{}}};
    int rewinds = 0;
    for (int window : {1, 31, 32, 33, 100, 300}) {
        int past_block = (window + std::get<Ring>(opened_ring(window, 0)).chunk() - 1) % 32, turn = 0;
        for (int sinks : {0, 4, (33 - past_block) % 32}) {  // the last needs one row beyond whole blocks
            CAPTURE(window);
            CAPTURE(sinks);
            auto [type_k, type_v] = types[turn++];
            Scene scene({1, 1, 4, 3, 2, INT_MAX, 16, 0, window, sinks}, Ring{}, type_k, type_v);
            scene.append(0, std::max(1, window + sinks - 1));  // the last query that sees all
            scene.append(0, chunk_of(scene.cache));
            scene.append(0, 2 * window + 100);
            REQUIRE(scene.wrong(0) == 0);
            scene.walk(100, seed_of_run() + (uint64_t)window);
            rewinds += scene.rewinds;
        }
    }
    CHECK(rewinds > 0);
}

TEST_CASE("what is not finite or too large makes all that share its scale NaN, and nothing else") {
    const int positions = 64, heads = 2, width = 80;
    for (const Precision &type : all_of<Precision>()) {
        for (float bad : {(float)NAN, (float)INFINITY, -(float)INFINITY, 3e38f, -1e30f}) {
            CAPTURE(std::string(name_of(type)));
            CAPTURE(bad);
            Scene scene({1, heads, width, width, 1, positions}, Contiguous{}, type, type);
            int calls = 0;  // (side, position, head)
            scene.numbers = [&](Random &random, int) {
                Vector vector = reference::random_floats(random, width);
                if (calls++ % (positions * heads) == 5 * heads + 1) vector[40] = bad;
                return vector;
            };
            scene.append(0, positions);
            CHECK(scene.wrong(0) == 0);
            int nans = 0, share = sharing(type, width);  // of the keys, a block's positions or a row's channels share
            for (int t = 0; t < positions; t++)
                for (float x : scene.column(true, 0, 1, 0).stored[t]) nans += std::isnan(x);
            CHECK(nans == (share == 1 ? std::isnan(bad) : share));
        }
    }
}

TEST_CASE("a new cache is zero where nothing was stored; a page that was freed reads as NaN in every precision") {
    for (const Precision &type : all_of<Precision>()) {
        CAPTURE(std::string(name_of(type)));
        Scene scene({2, 2, 20, 33, 1, 64}, Paged{}, type, type);
        auto expect = [&](bool nan) {
            Vector none(2 * 33);
            Span span = {0, 1, 0, 64, 64, 65};
            for (int layer : {0, 1}) {
                Segments seen;
                add_rows(seen, {scene.cache.stores[0].view, layer, 1, {none.data(), 2, 20}, {none.data(), 2, 33}}, span,
                         {});
                for (int t = 32; t < 64; t++)
                    for (bool keys : {true, false})
                        for (float x : Scene::read(seen.list[0], keys, t, none.data()))
                            REQUIRE((nan ? std::isnan(x) : x == 0));
            }
        };
        grow(scene.cache, 0, 64);
        expect(false);
        rewind(scene.cache, 0, 0);
        scene.append(0, 64);
        CHECK(rewind(scene.cache, 0, 32) == 32);  // pages 0 and 1 stay
        grow(scene.cache, 0, 32);                 // the same pages, nothing stored in them yet
        expect(true);
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
}

TEST_CASE("an unknown name is answered with the known ones, and memory that cannot be had in one line") {
    for (std::string name : {"f17", "", "f16 ", "bf", "int", "int44"})
        CHECK(error_of([&] { parse_precision("-ctk", name); }) ==
              "-ctk " + name + ": unknown type; known are " + precision_names());
    CHECK(error_of([] { parse_layout("--cache", "heap"); }) ==
          "--cache heap: unknown layout; known are none (recompute everything) " + layout_names());
    for (const Layout &layout : all_of<Layout>()) {
        CAPTURE(std::string(name_of(layout)));
        // K and V each fit into this machine, but not both.
        int some = (int)(0.6 * cpu.room().bytes / (1024 * sizeof(float) * 64));
        for (CacheShape shape :
             {CacheShape{80, 64, 128, 128, 1, INT_MAX}, CacheShape{80, 64, 128, 128, 4096, INT_MAX},
              CacheShape{INT_MAX, INT_MAX, 128, 128, 1, INT_MAX}, CacheShape{1, 64, 1024, 1024, 1, some}}) {
            shape.window = shape.capacity - 1000;
            std::string line = error_of([&] { opened(shape, layout, F32{}); });
            CHECK(contains(line, "the KV cache"));
            CHECK(contains(line, "lower -c"));
            CHECK(!contains(line, "\n"));
        }
    }
    // Of layers that see everything, also where the first ones look back over a window.
    std::vector<CacheShape> shapes(2, {80, 64, 128, 128, 1, 1 << 24});
    shapes[0].local = 512;
    CHECK(contains(error_of([&] { ::open_cache(cpu, shapes, Paged{}, F32{}, F32{}); }), "for 16777216 positions"));
}
