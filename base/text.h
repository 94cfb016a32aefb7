// Text to ids and back: tokenizer.c for C++, with exceptions and memory that is freed by itself.
#pragma once

#include <map>

#include "progress.h"
#include "tokenizer.h"

using TokenizerPointer = std::unique_ptr<Tokenizer, decltype(&tokenizer_free)>;

inline TokenizerPointer load_tokenizer(const std::string &directory) {
    char error[1000];
    std::string file = join_path(directory, "tokenizer.json"), config = join_path(directory, "tokenizer_config.json");
    Tokenizer *tokenizer = tokenizer_load(file.c_str(), config.c_str(), error, sizeof error);
    if (!tokenizer) fail("%s", error);
    return TokenizerPointer(tokenizer, tokenizer_free);
}

// Returns a line for standard error. Bytes in it that are not UTF-8 become \xNN.
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

// Throws unless the text is UTF-8. `what` is its name in the message.
inline void require_utf8(const std::string &what, const std::string &text) {
    const size_t valid = utf8_valid(text.data(), text.size());
    if (valid < text.size()) fail(("%s: " NOT_UTF8), what.c_str(), valid, (unsigned)(uint8_t)text[valid]);
}

// Returns a text's ids. With `typed` (base/tokenizer.h) it is a conversation, whose template has BOS itself.
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

// Turns tokens of one sequence into text that can be printed at once; without a tokenizer, into the ids.
struct TextStream {
    const Tokenizer *tokenizer;
    std::unique_ptr<TokenizerStream, decltype(&tokenizer_stream_free)> stream{nullptr, tokenizer_stream_free};
    explicit TextStream(const Tokenizer *source, bool skip_special = true) : tokenizer(source) {
        if (tokenizer) stream.reset(tokenizer_stream_begin(tokenizer, skip_special));
    }
    // Continues after tokens whose text was shown before.
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

// The text of a sequence as it comes, up to the first of `stops`. What may be the start of one is held back until it is
// certain. A special token gives no text, but its spelling may be a stop. `thoughts` maps the mark that begins a
// thought to the one that ends it. A thought begins before any other text and goes to `thought`, not to `text`. It is
// shown with its marks, between `dim` and `bright`.
struct Writer {
    const Tokenizer *tokenizer;
    TextStream stream;
    std::vector<std::string> stops;
    std::map<std::string, std::string> thoughts = {};
    std::string end_of_thought = "", dim = "", bright = "";  // "": not in a thought
    std::string text = "", thought = "", held = "";
    bool stopped = false;
    Writer(const Tokenizer *source, const std::vector<int> &before, const std::vector<std::string> &ends = {})
        : tokenizer(source), stream(source, before), stops(ends) {}

    // Return what can be shown after a token, and at the end.
    std::string next(int id) {
        held += stream.next(id);
        const char *spelled = tokenizer && tokenizer_is_special(tokenizer, id) ? tokenizer_token(tokenizer, id) : "";
        const std::vector<std::string> all = marks();
        if (std::find(all.begin(), all.end(), spelled) != all.end()) held += stream.flush() + spelled;
        return take(false);
    }
    std::string flush() {
        held += stream.flush();
        return take(true) + (end_of_thought.empty() ? "" : bright);
    }

    // Finds which of `texts` ends first in `in`, the longest of several, at [first, after). which = texts.size(): none.
    struct Found {
        size_t which, first, after;
    };
    static Found find_first(const std::vector<std::string> &texts, const std::string &in) {
        Found found{texts.size(), in.size(), SIZE_MAX};
        for (size_t i = 0; i < texts.size(); i++) {
            const size_t place = in.find(texts[i]), after = place + texts[i].size();
            if (place != std::string::npos && std::make_pair(after, place) < std::make_pair(found.after, found.first))
                found = {i, place, after};
        }
        return found;
    }

private:
    // What to look for: stops, then the end of this thought, or the start of one if there is no other text yet.
    std::vector<std::string> marks() const {
        std::vector<std::string> all = stops;
        if (!end_of_thought.empty()) return all.push_back(end_of_thought), all;
        const std::string rest = held.substr(std::min(held.size(), held.find_first_not_of(" \n")));
        for (const auto &[begin, end] : thoughts)
            if (const size_t size = std::min(rest.size(), begin.size());
                text.find_first_not_of(" \n") == std::string::npos && rest.compare(0, size, begin, 0, size) == 0)
                all.push_back(begin);
        return all;
    }
    std::string take(bool end) {
        std::string shown;
        while (!stopped) {
            const std::vector<std::string> all = marks();
            auto [which, first, after] = find_first(all, held);
            const bool found = which < all.size();
            size_t begun = 0;  // bytes at the end that may be the start of a mark
            for (const std::string &each : all)
                for (size_t size = std::min(each.size() - 1, held.size()); size > begun && !found && !end; size--)
                    if (held.compare(held.size() - size, size, each, 0, size) == 0) begun = size;
            const std::string sure = held.substr(0, first - begun);
            (end_of_thought.empty() ? text : thought) += sure, shown += sure;
            held.erase(0, found ? after : sure.size());
            stopped = found && which < stops.size();
            if (!found || stopped) break;
            const bool begins = end_of_thought.empty();
            shown += begins ? dim + all[which] : all[which] + bright;
            end_of_thought = begins ? thoughts.at(all[which]) : "";
        }
        return shown;
    }
};

// Returns the text of ids. Special tokens that are skipped give nothing.
inline std::string decode(const Tokenizer *tokenizer, const std::vector<int> &ids, bool skip_special = true) {
    TextStream stream(tokenizer, skip_special);
    std::string text;
    for (int id : ids) text += stream.next(id);
    return text + stream.flush();
}
