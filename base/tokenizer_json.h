// What a tokenizer.json comes to: a vocabulary, merges, and the steps a text goes through on its way to the merging and
// back. base/tokenizer_json.cpp reads it, tokenizer.c walks it.
#ifndef TOKENIZER_JSON_H
#define TOKENIZER_JSON_H

#include <oniguruma.h>
#include <stdint.h>

#include "tokenizer.h"

enum { MAX_STEPS = 32, MAX_AROUND = 16, MAX_TEXT = 1 << 28 };  // MAX_TEXT: bytes of a text or a file

typedef enum { ADDED, PREPEND, REPLACE, NORMALIZE, STRIP, SPLIT, BYTES, BYTE_FALLBACK, FUSE, JOIN } Kind;
typedef enum { ISOLATED, REMOVED, CONTIGUOUS, MERGED_WITH_PREVIOUS, MERGED_WITH_NEXT } Behavior;
typedef enum { UNLESS_THERE, AT_TEXT_START, NEVER, ALWAYS } When;

// One step a text goes through. Encoding and decoding are lists of them.
typedef struct {
    Kind kind;
    int mode;          // ADDED: 0 raw, 1 normalized · PREPEND: When · NORMALIZE: utf8proc's options
                       // SPLIT: Behavior · STRIP: 1 left, 2 right; in decoding how many
                       // REPLACE: in decoding 1 if nothing comes in its place in the first token
    bool invert;       // SPLIT: what does not match is the match
    bool fused;        // in decoding: the text comes in parts, no longer token by token
    regex_t *regex;    // SPLIT, REPLACE
    const char *text;  // PREPEND, REPLACE: what to put there · in decoding STRIP: what goes
    size_t length;     // its bytes
} Step;

typedef struct {
    Step steps[MAX_STEPS];
    int count;
} Chain;

enum { IN_MODEL = 1, SPECIAL = 2, LEFT_STRIP = 4, RIGHT_STRIP = 8, SINGLE_WORD = 16, NORMALIZED = 32, LOOKED_FOR = 64 };
typedef struct {
    const char *content;            // as the file spells it; NULL for an id that is not used
    const char *shown;              // what is looked for and decoded: content, or its normalized form if NORMALIZED
    uint32_t length, shown_length;  // bytes
    uint8_t flags;
} Token;

typedef struct {
    uint64_t pair;  // left id << 32 | right id; UINT64_MAX: free
    int rank, id;   // the lower rank is merged first, into this id
} Merge;

typedef struct {           // added tokens that are looked for together
    const Token **tokens;  // (count): by the text that is looked for
    size_t count;
    bool starts[256];  // does one start with this byte?
} AddedSet;

struct Tokenizer {
    Chain encode, decode;
    Token *tokens;  // (size): by id
    int size;
    int *slots;  // (slot_mask + 1): open-addressed hash, content -> id; -1: free
    size_t slot_mask;
    Merge *merges;  // (merge_mask + 1): open-addressed hash, pair -> rank and id
    size_t merge_mask;
    int character_ids[512];  // id of the character with this code point, -1 if it has none
    int byte_ids[256];       // id of "<0x00>" to "<0xFF>" with byte_fallback, else -1
    int unknown;             // id, or -1
    bool fuse_unknown, ignore_merges;
    AddedSet added[2];                          // looked for before and after normalizing
    int before[MAX_AROUND], after[MAX_AROUND];  // the post-processor's ids around a text
    int before_count, after_count;
    int end;  // id of tokenizer_config.json's eos_token, or -1
};

#ifdef __cplusplus
extern "C" {
#endif

int *token_slot(const Tokenizer *tokenizer, const char *s, size_t n);  // slot of this content, or the free one for it
int model_token(const Tokenizer *tokenizer, const char *s, size_t n);  // id of a token that merges may make, or -1
Merge *merge_slot(const Tokenizer *tokenizer, int left, int right);    // the merge of this pair, or the free place

// What the normalizer makes of a text: an array to free(), *n is its length. NULL and an error on failure.
char *normalized_text(const Tokenizer *tokenizer, const char *s, size_t *n, char *error, size_t error_size);

#ifdef __cplusplus
}
#endif
#endif
