// The layers around attention: embedding, RMSNorm, matrix products, rotary positions, SwiGLU.
//
// Each function is called by all threads of one parallel region and does its thread's share; it returns
// without waiting, unless it says so. barrier() stands where what follows needs what the others did.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "model.h"
#include "numbers.h"

// Waits until the whole team is here. OpenMP's own barrier may spin for 10 ms and then sleeps; the ten waits of a layer
// are of microseconds. This one spins for a millisecond, about, and only then yields: whoever yields to another program
// gets its core back some milliseconds later, and meanwhile the others wait. There is one team at a time.
inline void barrier() {
#ifdef _OPENMP
    static std::atomic<unsigned> arrived{0}, round{0};
    static const int cores = omp_get_num_procs();
    int team = omp_get_num_threads();
    unsigned mine = round.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == (unsigned)team) {
        arrived.store(0, std::memory_order_relaxed);
        round.store(mine + 1, std::memory_order_release);
        return;
    }
    const int spins = team <= cores ? 20000 : 0;  // with more threads than cores, somebody waits for this very core
    for (int spin = 0; round.load(std::memory_order_acquire) == mine; spin++)
        spin < spins ? pause_briefly() : std::this_thread::yield();
#endif
}

inline int team_size() {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

// Calls use(p) with a tensor's numbers as they are stored: `const float *`, `const f16 *` or `const bf16 *`.
template <class Use>
void with_numbers(const Tensor &tensor, Use use) {
    switch (tensor.type) {
        case DType::f32:
            return use((const float *)tensor.data);
        case DType::f16:
            return use((const f16 *)tensor.data);
        case DType::bf16:
            return use((const bf16 *)tensor.data);
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
// The sum over a block's threads, in all of them. `room`: one number for each warp.
__device__ inline float block_sum(float x, Shared<float> room) {
    x = warp_sum(x);
    if (lane_id() == 0) room[warp_id()] = x;
    __syncthreads();
    float total = 0;
    for (int i = 0; i < (int)blockDim.x / warp_size; i++) total += room[i];
    return total;
}

// x as products read it: a block for each vector. Every sum of a block may differ from the CPU's by its order: each
// number is within (width / 256 + 16) 2^-24 of it, relative to itself, before it is rounded to Number.
template <class Number, class Gain>
__global__ void rms_norm_kernel(Number *out, const float *x, const Gain *gain, int width, float epsilon) {
    SharedMemory memory;
    Shared<float> room = memory.take<float>(block_threads / warp_size);
    wait_for_previous();
    let_next_start();
    x += (size_t)blockIdx.x * width;
    out += (size_t)blockIdx.x * width;
    float squares = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) squares += x[i] * x[i];
    float factor = 1 / sqrtf(block_sum(squares, room) / width + epsilon);
    for (int i = threadIdx.x; i < width; i += blockDim.x) from_float(out[i], x[i] * factor * to_float(gain[i]));
}

template <class Number>
void rms_norm(const Device &device, Number *out, const float *x, const Tensor &weight, int64_t count, double epsilon) {
    Grid grid = {dim3((unsigned)count), block_threads, shared_size(block_threads / warp_size * sizeof(float))};
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
template <class Format>
struct StoredRows {
    const char *start;
    size_t stride;
    const char *ahead = nullptr;
    size_t ahead_stride = 0;
    int channel = 0;  // where in each row the numbers begin
    Vec load(int row, int i) const { return Format::decode(start + row * stride, channel + i); }
    Vec load_part(int row, int i, int count) const {
        return Format::decode_part(start + row * stride, channel + i, count);
    }
    void prefetch(int row, int i) const {
        __builtin_prefetch(ahead + row * ahead_stride + (channel + i) / Format::line_numbers * cache_line);
    }
    // Line after line, as Rows rows of a tile lie in memory.
    void ask(int line) const { __builtin_prefetch(ahead + line * cache_line); }
    StoredRows from(int64_t row) const {
        return {start + row * stride, stride, ahead ? ahead + row * ahead_stride : nullptr, ahead_stride, channel};
    }
    // Only channels with which a cache line may begin ask for one.
    StoredRows from_channel(int first) const {
        bool ask = (channel + first) % Format::line_numbers == 0;
        return {start, stride, ask ? ahead : nullptr, ahead_stride, channel + first};
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
constexpr int tile_vectors = lanes == 16 ? 6 : 3;

// Weights come straight from memory, and are asked for so far ahead: the processor's own prefetcher stops at each page.
// The lines are asked for in the order of memory, not each for its own row: a tile would be as many streams as it has
// rows. All linear layers of SmolLM2-135M's shape in bf16, 2 threads of a Zen 3, median: 16.3 -> 12.8 ms.
constexpr int bytes_ahead = 8192;

// out[v * out_stride + r] = row r . vector v for Rows x Vectors of them; each row and each vector is read
// once, and the sum of each result is the one of dot(), whatever the tile.
template <int Rows, int Vectors, class Format>
inline void dot_tile(float *out, size_t out_stride, StoredRows<Format> rows, const float *const *vectors, int width) {
    Vec sums[Vectors][Rows];
    for (int v = 0; v < Vectors; v++)
        for (int r = 0; r < Rows; r++) sums[v][r] = set(0);
    auto add_products = [&](int i) {
        Vec vector[Vectors];
        for (int v = 0; v < Vectors; v++) vector[v] = load(vectors[v] + i);
        for (int r = 0; r < Rows; r++) {
            Vec row = rows.load(r, i);
            for (int v = 0; v < Vectors; v++) sums[v][r] = fma(row, vector[v], sums[v][r]);
        }
    };
    const int whole = width / lanes * lanes;
    int i = 0;
    for (int line = 0; i + Format::line_numbers <= whole; i += Format::line_numbers, line += Rows) {
        for (int r = 0; rows.ahead && r < Rows; r++) rows.ask(line + r);
        for (int part = 0; part < Format::line_numbers; part += lanes) add_products(i + part);
    }
    for (; i < whole; i += lanes) add_products(i);
    float finished[Vectors * Rows];
    auto at = [&](int i) { return sums[i / Rows][i % Rows]; };
    constexpr int fours = Vectors * Rows / 4 * 4;
    for (int i = 0; i < fours; i += 4) sum4(finished + i, at(i), at(i + 1), at(i + 2), at(i + 3));
    for (int i = fours; i < Vectors * Rows; i++) finished[i] = sum(at(i));
    for (int i = 0; whole < width && i < Vectors * Rows; i++) {
        Vec row = rows.load_part(i % Rows, whole, width - whole);
        finished[i] += sum(mul(row, load_part(vectors[i / Rows] + whole, width - whole)));
    }
    for (int v = 0; v < Vectors; v++)
        for (int r = 0; r < Rows; r++) out[v * out_stride + r] = finished[v * Rows + r];
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

enum class Store { set, add };  // y = W x, or y += W x (a residual connection)

// y[t] (+)= weight x[t] + bias, for each of `count` tokens.
//
// The plain rung: one dot() a number.
inline void linear_plain(float *y, const float *x, const Linear &linear, int count, Store store = Store::set) {
    int outputs = (int)linear.weight.rows, inputs = (int)linear.weight.cols;
    with_numbers(linear.weight, [&](auto *weight) {
        for (int t = 0; t < count; t++) {
            for (int o = 0; o < outputs; o++) {
                float result = dot(weight + (size_t)o * inputs, x + (size_t)t * inputs, inputs);
                if (linear.bias.data) with_numbers(linear.bias, [&](auto *bias) { result += to_float(bias[o]); });
                float &to = y[(size_t)t * outputs + o];
                to = store == Store::add ? to + result : result;
            }
        }
    });
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

// What linear() reads: vectors, and in a pass over many tokens their parts for matrix tiles, where there are any.
struct Inputs {
    const float *x;  // (count, inputs)
    int count;
    const bf16 *in_parts = nullptr;  // (bf16_parts, padded_count, inputs)
};

inline int padded_count(int count) { return (count + amx_side - 1) / amx_side * amx_side; }

// Splits each number into three of bf16 that add up to it exactly (but for the last bits of numbers below 2^-110), if
// `matrix` asks for it and the machine has matrix tiles. Then it waits for all threads.
inline Inputs inputs_of(Aligned<bf16> &buffer, const float *x, int count, int inputs, bool matrix) {
    if (!matrix || !amx_allowed() || inputs % amx_depth) return {x, count};
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
    return {x, count, buffer.data()};
}

// Rung 2: threads share the rows of the weight in blocks. A block is read from memory once for all tokens; with many
// tokens it is first widened to float32, so that the conversion is paid once and not once a tile.
inline void linear_vectors(float *y, const Inputs &in, const Linear &linear, Store store) {
    using Wide = StoredRows<PlainRow<float>>;
    const int count = in.count, block_rows = count > tile_vectors ? 32 : 16;
    int outputs = (int)linear.weight.rows, inputs = (int)linear.weight.cols;
    bool widen = count > tile_vectors && linear.weight.type != DType::f32;
    thread_local Floats wide, out;
    thread_local std::vector<const float *> vectors;
    wide.resize(widen ? (size_t)block_rows * inputs : 0);
    out.resize((size_t)block_rows * count);
    vectors.resize(count);
    for (int t = 0; t < count; t++) vectors[t] = in.x + (size_t)t * inputs;
    with_numbers(linear.weight, [&](auto *weight) {
        using Number = std::remove_cv_t<std::remove_reference_t<decltype(*weight)>>;
#pragma omp for schedule(static) nowait
        for (int first = 0; first < outputs; first += block_rows) {
            int block = std::min(block_rows, outputs - first);
            const Number *rows = weight + (size_t)first * inputs;
            if (widen) {
                for (size_t i = 0; i < (size_t)block * inputs; i++) wide[i] = to_float(rows[i]);
                dots(out.data(), block, Wide{(const char *)wide.data(), inputs * sizeof(float)}, block, vectors.data(),
                     count, inputs);
            } else {
                size_t stride = inputs * sizeof(Number);
                const char *start = (const char *)rows, *ahead = start + bytes_ahead;
                dots(out.data(), block, StoredRows<PlainRow<Number>>{start, stride, ahead, stride}, block,
                     vectors.data(), count, inputs);
            }
            store_block(y, out.data(), block, linear, count, first, block, store);
        }
    });
}

// Rung 3: matrix tiles, for bf16 weights. A panel of weights is arranged once for all tokens and stays in the L2 cache.
// Three bf16 products for each float32 one keep the results as exact as rung 2's, in another order of summation.
// Predicted (16 x the rate of float32, of which a third is useful): 5 x. Measured, 512 tokens and 2 threads: 290 ->
// 750..900 GFLOPS, and 870 -> 1,600 tokens/s for the prefill of SmolLM2-135M's shape, with attention and all.
inline void linear_tiles(float *y, const Inputs &in, const Linear &linear, Store store) {
    int outputs = (int)linear.weight.rows, inputs = (int)linear.weight.cols, steps = inputs / amx_depth;
    // At most 96 x 1,536 inputs x 2 bytes = 288 KiB, and a panel for each thread if there are enough rows.
    int panel_rows = std::clamp(outputs / team_size() / amx_side, 1, 3) * amx_side;
    size_t group = (size_t)amx_side * inputs / 2, part = (size_t)padded_count(in.count) * inputs;
    thread_local Aligned<uint32_t> panel;
    alignas(64) float out[amx_side * amx_side];
    panel.resize(panel_rows / amx_side * group);
    amx_begin();
#pragma omp for schedule(static) nowait
    for (int first = 0; first < outputs; first += panel_rows) {
        int groups = std::min(panel_rows, outputs - first) / amx_side;
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

// y (count, outputs) = or += weight (outputs, inputs) x + bias, by the fastest rung that there is for these numbers.
inline void linear(float *y, const Inputs &in, const Linear &linear, Store store = Store::set) {
    bool tiles = in.in_parts && linear.weight.type == DType::bf16 && linear.weight.rows % amx_side == 0;
    tiles ? linear_tiles(y, in, linear, store) : linear_vectors(y, in, linear, store);
}

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

// gate = silu(gate) * up, silu(x) = x / (1 + e^-x)
inline void swiglu(float *gate, const float *up, int64_t count) {
    constexpr int block = 256;
#pragma omp for schedule(static) nowait
    for (int64_t first = 0; first < count; first += block) {
        for (int64_t i = first; i < std::min(first + block, count); i += lanes) {
            int rest = (int)std::min<int64_t>(lanes, count - i);
            Vec x = rest == lanes ? load(gate + i) : load_part(gate + i, rest);
            Vec y = rest == lanes ? load(up + i) : load_part(up + i, rest);
            Vec grown = exp(mul(max(set(-88), x), set(-1)));
            Vec result = mul(div(x, add(set(1), grown)), y);
            rest == lanes ? store(gate + i, result) : store_part(gate + i, result, rest);
        }
    }
}
