// The program as its user meets it: a process with arguments, an exit status, standard output and standard error.
// Run from the repository's root. The environment variable LLM says which program; without it, ./llm.
// Its parts: what each command prints, the same tokens on every way, sampling, output that goes nowhere, bad input.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <map>

#include "../base/usable.h"
#include "../cache.h"
#include "../commands/report.h"
#include "files.h"
#include "program.h"
#include "reference.h"

using namespace program;

namespace fast {
double pairs_gain();
}

const std::string models = "tests/fixtures/models/", builtin = "weights_tools/builtin";
const std::string model = models + "qwen3";  // where any will do: 64 ids, 128 positions, no tokenizer.json

// ---- Files ---------------------------------------------------------------------------------------------------

void replace(const std::string &path, const std::string &from, const std::string &to) {
    spill(path, replaced(slurp(path), from, to));
}

// A copy of a checkpoint that a test may damage.
std::string copy_of(const std::string &directory, const Scratch &scratch) {
    std::string copy = scratch / "model";
    fs::copy(directory, copy);
    return copy;
}

// 16 weights of a checkpoint in float32: the last ones, of a norm's gain; or those in the middle, of a matrix.
void fill_with_nan(const std::string &directory, bool in_a_matrix = false) {
    std::string bytes = slurp(directory + "/model.safetensors");
    size_t end = in_a_matrix ? bytes.size() - bytes.size() / 2 / 4 * 4 : bytes.size();
    for (size_t i = 1; i <= 16; i++) bytes.replace(end - 4 * i, 4, std::string("\0\0\xc0\x7f", 4));
    spill(directory + "/model.safetensors", bytes);
}

// All numbers of a checkpoint's f32 tensor.
void fill_tensor(const std::string &directory, const std::string &name, const std::vector<float> &numbers) {
    std::string bytes = slurp(directory + "/model.safetensors");
    uint64_t header;
    memcpy(&header, bytes.data(), sizeof header);
    Json tensors = parse_json(name, bytes.substr(8, header));
    const Json *tensor = member(&tensors, name);
    REQUIRE_MESSAGE(tensor, name);
    double begin = number(tensor, "data_offsets.0"), end = number(tensor, "data_offsets.1");
    REQUIRE(end - begin == 4.0 * (double)numbers.size());
    memcpy(&bytes[8 + header + (size_t)begin], numbers.data(), 4 * numbers.size());
    spill(directory + "/model.safetensors", bytes);
}

// ---- JSON ----------------------------------------------------------------------------------------------------

Json parse(const std::string &text) { return parse_json("", text); }

// Each line: what some keys must hold, and these keys.
void check_keys(const Json &root, const Words &lines) {
    for (const std::string &line : lines) {
        const Words words = words_of(line);
        const std::string &kind = words[0];
        for (size_t i = 1; i < words.size(); i++) {
            const Json *item = at(root, words[i]);
            REQUIRE_MESSAGE(item, "no " << words[i]);
            bool right = kind == "count"    ? is_whole(item, 0, 0x1p53)
                         : kind == "number" ? is_number(item)
                         : kind == "text"   ? is_text(item)
                         : kind == "bool"   ? is_bool(item)
                         : kind == "list"   ? is_list(item)
                                            : is_object(item);
            CHECK_MESSAGE(right, kind << " " << words[i]);
        }
    }
}

std::string joined(const Ids &list) {
    std::string result;
    for (int id : list) result += (result.empty() ? "" : ",") + std::to_string(id);
    return result;
}

// What Transformers makes of a fixture.
struct Expected {
    Ids prompt, greedy;
    explicit Expected(const std::string &directory) {
        Json root = parse(slurp(directory + "/expected.json"));
        prompt = ids(root, "prompt_ids");
        greedy = ids(root, "greedy_ids");
    }
};

// A run of generate on one thread: those of a tiny model would only wait for one another.
Words generate(const std::string &directory, const Ids &prompt, const Words &rest = {}) {
    return Words{"generate", "-m", directory, "--ids", joined(prompt), "-t", "1"} + rest;
}

// ---- What each command prints --------------------------------------------------------------------------------

TEST_CASE("generate --json has its keys, and they agree with one another") {
    Expected expected(model);
    Json root = run_json(generate(model, expected.prompt, {"-n", "5"}));
    check_keys(root, {"list prompt_ids tokens", "text text stop cache.layout cache.type_k cache.type_v",
                      "object prefill decode cache",
                      "count prompt_tokens prefill.tokens decode.tokens cache.bytes",
                      "count cache.payload_bytes cache.metadata_bytes",
                      "number prefill.seconds decode.seconds prefill.tokens_per_second decode.tokens_per_second"});
    CHECK(number(root, "prompt_tokens") == expected.prompt.size());
    CHECK(number(root, "decode.tokens_per_second") == doctest::Approx(4 / number(root, "decode.seconds")));
    CHECK(ids(root, "prompt_ids") == expected.prompt);
    CHECK(ids(root, "tokens") == Ids(expected.greedy.begin(), expected.greedy.begin() + 5));
    CHECK(number(root, "prefill.tokens") == expected.prompt.size());
    CHECK(number(root, "decode.tokens") == 4);  // the prefill gave the first
    CHECK(number(root, "prefill.seconds") > 0);
    CHECK(number(root, "decode.seconds") > 0);
    CHECK(text(root, "cache.layout") == "contiguous");
    CHECK(text(root, "cache.type_k") == "f16");
    CHECK(text(root, "cache.type_v") == "f16");
    // K and V, 2 layers, 2 KV heads of 16, 2 bytes a number, a row for each token of prompt and answer
    CHECK(number(root, "cache.payload_bytes") == 2 * 2 * 2 * 16 * 2 * (expected.prompt.size() + 5));
    CHECK(number(root, "cache.bytes") == number(root, "cache.payload_bytes") + number(root, "cache.metadata_bytes"));
}

TEST_CASE("generate streams the prompt and what follows to standard output, and its figures to standard error") {
    Words arguments{"generate", "-m", builtin, "-p", "Once upon a time", "-n", "10"};
    std::string following = text(run_json(arguments), "text");
    Outcome result = run_well(arguments);
    CHECK(result.out == "Once upon a time" + following + "\n");
    check_contains(result.err, "stopped: ", "prefill", "decode", "tokens/s", "GB/s", "bytes");
}

TEST_CASE("--no-display-prompt leaves the prompt out, and nothing else") {
    const Words arguments{"generate", "-m", builtin, "-p", "Once upon a time", "-n", "10"};
    Outcome result = run_well(arguments + Words{"--no-display-prompt"});
    CHECK("Once upon a time" + result.out == run_well(arguments).out);
    CHECK(text(run_json(arguments + Words{"--no-display-prompt"}), "text") + "\n" == result.out);
}

TEST_CASE("without a tokenizer.json, ids are printed as ids") {
    Outcome result = run_well(generate(model, {1, 34}, {"-n", "2"}));
    Ids tokens = ids(run_json(generate(model, {1, 34}, {"-n", "2"})), "tokens");
    CHECK(result.out == "1 34 " + std::to_string(tokens[0]) + " " + std::to_string(tokens[1]) + " \n");
}

TEST_CASE("diff: keys, a line a token, a verdict, and an exit status that repeats it") {
    Expected expected(model);
    Words arguments{"diff", "-m", model, "--ids", joined(expected.prompt), "-n", "10", "-t", "1", "--kv"};
    Json root = run_json(arguments + Words{"f32"});
    check_keys(root, {"list steps", "bool identical", "text against cache.layout",
                      "count compared stored_positions tested_steps dropped_positions cache.bytes",
                      "count steps.0.token steps.0.cached_token steps.0.stored",
                      "number steps.0.max_abs_logit_diff steps.0.kl steps.0.tv steps.0.naive_seconds",
                      "number steps.0.cached_seconds max_abs_logit_diff mean_kl max_kl mean_tv naive_seconds",
                      "number cached_seconds tolerance"});
    CHECK(count_of(at(root, "steps")) == 10);
    Outcome good = run_well(arguments + Words{"f32"});
    double most = 0;
    for (int i = 0; i < 10; i++) {
        std::string step = "steps." + std::to_string(i);
        CHECK((number(root, step + ".token") == expected.greedy[i] &&
               number(root, step + ".cached_token") == expected.greedy[i]));
        most = std::max(most, number(root, step + ".max_abs_logit_diff"));
        std::string line = formatted("\n%5d  %8d %9d", i, expected.greedy[i], expected.greedy[i]);
        check_contains(good.out, line);
        CHECK(number(root, step + ".stored") == expected.prompt.size() + i);
    }
    CHECK((number(root, "max_abs_logit_diff") == most && most <= 1e-4));
    check_contains(good.out, " step  naive id cached id  logit diff KL, nats naive ms cached ms  text\n");
    CHECK((is_null(at(root, "first_divergence")) && json_text(*at(root, "identical")) == "true"));
    CHECK((good.err.empty() && !contains(good.out, "\n   10  ")));
    check_contains(good.out, "verdict     the same: ");
    CHECK(contains(good.out, "all logits have the same bits") == (most == 0));
    // A bf16 cache is further off than 0: it is measured, and has a tolerance only where one is given.
    Outcome bad = run_well(arguments + Words{"bf16", "--tolerance", "0"}, 1);
    check_contains(bad.out, "verdict     beyond --tolerance: a logit is ");
    root = run_json(arguments + Words{"bf16", "--tolerance", "10"});
    CHECK((text(root, "cache.type_k") == "bf16" && number(root, "tolerance") == 10));
    CHECK(text(root, "verdict").find("changes a word in ") == 0);
    root = run_json(arguments + Words{"bf16"}, 1);
    CHECK((number(root, "tested_steps") == 10 && is_null(at(root, "tolerance"))));
    CHECK(text(root, "verdict") ==
          "no verdict: 10 steps tested, it takes 100: "
          "give --tolerance, as the context is too short");
}

// What diff says is worked out anew from the logits that both caches dump. Both ways must take the same tokens.
TEST_CASE("diff's KL and total variation are those of the two distributions of the next token") {
    Scratch scratch;
    const Expected expected(model);
    const int prompt = (int)expected.prompt.size(), count = 6;
    auto dumped = [&](const std::string &type) {
        const std::string file = scratch / type + ".npy";
        Json root = run_json(generate(model, expected.prompt, {"-n", "6", "--kv", type, "--dump-logits", file}));
        REQUIRE(ids(root, "tokens") == Ids(expected.greedy.begin(), expected.greedy.begin() + count));
        return read_npy(file);
    };
    const Matrix truth = dumped("f32"), rounded = dumped("fp8");
    Json root =
        run_json(words_of("diff -t 1 -n 6 --kv fp8 --tolerance 10 -m " + model + " --ids " + joined(expected.prompt)));
    double mean_kl = 0, mean_tv = 0, most_kl = 0;
    for (int i = 0; i < count; i++) {
        const size_t row = (prompt - 1 + i) * truth.cols;
        const float *p = &truth.values[row], *q = &rounded.values[row];
        double p_sum = 0, q_sum = 0, kl = 0, tv = 0;
        for (size_t id = 0; id < truth.cols; id++) p_sum += exp(p[id]), q_sum += exp(q[id]);
        for (size_t id = 0; id < truth.cols; id++) {
            const double here = exp(p[id]) / p_sum, there = exp(q[id]) / q_sum;
            kl += here * log(here / there), tv += fabs(here - there) / 2;
        }
        const std::string step = "steps." + std::to_string(i) + ".";
        CHECK(number(root, step + "kl") == doctest::Approx(kl).epsilon(1e-6));
        CHECK(number(root, step + "tv") == doctest::Approx(tv).epsilon(1e-6));
        mean_kl += kl / count, mean_tv += tv / count, most_kl = std::max(most_kl, kl);
    }
    CHECK(number(root, "mean_kl") == doctest::Approx(mean_kl).epsilon(1e-6));
    CHECK(number(root, "max_kl") == doctest::Approx(most_kl).epsilon(1e-6));
    CHECK(number(root, "mean_tv") == doctest::Approx(mean_tv).epsilon(1e-6));
    const double every = strtod(text(root, "verdict").c_str() + strlen("changes a word in "), nullptr);
    CHECK(every == doctest::Approx(1 / mean_tv).epsilon(0.05));
}

TEST_CASE("diff: a verdict is of what was tested: of int4 and int2, of blocks that were read when they were full") {
    const Words line{"diff", "-m", model, "--ids", "1,5,9,3", "-t", "1", "--ignore-eos"};
    for (const std::string &type : Words{"int4", "int2"}) {
        for (const Words &types : {Words{"--kv", type}, {"-ctk", type, "-ctv", "f16"}}) {
            Json none = run_json(line + types + Words{"-n", "29"}, 1);  // the 33rd position sees the first block
            CHECK(text(none, "verdict") ==
                  "no verdict: 0 steps tested, it takes 100: "
                  "give --tolerance, as the context is too short");
            CHECK((number(none, "tested_steps") == 0 && number(none, "stored_positions") == 0));
            CHECK((is_null(at(none, "mean_kl")) && is_null(at(none, "mean_tv"))));
            Json root = parse(run(line + types + Words{"-n", "63", "--json"}).out);
            CHECK((number(root, "tested_steps") == 34 && number(root, "stored_positions") == 64));
            for (int i : {0, 27, 28, 29, 59, 60, 61, 62}) {
                CAPTURE(i);
                const int expected = (i + 3) / 32 * 32;
                CHECK(number(root, "steps." + std::to_string(i) + ".stored") == expected);
            }
        }
    }
    const std::string nothing = "no verdict: 0 steps tested, it takes 1: give -n 30 or more";
    const Words given{"--kv", "int4", "--tolerance", "10"};  // then one step is enough
    CHECK(text(run_json(line + given + Words{"-n", "29"}, 1), "verdict") == nothing);
    CHECK(text(run_json(line + given + Words{"-n", "60", "-c", "20"}, 1), "verdict") ==
          "no verdict: 0 steps tested, it takes 1: give a larger -c");
    CHECK(text(run_json(line + given + Words{"-n", "30"}), "verdict").find("no verdict") == std::string::npos);
    const Words never{"--kv", "int4", "--cache", "ring", "--window", "1", "--sinks", "0", "-n", "9"};
    CHECK(text(run_json(line + never, 1), "verdict") ==
          "no verdict: 0 steps tested, it takes 100: give --tolerance, as the context is too short");
    CHECK(text(run_json(line + never + Words{"--tolerance", "1"}, 1), "verdict") ==
          "no verdict: 0 steps tested, it takes 1: give a longer context");
    check_contains(run_well({"diff", "-m", model, "--ids", "1,5", "-t", "1", "-n", "2", "--kv", "int2,f32"}, 1).out,
                   "\nint2        no verdict: ", " 0 of 2 steps tested\n");
}

TEST_CASE("diff: int2 breaks the built-in checkpoint, and no larger type does; a text too short has no verdict") {
    for (const std::string &prompt : Words{"Once upon a time", "The dog"}) {
        Json root = run_json({"diff", "-m", builtin, "-p", prompt, "-n", "200", "--ignore-eos", "--kv",
                              "f32,f16,bf16,fp8,int8,int4,int2"},
                             1);
        const Words verdicts{"the same: ", "as good as f16: ", "as good as f16: ", "changes a word in ",
                             "changes a word in ", "changes a word in ", "breaks it: "};
        for (size_t i = 0; i < verdicts.size(); i++)
            CHECK(text(root, "caches." + std::to_string(i) + ".verdict").find(verdicts[i]) == 0);
    }
    // 100 tested steps are enough and 99 are not: of int2, steps from the 33rd position on.
    for (const std::string &prompt : Words{"Tom", "Mia", "The sea is"}) {
        const int ids = (int)::ids(run_json({"tokenize", "-m", builtin, "-p", prompt}), "ids").size();
        for (const std::string &type : Words{"fp8", "int8", "int4", "int2"}) {
            const int enough = type == "fp8" || type == "int8" ? 100 : 133 - ids;
            for (const int count : {enough - 1, enough}) {
                Json root = run_json(
                    {"diff", "-m", builtin, "-p", prompt, "-n", std::to_string(count), "--ignore-eos", "--kv", type},
                    type == "int2" || count < enough);
                CHECK(number(root, "tested_steps") == 100 - (count < enough));
                const std::string verdict = text(root, "verdict");
                if (count == enough) CHECK((verdict.find("breaks it: ") == 0) == (type == "int2"));
                if (count < enough)
                    CHECK(verdict ==
                          formatted("no verdict: 99 steps tested, it takes 100: give -n %d or more", enough));
            }
        }
    }
    // The story ends after 13 tokens.
    Outcome short_one = run_well({"diff", "-m", builtin, "-p", "The sea is", "-n", "200", "--kv", "int8"}, 1);
    check_contains(short_one.out, "no verdict: 13 steps tested, it takes 100: give --ignore-eos\n");
}

TEST_CASE("diff: times a token are medians, and how many times faster leaves out the first step") {
    Json root = run_json({"diff", "-m", model, "--ids", "1,2", "-t", "1", "-n", "41", "--ignore-eos", "--kv", "f32"});
    Outcome shown =
        run_well({"diff", "-m", model, "--ids", "1,2", "-t", "1", "-n", "41", "--ignore-eos", "--kv", "f32"});
    CHECK(count_of(at(root, "steps")) == 41);
    // The table's own milliseconds, of which the last lines are made.
    std::vector<double> naive, cached;
    for (const std::string &line : split(shown.out, '\n')) {
        int step;
        double reference, cache;
        if (sscanf(line.c_str(), "%d %*d %*d%*[! ] %*f %*f %lf %lf", &step, &reference, &cache) == 3)
            naive.push_back(reference), cached.push_back(cache);
    }
    REQUIRE((naive.size() == 41 && cached.size() == 41));
    auto middle = [](std::vector<double> times, int begin, int count) {
        std::sort(times.begin() + begin, times.begin() + begin + count);
        return times[begin + count / 2];
    };
    std::vector<double> seconds;
    for (int i = 1; i < 41; i++) seconds.push_back(number(root, formatted("steps.%d.cached_seconds", i)));
    CHECK(number(root, "tokens_per_second") == doctest::Approx(1 / middle(seconds, 0, 40)));
    double times, growth[4];
    REQUIRE(sscanf(shown.out.substr(shown.out.find(" s, cached ")).c_str(), " s, cached %*f s, %lf x without step 0",
                   &times) == 1);
    CHECK(times == doctest::Approx(middle(naive, 1, 40) / middle(cached, 1, 40)).epsilon(0.1));  // of three digits
    REQUIRE(sscanf(shown.out.substr(shown.out.find("growth ")).c_str(),
                   "growth naive %lf -> %lf ms a token, cached %lf -> %lf (medians", growth, growth + 1, growth + 2,
                   growth + 3) == 4);
    const double expected[] = {middle(naive, 1, 10), middle(naive, 31, 10), middle(cached, 1, 10),
                               middle(cached, 31, 10)};
    for (int i = 0; i < 4; i++) CHECK(std::fabs(growth[i] - expected[i]) <= 0.006);
    CHECK(!contains(run_well({"diff", "-m", model, "--ids", "1,2", "-t", "1", "-n", "1", "--kv", "f32"}).out, " x "));
}

TEST_CASE("generate says the time to the first token, and a prompt's rate from 64 tokens on") {
    const std::string many = joined(Ids(64, 5));
    auto notes = [&](const std::string &prompt, const std::string &count) {
        return run_well({"generate", "-m", model, "--ids", prompt, "-t", "1", "--ignore-eos", "-n", count}).err;
    };
    auto line = [](const std::string &notes, const std::string &name) {
        const size_t begin = notes.find("\n" + name);
        REQUIRE(begin != std::string::npos);
        return notes.substr(begin + 1, notes.find('\n', begin + 1) - begin - 1);
    };
    std::string few = notes(many.substr(2), "3"), enough = notes(many, "1");
    check_contains(line(few, "prefill"), "    63 tokens ", " ms to the first token");
    check_contains(line(enough, "prefill"), "    64 tokens ", " ms to the first token ", " tokens/s");
    CHECK(!contains(line(few, "prefill"), "tokens/s"));
    check_contains(line(few, "decode"), "     2 tokens ", " tokens/s ", " GB/s read");
    CHECK(line(enough, "decode") == "decode        0 tokens");  // nothing was decoded: it has no rate
}

TEST_CASE("diff names the first step at which the tokens differ") {
    std::string parting = models + "llama_f16";  // where rounding to bf16 turns a close call at step 18
    Words arguments{"diff", "-m", parting, "--ids", joined(Expected(parting).prompt), "-n", "40", "-t", "1"};
    arguments = arguments + Words{"--kv", "bf16", "--tolerance", "10"};
    Json root = run_json(arguments);  // they part, but few of the words that would be drawn change
    int first = 0;
    auto token = [&](const char *key) { return number(root, "steps." + std::to_string(first) + "." + key); };
    while (first < 39 && token("token") == token("cached_token")) first++;
    REQUIRE(token("token") != token("cached_token"));
    CHECK(number(root, "first_divergence") == first);
    CHECK(json_text(*at(root, "identical")) == "false");
    const std::string at_step = " at step " + std::to_string(first);
    check_contains(run_well(arguments).out, "tokens      differ first" + at_step + ", where ",
                   " between their naive logits");
    CHECK(contains(text(root, "verdict"), "; the tokens part" + at_step));
}

TEST_CASE("diff of several caches says of each what it says of one: a column, a verdict, an entry in the JSON") {
    const Words types{"f32", "int8", "int2"},
        line{"diff", "-m", model, "--ids", joined(Expected(model).prompt), "-n", "6", "-t", "1", "--tolerance", "1e-4"};
    const Words several = line + Words{"--kv", "f32,int8,int2"};
    Json root = run_json(several, 1);  // f32 is near enough, int2 is not
    Outcome shown = run_well(several, 1);
    CHECK(shown.out.find("The largest difference of a logit; !: another token\n"
                         " step  naive id      f32      int8      int2  text\n") == 0);
    CHECK(count_of(at(root, "caches")) == 3);
    for (int i = 0; i < 3; i++) {
        CAPTURE(types[i]);
        Json one = parse(run(line + Words{"--kv", types[i], "--json"}).out);
        const Json *same = at(root, "caches." + std::to_string(i));
        CHECK(count_of(same) == count_of(&one));
        for (const char *key : {"compared", "max_abs_logit_diff", "mean_kl", "mean_tv", "tolerance", "cache.bytes"})
            CHECK_MESSAGE(number(same, key) == number(one, key), key);
        for (const char *key : {"verdict", "cache.type_k", "cache.type_v", "device"})
            CHECK_MESSAGE(text(same, key) == text(one, key), key);
        for (int step = 0; step < 6; step++) {
            const std::string path = "steps." + std::to_string(step) + ".";
            for (const char *key : {"token", "cached_token", "max_abs_logit_diff", "kl"})
                CHECK(number(same, path + key) == number(one, path + key));
            char cell[20];
            snprintf(cell, sizeof cell, " %8.2e", number(one, path + "max_abs_logit_diff"));
            check_contains(shown.out, cell);
        }
        CHECK((text(one, "verdict").find("the same") == 0) == (i == 0));
        CHECK(number(one, "stored_positions") == (i == 2 ? 32 : 37));  // int2: whole blocks of 32
        std::string verdict = "\n" + types[i] + std::string(12 - types[i].size(), ' ') + text(one, "verdict") + "; ";
        check_contains(shown.out, verdict + "mean KL ");
    }
}

TEST_CASE("diff: what a ring loses is said, beside the naive path and beside a full cache; the others lose nothing") {
    const Ids prompt = Expected(model).prompt;
    for (const std::string &against : Words{"naive", "full"}) {
        const Words line{"diff", "-m", model, "--ids", joined(prompt), "-n", "40", "-t", "1", "--kv", "f32",
                         "--against", against};
        for (const Words &cache : {Words{"contiguous"}, {"paged"}, {"ring"}, {"ring", "--window", "80"}}) {
            Json root = run_json(line + Words{"--cache"} + cache);
            CHECK(number(root, "max_abs_logit_diff") <= (against == "full" ? 0 : 1e-4));
            check_keys(root, {"number cached_seconds " + against + "_seconds steps.0." + against + "_seconds"});
            CHECK(!at(root, against == "full" ? "naive_seconds" : "full_seconds"));
            CHECK((text(root, "against") == against && number(root, "dropped_positions") == 0));
            CHECK(text(root, "verdict").find("the same: ") == 0);
        }
        const Words ring{"--cache", "ring,contiguous", "--window", "24", "--sinks", "3", "--tolerance", "10"};
        Json root = run_json(line + ring, 1);
        const int last = (int)prompt.size() + 39;  // from there 27 of all positions are seen
        CHECK(number(root, "caches.0.dropped_positions") == last - 27);
        CHECK(contains(text(root, "caches.0.verdict"), formatted("; up to %d positions were dropped", last - 27)));
        CHECK(text(root, "caches.0.verdict").find("breaks it: ") == 0);
        CHECK(number(root, "caches.0.max_abs_logit_diff") > 0.1);
        CHECK(number(root, "caches.1.max_abs_logit_diff") <= (against == "full" ? 0 : 1e-4));
        Outcome shown = run_well(line + ring, 1);
        check_contains(shown.out, formatted(" step  %5s id ring f32  contiguous f32  text\n", against.c_str()),
                       "\nring f32       breaks it: ", "\ncontiguous f32 the same: ");
    }
}

// A line of the shell, on a terminal of so many columns; what it shows.
std::string on_terminal(const std::string &line, int columns = 80) {
    Terminal terminal({"/bin/sh", "-c", line + " 2>/dev/null </dev/null"}, columns);
    while (terminal.read_more()) continue;
    terminal.status();
    std::string text = terminal.seen;
    text.erase(std::remove(text.begin(), text.end(), '\r'), text.end());
    return text;
}

TEST_CASE("help and tables fit the terminal: what is too wide comes below, and nothing is lost") {
    const std::string llm = program_path() + " ";
    auto squeezed = [](std::string text) {
        text.erase(std::remove_if(text.begin(), text.end(), [](char c) { return isspace(c); }), text.end());
        return text;
    };
    struct Case {
        std::string arguments;
        Words heads;
        int most = 200;
        bool times = false;  // some numbers differ from run to run
    };
    for (const Case &each : std::vector<Case>{
             {"--help", {}, 100},
             {"generate --help", {}, 100},
             {"memory --help", {}, 100},
             {"memory --budget 1GiB --bandwidth 100", words_of("payload metadata total layer read tokens/s fits")},
             {"show -p 'Once upon a time' --layer 1 --kv int8", words_of("position key value softmax error channel")},
             {"eval --repeats 1 --kv int4 -t 1 --ids 1,2,3,4,5", words_of("cache K B/token perplex. KL tokens/s")},
             {"info", {}, 200, true},  // how much memory is free
             {"diff -p 'Once upon a time' -n 20 --kv f32,f16,fp8,int8,int4", {}, 200, true},
             {"diff -p 'Once upon a time' -n 20 --kv f32", words_of("step naive cached id logit diff KL ms text"), 200,
              true},
         }) {
        CAPTURE(each.arguments);
        const std::string piped = run_shell("unset COLUMNS; " + llm + each.arguments).out;
        for (int columns : {40, 64, 80, 100, 200}) {
            CAPTURE(columns);
            std::string shown = on_terminal("unset COLUMNS; " + llm + each.arguments, columns);
            for (const std::string &line : split(shown, '\n'))
                if (contains(line, " "))  // a path cannot be broken
                    CHECK_MESSAGE((int)line.size() <= std::min(columns, each.most), line);
            for (const std::string &head : each.heads) check_contains(shown, head);
            if (each.times) continue;
            if (each.heads.empty()) CHECK(squeezed(shown).size() == squeezed(piped).size());
            const std::string given = "COLUMNS=" + std::to_string(columns) + " ";
            CHECK(on_terminal(given + llm + each.arguments).size() == shown.size());
            CHECK(run_shell(given + llm + each.arguments).out.size() == shown.size());
        }
    }
}

TEST_CASE("diff's verdict is green or red on a terminal, and there alone; NO_COLOR asks for none") {
    auto shown = [&](const std::string &before, const std::string &flags) {
        return on_terminal(before + program_path() + " diff -m " + model + " --ids 1,2 -n 1 " + flags, 200);
    };
    check_contains(shown("unset NO_COLOR; ", "--kv f32"), "verdict     \33[32mthe same: ");
    check_contains(shown("unset NO_COLOR; ", "--tolerance 0"), "verdict     \33[31mbeyond --tolerance: ");
    check_contains(shown("NO_COLOR= ", "--kv f32,f16"), "\nf32         \33[32mthe same: ");
    std::string plain = shown("NO_COLOR=1 ", "--kv f32");
    CHECK((contains(plain, "verdict     the same: ") && !contains(plain, "\33")));
    CHECK(!contains(run_well({"diff", "-m", model, "--ids", "1,2", "-n", "1", "--kv", "f32"}).out, "\33"));
}

TEST_CASE("tokenize: text to ids and back") {
    const Words prompts{"Once upon a time",
                        " two  spaces\tand\n\nlines ",
                        "caf\xc3\xa9 \xf0\x9f\x98\x80 \xe4\xbd\xa0",
                        "\"quoted\" back\\slash",
                        "\x01 control \x7f",
                        "",
                        "-p",
                        "e\xcc\x81"};
    for (const std::string &prompt : prompts) {
        CAPTURE(prompt);
        Words forward{"tokenize", "-m", builtin, "--prompt=" + prompt};
        Json root = run_json(forward);
        check_keys(root, {"list ids", "text text"});
        CHECK(text(root, "text") == prompt);
        std::string list = joined(ids(root, "ids"));
        CHECK(run_well(forward).out == list + "\n");
        Words back{"tokenize", "-m", builtin, "--ids", list};
        CHECK(run_well(back).out == prompt + "\n");
        CHECK(text(run_json(back), "text") == prompt);
        CHECK(ids(run_json(back), "ids") == ids(root, "ids"));
    }
}

TEST_CASE("tokenize needs a tokenizer.json and nothing else; a NUL in a text is a character like any other") {
    Scratch scratch;
    fs::copy(builtin + "/tokenizer.json", scratch / "tokenizer.json");
    CHECK(run_well({"tokenize", "-m", scratch.path, "-p", "the key"}).out ==
          run_well({"tokenize", "-m", builtin, "-p", "the key"}).out);
    std::string prompt("a\0b", 3);
    spill(scratch / "prompt", prompt);
    Words forward{"tokenize", "-m", builtin, "-f", scratch / "prompt"};
    std::string list = run_well(forward).out;
    list.pop_back();
    CHECK(run_well({"tokenize", "-m", builtin, "--ids", list}).out == prompt + "\n");
    check_contains(run_well(forward + Words{"--json"}).out, "\"a\\u0000b\"");
    Outcome result = run_well({"generate", "-m", builtin, "-f", scratch / "prompt", "-n", "0"});
    CHECK(result.out == prompt + "\n");
}

TEST_CASE("info says what the config says") {
    for (const std::string &name : Words{"qwen3", "mistral_window", "llama_rope_llama3", "llama_sharded"}) {
        CAPTURE(name);
        Words arguments{"info", "-m", models + name};
        Json root = run_json(arguments), config = parse(slurp(models + name + "/config.json"));
        check_keys(root, {"count parameters weight_bytes cache_bytes_per_token_f16", "list end_ids", "bool tied fits",
                          "text rope_scaling"});
        CHECK(text(root, "architecture") == text(config, "architectures.0"));
        const Words ours = words_of("layers hidden ffn heads kv_heads vocabulary context"),
                    theirs = words_of(
                        "num_hidden_layers hidden_size intermediate_size num_attention_heads "
                        "num_key_value_heads vocab_size max_position_embeddings");
        for (size_t i = 0; i < ours.size(); i++)
            CHECK_MESSAGE(number(root, ours[i]) == number(config, theirs[i]), ours[i]);
        double row = number(root, "kv_heads") * number(root, "head_dim");
        CHECK(number(root, "cache_bytes_per_token_f16") == 2 * 2 * number(root, "layers") * row);
        std::string out = run_well(arguments).out;
        check_contains(out, "\n  architecture   " + text(root, "architecture"), "\n  will it run    yes: ",
                       " (no tokenizer.json: fetch it, or give prompts as --ids), end ids:");
    }
    Scratch scratch;  // what only config.json has wrong, where generation_config.json says it right
    const std::string copy = copy_of(models + "llama_bias", scratch);
    replace(copy + "/config.json", "\"eos_token_id\": 2", "\"eos_token_id\": \"x\"");
    check_contains(run_well({"info", "-m", copy}).out, "\n  will it run    yes: ");
    run_well(generate(copy, {3, 4}, {"-n", "1"}));
}

// Of `model`, 2 layers 32 wide, 4 heads on 2 of 16, ffn 48, 64 ids: weights of the layers, of the head; and K and V of
// a position.
const double layers = 2 * (32 * 64 * 2 + 32 * 32 * 2 + 32 * 48 * 3), head = 64 * 32, a_position = 2 * 2 * 4 * 16;

TEST_CASE("bench: prefill and decode beside what memory and processor give") {
    Words arguments{"bench", "-m", model, "-n", "3", "--depth", "20", "--repeats", "2"};
    Json root = run_json(arguments);
    check_keys(root, {"list results", "object roofline", "count threads memory.weight_bytes memory.measuring_bytes"});
    for (const char *key : {"roofline.read_gb_per_second", "roofline.matrix_gflops", "start.model_seconds"})
        CHECK(number(root, key) > 0);
    CHECK(number(root, "start.tokenizer_seconds") == 0);  // there is none
    CHECK(number(root, "memory.cache_bytes") == number(run_json({"memory", "-m", model, "-c", "128"}), "bytes"));
    CHECK(number(root, "memory.peak_bytes") > number(root, "memory.measuring_bytes"));
    for (const char *name : {"prefill", "decode"}) {
        bool prefill = name == std::string("prefill");
        const Json *result = at(root, prefill ? "results.0" : "results.1");
        double seconds = number(result, "seconds"), bytes = number(result, "bytes");
        double operations = prefill ? 128 * layers + head + 128 * 129 / 2 * a_position
                                    : 3 * layers + 3 * head + (21 + 22 + 23) * a_position;
        CHECK((text(result, "name") == name && seconds > 0 && bytes > 0));
        CHECK(number(result, "operations") == 2 * operations);
        CHECK(number(result, "tokens_per_second") == doctest::Approx(number(result, "tokens") / seconds));
        CHECK(number(result, "gb_per_second") == doctest::Approx(bytes / seconds / 1e9));
        CHECK(number(result, "gflops") == doctest::Approx(2 * operations / seconds / 1e9));
        CHECK(number(result, "of_roofline_least") <= number(result, "of_roofline"));
        CHECK(number(result, "of_roofline") <= number(result, "of_roofline_most"));
    }
    Outcome result = run_well(arguments);
    check_contains(result.out, "read bandwidth", "matrix rate", "start:", "peak memory", "prefill", "decode",
                   "tokens/s", "GB/s", "GFLOPS");
}

TEST_CASE("bench -np: so many sequences decode together, and each is read") {
    auto decode = [](const std::string &flags) {
        return run_json(words_of("bench -n 2 --repeats 1 -t 1 --prefill 3 --depth 4 -m " + model + flags));
    };
    Json one = decode(""), three = decode(" -np 3");
    CHECK((number(three, "results.0.sequences") == 1 && number(three, "results.1.sequences") == 3));
    CHECK(number(three, "results.1.tokens") == 3 * number(one, "results.1.tokens"));
    CHECK(number(three, "results.1.operations") == 3 * number(one, "results.1.operations"));
    CHECK(number(three, "results.1.bytes") > number(one, "results.1.bytes"));
    CHECK(number(three, "results.1.bytes") < 3 * number(one, "results.1.bytes"));
}

TEST_CASE("bench measures the lengths and caches that are asked for, and lengths that fit into the model's context") {
    auto results = [](const std::string &flags) {
        Json root = run_json(words_of("bench -n 2 --repeats 1 -t 1 -m " + model + " " + flags));
        std::string found;
        for (const Json *item : items_of(at(root, "results"))) {
            for (const char *key : {"name", "layout", "type_k", "type_v"}) found += text(item, key) + " ";
            for (const char *key : {"tokens", "depth"}) found += std::to_string((int)number(item, key)) + " ";
        }
        return found;
    };
    const std::string f16 = "contiguous f16 f16 ", none = "naive none none none 1 ";
    CHECK(results("") == "prefill " + f16 + "128 0 decode " + f16 + "2 0 ");
    CHECK(results("--prefill 9,1") == "prefill " + f16 + "1 0 prefill " + f16 + "9 0 decode " + f16 + "2 0 ");
    CHECK(results("--depth 0,40 --prefill 3 --cache none,contiguous") ==
          "prefill " + f16 + "3 0 " + none + "0 decode " + f16 + "2 0 " + none + "40 decode " + f16 + "2 40 ");
    CHECK(results("--depth 40 --cache none") == none + "40 ");
    std::string all = "prefill " + f16 + "7 0 ";
    for (const char *depth : {"0 ", "40 "})
        for (const char *layout : {"contiguous", "paged", "ring"})
            for (const char *type : {" f16 f16", " int4 int4"})
                all += std::string("decode ") + layout + type + " 2 " + depth;
    CHECK(results("--depth 40,0 --prefill 7 --cache contiguous,paged,ring --page 5 --window 20 --kv f16,int4") == all);
    Json naive = run_json({"bench", "-m", model, "--depth", "40", "--repeats", "1", "--cache", "none"});
    CHECK(number(naive, "results.0.operations") == 2 * (41 * layers + head + 41 * 42 / 2 * a_position));
}

TEST_CASE("--weights int8: both paths agree, and fewer bytes are read") {
    Outcome same =
        run({"diff", "-m", builtin, "-p", "Once upon a time", "-n", "60", "--weights", "int8", "--kv", "f32"});
    CHECK_MESSAGE((same.status == 0 && same.out.find("verdict     the same") != std::string::npos), same);
    // The shape above. 32 neighbours take 34 bytes in place of 128; rows of 48 numbers take two groups.
    Words arguments{"bench", "-m", model, "-n", "3", "--depth", "20", "--prefill", "5", "--repeats", "1"};
    Json stored = run_json(arguments), int8 = run_json(arguments + Words{"--weights", "int8"});
    const double groups = 2 * (64 + 2 * 32 + 32 * 2 + 2 * 48 + 32 * 2) + 64;
    double saved = number(stored, "results.1.bytes") - number(int8, "results.1.bytes");
    CHECK(saved == 3 * ((layers + head) * 4 - groups * 34));
    CHECK(number(stored, "results.1.operations") == number(int8, "results.1.operations"));
}

TEST_CASE("--weights copied: the same bits, and as many bytes are counted as held and read") {
    Scratch scratch;
    for (const std::string &directory : {model, std::string(builtin)}) {
        auto logits = [&](const std::string &weights) {
            std::string path = scratch / weights + ".npy";
            run_well(generate(directory, {1, 2, 3}, {"-n", "4", "--weights", weights, "--dump-logits", path}));
            return slurp(path);
        };
        CHECK(logits("copied") == logits("stored"));
        auto memory = [&](const std::string &weights) {
            Json root = run_json({"bench", "-m", directory, "-n", "1", "--depth", "4", "--prefill", "2", "--repeats",
                                  "1", "--weights", weights});
            return std::make_pair(number(root, "memory.weight_bytes"), number(root, "results.1.bytes"));
        };
        CHECK(memory("copied") == memory("stored"));
    }
}

TEST_CASE("help and version are no errors, and go to standard output") {  // what they say: test_flags
    for (const Words &arguments :
         {Words{"--help"}, {"help"}, {"generate", "-h"}, {"info", "-h", "-m", "x"}, {"--version"}}) {
        Outcome result = run_well(arguments);
        CHECK_MESSAGE((result.out.find("llm") != std::string::npos && result.err.empty()), result);
    }
}

// ---- The same tokens, whatever the way -----------------------------------------------------------------------

TEST_CASE("every family, by both paths: Transformers' greedy tokens and logits") {
    Scratch scratch;
    for (const std::string &name : fixture_names()) {
        Expected expected(models + name);
        Matrix reference = read_npy(models + name + "/expected_logits.npy");
        for (const Words &path : {Words{"--cache", "none"}, {"--cache", "contiguous", "--kv", "f32"}}) {
            CAPTURE(name);
            CAPTURE(path[1]);
            std::string dump = scratch / "logits.npy", count = std::to_string(expected.greedy.size());
            const Words words =
                generate(models + name, expected.prompt, path + Words{"-n", count, "--dump-logits", dump});
            const bool sees = contains(name, "_vision"), is_long = name == "phi3_longrope_long";
            const std::string said = sees      ? "left aside, beside the text model: "
                                     : is_long ? "a text of up to 108"
                                               : "";
            Json root = run_json(words, 0, said);
            CHECK(ids(root, "tokens") == expected.greedy);
            CHECK(text(root, "stop") == "length");
            CHECK(text(root, "cache.layout") == path[1]);
            Matrix logits = read_npy(dump);
            REQUIRE((logits.rows == expected.prompt.size() + expected.greedy.size() && logits.rows >= reference.rows));
            REQUIRE(logits.cols == reference.cols);
            logits.values.resize(reference.values.size());
            CHECK(reference::relative_error(logits.values, reference.values) <= 1e-5);
        }
    }
    fs::remove(scratch / "logits.npy");
    CHECK(fs::is_empty(scratch.path));
}

TEST_CASE("more threads than processors are not started, and it is said") {
    const int processors = usable_threads("", nullptr);
    Outcome result = run({"generate", "-m", model, "--ids", "1", "-n", "2", "-t", "256", "--json"});
    REQUIRE_MESSAGE((result.status == 0 && processors < 256), result);
    int threads = 0;
    CHECK(sscanf(text(parse(result.out), "device").c_str(), "CPU, %d thread", &threads) == 1);
    CHECK(threads == processors);
    check_contains(result.err, "llm: -t 256: taken as " + std::to_string(processors), "would wait for one another");
}

TEST_CASE("one thread or two: the same tokens; the naive path has no cache to report") {
    Expected expected(model);
    for (const std::string &threads : Words{"1", usable_threads("", nullptr) > 1 ? "2" : "1"}) {
        Json root = run_json(
            {"generate", "-m", model, "--ids", joined(expected.prompt), "-n", "16", "-t", threads, "--cache", "none"});
        CHECK(ids(root, "tokens") == expected.greedy);
        CHECK(text(root, "device").find("CPU, " + threads + " thread") == 0);
        CHECK((number(root, "cache.bytes") == 0 && text(root, "cache.type_k") == "none"));
    }
}

TEST_CASE("every layout and type that the engine knows runs, for K and V apart and together") {
    Expected expected(model);
    const std::map<std::string, int> known = {{"f32", 4}, {"f16", 2}, {"bf16", 2}};  // bytes a number
    auto check = [&](const std::string &layout, const std::string &k, const std::string &v) {
        Words choice{"-n", "4", "--cache", layout};
        Json root = run_json(
            generate(model, expected.prompt, choice + (k == v ? Words{"--kv", k} : Words{"-ctk", k, "-ctv", v})));
        CHECK(text(root, "cache.layout") == layout);
        CHECK((text(root, "cache.type_k") == k && text(root, "cache.type_v") == v));
        if (layout == "contiguous" && known.count(k) && known.count(v))  // 2 layers, 2 KV heads of 16, 36 positions
            CHECK(number(root, "cache.payload_bytes") == 2 * 2 * 16 * 36 * (known.at(k) + known.at(v)));
        return ids(root, "tokens");
    };
    for_each_type<Precision>([&](auto k) {
        for_each_type<Precision>([&](auto v) { CHECK(check("contiguous", k.name, v.name).size() == 4); });
        for_each_type<Layout>(
            [&](auto layout) { CHECK(check(layout.name, k.name, k.name) == check("contiguous", k.name, k.name)); });
    });
    CHECK(text(run_json(generate(model, {1}, {"-n", "1", "--cache-type-k", "bf16"})), "cache.type_v") == "f16");
}

TEST_CASE("a prompt is the same as text, from a file, as ids, by either spelling of a flag") {
    Scratch scratch;
    std::string prompt = "The boy went to";
    spill(scratch / "prompt.txt", prompt);
    Words start{"generate", "-m", builtin, "-n", "6", "-t", "1"};
    Json root = run_json(start + Words{"-p", prompt});
    Ids prompt_ids = ids(root, "prompt_ids"), tokens = ids(root, "tokens");
    CHECK(prompt_ids == ids(run_json({"tokenize", "-m", builtin, "-p", prompt}), "ids"));
    for (const Words &way : {Words{"-f", scratch / "prompt.txt"},
                             {"--ids", joined(prompt_ids)},
                             {"--prompt", prompt},
                             {"--prompt=" + prompt},
                             {"--file=" + (scratch / "prompt.txt")}}) {
        CAPTURE(way[0]);
        Json again = run_json(start + way);
        CHECK(ids(again, "prompt_ids") == prompt_ids);
        CHECK(ids(again, "tokens") == tokens);
    }
    CHECK(ids(run_json(generate(model, {34, 36}, {"-n", "1"})), "prompt_ids") == Ids{34, 36});  // no id put before
}

TEST_CASE("the generated ids, decoded, are the text") {
    Json root =
        run_json({"generate", "-m", builtin, "-p", "Once", "-n", "12", "--temp", "2", "-s", "1", "--ignore-eos"});
    std::string list = joined(ids(root, "prompt_ids")) + "," + joined(ids(root, "tokens"));
    CHECK(run_well({"tokenize", "-m", builtin, "--ids", list}).out == "Once" + text(root, "text") + "\n");
}

// ---- Sampling, and where it stops ----------------------------------------------------------------------------

TEST_CASE("the same seed gives the same text, another seed another") {
    auto sampled = [](const Words &rest) {
        return text(run_json(generate(model, {1, 34}, Words{"-n", "30", "--temp", "1", "--ignore-eos"} + rest)),
                    "text");
    };
    std::set<std::string> texts;
    for (int seed = 0; seed < 4; seed++) texts.insert(sampled({"-s", std::to_string(seed)}));
    CHECK(texts.size() == 4);
    CHECK(sampled({"--seed", "3"}) == sampled({"-s", "3"}));
    Json drawn = run_json(generate(model, {1, 34}, {"-n", "30", "--temp", "1", "--ignore-eos"}));
    CHECK(sampled({"-s", std::to_string((int64_t)number(drawn, "seed"))}) == text(drawn, "text"));
    CHECK(sampled({"-s", "3"}) == sampled({"-s", "3", "--cache", "none"}));
}

TEST_CASE("what leaves one candidate is greedy") {
    Expected expected(model);
    for (const Words &choice : {Words{"--temp", "0"},
                                {"--temp", "1", "--top-k", "1"},
                                {"--temp", "1", "--top-p", "0"},
                                {"--temp", "1", "--min-p", "1"},
                                {"--temp", "1e-6"}}) {
        CAPTURE(choice.back());
        CHECK(ids(run_json(generate(model, expected.prompt, Words{"-n", "16"} + choice)), "tokens") == expected.greedy);
    }
}

TEST_CASE("generation stops at -n, at an end id or when the context is full, and says which") {
    Scratch scratch;
    std::string ending = copy_of(model, scratch);
    Expected expected(model);  // 32 ids, in a context of 128
    int end = expected.greedy[4];
    size_t until = std::find(expected.greedy.begin(), expected.greedy.end(), end) - expected.greedy.begin() + 1;
    replace(ending + "/generation_config.json", "\"eos_token_id\": 2",
            "\"eos_token_id\": [2, " + std::to_string(end) + "]");
    struct Case {
        std::string directory;
        Words flags;
        size_t tokens;
        const char *stop;
        int capacity = 128;
    };
    for (const Case &each : std::vector<Case>{
             {model, {"-n", "0"}, 0, "length", 32},
             {model, {"-n", "1"}, 1, "length", 33},
             {model, {"-n", "16"}, 16, "length", 48},
             {model, {"-n", "97"}, 97, "length"},  // all but the last are stored
             {model, {"-n", "98"}, 97, "context full"},
             {model, {"-n", "1000000000"}, 97, "context full"},
             {model, {"-n", "-1"}, 97, "context full"},
             {model, {"-n", "-1", "-c", "40"}, 9, "context full", 40},
             {ending, {"-n", "-1"}, until, "end id"},
             {model, {"-n", "97", "-c", "128"}, 97, "length"},
             {model, {}, 97, "context full"},
             {model, {"-c", "40"}, 9, "context full", 40},
             {model, {"-c", "33"}, 2, "context full", 33},
             {model, {"-c", "32"}, 1, "context full", 32},
             {model, {"-c", "32", "-n", "1"}, 1, "length", 32},
             {model, {"-c", "40", "-n", "9"}, 9, "length", 40},
             {ending, {"-n", "16"}, until, "end id", 48},
             {ending, {"-n", std::to_string(until)}, until, "end id", 32 + (int)until},
             {ending, {"-n", std::to_string(until - 1)}, until - 1, "length", 31 + (int)until},
             {ending, {"-n", "16", "--ignore-eos"}, 16, "length", 48},
         }) {
        for (const std::string &layout : Words{"contiguous", "none"}) {
            Words arguments = generate(each.directory, expected.prompt, each.flags + Words{"--cache", layout});
            Outcome result = run_well(arguments + Words{"--json"});
            Json root = parse(result.out);
            CHECK_MESSAGE(text(root, "stop") == each.stop, result);
            Ids tokens = ids(root, "tokens");
            CHECK_MESSAGE(tokens.size() == each.tokens, result);
            size_t known = std::min(tokens.size(), expected.greedy.size());
            CHECK(std::equal(tokens.begin(), tokens.begin() + (ptrdiff_t)known, expected.greedy.begin()));
            if (layout == "contiguous")  // of 256 bytes a position
                CHECK_MESSAGE(number(root, "cache.payload_bytes") == 256 * each.capacity, result);
            std::string notes = run_well(arguments).err;
            check_contains(notes, std::string("stopped: ") + each.stop + "\n");
        }
    }
}

TEST_CASE("-c is the number of positions stored: with 5 of them one token follows a prompt of 5") {
    Scratch scratch;
    const std::string file = scratch / "logits.npy";
    const Words line{"-m", builtin, "--ids", "0,80,81,82,83", "-c", "5", "-t", "1", "--ignore-eos"};
    const std::string dump = "--dump-logits " + file;
    for (const std::string &flags : Words{"", "--cache none", "--cache paged", "--draft ngram", dump})
        for (const std::string &count : Words{"", "-n 1"}) {
            const Json root = run_json(Words{"generate"} + line + words_of(flags + " " + count));
            CHECK(ids(root, "tokens").size() == 1);
            CHECK(text(root, "stop") == (count.empty() ? "context full" : "length"));
            if (contains(flags, file)) CHECK(read_npy(file).rows == 5);  // what follows the token has no room
        }
    const Json samples = run_json(Words{"generate"} + line + words_of("--samples 2 --temp 1 -s 3"));
    for (const Json *sample : items_of(at(samples, "samples"))) {
        CHECK(ids(sample, "tokens").size() == 1);
        CHECK(text(sample, "stop") == "context full");
    }
    spill(scratch / "r.jsonl", R"({"ids": [0, 80, 81, 82, 83]})");
    const Outcome batch = run_well(words_of("batch -c 5 -t 1 --ignore-eos -f " + (scratch / "r.jsonl")));
    const Json request = parse_json("a line", split(batch.out, '\n')[0]);
    CHECK((ids(request, "tokens").size() == 1 && text(request, "stop") == "context full"));
    CHECK(number(run_json(Words{"diff"} + line + words_of("--kv f32")), "compared") == 1);
    CHECK(number(run_json(Words{"diff"} + line + words_of("--kv f32 --draft ngram")), "compared") == 1);
}

TEST_CASE("--stop ends a text before one of several texts; the last token is still one of it, and each sample stops") {
    const Words base = {"generate", "-p", "Once upon a time", "-n", "40"};
    const Json whole = run_json(base);
    const std::string all = text(whole, "text"), first = all.substr(20, 5), later = all.substr(60, 5);
    REQUIRE(all.find(first) == 20);
    for (const Words &cache : {Words{}, Words{"--cache", "none"}, Words{"--draft", "ngram"}}) {
        const Json cut = run_json(base + cache + Words{"--stop", later, "--stop=" + first});
        CHECK(text(cut, "text") == all.substr(0, 20));
        CHECK(text(cut, "stop") == "stop");
        const Ids tokens = ids(cut, "tokens"), more = ids(whole, "tokens");
        CHECK((tokens.size() < more.size() && std::equal(tokens.begin(), tokens.end(), more.begin())));
    }
    const Outcome shown = run_well(base + Words{"--stop", first, "--no-display-prompt"});
    CHECK(shown.out == all.substr(0, 20) + "\n");
    check_contains(shown.err, "stopped: stop");
    const Json samples = run_json(base + Words{"--stop", ".", "--samples", "3", "--temp", "1", "-s", "1"});
    for (const char *sample : {"0", "1", "2"})
        CHECK(!contains(text(samples, std::string("samples.") + sample + ".text"), "."));
}

TEST_CASE("--activations bf16: one arithmetic for prompts and tokens, on either path; else a line that says why not") {
    const Words bf16{"--activations", "bf16"};
    const double gain = fast::pairs_gain();
    const bool pays = gain > 0.9;
    const std::string f32 = models + "llama_gqa_9_on_3", directory = pays ? f32 : builtin;
    const std::string why = pays         ? "belongs to weights in bf16, here are some in f32"
                            : gain == 0 ? "this processor has no instruction for it (AVX512_BF16)"
                                        : " times as many products a second in bf16 as in f32";
    check_refused(run(Words{"generate", "-m", directory, "--ids", "1,2"} + bf16), {"--activations bf16: ", why});
    if (!pays) return;
    const Words line{"-m", builtin, "-p", "Once upon a time", "-n", "40", "--ignore-eos"};
    Json root = run_json(Words{"diff", "--kv", "f32"} + line + bf16);
    CHECK(text(root, "verdict") == "the same: all logits have the same bits");
    Scratch scratch;
    auto rows = [&](const Words &rest) {
        run_well(Words{"generate", "--dump-logits", scratch / "rows.npy"} + line + rest);
        return read_npy(scratch / "rows.npy").values;
    };
    const std::vector<float> once = rows(bf16);
    CHECK(rows(bf16 + Words{"-ub", "3"}) == once);
    CHECK(rows(bf16 + Words{"-t", "1", "--cache", "paged"}) == once);
    CHECK(rows({}) != once);
}

TEST_CASE("a model that was tuned for chat says that its template is not applied; the text is the same") {
    Scratch scratch, other;
    const std::string said = "llm: this model was tuned for chat: its template is not applied";
    const Outcome plain = run_well({"generate", "-p", "Once", "-n", "3"});
    CHECK(!contains(plain.err, "chat"));
    const std::string file = copy_of(builtin, scratch), key = copy_of(builtin, other);
    spill(file + "/chat_template.jinja", "{{ messages }}");
    replace(key + "/tokenizer_config.json", R"("eos_token": ")", R"("chat_template": "{{}}", "eos_token": ")");
    for (const std::string &directory : {file, key}) {
        const Outcome result = run_well({"generate", "-m", directory, "-p", "Once", "-n", "3"});
        check_contains(result.err, said);
        CHECK(result.out == plain.out);
    }
}

TEST_CASE("a checkpoint's own sampling settings are offered where they are not used, and --temp auto takes them") {
    Scratch scratch;
    const std::string own = copy_of(builtin, scratch), line = "llm: this model's generation_config.json asks for ";
    auto err = [&](const std::string &settings, const Words &flags) {
        spill(own + "/generation_config.json", settings);
        return run_well(Words{"generate", "-m", own, "-p", "Once", "-n", "1", "-s", "1"} + flags).err;
    };
    const std::string settings = R"({"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20})",
                      offer = line + "--temp 0.6 --top-k 20 --top-p 0.95: --temp auto takes that";
    check_contains(err(settings, {}), offer);
    check_contains(err(settings, {"--temp", "0.6"}), offer);
    for (const Words &flags : {Words{"--temp", "auto"}, Words{"--temp", "0"},
                               Words{"--temp", "0.6", "--top-k", "20", "--top-p", "0.95"}})
        CHECK(!contains(err(settings, flags), line));
    // As in Transformers: 50 at most where the file does not say, all where it says 0, and no draw without do_sample.
    check_contains(err(R"({"do_sample": true, "min_p": 0.1})", {}), line + "--temp 1 --top-k 50 --min-p 0.1: ");
    check_contains(err(R"({"do_sample": true, "top_k": 0, "temperature": null})", {}), line + "--temp 1: ");
    for (const std::string greedy : {R"({"temperature": 0.6})", R"({"do_sample": false, "top_k": 5})"}) {
        CHECK(!contains(err(greedy, {}), line));
        check_contains(err(greedy, {"--temp", "auto"}), "llm: --temp auto: no generation_config.json asks for");
    }
    // The same text as with the flags; a flag goes before the file.
    auto said = [&](const Words &flags) {
        return run_well(Words{"generate", "-m", own, "-p", "Once", "-n", "20", "-s", "3"} + flags).out;
    };
    spill(own + "/generation_config.json", R"({"do_sample": true, "temperature": 3, "top_k": 7})");
    CHECK(said({"--temp", "auto"}) == said({"--temp", "3", "--top-k", "7"}));
    CHECK(said({"--temp", "auto", "--top-k", "1"}) == said({}));
    CHECK(said({"--temp", "auto"}) != said({}));
    spill(own + "/generation_config.json", R"({"do_sample": true, "temperature": "hot"})");
    check_refused(run({"generate", "-m", own, "-p", "Once", "--temp", "auto"}),
                  {"generation_config.json: temperature is \"hot\", expected a number from 0 to 1000"});
    CHECK(said({"--temp", "0"}) == said({"--temp", "0", "--top-k", "1"}));  // which takes nothing of it
}

TEST_CASE("an end that only tokenizer_config.json names ends the text, too, and is said") {
    Scratch scratch;
    std::string ending = copy_of(builtin, scratch);
    replace(ending + "/tokenizer_config.json", R"("eos_token": "<|endoftext|>")", R"("eos_token": ".")");
    const Words line{"generate", "-m", ending, "-p", "Once upon a time", "-n", "90"};
    Outcome result = run_well(line + Words{"--json"});
    Json root = parse(result.out);
    const Ids tokens = ids(root, "tokens");
    const int end = ids(run_json({"tokenize", "-m", builtin, "-p", "."}), "ids").back();
    CHECK(text(root, "stop") == "end id");
    CHECK(std::find(tokens.begin(), tokens.end(), end) == tokens.end() - 1);
    check_contains(result.err, "., id " + std::to_string(end) + ", ends the text: only tokenizer_config.json");
    result = run_well(line + Words{"--ignore-eos"});
    check_contains(result.err, "stopped: length\n");
    CHECK(!contains(result.err, "tokenizer_config.json"));
    CHECK(!contains(run_well({"generate", "-p", "Once", "-n", "1"}).err, "tokenizer_config.json"));
}

TEST_CASE("a prompt that begins with the token that the tokenizer puts before it: a note; it is shown as written") {
    const std::string twice = "which the tokenizer puts before a text, too: it stands there twice";
    const Words line{"generate", "-m", builtin, "-n", "0", "-p"};
    Outcome result = run_well(line + Words{"<|endoftext|>Once <|endoftext|> upon"});
    check_contains(result.err, "the prompt begins with <|endoftext|>, " + twice);
    CHECK(result.out == "<|endoftext|>Once <|endoftext|> upon\n");
    result = run_well(line + Words{"Once <|endoftext|> upon"});
    CHECK(result.out == "Once <|endoftext|> upon\n");
    CHECK(!contains(result.err, twice));
    result = run_well({"generate", "-m", builtin, "-n", "0", "--ids", "0,0"});
    CHECK(result.out == "<|endoftext|><|endoftext|>\n");  // as they were given: nothing is put before ids
    CHECK(!contains(result.err, twice));
}

TEST_CASE("tokenize on a terminal shows each piece beside its id") {
    const Words words{"tokenize", "-m", builtin, "-p", "Once upon\n\xf0\x9f\x98\x80"};
    const Ids all = ids(run_json(words), "ids");
    const std::string line = program_path() + " tokenize -m " + builtin + " -p 'Once upon\n\xf0\x9f\x98\x80'";
    std::string pieces;
    size_t count = 0;
    std::istringstream lines(on_terminal(line));
    for (std::string row; std::getline(lines, row); count++) {
        row.erase(row.find_last_not_of('\r') + 1);
        REQUIRE(count < all.size());
        CHECK(std::stoi(row.substr(0, 8)) == all[count]);
        REQUIRE(row.size() > 10);
        if (row[10] == '"') pieces += row.substr(11, row.size() - 12);
    }
    CHECK(count == all.size());
    CHECK(pieces == "<|endoftext|>Once upon\\n\xf0\x9f\x98\x80");
    CHECK(on_terminal(line + " --json").find("\"ids\"") != std::string::npos);
}

TEST_CASE("a ring goes on behind the model's context, in the same bytes") {
    Expected expected(model);  // 32 ids, in a context of 128
    auto ring = [&](const std::string &count) {
        return run_json(generate(model, expected.prompt, {"-n", count, "--ignore-eos", "--cache", "ring"}));
    };
    Json within = ring("16"), beyond = ring("300");
    Ids tokens = ids(beyond, "tokens");
    REQUIRE((text(beyond, "stop") == "length" && tokens.size() == 300));
    CHECK(ids(within, "tokens") == expected.greedy);
    CHECK(Ids(tokens.begin(), tokens.begin() + 16) == expected.greedy);
    CHECK(number(beyond, "cache.bytes") == number(within, "cache.bytes"));
    auto cache_line = [&](const Words &rest) {  // of 32 + 300 positions; the last token is not read any more
        Outcome result = run_well(generate(model, expected.prompt, Words{"--ignore-eos", "--cache", "ring"} + rest));
        return result.err.substr(result.err.find("\ncache "));
    };
    check_contains(cache_line({"-n", "300", "--window", "40"}), ", with the first 4 and the last 96 of 331 positions");
    check_contains(cache_line({"-n", "300", "--window", "40", "--sinks", "0"}), ", with the last 96 of 331 positions");
    check_contains(cache_line({"-n", "10", "--window", "40"}), ", with 41 positions stored");
    check_contains(cache_line({"-n", "65", "--window", "40"}), ", with 96 positions stored");  // all that it has
    check_contains(cache_line({"-n", "66", "--window", "40"}), " and the last 96 of 97 positions");
}

TEST_CASE("a ring sees what the layers see that look back furthest, and every command says and uses the same") {
    struct Case {
        std::string name, first;  // first: max_window_layers
        int window, sinks, told;  // of the ring; what info says of the layers that slide
    };
    for (const auto &[name, first, window, sinks, told] :
         std::vector<Case>{{"qwen2_window", "1", 124, 4, 6},  // its first layer sees all of its 128 positions
                           {"qwen2_window", "3", 124, 4, 0},  // a window that no layer has
                           {"qwen2_window", "0", 6, 0, 6},
                           {"qwen3_layer_types", "28", 124, 4, 5},
                           {"mistral_window", "", 8, 0, 8},
                           {"mistral_no_window", "", 124, 4, 0}}) {
        const std::string which = name + " " + first;
        CAPTURE(which);
        Scratch scratch;
        const std::string copy = copy_of(models + name, scratch), key = "\"max_window_layers\": ";
        if (name == "qwen2_window") replace(copy + "/config.json", key + "1", key + first);
        Expected expected(models + name);
        const Words ring = {"-m", copy, "--cache", "ring"}, f32 = {"--kv", "f32", "-n", "16", "--ignore-eos"};
        const Words prompt = Words{"--ids", joined(expected.prompt)} + f32;
        Ids naive =
            ids(run_json(generate(copy, expected.prompt, {"-n", "16", "--ignore-eos", "--cache", "none"})), "tokens");
        if (name != "qwen2_window" || first == "1") CHECK(naive == expected.greedy);
        Json text = run_json(Words{"generate"} + ring + prompt), diff = run_json(Words{"diff"} + ring + prompt);
        Json bench = run_json(words_of("bench -n 2 --depth 8 --prefill 8 --repeats 1") + ring);
        Json memory = run_json(Words{"memory"} + ring);
        CHECK(ids(text, "tokens") == naive);
        CHECK((number(memory, "window") == window && number(memory, "sinks") == sinks));
        for (const Json *cache : {at(text, "cache"), at(diff, "cache"), at(bench, "results.0")})
            CHECK((number(cache, "window") == window && number(cache, "sinks") == sinks));
        check_contains(run_well(Words{"generate"} + ring + prompt).err,
                       formatted("cache    ring %d + %d, K f32", window, sinks));
        CHECK(number(run_json({"info", "-m", copy}), "window") == told);
    }
}

// All layers of mistral_window see 8 positions, of qwen3_layer_types all but one 5.
TEST_CASE("diff: naive is the model, whatever a ring or pages of any size hold of it") {
    for (const std::string &name : Words{"qwen3", "mistral_window", "qwen3_layer_types"}) {
        const Expected expected(models + name);
        for (const std::string &cache : Words{"ring", "ring --window 128", "ring --window 24 --sinks 3",
                                              "ring --window 1 --sinks 0", "paged", "paged --page 1",
                                              "paged --page 65536"}) {
            CAPTURE(name + " " + cache);
            const std::string count = std::to_string(expected.greedy.size());
            const std::string line = "diff -m " + models + name + " --kv f32 -t 1 --ignore-eos --json -n " + count;
            Json root = parse(run(words_of(line + " --ids " + joined(expected.prompt) + " --cache " + cache)).out);
            const int seen = contains(cache, "24") ? 24 : contains(cache, "1 --sinks") ? 1 : 128;
            const bool narrower = name == "mistral_window" ? seen < 8 : seen < 128;
            CHECK((number(root, "dropped_positions") > 0) == narrower);
            CHECK((text(root, "verdict").find("the same: ") == 0) == !narrower);
            CHECK((number(root, "max_abs_logit_diff") > 1e-4) == narrower);
            for (size_t i = 0; i < expected.greedy.size(); i++)
                CHECK(number(root, "steps." + std::to_string(i) + ".token") == expected.greedy[i]);
            CHECK(text(root, "cache.layout") == words_of(cache)[0]);
        }
    }
}

TEST_CASE("of a paged cache the pages in use are counted, of the others all that was reserved") {
    // 2 layers, 2 KV heads of 16 numbers at f16, K and V: 256 bytes a position. The last token is never stored.
    const Words reserved{"--ignore-eos", "-c", "128", "-n"};
    for (int page : {1, 7, 16, 128}) {
        for (int count : {1, 4, 5, 30}) {
            CAPTURE(page);
            CAPTURE(count);
            Words paged{std::to_string(count), "--cache", "paged", "--page", std::to_string(page)};
            Json root = run_json(generate(model, {1, 34, 36}, reserved + paged));
            int used = (3 + count - 1 + page - 1) / page, all = (128 + page - 1) / page;
            CHECK(number(root, "cache.payload_bytes") == used * page * 256);
            CHECK(number(root, "cache.metadata_bytes") == 4 * (all + 2 * all));  // the table, and two numbers a page
        }
    }
    CHECK(number(run_json(generate(model, {1}, reserved + Words{"4"})), "cache.payload_bytes") == 128 * 256);
    std::string notes = run_well(generate(model, {1}, reserved + Words{"4"})).err;
    check_contains(notes, ": 32768 bytes, 0 of them metadata, with 4 positions stored\n");
}

// ---- Output that goes nowhere --------------------------------------------------------------------------------

TEST_CASE("a pipe that nobody reads ends the program") {
    for (const Words &mode : {Words{}, {"--json"}}) {
        for (bool ignored : {false, true}) {
            Setting setting;
            setting.nobody_reads = true;
            setting.ignore_sigpipe = ignored;
            Outcome result = run(generate(model, {1, 34}, mode), setting);
            CHECK_MESSAGE(result.status == (ignored ? 1 : 128 + SIGPIPE), result);
        }
    }
}

TEST_CASE("--dump-logits leaves nothing behind when it fails, nor harms what was there") {
    Scratch scratch;
    spill(scratch / "file", "not a directory");
    spill(scratch / "old.npy", "as it was");
    std::string damaged = copy_of(model, scratch);
    fill_with_nan(damaged);
    mkfifo((scratch / "pipe").c_str(), 0600);
    fs::create_symlink(scratch / "old.npy", scratch / "link");
    auto listing = [&] {
        std::set<std::string> names;
        for (auto &entry : fs::directory_iterator(scratch.path)) names.insert(entry.path().filename());
        return names;
    };
    std::set<std::string> before = listing();
    Setting full, later;  // behind what was written first
    full.file_bytes = 2000, later.file_bytes = 8192;
    struct Case {
        std::string directory, file, part;
        Setting setting;
    };
    for (const Case &each : std::vector<Case>{
             {model, scratch / "missing/x.npy", "No such file or directory", {}},
             {model, scratch / "file/x.npy", "Not a directory", {}},
             {model, "/proc/x.npy", "cannot write", {}},
             {model, scratch.path, "not a regular file", {}},
             {model, scratch / "pipe", "not a regular file", {}},
             {model, "/dev/null", "not a regular file", {}},
             {model, scratch / "link", "not a regular file", {}},
             {model, scratch / "x.npy", "cannot write", full},
             {model, scratch / "old.npy", "cannot write", full},
             {model, scratch / "x.npy", "cannot write", later},
             {damaged, damaged + "/config.json", "is a file that is read: name another", {}},
             {damaged, scratch / "x.npy", "a logit is nan", {}},
             {damaged, scratch / "old.npy", "a logit is nan", {}},
         }) {
        CAPTURE(each.file);
        Words arguments = generate(each.directory, {1, 34}, {"-n", "50", "--json", "--dump-logits", each.file});
        check_refused(run(arguments, each.setting), {each.part, each.directory == model ? each.file : ""},
                      each.setting.file_bytes == Setting().file_bytes ? 2 : 1);
        CHECK(listing() == before);
        CHECK(slurp(scratch / "old.npy") == "as it was");
    }
    CHECK(slurp(damaged + "/config.json") == slurp(model + "/config.json"));
    check_refused(run({"diff", "-m", damaged, "--ids", "1,34", "-n", "3", "--draft", "ngram"}), {"a logit is nan"});
    run_well(generate(model, {1, 34}, {"-n", "0", "--dump-logits", scratch / "old.npy"}));
    CHECK(read_npy(scratch / "old.npy").rows == 2);
    Outcome ended = run_shell(program_path() + " generate --ids 1 -n 100000 --ignore-eos --cache ring --dump-logits " +
                              (scratch / "old.npy") + " >/dev/null & sleep 0.3; kill $!; wait $!; echo $?");
    CHECK(ended.out == "143\n");
    CHECK(read_npy(scratch / "old.npy").rows == 2);
    CHECK(listing() == before);
    int without = 0;  // memory, while the file was being written
    Setting tight;
    for (tight.address_bytes = 60 << 20; run({"--help"}, tight).status == 0; tight.address_bytes -= 1 << 20) {
        const Words words{"-n", "1", "--dump-logits", scratch / "old.npy"};
        const Outcome result = run(generate(builtin, Ids(1200, 5), words), tight);
        CHECK_MESSAGE((result.status == 0 || result.status == 2), result);
        without += contains(result.err, "not enough memory");
        CHECK(listing() == before);
    }
    tight.address_bytes = (rlim_t)1 << 30;
    CHECK((without > 0 || run({"--help"}, tight).status != 0));  // AddressSanitizer alone asks for terabytes
}

TEST_CASE("an error is the only line, whatever there was to note before; bytes that are not UTF-8 are shown as such") {
    Scratch scratch;
    spill(scratch / "marked", "\xef\xbb\xbfOnce");
    const Words marked{"generate", "-m", builtin, "-f", scratch / "marked", "-n", "1", "-t", "256"};
    check_contains(run_well(marked).err, "byte order mark", "-t 256: taken as ");
    check_refused(run(marked + Words{"-c", "99999"}), {"-c 99999: this model was made for"});
    check_refused(run({"generate", "-p", "x", "--s\xff\xc3\xa9"}), {"--s\\xff\xc3\xa9: unknown flag"});
    std::string many = "x";
    for (int i = 0; i < 90; i++) many += "\xc3\xa9";
    // Not cut within a character.
    check_refused(run({"generate", "-p", "x", "-n", many}), {"-n " + many.substr(0, 79) + ": expected"});
    check_refused(run({"generate", "-f", scratch / "\xe2\x82"}), {"/\\xe2\\x82: No such file"});
    check_refused(run({"generate", "-p", "x", "-m", scratch / "\xfe"}), {"\\xfe"});
}

TEST_CASE("what is written to a closed stream does not get into a file") {
    Scratch scratch;
    auto logits = [&](const std::string &streams, int status) {
        const std::string file = scratch / "logits.npy";
        Outcome result = run_shell(program_path() + " generate -m " + model + " --ids 1,34 -n 3 -t 1 --dump-logits " +
                                   file + " " + streams);
        CHECK_MESSAGE(result.status == status, result);
        return slurp(file);
    };
    const std::string expected = logits("", 0);
    CHECK(logits(">&-", 1) == expected);
    CHECK(logits("2>&-", 0) == expected);
    CHECK(logits("<&- >&- 2>&-", 1) == expected);
    check_refused(run_shell(program_path() + " generate -m " + model + " -f - <&-"), {"-f -", "Bad file descriptor"});
}

TEST_CASE("a full disk behind standard output is an error") {
    for (const Words &arguments : {Words{"--help"},
                                   {"info", "-m", model},
                                   {"tokenize", "-m", builtin, "-p", "x"},
                                   generate(model, {1}),
                                   generate(model, {1}, {"--json"}),
                                   {"diff", "-m", model, "--ids", "1", "-n", "2"}}) {
        std::string line = program_path();
        for (const std::string &word : arguments) line += " " + word;
        check_refused(run_shell(line + " >/dev/full"), {"standard output"}, 1);
    }
}

// ---- Bad input -----------------------------------------------------------------------------------------------

const std::string story =
    "Once upon a time there was a happy village in the hills. Max and Lucy lived there, and they "
    "were the best of friends. In the morning, Max put the red key in the barn.";

// The least that each command which knows of caches needs.
Words start_of(const std::string &command, const std::string &text_file) {
    if (command == "eval") return {"eval", "-t", "1", "-m", builtin, "-f", text_file};
    if (command == "generate" || command == "diff") return {command, "-t", "1", "-m", model, "--ids", "1,2"};
    return {command, "-m", model};
}

TEST_CASE("flags that do not suit the model are refused by every command") {  // of flags alone: test_flags
    Scratch scratch;
    std::string file = scratch / "story.txt";
    spill(file, story);
    struct Case {
        const char *commands;
        Words flags, parts;
    };
    const char *all = "generate diff eval bench memory";
    const std::vector<Case> cases{
        {all, {"--kv", "f17"}, {"--kv f17: unknown type"}},  // one that needs no model
        {all, {"--cache", "ring", "--window", "8", "--sinks", "8"}, {"--sinks 8", "window of 8", "raise --window"}},
        {all, {"--cache", "ring", "--window", "8", "--sinks", "9"}, {"--sinks 9", "window of 8", "lower --sinks"}},
        {all, {"--cache", "ring", "--sinks", "60000"}, {"--sinks 60000", "lower --sinks"}},
        {"generate diff", {"-c", "129"}, {"-c 129", "128 positions", "lower -c"}},
        {"generate", {"-c", "129", "--cache", "paged"}, {"-c 129", "128 positions", "--cache ring"}},
        {"diff", {"-c", "129", "--cache", "ring"}, {"-c 129: this model was made for 128 positions: lower -c\n"}},
        {"generate", {"-c", "129", "--cache", "none"}, {"-c 129", "128 positions"}},
        {"generate", {"-c", "1", "--cache", "paged"}, {"has 2 tokens", "holds 1", "raise -c", "--cache ring"}},
        {"diff", {"-c", "1", "--cache", "ring"}, {"holds 1: shorten it, raise -c (this model was made for 128)\n"}},
        {"eval", {"-c", "1"}, {"-c 1", "2 to 1280"}},
        {"eval", {"-c", "1281"}, {"-c 1281", "2 to 1280"}},
        {"bench", {"--depth", "200"}, {"--depth 200", "128 positions"}},
        {"bench", {"--depth", "0,200"}, {"--depth", "200", "128 positions"}},
        {"bench", {"--depth", "128", "-n", "1"}, {"--depth 128", "128 positions"}},
        {"bench", {"--depth", "127", "-n", "2"}, {"--depth 127 and -n 2", "128 positions"}},
        {"bench", {"--prefill", "5,129"}, {"--prefill 129", "128 positions"}},
        {"bench", {"--depth", "0", "-n", "129"}, {"-n 129", "128 positions"}},
    };
    for (const Case &each : cases)
        for (const std::string &command : Words{"generate", "diff", "eval", "bench", "memory"})
            if (contains(each.commands, command)) check_refused(run(start_of(command, file) + each.flags), each.parts);
}

TEST_CASE("texts that cannot be evaluated") {
    Scratch scratch;
    std::string words;
    for (int i = 0; i < 3000; i++) words += "word ";
    const std::string nonsense("\x80\xff\x00\xfe{]", 6);
    struct Case {
        std::string name, content;
        Words parts;
    };
    std::vector<Case> cases{
        {"empty.txt", "", {"is empty"}},
        {"empty.jsonl", "", {"is empty"}},
        {"nonsense.txt", nonsense, {"not UTF-8"}},
        {"nonsense.jsonl", nonsense, {"line 1", "not UTF-8"}},
        {"broken.jsonl", "{\"text\": \"" + story + "\"}\n{\"text\": ", {"line 2", "not valid JSON"}},
        {"latin1.jsonl", "{\"text\": \"caf\xe9 " + story + "\"}", {"line 1", "not UTF-8"}},
        {"nul.jsonl", "{\"text\": \"Once\\u0000 " + story + "\"}", {"line 1"}},  // of which C sees the first word
        {"list.jsonl", "[]", {"line 1", "expected a JSON object"}},
        {"other.jsonl", "{\"txt\": \"" + story + "\"}", {"line 1: text is missing"}},
        {"number.jsonl", "{\"text\": 5}", {"line 1: text is 5, expected a text"}},
        {"one.jsonl", "{\"text\": \"\"}", {"line 1", "expected 2 to the 1280"}},  // the opening token alone
        {"long.jsonl", "{\"text\": \"" + words + "\"}", {"line 1", "tokens, expected 2 to the 1280"}},
    };
    for (const Case &each : cases) {
        std::string file = scratch / each.name;
        spill(file, each.content);
        check_refused(run({"eval", "-t", "1", "-m", builtin, "-f", file}), each.parts + Words{file});
        check_refused(run({"eval", "-t", "1", "-m", builtin, "--json", "-f", file}), each.parts + Words{file});
    }
    for (const std::string &end : Words{"", ".jsonl"}) {
        std::string missing = scratch / ("missing" + end), directory = scratch / ("directory" + end);
        fs::create_directory(directory);
        check_refused(run({"eval", "-m", builtin, "-f", missing}), {missing, "No such file"});
        check_refused(run({"eval", "-m", builtin, "-f", directory}), {directory, "Is a directory, expected a file"});
    }
    spill(scratch / "story.jsonl", "{\"text\": \"" + story + "\"}");
    check_refused(run({"eval", "-m", builtin, "-f", scratch / "story.jsonl", "-c", "8"}),
                  {"line 1", "tokens, expected 2 to the 8 of the context"});
    check_refused(run({"eval", "-m", model}), {"tokenizer.json", "No such file", "--ids"});
    check_refused(run({"eval", "-m", model, "--ids", "1"}), {"--ids", "one token"});
    check_refused(run({"eval", "-m", model, "--ids", "1,64"}), {"token id 64", "ids 0 .. 63"});
}

TEST_CASE("questions that make no sense are refused with their line") {
    // The fact, the answer and its place; "barn" stands at the end.
    const std::string text = story + " Where is the red key? The red key is in the barn.";
    std::string fact = std::to_string(story.find("barn")), answer = std::to_string(text.find("The red key"));
    std::string place = std::to_string(text.rfind("barn")),
                length = "a whole number from 1 to " + std::to_string(text.size() - 2);
    Scratch scratch;
    std::string file = scratch / "questions.jsonl";
    auto run_with = [&](const std::string &questions) {
        std::string good = "{\"text\": \"" + story + "\"}\n";
        spill(file, good + "{\"text\": \"" + text + "\", \"questions\": " + questions + "}\n");
        return run({"eval", "-t", "1", "--repeats", "1", "--json", "-m", builtin, "-f", file});
    };
    auto asked = [](const std::string &fact, const std::string &answer, const std::string &place) {
        return "[{\"fact_char\": " + fact + ", \"answer_char\": " + answer + ", \"place_char\": " + place + "}]";
    };
    Outcome good = run_with(asked(fact, answer, place));
    REQUIRE_MESSAGE(good.status == 0, good);
    CHECK(number(parse(good.out), "results.0.recall.0.questions") == 1);
    for (const std::string &bad :
         Words{"-1", "0", "1.5", std::to_string(text.size()), "99999999999", "1e300", "-1e300"}) {
        CAPTURE(bad);
        check_refused(run_with(asked(bad, answer, place)), {file, "line 2", "a question: fact_char", length});
        check_refused(run_with(asked(fact, bad, place)), {file, "line 2", "a question: answer_char", length});
        check_refused(run_with(asked(fact, answer, bad)), {file, "line 2", "a question: place_char", length});
    }
    for (const std::string &bad : Words{"\"" + fact + "\"", "true", "null", "[9]", "{}"}) {
        CAPTURE(bad);
        Outcome result = run_with(asked(bad, answer, place));
        check_refused(result, {file, "line 2", "a question: fact_char"});
        CHECK_MESSAGE(!contains(result.err, "-1"), result);  // which nobody wrote
    }
    check_refused(run_with("[{\"fact_char\": " + fact + ", \"answer_char\": " + answer + "}]"),
                  {file, "line 2", "a question: place_char"});
    check_refused(run_with(asked(fact, "nan", place)), {file, "line 2", "not valid JSON"});
    check_refused(run_with(asked(fact, answer, fact)), {file, "line 2", "ends before it begins"});
    // An answer that stands before its fact.
    check_refused(run_with(asked(answer, fact, place)), {file, "line 2", "fact"});
    check_refused(run_with(asked(place, answer, place)), {file, "line 2", "fact"});
    for (const std::string &bad : Words{"7", "\"none\"", "[7]", "{\"first\": {}}"})
        check_refused(run_with(bad),
                      {file, "line 2", bad == "[7]" ? "a question: fact_char is missing" : "questions is"});
}

TEST_CASE("prompts that cannot be used") {
    Scratch scratch;
    const std::string foreign = copy_of(model, scratch);  // whose vocabulary is not the model's
    fs::copy(builtin + "/tokenizer.json", foreign + "/tokenizer.json");
    spill(scratch / "latin1", "caf\xe9");
    fs::create_directory(scratch / "directory");
    std::string words, many = "1";
    for (int i = 0; i < 3000; i++) words += "word ";
    for (int i = 0; i < 128; i++) many += ",1";
    struct Case {
        std::string directory;
        Words flags, parts;
    };
    std::vector<Case> cases{
        {builtin, {}, {"no prompt", "-p TEXT"}},
        {builtin, {"-f", scratch / "missing"}, {scratch / "missing", "No such file"}},
        {builtin, {"-f", scratch / "directory"}, {scratch / "directory", "Is a directory, expected a file"}},
        {builtin, {"-p", "\xff"}, {"the prompt: byte 0", "not UTF-8"}},  // all that is not: test_tokenizer
        {builtin, {"-f", scratch / "latin1"}, {"byte 3", "0xE9", "not UTF-8"}},
        {builtin, {"-p", words}, {"tokens, the context holds", "shorten it"}},
        {model, {"--ids", many}, {"the prompt has 129 tokens, the context holds 128", "shorten it"}},
        {model, {"--ids", "1,2,3", "-c", "2"}, {"has 3 tokens, the context holds 2", "raise -c", "128"}},
        {model, {"--ids", "1", "-c", "129"}, {"-c 129", "128 positions"}},
        {model, {"--ids", "1,64"}, {"token id 64", "ids 0 .. 63"}},
        {model, {"-p", "hi"}, {model + "/tokenizer.json", "--ids 1,2,3"}},
        {foreign, {"-p", "Once upon a time"}, {"token id", "has 64 entries"}},
    };
    for (const Case &each : cases) {
        for (const std::string &command : Words{"generate", "diff"}) {
            std::string file = scratch / "x.npy";
            Words dump = command == "generate" ? Words{"--dump-logits", file} : Words{};
            check_refused(run(Words{command, "-m", each.directory} + each.flags + dump), each.parts);
            check_refused(run(Words{command, "-m", each.directory, "--json"} + each.flags), each.parts);
            CHECK(!fs::exists(file));
        }
    }
    check_refused(run({"tokenize", "-m", builtin, "-p", "a\x80", "--json"}), {"byte 1", "not UTF-8"});
    check_refused(run({"tokenize", "-m", builtin, "--ids", "1,1000000"}), {"1000000"});
    CHECK(number(run_json({"diff", "-m", model, "--ids", many.substr(2), "--kv", "f32"}), "compared") == 1);
}

TEST_CASE("checkpoints that cannot be used") {  // all that can be wrong with one: test_model
    struct Case {
        std::string base;
        std::function<void(const std::string &)> damage;
        Words parts;
    };
    auto cut_off = [](const char *file, size_t bytes) {
        return [=](const std::string &d) { fs::resize_file(d + "/" + file, bytes); };
    };
    const std::vector<Case> cases{
        {model, [](auto &d) { fs::remove_all(d); }, {"No such file or directory"}},
        {model,
         [](auto &d) { fs::remove_all(d), spill(d, "x"); },
         {"Not a directory; it is a file: give its directory, -m "}},
        {model,
         [](auto &d) { fs::remove(d + "/config.json"); },
         {"config.json: cannot open it: No such file or directory; expected the directory"}},
        {model, [](auto &d) { replace(d + "/config.json", "Qwen3For", "Qwen9For"); }, {"Qwen9For", " Qwen3 "}},
        {model, [](auto &d) { replace(d + "/config.json", "_size\": 64", "_size\": 65"); }, {"[64, 32]", "[65, 32]"}},
        {model, cut_off("model.safetensors", 500), {"model.safetensors", "cut off"}},
        {model, [](auto &d) { spill(d + "/tokenizer.json", "{\"model\": 7}"); }, {"tokenizer.json", "model"}},
        {builtin, cut_off("tokenizer.json", 4000), {"tokenizer.json", "JSON"}},
    };
    for (const Case &each : cases) {
        Scratch scratch;
        std::string directory = copy_of(each.base, scratch);
        each.damage(directory);
        for (const Words &arguments : {Words{"generate", "--ids", "1,2"}, {"diff", "--ids", "1,2", "--json"}})
            check_refused(run(arguments + Words{"-m", directory}), each.parts + Words{directory});
        Outcome info = run({"info", "-m", directory});  // of what has a config.json it says why it does not run
        if (info.status == 2) check_refused(info, each.parts + Words{directory});
        for (const std::string &part : info.status == 1 ? each.parts + Words{"no: " + directory} : Words{})
            check_contains(info.out, part);
        CHECK_MESSAGE(info.status > 0, info);
    }
}

TEST_CASE("weights that are cut while they are read end the program with a line, and leave no unfinished file") {
    Scratch scratch;
    const std::string cut = copy_of(builtin, scratch), dumped = scratch / "dumped.npy";
    Terminal terminal({program_path(), "generate", "-m", cut, "-p", "Once", "-n", "-1", "--ignore-eos", "--cache",
                       "ring", "--dump-logits", dumped});
    REQUIRE(terminal.wait_for("Once", 60));
    auto files = [&] { return std::distance(fs::directory_iterator(scratch.path), fs::directory_iterator()); };
    CHECK(files() == 2);  // the model's folder, and the unfinished file
    fs::resize_file(cut + "/model.safetensors", 100);
    while (terminal.read_more()) continue;
    CHECK(terminal.status() == 2);
    check_contains(terminal.seen,
                   "llm: a file that is read was cut meanwhile, or its disk fails: fetch the model again");
    CHECK(files() == 1);
}

TEST_CASE("what is no directory of a checkpoint is named with its cure; old spellings run") {
    Scratch scratch;
    const std::string root = scratch / "models--a--b", snapshot = root + "/snapshots/0123";
    auto refused = [](const std::string &given, const Words &parts) {
        for (const Words &command : {Words{"generate", "-p", "x"}, {"info"}, {"tokenize", "-p", "x"}, {"memory"}})
            program::check_refused(run(command + Words{"-m", given}), parts);
    };
    refused("some/model.gguf", {"some/model.gguf/", "GGUF is not read here", "weights_tools/from_gguf.py"});
    refused("Qwen/Qwen3-0.6B", {"`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`, then -m Qwen3-0.6B"});
    refused("./Qwen/Qwen3-0.6B", {"expected the directory that holds config.json"});
    refused("models/a/b", {"expected the directory that holds config.json"});
    fs::create_directories(root + "/snapshots/empty");
    refused(root, {"it holds no whole snapshot"});
    fs::copy(model, snapshot);
    for (const char *end : {"", "/", "/snapshots", "/snapshots/"})
        refused(root + end, {root, "give its snapshot: -m " + snapshot});
    fs::create_directories(root + "/snapshots/9876"), spill(root + "/snapshots/9876/config.json", "{}");
    fs::create_directories(root + "/refs"), spill(root + "/refs/main", "0123");  // the one that was fetched last
    for (const char *end : {"", "/snapshots/"}) refused(root + end, {"give its snapshot: -m " + snapshot});
    spill(root + "/refs/main", "9876\n");
    refused(root, {"give its snapshot: -m " + root + "/snapshots/9876"});
    refused(snapshot + "/model.safetensors", {"it is a file: give its directory, -m " + snapshot});
    refused("~/models/a", {"~/models/a", "a shell does not replace ~ within quotes: write $HOME"});
    const std::string other = scratch / "other";
    fs::create_directories(other), spill(other + "/a.Q4_K_M.gguf", "GGUF");
    refused(other, {"it holds GGUF, a.Q4_K_M.gguf, which is not read here: weights_tools/from_gguf.py"});
    spill(other + "/adapter_config.json", "{}");
    refused(other, {"it holds an adapter (LoRA): merge it into its base model"});
    // A file that is another thing, by any command that reads it.
    const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 11422654\n",
                      page = "<!DOCTYPE html>\n<html class=\"\"><head></head></html>\n";
    for (const std::string file : {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                                   "model.safetensors", "chat_template.jinja"}) {
        const std::string damaged = copy_of(builtin, scratch);
        const Words line = Words{file == "chat_template.jinja" ? "chat" : "generate", "-m", damaged} +
                           (file == "chat_template.jinja" ? Words{} : Words{"-p", "x"});
        spill(damaged + "/" + file, pointer);
        check_refused(run(line),
                      {damaged + "/" + file + ": is a Git LFS pointer, not the file itself: run `git lfs pull`"});
        spill(damaged + "/" + file, page);
        if (line[0] == "generate")
            check_refused(run(line), {damaged + "/" + file + ": is a web page, not the file itself: fetch it again"});
        fs::remove_all(damaged);
    }
    spill(snapshot + "/tokenizer.model", "x");
    for (const std::string command : {"generate", "tokenize", "diff"}) {
        Outcome outcome = run({command, "-m", snapshot, "-p", "x"});
        check_refused(outcome, {"tokenizer.model is not read here: AutoTokenizer.from_pretrained(DIR)"});
        CHECK(contains(outcome.err, "--ids") == (command != "tokenize"));  // which needs it for ids, too
    }
    Expected expected(models + "llama_mha");
    std::string copy = copy_of(models + "llama_mha", scratch);
    std::string config = replaced(slurp(copy + "/config.json"), "LlamaForCausalLM", "LLaMAForCausalLM");
    config = replaced(config, "{", "{\"time_step_limit\": [0.0, Infinity], ");
    config = replaced(config, "\"torch_dtype\": \"float32\"", "\"torch_dtype\": \"auto\"");
    spill(copy + "/config.json", config);
    CHECK(ids(run_json(generate(copy, expected.prompt, {"-n", "16"})), "tokens") == expected.greedy);
}

TEST_CASE("a prompt from standard input, a pipe; an empty one begins with the token that opens a text") {
    auto tokens = [&](const std::string &line) {
        Outcome result = run_shell(line);
        REQUIRE_MESSAGE(result.status == 0, result);
        return ids(parse(result.out), "prompt_ids");
    };
    const std::string llm = program_path() + " generate --json -n 2 -t 1 ";
    Ids expected = ids(run_json({"tokenize", "-m", builtin, "-p", "the key"}), "ids");
    CHECK(tokens("printf 'the key' | " + llm + "-f -") == expected);
    CHECK(tokens("printf 'the key' | " + llm + "-f /dev/stdin") == expected);
    CHECK(tokens(llm + "-p ''") == Ids{expected[0]});
    CHECK(tokens("true | " + llm + "-f -") == Ids{expected[0]});
    CHECK(tokens("echo 'the key' | " + llm + "-f -") == expected);  // the newline that ends a line is not the prompt's
    Outcome marked = run_shell("printf '\\357\\273\\277the key' | " + llm + "-f -");
    CHECK_MESSAGE((marked.status == 0 && ids(parse(marked.out), "prompt_ids") == expected), marked);
    CHECK_MESSAGE(marked.err == "llm: -f: begins with a byte order mark, which is left out\n", marked);
}

TEST_CASE("weights that give no number are named, not sampled from") {
    Scratch scratch;
    std::string directory = copy_of(model, scratch);
    fill_with_nan(directory);
    for (const std::string &layout : Words{"none", "contiguous"})
        check_refused(run(generate(directory, {1, 2}, {"--cache", layout, "--json"})),
                      {"position 1", "a logit is", "nan", "weights damaged"});
    check_refused(run({"diff", "-m", directory, "--ids", "1,2", "--json"}), {"a logit is", "nan"});
    for (const std::string &weights : Words{"stored", "int8"})
        check_refused(run(generate(directory, {1, 2}, {"--weights", weights, "--json"})), {"a logit is", "nan"});
    fill_with_nan(directory, true);
    check_refused(run(generate(directory, {1, 2}, {"--weights", "int8"})), {"--weights int8", "NaN", "leave the flag"});
    Outcome text = run(generate(directory, {1, 2}));
    CHECK_MESSAGE((text.status == 2 && text.err.rfind("llm: position 1", 0) == 0), text);
}

TEST_CASE("where a key or value is more than its type holds, every command says which type and what to try") {
    Scratch scratch;
    const std::string directory = copy_of(models + "llama_bias", scratch);
    auto fill = [&](const std::string &side, float number) {
        std::vector<float> bias(16);
        // Both signs: no query has an infinite score.
        for (size_t i = 0; i < bias.size(); i++) bias[i] = i % 2 ? -number : 0.99f * number;
        fill_tensor(directory, "model.layers.1.self_attn." + side + "_proj.bias", bias);
    };
    auto refused = [&](const Words &command, const std::string &type, const std::string &has) {
        check_refused(run(command + Words{"-m", directory, "-t", "1", "--json"}),
                      {"a logit is ", "is a key or a value more than " + type + " holds (" + has + "): try --kv bf16"});
    };
    const std::string ids = "5,6,7,8,9,10,11,12";
    const std::vector<Words> all = {{"generate", "--ids", ids, "-n", "2"},
                                    {"diff", "--ids", ids, "-n", "2"},
                                    {"eval", "--ids", ids, "--repeats", "1"},
                                    {"show", "--ids", ids},
                                    {"bench", "--depth", "4", "--prefill", "8", "-n", "2", "--repeats", "1"}};
    fill("k", 70000);
    for (const Words &command : all) refused(command, "f16", "65504");
    refused(all.back() + Words{"--kv", "f32,f16"}, "f16", "65504");  // its decode
    for (const std::string &layout : Words{"paged", "ring"})
        refused(all[0] + Words{"--cache", layout}, "f16", "65504");
    for (const std::string &type : Words{"int4", "int2"}) refused(all[0] + Words{"--kv", type}, type, "65504");
    refused({"generate", "--ids", ids, "-ctk", "f16", "-ctv", "f32"}, "f16", "65504");
    for (const std::string &type : Words{"bf16", "f32", "fp8", "int8"})  // which hold it
        for (const Words &command : all) CHECK(run(command + Words{"-m", directory, "--kv", type}).status < 2);
    fill("k", 3e5);
    refused(all[0] + Words{"--kv", "fp8"}, "fp8", "114632");
    fill("k", 9e6);
    refused(all[0] + Words{"--kv", "int8"}, "int8", "8.31901e+06");
    fill("k", 0), fill("v", -1e5);
    refused(all[0], "f16", "65504");
    for (const std::string &layout : Words{"contiguous", "none"}) {  // weights that are damaged are still blamed
        fill("v", NAN);
        Outcome shown = run({"show", "-m", directory, "--ids", ids, "--cache", layout, "--json"});
        check_refused(shown, {"a logit is", "weights damaged"});
    }
}

// A checkpoint of one layer, all zeros, whose embedding has `rows` rows of 8,192 floats. The file is sparse: it takes
// no room on the disk.
void write_sparse_model(const std::string &directory, int64_t rows) {
    Report tensors;
    int64_t end = 0;
    auto add = [&](const std::string &name, const std::vector<int64_t> &shape) {
        std::vector<int64_t> offsets = {end, end += 4 * shape[0] * (shape.size() > 1 ? shape[1] : 1)};
        tensors.add((name + ".weight").c_str(),
                    Report().add("dtype", "F32").add("shape", shape).add("data_offsets", offsets));
    };
    const std::string layer = "model.layers.0.", attention = layer + "self_attn.", mlp = layer + "mlp.";
    for (const std::string &norm : {layer + "input_layernorm", layer + "post_attention_layernorm"}) add(norm, {8192});
    for (const std::string &name :
         {attention + "q_proj", attention + "k_proj", attention + "v_proj", mlp + "gate_proj", mlp + "up_proj"})
        add(name, {64, 8192});
    for (const std::string &name : {attention + "o_proj", mlp + "down_proj"}) add(name, {8192, 64});
    add("model.norm", {8192});
    add("model.embed_tokens", {rows, 8192});
    std::string header = tensors.json(), file = directory + "/model.safetensors";
    header.resize((header.size() + 63) / 64 * 64, ' ');  // so that the numbers are aligned
    uint64_t size = header.size();
    fs::create_directory(directory);
    spill(directory + "/config.json",
          R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_act":"silu","head_dim":64,)"
          R"("hidden_size":8192,"intermediate_size":64,"max_position_embeddings":64,"num_attention_heads":1,)"
          R"("num_hidden_layers":1,"num_key_value_heads":1,"rms_norm_eps":1e-6,"rope_theta":10000,)"
          R"("tie_word_embeddings":true,"torch_dtype":"float32","vocab_size":)" +
              std::to_string(rows) + "}");
    spill(file, std::string((const char *)&size, sizeof size) + header);
    fs::resize_file(file, sizeof size + size + end);
}

TEST_CASE("weights that do not fit into the machine are refused where they are moved, and can be read where they are") {
    Scratch scratch;
    std::string directory = scratch / "model";
    int64_t memory = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGE_SIZE);
    write_sparse_model(directory, memory / 8192 + 1);  // as int8 a little more than there is, as float32 four times
    for (const std::string &weights : Words{"copied", "int8"})
        check_refused(run(generate(directory, {1, 2}, {"--weights", weights})),
                      {"the weights need", "this machine has", "another --weights"});
    Outcome info = run({"info", "-m", directory});
    CHECK_MESSAGE(info.status == 0, info);
}

TEST_CASE("the built-in checkpoint needs 500,000 KiB of addresses at most, no library of CUDA, and no GPU") {
    Setting tight;
    tight.address_bytes = (rlim_t)500000 << 10;
    const Words words{"generate", "-p", "Once upon a time", "-n", "20", "--device", "cpu"};
    if (run({"--help"}, tight).status == 0)  // AddressSanitizer alone asks for terabytes of addresses
        CHECK_MESSAGE(run(words, tight).status == 0, run(words, tight));
    Outcome linked = run_shell("ldd " + program_path());
    CHECK_MESSAGE((linked.status == 0 && !contains(linked.out, "libcu")), linked);
    Outcome card = run({"generate", "-p", "Once", "-n", "2", "--device", "cuda"});
    const bool none = contains(card.err, "no NVIDIA driver") || contains(card.err, "no CUDA-capable device");
    CHECK_MESSAGE((card.status == 0 || none || contains(card.err, "built without CUDA")), card);
}

TEST_CASE("memory that cannot be had is refused at once") {
    Scratch scratch;
    std::string directory = copy_of(models + "head_dim_256", scratch);  // 1 layer, 1 KV head: 2 KiB a token in f32
    replace(directory + "/config.json", "\"max_position_embeddings\": 128", "\"max_position_embeddings\": 1073741824");
    auto computed = [] {
        rusage usage = {};
        getrusage(RUSAGE_CHILDREN, &usage);
        return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec;
    };
    const long start = computed();
    Words prompt{"-m", directory, "--ids", "1,2", "--kv", "f32"};
    for (const std::string &command : Words{"generate", "diff"})
        check_refused(run(Words{command, "-c", "1073741824"} + prompt), {"cache needs 2048.0 GiB", "lower -c"});
    for (const std::string &command : Words{"generate", "diff"})
        check_refused(run(Words{command, "-c", "1073741824", "--cache", "paged"} + prompt),
                      {"cache needs 2048.8 GiB", "lower -c"});  // page tables, too
    for (const Words &command : {Words{"generate", "--ids", "1,2"}, {"diff", "--ids", "1,2"}, {"bench"}})
        check_refused(run(command + Words{"-m", directory, "--kv", "f32", "--cache", "ring"}),
                      {"cache needs 2048.0 GiB", "--window"});
    Setting tight;
    tight.address_bytes = (rlim_t)1 << 30;
    if (run({"--help"}, tight).status == 0)  // AddressSanitizer alone asks for terabytes of addresses
        check_refused(run(Words{"generate", "-c", "2097152"} + prompt, tight),
                      {"the KV cache of 4.0 GiB, its keys or values", "2.0 GiB of memory cannot be had", "lower -c"});
    Words ring{"-m", directory, "--ids", "1,2", "--kv", "int8", "--cache", "ring", "--window", "16777216"};
    if (run({"--help"}, tight).status == 0)
        check_refused(run(Words{"generate"} + ring, tight), {"GiB", "--window"});  // -c is not for a ring
    CHECK(computed() - start < 20);
    run_json(Words{"generate", "-n", "3"} + prompt);  // what is asked for counts, not what the model could
}

TEST_CASE("without -m, the built-in checkpoint beside the program, wherever one stands") {
    Scratch scratch;
    fs::copy(program_path(), scratch / "llm");
    Setting elsewhere;
    elsewhere.program = scratch / "llm";
    Words arguments{"tokenize", "-p", "the key"};
    check_refused(run(arguments, elsewhere), {scratch / "weights_tools/builtin", "give -m DIR"});
    fs::create_directory(scratch / "weights_tools");
    fs::create_directory_symlink(fs::absolute(builtin), scratch / builtin);
    Outcome result = run(arguments, elsewhere);
    CHECK_MESSAGE(result.status == 0, result);
    CHECK(result.out == run_well({"tokenize", "-m", builtin, "-p", "the key"}).out);
}

TEST_CASE("beside programs that take every core, two threads do not wait for each other") {
    std::vector<pid_t> busy;
    for (long core = 0; core < sysconf(_SC_NPROCESSORS_ONLN); core++) {
        busy.push_back(fork());
        for (volatile int i = 0; busy.back() == 0;) i = i + 1;
    }
    const std::string two = usable_threads("", nullptr) > 1 ? "2" : "1";
    double best[2] = {};  // tokens/s of one thread and of two; of some tries the best, as these depend on the others
    for (int i = 0; i < 6; i++) {
        Json result = run_json(
            {"generate", "-p", "Once", "-n", "300", "--ignore-eos", "--device", "cpu", "-t", i % 2 ? two : "1"});
        best[i % 2] = std::max(best[i % 2], 1 / number(result, "decode.seconds"));
    }
    for (pid_t child : busy) kill(child, SIGKILL), waitpid(child, nullptr, 0);
    CHECK(best[1] > 0.4 * best[0]);  // a slice of the scheduler's at each barrier: 0.003
}

// ---- Ctrl-C and progress -----------------------------------------------------------------------------------

// Runs a command with standard error on a terminal; `presses` Ctrl-C come once that has said `after`. Then: seconds
// that it computes from the first of them to the end.
struct Pressed : Outcome {
    double seconds = -1;
};
static Pressed press(const Words &arguments, const std::string &after, int presses = 1) {
    Pressed result;
    Scratch scratch;
    const Words words = Words{program_path()} + arguments;
    Terminal terminal(words, 80, scratch / "out");
    double start = 0;
    while (terminal.read_more())
        for (; presses > 0 && contains(terminal.seen, after); presses--) {
            if (start == 0) start = terminal.computed();
            terminal.interrupt();
        }
    if (start > 0) result.seconds = terminal.computed() - start;
    result.status = terminal.status();
    result.command = joined(words, " "), result.err = terminal.seen, result.out = slurp(scratch / "out");
    return result;
}

TEST_CASE("one Ctrl-D ends a text that is typed") {
    Terminal terminal({program_path(), "generate", "-n", "1", "-f", "-"});
    terminal.type("Once upon\n\4", true);
    CHECK(terminal.wait_for("stopped: length"));
}

TEST_CASE("Ctrl-C is heard within a pass of seconds: what there is is said, with status 130; progress is erased") {
    // The built-in checkpoint takes many seconds for 8,000 tokens at once.
    Scratch scratch;
    fs::copy(builtin, scratch / "long");
    replace(scratch / "long/config.json", "\"max_position_embeddings\": 1280", "\"max_position_embeddings\": 9000");
    Ids longer;
    for (int i = 0; i < 8000; i++) longer.push_back(i % 500 + 2);
    const Words line{"-m", scratch / "long", "--ids", joined(longer), "-t", "1"};
    struct Case {
        Words words;
        std::string after;
        Words keys;
    };
    const std::vector<Case> cases = {
        {Words{"generate", "-ub", "8000"} + line, "tokens/s, ", {"text stop", "list tokens", "object prefill"}},
        {Words{"generate", "--cache", "none"} + line, "naive pass: ", {"text stop", "list tokens"}},
        {Words{"diff", "-n", "3"} + line, "naive pass: ", {}},
        {Words{"show"} + line, "prefill: ", {"list prompt", "bool interrupted"}},
        {Words{"bench", "--prefill", "8000", "--depth", "0", "-m", scratch / "long", "-t", "1"},
         "prefill: ",
         {"list results", "bool interrupted"}},
        {Words{"eval"} + line, "tokens, ", {"list results", "bool interrupted"}}};
    for (const Case &each : cases)
        for (bool json : {false, true}) {
            Pressed result = press(each.words + (json ? Words{"--json"} : Words{}), each.after);
            CHECK_MESSAGE(result.status == 130, result);
            CHECK_MESSAGE((result.seconds >= 0 && result.seconds < 2), result.seconds << " s: " << result);
            check_contains(result.err, " s left", "\33[J");  // it stood there, and was erased
            CHECK_MESSAGE(result.err.rfind("\33[J") > result.err.rfind(" left"), result);
            CHECK_MESSAGE(!contains(result.err, "e+"), result);  // 1120 tokens/s, not 1.12e+03
            if (json) check_keys(parse(result.out), each.keys);
        }
    Pressed twice = press(Words{"generate", "--cache", "none"} + line, "naive pass: ", 2);
    CHECK_MESSAGE(twice.status == 130, twice);
    CHECK_MESSAGE(twice.err.rfind("\33[J") > twice.err.rfind(" left"), twice);
    Outcome piped = run_well({"generate", "-m", builtin, "--ids", joined({2, 3}), "-n", "1", "-t", "1"});
    CHECK_MESSAGE(!contains(piped.err, "\33"), piped);  // not a terminal
}
