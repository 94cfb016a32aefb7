// llm: a small language model, with and without a KV cache.
//
// In the order a token travels: load -> prefill -> decode -> text. A pass computes a batch of tokens, each at one
// position of one sequence. Two paths share everything but where attention finds the past:
//   naive    all tokens so far, every time: the keys and values of the past are computed anew
//   cached   only the new tokens: the keys and values of the past are read from the cache
//
// Its parts, each under a line of its own: load; a pass (forward: start here); prefill and decode; sampling; text in,
// text out; llm generate; llm diff. The flags and the other commands are in commands/.
#include <csignal>
#include <functional>
#include <map>
#include <random>

#include "attention.cu"
#include "base/device.h"
#include "base/tokenizer.h"
#include "cache.h"
#include "layers.cu"
#ifdef PLAIN
namespace best = plain;
#else
#include "fast/fast.h"
namespace best = fast;
#endif

// ---- Load --------------------------------------------------------------------------------------------------

// What the passes of a model compute with, in float32, in the machine's memory.
struct Activations {
    Buffer<float> x;                // (count, hidden): the residual stream
    Buffer<float> normed;           // (count, hidden)
    Buffer<float> query, attended;  // (count, heads, D)
    Buffer<float> key, value;       // (count, kv_heads, D)
    Buffer<float> gate, up;         // (count, ffn)
    Buffer<float> cos_sin;          // (count, D)
    Buffer<float> logits;           // (count, vocabulary)
    Buffer<float> frequencies;      // (D / 2)
    Buffer<int> tokens;             // (count)
    Buffer<Span> spans;             // (count)
};

struct Engine {
    std::unique_ptr<Machine> machine;  // outlives what is kept in its memory
    Model model;
    std::shared_ptr<void> weights = nullptr;  // where the model's tensors are, if they were moved
    Heads heads = {};
    Activations a = {};
    int chunk = 512;  // tokens of a prefill pass: enough to use each weight often, few enough to stay small
    Memory &memory() const {
        return std::visit([](auto &m) -> Memory & { return m; }, *machine);
    }
    std::string name() const {
        return std::visit([](auto &m) { return m.name(); }, *machine);
    }
};

inline size_t stored_bytes(const Tensor &tensor) {
    if (tensor.type == DType::int8) return int8_bytes(tensor.rows, tensor.cols);
    return (size_t)(tensor.rows * tensor.cols) * dtype_bytes(tensor.type);
}

// use(tensor, matrix): `matrix` if it is one that every token is multiplied with.
template <class Use>
void for_each_tensor(Model &model, Use use) {
    use(model.embedding, false), use(model.final_norm, false), use(model.head, true);
    for (LayerWeights &w : model.layers) {
        for (Linear *linear : {&w.query, &w.key, &w.value, &w.output, &w.gate, &w.up, &w.down})
            use(linear->weight, true), use(linear->bias, false);
        for (Tensor *tensor : {&w.attention_norm, &w.query_norm, &w.key_norm, &w.mlp_norm}) use(*tensor, false);
    }
}

// The int8 numbers of a matrix. Threads share its blocks of rows.
inline void write_int8(Cpu &cpu, Int8Block *to, const Tensor &matrix) {
    std::atomic<bool> good{true};
    int64_t groups = int8_groups(matrix.cols);
    with_numbers(matrix, [&](auto *numbers) {
        cpu.run([&] {
            cpu.for_each(int8_panels(matrix.rows), [&](int64_t panel, Alone) {
                int rows = (int)std::min<int64_t>(int8_rows, matrix.rows - panel * int8_rows);
                if (!quantize(to + panel * groups, numbers + panel * int8_rows * matrix.cols, rows, matrix.cols))
                    good = false;
            });
        });
    });
    if (!good)
        fail("--weights int8: a weight is NaN or beyond 8.3e6, which its scales cannot hold: leave the flag out");
}

// Moves the model's tensors from the mapped files into the machine's memory: all as they are, or the matrices as int8
// numbers. These are not looked up by token: a tied model's embedding then stays, and is no longer its head.
inline void move_weights(Engine &engine, bool to_int8) {
    constexpr size_t alignment = 256, piece = 64 << 20;
    struct Place {
        Tensor from;
        size_t at;
    };
    Model &model = engine.model;
    Memory &memory = engine.memory();
    std::map<const void *, Place> places;
    size_t total = 0, done = 0;
    auto to = [&](Tensor tensor) { return tensor.type = to_int8 ? DType::int8 : tensor.type, tensor; };
    for_each_tensor(model, [&](Tensor &tensor, bool matrix) {
        if (!tensor.data || (to_int8 && !matrix) || !places.insert({tensor.data, {tensor, total}}).second) return;
        total += (stored_bytes(to(tensor)) + alignment - 1) / alignment * alignment;
    });
    Room room = memory.room();
    if ((double)total > room.bytes)
        fail("the weights need %.3f GiB, %s has %.3f GiB free: choose a smaller model, another --weights or --device",
             (double)total / 0x1p30, room.name.c_str(), room.bytes / 0x1p30);
    engine.weights = memory.reserve(total, "the weights", "choose a smaller model, or leave --weights out");
    char *start = (char *)engine.weights.get();
    for (auto &[data, place] : places) {
        size_t bytes = stored_bytes(to(place.from));
        if (to_int8) write_int8(std::get<Cpu>(*engine.machine), (Int8Block *)(start + place.at), place.from);
        for (size_t at = 0; !to_int8 && at < bytes; at += piece)
            memory.write(start + place.at + at, (const char *)data + at, std::min(piece, bytes - at));
        done += bytes;
        if (isatty(2)) fprintf(stderr, "\rweights: %3.0f %%", 100.0 * (double)done / (double)total);
        for (const Mapping &file : model.files) forget_pages(file);
    }
    if (isatty(2)) fprintf(stderr, "\r%20s\r", "");
    std::map<const void *, size_t> read;
    for_each_tensor(model, [&](Tensor &tensor, bool matrix) {
        if (tensor.data && (matrix || !to_int8)) {
            Place place = places.at(tensor.data);
            tensor = to(tensor);
            tensor.data = start + place.at;
        }
        if (tensor.data) read[tensor.data] = stored_bytes(tensor);
    });
    model.weight_bytes = 0;
    for (auto &[data, bytes] : read) model.weight_bytes += (int64_t)bytes;
}

// `weights`: stored (where the file has them, if the machine can read that), copied or int8.
inline Engine open_engine(Model model, std::unique_ptr<Machine> machine, const std::string &weights = "stored") {
    Engine engine{std::move(machine), std::move(model)};
    const Config &config = engine.model.config;
    engine.heads = {config.heads, config.kv_heads, config.head_dim};
    std::vector<float> frequencies = rope_frequencies(config);
    engine.a.frequencies.resize(engine.memory(), frequencies.size());
    engine.memory().write(engine.a.frequencies.data(), frequencies.data(), frequencies.size() * sizeof(float));
    bool cpu = std::holds_alternative<Cpu>(*engine.machine);
    if (!cpu && weights == "int8") fail("--weights int8: these compute on the CPU only: add --device cpu");
    if (!cpu || weights != "stored") move_weights(engine, weights == "int8");
    return engine;
}

// ---- A pass ------------------------------------------------------------------------------------------------

// The tokens of one pass. Those of a sequence stand together, in order.
struct Batch {
    std::vector<int> tokens, sequences, positions;
    int count() const { return (int)tokens.size(); }
    void add(int token, int sequence, int position) {
        tokens.push_back(token);
        sequences.push_back(sequence);
        positions.push_back(position);
    }
};

// Each token as a span of 1.
inline std::vector<Span> spans_of(const Batch &batch) {
    std::vector<Span> spans;
    for (int begin = 0, end; begin < batch.count(); begin = end) {
        for (end = begin + 1; end < batch.count() && batch.sequences[end] == batch.sequences[begin];) end++;
        int first = batch.positions[begin];
        for (int row = begin; row < end; row++)
            spans.push_back({row, 1, batch.sequences[row], batch.positions[row], first, first + end - begin});
    }
    return spans;
}

// Takes a batch to the machine, with room for all that its pass computes.
inline Pass begin_pass(Engine &engine, const Batch &batch) {
    const Config &config = engine.model.config;
    Memory &memory = engine.memory();
    Activations &a = engine.a;
    size_t count = (size_t)batch.count(), head_dim = (size_t)config.head_dim;
    for (auto *buffer : {&a.x, &a.normed}) buffer->resize(memory, count * config.hidden);
    for (auto *buffer : {&a.query, &a.attended}) buffer->resize(memory, count * config.heads * head_dim);
    for (auto *buffer : {&a.key, &a.value}) buffer->resize(memory, count * config.kv_heads * head_dim);
    for (auto *buffer : {&a.gate, &a.up}) buffer->resize(memory, count * config.ffn);
    a.cos_sin.resize(memory, count * head_dim);
    a.tokens.resize(memory, count);
    a.spans.resize(memory, count);
    std::vector<Span> spans = spans_of(batch);
    memory.write(a.tokens.data(), batch.tokens.data(), count * sizeof(int));
    memory.write(a.spans.data(), spans.data(), count * sizeof(Span));
    return {(int)count, a.tokens.data(), a.spans.data(), a.cos_sin.data(), a.frequencies.data()};
}

// All layers, for one batch; what comes out is in engine.a.x. What is new is stored in the cache, and the past is read
// from it. On the naive path `cache` is a view without memory: all that a token sees is in the batch.
template <class M>
void forward(M &m, Engine &engine, const Batch &batch, const CacheView &cache) {
    const Model &model = engine.model;
    Pass pass = begin_pass(engine, batch);
    int count = pass.count, head_dim = engine.heads.width;
    double epsilon = model.config.norm_epsilon;
    const Heads &heads = engine.heads;
    Activations &a = engine.a;
    float *x = a.x.data(), *normed = a.normed.data(), *gate = a.gate.data(), *up = a.up.data();
    float *query = a.query.data(), *key = a.key.data(), *value = a.value.data(), *attended = a.attended.data();
    best::run(m, pass, cache, [&] {
        best::embed(m, x, model.embedding, pass);
        best::rope_angles(m, pass, head_dim);
        for (int layer = 0; layer < model.config.layers; layer++) {
            const LayerWeights &w = model.layers[layer];
            Visible visible = visible_of(cache.layout, w.window);
            Attention task = {attended, query, {key, heads.kv, head_dim}, {value, heads.kv, head_dim}, cache, layer,
                              visible,  heads};
            best::rms_norm(m, normed, x, w.attention_norm, count, epsilon);                      // n = RMSNorm(x)
            best::linear(m, normed, count, {{w.query, query}, {w.key, key}, {w.value, value}});  // q, k, v = W n + b
            best::norm_and_rope(m, query, w.query_norm, epsilon, heads.query, head_dim, pass);
            best::norm_and_rope(m, key, w.key_norm, epsilon, heads.kv, head_dim, pass);
            if (cache.keys.data) best::store(m, task, pass);
            best::attention(m, task, pass);  // o = softmax(q K^T / sqrt(D)) V
            if (cache.keys.data) best::keep_residual(m, task, pass);
            best::linear(m, attended, count, {{w.output, x}}, Store::add);  // x += W o
            best::rms_norm(m, normed, x, w.mlp_norm, count, epsilon);       // n = RMSNorm(x)
            best::linear(m, normed, count, {{w.gate, gate}, {w.up, up}});
            best::swiglu(m, gate, gate, up, (int64_t)count * w.down.weight.cols);
            best::linear(m, gate, count, {{w.down, x}}, Store::add);  // x += W (silu(W n) * W n)
        }
    });
}

inline void forward(Engine &engine, const Batch &batch, const CacheView &cache) {
    std::visit([&](auto &m) { forward(m, engine, batch, cache); }, *engine.machine);
}

// Logits of `count` tokens of the last pass, from its token `first` on: (count, vocabulary).
inline std::vector<float> logits(Engine &engine, int first, int count) {
    const Model &model = engine.model;
    Activations &a = engine.a;
    std::vector<float> result((size_t)count * model.config.vocabulary);
    a.logits.resize(engine.memory(), result.size());
    const float *x = a.x.data() + (size_t)first * model.config.hidden;
    Linear head = {model.head, {}};
    std::visit(
        [&](auto &m) {
            m.run([&] {
                best::rms_norm(m, a.normed.data(), x, model.final_norm, count, model.config.norm_epsilon);
                best::linear(m, a.normed.data(), count, {{head, a.logits.data()}});
            });
        },
        *engine.machine);
    engine.memory().read(result.data(), a.logits.data(), result.size() * sizeof(float));
    return result;
}

// ---- Prefill and decode ------------------------------------------------------------------------------------

// The naive path: a pass over all tokens so far. Nothing is kept, so the next token costs all of this again, and more.
// `layout` says what each token sees: with a ring, what the ring would still hold.
inline void naive_pass(Engine &engine, const std::vector<int> &tokens, const Layout &layout = Contiguous{}) {
    Batch batch;
    for (size_t t = 0; t < tokens.size(); t++) batch.add(tokens[t], 0, (int)t);
    CacheView nothing;
    nothing.layout = layout;
    forward(engine, batch, nothing);
}

// And the logits of its last token.
inline std::vector<float> forward_naive(Engine &engine, const std::vector<int> &tokens,
                                        const Layout &layout = Contiguous{}) {
    naive_pass(engine, tokens, layout);
    return logits(engine, (int)tokens.size() - 1, 1);
}

// Reads a prompt into the cache, in chunks of many tokens, and returns which token of the last pass its last one is.
// after_chunk(count), if there is one, may ask for the logits of all tokens of the chunk.
inline int prefill_pass(Engine &engine, Cache &cache, int sequence, const std::vector<int> &tokens,
                        const std::function<void(int count)> &after_chunk = nullptr) {
    int first = grow(cache, sequence, (int)tokens.size()), count = 0;
    size_t chunk = std::min(engine.chunk, chunk_of(cache));
    for (size_t begin = 0; begin < tokens.size(); begin += chunk) {
        Batch batch;
        for (size_t t = begin; t < std::min(begin + chunk, tokens.size()); t++)
            batch.add(tokens[t], sequence, first + (int)t);
        forward(engine, batch, cache.view);
        count = batch.count();
        if (after_chunk) after_chunk(count);
    }
    return count - 1;
}

// And the logits of its last position.
inline std::vector<float> prefill(Engine &engine, Cache &cache, int sequence, const std::vector<int> &tokens,
                                  const std::function<void(int count)> &after_chunk = nullptr) {
    return logits(engine, prefill_pass(engine, cache, sequence, tokens, after_chunk), 1);
}

// One new token for each of some sequences.
inline void decode_pass(Engine &engine, Cache &cache, const std::vector<int> &sequences,
                        const std::vector<int> &tokens) {
    Batch batch;
    for (size_t i = 0; i < sequences.size(); i++) batch.add(tokens[i], sequences[i], grow(cache, sequences[i], 1));
    forward(engine, batch, cache.view);
}

// And their logits (sequences, vocabulary).
inline std::vector<float> decode(Engine &engine, Cache &cache, const std::vector<int> &sequences,
                                 const std::vector<int> &tokens) {
    decode_pass(engine, cache, sequences, tokens);
    return logits(engine, 0, (int)sequences.size());
}
