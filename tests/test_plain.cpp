// The story stands alone: ./llm-plain, built without fast/, writes the same 200 ids as ./llm on the built-in
// checkpoint, with every cache and with none. LLM and LLM_PLAIN name the programs.
//
// Their sums have other orders, so their logits differ by 1e-5 or so; where that flips a code of 2 bits, by more. Two
// tokens that are as near as that may change places. The prompt is one where none are: with sums of 4, 8 and 16 lanes
// its ids are the same.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <atomic>
#include <numeric>
#include <thread>

#include "../cache.h"
#include "program.h"

using program::Words;
using program::operator+;

static const std::string fast = program::program_path();
static const std::string plain = getenv("LLM_PLAIN") ? getenv("LLM_PLAIN") : "./llm-plain";

struct Case {
    Words words;
    std::vector<int> plain_ids = {}, fast_ids = {};
};

static std::vector<int> ids_of(const std::string &name, const Words &cache) {
    program::Setting setting;
    setting.program = name;
    Words words = {"generate", "--json", "-p", "One day, a little", "-n", "200", "--ignore-eos", "-t", "1"};
    program::Outcome outcome = program::run(words + cache, setting);
    REQUIRE_MESSAGE(outcome.status == 0, outcome);
    return program::ids(parse_json(name, outcome.out), "tokens");
}

TEST_CASE("./llm-plain writes what ./llm writes, with every cache and with none") {
    std::vector<Case> cases = {{{"--cache", "none"}}};  // takes longest
    for_each_type<Layout>([&](auto layout) {
        for_each_type<Precision>([&](auto k) {
            for_each_type<Precision>([&](auto v) {
                Words words = {"--cache", layout.name, "-ctk", k.name, "-ctv", v.name};
                if (std::is_same_v<decltype(layout), Ring>) words = words + Words{"--window", "64", "--sinks", "4"};
                cases.push_back({words});
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
    for (const Case &one : cases) {
        std::string cache = std::accumulate(one.words.begin(), one.words.end(), std::string(),
                                            [](auto &a, auto &b) { return a + b + " "; });
        CAPTURE(cache);
        CHECK(one.plain_ids.size() == 200);
        CHECK(one.fast_ids == one.plain_ids);
    }
}
