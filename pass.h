// The tokens of one pass: which sequence and position each has, and the memory that computing them takes.
#pragma once

#include <vector>

#include "base/device.h"
#include "base/weights.h"

// The tokens of one pass. Tokens of one sequence are consecutive, in the order of their positions.
struct Batch {
    std::vector<int> tokens, sequences, positions;
    int count() const { return (int)tokens.size(); }
    void add(int token, int sequence, int position) {
        tokens.push_back(token), sequences.push_back(sequence), positions.push_back(position);
    }
};

struct Heads {
    int query = 0, kv = 0, width = 0;                      // query heads, KV heads, D
    int rotary = width;                                    // RoPE rotates the first `rotary` numbers of a head
    HOST_DEVICE int per_kv() const { return query / kv; }  // query heads of a KV head (Ainslie et al. 2023, GQA)
    HOST_DEVICE int kv_head(int query_head) const { return query_head / per_kv(); }
};

// A convolution counts as one head, as wide as x.
inline Heads heads_of(const Config &config, const Kind &kind) {
    return {kind.taps ? 1 : config.heads, kind.kv_heads, kind.key_width, kind.rotary()};
}

// Consecutive positions of one sequence, and their rows in a pass.
struct Span {
    int row, count;          // rows [row, row + count) of the pass
    int sequence, position;  // positions [position, position + count) of this sequence
    int first, end;          // the pass has positions [first, end) of the sequence, the span among them; those before
                             // `first` are in the cache
};

// What the operations of one kind of layers know of a pass. Pointers are into memory of the machine.
struct Pass {
    int count = 0;
    const int *tokens = nullptr;         // (count)
    const Span *spans = nullptr;         // (count): position of each token, as a span of 1
    float *cos_sin = nullptr;            // (count, rotary): rotary / 2 cosines, then as many sines
    const float *frequencies = nullptr;  // (rotary / 2): radians a position
    Heads heads = {};
    const Span *spans_on_host = nullptr;  // the same spans in memory of the host, which plans for a GPU
    int kind = 0;                         // index in Config::kinds
    int window = 0;                       // positions that the layers look back; 0: all
    int taps = 0;                         // length of the kind's convolution; 0: its layers attend
    QueryScale query_scale = {};          // what queries are multiplied with
};

// Returns a span of 1 for each token of a batch. For positions 5 and 6 of sequence A and position 9 of B:
//   row 0: A, position 5, [5, 7)     row 1: A, position 6, [5, 7)     row 2: B, position 9, [9, 10)
inline std::vector<Span> spans_of(const Batch &batch) {
    std::vector<Span> spans;
    for (int begin = 0; begin < batch.count();) {
        int end = begin;  // one past the last row of the same sequence
        while (end < batch.count() && batch.sequences[end] == batch.sequences[begin]) end++;
        const int first = batch.positions[begin], behind = first + end - begin;
        for (; begin < end; begin++)
            spans.push_back({begin, 1, batch.sequences[begin], batch.positions[begin], first, behind});
    }
    return spans;
}

// The buffers of a pass, in float32, in memory of the machine. The next pass uses them again.
struct Activations {
    Buffer<float> x;                // (count, hidden): the residual stream
    Buffer<float> normed;           // (count, hidden)
    Buffer<float> query, attended;  // (count, heads, D)
    Buffer<float> gate, up;         // (count, ffn), or (count, per_layer) in Gemma 4
    Buffer<float> picked;           // (rows, hidden): rows of x whose logits are wanted
    Buffer<float> logits;           // (rows, vocabulary)
    Buffer<int> tokens;             // (count)
    Buffer<Span> spans;             // (count)
    std::vector<Span> spans_on_host;
    struct OfKind {
        Buffer<float> key, value;   // (count, kv_heads, D): of the last layer that computed some
        Buffer<float> cos_sin;      // (count, rotary)
        Buffer<float> frequencies;  // (rotary / 2)
    };
    std::vector<OfKind> kinds;
};

// Copies a batch to the machine and makes the buffers large enough. Returns a Pass for each kind of layers.
inline std::vector<Pass> begin_pass(Activations &a, Memory &memory, const Config &config, const Batch &batch) {
    size_t count = (size_t)batch.count();
    for (auto *buffer : {&a.x, &a.normed}) buffer->resize(memory, count * config.hidden);
    const int widest = std::max({config.ffn, config.shared_ffn, config.per_layer});
    for (auto *buffer : {&a.gate, &a.up}) buffer->resize(memory, count * widest);
    a.tokens.assign(memory, batch.tokens);
    a.spans.assign(memory, a.spans_on_host = spans_of(batch));
    std::vector<Pass> passes;
    for (const Kind &kind : config.kinds) {
        Activations::OfKind &of = a.kinds[passes.size()];
        const Heads heads = heads_of(config, kind);
        for (auto *buffer : {&a.query, &a.attended}) buffer->resize(memory, count * heads.query * heads.width);
        for (auto *buffer : {&of.key, &of.value}) buffer->resize(memory, count * heads.kv * heads.width);
        of.cos_sin.resize(memory, count * heads.rotary);
        passes.push_back({(int)count, a.tokens.data(), a.spans.data(), of.cos_sin.data(), of.frequencies.data(), heads,
                          a.spans_on_host.data(), (int)passes.size(), kind.window, kind.taps, kind.query_scale()});
    }
    return passes;
}
