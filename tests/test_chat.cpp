// llm chat: turns that keep the cache read what is new, and write what they would write if they had read all.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "../commands/main.h"
#include "kinds.h"
#include "program.h"

using namespace program;

// ---- Where a text stops --------------------------------------------------------------------------------------

// The text before the stop that ends first; of several that end there, the longest.
static std::string text_before(const std::string &text, const Words &stops) {
    for (size_t end = 0; end <= text.size(); end++)
        for (size_t begin = 0; begin < end; begin++)
            if (std::count(stops.begin(), stops.end(), text.substr(begin, end - begin))) return text.substr(0, begin);
    return text;
}

TEST_CASE("a text stops before the first stop text, however its tokens cut it, and shows nothing that may begin one") {
    const TokenizerPointer tokenizer = load_tokenizer("weights_tools/builtin");
    Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    auto some_text = [&](int least, int most) {
        std::string text;
        const Words letters = {"a", "b", " ", "é"};
        for (int i = least + below(random, most - least + 1); i > 0; i--) text += letters[below(random, 4)];
        return text;
    };
    int stopped = 0;
    for (int i = 0; i < 1000; i++) {
        const std::string text = some_text(0, 30);
        Words stops;
        for (int count = below(random, 4); count > 0; count--) stops.push_back(some_text(1, 4));
        CAPTURE(text);
        CAPTURE(stops);
        Tokens whole = encode(tokenizer.get(), text), cut(whole.begin(), whole.begin() + 1);
        for (size_t at = 0; at < text.size(); at++) {  // "é" is two tokens
            const Tokens one = encode(tokenizer.get(), text[at] < 0 ? "é" : text.substr(at, 1));
            cut.insert(cut.end(), one.begin() + 1, one.end());
            at += text[at] < 0;
        }
        for (const Tokens &ids : {whole, cut}) {
            Writer writer(tokenizer.get(), part(ids, 0, 1), stops);
            std::string shown;
            for (size_t at = 1; at < ids.size() && !writer.stopped; at++) {
                shown += writer.next(ids[at]);
                const std::string so_far = text_before(text, stops);
                CHECK(so_far.compare(0, shown.size(), shown) == 0);
            }
            shown += writer.flush();
            CHECK(shown == text_before(text, stops));
            CHECK(writer.text == shown);
            CHECK(writer.stopped == (shown != text));
            stopped += writer.stopped;
        }
    }
    CHECK((stopped > 500 && stopped < 1800));
    Writer special(tokenizer.get(), {}, {"<|endoftext|>"});  // its spelling stops where the token is written
    for (int id : encode(tokenizer.get(), " a b")) special.next(id);
    CHECK(special.stopped);
    CHECK(special.text == "");
    Writer spelled(tokenizer.get(), {}, {"<|endoftext|>"});
    const std::string typed("\0\1\0\0\0\0\0\0\0\0\0\0\0\0\0", 15);
    for (int id : encode(tokenizer.get(), "a<|endoftext|>b", "", typed.data())) spelled.next(id);
    CHECK((spelled.stopped && spelled.text == "a"));
}

// ---- What a cache keeps --------------------------------------------------------------------------------------

// The tokens of a turn: more of them, fewer and then others, another one in between, or the same again.
static Tokens next_turn(Engine &engine, const Tokens &before, Random &random) {
    Tokens tokens = before;
    const int what = before.empty() ? 0 : below(random, 5);
    if (what == 1) tokens.resize((size_t)below(random, (int)tokens.size()));
    const int at = tokens.empty() ? 0 : below(random, (int)tokens.size());
    if (what == 2) tokens[at] = (tokens[at] + 1) % engine.model.config.vocabulary;
    if (what == 3) return tokens;
    scene::append(tokens, random_tokens(engine, 1 + below(random, 40), random.bits()));
    return tokens;
}

TEST_CASE("a turn behind others has the bits of one that read all, in every layout, precision and kind of layers") {
    Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    int kept = 0, anew = 0, cut = 0;
    auto check = [&](Engine &engine, const Precision &type_k, const Precision &type_v, const Place &place) {
        CAPTURE(std::string(name_of(type_k)) + " " + name_of(type_v) + " " + place.name());
        Cache cache = cache_for(engine, type_k, type_v, 500, place);
        Tokens held;
        for (int turn = 0; turn < 6; turn++) {
            Tokens ids = next_turn(engine, held, random);
            const int before = cache.lengths[0], same = keep_same(cache, held, ids);
            CHECK(same < (int)ids.size());
            CHECK(cache.lengths[0] == same);
            CHECK(std::equal(ids.begin(), ids.begin() + same, held.begin()));
            kept += same > 0, anew += before > 0 && same == 0, cut += same > 0 && same < before;
            Cache fresh = cache_for(engine, type_k, type_v, 500, place);
            const Vector now = prefill(engine, cache, 0, part(ids, same, (int)ids.size()));
            CHECK(same_bits(now, prefill(engine, fresh, 0, ids)));
            for (int i = below(random, 20); i > 0; i--) {  // the answer
                ids.push_back(below(random, engine.model.config.vocabulary));
                CHECK(same_bits(decode(engine, cache, {0}, {ids.back()}), decode(engine, fresh, {0}, {ids.back()})));
            }
            check_pages(cache);
            held = ids;
            if (below(random, 2)) held.push_back(0);  // the last token of an answer is not read
        }
    };
    for (int narrow : {5, 33}) {
        Engine engine = engine_of(random_model(mixed_shape(narrow)));
        for (const Place &place : {Place{}, keeping_all(paged(7)), paged(3), paged(16), paged(48), ring(60, 2)})
            for_each_pair([&](const Precision &type_k, const Precision &type_v) {
                if (!left_out()) check(engine, type_k, type_v, place);
            });
    }
    for (int i = 0; i < 60; i++) {
        Engine engine = engine_of(random_model(random_shape(random), random.bits()));
        const auto types = all_of<Precision>();
        const Place place = random_place(random, 30);
        check(engine, types[below(random, (int)types.size())], types[below(random, (int)types.size())], place);
    }
    CHECK((kept > 500 && cut > 100 && anew > 20));
}

// ---- The ids of a turn ---------------------------------------------------------------------------------------

// A chat of the built-in model, whose turns have no form.
static Chat plain_chat() {
    Options options;
    options.chat_template = "plain";
    options.directory = options.given["-m"] = "weights_tools/builtin";
    return open_chat(options);
}

static void say(Chat &chat, const std::string &text) {
    chat.turns.push_back({{"user", marked(chat.form, text, "this turn")}});
}

// What the next turn's ids are, after `answer` was generated as these ids behind the turns so far.
static Tokens ids_after(Chat &chat, const Tokens &answer, const std::string &user) {
    const Asked asked = ask(chat);
    chat.session.tokens = asked.ids, chat.session.prompt = (int)asked.ids.size();
    chat.asked = asked;
    for (int id : answer) chat.session.tokens.push_back(id);
    take_answer(chat, chat.session.tokens.size());
    say(chat, user);
    return ask(chat).ids;
}

// The built-in model with a template, and the ids of a text that begins none.
static Chat chat_with(const Scratch &scratch, const std::string &program) {
    spill(scratch / "own.jinja", program);
    Chat chat = plain_chat();
    chat.form = open_template(scratch.str(), scratch / "own.jinja", chat.session.tokenizer.get());
    return chat;
}
static Tokens ids_behind(const Chat &chat, const std::string &text) {
    const Tokens ids = encode(chat.session.tokenizer.get(), text);
    return {ids.begin() + 1, ids.end()};
}

static std::string text_of(const Chat &chat, const Tokens &ids) { return decode(chat.session.tokenizer.get(), ids); }

TEST_CASE("an answer keeps the ids that were generated, also those that its text would not become") {
    Chat chat = plain_chat();
    const Tokenizer *tokenizer = chat.session.tokenizer.get();
    Tokens letters;  // "village", a letter each
    for (const char *letter : {"Ġ", "v", "i", "l", "l", "a", "g", "e"})
        letters.push_back(tokenizer_find(tokenizer, letter));
    say(chat, "There was a small");
    const Tokens ids = ids_after(chat, letters, "Tom lived there.");
    const Tokens asked = encode(tokenizer, "There was a small");
    REQUIRE(ids.size() > asked.size() + letters.size());
    CHECK(std::equal(letters.begin(), letters.end(), ids.begin() + (int64_t)asked.size()));
    CHECK(text_of(chat, ids) == "There was a small village\nTom lived there.");
    chat.turns.pop_back();
    chat.turns.pop_back();
    say(chat, "There was a small cat");  // taken back, and said otherwise: ids of the text
    CHECK(ask(chat).ids == encode(tokenizer, "There was a small cat"));
}

TEST_CASE("an answer that ends with a token of the next turn's beginning stays whole, and so does what follows") {
    Chat chat = plain_chat();
    const Tokenizer *tokenizer = chat.session.tokenizer.get();
    say(chat, "One");
    const Tokens answer = ids_behind(chat, " two.\n");
    const Tokens ids = ids_after(chat, answer, "Three");
    CHECK(text_of(chat, ids) == "One two.\n\nThree");
    CHECK(std::equal(answer.begin(), answer.end(), ids.begin() + (int64_t)encode(tokenizer, "One").size()));
}

TEST_CASE("a template that ends with a space, and one that writes a space before an answer, keep the answer's ids") {
    const Scratch scratch;
    Chat chat = chat_with(
        scratch,
        "{% for m in messages %}{{ ('User: ' if m.role == 'user' else 'Assistant: ') + m.content + '\\n' }}{% endfor %}"
        "{{ 'Assistant: ' if add_generation_prompt }}");
    say(chat, "Hi");
    const Tokens answer = ids_behind(chat, "village");
    Tokens ids = ids_after(chat, answer, "Bye");
    CHECK(text_of(chat, ids) == "User: Hi\nAssistant: village\nUser: Bye\nAssistant: ");
    CHECK(std::search(ids.begin(), ids.end(), answer.begin(), answer.end()) == ids.begin() + chat.session.prompt);
    CHECK(ask(chat).borders.size() == 1);  // nothing was encoded anew

    chat = plain_chat();
    char error[200];
    chat.session.tokenizer.reset(tokenizer_load("tests/fixtures/tokenizers/llama2.json", nullptr, error, sizeof error));
    REQUIRE(chat.session.tokenizer);
    chat.session.engine.model.config.vocabulary = 1 << 20;
    spill(scratch / "tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": "</s>"})");
    chat.options.chat_template = "mistral";
    chat.form = open_template(scratch.str(), "mistral", chat.session.tokenizer.get());
    say(chat, "sea");
    const int word = tokenizer_find(chat.session.tokenizer.get(), "▁return");
    REQUIRE(word >= 0);
    ids = ids_after(chat, {word}, "and");
    CHECK(chat.turns[0].answer == "return");  // and not with the blank
    CHECK(ask(chat).borders.size() == 1);
    CHECK(ids[chat.session.prompt] == word);
    CHECK(std::count(ids.begin(), ids.end(), tokenizer_find(chat.session.tokenizer.get(), "<s>")) == 1);
    CHECK(std::count(ids.begin(), ids.end(), tokenizer_find(chat.session.tokenizer.get(), "</s>")) == 1);
}

TEST_CASE("an answer that ends within a character ends before it") {
    Chat chat = plain_chat();
    const Tokenizer *tokenizer = chat.session.tokenizer.get();
    const Tokens whole = encode(tokenizer, " a😀");  // four tokens of a byte each
    for (int missing = 1; missing <= 3; missing++) {
        Chat fresh = plain_chat();
        say(fresh, "It says");
        const Tokens ids = ids_after(fresh, part(whole, 1, (int)whole.size() - missing), "Yes");
        CHECK(fresh.turns[0].answer == " a");
        CHECK(text_of(fresh, ids) == "It says a\nYes");
    }
    say(chat, "It says");
    CHECK(text_of(chat, ids_after(chat, part(whole, 1, (int)whole.size()), "Yes")) == "It says a😀\nYes");
}

TEST_CASE("what begins a text stands there once, and a user cannot type it") {
    Chat chat = plain_chat();
    say(chat, "<|endoftext|>Once <|endoftext|>");
    const Tokens ids = ask(chat).ids;
    CHECK(ids[0] == 0);
    CHECK(std::count(ids.begin(), ids.end(), 0) == 1);
    CHECK(text_of(chat, ids) == "<|endoftext|>Once <|endoftext|>");
}

TEST_CASE("a special token that a template wrote is not kept where somebody types the same text") {
    const Scratch scratch;
    Chat chat = chat_with(
        scratch, "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}<|endoftext|>{% endif %}{% endfor %}");
    say(chat, "Hi");
    ids_after(chat, ids_behind(chat, " you"), "Bye");
    chat.turns.clear();
    say(chat, "Hi<|endoftext|> you");
    const Tokens ids = ask(chat).ids;
    CHECK(text_of(chat, ids) == "Hi<|endoftext|> you");
    CHECK(std::count(ids.begin(), ids.end(), 0) == 1);
    CHECK(ids.back() == 0);
}

// A chat with a tokenizer of the fixtures, in whose file some texts are others; "plain", or a template's text.
static Chat chat_of(const Scratch &scratch, const std::string &name, const std::string &program,
                    const std::vector<std::pair<std::string, std::string>> &others = {}) {
    Chat chat = plain_chat();
    std::string json = slurp("tests/fixtures/tokenizers/" + name + ".json");
    for (auto &[from, to] : others)
        for (size_t at; (at = json.find(from)) != std::string::npos;) json.replace(at, from.size(), to);
    char error[200];
    chat.session.tokenizer.reset(tokenizer_parse(json.data(), json.size(), name.c_str(), error, sizeof error));
    REQUIRE_MESSAGE(chat.session.tokenizer, std::string(error));
    chat.session.engine.model.config.vocabulary = 1 << 20;
    const bool plain = program == "plain";
    chat.options.chat_template = plain ? "plain" : "";
    if (!plain) spill(scratch / "own.jinja", program);
    chat.form = open_template(scratch.str(), plain ? "plain" : scratch / "own.jinja", chat.session.tokenizer.get());
    return chat;
}

// The ids of the whole text, for comparison.
static Tokens whole_ids(Chat &chat) {
    return encode(chat.session.tokenizer.get(), render(chat.form, messages_of(chat, 0)), "the whole");
}

TEST_CASE("what follows an answer has the ids that it has in the whole text, with every tokenizer (Llama 2's blank)") {
    const Scratch scratch;
    const Words forms = {
        "plain",
        "{% for m in messages %}{{ '<s>[INST] ' + m.content.strip() + ' [/INST]' if m.role == 'user' else ' ' + "
        "m.content.strip() + ' </s>' }}{% endfor %}",
        "{% for m in messages %}{{ '### ' + m.role + ':\\n' + m.content + '\\n\\n' }}{% endfor %}### assistant:\n",
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "<|im_start|>assistant\n"};
    Random random{seed_of_run()};
    CAPTURE(seed_of_run());
    const Words pieces = {"sea", " the", "\n", "é", "  ", " mill", ".", " x", "\n\n", "😀", "1"};
    auto some_text = [&] {
        std::string text = "a";
        for (int i = below(random, 5); i > 0; i--) text += pieces[below(random, (int)pieces.size())];
        return text;
    };
    int same = 0, kept = 0, turns = 0;
    for (const char *name :
         {"gemma", "gpt2", "llama2", "llama3", "metaspace", "mistral", "phi4", "qwen2", "smollm2", "tekken"})
        for (const std::string &form : forms) {
            CAPTURE(name);
            CAPTURE(form);
            Chat chat = chat_of(scratch, name, form);
            const Tokenizer *tokenizer = chat.session.tokenizer.get();
            for (int conversation = 0; conversation < 4; conversation++) {
                chat.turns.clear(), chat.asked = {}, chat.session.tokens.clear();
                say(chat, some_text());
                for (int turn = 0; turn < 4; turn++, turns++) {
                    const std::string text = some_text();
                    Tokens answer = encode(tokenizer, {text, std::string(text.size(), 0)}, "an answer");
                    const Tokens before = ask(chat).ids;
                    if (below(random, 2)) {  // as the tokenizer has it at this place, if it begins there
                        chat.turns.back().answer = text;
                        say(chat, "x");
                        const Tokens whole = whole_ids(chat);
                        chat.turns.pop_back();
                        const size_t end = before.size();
                        if (whole.size() > end && std::equal(before.begin(), before.end(), whole.begin()))
                            answer = part(whole, (int)end, (int)end + 1 + below(random, (int)(whole.size() - end)));
                        answer.erase(std::find_if(answer.begin(), answer.end(),
                                                  [&](int id) { return tokenizer_is_special(tokenizer, id); }),
                                     answer.end());
                    }
                    const Tokens ids = ids_after(chat, answer, some_text()), whole = whole_ids(chat);
                    CHECK(decode(tokenizer, ids, false) == decode(tokenizer, whole, false));
                    const Tokens held = part(chat.session.tokens, 0, (int)chat.asked.borders.back());
                    const bool agrees =
                        held.size() <= whole.size() && std::equal(held.begin(), held.end(), whole.begin());
                    if (agrees) CHECK(ids == whole);
                    same += agrees, kept += !agrees && !ask(chat).borders.empty();
                }
            }
        }
    CHECK((same > turns / 4 && kept > turns / 20));
}

TEST_CASE("Llama 2: one blank before </s>, and a plain text goes on with the blank that the answer begins with") {
    const Scratch scratch;
    Chat chat =
        chat_of(scratch, "llama2",
                "{% for m in messages %}{{ '<s>[INST] ' + m.content.strip() + ' [/INST]' if m.role == 'user' else "
                "' ' + m.content.strip() + ' </s>' }}{% endfor %}");
    const Tokenizer *tokenizer = chat.session.tokenizer.get();
    const int word = tokenizer_find(tokenizer, "▁return"), blank = tokenizer_find(tokenizer, "▁");
    const int end = tokenizer_find(tokenizer, "</s>");
    say(chat, "sea");
    Tokens ids = ids_after(chat, {word}, "and");
    CHECK(ids == whole_ids(chat));
    const auto ends = std::find(ids.begin(), ids.end(), end);
    REQUIRE(ends - ids.begin() > 2);
    CHECK((ends[-1] == blank && ends[-2] == word));

    chat = chat_of(scratch, "llama2", "plain");
    say(chat, "sea");
    ids = ids_after(chat, {word}, "and");
    CHECK(ids == whole_ids(chat));
    CHECK(decode(chat.session.tokenizer.get(), ids) == "sea return\nand");
    CHECK(ids[chat.session.prompt] == word);
}

TEST_CASE(
    "a template sees an answer with its special tokens, and leaves its thought out; what only spells them is text") {
    const Scratch scratch;
    Chat chat = chat_of(scratch, "qwen2",
                        "{% for m in messages %}{{ ' U:' + m.content if m.role == 'user' else ' A:' + "
                        "m.content.split('[/THINK]')[-1] | trim + '<|endoftext|>' }}{% endfor %} A:",
                        {{"<|im_start|>", "[THINK]"}, {"<|im_end|>", "[/THINK]"}});
    const Tokenizer *tokenizer = chat.session.tokenizer.get();
    const int begin = tokenizer_find(tokenizer, "[THINK]"), end = tokenizer_find(tokenizer, "[/THINK]");
    REQUIRE((tokenizer_is_special(tokenizer, begin) && tokenizer_is_special(tokenizer, end)));
    auto of = [&](const std::string &text) {  // typed: its special tokens are letters
        return encode(tokenizer, {text, std::string(text.size(), 1)}, "");
    };
    Tokens answer = {begin};
    scene::append(answer, of("hm <|endoftext|>")), answer.push_back(end), scene::append(answer, of("\n Hello"));
    say(chat, "hi");
    Tokens ids = ids_after(chat, answer, "yo");
    CHECK(decode(tokenizer, ids, false) == " U:hi A:Hello<|endoftext|> U:yo A:");
    CHECK(std::count(ids.begin(), ids.end(), begin) == 0);
    CHECK(ids == whole_ids(chat));
    ids = ids_after(chat, of("[THINK]a[/THINK] <|endoftext|> b"), "ja");  // no thought: letters
    CHECK(decode(tokenizer, ids, false) == " U:hi A:Hello<|endoftext|> U:yo A:<|endoftext|> b<|endoftext|> U:ja A:");
    int found = 0;
    for (int id : ids) found += tokenizer_is_special(tokenizer, id);
    CHECK(found == 2);

    Writer writer(tokenizer, {}, {});
    for (auto &[begins, ends] : thoughts) writer.thoughts[begins] = ends;
    writer.dim = "<", writer.bright = ">";
    std::string shown;
    for (int id : answer) shown += writer.next(id);
    shown += writer.flush();
    CHECK(shown == "<[THINK]hm <|endoftext|>[/THINK]>\n Hello");
    CHECK((writer.thought == "hm <|endoftext|>" && writer.text == "\n Hello"));
}

TEST_CASE("a thought is apart from the text: it begins before any other text, however tokens cut its marks") {
    const TokenizerPointer tokenizer = load_tokenizer("weights_tools/builtin");
    const struct {
        std::string said, text, thought, within;
    } cases[] = {{"<think>a b</think> c", " c", "a b", ""},
                 {"\n <think>a</think><think>b</think>c", "\n c", "ab", ""},
                 {"c <think>a</think>", "c <think>a</think>", "", ""},
                 {"<thi c", "<thi c", "", ""},
                 {"<thi", "<thi", "", ""},
                 {"a</think>c", "c", "a", "</think>"},
                 {"<think>a</thi", "", "a</thi", ""},
                 {"<think>a b @@ c", "", "a b ", ""},
                 {"[THINK]a</think>b[/THINK]c", "c", "a</think>b", ""}};
    for (auto &[said, text, thought, within] : cases) {
        CAPTURE(said);
        Writer writer(tokenizer.get(), {}, {"@@"});
        for (auto &[begins, ends] : thoughts) writer.thoughts[begins] = ends;
        writer.end_of_thought = within;
        const Tokens ids = encode(tokenizer.get(), said);
        for (size_t i = 1; i < ids.size() && !writer.stopped; i++) writer.next(ids[i]);
        writer.flush();
        CHECK(writer.text == text);
        CHECK(writer.thought == thought);
    }
}

TEST_CASE("a turn that got an empty answer is taken back where the template refuses one, and kept where it does not") {
    const Scratch scratch;
    const std::string refuses = "{% for m in messages %}{{ raise_exception('empty') if not m.content }}{% endfor %}";
    for (const bool refused : {true, false}) {
        Chat chat =
            chat_with(scratch, (refused ? refuses : "") + "{% for m in messages %}{{ m.content }}.{% endfor %}");
        say(chat, "one");
        ids_after(chat, {}, "two");
        CHECK(chat.turns.size() == (refused ? 1 : 2));
        CHECK(text_of(chat, ask(chat).ids) == (refused ? "two." : "one..two."));
        CHECK(ask(chat).borders.size() == (refused ? 0 : 1));
    }
}

TEST_CASE("special tokens that somebody typed are text, in each tokenizer; the others stay tokens") {
    const std::string raw = "\"normalized\":false", normalized = "\"normalized\":true";
    for (const char *name :
         {"gemma", "gpt2", "llama2", "llama3", "mistral", "phi4", "qwen2", "smollm2", "tekken", "qwen2 normalized"}) {
        CAPTURE(name);
        char error[200];
        const Words words = words_of(name);
        std::string json = slurp("tests/fixtures/tokenizers/" + words[0] + ".json");
        if (words.size() > 1) json = replaced(json, raw, normalized);
        TokenizerPointer tokenizer(tokenizer_parse(json.data(), json.size(), name, error, sizeof error),
                                   tokenizer_free);
        REQUIRE_MESSAGE(tokenizer, std::string(error));
        std::vector<std::string> specials;
        for (int id = 0; id < tokenizer_size(tokenizer.get()) && specials.size() < 3; id++)
            if (tokenizer_is_special(tokenizer.get(), id)) specials.push_back(tokenizer_token(tokenizer.get(), id));
        REQUIRE(!specials.empty());
        Random random{seed_of_run()};
        for (int i = 0; i < 300; i++) {
            std::string text, typed;
            int wanted = 0;
            for (int parts = 1 + below(random, 8); parts > 0; parts--) {
                const bool by_user = below(random, 2), special = below(random, 2);
                const std::vector<std::string> texts = {"sea", " the", "\n", "é", "  ", "1", ".", " x\n\n"};
                const std::string piece =
                    special ? specials[below(random, (int)specials.size())] : texts[below(random, (int)texts.size())];
                text += piece, typed += std::string(piece.size(), by_user ? 1 : 0);
                wanted += special && !by_user;
            }
            const Tokens ids = encode(tokenizer.get(), text, "text", typed.data());
            int found = 0;
            for (int id : ids) found += tokenizer_is_special(tokenizer.get(), id);
            CAPTURE(text);
            CHECK(found == wanted);
        }
    }
}

// ---- As a user sees it ---------------------------------------------------------------------------------------

// Turns as lines of standard input; what llm chat says of each.
static std::vector<Json> chat(const std::string &lines, const Words &flags) {
    Scratch scratch;
    spill(scratch / "lines", lines);
    Setting setting;
    setting.input = scratch / "lines";
    const Outcome result = run(Words{"chat", "--json", "-t", "1", "--template", "plain"} + flags, setting);
    REQUIRE_MESSAGE(result.status == 0, result);
    std::vector<Json> turns;
    for (const std::string &line : split(result.out, '\n'))
        if (!line.empty()) turns.push_back(parse_json("a turn", line));
    return turns;
}

const std::string story =
    "Once upon a time there was a small village.\nTom put the red key in the cave.\nHe went home.\n";

TEST_CASE("the last turn has the logits of its ids read whole, in every layout and precision of the built-in model") {
    for (const std::string &layout : Words{"contiguous", "paged --page 7", "ring --window 48 --sinks 3", "ring"})
        for (const Precision &type : all_of<Precision>()) {
            const Words flags = words_of("-n 15 --cache " + layout + " --kv " + name_of(type));
            CAPTURE(flags);
            Scratch scratch;
            const std::vector<Json> turns = chat(story, flags + Words{"--dump-logits", scratch / "turns.npy"});
            REQUIRE(turns.size() == 3);
            const Ids before = ids(turns[1], "tokens"), last = ids(turns[2], "tokens");
            CHECK(number(turns[2], "kept") ==
                  number(turns[1], "kept") + number(turns[1], "read") + (double)before.size());
            CHECK(number(turns[2], "forgotten") == 0);
            std::string list;
            for (int id : ids(turns[2], "prompt_ids")) list += (list.empty() ? "" : ",") + std::to_string(id);
            const Words whole = {"generate", "-t", "1", "--ids", list, "--dump-logits", scratch / "whole.npy"};
            Json generated =
                run_json(whole + words_of(replaced(joined(flags, " "), "15", std::to_string(last.size()))));
            CHECK(ids(generated, "tokens") == last);
            CHECK(slurp(scratch / "turns.npy") == slurp(scratch / "whole.npy"));
        }
}

TEST_CASE("a chat that computes everything anew writes the same, and keeps nothing") {
    const std::vector<Json> cached = chat(story, {"-n", "99"}), naive = chat(story, {"-n", "99", "--cache", "none"});
    int ended = 0;
    for (int turn = 0; turn < 3; turn++) {
        CHECK(ids(cached[turn], "tokens") == ids(naive[turn], "tokens"));
        CHECK(number(naive[turn], "kept") == 0);
        ended += text(naive[turn], "stop") == "end id";
        CHECK(!contains(text(naive[turn], "text"), "\n"));  // what ends an answer is not of it
        CHECK(number(naive[turn], "read") == number(cached[turn], "kept") + number(cached[turn], "read"));
    }
    CHECK(ended == 3);
}

TEST_CASE("turns can be taken back and answered anew") {
    const std::vector<Json> turns = chat(story + "/undo\n/again\nHe went home.\n", {"-n", "10"});
    REQUIRE(turns.size() == 5);
    CHECK(number(turns[3], "turn") == 2);
    CHECK(ids(turns[3], "tokens") == ids(turns[1], "tokens"));  // at temperature 0
    CHECK(number(turns[3], "read") == 1);
    CHECK(number(turns[3], "forgotten") == number(turns[2], "read") + (double)ids(turns[2], "tokens").size() +
                                               (double)ids(turns[1], "tokens").size() - 1);
    for (const Json &turn : turns) CHECK(number(turn, "seconds_to_first_token") > 0);
    CHECK(ids(turns[4], "tokens") == ids(turns[2], "tokens"));
    const std::vector<Json> drawn = chat("Once\n/again\n", {"-n", "10", "--temp", "1", "-s", "5"});
    CHECK(ids(drawn[0], "tokens") != ids(drawn[1], "tokens"));
    CHECK((number(drawn[0], "seed") == 5 && number(drawn[1], "seed") == 6));
}

TEST_CASE("a message of several lines, of JSON, a word that is no command; /clear, /quit and /exit") {
    const TokenizerPointer tokenizer = load_tokenizer("weights_tools/builtin");
    auto prompts = [&](const std::string &lines) {
        std::vector<std::string> all;
        for (const Json &turn : chat(lines, {"-n", "1", "--stop", "@"}))
            all.push_back(decode(tokenizer.get(), ids(turn, "prompt_ids")));
        return all;
    };
    auto first = [&](const std::string &lines) { return prompts(lines).at(0); };
    CHECK(first("\"\"\"one\ntwo\"\"\"\n") == "one\ntwo");
    CHECK(first("\"\"\"\none\n\ntwo\n\"\"\"\n") == "one\n\ntwo");
    CHECK(first("\"\"\"/bye\"\"\"\n") == "/bye");
    CHECK(first("\"\"\"\n/undo\r\n{\n\"\"\"\r\n") == "/undo\n{");
    CHECK(first("\"\"\"one\ntwo\n\"\"\" \t\n") == "one\ntwo");
    CHECK(first("\"one\\ntwo \\u00e9\"\n") == "one\ntwo é");
    CHECK(first("{\"role\": \"user\", \"content\": \"/bye\"}\n") == "/bye");
    CHECK(first("/no_think\n") == "/no_think");
    CHECK(first("/think about it\n") == "/think about it");
    const std::vector<std::string> clear = prompts("One\n/clear\nTwo\n/quit\nThree\n");
    CHECK((clear.size() == 2 && clear[1] == "Two"));
    CHECK(prompts("One\n/exit\nTwo\n").size() == 1);
    Scratch scratch;
    Setting setting;
    setting.input = scratch / "lines";
    auto refused = [&](const std::string &lines, const Words &parts) {
        spill(scratch / "lines", lines);
        check_refused(run({"chat", "--json", "-t", "1", "--template", "plain"}, setting), parts);
    };
    refused("\"\"\"one\n", {"\"\"\"", "its end is missing"});
    refused("\"one\n", {"this line: not valid JSON"});
    refused("{\"content\": 3}\n", {"this line: content is 3, expected a text"});
    refused("\"\\u0000\"\n", {"this line: \\u0000 ends a text"});
    refused("caf\xe9\n", {"this turn: byte 3, 0xE9, is not UTF-8"});
}

TEST_CASE(
    "an answer ends before a stop text, which the next turn does not see; else with the context, not after 256 "
    "tokens") {
    const Words end = {"--stop", " the"};
    const std::vector<Json> whole = chat(story, {"-n", "40"}), cut = chat(story, Words{"-n", "40"} + end);
    const std::string all = text(whole[0], "text");
    REQUIRE(contains(all, " the"));
    CHECK(text(cut[0], "text") == all.substr(0, all.find(" the")));
    CHECK(text(cut[0], "stop") == "stop");
    const TokenizerPointer tokenizer = load_tokenizer("weights_tools/builtin");
    const std::vector<std::string> said = split(story, '\n');
    CHECK(
        contains(decode(tokenizer.get(), ids(cut[1], "prompt_ids")), said[0] + text(cut[0], "text") + "\n" + said[1]));
    CHECK(number(cut[1], "kept") == number(cut[0], "prompt_tokens") + (double)ids(cut[0], "tokens").size() - 1);
    Scratch scratch;
    spill(scratch / "lines", "Once upon a time\n");
    Setting setting;
    setting.input = scratch / "lines";
    const Outcome result = run({"chat", "--json", "-t", "1", "--template", "chatml", "-c", "500"}, setting);
    REQUIRE_MESSAGE(result.status == 0, result);
    const Json turn = parse_json("a turn", result.out);
    CHECK(text(turn, "stop") == "context full");
    CHECK(ids(turn, "tokens").size() > 256);
}

TEST_CASE("a thought that the template begins is apart in the JSON, and a variable of the template can leave it out") {
    Scratch scratch;
    spill(scratch / "lines", "Hi\n");
    spill(scratch / "own.jinja", "{{ messages[-1].content }}{{ '<think>\\n' if enable_thinking is not defined }}");
    Setting setting;
    setting.input = scratch / "lines";
    const Words base = {"chat", "-t", "1", "-n", "9", "--template", scratch / "own.jinja"};
    const Json thinks = parse_json("a turn", run(base + Words{"--json"}, setting).out);
    CHECK((text(thinks, "text") == "" && text(thinks, "thought") != ""));
    const Words off = {"--template-arg", "enable_thinking=false"};
    const Json says = parse_json("a turn", run(base + off + Words{"--json"}, setting).out);
    CHECK((text(says, "text") != "" && text(says, "thought") == ""));
    CHECK(number(says, "prompt_tokens") < number(thinks, "prompt_tokens"));
    CHECK(contains(run(base, setting).out, text(thinks, "thought")));
    check_refused(run(base + Words{"--template-arg", "x"}, setting), {"--template-arg x: expected NAME=VALUE"});
    // What ends an answer within a thought is not looked for in the text, which is shorter.
    spill(scratch / "lines", "The end. <think>\n");
    const Outcome plain = run({"chat", "-t", "1", "-n", "100", "--template", "plain", "--json"}, setting);
    REQUIRE_MESSAGE(plain.status == 0, plain);
    CHECK(text(parse_json("a turn", plain.out), "stop") == "end id");
}

TEST_CASE(
    "without -c a chat holds as much as a model was trained for at first, and says how to go further (longrope)") {
    Scratch scratch;
    fs::copy("tests/fixtures/models/phi3_longrope_short", scratch / "model");
    spill(scratch / "model/tokenizer.json",
          R"({"added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
              "decoder": {"type": "Fuse"}, "model": {"type": "BPE", "merges": [], "vocab": {"a": 3, "b": 4, "\n": 6}}})");
    spill(scratch / "lines", "ab\n");
    Setting setting;
    setting.input = scratch / "lines";
    const Words base = {"chat", "-m", scratch / "model", "--template", "plain", "--json", "-t", "1", "-n", "3"};
    const Outcome usual = run(base, setting), small = run(base + words_of("-c 128"), setting);
    REQUIRE_MESSAGE(usual.status == 0, usual);
    check_contains(usual.err, "the context is 128 positions", "-c 512 goes further");
    CHECK(small.err == "");
    CHECK(ids(parse_json("a turn", usual.out), "tokens") == ids(parse_json("a turn", small.out), "tokens"));
    const Outcome large = run(base + words_of("-c 512"), setting);
    check_contains(large.err, "frequencies for texts beyond 128");
    CHECK(!contains(large.err, "goes further"));
}

TEST_CASE("a Ctrl-C that came while a pipe had no line ends no answer") {
    Scratch scratch;
    // Waits until the first answer is written, and then until the program sleeps, as it reads the next line.
    const Outcome result =
        run_shell("cd " + scratch.str() + " && mkfifo lines && { " + fs::absolute(program_path()).string() +
                  " chat --json -t 1 -n 5 <lines >out & } && exec 3>lines && echo Hi >&3 && "
                  "until [ -s out ]; do sleep 0.01; done; "
                  "until grep -q '^State:.S' /proc/$!/status; do sleep 0.01; done; "
                  "kill -INT $! && echo Hi >&3 && exec 3>&- && wait $! && cat out");
    REQUIRE_MESSAGE(result.status == 0, result);
    const Words turns = split(result.out, '\n');
    REQUIRE(turns.size() == 3);
    CHECK(text(parse_json("a turn", turns[1]), "stop") != "interrupted");
    CHECK(number(parse_json("a turn", turns[1]), "turn") == 2);
}

TEST_CASE("lines that end as on Windows are the same lines; /bye ends the chat") {
    const std::vector<Json> turns = chat("Once upon\r\n/again \r\n/bye\r\nTom\r\n", {"-n", "5"});
    REQUIRE(turns.size() == 2);
    CHECK(ids(turns[0], "prompt_ids") == ids(chat("Once upon\n", {"-n", "5"})[0], "prompt_ids"));
}

TEST_CASE("--system stands before the first turn; plain texts begin as the tokenizer begins them, once") {
    Scratch scratch;
    spill(scratch / "lines", "Hi\n");
    Setting setting;
    setting.input = scratch / "lines";
    auto prompt_of = [&](const Words &words) {
        const Outcome result = run(Words{"chat", "--json", "-t", "1", "-n", "2"} + words, setting);
        REQUIRE_MESSAGE(result.status == 0, result);
        return ids(parse_json("a turn", result.out), "prompt_ids");
    };
    const TokenizerPointer tokenizer = load_tokenizer("weights_tools/builtin");
    const Tokens with = prompt_of({"--template", "chatml", "--system", "Be brief."});
    check_contains(decode(tokenizer.get(), with), "system\nBe brief.");
    CHECK(with != prompt_of({"--template", "chatml"}));
    fs::copy("weights_tools/builtin", scratch / "begins");
    spill(scratch / "begins/chat_template.jinja", "{{ bos_token }}{{ messages[0]['content'] }}");
    spill(scratch / "begins/tokenizer_config.json", R"({"bos_token": "<|endoftext|>"})");
    const Tokens plain = prompt_of({"--template", "plain"});
    CHECK((plain.size() > 1 && plain[0] == 0 && plain[1] != 0));
    CHECK(prompt_of({"-m", scratch / "begins", "--template", "plain"}) == plain);
    CHECK(decode(tokenizer.get(), {tokenizer_size(tokenizer.get()) + 5}) == "");  // of a head that is wider
}

TEST_CASE("--dump-logits replaces no file that a chat reads") {
    Scratch scratch;
    fs::copy("weights_tools/builtin", scratch / "model");
    const std::string form = "{{ messages[0]['content'] }}", own = scratch / "model/chat_template.jinja";
    for (const std::string &name : {own, scratch / "t.jinja"}) spill(name, form);
    for (const Words &words : {Words{scratch / "t.jinja", "--template", scratch / "t.jinja"},
                               {own},
                               {scratch / "model/tokenizer.json"},
                               {scratch / "model/model.safetensors"}}) {
        const std::string before = slurp(words[0]);
        check_refused(program::run(Words{"chat", "-m", scratch / "model", "--dump-logits"} + words),
                      {"--dump-logits " + words[0] + ": is a file that is read: name another"});
        CHECK(slurp(words[0]) == before);
    }
}

TEST_CASE("a full context ends the chat, drops the oldest turns, or is a ring") {
    const Words small = {"-n", "10", "-c", "40"};
    Scratch scratch;
    spill(scratch / "lines", story + story);
    Setting setting;
    setting.input = scratch / "lines";
    const Words base = {"chat", "--template", "plain", "-t", "1"};
    const Outcome stopped = run(base + small, setting);
    CHECK(stopped.status == 1);
    check_contains(stopped.err, "the context is full", "it holds 40", "--when-full drop or ring");
    const std::vector<Json> dropped = chat(story + story, small + Words{"--when-full", "drop"});
    REQUIRE(dropped.size() == 6);
    double all = 0;
    const TokenizerPointer tokenizer = load_tokenizer("weights_tools/builtin");
    const std::vector<std::string> users = split(story + story, '\n');
    std::string whole;  // the conversation: a turn sees the end of it
    for (size_t i = 0; i < dropped.size(); i++) {
        const Json &turn = dropped[i];
        Tokens seen = ids(turn, "prompt_ids");
        seen.erase(seen.begin());  // what begins a text
        const std::string end = decode(tokenizer.get(), seen);
        whole += users[i];
        CHECK((end.size() <= whole.size() && whole.substr(whole.size() - end.size()) == end));
        whole += text(turn, "text") + "\n";
        CHECK(number(turn, "kept") + number(turn, "read") + (double)ids(turn, "tokens").size() <= 40);
        CHECK(text(turn, "stop") != "context full");
        all += number(turn, "dropped_turns");
    }
    CHECK((all > 0 && all < 6));
    CHECK(number(dropped[5], "turn") == 6);
    const std::string five = "/undo\n/undo\n/undo\n/undo\n/undo\n";  // what was dropped comes again where it fits
    const std::vector<Json> back = chat(story + story + five + "Yes.\n", small + Words{"--when-full", "drop"});
    CHECK(contains(decode(tokenizer.get(), ids(back.at(6), "prompt_ids")), users[0]));
    CHECK(number(back[6], "turn") == 2);
    const std::vector<Json> ring = chat(story + story, {"-n", "10", "--when-full", "ring", "--window", "40"});
    for (size_t turn = 1; turn < 6; turn++) CHECK(number(ring[turn], "kept") > number(ring[turn - 1], "kept"));
}

TEST_CASE("a long chat of drafts is the same chat") {
    for (const char *draft : {"ngram", "weights_tools/draft"}) {
        const std::vector<Json> with = chat(story, {"-n", "30", "--draft", draft}), without = chat(story, {"-n", "30"});
        for (int turn = 0; turn < 3; turn++) {
            CHECK(ids(with[turn], "tokens") == ids(without[turn], "tokens"));
            // Of this turn alone: a pass brings a token of its own, but where its last guess ends the answer.
            const double own = (double)ids(with[turn], "tokens").size() - 1 - number(with[turn], "draft.accepted");
            CHECK((number(with[turn], "draft.passes") == own || number(with[turn], "draft.passes") == own + 1));
        }
    }
}

const Words on_terminal = {program_path(), "chat", "--template", "chatml"};

TEST_CASE("/cache is drawn within the terminal's columns") {
    for (int columns : {120, 100, 60, 30}) {
        Terminal terminal(on_terminal + words_of("-n 5 -c 200"), columns);
        REQUIRE(terminal.wait_for("> "));
        terminal.type("Once upon a time\n");
        REQUIRE(terminal.wait_for("kept 0"));
        terminal.type("/cache\n");
        REQUIRE(terminal.wait_for("rows"));
        std::string row, seen = terminal.seen;
        seen.erase(std::remove(seen.begin(), seen.end(), '\r'), seen.end());
        for (const std::string &line : split(seen, '\n')) {
            if (contains(line, "contiguous ")) row = line;
            if (contains(line, "#") || contains(line, "rows")) CHECK((int)line.size() <= columns);
        }
        CHECK(contains(row, "#"));
        CHECK(contains(row, "rows") == (columns > 60));
        terminal.type("\x04");
        CHECK(terminal.status() == 0);
    }
}

TEST_CASE("Ctrl-C ends an answer, or a line, but not the chat; a line is edited; Ctrl-D ends it") {
    Terminal terminal(on_terminal + words_of("-n 1000000 --when-full ring"));  // an answer without end
    REQUIRE(terminal.wait_for("> "));
    terminal.type("Once upon\x7f\x7f\x7f\x7fin a time\n");  // "Once in a time"
    REQUIRE(terminal.wait_for("", 200));                    // of the answer
    terminal.type("\x03", /*at_once=*/true);
    REQUIRE(terminal.wait_for("stopped: interrupted"));
    REQUIRE(terminal.wait_for("> "));
    terminal.type("not this");
    REQUIRE(terminal.wait_for("not this"));
    terminal.type("\x03");
    REQUIRE(terminal.wait_for("> "));
    terminal.type("/cache\n");
    REQUIRE(terminal.wait_for("ring  "));
    terminal.type("\x1b[A\x1b[A\n");                    // two lines before: the first turn again
    REQUIRE(terminal.wait_for("Once in a time", 300));  // and some of the answer
    terminal.type("\x03", /*at_once=*/true);
    REQUIRE(terminal.wait_for("kept "));
    CHECK(!contains(terminal.seen, "kept 0,"));
    terminal.type("\x04");
    CHECK(terminal.status() == 0);
}

TEST_CASE("bytes that are not UTF-8 hear the same on a terminal as from a pipe, and edited or called back as any") {
    Scratch scratch;
    for (const std::string line : {"ab\xff" "c", "\xe4\xf6", "\xc3", "ab\xf0\x9f", "\xf4\x8f\xbe\x85\xed\xa0\x80 no"}) {
        spill(scratch / "lines", line + "\n");
        Setting from;
        from.input = scratch / "lines";
        const Outcome piped = run({"chat", "--template", "chatml", "-n", "5"}, from);
        const std::string said = piped.err.substr(piped.err.find("this turn: byte "));
        Terminal terminal(on_terminal + words_of("-n 5"));
        REQUIRE(terminal.wait_for("> "));
        for (const std::string &keys : {line, "x" + line + "\x01\x1b[3~\x05", std::string("\x1b[A")}) {
            terminal.type(keys + "\n");
            CHECK(terminal.wait_for(said.substr(0, said.find('\n'))));
        }
        terminal.type("\xf4\x8f\xbe\x85 \xc3\xa4\n");  // a character that stands for one of these, too, and ä
        CHECK(terminal.wait_for("kept 0"));
        CHECK(!contains(terminal.seen, "is not UTF-8"));
        terminal.type("\x04");
        CHECK(terminal.status() == 0);
    }
}

TEST_CASE("a thought is dimmed on a terminal, with its marks, and the text is not") {
    Scratch scratch;
    spill(scratch / "own.jinja", "{{ messages[-1].content }}{{ '<think>' if messages[0].content == 'Think' }}");
    Terminal terminal({program_path(), "chat", "--template", scratch / "own.jinja", "-n", "5"});
    for (const char *line : {"Think", "Hi"}) {
        if (line[0] == 'H') terminal.type("/clear\n");
        terminal.type(std::string(line) + "\n");
        REQUIRE(terminal.wait_for("kept "));
        const std::string said = terminal.seen.substr(0, terminal.seen.find("kept "));
        const size_t first = said.find("\x1b[2m"), second = said.find("\x1b[2m", first + 1);
        CHECK((second != std::string::npos) == (line[0] == 'T'));  // the line about the turn is dimmed, too
    }
    terminal.type("\x04");
    CHECK(terminal.status() == 0);
}

TEST_CASE("a turn that has no room leaves the chat as it was, also where the oldest turns are dropped") {
    Terminal terminal(on_terminal + words_of("-n 10 -c 100 --when-full drop"));
    REQUIRE(terminal.wait_for("no special token ends an answer"));
    for (const char *line : {"Hi\n", "Bye\n"}) {
        REQUIRE(terminal.wait_for("> "));
        terminal.type(line);
        REQUIRE(terminal.wait_for("kept "));
    }
    const auto kept = [&] { return atoi(terminal.seen.c_str() + terminal.seen.find("kept ") + 5); };
    const int before = kept();
    std::string lines;
    for (int i = 0; i < 60; i++) lines += "long ";
    terminal.type(lines + "\n");
    REQUIRE(terminal.wait_for("of this turn alone, it holds 100: raise -c"));
    terminal.type("/agian\n");
    REQUIRE(terminal.wait_for("/agian is unknown"));
    terminal.type("/undo\n");
    REQUIRE(terminal.wait_for("> "));
    terminal.type("Bye\n");
    REQUIRE(terminal.wait_for("kept "));
    CHECK(kept() > before);  // the turn before stands, and all of this one but its last token is there
    terminal.type("\x04");
    CHECK(terminal.status() == 0);
}
