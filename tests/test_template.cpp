// Chat templates: this project's own write what Transformers makes of the models' (weights_tools/make_templates.py);
// which bytes are marked; where a template is looked for; files and programs that are broken, hostile or too slow.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "../commands/template.h"

#include "files.h"

using Turns = std::vector<Turn>;

const Section &whole() {
    static const Json root = parse_json("fixture", slurp("tests/fixtures/chat_templates.json"));
    static const Section whole{"fixture", root.get()};
    return whole;
}

const Tokenizer *builtin() {
    static const TokenizerPointer tokenizer = load_tokenizer("weights_tools/builtin");
    return tokenizer.get();
}

ChatTemplate opened(const std::string &directory, const std::string &asked = "") {
    return open_template(directory, asked, builtin());
}

Rendered rendered(const ChatTemplate &with, const std::string &system, const Turns &turns) {
    return unmarked(render(with, system, turns));
}

struct Conversation {
    std::string title, system;
    Turns turns;
};

std::vector<Conversation> conversations() {
    std::vector<Conversation> all;
    for (const cJSON *one : items_of(whole().need("conversations"))) {
        const Section said{one->string, one};
        Conversation next{one->string, said.text("system", ""), {}};
        for (const cJSON *turn : items_of(said.need("turns"))) {
            const auto texts = items_of(turn);
            next.turns.push_back({texts[0]->valuestring, cJSON_IsString(texts[1]) ? texts[1]->valuestring : ""});
        }
        all.push_back(next);
    }
    REQUIRE(all.size() >= 10);
    return all;
}

// A directory as of a checkpoint, and the template of this project that writes what its own does.
struct Checkpoint {
    Scratch directory;
    std::string name, ours;
    Section texts;
    explicit Checkpoint(const cJSON *item) : texts(Section{"template", item}.section("texts")) {
        const Section about{"template", item};
        const std::string bos = about.text("bos", "");
        name = about.text("name", ""), ours = about.text("ours", "");
        const std::string extra = "tests/fixtures/chat_templates/" + ours + ".jinja";
        if (file_exists(extra)) ours = extra;
        spill(directory / "tokenizer_config.json", "{\"bos_token\": " + (bos.empty() ? "null" : json_of(bos)) +
                                                       ", \"eos_token\": " + json_of(about.text("eos", "")) + "}");
    }
};

std::vector<const cJSON *> checkpoints() {
    const auto all = items_of(whole().need("templates"));
    REQUIRE(all.size() >= 14);
    return all;
}

struct OnThatDay : Environment {  // of the fixture's texts
    OnThatDay() : Environment("SOURCE_DATE_EPOCH", std::to_string(noon()).c_str()) {}
    static time_t noon() {
        std::tm day{};
        REQUIRE(sscanf(whole().text("today", "").c_str(), "%d-%d-%d", &day.tm_year, &day.tm_mon, &day.tm_mday) == 3);
        day.tm_year -= 1900, day.tm_mon -= 1, day.tm_hour = 12;
        return mktime(&day);
    }
};

TEST_CASE("templates write what Transformers makes of those of the models, byte for byte") {
    const OnThatDay day;
    std::set<std::string> ours;
    int texts = 0;
    for (const cJSON *item : checkpoints()) {
        const Checkpoint checkpoint(item);
        CAPTURE(checkpoint.name);
        const ChatTemplate with = opened(checkpoint.directory.str(), checkpoint.ours);
        ours.insert(checkpoint.ours);
        for (const Conversation &said : conversations()) {
            CAPTURE(said.title);
            const cJSON *text = checkpoint.texts.find(said.title.c_str());
            if (!text) continue;  // there the model's own has a text that is its own
            CHECK(rendered(with, said.system, said.turns).text == text->valuestring);
            texts++;
        }
    }
    CHECK(texts >= 110);
    for (const auto &file : fs::directory_iterator("weights_tools/chat_templates"))
        if (const std::string name = file.path().stem(); name != "plain") CHECK_MESSAGE(ours.count(name), name);
}

TEST_CASE("of special tokens those from outside are marked, where they begin, and nothing else") {
    const OnThatDay day;
    int marked = 0, others = 0;
    for (const cJSON *item : checkpoints()) {
        const Checkpoint checkpoint(item);
        CAPTURE(checkpoint.name);
        ChatTemplate with = opened(checkpoint.directory.str(), checkpoint.ours);
        with.specials = {"<|im_end|>",      "<|im_start|>",    "[/INST]", "</s>",          "<|eot_id|>",
                         "<start_of_turn>", "<bos>",           "<|end|>", "<end_of_turn>", "<|user|>",
                         "<｜User｜>",      "<|end_of_role|>", "[INST]",  "<<SYS>>",       "<|endoftext|>"};
        for (const Conversation &said : conversations()) {
            const cJSON *text = checkpoint.texts.find(said.title.c_str());
            if (!text || !contains(said.title, "spelled")) continue;
            const Rendered all = rendered(with, said.system, said.turns);
            CHECK(all.text == text->valuestring);
            REQUIRE(all.typed.size() == all.text.size());
            std::string outside = said.system;
            for (const Turn &turn : said.turns) outside += turn.user + turn.answer;
            auto spelled = [&](const std::string &in, size_t at) {
                return std::any_of(with.specials.begin(), with.specials.end(), [&](const std::string &special) {
                    return in.compare(at, special.size(), special) == 0;
                });
            };
            int found = 0, wanted = 0;
            for (size_t i = 0; i < all.text.size(); i++) {
                if (all.typed[i]) CHECK(spelled(all.text, i));
                found += all.typed[i], others += !all.typed[i] && spelled(all.text, i);
            }
            for (size_t i = 0; i < outside.size(); i++) wanted += spelled(outside, i);
            CHECK(found == wanted);
            marked += found;
        }
    }
    CHECK((marked >= 200 && others >= 100));
}

TEST_CASE("what is said comes through as it is, the mark and the letters of JSON, too") {
    const ChatTemplate with = opened("weights_tools/builtin", "plain");
    for (const std::string text :
         {"\1", "\1\1 <|endoftext|>\1", "\\ \" \n \t \x7f", "<|endoftext|>\1<|endoftext|>", ""})
        CHECK(rendered(with, "", {{text, ""}}).text == text);
    CHECK(rendered(with, "", {{"a\1<|endoftext|>", ""}}).typed == std::string("\0\0\1\0\0\0\0\0\0\0\0\0\0\0\0", 15));
    check_contains(error_of([&] { rendered(with, "", {{"caf\xe9", ""}}); }), "this turn: byte 3, 0xE9, is not UTF-8");
    check_contains(error_of([&] { rendered(with, "\xff", {{"Hi", ""}}); }), "--system: byte 0, 0xFF, is not UTF-8");
    const std::string ended("a\0\1\2b\0", 6);
    CHECK(rendered(with, "", {{ended, ""}}).text == ended);
    const Environment latin("PYTHONIOENCODING", "latin-1");
    CHECK(rendered(opened("weights_tools/builtin", "plain"), "", {{"café", ""}}).text == "café");
}

TEST_CASE("a template by its name, or of a file") {
    const Scratch bare;
    const auto hello = [&](const std::string &asked) {
        return rendered(opened(bare.str(), asked), "", {{"Hi", ""}}).text;
    };
    CHECK(hello("chatml") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    CHECK(opened(bare.str(), "chatml").end == "<|im_end|>\n");
    CHECK(opened(bare.str(), "plain").end == "\n");
    for (const std::string asked : {"alpaca", "chatml llama3", "../chat_templates/chatml"})
        check_contains(error_of([&] { hello(asked); }), "--template " + asked, "chatml", "zephyr", "FILE.jinja");
    check_contains(error_of([&] { hello(""); }), bare.str(), "no chat template is there", "--template NAME",
                   "llm generate");
    check_contains(error_of([&] { hello("zephyr"); }), "--template zephyr", "'eos_token' is undefined");
    check_contains(error_of([&] { hello("none.jinja"); }), "none.jinja: No such file");
    spill(bare / "mine.jinja", "{{ messages[-1].content }}!");
    CHECK(hello(bare / "mine.jinja") == "Hi!");
    spill(bare / "special_tokens_map.json", R"({"bos_token": {"content": "<B>"}, "eos_token": "<E>"})");
    CHECK(hello("llama2") == "<B>[INST] Hi [/INST]");
    CHECK(hello("zephyr") == "<|user|>\nHi<E>\n<|assistant|>\n");
    CHECK(opened(bare.str(), "llama2").end == " <E>");
    spill(bare / "tokenizer_config.json", R"({"bos_token": {"content": "<C>", "lstrip": false}})");
    CHECK(hello("mistral") == "<C>[INST] Hi[/INST]");  // what stands in tokenizer_config.json counts
}

TEST_CASE(
    "a template in tokenizer_config.json: a text, or a list of which the default counts; the file beside counts") {
    const Scratch bare;
    const auto written = [&](const std::string &value) {
        spill(bare / "tokenizer_config.json", "{\"weight\": NaN, \"chat_template\": " + value + "}");
        return rendered(opened(bare.str()), "", {{"Hi", ""}}).text;
    };
    const std::string tools = R"([{"name": "tool_use", "template": "tools"}, )",
                      one = R"("1 {{ messages[0].content }}")";
    CHECK(written(one) == "1 Hi");
    CHECK(written(tools + "{\"name\": \"default\", \"template\": " + one + "}]") == "1 Hi");
    check_contains(error_of([&] { written(tools + "{}]"); }), bare.str(), "no chat template is there");
    spill(bare / "chat_template.jinja", "2 {{ messages[0].content }}");
    CHECK(written(one) == "2 Hi");
}

TEST_CASE("broken files get a line") {
    const Scratch bare;
    const std::string config = bare / "tokenizer_config.json", beside = bare / "chat_template.jinja";
    const auto refusal = [&] { return error_of([&] { opened(bare.str()); }); };
    for (const std::string json : {"", "{", "[]", "7", R"({"chat_template": 7})", R"({"chat_template": {"a": "x"}})",
                                   R"({"chat_template": [{"name": "default", "template": [7]}]})", "{\"a\": \xff}"}) {
        spill(config, json);
        CHECK_MESSAGE(contains(refusal(), config), json);
    }
    spill(config, "{}");
    for (const std::string program : {"{{", "{{ '", "{% if %}", "{% unknown %}", "{{ 'a' | unknown }}"}) {
        spill(beside, program);
        check_contains(refusal(), beside + ", line 1: ");
    }
    spill(beside, "{{ '\xc3' }}");
    check_contains(refusal(), beside + ": byte 4, 0xC3, is not UTF-8");
    fs::remove(beside), fs::create_directory(beside);
    check_contains(refusal(), beside + ": Is a directory");
    fs::remove(beside), fs::create_symlink(bare / "nowhere", beside);
    check_contains(refusal(), beside + ": No such file");
    fs::remove(beside);
    REQUIRE(mkfifo(beside.c_str(), 0600) == 0);
    check_contains(refusal(), beside + ": is not a regular file");
    fs::remove(beside);
    setenv("SOURCE_DATE_EPOCH", "noon", 1);
    check_contains(error_of([&] { opened(bare.str(), "chatml"); }), "SOURCE_DATE_EPOCH=noon", "seconds");
    unsetenv("SOURCE_DATE_EPOCH");
    spill(beside, "{{ tools | length }}{{ messages[-1].content }}");
    check_contains(refusal(), beside + ": TypeError", "--template NAME or FILE.jinja");
}

TEST_CASE(
    "programs that refuse, fail, take too long or too much, or reach out get a line, and the next text is written") {
    const Scratch bare;
    const std::string place = bare / "chat_template.jinja";
    const struct {
        const char *program, *says;
    } cases[] = {
        {"{{ raise_exception('only\ntwo') }}", "only two"},
        {"{{ nobody.name }}", "undefined"},
        {"{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}", "longer than 3 s"},
        {"{{ 'x' * 10000000000 }}", "MemoryError"},
        {"{{ 'x' * 20000000 }}", "more than 2^24"},
        {"{{ range(1000000000) | list }}", "Range too big"},
        {"{{ ''.__class__.__mro__ }}", "unsafe"},
        {"{% set n = namespace(__class__=1) %}", "no __class__"},
        {"{% set n = namespace() %}{% set n._x = 1 %}", "no _x"},
        {"{% include '/etc/passwd' %}", "loader"},
        {"{{ messages.append(1) }}", "unsafe"},
        {"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"},
        {"{{ '\\u0000' }}", "NUL"},
        {"{{ '\\ud800' }}", "UnicodeEncodeError"},
        {"{{ raise_exception('\\ud800') }}", "?"},
    };
    std::string all = "{% set said = messages[0].content %}";
    for (size_t i = 0; i < std::size(cases); i++)
        all += "{% if said == 'case " + std::to_string(i) + "' %}" + cases[i].program + "{% endif %}";
    spill(place, all + "{% if said != 'silent' %}{{ messages[-1].content }}{% endif %}");
    const ChatTemplate with = opened(bare.str());
    auto refusal = [&](const std::string &said) { return error_of([&] { rendered(with, "", {{said, ""}}); }); };
    for (size_t i = 0; i < std::size(cases); i++) {
        CAPTURE(cases[i].program);
        check_contains(refusal("case " + std::to_string(i)), place + ": ", cases[i].says);
        CHECK(rendered(with, "", {{"good", ""}}).text == "good");
    }
    check_contains(refusal("silent"), place + ": it does not write what was said");
    kill(with.child, SIGKILL);
    for (int i = 0; i < 2; i++) check_contains(refusal("good"), "program ended", "python3");
    spill(place, "{% if messages[0].content == 'C' %}{{ ([[messages | length] * 1000] * 30000) | sum(start=[]) }}{% endif %}");
    const ChatTemplate slow = opened(bare.str());  // in C code, which hears of no time
    check_contains(error_of([&] { rendered(slow, "", {{"C", ""}}); }), "program ended", "a template to end");
    CHECK(slow.end == "");
    const Environment path("PATH", bare.str().c_str());
    check_contains(error_of([&] { opened(bare.str()); }), "program ended", "python3");
}

TEST_CASE("what templates find there beside Jinja's own is as Transformers has it") {
    const Scratch bare;
    const OnThatDay day;
    spill(bare / "all.jinja",
          "{{ {'a': 'é<'} | tojson }}{{ [1, 2] | tojson(indent=1) }}{{ strftime_now('%d %b %Y') }}\n"
          "  {% if tools is none and documents is none %}\nnone{% endif %}{{ bos_token }}"
          "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ add_generation_prompt }}");
    CHECK(rendered(opened(bare.str(), bare / "all.jinja"), "", {{"Hi", ""}}).text ==
          "{\"a\": \"é<\"}[\n 1,\n 2\n]05 Mar 2026\nnoneHiTrue");
}
