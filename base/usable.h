// How much memory and how many threads this process may use, by the machine, its container (cgroups) and environment.
#pragma once

#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

// Returns the number after `key` ("MemAvailable:") in a kernel's file; "": its first. No number there: `otherwise`.
inline double kernel_number(const std::string &path, const std::string &key, double otherwise) {
    std::ifstream file(path);
    std::string word;
    while (!key.empty() && file >> word && word != key) continue;
    double number;
    return file >> number ? number : otherwise;
}

// What differs between systems: bytes of memory that can be had without swapping; the path of the program's file, "" if
// it is unknown; the unit of rusage's memory, in bytes.
#ifdef __linux__
inline double free_memory_of_machine(const std::string &root) {
    double all = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGE_SIZE);
    return kernel_number(root + "/proc/meminfo", "MemAvailable:", all / 1024) * 1024;
}
inline std::string own_path() {
    char path[4097] = {};
    return readlink("/proc/self/exe", path, sizeof path - 1) > 0 ? path : "";
}
constexpr int rusage_unit = 1024;
#else  // macOS, which has neither /proc nor cgroups: searches for them below find none
#include <mach-o/dyld.h>
#include <mach/mach.h>

inline double free_memory_of_machine(const std::string &) {
    vm_statistics64_data_t pages;
    mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
    if (host_statistics64(mach_host_self(), HOST_VM_INFO64, (host_info64_t)&pages, &count) != KERN_SUCCESS)
        return (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGE_SIZE);
    return ((double)pages.free_count + (double)pages.inactive_count) * (double)sysconf(_SC_PAGE_SIZE);
}
inline std::string own_path() {
    char path[4097] = {};
    uint32_t size = sizeof path;
    return _NSGetExecutablePath(path, &size) == 0 ? path : "";
}
constexpr int rusage_unit = 1;
#endif

// Returns the path of a project's file, which is next to the program. The programs of tests are in build/.
inline std::string file_of_project(const std::string &name) {
    const std::string program = own_path(), beside = program.substr(0, program.rfind('/') + 1) + name;
    const size_t build = program.rfind("/build/");
    const bool of_test = build != std::string::npos && access(beside.c_str(), F_OK) != 0;
    return of_test ? program.substr(0, build + 1) + name : beside;
}

// Returns the folders of this process's cgroups and of those around them. `controller`: "memory", "cpu" in version 1;
// "" in version 2. A container sees its own folder as the top, so paths need not exist. `root`: a prefix for tests.
inline std::vector<std::string> cgroup_folders(const std::string &root, const std::string &controller) {
    std::vector<std::string> folders;
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {  // "4:cpu,cpuacct:/a/b", version 2: "0::/a/b"
        size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
        if (names.find("," + controller + ",") == std::string::npos) continue;
        for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
            if (path == "/") path = "";
            folders.push_back(root + "/sys/fs/cgroup/" + controller + path + "/");
            if (controller.empty()) folders.push_back(root + "/sys/fs/cgroup/unified" + path + "/");
            if (path.rfind('/') == std::string::npos) break;
        }
    }
    return folders;
}

// Bytes that are still free, and where: a card, or the one of "this machine" and "this container" that has less.
struct Room {
    double bytes;
    std::string name;
};

// What can be had without swapping. A cgroup's page cache, such as weights read before, counts as free: it gives way.
inline Room free_memory_of_host(const std::string &root = "") {
    Room least{free_memory_of_machine(root), "this machine"};
    auto look_into = [&](const std::string &folder, const char *most, const char *used, const std::string &total) {
        double bytes = kernel_number(folder + most, "", INFINITY) - kernel_number(folder + used, "", 0);
        for (const char *cached : {"inactive_file", "active_file"})
            bytes += kernel_number(folder + "memory.stat", total + cached, 0);
        if (bytes < least.bytes) least = {std::max(0.0, bytes), "this container"};
    };
    for (auto &folder : cgroup_folders(root, "")) look_into(folder, "memory.max", "memory.current", "");
    for (auto &folder : cgroup_folders(root, "memory"))
        look_into(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_");
    return least;
}

// Threads that may run at once: the least of its processors, its cgroups' share of time and `wanted`; at least 1.
inline int usable_threads(const std::string &root = "", const char *wanted = getenv("OMP_NUM_THREADS")) {
#ifdef _OPENMP
    double threads = omp_get_num_procs();  // those that this process may run on
#else
    double threads = 1;  // a compiler that has no OpenMP, such as Apple's, makes a program of one thread
#endif
    auto share = [&](double quota, double period) {  // microseconds in each period; no quota: -1 or "max"
        if (quota > 0 && period > 0) threads = std::min(threads, std::ceil(quota / period));
    };
    for (auto &folder : cgroup_folders(root, "")) {
        std::ifstream file(folder + "cpu.max");
        double quota, period;
        if (file >> quota >> period) share(quota, period);
    }
    for (auto &folder : cgroup_folders(root, "cpu"))
        share(kernel_number(folder + "cpu.cfs_quota_us", "", -1), kernel_number(folder + "cpu.cfs_period_us", "", -1));
    double asked = wanted ? strtod(wanted, nullptr) : 0;  // "4", or "4,2" for nested teams
    return (int)std::max(1.0, asked >= 1 ? std::min(threads, asked) : threads);
}
