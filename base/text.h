// Text to ids and back: tokenizer.c for C++, whose errors are exceptions and whose memory goes by itself.
#pragma once

#include "json.h"
#include "tokenizer.h"

using TokenizerPointer = std::unique_ptr<Tokenizer, decltype(&tokenizer_free)>;

inline TokenizerPointer load_tokenizer(const std::string &directory) {
    char error[1000];
    std::string file = join_path(directory, "tokenizer.json"), config = join_path(directory, "tokenizer_config.json");
    Tokenizer *tokenizer = tokenizer_load(file.c_str(), config.c_str(), error, sizeof error);
    if (!tokenizer) fail("%s", error);
    return TokenizerPointer(tokenizer, tokenizer_free);
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

// The text of ids. Special tokens that are skipped give nothing.
inline std::string decode(const Tokenizer *tokenizer, const std::vector<int> &ids, bool skip_special = true) {
    TextStream stream(tokenizer, skip_special);
    std::string text;
    for (int id : ids) text += stream.next(id);
    return text + stream.flush();
}
