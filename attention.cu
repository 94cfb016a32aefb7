// Attention: the equation; what a query sees of a cache; the equation over that; how a pass is stored.
//
//   o = softmax(q K^T / sqrt(D)) V        for each query head; K and V of the positions the query may see
//
// A query at position p sees positions 0 .. p, or fewer where `Visible` (cache.h) has a window. With grouped queries
// (Ainslie et al. 2023, GQA), query head h reads KV head h / (heads / kv_heads). Some models learn a sink for each
// query head: a score without a value, which takes its share of the softmax (OpenAI 2025, gpt-oss).
#pragma once

#include "cache.h"
#include "layers.cu"

// ---- The equation ------------------------------------------------------------------------------------------

namespace plain {

// One query over `count` positions, whose keys and values are `stride` numbers apart. Computes each score twice, first
// to find the largest, then for its weight, so no score needs memory. `team`: the threads that share the channels of a
// query. On the CPU a team is one thread, and these are plain loops.
template <class Team>
HOST_DEVICE void attend_equation(float *out,           // (width)
                                 const float *query,   // (width)
                                 const float *keys,    // (count, width)
                                 const float *values,  // (count, width)
                                 int count, int stride, int width,
                                 float scale,  // 1 / sqrt(D) in most models
                                 float sink,   // the head's learned sink, or -INFINITY
                                 Team team) {
    auto score = [&](int t) {
        float sum = 0;
        for (int c = team.first(); c < width; c += team.step()) sum += query[c] * keys[(int64_t)t * stride + c];
        return team.sum(sum) * scale;
    };
    float max_score = sink;
    for (int t = 0; t < count; t++) max_score = fmaxf(max_score, score(t));
    float total = expf(sink - max_score);
    for (int c = team.first(); c < width; c += team.step()) out[c] = 0;
    for (int t = 0; t < count; t++) {
        float weight = expf(score(t) - max_score);
        total += weight;
        for (int c = team.first(); c < width; c += team.step()) out[c] += weight * values[(int64_t)t * stride + c];
    }
    for (int c = team.first(); c < width; c += team.step()) out[c] /= total;
}

}  // namespace plain

// ---- What a query sees -------------------------------------------------------------------------------------
//
// Four words that cache.h and precision.h explain in full. Codes: small whole numbers that encode the numbers of a row.
// A block: 32 positions that int4 and int2 encode together. The residual block: the newest positions of a sequence,
// kept at f16 until there are 32. A ring: a cache that keeps the last positions, its window, and the first, its sinks.
//
// A query reads a short list of segments: consecutive positions in one kind of memory. For example, the query at
// position 100 of an int4 cache, decoded by itself, reads
//
//   [0, 96)      blocks of 32, as codes              the cache's rows
//   [96, 100)    the newest block so far, at f16     the residual block
//   [100, 101)   its own key and value               this pass's vectors
//
// In an f16 cache it reads all of [0, 101) from stored rows. In a ring with a window of 40 and 3 sinks it reads [0, 3),
// the sinks, then [61, 101). On the naive path it reads [0, 101) from this pass's vectors. Attention is one loop over
// segments of any kind.

// The keys or the values of this pass: (tokens, kv_heads, width).
struct PassVectors {
    float *start;
    int heads, width;
    HOST_DEVICE float *at(const Span &span, int position, int head) const {
        return start + ((int64_t)(span.row + position - span.position) * heads + head) * width;
    }
};

// Where the keys or the values of a segment are: position t is in row layout.row(sequence, t). A Choice is one of a
// list of types, in a form that a kernel can take (base/choice.h).
struct Source {
    const char *start;  // row 0 of a layer and KV head
    size_t stride;      // bytes from one row to the next
    int width;
    Choice<Precision> type;
    Choice<Layout> layout;
    int sequence;
    HOST_DEVICE const char *row(int t) const {
        return start + layout.visit([&](auto &chosen) { return chosen.row(sequence, t); }) * (int64_t)stride;
    }
};

// Positions [begin, end). A key is rotated (layers.cu, rotary positions) when it is read: by `shift` positions, or by
// its own position + `shift` if it is stored unrotated. This puts the sinks just before a window that moved.
struct Segment {
    int begin, end;
    Source keys, values;
    int shift = 0;
    bool unrotated = false;
};

// All that a query sees, in the order of positions: at most sinks, stored rows, residual block, own vectors.
struct Segments {
    Segment list[4];
    int count = 0;
    HOST_DEVICE void add(int begin, int end, const Source &keys, const Source &values, int shift = 0,
                         bool unrotated = false) {
        if (begin < end) list[count++] = {begin, end, keys, values, shift, unrotated};
    }
};

// The sources of a layer and KV head. Each is read like a cache, even where it is none: with a layout that gives the
// row of position t, and a precision that reads the numbers.
struct HeadRows {
    const CacheView &cache;
    int layer, kv_head;
    PassVectors own_keys, own_values;

    // The rows of the cache.
    HOST_DEVICE Source stored(const CacheRows &rows, const Choice<Precision> &type, int sequence) const {
        return in(rows, type, cache.layout, sequence);
    }
    // The residual block of a sequence: a ring of 32 slots, so position t is in slot t % 32.
    HOST_DEVICE Source residual(const CacheRows &rows, int sequence) const {
        Ring ring;
        ring.slots = group_size;
        return in(rows, Choice<Precision>::of(F16{}), Choice<Layout>::of(ring), sequence);
    }
    // The sinks of a sequence: a contiguous cache that holds sink t in row t.
    HOST_DEVICE Source sink(const CacheRows &rows, int sequence) const {
        return in(rows, Choice<Precision>::of(F32{}), Choice<Layout>::of(Contiguous{cache.sinks}), sequence);
    }
    // This pass's vectors. Position t is token span.row + t - span.position of the pass, so `start` is the address that
    // position 0 would have, often before the vectors. C++ allows no such pointer, so whole numbers are added.
    HOST_DEVICE Source own(const PassVectors &vectors, const Span &span) const {
        const int64_t first = (int64_t)(span.row - span.position) * vectors.heads + kv_head;
        const char *start = (const char *)((int64_t)vectors.start + first * vectors.width * (int64_t)sizeof(float));
        const size_t stride = (size_t)vectors.heads * vectors.width * sizeof(float);
        const auto layout = Choice<Layout>::of(Contiguous{INT_MAX});  // one sequence, as long as any
        return {start, stride, vectors.width, Choice<Precision>::of(F32{}), layout, /*sequence=*/0};
    }

private:
    HOST_DEVICE Source in(const CacheRows &rows, const Choice<Precision> &type, const Choice<Layout> &layout,
                          int sequence) const {
        return {rows.at(layer, 0, kv_head), rows.stride(), rows.width, type, layout, sequence};
    }
};

// Adds what the queries of a span see, without sinks: from the first position that the first query sees to the last
// query's own. Where a precision has blocks, the span lies within one block of 32. Its queries read that block at f16
// and all before it as codes:
//
//   0               block            span.first      span.position    end
//   |  stored rows  |  residual block  |  this pass's own vectors      |
//
// Positions before `first`, where a window begins, are cut off. If the pass began before the block, all of the block is
// this pass's own. If K has blocks and V has none, V is read from stored rows in all three; likewise the reverse.
HOST_DEVICE inline void add_rows(Segments &seen, const HeadRows &head, const Span &span, const Visible &visible) {
    const CacheView &cache = head.cache;
    const int first = visible.first(span.position), end = span.position + span.count;
    const Source own_keys = head.own(head.own_keys, span), own_values = head.own(head.own_values, span);
    if (!cache.keys.data) return seen.add(first, end, own_keys, own_values);  // the naive path
    const bool key_blocks = has_blocks(cache.type_k), value_blocks = has_blocks(cache.type_v);
    const Source keys = head.stored(cache.keys, cache.type_k, span.sequence);
    const Source values = head.stored(cache.values, cache.type_v, span.sequence);
    if (!key_blocks && !value_blocks) return seen.add(first, end, keys, values);
    Source kept_keys = keys, kept_values = values, new_keys = keys, new_values = values;
    if (key_blocks) kept_keys = head.residual(cache.residual_keys, span.sequence), new_keys = own_keys;
    if (value_blocks) kept_values = head.residual(cache.residual_values, span.sequence), new_values = own_values;
    const int block = span.position / group_size * group_size;
    auto add = [&](int begin, int end, const Source &keys, const Source &values) {
        seen.add(begin > first ? begin : first, end, keys, values);
    };
    add(0, block, keys, values);
    add(block, span.first, kept_keys, kept_values);
    add(block > span.first ? block : span.first, end, new_keys, new_values);
}

// Adds the sinks, if positions between them and the window of the query at span.position were dropped. On the naive
// path the sinks are vectors of this pass, rotated to their own positions.
HOST_DEVICE inline void add_sinks(Segments &seen, const HeadRows &head, const Span &span, const Visible &visible) {
    if (visible.sinks == 0 || !visible.dropped(span.position)) return;
    const bool cached = head.cache.keys.data;
    const Source keys = cached ? head.sink(head.cache.sink_keys, span.sequence) : head.own(head.own_keys, span);
    const Source values = cached ? head.sink(head.cache.sink_values, span.sequence) : head.own(head.own_values, span);
    seen.add(0, visible.sinks, keys, values, visible.shift(span.position), /*unrotated=*/cached);
}

// ---- Over segments -----------------------------------------------------------------------------------------

// What one layer's attention reads and writes.
struct Attention {
    float *out;                // (count, query_heads, value_width)
    const float *query;        // (count, query_heads, D), rotated
    PassVectors keys, values;  // of this pass: (count, kv_heads, width), the keys rotated
    CacheView cache;           // on the naive path without memory: there is no past, all is in this pass
    int layer;                 // its index in the store of its kind
    Visible visible;
    Heads heads;
    float scale;   // scores are multiplied by it
    Tensor sinks;  // (1, query_heads): learned sinks, absent in most models
    HOST_DEVICE float sink(int query_head) const { return sinks.data ? number_of(sinks, query_head) : -INFINITY; }
};

// What the attention of `layer` reads and writes; its cache is the store of its kind.
inline Attention attention_of(const Activations &a, const Model &model, int layer, const std::vector<Store> &stores) {
    const Config &config = model.config;
    const LayerRows &rows = config.rows[layer];
    const Kind &kind = config.kinds[rows.kind];
    const Activations::OfKind &of = a.kinds[rows.kind];
    const float scale = config.score_scale ? (float)config.score_scale : 1 / std::sqrt((float)kind.key_width);
    const CacheView &cache = stores[rows.kind].view;
    const PassVectors keys = {of.key.data(), kind.kv_heads, kind.key_width};
    const PassVectors values = {of.value.data(), kind.kv_heads, kind.value_width};
    return {a.attended.data(), a.query.data(), keys, values, cache, rows.index, visible_of(cache.layout, kind.window),
            heads_of(config, kind), scale, model.layers[layer].sinks};
}

namespace plain {

// The state of a softmax after some positions: the largest score, and the sum of e^(score - max_score). A learned sink
// is its first score, without a value.
struct Softmax {
    float max_score = -INFINITY, sum = 0;
    HOST_DEVICE static Softmax begin(float sink) { return {sink, sink > -INFINITY ? 1.0f : 0.0f}; }
};

// Number `channel` of the key at position t, rotated as the segment says, with the formula of layers.cu:
//   k_i cos - k_(i + half) sin      for the first of a pair, with half = rotary / 2
//   k_i cos + k_(i - half) sin      for the second
template <class Format>
HOST_DEVICE float key_number(const Segment &segment, int t, int channel, const float *frequencies, int rotary) {
    const Source &keys = segment.keys;
    auto row_at = [&](int i) { return keys.row(i); };
    auto number = [&](int c) { return stored_number<true, Format>(row_at, t, c, keys.width); };
    if ((segment.shift == 0 && !segment.unrotated) || channel >= rotary) return number(channel);
    int half = rotary / 2, position = segment.unrotated ? segment.shift + t : segment.shift;
    float angle = rope_angle(position, frequencies[channel % half]);
    float other = channel < half ? -number(channel + half) : number(channel - half);
    return number(channel) * cosf(angle) + other * sinf(angle);
}

// Adds one more segment to a query's softmax and `out`, position by position. A new largest score rescales all that was
// summed before (Milakov and Gimelshein 2018, online softmax). `out` is not yet divided by the sum.
template <class Team>
HOST_DEVICE void attend_segment(Softmax &softmax, float *out, const float *query, const Segment &segment, float scale,
                                const float *frequencies, int rotary, Team team) {
    const int width = segment.keys.width, value_width = segment.values.width;
    for (int t = segment.begin; t < segment.end; t++) {
        float score = segment.keys.type.visit([&](auto format) {
            float sum = 0;
            for (int c = team.first(); c < width; c += team.step())
                sum += query[c] * key_number<decltype(format)>(segment, t, c, frequencies, rotary);
            return team.sum(sum) * scale;
        });
        float max_score = fmaxf(softmax.max_score, score);
        float rescale = expf(softmax.max_score - max_score), weight = expf(score - max_score);
        softmax = {max_score, softmax.sum * rescale + weight};
        segment.values.type.visit([&](auto format) {
            const char *row = segment.values.row(t);
            for (int c = team.first(); c < value_width; c += team.step())
                out[c] = out[c] * rescale + weight * decltype(format)::number(row, c);
        });
    }
}

// Attention of one query head of one token. On the naive path, unless positions were dropped, all that it sees is
// consecutive in memory: the equation alone.
template <class Team>
HOST_DEVICE void attend_query(const Attention &task, const Pass &pass, int row, int head, Team team) {
    const Span &span = pass.spans[row];
    int kv_head = task.heads.kv_head(head), first = task.visible.first(span.position), width = task.values.width;
    const float *query = task.query + ((int64_t)row * task.heads.query + head) * task.heads.width;
    float *out = task.out + ((int64_t)row * task.heads.query + head) * width;
    if (!task.cache.keys.data && !task.visible.dropped(span.position) && task.keys.width == width) {
        const float *keys = task.keys.at(span, first, kv_head), *values = task.values.at(span, first, kv_head);
        int count = span.position + 1 - first;
        return attend_equation(out, query, keys, values, count, task.keys.heads * width, width, task.scale,
                               task.sink(head), team);
    }
    Segments seen;
    HeadRows rows = {task.cache, task.layer, kv_head, task.keys, task.values};
    add_sinks(seen, rows, span, task.visible);
    add_rows(seen, rows, span, task.visible);
    Softmax softmax = Softmax::begin(task.sink(head));
    for (int c = team.first(); c < width; c += team.step()) out[c] = 0;
    for (int i = 0; i < seen.count; i++)
        attend_segment(softmax, out, query, seen.list[i], task.scale, pass.frequencies, task.heads.rotary,
                       team);
    for (int c = team.first(); c < width; c += team.step()) out[c] /= softmax.sum;
}

template <class M>
void attention(M &m, const Attention &task, const Pass &pass) {
    int heads = task.heads.query;
    m.for_each((int64_t)pass.count * heads, [=] HOST_DEVICE(int64_t item, typename M::Team team) {
        attend_query(task, pass, (int)(item / heads), (int)(item % heads), team);
    });
}

// ---- Storing -----------------------------------------------------------------------------------------------
//
// store_rows() runs before the queries of a pass read, keep_residual() after. Where a precision has blocks of 32, a
// block is encoded when its last position comes; until then its positions are in the residual block:
//
//   a prompt of 40 positions   store_rows encodes 0 .. 31
//                              attention: the query at 33 reads these as codes, 32 and 33 from the pass's vectors
//                              keep_residual keeps 32 .. 39
//   the token at 63, later     store_rows encodes 32 .. 63: 32 .. 62 from the residual block, 63 from the pass

// Encodes the key or value of one position (a span of 1) into its row. Where a precision has blocks, the last position
// of a block encodes all 32 rows: a row of values holds its position, a row of keys some channels of all 32 positions
// (precision.h, GroupedRow).
template <bool keys, class Team>
HOST_DEVICE void store_vector(const CacheView &cache, int layer, const Span &span, int kv_head, const PassVectors &own,
                              Team team) {
    const CacheRows &rows = keys ? cache.keys : cache.values;
    const CacheRows &residual = keys ? cache.residual_keys : cache.residual_values;
    auto row_at = [&](int t) { return rows.at(layer, cache.row_of(span.sequence, t), kv_head); };
    auto store = [&](auto format) {
        using Format = decltype(format);
        if constexpr (!Format::blocks) {
            Format::encode(row_at(span.position), own.at(span, span.position, kv_head), rows.width, team);
        } else if (span.position % group_size == group_size - 1) {
            const int block = span.position - (group_size - 1);  // its first position
            const char *kept = residual.at(layer, (int64_t)span.sequence * group_size, kv_head);
            auto number = [&](int t, int channel) -> float {  // rounded to f16, of earlier passes and of this one
                if (block + t < span.first) return F16::number(kept + t * residual.stride(), channel);
                return own.at(span, block + t, kv_head)[channel];
            };
            for (int i = 0; i < group_size; i++)
                Format::template encode_row<keys>(row_at(block + i), i, number, rows.width, team);
        }
    };
    (keys ? cache.type_k : cache.type_v).visit(store);
}

// Stores a sink in the sinks' own rows, at f32. Its key is rotated back by the angles of its position, cos_sin
// (rotary), so it is stored unrotated.
template <class Team>
HOST_DEVICE void store_sink(const CacheView &cache, int layer, const Span &span, int kv_head, const float *key,
                            const float *value, const float *cos_sin, int rotary, Team team) {
    int64_t row = (int64_t)span.sequence * cache.sinks + span.position;
    float *to_key = (float *)cache.sink_keys.at(layer, row, kv_head);
    const int half = rotary / 2;
    for (int i = team.first(); i < half; i += team.step()) {
        float a = key[i], b = key[i + half], cosine = cos_sin[i], sine = cos_sin[i + half];
        to_key[i] = a * cosine + b * sine;
        to_key[i + half] = b * cosine - a * sine;
    }
    for (int i = rotary + team.first(); i < cache.sink_keys.width; i += team.step()) to_key[i] = key[i];
    float *to_value = (float *)cache.sink_values.at(layer, row, kv_head);
    for (int i = team.first(); i < cache.sink_values.width; i += team.step()) to_value[i] = value[i];
}

// Stores one position of a layer and KV head, and keeps it if it is a sink.
template <class Team>
HOST_DEVICE void store_position(const CacheView &cache, int layer, const Span &span, int kv_head,
                                const PassVectors &keys, const PassVectors &values, const float *cos_sin, int rotary,
                                Team team) {
    store_vector<true>(cache, layer, span, kv_head, keys, team);
    store_vector<false>(cache, layer, span, kv_head, values, team);
    if (span.position < cache.sinks)
        store_sink(cache, layer, span, kv_head, keys.at(span, span.position, kv_head),
                   values.at(span, span.position, kv_head), cos_sin, rotary, team);
}

// Stores a position at f16 in the residual block, if it is in its sequence's newest block. Why not in store_position():
// this pass still reads the older block that earlier passes left there. Why not encode the block again with each
// position: its scales change as it fills, and numbers rounded once would be rounded again.
template <class Team>
HOST_DEVICE void keep_position(const CacheView &cache, int layer, const Span &span, int kv_head,
                               const PassVectors &keys, const PassVectors &values, Team team) {
    if (span.position / group_size != (span.end - 1) / group_size) return;
    int64_t row = (int64_t)span.sequence * group_size + span.position % group_size;
    auto keep = [&](const CacheRows &residual, const PassVectors &own) {
        if (!residual.data) return;
        F16::encode(residual.at(layer, row, kv_head), own.at(span, span.position, kv_head), residual.width, team);
    };
    keep(cache.residual_keys, keys);
    keep(cache.residual_values, values);
}

// Rounds vector `item` of `vectors` (items, width) to f16, in place.
template <class Team>
HOST_DEVICE void round_to_f16(float *vectors, int64_t item, int width, Team team) {
    for (int64_t i = item * width + team.first(); i < (item + 1) * width; i += team.step()) {
        f16 number;
        from_float(number, vectors[i]);
        vectors[i] = to_float(number);
    }
}

// Stores the keys and values of a pass in the rows of the cache, before its queries read. Vectors that a residual block
// may keep at f16 are rounded first, in place, so this pass's queries see them as later ones will.
template <class M>
void store_rows(M &m, const Attention &task, const Pass &pass) {
    int heads = task.heads.kv;
    if (task.cache.residual_keys.data || task.cache.residual_values.data)
        m.for_each((int64_t)pass.count * heads, [=] HOST_DEVICE(int64_t item, typename M::Team team) {
            if (task.cache.residual_keys.data) round_to_f16(task.keys.start, item, task.keys.width, team);
            if (task.cache.residual_values.data) round_to_f16(task.values.start, item, task.values.width, team);
        });
    m.for_each((int64_t)pass.count * heads, [=] HOST_DEVICE(int64_t item, typename M::Team team) {
        int row = (int)(item / heads);
        store_position(task.cache, task.layer, pass.spans[row], (int)(item % heads), task.keys, task.values,
                       pass.cos_sin + (int64_t)row * task.heads.rotary, task.heads.rotary, team);
    });
}

// Stores the newest block of each sequence at f16, after the queries of the pass have read.
template <class M>
void keep_residual(M &m, const Attention &task, const Pass &pass) {
    if (!task.cache.residual_keys.data && !task.cache.residual_values.data) return;
    int heads = task.heads.kv;
    m.for_each((int64_t)pass.count * heads, [=] HOST_DEVICE(int64_t item, typename M::Team team) {
        keep_position(task.cache, task.layer, pass.spans[item / heads], (int)(item % heads), task.keys, task.values,
                      team);
    });
}

// Runs body(), the operations of a pass, which every thread calls. `passes` and `stores` have one entry for each kind.
template <class M, class Body>
void run(M &m, const std::vector<Pass> &, const std::vector<Store> &, Body body) {
    m.run(body);
}

}  // namespace plain
