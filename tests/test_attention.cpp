// attention.cu: both rungs against the equation in double precision, and the promise that a query's result has the
// same bits whoever computes it, in whatever company.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "../attention.cu"

#include <doctest/doctest.h>

#include "reference.h"

using reference::Expected;
using reference::Random;
using reference::random_floats;
using reference::same_bits;
using reference::worst;

// ---- Helpers -----------------------------------------------------------------------------------------------

// A row of numbers as it reads after it was stored.
void round_to(const Precision &type, float *numbers, int width) {
    std::visit(
        [&](auto format) {
            std::vector<char> row(format.row_bytes(width));
            format.encode(row.data(), numbers, width);
            for (int i = 0; i < width; i++) {
                float lane[lanes];
                store(lane, format.decode_part(row.data(), i, 1));
                numbers[i] = lane[0];
            }
        },
        type);
}

// The cached keys and values of one sequence, as they read: (tokens, kv_heads, width).
struct Past {
    std::vector<float> keys, values;
};

// One layer's attention: a cache full of NaN, into which add() puts what a sequence has seen.
struct Scene {
    Heads heads;
    int value_width;
    Cache cache;
    std::vector<Past> past;  // (sequence)

    Scene(Heads heads, int value_width, int sequences, int capacity, Precision type_k = F32{}, Precision type_v = F32{})
        : heads(heads),
          value_width(value_width),
          cache(open_cache({2, heads.kv, heads.width, value_width, sequences, capacity}, Contiguous{}, type_k, type_v)),
          past(sequences) {
        for (const CacheRows *side : {&cache.keys, &cache.values})
            memset(side->data, 0xff, 2 * side->rows_per_layer * side->stride());
    }

    // Appends one position: key (kv_heads, D), value (kv_heads, value_width).
    void add(int sequence, std::vector<float> key, std::vector<float> value) {
        int position = grow(cache, sequence, 1), width = heads.width;
        for (int head = 0; head < heads.kv; head++) {
            float *k = &key[(size_t)head * width], *v = &value[(size_t)head * value_width];
            store_row(cache, 1, sequence, position, head, k, v);
            round_to(cache.type_k, k, width);
            round_to(cache.type_v, v, value_width);
        }
        past[sequence].keys.insert(past[sequence].keys.end(), key.begin(), key.end());
        past[sequence].values.insert(past[sequence].values.end(), value.begin(), value.end());
    }

    void add_random(Random &random, int sequence, int count) {
        for (int i = 0; i < count; i++) {
            std::vector<float> key = random_floats(random, (size_t)heads.kv * heads.width);
            add(sequence, key, random_floats(random, (size_t)heads.kv * value_width));
        }
    }

    std::vector<float> queries(Random &random, size_t count) const {
        return random_floats(random, count * heads.query * heads.width, -2, 2);
    }

    // What the equation gives for rows of a pass.
    Expected expected(const std::vector<float> &query, const std::vector<int> &sequences,
                      const std::vector<int> &positions, int window) const {
        Expected out;
        size_t key_row = (size_t)heads.kv * heads.width, value_row = (size_t)heads.kv * value_width;
        for (size_t row = 0; row < positions.size(); row++) {
            for (int head = 0; head < heads.query; head++) {
                int kv_head = head * heads.kv / heads.query;
                const Past &seen = past[sequences[row]];
                reference::attention(out, &query[(row * heads.query + head) * heads.width],
                                     {&seen.keys[(size_t)kv_head * heads.width], key_row, heads.width},
                                     {&seen.values[(size_t)kv_head * value_width], value_row, value_width},
                                     positions[row], window);
            }
        }
        return out;
    }
};

enum class Route { by_split, by_tile, engines_choice };

// attend() as the engine calls it. The threads the plan is told decide whether splits are shared.
std::vector<float> attended(const Scene &scene, const std::vector<float> &query, const std::vector<int> &sequences,
                            const std::vector<int> &positions, int window, Route route = Route::engines_choice,
                            int threads = 1) {
    int count = (int)positions.size();
    int planned = route == Route::by_split ? 1 << 20 : route == Route::by_tile ? 0 : threads;
    AttentionPlan plan =
        plan_attention(sequences.data(), positions.data(), count, scene.heads, scene.value_width, planned);
    if (route != Route::engines_choice) REQUIRE(plan.share_splits == (route == Route::by_split));
    std::vector<float> out((size_t)count * scene.heads.query * scene.value_width, NAN);
#pragma omp parallel num_threads(threads)
    attend(out.data(), query.data(), plan, scene.cache, 1, window);
    return out;
}

std::vector<float> attended_plainly(const Scene &scene, const std::vector<float> &query, int window, int threads = 1) {
    const Past &past = scene.past[0];
    int tokens = (int)(past.keys.size() / (scene.heads.kv * scene.heads.width));
    std::vector<float> out(query.size(), NAN);
#pragma omp parallel num_threads(threads)
    attend_plain(out.data(), query.data(), past.keys.data(), past.values.data(), scene.heads, tokens, window);
    return out;
}

std::vector<int> range(int begin, int end) {
    std::vector<int> numbers;
    for (int i = begin; i < end; i++) numbers.push_back(i);
    return numbers;
}

std::vector<float> rows_of(const std::vector<float> &all, size_t width, int begin, int end) {
    return {all.begin() + begin * width, all.begin() + end * width};
}

// ---- The equation ------------------------------------------------------------------------------------------

TEST_CASE("attend_plain() is the equation") {
    Random random{1};
    for (Heads heads : {Heads{1, 1, 8}, Heads{3, 3, 20}, Heads{6, 2, 32}, Heads{7, 1, 80}, Heads{8, 1, 64}}) {
        for (int tokens : {1, 2, 33, 100}) {
            for (int window : {0, 1, 7, 99, 300}) {
                CAPTURE(heads.width);
                CAPTURE(tokens);
                CAPTURE(window);
                Scene scene(heads, heads.width, 1, tokens);
                scene.add_random(random, 0, tokens);
                std::vector<float> query = scene.queries(random, tokens);
                Expected expected = scene.expected(query, std::vector<int>(tokens), range(0, tokens), window);
                std::vector<float> out = attended_plainly(scene, query, window);
                REQUIRE(worst(out, expected) <= 1);
                REQUIRE(same_bits(out, attended_plainly(scene, query, window, 3)));
            }
        }
    }
}

TEST_CASE("attend() is the equation for every width, group, length and window") {
    Random random{2};
    int turn = 0;
    for (int width : {8, 20, 32, 64, 80, 96, 128, 256}) {
        for (int group : {1, 3, 7, 8}) {
            int kv_heads = group == 3 ? 2 : 1;
            Scene scene({group * kv_heads, kv_heads, width}, width, 1, 1000);
            scene.add_random(random, 0, 1000);
            for (int length : {1, 31, 32, 33, 255, 256, 257, 1000}) {
                std::vector<int> positions = range(std::max(0, length - 2), length), sequences(positions.size());
                std::vector<float> query = scene.queries(random, positions.size());
                for (int window : {0, 1, 7, 256, 300}) {
                    CAPTURE(width);
                    CAPTURE(group);
                    CAPTURE(length);
                    CAPTURE(window);
                    Route route = turn++ % 2 ? Route::by_split : Route::by_tile;
                    Expected expected = scene.expected(query, sequences, positions, window);
                    REQUIRE(worst(attended(scene, query, sequences, positions, window, route), expected) <= 1);
                }
            }
        }
    }
}

TEST_CASE("attend() is the equation over rows of every precision, K and V of different widths too") {
    Random random{3};
    for_each_type<Precision>([&](auto type_k) {
        for_each_type<Precision>([&](auto type_v) {
            for (int width : {20, 64, 128}) {
                for (int value_width : {width, 24, 96}) {
                    CAPTURE(type_k.name);
                    CAPTURE(type_v.name);
                    CAPTURE(width);
                    CAPTURE(value_width);
                    Scene scene({6, 2, width}, value_width, 1, 300, type_k, type_v);
                    scene.add_random(random, 0, 300);
                    std::vector<int> positions = range(290, 300), sequences(10);
                    std::vector<float> query = scene.queries(random, 10);
                    for (int window : {0, 40}) {
                        Expected expected = scene.expected(query, sequences, positions, window);
                        REQUIRE(worst(attended(scene, query, sequences, positions, window), expected) <= 1);
                    }
                }
            }
        });
    });
}

TEST_CASE("a whole prompt by attend() is the same prompt by attend_plain()") {
    Random random{4};
    for (int window : {0, 1, 100, 256}) {
        Scene scene({9, 3, 64}, 64, 1, 600);
        scene.add_random(random, 0, 600);
        std::vector<float> query = scene.queries(random, 600);
        std::vector<float> plain = attended_plainly(scene, query, window);
        std::vector<float> out = attended(scene, query, std::vector<int>(600), range(0, 600), window);
        Expected expected = scene.expected(query, std::vector<int>(600), range(0, 600), window);
        CHECK(worst(plain, expected) <= 1);
        CHECK(worst(out, expected) <= 1);
        for (double &bound : expected.bound) bound *= 2;
        expected.value.assign(plain.begin(), plain.end());
        CHECK(worst(out, expected) <= 1);
    }
}

TEST_CASE("a window as long as the sequence hides nothing, one shorter hides the first position") {
    Random random{5};
    Scene scene({2, 1, 32}, 32, 1, 257);
    scene.add_random(random, 0, 257);
    std::vector<float> query = scene.queries(random, 1), all = attended(scene, query, {0}, {256}, 0);
    CHECK(same_bits(all, attended(scene, query, {0}, {256}, 257)));
    CHECK(same_bits(all, attended(scene, query, {0}, {256}, 100000)));
    CHECK(!same_bits(all, attended(scene, query, {0}, {256}, 256)));
}

// ---- The same bits -----------------------------------------------------------------------------------------

TEST_CASE("neither the number of threads nor the route moves a bit") {
    Random random{6};
    for_each_type<Precision>([&](auto type) {
        for (int window : {0, 7, 300}) {
            Scene scene({7, 1, 80}, 80, 1, 530, type, type);
            scene.add_random(random, 0, 530);
            for (std::vector<int> positions : {range(529, 530), range(510, 530), range(240, 270)}) {
                std::vector<int> sequences(positions.size());
                std::vector<float> query = scene.queries(random, positions.size());
                std::vector<float> one = attended(scene, query, sequences, positions, window);
                for (int threads : {1, 2, 3, 5}) {
                    for (Route route : {Route::by_split, Route::by_tile, Route::engines_choice}) {
                        CAPTURE(type.name);
                        CAPTURE(window);
                        CAPTURE(threads);
                        CAPTURE((int)route);
                        std::vector<float> out = attended(scene, query, sequences, positions, window, route, threads);
                        CHECK(same_bits(one, out));
                    }
                }
            }
        }
    });
}

TEST_CASE("a prompt in chunks has the bits of the prompt at once") {
    Random random{7};
    for (Heads heads : {Heads{3, 1, 64}, Heads{8, 2, 20}, Heads{40, 1, 16}}) {
        for (int window : {0, 50, 256}) {
            Scene scene(heads, heads.width, 1, 270, BF16{}, F16{});
            scene.add_random(random, 0, 270);
            size_t width = (size_t)heads.query * heads.width;
            std::vector<float> query = scene.queries(random, 270);
            std::vector<float> whole = attended(scene, query, std::vector<int>(270), range(0, 270), window);
            for (int chunk : {1, 3, 7, 64}) {
                CAPTURE(heads.query);
                CAPTURE(window);
                CAPTURE(chunk);
                std::vector<float> all;
                for (int begin = 0; begin < 270; begin += chunk) {
                    int end = std::min(270, begin + chunk);
                    std::vector<float> out = attended(scene, rows_of(query, width, begin, end),
                                                      std::vector<int>(end - begin), range(begin, end), window);
                    all.insert(all.end(), out.begin(), out.end());
                }
                CHECK(same_bits(whole, all));
            }
        }
    }
}

TEST_CASE("a sequence has the same bits alone and in a batch of others, in whatever order their rows come") {
    Random random{8};
    Heads heads = {6, 2, 32};
    size_t width = (size_t)heads.query * heads.width;
    const int lengths[] = {5, 300, 1, 257};
    for (int window : {0, 40}) {
        Scene scene(heads, 32, 4, 300, F16{}, BF16{});
        for (int step = 0; step < 300; step++)  // positions come in turns, as in decoding
            for (int sequence = 0; sequence < 4; sequence++)
                if (step < lengths[sequence]) scene.add_random(random, sequence, 1);

        struct Row {
            int sequence, position;
        };
        std::vector<Row> one_after_another, in_turns, backwards;
        for (int sequence = 0; sequence < 4; sequence++)
            for (int position = std::max(0, lengths[sequence] - 4); position < lengths[sequence]; position++)
                one_after_another.push_back({sequence, position});
        for (int step = 4; step > 0; step--)
            for (int sequence : {2, 0, 3, 1})
                if (lengths[sequence] >= step) in_turns.push_back({sequence, lengths[sequence] - step});
        backwards.assign(in_turns.rbegin(), in_turns.rend());

        std::vector<float> queries = scene.queries(random, 4 * 300);  // (sequence, position)
        auto query_of = [&](Row row) {
            int at = row.sequence * 300 + row.position;
            return rows_of(queries, width, at, at + 1);
        };
        for (const std::vector<Row> &rows : {one_after_another, in_turns, backwards}) {
            std::vector<float> query, alone;
            std::vector<int> sequences, positions;
            for (Row row : rows) {
                std::vector<float> one = query_of(row);
                query.insert(query.end(), one.begin(), one.end());
                sequences.push_back(row.sequence), positions.push_back(row.position);
                std::vector<float> out = attended(scene, one, {row.sequence}, {row.position}, window);
                alone.insert(alone.end(), out.begin(), out.end());
            }
            for (Route route : {Route::by_split, Route::by_tile}) {
                for (int threads : {1, 3}) {
                    std::vector<float> together = attended(scene, query, sequences, positions, window, route, threads);
                    CHECK(same_bits(together, alone));
                }
            }
            CHECK(worst(alone, scene.expected(query, sequences, positions, window)) <= 1);
        }
    }
}

// ---- What must never show ----------------------------------------------------------------------------------

TEST_CASE("positions that are not filled, not yet visible or no longer visible never show") {
    Random random{9};
    for_each_type<Precision>([&](auto type) {
        for (int window : {0, 5, 256}) {
            Scene scene({3, 1, 20}, 20, 3, 600, type, type);
            scene.add_random(random, 1, 520);  // everything else stays NaN, the sequences before and behind too
            std::vector<float> query = scene.queries(random, 1);
            for (int position : {0, 1, 255, 256, 511, 519}) {
                CAPTURE(position);
                for (Route route : {Route::by_split, Route::by_tile}) {
                    Expected expected = scene.expected(query, {1}, {position}, window);
                    REQUIRE(worst(attended(scene, query, {1}, {position}, window, route), expected) <= 1);
                }
            }
            if (!window) continue;
            Scene old({3, 1, 20}, 20, 1, 600, type, type);
            std::vector<float> missing(20, NAN);
            for (int t = 0; t < 300; t++) old.add(0, missing, missing);
            old.add_random(random, 0, window);
            int position = 300 + window - 1;
            CHECK(worst(attended(old, query, {0}, {position}, window), old.expected(query, {0}, {position}, window)) <=
                  1);
        }
    });
}

TEST_CASE("only the asked layer is read") {
    Random random{10};
    Scene scene({2, 2, 8}, 8, 1, 20);
    scene.add_random(random, 0, 20);
    std::vector<float> row(16, 1), query = scene.queries(random, 1), before = attended(scene, query, {0}, {19}, 0);
    for (int head = 0; head < 2; head++) store_row(scene.cache, 0, 0, 7, head, row.data(), row.data());
    CHECK(same_bits(before, attended(scene, query, {0}, {19}, 0)));
}

// ---- Extremes ----------------------------------------------------------------------------------------------

// Keys along one direction, so that the query (1, 0, 0, ...) has the score size[t] * sqrt(D) / sqrt(D).
Scene scene_of_scores(Random &random, const std::vector<float> &scores, int width) {
    Scene scene({1, 1, width}, width, 1, (int)scores.size());
    for (float score : scores) {
        std::vector<float> key(width);
        key[0] = score * std::sqrt((float)width);
        scene.add(0, key, random_floats(random, width));
    }
    return scene;
}

TEST_CASE("huge scores neither overflow nor turn into NaN") {
    Random random{11};
    const int width = 16, tokens = 600;
    for (float size : {1e4f, 1e6f, 1e10f, 1e30f}) {
        CAPTURE(size);
        std::vector<float> query(width);
        query[0] = 1;
        std::vector<float> scores(tokens);
        for (float &score : scores) score = size * (float)random.uniform(-1, 1);
        scores[400] = size;
        for (int sign : {1, -1}) {
            query[0] = (float)sign;
            Scene scene = scene_of_scores(random, scores, width);
            int best = (int)((sign > 0 ? std::max_element(scores.begin(), scores.end())
                                       : std::min_element(scores.begin(), scores.end())) -
                             scores.begin());
            for (const std::vector<float> &out : {attended(scene, query, {0}, {tokens - 1}, 0, Route::by_tile),
                                                  attended(scene, query, {0}, {tokens - 1}, 0, Route::by_split)}) {
                for (int i = 0; i < width; i++)
                    CHECK(out[i] == doctest::Approx(scene.past[0].values[(size_t)best * width + i]));
            }
        }
    }
}

TEST_CASE("equal huge scores share the weight equally") {
    Random random{12};
    for (float size : {1e4f, -1e4f, 1.2345e10f, -3.3e20f}) {
        CAPTURE(size);
        Scene scene = scene_of_scores(random, std::vector<float>(500, size), 24);
        std::vector<float> query(24);
        query[0] = 1;
        std::vector<double> mean(24);
        for (int t = 0; t < 500; t++)
            for (int i = 0; i < 24; i++) mean[i] += scene.past[0].values[(size_t)t * 24 + i] / 500.0;
        std::vector<float> out = attended(scene, query, {0}, {499}, 0);
        for (int i = 0; i < 24; i++) CHECK(std::fabs(out[i] - mean[i]) <= reference::gamma(1040));
    }
}

TEST_CASE("equal keys give the mean of the visible values") {
    Random random{13};
    for (int window : {0, 1, 7, 300}) {
        Scene scene({3, 1, 24}, 24, 1, 400);
        std::vector<float> key = random_floats(random, 24), query = scene.queries(random, 1);
        for (int t = 0; t < 400; t++) scene.add(0, key, random_floats(random, 24));
        int first = window ? 400 - window : 0;
        std::vector<float> out = attended(scene, query, {0}, {399}, window);
        for (int i = 0; i < 24; i++) {
            double mean = 0;
            for (int t = first; t < 400; t++) mean += scene.past[0].values[(size_t)t * 24 + i] / (400.0 - first);
            for (int head = 0; head < 3; head++)
                CHECK(std::fabs(out[head * 24 + i] - mean) <= reference::gamma(2 * (400 - first) + 40));
        }
    }
}

TEST_CASE("one dominating key gives its value, wherever it is") {
    Random random{14};
    for (int dominating : {0, 1, 255, 256, 257, 511, 512, 599}) {
        CAPTURE(dominating);
        std::vector<float> scores(600, -500), query(20);
        scores[dominating] = 500;
        query[0] = 1;
        Scene scene = scene_of_scores(random, scores, 20);
        std::vector<float> out = attended(scene, query, {0}, {599}, 0);
        CHECK(same_bits(out, rows_of(scene.past[0].values, 20, dominating, dominating + 1)));
    }
}

// ---- Pieces ------------------------------------------------------------------------------------------------

TEST_CASE("tiles hold rows that follow one another in a sequence, as many as fit") {
    Heads heads = {8, 1, 4};  // 32 / 8 = 4 tokens a tile
    const std::vector<int> sequences = {0, 0, 0, 0, 0, 1, 1, 0, 2, 2}, positions = {3, 4, 5, 6, 7, 8, 9, 8, 0, 2};
    std::vector<QueryTile> tiles = query_tiles(sequences.data(), positions.data(), 10, heads);
    const int rows[] = {0, 4, 5, 7, 8, 9}, counts[] = {4, 1, 2, 1, 1, 1};
    REQUIRE(tiles.size() == 6);
    for (int i = 0; i < 6; i++) {
        CHECK(tiles[i].row == rows[i]);
        CHECK(tiles[i].count == counts[i]);
        CHECK(tiles[i].sequence == sequences[rows[i]]);
        CHECK(tiles[i].position == positions[rows[i]]);
    }
    CHECK(query_tiles(sequences.data(), positions.data(), 10, {64, 1, 4}).size() == 10);
}

TEST_CASE("merge() of two stretches is the softmax over both") {
    Random random{15};
    for (double shift : {0.0, 3.0, -3.0, 200.0, -200.0}) {
        const int width = 5;
        std::vector<float> values = random_floats(random, 2 * width);
        Partial a = {1.5f, 2.0f}, b = {(float)(1.5 + shift), 3.0f};
        std::vector<float> merged(values.begin(), values.begin() + width);
        merge(a, merged.data(), b, &values[width], width);
        double a_factor = std::exp(-std::max(0.0, shift)), b_factor = std::exp(std::min(0.0, shift));
        CHECK(a.most == std::max(1.5f, (float)(1.5 + shift)));
        CHECK(a.sum == doctest::Approx(2 * a_factor + 3 * b_factor).epsilon(1e-6));
        for (int i = 0; i < width; i++) {
            double expected = values[i] * a_factor + values[width + i] * b_factor;
            CHECK(std::fabs(merged[i] - expected) <= reference::gamma(8) * 2);
        }
    }
}

TEST_CASE("merge() with a stretch where nothing is visible leaves the other as it is") {
    Partial a = {1.5f, 2}, none;
    std::vector<float> values = {1, 2, 3}, nothing = {NAN, NAN, NAN};
    merge(a, values.data(), none, nothing.data(), 3);
    CHECK(a.sum == 2);
    CHECK(values == std::vector<float>{1, 2, 3});
    merge(none, nothing.data(), a, values.data(), 3);
    CHECK(none.most == 1.5f);
    CHECK(none.sum == 2);
    CHECK(nothing == values);
}
