// Attention of many tokens on the GPU. Many queries read the same keys and values, so the speed of products counts.
// Scores and weights stay in registers (Dao 2023, FlashAttention-2, §3). A row is one query head at one token. A block
// of threads has some rows that read one KV head, and computes tile after tile of positions:
//   scores = Q K^T                      (row, tile), on tensor cores
//   weights = 2^(scores - max_score)    for positions that a row sees; its sums so far are rescaled (online softmax)
//   out += weights V                    (row, D), on tensor cores
// Queries, keys, values and weights are rounded to f16, within 2^-12, or with a bf16 cache to bf16, within 2^-9; sums
// are float32. With f32 weights plain::attention computes. Tiles begin at multiples of their length, so a row has the
// same bits in any chunk and any batch.
#pragma once

#include "decode.cu"

#ifdef HAS_CUDA
namespace fast {

constexpr int prefill_warps = 4, prefill_threads = prefill_warps * warp_size, tile = 64;  // positions

// Positions [low, end), which the copies hold from `at` on, beginning with the tile of `low`. Where a precision has
// blocks of 32, a query reads the blocks before its own as they are stored, and its own block at f16 (own).
struct Region {
    int low = 0, end = 0, at = 0;
    bool own = false, blocks = false;
    HOST_DEVICE int begin() const { return low / tile * tile; }
    HOST_DEVICE int length() const { return (end - begin() + tile - 1) / tile * tile; }  // in the copies
    // A query at `position` sees positions [from, to) of it.
    HOST_DEVICE int from(const Visible &visible, int position) const {
        return std::max(std::max(low, visible.first(position)), own ? position / group_size * group_size : 0);
    }
    HOST_DEVICE int to(int position) const {
        return std::min(end, blocks && !own ? position / group_size * group_size : position + 1);
    }
};

// The tokens of one sequence in a pass, of one layer.
template <class Number>
struct Chunk {
    Attention task;
    Span span;    // all of them
    Parts parts;  // if there are sinks: the results that are then merged with them
    const float *frequencies;
    int width, positions = 0;  // of the copies, with zeros for channels that a head does not have
    Region regions[2] = {};
    Number *keys = nullptr, *values = nullptr;  // (kv_head, position, width); (kv_head, width, position)
    HOST_DEVICE int rows() const { return span.count * task.heads.per_kv(); }
    HOST_DEVICE int position(int row) const { return span.position + row / task.heads.per_kv(); }
    // The index of a row among all query heads of the pass.
    HOST_DEVICE int64_t query_head(int kv_head, int row) const {
        int per_kv = task.heads.per_kv();
        return ((int64_t)span.row + row / per_kv) * task.heads.query + kv_head * per_kv + row % per_kv;
    }
};

// Copies the keys and values of a region as numbers, with zeros where there are none; values are transposed for the
// products. Why not in the kernel: each block would need more instructions for this than for the products.
template <class Number>
void copy_rows(Gpu &m, const Chunk<Number> &chunk, const Region &region) {
    constexpr int slice = 64, apart = 8;  // channels of an item; a lane takes every eighth
    const int slices = chunk.width / slice, blocks = region.length() / group_size;
    m.for_each((int64_t)2 * slices * chunk.task.heads.kv * blocks, [=] HOST_DEVICE(int64_t item, Warp team) {
        const bool is_key = item % 2;
        const int begin = (int)(item / 2 % slices) * slice, kv_head = (int)(item / 2 / slices / blocks);
        const int block = region.begin() + (int)(item / 2 / slices % blocks) * group_size, end = chunk.span.end;
        // The position of a query that reads these 32: the last one, or one in this block, or in the next.
        const int reader = std::min(region.blocks ? block + group_size - region.own : end, end - 1);
        const Span span = {
            chunk.span.row + reader - chunk.span.position, 1, chunk.span.sequence, reader, chunk.span.first, end};
        Segments seen;
        add_rows(seen, {chunk.task.cache, chunk.task.layer, kv_head, chunk.task.keys, chunk.task.values}, span, {});
        for (int i = team.first(); i < group_size * apart; i += team.step()) {
            const int t = block + (is_key ? i / apart : i % group_size), first = is_key ? i % apart : i / group_size;
            const bool there = region.low <= t && t < region.end;
            int64_t at = region.at + t - region.begin();
            const Segment *segment = seen.list;
            while (there && segment->end <= t) segment++;
            const Source &from = is_key ? segment->keys : segment->values;
            from.type.visit([&](auto format) {
                using Format = decltype(format);
                for (int c = begin + first; c < begin + slice; c += apart) {
                    Number number = {};
                    if (there && c < from.width)
                        from_float(number, is_key ? plain::key_number<Format>(*segment, t, c, chunk.frequencies,
                                                                              chunk.task.heads.rotary)
                                                  : Format::number(from.row(t), c));
                    if (is_key) chunk.keys[(kv_head * (int64_t)chunk.positions + at) * chunk.width + c] = number;
                    if (!is_key) chunk.values[(kv_head * (int64_t)chunk.width + c) * chunk.positions + at] = number;
                }
            });
        }
    });
}

// ---- The kernel --------------------------------------------------------------------------------------------
//
// A lane reads 16 bytes for two products: which column of a product (16, 16) is which channel or position is free, if
// both factors agree. Shared memory holds the matrices (rows, columns) of keys and values in pieces of 16 bytes. In odd
// rows pieces are shifted by four, so the eight lanes that read at a time, four pieces of two neighbouring rows, use
// all banks.
template <int columns>
HOST_DEVICE int place(int row, int piece) {
    return row * columns + (piece ^ row % 2 * 4) * 8;
}

template <int rows, int columns, class Number>
__device__ void ask_matrix(const Shared<Number> &to, const Number *from, int64_t pitch) {
    constexpr int pieces = columns / 8, step = prefill_threads / pieces;
    const int row = (int)threadIdx.x / pieces, piece = (int)threadIdx.x % pieces, at = place<columns>(row, piece);
    from += row * pitch + piece * 8;
    UNROLL for (int i = 0; i < rows; i += step, from += step * pitch) copy_async16(to, at + i * columns, from, 16);
}

// The position, within a tile, of column `column` of a product: in each 32, the lane with column c has positions
// 8 c + 2 j + i in columns 2 c + i of product j.
HOST_DEVICE inline int tile_position(int product, int column) {
    return product / 4 * 32 + column / 2 * 8 + product % 4 * 2 + column % 2;
}

// sums[m][j] += a[m] b^T for j and j + 1, where m counts 16 rows each; b: the lane's pieces for two products.
template <class Number, int tall, int count>
__device__ void multiply(float (&sums)[tall][count][4], int j, const uint32_t (&a)[tall][2][4], const uint4 (&b)[2]) {
    UNROLL for (int i = 0; i < 4 * tall; i++) {
        const uint4 &piece = b[i / tall % 2];
        const uint32_t two[2] = {i < 2 * tall ? piece.x : piece.z, i < 2 * tall ? piece.y : piece.w};
        multiply_matrices<Number>(sums[i % tall][j + i / tall % 2], a[i % tall][i / tall / 2], two);
    }
}

constexpr int tall_of(int width) { return width <= 128 ? 2 : 1; }  // a warp has tall * 16 rows
constexpr int rows_of(int width) { return prefill_warps * tall_of(width) * 16; }
constexpr int shared_numbers(int width) { return width * (rows_of(width) + 4 * tile); }

// One block for some rows of a KV head; those with the most positions come first. A lane has two of each 16 rows.
template <class Number, int width>
__global__ void __launch_bounds__(prefill_threads) prefill_kernel(Chunk<Number> chunk) {
    constexpr int tall = tall_of(width), lane_rows = 2 * tall, block_rows = rows_of(width), tile_numbers = tile * width;
    const Attention &task = chunk.task;
    auto queries = SharedMemory().take<Number>(shared_numbers(width)), tiles = queries.from(block_rows * width);
    wait_for_previous();
    let_next_start();
    int kv_head = blockIdx.y, first_row = (int)(gridDim.x - 1 - blockIdx.x) * block_rows;
    int count = min(block_rows, chunk.rows() - first_row), begin[2], counts[2];  // of tiles
    int first = chunk.position(first_row), last = chunk.position(first_row + count - 1);
    for (int i = 0; i < 2; i++) {
        begin[i] = chunk.regions[i].from(task.visible, first) / tile * tile;
        counts[i] = (max(0, chunk.regions[i].to(last) - begin[i]) + tile - 1) / tile;
    }
    auto begin_of = [&](int i) { return i < counts[0] ? begin[0] + i * tile : begin[1] + (i - counts[0]) * tile; };
    auto ask = [&](int i) {
        const Region &region = chunk.regions[i >= counts[0]];
        int64_t head = (int64_t)kv_head * chunk.positions * width, at = region.at + begin_of(i) - region.begin();
        auto to = tiles.from(i % 2 * 2 * tile_numbers);
        ask_matrix<tile, width, Number>(to, chunk.keys + head + at * width, width);
        ask_matrix<width, tile, Number>(to.from(tile_numbers), chunk.values + head + at, chunk.positions);
        commit_copies();
    };
    ask(0);
    for (int i = threadIdx.x; i < block_rows * width; i += prefill_threads) {  // in the order in which lanes read
        int lane = i / 8 % warp_size, row = i / 16 / width * 16 + i / 2 % 2 * 8 + lane / 4, D = task.heads.width;
        int c = i / 512 % (width / 32) * 32 + lane % 4 * 8 + i / 256 % 2 * 4 + i / 4 % 2 * 2 + i % 2;
        float x = row < count && c < D ? task.query[chunk.query_head(kv_head, first_row + row) * D + c] : 0;
        queries[i] = Number{(uint16_t)pack<Number>(x * (log2_e * task.scale), 0)};
    }
    float max_score[lane_rows], sum[lane_rows] = {}, values[tall][width / 8][4] = {};  // sum: of the lane's positions
    for (float &score : max_score) score = -FLT_MAX / 2;  // finite, as a row may see nothing of a tile
    auto row_of = [&](int r) { return warp_id() * tall * 16 + r * 8 + lane_row(); };
    for (int i = 0; i < counts[0] + counts[1]; i++) {
        wait_copies<0>();
        __syncthreads();
        if (i + 1 < counts[0] + counts[1]) ask(i + 1);
        if (warp_id() * tall * 16 >= count) continue;
        auto tile_keys = tiles.from(i % 2 * 2 * tile_numbers), tile_values = tile_keys.from(tile_numbers);
        uint32_t a[tall][2][4];
        uint4 b[2];
        float scores[tall][tile / 8][4] = {};
        UNROLL for (int c = 0; c < width / 8; c += 4) {
            UNROLL for (int k = 0; k < 2 * tall; k++) {
                int at = ((warp_id() * tall + k / 2) * width / 16 + c / 2 + k % 2) * warp_size + lane_id();
                auto piece = queries.template read<uint4>(at * 8);
                auto &to = a[k / 2][k % 2];
                to[0] = piece.x, to[1] = piece.y, to[2] = piece.z, to[3] = piece.w;
            }
            UNROLL for (int j = 0; j < tile / 8; j += 2) {
                UNROLL for (int k = 0; k < 2; k++) b[k] =
                    tile_keys.template read<uint4>(place<width>(tile_position(j + k, lane_row()), c + lane_column()));
                multiply<Number>(scores, j, a, b);
            }
        }
        auto score = [&](int r, int k) -> float & { return scores[r / 2][k / 2][r % 2 * 2 + k % 2]; };
        const Region &region = chunk.regions[i >= counts[0]];
        const int t = begin_of(i), all_from = region.from(task.visible, last), all_to = region.to(first);
        UNROLL for (int k = 0; (t < all_from || t + tile > all_to) && k < tile / 4 * lane_rows; k++) {
            int at = t + tile_position(k % (tile / 4) / 2, 2 * lane_column() + k % 2), r = k / (tile / 4);
            int position = chunk.position(first_row + min(row_of(r), count - 1));
            if (at < region.from(task.visible, position) || at >= region.to(position))
                score(r, k % (tile / 4)) = -INFINITY;
        }
        float before[lane_rows];  // loops go over all rows at once, so no instruction waits for the one before it
        UNROLL for (int r = 0; r < lane_rows; r++) before[r] = max_score[r];
        UNROLL for (int k = 0; k < tile / 4 * lane_rows; k++) max_score[k % lane_rows] =
            fmaxf(max_score[k % lane_rows], score(k % lane_rows, k / lane_rows));
        UNROLL for (int k = 0; k < 2 * lane_rows; k++) max_score[k % lane_rows] = fmaxf(
            max_score[k % lane_rows], __shfl_xor_sync(all_lanes, max_score[k % lane_rows], k < lane_rows ? 1 : 2));
        UNROLL for (int r = 0; r < lane_rows; r++) {
            float rescale = exp2_fast(before[r] - max_score[r]);
            sum[r] *= rescale;
            UNROLL for (int k = 0; k < width / 4; k++) values[r / 2][k / 2][r % 2 * 2 + k % 2] *= rescale;
        }
        UNROLL for (int k = 0; k < tile / 4 * lane_rows; k++) {
            float &weight = score(k % lane_rows, k / lane_rows);
            sum[k % lane_rows] += weight = exp2_fast(weight - max_score[k % lane_rows]);
        }
        UNROLL for (int t = 0; t < tile / 8; t += 4) {
            UNROLL for (int k = 0; k < 8 * tall; k++) {
                const float *two = &scores[k / 8][t + k % 8 / 2][k % 2 * 2];
                a[k / 8][k % 8 / 4][k % 4] = pack<Number>(two[0], two[1]);
            }
            UNROLL for (int j = 0; j < width / 8; j += 2) {
                UNROLL for (int k = 0; k < 2; k++) b[k] =
                    tile_values.template read<uint4>(place<tile>((j + k) * 8 + lane_row(), t + lane_column()));
                multiply<Number>(values, j, a, b);
            }
        }
    }
    UNROLL for (int r = 0; r < lane_rows; r++) {
        for (int step = 1; step <= 2; step++) sum[r] += __shfl_xor_sync(all_lanes, sum[r], step);
        if (row_of(r) >= count) continue;
        int64_t head = chunk.query_head(kv_head, first_row + row_of(r));
        const bool merged = chunk.parts.values;
        float *out = (merged ? chunk.parts.values : task.out) + head * task.values.width;
        UNROLL for (int k = 0; k < width / 4; k++) {
            int c = k / 2 * 8 + 2 * lane_column() + k % 2;
            float value = values[r / 2][k / 2][r % 2 * 2 + k % 2];
            if (c < task.values.width) out[c] = merged ? value : value * (1 / sum[r]);
        }
        if (merged && lane_column() == 0) chunk.parts.partials[head] = {max_score[r], sum[r]};
    }
}

// attention() of one sequence after the other. Heads that are too wide for the kernels go to plain::attention.
template <class Number, int width = 64>
void attend_all(Gpu &m, const Attention &task, const Pass &pass) {
    if (std::max(task.keys.width, task.values.width) > width) {
        if constexpr (width < 256) return attend_all<Number, 2 * width>(m, task, pass);
        return plain::attention(m, task, pass);
    }
    const CacheView &cache = task.cache;
    const bool sinks = task.visible.sinks || task.sinks.data;
    const bool blocks = cache.keys.data && (::has_blocks(cache.type_k) || ::has_blocks(cache.type_v));
    const Parts parts = sinks ? parts_of(m, task, pass.count, 1) : Parts{};
    for (const Span *at = pass.spans_on_host, *all = at + pass.count; at < all; at += at->end - at->first) {
        Chunk<Number> chunk = {task, *at, parts, pass.frequencies, width};
        const int first = task.visible.first(at->position), end = at->end, last_block = (end - 1) / group_size;
        chunk.span.count = end - at->first;
        chunk.regions[0] = {first, blocks ? std::max(first, last_block * group_size) : end, 0, false, blocks};
        chunk.positions = chunk.regions[0].length();
        const int own = std::max(first, at->position / group_size * group_size);
        if (blocks) chunk.regions[1] = {own, end, chunk.positions, true, true};
        chunk.positions += chunk.regions[1].length();
        auto &[keys, values] = m.kept<std::pair<Buffer<Number>, Buffer<Number>>>();
        for (Buffer<Number> *copy : {&keys, &values}) copy->resize(m, (size_t)task.heads.kv * chunk.positions * width);
        chunk.keys = keys.data(), chunk.values = values.data();
        for (const Region &region : chunk.regions) copy_rows(m, chunk, region);
        dim3 grid(blocks_for(chunk.rows(), rows_of(width)), task.heads.kv);
        m.launch({grid, prefill_threads, shared_size(shared_numbers(width) * sizeof(Number))},
                 prefill_kernel<Number, width>, chunk);
    }
    if (sinks) merge_parts<2 * columns>(m, task, pass, parts);
}

inline void attention(Gpu &m, const Attention &task, const Pass &pass) {
    const Between &between = m.kept<Between>();
    auto is_bf16 = [](auto format) { return std::is_same_v<decltype(format), BF16>; };
    if (between.decoding) plain::keep_residual(m, task, pass);  // the kernel reads the newest block from there
    if (between.decoding && decode_attention(m, task, pass)) return;
    if (between.decoding || between.products == DType::f32) return plain::attention(m, task, pass);
    if (task.cache.type_k.visit(is_bf16) || task.cache.type_v.visit(is_bf16)) return attend_all<bf16>(m, task, pass);
    attend_all<f16>(m, task, pass);
}

inline void keep_residual(Gpu &m, const Attention &task, const Pass &pass) {
    if (!m.kept<Between>().decoding) plain::keep_residual(m, task, pass);
}

}  // namespace fast
#endif
