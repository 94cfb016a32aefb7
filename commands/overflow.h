// Where a logit is no number: a key or value may be more than its type holds, and then no weight is damaged. What it is
// is found when that has happened, so no step pays for it.
#pragma once

// Fails with the first key or value that is beyond its type, if there is one: the tokens that `cache` has read are read
// once more, into an f32 cache of the same layout. begin(exact), if there is one, stores what stood before them.
inline void blame_cache(Engine &engine, const Cache *cache, const std::vector<int> &tokens, const BeginCache &begin) {
    if (!cache) return;  // the naive path keeps nothing
    std::vector<CacheShape> shapes;
    for (const Store &store : cache->stores) shapes.push_back(store.shape);
    if (full_bytes(shapes, {cache->layout, F32{}, F32{}}).total() > engine.memory().room().bytes) return;
    Cache exact = open_cache(engine.memory(), shapes, cache->layout, F32{}, F32{});
    if (begin) begin(exact);
    const Config &config = engine.model.config;
    auto look = [&](const char *what, CacheRows CacheView::*side, const Precision &asked, int layer, int position) {
        const LayerRows &at = config.rows[layer];
        const Store &store = exact.stores[at.kind];
        const Precision type = precision_of(store.shape, asked);
        const CacheRows &rows = store.view.*side;
        std::vector<float> row((size_t)rows.kv_heads * rows.width);
        engine.memory().read(row.data(), rows.at(at.index, row_of(store, 0, position), 0), rows.stride());
        float most = 0, holds = largest_of(type);
        for (float x : row)
            if (std::fabs(x) <= FLT_MAX && std::fabs(x) > std::fabs(most)) most = x;
        if (std::fabs(most) > holds)
            fail("position %d: a %s of layer %d is %.6g, %s holds %.6g at most: choose --kv bf16, which holds it",
                 position, what, layer, most, name_of(type), holds);
    };
    prefill_pass(engine, exact, 0, tokens, [&](int count) {
        for (int layer = 0; layer < config.layers; layer++)
            for (int t = exact.lengths[0] - count; config.rows[layer].own && t < exact.lengths[0]; t++) {
                look("key", &CacheView::keys, cache->type_k, layer, t);
                look("value", &CacheView::values, cache->type_v, layer, t);
            }
    });
}
