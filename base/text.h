// Text to ids and back: tokenizer.c for C++, whose errors are exceptions and whose memory goes by itself.
#pragma once

#include "progress.h"
#include "tokenizer.h"

using TokenizerPointer = std::unique_ptr<Tokenizer, decltype(&tokenizer_free)>;

inline TokenizerPointer load_tokenizer(const std::string &directory) {
    char error[1000];
    std::string file = join_path(directory, "tokenizer.json"), config = join_path(directory, "tokenizer_config.json");
    Tokenizer *tokenizer = tokenizer_load(file.c_str(), config.c_str(), error, sizeof error);
    if (!tokenizer) fail("%s", error);
    remember_read(file), remember_read(config);
    return TokenizerPointer(tokenizer, tokenizer_free);
}

// A line on standard error. It may quote what is no UTF-8: such bytes are shown as \xNN.
inline std::string said(const std::string &line) {
    std::string result = "llm: ";
    for (size_t at = 0; at < line.size();) {
        const size_t valid = utf8_valid(line.data() + at, line.size() - at);
        result += line.substr(at, valid), at += valid;
        if (at < line.size()) result += formatted("\\x%02x", (unsigned char)line[at++]);
    }
    return result + "\n";
}
inline void note(const std::string &line) {
    held_notes ? (void)(*held_notes += said(line)) : (void)fputs(said(line).c_str(), stderr);
}

// `what` the text is called in the message.
inline void require_utf8(const std::string &what, const std::string &text) {
    const size_t valid = utf8_valid(text.data(), text.size());
    if (valid < text.size()) fail(("%s: " NOT_UTF8), what.c_str(), valid, (unsigned)(uint8_t)text[valid]);
}

// `typed`: of a conversation (base/tokenizer.h), whose template says itself what stands before it.
inline std::vector<int> encode(const Tokenizer *tokenizer, const std::string &text,
                               const std::string &what = "the prompt", const char *typed = nullptr) {
    char error[1000];
    int *ids = nullptr;
    int count = tokenizer_encode(tokenizer, text.data(), text.size(), typed, !typed, &ids, error, sizeof error);
    if (count < 0) fail("%s: %s", what.c_str(), error);
    std::vector<int> result(ids, ids + count);
    free(ids);
    return result;
}

// Tokens of one sequence as text that can be printed at once. Without a tokenizer: the ids.
struct TextStream {
    const Tokenizer *tokenizer;
    std::unique_ptr<TokenizerStream, decltype(&tokenizer_stream_free)> stream{nullptr, tokenizer_stream_free};
    explicit TextStream(const Tokenizer *source, bool skip_special = true) : tokenizer(source) {
        if (tokenizer) stream.reset(tokenizer_stream_begin(tokenizer, skip_special));
    }
    // Behind tokens whose text was said before.
    TextStream(const Tokenizer *source, const std::vector<int> &before) : TextStream(source) {
        for (int id : before) next(id);
    }
    std::string next(int id) {
        if (!tokenizer) return std::to_string(id) + " ";
        size_t length;
        const char *text = tokenizer_stream_next(stream.get(), id, &length);
        return given(text, length);
    }
    std::string flush() {
        if (!tokenizer) return "";
        size_t length;
        const char *text = tokenizer_stream_flush(stream.get(), &length);
        return given(text, length);
    }
    static std::string given(const char *text, size_t length) {
        if (!text) fail("tokenizer.json: its decoder makes the text too long, or there is too little memory");
        return std::string(text, length);
    }
};

// The text of a sequence as it comes, up to the first of `stops`. What may be the beginning of one is held back until it
// is known. A special token gives no text, but its spelling may be a stop. Where `thoughts` says how they begin and end,
// they are kept apart; one begins before any other text. A reader sees them with their marks, between `dim` and `bright`.
struct Writer {
    using Marks = std::pair<std::string, std::string>;
    const Tokenizer *tokenizer;
    TextStream stream;
    std::vector<std::string> stops;
    std::vector<Marks> thoughts = {};
    int thinks = -1;  // which of `thoughts` it is in
    std::string dim = "", bright = "";
    std::string text = "", thought = "", held = "";
    bool stopped = false;
    Writer(const Tokenizer *source, const std::vector<int> &before, const std::vector<std::string> &ends = {})
        : tokenizer(source), stream(source, before), stops(ends) {}

    // What may be shown after a token, and at the end.
    std::string next(int id) {
        held += stream.next(id);
        const char *spelled = tokenizer && tokenizer_is_special(tokenizer, id) ? tokenizer_token(tokenizer, id) : "";
        const std::vector<std::string> all = marks();
        if (std::find(all.begin(), all.end(), spelled) != all.end()) held += stream.flush() + spelled;
        return take(false);
    }
    std::string flush() {
        held += stream.flush();
        return take(true) + (thinks < 0 ? "" : bright);
    }

private:
    std::vector<std::string> marks() const {  // that are looked for: stops, then those of thoughts
        std::vector<std::string> all = stops;
        if (thinks >= 0) all.push_back(thoughts[(size_t)thinks].second);
        for (size_t i = 0; thinks < 0 && i < thoughts.size(); i++) all.push_back(thoughts[i].first);
        return all;
    }
    std::string take(bool end) {
        std::string shown;
        for (bool found = true; found && !stopped;) {
            const std::vector<std::string> all = marks();
            size_t which = all.size(), first = held.size(), after = SIZE_MAX, begun = 0;
            for (size_t i = 0; i < all.size(); i++) {
                const size_t place = held.find(all[i]), next = place + all[i].size();
                const bool late = i >= stops.size() && thinks < 0 &&
                                  (text + held.substr(0, place)).find_first_not_of(" \n") != std::string::npos;
                if (place != std::string::npos && !late && (next < after || (next == after && place < first)))
                    which = i, first = place, after = next;
                for (size_t size = std::min(all[i].size() - 1, held.size()); size > begun; size--)
                    if (held.compare(held.size() - size, size, all[i], 0, size) == 0) begun = size;
            }
            found = which < all.size();
            if (!found) after = first -= end ? 0 : begun;
            (thinks < 0 ? text : thought) += held.substr(0, first);
            shown += held.substr(0, first);
            held.erase(0, after);
            stopped = which < stops.size() && found;
            if (!found || stopped) continue;
            shown += thinks < 0 ? dim + all[which] : all[which] + bright;
            thinks = thinks < 0 ? (int)(which - stops.size()) : -1;
        }
        return shown;
    }
};

// The text of ids. Special tokens that are skipped give nothing.
inline std::string decode(const Tokenizer *tokenizer, const std::vector<int> &ids, bool skip_special = true) {
    TextStream stream(tokenizer, skip_special);
    std::string text;
    for (int id : ids) text += stream.next(id);
    return text + stream.flush();
}
