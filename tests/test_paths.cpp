// The two paths: the naive one against Transformers, the cached one against the naive one.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#define LLM_WITHOUT_MAIN
#include <doctest/doctest.h>

#include <fstream>

#include "../llm.cu"

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

static Cache open_for(const Engine &engine, const Precision &type, int capacity, int sequences = 1) {
    const Config &config = engine.model.config;
    return open_cache({config.layers, config.kv_heads, config.head_dim, config.head_dim, sequences, capacity},
                      Contiguous{}, type, type);
}

// Naive logits of every position: one pass that is asked for all rows.
static std::vector<float> naive_rows(Engine &engine, const std::vector<int> &tokens) {
    forward_naive(engine, tokens);
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

TEST_CASE("one sequence gets the same bits alone, in a batch, in any chunks and with any number of threads") {
    for (std::string name : {"llama_gqa_9_on_3", "mistral_window", "qwen3", "llama_bf16"}) {
        CAPTURE(name);
        std::string directory = fixtures + "/" + name;
        Json expected = read_expected(directory + "/expected.json");
        std::vector<int> prompt = ids_of(expected.get(), "prompt_ids");
        std::vector<int> other(prompt.rbegin(), prompt.rend() - 7);

        Engine alone = open_engine(directory, 1);
        Cache cache = open_for(alone, BF16{}, 64);
        prefill(alone, cache, 0, {prompt.begin(), prompt.end() - 1});
        std::vector<float> first = decode(alone, cache, {0}, {prompt.back()});
        std::vector<float> second = decode(alone, cache, {0}, {prompt[3]});

        for (int threads : {1, 2, 3}) {
            Engine engine = open_engine(directory, threads);
            int vocabulary = engine.model.config.vocabulary;
            Cache batch = open_for(engine, BF16{}, 64, 3);
            prefill(engine, batch, 0, other);
            for (size_t t = 0; t + 1 < prompt.size(); t += 4)
                prefill(engine, batch, 2, {prompt.begin() + t, prompt.begin() + std::min(t + 4, prompt.size() - 1)});
            std::vector<float> rows = decode(engine, batch, {0, 2}, {prompt[1], prompt.back()});
            CHECK(std::equal(first.begin(), first.end(), rows.begin() + vocabulary));
            rows = decode(engine, batch, {2, 0}, {prompt[3], prompt[2]});
            CHECK(std::equal(second.begin(), second.end(), rows.begin()));
        }
    }
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

// Decodes greedily to the end of the context: with an f32 cache as the naive path does, and with each other precision.
static void check_whole_context(Engine &engine, const std::vector<int> &prompt) {
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
    for_each_type<Precision>([&](auto type) {
        CAPTURE(std::string(type.name));
        Cache cache = open_for(engine, type, config.context);
        CHECK(greedy_cached(engine, cache, prompt, count) == ids);
    });
}

TEST_CASE("the built-in checkpoint, over its whole context: every precision decodes the naive path's greedy tokens") {
    Engine engine = open_engine(builtin, 1);
    TokenizerPointer tokenizer = load_tokenizer(builtin);
    check_whole_context(engine, encode(tokenizer.get(), "Once upon a time"));
    std::ifstream stories(builtin + "/heldout.jsonl");
    std::string line;
    for (size_t length : {40, 640}) {  // beginnings of stories that it has not seen
        REQUIRE(std::getline(stories, line));
        Json story = parse_json("heldout.jsonl", line);
        std::vector<int> ids = encode(tokenizer.get(), cJSON_GetObjectItem(story.get(), "text")->valuestring);
        REQUIRE(ids.size() > length);
        check_whole_context(engine, {ids.begin(), ids.begin() + (int)length});
    }
}
