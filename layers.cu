// The layers around attention: embedding, RMSNorm, matrix products, rotary positions, SwiGLU.
//
// Each function is called by all threads of one parallel region and does its thread's share; it returns
// without waiting, unless it says so. barrier() stands where what follows needs what the others did.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <climits>
#include <vector>

#include "device.h"
#include "model.h"
#include "numbers.h"

constexpr int streams = 4;  // in which a thread reads weights for one token

// What a thread asks for while it waits: the beginning of its streams of the matrix that comes next, for the L2.
// Predicted: of the 3 % of a token that threads wait for each other, half. Measured, 2 threads of an Emerald Rapids,
// SmolLM2-135M's shape in bf16, short context: 1.02 x. Of a Zen 3, whose threads wait 10 % of the time: bf16 1.01 to
// 1.03 x, int8 1.01 to 1.02 x; 8 or 32 KiB of a stream are as good as 16.
class NextWeights {
public:
    NextWeights() = default;
    NextWeights(const char *start, size_t apart) : start(start), apart(apart), count(std::min(most, apart)) {}
    bool ask() {  // for a line of each; false: for all
        if (asked >= count) return false;
        for (int i = 0; i < streams; i++) __builtin_prefetch(start + i * apart + asked, 0, 2);
        asked += cache_line;
        return true;
    }

private:
    static constexpr size_t most = 16384;  // bytes of a stream
    const char *start = nullptr;
    size_t apart = 0, asked = 0, count = 0;
};
inline thread_local NextWeights next_weights;

// Waits until the whole team is here. OpenMP's own barrier may spin for 10 ms; the ten waits of a layer are of
// microseconds. This one spins for a millisecond, about, and then sleeps: on a busy machine, whoever slept gets a core
// at once when it is woken, but whoever spun or yielded waits for its turn among the other programs, some milliseconds
// at each barrier. There is one team at a time.
inline void barrier() {
#ifdef _OPENMP
    static std::atomic<unsigned> arrived{0}, round{0}, sleeping{0};
    static const int cores = omp_get_num_procs();
    static_assert(sizeof round == sizeof(unsigned), "the kernel looks at the number itself");
    int team = omp_get_num_threads();
    unsigned mine = round.load();
    if (arrived.fetch_add(1) + 1 == (unsigned)team) {
        arrived.store(0);
        round.store(mine + 1);
        if (sleeping.load() > 0) syscall(SYS_futex, &round, FUTEX_WAKE_PRIVATE, INT_MAX);
        return;
    }
    const int spins = team <= cores ? 60000 : 0;  // with more threads than cores, somebody waits for this very core
    for (int spin = 0; spin < spins && round.load(std::memory_order_acquire) == mine; spin++)
        if (!next_weights.ask()) pause_briefly();
    if (round.load() != mine) return;
    sleeping.fetch_add(1);
    while (round.load() == mine) syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, mine, nullptr);
    sleeping.fetch_sub(1);
#endif
}

inline int team_size() {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

// Calls use(p) with a tensor's numbers as a file stores them: `const float *`, `const f16 *` or `const bf16 *`.
template <class Use>
void with_numbers(const Tensor &tensor, Use use) {
    switch (tensor.type) {
        case DType::f32:
            return use((const float *)tensor.data);
        case DType::f16:
            return use((const f16 *)tensor.data);
        case DType::bf16:
            return use((const bf16 *)tensor.data);
        case DType::int8:
            fail("int8 weights where only numbers as a file stores them are read");
    }
}

// The next layer's input: row t is the embedding of tokens[t].
inline void embed(float *x,                 // (tokens, hidden)
                  const Tensor &embedding,  // (vocabulary, hidden)
                  const int *tokens, int count) {
    int hidden = (int)embedding.cols;
    with_numbers(embedding, [&](auto *table) {
#pragma omp for schedule(static) nowait
        for (int t = 0; t < count; t++)
            for (int i = 0; i < hidden; i++)
                x[(size_t)t * hidden + i] = to_float(table[(size_t)tokens[t] * hidden + i]);
    });
}

#ifdef HAS_CUDA
constexpr int block_threads = 256;

HOST_DEVICE inline int blocks_for(int64_t items, int each) { return (int)((items + each - 1) / each); }

template <class Number>
__global__ void embed_kernel(float *x, const Number *table, const int *tokens, int count, int hidden) {
    wait_for_previous();
    let_next_start();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (int64_t)count * hidden) x[i] = to_float(table[(size_t)tokens[i / hidden] * hidden + i % hidden]);
}

inline void embed(const Device &device, float *x, const Tensor &embedding, const int *tokens, int count) {
    int hidden = (int)embedding.cols;
    Grid grid = {dim3(blocks_for((int64_t)count * hidden, block_threads)), block_threads};
    with_numbers(embedding, [&](auto *table) {
        launch(device, grid, embed_kernel<std::decay_t<decltype(*table)>>, x, table, tokens, count, hidden);
    });
}
#endif

// out = x / sqrt(mean(x^2) + epsilon) * weight, for each of `count` vectors of weight.cols numbers; `out` may be `x`
// (Zhang and Sennrich 2019).
inline void rms_norm(float *out, const float *x, const Tensor &weight, int64_t count, double epsilon) {
    int width = (int)weight.cols;
    with_numbers(weight, [&](auto *gain) {
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < count; t++) {
            const float *in = x + t * width;
            float factor = 1 / std::sqrt(dot(in, in, width) / width + (float)epsilon);
            for (int i = 0; i < width; i++) out[t * width + i] = in[i] * factor * to_float(gain[i]);
        }
    });
}

#ifdef HAS_CUDA
// The sum over a block's threads, of which there are block_threads, in all of them. Once in a kernel: nobody waits
// until all have read it.
__device__ inline float block_sum(float x) {
    STATIC_SHARED(float, room, block_threads / warp_size);
    x = warp_sum(x);
    if (lane_id() == 0) room[warp_id()] = x;
    __syncthreads();
    float total = 0;
    for (int i = 0; i < block_threads / warp_size; i++) total += room[i];
    return total;
}

// x as products read it: a block for each vector. Every sum of a block may differ from the CPU's by its order: each
// number is within (width / 256 + 16) 2^-24 of it, relative to itself, before it is rounded to Number.
template <class Number, class Gain>
__global__ void rms_norm_kernel(Number *out, const float *x, const Gain *gain, int width, float epsilon) {
    wait_for_previous();
    let_next_start();
    x += (size_t)blockIdx.x * width;
    out += (size_t)blockIdx.x * width;
    float squares = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) squares += x[i] * x[i];
    float factor = 1 / sqrtf(block_sum(squares) / width + epsilon);
    for (int i = threadIdx.x; i < width; i += blockDim.x) from_float(out[i], x[i] * factor * to_float(gain[i]));
}

template <class Number>
void rms_norm(const Device &device, Number *out, const float *x, const Tensor &weight, int64_t count, double epsilon) {
    Grid grid = {dim3((unsigned)count), block_threads};
    with_numbers(weight, [&](auto *gain) {
        launch(device, grid, rms_norm_kernel<Number, std::decay_t<decltype(*gain)>>, out, x, gain, (int)weight.cols,
               (float)epsilon);
    });
}
#endif

// ---- Matrix products ---------------------------------------------------------------------------------------

// Rows of stored numbers, `stride` bytes apart. `Format` decodes a Vec of them at a time: PlainRow<bf16>, ...
// `ahead` is what will be read from memory after them, or nullptr: while row r is computed with, the `ahead_stride`
// bytes at ahead + r * ahead_stride are asked for.
template <class RowFormat>
struct StoredRows {
    using Format = RowFormat;
    const char *start;
    size_t stride;
    const char *ahead = nullptr;
    size_t ahead_stride = 0;
    const char *row(int r) const { return start + r * stride; }
    Vec load(int r, int i) const { return Format::decode(row(r), i); }
    Vec load_part(int r, int i, int count) const { return Format::decode_part(row(r), i, count); }
    // Asked for with line `line` of row r of a tile: line after line, as the tile's rows lie in memory.
    template <int Rows>
    void ask(int r, int line) const {
        if (ahead) __builtin_prefetch(ahead + (line * Rows + r) * cache_line);
    }
    StoredRows from(int64_t row) const {
        return {start + row * stride, stride, ahead ? ahead + row * ahead_stride : nullptr, ahead_stride};
    }
};

// The same, of which each is the current one of a stream. Where the processor's prefetcher is better off unasked
// (stream_ahead), rows in pairs are asked for all the same: widened, a line is a dozen instructions, and few lines of
// them are begun before the first is there. Predicted: these products, at 0.92 of plain reading, at 0.96. Measured,
// 2 threads of a Zen 3: that; decoding in bf16 1.03 x, a model of 1.1 billion 1.05 x; f32, asked for, slower.
constexpr int pairs_ahead = 384;  // bytes
template <class Format>
struct StreamRows : StoredRows<Format> {
    template <int Rows>
    void ask(int r, int line) const {
        const char *p = this->row(r) + line * cache_line;
        if (stream_ahead || vecs_together<Format> == 1)
            ask_stream_twice(p);
        else
            __builtin_prefetch(p + pairs_ahead);
    }
};

// Calls use(size, first) for batches of `Most`, and once for what is left; size is a std::integral_constant.
template <int Most, class Use>
inline void in_batches(int count, Use use, int first = 0) {
    for (; count - first >= Most; first += Most) use(std::integral_constant<int, Most>{}, first);
    if constexpr (Most > 1) in_batches<Most - 1>(count, use, first);
}

// The tile of results that stays in registers: with 32 of them, 4 x 6 sums, 4 rows and a vector are 29; with 16, 4 x 3
// sums and a row are 13.
constexpr int tile_rows = 4;
constexpr int tile_vectors = lanes == 8 ? 3 : 6;  // AVX2 has 16

// Rows that follow one another come straight from memory, and are asked for so far ahead, in the order of memory: of
// short rows the processor's own prefetcher sees the end too soon.
constexpr int bytes_ahead = 4096;

// to[i] = the sum of the lanes of at(i), i < count.
template <int count, class At>
inline void fold_sums(float *to, At at) {
    constexpr int fours = count / 4 * 4;
    for (int i = 0; i < fours; i += 4) sum4(to + i, at(i), at(i + 1), at(i + 2), at(i + 3));
    for (int i = fours; i < count; i++) to[i] = (float)sum(at(i));
}

// out[v * out_stride + r * row_stride] = row r . vector v for Rows x Vectors of them; each row and each vector is read
// once, and the sum of each result is the one of dot(), whatever the tile. `width` is an int or a constant.
template <int Rows, int Vectors, class TileRows, class Width>
inline void dot_tile(float *out, size_t out_stride, TileRows rows, const float *const *vectors, Width width,
                     size_t row_stride = 1) {
    using Format = typename TileRows::Format;
    Vec sums[Vectors][Rows];
    for (int v = 0; v < Vectors; v++)
        for (int r = 0; r < Rows; r++) sums[v][r] = set(0);
    constexpr int together = vecs_together<Format>;
    auto add_products = [&](int i) {
        Vec vector[Vectors][together], row[together];
        for (int v = 0; v < Vectors; v++)
            for (int k = 0; k < together; k++) vector[v][k] = load(vectors[v] + i + k * lanes);
        for (int r = 0; r < Rows; r++) {
            decode<Format>(row, rows.row(r), i);
            for (int k = 0; k < together; k++)
                for (int v = 0; v < Vectors; v++) sums[v][r] = fma(row[k], vector[v][k], sums[v][r]);
        }
    };
    const int whole = width / lanes * lanes, lines = width / Format::line_numbers;
    int i = 0;
    for (int line = 0; line < lines; line++) {
        for (int r = 0; r < Rows; r++) rows.template ask<Rows>(r, line);
        for (int part = 0; part < Format::line_numbers; part += together * lanes, i += together * lanes)
            add_products(i);
    }
    for (; i < whole; i += together * lanes) add_products(i);
    float finished[Vectors * Rows];
    fold_sums<Vectors * Rows>(finished, [&](int i) { return sums[i / Rows][i % Rows]; });
    for (int i = 0; whole < width && i < Vectors * Rows; i++) {
        Vec row = rows.load_part(i % Rows, whole, width - whole);
        finished[i] += sum(mul(row, load_part(vectors[i / Rows] + whole, width - whole)));
    }
    for (int v = 0; v < Vectors; v++)
        for (int r = 0; r < Rows; r++) out[v * out_stride + r * row_stride] = finished[v * Rows + r];
}

// All rows with `Vectors` vectors, in tiles.
template <int Vectors, class Format>
inline void dots_with(float *out, size_t out_stride, StoredRows<Format> rows, int row_count,
                      const float *const *vectors, int width) {
    int r = 0;
    for (; r + tile_rows <= row_count; r += tile_rows)
        dot_tile<tile_rows, Vectors>(out + r, out_stride, rows.from(r), vectors, width);
    for (; r < row_count; r++) dot_tile<1, Vectors>(out + r, out_stride, rows.from(r), vectors, width);
}

// Several vectors: here it is the call of dot_tile() that costs (attention with int8: 10 %), so it is inlined. With
// one, in decoding, inlining it costs: weights came at 60 % of the bandwidth instead of 83.
template <int Vectors, class Format>
__attribute__((flatten)) void dots_with_several(float *out, size_t out_stride, StoredRows<Format> rows, int row_count,
                                                const float *const *vectors, int width) {
    dots_with<Vectors>(out, out_stride, rows, row_count, vectors, width);
}

// All rows with any number of vectors.
template <class Format>
inline void dots(float *out, size_t out_stride, StoredRows<Format> rows, int row_count, const float *const *vectors,
                 int vector_count, int width) {
    in_batches<tile_vectors>(vector_count, [&](auto size, int v) {
        if constexpr (size == 1)
            dots_with<size>(out + v * out_stride, out_stride, rows, row_count, vectors + v, width);
        else
            dots_with_several<size>(out + v * out_stride, out_stride, rows, row_count, vectors + v, width);
    });
}

// ---- Int8 weights ----
//
// --weights int8: each 32 neighbours of a row become whole numbers, at most 127, times a scale of their own, and so
// does what they are multiplied with, for each token anew. Their products are then exact and four of them take an
// instruction or two, where the machine has them for bytes; a weight takes 1.0625 bytes from memory.
constexpr int int8_group = 32;

// 32 channels of `lanes` rows. Four channels of all rows stand together, so that each lane of a Vec sums up a row of
// its own and no sum has to be folded; and a thread reads its rows from memory from first to last.
struct Int8Block {
    f16 scale[lanes];
    int8_t weight[int8_group / 4][lanes][4];
};

struct Int8Group {  // of a vector
    float scale;
    Int8x4 four[int8_group / 4];
};

inline int64_t int8_groups(int64_t inputs) { return (inputs + int8_group - 1) / int8_group; }
inline int64_t int8_panels(int64_t outputs) { return (outputs + lanes - 1) / lanes; }
inline size_t int8_bytes(const Tensor &weight) {
    return (size_t)(int8_panels(weight.rows) * int8_groups(weight.cols)) * sizeof(Int8Block);
}

// The largest magnitude of a group; NaN if one of its numbers is infinite or NaN.
inline float largest_magnitude(const float *group) {
    Vec most = set(0), nan = set(0);
    for (int i = 0; i < int8_group; i += lanes) {
        Vec part = load(group + i);
        most = max(magnitude(part), most);
        nan = fma(part, set(0), nan);
    }
    return largest(most) + sum(nan);
}

// The whole numbers next to those of a group over its scale; zeros if that is 0 or NaN. A scale below the normal
// numbers is so coarse that a quotient may pass 127.
inline void round_group(int8_t *to, const float *group, float scale) {
    alignas(cache_line) float whole[int8_group];
    for (int i = 0; i < int8_group; i += lanes)
        store(whole + i, scale > 0 ? round(div(load(group + i), set(scale))) : set(0));
    for (int i = 0; i < int8_group; i++) to[i] = (int8_t)std::clamp((int)whole[i], -127, 127);
}

// Writes the int8 numbers of a matrix, zeros beyond its last row and channel. False if a weight is not a number or is
// too large for the scales (8.3e6). Threads share the rows; it returns without waiting.
inline bool quantize(Int8Block *blocks, const Tensor &weight) {
    int64_t groups = int8_groups(weight.cols), panels = int8_panels(weight.rows);
    bool good = true;
    with_numbers(weight, [&](auto *numbers) {
#pragma omp for schedule(static) nowait
        for (int64_t panel = 0; panel < panels; panel++) {
            memset(blocks + panel * groups, 0, (size_t)groups * sizeof(Int8Block));
            for (int64_t item = 0; item < groups * std::min<int64_t>(lanes, weight.rows - panel * lanes); item++) {
                int64_t group = item % groups, row = item / groups;
                int count = (int)std::min<int64_t>(int8_group, weight.cols - group * int8_group);
                auto *from = numbers + (panel * lanes + row) * weight.cols + group * int8_group;
                float padded[int8_group] = {};
                int8_t rounded[int8_group];
                for (int i = 0; i < count; i++) padded[i] = to_float(from[i]);
                Int8Block &block = blocks[panel * groups + group];
                block.scale[row] = f16_above(largest_magnitude(padded) / 127);
                good = good && to_float(block.scale[row]) <= 65504;
                round_group(rounded, padded, to_float(block.scale[row]));
                for (int step = 0; step < int8_group / 4; step++)
                    memcpy(block.weight[step][row], rounded + 4 * step, 4);
            }
        }
    });
    return good;
}

// The int8 numbers of up to 32 numbers, zeros behind them. If one is infinite or NaN, the scale is NaN.
inline void quantize(Int8Group &group, const float *x, int count) {
    float padded[int8_group] = {};
    int8_t rounded[int8_group];
    uint8_t magnitude[int8_group];
    memcpy(padded, x, (size_t)count * sizeof(float));
    group.scale = largest_magnitude(padded) / 127;
    round_group(rounded, padded, group.scale);
    for (int i = 0; i < int8_group; i++) magnitude[i] = (uint8_t)std::abs(rounded[i]);
    for (int i = 0; i < int8_group; i += 4) {
        memcpy(group.four[i / 4].number, rounded + i, 4);
        memcpy(group.four[i / 4].magnitude, magnitude + i, 4);
    }
}

// Row `row` of a matrix times x, one number after the other.
inline float int8_dot(const Int8Block *blocks, int row, const float *x, int inputs) {
    int groups = (int)int8_groups(inputs);
    Vec total = set(0);
    for (int g = 0; g < groups; g++) {
        Int8Group numbers;
        quantize(numbers, x + g * int8_group, std::min(int8_group, inputs - g * int8_group));
        const Int8Block &block = blocks[(size_t)(row / lanes) * groups + g];
        int products = 0;
        for (int i = 0; i < int8_group; i++)
            products += block.weight[i / 4][row % lanes][i % 4] * numbers.four[i / 4].number[i % 4];
        total = fma(set((float)products), mul(set(to_float(block.scale[row % lanes])), set(numbers.scale)), total);
    }
    return largest(total);
}

// What the `lanes` rows of each panel give with each vector, vectors `stride` groups apart: out (Vectors, out_stride),
// with the panels `panel_stride` apart there, and `apart` blocks in memory.
template <int Panels, int Vectors>
inline void int8_tile(float *out, size_t out_stride, size_t panel_stride, const Int8Block *blocks, size_t apart,
                      const Int8Group *x, size_t stride, int64_t groups) {
    Vec totals[Panels][Vectors];
    for (int i = 0; i < Panels * Vectors; i++) totals[i / Vectors][i % Vectors] = set(0);
    for (int64_t g = 0; g < groups; g++) {
        Ints sums[Panels][Vectors] = {};
        for (int step = 0; step < int8_group / 4; step++) {
            for (int p = 0; p < Panels; p++) {
                const auto *weights = blocks[p * apart + g].weight[step];
                if (Panels > 1) ask_stream_twice(weights);
                for (int v = 0; v < Vectors; v++)
                    sums[p][v] = add_products(sums[p][v], weights, x[v * stride + g].four[step]);
            }
        }
        for (int p = 0; p < Panels; p++)
            for (int v = 0; v < Vectors; v++)
                totals[p][v] = fma(to_floats(sums[p][v]),
                                   mul(load(blocks[p * apart + g].scale), set(x[v * stride + g].scale)), totals[p][v]);
    }
    for (int p = 0; p < Panels; p++)
        for (int v = 0; v < Vectors; v++) store(out + p * panel_stride + v * out_stride, totals[p][v]);
}

enum class Store { set, add };  // y = W x, or y += W x (a residual connection)

// y[t] (+)= weight x[t] + bias, for each of `count` tokens.
//
// The plain rung: one dot() a number.
inline void linear_plain(float *y, const float *x, const Linear &linear, int count, Store store = Store::set) {
    int outputs = (int)linear.weight.rows, inputs = (int)linear.weight.cols;
    for (int t = 0; t < count; t++) {
        for (int o = 0; o < outputs; o++) {
            float result = 0;
            if (linear.weight.type == DType::int8)
                result = int8_dot((const Int8Block *)linear.weight.data, o, x + (size_t)t * inputs, inputs);
            else
                with_numbers(linear.weight, [&](auto *weight) {
                    result = dot(weight + (size_t)o * inputs, x + (size_t)t * inputs, inputs);
                });
            if (linear.bias.data) with_numbers(linear.bias, [&](auto *bias) { result += to_float(bias[o]); });
            float &to = y[(size_t)t * outputs + o];
            to = store == Store::add ? to + result : result;
        }
    }
}

// Writes a finished block of results, out (count, stride) -> y (count, outputs), `block` columns from `first` on.
inline void store_block(float *y, const float *out, int stride, const Linear &linear, int count, int first, int block,
                        Store store) {
    int outputs = (int)linear.weight.rows;
    for (int t = 0; t < count; t++) {
        float *to = y + (size_t)t * outputs + first;
        const float *from = out + (size_t)t * stride;
        if (linear.bias.data) {
            with_numbers(linear.bias, [&](auto *bias) {
                for (int o = 0; o < block; o++) {
                    float result = from[o] + to_float(bias[first + o]);
                    to[o] = store == Store::add ? to[o] + result : result;
                }
            });
        } else {
            for (int o = 0; o < block; o++) to[o] = store == Store::add ? to[o] + from[o] : from[o];
        }
    }
}

// With registers of 16 tokens' sums of 2 Vecs of rows: 12 tokens where there are 32 registers, 6 where there are 16.
constexpr int panel_rows = 2 * lanes, panel_tokens = lanes == 8 ? 6 : 12;

// What linear() reads: vectors; for int8 weights their int8 numbers; and in a pass over many tokens the vectors in
// tiles, or their parts for matrix tiles, where the machine has them.
struct Inputs {
    const float *x;  // (count, inputs)
    int count;
    const Int8Group *int8 = nullptr;  // (count, groups)
    const float *tiles = nullptr;     // (count / panel_tokens, inputs, panel_tokens)
    const bf16 *in_parts = nullptr;   // (bf16_parts, padded_count, inputs)
};

struct InputBuffers {
    Aligned<Int8Group> int8;
    Floats tiles;
    Aligned<bf16> parts;
    void resize(int count, int widest);
};

inline int padded_count(int count, int side = amx_side) { return (count + side - 1) / side * side; }

// tile (width, panel_tokens) = `count` vectors, zeros behind them. vector(t) is where vector t begins.
template <class VectorAt>
inline void fill_tile(float *tile, int count, int width, VectorAt vector) {
    for (int i = 0; i < width; i++)
        for (int t = 0; t < panel_tokens; t++) tile[(size_t)i * panel_tokens + t] = t < count ? vector(t)[i] : 0;
}

// Room for `count` vectors of `widest` numbers at most.
inline void InputBuffers::resize(int count, int widest) {
    if (amx_allowed()) parts.resize(bf16_parts * (size_t)padded_count(count) * widest);
    tiles.resize((size_t)padded_count(count, panel_tokens) * widest);
    int8.resize((size_t)count * int8_groups(widest));
}

// Whether the machine multiplies such a matrix by tiles of its own.
inline bool has_matrix_tiles(const Tensor &weight) {
    return weight.type == DType::bf16 && amx_allowed() && weight.rows % amx_side == 0 && weight.cols % amx_depth == 0;
}

// x (count, inputs) as products with this weight read it: for int8 weights as int8 numbers; in a pass over `many`
// tokens in tiles of some tokens, or, where the machine has matrix tiles, each number split into three of bf16 that add
// up to it exactly (but for the last bits of numbers below 2^-110). In these cases it waits for all threads.
inline Inputs inputs_of(InputBuffers &buffers, const float *x, int count, const Tensor &weight, bool many) {
    int inputs = (int)weight.cols;
    if (weight.type == DType::int8) {
        int groups = (int)int8_groups(inputs);
#pragma omp for schedule(static) nowait
        for (int64_t item = 0; item < (int64_t)count * groups; item++) {
            int first = (int)(item % groups) * int8_group;
            quantize(buffers.int8[item], x + item / groups * inputs + first, std::min(int8_group, inputs - first));
        }
        barrier();
        return {x, count, buffers.int8.data()};
    }
    if (!many) return {x, count};
    if (!has_matrix_tiles(weight)) {
#pragma omp for schedule(static) nowait
        for (int first = 0; first < count; first += panel_tokens)
            fill_tile(&buffers.tiles[(size_t)first * inputs], std::min(panel_tokens, count - first), inputs,
                      [&](int t) { return x + (size_t)(first + t) * inputs; });
        barrier();
        return {x, count, nullptr, buffers.tiles.data()};
    }
    Aligned<bf16> &buffer = buffers.parts;
    int padded = padded_count(count);
    size_t part = (size_t)padded * inputs;
#pragma omp for schedule(static) nowait
    for (int t = 0; t < padded; t++) {
        for (int i = 0; i < inputs; i++) {
            size_t at = (size_t)t * inputs + i;
            float rest = t < count ? x[at] : 0;
            for (int p = 0; p < bf16_parts; p++) {
                from_float(buffer[p * part + at], rest);
                rest -= to_float(buffer[p * part + at]);
            }
        }
    }
    barrier();
    return {x, count, nullptr, nullptr, buffer.data()};
}

// As with_numbers(), and the format in which products with a few vectors read the rows: use(numbers, format).
template <class Use>
inline void with_rows_of(const Tensor &weight, Use use) {
    with_numbers(weight, [&](auto *numbers) {
        using Number = std::decay_t<decltype(*numbers)>;
        if constexpr (std::is_same_v<Number, bf16>)
            if (weight.cols % PairedRow::line_numbers == 0) return use(numbers, PairedRow());
        use(numbers, PlainRow<Number>());
    });
}

// The vectors, their numbers in the order of such rows. They stay until the thread's next call.
template <class Format>
inline const float *const *vectors_for(const Inputs &in, int inputs) {
    constexpr bool pairs = vecs_together<Format> == 2;
    thread_local std::vector<const float *> vectors;
    thread_local Floats ordered;
    vectors.resize(in.count);
    ordered.resize(pairs ? (size_t)in.count * inputs : 0);
    if (pairs) in_pairs(ordered.data(), in.x, (size_t)in.count * inputs);
    for (int t = 0; t < in.count; t++) vectors[t] = (pairs ? ordered.data() : in.x) + (size_t)t * inputs;
    return vectors.data();
}

// to = the numbers of such a row, in its order.
template <class Format>
inline void widen_row(float *to, const char *row, int width) {
    constexpr int together = vecs_together<Format>;
    int i = 0;
    for (; i + together * lanes <= width; i += together * lanes) {
        Vec part[together];
        decode<Format>(part, row, i);
        for (int k = 0; k < together; k++) store(to + i + k * lanes, part[k]);
    }
    if (i < width) store_part(to + i, Format::decode_part(row, i, width - i), width - i);
}

// Rung 2: threads share the rows of the weight in blocks. A block is read from memory once for all tokens; with many
// tokens it is first widened to float32, so that the conversion is paid once and not once a tile.
inline void linear_vectors(float *y, const Inputs &in, const Linear &linear, Store store) {
    using Wide = StoredRows<PlainRow<float>>;
    const int count = in.count, block_rows = count > tile_vectors ? 32 : 16;
    int outputs = (int)linear.weight.rows, inputs = (int)linear.weight.cols;
    bool widen = count > tile_vectors && linear.weight.type != DType::f32;
    thread_local Floats wide, out;
    wide.resize(widen ? (size_t)block_rows * inputs : 0);
    out.resize((size_t)block_rows * count);
    with_rows_of(linear.weight, [&](auto *weight, auto format) {
        using Format = decltype(format);
        const float *const *vectors = vectors_for<Format>(in, inputs);
        const size_t stride = inputs * sizeof *weight;
#pragma omp for schedule(static) nowait
        for (int first = 0; first < outputs; first += block_rows) {
            int block = std::min(block_rows, outputs - first);
            const char *rows = (const char *)(weight + (size_t)first * inputs);
            if (widen) {
                for (int r = 0; r < block; r++) widen_row<Format>(&wide[(size_t)r * inputs], rows + r * stride, inputs);
                dots(out.data(), block, Wide{(const char *)wide.data(), inputs * sizeof(float)}, block, vectors, count,
                     inputs);
            } else {
                dots(out.data(), block, StoredRows<Format>{rows, stride, rows + bytes_ahead, stride}, block, vectors,
                     count, inputs);
            }
            store_block(y, out.data(), block, linear, count, first, block, store);
        }
    });
}

struct Share {  // of some items: those of this thread
    int first, last;
    int count() const { return last - first; }
};

inline Share share_of(int items) {
    int team = team_size(), me = 0;
#ifdef _OPENMP
    me = omp_get_thread_num();
#endif
    return {(int)((int64_t)items * me / team), (int)((int64_t)items * (me + 1) / team)};
}

// A thread's streams of a matrix: they begin `apart` bytes from one another.
struct Streams {
    const char *start;
    size_t apart;
};
inline Streams streams_of(const Tensor &weight) {
    bool int8 = weight.type == DType::int8;
    size_t bytes = int8 ? int8_groups(weight.cols) * sizeof(Int8Block) : weight.cols * dtype_bytes(weight.type);
    Share share = share_of((int)(int8 ? int8_panels(weight.rows) : weight.rows));
    return {(const char *)weight.data + share.first * bytes, share.count() / streams * bytes};
}

// While this thread waits from here on, it asks for what it will read of this matrix, for `count` tokens.
inline void comes_next(const Linear &linear, int count) {
    if (count > 1) return;
    Streams next = streams_of(linear.weight);
    next_weights = {next.start, next.apart};
}

// Rung 3 for one token: a tile's rows lie a fourth of the thread's share apart, so that memory is read as four streams
// that do not end with a row, and the processor's own prefetcher follows them. 2 threads of a Zen 3 read 28 GB/s as one
// stream each, asked for 4 KiB ahead, and 40 as four. Predicted: decoding 1.3 x as fast. Measured:
// SmolLM2-135M's shape in bf16 1.2 x, these products alone 1.24 x; in f32 1.48 x; with int8 weights 1.1 to 1.25 x.
inline void linear_streams(float *y, const Inputs &in, const Linear &linear, Store store) {
    Share share = share_of((int)linear.weight.rows);
    int inputs = (int)linear.weight.cols, apart = share.count() / streams;
    thread_local Floats out;
    out.resize(share.count());
    with_rows_of(linear.weight, [&](auto *weight, auto format) {
        using Format = decltype(format);
        const float *const *x = vectors_for<Format>(in, inputs);
        auto rows_from = [&](int row) { return (const char *)(weight + (size_t)(share.first + row) * inputs); };
        for (int r = 0; r < apart; r++) {
            float tile[streams];
            StreamRows<Format> rows{{rows_from(r), (size_t)apart * inputs * sizeof *weight}};
            dot_tile<streams, 1>(tile, streams, rows, x, inputs);
            for (int i = 0; i < streams; i++) out[i * apart + r] = tile[i];
        }
        for (int r = apart * streams; r < share.count(); r++)
            dot_tile<1, 1>(&out[r], 1, StoredRows<Format>{rows_from(r), 0}, x, inputs);
    });
    store_block(y, out.data(), share.count(), linear, 1, share.first, share.count(), store);
}

// Rung 3, for many tokens: a panel of weights, widened and transposed, times one number of each of some tokens at a
// time. Of 12 multiply-adds only 8 operands come from memory, the L1; with the sums of rung 2 it is 16, more than the
// processor loads meanwhile. Predicted: bound by the multiply-adds alone. Measured, the prefill of 512 tokens of
// SmolLM2-135M's shape: 44 -> 56 % of the matrix rate.
constexpr int panel_depth = lanes == 16 ? 192 : 320;  // channels at most: with a tile, 28 to 33 KiB of the L1

// panel (depth, panel_rows) = `rows` rows, zeros behind them. read(to, r) writes the numbers of row r.
template <class Read>
inline void fill_panel(Floats &panel, int rows, int depth, Read read) {
    int padded = padded_count(depth, 8);
    thread_local Floats wide;  // (8, padded)
    wide.resize((size_t)8 * padded);
    panel.resize((size_t)padded * panel_rows);
    for (int first = 0; first < panel_rows; first += 8) {
        for (int r = 0; r < 8; r++) {
            float *row = &wide[(size_t)r * padded];
            first + r < rows ? read(row, first + r) : (void)std::fill(row, row + depth, 0.0f);
        }
        for (int i = 0; i < depth; i += 8) transpose8(&panel[i * panel_rows + first], panel_rows, &wide[i], padded);
    }
}

// out (panel_tokens, panel_rows) = the panel's rows times a tile of tokens, or, with `more`, that is added.
inline void panel_products(float *out, const float *panel, const float *tile, int depth, bool more) {
    Vec sums[panel_tokens][2];
    for (int i = 0; i < panel_tokens * 2; i++) sums[i / 2][i % 2] = more ? load(out + i * lanes) : set(0);
    for (int i = 0; i < depth; i++) {
        Vec first = load(panel + i * panel_rows), second = load(panel + i * panel_rows + lanes);
        for (int t = 0; t < panel_tokens; t++) {
            Vec x = set(tile[i * panel_tokens + t]);
            sums[t][0] = fma(first, x, sums[t][0]);
            sums[t][1] = fma(second, x, sums[t][1]);
        }
    }
    for (int i = 0; i < panel_tokens * 2; i++) store(out + i * lanes, sums[i / 2][i % 2]);
}

inline void linear_panels(float *y, const Inputs &in, const Linear &linear, Store store) {
    int outputs = (int)linear.weight.rows, inputs = (int)linear.weight.cols;
    int slices = (inputs + panel_depth - 1) / panel_depth, depth = (inputs + slices - 1) / slices;
    thread_local Floats panel, out;
    out.resize((size_t)padded_count(in.count, panel_tokens) * panel_rows);
    with_numbers(linear.weight, [&](auto *weight) {
#pragma omp for schedule(static) nowait
        for (int first = 0; first < outputs; first += panel_rows) {
            int rows = std::min(panel_rows, outputs - first);
            for (int i = 0; i < inputs; i += depth) {
                int count = std::min(depth, inputs - i);
                fill_panel(panel, rows, count, [&](float *to, int r) {
                    auto *from = weight + (size_t)(first + r) * inputs + i;
                    for (int c = 0; c < count; c++) to[c] = to_float(from[c]);
                });
                for (int t = 0; t < in.count; t += panel_tokens)
                    panel_products(&out[(size_t)t * panel_rows], panel.data(),
                                   in.tiles + (size_t)t * inputs + (size_t)i * panel_tokens, count, i > 0);
            }
            store_block(y, out.data(), panel_rows, linear, in.count, first, rows, store);
        }
    });
}

// Rung 3 where the machine has matrix tiles, for bf16 weights. A panel of weights is arranged once for all tokens and
// stays in the L2 cache. Three bf16 products for each float32 one keep the results as exact as rung 2's, in another
// order of summation. Predicted (16 x the rate of float32, of which a third is useful): 5 x. Measured, 512 tokens and 2
// threads: 290 -> 750..900 GFLOPS, and 870 -> 1,600 tokens/s for the prefill of SmolLM2-135M's shape, with attention
// and all.
inline void linear_tiles(float *y, const Inputs &in, const Linear &linear, Store store) {
    int outputs = (int)linear.weight.rows, inputs = (int)linear.weight.cols, steps = inputs / amx_depth;
    // At most 96 x 1,536 inputs x 2 bytes = 288 KiB, and a panel for each thread if there are enough rows.
    int tall = std::clamp(outputs / team_size() / amx_side, 1, 3) * amx_side;
    size_t group = (size_t)amx_side * inputs / 2, part = (size_t)padded_count(in.count) * inputs;
    thread_local Aligned<uint32_t> panel;
    alignas(64) float out[amx_side * amx_side];
    panel.resize(tall / amx_side * group);
    amx_begin();
#pragma omp for schedule(static) nowait
    for (int first = 0; first < outputs; first += tall) {
        int groups = std::min(tall, outputs - first) / amx_side;
        for (int g = 0; g < groups; g++) {
            const bf16 *rows = (const bf16 *)linear.weight.data + (size_t)(first + g * amx_side) * inputs;
            amx_weights(&panel[g * group], rows, inputs);
        }
        for (int t = 0; t < in.count; t += amx_side) {
            int tokens = std::min(amx_side, in.count - t);
            for (int g = 0; g < groups; g++) {
                amx_products(out, in.in_parts + (size_t)t * inputs, inputs, part, &panel[g * group], steps);
                store_block(y + (size_t)t * outputs, out, amx_side, linear, tokens, first + g * amx_side, amx_side,
                            store);
            }
        }
    }
    amx_end();
}

// The same for int8 weights, four panels at a time. Sums go group after group, for one token as for many, so that the
// bits are the same.
inline void linear_int8_streams(float *y, const Inputs &in, const Linear &linear, Store store) {
    int outputs = (int)linear.weight.rows;
    int64_t groups = int8_groups(linear.weight.cols);
    Share share = share_of((int)int8_panels(outputs));
    const Int8Block *blocks = (const Int8Block *)linear.weight.data + share.first * groups;
    int apart = share.count() / streams, first = share.first * lanes, rows = share.count() * lanes;
    thread_local Floats out;
    out.resize(rows);
    for (int p = 0; p < apart; p++)
        int8_tile<streams, 1>(&out[p * lanes], 0, (size_t)apart * lanes, blocks + p * groups, apart * groups, in.int8,
                              0, groups);
    for (int p = apart * streams; p < share.count(); p++)
        int8_tile<1, 1>(&out[p * lanes], 0, 0, blocks + p * groups, 0, in.int8, 0, groups);
    store_block(y, out.data(), rows, linear, 1, first, std::min(rows, outputs - first), store);
}

// Rung 2 for int8 weights: some panels stay in the L1 for all tokens.
inline void linear_int8(float *y, const Inputs &in, const Linear &linear, Store store) {
    constexpr int block_rows = 32, most_vectors = 4;
    int outputs = (int)linear.weight.rows;
    int64_t groups = int8_groups(linear.weight.cols);
    thread_local Floats out;
    out.resize((size_t)block_rows * in.count);
#pragma omp for schedule(static) nowait
    for (int first = 0; first < outputs; first += block_rows) {
        const Int8Block *blocks = (const Int8Block *)linear.weight.data + first / lanes * groups;
        int block = std::min(block_rows, outputs - first);
        in_batches<most_vectors>(in.count, [&](auto size, int t) {
            for (int panel = 0; panel * lanes < block; panel++)
                int8_tile<1, size>(&out[(size_t)t * block_rows + panel * lanes], block_rows, 0, blocks + panel * groups,
                                   0, in.int8 + t * groups, groups, groups);
        });
        store_block(y, out.data(), block_rows, linear, in.count, first, block, store);
    }
}

// y (count, outputs) = or += weight (outputs, inputs) x + bias, by the fastest rung that there is for these numbers.
inline void linear(float *y, const Inputs &in, const Linear &linear, Store store = Store::set) {
    if (linear.weight.type == DType::int8)
        return in.count == 1 ? linear_int8_streams(y, in, linear, store) : linear_int8(y, in, linear, store);
    if (in.in_parts && has_matrix_tiles(linear.weight)) return linear_tiles(y, in, linear, store);
    if (in.tiles) return linear_panels(y, in, linear, store);
    in.count == 1 ? linear_streams(y, in, linear, store) : linear_vectors(y, in, linear, store);
}

#ifdef HAS_CUDA
// ---- Matrix products on the GPU: one vector ----
//
// Decoding reads every weight for one vector: bytes are all that counts. One launch computes up to three matrices that
// read the same vector, with what stands before and behind them: RMSNorm of the vector, bias, SwiGLU, the residual sum.
struct Products {
    struct Matrix {
        Linear linear;
        float *y = nullptr;  // (count, outputs)
    };
    Matrix matrix[3];
    int matrices = 0;
    const float *x = nullptr;  // (count, inputs)
    int count = 0, inputs = 0;
    Tensor norm;  // (1, inputs): the products read RMSNorm(x); absent: x
    float epsilon = 0;
    Store store = Store::set;
    bool swiglu = false;  // matrix 0 is the gate, 1 is up; matrix[0].y = silu(gate) * up
    void add(const Linear &linear, float *y) {
        matrix[matrices++] = {linear, y};
        inputs = (int)linear.weight.cols;
    }
    // Rows of all matrices; with SwiGLU a row of the gate and one of up take turns.
    HOST_DEVICE int rows() const {
        int total = 0;
        for (int m = 0; m < matrices; m++) total += (int)matrix[m].linear.weight.rows;
        return total;
    }
    // Row v of all is row `row` of the matrix that is returned.
    HOST_DEVICE const Matrix &find(int v, int &row) const {
        row = swiglu ? v / 2 : v;
        int m = swiglu ? v % 2 : 0;
        for (; !swiglu && row >= matrix[m].linear.weight.rows; m++) row -= (int)matrix[m].linear.weight.rows;
        return matrix[m];
    }
};

__device__ inline float silu(float x) { return x / (1 + expf(-x)); }

__device__ inline float number_of(const Tensor &vector, int i) {
    if (vector.type == DType::f32) return ((const float *)vector.data)[i];
    if (vector.type == DType::f16) return to_float(((const f16 *)vector.data)[i]);
    return to_float(((const bf16 *)vector.data)[i]);
}

// sum is that of row v of all, without bias; with SwiGLU v is a row of the gate, and up_sum that of up's.
__device__ inline void store_product(const Products &task, int vector, int v, float sum, float up_sum) {
    int row;
    const Products::Matrix &matrix = task.find(v, row);
    float &y = matrix.y[(size_t)vector * matrix.linear.weight.rows + row];
    if (matrix.linear.bias.data) sum += number_of(matrix.linear.bias, row);
    if (task.swiglu) {
        if (task.matrix[1].linear.bias.data) up_sum += number_of(task.matrix[1].linear.bias, row);
        sum = silu(sum) * up_sum;
    }
    y = task.store == Store::add ? y + sum : sum;
}

// 1 / sqrt(mean(x^2) + epsilon), or 1 where there is no norm. Called by the whole block.
__device__ inline float norm_factor(const Products &task, const float *x) {
    if (!task.norm.data) return 1;
    float squares = 0;
    for (int i = threadIdx.x; i < task.inputs; i += blockDim.x) squares += x[i] * x[i];
    return 1 / sqrtf(block_sum(squares) / task.inputs + task.epsilon);
}

// The plain rung: a warp for each row, its lanes taking every 32nd number. Any type, any width.
//
// A result is within (inputs / 32 + 24) 2^-24 of the exact one, relative to the sum of its magnitudes, and so in the
// next rung with its longer lanes: inputs / 256 * 8 additions in a row at most.
template <class Number>
__global__ void linear_plain_kernel(Products task) {
    wait_for_previous();
    let_next_start();
    const float *x = task.x + (size_t)blockIdx.y * task.inputs;
    float factor = norm_factor(task, x);
    int per_result = task.swiglu ? 2 : 1, warps = blockDim.x / warp_size;
    int v = ((int)blockIdx.x * warps + warp_id()) * per_result;
    if (v >= task.rows()) return;
    float sums[2] = {};
    for (int i = lane_id(); i < task.inputs; i += warp_size) {
        float number = x[i] * factor * (task.norm.data ? number_of(task.norm, i) : 1);
        for (int part = 0; part < per_result; part++) {
            int row;
            const Tensor &weight = task.find(v + part, row).linear.weight;
            sums[part] += number * to_float(((const Number *)weight.data)[(size_t)row * task.inputs + i]);
        }
    }
    float sum = warp_sum(sums[0]), up_sum = warp_sum(sums[1]);
    if (lane_id() == 0) store_product(task, blockIdx.y, v, sum, up_sum);
}

// The next rung: weights stream through shared memory without a stop. A row is cut into chunks of 512 bytes, 16 for
// each lane; warp w of a block takes the chunks w, w + 8, ... of all rows of the block, so that its part of the vector
// stays in registers. Each lane asks for its own 16 bytes well ahead (cp.async) and reads nobody else's: no barrier
// stands between memory and the multiply-adds. The first bytes are asked for before the kernel before has ended.
//
// Predicted: a warp has 16 x 512 bytes on their way, a multiprocessor 64 KiB; at 4.8 TB/s and a microsecond of latency
// 36 are needed. 4 rows x 512 bytes take about 200 of the 440 instructions that there is time for. So 90 % of the
// bandwidth, less what starting and ending a launch takes. Not measured yet.
constexpr int stream_warps = block_threads / warp_size;
constexpr int rows_together = 4, stages = 4;  // copies in flight: 4 stages of a chunk of 4 rows
constexpr int tile_of_rows = 64;              // rows at most whose partial sums wait to be added up
constexpr int most_columns = 16;              // chunks of a row for one warp

// 16 bytes as float32.
template <class Number>
__device__ inline void unpack(float (&numbers)[16 / sizeof(Number)], uint4 bytes) {
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    for (int i = 0; i < (int)(16 / sizeof(Number)); i++) {
        if constexpr (sizeof(Number) == 4)
            numbers[i] = bit_cast<float>(words[i]);
        else
            numbers[i] = to_float(Number{(uint16_t)(words[i / 2] >> 16 * (i % 2))});
    }
}

// Where the chunks of a block's rows are, as one warp meets them: rows [first, last) of all, 4 rows together, and of
// these chunk after chunk.
template <class Number, int columns>
struct WeightStream {
    static constexpr int numbers = 16 / sizeof(Number);  // of a lane in a chunk
    const Products &task;
    Shared<uint4> ring;  // (stages, rows_together, warp_size) for each warp
    int first, last, group, groups, slot;
    __device__ int place(int stage, int r) const {
        return ((warp_id() * stages + stage) * rows_together + r) * warp_size + lane_id();
    }
    __device__ int row(int step, int r) const { return first + (step / columns * rows_together + r) * groups + group; }
    __device__ int channel(int column) const {
        return ((slot + column * stream_warps) * warp_size + lane_id()) * numbers;
    }
    __device__ void ask(int step) const {
        int i = channel(step % columns);
        for (int r = 0; r < rows_together; r++) {
            int v = row(step, r), row_of_matrix = 0;
            bool there = v < last && group < groups && i < task.inputs;
            const Tensor &weight = task.find(there ? v : first, row_of_matrix).linear.weight;
            const Number *from = (const Number *)weight.data + (there ? (size_t)row_of_matrix * task.inputs + i : 0);
            copy_async16(ring, place(step % stages, r), from, there);
        }
        commit_copies();
    }
};

template <class Number, int columns>
__global__ void __launch_bounds__(block_threads) linear_kernel(Products task) {
    using Stream = WeightStream<Number, columns>;
    constexpr int numbers = Stream::numbers;
    SharedMemory memory;
    Shared<float> partial = memory.take<float>(tile_of_rows * stream_warps);
    Shared<uint4> ring = memory.take<uint4>(stream_warps * stages * rows_together * warp_size);
    // Narrow rows have fewer chunks than there are warps: then the warps form groups, each with rows of its own.
    int chunks = blocks_for(task.inputs, numbers * warp_size), slots = min(chunks, stream_warps);
    int groups = stream_warps / slots, pairs = task.swiglu ? 2 : 1, units = task.rows() / pairs;
    int first = (int)((int64_t)units * blockIdx.x / gridDim.x) * pairs;
    int last = (int)((int64_t)units * (blockIdx.x + 1) / gridDim.x) * pairs;
    Stream stream = {task, ring, first, last, warp_id() / slots, groups, warp_id() % slots};
    for (int step = 0; step < stages; step++) stream.ask(step);
    let_next_start();
    wait_for_previous();
    const float *x = task.x + (size_t)blockIdx.y * task.inputs;
    float factor = norm_factor(task, x), vector[columns][numbers];
    UNROLL for (int c = 0; c < columns; c++) for (int i = 0, at = stream.channel(c); i < numbers; i++) vector[c][i] =
        at + i >= task.inputs ? 0 : x[at + i] * factor * (task.norm.data ? number_of(task.norm, at + i) : 1);
    int per_step = rows_together * groups, per_tile = tile_of_rows / per_step * per_step, step = 0;
    for (int tile = first; tile < last; tile += per_tile) {
        int end = min(tile + per_tile, last);
        for (int base = tile; base < end; base += per_step) {
            float sums[rows_together] = {};
            UNROLL for (int c = 0; c < columns; c++, step++) {
                wait_copies<stages - 1>();
                for (int r = 0; r < rows_together; r++) {
                    float weights[numbers];
                    unpack<Number>(weights, ring[stream.place(step % stages, r)]);
                    for (int i = 0; i < numbers; i++) sums[r] += weights[i] * vector[c][i];
                }
                stream.ask(step + stages);
            }
            for (int r = 0; r < rows_together; r++) {
                float sum = warp_sum(sums[r]);
                int at = base - tile + r * groups + stream.group;
                if (lane_id() == 0 && stream.group < groups) partial[at * slots + stream.slot] = sum;
            }
        }
        __syncthreads();
        for (int v = tile + threadIdx.x * pairs; v < end; v += blockDim.x * pairs) {
            float sums[2] = {};
            for (int part = 0; part < pairs; part++)
                for (int i = 0; i < slots; i++) sums[part] += partial[(v - tile + part) * slots + i];
            store_product(task, blockIdx.y, v, sums[0], sums[1]);
        }
        __syncthreads();
    }
    wait_copies<0>();
}

// All products of a task by the fastest rung that its types and widths allow.
inline void linear(const Device &device, const Products &task) {
    int rows = task.rows() / (task.swiglu ? 2 : 1);
    with_numbers(task.matrix[0].linear.weight, [&](auto *weight) {
        using Number = std::decay_t<decltype(*weight)>;
        constexpr int numbers = 16 / sizeof(Number);
        int columns = blocks_for(task.inputs, numbers * warp_size * stream_warps);
        if (task.inputs % numbers || columns > most_columns) {
            dim3 blocks(blocks_for(rows, stream_warps), task.count);
            return launch(device, {blocks, block_threads}, linear_plain_kernel<Number>, task);
        }
        size_t room = shared_size(tile_of_rows * stream_warps * sizeof(float));
        room += shared_size(stream_warps * stages * rows_together * warp_size * sizeof(uint4));
        Grid grid = {dim3(std::min(rows, device.multiprocessors()), task.count), block_threads, room};
        if (columns == 1) return launch(device, grid, linear_kernel<Number, 1>, task);
        if (columns == 2) return launch(device, grid, linear_kernel<Number, 2>, task);
        if (columns <= 4) return launch(device, grid, linear_kernel<Number, 4>, task);
        if (columns <= 8) return launch(device, grid, linear_kernel<Number, 8>, task);
        launch(device, grid, linear_kernel<Number, most_columns>, task);
    });
}

// ---- Matrix products on the GPU: many vectors ----

__global__ void add_bias_kernel(float *y, Tensor bias, int count, int outputs) {
    wait_for_previous();
    let_next_start();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (int64_t)count * outputs) y[i] += number_of(bias, (int)(i % outputs));
}

// y (count, outputs) = or += weight x + bias on the tensor cores, where x has the weight's type; sums in float32. The
// library's matrices are column by column: it computes y^T = weight^T^T x^T.
template <class Number>
void linear(const Device &device, float *y, const Number *x, const Linear &linear, int count,
            Store store = Store::set) {
    int outputs = (int)linear.weight.rows, inputs = (int)linear.weight.cols;
    const float one = 1, keep = store == Store::add ? 1 : 0;
    cudaDataType_t type = std::is_same_v<Number, float> ? CUDA_R_32F
                          : std::is_same_v<Number, f16> ? CUDA_R_16F
                                                        : CUDA_R_16BF;
    check(CUBLAS(cublasGemmEx_64)(device.blas, CUBLAS_OP_T, CUBLAS_OP_N, outputs, count, inputs, &one,
                                  linear.weight.data, type, inputs, x, type, inputs, &keep, y, CUDA_R_32F, outputs,
                                  CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx_64");
    if (!linear.bias.data) return;
    Grid grid = {dim3(blocks_for((int64_t)count * outputs, block_threads)), block_threads};
    launch(device, grid, add_bias_kernel, y, linear.bias, count, outputs);
}

// Numbers as the next product reads them.
template <class Number>
__global__ void convert_kernel(Number *out, const float *x, int64_t count) {
    wait_for_previous();
    let_next_start();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) from_float(out[i], x[i]);
}

template <class Number>
void convert(const Device &device, Number *out, const float *x, int64_t count) {
    launch(device, {dim3(blocks_for(count, block_threads)), block_threads}, convert_kernel<Number>, out, x, count);
}
#endif

// ---- Rotary positions (Su et al. 2021, RoFormer) -----------------------------------------------------------

// Angle per position of each of head_dim / 2 pairs: theta^(-2i / head_dim), rescaled as the checkpoint asks.
inline std::vector<float> rope_frequencies(const Config &config) {
    std::vector<float> frequencies(config.head_dim / 2);
    const RopeScaling &rope = config.rope;
    for (size_t i = 0; i < frequencies.size(); i++) {
        float frequency = 1 / std::pow((float)config.rope_theta, 2 * (float)i / config.head_dim);
        if (rope.kind == RopeScaling::linear) frequency /= (float)rope.factor;
        if (rope.kind == RopeScaling::llama3) {
            // Waves longer than the original context are stretched by `factor`, short ones are left alone, and
            // in between it goes over smoothly (Llama 3.1).
            double turns = rope.original_context * (double)frequency / (2 * M_PI);
            double keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
            keep = std::min(1.0, std::max(0.0, keep));
            frequency = (float)((1 - keep) * frequency / rope.factor + keep * frequency);
        }
        frequencies[i] = frequency;
    }
    return frequencies;
}

// The angle by which a pair is turned at a position. Beyond 2^20 positions, where a ring may go, float32 cannot tell
// neighbours apart.
HOST_DEVICE inline float rope_angle(int position, float frequency) {
    if (position < 1 << 20) return (float)position * frequency;
    return (float)remainder((double)position * frequency, 2 * M_PI);
}

// cos and sin of each pair's angle at each row's position: turn (rows, head_dim), cosines first.
inline void rope_angles(float *turn, const std::vector<float> &frequencies, const int *positions, int count) {
    int half = (int)frequencies.size();
#pragma omp for schedule(static) nowait
    for (int t = 0; t < count; t++) {
        for (int i = 0; i < half; i++) {
            float angle = rope_angle(positions[t], frequencies[i]);
            turn[(size_t)t * 2 * half + i] = std::cos(angle);
            turn[(size_t)t * 2 * half + half + i] = std::sin(angle);
        }
    }
}

// Rotates every head: x (rows, heads, head_dim), in place.
inline void rope(float *x, const float *turn, int count, int heads, int head_dim) {
#pragma omp for schedule(static) nowait
    for (int64_t item = 0; item < (int64_t)count * heads; item++)
        rotate(x + item * head_dim, x + item * head_dim, turn + item / heads * head_dim, head_dim);
}

// ---- SwiGLU (Shazeer 2020) ---------------------------------------------------------------------------------

// out = silu(gate) * up, silu(x) = x / (1 + e^-x). `out` may be `gate`.
inline void swiglu(float *out, const float *gate, const float *up, int64_t count) {
    constexpr int block = 256;
#pragma omp for schedule(static) nowait
    for (int64_t first = 0; first < count; first += block) {
        for (int64_t i = first; i < std::min(first + block, count); i += lanes) {
            int rest = (int)std::min<int64_t>(lanes, count - i);
            Vec x = rest == lanes ? load(gate + i) : load_part(gate + i, rest);
            Vec y = rest == lanes ? load(up + i) : load_part(up + i, rest);
            Vec grown = exp(mul(max(set(-88), x), set(-1)));
            Vec result = mul(div(x, add(set(1), grown)), y);
            rest == lanes ? store(out + i, result) : store_part(out + i, result, rest);
        }
    }
}

#ifdef HAS_CUDA
// out = silu(gate) * up, as the next product reads it.
template <class Number>
__global__ void swiglu_kernel(Number *out, const float *gate, const float *up, int64_t count) {
    wait_for_previous();
    let_next_start();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) from_float(out[i], silu(gate[i]) * up[i]);
}

template <class Number>
void swiglu(const Device &device, Number *out, const float *gate, const float *up, int64_t count) {
    launch(device, {dim3(blocks_for(count, block_threads)), block_threads}, swiglu_kernel<Number>, out, gate, up,
           count);
}
#endif

// ---- The likeliest token -----------------------------------------------------------------------------------

// The first of equals.
inline int argmax(const float *logits, int count) { return (int)(std::max_element(logits, logits + count) - logits); }

#ifdef HAS_CUDA
// A number that is as a whole larger where the logit is larger, and, between equals, where the token comes first. A
// logit that is not finite is larger than all.
__device__ inline unsigned long long rank_of(float logit, int token) {
    uint32_t bits = bit_cast<uint32_t>(logit), order = bits & 0x80000000 ? ~bits : bits | 0x80000000;
    if (!(fabsf(logit) <= FLT_MAX)) order = 0xffffffff;
    return (unsigned long long)order << 32 | (uint32_t)~token;
}

__global__ void argmax_kernel(unsigned long long *best, const float *logits, int vocabulary) {
    wait_for_previous();
    let_next_start();
    unsigned long long mine = 0;
    const float *row = logits + (size_t)blockIdx.y * vocabulary;
    for (int token = blockIdx.x * blockDim.x + threadIdx.x; token < vocabulary; token += gridDim.x * blockDim.x)
        mine = max(mine, rank_of(row[token], token));
    for (int step = warp_size / 2; step > 0; step /= 2) mine = max(mine, __shfl_xor_sync(all_lanes, mine, step));
    if (lane_id() == 0) atomicMax(&best[blockIdx.y], mine);
}

// best[r] becomes the rank of the likeliest token of row r of logits (count, vocabulary); it must have been zero.
inline void argmax(const Device &device, unsigned long long *best, const float *logits, int count, int vocabulary) {
    dim3 blocks(std::min(blocks_for(vocabulary, 4 * block_threads), device.multiprocessors()), count);
    launch(device, {blocks, block_threads}, argmax_kernel, best, logits, vocabulary);
}

// The token of a rank, or -1 where a logit is not finite.
inline int token_of(unsigned long long rank) { return rank >> 32 == 0xffffffff ? -1 : (int)~(uint32_t)rank; }
#endif
