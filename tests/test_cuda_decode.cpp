// Attention of decoding on the card, number by number and on tensor cores: both against the equation in double
// precision and against attend() on the CPU, over every cache there is; and the promise of the same bits.
// g++ compiles it with tests/cuda_on_cpu.h, which runs the kernels on the CPU; nvcc, for a real card.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#ifndef __CUDACC__
#include "cuda_on_cpu.h"
#endif
#include "../attention.cu"

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

    // A sequence goes on with random numbers until it is so long.
    void fill(Random &random, int sequence, int length) {
        Story &story = stories[sequence];
        for (int rest; (rest = length - cache.lengths[sequence]) > 0;) {
            size_t count = std::min({rest, 512, chunk_of(cache)});
            std::vector<float> keys = random_floats(random, count * heads.kv * heads.width);
            std::vector<float> values = random_floats(random, count * heads.kv * value_width);
            story.keys.insert(story.keys.end(), keys.begin(), keys.end());
            story.values.insert(story.values.end(), values.begin(), values.end());
            store(sequence, keys, values);
        }
        story.queries = random_floats(random, (size_t)heads.query * heads.width, -2, 2);
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
// float32; on tensor cores what two 16-bit numbers leave of queries and weights, too. There numbers of groups are
// rounded to f16, and so they are here.
static void add_expected(Expected &out, const Scene &scene, int sequence, const How &how) {
    const Heads &heads = scene.heads;
    const Story &story = scene.stories[sequence];
    bool fast = how.rung == Rung::fast && on_tensor_cores(view_of(scene.cache), [](auto, auto) {});
    reference::Side keys{name_of(scene.cache.type_k), true, (size_t)heads.kv, (size_t)heads.width};
    reference::Side values{name_of(scene.cache.type_v), false, (size_t)heads.kv, (size_t)scene.value_width};
    int length = scene.cache.lengths[sequence];
    for (int t = 0; t < length; t++) keys.add(&story.keys[t * keys.row()]), values.add(&story.values[t * values.row()]);
    auto round = [&](reference::Side &side) {
        for (Reading &reading : side.stored)
            if (fast && side.blocks) reading = reference::exact(reference::to_f16(reading.value));
    };
    round(keys), round(values);
    for (std::vector<Reading> *readings : {&keys.stored, &keys.recent})
        for (Reading &key : *readings) key.off = fast ? two_numbers(scene.cache.type_k) * std::fabs(key.value) : 0;
    reference::Side sizes = values;
    for (std::vector<Reading> *readings : {&sizes.stored, &sizes.recent})
        for (Reading &value : *readings) value.value = std::fabs(value.value);
    Visible visible = scene.visible(how.layer_window);
    for (int head = 0; head < heads.query; head++) {
        const float *query = &story.queries[head * heads.width];
        Expected size;
        auto seen = [&](const reference::Side &values) {
            return reference::seen_by(length - 1, {visible.window, visible.sinks}, keys, values, heads.kv_head(head),
                                      scene.frequencies);
        };
        reference::attention(size, query, seen(sizes), heads.width, scene.value_width);
        reference::attention(out, query, seen(values), heads.width, scene.value_width);
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
