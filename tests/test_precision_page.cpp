// docs/precision.md and docs/layout.md: their blocks of C++, applied to a copy of the sources, must build and do what
// the pages say; also where the sources have them already. Run from the repository's root. Builds ./llm-plain's twin
// under build/precision_page with $CXX, or else the compiler of this test.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
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
                                   " -O1 -march=native -ffp-contract=off " OPENMP_FLAG "-Wall -Wextra -Werror ";

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

// ---- The pages, and the copy of the sources that they change -------------------------------------------------

struct Page {
    std::string text, structure, list;  // the whole; its first block of C++, the struct; its second, the list
    std::string type, name;             // Int6, int6
    std::string of;                     // the list is "using Precision = ..."
};

static Page read_page(const std::string &path, const std::string &of) {
    Page page;
    page.of = "using " + of + " = ";
    page.text = slurp(path);
    std::smatch found;
    std::vector<std::string> blocks;
    const std::string fence = "```cpp\n";
    for (size_t at = 0; (at = page.text.find(fence, at)) != std::string::npos;) {
        size_t begin = at + fence.size();
        at = page.text.find("```\n", begin);
        blocks.push_back(page.text.substr(begin, at - begin));
    }
    REQUIRE(blocks.size() == 2);
    page.structure = blocks[0], page.list = blocks[1];
    REQUIRE(std::regex_search(page.structure, found, std::regex("struct (\\w+)")));
    page.type = found[1];
    REQUIRE(std::regex_search(page.structure, found, std::regex("name = \"(\\w+)\"")));
    page.name = found[1];
    return page;
}
static Page precision_page() { return read_page("docs/precision.md", "Precision"); }
static Page layout_page() { return read_page("docs/layout.md", "Layout"); }

// The line of the list in cache.h, from "using" to its end.
static std::string list_line(const Page &page, const std::string &header) {
    size_t begin = header.find(page.of);
    REQUIRE(begin != std::string::npos);
    return header.substr(begin, header.find(";\n", begin) + 2 - begin);
}

static std::string applied(const Page &page, std::string header) {
    std::string line = list_line(page, header);
    if (contains(header, "struct " + page.type + " ")) return header;  // somebody has followed the page
    return header.replace(header.find(line), line.size(), page.structure + "\n" + page.list);
}

// What a precision promises, asked of the page's struct by itself, in rows of 1 to 200 numbers at the end of a page of
// memory that nothing may follow; prints what is wrong. And that a layout keeps positions apart.
static const char *const questions = R"(
#include "cache.h"
#include "tests/reference.h"

int wrong = 0;
void check(bool good, const char *what, int width) {
    if (!good) wrong++, printf("width %d: %s\n", width, what);
}

int main() {
    using Format = PRECISION;
    char *memory = (char *)mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mprotect(memory + 4096, 4096, PROT_NONE)) return 2;
    reference::Random random{1};
    for (int width = 1; width <= 200; width++) {
        char *row = memory + 4096 - Format::row_bytes(width);
        auto stored = [&](const std::vector<float> &numbers) {
            memset(memory, 0xff, 4096);
            Format::encode(row, numbers.data(), width);
            check(row[-1] == (char)0xff, "encode() wrote before the row", width);
            std::vector<float> read;
            for (int c = 0; c < width; c++) read.push_back(Format::number(row, c));
            return read;
        };
        for (double size : {1e-3, 1.0, 1e3}) {
            std::vector<float> numbers = reference::random_floats(random, width, -size, size), got = stored(numbers);
            double most = 0, error = 0;
            for (int i = 0; i < width; i++) most = std::max(most, (double)std::fabs(numbers[i]));
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
    CacheShape shape = {1, 1, 8, 8, 3, 50};
    LAYOUT layout;
    layout.open(shape);
    std::vector<bool> taken((size_t)layout.rows(shape));
    for (int sequence = 0; sequence < 3; sequence++)
        for (int t = 0; t < 50; t++) {
            int64_t row = layout.row(sequence, t);
            check(!taken.at((size_t)row), "a row of two positions", t);
            taken[(size_t)row] = true;
        }
    return wrong > 0;
}
)";

// ---- Building ------------------------------------------------------------------------------------------------

struct Built {
    Page precision = precision_page(), layout = layout_page();
    Outcome program = {}, check = {};
    std::string llm = (scratch / "llm").string() + " ";
};

static const Built &built() {
    static const Built result = [] {
        Built built;
        fs::remove_all(scratch);
        fs::create_directories(scratch / "tests");
        for (const auto &entry : fs::directory_iterator("."))
            for (std::string extension : {".h", ".c", ".cu"})
                if (entry.path().extension() == extension) fs::copy(entry.path(), scratch / entry.path().filename());
        for (std::string folder : {"base", "commands"}) fs::copy(folder, scratch / folder);
        fs::copy("tests/reference.h", scratch / "tests/reference.h");
        std::ofstream(scratch / "cache.h") << applied(built.layout, applied(built.precision, slurp("cache.h")));
        std::ofstream(scratch / "check.cpp") << questions;
        std::string enter = "cd " + scratch.string() + " && ", libraries = " -lcjson -lonig -lutf8proc";
        std::string c = compile + "-x c -std=c11 ";
        std::thread program([&] {
            built.program =
                shell(enter + c + "tokenizer.c -c -o tokenizer.o && " + c +
                      "base/tokenizer_json.c -c -o tokenizer_json.o && " + compile +
                      "-std=c++17 -DPLAIN -x c++ llm.cu -x none tokenizer.o tokenizer_json.o" + libraries + " -o llm");
        });
        built.check = shell(enter + compile + "-std=c++17 -DPRECISION=" + built.precision.type +
                            " -DLAYOUT=" + built.layout.type + " check.cpp -lcjson -o check");
        program.join();
        return built;
    }();
    return result;
}

// ---- Tests ---------------------------------------------------------------------------------------------------

TEST_CASE("a page's list is the one of cache.h and its own type") {
    for (const Page &page : {precision_page(), layout_page()}) {
        std::regex own("(, )?\\b" + page.type + "\\b(, )?");
        auto without = [&](const std::string &line) { return std::regex_replace(line, own, "$2"); };
        CHECK(without(page.list) != page.list);
        std::string line = list_line(page, slurp("cache.h"));
        CHECK((page.list == line || std::regex_replace(page.list, std::regex(", " + page.type + "\\b"), "") == line));
    }
}

TEST_CASE("what the page changes in tests/reference.h is there to be changed, or is as it says") {
    std::string text = precision_page().text, reference = slurp("tests/reference.h"), line;
    size_t begin = text.find("```diff\n") + 8;
    std::istringstream diff(text.substr(begin, text.find("```\n", begin) - begin));
    int before = 0, after = 0, lines = 0, kept = 0;  // of those that go and come
    while (std::getline(diff, line)) {
        bool there = contains(reference, line.substr(1) + "\n");
        if (line[0] == '-') before += there, lines++;
        if (line[0] == '+') after += there;
        if (line[0] == ' ') kept += there;
    }
    CHECK(lines == 1);
    CHECK(kept == 1);
    CHECK((before == 1 || after == 2));
}

TEST_CASE("the pages' code builds without a warning, and keeps what a precision and a layout promise") {
    CHECK_MESSAGE(built().program.status == 0, built().program.output);
    REQUIRE_MESSAGE(built().check.status == 0, built().check.output);
    Outcome outcome = shell((scratch / "check").string());
    CHECK_MESSAGE(outcome.status == 0, outcome.output.substr(0, 2000));
}

TEST_CASE("flags, help, messages and commands know them") {
    REQUIRE(built().program.status == 0);
    const std::string precision = built().precision.name, layout = built().layout.name, llm = built().llm;
    for (auto [command, page] : {std::pair{"--kv f17", built().precision}, {"--cache heap", built().layout}}) {
        Outcome unknown = shell(llm + "generate -p x " + command);
        CHECK(unknown.status == 2);
        CHECK(contains(unknown.output, " " + page.name));
        CHECK_MESSAGE(contains(page.text, unknown.output), unknown.output);
        CHECK(contains(shell(llm + "generate --help").output, page.name));
    }
    std::string builtin = " -m weights_tools/builtin ";
    Outcome diff = shell(llm + "diff -n 12 -p \"Once upon a time\" --kv " + precision + " --cache " + layout + builtin);
    CHECK_MESSAGE(diff.status == 0, diff.output);
    CHECK(contains(diff.output, "K " + precision + ", V " + precision));
    CHECK(contains(diff.output, "tokens      identical"));
    Outcome memory = shell(llm + "memory" + builtin);
    CHECK(memory.status == 0);
    CHECK(std::regex_search(memory.output, std::regex("\n" + precision + " ")));
    CHECK(std::regex_search(memory.output, std::regex("\n" + layout + ": ")));
}

TEST_CASE("every layout stores every precision, with the same result") {
    REQUIRE(built().program.status == 0);
    std::string command = built().llm + "generate -m tests/fixtures/models/qwen3 --ignore-eos -n 40 --ids 5,9,33,12";
    for (std::string type : {built().precision.name, std::string("int4")}) {
        auto text = [&](const std::string &cache) {
            Outcome outcome = shell(command + " --kv " + type + " --cache " + cache + " 2>/dev/null");
            CHECK(outcome.status == 0);
            return outcome.output;
        };
        std::string contiguous = text("contiguous");
        CHECK(contiguous.size() > 40);
        for (std::string cache : {"paged --page 8", "ring", built().layout.name.c_str()})
            CHECK(text(cache) == contiguous);
    }
}
