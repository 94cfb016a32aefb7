// The GPU under the kernels: its memory, how a kernel is launched, and the few instructions that C++ has no word for.
//
// A kernel is written once. nvcc compiles it for the GPU. Where there is none, tests/cuda_on_cpu.h gives g++ what the
// toolkit would, and runs the same source thread by thread on the CPU, with checks; it defines CUDA_ON_CPU. For that,
// kernels keep to CUDA's basic words (threadIdx, __syncthreads, __shfl_sync, ...) and to what stands here:
//   Shared<T>            shared memory: of a size the launch gives, piece by piece from SharedMemory, or STATIC_SHARED
//   wait_for_previous()  called by every thread of every kernel before it touches what another kernel writes or reads
//   the last part        asynchronous copies, matrix fragments and products, each with its plain twin
#pragma once

#include <variant>

#include "team.h"

#if defined(__CUDACC__) || defined(CUDA_ON_CPU)
#define HAS_CUDA

#ifndef CUDA_ON_CPU
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#endif

#include <memory>
#include <type_traits>
#include <vector>

#include "formats.h"
#include "team.h"

// ---- Errors, memory ----------------------------------------------------------------------------------------

inline const char *cure_of(cudaError_t error) {
    switch (error) {
        case cudaErrorMemoryAllocation:
            return "lower -c, or free memory of the card";
        case cudaErrorDevicesUnavailable:
            return "end the program that has the card to itself";
        case cudaErrorInsufficientDriver:
        case cudaErrorUnsupportedPtxVersion:
            return "install a driver as new as the toolkit";
        case cudaErrorNoKernelImageForDevice:
            return "build for this card, make CUDA_ARCH=...";
        case cudaErrorIllegalAddress:
        case cudaErrorMisalignedAddress:
        case cudaErrorLaunchFailure:
            return "this program is at fault, make sanitize-gpu says where";
        default:
            return "another driver or card may help";
    }
}

// Throws unless `error` is success. `what` names the call.
inline void check(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    fail("CUDA: %s: %s: %s; --device cpu needs no card", what, cudaGetErrorString(error), cure_of(error));
}

#ifdef CUDA_ON_CPU
#define CUBLAS(function) function
#else
// cuBLAS is loaded when a card is to compute, and not at each start of the program, which would take 0.1 s longer.
inline void *cublas_symbol(const char *name) {
    static const std::string file = "libcublas.so." + std::to_string(CUBLAS_VER_MAJOR);
    static void *library = dlopen(file.c_str(), RTLD_LAZY);
    void *symbol = library ? dlsym(library, name) : nullptr;
    if (!symbol) fail("%s: %s: install the CUDA toolkit's libraries, or use --device cpu", file.c_str(), dlerror());
    return symbol;
}
#define CUBLAS_NAME(function) #function
#define CUBLAS(function) ((decltype(&function))cublas_symbol(CUBLAS_NAME(function)))
#endif

inline void check(cublasStatus_t status, const char *what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fail("cuBLAS: %s: %s: another driver or card may help; --device cpu needs neither", what,
         CUBLAS(cublasGetStatusString)(status));
}

__global__ void nothing() {}

// What the compiler says about a kernel; an error if the program was not built for this card.
inline cudaError_t about_build(cudaFuncAttributes &about) { return cudaFuncGetAttributes(&about, nothing); }

// The card that computes: a stream on which all its work goes, in order. Lives longer than all memory taken from it.
struct Device {
    cudaDeviceProp properties = {};
    cudaStream_t stream = nullptr;
    cublasHandle_t blas = nullptr;
    bool early = false;  // kernels wait for the one before where they must: see launch()
    Device() {
        check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
        cudaFuncAttributes about;
        check(about_build(about), "cudaFuncGetAttributes");
        early = properties.major >= 9 && about.ptxVersion >= 90;
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        check(CUBLAS(cublasCreate)(&blas), "cublasCreate");
        check(CUBLAS(cublasSetStream)(blas, stream), "cublasSetStream");
    }
    Device(const Device &) = delete;
    ~Device() {
        CUBLAS(cublasDestroy)(blas);
        cudaStreamDestroy(stream);
    }
    int multiprocessors() const { return properties.multiProcessorCount; }
    void wait() const { check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }
};

inline size_t free_memory() {
    size_t available = 0, all = 0;
    check(cudaMemGetInfo(&available, &all), "cudaMemGetInfo");
    return available;
}

// Memory on the card, whatever is in it. `what` needs it, `cure` says what to do if it cannot be had.
inline std::shared_ptr<void> device_memory(const Device &device, size_t bytes, const char *what, const char *cure) {
    void *data = nullptr;
    size_t available = free_memory();
    if (bytes > available || cudaMalloc(&data, std::max<size_t>(bytes, 1)) != cudaSuccess) {
        cudaGetLastError();  // was told
        fail("%s: %.3f GiB are needed, %s has %.3f GiB free: %s", what, (double)bytes / 0x1p30, device.properties.name,
             (double)available / 0x1p30, cure);
    }
    return std::shared_ptr<void>(data, [](void *start) { cudaFree(start); });
}

// Numbers on the card. resize() keeps none of them; it says whether they are elsewhere now. One token more a step, as
// on the naive path, does not move them each time.
template <class T>
struct DeviceArray {
    std::shared_ptr<void> memory;
    size_t room = 0;
    T *data() const { return (T *)memory.get(); }
    bool resize(const Device &device, size_t count) {
        if (count <= room) return false;
        device.wait();  // what was launched may still use the old memory
        memory.reset();
        size_t more = std::max(count, room + room / 2);
        room = more * sizeof(T) <= free_memory() ? more : count;
        memory = device_memory(device, room * sizeof(T), "the activations of this many tokens",
                               "shorten the prompt or lower -c");
        return true;
    }
};

// From or to the card, in the order of the stream. `from` may change when the call returns; `to` is there after wait().
inline void copy(const Device &device, void *to, const void *from, size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, device.stream), "cudaMemcpyAsync");
}

template <class T>
DeviceArray<T> upload(const Device &device, const std::vector<T> &numbers) {
    DeviceArray<T> array;
    array.resize(device, numbers.size());
    copy(device, array.data(), numbers.data(), numbers.size() * sizeof(T));
    return array;
}

template <class T>
std::vector<T> download(const Device &device, const T *from, size_t count) {
    std::vector<T> numbers(count);
    copy(device, numbers.data(), from, count * sizeof(T));
    device.wait();
    return numbers;
}

// ---- Launching ---------------------------------------------------------------------------------------------

struct Grid {
    dim3 blocks;
    int threads;              // of a block
    size_t shared_bytes = 0;  // sum of what the kernel takes, each piece by shared_size()
};

template <class T>
struct Same {
    using type = T;
};

// Starts kernel(arguments...). Its blocks may start while the last blocks of the kernel before are still at work
// ("programmatic dependent launch", compute capability 9.0 and later, in the card and in the code, which may be older
// PTX), which is what wait_for_previous() is for.
template <class... Parameters>
void launch(const Device &device, const Grid &grid, void (*kernel)(Parameters...),
            typename Same<Parameters>::type... arguments) {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid.blocks;
    config.blockDim = dim3(grid.threads);
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = device.stream;
    config.attrs = &early;
    config.numAttrs = device.early ? 1 : 0;
    if (grid.shared_bytes > device.properties.sharedMemPerBlockOptin) {
        fail(
            "attention over heads this wide takes %zu bytes of a block's shared memory, %s has %zu: --device cpu has "
            "room",
            grid.shared_bytes, device.properties.name, device.properties.sharedMemPerBlockOptin);
    }
    if (grid.shared_bytes > 48 << 10) {  // must be asked for
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)grid.shared_bytes),
              "cudaFuncSetAttribute");
    }
    const char *name = "a kernel";
    cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
    if (error != cudaSuccess) cudaFuncGetName(&name, (const void *)kernel);
    check(error, name);
}

// ---- Shared memory -----------------------------------------------------------------------------------------

HOST_DEVICE constexpr size_t shared_size(size_t bytes) { return (bytes + 15) / 16 * 16; }

#ifndef CUDA_ON_CPU
// Numbers in shared memory. read() and write() move several at once; their first must be aligned to all of them.
template <class T>
struct Shared {
    T *data;
    __device__ T &operator[](int i) const { return data[i]; }
    template <class Wide>
    __device__ Wide read(int i) const {
        return *(const Wide *)(data + i);
    }
    template <class Wide>
    __device__ void write(int i, Wide value) const {
        *(Wide *)(data + i) = value;
    }
    __device__ Shared from(int i) const { return {data + i}; }
};

// Room for `count` numbers, a constant, which no launch has to ask for: 48 KiB of a block at most.
#define STATIC_SHARED(T, name, count)   \
    __shared__ T name##_numbers[count]; \
    Shared<T> name = {name##_numbers}

// The block's shared memory, handed out from its beginning. All threads of a block take the same pieces.
struct SharedMemory {
    char *next;
    __device__ SharedMemory() {
        extern __shared__ __align__(16) char start[];
        next = start;
    }
    template <class T>
    __device__ Shared<T> take(int count) {
        Shared<T> piece = {(T *)next};
        next += shared_size(count * sizeof(T));
        return piece;
    }
};
#endif

// ---- Instructions ------------------------------------------------------------------------------------------

// Before a loop over registers: they are no array, so each must be named.
#ifdef CUDA_ON_CPU
#define UNROLL
#else
#define UNROLL _Pragma("unroll")
#endif

constexpr int warp_size = 32;
constexpr unsigned all_lanes = 0xffffffff;

__device__ inline int lane_id() { return (int)(threadIdx.x % warp_size); }  // of unsigned numbers: one instruction
__device__ inline int warp_id() { return (int)(threadIdx.x / warp_size); }

// Returns when the kernel before has ended and what it wrote can be seen.
__device__ inline void wait_for_previous() {
#ifdef CUDA_ON_CPU
    cuda_on_cpu::note_wait();
#elif __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once all blocks have said so, those of the next kernel may start, and go on until their wait_for_previous().
__device__ inline void let_next_start() {
#if !defined(CUDA_ON_CPU) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline float warp_sum(float x) {
    for (int step = warp_size / 2; step > 0; step /= 2) x += __shfl_xor_sync(all_lanes, x, step);
    return x;
}

__device__ inline float warp_max(float x) {
    for (int step = warp_size / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(all_lanes, x, step));
    return x;
}

// A warp that encodes a row together (cache.h). Only called on the card.
struct Warp {
    static constexpr int step = warp_size;
    HOST_DEVICE int first() const {
#if defined(__CUDA_ARCH__) || defined(CUDA_ON_CPU)
        return lane_id();
#else
        return 0;
#endif
    }
    HOST_DEVICE float largest(float x) const {
#if defined(__CUDA_ARCH__) || defined(CUDA_ON_CPU)
        x = warp_max(x);
#endif
        return x;
    }
};

// 2^x within 2 units in the last place, in one instruction; 0 below 2^-126.
__device__ inline float exp2_fast(float x) {
#ifdef CUDA_ON_CPU
    return x < -126 ? 0 : exp2f(x);
#else
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#endif
}

// 16 bytes that are read once: they do not push out of the L1 what is read often. `from` is aligned to 16 bytes.
__device__ inline uint4 load_once(const void *from) {
#ifdef CUDA_ON_CPU
    return cuda_on_cpu::load<uint4>(from);
#else
    uint4 bytes;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bytes.x), "=r"(bytes.y), "=r"(bytes.z), "=r"(bytes.w)
                 : "l"(from));
    return bytes;
#endif
}

// Asks for 16 bytes to be copied to to[i] and behind; zeros if they are not `there`. Both are aligned to 16 bytes.
// commit_copies() closes a batch of a thread's copies; wait_copies<n>() waits until at most n batches of this thread
// are on their way. Other threads see them after the next barrier.
template <class T>
__device__ inline void copy_async16(Shared<T> to, int i, const void *from, bool there) {
#ifdef CUDA_ON_CPU
    cuda_on_cpu::copy_async(to, i, from, there);
#else
    unsigned at = (unsigned)__cvta_generic_to_shared(&to[i]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(there ? 16 : 0) : "memory");
#endif
}

__device__ inline void commit_copies() {
#ifdef CUDA_ON_CPU
    cuda_on_cpu::commit_copies();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int most>
__device__ inline void wait_copies() {
#ifdef CUDA_ON_CPU
    cuda_on_cpu::wait_copies(most);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(most) : "memory");
#endif
}

// A fragment is a warp's share of a matrix of 16-bit numbers, two in a register: the 8 x 8 matrix of a register has row
// lane / 4 and columns 2 (lane % 4) and the next one in each lane.

// Four 8 x 8 matrices from shared memory: matrix m's row r begins at from[i] of lane 8 m + r, aligned to 16 bytes.
template <class T>
__device__ inline void load_matrices(uint32_t (&matrices)[4], Shared<T> from, int i) {
#ifdef CUDA_ON_CPU
    uint4 row = from.template read<uint4>(i);
    const uint4 *rows = cuda_on_cpu::exchange(row);
    for (int m = 0; m < 4; m++) matrices[m] = ((const uint32_t *)&rows[8 * m + lane_id() / 4])[lane_id() % 4];
#else
    unsigned at = (unsigned)__cvta_generic_to_shared(&from[i]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(at)
                 : "memory");
#endif
}

// The same, each matrix transposed.
template <class T>
__device__ inline void load_matrices_transposed(uint32_t (&matrices)[4], Shared<T> from, int i) {
#ifdef CUDA_ON_CPU
    uint4 row = from.template read<uint4>(i);
    const uint4 *rows = cuda_on_cpu::exchange(row);
    int column = lane_id() / 4, first = 2 * (lane_id() % 4);
    for (int m = 0; m < 4; m++) {
        auto number = [&](int r) { return (uint32_t)((const uint16_t *)&rows[8 * m + r])[column]; };
        matrices[m] = number(first) | number(first + 1) << 16;
    }
#else
    unsigned at = (unsigned)__cvta_generic_to_shared(&from[i]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(at)
                 : "memory");
#endif
}

// The 8 x 8 matrix of a register, transposed.
__device__ inline uint32_t transpose_matrix(uint32_t matrix) {
#ifdef CUDA_ON_CPU
    const uint32_t *all = cuda_on_cpu::exchange(matrix);
    auto number = [&](int row, int column) { return all[4 * row + column / 2] >> 16 * (column % 2) & 0xffff; };
    int row = lane_id() / 4, first = 2 * (lane_id() % 4);
    return number(first, row) | number(first + 1, row) << 16;
#else
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
    return result;
#endif
}

// sums (16, 8) += a (16, 16) b (16, 8) for one warp. The registers of a are its 8 x 8 quarters: upper left, lower left,
// upper right, lower right. Those of b are its upper and its lower half, each transposed (row n of it is column n of
// b). sums[0], sums[1] are row lane / 4, columns 2 (lane % 4) and the next one; sums[2], sums[3] the same 8 rows below.
template <class Number>  // f16 or bf16
__device__ inline void multiply_matrices(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef CUDA_ON_CPU
    struct Fragments {
        uint32_t a[4], b[2];
    };
    Fragments mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    const Fragments *all = cuda_on_cpu::exchange(mine);
    auto half = [](uint32_t two, int i) { return to_float(Number{(uint16_t)(two >> 16 * i)}); };
    for (int i = 0; i < 4; i++) {
        int row = lane_id() / 4 + i / 2 * 8, column = 2 * (lane_id() % 4) + i % 2;
        double sum = sums[i];
        for (int k = 0; k < 16; k++) {
            uint32_t from_a = all[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
            uint32_t from_b = all[column * 4 + k % 8 / 2].b[k / 8];
            sum += (double)half(from_a, k % 2) * half(from_b, k % 2);
        }
        sums[i] = (float)sum;
    }
#else
    if constexpr (std::is_same_v<Number, f16>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
#endif
}

// Two numbers rounded to 16 bits each in a register, the first in the lower half.
template <class Number>  // f16 or bf16
__device__ inline uint32_t pack(float first, float second) {
#ifdef CUDA_ON_CPU
    Number low, high;
    from_float(low, first);
    from_float(high, second);
    return (uint32_t)low.bits | (uint32_t)high.bits << 16;
#else
    uint32_t both;
    if constexpr (std::is_same_v<Number, f16>)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
#endif
}

// (x & mask) ^ flip in one instruction; of two constants the compiler would make two.
__device__ inline uint32_t masked_and_flipped(uint32_t x, uint32_t mask, uint32_t flip) {
#ifdef CUDA_ON_CPU
    return (x & mask) ^ flip;
#else
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(x), "r"(mask), "r"(flip));
    return result;
#endif
}

// a * b + c for two f16 numbers in each register, rounded once.
__device__ inline uint32_t fma_f16(uint32_t a, uint32_t b, uint32_t c) {
#ifdef CUDA_ON_CPU
    auto half = [](uint32_t two, int i) { return (double)to_float(f16{(uint16_t)(two >> 16 * i)}); };
    auto one = [&](int i) { return (float)(half(a, i) * half(b, i) + half(c, i)); };
    return pack<f16>(one(0), one(1));
#else
    uint32_t result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
#endif
}

// a * b - product for two f16 numbers in each register: what rounding left of a * b, exactly.
__device__ inline uint32_t rest_of_product(uint32_t a, uint32_t b, uint32_t product) {
#ifdef CUDA_ON_CPU
    return fma_f16(a, b, product ^ 0x80008000);
#else
    uint32_t result;
    asm("{.reg .b32 n; neg.f16x2 n, %3; fma.rn.f16x2 %0, %1, %2, n;}" : "=r"(result) : "r"(a), "r"(b), "r"(product));
    return result;
#endif
}

#else
using Machine = std::variant<Cpu>;

inline std::unique_ptr<Machine> open_machine(const std::string &device, int threads) {
    if (device == "cuda")
        fail("--device cuda: this program was built without CUDA: leave the flag out, or build it where nvcc is");
    return std::make_unique<Machine>(std::in_place_type<Cpu>, threads);
}
#endif  // HAS_CUDA
