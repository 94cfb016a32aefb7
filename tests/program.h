// Runs llm as a user does, and keeps what it says. The environment variable LLM says which program; without it, ./llm.
#pragma once

#include <poll.h>
#ifdef __APPLE__
#include <util.h>
#else
#include <pty.h>
#endif
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>

#include <chrono>
#include <iterator>
#include <sstream>

#include "files.h"

namespace program {

using Words = std::vector<std::string>;
using Ids = std::vector<int>;

inline std::string program_path() { return getenv("LLM") ? getenv("LLM") : "./llm"; }

struct Setting {
    std::string program = program_path(), input = "/dev/null";
    rlim_t address_bytes = RLIM_INFINITY, file_bytes = RLIM_INFINITY;
    bool nobody_reads = false, ignore_sigpipe = false;
    std::chrono::seconds patience{600};  // a busy machine may take ten times as long as a quiet one
};

struct Outcome {
    std::string command, out, err;
    int status = -1;  // the exit status; 128 + the signal that ended it; -1: it ran too long
};

inline std::ostream &operator<<(std::ostream &stream, const Outcome &outcome) {
    return stream << outcome.command << "\nstatus " << outcome.status << "\nstdout " << outcome.out.substr(0, 2000)
                  << "\nstderr " << outcome.err.substr(0, 2000);
}

[[noreturn]] inline void become(char **arguments, const Setting &setting, int out, int err) {
    auto limit = [](auto resource, rlim_t bytes) {
        rlimit both{bytes, bytes};
        if (bytes != RLIM_INFINITY) setrlimit(resource, &both);
    };
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_AS, setting.address_bytes);
    limit(RLIMIT_FSIZE, setting.file_bytes);
    signal(SIGXFSZ, SIG_IGN);  // a file that grows too large is an error of the write, as on a full disk
    signal(SIGPIPE, setting.ignore_sigpipe ? SIG_IGN : SIG_DFL);
    dup2(open(setting.input.c_str(), O_RDONLY), 0);
    dup2(out, 1);
    dup2(err, 2);
    execv(setting.program.c_str(), arguments);
    _exit(127);
}

inline Outcome run(Words arguments, const Setting &setting = {}) {
    Outcome result;
    arguments.insert(arguments.begin(), setting.program);
    std::vector<char *> pointers;
    for (std::string &word : arguments) {
        result.command += word + " ";
        pointers.push_back(word.data());
    }
    pointers.push_back(nullptr);

    int out[2], err[2];
    REQUIRE((pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0));
    if (setting.nobody_reads) close(out[0]);
    pid_t child = fork();
    if (child == 0) become(pointers.data(), setting, out[1], err[1]);
    close(out[1]);
    close(err[1]);

    pollfd ends[2] = {{setting.nobody_reads ? -1 : out[0], POLLIN, 0}, {err[0], POLLIN, 0}};
    std::string *texts[2] = {&result.out, &result.err};
    auto deadline = std::chrono::steady_clock::now() + setting.patience;
    bool late = false;
    while ((ends[0].fd >= 0 || ends[1].fd >= 0) && !late) {
        auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
        late = left.count() <= 0 || poll(ends, 2, (int)left.count()) == 0;
        for (int i = 0; i < 2; i++) {
            char buffer[65536];
            ssize_t count = ends[i].revents ? read(ends[i].fd, buffer, sizeof buffer) : -1;
            if (count > 0) texts[i]->append(buffer, (size_t)count);
            if (ends[i].revents && count <= 0) {
                close(ends[i].fd);
                ends[i] = {-1, 0, 0};
            }
        }
    }
    for (pollfd &end : ends)
        if (end.fd >= 0) close(end.fd);
    if (late) kill(child, SIGKILL);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    if (!late) result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return result;
}

// A program on a terminal of so many columns; its standard output is a file, where one is named.
class Terminal {
public:
    std::string seen;  // on the terminal, since something was typed
    explicit Terminal(Words arguments, int columns = 80, const std::string &out = "") {
        winsize size = {24, (unsigned short)columns, 0, 0};
        child_ = forkpty(&terminal_, nullptr, nullptr, &size);
        if (child_ > 0) return;
        if (!out.empty()) dup2(open(out.c_str(), O_CREAT | O_WRONLY, 0600), 1);
        std::vector<char *> pointers;
        for (std::string &word : arguments) pointers.push_back(word.data());
        pointers.push_back(nullptr);
        setenv("TERM", "xterm", 1);
        execv(pointers[0], pointers.data());
        _exit(127);
    }
    ~Terminal() { close(terminal_); }
    // False when the program has ended.
    bool read_more() {
        char buffer[4096];
        const ssize_t count = read(terminal_, buffer, sizeof buffer);
        if (count > 0) seen.append(buffer, (size_t)count);
        return count > 0;
    }
    // Reads until `until` and so many characters are there, or its patience is at its end.
    bool wait_for(const std::string &until, size_t size = 0) {
        const auto end = std::chrono::steady_clock::now() + Setting().patience;
        pollfd ready = {terminal_, POLLIN, 0};
        auto there = [&] { return contains(seen, until) && seen.size() >= size; };
        while (!there() && std::chrono::steady_clock::now() < end)
            if (poll(&ready, 1, 100) > 0 && !read_more()) break;
        return there();
    }
    // Types once the program waits for keys, with readline, which takes each as it comes; or `at_once`.
    void type(const std::string &keys, bool at_once = false) {
        seen.clear();
        const auto end = std::chrono::steady_clock::now() + Setting().patience;
        termios mode;
        while (!at_once && tcgetattr(terminal_, &mode) == 0 && mode.c_lflag & ICANON &&
               std::chrono::steady_clock::now() < end)
            usleep(1000);
        REQUIRE(write(terminal_, keys.data(), keys.size()) == (ssize_t)keys.size());
    }
    // Returns when the program has heard of it: of two signals that are still to be heard, one is lost.
    void interrupt() const {
        const std::string status = "/proc/" + std::to_string(child_) + "/status", line = "ShdPnd:\t";
        auto pending = [&] {
            const std::string text = fs::exists(status) ? slurp(status) : "";  // not on macOS
            const size_t place = text.find(line);
            return place != std::string::npos && strtoull(&text[place + line.size()], nullptr, 16) >> (SIGINT - 1) & 1;
        };
        kill(child_, SIGINT);
        for (int i = 0; i == 0 || (pending() && i < 10000); i++) usleep(1000);
    }
    // Seconds that the program has computed, which a busy machine does not lengthen; on macOS, that have passed.
    double computed() const {
        timespec time = {};
        clockid_t clock = CLOCK_MONOTONIC;
#ifndef __APPLE__
        REQUIRE(clock_getcpuclockid(child_, &clock) == 0);
#endif
        REQUIRE(clock_gettime(clock, &time) == 0);
        return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
    }
    int status() {
        int status = 0;
        REQUIRE(waitpid(child_, &status, 0) == child_);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }

private:
    int terminal_ = -1;
    pid_t child_ = -1;
};

// A line of the shell.
inline Outcome run_shell(const std::string &line, Setting setting = {}) {
    setting.program = "/bin/sh";
    return run({"-c", line}, setting);
}

inline Words operator+(Words a, const Words &b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

inline Words words_of(const std::string &line) {
    std::istringstream words(line);
    return {std::istream_iterator<std::string>(words), {}};
}

// Nothing on standard output, and on standard error one line that holds all of `parts`. Status 2: the input is wrong.
inline void check_refused(const Outcome &result, const Words &parts, int status = 2) {
    CHECK_MESSAGE(result.status == status, result);
    CHECK_MESSAGE(result.out.empty(), result);
    bool one_line = std::count(result.err.begin(), result.err.end(), '\n') == 1 && result.err.back() == '\n';
    CHECK_MESSAGE((one_line && result.err.rfind("llm: ", 0) == 0), result);
    for (const std::string &part : parts) check_contains(result.err, part);
}

// ---- JSON --------------------------------------------------------------------------------------------------

inline Outcome run_well(const Words &arguments, int status = 0) {
    Outcome result = run(arguments);
    REQUIRE_MESSAGE(result.status == status, result);
    return result;
}

// What a command prints with --json, and nothing else but a note, if one is expected.
inline Json run_json(const Words &arguments, int status = 0, const std::string &note = "") {
    Outcome result = run_well(arguments + Words{"--json"}, status);
    CHECK_MESSAGE(result.err.empty() == note.empty(), result);
    check_contains(result.err, note);
    return parse_json(result.command, result.out);
}

// "cache.bytes", "steps.0.token"
inline const Json *at(const Json *item, const std::string &path) {
    for (size_t begin = 0; item && begin <= path.size();) {
        size_t end = std::min(path.find('.', begin), path.size());
        std::string key = path.substr(begin, end - begin);
        const bool entry = is_list(item) && std::stoi(key) < count_of(item);
        item = entry ? &item->items[std::stoul(key)] : member(item, key);
        begin = end + 1;
    }
    return item;
}
inline const Json *at(const Json &root, const std::string &path) { return at(&root, path); }

// `root`: a Json or a pointer to one.
template <class Root>
double number(const Root &root, const std::string &path) {
    const Json *item = at(root, path);
    REQUIRE_MESSAGE(is_number(item), path);
    return item->number;
}
template <class Root>
std::string text(const Root &root, const std::string &path) {
    const Json *item = at(root, path);
    REQUIRE_MESSAGE(is_text(item), path);
    return item->text;
}
template <class Root>
Ids ids(const Root &root, const std::string &path) {
    REQUIRE_MESSAGE(is_list(at(root, path)), path);
    Ids result;
    for (const Json *item : items_of(at(root, path))) {
        REQUIRE_MESSAGE(is_whole(item, INT_MIN, INT_MAX), path);
        result.push_back((int)item->number);
    }
    return result;
}

}  // namespace program
