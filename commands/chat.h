// llm chat: a conversation. The cache keeps the turns so far, so a turn reads only what is new in it:
//
//   turn 1   <user> Hi <end> <model>                                  read; then Hello is decoded
//   turn 2   <user> Hi <end> <model> Hello <end> <user> Bye <end> <model>
//            ------------- kept ----------- ---------- read ------------
//
// Ids are compared, not trusted, and the cache rewinds to the first that differs. Ids differ when a template leaves out
// what a model thought, when a turn is taken back, and when the oldest turns are dropped.
#pragma once

#include <editline/readline.h>

#include <clocale>
#include <iostream>

#include "draft.h"
#include "files.h"
#include "template.h"

// A turn: a message and the model's answer, both with marks (template.h). The last turn may have no answer yet.
struct Turn {
    Message said;
    std::string answer = "";
};

// The conversation as the model last read it.
struct Asked {
    std::vector<int> ids = {};         // up to where the answer begins
    std::vector<size_t> borders = {};  // (answer that kept its ids): tokens up to its end
    size_t dropped = 0;                // how many of the oldest turns
    std::string end_of_thought = "";   // what ends a thought that the template began; else ""
};

struct Chat {
    Session session;  // its tokens: all that was read, then the last answer
    ChatTemplate form;
    Options options;
    std::vector<Turn> turns = {};
    Asked asked = {};
};

// True for a model that was not tuned for chat: its answer is the rest of a line.
inline bool is_plain(const Chat &chat) { return chat.options.chat_template == "plain"; }

// ---- The ids of a turn ---------------------------------------------------------------------------------------------

// How many of the first ids of `whole` spell the text of `begin`; SIZE_MAX if none end there. Special tokens must be
// equal, too: \xff, which is in no text, follows each one's spelling.
inline size_t place_of(const Tokenizer *tokenizer, const std::vector<int> &begin, const std::vector<int> &whole) {
    const auto differs = std::mismatch(begin.begin(), begin.end(), whole.begin(), whole.end()).first;
    if (differs == begin.end()) return begin.size();
    auto spelled = [&](const std::vector<int> &ids, size_t count, auto use) {
        TextStream stream(tokenizer, false);
        std::string text;
        for (size_t i = 0; i < count; i++) {
            const size_t before = text.size();
            text += stream.next(ids[i]);
            if (tokenizer_is_special(tokenizer, ids[i])) text += '\xff';
            if (use(i + 1, text, text.size() == before)) break;
        }
        return text + stream.flush();
    };
    auto all = [](size_t, const std::string &, bool) { return false; };
    const std::string wanted = spelled(begin, begin.size(), all);
    size_t found = SIZE_MAX, waiting = 0;  // tokens whose bytes wait for the next token's
    spelled(whole, whole.size(), [&](size_t count, const std::string &text, bool waits) {
        waiting = waits ? waiting + 1 : 0;
        if (text.size() <= wanted.size() && wanted.size() - text.size() <= 3 * waiting)
            if (spelled(whole, count, all) == wanted) found = count;
        return found < SIZE_MAX || text.size() > wanted.size();
    });
    return found;
}

// Encodes a conversation. The model may have written other ids than its text becomes. So the conversation's own ids are
// kept up to the last answer whose text is still at its place; the ids after it are those of the whole text. (Encoded
// alone, the rest would begin like a new text, with some tokenizers with a blank.)
inline Asked with_ids(const Chat &chat, const Rendered &text, size_t dropped) {
    const Tokenizer *tokenizer = chat.session.tokenizer.get();
    const std::vector<int> &tokens = chat.session.tokens;
    Asked asked{encode(tokenizer, text, "this turn"), chat.asked.borders, dropped};
    require_ids(asked.ids, chat.session.engine.model.config);
    for (; !asked.borders.empty(); asked.borders.pop_back()) {
        const std::vector<int> held(tokens.begin(), tokens.begin() + (int64_t)asked.borders.back());
        const size_t place = place_of(tokenizer, held, asked.ids);
        if (place == SIZE_MAX) continue;
        asked.ids.erase(asked.ids.begin(), asked.ids.begin() + (int64_t)place);
        asked.ids.insert(asked.ids.begin(), held.begin(), held.end());
        break;
    }
    const std::string end = text.text.substr(0, text.text.find_last_not_of(" \n") + 1);
    for (auto &[begins, ends] : thoughts)
        if (end.size() >= strlen(begins) && end.compare(end.size() - strlen(begins), SIZE_MAX, begins) == 0)
            asked.end_of_thought = ends;
    return asked;
}

inline std::vector<Message> messages_of(const Chat &chat, size_t dropped) {
    std::vector<Message> messages;
    if (const std::string &system = chat.options.system; !system.empty())
        messages.push_back({"system", marked(chat.form, system, "--system")});
    for (size_t i = dropped; i < chat.turns.size(); i++) {
        messages.push_back(chat.turns[i].said);
        messages.push_back({"assistant", chat.turns[i].answer});
    }
    messages.pop_back();  // the last answer is yet to come
    return messages;
}

// Removes earlier turns with an empty answer, which some templates refuse. Returns false if there are none.
inline bool drop_unanswered(Chat &chat) {
    auto empty = [&](const Turn &turn) { return turn.answer.empty() && &turn != &chat.turns.back(); };
    const auto left = std::remove_if(chat.turns.begin(), chat.turns.end() - 1, empty);
    if (left == chat.turns.end() - 1) return false;
    chat.turns.erase(left, chat.turns.end() - 1);
    chat.asked.dropped = 0;
    note("the template takes no empty answer: turns without one are taken back");
    return true;
}

// Renders and encodes the conversation. If the context lacks room for it and an answer, fails or drops the oldest
// turns. Dropping makes room for -n tokens, but for a quarter of the context at most, as a large -n would drop all.
inline Asked ask(Chat &chat) {
    const Options &o = chat.options;
    const bool drops = o.when_full == "drop";
    const int limit = chat.session.limit, room = drops ? std::min(o.count, limit / 4) : 1;
    const bool more = limit < chat.session.engine.model.config.context;  // -c may ask for more
    for (size_t dropped = chat.asked.dropped;; dropped++) {
        Rendered text;
        try {
            text = render(chat.form, messages_of(chat, dropped));
        } catch (const Error &) {
            if (drop_unanswered(chat)) return ask(chat);
            throw;
        }
        Asked asked = with_ids(chat, text, dropped);
        if ((int64_t)asked.ids.size() + room <= limit) return asked;
        if (!drops || chat.turns.size() - dropped < 2)
            throw Error(formatted("the context is full: %zu tokens %s, it holds %d: %s", asked.ids.size(),
                                  drops ? "and an answer of this turn alone" : "with this turn", limit,
                                  drops  ? more ? "raise -c" : "shorten it"
                                  : more ? "/undo, raise -c, or take --when-full drop or ring"
                                         : "/undo, or take --when-full drop or ring"),
                        1);
    }
}

// Rewinds the cache to where `ids` still agree. Returns how many positions are kept; at least one id is left to read.
inline int keep_same(Cache &cache, const std::vector<int> &held, const std::vector<int> &ids) {
    const int most = std::min({cache.lengths[0], (int)held.size(), (int)ids.size() - 1});
    return rewind(cache, 0, (int)(std::mismatch(held.begin(), held.begin() + most, ids.begin()).first - held.begin()));
}

// ---- A turn --------------------------------------------------------------------------------------------------------

// Stores the last turn's answer, which ends after `count` tokens of the conversation: as the text for the template,
// with special tokens, and marked() where it only spells one. Decoded alone, it lacks the blank that begins a word of
// SentencePiece and that the template writes; a plain text is decoded as a continuation. An answer that ends within a
// character loses the ids of that character; one that ends at a stop text loses the ids that reach into it.
inline void take_answer(Chat &chat, size_t count) {
    const Tokenizer *tokenizer = chat.session.tokenizer.get();
    const std::vector<int> &tokens = chat.session.tokens;
    const size_t prompt = (size_t)chat.session.prompt, from = is_plain(chat) ? 0 : prompt;
    auto text_of = [&](size_t end) {
        return decode(tokenizer, {tokens.begin() + (int64_t)from, tokens.begin() + (int64_t)end}, false);
    };
    const size_t before = text_of(prompt).size();
    std::string text = text_of(count);
    auto broken = [&] { return text.size() >= 3 && text.substr(text.size() - 3) == "\xef\xbf\xbd"; };  // U+FFFD
    while (broken() && count > prompt) text = text_of(--count);
    text.resize(before + Writer::find_first(chat.options.stops, text.substr(std::min(before, text.size()))).first);
    while (count > prompt && text_of(count).size() > text.size()) count--;

    TextStream stream(tokenizer, false);
    std::string run;
    chat.turns.back().answer.clear();
    auto take = [&](const std::string &special) {
        chat.turns.back().answer += marked(chat.form, run, "the answer") + special, run.clear();
    };
    size_t others = before;  // bytes of the prompt to skip; a token's last ones may come with the next
    for (size_t i = from; i < count; i++) {
        const std::string piece = stream.next(tokens[i]);
        run += piece.substr(std::min(others, piece.size()));
        others -= std::min(others, piece.size());
        const std::string special =
            tokenizer_is_special(tokenizer, tokens[i]) ? tokenizer_token(tokenizer, tokens[i]) : "";
        if (special.empty() || run.size() < special.size()) continue;
        if (run.compare(run.size() - special.size(), SIZE_MAX, special) != 0) continue;
        run.resize(run.size() - special.size()), take(special);
    }
    run += stream.flush() + text.substr(std::min(text.size(), text_of(count).size())), take("");
    chat.asked.borders.push_back(count);
}

// Answers the last turn. Returns the report on it: as text a short line, as JSON everything.
inline Report answer(Chat &chat, const UseLogits &dump) {
    Session &session = chat.session;
    Cache *cache = session.caches.empty() ? nullptr : &session.caches[0];
    Asked asked = ask(chat);
    const int held = cache ? cache->lengths[0] : 0;
    const int kept = cache ? keep_same(*cache, session.tokens, asked.ids) : 0;
    const int dropped = (int)(asked.dropped - chat.asked.dropped);
    session.tokens = asked.ids, session.prompt = (int)asked.ids.size();
    chat.asked = asked;
    char last = '\n';
    auto show = [&](const std::string &piece) {
        if (!piece.empty()) last = piece.back();
        if (!chat.options.json) fwrite(piece.data(), 1, piece.size(), stdout), flush_output();
    };
    session.drafter.counts = {};  // the counts of this turn
    Writer writer(session.tokenizer.get(), is_plain(chat) ? session.tokens : std::vector<int>{}, chat.options.stops);
    for (auto &[begins, ends] : thoughts) writer.thoughts[begins] = ends;
    const std::vector<std::string> dimmed = split(painted("2", "|"), '|');
    writer.dim = dimmed[0], writer.bright = dimmed[1], writer.end_of_thought = asked.end_of_thought;
    if (!asked.end_of_thought.empty()) show(writer.dim);
    Generation result = generate(session, std::move(writer), dump, show);
    if (last != '\n') show("\n");
    const size_t ends = result.stop == "end id" ? 1 : 0;  // the end id is not part of the answer
    const std::string ending = ends ? decode(session.tokenizer.get(), {session.tokens.back()}) : "";
    const size_t rest = result.text.size() - std::min(result.text.size(), ending.size());
    if (result.text.compare(rest, SIZE_MAX, ending) == 0) result.text.resize(rest);
    take_answer(chat, session.tokens.size() - ends);

    Report report;
    report.add("turn", (int)chat.turns.size()).show("kept", kept, "kept %d");
    report.show("read", result.prefilled, ", read %d").add("prompt_tokens", session.prompt);
    const std::vector<int> tokens(session.tokens.begin() + session.prompt, session.tokens.end());
    if (session.sampler.temperature > 0) report.add("seed", (long long)session.sampler.seed);
    report.add("prompt_ids", asked.ids).add("tokens", tokens).add("text", result.text);
    report.add("thought", result.thought)
        .add("stop", result.stop)
        .add("tokens_per_second", result.decoded / result.decode_seconds);
    report.add("forgotten", held - kept, held > kept ? formatted(", forgot %d", held - kept) : "");
    report.add("dropped_turns", dropped, dropped ? ", dropped " + counted(dropped, "turn") : "");
    const double first = result.prefill_seconds;
    const std::string after = tokens.empty() ? "" : ", first token after " + in_digits(first * 1e3) + " ms";
    report.add("seconds_to_first_token", first, after);
    Report guesses = about_draft(session.drafter), about = about_cache(session.engine.model.config, cache);
    guesses.text.clear();
    if (session.drafter.most) report.add("draft", guesses);
    about.text = cache ? ", " + in_units(bytes_of(*cache).total()) : "";
    report.add("cache", about);
    if (!ends) report.say(", stopped: " + result.stop);
    return report;
}

// ---- The picture of a cache ----------------------------------------------------------------------------------------

// Draws a cache, a line for each kind of layers. A mark is one row or several: all of them hold a position of the
// conversation (#), some do (+), none does (.). A ring begins again on the left; pages are where one was free. There
// are at most 64 marks, fewer if `columns` are few; the legend is below them if there is too little room next to them.
inline std::string picture_of(const Cache &cache, size_t columns) {
    std::string all;
    for (const Store &store : cache.stores) {
        const int length = cache.lengths[0], first = std::min(length, first_kept(cache, store, 0));
        const int64_t rows = store.view.keys.rows_per_layer;
        const std::string legend =
            counted(length - first, "position") + formatted(" from %d on, in ", first) + counted(rows, "row");
        const size_t name = 11, whole = name + 2 + legend.size();
        const bool below = columns < whole + 16;
        const int64_t most =
            (int64_t)std::max<size_t>(1, std::min<size_t>(64, columns - std::min(columns, below ? name : whole)));
        const int64_t width = std::max<int64_t>(1, (rows + most - 1) / most);
        std::vector<int> held((size_t)(rows / width + 1), 0);
        for (int t = first; t < length; t++) held[(size_t)(row_of(store, 0, t) / width)]++;
        std::string marks;
        for (int64_t i = 0; i * width < rows; i++)
            marks += held[i] >= std::min(width, rows - i * width) ? '#' : held[i] ? '+' : '.';
        all += formatted("%-10s %s%s%s\n", name_of(store.layout), marks.c_str(), below ? "\n" : "  ",
                         wrapped(legend, columns).c_str());
    }
    return all;
}

// ---- What is typed -------------------------------------------------------------------------------------------------

// Reads a character of the terminal for libedit, which drops bytes that form none. Here each comes as a character for
// private use, and so does each byte of a character that is one of these. whole_line() gives the bytes again.
constexpr wchar_t lone_byte = 0x10ff00;
inline int next_character(FILE *from) {
    static std::string bytes;  // read, but not returned yet
    static int lone = 0;       // how many of them to return one by one
    while (true) {
        if (lone > 0) {
            const int byte = (unsigned char)bytes[0];
            bytes.erase(0, 1), lone--;
            return lone_byte + byte;
        }
        wchar_t character = 0;
        mbstate_t state = {};
        const size_t size = mbrtowc(&character, bytes.data(), bytes.size(), &state);
        if (size == SIZE_MAX) {
            lone = 1;
        } else if (size == SIZE_MAX - 1) {  // its end is missing
            char byte;
            const ssize_t count = read(fileno(from), &byte, 1);
            if (count == 1) bytes += byte;
            if (count == 0 || (count < 0 && (errno != EINTR || interrupted()))) return bytes.clear(), EOF;
        } else if (character >= lone_byte + 0x80) {
            lone = 4;
        } else {
            bytes.erase(0, std::max<size_t>(1, size));
            return (int)character;
        }
    }
}
inline std::string whole_line(const std::string &line) {
    std::string bytes;
    for (size_t i = 0; i < line.size(); i++) {
        const bool lone = line.compare(i, 2, "\xf4\x8f") == 0 && (line[i + 2] & 0xfe) == 0xbe;  // U+10FF80 and beyond
        bytes += lone ? (char)(line[i + 2] << 6 | (line[i + 3] & 0x3f)) : line[i];
        i += lone ? 3 : 0;
    }
    return bytes;
}

// What was typed: a line, or a text between two """ (`whole`), in which no line is a command.
struct Typed {
    std::string text = "";
    bool there = true, given_up = false, whole = false;
};

// Reads a line from a pipe, or on a terminal with editing and a history, where Ctrl-C gives it up. A Ctrl-C counts only
// for the line or the answer during which it is typed, so it is forgotten before and after.
inline Typed next_line(bool on_terminal, const char *prompt) {
    interrupts = 0;
    Typed typed;
    if (on_terminal) {
        const std::unique_ptr<char, decltype(&free)> line(readline(prompt), free);
        typed.given_up = !line && interrupted();
        typed.there = line || typed.given_up;
        typed.text = line ? whole_line(line.get()) : "";
        if (!typed.text.empty()) add_history(line.get());
        if (!line) fputs("\n", stderr);
    } else {
        typed.there = (bool)std::getline(std::cin, typed.text);
        typed.text.erase(typed.text.find_last_not_of('\r') + 1);
    }
    interrupts = 0;
    return typed;
}

inline Typed next_message(bool on_terminal) {
    const std::string mark = "\"\"\"";
    Typed typed = next_line(on_terminal, "> ");
    if (typed.text.compare(0, 3, mark) != 0) return typed;
    std::string all = typed.text.substr(3);
    auto ends = [&] {
        const std::string cut = all.substr(0, all.find_last_not_of(" \t") + 1);  // blanks after the mark do not count
        const bool closed = cut.size() >= 3 && cut.compare(cut.size() - 3, 3, mark) == 0;
        if (closed) all = cut;
        return closed;
    };
    while (!ends()) {
        typed = next_line(on_terminal, "... ");
        if (typed.given_up) return typed;
        if (!typed.there)
            fail("a text that begins with %s: its end is missing, expected %s", mark.c_str(), mark.c_str());
        all += (all.empty() ? "" : "\n") + typed.text;
    }
    all.resize(all.size() - 3);
    if (!all.empty() && all.back() == '\n') all.pop_back();
    return {all, true, false, true};
}

// ---- llm chat ------------------------------------------------------------------------------------------------------

// The model without -m: the built-in one; for a chat the one tuned for it that `make smollm2` fetches, if it is there.
inline std::string usual_model(const Options &options) {
    const std::string real = file_of_project("models/SmolLM2-135M-Instruct");
    const bool answers = options.command == "chat" && options.chat_template.empty();
    return answers && file_exists(join_path(real, "config.json")) ? real : file_of_project("weights_tools/builtin");
}

inline Chat open_chat(Options options) {
    if (options.chat_template.empty() && options.directory == file_of_project("weights_tools/builtin")) {
        options.chat_template = "plain";  // the built-in model was not tuned for chat
        note("this model goes on with a text: `make smollm2` fetches one that answers, and chat takes it then");
    }
    Session session = open_model(options);
    const Tokenizer *tokenizer = session.tokenizer.get();
    ChatTemplate form =
        open_template(options.directory, options.chat_template, tokenizer, options.system, options.template_arguments);
    Chat chat{std::move(session), std::move(form), options};
    Config &config = chat.session.engine.model.config;
    for (int i = 0; is_plain(chat) && i < tokenizer_before(tokenizer); i++)  // no template writes them
        chat.form.before += tokenizer_token(tokenizer, encode(tokenizer, "")[i]);
    const std::vector<int> line_end = encode(tokenizer, {"\n", std::string(1, '\0')}, "the template");
    const int end = !is_plain(chat) ? end_id(chat.form, tokenizer) : line_end.empty() ? -1 : line_end.back();
    if (end >= 0)
        config.end_ids.push_back(end);
    else if (config.end_ids.empty() || !options.chat_template.empty())  // a checkpoint's own may leave it to the model
        note("no special token ends an answer: is the template the model's?");
    int usual = std::min(config.context, 8192), original = config.context;
    for (const Kind &kind : config.kinds)
        if (!kind.rope.long_factors.empty()) original = std::min(original, kind.rope.original_context);
    const bool ring = options.when_full == "ring";
    if (original < usual && !ring && !options.context)
        note(
            formatted("the context is %d positions, for which this model has frequencies of its own (longrope): -c %d "
                      "goes further, with those for longer texts from the first token on",
                      original, usual));
    if (ring && !options.has("-n")) chat.session.count = config.context;  // or an answer might never end
    const int limit = ring              ? INT_MAX
                      : options.context ? limit_of(options, config, 0, false)
                                        : std::min(usual, original);
    open_caches(options, chat.session, options.caches(), limit);
    return chat;
}

constexpr const char *chat_commands = "/undo /again /clear /cache /help /bye /quit /exit";
inline std::string suggestion(const std::string &word, const std::string &known);  // flags.h

// Obeys a command of the chat. Returns true if the last turn is to be answered.
inline bool obey(Chat &chat, const std::string &command) {
    if (command == "/cache") {
        const std::string picture =
            chat.session.caches.empty() ? "no cache\n" : picture_of(chat.session.caches[0], columns_of(stderr));
        fputs(picture.c_str(), stderr);
    } else if (command == "/clear") {
        chat.turns.clear(), chat.asked.dropped = 0;
    } else if (command == "/help") {
        fputs(
            "/undo   takes the last turn back\n/again  answers it again, differently if --temp is above 0\n"
            "/clear  takes all turns back\n/cache  shows where the cache has its rows\n"
            "/bye    ends the chat, as /quit and /exit do; Ctrl-C ends an answer\n"
            "\"\"\"     begins and ends a text of several lines\n",
            stderr);
    } else if (chat.turns.empty()) {
        note("there is no turn");
    } else if (command == "/undo") {
        chat.turns.pop_back();
        chat.asked.dropped = 0;  // dropped turns that fit come back
        note(counted((int64_t)chat.turns.size(), "turn is", "turns are") + " left");
    } else {
        chat.turns.back().answer.clear();
        chat.session.sampler.seed++;
        return true;
    }
    return false;
}

// Takes what was typed, a turn or a command. Returns true if the last turn is to be answered. A word that is no command
// is a text, as /no_think is for some models, unless it looks like a misspelled command.
inline bool take_line(Chat &chat, const Typed &typed) {
    const std::string &text = typed.text, word = text.substr(0, text.find_last_not_of(' ') + 1);
    if (!typed.whole && has(chat_commands, word)) return obey(chat, word);
    if (const std::string meant = suggestion(word, chat_commands); !typed.whole && word[0] == '/' && !meant.empty()) {
        note(formatted("%.80s is unknown%s A blank before it makes it a text; /help says what there is", word.c_str(),
                       meant.c_str()));
        return false;
    }
    if (text.empty()) return false;
    if (chat.options.json && !typed.whole && strchr("\"{", text[0])) {
        const Json json = parse_json("this line", text[0] == '{' ? text : "{\"content\": " + text + "}");
        chat.turns.push_back({message_of(chat.form, {"this line", &json})});
    } else {
        chat.turns.push_back({{"user", marked(chat.form, text, "this turn")}});
    }
    return true;
}

inline int run_chat(const Options &options) {
    const bool on_terminal = isatty(0);
    const char *set = setlocale(LC_CTYPE, "");  // for the characters that are typed
    if (!set || !strstr(set, "UTF-8")) setlocale(LC_CTYPE, "C.UTF-8");
    rl_outstream = stderr;
    rl_getc_function = next_character;
    rl_bind_key('\t', rl_insert);  // Tab completes no file names
    Chat chat = open_chat(options);
    LogitsFile dump(options, chat.session.engine.model.config.vocabulary);
    if (on_terminal) begin_work(), note("/help says what else there is");
    while (true) {
        const Typed typed = next_message(on_terminal);
        const std::string word = typed.text.substr(0, typed.text.find_last_not_of(' ') + 1);
        if (!typed.there || (!typed.whole && has("/bye /quit /exit", word))) break;
        const std::vector<Turn> before = chat.turns;
        std::string problem;
        try {
            if (!take_line(chat, typed)) continue;
            const Report report = answer(chat, dump.add());
            const std::string said = options.json ? report.json() : painted("2", report.text, 2);
            fputs((said + "\n").c_str(), options.json ? stdout : stderr);
            flush_output();
            if (interrupted() && chat.turns.back().answer.empty())
                problem = "nothing was answered: the turn is taken back";
        } catch (const Error &error) {
            if (!on_terminal) throw;
            problem = error.what();
        }
        if (!problem.empty()) chat.turns = before, chat.asked.dropped = 0, note(problem);
    }
    dump.finish();
    return 0;
}
