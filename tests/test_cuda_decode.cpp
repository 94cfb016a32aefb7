// Attention of decoding on the card, number by number and on tensor cores: both against the equation in double
// precision and against attend() on the CPU, over every cache there is; and the promise of the same bits.
// With tests/cuda_on_cpu.h the kernels run on the CPU; nvcc compiles the same for a real card.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#ifndef __CUDACC__
#include "cuda_on_cpu.h"
#endif
#include "../tensor_cores.cu"

#include <doctest/doctest.h>

#include "cuda_caches.h"
#include "reference.h"

using reference::Expected;
using reference::Random;
using reference::random_floats;
using reference::Reading;
using reference::same_bits;
using reference::Seen;
using reference::worst;

// ---- Helpers -----------------------------------------------------------------------------------------------

static Device &card() {
    static Device device;
    return device;
}

static std::vector<float> frequencies_of(int width) {
    std::vector<float> frequencies(width / 2);
    for (int i = 0; i < width / 2; i++) frequencies[i] = (float)std::pow(10000.0, -2.0 * i / width);
    return frequencies;
}

// A layout with its sizes.
struct Place {
    Layout layout;
    int page = 16, window = 1, sinks = 0;
};

// What a sequence's positions brought: keys and values (positions, kv_heads, width), and the last one's queries.
struct Story {
    std::vector<float> keys, values, queries;
};

enum class Rung { plain, fast };

// One layer, the second of two, of a cache on the CPU. What was never stored is NaN.
struct Scene {
    Heads heads;
    int value_width;
    std::vector<float> frequencies;
    Cache cache;
    std::vector<Story> stories;  // (sequence)

    Scene(const Heads &heads, int value_width, int sequences, int capacity, const Place &place, const Precision &type_k,
          const Precision &type_v)
        : heads(heads), value_width(value_width), frequencies(frequencies_of(heads.width)), stories(sequences) {
        CacheShape shape;
        shape.layers = 2, shape.kv_heads = heads.kv, shape.key_width = heads.width, shape.value_width = value_width;
        shape.sequences = sequences, shape.capacity = capacity;
        shape.page = place.page, shape.window = place.window, shape.sinks = place.sinks;
        cache = open_cache(shape, place.layout, type_k, type_v);
        for (const CacheRows *side : {&cache.keys, &cache.values, &cache.recent_keys, &cache.recent_values,
                                      &cache.sink_keys, &cache.sink_values})
            if (side->data) memset(side->data, 0xff, side->bytes(shape.layers));
    }

    // A sequence grows by positions with these keys and values, which are stored as a pass does. The newest block is
    // kept at f16 up to the last position, as kernels find it.
    void store(int sequence, std::vector<float> keys, std::vector<float> values) {
        int count = (int)(keys.size() / (heads.kv * heads.width)), first = grow(cache, sequence, count);
        std::vector<int> sequences(count, sequence), positions(count);
        for (int i = 0; i < count; i++) positions[i] = first + i;
        std::vector<float> turn((size_t)count * heads.width);
        rope_angles(turn.data(), frequencies, positions.data(), count);
        int sinks = visible_of(cache.layout, 0).sinks;
        for (const Span &span : spans_of(sequences.data(), positions.data(), count, group_size, true)) {
            for (int head = 0; head < heads.kv; head++) {
                store_span(cache, 1, span, head, keys.data(), values.data());
                for (int t = span.position; t < std::min(span.position + span.count, sinks); t++) {
                    size_t row = span.row + t - span.position, at = row * heads.kv + head;
                    store_sink(cache, 1, sequence, t, head, &keys[at * heads.width], &turn[row * heads.width],
                               &values[at * value_width]);
                }
                keep_recent(cache, 1, span, head, keys.data(), values.data());
            }
        }
    }

    // A sequence goes on with random numbers until it is so long, in passes as long as the cache takes.
    void fill(Random &random, int sequence, int length) {
        Story &story = stories[sequence];
        size_t row = heads.kv * heads.width, value_row = heads.kv * value_width;
        size_t rest = length - cache.lengths[sequence];
        std::vector<float> keys = random_floats(random, rest * row), values = random_floats(random, rest * value_row);
        story.queries = random_floats(random, (size_t)heads.query * heads.width, -2, 2);
        story.keys.insert(story.keys.end(), keys.begin(), keys.end());
        story.values.insert(story.values.end(), values.begin(), values.end());
        for (size_t at = 0, count; at < rest; at += count) {
            count = std::min<size_t>({rest - at, 512, (size_t)chunk_of(cache)});
            store(sequence, {keys.begin() + at * row, keys.begin() + (at + count) * row},
                  {values.begin() + at * value_row, values.begin() + (at + count) * value_row});
        }
    }

    // The last row of each of these sequences.
    std::vector<Span> rows(const std::vector<int> &sequences) const {
        std::vector<Span> rows;
        for (int s : sequences)
            rows.push_back({(int)rows.size(), 1, s, cache.lengths[s] - 1, cache.lengths[s] - 1, cache.lengths[s]});
        return rows;
    }
    std::vector<float> queries(const std::vector<int> &sequences) const {
        std::vector<float> all;
        for (int s : sequences) all.insert(all.end(), stories[s].queries.begin(), stories[s].queries.end());
        return all;
    }
    Visible visible(int layer_window) const { return visible_of(cache.layout, layer_window); }
};

static std::vector<float> attended_by_cpu(const Scene &scene, const std::vector<int> &sequences, int layer_window) {
    std::vector<int> positions;
    std::vector<float> queries = scene.queries(sequences), keys, values;
    for (int s : sequences) {
        positions.push_back(scene.cache.lengths[s] - 1);
        const Story &story = scene.stories[s];
        keys.insert(keys.end(), story.keys.end() - scene.heads.kv * scene.heads.width, story.keys.end());
        values.insert(values.end(), story.values.end() - scene.heads.kv * scene.value_width, story.values.end());
    }
    auto round = [](std::vector<float> &numbers) {  // as store_span() leaves them
        for (float &number : numbers) number = (float)reference::to_f16(number);
    };
    if (has_blocks(scene.cache.type_k)) round(keys);
    if (has_blocks(scene.cache.type_v)) round(values);
    AttentionPlan plan = plan_attention(sequences.data(), positions.data(), (int)sequences.size(), scene.heads,
                                        scene.cache, scene.frequencies, 1);
    std::vector<float> out(sequences.size() * scene.heads.query * scene.value_width, NAN);
    attend({out.data(),
            queries.data(),
            {keys.data(), scene.heads.kv, scene.heads.width},
            {values.data(), scene.heads.kv, scene.value_width},
            scene.cache,
            1,
            scene.visible(layer_window)},
           plan);
    return out;
}

struct How {
    Rung rung = Rung::fast;
    int splits = 3, layer_window = 0;
};

// (rows, query_heads, value_width). Nothing was written to the memory before.
static std::vector<float> attended_by_card(const Scene &scene, const std::vector<int> &sequences, const How &how) {
    CardCache cache(card(), scene.cache);
    size_t heads = sequences.size() * scene.heads.query;
    DeviceArray<float> out = upload(card(), std::vector<float>(heads * scene.value_width, NAN));
    DeviceArray<float> queries = upload(card(), scene.queries(sequences));
    DeviceArray<float> frequencies = upload(card(), scene.frequencies);
    DeviceArray<Span> rows = upload(card(), scene.rows(sequences));
    DeviceScratch scratch;
    scratch.splits = how.splits, scratch.value_width = scene.value_width;
    size_t parts = heads * scratch.parts().count();
    scratch.partials = upload(card(), std::vector<Partial>(parts, Partial{NAN, NAN}));
    scratch.values = upload(card(), std::vector<float>(parts * scene.value_width, NAN));
    DeviceAttention task = {
        out.data(),  queries.data(),     nullptr, nullptr, cache.view, 1, scene.visible(how.layer_window),
        scene.heads, frequencies.data(), false};
    (how.rung == Rung::fast ? attend_rows : attend_rows_plain)(card(), scratch, task, rows.data(),
                                                               (int)sequences.size());
    return download(card(), out.data(), heads * scene.value_width);
}

// ---- The equation ------------------------------------------------------------------------------------------

// How far two 16-bit numbers together are from the one they stand for, of itself.
static double two_numbers(const Precision &type) { return std::holds_alternative<BF16>(type) ? 0x1p-16 : 0x1p-22; }

// What a rung should get for a sequence, and how far from it it may be: what tests/reference.h allows for sums of
// float32; on tensor cores what two 16-bit numbers leave of queries and weights, too. There values in groups are
// rounded to f16, and so they are here; and what codes of keys are multiplied with, query * scale, is within 2^-20 of
// itself, or within 2^-24 of the largest query, which is less where the scale is more than 2^-4.
static void add_expected(Expected &out, const Scene &scene, int sequence, const How &how,
                         const Visible *other = nullptr) {
    const Heads &heads = scene.heads;
    const Story &story = scene.stories[sequence];
    bool fast = how.rung == Rung::fast && on_tensor_cores(view_of(scene.cache), [](auto, auto) {});
    reference::Side keys{name_of(scene.cache.type_k), true, (size_t)heads.kv, (size_t)heads.width};
    reference::Side values{name_of(scene.cache.type_v), false, (size_t)heads.kv, (size_t)scene.value_width};
    int length = scene.cache.lengths[sequence];
    for (int t = 0; t < length; t++) keys.add(&story.keys[t * keys.row()]), values.add(&story.values[t * values.row()]);
    for (Reading &value : values.stored)
        if (fast && values.blocks) value = reference::exact(reference::to_f16(value.value));
    double factor_rounding = fast && keys.blocks ? 0x1p-20 : 0;
    for (std::vector<Reading> *readings : {&keys.stored, &keys.recent})
        for (Reading &key : *readings) key.off = fast ? two_numbers(scene.cache.type_k) * std::fabs(key.value) : 0;
    reference::Side sizes = values;
    for (std::vector<Reading> *readings : {&sizes.stored, &sizes.recent})
        for (Reading &value : *readings) value.value = std::fabs(value.value);
    Visible visible = other ? *other : scene.visible(how.layer_window);
    for (int head = 0; head < heads.query; head++) {
        const float *query = &story.queries[head * heads.width];
        Expected size;
        auto seen = [&](const reference::Side &values) {
            return reference::seen_by(length - 1, {visible.window, visible.sinks}, keys, values, heads.kv_head(head),
                                      scene.frequencies);
        };
        reference::attention(size, query, seen(sizes), heads.width, scene.value_width);
        reference::attention(out, query, seen(values), heads.width, scene.value_width, factor_rounding);
        for (int i = 0; i < scene.value_width; i++) {
            double more = fast ? two_numbers(scene.cache.type_v) * size.value[i] : 0;
            out.bound[out.bound.size() - scene.value_width + i] += more;
        }
    }
}

static Expected expected_of(const Scene &scene, const std::vector<int> &sequences, const How &how) {
    Expected out;
    for (int s : sequences) add_expected(out, scene, s, how);
    return out;
}

// Calls use(type_k, type_v) for all combinations, 49.
template <class Use>
void for_each_pair(Use use) {
    for_each_type<Precision>([&](auto type_k) {
        for_each_type<Precision>([&](auto type_v) {
            CAPTURE(std::string(type_k.name));
            CAPTURE(std::string(type_v.name));
            use(Precision(type_k), Precision(type_v));
        });
    });
}

TEST_CASE("both rungs are the equation over every cache: layout, precision of K and of V") {
    Random random{1};
    const Place places[] = {{Contiguous{}}, {Paged{}, 7}, {Ring{}, 16, 37, 3}};
    const int lengths[] = {1, 31, 32, 33, 71, 96};
    const Heads groups[] = {{3, 1, 64}, {2, 2, 40}, {8, 1, 72}, {4, 2, 64}};
    int turn = 0;
    for_each_pair([&](const Precision &type_k, const Precision &type_v) {
        for (const Place &place : places) {
            Heads heads = groups[turn % 4];
            Scene scene(heads, turn % 5 ? heads.width : 104 - heads.width, 2, 120, place, type_k, type_v);
            scene.fill(random, 0, lengths[turn % 6]), scene.fill(random, 1, lengths[(turn + 4) % 6]);
            CAPTURE(turn);
            How plain = {Rung::plain, 2, turn % 7 ? 0 : 20}, fast = {Rung::fast, 2, plain.layer_window};
            Expected expected = expected_of(scene, {0, 1}, plain);
            CHECK(worst(attended_by_cpu(scene, {0, 1}, plain.layer_window), expected) <= 1);
            CHECK(worst(attended_by_card(scene, {0, 1}, plain), expected) <= 1);
            CHECK(worst(attended_by_card(scene, {0, 1}, fast), expected_of(scene, {0, 1}, fast)) <= 1);
            turn++;
        }
    });
}

// A scene of one sequence, contiguous unless said otherwise.
static Scene scene_of(Random &random, const Heads &heads, int length, const Precision &type_k, const Precision &type_v,
                      const Place &place = {Contiguous{}}) {
    Scene scene(heads, heads.width, 1, length, place, type_k, type_v);
    scene.fill(random, 0, length);
    return scene;
}

static void check_rungs(const Scene &scene, int splits, int layer_window) {
    for (Rung rung : {Rung::plain, Rung::fast}) {
        CAPTURE((int)rung);
        How how = {rung, splits, layer_window};
        CHECK(worst(attended_by_card(scene, {0}, how), expected_of(scene, {0}, how)) <= 1);
    }
}

TEST_CASE("both rungs are the equation for every head dimension, group, length and format") {
    Random random{2};
    const Precision types[] = {F16{}, BF16{}, FP8{}, Int8{}, Int4{}, Int2{}, F32{}};
    int turn = 0;
    for (int width : {8, 32, 64, 80, 96, 128, 256}) {
        for (int group : {1, 3, 7, 8, 12}) {
            for (int length : {1, 31, 32, 33, 70}) {
                const Precision &k = types[turn % 7], &v = types[turn / 7 % 7];
                turn++;
                CAPTURE(width);
                CAPTURE(group);
                CAPTURE(length);
                CAPTURE(turn);
                check_rungs(scene_of(random, {group, 1, width}, length, k, v), 2, 0);
            }
        }
    }
}

TEST_CASE("a thousand positions, in any number of splits") {
    Random random{3};
    const Precision types[] = {BF16{}, Int8{}, Int4{}, FP8{}, Int2{}};
    const Heads shapes[] = {{8, 1, 128}, {3, 1, 64}, {7, 1, 80}, {1, 1, 96}, {8, 1, 256}};
    for (int i = 0; i < 5; i++) {
        CAPTURE(i);
        Scene scene = scene_of(random, shapes[i], 1000, types[i], types[(i + 1) % 5]);
        for (int splits : {1, 3, 7, 50}) {
            CAPTURE(splits);
            check_rungs(scene, splits, 0);
        }
    }
}

TEST_CASE("windows begin anywhere in a block; what lies before them is never read") {
    Random random{4};
    const Precision types[] = {BF16{}, FP8{}, Int8{}, Int4{}, Int2{}};
    int turn = 0;
    for (int window : {1, 7, 32, 33, 64, 100, 149, 150, 1000}) {
        const Precision &k = types[turn % 5], &v = types[(turn + turn / 5 + 1) % 5];
        turn++;
        CAPTURE(window);
        check_rungs(scene_of(random, {3, 1, 64}, 150, k, v), 2, window);
    }
    // Positions [0, 96) are NaN, and the window begins at 96, which begins a block.
    for_each_type<Precision>([&](auto type) {
        CAPTURE(std::string(type.name));
        Scene scene({3, 1, 64}, 64, 1, 150, {Contiguous{}}, type, type);
        std::vector<float> nothing(96 * 64, NAN);
        scene.store(0, nothing, nothing);
        scene.stories[0].keys = scene.stories[0].values = std::vector<float>(96 * 64, 0);
        scene.fill(random, 0, 131);
        check_rungs(scene, 3, 35);
    });
}

// ---- Sinks -------------------------------------------------------------------------------------------------

TEST_CASE("a ring that has dropped positions sees its sinks just before the window") {
    Random random{5};
    const Precision types[] = {F32{}, BF16{}, FP8{}, Int8{}, Int4{}, Int2{}};
    int turn = 0;
    for (Place place : {Place{Ring{}, 16, 33, 4}, Place{Ring{}, 16, 64, 1}, Place{Ring{}, 16, 1, 3}}) {
        for (int length : {40, 68, 200}) {
            CAPTURE(place.window);
            CAPTURE(length);
            const Precision &type = types[turn++ % 6];
            check_rungs(scene_of(random, {3, 1, 64}, length, type, type, place), 2, 0);
            check_rungs(scene_of(random, {3, 1, 64}, length, type, type, place), 2, 20);  // a layer without sinks
        }
    }
}

// Only the sinks and the window were ever stored, far behind anything a model was trained to.
TEST_CASE("sinks are turned to where the query sees them, however far that is") {
    Random random{6};
    for (int position : {1000, (1 << 20) - 1, (1 << 20) + 40, 1 << 24}) {
        CAPTURE(position);
        Scene scene({2, 1, 64}, 64, 1, 1, {Ring{}, 16, 32, 4}, F32{}, F32{});
        scene.fill(random, 0, 4);
        int first = position - 31;
        scene.cache.lengths[0] = first;
        scene.fill(random, 0, position + 1);
        const Story &story = scene.stories[0];
        std::vector<Reading> keys, values;
        for (float number : story.keys) keys.push_back(reference::exact(number));
        for (float number : story.values) values.push_back(reference::exact(number));
        Expected expected;
        for (int head = 0; head < 2; head++) {
            std::vector<Seen> seen;
            for (int i = 0; i < 36; i++) {
                std::vector<Reading> moved;
                if (i < 4) moved = reference::moved_key(&story.keys[i * 64], i, first - 4, scene.frequencies);
                seen.push_back({moved, i < 4 ? nullptr : &keys[i * 64], &values[i * 64]});
            }
            reference::attention(expected, &story.queries[head * 64], seen, 64, 64);
        }
        CHECK(worst(attended_by_cpu(scene, {0}, 0), expected) <= 1);
        CHECK(worst(attended_by_card(scene, {0}, {Rung::plain}), expected) <= 1);
        CHECK(worst(attended_by_card(scene, {0}, {Rung::fast}), expected) <= 1);
    }
}

// The naive path has no sinks of a ring, but all rows of the sequence, with keys rotated to their own positions.
TEST_CASE("sinks that are rows of keys are turned by how far they move") {
    Random random{7};
    for (const Precision &type : {Precision(F32{}), Precision(BF16{})}) {
        Scene scene = scene_of(random, {3, 1, 64}, 120, type, type);
        const Visible visible = {50, 4};
        Story &story = scene.stories[0];
        CardCache cache(card(), scene.cache);
        DeviceArray<float> keys = upload(card(), story.keys), values = upload(card(), story.values);
        cache.view.sink_keys = {(char *)keys.data(), 64 * sizeof(float), 64, 1, 120};
        cache.view.sink_values = {(char *)values.data(), 64 * sizeof(float), 64, 1, 120};
        DeviceArray<float> out = upload(card(), std::vector<float>(3 * 64, NAN));
        DeviceArray<float> queries = upload(card(), story.queries), frequencies = upload(card(), scene.frequencies);
        DeviceArray<Span> rows = upload(card(), scene.rows({0}));
        DeviceScratch scratch;
        prepare_scratch(card(), scratch, scene.heads, 64, 1, 120);
        DeviceAttention task = {out.data(),  queries.data(),     nullptr, nullptr, cache.view, 0, visible,
                                scene.heads, frequencies.data(), true};
        for (CacheRows *side : {&task.cache.keys, &task.cache.values})  // the scene's layer 1 is the task's layer 0
            side->data += side->bytes(1);
        for (auto attend : {attend_rows, attend_rows_plain}) {
            attend(card(), scratch, task, rows.data(), 1);
            How how = {attend == attend_rows ? Rung::fast : Rung::plain};
            Expected expected;
            add_expected(expected, scene, 0, how, &visible);
            CHECK(worst(download(card(), out.data(), 3 * 64), expected) <= 1);
        }
    }
}

// ---- The same bits -----------------------------------------------------------------------------------------

TEST_CASE("contiguous, paged and a ring that drops nothing give the same bits, for every format and rung") {
    for_each_type<Precision>([&](auto type) {
        for (Rung rung : {Rung::plain, Rung::fast}) {
            CAPTURE(std::string(type.name));
            auto out = [&](const Place &place) {
                Random random{8};
                return attended_by_card(scene_of(random, {3, 1, 64}, 139, type, type, place), {0}, {rung, 2, 0});
            };
            std::vector<float> contiguous = out({Contiguous{}});
            CHECK(std::all_of(contiguous.begin(), contiguous.end(), [](float x) { return std::isfinite(x); }));
            for (const Place &place : {Place{Paged{}, 1}, Place{Paged{}, 7}, Place{Paged{}, 64},
                                       Place{Ring{}, 16, 139, 0}, Place{Ring{}, 16, 200, 4}})
                CHECK(same_bits(contiguous, out(place)));
        }
    });
}

TEST_CASE("a row has the same bits alone and in company, and a sequence's rows may stand anywhere") {
    Random random{9};
    for_each_type<Precision>([&](auto type) {
        Scene scene({6, 2, 64}, 64, 4, 150, {Paged{}, 16}, type, type);
        const int lengths[] = {1, 150, 64, 97};
        for (int s = 0; s < 4; s++) scene.fill(random, s, lengths[s]);
        for (Rung rung : {Rung::plain, Rung::fast}) {
            CAPTURE(std::string(type.name));
            const std::vector<int> order = {2, 0, 3, 1};
            std::vector<float> together = attended_by_card(scene, order, {rung}), alone;
            for (int s : order) {
                std::vector<float> out = attended_by_card(scene, {s}, {rung});
                alone.insert(alone.end(), out.begin(), out.end());
            }
            CHECK(same_bits(together, alone));
        }
    });
}

// ---- Extremes ----------------------------------------------------------------------------------------------

TEST_CASE("numbers of any size that their format holds") {
    Random random{10};
    for (const Precision &type : {Precision(F32{}), Precision(F16{}), Precision(BF16{}), Precision(Int8{}),
                                  Precision(FP8{}), Precision(Int4{})}) {
        for (float size : {1e-3f, 100.0f}) {
            CAPTURE(std::string(name_of(type)));
            CAPTURE(size);
            Scene scene({8, 1, 64}, 64, 1, 100, {Contiguous{}}, type, type);
            Story &story = scene.stories[0];
            story.keys = random_floats(random, 100 * 64, -size, size);
            story.values = random_floats(random, 100 * 64, -size, size);
            for (size_t t = 0; t < 100; t++)  // every row has a scale of its own
                for (int i = 0; i < 64; i++) story.values[t * 64 + i] *= (float)std::exp2(-(double)(t % 9));
            story.queries = random_floats(random, 8 * 64, -1 / size, 1 / size);
            scene.store(0, story.keys, story.values);
            check_rungs(scene, 2, 0);
        }
    }
}

TEST_CASE("queries of any size") {
    Random random{11};
    for (const Precision &type : {Precision(F16{}), Precision(BF16{}), Precision(Int8{})}) {
        CAPTURE(std::string(name_of(type)));
        Scene scene = scene_of(random, {2, 1, 128}, 90, type, type);
        for (float size : {0.0f, 1e-20f, 1e-6f, 1e4f, 1e7f}) {
            CAPTURE(size);
            scene.stories[0].queries = random_floats(random, 2 * 128, -size, size);
            check_rungs(scene, 2, 0);
        }
    }
}

TEST_CASE("what is not a number is seen, in keys and in values, and by the sequence that has it alone") {
    Random random{12};
    for_each_type<Precision>([&](auto type) {
        for (bool in_key : {true, false}) {
            CAPTURE(std::string(type.name));
            CAPTURE(in_key);
            Scene scene({2, 1, 64}, 64, 2, 70, {Contiguous{}}, type, type);
            scene.fill(random, 0, 70);
            std::vector<float> keys = random_floats(random, 70 * 64), values = random_floats(random, 70 * 64);
            (in_key ? keys : values)[40 * 64 + 5] = NAN;
            scene.store(1, keys, values);
            scene.stories[1] = {keys, values, random_floats(random, 2 * 64)};
            for (Rung rung : {Rung::plain, Rung::fast}) {
                std::vector<float> out = attended_by_card(scene, {0, 1}, {rung});
                for (int i = 0; i < 2 * 64; i++) CHECK(std::isfinite(out[i]));
                CHECK(std::isnan(out[2 * 64 + 5]));
            }
        }
    });
}

// ---- Splits ------------------------------------------------------------------------------------------------

TEST_CASE("the number of splits fills a card with one sequence, and does not depend on the rows of a pass") {
    DeviceScratch one, many;
    Heads heads = {32, 8, 128};
    prepare_scratch(card(), one, heads, 128, 1, 100000);
    prepare_scratch(card(), many, heads, 128, 5, 100000);
    CHECK(one.splits == many.splits);
    CHECK(one.splits * heads.kv <= std::max(heads.kv, 3 * card().multiprocessors()));
    prepare_scratch(card(), one, heads, 128, 1, 1);
    CHECK(one.splits == 1);
}

TEST_CASE("a captured launch reads the position that stands in its rows when it is replayed") {
    Random random{13};
    Scene scene = scene_of(random, {3, 1, 64}, 97, BF16{}, Int8{});
    CardCache cache(card(), scene.cache);
    DeviceArray<float> out = upload(card(), std::vector<float>(3 * 64, NAN));
    DeviceArray<float> queries = upload(card(), scene.stories[0].queries);
    DeviceArray<float> frequencies = upload(card(), scene.frequencies);
    DeviceArray<Span> rows = upload(card(), std::vector<Span>{{0, 1, 0, 96, 96, 97}});
    DeviceScratch scratch;
    prepare_scratch(card(), scratch, scene.heads, 64, 1, 97);
    DeviceAttention task = {out.data(),  queries.data(),     nullptr, nullptr, cache.view, 1, {},
                            scene.heads, frequencies.data(), false};
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamBeginCapture(card().stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    attend_rows(card(), scratch, task, rows.data(), 1);
    check(cudaStreamEndCapture(card().stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    std::vector<float> before;
    for (int position : {96, 95, 30}) {
        Span row = {0, 1, 0, position, position, position + 1};
        copy(card(), rows.data(), &row, sizeof row);
        check(cudaGraphLaunch(exec, card().stream), "cudaGraphLaunch");
        std::vector<float> replayed = download(card(), out.data(), 3 * 64);
        attend_rows(card(), scratch, task, rows.data(), 1);
        CHECK(same_bits(replayed, download(card(), out.data(), 3 * 64)));
        CHECK(!same_bits(replayed, before));
        before = replayed;
    }
    check(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

#ifdef CUDA_ON_CPU
// ---- Faults ------------------------------------------------------------------------------------------------

TEST_CASE("a barrier left out, a shuffle from the wrong lane, a vote lost: nowhere does one go unnoticed") {
    Random random{14};
    const Place ring = {Ring{}, 16, 40, 3};
    for (Rung rung : {Rung::plain, Rung::fast}) {
        std::vector<std::function<bool()>> checks;
        for (auto [type_k, type_v] :
             {std::pair{Precision(BF16{}), Precision(F16{})}, {Int4{}, Int8{}}, {Int8{}, Int2{}}}) {
            for (const Place &place : {Place{Contiguous{}}, ring}) {
                Scene scene = scene_of(random, {4, 1, 64}, 300, type_k, type_v, place);
                std::vector<float> &queries = scene.stories[0].queries;  // lanes and heads differ in size
                for (size_t i = 0; i < queries.size(); i++) queries[i] *= std::exp2f((float)(i / 64) - 3 * (i % 4));
                checks.push_back([scene, rung] {
                    How how = {rung, 2, 0};
                    return worst(attended_by_card(scene, {0}, how), expected_of(scene, {0}, how)) <= 1;
                });
            }
        }
        for (const std::string &place : cuda_on_cpu::unnoticed_faults(checks)) FAIL_CHECK(place);
    }
}
#endif
