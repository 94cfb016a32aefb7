// A whole model once more, in double precision, straight from the equations. Of the engine it takes the structs that
// hold the weights, which are in float32, and no function.
#pragma once

#include "../base/weights.h"
#include "reference.h"

namespace reference {

using Doubles = std::vector<double>;

inline double number(const Tensor &tensor, size_t i) { return ((const float *)tensor.data)[i]; }

inline Doubles times(const Linear &matrix, const Doubles &x) {
    Doubles y((size_t)matrix.weight.rows);
    for (size_t o = 0; o < y.size(); o++)
        for (size_t i = 0; i < x.size(); i++) y[o] += number(matrix.weight, o * x.size() + i) * x[i];
    for (size_t o = 0; matrix.bias.data && o < y.size(); o++) y[o] += number(matrix.bias, o);
    return y;
}

// Each of the vectors in `x` that are as wide as the norm is; without one, x as it is.
inline Doubles normed(Doubles x, const Tensor &norm, double epsilon) {
    const size_t width = (size_t)norm.cols;
    for (size_t begin = 0; norm.data && begin < x.size(); begin += width) {
        double squares = 0;
        for (size_t i = 0; i < width; i++) squares += x[begin + i] * x[begin + i];
        for (size_t i = 0; i < width; i++)
            x[begin + i] *= number(norm, i) / std::sqrt(squares / (double)width + epsilon);
    }
    return x;
}

// Each head, by the angles of its position: all its pairs, or the first few, or those of its first numbers. Frequencies
// are float32 numbers, as Transformers has them.
inline Doubles turned(Doubles x, const Kind &kind, int position) {
    const size_t width = (size_t)kind.key_width, rotary = (size_t)std::floor((double)width * kind.rope.rotary);
    const size_t half = rotary / 2;
    for (size_t i = 0; kind.rope_theta && i < std::floor((double)half * kind.rope.turned); i++) {
        float frequency = 1 / std::pow((float)kind.rope_theta, 2 * (float)i / (float)rotary);
        if (kind.rope.kind == RopeScaling::linear) frequency /= (float)kind.rope.factor;
        const double angle = position * (double)frequency;
        for (size_t head = 0; head < x.size(); head += width) {
            const double a = x[head + i], b = x[head + i + half];
            x[head + i] = a * std::cos(angle) - b * std::sin(angle);
            x[head + i + half] = b * std::cos(angle) + a * std::sin(angle);
        }
    }
    return x;
}

// Queries of long texts, where their model has them grow (Ministral 3), and by YaRN's factor, which keys have, too.
inline Doubles sharpened(Doubles query, const Kind &kind, int position) {
    const double context = std::max(1, kind.rope.original_context), factor = kind.rope.attention_factor;
    for (size_t i = 0; i < query.size(); i++) {
        query[i] *= 1 + kind.rope.query_growth * std::log(1 + std::floor(position / context));
        if ((double)(i % (size_t)kind.key_width) < std::floor(kind.key_width * kind.rope.rotary))
            query[i] *= factor * factor;
    }
    return query;
}

// Keys and values of a layer, (position): those of all its KV heads.
struct KeysAndValues {
    std::vector<Doubles> keys, values;
};

// What the query heads of position p bring home: softmax(scale * q k) v, over what its window shows.
inline Doubles attended(const Doubles &query, const KeysAndValues &past, int p, const Kind &kind, int heads,
                        double scale, const Tensor &sinks) {
    const int width = kind.key_width, first = kind.window ? std::max(0, p - kind.window + 1) : 0;
    Doubles out((size_t)(heads * width));
    for (int head = 0; head < heads; head++) {
        const int at = head / (heads / kind.kv_heads) * width;
        Doubles score;
        for (int t = first; t <= p; t++) {
            double sum = 0;
            for (int c = 0; c < width; c++) sum += query[head * width + c] * past.keys[t][at + c];
            score.push_back(sum * scale);
        }
        double most = *std::max_element(score.begin(), score.end()), total = 0;
        if (sinks.data) most = std::max(most, number(sinks, head)), total = std::exp(number(sinks, head) - most);
        for (double s : score) total += std::exp(s - most);
        for (int t = first; t <= p; t++)
            for (int c = 0; c < width; c++)
                out[head * width + c] += std::exp(score[t - first] - most) / total * past.values[t][at + c];
    }
    return out;
}

// What a convolution gives at position p: c times the sum of the last states, `past.keys`, each times its tap.
inline Doubles convolved(const Doubles &c, const KeysAndValues &past, int p, const LayerWeights &w) {
    const int taps = (int)w.taps.cols;
    Doubles out(c.size());
    for (size_t i = 0; i < out.size(); i++) {
        if (w.taps_bias.data) out[i] = number(w.taps_bias, i);
        for (int back = 0; back < std::min(taps, p + 1); back++)
            out[i] += number(w.taps, i * taps + taps - 1 - back) * past.keys[p - back][i];
        out[i] *= c[i];
    }
    return out;
}

inline double gate_of(double x, bool gelu) {
    if (gelu) return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    return x / (1 + std::exp(-x));
}

// The logits of each position of a text: (tokens, vocabulary). A layer without rows of its own reads those of the last
// layer of its kind that has some.
inline Doubles logits_of(const Model &model, const std::vector<int> &tokens) {
    const Config &config = model.config;
    const double epsilon = config.norm_epsilon;
    const size_t hidden = (size_t)config.hidden;
    std::vector<Doubles> x(tokens.size(), Doubles(hidden));
    for (size_t p = 0; p < tokens.size(); p++)
        for (size_t i = 0; i < hidden; i++)
            x[p][i] = number(model.embedding, tokens[p] * hidden + i) * config.embedding_scale;
    std::vector<KeysAndValues> newest(config.kinds.size());
    auto add = [&](Doubles &to, const Doubles &more) {
        for (size_t i = 0; i < hidden; i++) to[i] += more[i];
    };
    for (size_t layer = 0; layer < model.layers.size(); layer++) {
        const LayerWeights &w = model.layers[layer];
        const Kind &kind = config.kind((int)layer);
        KeysAndValues &past = newest[(size_t)config.rows[layer].kind];
        if (w.key.weight.data) past = {};
        for (int p = 0; p < (int)tokens.size(); p++) {
            const Doubles n = normed(x[p], w.attention_norm, epsilon);
            if (w.key.weight.data) {
                const Doubles key = normed(times(w.key, n), w.all_key_norm, epsilon);
                past.keys.push_back(turned(normed(key, w.key_norm, epsilon), kind, p));
                past.values.push_back(normed(times(w.value, n), w.value_norm, epsilon));
            }
            const double scale = config.score_scale ? config.score_scale : 1 / std::sqrt((double)kind.key_width);
            const Doubles all = normed(times(w.query, n), w.all_query_norm, epsilon);
            const Doubles query = sharpened(turned(normed(all, w.query_norm, epsilon), kind, p), kind, p);
            if (kind.taps)
                for (size_t i = 0; i < hidden; i++) past.keys[p][i] *= past.values[p][i];
            const Doubles out =
                kind.taps ? convolved(query, past, p, w) : attended(query, past, p, kind, config.heads, scale, w.sinks);
            add(x[p], normed(times(w.output, out), w.attention_out_norm, epsilon));
            const Doubles m = normed(x[p], w.mlp_norm, epsilon), up = times(w.up, m);
            Doubles gate = times(w.gate, m);
            for (size_t i = 0; i < gate.size(); i++) gate[i] = gate_of(gate[i], config.gelu) * up[i];
            add(x[p], normed(times(w.down, gate), w.mlp_out_norm, epsilon));
            for (double &number : x[p]) number *= w.scale;
            if (!w.per_layer.gate.weight.data) continue;
            Doubles token(hidden), wide = times(w.per_layer.gate, x[p]);
            for (size_t i = 0; i < hidden; i++)
                token[i] = number(model.embedding, tokens[p] * hidden + i) * config.embedding_scale / std::sqrt(hidden);
            const Doubles first = normed(times(w.per_layer.projection, token), model.layer_norm, epsilon);
            for (size_t i = 0; i < wide.size(); i++) {
                const size_t at = (tokens[p] * model.layers.size() + layer) * wide.size() + i;
                const double second = number(model.layer_embedding, at) * std::sqrt((double)wide.size() / 2);
                wide[i] = gate_of(wide[i], config.gelu) * (first[i] + second);
            }
            add(x[p], normed(times(w.per_layer.output, wide), w.per_layer.out_norm, epsilon));
            for (double &number : x[p]) number *= w.per_layer.scale;
        }
    }
    Doubles logits;
    for (const Doubles &one : x) {
        Doubles row = times({model.head, {}}, normed(one, model.final_norm, epsilon));
        for (double &logit : row)
            if (config.logit_cap) logit = config.logit_cap * std::tanh(logit / config.logit_cap);
        logits.insert(logits.end(), row.begin(), row.end());
    }
    return logits;
}

}  // namespace reference
