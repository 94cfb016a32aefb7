// cache.h: how many bytes a cache takes, where each row lies in them, and what comes back from a row. The tests go
// through the lists of layouts and precisions, so that a new one is tested from its first day.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "../cache.h"

#include <doctest/doctest.h>

#include <climits>
#include <functional>
#include <limits>

#include "../attention.cu"
#include "reference.h"

using reference::Random;

// ---- Helpers -----------------------------------------------------------------------------------------------

// Calls use(layout, type_k, type_v) for all combinations there are.
template <class Use>
void for_each_cache(Use use) {
    for_each_type<Layout>([&](auto layout) {
        for_each_type<Precision>([&](auto type_k) {
            for_each_type<Precision>([&](auto type_v) {
                CAPTURE(layout.name);
                CAPTURE(type_k.name);
                CAPTURE(type_v.name);
                use(layout, type_k, type_v);
            });
        });
    });
}

std::vector<float> decoded(const Cache &cache, const CacheRows &side, const Precision &type, int layer, int sequence,
                           int position, int kv_head) {
    std::vector<float> numbers(side.width);
    const char *row = side.at(layer, row_of(cache, sequence, position), kv_head);
    std::visit(
        [&](auto format) {
            for (int i = 0; i < side.width; i++) {
                float lane[lanes];
                store(lane, format.decode_part(row, i, 1));
                numbers[i] = lane[0];
            }
        },
        type);
    return numbers;
}

void poison(Cache &cache) {
    for (const CacheRows *side : {&cache.keys, &cache.values})
        memset(side->data, 0xff,
               (size_t)cache.shape.layers * side->rows_per_layer * side->kv_heads * side->row_bytes);  // NaN
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

// ---- Bytes -------------------------------------------------------------------------------------------------

TEST_CASE("3 tokens, 2 KV heads, 4 numbers in bf16: 48 bytes of K and 48 of V, and where they are") {
    Cache cache = open_cache({1, 2, 4, 4, 1, 3}, Contiguous{}, BF16{}, BF16{});
    CHECK(cache.payload_bytes == 96);
    CHECK(cache.metadata_bytes == 0);
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
        size_t bytes;
    };
    const size_t GiB = (size_t)1 << 30, MiB = (size_t)1 << 20;
    const std::vector<Case> cases = {
        {80, 64, 128, 1, 32768, BF16{}, 85899345920},    // 80 GiB
        {1, 64, 128, 1, 32768, BF16{}, GiB},             // a layer of it
        {80, 8, 128, 1, 32768, BF16{}, 10 * GiB},        // GQA
        {80, 1, 128, 1, 32768, BF16{}, 5 * GiB / 4},     // MQA
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
        // Address space is all that this takes; more than the machine has is refused, so a share of it is asked for.
        int share = c.capacity >= 1024 ? 1024 : 1;
        Cache cache = open_cache({c.layers, c.kv_heads, c.width, c.width, c.sequences, c.capacity / share},
                                 Contiguous{}, c.type, c.type);
        CHECK(cache.payload_bytes * share == c.bytes);
    }
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

TEST_CASE("rows never overlap and fill the memory to the last byte, K and V of different widths too") {
    for_each_cache([](auto layout, auto type_k, auto type_v) {
        CacheShape shape = {3, 2, 20, 6, 3, 5};
        Cache cache = open_cache(shape, layout, type_k, type_v);
        for (int sequence = 0; sequence < shape.sequences; sequence++) grow(cache, sequence, shape.capacity);
        size_t total = 0;
        for (const CacheRows *side : {&cache.keys, &cache.values}) {
            std::vector<size_t> begins;
            for (int layer = 0; layer < shape.layers; layer++)
                for (int sequence = 0; sequence < shape.sequences; sequence++)
                    for (int position = 0; position < shape.capacity; position++)
                        for (int head = 0; head < shape.kv_heads; head++)
                            begins.push_back(side->at(layer, row_of(cache, sequence, position), head) - side->data);
            std::sort(begins.begin(), begins.end());
            for (size_t i = 0; i < begins.size(); i++) REQUIRE(begins[i] == i * side->row_bytes);
            total += begins.size() * side->row_bytes;
        }
        CHECK(cache.keys.row_bytes == type_k.row_bytes(20));
        CHECK(cache.values.row_bytes == type_v.row_bytes(6));
        CHECK(total == cache.payload_bytes);
    });
}

TEST_CASE("a run of rows stays inside its sequence, and its rows follow one another") {
    for_each_type<Layout>([](auto layout) {
        CAPTURE(layout.name);
        CacheShape shape = {1, 2, 8, 8, 3, 37};
        Cache cache = open_cache(shape, layout, F32{}, F32{});
        for (int sequence = 0; sequence < shape.sequences; sequence++) {
            grow(cache, sequence, shape.capacity);
            for (int position = 0; position < shape.capacity; position++) {
                int run = run_of(cache, position);
                REQUIRE(run >= 1);
                REQUIRE(position + run <= shape.capacity);
                for (int i = 0; i < run; i++) {
                    int64_t row = row_of(cache, sequence, position + i);
                    REQUIRE(row == row_of(cache, sequence, position) + i);
                    REQUIRE(cache.keys.at(0, row, 1) ==
                            cache.keys.at(0, row_of(cache, sequence, position), 1) + i * cache.keys.stride());
                }
            }
        }
    });
    CHECK(Contiguous{37}.run(0) == 37);
    CHECK(Contiguous{37}.run(36) == 1);
}

TEST_CASE("a long cache's rows are addressed beyond 32 bits") {
    Contiguous layout = {1 << 20};
    CHECK(layout.row(5000, 3) == ((int64_t)5000 << 20) + 3);
    CHECK(layout.rows(5000) == (int64_t)5000 << 20);
    char origin;
    CacheRows side = {&origin, 256, 128, 8, (int64_t)1 << 20};
    CHECK((size_t)(side.at(79, 1 << 19, 7) - side.data) == ((79ull * (1 << 20) + (1 << 19)) * 8 + 7) * 256);
}

// ---- What comes back ---------------------------------------------------------------------------------------

TEST_CASE("a stored number comes back within the unit roundoff of its precision") {
    for_each_cache([](auto layout, auto type_k, auto type_v) {
        CacheShape shape = {2, 3, 37, 16, 2, 9};
        Cache cache = open_cache(shape, layout, type_k, type_v);
        Random random{1};
        auto row = [&](int width) {  // of all magnitudes that are normal numbers in each precision
            std::vector<float> numbers(width);
            for (float &x : numbers)
                x = (float)(random.uniform(-1, 1) > 0 ? 1 : -1) * std::exp2(random.uniform(-13, 15));
            return numbers;
        };
        double worst_k = 0, worst_v = 0;
        auto measure = [](double &worst, const std::vector<float> &got, const std::vector<float> &stored) {
            for (size_t i = 0; i < got.size(); i++)
                worst = std::max(worst, std::fabs((double)got[i] - stored[i]) / std::fabs(stored[i]));
        };
        for (int sequence = 0; sequence < 2; sequence++) {
            for (int position = 0; position < 9; position++) {
                grow(cache, sequence, 1);
                for (int layer = 0; layer < 2; layer++) {
                    for (int head = 0; head < 3; head++) {
                        std::vector<float> key = row(37), value = row(16);
                        store_row(cache, layer, sequence, position, head, key.data(), value.data());
                        measure(worst_k, decoded(cache, cache.keys, type_k, layer, sequence, position, head), key);
                        measure(worst_v, decoded(cache, cache.values, type_v, layer, sequence, position, head), value);
                    }
                }
            }
        }
        CHECK(worst_k <= type_k.unit_roundoff);
        CHECK(worst_v <= type_v.unit_roundoff);
    });
}

TEST_CASE("zero, denormal, huge, infinite and missing numbers come back as what they are") {
    const float infinity = std::numeric_limits<float>::infinity();
    for_each_type<Precision>([&](auto type) {
        CAPTURE(type.name);
        std::vector<float> stored = {0.0f, -0.0f, 1e-40f, -1e-30f, 1e30f, -1e38f, infinity, -infinity, NAN, 1};
        Cache cache = open_cache({1, 1, 10, 10, 1, 1}, Contiguous{}, type, type);
        store_row(cache, 0, 0, 0, 0, stored.data(), stored.data());
        std::vector<float> got = decoded(cache, cache.keys, type, 0, 0, 0, 0);
        CHECK(reference::same_bits(got, decoded(cache, cache.values, type, 0, 0, 0, 0)) == true);
        for (int i = 0; i < 8; i++) CHECK(std::signbit(got[i]) == std::signbit(stored[i]));
        for (int i : {0, 1}) CHECK(got[i] == 0);
        for (int i : {2, 3}) CHECK(std::fabs(got[i]) <= 2e-30f);
        for (int i : {4, 5})
            CHECK((std::isinf(got[i]) || std::fabs(got[i] - stored[i]) <= type.unit_roundoff * std::fabs(stored[i])));
        for (int i : {6, 7}) CHECK(std::isinf(got[i]));
        CHECK(std::isnan(got[8]));
        CHECK(got[9] == 1);
    });
}

TEST_CASE("two sequences of unequal length keep to their own rows") {
    for_each_cache([](auto layout, auto type_k, auto type_v) {
        Cache cache = open_cache({2, 2, 8, 8, 2, 6}, layout, type_k, type_v);
        poison(cache);
        const int lengths[] = {5, 2};
        auto value = [](int layer, int sequence, int position, int head) {
            return (float)(1 + head + 2 * (layer + 2 * (sequence + 2 * position)));
        };
        for (int position = 0; position < 5; position++) {
            for (int sequence = 0; sequence < 2; sequence++) {
                if (position >= lengths[sequence]) continue;
                CHECK(grow(cache, sequence, 1) == position);
                for (int layer = 0; layer < 2; layer++) {
                    for (int head = 0; head < 2; head++) {
                        std::vector<float> key(8, value(layer, sequence, position, head)), negative(8, -key[0]);
                        store_row(cache, layer, sequence, position, head, key.data(), negative.data());
                    }
                }
            }
        }
        int foreign = 0, touched = 0;
        for (int layer = 0; layer < 2; layer++) {
            for (int sequence = 0; sequence < 2; sequence++) {
                for (int head = 0; head < 2; head++) {
                    for (int position = 0; position < 6; position++) {
                        std::vector<float> key = decoded(cache, cache.keys, type_k, layer, sequence, position, head);
                        std::vector<float> val = decoded(cache, cache.values, type_v, layer, sequence, position, head);
                        float expected = value(layer, sequence, position, head);
                        for (int i = 0; i < 8; i++) {
                            if (position < lengths[sequence])
                                foreign += key[i] != expected || val[i] != -expected;
                            else
                                touched += !std::isnan(key[i]) || !std::isnan(val[i]);
                        }
                    }
                }
            }
        }
        CHECK(foreign == 0);
        CHECK(touched == 0);
    });
}

TEST_CASE("a new cache is empty, and zero where nothing was stored") {
    for_each_cache([](auto layout, auto type_k, auto type_v) {
        Cache cache = open_cache({1, 1, 4, 4, 2, 3}, layout, type_k, type_v);
        CHECK(cache.lengths == std::vector<int>{0, 0});
        CHECK(decoded(cache, cache.keys, type_k, 0, 1, 2, 0) == std::vector<float>(4));
    });
}

// ---- Growing and shrinking ---------------------------------------------------------------------------------

TEST_CASE("growing beyond the capacity fails in one line and changes nothing") {
    for_each_type<Layout>([](auto layout) {
        CAPTURE(layout.name);
        Cache cache = open_cache({1, 1, 4, 4, 2, 10}, layout, F16{}, F16{});
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
    });
}

TEST_CASE("a sequence that shrank grows again from there, over its old rows") {
    for_each_cache([](auto layout, auto type_k, auto type_v) {
        Cache cache = open_cache({1, 1, 4, 4, 2, 8}, layout, type_k, type_v);
        auto append = [&](float number) {
            std::vector<float> row(4, number);
            int position = grow(cache, 0, 1);
            store_row(cache, 0, 0, position, 0, row.data(), row.data());
            return position;
        };
        for (int t = 0; t < 8; t++) append((float)t);
        grow(cache, 1, 5);
        shrink(cache, 0, 3);
        CHECK(cache.lengths == std::vector<int>{3, 5});
        shrink(cache, 0, 6);
        CHECK(cache.lengths[0] == 3);
        CHECK(append(16) == 3);
        CHECK(decoded(cache, cache.keys, type_k, 0, 0, 2, 0)[0] == 2);
        CHECK(decoded(cache, cache.keys, type_k, 0, 0, 3, 0)[0] == 16);
        CHECK(decoded(cache, cache.values, type_v, 0, 0, 3, 0)[3] == 16);
        shrink(cache, 0, 0);
        CHECK(grow(cache, 0, 8) == 0);
    });
}

// ---- Names and what cannot be had --------------------------------------------------------------------------

TEST_CASE("each layout and precision is found by its name") {
    for_each_type<Precision>([](auto type) {
        CHECK(std::string(name_of(parse_precision("--kv", type.name))) == type.name);
        CHECK(contains(precision_names(), type.name));
    });
    for_each_type<Layout>([](auto layout) {
        CHECK(std::string(name_of(parse_layout("--cache", layout.name))) == layout.name);
        CHECK(contains(layout_names(), layout.name));
    });
    CHECK(contains(precision_names(), "f32 (32 bits a value) f16 (16) bf16 (16)"));
}

TEST_CASE("an unknown name is answered with the known ones") {
    for (std::string name : {"f17", "", "F16", "f16 ", "bf"}) {
        std::string line = error_of([&] { parse_precision("-ctk", name); });
        CHECK(contains(line, "-ctk " + name + ": unknown type; known are " + precision_names()));
        CHECK(!contains(line, "\n"));
    }
    std::string line = error_of([] { parse_layout("--cache", "heap"); });
    CHECK(contains(line, "--cache heap: unknown layout"));
    for_each_type<Layout>([&](auto layout) { CHECK(contains(line, layout.name)); });
}

TEST_CASE("memory that cannot be had is one line") {
    for_each_type<Layout>([](auto layout) {
        for (CacheShape shape : {CacheShape{80, 64, 128, 128, 1, INT_MAX}, CacheShape{80, 64, 128, 128, 4096, INT_MAX},
                                 CacheShape{INT_MAX, INT_MAX, 128, 128, 1, INT_MAX}}) {
            std::string line = error_of([&] { open_cache(shape, layout, F32{}, F32{}); });
            CHECK(contains(line, "the KV cache"));
            CHECK(contains(line, "lower -c"));
            CHECK(!contains(line, "\n"));
        }
        // K and V each fit into this machine, but not both.
        double machine = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGE_SIZE);
        int capacity = (int)(0.6 * machine / (1024 * sizeof(float) * 64));
        CHECK(contains(error_of([&] {
                           open_cache({1, 64, 1024, 1024, 1, capacity}, layout, F32{}, F32{});
                       }),
                       "lower -c"));
    });
}
