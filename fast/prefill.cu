// Attention of many tokens on the GPU: many queries read the same keys and values, so what counts is how fast they are
// multiplied. That is left to cuBLAS, a tile of positions after the other:
//   keys, values (kv_head, tile, D)     rows of the cache, dequantized to 16 bits
//   scores = Q K^T                      for all queries of a KV head, (kv_head, row, tile)
//   weights = 2^(scores - max_score)    of what a row sees; its sums so far are rescaled (online softmax)
//   out += weights V
// A row is one query head at one token. Queries, keys, values and weights are rounded to f16, within 2^-12 of
// themselves, or with a bf16 cache to bf16, within 2^-9; not if the model's weights are f32. Sums are float32.
#pragma once

#include "decode.cu"

#ifdef HAS_CUDA
namespace fast {

#ifdef CUDA_ON_CPU
constexpr int tile_positions = 128;
#else
constexpr int tile_positions = 1024;
#endif

// The tokens of one sequence in a pass, of one layer; and what is computed with, for all KV heads: 16-bit numbers, or
// float32, and float32.
template <class Number>
struct Chunk {
    Attention task;
    Span span;  // of all of them
    const float *frequencies;
    Number *queries = nullptr;                  // (kv_head, row, D)
    Number *keys = nullptr, *values = nullptr;  // (kv_head, tile, width)
    Number *weights = nullptr;                  // (kv_head, row, tile)
    float *scores = nullptr;                    // (kv_head, row, tile)
    float *out = nullptr;                       // (kv_head, row, value_width)
    plain::Softmax *softmax = nullptr;          // (kv_head, row); of exponents of 2
    HOST_DEVICE int rows() const { return span.count * task.heads.per_kv(); }
    HOST_DEVICE int position(int row) const { return span.position + row / task.heads.per_kv(); }
    // Of all query heads of the pass, the one of a row.
    HOST_DEVICE int64_t query_head(int kv_head, int row) const {
        int per_kv = task.heads.per_kv();
        return ((int64_t)span.row + row / per_kv) * task.heads.query + kv_head * per_kv + row % per_kv;
    }
    HOST_DEVICE HeadRows head_rows(int kv_head) const {
        return {task.cache, task.layer, kv_head, task.keys, task.values};
    }
    HOST_DEVICE Span token(int position) const {
        return {span.row + position - span.position, 1, span.sequence, position, span.first, span.end};
    }
    // Where a precision has blocks, a query reads those before its own as they are stored, and its own at f16.
    bool has_own() const {
        return task.cache.keys.data && (::has_blocks(task.cache.type_k) || ::has_blocks(task.cache.type_v));
    }
};

// Positions [begin, end) of all KV heads. own: a query sees those of its own block of 32; else those it sees as stored.
struct ChunkTile {
    int begin, end;
    bool own, blocks;
    HOST_DEVICE int count() const { return end - begin; }
    // What of it a query at `position` sees: [low, high) of its positions.
    HOST_DEVICE void find(const Visible &visible, int position, int &low, int &high) const {
        int block = position / group_size * group_size, first = visible.first(position), end = position + 1;
        if (blocks && own && first < block) first = block;
        if (blocks && !own && end > block) end = block;
        low = first > begin ? first - begin : 0, high = (end < this->end ? end : this->end) - begin;
    }
};

template <class Number>
struct ChunkMemory {
    Buffer<Number> queries, keys, values, weights;
    Buffer<float> scores, out;
    Buffer<plain::Softmax> softmax;
};

// The queries, times log2(e) and the scores' scale, and what each has of the sinks, in float32: few rows see one, none
// sees many, and each sees their keys rotated to another place.
template <class Number>
void begin_rows(Gpu &m, const Chunk<Number> &chunk) {
    int rows = chunk.rows(), width = chunk.task.keys.width, value_width = chunk.task.values.width;
    int per_kv = chunk.task.heads.per_kv();
    float factor = log2_e * chunk.task.scale;
    m.for_each((int64_t)chunk.task.heads.kv * rows, [=] HOST_DEVICE(int64_t item, Warp team) {
        int kv_head = (int)(item / rows), row = (int)(item % rows);
        const float *query = chunk.task.query + chunk.query_head(kv_head, row) * width;
        float *out = chunk.out + item * value_width;
        for (int c = team.first(); c < width; c += team.step())
            from_float(chunk.queries[item * width + c], query[c] * factor);
        for (int c = team.first(); c < value_width; c += team.step()) out[c] = 0;
        Segments sinks;
        plain::Softmax softmax = plain::Softmax::begin(chunk.task.sink(kv_head * per_kv + row % per_kv));
        add_sinks(sinks, chunk.head_rows(kv_head), chunk.token(chunk.position(row)), chunk.task.visible);
        if (sinks.count > 0)
            plain::attend_segment(softmax, out, query, sinks.list[0], chunk.task.scale, chunk.frequencies, team);
        if (team.first() == 0) chunk.softmax[item] = {softmax.max_score * log2_e, softmax.sum};
    });
}

// A tile's keys or values, as the queries that see them read them.
template <bool keys, class Number>
void read_tile(Gpu &m, const Chunk<Number> &chunk, const ChunkTile &tile) {
    int width = keys ? chunk.task.keys.width : chunk.task.values.width;
    m.for_each((int64_t)chunk.task.heads.kv * tile.count(), [=] HOST_DEVICE(int64_t item, Warp team) {
        int kv_head = (int)(item / tile.count()), t = tile.begin + (int)(item % tile.count());
        Number *row = (keys ? chunk.keys : chunk.values) + item * width;
        // A query of the same block, or of the next one.
        int reader = tile.own ? t : tile.blocks ? (t / group_size + 1) * group_size : chunk.span.end - 1;
        if (tile.own && reader < chunk.span.position) reader = chunk.span.position;
        Segments seen;
        add_rows(seen, chunk.head_rows(kv_head), chunk.token(reader), Visible{});
        int i = 0;
        while (i + 1 < seen.count && seen.list[i].end <= t) i++;
        const Segment &segment = seen.list[i];
        const Source &from = keys ? segment.keys : segment.values;
        from.type.visit([&](auto format) {
            using Format = decltype(format);
            for (int c = team.first(); c < width; c += team.step())
                from_float(row[c], keys ? plain::key_number<Format>(segment, t, c, chunk.frequencies)
                                        : Format::number(from.row(t), c));
        });
    });
}

// Scores become weights, what they do not see none; what rows have summed up so far is rescaled.
template <class Number>
void softmax_tile(Gpu &m, const Chunk<Number> &chunk, const ChunkTile &tile, int first_row) {
    int rows = chunk.rows(), width = chunk.task.values.width;
    m.for_each((int64_t)chunk.task.heads.kv * (rows - first_row), [=] HOST_DEVICE(int64_t item, Warp team) {
        int64_t head = item / (rows - first_row), row = head * rows + first_row + item % (rows - first_row);
        const float *scores = chunk.scores + row * tile_positions;
        Number *weights = chunk.weights + row * tile_positions;
        int low, high;
        tile.find(chunk.task.visible, chunk.position((int)(row % rows)), low, high);
        plain::Softmax before = chunk.softmax[row], after = before;
        for (int i = low + team.first(); i < high; i += team.step())
            after.max_score = fmaxf(after.max_score, scores[i]);
        after.max_score = team.largest(after.max_score);
        float sum = 0, rescale = before.max_score < after.max_score ? exp2f(before.max_score - after.max_score) : 1;
        for (int i = team.first(); i < tile.count(); i += team.step()) {
            float weight = low <= i && i < high ? exp2f(scores[i] - after.max_score) : 0;
            sum += weight;
            from_float(weights[i], weight);
        }
        after.sum = before.sum * rescale + team.sum(sum);
        for (int c = team.first(); rescale != 1 && c < width; c += team.step()) chunk.out[row * width + c] *= rescale;
        if (team.first() == 0) chunk.softmax[row] = after;
    });
}

template <class Number>
void add_tile(Gpu &m, const Chunk<Number> &chunk, const ChunkTile &tile) {
    int64_t rows = chunk.rows(), width = chunk.task.keys.width, value_width = chunk.task.values.width;
    int64_t heads = chunk.task.heads.kv, positions = tile.count();
    int64_t first = std::max(0, tile.begin - chunk.span.position) * chunk.task.heads.per_kv();  // that sees some of it
    const float one = 1, none = 0;
    constexpr auto type = blas_type<Number>;
    read_tile<true>(m, chunk, tile);
    read_tile<false>(m, chunk, tile);
    check(CUBLAS(cublasGemmStridedBatchedEx_64)(m.blas, CUBLAS_OP_T, CUBLAS_OP_N, positions, rows - first, width, &one,
                                                chunk.keys, type, width, positions * width,
                                                chunk.queries + first * width, type, width, rows * width, &none,
                                                chunk.scores + first * tile_positions, CUDA_R_32F, tile_positions,
                                                rows * tile_positions, heads, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "cublasGemmStridedBatchedEx_64");
    softmax_tile(m, chunk, tile, (int)first);
    check(CUBLAS(cublasGemmStridedBatchedEx_64)(
              m.blas, CUBLAS_OP_N, CUBLAS_OP_N, value_width, rows - first, positions, &one, chunk.values, type,
              value_width, positions * value_width, chunk.weights + first * tile_positions, type, tile_positions,
              rows * tile_positions, &one, chunk.out + first * value_width, CUDA_R_32F, value_width, rows * value_width,
              heads, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "cublasGemmStridedBatchedEx_64");
}

template <class Number>
void attend_chunk(Gpu &m, Chunk<Number> chunk) {
    ChunkMemory<Number> &memory = m.kept<ChunkMemory<Number>>();
    size_t heads = chunk.task.heads.kv, rows = chunk.rows(), width = chunk.task.values.width;
    auto room = [&](auto &buffer, auto *&data, size_t count) { buffer.resize(m, heads * count), data = buffer.data(); };
    room(memory.queries, chunk.queries, rows * chunk.task.keys.width);
    room(memory.keys, chunk.keys, tile_positions * chunk.task.keys.width);
    room(memory.values, chunk.values, tile_positions * width);
    room(memory.weights, chunk.weights, rows * tile_positions);
    room(memory.scores, chunk.scores, rows * tile_positions);
    room(memory.out, chunk.out, rows * width);
    room(memory.softmax, chunk.softmax, rows);
    begin_rows(m, chunk);
    int first = chunk.task.visible.first(chunk.span.position), end = chunk.span.position + chunk.span.count;
    // A row goes through its positions in the same tiles whatever rows are beside it.
    auto tiles = [&](int begin, int end, bool own, bool blocks) {
        for (int at = begin / tile_positions * tile_positions; begin < end && at < end; at += tile_positions)
            add_tile(m, chunk, {std::max(at, begin), std::min(at + tile_positions, end), own, blocks});
    };
    if (chunk.has_own()) {
        tiles(first, (end - 1) / group_size * group_size, false, true);
        tiles(std::max(first, chunk.span.position / group_size * group_size), end, true, true);
    } else {
        tiles(first, end, false, false);
    }
    m.for_each((int64_t)(heads * rows), [=] HOST_DEVICE(int64_t item, Warp team) {
        float *out = chunk.task.out + chunk.query_head((int)(item / rows), (int)(item % rows)) * width;
        for (int c = team.first(); c < (int)width; c += team.step())
            out[c] = chunk.out[item * width + c] / chunk.softmax[item].sum;
    });
}

inline void attention(Gpu &m, const Attention &task, const Pass &pass) {
    const Between &between = m.kept<Between>();
    if (between.decoding) {  // the newest block is read where later passes read it
        plain::keep_residual(m, task, pass);
        if (!decode_attention(m, task, pass)) plain::attention(m, task, pass);
        return;
    }
    auto is_bf16 = [](auto format) { return std::is_same_v<decltype(format), BF16>; };
    bool wide = task.cache.type_k.visit(is_bf16) || task.cache.type_v.visit(is_bf16);
    for (const Span *at = pass.spans_on_host, *end = at + pass.count; at < end;) {
        Span span = *at;
        span.count = at->end - at->first;
        at += span.count;
        auto attend = [&](auto number) { attend_chunk(m, Chunk<decltype(number)>{task, span, pass.frequencies}); };
        if (between.products == DType::f32)
            attend(float());
        else if (wide)
            attend(bf16());
        else
            attend(f16());
    }
}

inline void keep_residual(Gpu &m, const Attention &task, const Pass &pass) {
    if (!m.kept<Between>().decoding) plain::keep_residual(m, task, pass);
}

}  // namespace fast
#endif
