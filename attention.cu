// Attention: the equation, then the rungs of the ladder. Every rung gives what rung 1 gives.
//
//   o = softmax(q K^T / sqrt(D)) V        for each query head; K and V of the positions the query may see
//
// A query at position p sees the positions p - window + 1 .. p, or 0 .. p if the layer has no window. With grouped
// queries (Ainslie et al. 2023, GQA), query head h reads KV head h / (heads / kv_heads).
#pragma once

#include <limits>

#include "cache.h"
#include "layers.cu"

struct Heads {
    int query = 0, kv = 0, width = 0;  // query heads, KV heads, D
    int group() const { return query / kv; }
    int kv_head(int query_head) const { return query_head / group(); }
};

inline int first_visible(int position, int window) { return window ? std::max(0, position - window + 1) : 0; }

// ---- Rung 1: the equation ----------------------------------------------------------------------------------

// All tokens of one sequence at once, from keys and values that were just computed; there is no cache. Reads K and V
// once for each query head, keeps a score per visible position.
inline void attend_plain(float *out,           // (tokens, query_heads, D)
                         const float *query,   // (tokens, query_heads, D), rotated
                         const float *keys,    // (tokens, kv_heads, D), rotated
                         const float *values,  // (tokens, kv_heads, D)
                         const Heads &heads, int tokens, int window) {
    int width = heads.width;
    float factor = 1 / std::sqrt((float)width);
    std::vector<float> weight(tokens);
#pragma omp for schedule(dynamic) nowait
    for (int64_t item = 0; item < (int64_t)tokens * heads.query; item++) {
        int position = (int)(item / heads.query), kv_head = heads.kv_head((int)(item % heads.query));
        int first = first_visible(position, window);
        auto row = [&](const float *rows, int t) { return rows + ((size_t)t * heads.kv + kv_head) * width; };

        float most = -std::numeric_limits<float>::infinity(), total = 0;
        for (int t = first; t <= position; t++) {
            weight[t] = factor * dot(query + item * width, row(keys, t), width);
            most = std::max(most, weight[t]);
        }
        for (int t = first; t <= position; t++) total += weight[t] = std::exp(weight[t] - most);

        std::fill(out + item * width, out + (item + 1) * width, 0.0f);
        for (int t = first; t <= position; t++) axpy(out + item * width, weight[t] / total, row(values, t), width);
    }
}

// ---- Rung 2: over cached rows, in splits -------------------------------------------------------------------
//
// Three changes. A cached row is read once for all query heads of its group, and for several tokens of a chunk, in
// the form in which it is stored. The positions are cut into splits of fixed length, each with a softmax of its own:
// partial results (maximum, sum, weighted values) that are then merged (Milakov and Gimelshein 2018, online softmax;
// Dao et al. 2023, Flash-Decoding), so that threads can share one long sequence. And the merge always goes from
// the first split to the last, so the bits depend neither on the threads nor on what else is in the batch.
//
// Measured, the whole pass over a prompt of SmolLM2-135M's shape in bf16, 2 threads (llm generate --cache none and
// contiguous, -n 0): 512 tokens 0.39 -> 0.30 s, 2,048 tokens 4.9 -> 1.7 s.

constexpr int split_positions = 256;
constexpr int tile_queries = 32;  // query vectors that share a read of the cache; their scores stay in the L2

// Tokens that follow one another in a sequence, few enough that all their query heads of a group fit a tile.
struct QueryTile {
    int row, count;  // rows [row, row + count) of the pass
    int sequence, position;
};

inline std::vector<QueryTile> query_tiles(const int *sequences, const int *positions, int count, const Heads &heads) {
    int most = std::max(1, tile_queries / heads.group());
    std::vector<QueryTile> tiles;
    for (int row = 0; row < count; row++) {
        QueryTile *last = tiles.empty() ? nullptr : &tiles.back();
        if (last && last->count < most && last->sequence == sequences[row] &&
            last->position + last->count == positions[row])
            last->count++;
        else
            tiles.push_back({row, 1, sequences[row], positions[row]});
    }
    return tiles;
}

inline int splits_of(const QueryTile &tile) { return (tile.position + tile.count - 1) / split_positions + 1; }

// What one query head knows after some splits. Unnormalised: the attention output is values / sum.
struct Partial {
    float most = -std::numeric_limits<float>::infinity();  // largest score
    float sum = 0;                                         // of e^(score - most)
};

// (a, a_values) becomes the partial result of both stretches of positions.
inline void merge(Partial &a, float *a_values, const Partial &b, const float *b_values, int width) {
    if (b.sum == 0) return;  // nothing visible there
    if (a.sum == 0) {
        a = b;
        std::copy(b_values, b_values + width, a_values);
        return;
    }
    float most = std::max(a.most, b.most), a_factor = std::exp(a.most - most), b_factor = std::exp(b.most - most);
    a = {most, a.sum * a_factor + b.sum * b_factor};
    for (int i = 0; i < width; i++) a_values[i] = a_values[i] * a_factor + b_values[i] * b_factor;
}

// values[q * width + channel ..] += sum over rows r of weights[q * split_positions + r] * row r, for `Vecs` times 16
// channels of `Queries` queries: each row is decoded once for all of them.
template <int Queries, int Vecs, class Format>
inline void weigh_tile(float *values, const float *weights, StoredRows<Format> rows, int row_count, int width) {
    Vec sums[Queries][Vecs];
    for (int q = 0; q < Queries; q++)
        for (int c = 0; c < Vecs; c++) sums[q][c] = load(values + (size_t)q * width + c * lanes);
    for (int r = 0; r < row_count; r++) {
        Vec row[Vecs];
        for (int c = 0; c < Vecs; c++) row[c] = rows.load(r, c * lanes);
        for (int q = 0; q < Queries; q++) {
            Vec weight = set(weights[(size_t)q * split_positions + r]);
            for (int c = 0; c < Vecs; c++) sums[q][c] = fma(weight, row[c], sums[q][c]);
        }
    }
    for (int q = 0; q < Queries; q++)
        for (int c = 0; c < Vecs; c++) store(values + (size_t)q * width + c * lanes, sums[q][c]);
}

// The same for all channels, the last ones behind the last multiple of 16 too.
template <int Queries, class Format>
inline void weigh_channels(float *values, const float *weights, StoredRows<Format> rows, int row_count, int width) {
    int c = 0;
    for (; c + 4 * lanes <= width; c += 4 * lanes)
        weigh_tile<Queries, 4>(values + c, weights, rows.from_channel(c), row_count, width);
    for (; c + lanes <= width; c += lanes)
        weigh_tile<Queries, 1>(values + c, weights, rows.from_channel(c), row_count, width);
    for (int q = 0; c < width && q < Queries; q++) {
        float *to = values + (size_t)q * width + c;
        Vec total = load_part(to, width - c);
        for (int r = 0; r < row_count; r++) {
            Vec weight = set(weights[(size_t)q * split_positions + r]);
            total = fma(weight, rows.load_part(r, c, width - c), total);
        }
        store_part(to, total, width - c);
    }
}

template <class Format>
inline void weigh(float *values, const float *weights, StoredRows<Format> rows, int row_count, int queries, int width) {
    int q = 0;
    auto at = [&](int query) { return values + (size_t)query * width; };
    for (; q + 4 <= queries; q += 4)
        weigh_channels<4>(at(q), weights + (size_t)q * split_positions, rows, row_count, width);
    switch (queries - q) {
        case 3:
            return weigh_channels<3>(at(q), weights + (size_t)q * split_positions, rows, row_count, width);
        case 2:
            return weigh_channels<2>(at(q), weights + (size_t)q * split_positions, rows, row_count, width);
        case 1:
            return weigh_channels<1>(at(q), weights + (size_t)q * split_positions, rows, row_count, width);
    }
}

// Calls use(offset, rows, count) for each run of rows that hold the positions [begin, end) of a sequence.
template <class Use>
inline void for_each_run(const Cache &cache, const CacheRows &side, const Precision &type, int layer, int sequence,
                         int kv_head, int begin, int end, Use use) {
    std::visit(
        [&](auto format) {
            using Format = decltype(format);
            for (int t = begin, count; t < end; t += count) {
                count = std::min(end - t, run_of(cache, t));
                const char *start = side.at(layer, row_of(cache, sequence, t), kv_head);
                use(t, StoredRows<Format>{start, side.stride()}, count);
            }
        },
        type);
}

// The scores of a split, of which the positions [low, high) are visible, become e^(factor * score - most), and 0
// where nothing is visible. A position's lane is fixed by its place in the split: low and high do not move the sum.
inline Partial softmax_split(float *scores, int low, int high, float factor) {
    Partial partial;
    if (low >= high) {
        std::fill(scores, scores + split_positions, 0.0f);
        return partial;
    }
    const float invisible = -std::numeric_limits<float>::infinity();
    std::fill(scores, scores + low, invisible);
    std::fill(scores + high, scores + split_positions, invisible);
    Vec most = set(invisible), total = set(0);
    for (int i = 0; i < high; i += lanes) most = max(most, mul(set(factor), load(scores + i)));
    partial.most = largest(most);
    for (int i = 0; i < split_positions; i += lanes) {
        // Rounded as for the maximum: with fma(), scores of 10^10 would leave it by more than e^x can hold.
        Vec weight = exp(add(mul(set(factor), load(scores + i)), set(-partial.most)));
        store(scores + i, weight);
        total = add(total, weight);
    }
    partial.sum = sum(total);
    return partial;
}

// One split for all queries of a tile that read one KV head: partials (queries), values (queries, value width).
// Query q is query head kv_head * group + q % group of the tile's token q / group.
inline void attend_split(Partial *partials, float *values, const float *query, const QueryTile &tile, int kv_head,
                         int split, const Cache &cache, int layer, const Heads &heads, int window) {
    int group = heads.group(), queries = tile.count * group, value_width = cache.values.width;
    int origin = split * split_positions, end = std::min(origin + split_positions, tile.position + tile.count);
    int begin = std::max(origin, first_visible(tile.position, window));
    thread_local Floats scores;
    thread_local std::vector<const float *> vectors;
    scores.resize((size_t)queries * split_positions);
    vectors.resize(queries);
    for (int q = 0; q < queries; q++) {
        size_t head = (size_t)(tile.row + q / group) * heads.query + kv_head * group + q % group;
        vectors[q] = query + head * heads.width;
    }
    for_each_run(cache, cache.keys, cache.type_k, layer, tile.sequence, kv_head, begin, end,
                 [&](int t, auto rows, int count) {
                     dots(&scores[t - origin], split_positions, rows, count, vectors.data(), queries, heads.width);
                 });
    for (int q = 0; q < queries; q++) {
        int position = tile.position + q / group;
        int low = std::max(0, first_visible(position, window) - origin), high = std::min(end, position + 1) - origin;
        partials[q] = softmax_split(&scores[(size_t)q * split_positions], low, high, 1 / std::sqrt((float)heads.width));
    }
    std::fill(values, values + (size_t)queries * value_width, 0.0f);
    for_each_run(
        cache, cache.values, cache.type_v, layer, tile.sequence, kv_head, begin, end,
        [&](int t, auto rows, int count) { weigh(values, &scores[t - origin], rows, count, queries, value_width); });
}

// How one pass shares its attention among the threads, and the room for partial results where it must.
struct AttentionPlan {
    std::vector<QueryTile> tiles;
    Heads heads;
    int splits = 0;             // of the longest sequence
    bool share_splits = false;  // few tiles: threads take single splits, which are merged afterwards
    int queries = 0, value_width = 0;
    std::vector<Partial> partials;  // (tile, kv_head, split, query)
    Floats values;                  // (tile, kv_head, split, query, value_width)
    size_t index(int tile, int kv_head, int split) const {
        return (((size_t)tile * heads.kv + kv_head) * splits + split) * queries;
    }
};

// `sequences` and `positions` of the rows of a pass; a sequence's rows come one after another.
inline AttentionPlan plan_attention(const int *sequences, const int *positions, int count, const Heads &heads,
                                    int value_width, int threads) {
    AttentionPlan plan;
    plan.tiles = query_tiles(sequences, positions, count, heads);
    plan.heads = heads;
    plan.value_width = value_width;
    for (const QueryTile &tile : plan.tiles) {
        plan.splits = std::max(plan.splits, splits_of(tile));
        plan.queries = std::max(plan.queries, tile.count * heads.group());
    }
    plan.share_splits = (int)plan.tiles.size() * heads.kv < 4 * threads;
    size_t room = plan.index((int)plan.tiles.size(), 0, 0);
    plan.partials.resize(plan.share_splits ? room : 0);
    plan.values.resize(plan.share_splits ? room * value_width : 0);
    return plan;
}

// Divides the finished sums into out (rows, query_heads, value_width).
inline void store_attention(float *out, const Partial *partials, const float *values, const QueryTile &tile,
                            int kv_head, const Heads &heads, int value_width) {
    int group = heads.group();
    for (int q = 0; q < tile.count * group; q++) {
        size_t head = (size_t)(tile.row + q / group) * heads.query + kv_head * group + q % group;
        for (int i = 0; i < value_width; i++)
            out[head * value_width + i] = values[(size_t)q * value_width + i] / partials[q].sum;
    }
}

// All splits of a tile and KV head by one thread.
inline void attend_tile(float *out, const float *query, const AttentionPlan &plan, const QueryTile &tile, int kv_head,
                        const Cache &cache, int layer, int window) {
    int queries = tile.count * plan.heads.group(), width = plan.value_width;
    thread_local std::vector<Partial> total, part;
    thread_local Floats total_values, part_values;
    total.assign(queries, Partial());
    part.resize(queries);
    total_values.resize((size_t)queries * width);
    part_values.resize((size_t)queries * width);
    int first = first_visible(tile.position, window) / split_positions;
    for (int split = first; split < splits_of(tile); split++) {
        attend_split(part.data(), part_values.data(), query, tile, kv_head, split, cache, layer, plan.heads, window);
        for (int q = 0; q < queries; q++)
            merge(total[q], &total_values[(size_t)q * width], part[q], &part_values[(size_t)q * width], width);
    }
    store_attention(out, total.data(), total_values.data(), tile, kv_head, plan.heads, width);
}

// out (rows, query_heads, value_width) = attention of query (rows, query_heads, D) over the cached positions.
inline void attend(float *out, const float *query, AttentionPlan &plan, const Cache &cache, int layer, int window) {
    int kv_heads = plan.heads.kv, tiles = (int)plan.tiles.size(), width = plan.value_width;
    if (!plan.share_splits) {
#pragma omp for schedule(dynamic) nowait
        for (int item = 0; item < tiles * kv_heads; item++)
            attend_tile(out, query, plan, plan.tiles[item / kv_heads], item % kv_heads, cache, layer, window);
        return;
    }
#pragma omp for schedule(dynamic) nowait
    for (int item = 0; item < tiles * kv_heads * plan.splits; item++) {
        int split = item % plan.splits, kv_head = item / plan.splits % kv_heads, tile = item / plan.splits / kv_heads;
        size_t at = plan.index(tile, kv_head, split);
        if (split >= splits_of(plan.tiles[tile])) continue;
        attend_split(&plan.partials[at], &plan.values[at * width], query, plan.tiles[tile], kv_head, split, cache,
                     layer, plan.heads, window);
    }
    barrier();
#pragma omp for schedule(static) nowait
    for (int item = 0; item < tiles * kv_heads; item++) {
        int kv_head = item % kv_heads, tile = item / kv_heads;
        size_t total = plan.index(tile, kv_head, 0);
        for (int split = 1; split < splits_of(plan.tiles[tile]); split++) {
            size_t part = plan.index(tile, kv_head, split);
            for (int q = 0; q < plan.tiles[tile].count * plan.heads.group(); q++) {
                merge(plan.partials[total + q], &plan.values[(total + q) * width], plan.partials[part + q],
                      &plan.values[(part + q) * width], width);
            }
        }
        store_attention(out, &plan.partials[total], &plan.values[total * width], plan.tiles[tile], kv_head, plan.heads,
                        width);
    }
}
