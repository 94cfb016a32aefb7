// Opens what the flags ask for: a model and its tokenizer, caches, what guesses for --draft, a prompt.
#pragma once

#include "options.h"
#include "report.h"
#ifndef LLM_CU  // llm.cu includes the commands, which need what it defines
#define LLM_WITHOUT_MAIN
#include "../llm.cu"
#endif

// Opens a model on the device that the flags name. `least`: bytes of weights that are worth one more thread.
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

// The shape of a cache for each kind of layers. Without --window a ring sees as far back as the layers that look back
// furthest: their sliding window, or the context that the model was trained for; but no further than -c.
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

// Chooses RoPE's frequencies for texts of up to `positions`, and notes it if LongRoPE then takes those for long texts.
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

// The ids of a prompt: those that are `given`, with nothing put before them, or else those of `text`.
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
    if (ids.empty() && config.bos_id >= 0) ids = {config.bos_id};  // an empty text is the token that begins one
    require_ids(ids, config);
    if (ids.empty()) fail("the prompt has no tokens, and this model has none that a text begins with: give some text");
    return ids;
}
inline std::vector<int> prompt_tokens(const Options &options, const Tokenizer *tokenizer, const Config &config) {
    return prompt_tokens(options.prompt, options.has("--ids") ? &options.prompt_ids : nullptr, tokenizer, config);
}

// How many positions the cache holds: what -c says, or else the prompt and -n.
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

// Opens the tokenizer; nullptr if there is no tokenizer.json and the command does without, by ids.
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

// The sampler that a checkpoint's generation_config.json asks for, read as Transformers does: if do_sample is set,
// top_k is 50 by default. Temperature 0, the likeliest token: do_sample is not set, or there is no such file.
inline Sampler sampler_of(const std::string &directory) {
    const std::string name = join_path(directory, "generation_config.json");
    Json root;
    if (file_exists(name)) root = parse_json(name, read_file(name, max_json_bytes), /*as_python=*/true);
    const Section own{name, &root};
    if (!own.flag("do_sample", false)) return {};
    return {own.number("temperature", 0, 1000, 1), own.number("top_p", 0, 1, 1), own.number("min_p", 0, 1, 0),
            std::max(0, own.integer("top_k", -1, 1 << 30, 50))};
}

// --temp auto: samples as the checkpoint asks, except for --top-k, --top-p and --min-p.
inline void take_sampler(Options &options) {
    const Sampler own = sampler_of(options.directory);
    options.temperature = own.temperature;
    if (!options.has("--top-k")) options.top_k = own.top_k;
    if (!options.has("--top-p")) options.top_p = own.top_p;
    if (!options.has("--min-p")) options.min_p = own.min_p;
}

// Notes how the checkpoint asks to be sampled if the flags say otherwise, unless --temp 0 was given.
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

// Opens the model and its tokenizer, without a text or a cache yet. The token that ends a text in tokenizer_config.json
// is added to the model's end ids, as with vLLM and mlx-lm.
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

// ---- Opening -------------------------------------------------------------------------------------------------------

// Fails unless every id is the same token in both tokenizers: a guess is an id.
inline void require_same_tokenizer(const std::string &directory, const Tokenizer *target, const Tokenizer *draft) {
    const int ids = std::max(tokenizer_size(target), tokenizer_size(draft));
    auto spelled = [](const Tokenizer *tokenizer, int id) {
        const char *token = id < tokenizer_size(tokenizer) ? tokenizer_token(tokenizer, id) : nullptr;
        return token ? "\"" + std::string(token) + "\"" : "no token";
    };
    auto shown = [](const std::string &token) { return token.size() > 80 ? printable(token) : on_one_line(token); };
    for (int id = 0; id < ids; id++) {
        const std::string here = spelled(target, id), there = spelled(draft, id);
        if (here != there)
            refuse("--draft", directory,
                   formatted("id %d is %s there, and %s for the model: expected a model with the same tokenizer", id,
                             shown(there).c_str(), shown(here).c_str()));
    }
}

// Opens what --draft asks for, for `sequences` texts of up to `capacity` positions in `cache`.
inline Drafter open_drafter(const Options &options, const Session &session, const Cache &cache, int sequences,
                            int capacity) {
    Drafter drafter;
    if (options.draft.empty()) return drafter;
    const Config &target = session.engine.model.config;
    drafter.most = options.draft_tokens, drafter.vocabulary = target.vocabulary;
    drafter.rejection = options.draft_rule == "leviathan" && options.temperature > 0;
    drafter.pauses = options.draft == "ngram" && !drafter.rejection;
    auto require_slack = [&](const Cache &of, const char *whose) {
        if (drafter.most >= chunk_of(of))
            refuse("--draft-tokens", std::to_string(drafter.most),
                   formatted("behind a window the cache of the %s takes back %d positions at most: lower it", whose,
                             chunk_of(of) - 1));
    };
    require_slack(cache, "model");
    if (options.draft == "ngram") return drafter;
    if (!file_exists(options.draft)) refuse("--draft", options.draft, "is not there: expected a directory, or ngram");
    if (session.tokenizer && !options.has("--ids") && !file_exists(join_path(options.draft, "tokenizer.json")))
        refuse("--draft", options.draft, "has no tokenizer.json: expected a model with the same tokenizer");
    // A small model has fewer threads, as they would wait for one another longer than they compute.
    drafter.engine = std::make_unique<Engine>(open_engine(options, options.draft, /*least=*/2 << 20));
    const Config &config = drafter.engine->model.config;
    const TokenizerPointer tokenizer = open_tokenizer(options, options.draft);
    if (tokenizer && session.tokenizer)
        require_same_tokenizer(options.draft, session.tokenizer.get(), tokenizer.get());
    else if (config.vocabulary != target.vocabulary)
        refuse("--draft", options.draft,
               formatted("knows %d ids, the model %d: expected a model with the same tokenizer", config.vocabulary,
                         target.vocabulary));
    Options beside = options;
    beside.sequences = sequences, beside.pool = 0, beside.keep_all = false;
    const bool endless = std::holds_alternative<Ring>(cache.layout);
    const CacheChoice choice = {endless ? Layout(Ring{}) : Layout(Contiguous{}), F16{}, F16{}};
    drafter.cache = open_cache(beside, *drafter.engine, choice, std::min(capacity, config.context));
    drafter.held.resize(sequences);
    require_slack(drafter.cache, "draft");
    if (!endless && capacity > config.context)
        note(formatted("--draft: was made for %d positions: behind these it guesses nothing", config.context));
    return drafter;
}

// Opens the caches of a session, each for `limit` positions, and what guesses for the first of them.
inline void open_caches(const Options &options, Session &session, const std::vector<CacheChoice> &choices, int limit) {
    session.limit = limit;
    expect_positions_of(session.engine, limit);
    for (const CacheChoice &choice : choices)
        session.caches.push_back(open_cache(options, session.engine, choice, limit));
    if (!choices.empty()) session.drafter = open_drafter(options, session, session.caches[0], 1, limit);
}

// Notes it if a checkpoint was tuned for chat: it expects texts in the form of its template, which is not applied.
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

// Opens the model, reads the prompt, and opens caches just large enough for it and -n, unless -c says how large.
inline Session open_session(const Options &options) {
    Session session = open_model(options);
    const Config &config = session.engine.model.config;
    session.tokens = prompt_tokens(options, session.tokenizer.get(), config);
    session.prompt = (int)session.tokens.size();
    if (session.tokenizer && options.command == "generate") note_template(options.directory);
    std::vector<CacheChoice> choices = options.caches();
    if (options.against == "full") choices.insert(choices.begin(), {Contiguous{}, F32{}, F32{}});
    bool endless = !choices.empty() && options.command != "diff";  // the path it compares with sees all positions
    for (const CacheChoice &choice : choices) endless &= std::holds_alternative<Ring>(choice.layout);
    open_caches(options, session, choices, limit_of(options, config, session.prompt, endless));
    return session;
}
