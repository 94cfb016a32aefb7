// llm: a small language model, with and without a KV cache.
//
// In the order a token travels: flags -> load -> prefill -> decode -> text. A pass through the model computes some
// rows, each one token at one position of one sequence. Two paths share everything but the attention in the middle:
//   forward_naive   all tokens so far, every time: the keys and values of the past are computed anew
//   prefill/decode  only the new tokens: the keys and values of the past are read from the cache
//
// Its parts, each under a line of its own: flags; the model at work (forward, the two paths, prefill and decode: start
// here); sampling; text in, text out; output; llm generate; llm tokenize. The commands that measure are in measure.h.
// What the GPU does (Gpu) stands before or under what the CPU does, under #ifdef HAS_CUDA: without it the engine is
// whole.
#include <chrono>
#include <filesystem>
#include <functional>
#include <list>
#include <random>

#include "cache.h"
#include "device.h"
#include "layers.cu"
#include "model.h"
#include "tensor_cores.cu"
#include "tokenizer.h"

// ---- Flags: one table for parsing, help and errors ---------------------------------------------------------

inline int processors() {  // that this process may use
#ifdef _OPENMP
    return omp_get_num_procs();
#else
    return 1;
#endif
}

struct Options {
    std::string command, directory;
    std::string prompt, prompt_file, prompt_ids, dump_logits;
    int count = 256, context = 0, threads = processors(), top_k = 0;
    double temperature = 0, top_p = 1, min_p = 0, tolerance = -1;
    int64_t seed = 0;
    // In bench and eval lists, separated by commas.
    std::string layout = "contiguous", type_k = "f16", type_v = "f16";
    std::string device = "auto", weights = "stored";
    int page = 16, window = 0, sinks = 0;  // those of a ring stand here only if they were given, see cache_shape()
    bool json = false, ignore_end = false, help = false;
    std::vector<int> depths = {0, 1024, 4096, 8000}, prompts = {128, 512, 2048};
    int repeats = 3;
    bool standard_set = false;
    // memory: a shape in place of a model's; bytes; GB/s
    int layers = 0, kv_heads = 0, head_dim = 0, batch = 1;
    double budget = 0, bandwidth = 0;
    std::set<std::string> given;  // flags that stood on the command line
};

using ReadValue = std::function<void(Options &, const std::string &flag, const std::string &value)>;

struct Flag {
    std::vector<std::string> names;  // the first is the one of the help
    const char *argument;            // "" for a switch
    const char *commands;            // that know it; "*": all
    std::string help;
    ReadValue read;
};

inline ReadValue text(std::string Options::*field) {
    return [field](Options &options, const std::string &, const std::string &value) { options.*field = value; };
}

inline ReadValue turn_on(bool Options::*field) {
    return [field](Options &options, const std::string &, const std::string &) { options.*field = true; };
}

template <class Number>
ReadValue whole(Number Options::*field, int64_t least, int64_t most) {
    return [=](Options &options, const std::string &flag, const std::string &value) {
        char *end;
        errno = 0;
        long long number = strtoll(value.c_str(), &end, 10);
        if (value.empty() || *end || errno || number < least || number > most) {
            fail("%s %s: expected a whole number from %lld to %lld", flag.c_str(), value.c_str(), (long long)least,
                 (long long)most);
        }
        options.*field = (Number)number;
    };
}

inline std::vector<std::string> split(const std::string &list) {
    std::vector<std::string> parts(1);
    for (char c : list) c == ',' ? parts.push_back("") : parts.back().push_back(c);
    return parts;
}

// "0,4096,8000": each from `least` to `most`, in ascending order.
inline ReadValue whole_list(std::vector<int> Options::*field, int least, int most) {
    return [=](Options &options, const std::string &flag, const std::string &value) {
        (options.*field).clear();
        for (const std::string &part : split(value)) {
            char *end;
            errno = 0;
            long long number = strtoll(part.c_str(), &end, 10);
            if (part.empty() || *end || errno || number < least || number > most) {
                fail("%s %s: expected whole numbers from %d to %d, separated by commas", flag.c_str(), value.c_str(),
                     least, most);
            }
            (options.*field).push_back((int)number);
        }
        std::sort((options.*field).begin(), (options.*field).end());
    };
}

inline ReadValue number(double Options::*field, double least, double most) {
    return [=](Options &options, const std::string &flag, const std::string &value) {
        char *end;
        double number = strtod(value.c_str(), &end);
        if (value.empty() || *end || !(number >= least && number <= most))
            fail("%s %s: expected a number from %g to %g", flag.c_str(), value.c_str(), least, most);
        options.*field = number;
    };
}

// "40GiB", "1.5 GB", "1000000": rounded to whole bytes.
inline ReadValue byte_count(double Options::*field) {
    return [=](Options &options, const std::string &flag, const std::string &value) {
        static const std::map<std::string, double> units = {
            {"", 1},      {"B", 1},        {"kB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
            {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
        size_t digits = std::min(value.find_first_not_of("0123456789."), value.size());
        size_t letters = std::min(value.find_first_not_of(' ', digits), value.size());
        std::string figure = value.substr(0, digits);
        char *end;
        double number = strtod(figure.c_str(), &end);
        auto unit = units.find(value.substr(letters));
        double bytes = unit == units.end() ? 0 : std::round(number * unit->second);
        if (figure.empty() || *end || !(bytes >= 1 && bytes <= 0x1p53)) {
            fail("%s %s: expected 1 to 2^53 bytes, as 40GiB or 1.5 GB (KiB MiB GiB TiB, kB MB GB TB)", flag.c_str(),
                 value.c_str());
        }
        options.*field = bytes;
    };
}

// bench and eval measure several caches, the other commands use one.
inline std::vector<std::string> choices(const Options &options, const std::string &flag, const std::string &list) {
    std::vector<std::string> names = split(list);
    if (names.size() > 1 && options.command != "bench" && options.command != "eval")
        fail("%s %s: llm %s takes one, bench and eval take several", flag.c_str(), list.c_str(),
             options.command.c_str());
    if (names.size() > 1 && std::count(names.begin(), names.end(), ""))
        fail("%s %s: an entry of the list is empty, expected names with a comma between", flag.c_str(), list.c_str());
    return names;
}

inline ReadValue precision(std::vector<std::string Options::*> fields) {
    return [fields](Options &options, const std::string &flag, const std::string &value) {
        for (const std::string &name : choices(options, flag, value)) parse_precision(flag, name);
        for (auto field : fields) options.*field = value;
    };
}

inline ReadValue layout_or_none() {
    return [](Options &options, const std::string &flag, const std::string &value) {
        for (const std::string &name : choices(options, flag, value))
            if (name != "none") parse_layout(flag, name);
        options.layout = value;
    };
}

// One of some words.
inline ReadValue word_of(std::string Options::*field, const char *what, std::vector<std::string> known) {
    return [=](Options &options, const std::string &flag, const std::string &value) {
        std::string list;
        for (const std::string &word : known) list += " " + word;
        if (std::find(known.begin(), known.end(), value) == known.end())
            fail("%s %s: unknown %s; known are%s", flag.c_str(), value.c_str(), what, list.c_str());
        options.*field = value;
    };
}

struct Command {
    const char *name, *help;
};

inline const std::vector<Command> &commands() {
    static const std::vector<Command> list = {
        {"generate", "stream the text that follows a prompt; then tokens/s, cache bytes, GB/s"},
        {"diff", "naive and cached path in lockstep, a line a token, and a verdict"},
        {"eval", "quality per cache: perplexity, recall, bytes, tokens/s"},
        {"bench", "prefill and decode beside what the memory and the processor give, the roofline"},
        {"memory", "bytes of a cache by the formula, for every layout and precision; what fits, how fast it reads"},
        {"tokenize", "ids of a text (-p, -f), or the text of ids (--ids)"},
        {"info", "what is in a checkpoint, and will it run"},
    };
    return list;
}

inline const std::vector<Flag> &flags() {
    const char *run = "generate diff eval bench", *prompt = "generate diff tokenize";
    const char *with_eval = "generate diff eval tokenize";
    static const std::string with_memory = std::string(run) + " memory";
    const char *cached = with_memory.c_str();
    using O = Options;
    // clang-format off
    static const std::vector<Flag> table = {
        {{"-m", "--model"}, "DIR", "*", "a Hugging Face directory (default: the built-in checkpoint)", text(&O::directory)},
        {{"-p", "--prompt"}, "TEXT", prompt, "the prompt", text(&O::prompt)},
        {{"-f", "--file"}, "FILE", with_eval, "the prompt, or eval's text, read from a file",
         text(&O::prompt_file)},
        {{"--ids"}, "1,2,3", with_eval, "the prompt, or eval's text, as ids; nothing is put before them",
         text(&O::prompt_ids)},
        {{"-n", "--predict"}, "N", "generate diff bench", "tokens to generate at most (default 256; bench: 64)",
         whole(&O::count, 0, 1000000000)},
        {{"-c", "--ctx-size"}, "N", "generate diff eval memory",
         "positions the cache holds (default: prompt + N, at most the model's context; memory: that context)",
         whole(&O::context, 1, 1 << 30)},
        {{"-t", "--threads"}, "N", run, "threads (default: one per core)", whole(&O::threads, 1, 256)},
        {{"--cache"}, "LAYOUT", cached, "none (the naive path), " + layout_names() + " (default contiguous)", layout_or_none()},
        {{"--kv"}, "TYPE", cached, "cache type of K and V: " + precision_names() + "; default f16",
         precision({&O::type_k, &O::type_v})},
        {{"-ctk", "--cache-type-k"}, "TYPE", cached, "cache type of K alone", precision({&O::type_k})},
        {{"-ctv", "--cache-type-v"}, "TYPE", cached, "cache type of V alone", precision({&O::type_v})},
        {{"--page"}, "N", cached, "paged: positions per page (default 16)", whole(&O::page, 1, 1 << 16)},
        {{"--window"}, "N", cached, "ring: positions that stay visible (default: the model's sliding window, or its context)",
         whole(&O::window, 1, 1 << 24)},
        {{"--sinks"}, "N", cached, "ring: first positions that stay visible too (default 4; 0 if the model has a sliding window)",
         whole(&O::sinks, 0, 1 << 16)},
        {{"--temp"}, "T", "generate", "temperature; 0 takes the likeliest token (default 0)",
         number(&O::temperature, 0, 1000)},
        {{"--top-k"}, "K", "generate", "sample from the K likeliest tokens; 0: from all (default 0)",
         whole(&O::top_k, 0, 1 << 30)},
        {{"--top-p"}, "P", "generate", "sample from the likeliest tokens that reach this probability (default 1)",
         number(&O::top_p, 0, 1)},
        {{"--min-p"}, "P", "generate", "drop tokens below P times the likeliest one's probability (default 0)",
         number(&O::min_p, 0, 1)},
        {{"-s", "--seed"}, "N", "generate", "the same seed gives the same text (default 0)", whole(&O::seed, 0, INT64_MAX)},
        {{"--ignore-eos"}, "", "generate diff", "go on after an end id", turn_on(&O::ignore_end)},
        {{"--tolerance"}, "X", "diff", "largest difference of a logit that passes (default: by the cache's type)",
         number(&O::tolerance, 0, 1e30)},
        {{"--depth"}, "N,...", "bench",
         "positions in the cache before the timed steps (default: what the model's context holds of 0,1024,4096,8000)",
         whole_list(&O::depths, 0, 1 << 24)},
        {{"--prefill"}, "N,...", "bench", "lengths of the timed prompts (default: what the context holds of 128,512,2048)",
         whole_list(&O::prompts, 1, 1 << 24)},
        {{"--repeats"}, "N", "bench eval", "repeats of each measurement; the median counts (default 3)",
         whole(&O::repeats, 1, 1000)},
        {{"--all"}, "", "eval", "a standard set of caches, in place of --cache and --kv", turn_on(&O::standard_set)},
        {{"--layers"}, "L", "memory", "a shape in place of a model; needs --kv-heads, --head-dim and -c",
         whole(&O::layers, 1, 1 << 30)},
        {{"--kv-heads"}, "H", "memory", "KV heads of a layer", whole(&O::kv_heads, 1, 1 << 30)},
        {{"--head-dim"}, "D", "memory", "numbers of a head", whole(&O::head_dim, 1, 1 << 30)},
        {{"--batch"}, "B", "memory", "sequences of -c positions each (default 1)", whole(&O::batch, 1, 1 << 30)},
        {{"--budget"}, "BYTES", "memory", "how many tokens fit, say in 40GiB (KiB .. TiB: 2^10 .., kB .. TB: 10^3 ..)",
         byte_count(&O::budget)},
        {{"--bandwidth"}, "GB/S", "memory", "tokens/s of decoding if memory is read so fast (10^9 bytes a second)",
         number(&O::bandwidth, 1e-6, 1e9)},
        {{"--dump-logits"}, "FILE.npy", "generate",
         "float32 [positions, vocabulary]: a row for each prompt position, then one for each generated token",
         text(&O::dump_logits)},
        {{"--weights"}, "TYPE", run,
         "stored; copied: to huge pages first, to decode faster; int8: groups of 32 with a scale (default stored)",
         word_of(&O::weights, "type of weights", {"stored", "copied", "int8"})},
        {{"--device"}, "NAME", run, "cpu, cuda, or auto: the GPU if there is one (default auto)",
         word_of(&O::device, "device", {"auto", "cpu", "cuda"})},
        {{"--json"}, "", "*", "one JSON object on stdout", turn_on(&O::json)},
        {{"-h", "--help"}, "", "*", "this text", turn_on(&O::help)},
    };
    // clang-format on
    return table;
}

inline bool knows(const Flag &flag, const std::string &command) {
    std::string list = flag.commands;
    return list == "*" || (" " + list + " ").find(" " + command + " ") != std::string::npos;
}

inline void print_help(FILE *to) {
    fprintf(to, "usage: llm COMMAND [flags]\n\n");
    for (const Command &command : commands()) fprintf(to, "  llm %-10s%s\n", command.name, command.help);
    fprintf(to, "\n");
    for (const Flag &flag : flags()) {
        std::string names;
        for (const std::string &name : flag.names) names += (names.empty() ? "" : ", ") + name;
        if (*flag.argument) names += std::string(" ") + flag.argument;
        fprintf(to, "  %-26s %s", names.c_str(), flag.help.c_str());
        fprintf(to, "%s\n", strcmp(flag.commands, "*") ? (" [" + std::string(flag.commands) + "]").c_str() : "");
    }
    fprintf(to, "\nExit status: 0 done; 1 it ran and the answer is no; 2 the input is wrong.\n");
}

// Letters to change, add or drop until one word is the other (Levenshtein 1966).
inline int edit_distance(const std::string &a, const std::string &b) {
    std::vector<int> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) row[j] = (int)j;
    for (size_t i = 1; i <= a.size(); i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= b.size(); j++) {
            int change = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min({change, row[j] + 1, row[j - 1] + 1});
        }
    }
    return row.back();
}

inline std::string nearest(const std::string &word, const std::vector<std::string> &known) {
    return *std::min_element(known.begin(), known.end(), [&](const std::string &a, const std::string &b) {
        return edit_distance(word, a) < edit_distance(word, b);
    });
}

inline bool is_flag(const std::string &word) {
    return std::any_of(flags().begin(), flags().end(),
                       [&](const Flag &flag) { return std::count(flag.names.begin(), flag.names.end(), word) > 0; });
}

inline const Flag &find_flag(const std::string &name, const std::string &command) {
    if (name.compare(0, 1, "-") != 0) {
        fail("%s: expected a flag; a prompt goes behind -p, in quotes if it has spaces (llm --help lists all)",
             name.c_str());
    }
    std::vector<std::string> known;
    for (const Flag &flag : flags()) {
        for (const std::string &spelling : flag.names) {
            if (spelling == name && !knows(flag, command))
                fail("%s: llm %s has no such flag; it belongs to: %s", name.c_str(), command.c_str(), flag.commands);
            if (spelling == name) return flag;
            if (knows(flag, command)) known.push_back(spelling);
        }
    }
    fail("%s: unknown flag; the nearest one is %s (llm --help lists all)", name.c_str(), nearest(name, known).c_str());
}

// A flag of a layout that is not there would say nothing.
inline void check_layout_flags(const Options &options) {
    for (const char *flag : {"--cache", "--kv", "-ctk", "-ctv", "--page", "--window", "--sinks"})
        if (options.standard_set && options.given.count(flag))
            fail("%s: --all is a set of caches of its own: drop one of the two", flag);
    if (options.command == "memory") return;  // it shows all layouts
    auto needs = [&](const char *flag, const char *layout) {
        if (options.given.count(flag) &&
            ("," + options.layout + ",").find(std::string(",") + layout) == std::string::npos)
            fail("%s: belongs to --cache %s, found --cache %s", flag, layout, options.layout.c_str());
    };
    needs("--page", Paged::name);
    needs("--window", Ring::name);
    needs("--sinks", Ring::name);
}

inline Options parse_options(const std::vector<std::string> &arguments) {
    Options options;
    std::vector<std::string> known;
    for (const Command &command : commands()) known.push_back(command.name);
    if (arguments.empty()) fail("no command; try: llm generate -p \"Once upon a time\" (llm --help lists all)");
    options.command = arguments[0];
    if (options.command == "-h" || options.command == "--help" || options.command == "help") options.help = true;
    if (options.help) return options;
    if (is_flag(options.command)) {
        std::string names;
        for (const std::string &name : known) names += " " + name;
        fail("%s: expected a command before the flags:%s", options.command.c_str(), names.c_str());
    }
    if (std::find(known.begin(), known.end(), options.command) == known.end()) {
        fail("%s: unknown command; the nearest one is %s (llm --help lists all)", options.command.c_str(),
             nearest(options.command, known).c_str());
    }
    for (size_t i = 1; i < arguments.size(); i++) {
        // --name value or --name=value
        size_t equals = arguments[i].compare(0, 2, "--") == 0 ? arguments[i].find('=') : std::string::npos;
        std::string spelling = arguments[i].substr(0, equals), value;
        const char *name = spelling.c_str();
        const Flag &flag = find_flag(spelling, options.command);
        if (equals != std::string::npos) {
            if (!*flag.argument) fail("%s: %s takes no value", arguments[i].c_str(), name);
            value = arguments[i].substr(equals + 1);
        } else if (*flag.argument) {
            if (i + 1 == arguments.size()) fail("%s: needs a value: %s %s", name, name, flag.argument);
            value = arguments[++i];
            if (is_flag(value)) {
                fail("%s: needs a value, found the flag %s; if that is the value: %s=%s", name, value.c_str(),
                     flag.names.back().c_str(), value.c_str());
            }
        }
        if (*flag.argument && value.empty() && flag.names[0] != "-p")
            fail("%s: its value is empty, expected %s", name, flag.argument);
        if (!options.given.insert(flag.names[0]).second) fail("%s: given twice, keep one of them", name);
        flag.read(options, spelling, value);
    }
    if (options.given.count("--kv") && options.given.count("-ctk") + options.given.count("-ctv") > 0)
        fail("--kv gives the type of K and of V: keep it, or -ctk and -ctv");
    check_layout_flags(options);
    if (options.given.count("-p") + options.given.count("-f") + options.given.count("--ids") > 1)
        fail("-p, -f and --ids each give the prompt: keep one of them");
    return options;
}

// ---- The model at work -------------------------------------------------------------------------------------

// The rows of one pass, each a token at a position of a sequence. Rows of one sequence stand together, in order.
struct Rows {
    std::vector<int> tokens, sequences, positions;
    // Many tokens of a sequence (prefill, the naive path) go through matrix products, which may sum in another order
    // than single tokens' (decode). Which it is does not depend on the number of rows, so neither do the bits.
    bool many = false;
    int count() const { return (int)tokens.size(); }
    void add(int token, int sequence, int position) {
        tokens.push_back(token);
        sequences.push_back(sequence);
        positions.push_back(position);
    }
};

#ifdef HAS_CUDA
// The work of a decoding step, recorded once and replayed: else the host, some microseconds a launch, would be slower
// than the card. Positions and tokens are data. It holds the addresses of all that it touches.
struct StepGraph {
    cudaGraphExec_t step = nullptr;
    CacheView cache;  // what it was recorded for
    int rows = 0;
    StepGraph(cudaGraph_t graph, const CacheView &cache, int rows) : cache(cache), rows(rows) {
        check(cudaGraphInstantiate(&step, graph, 0), "cudaGraphInstantiate");
    }
    StepGraph(const StepGraph &) = delete;
    ~StepGraph() { cudaGraphExecDestroy(step); }
    bool is_for(const CacheView &other, int count) const {
        static_assert(std::has_unique_object_representations_v<CacheRows>, "equal if their bytes are");
        bool same = rows == count && cache.sinks == other.sinks && cache.layout == other.layout;
        same = same && cache.type_k == other.type_k && cache.type_v == other.type_v;
        for (auto side : {&CacheView::keys, &CacheView::values, &CacheView::recent_keys, &CacheView::recent_values,
                          &CacheView::sink_keys, &CacheView::sink_values})
            same = same && memcmp(&(cache.*side), &(other.*side), sizeof(CacheRows)) == 0;
        return same;
    }
};

constexpr size_t most_graphs = 64;  // as many caches decode in turn without a new recording

// The model on the card, and what its passes need there.
struct Gpu {
    Device device;  // first: it goes last
    Model model;    // its tensors are on the card
    std::shared_ptr<void> weights;
    DeviceArray<float> frequencies;
    DeviceArray<float> x, query, key, value, attended, gate, up;  // as in Engine
    DeviceArray<float> inputs;                                    // what products of many rows read, of any type
    DeviceArray<float> normed, logits;                            // (rows, vocabulary)
    DeviceArray<unsigned long long> best;                         // (rows): rank of the likeliest token
    DeviceArray<int> tokens;
    DeviceArray<Span> spans;
    DeviceScratch scratch;
    std::list<StepGraph> graphs;  // the newest first
    bool has_logits = false;      // of the last pass, for all its rows
};
#endif

struct Engine {
    Model model;
    Heads heads;
    int threads;
    std::string device_name;  // what computes, for notes
#ifdef HAS_CUDA
    std::unique_ptr<Gpu> gpu;  // where the model computes, if it is not the CPU
    const Device *device() const { return gpu ? &gpu->device : nullptr; }
#else
    const Device *device() const { return nullptr; }
#endif
    std::vector<float> frequencies;  // (head_dim / 2): radians per position
    // Activations of a pass, in float32:
    Floats x;                       // (rows, hidden): the residual stream
    Floats normed;                  // (rows, hidden)
    Floats query;                   // (rows, heads, head_dim)
    Floats key, value;              // (rows, kv_heads, head_dim)
    Floats attended;                // (rows, heads, head_dim)
    Floats gate, up;                // (rows, ffn)
    Floats turn;                    // (rows, head_dim): cosines and sines
    InputBuffers inputs;            // what the next products read, see inputs_of()
    std::shared_ptr<void> weights;  // where the model's matrices are, if they were moved

    Engine(Model loaded, int thread_count) : model(std::move(loaded)), threads(thread_count) {
        const Config &config = model.config;
        heads = {config.heads, config.kv_heads, config.head_dim};
        frequencies = rope_frequencies(config);
    }
};

inline void make_room(Engine &engine, int rows) {
    const Config &config = engine.model.config;
    size_t count = (size_t)rows, query_width = (size_t)config.heads * config.head_dim;
    size_t kv_width = (size_t)config.kv_heads * config.head_dim;
    for (auto *buffer : {&engine.x, &engine.normed}) buffer->resize(count * config.hidden);
    for (auto *buffer : {&engine.query, &engine.attended}) buffer->resize(count * query_width);
    for (auto *buffer : {&engine.key, &engine.value}) buffer->resize(count * kv_width);
    for (auto *buffer : {&engine.gate, &engine.up}) buffer->resize(count * config.ffn);
    engine.turn.resize(count * config.head_dim);
    engine.inputs.resize(rows, std::max({config.hidden, config.ffn, (int)query_width}));
}

// Calls use() with the matrices that every token is multiplied with: those of the layers, and the head.
template <class AnyModel, class Use>
void for_each_matrix(AnyModel &model, Use use) {
    for (auto &layer : model.layers)
        for (auto *linear :
             {&layer.query, &layer.key, &layer.value, &layer.output, &layer.gate, &layer.up, &layer.down})
            use(linear->weight);
    use(model.head);
}

// Threads share the bytes of one matrix.
inline void copy_bytes(char *to, const char *from, size_t bytes) {
    constexpr size_t piece = 1 << 20;
#pragma omp for schedule(static)
    for (size_t at = 0; at < bytes; at += piece) memcpy(to + at, from + at, std::min(piece, bytes - at));
}

// Moves the matrices from the mapped files to huge pages, as they are or as int8 numbers: --weights copied, int8. Int8
// numbers are not looked up by token, so a tied model's embedding stays where it is, and is no longer its head.
inline void move_weights(Engine &engine, bool to_int8) {
    Model &model = engine.model;
    const char *what = to_int8 ? "int8 weights" : "copying the weights";
    auto bytes_of = [&](const Tensor &weight) {
        return to_int8 ? int8_bytes(weight) : (size_t)(weight.rows * weight.cols * dtype_bytes(weight.type));
    };
    auto room_of = [&](const Tensor &weight) { return (bytes_of(weight) + cache_line - 1) / cache_line * cache_line; };
    size_t total = 0, at = 0;
    for_each_matrix(model, [&](Tensor &weight) { total += room_of(weight); });
    Room room = room_for_cache(nullptr);
    if ((double)total > room.bytes)
        fail("--weights %s: it takes %.1f GiB, %s has %.1f GiB: leave the flag out", to_int8 ? "int8" : "copied",
             (double)total / 0x1p30, room.name.c_str(), room.bytes / 0x1p30);
    engine.weights = reserve(total, "the weights");
    bool tied = model.head.data == model.embedding.data, good = true;
    for_each_matrix(model, [&](Tensor &weight) {
        if (isatty(2)) fprintf(stderr, "\r%s: %3.0f %%", what, 100.0 * at / total);
        char *to = (char *)engine.weights.get() + at;
        at += room_of(weight);
#pragma omp parallel num_threads(engine.threads) reduction(&& : good)
        if (to_int8)
            good = quantize((Int8Block *)to, weight) && good;
        else
            copy_bytes(to, (const char *)weight.data, bytes_of(weight));
        bool stays = to_int8 && tied && &weight == &model.head;
        if (!stays) model.weight_bytes -= weight.rows * weight.cols * dtype_bytes(weight.type);
        model.weight_bytes += (int64_t)bytes_of(weight);
        weight.data = to;
        if (to_int8) weight.type = DType::int8;
        for (const Mapping &file : model.files) forget_pages(file);
    });
    if (tied && !to_int8) model.embedding = model.head;
    if (isatty(2)) fprintf(stderr, "\r%40s\r", "");
    if (!good)
        fail("--weights int8: a weight is NaN or beyond 8.3e6, which its scales cannot hold: leave the flag out");
}

#ifdef HAS_CUDA
template <class AnyModel, class Use>
void for_each_tensor(AnyModel &model, Use use) {
    for (auto *tensor : {&model.embedding, &model.final_norm, &model.head}) use(*tensor);
    for (auto &layer : model.layers) {
        for (auto *linear :
             {&layer.query, &layer.key, &layer.value, &layer.output, &layer.gate, &layer.up, &layer.down})
            use(linear->weight), use(linear->bias);
        for (auto *tensor : {&layer.attention_norm, &layer.query_norm, &layer.key_norm, &layer.mlp_norm}) use(*tensor);
    }
}

// Products that are computed in one launch read weights of one type.
inline void check_types(const Model &model) {
    for (const LayerWeights &layer : model.layers) {
        DType qkv = layer.query.weight.type, mlp = layer.gate.weight.type;
        if (layer.key.weight.type != qkv || layer.value.weight.type != qkv || layer.up.weight.type != mlp)
            fail("this checkpoint's q, k and v, or its gate and up, differ in type: --device cpu computes such models");
    }
}

// Copies the weights, once, from the file's mapping to the card, with a progress line.
inline void upload_weights(Gpu &gpu, const Model &model) {
    constexpr size_t alignment = 256, piece = 64 << 20;
    check_types(model);
    std::map<const void *, std::pair<size_t, size_t>> places;  // a tensor in memory -> where on the card, its bytes
    size_t total = 0, done = 0;
    for_each_tensor(model, [&](const Tensor &tensor) {
        size_t bytes = (size_t)(tensor.rows * tensor.cols) * dtype_bytes(tensor.type);
        if (!tensor.data || !places.insert({tensor.data, {total, bytes}}).second) return;  // a tied head
        total += (bytes + alignment - 1) / alignment * alignment;
    });
    if (total > free_memory()) {
        fail(
            "the weights need %.3f GiB, %s has %.3f GiB free, enough for %.2f G parameters of this type: choose a "
            "smaller model, or --device cpu",
            (double)total / 0x1p30, gpu.device.properties.name, (double)free_memory() / 0x1p30,
            (double)model.parameters * free_memory() / total / 1e9);
    }
    gpu.weights = device_memory(gpu.device, total, "the weights", "choose a smaller model, or --device cpu");
    char *start = (char *)gpu.weights.get();
    for (auto &[data, place] : places) {
        for (size_t at = 0; at < place.second; at += piece, done += piece) {
            copy(gpu.device, start + place.first + at, (const char *)data + at, std::min(piece, place.second - at));
            if (isatty(2)) fprintf(stderr, "\rweights to the GPU: %3.0f %%", std::min(100.0, 100.0 * done / total));
        }
    }
    if (isatty(2)) fprintf(stderr, "\r%24s\r", "");
    gpu.model.config = model.config;
    gpu.model.embedding = model.embedding;
    gpu.model.final_norm = model.final_norm;
    gpu.model.head = model.head;
    gpu.model.layers = model.layers;
    for_each_tensor(gpu.model, [&](Tensor &tensor) {
        if (tensor.data) tensor.data = start + places.at(tensor.data).first;
    });
}

inline void make_room(Gpu &gpu, int rows) {
    const Config &config = gpu.model.config;
    size_t count = (size_t)rows, query_width = (size_t)config.heads * config.head_dim;
    size_t kv_width = (size_t)config.kv_heads * config.head_dim;
    bool moved = false;
    auto resize = [&](auto &buffer, size_t width) { moved |= buffer.resize(gpu.device, count * width); };
    for (auto *buffer : {&gpu.query, &gpu.attended}) resize(*buffer, query_width);
    for (auto *buffer : {&gpu.key, &gpu.value}) resize(*buffer, kv_width);
    for (auto *buffer : {&gpu.gate, &gpu.up}) resize(*buffer, config.ffn);
    resize(gpu.inputs, std::max({(size_t)config.hidden, (size_t)config.ffn, query_width}));
    resize(gpu.x, config.hidden);
    resize(gpu.tokens, 1);
    resize(gpu.spans, 1);
    if (moved) gpu.graphs.clear();
}

// y = or += weight x for many rows and each of some products that read the same. prepare(inputs) writes it in the type
// of a weight: on tensor cores activations are rounded to the 16 bits of the weights, within 2^-9 (bf16) or 2^-12 (f16)
// of themselves; sums stay float32. Weights in f32 are multiplied in float32.
template <class Prepare>
void multiply(Gpu &gpu, int count, Prepare prepare, std::initializer_list<std::pair<const Linear *, float *>> products,
              Store store = Store::set) {
    const Linear *before = nullptr;
    for (auto &[product, y] : products) {
        with_numbers(product->weight, [&, &product = product, &y = y](auto *weight) {
            auto *inputs = (std::decay_t<decltype(*weight)> *)gpu.inputs.data();
            if (!before || before->weight.type != product->weight.type) prepare(inputs);
            linear(gpu.device, y, inputs, *product, count, store);
        });
        before = product;
    }
}

// What a layer's step between its products stores and turns.
inline DeviceStore store_of(Gpu &gpu, const CacheView &cache, int layer, bool keep) {
    const Config &config = gpu.model.config;
    const LayerWeights &weights = gpu.model.layers[layer];
    return {gpu.query.data(),
            gpu.key.data(),
            gpu.value.data(),
            weights.query_norm,
            weights.key_norm,
            (float)config.norm_epsilon,
            cache,
            layer,
            {config.heads, config.kv_heads, config.head_dim},
            config.head_dim,
            gpu.frequencies.data(),
            keep};
}

inline DeviceAttention attention_of(Gpu &gpu, const CacheView &cache, int layer, const Visible &visible) {
    const Config &config = gpu.model.config;
    return {gpu.attended.data(),
            gpu.query.data(),
            gpu.key.data(),
            gpu.value.data(),
            cache,
            layer,
            visible,
            {config.heads, config.kv_heads, config.head_dim},
            gpu.frequencies.data()};
}

inline Products products_of(const float *x, int count, const Tensor &norm, double epsilon, Store store = Store::set) {
    Products products;
    products.x = x;
    products.count = count;
    products.norm = norm;
    products.epsilon = (float)epsilon;
    products.store = store;
    return products;
}
#endif

// One pass through all layers; what comes out is in engine.x. attention(layer) is called by all threads when query,
// key and value are there, and leaves its result in `attended`: the one step in which the two paths differ.
template <class Attention>
void forward(Engine &engine, const Rows &rows, Attention attention) {
    const Model &model = engine.model;
    const Config &config = model.config;
    int count = rows.count(), head_dim = config.head_dim;
    double epsilon = config.norm_epsilon;
    make_room(engine, count);
    float *x = engine.x.data(), *normed = engine.normed.data(), *query = engine.query.data(), *key = engine.key.data();
    float *value = engine.value.data(), *gate = engine.gate.data(), *up = engine.up.data(), *turn = engine.turn.data();

#pragma omp parallel num_threads(engine.threads)
    {
        embed(x, model.embedding, rows.tokens.data(), count);
        rope_angles(turn, engine.frequencies, rows.positions.data(), count);
        barrier();
        for (int layer = 0; layer < config.layers; layer++) {
            const LayerWeights &weights = model.layers[layer];
            // n = RMSNorm(x); q, k, v = W n + b. `in` is what the products read: n, or its parts for matrix tiles.
            rms_norm(normed, x, weights.attention_norm, count, epsilon);
            barrier();
            Inputs in = inputs_of(engine.inputs, normed, count, weights.query.weight, rows.many);
            linear(query, in, weights.query);
            linear(key, in, weights.key);
            linear(value, in, weights.value);
            comes_next(weights.output, count);
            barrier();
            if (weights.query_norm.data) {
                rms_norm(query, query, weights.query_norm, (int64_t)count * config.heads, epsilon);
                rms_norm(key, key, weights.key_norm, (int64_t)count * config.kv_heads, epsilon);
                barrier();
            }
            // Each pair of q and of k is turned by an angle that grows with its position.
            rope(query, turn, count, config.heads, head_dim);
            rope(key, turn, count, config.kv_heads, head_dim);
            barrier();
            // x += W_output softmax(q K^T / sqrt(D)) V
            attention(layer);
            barrier();
            in = inputs_of(engine.inputs, engine.attended.data(), count, weights.output.weight, rows.many);
            linear(x, in, weights.output, Store::add);
            comes_next(weights.gate, count);
            barrier();
            // n = RMSNorm(x); x += W_down (silu(W_gate n) * W_up n)
            rms_norm(normed, x, weights.mlp_norm, count, epsilon);
            barrier();
            in = inputs_of(engine.inputs, normed, count, weights.gate.weight, rows.many);
            linear(gate, in, weights.gate);
            linear(up, in, weights.up);
            comes_next(weights.down, count);
            barrier();
            swiglu(gate, gate, up, (int64_t)count * config.ffn);
            barrier();
            in = inputs_of(engine.inputs, gate, count, weights.down.weight, rows.many);
            linear(x, in, weights.down, Store::add);
            if (layer + 1 < config.layers) comes_next(model.layers[layer + 1].query, count);
            barrier();
        }
    }
}

#ifdef HAS_CUDA
// The same for many rows on the card. `cache` is where their keys and values go, if anywhere.
template <class Attention>
void forward(Gpu &gpu, const Rows &rows, const CacheView &cache, Attention attention) {
    const Device &device = gpu.device;
    const Config &config = gpu.model.config;
    int count = rows.count();
    make_room(gpu, count);
    float *x = gpu.x.data(), *gate = gpu.gate.data(), *up = gpu.up.data(), *attended = gpu.attended.data();
    double epsilon = config.norm_epsilon;
    std::vector<Span> spans = spans_of(rows.sequences.data(), rows.positions.data(), count, group_size, true);
    copy(device, gpu.tokens.data(), rows.tokens.data(), count * sizeof(int));
    copy(device, gpu.spans.data(), spans.data(), spans.size() * sizeof(Span));
    gpu.has_logits = false;
    embed(device, x, gpu.model.embedding, gpu.tokens.data(), count);
    for (int layer = 0; layer < config.layers; layer++) {
        const LayerWeights &weights = gpu.model.layers[layer];
        DeviceStore store = store_of(gpu, cache, layer, false);
        multiply(gpu, count, [&](auto *to) { rms_norm(device, to, x, weights.attention_norm, count, epsilon); },
                 {{&weights.query, store.query}, {&weights.key, store.key}, {&weights.value, store.value}});
        rope_and_store(device, store, gpu.spans.data(), (int)spans.size(), group_size);
        attention(layer);
        if (cache.recent_keys.data || cache.recent_values.data)
            keep_recent(device, store, gpu.spans.data(), (int)spans.size());
        multiply(
            gpu, count, [&](auto *to) { convert(device, to, attended, (int64_t)count * weights.output.weight.cols); },
            {{&weights.output, x}}, Store::add);
        multiply(gpu, count, [&](auto *to) { rms_norm(device, to, x, weights.mlp_norm, count, epsilon); },
                 {{&weights.gate, gate}, {&weights.up, up}});
        multiply(
            gpu, count, [&](auto *to) { swiglu(device, to, gate, up, (int64_t)count * config.ffn); },
            {{&weights.down, x}}, Store::add);
    }
}

// And for one row of each sequence, whose token and span are in gpu.tokens and gpu.spans: 7 launches a layer, and after
// them the logits and the likeliest tokens.
inline void forward_step(Gpu &gpu, const Layout &layout, const CacheView &cache, int count) {
    const Device &device = gpu.device;
    const Config &config = gpu.model.config;
    double epsilon = config.norm_epsilon;
    float *x = gpu.x.data();
    embed(device, x, gpu.model.embedding, gpu.tokens.data(), count);
    for (int layer = 0; layer < config.layers; layer++) {
        const LayerWeights &weights = gpu.model.layers[layer];
        Products qkv = products_of(x, count, weights.attention_norm, epsilon);
        qkv.add(weights.query, gpu.query.data());
        qkv.add(weights.key, gpu.key.data());
        qkv.add(weights.value, gpu.value.data());
        linear(device, qkv);
        rope_and_store(device, store_of(gpu, cache, layer, true), gpu.spans.data(), count, 1);
        attend_rows(device, gpu.scratch, attention_of(gpu, cache, layer, visible_of(layout, weights.window)),
                    gpu.spans.data(), count);
        Products output = products_of(gpu.attended.data(), count, {}, 0, Store::add);
        output.add(weights.output, x);
        linear(device, output);
        Products gate_up = products_of(x, count, weights.mlp_norm, epsilon);
        gate_up.swiglu = true;
        gate_up.add(weights.gate, gpu.gate.data());
        gate_up.add(weights.up, gpu.gate.data());
        linear(device, gate_up);
        Products down = products_of(gpu.gate.data(), count, {}, 0, Store::add);
        down.add(weights.down, x);
        linear(device, down);
    }
    Products head = products_of(x, count, gpu.model.final_norm, epsilon);
    head.add({gpu.model.head, {}}, gpu.logits.data());
    linear(device, head);
    check(cudaMemsetAsync(gpu.best.data(), 0, count * sizeof(unsigned long long), device.stream), "cudaMemsetAsync");
    argmax(device, gpu.best.data(), gpu.logits.data(), count, config.vocabulary);
}

inline std::vector<float> logits(Gpu &gpu, int first, int count) {
    const Config &config = gpu.model.config;
    constexpr int few = 4;  // so many read the head's weights one after another
    const float *x = gpu.x.data() + (size_t)first * config.hidden;
    if (!gpu.has_logits) {
        if (gpu.logits.resize(gpu.device, (size_t)count * config.vocabulary)) gpu.graphs.clear();
        Linear head = {gpu.model.head, {}};
        if (count <= few) {
            Products products = products_of(x, count, gpu.model.final_norm, config.norm_epsilon);
            products.add(head, gpu.logits.data());
            linear(gpu.device, products);
        } else {
            multiply(gpu, count,
                     [&](auto *to) { rms_norm(gpu.device, to, x, gpu.model.final_norm, count, config.norm_epsilon); },
                     {{&head, gpu.logits.data()}});
        }
        first = 0;
    }
    const float *from = gpu.logits.data() + (size_t)first * config.vocabulary;
    return download(gpu.device, from, (size_t)count * config.vocabulary);
}
#endif

// Logits of `count` rows of the last pass, from row `first` on: (count, vocabulary).
inline std::vector<float> logits(Engine &engine, int first, int count) {
#ifdef HAS_CUDA
    if (engine.gpu) return logits(*engine.gpu, first, count);
#endif
    const Model &model = engine.model;
    std::vector<float> result((size_t)count * model.config.vocabulary);
    float *normed = engine.normed.data();
#pragma omp parallel num_threads(engine.threads)
    {
        rms_norm(normed, engine.x.data() + (size_t)first * model.config.hidden, model.final_norm, count,
                 model.config.norm_epsilon);
        barrier();
        linear(result.data(), inputs_of(engine.inputs, normed, count, model.head, false), {model.head, {}});
    }
    return result;
}

#ifdef HAS_CUDA
// On tensor cores queries, keys and values are rounded like all that is multiplied there.
inline bool exact(const Gpu &gpu) { return gpu.model.layers[0].query.weight.type == DType::f32; }

// The pass's own keys and values are read as a contiguous f32 cache is.
inline void forward_naive(Gpu &gpu, const Rows &rows, const Layout &layout) {
    const Config &config = gpu.model.config;
    int count = rows.count();
    make_room(gpu, count);
    CacheView own;
    own.layout = Layout(Contiguous{count});
    size_t row_bytes = config.head_dim * sizeof(float);
    own.keys = {(char *)gpu.key.data(), row_bytes, config.head_dim, config.kv_heads, count};
    own.values = {(char *)gpu.value.data(), row_bytes, config.head_dim, config.kv_heads, count};
    own.sink_keys = own.keys;
    own.sink_values = own.values;
    own.sinks = visible_of(layout, 0).sinks;
    forward(gpu, rows, CacheView(), [&](int layer) {
        DeviceAttention attention = attention_of(gpu, own, 0, visible_of(layout, gpu.model.layers[layer].window));
        attention.sinks_turned = true;
        attend_chunk(gpu.device, attention, {0, count, 0, 0, 0, count}, exact(gpu));
    });
}
#endif

// The naive path: a pass over all tokens so far. Nothing is kept, so the next token costs all of this again, and more.
// `layout` says what each token sees: with a ring, what the ring would still hold.
inline void naive_pass(Engine &engine, const std::vector<int> &tokens, const Layout &layout = Contiguous{}) {
    Rows rows;
    rows.many = true;
    std::vector<int> shifts;
    Visible widest = visible_of(layout, 0);
    for (size_t t = 0; t < tokens.size(); t++) {
        rows.add(tokens[t], 0, (int)t);
        shifts.push_back(widest.shift((int)t));
    }
#ifdef HAS_CUDA
    if (engine.gpu) return forward_naive(*engine.gpu, rows, layout);
#endif
    Floats shift_turn(widest.sinks ? tokens.size() * engine.heads.width : 0);  // (tokens, head_dim)
    if (widest.sinks) rope_angles(shift_turn.data(), engine.frequencies, shifts.data(), rows.count());
    forward(engine, rows, [&](int layer) {
        attend_plain(engine.attended.data(), engine.query.data(), engine.key.data(), engine.value.data(), engine.heads,
                     rows.count(), visible_of(layout, engine.model.layers[layer].window), shift_turn.data());
    });
}

// And the logits of its last token.
inline std::vector<float> forward_naive(Engine &engine, const std::vector<int> &tokens,
                                        const Layout &layout = Contiguous{}) {
    naive_pass(engine, tokens, layout);
    return logits(engine, (int)tokens.size() - 1, 1);
}

// Stores the pass's keys and values of one layer: an item is a span of positions and a KV head.
inline void store_pass(Engine &engine, Cache &cache, const AttentionPlan &plan, int layer) {
    int heads = engine.heads.kv, width = engine.heads.width;
#pragma omp for schedule(static) nowait
    for (int item = 0; item < (int)plan.stored.size() * heads; item++) {
        const Span &span = plan.stored[item / heads];
        store_span(cache, layer, span, item % heads, engine.key.data(), engine.value.data());
        for (int t = span.position; t < std::min(span.position + span.count, plan.widest.sinks); t++) {
            size_t row = (size_t)(span.row + t - span.position), at = (row * heads + item % heads) * width;
            store_sink(cache, layer, span.sequence, t, item % heads, &engine.key[at], &engine.turn[row * width],
                       &engine.value[at]);
        }
    }
}

#ifdef HAS_CUDA
// One row of each sequence. The first step with a cache is launched as it is, and then recorded for the next ones.
inline void forward_rows(Gpu &gpu, const Cache &cache, const Rows &rows) {
    int count = rows.count();
    const Device &device = gpu.device;
    make_room(gpu, count);
    bool moved = gpu.logits.resize(device, (size_t)count * gpu.model.config.vocabulary);
    if (gpu.best.resize(device, count) || moved) gpu.graphs.clear();
    CacheView view = view_of(cache);
    std::vector<Span> spans = spans_of(rows.sequences.data(), rows.positions.data(), count, 1, false);
    copy(device, gpu.tokens.data(), rows.tokens.data(), count * sizeof(int));
    copy(device, gpu.spans.data(), spans.data(), count * sizeof(Span));
    gpu.has_logits = true;
    for (const StepGraph &graph : gpu.graphs)
        if (graph.is_for(view, count)) return check(cudaGraphLaunch(graph.step, device.stream), "cudaGraphLaunch");
    const Config &config = gpu.model.config;
    int capacity = visible_of(cache.layout, 0).window ? visible_of(cache.layout, 0).window : limit_of(cache);
    Heads heads = {config.heads, config.kv_heads, config.head_dim};
    if (prepare_scratch(device, gpu.scratch, heads, heads.width, count, capacity)) gpu.graphs.clear();
    forward_step(gpu, cache.layout, view, count);
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(device.stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    forward_step(gpu, cache.layout, view, count);
    check(cudaStreamEndCapture(device.stream, &graph), "cudaStreamEndCapture");
    if (gpu.graphs.size() == most_graphs) gpu.graphs.pop_back();
    gpu.graphs.emplace_front(graph, view, count);
    cudaGraphDestroy(graph);
}

inline void forward_cached(Gpu &gpu, const Cache &cache, const Rows &rows) {
    if (!rows.many) return forward_rows(gpu, cache, rows);
    CacheView view = view_of(cache);
    forward(gpu, rows, view, [&](int layer) {
        DeviceAttention attention =
            attention_of(gpu, view, layer, visible_of(cache.layout, gpu.model.layers[layer].window));
        for (const Span &chunk : spans_of(rows.sequences.data(), rows.positions.data(), rows.count(), INT_MAX, false))
            attend_chunk(gpu.device, attention, chunk, exact(gpu));
    });
}
#endif

// The cached path: a pass over new tokens; the rows' positions must have been made room for with grow().
inline void forward_cached(Engine &engine, Cache &cache, const Rows &rows) {
#ifdef HAS_CUDA
    if (engine.gpu) return forward_cached(*engine.gpu, cache, rows);
#endif
    const Heads &heads = engine.heads;
    int count = rows.count();
    AttentionPlan plan = plan_attention(rows.sequences.data(), rows.positions.data(), count, heads, cache,
                                        engine.frequencies, engine.threads, rows.many);
    forward(engine, rows, [&](int layer) {
        store_pass(engine, cache, plan, layer);
        barrier();
        PassVectors key = {engine.key.data(), heads.kv, heads.width};
        PassVectors value = {engine.value.data(), heads.kv, heads.width};
        attend({engine.attended.data(), engine.query.data(), key, value, cache, layer,
                visible_of(cache.layout, engine.model.layers[layer].window), rows.many},
               plan);
        if (!plan.blocks) return;
        barrier();
#pragma omp for schedule(static) nowait
        for (int item = 0; item < (int)plan.stored.size() * heads.kv; item++)
            keep_recent(cache, layer, plan.stored[item / heads.kv], item % heads.kv, key.start, value.start);
    });
}

// Rows of a prefill pass: enough to use each weight often, few enough to stay small.
inline int chunk_tokens(const Engine &engine) { return engine.device() ? 2048 : 512; }

// Reads a prompt into the cache, in chunks of many tokens, and returns in which row of the last pass its last position
// is. after_chunk(rows), if there is one, may ask for the logits of all rows of the chunk.
inline int prefill_pass(Engine &engine, Cache &cache, int sequence, const std::vector<int> &tokens,
                        const std::function<void(int rows)> &after_chunk = nullptr) {
    int first = grow(cache, sequence, (int)tokens.size()), rows_of_last = 0;
    size_t chunk = std::min(chunk_tokens(engine), chunk_of(cache));
    for (size_t begin = 0; begin < tokens.size(); begin += chunk) {
        Rows rows;
        rows.many = true;
        for (size_t t = begin; t < std::min(begin + chunk, tokens.size()); t++)
            rows.add(tokens[t], sequence, first + (int)t);
        forward_cached(engine, cache, rows);
        rows_of_last = rows.count();
        if (after_chunk) after_chunk(rows_of_last);
    }
    return rows_of_last - 1;
}

// And the logits of its last position.
inline std::vector<float> prefill(Engine &engine, Cache &cache, int sequence, const std::vector<int> &tokens,
                                  const std::function<void(int rows)> &after_chunk = nullptr) {
    return logits(engine, prefill_pass(engine, cache, sequence, tokens, after_chunk), 1);
}

// One new token for each of some sequences.
inline void decode_pass(Engine &engine, Cache &cache, const std::vector<int> &sequences,
                        const std::vector<int> &tokens) {
    Rows rows;
    for (size_t i = 0; i < sequences.size(); i++) rows.add(tokens[i], sequences[i], grow(cache, sequences[i], 1));
    forward_cached(engine, cache, rows);
}

// And their logits (sequences, vocabulary).
inline std::vector<float> decode(Engine &engine, Cache &cache, const std::vector<int> &sequences,
                                 const std::vector<int> &tokens) {
    decode_pass(engine, cache, sequences, tokens);
    return logits(engine, 0, (int)sequences.size());
}

// ---- Sampling ----------------------------------------------------------------------------------------------

struct Sampler {
    double temperature, top_p, min_p;
    int top_k;
    std::mt19937_64 random;
};

// The next token. At temperature 0 the likeliest one, the first of equals. Otherwise drawn from softmax(logits / T)
// after top-k, then top-p (Holtzman et al. 2020), then min-p (Nguyen et al. 2024) have cut its tail.
inline int sample(Sampler &sampler, const std::vector<float> &logits) {
    int most = argmax(logits.data(), (int)logits.size());
    if (sampler.temperature == 0) return most;
    std::vector<std::pair<double, int>> candidates;  // probability (not normalised: the likeliest has 1), token
    for (size_t i = 0; i < logits.size(); i++)
        candidates.push_back({std::exp(((double)logits[i] - logits[most]) / sampler.temperature), (int)i});
    auto likelier = [](const auto &a, const auto &b) {
        return a.first > b.first || (a.first == b.first && a.second < b.second);
    };
    size_t kept_by_k = sampler.top_k > 0 ? std::min((size_t)sampler.top_k, candidates.size()) : candidates.size();
    std::partial_sort(candidates.begin(), candidates.begin() + (int64_t)kept_by_k, candidates.end(), likelier);
    candidates.resize(kept_by_k);
    double total = 0, kept = 0;
    for (auto &candidate : candidates) total += candidate.first;
    size_t count = 0;
    while (count < candidates.size() && (count == 0 || kept < sampler.top_p * total)) kept += candidates[count++].first;
    while (count > 1 && candidates[count - 1].first < sampler.min_p) kept -= candidates[--count].first;
    double point = (double)(sampler.random() >> 11) * 0x1p-53 * kept;
    for (size_t i = 0; i + 1 < count; i++) {
        if (point < candidates[i].first) return candidates[i].second;
        point -= candidates[i].first;
    }
    return candidates[count - 1].second;
}

// A damaged checkpoint shows here first. Says where instead of generating from nonsense.
inline void require_finite(const std::vector<float> &logits, int position) {
    for (float logit : logits)
        if (!std::isfinite(logit))
            fail("position %d: a logit is %g, expected a finite number: are the weights damaged?", position, logit);
}

// The token after row `row` of the last pass, which is that of `position`. The likeliest one of a decoding step is
// found on the card, and the vocabulary's logits stay there.
inline int next_token(Engine &engine, Sampler &sampler, int row, int position) {
#ifdef HAS_CUDA
    if (engine.gpu && engine.gpu->has_logits && sampler.temperature == 0) {
        int token = token_of(download(engine.gpu->device, engine.gpu->best.data() + row, 1)[0]);
        if (token >= 0) return token;
    }
#endif
    std::vector<float> found = logits(engine, row, 1);
    require_finite(found, position);
    return sample(sampler, found);
}

// ---- Text in, text out -------------------------------------------------------------------------------------

using TokenizerPointer = std::unique_ptr<Tokenizer, decltype(&tokenizer_free)>;

inline TokenizerPointer load_tokenizer(const std::string &directory) {
    char error[1000];
    Tokenizer *tokenizer = tokenizer_load(join_path(directory, "tokenizer.json").c_str(), error, sizeof error);
    if (!tokenizer) fail("%s", error);
    return TokenizerPointer(tokenizer, tokenizer_free);
}

// Without -m: the checkpoint that lies beside the program.
inline std::string checkpoint_directory(const Options &options) {
    if (options.given.count("-m")) return options.directory;
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path);
    std::string program = length > 0 ? std::string(path, (size_t)length) : "./llm";
    std::string directory = program.substr(0, program.rfind('/')) + "/weights_tools/builtin";
    if (!file_exists(directory)) fail("%s: the built-in checkpoint is not there: give -m DIR", directory.c_str());
    return directory;
}

inline std::vector<int> parse_ids(const std::string &list) {
    std::vector<int> ids;
    const char *at = list.c_str();
    while (true) {
        char *end;
        errno = 0;
        long long id = strtoll(at, &end, 10);
        if (end == at || errno || id < 0 || id > INT32_MAX || (*end && *end != ','))
            fail("--ids: \"%s\" at character %zu: expected token ids such as 1,2,3", at,
                 (size_t)(at - list.c_str()) + 1);
        ids.push_back((int)id);
        if (!*end) return ids;
        at = end + 1;
    }
}

inline std::vector<int> encode(const Tokenizer *tokenizer, const std::string &text,
                               const std::string &what = "the prompt") {
    char error[1000];
    int *ids = nullptr;
    int count = tokenizer_encode(tokenizer, text.data(), text.size(), true, &ids, error, sizeof error);
    if (count < 0) fail("%s: %s", what.c_str(), error);
    std::vector<int> result(ids, ids + count);
    free(ids);
    return result;
}

// The prompt's text as -p or -f give it.
inline std::string prompt_text(const Options &options) {
    const std::string &file = options.prompt_file;
    std::error_code is_no_file;  // which read_file says better
    bool empty_file = options.given.count("-f") && std::filesystem::file_size(file, is_no_file) == 0;
    std::string text = options.given.count("-f") && !empty_file ? read_file(file, 1 << 30) : options.prompt;
    if (text.empty()) fail("the prompt is empty: give -p TEXT, -f FILE or --ids 1,2,3");
    return text;
}

inline std::vector<int> prompt_tokens(const Options &options, const Tokenizer *tokenizer, const Config &config) {
    std::vector<int> ids =
        options.given.count("--ids") ? parse_ids(options.prompt_ids) : encode(tokenizer, prompt_text(options));
    for (int id : ids) {
        if (id >= config.vocabulary) {
            fail("token id %d in the prompt: the model's vocabulary has %d entries, ids 0 .. %d", id, config.vocabulary,
                 config.vocabulary - 1);
        }
    }
    if (ids.empty()) fail("the prompt has no tokens: give more text");
    return ids;
}

// Tokens of one sequence as text that can be printed at once. Without a tokenizer: the ids.
struct TextStream {
    const Tokenizer *tokenizer;
    std::unique_ptr<TokenizerStream, decltype(&tokenizer_stream_free)> stream{nullptr, tokenizer_stream_free};
    explicit TextStream(const Tokenizer *source) : tokenizer(source) {
        if (tokenizer) stream.reset(tokenizer_stream_begin(tokenizer, true));
    }
    std::string next(int id) {
        if (!tokenizer) return std::to_string(id) + " ";
        size_t length;
        const char *text = tokenizer_stream_next(stream.get(), id, &length);
        return text ? std::string(text, length) : "";
    }
    std::string flush() {
        size_t length;
        const char *text = tokenizer ? tokenizer_stream_flush(stream.get(), &length) : nullptr;
        return text ? std::string(text, length) : "";
    }
};

// ---- Output ------------------------------------------------------------------------------------------------

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Standard output may be a full disk. (A pipe that nobody reads ends the program by SIGPIPE.)
inline void flush_output() {
    if (fflush(stdout) != 0 || ferror(stdout)) fail("standard output: cannot write all of it: is the disk full?");
}

inline Json json_object() { return Json(cJSON_CreateObject()); }

inline void add_ids(cJSON *object, const char *key, const std::vector<int> &ids) {
    cJSON *list = cJSON_AddArrayToObject(object, key);
    for (int id : ids) cJSON_AddItemToArray(list, cJSON_CreateNumber(id));
}

// Text may hold NUL, where cJSON's strings end.
inline void add_text(cJSON *object, const char *key, const std::string &text) {
    std::string json = "\"";
    for (size_t begin = 0, end; begin <= text.size(); begin = end + 1) {
        end = std::min(text.find('\0', begin), text.size());
        Json part(cJSON_CreateString(text.substr(begin, end - begin).c_str()));
        std::unique_ptr<char, decltype(&cJSON_free)> quoted(cJSON_PrintUnformatted(part.get()), cJSON_free);
        json += std::string(begin ? "\\u0000" : "") + std::string(quoted.get() + 1, strlen(quoted.get()) - 2);
    }
    cJSON_AddRawToObject(object, key, (json + "\"").c_str());
}

inline void print_json(const cJSON *object) {
    std::unique_ptr<char, decltype(&cJSON_free)> text(cJSON_Print(object), cJSON_free);
    puts(text.get());
}

inline void add_cache(cJSON *object, const Options &options, const Cache &cache) {
    cJSON *about = cJSON_AddObjectToObject(object, "cache");
    bool none = options.layout == "none";
    cJSON_AddStringToObject(about, "layout", options.layout.c_str());
    cJSON_AddStringToObject(about, "type_k", none ? "none" : name_of(cache.type_k));
    cJSON_AddStringToObject(about, "type_v", none ? "none" : name_of(cache.type_v));
    CacheBytes bytes = none ? CacheBytes{} : bytes_of(cache);
    cJSON_AddNumberToObject(about, "bytes", bytes.total());
    cJSON_AddNumberToObject(about, "payload_bytes", bytes.payload);
    cJSON_AddNumberToObject(about, "metadata_bytes", bytes.metadata);
}

// A NumPy file of float32 rows. Written beside its place and moved there when it is whole.
class RowFile {
public:
    RowFile(const std::string &path, int width) : path_(path), part_(path + ".part"), width_(width) {
        struct stat status;
        if (stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
            fail("--dump-logits %s: is not a regular file: name one, or one that is not there yet", path.c_str());
        file_.reset(fopen(part_.c_str(), "wb"));
        if (!file_) fail("--dump-logits %s: cannot write there: %s", path.c_str(), strerror(errno));
        write_header();
    }
    ~RowFile() {
        if (file_) remove(part_.c_str());
    }
    void add(const std::vector<float> &rows) {
        written_ = written_ && fwrite(rows.data(), sizeof(float), rows.size(), file_.get()) == rows.size();
        count_ += rows.size() / (size_t)width_;
    }
    void finish() {
        written_ = written_ && fseek(file_.get(), 0, SEEK_SET) == 0;
        write_header();
        bool closed = fclose(file_.release()) == 0;
        if (!written_ || !closed || rename(part_.c_str(), path_.c_str()) != 0) {
            int problem = errno;
            remove(part_.c_str());
            fail("--dump-logits %s: cannot write it: %s", path_.c_str(), strerror(problem));
        }
    }

private:
    void write_header() {  // 128 bytes: magic, version 1.0, length of the rest, a Python dictionary
        char text[119];
        int length = snprintf(text, sizeof text, "{'descr': '<f4', 'fortran_order': False, 'shape': (%zu, %d), }",
                              count_, width_);
        memset(text + length, ' ', sizeof text - (size_t)length);
        text[117] = '\n';
        written_ = fwrite("\x93NUMPY\x01\x00\x76\x00", 1, 10, file_.get()) == 10 &&
                   fwrite(text, 1, 118, file_.get()) == 118 && written_;
    }
    std::string path_, part_;
    int width_;
    size_t count_ = 0;
    bool written_ = true;
    std::unique_ptr<FILE, int (*)(FILE *)> file_{nullptr, fclose};
};

// ---- llm generate ------------------------------------------------------------------------------------------

// The commands that measure caches need one.
inline void require_cache(const Options &options) {
    for (const std::string &layout : split(options.layout))
        if (layout == "none") {
            fail("--cache none: llm %s is about caches: %s", options.command.c_str(), layout_names().c_str());
        }
}

#ifdef HAS_CUDA
// Bytes a second of a copy from card to card memory, read and written ones both counted; the median of some copies.
inline double copy_bandwidth(const Device &device) {
    constexpr int copies = 9;
    size_t bytes = std::min<size_t>(256 << 20, free_memory() / 8);
    auto from = device_memory(device, bytes, "measuring the bandwidth", "free some"), to = from;
    to = device_memory(device, bytes, "measuring the bandwidth", "free some");
    std::vector<float> seconds;
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "cudaEventCreate");
    check(cudaEventCreate(&end), "cudaEventCreate");
    for (int i = 0; i < copies; i++) {
        float milliseconds = 0;
        check(cudaEventRecord(begin, device.stream), "cudaEventRecord");
        copy(device, to.get(), from.get(), bytes);
        check(cudaEventRecord(end, device.stream), "cudaEventRecord");
        check(cudaEventSynchronize(end), "cudaEventSynchronize");
        check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
        seconds.push_back(milliseconds / 1e3f);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    std::sort(seconds.begin(), seconds.end());
    return 2.0 * (double)bytes / seconds[copies / 2];
}

// Why no card computes, or "".
inline std::string no_gpu() {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    if (count == 0) return "no CUDA device";
    cudaFuncAttributes attributes;
    error = about_build(attributes);
    if (error != cudaErrorNoKernelImageForDevice) return error == cudaSuccess ? "" : cudaGetErrorString(error);
    cudaGetLastError();  // was told
    cudaDeviceProp card;
    char reason[400];
    check(cudaGetDeviceProperties(&card, 0), "cudaGetDeviceProperties");
    snprintf(reason, sizeof reason, "%s has compute capability %d.%d; this program was built for others", card.name,
             card.major, card.minor);
    return reason;
}

inline void move_to_gpu(Engine &engine) {
    engine.gpu = std::make_unique<Gpu>();
    Gpu &gpu = *engine.gpu;
    upload_weights(gpu, engine.model);
    gpu.frequencies = upload(gpu.device, engine.frequencies);
    const cudaDeviceProp &card = gpu.device.properties;
    char about[400];
    snprintf(about, sizeof about, "%s, %.1f GiB, %.1f of them free; copies at %.0f GB/s, bytes read and written",
             card.name, (double)card.totalGlobalMem / 0x1p30, (double)free_memory() / 0x1p30,
             copy_bandwidth(gpu.device) / 1e9);
    engine.device_name = about;
}
#else
inline std::string no_gpu() { return "built without CUDA"; }
#endif

// Loads a checkpoint and puts it where --device says.
inline Engine open_engine(const Options &options, const std::string &directory) {
    Engine engine(load_model(directory), options.threads);
    bool int8 = options.weights == "int8";
    std::string reason = options.device == "cpu" ? "--device cpu" : int8 ? "--weights int8 computes there" : no_gpu();
    if (options.device == "cuda" && !reason.empty())
        fail("--device cuda: %s: --device auto computes on the CPU then",
             int8 ? "no int8 weights there" : reason.c_str());
    std::string plural = options.threads == 1 ? "" : "s";
    engine.device_name = "CPU, " + std::to_string(options.threads) + " thread" + plural + " (" + reason + ")";
#ifdef HAS_CUDA
    if (reason.empty()) move_to_gpu(engine);
#endif
    if (!reason.empty() && options.weights != "stored") move_weights(engine, int8);
    return engine;
}

// What a cache for this model is made for. A ring sees as far as the model was trained to, unless --window says less.
inline CacheShape cache_shape(const Options &options, const Config &config, int capacity) {
    CacheShape shape{config.layers, config.kv_heads, config.head_dim, config.head_dim, 1, capacity};
    shape.page = options.page;
    shape.sinks = config.window ? 0 : std::min(4, (config.context - 1) / 2);
    if (options.given.count("--sinks")) shape.sinks = options.sinks;
    shape.window = config.window ? config.window : std::max(1, config.context - shape.sinks);
    if (options.given.count("--window")) shape.window = options.window;
    if (shape.sinks >= shape.window) {
        fail("--sinks %d: a window of %d positions, expected fewer sinks than that: lower --sinks or raise --window",
             shape.sinks, shape.window);
    }
    return shape;
}

// One cache that the flags ask for.
struct CacheChoice {
    std::string layout, type_k, type_v;
    int window = 0, sinks = 0;  // of a ring
};

// All that the flags ask for: each layout with each pair of types. --kv gives pairs of equal types.
inline std::vector<CacheChoice> cache_choices(const Options &options, const Config &config) {
    std::vector<CacheChoice> list;
    CacheShape shape = cache_shape(options, config, 0);
    auto add = [&](const std::string &layout, const std::string &type_k, const std::string &type_v) {
        list.push_back({layout, type_k, type_v, shape.window, shape.sinks});
    };
    for (const std::string &layout : split(options.layout)) {
        if (layout == "none") continue;  // the naive path
        for (const std::string &type_k : split(options.type_k)) {
            if (options.given.count("--kv"))
                add(layout, type_k, type_k);
            else
                for (const std::string &type_v : split(options.type_v)) add(layout, type_k, type_v);
        }
    }
    return list;
}

inline Cache open_choice(const Options &options, const Engine &engine, const CacheChoice &choice, int capacity) {
    CacheShape shape = cache_shape(options, engine.model.config, capacity);
    shape.window = choice.window;
    shape.sinks = choice.sinks;
    return open_cache(shape, parse_layout("--cache", choice.layout), parse_precision("--kv", choice.type_k),
                      parse_precision("--kv", choice.type_v), engine.device());
}

// All that one sequence needs to go on, on either path.
struct Session {
    Engine engine;
    TokenizerPointer tokenizer;
    Cache cache;
    std::vector<int> tokens;  // the prompt, then what was generated
    int prompt = 0;           // tokens of the prompt
    int limit = 0;            // tokens that may stand in the context
    bool naive = false;
};

// Checks the prompt against the context and opens a cache just large enough, unless -c says how large.
inline Session open_session(const Options &options) {
    std::string directory = checkpoint_directory(options);
    Engine engine = open_engine(options, directory);
    TokenizerPointer tokenizer(nullptr, tokenizer_free);
    std::string tokenizer_file = join_path(directory, "tokenizer.json");
    if (file_exists(tokenizer_file))
        tokenizer = load_tokenizer(directory);
    else if (!options.given.count("--ids"))
        fail("%s: no such file; fetch it, or give the prompt as --ids 1,2,3", tokenizer_file.c_str());
    Session session{std::move(engine), std::move(tokenizer), {}, {}, 0, 0, false};
    const Config &config = session.engine.model.config;
    session.tokens = prompt_tokens(options, session.tokenizer.get(), config);
    session.prompt = (int)session.tokens.size();
    session.naive = options.layout == "none";
    bool endless = options.layout == Ring::name;
    if (endless && options.given.count("-c"))
        fail("-c %d: a ring holds --window and --sinks positions and goes on without end: drop -c", options.context);
    int64_t wanted = (int64_t)session.prompt + options.count;
    session.limit = (int)std::min<int64_t>(INT_MAX, endless ? wanted : config.context);
    if (options.given.count("-c")) session.limit = options.context;
    if (!endless && session.limit > config.context) {
        fail("-c %d: this model was made for %d positions: lower -c, or use --cache ring", options.context,
             config.context);
    }
    if (session.prompt > session.limit) {
        fail("the prompt has %d tokens, the context holds %d: shorten it, %suse --cache ring", session.prompt,
             session.limit,
             session.limit < config.context
                 ? ("raise -c (this model was made for " + std::to_string(config.context) + "), or ").c_str()
                 : "or ");
    }
    if (!options.given.count("-c")) session.limit = (int)std::min<int64_t>(session.limit, wanted);
    if (options.command == "diff" || !session.naive) {
        session.cache = open_cache(cache_shape(options, config, session.limit),
                                   parse_layout("--cache", session.naive ? "contiguous" : options.layout),
                                   parse_precision("--kv", options.type_k), parse_precision("--kv", options.type_v),
                                   session.engine.device());
    }
    return session;
}

// Why nothing follows the tokens so far, or nullptr if something may.
inline const char *reason_to_stop(const Session &session, const Options &options) {
    const Config &config = session.engine.model.config;
    bool generated = (int)session.tokens.size() > session.prompt;
    bool ended = generated && std::count(config.end_ids.begin(), config.end_ids.end(), session.tokens.back());
    if (ended && !options.ignore_end) return "end id";
    if ((int)session.tokens.size() - session.prompt >= options.count) return "-n";
    if ((int)session.tokens.size() >= session.limit) return "context full";
    return nullptr;
}

// Bytes that one decoding step reads: all weights but the embedding table, of which it reads a row.
inline double weights_read(const Model &model) {
    const Tensor &table = model.embedding;
    bool apart = model.head.data != table.data;
    return (double)model.weight_bytes - (apart ? (double)table.rows * table.cols * dtype_bytes(table.type) : 0);
}

// And of the cache, with `positions` in it: the rows that each layer sees, sinks and recent blocks included.
inline double cache_read(const Model &model, const Cache &cache, int positions) {
    double bytes = 0;
    for (const LayerWeights &layer : model.layers) {
        Visible visible = visible_of(cache.layout, layer.window);
        int last = positions - 1, first = visible.first(last), block = last / group_size * group_size;
        auto add = [&](const CacheRows &rows, const CacheRows &recent, const CacheRows &sinks) {
            int stored = recent.data ? std::max(first, block) : positions;
            bytes += (double)(stored - first) * rows.stride() + (double)(positions - stored) * recent.stride();
            if (visible.dropped(last)) bytes += (double)visible.sinks * sinks.stride();
        };
        add(cache.keys, cache.recent_keys, cache.sink_keys);
        add(cache.values, cache.recent_values, cache.sink_values);
    }
    return bytes;
}

struct Generation {
    std::string text, stop;
    double prefill_seconds = 0, decode_seconds = 0, bytes_read = 0;
    int decoded = 0;  // decoding steps
};

// Logits of all rows of the last pass, a few at a time: a vocabulary is wide.
inline void dump_rows(RowFile &file, Engine &engine, int rows) {
    for (int row = 0; row < rows; row += 32) file.add(logits(engine, row, std::min(32, rows - row)));
}

// Prefill, then token by token. show(text) gets the new text as it comes.
inline Generation generate(Session &session, const Options &options, RowFile *dump,
                           const std::function<void(const std::string &)> &show) {
    Engine &engine = session.engine;
    Sampler sampler{options.temperature, options.top_p, options.min_p, options.top_k,
                    std::mt19937_64((uint64_t)options.seed)};
    TextStream text(session.tokenizer.get());
    for (int token : session.tokens) text.next(token);
    auto dump_chunk = [&](int rows) {
        if (dump) dump_rows(*dump, engine, rows);
    };
    auto pass_last = [&]() {  // returns its row
        if (!session.naive) return decode_pass(engine, session.cache, {0}, {session.tokens.back()}), 0;
        return naive_pass(engine, session.tokens), (int)session.tokens.size() - 1;
    };
    Generation result;
    double start = now();
    int row = session.prompt - 1;
    if (session.naive) {
        naive_pass(engine, session.tokens);
        dump_chunk(session.prompt);
    } else {
        row = prefill_pass(engine, session.cache, 0, session.tokens, dump_chunk);
    }
    int next = next_token(engine, sampler, row, session.prompt - 1);
    result.prefill_seconds = now() - start;
    const char *stop;
    while (!(stop = reason_to_stop(session, options))) {
        session.tokens.push_back(next);
        std::string piece = text.next(next);
        result.text += piece;
        show(piece);
        if (reason_to_stop(session, options) && !dump) continue;  // nobody asks what follows the last token
        start = now();
        row = pass_last();
        next = next_token(engine, sampler, row, (int)session.tokens.size() - 1);
        result.decode_seconds += now() - start;
        result.decoded++;
        result.bytes_read += weights_read(engine.model);
        if (!session.naive) result.bytes_read += cache_read(engine.model, session.cache, (int)session.tokens.size());
        if (dump) dump->add(logits(engine, row, 1));
    }
    std::string rest = text.flush();
    result.text += rest;
    show(rest);
    result.stop = stop;
    return result;
}

inline void print_generation(const Generation &result, const Session &session, const Options &options) {
    double decode_rate = result.decode_seconds > 0 ? result.decoded / result.decode_seconds : 0;
    fprintf(stderr, "\n\nstopped: %s\n", result.stop.c_str());
    fprintf(stderr, "device   %s\n", session.engine.device_name.c_str());
    fprintf(stderr, "prefill  %6d tokens  %9.1f tokens/s\n", session.prompt, session.prompt / result.prefill_seconds);
    fprintf(stderr, "decode   %6d tokens  %9.1f tokens/s  %6.2f GB/s read\n", result.decoded, decode_rate,
            result.decoded ? result.bytes_read / result.decode_seconds / 1e9 : 0);
    if (session.naive) {
        fprintf(stderr, "cache    none: every token was computed from all before it\n");
    } else {
        CacheBytes bytes = bytes_of(session.cache);
        fprintf(stderr, "cache    %s, K %s, V %s: %.0f bytes, %.0f of them metadata, for %d positions\n",
                options.layout.c_str(), name_of(session.cache.type_k), name_of(session.cache.type_v), bytes.total(),
                bytes.metadata, session.cache.lengths[0]);
    }
}

inline int run_generate(const Options &options) {
    Session session = open_session(options);
    std::unique_ptr<RowFile> dump;
    if (options.given.count("--dump-logits"))
        dump = std::make_unique<RowFile>(options.dump_logits, session.engine.model.config.vocabulary);
    auto show = [&](const std::string &piece) {
        if (options.json) return;
        fwrite(piece.data(), 1, piece.size(), stdout);
        flush_output();
    };
    TextStream prompt(session.tokenizer.get());
    for (int token : session.tokens) show(prompt.next(token));
    Generation result = generate(session, options, dump.get(), show);
    if (dump) dump->finish();
    if (!options.json) {
        puts("");
        print_generation(result, session, options);
        return 0;
    }
    Json object = json_object();
    add_ids(object.get(), "prompt_tokens", {session.tokens.begin(), session.tokens.begin() + session.prompt});
    add_ids(object.get(), "tokens", {session.tokens.begin() + session.prompt, session.tokens.end()});
    add_text(object.get(), "text", result.text);
    cJSON_AddStringToObject(object.get(), "stop", result.stop.c_str());
    cJSON_AddStringToObject(object.get(), "device", session.engine.device_name.c_str());
    cJSON *prefill = cJSON_AddObjectToObject(object.get(), "prefill");
    cJSON_AddNumberToObject(prefill, "tokens", session.prompt);
    cJSON_AddNumberToObject(prefill, "seconds", result.prefill_seconds);
    cJSON *decode = cJSON_AddObjectToObject(object.get(), "decode");
    cJSON_AddNumberToObject(decode, "tokens", result.decoded);
    cJSON_AddNumberToObject(decode, "seconds", result.decode_seconds);
    cJSON_AddNumberToObject(decode, "bytes", result.bytes_read);
    add_cache(object.get(), options, session.cache);
    print_json(object.get());
    return 0;
}

// ---- llm tokenize -------------------------------------------------------------------------------------------

inline int run_tokenize(const Options &options) {
    TokenizerPointer tokenizer = load_tokenizer(checkpoint_directory(options));
    std::vector<int> ids;
    std::string text = options.prompt;
    bool from_ids = options.given.count("--ids");
    if (from_ids) {
        ids = parse_ids(options.prompt_ids);
        text.clear();
        for (int id : ids) {
            if (id >= tokenizer_size(tokenizer.get()))
                fail("--ids: id %d, the tokenizer has ids 0 .. %d", id, tokenizer_size(tokenizer.get()) - 1);
        }
        size_t length;
        std::unique_ptr<char, decltype(&free)> decoded(
            tokenizer_decode(tokenizer.get(), ids.data(), (int)ids.size(), true, &length), free);
        if (!decoded) throw std::bad_alloc();
        text.assign(decoded.get(), length);
    } else {
        if (!options.given.count("-p") || !text.empty()) text = prompt_text(options);
        ids = encode(tokenizer.get(), text);
    }
    if (options.json) {
        Json object = json_object();
        add_ids(object.get(), "ids", ids);
        add_text(object.get(), "text", text);
        print_json(object.get());
    } else if (from_ids) {
        fwrite(text.data(), 1, text.size(), stdout);
        puts("");
    } else {
        for (size_t i = 0; i < ids.size(); i++) printf("%s%d", i ? "," : "", ids[i]);
        puts("");
    }
    return 0;
}

#include "measure.h"

inline int run_command(const Options &options) {
    if (options.help) return print_help(stdout), 0;
    if (options.command == "generate") return run_generate(options);
    if (options.command == "diff") return run_diff(options);
    if (options.command == "eval") return run_eval(options);
    if (options.command == "bench") return run_bench(options);
    if (options.command == "memory") return run_memory(options);
    if (options.command == "tokenize") return run_tokenize(options);
    return run_info(options);
}

inline int run(const std::vector<std::string> &arguments) {
    int status = run_command(parse_options(arguments));
    flush_output();
    return status;
}

#ifndef LLM_WITHOUT_MAIN
int main(int argc, char **argv) {
    // Also where no exception may pass: in the threads of a parallel region.
    std::set_new_handler([] {
        fputs("llm: not enough memory: shorten the prompt or lower -c\n", stderr);
        _exit(2);
    });
    try {
        return run({argv + 1, argv + argc});
    } catch (const std::bad_alloc &) {
        fprintf(stderr,
                "llm: not enough memory for the activations of this many tokens: shorten the prompt or lower -c\n");
    } catch (const std::exception &error) {
        fprintf(stderr, "llm: %s\n", error.what());
    }
    return 2;
}
#endif
