// Attention: the equation, and the same over what a cache holds.
//
//   o = softmax(q K^T / sqrt(D)) V        for each query head; K and V of the positions the query may see
//
// A query at position p sees 0 .. p, or what `Visible` (cache.h) says of windows and sinks. With grouped queries
// (Ainslie et al. 2023, GQA), query head h reads KV head h / (heads / kv_heads).
#pragma once

#include "cache.h"
#include "layers.cu"

// What one layer's attention reads and writes.
struct Attention {
    float *out;                // (count, query_heads, value_width)
    const float *query;        // (count, query_heads, D), rotated
    PassVectors keys, values;  // of this pass: (count, kv_heads, width), the keys rotated
    CacheView cache;           // without memory on the naive path: there is no past, all is in this pass
    int layer;
    Visible visible;
    Heads heads;
};

namespace plain {

// ---- The equation ------------------------------------------------------------------------------------------

// One query over `count` positions, whose keys and values are `stride` numbers apart. Each score is computed twice, for
// the largest one and for its weight: so that no score is kept.
template <class Team>
HOST_DEVICE void attend_equation(float *out,           // (width)
                                 const float *query,   // (width)
                                 const float *keys,    // (count, width)
                                 const float *values,  // (count, width)
                                 int count, int stride, int width, Team team) {
    auto score = [&](int t) {
        float sum = 0;
        for (int c = team.first(); c < width; c += team.step()) sum += query[c] * keys[(int64_t)t * stride + c];
        return team.sum(sum) / sqrtf((float)width);
    };
    float max_score = -INFINITY, total = 0;
    for (int t = 0; t < count; t++) max_score = fmaxf(max_score, score(t));
    for (int c = team.first(); c < width; c += team.step()) out[c] = 0;
    for (int t = 0; t < count; t++) {
        float weight = expf(score(t) - max_score);
        total += weight;
        for (int c = team.first(); c < width; c += team.step()) out[c] += weight * values[(int64_t)t * stride + c];
    }
    for (int c = team.first(); c < width; c += team.step()) out[c] /= total;
}

// ---- Over segments -----------------------------------------------------------------------------------------

// Of the positions so far: the largest score, and the sum of e^(score - max_score).
struct Softmax {
    float max_score = -INFINITY, sum = 0;
};

// Number `channel` of the key at position t, rotated on where the segment asks for it.
template <class Format>
HOST_DEVICE float key_number(const Segment &segment, int t, int channel, const float *frequencies) {
    const Side &keys = segment.keys;
    auto number = [&](int c) {
        int begin = Format::blocks ? t / group_size * group_size : 0;
        return stored_number<true, Format>([&](int i) { return keys.row(begin + i); }, t - begin, c, keys.width);
    };
    if (segment.shift == 0 && !segment.unrotated) return number(channel);
    int half = keys.width / 2, position = segment.unrotated ? segment.shift + t : segment.shift;
    float angle = rope_angle(position, frequencies[channel % half]);
    float other = channel < half ? -number(channel + half) : number(channel - half);
    return number(channel) * cosf(angle) + other * sinf(angle);
}

// One query goes on over one more segment, a position after the other: whenever a larger score comes, what was summed
// up so far is rescaled (Milakov and Gimelshein 2018, online softmax). `out` is not yet divided by the sum.
template <class Team>
HOST_DEVICE void attend_segment(Softmax &softmax, float *out, const float *query, const Segment &segment,
                                const float *frequencies, Team team) {
    const int width = segment.keys.width, value_width = segment.values.width;
    for (int t = segment.begin; t < segment.end; t++) {
        float score = segment.keys.type.visit([&](auto format) {
            float sum = 0;
            for (int c = team.first(); c < width; c += team.step())
                sum += query[c] * key_number<decltype(format)>(segment, t, c, frequencies);
            return team.sum(sum) / sqrtf((float)width);
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

// One query head of one token.
template <class Team>
HOST_DEVICE void attend_query(const Attention &task, const Pass &pass, int row, int head, Team team) {
    const Span &span = pass.spans[row];
    int kv_head = task.heads.kv_head(head), first = task.visible.first(span.position), width = task.values.width;
    const float *query = task.query + ((int64_t)row * task.heads.query + head) * task.heads.width;
    float *out = task.out + ((int64_t)row * task.heads.query + head) * width;
    if (!task.cache.keys.data && !task.visible.dropped(span.position) && task.keys.width == width) {
        const float *keys = task.keys.at(span, first, kv_head), *values = task.values.at(span, first, kv_head);
        int count = span.position + 1 - first;
        return attend_equation(out, query, keys, values, count, task.keys.heads * width, width, team);
    }
    Segments seen;
    HeadRows rows = {task.cache, task.layer, kv_head, task.keys, task.values};
    add_sinks(seen, rows, span, task.visible);
    add_rows(seen, rows, span, task.visible);
    Softmax softmax;
    for (int c = team.first(); c < width; c += team.step()) out[c] = 0;
    for (int i = 0; i < seen.count; i++) attend_segment(softmax, out, query, seen.list[i], pass.frequencies, team);
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

// Vector `item` of some, in place.
template <class Team>
HOST_DEVICE void round_to_f16(float *vectors, int64_t item, int width, Team team) {
    for (int64_t i = item * width + team.first(); i < (item + 1) * width; i += team.step()) {
        f16 number;
        from_float(number, vectors[i]);
        vectors[i] = to_float(number);
    }
}

// The pass's keys and values into the cache's rows, before its queries read. What a block of positions keeps at f16 is
// rounded first, in place: so this pass's queries see it as later ones will.
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
                       pass.cos_sin + (int64_t)row * task.heads.width, team);
    });
}

// After they have read: the newest block of each sequence stays at f16.
template <class M>
void keep_residual(M &m, const Attention &task, const Pass &pass) {
    if (!task.cache.residual_keys.data && !task.cache.residual_values.data) return;
    int heads = task.heads.kv;
    m.for_each((int64_t)pass.count * heads, [=] HOST_DEVICE(int64_t item, typename M::Team team) {
        keep_position(task.cache, task.layer, pass.spans[item / heads], (int)(item % heads), task.keys, task.values,
                      team);
    });
}

// body() is a pass's operations, called by all who compute.
template <class M, class Body>
void run(M &m, const Pass &, const CacheView &, Body body) {
    m.run(body);
}

}  // namespace plain
