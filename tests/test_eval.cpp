// llm eval: its figures beside those computed here from logits in double precision, its counts beside known answers.
// Run from the repository's root.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <iterator>

#include "../commands/main.h"
#include "scene.h"

using scene::Tokens;
using Words = std::vector<std::string>;
using Rows = std::vector<scene::Vector>;  // (text), of each (token, vocabulary): logits

static const std::string builtin = "weights_tools/builtin";

// ---- What it says --------------------------------------------------------------------------------------------

static Evaluation eval(const Words &arguments, const std::string &model = builtin) {
    Words words{"eval", "-t", "1", "--repeats", "1", "-m", model};
    words.insert(words.end(), arguments.begin(), arguments.end());
    return evaluate(parse_options(words));
}

// "paged f16 int8"
static std::string title_of(const EvalResult &result) {
    const Cache &cache = result.cache;
    return std::string(name_of(cache.layout)) + " " + name_of(cache.type_k) + " " + name_of(cache.type_v);
}
static Words names_of(const std::vector<EvalResult> &results) {
    Words names;
    for (const EvalResult &result : results) names.push_back(title_of(result));
    return names;
}

// Questions and right answers of the built-in model, by the least distance of their class.
using Counts = std::map<int, std::pair<int, int>>;

static Counts recall_of(const EvalResult &result) {
    Counts counts;
    for (int i = 0; i < recall_classes; i++)
        if (result.asked[i]) counts[i * 200] = {result.asked[i], result.right[i]};
    return counts;
}

// ---- Texts ---------------------------------------------------------------------------------------------------

static double number_of(const Json *object, const char *key) { return Section{"", object}.number(key, -1e99, 1e99); }
static std::string string_of(const Json *object, const char *key) { return Section{"", object}.text(key, ""); }
static std::vector<const Json *> items_of(const Json &root, const char *key) {
    return ::items_of(Section{"", &root}.need(key));
}

// The held-out stories, each a line of JSON: a text and questions.
static const Words &stories() {
    static const Words lines = split(read_file(builtin + "/heldout_mixed.jsonl", 1 << 28), '\n');
    return lines;
}
static std::string text_of(const std::string &story) {
    const Json json = parse_json("story", story);
    return string_of(&json, "text");
}

// A file in build/ to evaluate.
static std::string file_of(const std::string &name, const std::string &text) {
    std::string file = "build/test_eval_" + name;
    mkdir("build", 0777);
    std::ofstream(file) << text;
    return file;
}
static std::string file_of(const std::string &name, const Words &stories) {
    return file_of(name + ".jsonl", joined(stories, "\n"));
}

static const Tokenizer *tokenizer() {
    static TokenizerPointer tokenizer = load_tokenizer(builtin);
    return tokenizer.get();
}

static Tokens tokens_of(const std::string &text) { return encode(tokenizer(), text); }

// What tokens [first, last) of some say.
static std::string piece_of(const Tokens &tokens, int first, int last) {
    TextStream stream(tokenizer());
    std::string text;
    for (int t = 0; t < last; t++) {
        std::string piece = stream.next(tokens[t]);
        if (t >= first) text += piece;
    }
    return text;
}

// ---- The figures, from logits --------------------------------------------------------------------------------

static Engine &engine() {
    static Engine engine = scene::engine_of(builtin);
    return engine;
}

static Rows naive_rows(const std::vector<Tokens> &texts, const Layout &layout = Contiguous{}) {
    Rows rows;
    for (const Tokens &tokens : texts) rows.push_back(scene::naive_rows(engine(), tokens, layout));
    return rows;
}
static Rows cached_rows(const std::vector<Tokens> &texts, const Precision &type) {
    Rows rows;
    for (const Tokens &tokens : texts) {
        Cache cache = scene::cache_for(engine(), type, type, (int)tokens.size());
        rows.push_back(scene::prefilled_rows(engine(), cache, tokens));
    }
    return rows;
}

struct Figures {
    double perplexity = 0, standard_error = 0, kl = 0;
    double log_ratio = 0;  // mean of sum p |log p / q|
    int predicted = 0;
};

// Logarithms of the softmax of a row of logits.
static std::vector<double> log_softmax(const float *row, int count) {
    double most = *std::max_element(row, row + count), sum = 0;
    for (int i = 0; i < count; i++) sum += std::exp(row[i] - most);
    std::vector<double> result(row, row + count);
    for (double &number : result) number -= most + std::log(sum);
    return result;
}

// Rows of logits for each text, and those of the f32 cache: q and p.
static Figures figures(const std::vector<Tokens> &texts, const Rows &q_rows, const Rows &p_rows) {
    Figures result;
    std::vector<double> losses;
    int vocabulary = engine().model.config.vocabulary;
    for (size_t i = 0; i < texts.size(); i++) {
        for (size_t t = 0; t + 1 < texts[i].size(); t++) {
            std::vector<double> q = log_softmax(&q_rows[i][t * vocabulary], vocabulary);
            std::vector<double> p = log_softmax(&p_rows[i][t * vocabulary], vocabulary);
            losses.push_back(-q[texts[i][t + 1]]);
            for (int id = 0; id < vocabulary; id++) {
                result.kl += std::exp(p[id]) * (p[id] - q[id]);
                result.log_ratio += std::exp(p[id]) * std::fabs(p[id] - q[id]);
            }
        }
    }
    double mean = 0, variance = 0, n = (double)losses.size();
    for (double loss : losses) mean += loss / n;
    for (double loss : losses) variance += (loss - mean) * (loss - mean) / n;
    double perplexity = std::exp(mean);
    return {perplexity, perplexity * std::sqrt(variance / n), result.kl / n, result.log_ratio / n, (int)n};
}

// Logits of p or of q that are off by `off` change a log-probability by 2 off at most, so the mean loss and, as it is a
// norm, the losses' standard deviation; and KL, sum p log(p / q), by (e^(2 off) - 1) sum p |log(p / q)| for its first p
// and by 2 off for its logarithm. A double's rounding of logits below 100 is 1e-14, of printed digits 1e-15 of them.
static void check_figures(const EvalResult &result, const Figures &expected, double off) {
    CAPTURE(title_of(result));
    auto near = [](double value, double right, double tolerance) {
        CHECK_MESSAGE(std::fabs(value - right) <= tolerance + 1e-9 * std::fabs(right) + 1e-13,
                      value << ", expected " << right << " +- " << tolerance);
    };
    double factor = std::expm1(2 * off), perplexity = expected.perplexity * factor;
    near(result.perplexity(), expected.perplexity, perplexity);
    near(result.standard_error(), expected.standard_error,
         expected.standard_error * factor +
             (expected.perplexity + perplexity) * 2 * off / std::sqrt(expected.predicted));
    near(result.mean_kl(), expected.kl, factor * expected.log_ratio + 2 * off);
}

// ---- The tests -----------------------------------------------------------------------------------------------

TEST_CASE("perplexity, its standard error and KL to f32 are those of the naive path's logits") {
    std::vector<Tokens> texts = {tokens_of(text_of(stories()[0])), tokens_of(text_of(stories()[1]))};
    Rows naive = naive_rows(texts), f32 = cached_rows(texts, F32{}), f16 = cached_rows(texts, F16{});
    Rows int4 = cached_rows(texts, Int4{}), int2 = cached_rows(texts, Int2{});
    double off = 0;
    for (size_t i = 0; i < texts.size(); i++) off = std::max(off, compare(naive[i], f32[i]).difference);
    CHECK(off <= 1e-4);
    std::string file = file_of("two", Words{stories()[0], stories()[1]});
    Evaluation all = eval({"-f", file, "--kv", "f16,int4,int2"});
    REQUIRE(names_of(all.results) ==
            Words{"contiguous f32 f32", "contiguous f16 f16", "contiguous int4 int4", "contiguous int2 int2"});
    CHECK(all.texts == 2);
    CHECK(all.results[0].predicted == (int)(texts[0].size() + texts[1].size()) - 2);
    check_figures(all.results[0], figures(texts, naive, naive), off);
    CHECK(all.results[0].kl == 0);
    const Rows *rows[] = {&f32, &f16, &int4, &int2};
    for (int i = 0; i < 4; i++) {
        check_figures(all.results[i], figures(texts, *rows[i], naive), off);
        check_figures(all.results[i], figures(texts, *rows[i], f32), 0);
    }
    // What a ring drops, the naive path does not see.
    Evaluation ring = eval({"-f", file, "--kv", "f32", "--cache", "ring", "--window", "48", "--sinks", "2"});
    REQUIRE(names_of(ring.results) == Words{"contiguous f32 f32", "ring f32 f32"});
    check_figures(ring.results[1], figures(texts, naive_rows(texts, scene::opened_ring(48, 2)), f32), 1e-4);
}

TEST_CASE("--activations bf16: each cache beside the f32 cache with f32 activations, which the first row is") {
    if (!why_no_pairs(best::pairs_gain()).empty()) return;
    std::string file = file_of("pairs", Words{stories()[0]});
    Evaluation exact = eval({"-f", file, "--kv", "f16"});
    Evaluation rounded = eval({"-f", file, "--kv", "f16", "--activations", "bf16"});
    REQUIRE(names_of(rounded.results) == Words{"contiguous f32 f32", "contiguous f32 f32", "contiguous f16 f16"});
    CHECK(rounded.results[0].loss == exact.results[0].loss);
    CHECK(rounded.results[0].kl == 0);
    for (int i : {1, 2}) {
        CHECK(rounded.results[i].activations == "bf16");
        CHECK(rounded.results[i].mean_kl() > 10 * exact.results[1].mean_kl());
        CHECK(rounded.results[i].mean_kl() < 1e-2);
    }
}

TEST_CASE("a layout changes no figure, a coarser precision does; bytes are those of the formula") {
    std::string file = file_of("three", Words{stories()[1], stories()[3], stories()[0]});  // 135, 149, 146 tokens
    Evaluation all =
        eval({"-f", file, "--cache", "contiguous,paged,ring", "--page", "7", "--kv", "f32,f16,int8,int4,int2"});
    std::map<std::string, const EvalResult *> by_name;
    for (const EvalResult &result : all.results) by_name[title_of(result)] = &result;
    REQUIRE((by_name.size() == 15 && all.results.size() == 15));

    // 4 layers, 2 KV heads of 32 numbers, K and V: 16 rows for a position. A row of int8 has an f16 scale, one of int4
    // or int2 an f16 scale and an f16 zero point; those two keep 32 positions at f16, too.
    const std::map<std::string, int> row_bytes = {{"f32", 128}, {"f16", 64}, {"int8", 34}, {"int4", 20}, {"int2", 12}};
    // Rows, and what is beside them. Pages: 22 of 7, with as many entries and two numbers each in their pool. Ring: 4 +
    // 1,276 and a pass of 128, less one, in a multiple of 32; and 4 sinks at f32.
    const std::map<std::string, std::pair<int, int>> held = {
        {"contiguous", {149, 0}}, {"paged", {22 * 7, 4 * 3 * 22}}, {"ring", {1408, 16 * 4 * 128}}};
    for (auto [type, bytes] : row_bytes) {
        const EvalResult *plain = by_name["contiguous " + type + " " + type];
        double blocks = type == "int4" || type == "int2" ? 16 * 32 * 64 : 0;
        for (auto [layout, rows] : held) {
            const std::string name = layout + " " + type + " " + type;
            CAPTURE(name);
            const EvalResult *result = by_name[name];
            REQUIRE(result);
            CHECK((result->loss == plain->loss && result->loss_squares == plain->loss_squares));
            CHECK((result->kl == plain->kl && recall_of(*result) == recall_of(*plain)));
            double total = 16.0 * bytes * rows.first + rows.second + blocks;
            CHECK(result->bytes_per_token == doctest::Approx(total / 149).epsilon(1e-12));
            CHECK(median(result->rates) > 0);
        }
    }
    auto kl = [&](const std::string &type) { return by_name["paged " + type + " " + type]->kl; };
    CHECK((kl("f32") == 0 && kl("f16") > 0));
    CHECK((kl("f16") < kl("int8") && kl("int8") < kl("int4") && kl("int4") < kl("int2")));
}

TEST_CASE("a question's tokens are those that the story's maker counted") {
    for (int index = 0; index < 50; index++) {
        CAPTURE(index);
        Json object = parse_json("story", stories()[index]);
        EvalText text = read_story("story", stories()[index], tokenizer());
        CHECK(text.tokens.size() == number_of(&object, "tokens"));
        std::vector<const Json *> questions = items_of(object, "questions");
        REQUIRE(text.questions.size() == questions.size());
        for (size_t i = 0; i < questions.size(); i++) {
            const Recall &recall = text.questions[i];
            CHECK(recall.start == number_of(questions[i], "answer_token"));
            CHECK(recall.distance == number_of(questions[i], "distance"));
            CHECK(piece_of(text.tokens, recall.start, recall.end) == " " + string_of(questions[i], "answer"));
        }
    }
}

// Puts other words in a story, as long as those, so that the characters that its questions name stay where they are.
static std::string changed(std::string story, const std::string &words, const std::string &others) {
    REQUIRE((story.find(words) != std::string::npos && words.size() == others.size()));
    return story.replace(story.find(words), words.size(), others);
}

TEST_CASE("recall counts the answers that are right, each by the distance of its fact") {
    // Of five questions two ask for what was told less than 200 tokens before: 156, 236, 196, 251, 250.
    const std::string &story = stories()[9];
    Words three = {story, changed(story, "The red key is in the cave", "The red key is in the shed"),
                   changed(story, "The red basket is in the forest", "The red basket is by the forest")};
    for (const EvalResult &result : eval({"-f", file_of("answers", three)}).results)
        CHECK(recall_of(result) == Counts{{0, {6, 5}}, {200, {9, 8}}});
}

TEST_CASE("distances fall into classes of 200 tokens, and of 1,000 and more") {
    // A right answer and a wrong one, whose facts are said to stand at all kinds of distances before them.
    Json story = parse_json("story", stories()[36]);
    std::string text = string_of(&story, "text");
    Tokens tokens = tokens_of(text);
    const Json *question = items_of(story, "questions")[9];
    int answer = (int)number_of(question, "answer_token"), end = (int)number_of(question, "place_char");
    std::vector<Report> questions;
    auto characters_before = [&](int token) { return (int)piece_of(tokens, 0, token).size(); };
    auto ask = [&](int token, int place, int distance) {
        questions.emplace_back();
        questions.back().add("answer_char", characters_before(token)).add("place_char", place);
        questions.back().add("fact_char", characters_before(token - distance));
    };
    for (int distance : {1, 199, 200, 399, 400, 599, 600, 799, 800, 999, 1000, 1150}) ask(answer, end, distance);
    // Nobody can say in advance how the story goes on: at these tokens other ones are likelier.
    for (int distance : {2, 198, 201, 398}) ask(500, characters_before(520), distance);
    Report other;
    std::string file = file_of("classes", Words{other.add("text", text).list("questions", questions).json()});
    CHECK(recall_of(eval({"-f", file, "--kv", "f32"}).results[0]) ==
          Counts{{0, {4, 2}}, {200, {4, 2}}, {400, {2, 2}}, {600, {2, 2}}, {800, {2, 2}}, {1000, {2, 2}}});
}

TEST_CASE("the built-in model recalls at every distance; a ring forgets what it dropped, int8 forgets nothing") {
    std::string file = file_of("far", Words{stories()[9], stories()[24], stories()[35], stories()[36]});
    Evaluation all = eval({"-f", file, "--cache", "contiguous,ring", "--kv", "int8", "--window", "64"});
    REQUIRE(names_of(all.results) == Words{"contiguous f32 f32", "contiguous int8 int8", "ring int8 int8"});
    Counts f32 = recall_of(all.results[0]), ring = recall_of(all.results[2]);
    CHECK(recall_of(all.results[1]) == f32);
    CHECK(f32.size() == 6);
    int asked = 0, right = 0;
    for (auto [distance, counts] : f32) {
        CHECK(counts.second >= 0.9 * counts.first);
        CHECK(ring[distance].first == counts.first);
        if (distance >= 200) asked += ring[distance].first, right += ring[distance].second;
    }
    CHECK(asked >= 25);
    CHECK_MESSAGE(right < 0.3 * asked, right << " of " << asked);
}

TEST_CASE("a text that is no .jsonl is cut into pieces as long as the context; a few tokens are enough") {
    const std::string whole = text_of(stories()[0]);
    auto check = [&](const std::string &text, int length, int predicted) {
        CAPTURE(text);
        CAPTURE(length);
        Tokens tokens = tokens_of(text);
        int count = (int)tokens.size();
        std::vector<Tokens> pieces;
        for (int begin = 0; begin + 1 < count; begin += length)  // one token alone predicts nothing
            pieces.push_back(scene::part(tokens, begin, std::min(begin + length, count)));
        Rows rows = cached_rows(pieces, F32{});
        Evaluation all = eval({"-f", file_of("text.txt", text), "-c", std::to_string(length)});
        CHECK(all.texts == pieces.size());
        CHECK(all.results[0].predicted == predicted);
        CHECK(recall_of(all.results[0]).empty());
        check_figures(all.results[0], figures(pieces, rows, rows), 0);
    };
    REQUIRE(tokens_of(whole).size() == 146);
    check(whole, 40, 39 + 39 + 39 + 25);
    check(whole, 145, 144);
    for (int length : {146, 1280}) check(whole, length, 145);
    for (const std::string &text : Words{"a", "Once upon a time", whole.substr(0, 80)})
        check(text, 1280, (int)tokens_of(text).size() - 1);
    for (const char *layout : {"paged", "ring"})
        CHECK(eval({"-f", file_of("text.txt", "a"), "--cache", layout}).results[1].kl < 1e-3);
}

TEST_CASE("an interrupt ends it; what was read until then is said") {
    interrupts = 1;
    Report report = report_of(eval({"-f", file_of("interrupted", Words{stories()[0]})}));
    interrupts = 0;
    Json root = parse_json("eval", report.json());
    CHECK(items_of(root, "results").empty());
    CHECK(number_of(&root, "predicted_tokens") == 0);
    CHECK(Section{"", &root}.flag("interrupted", false));
    check_contains(report.text, "0 tokens predicted");
    CHECK(report.text.find("nan") == std::string::npos);
}

TEST_CASE("bytes a token are those of the longest text, or none where an interrupt came before its end") {
    Words texts = stories();
    std::sort(texts.begin(), texts.end(), [](auto &a, auto &b) { return a.size() < b.size(); });
    while (texts[0].empty()) texts.erase(texts.begin());
    texts.resize(4);
    const std::string file = file_of("cut", texts);
    const Evaluation whole = eval({"-f", file});
    for (int after : {1, 15, 35}) {  // of 4 layers and a pass, two caches and four texts, each of one chunk or more
        const scene::InterruptAfter press(after);
        Evaluation all = eval({"-f", file});
        CHECK(std::isnan(all.results[0].bytes_per_token));
        CHECK((all.results[0].predicted > 0) == (after > 1));
        CHECK(all.results[0].predicted < whole.results[0].predicted);
        CHECK(report_of(all).text.find("nan") == std::string::npos);
    }
    CHECK(whole.results[0].bytes_per_token > 0);
}

TEST_CASE("windows and convolutions in pages: what decoding needs for its time is read again, and changes no figure") {
    for (const char *model : {"gemma3", "mistral_window", "lfm2"})
        for (const char *ids : {"3", "40", "62"}) {  // 1, 38 and 60 tokens
            CAPTURE(model);
            CAPTURE(ids);
            Words list{"2"};
            for (int id = 3; id <= std::stoi(ids); id++) list.push_back(std::to_string(id));
            const std::string fixture = scene::fixtures + model;
            const Evaluation all = eval({"--ids", joined(list, ","), "--cache", "contiguous,paged,ring", "--page", "8",
                                         "--kv", "f32,int4"},
                                        fixture);
            REQUIRE(all.results.size() == 6);
            for (const EvalResult &result : all.results) {
                CAPTURE(title_of(result));
                CHECK(result.predicted == (int)list.size() - 1);
                CHECK(result.rates.size() == 1);
                if (title_of(result) == "paged f32 f32") CHECK((result.kl == 0 && result.loss == all.results[0].loss));
            }
            CHECK(eval({"--ids", joined(list, ","), "--all"}, fixture).results.size() > 10);
        }
}

TEST_CASE("the caches that the flags name, behind f32, which is not there twice") {  // how lists pair: test_flags
    auto names = [&](const std::string &flags) {
        return names_of(
            open_results(parse_options(split("eval --page 9 --cache paged,contiguous " + flags)), engine(), 64));
    };
    const std::string f32 = "contiguous f32 f32";
    CHECK(names("--kv f16") == Words{f32, "paged f16 f16", "contiguous f16 f16"});
    CHECK(names("--kv f32") == Words{f32, "paged f32 f32"});
    CHECK(names("-ctk f32,f16 -ctv f32") == Words{f32, "paged f32 f32", "paged f16 f32", "contiguous f16 f32"});
}

TEST_CASE("--all lists each precision; the table and --json have its figures") {
    Evaluation all = eval({"-f", file_of("all", Words{stories()[0]}), "--all"});
    Report report = report_of(all);
    Json root = parse_json("eval", report.json());
    std::vector<const Json *> rows = items_of(root, "results");
    Words names = names_of(all.results), lines = split(report.text, '\n');
    REQUIRE((rows.size() == names.size() && lines.size() > names.size() + 1));
    const std::string listed = joined(names, ",") + ",";
    for_each_type<Precision>(
        [&](auto type) { check_contains(listed, std::string("contiguous ") + type.name + " " + type.name + ","); });
    check_contains(listed, ",contiguous int4 int2,", ",paged int4 int4,", ",ring f16 f16,");
    for (size_t i = 0; i < names.size(); i++) {
        const EvalResult &result = all.results[i];
        const Ring *ring = std::get_if<Ring>(&result.cache.layout);
        std::istringstream line(lines[i + 1]);
        Words words{std::istream_iterator<std::string>(line), {}}, cache = split(names[i]);
        CHECK((member(rows[i], "window") != nullptr) == (ring != nullptr));
        if (ring) {
            CHECK(number_of(rows[i], "window") == ring->window);
            CHECK(number_of(rows[i], "sinks") == ring->sinks);
            cache.insert(cache.begin() + 1, {std::to_string(ring->window), "+", std::to_string(ring->sinks)});
        }
        REQUIRE(words.size() == cache.size() + 13);  // "100 %" are two
        CHECK(std::equal(cache.begin(), cache.end(), words.begin()));
        words.erase(words.begin(), words.begin() + (int)cache.size());
        auto same = [&](const char *key, double number, const std::string &shown, double unit) {  // of its last digit
            CHECK_MESSAGE(number_of(rows[i], key) == number, key);
            CHECK_MESSAGE(std::fabs(std::stod(shown) - number) <= unit / 2 * (1 + 1e-9), key);
        };
        same("bytes_per_token", result.bytes_per_token, words[0], 0.1);
        same("times_smaller", all.results[0].bytes_per_token / result.bytes_per_token, words[1], 0.01);
        same("perplexity", result.perplexity(), words[2], 1e-4);
        same("standard_error", result.standard_error(), words[3], 1e-4);
        same("kl", result.mean_kl(), words[4], result.mean_kl() * 0.01);
        same("tokens_per_second", median(result.rates), words[12], 0.1);
        const Json *recall = Section{"", rows[i]}.need("recall");
        Report expected;  // no class but the first has questions
        expected.add("distance", 0).add("questions", result.asked[0]).add("right", result.right[0]);
        CHECK(printable(recall) == printable(json_text(parse_json("", "{\"r\": [" + expected.json() + "]}").items[0])));
        CHECK(std::fabs(std::stod(words[5]) - 100.0 * result.right[0] / result.asked[0]) <= 0.5);
    }
    check_contains(report.text, "145 tokens predicted", "recall: 3 questions");
}
