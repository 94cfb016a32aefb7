// The two paths: the naive one against Transformers, the cached one against the naive one.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#define LLM_WITHOUT_MAIN
#include <doctest/doctest.h>

#include <fstream>

#include "../llm.cu"
#include "reference.h"

using reference::same_bits;

namespace fs = std::filesystem;

static const std::string fixtures = "tests/fixtures/models";
static const std::string stories = "../shared/checkpoints/stories260K";
static const std::string builtin = "weights_tools/builtin";

static std::vector<std::string> fixture_names() {
    std::vector<std::string> names;
    for (auto &entry : fs::directory_iterator(fixtures)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
}

// (rows, width) float32 from a .npy file.
static std::vector<float> read_npy(const std::string &path) {
    std::string bytes = read_file(path, 1 << 26);
    REQUIRE(bytes.compare(0, 8, std::string("\x93NUMPY\x01\x00", 8)) == 0);
    size_t start = 10 + ((unsigned char)bytes[8] | (unsigned char)bytes[9] << 8);
    std::vector<float> values((bytes.size() - start) / sizeof(float));
    memcpy(values.data(), bytes.data() + start, values.size() * sizeof(float));
    return values;
}

static std::vector<int> ids_of(const cJSON *object, const char *key) {
    std::vector<int> ids;
    const cJSON *item;
    cJSON_ArrayForEach(item, cJSON_GetObjectItem(object, key)) ids.push_back(item->valueint);
    REQUIRE(!ids.empty());
    return ids;
}

static Json read_expected(const std::string &path) { return parse_json(path, read_file(path, 1 << 26)); }

static Engine open_engine(const std::string &directory, int threads = 2) {
    return Engine(load_model(directory), threads);
}

static Cache open_for(const Engine &engine, const Precision &type_k, const Precision &type_v, int capacity,
                      int sequences = 1, const Layout &layout = Contiguous{}, CacheShape shape = {}) {
    const Config &config = engine.model.config;
    shape.layers = config.layers, shape.kv_heads = config.kv_heads;
    shape.key_width = shape.value_width = config.head_dim;
    shape.sequences = sequences, shape.capacity = capacity;
    return open_cache(shape, layout, type_k, type_v);
}

static Cache open_for(const Engine &engine, const Precision &type, int capacity, int sequences = 1) {
    return open_for(engine, type, type, capacity, sequences);
}

static CacheShape ring_shape(int window, int sinks) {
    CacheShape shape;
    shape.window = window, shape.sinks = sinks;
    return shape;
}

static CacheShape page_shape(int page) {
    CacheShape shape;
    shape.page = page;
    return shape;
}

static Layout opened_ring(const CacheShape &shape) { return open_layout(shape, Ring{}); }

static std::vector<int> random_tokens(const Engine &engine, int count, uint64_t seed = 1) {
    reference::Random random{seed};
    std::vector<int> tokens;
    for (int i = 0; i < count; i++) tokens.push_back((int)(random.bits() % (uint64_t)engine.model.config.vocabulary));
    return tokens;
}

static std::vector<int> part(const std::vector<int> &tokens, int begin, int end) {
    return {tokens.begin() + begin, tokens.begin() + end};
}

// Logits of each position of a sequence: [0, decoded) by prefill() in pieces of `piece`, then by decode().
static std::vector<float> cached_rows(Engine &engine, Cache &cache, int sequence, const std::vector<int> &tokens,
                                      int piece, int decoded) {
    std::vector<float> all;
    auto add = [&](const std::vector<float> &rows) { all.insert(all.end(), rows.begin(), rows.end()); };
    for (int begin = 0; begin < decoded; begin += piece) {
        std::vector<int> prompt = part(tokens, begin, std::min(begin + piece, decoded));
        prefill(engine, cache, sequence, prompt, [&](int rows) { add(logits(engine, 0, rows)); });
    }
    for (int t = decoded; t < (int)tokens.size(); t++) add(decode(engine, cache, {sequence}, {tokens[t]}));
    return all;
}

// Naive logits of every position: one pass that is asked for all rows.
static std::vector<float> naive_rows(Engine &engine, const std::vector<int> &tokens,
                                     const Layout &layout = Contiguous{}) {
    forward_naive(engine, tokens, layout);
    return logits(engine, 0, (int)tokens.size());
}

static double relative_error(const std::vector<float> &values, const std::vector<float> &reference) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < reference.size(); i++) {
        difference += ((double)values[i] - reference[i]) * ((double)values[i] - reference[i]);
        size += (double)reference[i] * reference[i];
    }
    return std::sqrt(difference / size);
}

static std::vector<int> greedy_naive(Engine &engine, std::vector<int> tokens, int count) {
    std::vector<int> ids;
    for (int i = 0; i < count; i++) {
        std::vector<float> row = forward_naive(engine, tokens);
        ids.push_back(argmax(row.data(), (int)row.size()));
        tokens.push_back(ids.back());
    }
    return ids;
}

static std::vector<int> greedy_cached(Engine &engine, Cache &cache, const std::vector<int> &prompt, int count) {
    std::vector<int> ids;
    std::vector<float> row = prefill(engine, cache, 0, prompt);
    for (int i = 0; i < count; i++) {
        if (i) row = decode(engine, cache, {0}, {ids.back()});
        ids.push_back(argmax(row.data(), (int)row.size()));
    }
    return ids;
}

TEST_CASE("naive is Transformers in float32, for every family: logits and greedy ids") {
    for (const std::string &name : fixture_names()) {
        CAPTURE(name);
        std::string directory = fixtures + "/" + name;
        Json expected = read_expected(directory + "/expected.json");
        std::vector<int> prompt = ids_of(expected.get(), "prompt_ids"), greedy = ids_of(expected.get(), "greedy_ids");
        std::vector<float> reference = read_npy(directory + "/expected_logits.npy");
        Engine engine = open_engine(directory);

        std::vector<int> tokens = prompt;
        tokens.insert(tokens.end(), greedy.begin(), greedy.end());
        tokens.resize(reference.size() / engine.model.config.vocabulary);
        CHECK(relative_error(naive_rows(engine, tokens), reference) <= 1e-5);
        CHECK(greedy_naive(engine, prompt, (int)greedy.size()) == greedy);
    }
}

TEST_CASE("cached is naive, for every family: f32 within 1e-4, prompt in one pass, in chunks, token by token") {
    for (const std::string &name : fixture_names()) {
        CAPTURE(name);
        std::string directory = fixtures + "/" + name;
        Json expected = read_expected(directory + "/expected.json");
        std::vector<int> prompt = ids_of(expected.get(), "prompt_ids"), greedy = ids_of(expected.get(), "greedy_ids");
        Engine engine = open_engine(directory);
        int vocabulary = engine.model.config.vocabulary;
        std::vector<float> naive = naive_rows(engine, prompt);

        Cache cache = open_for(engine, F32{}, (int)(prompt.size() + greedy.size()));
        CHECK(greedy_cached(engine, cache, prompt, (int)greedy.size()) == greedy);

        for (int chunk : {1, 5, 16}) {
            CAPTURE(chunk);
            shrink(cache, 0, 0);
            for (int begin = 0; begin < (int)prompt.size(); begin += chunk) {
                int end = std::min(begin + chunk, (int)prompt.size());
                std::vector<float> row = prefill(engine, cache, 0, {prompt.begin() + begin, prompt.begin() + end});
                std::vector<float> same(naive.begin() + (size_t)(end - 1) * vocabulary,
                                        naive.begin() + (size_t)end * vocabulary);
                CHECK(largest_difference(row, same) <= 1e-4);
            }
        }
    }
}

// Calls use(layout, shape) for one cache of each layout; the ring drops positions after 20.
template <class Use>
static void for_each_place(Use use) {
    use(Layout(Contiguous{}), CacheShape{});
    use(Layout(Paged{}), page_shape(7));
    use(Layout(Ring{}), ring_shape(20, 2));
}

TEST_CASE("one sequence gets the same bits alone, in a batch, in any chunks and with any number of threads") {
    int turn = 0;
    for (std::string name : {"llama_gqa_9_on_3", "mistral_window", "qwen3", "llama_bf16"}) {
        for_each_type<Precision>([&](auto type) {
            for_each_place([&](const Layout &layout, const CacheShape &shape) {
                CAPTURE(name);
                CAPTURE(std::string(type.name));
                CAPTURE(std::string(name_of(layout)));
                Engine alone = open_engine(fixtures + "/" + name, 1);
                std::vector<int> prompt = random_tokens(alone, 45), other = random_tokens(alone, 37, 2);
                Cache cache = open_for(alone, type, type, 64, 1, layout, shape);
                prefill(alone, cache, 0, part(prompt, 0, 44));
                std::vector<float> first = decode(alone, cache, {0}, {prompt[44]});
                std::vector<float> second = decode(alone, cache, {0}, {prompt[3]});
                size_t vocabulary = first.size();

                int threads = turn++ % 4 == 1 ? 2 : turn % 4 == 0 ? 3 : 1;
                Engine engine = open_engine(fixtures + "/" + name, threads);
                Cache batch = open_for(engine, type, type, 64, 3, layout, shape);
                prefill(engine, batch, 0, part(other, 0, 10 + 9 * threads));
                for (int t = 0; t < 44; t += 4 + threads) {
                    prefill(engine, batch, 2, part(prompt, t, std::min(t + 4 + threads, 44)));
                    prefill(engine, batch, 1, {other[t % 37]});
                }
                std::vector<float> rows = decode(engine, batch, {0, 2}, {prompt[1], prompt[44]});
                CHECK(std::equal(first.begin(), first.end(), rows.begin() + vocabulary));
                rows = decode(engine, batch, {2, 0, 1}, {prompt[3], prompt[2], prompt[1]});
                CHECK(std::equal(second.begin(), second.end(), rows.begin()));
            });
        });
    }
}

TEST_CASE("layouts give the same logits bit for bit at equal precision, for every family and every K and V") {
    const int count = 90, decoded = 70;
    auto check = [&](Engine &engine, const Precision &type_k, const Precision &type_v) {
        CAPTURE(std::string(name_of(type_k)));
        CAPTURE(std::string(name_of(type_v)));
        std::vector<int> tokens = random_tokens(engine, count);
        auto rows = [&](const Layout &layout, const CacheShape &shape, int piece) {
            Cache cache = open_for(engine, type_k, type_v, count, 2, layout, shape);
            prefill(engine, cache, 0, part(tokens, 5, 30));  // so that the pages of the other do not stand in order
            return cached_rows(engine, cache, 1, tokens, piece, decoded);
        };
        std::vector<float> contiguous = rows(Contiguous{}, {}, count);
        for (int page : {1, 7, 16, 64, 1000}) {
            CAPTURE(page);
            CHECK(same_bits(contiguous, rows(Paged{}, page_shape(page), 11)));
        }
        CHECK(same_bits(contiguous, rows(Ring{}, ring_shape(count - 4, 4), 32)));
        CHECK(same_bits(contiguous, rows(Ring{}, ring_shape(1000, 0), 32)));
    };
    for (const std::string &name : fixture_names()) {
        CAPTURE(name);
        Engine engine = open_engine(fixtures + "/" + name, 1);
        check(engine, Int4{}, F16{});
        if (name != "llama_gqa_9_on_3" && name != "qwen3_layer_types") continue;
        for_each_type<Precision>([&](auto k) { for_each_type<Precision>([&](auto v) { check(engine, k, v); }); });
    }
}

TEST_CASE("a cached ring is the naive path over the same positions, far behind the window and the model's context") {
    const int count = 300, decoded = 200;  // the fixtures' context is 128
    for (std::string name : {"llama_gqa_9_on_3", "qwen3", "qwen3_layer_types", "llama_bf16", "llama_rope_llama3"}) {
        Engine engine = open_engine(fixtures + "/" + name, 1);
        std::vector<int> tokens = random_tokens(engine, count);
        for (int window : {1, 31, 64, 100}) {
            for (int sinks : {0, 1, 4}) {
                CAPTURE(name);
                CAPTURE(window);
                CAPTURE(sinks);
                CacheShape shape = ring_shape(window, sinks);
                Cache cache = open_for(engine, F32{}, F32{}, 1, 1, Ring{}, shape);
                std::vector<float> cached = cached_rows(engine, cache, 0, tokens, 90, decoded);
                std::vector<float> naive = naive_rows(engine, tokens, opened_ring(shape));
                CHECK(largest_difference(cached, naive) <= 1e-4);
            }
        }
    }
}

// A layer's keys and values depend on earlier layers, and so on more than the window; with one layer they do not. There
// the logits behind sinks and a window are those of a text of these tokens alone, whatever stood between.
TEST_CASE("with one layer, a ring thousands of positions on is a new text of the sinks and the window") {
    for (std::string name : {"head_dim_64", "head_dim_80"}) {
        Engine engine = open_engine(fixtures + "/" + name, 1);
        REQUIRE(engine.model.config.layers == 1);
        for (int sinks : {0, 1, 4}) {
            for (int window : {1, 31, 64, 100}) {
                CAPTURE(sinks);
                CAPTURE(window);
                Cache cache = open_for(engine, F32{}, F32{}, 1, 1, Ring{}, ring_shape(window, sinks));
                std::vector<int> tokens = random_tokens(engine, 2000);
                std::vector<float> row = prefill(engine, cache, 0, tokens);
                for (int step = 0; step < 20; step++) {
                    tokens.push_back((int)(step * 7 % 64));
                    row = decode(engine, cache, {0}, {tokens.back()});
                }
                std::vector<int> text = part(tokens, 0, sinks);
                text.insert(text.end(), tokens.end() - window, tokens.end());
                CHECK(largest_difference(row, forward_naive(engine, text)) <= 1e-4);
            }
        }
    }
}

TEST_CASE("generation goes on for thousands of steps behind the context, and stays what the naive path computes") {
    Engine engine = open_engine(fixtures + "/llama_gqa_9_on_3", 1);
    int vocabulary = engine.model.config.vocabulary;
    CacheShape shape = ring_shape(64, 4);
    for_each_type<Precision>([&](auto type) {
        CAPTURE(std::string(type.name));
        Cache cache = open_for(engine, type, type, 1, 1, Ring{}, shape);
        std::vector<int> tokens = random_tokens(engine, 10);
        std::vector<float> row = prefill(engine, cache, 0, tokens), rows;
        for (int step = 0; step < 3000; step++) {
            require_finite(row, (int)tokens.size() - 1);
            rows.insert(rows.end(), row.begin(), row.end());
            tokens.push_back(argmax(row.data(), vocabulary));
            row = decode(engine, cache, {0}, {tokens.back()});
        }
        CHECK(cache.lengths[0] == 3010);
        if (!std::is_same_v<decltype(type), F32>) return;
        tokens.pop_back();
        std::vector<float> naive = naive_rows(engine, tokens, opened_ring(shape));
        naive.erase(naive.begin(), naive.begin() + 9 * vocabulary);
        CHECK(largest_difference(rows, naive) <= 1e-4);
    });
}

TEST_CASE("a model's sliding window in a ring of that size is the contiguous cache bit for bit") {
    Engine engine = open_engine(fixtures + "/mistral_window", 1);
    std::vector<int> tokens = random_tokens(engine, 200);
    for_each_type<Precision>([&](auto k) {
        for_each_type<Precision>([&](auto v) {
            CAPTURE(std::string(k.name));
            CAPTURE(std::string(v.name));
            Cache contiguous = open_for(engine, k, v, 200);
            Cache ring = open_for(engine, k, v, 1, 1, Ring{}, ring_shape(engine.model.config.window, 0));
            CHECK(same_bits(cached_rows(engine, contiguous, 0, tokens, 150, 150),
                            cached_rows(engine, ring, 0, tokens, 150, 150)));
        });
    });
}

TEST_CASE("prefill() hands a ring no more positions at once than it has rows to spare") {
    Engine engine = open_engine(fixtures + "/llama_gqa_9_on_3", 1);
    std::vector<int> tokens = random_tokens(engine, 1100);
    auto chunks = [&](const Layout &layout, const CacheShape &shape) {
        Cache cache = open_for(engine, F16{}, F16{}, 1100, 1, layout, shape);
        std::vector<int> sizes;
        prefill(engine, cache, 0, tokens, [&](int rows) { sizes.push_back(rows); });
        return sizes;
    };
    CHECK(chunks(Contiguous{}, {}) == std::vector<int>{512, 512, 76});
    CHECK(chunks(Paged{}, {}) == std::vector<int>{512, 512, 76});
    CHECK(chunks(Ring{}, ring_shape(100000, 0)) == std::vector<int>{512, 512, 76});
    for (int window : {1, 100, 300, 1024}) {
        CAPTURE(window);
        int sum = 0, slots = std::get<Ring>(opened_ring(ring_shape(window, 4))).slots;
        for (int size : chunks(Ring{}, ring_shape(window, 4))) {
            CHECK(size <= slots - window - 4 + 1);
            sum += size;
        }
        CHECK(sum == 1100);
    }
}

TEST_CASE("a sequence that was cut goes on as in a fresh cache, bit for bit where there are no blocks") {
    Engine engine = open_engine(fixtures + "/llama_gqa_9_on_3", 1);
    std::vector<int> tokens = random_tokens(engine, 100), others = random_tokens(engine, 100, 3);
    for_each_type<Precision>([&](auto type) {
        for_each_place([&](const Layout &layout, const CacheShape &shape) {
            CAPTURE(std::string(type.name));
            CAPTURE(std::string(name_of(layout)));
            // Blocks: within the newest one. A ring: as far as it has rows to spare.
            int length = 66, longer = has_blocks(type) ? 95 : std::holds_alternative<Ring>(layout) ? 90 : 100;
            Cache fresh = open_for(engine, type, type, 100, 2, layout, shape);
            Cache cut = open_for(engine, type, type, 100, 2, layout, shape);
            std::vector<int> begun = part(tokens, 0, length);
            prefill(engine, fresh, 0, begun);
            begun.insert(begun.end(), others.begin(), others.begin() + longer - length);
            prefill(engine, cut, 0, begun);
            prefill(engine, cut, 1, others);
            shrink(cut, 0, length);
            std::vector<int> rest = part(tokens, length, 100);
            CHECK(same_bits(cached_rows(engine, fresh, 0, rest, 9, 20), cached_rows(engine, cut, 0, rest, 9, 20)));
        });
    });
}

TEST_CASE("stories260K: 200 greedy ids and 8 rows of logits as llama2.c has them, by both paths" *
          doctest::skip(!fs::exists(stories))) {
    Json expected = read_expected(stories + "/expected.json");
    const cJSON *greedy = cJSON_GetObjectItem(expected.get(), "greedy"),
                *rows = cJSON_GetObjectItem(expected.get(), "logits");
    std::vector<int> prompt = ids_of(greedy, "prompt_ids"), ids = ids_of(greedy, "ids");
    REQUIRE(ids.size() == 200);
    Engine engine = open_engine(stories);
    CHECK(greedy_naive(engine, prompt, 200) == ids);
    Cache cache = open_for(engine, F32{}, 256);
    CHECK(greedy_cached(engine, cache, prompt, 200) == ids);

    std::vector<float> naive = naive_rows(engine, ids_of(rows, "ids"));
    double most = 0;
    size_t i = 0;
    const cJSON *row, *logit;
    cJSON_ArrayForEach(row, cJSON_GetObjectItem(rows, "logits")) {
        cJSON_ArrayForEach(logit, row) most = std::max(most, std::fabs(naive.at(i++) - logit->valuedouble));
    }
    CHECK(i == naive.size());
    CHECK(most <= 1e-4);
}

// How far the logits of one cache may be from the naive ones, ||difference|| / ||naive||: a tenth more than the most
// that was measured over the contexts below.
static double measured_error(const std::string &name) {
    const std::map<std::string, double> measured = {{"f16", 3.01e-4}, {"bf16", 2.70e-3}, {"int8", 3.96e-3},
                                                    {"fp8", 2.46e-2}, {"int4", 4.86e-2}, {"int2", 0.515}};
    return 1.1 * measured.at(name);
}

// Decodes greedily to the end of the context: with an f32 cache as the naive path does, and with each of `types`. All
// but the smallest (fp8: 1 step of 3,155 differs; int4: 4; int2: 1,565) decode the same tokens.
static void check_whole_context(Engine &engine, const std::vector<int> &prompt, const std::vector<Precision> &types) {
    const Config &config = engine.model.config;
    int count = config.context - (int)prompt.size();
    Cache exact = open_for(engine, F32{}, config.context);
    std::vector<int> tokens = prompt, ids = greedy_cached(engine, exact, prompt, count);
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    // The naive path's logits at a position depend on nothing behind it, so one pass has those of every step.
    std::vector<float> naive = naive_rows(engine, tokens);
    for (int length : {1, 77, config.context - 1}) {
        std::vector<float> last = forward_naive(engine, {tokens.begin(), tokens.begin() + length});
        REQUIRE(std::equal(last.begin(), last.end(), naive.begin() + (size_t)(length - 1) * config.vocabulary));
    }
    for (int i = 0; i < count; i++) {
        const float *row = &naive[(prompt.size() - 1 + i) * (size_t)config.vocabulary];
        REQUIRE(argmax(row, config.vocabulary) == ids[i]);
    }
    for (const Precision &type : types) {
        std::string name = name_of(type);
        CAPTURE(name);
        Cache cache = open_for(engine, type, config.context);
        std::vector<float> rows = cached_rows(engine, cache, 0, tokens, config.context, (int)prompt.size());
        CHECK(relative_error(rows, naive) <= measured_error(name));
        if (name == "fp8" || name == "int4" || name == "int2") continue;
        for (int i = 0; i < count; i++)
            REQUIRE(argmax(&rows[(prompt.size() - 1 + i) * (size_t)config.vocabulary], config.vocabulary) == ids[i]);
    }
}

TEST_CASE("the built-in checkpoint over its whole context: f16, bf16 and int8 decode the naive path's greedy tokens") {
    Engine engine = open_engine(builtin, 1);
    TokenizerPointer tokenizer = load_tokenizer(builtin);
    const std::vector<Precision> same = {F16{}, BF16{}, Int8{}}, all = {F16{}, BF16{}, Int8{}, FP8{}, Int4{}, Int2{}};
    check_whole_context(engine, encode(tokenizer.get(), "Once upon a time"), same);
    std::ifstream stories(builtin + "/heldout.jsonl");
    std::string line;
    for (size_t length : {40, 640}) {  // beginnings of stories that it has not seen
        REQUIRE(std::getline(stories, line));
        Json story = parse_json("heldout.jsonl", line);
        std::vector<int> ids = encode(tokenizer.get(), cJSON_GetObjectItem(story.get(), "text")->valuestring);
        REQUIRE(ids.size() > length);
        check_whole_context(engine, {ids.begin(), ids.begin() + (int)length}, length > 100 ? all : same);
    }
}
