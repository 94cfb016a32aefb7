// Machines and teams. A machine runs the body of an operation for each of its items, and owns the memory that bodies
// read: it is the CPU's threads here, a GPU in device.h. A Team is a body's view of the threads that share its item:
// one thread (Alone), or a warp of a GPU (device.h).
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <memory>
#include <string>
#include <vector>

#include "formats.h"
#include "json.h"
#include "progress.h"
#include "usable.h"

// A team of one thread. A team shares the items of a loop as  for (i = first(); i < n; i += step()).
struct Alone {
    HOST_DEVICE int first() const { return 0; }
    HOST_DEVICE int step() const { return 1; }
    HOST_DEVICE float sum(float x) const { return x; }      // of the whole team, for each thread of it
    HOST_DEVICE float largest(float x) const { return x; }  // likewise
    HOST_DEVICE void wait() const {}                        // until all threads' writes can be read
};

// Only Linux has pages of 2 MiB, and threads that sleep until a number changes.
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>

inline void ask_for_huge_pages(void *data, size_t bytes) {
    madvise(data, bytes, MADV_HUGEPAGE);  // a kernel without them refuses, and small ones are used
}
inline void sleep_while(std::atomic<unsigned> &number, unsigned is) {  // it may also return without a change
    syscall(SYS_futex, &number, FUTEX_WAIT_PRIVATE, is, nullptr);
}
inline void wake_all(std::atomic<unsigned> &number) { syscall(SYS_futex, &number, FUTEX_WAKE_PRIVATE, INT_MAX); }
#else
#include <condition_variable>
#include <mutex>

inline void ask_for_huge_pages(void *, size_t) {}
inline std::mutex sleepers_mutex;
inline std::condition_variable any_number_changed;
inline void sleep_while(std::atomic<unsigned> &number, unsigned is) {
    std::unique_lock<std::mutex> lock(sleepers_mutex);
    any_number_changed.wait(lock, [&] { return number != is; });
}
inline void wake_all(std::atomic<unsigned> &) {
    std::lock_guard<std::mutex> lock(sleepers_mutex);
    any_number_changed.notify_all();
}
#endif

// ---- Memory of a machine -----------------------------------------------------------------------------------

// Returns `bytes` of zeros. A page is taken when it is first written: 2 MiB if it fits and the kernel has one, else
// 4 KiB. To look up small pages takes a tenth of the time when much is read (Linux,
// Documentation/admin-guide/mm/transhuge.rst).
inline std::shared_ptr<void> map_memory(size_t bytes, const char *what, const char *cure, bool huge = true) {
    bytes = std::max<size_t>(bytes, 1);
    void *data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED)
        fail("%s: %.1f GiB of memory cannot be had (%s): %s", what, (double)bytes / 0x1p30, strerror(errno), cure);
    if (huge) ask_for_huge_pages(data, bytes);
    return std::shared_ptr<void>(data, [bytes](void *start) { munmap(start, bytes); });
}

// A machine's memory, which holds caches, weights and activations.
struct Memory {
    virtual ~Memory() = default;
    virtual std::shared_ptr<void> reserve(size_t bytes, const char *what, const char *cure) = 0;  // zeros
    virtual void write(void *to, const void *from, size_t bytes) = 0;                             // to it
    virtual void read(void *to, const void *from, size_t bytes) = 0;                              // from it
    virtual Room room() const = 0;
};

// Numbers in a machine's memory. resize() does not keep them; assign() copies new ones to it.
template <class T>
struct Buffer {
    std::shared_ptr<void> memory;
    size_t capacity = 0;
    T *data() const { return (T *)memory.get(); }
    void resize(Memory &of, size_t count) {
        if (count <= capacity) return;
        memory.reset();
        size_t more = std::max(count, capacity + capacity / 2);  // so that one token more does not move it each time
        capacity = (double)more * sizeof(T) < of.room().bytes ? more : count;
        memory =
            of.reserve(capacity * sizeof(T), "the activations of this many tokens", "shorten the prompt or lower -c");
    }
    void assign(Memory &of, const std::vector<T> &numbers) {
        resize(of, numbers.size());
        of.write(data(), numbers.data(), numbers.size() * sizeof(T));
    }
};

// ---- The CPU: a team of threads ----------------------------------------------------------------------------

struct Share {  // the items of one thread
    int64_t first, last;
    int count() const { return (int)(last - first); }
};

inline void pause_briefly() {  // between two reads of what another core will change
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // about as long as x86's pause; `yield` takes no time on most cores
#endif
}

// run(body) lets all threads call body(). The functions that share work or wait are called by all of them, inside it.
class Cpu : public Memory {
public:
    using Team = Alone;
    int threads;                 // at most
    std::shared_ptr<void> plan;  // how fast::attention shares the newest pass among the threads

    explicit Cpu(int most) : threads(most), state_(std::make_unique<State>()) { state_->team = most; }

    template <class Body>
    void run(Body body) {
        State &s = *state_;
        const double start = now();
        if (s.team < threads && start >= s.again) s.team = threads, s.watched = 0, s.late = 0;
        const int team = s.team = std::min(s.team, threads);
        if ((int)s.places.size() < team) s.places = std::vector<Place>(team);
        for (Place &place : s.places) place.waits = 0, place.taken = 0;
        s.next = 0;
#pragma omp parallel num_threads(team)
        body();
        adapt(now() - start);
    }

#ifdef _OPENMP
    int team() const { return omp_get_num_threads(); }
    int index() const { return omp_get_thread_num(); }
#else
    int team() const { return 1; }
    int index() const { return 0; }
#endif
    Share share(int64_t items) const { return {items * index() / team(), items * (index() + 1) / team()}; }

    // Calls body(i, team) for all items, each thread for its share. The results can be read when it returns.
    template <class Body>
    void for_each(int64_t items, Body body) {
        Share mine = share(items);
        for (int64_t i = mine.first; i < mine.last && !interrupted(); i++) body(i, Alone());
        wait();
    }
    // The same for items of unequal cost: a thread that is ready takes the next one.
    template <class Body>
    void for_each_in_turn(int64_t items, Body body) {
        int64_t &taken = state_->places[index()].taken;
        for (int64_t i; (i = state_->next.fetch_add(1) - taken) < items;)
            if (!interrupted()) body(i, Alone());
        taken += items + team();  // every thread overshoots by one fetch_add
        wait();
    }

    // Returns (count) numbers that the team shares, valid until the next call.
    template <class T>
    T *shared(size_t count) {
        if (shared_.size() < count * sizeof(T)) {
            wait();
            if (index() == 0) shared_.resize(count * sizeof(T));
            wait();
        }
        return (T *)shared_.data();
    }

    // Waits until the whole team is here: each thread counts its waits where the others read them. OpenMP's own barrier
    // may spin for 10 ms, while the waits of a layer take microseconds.
    void wait() {
        State &s = *state_;
        const int all = team(), me = index();
        const unsigned mine = s.places[me].waits + 1;
        s.places[me].waits = mine;
        if (s.sleeping > 0) wake_all(s.places[me].waits);
        for (int i = 1; i < all; i++) wait_for(s.places[(me + i) % all].waits, mine, all > s.cores);
    }

    std::shared_ptr<void> reserve(size_t bytes, const char *what, const char *cure) override {
        return map_memory(bytes, what, cure);
    }
    void write(void *to, const void *from, size_t bytes) override { memcpy(to, from, bytes); }
    void read(void *to, const void *from, size_t bytes) override { memcpy(to, from, bytes); }
    Room room() const override { return free_memory_of_host(); }
    std::string name() const { return "CPU, " + std::to_string(threads) + (threads == 1 ? " thread" : " threads"); }

private:
    struct alignas(cache_line) Place {   // a thread's counts, in a cache line of their own
        std::atomic<unsigned> waits{0};  // its waits so far in this run
        int64_t taken = 0;               // all threads' fetch_adds in the loops before, in this run
    };
    struct State {
        std::vector<Place> places = std::vector<Place>(1);  // for the one thread outside run()
        std::atomic<int64_t> next{0};  // fetch_adds by for_each_in_turn() so far in this run
        std::atomic<int> sleeping{0};
        std::atomic<int64_t> late{0};  // ns that threads have waited longer than a short spin
        double watched = 0;            // the seconds of runs that `late` is from
        int cores = usable_threads();
        int team = 1;
        double again = 0, patience = 0;  // when the whole team is tried again; seconds from one try to the next
    };
    std::unique_ptr<State> state_;
    Aligned<char> shared_;

    // Waits until another thread has counted as many waits. Spins for about a millisecond, and then sleeps: on a busy
    // machine, a thread that slept gets a core as soon as it is woken, but one that spun waits for its turn among the
    // other programs. `crowded`: another thread of the team may need this core.
    void wait_for(std::atomic<unsigned> &there, unsigned mine, bool crowded) {
        State &s = *state_;
        constexpr int short_spins = 2000, long_spins = 60000;
        auto behind = [&] { return (int)(there.load(std::memory_order_acquire) - mine) < 0; };
        auto spin = [&](int most) {
            for (int i = 0; i < most && behind(); i++) pause_briefly();
            return !behind();
        };
        if (!crowded && spin(short_spins)) return;
        double start = now();
        if (crowded || !spin(long_spins)) {
            s.sleeping++;
            for (unsigned seen; (int)((seen = there) - mine) < 0;) sleep_while(there, seen);
            s.sleeping--;
        }
        s.late += (int64_t)((now() - start) * 1e9);
    }

    // Halves the team if other programs take its cores: a wait for a thread without a core takes a time slice, some
    // milliseconds, and fewer threads are faster. It judges by a tenth of a second, as any machine is disturbed now and
    // then. From time to time the whole team is tried again.
    void adapt(double seconds) {
        State &s = *state_;
        constexpr double window = 0.1;
        s.watched += seconds;
        bool late = (double)s.late.load() * 1e-9 > 0.25 * std::max(s.watched, window) * s.team;
        if (!late && s.watched < window) return;
        if (late) {
            s.patience = std::min(2.0, std::max(0.25, 2 * s.patience));
            s.again = now() + s.patience;
            s.team = std::max(1, s.team / 2);
        } else if (s.team == threads) {
            s.patience = 0;
        }
        s.watched = 0, s.late = 0;
    }
};
