// Runs CUDA kernels where there is no GPU: included before anything else, it gives g++ and clang++ what device.h and
// the kernels need of the CUDA toolkit.
//
// A block's threads are fibers (Boost.Context) that take turns where a thread waits for others: at barriers and
// shuffles. Blocks run one after another, and so do launches, each before its call returns. What CUDA leaves undefined
// is a failure here: the launch returns an error, whose text says who did what; cuda_on_cpu::failures keeps them all.
//   barriers  some threads of the block, or lanes of the warp, never come, have ended, or come to another barrier
//   shared    bytes read that nobody wrote, or whose copy has not arrived; an index beyond its piece; a race: threads
//             at the same bytes, one of them writing, with no barrier between, in whatever order they ran
//   access    an address not aligned to what is copied, or not in the card's memory
//   order     a thread that ends without wait_for_previous(), or with copies that it never committed; with early_start
//             one that touches before it what a kernel has written since the host last waited (AddressSanitizer says)
// The sanitizers see the rest: the memory of cuda_runtime_on_cpu.h ends where it ends.
//
// Limits. It knows the words that the kernels use: warps meet with all 32 lanes, blocks have threads along x. Races in
// the card's memory are not seen. Shared memory is ordered by __syncthreads() and __syncwarp(), but not by shuffles:
// CUDA does not promise that either. Two calls on one line are taken for one barrier. An element of Shared<T> is a
// number to be read or assigned, not a reference: float x = s[i], not auto.
#pragma once

#define CUDA_ON_CPU

#include <execinfo.h>
#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../base/formats.h"

#ifdef __has_feature  // clang++
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__
#endif
#endif

// ---- Words -------------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define CUBLAS(function) function

namespace cuda_on_cpu {

template <class T>
struct alignas(4 * sizeof(T)) Four {
    T x, y, z, w;
};

inline namespace words {  // CUDA's own, which everybody sees

using uint4 = Four<unsigned>;
using float4 = Four<float>;

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline uint3 threadIdx, blockIdx;  // of the thread that runs
inline dim3 blockDim, gridDim;

inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
// Byte i of the result is byte (selector >> 4 i) & 7 of the eight bytes of x, then y.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
}  // namespace words

// ---- Threads -----------------------------------------------------------------------------------------------

// A place in the source where threads meet.
struct Site {
    const char *word, *file;
    int line;
};

// Of a number in shared memory, and of its piece: bytes from the beginning; bytes of a number.
struct Spot {
    int at, piece, size;
};

// A copy to shared memory that is on its way.
struct Copy {
    Spot to;
    int batch;
    uint4 bytes;
};

struct Thread {
    enum State { ready, at_barrier, at_warp, ended };
    boost::context::fiber context;  // where it goes on
    const void *stack = nullptr;
    size_t stack_bytes = 0;
    void *fake_stack = nullptr;  // AddressSanitizer's
    int number = 0;              // in its block: threadIdx.x
    State state = ended;
    Site site = {};             // where it waits
    unsigned shuffles = 0;      // so far,
    uint64_t given[2][3] = {};  // and what it gave to the last two
    bool waited = false;        // for the kernel before
    int pieces = 0;             // of shared memory that it took
    int batches = 0;            // of copies that it committed
    std::vector<Copy> copies;   // on their way
};

struct Warp {
    int arrived = 0;        // lanes that wait in it
    uint32_t barriers = 0;  // that its lanes have passed
};

struct Block {
    int threads = 0, arrived = 0;
    size_t shared_bytes = 0;
    uint32_t first_barrier = 0;               // barriers that had been passed when it began
    std::vector<std::pair<int, int>> pieces;  // of shared memory: begin, end
    Warp warps[32];
    std::string failure;  // empty while all is well
    void *trace[24];      // return addresses of the thread that failed
    int trace_length = 0;
};

// Thrown in each thread of a block that has failed.
struct Stop {};

inline Block block;                               // the one that runs
inline Thread host;                               // the stack from which kernels are launched
inline Thread *running = &host, *before = &host;  // the one that runs, and the one that ran last

// For tests to set: what kernels have written since the host last waited is out of reach until wait_for_previous(), as
// on a card, where a kernel starts while those before it are still at work.
inline bool early_start = false;
inline void hide_written(bool hide);  // cuda_runtime_on_cpu.h
inline Thread *threads[1024];         // of the block; as many as were ever needed, never deleted
inline std::function<void()> body;    // of the kernel
inline uint32_t barriers = 0;         // of blocks, passed since the program began

inline int lane_number() { return running->number % 32; }
inline Warp &warp() { return block.warps[running->number / 32]; }

// The first thing that is done on a stack when it is switched to.
inline void arrive(Thread &me, boost::context::fiber &&from) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(me.fake_stack, &before->stack, &before->stack_bytes);
#endif
    before->context = std::move(from);
    threadIdx = {(unsigned)me.number, 0, 0};
    if (early_start) hide_written(&me != &host && !me.waited);
}

inline void switch_to(Thread &next) {
    Thread &me = *running;
    before = &me;
    running = &next;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&me.fake_stack, next.stack, next.stack_bytes);
#endif
    arrive(me, std::move(next.context).resume());
}

// To the next thread that is ready; to the host, if none is or the block has failed.
inline void switch_to_next() {
    int at = running->number;
    for (int i = 1; i < block.threads && block.failure.empty(); i++) {
        at = at + 1 < block.threads ? at + 1 : 0;
        if (threads[at]->state == Thread::ready) return switch_to(*threads[at]);
    }
    switch_to(host);
}

inline void wait() {
    switch_to_next();
    if (!block.failure.empty()) throw Stop{};
}

// ---- Failures ----------------------------------------------------------------------------------------------

inline std::vector<std::string> failures;

inline std::string text_of(const uint3 &index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

inline std::string text_of(const Site &site) {
    std::string file = site.file;
    return std::string(site.word) + " (" + file.substr(file.rfind('/') + 1) + ":" + std::to_string(site.line) + ")";
}

inline void note_failure(const Thread &thread, const std::string &what) {
    block.failure = "block " + text_of(blockIdx) + ", thread " + std::to_string(thread.number) + ": " + what;
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

// What AddressSanitizer knows of a place in the program, from the innermost of the functions inlined there.
inline std::vector<std::string> symbols(void *place, const char *format) {
    std::vector<std::string> found;
    char text[4096] = {};
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_symbolize_pc(place, format, text, sizeof text);
#else
    snprintf(text, sizeof text, "%p", place), (void)format;
#endif
    for (const char *line = text; *line; line += strlen(line) + 1) found.push_back(line);
    return found;
}

// A line of a kernel or of device.h.
inline bool shown(const std::string &line) {
    for (const char *other : {"<null>", "/usr/", "sanitizer", "_on_cpu.h"})
        if (line.find(other) != std::string::npos) return false;
    return true;
}

// The block's failure, with the kernel's name and the lines that led there. On the host's stack: it takes room.
inline void keep_failure(void *kernel) {
    std::string text = symbols((char *)kernel + 1, "%f")[0] + ", " + block.failure + ",";
    for (int i = 0; i < block.trace_length; i++)
        for (const std::string &line : symbols(block.trace[i], "%s:%l"))
            if (shown(line)) text += " " + line.substr(line.rfind('/') + 1);
    failures.push_back(text.substr(0, text.find_last_not_of(',') + 1));
}

// ---- Planted faults ----------------------------------------------------------------------------------------

inline std::vector<Site> places;       // where threads met, once each, while it is noted
inline bool noting_places = false;     // whether it is
inline const Site *planted = nullptr;  // there barriers and waits are left out, shuffles read elsewhere

inline bool same_place(const Site &a, const Site &b) {
    return a.line == b.line && a.word == b.word && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

// Whether the fault is in this place.
inline bool is_planted(const Site &site) {
    auto here = [&](const Site &place) { return same_place(place, site); };
    if (noting_places && std::none_of(places.begin(), places.end(), here)) places.push_back(site);
    return planted && here(*planted);
}

// Would anybody notice? The places of a kernel where all of `checks`, which are true of the kernel as it is, stay true
// with a fault planted. A launch that fails is noticed, too.
inline std::vector<std::string> unnoticed_faults(const std::vector<std::function<bool()>> &checks) {
    std::vector<std::string> unnoticed;
    size_t known = failures.size();
    auto all_true = [&] {
        try {
            return std::all_of(checks.begin(), checks.end(), [](auto &check) { return check(); });
        } catch (const std::exception &) {
            failures.resize(known);
            return false;
        }
    };
    places.clear();
    noting_places = true;
    if (!all_true()) return {"something is wrong without any fault"};
    noting_places = false;
    for (const Site &place : places) {
        planted = &place;
        if (all_true()) unnoticed.push_back(text_of(place));
    }
    planted = nullptr;
    return unnoticed;
}

// ---- Barriers, shuffles ------------------------------------------------------------------------------------

inline bool meets(const Thread &a, const Thread &b) { return a.state == b.state && same_place(a.site, b.site); }

// For whom a thread waits in vain.
inline std::string missing_at(const Thread &me) {
    bool all = me.state == Thread::at_barrier;
    int first = all ? 0 : me.number / 32 * 32, end = all ? block.threads : first + 32;
    for (int i = first; i < end; i++) {
        std::string text = text_of(me.site) + " waits for thread " + std::to_string(i) + ", which";
        if (i >= block.threads) return text + " the block does not have";
        if (threads[i]->state == Thread::ended) return text + " has ended";
        if (!meets(me, *threads[i])) return text + " is at " + text_of(threads[i]->site);
    }
    return text_of(me.site) + " waits";
}

[[noreturn]] __attribute__((noinline)) inline void broken_meeting() { broken("%s", missing_at(*running).c_str()); }

// Waits for `count` threads from `first` on: the block or a warp, of which `arrived` are there. The last one counts the
// barrier.
inline void meet(const Site &site, Thread::State state, int &arrived, int first, int count, uint32_t *barriers) {
    Thread &me = *running;
    me.site = site;
    me.state = state;
    if (++arrived < count) return wait();
    arrived = 0;
    for (int i = first; i < first + count; i++)
        if (!meets(me, *threads[i])) broken_meeting();
    if (barriers) ++*barriers;
    for (int i = first; i < first + count; i++) threads[i]->state = Thread::ready;
}

inline void meet_warp(const Site &site, uint32_t *barriers) {
    meet(site, Thread::at_warp, warp().arrived, running->number - lane_number(), 32, barriers);
}

#define FROM_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline namespace words {

inline void __syncthreads(FROM_HERE) {
    const Site site = {"__syncthreads", file, line};
    if (!is_planted(site)) meet(site, Thread::at_barrier, block.arrived, 0, block.threads, &barriers);
}
inline void __syncwarp(FROM_HERE) {
    const Site site = {"__syncwarp", file, line};
    if (!is_planted(site)) meet_warp(site, &warp().barriers);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, FROM_HERE) {
    static_assert(std::is_arithmetic_v<T>, "shuffles take a number; one from Shared<T> must be read before");
    const Site site = {"__shfl_xor_sync", file, line};
    int source = lane_number() ^ (bits & 31);
    if (mask != 0xffffffff) broken("%s: of mask %08x, not of all lanes", text_of(site).c_str(), mask);
    if (is_planted(site)) source = (source + 5) % 32;  // xor would lead a butterfly to all lanes again
    unsigned turn = running->shuffles++ % 2;           // a lane is at most one shuffle ahead of the others
    memcpy(running->given[turn], &value, sizeof value);
    meet_warp(site, nullptr);
    memcpy(&value, threads[running->number - lane_number() + source]->given[turn], sizeof value);
    return value;
}

}  // namespace words

// What all lanes of the warp give: of(lane), there until the thread's next shuffle but one.
template <class T>
auto exchange(const T &value, FROM_HERE) {
    static_assert(sizeof value <= sizeof running->given[0]);
    unsigned turn = running->shuffles++ % 2;
    memcpy(running->given[turn], &value, sizeof value);
    meet_warp({"exchange", file, line}, nullptr);
    Thread **lanes = &threads[running->number - lane_number()];
    return [lanes, turn](int lane) -> const T & { return *(const T *)lanes[lane]->given[turn]; };
}

// ---- Shared memory -----------------------------------------------------------------------------------------

constexpr int most_shared_bytes = 227 << 10;  // of a block

// Who used a byte, after how many barriers of the block and of the warp.
struct Touch {
    uint64_t barrier : 32, warp_barrier : 18, thread : 10, several : 3, copying : 1;
    enum { one, lanes, warps };  // `several`: threads that did since the last barrier
};

alignas(16) inline char shared_bytes[most_shared_bytes];
inline Touch last_writes[most_shared_bytes], last_reads[most_shared_bytes];  // (byte)

enum class Use { read, write, copy };

#define UNCHECKED __attribute__((no_sanitize("address", "undefined")))  // what runs for every byte

UNCHECKED inline bool operator==(const Touch &a, const Touch &b) {
    uint64_t all_of_a, all_of_b;
    memcpy(&all_of_a, &a, sizeof a);
    memcpy(&all_of_b, &b, sizeof b);
    return all_of_a == all_of_b;
}

// A barrier stands between the two, or they are one thread's.
UNCHECKED inline bool ordered(const Touch &was, const Touch &now) {
    if (was.barrier != now.barrier) return true;
    if (was.several == Touch::warps || was.thread / 32 != now.thread / 32) return false;
    return was.warp_barrier != now.warp_barrier || (was.several == Touch::one && was.thread == now.thread);
}

// What must be remembered of both.
UNCHECKED inline Touch both(const Touch &was, Touch now) {
    if (was.barrier == now.barrier && (was.several == Touch::warps || was.thread / 32 != now.thread / 32))
        now.several = Touch::warps;
    else if (!ordered(was, now))
        now.several = Touch::lanes;
    return now;
}

[[noreturn]] __attribute__((noinline)) inline void broken_use(Use use, const Spot &spot, const Touch &was,
                                                              const char *did) {
    const char *does[] = {"reads", "writes", "starts a copy to"};
    std::string piece = "the shared memory from byte " + std::to_string(spot.piece) + " on";
    std::string what =
        std::string(does[(int)use]) + " element " + std::to_string((spot.at - spot.piece) / spot.size) + " of " + piece;
    if (was.barrier < block.first_barrier) broken("%s, which nobody wrote", what.c_str());
    if (was.copying) broken("%s before the copy that thread %d started has arrived", what.c_str(), (int)was.thread);
    broken("race: %s, which thread %d %s, with no barrier between", what.c_str(), (int)was.thread, did);
}

// Checks and notes that the running thread uses `count` bytes.
UNCHECKED inline void use_shared(Use use, const Spot &spot, int count) {
    uint64_t thread = (uint64_t)running->number, warp_barrier = block.warps[thread / 32].barriers;
    const Touch now = {barriers, warp_barrier, thread, Touch::one, use == Use::copy};
    for (int i = spot.at, end = i + count; i < end;) {
        const Touch write = last_writes[i], read = last_reads[i];
        bool written = write.barrier >= block.first_barrier;
        if (written ? write.copying : use == Use::read) broken_use(use, spot, write, "");
        if (!ordered(write, now)) broken_use(use, spot, write, "wrote");
        if (use != Use::read && !ordered(read, now)) broken_use(use, spot, read, "read");
        Touch new_read = use == Use::read ? both(read, now) : read;
        Touch new_write = use == Use::read ? write : now;
        do {  // all bytes that were used alike
            last_reads[i] = new_read;
            last_writes[i] = new_write;
        } while (++i < end && last_writes[i] == write && last_reads[i] == read);
    }
}

// What s[i] is: a number to be read or assigned at once. `auto x = s[i]` would read it later, and does not compile.
template <class T>
struct Element {
    Spot spot;
    operator T() && {
        use_shared(Use::read, spot, sizeof(T));
        T value;
        memcpy(&value, shared_bytes + spot.at, sizeof(T));
        return value;
    }
    T operator=(T value) && {
        use_shared(Use::write, spot, sizeof(T));
        memcpy(shared_bytes + spot.at, &value, sizeof(T));
        return value;
    }
    T operator=(Element &&from) && { return std::move(*this) = (T)std::move(from); }
};

inline namespace words {

template <class T>
struct Shared {
    int begin = 0, end = 0;  // of its piece, in bytes
    int64_t start = 0;       // of element 0
    // The bytes from element i on as a Wide.
    template <class Wide>
    Element<Wide> wide(int i) const {
        int64_t at = start + i * (int64_t)sizeof(T), size = sizeof(T);
        if (at < begin || at + (int64_t)sizeof(Wide) > end)
            broken("%zu bytes at element %d of a piece of %d", sizeof(Wide), (int)((at - begin) / size),
                   (int)((end - begin) / size));
        if (at % (int64_t)alignof(Wide)) broken("%zu bytes not aligned at element %d", sizeof(Wide), i);
        return {{(int)at, begin, (int)sizeof(T)}};
    }
    Element<T> operator[](int i) const { return wide<T>(i); }
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
    size_t next = 0;
    template <class T>
    Shared<T> take(int count) {
        size_t bytes = count * sizeof(T), number = running->pieces++;
        std::pair<int, int> piece = {(int)next, (int)(next + bytes)};
        next += (bytes + 15) / 16 * 16;
        if (count < 0 || next > block.shared_bytes)
            broken("takes %zu bytes of shared memory, the launch gave %zu", next, block.shared_bytes);
        if (number == block.pieces.size()) block.pieces.push_back(piece);
        if (block.pieces[number] != piece)
            broken("takes bytes [%d, %d) of shared memory, another thread [%d, %d)", piece.first, piece.second,
                   block.pieces[number].first, block.pieces[number].second);
        return {piece.first, piece.second, piece.first};
    }
};

}  // namespace words

// ---- Copies ------------------------------------------------------------------------------------------------

inline void note_wait() {
    running->waited = true;
    if (early_start) hide_written(false);
}

inline bool reachable(const void *address);  // by the card: cuda_runtime_on_cpu.h

template <class T>
void copy_async(Shared<T> to, int i, const void *from, int bytes) {
    if ((uintptr_t)from % 16) broken("16 bytes not aligned at %p", from);
    if (bytes < 0 || bytes > 16) broken("a copy of %d bytes", bytes);
    if (bytes && !reachable(from)) broken("%p is not in the card's memory", from);
    Spot spot = to.template wide<uint4>(i).spot;
    use_shared(Use::copy, spot, 16);
    Copy copy = {spot, running->batches, {}};
    memcpy(&copy.bytes, from, (size_t)bytes);
    running->copies.push_back(copy);
}

inline void commit_copies() { running->batches++; }

inline void wait_copies(int most, FROM_HERE) {
    if (is_planted({"wait_copies", file, line})) return;
    std::vector<Copy> &copies = running->copies;
    auto next = copies.begin();
    for (; next != copies.end() && next->batch < running->batches - most; ++next) {
        std::fill_n(last_writes + next->to.at, 16, Touch{});
        Element<uint4>{next->to} = next->bytes;
    }
    copies.erase(copies.begin(), next);
}

#undef FROM_HERE

// ---- Blocks ------------------------------------------------------------------------------------------------

constexpr size_t stack_bytes = 128 << 10;

inline void run_thread(Thread &me) {
    try {
        if (!block.failure.empty()) return;
        body();
        if (!me.waited) broken("ends without wait_for_previous()");
        if (!me.copies.empty() && me.copies.back().batch == me.batches) broken("ends with copies it never committed");
    } catch (const Stop &) {
    }
}

inline Thread *new_thread(int number) {
    using boost::context::fiber;
    boost::context::protected_fixedsize_stack stacks(stack_bytes);
    boost::context::stack_context stack = stacks.allocate();
    Thread *me = new Thread;
    me->number = number;
    me->stack = (char *)stack.sp - stack.size;
    me->stack_bytes = stack.size;
    boost::context::preallocated place(stack.sp, stack.size, stack);
    me->context = fiber(std::allocator_arg, place, stacks, [me](fiber &&from) -> fiber {
        arrive(*me, std::move(from));
        for (;;) {  // a thread of a block each time
            run_thread(*me);
            me->state = Thread::ended;
            switch_to_next();
        }
    });
    return me;
}

inline void start_block(int count, size_t bytes) {
    block.threads = count;
    block.arrived = block.trace_length = 0;
    block.shared_bytes = bytes;
    block.first_barrier = ++barriers;
    block.pieces.clear();
    block.failure.clear();
    for (Warp &warp : block.warps) warp.arrived = 0;
    for (int i = 0; i < count; i++) {
        if (!threads[i]) threads[i] = new_thread(i);
        Thread &thread = *threads[i];
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
    for (int i = 0; i < count && block.failure.empty(); i++)
        if (threads[i]->state != Thread::ended) note_failure(*threads[i], missing_at(*threads[i]));
    for (int i = 0; i < count; i++)
        if (threads[i]->state != Thread::ended) switch_to(*threads[i]);
    return block.failure.empty();
}

inline bool run_blocks(size_t bytes) {
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
                if (!run_block((int)blockDim.x, bytes)) return false;
    return true;
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu::words;

// ---- Instructions ------------------------------------------------------------------------------------------
// The plain twins of fast/instructions.h, which says what each computes.

#define UNROLL

inline float exp2_fast(float x) { return x < -126 ? 0 : exp2f(x); }

template <class Number>
uint32_t pack(float first, float second) {
    Number low, high;
    from_float(low, first);
    from_float(high, second);
    return (uint32_t)low.bits | (uint32_t)high.bits << 16;
}

inline uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
    auto part = [](uint32_t two, int i) { return (double)to_float(bf16{(uint16_t)(two >> 16 * i)}); };
    auto one = [&](int i) { return (float)(part(a, i) * part(b, i) + part(c, i)); };
    return pack<bf16>(one(0), one(1));
}

inline uint32_t transposed(uint32_t matrix) {
    auto of = cuda_on_cpu::exchange(matrix);
    int row = (int)threadIdx.x % 32 / 4, column = 2 * ((int)threadIdx.x % 4);
    auto number = [&](int from) { return of(from * 4 + row / 2) >> 16 * (row % 2) & 0xffff; };
    return number(column) | number(column + 1) << 16;
}

template <class Number>
void multiply_matrices(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    struct Factors {
        uint32_t a[4], b[2];
    };
    auto of = cuda_on_cpu::exchange(Factors{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
    auto number = [](uint32_t two, int i) { return (double)to_float(Number{(uint16_t)(two >> 16 * i)}); };
    for (int i = 0; i < 4; i++) {
        int row = (int)threadIdx.x % 32 / 4 + i / 2 * 8, column = 2 * ((int)threadIdx.x % 4) + i % 2;
        double sum = sums[i];
        for (int k = 0; k < 16; k++)
            sum += number(of(row % 8 * 4 + k % 8 / 2).a[row / 8 + k / 8 * 2], k % 2) *
                   number(of(column * 4 + k % 8 / 2).b[k / 8], k % 2);
        sums[i] = (float)sum;
    }
}

template <class T>
void copy_async16(Shared<T> to, int i, const void *from, int bytes) {
    cuda_on_cpu::copy_async(to, i, from, bytes);
}
inline void commit_copies() { cuda_on_cpu::commit_copies(); }
template <int most>
void wait_copies() {
    cuda_on_cpu::wait_copies(most);
}

#include "cuda_runtime_on_cpu.h"
