// Text <-> token ids. In the order a text travels: characters, patterns, added tokens, normalizing and splitting,
// merging; then back from ids to text; then loading, which builds the lists of steps that the first two walk.
#include "tokenizer.h"

#include <cjson/cJSON.h>
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

enum { MAX_STEPS = 32, MAX_ID = (1 << 24) - 1, MAX_AROUND = 16 };
static const size_t MAX_TEXT = (size_t)1 << 28;   // bytes of a text or a file
static const size_t MAX_GROWN = (size_t)1 << 30;  // bytes a text may become on its way

typedef enum { ADDED, PREPEND, REPLACE, NORMALIZE, STRIP, SPLIT, BYTES, METASPACE, BYTE_FALLBACK, FUSE, JOIN } Kind;
typedef enum { ISOLATED, REMOVED, CONTIGUOUS, MERGED_WITH_PREVIOUS, MERGED_WITH_NEXT } Behavior;
typedef enum { ALWAYS, UNLESS_THERE, AT_TEXT_START } When;

// One step a text goes through. Encoding and decoding are lists of them.
typedef struct {
    Kind kind;
    int mode;     // SPLIT: Behavior · PREPEND: When · NORMALIZE: utf8proc's options · ADDED: 0 raw, 1 normalized
                  // STRIP: 1 left, 2 right (decoding: how many) · METASPACE: 1 drops those of the first token
    bool invert;  // SPLIT: what does not match is the match
    bool fused;   // decoding: what comes is one text in parts, no longer token by token
    pcre2_code *regex;  // SPLIT, REPLACE
    const char *text;   // PREPEND, REPLACE: what to put there · STRIP, METASPACE (decoding): what goes
    size_t length;      // its bytes
} Step;

typedef struct {
    Step steps[MAX_STEPS];
    int count;
} Chain;

enum { IN_MODEL = 1, IS_ADDED = 2, SPECIAL = 4, LEFT_STRIP = 8, RIGHT_STRIP = 16, SINGLE_WORD = 32, NORMALIZED = 64 };
typedef struct {
    const char *content;  // as the file spells it; NULL for an id that is not used
    const char *shown;    // what the decoder sees: content, or for a NORMALIZED token its normalized form
    uint32_t length;      // of content
    uint8_t flags;
} Token;

typedef struct {
    uint64_t pair;  // left id << 32 | right id
    int rank, id;   // the lower rank is merged first, into this id
} Merge;

// Added tokens that are looked for together; sorted, so that those with the same start are neighbours.
typedef struct {
    const char *text;
    int id;
} Wanted;

typedef struct {
    Wanted *wanted;  // (count): sorted by text
    size_t count;
    bool starts[256];  // is there one that starts with this byte?
} AddedSet;

typedef struct Block {  // strings that live as long as the tokenizer
    struct Block *next;
    size_t used, size;
    char data[];
} Block;

struct Tokenizer {
    Chain encode, decode;
    Token *tokens;  // (size): by id
    int size;
    int *token_slots;  // (token_mask + 1): open-addressed hash of content -> id, -1 is free
    size_t token_mask;
    Merge *merges;  // (merge_mask + 1): open-addressed hash of pair -> rank and id, pair UINT64_MAX is free
    size_t merge_mask;
    int character_ids[512];  // id of the character with this code point, -1 if it has none
    int byte_ids[256];       // id of "<0x00>" ... "<0xFF>" if byte_fallback is on, else -1
    int unknown;             // id, or -1
    bool fuse_unknown, ignore_merges;
    AddedSet added[2];                                                     // looked for before and after normalizing
    pcre2_code *word;                                                      // matches one character of a word
    int before[MAX_AROUND], after[MAX_AROUND], before_count, after_count;  // the post-processor's ids around a text
    Block *blocks;
};

typedef struct {
    const char *name;  // of the file, NULL for none
    char *text;
    size_t size;
} Error;

// Writes the error, on one line; returns false, so that `return fail(...)` passes it up.
static bool fail(Error *error, const char *format, ...) {
    if (!error->size) return false;
    int used = error->name ? snprintf(error->text, error->size, "%s: ", error->name) : 0;
    va_list arguments;
    va_start(arguments, format);
    if (used >= 0 && (size_t)used < error->size)
        vsnprintf(error->text + used, error->size - (size_t)used, format, arguments);
    va_end(arguments);
    for (char *c = error->text; *c; c++)
        if ((unsigned char)*c < 32 || *c == 127) *c = '?';
    return false;
}

static bool out_of_memory(Error *error) { return fail(error, "out of memory"); }

// Makes room for `need` items of `item` bytes. NULL if there is none; `data` stays as it is then.
static void *reserve(void *data, size_t *capacity, size_t need, size_t item) {
    if (need <= *capacity) return data;
    size_t grown = need + need / 2 + 16;
    void *moved = realloc(data, grown * item);
    if (moved) *capacity = grown;
    return moved;
}

typedef struct {
    char *data;
    size_t length, capacity;
} Bytes;

static bool append(Bytes *bytes, const char *s, size_t n) {
    char *data = reserve(bytes->data, &bytes->capacity, bytes->length + n + 1, 1);
    if (!data) return false;
    if (n) memcpy(data + bytes->length, s, n);
    bytes->data = data;
    bytes->length += n;
    data[bytes->length] = 0;
    return true;
}

// ---------------------------------------------------------------------------------------------- characters

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
        if (k == 1 && b[0] == 0xF0) low = 0x90;
        if (k == 1 && b[0] == 0xF4) high = 0x8F;  // beyond U+10FFFF
        if (b[k] < low || b[k] > high) return -k;
    }
    return length;
}

// Offset of the first byte that is not UTF-8, n if all of it is.
static size_t utf8_valid(const char *s, size_t n) {
    size_t at = 0;
    while (at < n) {
        int length = utf8_length(s + at, n - at);
        if (length <= 0) break;
        at += (size_t)length;
    }
    return at;
}

// Code point of the character at s, which is valid, and its length.
static int code_point(const char *s, int *length) {
    const uint8_t *b = (const uint8_t *)s;
    *length = b[0] < 0x80 ? 1 : b[0] < 0xE0 ? 2 : b[0] < 0xF0 ? 3 : 4;
    int code = *length == 1 ? b[0] : b[0] & (0x7F >> *length);
    for (int k = 1; k < *length; k++) code = code << 6 | (b[k] & 0x3F);
    return code;
}

// Unicode's White_Space. Length of the character if s starts with one, else 0.
static int space_length(const char *s) {
    int length, c = code_point(s, &length);
    bool space = (c >= 9 && c <= 13) || c == 32 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
                 (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
                 c == 0x3000;
    return space ? length : 0;
}

// Offset of the character that ends at `end` > 0.
static size_t previous(const char *s, size_t end) {
    do end--;
    while (((uint8_t)s[end] & 0xC0) == 0x80);
    return end;
}

// Byte-level BPE writes each byte as a printable character (Radford et al. 2019, GPT-2): the printable ones of
// Latin-1 as themselves, the other 68 as U+0100 onwards. Space becomes "Ġ".
static int byte_character(int byte) {
    if ((byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE) return byte;
    return 256 + (byte <= 32 ? byte : byte <= 0xA0 ? byte - 127 + 33 : 67);
}

static int character_byte(int code) {
    if (code >= 256 && code <= 323) return code - 256 <= 32 ? code - 256 : code == 323 ? 0xAD : code - 256 - 33 + 127;
    return code < 256 && byte_character(code) == code ? code : -1;
}

// ------------------------------------------------------------------------------------------------ patterns

// The library's patterns are written for Oniguruma (Ruby's dialect, Unicode). Where PCRE2 reads the same sign
// otherwise, it is spelled out; where it cannot be, the pattern is refused, not read differently.
#define SPACES "\\t-\\r\\x20\\x85\\xA0\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"
#define NOT_SPACES                                                                                            \
    "\\x00-\\x08\\x0E-\\x1F!-\\x84\\x86-\\x9F\\xA1-\\x{167F}\\x{1681}-\\x{1FFF}\\x{200B}-\\x{2027}\\x{202A}-" \
    "\\x{202E}\\x{2030}-\\x{205E}\\x{2060}-\\x{2FFF}\\x{3001}-\\x{10FFFF}"
#define WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"

// One escape at p (behind its backslash). Returns how many bytes of p it took, 0 if it is refused.
static size_t translate_escape(const char *p, bool in_class, Bytes *out) {
    const char *set = *p == 's' ? SPACES : *p == 'S' ? NOT_SPACES : *p == 'w' || (*p == 'W' && !in_class) ? WORD : NULL;
    size_t digits = strspn(p + 1, "0123456789abcdefABCDEF");
    if (set) {
        bool ok = in_class || append(out, *p == 'W' ? "[^" : "[", *p == 'W' ? 2 : 1);
        return ok && append(out, set, strlen(set)) && (in_class || append(out, "]", 1));
    }
    if ((*p == 'p' || *p == 'P') && p[1] == '{') {
        size_t name = 2 + (p[2] == '^'), end = strcspn(p, "}");
        bool script = end - name > 2;  // PCRE2 would also take a script's extensions
        bool ok = p[end] && append(out, "\\", 1) && append(out, p, name) && (!script || append(out, "sc:", 3));
        return ok && append(out, p + name, end + 1 - name) ? end + 1 : 0;
    }
    if (*p == 'u' && digits >= 4) return append(out, "\\x{", 3) && append(out, p + 1, 4) && append(out, "}", 1) ? 5 : 0;
    if (*p == 'x' && (p[1] == '{' || (p[1] >= '0' && p[1] <= '7' && digits == 2))) return append(out, "\\x", 2) ? 1 : 0;
    bool plain = *p && (strchr("dDrntf", *p) ||
                        !((*p >= '0' && *p <= '9') || (*p >= 'A' && *p <= 'Z') || (*p >= 'a' && *p <= 'z')));
    return plain && append(out, "\\", 1) && append(out, p, 1) ? 1 : 0;
}

static bool translate(const char *pattern, Bytes *out, Error *error) {
    bool in_class = false;
    for (const char *p = pattern; *p;) {
        size_t took = 1;
        if (*p == '\\') {
            took = translate_escape(p + 1, in_class, out);
            if (!took) return fail(error, "pattern %.60s: \\%.1s is not supported here", pattern, p + 1);
            p += took + 1;
            continue;
        }
        if (in_class && (*p == '[' || (p[0] == '&' && p[1] == '&')))
            return fail(error, "pattern %.60s: a set within a set is not supported", pattern);
        if (!in_class && p[0] == '(' && (p[1] == '?' || p[1] == '*')) {
            static const char *const known[] = {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!", "(?i:"};
            bool good = p == pattern && !strncmp(p, "(?i)", 4);
            for (size_t k = 0; k < sizeof known / sizeof *known; k++) good |= !strncmp(p, known[k], strlen(known[k]));
            if (!good) return fail(error, "pattern %.60s: the group %.3s is not supported", pattern, p);
        }
        if (!in_class && *p == '{') {
            size_t end = strspn(p + 1, "0123456789,") + 1;
            bool fixed = !memchr(p, ',', end);
            if (p[end] == '}' && (p[end + 1] == '+' || (fixed && p[end + 1] == '?')))
                return fail(error, "pattern %.60s: %.1s behind {} is not supported", pattern, p + end + 1);
            if (p[1] == ',' && end > 2 && !append(out, "{0", 2)) return out_of_memory(error);
            p += p[1] == ',' && end > 2;
        }
        if (!in_class && *p == '[') {
            in_class = true;
            took = 1 + (p[1] == '^');
            took += p[took] == ']';
        } else if (*p == ']') {
            in_class = false;
        }
        if (!append(out, p, took)) return out_of_memory(error);
        p += took;
    }
    return true;
}

static pcre2_code *compile(const char *pattern, bool literal, Error *error) {
    Bytes text = {0};
    pcre2_code *regex = NULL;
    if (append(&text, "", 0) &&
        (literal ? append(&text, pattern, strlen(pattern)) : translate(pattern, &text, error))) {
        int code;
        PCRE2_SIZE offset;
        uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE);
        pcre2_compile_context *context = pcre2_compile_context_create(NULL);
        if (context) pcre2_set_newline(context, PCRE2_NEWLINE_LF);
        regex = context ? pcre2_compile((PCRE2_SPTR)text.data, text.length, options, &code, &offset, context) : NULL;
        if (!context) out_of_memory(error);
        if (regex) pcre2_jit_compile(regex, PCRE2_JIT_COMPLETE);  // if there is no JIT, it is interpreted
        if (context && !regex) {
            char why[120] = "";
            pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
            fail(error, "pattern %.60s: %s", pattern, why);
        }
        pcre2_compile_context_free(context);
    }
    free(text.data);
    return regex;
}

// What matching needs, one per thread.
typedef struct {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
} Matcher;

static void matcher_close(Matcher *matcher) {
    pcre2_match_data_free(matcher->data);
    pcre2_match_context_free(matcher->context);
    pcre2_jit_stack_free(matcher->stack);
}

// For texts of n bytes. A pattern that backtracks more than a few times over the text fails with an error.
static bool matcher_open(Matcher *matcher, size_t n) {
    matcher->data = pcre2_match_data_create(1, NULL);
    matcher->context = pcre2_match_context_create(NULL);
    matcher->stack = pcre2_jit_stack_create(32 << 10, 32 << 20, NULL);
    if (!matcher->data || !matcher->context) return false;
    if (matcher->stack) pcre2_jit_stack_assign(matcher->context, NULL, matcher->stack);
    pcre2_set_match_limit(matcher->context, (uint32_t)(10000 + 2 * n));
    return true;
}

// Where a search stands: the next one starts at `from`; an empty match right behind the last match is none.
typedef struct {
    size_t from, last_end;
} Cursor;
static const Cursor CURSOR_START = {0, SIZE_MAX};

// Finds the next match in s: 1 and start and end, or 0; -1 and an error if the pattern takes too long.
static int next_match(const Matcher *matcher, const pcre2_code *regex, const char *s, size_t n, Cursor *cursor,
                      size_t *start, size_t *end, Error *error) {
    while (cursor->from <= n) {
        int found =
            pcre2_match(regex, (PCRE2_SPTR)s, n, cursor->from, PCRE2_NO_UTF_CHECK, matcher->data, matcher->context);
        if (found == PCRE2_ERROR_NOMATCH) return 0;
        if (found < 0) {
            char why[120] = "";
            pcre2_get_error_message(found, (PCRE2_UCHAR *)why, sizeof why);
            return fail(error, "a pattern of the tokenizer on this text: %s", why) - 1;
        }
        const PCRE2_SIZE *range = pcre2_get_ovector_pointer(matcher->data);
        cursor->from = range[1];
        if (range[0] != range[1] || range[1] != cursor->last_end) {
            *start = range[0], *end = cursor->last_end = range[1];
            return 1;
        }
        int length = 1;
        if (range[1] < n) code_point(s + range[1], &length);
        cursor->from += (size_t)length;
    }
    return 0;
}

// ------------------------------------------------------------------------------------------ encoding: merging

typedef struct {
    int id, before, next;  // neighbours' indices, -1 at the ends; id -1 once it was merged into its left neighbour
} Symbol;

typedef struct {
    const Tokenizer *tokenizer;
    Matcher matcher;
    Error *error;
    size_t limit;              // of bytes a text may grow to
    Bytes scratch[MAX_STEPS];  // a step's output, while the steps behind it work on it
    Symbol *symbols;
    uint64_t
        *heap;  // rank << 32 | index of the left symbol: candidates to merge, the lowest rank, then leftmost, on top
    size_t symbol_capacity, heap_capacity, heap_count;
    int *ids;  // (count): the result
    size_t count, capacity;
} Encoder;

static bool push_id(Encoder *e, int id) {
    int *ids = reserve(e->ids, &e->capacity, e->count + 1, sizeof *ids);
    if (!ids) return out_of_memory(e->error);
    e->ids = ids;
    ids[e->count++] = id;
    return true;
}

static size_t hash_text(const char *s, size_t n) {  // FNV-1a
    uint64_t hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < n; i++) hash = (hash ^ (uint8_t)s[i]) * 0x100000001B3u;
    return (size_t)(hash ^ hash >> 29);
}

// Slot of this content, or the free one where it belongs.
static int *token_slot(const Tokenizer *t, const char *s, size_t n) {
    size_t slot = hash_text(s, n) & t->token_mask;
    for (;; slot = (slot + 1) & t->token_mask) {
        int id = t->token_slots[slot];
        if (id < 0 || (t->tokens[id].length == n && !memcmp(t->tokens[id].content, s, n))) return &t->token_slots[slot];
    }
}

static int model_token(const Tokenizer *t, const char *s, size_t n) {
    int id = *token_slot(t, s, n);
    return id >= 0 && t->tokens[id].flags & IN_MODEL ? id : -1;
}

static Merge *merge_slot(const Tokenizer *t, int left, int right) {
    uint64_t pair = (uint64_t)left << 32 | (uint32_t)right;
    size_t slot = (size_t)((pair * 0x9E3779B97F4A7C15u) >> 20) & t->merge_mask;
    while (t->merges[slot].pair != pair && t->merges[slot].pair != UINT64_MAX) slot = (slot + 1) & t->merge_mask;
    return &t->merges[slot];
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

// Puts symbol `left` and its right neighbour among the candidates if there is a merge for them.
static void offer(Encoder *e, int left) {
    if (left < 0 || e->symbols[left].next < 0) return;
    const Merge *merge = merge_slot(e->tokenizer, e->symbols[left].id, e->symbols[e->symbols[left].next].id);
    if (merge->pair != UINT64_MAX) heap_push(e, (uint64_t)merge->rank << 32 | (uint32_t)left);
}

static void push_symbol(Encoder *e, int *count, int id) {
    e->symbols[*count] = (Symbol){id, *count - 1, *count + 1};
    ++*count;
}

// One symbol a character; one a byte where a character has no token but its bytes have; else the unknown token,
// which stands behind bytes that follow it (so does the library).
static int first_symbols(Encoder *e, const char *s, size_t n) {
    const Tokenizer *t = e->tokenizer;
    int count = 0, pending = 0;  // unknown tokens not yet written: at most 1
    for (size_t at = 0; at < n;) {
        int length, code = code_point(s + at, &length);
        int id = code < 512 ? t->character_ids[code] : model_token(t, s + at, (size_t)length);
        bool bytes = id < 0;
        for (int k = 0; k < length; k++) bytes = bytes && t->byte_ids[(uint8_t)s[at + (size_t)k]] >= 0;
        if (id >= 0 || (!bytes && !t->fuse_unknown)) {
            if (pending) push_symbol(e, &count, t->unknown);
            pending = 0;
        }
        if (id >= 0) push_symbol(e, &count, id);
        for (int k = 0; bytes && k < length; k++) push_symbol(e, &count, t->byte_ids[(uint8_t)s[at + (size_t)k]]);
        if (id < 0 && !bytes && t->unknown >= 0) pending = 1;
        at += (size_t)length;
    }
    if (pending) push_symbol(e, &count, t->unknown);
    if (count) e->symbols[count - 1].next = -1;
    return count;
}

// Byte-pair encoding of one word: of all neighbours the pair with the lowest rank is merged, until none is left.
// A heap of candidates over a linked list of symbols: n log n, however long the word. A candidate is out of date
// when one of its symbols has been merged meanwhile; it is recognized by its rank and dropped.
static bool encode_word(Encoder *e, const char *s, size_t n) {
    const Tokenizer *t = e->tokenizer;
    int id = t->ignore_merges ? model_token(t, s, n) : -1;
    if (id >= 0) return push_id(e, id);
    Symbol *symbols = reserve(e->symbols, &e->symbol_capacity, n, sizeof *symbols);
    if (symbols) e->symbols = symbols;
    uint64_t *heap = reserve(e->heap, &e->heap_capacity, 2 * n, sizeof *heap);  // a merge takes one, brings two
    if (heap) e->heap = heap;
    if (!symbols || !heap) return out_of_memory(e->error);
    int count = first_symbols(e, s, n);
    e->heap_count = 0;
    for (int i = 0; i < count; i++) offer(e, i);
    while (e->heap_count) {
        uint64_t top = heap_pop(e);
        Symbol *left = &symbols[(uint32_t)top];
        if (left->id < 0 || left->next < 0) continue;
        const Merge *merge = merge_slot(t, left->id, symbols[left->next].id);
        if (merge->pair == UINT64_MAX || (uint64_t)merge->rank != top >> 32) continue;
        left->id = merge->id;
        symbols[left->next].id = -1;
        left->next = symbols[left->next].next;
        if (left->next >= 0) symbols[left->next].before = (int)(uint32_t)top;
        offer(e, left->before);
        offer(e, (int)(uint32_t)top);
    }
    for (int i = count ? 0 : -1; i >= 0; i = symbols[i].next)
        if (!push_id(e, symbols[i].id)) return false;
    return true;
}

// --------------------------------------------------------------------------- encoding: steps before the merging

static bool run(Encoder *e, int step, const char *s, size_t n, bool at_start);

// Pieces as they come, one held back until it is known whether the next is joined to it.
typedef struct {
    size_t start, end;
    bool any, match;
} Held;

static bool give_held(Encoder *e, int step, const char *s, const Held *held, bool at_start) {
    bool removed = held->match && e->tokenizer->encode.steps[step].mode == REMOVED;
    if (!held->any || removed || held->start == held->end) return true;
    return run(e, step + 1, s + held->start, held->end - held->start, at_start && held->start == 0);
}

static bool take_piece(Encoder *e, int step, const char *s, Held *held, Held piece, bool at_start) {
    const Step *split = &e->tokenizer->encode.steps[step];
    piece.match ^= split->invert;
    bool join = held->any && ((split->mode == CONTIGUOUS && held->match == piece.match) ||
                              (split->mode == MERGED_WITH_PREVIOUS && !held->match && piece.match) ||
                              (split->mode == MERGED_WITH_NEXT && held->match && !piece.match));
    if (!join && !give_held(e, step, s, held, at_start)) return false;
    if (join) piece.start = held->start;
    *held = piece;
    return true;
}

static bool split(Encoder *e, int step, const char *s, size_t n, bool at_start) {
    const pcre2_code *regex = e->tokenizer->encode.steps[step].regex;
    Cursor cursor = CURSOR_START;
    Held held = {0};
    for (size_t done = 0;;) {
        size_t start = n, end = n;
        int found = next_match(&e->matcher, regex, s, n, &cursor, &start, &end, e->error);
        if (found < 0) return false;
        if (start > done && !take_piece(e, step, s, &held, (Held){done, start, true, false}, at_start)) return false;
        if (!found) return give_held(e, step, s, &held, at_start);
        if (!take_piece(e, step, s, &held, (Held){start, end, true, true}, at_start)) return false;
        done = end;
    }
}

// Replaces every match of step->regex in s by step->text.
static bool replace(const Matcher *matcher, const Step *step, const char *s, size_t n, Bytes *out, Error *error) {
    Cursor cursor = CURSOR_START;
    for (size_t done = 0;;) {
        size_t start = n, end = n;
        int found = next_match(matcher, step->regex, s, n, &cursor, &start, &end, error);
        if (found < 0) return false;
        if (!append(out, s + done, start - done)) return out_of_memory(error);
        if (!found) return true;
        if (!append(out, step->text, step->length)) return out_of_memory(error);
        done = end;
    }
}

static bool normalize(const Step *step, const char *s, size_t n, Bytes *out, Error *error) {
    size_t ascii = 0;
    while (ascii < n && (uint8_t)s[ascii] < 0x80) ascii++;
    if (ascii == n) return append(out, s, n) || out_of_memory(error);
    uint8_t *normal = NULL;
    utf8proc_ssize_t length = utf8proc_map((const uint8_t *)s, (utf8proc_ssize_t)n, &normal,
                                           (utf8proc_option_t)(UTF8PROC_STABLE | step->mode));
    bool ok = length >= 0 && append(out, (const char *)normal, (size_t)length);
    free(normal);
    return ok || fail(error, "normalizing: %s", length < 0 ? utf8proc_errmsg(length) : "out of memory");
}

static bool write_bytes(const char *s, size_t n, Bytes *out, Error *error) {
    char *data = reserve(out->data, &out->capacity, out->length + 2 * n + 1, 1);
    if (!data) return out_of_memory(error);
    out->data = data;
    for (size_t i = 0; i < n; i++) {
        int code = byte_character((uint8_t)s[i]);
        if (code >= 0x80) data[out->length++] = (char)(0xC0 | code >> 6);
        data[out->length++] = (char)(code < 0x80 ? code : 0x80 | (code & 0x3F));
    }
    return true;
}

// A step that makes one text of one text: *s and *n become its output. *at_start: does it still start where the
// whole text does?
static bool transform(Encoder *e, int index, const char **s, size_t *n, bool *at_start) {
    const Step *step = &e->tokenizer->encode.steps[index];
    Bytes *out = &e->scratch[index];
    bool ok = true;
    out->length = 0;
    if (step->kind == STRIP) {
        size_t start = 0, end = *n;
        while (step->mode & 1 && start < end && space_length(*s + start)) start += (size_t)space_length(*s + start);
        while (step->mode & 2 && start < end && space_length(*s + previous(*s, end))) end = previous(*s, end);
        *s += start, *n = end - start, *at_start = *at_start && start == 0;
        return true;
    }
    if (step->kind == PREPEND) {
        bool there = *n >= step->length && !memcmp(*s, step->text, step->length);
        if (*n == 0 || (there && step->mode != ALWAYS) || (!*at_start && step->mode == AT_TEXT_START)) return true;
        ok = (append(out, step->text, step->length) && append(out, *s, *n)) || out_of_memory(e->error);
    } else if (step->kind == REPLACE) {
        ok = replace(&e->matcher, step, *s, *n, out, e->error);
    } else {
        ok = (step->kind == NORMALIZE ? normalize(step, *s, *n, out, e->error) : write_bytes(*s, *n, out, e->error));
    }
    *s = out->data, *n = out->length;
    return ok && (*n <= e->limit || fail(e->error, "the normalizer makes a text of %zu bytes from this one", *n));
}

// First index in [low, high) of a text whose byte at `depth` is at least `byte`; they share the bytes before it.
static size_t wanted_bound(const AddedSet *set, size_t low, size_t high, size_t depth, int byte) {
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if ((uint8_t)set->wanted[middle].text[depth] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// The first place at or behind `from` where an added token stands, and the longest one there; -1 if none.
static int find_added(const AddedSet *set, const char *s, size_t n, size_t from, size_t *start, size_t *end) {
    for (size_t at = from; at < n; at++) {
        if (!set->starts[(uint8_t)s[at]]) continue;
        int best = -1;
        size_t low = 0, high = set->count;
        for (size_t depth = 0; low < high; depth++) {
            if (!set->wanted[low].text[depth]) {  // ends here: it sorts before those that go on
                best = set->wanted[low++].id;
                *start = at, *end = at + depth;
            }
            if (at + depth == n || !s[at + depth]) break;  // a NUL is in no token
            low = wanted_bound(set, low, high, depth, (uint8_t)s[at + depth]);
            high = wanted_bound(set, low, high, depth, (uint8_t)s[at + depth] + 1);
        }
        if (best >= 0) return best;
    }
    return -1;
}

static bool is_word(Encoder *e, const char *s) {
    int length;
    size_t start, end;
    Cursor cursor = CURSOR_START;
    code_point(s, &length);
    return next_match(&e->matcher, e->tokenizer->word, s, (size_t)length, &cursor, &start, &end, e->error) == 1;
}

// Gives added tokens their ids, and what lies between them to the next step.
static bool take_added(Encoder *e, int step, const char *s, size_t n, bool at_start) {
    const Tokenizer *t = e->tokenizer;
    int which = t->encode.steps[step].mode, id;
    size_t done = 0, from = 0, start, end;
    while ((id = find_added(&t->added[which], s, n, from, &start, &end)) >= 0) {
        int flags = t->tokens[id].flags;
        from = end;
        if (flags & SINGLE_WORD && ((start && is_word(e, s + previous(s, start))) || (end < n && is_word(e, s + end))))
            continue;
        while (flags & LEFT_STRIP && start > done && space_length(s + previous(s, start))) start = previous(s, start);
        while (flags & RIGHT_STRIP && end < n && space_length(s + end)) end += (size_t)space_length(s + end);
        if (start > done && !run(e, step + 1, s + done, start - done, at_start && done == 0)) return false;
        if (!push_id(e, id)) return false;
        done = end;
    }
    return done == n || run(e, step + 1, s + done, n - done, at_start && done == 0);
}

// Takes the text through the steps from `step` on. at_start: it starts where the whole text starts.
static bool run(Encoder *e, int step, const char *s, size_t n, bool at_start) {
    const Chain *chain = &e->tokenizer->encode;
    for (; n; step++) {
        if (step == chain->count) return encode_word(e, s, n);
        if (chain->steps[step].kind == ADDED) return take_added(e, step, s, n, at_start);
        if (chain->steps[step].kind == SPLIT) return split(e, step, s, n, at_start);
        if (!transform(e, step, &s, &n, &at_start)) return false;
    }
    return true;
}

static bool encoder_open(Encoder *e, const Tokenizer *t, size_t n, Error *error) {
    *e = (Encoder){.tokenizer = t, .error = error, .limit = 64 * n + 65536 < MAX_GROWN ? 64 * n + 65536 : MAX_GROWN};
    return matcher_open(&e->matcher, n) || out_of_memory(error);
}

static void encoder_close(Encoder *e) {
    matcher_close(&e->matcher);
    for (int i = 0; i < MAX_STEPS; i++) free(e->scratch[i].data);
    free(e->symbols);
    free(e->heap);
}

int tokenizer_encode(const Tokenizer *t, const char *text, size_t length, bool add_special, int **ids, char *error_text,
                     size_t error_size) {
    Error error = {NULL, error_text, error_size};
    Encoder e;
    *ids = NULL;
    if (length > MAX_TEXT) return fail(&error, "text of %zu bytes, at most 2^28 are taken at once", length) - 1;
    size_t valid = utf8_valid(text, length);
    if (valid < length)
        return fail(&error, "byte %zu of the text, 0x%02X, is not UTF-8", valid, (unsigned)(uint8_t)text[valid]) - 1;
    bool ok = encoder_open(&e, t, length, &error) && push_id(&e, 0);  // so that *ids is never NULL
    e.count = 0;
    for (int i = 0; ok && add_special && i < t->before_count; i++) ok = push_id(&e, t->before[i]);
    ok = ok && run(&e, 0, text, length, true);
    for (int i = 0; ok && add_special && i < t->after_count; i++) ok = push_id(&e, t->after[i]);
    encoder_close(&e);
    if (!ok)
        free(e.ids);
    else
        *ids = e.ids;
    return ok ? (int)e.count : -1;
}

// ------------------------------------------------------------------------------------------------- decoding

struct TokenizerStream {
    const Tokenizer *tokenizer;
    bool skip_special;
    bool failed;  // out of memory
    Matcher matcher;
    Bytes scratch[MAX_STEPS];  // REPLACE, METASPACE: a step's output · BYTES, BYTE_FALLBACK: bytes not yet characters
    size_t seen[MAX_STEPS];    // STRIP: characters looked at · METASPACE, JOIN: tokens
    Bytes out;
};

static const char REPLACEMENT[] = "\xEF\xBF\xBD";  // U+FFFD

static void show(TokenizerStream *stream, int index, const char *s, size_t n);

// Takes whole characters off the front of `bytes`, for each stretch that is none U+FFFD. What may still become one
// stays, unless this is the end.
static void show_characters(TokenizerStream *stream, int index, Bytes *bytes, bool end) {
    size_t at = 0, valid = 0;
    while (at < bytes->length) {
        int length = utf8_length(bytes->data + at, bytes->length - at);
        if (length == 0 && !end) break;
        if (length > 0) {
            at += (size_t)length;
            continue;
        }
        if (at > valid) show(stream, index, bytes->data + valid, at - valid);
        show(stream, index, REPLACEMENT, 3);
        at = valid = length ? at + (size_t)-length : bytes->length;
    }
    if (at > valid) show(stream, index, bytes->data + valid, at - valid);
    memmove(bytes->data, bytes->data + at, bytes->length - at);
    bytes->length -= at;
}

// Byte-level token: its characters' bytes, or, if one of them stands for no byte, the token as it is.
static void show_bytes(TokenizerStream *stream, int index, const char *s, size_t n) {
    Bytes *bytes = &stream->scratch[index];
    size_t before = bytes->length;
    bool ok = append(bytes, s, n);
    for (size_t at = 0, to = before; ok && at < n;) {
        int length, byte = character_byte(code_point(s + at, &length));
        if (byte < 0) {
            bytes->length = before;
            ok = append(bytes, s, n);
            break;
        }
        bytes->data[to++] = (char)byte;
        at += (size_t)length;
        if (at == n) bytes->length = to;
    }
    stream->failed |= !ok;
    if (ok && n) show_characters(stream, index + 1, bytes, false);
}

// A run of byte tokens has ended: text if it is UTF-8, else U+FFFD for each byte.
static void show_run(TokenizerStream *stream, int index) {
    Bytes *bytes = &stream->scratch[index];
    bool valid = bytes->length && utf8_valid(bytes->data, bytes->length) == bytes->length;
    if (valid) show(stream, index + 1, bytes->data, bytes->length);
    for (size_t i = 0; !valid && i < bytes->length; i++) show(stream, index + 1, REPLACEMENT, 3);
    bytes->length = 0;
}

static int hex_digit(char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

static int byte_token(const char *s, size_t n) {  // "<0xE4>" -> 0xE4, else -1
    if (n != 6 || memcmp(s, "<0x", 3) || s[5] != '>' || hex_digit(s[3]) < 0 || hex_digit(s[4]) < 0) return -1;
    return hex_digit(s[3]) << 4 | hex_digit(s[4]);
}

static void show_stripped(TokenizerStream *stream, int index, const char *s, size_t n) {
    const Step *step = &stream->tokenizer->decode.steps[index];
    size_t *seen = &stream->seen[index];
    if (!step->fused) *seen = 0;
    for (; *seen < (size_t)step->mode && n; ++*seen) {
        if (n < step->length || memcmp(s, step->text, step->length))
            *seen = (size_t)step->mode - 1;
        else
            s += step->length, n -= step->length;
    }
    show(stream, index + 1, s, n);
}

// Metaspace: the sign becomes a space; in the first token it is dropped, if one was put there in encoding.
static void show_metaspace(TokenizerStream *stream, int index, const char *s, size_t n) {
    const Step *step = &stream->tokenizer->decode.steps[index];
    Bytes *out = &stream->scratch[index];
    bool drop = step->mode && (step->fused || stream->seen[index] == 0), ok = append(out, "", 0);
    stream->seen[index] = 1;
    out->length = 0;
    for (size_t at = 0; ok && at < n;) {
        int length;
        code_point(s + at, &length);
        bool sign = (size_t)length == step->length && !memcmp(s + at, step->text, step->length);
        ok = sign ? drop || append(out, " ", 1) : append(out, s + at, (size_t)length);
        at += (size_t)length;
    }
    stream->failed |= !ok;
    if (ok) show(stream, index + 1, out->data, out->length);
}

// Takes one token, or behind FUSE and BYTES a part of the text, through the decoder's steps from `index` on.
static void show(TokenizerStream *stream, int index, const char *s, size_t n) {
    const Chain *chain = &stream->tokenizer->decode;
    Bytes *out = index < chain->count ? &stream->scratch[index] : &stream->out;
    const Step *step = index < chain->count ? &chain->steps[index] : NULL;
    if (!step) {
        stream->failed |= !append(out, s, n);
    } else if (step->kind == BYTES) {
        show_bytes(stream, index, s, n);
    } else if (step->kind == METASPACE) {
        show_metaspace(stream, index, s, n);
    } else if (step->kind == STRIP) {
        show_stripped(stream, index, s, n);
    } else if (step->kind == BYTE_FALLBACK) {
        char byte = (char)byte_token(s, n);
        if (byte_token(s, n) >= 0) {
            stream->failed |= !append(out, &byte, 1);
        } else {
            show_run(stream, index);
            show(stream, index + 1, s, n);
        }
    } else if (step->kind == REPLACE) {
        Error none = {0};
        out->length = 0;
        if (replace(&stream->matcher, step, s, n, out, &none))
            show(stream, index + 1, out->data, out->length);
        else
            stream->failed = true;
    } else {  // JOIN puts a space between tokens; FUSE marked the steps behind it when it was loaded
        if (step->kind == JOIN && stream->seen[index]++) show(stream, index + 1, " ", 1);
        show(stream, index + 1, s, n);
    }
}

TokenizerStream *tokenizer_stream_begin(const Tokenizer *t, bool skip_special) {
    TokenizerStream *stream = calloc(1, sizeof *stream);
    if (!stream) return NULL;
    stream->tokenizer = t;
    stream->skip_special = skip_special;
    if (matcher_open(&stream->matcher, 0) && append(&stream->out, "", 0)) return stream;
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
    if (length) *length = stream->failed ? 0 : stream->out.length;
    return stream->failed ? NULL : stream->out.data;
}

const char *tokenizer_stream_next(TokenizerStream *stream, int id, size_t *length) {
    const Tokenizer *t = stream->tokenizer;
    stream->out.length = 0;
    stream->out.data[0] = 0;
    const Token *token = id >= 0 && id < t->size && t->tokens[id].content ? &t->tokens[id] : NULL;
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
    Bytes text = {0};
    bool ok = stream && append(&text, "", 0);
    for (int i = 0; ok && i <= count; i++) {
        size_t n;
        const char *s = i < count ? tokenizer_stream_next(stream, ids[i], &n) : tokenizer_stream_flush(stream, &n);
        ok = s && append(&text, s, n);
    }
    tokenizer_stream_free(stream);
    if (!ok) free(text.data);
    if (length) *length = ok ? text.length : 0;
    return ok ? text.data : NULL;
}

// -------------------------------------------------------------------------------------------------- loading

static char *keep(Tokenizer *t, const char *s, size_t n) {
    if (!t->blocks || t->blocks->size - t->blocks->used < n + 1) {
        size_t size = n + 1 > 65536 ? n + 1 : 65536;
        Block *block = malloc(sizeof *block + size);
        if (!block) return NULL;
        *block = (Block){t->blocks, 0, size};
        t->blocks = block;
    }
    char *kept = t->blocks->data + t->blocks->used;
    memcpy(kept, s, n);
    kept[n] = 0;
    t->blocks->used += n + 1;
    return kept;
}

static const cJSON *member(const cJSON *object, const char *key) {
    return cJSON_GetObjectItemCaseSensitive(object, key);
}

static bool is_given(const cJSON *item) { return item && !cJSON_IsNull(item); }

static bool read_bool(const cJSON *object, const char *key, bool otherwise, bool *value, Error *error) {
    const cJSON *item = member(object, key);
    if (is_given(item) && !cJSON_IsBool(item)) return fail(error, "%s is not true or false", key);
    *value = is_given(item) ? cJSON_IsTrue(item) : otherwise;
    return true;
}

static bool read_text(const cJSON *object, const char *key, const char **value, Error *error) {
    *value = cJSON_GetStringValue(member(object, key));
    return *value || fail(error, "%s is missing or not a string", key);
}

static bool read_number(const cJSON *item, const char *what, int most, int *value, Error *error) {
    if (!cJSON_IsNumber(item)) return fail(error, "%.80s is missing or not a number", what);
    double number = item->valuedouble;
    if (!(number >= 0 && number <= most && number == floor(number)))
        return fail(error, "%.80s is %g, expected a whole number from 0 to %d", what, number, most);
    *value = (int)number;
    return true;
}

// Index of `name` among the words of `known`, which are separated by one space; -1 if it is none.
static int word_index(const char *known, const char *name) {
    size_t length = strlen(name);
    for (int index = 0; *known; index++) {
        size_t word = strcspn(known, " ");
        if (word == length && !strncmp(known, name, word)) return index;
        known += word + (known[word] == ' ');
    }
    return -1;
}

// The type of a part of the file as an index into `known`; -1 and an error that names both.
static int read_type(const cJSON *item, const char *part, const char *known, Error *error) {
    const char *type = cJSON_GetStringValue(member(item, "type"));
    if (!type) return fail(error, "%s: type is missing or not a string", part) - 1;
    int index = word_index(known, type);
    if (index < 0) fail(error, "%s of type %.60s, supported are: %s", part, type, known);
    return index;
}

static bool add_step(Tokenizer *t, Chain *chain, Step step, const char *text, Error *error) {
    if (chain->count == MAX_STEPS) {
        pcre2_code_free(step.regex);
        return fail(error, "more than %d steps", MAX_STEPS);
    }
    for (int i = 0; i < chain->count; i++)
        step.fused |= chain->steps[i].kind == FUSE || (chain == &t->decode && chain->steps[i].kind == BYTES);
    if (text) step.length = strlen(text);
    if (text) step.text = keep(t, text, step.length);
    chain->steps[chain->count++] = step;  // the chain owns the regex from here on
    return !text || step.text || out_of_memory(error);
}

static bool add_pattern_step(Tokenizer *t, Chain *chain, Step step, const char *pattern, bool literal, const char *text,
                             Error *error) {
    step.regex = compile(pattern, literal, error);
    return step.regex && add_step(t, chain, step, text, error);
}

// A step that names its own pattern: {"pattern": {"String": ...}} or {"Regex": ...}.
static bool read_pattern_step(Tokenizer *t, Chain *chain, Step step, const cJSON *item, const char *text,
                              Error *error) {
    const cJSON *pattern = member(item, "pattern");
    const char *string = cJSON_GetStringValue(member(pattern, "String"));
    const char *regex = cJSON_GetStringValue(member(pattern, "Regex"));
    if (!string && !regex) return fail(error, "pattern is missing or neither a String nor a Regex");
    return add_pattern_step(t, chain, step, string ? string : regex, string != NULL, text, error);
}

static bool load_normalizer(Tokenizer *t, const cJSON *item, Error *error);
static bool load_pre_tokenizer(Tokenizer *t, const cJSON *item, Error *error);
static bool load_decoder(Tokenizer *t, const cJSON *item, Error *error);

static bool load_sequence(Tokenizer *t, const cJSON *item, const char *key, Error *error,
                          bool (*load)(Tokenizer *, const cJSON *, Error *)) {
    const cJSON *list = member(item, key), *part;
    if (!cJSON_IsArray(list)) return fail(error, "%s is missing or not a list", key);
    cJSON_ArrayForEach(part, list) if (!load(t, part, error)) return false;
    return true;
}

static bool load_normalizer(Tokenizer *t, const cJSON *item, Error *error) {
    enum { SEQUENCE, PUT, CHANGE, CUT, NFC };
    static const int forms[] = {UTF8PROC_COMPOSE, UTF8PROC_DECOMPOSE, UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
                                UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT};
    int type = read_type(item, "normalizer", "Sequence Prepend Replace Strip NFC NFD NFKC NFKD", error);
    const char *text;
    bool left, right;
    if (type < 0) return false;
    if (type == SEQUENCE) return load_sequence(t, item, "normalizers", error, load_normalizer);
    if (type == PUT)
        return read_text(item, "prepend", &text, error) &&
               add_step(t, &t->encode, (Step){.kind = PREPEND, .mode = ALWAYS}, text, error);
    if (type == CHANGE)
        return read_text(item, "content", &text, error) &&
               read_pattern_step(t, &t->encode, (Step){.kind = REPLACE}, item, text, error);
    if (type == CUT)
        return read_bool(item, "strip_left", true, &left, error) &&
               read_bool(item, "strip_right", true, &right, error) &&
               add_step(t, &t->encode, (Step){.kind = STRIP, .mode = left + 2 * right}, NULL, error);
    return add_step(t, &t->encode, (Step){.kind = NORMALIZE, .mode = forms[type - NFC]}, NULL, error);
}

// GPT-2's own pattern is part of the type ByteLevel, so it stands here and not in the file.
static const char GPT2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

static bool load_byte_level(Tokenizer *t, const cJSON *item, Error *error) {
    bool space, regex;
    Step prepend = {.kind = PREPEND, .mode = UNLESS_THERE}, pieces = {.kind = SPLIT, .mode = ISOLATED};
    return read_bool(item, "add_prefix_space", true, &space, error) &&
           read_bool(item, "use_regex", true, &regex, error) &&
           (!space || add_step(t, &t->encode, prepend, " ", error)) &&
           (!regex || add_pattern_step(t, &t->encode, pieces, GPT2, false, NULL, error)) &&
           add_step(t, &t->encode, (Step){.kind = BYTES}, NULL, error);
}

// Metaspace's fields, for both ways. `when` is -1 for "never".
static bool read_metaspace(const cJSON *item, const char **sign, int *when, Error *error) {
    const char *scheme = cJSON_GetStringValue(member(item, "prepend_scheme"));
    bool prefix;
    if (!read_text(item, "replacement", sign, error) || !read_bool(item, "add_prefix_space", true, &prefix, error))
        return false;
    if (is_given(member(item, "prepend_scheme")) && (!scheme || word_index("always first never", scheme) < 0))
        return fail(error, "Metaspace: prepend_scheme is %.60s, expected always, first or never",
                    scheme ? scheme : "?");
    int known = scheme ? word_index("always first never", scheme) : prefix ? 0 : 2;
    *when = known == 0 ? UNLESS_THERE : known == 1 ? AT_TEXT_START : -1;
    return **sign || fail(error, "Metaspace: replacement is empty");
}

static bool load_metaspace(Tokenizer *t, const cJSON *item, Error *error) {
    const char *sign;
    int when;
    bool pieces;
    Step step = {.kind = SPLIT, .mode = MERGED_WITH_NEXT};
    return read_metaspace(item, &sign, &when, error) && read_bool(item, "split", true, &pieces, error) &&
           add_pattern_step(t, &t->encode, (Step){.kind = REPLACE}, " ", true, sign, error) &&
           (when < 0 || add_step(t, &t->encode, (Step){.kind = PREPEND, .mode = when}, sign, error)) &&
           (!pieces || add_pattern_step(t, &t->encode, step, sign, true, NULL, error));
}

static bool load_pre_tokenizer(Tokenizer *t, const cJSON *item, Error *error) {
    enum { SEQUENCE, LEVEL, META, PATTERN, DIGITS, PUNCTUATION, WHITESPACE, WHITESPACE_SPLIT };
    static const char behaviors[] = "Isolated Removed Contiguous MergedWithPrevious MergedWithNext";
    const char *known = "Sequence ByteLevel Metaspace Split Digits Punctuation Whitespace WhitespaceSplit";
    int type = read_type(item, "pre_tokenizer", known, error);
    if (type < 0) return false;
    if (type == SEQUENCE) return load_sequence(t, item, "pretokenizers", error, load_pre_tokenizer);
    if (type == LEVEL) return load_byte_level(t, item, error);
    if (type == META) return load_metaspace(t, item, error);

    Step step = {.kind = SPLIT, .mode = type >= WHITESPACE ? REMOVED : ISOLATED, .invert = type == WHITESPACE};
    const char *behavior = cJSON_GetStringValue(member(item, "behavior"));
    if ((type == PATTERN || type == PUNCTUATION) && is_given(member(item, "behavior"))) {
        step.mode = behavior ? word_index(behaviors, behavior) : -1;
        if (step.mode < 0) return fail(error, "behavior is %.60s, known are: %s", behavior ? behavior : "?", behaviors);
    } else if (type == PATTERN) {
        return fail(error, "Split: behavior is missing, known are: %s", behaviors);
    }
    if (type == PATTERN)
        return read_bool(item, "invert", false, &step.invert, error) &&
               read_pattern_step(t, &t->encode, step, item, NULL, error);
    bool one_by_one;
    if (!read_bool(item, "individual_digits", false, &one_by_one, error)) return false;
    const char *pattern = type == DIGITS        ? one_by_one ? "\\p{N}" : "\\p{N}+"
                          : type == PUNCTUATION ? "[!-/:-@\\[-`{-~\\p{P}]"
                          : type == WHITESPACE  ? "[\\w\\x{200C}\\x{200D}]+|[^\\w\\s\\x{200C}\\x{200D}]+"
                                                : "\\s";
    return add_pattern_step(t, &t->encode, step, pattern, false, NULL, error);
}

static bool load_decoder(Tokenizer *t, const cJSON *item, Error *error) {
    enum { SEQUENCE, LEVEL, META, CHANGE, BYTE_TOKENS, JOINED, CUT };
    const char *text;
    int when, type = read_type(item, "decoder", "Sequence ByteLevel Metaspace Replace ByteFallback Fuse Strip", error);
    Chain *chain = &t->decode;
    if (type < 0) return false;
    if (type == SEQUENCE) return load_sequence(t, item, "decoders", error, load_decoder);
    if (type == META)
        return read_metaspace(item, &text, &when, error) &&
               add_step(t, chain, (Step){.kind = METASPACE, .mode = when >= 0}, text, error);
    if (type == CUT) {
        int start, stop;
        Step step = {.kind = STRIP};
        if (!read_text(item, "content", &text, error) ||
            !read_number(member(item, "start"), "start", 1000, &start, error) ||
            !read_number(member(item, "stop"), "stop", 1000, &stop, error))
            return false;
        if (stop || !*text)
            return fail(error, "decoder Strip: stop %d of \"%.9s\", only start is supported", stop, text);
        step.mode = start;
        return add_step(t, chain, step, text, error);
    }
    Step step = {.kind = type == LEVEL ? BYTES : type == CHANGE ? REPLACE : type == BYTE_TOKENS ? BYTE_FALLBACK : FUSE};
    text = NULL;
    bool ok = type == CHANGE
                  ? read_text(item, "content", &text, error) && read_pattern_step(t, chain, step, item, text, error)
                  : add_step(t, chain, step, NULL, error);
    if (ok && chain->steps[chain->count - 1].fused && type != JOINED)
        return fail(error, "decoder: %s behind Fuse or ByteLevel is not supported", member(item, "type")->valuestring);
    return ok;
}

// Highest id and number of entries of the vocabulary and the added tokens: the size of the tables.
static bool measure_ids(const cJSON *vocab, const cJSON *added, int *highest, size_t *count, Error *error) {
    const cJSON *item;
    int id;
    cJSON_ArrayForEach(item, vocab) {
        if (!read_number(item, item->string, MAX_ID, &id, error)) return false;
        *highest = id > *highest ? id : *highest;
        ++*count;
    }
    cJSON_ArrayForEach(item, added) {
        if (!read_number(member(item, "id"), "an added token's id", MAX_ID, &id, error)) return false;
        *highest = id > *highest ? id : *highest;
        ++*count;
    }
    return true;
}

static size_t power_of_two(size_t at_least) {
    size_t power = 16;
    while (power < at_least) power *= 2;
    return power;
}

static bool load_vocabulary(Tokenizer *t, const cJSON *vocab, const cJSON *added, Error *error) {
    size_t count = 0;
    int highest = -1;
    if (!cJSON_IsObject(vocab) || !vocab->child) return fail(error, "model.vocab is missing, empty or not an object");
    if (is_given(added) && !cJSON_IsArray(added)) return fail(error, "added_tokens is not a list");
    if (!measure_ids(vocab, added, &highest, &count, error)) return false;
    t->size = highest + 1;
    t->token_mask = power_of_two(2 * count) - 1;
    t->tokens = calloc((size_t)t->size, sizeof *t->tokens);
    t->token_slots = malloc((t->token_mask + 1) * sizeof *t->token_slots);
    if (!t->tokens || !t->token_slots) return out_of_memory(error);
    memset(t->token_slots, -1, (t->token_mask + 1) * sizeof *t->token_slots);

    const cJSON *item;
    cJSON_ArrayForEach(item, vocab) {
        size_t length = strlen(item->string);
        Token *token = &t->tokens[item->valueint];
        int *slot = token_slot(t, item->string, length);
        if (token->content)
            return fail(error, "id %d stands for both \"%.40s\" and \"%.40s\"", item->valueint, token->content,
                        item->string);
        if (*slot >= 0) return fail(error, "model.vocab holds \"%.40s\" twice", item->string);
        const char *content = keep(t, item->string, length);
        if (!content) return out_of_memory(error);
        *token = (Token){content, content, (uint32_t)length, IN_MODEL};
        *slot = item->valueint;
    }
    return true;
}

// "a b" or ["a", "b"]; false if it is neither.
static bool read_pair(const cJSON *item, const char **left, size_t *left_length, const char **right) {
    const char *text = cJSON_GetStringValue(item);
    if (text) {
        *left = text;
        *left_length = strcspn(text, " ");
        *right = text[*left_length] ? text + *left_length + 1 : NULL;
        return *right && !strchr(*right, ' ');
    }
    const cJSON *second = cJSON_IsArray(item) && item->child ? item->child->next : NULL;
    *left = second ? cJSON_GetStringValue(item->child) : NULL;
    *right = second && !second->next ? cJSON_GetStringValue(second) : NULL;
    *left_length = *left ? strlen(*left) : 0;
    return *left && *right;
}

static bool load_merges(Tokenizer *t, const cJSON *merges, Error *error) {
    if (!cJSON_IsArray(merges)) return fail(error, "model.merges is missing or not a list");
    t->merge_mask = power_of_two(2 * (size_t)cJSON_GetArraySize(merges)) - 1;
    t->merges = malloc((t->merge_mask + 1) * sizeof *t->merges);
    if (!t->merges) return out_of_memory(error);
    memset(t->merges, -1, (t->merge_mask + 1) * sizeof *t->merges);

    const cJSON *item;
    Bytes whole = {0};
    int rank = 0;
    bool ok = true;
    cJSON_ArrayForEach(item, merges) {
        const char *left, *right;
        size_t left_length;
        ok = read_pair(item, &left, &left_length, &right);
        if (!ok) fail(error, "merge %d is neither \"a b\" nor [\"a\", \"b\"]", rank);
        if (!ok) break;
        whole.length = 0;
        ok = append(&whole, left, left_length) && append(&whole, right, strlen(right));
        if (!ok) out_of_memory(error);
        if (!ok) break;
        int left_id = model_token(t, left, left_length), right_id = model_token(t, right, strlen(right));
        int id = model_token(t, whole.data, whole.length);
        ok = left_id >= 0 && right_id >= 0 && id >= 0;
        if (!ok)
            fail(error, "merge %d, \"%.*s\" and \"%.40s\": model.vocab has no \"%.*s\"", rank, (int)left_length,
                 whole.data, right, (int)(left_id < 0 ? left_length : whole.length),
                 right_id < 0 && left_id >= 0 ? right : whole.data);
        if (!ok) break;
        *merge_slot(t, left_id, right_id) = (Merge){(uint64_t)left_id << 32 | (uint32_t)right_id, rank++, id};
    }
    free(whole.data);
    return ok;
}

static bool load_model(Tokenizer *t, const cJSON *model, const cJSON *added, Error *error) {
    if (!cJSON_IsObject(model)) return fail(error, "model is missing or not an object");
    if (is_given(member(model, "type")) && read_type(model, "model", "BPE", error) < 0) return false;
    const char *unsupported[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++) {
        const cJSON *item = member(model, unsupported[i]);
        if (is_given(item) && !(cJSON_IsString(item) && !*item->valuestring))
            return fail(error, "model.%s is not supported, expected null", unsupported[i]);
    }
    const cJSON *dropout = member(model, "dropout"), *unknown = member(model, "unk_token");
    if (is_given(dropout) && !(cJSON_IsNumber(dropout) && dropout->valuedouble == 0))
        return fail(error, "model.dropout is not supported, expected null");
    bool byte_fallback;
    if (!read_bool(model, "fuse_unk", false, &t->fuse_unknown, error) ||
        !read_bool(model, "byte_fallback", false, &byte_fallback, error) ||
        !read_bool(model, "ignore_merges", false, &t->ignore_merges, error) ||
        !load_vocabulary(t, member(model, "vocab"), added, error) || !load_merges(t, member(model, "merges"), error))
        return false;

    t->unknown = -1;
    if (is_given(unknown)) {
        if (!cJSON_IsString(unknown)) return fail(error, "model.unk_token is not a string");
        t->unknown = model_token(t, unknown->valuestring, strlen(unknown->valuestring));
        if (t->unknown < 0) return fail(error, "model.unk_token %.60s is not in model.vocab", unknown->valuestring);
    }
    for (int code = 0; code < 512; code++) {
        char utf8[2] = {(char)(code < 0x80 ? code : 0xC0 | code >> 6), (char)(0x80 | (code & 0x3F))};
        t->character_ids[code] = model_token(t, utf8, code < 0x80 ? 1 : 2);
    }
    for (int byte = 0; byte < 256; byte++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)byte);
        t->byte_ids[byte] = byte_fallback ? model_token(t, name, 6) : -1;
    }
    return true;
}

// Registers one added token: a token of the model that is also looked for in the text, or one of its own.
static bool load_added_token(Tokenizer *t, const cJSON *item, Error *error) {
    static const struct {
        const char *key;
        uint8_t flag;
    } flags[] = {{"special", SPECIAL},
                 {"lstrip", LEFT_STRIP},
                 {"rstrip", RIGHT_STRIP},
                 {"single_word", SINGLE_WORD},
                 {"normalized", NORMALIZED}};
    const char *content;
    int id = member(item, "id")->valueint;
    if (!read_text(item, "content", &content, error)) return false;
    size_t length = strlen(content);
    if (!length) return true;
    Token *token = &t->tokens[id];
    int *slot = token_slot(t, content, length);
    if (*slot >= 0 && *slot != id)
        return fail(error, "added token \"%.40s\" has id %d here and %d elsewhere", content, id, *slot);
    if (*slot < 0 && token->content)
        return fail(error, "id %d stands for both \"%.40s\" and \"%.40s\"", id, token->content, content);
    if (*slot < 0) token->content = token->shown = keep(t, content, length);
    if (!token->content) return out_of_memory(error);
    *slot = id;
    token->length = (uint32_t)length;
    token->flags = (token->flags & IN_MODEL) | IS_ADDED;
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        bool on;
        if (!read_bool(item, flags[i].key, false, &on, error)) return false;
        if (on) token->flags |= flags[i].flag;
    }
    if (token->flags & SINGLE_WORD && !t->word) t->word = compile("[\\w\\x{200C}\\x{200D}]", false, error);
    return !(token->flags & SINGLE_WORD) || t->word;
}

// What stands in a normalized text where a NORMALIZED token stood: its content, normalized as well.
static bool normalize_added(Tokenizer *t, Token *token, Error *error) {
    Encoder e;
    bool ok = encoder_open(&e, t, token->length, error), at_start = true;
    const char *s = token->content;
    size_t n = token->length;
    for (int i = 1; ok && i < t->encode.count; i++) ok = transform(&e, i, &s, &n, &at_start);
    if (ok) token->shown = keep(t, s, n);
    if (ok && !token->shown) ok = out_of_memory(error);
    encoder_close(&e);
    return ok;
}

static int by_text(const void *a, const void *b) {
    return strcmp(((const Wanted *)a)->text, ((const Wanted *)b)->text);
}

static bool load_added_set(Tokenizer *t, const cJSON *added, int which, Error *error) {
    AddedSet *set = &t->added[which];
    set->wanted = calloc((size_t)cJSON_GetArraySize(added) + 1, sizeof *set->wanted);
    if (!set->wanted) return out_of_memory(error);
    const cJSON *item;
    cJSON_ArrayForEach(item, added) {
        Token *token = &t->tokens[member(item, "id")->valueint];
        if (!token->content || !*member(item, "content")->valuestring) continue;
        if (which != !!(token->flags & NORMALIZED)) continue;
        if (which && !normalize_added(t, token, error)) return false;
        if (!*token->shown) continue;
        set->wanted[set->count++] = (Wanted){token->shown, (int)(token - t->tokens)};
        set->starts[(uint8_t)token->shown[0]] = true;
    }
    qsort(set->wanted, set->count, sizeof *set->wanted, by_text);
    return true;
}

// One list of a template, [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}, ...], around what is there.
static bool load_template(Tokenizer *t, const cJSON *item, Error *error) {
    const cJSON *part, *one, *special = member(item, "special_tokens");
    int before[MAX_AROUND], before_count = 0, texts = 0;
    cJSON_ArrayForEach(part, member(item, "single")) {
        const char *name = cJSON_GetStringValue(member(member(part, "SpecialToken"), "id"));
        const cJSON *ids = name ? member(member(special, name), "ids") : NULL;
        if (member(part, "Sequence"))
            texts++;
        else if (!cJSON_IsArray(ids))
            return fail(error, "TemplateProcessing: a part of single is neither text nor token");
        cJSON_ArrayForEach(one, ids) {
            int id, *count = texts ? &t->after_count : &before_count;
            if (!read_number(one, "TemplateProcessing: id of a special token", t->size - 1, &id, error)) return false;
            if (*count + t->before_count >= MAX_AROUND)
                return fail(error, "TemplateProcessing: more than %d special tokens", MAX_AROUND);
            (texts ? t->after : before)[(*count)++] = id;
        }
    }
    if (texts != 1) return fail(error, "TemplateProcessing: single holds the text %d times, expected once", texts);
    memmove(t->before + before_count, t->before, (size_t)t->before_count * sizeof *t->before);
    memcpy(t->before, before, (size_t)before_count * sizeof *before);
    t->before_count += before_count;
    return true;
}

static bool load_post_processor(Tokenizer *t, const cJSON *item, Error *error) {
    enum { SEQUENCE, TEMPLATE };
    int type = read_type(item, "post_processor", "Sequence TemplateProcessing ByteLevel", error);
    if (type == SEQUENCE) return load_sequence(t, item, "processors", error, load_post_processor);
    return type == TEMPLATE ? load_template(t, item, error) : type >= 0;  // ByteLevel's only moves offsets
}

static bool load_parts(Tokenizer *t, const cJSON *root, Error *error) {
    const cJSON *added = member(root, "added_tokens"), *item, *part;
    if (!cJSON_IsObject(root)) return fail(error, "not an object, expected the tokenizer.json of a checkpoint");
    if (!load_model(t, member(root, "model"), added, error)) return false;
    cJSON_ArrayForEach(item, added) if (!load_added_token(t, item, error)) return false;
    return add_step(t, &t->encode, (Step){.kind = ADDED, .mode = 0}, NULL, error) &&
           (!is_given(part = member(root, "normalizer")) || load_normalizer(t, part, error)) &&
           load_added_set(t, added, 0, error) && load_added_set(t, added, 1, error) &&
           add_step(t, &t->encode, (Step){.kind = ADDED, .mode = 1}, NULL, error) &&
           (!is_given(part = member(root, "pre_tokenizer")) || load_pre_tokenizer(t, part, error)) &&
           (!is_given(part = member(root, "post_processor")) || load_post_processor(t, part, error)) &&
           (is_given(part = member(root, "decoder")) ? load_decoder(t, part, error)
                                                     : add_step(t, &t->decode, (Step){.kind = JOIN}, NULL, error));
}

// What the JSON parser would let pass: text that is not UTF-8, and a NUL, at which it would cut the string.
static bool check_text(const char *json, size_t n, Error *error) {
    size_t valid = utf8_valid(json, n);
    if (valid < n) return fail(error, "byte %zu is not UTF-8", valid);
    for (const char *p = json; (p = memchr(p, '\\', n - (size_t)(p - json))); p += 2) {
        size_t left = n - (size_t)(p - json);
        if (left >= 6 && !memcmp(p, "\\u0000", 6)) return fail(error, "byte %zu: \\u0000 is not supported", n - left);
        if (left < 2) break;
    }
    return true;
}

Tokenizer *tokenizer_parse(const char *json, size_t length, const char *name, char *error_text, size_t error_size) {
    Error error = {name, error_text, error_size};
    if (length > MAX_TEXT) return fail(&error, "%zu bytes, at most 2^28 are read", length), NULL;
    if (!check_text(json, length, &error)) return NULL;
    const char *end = json;
    cJSON *root = cJSON_ParseWithLengthOpts(json, length, &end, false);
    size_t stopped = (size_t)(end - json);
    while (root && stopped < length && strchr(" \t\r\n", json[stopped]) && json[stopped]) stopped++;
    Tokenizer *t = calloc(1, sizeof *t);
    bool ok = root && stopped == length;
    if (!ok) fail(&error, "malformed JSON at byte %zu of %zu", stopped, length);
    if (!t) ok = out_of_memory(&error);
    ok = ok && load_parts(t, root, &error);
    cJSON_Delete(root);
    if (ok) return t;
    tokenizer_free(t);
    return NULL;
}

Tokenizer *tokenizer_load(const char *path, char *error_text, size_t error_size) {
    Error error = {path, error_text, error_size};
    Bytes text = {0};
    FILE *file = fopen(path, "rb");
    if (!file) return fail(&error, "%s", strerror(errno)), NULL;
    bool ok = append(&text, "", 0) || out_of_memory(&error);
    for (size_t got = 1; ok && got;) {
        char *data = reserve(text.data, &text.capacity, text.length + (1 << 16), 1);
        if (!data) ok = out_of_memory(&error);
        if (!data) break;
        text.data = data;
        got = fread(data + text.length, 1, text.capacity - text.length, file);
        text.length += got;
        if (text.length > MAX_TEXT) ok = fail(&error, "larger than 2^28 bytes");
    }
    if (ok && ferror(file)) ok = fail(&error, "%s", strerror(errno));
    fclose(file);
    Tokenizer *t = ok ? tokenizer_parse(text.data, text.length, path, error_text, error_size) : NULL;
    free(text.data);
    return t;
}

void tokenizer_free(Tokenizer *t) {
    if (!t) return;
    for (int i = 0; i < t->encode.count; i++) pcre2_code_free(t->encode.steps[i].regex);
    for (int i = 0; i < t->decode.count; i++) pcre2_code_free(t->decode.steps[i].regex);
    pcre2_code_free(t->word);
    for (Block *block = t->blocks, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    for (int i = 0; i < 2; i++) free(t->added[i].wanted);
    free(t->tokens);
    free(t->token_slots);
    free(t->merges);
    free(t);
}

int tokenizer_size(const Tokenizer *t) { return t->size; }

int tokenizer_find(const Tokenizer *t, const char *token) { return *token_slot(t, token, strlen(token)); }

const char *tokenizer_token(const Tokenizer *t, int id) {
    return id >= 0 && id < t->size ? t->tokens[id].content : NULL;
}

bool tokenizer_is_special(const Tokenizer *t, int id) {
    return id >= 0 && id < t->size && t->tokens[id].flags & SPECIAL;
}
