// How attention on the CPU is shared among threads, and how their results are merged. attend.cpp computes.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "../attention.cu"

namespace fast {

constexpr int split_positions = 256;

constexpr int padded(int count, int unit) { return (count + unit - 1) / unit * unit; }

// The softmax of a query head over some positions; its values are not yet divided by the sum.
using Partial = plain::Softmax;

// Partial results of some KV heads; `step` queries from one head to the next.
struct Partials {
    Partial *partials;  // (head, query)
    float *values;      // (head, query, stride)
    size_t step, stride;
    Partials from(size_t query) const { return {partials + query, values + query * stride, step, stride}; }
};

// Merges the partial results of the first `count` queries of `from` into those of `to`.
inline void merge(const Partials &to, const Partials &from, int count) {
    for (int q = 0; q < count; q++) {
        Partial &a = to.partials[q], b = from.partials[q];
        float *a_values = to.values + q * to.stride, *b_values = from.values + q * from.stride;
        if (b.sum == 0) continue;  // it saw nothing
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

// How the attention of a pass is shared among threads: whole tiles where there are many, else their splits. The parts
// of a tile are its sinks, 256 at a time, then its splits.
struct AttentionPlan {
    struct Parts {  // parts [first, last) of a tile, for KV heads that are read together; or a part that tiles share
        int tile, tiles, head, heads, first, last;
    };
    Heads heads;
    std::vector<Span> tiles;
    Visible widest;          // of the layer that sees most
    int heads_together = 1;  // KV heads that a thread reads together, as they are next to one another in memory
    int stride = 0;          // numbers from one query's values to the next
    int most_queries = 0;    // of a tile and KV head
    int slots = 0;           // for the partial results of a tile: one, or one for each part
    bool share_splits = false;
    bool in_turn = false;  // parts take unequal time: a thread that is ready takes the next one
    std::vector<Parts> parts;
    std::vector<Partial> partials;  // (tile, kv_head, slot, query)
    Floats values;                  // (tile, kv_head, slot, query, stride)
    // (place, D): angles by which sinks are rotated. For token r of the pass, sink i has place first_place[r] + i. For
    // the next token it is one position further, so the two share all places but one.
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

// Plans a pass of the layers of one kind, whose store is `cache`. `threads` does not change the bits.
void plan_attention(AttentionPlan &plan, const Pass &pass, const CacheView &cache, int threads);

}  // namespace fast
