// The story stands alone: ./llm-plain, built without fast/, writes the same 200 ids as ./llm on the built-in
// checkpoint, with every cache and with none. LLM and LLM_PLAIN name the programs.
//
// Their sums have other orders, so their logits differ by 1e-5 or so; where that flips a code of 2 bits, by more. Two
// tokens that plain finds as likely as that may then change places: the test says where, and by how little.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "../base/json.h"
#include "../cache.h"
#include "program.h"

using program::Words;
using program::operator+;

static const std::string fast = program::program_path();
static const std::string plain = getenv("LLM_PLAIN") ? getenv("LLM_PLAIN") : "./llm-plain";

constexpr int count = 200;

struct Case {
    Words words;
    double unit = 0;  // unit roundoff of the coarser side
    std::vector<int> plain_ids = {}, fast_ids = {};
};

static std::vector<int> ids_of(const std::string &name, const Words &cache) {
    program::Setting setting;
    setting.program = name;
    setting.patience = std::chrono::seconds(300);
    Words words = {"generate", "--json", "-p", "Once upon a time", "-n", "200", "--ignore-eos", "-t", "1"};
    program::Outcome outcome = program::run(words + cache, setting);
    REQUIRE_MESSAGE(outcome.status == 0, outcome);
    Json json = parse_json(name, outcome.out);
    std::vector<int> ids;
    const cJSON *id;
    cJSON_ArrayForEach(id, cJSON_GetObjectItem(json.get(), "tokens")) ids.push_back(id->valueint);
    return ids;
}

// By how much plain prefers its token to the other program's, in standard deviations of its logits.
static double tie(const Case &one, int step) {
    const std::string file = "build/plain_logits.npy";
    std::vector<int> ids = ids_of(plain, one.words + Words{"--dump-logits", file});
    REQUIRE(ids == one.plain_ids);
    std::string bytes = read_file(file, 1 << 28);
    size_t start = 10 + ((unsigned char)bytes[8] | (unsigned char)bytes[9] << 8);
    const float *logits = (const float *)(bytes.data() + start);
    size_t vocabulary = 1280, rows = (bytes.size() - start) / sizeof(float) / vocabulary;
    const float *row = logits + (rows - count - 1 + step) * vocabulary;  // the last one follows the last id
    double mean = std::accumulate(row, row + vocabulary, 0.0) / (double)vocabulary, squares = 0;
    for (size_t i = 0; i < vocabulary; i++) squares += (row[i] - mean) * (row[i] - mean) / (double)vocabulary;
    REQUIRE(*std::max_element(row, row + vocabulary) == row[one.plain_ids[step]]);
    return (row[one.plain_ids[step]] - row[one.fast_ids[step]]) / std::sqrt(squares);
}

TEST_CASE("./llm-plain writes what ./llm writes, with every cache and with none") {
    std::vector<Case> cases = {{{"--cache", "none"}}};  // takes longest
    for_each_type<Layout>([&](auto layout) {
        for_each_type<Precision>([&](auto k) {
            for_each_type<Precision>([&](auto v) {
                Words words = {"--cache", layout.name, "-ctk", k.name, "-ctv", v.name};
                if (std::is_same_v<decltype(layout), Ring>) words = words + Words{"--window", "64", "--sinks", "4"};
                cases.push_back({words, std::max(k.unit_roundoff, v.unit_roundoff)});
            });
        });
    });
    std::atomic<size_t> next{0};
    auto work = [&] {
        for (size_t i; (i = next++) < cases.size();)
            cases[i].plain_ids = ids_of(plain, cases[i].words), cases[i].fast_ids = ids_of(fast, cases[i].words);
    };
    std::thread other(work);
    work();
    other.join();
    int ties = 0;
    for (const Case &one : cases) {
        std::string cache = std::accumulate(one.words.begin(), one.words.end(), std::string(),
                                            [](auto &a, auto &b) { return a + b + " "; });
        CAPTURE(cache);
        REQUIRE((one.plain_ids.size() == count && one.fast_ids.size() == count));
        auto differ = std::mismatch(one.plain_ids.begin(), one.plain_ids.end(), one.fast_ids.begin());
        if (differ.first == one.plain_ids.end()) continue;
        REQUIRE(++ties <= 4);
        int step = (int)(differ.first - one.plain_ids.begin());
        double by = tie(one, step);
        CHECK(by <= std::max(1e-5, 0.1 * one.unit));
        MESSAGE(cache << "the programs part at step " << step << " by a tie of " << by << " standard deviations");
    }
}
