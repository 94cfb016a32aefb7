// libFuzzer target: the input is a tokenizer.json, a NUL, and a text for it.
//   make CUDA=0 build/fuzz_tokenizer
//   build/fuzz_tokenizer -max_len=20000 -timeout=10 CORPUS tests/fixtures/tokenizers
// What it checks: no crash, leak or undefined behaviour; errors are one line of UTF-8; ids lie in the vocabulary; a
// stream gives whole characters, and together what decoding at once gives.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "../base/tokenizer.h"

static void require(bool holds) {
    if (!holds) abort();
}

static bool is_utf8(const std::string &text) {
    const unsigned char *s = (const unsigned char *)text.data(), *end = s + text.size();
    while (s < end) {
        int length = *s < 0x80 ? 1 : *s >= 0xF0 ? 4 : *s >= 0xE0 ? 3 : *s >= 0xC2 ? 2 : 0;
        if (!length || end - s < length) return false;
        for (int k = 1; k < length; k++)
            if ((s[k] & 0xC0) != 0x80) return false;
        s += length;
    }
    return true;
}

static void require_one_line(const char *error) { require(error[0] && !strchr(error, '\n') && is_utf8(error)); }

static void check_decoding(const Tokenizer *t, const int *ids, int count, bool skip) {
    TokenizerStream *stream = tokenizer_stream_begin(t, skip);
    require(stream);
    bool failed = false;
    for (int i = 0; i <= count && !failed; i++) {
        size_t length;
        const char *part =
            i < count ? tokenizer_stream_next(stream, ids[i], &length) : tokenizer_stream_flush(stream, &length);
        failed = !part;  // a Replace that makes the text too long
        if (part) require(is_utf8(std::string(part, length)));
    }
    tokenizer_stream_free(stream);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *end = size ? (const uint8_t *)memchr(data, 0, size) : nullptr;
    size_t json = end ? (size_t)(end - data) : size;
    char error[200] = "";
    Tokenizer *t = tokenizer_parse((const char *)data, json, "fuzz.json", error, sizeof error);
    if (!t) return require_one_line(error), 0;

    std::string text = "the old mill <s> 42\n \xE6\xB0\xB4\xF0\x9F\x98\x80";
    if (end) text.append((const char *)end + 1, std::min(size - json - 1, (size_t)200));  // bounds the time
    for (int special = 0; special < 2; special++) {
        int *ids = nullptr;
        int count = tokenizer_encode(t, text.data(), text.size(), nullptr, special, &ids, error, sizeof error);
        if (count < 0) require_one_line(error);
        for (int i = 0; i < count; i++) require(tokenizer_token(t, ids[i]) != nullptr);
        if (count >= 0) check_decoding(t, ids, count, special);
        free(ids);
    }
    int some[64];  // and tokens in an order no text gives
    for (int i = 0; i < 64; i++) some[i] = (int)(size ? data[(size_t)i * 37 % size] : 0) * (i % 5) - 1;
    check_decoding(t, some, 64, false);
    for (int id = 0; id < 64; id++) {
        const char *token = tokenizer_token(t, id);
        if (token) require(tokenizer_find(t, token) == id);
    }
    tokenizer_free(t);
    return 0;
}
