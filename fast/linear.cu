// Matrix products on the GPU, with what comes before them: RMSNorm, SwiGLU, rounding to 16 bits.
//
// Decoding reads every weight for a few vectors, so bytes are all that counts: weights stream through a kernel of our
// own. Many vectors are multiplied on tensor cores, by cuBLAS. rms_norm() and swiglu() only note what to compute. The
// next product, the only reader, computes it while it loads its vectors, which saves a launch.
#pragma once

#include "../layers.cu"

#ifdef HAS_CUDA
#include "instructions.h"

namespace fast {

constexpr int block_threads = 256;

HOST_DEVICE inline int blocks_for(int64_t items, int each) { return (int)((items + each - 1) / each); }

// The input of products: x (count, width) as it is, or RMSNorm(x), or silu(x) * up, or gelu(x) * up.
struct Input {
    const float *x = nullptr, *up = nullptr;
    Tensor norm;  // (1, width), or absent
    float epsilon = 0;
    bool gelu = false;
    // Number i of all, which is number `channel` of its vector; `factor`: the vector's 1 / RMS.
    HOST_DEVICE float number(int64_t i, int channel, float factor) const {
        if (up) return plain::gated(x[i], gelu) * up[i];
        return norm.data ? x[i] * factor * number_of(norm, channel) : x[i];
    }
};

// Kept from one operation of a pass to the next.
struct Between {
    const float *out = nullptr;  // who reads `out` must read `input` instead; nullptr: nothing was noted
    Input input;
    bool decoding = false;        // this pass has one token of each sequence
    DType products = DType::f32;  // the type of the weights of the last product
    Buffer<float> rounded;        // inputs in that type
};

inline void note(Gpu &m, const float *out, const Input &input) {
    Between &between = m.kept<Between>();
    if (between.out) fail("the GPU: a norm or SwiGLU that no product read: this program is at fault");
    between.out = out;
    between.input = input;
}

inline void rms_norm(Gpu &m, float *out, const float *x, const Tensor &weight, int64_t, double epsilon) {
    note(m, out, {x, nullptr, weight, (float)epsilon});
}

inline void swiglu(Gpu &m, float *out, const float *gate, const float *up, int64_t, bool gelu = false) {
    note(m, out, {gate, up, {}, 0, gelu});
}

// to (part, count, width) = the input, rounded, then the rounded rest, and so on. A warp computes a whole vector if it
// is normed, else a piece of one.
template <class Number>
void write_input(Gpu &m, Number *to, const Input &input, int64_t count, int width, int parts = 1) {
    int piece = input.norm.data ? width : 1024, pieces = blocks_for(width, piece);
    m.for_each(count * pieces, [=] HOST_DEVICE(int64_t item, Warp team) {
        int64_t vector = item / pieces * width;
        int first = (int)(item % pieces) * piece, end = first + piece < width ? first + piece : width;
        float squares = 0;
        for (int i = team.first(); input.norm.data && i < width; i += team.step())
            squares += input.x[vector + i] * input.x[vector + i];
        float factor = 1 / sqrtf(team.sum(squares) / width + input.epsilon);
        for (int i = first + team.first(); i < end; i += team.step()) {
            float x = input.number(vector + i, i, factor);
            for (int part = 0; part < parts; part++) {
                Number number;
                from_float(number, x), x -= to_float(number);
                to[part * count * width + vector + i] = number;
            }
        }
    });
}

// ---- Few vectors -------------------------------------------------------------------------------------------

struct Matrix {  // a Product that can be stored
    Linear linear;
    float *y = nullptr;  // (count, outputs)
};

// Up to three matrices that read the same vectors, in one launch, with bias and the residual sum.
struct Streams {
    Matrix matrix[3];
    int matrices = 0;
    Input input;
    int inputs = 0;
    Into into = Into::set;
    HOST_DEVICE int rows() const {  // of all matrices
        int total = 0;
        for (int m = 0; m < matrices; m++) total += (int)matrix[m].linear.weight.rows;
        return total;
    }
    // Returns the matrix that has row v of all, and as `row` its row there.
    HOST_DEVICE const Matrix &find(int v, int &row) const {
        int m = 0;
        for (row = v; row >= matrix[m].linear.weight.rows; m++) row -= (int)matrix[m].linear.weight.rows;
        return matrix[m];
    }
};

// Weights stream through shared memory without a stop. A row is cut into chunks of 512 bytes, 16 for each lane. Warp w
// of a block takes the chunks w, w + 8, ... of all rows of the block, so its part of the vector stays in registers. A
// lane copies its own 16 bytes well ahead (cp.async) and reads no other lane's, so no barrier separates memory from the
// multiply-adds. The first copies start before the previous kernel has ended.
//
// A result is within (inputs / 32 + 24) 2^-24 of the exact one, relative to the sum of its magnitudes: at most
// inputs / 256 * 8 additions in a row. Measured on an H100 (docs/gpu.md): the head of an 8B streams at 100 % of the
// bandwidth of copies, the matrices of a layer at 69 to 89 %, as their vectors must come first.
constexpr int stream_warps = block_threads / warp_size;
constexpr int rows_together = 4, stages = 4;  // copies under way: 4 stages, each a chunk of 4 rows
constexpr int tile_of_rows = 64;              // most rows whose partial sums are added together
constexpr int most_columns = 16;              // chunks of a row for one warp

// Returns the sum over a block's threads to all of them; `sums` (warp) is memory for this alone.
__device__ inline float block_sum(float x, const Shared<float> &sums) {
    x = warp_sum(x);
    if (lane_id() == 0) sums[warp_id()] = x;
    __syncthreads();
    float total = 0;
    for (int i = 0; i < stream_warps; i++) total += sums[i];
    return total;
}

// 16 bytes as float32.
template <class Number>
__device__ inline void unpack(float *numbers, uint4 bytes) {
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    for (int i = 0; i < (int)(16 / sizeof(Number)); i++) {
        if constexpr (sizeof(Number) == 4)
            numbers[i] = bit_cast<float>(words[i]);
        else
            numbers[i] = to_float(Number{(uint16_t)(words[i / 2] >> 16 * (i % 2))});
    }
}

// Reads `count` numbers as float32; they are aligned to 16 bytes, or to their size if that is less.
template <class Number, int count>
__device__ inline void read_numbers(float (&to)[count], const Number *from) {
    constexpr int each = 16 / sizeof(Number);
    if constexpr (count % each == 0) {
        UNROLL for (int i = 0; i < count; i += each) unpack<Number>(to + i, *(const uint4 *)(from + i));
    } else {
        UNROLL for (int i = 0; i < count; i++) to[i] = to_float(from[i]);
    }
}

// The copies of one warp, in order: rows [first, last) of all matrices, 4 rows at a time, for these chunk after chunk.
template <class Number, int columns>
struct WeightStream {
    static constexpr int numbers = 16 / sizeof(Number);  // of a lane in a chunk
    const Streams &task;
    Shared<uint4> ring;  // (stages, rows_together, warp_size) for each warp
    int first, last;
    bool idle;  // rows have no chunk for this warp
    __device__ int place(int stage, int r) const {
        return ((warp_id() * stages + stage) * rows_together + r) * warp_size + lane_id();
    }
    __device__ int channel(int column) const {
        return ((warp_id() + column * stream_warps) * warp_size + lane_id()) * numbers;
    }
    __device__ void ask(int step) const {
        int i = channel(step % columns);
        for (int r = 0; r < rows_together && !idle; r++) {
            int v = first + step / columns * rows_together + r, row_of_matrix = 0;
            bool there = v < last && i < task.inputs;
            const Tensor &weight = task.find(there ? v : first, row_of_matrix).linear.weight;
            const Number *from = (const Number *)weight.data + (there ? (size_t)row_of_matrix * task.inputs + i : 0);
            copy_async16(ring, place(step % stages, r), from, there ? 16 : 0);
        }
        commit_copies();
    }
};

template <class Number, int columns>
__global__ void __launch_bounds__(block_threads) linear_kernel(Streams task) {
    using Stream = WeightStream<Number, columns>;
    constexpr int numbers = Stream::numbers;
    SharedMemory memory;
    Shared<float> partial = memory.take<float>(tile_of_rows * stream_warps), meeting = memory.take<float>(stream_warps);
    Shared<uint4> ring = memory.take<uint4>(stream_warps * stages * rows_together * warp_size);
    int used = min(blocks_for(task.inputs, numbers * warp_size), stream_warps);  // warps that have a chunk of a row
    int64_t rows = task.rows();
    int first = (int)(rows * blockIdx.x / gridDim.x), last = (int)(rows * (blockIdx.x + 1) / gridDim.x), step = 0;
    Stream stream = {task, ring, first, last, warp_id() >= used};
    for (int i = 0; i < stages; i++) stream.ask(i);
    const Input &input = task.input;
    int64_t start = (int64_t)blockIdx.y * task.inputs;
    float factor = 1, squares = 0, vector[columns][numbers], gain[numbers];
    auto is_there = [&](int c) { return stream.channel(c) < task.inputs; };
    let_next_start();
    wait_for_previous();
    UNROLL for (int c = 0; c < columns; c++) {
        for (float &number : vector[c]) number = 0;
        if (is_there(c)) read_numbers(vector[c], input.x + start + stream.channel(c));
        if (input.up && is_there(c)) {
            read_numbers(gain, input.up + start + stream.channel(c));
            UNROLL for (int i = 0; i < numbers; i++) vector[c][i] =
                plain::gated(vector[c][i], task.input.gelu) * gain[i];
        }
        for (float number : vector[c]) squares += number * number;
    }
    if (input.norm.data) factor = 1 / sqrtf(block_sum(squares, meeting) / task.inputs + input.epsilon);
    UNROLL for (int c = 0; input.norm.data && c < columns; c++) {
        if (!is_there(c)) continue;
        const Tensor &norm = input.norm;
        if (norm.type == DType::f32) read_numbers(gain, (const float *)norm.data + stream.channel(c));
        if (norm.type == DType::f16) read_numbers(gain, (const f16 *)norm.data + stream.channel(c));
        if (norm.type == DType::bf16) read_numbers(gain, (const bf16 *)norm.data + stream.channel(c));
        UNROLL for (int i = 0; i < numbers; i++) vector[c][i] *= factor * gain[i];
    }
    for (int tile = first; tile < last; tile += tile_of_rows) {
        int end = min(tile + tile_of_rows, last);
        for (int base = tile; base < end && !stream.idle; base += rows_together) {
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
                if (lane_id() == 0) partial[(base - tile + r) * stream_warps + warp_id()] = sum;
            }
        }
        __syncthreads();
        for (int v = tile + threadIdx.x; v < end; v += blockDim.x) {
            float sum = 0;
            int row;
            for (int i = 0; i < used; i++) sum += partial[(v - tile) * stream_warps + i];
            const Matrix &matrix = task.find(v, row);
            float &y = matrix.y[(int64_t)blockIdx.y * matrix.linear.weight.rows + row];
            if (matrix.linear.bias.data) sum += number_of(matrix.linear.bias, row);
            y = task.into == Into::add ? y + sum : sum;
        }
        __syncthreads();
    }
    wait_copies<0>();
}

// False if the kernel has no registers for rows of this width.
template <class Number>
bool stream(Gpu &m, const Streams &task, int count) {
    constexpr int numbers = 16 / sizeof(Number);
    int columns = blocks_for(task.inputs, numbers * warp_size * stream_warps);
    if (task.inputs % numbers || columns > most_columns) return false;
    size_t bytes = shared_size(tile_of_rows * stream_warps * sizeof(float)) + shared_size(stream_warps * sizeof(float));
    bytes += shared_size(stream_warps * stages * rows_together * warp_size * sizeof(uint4));
    Grid grid = {dim3(std::min(task.rows(), m.properties.multiProcessorCount), count), block_threads, bytes};
    void (*const kernels[])(Streams) = {linear_kernel<Number, 1>, linear_kernel<Number, 2>, linear_kernel<Number, 4>,
                                        linear_kernel<Number, 8>, linear_kernel<Number, most_columns>};
    int i = 0;
    while (1 << i < columns) i++;
    m.launch(grid, kernels[i], task);
    return true;
}

// ---- Many vectors ------------------------------------------------------------------------------------------

template <class Number>
constexpr cudaDataType_t blas_type = std::is_same_v<Number, float> ? CUDA_R_32F
                                     : std::is_same_v<Number, f16> ? CUDA_R_16F
                                                                   : CUDA_R_16BF;

// y (count, outputs) = or += weight x + bias on the tensor cores; x (part, count, inputs) has the weight's type. One
// part of 16 bits is within 2^-9 (bf16) or 2^-12 (f16) of itself, three hold all of a float32; sums are float32. The
// library stores matrices column by column, so it computes y^T = weight^T^T x^T.
template <class Number>
void multiply(Gpu &m, const Number *x, int count, const Matrix &product, Into into, int parts) {
    const Tensor &weight = product.linear.weight, bias = product.linear.bias;
    int64_t outputs = weight.rows, inputs = weight.cols;
    float *y = product.y, one = 1, keep = into == Into::add ? 1 : 0;
    for (int part = 0; part < parts; part++, x += count * inputs, keep = 1)
        check(CUBLAS(cublasGemmEx_64)(m.blas, CUBLAS_OP_T, CUBLAS_OP_N, outputs, count, inputs, &one, weight.data,
                                      blas_type<Number>, inputs, x, blas_type<Number>, inputs, &keep, y, CUDA_R_32F,
                                      outputs, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
              "cublasGemmEx_64");
    if (!bias.data) return;
    m.for_each(count * (int64_t)blocks_for(outputs, 1024), [=] HOST_DEVICE(int64_t item, Warp team) {
        int64_t vector = item % count, first = item / count * 1024;
        for (int64_t i = first + team.first(); i < outputs && i < first + 1024; i += team.step())
            y[vector * outputs + i] += number_of(bias, i);
    });
}

// ---- Both --------------------------------------------------------------------------------------------------

// Multiplies up to three matrices of one type. Decoding does not round, so only the order of sums depends on the batch.
// Why not one order: to read the weights once for each of 64 sequences took 35 ms a step, this takes 5.
template <class Number>
void multiply(Gpu &m, int count, const Streams &task) {
    constexpr int few = 4;  // up to so many vectors each read the weights by themselves
    Between &between = m.kept<Between>();
    if (count <= few && stream<Number>(m, task, count)) return;
    const int parts = sizeof(Number) < sizeof(float) && (between.decoding || count <= few) ? 3 : 1;
    between.rounded.resize(m, (size_t)parts * count * task.inputs);
    write_input(m, (Number *)between.rounded.data(), task.input, count, task.inputs, parts);
    for (int i = 0; i < task.matrices; i++)
        multiply(m, (const Number *)between.rounded.data(), count, task.matrix[i], task.into, parts);
}

inline void linear(Gpu &m, const float *x, int count, std::initializer_list<Product> products, Into into = Into::set) {
    Between &between = m.kept<Between>();
    if (between.out && between.out != x) fail("the GPU: a product that reads past a norm: this program is at fault");
    Streams task;
    task.input = between.out ? between.input : Input{x, nullptr, {}, 0};
    task.into = into;
    between.out = nullptr;
    for (const Product *next = products.begin(); next != products.end();) {
        const Tensor &first = next->linear.weight;
        task.inputs = (int)first.cols;
        between.products = first.type;
        for (task.matrices = 0; task.matrices < 3 && next != products.end(); next++) {
            if (next->linear.weight.rows == 0) continue;
            if (next->linear.weight.type != first.type) break;
            task.matrix[task.matrices++] = {next->linear, next->y};
        }
        with_numbers(first, [&](auto *numbers) { multiply<std::decay_t<decltype(*numbers)>>(m, count, task); });
    }
}

}  // namespace fast
#endif
