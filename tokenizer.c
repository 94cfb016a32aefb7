// Text <-> token ids. In the order a text travels: its characters, patterns over them, the merging, the steps before
// the merging; then back from ids to text; then JSON; then loading, which builds the lists of steps that the others
// walk.
//
// An Error is sticky: the first failure is kept, and everything called after it does nothing.
#include "tokenizer.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

enum { MAX_STEPS = 32, MAX_ID = (1 << 24) - 1, MAX_AROUND = 16, MAX_DEPTH = 100 };
static const size_t MAX_TEXT = (size_t)1 << 28;   // bytes of a text or a file
static const size_t MAX_GROWN = (size_t)1 << 30;  // bytes a text may become on its way

typedef enum { ADDED, PREPEND, REPLACE, NORMALIZE, STRIP, SPLIT, BYTES, METASPACE, BYTE_FALLBACK, FUSE, JOIN } Kind;
typedef enum { ISOLATED, REMOVED, CONTIGUOUS, MERGED_WITH_PREVIOUS, MERGED_WITH_NEXT } Behavior;
typedef enum { UNLESS_THERE, AT_TEXT_START, NEVER, ALWAYS } When;

// One step a text goes through. Encoding and decoding are lists of them.
typedef struct {
    Kind kind;
    int mode;           // ADDED: 0 raw, 1 normalized · PREPEND: When · NORMALIZE: utf8proc's options
                        // SPLIT: Behavior · STRIP: 1 left, 2 right; in decoding how many
                        // METASPACE: 1 if the sign was put before the text
    bool invert;        // SPLIT: what does not match is the match
    bool fused;         // in decoding: the text comes in parts, no longer token by token
    pcre2_code *regex;  // SPLIT, REPLACE
    const char *text;   // PREPEND, REPLACE: what to put there · in decoding STRIP, METASPACE: what goes
    size_t length;      // its bytes
} Step;

typedef struct {
    Step steps[MAX_STEPS];
    int count;
} Chain;

enum { IN_MODEL = 1, SPECIAL = 2, LEFT_STRIP = 4, RIGHT_STRIP = 8, SINGLE_WORD = 16, NORMALIZED = 32 };
typedef struct {
    const char *content;  // as the file spells it; NULL for an id that is not used
    const char *shown;    // what is looked for and decoded: content, or its normalized form if NORMALIZED
    uint32_t length;      // of content
    uint8_t flags;
} Token;

typedef struct {
    uint32_t hash;
    int id;  // -1: free
} Slot;

typedef struct {
    uint64_t pair;  // left id << 32 | right id; UINT64_MAX: free
    int rank, id;   // the lower rank is merged first, into this id
} Merge;

typedef struct {
    const char *text;
    size_t length;
    int id;
} Wanted;

typedef struct {     // added tokens that are looked for together
    Wanted *wanted;  // (count): the longest first
    size_t count;
    bool starts[256];  // does one start with this byte?
} AddedSet;

struct Tokenizer {
    Chain encode, decode;
    Token *tokens;  // (size): by id
    int size;
    Slot *slots;  // (slot_mask + 1): open-addressed hash, content -> id
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
    char *texts;  // the strings of the file, to which tokens and steps point
};

typedef struct {
    const char *name;  // of the file, NULL for none
    char *text;        // (size): one line
    size_t size;
    bool failed;
} Error;

static size_t utf8_valid(const char *s, size_t n);

static void fail(Error *error, const char *format, ...) {
    if (error->failed) return;
    error->failed = true;
    if (!error->size) return;
    int used = error->name ? snprintf(error->text, error->size, "%s: ", error->name) : 0;
    va_list arguments;
    va_start(arguments, format);
    if (used >= 0 && (size_t)used < error->size)
        vsnprintf(error->text + used, error->size - (size_t)used, format, arguments);
    va_end(arguments);
    for (char *c = error->text; *c; c++)
        if ((unsigned char)*c < 32 || *c == 127) *c = '?';
    for (size_t n = strlen(error->text), at; (at = utf8_valid(error->text, n)) < n;) error->text[at] = '?';  // cut ones
}

// Makes room for `need` items of `item` bytes; on failure `data` stays as it is.
static void *reserve(Error *error, void *data, size_t *capacity, size_t need, size_t item) {
    if (need <= *capacity || error->failed) return data;
    size_t grown = need + need / 2 + 16;
    void *moved = realloc(data, grown * item);
    if (!moved) return fail(error, "out of memory"), data;
    *capacity = grown;
    return moved;
}

typedef struct {
    char *data;
    size_t length, capacity;
} Bytes;

// The bytes end in a NUL that is not counted.
static void append(Error *error, Bytes *bytes, const char *s, size_t n) {
    bytes->data = reserve(error, bytes->data, &bytes->capacity, bytes->length + n + 1, 1);
    if (error->failed) return;
    if (n) memcpy(bytes->data + bytes->length, s, n);
    bytes->length += n;
    bytes->data[bytes->length] = 0;
}

// ---- Characters --------------------------------------------------------------------------------------------

// Length of the UTF-8 character at s (1 to 4); 0 if the text ends within it; -k if the first k bytes are none and
// stand for one U+FFFD (the longest start of a character, Unicode 15.0, §3.9, "maximal subpart").
static int utf8_length(const char *s, size_t n) {
    const uint8_t *b = (const uint8_t *)s;
    int length = b[0] < 0x80 ? 1 : b[0] < 0xC2 ? -1 : b[0] < 0xE0 ? 2 : b[0] < 0xF0 ? 3 : b[0] < 0xF5 ? 4 : -1;
    for (int k = 1; k < length; k++) {
        if ((size_t)k == n) return 0;
        uint8_t low = 0x80, high = 0xBF;
        if (k == 1 && b[0] == 0xE0) low = 0xA0;   // shorter forms exist
        if (k == 1 && b[0] == 0xED) high = 0x9F;  // surrogates
        if (k == 1 && b[0] == 0xF0) low = 0x90;   // shorter forms exist
        if (k == 1 && b[0] == 0xF4) high = 0x8F;  // beyond U+10FFFF
        if (b[k] < low || b[k] > high) return -k;
    }
    return length;
}

// Offset of the first byte that is not UTF-8, n if all of it is.
static size_t utf8_valid(const char *s, size_t n) {
    for (size_t at = 0; at < n;) {
        int length = (uint8_t)s[at] < 0x80 ? 1 : utf8_length(s + at, n - at);
        if (length <= 0) return at;
        at += (size_t)length;
    }
    return n;
}

// Code point of the character at s, which is valid, and its length.
static int code_point(const char *s, size_t *length) {
    const uint8_t *b = (const uint8_t *)s;
    *length = b[0] < 0x80 ? 1 : b[0] < 0xE0 ? 2 : b[0] < 0xF0 ? 3 : 4;
    int code = *length == 1 ? b[0] : b[0] & (0x7F >> *length);
    for (size_t k = 1; k < *length; k++) code = code << 6 | (b[k] & 0x3F);
    return code;
}

// Offset of the character that ends at `end` > 0.
static size_t previous(const char *s, size_t end) {
    do end--;
    while (((uint8_t)s[end] & 0xC0) == 0x80);
    return end;
}

// Length of the character at s if it is Unicode's White_Space, else 0.
static size_t space_length(const char *s) {
    size_t length;
    int c = code_point(s, &length);
    bool space = (c >= 9 && c <= 13) || c == 32 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
                 (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
                 c == 0x3000;
    return space ? length : 0;
}

// Is the character at s one of a word? (UTS 18, annex C: Alphabetic, marks, digits, connectors, joiners.)
static bool is_word(const char *s) {
    size_t length;
    int c = code_point(s, &length);
    utf8proc_category_t category = utf8proc_category(c);
    return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_NL) || category == UTF8PROC_CATEGORY_PC ||
           c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
           (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
}

// Byte-level BPE writes each byte as a printable character (Radford et al. 2019, GPT-2): the printable ones of
// Latin-1 as themselves, the other 68 as U+0100 onwards. Space becomes "Ġ".
static int byte_character(int byte) {
    if ((byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE) return byte;
    return 256 + (byte <= 32 ? byte : byte <= 0xA0 ? byte - 127 + 33 : 67);
}

static int character_byte(int code) {  // -1: stands for no byte
    if (code == 256 + 67) return 0xAD;
    if (code >= 256 && code < 256 + 67) return code <= 256 + 32 ? code - 256 : code - 256 - 33 + 127;
    return code < 256 && byte_character(code) == code ? code : -1;
}

// ---- Patterns ----------------------------------------------------------------------------------------------

// The library's patterns are written for Oniguruma (Ruby's dialect, Unicode). Where PCRE2 reads the same sign in
// another way it is spelled out; where it cannot be, the pattern is refused, not read differently.
#define SPACES "\\t-\\r\\x20\\x85\\xA0\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"

// One escape at p, behind its backslash. Returns how many bytes of p it took, 0 if it is refused.
static size_t translate_escape(const char *p, bool in_class, Bytes *out, Error *error) {
    bool letter = (*p >= 'a' && *p <= 'z') || (*p >= 'A' && *p <= 'Z'), digit = *p >= '0' && *p <= '9';
    if (*p == 's' || (*p == 'S' && !in_class)) {  // PCRE2's has U+180E as well
        const char *set = in_class ? SPACES : *p == 's' ? "[" SPACES "]" : "[^" SPACES "]";
        append(error, out, set, strlen(set));
        return 1;
    }
    if (*p == 'p' || *p == 'P') {  // \p{Han}: PCRE2's has those that many scripts share as well
        size_t name = 2 + (p[1] && p[2] == '^'), end = strcspn(p, "}");
        if (p[1] != '{' || !p[end]) return 0;
        append(error, out, "\\", 1);
        append(error, out, p, name);
        append(error, out, "sc:", end - name > 2 ? 3 : 0);
        append(error, out, p + name, end + 1 - name);
        return end + 1;
    }
    if (*p == 'u' && strspn(p + 1, "0123456789abcdefABCDEF") >= 4) {
        append(error, out, "\\x{", 3);
        append(error, out, p + 1, 4);
        append(error, out, "}", 1);
        return 5;
    }
    if (!*p || digit || (letter && !strchr("dDrntf", *p) && !(p[0] == 'x' && p[1] == '{'))) return 0;
    append(error, out, "\\", 1);
    append(error, out, p, 1);
    return 1;
}

// Refuses a group, an interval or a set that would be read differently; p is at its first sign.
static void check_construct(const char *pattern, const char *p, bool in_class, Error *error) {
    static const char *const groups[] = {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!", "(?i:"};
    if (in_class) {
        if (*p == '[' || (p[0] == '&' && p[1] == '&')) fail(error, "pattern %.60s: a set within a set", pattern);
    } else if (*p == '(' && (p[1] == '?' || p[1] == '*')) {
        bool known = p == pattern && !strncmp(p, "(?i)", 4);
        for (size_t k = 0; k < sizeof groups / sizeof *groups; k++) known |= !strncmp(p, groups[k], strlen(groups[k]));
        if (!known) fail(error, "pattern %.60s: the group %.3s is not supported", pattern, p);
    } else if (*p == '{') {
        size_t end = strspn(p + 1, "0123456789,") + 1;
        bool odd = p[end] == '}' && (p[end + 1] == '+' || (p[end + 1] == '?' && !memchr(p, ',', end)) || p[1] == ',');
        if (odd) fail(error, "pattern %.60s: %.*s is not supported", pattern, (int)end + 2, p);
    }
}

static void translate(const char *pattern, Bytes *out, Error *error) {
    bool in_class = false;
    for (const char *p = pattern; *p && !error->failed;) {
        size_t took = 1;
        if (*p == '\\') {
            took = translate_escape(p + 1, in_class, out, error);
            if (!took) fail(error, "pattern %.60s: \\%.1s is not supported here", pattern, p + 1);
            p += took + 1;
            continue;
        }
        check_construct(pattern, p, in_class, error);
        if (*p == '[') took += p[1] == '^';
        if (*p == '[') took += p[took] == ']';  // there it stands for itself
        in_class = *p == '[' || (in_class && *p != ']');
        append(error, out, p, took);
        p += took;
    }
}

// A pattern ready to match; NULL on failure.
static pcre2_code *compile(const char *pattern, bool literal, Error *error) {
    Bytes text = {0};
    pcre2_code *regex = NULL;
    append(error, &text, pattern, literal ? strlen(pattern) : 0);
    if (!literal) translate(pattern, &text, error);
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context) fail(error, "out of memory");
    if (!error->failed) {
        int code;
        PCRE2_SIZE offset;
        uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE);
        char why[120] = "";
        pcre2_set_newline(context, PCRE2_NEWLINE_LF);
        regex = pcre2_compile((PCRE2_SPTR)text.data, text.length, options, &code, &offset, context);
        if (regex)
            pcre2_jit_compile(regex, PCRE2_JIT_COMPLETE);  // where there is no JIT it is interpreted
        else
            pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        if (!regex) fail(error, "pattern %.60s: %s", pattern, why);
    }
    pcre2_compile_context_free(context);
    free(text.data);
    return regex;
}

// What matching needs beside a pattern; one for each text or stream.
typedef struct {
    Error *error;
    size_t limit;  // bytes that a text may grow to
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
} Matcher;

// For texts of n bytes: they may grow 64-fold, and a pattern that goes back over the text again and again is stopped.
static void matcher_open(Matcher *matcher, size_t n, Error *error) {
    matcher->error = error;
    matcher->limit = 64 * n + (1 << 20) < MAX_GROWN ? 64 * n + (1 << 20) : MAX_GROWN;
    matcher->data = pcre2_match_data_create(1, NULL);
    matcher->context = pcre2_match_context_create(NULL);
    matcher->stack = pcre2_jit_stack_create(32 << 10, 32 << 20, NULL);  // NULL where there is no JIT
    if (!matcher->data || !matcher->context) fail(error, "out of memory");
    if (!matcher->context) return;
    if (matcher->stack) pcre2_jit_stack_assign(matcher->context, NULL, matcher->stack);
    pcre2_set_match_limit(matcher->context, (uint32_t)(10000 + 2 * n));
}

static void matcher_close(Matcher *matcher) {
    pcre2_match_data_free(matcher->data);
    pcre2_match_context_free(matcher->context);
    pcre2_jit_stack_free(matcher->stack);
}

// A match, and where the search for the next one goes on. An empty match right behind the last match is none.
typedef struct {
    size_t start, end, from, last_end;
} Match;
static const Match FIRST_MATCH = {0, 0, 0, SIZE_MAX};

static bool next_match(const Matcher *matcher, const pcre2_code *regex, const char *s, size_t n, Match *match) {
    while (match->from <= n && !matcher->error->failed) {
        int found =
            pcre2_match(regex, (PCRE2_SPTR)s, n, match->from, PCRE2_NO_UTF_CHECK, matcher->data, matcher->context);
        if (found == PCRE2_ERROR_NOMATCH) return false;
        if (found < 0) {
            char why[120] = "";
            pcre2_get_error_message(found, (PCRE2_UCHAR *)why, sizeof why);
            fail(matcher->error, "a pattern of the tokenizer on this text: %s", why);
            return false;
        }
        const PCRE2_SIZE *range = pcre2_get_ovector_pointer(matcher->data);
        match->from = range[1];
        if (range[0] != range[1] || range[1] != match->last_end) {
            match->start = range[0];
            match->end = match->last_end = range[1];
            return true;
        }
        size_t length = 1;
        if (range[1] < n) code_point(s + range[1], &length);
        match->from += length;
    }
    return false;
}

// Replaces every match of the step's pattern in s by its text.
static void replace(const Matcher *matcher, const Step *step, const char *s, size_t n, Bytes *out) {
    size_t done = 0;
    for (Match match = FIRST_MATCH; next_match(matcher, step->regex, s, n, &match); done = match.end) {
        append(matcher->error, out, s + done, match.start - done);
        append(matcher->error, out, step->text, step->length);
        if (out->length > matcher->limit) fail(matcher->error, "this text grows beyond %zu bytes", matcher->limit);
    }
    append(matcher->error, out, s + done, n - done);
}

// ---- Encoding: merging -------------------------------------------------------------------------------------

typedef struct {
    int id, before, next;  // neighbours' indices, -1 at the ends; id -1 once merged into the left neighbour
} Symbol;

typedef struct {
    const Tokenizer *tokenizer;
    Error *error;
    Matcher matcher;
    Bytes scratch[MAX_STEPS];  // a step's output, while the steps behind it work on it
    Symbol *symbols;
    uint64_t *heap;  // rank << 32 | index of the left symbol: what may be merged; lowest rank, then leftmost, on top
    size_t symbol_capacity, heap_capacity, heap_count;
    int *ids;  // (count): the result
    size_t count, capacity;
} Encoder;

static void push_id(Encoder *e, int id) {
    e->ids = reserve(e->error, e->ids, &e->capacity, e->count + 1, sizeof *e->ids);
    if (!e->error->failed) e->ids[e->count++] = id;
}

static uint64_t hash_text(const char *s, size_t n) {  // FNV-1a, its bits mixed once more
    uint64_t hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < n; i++) hash = (hash ^ (uint8_t)s[i]) * 0x100000001B3u;
    return hash * 0x9E3779B97F4A7C15u;
}

// Slot of this content, or the free one where it belongs.
static Slot *token_slot(const Tokenizer *t, const char *s, size_t n) {
    uint64_t hash = hash_text(s, n);
    for (size_t at = hash >> 32;; at++) {
        Slot *slot = &t->slots[at & t->slot_mask];
        if (slot->id < 0) return slot;
        const Token *token = &t->tokens[slot->id];
        if (slot->hash == (uint32_t)hash && token->length == n && !memcmp(token->content, s, n)) return slot;
    }
}

static int model_token(const Tokenizer *t, const char *s, size_t n) {
    int id = token_slot(t, s, n)->id;
    return id >= 0 && t->tokens[id].flags & IN_MODEL ? id : -1;
}

// Where the merge of this pair stands, or the free place for it.
static Merge *merge_slot(const Tokenizer *t, int left, int right) {
    uint64_t pair = (uint64_t)left << 32 | (uint32_t)right;
    for (size_t at = (size_t)((pair * 0x9E3779B97F4A7C15u) >> 20);; at++) {
        Merge *merge = &t->merges[at & t->merge_mask];
        if (merge->pair == pair || merge->pair == UINT64_MAX) return merge;
    }
}

static void heap_push(Encoder *e, uint64_t key) {
    size_t at = e->heap_count++;
    for (; at && e->heap[(at - 1) / 2] > key; at = (at - 1) / 2) e->heap[at] = e->heap[(at - 1) / 2];
    e->heap[at] = key;
}

static uint64_t heap_pop(Encoder *e) {
    uint64_t top = e->heap[0], last = e->heap[--e->heap_count];
    size_t at = 0, child;
    while ((child = 2 * at + 1) < e->heap_count) {
        if (child + 1 < e->heap_count && e->heap[child + 1] < e->heap[child]) child++;
        if (e->heap[child] >= last) break;
        e->heap[at] = e->heap[child];
        at = child;
    }
    e->heap[at] = last;
    return top;
}

// If there is a merge for symbol `left` and its right neighbour, it becomes a candidate.
static void offer(Encoder *e, int left) {
    if (left < 0 || e->symbols[left].next < 0) return;
    const Merge *merge = merge_slot(e->tokenizer, e->symbols[left].id, e->symbols[e->symbols[left].next].id);
    if (merge->pair != UINT64_MAX) heap_push(e, (uint64_t)merge->rank << 32 | (uint32_t)left);
}

static void push_symbol(Encoder *e, int *count, int id) {
    e->symbols[*count] = (Symbol){id, *count - 1, *count + 1};
    ++*count;
}

// The symbols a word starts from, linked from left to right: one a character; one a byte where the character has no
// token but all of its bytes have; else the unknown token. That one waits for the next character with a token, so it
// comes behind bytes that follow it: the library does so. Returns how many.
static int first_symbols(Encoder *e, const char *s, size_t n) {
    const Tokenizer *t = e->tokenizer;
    int count = 0;
    bool waiting = false;
    for (size_t at = 0, length; at < n; at += length) {
        int code = code_point(s + at, &length);
        int id = code < 512 ? t->character_ids[code] : model_token(t, s + at, length);
        bool bytes = id < 0;
        for (size_t k = 0; k < length; k++) bytes = bytes && t->byte_ids[(uint8_t)s[at + k]] >= 0;
        if (waiting && (id >= 0 || (!bytes && !t->fuse_unknown))) push_symbol(e, &count, t->unknown);
        waiting = bytes ? waiting : id < 0 && t->unknown >= 0;
        if (id >= 0) push_symbol(e, &count, id);
        for (size_t k = 0; bytes && k < length; k++) push_symbol(e, &count, t->byte_ids[(uint8_t)s[at + k]]);
    }
    if (waiting) push_symbol(e, &count, t->unknown);
    if (count) e->symbols[count - 1].next = -1;
    return count;
}

// Byte-pair encoding (Sennrich et al. 2016, §3.2) of one word: of all neighbours the pair with the lowest rank is
// merged, until there is none. A heap of candidates over a linked list of symbols takes n log n, however long the
// word. A candidate is stale when one of its symbols was merged meanwhile: the pair has another rank then.
static void encode_word(Encoder *e, const char *s, size_t n) {
    const Tokenizer *t = e->tokenizer;
    int whole = t->ignore_merges ? model_token(t, s, n) : -1;
    if (whole >= 0) return push_id(e, whole);
    e->symbols = reserve(e->error, e->symbols, &e->symbol_capacity, n, sizeof *e->symbols);
    e->heap = reserve(e->error, e->heap, &e->heap_capacity, 2 * n, sizeof *e->heap);  // a merge takes one, offers two
    if (e->error->failed) return;
    Symbol *symbols = e->symbols;
    int count = first_symbols(e, s, n);
    e->heap_count = 0;
    for (int i = 0; i < count; i++) offer(e, i);
    while (e->heap_count) {
        uint64_t top = heap_pop(e);
        int at = (int)(top & 0xFFFFFFFF), right = symbols[at].next;
        if (symbols[at].id < 0 || right < 0) continue;
        const Merge *merge = merge_slot(t, symbols[at].id, symbols[right].id);
        if (merge->pair == UINT64_MAX || (uint64_t)merge->rank != top >> 32) continue;
        symbols[at].id = merge->id;
        symbols[at].next = symbols[right].next;
        symbols[right].id = -1;
        if (symbols[at].next >= 0) symbols[symbols[at].next].before = at;
        offer(e, symbols[at].before);
        offer(e, at);
    }
    for (int i = count ? 0 : -1; i >= 0; i = symbols[i].next) push_id(e, symbols[i].id);
}

// ---- Encoding: steps before the merging --------------------------------------------------------------------

static void run(Encoder *e, int step, const char *s, size_t n, bool at_start);

// A piece between two cuts; it waits until it is known whether the next one is joined to it.
typedef struct {
    size_t start, end;
    bool any, match;
} Piece;

static void give_piece(Encoder *e, int step, const char *s, Piece piece, bool at_start) {
    bool removed = piece.match && e->tokenizer->encode.steps[step].mode == REMOVED;
    if (!removed) run(e, step + 1, s + piece.start, piece.end - piece.start, at_start && piece.start == 0);
}

static void take_piece(Encoder *e, int step, const char *s, Piece *waiting, Piece piece, bool at_start) {
    const Step *split = &e->tokenizer->encode.steps[step];
    piece.match ^= split->invert;
    bool join = waiting->any && ((split->mode == CONTIGUOUS && waiting->match == piece.match) ||
                                 (split->mode == MERGED_WITH_PREVIOUS && !waiting->match && piece.match) ||
                                 (split->mode == MERGED_WITH_NEXT && waiting->match && !piece.match));
    if (join)
        piece.start = waiting->start;
    else
        give_piece(e, step, s, *waiting, at_start);
    *waiting = piece;
}

static void split(Encoder *e, int step, const char *s, size_t n, bool at_start) {
    const pcre2_code *regex = e->tokenizer->encode.steps[step].regex;
    Piece waiting = {0};
    size_t done = 0;
    for (Match match = FIRST_MATCH; next_match(&e->matcher, regex, s, n, &match); done = match.end) {
        if (match.start > done) take_piece(e, step, s, &waiting, (Piece){done, match.start, true, false}, at_start);
        take_piece(e, step, s, &waiting, (Piece){match.start, match.end, true, true}, at_start);
    }
    if (n > done) take_piece(e, step, s, &waiting, (Piece){done, n, true, false}, at_start);
    give_piece(e, step, s, waiting, at_start);
}

static int by_number(const void *a, const void *b) {
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return left < right ? -1 : left > right;
}

// Unicode normalization (UAX 15): decompose, put each run of combining marks in the order of their classes, compose.
// utf8proc does it in one call too, but the ordering in square time.
static void normalize(const Step *step, const char *s, size_t n, Bytes *out, Error *error) {
    uint64_t *marked = NULL;  // class << 56 | position << 24 | code point: sorting keeps those of one class in order
    size_t capacity = 0, count = 0, run = 0, length;
    for (size_t at = 0; at < n && !error->failed; at += length) {
        utf8proc_int32_t parts[32];
        int code = code_point(s + at, &length), bound = 0;
        int made = (int)utf8proc_decompose_char(code, parts, 32, (utf8proc_option_t)step->mode, &bound);
        marked = reserve(error, marked, &capacity, count + 32, sizeof *marked);
        for (int i = 0; i < made && !error->failed; i++) {
            uint64_t class = (uint64_t)utf8proc_get_property(parts[i])->combining_class;
            if (class == 0 && count - run > 1) qsort(marked + run, count - run, sizeof *marked, by_number);
            marked[count] = class << 56 | (uint64_t)count << 24 | (uint64_t)parts[i];
            count++;
            if (class == 0) run = count;
        }
    }
    if (count - run > 1) qsort(marked + run, count - run, sizeof *marked, by_number);
    utf8proc_int32_t *codes = reserve(error, NULL, &(size_t){0}, count, sizeof *codes);
    for (size_t i = 0; i < count && !error->failed; i++) codes[i] = (utf8proc_int32_t)(marked[i] & 0xFFFFFF);
    if (!error->failed)
        count = (size_t)utf8proc_normalize_utf32(codes, (utf8proc_ssize_t)count, step->mode | UTF8PROC_STABLE);
    for (size_t i = 0; i < count && !error->failed; i++) {
        utf8proc_uint8_t utf8[4];
        append(error, out, (const char *)utf8, (size_t)utf8proc_encode_char(codes[i], utf8));
    }
    free(marked);
    free(codes);
}

static void write_bytes(const char *s, size_t n, Bytes *out, Error *error) {
    out->data = reserve(error, out->data, &out->capacity, 2 * n, 1);
    for (size_t i = 0; i < n && !error->failed; i++) {
        int code = byte_character((uint8_t)s[i]);
        if (code >= 0x80) out->data[out->length++] = (char)(0xC0 | code >> 6);
        out->data[out->length++] = (char)(code < 0x80 ? code : 0x80 | (code & 0x3F));
    }
}

// A step that makes one text of one text: *s and *n become its output. *at_start: does it still start where the
// whole text does?
static void transform(Encoder *e, int index, const char **s, size_t *n, bool *at_start) {
    const Step *step = &e->tokenizer->encode.steps[index];
    Bytes *out = &e->scratch[index];
    out->length = 0;
    if (step->kind == STRIP) {
        size_t start = 0, end = *n;
        while (step->mode & 1 && start < end && space_length(*s + start)) start += space_length(*s + start);
        while (step->mode & 2 && start < end && space_length(*s + previous(*s, end))) end = previous(*s, end);
        *s += start, *n = end - start, *at_start = *at_start && start == 0;
        return;
    }
    if (step->kind == PREPEND) {
        bool there = *n >= step->length && !memcmp(*s, step->text, step->length);
        if (*n == 0 || (there && step->mode != ALWAYS) || (!*at_start && step->mode == AT_TEXT_START)) return;
        append(e->error, out, step->text, step->length);
        append(e->error, out, *s, *n);
    }
    if (step->kind == REPLACE) replace(&e->matcher, step, *s, *n, out);
    if (step->kind == NORMALIZE) {
        size_t ascii = 0;
        while (ascii < *n && (uint8_t)(*s)[ascii] < 0x80) ascii++;
        if (ascii == *n) return;
        normalize(step, *s, *n, out, e->error);
    }
    if (step->kind == BYTES) write_bytes(*s, *n, out, e->error);
    *s = out->data, *n = out->length;
    if (*n > e->matcher.limit) fail(e->error, "this text grows beyond %zu bytes", e->matcher.limit);
}

// The first place at or behind `from` where an added token stands, and the longest one there; -1 if none.
static int find_added(const AddedSet *set, const char *s, size_t n, size_t *from, size_t *end) {
    for (; *from < n; ++*from) {
        if (!set->starts[(uint8_t)s[*from]]) continue;
        for (size_t i = 0; i < set->count; i++) {
            const Wanted *wanted = &set->wanted[i];
            *end = *from + wanted->length;
            if (*end <= n && !memcmp(wanted->text, s + *from, wanted->length)) return wanted->id;
        }
    }
    return -1;
}

// Gives added tokens their ids, and what lies between them to the next step.
static void take_added(Encoder *e, int step, const char *s, size_t n, bool at_start) {
    const AddedSet *set = &e->tokenizer->added[e->tokenizer->encode.steps[step].mode];
    size_t done = 0, from = 0, next = 0;
    for (int id; (id = find_added(set, s, n, &from, &next)) >= 0; from = next) {
        int flags = e->tokenizer->tokens[id].flags;
        size_t start = from, end = next;
        if (flags & SINGLE_WORD && start && is_word(s + previous(s, start))) continue;
        if (flags & SINGLE_WORD && end < n && is_word(s + end)) continue;
        while (flags & LEFT_STRIP && start > done && space_length(s + previous(s, start))) start = previous(s, start);
        while (flags & RIGHT_STRIP && end < n && space_length(s + end)) end += space_length(s + end);
        if (start > done) run(e, step + 1, s + done, start - done, at_start && done == 0);
        push_id(e, id);
        done = end;
    }
    run(e, step + 1, s + done, n - done, at_start && done == 0);
}

// Takes a text through the steps from `step` on. at_start: it starts where the whole text starts.
static void run(Encoder *e, int step, const char *s, size_t n, bool at_start) {
    const Chain *chain = &e->tokenizer->encode;
    for (; n && !e->error->failed; step++) {
        if (step == chain->count) return encode_word(e, s, n);
        if (chain->steps[step].kind == ADDED) return take_added(e, step, s, n, at_start);
        if (chain->steps[step].kind == SPLIT) return split(e, step, s, n, at_start);
        transform(e, step, &s, &n, &at_start);
    }
}

static void encoder_open(Encoder *e, const Tokenizer *t, size_t n, Error *error) {
    *e = (Encoder){.tokenizer = t, .error = error};
    matcher_open(&e->matcher, n, error);
}

static void encoder_close(Encoder *e) {
    matcher_close(&e->matcher);
    for (int i = 0; i < MAX_STEPS; i++) free(e->scratch[i].data);
    free(e->symbols);
    free(e->heap);
}

int tokenizer_encode(const Tokenizer *t, const char *text, size_t length, bool add_special, int **ids, char *error_text,
                     size_t error_size) {
    Error error = {NULL, error_text, error_size, false};
    Encoder e;
    *ids = NULL;
    if (length > MAX_TEXT) return fail(&error, "text of %zu bytes, at most 2^28 are taken at once", length), -1;
    size_t valid = utf8_valid(text, length);
    if (valid < length)
        return fail(&error, "byte %zu of the text, 0x%02X, is not UTF-8", valid, (unsigned)(uint8_t)text[valid]), -1;
    encoder_open(&e, t, length, &error);
    e.ids = reserve(&error, NULL, &e.capacity, 1, sizeof *e.ids);  // so that *ids is an array even for no ids
    for (int i = 0; add_special && i < t->before_count; i++) push_id(&e, t->before[i]);
    run(&e, 0, text, length, true);
    for (int i = 0; add_special && i < t->after_count; i++) push_id(&e, t->after[i]);
    encoder_close(&e);
    if (error.failed)
        free(e.ids);
    else
        *ids = e.ids;
    return error.failed ? -1 : (int)e.count;
}

// ---- Decoding ----------------------------------------------------------------------------------------------

struct TokenizerStream {
    const Tokenizer *tokenizer;
    bool skip_special;
    Error error;
    Matcher matcher;
    Bytes scratch[MAX_STEPS];  // REPLACE, METASPACE: a step's output · BYTES, BYTE_FALLBACK: not yet characters
    size_t seen[MAX_STEPS];    // STRIP: characters looked at · METASPACE, JOIN: tokens
    Bytes out;
};

static const char REPLACEMENT[] = "\xEF\xBF\xBD";  // U+FFFD

static void show(TokenizerStream *stream, int index, const char *s, size_t n);

// Gives on the whole characters that `bytes` starts with, and U+FFFD for each stretch that is none. What may still
// become one stays, unless this is the end.
static void show_characters(TokenizerStream *stream, int index, Bytes *bytes, bool end) {
    size_t at = 0, given = 0;
    while (at < bytes->length) {
        int length = utf8_length(bytes->data + at, bytes->length - at);
        if (length == 0 && !end) break;
        if (length <= 0) {
            show(stream, index, bytes->data + given, at - given);
            show(stream, index, REPLACEMENT, 3);
            given = length ? at + (size_t)-length : bytes->length;
        }
        at = length > 0 ? at + (size_t)length : given;
    }
    if (at > given) show(stream, index, bytes->data + given, at - given);
    if (at) memmove(bytes->data, bytes->data + at, bytes->length -= at);
}

// Byte-level: the bytes its characters stand for, or, if one stands for none, the token as it is.
static void show_bytes(TokenizerStream *stream, int index, const char *s, size_t n) {
    Bytes *bytes = &stream->scratch[index];
    size_t to = bytes->length, length;
    bool mapped = true;
    for (size_t at = 0; at < n; at += length) mapped = mapped && character_byte(code_point(s + at, &length)) >= 0;
    append(&stream->error, bytes, s, n);
    if (stream->error.failed) return;
    for (size_t at = 0; mapped && at < n; at += length)
        bytes->data[to++] = (char)character_byte(code_point(s + at, &length));
    if (mapped) bytes->length = to;
    show_characters(stream, index + 1, bytes, false);
}

// A run of byte tokens has ended: text if it is UTF-8, else U+FFFD for each byte.
static void show_run(TokenizerStream *stream, int index) {
    Bytes *bytes = &stream->scratch[index];
    bool valid = bytes->length && utf8_valid(bytes->data, bytes->length) == bytes->length;
    if (valid) show(stream, index + 1, bytes->data, bytes->length);
    for (size_t i = 0; !valid && i < bytes->length; i++) show(stream, index + 1, REPLACEMENT, 3);
    bytes->length = 0;
}

static void show_byte_token(TokenizerStream *stream, int index, const char *s, size_t n) {
    const char *digits = "0123456789ABCDEF0123456789abcdef";
    const char *high = n == 6 && s[3] ? strchr(digits, s[3]) : NULL, *low = high && s[4] ? strchr(digits, s[4]) : NULL;
    if (low && !memcmp(s, "<0x", 3) && s[5] == '>') {
        char byte = (char)((high - digits) % 16 * 16 + (low - digits) % 16);
        append(&stream->error, &stream->scratch[index], &byte, 1);
    } else {
        show_run(stream, index);
        show(stream, index + 1, s, n);
    }
}

// Drops up to `mode` signs from the start of each token, or of the text where it comes in parts.
static void show_stripped(TokenizerStream *stream, int index, const char *s, size_t n) {
    const Step *step = &stream->tokenizer->decode.steps[index];
    size_t seen = step->fused ? stream->seen[index] : 0;
    for (; seen < (size_t)step->mode && n >= step->length && !memcmp(s, step->text, step->length); seen++)
        s += step->length, n -= step->length;
    stream->seen[index] = n ? (size_t)step->mode : seen;
    show(stream, index + 1, s, n);
}

// The sign becomes a space; in the first token it is dropped if one was put there in encoding.
static void show_metaspace(TokenizerStream *stream, int index, const char *s, size_t n) {
    const Step *step = &stream->tokenizer->decode.steps[index];
    Bytes *out = &stream->scratch[index];
    bool drop = step->mode && (step->fused || stream->seen[index]++ == 0);
    out->length = 0;
    for (size_t at = 0, length; at < n; at += length) {
        code_point(s + at, &length);
        bool sign = length == step->length && !memcmp(s + at, step->text, length);
        append(&stream->error, out, sign ? " " : s + at, sign ? !drop : length);
    }
    show(stream, index + 1, out->data, out->length);
}

// Takes one token, or behind FUSE and BYTES a part of the text, through the decoder's steps from `index` on.
static void show(TokenizerStream *stream, int index, const char *s, size_t n) {
    const Chain *chain = &stream->tokenizer->decode;
    if (stream->error.failed) return;
    if (index == chain->count) return append(&stream->error, &stream->out, s, n);
    const Step *step = &chain->steps[index];
    Bytes *out = &stream->scratch[index];
    if (step->kind == BYTES) return show_bytes(stream, index, s, n);
    if (step->kind == BYTE_FALLBACK) return show_byte_token(stream, index, s, n);
    if (step->kind == STRIP) return show_stripped(stream, index, s, n);
    if (step->kind == METASPACE) return show_metaspace(stream, index, s, n);
    if (step->kind == REPLACE) {
        out->length = 0;
        replace(&stream->matcher, step, s, n, out);
        return show(stream, index + 1, out->data, out->length);
    }
    // FUSE has told the steps behind it; JOIN puts a space between tokens.
    if (step->kind == JOIN && stream->seen[index]++) show(stream, index + 1, " ", 1);
    show(stream, index + 1, s, n);
}

TokenizerStream *tokenizer_stream_begin(const Tokenizer *t, bool skip_special) {
    TokenizerStream *stream = calloc(1, sizeof *stream);
    if (!stream) return NULL;
    stream->tokenizer = t;
    stream->skip_special = skip_special;
    matcher_open(&stream->matcher, 0, &stream->error);
    append(&stream->error, &stream->out, "", 0);
    if (!stream->error.failed) return stream;
    tokenizer_stream_free(stream);
    return NULL;
}

void tokenizer_stream_free(TokenizerStream *stream) {
    if (!stream) return;
    matcher_close(&stream->matcher);
    for (int i = 0; i < MAX_STEPS; i++) free(stream->scratch[i].data);
    free(stream->out.data);
    free(stream);
}

static const char *shown(const TokenizerStream *stream, size_t *length) {
    if (length) *length = stream->error.failed ? 0 : stream->out.length;
    return stream->error.failed ? NULL : stream->out.data;
}

const char *tokenizer_stream_next(TokenizerStream *stream, int id, size_t *length) {
    const Tokenizer *t = stream->tokenizer;
    const Token *token = tokenizer_token(t, id) ? &t->tokens[id] : NULL;
    stream->out.length = 0;
    stream->out.data[0] = 0;
    if (token && !(stream->skip_special && token->flags & SPECIAL)) show(stream, 0, token->shown, strlen(token->shown));
    return shown(stream, length);
}

const char *tokenizer_stream_flush(TokenizerStream *stream, size_t *length) {
    const Chain *chain = &stream->tokenizer->decode;
    stream->out.length = 0;
    stream->out.data[0] = 0;
    for (int i = 0; i < chain->count; i++) {
        if (chain->steps[i].kind == BYTE_FALLBACK) show_run(stream, i);
        if (chain->steps[i].kind == BYTES) show_characters(stream, i + 1, &stream->scratch[i], true);
        stream->seen[i] = 0;
    }
    return shown(stream, length);
}

char *tokenizer_decode(const Tokenizer *t, const int *ids, int count, bool skip_special, size_t *length) {
    TokenizerStream *stream = tokenizer_stream_begin(t, skip_special);
    Error error = {.failed = !stream};
    Bytes text = {0};
    append(&error, &text, "", 0);
    for (int i = 0; !error.failed && i <= count; i++) {
        size_t n;
        const char *s = i < count ? tokenizer_stream_next(stream, ids[i], &n) : tokenizer_stream_flush(stream, &n);
        error.failed = !s;
        append(&error, &text, s, n);
    }
    tokenizer_stream_free(stream);
    if (length) *length = error.failed ? 0 : text.length;
    if (!error.failed) return text.data;
    free(text.data);
    return NULL;
}

// ---- JSON -------------------------------------------------------------------------------------------------

// A value of the file. Those within a list or an object stand behind it; with itself they are `size`.
typedef struct {
    const char *key;   // in an object, else NULL
    const char *text;  // of a string, else NULL
    double number;
    uint32_t size;
    char type;  // its first character; '0' for all numbers
} Json;

// A tokenizer.json holds 300,000 strings and more: a library that allocates each takes longer for that than all the
// rest does. Here they move to the front of the text they stand in, and stay.
typedef struct {
    char *text, *at, *strings;  // the text, which ends in a NUL; what is read next; where the next string goes
    Json *values;               // (count)
    size_t count, capacity;
    Error *error;
} Reader;

static void malformed(Reader *r) { fail(r->error, "malformed JSON at byte %zu", (size_t)(r->at - r->text)); }

static void skip_space(Reader *r) {
    while (*r->at == ' ' || *r->at == '\t' || *r->at == '\r' || *r->at == '\n') r->at++;
}

// Skips white space, and this sign if it comes next.
static bool take(Reader *r, char sign) {
    skip_space(r);
    bool there = *r->at == sign;
    r->at += there;
    return there;
}

static int read_hex(const char *s) {  // four digits; -1: they are none
    char digits[5] = "";
    if (strspn(s, "0123456789abcdefABCDEF") < 4) return -1;
    return (int)strtol(memcpy(digits, s, 4), NULL, 16);
}

// A backslash and what belongs to it; what it stands for is never longer.
static void read_escape(Reader *r) {
    static const char signs[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    const char *sign = memchr(signs, r->at[1], sizeof signs - 1);
    int code = sign ? meant[sign - signs] : r->at[1] == 'u' ? read_hex(r->at + 2) : -1, took = sign ? 2 : 6;
    if (code >= 0xD800 && code < 0xE000) {  // halves of one character (RFC 8259, §7)
        int low = code < 0xDC00 && r->at[6] == '\\' && r->at[7] == 'u' ? read_hex(r->at + 8) : -1;
        code = low >= 0xDC00 && low < 0xE000 ? 0x10000 + (code - 0xD800) * 0x400 + low - 0xDC00 : -1;
        took = 12;
    }
    if (code == 0) fail(r->error, "byte %zu: \\u0000 is not supported", (size_t)(r->at - r->text));
    if (code < 0) return malformed(r);
    r->strings += utf8proc_encode_char(code, (utf8proc_uint8_t *)r->strings);
    r->at += took;
}

// The string behind a quote; NULL on failure.
static const char *read_string(Reader *r) {
    const char *start = r->strings;
    while (*r->at != '"' && !r->error->failed) {
        size_t n = 0;
        while (r->at[n] != '"' && r->at[n] != '\\' && (uint8_t)r->at[n] >= ' ') n++;
        memmove(r->strings, r->at, n);
        r->strings += n;
        r->at += n;
        if (*r->at == '\\')
            read_escape(r);
        else if (*r->at != '"')
            malformed(r);
    }
    if (r->error->failed) return NULL;
    *r->strings++ = 0;
    r->at++;
    return start;
}

// Appends a value and those within.
static void read_value(Reader *r, const char *key, int depth) {
    static const char *const words[] = {"true", "false", "null"};
    size_t self = r->count;
    r->values = reserve(r->error, r->values, &r->capacity, self + 1, sizeof *r->values);
    skip_space(r);
    if (depth == MAX_DEPTH) malformed(r);
    if (r->error->failed) return;
    r->count++;
    Json value = {.key = key, .type = *r->at};
    char *start = r->at, end = value.type == '{' ? '}' : ']';
    if (take(r, '"')) {
        value.text = read_string(r);
    } else if (take(r, '{') || take(r, '[')) {
        bool ended = take(r, end);
        for (bool more = !ended; more && !r->error->failed; more = take(r, ',')) {
            const char *name = value.type == '{' && take(r, '"') ? read_string(r) : NULL;
            if (value.type == '{' && !(name && take(r, ':'))) malformed(r);
            read_value(r, name, depth + 1);
        }
        if (!ended && !take(r, end)) malformed(r);
    } else if (value.type == '-' || (value.type >= '0' && value.type <= '9')) {
        value.type = '0';
        value.number = (double)strtol(start, &r->at, 10);
        if (*r->at == '.' || *r->at == 'e' || *r->at == 'E') value.number = strtod(start, &r->at);
    } else {
        for (int i = 0; i < 3; i++)
            if (!strncmp(start, words[i], strlen(words[i]))) r->at += strlen(words[i]);
    }
    if (r->at == start) malformed(r);
    value.size = (uint32_t)(r->count - self);
    r->values[self] = value;
}

// The value behind `item` within `list`, the first one if `item` is the list itself; NULL if there is none.
static const Json *following(const Json *list, const Json *item) {
    if (!list) return NULL;
    item += item == list ? 1 : item->size;
    return item < list + list->size ? item : NULL;
}

static const Json *member(const Json *object, const char *key) {
    for (const Json *item = object; (item = following(object, item));)
        if (item->key && !strcmp(item->key, key)) return item;
    return NULL;
}

static bool is(const Json *item, char type) { return item && item->type == type; }
static bool is_bool(const Json *item) { return is(item, 't') || is(item, 'f'); }
static bool is_given(const Json *item) { return item && item->type != 'n'; }
static const char *text_of(const Json *item) { return item ? item->text : NULL; }

// ---- Loading -----------------------------------------------------------------------------------------------

typedef struct {
    Tokenizer *t;
    Error *error;
    int last;  // id that the merge before makes
} Loader;

// Reading one value: a member that is missing or of another type is an error and gives "", false, 0 or -1.

static bool read_bool(Loader *l, const Json *object, const char *key, bool otherwise) {
    const Json *item = member(object, key);
    if (is_given(item) && !is_bool(item)) fail(l->error, "%s is not true or false", key);
    return is_given(item) ? is(item, 't') : otherwise;
}

static const char *read_text(Loader *l, const Json *object, const char *key) {
    const char *text = text_of(member(object, key));
    if (!text) fail(l->error, "%s is missing or not a string", key);
    return text ? text : "";
}

static int read_number(Loader *l, const Json *item, const char *what, int most) {
    double number = is(item, '0') ? item->number : -1;
    bool good = number >= 0 && number <= most && number == floor(number);
    if (!is(item, '0')) fail(l->error, "%.80s is missing or not a number", what);
    if (!good) fail(l->error, "%.80s is %g, expected a whole number from 0 to %d", what, number, most);
    return good ? (int)number : 0;
}

// Index of a member's text among the words of `known`, which are separated by one space; -1 and an error if it is none.
static int read_word(Loader *l, const Json *object, const char *part, const char *key, const char *known) {
    const char *text = text_of(member(object, key)), *word = known;
    if (!text) fail(l->error, "%s: %s is missing or not a string", part, key);
    for (int index = 0; text && *word; index++) {
        size_t length = strcspn(word, " ");
        if (length == strlen(text) && !strncmp(word, text, length)) return index;
        word += length + (word[length] == ' ');
    }
    fail(l->error, "%s of %s %.60s, supported are: %s", part, key, text ? text : "", known);
    return -1;
}

// The pattern of a step: {"pattern": {"String": ...}} or {"Regex": ...}.
static pcre2_code *read_pattern(Loader *l, const Json *item) {
    const Json *pattern = member(item, "pattern");
    const char *string = text_of(member(pattern, "String"));
    const char *regex = text_of(member(pattern, "Regex"));
    if (!string && !regex) fail(l->error, "pattern is missing or neither a String nor a Regex");
    return l->error->failed ? NULL : compile(string ? string : regex, string != NULL, l->error);
}

// Appends a step; from here on the chain owns its pattern.
static void add_step(Loader *l, Chain *chain, Step step, const char *text) {
    if (chain->count == MAX_STEPS) {
        pcre2_code_free(step.regex);
        return fail(l->error, "more than %d steps", MAX_STEPS);
    }
    for (int i = 0; chain == &l->t->decode && i < chain->count; i++)
        step.fused |= chain->steps[i].kind == FUSE || chain->steps[i].kind == BYTES;
    step.length = strlen(text);
    step.text = text;
    chain->steps[chain->count++] = step;
}

static void load_sequence(Loader *l, const Json *item, const char *key, void (*load)(Loader *, const Json *)) {
    const Json *list = member(item, key);
    if (!is(list, '[')) fail(l->error, "%s is missing or not a list", key);
    for (const Json *part = list; (part = following(list, part));)
        if (!l->error->failed) load(l, part);
}

static void load_normalizer(Loader *l, const Json *item) {
    enum { SEQUENCE, PREPENDING, REPLACING, STRIPPING, NFC };
    const int c = UTF8PROC_COMPOSE, d = UTF8PROC_DECOMPOSE, k = UTF8PROC_COMPAT, forms[] = {c, d, c | k, d | k};
    Chain *chain = &l->t->encode;
    int type = read_word(l, item, "normalizer", "type", "Sequence Prepend Replace Strip NFC NFD NFKC NFKD");
    if (type == SEQUENCE) load_sequence(l, item, "normalizers", load_normalizer);
    if (type == PREPENDING) add_step(l, chain, (Step){.kind = PREPEND, .mode = ALWAYS}, read_text(l, item, "prepend"));
    if (type == REPLACING)
        add_step(l, chain, (Step){.kind = REPLACE, .regex = read_pattern(l, item)}, read_text(l, item, "content"));
    if (type == STRIPPING) {
        int mode = read_bool(l, item, "strip_left", true) + 2 * read_bool(l, item, "strip_right", true);
        add_step(l, chain, (Step){.kind = STRIP, .mode = mode}, "");
    }
    if (type >= NFC) add_step(l, chain, (Step){.kind = NORMALIZE, .mode = forms[type - NFC]}, "");
}

// GPT-2's own pattern is part of the type ByteLevel, so it stands here and not in the file.
static const char GPT2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

static void load_byte_level(Loader *l, const Json *item) {
    Chain *chain = &l->t->encode;
    if (read_bool(l, item, "add_prefix_space", true))
        add_step(l, chain, (Step){.kind = PREPEND, .mode = UNLESS_THERE}, " ");
    if (read_bool(l, item, "use_regex", true))
        add_step(l, chain, (Step){.kind = SPLIT, .mode = ISOLATED, .regex = compile(GPT2, false, l->error)}, "");
    add_step(l, chain, (Step){.kind = BYTES}, "");
}

// Metaspace's sign and when it is put before a text, for both ways.
static const char *read_metaspace(Loader *l, const Json *item, When *when) {
    const char *sign = read_text(l, item, "replacement");
    if (!*sign) fail(l->error, "Metaspace: replacement is empty");
    *when = read_bool(l, item, "add_prefix_space", true) ? UNLESS_THERE : NEVER;
    if (is_given(member(item, "prepend_scheme")))
        *when = (When)read_word(l, item, "Metaspace", "prepend_scheme", "always first never");
    return sign;
}

static void load_metaspace(Loader *l, const Json *item) {
    Chain *chain = &l->t->encode;
    When when;
    const char *sign = read_metaspace(l, item, &when);
    add_step(l, chain, (Step){.kind = REPLACE, .regex = compile(" ", true, l->error)}, sign);
    if (when != NEVER) add_step(l, chain, (Step){.kind = PREPEND, .mode = when}, sign);
    if (read_bool(l, item, "split", true))
        add_step(l, chain, (Step){.kind = SPLIT, .mode = MERGED_WITH_NEXT, .regex = compile(sign, true, l->error)}, "");
}

static void load_pre_tokenizer(Loader *l, const Json *item) {
    enum { SEQUENCE, BYTE_LEVEL, META, PATTERN, DIGITS };
    Step step = {.kind = SPLIT, .mode = ISOLATED};
    int type = read_word(l, item, "pre_tokenizer", "type", "Sequence ByteLevel Metaspace Split Digits");
    if (type == SEQUENCE) load_sequence(l, item, "pretokenizers", load_pre_tokenizer);
    if (type == BYTE_LEVEL) load_byte_level(l, item);
    if (type == META) load_metaspace(l, item);
    if (type == PATTERN) {
        const char *behaviors = "Isolated Removed Contiguous MergedWithPrevious MergedWithNext";
        step.mode = read_word(l, item, "Split", "behavior", behaviors);
        step.invert = read_bool(l, item, "invert", false);
        step.regex = read_pattern(l, item);
    }
    if (type == DIGITS)
        step.regex = compile(read_bool(l, item, "individual_digits", false) ? "\\p{N}" : "\\p{N}+", false, l->error);
    if (type == PATTERN || type == DIGITS) add_step(l, &l->t->encode, step, "");
}

static void load_decoder(Loader *l, const Json *item) {
    enum { SEQUENCE, BYTE_LEVEL, META, REPLACING, BYTE_TOKENS, FUSING, STRIPPING };
    static const Kind kinds[] = {JOIN, BYTES, METASPACE, REPLACE, BYTE_FALLBACK, FUSE, STRIP};
    Chain *chain = &l->t->decode;
    When when;
    int type = read_word(l, item, "decoder", "type", "Sequence ByteLevel Metaspace Replace ByteFallback Fuse Strip");
    if (type == SEQUENCE) load_sequence(l, item, "decoders", load_decoder);
    if (type <= SEQUENCE) return;
    Step step = {.kind = kinds[type]};
    const char *text = "";
    if (type == META) {
        text = read_metaspace(l, item, &when);
        step.mode = when != NEVER;
    }
    if (type == REPLACING) {
        text = read_text(l, item, "content");
        step.regex = read_pattern(l, item);
    }
    if (type == STRIPPING) {
        text = read_text(l, item, "content");
        step.mode = read_number(l, member(item, "start"), "decoder Strip: start", 1000);
        read_number(l, member(item, "stop"), "decoder Strip: stop", 0);
        if (!*text) fail(l->error, "decoder Strip: content is empty");
    }
    add_step(l, chain, step, text);
    if (chain->steps[chain->count - 1].fused && type != FUSING && type != STRIPPING)
        fail(l->error, "decoder %s behind Fuse or ByteLevel is not supported", read_text(l, item, "type"));
}

static void check_ids(Loader *l, const Json *list, bool added, int *highest, size_t *count) {
    for (const Json *item = list; (item = following(list, item));) {
        int id = read_number(l, added ? member(item, "id") : item, added ? "an added token's id" : item->key, MAX_ID);
        *highest = id > *highest ? id : *highest;
        ++*count;
    }
}

// Gives this id this content, unless one of them is taken.
static Token *add_token(Loader *l, int id, const char *content) {
    size_t length = strlen(content);
    Slot *slot = token_slot(l->t, content, length);
    Token *token = &l->t->tokens[id];
    if (slot->id >= 0)
        fail(l->error, "\"%.40s\" has both id %d and %d", content, slot->id, id);
    else if (token->content)
        fail(l->error, "id %d stands for \"%.40s\" and \"%.40s\"", id, token->content, content);
    if (l->error->failed) return token;
    *slot = (Slot){(uint32_t)hash_text(content, length), id};
    token->content = token->shown = content;
    token->length = (uint32_t)length;
    return token;
}

static size_t power_of_two(size_t at_least) {
    size_t power = 16;
    while (power < at_least) power *= 2;
    return power;
}

static void load_vocabulary(Loader *l, const Json *vocab, const Json *added) {
    Tokenizer *t = l->t;
    size_t count = 0;
    int highest = 0;
    if (!is(vocab, '{') || !following(vocab, vocab)) fail(l->error, "model.vocab is missing, empty or not an object");
    if (is_given(added) && !is(added, '[')) fail(l->error, "added_tokens is not a list");
    check_ids(l, vocab, false, &highest, &count);
    check_ids(l, added, true, &highest, &count);
    if (l->error->failed) return;
    t->size = highest + 1;
    t->slot_mask = power_of_two(count + count / 2) - 1;
    t->tokens = calloc((size_t)t->size, sizeof *t->tokens);
    t->slots = malloc((t->slot_mask + 1) * sizeof *t->slots);
    if (!t->tokens || !t->slots) return fail(l->error, "out of memory");
    memset(t->slots, -1, (t->slot_mask + 1) * sizeof *t->slots);
    for (const Json *item = vocab; (item = following(vocab, item));)
        if (!l->error->failed) add_token(l, (int)item->number, item->key)->flags = IN_MODEL;
}

// "a b" or ["a", "b"]: a and its length, b; NULL if it is neither.
static const char *read_pair(const Json *item, size_t *left_length, const char **right) {
    const char *left = text_of(item);
    if (left) {
        *left_length = strcspn(left, " ");
        *right = left + *left_length + 1;
        return left[*left_length] && !strchr(*right, ' ') ? left : NULL;
    }
    const Json *first = following(item, item), *second = first ? following(item, first) : NULL;
    left = second && !following(item, second) ? text_of(first) : NULL;
    *right = text_of(second);
    *left_length = left ? strlen(left) : 0;
    return *right ? left : NULL;
}

static void load_merge(Loader *l, const Json *item, int rank, Bytes *whole) {
    const char *right, *left;
    size_t length;
    left = read_pair(item, &length, &right);
    if (!left) return fail(l->error, "merge %d is neither \"a b\" nor [\"a\", \"b\"]", rank);
    whole->length = 0;
    append(l->error, whole, left, length);
    append(l->error, whole, right, strlen(right));
    if (l->error->failed) return;
    int a = model_token(l->t, left, length), b = model_token(l->t, right, strlen(right));
    const Token *next = &l->t->tokens[l->last + 1];  // mostly the vocabulary is in the merges' order
    bool in_order = l->last + 1 < l->t->size && next->length == whole->length && next->content &&
                    !memcmp(next->content, whole->data, whole->length);
    int id = in_order ? l->last + 1 : model_token(l->t, whole->data, whole->length);
    l->last = id;
    const char *missing = a < 0 ? left : b < 0 ? right : whole->data;
    if (a < 0 || b < 0 || id < 0)
        return fail(l->error, "merge %d, \"%.*s\" and \"%.40s\": model.vocab has no \"%.*s\"", rank, (int)length, left,
                    right, a < 0 ? (int)length : 80, missing);
    *merge_slot(l->t, a, b) = (Merge){(uint64_t)a << 32 | (uint32_t)b, rank, id};
}

static void load_merges(Loader *l, const Json *merges) {
    Tokenizer *t = l->t;
    if (!is(merges, '[')) return fail(l->error, "model.merges is missing or not a list");
    size_t count = 0;
    for (const Json *item = merges; (item = following(merges, item));) count++;
    t->merge_mask = power_of_two(count + count / 2) - 1;
    t->merges = malloc((t->merge_mask + 1) * sizeof *t->merges);
    if (!t->merges) return fail(l->error, "out of memory");
    memset(t->merges, -1, (t->merge_mask + 1) * sizeof *t->merges);
    Bytes whole = {0};
    int rank = 0;
    for (const Json *item = merges; (item = following(merges, item));)
        if (!l->error->failed) load_merge(l, item, rank++, &whole);
    free(whole.data);
}

// Ids that encoding asks for again and again.
static void load_shortcuts(Loader *l, const char *unknown, bool byte_fallback) {
    Tokenizer *t = l->t;
    t->unknown = unknown ? model_token(t, unknown, strlen(unknown)) : -1;
    if (unknown && t->unknown < 0) fail(l->error, "model.unk_token %.60s is not in model.vocab", unknown);
    for (int code = 0; code < 512; code++) {
        char utf8[2] = {(char)(code < 0x80 ? code : 0xC0 | code >> 6), (char)(0x80 | (code & 0x3F))};
        t->character_ids[code] = model_token(t, utf8, code < 0x80 ? 1 : 2);
    }
    for (int byte = 0; byte < 256; byte++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)byte);
        t->byte_ids[byte] = byte_fallback ? model_token(t, name, 6) : -1;
    }
}

static void load_model(Loader *l, const Json *model, const Json *added) {
    static const char *const unsupported[] = {"continuing_subword_prefix", "end_of_word_suffix", "dropout"};
    if (!is(model, '{')) return fail(l->error, "model is missing or not an object");
    if (is_given(member(model, "type"))) read_word(l, model, "model", "type", "BPE");
    for (int i = 0; i < 3; i++) {
        const Json *item = member(model, unsupported[i]);
        bool off = is(item, '"') ? !*item->text : is(item, '0') && item->number == 0;
        if (is_given(item) && !off) fail(l->error, "model.%s is not supported, expected null", unsupported[i]);
    }
    const char *unknown = is_given(member(model, "unk_token")) ? read_text(l, model, "unk_token") : NULL;
    bool byte_fallback = read_bool(l, model, "byte_fallback", false);
    l->t->fuse_unknown = read_bool(l, model, "fuse_unk", false);
    l->t->ignore_merges = read_bool(l, model, "ignore_merges", false);
    load_vocabulary(l, member(model, "vocab"), added);
    if (!l->error->failed) load_merges(l, member(model, "merges"));
    if (!l->error->failed) load_shortcuts(l, unknown, byte_fallback);
}

// One added token: a token of the model that is also looked for in the text, or one of its own, which keeps the id
// the file gives it.
static void load_added_token(Loader *l, const Json *item) {
    const char *content = read_text(l, item, "content");
    int id = (int)member(item, "id")->number;
    Token *token = &l->t->tokens[id];
    if (!*content) return;
    if (!token->content || strcmp(token->content, content)) add_token(l, id, content);
    token->flags = (uint8_t)((token->flags & IN_MODEL) | (read_bool(l, item, "special", false) ? SPECIAL : 0) |
                             (read_bool(l, item, "lstrip", false) ? LEFT_STRIP : 0) |
                             (read_bool(l, item, "rstrip", false) ? RIGHT_STRIP : 0) |
                             (read_bool(l, item, "single_word", false) ? SINGLE_WORD : 0) |
                             (read_bool(l, item, "normalized", false) ? NORMALIZED : 0));
}

// What stands in a normalized text where the content of a NORMALIZED token stood.
static void normalize_added(Loader *l, Token *token) {
    Encoder e;
    bool at_start = true;
    const char *s = token->content;
    size_t n = token->length;
    encoder_open(&e, l->t, n, l->error);
    for (int i = 1; i < l->t->encode.count && !l->error->failed; i++) transform(&e, i, &s, &n, &at_start);
    Bytes shown = {0};
    append(l->error, &shown, s, n);
    if (l->error->failed)
        free(shown.data);
    else
        token->shown = shown.data;
    encoder_close(&e);
}

static int longest_first(const void *a, const void *b) {
    size_t left = ((const Wanted *)a)->length, right = ((const Wanted *)b)->length;
    return left < right ? 1 : left > right ? -1 : 0;
}

static void load_added_set(Loader *l, const Json *added, bool normalized) {
    AddedSet *set = &l->t->added[normalized];
    set->wanted = calloc(added ? added->size : 1, sizeof *set->wanted);
    if (!set->wanted) return fail(l->error, "out of memory");
    for (const Json *item = added; (item = following(added, item));) {
        Token *token = &l->t->tokens[(int)member(item, "id")->number];
        if (!token->content || normalized != !!(token->flags & NORMALIZED)) continue;
        if (normalized && token->shown == token->content) normalize_added(l, token);
        if (!*token->shown) continue;
        set->wanted[set->count++] = (Wanted){token->shown, strlen(token->shown), (int)member(item, "id")->number};
        set->starts[(uint8_t)*token->shown] = true;
    }
    qsort(set->wanted, set->count, sizeof *set->wanted, longest_first);
}

// A template: [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}, ...]
static void load_template(Loader *l, const Json *item) {
    Tokenizer *t = l->t;
    const Json *single = member(item, "single"), *special = member(item, "special_tokens");
    int texts = 0;
    if (t->before_count || t->after_count) fail(l->error, "more than one TemplateProcessing");
    for (const Json *part = single; (part = following(single, part));) {
        const char *name = text_of(member(member(part, "SpecialToken"), "id"));
        const Json *ids = name ? member(member(special, name), "ids") : NULL;
        bool is_text = member(part, "Sequence");
        texts += is_text;
        if (!is_text && !is(ids, '['))
            fail(l->error, "TemplateProcessing: a part of single is neither text nor known token");
        for (const Json *one = ids; (one = following(ids, one));) {
            int id = read_number(l, one, "TemplateProcessing: id of a special token", t->size - 1);
            int *count = texts ? &t->after_count : &t->before_count;
            if (!tokenizer_token(t, id)) fail(l->error, "TemplateProcessing: id %d stands for no token", id);
            if (*count == MAX_AROUND) fail(l->error, "TemplateProcessing: more than %d special tokens", MAX_AROUND);
            if (!l->error->failed) (texts ? t->after : t->before)[(*count)++] = id;
        }
    }
    if (texts != 1) fail(l->error, "TemplateProcessing: single holds the text %d times, expected once", texts);
}

static void load_post_processor(Loader *l, const Json *item) {
    enum { SEQUENCE, TEMPLATE };  // ByteLevel's only moves offsets
    int type = read_word(l, item, "post_processor", "type", "Sequence TemplateProcessing ByteLevel");
    if (type == SEQUENCE) load_sequence(l, item, "processors", load_post_processor);
    if (type == TEMPLATE) load_template(l, item);
}

static void load_parts(Loader *l, const Json *root) {
    static const struct {
        const char *name;
        void (*load)(Loader *, const Json *);
    } parts[] = {{"normalizer", load_normalizer},
                 {"pre_tokenizer", load_pre_tokenizer},
                 {"post_processor", load_post_processor},
                 {"decoder", load_decoder}};
    const Json *added = member(root, "added_tokens");
    Chain *encode = &l->t->encode;
    if (!is(root, '{')) fail(l->error, "not an object, expected the tokenizer.json of a checkpoint");
    load_model(l, member(root, "model"), added);
    for (const Json *item = added; (item = following(added, item));)
        if (!l->error->failed) load_added_token(l, item);
    add_step(l, encode, (Step){.kind = ADDED, .mode = 0}, "");
    for (int i = 0; i < 4; i++) {
        const Json *item = member(root, parts[i].name);
        if (is_given(item) && !l->error->failed) parts[i].load(l, item);
        if (i == 0 && !l->error->failed) load_added_set(l, added, false);
        if (i == 0 && !l->error->failed) load_added_set(l, added, true);
        if (i == 0) add_step(l, encode, (Step){.kind = ADDED, .mode = 1}, "");
    }
    if (!is_given(member(root, "decoder"))) add_step(l, &l->t->decode, (Step){.kind = JOIN}, "");
}

// Takes over the text, behind which there is room for a NUL.
static Tokenizer *load_text(char *text, size_t length, Error *error) {
    Reader r = {.text = text, .at = text, .strings = text, .error = error};
    Loader l = {calloc(1, sizeof *l.t), error, 0};
    if (!l.t) fail(error, "out of memory");
    if (length > MAX_TEXT) fail(error, "larger than 2^28 bytes");
    size_t valid = error->failed ? length : utf8_valid(text, length);
    if (valid < length) fail(error, "byte %zu is not UTF-8", valid);
    if (!error->failed) {
        text[length] = 0;
        read_value(&r, NULL, 0);
        skip_space(&r);
        if (r.at < text + length) malformed(&r);
    }
    if (!error->failed) load_parts(&l, r.values);
    free(r.values);
    if (l.t)
        l.t->texts = text;
    else
        free(text);
    if (!error->failed) return l.t;
    tokenizer_free(l.t);
    return NULL;
}

Tokenizer *tokenizer_parse(const char *json, size_t length, const char *name, char *error_text, size_t error_size) {
    Error error = {name, error_text, error_size, false};
    Bytes text = {0};
    append(&error, &text, json, length);
    return load_text(text.data, length, &error);
}

Tokenizer *tokenizer_load(const char *path, char *error_text, size_t error_size) {
    Error error = {path, error_text, error_size, false};
    Bytes text = {0};
    FILE *file = fopen(path, "rb");
    if (!file) fail(&error, "%s", strerror(errno));
    for (size_t got = 1; got && !error.failed && text.length <= MAX_TEXT; text.length += got) {
        text.data = reserve(&error, text.data, &text.capacity, text.length + (1 << 16), 1);
        got = error.failed ? 0 : fread(text.data + text.length, 1, text.capacity - text.length - 1, file);
    }
    if (file && ferror(file)) fail(&error, "%s", strerror(errno));
    if (file) fclose(file);
    return load_text(text.data, text.length, &error);
}

void tokenizer_free(Tokenizer *t) {
    if (!t) return;
    for (int i = 0; i < t->encode.count; i++) pcre2_code_free(t->encode.steps[i].regex);
    for (int i = 0; i < t->decode.count; i++) pcre2_code_free(t->decode.steps[i].regex);
    for (int id = 0; t->tokens && id < t->size; id++)
        if (t->tokens[id].shown != t->tokens[id].content) free((char *)t->tokens[id].shown);
    for (int i = 0; i < 2; i++) free(t->added[i].wanted);
    free(t->tokens);
    free(t->slots);
    free(t->merges);
    free(t->texts);
    free(t);
}

int tokenizer_size(const Tokenizer *t) { return t->size; }

int tokenizer_find(const Tokenizer *t, const char *token) { return token_slot(t, token, strlen(token))->id; }

const char *tokenizer_token(const Tokenizer *t, int id) {
    return id >= 0 && id < t->size ? t->tokens[id].content : NULL;
}

bool tokenizer_is_special(const Tokenizer *t, int id) {
    return tokenizer_token(t, id) && t->tokens[id].flags & SPECIAL;
}
