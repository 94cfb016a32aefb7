// What the tests of layers of several kinds share: models, made up by hand or drawn, and what must be true of any
// cache.
#pragma once

#include "reference_model.h"
#include "scene.h"

using namespace scene;
using reference::Random;
using reference::relative_error;
using reference::same_bits;

#ifdef PLAIN
constexpr bool plain_path = true;
#else
constexpr bool plain_path = false;
#endif

// Of many cases the plain path, which takes ten times as long, has each fifth.
inline bool left_out() {
    static int turn = 0;
    return plain_path && turn++ % 5;
}

inline int below(Random &random, int end) { return (int)(random.bits() % (uint64_t)end); }
inline int one_of(Random &random, const std::vector<int> &list) { return list[below(random, (int)list.size())]; }

// Of the naive path and an f32 cache. The plain naive path is the equation, which has another order of sums.
inline bool agree(const Vector &naive, const Vector &cached) {
    return plain_path ? relative_error(cached, naive) <= 1e-5 : same_bits(naive, cached);
}

inline bool finite(const Vector &numbers) {
    return std::all_of(numbers.begin(), numbers.end(), [](float x) { return std::isfinite(x); });
}

// ---- Models ------------------------------------------------------------------------------------------------

// All that can be together: layers 0, 3 and 7 see all, 1, 2 and 4 look back 7 and 5 looks back 40; 2 reads what 1
// stored, 3 what 0 did; 6 and 8 are short convolutions.
inline Shape mixed_shape(int narrow = 7, int wide = 40) {
    Shape shape = {0, 16, 24, 4, 0, 0, 23};
    const Kind global = kind_of(1, 16, 0, 1e6), local = kind_of(2, 10, narrow), other = kind_of(4, 8, wide, 0);
    shape.list = {{global}, {local}, {local, false}, {global, false}, {local, true, true}, {other, true, true}};
    Layer biased = {convolution_of(4, 16)};
    biased.biased = true;
    shape.list.insert(shape.list.end(), {{convolution_of(3, 16)}, {global}, biased});
    return shape;
}

inline Shape random_shape(Random &random) {
    Shape shape = {0, 32, 48, 4, 0, 0, 29};
    auto coin = [&] { return below(random, 2) == 1; };
    std::vector<Kind> kinds(1 + below(random, 3));
    for (Kind &kind : kinds) {
        kind = kind_of(one_of(random, {1, 2, 4}), one_of(random, {8, 16, 20, 34}),
                       one_of(random, {0, 0, 1, 2, 7, 16, 31, 33, 40, 100}), one_of(random, {0, 100, 10000, 1000000}));
        if (coin()) kind.rope.kind = RopeScaling::linear, kind.rope.factor = 8;
        if (coin()) kind.rope.turned = 0.25;
        if (coin() && kind.key_width % 4 == 0) kind.rope.rotary = 0.5;
        if (coin()) kind.rope.attention_factor = 1.1;
        if (coin()) kind.rope.query_growth = 0.1, kind.rope.original_context = 10;
        if (&kind == &kinds[0] || coin()) continue;
        const Kind drawn = kind;  // alike but for one thing
        kind = kinds[0];
        const int what = below(random, 3);
        if (what == 0) kind.window = drawn.window;
        if (what == 1) kind.rope_theta = drawn.rope_theta;
        if (what == 2) kind.rope = drawn.rope;
        if (kind.key_width % 4) kind.rope.rotary = 1;  // pairs
    }
    for (Kind &kind : kinds)  // short convolutions are among the kinds of each second model
        if (below(random, 4) == 0) kind = convolution_of(one_of(random, {1, 2, 3, 3, 4, 7, 33}), shape.hidden);
    shape.qk_norm = coin(), shape.value_norm = coin(), shape.post_norms = coin(), shape.gelu = coin();
    for (const Kind &kind : kinds)  // a norm of what is small, a product of three numbers, would magnify rounding
        if (kind.taps) shape.post_norms = false;
    shape.all_norms = below(random, 4) == 0, shape.no_first_norms = shape.all_norms && shape.post_norms;
    if (below(random, 3) == 0) shape.per_layer = 16, shape.shared_ffn = 60;
    if (below(random, 3) == 0) shape.logit_cap = 3;
    std::vector<bool> begun(kinds.size());
    for (int layers = 2 + below(random, 5); layers > 0; layers--) {
        const int at = below(random, (int)kinds.size());
        const float scale = shape.post_norms ? (float)random.uniform(0.3, 1) : 1;
        const bool own = !begun[at] || kinds[at].taps || below(random, 3) > 0;
        shape.list.push_back({kinds[at], own, coin() && !kinds[at].taps, scale, coin()});
        begun[at] = true;
    }
    if (coin()) shape.score_scale = random.uniform(0.05, 0.25);
    if (coin()) shape.embedding_scale = std::sqrt(32.0);
    return shape;
}

inline Place random_place(Random &random, int tokens) {
    Place place = below(random, 3) ? paged(one_of(random, {1, 3, 7, 16, 32, 48, 200})) : Place{};
    if (below(random, 3) == 0) place = ring(tokens + below(random, 90), below(random, 5));
    place.all = below(random, 4) == 0;
    return place;
}

inline Sampler random_sampler(Random &random) {
    Sampler sampler;
    if (below(random, 3) == 0) return sampler;
    sampler.temperature = random.uniform(0.1, 2), sampler.seed = random.bits();
    if (below(random, 2)) sampler.top_k = 1 + below(random, 30);
    if (below(random, 2)) sampler.top_p = random.uniform(0.3, 1);
    if (below(random, 2)) sampler.min_p = random.uniform(0, 0.3);
    return sampler;
}

// ---- Caches ------------------------------------------------------------------------------------------------

inline void check_all_free(const Cache &cache) {
    for (const Store &store : cache.stores)
        if (store.pool) CHECK((store.pool->used() == 0 && store.pool->first[0] == 0));
}

// What is known of a cache's sequences and pages; of all, or of those that no window gives back.
inline Tokens tables_of(const Cache &cache, bool with_windows) {
    Tokens all = cache.lengths;
    for (const Store &store : cache.stores)
        if (store.pool && (with_windows || !store.pool->window))
            for (const Tokens *more : {&store.pool->table, &store.pool->free, &store.pool->first}) append(all, *more);
    return all;
}

// Of the rows of all stores: keys, values.
inline std::vector<std::string> stored_bytes(const Cache &cache) {
    std::vector<std::string> bytes;
    for (const Store &store : cache.stores)
        for (const CacheRows *rows : {&store.view.keys, &store.view.values})
            bytes.emplace_back(rows->data, rows->bytes(store.shape.layers));
    return bytes;
}

// Logits of each position, in passes of any length among other sequences, which get some tokens or none. engine(): who
// computes the next pass.
inline Vector among_others(const std::function<Engine &()> &engine, const Precision &type_k, const Precision &type_v,
                           const Place &place, const Tokens &tokens, Random &random, int sequences) {
    const int total = (int)tokens.size(), mine = below(random, sequences);
    const int most = below(random, 3) ? 1 + below(random, 64) : total;
    Cache cache = cache_for(engine(), type_k, type_v, total, place, sequences);
    Vector rows;
    for (int done = 0; done < total;) {
        Batch batch;
        int row = 0, count = std::min({total - done, chunk_of(cache), below(random, 3) ? 1 + below(random, most) : 1});
        const int begin = below(random, sequences), company = 1 + below(random, sequences);
        for (int i = 0; i < sequences; i++) {
            const int sequence = (begin + i) % sequences, rest = total - cache.lengths[sequence];
            const int more = sequence == mine ? count : i < company ? std::min(below(random, 4), rest) : 0;
            if (sequence == mine) row = batch.count();
            const int first = grow(cache, sequence, more);
            for (int t = first; t < first + more; t++)
                batch.add(tokens[sequence == mine ? t : below(random, total)], sequence, t);
        }
        check_pages(cache);
        Engine &who = engine();
        forward(who, batch, cache.stores);
        append(rows, logits(who, row, count));
        done += count;
    }
    return rows;
}
inline Vector among_others(Engine &engine, const Precision &type_k, const Precision &type_v, const Place &place,
                           const Tokens &tokens, Random &random) {
    return among_others([&]() -> Engine & { return engine; }, type_k, type_v, place, tokens, random, 3);
}

// In chunks of `chunk` by prefill(), then by decode().
inline Vector cached(Engine &engine, const Precision &type_k, const Precision &type_v, const Place &place,
                     const Tokens &tokens, int chunk, int decoded) {
    engine.chunk = chunk;
    Cache cache = cache_for(engine, type_k, type_v, (int)tokens.size(), place);
    Vector rows = cached_rows(engine, cache, 0, tokens, (int)tokens.size(), decoded);
    check_pages(cache);
    engine.chunk = 512;
    return rows;
}
