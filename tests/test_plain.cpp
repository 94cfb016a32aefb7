// The story stands alone: ./llm-plain, built without fast/, writes the same 200 ids as ./llm on the built-in
// checkpoint, with every cache and with none. LLM and LLM_PLAIN name the programs.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include "../base/json.h"
#include "../cache.h"
#include "program.h"

using program::Words;

// What a program writes, or what it says instead.
static std::string ids_of(const std::string &name, const Words &cache) {
    Words words = {"generate", "--json", "-p", "Once upon a time", "-n", "200", "--ignore-eos", "-t", "1"};
    program::Setting setting;
    setting.program = name;
    setting.patience = std::chrono::seconds(300);
    program::Outcome outcome = program::run(program::operator+(words, cache), setting);
    size_t begin = outcome.out.find("\"tokens\": [");
    if (outcome.status != 0 || begin == std::string::npos) return outcome.command + outcome.err;
    return outcome.out.substr(begin, outcome.out.find(']', begin) - begin);
}

TEST_CASE("./llm-plain writes what ./llm writes, with every cache and with none") {
    const std::string fast = program::program_path();
    const std::string plain = getenv("LLM_PLAIN") ? getenv("LLM_PLAIN") : "./llm-plain";
    std::vector<Words> caches = {{"--cache", "none"}};  // takes longest
    for_each_type<Layout>([&](auto layout) {
        for_each_type<Precision>([&](auto type_k) {
            for_each_type<Precision>([&](auto type_v) {
                caches.push_back({"--cache", layout.name, "-ctk", type_k.name, "-ctv", type_v.name});
                if (std::is_same_v<decltype(layout), Ring>)  // that drops positions, too
                    caches.back().insert(caches.back().end(), {"--window", "64", "--sinks", "4"});
            });
        });
    });
    std::vector<std::string> written(caches.size()), expected(caches.size());
    std::atomic<size_t> next{0};
    auto work = [&] {
        for (size_t i; (i = next++) < caches.size();)
            written[i] = ids_of(plain, caches[i]), expected[i] = ids_of(fast, caches[i]);
    };
    std::thread other(work);
    work();
    other.join();
    for (size_t i = 0; i < caches.size(); i++) {
        std::string cache;
        for (const std::string &word : caches[i]) cache += word + " ";
        CAPTURE(cache);
        CHECK(std::count(expected[i].begin(), expected[i].end(), ',') == 199);
        CHECK(written[i] == expected[i]);
    }
}
