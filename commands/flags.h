// The command line: a typed row for each flag, from which parsing, help and messages come; flags that exclude each
// other; and parse_options(), which fills Options or fails with the flag, what was found and expected, and the cure.
#pragma once

#include "batch.h"
#include "chat.h"
#include "diff.h"
#include "draft.h"
#include "eval.h"
#include "generate.h"
#include "memory.h"
#include "samples.h"
#include "show.h"

// ---- The flags and commands ----------------------------------------------------------------------------------

template <class Value>
struct Range {
    using Field = Value Options::*;  // without Field nvcc writes Value (Options::*field), and g++ warns
    Field field;
    double least, most;
};

struct Flag {
    std::string names;     // the first is its key in Options::given
    const char *argument;  // "": a switch; "a|b": one of these; whole numbers named N may end in k (1,024)
    const char *commands;  // that have it; a name has a row for each meaning
    std::variant<bool Options::*, std::string Options::*, std::vector<std::string> Options::*, Range<int>,
                 Range<int64_t>, Range<std::vector<int>>, Range<double>, double Options::*,
                 std::vector<Layout> Options::*, std::vector<Precision> Options::*>
        value;  // the field it fills, whose type says how it is read; a double without range: bytes
    std::string help;
    const char *group = nullptr;  // the heading of a group of the help, whose first row this is
};

constexpr const char *takes_several = "diff eval bench memory";  // commands that take several layouts and types, as a,b

inline const std::vector<Flag> &flags() {
    using O = Options;
    using Int = Range<int>;
    using Ints = Range<std::vector<int>>;
    using Real = Range<double>;
    const char *all = "generate chat diff eval bench batch memory show tokenize info",
               *others = "generate diff eval bench batch memory show tokenize info",
               *run = "generate chat diff eval bench batch", *many = "batch";
    const char *texts = "generate diff bench show tokenize", *drawn = "generate chat bench",
               *timed = "generate chat diff bench batch", *talk = "chat";
    const char *caches = "generate chat diff eval bench batch memory show", *one = "generate", *shape = "memory";
    const std::string from_file = "from a file, without its last newline; -: standard input";
    const std::string naive = "none (the naive path) or ", holds = "positions the cache holds (default: ";
    // clang-format off
    static const std::vector<Flag> table = {
        {"-m --model", "DIR", others, &O::directory, "a Hugging Face directory (default: the built-in checkpoint)",
         "Text"},
        {"-m --model", "DIR", talk, &O::directory,
         "a Hugging Face directory (default: the one of `make smollm2`, or else the built-in checkpoint)", "Text"},
        {"-p --prompt", "TEXT", texts, &O::prompt, "the prompt; empty: it starts from the token that opens a text"},
        {"-f --file", "FILE", texts, &O::prompt_file, "the prompt " + from_file},
        {"-f --file", "FILE", "eval", &O::prompt_file, "the text " + from_file},
        {"-f --file", "FILE", many, &O::prompt_file, "the requests; -: standard input"},
        {"--ids", "1,2,3", "generate diff eval bench show tokenize", Ints{&O::prompt_ids, 0, INT_MAX},
         "the same as ids; nothing is put before them"},
        {"--system", "TEXT", talk, &O::system, "what the model is told before the first turn"},
        {"--template", "NAME", talk, &O::chat_template,
         "the form of turns (default: the checkpoint's own): one of weights_tools/chat_templates, or FILE.jinja"},
        {"--template-arg", "NAME=VALUE", talk, &O::template_arguments,
         "a variable of the template, as enable_thinking=false: JSON, or else a text; may be given several times"},
        {"-n --predict", "N", talk, Int{&O::count, -1, 1e9},
         "tokens of an answer at most (default: until an end id or until the context is full)"},
        {"-n --predict", "N", "generate diff", Int{&O::count, -1, 1e9},
         "tokens to generate at most (default 256); -1: until an end id or until the context is full"},
        {"-n --predict", "N", "bench", Int{&O::count, 1, 1e9}, "tokens to generate (default 64; with --draft 256)"},
        {"-n --predict", "N", many, Int{&O::count, 1, 1e9},
         "tokens of a request that does not say how many (default 256)"},
        {"--stop", "TEXT", "generate chat", &O::stops,
         "ends the text before this one, or at the special token spelled so; may be given several times"},
        {"--ignore-eos", "", "generate diff batch", &O::ignore_end, "go on after an end id"},
        {"--temp", "T or auto", drawn, Real{&O::temperature, 0, 1000},
         "temperature; 0 takes the likeliest token (default 0); auto: temperature, --top-k and the like that the "
         "model's generation_config.json asks for", "Sampling"},
        {"--top-k", "N", drawn, Int{&O::top_k, 0, 1 << 30},
         "sample from the N likeliest tokens; 0 (default): from all"},
        {"--top-p", "P", drawn, Real{&O::top_p, 0, 1},
         "sample from the likeliest that reach probability P (default 1)"},
        {"--min-p", "P", drawn, Real{&O::min_p, 0, 1}, "drop tokens below P times the likeliest's share (default 0)"},
        {"-s --seed", "SEED", drawn, Range<int64_t>{&O::seed, -1, 0x1p53},
         "for the same text again (default -1: drawn)"},
        {"--samples", "N", one, Int{&O::sequences, 1, 4096},
         "continuations of the prompt, with seeds from -s on (default 1)"},
        {"--samples", "N", "show", Int{&O::sequences, 1, 4096}, "sequences that share the prompt (default 1)"},
        {"--cache", "LAYOUT", "generate chat bench show", &O::layouts, naive + layout_names() + " (default contiguous)",
         "Cache"},
        {"--cache", "LAYOUT", "diff eval", &O::layouts, layout_names() + " (default contiguous)"},
        {"--cache", "LAYOUT", many, &O::layouts, layout_names() + " (default paged)"},
        {"--cache", "LAYOUT", shape, &O::layouts, layout_names() + " (default: all)"},
        {"--kv", "TYPE", caches, &O::types_k, "type of K and V (default f16): " + precision_names()},
        {"-ctk --cache-type-k", "TYPE", caches, &O::types_k, "cache type of K alone"},
        {"-ctv --cache-type-v", "TYPE", caches, &O::types_v, "cache type of V alone"},
        {"-c --ctx-size", "N", "generate diff", Int{&O::context, 1, 1 << 30},
         holds + "prompt + N, at most the model's context)"},
        {"-c --ctx-size", "N", talk, Int{&O::context, 1, 1 << 30},
         holds + "the model's context, at most 8k, with longrope its original one)"},
        {"-c --ctx-size", "N", "eval show batch", Int{&O::context, 1, 1 << 30}, holds + "as many as are needed)"},
        {"-c --ctx-size", "N", shape, Int{&O::context, 1, 1 << 30}, holds + "the model's context)"},
        {"--page", "N", caches, Int{&O::page, 1, 1 << 16},
         "paged: positions per page (default 16; 32 where texts share pages of int4 or int2)"},
        {"--pool", "N", many, Int{&O::pool, 1, 1 << 30},
         "paged: positions in all pages together (default: enough for each of -np to be as long as the longest)"},
        {"--swa-full", "", caches, &O::keep_all,
         "layers that look back over a window keep all positions (to measure what the window saves)"},
        {"--window", "N", caches, Int{&O::window, 1, 1 << 24},
         "ring: positions that stay visible (default: as far as any of the model's layers looks back, at most -c)"},
        {"--sinks", "N", caches, Int{&O::sinks, 0, 1 << 16},
         "ring: first positions that stay visible too, fewer than --window (default 4; 0 where all layers slide)"},
        {"--when-full", "stop|drop|ring", talk, &O::when_full,
         "a full context: refuses the turn (default), drops the oldest ones, or is a ring from the start"},
        {"--all", "", "eval", &O::standard_set, "a standard set of caches, in place of --cache and --kv"},
        {"-np --parallel", "N", many, Int{&O::sequences, 1, 4096}, "requests that run at once (default 16)",
         "Requests"},
        {"--pass-tokens", "N", many, Int{&O::pass_tokens, 1, 1 << 20}, "tokens of a pass at most (default 512)"},
        {"--admission", "exact|optimistic", many, &O::admission,
         "who comes in: those whose peak fits (default), or whose tokens now fit, which may have to make room"},
        {"--order", "fcfs|prefix", many, &O::order,
         "who comes in next: the first (default), or the longest known beginning; no one is overtaken over 16 times"},
        {"-s --seed", "SEED", many, Range<int64_t>{&O::seed, -1, 0x1p53 - 1},
         "the seed of the first line; each next line has one more, and 0 after 2^53 - 1 (default -1: drawn)"},
        {"--keep-going", "", many, &O::keep_going, "say which lines are wrong, and run the others"},
        {"--against", "alone", many, &O::against, "each request also alone, and whether its logits have the same bits"},
        {"--against", "naive|full", "diff", &O::against,
         "what caches are compared with: the naive path (default), or a full f32 cache, which is faster", "Comparison"},
        {"--tolerance", "X", "diff", Real{&O::tolerance, 0, 1e30},
         "exit 1 where a logit is further off than X (default: 1e-4 for f32, which then is the same; else any)"},
        {"--depth", "N,...", "bench", Ints{&O::depths, 0, 1 << 24},
         "positions in the cache before the timed steps (default: what the context holds of 0,1024,4096,8000)",
         "What is timed"},
        {"--prefill", "N,...", "bench", Ints{&O::prompts, 1, 1 << 24},
         "lengths of the timed prompts (default: what the context holds of 128,512,2048)"},
        {"-np --parallel", "N", "bench", Int{&O::sequences, 1, 4096}, "sequences that decode together (default 1)"},
        {"--repeats", "N", "eval bench", Int{&O::repeats, 1, 1000}, "measurements; their median counts (default 3)"},
        {"--layer", "N", "show", Int{&O::layer, 0, 1 << 30}, "the layer (default 0)", "What is shown"},
        {"--head", "N", "show", Int{&O::head, 0, 1 << 30}, "the query head (default 0)"},
        {"--position", "N", "show", Int{&O::position, 0, 1 << 30}, "whose query and row are shown (default: the last)"},
        {"--layers", "N", shape, Int{&O::layers, 1, 1 << 30}, "a shape in place of a model's; with the next two, -c",
         "A shape, and what it has to fit in"},
        {"--kv-heads", "N", shape, Int{&O::kv_heads, 1, 1 << 30}, "KV heads of a layer"},
        {"--head-dim", "N", shape, Int{&O::head_dim, 1, 1 << 30}, "numbers of a head"},
        {"--weight-bytes", "BYTES", shape, &O::weight_bytes, "that a step of decoding reads (default: the model's)"},
        {"--batch", "N", shape, Int{&O::batch, 1, 1 << 30}, "sequences of -c positions each (default 1)"},
        {"--budget", "BYTES", shape, &O::budget, "how many tokens fit, say in 40GiB or 8G (2^30), 40GB (10^9)"},
        {"--bandwidth", "GB/S", shape, Real{&O::bandwidth, 1e-6, 1e9}, "tokens/s of decoding at so many 10^9 bytes/s"},
        {"-t --threads", "N", "generate chat diff eval bench batch show", Int{&O::threads, 1, 256},
         "threads (default, and at most: as many as this process may use)", "Speed"},
        {"-ub --ubatch-size", "N", "generate chat diff eval bench", Int{&O::chunk, 1, 1 << 20},
         "tokens of a prefill pass (default 512)"},
        {"--draft", "DIR", timed, &O::draft,
         "guesses tokens, which a pass then checks: a small model with the same tokenizer, or the word ngram, which "
         "looks for the last tokens earlier in the text"},
        {"--draft-tokens", "N", timed, Int{&O::draft_tokens, 1, 1024}, "guesses of a pass at most (default 4)"},
        {"--draft-rule", "exact|leviathan", "generate chat bench", &O::draft_rule,
         "exact: the text is the same as without (default); leviathan: another one of the same distribution"},
        {"--weights", "stored|copied|int8", run, &O::weights,
         "copied: to huge pages first, to decode faster; int8: groups of 32 with a scale (default stored)"},
        {"--activations", "f32|bf16", run, &O::activations,
         "bf16: rounds what bf16 weights are multiplied with, too; refused where that is no faster, so useful on AMD's "
         "Zen 5 (default f32)"},
        {"--device", "auto|cpu|cuda", run, &O::device, "auto: the GPU if there is one (default)"},
        {"--no-display-prompt", "", one, &O::hide_prompt, "print the new text alone", "Output"},
        {"--dump-logits", "FILE.npy", "generate chat", &O::dump_logits,
         "float32 [positions, vocabulary]: a row for each position that is read, then one for each generated token"},
        {"--events", "FILE", many, &O::events, "a JSON line for each pass and for all that happens to a page"},
        {"--json", "", "generate diff eval bench memory show tokenize info", &O::json,
         "one JSON object on standard output"},
        {"--json", "", talk, &O::json, "one JSON object a turn on standard output"},
        {"--json", "", many, &O::json, "no summary as text on standard error"},
        {"-h --help", "", all, &O::help, "this text"},
    };
    // clang-format on
    return table;
}

struct Command {
    const char *name;
    int (*run)(const Options &);
    const char *help, *example;
};

constexpr Command commands[] = {
    {"generate", run_generate, "stream the text that follows a prompt; then tokens/s, cache bytes, GB/s",
     "-p \"Once upon a time\" -n 100 --temp 0.8 -s 1 --kv int8"},
    {"chat", run_chat, "a conversation whose turns keep the cache: lines from the terminal or from a pipe",
     "-m ~/models/SmolLM2-135M-Instruct --kv int8"},
    {"diff", [](const Options &o) { return o.draft.empty() ? run_diff(o) : run_diff_draft(o); },
     "caches beside the naive path, or beside the full cache: a line a token, a verdict",
     "-p \"Once upon a time\" --kv f16,int8,int4"},
    {"eval", run_eval, "quality per cache: perplexity, recall, bytes, tokens/s", "-f my.txt --kv f16,int8,int4"},
    {"bench", [](const Options &o) { return o.draft.empty() ? run_bench(o) : run_bench_draft(o); },
     "prefill and decode beside what memory and processor give", "--depth 0,1k --kv f16,int8"},
    {"batch", run_batch, "many requests through one cache; a JSON line for each, then a summary",
     "-f requests.jsonl --kv f16 --against alone"},
    {"memory", run_memory, "bytes of a cache by the formula",
     "--layers 80 --kv-heads 8 --head-dim 128 -c 128k --budget 40GiB"},
    {"show", run_show, "one head, one position: scores, weights, where its row lives, its bytes",
     "-p \"Once upon a time\" --layer 1 --head 2 --cache paged --kv int8"},
    {"tokenize", run_tokenize, "ids of a text (-p, -f), or the text of ids (--ids)", "-p \"Once upon a time\""},
    {"info", run_info, "what is in a checkpoint, what its cache costs, and will it run", "-m ~/models/SmolLM2-135M"},
};

// Flags of llama.cpp, Transformers, vLLM and ollama, without dashes, "-" for "_" -> the same flag here, or what to do.
constexpr const char *elsewhere[][2] = {
    {"temperature", "--temp"},
    {"n-predict num-predict max-tokens max-new-tokens", "-n"},
    {"max-length", "-n counts new tokens, -c the prompt's, too"},
    {"ctx n-ctx num-ctx max-model-len", "-c"},
    {"b batch-size", "-ub is for tokens of a prefill pass, --batch for sequences (llm memory)"},
    {"num-threads num-thread", "-t"},
    {"tb threads-batch", "-t is for prompts, too"},
    {"kv-cache-dtype", "--kv"},
    {"no-cache no-kv-cache use-cache", "--cache none computes everything anew"},
    {"do-sample", "--temp above 0 draws the tokens"},
    {"repeat-penalty repetition-penalty repeat-last-n presence-penalty frequency-penalty mirostat typical num-beams",
     "there is none: --temp --top-k --top-p --min-p say how a token is drawn"},
    {"r reverse-prompt", "--stop"},
    {"cnv conversation i interactive if", "llm chat is for conversations"},
    {"no-cnv no-conversation st single-turn", "llm generate reads a prompt as it stands; llm chat takes a turn a line"},
    {"sys system-prompt", "--system"},
    {"chat-template", "--template"},
    {"jinja", "a template is always rendered, the checkpoint's or that of --template"},
    {"e escape", "a prompt is taken as it stands: in bash $'two\\nlines', or -f FILE"},
    {"ngl n-gpu-layers gpu-layers num-gpu split-mode tensor-split tensor-parallel-size",
     "the whole model is on one device: --device cuda or cpu"},
    {"fa flash-attn", "there is no need: attention never stores all scores"},
    {"mmap no-mmap mlock", "weights are read where the files have them; --weights copied loads them first"},
    {"quantization dtype load-in-8bit load-in-4bit", "--weights is for the weights, --kv for the cache"},
    {"hf hf-repo mu model-url", "nothing is downloaded: hf download ORG/NAME --local-dir DIR, then -m DIR"},
};

// The row of the flag `name` for a command, else the name's first row; nullptr if there is no such flag.
inline const Flag *find_flag(const std::string &name, const std::string &command = "") {
    const Flag *found = nullptr;
    for (const Flag &flag : flags())
        if (has(flag.names, name) && (!found || has(flag.commands, command))) found = &flag;
    return found;
}

// All commands that have a flag, with blanks between.
inline std::string commands_with(const std::string &name) {
    std::vector<std::string> list;
    for (const Command &each : commands)
        if (has(find_flag(name, each.name)->commands, each.name)) list.push_back(each.name);
    return joined(list, " ");
}

// ---- Values --------------------------------------------------------------------------------------------------

// A number with a unit: "40GiB" and "40G" are the same, "1.5 GB" has powers of 1000; NAN if it is none.
inline double with_unit(const std::string &text) {
    if (!isdigit((unsigned char)text[0]) && text[0] != '.') return NAN;
    char *end;
    double number = strtod(text.c_str(), &end);
    std::string unit = end + strspn(end, " ");
    if (unit.empty() || unit == "B") return number;
    size_t power = std::string(" KMGT").find((char)toupper((unsigned char)unit[0]));
    std::string rest = unit.substr(1);
    double base = rest == "B" ? 1000 : rest.empty() || rest == "iB" ? 1024 : NAN;
    return power > 4 || end == text.c_str() ? NAN : number * std::pow(base, power);
}

// Reads a flag's value into its field of Options: a function for each type of field.
struct ReadValue {
    Options &options;
    const Flag &flag;
    std::string name, value;  // as given on the command line

    int64_t whole(const std::string &text, double least, double most, const std::string &expected) const {
        size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
        bool unit = flag.argument[0] == 'N' && digits + 1 == text.size() && strchr("kKM", text[digits]);
        if (least < 0 && text == "-1") return -1;
        if (!text.empty() && digits == text.size()) {  // a double is not exact beyond 2^53
            int64_t number = strtoll(text.c_str(), nullptr, 10);
            if (number >= (int64_t)least && number <= (int64_t)most) return number;
        }
        double number = unit ? with_unit(text) : NAN;
        if (number >= least && number <= most) return (int64_t)number;
        refuse(name, value, formatted("%s from %.0f to %.0f", expected.c_str(), least, most));
    }
    std::vector<std::string> names() const {  // one or several, in lower case
        std::vector<std::string> words = split(value, ',');
        if (words.size() > 1 && !has(takes_several, options.command))
            refuse(name, value, "llm " + options.command + " takes one; the other commands take several");
        if (has(value, "", ',')) refuse(name, value, "an entry is empty, expected names with commas between");
        for (std::string &word : words)
            for (char &c : word) c = (char)tolower((unsigned char)c);
        return words;
    }

    void operator()(bool Options::*field) const { options.*field = true; }
    void operator()(std::string Options::*field) const {
        if (islower(flag.argument[0]) && !has(flag.argument, value, '|'))
            refuse(name, value, std::string("expected ") + flag.argument);
        options.*field = value;
    }
    void operator()(std::vector<std::string> Options::*field) const { (options.*field).push_back(value); }
    template <class Whole>
    void operator()(Range<Whole> to) const {
        options.*to.field = (Whole)whole(value, to.least, to.most, "expected a whole number");
    }
    void operator()(Range<std::vector<int>> to) const {
        (options.*to.field).clear();
        size_t at = 1;  // the place of the wrong character, which is hard to see in a long list
        for (const std::string &part : split(value, ',')) {
            std::string expected = formatted("\"%.20s\" at character %zu, expected whole numbers", part.c_str(), at);
            (options.*to.field).push_back((int)whole(part, to.least, to.most, expected));
            at += part.size() + 1;
        }
    }
    void operator()(Range<double> to) const {
        if (value == "auto" && has(flag.argument, value)) return (void)(options.*to.field = -1);
        char *end;
        double number = strtod(value.c_str(), &end);
        if (*end || !(number >= to.least && number <= to.most))
            refuse(name, value,
                   formatted("expected a number from %g to %g%s", to.least, to.most,
                             has(flag.argument, "auto") ? ", or auto" : ""));
        options.*to.field = number;
    }
    void operator()(double Options::*field) const {
        options.*field = std::round(with_unit(value));
        if (!(options.*field >= 1 && options.*field <= 0x1p53))
            refuse(name, value, "expected 1 to 2^53 bytes, as 40GiB, 8G or 1.5 GB (K .. T, KiB .. TiB, kB .. TB)");
    }
    void operator()(std::vector<Layout> Options::*field) const {
        (options.*field).clear(), options.naive = false;
        for (const std::string &word : names())
            word == "none" ? (void)(options.naive = true) : (options.*field).push_back(parse_layout(name, word));
    }
    // Accepts other programs' names, too: fp16, float16, bfloat16, fp32, float32. llama.cpp's q8_0 has as many bits as
    // int8, and q4_0 and q4_1 about as many as int4, in groups of other sizes.
    void operator()(std::vector<Precision> Options::*field) const {
        (options.*field).clear();
        for (std::string word : names()) {
            if (has("fp16 fp32 float16 float32 bfloat16", word))
                word = (word[0] == 'b' ? "bf" : "f") + word.substr(word.size() - 2);
            if (has("q8_0 q4_0 q4_1", word)) {
                note(formatted("%s %s: taken as int%c, which is the type of so many bits here", name.c_str(),
                               word.c_str(), word[1]));
                word = std::string("int") + word[1];
            }
            (options.*field).push_back(parse_precision(name, word));
        }
        if (name == "--kv") options.types_v = options.types_k;
    }
};

// ---- Flags that exclude each other ---------------------------------------------------------------------------

inline bool any_blocks(const Options &o) {
    auto any = [](auto &types) { return std::any_of(types.begin(), types.end(), has_blocks); };
    return any(o.types_k) || any(o.types_v);
}

// Refuses flags that contradict each other.
inline void check_together(const Options &o) {
    auto refuse_if = [&](bool wrong, const std::string &names, const std::string &why) {
        for (const std::string &name : split(names))
            if (wrong && o.has(name)) refuse(name, o.given.at(name), why);
    };
    auto in = [&](const char *commands) { return has(commands, o.command); };
    auto missing = [&](const Layout &wanted) {
        return std::none_of(o.layouts.begin(), o.layouts.end(), [&](auto &it) { return it.index() == wanted.index(); });
    };
    const std::string found = ", found --cache " + (o.has("--cache") ? o.given.at("--cache")
                                                    : in("batch")    ? "paged"
                                                                     : "contiguous");
    const int shape = o.has("--layers") + o.has("--kv-heads") + o.has("--head-dim");
    const int texts = o.has("-p") + o.has("-f") + o.has("--ids");
    refuse_if(o.has("-ctk") || o.has("-ctv"), "--kv", "is the type of K and V: keep it, or -ctk and -ctv");
    refuse_if(o.standard_set, "--cache --kv -ctk -ctv --page --window --sinks", "--all is a set of its own: drop one");
    refuse_if(o.naive && in("diff eval memory batch"), "--cache",
              "llm " + o.command + " is about caches: " + layout_names());
    refuse_if(o.naive, "--samples -np", "several texts share a cache, which --cache none has not: drop one of the two");
    refuse_if(o.forks(), "--dump-logits", "is for one text: drop --samples or --dump-logits");
    const bool texts_drawn = in("generate") && o.forks();
    refuse_if(texts_drawn && o.temperature == 0, "--samples", "at --temp 0 all are the same: raise --temp");
    refuse_if(!o.draft.empty() && in("bench"), "--depth --prefill -np",
              "guesses are timed behind the prompt of one text: drop --draft, or this");
    refuse_if(!o.draft.empty() && in("diff"), "--against --tolerance",
              "with --draft each token is held against the one without, to the last bit: drop one of the two");
    refuse_if(o.naive, "--draft", "--cache none computes all tokens anew in each pass: " + layout_names());
    refuse_if(o.forks(), "--draft", "is for one text, or for llm batch: drop --samples or --draft");
    refuse_if(o.caches().size() > 1, "--draft", "takes one cache: give one --cache and one --kv");
    refuse_if(
        in("batch") && o.pass_tokens < o.sequences, "--pass-tokens",
        formatted("each of %d requests at once (-np) takes a token of a pass: raise it, or lower -np", o.sequences));
    refuse_if((in("batch") || o.forks()) && !missing(Paged{}) && any_blocks(o) && o.page % group_size, "--page",
              formatted("pages that are shared hold whole blocks of %d: give a multiple", group_size));
    refuse_if(missing(Paged{}), "--page --pool --admission --order", "belongs to --cache paged" + found);
    refuse_if(missing(Ring{}), "--window --sinks", "belongs to --cache ring" + found);
    refuse_if(o.when_full == "ring" && (missing(Ring{}) || o.naive), "--cache",
              "--when-full ring is --cache ring: leave one out");
    refuse_if(o.when_full != "ring" && !missing(Ring{}), "--when-full", "a ring is never full: leave one out");
    refuse_if(!missing(Ring{}) && in("generate chat show batch"), "-c",
              "a ring holds --window and --sinks without end: drop -c");
    const std::string of_cpu = "is for the CPU, found --device cuda: drop one of the two, or use --device auto";
    refuse_if(o.device == "cuda" && o.weights != "stored", "--weights", of_cpu);
    refuse_if(o.device == "cuda" && o.activations == "bf16", "--activations", of_cpu);
    refuse_if(o.weights == "int8" && o.activations == "bf16", "--activations",
              "int8 weights are multiplied with int8 activations: drop one of the two");
    refuse_if(o.count == 0 && (in("chat diff") || texts_drawn), "-n", "expected 1 or more, or there is nothing to say");
    refuse_if(shape > 0, "-m", "a model has a shape of its own: drop -m, or --layers --kv-heads --head-dim");
    refuse_if(shape < 3 || !o.has("-c"), "--layers --kv-heads --head-dim",
              "a shape is --layers N --kv-heads N --head-dim N -c N: give all four, or a model");
    refuse_if(texts > 1, "-p -f --ids", "-p, -f and --ids each give the text: keep one of them");
    if (texts == 0 && in("batch")) fail("no requests: give -f FILE (- is standard input), a JSON object a line");
    if (texts == 0 && in("generate diff show tokenize"))
        fail("no prompt: give -p TEXT, -f FILE (- is standard input) or --ids 1,2,3");
}

// ---- The command line ----------------------------------------------------------------------------------------

// True: at most `edits` letters changed, added or dropped, or neighbours swapped, turn `a` into `b` (Damerau 1964).
inline bool is_near(const char *a, const char *b, size_t edits) {
    for (; *a && *a == *b; a++) b++;
    if (!*a && !*b) return true;
    return edits > 0 && ((*a && *b && is_near(a + 1, b + 1, edits - 1)) || (*a && is_near(a + 1, b, edits - 1)) ||
                         (*b && is_near(a, b + 1, edits - 1)) ||
                         (*a && *b && a[0] == b[1] && a[1] == b[0] && is_near(a + 2, b + 2, edits - 1)));
}

// "; did you mean --cache?" if a known word is at most 2 edits away, and at most 1 for every 3 letters; else "".
inline std::string suggestion(const std::string &word, const std::string &known) {
    for (size_t edits = 1; edits <= std::min<size_t>(2, word.size() / 3); edits++)
        for (const std::string &each : split(known))
            if (is_near(word.c_str(), each.c_str(), edits)) return "; did you mean " + each + "?";
    return "";
}

inline const Flag &known_flag(const std::string &name, const std::string &command) {
    const Flag *found = find_flag(name, command);
    if (found && has(found->commands, command)) return *found;
    if (found) refuse(name, "", "llm " + command + " has no such flag; it belongs to: " + commands_with(name));
    if (name[0] != '-') refuse(name, "", "expected a flag; a prompt goes after -p, in quotes if it has spaces");
    std::string plain = name.substr(std::min(name.size(), name.find_first_not_of('-'))), known, why;
    std::replace(plain.begin(), plain.end(), '_', '-');
    for (auto &[words, hint] : elsewhere) {
        if (!has(words, plain)) continue;
        const Flag *same = find_flag(hint, command);
        if (same && has(same->commands, command)) return *same;
        why = (same ? "; here it is " : "; ") + std::string(hint);
        if (same) why += ", which belongs to: " + commands_with(hint);
    }
    for (const Flag &flag : flags())
        if (has(flag.commands, command)) known += " " + flag.names;
    if (why.empty()) why = suggestion(name, known);
    refuse(name, "", "unknown flag" + why + " (llm " + command + " --help lists all)");
}

// Reads words[at], and words[++at] if its value is there: "--name value", "--name=value", "-n5".
inline void read_flag(Options &options, const std::vector<std::string> &words, size_t &at) {
    const std::string &word = words[at];
    size_t equals = word[0] == '-' ? word.find('=') : std::string::npos, end = equals;
    const unsigned char digit = word.size() > 2 ? word[word[2] == '-' ? 3 : 2] : 0;
    if (isdigit(digit) && find_flag(word.substr(0, 2))) end = 2;
    const std::string name = word.substr(0, end);
    const Flag &flag = known_flag(name, options.command);
    std::string value, argument = flag.argument, first = split(flag.names)[0];
    if (end != std::string::npos) {
        value = word.substr(end == equals ? end + 1 : end);
        if (argument.empty()) refuse(word, "", name + " takes no value");
    } else if (!argument.empty()) {
        if (++at == words.size()) refuse(name, "", "needs a value: " + name + " " + argument);
        value = words[at];
        if (find_flag(value))
            refuse(name, "", "needs a value, found the flag " + value + "; or give it as " + name + "=" + value);
    }
    if (!argument.empty() && value.empty() && first != "-p")
        refuse(name, "", "its value is empty, expected " + argument);
    options.given[first] = value;
    std::visit(ReadValue{options, flag, name, value}, flag.value);
}

// Reads a whole file, or standard input if it is called "-". A newline at the end, and a byte order mark that some
// editors put first, are left out: a model would take them for tokens.
inline std::string read_text(const std::string &name) {
    std::unique_ptr<FILE, int (*)(FILE *)> file(name == "-" ? stdin : fopen(name.c_str(), "rb"), fclose);
    if (!file) refuse("-f", name, strerror(errno));
    struct stat status = {};
    if (fstat(fileno(file.get()), &status) == 0) files_read.insert({status.st_dev, status.st_ino});
    const size_t limit = S_ISCHR(status.st_mode) ? 1 << 20 : 1 << 28;  // a device such as /dev/zero has no end
    std::string text;
    char part[1 << 16];
    while (text.size() <= limit && !feof(file.get()) && !ferror(file.get()))  // one Ctrl-D ends what is typed
        text.append(part, fread(part, 1, sizeof part, file.get()));
    if (ferror(file.get())) refuse("-f", name, std::string(strerror(errno)) + ", expected a file or a pipe");
    if (text.size() > limit) refuse("-f", name, formatted("is longer than %zu MiB, expected a text", limit >> 20));
    if (has("\xff\xfe \xfe\xff", text.substr(0, 2)))
        refuse("-f", name, "is UTF-16, expected UTF-8, which iconv -f UTF-16 -t UTF-8 makes of it");
    const bool marked = text.compare(0, 3, "\xef\xbb\xbf") == 0;
    if (marked) note("-f: begins with a byte order mark, which is left out");
    size_t end = text.size() - (!text.empty() && text.back() == '\n');
    if (end < text.size() && end > 0 && text[end - 1] == '\r') end--;
    return text.substr(marked ? 3 : 0, end - (marked ? 3 : 0));
}

inline Options parse_options(const std::vector<std::string> &words) {
    const std::string helps = "-h --help help";
    if (words.size() > 1 && has(helps, words[0]) && !has(helps, words[1])) return parse_options({words[1], "--help"});
    Options options;
    const std::string command = options.command = words.empty() ? "no command" : words[0];
    options.help = has(helps, command);
    options.version = has("--version -V version", command);
    if (options.help || options.version) return options.command.clear(), options;
    std::string known;
    for (const Command &each : commands) known += std::string(known.empty() ? "" : " ") + each.name;
    if (!has(known, command))
        refuse(command, "",
               "expected one of: " + known + (find_flag(command) ? ", then the flags" : suggestion(command, known)) +
                   " (llm --help says more)");
    for (size_t at = 1; at < words.size(); at++) read_flag(options, words, at);
    if (options.help) return options;
    if (command == "bench" && !options.has("-n") && options.draft.empty()) options.count = 64;
    if (command == "memory" && !options.has("--cache")) {
        options.layouts.clear();
        for_each_type<Layout>([&](auto layout) { options.layouts.push_back(layout); });
    }
    if ((command == "batch" || options.forks()) && !options.has("--page") && any_blocks(options))
        options.page = group_size;
    if (command == "batch") {
        if (!options.has("--cache")) options.layouts = {Paged{}};
        if (!options.has("-np")) options.sequences = std::min(16, options.pass_tokens);
        if (!options.has("--pass-tokens")) options.pass_tokens = std::max(512, options.sequences);
    }
    if (command == "chat") {
        if (!options.has("-n")) options.count = -1;
        const bool ring = !options.layouts.empty() && std::holds_alternative<Ring>(options.layouts[0]);
        if (options.when_full == "ring" && !options.has("--cache")) options.layouts = {Ring{}};
        if (ring && !options.has("--when-full")) options.when_full = "ring";
    }
    // Input from a pipe, or from a file with <, is the prompt if no other is given.
    struct stat status = {};
    const bool piped = fstat(0, &status) == 0 && (S_ISFIFO(status.st_mode) || S_ISREG(status.st_mode));
    const bool given = options.has("-p") || options.has("-f") || options.has("--ids");
    if (piped && !given && has("generate diff show tokenize batch", command))
        options.given["-f"] = options.prompt_file = "-";
    if (!options.has("-m")) options.directory = usual_model(options);
    if (options.temperature < 0) take_sampler(options);
    check_together(options);
    if (!options.has("-m") && !options.has("--layers") && !file_exists(options.directory))
        fail("%s: the built-in checkpoint is not there: give -m DIR", options.directory.c_str());
    if (options.count < 0) options.count = INT_MAX / 2;  // so that the sum with a prompt is still an int
    const int processors = usable_threads("", nullptr);
    if (options.threads > processors)
        note(formatted("-t %d: taken as %d, the processors that may be used: more threads would wait for one another",
                       options.threads, processors));
    options.threads = std::min(options.threads, processors);
    if ((options.temperature > 0 || command == "batch") && (!options.has("-s") || options.seed < 0))
        options.seed = std::random_device()() & INT_MAX;
    if (options.has("-f")) options.prompt = read_text(options.prompt_file);
    return options;
}

// ---- Help ----------------------------------------------------------------------------------------------------

// Prints `line`, and `text` from `column` on, or below if there is little room; at most 100 columns wide.
inline void print_wrapped(std::string line, const std::string &text, size_t column) {
    const size_t width = std::min<size_t>(100, columns_of(stdout));
    if (width < 72 && column > 8) line += '\n' + std::string((column = 8) - 1, ' ');
    line.resize(std::max(column, line.size() + !line.empty()), ' ');
    puts(wrapped(line + text, width, column).c_str());
}

inline void print_version() {
#if defined __AVX512BW__
    const char *simd = "AVX-512";
#elif defined __AVX2__
    const char *simd = "AVX2";
#elif defined __ARM_NEON
    const char *simd = "NEON";
#else
    const char *simd = "no SIMD";
#endif
    printf("llm 1.0, built with %s%s, %s, %s CUDA\n", strstr(__VERSION__, "lang") ? "" : "g++ ", __VERSION__, simd,
           std::variant_size_v<Machine> > 1 ? "with" : "without");
}

// Prints the help of a command, or of all, or the version.
inline void print_help(const Options &options) {
    if (options.version) return print_version();
    const std::string &of = options.command;
    for (const Command &command : commands) {
        if (of.empty() || of == command.name) print_wrapped(std::string("llm ") + command.name, command.help, 14);
        if (of == command.name)
            print_wrapped("For example:", formatted("llm %s %s\n", of.c_str(), command.example), 13);
    }
    const char *group = nullptr;
    for (const Flag &flag : flags()) {
        if (flag.group) group = flag.group;
        if (!has(flag.commands, of)) continue;
        if (group) printf("%s:\n", std::exchange(group, nullptr));
        const bool list = has("LAYOUT TYPE", flag.argument) && has(takes_several, of);
        print_wrapped("  " + joined(split(flag.names), ", ") + " " + flag.argument,
                      flag.help + (list ? "; several as a,b" : ""), 31);
    }
    if (of == "chat")
        print_wrapped("", "\nIn the chat /help shows its commands; \"\"\" begins and ends a turn of several lines.", 0);
    if (of == "batch") {
        puts("A line of -f is a request, a JSON object. It has a prompt, and what else is needed of:");
        for (const RequestKey &key : request_keys)
            print_wrapped(formatted("  %s: %s", key.name, key.type), key.help, 31);
    }
    print_wrapped("",
                  of.empty() ? "\nllm COMMAND --help shows its flags and an example, llm --version what this is."
                             : "\nN may end in k: 128k is 131072. -n 5, -n5 and -n=5 are the same.",
                  0);
    print_wrapped("", "Exit status: 0 done; 1 it ran and the answer is no, or the disk is full; 2 wrong input.", 0);
}
