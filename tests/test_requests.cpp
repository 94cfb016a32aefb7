// llm batch and generate --samples as their user meets them: lines in, lines out. That a text does not depend on its
// company is shown in test_batch.cpp; here, that the program says so of what it is given.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "files.h"
#include "program.h"

using namespace program;

const std::string shared = "Once upon a time there was a small village near a river. Tom, Mia and Ben lived there. ";

// A run of llm batch: each line of standard output is JSON; the last one is the summary.
struct Batch {
    Outcome outcome;
    std::map<std::string, Json> requests;  // by id
    Words order;                           // ids, as they ended
    Json summary;
    Batch(const std::string &lines, const Words &rest = {}, int status = 0) {
        Scratch scratch;
        spill(scratch / "requests.jsonl", lines);
        outcome = run(Words{"batch", "-f", scratch / "requests.jsonl", "-t", "1"} + rest);
        REQUIRE_MESSAGE(outcome.status == status, outcome);
        std::vector<std::string> out = split(outcome.out, '\n');
        REQUIRE((out.size() >= 2 && out.back().empty()));
        out.pop_back();
        summary = parse_json("summary", out.back());
        out.pop_back();
        for (const std::string &line : out) {
            Json json = parse_json("line", line);
            order.push_back(text(json, "id"));
            requests[order.back()] = std::move(json);
        }
    }
    double of(const std::string &id, const std::string &key) { return number(requests.at(id), key); }
};

std::string request(const std::string &id, const std::string &prompt, int count, const std::string &rest = "") {
    return "{\"id\": " + json_of(id) + ", \"prompt\": " + json_of(prompt) + ", \"n\": " + std::to_string(count) + rest +
           "}\n";
}

// ---- llm batch -----------------------------------------------------------------------------------------------

TEST_CASE("each request has the text that generate gives it, and the summary counts") {
    const std::string lines = request("a", shared + "Tom", 20) +
                              request("b", shared + "Mia", 12, ", \"temp\": 0.9, \"top_k\": 20, \"seed\": 7") +
                              request("c", "In the morning", 9,
                                      ", \"temp\": 1, \"top_p\": 0.9, \"min_p\": 0.01, "
                                      "\"seed\": 3, \"at\": 0.02");
    for (const std::string &flags :
         Words{"", "--cache contiguous", "--kv int8 --page 4", "--kv int4", "--cache ring"}) {
        Batch batch(lines, words_of(flags) + Words{"--against", "alone", "-np", "2"});
        const Words common = Words{"generate", "-t", "1"} +
                             words_of(flags.empty() || flags[2] == 'k' ? "--cache paged " + flags : flags);
        const std::map<std::string, Words> each = {
            {"a", {"-p", shared + "Tom", "-n", "20"}},
            {"b", {"-p", shared + "Mia", "-n", "12", "--temp", "0.9", "--top-k", "20", "-s", "7"}},
            {"c", {"-p", "In the morning", "-n", "9", "--temp", "1", "--top-p", "0.9", "--min-p", "0.01", "-s", "3"}}};
        double tokens = 0;
        for (auto &[name, words] : each) {
            const std::string &id = name;  // clang 14 captures no structured binding
            CAPTURE(id);
            CAPTURE(flags);
            Json alone = run_json(common + words);
            CHECK(ids(alone, "tokens") == ids(batch.requests.at(id), "tokens"));
            CHECK(text(alone, "text") == text(batch.requests.at(id), "text"));
            CHECK(text(batch.requests.at(id), "stop") == text(alone, "stop"));
            CHECK(batch.of(id, "seconds") >= batch.of(id, "seconds_to_first_token"));
            CHECK(batch.of(id, "seconds_to_first_token") > 0);
            const double later = (double)ids(alone, "tokens").size() - 1;
            const double least = later / (batch.of(id, "seconds") - batch.of(id, "seconds_to_first_token"));
            CHECK(batch.of(id, "tokens_per_second") >= least);
            tokens += (double)ids(alone, "tokens").size();
        }
        CHECK(number(batch.summary, "requests") == 3);
        CHECK(number(batch.summary, "tokens") == tokens);
        CHECK(number(batch.summary, "same_alone") == 3);
        check_contains(batch.outcome.err, "beside each alone: 3 of 3 requests the same, to the last bit");
    }
}

TEST_CASE("what others have read is found, also by those who come together, and pages are given back") {
    std::string lines;
    for (int i = 0; i < 4; i++) lines += request("r" + std::to_string(i), shared + shared + std::to_string(i), 4);
    Batch batch(lines, {"--page", "4", "--pass-tokens", "32", "--against", "alone"});
    double found = 0;
    for (int i = 0; i < 4; i++) found += batch.of("r" + std::to_string(i), "cached_tokens");
    CHECK(batch.of("r0", "cached_tokens") == 0);
    for (int i = 1; i < 4; i++) CHECK(batch.of("r" + std::to_string(i), "cached_tokens") > 30);
    CHECK(number(batch.summary, "hit_tokens") == found);
    const double alone = std::ceil((batch.of("r0", "prompt_tokens") + 3) / 4);
    CHECK(number(batch.summary, "peak_pages") < 2 * alone);
    CHECK(number(batch.summary, "same_alone") == 4);
}

TEST_CASE("a stop text ends a request and does not stand in its text; so does an end id") {
    Json whole = run_json({"generate", "-p", shared + "Tom", "-n", "40", "-t", "1"});
    const std::string all = text(whole, "text"), stop = all.substr(all.size() / 2, 3);
    Batch batch(request("a", shared + "Tom", 40, ", \"stop\": [\"@@\", " + json_of(stop) + "]") +
                request("b", shared + "Tom", 40, ", \"stop\": \"@@\""));
    CHECK(text(batch.requests["a"], "text") == all.substr(0, all.find(stop)));
    CHECK(text(batch.requests["a"], "stop") == "stop");
    CHECK(text(batch.requests["b"], "text") == all);
    // The one that begins first in the text, whichever is first in the list.
    const std::string later = stop.substr(1);
    Batch two(request("a", shared + "Tom", 40, ", \"stop\": [" + json_of(later) + ", " + json_of(stop) + "]"));
    CHECK(text(two.requests["a"], "text") == all.substr(0, all.find(stop)));
}

TEST_CASE("a request has the frequencies that it has alone (longrope), or the file is refused") {
    const std::string longrope = "tests/fixtures/models/phi3_longrope_long";  // other ones beyond 40 positions
    auto request_of = [](const std::string &id, int tokens) {                 // of a model without a tokenizer
        std::string list;
        for (int i = 0; i < tokens; i++) list += (i ? ", " : "") + std::to_string(3 + i);
        return "{\"id\": \"" + id + "\", \"ids\": [" + list + "], \"n\": 10}\n";
    };
    auto alone = [&](int tokens, const Words &rest) {
        std::string list = "3";
        for (int i = 1; i < tokens; i++) list += "," + std::to_string(3 + i);
        const Words words = {"generate", "-m", longrope, "--ids", list, "-n", "10", "-t", "1", "--kv", "f32"};
        return ids(parse_json("generate", run(words + rest + Words{"--ignore-eos", "--json"}).out), "tokens");
    };
    const Words flags = {"-m", longrope, "--kv", "f32", "--ignore-eos", "--against", "alone"};
    for (const std::vector<int> &lengths : {std::vector<int>{20, 30}, {31, 35}}) {
        Batch batch(request_of("a", lengths[0]) + request_of("b", lengths[1]), flags);
        CHECK(ids(batch.requests["a"], "tokens") == alone(lengths[0], {}));
        CHECK(ids(batch.requests["b"], "tokens") == alone(lengths[1], {}));
    }
    const std::string mixed = request_of("a", 20) + request_of("b", 31);  // 30 and 41 positions
    Scratch scratch;
    spill(scratch / "r.jsonl", mixed);
    check_refused(run(Words{"batch", "-f", scratch / "r.jsonl"} + flags),
                  {"requests of up to 40 positions and beyond", "-c 41 to compute all as long ones"});
    Batch batch(mixed, flags + Words{"-c", "60"});
    CHECK(ids(batch.requests["a"], "tokens") == alone(20, {"-c", "60"}));
    CHECK(alone(20, {"-c", "60"}) != alone(20, {}));
    check_refused(run({"batch", "-m", longrope, "-f", scratch / "r.jsonl", "--cache", "ring", "--admission", "exact"}),
                  {"--admission exact: belongs to --cache paged, found --cache ring"});
    spill(scratch / "r.jsonl", request("a", "Tom", 3));
    check_refused(run({"batch", "-m", longrope, "-f", scratch / "r.jsonl"}),
                  {"line 1: this model has no tokenizer.json: fetch it, or give \"ids\""});
}

TEST_CASE("a small pool: exact admission waits, optimistic admission preempts; the texts are the same") {
    std::string lines;
    for (char c = 'a'; c < 'g'; c++) lines += request({c}, std::string("Tom put the key ") + c, 30);
    const Words pool = {"--page", "4", "--pool", "72", "--against", "alone"};
    Batch exact(lines, pool), optimistic(lines, pool + Words{"--admission", "optimistic"});
    CHECK(number(exact.summary, "preemptions") == 0);
    CHECK(number(optimistic.summary, "preemptions") > 0);
    // What was let in counts before the next one comes: of equal prompts the second waits, and finds the first.
    const std::string twins = request("a", shared + shared, 5) + request("b", shared + shared, 5);
    Batch twice(twins, {"--page", "4", "--pool", "64", "--admission", "optimistic", "--against", "alone"});
    CHECK((number(twice.summary, "preemptions") == 0 && number(twice.summary, "same_alone") == 2));
    CHECK(twice.of("b", "cached_tokens") > 30);
    for (Batch *batch : {&exact, &optimistic}) {
        CHECK(number(batch->summary, "same_alone") == 6);
        CHECK(number(batch->summary, "peak_pages") <= 18);
        CHECK(number(batch->summary, "pages") == 18);
    }
}

TEST_CASE("--events: each page that is handed out is released as often as it was taken or shared") {
    Scratch scratch;
    const std::string file = scratch / "events.jsonl";
    Batch batch(request("a", shared, 6) + request("b", shared + "Tom", 6),
                {"--page", "4", "--pass-tokens", "16", "--events", file});
    std::map<std::string, int> counts;
    std::map<double, int> held;
    double tokens = 0, last = 0;
    for (const std::string &line : split(slurp(file), '\n')) {
        if (line.empty()) continue;
        Json event = parse_json("event", line);
        const std::string what = text(event, "event");
        counts[what]++;
        if (what == "take" || what == "share") held[number(event, "page")]++;
        if (what == "release") REQUIRE(--held[number(event, "page")] >= 0);
        if (what == "pass") tokens += number(event, "count");
        CHECK(number(event, "seconds") >= last);
        last = number(event, "seconds");
    }
    for (auto &[page, count] : held) CHECK(count == 0);
    CHECK((counts["admit"] == 2 && counts["end"] == 2 && counts["publish"] > 0 && counts["share"] > 0));
    CHECK(counts["pass"] == number(batch.summary, "passes"));
    const double prompts = number(batch.summary, "prompt_tokens"), found = number(batch.summary, "hit_tokens");
    CHECK(tokens == prompts - found + 2 * 5);  // nobody asks what follows the last token
}

TEST_CASE("a line that is wrong ends the program before anything runs, with its number and the reason") {
    auto refused = [](const std::string &line, const Words &parts, const Words &rest = {}) {
        Scratch scratch;
        spill(scratch / "r.jsonl", "\n" + request("good", "Tom", 2) + line);
        check_refused(run(Words{"batch", "-f", scratch / "r.jsonl"} + rest), parts);
    };
    refused("{", {"r.jsonl: line 3: not valid JSON"});
    refused("[1]", {"line 3", "expected a JSON object"});
    refused("{\"id\": \"\xff\", \"prompt\": \"a\"}", {"line 3: byte 8, 0xFF, is not UTF-8"});
    refused(
        "{\"prompt\": \"a\", \"nn\": 3}",
        {"line 3: unknown key \"nn\"; known are id prompt messages ids n temp top_k top_p min_p seed stop salt at"});
    for (auto &[other, here] :
         std::map<std::string, std::string>{{"max_tokens", "n"}, {"temperature", "temp"}, {"cache_salt", "salt"}})
        refused("{\"prompt\": \"a\", \"" + other + "\": 3}", {"\"" + other + "\"; here it is \"" + here + "\"\n"});
    refused("{\"n\": 3}", {"line 3", "expected one of \"prompt\", \"messages\" and \"ids\""});
    refused("{\"prompt\": \"a\", \"ids\": [1]}", {"expected one of"});
    refused("{\"prompt\": \"a\", \"messages\": []}", {"expected one of"});
    refused("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}",
            {"line 3: ", "chat template"});  // none is there
    refused("{\"prompt\": \"a\", \"salt\": 5}", {"salt is 5, expected a text"});
    for (const char *id : {"1.5", "-5", "9007199254740992"})
        refused(formatted("{\"id\": %s, \"prompt\": \"a\"}", id),
                {formatted("line 3: id is %s, expected a text, or a whole number from 0 to 2^53 - 1", id)});
    refused("{\"prompt\": \"a\"}", {"-s 9007199254740992: ", "9007199254740991"}, {"-s", "9007199254740992"});
    refused("{\"prompt\": \"a\", \"seed\": 9007199254740993}", {"seed is", "from 0 to 2^53 - 1"});  // as a double 2^53
    refused("{\"prompt\": 5}", {"line 3: prompt is 5, expected a text"});
    refused("{\"ids\": [1, -2]}", {"ids is -2, expected a list of whole numbers"});
    refused("{\"ids\": [1, 999999]}", {"line 3: token id 999999"});
    refused("{\"prompt\": \"\xff\"}", {"line 3: "});
    refused("{\"prompt\": \"a\"}", {"-c 2000: this model was made for 1280"}, {"-c", "2000"});
    refused("{\"ids\": 7}", {"ids is 7, expected a list"});
    refused("{\"prompt\": \"a\", \"n\": 0}", {"n is 0, expected a whole number from 1"});
    refused("{\"prompt\": \"a\", \"n\": 2.5}", {"n is 2.5"});
    refused("{\"prompt\": \"a\", \"temp\": -1}", {"temp is -1, expected a number from 0"});
    refused("{\"prompt\": \"a\", \"top_p\": 2}", {"top_p is 2, expected a number from 0 to 1"});
    refused("{\"prompt\": \"a\", \"seed\": -1}", {"seed is -1"});
    refused("{\"prompt\": \"a\", \"seed\": 1.5}", {"seed is 1.5, expected a whole number"});
    refused("{\"ids\": []}", {"ids is [], expected one at least"});
    refused("{\"prompt\": \"a\\u0000b\"}", {"line 3: \\u0000 ends a text here: leave it out"});
    refused("{\"prompt\": \"a\", \"at\": -1}", {"at is -1"});
    refused("{\"prompt\": \"a\", \"stop\": [\"\"]}", {"stop is \"\", expected a text, or a list of texts"});
    refused("{\"prompt\": \"a\", \"stop\": 3}", {"stop is 3"});
    refused("{\"prompt\": \"a\", \"n\": 2000}", {"line 3: ", "2000 more take", "a sequence has 1280"});
    refused("{\"prompt\": \"a\", \"n\": 30}", {"30 more take", "a sequence has 20", "-c"}, {"-c", "20"});
    refused("{\"id\": \"good\", \"prompt\": \"a\"}", {"line 3: id \"good\" stands on line 2, too"});
    refused("{\"id\": \"big\", \"prompt\": \"a\", \"n\": 60}", {"r.jsonl: line 3: ", "60 more take", "the pool has 2"},
            {"--pool", "32"});
}

TEST_CASE("each request has a seed of its own, and says it; -s is that of the first line") {
    const std::string drawn = ", \"temp\": 2", prompt = "Once upon a time";
    std::string lines;
    for (const char *id : {"a", "b"}) lines += request(id, prompt, 12, drawn);
    lines += request("c", prompt, 12, drawn + ", \"seed\": 9007199254740991") + request("d", prompt, 12);
    const Batch batch(lines), again(lines), with(lines, {"-s", "7"});
    CHECK(text(batch.requests.at("a"), "text") != text(batch.requests.at("b"), "text"));
    CHECK(number(batch.requests.at("a"), "seed") != number(again.requests.at("a"), "seed"));
    CHECK((number(with.requests.at("a"), "seed") == 7 && number(with.requests.at("b"), "seed") == 8));
    for (const Batch *each : {&batch, &with}) {
        CHECK(number(each->requests.at("c"), "seed") == 9007199254740991);
        CHECK(is_null(at(each->requests.at("d"), "seed")));  // nothing is drawn
        for (const char *id : {"a", "b", "c"}) {
            const std::string seed = formatted("%.0f", number(each->requests.at(id), "seed"));
            const Words words = {"generate", "-p", prompt, "-n", "12", "--temp", "2", "-s", seed, "-t", "1"};
            CHECK(text(run_json(words), "text") == text(each->requests.at(id), "text"));
        }
    }
    const Batch last(request("a", prompt, 2, drawn) + request("b", prompt, 2, drawn), {"-s", "9007199254740991"});
    CHECK(number(last.requests.at("b"), "seed") == 0);  // 2^53 is the first number that two of them may be
}

TEST_CASE("requests that come together run in the order of the file") {
    std::string lines;
    Words order;
    for (int i = 0; i < 40; i++) order.push_back(std::to_string(i)), lines += request(order.back(), "Tom", 1);
    CHECK(Batch(lines, {"-np", "1"}).order == order);
}

TEST_CASE("a number may be an id; without n a request ends with the context; --json leaves the summary's text out") {
    Batch batch("{\"id\": 5, \"prompt\": \"Tom\", \"n\": 2}\n{\"prompt\": \"Tom\"}\n",
                {"-c", "12", "--ignore-eos", "--json"});
    CHECK((batch.outcome.err.empty() && batch.order == Words{"5", "2"}));
    CHECK(text(batch.requests["5"], "stop") == "length");
    CHECK(text(batch.requests["2"], "stop") == "context full");
    const Words alone = {"generate", "-p", "Tom", "-c", "12", "--ignore-eos", "-t", "1", "--cache", "paged"};
    CHECK(ids(run_json(alone), "tokens") == ids(batch.requests["2"], "tokens"));
    CHECK(batch.of("2", "prompt_tokens") + (double)ids(batch.requests["2"], "tokens").size() - 1 == 12);
}

TEST_CASE("the summary has the median and the 99th of a hundred, of the first tokens and of those between") {
    std::string lines;
    for (int i = 0; i < 5; i++) lines += request(std::to_string(i), "Tom", 3 + i);
    Batch batch(lines, {"-np", "1"});
    std::vector<double> first;
    double total = 0;
    for (const std::string &id : batch.order) {
        first.push_back(batch.of(id, "seconds_to_first_token"));
        total += batch.of(id, "seconds") - first.back();
    }
    std::sort(first.begin(), first.end());
    CHECK(number(batch.summary, "seconds_to_first_token_p50") == first[2]);
    CHECK(number(batch.summary, "seconds_to_first_token_p99") == first[4]);
    const double median = number(batch.summary, "seconds_between_tokens_p50"), gaps = 2 + 3 + 4 + 5 + 6;
    CHECK((median > 0 && median * std::ceil(gaps / 2) <= total));
    CHECK(number(batch.summary, "seconds_between_tokens_p99") >= median);
    check_contains(batch.outcome.err, "the first token after ");
    Batch one(request("a", "Tom", 1));
    CHECK(is_null(at(one.summary, "seconds_between_tokens_p50")));
    check_contains(one.outcome.err, "s (p99)\n");  // and of the times that there are not, nothing
    for (const char *word : {"nan", "the next one"}) CHECK(one.outcome.err.find(word) == std::string::npos);
}

TEST_CASE("requests with different salts share nothing") {
    std::string lines;
    for (const char *id : {"a", "b", "c", "d"}) {
        const std::string salt = id[0] == 'a' ? "" : id[0] == 'b' ? "x" : id[0] == 'c' ? "y" : "x";
        lines += request(id, shared, 3, ", \"salt\": " + json_of(salt));
    }
    lines += request("e", shared, 3);
    Batch batch(lines, {"-np", "1", "--page", "4", "--pool", "400", "--against", "alone"});
    for (const char *id : {"a", "b", "c"}) CHECK(batch.of(id, "cached_tokens") == 0);
    for (const char *id : {"d", "e"}) CHECK(batch.of(id, "cached_tokens") == batch.of(id, "prompt_tokens") - 1);
    CHECK(number(batch.summary, "same_alone") == 5);
}

TEST_CASE("--order prefix lets in who begins as others did; the texts are the same") {
    std::string lines;
    const std::string other = "In the morning it rained, and Ben went to the shop near the hill with his old dog. ";
    for (int i = 0; i < 6; i++) lines += request(std::to_string(i), (i % 2 ? other : shared) + std::to_string(i), 2);
    const Words flags = {"-np", "1", "--page", "4", "--pool", "40", "--against", "alone"};
    Batch fcfs(lines, flags), prefix(lines, flags + Words{"--order", "prefix"});
    CHECK(fcfs.order == Words{"0", "1", "2", "3", "4", "5"});
    CHECK(prefix.order == Words{"0", "2", "4", "1", "3", "5"});
    CHECK(number(prefix.summary, "hit_tokens") > number(fcfs.summary, "hit_tokens"));
    CHECK((number(fcfs.summary, "same_alone") == 6 && number(prefix.summary, "same_alone") == 6));
}

TEST_CASE("a request whose logits are not finite ends with its error; the others have their lines") {
    Scratch scratch;
    const std::string damaged = scratch / "damaged";
    fs::copy("tests/fixtures/models/llama_f16", damaged);
    std::string bytes = slurp(damaged + "/model.safetensors");
    uint64_t header;
    memcpy(&header, bytes.data(), sizeof header);
    bytes.replace(8 + header + 16384 - 128, 128, std::string(128, '\xff'));  // the embedding of token 63
    spill(damaged + "/model.safetensors", bytes);
    const std::string good = "{\"id\": \"good\", \"ids\": [5, 6, 7], \"n\": 6}\n";
    const std::string bad = "{\"id\": \"bad\", \"ids\": [5, 6, 63], \"n\": 6}\n";
    const std::string events = scratch / "events";
    const Words flags = {"-m", damaged, "--ignore-eos", "--events", events, "--against", "alone"};
    for (const Words &more : {Words{}, {"--keep-going"}, {"--draft", "ngram"}}) {
        Batch batch(bad + good + replaced(good, "good", "too"), flags + more, 1);
        CHECK(text(batch.requests["bad"], "stop") == "error");
        check_contains(text(batch.requests["bad"], "error"), "position 2: a logit is ");
        CHECK(ids(batch.requests["bad"], "tokens").empty());
        for (const char *id : {"good", "too"}) {
            CHECK((text(batch.requests[id], "stop") == "length" && ids(batch.requests[id], "tokens").size() == 6));
            CHECK(!at(batch.requests[id], "error"));
        }
        CHECK((number(batch.summary, "failed") == 1 && number(batch.summary, "same_alone") == 3));
        CHECK(!slurp(events).empty());
        check_contains(batch.outcome.err, "1 request ended by an error, which its line says");
    }
}

TEST_CASE(
    "messages are what chat reads, by the checkpoint's template; a prompt is read as it stands, and a note says so") {
    Scratch scratch;
    const std::string tuned = scratch / "tuned";
    fs::copy("weights_tools/builtin", tuned);
    spill(tuned + "/chat_template.jinja",
          "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|endoftext|>' }}{% endfor %}"
          "{% if add_generation_prompt %}assistant:{% endif %}");
    const auto say = [](const std::string &role, const std::string &text) {
        return "{\"role\": " + json_of(role) + ", \"content\": " + json_of(text) + "}";
    };
    const std::string typed = "Once <|endoftext|> upon";  // in a message it is no special token
    const std::string messages =
        "{\"id\": \"m\", \"messages\": [" + say("system", "Be brief.") + ", " + say("user", typed) + "], \"n\": 9}\n";
    Batch batch(messages, {"-m", tuned, "--against", "alone"});
    CHECK(!contains(batch.outcome.err, "tuned for chat"));
    spill(scratch / "turn", typed + "\n");
    Setting setting;
    setting.input = scratch / "turn";
    const Words chat = {"chat", "-m", tuned, "--system", "Be brief.", "-n", "9", "-t", "1", "--json"};
    const Json turn = parse_json("turn", run(chat, setting).out);
    CHECK(ids(turn, "tokens") == ids(batch.requests["m"], "tokens"));
    CHECK((double)ids(turn, "prompt_ids").size() == batch.of("m", "prompt_tokens"));
    CHECK(number(batch.summary, "same_alone") == 1);
    const Batch plain(request("p", "Once upon", 2), {"-m", tuned});
    check_contains(plain.outcome.err, "its template is not applied");
    auto refused = [&](const std::string &list, const std::string &why) {
        spill(scratch / "r.jsonl", "{\"messages\": " + list + "}");
        check_refused(run({"batch", "-m", tuned, "-f", scratch / "r.jsonl"}), {"r.jsonl: line 1: ", why});
    };
    refused("5", "messages is 5, expected a list of {\"role\", \"content\"}");
    refused("[5]", "expected a list of");
    refused("[{\"role\": \"user\"}]", "messages: content is missing");
    refused("[{\"role\": \"user\", \"content\": []}]", "content is [], expected a text");
    refused("[{\"role\": \"user\", \"content\": \"a\", \"name\": \"b\"}]",
            "name is \"b\", expected role and content alone");
}

TEST_CASE("an answer to messages ends where the template ends one, also where no config says so") {
    Scratch scratch;
    const std::string tuned = scratch / "tuned";
    fs::copy("weights_tools/builtin", tuned);
    const int dot = ids(run_json({"tokenize", "-p", "."}), "ids").back();  // is a special token there
    spill(tuned + "/tokenizer.json",
          replaced(slurp(tuned + "/tokenizer.json"), "\"added_tokens\": [",
                   "\"added_tokens\": [{\"id\": " + std::to_string(dot) +
                       ", \"content\": \".\", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
                       "\"normalized\": false, \"special\": true},"));
    spill(tuned + "/chat_template.jinja", "{% for m in messages %}{{ m['content'] + '.' }}{% endfor %}");
    Batch batch("{\"id\": \"m\", \"messages\": [{\"role\": \"user\", \"content\": \"Tom went home\"}]}\n",
                {"-m", tuned});
    CHECK(text(batch.requests["m"], "stop") == "end id");
    CHECK(ids(batch.requests["m"], "tokens").back() == dot);
}

TEST_CASE("--help of batch says what a request may hold") {
    const std::string help = run_well({"batch", "--help"}).out;
    for (const char *key : {"id: text or whole number", "messages: list", "stop: text or list of texts", "salt: text"})
        check_contains(help, key);
    const std::string chapter = slurp("docs/10_many_texts_one_memory.md");  // has the same list
    Scratch scratch;
    spill(scratch / "r.jsonl", "{\"?\": 1}");
    const std::string refused = run({"batch", "-f", scratch / "r.jsonl"}).err, known = "known are ";
    const std::string keys = refused.substr(refused.find(known) + known.size());
    for (const std::string &key : words_of(keys)) check_contains(chapter, "| `" + key + "` |");
    CHECK(words_of(keys).size() == 13);
}

TEST_CASE("--keep-going runs the others, and says so by its status") {
    Batch batch(request("a", "Tom", 3) + "{\n" + request("b", "Mia", 3), {"--keep-going"}, 1);
    CHECK((batch.requests.size() == 2 && batch.requests.count("a") && batch.requests.count("b")));
    check_contains(batch.outcome.err, "line 2: not valid JSON");
}

TEST_CASE("flags of llm batch that cannot be") {
    Scratch scratch;
    spill(scratch / "r.jsonl", request("a", "Tom", 3));
    auto refused = [&](const std::string &flags, const Words &parts) {
        check_refused(run(Words{"batch", "-f", scratch / "r.jsonl"} + words_of(flags)), parts);
    };
    check_refused(run({"batch"}), {"no requests: give -f FILE"});
    check_refused(run({"batch", "-f", scratch / "none"}), {"No such file"});
    refused("--cache none", {"--cache none: llm batch is about caches"});
    refused("--cache paged,ring", {"llm batch takes one"});
    refused("--cache ring --pool 64", {"--pool 64: belongs to --cache paged"});
    refused("--kv int4 --page 16", {"--page 16: pages that are shared hold whole blocks of 32"});
    refused("--pass-tokens 4 -np 8", {"--pass-tokens 4: each of 8 requests"});
    refused("--against naive", {"--against naive: expected alone"});
    refused("--admission maybe", {"--admission maybe: expected exact|optimistic"});
    fs::create_hard_link(scratch / "r.jsonl", scratch / "same");
    fs::create_symlink(scratch / "r.jsonl", scratch / "link");
    for (const char *name : {"r.jsonl", "same"})
        refused("--events " + (scratch / name), {"is a file that is read: name another"});
    refused("--events " + (scratch / "link"), {"is not a regular file"});
    fs::copy_file(scratch / "r.jsonl", scratch / "e.part");  // no name of an unfinished file
    run_well({"batch", "-f", scratch / "e.part", "--events", scratch / "e"});
    CHECK(slurp(scratch / "e.part") == slurp(scratch / "r.jsonl"));
    refused("--events /nowhere/e", {"--events /nowhere/e: cannot write there"});
    refused("--cache contiguous --order prefix", {"--order prefix: belongs to --cache paged"});
    refused("--order last", {"--order last: expected fcfs|prefix"});
    spill(scratch / "r.jsonl", "\n");
    refused("", {"no request is there"});
    check_refused(run({"diff", "-p", "a", "--against", "alone"}), {"--against alone: expected naive|full"});
}

TEST_CASE("Ctrl-C: each request has its line, and the summary is there") {
    Scratch scratch;
    std::string lines;
    for (int i = 0; i < 3; i++) lines += request(std::to_string(i), shared, 1000, i ? ", \"at\": 1000" : "");
    spill(scratch / "r.jsonl", lines);
    Outcome result = run_shell(program_path() + " batch --ignore-eos -t 1 -f " + (scratch / "r.jsonl") +
                               " & sleep 1; kill -INT $!; wait $!");
    // A shell's background jobs do not hear Ctrl-C unless they ask for it, as the program does.
    CHECK_MESSAGE(result.status == 130, result);
    const std::vector<std::string> out = split(result.out, '\n');
    REQUIRE_MESSAGE(out.size() == 5, result);
    for (int i = 0; i < 3; i++) {
        Json line = parse_json("line", out[i]);
        const bool done = ids(line, "tokens").size() == 1000;
        CHECK(text(line, "stop") == (done ? "length" : "interrupted"));
        if (i > 0) CHECK(is_null(at(line, "seconds")));  // it had not come yet
    }
    CHECK(number(parse_json("summary", out[3]), "requests") == 3);
    // In the midst of requests that run: what they hold is given back, in the events as well.
    for (int i = 3; i < 60; i++) lines += request(std::to_string(i), shared, 1000);
    spill(scratch / "r.jsonl", lines);
    result = run_shell(program_path() + " batch --ignore-eos -t 1 --events " + (scratch / "e.jsonl") + " -f " +
                       (scratch / "r.jsonl") + " >/dev/null & sleep 1; kill -INT $!; wait $!");
    CHECK_MESSAGE(result.status == 130, result);
    std::map<double, int> held;  // pages: nobody has one any more
    std::string last;
    for (const std::string &each : split(slurp(scratch / "e.jsonl"), '\n')) {
        if (each.empty()) continue;
        Json event = parse_json("event", each);
        last = text(event, "event");
        if (last == "take" || last == "share") held[number(event, "page")]++;
        if (last == "release") held[number(event, "page")]--;
    }
    for (auto &[page, count] : held) CHECK(count == 0);
    CHECK((!held.empty() && last != "pass"));
}

// ---- generate --samples --------------------------------------------------------------------------------------

TEST_CASE("--samples: each continuation is the one that its seed gives alone; the prompt's pages are shared") {
    const Words prompt = {"-p", shared + shared, "-n", "12", "--temp", "0.9", "-t", "1"};
    for (const std::string &flags : Words{"", "--cache paged --page 4", "--cache ring --window 40",
                                          "--cache paged --kv int4 --page 32", "--kv int2"}) {
        Json many = run_json(Words{"generate", "--samples", "3", "-s", "5"} + prompt + words_of(flags));
        for (int i = 0; i < 3; i++) {
            CAPTURE(flags);
            Json alone = run_json(Words{"generate", "-s", std::to_string(5 + i)} + prompt + words_of(flags));
            const std::string sample = "samples." + std::to_string(i);
            CHECK(number(many, sample + ".seed") == 5 + i);
            CHECK(ids(many, sample + ".tokens") == ids(alone, "tokens"));
            for (const char *key : {"text", "stop"}) CHECK(text(many, sample + "." + key) == text(alone, key));
        }
        CHECK(number(many, "prefill.tokens") == number(many, "prompt_tokens"));
        CHECK(number(many, "decode.tokens") == 3 * 11);  // the prefill gave the first of each
        CHECK(number(many, "decode.tokens_per_second") == doctest::Approx(33 / number(many, "decode.seconds")));
        if (!contains(flags, "paged")) continue;
        const double tokens = (double)ids(many, "prompt_ids").size();
        const double page = contains(flags, "int4") ? 32 : 4;
        const double alone = std::ceil((tokens + 11) / page);
        CHECK(number(many, "pages_alone") == 3 * alone);
        CHECK(number(many, "pages_held") == 3 * alone - 2 * std::floor(tokens / page));
    }
    check_refused(run({"generate", "-p", "a", "--samples", "2"}), {"--samples 2: at --temp 0 all are the same"});
    check_refused(run({"generate", "-p", "a", "--samples", "2", "--temp", "1", "--cache", "none"}), {"--samples 2"});
}

TEST_CASE("show --samples names the sequences that hold the same pages") {
    Outcome shown = run_well({"show", "-p", shared, "--cache", "paged", "--page", "4", "--samples", "3"});
    check_contains(shown.out, "sequences [1, 2] hold pages [0, 1, ");
    Json json = run_json({"show", "-p", shared, "--cache", "paged", "--page", "4", "--samples", "3"});
    CHECK(ids(json, "place.shared_pages") == ids(json, "place.page_table"));
    CHECK(ids(json, "place.sharing_sequences") == Ids{1, 2});
}

// ---- Guesses -----------------------------------------------------------------------------------------------

const Words by_draft = {"--draft", "weights_tools/draft"}, by_ngrams = {"--draft", "ngram"};

TEST_CASE("generate writes the same text with guesses, and says what came of them") {
    const std::vector<Words> caches = {
        {}, {"--cache", "paged", "--page", "3", "--kv", "int4"}, {"--cache", "ring", "--window", "64", "--kv", "bf16"}};
    for (const Words &cache : caches)
        for (const Words &drawn : {Words{}, Words{"--temp", "0.8", "--top-p", "0.95", "-s", "5"}}) {
            const Words words = Words{"generate", "-p", shared + "Tom", "-n", "60"} + cache + drawn;
            const Json expected = run_json(words);
            for (const Words &draft : {by_draft, by_ngrams, by_draft + Words{"--draft-tokens", "9"}}) {
                const Json found = run_json(words + draft);
                CHECK(ids(found, "tokens") == ids(expected, "tokens"));
                CHECK(text(found, "text") == text(expected, "text"));
                const int passes = (int)number(found, "draft.passes"), accepted = (int)number(found, "draft.accepted");
                CHECK((passes > 0 && accepted <= number(found, "draft.drafted")));
                CHECK(passes + accepted == 59);
                if (draft != by_ngrams) CHECK((accepted > 10 && passes < 50));
            }
        }
    check_contains(run_well(Words{"generate", "-p", "Once", "-n", "20"} + by_draft).err, " drafted, ");
}

TEST_CASE("the logits of a text are the same bytes with guesses") {
    Scratch scratch;
    for (const Words &draft : {by_draft, by_ngrams}) {
        const Words words = {"generate", "-p", shared + shared, "-n", "50", "--kv", "int8", "--dump-logits"};
        CHECK(run(words + Words{scratch / "plain.npy"}).status == 0);
        CHECK(run(words + Words{scratch / "drafted.npy"} + draft).status == 0);
        const std::string plain = slurp(scratch / "plain.npy");
        CHECK((plain == slurp(scratch / "drafted.npy") && plain.size() > 1e5));
    }
    // A text that ends at an end id, behind which the model itself, as its own draft, would guess on.
    const Words words = words_of("generate -p Once --temp 0.8 -s 6 -n 900 --dump-logits");
    const Outcome plain = run(words + Words{scratch / "plain.npy"});
    run_well(words + Words{scratch / "drafted.npy", "--draft", "weights_tools/builtin"});
    check_contains(plain.err, "stopped: end id");
    CHECK(slurp(scratch / "plain.npy") == slurp(scratch / "drafted.npy"));
}

TEST_CASE("--draft-rule leviathan: another text of the same seed, and the same one again") {
    const Words words = Words{"generate", "-p", shared, "-n", "60", "--temp", "1", "-s", "4"};
    for (const Words &draft : {by_draft, by_ngrams}) {
        const Words rule = words + draft + Words{"--draft-rule", "leviathan"};
        const Json json = run_json(rule);
        CHECK(ids(json, "tokens") != ids(run_json(words), "tokens"));
        CHECK(ids(json, "tokens") == ids(run_json(rule), "tokens"));
        CHECK((number(json, "draft.drafted") > number(json, "draft.accepted") && number(json, "draft.accepted") > 0));
    }
}

TEST_CASE("diff --draft: a line a pass, held against the text without guesses; exit 0 where all bits are the same") {
    for (const Words &draft : {by_draft, by_ngrams}) {
        const Words words = Words{"diff", "-p", shared, "-n", "40", "--kv", "int4", "--cache", "paged"} + draft;
        check_contains(run_well(words).out, "verdict  the same: all logits have the same bits");
        const Json json = run_json(words);
        Ids tokens;
        int accepted = 0, passes = 0;
        for (const Json *pass : items_of(at(json, "steps"))) {
            const Ids drafted = ids(pass, "guessed"), own = ids(pass, "tokens");
            const int right = (int)number(pass, "accepted");
            CHECK(right == (int)own.size() - 1);
            CHECK(std::equal(own.begin(), own.begin() + right, drafted.begin()));
            if (right < (int)drafted.size()) CHECK(drafted[right] != own[right]);
            tokens.insert(tokens.end(), own.begin(), own.end());
            accepted += right, passes++;
        }
        CHECK((accepted == number(json, "draft.accepted") && passes == number(json, "draft.passes")));
        const Words plain = {"generate", "-p", shared, "-n", "40", "--kv", "int4", "--cache", "paged"};
        CHECK(tokens == ids(run_json(plain), "tokens"));
    }
}

TEST_CASE("bench --draft: for each number of guesses what a pass brings and costs, predicted and measured") {
    for (const Words &draft : {by_draft, by_ngrams}) {
        const Words words = Words{"bench", "-p", shared, "-n", "60", "--draft-tokens", "3", "--repeats", "1"} + draft;
        const Json json = run_json(words);
        int rows = 0, best = 0;
        double most = 1;
        for (const Json *row : items_of(at(json, "results"))) {
            const bool pauses = rows == 4;
            CHECK(number(row, "guesses") == (pauses ? 3 : rows));
            const double brought = number(row, "tokens_per_pass"), expected = number(row, "expected_tokens_per_pass");
            CHECK((rows ? brought > 1 || pauses : brought == 1));
            const double with = number(row, "share_with_guesses");
            const double cost = 1 - with + with * number(row, "check_cost") + number(row, "guess_cost");
            CHECK(number(row, "predicted") == doctest::Approx(expected / cost));
            if (number(row, "measured") > most) most = number(row, "measured"), best = (int)number(row, "guesses");
            if (rows > 0 && !pauses && draft == by_draft) {  // nearly each pass has as many guesses
                const double a = number(row, "share_right");
                CHECK(expected == doctest::Approx((1 - std::pow(a, rows + 1)) / (1 - a)).epsilon(0.03));
                double still = 1, right = 0, tried = 0;
                for (const Json *share : items_of(at(row, "shares_right")))
                    tried += still, still *= share->number, right += still;
                CHECK(brought == doctest::Approx(1 + right).epsilon(0.03));
                CHECK(a == doctest::Approx(right / tried).epsilon(0.03));
            }
            rows++;
        }
        CHECK(number(json, "best_guesses") == best);
        CHECK(rows == (draft == by_draft ? 4 : 5));
    }
}

TEST_CASE("batch --draft: each request is the same as alone and without guesses") {
    std::string lines;
    for (int i = 0; i < 6; i++)
        lines += request(std::to_string(i), shared + (i % 2 ? "Tom" : "Mia and"), 20 + 7 * i,
                         i % 3 ? "" : ", \"temp\": 0.9, \"seed\": " + std::to_string(i));
    for (const Words &draft : {by_draft, by_ngrams})
        for (const Words &how : {Words{}, Words{"--pool", "160", "--admission", "optimistic", "--kv", "int8"}}) {
            const Batch batch(lines, how + draft + Words{"--against", "alone", "-np", "4"});
            CHECK(number(batch.summary, "same_alone") == 6);
            CHECK(number(batch.summary, "draft.passes") == number(batch.summary, "passes"));
            CHECK(number(batch.summary, "draft.drafted") > (draft == by_draft ? 50 : 0));  // n-grams may pause
            if (draft == by_draft) CHECK(number(batch.summary, "draft.accepted") > 20);
        }
}

TEST_CASE("guesses that cannot be had are refused in a line") {
    Scratch scratch;
    const std::string other = scratch / "other";
    fs::copy("weights_tools/draft", other);
    const std::string all = slurp("weights_tools/draft/tokenizer.json");
    spill(other + "/tokenizer.json", replaced(all, "\"#\": 3,\n      \"$\": 4", "\"$\": 3,\n      \"#\": 4"));
    const std::string beyond = scratch / "beyond", more = scratch / "more", bare = scratch / "bare";
    for (const std::string &copy : {beyond, more, bare}) fs::copy("weights_tools/draft", copy);
    spill(beyond + "/tokenizer.json",
          replaced(replaced(all, "\"\u010a\": 199", "\"\u0120\": 199"), "\"\u0120\": 221", "\"\u010a\": 221"));
    spill(more + "/tokenizer.json",
          replaced(all, "\"added_tokens\": [",
                   "\"added_tokens\": [\n    {\"id\": 1280, "
                   "\"content\": \"<more>\", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
                   "\"normalized\": false, \"special\": true},"));
    fs::remove(bare + "/tokenizer.json");
    const std::vector<std::pair<Words, std::string>> wrong = {
        {{"--draft", other}, "id 3 is \"$\" there, and \"#\" for the model: expected a model with the same tokenizer"},
        {{"--draft", beyond}, "id 199 is \"\u0120\" there, and \"\u010a\" for the model"},
        {{"--draft", more}, "id 1280 is \"<more>\" there, and no token for the model"},
        {{"--draft", bare}, "has no tokenizer.json: expected a model with the same tokenizer"},
        {{"--draft", "nowhere"}, "--draft nowhere: is not there: expected a directory, or ngram"},
        {{"--draft", "ngram", "--cache", "none"}, "--cache none computes all tokens anew"},
        {{"--draft", "ngram", "--cache", "ring", "--window", "64", "--draft-tokens", "32"},
         "behind a window the cache of the model takes back 31 positions at most: lower it"},
        {{"--draft", "ngram", "--samples", "2", "--temp", "1"}, "is for one text, or for llm batch"},
    };
    const Words start = {"generate", "-p", "hi", "-n", "5"};
    for (const auto &[words, line] : wrong) check_refused(run(start + words), {line});
    // Without a tokenizer by the number of ids.
    check_refused(run(words_of("generate --ids 1 -n 2 --draft tests/fixtures/models/llama_f16")),
                  {"knows 64 ids, the model 1280: expected a model with the same tokenizer"});
    check_refused(run(words_of("bench --draft ngram -p a -np 7")), {"-np 7: guesses are timed behind the prompt"});
}
