// Text <-> token ids: characters, pattern matching, merging, the steps before the merging; then ids back to text.
// base/tokenizer_json.h has the tables and the lists of steps that are used here. With GPT-2's:
//   ADDED      "the sea"            no added token in it, such as <|endoftext|>
//   SPLIT      "the", " sea"        words by a pattern
//   BYTES      "the", "Ġsea"        each byte as a printable character
//   merging    t h e -> the         pairs in the order of the list of merges
#include "base/tokenizer_json.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

// An Error is sticky: the first failure is kept, and everything called after it does nothing.
typedef struct {
    char *text;  // (size): one line
    size_t size;
    bool failed;
} Error;

static void fail(Error *error, const char *format, ...) {
    if (error->failed) return;
    error->failed = true;
    va_list arguments;
    va_start(arguments, format);
    if (error->size) vsnprintf(error->text, error->size, format, arguments);
    va_end(arguments);
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
    char *data;  // (length), and a NUL after them
    size_t length, capacity;
} Bytes;

static void append(Error *error, Bytes *bytes, const char *s, size_t n) {
    bytes->data = reserve(error, bytes->data, &bytes->capacity, bytes->length + n + 1, 1);
    if (error->failed) return;
    if (n) memcpy(bytes->data + bytes->length, s, n);
    bytes->length += n;
    bytes->data[bytes->length] = 0;
}

static const size_t MAX_GROWN = (size_t)1 << 30;  // bytes that a text may grow to

// ---- Characters --------------------------------------------------------------------------------------------

// Length of the UTF-8 character at s (1 to 4); 0 if the text ends within it; -k if the first k bytes are none and
// become one U+FFFD (the longest start of a character, Unicode 15.0, §3.9, "maximal subpart").
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

// Returns the code point of the valid character at s; *length is its bytes.
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
    return ONIGENC_IS_CODE_SPACE(ONIG_ENCODING_UTF8, code_point(s, &length)) ? length : 0;
}

// Whether the character at s belongs to a word (UTS 18, annex C: Alphabetic, marks, digits, connectors, joiners).
static bool is_word(const char *s) {
    size_t length;
    int c = code_point(s, &length);
    utf8proc_category_t category = utf8proc_category(c);
    return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_NL) || category == UTF8PROC_CATEGORY_PC ||
           c == 0x200C || c == 0x200D ||
           (category == UTF8PROC_CATEGORY_SO && ONIGENC_IS_CODE_ALPHA(ONIG_ENCODING_UTF8, c));  // letters in circles
}

// Byte-level BPE writes each byte as a printable character (Radford et al. 2019, GPT-2): the printable ones of
// Latin-1 as themselves, the other 68 as U+0100 onwards. Space becomes "Ġ".
static int byte_character(int byte) {
    if ((byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE) return byte;
    return 256 + (byte <= 32 ? byte : byte <= 0xA0 ? byte - 127 + 33 : 67);
}

static int character_byte(int code) {  // -1: it is no byte's character
    if (code == 256 + 67) return 0xAD;
    if (code >= 256 && code < 256 + 67) return code <= 256 + 32 ? code - 256 : code - 256 - 33 + 127;
    return code < 256 && byte_character(code) == code ? code : -1;
}

size_t utf8_valid(const char *s, size_t n) {
    size_t at = 0;
    for (int length; at < n && (length = utf8_length(s + at, n - at)) > 0;) at += (size_t)length;
    return at;
}

// ---- Matching ----------------------------------------------------------------------------------------------

// What matching needs in addition to a pattern; one for each text or stream.
typedef struct {
    Error *error;
    size_t limit;  // bytes that a text may grow to
    OnigRegion *region;
    OnigMatchParam *param;
} Matcher;

// Opens a matcher for texts of n bytes, which may grow 64-fold. A match that backtracks too often is stopped as in the
// library, at Oniguruma's own limit of 10^7. A search has no limit: `\s+$` starts again at each of many blanks.
static void matcher_open(Matcher *matcher, size_t n, Error *error) {
    matcher->error = error;
    matcher->limit = 64 * n + (1 << 20) < MAX_GROWN ? 64 * n + (1 << 20) : MAX_GROWN;
    matcher->region = onig_region_new();
    matcher->param = onig_new_match_param();
    if (!matcher->region || !matcher->param) return fail(error, "out of memory");
    onig_initialize_match_param(matcher->param);
    onig_set_match_stack_limit_size_of_match_param(matcher->param, 1 << 23);  // entries of 40 bytes
}

static void matcher_close(Matcher *matcher) {
    if (matcher->region) onig_region_free(matcher->region, 1);
    if (matcher->param) onig_free_match_param(matcher->param);
}

// A match, and where the search for the next one goes on. An empty match right after the last match is ignored.
typedef struct {
    size_t start, end, from, last_end;
} Match;
static const Match FIRST_MATCH = {0, 0, 0, SIZE_MAX};

static bool next_match(Matcher *matcher, regex_t *regex, const char *s, size_t n, Match *match) {
    const UChar *text = (const UChar *)s;
    while (match->from <= n && !matcher->error->failed) {
        int found = onig_search_with_param(regex, text, text + n, text + match->from, text + n, matcher->region,
                                           ONIG_OPTION_NONE, matcher->param);
        if (found == ONIG_MISMATCH) return false;
        size_t start = found < 0 ? 0 : (size_t)matcher->region->beg[0];
        size_t end = found < 0 ? 0 : (size_t)matcher->region->end[0];
        UChar why[ONIG_MAX_ERROR_MESSAGE_LEN] = "a match that goes back";  // \K can do that
        if (found < 0) onig_error_code_to_str(why, found);
        if (found < 0 || start < match->from || end < start)
            return fail(matcher->error, "a pattern of the tokenizer on this text: %s", (char *)why), false;
        match->from = end;
        if (start != end || end != match->last_end) {
            match->start = start;
            match->end = match->last_end = end;
            return true;
        }
        size_t length = 1;
        if (end < n) code_point(s + end, &length);
        match->from += length;
    }
    return false;
}

// Appends s to `out`, with the step's text in place of each match of its pattern.
static void replace(Matcher *matcher, const Step *step, const char *s, size_t n, Bytes *out) {
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
    Bytes scratch[MAX_STEPS];  // a step's output, while the steps after it work on it
    Symbol *symbols;
    uint64_t *heap;  // candidates: rank << 32 | index of the left symbol; lowest rank, then leftmost, on top
    size_t symbol_capacity, heap_capacity, heap_count;
    int *ids;  // (count): the result
    size_t count, capacity;
    const char *text, *typed;  // (length): the whole text, and where a special token was typed; NULL: nowhere
    size_t length, seen[2];    // for each AddedSet: where the search for its next special token starts in the text
} Encoder;

static void push_id(Encoder *e, int id) {
    e->ids = reserve(e->error, e->ids, &e->capacity, e->count + 1, sizeof *e->ids);
    if (!e->error->failed) e->ids[e->count++] = id;
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

// Adds the merge of symbol `left` and its right neighbour, if there is one, to the candidates.
static void offer(Encoder *e, int left) {
    if (left < 0 || e->symbols[left].next < 0) return;
    const Merge *merge = merge_slot(e->tokenizer, e->symbols[left].id, e->symbols[e->symbols[left].next].id);
    if (merge->pair != UINT64_MAX) heap_push(e, (uint64_t)merge->rank << 32 | (uint32_t)left);
}

static void push_symbol(Encoder *e, int *count, int id) {
    e->symbols[*count] = (Symbol){id, *count - 1, *count + 1};
    ++*count;
}

// Makes the symbols that a word starts from, linked from left to right, and returns how many. A character gives one, or
// one a byte if it has no token but all of its bytes have, or else the unknown token. That one waits for the next
// character with a token, so it comes after the bytes between them, as in the `tokenizers` library.
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

// Byte-pair encoding (Sennrich et al. 2016, §3.2) of one word: merges the neighbours with the lowest rank until
// no merge is left. A heap of candidates over a linked list of symbols takes n log n, however long the word. A
// candidate is stale if one of its symbols was merged meanwhile: the pair then has another rank.
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

typedef struct {
    size_t start, end;
    bool match;
} Piece;

static void give_piece(Encoder *e, int step, const char *s, Piece piece, bool at_start) {
    bool removed = piece.match && e->tokenizer->encode.steps[step].mode == REMOVED;
    if (!removed) run(e, step + 1, s + piece.start, piece.end - piece.start, at_start && piece.start == 0);
}

// Cuts a text before and after each match. A piece waits until it is known whether the next one is joined to it.
static void split(Encoder *e, int step, const char *s, size_t n, bool at_start) {
    const Step *split = &e->tokenizer->encode.steps[step];
    Match match = FIRST_MATCH;
    Piece waiting = {0};
    for (bool more = true; more;) {
        size_t done = match.end;
        more = next_match(&e->matcher, split->regex, s, n, &match);
        Piece pieces[] = {{done, more ? match.start : n, split->invert}, {match.start, match.end, !split->invert}};
        for (int i = pieces[0].start == pieces[0].end; i < (more ? 2 : 1); i++) {
            bool join = (split->mode == CONTIGUOUS && waiting.match == pieces[i].match) ||
                        (split->mode == MERGED_WITH_PREVIOUS && !waiting.match && pieces[i].match) ||
                        (split->mode == MERGED_WITH_NEXT && waiting.match && !pieces[i].match);
            if (!join) give_piece(e, step, s, waiting, at_start);
            if (join) pieces[i].start = waiting.start;
            waiting = pieces[i];
        }
    }
    give_piece(e, step, s, waiting, at_start);
}

static int by_number(const void *a, const void *b) {
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return left < right ? -1 : left > right;
}

// Unicode normalization (UAX 15): decompose, sort each run of combining marks by class, compose. utf8proc has one call
// for it, too, but that sorts in quadratic time.
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
    utf8proc_int32_t *codes = reserve(error, NULL, &(size_t){0}, count + 1, sizeof *codes);
    for (size_t i = 0; i < count && !error->failed; i++) codes[i] = (utf8proc_int32_t)(marked[i] & 0xFFFFFF);
    if (!error->failed) count = (size_t)utf8proc_reencode(codes, (utf8proc_ssize_t)count, step->mode | UTF8PROC_STABLE);
    append(error, out, (const char *)codes, count);  // composed, and as UTF-8
    free(marked);
    free(codes);
}

static void write_bytes(const char *s, size_t n, Bytes *out, Error *error) {
    out->data = reserve(error, out->data, &out->capacity, 2 * n, 1);
    for (size_t i = 0; i < n && !error->failed; i++) {
        utf8proc_uint8_t *end = (utf8proc_uint8_t *)out->data + out->length;
        out->length += (size_t)utf8proc_encode_char(byte_character((uint8_t)s[i]), end);
    }
}

// Runs a step from one text to one text: *s and *n become its output. *at_start: whether it still starts where the
// whole text does.
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

// Returns the first of the added tokens [low, high) whose byte at `at` is `byte` or above; `high` if there is none.
static size_t first_added(const AddedSet *set, size_t low, size_t high, size_t at, int byte) {
    while (low < high) {
        size_t middle = (low + high) / 2;
        bool below = (uint8_t)set->tokens[middle]->shown[at] < byte;
        low = below ? middle + 1 : low, high = below ? high : middle;
    }
    return low;
}

// Moves *from to the first added token there or later, and returns the longest at that place; NULL if there is none.
// Sorted, the tokens that begin like the text are neighbours, [low, high), the shortest first; each byte leaves fewer.
static const Token *find_added(const AddedSet *set, const char *s, size_t n, size_t *from) {
    const Token *found = NULL;
    for (; *from < n && !found; *from += !found) {
        size_t low = 0, high = set->starts[(uint8_t)s[*from]] ? set->count : 0;
        for (size_t at = 0; low < high && *from + at < n; at++) {
            low = first_added(set, low, high, at, (uint8_t)s[*from + at]);
            high = first_added(set, low, high, at, (uint8_t)s[*from + at] + 1);
            for (; low < high && set->tokens[low]->shown_length == at + 1; low++) found = set->tokens[low];
        }
    }
    return found;
}

// Whether a user typed this special token, or a model wrote it: then it is text. In a normalized text its place differs
// from the whole text's, but the special tokens are the same, in the same order.
static bool is_typed(Encoder *e, const Token *token, int set) {
    if (!e->typed) return false;
    size_t at = e->seen[set];
    while (at + token->length <= e->length && memcmp(e->text + at, token->content, token->length)) at++;
    if (at + token->length > e->length) return false;
    e->seen[set] = at + 1;
    return e->typed[at];
}

// Adds the ids of added tokens, and takes the text between them through the next steps.
static void take_added(Encoder *e, int step, const char *s, size_t n, bool at_start) {
    const int mode = e->tokenizer->encode.steps[step].mode;
    const AddedSet *set = &e->tokenizer->added[mode];
    const Token *token;
    size_t done = 0, next;
    for (size_t from = 0; (token = find_added(set, s, n, &from)); from = next) {
        int flags = token->flags;
        size_t start = from, end = next = from + token->shown_length;
        if (flags & SPECIAL && is_typed(e, token, mode)) {
            next = from + 1;
            continue;
        }
        if (flags & SINGLE_WORD && start && is_word(s + previous(s, start))) continue;
        if (flags & SINGLE_WORD && end < n && is_word(s + end)) continue;
        while (flags & LEFT_STRIP && start > done && space_length(s + previous(s, start))) start = previous(s, start);
        while (flags & RIGHT_STRIP && end < n && space_length(s + end)) end += space_length(s + end);
        if (flags & LEFT_STRIP && done >= end) continue;  // all of it went with the token before
        if (start > done) run(e, step + 1, s + done, start - done, at_start && done == 0);
        push_id(e, (int)(token - e->tokenizer->tokens));
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

char *normalized_text(const Tokenizer *t, const char *s, size_t *n, char *error_text, size_t error_size) {
    Error error = {error_text, error_size, false};
    Encoder e;
    Bytes text = {0};
    bool at_start = true;
    encoder_open(&e, t, *n, &error);
    for (int i = 1; t->encode.steps[i].kind != ADDED && !error.failed; i++) transform(&e, i, &s, n, &at_start);
    append(&error, &text, s, *n);
    encoder_close(&e);
    if (!error.failed) return text.data;
    free(text.data);
    return NULL;
}

int tokenizer_encode(const Tokenizer *t, const char *text, size_t length, const char *typed, bool add_special,
                     int **ids, char *error_text, size_t error_size) {
    Error error = {error_text, error_size, false};
    Encoder e;
    *ids = NULL;
    if (length > MAX_TEXT) return fail(&error, "text of %zu bytes, at most 2^28 are taken at once", length), -1;
    size_t valid = utf8_valid(text, length);
    if (valid < length)
        return fail(&error, NOT_UTF8, valid, (unsigned)(uint8_t)text[valid]), -1;
    encoder_open(&e, t, length, &error);
    e.text = text, e.length = length, e.typed = typed;
    e.ids = reserve(&error, NULL, &e.capacity, 1, sizeof *e.ids);  // so that *ids is an array even for no ids
    for (int i = 0; add_special && i < t->before_count; i++) push_id(&e, t->before[i]);
    run(&e, 0, text, length, true);
    for (int i = 0; add_special && i < t->after_count; i++) push_id(&e, t->after[i]);
    encoder_close(&e);
    if (!error.failed) return *ids = e.ids, (int)e.count;
    free(e.ids);
    return -1;
}

// ---- Decoding ----------------------------------------------------------------------------------------------

struct TokenizerStream {
    const Tokenizer *tokenizer;
    bool skip_special;
    Error error;
    Matcher matcher;
    Bytes scratch[MAX_STEPS];  // REPLACE: a step's output · BYTES, BYTE_FALLBACK: bytes of no whole character yet
    size_t seen[MAX_STEPS];    // STRIP: characters so far · REPLACE, JOIN: tokens so far
    Bytes out;
};

static const char REPLACEMENT[] = "\xEF\xBF\xBD";  // U+FFFD

static void show(TokenizerStream *stream, int index, const char *s, size_t n);

// Passes on the whole characters that `bytes` starts with, and U+FFFD for each stretch that is none. The start of a
// character stays until its other bytes come, unless this is the end.
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

// Byte-level: passes on the bytes of the token's characters, or, if one has no byte, the token as it is.
static void show_bytes(TokenizerStream *stream, int index, const char *s, size_t n) {
    Bytes *bytes = &stream->scratch[index];
    size_t before = bytes->length;
    for (size_t at = 0, length; at < n; at += length) {
        int byte = character_byte(code_point(s + at, &length));
        append(&stream->error, bytes, &(char){(char)byte}, 1);
        if (byte >= 0) continue;
        bytes->length = before;
        append(&stream->error, bytes, s, n);
        break;
    }
    show_characters(stream, index + 1, bytes, false);
}

// Ends a run of byte tokens: it is text if it is UTF-8, else U+FFFD for each byte.
static void show_run(TokenizerStream *stream, int index) {
    Bytes *bytes = &stream->scratch[index];
    bool valid = bytes->length && utf8_valid(bytes->data, bytes->length) == bytes->length;
    if (valid) show(stream, index + 1, bytes->data, bytes->length);
    for (size_t i = 0; !valid && i < bytes->length; i++) show(stream, index + 1, REPLACEMENT, 3);
    bytes->length = 0;
}

static void show_byte_token(TokenizerStream *stream, int index, const char *s, size_t n) {
    if (n == 6 && !memcmp(s, "<0x", 3) && isxdigit((uint8_t)s[3]) && isxdigit((uint8_t)s[4]) && s[5] == '>') {
        char byte = (char)strtol(s + 3, NULL, 16);
        append(&stream->error, &stream->scratch[index], &byte, 1);
    } else {
        show_run(stream, index);
        show(stream, index + 1, s, n);
    }
}

// Drops the step's text up to `mode` times from the start of each token, or of the text if it comes in parts.
static void show_stripped(TokenizerStream *stream, int index, const char *s, size_t n) {
    const Step *step = &stream->tokenizer->decode.steps[index];
    size_t seen = step->fused ? stream->seen[index] : 0;
    for (; seen < (size_t)step->mode && n >= step->length && !memcmp(s, step->text, step->length); seen++)
        s += step->length, n -= step->length;
    stream->seen[index] = n ? (size_t)step->mode : seen;
    show(stream, index + 1, s, n);
}

// Takes one token, or after FUSE and BYTES a part of the text, through the decoder's steps from `index` on.
static void show(TokenizerStream *stream, int index, const char *s, size_t n) {
    const Chain *chain = &stream->tokenizer->decode;
    if (stream->error.failed) return;
    if (index == chain->count) return append(&stream->error, &stream->out, s, n);
    const Step *step = &chain->steps[index];
    Bytes *out = &stream->scratch[index];
    if (step->kind == BYTES) return show_bytes(stream, index, s, n);
    if (step->kind == BYTE_FALLBACK) return show_byte_token(stream, index, s, n);
    if (step->kind == STRIP) return show_stripped(stream, index, s, n);
    if (step->kind == REPLACE) {
        Step replacing = *step;
        if (step->mode && stream->seen[index]++ == 0) replacing.length = 0;
        out->length = 0;
        replace(&stream->matcher, &replacing, s, n, out);
        return show(stream, index + 1, out->data, out->length);
    }
    if (step->kind == JOIN && stream->seen[index]++) show(stream, index + 1, " ", 1);  // between tokens
    show(stream, index + 1, s, n);  // FUSE changes only the steps after it: Step.fused
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
    // The library skips a token that is spelled like a special one; a special one's normalized form may not be.
    int as = token && stream->skip_special ? *token_slot(t, token->shown, token->shown_length) : -1;
    if (token && !tokenizer_is_special(t, as)) show(stream, 0, token->shown, token->shown_length);
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

// ---- Tables ------------------------------------------------------------------------------------------------

int *token_slot(const Tokenizer *t, const char *s, size_t n) {
    uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a, its bits mixed once more
    for (size_t i = 0; i < n; i++) hash = (hash ^ (uint8_t)s[i]) * 0x100000001B3u;
    for (size_t at = (hash * 0x9E3779B97F4A7C15u) >> 32;; at++) {
        int *slot = &t->slots[at & t->slot_mask];
        const Token *token = &t->tokens[*slot < 0 ? 0 : *slot];
        if (*slot < 0 || (token->length == n && !memcmp(token->content, s, n))) return slot;
    }
}

int model_token(const Tokenizer *t, const char *s, size_t n) {
    int id = *token_slot(t, s, n);
    return id >= 0 && t->tokens[id].flags & IN_MODEL ? id : -1;
}

Merge *merge_slot(const Tokenizer *t, int left, int right) {
    uint64_t pair = (uint64_t)left << 32 | (uint32_t)right;
    for (size_t at = (size_t)((pair * 0x9E3779B97F4A7C15u) >> 20);; at++) {
        Merge *merge = &t->merges[at & t->merge_mask];
        if (merge->pair == pair || merge->pair == UINT64_MAX) return merge;
    }
}

int tokenizer_size(const Tokenizer *t) { return t->size; }

int tokenizer_before(const Tokenizer *t) { return t->before_count; }

int tokenizer_end(const Tokenizer *t) { return t->end; }

int tokenizer_find(const Tokenizer *t, const char *token) { return *token_slot(t, token, strlen(token)); }

const char *tokenizer_token(const Tokenizer *t, int id) {
    return id >= 0 && id < t->size ? t->tokens[id].content : NULL;
}

bool tokenizer_is_special(const Tokenizer *t, int id) {
    return tokenizer_token(t, id) && t->tokens[id].flags & SPECIAL;
}
