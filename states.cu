// Layers without keys: what they need of the past has one size, however long the text is. forward() calls a function of
// this file in place of attention(). A short convolution (Liquid AI 2025, LFM2) projects x to b, c and v, as wide as x:
//
//   u_t = b_t v_t,   o_t = c_t (taps[0] u_(t - L + 1) + ... + taps[L - 1] u_t + bias)
//
// Each channel has its own taps; before position 0, u is 0. Only the last L vectors u are read. Each is stored like a
// key, in the row of its position, and the layer has a window of L. So sharing, rewinding and freeing pages work here,
// too.
#pragma once

#include "attention.cu"

namespace plain {

// Computes o (task.out) from c (task.query) and u (task.keys; on the cached path the rows of the store, at f32, so both
// paths have the same bits). Sums run from the first tap to the last, so they do not depend on the chunk.
template <class M>
void short_convolution(M &m, const Attention &task, const Pass &pass, const LayerWeights &w) {
    constexpr int piece = 256;  // channels of an item
    const int width = task.keys.width, pieces = (width + piece - 1) / piece, length = (int)w.taps.cols;
    const Tensor taps = w.taps, bias = w.taps_bias;
    m.for_each((int64_t)pass.count * pieces, [=] HOST_DEVICE(int64_t item, typename M::Team team) {
        const int row = (int)(item / pieces), begin = (int)(item % pieces) * piece;
        const int end = begin + piece < width ? begin + piece : width;
        const Span &span = pass.spans[row];
        const HeadRows head = {task.cache, task.layer, /*kv_head=*/0, task.keys, task.values};
        const Source states = task.cache.keys.data ? head.stored(task.cache.keys, task.cache.type_k, span.sequence)
                                                   : head.own(task.keys, span);
        const float *c = task.query + (int64_t)row * width;
        float *out = task.out + (int64_t)row * width;
        for (int i = begin + team.first(); i < end; i += team.step()) out[i] = 0;
        for (int j = 0; j < length; j++) {
            const int t = span.position - (length - 1) + j;
            if (t < 0) continue;
            const float *u = (const float *)states.row(t);
            for (int i = begin + team.first(); i < end; i += team.step())
                out[i] += number_of(taps, (int64_t)i * length + j) * u[i];
        }
        for (int i = begin + team.first(); i < end; i += team.step())
            out[i] = c[i] * (bias.data ? out[i] + number_of(bias, i) : out[i]);
    });
}

}  // namespace plain
