// plain::attention and fast::attention against the equation in double precision, over every cache there is, and the
// promise that a query's result has the same bits whoever computes it, in whatever layout, chunks and company.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "../attention.cu"

#include <doctest/doctest.h>
#include <malloc.h>
#include <sys/time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <ctime>
#include <new>

#include "../fast/attend.h"
#include "../fast/fast.h"
#include "check_pages.h"
#include "reference.h"

using reference::Expected;
using reference::frequencies_of;
using reference::Random;
using reference::random_floats;
using reference::same_bits;
using reference::View;
using reference::worst;

// ---- Helpers -----------------------------------------------------------------------------------------------

// ATTENTION_SEED repeats a run.
Random seeded() {
    static const uint64_t seed =
        getenv("ATTENTION_SEED") ? strtoull(getenv("ATTENTION_SEED"), nullptr, 10) : (uint64_t)time(nullptr);
    static bool printed = printf("ATTENTION_SEED=%llu\n", (unsigned long long)seed) > 0;
    (void)printed;
    return {seed};
}

// What each position of a sequence brings: a rotated key (kv_heads, D), a value (kv_heads, value_width), and queries
// (query_heads, D).
struct Story {
    std::vector<float> keys, values, queries;  // (position, ...)
    Story() = default;
    Story(Random &random, const Heads &heads, int value_width, int positions) {
        size_t count = (size_t)positions;
        keys = random_floats(random, count * heads.kv * heads.width);
        values = random_floats(random, count * heads.kv * value_width);
        queries = random_floats(random, count * heads.query * heads.width, -2, 2);
    }
};

// The tokens of one pass, as the model's layer would hand them over.
struct Given {
    std::vector<Span> spans;  // each of 1
    std::vector<float> keys, values, queries;
    int count() const { return (int)spans.size(); }
};

struct Growth {
    int sequence, count;
};

enum class Route { by_split, by_tile, engines_choice };

// How attention is called. The threads that the plan is told decide whether splits are shared.
struct How {
    int layer_window = 0;
    Route route = Route::engines_choice;
    int threads = 1;
    bool plain = false;
    int first = 0;  // the token from which on there are queries
};

constexpr How plainly = {0, Route::engines_choice, 1, true};

// One layer's attention, the second of two, of sequences that go through their stories. What was never stored is NaN.
struct Scene {
    Heads heads;
    std::shared_ptr<Cpu> cpu = std::make_shared<Cpu>(1);
    Cache cache;
    std::vector<float> frequencies;
    std::vector<Story> stories;            // (sequence)
    std::vector<std::vector<float>> outs;  // (sequence): (positions, query_heads, value_width), what step() computed

    Scene(const Heads &heads, int value_width, int sequences, int capacity, const Layout &layout = Contiguous{},
          Precision type_k = F32{}, Precision type_v = F32{}, CacheShape shape = {})
        : heads(heads), frequencies(frequencies_of(heads.width)), stories(sequences), outs(sequences) {
        shape.layers = 2, shape.kv_heads = heads.kv, shape.key_width = heads.width, shape.value_width = value_width;
        shape.sequences = sequences, shape.capacity = capacity;
        cache = poisoned(open_cache(*cpu, {shape}, layout, type_k, type_v));
        const CacheView &view = cache.stores[0].view;
        for (const CacheRows *side :
             {&view.keys, &view.values, &view.residual_keys, &view.residual_values, &view.sink_keys, &view.sink_values})
            if (side->data) memset(side->data, 0xff, side->bytes(shape.layers));
    }

    int value_width() const { return cache.stores[0].view.values.width; }
    void tell(Random &random, int sequence, int positions) {
        stories[sequence] = Story(random, heads, value_width(), positions);
    }

    // `count` positions of a sequence's story from `first` on.
    void add(Given &batch, int sequence, int first, int count) const {
        const Story &story = stories[sequence];
        for (int t = first; t < first + count; t++) {
            batch.spans.push_back({batch.count(), 1, sequence, t, first, first + count});
            auto take = [&](std::vector<float> &to, const std::vector<float> &from, int numbers) {
                to.insert(to.end(), from.begin() + (size_t)t * numbers, from.begin() + (size_t)(t + 1) * numbers);
            };
            take(batch.keys, story.keys, heads.kv * heads.width);
            take(batch.values, story.values, heads.kv * value_width());
            take(batch.queries, story.queries, heads.query * heads.width);
        }
    }

    Attention task_of(Given &batch, float *out, const CacheView &view, int layer_window) const {
        PassVectors keys = {batch.keys.data(), heads.kv, heads.width},
                    values = {batch.values.data(), heads.kv, value_width()};
        return {out, batch.queries.data(), keys, values, view, 1, visible_of(view.layout, layer_window),
                heads, 1 / std::sqrt((float)heads.width), {}};
    }
    Pass pass_of(const Given &batch) const {
        return {batch.count(), nullptr, batch.spans.data(), nullptr, frequencies.data(), heads};
    }

    // Makes room for a pass and stores its keys and values.
    Given begin(const std::vector<Growth> &growths) {
        Given batch;
        for (const Growth &growth : growths)
            add(batch, growth.sequence, grow(cache, growth.sequence, growth.count), growth.count);
        store(batch);
        return batch;
    }
    void store(Given &batch) {
        std::vector<float> cos_sin((size_t)batch.count() * heads.width);
        Pass pass = pass_of(batch);
        pass.cos_sin = cos_sin.data();
        Attention task = task_of(batch, nullptr, cache.stores[0].view, 0);
        cpu->run([&] {
            plain::rope_angles(*cpu, pass);
            plain::store_rows(*cpu, task, pass);
        });
    }

    // (tokens from how.first on, query_heads, value_width)
    std::vector<float> attended(Given &batch, How how = {}) const { return attended(batch, how, cache.stores[0].view); }
    std::vector<float> attended(Given &batch, How how, const CacheView &view) const {
        size_t rows = (size_t)(batch.count() - how.first);
        std::vector<float> out(rows * heads.query * value_width(), NAN);
        Attention task = task_of(batch, out.data(), view, how.layer_window);
        Pass pass = pass_of(batch);
        cpu->threads = how.threads;
        if (how.plain) {
            pass.count = (int)rows, pass.spans += how.first;
            task.query += (size_t)how.first * heads.query * heads.width;
            cpu->run([&] { plain::attention(*cpu, task, pass); });
        } else {
            int threads = how.route == Route::by_split ? 1 << 20 : how.route == Route::by_tile ? 0 : how.threads;
            if (!cpu->plan) cpu->plan = std::make_shared<fast::Plans>(1);
            fast::AttentionPlan &plan = (*(fast::Plans *)cpu->plan.get())[0];
            fast::plan_attention(plan, pass, view, threads);
            REQUIRE((how.route == Route::engines_choice || plan.share_splits == (how.route == Route::by_split)));
            cpu->run([&] { fast::attention(*cpu, task, pass); });
        }
        cpu->threads = 1;
        return out;
    }

    void end(Given &batch) {
        Attention task = task_of(batch, nullptr, cache.stores[0].view, 0);
        Pass pass = pass_of(batch);
        cpu->run([&] { plain::keep_residual(*cpu, task, pass); });
    }

    void step(const std::vector<Growth> &growths, How how = {}) {
        Given batch = begin(growths);
        std::vector<float> out = attended(batch, how);
        end(batch);
        size_t width = out.size() / batch.spans.size();
        for (const Span &span : batch.spans) {
            std::vector<float> &to = outs[span.sequence];
            to.insert(to.end(), out.begin() + span.row * width, out.begin() + (span.row + 1) * width);
        }
    }

    int most_a_pass() const { return std::min(512, chunk_of(cache)); }

    // Grows one sequence to `length`, in the longest passes there may be; without asking any query.
    void fill(int sequence, int length) {
        for (int rest; (rest = length - cache.lengths[sequence]) > 0;) {
            Given batch = begin({{sequence, std::min(rest, most_a_pass())}});
            end(batch);
        }
    }

    // With queries, in passes of at most `most`.
    void run(int sequence, int length, How how = {}, int most = 512) {
        for (int rest; (rest = length - cache.lengths[sequence]) > 0;)
            step({{sequence, std::min({rest, most, most_a_pass()})}}, how);
    }
};

// A sequence as the double-precision reference has it, which follows its story.
struct Truth {
    const Scene &scene;
    const Story &story;
    reference::Side keys, values;

    Truth(const Scene &scene, int sequence)
        : scene(scene),
          story(scene.stories[sequence]),
          keys{name_of(scene.cache.type_k), true, (size_t)scene.heads.kv, (size_t)scene.heads.width},
          values{name_of(scene.cache.type_v), false, (size_t)scene.heads.kv, (size_t)scene.value_width()} {}

    View view(int layer_window) const {
        const Ring *ring = std::get_if<Ring>(&scene.cache.layout);
        bool by_layer = !ring || (layer_window && layer_window <= ring->window);
        return by_layer ? View{layer_window, 0} : View{ring->window, ring->sinks};
    }

    // What the queries of `position` should get: (query_heads, value_width).
    void add(Expected &out, int position, int layer_window = 0) {
        for (int t = keys.length(); t <= position; t++) {
            keys.add(&story.keys[t * keys.row()]);
            values.add(&story.values[t * values.row()]);
        }
        const Heads &heads = scene.heads;
        for (int head = 0; head < heads.query; head++) {
            int kv_head = head * heads.kv / heads.query;
            reference::attention(
                out, &story.queries[((size_t)position * heads.query + head) * heads.width],
                reference::seen_by(position, view(layer_window), keys, values, kv_head, scene.frequencies),
                scene.heads.width, scene.value_width(), 0x1.01p-16);
        }
    }
    Expected at(const std::vector<int> &positions, int layer_window = 0) {
        Expected out;
        for (int position : positions) add(out, position, layer_window);
        return out;
    }
};

std::vector<int> range(int begin, int end) {
    std::vector<int> numbers;
    for (int i = begin; i < end; i++) numbers.push_back(i);
    return numbers;
}

std::vector<float> rows_of(const std::vector<float> &all, size_t width, int begin, int end) {
    return {all.begin() + begin * width, all.begin() + end * width};
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

// ---- The equation ------------------------------------------------------------------------------------------

TEST_CASE("the naive path is the equation, all in this pass, and what an f32 cache gives") {
    Random random = seeded();
    for (Heads heads : {Heads{1, 1, 8}, Heads{3, 3, 20}, Heads{6, 2, 32}, Heads{7, 1, 80}, Heads{9, 3, 64}}) {
        for (int tokens : {1, 33, 100, heads.width == 64 ? 600 : 2}) {
            for (View view : {View{0, 0}, View{1, 0}, View{7, 0}, View{99, 0}, View{300, 4}, View{1, 1}, View{30, 4},
                              View{300, 280}}) {
                CAPTURE(heads.width);
                CAPTURE(tokens);
                CAPTURE(view.window);
                CacheShape shape;
                shape.window = std::max(1, view.window), shape.sinks = view.sinks;
                Scene scene(heads, heads.width, 1, tokens, view.window ? Layout(Ring{}) : Layout(Contiguous{}), F32{},
                            F32{}, shape);
                scene.tell(random, 0, tokens);
                Given all;
                scene.add(all, 0, 0, tokens);
                CacheView nothing;
                nothing.layout = scene.cache.layout;
                Expected expected = Truth(scene, 0).at(range(0, tokens));
                std::vector<float> plain = scene.attended(all, plainly, nothing);
                std::vector<float> fast = scene.attended(all, {}, nothing);
                REQUIRE(worst(plain, expected) <= 1);
                REQUIRE(worst(fast, expected) <= 1);
                REQUIRE(same_bits(plain, scene.attended(all, {0, Route::engines_choice, 3, true}, nothing)));
                REQUIRE(same_bits(fast, scene.attended(all, {0, Route::by_split, 3}, nothing)));
                scene.run(0, tokens);
                REQUIRE(worst(scene.outs[0], expected) <= 1);
                if (!view.sinks) REQUIRE(same_bits(fast, scene.outs[0]));
            }
        }
    }
}

// Caches that differ in all that a layout may: pages of odd size among those of another sequence, rings that have
// dropped much or nothing.
struct Place {
    Layout layout;
    int page, window, sinks;
};
const Place places[] = {{Contiguous{}, 16, 0, 0}, {Paged{}, 7, 0, 0},    {Ring{}, 16, 100, 4}, {Paged{}, 16, 0, 0},
                        {Ring{}, 16, 31, 1},      {Ring{}, 16, 64, 0},   {Paged{}, 1, 0, 0},   {Ring{}, 16, 1, 4},
                        {Ring{}, 16, 1000, 4},    {Paged{}, 1000, 0, 0}, {Ring{}, 16, 257, 4}};

Scene scene_at(const Place &place, const Heads &heads, int value_width, int sequences, int capacity,
               const Precision &type_k, const Precision &type_v) {
    CacheShape shape;
    shape.page = place.page, shape.window = std::max(1, place.window), shape.sinks = place.sinks;
    return Scene(heads, value_width, sequences, capacity, place.layout, type_k, type_v, shape);
}

TEST_CASE("attention is the equation over every cache: layout, precision of K and of V, widths, groups, lengths") {
    Random random = seeded();
    int turn = 0;
    auto check = [&](const Place &place, const Heads &heads, int value_width, const Precision &k, const Precision &v) {
        CAPTURE(place.layout.index());
        CAPTURE(place.page);
        CAPTURE(place.window);
        CAPTURE(heads.width);
        Scene scene = scene_at(place, heads, value_width, 2, 600, k, v);
        scene.tell(random, 0, 600), scene.tell(random, 1, 600);
        Truth truth(scene, 1);
        bool singly = turn++ / 16 % 2;
        // Lengths at which a pass ends; the queries of the passes that end in one of the second list are checked.
        for (int end : {29, 31, 32, 33, 63, 64, 96, 192, 253, 255, 256, 257, 400, 599, 600}) {
            if (singly) scene.fill(0, std::min(600, 2 * end)), scene.fill(1, end - 1);
            for (int rest; (rest = end - scene.cache.lengths[1]) > 0;) {
                Given pass = scene.begin({{1, std::min(rest, scene.most_a_pass())}});
                int last = pass.spans.back().position, first = std::max(pass.spans[0].position, last - 1);
                if (last + 1 == end && end != 29 && end != 96 && end != 192 && end != 400) {
                    size_t width = (size_t)heads.query * value_width;
                    std::vector<float> out = scene.attended(pass, {0, Route::by_split, 1});
                    REQUIRE(same_bits(out, scene.attended(pass, {0, Route::by_tile, 1})));
                    int row = first - pass.spans[0].position;
                    Expected expected = truth.at(range(first, last + 1));
                    CAPTURE(last);
                    REQUIRE(worst(rows_of(out, width, row, pass.count()), expected) <= 1);
                    REQUIRE(worst(scene.attended(pass, {0, Route::engines_choice, 1, true, row}), expected) <= 1);
                }
                scene.end(pass);
            }
        }
    };
    const Heads groups[] = {{2, 2, 0}, {3, 1, 0}, {8, 1, 0}, {6, 2, 0}};
    const int widths[] = {20, 64, 80, 96, 128, 256};
    for_each_pair([&](const Precision &type_k, const Precision &type_v) {
        for_each_type<Layout>([&](auto layout) {
            const Heads heads = {groups[turn % 4].query, groups[turn % 4].kv, widths[turn / 4 % 6]};
            Place place = {layout, 16, 100, 4};  // of a layout that has no place above
            for (int i = 10; i >= 0; i--)
                if (places[(turn + i) % 11].layout.index() == place.layout.index()) place = places[(turn + i) % 11];
            check(place, heads, turn % 5 ? heads.width : 300 - heads.width, type_k, type_v);
        });
    });
}

// A ring at a position far behind anything a model was trained to: only the sinks and the window were ever stored.
TEST_CASE("sinks stand just before the window, however far it has gone") {
    Random random = seeded();
    for (int position : {40, 1000, 100000, (1 << 20) - 1, (1 << 20) + 40, 1 << 24}) {
        for (View view : {View{32, 1}, View{20, 4}, View{1, 2}}) {
            CAPTURE(position);
            CAPTURE(view.sinks);
            Scene scene = scene_at({Ring{}, 16, view.window, view.sinks}, {2, 1, 64}, 64, 1, 1, F32{}, F32{});
            int first = position - view.window + 1, sinks = view.sinks;
            scene.tell(random, 0, sinks + view.window);
            Story all = scene.stories[0];
            scene.fill(0, sinks);
            scene.cache.lengths[0] = first;
            for (int i = 0; i < view.window; i++) {  // position first + i brings what the story has behind the sinks
                Given pass;
                int t = grow(scene.cache, 0, 1);
                pass.spans = {{0, 1, 0, t, t, t + 1}};
                auto take = [&](const std::vector<float> &from, size_t row) {
                    return rows_of(from, row, sinks + i, sinks + i + 1);
                };
                pass.keys = take(all.keys, 64), pass.values = take(all.values, 64);
                pass.queries = take(all.queries, 128);
                scene.store(pass);
                if (i + 1 < view.window) continue;

                Expected expected;
                const std::vector<float> &keys = all.keys;
                std::vector<reference::Reading> key(keys.size()), value(keys.size());
                for (size_t c = 0; c < keys.size(); c++)
                    key[c] = reference::exact(keys[c]), value[c] = reference::exact(all.values[c]);
                for (int head = 0; head < 2; head++) {
                    std::vector<reference::Seen> seen;
                    for (int t = 0; t < sinks; t++)  // to position first - sinks + t
                        seen.push_back({reference::moved_key(&keys[t * 64], 64, t, first - sinks, scene.frequencies),
                                        nullptr, &value[t * 64]});
                    for (int t = sinks; t < sinks + view.window; t++)
                        seen.push_back({{}, &key[t * 64], &value[t * 64]});
                    reference::attention(expected, &pass.queries[head * 64], seen, 64, 64);
                }
                CHECK(worst(scene.attended(pass), expected) <= 1);
                CHECK(worst(scene.attended(pass, plainly), expected) <= 1);
            }
        }
    }
}

TEST_CASE("as many sinks as there may be: of several splits, in any chunks, dropped or not yet") {
    Random random = seeded();
    auto end_after = [](int seconds) {  // of computing: a search for rows that never ends shall end here
        const itimerval timer = {{0, 0}, {seconds, 0}};
        setitimer(ITIMER_VIRTUAL, &timer, nullptr);
    };
    end_after(300);
    for (int sinks : {255, 256, 257, 512, 600}) {
        CAPTURE(sinks);
        Scene scene = scene_at({Ring{}, 16, sinks + 3, sinks}, {4, 2, 24}, 24, 1, 1, F16{}, F16{});
        Truth truth(scene, 0);
        const int full = 2 * sinks + 3;  // from here on, something is dropped
        scene.tell(random, 0, full + 40);
        scene.run(0, full - 2, {}, 32);
        for (int count : {1, 30, 1, 5}) {
            Given pass = scene.begin({{0, count}});
            const int first = pass.spans[0].position;
            Expected expected = truth.at(range(first, first + count));
            CHECK(worst(scene.attended(pass, plainly), expected) <= 1);
            for (Route route : {Route::by_split, Route::by_tile})
                CHECK(worst(scene.attended(pass, {0, route}), expected) <= 1);
            scene.end(pass);
        }
    }
    end_after(0);
}

// ---- The same bits -----------------------------------------------------------------------------------------

TEST_CASE("one sequence has the same bits alone and in company, in any chunks and pages, with any threads") {
    Random random = seeded();
    const Heads heads = {6, 2, 40};
    const int length = 290, lengths[] = {70, length, 33};
    const Story story(random, heads, 36, length);
    auto check = [&](const Place &place, How how, const Precision &type_k, const Precision &type_v) {
        CAPTURE(place.layout.index());
        auto scene_of = [&](int sequences) { return scene_at(place, heads, 36, sequences, length, type_k, type_v); };
        Scene alone = scene_of(1);
        alone.stories[0] = story;
        alone.run(0, length, how);
        // In company, with other data, in other passes; then alone in chunks of one size.
        for (int most : {4, 32, 150}) {
            Scene scene = scene_of(3);
            scene.tell(random, 0, 70), scene.tell(random, 2, 33);
            scene.stories[1] = alone.stories[0];
            while (scene.cache.lengths[1] < length) {
                std::vector<Growth> growths;
                for (int i = 0, first = (int)(random.bits() % 3); i < 3; i++) {
                    int sequence = (first + i) % 3, rest = lengths[sequence] - scene.cache.lengths[sequence];
                    int some = 1 + (int)(random.bits() % std::min(most, scene.most_a_pass()));
                    if (rest > 0) growths.push_back({sequence, std::min(rest, some)});
                }
                how.route = random.bits() % 2 ? Route::by_split : Route::by_tile;
                how.threads = random.bits() % 16 ? 1 : 3;
                scene.step(growths, how);
            }
            REQUIRE(same_bits(scene.outs[1], alone.outs[0]));
        }
        for (int chunk : {1, 7, 64}) {
            Scene scene = scene_of(1);
            scene.stories = alone.stories;
            scene.run(0, length, how, chunk);
            REQUIRE(same_bits(scene.outs[0], alone.outs[0]));
        }
        return alone.outs[0];
    };
    int turn = 0;
    for_each_pair([&](const Precision &type_k, const Precision &type_v) {
        How how;
        how.plain = turn++ % 4 == 0;
        check(places[2], how, type_k, type_v);
        how.layer_window = turn % 3 * 33;
        REQUIRE(same_bits(check(places[0], how, type_k, type_v), check(places[1], how, type_k, type_v)));
    });
}

TEST_CASE("what is not a number stays in its sequence, for every K and V") {
    Random random = seeded();
    const Heads heads = {6, 2, 40};
    Story story(random, heads, 36, 102), broken(random, heads, 36, 256);
    for (std::vector<float> *numbers : {&broken.keys, &broken.values}) std::fill(numbers->begin(), numbers->end(), NAN);
    for_each_pair([&](const Precision &type_k, const Precision &type_v) {
        Scene alone(heads, 36, 1, 102, Contiguous{}, type_k, type_v),
            scene(heads, 36, 2, 256, Contiguous{}, type_k, type_v);
        alone.stories = {story};
        alone.run(0, 102);
        scene.stories = {broken, story};
        scene.fill(0, 250);
        for (int step = 0; step < 6; step++) scene.step({{0, 1}, {1, 17}});
        CHECK(std::isnan(scene.outs[0][0]));
        CHECK(same_bits(scene.outs[1], alone.outs[0]));
    });
}

TEST_CASE("one number of a query that is none shows in what its head gives, and in nothing else, for every K") {
    Random random = seeded();
    for_each_type<Precision>([&](auto type_k) {
        CAPTURE(std::string(type_k.name));
        for (float bad : {NAN, INFINITY, -INFINITY}) {
            Scene scene({6, 2, 40}, 40, 1, 100, Contiguous{}, type_k, F16{});
            scene.tell(random, 0, 100);
            scene.fill(0, 99);
            Given pass = scene.begin({{0, 1}});
            std::vector<float> good = scene.attended(pass);
            pass.queries[2 * 40 + 7] = bad;
            std::vector<float> out = scene.attended(pass);
            for (int i = 0; i < 6 * 40; i++) CHECK((i / 40 == 2 ? std::isnan(out[i]) : out[i] == good[i]));
        }
    });
}

TEST_CASE("a token that is not a number is seen by none before it, also where they are computed together") {
    Random random = seeded();
    for_each_pair([&](const Precision &type_k, const Precision &type_v) {
        for (Heads heads : {Heads{3, 1, 64}, Heads{2, 2, 20}}) {
            Scene scene(heads, heads.width, 1, 320, Contiguous{}, type_k, type_v);
            scene.tell(random, 0, 320);
            scene.fill(0, 230);
            Given pass;
            scene.add(pass, 0, 230, 40);
            const int bad = (int)(random.bits() % 40);
            CAPTURE(bad);
            for (bool plain : {true, false}) {
                Given good = pass, broken = pass;
                std::fill_n(broken.values.begin() + (size_t)bad * heads.kv * heads.width, heads.width, NAN);
                std::fill_n(broken.keys.begin() + (size_t)bad * heads.kv * heads.width, heads.width, INFINITY);
                How how = {0, Route::engines_choice, 1, plain};
                scene.cache.lengths[0] = 270;
                scene.store(good);
                std::vector<float> expected = scene.attended(good, how);
                scene.store(broken);
                std::vector<float> out = scene.attended(broken, how);
                // With blocks of keys a stored block is broken as a whole: those who read it come later.
                size_t before = (size_t)bad * heads.query * heads.width;
                CHECK(std::equal(out.begin(), out.begin() + before, expected.begin()));
                CHECK(std::isnan(out[before]));
            }
        }
    });
}

// ---- What must never show ----------------------------------------------------------------------------------

TEST_CASE("positions that are not filled, not yet visible or no longer visible never show") {
    Random random = seeded();
    for_each_type<Precision>([&](auto type) {
        for (int window : {0, 5, 256}) {
            Scene scene({3, 1, 20}, 20, 3, 600, Contiguous{}, type, type);
            scene.tell(random, 1, 520);  // everything else stays NaN, the sequences before and behind too
            Truth truth(scene, 1);
            for (int position : {0, 1, 255, 256, 511, 519}) {
                CAPTURE(position);
                scene.fill(1, position);
                Given pass = scene.begin({{1, 1}});
                for (Route route : {Route::by_split, Route::by_tile})
                    REQUIRE(worst(scene.attended(pass, {window, route, 1}), truth.at({position}, window)) <= 1);
                scene.end(pass);
            }
            if (!window) continue;
            // Positions [0, 320) are NaN. A window that begins at 320 does not see them; 320 begins a block.
            Scene old({3, 1, 20}, 20, 1, 600, Contiguous{}, type, type);
            old.tell(random, 0, 600);
            Story good = old.stories[0];
            std::fill(old.stories[0].keys.begin(), old.stories[0].keys.begin() + 320 * 20, NAN);
            std::fill(old.stories[0].values.begin(), old.stories[0].values.begin() + 320 * 20, NAN);
            old.fill(0, 320 + window - 1);
            Given pass = old.begin({{0, 1}});
            std::vector<float> out = old.attended(pass, {window, Route::engines_choice, 1});
            old.stories[0] = good;
            CHECK(worst(out, Truth(old, 0).at({320 + window - 1}, window)) <= 1);
        }
    });
}

// ---- Extremes ----------------------------------------------------------------------------------------------

// Keys along one direction, so that the query (sign, 0, 0, ...) has the score scores[t].
Scene scene_of_scores(Random &random, const std::vector<float> &scores, int width, float sign = 1) {
    Scene scene({1, 1, width}, width, 1, (int)scores.size());
    scene.tell(random, 0, (int)scores.size());
    Story &story = scene.stories[0];
    std::fill(story.keys.begin(), story.keys.end(), 0.0f);
    std::fill(story.queries.begin(), story.queries.end(), 0.0f);
    for (size_t t = 0; t < scores.size(); t++) {
        story.keys[t * width] = sign * scores[t] * std::sqrt((float)width);
        story.queries[t * width] = sign;
    }
    scene.fill(0, (int)scores.size() - 1);
    return scene;
}

TEST_CASE("one dominating key gives its value, wherever it is; huge scores neither overflow nor turn into NaN") {
    Random random = seeded();
    const int width = 20, tokens = 600;
    auto check = [&](std::vector<float> scores, int best, float sign) {
        Scene scene = scene_of_scores(random, scores, width, sign);
        Given pass = scene.begin({{0, 1}});
        for (Route route : {Route::by_tile, Route::by_split})
            CHECK(same_bits(scene.attended(pass, {0, route, 1}),
                            rows_of(scene.stories[0].values, width, best, best + 1)));
    };
    for (int dominating : {0, 1, 255, 256, 257, 511, 512, 599}) {
        CAPTURE(dominating);
        std::vector<float> scores(tokens, -500);
        scores[dominating] = 500;
        check(scores, dominating, 1);
        for (float size : {1e4f, 1e6f, 1e10f, 1e30f}) {
            CAPTURE(size);
            for (float &score : scores) score = size * (float)random.uniform(-1, 0.9);
            scores[dominating] = size;
            for (float sign : {1.0f, -1.0f}) check(scores, dominating, sign);
        }
    }
}

TEST_CASE("equal scores, huge ones too, give the mean of the visible values") {
    Random random = seeded();
    for (float size : {0.0f, 1.0f, 1e4f, -1e4f, 1.2345e10f, -3.3e20f}) {
        Scene scene = scene_of_scores(random, std::vector<float>(500, size), 24);
        Given pass = scene.begin({{0, 1}});
        for (int window : {0, 1, 7, 300}) {
            CAPTURE(size);
            CAPTURE(window);
            int first = window ? 500 - window : 0;
            for (bool plain : {false, true}) {
                std::vector<float> out = scene.attended(pass, {window, Route::engines_choice, 1, plain});
                for (int i = 0; i < 24; i++) {
                    double mean = 0;
                    for (int t = first; t < 500; t++) mean += scene.stories[0].values[(size_t)t * 24 + i];
                    CHECK(std::fabs(out[i] - mean / (500 - first)) <= reference::gamma(1040));
                }
            }
        }
    }
}

TEST_CASE("rows so wide that sums of codes times 32,767 would not fit 32 bits") {
    Random random = seeded();
    for (const Precision &type : {Precision(Int8{}), Precision(Int4{})}) {
        CAPTURE(std::string(name_of(type)));
        const int width = std::holds_alternative<Int8>(type) ? 16384 : 8192;
        Scene scene({1, 1, width}, 8, 1, 70, Contiguous{}, type, F32{});
        scene.tell(random, 0, 70);
        Story &story = scene.stories[0];
        std::fill(story.queries.begin(), story.queries.end(), 1.0f);
        for (size_t i = 0; i < story.keys.size(); i++) story.keys[i] = i / width % 32 == 7 ? 1.0f : 0.96875f;
        scene.fill(0, 69);
        Given pass = scene.begin({{0, 1}});
        CHECK(worst(scene.attended(pass), Truth(scene, 0).at({69})) <= 1);
    }
}

// ---- Memory ------------------------------------------------------------------------------------------------

// Bytes that new has given out, now and at most. What a cache takes is not among them: it is mapped (base/team.h).
static std::atomic<size_t> held{0}, most_held{0};
__attribute__((noinline)) static void *counted(void *p) {
    most_held = std::max<size_t>(most_held, held += malloc_usable_size(p));
    return p ? p : throw std::bad_alloc();
}
__attribute__((noinline)) static void release(void *p) noexcept { held -= malloc_usable_size(p), free(p); }
void *operator new(size_t bytes) { return counted(malloc(bytes)); }
void *operator new(size_t bytes, std::align_val_t line) {
    return counted(aligned_alloc((size_t)line, (bytes + (size_t)line - 1) / (size_t)line * (size_t)line));
}
void operator delete(void *p) noexcept { release(p); }
void operator delete(void *p, size_t) noexcept { release(p); }
void operator delete(void *p, std::align_val_t) noexcept { release(p); }
void operator delete(void *p, size_t, std::align_val_t) noexcept { release(p); }

TEST_CASE("attention makes no copy of the cache: beside it memory does not grow with the context") {
    // Less than the smallest copy: one head's keys of one layer at 32,768 positions are 4 MiB in f16, 8 in f32.
    constexpr size_t bound = 3 << 20, context = 1 << 15;
    Random random = seeded();
    for_each_type<Layout>([&](auto layout) {
        for (Precision type : {Precision(Int8{}), Precision(Int4{}), Precision(Int2{}), Precision(F16{})}) {
            CAPTURE(std::string(layout.name));
            CAPTURE(std::string(name_of(type)));
            CacheShape shape;
            shape.window = context;
            Scene scene({2, 1, 64}, 64, 1, context, layout, type, type, shape);
            scene.tell(random, 0, context);
            scene.fill(0, context - 308);
            const size_t before = most_held = +held;
            scene.run(0, context - 8);  // of a prompt the last chunk, then some decoded tokens
            scene.run(0, context, {}, 1);
            CHECK(most_held - before < bound);
        }
    });
    // Nor with the product of a pass's tokens and its sinks, before some are rotated and after.
    CacheShape shape;
    shape.window = 2000, shape.sinks = 1500;
    Scene scene({2, 1, 64}, 64, 1, context, Ring{}, F16{}, F16{}, shape);
    scene.tell(random, 0, 4000);
    scene.fill(0, 3000);
    for (int length : {3250, 4000}) {
        scene.fill(0, length - 250);
        const size_t before = most_held = +held;
        scene.run(0, length);
        CHECK(most_held - before < bound);
    }
    const size_t before = most_held = +held;
    std::vector<float> copy(context * 32);  // such a copy would be seen
    CHECK(most_held - before > bound);
}

// ---- Pieces ------------------------------------------------------------------------------------------------

TEST_CASE("tiles hold tokens that follow one another in a sequence, as many as fit, and with blocks lie in one") {
    for (int group : {96, 32, 24, 1}) {
        for (bool blocks : {false, true}) {
            Scene scene({group, 1, 8}, 8, 3, 64, Contiguous{}, F16{}, blocks ? Precision(Int4{}) : Precision(F16{}));
            Given batch;
            for (auto [sequence, first, count] : {std::array{0, 29, 6}, {1, 31, 2}, {2, 0, 1}})
                for (int t = first; t < first + count; t++)
                    batch.spans.push_back({batch.count(), 1, sequence, t, first, first + count});
            fast::AttentionPlan plan;
            fast::plan_attention(plan, scene.pass_of(batch), scene.cache.stores[0].view, 1);
            int row = 0, most = 96 / group;
            for (const Span &tile : plan.tiles) {
                Span first = batch.spans[row];
                int end = std::min(first.end, first.position + most);
                if (blocks) end = std::min(end, first.position / 32 * 32 + 32);
                first.count = end - first.position;
                CHECK(memcmp(&tile, &first, sizeof tile) == 0);
                row += first.count;
            }
            CHECK(row == 9);
        }
    }
}

TEST_CASE("merge() of two splits is the softmax over both") {
    Random random = seeded();
    const int width = 5;
    std::vector<float> values, more;
    fast::Partial a, b;
    auto merge = [&] { fast::merge({&a, values.data(), 1, width}, {&b, more.data(), 1, width}, 1); };
    for (double shift : {0.0, 3.0, -3.0, 200.0, -200.0}) {
        std::vector<float> before = values = random_floats(random, width);
        more = random_floats(random, width);
        a = {1.5f, 2.0f}, b = {(float)(1.5 + shift), 3.0f};
        merge();
        double a_factor = std::exp(-std::max(0.0, shift)), b_factor = std::exp(std::min(0.0, shift));
        CHECK(a.max_score == std::max(1.5f, (float)(1.5 + shift)));
        CHECK(a.sum == doctest::Approx(2 * a_factor + 3 * b_factor).epsilon(1e-6));
        for (int i = 0; i < width; i++)
            CHECK(std::fabs(values[i] - before[i] * a_factor - more[i] * b_factor) <= reference::gamma(8) * 2);
    }
    // Where nothing is visible the other stays as it is.
    for (bool first : {true, false}) {
        const std::vector<float> some = {1, 2, 3, 4, 5}, nothing(width, NAN);
        a = b = {}, values = more = nothing;
        (first ? a : b) = {1.5f, 2}, (first ? values : more) = some;
        merge();
        CHECK(a.max_score == 1.5f);
        CHECK(a.sum == 2);
        CHECK(values == some);
    }
}
