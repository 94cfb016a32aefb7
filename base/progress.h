// What happens during long work: Ctrl-C is noticed, and a terminal shows the progress.
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

// Ctrl-C ends the work, not the program, so that results so far can be shown. A machine's threads check this between
// two items of an operation and skip the rest, so the caller must discard what the operation computed.
inline std::atomic<int> interrupts{0};
inline bool interrupted() { return interrupts.load(std::memory_order_relaxed) > 0; }

struct Interrupted {};
inline void stop_if_interrupted() {
    if (interrupted()) throw Interrupted();
}

// Shows a line below the cursor, so that a text that is being written stays intact. The codes: down and up again, so
// that the line exists; save the cursor; go to the start of the line below and do not wrap; restore the cursor.
inline const bool progress_is_shown = isatty(2) == 1;
inline std::atomic<bool> progress_stands{false};
inline void show_progress(const std::string &text) {
    if (!progress_is_shown) return;
    progress_stands = true;
    fprintf(stderr, "\033D\033[A\0337\r\033[B\033[?7l%s\033[K\033[?7h\0338", text.c_str());
}
// Erases that line, as nothing else is after or below the cursor. Signal handlers call it, too.
inline void erase_progress() {
    if (progress_stands.exchange(false) && write(2, "\033[J", 3) < 0) return;
}

// Notes on what is done differently than asked for, or may surprise. They are shown when the work begins, so that an
// error before that is the only line.
inline std::optional<std::string> held_notes = "";
inline void begin_work() {
    if (held_notes) fputs(std::exchange(held_notes, std::nullopt)->c_str(), stderr);
}

// Names of files that are not yet complete, nullptr for none. They are deleted if a signal ends the process.
inline std::atomic<const char *> unfinished[4] = {};
inline void leave_nothing() {
    erase_progress();
    for (const char *name : unfinished)
        if (name) unlink(name);
}

// main() calls it first. Out of memory ends the process here, as no exception may leave a thread of a parallel region.
inline void prepare_process() {
    std::set_new_handler([] {
        leave_nothing();
        fputs("llm: not enough memory: shorten the prompt or lower -c\n", stderr);
        _exit(2);
    });
    signal(SIGINT, [](int) {
        if (interrupts++ == 0) return;
        leave_nothing();
        _exit(130);  // the second Ctrl-C
    });
    signal(SIGBUS, [](int) {  // a page of a mapped file is no longer there
        leave_nothing();
        const char line[] = "llm: a file that is read was cut meanwhile, or its disk fails: fetch the model again\n";
        _exit(write(2, line, sizeof line - 1) < 0 ? 1 : 2);
    });
    auto end = [](int number) { leave_nothing(), signal(number, SIG_DFL), raise(number); };
    for (int number : {SIGTERM, SIGHUP, SIGPIPE})
        if (signal(number, end) == SIG_IGN) signal(number, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);  // a write beyond the limit of a file's size then fails, as on a full disk
    // The next file to be opened would take the number of a closed standard stream, and receive its output. So
    // /dev/null takes it, opened in the wrong direction: to read or to write there fails as before.
    for (int stream = 0; stream < 3; stream++)
        if (fcntl(stream, F_GETFD) < 0) open("/dev/null", stream == 0 ? O_WRONLY : O_RDONLY);
}

// How far some work is, shown after half a second: "prefill: 1536 of 6000 tokens, 312 tokens/s, 14 s left".
class Progress {
public:
    // Inside another Progress it shows nothing: what is done then counts for the outer one.
    Progress(const std::string &what, double total, const char *unit = "tokens")
        : what_(what), unit_(unit), total_(total), outer_(current_ != nullptr) {
        if (!outer_) current_ = this, begin_work();
    }
    Progress(const Progress &) = delete;
    ~Progress() {
        if (!outer_) current_ = nullptr, erase_progress();
    }
    // add(): `amount` more is done. at(): so is `part` of what is not counted yet. One thread shows it.
    static void add(double amount) {
        if (current_) current_->done_ += amount, at(0);
    }
    static void at(double part) {
        if (heard) heard();
        if (Progress *here = current_) here->say(part);
    }

    static inline std::function<void()> heard = nullptr;  // called at each layer and after each pass, for tests

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
