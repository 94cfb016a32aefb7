// What tests of the engine share: checkpoints from files or made up here, caches of any kind, rows of logits.
#pragma once

#define LLM_WITHOUT_MAIN
#include "../llm.cu"
#include "check_pages.h"
#include "files.h"
#include "reference.h"

namespace scene {

using Vector = std::vector<float>;
using Tokens = std::vector<int>;

inline const std::string fixtures = "tests/fixtures/models/";

// ---- Lists and errors --------------------------------------------------------------------------------------

template <class List>
std::vector<List> all_of() {
    std::vector<List> all;
    for_each_type<List>([&](auto type) { all.push_back(type); });
    return all;
}

template <class T>
void append(std::vector<T> &to, const std::vector<T> &more) {
    to.insert(to.end(), more.begin(), more.end());
}

// Calls use(type_k, type_v) for all pairs of precisions. What fails there says which they were.
template <class Use>
void for_each_pair(Use use) {
    for (const Precision &type_k : all_of<Precision>())
        for (const Precision &type_v : all_of<Precision>()) {
            CAPTURE(std::string(name_of(type_k)) + " " + name_of(type_v));
            use(type_k, type_v);
        }
}

// A seed of this run's own: tests that draw what they do say it when they fail, and SEED=... does the same again.
inline uint64_t seed_of_run() {
    static const uint64_t seed = getenv("SEED") ? strtoull(getenv("SEED"), nullptr, 0) : (uint64_t)(now() * 1e6);
    return seed;
}

// Ctrl-C after so many layers and passes, while this is there; a thread counts each by itself. How many came: `count`.
struct InterruptAfter {
    std::atomic<int> count{0};
    explicit InterruptAfter(int after) {
        Progress::heard = [this, after] {
            if (++count == after) interrupts = 1;
        };
    }
    ~InterruptAfter() { Progress::heard = nullptr, interrupts = 0; }
};

// ---- Models and tokens -------------------------------------------------------------------------------------

inline Engine engine_of(Model model, int threads = 1, const std::string &weights = "stored") {
    return open_engine(std::move(model), open_machine("cpu", threads), weights);
}
inline Engine engine_of(const std::string &directory, int threads = 1, const std::string &weights = "stored") {
    return engine_of(load_model(directory), threads, weights);
}
// The same weights once more, for another team.
inline Engine with_threads(const Engine &engine, int threads) {
    Model model;
    model.config = engine.model.config, model.embedding = engine.model.embedding, model.head = engine.model.head;
    model.final_norm = engine.model.final_norm, model.layers = engine.model.layers;
    model.layer_embedding = engine.model.layer_embedding, model.layer_norm = engine.model.layer_norm;
    return engine_of(std::move(model), threads);
}

// A model with random weights and no file: a Llama of `layers` alike, or layers of several kinds.
struct Layer {
    Kind kind;  // `layers` is counted
    bool own = true, sinks = false;  // with rows of its own, with learned sinks
    float scale = 1;                 // only with post_norms
    bool biased = false;             // a convolution
};
struct Shape {
    int layers = 2, hidden = 64, ffn = 96, heads = 4, kv_heads = 2, head_dim = 16, vocabulary = 50;
    DType type = DType::f32;
    std::vector<Layer> list = {};  // instead of the first number and the numbers of heads and widths
    bool qk_norm = false, value_norm = false, post_norms = false, gelu = false;
    bool all_norms = false, no_first_norms = false;  // OLMo 2
    int shared_ffn = 0, per_layer = 0;               // Gemma 4
    double score_scale = 0, embedding_scale = 1, logit_cap = 0;
};

inline Kind kind_of(int kv_heads, int width, int window = 0, double theta = 10000) {
    return {kv_heads, width, width, window, theta};
}
inline Kind convolution_of(int taps, int hidden) {
    Kind kind = {1, hidden, 0, taps, 0};
    return kind.taps = taps, kind;
}

inline Model random_model(const Shape &shape, uint64_t seed = 1) {
    Model model;
    Config &config = model.config;
    std::vector<Layer> layers = shape.list;
    if (layers.empty()) layers.assign((size_t)shape.layers, {kind_of(shape.kv_heads, shape.head_dim)});
    config.layers = (int)layers.size(), config.hidden = shape.hidden, config.ffn = shape.ffn;
    config.heads = shape.heads, config.vocabulary = shape.vocabulary, config.context = 4096;
    config.norm_epsilon = 1e-5, config.gelu = shape.gelu;
    config.score_scale = shape.score_scale, config.embedding_scale = shape.embedding_scale;
    config.shared_ffn = shape.shared_ffn, config.per_layer = shape.per_layer, config.logit_cap = shape.logit_cap;
    config.layer_scale = std::sqrt((float)shape.per_layer / 2);
    for (const Layer &layer : layers) add_layer(config.kinds, config.rows, layer.kind, layer.own);
    reference::Random random{seed};
    auto tensor = [&](int rows, int columns, double middle, double spread) {
        size_t count = (size_t)rows * columns;
        model.copies.emplace_back(new char[count * dtype_bytes(shape.type)]);
        Tensor result = {model.copies.back().get(), shape.type, rows, columns};
        with_numbers(result, [&](auto *data) {
            auto *numbers = const_cast<std::remove_const_t<std::remove_pointer_t<decltype(data)>> *>(data);
            for (size_t i = 0; i < count; i++)
                from_float(numbers[i], (float)random.uniform(middle - spread, middle + spread));
        });
        return result;
    };
    auto linear = [&](int outputs, int inputs) {
        return Linear{tensor(outputs, inputs, 0, 2 / std::sqrt((double)inputs)), {}};
    };
    model.embedding = tensor(shape.vocabulary, shape.hidden, 0, 1);
    const int more = shape.per_layer;
    if (more) model.layer_embedding = tensor(shape.vocabulary, config.layers * more, 0, 1);
    if (more) model.layer_norm = tensor(1, more, 1, 0.5);
    for (const Layer &layer : layers) {
        const int ffn = !layer.own && shape.shared_ffn ? shape.shared_ffn : shape.ffn;
        const int width = layer.kind.key_width, taps = layer.kind.taps;
        const int all = (taps ? 1 : shape.heads) * width, kv_all = layer.kind.kv_heads * width;
        auto norm = [&](bool wanted, int numbers) { return wanted ? tensor(1, numbers, 1, 0.5) : Tensor{}; };
        LayerWeights w;
        const bool first = !shape.no_first_norms, all_norms = shape.all_norms && !layer.kind.taps;
        w.attention_norm = norm(first, shape.hidden), w.mlp_norm = norm(first, shape.hidden);
        w.all_query_norm = norm(all_norms, all), w.all_key_norm = norm(all_norms && layer.own, kv_all);
        w.query = linear(all, shape.hidden);
        if (layer.own) w.key = linear(kv_all, shape.hidden), w.value = linear(kv_all, shape.hidden);
        w.output = linear(shape.hidden, all);
        w.gate = linear(ffn, shape.hidden), w.up = linear(ffn, shape.hidden);
        w.down = linear(shape.hidden, ffn);
        const bool stores = layer.own && !taps;  // keys
        w.query_norm = norm(shape.qk_norm && !taps, width), w.key_norm = norm(shape.qk_norm && stores, width);
        w.value_norm = norm(shape.value_norm && stores, width);
        if (taps) w.taps = tensor(width, taps, 0, 1);
        if (taps && layer.biased)
            for (Linear *linear : {&w.query, &w.key, &w.value, &w.output})
                linear->bias = tensor(1, (int)linear->weight.rows, 0, 1);
        if (taps && layer.biased) w.taps_bias = tensor(1, width, 0, 1);
        w.attention_out_norm = norm(shape.post_norms, shape.hidden);
        w.mlp_out_norm = norm(shape.post_norms, shape.hidden);
        if (layer.sinks) w.sinks = tensor(1, shape.heads, 0, 3);
        w.scale = more ? 1 : layer.scale;
        if (more)
            w.per_layer = {linear(more, shape.hidden), linear(more, shape.hidden), linear(shape.hidden, more),
                           norm(true, shape.hidden), layer.scale};
        model.layers.push_back(w);
    }
    model.final_norm = tensor(1, shape.hidden, 1, 0.5);
    model.head = tensor(shape.vocabulary, shape.hidden, 0, 2 / std::sqrt((double)shape.hidden));
    return model;
}

inline Tokens random_tokens(const Engine &engine, int count, uint64_t seed = 1) {
    reference::Random random{seed};
    Tokens tokens;
    for (int i = 0; i < count; i++) tokens.push_back((int)(random.bits() % (uint64_t)engine.model.config.vocabulary));
    return tokens;
}

inline Tokens part(const Tokens &tokens, int begin, int end) { return {tokens.begin() + begin, tokens.begin() + end}; }

// ---- Caches ------------------------------------------------------------------------------------------------

// Of layers of one kind.
inline Cache open_cache(Memory &memory, const CacheShape &shape, const Layout &layout, const Precision &type_k,
                        const Precision &type_v) {
    return poisoned(::open_cache(memory, std::vector<CacheShape>{shape}, layout, type_k, type_v));
}

// A layout with what it is made for; engine, precisions and sequences come later.
struct Place {
    Layout layout = Contiguous{};
    int page = 16, window = 0, sinks = 0;
    bool all = false;  // --swa-full: layers with a window keep all positions
    int pages = 0;     // in all; 0: as many as may be needed
    std::string name() const {
        std::string text = name_of(layout);
        if (std::holds_alternative<Paged>(layout)) text += " of " + std::to_string(page);
        if (window) text += " --window " + std::to_string(window) + " --sinks " + std::to_string(sinks);
        if (all) text += " --swa-full";
        return text;
    }
};

inline Place paged(int page) { return {Paged{}, page}; }
inline Place keeping_all(Place place) {
    place.all = true;
    return place;
}
inline Place ring(int window, int sinks) { return {Ring{}, 16, window, sinks}; }
inline Layout opened_ring(int window, int sinks) {
    CacheShape shape;
    shape.window = window, shape.sinks = sinks;
    return open_layout(shape, Ring{});
}

inline Cache cache_for(Engine &engine, const Precision &type_k, const Precision &type_v, int capacity,
                       const Place &place = {}, int sequences = 1) {
    const Config &config = engine.model.config;
    std::vector<CacheShape> shapes;
    for (const Kind &kind : config.kinds) {
        CacheShape &shape = shapes.emplace_back();
        shape = {kind.layers, kind.kv_heads, kind.key_width, kind.value_width, sequences, capacity};
        shape.page = place.page, shape.window = place.window, shape.sinks = place.sinks;
        shape.local = place.all ? 0 : kind.window, shape.pages = place.pages, shape.taps = kind.taps;
    }
    return poisoned(::open_cache(engine.memory(), shapes, place.layout, type_k, type_v));
}

// A page is free or in tables, in these as often as it has references, or only still found by its tokens. A table has
// all that its sequence holds, from the first page that was not given back on, and the machine's table has it, too.
inline void check_pages(const Cache &cache) {
    const std::string wrong = cache.pages ? check(*cache.pages) : "";
    REQUIRE_MESSAGE(wrong.empty(), wrong);
    for (const Store &store : cache.stores) {
        if (!store.pool) continue;
        const PagePool &pool = *store.pool;
        std::vector<int> held(pool.references.size()), free(held.size());
        bool right = true;
        for (int i = 0; i < (int)pool.table.size(); i++) {
            const int sequence = i / (int)pool.pages_per_sequence, logical = i % (int)pool.pages_per_sequence;
            const int end = pages_for(cache.lengths[sequence], pool.page), page = pool.table[i];
            right = right && (page >= 0) == (logical >= pool.first[sequence] && logical < end);
            if (page >= 0) held.at(page)++, right = right && store.page_table[i] == page;
        }
        for (int page : pool.free) free.at(page)++;
        size_t found = 0;
        for (size_t page = 0; page < held.size(); page++) {
            right = right && (held[page] > 0) + free[page] <= 1;
            found += held[page] == 0 && free[page] == 0;
        }
        REQUIRE((right && held == pool.references && found == pool.cached.size()));
    }
}

// ---- Logits ------------------------------------------------------------------------------------------------

// Of each position, (tokens, vocabulary): the first `decoded` by prefill() in pieces of `piece`, the others by
// decode().
inline Vector cached_rows(Engine &engine, Cache &cache, int sequence, const Tokens &tokens, int piece, int decoded) {
    Vector all;
    for (int begin = 0; begin < decoded; begin += piece)
        prefill_pass(engine, cache, sequence, part(tokens, begin, std::min(begin + piece, decoded)),
                     [&](int count) { append(all, logits(engine, 0, count)); });
    for (int t = decoded; t < (int)tokens.size(); t++) append(all, decode(engine, cache, {sequence}, {tokens[t]}));
    return all;
}
inline Vector prefilled_rows(Engine &engine, Cache &cache, const Tokens &tokens) {
    return cached_rows(engine, cache, 0, tokens, (int)tokens.size(), (int)tokens.size());
}

inline Vector naive_rows(Engine &engine, const Tokens &tokens, const Layout &layout = Contiguous{}) {
    naive_pass(engine, tokens, layout);
    return logits(engine, 0, (int)tokens.size());
}

inline double largest_difference(const Vector &a, const Vector &b) {
    REQUIRE(a.size() == b.size());
    double largest = 0;
    for (size_t i = 0; i < a.size(); i++) {
        double difference = std::fabs((double)a[i] - b[i]);
        largest = difference <= largest ? largest : difference;  // a NaN is one, too
    }
    return largest;
}

inline Tokens greedy_naive(Engine &engine, Tokens tokens, int count) {
    Tokens ids;
    for (int i = 0; i < count; i++) {
        Vector row = forward_naive(engine, tokens);
        ids.push_back(argmax(row.data(), (int)row.size()));
        tokens.push_back(ids.back());
    }
    return ids;
}

inline Tokens greedy_cached(Engine &engine, Cache &cache, const Tokens &prompt, int count) {
    Tokens ids;
    Vector row = prefill(engine, cache, 0, prompt);
    for (int i = 0; i < count; i++) {
        if (i) row = decode(engine, cache, {0}, {ids.back()});
        ids.push_back(argmax(row.data(), (int)row.size()));
    }
    return ids;
}

}  // namespace scene
