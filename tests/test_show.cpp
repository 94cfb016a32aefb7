// llm show: its numbers are checked as a reader would by hand: the equation, the formula of a place, the bytes of a
// row. Run from the repository's root. The environment variable LLM says which program; without it, ./llm.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <cmath>

#include "../base/formats.h"
#include "program.h"

using namespace program;

const int layers = 4, kv_heads = 2, group = 4, width = 32;  // of the built-in checkpoint

Words prompt(int count) {
    std::string ids = "1";
    for (int i = 1; i < count; i++) ids += "," + std::to_string(100 + i * 7 % 400);
    return {"show", "--ids", ids};
}

// What it prints with --json: objects, lists and numbers by their keys.
struct Found {
    std::shared_ptr<Json> root;
    const Json *item;
    Found operator[](const char *key) const {
        Found found{root, member(item, key)};
        REQUIRE_MESSAGE(found.item, key);
        return found;
    }
    Found operator[](int i) const { return {root, &item->items.at((size_t)i)}; }
    int size() const { return count_of(item); }
    operator double() const {
        REQUIRE((is_number(item) || is_bool(item)));
        return item->number;
    }
    std::string text() const { return item->text; }
};

Found show(const Words &words) {
    Outcome result = run(words + Words{"--json"});
    REQUIRE_MESSAGE(result.status == 0, result);
    auto root = std::make_shared<Json>(parse_json(result.command, result.out));
    return {root, root.get()};
}

// Byte i of a row, as f16 from there on.
unsigned byte_of(const std::string &hex, int i) { return (unsigned)std::stoul(hex.substr(i * 2, 2), nullptr, 16); }
double f16_of(const std::string &hex, int i) {
    f16 number;
    number.bits = (uint16_t)(byte_of(hex, i) | byte_of(hex, i + 1) << 8);
    return to_float(number);
}

const std::vector<Words> caches = {{"--cache", "none"},
                                   {"--kv", "f32"},
                                   {"--cache", "paged", "--page", "5", "--kv", "int8"},
                                   {"-ctk", "int4", "-ctv", "fp8"},
                                   {"--cache", "ring", "--window", "9", "--sinks", "2", "--kv", "int2"}};

TEST_CASE("scores, weights and output are what the equation gives for the numbers beside them") {
    for (const Words &cache : caches)
        for (int layer = 0; layer < layers; layer += 3) {
            int head = layer ? 7 : 0;
            Found all =
                show(prompt(37) + cache + Words{"--layer", std::to_string(layer), "--head", std::to_string(head)});
            CHECK(all["kv_head"] == head / group);
            Found seen = all["seen"];
            CHECK(seen.size() == (cache[1] == "ring" ? 9 + 2 : 37));
            double total = 0, output[width] = {}, sum = 0, largest = 0;
            for (int i = 0; i < seen.size(); i++) total += std::exp(seen[i]["score"]);
            for (int i = 0; i < seen.size(); i++) {
                double dot = 0, weight = seen[i]["weight"];
                for (int c = 0; c < width; c++) {
                    dot += all["query"][c] * seen[i]["key"][c];
                    output[c] += weight * seen[i]["value"][c];
                    largest = std::max(largest, std::fabs(seen[i]["value"][c]));
                }
                CHECK(seen[i]["score"] == doctest::Approx(dot / std::sqrt(width)).epsilon(1e-5));
                CHECK(weight == doctest::Approx(std::exp(seen[i]["score"]) / total).epsilon(1e-9));
                sum += weight;
            }
            CHECK(sum == doctest::Approx(1));
            for (int c = 0; c < width; c++) CHECK(std::fabs(all["output"][c] - output[c]) < 1e-5 * largest);
        }
}

TEST_CASE("a query with numbers that are exactly 0 is explained: layer 0 of the built-in model was set, not trained") {
    auto said = [](const Words &words) { return run(prompt(9) + words).out; };
    int zeros = 0;
    Found query = show(prompt(9))["query"];
    for (int c = 0; c < width; c++) zeros += query[c] == 0.0;
    CHECK(zeros == 24);
    check_contains(said({}), "\n        24 of 32 are exactly 0", "head 0 looks 1 back", "--layer 1");
    check_contains(said({"--head", "3"}), "head 3 looks 4 back");
    Found seen = show(prompt(9) + Words{"--head", "3"})["seen"];
    CHECK(seen[8 - 4]["weight"] > 0.5);  // and so it does
    CHECK(!contains(said({"--layer", "1"}), "exactly 0"));
    std::string other = said({"-m", "weights_tools/builtin"});  // may be another's
    CHECK((contains(other, "24 of 32 are exactly 0") && !contains(other, "built-in")));
}

TEST_CASE("the naive path and an f32 cache show the same numbers; --position is where the text ends") {
    Words head{"--layer", "2", "--head", "1"};
    Found naive = show(prompt(20) + head + caches[0]),
          cached = show(prompt(30) + head + caches[1] + Words{"--position", "19"});
    REQUIRE(naive["seen"].size() == cached["seen"].size());
    for (int i = 0; i < 20; i++)
        CHECK(std::fabs(naive["seen"][i]["weight"] - cached["seen"][i]["weight"]) < 1e-5);
    for (int i = 0; i < cached["errors"].size(); i++) CHECK(cached["errors"][i]["relative_error"] < 1e-6);
}

TEST_CASE("a row is where the formula says, and its bytes read as shown") {
    for (const char *layout : {"contiguous", "paged", "ring"}) {
        Words words = prompt(21) + Words{"--cache", layout, "--kv", "int8", "--layer", "3", "--head", "6"};
        if (layout == std::string("paged")) words = words + Words{"--page", "4"};
        if (layout == std::string("ring")) words = words + Words{"--window", "8", "--sinks", "0"};
        Found all = show(words), place = all["place"];
        double row = place["row"], rows = 21;
        if (layout == std::string("contiguous")) CHECK(row == 20);
        if (layout == std::string("paged")) {
            CHECK(place["page_table"].size() == 6);
            CHECK(place["logical_page"] == 5);
            CHECK(row == place["page_table"][5] * 4 + place["offset"]);
            rows = 24;
        }
        if (layout == std::string("ring")) {
            CHECK(row == 20);
            rows = 64;
        }
        for (const char *side : {"stored_key", "stored_value"}) {
            Found stored = all[side];
            std::string hex = stored["hex"].text();
            CHECK(stored["byte"] == ((3 * rows + row) * kv_heads + 1) * (width + 2));
            REQUIRE(hex.size() == 2 * (width + 2));
            for (int c = 0; c < width; c++) {
                double scale = f16_of(hex, 0), code = (int8_t)byte_of(hex, 2 + c);
                CHECK(stored["reads_as"][c] == doctest::Approx(scale * code));
                CHECK(std::fabs(stored["reads_as"][c] - stored["before"][c]) <= scale * 0.5001);
            }
        }
    }
}

TEST_CASE("int4: the newest positions are at f16, and a block of 32 becomes codes with its last one") {
    Found newest = show(prompt(31) + Words{"--kv", "int4"}), full = show(prompt(32) + Words{"--kv", "int4"});
    const Found key = newest["stored_key"];
    CHECK(key["in_residual_block"] == 1);
    for (int c = 0; c < width; c++) CHECK(key["reads_as"][c] == doctest::Approx(f16_of(key["hex"].text(), 2 * c)));
    CHECK(full["stored_key"]["in_residual_block"] == 0);
    CHECK(full["stored_key"]["bytes"] == 4 + 16);  // scale and zero point, 32 codes
    std::string hex = full["stored_value"]["hex"].text();
    for (int c = 0; c < width; c++) {  // of values a group is the channels of one position
        double code = byte_of(hex, 4 + c % 16) >> c / 16 * 4 & 15;
        const double number = f16_of(hex, 2) + f16_of(hex, 0) * code;
        CHECK(full["stored_value"]["reads_as"][c] == doctest::Approx(number).epsilon(1e-5));
    }
}

TEST_CASE("errors: each layer and KV head of K and of V, the largest first, larger with fewer bits") {
    double last = 0;
    for (const char *type : {"f32", "f16", "int8", "int4", "int2"}) {
        Found errors = show(prompt(64) + Words{"--kv", type})["errors"];
        REQUIRE(errors.size() == 2 * layers * kv_heads);
        for (int i = 1; i < errors.size(); i++) CHECK(errors[i - 1]["relative_error"] >= errors[i]["relative_error"]);
        double largest = errors[0]["relative_error"];
        CHECK(largest >= 2 * last);
        last = largest;
    }
    CHECK(last < 1.5);
}

TEST_CASE("what does not exist is refused") {
    check_refused(run(prompt(3) + Words{"--layer", "4"}), {"--layer 4", "0 to 3"});
    check_refused(run(prompt(3) + Words{"--head", "8"}), {"--head 8", "0 to 7"});
    check_refused(run(prompt(3) + Words{"--position", "3"}), {"--position 3", "0 to 2"});
    check_refused(run(prompt(3) + Words{"--device", "cpu"}), {"--device", "no such flag"});
    check_refused(run({"show"}), {"no prompt"});
}
