// One pass: forward() computes it; prefill, decode and step call it.
//
// A pass runs a batch of tokens through all layers. Each token has one position in one sequence. The two paths differ
// only in where attention finds the past:
//   naive    all tokens so far, every time: the keys and values of the past are computed again
//   cached   only the new tokens: the keys and values of the past are read from the cache
#pragma once

#include <functional>

#include "cache.h"
#include "states.cu"
// best::f is the faster twin of plain::f (fast/) if there is one, else plain::f itself. `make plain` takes plain::f
// everywhere: the same text, more slowly.
#ifdef PLAIN
namespace best = plain;
#else
#include "fast/fast.h"
namespace best = fast;
#endif

struct Engine {
    std::unique_ptr<Machine> machine;  // declared first, so it outlives what is in its memory
    Model model;
    std::shared_ptr<void> weights = nullptr;  // owns the model's tensors, if they were moved
    Activations a = {};
    int positions = 0;  // RoPE is set for texts of up to this (expect_positions)
    int chunk = 512;  // most tokens of a prefill pass: fewer read the weights more often, more need more memory
    Memory &memory() const {
        return std::visit([](auto &m) -> Memory & { return m; }, *machine);
    }
    std::string name() const {
        return std::visit([](auto &m) { return m.name(); }, *machine);
    }
};

// ---- A pass ------------------------------------------------------------------------------------------------

// Runs a batch through all layers: the equations of a decoder, line by line. Leaves the residual stream (count, hidden)
// in engine.a.x, for logits(). Stores keys and values in `stores`, one for each kind of layers, and reads the past from
// them. On the naive path they have no memory: all that a token sees is in the batch. `m` is a Cpu or a Gpu.
template <class M>
void forward(M &m, Engine &engine, const Batch &batch, const std::vector<Store> &stores) {
    const Model &model = engine.model;
    const Config &config = model.config;
    const std::vector<Pass> passes = begin_pass(engine.a, engine.memory(), config, batch);
    const int count = batch.count();
    const double epsilon = config.norm_epsilon;
    Activations &a = engine.a;
    float *x = a.x.data(), *normed = a.normed.data(), *gate = a.gate.data(), *up = a.up.data();
    float *query = a.query.data(), *attended = a.attended.data();
    // n = RMSNorm(x), or x itself in models without a norm there.
    auto norm = [&](const Tensor &w) { return w.data ? best::rms_norm(m, normed, x, w, count, epsilon), normed : x; };
    // x += W y, or x = (x + RMSNorm(W y)) * scale in models that have a norm there.
    auto add = [&](const float *y, const Linear &matrix, const Tensor &out_norm, float scale) {
        if (!out_norm.data) return best::linear(m, y, count, {{matrix, x}}, Into::add);
        best::linear(m, y, count, {{matrix, normed}});
        best::add_rms_norm(m, x, normed, out_norm, count, epsilon, scale);
    };
    best::run(m, passes, stores, [&] {
        best::embed(m, x, model.embedding, (float)config.embedding_scale, passes[0]);
        for (const Pass &pass : passes) best::rope_angles(m, pass);
        for (int layer = 0; layer < config.layers; layer++) {
            Progress::at((double)count * layer / config.layers);
            const LayerWeights &w = model.layers[layer];
            const LayerRows &rows = config.rows[layer];
            const Pass &pass = passes[rows.kind];
            const Attention task = attention_of(a, model, layer, stores);
            const bool cached = task.cache.keys.data;
            float *key = task.keys.start, *value = task.values.start;
            const float *n = norm(w.attention_norm);                                        // n = RMSNorm(x)
            best::linear(m, n, count, {{w.query, query}, {w.key, key}, {w.value, value}});  // q, k, v = W n + b
            if (!pass.taps) best::norm_and_rope(m, query, key, value, w, epsilon, pass);  // q and k rotated
            else best::gate(m, key, value, (int64_t)count * config.hidden);               // u = b * v
            if (cached && rows.own) best::store_rows(m, task, pass);      // before a query reads them
            if (!pass.taps) best::attention(m, task, pass);               // o = softmax(q K^T / sqrt(D)) V
            else best::short_convolution(m, task, pass, w);               // o = c * (taps * u), over the last L
            if (cached && rows.last) best::keep_residual(m, task, pass);  // after the last layer that reads them
            add(attended, w.output, w.attention_out_norm, 1);             // x += W o
            n = norm(w.mlp_norm);                                         // n = RMSNorm(x)
            best::linear(m, n, count, {{w.gate, gate}, {w.up, up}});
            best::swiglu(m, gate, gate, up, (int64_t)count * w.down.weight.cols, config.gelu);
            add(gate, w.down, w.mlp_out_norm, w.scale);  // x += W (silu(W n) * W n)
            if (!config.per_layer) continue;  // Gemma 4: x += W (gelu(W x) * e), e: this layer's embedding of the token
            best::embed(m, normed, model.embedding, (float)config.embedding_scale, pass);
            best::linear(m, normed, count, {{w.per_layer.projection, up}});
            plain::rms_norm(m, up, up, model.layer_norm, count, epsilon * config.hidden);
            best::embed(m, up, model.layer_embedding, config.layer_scale, pass, Into::add, layer, config.layers);
            best::linear(m, x, count, {{w.per_layer.gate, gate}});
            best::swiglu(m, gate, gate, up, (int64_t)count * config.per_layer, config.gelu);
            add(gate, w.per_layer.output, w.per_layer.out_norm, w.per_layer.scale);
        }
    });
}

inline void forward(Engine &engine, const Batch &batch, const std::vector<Store> &stores) {
    std::visit([&](auto &m) { forward(m, engine, batch, stores); }, *engine.machine);
    stop_if_interrupted();
    Progress::add(batch.count());
}

// Returns the logits (rows, vocabulary) of some rows of the last pass; throws Interrupted after Ctrl-C, as forward()
// does. embed() gathers the rows: x is its table, the row numbers are its tokens.
inline std::vector<float> logits(Engine &engine, const std::vector<int> &rows) {
    const Model &model = engine.model;
    const int count = (int)rows.size();
    Activations &a = engine.a;
    std::vector<float> result((size_t)count * model.config.vocabulary);
    if (count == 0) return result;
    Memory &memory = engine.memory();
    a.logits.resize(memory, result.size());
    a.picked.resize(memory, (size_t)count * model.config.hidden);
    a.tokens.assign(memory, rows);
    Tensor x = model.embedding;
    x.data = a.x.data(), x.type = DType::f32;
    Pass picked;
    picked.count = count, picked.tokens = a.tokens.data();
    Linear head = {model.head, {}};
    const float cap = (float)model.config.logit_cap;
    std::visit(
        [&](auto &m) {
            m.run([&] {
                best::embed(m, a.picked.data(), x, 1, picked);
                best::rms_norm(m, a.normed.data(), a.picked.data(), model.final_norm, count, model.config.norm_epsilon);
                best::linear(m, a.normed.data(), count, {{head, a.logits.data()}});
                if (cap) best::cap_logits(m, a.logits.data(), (int64_t)result.size(), cap);
            });
        },
        *engine.machine);
    stop_if_interrupted();
    memory.read(result.data(), a.logits.data(), result.size() * sizeof(float));
    return result;
}
inline std::vector<float> logits(Engine &engine, int first, int count) {
    std::vector<int> rows;
    for (int row = first; row < first + count; row++) rows.push_back(row);
    return logits(engine, rows);
}

// ---- Prefill, decode, step -------------------------------------------------------------------------------------

// Stores without memory, for the naive path. `layout` still says what a token sees: in a ring, sinks and window.
inline std::vector<Store> nothing_stored(const Config &config, const Layout &layout = Contiguous{}) {
    Store nothing;
    nothing.view.layout = layout;
    return std::vector<Store>(config.kinds.size(), nothing);
}

// The naive path: a pass over all tokens so far. Nothing is kept, so the next token costs all of this again, and more.
inline void naive_pass(Engine &engine, const std::vector<int> &tokens, const Layout &layout = Contiguous{}) {
    Progress progress("naive pass", (double)tokens.size());
    Batch batch;
    for (size_t t = 0; t < tokens.size(); t++) batch.add(tokens[t], 0, (int)t);
    forward(engine, batch, nothing_stored(engine.model.config, layout));
}

// Returns the naive path's logits (vocabulary) of the last token.
inline std::vector<float> forward_naive(Engine &engine, const std::vector<int> &tokens) {
    naive_pass(engine, tokens);
    return logits(engine, (int)tokens.size() - 1, 1);
}

// One text's share of a pass: its next tokens and, if the last token so far is among them, guesses at what follows it.
struct Text {
    int sequence;             // its sequence in the cache
    std::vector<int> tokens;  // one at least
    std::vector<int> guesses = {};
    bool is_read = true;  // `tokens` reach its end, so its next token can be drawn
};

// Runs one pass over some texts: grows the cache by their tokens and guesses, calls forward(), then look(), which may
// ask for logits. Returns what look() returns. If anything throws, the cache is as long as before.
template <class Look>
auto read_texts(Engine &engine, Cache &cache, const std::vector<Text> &texts, Look look) {
    return all_or_nothing(cache, [&] {
        Batch batch;
        for (const Text &text : texts) {
            int position = grow(cache, text.sequence, (int)(text.tokens.size() + text.guesses.size()));
            for (int token : text.tokens) batch.add(token, text.sequence, position++);
            for (int guess : text.guesses) batch.add(guess, text.sequence, position++);
        }
        forward(engine, batch, cache.stores);
        return look();
    });
}

// Returns how many of a sequence's next `count` tokens one pass can take. int4 and int2 encode 32 positions together,
// so a pass that begins within such a block goes no further than its end. Why: the next block's positions would
// overwrite older ones in the residual block, which are needed again if the pass fails (all_or_nothing).
inline int tokens_of_pass(const Cache &cache, int sequence, int count) {
    const int in_block = blocks_of(cache) ? cache.lengths[sequence] % group_size : 0;
    return std::min({count, chunk_of(cache), in_block ? group_size - in_block : count});
}

// Reads a prompt into the cache in chunks. Returns the index, within the last pass, of the prompt's last token. Why not
// at once: a pass keeps the activations of all its tokens, and a ring must hold all of a chunk next to what the chunk's
// first query sees. after_chunk(count), if set, may ask for the logits of the chunk's tokens. After Ctrl-C the cache
// keeps the chunks that were complete.
inline int prefill_pass(Engine &engine, Cache &cache, int sequence, const std::vector<int> &tokens,
                        const std::function<void(int count)> &after_chunk = nullptr) {
    require_room(cache, sequence, (int)tokens.size());
    Progress progress("prefill", (double)tokens.size());
    int count = 0;
    for (auto next = tokens.begin(); next != tokens.end(); next += count) {
        count = tokens_of_pass(cache, sequence, (int)std::min<std::ptrdiff_t>(engine.chunk, tokens.end() - next));
        read_texts(engine, cache, {{sequence, {next, next + count}}}, [&] {
            if (after_chunk) after_chunk(count);
        });
    }
    return count - 1;
}

// Reads a prompt into the cache. Returns the logits (vocabulary) of its last token.
inline std::vector<float> prefill(Engine &engine, Cache &cache, int sequence, const std::vector<int> &tokens) {
    std::vector<float> last;
    const int end = cache.lengths.at(sequence) + (int)tokens.size();
    prefill_pass(engine, cache, sequence, tokens, [&](int count) {
        if (cache.lengths[sequence] == end) last = logits(engine, count - 1, 1);
    });
    return last;
}

// Reads one new token of each sequence in one pass. Returns logits (sequences, vocabulary). To draw tokens, use step().
inline std::vector<float> decode(Engine &engine, Cache &cache, const std::vector<int> &sequences,
                                 const std::vector<int> &tokens) {
    std::vector<Text> texts;
    for (size_t i = 0; i < sequences.size(); i++) texts.push_back({sequences[i], {tokens[i]}});
    return read_texts(engine, cache, texts, [&] { return logits(engine, 0, (int)texts.size()); });
}

// One step: a pass over the next tokens and guesses of some texts, then grown(). For each text read to its end, take(i,
// logits) draws the next token and returns it, or -1 if text i ends. While that equals the next guess, take() is called
// again: the pass has those logits, too. Wrong guesses are then cut from the cache.
template <class Take>
void step(Engine &engine, Cache &cache, const std::vector<Text> &texts, Take take,
          const std::function<void()> &grown = [] {}) {
    std::vector<int> rows;  // (wanted logits): row of a text's last token, then of its guesses
    int row = 0;
    for (const Text &text : texts) {
        row += (int)text.tokens.size() - 1;
        for (size_t i = 0; i <= text.guesses.size(); i++, row++)
            if (text.is_read) rows.push_back(row);
    }
    const std::vector<float> found = read_texts(engine, cache, texts, [&] { return grown(), logits(engine, rows); });
    const int vocabulary = engine.model.config.vocabulary;
    auto own = found.begin();
    for (size_t i = 0; i < texts.size(); i++) {
        if (!texts[i].is_read) continue;
        const std::vector<int> &guesses = texts[i].guesses;
        const int sequence = texts[i].sequence, certain = cache.lengths[sequence] - (int)guesses.size();
        auto taken = [&] {
            const std::vector<float> logits(own, own + vocabulary);
            return take((int)i, logits);
        };
        auto right = guesses.begin();
        for (int next = taken(); right != guesses.end() && next == *right; next = taken()) ++right, own += vocabulary;
        own += (guesses.end() - right + 1) * vocabulary;
        const int length = certain + (int)(right - guesses.begin());
        if (rewind(cache, sequence, length) != length) fail("the cache has lost more than the guesses: a fault here");
    }
}

// Fails if a logit is not finite, instead of going on with nonsense: the weights are damaged, or a key or value is too
// large for its type. The message begins with `whose`: "the draft, " or nothing.
inline void require_finite(const std::vector<float> &logits, int position, const Cache *cache, const char *whose = "") {
    const auto finite = [](float logit) { return std::isfinite(logit); };
    const auto wrong = std::find_if_not(logits.begin(), logits.end(), finite);
    if (wrong == logits.end()) return;
    std::string cause = "are the weights damaged?";
    if (cache) {
        const bool keys = largest_of(cache->type_k) < largest_of(cache->type_v);
        const Precision &narrow = keys ? cache->type_k : cache->type_v;
        if (const float most = largest_of(narrow); most < 1e38f)
            cause = formatted("is a key or a value more than %s holds (%.6g): try --kv bf16; or %s", name_of(narrow),
                              most, cause.c_str());
    }
    fail("%sposition %d: a logit is %g, expected a finite number: %s", whose, position, *wrong, cause.c_str());
}

// ---- Opening -----------------------------------------------------------------------------------------------

// Chooses RoPE frequencies for the longest text to come. Call it before prefill: LongRoPE uses other frequencies beyond
// the original context, and cached keys cannot be rotated again. Returns the original context if this call is the first
// beyond it, else 0.
inline int expect_positions(Engine &engine, int positions) {
    const std::vector<Kind> &kinds = engine.model.config.kinds;
    engine.a.kinds.resize(kinds.size());
    int passed = 0;
    const int before = std::exchange(engine.positions, std::max(engine.positions, positions));
    for (size_t i = 0; i < kinds.size(); i++) {
        const int original = kinds[i].rope.long_factors.empty() ? 0 : kinds[i].rope.original_context;
        if (before <= original && original < positions) passed = std::max(passed, original);
        engine.a.kinds[i].frequencies.assign(
            engine.memory(), rope_frequencies(kinds[i].rope_theta, kinds[i].rotary(), kinds[i].rope, engine.positions));
    }
    return passed;
}

// Returns why --activations bf16 is refused, or "". `gain`: products a second in bf16 pairs, divided by those in f32.
// Two processors with the same instruction differ: a Zen 5 gains 2, an Intel Sapphire Rapids 0.5.
inline std::string why_no_pairs(double gain) {
    if (gain == 0) return "this processor has no instruction for it (AVX512_BF16)";
    if (gain > 0.9) return "";
    return formatted("this processor does %.2f times as many products a second in bf16 as in f32, so it is slower",
                     gain);
}

// Puts a model on a machine. `weights`: "stored" (read where the file has them, if the machine can), "copied" or "int8"
// (rounded). `activations`: "f32", or "bf16", to which the inputs of matrix products are rounded.
inline Engine open_engine(Model model, std::unique_ptr<Machine> machine, const std::string &weights = "stored",
                          const std::string &activations = "f32") {
    Engine engine{std::move(machine), std::move(model)};
    expect_positions(engine, 0);
    bool cpu = std::holds_alternative<Cpu>(*engine.machine);
    if (!cpu && weights == "int8") fail("--weights int8: these compute on the CPU only: add --device cpu");
    if (!cpu || weights != "stored") engine.weights = move_weights(engine.model, *engine.machine, weights == "int8");
    if (activations == "f32") return engine;
    const std::string why_not = cpu ? why_no_pairs(best::pairs_gain()) : "is for the CPU";
    if (!why_not.empty()) fail("--activations bf16: %s: leave it out", why_not.c_str());
    round_inputs(engine.model, true);
    return engine;
}

