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

// Some of them: KV head i's `step` queries behind those of KV head i - 1.
struct Partials {
    Partial *partials;  // (head, query)
    float *values;      // (head, query, stride)
    size_t step, stride;
    Partials from(size_t query) const { return {partials + query, values + query * stride, step, stride}; }
};

// The first `count` queries' partial results in `to` become those of both.
inline void merge(const Partials &to, const Partials &from, int count) {
    for (int q = 0; q < count; q++) {
        Partial &a = to.partials[q], b = from.partials[q];
        float *a_values = to.values + q * to.stride, *b_values = from.values + q * from.stride;
        if (b.sum == 0) continue;  // nothing visible there
        if (a.sum == 0) {
            a = b;
            std::copy(b_values, b_values + to.stride, a_values);
            continue;
        }
        float max_score = std::max(a.max_score, b.max_score);
        float a_rescale = std::exp(a.max_score - max_score), b_rescale = std::exp(b.max_score - max_score);
        a = {max_score, a.sum * a_rescale + b.sum * b_rescale};
        for (size_t i = 0; i < to.stride; i++) a_values[i] = a_values[i] * a_rescale + b_values[i] * b_rescale;
    }
}

// How a pass shares its attention among the threads: many tiles whole, the splits of few. A tile's parts are its sinks,
// 256 at a time, and its splits.
struct AttentionPlan {
    struct Parts {  // [first, last) of a tile, for KV heads that are read together; or one that some tiles share
        int tile, tiles, head, heads, first, last;
    };
    Heads heads;
    std::vector<Span> tiles;
    Visible widest;          // what the layer sees that sees most
    int heads_together = 1;  // KV heads that a thread reads side by side, as they lie in memory
    int stride = 0;          // numbers from a query's values to the next one's
    int most_queries = 0;    // of a tile and KV head
    int slots = 0;           // for the partial results of a tile: one, or one for each of its parts
    bool share_splits = false;
    bool in_turn = false;  // whoever is ready takes the next part: they take unequal time
    std::vector<Parts> parts;
    std::vector<Partial> partials;  // (tile, kv_head, slot, query)
    Floats values;                  // (tile, kv_head, slot, query, stride)
    // By what the sinks are rotated, (place, D): for the query of row r by place first_place[r] and those behind it.
    // The next token sees the sinks one position further on: the two share all their places but one.
    Floats sink_cos_sin;
    std::vector<int> first_place;

    int sink_parts() const { return (widest.sinks + split_positions - 1) / split_positions; }
    int tokens_of(int tile, int some) const {
        int tokens = 0;
        for (int i = tile; i < tile + some; i++) tokens += tiles[i].count;
        return tokens;
    }
    int first_split(const Span &tile) const { return widest.first(tile.position) / split_positions; }
    int parts_of(const Span &tile) const {
        return sink_parts() + (tile.position + tile.count - 1) / split_positions + 1 - first_split(tile);
    }
    Partials at(size_t tile, size_t kv_head, size_t slot) {
        size_t index = ((tile * heads.kv + kv_head) * slots + slot) * most_queries;
        return {&partials[index], &values[index * stride], (size_t)slots * most_queries, (size_t)stride};
    }
};

using Plans = std::vector<AttentionPlan>;  // (kind)

// Tiles lie in one block of 32 positions where a precision has blocks. `threads` does not change the bits.
void plan_attention(AttentionPlan &plan, const Pass &pass, const CacheView &cache, int threads);

}  // namespace fast
