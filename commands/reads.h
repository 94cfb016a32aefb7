// The bytes that a decoding step reads: of the weights, and of a cache.
#pragma once

#include "open.h"

// Bytes of weights that a decoding step reads: all but embedding tables that are not the head, of which it reads a row.
inline double weights_read(const Model &model) {
    const Tensor &table = model.embedding;
    const double tables = (model.head.data != table.data ? (double)stored_bytes(table) : 0);
    return (double)model.weight_bytes - tables - (double)stored_bytes(model.layer_embedding);
}

// Bytes that a decoding step reads of one layer and sequence of a cache of `positions`: the rows it sees, the newest
// block of int4 and int2 at f16, a ring's sinks at f32. The layer looks back `window` positions; 0: to the first.
inline double layer_read(const CacheShape &shape, const CacheChoice &opened, int window, int positions) {
    const Visible visible = visible_of(opened.layout, window);
    const int last = positions - 1, first = visible.first(last), block = last / group_size * group_size;
    auto bytes = [&](const Precision &type, int width) {
        int stored = has_blocks(type) ? std::max(first, block) : positions;
        double rows = (double)(stored - first) * (double)row_bytes(type, width);
        double others = (double)(positions - stored) * sizeof(f16);
        if (visible.dropped(last)) others += (double)visible.sinks * sizeof(float);
        return width ? rows + width * others : 0;  // MLA: a value is a part of its key
    };
    return shape.kv_heads * (bytes(precision_of(shape, opened.type_k), shape.key_width) +
                             bytes(precision_of(shape, opened.type_v), shape.value_width));
}

inline double cache_read(const Model &model, const Cache &cache, int positions) {
    double bytes = 0;
    for (const LayerRows &rows : model.config.rows) {
        const Store &store = cache.stores[rows.kind];
        bytes += layer_read(store.shape, {store.layout, cache.type_k, cache.type_v},
                            model.config.kinds[rows.kind].window, positions);
    }
    return bytes;
}
