// Runs CUDA kernels where there is no GPU: included before anything else, it gives g++ and clang++ what device.h and
// the kernels need of the CUDA toolkit.
//
// A block's threads are fibers on one stack each (Boost.Context), which change places where a thread waits for others:
// at barriers, shuffles and votes. Blocks run one after another, and so do launches, each before its call returns. What
// CUDA leaves undefined is a failure here: the launch returns an error, and `cuda_on_cpu::failures` says who did what.
//   barriers   some threads of the block, or lanes of the mask, never come, or come to another one
//   shared     bytes read that nobody wrote, or whose copy has not arrived; an index past its piece; a race: two
//   threads
//              at the same bytes, one of them writing, with no barrier between (whatever order they ran in)
//   access     an address not aligned to what is read or written; a kernel's argument that points to the host's memory
//   order      a thread that ends without wait_for_previous(), or with copies that it never committed
// Memory of the card comes from malloc and is filled with NaN. It is poisoned for AddressSanitizer while no kernel
// runs: beyond its ends nobody may reach, and the host only by copies. What is copied to the host arrives when the host
// waits.
//
// Limits. Races in the card's memory are not seen. Only __syncthreads() and __syncwarp() of a whole warp order what
// threads do in shared memory: shuffles and votes do not, as CUDA has it. Two calls on one line are the same barrier.
// An element of Shared<T> is a number to be read or assigned, not a reference to hold: float x = s[i], not auto.
#pragma once

#define CUDA_ON_CPU

#include <execinfo.h>
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>
#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../numbers.h"

#if defined(__SANITIZE_ADDRESS__)
#define CUDA_ON_CPU_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_ON_CPU_ASAN
#endif
#endif

// ---- Words -------------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Of the thread that runs.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;

#define MIN_AND_MAX(Number)                                         \
    inline Number min(Number a, Number b) { return b < a ? b : a; } \
    inline Number max(Number a, Number b) { return a < b ? b : a; }
MIN_AND_MAX(int)
MIN_AND_MAX(unsigned)
MIN_AND_MAX(long)
MIN_AND_MAX(unsigned long)
MIN_AND_MAX(long long)
MIN_AND_MAX(unsigned long long)
#undef MIN_AND_MAX
inline float min(float a, float b) { return fminf(a, b); }  // the number, if the other one is NaN
inline float max(float a, float b) { return fmaxf(a, b); }

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
// Byte i of the result is byte (selector >> 4 i) & 7 of the eight bytes of x, then y.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
template <class T>
inline T __ldg(const T *from) {
    return *from;
}

namespace cuda_on_cpu {

inline std::vector<std::string> failures;  // what kernels did that CUDA does not define

// ---- Threads -----------------------------------------------------------------------------------------------

// A place in the source where threads meet.
struct Site {
    const char *word, *file;
    int line;
};

inline bool operator==(const Site &a, const Site &b) {
    return a.line == b.line && a.word == b.word && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

// Where an element is in shared memory, and in which piece; bytes.
struct Spot {
    int at, piece, size;
};

// A copy to shared memory that is on its way.
struct Copy {
    Spot spot;
    int batch;
    uint4 bytes;
};

struct Thread {
    enum State { ready, at_barrier, at_warp, ended };
    boost::context::fiber context;  // where it goes on
    const void *stack = nullptr;
    size_t stack_bytes = 0;
    void *fake_stack = nullptr;  // AddressSanitizer's
    int number = 0;              // in its block
    uint3 index = {};
    State state = ended;
    Site site = {};               // where it waits,
    unsigned mask = 0;            // and for which lanes
    uint64_t value = 0, got = 0;  // what it gives to a shuffle or a vote, and what comes out
    int source = 0;               // lane that a shuffle reads
    bool waited = false;          // for the kernel before
    int pieces = 0;               // of shared memory that it took
    std::vector<Copy> copies;
    int batches = 0;  // of copies that it committed
};

struct Warp {
    unsigned arrived = 0;    // lanes that wait in it
    uint16_t barriers = 0;   // passed by all its lanes together
    unsigned exchanges = 0;  // of values of all lanes
    alignas(16) char values[2][32 * 64];
};

// Where the running block is.
struct Block {
    int threads = 0, arrived = 0;
    size_t shared_bytes = 0;
    uint32_t first_barrier = 0;               // barriers that were passed before it began
    std::vector<std::pair<int, int>> pieces;  // of shared memory: begin, end
    Warp warps[32];
    bool failed = false;
    std::string failure;
    void *trace[24];
    int trace_length = 0;
};

// Thrown in each thread of a block that has failed.
struct Stop {};

inline Block block;
inline Thread host;                               // the stack from which kernels are launched
inline Thread *running = &host, *before = &host;  // the one that runs, and the one that ran last
inline Thread *threads[1024];                     // of the running block, and as many as ever ran
inline std::function<void()> body;                // of the kernel
inline uint32_t barriers = 0;                     // of blocks, passed since the program began

inline int lane_number() { return running->number % 32; }
inline Thread &lane_of(const Thread &thread, int lane) { return *threads[thread.number / 32 * 32 + lane]; }
inline Warp &warp_of(const Thread &thread) { return block.warps[thread.number / 32]; }

// The first thing a fiber does when it runs again.
inline void arrive(Thread &me, boost::context::fiber &&from) {
#ifdef CUDA_ON_CPU_ASAN
    __sanitizer_finish_switch_fiber(me.fake_stack, &before->stack, &before->stack_bytes);
#endif
    before->context = std::move(from);
    threadIdx = me.index;
}

inline void switch_to(Thread &next) {
    Thread &me = *running;
    before = &me;
    running = &next;
#ifdef CUDA_ON_CPU_ASAN
    __sanitizer_start_switch_fiber(&me.fake_stack, next.stack, next.stack_bytes);
#endif
    arrive(me, std::move(next.context).resume());
}

// Lets the next thread run that can; the host, if none can or all are to stop.
inline void switch_to_next() {
    for (int i = 1; i < block.threads && !block.failed; i++) {
        Thread &next = *threads[(running->number + i) % block.threads];
        if (next.state == Thread::ready) return switch_to(next);
    }
    switch_to(host);
}

inline void wait() {
    switch_to_next();
    if (block.failed) throw Stop{};
}

// ---- Failures ----------------------------------------------------------------------------------------------

inline std::string text_of(const uint3 &index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

inline std::string text_of(const Site &site) {
    const char *slash = strrchr(site.file, '/');
    return std::string(site.word) + " (" + (slash ? slash + 1 : site.file) + ":" + std::to_string(site.line) + ")";
}

// The functions and lines of a place in the program, from the innermost of what was inlined; nothing without ASan.
inline std::vector<std::string> symbols(void *place, const char *format) {
    std::vector<std::string> found;
#ifdef CUDA_ON_CPU_ASAN
    char text[4096] = {};
    __sanitizer_symbolize_pc(place, format, text, sizeof text);
    for (const char *line = text; *line; line += strlen(line) + 1) found.push_back(line);
#else
    (void)place, (void)format;
#endif
    return found;
}

inline void note_failure(const Thread &thread, const std::string &what) {
    block.failed = true;
    block.failure = "block " + text_of(blockIdx) + ", thread " + text_of(thread.index) + ": " + what;
}

[[noreturn]] __attribute__((format(printf, 1, 2), noinline)) inline void broken(const char *format, ...) {
    char what[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    note_failure(*running, what);
    block.trace_length = backtrace(block.trace, 24);
    throw Stop{};
}

// The failure with the kernel's name and the lines that led there. On the host's stack: symbols take room.
inline std::string describe_failure(void *kernel) {
    std::vector<std::string> name = symbols((char *)kernel + 1, "%f");
    std::string text = (name.empty() ? "a kernel" : name[0]) + ", " + block.failure, lines;
    for (int i = 0; i < block.trace_length; i++)
        for (const std::string &line : symbols(block.trace[i], "%s:%l"))
            if (line.find("cuda_on_cpu.h") == std::string::npos && line[0] == '/' && line.find("/usr/") != 0)
                lines += " " + line.substr(line.rfind('/') + 1);
    return text + lines;
}

// ---- Barriers, shuffles, votes -----------------------------------------------------------------------------

inline bool meets(const Thread &a, const Thread &b) {
    return a.state == b.state && a.site == b.site && (a.state == Thread::at_barrier || a.mask == b.mask);
}

// Whom a waiting thread waits for in vain; empty if all are there.
inline std::string missing_at(const Thread &me) {
    bool barrier = me.state == Thread::at_barrier;
    for (int i = 0; i < (barrier ? block.threads : 32); i++) {
        if (!barrier && !(me.mask >> i & 1)) continue;
        int number = barrier ? i : me.number / 32 * 32 + i;
        std::string text = text_of(me.site) + (barrier ? " waits for thread " : " waits for lane ") + std::to_string(i);
        if (number >= block.threads) return text + ", which the block does not have";
        const Thread &other = *threads[number];
        if (other.state == Thread::ended) return text + ", which has ended";
        if (other.state == Thread::ready) return text + ", which never came";
        if (!meets(me, other)) return text + ", which is at " + text_of(other.site);
    }
    return "";
}

// Waits for all threads of the block; the last one calls combine() before they go on.
template <class Combine>
void meet_block(const Site &site, Combine combine) {
    Thread &me = *running;
    me.site = site;
    me.state = Thread::at_barrier;
    if (++block.arrived < block.threads) return wait();
    block.arrived = 0;
    for (int i = 0; i < block.threads; i++)
        if (!meets(me, *threads[i])) broken("%s", missing_at(me).c_str());
    combine();
    barriers++;
    for (int i = 0; i < block.threads; i++) threads[i]->state = Thread::ready;
}

// Waits for all lanes of the mask; the last one calls combine() before they go on.
template <class Combine>
void meet_warp(const Site &site, unsigned mask, Combine combine) {
    Thread &me = *running;
    Warp &warp = warp_of(me);
    if (!(mask >> me.number % 32 & 1)) broken("%s: the lane is not in its mask %08x", text_of(site).c_str(), mask);
    me.site = site;
    me.mask = mask;
    me.state = Thread::at_warp;
    warp.arrived |= 1u << me.number % 32;
    if ((warp.arrived & mask) != mask) return wait();
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1 && !meets(me, lane_of(me, lane))) broken("%s", missing_at(me).c_str());
    warp.arrived &= ~mask;
    combine();
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) lane_of(me, lane).state = Thread::ready;
}

// The lane's value; lane `source` must be in the mask.
template <class T>
T shuffle(const Site &site, unsigned mask, T value, int source) {
    static_assert(std::is_arithmetic_v<T>, "shuffles take a number: of Shared<T>, one that was read before");
    Thread &me = *running;
    if (!(mask >> source & 1)) broken("%s reads lane %d, not in mask %08x", text_of(site).c_str(), source, mask);
    memcpy(&me.value, &value, sizeof value);
    me.source = source;
    meet_warp(site, mask, [&] {
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) lane_of(me, i).got = lane_of(me, lane_of(me, i).source).value;
    });
    memcpy(&value, &me.got, sizeof value);
    return value;
}

// One bit of each lane of the mask.
inline unsigned vote(const Site &site, unsigned mask, bool predicate) {
    Thread &me = *running;
    me.value = predicate;
    meet_warp(site, mask, [&] {
        unsigned bits = 0;
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) bits |= (unsigned)lane_of(me, i).value << i;
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) lane_of(me, i).got = bits;
    });
    return (unsigned)me.got;
}

// In how many threads of the block the predicate holds.
inline int count_block(const Site &site, bool predicate) {
    Thread &me = *running;
    me.value = predicate;
    meet_block(site, [] {
        uint64_t count = 0;
        for (int i = 0; i < block.threads; i++) count += threads[i]->value;
        for (int i = 0; i < block.threads; i++) threads[i]->got = count;
    });
    return (int)me.got;
}

// The values of the warp's 32 lanes, there until the thread's next exchange but one.
template <class T>
const T *exchange(const T &value, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    static_assert(sizeof(T) <= 64, "room of a lane");
    Warp &warp = warp_of(*running);
    T *values = (T *)warp.values[warp.exchanges % 2];
    values[lane_number()] = value;
    meet_warp({"exchange", file, line}, 0xffffffff, [&] { warp.exchanges++; });
    return values;
}

// First lane of a shuffle's segment.
inline int segment(int width) {
    if (width < 1 || width > 32 || (width & (width - 1))) broken("a shuffle of width %d", width);
    return lane_number() / width * width;
}

}  // namespace cuda_on_cpu

#define SITE(word) \
    cuda_on_cpu::Site { word, file, line }
#define FROM_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(FROM_HERE) {
    cuda_on_cpu::meet_block(SITE("__syncthreads"), [] {});
}
inline int __syncthreads_count(int predicate, FROM_HERE) {
    return cuda_on_cpu::count_block(SITE("__syncthreads_count"), predicate);
}
inline int __syncthreads_or(int predicate, FROM_HERE) {
    return cuda_on_cpu::count_block(SITE("__syncthreads_or"), predicate) > 0;
}
inline int __syncthreads_and(int predicate, FROM_HERE) {
    return cuda_on_cpu::count_block(SITE("__syncthreads_and"), predicate) == cuda_on_cpu::block.threads;
}
inline void __syncwarp(unsigned mask = 0xffffffff, FROM_HERE) {
    cuda_on_cpu::Warp &warp = cuda_on_cpu::warp_of(*cuda_on_cpu::running);
    cuda_on_cpu::meet_warp(SITE("__syncwarp"), mask, [&] { warp.barriers += mask == 0xffffffff; });
}
inline unsigned __ballot_sync(unsigned mask, int predicate, FROM_HERE) {
    return cuda_on_cpu::vote(SITE("__ballot_sync"), mask, predicate);
}
inline int __any_sync(unsigned mask, int predicate, FROM_HERE) {
    return cuda_on_cpu::vote(SITE("__any_sync"), mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate, FROM_HERE) {
    return cuda_on_cpu::vote(SITE("__all_sync"), mask, predicate) == mask;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, FROM_HERE) {
    int first = cuda_on_cpu::segment(width);
    return cuda_on_cpu::shuffle(SITE("__shfl_sync"), mask, value, first + (source & (width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, FROM_HERE) {
    int first = cuda_on_cpu::segment(width), lane = cuda_on_cpu::lane_number(), source = lane - (int)delta;
    return cuda_on_cpu::shuffle(SITE("__shfl_up_sync"), mask, value, source >= first ? source : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, FROM_HERE) {
    int first = cuda_on_cpu::segment(width), lane = cuda_on_cpu::lane_number(), source = lane + (int)delta;
    return cuda_on_cpu::shuffle(SITE("__shfl_down_sync"), mask, value, source < first + width ? source : lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, FROM_HERE) {
    int first = cuda_on_cpu::segment(width), lane = cuda_on_cpu::lane_number(), source = lane ^ (bits & 31);
    return cuda_on_cpu::shuffle(SITE("__shfl_xor_sync"), mask, value, source < first + width ? source : lane);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

#undef SITE
#undef FROM_HERE

// ---- Shared memory -----------------------------------------------------------------------------------------

namespace cuda_on_cpu {

constexpr int most_shared_bytes = 227 << 10;  // of a block

// Who used a byte, and when: the barriers that the block and the warp had passed.
struct Touch {
    uint32_t barrier = 0;
    uint16_t warp_barrier = 0;
    uint16_t thread : 10, several : 2, atomic : 1, copying : 1;
    enum { one, lanes, warps };  // `several`: a thread; several of one warp; several warps
    Touch() : thread(0), several(one), atomic(0), copying(0) {}
};

alignas(16) inline char shared_bytes[most_shared_bytes];
inline Touch *last_writes = new Touch[most_shared_bytes], *last_reads = new Touch[most_shared_bytes];

enum class Use { read, write, atomic, copy };

#define UNCHECKED __attribute__((no_sanitize("address", "undefined")))  // of what runs at every access

// A barrier stands between the two, or they are of one thread.
UNCHECKED inline bool ordered(const Touch &was, const Touch &now) {
    if (was.barrier != now.barrier) return true;
    if (was.several == Touch::warps || was.thread / 32 != now.thread / 32) return false;
    return was.warp_barrier != now.warp_barrier || (was.several == Touch::one && was.thread == now.thread);
}

// Keeps of both what later ones may conflict with.
UNCHECKED inline void add_touch(Touch &was, Touch now) {
    if (was.barrier == now.barrier && (was.several == Touch::warps || was.thread / 32 != now.thread / 32))
        now.several = Touch::warps;
    else if (!ordered(was, now))
        now.several = Touch::lanes;
    was = now;
}

[[noreturn]] inline void broken_use(Use use, const Spot &spot, const Touch &was, const char *other) {
    const char *verbs[] = {"reads", "writes", "changes", "starts a copy to"};
    std::string what = std::string(verbs[(int)use]) + " element " + std::to_string((spot.at - spot.piece) / spot.size) +
                       " of the shared memory at byte " + std::to_string(spot.piece);
    if (was.barrier < block.first_barrier) broken("%s, which nobody wrote", what.c_str());
    if (was.copying) broken("%s before the copy that thread %d started has arrived", what.c_str(), was.thread);
    broken("race: %s, %s by thread %d with no barrier between", what.c_str(), other, was.thread);
}

// Checks and notes that the running thread uses `count` bytes.
UNCHECKED inline void use_shared(Use use, const Spot &spot, int count) {
    Touch now;
    now.barrier = barriers;
    now.warp_barrier = warp_of(*running).barriers;
    now.thread = (uint16_t)(running->number & 1023);
    now.atomic = use == Use::atomic;
    now.copying = use == Use::copy;
    for (int i = spot.at; i < spot.at + count; i++) {
        Touch &write = last_writes[i], &read = last_reads[i];
        bool written = write.barrier >= block.first_barrier;
        if (written ? write.copying : use == Use::read || use == Use::atomic) broken_use(use, spot, write, "");
        if (!ordered(write, now) && !(now.atomic && write.atomic)) broken_use(use, spot, write, "written");
        if (use != Use::read && !ordered(read, now)) broken_use(use, spot, read, "read");
        // What a thread wrote itself stays noted when it goes on with atomics: those of others race with it.
        bool own_write = write.barrier == now.barrier && write.thread == now.thread && !write.atomic;
        if (use == Use::read)
            add_touch(read, now);
        else if (use != Use::atomic)
            write = now;
        else if (!own_write)
            add_touch(write, now);
    }
}

// A place in shared memory for atomics.
template <class T>
struct Address {
    Spot spot;
};

// A number in shared memory, to be read or changed at once: `auto x = s[i]` could not keep it, and does not compile.
template <class T>
struct Element {
    Spot spot;
    operator T() && {
        T value;
        use_shared(Use::read, spot, sizeof(T));
        memcpy(&value, shared_bytes + spot.at, sizeof(T));
        return value;
    }
    T operator=(T value) && {
        use_shared(Use::write, spot, sizeof(T));
        memcpy(shared_bytes + spot.at, &value, sizeof(T));
        return value;
    }
    T operator=(Element &&from) && { return std::move(*this) = (T)std::move(from); }
    T operator+=(T value) && { return std::move(*this) = (T)std::move(*this) + value; }
    T operator-=(T value) && { return std::move(*this) = (T)std::move(*this) - value; }
    T operator*=(T value) && { return std::move(*this) = (T)std::move(*this) * value; }
    T operator|=(T value) && { return std::move(*this) = (T)std::move(*this) | value; }
    Address<T> operator&() && { return {spot}; }
};

template <class T>
void from_float(Element<T> &&to, float x) {
    T number;
    from_float(number, x);
    std::move(to) = number;
}

}  // namespace cuda_on_cpu

// See device.h.
template <class T>
struct Shared {
    int begin = 0, end = 0;  // of its piece, bytes
    int64_t start = 0;       // of element 0
    // Elements from i on as one Wide.
    template <class Wide>
    cuda_on_cpu::Element<Wide> wide(int i) const {
        int64_t at = start + i * (int64_t)sizeof(T);
        if (at < begin || at + (int64_t)sizeof(Wide) > end)
            cuda_on_cpu::broken("element %lld of a piece of %d", (long long)(at - begin) / (int64_t)sizeof(T),
                                (end - begin) / (int)sizeof(T));
        if (at % (int64_t)alignof(Wide))
            cuda_on_cpu::broken("%d bytes at byte %lld of shared memory", (int)sizeof(Wide), (long long)at);
        return {{(int)at, begin, (int)sizeof(T)}};
    }
    cuda_on_cpu::Element<T> operator[](int i) const { return wide<T>(i); }
    template <class Wide>
    Wide read(int i) const {
        return wide<Wide>(i);
    }
    template <class Wide>
    void write(int i, Wide value) const {
        wide<Wide>(i) = value;
    }
    Shared from(int i) const { return {begin, end, start + i * (int64_t)sizeof(T)}; }
};

struct SharedMemory {
    int next = 0;
    template <class T>
    Shared<T> take(int count) {
        using cuda_on_cpu::block;
        std::pair<int, int> piece = {next, next + count * (int)sizeof(T)};
        size_t number = cuda_on_cpu::running->pieces++;
        next = (piece.second + 15) / 16 * 16;
        if (count < 0 || (size_t)next > block.shared_bytes)
            cuda_on_cpu::broken("takes shared memory up to byte %d, the launch gave %zu", next, block.shared_bytes);
        if (number == block.pieces.size()) block.pieces.push_back(piece);
        if (block.pieces[number] != piece)
            cuda_on_cpu::broken("takes bytes %d to %d of shared memory, another thread %d to %d", piece.first,
                                piece.second, block.pieces[number].first, block.pieces[number].second);
        return {piece.first, piece.second, piece.first};
    }
};

// ---- Copies, loads, atomics --------------------------------------------------------------------------------

namespace cuda_on_cpu {

inline void note_wait() { running->waited = true; }

template <class T>
T load(const void *from) {
    if ((uintptr_t)from % sizeof(T)) broken("loads %zu bytes from %p, which is not aligned", sizeof(T), from);
    return *(const T *)from;
}

template <class T>
void copy_async(Shared<T> to, int i, const void *from, bool there) {
    Spot spot = to.template wide<uint4>(i).spot;
    if ((uintptr_t)from % 16) broken("copies 16 bytes from %p, which is not aligned", from);
    use_shared(Use::copy, spot, 16);
    running->copies.push_back({spot, running->batches, there ? *(const uint4 *)from : uint4{0, 0, 0, 0}});
}

inline void commit_copies() { running->batches++; }

// Until here the bytes of a copy are those of nobody.
inline void wait_copies(int most) {
    std::vector<Copy> &copies = running->copies;
    auto on_their_way = [&](const Copy &copy) { return copy.batch >= running->batches - most; };
    for (const Copy &copy : copies) {
        if (on_their_way(copy)) continue;
        for (int i = 0; i < 16; i++) last_writes[copy.spot.at + i] = Touch();
        Element<uint4>{copy.spot} = copy.bytes;
    }
    copies.erase(std::remove_if(copies.begin(), copies.end(), [&](auto &copy) { return !on_their_way(copy); }),
                 copies.end());
}

// change(old) replaces what is there; the result is what was.
template <class T, class Change>
T atomic(T *at, Change change) {
    T old = *at;
    *at = change(old);
    return old;
}
template <class T, class Change>
T atomic(Address<T> at, Change change) {
    use_shared(Use::atomic, at.spot, sizeof(T));
    return atomic((T *)(shared_bytes + at.spot.at), change);
}

}  // namespace cuda_on_cpu

template <class Place, class T>
auto atomicAdd(Place at, T value) {
    return cuda_on_cpu::atomic(at, [&](auto old) { return (decltype(old))(old + (decltype(old))value); });
}
template <class Place, class T>
auto atomicMax(Place at, T value) {
    return cuda_on_cpu::atomic(at, [&](auto old) { return max(old, (decltype(old))value); });
}
template <class Place, class T>
auto atomicExch(Place at, T value) {
    return cuda_on_cpu::atomic(at, [&](auto old) { return (decltype(old))value; });
}
template <class Place, class T, class U>
auto atomicCAS(Place at, T expected, U value) {
    return cuda_on_cpu::atomic(at,
                               [&](auto old) { return old == (decltype(old))expected ? (decltype(old))value : old; });
}

// ---- Blocks ------------------------------------------------------------------------------------------------

namespace cuda_on_cpu {

constexpr size_t stack_bytes = 128 << 10;

// One thread of the running block, from beginning to end.
inline void run_thread(Thread &me) {
    try {
        if (block.failed) return;
        body();
        if (!me.waited) broken("ends without wait_for_previous()");
        for (const Copy &copy : me.copies)
            if (copy.batch == me.batches) broken("ends with copies that it never committed");
    } catch (const Stop &) {
    }
}

inline Thread *new_thread(int number) {
    using boost::context::fiber;
    Thread *me = new Thread;
    boost::context::protected_fixedsize_stack stacks(stack_bytes);
    boost::context::stack_context stack = stacks.allocate();
    me->number = number;
    me->stack = (char *)stack.sp - stack.size;
    me->stack_bytes = stack.size;
    boost::context::preallocated place(stack.sp, stack.size, stack);
    me->context = fiber(std::allocator_arg, place, stacks, [me](fiber &&from) -> fiber {
        arrive(*me, std::move(from));
        for (;;) {
            run_thread(*me);
            me->state = Thread::ended;
            switch_to_next();
        }
    });
    return me;
}

inline void start_block(int count, size_t bytes) {
    block.threads = count;
    block.arrived = 0;
    block.shared_bytes = bytes;
    block.first_barrier = ++barriers;
    block.pieces.clear();
    block.failed = false;
    block.trace_length = 0;
    for (Warp &warp : block.warps) warp.arrived = 0;
    for (int i = 0; i < count; i++) {
        if (!threads[i]) threads[i] = new_thread(i);
        Thread &thread = *threads[i];
        thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
        thread.state = Thread::ready;
        thread.waited = false;
        thread.pieces = thread.batches = 0;
        thread.copies.clear();
    }
}

// False if it failed. No thread is left inside the kernel then, either.
inline bool run_block(int count, size_t bytes) {
    start_block(count, bytes);
    switch_to(*threads[0]);
    for (int i = 0; i < count && !block.failed; i++)
        if (threads[i]->state != Thread::ended) note_failure(*threads[i], missing_at(*threads[i]));
    for (int i = 0; i < count; i++)
        if (threads[i]->state != Thread::ended) switch_to(*threads[i]);
    return !block.failed;
}

inline bool run_blocks(dim3 grid, dim3 threads_of_block, size_t bytes, void *kernel) {
    gridDim = grid;
    blockDim = threads_of_block;
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++)
                if (!run_block((int)(blockDim.x * blockDim.y * blockDim.z), bytes)) {
                    failures.push_back(describe_failure(kernel));
                    return false;
                }
    return true;
}

}  // namespace cuda_on_cpu

// ---- The card and its memory -------------------------------------------------------------------------------

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorLaunchFailure = 719,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorIllegalState = 401,
};

struct cudaDeviceProp {
    char name[256] = "a CPU that plays a GPU";
    size_t totalGlobalMem = 1 << 30, sharedMemPerBlockOptin = cuda_on_cpu::most_shared_bytes;
    int multiProcessorCount = 4, major = 9, minor = 0, l2CacheSize = 1 << 20;
};

namespace cuda_on_cpu {

inline int devices = 1;            // tests may change these
inline cudaDeviceProp properties;  // totalGlobalMem is a limit: cudaMalloc() keeps it

struct Memory {
    size_t bytes;
    bool on_card;
};
inline std::map<char *, Memory> memories;  // by where they begin: of the card, and the host's that is page-locked
inline cudaError_t last_error = cudaSuccess;

inline cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

inline size_t used_bytes() {
    size_t bytes = 0;
    for (auto &[start, memory] : memories) bytes += memory.on_card ? memory.bytes : 0;
    return bytes;
}

// What an address lies in; nullptr: memory that the card cannot reach.
inline const Memory *memory_at(const void *place) {
    auto next = memories.upper_bound((char *)place);
    if (next == memories.begin()) return nullptr;
    --next;
    return (char *)place < next->first + std::max<size_t>(next->second.bytes, 1) ? &next->second : nullptr;
}

inline bool on_card(const void *place) {
    const Memory *memory = memory_at(place);
    return memory && memory->on_card;
}

// While one exists the card's memory can be touched.
struct CardAtWork {
    CardAtWork() {
        for (auto &[start, memory] : memories) ASAN_UNPOISON_MEMORY_REGION(start, memory.bytes);
    }
    ~CardAtWork() {
        for (auto &[start, memory] : memories)
            if (memory.on_card) ASAN_POISON_MEMORY_REGION(start, memory.bytes);
    }
};

inline cudaError_t take_memory(void **data, size_t bytes, bool card) {
    if (card && bytes > properties.totalGlobalMem - std::min(properties.totalGlobalMem, used_bytes()))
        return result(cudaErrorMemoryAllocation);
    if (posix_memalign(data, 256, std::max<size_t>(bytes, 1))) return result(cudaErrorMemoryAllocation);
    memset(*data, 0xff, bytes);
    memories[(char *)*data] = {bytes, card};
    if (card) ASAN_POISON_MEMORY_REGION(*data, bytes);
    return cudaSuccess;
}

inline cudaError_t give_memory(void *data, bool card) {
    auto found = memories.find((char *)data);
    if (!data) return cudaSuccess;
    if (found == memories.end() || found->second.on_card != card) return result(cudaErrorInvalidValue);
    ASAN_UNPOISON_MEMORY_REGION(data, found->second.bytes);
    memories.erase(found);
    free(data);
    return cudaSuccess;
}

}  // namespace cuda_on_cpu

inline const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "no error";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorInvalidConfiguration:
            return "invalid configuration argument";
        case cudaErrorNoDevice:
            return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice:
            return "invalid device ordinal";
        case cudaErrorIllegalState:
            return "the operation cannot be performed in the present state";
        case cudaErrorStreamCaptureUnsupported:
            return "operation not permitted when stream is capturing";
        case cudaErrorLaunchFailure:
            return cuda_on_cpu::failures.empty() ? "a kernel failed" : cuda_on_cpu::failures.back().c_str();
    }
    return "unknown error";
}
inline cudaError_t cudaPeekAtLastError() { return cuda_on_cpu::last_error; }
inline cudaError_t cudaGetLastError() { return std::exchange(cuda_on_cpu::last_error, cudaSuccess); }

inline cudaError_t cudaGetDeviceCount(int *count) {
    *count = cuda_on_cpu::devices;
    return cuda_on_cpu::result(*count ? cudaSuccess : cudaErrorNoDevice);
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    if (device < 0 || device >= cuda_on_cpu::devices) return cuda_on_cpu::result(cudaErrorInvalidDevice);
    *properties = cuda_on_cpu::properties;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
    return cuda_on_cpu::result(device >= 0 && device < cuda_on_cpu::devices ? cudaSuccess : cudaErrorInvalidDevice);
}
inline cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, cudaSuccess; }

// ---- Streams and graphs ------------------------------------------------------------------------------------

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2;

namespace cuda_on_cpu {

struct Stream;
using Work = std::function<cudaError_t(Stream &)>;

struct Graph {
    std::vector<Work> work;
};

// What was copied to the host, but is not there before it waits.
struct Arrival {
    void *to;
    std::vector<char> bytes;
};

struct Stream {
    bool capturing = false;
    Graph captured;
    std::vector<Arrival> arrivals;
};

struct Event {
    std::chrono::steady_clock::time_point time;
    bool recorded = false;
};

inline Stream default_stream;
inline std::vector<Stream *> streams = {&default_stream};
inline bool capturing() {
    return std::any_of(streams.begin(), streams.end(), [](Stream *stream) { return stream->capturing; });
}
inline Stream &stream_at(Stream *stream) { return stream ? *stream : default_stream; }

// Now, or when the graph runs.
inline cudaError_t submit(Stream *at, Work work) {
    Stream &stream = stream_at(at);
    if (!stream.capturing) return result(work(stream));
    stream.captured.work.push_back(std::move(work));
    return cudaSuccess;
}

inline cudaError_t wait_for(Stream &stream) {
    if (stream.capturing) return result(cudaErrorStreamCaptureUnsupported);
    for (Arrival &arrival : stream.arrivals) memcpy(arrival.to, arrival.bytes.data(), arrival.bytes.size());
    stream.arrivals.clear();
    return cudaSuccess;
}

inline cudaError_t wait_for_all() {
    for (Stream *stream : streams)
        if (wait_for(*stream) != cudaSuccess) return last_error;
    return cudaSuccess;
}

inline cudaError_t copy_now(Stream &stream, void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    bool to_card = on_card(to), from_card = on_card(from);
    if (kind != cudaMemcpyDefault && kind != 2 * from_card + to_card) return cudaErrorInvalidValue;
    for (Arrival &arrival : stream.arrivals)  // what the copy reads was written before it in this stream
        if (!from_card) memcpy(arrival.to, arrival.bytes.data(), arrival.bytes.size());
    CardAtWork work;
    if (to_card)
        memcpy(to, from, bytes);
    else
        stream.arrivals.push_back({to, std::vector<char>((const char *)from, (const char *)from + bytes)});
    return cudaSuccess;
}

}  // namespace cuda_on_cpu

using cudaStream_t = cuda_on_cpu::Stream *;
using cudaGraph_t = cuda_on_cpu::Graph *;
using cudaGraphExec_t = const cuda_on_cpu::Graph *;
using cudaEvent_t = cuda_on_cpu::Event *;

inline cudaError_t cudaMalloc(void **data, size_t bytes) {
    if (cuda_on_cpu::capturing()) return cuda_on_cpu::result(cudaErrorStreamCaptureUnsupported);
    return cuda_on_cpu::take_memory(data, bytes, true);
}
inline cudaError_t cudaMallocHost(void **data, size_t bytes) { return cuda_on_cpu::take_memory(data, bytes, false); }
template <class T>
cudaError_t cudaMalloc(T **data, size_t bytes) {
    return cudaMalloc((void **)data, bytes);
}
template <class T>
cudaError_t cudaMallocHost(T **data, size_t bytes) {
    return cudaMallocHost((void **)data, bytes);
}
inline cudaError_t cudaFree(void *data) { return cuda_on_cpu::give_memory(data, true); }
inline cudaError_t cudaFreeHost(void *data) { return cuda_on_cpu::give_memory(data, false); }
inline cudaError_t cudaMemGetInfo(size_t *available, size_t *all) {
    *all = cuda_on_cpu::properties.totalGlobalMem;
    *available = *all - std::min(*all, cuda_on_cpu::used_bytes());
    return cudaSuccess;
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    cuda_on_cpu::streams.push_back(*stream = new cuda_on_cpu::Stream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    auto &streams = cuda_on_cpu::streams;
    auto found = std::find(streams.begin(), streams.end(), stream);
    if (found == streams.end()) return cuda_on_cpu::result(cudaErrorInvalidValue);
    streams.erase(found);
    delete stream;
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return cuda_on_cpu::wait_for(cuda_on_cpu::stream_at(stream));
}
inline cudaError_t cudaDeviceSynchronize() { return cuda_on_cpu::wait_for_all(); }

inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr) {
    return cuda_on_cpu::submit(
        stream, [=](cuda_on_cpu::Stream &stream) { return cuda_on_cpu::copy_now(stream, to, from, bytes, kind); });
}
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind);
    return error == cudaSuccess ? cudaDeviceSynchronize() : error;
}
inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream = nullptr) {
    return cuda_on_cpu::submit(stream, [=](cuda_on_cpu::Stream &) {
        if (!cuda_on_cpu::on_card(to)) return cudaErrorInvalidValue;
        cuda_on_cpu::CardAtWork work;
        memset(to, value, bytes);
        return cudaSuccess;
    });
}

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (!stream || stream->capturing) return cuda_on_cpu::result(cudaErrorIllegalState);
    stream->capturing = true;
    return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    if (!stream || !stream->capturing) return cuda_on_cpu::result(cudaErrorIllegalState);
    stream->capturing = false;
    *graph = new cuda_on_cpu::Graph(std::exchange(stream->captured, {}));
    return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long = 0) {
    *exec = new cuda_on_cpu::Graph(*graph);
    return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    for (const cuda_on_cpu::Work &work : exec->work)
        if (cuda_on_cpu::submit(stream, work) != cudaSuccess) return cuda_on_cpu::last_error;
    return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete exec, cudaSuccess; }

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    return *event = new cuda_on_cpu::Event, cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
    return cuda_on_cpu::submit(stream, [=](cuda_on_cpu::Stream &) {
        *event = {std::chrono::steady_clock::now(), true};
        return cudaSuccess;
    });
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cuda_on_cpu::wait_for_all(); }
inline cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    if (!from->recorded || !to->recorded) return cuda_on_cpu::result(cudaErrorInvalidValue);
    *milliseconds = std::chrono::duration<float, std::milli>(to->time - from->time).count();
    return cudaSuccess;
}

// ---- Launching ---------------------------------------------------------------------------------------------

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
union cudaLaunchAttributeValue {
    char pad[64];
    int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
    cudaLaunchAttribute *attrs = nullptr;
    unsigned numAttrs = 0;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

namespace cuda_on_cpu {

inline std::map<void *, size_t> most_shared;  // of a kernel, where more than 48 KiB were asked for

inline bool fits_card(const cudaLaunchConfig_t &config, void *kernel) {
    const dim3 &grid = config.gridDim, &block = config.blockDim;
    auto asked = most_shared.find(kernel);
    return grid.x - 1 < 0x7fffffff && grid.y - 1 < 65535 && grid.z - 1 < 65535 && block.x - 1 < 1024 &&
           block.y - 1 < 1024 && block.z - 1 < 64 && (size_t)block.x * block.y * block.z <= 1024 &&
           config.dynamicSmemBytes <= (asked == most_shared.end() ? 48 << 10 : asked->second);
}

}  // namespace cuda_on_cpu

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute, int bytes) {
    if (bytes < 0 || bytes > cuda_on_cpu::most_shared_bytes) return cuda_on_cpu::result(cudaErrorInvalidValue);
    cuda_on_cpu::most_shared[(void *)kernel] = (size_t)bytes;
    return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Kernel *, int, size_t) {
    return *blocks = 2, cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               Arguments &&...arguments) {
    static_assert((std::is_trivially_copyable_v<Parameters> && ...), "a kernel's arguments are copied as bytes");
    if (!cuda_on_cpu::fits_card(*config, (void *)kernel)) return cuda_on_cpu::result(cudaErrorInvalidConfiguration);
    std::tuple<Parameters...> copies(std::forward<Arguments>(arguments)...);
    return cuda_on_cpu::submit(config->stream, [kernel, copies, config = *config](cuda_on_cpu::Stream &) {
        cuda_on_cpu::body = [&] { std::apply(kernel, copies); };
        cuda_on_cpu::CardAtWork work;
        bool good = cuda_on_cpu::run_blocks(config.gridDim, config.blockDim, config.dynamicSmemBytes, (void *)kernel);
        return good ? cudaSuccess : cudaErrorLaunchFailure;
    });
}

// ---- cuBLAS ------------------------------------------------------------------------------------------------

enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
};
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
using cudaDataType = cudaDataType_t;
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 };

namespace cuda_on_cpu {
struct Blas {
    cudaStream_t stream = nullptr;
};

// A matrix as cuBLAS has it: columns one after another, `stride` numbers apart.
struct Matrix {
    const void *data;
    cudaDataType type;
    cublasOperation_t turned;
    int stride;
    float at(int row, int column) const {
        size_t i = turned == CUBLAS_OP_N ? row + (size_t)column * stride : column + (size_t)row * stride;
        if (type == CUDA_R_32F) return ((const float *)data)[i];
        return type == CUDA_R_16F ? to_float(((const f16 *)data)[i]) : to_float(((const bf16 *)data)[i]);
    }
};

// c (m, n) = alpha a b + beta c; c is not read if beta is 0.
inline void multiply(const Matrix &a, const Matrix &b, float *c, int m, int n, int k, int stride, float alpha,
                     float beta) {
    CardAtWork work;
    for (int column = 0; column < n; column++)
        for (int row = 0; row < m; row++) {
            float sum = 0, &to = c[row + (size_t)column * stride];
            for (int i = 0; i < k; i++) sum += a.at(row, i) * b.at(i, column);
            to = alpha * sum + (beta ? beta * to : 0);
        }
}
}  // namespace cuda_on_cpu

using cublasHandle_t = cuda_on_cpu::Blas *;

inline const char *cublasGetStatusString(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS:
            return "success";
        case CUBLAS_STATUS_NOT_INITIALIZED:
            return "the library was not initialized";
        case CUBLAS_STATUS_INVALID_VALUE:
            return "an unsupported value or parameter was passed";
        case CUBLAS_STATUS_EXECUTION_FAILED:
            return "the GPU program failed to execute";
        case CUBLAS_STATUS_NOT_SUPPORTED:
            return "the functionality requested is not supported";
    }
    return "unknown status";
}
inline cublasStatus_t cublasCreate(cublasHandle_t *handle) {
    return *handle = new cuda_on_cpu::Blas, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) { return delete handle, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    return handle->stream = stream, CUBLAS_STATUS_SUCCESS;
}

// C (m, n) = alpha op(A) op(B) + beta C, with op(A) (m, k) and op(B) (k, n), all by columns.
inline cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t turn_a, cublasOperation_t turn_b, int m,
                                   int n, int k, const void *alpha, const void *a, cudaDataType type_a, int stride_a,
                                   const void *b, cudaDataType type_b, int stride_b, const void *beta, void *c,
                                   cudaDataType type_c, int stride_c, cublasComputeType_t, cublasGemmAlgo_t) {
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (type_a != type_b || type_c != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (m < 0 || n < 0 || k < 0 || stride_a < std::max(1, turn_a == CUBLAS_OP_N ? m : k) ||
        stride_b < std::max(1, turn_b == CUBLAS_OP_N ? k : n) || stride_c < std::max(1, m))
        return CUBLAS_STATUS_INVALID_VALUE;
    cuda_on_cpu::Matrix left = {a, type_a, turn_a, stride_a}, right = {b, type_b, turn_b, stride_b};
    float by = *(const float *)alpha, keep = *(const float *)beta;
    cudaError_t error = cuda_on_cpu::submit(handle->stream, [=](cuda_on_cpu::Stream &) {
        cuda_on_cpu::multiply(left, right, (float *)c, m, n, k, stride_c, by, keep);
        return cudaSuccess;
    });
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
