// What is heard and said while something takes long: Ctrl-C, and on a terminal how far it is.
#pragma once

#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <new>
#include <utility>

#include "json.h"

inline double now() {  // seconds
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Ctrl-C ends the work, not the program: what there is so far is said first. A machine's threads look at this between
// two items of an operation and leave out the rest; so whoever asked for the operation throws what it computed away.
inline std::atomic<int> interrupts{0};
inline bool interrupted() { return interrupts.load(std::memory_order_relaxed) > 0; }

struct Interrupted {};
inline void stop_if_interrupted() {
    if (interrupted()) throw Interrupted();
}

// A line on the terminal below the cursor, so that a text that is just being written stays as it is: one down and up
// again, for there must be a line; keep the place; to the line's beginning, do not wrap; and back to the place.
inline const bool progress_is_shown = isatty(2) == 1;
inline std::atomic<bool> progress_stands{false};
inline void show_progress(const std::string &text) {
    if (!progress_is_shown) return;
    progress_stands = true;
    fprintf(stderr, "\033D\033[A\0337\r\033[B\033[?7l%s\033[K\033[?7h\0338", text.c_str());
}
// Nothing stands behind or below the cursor but that line. Also called where a signal came.
inline void erase_progress() {
    if (progress_stands.exchange(false) && write(2, "\033[J", 3) < 0) return;
}

// What is done otherwise than it was asked for, or might surprise: it is said when the work begins, so that an error
// before that is the only line.
inline std::optional<std::string> held_notes = "";
inline void begin_work() {
    if (held_notes) fputs(std::exchange(held_notes, std::nullopt)->c_str(), stderr);
}

// Names of files that are not yet complete, nullptr for none. These files go with a process that a signal ends.
inline std::atomic<const char *> unfinished[4] = {};
inline void leave_nothing() {
    erase_progress();
    for (const char *name : unfinished)
        if (name) unlink(name);
}

// What main() begins with. Where memory ends: also where no exception may pass, in the threads of a parallel region.
inline void prepare_process() {
    std::set_new_handler([] {
        leave_nothing();
        fputs("llm: not enough memory: shorten the prompt or lower -c\n", stderr);
        _exit(2);
    });
    signal(SIGINT, [](int) {
        if (interrupts++ == 0) return;
        leave_nothing();
        _exit(130);  // asked twice
    });
    signal(SIGBUS, [](int) {  // a page of a mapped file is no longer there
        leave_nothing();
        const char line[] = "llm: a file that is read was cut meanwhile, or its disk fails: fetch the model again\n";
        _exit(write(2, line, sizeof line - 1) < 0 ? 1 : 2);
    });
    auto end = [](int number) { leave_nothing(), signal(number, SIG_DFL), raise(number); };
    for (int number : {SIGTERM, SIGHUP, SIGPIPE})
        if (signal(number, end) == SIG_IGN) signal(number, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);  // a file that grows too large is an error of the write, as on a full disk
    // The next file to be opened would take the number of a closed standard stream, and get what is written there. The
    // wrong way round, so that to read or to write there fails as before.
    for (int stream = 0; stream < 3; stream++)
        if (fcntl(stream, F_GETFD) < 0) open("/dev/null", stream == 0 ? O_WRONLY : O_RDONLY);
}

// How far some work is, from its second half second on: "prefill: 1536 of 6000 tokens, 312 tokens/s, 14 s left".
class Progress {
public:
    // Inside another one it says nothing, but counts for that.
    Progress(const std::string &what, double total, const char *unit = "tokens")
        : what_(what), unit_(unit), total_(total), outer_(current_ != nullptr) {
        if (!outer_) current_ = this, begin_work();
    }
    Progress(const Progress &) = delete;
    ~Progress() {
        if (!outer_) current_ = nullptr, erase_progress();
    }
    // `amount` more is done; and of what is not, a `part` so far. Of several threads one says it.
    static void add(double amount) {
        if (current_) current_->done_ += amount, at(0);
    }
    static void at(double part) {
        if (heard) heard();
        if (Progress *here = current_) here->say(part);
    }

    static inline std::function<void()> heard = nullptr;  // at each layer and after each pass: tests interrupt there

private:
    void say(double part) {
        double time = now(), due = due_, done = done_ + part;
        if (time < due || !due_.compare_exchange_strong(due, time + 0.1) || done <= 0) return;
        double rate = done / (time - start_), left = (total_ - done) / rate;
        show_progress(what_ + formatted(": %.0f of %.0f %s, ", done, total_, unit_) +
                      formatted(rate < 100 ? "%.3g %s/s, " : "%.0f %s/s, ", rate, unit_) +
                      formatted(left < 100 ? "%.0f s left" : "%.0f min left", left < 100 ? left : left / 60));
    }
    static inline Progress *current_ = nullptr;
    std::string what_;
    const char *unit_;
    double total_, done_ = 0, start_ = now();
    std::atomic<double> due_{start_ + 0.5};
    bool outer_;
};
