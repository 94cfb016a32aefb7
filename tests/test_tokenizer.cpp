// The tokenizer against the tokenizers library: ids, text, streaming; against broken files; against the clock.
// Run from the repository's root. Fixtures: weights_tools/make_tokenizer_fixtures.py.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <sys/stat.h>
#include <utf8proc.h>

#include <ctime>
#include <memory>
#include <random>
#include <thread>

#include "../base/tokenizer.h"
#include "files.h"

static const std::string FIXTURES = "tests/fixtures/tokenizers/";

using Ids = std::vector<int>;
using Loaded = std::unique_ptr<Tokenizer, decltype(&tokenizer_free)>;
using Stream = std::unique_ptr<TokenizerStream, decltype(&tokenizer_stream_free)>;

// Of a fixture, an object or a list.
static Json parse(const std::string &file) {
    return parse_json(file, "{\"a\":" + slurp(file) + "}").items[0];
}

static std::string all_replaced(std::string text, const std::string &what, const std::string &by) {
    for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size())
        text.replace(at, what.size(), by);
    return text;
}

// A string of a fixture: U+E000 stands for NUL.
static std::string fixture_text(const Json *item) {
    return all_replaced(item->text, "\xEE\x80\x80", std::string(1, '\0'));
}

static Loaded load_text(const std::string &json, std::string *error = nullptr) {
    char text[300] = "";
    Loaded t(tokenizer_parse(json.data(), json.size(), "tokenizer.json", text, sizeof text), tokenizer_free);
    if (error)
        *error = text;
    else
        CHECK_MESSAGE(t, text);
    return t;
}

static Loaded load_shape(const std::string &name) { return load_text(slurp(FIXTURES + name + ".json")); }

static Ids encode(const Tokenizer *t, const std::string &text, bool add_special = true) {
    int *ids = nullptr;
    char error[200] = "";
    int count = tokenizer_encode(t, text.data(), text.size(), nullptr, add_special, &ids, error, sizeof error);
    CHECK_MESSAGE(count >= 0, error);
    Ids result(ids, ids + (count > 0 ? count : 0));
    free(ids);
    return result;
}

static std::string encode_error(const Tokenizer *t, const std::string &text) {
    int *ids = nullptr;
    char error[200] = "";
    CHECK(tokenizer_encode(t, text.data(), text.size(), nullptr, true, &ids, error, sizeof error) == -1);
    CHECK(ids == nullptr);
    return error;
}

// What a stream gives, id by id, the flush last.
static std::vector<std::string> stream(const Tokenizer *t, const Ids &ids, bool skip_special) {
    Stream stream(tokenizer_stream_begin(t, skip_special), tokenizer_stream_free);
    std::vector<std::string> parts;
    size_t length = 0;
    for (int id : ids) {
        const char *text = tokenizer_stream_next(stream.get(), id, &length);
        parts.emplace_back(text, length);
    }
    const char *text = tokenizer_stream_flush(stream.get(), &length);
    parts.emplace_back(text, length);
    return parts;
}

static std::string decode(const Tokenizer *t, const Ids &ids, bool skip_special) {
    std::string text;
    for (const std::string &part : stream(t, ids, skip_special)) text += part;
    return text;
}

static bool whole_characters(const std::string &text) {
    utf8proc_ssize_t length = 1;
    utf8proc_int32_t code;
    for (size_t at = 0; at < text.size() && length > 0; at += (size_t)std::max(length, (utf8proc_ssize_t)0))
        length =
            utf8proc_iterate((const utf8proc_uint8_t *)text.data() + at, (utf8proc_ssize_t)(text.size() - at), &code);
    return length > 0;
}

static std::string show(const Ids &ids) {
    std::string text;
    for (int id : ids) text += std::to_string(id) + " ";
    return text;
}

static Ids id_list(const Json *list) {
    Ids ids;
    for (const Json *item : items_of(list)) ids.push_back((int)item->number);
    return ids;
}

using Check = std::function<void(const Tokenizer *, const Json *)>;

// Calls `check` with every shape's tokenizer and expected results.
static void each_shape(const Check &check) {
    const Json expected = parse(FIXTURES + "expected.json");
    REQUIRE(count_of(&expected) >= 21);
    for (const Json *shape : items_of(&expected)) {
        INFO(shape->key);
        Loaded t = load_shape(shape->key);
        REQUIRE(t);
        check(t.get(), shape);
    }
}

TEST_CASE("ids are those of the library, for every shape and string; without special tokens less those around") {
    Json strings = parse(FIXTURES + "strings.json");
    size_t around = 0;
    each_shape([&](const Tokenizer *t, const Json *shape) {
        Ids before = id_list(member(shape, "before")), after = id_list(member(shape, "after"));
        around += before.size() + after.size();
        const std::vector<Json> &expected = member(shape, "ids")->items;
        REQUIRE(expected.size() == strings.items.size());
        for (size_t i = 0; i < expected.size(); i++) {
            const std::string text = fixture_text(&strings.items[i]);
            INFO(text);
            CHECK(show(encode(t, text)) == show(id_list(&expected[i])));
            Ids ids = before, middle = encode(t, text, false);
            ids.insert(ids.end(), middle.begin(), middle.end());
            ids.insert(ids.end(), after.begin(), after.end());
            CHECK(show(ids) == show(id_list(&expected[i])));
        }
    });
    CHECK(around >= 5);
}

TEST_CASE("text is that of the library, special tokens shown and skipped") {
    Json strings = parse(FIXTURES + "strings.json");
    each_shape([&](const Tokenizer *t, const Json *shape) {
        for (size_t i = 0; i < strings.items.size(); i++) {
            const Json *text = &strings.items[i], *decoded = &member(shape, "decoded")->items.at(i);
            const Json *skipped = &member(shape, "skipped")->items.at(i);
            const Ids ids = id_list(&member(shape, "ids")->items.at(i));
            INFO(text->text);
            CHECK(decode(t, ids, false) == fixture_text(is_null(decoded) ? text : decoded));
            CHECK(decode(t, ids, true) == fixture_text(is_null(skipped) ? text : skipped));
        }
    });
}

TEST_CASE("a stream gives whole characters, and together the text, for any ids") {
    unsigned seed = std::random_device()();
    INFO("seed " << seed);
    std::mt19937 random(seed);
    each_shape([&](const Tokenizer *t, const Json *) {
        for (int round = 0; round < 200; round++) {
            Ids ids(random() % 40);
            for (int &id : ids) id = (int)(random() % (unsigned)(tokenizer_size(t) + 2)) - 1;  // also ids there are not
            bool skip = round % 2;
            std::string text;
            for (const std::string &part : stream(t, ids, skip)) {
                CHECK(whole_characters(part));
                text += part;
            }
            CHECK(text == decode(t, ids, skip));
        }
    });
}

TEST_CASE("a stream gives a character as soon as its last byte is there") {
    Loaded t = load_shape("gpt2");
    Ids ids = encode(t.get(), "\xF0\x9F\x98\x80!");
    REQUIRE(ids.size() >= 3);  // the emoji takes several byte tokens
    std::vector<std::string> parts = stream(t.get(), ids, false);
    CHECK(parts[ids.size() - 2] == "\xF0\x9F\x98\x80");
    CHECK(parts[ids.size() - 1] == "!");
    CHECK(parts.back() == "");
    ids.resize(ids.size() - 2);  // the emoji's last byte never comes
    parts = stream(t.get(), ids, false);
    CHECK(parts.back() == "\xEF\xBF\xBD");
}

TEST_CASE("a run of byte tokens with one bad byte is U+FFFD for each") {
    Loaded t = load_shape("llama2");
    int e6 = tokenizer_find(t.get(), "<0xE6>"), b0 = tokenizer_find(t.get(), "<0xB0>"),
        b4 = tokenizer_find(t.get(), "<0xB4>");
    REQUIRE(e6 >= 0);
    CHECK(decode(t.get(), {e6, b0, b4}, false) == "\xE6\xB0\xB4");
    CHECK(decode(t.get(), {e6, b0, b4, e6}, false) == all_replaced("xxxx", "x", "\xEF\xBF\xBD"));
    CHECK(stream(t.get(), {e6, b0}, false) ==
          std::vector<std::string>{"", "", all_replaced("xx", "x", "\xEF\xBF\xBD")});
}

TEST_CASE("a stream begins anew after a flush") {
    Loaded t = load_shape("llama2");
    Ids ids = encode(t.get(), "the river");
    Stream s(tokenizer_stream_begin(t.get(), true), tokenizer_stream_free);
    for (int round = 0; round < 2; round++) {
        std::string text;
        for (int id : ids) text += tokenizer_stream_next(s.get(), id, nullptr);
        text += tokenizer_stream_flush(s.get(), nullptr);
        CHECK(text == "the river");  // the space put before it is stripped each time
    }
}

TEST_CASE("tokens are found by their spelling, and know whether they are special") {
    Loaded t = load_shape("qwen2");
    int end = tokenizer_find(t.get(), "<|im_end|>"), the = tokenizer_find(t.get(), "\xC4\xA0the");
    CHECK(encode(t.get(), "<|im_end|> the") == Ids{end, the});
    CHECK(tokenizer_is_special(t.get(), end));
    CHECK_FALSE(tokenizer_is_special(t.get(), the));
    CHECK_FALSE(tokenizer_is_special(t.get(), tokenizer_find(t.get(), "<one>")));
    CHECK(std::string(tokenizer_token(t.get(), the)) == "\xC4\xA0the");
    CHECK(tokenizer_find(t.get(), "no such token") == -1);
    for (int id : {-1, tokenizer_size(t.get()), 1 << 30}) {
        CHECK(tokenizer_token(t.get(), id) == nullptr);
        CHECK_FALSE(tokenizer_is_special(t.get(), id));
    }
    CHECK(tokenizer_token(t.get(), tokenizer_size(t.get()) - 1) != nullptr);
}

TEST_CASE("the escapes of JSON are read, and white space between values is none of them") {
    Loaded t = load_text(
        " {\t\"model\" :\r\n{\"vocab\": {\"\\u0061\\n\\t\\r\\b\\f\\/\\\\\\\"\\u00e9\\u6C34\\uD83D\\ude00\" : 1e0 ,"
        "\"\" :0}, \"merges\":[ ] ,\"dropout\": 0.0 } } \n");
    REQUIRE(t);
    CHECK(std::string(tokenizer_token(t.get(), 1)) == "a\n\t\r\b\f/\\\"\xC3\xA9\xE6\xB0\xB4\xF0\x9F\x98\x80");
    CHECK(std::string(tokenizer_token(t.get(), 0)).empty());
}

TEST_CASE("merges go by rank, also where a pair that waited has changed meanwhile") {
    Loaded t = load_text(R"({"model":{"vocab":{"a":0,"b":1,"c":2,"d":3,"bc":4,"ab":5,"bcd":6,"abc":7},)"
                         R"("merges":["b c","a b","bc d","a bc"]}})");
    CHECK(show(encode(t.get(), "abcd")) == "0 6 ");  // not abc, d: when a b comes up, b is bc already
    CHECK(show(encode(t.get(), "abab")) == "5 5 ");
    CHECK(show(encode(t.get(), "aabc")) == "0 7 ");
    CHECK(decode(t.get(), {0, 6}, false) == "a bcd");  // without a decoder: tokens with a space between them
}

// What the library makes of "<R>" (id 2, takes the blanks behind it) and a blank of its own (id 3) behind that.
TEST_CASE("a blank that is a token is gone where the token before took it") {
    Loaded t = load_text(R"({"added_tokens":[{"id":2,"content":"<R>","rstrip":true},{"id":3,"content":" ",)"
                         R"("lstrip":true}],"model":{"vocab":{"a":0,"b":1},"merges":[]}})");
    CHECK(show(encode(t.get(), "a<R> b")) == "0 2 1 ");
    CHECK(show(encode(t.get(), "a b")) == "0 3 1 ");
}

// A search for blanks at the end of a text (DeepSeek-LLM's) begins anew at each of many blanks before something else.
TEST_CASE("many blanks before a digit are tokens like others") {
    Loaded t = load_text(R"({"pre_tokenizer":{"type":"Split","behavior":"Isolated","pattern":{"Regex":"\\s+$"}},)"
                         R"("model":{"vocab":{" ":0,"1":1,"  ":2," 1":3},"merges":[[" "," "],[" ","1"]]}})");
    Ids ids(2500, 2);
    ids.push_back(3);
    CHECK(encode(t.get(), std::string(5001, ' ') + "1") == ids);
}

TEST_CASE("[[:punct:]] has the symbols of ASCII, too, as in the library's Oniguruma") {
    const std::string json = R"({"pre_tokenizer":{"type":"Split","behavior":"Isolated","pattern":{"Regex":"REGEX"}},)"
                             R"("model":{"vocab":{"a":0,"?":1,"a?":2},"merges":["a ?"]}})";
    auto ids = [&](const char *regex, char c) {
        std::string text = all_replaced(all_replaced(json, "?", std::string(1, c)), "REGEX", regex);
        return show(encode(load_text(text).get(), std::string("a") + c));
    };
    for (char c : std::string("$+<=>^|~`!")) {
        for (const char *apart : {"[[:punct:]]", "[^[:^punct:]]", "[[:^punct:]]", "[^[:punct:]]"})
            CHECK(ids(apart, c) == "0 1 ");
        for (const char *together : {"[[:^punct:]&&[^a]]", "[a[:^punct:]]{2}", "[\\\\[:punct:]{9}"})
            CHECK(ids(together, c) == "2 ");
    }
}

TEST_CASE("a special token whose normalized form is another text is not skipped, as in the library") {
    Loaded t = load_text(R"({"added_tokens":[{"id":2,"content":"<A>","special":true,"normalized":true},{"id":3,)"
                         R"("content":"<b>","special":true,"normalized":true}],"normalizer":{"type":"Replace",)"
                         R"("pattern":{"String":"A"},"content":"a"},"decoder":{"type":"Fuse"},)"
                         R"("model":{"vocab":{"a":0,"b":1},"merges":[]}})");
    CHECK(show(encode(t.get(), "<A>b<b>")) == "2 1 3 ");
    CHECK(decode(t.get(), {2, 1, 3}, true) == "<a>b");
}

TEST_CASE("threads encode with one tokenizer at the same time") {
    Loaded t = load_shape("phi4");
    std::string text;
    while (text.size() < 100000) text += "The old mill's RIVER, 1234 \xC3\xA4pfel\n";
    std::vector<Ids> ids(4);
    std::vector<std::thread> threads;
    for (Ids &mine : ids) threads.emplace_back([&] { mine = encode(t.get(), text); });
    for (std::thread &thread : threads) thread.join();
    for (const Ids &one : ids) CHECK(one == encode(t.get(), text));
}

// A folder with a shape's tokenizer.json, and what stands beside it.
struct Folder {
    Scratch scratch;
    std::string error;
    Folder(const std::string &tokenizer) { spill(scratch / "tokenizer.json", tokenizer); }
    Loaded load(const std::string &config) {
        const std::string file = scratch / "tokenizer.json", beside = scratch / "tokenizer_config.json";
        spill(beside, config);
        char why[300] = "";
        Loaded t(tokenizer_load(file.c_str(), beside.c_str(), why, sizeof why), tokenizer_free);
        error = why;
        return t;
    }
};

// Vocabulary: the characters of "<s>" as one token, and 13 more; what the settings add begins with id 14.
static const char LETTERS[] =
    R"({"added_tokens":[{"id":0,"content":"<s>","normalized":false,"special":true}],"decoder":{"type":"Fuse"},)"
    R"("model":{"vocab":{"<s>":0,"<":1,"|":2,"i":3,"m":4,"_":5,"s":6,"t":7,"a":8,"r":9,">":10,"u":11,"e":12,"h":13},)"
    R"("merges":[]}})";

TEST_CASE("tokens that only the files beside tokenizer.json name are tokens, as in Transformers 5.24") {
    Folder folder(LETTERS);
    const struct {
        const char *config, *text, *ids, *skipped;
    } cases[] = {
        {R"({})", "<|i|>hi", "1 2 3 2 10 13 3 ", "<|i|>hi"},
        {R"({"added_tokens_decoder":{"14":{"content":"<|i|>","special":true}}})", "<|i|>hi", "14 13 3 ", "hi"},
        {R"({"added_tokens_decoder":{"14":{"content":"<|i|>","lstrip":true}}})", "h <|i|>hi", "13 14 13 3 ",
         "h<|i|>hi"},
        {R"({"added_tokens_decoder":{"15":{"content":"<|i|>"},"14":{"content":"<m>"}}})", "<|i|><m>", "15 14 ",
         "<|i|><m>"},
        {R"({"added_tokens_decoder":{"0":{"content":"<s>","special":false}}})", "<s>", "0 ", ""},
        {R"({"additional_special_tokens":["<|i|>"]})", "<|i|>hi", "14 13 3 ", "hi"},
        {R"({"extra_special_tokens":["<|i|>"],"additional_special_tokens":["<m>"]})", "<|i|><m>", "14 1 4 10 ", "<m>"},
        {R"({"extra_special_tokens":{"x":"<|i|>"},"eos_token":"<m>"})", "<|i|><m>", "15 14 ", ""},
        {R"({"eos_token":"<|i|>"})", "<|i|>hi", "14 13 3 ", "hi"},
        {R"({"image_token":"<|i|>","bos_token":"<s>","pad_token":null})", "<|i|>hi", "14 13 3 ", "hi"},
        {R"({"eos_token":"h"})", "<s>hi", "0 13 3 ", "i"},
        {R"({"model_max_length":Infinity,"x":[NaN, -Infinity],"eos_token":"NaN"})", "NaNi", "14 3 ", "i"},  // by Python
        {R"({"pad_token":{"__type":"AddedToken","content":"<|i|>","rstrip":true}})", "<|i|> hi", "14 13 3 ", "hi"}};
    for (const auto &one : cases) {
        INFO(std::string(one.config));
        Loaded t = folder.load(one.config);
        REQUIRE_MESSAGE(t, folder.error);
        CHECK(show(encode(t.get(), one.text)) == one.ids);
        CHECK(decode(t.get(), encode(t.get(), one.text), true) == one.skipped);
    }
    CHECK(tokenizer_end(folder.load(R"({"eos_token":"<|i|>"})").get()) == 14);
    CHECK(tokenizer_end(folder.load("{}").get()) == -1);
    Folder unmarked(replaced(LETTERS, R"(,"special":true)", ""));
    CHECK(decode(unmarked.load(R"({"eos_token":"<s>"})").get(), {0, 13}, true) == "h");
    // The older special_tokens_map.json goes before the settings, but where these number the added tokens.
    const std::string map = folder.scratch / "special_tokens_map.json";
    spill(map, R"({"eos_token":{"content":"<|i|>","lstrip":true},"additional_special_tokens":["<m>"]})");
    CHECK(tokenizer_end(folder.load(R"({"eos_token":"h"})").get()) == 14);
    CHECK(show(encode(folder.load("{}").get(), "h <|i|><m>")) == "13 14 15 ");
    CHECK(tokenizer_end(folder.load(R"({"eos_token":"h","added_tokens_decoder":{}})").get()) == 13);
    for (const char *bad : {"[1]", "{", R"({"eos_token":1})"}) {
        spill(map, bad);
        CHECK_FALSE(folder.load("{}"));
    }
    fs::remove(map);
    for (const char *bad : {R"({"<|i|>":NaN})", R"({"<|i|>":Infinity})", R"({"<|i|>":-Infinity})", R"({"x":1NaN})"}) {
        spill(folder.scratch / "added_tokens.json", bad);
        CHECK_FALSE(folder.load("{}"));
    }
    spill(folder.scratch / "added_tokens.json", R"({"<|i|>":15,"<m>":14,"<s>":0})");
    Loaded t = folder.load(R"({"eos_token":"<m>"})");
    REQUIRE_MESSAGE(t, folder.error);
    CHECK(show(encode(t.get(), "<s><|i|><m>")) == "0 15 14 ");
    CHECK(decode(t.get(), {0, 15, 14}, true) == "<|i|>");
    const char *decoder = R"({"added_tokens_decoder":{"14":{"content":"<|i|>"}}})";  // goes before added_tokens.json
    CHECK(show(encode(folder.load(decoder).get(), "<|i|><m>")) == "14 1 4 10 ");
    fs::remove(folder.scratch / "added_tokens.json");
    for (const char *gap : {R"({"added_tokens_decoder":{"20":{"content":"<|i|>"}}})",
                            R"({"added_tokens_decoder":{"3":{"content":"<|i|>"}}})"}) {
        CHECK_FALSE(folder.load(gap));
        check_contains(folder.error, "added token \"<|i|>\" has id");
        check_contains(folder.error, "expected 14");
    }
}

TEST_CASE("only a template puts BOS before a text: add_bos_token says nothing beside a tokenizer.json") {
    Folder folder(slurp(FIXTURES + "gpt2.json"));
    const std::string config = folder.scratch / "tokenizer_config.json";
    for (const char *none :
         {"{}", R"({"add_bos_token": true, "bos_token": "<|endoftext|>"})", R"({"add_bos_token": 1})"})
        CHECK(encode(folder.load(none).get(), "") == Ids{});
    Folder llama(slurp(FIXTURES + "llama3.json"));
    CHECK(encode(llama.load(R"({"add_bos_token": false})").get(), "").size() == 1);
    for (const char *none : {R"({"bos_token": 3})", R"({"extra_special_tokens": [{}]})"}) {
        CHECK_FALSE(folder.load(none));
        check_contains(folder.error, "a token next to it is neither a string nor has a content");
    }
    CHECK_FALSE(folder.load(R"({"added_tokens_decoder": [{"content": "a"}, {"content": "b"}]})"));
    check_contains(folder.error, "added_tokens_decoder next to it is not an object");
    const char *refused[][2] = {
        {R"({"eos_token": "a", "eos_token": "b"})", "key \"eos_token\" stands twice in one object"},
        {"[]", "expected a JSON object"},
        {"{", "not valid JSON near line 1, byte 1"}};
    for (const auto &one : refused) {
        CHECK_FALSE(folder.load(one[0]));
        CHECK_MESSAGE(folder.error.find(config + ": ") == 0, folder.error);
        check_contains(folder.error, one[1]);
    }
    fs::remove(config);
    char why[300] = "";
    CHECK(Loaded(tokenizer_load((FIXTURES + "gpt2.json").c_str(), config.c_str(), why, sizeof why), tokenizer_free));
}

// ------------------------------------------------------------------------------------------------ bad input

TEST_CASE("text that is not UTF-8 is refused with its byte") {
    Loaded t = load_shape("gpt2");
    for (const char *bad :
         {"\x80", "\xC0\x80", "\xC1\xBF", "\xC3", "\xC3(", "\xE0\x9F\xBF", "\xE2\x82", "\xED\xA0\x80", "\xED\xBF\xBF",
          "\xF0\x8F\xBF\xBF", "\xF0\x9F\x98", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFE", "\xFF"}) {
        CHECK(encode_error(t.get(), std::string("ab") + bad).find("byte 2, 0x") != std::string::npos);
        CHECK(encode_error(t.get(), std::string("ab\xC3\xA9") + bad + "c").find("byte 4, 0x") !=
              std::string::npos);
    }
}

// Broken files: what stands in a good one ~ what comes instead, or ( | ) what else ~ what the error must say.
static const char GOOD[] =
    R"({"added_tokens":[{"id":5,"content":"<s>","special":true}],"normalizer":null,"pre_tokenizer":null,)"
    R"("post_processor":null,"decoder":null,"model":{"type":"BPE","dropout":null,"unk_token":null,)"
    R"("continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,)"
    R"("vocab":{"a":0,"b":1,"ab":2,"c":3,"d":4},"merges":["a b"]}})";
static const char BROKEN[] = R"(
]}} ~ ]} | ]}} x ~ not valid JSON near line 1, byte
"dropout":null ~ "dropout":nul ~ not valid JSON near line 1, byte
["a b"] ~ ["a b",] | ["a b"} ~ not valid JSON near line 1, byte
"a":0 ~ "\ud800":0 | "\ud800\u0041":0 | "\udc00\ud800":0 | "\u12g4":0 | "\x":0 ~ not valid JSON near line 1, byte
"a":0 ~ "a" 0 | a:0 | "a":- | "a":0x1 | "a":0, ~ not valid JSON near line 1, byte
"a":0 ~ "\u0000":0 ~ \u0000 ends a text here: leave it out
"BPE" ~ "Unigram" ~ model: type Unigram is not supported; supported is BPE
"unk_token":null ~ "unk_token":"éééééééééééééééééééééééééééééééééééééééé\n" ~ unk_token éé
"unk_token":null ~ "unk_token":"xéééééééééééééééééééééééééééééééééééééééé" ~ é is not in vocab
"BPE" ~ 7 ~ type is 7, expected a text
"dropout":null ~ "dropout":0.1 ~ dropout
prefix":null ~ prefix":"##" ~ continuing_subword_prefix
suffix":null ~ suffix":"</w>" ~ end_of_word_suffix
"fuse_unk":false ~ "fuse_unk":3 ~ fuse_unk is 3, expected true or false
"unk_token":null ~ "unk_token":"<unk>" ~ unk_token <unk> is not in vocab
"BPE" ~ "BPE","type":"BPE" ~ key "type" stands twice in one object
"normalizer":null ~ "normalizer":null,"normalizer":null ~ key "normalizer" stands twice
"special":true ~ "special":true,"special":false ~ key "special" stands twice
"fuse_unk":false, ~ "vocab":{}, ~ key "vocab" stands twice
"a":0 ~ "a":-1 ~ a is -1, expected a whole number from 0 to 16777215
"a":0 ~ "a":0.5 ~ a is 0.5
"a":0 ~ "a":16777216 | "a":1e300 ~ expected a whole number
"a":0 ~ "a":"0" ~ a is "0", expected a whole number
"a":0 ~ "a":1 ~ id 1 stands for "a" and "b"
"a":0, ~ "a":0,"a":9, ~ key "a" stands twice in one object
{"a":0,"b":1,"ab":2,"c":3,"d":4} ~ {} | [] ~ model.vocab is missing, empty or not an object
["a b"] ~ ["a c"] ~ merge 0, "a" and "c": vocab has no "ac"
["a b"] ~ ["a b","x b"] ~ merge 1, "x" and "b": vocab has no "x"
["a b"] ~ [["a","y"]] ~ vocab has no "y"
["a b"] ~ ["ab"] | ["a b c"] | [["a","b","c"]] | [["a"]] | [5] | [{"x":"a","y":"b"}] ~ merge 0 is neither
["a b"] ~ {} ~ merges is {}, expected a list
"id":5 ~ "id":4 ~ "<s>" has id 4, expected 5
"<s>" ~ "c" ~ "c" has id 5, expected 3
"id":5 ~ "id":7 ~ added token "<s>" has id 7, expected 5
"id":5 ~ "id":-5 ~ an added token: id is -5
"content":"<s>", ~  ~ content is missing
"special":true ~ "special":"yes" ~ special is "yes", expected true or false
[{"id":5,"content":"<s>","special":true}] ~ {} ~ added_tokens is {}, expected a list
[{"id":5,"content":"<s>","special":true}] ~ [null] ~ an added token: id is missing
"id":5, ~  ~ an added token: id is missing
PRE null ~ PRE {"type":"Bert"} ~ pre_tokenizer: type Bert is not supported; supported are Sequence ByteLevel
PRE null ~ PRE 7 ~ pre_tokenizer: type is missing
PRE null ~ PRE {"type":"Sequence"} ~ pretokenizers is missing
PRE null ~ PRE SPLIT null} ~ pattern is missing
PRE null ~ PRE SPLIT {"Regex":"a("}} ~ pattern a(: end pattern with unmatched parenthesis
PRE null ~ PRE SPLIT {"Regex":"(?|a)b"}} ~ pattern (?|a)b: undefined group option
PRE null ~ PRE SPLIT {"Regex":"\\p{Elvish}"}} ~ invalid character property name {Elvish}
PRE null ~ PRE SPLIT {"Regex":"(?<n>a)\\g<m>"}} ~ undefined name <m> reference
PRE null ~ PRE SPLIT {"Regex":"a{200000}"}} ~ too big number for repeat range
PRE null ~ PRE {"type":"Split","pattern":{"String":"a"},"behavior":"Sideways"} ~ behavior Sideways is not supported; supported are Isolated
PRE null ~ PRE {"type":"Split","pattern":{"String":"a"}} ~ behavior is missing
PRE null ~ PRE {"type":"ByteLevel","use_regex":1} ~ use_regex is 1, expected true or false
PRE null ~ PRE {"type":"Metaspace","replacement":""} ~ replacement is empty
"normalizer":null,"pre_tokenizer":null ~ "normalizer":{"type":"NFC"},"pre_tokenizer":FIRST ~ first after a step
PRE null ~ PRE {"type":"Metaspace","replacement":"_","prepend_scheme":"last"} ~ prepend_scheme last is not supported; supported are always first never
"normalizer":null ~ "normalizer":{"type":"Precompiled"} ~ normalizer: type Precompiled is not supported; supported are Sequence Prepend
"normalizer":null ~ "normalizer":{"type":"Prepend"} ~ prepend is missing
"normalizer":null ~ "normalizer":{"type":"Replace","pattern":{"String":"a"}} ~ content is missing
DEC null ~ DEC {"type":"WordPiece"} ~ decoder: type WordPiece is not supported; supported are Sequence ByteLevel
DEC null ~ DEC {"type":"Strip","content":" ","start":1,"stop":1} ~ stop is 1, expected
DEC null ~ DEC {"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"ByteFallback"}]} ~ ByteFallback after Fuse
POST null ~ POST {"type":"BertProcessing"} ~ post_processor: type BertProcessing is not supported; supported are
POST null ~ POST {"type":"TemplateProcessing","single":[]} ~ single holds the text 0 times
POST null ~ POST {"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"y"}},TEXT 5]}}} ~ neither text nor known
POST null ~ POST TEMPLATE 99]}}} ~ an id is 99, expected a whole number from 0 to 5
POST null ~ POST TEMPLATE 5,5,5,5,5,5,5,5,5,5,5,5,5,5,5,5,5]}}} ~ more than 16 special tokens
POST null ~ POST {"type":"Sequence","processors":[TEMPLATE 5]}}},TEMPLATE 5]}}}]} ~ more than one TemplateProcessing
)";
static const char *const SHORT[][2] = {
    {"FIRST", R"({"type":"Metaspace","replacement":"_","prepend_scheme":"first"})"},
    {"PRE ", R"("pre_tokenizer":)"},
    {"DEC ", R"("decoder":)"},
    {"POST ", R"("post_processor":)"},
    {"SPLIT ", R"({"type":"Split","behavior":"Isolated","pattern":)"},
    {"TEMPLATE ", R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"x"}},TEXT )"},
    {"TEXT ", R"({"Sequence":{"id":"A"}}],"special_tokens":{"x":{"ids":[)"}};

static void check_broken(const std::string &from, const std::string &to, const std::string &says) {
    INFO(says);
    std::string json = GOOD, error;
    size_t at = json.find(from);
    REQUIRE(at != std::string::npos);
    CHECK_FALSE(load_text(json.replace(at, from.size(), to), &error));
    CHECK(error.find("tokenizer.json: ") == 0);
    check_contains(error, says);
    CHECK(!contains(error, "\n"));
    CHECK(whole_characters(error));
    char tiny[8] = "1234567";  // an error that does not fit is cut
    CHECK(tokenizer_parse(json.data(), json.size(), "x", tiny, 4) == nullptr);
    CHECK(std::string(tiny + 4) == "567");
}

TEST_CASE("a broken tokenizer.json is refused in one line that says what is wrong") {
    REQUIRE(load_text(GOOD));
    std::istringstream lines(BROKEN + 1);
    for (std::string line; std::getline(lines, line);) {
        for (const auto &one : SHORT) line = all_replaced(line, one[0], one[1]);
        size_t first = line.find(" ~ "), second = line.find(" ~ ", first + 3), at = first + 3;
        REQUIRE(second != std::string::npos);
        for (size_t end; at <= second; at = end + 3) {
            end = std::min(line.find(" | ", at), second);
            check_broken(line.substr(0, first), line.substr(at, end - at), line.substr(second + 3));
        }
    }
    check_broken(GOOD, "", "not valid JSON");
    check_broken(GOOD, "[]", "expected a JSON object");
    check_broken(GOOD, "{}", "model is missing");
    check_broken(GOOD, std::string("{}\0", 3), "not valid JSON near line 1, byte 2");
    check_broken(GOOD, std::string(100000, '['), "not valid JSON");
    check_broken("\"a\"", "\"\xFF\"", ", 0xFF, is not UTF-8");
    for (const char *control : {"\"\n\"", "\"\x01\"", "\f\"a\""})
        check_broken("\"a\"", control, "not valid JSON near line");
    std::string deep = std::string(SHORT[4][1]) + "{\"Regex\":\"" + std::string(5000, '(') + "\"}}";
    check_broken(R"("pre_tokenizer":null)", R"("pre_tokenizer":)" + deep, "parse depth limit over");
}

TEST_CASE("a file cut short anywhere, or with any byte changed, is refused or loaded, never worse") {
    for (const char *shape : {"llama3", "llama2"}) {
        std::string json = slurp(FIXTURES + shape + ".json"), error;
        for (size_t n = 0; n + 1 < json.size(); n += 61) {
            CHECK_FALSE(load_text(json.substr(0, n), &error));
            CHECK(!contains(error, "\n"));
        }
        unsigned seed = std::random_device()();
        INFO("seed " << seed);
        std::mt19937 random(seed);
        for (int round = 0; round < 300; round++) {
            std::string broken = json;
            broken[random() % (round % 2 ? json.size() : 3000)] = (char)(random() % 256);
            Loaded t = load_text(broken, &error);
            if (t)
                CHECK_FALSE(encode(t.get(), "the old mill <s> 42 \xE6\xB0\xB4").empty());
            else
                CHECK_FALSE(error.empty());
        }
    }
}

TEST_CASE("a missing file, a directory and another kind of file are named") {
    char error[200];
    CHECK(tokenizer_load("no/such/tokenizer.json", nullptr, error, sizeof error) == nullptr);
    CHECK(std::string(error).find("no/such/tokenizer.json: cannot open it: No such file") == 0);
    CHECK(tokenizer_load("tests", nullptr, error, sizeof error) == nullptr);
    CHECK(std::string(error).find("tests: ") == 0);
    CHECK(tokenizer_load("tests/test_tokenizer.cpp", nullptr, error, sizeof error) == nullptr);
    CHECK(std::string(error).find("tests/test_tokenizer.cpp: not valid JSON") == 0);
}

TEST_CASE("a FIFO and a link that leads nowhere are refused in place of a file, at once") {
    Folder folder(LETTERS);
    const std::string file = folder.scratch / "tokenizer.json", beside = folder.scratch / "tokenizer_config.json";
    char error[400];
    auto refused = [&](const std::string &what, const char *says) {
        CHECK(tokenizer_load(file.c_str(), beside.c_str(), error, sizeof error) == nullptr);
        CHECK_MESSAGE(std::string(error).find(what + ": ") == 0, error);
        check_contains(error, says);
    };
    REQUIRE(mkfifo(beside.c_str(), 0600) == 0);
    refused(beside, "is not a regular file");
    for (const char *target : {"nowhere", "tokenizer_config.json"}) {
        fs::remove(beside);
        fs::create_symlink(target, beside);
        refused(beside, strcmp(target, "nowhere") ? "Too many levels of symbolic links" : "No such file");
    }
    fs::remove(beside);
    fs::remove(file);
    REQUIRE(mkfifo(file.c_str(), 0600) == 0);
    refused(file, "is not a regular file");
}

TEST_CASE("hostile patterns give ids or an error, not a wait or a crash") {
    const struct {
        const char *pattern, *says;  // "": ids
    } cases[] = {{"(a|aa)+[bc]", "a pattern of the tokenizer on this text: retry-limit-in-match over"},
                 {"(?:a*)*+c|(?:a|a)*c", "retry-limit-in-match over"},
                 {"(?:a|ab)*c|a", ""},
                 {"(?=aa\\\\K)a|(?<=a)\\\\K", ""},
                 {"((a{999}){999}){999}", ""},
                 {"(?<x>a\\\\g<x>?a?)+c", "-limit"},
                 {"(?~aab)(*FAIL)|(*ERROR{-217})", "invalid callout body"}};
    for (const auto &one : cases) {
        INFO(std::string(one.pattern));
        Loaded t =
            load_text(replaced(slurp(FIXTURES + "gpt2.json"), R"("pre_tokenizer":{"type":"ByteLevel")",
                               R"("pre_tokenizer":{"x":"y","type":"Split","behavior":"Isolated","pattern":{"Regex":")" +
                                   std::string(one.pattern) + "\"}"));
        REQUIRE(t);
        int *ids = nullptr;
        char error[200] = "";
        const std::string text = std::string(2999, 'a') + " c";
        int count = tokenizer_encode(t.get(), text.data(), text.size(), nullptr, true, &ids, error, sizeof error);
        CHECK(count == (*error ? -1 : 3000));
        CHECK_MESSAGE(std::string(error).find(one.says) != std::string::npos, error);
        free(ids);
    }
}

// ---------------------------------------------------------------------------------------- a real checkpoint

static const std::string stories = "../shared/checkpoints/stories260K/";  // the project does not depend on it

TEST_CASE("the tokenizer of stories260K decodes what another engine generated" * doctest::skip(!fs::exists(stories))) {
    Json expected = parse(stories + "expected.json");
    Loaded t = load_text(slurp(stories + "tokenizer.json"));
    REQUIRE(t);
    const Json *greedy = member(&expected, "greedy");
    Ids ids = id_list(member(greedy, "ids"));
    std::string text = decode(t.get(), ids, true), start = member(greedy, "text_start")->text;
    CHECK(text == start.substr(0, text.size()));
    ids.insert(ids.begin(), 1);
    CHECK(encode(t.get(), text) == ids);
}

// -------------------------------------------------------------------------------------------------- the clock

// Computed, not passed: a busy machine does not lengthen these.
static double seconds_to_encode(const Tokenizer *t, const std::string &text) {
    double best = 1e9;
    for (int round = 0; round < 3; round++) {
        const clock_t start = clock();
        encode(t, text);
        best = std::min(best, (double)(clock() - start) / CLOCKS_PER_SEC);
    }
    return best;
}

TEST_CASE("encoding time grows with the text, not with its square") {
    std::string words, giant, spaces, marks = "ab";
    while (words.size() < 1 << 20) words += "The old mill stands by the river, and 42 boats don't mind.\n";
    while (giant.size() < 1 << 20) giant += "thewindmillriverboatstandsandcountsgreen";
    spaces.assign(1 << 20, ' ');
    while (marks.size() < 1 << 20) marks += "\xCC\x81\xCC\xA3";  // each pair of marks is out of order
    const struct {
        const char *shape;
        const std::string &text;
    } cases[] = {{"llama3", words}, {"llama3", giant}, {"llama3", spaces}, {"gpt2", spaces},   {"deepseek3", words},
                 {"qwen2", giant},  {"llama2", words}, {"llama2", giant},  {"llama2", spaces}, {"qwen2", marks}};
    for (const auto &one : cases) {
        Loaded t = load_shape(one.shape);
        double quarter = seconds_to_encode(t.get(), one.text.substr(0, 1 << 18)),
               whole = seconds_to_encode(t.get(), one.text);
        INFO(std::string(one.shape) << ", 1 MiB of " << one.text.substr(0, 10) << "...: " << whole
                                    << " s, a quarter of it " << quarter);
        CHECK(whole < 4 * 2.5 * quarter + 0.01);  // linear: 4; n log n: 4.4; square: 16
    }
}
