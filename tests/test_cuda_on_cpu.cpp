// cuda_on_cpu.h: CUDA's words do what CUDA says they do, and each check fires on a kernel that is broken on purpose,
// and not on its right twin.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "cuda_on_cpu.h"
// cuda_on_cpu.h comes first
#include "../base/device.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "reference.h"

using reference::Random;
using reference::random_floats;

// ---- Helpers -----------------------------------------------------------------------------------------------

Gpu &card() {
    static Gpu gpu;
    return gpu;
}

template <class T>
std::vector<T> download(const T *from, size_t count) {
    std::vector<T> numbers(count);
    card().read(numbers.data(), from, count * sizeof(T));
    return numbers;
}

// Numbers on the card; zeros if none are given.
template <class T>
struct Numbers {
    size_t count;
    Buffer<T> array;
    explicit Numbers(size_t count) : Numbers(std::vector<T>(count)) {}
    explicit Numbers(const std::vector<T> &from) : count(from.size()) {
        array.memory = card().reserve(count * sizeof(T), "a test", "make it smaller");
        card().write(array.data(), from.data(), count * sizeof(T));
    }
    T *data() const { return array.data(); }
    std::vector<T> get() const { return download(array.data(), count); }
};

// What is wrong with a launch; empty: nothing.
template <class... Parameters>
std::string failure_of(const Grid &grid, void (*kernel)(Parameters...), typename Same<Parameters>::type... arguments) {
    size_t known = cuda_on_cpu::failures.size();
    try {
        card().launch(grid, kernel, arguments...);
    } catch (const Error &error) {
        REQUIRE(cuda_on_cpu::failures.size() == known + 1);
        CHECK(std::string(error.what()).find(cuda_on_cpu::failures.back()) != std::string::npos);
        CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
        return cuda_on_cpu::failures.back();
    }
    CHECK(cuda_on_cpu::failures.size() == known);
    return "";
}

void check_says(const std::string &failure, const std::string &part) {
    CHECK_MESSAGE(failure.find(part) != std::string::npos, "lacks \"" << part << "\": " << failure);
}

// A kernel that is right or broken, as it is told. `out` has 1,024 numbers, which are 0 before.
using Twins = void (*)(int *out, bool right);

// Nothing is wrong with the right one; of the broken one it is said that `part`.
void check_twins(int threads, size_t shared_bytes, Twins kernel, const std::string &part, unsigned blocks = 1) {
    Numbers<int> out(1024);
    Grid grid = {dim3(blocks), threads, shared_bytes};
    CHECK(failure_of(grid, kernel, out.data(), true) == "");
    check_says(failure_of(grid, kernel, out.data(), false), part);
    CHECK(failure_of(grid, kernel, out.data(), true) == "");  // and nothing of the failure is left
}

// What a process that does this says before it dies; empty if it lives.
std::string dying_words(const std::function<void()> &use) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        dup2(ends[1], 2);
        try {
            use();
        } catch (const Error &) {
        }
        _exit(0);
    }
    close(ends[1]);
    std::string words;
    char buffer[4096];
    for (ssize_t count; (count = read(ends[0], buffer, sizeof buffer)) > 0;) words.append(buffer, (size_t)count);
    close(ends[0]);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    return status == 0 ? "" : words;
}

__device__ int thread() { return (int)threadIdx.x; }

// ---- Words -------------------------------------------------------------------------------------------------

TEST_CASE("vectors, whole numbers, bits, functions") {
    CHECK((alignof(uint2) == 8 && alignof(float2) == 8 && alignof(uint4) == 16 && sizeof(uint4) == 16));
    CHECK((min(-1, 2) == -1 && max(-1, 2) == 2));
    CHECK(__funnelshift_r(0x89abcdef, 0x01234567, 8) == 0x6789abcd);
    CHECK(__funnelshift_r(0x89abcdef, 0x01234567, 32) == 0x89abcdef);
    CHECK(__byte_perm(0x33221100, 0x77665544, 0x7520) == 0x77552200);
}

TEST_CASE("every thread of every block runs once, wherever it is in a grid of three dimensions") {
    auto kernel = +[](int *out) {
        wait_for_previous();
        dim3 b = blockDim, g = gridDim;
        unsigned block = (blockIdx.z * g.y + blockIdx.y) * g.x + blockIdx.x;
        unsigned place = (threadIdx.z * b.y + threadIdx.y) * b.x + threadIdx.x;
        out[block * b.x * b.y * b.z + place] += (int)block + 1;
    };
    Numbers<int> out(4 * 3 * 2 * 5 * 3 * 2);
    cudaLaunchConfig_t config;
    config.gridDim = dim3(4, 3, 2);
    config.blockDim = dim3(5, 3, 2);
    config.stream = card().stream;
    check(cudaLaunchKernelEx(&config, kernel, out.data()), "a launch");
    std::vector<int> numbers = out.get(), expected;
    for (size_t i = 0; i < out.count; i++) expected.push_back((int)i / 30 + 1);
    CHECK(numbers == expected);
}

// From the definition of the instruction (PTX ISA, shfl.sync): which lane's value a lane gets.
int source_of(bool xor_lane, int lane, int by, int width) {
    int mask = 32 - width, last = (lane & mask) | (~mask & 31);
    int source = xor_lane ? lane ^ by : (lane & mask) | (by & ~mask & 31);
    return source <= last ? source : lane;
}

template <class T>
void check_shuffles(T step) {
    auto kernel = +[](T *out, T step) {
        wait_for_previous();
        T mine = (T)(thread() + 1) * step;
        for (int width = 1; width <= 32; width *= 2) {
            for (int by = 0; by < 32; by++) {
                out[thread()] = __shfl_sync(all_lanes, mine, by, width);
                out[32 + thread()] = __shfl_xor_sync(all_lanes, mine, by, width);
                out += 64;
            }
        }
    };
    Numbers<T> out(6 * 32 * 64);
    REQUIRE(failure_of({dim3(1), 32}, kernel, out.data(), step) == "");
    std::vector<T> numbers = out.get(), expected;
    for (int width = 1; width <= 32; width *= 2)
        for (int by = 0; by < 32; by++)
            for (bool xor_lane : {false, true})
                for (int lane = 0; lane < 32; lane++)
                    expected.push_back((T)(source_of(xor_lane, lane, by, width) + 1) * step);
    CHECK(numbers == expected);
}

TEST_CASE("shuffles: every kind, distance and width, of all types") {
    check_shuffles<int>(-3);
    check_shuffles<unsigned>(0x07000001);
    check_shuffles<float>(0.25f);
    check_shuffles<int64_t>((int64_t)1 << 40);
    check_shuffles<unsigned long long>(1ull << 58);
}

TEST_CASE("votes, of a warp, of a part of it; parts of a warp go their own ways") {
    auto kernel = +[](int *out) {
        wait_for_previous();
        int lane = lane_id(), sum = 0;
        unsigned mask = lane < 8 ? 0xff : 0xffffff00;
        out[thread()] = __any_sync(all_lanes, lane == 7) + 2 * __any_sync(all_lanes, lane == 32);
        for (int i = 0; i < (lane < 8 ? 3 : 5); i++)
            sum += lane < 8 ? __any_sync(mask, lane == 2) : __shfl_xor_sync(mask, 1, i % 2);
        __syncwarp(mask);
        out[64 + thread()] = sum;
    };
    Numbers<int> out(128);
    REQUIRE(failure_of({dim3(1), 64}, kernel, out.data()) == "");
    std::vector<int> got = out.get();
    for (int i = 0; i < 64; i++) CHECK((got[i] == 1 && got[64 + i] == (i % 32 < 8 ? 3 : 5)));
}

TEST_CASE("barriers in loops: a sum over the block, in halves; blocks may return whole") {
    auto kernel = +[](int *out) {
        wait_for_previous();
        if (blockIdx.x % 2) return;
        SharedMemory memory;
        Shared<int> sums = memory.take<int>((int)blockDim.x);
        sums[thread()] = thread() + (int)blockIdx.x;
        for (int half = (int)blockDim.x / 2; half > 0; half /= 2) {
            __syncthreads();
            if (thread() < half) sums[thread()] += sums[thread() + half];
        }
        if (thread() == 0) out[blockIdx.x] = sums[0];
    };
    for (int threads : {1, 2, 64, 1024}) {
        Numbers<int> out(5);
        REQUIRE(failure_of({dim3(5), threads, shared_size(threads * sizeof(int))}, kernel, out.data()) == "");
        int sum = threads * (threads - 1) / 2;
        CHECK(out.get() == std::vector<int>{sum, 0, sum + 2 * threads, 0, sum + 4 * threads});
    }
}

TEST_CASE("shared memory: pieces of several types, wide reads and writes, 16-bit numbers, parts of a piece") {
    auto kernel = +[](float *out) {
        wait_for_previous();
        SharedMemory memory;
        Shared<uint8_t> bytes = memory.take<uint8_t>(3);
        Shared<f16> halves = memory.take<f16>(64);
        Shared<float> floats = memory.take<float>(64);
        if (thread() < 3) bytes[thread()] = (uint8_t)(thread() + 1);
        from_float(halves[thread()], 0.5f * (float)thread());
        floats[thread()] = 1;
        floats[thread()] += 2;
        floats[thread()] *= 3;
        floats[thread()] -= (float)thread();
        __syncthreads();
        int quad = thread() / 4 * 4, next = (thread() + 1) % 64;
        uint4 four = floats.from(4).read<uint4>(quad == 60 ? -4 : quad - 4);
        float sum = bit_cast<float>(four.x) + to_float(halves[next]) + (float)(int)bytes[thread() % 3] + floats[next];
        __syncthreads();
        if (thread() % 4 == 0)
            for (int i = 0; i < 4; i++) floats.write(thread() + i, bit_cast<uint32_t>(sum));
        __syncthreads();
        floats[thread()] = floats[thread()];
        out[thread()] = floats[thread()];
    };
    Numbers<float> out(64);
    size_t bytes = shared_size(3) + shared_size(64 * sizeof(f16)) + shared_size(64 * sizeof(float));
    REQUIRE(failure_of({dim3(2), 64, bytes}, kernel, out.data()) == "");
    std::vector<float> got = out.get(), expected;
    for (int i = 0; i < 64; i++) {
        int quad = i / 4 * 4;
        expected.push_back(9.0f - (float)(quad == 60 ? 0 : quad) + 0.5f * (float)(quad + 1) + (float)(quad % 3 + 1) +
                           9.0f - (float)(quad + 1));
    }
    CHECK(got == expected);
}

TEST_CASE("copies to shared memory: in batches that are waited for one by one, zeros for what is not there") {
    auto kernel = +[](float *out, const float *in, int count) {
        wait_for_previous();
        SharedMemory memory;
        Shared<float> two = memory.take<float>(2 * 128);
        auto bring = [&](int tile) {  // 128 numbers, 4 a thread
            int first = tile * 128 + 4 * thread();
            copy_async16(two, tile % 2 * 128 + 4 * thread(), in + first, first < count);
            commit_copies();
        };
        int tiles = (count + 127) / 128;
        bring(0);
        for (int tile = 0; tile < tiles; tile++) {
            if (tile + 1 < tiles) bring(tile + 1);
            if (tile + 1 < tiles)
                wait_copies<1>();
            else
                wait_copies<0>();
            __syncwarp();
            for (int i = 0; i < 4; i++) out[tile * 128 + i * 32 + thread()] = two[tile % 2 * 128 + i * 32 + thread()];
            __syncwarp();
        }
    };
    Random random{1};
    std::vector<float> numbers = random_floats(random, 4 * 75);
    Numbers<float> in(numbers), out(384);
    REQUIRE(failure_of({dim3(1), 32, shared_size(256 * sizeof(float))}, kernel, out.data(), in.data(), 300) == "");
    numbers.resize(384, 0);
    CHECK(out.get() == numbers);
}

// ---- Matrix fragments --------------------------------------------------------------------------------------

template <class Number>
struct Matrix16 {
    std::vector<Number> numbers;  // (16, 16)
    std::vector<float> values;
    explicit Matrix16(Random &random) {
        for (float x : random_floats(random, 256)) {
            numbers.emplace_back();
            from_float(numbers.back(), x);
            values.push_back(to_float(numbers.back()));
        }
    }
};

// out (16, 8) += a (16, 16) b (16, 8 of 16)
template <class Number>
void product_kernel(float *out, const Number *a, const Number *b) {
    wait_for_previous();
    int g = lane_id() / 4, c = lane_id() % 4 * 2, at = g * 8 + c;
    auto two = [](Number low, Number high) { return (uint32_t)low.bits | (uint32_t)high.bits << 16; };
    uint32_t quarters[4], halves[2];
    for (int i = 0; i < 4; i++) {  // upper left, lower left, upper right, lower right
        const Number *from = a + (g + i % 2 * 8) * 16 + i / 2 * 8 + c;
        quarters[i] = two(from[0], from[1]);
    }
    for (int i = 0; i < 2; i++) halves[i] = two(b[(c + 8 * i) * 16 + g], b[(c + 1 + 8 * i) * 16 + g]);
    float sums[4];
    for (int i = 0; i < 4; i++) sums[i] = out[at + i / 2 * 64 + i % 2];
    multiply_matrices<Number>(sums, quarters, halves);
    for (int i = 0; i < 4; i++) out[at + i / 2 * 64 + i % 2] = sums[i];
}

template <class Number>
void check_product() {
    Random random{2};
    Matrix16<Number> a(random), b(random);
    std::vector<float> start = random_floats(random, 128);
    Numbers<Number> left(a.numbers), right(b.numbers);
    Numbers<float> out(start);
    REQUIRE(failure_of({dim3(1), 32}, product_kernel<Number>, out.data(), left.data(), right.data()) == "");
    std::vector<float> got = out.get();
    for (int row = 0; row < 16; row++) {
        for (int column = 0; column < 8; column++) {
            double sum = start[row * 8 + column];
            for (int k = 0; k < 16; k++) sum += (double)a.values[row * 16 + k] * b.values[k * 16 + column];
            CHECK(got[row * 8 + column] == (float)sum);
        }
    }
}

TEST_CASE("products of fragments, f16 and bf16") {
    check_product<f16>();
    check_product<bf16>();
}

TEST_CASE("a fragment transposed; two numbers packed; a * b + c of two f16, rounded once, and what rounding left") {
    auto kernel = +[](uint32_t *out) {
        wait_for_previous();
        uint32_t first = (uint32_t)(lane_id() / 4 * 8 + lane_id() % 4 * 2);  // numbers 8 row + column
        out[thread()] = transpose_matrix(first | (first + 1) << 16);
        out[32 + thread()] = pack<f16>(1 + (float)lane_id() / 4096, -2);
        out[64 + thread()] = pack<bf16>(1 + (float)lane_id() / 4096, -2);
        // (1 + 2^-10) (1 - 2^-10) - 1 = -2^-20, where the product alone would round to 1
        out[96 + thread()] = fma_f16(0x3c013c00, 0x3bfe4000, 0xbc003c00);
        out[128 + thread()] = rest_of_product(0x3c013c00, 0x3bfe4000, 0x3c004000);
        out[160 + thread()] = masked_and_flipped(0x12345678, 0x00ff00ff, 0x64806480);
    };
    Numbers<uint32_t> out(192);
    REQUIRE(failure_of({dim3(1), 32}, kernel, out.data()) == "");
    std::vector<uint32_t> got = out.get();
    for (uint32_t lane = 0; lane < 32; lane++) {
        uint32_t row = lane / 4, column = lane % 4 * 2;
        CHECK(got[lane] == ((column * 8 + row) | (column * 8 + 8 + row) << 16));
        f16 half;
        bf16 brain;
        from_float(half, 1 + (float)lane / 4096);
        from_float(brain, 1 + (float)lane / 4096);
        CHECK(got[32 + lane] == (half.bits | 0xc000u << 16));
        CHECK(got[64 + lane] == (brain.bits | 0xc000u << 16));
        CHECK(to_float(f16{(uint16_t)got[96 + lane]}) == 3);
        CHECK(to_float(f16{(uint16_t)(got[96 + lane] >> 16)}) == -0x1p-20f);
        CHECK(to_float(f16{(uint16_t)got[128 + lane]}) == 0);
        CHECK(to_float(f16{(uint16_t)(got[128 + lane] >> 16)}) == -0x1p-20f);
        CHECK(got[160 + lane] == 0x64b464f8);
    }
}

// ---- The runtime -------------------------------------------------------------------------------------------

TEST_CASE("memory of the card: NaN before it is written, as much as there is, copies of the kind that is said") {
    float *data = nullptr;
    size_t before = 0, after = 0, all = 0;
    check(cudaMemGetInfo(&before, &all), "cudaMemGetInfo");
    check(cudaMalloc(&data, 100 * sizeof(float)), "cudaMalloc");
    check(cudaMemGetInfo(&after, &all), "cudaMemGetInfo");
    CHECK(before - after == 400);
    CHECK(all == card().properties.totalGlobalMem);
    for (float x : download(data, 100)) CHECK(std::isnan(x));
    check(cudaMemsetAsync(data + 50, 0, 200, card().stream), "cudaMemsetAsync");
    std::vector<float> numbers = download(data, 100);
    CHECK((std::isnan(numbers[49]) && numbers[50] == 0 && numbers[99] == 0));

    auto answer = [&](cudaMemcpyKind kind) { return cudaMemcpyAsync(data, numbers.data(), 400, kind, card().stream); };
    CHECK(answer(cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK(answer(cudaMemcpyDeviceToDevice) == cudaErrorInvalidValue);
    CHECK(answer(cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    CHECK(cudaMemsetAsync(numbers.data(), 0, 400, card().stream) == cudaErrorInvalidValue);
    CHECK(cudaFree(data + 1) == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaSuccess);
    check(cudaFree(data), "cudaFree");

    void *rest = nullptr;
    CHECK(cudaMalloc(&rest, before + 1) == cudaErrorMemoryAllocation);
    cudaGetLastError();
    CHECK_THROWS_WITH_AS(card().reserve(before + 1, "a test", "make it smaller"), doctest::Contains("GiB free"), Error);
    size_t kept = std::exchange(cuda_on_cpu::properties.totalGlobalMem, all - before + 1000);
    CHECK_THROWS_AS(card().reserve(1001, "a test", "make it smaller"), Error);
    CHECK(card().reserve(1000, "a test", "make it smaller"));
    cuda_on_cpu::properties.totalGlobalMem = kept;
}

TEST_CASE("copies to the host are there when it has waited; those from it may be changed at once") {
    std::vector<int> numbers = {1, 2, 3}, back(3, 0);
    Numbers<int> there(3);
    card().write(there.data(), numbers.data(), 12);
    numbers = {4, 5, 6};
    card().write(back.data(), there.data(), 12);
    CHECK(back == std::vector<int>{0, 0, 0});
    card().wait();
    CHECK(back == std::vector<int>{1, 2, 3});

    card().write(back.data(), there.data(), 12);  // for the card what is copied is there: its copies keep their order
    back = {7, 8, 9};
    card().write(there.data(), back.data(), 12);
    CHECK(download(there.data(), 3) == std::vector<int>{1, 2, 3});

    cudaEvent_t early, late;
    check(cudaEventCreate(&early), "cudaEventCreate");
    check(cudaEventCreate(&late), "cudaEventCreate");
    float milliseconds = -1;
    CHECK(cudaEventElapsedTime(&milliseconds, early, late) == cudaErrorInvalidValue);
    cudaGetLastError();
    std::vector<int> first(3, 0), second(3, 0);
    card().write(first.data(), there.data(), 12);
    check(cudaEventRecord(early, card().stream), "cudaEventRecord");
    card().write(second.data(), there.data(), 12);
    check(cudaEventRecord(late, card().stream), "cudaEventRecord");
    check(cudaEventSynchronize(early), "cudaEventSynchronize");
    CHECK((first == std::vector<int>{1, 2, 3} && second == std::vector<int>{0, 0, 0}));
    check(cudaEventSynchronize(late), "cudaEventSynchronize");
    CHECK(second == std::vector<int>{1, 2, 3});
    check(cudaEventElapsedTime(&milliseconds, early, late), "cudaEventElapsedTime");
    CHECK((milliseconds >= 0 && milliseconds < 60000));
    cudaEventDestroy(early);
    cudaEventDestroy(late);
}

TEST_CASE("no card, and what a card is") {
    int count = 0;
    CHECK((cudaGetDeviceCount(&count) == cudaSuccess && count == 1));
    CHECK((card().properties.major == 9 && card().properties.multiProcessorCount > 0));
    cuda_on_cpu::devices = 0;
    CHECK((cudaGetDeviceCount(&count) == cudaErrorNoDevice && count == 0));
    CHECK_THROWS_WITH_AS(Gpu{}, doctest::Contains("invalid device"), Error);
    cuda_on_cpu::devices = 1;
    cudaGetLastError();
}

TEST_CASE("kernels start early only if the card can and their code knows how to wait") {
    CHECK(card().early);
    cuda_on_cpu::built_for = 80;
    CHECK_FALSE(Gpu().early);
    cuda_on_cpu::built_for = 90;
    cuda_on_cpu::properties.major = 8;
    CHECK_FALSE(Gpu().early);
    cuda_on_cpu::properties.major = 9;
}

TEST_CASE("more shared memory than a block can have is told in one line, as what it is") {
    auto kernel = +[](int *) { wait_for_previous(); };
    std::string told;
    try {
        card().launch({dim3(1), 32, 228 << 10}, kernel, nullptr);
    } catch (const Error &error) {
        told = error.what();
    }
    CHECK(told.find("takes 233472 bytes of a block's shared memory, a CPU that plays a GPU has 232448") != told.npos);
}

TEST_CASE("before it waits a kernel may read what the host brought, but not what a kernel wrote") {
    Numbers<int> brought(32), written(32), out(32);
    auto write = +[](int *to) {
        wait_for_previous();
        to[thread()] = 7;
    };
    auto add = +[](int *to, const int *early, const int *late) {
        int sum = early[thread()];
        wait_for_previous();
        __syncthreads();
        to[thread()] = sum + late[thread()];
    };
    auto words = [&](const int *early, const int *late, bool host_waits) {
        return dying_words([&] {
            card().launch({dim3(2), 32}, write, written.data());
            card().launch({dim3(1), 32}, write, out.data());  // which need not have waited itself by then
            if (host_waits) card().wait();
            card().launch({dim3(2), 32}, add, out.data(), early, late);
        });
    };
    CHECK(words(written.data(), brought.data(), false) == "");
    cuda_on_cpu::early_start = true;
    check_says(words(written.data(), brought.data(), false), "AddressSanitizer: use-after-poison");
    CHECK(words(written.data(), brought.data(), true) == "");
    CHECK(words(brought.data(), written.data(), false) == "");
    cuda_on_cpu::early_start = false;
}

TEST_CASE("launches that no card takes are refused") {
    auto kernel = +[](int *) { wait_for_previous(); };
    auto answer = [&](dim3 grid, dim3 threads, size_t bytes) {
        cudaLaunchConfig_t config;
        config.gridDim = grid;
        config.blockDim = threads;
        config.dynamicSmemBytes = bytes;
        config.stream = card().stream;
        cudaError_t error = cudaLaunchKernelEx(&config, kernel, nullptr);
        CHECK(cudaGetLastError() == error);
        return error;
    };
    CHECK(answer(1, 1024, 48 << 10) == cudaSuccess);
    for (dim3 threads : {dim3(1025), dim3(0), dim3(32, 33), dim3(1, 1, 65)})
        CHECK(answer(1, threads, 0) == cudaErrorInvalidConfiguration);
    for (dim3 grid : {dim3(0), dim3(1, 0), dim3(1, 1, 0), dim3(1, 65536), dim3(1, 1, 65536)})
        CHECK(answer(grid, 1, 0) == cudaErrorInvalidConfiguration);
    CHECK(answer(1, 1, (48 << 10) + 16) == cudaErrorInvalidConfiguration);
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10) ==
          cudaErrorInvalidValue);
    cudaGetLastError();
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10) == cudaSuccess);
    CHECK(answer(1, 1, 100 << 10) == cudaSuccess);
    CHECK(answer(1, 1, (100 << 10) + 16) == cudaErrorInvalidConfiguration);
    CHECK(failure_of({dim3(1), 32, 227 << 10}, kernel, nullptr) == "");  // launch() asks for it
    CHECK_THROWS_AS(card().launch({dim3(1), 32, 228 << 10}, kernel, nullptr), Error);
    cudaGetLastError();
}

TEST_CASE("a graph does again what was captured, with the data of its time and the arguments of then") {
    auto add = +[](float *to, const float *from, float factor) {
        wait_for_previous();
        to[thread()] += factor * from[thread()];
    };
    Numbers<float> to(32), from(32);
    std::vector<float> input(32), output(32, NAN);
    float factor = 2, one = 1;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    check(cudaStreamBeginCapture(card().stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    card().write(from.data(), input.data(), 32 * sizeof(float));
    check(cudaMemsetAsync(to.data(), 0, 32 * sizeof(float), card().stream), "cudaMemsetAsync");
    card().launch({dim3(1), 32}, add, to.data(), from.data(), factor);
    check(cublasGemmEx_64(card().blas, CUBLAS_OP_N, CUBLAS_OP_N, 32, 1, 1, &factor, from.data(), CUDA_R_32F, 32,
                          from.data(), CUDA_R_32F, 1, &one, to.data(), CUDA_R_32F, 32, CUBLAS_COMPUTE_32F,
                          CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx_64");
    card().write(output.data(), to.data(), 32 * sizeof(float));
    check(cudaStreamEndCapture(card().stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&exec, graph), "cudaGraphInstantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    CHECK(std::isnan(output[0]));  // nothing was done yet
    factor = one = -100;
    for (float start : {1.0f, 5.0f}) {
        for (int i = 0; i < 32; i++) input[i] = start + (float)i;
        check(cudaGraphLaunch(exec, card().stream), "cudaGraphLaunch");
        card().wait();
        for (int i = 0; i < 32; i++) {
            float x = start + (float)i;
            CHECK(output[i] == 2 * x + 2 * x * start);
        }
    }
    check(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");

    CHECK(cudaStreamEndCapture(card().stream, &graph) == cudaErrorIllegalState);
    check(cudaStreamBeginCapture(card().stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    CHECK(cudaStreamSynchronize(card().stream) == cudaErrorStreamCaptureUnsupported);
    CHECK(cudaStreamEndCapture(card().stream, &graph) == cudaErrorStreamCaptureInvalidated);
    CHECK(graph == nullptr);
    CHECK(cudaStreamSynchronize(card().stream) == cudaSuccess);
    cudaGetLastError();
}

TEST_CASE("a kernel of a graph that fails says so when the graph is launched") {
    auto kernel = +[](int *) {};
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    check(cudaStreamBeginCapture(card().stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    card().launch({dim3(1), 32}, kernel, nullptr);
    check(cudaStreamEndCapture(card().stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&exec, graph), "cudaGraphInstantiate");
    CHECK(cudaGraphLaunch(exec, card().stream) == cudaErrorLaunchFailure);
    check_says(cudaGetErrorString(cudaGetLastError()), "wait_for_previous");
    cudaGraphDestroy(graph);
    cudaGraphExecDestroy(exec);
}

// ---- cuBLAS ------------------------------------------------------------------------------------------------

// Some rows of `stride` numbers each, as numbers of a type and as their values.
template <class Number>
struct Stored {
    std::vector<Number> numbers;
    std::vector<double> values;
    Stored(Random &random, size_t count) {
        for (float x : random_floats(random, count)) {
            numbers.emplace_back();
            from_float(numbers.back(), x);
            values.push_back(to_float(numbers.back()));
        }
    }
};

template <class Number>
void check_gemm(cudaDataType type, bool turn_a, bool turn_b, float alpha, float beta) {
    Random random{3};
    const int m = 5, n = 3, k = 7, lda = 9, ldb = 8, ldc = 6;
    Stored<Number> a(random, lda * 9), b(random, ldb * 9);
    std::vector<float> c = random_floats(random, ldc * n);
    if (beta == 0) c.assign(c.size(), NAN);
    Numbers<Number> on_card_a(a.numbers), on_card_b(b.numbers);
    Numbers<float> result(c);
    auto turned = [](bool turn) { return turn ? CUBLAS_OP_T : CUBLAS_OP_N; };
    check(cublasGemmEx_64(card().blas, turned(turn_a), turned(turn_b), m, n, k, &alpha, on_card_a.data(), type, lda,
                          on_card_b.data(), type, ldb, &beta, result.data(), CUDA_R_32F, ldc, CUBLAS_COMPUTE_32F,
                          CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx_64");
    std::vector<float> got = result.get();
    for (int column = 0; column < n; column++) {
        for (int row = 0; row < ldc; row++) {
            double sum = 0, old = c[column * ldc + row];
            for (int i = 0; i < k; i++)
                sum += a.values[turn_a ? row * lda + i : i * lda + row] *
                       b.values[turn_b ? i * ldb + column : column * ldb + i];
            double expected = row >= m ? old : alpha * sum + (beta == 0 ? 0 : beta * old);
            if (std::isnan(expected))
                CHECK(std::isnan(got[column * ldc + row]));
            else
                CHECK(got[column * ldc + row] == doctest::Approx(expected).epsilon(1e-5));
        }
    }
}

TEST_CASE("cublasGemmEx_64: all transposes, types and factors; what it cannot do") {
    for (bool turn_a : {false, true}) {
        for (bool turn_b : {false, true}) {
            for (float beta : {0.0f, 1.0f, -0.5f}) {
                check_gemm<float>(CUDA_R_32F, turn_a, turn_b, 1, beta);
                check_gemm<f16>(CUDA_R_16F, turn_a, turn_b, 2, beta);
                check_gemm<bf16>(CUDA_R_16BF, turn_a, turn_b, 1, beta);
            }
        }
    }
    float one = 1, zero = 0;
    Numbers<float> a(64);
    auto answer = [&](int lda, int ldc, cudaDataType type_b, cudaDataType type_c) {
        return cublasGemmEx_64(card().blas, CUBLAS_OP_T, CUBLAS_OP_N, 4, 4, 8, &one, a.data(), CUDA_R_32F, lda,
                               a.data(), type_b, 8, &zero, a.data(), type_c, ldc, CUBLAS_COMPUTE_32F,
                               CUBLAS_GEMM_DEFAULT);
    };
    CHECK(answer(7, 4, CUDA_R_32F, CUDA_R_32F) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(answer(8, 3, CUDA_R_32F, CUDA_R_32F) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(answer(8, 4, CUDA_R_16F, CUDA_R_32F) == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK(answer(8, 4, CUDA_R_32F, CUDA_R_16F) == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK_THROWS_WITH_AS(check(answer(7, 4, CUDA_R_32F, CUDA_R_32F), "a product"),
                         doctest::Contains("unsupported value"), Error);
}

// ---- Barriers that are not met -----------------------------------------------------------------------------

TEST_CASE("all threads come to the same barrier") {
    check_twins(
        64, 0,
        +[](int *out, bool right) {
            wait_for_previous();
            if (right || thread() < 10)
                __syncthreads();
            else
                __syncthreads();
            out[thread()] = 1;
        },
        "which is at __syncthreads (test_cuda_on_cpu.cpp:");
    check_twins(
        64, 0,
        +[](int *, bool right) {
            wait_for_previous();
            if (!right && thread() > 50) return;
            __syncthreads();
        },
        "waits for thread 51, which has ended");
    check_twins(
        64, 0,
        +[](int *, bool right) {
            wait_for_previous();
            for (int i = 0; i < (right || thread() != 3 ? 4 : 3); i++) __syncthreads();
        },
        "waits for thread 3, which has ended");
}

TEST_CASE("all lanes of a mask come to the same shuffle or vote") {
    check_twins(
        64, 0,
        +[](int *out, bool right) {
            wait_for_previous();
            if (!right && thread() == 40) return;
            out[thread()] = __shfl_xor_sync(all_lanes, thread(), 1);
        },
        "block (0, 0, 0), thread (32, 0, 0): __shfl_xor_sync (test_cuda_on_cpu.cpp:");
    check_twins(
        32, 0,
        +[](int *out, bool right) {
            wait_for_previous();
            if (right || thread() % 2)
                out[thread()] = (int)__any_sync(all_lanes, 1);
            else
                out[thread()] = (int)__any_sync(all_lanes, 0);
        },
        "which is at __any_sync");
    check_twins(
        64, 0,
        +[](int *, bool right) {
            wait_for_previous();
            if (!right && thread() == 5)
                __syncthreads();
            else
                __syncwarp();
            if (right || thread() != 5) __syncthreads();
        },
        "__syncwarp");
    check_twins(
        32, 0, +[](int *, bool right) { wait_for_previous(), __syncwarp(right || thread() ? all_lanes : 0xffff); },
        "waits for lane");
    check_twins(
        48, 0,
        +[](int *, bool right) { wait_for_previous(), __syncwarp(right && thread() >= 32 ? 0xffff : all_lanes); },
        "waits for lane 16, which the block does not have");
    check_twins(
        32, 0,
        +[](int *, bool right) {
            wait_for_previous();
            if (right || thread() != 9) transpose_matrix(0);
        },
        "exchange (device.h:");
}

TEST_CASE("a shuffle reads lanes of its mask, a lane is in its own mask, widths are powers of two") {
    check_twins(
        32, 0,
        +[](int *out, bool right) {
            wait_for_previous();
            if (thread() < 16) out[thread()] = __shfl_sync(0xffff, thread(), right ? 15 : 16);
        },
        "__shfl_sync (test_cuda_on_cpu.cpp:");
    check_twins(
        32, 0,
        +[](int *out, bool right) {
            wait_for_previous();
            if (thread() < 16) out[thread()] = __shfl_xor_sync(0xffff, thread(), right ? 8 : 16);
        },
        "not in mask 0000ffff");
    check_twins(
        32, 0, +[](int *, bool right) { wait_for_previous(), __any_sync(right ? all_lanes : 0xfffffffe, 1); },
        "lane 0 is not in its mask fffffffe");
    check_twins(
        32, 0,
        +[](int *out, bool right) {
            wait_for_previous();
            out[thread()] = __shfl_xor_sync(all_lanes, thread(), 1, right ? 16 : 12);
        },
        "width 12");
}

// ---- Shared memory that is used wrongly --------------------------------------------------------------------

__device__ Shared<int> take_ints(int count) {
    SharedMemory memory;
    return memory.take<int>(count);
}

TEST_CASE("a barrier stands between a write and another thread's read") {
    check_twins(
        64, 256,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(64);
            s[thread()] = thread();
            if (right) __syncthreads();
            out[thread()] = s[max(thread() - 1, 0)];
        },
        "thread (1, 0, 0): race: reads element 0 of the shared memory from byte 0 on, which thread 0 wrote");
    check_twins(  // of several readers the last one writes
        64, 256,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(64);
            s[thread()] = 0;
            __syncthreads();
            out[thread()] = s[62];
            if (right) __syncthreads();
            if (thread() == 62) s[62] = 5;
        },
        "thread (62, 0, 0): race: writes element 62 of the shared memory from byte 0 on, which thread");
    check_twins(  // of other bytes in the same word nothing is said
        64, 64,
        +[](int *out, bool right) {
            wait_for_previous();
            SharedMemory memory;
            Shared<uint8_t> s = memory.take<uint8_t>(64);
            s[thread()] = (uint8_t)thread();
            out[thread()] = s[right ? thread() : thread() / 2];
        },
        "race: reads element 0");
}

// Static, whoever calls; other memory each time it is another place.
__device__ Shared<int> static_ints() {
    STATIC_SHARED(int, ints, 64);
    return ints;
}

TEST_CASE("static shared memory: a place in the source has one, beside what the launch gives") {
    auto kernel = +[](int *out) {
        STATIC_SHARED(int, own, 64);
        STATIC_SHARED(uint8_t, three, 3);
        Shared<int> given = take_ints(64), shared = static_ints();
        wait_for_previous();
        own[thread()] = thread();
        given[thread()] = 100 * thread();
        shared[thread()] = 10000 * thread();
        if (thread() < 3) three[thread()] = (uint8_t)thread();
        __syncthreads();
        int next = (thread() + 1) % 64;
        out[thread()] = own[next] + given[next] + static_ints()[next] + three[thread() % 3];
    };
    Numbers<int> out(64);
    REQUIRE(failure_of({dim3(2), 64, shared_size(64 * sizeof(int))}, kernel, out.data()) == "");
    std::vector<int> got = out.get();
    for (int i = 0; i < 64; i++) CHECK(got[i] == 10101 * ((i + 1) % 64) + i % 3);
}

TEST_CASE("static shared memory is watched like any other, and there are 48 KiB of it") {
    check_twins(
        64, 0,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = static_ints();
            if (right || thread() != 5) s[thread()] = thread();
            __syncthreads();
            out[thread()] = s[thread() ^ 1];
        },
        "thread (4, 0, 0): reads element 5 of STATIC_SHARED (test_cuda_on_cpu.cpp");
    check_twins(
        64, 0,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = static_ints();
            s[thread()] = thread();
            if (right) __syncthreads();
            out[thread()] = s[max(thread() - 1, 0)];
        },
        "thread (1, 0, 0): race: reads element 0 of STATIC_SHARED (test_cuda_on_cpu.cpp");
    check_twins(
        64, 0,
        +[](int *, bool right) {
            wait_for_previous();
            static_ints()[thread() + (right ? 0 : 1)] = 0;
        },
        "4 bytes at element 64 of a piece of 64");
    check_twins(
        64, 0,
        +[](int *, bool right) {
            wait_for_previous();
            if (right) return;
            STATIC_SHARED(int, large, 12 << 10);
            STATIC_SHARED(int, one_more, 1);
            large[0] = one_more[0] = thread();
        },
        "has 49168 bytes of static shared memory beside the launch's 0");
}

TEST_CASE("a barrier stands between a read and another thread's write") {
    check_twins(
        64, 256,
        +[](int *, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(64);
            s[thread()] = thread();
            __syncthreads();
            int x = s[thread() ^ 1];
            if (right) __syncthreads();
            s[thread()] = x;
        },
        "race");
    check_twins(  // two buffers need one barrier a round, one buffer two
        64, 512,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(128);
            for (int round = 0; round < 4; round++) {
                int buffer = right ? round % 2 * 64 : 0;
                s[buffer + thread()] = round;
                __syncthreads();
                out[thread()] += s[buffer + 63 - thread()];
            }
        },
        "race");
}

TEST_CASE("__syncwarp() orders a warp, not a block; shuffles order nothing") {
    check_twins(
        64, 256,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(64);
            s[thread()] = thread();
            __syncwarp();
            out[thread()] = s[right ? thread() ^ 31 : thread() % 32];
        },
        "race");
    check_twins(
        32, 256,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(64);
            s[thread()] = thread();
            int sum = (int)warp_sum(1);
            if (right) __syncwarp();
            out[thread()] = sum + s[thread() / 2];
        },
        "race");
    check_twins(  // what one warp wrote in two steps, and another one reads
        64, 256,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(64);
            if (thread() < 32) s[thread()] = 1;
            __syncwarp();
            if (thread() < 32) s[31 - thread()] += 1;
            if (right)
                __syncthreads();
            else
                __syncwarp();
            out[thread()] = s[thread() % 32];
        },
        "race: reads element");
}

TEST_CASE("shared memory is written before it is read, in each block anew") {
    check_twins(
        64, 256,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(64);
            if (right || thread() != 20) s[thread()] = 1;
            __syncthreads();
            out[thread()] = s[thread()];
        },
        "reads element 20 of the shared memory from byte 0 on, which nobody wrote");
    check_twins(
        64, 256,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(64);
            if (right || blockIdx.x == 0) s[thread()] = 1;
            out[thread()] = s[thread()];
        },
        "block (1, 0, 0), thread (0, 0, 0): reads element 0", 2);
}

TEST_CASE("an index stays in its piece, the pieces in what the launch gave, and all threads take the same") {
    check_twins(
        32, 512,
        +[](int *, bool right) {
            wait_for_previous();
            SharedMemory memory;
            Shared<int> first = memory.take<int>(32), second = memory.take<int>(32);
            second[thread()] = 0;
            first[right ? thread() : thread() + 1] = 0;
        },
        "thread (31, 0, 0): 4 bytes at element 32 of a piece of 32");
    check_twins(
        32, 512,
        +[](int *, bool right) {
            wait_for_previous();
            SharedMemory memory;
            Shared<int> first = memory.take<int>(32), second = memory.take<int>(32);
            first[thread()] = 0;
            second.from(1)[right ? thread() - 1 : thread() - 2] = 0;
        },
        "at element -1 of a piece of 32");
    check_twins(
        32, 512,
        +[](int *, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(30);
            if (thread() == 0) s.write(right ? 24 : 28, uint4{});
        },
        "16 bytes at element 28 of a piece of 30");
    check_twins(
        32, 112, +[](int *, bool right) { wait_for_previous(), take_ints(right ? 28 : 29); },
        "takes 128 bytes of shared memory, the launch gave 112");
    check_twins(
        32, 512, +[](int *, bool right) { wait_for_previous(), take_ints(right || thread() != 7 ? 32 : 33); },
        "thread (7, 0, 0): takes bytes [0, 132) of shared memory, another thread [0, 128)");
}

TEST_CASE("wide accesses are aligned") {
    check_twins(
        32, 512,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(128);
            s.write(4 * thread(), uint4{1, 2, 3, 4});
            __syncwarp();
            out[thread()] = (int)s.read<uint4>(right ? 4 : 6).x;
        },
        "16 bytes not aligned at element 6");
    check_twins(
        32, 512,
        +[](int *, bool right) {
            wait_for_previous();
            take_ints(128).from(right ? 0 : 1).write(2 * thread(), uint2{1, 2});
        },
        "8 bytes not aligned at element 0");
    check_twins(
        32, 0,
        +[](int *out, bool right) {
            wait_for_previous();
            uint4 four = load_once(out + (right ? 4 : 2));
            out[thread() + 32] = (int)four.x;
        },
        "16 bytes not aligned at 0x");
    check_twins(
        32, 512,
        +[](int *out, bool right) {
            wait_for_previous();
            copy_async16(take_ints(128), 4 * thread(), out + (right ? 0 : 1), true);
            commit_copies();
        },
        "16 bytes not aligned at 0x");
    check_twins(
        32, 512,
        +[](int *out, bool right) {
            wait_for_previous();
            copy_async16(take_ints(128), right ? 4 * thread() : 2, out, true);
            commit_copies();
        },
        "16 bytes not aligned at element 2");
}

TEST_CASE("so are accesses through pointers, or the sanitizer says so") {
    auto kernel = +[](float *out, int at) {
        wait_for_previous();
        out[0] = (float)*(const int64_t *)(out + at);
    };
    Numbers<float> out(16);
    CHECK(dying_words([&] { card().launch({dim3(1), 1}, kernel, out.data(), 4); }) == "");
    check_says(dying_words([&] { card().launch({dim3(1), 1}, kernel, out.data(), 5); }), "misaligned address");
}

TEST_CASE("a copy's bytes are nobody's until it has arrived, and its thread's until a barrier") {
    check_twins(
        32, 512,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(128);
            copy_async16(s, 4 * thread(), out + 4 * thread(), true);
            commit_copies();
            if (right) wait_copies<0>();
            out[512 + thread()] = s[4 * thread()];
        },
        "reads element 0 of the shared memory from byte 0 on before the copy that thread 0 started has arrived");
    check_twins(
        32, 512,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(128);
            copy_async16(s, 4 * thread(), out + 4 * thread(), true);
            commit_copies();
            wait_copies<0>();
            if (right) __syncwarp();
            out[512 + thread()] = s[thread()];
        },
        "thread (1, 0, 0): race: reads element 1");
    check_twins(  // another thread's barrier does not wait for the copy
        32, 512,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(128);
            if (thread() == 0) {
                copy_async16(s, 0, out, true);
                commit_copies();
                if (right) wait_copies<0>();
            }
            __syncthreads();
            out[512 + thread()] = s[thread() % 4];
        },
        "before the copy that thread 0 started");
    check_twins(  // the newer of two batches may still be on its way
        32, 1024,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(256);
            for (int batch = 0; batch < 2; batch++) {
                copy_async16(s, batch * 128 + 4 * thread(), out, true);
                commit_copies();
            }
            wait_copies<1>();
            out[512 + thread()] = s[(right ? 0 : 128) + 4 * thread()];
        },
        "element 128");
    check_twins(  // what others still read is not copied over
        64, 256,
        +[](int *out, bool right) {
            wait_for_previous();
            Shared<int> s = take_ints(64);
            s[thread()] = 1;
            __syncthreads();
            out[512 + thread()] = s[63 - thread()];
            if (right) __syncthreads();
            if (thread() < 16) copy_async16(s, 4 * thread(), out, true);
            commit_copies();
        },
        "race");
    check_twins(
        32, 512,
        +[](int *out, bool right) {
            wait_for_previous();
            copy_async16(take_ints(128), 4 * thread(), out, true);
            if (right) commit_copies();
        },
        "ends with copies it never committed");
}

// ---- Order, arguments, the card's memory -------------------------------------------------------------------

TEST_CASE("every thread waits for the kernel before, also one that returns early") {
    check_twins(
        32, 0,
        +[](int *, bool right) {
            if (!right && thread() == 31) return;
            wait_for_previous();
        },
        "thread (31, 0, 0): ends without wait_for_previous()");
}

void failing_kernel(int *out) {
    wait_for_previous();
    if (thread() == 0) *out += 1;
    if (blockIdx.y == 1) __shfl_sync(0x2, 0, 1);
}

TEST_CASE("a failure names the kernel, the block, the thread and the line; later blocks do not run") {
    Numbers<int> out(1);
    std::string failure = failure_of({dim3(2, 3), 32}, failing_kernel, out.data());
    check_says(failure, "failing_kernel");
    check_says(failure, ", block (0, 1, 0), thread (0, 0, 0): ");
    check_says(failure, ", test_cuda_on_cpu.cpp:" + std::to_string(__LINE__ - 8));
    CHECK(out.get()[0] == 3);
}

TEST_CASE("what a kernel is given, and what it copies from, is the card's memory") {
    auto kernel = +[](int, const float *) { wait_for_previous(); };
    auto indirect = +[](const float *const *list) {
        wait_for_previous();
        load_once(*list);
    };
    std::vector<float> host(100);
    Numbers<float> there(host);
    auto failure = [&](const float *floats) { return failure_of({dim3(1), 1}, kernel, 3, floats); };
    auto indirect_failure = [&](const float *floats) {
        Numbers<const float *> list(std::vector<const float *>{floats});
        return failure_of({dim3(1), 1}, indirect, list.data());
    };
    CHECK(failure(there.data()) == "");
    CHECK(failure(there.data() + 100) == "");
    CHECK(failure(nullptr) == "");
    CHECK(indirect_failure(there.data()) == "");
    check_says(failure(host.data()), "argument 2 points to what is not the card's memory");
    check_says(indirect_failure((const float *)((uintptr_t)host.data() & ~15)), "is not in the card's memory");
}

TEST_CASE("AddressSanitizer sees who leaves the card's memory, and hosts that reach into it") {
    auto read = +[](int *out, const int *in, int at) {
        wait_for_previous();
        if (thread() == 0) *out = in[at];
    };
    auto write = +[](int *out, int at) {
        wait_for_previous();
        out[at] = 1;
    };
    Numbers<int> in(33), out(1);
    auto reading = [&](int at) {
        return dying_words([&] { card().launch({dim3(1), 32}, read, out.data(), in.data(), at); });
    };
    auto writing = [&](int at) { return dying_words([&] { card().launch({dim3(1), 32}, write, in.data(), at); }); };
    CHECK(reading(32) == "");
    CHECK(writing(32) == "");
    for (int at : {-1, 33}) {
        check_says(reading(at), "AddressSanitizer: heap-buffer-overflow");
        check_says(writing(at), "AddressSanitizer: heap-buffer-overflow");
    }
    check_says(dying_words([&] { card().write(in.data(), out.data(), 8); }), "AddressSanitizer");
    check_says(dying_words([&] { *in.data() = 1; }), "AddressSanitizer: use-after-poison");
    struct Place {
        int *at;
    };
    auto through = +[](Place place) {
        wait_for_previous();
        *place.at = 1;
    };
    Place freed = {in.data()};
    CHECK(dying_words([&] { card().launch({dim3(1), 1}, through, freed); }) == "");
    in.array.memory.reset();
    check_says(dying_words([&] {
                   card().launch({dim3(1), 1}, through, freed);
               }),
               "AddressSanitizer: heap-use-after-free");
}
