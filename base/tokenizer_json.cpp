// Reads tokenizer.json, and what the files next to it add, into the tables and steps of tokenizer_json.h. What a file
// has that is not supported is refused by name, never read differently.
#include "tokenizer_json.h"

#include <utf8proc.h>

#include <array>
#include <deque>
#include <map>

#include "json.h"

namespace {

constexpr int max_id = (1 << 24) - 1;

// A tokenizer, and what its pointers point to.
struct Loaded : Tokenizer {
    std::deque<std::string> texts;
    std::vector<Token> all_tokens;
    std::vector<int> all_slots;
    std::vector<Merge> all_merges;
    std::vector<const Token *> looked_for[2];
    std::vector<std::unique_ptr<regex_t, decltype(&onig_free)>> patterns;
    std::string name;  // of the file, for messages
    bool has_template = false;
    int next_id = 0;  // of an added token that the vocabulary does not have
    Loaded() : Tokenizer() {}
    const std::string &keep(const std::string &text) { return texts.emplace_back(text); }
};

// ---- Reading one value ---------------------------------------------------------------------------------------------

// The beginning of a text, for a message.
std::string shown(const std::string &text) {
    size_t n = std::min(text.size(), (size_t)60);
    while (n > 0 && n < text.size() && (text[n] & 0xC0) == 0x80) n--;
    return text.substr(0, n);
}

const std::string &need_text(const Section &part, const char *key) {
    const Json *item = part.need(key);
    if (!is_text(item)) part.refuse(key, item, "a text");
    return item->text;
}

std::vector<const Json *> need_list(const Section &part, const char *key) {
    const Json *list = part.need(key);
    if (!is_list(list)) part.refuse(key, list, "a list");
    return items_of(list);
}

// Index of a key's text among the `known` words, which have a blank between them.
int need_word(const Section &part, const char *key, const std::string &known) {
    const std::vector<std::string> words = split(known);
    part.require_known(key, need_text(part, key), known);
    return (int)(std::find(words.begin(), words.end(), need_text(part, key)) - words.begin());
}

// ---- Vocabulary and merges -----------------------------------------------------------------------------------------

// Places of a hash table for `count` entries: at most two thirds are taken.
size_t places_for(size_t count) {
    size_t places = 16;
    while (places < count + count / 2) places *= 2;
    return places;
}

int id_of(const Loaded &t, const std::string &content) { return *token_slot(&t, content.data(), content.size()); }
int model_id(const Loaded &t, const std::string &content) { return model_token(&t, content.data(), content.size()); }

// Gives this id this content, which has none yet.
Token &add_token(Loaded &t, const Section &from, int id, const std::string &content) {
    Token &token = t.all_tokens[(size_t)id];
    if (token.content)
        fail("%s: id %d stands for \"%s\" and \"%s\"", from.name.c_str(), id, shown(token.content).c_str(),
             shown(content).c_str());
    const char *kept = t.keep(content).c_str();
    const uint32_t length = (uint32_t)content.size();
    *token_slot(&t, kept, length) = id;
    return token = {kept, kept, length, length, 0};
}

// With places for `more` tokens than it has.
void load_vocabulary(Loaded &t, const Section &model, size_t more) {
    const Section vocab = {model.name + ".vocab", model.find("vocab")};
    if (!is_object(vocab.object) || !count_of(vocab.object))
        fail("%s is missing, empty or not an object", vocab.name.c_str());
    int highest = t.next_id = count_of(vocab.object);
    for (const Json &item : vocab.object->items) {
        if (!is_whole(&item, 0, max_id))
            vocab.refuse(shown(item.key).c_str(), &item, formatted("a whole number from 0 to %d", max_id));
        highest = std::max(highest, (int)item.number + 1);
    }
    t.all_tokens.resize((size_t)highest + more);
    t.all_slots.assign(places_for(vocab.object->items.size() + more), -1);
    t.tokens = t.all_tokens.data(), t.size = (int)t.all_tokens.size();
    t.slots = t.all_slots.data(), t.slot_mask = t.all_slots.size() - 1;
    for (const Json &item : vocab.object->items) add_token(t, vocab, (int)item.number, item.key).flags = IN_MODEL;
}

// "a b" or ["a", "b"]
void load_merge(Loaded &t, const Section &model, const Json &item, int rank) {
    const std::vector<Json> &list = item.items;
    const bool pair = is_list(&item) && list.size() == 2 && is_text(&list[0]) && is_text(&list[1]);
    const size_t blank = item.text.find(' ');
    if (!pair && (blank == std::string::npos || item.text.find(' ', blank + 1) != std::string::npos))
        fail("%s: merge %d is neither \"a b\" nor [\"a\", \"b\"]", model.name.c_str(), rank);
    const std::string a = pair ? list[0].text : item.text.substr(0, blank);
    const std::string b = pair ? list[1].text : item.text.substr(blank + 1), whole = a + b;
    int ids[3], *id = ids;
    for (const std::string *text : {&a, &b, &whole})
        if ((*id++ = model_id(t, *text)) < 0)
            fail("%s: merge %d, \"%s\" and \"%s\": vocab has no \"%s\"", model.name.c_str(), rank, shown(a).c_str(),
                 shown(b).c_str(), shown(*text).c_str());
    *merge_slot(&t, ids[0], ids[1]) = {(uint64_t)ids[0] << 32 | (uint32_t)ids[1], rank, ids[2]};
}

void load_model(Loaded &t, const Section &root, size_t more) {
    root.need("model");
    const Section model = root.section("model");
    if (model.find("type")) need_word(model, "type", "BPE");
    for (const char *key : {"continuing_subword_prefix", "end_of_word_suffix", "dropout"})
        if (!is_neutral(model.find(key), 0)) model.refuse(key, model.find(key), "null");
    t.fuse_unknown = model.flag("fuse_unk", false);
    t.ignore_merges = model.flag("ignore_merges", false);
    load_vocabulary(t, model, more);
    const std::vector<const Json *> merges = need_list(model, "merges");
    t.all_merges.assign(places_for(merges.size()), {UINT64_MAX, -1, -1});
    t.merges = t.all_merges.data(), t.merge_mask = t.all_merges.size() - 1;
    for (size_t rank = 0; rank < merges.size(); rank++) load_merge(t, model, *merges[rank], (int)rank);

    // Ids that encoding asks for again and again.
    const std::string unknown = model.text("unk_token", "");
    t.unknown = model.find("unk_token") ? model_id(t, unknown) : -1;
    if (model.find("unk_token") && t.unknown < 0)
        fail("%s: unk_token %s is not in vocab", model.name.c_str(), shown(unknown).c_str());
    for (int code = 0; code < 512; code++) {
        utf8proc_uint8_t utf8[4];
        t.character_ids[code] = model_token(&t, (char *)utf8, (size_t)utf8proc_encode_char(code, utf8));
    }
    const bool byte_fallback = model.flag("byte_fallback", false);
    for (int byte = 0; byte < 256; byte++)
        t.byte_ids[byte] = byte_fallback ? model_id(t, formatted("<0x%02X>", (unsigned)byte)) : -1;
}

// ---- Steps ---------------------------------------------------------------------------------------------------------

// Oniguruma before 6.9.9 leaves nine of ASCII's symbols out of [:punct:], which the library's has.
std::string with_symbols(const std::string &pattern) {
    std::string out;
    for (size_t at = 0, taken; at < pattern.size(); at += taken) {
        const bool any = pattern.compare(at, 9, "[:punct:]") == 0, none = pattern.compare(at, 10, "[:^punct:]") == 0;
        taken = any ? 9 : none ? 10 : pattern[at] == '\\' ? 2 : 1;  // \[:punct:] is none of them
        out += any || none ? std::string(none ? "[^" : "[") + "[:punct:]$+<=>\\^`|~]" : pattern.substr(at, taken);
    }
    return out;
}

// A pattern ready to match. The `tokenizers` library has Oniguruma, too: it means the same there.
regex_t *compile(Loaded &t, const std::string &pattern, bool literal) {
    const std::string text = literal ? pattern : with_symbols(pattern);
    const OnigUChar *start = (const OnigUChar *)text.c_str();
    OnigEncoding utf8 = ONIG_ENCODING_UTF8;
    OnigErrorInfo info;
    regex_t *regex = nullptr;
    onig_initialize(&utf8, 1);
    const int code = onig_new(&regex, start, start + text.size(), ONIG_OPTION_NONE, utf8,
                              literal ? ONIG_SYNTAX_ASIS : ONIG_SYNTAX_DEFAULT, &info);
    OnigUChar why[ONIG_MAX_ERROR_MESSAGE_LEN] = "";
    if (code != ONIG_NORMAL) {
        onig_error_code_to_str(why, code, &info);  // which may quote the pattern
        fail("%s: pattern %s: %s", t.name.c_str(), shown(pattern).c_str(), printable((const char *)why).c_str());
    }
    t.patterns.push_back({regex, onig_free});
    return regex;
}

// The pattern of a step: {"pattern": {"String": ...}} or {"Regex": ...}.
regex_t *read_pattern(Loaded &t, const Section &part) {
    part.need("pattern");
    const Section pattern = part.section("pattern");
    const bool literal = pattern.find("String");
    return compile(t, need_text(pattern, literal ? "String" : "Regex"), literal);
}

Step &add_step(Loaded &t, Chain &chain, Kind kind, int mode = 0, const std::string &text = "",
               regex_t *regex = nullptr) {
    if (chain.count == MAX_STEPS) fail("%s: more than %d steps", t.name.c_str(), MAX_STEPS);
    bool fused = false;
    for (int i = 0; &chain == &t.decode && i < chain.count; i++)
        fused = fused || chain.steps[i].kind == FUSE || chain.steps[i].kind == BYTES;
    return chain.steps[chain.count++] = {kind, mode, false, fused, regex, t.keep(text).c_str(), text.size()};
}

using Load = void (*)(Loaded &, const Section &);
void load_sequence(Loaded &t, const Section &part, const char *key, Load load) {
    for (const Json *item : need_list(part, key)) load(t, {part.name, item});
}

void load_normalizer(Loaded &t, const Section &part) {
    enum { SEQUENCE, PREPENDING, REPLACING, STRIPPING, NFC };
    const int c = UTF8PROC_COMPOSE, d = UTF8PROC_DECOMPOSE, k = UTF8PROC_COMPAT, forms[] = {c, d, c | k, d | k};
    const int type = need_word(part, "type", "Sequence Prepend Replace Strip NFC NFD NFKC NFKD");
    if (type == SEQUENCE) load_sequence(t, part, "normalizers", load_normalizer);
    if (type == PREPENDING) add_step(t, t.encode, PREPEND, ALWAYS, need_text(part, "prepend"));
    if (type == REPLACING)
        add_step(t, t.encode, REPLACE, 0, need_text(part, "content"), read_pattern(t, part));
    if (type == STRIPPING)
        add_step(t, t.encode, STRIP, part.flag("strip_left", true) + 2 * part.flag("strip_right", true));
    if (type >= NFC) add_step(t, t.encode, NORMALIZE, forms[type - NFC]);
}

// GPT-2's own pattern is part of the type ByteLevel, so it is here and not in the file.
const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

void load_byte_level(Loaded &t, const Section &part) {
    if (part.flag("add_prefix_space", true)) add_step(t, t.encode, PREPEND, UNLESS_THERE, " ");
    if (part.flag("use_regex", true))
        add_step(t, t.encode, SPLIT, ISOLATED, "", compile(t, gpt2, false));
    add_step(t, t.encode, BYTES);
}

// Metaspace's sign, and when it is put before a text, for both ways.
std::pair<std::string, When> read_metaspace(const Section &part) {
    const std::string &sign = need_text(part, "replacement");
    if (sign.empty()) fail("%s: Metaspace: replacement is empty", part.name.c_str());
    const bool scheme = part.find("prepend_scheme");
    constexpr When schemes[] = {UNLESS_THERE, AT_TEXT_START, NEVER};
    if (scheme) return {sign, schemes[need_word(part, "prepend_scheme", "always first never")]};
    return {sign, part.flag("add_prefix_space", true) ? UNLESS_THERE : NEVER};
}

void load_metaspace(Loaded &t, const Section &part) {
    const auto [sign, when] = read_metaspace(part);
    // The library tells the start by where bytes were.
    for (int i = 0; i < t.encode.count && when == AT_TEXT_START; i++) {
        const Kind kind = t.encode.steps[i].kind;
        if (kind != ADDED && kind != SPLIT && kind != STRIP)
            fail("%s: prepend_scheme first after a step that changes characters is not supported", part.name.c_str());
    }
    add_step(t, t.encode, REPLACE, 0, sign, compile(t, " ", true));
    if (when != NEVER) add_step(t, t.encode, PREPEND, when, sign);
    if (part.flag("split", true))
        add_step(t, t.encode, SPLIT, MERGED_WITH_NEXT, "", compile(t, sign, true));
}

void load_pre_tokenizer(Loaded &t, const Section &part) {
    enum { SEQUENCE, BYTE_LEVEL, META, PATTERN, DIGITS };
    const int type = need_word(part, "type", "Sequence ByteLevel Metaspace Split Digits");
    if (type == SEQUENCE) load_sequence(t, part, "pretokenizers", load_pre_tokenizer);
    if (type == BYTE_LEVEL) load_byte_level(t, part);
    if (type == META) load_metaspace(t, part);
    if (type == PATTERN) {
        const int mode = need_word(part, "behavior", "Isolated Removed Contiguous MergedWithPrevious MergedWithNext");
        add_step(t, t.encode, SPLIT, mode, "", read_pattern(t, part)).invert = part.flag("invert", false);
    }
    if (type == DIGITS) {
        regex_t *digits = compile(t, part.flag("individual_digits", false) ? "\\p{N}" : "\\p{N}+", false);
        add_step(t, t.encode, SPLIT, ISOLATED, "", digits);
    }
}

void load_decoder(Loaded &t, const Section &part) {
    enum { SEQUENCE, BYTE_LEVEL, META, REPLACING, BYTE_TOKENS, FUSING, STRIPPING };
    constexpr Kind kinds[] = {JOIN, BYTES, REPLACE, REPLACE, BYTE_FALLBACK, FUSE, STRIP};
    const int type = need_word(part, "type", "Sequence ByteLevel Metaspace Replace ByteFallback Fuse Strip");
    if (type == SEQUENCE) return load_sequence(t, part, "decoders", load_decoder);
    std::string text = type == META ? " " : "";
    if (type == REPLACING || type == STRIPPING) text = need_text(part, "content");
    Step &step = add_step(t, t.decode, kinds[type], 0, text);
    if (type == REPLACING) step.regex = read_pattern(t, part);
    if (type == META) {
        const auto [sign, when] = read_metaspace(part);
        step.regex = compile(t, sign, true), step.mode = when != NEVER;
    }
    if (type == STRIPPING) {
        step.mode = part.integer("start", 0, 1000), part.integer("stop", 0, 0);
        if (!step.length) fail("%s: Strip: content is empty", part.name.c_str());
    }
    if (step.fused && type != FUSING && type != STRIPPING)
        fail("%s: %s after Fuse or ByteLevel is not supported", part.name.c_str(), need_text(part, "type").c_str());
}

// A template: [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}, ...]. ByteLevel only moves offsets.
void load_post_processor(Loaded &t, const Section &part) {
    enum { SEQUENCE, TEMPLATE };
    const int type = need_word(part, "type", "Sequence TemplateProcessing ByteLevel");
    if (type == SEQUENCE) load_sequence(t, part, "processors", load_post_processor);
    if (type != TEMPLATE) return;
    const char *name = part.name.c_str();
    const Section special = part.section("special_tokens");
    int texts = 0;
    if (t.has_template) fail("%s: more than one TemplateProcessing", name);
    t.has_template = true;
    for (const Json *item : items_of(part.find("single"))) {
        const Section one = {part.name + ": single", item};
        if (one.find("Sequence") && ++texts) continue;
        const std::string id = one.section("SpecialToken").text("id", "");
        const Json *ids = member(member(special.object, id), "ids");
        if (!is_list(ids)) fail("%s: a part of single is neither text nor known token", name);
        for (const Json *each : items_of(ids)) {
            int &count = texts ? t.after_count : t.before_count;
            if (!is_whole(each, 0, t.size - 1))
                special.refuse("an id", each, formatted("a whole number from 0 to %d", t.size - 1));
            if (!t.tokens[(int)each->number].content) fail("%s: id %g stands for no token", name, each->number);
            if (count == MAX_AROUND) fail("%s: more than %d special tokens", name, MAX_AROUND);
            (texts ? t.after : t.before)[count++] = (int)each->number;
        }
    }
    if (texts != 1) fail("%s: single holds the text %d times, expected once", name, texts);
}

// ---- Added tokens --------------------------------------------------------------------------------------------------

const char *const flag_names[] = {"special", "lstrip", "rstrip", "single_word", "normalized"};
using Flags = std::array<bool, 5>;

struct Added {
    std::string content;
    Flags flags;
    int id;  // -1: none is given
};

std::vector<Added> read_added(const Section &root) {
    std::vector<Added> added;
    if (!root.find("added_tokens")) return added;
    for (const Json *item : need_list(root, "added_tokens")) {
        const Section token = {root.name + ": an added token", item};
        const int id = token.integer("id", 0, max_id);
        Flags flags;
        for (size_t i = 0; i < flags.size(); i++) flags[i] = token.flag(flag_names[i], false);
        added.push_back({need_text(token, "content"), flags, id});
    }
    return added;
}

// ---- Added tokens that files next to tokenizer.json name -----------------------------------------------------------
// As Transformers 5.24 reads them (PreTrainedTokenizerFast): first added_tokens_decoder, or without it
// added_tokens.json, each in the order of ids; then the named ones (eos_token and all that end in _token); then the
// list of extra ones. add_bos_token changes nothing: next to a tokenizer.json only a template puts BOS before a text.

// The object in a file next to the config, or null where there is none.
Json read_beside(const std::string &config, const char *name) {
    const std::string path = config.substr(0, config.rfind('/') + 1) + name;
    return file_exists(path) ? parse_json(path, read_file(path, MAX_TEXT), /*as_python=*/true, MAX_TEXT) : Json();
}

// tokenizer_config.json. Where it numbers no added tokens, those that special_tokens_map.json names go before its own.
Json read_settings(const std::string &path) {
    Json config = read_beside(path, "tokenizer_config.json");
    config.type = Json::Type::object;
    if (Section{path, &config}.find("added_tokens_decoder")) return config;
    for (Json &item : read_beside(path, "special_tokens_map.json").items) {
        auto same = [&](const Json &other) { return other.key == item.key; };
        config.items.erase(std::remove_if(config.items.begin(), config.items.end(), same), config.items.end());
        config.items.push_back(std::move(item));
    }
    return config;
}

// A token is a text or {"content": text, flags}; nullptr: it is neither.
const std::string *content_of(const Json *token) {
    const Json *content = is_object(token) ? member(token, "content") : token;
    return is_text(content) ? &content->text : nullptr;
}

// "eos_token": "</s>" in the settings.
bool names_token(const Json &item) {
    const size_t n = item.key.size();
    return n > 6 && item.key.compare(n - 6, 6, "_token") == 0 && content_of(&item);
}

struct Named {
    std::string content;
    Flags flags = {};
    bool special = true, says_normalized = false;  // a text means a special token
};

Named read_token(const Loaded &t, const Json *token) {
    const std::string *content = content_of(token);
    if (!content) fail("%s: a token next to it is neither a string nor has a content", t.name.c_str());
    Named one{*content};
    for (size_t i = 0; i < one.flags.size(); i++) {
        const Json *flag = member(token, flag_names[i]);
        one.flags[i] = is_bool(flag) && flag->number != 0;
    }
    one.says_normalized = Section{"", token}.find("normalized");
    one.special = !is_object(token) || one.flags[0];
    return one;
}

// Appends a token. One with an id may give a token that is there other flags; one without, -1, is none of the first
// `limit`.
void name_token(std::vector<Added> &added, const Named &token, int id, size_t limit, bool special) {
    bool known = false, same = true;
    for (size_t i = 0; i < std::min(limit, added.size()); i++)
        if (added[i].content == token.content) known = true, same = same && added[i].flags == token.flags;
    if (known && (same || id < 0)) return;
    Added one{token.content, token.flags, known ? -1 : id};
    one.flags[0] = token.special || special;
    if (!token.says_normalized) one.flags[4] = !token.special;
    added.push_back(one);
}

// `more`: added_tokens.json, {"<x>": 14}. added_tokens_decoder in the config, {"14": token}, goes before it.
void name_tokens(const Loaded &t, std::vector<Added> &added, const Json &config, const Json &more) {
    const Section settings = {t.name, &config};
    const Json *extra = settings.find("extra_special_tokens"), *decoder = settings.find("added_tokens_decoder");
    const bool gives_names = is_object(extra) && count_of(extra);  // {"image": "<image>"}, as image_token would
    std::set<std::string> named, decoded, known;
    for (const Json &item : config.items)
        if (names_token(item)) named.insert(*content_of(&item));
    if (!count_of(extra)) extra = settings.find("additional_special_tokens");
    for (const Json *item : items_of(extra))
        if (gives_names && content_of(item)) named.insert(*content_of(item));

    std::multimap<int, Named> numbered;
    if (decoder && !is_object(decoder)) fail("%s: added_tokens_decoder next to it is not an object", t.name.c_str());
    for (const Json *item : items_of(decoder)) {
        const Named token = numbered.insert({atoi(item->key.c_str()), read_token(t, item)})->second;
        decoded.insert(token.content);
    }
    for (const Added &one : added) known.insert(one.content);
    for (const Json *item : items_of(decoder ? nullptr : &more)) {
        if (known.count(item->key)) continue;
        if (!is_whole(item, 0, max_id)) settings.refuse(shown(item->key).c_str(), item, "an id");
        bool special = named.count(item->key);
        for (const Json *other : items_of(extra)) special = special || (is_text(other) && other->text == item->key);
        numbered.insert({(int)item->number, {item->key, {special}, special, false}});
    }
    for (const auto &[id, token] : numbered) name_token(added, token, id, SIZE_MAX, false);

    const size_t limit = added.size();
    for (Added &one : added)  // a named one is special, whatever its number says
        if (named.count(one.content) && (!decoder || decoded.count(one.content))) one.flags[0] = true;
    for (const char *name : {"bos", "eos", "unk", "sep", "pad", "cls", "mask"})
        if (const Json *token = settings.find((name + std::string("_token")).c_str()))
            name_token(added, read_token(t, token), -1, limit, true);
    for (const Json &item : config.items)
        if (names_token(item)) name_token(added, read_token(t, &item), -1, limit, true);
    for (const Json *item : items_of(extra))
        name_token(added, read_token(t, item), -1, gives_names ? limit : SIZE_MAX, gives_names);
}

// ---- All of it -----------------------------------------------------------------------------------------------------

// A token of the model that is also looked for in the text, or one of its own. The library numbers those on from the
// size of the vocabulary, whatever id the file gives; where the two differ no one can be right.
void load_added(Loaded &t, const Section &root, const Added &added) {
    if (added.content.empty()) return;
    const int known = id_of(t, added.content), id = known >= 0 ? known : t.next_id++;
    if (added.id >= 0 && added.id != id)
        fail("%s: added token \"%s\" has id %d, expected %d: ids of added tokens go on from the vocabulary's",
             t.name.c_str(), shown(added.content).c_str(), added.id, id);
    Token &token = known >= 0 ? t.all_tokens[(size_t)id] : add_token(t, root, id, added.content);
    token.flags = (uint8_t)((token.flags & (IN_MODEL | SPECIAL)) | LOOKED_FOR);  // once special, always special
    for (int i = 0; i < 5; i++) token.flags |= (uint8_t)(added.flags[(size_t)i] ? SPECIAL << i : 0);
}

// Added tokens are looked for together: the NORMALIZED ones, as the normalizer makes them, after it, the others in the
// text as it is.
void gather_added(Loaded &t, bool normalized) {
    std::vector<const Token *> &all = t.looked_for[normalized];
    AddedSet &set = t.added[normalized];
    for (int id = 0; id < t.size; id++) {
        Token &token = t.tokens[id];
        if (!(token.flags & LOOKED_FOR) || normalized != !!(token.flags & NORMALIZED)) continue;
        if (normalized) {
            char error[200];
            size_t n = token.length;
            char *text = normalized_text(&t, token.content, &n, error, sizeof error);
            if (!text) fail("%s: %s", t.name.c_str(), error);
            token.shown = t.keep(std::string(text, n)).c_str(), token.shown_length = (uint32_t)n;
            free(text);
        }
        if (!token.shown_length) continue;
        all.push_back(&token);
        set.starts[(uint8_t)*token.shown] = true;
    }
    std::stable_sort(all.begin(), all.end(), [](auto *a, auto *b) { return strcmp(a->shown, b->shown) < 0; });
    set.tokens = all.data(), set.count = all.size();
}

// `config`: path of the tokenizer_config.json next to it, or "".
std::unique_ptr<Loaded> read_tokenizer(const std::string &name, std::string json, const std::string &config_path) {
    auto loaded = std::make_unique<Loaded>();
    Loaded &t = *loaded;
    t.name = name;
    const Json whole = parse_json(name, std::move(json), /*as_python=*/false, MAX_TEXT);
    const Json config = config_path.empty() ? Json() : read_settings(config_path);
    const Json more = config_path.empty() ? Json() : read_beside(config_path, "added_tokens.json");
    const Section root = {name, &whole};
    std::vector<Added> added = read_added(root);
    name_tokens(t, added, config, more);
    load_model(t, root, added.size());
    for (const Added &one : added) load_added(t, root, one);
    while (!t.tokens[t.size - 1].content) t.size--;
    const std::string *end = content_of(Section{name, &config}.find("eos_token"));
    t.end = end ? id_of(t, *end) : -1;
    auto load_part = [&](const char *key, Load load) {
        if (const Json *part = root.find(key)) load(t, {name + ": " + key, part});
    };
    add_step(t, t.encode, ADDED, 0);
    load_part("normalizer", load_normalizer);
    add_step(t, t.encode, ADDED, 1);
    load_part("pre_tokenizer", load_pre_tokenizer);
    load_part("post_processor", load_post_processor);
    load_part("decoder", load_decoder);
    if (!root.find("decoder")) add_step(t, t.decode, JOIN);
    for (bool normalized : {false, true}) gather_added(t, normalized);
    return loaded;
}

}  // namespace

// What `read` returns; nullptr and the line of an error that it throws, for C.
template <class Read>
static Tokenizer *or_error(char *error, size_t error_size, Read read) {
    try {
        return read().release();
    } catch (const std::exception &wrong) {
        snprintf(error, error_size, "%s", wrong.what());
        const size_t n = error_size ? strlen(error) : 0;
        for (size_t at; (at = utf8_valid(error, n)) < n;) error[at] = '?';  // a character that was cut
        return nullptr;
    }
}

Tokenizer *tokenizer_load(const char *path, const char *config, char *error, size_t error_size) {
    auto read = [&] { return read_tokenizer(path, read_file(path, MAX_TEXT), config ? config : ""); };
    return or_error(error, error_size, read);
}

Tokenizer *tokenizer_parse(const char *json, size_t length, const char *name, char *error, size_t error_size) {
    return or_error(error, error_size, [&] { return read_tokenizer(name, std::string(json, length), ""); });
}

void tokenizer_free(Tokenizer *tokenizer) { delete static_cast<Loaded *>(tokenizer); }
