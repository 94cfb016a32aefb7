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
    std::vector<T> get() const {
        std::vector<T> numbers(count);
        card().read(numbers.data(), data(), count * sizeof(T));
        return numbers;
    }
};

// What is wrong with a launch; empty: nothing.
template <class... Parameters>
std::string failure_of(const Grid &grid, void (*kernel)(Parameters...), std::common_type_t<Parameters>... arguments) {
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

// What a process that does this says before it dies; empty if it lives.
std::string dying_words(const std::function<void()> &use) {
    int ends[2], status = 0;
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
    REQUIRE(waitpid(child, &status, 0) == child);
    return status == 0 ? "" : words;
}

__device__ int thread() { return (int)threadIdx.x; }

template <class T>
__device__ void copy_and_commit(Shared<T> to, int i, const T *from, int bytes) {
    copy_async16(to, i, from, bytes);
    commit_copies();
}

// ---- Words -------------------------------------------------------------------------------------------------

TEST_CASE("every thread of every block runs once, wherever it is in a grid of three dimensions") {
    auto kernel = +[](int *out) {
        wait_for_previous();
        unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        out[block * blockDim.x + threadIdx.x] += (int)block + 1;
    };
    Numbers<int> out(4 * 3 * 2 * 40);
    REQUIRE(failure_of({dim3(4, 3, 2), 40}, kernel, out.data()) == "");
    std::vector<int> expected;
    for (size_t i = 0; i < out.count; i++) expected.push_back((int)i / 40 + 1);
    CHECK(out.get() == expected);
}

template <class T>
void check_shuffles(T step) {
    auto kernel = +[](T *out, T step) {
        wait_for_previous();
        for (int by = 0; by < 32; by++)
            out[by * 64 + thread()] = __shfl_xor_sync(all_lanes, (T)((T)(thread() + by) * step), by);
    };
    Numbers<T> out(32 * 64);
    REQUIRE(failure_of({dim3(1), 64}, kernel, out.data(), step) == "");
    std::vector<T> expected;
    for (int by = 0; by < 32; by++)
        for (int i = 0; i < 64; i++) expected.push_back((T)((i ^ by) + by) * step);
    CHECK(out.get() == expected);
}

TEST_CASE("shuffles: every distance, of all types") {
    check_shuffles<int>(-3);
    check_shuffles<float>(0.25f);
    check_shuffles<int64_t>((int64_t)1 << 40);
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
            if (thread() < half) sums[thread()] = sums[thread()] + sums[thread() + half];
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
        Shared<bf16> halves = memory.take<bf16>(64);
        Shared<float> floats = memory.take<float>(64);
        if (thread() < 3) bytes[thread()] = (uint8_t)(thread() + 1);
        halves[thread()] = bf16{(uint16_t)(0x3f80 + thread())};  // 1 + thread / 128
        floats[thread()] = (float)thread();
        __syncthreads();
        int quad = thread() / 4 * 4;
        float4 four = floats.from(4).read<float4>(quad - 4);
        float sum = four.x + to_float(halves[(thread() + 1) % 64]) + (float)(int)bytes[thread() % 3];
        __syncthreads();
        if (thread() % 4 == 0) floats.write(thread(), float4{sum, sum, sum, sum});
        __syncthreads();
        floats[thread()] = floats[thread()];
        out[thread()] = floats[thread()];
    };
    Numbers<float> out(64);
    size_t bytes = shared_size(3) + shared_size(64 * sizeof(bf16)) + shared_size(64 * sizeof(float));
    REQUIRE(failure_of({dim3(2), 64, bytes}, kernel, out.data()) == "");
    std::vector<float> expected;
    for (int i = 0, quad = 0; i < 64; i++, quad = i / 4 * 4)
        expected.push_back((float)quad + 1 + (float)(quad + 1) / 128 + (float)(quad % 3 + 1));
    CHECK(out.get() == expected);
}

TEST_CASE("copies to shared memory: in batches that are waited for one by one, zeros for what is not there") {
    auto kernel = +[](float *out, const float *in, int count) {
        wait_for_previous();
        SharedMemory memory;
        Shared<float> two = memory.take<float>(2 * 128);
        auto bring = [&](int tile) {  // 128 numbers, 4 a thread
            int first = tile * 128 + 4 * thread(), there = max(0, min(4, count - first)) * (int)sizeof(float);
            copy_and_commit(two, tile % 2 * 128 + 4 * thread(), in + first, there);
        };
        bring(0);
        for (int tile = 0; tile < 3; tile++) {
            bring(tile + 1);
            wait_copies<1>();
            __syncwarp();
            for (int i = 0; i < 4; i++) out[tile * 128 + i * 32 + thread()] = two[tile % 2 * 128 + i * 32 + thread()];
            __syncwarp();
        }
        wait_copies<0>();
    };
    Random random{1};
    std::vector<float> numbers = random_floats(random, 301);
    Numbers<float> in(numbers), out(384);
    REQUIRE(failure_of({dim3(1), 32, shared_size(256 * sizeof(float))}, kernel, out.data(), in.data(), 301) == "");
    numbers.resize(384, 0);
    CHECK(out.get() == numbers);
}

// ---- The runtime -------------------------------------------------------------------------------------------

TEST_CASE("memory of the card: NaN before it is written, and as much as there is") {
    void *data = nullptr;
    size_t before = 0, after = 0, all = 0;
    check(cudaMemGetInfo(&before, &all), "cudaMemGetInfo");
    check(cudaMalloc(&data, 100 * sizeof(float)), "cudaMalloc");
    check(cudaMemGetInfo(&after, &all), "cudaMemGetInfo");
    CHECK((before - after == 400 && all == card().properties.totalGlobalMem));
    check(cudaMemsetAsync((float *)data + 50, 0, 200, card().stream), "cudaMemsetAsync");
    std::vector<float> numbers(100);
    card().read(numbers.data(), data, 400);
    for (int i = 0; i < 100; i++) CHECK((i < 50 ? std::isnan(numbers[i]) : numbers[i] == 0));
    CHECK(cudaMemsetAsync(numbers.data(), 0, 400, card().stream) == cudaErrorInvalidValue);
    CHECK(cudaFree((float *)data + 1) == cudaErrorInvalidValue);
    CHECK((cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess));
    check(cudaFree(data), "cudaFree");

    CHECK(cudaMalloc(&data, before + 1) == cudaErrorMemoryAllocation);
    cudaGetLastError();
    CHECK_THROWS_WITH_AS(card().reserve(before + 1, "a test", "make it smaller"), doctest::Contains("GiB free"), Error);
    size_t kept = std::exchange(cuda_on_cpu::properties.totalGlobalMem, all - before + 1000);
    CHECK_THROWS_AS(card().reserve(1001, "a test", "make it smaller"), Error);
    CHECK(card().reserve(1000, "a test", "make it smaller"));
    cuda_on_cpu::properties.totalGlobalMem = kept;
}

TEST_CASE("copies to the host are there when it has waited; those from it may be changed at once") {
    std::vector<int> numbers = {1, 2, 3}, back(3, 0);
    Numbers<int> there(numbers);
    numbers = {4, 5, 6};
    card().write(back.data(), there.data(), 12);
    CHECK(back == std::vector<int>{0, 0, 0});
    card().wait();
    CHECK(back == std::vector<int>{1, 2, 3});
    card().write(back.data(), there.data(), 12);  // for the card what is copied is there: its copies keep their order
    back = {7, 8, 9};
    card().write(there.data(), back.data(), 12);
    CHECK(there.get() == std::vector<int>{1, 2, 3});
}

TEST_CASE("kernels start early only if the card can and their code knows how to wait") {
    CHECK(card().early);
    for (auto [place, old_one] : {std::pair{&cuda_on_cpu::built_for, 80}, {&cuda_on_cpu::properties.major, 8}}) {
        int kept = std::exchange(*place, old_one);
        CHECK_FALSE(Gpu().early);
        *place = kept;
    }
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

TEST_CASE("launches that no card takes are refused; shared memory that is too much, in one line") {
    auto kernel = +[](int *) { wait_for_previous(); };
    auto answer = [&](dim3 grid, dim3 threads, size_t bytes) {
        cudaLaunchConfig_t config;
        config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = bytes;
        config.stream = card().stream;
        cudaError_t error = cudaLaunchKernelEx(&config, kernel, nullptr);
        CHECK(cudaGetLastError() == error);
        return error;
    };
    CHECK(answer(1, 1024, 48 << 10) == cudaSuccess);
    for (dim3 threads : {dim3(1025), dim3(0), dim3(32, 2)})
        CHECK(answer(1, threads, 0) == cudaErrorInvalidConfiguration);
    for (dim3 grid : {dim3(0), dim3(1, 0), dim3(1, 1, 0), dim3(1, 65536), dim3(1, 1, 65536)})
        CHECK(answer(grid, 1, 0) == cudaErrorInvalidConfiguration);
    CHECK(answer(1, 1, (48 << 10) + 16) == cudaErrorInvalidConfiguration);
    constexpr auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    CHECK(cudaFuncSetAttribute(kernel, most, 228 << 10) == cudaErrorInvalidValue);
    cudaGetLastError();
    CHECK(cudaFuncSetAttribute(kernel, most, 100 << 10) == cudaSuccess);
    CHECK(answer(1, 1, 100 << 10) == cudaSuccess);
    CHECK(answer(1, 1, (100 << 10) + 16) == cudaErrorInvalidConfiguration);
    CHECK(failure_of({dim3(1), 32, 227 << 10}, kernel, nullptr) == "");  // launch() asks for it
    CHECK_THROWS_WITH_AS(
        card().launch({dim3(1), 32, 228 << 10}, kernel, nullptr),
        doctest::Contains("takes 233472 bytes of a block's shared memory, a CPU that plays a GPU has 232448"), Error);
}

// What was captured while `record` ran.
cudaGraphExec_t captured(const std::function<void()> &record) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    check(cudaStreamBeginCapture(card().stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    record();
    check(cudaStreamEndCapture(card().stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&exec, graph), "cudaGraphInstantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    return exec;
}

TEST_CASE("a graph does again what was captured, with the data of its time and the arguments of then") {
    auto add = +[](float *to, const float *from, float factor) {
        wait_for_previous();
        to[thread()] += factor * from[thread()];
    };
    Numbers<float> to(32), from(32);
    std::vector<float> input(32), output(32, NAN);
    float factor = 2, one = 1;
    cudaGraphExec_t exec = captured([&] {
        card().write(from.data(), input.data(), 32 * sizeof(float));
        check(cudaMemsetAsync(to.data(), 0, 32 * sizeof(float), card().stream), "cudaMemsetAsync");
        card().launch({dim3(1), 32}, add, to.data(), from.data(), factor);
        check(cublasGemmEx_64(card().blas, CUBLAS_OP_N, CUBLAS_OP_N, 32, 1, 1, &factor, from.data(), CUDA_R_32F, 32,
                              from.data(), CUDA_R_32F, 1, &one, to.data(), CUDA_R_32F, 32, CUBLAS_COMPUTE_32F,
                              CUBLAS_GEMM_DEFAULT),
              "cublasGemmEx_64");
        card().write(output.data(), to.data(), 32 * sizeof(float));
    });
    CHECK(std::isnan(output[0]));  // nothing was done yet
    factor = one = -100;
    for (float start : {1.0f, 5.0f}) {
        for (int i = 0; i < 32; i++) input[i] = start + (float)i;
        check(cudaGraphLaunch(exec, card().stream), "cudaGraphLaunch");
        card().wait();
        for (int i = 0; i < 32; i++) CHECK(output[i] == 2 * input[i] + 2 * input[i] * start);
    }
    check(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");

    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(card().stream, &graph) == cudaErrorIllegalState);
    check(cudaStreamBeginCapture(card().stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    CHECK(cudaStreamSynchronize(card().stream) == cudaErrorStreamCaptureUnsupported);
    CHECK(cudaStreamEndCapture(card().stream, &graph) == cudaErrorStreamCaptureInvalidated);
    CHECK((graph == nullptr && cudaStreamSynchronize(card().stream) == cudaSuccess));
    cudaGetLastError();
}

TEST_CASE("a kernel of a graph that fails says so when the graph is launched") {
    auto kernel = +[](int *) {};
    cudaGraphExec_t exec = captured([&] { card().launch({dim3(1), 32}, kernel, nullptr); });
    CHECK(cudaGraphLaunch(exec, card().stream) == cudaErrorLaunchFailure);
    check_says(cudaGetErrorString(cudaGetLastError()), "wait_for_previous");
    cudaGraphExecDestroy(exec);
}

// ---- cuBLAS ------------------------------------------------------------------------------------------------

TEST_CASE("what cuBLAS cannot do; what it can, tests of the engine's products hold to definitions") {
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

// ---- Broken kernels ----------------------------------------------------------------------------------------

// A kernel that is right or broken, as it is told. `s` has `ints` numbers; `out` has 1,024, which are 0 before.
struct Scene {
    const char *name;
    int threads, ints;
    const char *says;  // of the broken one
    void (*run)(int *out, Shared<int> s, bool right);
    unsigned blocks = 1;
};

void scene_kernel(Scene scene, int *out, bool right) {
    wait_for_previous();
    SharedMemory memory;
    scene.run(out, memory.take<int>(scene.ints), right);
}

const Scene scenes[] = {
    // ---- Barriers that are not met
    {"all threads come to the same barrier", 64, 0, "which is at __syncthreads (test_cuda_on_cpu.cpp:",
     [](int *, Shared<int>, bool right) {
         if (right || thread() < 10) return __syncthreads();
         __syncthreads();
     }},
    {"all come equally often", 64, 0, "waits for thread 3, which has ended",
     [](int *, Shared<int>, bool right) {
         for (int i = 0; i < (right || thread() != 3 ? 4 : 3); i++) __syncthreads();
     }},
    {"all lanes of a warp come to a shuffle", 64, 0,
     "block (0, 0, 0), thread 32: __shfl_xor_sync (test_cuda_on_cpu.cpp:",
     [](int *out, Shared<int>, bool right) {
         if (right || thread() != 40) out[thread()] = __shfl_xor_sync(all_lanes, thread(), 1);
     }},
    {"and to the same one", 32, 0, "which is at __shfl_xor_sync",
     [](int *out, Shared<int>, bool right) {
         if (right || thread() % 2)
             out[thread()] = __shfl_xor_sync(all_lanes, thread(), 1);
         else
             out[thread()] = __shfl_xor_sync(all_lanes, thread(), 1);
     }},
    {"a warp's barrier is not the block's", 64, 0, "__syncwarp",
     [](int *, Shared<int>, bool right) {
         if (!right && thread() == 5)
             __syncthreads();
         else
             __syncwarp();
         if (right || thread() != 5) __syncthreads();
     }},
    {"a warp has 32 lanes", 48, 0, "waits for thread 48, which the block does not have",
     [](int *, Shared<int>, bool right) {
         if (!right || thread() < 32) __syncwarp();
     }},
    {"a shuffle is of all of them", 32, 0, "of mask 0000ffff, not of all lanes",
     [](int *out, Shared<int>, bool right) {
         out[thread()] = __shfl_xor_sync(right ? all_lanes : 0xffff, thread(), 1);
     }},

    // ---- Races
    {"a barrier stands between a write and another thread's read", 64, 64,
     "thread 1: race: reads element 0 of the shared memory from byte 0 on, which thread 0 wrote",
     [](int *out, Shared<int> s, bool right) {
         s[thread()] = thread();
         if (right) __syncthreads();
         out[thread()] = s[max(thread() - 1, 0)];
     }},
    {"between several reads and the write of the last reader", 64, 64,
     "thread 62: race: writes element 62 of the shared memory from byte 0 on, which thread",
     [](int *out, Shared<int> s, bool right) {
         s[thread()] = 0;
         __syncthreads();
         out[thread()] = s[62];
         right ? __syncthreads() : __syncwarp();  // for half of them
         if (thread() == 62) s[62] = 5;
     }},
    {"among the lanes of a warp, too", 32, 32,
     "thread 30: race: writes element 30 of the shared memory from byte 0 on, which thread",
     [](int *out, Shared<int> s, bool right) {
         s[thread()] = 0;
         __syncwarp();
         out[thread()] = s[30];
         if (right) __syncwarp();
         if (thread() == 30) s[30] = 5;
     }},
    {"of other bytes in the same word nothing is said", 64, 64, "race: reads element 0",
     [](int *out, Shared<int>, bool right) {
         SharedMemory memory;
         Shared<uint8_t> bytes = memory.take<uint8_t>(64);
         bytes[thread()] = (uint8_t)thread();
         out[thread()] = bytes[right ? thread() : thread() / 2];
     }},
    {"a barrier stands between a read and another thread's write", 64, 64, "race",
     [](int *, Shared<int> s, bool right) {
         s[thread()] = thread();
         __syncthreads();
         int x = s[thread() ^ 1];
         if (right) __syncthreads();
         s[thread()] = x;
     }},
    {"two buffers need one barrier a round, one buffer two", 64, 128, "race",
     [](int *out, Shared<int> s, bool right) {
         for (int round = 0; round < 4; round++) {
             int buffer = right ? round % 2 * 64 : 0;
             s[buffer + thread()] = round;
             __syncthreads();
             out[thread()] += s[buffer + 63 - thread()];
         }
     }},
    {"__syncwarp() orders a warp, not a block", 64, 64, "race",
     [](int *out, Shared<int> s, bool right) {
         s[thread()] = thread();
         __syncwarp();
         out[thread()] = s[right ? thread() ^ 31 : thread() % 32];
     }},
    {"shuffles order nothing", 32, 32, "race",
     [](int *out, Shared<int> s, bool right) {
         s[thread()] = thread();
         int sum = (int)warp_sum(1);
         if (right) __syncwarp();
         out[thread()] = sum + s[thread() / 2];
     }},
    {"what one warp wrote in two steps, and another one reads", 64, 32, "race: reads element",
     [](int *out, Shared<int> s, bool right) {
         if (thread() < 32) s[thread()] = 1;
         __syncwarp();
         if (thread() < 32) s[31 - thread()] = 2;
         right ? __syncthreads() : __syncwarp();
         out[thread()] = s[thread() % 32];
     }},

    // ---- What is read, and where
    {"what is read was written", 64, 64, "reads element 20 of the shared memory from byte 0 on, which nobody wrote",
     [](int *out, Shared<int> s, bool right) {
         if (right || thread() != 20) s[thread()] = 1;
         __syncthreads();
         out[thread()] = s[thread()];
     }},
    {"in each block anew", 64, 64, "block (1, 0, 0), thread 0: reads element 0",
     [](int *out, Shared<int> s, bool right) {
         if (right || blockIdx.x == 0) s[thread()] = 1;
         out[thread()] = s[thread()];
     },
     2},
    {"an index stays in its piece", 32, 64, "thread 31: 4 bytes at element 32 of a piece of 32",
     [](int *, Shared<int>, bool right) {
         SharedMemory memory;
         Shared<int> first = memory.take<int>(32), second = memory.take<int>(32);
         second[thread()] = 0;
         first[right ? thread() : thread() + 1] = 0;
     }},
    {"before its beginning, too", 32, 32, "at element -1 of a piece of 32",
     [](int *, Shared<int> s, bool right) { s.from(1)[right ? thread() - 1 : thread() - 2] = 0; }},
    {"and all bytes of a wide access do", 32, 30, "16 bytes at element 28 of a piece of 30",
     [](int *, Shared<int> s, bool right) {
         if (thread() == 0) s.write(right ? 24 : 28, uint4{});
     }},
    {"pieces lie in what the launch gave", 32, 28, "takes 128 bytes of shared memory, the launch gave 112",
     [](int *, Shared<int>, bool right) { SharedMemory().take<int>(right ? 28 : 29); }},
    {"all threads take the same", 32, 36, "thread 7: takes bytes [0, 132) of shared memory, another thread [0, 128)",
     [](int *, Shared<int>, bool right) { SharedMemory().take<int>(right || thread() != 7 ? 32 : 33); }},
    {"reads are aligned", 32, 128, "16 bytes not aligned at element 6",
     [](int *out, Shared<int> s, bool right) {
         s.write(4 * thread(), uint4{1, 2, 3, 4});
         __syncwarp();
         out[thread()] = (int)s.read<uint4>(right ? 4 : 6).x;
     }},
    {"writes are", 32, 128, "8 bytes not aligned at element 0",
     [](int *, Shared<int> s, bool right) { s.from(right ? 0 : 1).write(2 * thread(), (uint64_t)1); }},

    // ---- Copies
    {"what is copied is aligned", 32, 128, "16 bytes not aligned at 0x",
     [](int *out, Shared<int> s, bool right) { copy_and_commit(s, 4 * thread(), out + (right ? 0 : 1), 16); }},
    {"so is where it goes", 32, 128, "16 bytes not aligned at element 2",
     [](int *out, Shared<int> s, bool right) { copy_and_commit(s, right ? 4 * thread() : 2, out, 16); }},
    {"a copy has up to 16 bytes", 32, 128, "a copy of -1 bytes",
     [](int *out, Shared<int> s, bool right) { copy_and_commit(s, 4 * thread(), out, right ? 0 : -1); }},
    {"it is nobody's until it has arrived", 32, 128,
     "reads element 0 of the shared memory from byte 0 on before the copy that thread 0 started has arrived",
     [](int *out, Shared<int> s, bool right) {
         copy_and_commit(s, 4 * thread(), out + 4 * thread(), 16);
         if (right) wait_copies<0>();
         out[512 + thread()] = s[4 * thread()];
     }},
    {"and its thread's until a barrier", 32, 128, "thread 1: race: reads element 1",
     [](int *out, Shared<int> s, bool right) {
         copy_and_commit(s, 4 * thread(), out + 4 * thread(), 16);
         wait_copies<0>();
         if (right) __syncwarp();
         out[512 + thread()] = s[thread()];
     }},
    {"another thread's barrier does not wait for it", 32, 128, "before the copy that thread 0 started",
     [](int *out, Shared<int> s, bool right) {
         if (thread() == 0) copy_async16(s, 0, out, 16);
         commit_copies();
         if (right) wait_copies<0>();
         __syncthreads();
         out[512 + thread()] = s[thread() % 4];
     }},
    {"the newer of two batches may still be on its way", 32, 256, "element 128",
     [](int *out, Shared<int> s, bool right) {
         for (int batch = 0; batch < 2; batch++) copy_and_commit(s, batch * 128 + 4 * thread(), out, 16);
         wait_copies<1>();
         out[512 + thread()] = s[(right ? 0 : 128) + 4 * thread()];
     }},
    {"what others still read is not copied over", 64, 64, "race",
     [](int *out, Shared<int> s, bool right) {
         s[thread()] = 1;
         __syncthreads();
         out[512 + thread()] = s[63 - thread()];
         if (right) __syncthreads();
         if (thread() < 16) copy_async16(s, 4 * thread(), out, 16);
         commit_copies();
     }},
    {"copies are committed", 32, 128, "ends with copies it never committed",
     [](int *out, Shared<int> s, bool right) {
         copy_async16(s, 4 * thread(), out, 16);
         if (right) commit_copies();
     }},
};

TEST_CASE("each check fires on the broken kernel and not on the right one") {
    for (const Scene &scene : scenes) {
        CAPTURE(std::string(scene.name));
        Numbers<int> out(1024);
        Grid grid = {dim3(scene.blocks), scene.threads, shared_size(scene.ints * sizeof(int))};
        CHECK(failure_of(grid, scene_kernel, scene, out.data(), true) == "");
        check_says(failure_of(grid, scene_kernel, scene, out.data(), false), scene.says);
        CHECK(failure_of(grid, scene_kernel, scene, out.data(), true) == "");  // and nothing of the failure is left
    }
}

TEST_CASE("every thread waits for the kernel before, also one that returns early") {
    auto kernel = +[](int *, bool right) {
        if (right || thread() != 31) wait_for_previous();
    };
    CHECK(failure_of({dim3(1), 32}, kernel, nullptr, true) == "");
    check_says(failure_of({dim3(1), 32}, kernel, nullptr, false), "thread 31: ends without wait_for_previous()");
}

void failing_kernel(int *out) {
    wait_for_previous();
    if (thread() == 0) *out += 1;
    if (blockIdx.y == 1) __shfl_xor_sync(0x2, 0, 1);
}

TEST_CASE("a failure names the kernel, the block, the thread and the line; later blocks do not run") {
    Numbers<int> out(1);
    std::string failure = failure_of({dim3(2, 3), 32}, failing_kernel, out.data());
    check_says(failure, "failing_kernel");
    check_says(failure, ", block (0, 1, 0), thread 0: ");
    check_says(failure, ", test_cuda_on_cpu.cpp:" + std::to_string(__LINE__ - 8));
    CHECK(out.get()[0] == 3);
}

// ---- The card's memory -------------------------------------------------------------------------------------

TEST_CASE("what a kernel is given, and what it copies from, is the card's memory") {
    auto given = +[](int, const float *) { wait_for_previous(); };
    auto copies = +[](const float *const *list) {
        wait_for_previous();
        copy_and_commit(SharedMemory().take<float>(4), 0, *list, 16);
    };
    std::vector<float> host(100);
    Numbers<float> there(host);
    auto failure = [&](const float *floats) { return failure_of({dim3(1), 1}, given, 3, floats); };
    auto copy_failure = [&](const float *floats) {
        Numbers<const float *> list(std::vector<const float *>{floats});
        return failure_of({dim3(1), 1, 16}, copies, list.data());
    };
    for (const float *right : {there.data(), there.data() + 100, (float *)nullptr}) CHECK(failure(right) == "");
    CHECK(copy_failure(there.data()) == "");
    check_says(failure(host.data()), "argument 2 points to what is not the card's memory");
    check_says(copy_failure((const float *)((uintptr_t)host.data() & ~15)), "is not in the card's memory");
}

TEST_CASE("the sanitizers see unaligned pointers, who leaves the card's memory, and hosts that reach into it") {
    auto read = +[](int *out, const int *in, int at) {
        wait_for_previous();
        if (thread() == 0) *out = in[at];
    };
    auto write = +[](int *out, int at) {
        wait_for_previous();
        out[at] = 1;
    };
    auto wide = +[](int *out, int at) {
        wait_for_previous();
        *(int64_t *)(out + at) = 0;
    };
    struct Place {
        int *at;
    };
    auto through = +[](Place place) {
        wait_for_previous();
        *place.at = 1;
    };
    Numbers<int> in(33), out(1);
    auto reading = [&](int at) {
        return dying_words([&] { card().launch({dim3(1), 32}, read, out.data(), in.data(), at); });
    };
    auto writing = [&](int at) { return dying_words([&] { card().launch({dim3(1), 32}, write, in.data(), at); }); };
    auto writing_wide = [&](int at) { return dying_words([&] { card().launch({dim3(1), 1}, wide, in.data(), at); }); };
    auto writing_to = [&](Place place) { return dying_words([&] { card().launch({dim3(1), 1}, through, place); }); };
    CHECK(reading(32) == "");
    CHECK(writing(32) == "");
    for (int at : {-1, 33}) {
        check_says(reading(at), "AddressSanitizer: heap-buffer-overflow");
        check_says(writing(at), "AddressSanitizer: heap-buffer-overflow");
    }
    CHECK(writing_wide(4) == "");
    check_says(writing_wide(5), "misaligned address");
    check_says(dying_words([&] { card().write(in.data(), out.data(), 8); }), "AddressSanitizer");
    check_says(dying_words([&] { *in.data() = 1; }), "AddressSanitizer: use-after-poison");
    Place freed = {in.data()};
    CHECK(writing_to(freed) == "");
    in.array.memory.reset();
    check_says(writing_to(freed), "AddressSanitizer: heap-use-after-free");
}
