// Text <-> token ids, from the tokenizer.json of a checkpoint.
//
//   text --added tokens--> pieces --normalizer--> --pre-tokenizer--> words --merges--> ids
//   ids --vocabulary--> tokens --decoder--> text, streamed in whole UTF-8 characters
//
// Ids and text are those of the `tokenizers` library: BPE, byte-level (GPT-2, Llama 3, Qwen, SmolLM, DeepSeek, Granite,
// OLMo 2, Phi-4, LFM2, Ministral) or SentencePiece-style (Llama 2, Mistral 7B, Phi-3, Gemma). Anything else in the file
// is refused by name.
//
// Patterns are matched by Oniguruma, as in the library, and characters normalized by utf8proc. If their Unicode is not
// the library's, characters that only one of the two has may get other ids. On Debian 12 these are letters and symbols
// newer than Unicode 14 (2021) next to others, and, if the tokenizer normalizes, combining marks and compatibility
// characters newer than Unicode 9 (2016).
//
// A Tokenizer never changes once loaded: any number of threads may encode and decode with it.
// Errors are one line without a line break: "FILE: what was found, what was expected".
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Tokenizer Tokenizer;
typedef struct TokenizerStream TokenizerStream;

// Loads a tokenizer from a file, or from its text (`length` bytes; the error begins with `name`). Returns NULL and an
// error if it cannot be used. Ids must be below 2^24. `config`: NULL, or the path of its tokenizer_config.json, which
// need not exist; this file and added_tokens.json in the same directory may name more tokens.
Tokenizer *tokenizer_load(const char *path, const char *config, char *error, size_t error_size);
Tokenizer *tokenizer_parse(const char *json, size_t length, const char *name, char *error, size_t error_size);
void tokenizer_free(Tokenizer *tokenizer);

size_t utf8_valid(const char *s, size_t n);  // offset of the first byte that is not UTF-8, n if all of it is
#define NOT_UTF8 "byte %zu, 0x%02X, is not UTF-8"  // in every message about such a text: offset, value

int tokenizer_size(const Tokenizer *tokenizer);                     // highest id + 1; ids in between may be unused
int tokenizer_find(const Tokenizer *tokenizer, const char *token);  // id of a token as the file spells it, or -1
const char *tokenizer_token(const Tokenizer *tokenizer, int id);    // its spelling ("Ġthe", "<s>"), NULL if unused
int tokenizer_before(const Tokenizer *tokenizer);                   // how many ids encoding puts before a text (BOS)
int tokenizer_end(const Tokenizer *tokenizer);                      // id of tokenizer_config.json's eos_token, or -1
bool tokenizer_is_special(const Tokenizer *tokenizer, int id);      // <s>, </s>, <|im_start|>, ...

// Encodes `length` bytes of UTF-8 (NUL is a character like any other) in O(length log length). With add_special it
// adds what the post-processor puts around a text (BOS, EOS). Returns the number of ids and in *ids an array to free();
// or -1 and an error: text that is not UTF-8 (the byte is named), longer than 2^28 bytes, or out of memory.
// A character that has no token gives no id if there is no unknown token either, as in the library.
// `typed`, (length) or NULL, is for conversations: 1 where a special token's spelling begins that a user typed or a
// model wrote. It is then encoded as text, as if there were no such token.
int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, const char *typed, bool add_special,
                     int **ids, char *error, size_t error_size);

// Decodes id by id. The texts from all `next` and then `flush`, joined, are the text of all ids. Each has only whole
// UTF-8 characters; bytes that never become one are given as U+FFFD. A text is NUL-terminated, *length (may be NULL) is
// its length in bytes, often 0, and it lives until the next call on the stream. Unused ids give nothing, nor do special
// tokens with skip_special. After flush the stream starts again. NULL: out of memory, or a decoder's own pattern that
// does not end. If bytes have tokens of their own ("<0xE4>"), a run of them is held until it ends: one bad byte in it
// turns the whole run into U+FFFD.
TokenizerStream *tokenizer_stream_begin(const Tokenizer *tokenizer, bool skip_special);
const char *tokenizer_stream_next(TokenizerStream *stream, int id, size_t *length);
const char *tokenizer_stream_flush(TokenizerStream *stream, size_t *length);
void tokenizer_stream_free(TokenizerStream *stream);

#ifdef __cplusplus
}
#endif
#endif
