// The host's side of cuda_on_cpu.h: the card and its memory, streams and graphs, launches, cuBLAS.
//
// The card's memory comes from malloc, reads as NaN until it is written, and is poisoned for AddressSanitizer while no
// kernel runs: beyond its ends nobody may reach, and the host only by copies. What is copied to the host is there when
// the host has waited. All else happens before the call returns, or, of a stream that is captured, when the graph is
// launched.
#pragma once

#include <cstdlib>
#include <map>
#include <tuple>

#include "cuda_on_cpu.h"

namespace cuda_on_cpu {

// ---- The card and its memory -------------------------------------------------------------------------------

inline namespace words {

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInsufficientDriver = 35,
    cudaErrorDevicesUnavailable = 46,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorUnsupportedPtxVersion = 222,
    cudaErrorIllegalState = 401,
    cudaErrorIllegalAddress = 700,
    cudaErrorMisalignedAddress = 716,
    cudaErrorLaunchFailure = 719,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901
};

struct cudaDeviceProp {
    char name[256] = "a CPU that plays a GPU";
    size_t totalGlobalMem = 1 << 30;
    size_t sharedMemPerBlockOptin = most_shared_bytes;
    int multiProcessorCount = 4, major = 9, minor = 0;
};

}  // namespace words

// For tests to change. cudaMalloc() keeps to totalGlobalMem.
inline int devices = 1, driver = 13000;  // driver: 0: there is none
inline bool built_for_card = true;
inline int built_for = 90;  // ten times the compute capability
inline cudaDeviceProp properties;

struct Memory {
    size_t bytes;
    bool written = false;  // by a kernel, since the host last waited; only if early_start
};
inline std::map<const char *, Memory> memories;  // by where they begin
inline cudaError_t last_error = cudaSuccess;

inline cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

inline size_t free_bytes() {
    size_t used = 0;
    for (auto &[start, memory] : memories) used += memory.bytes;
    return properties.totalGlobalMem - std::min(properties.totalGlobalMem, used);
}

// Whether an address lies in the card's memory, or ends some.
inline bool reachable(const void *address) {
    auto next = memories.upper_bound((const char *)address);
    if (next == memories.begin()) return false;
    --next;
    return (const char *)address <= next->first + next->second.bytes;
}

inline bool written_hidden = false;
inline void hide_written(bool hide) {
    if (hide == written_hidden) return;
    written_hidden = hide;
    for (auto &[start, memory] : memories) {
        if (!memory.written) continue;
        if (hide)
            ASAN_POISON_MEMORY_REGION(start, memory.bytes);
        else
            ASAN_UNPOISON_MEMORY_REGION(start, memory.bytes);
    }
}

// While one exists the card's memory can be touched.
struct CardAtWork {
    CardAtWork() {
        written_hidden = false;
        for (auto &[start, memory] : memories) ASAN_UNPOISON_MEMORY_REGION(start, memory.bytes);
    }
    ~CardAtWork() {
        for (auto &[start, memory] : memories) ASAN_POISON_MEMORY_REGION(start, memory.bytes);
    }
};

inline namespace words {

inline const char *cudaGetErrorString(cudaError_t error) {
    static const std::map<cudaError_t, const char *> texts = {
        {cudaSuccess, "no error"},
        {cudaErrorInvalidValue, "invalid argument"},
        {cudaErrorMemoryAllocation, "out of memory"},
        {cudaErrorInvalidConfiguration, "invalid configuration argument"},
        {cudaErrorNoDevice, "no CUDA-capable device is detected"},
        {cudaErrorInvalidDevice, "invalid device ordinal"},
        {cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"},
        {cudaErrorIllegalAddress, "an illegal memory access was encountered"},
        {cudaErrorIllegalState, "the operation cannot be performed in the present state"},
        {cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"},
        {cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"}};
    return error == cudaErrorLaunchFailure ? failures.back().c_str() : texts.at(error);
}
inline cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
inline cudaError_t cudaGetDeviceCount(int *count) {
    *count = devices;
    return result(driver == 0 ? cudaErrorInsufficientDriver : devices ? cudaSuccess : cudaErrorNoDevice);
}
inline cudaError_t cudaDriverGetVersion(int *version) { return *version = driver, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *to, int device) {
    if (device < 0 || device >= devices) return result(cudaErrorInvalidDevice);
    *to = properties;
    return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t *available, size_t *all) {
    *available = free_bytes();
    *all = properties.totalGlobalMem;
    return cudaSuccess;
}
inline cudaError_t cudaMalloc(void **data, size_t bytes) {
    if (bytes > free_bytes() || posix_memalign(data, 256, bytes)) return result(cudaErrorMemoryAllocation);
    memset(*data, 0xff, bytes);
    memories[(char *)*data] = {bytes};
    ASAN_POISON_MEMORY_REGION(*data, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaFree(void *data) {
    auto found = memories.find((char *)data);
    if (found == memories.end()) return result(cudaErrorInvalidValue);
    ASAN_UNPOISON_MEMORY_REGION(data, found->second.bytes);
    free((void *)found->first);
    memories.erase(found);
    return cudaSuccess;
}

}  // namespace words

// ---- Streams, copies, graphs -------------------------------------------------------------------------------

struct Stream;
using Work = std::function<cudaError_t(Stream &)>;
using Graph = std::vector<Work>;

// What was copied to the host, but cannot be seen before it waits.
struct Arrival {
    char *to;
    std::vector<char> bytes;
};

struct Stream {
    bool capturing = false, spoilt = false;
    Graph captured;
    std::vector<Arrival> arrivals;
};

// Now, or, while the stream is captured, whenever the graph is launched.
inline cudaError_t submit(Stream *stream, Work work) {
    if (!stream->capturing) return result(work(*stream));
    stream->captured.push_back(std::move(work));
    return cudaSuccess;
}

inline void let_arrive(Stream &stream) {
    for (const Arrival &arrival : stream.arrivals) std::copy(arrival.bytes.begin(), arrival.bytes.end(), arrival.to);
    stream.arrivals.clear();
}

inline cudaError_t copy_now(Stream &stream, char *to, const char *from, size_t bytes) {
    for (const Arrival &arrival : stream.arrivals)  // in the order of the stream they have arrived for the card
        if (arrival.to >= from && arrival.to < from + bytes)
            return let_arrive(stream), copy_now(stream, to, from, bytes);
    CardAtWork work;
    if (reachable(to))
        memmove(to, from, bytes);
    else
        stream.arrivals.push_back({to, {from, from + bytes}});
    return cudaSuccess;
}

inline namespace words {

using cudaStream_t = Stream *;
using cudaGraph_t = Graph *;
using cudaGraphExec_t = Graph *;
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
constexpr unsigned cudaStreamNonBlocking = 1;

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    return *stream = new Stream, cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    stream->spoilt = stream->capturing;
    if (stream->capturing) return result(cudaErrorStreamCaptureUnsupported);
    let_arrive(*stream);
    for (auto &[start, memory] : memories) memory.written = false;
    return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return submit(stream, [=](Stream &at) { return copy_now(at, (char *)to, (const char *)from, bytes); });
}
inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    return submit(stream, [=](Stream &) {
        if (!reachable(to)) return cudaErrorInvalidValue;
        CardAtWork work;
        memset(to, value, bytes);
        return cudaSuccess;
    });
}

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (stream->capturing) return result(cudaErrorIllegalState);
    stream->capturing = true;
    return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    if (!stream->capturing) return result(cudaErrorIllegalState);
    stream->capturing = false;
    Graph captured = std::exchange(stream->captured, {});
    bool spoilt = std::exchange(stream->spoilt, false);
    *graph = spoilt ? nullptr : new Graph(captured);
    return result(spoilt ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long = 0) {
    return *exec = new Graph(*graph), cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    for (const Work &work : *exec)
        if (submit(stream, work) != cudaSuccess) return last_error;
    return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete exec, cudaSuccess; }

// ---- Launching ---------------------------------------------------------------------------------------------

enum cudaLaunchAttributeID {
    cudaLaunchAttributeProgrammaticStreamSerialization = 6,
    cudaLaunchAttributePreferredSharedMemoryCarveout = 14
};
struct cudaFuncAttributes {
    int ptxVersion = 0;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    union {
        char pad[64];
        int programmaticStreamSerializationAllowed;
        unsigned sharedMemCarveout;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
    cudaLaunchAttribute *attrs = nullptr;
    unsigned numAttrs = 0;
};

}  // namespace words

inline std::map<void *, size_t> asked_shared_bytes;  // by kernel, where more than 48 KiB may be needed

inline bool fits_card(const cudaLaunchConfig_t &config, void *kernel) {
    const dim3 &grid = config.gridDim, &threads = config.blockDim;
    auto between_1_and = [](unsigned most, unsigned number) { return number >= 1 && number <= most; };
    return between_1_and(0x7fffffff, grid.x) && between_1_and(65535, grid.y) && between_1_and(65535, grid.z) &&
           between_1_and(1024, threads.x) && threads.y == 1 && threads.z == 1 &&  // as many as one kernel has here
           config.dynamicSmemBytes <= std::max<size_t>(48 << 10, asked_shared_bytes[kernel]);
}

// An address that is given must be one that the card can reach. (Those within structs are not looked for.)
template <class T>
void check_argument([[maybe_unused]] int number, [[maybe_unused]] const T &argument) {
    if constexpr (std::is_pointer_v<T>)
        if (argument && !reachable(argument))
            block.failure = "argument " + std::to_string(number) + " points to what is not the card's memory";
}

// What run() changes is `written` from then on.
template <class Run>
auto note_written(Run run) {
    std::map<const char *, std::vector<char>> earlier;
    for (auto &[start, memory] : memories)
        if (early_start && !memory.written) earlier[start].assign(start, start + memory.bytes);
    auto answer = run();
    for (auto &[start, bytes] : earlier) memories[start].written = memcmp(start, bytes.data(), bytes.size()) != 0;
    return answer;
}

template <class... Parameters>
cudaError_t run_kernel(const cudaLaunchConfig_t &config, void (*kernel)(Parameters...),
                       const std::tuple<Parameters...> &arguments) {
    CardAtWork work;
    gridDim = config.gridDim;
    blockDim = config.blockDim;
    body = [&] { std::apply(kernel, arguments); };
    block.failure.clear();
    block.trace_length = 0;
    int number = 0;
    std::apply([&](auto &...argument) { (check_argument(++number, argument), ...); }, arguments);
    auto run = [&] { return run_blocks(config.dynamicSmemBytes); };
    if (block.failure.empty() && note_written(run)) return cudaSuccess;
    keep_failure((void *)kernel);
    return cudaErrorLaunchFailure;
}

inline namespace words {

template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *about, Kernel *) {
    about->ptxVersion = built_for;
    return result(built_for_card ? cudaSuccess : cudaErrorNoKernelImageForDevice);
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute, int bytes) {
    if (bytes < 0 || bytes > most_shared_bytes) return result(cudaErrorInvalidValue);
    asked_shared_bytes[(void *)kernel] = (size_t)bytes;
    return cudaSuccess;
}
inline cudaError_t cudaFuncGetName(const char **name, const void *) { return *name = "the kernel", cudaSuccess; }
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               Arguments &&...arguments) {
    static_assert((std::is_trivially_copyable_v<Parameters> && ...), "a kernel's arguments are copied as bytes");
    if (!fits_card(*config, (void *)kernel)) return result(cudaErrorInvalidConfiguration);
    std::tuple<Parameters...> copies(std::forward<Arguments>(arguments)...);
    return submit(config->stream, [=, config = *config](Stream &) { return run_kernel(config, kernel, copies); });
}

// ---- cuBLAS ------------------------------------------------------------------------------------------------

enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
};
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cudaDataType { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 };
using cudaDataType_t = cudaDataType;

}  // namespace words

struct Blas {
    cudaStream_t stream = nullptr;
};

// A matrix as cuBLAS has it: one column after another, `stride` numbers apart; or, turned, one row after another.
struct Matrix {
    const void *data;
    cudaDataType type;
    bool turned;
    int64_t stride;
    float at(int64_t row, int64_t column) const {
        int64_t i = turned ? column + row * stride : row + column * stride;
        if (type == CUDA_R_32F) return ((const float *)data)[i];
        return type == CUDA_R_16F ? to_float(((const f16 *)data)[i]) : to_float(((const bf16 *)data)[i]);
    }
    // (rows, columns), one row after another.
    Floats rows(int64_t rows, int64_t columns) const {
        Floats numbers;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t column = 0; column < columns; column++) numbers.push_back(at(row, column));
        return numbers;
    }
};

inline namespace words {

using cublasHandle_t = Blas *;

inline const char *cublasGetStatusString(cublasStatus_t status) {
    static const std::map<cublasStatus_t, const char *> texts = {
        {CUBLAS_STATUS_SUCCESS, "success"},
        {CUBLAS_STATUS_INVALID_VALUE, "an unsupported value or parameter was passed to the function"},
        {CUBLAS_STATUS_EXECUTION_FAILED, "the GPU program failed to execute"},
        {CUBLAS_STATUS_NOT_SUPPORTED, "the functionality requested is not supported"}};
    return texts.at(status);
}
inline cublasStatus_t cublasCreate(cublasHandle_t *handle) { return *handle = new Blas, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) { return delete handle, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    return handle->stream = stream, CUBLAS_STATUS_SUCCESS;
}

// C (m, n) = alpha op(A) B + beta C with op(A) (m, k) and B (k, n); lda, ldb and ldc are the strides. `batch` of them,
// whose matrices begin step_a, step_b and step_c numbers apart. If beta is 0, C is not read.
inline cublasStatus_t cublasGemmStridedBatchedEx_64(cublasHandle_t handle, cublasOperation_t turn_a,
                                                    cublasOperation_t turn_b, int64_t m, int64_t n, int64_t k,
                                                    const void *alpha, const void *a, cudaDataType type_a, int64_t lda,
                                                    int64_t step_a, const void *b, cudaDataType type_b, int64_t ldb,
                                                    int64_t step_b, const void *beta, void *c, cudaDataType type_c,
                                                    int64_t ldc, int64_t step_c, int64_t batch, cublasComputeType_t,
                                                    cublasGemmAlgo_t) {
    if (type_a != type_b || type_c != CUDA_R_32F || turn_b != CUBLAS_OP_N) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (m < 0 || n < 0 || k < 0 || lda < std::max<int64_t>(1, turn_a == CUBLAS_OP_N ? m : k) ||
        ldb < std::max<int64_t>(1, k) || ldc < std::max<int64_t>(1, m))
        return CUBLAS_STATUS_INVALID_VALUE;
    size_t size = type_a == CUDA_R_32F ? 4 : 2;
    float by = *(const float *)alpha, keep = *(const float *)beta;
    auto run = [=] {
        for (int64_t i = 0; i < batch; i++) {
            Matrix left = {(const char *)a + i * step_a * size, type_a, turn_a == CUBLAS_OP_T, lda};
            Matrix right = {(const char *)b + i * step_b * size, type_b, true, ldb};  // B^T
            Floats rows = left.rows(m, k), columns = right.rows(n, k);
            for (int64_t at = 0; at < m * n; at++) {
                double product = 0;
                const float *row = &rows[at % m * k], *column = &columns[at / m * k];
                for (int64_t j = 0; j < k; j++) product += (double)row[j] * column[j];
                float &to = ((float *)c)[i * step_c + at % m + at / m * ldc];
                to = (float)(by * product) + (keep != 0 ? keep * to : 0);
            }
        }
        return cudaSuccess;
    };
    cudaError_t error = submit(handle->stream, [=](Stream &) {
        CardAtWork work;
        return note_written(run);
    });
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
inline cublasStatus_t cublasGemmEx_64(cublasHandle_t handle, cublasOperation_t turn_a, cublasOperation_t turn_b,
                                      int64_t m, int64_t n, int64_t k, const void *alpha, const void *a,
                                      cudaDataType type_a, int64_t lda, const void *b, cudaDataType type_b, int64_t ldb,
                                      const void *beta, void *c, cudaDataType type_c, int64_t ldc,
                                      cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    return cublasGemmStridedBatchedEx_64(handle, turn_a, turn_b, m, n, k, alpha, a, type_a, lda, 0, b, type_b, ldb, 0,
                                         beta, c, type_c, ldc, 0, 1, compute, algorithm);
}

}  // namespace words
}  // namespace cuda_on_cpu
