// Attention of prefill on the card: the plain twin and the tensor cores against the equation in double precision, over
// every cache there is. With tests/cuda_on_cpu.h the kernels run on the CPU; nvcc compiles the same for a real card.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#define POISON_FREED_PAGES
#ifndef __CUDACC__
#include "cuda_on_cpu.h"
#endif
#include "../tensor_cores.cu"

#include <doctest/doctest.h>

#include "cuda_caches.h"
#include "reference.h"

using reference::Expected;
using reference::Random;
using reference::same_bits;
using reference::Seen;
using reference::Side;
using reference::View;
using reference::worst;

static Device &card() {
    static Device device;
    return device;
}

// ---- What a sequence says ----------------------------------------------------------------------------------

static std::vector<float> frequencies_of(int width) {
    std::vector<float> frequencies(width / 2);
    for (int i = 0; i < width / 2; i++) frequencies[i] = (float)std::pow(10000.0, -2.0 * i / width);
    return frequencies;
}

// Rotated keys (kv_heads, D), values (kv_heads, value_width) and queries (query_heads, D) of each position.
struct Story {
    std::vector<float> keys, values, queries;
};

// Whole multiples of `step` below 1 in magnitude.
static std::vector<float> multiples(Random &random, size_t count, double step) {
    std::vector<float> numbers(count);
    for (float &number : numbers) number = (float)(std::nearbyint(random.uniform(-1, 1) / step) * step);
    return numbers;
}

// Numbers that f16 and bf16 have, the queries after the kernels have multiplied them by log2(e) / sqrt(D).
static Story exact_story(Random &random, const Heads &heads, int value_width, int positions) {
    size_t count = (size_t)positions;
    Story story = {multiples(random, count * heads.kv * heads.width, 1.0 / 64),
                   multiples(random, count * heads.kv * value_width, 1.0 / 64),
                   multiples(random, count * heads.query * heads.width, 1.0 / 8)};
    for (float &number : story.queries) number /= 1.44269504f / std::sqrt((float)heads.width);
    return story;
}

static Story any_story(Random &random, const Heads &heads, int value_width, int positions) {
    size_t count = (size_t)positions;
    return {reference::random_floats(random, count * heads.kv * heads.width),
            reference::random_floats(random, count * heads.kv * value_width),
            reference::random_floats(random, count * heads.query * heads.width, -8, 8)};
}

// ---- One chunk ---------------------------------------------------------------------------------------------

struct Place {
    Layout layout;
    int page = 16, window = 0, sinks = 0, layer_window = 0;
};

// A cache of two sequences and two layers, all NaN at first, and the chunk that the second sequence grows by last.
struct Scene {
    static constexpr int layer = 1, sequence = 1, row = 2;  // the chunk's first row of the pass
    Heads heads;
    const Story &story;
    Cache cache;
    std::vector<float> frequencies;
    Visible visible;
    Span chunk = {};
    std::vector<float> queries, keys, values;  // of the pass; the rows before the chunk's are NaN

    Scene(const Heads &heads, int value_width, const Place &place, const Precision &k, const Precision &v,
          const Story &story, int capacity)
        : heads(heads), story(story), frequencies(frequencies_of(heads.width)) {
        CacheShape shape;
        shape.layers = 2, shape.kv_heads = heads.kv, shape.key_width = heads.width, shape.value_width = value_width;
        shape.sequences = 2, shape.capacity = capacity, shape.page = place.page;
        shape.window = std::max(1, place.window), shape.sinks = place.sinks;
        cache = open_cache(shape, place.layout, k, v);
        visible = visible_of(cache.layout, place.layer_window);
        for (const CacheRows *side : {&cache.keys, &cache.values, &cache.recent_keys, &cache.recent_values,
                                      &cache.sink_keys, &cache.sink_values})
            if (side->data) memset(side->data, 0xff, side->bytes(shape.layers));
    }

    int position() const { return cache.lengths[sequence]; }

    // Stores the next `count` positions, as those of a pass.
    void begin(int count) {
        grow(cache, 0, 1);  // pages of another sequence lie between
        int first = grow(cache, sequence, count);
        chunk = {row, count, sequence, first, first, first + count};
        auto take = [&](std::vector<float> &to, const std::vector<float> &from, int width) {
            to.assign((size_t)row * width, NAN);
            to.insert(to.end(), from.begin() + (size_t)first * width, from.begin() + (size_t)(first + count) * width);
        };
        take(keys, story.keys, heads.kv * heads.width);
        take(values, story.values, heads.kv * cache.values.width);
        take(queries, story.queries, heads.query * heads.width);
        for_each_span([&](const Span &span, int head) {
            store_span(cache, layer, span, head, keys.data(), values.data());
            for (int t = span.position; t < std::min(span.position + span.count, visible_of(cache.layout, 0).sinks);
                 t++)
                store_sink_of(t, head);
        });
    }
    void end() {
        for_each_span(
            [&](const Span &span, int head) { keep_recent(cache, layer, span, head, keys.data(), values.data()); });
    }
    void grow_to(int length) {
        for (int rest; (rest = length - position()) > 0; end()) begin(std::min({rest, chunk_of(cache), 512}));
    }

    template <class Use>
    void for_each_span(Use use) {
        std::vector<int> sequences(chunk.count, sequence), positions;
        for (int t = chunk.first; t < chunk.end; t++) positions.push_back(t);
        for (Span span : spans_of(sequences.data(), positions.data(), chunk.count, group_size, true)) {
            span.row += row;
            for (int head = 0; head < heads.kv; head++) use(span, head);
        }
    }
    void store_sink_of(int t, int head) {
        std::vector<float> turn(heads.width);
        rope_angles(turn.data(), frequencies, &t, 1);
        size_t at = (size_t)(row + t - chunk.position) * heads.kv + head;
        store_sink(cache, layer, sequence, t, head, &keys[at * heads.width], turn.data(),
                   &values[at * cache.values.width]);
    }

    // What the card makes of the chunk: (count, query_heads, value_width).
    std::vector<float> attended(bool exact, DType products = DType::f16) const {
        CardCache there(card(), cache);
        DeviceArray<float> query = upload(card(), queries), key = upload(card(), keys), value = upload(card(), values);
        DeviceArray<float> angles = upload(card(), frequencies);
        size_t width = (size_t)heads.query * cache.values.width, count = (row + chunk.count) * width;
        DeviceArray<float> out = upload(card(), std::vector<float>(count, NAN));
        DeviceAttention task = {out.data(), query.data(), key.data(), value.data(),  there.view,
                                layer,      visible,      heads,      angles.data(), false};
        attend_chunk(card(), task, chunk, exact, products);
        std::vector<float> all = download(card(), out.data(), count);
        for (size_t i = 0; i < row * width; i++) REQUIRE(std::isnan(all[i]));
        return {all.begin() + row * width, all.end()};
    }

    // The same of a chunk that is all there is, by the naive path: keys and values are read from the pass.
    std::vector<float> attended_naively(bool exact, DType products = DType::f16) const {
        DeviceArray<float> query = upload(card(), queries), key = upload(card(), keys), value = upload(card(), values);
        DeviceArray<float> angles = upload(card(), frequencies);
        size_t width = (size_t)heads.query * heads.width, vector = (size_t)heads.kv * heads.width;
        DeviceArray<float> out = upload(card(), std::vector<float>(chunk.count * width, NAN));
        CacheView own;
        own.layout = Layout(Contiguous{chunk.count});
        auto rows_of = [&](const DeviceArray<float> &vectors) {
            return CacheRows{(char *)(vectors.data() + row * vector), heads.width * sizeof(float), heads.width,
                             heads.kv, chunk.count};
        };
        own.keys = own.sink_keys = rows_of(key);
        own.values = own.sink_values = rows_of(value);
        own.sinks = visible.sinks;
        DeviceAttention task = {out.data(),
                                query.data() + row * width,
                                key.data() + row * vector,
                                value.data() + row * vector,
                                own,
                                0,
                                visible,
                                heads,
                                angles.data(),
                                true};
        attend_chunk(card(), task, {0, chunk.count, 0, 0, 0, chunk.count}, exact, products);
        return download(card(), out.data(), chunk.count * width);
    }
};

// ---- What is right -----------------------------------------------------------------------------------------

// How products on tensor cores round, as unit roundoffs: the queries, the weights of the values, and keys and values on
// their way there. 0: not at all.
struct Rounding {
    double queries = 0, weights = 0, keys = 0, values = 0;
};

static double unit_of(DType products) { return products == DType::bf16 ? 0x1p-8 : 0x1p-11; }

// One query head, and how far from it tensor cores may end. A sum of n products there is off by at most 2 (n + n / 16)
// 2^-24 of its magnitudes: their adders cut off what ours would round. f16 has no numbers between multiples of 2^-24.
static void attention(Expected &out, const float *query, const std::vector<Seen> &seen, int key_width, int value_width,
                      const Rounding &rounding) {
    double most = -INFINITY, error = 0, total = 0, root = std::sqrt((double)key_width);
    double sum_error = reference::gamma(2.2 * key_width + 20);
    std::vector<double> weight;
    for (const Seen &one : seen) {
        const reference::Reading *key = one.key ? one.key : one.moved.data();
        double score = 0, off = 0;
        for (int i = 0; i < key_width; i++) {
            double size = std::fabs(query[i] * key[i].value);
            score += query[i] * key[i].value;
            off += (rounding.queries + rounding.keys + rounding.queries * rounding.keys) * size;
            off += sum_error * std::fabs(query[i]) * key[i].size + std::fabs(query[i]) * key[i].off;
            if (rounding.keys > 0) off += 0x1p-25 * std::fabs(query[i]);
            if (rounding.queries > 0) off += 0x1p-25 * root * std::fabs(key[i].value);
        }
        weight.push_back(score / root);
        most = std::max(most, weight.back());
        error = std::max(error, off / root);
    }
    for (double &score : weight) total += score = std::exp(score - most);
    double relative = std::expm1(2 * error) + rounding.weights + rounding.values + rounding.weights * rounding.values +
                      reference::gamma(2.2 * (double)seen.size() + 40);
    for (int i = 0; i < value_width; i++) {
        double sum = 0, bound = 0;
        for (size_t t = 0; t < seen.size(); t++) {
            const reference::Reading &value = seen[t].value[i];
            sum += weight[t] / total * value.value;
            bound += weight[t] / total * (relative * value.size + (rounding.values > 0 ? 0x1p-25 : 0));
            if (rounding.weights > 0) bound += 0x1p-25 / total * std::fabs(value.value);
        }
        out.add(sum, bound + 1e-36);
    }
}

// A sequence as double precision has it.
struct Truth {
    const Scene &scene;
    Side keys, values;
    Truth(const Scene &scene, int length)
        : scene(scene),
          keys{name_of(scene.cache.type_k), true, (size_t)scene.heads.kv, (size_t)scene.cache.keys.width},
          values{name_of(scene.cache.type_v), false, (size_t)scene.heads.kv, (size_t)scene.cache.values.width} {
        for (int t = 0; t < length; t++) {
            keys.add(&scene.story.keys[t * keys.row()]);
            values.add(&scene.story.values[t * values.row()]);
        }
    }
    // What the queries of `position` should get: (query_heads, value_width).
    void add(Expected &out, int position, const Rounding *rounding) const {
        const Heads &heads = scene.heads;
        for (int head = 0; head < heads.query; head++) {
            const float *query = &scene.story.queries[((size_t)position * heads.query + head) * heads.width];
            std::vector<Seen> seen = reference::seen_by(position, View{scene.visible.window, scene.visible.sinks}, keys,
                                                        values, heads.kv_head(head), scene.frequencies);
            if (rounding)
                attention(out, query, seen, (int)keys.width, (int)values.width, *rounding);
            else
                reference::attention(out, query, seen, (int)keys.width, (int)values.width);
        }
    }
};

// ---- Checks ------------------------------------------------------------------------------------------------

// All tokens of a chunk, or some of a long one.
static std::vector<int> tokens_of(const Span &chunk) {
    std::vector<int> tokens;
    for (int i = 0; i < chunk.count; i++)
        if (chunk.count <= 33 || i < 2 || i + 2 > chunk.count || i % 32 == 31 || i % 32 == 0) tokens.push_back(i);
    return tokens;
}

static double worst_of(const Scene &scene, const std::vector<float> &out, const Rounding *rounding) {
    Truth truth(scene, scene.chunk.end);
    Expected expected;
    std::vector<float> some;
    size_t width = (size_t)scene.heads.query * scene.cache.values.width;
    for (int i : tokens_of(scene.chunk)) {
        truth.add(expected, scene.chunk.position + i, rounding);
        some.insert(some.end(), out.begin() + i * width, out.begin() + (i + 1) * width);
    }
    return worst(some, expected);
}

static bool is_wide(const Precision &type) { return std::holds_alternative<BF16>(type); }
static bool is_plain(const Precision &type) {
    return std::visit([](auto format) { return format.scale_channels == 0; }, type);
}

enum class Numbers { exact, any };

// Of a story with exact numbers only what is decoded from codes is rounded, and the weights.
static Rounding rounding_of(const Scene &scene, DType products, Numbers numbers) {
    const Cache &cache = scene.cache;
    double unit = unit_of(is_wide(cache.type_k) || is_wide(cache.type_v) ? DType::bf16 : products);
    bool any = numbers == Numbers::any;
    return {any ? unit : 0, unit, any || !is_plain(cache.type_k) ? unit : 0, any || !is_plain(cache.type_v) ? unit : 0};
}

static void check_plain(const Scene &scene) { REQUIRE(worst_of(scene, scene.attended(true), nullptr) <= 1); }

static void check_tiles(const Scene &scene, DType products, Numbers numbers = Numbers::exact) {
    Rounding rounding = rounding_of(scene, products, numbers);
    REQUIRE(worst_of(scene, scene.attended(false, products), &rounding) <= 1);
}

template <class List>
static std::vector<List> all_of() {
    std::vector<List> all;
    for_each_type<List>([&](auto type) { all.push_back(type); });
    return all;
}

// Calls use(layout, type_k, type_v) for all of them, 147.
template <class Use>
static void for_each_cache(Use use) {
    for (const Layout &layout : all_of<Layout>()) {
        for (const Precision &type_k : all_of<Precision>()) {
            for (const Precision &type_v : all_of<Precision>()) {
                CAPTURE(std::string(name_of(layout)));
                CAPTURE(std::string(name_of(type_k)));
                CAPTURE(std::string(name_of(type_v)));
                use(layout, type_k, type_v);
            }
        }
    }
}

// ---- Every cache -------------------------------------------------------------------------------------------

TEST_CASE("the plain twin is the equation over every cache, whatever the widths of K and V") {
    Random random{1};
    int turn = 0;
    const Heads all_heads[] = {{2, 2, 20}, {3, 1, 34}, {9, 1, 12}};
    Story stories[3];
    for (int i = 0; i < 3; i++) stories[i] = any_story(random, all_heads[i], 19, 60);
    for_each_cache([&](const Layout &layout, const Precision &k, const Precision &v) {
        int i = turn % 3, page = turn % 2 ? 4 : 16, cached = turn % 5 ? 37 : 29;
        Scene scene(all_heads[i], 19, {layout, page, 40, 3, 0}, k, v, stories[i], 60);
        scene.grow_to(cached);
        scene.begin(1 + turn++ % 9);
        check_plain(scene);
    });
}

TEST_CASE("tiles are the equation over every cache") {
    Random random{2};
    int turn = 0;
    Heads heads = {6, 2, 64};
    Story story = exact_story(random, heads, 64, 90);
    for_each_cache([&](const Layout &layout, const Precision &k, const Precision &v) {
        int page = turn % 2 ? 4 : 16, cached = turn % 5 ? 37 : 20;
        Scene scene(heads, 64, {layout, page, 40, 3, 0}, k, v, story, 90);
        scene.grow_to(cached);
        scene.begin(turn % 4 ? 1 + turn % 7 : 32);
        check_tiles(scene, turn++ % 3 ? DType::f16 : DType::bf16);
    });
}

// ---- Every shape -------------------------------------------------------------------------------------------

TEST_CASE("head dims, groups, lengths of a chunk and of what is cached before it") {
    Random random{3};
    struct Length {
        int cached, tokens;
    };
    const Length lengths[] = {{0, 1}, {0, 31}, {0, 32}, {0, 33}, {5, 33}, {37, 1}, {37, 31}, {5, 32}, {37, 32}, {5, 1}};
    const Precision types[] = {F16{}, Int4{}, BF16{}, Int8{}, F32{}, Int2{}, FP8{}};
    int turn = 0;
    for (int width : {64, 80, 96, 128, 256}) {
        for (int group : {1, 3, 7, 8}) {
            Heads heads = {group, 1, width};
            Story story = exact_story(random, heads, width, 70);
            for (int i = 0; i < 3; i++, turn++) {
                const Length &length = lengths[turn % 10];
                CAPTURE(width);
                CAPTURE(group);
                CAPTURE(length.cached);
                CAPTURE(length.tokens);
                Scene scene(heads, width, {Contiguous{}}, types[turn % 7], types[turn % 6], story, 70);
                scene.grow_to(length.cached);
                scene.begin(length.tokens);
                check_tiles(scene, DType::f16);
                if (length.tokens == 1) check_plain(scene);
            }
        }
    }
}

TEST_CASE("long chunks, and chunks behind much that is cached") {
    Random random{4};
    struct Long {
        Heads heads;
        int cached, tokens;
        Precision k, v;
    };
    for (const Long &one : {Long{{1, 1, 64}, 1000, 33, F16{}, F16{}}, Long{{1, 1, 128}, 1000, 1, Int4{}, Int4{}},
                            Long{{3, 1, 80}, 0, 200, F16{}, F16{}}, Long{{8, 1, 64}, 5, 200, BF16{}, BF16{}},
                            Long{{7, 1, 64}, 37, 200, Int4{}, Int8{}}, Long{{1, 1, 128}, 37, 200, F16{}, Int2{}}}) {
        CAPTURE(one.heads.query);
        CAPTURE(one.cached);
        Story story = exact_story(random, one.heads, one.heads.width, one.cached + one.tokens);
        Scene scene(one.heads, one.heads.width, {Paged{}, 16}, one.k, one.v, story, one.cached + one.tokens);
        scene.grow_to(one.cached);
        scene.begin(one.tokens);
        check_tiles(scene, DType::f16);
    }
}

// The plain twin takes as many as it computes in some 10 seconds.
TEST_CASE("a chunk of 1,000 tokens, and of several hundred in the plain twin") {
    Random random{12};
    for (Heads heads : {Heads{3, 1, 64}, Heads{4, 1, 128}}) {
        CAPTURE(heads.width);
        Story story = exact_story(random, heads, heads.width, 1000);
        for (int tokens : {heads.width == 64 ? 800 : 600, 1000}) {
            Scene scene(heads, heads.width, {Paged{}, 16}, F16{}, Int8{}, story, 1000);
            scene.begin(tokens);
            if (tokens < 1000) check_plain(scene);
            check_tiles(scene, DType::f16);
        }
    }
}

TEST_CASE("any numbers: queries, keys and values are rounded once") {
    Random random{5};
    Heads heads = {4, 2, 64};
    Story story = any_story(random, heads, 64, 80);
    for (DType products : {DType::f16, DType::bf16}) {
        for (Precision type : {Precision(F32{}), Precision(F16{}), Precision(BF16{}), Precision(Int4{})}) {
            Scene scene(heads, 64, {Contiguous{}}, type, type, story, 80);
            scene.grow_to(40);
            scene.begin(33);
            check_tiles(scene, products, Numbers::any);
        }
    }
}

// ---- Windows and sinks -------------------------------------------------------------------------------------

const Place windows[] = {{Ring{}, 16, 100, 4, 0},     {Ring{}, 16, 31, 1, 0},   {Ring{}, 16, 64, 0, 0},
                         {Ring{}, 16, 1, 4, 0},       {Ring{}, 16, 300, 33, 0}, {Ring{}, 16, 100, 4, 40},
                         {Contiguous{}, 16, 0, 0, 7}, {Paged{}, 7, 0, 0, 33},   {Paged{}, 4, 0, 0, 100},
                         {Ring{}, 16, 40, 2, 64}};

TEST_CASE("windows and sinks, before and long after the first position was dropped") {
    Random random{6};
    const Precision types[] = {F16{}, Int4{}, BF16{}, Int8{}, Int2{}};
    int turn = 0;
    for (const Place &place : windows) {
        for (Heads heads : {Heads{3, 1, 64}, Heads{2, 2, 128}}) {
            Story story = exact_story(random, heads, heads.width, 400);
            Scene scene(heads, heads.width, place, types[turn % 5], types[turn % 4], story, 400);
            for (int end : {21, 120, 350}) {
                CAPTURE(place.window);
                CAPTURE(place.layer_window);
                CAPTURE(end);
                int tokens = 1 + turn++ * 11 % 20;
                scene.grow_to(end - tokens);
                scene.begin(tokens);
                check_tiles(scene, DType::f16);
                if (turn % 3 == 0) check_plain(scene);
                scene.end();
            }
        }
    }
}

// ---- Without a cache ---------------------------------------------------------------------------------------

TEST_CASE("the naive path reads the pass itself, with the same bits as from an f32 cache") {
    Random random{7};
    for (Visible visible : {Visible{0, 0}, Visible{30, 4}, Visible{7, 0}, Visible{1, 1}}) {
        for (Heads heads : {Heads{3, 1, 64}, Heads{2, 2, 80}}) {
            CAPTURE(visible.window);
            Story story = exact_story(random, heads, heads.width, 50);
            Scene scene(heads, heads.width, {Contiguous{}}, F32{}, F32{}, story, 50);
            scene.begin(50);
            scene.visible = visible;
            for (DType products : {DType::f16, DType::bf16}) {
                std::vector<float> out = scene.attended_naively(false, products);
                Rounding rounding = rounding_of(scene, products, Numbers::exact);
                REQUIRE(worst_of(scene, out, &rounding) <= 1);
                if (!visible.sinks) REQUIRE(same_bits(out, scene.attended(false, products)));
            }
            std::vector<float> out = scene.attended_naively(true);
            REQUIRE(worst_of(scene, out, nullptr) <= 1);
            if (!visible.sinks) REQUIRE(same_bits(out, scene.attended(true)));
        }
    }
}

// ---- Sharper than any bound --------------------------------------------------------------------------------

TEST_CASE("queries of zero: a mean, in which every visible position counts once") {
    Random random{8};
    Heads heads = {2, 1, 64};
    Story story = exact_story(random, heads, 64, 1040);
    std::fill(story.queries.begin(), story.queries.end(), 0.0f);
    auto check = [&](const Place &place, const Precision &type, int cached, int tokens) {
        CAPTURE(std::string(name_of(place.layout)));
        CAPTURE(std::string(name_of(type)));
        CAPTURE(cached);
        Scene scene(heads, 64, place, type, type, story, 1040);
        scene.grow_to(cached);
        scene.begin(tokens);
        Rounding rounding = rounding_of(scene, DType::f16, Numbers::exact);
        rounding.keys = rounding.weights = 0;  // all scores are 0, all weights 1
        REQUIRE(worst_of(scene, scene.attended(false), &rounding) <= 1);
    };
    for (const Precision &type : {Precision(F16{}), Precision(BF16{}), Precision(Int4{})}) {
        check({Contiguous{}}, type, 1000, 33);
        check({Paged{}, 4}, type, 0, 70);
        for (const Place &place : windows) check(place, type, 330, 30);
    }
}

// Keys of -1 and 1, and each query is some earlier key, times 64: what comes out is that position's value, as it is.
static Story recalling_story(Random &random, const Heads &heads, int positions, std::vector<int> &recalled,
                             int window) {
    Story story = exact_story(random, heads, heads.width, positions);
    int width = heads.width;
    for (float &number : story.keys) number = random.bits() % 2 ? 1 : -1;
    for (int t = 0; t < positions; t++) {
        for (int head = 0; head < heads.query; head++) {
            int nearest = window ? std::max(0, t - window + 1) : 0;
            recalled.push_back(nearest + (int)(random.bits() % (t - nearest + 1)));
            const float *key = &story.keys[((size_t)recalled.back() * heads.kv + heads.kv_head(head)) * width];
            for (int i = 0; i < width; i++) story.queries[((size_t)t * heads.query + head) * width + i] = 64 * key[i];
        }
    }
    return story;
}

TEST_CASE("a query that is one of the keys gets that position's value, as it is") {
    Random random{9};
    const Precision types[] = {F16{}, BF16{}, F32{}};
    int turn = 0;
    for (const Place &place : {Place{Contiguous{}}, Place{Paged{}, 4}, Place{Paged{}, 7}, Place{Ring{}, 16, 96, 4, 0},
                               Place{Contiguous{}, 16, 0, 0, 50}}) {
        for (Heads heads : {Heads{3, 1, 128}, Heads{4, 2, 80}}) {
            CAPTURE(std::string(name_of(place.layout)));
            CAPTURE(heads.width);
            std::vector<int> recalled;
            Story story = recalling_story(random, heads, 190, recalled, std::max(place.window, place.layer_window));
            Scene scene(heads, heads.width, place, types[turn % 3], types[turn % 3], story, 190);
            scene.grow_to(150);
            scene.begin(turn++ % 2 ? 32 : 21);
            for (bool exact : {false, true}) {
                std::vector<float> out = scene.attended(exact), expected;
                for (int t = scene.chunk.first; t < scene.chunk.end; t++) {
                    for (int head = 0; head < heads.query; head++) {
                        size_t at = (size_t)recalled[t * heads.query + head] * heads.kv + heads.kv_head(head);
                        const float *value = &story.values[at * heads.width];
                        expected.insert(expected.end(), value, value + heads.width);
                    }
                }
                REQUIRE(out == expected);
            }
        }
    }
}

TEST_CASE("the same bits in every layout, and however a prompt is cut into chunks") {
    Random random{10};
    Heads heads = {3, 1, 64};
    Story story = any_story(random, heads, 64, 100);
    const std::vector<int> whole = {100}, cut = {1, 31, 35, 33};
    for (const Precision &type : {Precision(F16{}), Precision(Int8{}), Precision(Int4{})}) {
        CAPTURE(std::string(name_of(type)));
        auto run = [&](const Place &place, const std::vector<int> &chunks, bool exact) {
            Scene scene(heads, 64, place, type, type, story, 100);
            std::vector<float> all;
            for (int count : chunks) {
                scene.begin(count);
                std::vector<float> out = scene.attended(exact);
                all.insert(all.end(), out.begin(), out.end());
                scene.end();
            }
            return all;
        };
        for (bool exact : {false, true}) {
            std::vector<float> first = run({Contiguous{}}, whole, exact);
            REQUIRE(same_bits(first, run({Contiguous{}}, cut, exact)));
            REQUIRE(same_bits(first, run({Paged{}, 4}, cut, exact)));
            REQUIRE(same_bits(first, run({Paged{}, 1000}, whole, exact)));
            REQUIRE(same_bits(first, run({Ring{}, 16, 1000, 4, 0}, whole, exact)));
        }
    }
}

// ---- Beside the CPU ----------------------------------------------------------------------------------------

// Both are within their bounds of the equation, so this is what they are from each other.
TEST_CASE("the plain twin is the CPU's attend(), from the same bytes") {
    Random random{11};
    Heads heads = {6, 2, 64};
    Story story = any_story(random, heads, 64, 80);
    for (const Precision &type : all_of<Precision>()) {
        Scene scene(heads, 64, {Paged{}, 7}, type, type, story, 80);
        scene.grow_to(41);
        scene.begin(17);
        std::vector<int> sequences(17, Scene::sequence), positions;
        for (int t = scene.chunk.first; t < scene.chunk.end; t++) positions.push_back(t);
        AttentionPlan plan =
            plan_attention(sequences.data(), positions.data(), 17, heads, scene.cache, scene.frequencies, 1);
        size_t width = (size_t)heads.query * 64, vector = (size_t)heads.kv * 64;
        std::vector<float> out(17 * width);
        AttentionTask task = {out.data(),
                              &scene.queries[Scene::row * width],
                              {&scene.keys[Scene::row * vector], heads.kv, 64},
                              {&scene.values[Scene::row * vector], heads.kv, 64},
                              scene.cache,
                              Scene::layer,
                              scene.visible};
        attend(task, plan);
        REQUIRE(worst_of(scene, out, nullptr) <= 1);
        check_plain(scene);
    }
}

#ifdef CUDA_ON_CPU
// ---- Faults ------------------------------------------------------------------------------------------------

TEST_CASE("a barrier or a wait left out, a shuffle from the wrong lane, a vote lost: nowhere does one go unnoticed") {
    Random random{12};
    Heads heads = {2, 1, 64};
    Story story = any_story(random, heads, 64, 300);
    for (bool exact : {true, false}) {
        std::vector<std::function<bool()>> checks;
        for (auto [k, v] : {std::pair{Precision(BF16{}), Precision(F16{})}, {Int4{}, Int8{}}, {Int8{}, Int2{}}}) {
            for (const Place &place : {Place{Paged{}, 7}, Place{Ring{}, 16, 100, 3, 0}}) {
                auto scene = std::make_shared<Scene>(heads, 64, place, k, v, story, 300);
                scene->grow_to(200);
                scene->begin(60);
                checks.push_back([scene, exact] {
                    Rounding rounding = rounding_of(*scene, DType::f16, Numbers::any);
                    return worst_of(*scene, scene->attended(exact), exact ? nullptr : &rounding) <= 1;
                });
            }
        }
        for (const std::string &place : cuda_on_cpu::unnoticed_faults(checks)) FAIL_CHECK(place);
    }
}
#endif
