// llm chat: a conversation. The cache holds the turns before, so a turn reads what is new of it, and no more:
//
//   turn 1   <user> Hi <end> <model>                                  read; Hello is decoded behind it
//   turn 2   <user> Hi <end> <model> Hello <end> <user> Bye <end> <model>
//            ------------- kept ----------- ---------- read ------------
//
// Ids are compared, not trusted. Where they are no longer those of the turn before, since a template leaves out what a
// model thought, a turn was taken back, or the oldest were dropped, the cache goes back to what is the same.
#pragma once

#include <editline/readline.h>

#include <clocale>
#include <iostream>

#include "draft.h"
#include "template.h"

// The end of an answer: so many bytes and tokens of the conversation stand before.
struct Border {
    size_t bytes, tokens;
};

// The conversation as it was read last.
struct Asked {
    std::string all;                         // with its marks, without what ended the answer
    std::vector<int> ids;                    // up to where that answer begins
    std::vector<Border> borders = {{0, 0}};  // of the text
    size_t dropped = 0;                      // turns, of the oldest
};

struct Chat {
    Session session;  // its tokens: all that was read, and the last answer
    ChatTemplate form;
    Options options;
    std::vector<Turn> turns = {};
    Asked asked = {};
};

// Of a model that was not tuned for chat: its answer is the rest of a line.
inline bool is_plain(const Chat &chat) { return chat.options.chat_template == "plain"; }

// ---- The ids of a turn ---------------------------------------------------------------------------------------------

// Up to the last answer's end before the text is another one, a conversation keeps its ids: those that a model writes
// need not be the ones that their text would become.
inline Asked with_ids(const Chat &chat, const std::string &all, size_t dropped) {
    const std::string &read = chat.asked.all;
    const size_t differs = std::mismatch(read.begin(), read.end(), all.begin(), all.end()).first - read.begin();
    Asked asked{all, {}, chat.asked.borders, dropped};
    while (asked.borders.back().bytes > differs) asked.borders.pop_back();
    const Border from = asked.borders.back();
    asked.ids.assign(chat.session.tokens.begin(), chat.session.tokens.begin() + (int64_t)from.tokens);
    const Rendered rest = unmarked(all.substr(from.bytes));
    for (int id : encode(chat.session.tokenizer.get(), rest.text, "this turn", rest.typed.data()))
        asked.ids.push_back(id);
    require_ids(asked.ids, chat.session.engine.model.config);
    return asked;
}

// Where the context has no room for the conversation and an answer, the oldest turns are dropped, if that is wanted. Of
// an answer it is -n tokens, but a quarter of the context at most: otherwise a large -n would drop all.
inline Asked ask(const Chat &chat) {
    const Options &o = chat.options;
    const bool drops = o.when_full == "drop";
    const int limit = chat.session.limit, room = drops ? std::min(o.count, limit / 4) : 1;
    const bool more = limit < chat.session.engine.model.config.context;  // is what -c may ask for
    for (size_t dropped = chat.asked.dropped;; dropped++) {
        const std::vector<Turn> turns(chat.turns.begin() + (int64_t)dropped, chat.turns.end());
        Asked asked = with_ids(chat, render(chat.form, o.system, turns), dropped);
        if ((int64_t)asked.ids.size() + room <= limit) return asked;
        if (!drops || turns.size() < 2)
            throw Error(formatted("the context is full: %zu tokens %s, it holds %d: %s", asked.ids.size(),
                                  drops ? "and an answer of this turn alone" : "with this turn", limit,
                                  drops  ? more ? "raise -c" : "shorten it"
                                  : more ? "/undo, raise -c, or take --when-full drop or ring"
                                         : "/undo, or take --when-full drop or ring"),
                        1);
    }
}

// Lets the cache forget what is not the same, and returns how many positions it keeps: at least one is left to read.
inline int keep_same(Cache &cache, const std::vector<int> &held, const std::vector<int> &ids) {
    const int most = std::min({cache.lengths[0], (int)held.size(), (int)ids.size() - 1});
    return rewind(cache, 0, (int)(std::mismatch(held.begin(), held.begin() + most, ids.begin()).first - held.begin()));
}

// ---- A turn --------------------------------------------------------------------------------------------------------

// The text of an answer behind its prompt. One that ends within a character loses the ids of its last one: so many
// `count` then.
inline std::string answer_of(const Session &session, size_t &count) {
    auto text_of = [&](size_t end) {
        return decode(session.tokenizer.get(), {session.tokens.begin(), session.tokens.begin() + (int64_t)end});
    };
    const size_t begin = text_of((size_t)session.prompt).size();
    for (;; count--) {
        const std::string all = text_of(count), text = all.substr(std::min(begin, all.size()));
        const bool broken = text.size() >= 3 && text.substr(text.size() - 3) == "\xef\xbf\xbd";  // U+FFFD
        if (!broken || (int)count <= session.prompt) return text;
    }
}

// Takes the answer that stands behind the prompt. What a template gets of it is its text by itself, as it would be
// decoded elsewhere: without the blank that a word of SentencePiece begins with, which the template writes.
inline void take_answer(Chat &chat, size_t count) {
    chat.asked.all += marked(chat.form, answer_of(chat.session, count), "the answer");
    const std::vector<int> &tokens = chat.session.tokens;
    const std::vector<int> own(tokens.begin() + chat.session.prompt, tokens.begin() + (int64_t)count);
    chat.turns.back().answer = decode(chat.session.tokenizer.get(), own);
    chat.asked.borders.push_back({chat.asked.all.size(), count});
}

// Answers the last turn. What it says of it: on the terminal a line, with --json all.
inline Report answer(Chat &chat, const UseLogits &dump) {
    Session &session = chat.session;
    Cache *cache = session.caches.empty() ? nullptr : &session.caches[0];
    Asked asked = ask(chat);
    const int held = cache ? cache->lengths[0] : 0;
    const int kept = cache ? keep_same(*cache, session.tokens, asked.ids) : 0;
    const int dropped = (int)(asked.dropped - chat.asked.dropped);
    session.tokens = asked.ids, session.prompt = (int)asked.ids.size();
    chat.asked = asked;
    auto show = [&](const std::string &piece) {
        if (!chat.options.json) fwrite(piece.data(), 1, piece.size(), stdout), flush_output();
    };
    session.drafter.counts = {};  // those of this turn
    Writer writer(session.tokenizer.get(), session.tokens);
    const Generation result = generate(session, chat.options, std::move(writer), dump, show);
    if (result.text.empty() || result.text.back() != '\n') show("\n");
    const size_t ends = result.stop == "end id" ? 1 : 0;  // what ends an answer is not of it
    take_answer(chat, session.tokens.size() - ends);

    Report report;
    report.add("turn", (int)chat.turns.size()).show("kept", kept, "kept %d");
    report.show("read", result.prefilled, ", read %d").add("prompt_tokens", session.prompt);
    const std::vector<int> tokens(session.tokens.begin() + session.prompt, session.tokens.end());
    if (chat.options.temperature > 0) report.add("seed", (long long)chat.options.seed);
    report.add("prompt_ids", asked.ids).add("tokens", tokens).add("text", chat.turns.back().answer);
    report.add("stop", result.stop).add("tokens_per_second", result.decoded / result.decode_seconds);
    report.add("forgotten", held - kept, held > kept ? formatted(", forgot %d", held - kept) : "");
    report.add("dropped_turns", dropped, dropped ? ", dropped " + counted(dropped, "turn") : "");
    const double first = result.prefill_seconds;
    const std::string after = tokens.empty() ? "" : formatted(", first token after %.3g ms", first * 1e3);
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

// A line for each kind of layers, of at most 64 marks: rows that hold a position of the conversation (#), some of which
// do (+), and that are free (.). A ring begins again on the left; pages lie where there was one.
inline std::string picture_of(const Cache &cache) {
    std::string all;
    for (const Store &store : cache.stores) {
        const int64_t rows = store.view.keys.rows_per_layer, width = std::max<int64_t>(1, (rows + 63) / 64);
        std::vector<int> held((size_t)(rows / width + 1), 0);
        const int length = cache.lengths[0], first = std::min(length, first_kept(cache, store, 0));
        for (int t = first; t < length; t++) held[(size_t)(row_of(store, 0, t) / width)]++;
        std::string marks;
        for (int64_t i = 0; i * width < rows; i++)
            marks += held[i] >= std::min(width, rows - i * width) ? '#' : held[i] ? '+' : '.';
        all += formatted("%-10s %s  %d positions from %d on, in %lld rows\n", name_of(store.layout), marks.c_str(),
                         length - first, first, (long long)rows);
    }
    return all;
}

// ---- What is typed -------------------------------------------------------------------------------------------------

// A line from a pipe; on a terminal with editing and a history, where Ctrl-C gives it up. False at the end. A Ctrl-C is
// meant for the answer or the line during which it is typed, and for no other.
inline bool next_line(std::string &line, bool on_terminal) {
    interrupts = 0;
    bool there;
    if (on_terminal) {
        const std::unique_ptr<char, decltype(&free)> typed(readline("> "), free);
        there = typed || interrupted();
        line = typed ? typed.get() : "";
        if (!line.empty()) add_history(line.c_str());
        if (!typed) fputs("\n", stderr);
    } else {
        there = (bool)std::getline(std::cin, line);
        line.erase(line.find_last_not_of('\r') + 1);
    }
    interrupts = 0;
    return there;
}

// ---- llm chat ------------------------------------------------------------------------------------------------------

inline Chat open_chat(Options options) {
    if (options.chat_template.empty() && !options.has("-m")) options.chat_template = "plain";  // was not tuned for chat
    Session session = open_model(options);
    const Tokenizer *tokenizer = session.tokenizer.get();
    ChatTemplate form = open_template(options.directory, options.chat_template, tokenizer);
    Chat chat{std::move(session), std::move(form), options};
    Config &config = chat.session.engine.model.config;
    for (int i = 0; is_plain(chat) && i < tokenizer_before(tokenizer); i++)  // no template says what a text begins with
        chat.form.before += tokenizer_token(tokenizer, encode(tokenizer, "")[i]);
    // What the template writes behind an answer ends it also where no config says so.
    const std::string by_template(chat.form.end.size(), 0);
    const std::vector<int> ends = encode(tokenizer, chat.form.end, "the template", by_template.data());
    auto ending = std::find_if(ends.begin(), ends.end(), [&](int id) { return tokenizer_is_special(tokenizer, id); });
    if (is_plain(chat)) ending = ends.end() - !ends.empty();
    if (ending != ends.end())
        config.end_ids.push_back(*ending);
    else
        note("no special token ends an answer: is the template the model's?");
    const int limit = options.when_full == "ring" ? INT_MAX
                      : options.context           ? limit_of(options, config, 0, false)
                                                  : std::min(config.context, 8192);
    open_caches(options, chat.session, options.caches(), limit);
    return chat;
}

// What a line that begins with / does; true: the last turn is to be answered.
inline bool obey(Chat &chat, const std::string &line) {
    if (line == "/cache") {
        fputs(chat.session.caches.empty() ? "no cache\n" : picture_of(chat.session.caches[0]).c_str(), stderr);
    } else if (line != "/undo" && line != "/again") {
        if (line != "/help") note(formatted("%.80s is unknown; a blank before it makes it a text", line.c_str()));
        fputs(
            "/undo   takes the last turn back\n/again  answers it anew: otherwise, if --temp is above 0\n"
            "/cache  shows where its rows are\n/bye    ends the chat; Ctrl-C ends an answer\n",
            stderr);
    } else if (chat.turns.empty()) {
        note("there is no turn");
    } else if (line == "/undo") {
        chat.turns.pop_back();
        chat.asked.dropped = 0;  // as many turns as fit come again
        note(counted((int64_t)chat.turns.size(), "turn is", "turns are") + " left");
    } else {
        chat.turns.back().answer.clear();
        chat.options.seed++;
        return true;
    }
    return false;
}

inline int run_chat(const Options &options) {
    const bool on_terminal = isatty(0);
    const char *set = setlocale(LC_CTYPE, "");  // for what is typed
    if (!set || !strstr(set, "UTF-8")) setlocale(LC_CTYPE, "C.UTF-8");
    rl_outstream = stderr;
    rl_bind_key('\t', rl_insert);  // and no names of files
    Chat chat = open_chat(options);
    LogitsFile dump(options, chat.session.engine.model.config.vocabulary);
    if (on_terminal) begin_work(), note("/help says what else there is");
    for (std::string line; next_line(line, on_terminal) && line != "/bye";) {
        const std::vector<Turn> before = chat.turns;
        if (line[0] == '/') line.erase(line.find_last_not_of(' ') + 1);
        if (line.empty() || (line[0] == '/' && !obey(chat, line))) continue;
        if (line[0] != '/') chat.turns.push_back({line, ""});
        std::string problem;
        try {
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
