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

struct Chat {
    Session session;  // its tokens: all that was read, and the last answer
    ChatTemplate form;
    Options options;
    std::vector<Turn> turns = {};
    std::string text = {};                                // what the tokens read as, without what ended the answer
    std::vector<std::pair<size_t, size_t>> borders = {};  // (bytes of it, tokens) before and behind each answer
    int dropped = 0;                                      // turns, of the oldest
    std::tm today = {};                                   // of the chat's beginning, for templates that say it
};

// Of a model that was not tuned for chat: its answer is the rest of a line.
inline bool is_plain(const Chat &chat) { return has("plain", chat.form.form->name); }

// ---- The ids of a turn ---------------------------------------------------------------------------------------------

// As far as a conversation has the text so far, it keeps its ids: those that a model writes need not be the ones that
// their text would become. What is new begins behind an answer, or before one, where the template begins anew.
inline std::vector<int> ids_of(Chat &chat, const Rendered &asked) {
    const std::string &before = chat.text, &text = asked.text;
    const auto differs = std::mismatch(before.begin(), before.end(), text.begin(), text.end()).first;
    while (!chat.borders.empty() && chat.borders.back().first > (size_t)(differs - before.begin()))
        chat.borders.pop_back();
    const auto [bytes, count] = chat.borders.empty() ? std::pair<size_t, size_t>{} : chat.borders.back();
    const Tokenizer *tokenizer = chat.session.tokenizer.get();
    std::vector<int> ids(chat.session.tokens.begin(), chat.session.tokens.begin() + (int64_t)count);
    if (count == 0 && is_plain(chat)) {  // no template that says what a text begins with
        ids = encode(tokenizer, "");
        ids.resize((size_t)tokenizer_before(tokenizer));
    }
    if (bytes < text.size())
        for (int id : encode(tokenizer, text.substr(bytes), "this turn", &asked.typed[bytes])) ids.push_back(id);
    require_ids(ids, chat.session.engine.model.config);
    return ids;
}

// The conversation with its last turn, which waits for an answer. Where the context has no room for it and an answer,
// the oldest turns are dropped, if that is wanted.
inline Rendered ask(Chat &chat, std::vector<int> &ids) {
    const Options &o = chat.options;
    const int limit = chat.session.limit, room = o.when_full == "drop" ? std::min(o.count, limit / 4) : 1;
    while (true) {
        Rendered asked = render(chat.form, o.system, o.has("--system"), chat.turns, chat.today);
        ids = ids_of(chat, asked);
        if ((int64_t)ids.size() + room <= limit) return asked;
        if (o.when_full != "drop" || chat.turns.size() < 2)
            throw Error(
                formatted("the context is full: %zu tokens with this turn, it holds %d: /undo, raise -c, or take "
                          "--when-full drop or ring",
                          ids.size(), limit),
                1);
        chat.turns.erase(chat.turns.begin());
        chat.dropped++;
    }
}

// Lets the cache forget what is not the same, and returns how many positions it keeps: at least one is left to read. A
// block of codes is kept whole or not at all, since the rest of it would be made of what was rounded once before; and a
// ring that has overwritten what the next query sees begins anew.
inline int keep_same(Cache &cache, const std::vector<int> &held, const std::vector<int> &ids) {
    const int from = cache.lengths[0], most = std::min({from, (int)held.size(), (int)ids.size() - 1});
    int same = (int)(std::mismatch(held.begin(), held.begin() + most, ids.begin()).first - held.begin());
    if (blocks_of(cache) && from / group_size > same / group_size) same -= same % group_size;
    try {
        shrink(cache, 0, same);
    } catch (const Error &) {
        shrink(cache, 0, same = 0);
    }
    return same;
}

// ---- A turn --------------------------------------------------------------------------------------------------------

// The text of an answer behind its prompt. One that ends within a character loses the ids of its last one: so many
// `count` then.
inline std::string answer_of(const Session &session, size_t &count) {
    auto text_of = [&](size_t end) {
        return decode(session.tokenizer.get(), {session.tokens.begin(), session.tokens.begin() + (int64_t)end});
    };
    const size_t begin = text_of((size_t)session.prompt).size();
    const std::string broken = "\xef\xbf\xbd";  // U+FFFD
    for (;; count--) {
        const std::string all = text_of(count), text = all.substr(std::min(begin, all.size()));
        const bool whole = text.size() < broken.size() || text.substr(text.size() - broken.size()) != broken;
        if (whole || (int)count <= session.prompt) return text;
    }
}

// Takes the answer that stands behind the prompt. What a template gets of it is its text by itself, as it would be
// decoded elsewhere: without the blank that a word of SentencePiece begins with, which the template writes.
inline void take_answer(Chat &chat, size_t count) {
    chat.text += answer_of(chat.session, count);
    const std::vector<int> &tokens = chat.session.tokens;
    const std::vector<int> own(tokens.begin() + chat.session.prompt, tokens.begin() + (int64_t)count);
    chat.turns.back().answer = decode(chat.session.tokenizer.get(), own);
    chat.borders.push_back({chat.text.size(), count});
}

// Answers the last turn. What it says of it: on the terminal a line, with --json all.
inline Report answer(Chat &chat, const UseLogits &dump) {
    Session &session = chat.session;
    Cache *cache = session.caches.empty() ? nullptr : &session.caches[0];
    std::vector<int> ids;
    const int gone = chat.dropped;
    Rendered asked = ask(chat, ids);
    const int held = cache ? cache->lengths[0] : 0, kept = cache ? keep_same(*cache, session.tokens, ids) : 0;
    session.tokens = ids, session.prompt = (int)ids.size();
    chat.text = asked.text, chat.borders.push_back({chat.text.size(), ids.size()});
    auto show = [&](const std::string &piece) {
        if (!chat.options.json) fwrite(piece.data(), 1, piece.size(), stdout), flush_output();
    };
    const Generation result = generate(session, chat.options, dump, show);
    if (result.text.empty() || result.text.back() != '\n') show("\n");
    take_answer(chat, session.tokens.size() - (result.stop == "end id"));
    const Turn &turn = chat.turns.back();
    const double first = result.prefill_seconds;
    Report report;
    report.add("turn", (int)chat.turns.size() + chat.dropped).show("kept", kept, "kept %d");
    report.show("read", result.prefilled, ", read %d").add("prompt_tokens", ids);
    report.add("tokens", std::vector<int>(session.tokens.begin() + session.prompt, session.tokens.end()));
    report.add("text", turn.answer).add("stop", result.stop);
    report.add("forgotten", held - kept, held > kept ? formatted(", forgot %d", held - kept) : "");
    const int dropped = chat.dropped - gone;
    report.add("dropped_turns", dropped, dropped ? ", dropped " + counted(dropped, "turn") : "");
    report.add("seconds_to_first_token", first, formatted(", first token after %.3g ms", first * 1e3));
    Report guesses = about_draft(session.drafter), about = about_cache(session.engine.model.config, cache);
    guesses.text.clear();
    if (session.drafter.most) report.add("draft", guesses);
    about.text = cache ? ", " + in_units(bytes_of(*cache).total()) : "";
    report.add("cache", about);
    if (result.stop != "end id") report.say(", stopped: " + result.stop);
    if (result.stop == "interrupted" && turn.answer.empty()) chat.turns.pop_back();  // nothing was said
    interrupts = 0;
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
        all += formatted("%-10s %s  %d positions from %d on, in %lld rows", name_of(store.layout), marks.c_str(),
                         length - first, first, (long long)rows);
        all += "\n";
    }
    return all;
}

// ---- What is typed -------------------------------------------------------------------------------------------------

// Lines from a pipe; on a terminal with editing and a history. Ctrl-C there gives up the line.
class Lines {
public:
    const bool on_terminal = isatty(0);
    Lines() {
        const char *set = setlocale(LC_CTYPE, "");
        if (!set || !strstr(set, "UTF-8")) setlocale(LC_CTYPE, "C.UTF-8");
        rl_outstream = stderr;
    }
    bool next(std::string &line) {
        line.clear();
        if (!on_terminal) {
            const bool there = (bool)std::getline(std::cin, line);
            return line.erase(line.find_last_not_of('\r') + 1), there;
        }
        std::unique_ptr<char, decltype(&free)> typed(readline("> "), free);
        if (!typed) return fputs("\n", stderr), interrupts.exchange(0) > 0;
        if (*(line = typed.get()).c_str()) add_history(typed.get());
        return true;
    }
};

// ---- llm chat ------------------------------------------------------------------------------------------------------

inline Chat open_chat(const Options &options) {
    const std::string directory = checkpoint_directory(options);
    const std::string builtin = options.has("-m") ? "" : "plain";  // was not tuned for chat
    ChatTemplate form = find_template(directory, options.chat_template.empty() ? builtin : options.chat_template);
    Chat chat{{open_engine(options, directory), open_tokenizer(options, directory)}, std::move(form), options};
    const std::time_t time = std::time(nullptr);
    chat.today = *std::localtime(&time);
    Session &session = chat.session;
    Config &config = session.engine.model.config;
    add_end(options, session.tokenizer.get(), config);
    const std::string after = end_of_answer(chat.form);  // what ends an answer ends it also where no config says so
    if (!after.empty()) {
        const int end = encode(session.tokenizer.get(), after, "the template", std::string(after.size(), 0).data())[0];
        if (is_plain(chat) || tokenizer_is_special(session.tokenizer.get(), end)) config.end_ids.push_back(end);
    }
    const bool endless = options.when_full == "ring";
    Options all = options;
    all.count = INT_MAX;
    if (!endless && !options.context) all.context = std::min(config.context, 8192);
    session.limit = limit_of(all, config, 0, endless);
    expect_positions_of(session.engine, session.limit);
    for (const CacheChoice &choice : options.caches())
        session.caches.push_back(open_cache(options, session.engine, choice, session.limit));
    if (!session.caches.empty()) session.drafter = open_drafter(options, session, session.caches[0], 1, session.limit);
    return chat;
}

// What a line that begins with / does; true: the last turn is to be answered.
inline bool obey(Chat &chat, const std::string &line) {
    const bool any = !chat.turns.empty();
    if (line == "/undo" && any)
        chat.turns.pop_back();
    else if (line == "/again" && any)
        return chat.turns.back().answer.clear(), chat.options.seed++, true;
    else if (line == "/undo" || line == "/again")
        note("there is no turn yet");
    else if (line == "/cache")
        fputs(chat.session.caches.empty() ? "no cache\n" : picture_of(chat.session.caches[0]).c_str(), stderr);
    else
        fputs(
            "/undo   takes the last turn back\n/again  answers it anew\n/cache  shows where its rows are\n"
            "/bye    ends the chat; Ctrl-C ends an answer\n",
            stderr);
    return false;
}

inline int run_chat(const Options &options) {
    Chat chat = open_chat(options);
    Lines lines;
    std::unique_ptr<RowFile> file;
    UseLogits dump;
    if (options.has("--dump-logits")) {
        file = std::make_unique<RowFile>(options.dump_logits, chat.session.engine.model.config.vocabulary);
        dump = [&](const std::vector<float> &rows) { file->add(rows); };
    }
    if (lines.on_terminal) note(formatted("template %s; /help says what else there is", chat.form.form->name));
    for (std::string line; lines.next(line) && line != "/bye";) {
        if (line.empty() || (line[0] == '/' && !obey(chat, line))) continue;
        if (line[0] != '/') chat.turns.push_back({line, ""});
        try {
            const Report report = answer(chat, dump);
            if (options.json)
                puts(report.json().c_str());
            else
                fputs((painted("2", report.text, 2) + "\n").c_str(), stderr);
            flush_output();
        } catch (const Error &error) {
            if (!lines.on_terminal) throw;
            chat.turns.pop_back();
            note(error.what());
        }
    }
    if (file) file->finish();
    return 0;
}
