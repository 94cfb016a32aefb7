// llm generate: opens what the flags ask for, streams the text, and says what it took.
#pragma once

#include <filesystem>

#include "options.h"
#include "report.h"
#ifndef LLM_CU  // that includes the commands, which need what it defines
#define LLM_WITHOUT_MAIN
#include "../llm.cu"
#endif

[[noreturn]] inline void refuse(const std::string &flag, const std::string &value, const std::string &why) {
    size_t size = std::min<size_t>(80, value.size());
    while (size < value.size() && (value[size] & 0xc0) == 0x80) size--;  // whole characters
    fail("%s%s%s: %s", flag.c_str(), value.empty() ? "" : " ", value.substr(0, size).c_str(), why.c_str());
}

// `least`: bytes of weights that are worth a thread of their own.
inline Engine open_engine(const Options &options, const std::string &directory, int64_t least = 1) {
    const bool of_cpu = options.weights == "int8" || options.activations == "bf16";
    std::string device = of_cpu && options.device == "auto" ? "cpu" : options.device;
    Model model = load_model(directory);
    const int threads = (int)std::min<int64_t>(options.threads, 1 + model.weight_bytes / least);
    Engine engine = open_engine(std::move(model), open_machine(device, threads), options.weights, options.activations);
    if (!engine.model.beside.empty()) note("left aside, beside the text model: " + engine.model.beside);
    if (options.chunk) engine.chunk = options.chunk;
    return engine;
}

// What a cache for this model is made for. Unless --window says less, a ring sees what the layers see that look back
// furthest: their sliding window, or as far as the model was trained to; and no further than -c says that texts go.
inline std::vector<CacheShape> cache_shapes(const Options &options, const std::vector<Kind> &kinds, int context,
                                            int capacity) {
    CacheShape shape;
    shape.capacity = capacity;
    shape.sequences = options.sequences;
    shape.page = options.page;
    if (options.pool) shape.pages = std::max(1, options.pool / options.page);
    if (options.context) context = context ? std::min(context, options.context) : options.context;
    const int widest = std::min(context, widest_window(kinds));
    shape.sinks = options.sinks >= 0 ? options.sinks : widest ? 0 : std::min(4, (context - 1) / 2);
    int all = widest ? widest : std::max(1, context - shape.sinks);
    shape.window = options.window ? options.window : all;
    if (shape.sinks >= shape.window)
        fail("--sinks %d: a window of %s, expected fewer sinks than that: lower --sinks or raise --window", shape.sinks,
             counted(shape.window, "position").c_str());
    std::vector<CacheShape> shapes;
    for (const Kind &kind : kinds) {
        shape.layers = kind.layers, shape.kv_heads = kind.kv_heads;
        shape.key_width = kind.key_width, shape.value_width = kind.value_width;
        shape.local = options.keep_all ? 0 : kind.window, shape.taps = kind.taps;
        shapes.push_back(shape);
    }
    return shapes;
}

// Says it where a text may become longer than a model was trained for at first, and is computed otherwise for it.
inline void expect_positions_of(Engine &engine, int positions) {
    if (const int original = expect_positions(engine, positions))
        note(
            formatted("a text of up to %d positions: all of it is computed with the frequencies for texts beyond %d "
                      "(longrope; -c %d takes those for shorter ones)",
                      positions, original, original));
}

inline Cache open_cache(const Options &options, Engine &engine, const CacheChoice &choice, int capacity) {
    const Config &config = engine.model.config;
    expect_positions_of(engine, capacity);
    return open_cache(engine.memory(), cache_shapes(options, config.kinds, config.context, capacity), choice.layout,
                      choice.type_k, choice.type_v);
}

inline void require_ids(const std::vector<int> &ids, const Config &config) {
    for (int id : ids)
        if (id >= config.vocabulary)
            fail("token id %d in the prompt: the model's vocabulary has %d entries, ids 0 .. %d", id, config.vocabulary,
                 config.vocabulary - 1);
}

// The ids of a text; or those that are `given`, and nothing before them.
inline std::vector<int> prompt_tokens(const std::string &text, const std::vector<int> *given,
                                      const Tokenizer *tokenizer, const Config &config) {
    std::vector<int> ids;
    if (given) {
        ids = *given;
    } else {
        ids = encode(tokenizer, text);
        const size_t before = (size_t)tokenizer_before(tokenizer);
        if (before && ids.size() > before && ids[before] == ids[before - 1])
            note(formatted("the prompt begins with %s, which the tokenizer puts before a text, too: it stands there "
                           "twice; leave it out of the prompt", tokenizer_token(tokenizer, ids[before])));
    }
    if (ids.empty() && config.bos_id >= 0) ids = {config.bos_id};  // nothing before the first word but its beginning
    require_ids(ids, config);
    if (ids.empty()) fail("the prompt has no tokens, and this model has none that a text begins with: give some text");
    return ids;
}
inline std::vector<int> prompt_tokens(const Options &options, const Tokenizer *tokenizer, const Config &config) {
    return prompt_tokens(options.prompt, options.has("--ids") ? &options.prompt_ids : nullptr, tokenizer, config);
}

// How many positions the cache holds: what -c says, or the prompt and -n.
inline int limit_of(const Options &options, const Config &config, int prompt, bool endless) {
    const char *ring = options.command == "diff" ? "" : ", or use --cache ring";
    int64_t wanted = (int64_t)prompt + options.count;
    int64_t limit = options.context ? options.context : endless ? wanted : config.context;
    if (!endless && limit > config.context)
        fail("-c %d: this model was made for %d positions: lower -c%s", options.context, config.context, ring);
    const std::string raise = formatted(", raise -c (this model was made for %d)", config.context);
    if (prompt > limit)
        fail("the prompt has %s, the context holds %d: shorten it%s%s", counted(prompt, "token").c_str(), (int)limit,
             limit < config.context ? raise.c_str() : "", ring);
    return (int)std::min<int64_t>(INT_MAX, options.context ? limit : std::min(limit, wanted));
}

// None where there is no tokenizer.json, and none is needed.
inline TokenizerPointer open_tokenizer(const Options &options, const std::string &directory) {
    const std::string file = join_path(directory, "tokenizer.json");
    std::string cure = "fetch it",
                or_ids = has("tokenize chat", options.command) ? "" : ", or give the text as --ids 1,2,3";
    if (file_exists(file)) return load_tokenizer(directory);
    const bool from_ids = options.command == "batch" || options.has("--ids");  // a request may give ids, or a text
    if (from_ids && options.command != "tokenize") return TokenizerPointer(nullptr, tokenizer_free);
    if (file_exists(join_path(directory, "tokenizer.model")))
        cure =
            "tokenizer.model is not read here: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of Transformers "
            "writes the other";
    else if (!file_exists(join_path(directory, "config.json")))
        cure = directory_cure(directory), or_ids = "";
    fail("%s: No such file; %s%s", file.c_str(), cure.c_str(), or_ids.c_str());
}

// How a checkpoint's generation_config.json draws tokens, as in Transformers: without do_sample none, it takes the
// likeliest; with it, by 50 at most where it does not say. Temperature 0: there is no such file, or it draws none.
inline Sampler sampler_of(const std::string &directory) {
    const std::string name = join_path(directory, "generation_config.json");
    Json root;
    if (file_exists(name)) root = parse_json(name, read_file(name, max_json_bytes), /*as_python=*/true);
    const Section own{name, &root};
    if (!own.flag("do_sample", false)) return {};
    return {own.number("temperature", 0, 1000, 1), own.number("top_p", 0, 1, 1), own.number("min_p", 0, 1, 0),
            std::max(0, own.integer("top_k", -1, 1 << 30, 50))};
}

// --temp auto: as the checkpoint asks, but for what other flags say.
inline void take_sampler(Options &options) {
    const Sampler own = sampler_of(options.directory);
    options.temperature = own.temperature;
    if (!options.has("--top-k")) options.top_k = own.top_k;
    if (!options.has("--top-p")) options.top_p = own.top_p;
    if (!options.has("--min-p")) options.min_p = own.min_p;
}

// Says how the checkpoint asks to be sampled from where it is done otherwise, unless --temp 0 was said.
inline void note_sampler(const Options &options) {
    const std::string given = options.has("--temp") ? options.given.at("--temp") : "";
    if (!given.empty() && given != "auto" && options.temperature == 0) return;
    const Sampler own = sampler_of(options.directory);
    if (own.temperature == 0 && given == "auto")
        note("--temp auto: no generation_config.json asks for tokens to be drawn: the likeliest one is taken");
    std::string asks = formatted("--temp %g", own.temperature);
    if (own.top_k) asks += formatted(" --top-k %d", own.top_k);
    if (own.top_p < 1) asks += formatted(" --top-p %g", own.top_p);
    if (own.min_p > 0) asks += formatted(" --min-p %g", own.min_p);
    const bool same = own.temperature == options.temperature && own.top_k == options.top_k &&
                      own.top_p == options.top_p && own.min_p == options.min_p;
    if (own.temperature > 0 && !same && given != "auto")
        note("this model's generation_config.json asks for " + asks + ": --temp auto takes that");
}

// The model and its tokenizer, without a text or a cache yet. The end of a text that tokenizer_config.json names ends
// it beside those of the model, as with vLLM and mlx-lm.
inline Session open_model(const Options &options) {
    Session session{open_engine(options, options.directory), open_tokenizer(options, options.directory)};
    session.count = options.count, session.ignore_end = options.ignore_end;
    session.sampler = {options.temperature, options.top_p, options.min_p, options.top_k, (uint64_t)options.seed};
    Config &config = session.engine.model.config;
    if (has("generate chat", options.command)) note_sampler(options);
    const int end = session.tokenizer ? tokenizer_end(session.tokenizer.get()) : -1;
    if (end < 0 || end >= config.vocabulary || config.ends(end)) return session;
    config.end_ids.push_back(end);
    if (!options.ignore_end)
        note(formatted("%s, id %d, ends the text: only tokenizer_config.json names it so (--ignore-eos goes on)",
                       tokenizer_token(session.tokenizer.get(), end), end));
    return session;
}

inline Drafter open_drafter(const Options &options, const Session &session, const Cache &cache, int sequences,
                            int capacity);                            // draft.h
inline Report about_draft(const Drafter &drafter);

// The caches of a session, for so many tokens, and who guesses for the first of them.
inline void open_caches(const Options &options, Session &session, const std::vector<CacheChoice> &choices, int limit) {
    session.limit = limit;
    expect_positions_of(session.engine, limit);
    for (const CacheChoice &choice : choices)
        session.caches.push_back(open_cache(options, session.engine, choice, limit));
    if (!choices.empty()) session.drafter = open_drafter(options, session, session.caches[0], 1, limit);
}

// Says it where a checkpoint was tuned for chat: it expects texts in a form that its template would give them.
inline void note_template(const std::string &directory) {
    bool is_there = file_exists(join_path(directory, "chat_template.jinja"));
    const std::string name = join_path(directory, "tokenizer_config.json");
    if (!is_there && file_exists(name)) {
        const Json root = parse_json(name, read_file(name, max_json_bytes), /*as_python=*/true);
        is_there = Section{name, &root}.find("chat_template");
    }
    if (is_there)
        note(
            "this model was tuned for chat: its template is not applied, the prompt is read as it stands "
            "(llm chat applies it)");
}

// Checks the prompt against the context and opens caches just large enough, unless -c says how large.
inline Session open_session(const Options &options) {
    Session session = open_model(options);
    const Config &config = session.engine.model.config;
    session.tokens = prompt_tokens(options, session.tokenizer.get(), config);
    session.prompt = (int)session.tokens.size();
    if (session.tokenizer && options.command == "generate") note_template(options.directory);
    std::vector<CacheChoice> choices = options.caches();
    if (options.against == "full") choices.insert(choices.begin(), {Contiguous{}, F32{}, F32{}});
    bool endless = !choices.empty() && options.command != "diff";  // what it compares with sees all positions
    for (const CacheChoice &choice : choices) endless &= std::holds_alternative<Ring>(choice.layout);
    open_caches(options, session, choices, limit_of(options, config, session.prompt, endless));
    return session;
}

// Bytes that one decoding step reads: all weights but the embedding table, of which it reads a row.
inline double weights_read(const Model &model) {
    const Tensor &table = model.embedding;
    const double tables = (model.head.data != table.data ? (double)stored_bytes(table) : 0);
    return (double)model.weight_bytes - tables - (double)stored_bytes(model.layer_embedding);
}

// And of a layer of one sequence's cache, with `positions` in it: what it sees of the rows, of int4 and int2 the newest
// block at f16, of a ring the sinks at f32. The layer looks back `window` positions; 0: to the first.
inline double layer_read(const CacheShape &shape, const CacheChoice &opened, int window, int positions) {
    const Visible visible = visible_of(opened.layout, window);
    const int last = positions - 1, first = visible.first(last), block = last / group_size * group_size;
    auto bytes = [&](const Precision &type, int width) {
        int stored = has_blocks(type) ? std::max(first, block) : positions;
        double rows = (double)(stored - first) * (double)row_bytes(type, width);
        double others = (double)(positions - stored) * sizeof(f16);
        if (visible.dropped(last)) others += (double)visible.sinks * sizeof(float);
        return width ? rows + width * others : 0;  // MLA: a value is a part of its key
    };
    return shape.kv_heads * (bytes(precision_of(shape, opened.type_k), shape.key_width) +
                             bytes(precision_of(shape, opened.type_v), shape.value_width));
}

inline double cache_read(const Model &model, const Cache &cache, int positions) {
    double bytes = 0;
    for (const LayerRows &rows : model.config.rows) {
        const Store &store = cache.stores[rows.kind];
        bytes += layer_read(store.shape, {store.layout, cache.type_k, cache.type_v},
                            model.config.kinds[rows.kind].window, positions);
    }
    return bytes;
}

// ---- Output ------------------------------------------------------------------------------------------------

// Standard output may be a full disk. (A pipe that nobody reads ends the program by SIGPIPE.)
inline void flush_output() {
    begin_work();
    if (fflush(stdout) != 0 || ferror(stdout))
        throw Error("standard output: not all could be written: is the disk full?", 1);
}

// Text of a token on one line: what would break the line or the column is shown as an escape.
inline std::string on_one_line(const std::string &text) {
    std::string result;
    for (char c : text) {
        bool shown = (unsigned char)c >= ' ' && c != 127;
        result += shown ? std::string(1, c) : c == '\n' ? "\\n" : formatted("\\x%02x", (unsigned char)c);
    }
    return result;
}

// A file that a flag names. It is written under another name in the same folder, and gets its own when it is whole.
class PartFile {
public:
    PartFile(const std::string &path, const std::string &flag) : path_(path), flag_(flag) {
        struct stat status;
        if (lstat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
            refuse(flag, path, "is not a regular file: name one, or one that is not there yet");
        if (stat(path.c_str(), &status) == 0 && files_read.count({status.st_dev, status.st_ino}))
            refuse(flag, path, "is a file that is read: name another");
        int descriptor = -1;
        for (int i = 0; descriptor < 0 && (i == 0 || errno == EEXIST); i++) {
            part_ = std::filesystem::path(path).replace_filename(formatted(".llm-%d-%d.part", getpid(), i));
            descriptor = open(part_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        }
        if (descriptor < 0) refuse(flag, path, std::string("cannot write there: ") + strerror(errno));
        file_.reset(fdopen(descriptor, "wb"));
        *(name_ = std::find(unfinished, std::end(unfinished), nullptr)) = part_.c_str();
    }
    ~PartFile() {
        if (name_->exchange(nullptr)) remove(part_.c_str());
    }
    void write(const std::string &bytes, long at = -1) {
        require(at < 0 || fseek(file_.get(), at, SEEK_SET) == 0);
        require(fwrite(bytes.data(), 1, bytes.size(), file_.get()) == bytes.size());
    }
    void finish() {
        require(!ferror(file_.get()) && fclose(file_.release()) == 0 && rename(part_.c_str(), path_.c_str()) == 0);
        *name_ = nullptr;
    }

private:
    void require(bool done) const {
        if (done) return;
        throw Error(formatted("%s %s: cannot write it: %s", flag_.c_str(), path_.c_str(), strerror(errno)), 1);
    }
    std::string path_, part_, flag_;
    std::atomic<const char *> *name_;  // in `unfinished`
    std::unique_ptr<FILE, int (*)(FILE *)> file_{nullptr, fclose};
};

// --dump-logits: a NumPy file of float32 rows, or without the flag none.
class LogitsFile {
public:
    LogitsFile(const Options &options, int width) : width_(width) {
        if (!options.has("--dump-logits")) return;
        part_ = std::make_unique<PartFile>(options.dump_logits, "--dump-logits");
        part_->write("", header_bytes);
    }
    UseLogits add() {
        if (!part_) return nullptr;
        return [this](const std::vector<float> &rows) {
            part_->write({(const char *)rows.data(), rows.size() * sizeof(float)});
            count_ += rows.size() / (size_t)width_;
        };
    }
    // The header: magic, version 1.0, length of the rest, a Python dictionary.
    void finish() {
        if (!part_) return;
        std::string start("\x93NUMPY\x01\x00\x76\x00", 10), shape = formatted("(%zu, %d)", count_, width_);
        start += "{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + ", }";
        start.resize(header_bytes - 1, ' ');
        part_->write(start + "\n", 0);
        part_->finish();
    }

private:
    static constexpr int header_bytes = 128;
    std::unique_ptr<PartFile> part_;
    int width_;
    size_t count_ = 0;
};

// "int8", "int8/int4": of K and V.
inline std::string types_of(const CacheChoice &cache) {
    std::string k = name_of(cache.type_k), v = name_of(cache.type_v);
    return k == v ? k : k + "/" + v;
}

// A cache's layout and types by name, "none" for nullptr, "ring 124 + 4": window and sinks; `heads` are of a table.
inline void add_names(Report &report, const Cache *cache, const char *layout_format, const char *k_format,
                      const char *v_format, const std::vector<std::string> &heads = {"", "", ""}) {
    auto name = [&](auto choice) { return std::string(cache ? name_of(cache->*choice) : "none"); };
    const Ring *ring = cache ? std::get_if<Ring>(&cache->layout) : nullptr;
    if (ring) report.add("window", ring->window).add("sinks", ring->sinks);
    const std::string shown = name(&Cache::layout) + (ring ? formatted(" %d + %d", ring->window, ring->sinks) : "");
    report.add("layout", name(&Cache::layout), formatted(layout_format, shown.c_str()), heads[0]);
    report.show("type_k", name(&Cache::type_k), k_format, heads[1]);
    report.show("type_v", name(&Cache::type_v), v_format, heads[2]);
}

// A ring's rows are used again: it has the last positions, and its sinks. Of the kind of layers that keeps most.
inline std::string positions_stored(const Cache &cache) {
    const int all = cache.lengths[0];
    auto keeps_less = [](const Store &a, const Store &b) { return kept_by(a.layout) < kept_by(b.layout); };
    const auto most = std::max_element(cache.stores.begin(), cache.stores.end(), keeps_less);
    const Ring *ring = std::get_if<Ring>(&most->layout);
    if (!ring || all <= ring->slots) return ", with " + counted(all, "position") + " stored";
    std::string first = ring->sinks ? formatted("the first %d and ", ring->sinks) : "";
    return formatted(", with %sthe last %d of %d positions stored", first.c_str(), ring->slots, all);
}

// Those of a cache with all its rows, without memory.
inline std::vector<Store> stores_of(const std::vector<CacheShape> &shapes, const Layout &layout) {
    std::vector<Store> stores;
    for (const CacheShape &shape : shapes) {
        stores.push_back({shape, open_layout(shape, layout)});
        stores.back().view.keys.rows_per_layer = rows_of(shape, stores.back().layout);
    }
    return stores;
}

// How many layers read rows that others of their kind store.
inline int shared_of(const std::vector<LayerRows> &rows, size_t kind) {
    return (int)std::count_if(rows.begin(), rows.end(), [&](auto &it) { return it.kind == (int)kind && !it.own; });
}

// What the layers of each kind keep of `positions`: a line each. A list in the JSON, also where there is only one.
inline std::vector<Report> kinds_of(const std::vector<Kind> &kinds, const std::vector<LayerRows> &rows,
                                    const std::vector<Store> &stores, const CacheChoice &cache, int positions) {
    std::vector<Report> list;
    for (size_t i = 0; i < kinds.size(); i++) {
        const Kind &kind = kinds[i];
        const CacheBytes bytes = bytes_of(stores[i], cache.type_k, cache.type_v);
        const int kept = std::min(positions, kept_by(stores[i].layout)), others = shared_of(rows, i);
        Report line;
        line.add("layers", kind.layers + others, counted(kind.layers, "layer"));
        line.show("shared_layers", others, others ? " (and %d that read their rows)" : "");
        line.add("taps", kind.taps);
        line.add("kv_heads", kind.kv_heads,
                 kind.taps ? " of short convolutions" : " x " + counted(kind.kv_heads, "KV head"));
        const bool apart = kind.value_width && kind.value_width != kind.key_width;
        line.show("key_width", kind.key_width, " x %d").show("value_width", kind.value_width, apart ? " + %d" : "");
        const std::string numbers = kind.taps ? " numbers at f32" : " numbers";
        line.show("window", kind.window, (numbers + (kind.window ? ", looking back %d" : "")).c_str());
        line.add("positions", kept).add("rows", rows_now(stores[i])).add("bytes", bytes.total());
        line.add("payload_bytes", bytes.payload).add("metadata_bytes", bytes.metadata);
        if (positions) line.say(kept < positions ? formatted(": %d of ", kept) : ": ");
        if (positions) line.say(counted(positions, "position") + ", " + in_units(bytes.payload));
        if (bytes.metadata > 0) line.say(" + " + in_units(bytes.metadata) + " of metadata");
        list.push_back(line);
    }
    return list;
}
inline std::vector<Report> kinds_of(const Config &config, const Cache &cache) {
    return kinds_of(config.kinds, config.rows, cache.stores, cache, cache.lengths[0]);
}

// Their lines; none of one kind, about which other lines say all.
inline std::string lines_of(const std::vector<Report> &kinds, const std::string &indent) {
    std::string lines;
    for (const Report &kind : kinds) lines += kinds.size() > 1 ? indent + kind.text + "\n" : "";
    return lines;
}

// nullptr: there is none, every token is computed from all before it.
inline Report about_cache(const Config &config, const Cache *cache) {
    CacheBytes bytes = cache ? bytes_of(*cache) : CacheBytes{};
    Report about;
    add_names(about, cache, "cache    %s", ", K %s", ", V %s");
    about.show("bytes", bytes.total(), ": %.0f bytes").add("payload_bytes", bytes.payload);
    about.show("metadata_bytes", bytes.metadata, ", %.0f of them metadata");
    about.say(cache ? positions_stored(*cache) + "\n" : "\n");
    const std::vector<Report> kinds = cache ? kinds_of(config, *cache) : std::vector<Report>{};
    about.list("kinds", kinds).say(lines_of(kinds, "         "));
    if (!cache) about.text = "cache    none: every token was computed from all before it\n";
    return about;
}

// What a text begins with; `tokens` may go on.
inline Report prompt_of(const std::vector<int> &tokens, int prompt) {
    const std::vector<int> ids(tokens.begin(), tokens.begin() + prompt);
    return Report().add("prompt_tokens", prompt).add("prompt_ids", ids);
}

// What a phase took. A reader gets no rate of fewer than `least` tokens.
inline Report phase(const char *name, int64_t count, double seconds, int least, const std::string &before = "") {
    Report part;
    part.add("tokens", count, formatted("%-9s", name) + counted(count, "token", 6) + before).add("seconds", seconds);
    const double rate = count ? (double)count / seconds : NAN;
    return part.add("tokens_per_second", rate, count < least ? "" : formatted(" %9.1f tokens/s", rate));
}

inline int run_samples(const Options &options);  // samples.h

inline int run_generate(const Options &options) {
    if (options.forks()) return run_samples(options);
    Session session = open_session(options);
    const Cache *cache = session.caches.empty() ? nullptr : &session.caches[0];
    LogitsFile dump(options, session.engine.model.config.vocabulary);
    auto show = [&](const std::string &piece) {
        if (!options.json) fwrite(piece.data(), 1, piece.size(), stdout), flush_output();
    };
    TextStream prompt(session.tokenizer.get(), false);  // special tokens as they are written
    const int before = options.has("--ids") ? 0 : tokenizer_before(session.tokenizer.get());
    for (int i = before; i < session.prompt && !options.hide_prompt; i++) show(prompt.next(session.tokens[i]));
    Writer text(session.tokenizer.get(), session.tokens, options.stops);
    Generation result = generate(session, std::move(text), dump.add(), show);
    dump.finish();
    if (!options.json) puts("");

    const std::string first_token = formatted("  %9.1f ms", result.prefill_seconds * 1e3) +
                                    (result.prefilled == session.prompt ? " to the first token" : "");
    // A prompt's rate says something from 64 tokens on: the first pass also reads the weights for the first time.
    Report prefill = phase("prefill", result.prefilled, result.prefill_seconds, 64, first_token).say("\n");
    Report decode = phase("decode", result.decoded, result.decode_seconds, 1);
    Report report = prompt_of(session.tokens, session.prompt);
    report.add("tokens", std::vector<int>(session.tokens.begin() + session.prompt, session.tokens.end()));
    report.add("text", result.text);
    report.show("stop", result.stop, "\nstopped: %s\n").show("device", session.engine.name(), "device   %s\n");
    if (options.temperature > 0) report.show("seed", (long long)options.seed, "seed     %lld\n");
    double bytes = 0;
    for (int positions : result.passes) {
        bytes += weights_read(session.engine.model);
        if (cache) bytes += cache_read(session.engine.model, *cache, positions);
    }
    const double speed = bytes / result.decode_seconds / 1e9;
    decode.add("bytes", bytes, result.decoded ? formatted("  %6.2f GB/s read\n", speed) : "\n");
    report.add("prefill", prefill).add("decode", decode);
    if (session.drafter.most) report.add("draft", about_draft(session.drafter));
    report.add("cache", about_cache(session.engine.model.config, cache));
    return report.print(options.json, stderr);
}

// ---- llm tokenize ------------------------------------------------------------------------------------------

inline int run_tokenize(const Options &options) {
    TokenizerPointer tokenizer = open_tokenizer(options, options.directory);
    bool from_ids = options.has("--ids");
    std::vector<int> ids = from_ids ? options.prompt_ids : encode(tokenizer.get(), options.prompt);
    for (int id : ids)
        if (id >= tokenizer_size(tokenizer.get()))
            fail("--ids: id %d, the tokenizer has ids 0 .. %d", id, tokenizer_size(tokenizer.get()) - 1);
    std::string text = from_ids ? decode(tokenizer.get(), ids) : options.prompt, list = json_of(ids);
    Report report;
    list.erase(std::remove_if(list.begin(), list.end(), [](char c) { return strchr("[ ]", c); }), list.end());
    if (!from_ids && isatty(fileno(stdout))) {  // each piece beside its id; as spelled, if it is a part of a character
        TextStream pieces(tokenizer.get(), false);
        list.clear();
        for (int id : ids) {
            std::string piece = pieces.next(id);
            piece = piece.empty() ? tokenizer_token(tokenizer.get(), id) : '"' + on_one_line(piece) + '"';
            list += formatted("%8d  ", id) + piece + "\n";
        }
        list.resize(list.size() - !list.empty());
    }
    report.add("ids", ids, from_ids ? "" : list + "\n").add("text", text, from_ids ? text + "\n" : "");
    return report.print(options.json);
}
