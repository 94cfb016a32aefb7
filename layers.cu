// The layers around attention: RMSNorm, matrix products, rotary positions, SwiGLU, embedding.
//
// Each operation is written once, for all machines. m.for_each() runs its body for every item, and `team` is the
// threads that share an item: one on the CPU, the 32 of a warp on a GPU. On the CPU every thread calls the operation,
// inside m.run(), and can read the results when it returns. fast/ has faster twins with the same names and parameters.
#pragma once

#include "base/team.h"
#include "base/weights.h"
#include "pass.h"

enum class Into { set, add };  // y = W x, or y += W x (a residual connection)

namespace plain {

// ---- RMSNorm -----------------------------------------------------------------------------------------------

// Returns row `row` of a weight times x (n). Keeps 8 sums, so that an addition need not wait for the one before it.
template <class Number, class Team>
HOST_DEVICE float dot(const Number *weight, int64_t row, const float *x, int n, Team team) {
    constexpr int together = 8;
    const Number *w = weight + row * n;
    float sums[together] = {}, total = 0;
    int whole = n / together * together;
    for (int i = team.first() * together; i < whole; i += team.step() * together)
        for (int k = 0; k < together; k++) sums[k] += to_float(w[i + k]) * x[i + k];
    for (int i = whole + team.first(); i < n; i += team.step()) total += to_float(w[i]) * x[i];
    for (float sum : sums) total += sum;
    return team.sum(total);
}

// n = x / sqrt(mean(x^2) + epsilon) * weight, for each of `count` vectors (Zhang and Sennrich 2019).
// Into::set: out = n, where `out` may be `x`. Into::add: out = (out + n) * scale.
template <class M>
void rms_norm(M &m, float *out, const float *x, const Tensor &weight, int64_t count, double epsilon,
              Into into = Into::set, float scale = 1) {
    int width = (int)weight.cols;
    m.for_each(count, [=] HOST_DEVICE(int64_t t, typename M::Team team) {
        const float *in = x + t * width;
        float *to = out + t * width, factor = 1 / sqrtf(dot(in, 0, in, width, team) / width + (float)epsilon);
        for (int i = team.first(); i < width; i += team.step()) {
            const float weighted = in[i] * factor * number_of(weight, i);
            to[i] = into == Into::add ? (to[i] + weighted) * scale : weighted;
        }
    });
}

// x = (x + RMSNorm(y)) * scale, in models that norm what they add to the residual stream.
template <class M>
void add_rms_norm(M &m, float *x, const float *y, const Tensor &weight, int64_t count, double epsilon, float scale) {
    rms_norm(m, x, y, weight, count, epsilon, Into::add, scale);
}

}  // namespace plain

// ---- Matrix products ---------------------------------------------------------------------------------------

struct Product {  // one of the matrices that linear() applies to x
    const Linear &linear;
    float *y;  // (count, outputs)
};

namespace plain {

// For --weights int8. Groups of 32 neighbours in a row are whole numbers that share a scale. Groups of x are rounded in
// the same way, for every product again. Products of whole numbers are then exact.
template <class Team>
HOST_DEVICE float dot(const Int8Block *blocks, int64_t row, const float *x, int n, Team team) {
    float total = 0;
    int groups = (int)int8_groups(n);
    for (int g = team.first(); g < groups; g += team.step()) {
        int8_t numbers[int8_group];
        int first = g * int8_group, sum = 0;
        float scale = quantize(numbers, x + first, n - first < int8_group ? n - first : int8_group);
        const Int8Block &block = blocks[row / int8_rows * groups + g];
        for (int i = 0; i < int8_group; i++) sum += block.at((int)(row % int8_rows), i) * numbers[i];
        total += (float)sum * (to_float(block.scale[row % int8_rows]) * scale);
    }
    return team.sum(total);
}

// For --activations bf16: x is rounded to bf16, like the weights, and multiplied in pairs of neighbours.
template <class Team>
HOST_DEVICE float dot(const paired_bf16 *weight, int64_t row, const float *x, int n, Team team) {
    const paired_bf16 *w = weight + row * n;
    float total = 0;
    for (int i = 2 * team.first(); i < n; i += 2 * team.step()) {
        bf16 weights[2] = {w[i]}, inputs[2] = {};
        from_float(inputs[0], x[i]);
        if (i + 1 < n) weights[1] = w[i + 1], from_float(inputs[1], x[i + 1]);
        total = add_pair(total, weights, inputs);
    }
    return team.sum(total);
}

// The gain of bf16 pairs (why_no_pairs): 1 if this machine has them, else 0. Plain products are slow either way.
inline double pairs_gain() { return multiplies_pairs; }

template <class M, class Number>
void product(M &m, const Number *weight, const float *x, int count, const Product &product, Into into) {
    const Tensor matrix = product.linear.weight, bias = product.linear.bias;
    float *y = product.y;
    m.for_each(count * matrix.rows, [=] HOST_DEVICE(int64_t item, typename M::Team team) {
        int64_t o = item % matrix.rows;
        float result = dot(weight, o, x + item / matrix.rows * matrix.cols, (int)matrix.cols, team);
        if (bias.data) result += number_of(bias, o);
        if (team.first() == 0) y[item] = into == Into::add ? y[item] + result : result;
    });
}

// For each matrix: y (count, outputs) = W x + bias, or y += W x + bias; x (count, inputs). An absent one has 0 outputs.
template <class M>
void linear(M &m, const float *x, int count, std::initializer_list<Product> products, Into into = Into::set) {
    for (const Product &each : products) {
        const Tensor &weight = each.linear.weight;
        auto use = [&](auto *numbers) { product(m, numbers, x, count, each, into); };
        if (weight.type == DType::int8) use((const Int8Block *)weight.data);
        else if (weight.type == DType::bf16_pairs) use((const paired_bf16 *)weight.data);
        else with_numbers(weight, use);
    }
}

}  // namespace plain

// ---- Rotary positions --------------------------------------------------------------------------------------

// Rotary positions (RoPE; Su et al. 2021, RoFormer). The first R numbers of a head rotate, most often all.
// x_i and x_(i + R/2) are a pair; at position p it is rotated by the angle p f_i, with f_i = theta^(-2i/R):
//   x_i'         = x_i cos(p f_i) - x_(i + R/2) sin(p f_i)
//   x_(i + R/2)' = x_(i + R/2) cos(p f_i) + x_i sin(p f_i)
// So the product of a query at p and a key at t is a function of p - t. Rotations add up: a key rotated to p is
// unrotated by the angles of -p, and rotated to p + s by those of s.

// Returns the angle of a pair at a position. From 2^20 positions on, where a ring may go, an angle in float32 may be
// off by 1/16 radian and more. There it is computed in double precision, less full turns.
HOST_DEVICE inline float rope_angle(int position, float frequency) {
    if (position < 1 << 20) return (float)position * frequency;
    return (float)remainder((double)position * frequency, 2 * M_PI);
}

namespace plain {

// Fills pass.cos_sin (count, rotary), for all layers of a kind.
template <class M>
void rope_angles(M &m, const Pass &pass) {
    const int half = pass.taps ? 0 : pass.heads.rotary / 2;  // a convolution rotates nothing
    m.for_each(pass.count, [=] HOST_DEVICE(int64_t t, typename M::Team team) {
        for (int i = team.first(); i < half; i += team.step()) {
            float angle = rope_angle(pass.spans[t].position, pass.frequencies[i]);
            pass.cos_sin[t * 2 * half + i] = cosf(angle);
            pass.cos_sin[t * 2 * half + half + i] = sinf(angle);
        }
    });
}

// In place: RMSNorm of each head, where the layer has one, then RoPE. Heads of query (count, query_heads, D) and key
// (count, kv_heads, D), if the layer has keys of its own; heads of value are only normed (Gemma 4). OLMo 2 norms all
// heads of a token as one vector, before the loop. One loop saves two kernels on a GPU: items are the query heads, then
// the key heads, then the value heads. Query numbers are also scaled: rotated ones by `turned`, others by `still`
// (QueryScale). After the sum, a thread reads only numbers that it then writes.
template <class M>
void norm_and_rope(M &m, float *query, float *key, float *value, const LayerWeights &w, double epsilon,
                   const Pass &pass) {
    const Heads heads = pass.heads;
    if (w.all_query_norm.data) rms_norm(m, query, query, w.all_query_norm, pass.count, epsilon);
    if (w.all_key_norm.data) rms_norm(m, key, key, w.all_key_norm, pass.count, epsilon);
    const int64_t queries = (int64_t)pass.count * heads.query, all = (int64_t)pass.count * heads.kv;
    const int64_t keys = w.key.weight.data ? all : 0, values = w.value_norm.data ? keys : 0;
    const Tensor query_norm = w.query_norm, key_norm = w.key_norm, value_norm = w.value_norm;
    m.for_each(queries + keys + values, [=] HOST_DEVICE(int64_t item, typename M::Team team) {
        const bool is_query = item < queries, is_value = item >= queries + keys;
        const int64_t at = is_query ? item : (item - queries) % keys, token = at / (is_query ? heads.query : heads.kv);
        const Tensor &norm = is_query ? query_norm : is_value ? value_norm : key_norm;
        const int width = heads.width, rotary = is_value ? 0 : heads.rotary, half = rotary / 2;
        const float *cos_sin = pass.cos_sin + token * heads.rotary;
        float *head = (is_query ? query : is_value ? value : key) + at * width;
        const QueryScale scale = is_query ? pass.query_scale : QueryScale{};
        const int position = pass.spans[token].position;
        const float turned = scale.at(position, true), still = scale.at(position, false);
        auto rotate = [&](auto number) {
            for (int i = team.first(); i < half; i += team.step()) {
                const float a = number(i), b = number(i + half), cosine = cos_sin[i], sine = cos_sin[i + half];
                head[i] = (a * cosine - b * sine) * turned;
                head[i + half] = (b * cosine + a * sine) * turned;
            }
            for (int i = rotary + team.first(); i < width; i += team.step()) head[i] = number(i) * still;
        };
        if (!norm.data) return rotate([&](int i) { return head[i]; });
        float squares = 0;
        for (int i = team.first(); i < width / 2; i += team.step())
            squares += head[i] * head[i] + head[i + width / 2] * head[i + width / 2];
        const float factor = 1 / sqrtf(team.sum(squares) / width + (float)epsilon);
        rotate([&](int i) { return head[i] * (factor * number_of(norm, i)); });
    });
}

// ---- SwiGLU ------------------------------------------------------------------------------------------------

// x / (1 + e^-z): SiLU, where z is x; or GELU (Hendrycks and Gimpel 2016), whose tanh form x (1 + tanh(z / 2)) / 2 is
// the same with z = 2 sqrt(2 / pi) (x + 0.044715 x^3).
HOST_DEVICE inline float gated(float x, bool gelu) {
    const float z = gelu ? x * (1.5957691f + 0.071354814f * (x * x)) : x;
    return x / (1 + expf(-z));
}

// Calls change(i) for each i below `count`; an item is 256 of them.
template <class M, class Change>
void for_each_number(M &m, int64_t count, Change change) {
    constexpr int piece = 256;
    m.for_each((count + piece - 1) / piece, [=] HOST_DEVICE(int64_t item, typename M::Team team) {
        const int64_t first = item * piece, end = first + piece < count ? first + piece : count;
        for (int64_t i = first + team.first(); i < end; i += team.step()) change(i);
    });
}

// out = silu(gate) * up (Shazeer 2020), or gelu(gate) * up, for `count` numbers; `out` may be `gate`.
template <class M>
void swiglu(M &m, float *out, const float *gate, const float *up, int64_t count, bool gelu = false) {
    for_each_number(m, count, [=] HOST_DEVICE(int64_t i) { out[i] = gated(gate[i], gelu) * up[i]; });
}

// x *= by, for `count` numbers.
template <class M>
void gate(M &m, float *x, const float *by, int64_t count) {
    for_each_number(m, count, [=] HOST_DEVICE(int64_t i) { x[i] *= by[i]; });
}

// x = c tanh(x / c) for `count` logits, with the cap c, so that all are from -c to c (Gemma 4).
template <class M>
void cap_logits(M &m, float *logits, int64_t count, float cap) {
    for_each_number(m, count, [=] HOST_DEVICE(int64_t i) { logits[i] = cap * tanhf(logits[i] / cap); });
}

// ---- Embedding ---------------------------------------------------------------------------------------------

// x (count, width): row t = (or +=) scale * embedding of token t, or its part number `part` of `parts` equal parts.
template <class M>
void embed(M &m, float *x, const Tensor &embedding, float scale, const Pass &pass, Into into = Into::set, int part = 0,
           int parts = 1) {
    const int64_t width = embedding.cols / parts;
    m.for_each(pass.count, [=] HOST_DEVICE(int64_t t, typename M::Team team) {
        for (int64_t i = team.first(); i < width; i += team.step()) {
            const float number = number_of(embedding, (pass.tokens[t] * (int64_t)parts + part) * width + i) * scale;
            x[t * width + i] = into == Into::add ? x[t * width + i] + number : number;
        }
    });
}

}  // namespace plain
