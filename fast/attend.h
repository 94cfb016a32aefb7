// How attention on the CPU is shared among threads, and what their results are put together with: attend.cpp computes.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "../attention.cu"

namespace fast {

constexpr int split_positions = 256;

constexpr int padded(int count, int unit) { return (count + unit - 1) / unit * unit; }

// What is known of a query head after some positions; its values are not yet divided by the sum.
using Partial = plain::Softmax;

// (a, a_values) becomes the partial result of both.
inline void merge(Partial &a, float *a_values, const Partial &b, const float *b_values, int width) {
    if (b.sum == 0) return;  // nothing visible there
    if (a.sum == 0) {
        a = b;
        std::copy(b_values, b_values + width, a_values);
        return;
    }
    float max_score = std::max(a.max_score, b.max_score);
    float a_rescale = std::exp(a.max_score - max_score), b_rescale = std::exp(b.max_score - max_score);
    a = {max_score, a.sum * a_rescale + b.sum * b_rescale};
    for (int i = 0; i < width; i++) a_values[i] = a_values[i] * a_rescale + b_values[i] * b_rescale;
}

// Where their partial results go: KV head i's `step` queries behind those of KV head i - 1.
struct Partials {
    Partial *partials;  // (head, query)
    float *values;      // (head, query, stride)
    size_t step, stride;
    Partials from(size_t query) const { return {partials + query, values + query * stride, step, stride}; }
};

// How a pass shares its attention among the threads: many tiles whole, the splits of few. A tile's parts are its sinks,
// 256 at a time, and its splits.
struct AttentionPlan {
    struct Part {
        int tile, set, part;
    };
    Heads heads;
    std::vector<Span> tiles;
    Visible widest;          // what the layer sees that sees most
    int heads_together = 1;  // KV heads that a thread reads side by side, as they lie in memory
    int stride = 0;          // numbers from a query's values to the next one's
    int most_queries = 0;    // of a tile and KV head
    int most_parts = 0;      // of a tile
    bool share_splits = false;
    std::vector<Part> parts;        // those splits and sinks
    std::vector<Partial> partials;  // (tile, kv_head, part, query)
    Floats values;                  // (tile, kv_head, part, query, stride)
    Floats sink_cos_sin;            // (row, sink, D): by what a row's query sees the sinks rotated

    int sets() const { return (heads.kv + heads_together - 1) / heads_together; }
    int sink_parts() const { return (widest.sinks + split_positions - 1) / split_positions; }
    int first_split(const Span &tile) const { return widest.first(tile.position) / split_positions; }
    int parts_of(const Span &tile) const {
        return sink_parts() + (tile.position + tile.count - 1) / split_positions + 1 - first_split(tile);
    }
    Partials at(size_t tile, size_t kv_head, size_t part) {
        size_t index = ((tile * heads.kv + kv_head) * most_parts + part) * most_queries;
        return {&partials[index], &values[index * stride], (size_t)most_parts * most_queries, (size_t)stride};
    }
};

// Tiles lie in one block of 32 positions where a precision has blocks. `threads` does not change the bits.
void plan_attention(AttentionPlan &plan, const Pass &pass, const CacheView &cache, int threads);

}  // namespace fast
