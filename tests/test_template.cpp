// Chat templates: this project's own write what Transformers makes of the models' (weights_tools/make_templates.py);
// which bytes are marked; where a template is looked for; files and programs that are broken, hostile or too slow.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "../commands/template.h"

#include "files.h"

struct Turn {
    std::string user, answer;
};
using Turns = std::vector<Turn>;

const Section &whole() {
    static const Json root = parse_json("fixture", slurp("tests/fixtures/chat_templates.json"));
    static const Section whole{"fixture", &root};
    return whole;
}

const Tokenizer *builtin() {
    static const TokenizerPointer tokenizer = load_tokenizer("weights_tools/builtin");
    return tokenizer.get();
}

ChatTemplate opened(const std::string &directory, const std::string &asked = "", const std::string &system = "",
                    const std::vector<std::string> &arguments = {}) {
    return open_template(directory, asked, builtin(), system, arguments);
}

// What is said comes from outside, the answers, too.
Rendered rendered(const ChatTemplate &with, const std::string &system, const Turns &turns) {
    std::vector<Message> messages;
    auto add = [&](const char *role, const std::string &text, const char *what = "this turn") {
        messages.push_back({role, marked(with, text, what)});
    };
    if (!system.empty()) add("system", system, "--system");
    for (const Turn &turn : turns) add("user", turn.user), add("assistant", turn.answer);
    messages.pop_back();
    return render(with, messages);
}

struct Conversation {
    std::string title, system;
    Turns turns;
};

std::vector<Conversation> conversations() {
    std::vector<Conversation> all;
    for (const Json *one : items_of(whole().need("conversations"))) {
        const Section said{one->key, one};
        Conversation next{one->key, said.text("system", ""), {}};
        for (const Json *turn : items_of(said.need("turns"))) {
            const auto texts = items_of(turn);
            next.turns.push_back({texts[0]->text, is_text(texts[1]) ? texts[1]->text : ""});
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
    explicit Checkpoint(const Json *item) : texts(Section{"template", item}.section("texts")) {
        const Section about{"template", item};
        const std::string bos = about.text("bos", "");
        name = about.text("name", ""), ours = about.text("ours", "");
        const std::string extra = "tests/fixtures/chat_templates/" + ours + ".jinja";
        if (file_exists(extra)) ours = extra;
        spill(directory / "tokenizer_config.json", "{\"bos_token\": " + (bos.empty() ? "null" : json_of(bos)) +
                                                       ", \"eos_token\": " + json_of(about.text("eos", "")) + "}");
    }
};

std::vector<const Json *> checkpoints() {
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
    for (const Json *item : checkpoints()) {
        const Checkpoint checkpoint(item);
        CAPTURE(checkpoint.name);
        const ChatTemplate with = opened(checkpoint.directory.str(), checkpoint.ours);
        ours.insert(checkpoint.ours);
        for (const Conversation &said : conversations()) {
            CAPTURE(said.title);
            const Json *text = checkpoint.texts.find(said.title.c_str());
            if (!text) continue;  // there the model's own has a text that is its own
            CHECK(rendered(with, said.system, said.turns).text == text->text);
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
    for (const Json *item : checkpoints()) {
        const Checkpoint checkpoint(item);
        CAPTURE(checkpoint.name);
        ChatTemplate with = opened(checkpoint.directory.str(), checkpoint.ours);
        with.specials = {"<|im_end|>",      "<|im_start|>",    "[/INST]", "</s>",          "<|eot_id|>",
                         "<start_of_turn>", "<bos>",           "<|end|>", "<end_of_turn>", "<|user|>",
                         "<｜User｜>",      "<|end_of_role|>", "[INST]",  "<<SYS>>",       "<|endoftext|>"};
        for (const Conversation &said : conversations()) {
            const Json *text = checkpoint.texts.find(said.title.c_str());
            if (!text || !contains(said.title, "spelled")) continue;
            const Rendered all = rendered(with, said.system, said.turns);
            CHECK(all.text == text->text);
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
    // It counts, as in Transformers 5, unless tokenizer_config.json tells all tokens itself.
    const auto mistral = [&](const std::string &config) {
        spill(bare / "tokenizer_config.json", config);
        return hello("mistral");
    };
    CHECK(mistral(R"({"bos_token": {"content": "<C>", "lstrip": false}})") == "<B>[INST] Hi[/INST]");
    CHECK(mistral(R"({"bos_token": "<C>", "eos_token": "</C>", "added_tokens_decoder": {}})") == "<C>[INST] Hi[/INST]");
}

TEST_CASE(
    "special tokens with names are variables, those of an object of extra ones, too; null is none (as in "
    "Transformers)") {
    const Scratch bare;
    spill(
        bare / "all.jinja",
        "{{ [bos_token, image_token, think_token, q, pad_token, count_token] | join(' ') }} {{ messages[0].content }}");
    const auto with = [&](const std::string &config) {
        spill(bare / "tokenizer_config.json", config);
        return rendered(opened(bare.str(), bare / "all.jinja"), "", {{"Hi", ""}}).text;
    };
    CHECK(with(R"({"image_token": "<I>", "extra_special_tokens": {"think_token": "<T>", "q": {"content": "<Q>"}},
                   "pad_token": "<P>", "count_token": 3})") == " <I> <T> <Q> <P>  Hi");
    CHECK(with(R"({"image_token": "<I>", "extra_special_tokens": {"image_token": "<J>"}})") == " <J>     Hi");
    CHECK(with(R"({"image_token": "<I>", "extra_special_tokens": ["<T>"]})") == " <I>     Hi");
    CHECK(
        with(
            R"({"additional_special_tokens": {"q": "<Q>"}, "model_specific_special_tokens": {"think_token": "<T>"}})") ==
        "  <T> <Q>   Hi");
    spill(bare / "special_tokens_map.json", R"({"bos_token": "<B>", "pad_token": null})");
    CHECK(with(R"({"bos_token": null, "pad_token": "<P>"})") == "<B>      Hi");
    CHECK(with(R"({"bos_token": null, "pad_token": "<P>", "added_tokens_decoder": {}})") == "    <P>  Hi");
}

TEST_CASE("--template-arg: variables of the template, as JSON or a text") {
    const Scratch bare;
    spill(bare / "own.jinja",
          "{{ messages[0].content }}{{ ' thinks' if enable_thinking is not defined or enable_thinking }}"
          "{{ [n, name, bos_token] | tojson }}{% if tools %}{{ tools[0].name }}{% endif %}");
    spill(bare / "tokenizer_config.json", R"({"bos_token": "<B>"})");
    const auto with = [&](const std::vector<std::string> &arguments) {
        return rendered(opened(bare.str(), bare / "own.jinja", "", arguments), "", {{"Hi", ""}}).text;
    };
    CHECK(with({"n=1", "name=x"}) == "Hi thinks[1, \"x\", \"<B>\"]");
    CHECK(with({"enable_thinking=false", "n=[2]", "name=a=b", "bos_token="}) == "Hi[[2], \"a=b\", \"\"]");
    CHECK(with({"n=null", "name=\"é\"", "tools=[{\"name\": \"f\"}]"}) == "Hi thinks[null, \"é\", \"<B>\"]f");
    CHECK(with({"enable_thinking=False", "n=None", "name=True"}) == "Hi[null, true, \"<B>\"]");
    for (const char *wrong : {"n", "=1", "a b=1", "messages=1", "add_generation_prompt=false"})
        check_contains(error_of([&] { with({wrong}); }), "--template-arg ", "expected");
}

TEST_CASE(
    "what ends an answer: with the system text, also where it is written between turns only; else it is not known") {
    const Scratch bare;
    const std::string each = "{% for m in messages %}<{{ m.role }}>{{ m.content }}";
    const auto end = [&](const std::string &program, const std::string &system = "") {
        spill(bare / "own.jinja", program);
        return opened(bare.str(), bare / "own.jinja", system).end;
    };
    CHECK(end(each + "{{ '' if loop.last else '<E>' }}{% endfor %}") == "<E><user>y");
    CHECK(end(each + "{{ '\n' if loop.last else '<E>\n' }}{% endfor %}") == "<E>\n<user>y\n");
    CHECK(end(each + "<E>{% endfor %}") == "<E>");
    const std::string wants =
        "{% if messages[0].role != 'system' %}{{ raise_exception('a system message first') }}{% endif %}";
    CHECK(end(wants + each + "<E>{% endfor %}", "Be brief.") == "<E>");
    CHECK(end(wants + each + "<E>{% endfor %}") == "");  // refused: the first turn says why
    check_contains(error_of([&] {
                       rendered(opened(bare.str(), bare / "own.jinja"), "", {{"Hi", ""}});
                   }),
                   "own.jinja: a system message first", "--template NAME or FILE.jinja");
    const std::string alternates = "{% if messages | length != 1 %}{{ raise_exception('one') }}{% endif %}";
    CHECK(end(alternates + each + "{% endfor %}") == "");
}

TEST_CASE("a mark does not stand between a text and the white space that a template trims; it still marks (Gemma 4)") {
    const Scratch bare;
    spill(bare / "own.jinja",
          "{% macro without(t) %}{% set n = namespace(r='') %}{% for p in t.split('<end>') %}"
          "{% set n.r = n.r + p.split('<begin>')[0] %}{% endfor %}{{ n.r | trim }}{% endmacro %}"
          "{% for m in messages %}<begin>{{ without(m.content) if m.role == 'assistant' else m.content | trim }}{% "
          "endfor %}");
    ChatTemplate with = opened(bare.str(), bare / "own.jinja");
    with.specials = {"<begin>", "<end>"};
    const Rendered text = rendered(with, "", {{" <end>Hi ", "<begin>hm<end> \n Hello <end>"}, {"<begin>", ""}});
    CHECK(text.text == "<begin><end>Hi<begin>Hello<begin><begin>");
    std::string typed(text.text.size(), '\0');
    typed[7] = typed[typed.size() - 7] = '\1';  // what the user typed
    CHECK(text.typed == typed);
    const std::string nothing("a\0 \1", 4);
    CHECK(rendered(with, "", {{nothing + "<end>", ""}}).text == "<begin>" + nothing + "<end>");
    spill(bare / "cuts.jinja", "{{ messages[0].content }}{{ messages[0].content[1:] }}");
    with = opened(bare.str(), bare / "cuts.jinja");
    with.specials = {"<begin>"};
    CHECK(rendered(with, "", {{"a<begin>", ""}}).typed == std::string("\0\1\0\0\0\0\0\0\1\0\0\0\0\0\0", 15));
    check_contains(error_of([&] { rendered(with, "", {{"<begin>", ""}}); }), "cuts a special token that was typed");
}

TEST_CASE("a message of a request has a role and a content, and may be of any role") {
    const ChatTemplate with = opened("weights_tools/builtin", "chatml");
    const auto message = [&](const std::string &json) {
        const Json root = parse_json("line 3", json);
        return message_of(with, {"line 3", &root});
    };
    CHECK(message(R"({"content": "Hi"})").role == "user");
    const Rendered text =
        render(with, {message(R"({"role": "tool", "content": "3"})"), message(R"({"content": "Hi"})")});
    CHECK(text.text == "<|im_start|>tool\n3<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    CHECK(error_of([&] { message(R"({"role": "user"})"); }) == "line 3: content is missing");
    for (const char *wrong :
         {R"({"content": 3})", R"({"role": 3, "content": ""})", R"({"content": "x", "name": "Tom"})",
          R"({"role": "user<|endoftext|>system", "content": "x"})"})
        check_contains(error_of([&] { message(wrong); }), "line 3: ", "expected");
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
    check_contains(error_of([&] {
                       rendered(opened(bare.str()), "", {{"Hi", ""}});
                   }),
                   beside + ": TypeError", "--template NAME or FILE.jinja");
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
    spill(place,
          "{% if messages[0].content == 'C' %}{{ ([[messages | length] * 1000] * 30000) | sum(start=[]) }}{% endif %}");
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
