// The GPU that operations run on: its memory, and how a kernel is launched.
//
// nvcc compiles a kernel for the GPU. Without a GPU, tests/cuda_on_cpu.h, which defines CUDA_ON_CPU, replaces the
// toolkit: g++ compiles the same source, which then runs thread by thread on the CPU, with checks. For that, kernels
// use only CUDA's basic words (threadIdx, __syncthreads, __shfl_sync, ...) and these:
//   Shared<T>            shared memory whose size the launch gives, taken piece by piece from SharedMemory
//   wait_for_previous()  every thread of every kernel calls it before it touches what another kernel writes or reads
//   fast/instructions.h  functions for single instructions, which have plain twins in tests/cuda_on_cpu.h
#pragma once

#include <variant>

#include "team.h"

#if defined(__CUDACC__) || defined(CUDA_ON_CPU)
#define HAS_CUDA

#ifndef CUDA_ON_CPU
#include <cublas_v2.h>
#include <cuda_runtime.h>
#endif

#include <dlfcn.h>

#include <map>
#include <memory>
#include <type_traits>
#include <typeindex>

// ---- Errors ------------------------------------------------------------------------------------------------

inline const char *cure_of(cudaError_t error) {
    const std::pair<cudaError_t, const char *> cures[] = {
        {cudaErrorMemoryAllocation, "lower -c, or free memory of the card"},
        {cudaErrorDevicesUnavailable, "end the program that has the card to itself"},
        {cudaErrorInsufficientDriver, "install a driver as new as the toolkit"},
        {cudaErrorUnsupportedPtxVersion, "install a driver as new as the toolkit"},
        {cudaErrorNoKernelImageForDevice, "build for this card, make CUDA_ARCH=..."},
        {cudaErrorIllegalAddress, "this program is at fault, make sanitize-gpu says where"},
        {cudaErrorMisalignedAddress, "this program is at fault, make sanitize-gpu says where"},
        {cudaErrorLaunchFailure, "this program is at fault, make sanitize-gpu says where"}};
    for (auto [known, cure] : cures)
        if (known == error) return cure;
    return "another driver or card may help";
}

// Throws unless `error` is success. `what` names the call.
inline void check(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    fail("CUDA: %s: %s: %s; --device cpu needs no card", what, cudaGetErrorString(error), cure_of(error));
}

// Returns a function of a shared library, which is opened at the first call.
inline void *library_function(const char *library, const char *function) {
    void *opened = dlopen(library, RTLD_LAZY), *found = opened ? dlsym(opened, function) : nullptr;
    if (!found) fail("%s: install it, or add --device cpu, which needs none", dlerror());
    return found;
}

// cuBLAS is opened only with a GPU: a run on the CPU needs neither the library nor its 600 MB of address space.
#ifndef CUDA_ON_CPU
#define AS_TEXT(word) #word
#define CUBLAS_LIBRARY(version) "libcublas.so." AS_TEXT(version)
#define CUBLAS(function)                                                                                  \
    [] {                                                                                                  \
        static void *const found = library_function(CUBLAS_LIBRARY(CUBLAS_VER_MAJOR), AS_TEXT(function)); \
        return (decltype(&(function)))found;                                                              \
    }()
#endif

inline void check(cublasStatus_t status, const char *what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fail("cuBLAS: %s: %s: another driver or card may help; --device cpu needs neither", what,
         CUBLAS(cublasGetStatusString)(status));
}

__global__ void nothing() {}

// Gives the compiler's facts about a kernel; returns an error if the program was not built for this card.
inline cudaError_t about_build(cudaFuncAttributes &about) { return cudaFuncGetAttributes(&about, nothing); }

// Returns why no card can be used, or "" if one can.
inline std::string no_gpu() {
    int count = 0, driver = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
        return "no NVIDIA driver";
    if (error != cudaSuccess) return cudaGetErrorString(error);
    if (count == 0) return "no CUDA device";
    cudaFuncAttributes about;
    error = about_build(about);
    if (error != cudaErrorNoKernelImageForDevice) return error == cudaSuccess ? "" : cudaGetErrorString(error);
    cudaGetLastError();  // clears the error, which is reported here
    cudaDeviceProp card;
    check(cudaGetDeviceProperties(&card, 0), "cudaGetDeviceProperties");
    return formatted("%s has compute capability %d.%d; this program was built for others", card.name, card.major,
                     card.minor);
}

// ---- Threads -----------------------------------------------------------------------------------------------

constexpr int warp_size = 32;
constexpr unsigned all_lanes = 0xffffffff;

__device__ inline int lane_id() { return (int)(threadIdx.x % warp_size); }  // unsigned: one instruction
__device__ inline int warp_id() { return (int)(threadIdx.x / warp_size); }

// Returns when the previous kernel has ended and its writes can be read.
__device__ inline void wait_for_previous() {
#ifdef CUDA_ON_CPU
    cuda_on_cpu::note_wait();
#elif __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once all blocks have called it, the next kernel's blocks may start and run up to their wait_for_previous().
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

// The 32 threads of a warp as a team. nvcc compiles a body for the host as well, where it is never called.
#if defined(__CUDA_ARCH__) || defined(CUDA_ON_CPU)
#define ON_CARD(on_card, on_host) on_card
#else
#define ON_CARD(on_card, on_host) on_host
#endif
struct Warp {
    HOST_DEVICE int first() const { return ON_CARD(lane_id(), 0); }
    HOST_DEVICE int step() const { return warp_size; }
    HOST_DEVICE float sum(float x) const { return ON_CARD(warp_sum(x), x); }
    HOST_DEVICE float largest(float x) const { return ON_CARD(warp_max(x), x); }
    HOST_DEVICE void wait() const { ON_CARD(__syncwarp(), (void)0); }
};

constexpr int items_together = 4;  // items of a loop in one block of threads

// Calls op(item, team) for all items, each by one warp. It lets the next kernel start only after its own wait: else
// blocks of many kernels occupy the card while they wait (a step took 1.4 times as long on an H100).
template <class Op>
__global__ void __launch_bounds__(items_together *warp_size) for_each_kernel(int64_t items, Op op) {
    wait_for_previous();
    let_next_start();
    for (int64_t i = (int64_t)blockIdx.x * items_together + warp_id(); i < items;
         i += (int64_t)gridDim.x * items_together)
        op(i, Warp());
}

// ---- The GPU, a machine ------------------------------------------------------------------------------------

struct Grid {
    dim3 blocks;
    int threads;              // in a block
    size_t shared_bytes = 0;  // the sum of shared_size() of each piece that the kernel takes
};

// A card, and a stream that does all its work in order. It must outlive all memory taken from it.
class Gpu : public Memory {
public:
    using Team = Warp;
#ifdef CUDA_ON_CPU
    static constexpr size_t least_bytes = 1;  // so that AddressSanitizer knows the exact end
#else
    static constexpr size_t least_bytes = 16;  // an asynchronous copy's: compute-sanitizer counts all 16 as read
#endif
    cudaDeviceProp properties = {};
    cudaStream_t stream = nullptr;
    cublasHandle_t blas = nullptr;
    bool early = false;    // a kernel may start before the previous one ends: see launch()
    int reservations = 0;  // so far: recorded addresses are valid only while it is unchanged

    Gpu() {
        check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
        cudaFuncAttributes about;
        check(about_build(about), "cudaFuncGetAttributes");
        early = properties.major >= 9 && about.ptxVersion >= 90;
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        check(CUBLAS(cublasCreate)(&blas), "cublasCreate");
        check(CUBLAS(cublasSetStream)(blas, stream), "cublasSetStream");
    }
    Gpu(const Gpu &) = delete;
    ~Gpu() override {
        cudaStreamSynchronize(stream);
        kept_.clear();
        CUBLAS(cublasDestroy)(blas);
        cudaStreamDestroy(stream);
    }

    template <class Body>
    void run(Body body) {
        body();
    }
    template <class Op>
    void for_each(int64_t items, Op op) {
        if (items <= 0) return;
        int64_t blocks = std::min<int64_t>((items + items_together - 1) / items_together, INT_MAX);
        launch({dim3((unsigned)blocks), items_together * warp_size}, for_each_kernel<Op>, items, op);
    }

    // Starts kernel(arguments...). Its blocks may start while the previous kernel's last blocks still run
    // ("programmatic dependent launch"), hence wait_for_previous(). That takes compute capability 9.0 or later of card
    // and code, which may be older PTX. All kernels ask for all shared memory of a multiprocessor, because kernels
    // that ask for different shares of it do not run at the same time.
    template <class... Parameters>
    void launch(const Grid &grid, void (*kernel)(Parameters...), std::common_type_t<Parameters>... arguments) {
        cudaLaunchAttribute asked[2] = {};
        asked[0].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
        asked[0].val.sharedMemCarveout = 100;  // percent
        asked[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        asked[1].val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = grid.blocks;
        config.blockDim = dim3(grid.threads);
        config.dynamicSmemBytes = grid.shared_bytes;
        config.stream = stream;
        config.attrs = asked;
        config.numAttrs = early ? 2 : 1;
        if (grid.shared_bytes > properties.sharedMemPerBlockOptin)
            fail("a kernel takes %zu bytes of a block's shared memory, %s has %zu: --device cpu has room",
                 grid.shared_bytes, properties.name, properties.sharedMemPerBlockOptin);
        if (grid.shared_bytes > 48 << 10)  // more must be asked for
            check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)grid.shared_bytes),
                  "cudaFuncSetAttribute");
        const char *name = "a kernel";
        cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
        if (error != cudaSuccess) cudaFuncGetName(&name, (const void *)kernel);
        check(error, name);
    }

    std::shared_ptr<void> reserve(size_t bytes, const char *what, const char *cure) override {
        void *data = nullptr;
        Room free = room();
        size_t whole = (std::max<size_t>(bytes, 1) + least_bytes - 1) / least_bytes * least_bytes;
        if ((double)bytes > free.bytes || cudaMalloc(&data, whole) != cudaSuccess) {
            cudaGetLastError();  // clears the error, which is reported here
            fail("%s: %.3f GiB are needed, %s has %.3f GiB free: %s", what, (double)bytes / 0x1p30, free.name.c_str(),
                 free.bytes / 0x1p30, cure);
        }
        reservations++;
        check(cudaMemsetAsync(data, 0, whole, stream), "cudaMemsetAsync");
        return std::shared_ptr<void>(data, [](void *start) { cudaFree(start); });  // waits for the card
    }
    // Copy in the order of the stream. The caller may change `from` once write() has returned.
    void write(void *to, const void *from, size_t bytes) override {
        check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    }
    void read(void *to, const void *from, size_t bytes) override {
        write(to, from, bytes);
        wait();
    }
    void wait() const { check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }
    Room room() const override {
        size_t available = 0, all = 0;
        check(cudaMemGetInfo(&available, &all), "cudaMemGetInfo");
        return {(double)available, properties.name};
    }
    std::string name() const {
        return formatted("%s, %.1f GiB, %.1f of them free", properties.name, (double)properties.totalGlobalMem / 0x1p30,
                         room().bytes / 0x1p30);
    }

    // Returns the one T that operations keep here from call to call. The first call makes it.
    template <class T>
    T &kept() {
        std::shared_ptr<void> &object = kept_[typeid(T)];
        if (!object) object = std::make_shared<T>();
        return *(T *)object.get();
    }

private:
    std::map<std::type_index, std::shared_ptr<void>> kept_;
};

using Machine = std::variant<Cpu, Gpu>;

// Opens the CPU or the GPU. `device`: auto, cpu or cuda.
inline std::unique_ptr<Machine> open_machine(const std::string &device, int threads) {
    std::string reason = device == "cpu" ? "" : no_gpu();
    if (device == "cuda" && !reason.empty())
        fail("--device cuda: %s: --device auto computes on the CPU then", reason.c_str());
    if (device == "cpu" || !reason.empty()) return std::make_unique<Machine>(std::in_place_type<Cpu>, threads);
    return std::make_unique<Machine>(std::in_place_type<Gpu>);
}

// ---- Shared memory -----------------------------------------------------------------------------------------

HOST_DEVICE constexpr size_t shared_size(size_t bytes) { return (bytes + 15) / 16 * 16; }

#ifndef CUDA_ON_CPU
// Numbers in shared memory. read() and write() move a Wide at once; number i must be aligned for it.
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

// The block's shared memory, handed out from its start. All threads of a block take the same pieces.
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

#else
using Machine = std::variant<Cpu>;

inline std::unique_ptr<Machine> open_machine(const std::string &device, int threads) {
    if (device == "cuda")
        fail("--device cuda: this program was built without CUDA: leave the flag out, or build it where nvcc is");
    return std::make_unique<Machine>(std::in_place_type<Cpu>, threads);
}
#endif  // HAS_CUDA
