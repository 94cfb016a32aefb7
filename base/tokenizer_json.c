// Reads tokenizer.json, and what tokenizer_config.json beside it adds, into the tables and steps of tokenizer_json.h.
// What a file has that is not supported is refused by name, never read differently.
#define _POSIX_C_SOURCE 200809L
#include "tokenizer_json.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <utf8proc.h>

#include "python.h"

enum { MAX_ID = (1 << 24) - 1 };

// ---- Errors, memory, files -----------------------------------------------------------------------------------

void fail(Error *error, const char *format, ...) {
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

void *reserve(Error *error, void *data, size_t *capacity, size_t need, size_t item) {
    if (need <= *capacity || error->failed) return data;
    size_t grown = need + need / 2 + 16;
    void *moved = realloc(data, grown * item);
    if (!moved) return fail(error, "out of memory"), data;
    *capacity = grown;
    return moved;
}

void append(Error *error, Bytes *bytes, const char *s, size_t n) {
    bytes->data = reserve(error, bytes->data, &bytes->capacity, bytes->length + n + 1, 1);
    if (error->failed) return;
    if (n) memcpy(bytes->data + bytes->length, s, n);
    bytes->length += n;
    bytes->data[bytes->length] = 0;
}

size_t utf8_valid(const char *s, size_t n) {
    utf8proc_int32_t code;
    for (size_t at = 0; at < n;) {
        const utf8proc_uint8_t *b = (const utf8proc_uint8_t *)s + at;
        utf8proc_ssize_t length = *b < 0x80 ? 1 : utf8proc_iterate(b, (utf8proc_ssize_t)(n - at), &code);
        if (length <= 0) return at;
        at += (size_t)length;
    }
    return n;
}

Bytes read_file(const char *path, Error *error) {
    Bytes text = {0};
    char part[1 << 16];
    struct stat status;
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode))  // opening a FIFO would wait for somebody to write to it
        return fail(error, S_ISDIR(status.st_mode) ? "is a directory, expected a file" : "is not a regular file"), text;
    FILE *file = fopen(path, "rb");
    if (!file) return fail(error, "%s", strerror(errno)), text;
    append(error, &text, "", 0);
    for (size_t got; text.length <= MAX_TEXT && !error->failed && (got = fread(part, 1, sizeof part, file));)
        append(error, &text, part, got);
    if (ferror(file)) fail(error, "%s", strerror(errno));
    fclose(file);
    const char *instead = error->failed ? NULL : instead_of_file(text.data, text.length);
    if (instead) fail(error, "%s", instead);
    return text;
}

// ---- JSON ----------------------------------------------------------------------------------------------------

// cJSON's strings end at their first NUL, so \u0000 is refused. It takes control characters, and \u12g4 as \u0000.
static void check_characters(const Bytes *json, Error *error) {
    const char *s = json->data, *digits = "0123456789abcdefABCDEF";
    bool in_string = false;
    if (json->length > MAX_TEXT) fail(error, "larger than 2^28 bytes");
    size_t n = error->failed ? 0 : json->length, valid = utf8_valid(s, n);
    if (valid < n) fail(error, NOT_UTF8, valid, (unsigned)(uint8_t)s[valid]);
    for (size_t at = 0; at < n && !error->failed; at++) {
        bool control = (uint8_t)s[at] < ' ' && (in_string || !s[at] || !strchr("\t\n\r", s[at]));
        if (s[at] == '"') in_string = !in_string;
        bool escape = s[at] == '\\' && s[++at] == 'u';  // and an escaped quote is passed over
        if (control || (escape && strspn(s + at + 1, digits) < 4)) fail(error, "malformed JSON at byte %zu", at);
        if (escape && !strncmp(s + at, "u0000", 5)) fail(error, "byte %zu: \\u0000 is not supported", at - 1);
    }
}

// The members of an object in an order, an array to free(); of a list none.
static const cJSON **sorted(Error *error, const cJSON *object, int order(const void *, const void *), size_t *count) {
    size_t need = cJSON_IsObject(object) ? (size_t)cJSON_GetArraySize(object) : 0;
    const cJSON *item, **items = reserve(error, NULL, &(size_t){0}, need, sizeof *items);
    *count = 0;
    cJSON_ArrayForEach(item, object) if (items) items[(*count)++] = item;
    if (*count) qsort(items, *count, sizeof *items, order);
    return items;
}

static int by_key(const void *a, const void *b) {
    return strcmp((*(const cJSON *const *)a)->string, (*(const cJSON *const *)b)->string);
}

// A key that stands twice in one object means either to one reader or the other: refused. Of a "vocab" by add_token().
static void check_keys(const cJSON *object, Error *error) {
    size_t count;
    const cJSON *item, **items = sorted(error, object, by_key, &count);
    cJSON_ArrayForEach(item, object) if (!item->string || strcmp(item->string, "vocab")) check_keys(item, error);
    for (size_t i = 1; i < count; i++)
        if (!by_key(&items[i - 1], &items[i]))
            fail(error, "key \"%.60s\" stands twice in one object", items[i]->string);
    free(items);
}

static cJSON *parse(const Bytes *json, Error *error) {
    const char *end = NULL;
    check_characters(json, error);
    cJSON *root = error->failed ? NULL : cJSON_ParseWithLengthOpts(json->data, json->length + 1, &end, true);
    if (!root && !error->failed) fail(error, "malformed JSON at byte %zu", (size_t)(end - json->data));
    if (root && !cJSON_IsObject(root)) fail(error, "is JSON, but not an object");
    check_keys(root, error);
    return root;
}

// A member that is null counts as missing.
static const cJSON *member(const cJSON *object, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsNull(item) ? NULL : item;
}

typedef struct {
    Tokenizer *t;
    Error *error;
    bool has_template;
    int next_id;  // of an added token that the vocabulary does not have
} Loader;

// Reading one value: a member that is missing or of another type is an error and gives "", false, 0 or -1.

static bool read_bool(Loader *l, const cJSON *object, const char *key, bool otherwise) {
    const cJSON *item = member(object, key);
    if (item && !cJSON_IsBool(item)) fail(l->error, "%s is not true or false", key);
    return item ? cJSON_IsTrue(item) : otherwise;
}

static const char *read_text(Loader *l, const cJSON *object, const char *key) {
    const char *text = cJSON_GetStringValue(member(object, key));
    if (!text) fail(l->error, "%s is missing or not a string", key);
    return text ? text : "";
}

static int read_number(Loader *l, const cJSON *item, const char *what, int most) {
    double number = cJSON_IsNumber(item) ? item->valuedouble : -1;
    bool good = number >= 0 && number <= most && number == floor(number);
    if (!cJSON_IsNumber(item)) fail(l->error, "%.80s is missing or not a number", what);
    if (!good) fail(l->error, "%.80s is %g, expected a whole number from 0 to %d", what, number, most);
    return good ? (int)number : 0;
}

// Index of a member's text among the words of `known`, which are separated by one space; -1 and an error if it is none.
static int read_word(Loader *l, const cJSON *object, const char *part, const char *key, const char *known) {
    const char *text = cJSON_GetStringValue(member(object, key)), *word = known;
    if (!text) fail(l->error, "%s: %s is missing or not a string", part, key);
    for (int index = 0; text && *word; index++) {
        size_t length = strcspn(word, " ");
        if (length == strlen(text) && !strncmp(word, text, length)) return index;
        word += length + (word[length] == ' ');
    }
    fail(l->error, "%s of %s %.60s, supported are: %s", part, key, text ? text : "", known);
    return -1;
}

// ---- Vocabulary and merges -------------------------------------------------------------------------------------

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

// A table for `count` entries, at most two thirds full, all bits set: every place is free.
static void *hash_table(Loader *l, size_t count, size_t item, size_t *mask) {
    size_t places = 16;
    while (places < count + count / 2) places *= 2;
    void *table = malloc(places * item);
    if (!table) return fail(l->error, "out of memory"), NULL;
    *mask = places - 1;
    return memset(table, -1, places * item);
}

// Gives this id this content, unless one of them is taken.
static Token *add_token(Loader *l, int id, const char *content) {
    uint32_t length = (uint32_t)strlen(content);
    int *slot = token_slot(l->t, content, length);
    Token *token = &l->t->tokens[id];
    if (*slot >= 0)
        fail(l->error, "\"%.40s\" has both id %d and %d", content, *slot, id);
    else if (token->content)
        fail(l->error, "id %d stands for \"%.40s\" and \"%.40s\"", id, token->content, content);
    if (l->error->failed) return token;
    *slot = id;
    *token = (Token){.content = content, .shown = content, .length = length, .shown_length = length};
    return token;
}

static void load_vocabulary(Loader *l, const cJSON *vocab, const cJSON *added) {
    Tokenizer *t = l->t;
    const cJSON *item;
    if (!cJSON_IsObject(vocab) || !vocab->child) fail(l->error, "model.vocab is missing, empty or not an object");
    if (added && !cJSON_IsArray(added)) fail(l->error, "added_tokens is not a list");
    int highest = 0;
    cJSON_ArrayForEach(item, vocab) highest = (int)fmax(highest, read_number(l, item, item->string, MAX_ID));
    if (l->error->failed) return;
    l->next_id = cJSON_GetArraySize(vocab);
    t->size = (int)fmax(highest + 1, l->next_id) + cJSON_GetArraySize(added);
    size_t count = (size_t)cJSON_GetArraySize(vocab) + (size_t)cJSON_GetArraySize(added);
    t->slots = hash_table(l, count, sizeof *t->slots, &t->slot_mask);
    t->tokens = calloc((size_t)t->size, sizeof *t->tokens);
    if (!t->tokens) fail(l->error, "out of memory");
    cJSON_ArrayForEach(item, vocab) if (!l->error->failed) add_token(l, item->valueint, item->string)->flags = IN_MODEL;
}

// "a b" or ["a", "b"]. `whole` is a buffer for "ab".
static void load_merge(Loader *l, const cJSON *item, int rank, Bytes *whole) {
    const cJSON *list = cJSON_IsArray(item) && cJSON_GetArraySize(item) == 2 ? item->child : NULL;
    const char *a = cJSON_GetStringValue(list ? list : item), *blank = a && !list ? strchr(a, ' ') : NULL;
    const char *b = list ? cJSON_GetStringValue(list->next) : blank ? blank + 1 : NULL;
    if (!a || !b || (blank && strchr(b, ' ')))
        return fail(l->error, "merge %d is neither \"a b\" nor [\"a\", \"b\"]", rank);
    const size_t left = blank ? (size_t)(blank - a) : strlen(a), right = strlen(b);
    whole->length = 0;
    append(l->error, whole, a, left);
    append(l->error, whole, b, right);
    if (l->error->failed) return;
    const char *texts[] = {a, b, whole->data};
    const size_t lengths[] = {left, right, left + right};
    int ids[3];
    for (int i = 0; i < 3; i++) {
        ids[i] = model_token(l->t, texts[i], lengths[i]);
        if (ids[i] < 0)
            return fail(l->error, "merge %d, \"%.*s\" and \"%.40s\": model.vocab has no \"%.*s\"", rank, (int)left, a,
                        b, (int)lengths[i], texts[i]);
    }
    *merge_slot(l->t, ids[0], ids[1]) = (Merge){(uint64_t)ids[0] << 32 | (uint32_t)ids[1], rank, ids[2]};
}

static void load_merges(Loader *l, const cJSON *merges) {
    if (!cJSON_IsArray(merges)) return fail(l->error, "model.merges is missing or not a list");
    Bytes whole = {0};
    int rank = 0;
    const cJSON *item;
    l->t->merges = hash_table(l, (size_t)cJSON_GetArraySize(merges), sizeof(Merge), &l->t->merge_mask);
    cJSON_ArrayForEach(item, merges) if (!l->error->failed) load_merge(l, item, rank++, &whole);
    free(whole.data);
}

// Ids that encoding asks for again and again.
static void load_shortcuts(Loader *l, const char *unknown, bool byte_fallback) {
    Tokenizer *t = l->t;
    t->unknown = unknown ? model_token(t, unknown, strlen(unknown)) : -1;
    if (unknown && t->unknown < 0) fail(l->error, "model.unk_token %.60s is not in model.vocab", unknown);
    for (int code = 0; code < 512; code++) {
        utf8proc_uint8_t utf8[4];
        t->character_ids[code] = model_token(t, (char *)utf8, (size_t)utf8proc_encode_char(code, utf8));
    }
    for (int byte = 0; byte < 256; byte++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)byte);
        t->byte_ids[byte] = byte_fallback ? model_token(t, name, 6) : -1;
    }
}

static void load_model(Loader *l, cJSON *model, const cJSON *added) {
    static const char *const unsupported[] = {"continuing_subword_prefix", "end_of_word_suffix", "dropout"};
    if (!cJSON_IsObject(model)) return fail(l->error, "model is missing or not an object");
    if (member(model, "type")) read_word(l, model, "model", "type", "BPE");
    for (int i = 0; i < 3; i++) {
        const cJSON *item = member(model, unsupported[i]);
        bool off = cJSON_IsString(item) ? !*item->valuestring : cJSON_IsNumber(item) && item->valuedouble == 0;
        if (item && !off) fail(l->error, "model.%s is not supported, expected null", unsupported[i]);
    }
    const char *unknown = member(model, "unk_token") ? read_text(l, model, "unk_token") : NULL;
    bool byte_fallback = read_bool(l, model, "byte_fallback", false);
    l->t->fuse_unknown = read_bool(l, model, "fuse_unk", false);
    l->t->ignore_merges = read_bool(l, model, "ignore_merges", false);
    load_vocabulary(l, member(model, "vocab"), added);
    if (!l->error->failed) load_merges(l, member(model, "merges"));
    if (!l->error->failed) load_shortcuts(l, unknown, byte_fallback);
    cJSON_DeleteItemFromObjectCaseSensitive(model, "merges");  // most of the file, and no longer needed
}

static const char *const FLAGS[] = {"special", "lstrip", "rstrip", "single_word", "normalized"};

// One added token: a token of the model that is also looked for in the text, or one of its own. The library numbers
// those on from the size of the vocabulary, whatever id the file gives; where the two differ nobody can be right.
static void load_added_token(Loader *l, const cJSON *item) {
    const char *content = read_text(l, item, "content");
    const cJSON *given = cJSON_GetObjectItemCaseSensitive(item, "id");
    if (!*content || l->error->failed) return;
    int known = *token_slot(l->t, content, strlen(content)), id = known >= 0 ? known : l->next_id++;
    if (given && read_number(l, given, "an added token's id", MAX_ID) != id)
        fail(l->error, "added token \"%.60s\" has id %d, expected %d: ids of added tokens go on from the vocabulary's",
             content, given->valueint, id);
    Token *token = &l->t->tokens[id];
    if (known < 0) token = add_token(l, id, content);
    token->flags = (uint8_t)((token->flags & (IN_MODEL | SPECIAL)) | LOOKED_FOR);  // once special, always special
    for (int i = 0; i < 5; i++) token->flags |= read_bool(l, item, FLAGS[i], false) ? SPECIAL << i : 0;
}

// ---- Steps -----------------------------------------------------------------------------------------------------

// Oniguruma before 6.9.9 leaves nine of ASCII's symbols out of [:punct:], which the library's has.
static Bytes with_symbols(Error *error, const char *pattern) {
    const char *any = "[[:punct:]$+<=>\\^`|~]", *none = "[^[:punct:]$+<=>\\^`|~]";
    Bytes out = {0};
    for (size_t taken; *pattern; pattern += taken) {
        const char *meant = !strncmp(pattern, "[:punct:]", 9) ? any : !strncmp(pattern, "[:^punct:]", 10) ? none : NULL;
        taken = meant == any ? 9 : meant ? 10 : *pattern == '\\' && pattern[1] ? 2 : 1;  // \[:punct:] is none of them
        append(error, &out, meant ? meant : pattern, meant ? strlen(meant) : taken);
    }
    return out;
}

// A pattern ready to match; NULL on failure. The `tokenizers` library has Oniguruma, too: it means the same there.
static regex_t *compile(Loader *l, const char *pattern, bool literal) {
    OnigEncoding utf8 = ONIG_ENCODING_UTF8;
    OnigErrorInfo info;
    regex_t *regex = NULL;
    if (l->error->failed) return NULL;
    Bytes text = with_symbols(l->error, literal ? "" : pattern);
    const UChar *start = (const UChar *)(literal || !text.data ? pattern : text.data);
    onig_initialize(&utf8, 1);
    int code = onig_new(&regex, start, start + strlen((const char *)start), ONIG_OPTION_NONE, utf8,
                        literal ? ONIG_SYNTAX_ASIS : ONIG_SYNTAX_DEFAULT, &info);
    UChar why[ONIG_MAX_ERROR_MESSAGE_LEN] = "";
    if (code != ONIG_NORMAL) onig_error_code_to_str(why, code, &info);  // which may quote the pattern
    free(text.data);
    if (code == ONIG_NORMAL) return regex;
    fail(l->error, "pattern %.60s: %s", pattern, (char *)why);
    return NULL;
}

// The pattern of a step: {"pattern": {"String": ...}} or {"Regex": ...}.
static regex_t *read_pattern(Loader *l, const cJSON *item) {
    const cJSON *pattern = member(item, "pattern");
    const char *string = cJSON_GetStringValue(member(pattern, "String"));
    const char *regex = cJSON_GetStringValue(member(pattern, "Regex"));
    if (!string && !regex) fail(l->error, "pattern is missing or neither a String nor a Regex");
    return compile(l, string ? string : regex, string != NULL);
}

// Appends a step; from here on the chain owns its pattern.
static void add_step(Loader *l, Chain *chain, Step step, const char *text) {
    if (chain->count == MAX_STEPS) {
        onig_free(step.regex);
        return fail(l->error, "more than %d steps", MAX_STEPS);
    }
    for (int i = 0; chain == &l->t->decode && i < chain->count; i++)
        step.fused |= chain->steps[i].kind == FUSE || chain->steps[i].kind == BYTES;
    step.length = strlen(text);
    step.text = text;
    chain->steps[chain->count++] = step;
}

static void load_sequence(Loader *l, const cJSON *item, const char *key, void (*load)(Loader *, const cJSON *)) {
    const cJSON *list = member(item, key), *part;
    if (!cJSON_IsArray(list)) fail(l->error, "%s is missing or not a list", key);
    cJSON_ArrayForEach(part, list) if (!l->error->failed) load(l, part);
}

static void load_normalizer(Loader *l, const cJSON *item) {
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

static void load_byte_level(Loader *l, const cJSON *item) {
    Chain *chain = &l->t->encode;
    if (read_bool(l, item, "add_prefix_space", true))
        add_step(l, chain, (Step){.kind = PREPEND, .mode = UNLESS_THERE}, " ");
    if (read_bool(l, item, "use_regex", true))
        add_step(l, chain, (Step){.kind = SPLIT, .mode = ISOLATED, .regex = compile(l, GPT2, false)}, "");
    add_step(l, chain, (Step){.kind = BYTES}, "");
}

// Metaspace's sign and when it is put before a text, for both ways.
static const char *read_metaspace(Loader *l, const cJSON *item, When *when) {
    const char *sign = read_text(l, item, "replacement");
    if (!*sign) fail(l->error, "Metaspace: replacement is empty");
    *when = read_bool(l, item, "add_prefix_space", true) ? UNLESS_THERE : NEVER;
    if (member(item, "prepend_scheme"))
        *when = (When)read_word(l, item, "Metaspace", "prepend_scheme", "always first never");
    return sign;
}

static void load_metaspace(Loader *l, const cJSON *item) {
    Chain *chain = &l->t->encode;
    When when;
    const char *sign = read_metaspace(l, item, &when);
    for (int i = 0; i < chain->count && when == AT_TEXT_START; i++)  // the library tells the start by where bytes were
        if (chain->steps[i].kind != ADDED && chain->steps[i].kind != SPLIT && chain->steps[i].kind != STRIP)
            fail(l->error, "Metaspace: prepend_scheme first behind a step that changes characters is not supported");
    add_step(l, chain, (Step){.kind = REPLACE, .regex = compile(l, " ", true)}, sign);
    if (when != NEVER) add_step(l, chain, (Step){.kind = PREPEND, .mode = when}, sign);
    if (read_bool(l, item, "split", true))
        add_step(l, chain, (Step){.kind = SPLIT, .mode = MERGED_WITH_NEXT, .regex = compile(l, sign, true)}, "");
}

static void load_pre_tokenizer(Loader *l, const cJSON *item) {
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
        step.regex = compile(l, read_bool(l, item, "individual_digits", false) ? "\\p{N}" : "\\p{N}+", false);
    if (type == PATTERN || type == DIGITS) add_step(l, &l->t->encode, step, "");
}

static void load_decoder(Loader *l, const cJSON *item) {
    enum { SEQUENCE, BYTE_LEVEL, META, REPLACING, BYTE_TOKENS, FUSING, STRIPPING };
    static const Kind kinds[] = {JOIN, BYTES, REPLACE, REPLACE, BYTE_FALLBACK, FUSE, STRIP};
    Chain *chain = &l->t->decode;
    When when;
    int type = read_word(l, item, "decoder", "type", "Sequence ByteLevel Metaspace Replace ByteFallback Fuse Strip");
    if (type == SEQUENCE) load_sequence(l, item, "decoders", load_decoder);
    if (type <= SEQUENCE) return;
    Step step = {.kind = kinds[type]};
    const char *text = type == META ? " " : "";
    if (type == META) step.regex = compile(l, read_metaspace(l, item, &when), true), step.mode = when != NEVER;
    if (type == REPLACING || type == STRIPPING) text = read_text(l, item, "content");
    if (type == REPLACING) step.regex = read_pattern(l, item);
    if (type == STRIPPING) {
        step.mode = read_number(l, member(item, "start"), "decoder Strip: start", 1000);
        read_number(l, member(item, "stop"), "decoder Strip: stop", 0);
        if (!*text) fail(l->error, "decoder Strip: content is empty");
    }
    add_step(l, chain, step, text);
    if (chain->steps[chain->count - 1].fused && type != FUSING && type != STRIPPING)
        fail(l->error, "decoder %s behind Fuse or ByteLevel is not supported", read_text(l, item, "type"));
}

// ---- What stands around a text ---------------------------------------------------------------------------------

// A template: [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}, ...]
static void load_template(Loader *l, const cJSON *item) {
    Tokenizer *t = l->t;
    const cJSON *special = member(item, "special_tokens"), *part, *one;
    int texts = 0;
    if (l->has_template) fail(l->error, "more than one TemplateProcessing");
    l->has_template = true;
    cJSON_ArrayForEach(part, member(item, "single")) {
        const char *name = cJSON_GetStringValue(member(member(part, "SpecialToken"), "id"));
        const cJSON *ids = member(member(special, name), "ids");
        bool is_text = member(part, "Sequence");
        texts += is_text;
        if (!is_text && !cJSON_IsArray(ids))
            fail(l->error, "TemplateProcessing: a part of single is neither text nor known token");
        cJSON_ArrayForEach(one, ids) {
            int id = read_number(l, one, "TemplateProcessing: id of a special token", t->size - 1);
            int *count = texts ? &t->after_count : &t->before_count;
            if (!t->tokens[id].content) fail(l->error, "TemplateProcessing: id %d stands for no token", id);
            if (*count == MAX_AROUND) fail(l->error, "TemplateProcessing: more than %d special tokens", MAX_AROUND);
            if (!l->error->failed) (texts ? t->after : t->before)[(*count)++] = id;
        }
    }
    if (texts != 1) fail(l->error, "TemplateProcessing: single holds the text %d times, expected once", texts);
}

static void load_post_processor(Loader *l, const cJSON *item) {
    enum { SEQUENCE, TEMPLATE };  // ByteLevel's only moves offsets
    int type = read_word(l, item, "post_processor", "type", "Sequence TemplateProcessing ByteLevel");
    if (type == SEQUENCE) load_sequence(l, item, "processors", load_post_processor);
    if (type == TEMPLATE) load_template(l, item);
}

// ---- Tokens that stand beside tokenizer.json -------------------------------------------------------------------
// As Transformers 5.24 reads them (PreTrainedTokenizerFast): first added_tokens_decoder, or without it
// added_tokens.json, each in the order of ids; then the named ones (eos_token and whatever ends in _token); then the
// list of extra ones.
// add_bos_token says nothing where there is a tokenizer.json: only a template puts BOS before a text.

// The object in a file beside tokenizer.json, or NULL where there is none. A link that leads nowhere is no such file.
static cJSON *read_beside(Loader *l, const char *config, const char *name) {
    char path[5000];
    struct stat status;
    const char *slash = strrchr(config, '/');
    snprintf(path, sizeof path, "%.*s%s", slash ? (int)(slash + 1 - config) : 0, config, name);
    if (l->error->failed || lstat(path, &status) != 0) return NULL;
    Error *error = l->error, here = {path, error->text, error->size, false};
    Bytes text = read_file(path, &here);
    replace_python_numbers(text.data, text.length, "1e9");  // a number that is no id
    cJSON *object = parse(&text, &here);
    free(text.data);
    error->failed = here.failed;
    return object;
}

// tokenizer_config.json. Where it numbers no added tokens, those that special_tokens_map.json names go before its own.
static cJSON *read_settings(Loader *l, const char *path) {
    cJSON *config = read_beside(l, path, "tokenizer_config.json"), *item;
    if (member(config, "added_tokens_decoder")) return config;
    cJSON *map = read_beside(l, path, "special_tokens_map.json");
    if (!config) return map;
    while (!l->error->failed && (item = cJSON_DetachItemFromArray(map, 0))) {
        cJSON_DeleteItemFromObjectCaseSensitive(config, item->string);
        cJSON_AddItemToObject(config, item->string, item);
    }
    cJSON_Delete(map);
    return config;
}

static const char *content_of(const cJSON *token) {
    return cJSON_GetStringValue(cJSON_IsObject(token) ? member(token, "content") : token);
}

static bool same_text(const cJSON *token, const char *content) {
    return content_of(token) && !strcmp(content_of(token), content);
}

static bool holds_text(const cJSON *tokens, const char *content) {
    const cJSON *item;
    cJSON_ArrayForEach(item, tokens) if (same_text(item, content)) return true;
    return false;
}

// "eos_token": "</s>" in the settings.
static bool names_token(const cJSON *item) {
    size_t n = strlen(item->string);
    return n > 6 && !strcmp(item->string + n - 6, "_token") && content_of(item);
}

static bool is_named(const cJSON *config, const char *content) {
    const cJSON *item, *extra = member(config, "extra_special_tokens");  // as an object it gives names, too
    cJSON_ArrayForEach(item, config) if (names_token(item) && same_text(item, content)) return true;
    return cJSON_IsObject(extra) && holds_text(extra, content);
}

// Puts a token, {"content": ..., flags} or a text, which means a special one, behind tokenizer.json's added ones. `id`:
// of one that has a number: it may give a token that is there other flags. One without is none of the first `limit`.
static void name_token(Loader *l, cJSON *added, const cJSON *token, const char *id, int limit, bool special) {
    const char *content = content_of(token);
    cJSON *item;
    if (!content) return fail(l->error, "a token beside it is neither a string nor has a content");
    bool known = false, same = true, marked = cJSON_IsObject(token) ? cJSON_IsTrue(member(token, "special")) : true;
    int index = 0;
    cJSON_ArrayForEach(item, added) {
        if (index++ >= limit || !same_text(item, content)) continue;
        known = true;
        for (int i = 0; i < 5; i++)
            same = same && cJSON_IsTrue(member(item, FLAGS[i])) == cJSON_IsTrue(member(token, FLAGS[i]));
    }
    if (known && (same || !id)) return;
    item = cJSON_CreateObject();
    cJSON_AddStringToObject(item, "content", content);
    cJSON_AddBoolToObject(item, FLAGS[0], marked || special);
    for (int i = 1; i < 5; i++) {
        const cJSON *flag = member(token, FLAGS[i]);
        cJSON_AddBoolToObject(item, FLAGS[i], i == 4 && !flag ? !marked : cJSON_IsTrue(flag));
    }
    if (id && !known) cJSON_AddNumberToObject(item, "id", atoi(id));
    cJSON_AddItemToArray(added, item);
}

static int by_id(const void *a, const void *b) {
    int left = atoi((*(const cJSON *const *)a)->string), right = atoi((*(const cJSON *const *)b)->string);
    return left < right ? -1 : left > right;
}

// added_tokens.json, {"<x>": 14}, as added_tokens_decoder would have it: {"14": token, ...}.
static cJSON *numbered_of(Loader *l, const cJSON *added, const cJSON *more, const cJSON *config, const cJSON *extra) {
    cJSON *numbered = cJSON_CreateObject();
    const cJSON *item, *other;
    cJSON_ArrayForEach(item, more) {
        char id[12];
        if (holds_text(added, item->string)) continue;
        bool special = is_named(config, item->string);
        snprintf(id, sizeof id, "%d", read_number(l, item, item->string, MAX_ID));
        cJSON_ArrayForEach(other, extra) special = special || (cJSON_IsString(other) && same_text(other, item->string));
        cJSON *token = cJSON_AddObjectToObject(numbered, id);
        cJSON_AddStringToObject(token, "content", item->string);
        cJSON_AddBoolToObject(token, "special", special);
    }
    return numbered;
}

static void name_tokens(Loader *l, cJSON *added, const cJSON *config, const cJSON *more) {
    static const char *const first[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                        "pad_token", "cls_token", "mask_token"};
    const cJSON *item, *extra = member(config, "extra_special_tokens");
    const cJSON *decoder = member(config, "added_tokens_decoder");
    if (!extra || !extra->child) extra = member(config, "additional_special_tokens");
    if (decoder && !cJSON_IsObject(decoder)) fail(l->error, "added_tokens_decoder beside it is not an object");
    cJSON *one, *numbered = decoder ? NULL : numbered_of(l, added, more, config, extra);
    size_t count;
    const cJSON **items = sorted(l->error, decoder ? decoder : numbered, by_id, &count);
    for (size_t i = 0; i < count; i++) name_token(l, added, items[i], items[i]->string, INT_MAX, false);
    free(items);
    cJSON_Delete(numbered);
    const int limit = cJSON_GetArraySize(added);
    cJSON_ArrayForEach(one, added) {  // a named one is special, whatever its number says
        const char *content = content_of(one);
        if (content && is_named(config, content) && (!decoder || holds_text(decoder, content)))
            cJSON_DeleteItemFromObjectCaseSensitive(one, FLAGS[0]), cJSON_AddTrueToObject(one, FLAGS[0]);
    }
    for (int i = 0; i < 7; i++)
        if (member(config, first[i])) name_token(l, added, member(config, first[i]), NULL, limit, true);
    cJSON_ArrayForEach(item, config) if (names_token(item)) name_token(l, added, item, NULL, limit, true);
    const bool names = cJSON_IsObject(extra);  // {"image": "<image>"}, as image_token would
    cJSON_ArrayForEach(item, extra) name_token(l, added, item, NULL, names ? limit : INT_MAX, names);
}

// ---- All of it -------------------------------------------------------------------------------------------------

static void load_part(Loader *l, const cJSON *root, const char *name, void (*load)(Loader *, const cJSON *)) {
    if (member(root, name) && !l->error->failed) load(l, member(root, name));
}

static void load_parts(Loader *l, cJSON *root, const char *config_path) {
    cJSON *config = config_path ? read_settings(l, config_path) : NULL;
    cJSON *more = config_path ? read_beside(l, config_path, "added_tokens.json") : NULL;
    cJSON *added = cJSON_GetObjectItemCaseSensitive(root, "added_tokens"), *token;
    if (cJSON_IsNull(added)) cJSON_DeleteItemFromObjectCaseSensitive(root, "added_tokens"), added = NULL;
    if (!added) added = cJSON_AddArrayToObject(root, "added_tokens");
    cJSON_ArrayForEach(token, added) read_number(l, member(token, "id"), "an added token's id", MAX_ID);
    if (cJSON_IsArray(added) && !l->error->failed) name_tokens(l, added, config, more);
    load_model(l, cJSON_GetObjectItemCaseSensitive(root, "model"), added);
    cJSON_ArrayForEach(token, added) if (!l->error->failed) load_added_token(l, token);
    while (!l->error->failed && !l->t->tokens[l->t->size - 1].content) l->t->size--;
    const char *end = content_of(member(config, "eos_token"));
    l->t->end = end && !l->error->failed ? *token_slot(l->t, end, strlen(end)) : -1;
    cJSON_Delete(config);
    cJSON_Delete(more);
    add_step(l, &l->t->encode, (Step){.kind = ADDED, .mode = 0}, "");
    load_part(l, root, "normalizer", load_normalizer);
    add_step(l, &l->t->encode, (Step){.kind = ADDED, .mode = 1}, "");
    load_part(l, root, "pre_tokenizer", load_pre_tokenizer);
    load_part(l, root, "post_processor", load_post_processor);
    load_part(l, root, "decoder", load_decoder);
    if (!member(root, "decoder")) add_step(l, &l->t->decode, (Step){.kind = JOIN}, "");
}

Tokenizer *read_tokenizer(const Bytes *json, const char *config, Error *error) {
    Loader l = {.t = calloc(1, sizeof *l.t), .error = error};
    if (!l.t) return fail(error, "out of memory"), NULL;
    l.t->json = parse(json, error);
    if (!error->failed) load_parts(&l, l.t->json, config);
    if (!error->failed) return l.t;
    tokenizer_free(l.t);
    return NULL;
}

void tokenizer_free(Tokenizer *t) {
    if (!t) return;
    for (int i = 0; i < t->encode.count; i++) onig_free(t->encode.steps[i].regex);
    for (int i = 0; i < t->decode.count; i++) onig_free(t->decode.steps[i].regex);
    for (int id = 0; t->tokens && id < t->size; id++)
        if (t->tokens[id].shown != t->tokens[id].content) free((char *)t->tokens[id].shown);
    for (int i = 0; i < 2; i++) free(t->added[i].tokens);
    free(t->tokens);
    free(t->slots);
    free(t->merges);
    cJSON_Delete(t->json);
    free(t);
}
