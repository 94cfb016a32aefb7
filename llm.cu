// llm: a small language model, with and without a KV cache.
//
// From the inside out: forward computes a pass, prefill and decode call it, generate makes text of what they find. A
// pass is of a batch of tokens, each at one position of one sequence. Two paths share everything but where attention
// finds the past:
//   naive    all tokens so far, every time: the keys and values of the past are computed anew
//   cached   only the new tokens: the keys and values of the past are read from the cache
//
// Its parts, each under a line of its own: a pass (forward: start here); prefill and decode; sampling; llm generate;
// llm diff. The flags and the other commands are in commands/.
#include <functional>
#include <random>

#include "attention.cu"
#include "base/ranking.h"
#include "base/rejection.h"
#include "base/text.h"
#include "base/weights.h"
#include "cache.h"
#include "commands/options.h"
#include "layers.cu"
// best::f is the twin of plain::f in fast/ where there is one, and else plain::f itself. `make plain` takes plain::f
// everywhere, for the same text, more slowly.
#ifdef PLAIN
namespace best = plain;
#else
#include "fast/fast.h"
namespace best = fast;
#endif

// ---- The engine --------------------------------------------------------------------------------------------

struct Engine {
    std::unique_ptr<Machine> machine;  // outlives what is kept in its memory
    Model model;
    std::shared_ptr<void> weights = nullptr;  // where the model's tensors are, if they were moved
    Activations a = {};
    int positions = 0;  // of the longest text to come (expect_positions)
    int chunk = 512;  // tokens of a prefill pass: enough to use each weight often, few enough to stay small
    Memory &memory() const {
        return std::visit([](auto &m) -> Memory & { return m; }, *machine);
    }
    std::string name() const {
        return std::visit([](auto &m) { return m.name(); }, *machine);
    }
};

// RoPE for texts of up to `positions`, before the first token: where longrope has other frequencies for long texts, the
// keys in a cache would be wrong from the original context on. Returns that context if this call is the first that goes
// beyond it, or else 0.
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

// Why products of bf16 pairs are refused, or "". `gain`: how many times as many products a second they bring. Two
// processors with the same instruction differ: a Zen 5 gains 2, an Intel Sapphire Rapids 0.5.
inline std::string why_no_pairs(double gain) {
    if (gain == 0) return "this processor has no instruction for it (AVX512_BF16)";
    if (gain > 0.9) return "";
    return formatted("this processor does %.2f times as many products a second in bf16 as in f32, so it is slower",
                     gain);
}

// A model on a machine. `weights`: stored (where the file has them, if the machine can read that), copied or int8.
// `activations`: f32, or bf16, to which the inputs of matrices are rounded then.
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

// ---- A pass ------------------------------------------------------------------------------------------------

// All layers, for one batch: the equations of a decoder, line by line. What comes out is in engine.a.x. What is new is
// stored in the cache's stores, and the past is read from them. On the naive path they have no memory: all that a token
// sees is in the batch. `m` is the machine, Cpu or Gpu. After Ctrl-C it throws Interrupted; so does logits().
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
            if (cached && rows.last) best::keep_residual(m, task, pass);  // after all have read: the newest block
            add(attended, w.output, w.attention_out_norm, 1);             // x += W o
            n = norm(w.mlp_norm);                                         // n = RMSNorm(x)
            best::linear(m, n, count, {{w.gate, gate}, {w.up, up}});
            best::swiglu(m, gate, gate, up, (int64_t)count * w.down.weight.cols, config.gelu);
            add(gate, w.down, w.mlp_out_norm, w.scale);  // x += W (silu(W n) * W n)
            if (!config.per_layer) continue;  // x += W (gelu(W x) * e), e: the token's embedding for this layer
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

// Logits of some tokens of the last pass: (rows, vocabulary). Their rows of x are picked as those of an embedding are.
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

// ---- Prefill and decode ------------------------------------------------------------------------------------

// What the naive path stores: nothing. `layout` says what each token sees: with a ring, what the ring would still hold.
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

// The naive path's logits of the last token.
inline std::vector<float> forward_naive(Engine &engine, const std::vector<int> &tokens) {
    naive_pass(engine, tokens);
    return logits(engine, (int)tokens.size() - 1, 1);
}

// How many of the next `count` tokens of a sequence a pass can take. int4 and int2 encode 32 positions together: what
// begins within such a block goes no further than its end. Positions of the next block would overwrite those of the
// residual block that are from before the pass; and if the pass fails, these are still needed (all_or_nothing).
inline int tokens_of_pass(const Cache &cache, int sequence, int count) {
    const int in_block = blocks_of(cache) ? cache.lengths[sequence] % group_size : 0;
    return std::min({count, chunk_of(cache), in_block ? group_size - in_block : count});
}

// Reads a prompt into the cache, in chunks of many tokens, and returns which token of the last pass its last one is.
// Why not at once: a pass keeps the activations of all its tokens, and a ring must hold all of a chunk beside what the
// chunk's first query sees. after_chunk(count), if there is one, may ask for the logits of all tokens of the chunk.
// Where it is ended by Ctrl-C, the chunks before are stored, and the sequence is as long as they are.
inline int prefill_pass(Engine &engine, Cache &cache, int sequence, const std::vector<int> &tokens,
                        const std::function<void(int count)> &after_chunk = nullptr) {
    require_room(cache, sequence, (int)tokens.size());
    Progress progress("prefill", (double)tokens.size());
    size_t count = 0;
    for (size_t begin = 0; begin < tokens.size(); begin += count) {
        count = (size_t)tokens_of_pass(cache, sequence, (int)std::min((size_t)engine.chunk, tokens.size() - begin));
        all_or_nothing(cache, [&] {
            Batch batch;
            int first = grow(cache, sequence, (int)count);
            for (size_t t = 0; t < count; t++) batch.add(tokens[begin + t], sequence, first + (int)t);
            forward(engine, batch, cache.stores);
            if (after_chunk) after_chunk((int)count);
        });
    }
    return (int)count - 1;
}

// Reads a prompt into the cache, and returns the logits of its last position.
inline std::vector<float> prefill(Engine &engine, Cache &cache, int sequence, const std::vector<int> &tokens) {
    std::vector<float> last;
    const int end = cache.lengths.at(sequence) + (int)tokens.size();
    prefill_pass(engine, cache, sequence, tokens, [&](int count) {
        if (cache.lengths[sequence] == end) last = logits(engine, count - 1, 1);
    });
    return last;
}

// A pass of one new token for each of some sequences. Returns their logits (sequences, vocabulary).
inline std::vector<float> decode(Engine &engine, Cache &cache, const std::vector<int> &sequences,
                                 const std::vector<int> &tokens) {
    return all_or_nothing(cache, [&] {
        Batch batch;
        for (size_t i = 0; i < sequences.size(); i++) batch.add(tokens[i], sequences[i], grow(cache, sequences[i], 1));
        forward(engine, batch, cache.stores);
        return logits(engine, 0, batch.count());
    });
}

// ---- Sampling ----------------------------------------------------------------------------------------------

struct Sampler {
    double temperature = 0, top_p = 1, min_p = 0;
    int top_k = 0;
    uint64_t seed = 0;
};

// From 0 to below 1, a function of seed and position alone: so a text does not depend on what else is computed, or
// where it began (splitmix64, Steele et al. 2014).
inline double draw(uint64_t seed, int position) {
    uint64_t z = seed * 0x9e3779b97f4a7c15 + (uint64_t)position;
    for (int i = 0; i < 2; i++) {  // twice: neighbouring seeds and positions have nothing to do with each other
        z += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        z ^= z >> 31;
    }
    return (double)(z >> 11) * 0x1p-53;
}

// The token after `position`. At temperature 0 the likeliest one, the first of equals. Otherwise drawn from
// softmax(logits / T) after top-k, then top-p (Holtzman et al. 2020), then min-p (Nguyen et al. 2024) have cut its
// tail. A point is drawn in the sum of what is kept: the token is the one that it falls on, from the likeliest on.
// Probabilities are float32, and base/ranking.h sums them in buckets where others sort: where the point or a cut falls
// within 10^-6 of the border of two tokens, another one may be drawn than by the definition in double precision.
inline int sample(const Sampler &sampler, const std::vector<float> &logits, int position) {
    if (sampler.temperature == 0) return argmax(logits.data(), (int)logits.size());
    const Ranking ranking(logits, (float)std::min(1 / sampler.temperature, (double)FLT_MAX), sampler.min_p);
    double kept = ranking.total;
    if (sampler.top_k > 0) kept = ranking.find([&](auto &place) { return place.count >= (size_t)sampler.top_k; }).sum;
    if (sampler.top_p < 1) kept = ranking.find([&](auto &place) { return place.sum >= sampler.top_p * kept; }).sum;
    if (sampler.min_p > 0) kept = std::min(kept, ranking.likely);
    const double point = draw(sampler.seed, position) * kept;
    return ranking.find([&](auto &place) { return place.sum > point; }).token;
}

using BeginCache = std::function<void(Cache &)>;
inline void blame_cache(Engine &engine, const Cache *cache, const std::vector<int> &tokens,
                        const BeginCache &begin);  // commands/overflow.h

// A damaged checkpoint shows here first. Says where instead of generating from nonsense; or why, where a key or a value
// of the tokens that `cache` has read is beyond its type. `whose`: "the draft, "; begin(): see blame_cache().
inline void require_finite(Engine &engine, const Cache *cache, const std::vector<int> &tokens,
                           const std::vector<float> &logits, int position, const char *whose = "",
                           const BeginCache &begin = nullptr) {
    const auto finite = [](float logit) { return std::isfinite(logit); };
    if (std::count_if(logits.begin(), logits.end(), finite) == (std::ptrdiff_t)logits.size()) return;
    blame_cache(engine, cache, tokens, begin);
    const float wrong = *std::find_if_not(logits.begin(), logits.end(), finite);
    fail("%sposition %d: a logit is %g, expected a finite number: are the weights damaged?", whose, position, wrong);
}

#include "draft.h"

#include "batch.h"

// ---- llm generate ------------------------------------------------------------------------------------------

// All that one sequence needs to go on, on either path.
struct Session {
    Engine engine;
    TokenizerPointer tokenizer;
    std::vector<Cache> caches = {};  // generate: one, or none on the naive path; diff: all that are compared
    Drafter drafter = {};            // guesses nothing unless --draft says who does
    std::vector<int> tokens = {};    // the prompt, then what was generated
    int prompt = 0;                  // tokens of the prompt
    int limit = 0;                   // positions that the cache holds
};

// How many tokens may follow a prompt, of `count` that are asked for: all but the last of them are stored.
inline int room_for(int prompt, int count, int positions) {
    return (int)std::min<int64_t>(count, (int64_t)positions - prompt + 1);
}

// Why nothing follows the tokens so far, or nullptr if something may.
inline const char *reason_to_stop(const Session &session, const Options &options) {
    const int generated = (int)session.tokens.size() - session.prompt;
    const bool ended = generated && session.engine.model.config.ends(session.tokens.back());
    if (interrupted()) return "interrupted";
    if (ended && !options.ignore_end) return "end id";
    if (generated >= options.count) return "length";
    if (generated >= room_for(session.prompt, options.count, session.limit)) return "context full";
    return nullptr;
}

struct Generation {
    std::string text, thought, stop;
    double prefill_seconds = 0, decode_seconds = 0;
    int prefilled = 0, decoded = 0;  // tokens of the prompt that were read; tokens that were decoded,
    std::vector<int> passes = {};    // and in each pass the positions that the last of them sees
};

using UseLogits = std::function<void(const std::vector<float> &)>;  // rows of them

// Prefill of what the cache does not hold yet, then token by token. show(text) gets what `text` shows as it comes;
// `dump`, if there is one, all logits, a few tokens' at a time: a vocabulary is wide.
inline Generation generate(Session &session, const Options &options, Writer text, const UseLogits &dump,
                           const std::function<void(const std::string &)> &show) {
    Engine &engine = session.engine;
    std::vector<int> &tokens = session.tokens;
    Cache *cache = session.caches.empty() ? nullptr : &session.caches[0];
    Sampler sampler{options.temperature, options.top_p, options.min_p, options.top_k, (uint64_t)options.seed};
    Generation result;
    auto reason = [&] { return text.stopped ? "stop" : reason_to_stop(session, options); };
    auto use = [&](const std::vector<float> &found, int position) {
        require_finite(engine, cache, tokens, found, position);
        if (dump && result.prefilled) dump(found);
    };
    auto first_token = [&](int row) {  // after a pass, whose last token that row is
        std::vector<float> found = logits(engine, row, 1);
        use(found, (int)tokens.size() - 1);
        return std::vector<int>{sample(sampler, found, (int)tokens.size() - 1)};
    };
    auto after_chunk = [&](int count) {
        for (int first = 0; dump && first < count; first += 32)
            dump(logits(engine, first, std::min(32, count - first)));
    };

    const int kept = cache ? cache->lengths[0] : 0;  // of the turns before, in a chat
    const char *stop;
    double start = now();
    try {
        int row = session.prompt - 1;
        if (cache)
            row = prefill_pass(engine, *cache, 0, {tokens.begin() + kept, tokens.end()}, after_chunk);
        else
            naive_pass(engine, tokens), after_chunk(session.prompt);
        std::vector<int> next = first_token(row);  // drawn, and not yet said
        result.prefill_seconds = now() - start;
        result.prefilled = session.prompt - kept;

        while (!(stop = reason())) {
            tokens.push_back(next[0]);
            next.erase(next.begin());
            show(text.next(tokens.back()));
            if (!next.empty()) continue;
            // What follows the last token is asked for by `dump` alone, if there is room.
            const int size = (int)tokens.size(), room = room_for(session.prompt, options.count, session.limit);
            if (reason() && (!dump || size > session.limit)) continue;
            start = now();
            const int most = reason() ? 0 : session.prompt + room - size - 1;  // guesses
            if (cache)
                next = next_tokens(engine, *cache, session.drafter, sampler, tokens, most, !options.ignore_end, use);
            else
                naive_pass(engine, tokens), next = first_token((int)tokens.size() - 1);
            result.decode_seconds += now() - start;
            result.decoded += (int)next.size();
            result.passes.push_back(size + (int)next.size() - 1);
        }
    } catch (Interrupted) {
        stop = "interrupted";
        if (result.prefilled == 0) {
            result.prefill_seconds = now() - start;
            result.prefilled = cache ? cache->lengths[0] - kept : 0;
        }
    }
    show(text.flush());
    result.text = text.text, result.thought = text.thought;
    result.stop = text.stopped ? "stop" : stop;
    return result;
}

// ---- llm diff ----------------------------------------------------------------------------------------------

// A token of one cache beside the reference: the naive path, or with --against full an f32 cache of all positions.
struct DiffStep {
    int token = 0, cached_token = 0;                   // what each finds likeliest, the reference first
    bool same_bits = false;                            // of all logits
    double difference = 0, kl = 0;                     // max |logit - logit|; Kullback-Leibler divergence, nats
    double tv = 0;                                     // total variation: half the sum of |p - q|
    double margin = 0;                                 // the reference's logit of its token less that of the cache's
    double reference_seconds = 0, cached_seconds = 0;  // for the logits of this step
};

inline double log_sum_exp(const float *logits, int count) {
    double most = *std::max_element(logits, logits + count), total = 0;
    for (int i = 0; i < count; i++) total += std::exp(logits[i] - most);
    return most + std::log(total);
}

// How far cached logits lie from the true ones, in double precision. KL: sum p log(p / q) for p, q = softmax of each.
inline DiffStep compare(const std::vector<float> &truth, const std::vector<float> &cached) {
    DiffStep step;
    int count = (int)truth.size();
    double p_sum = log_sum_exp(truth.data(), count), q_sum = log_sum_exp(cached.data(), count);
    for (int i = 0; i < count; i++) {
        double log_p = truth[i] - p_sum, log_q = cached[i] - q_sum;
        step.difference = std::max(step.difference, std::fabs((double)truth[i] - cached[i]));
        step.kl += std::exp(log_p) * (log_p - log_q);
        step.tv += std::fabs(std::exp(log_p) - std::exp(log_q)) / 2;
    }
    step.kl = std::max(0.0, step.kl);
    step.same_bits = memcmp(truth.data(), cached.data(), truth.size() * sizeof(float)) == 0;
    step.token = argmax(truth.data(), count);
    step.cached_token = argmax(cached.data(), count);
    step.margin = (double)truth[step.token] - truth[step.cached_token];
    return step;
}

// All get the tokens that the reference finds likeliest. With --against full it is the first cache; the naive path sees
// all that the model does, whatever a cache drops. show(steps) is called after each token with a step of each cache.
inline void run_lockstep(Session &session, const Options &options,
                         const std::function<void(const std::vector<DiffStep> &)> &show) {
    Engine &engine = session.engine;
    std::vector<int> &tokens = session.tokens;
    std::vector<Cache> &caches = session.caches;
    const bool full = options.against == "full";
    auto cached = [&](Cache &cache) {
        return cache.lengths[0] ? decode(engine, cache, {0}, {tokens.back()}) : prefill(engine, cache, 0, tokens);
    };
    auto timed = [&](double &seconds, const Cache *cache, auto path) {
        double start = now();
        std::vector<float> found = path();
        seconds = now() - start;
        require_finite(engine, cache, tokens, found, (int)tokens.size() - 1);
        return found;
    };
    while (!reason_to_stop(session, options)) {
        double reference_seconds, seconds;
        std::vector<DiffStep> steps;
        std::vector<float> truth =
            timed(reference_seconds, nullptr, [&] { return full ? cached(caches[0]) : forward_naive(engine, tokens); });
        for (size_t i = full; i < caches.size(); i++) {
            steps.push_back(compare(truth, timed(seconds, &caches[i], [&] { return cached(caches[i]); })));
            steps.back().reference_seconds = reference_seconds;
            steps.back().cached_seconds = seconds;
        }
        tokens.push_back(steps[0].token);
        show(steps);
    }
}

// ---- The commands ------------------------------------------------------------------------------------------

#include "commands/flags.h"

inline int run(const std::vector<std::string> &words) {
    Options options = parse_options(words);
    int status = 0;
    try {
        if (options.help || options.version)
            print_help(options);
        else
            for (const Command &command : commands)
                if (options.command == command.name) status = command.run(options);
    } catch (Interrupted) {  // before there was anything to say
        Report().add("interrupted", true, "llm: interrupted\n").print(options.json, stderr);
        status = 130;
    }
    flush_output();
    return status;
}

#ifndef LLM_WITHOUT_MAIN
int main(int argc, char **argv) {
    prepare_process();
    try {
        return run({argv + 1, argv + argc});
    } catch (const Error &error) {
        fputs(said(error.what()).c_str(), stderr);
        return error.status;
    } catch (const std::exception &error) {
        fputs(said(error.what()).c_str(), stderr);
    }
    return 2;
}
#endif
