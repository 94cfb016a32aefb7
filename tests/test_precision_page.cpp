// docs/precision.md: its two blocks of C++, applied to a copy of the sources, must build and do what the page says.
// Run from the repository's root. Builds under build/precision_page with $CXX, or else the compiler of this test.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <future>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace fs = std::filesystem;

static const fs::path scratch = "build/precision_page";

#ifdef __clang__
#define THIS_COMPILER "clang++"
#else
#define THIS_COMPILER "g++"
#endif
#ifdef _OPENMP
#define OPENMP_FLAG "-fopenmp "
#else
#define OPENMP_FLAG "-Wno-unknown-pragmas "
#endif

static const std::string compile = std::string(getenv("CXX") ? getenv("CXX") : THIS_COMPILER) +
                                   " -Og -march=native -ffp-contract=off " OPENMP_FLAG "-Wall -Wextra -Werror ";

static std::string slurp(const fs::path &path) {
    std::ifstream file(path);
    REQUIRE_MESSAGE(file, path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

struct Outcome {
    int status;  // exit status, or 128 + signal as the shell has it
    std::string output;
};

static Outcome shell(const std::string &command) {
    Outcome outcome;
    FILE *pipe = popen(("exec 2>&1; " + command).c_str(), "r");
    char piece[4096];
    for (size_t count; (count = fread(piece, 1, sizeof piece, pipe)) > 0;) outcome.output.append(piece, count);
    int status = pclose(pipe);
    outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return outcome;
}

static bool contains(const std::string &text, const std::string &part) { return text.find(part) != std::string::npos; }

// ---- The page, and the copy of the sources that it changes ---------------------------------------------------

struct Page {
    std::string text, precision, list;  // the whole; its first block: the struct; its second: the line of the list
    std::string type, name;             // Int6, int6
};

static Page read_page() {
    Page page;
    page.text = slurp("docs/precision.md");
    std::vector<std::string> blocks;
    const std::string fence = "```cpp\n";
    for (size_t at = 0; (at = page.text.find(fence, at)) != std::string::npos;) {
        size_t begin = at + fence.size();
        at = page.text.find("```\n", begin);
        REQUIRE(at != std::string::npos);
        blocks.push_back(page.text.substr(begin, at - begin));
    }
    REQUIRE(blocks.size() == 2);
    page.precision = blocks[0];
    page.list = blocks[1];
    std::smatch found;
    REQUIRE(std::regex_search(page.precision, found, std::regex("struct (\\w+)")));
    page.type = found[1];
    REQUIRE(std::regex_search(page.precision, found, std::regex("name = \"(\\w+)\"")));
    page.name = found[1];
    return page;
}

// The line of the list in cache.h, from "using Precision" to its end.
static std::string list_line(const std::string &header) {
    size_t begin = header.find("using Precision = ");
    REQUIRE(begin != std::string::npos);
    return header.substr(begin, header.find(";\n", begin) + 2 - begin);
}

static void apply(const Page &page) {
    fs::remove_all(scratch);
    fs::create_directories(scratch);
    for (const auto &entry : fs::directory_iterator("."))
        for (std::string extension : {".h", ".c", ".cu"})
            if (entry.path().extension() == extension) fs::copy(entry.path(), scratch / entry.path().filename());
    std::string header = slurp("cache.h"), line = list_line(header);
    header.replace(header.find(line), line.size(), page.precision + "\n" + page.list);
    std::ofstream(scratch / "cache.h") << header;
}

// ---- What a precision promises, asked of the last struct by itself -------------------------------------------

// Rows of 1 to 200 numbers at the end of a page of memory that nothing may follow; prints what is wrong.
static const char *const round_trip = R"(
#include <sys/mman.h>
#include "cache.h"
#include "tests/reference.h"

int wrong = 0;
void check(bool good, const char *what, int width) {
    if (!good) wrong++, printf("width %d: %s\n", width, what);
}

template <class Format>
std::vector<float> decoded(const char *row, int width) {
    std::vector<float> numbers;
    for (int c = 0; c < width; c += lanes) {
        int count = std::min(lanes, width - c);
        float lane[lanes];
        store(lane, count == lanes ? Format::decode(row, c) : Format::decode_part(row, c, count));
        for (int i = count; i < lanes; i++) check(lane[i] == 0, "behind the last number is not 0", width);
        for (int i = 0; i < count; i++) {
            ScaleAndZero both = Format::scale_and_zero(row, c + i);
            numbers.push_back(to_float(both.scale) * lane[i] + to_float(both.zero));
            float number = Format::number(row, c + i), off = std::fabs(number - numbers.back());
            check(!(off > 1e-6f * std::fabs(number)), "number() is not what was decoded", width);
        }
    }
    return numbers;
}

int main() {
    using Format = TYPE;
    char *memory = (char *)mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mprotect(memory + 4096, 4096, PROT_NONE)) return 2;
    reference::Random random{1};
    for (int width = 1; width <= 200; width++) {
        char *row = memory + 4096 - Format::row_bytes(width);
        auto stored = [&](const std::vector<float> &numbers) {
            memset(memory, 0xff, 4096);
            Format::encode(row, numbers.data(), width);
            check(row[-1] == (char)0xff, "encode() wrote before the row", width);
            return decoded<Format>(row, width);
        };
        for (double size : {1e-3, 1.0, 1e3}) {
            std::vector<float> numbers = reference::random_floats(random, width, -size, size);
            double most = 0, error = 0;
            for (float x : numbers) most = std::max(most, (double)std::fabs(x));
            std::vector<float> got = stored(numbers);
            for (int i = 0; i < width; i++) error = std::max(error, std::fabs((double)got[i] - numbers[i]));
            // The scale is an f16 at or above what is asked for: up to 2^-10 of itself more, or 2^-24.
            double bound = Format::unit_roundoff * most * (1 + 0x1p-10) + 0x1p-24 + 0x1p-22 * most;
            check(error <= bound, "further off than unit_roundoff", width);
        }
        check(stored(std::vector<float>(width, 0.0f)) == std::vector<float>(width, 0.0f), "zeros are not zero", width);
        for (float bad : {NAN, INFINITY, -INFINITY, 1e38f}) {
            std::vector<float> numbers(width, 1.0f);
            numbers[width / 2] = bad;
            for (float x : stored(numbers)) check(std::isnan(x), "not NaN beside a number that cannot be stored", width);
        }
    }
    check(Format::row_bytes(128) * 8 == 128 * Format::bits, "bits is not what 128 numbers take", 128);
    check(Format::code_bits <= Format::bits, "code_bits is more than bits", 128);
    return wrong > 0;
}
)";

// ---- Building ------------------------------------------------------------------------------------------------

struct Built {
    Page page;
    Outcome program, check;
    std::string llm() const { return (scratch / "llm").string() + " "; }
};

static const Built &built() {
    static const Built result = [] {
        Built built{read_page(), {}, {}};
        apply(built.page);
        fs::create_directories(scratch / "tests");
        fs::copy("tests/reference.h", scratch / "tests/reference.h");
        std::ofstream(scratch / "check.cpp") << round_trip;
        std::string enter = "cd " + scratch.string() + " && ", libraries = " -lcjson -lpcre2-8 -lutf8proc";
        auto program = std::async(std::launch::async, [&] {
            return shell(enter + compile + "-std=c++17 -x c++ llm.cu -c -o llm.o && " + compile +
                         "-x c -std=c11 tokenizer.c -c -o tokenizer.o && " + compile + "llm.o tokenizer.o" + libraries +
                         " -o llm");
        });
        built.check = shell(enter + compile + "-std=c++17 -DTYPE=" + built.page.type + " check.cpp -lcjson -o check");
        built.program = program.get();
        return built;
    }();
    return result;
}

// ---- Tests ---------------------------------------------------------------------------------------------------

TEST_CASE("the page's list is the one of cache.h and its own type") {
    Page page = read_page();
    std::string without = std::regex_replace(page.list, std::regex("\\b" + page.type + ", "), "");
    CHECK(without != page.list);
    CHECK(without == list_line(slurp("cache.h")));
    CHECK(slurp("cache.h").find("struct " + page.type) == std::string::npos);
}

TEST_CASE("what the page changes in tests/reference.h is there to be changed") {
    std::string text = read_page().text, reference = slurp("tests/reference.h"), line;
    size_t begin = text.find("```diff\n") + 8;
    std::istringstream diff(text.substr(begin, text.find("```\n", begin) - begin));
    int lines = 0;
    while (std::getline(diff, line)) {
        if (line[0] == '.' || line[0] == '+') continue;
        CHECK_MESSAGE(contains(reference, line.substr(1) + "\n"), line);
        lines++;
    }
    CHECK(lines > 0);
}

TEST_CASE("the page's code builds without a warning") {
    CHECK_MESSAGE(built().program.status == 0, built().program.output);
    CHECK_MESSAGE(built().check.status == 0, built().check.output);
}

TEST_CASE("its struct keeps what a precision promises") {
    REQUIRE(built().check.status == 0);
    Outcome outcome = shell((scratch / "check").string());
    CHECK_MESSAGE(outcome.status == 0, outcome.output.substr(0, 2000));
}

TEST_CASE("flags, help, messages and commands know it") {
    REQUIRE(built().program.status == 0);
    const std::string name = built().page.name, llm = built().llm(), builtin = " -m weights_tools/builtin ";
    Outcome help = shell(llm + "--help");
    CHECK(help.status == 0);
    CHECK(contains(help.output, " " + name + " ("));

    Outcome unknown = shell(llm + "generate --kv f17 -p x");
    CHECK(unknown.status == 2);
    CHECK(contains(unknown.output, " " + name + " ("));
    CHECK_MESSAGE(contains(built().page.text, unknown.output), unknown.output);

    Outcome diff = shell(llm + "diff -n 12 -p \"Once upon a time\" --kv " + name + builtin);
    CHECK_MESSAGE(diff.status == 0, diff.output);
    CHECK(contains(diff.output, "K " + name + ", V " + name));
    CHECK(contains(diff.output, "tokens      identical"));

    if (contains(help.output, "  llm memory ")) {
        Outcome memory = shell(llm + "memory" + builtin);
        CHECK(memory.status == 0);
        CHECK(std::regex_search(memory.output, std::regex("(^|\n) *" + name + " ")));
    }
}

TEST_CASE("every layout stores it, with the same result") {
    REQUIRE(built().program.status == 0);
    std::string command = built().llm() + "generate -m tests/fixtures/models/qwen3 --ignore-eos -n 40 --ids 5,9,33,12";
    command += " --kv " + built().page.name + " --cache ";
    Outcome contiguous = shell(command + "contiguous 2>/dev/null");
    CHECK_MESSAGE(contiguous.status == 0, contiguous.output);
    CHECK(contiguous.output.size() > 40);
    for (std::string layout : {"paged --page 8", "ring"})
        CHECK(shell(command + layout + " 2>/dev/null").output == contiguous.output);
}
