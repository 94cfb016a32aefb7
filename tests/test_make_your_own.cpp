// docs/09_make_your_own.md: its blocks of C++, a precision and a layout, applied to a copy of the sources, must build
// and do what the page says; also where the sources have them already. Run from the repository's root. Builds
// ./llm-plain's twin under build/make_your_own with $CXX, or else the compiler of this test.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <regex>
#include <thread>

#include "program.h"

static const fs::path scratch = "build/make_your_own";

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

using program::Outcome;

// What a command prints, errors too, is in `out`.
static Outcome shell(const std::string &command) {
    program::Setting setting;
    setting.patience = std::chrono::minutes(10);
    return program::run_shell("exec 2>&1; " + command, setting);
}

// ---- The page, and the copy of the sources that it changes ----------------------------------------------------

struct Page {                           // a half of it
    std::string text, structure, list;  // the whole; its two blocks of C++
    std::string type, name;             // Int6, int6
    std::string of, file;               // the list is "using Precision = ...", in precision.h
};

static Page read_page(const std::string &of, const std::string &file, size_t first_block) {
    Page page;
    page.file = file;
    page.of = "using " + of + " = ";
    page.text = slurp("docs/09_make_your_own.md");
    std::smatch found;
    std::vector<std::string> blocks;
    const std::string fence = "```cpp\n";
    for (size_t at = 0; (at = page.text.find(fence, at)) != std::string::npos;) {
        size_t begin = at + fence.size();
        at = page.text.find("```\n", begin);
        blocks.push_back(page.text.substr(begin, at - begin));
    }
    REQUIRE(blocks.size() == 4);
    page.structure = blocks[first_block], page.list = blocks[first_block + 1];
    REQUIRE(std::regex_search(page.structure, found, std::regex("struct (\\w+)")));
    page.type = found[1];
    REQUIRE(std::regex_search(page.structure, found, std::regex("name = \"(\\w+)\"")));
    page.name = found[1];
    return page;
}
// Precisions and layouts of the sources that the page does not know, such as "Int5": your own.
static const std::vector<std::string> others = {};

static Page precision_page() { return read_page("Precision", "precision.h", 0); }
static Page layout_page() { return read_page("Layout", "cache.h", 2); }

// The line of the list in its file, from "using" to its end.
static std::string list_line(const Page &page, const std::string &header) {
    size_t begin = header.find(page.of);
    REQUIRE(begin != std::string::npos);
    return header.substr(begin, header.find(";\n", begin) + 2 - begin);
}

// The copy's list is the page's, without others.
static std::string applied(const Page &page, std::string header) {
    std::string line = list_line(page, header);
    bool followed = contains(header, "struct " + page.type + " ");
    return header.replace(header.find(line), line.size(), (followed ? "" : page.structure + "\n") + page.list);
}

// A file with the lines that the first or second diff of the page puts in.
static std::string patched(const Page &page, int which, std::string reference) {
    size_t begin = 0;
    for (int i = 0; i <= which; i++) begin = page.text.find("```diff\n", begin) + 8;
    std::istringstream diff(page.text.substr(begin, page.text.find("```\n", begin) - begin));
    size_t at = 0;  // where the last line of the page is, or would be
    for (std::string line; std::getline(diff, line);) {
        std::string text = line.substr(1) + "\n";
        size_t found = reference.find(text);
        if (line[0] == '+' && found == std::string::npos) reference.insert(at, text);
        if (line[0] == ' ') REQUIRE_MESSAGE((at = found) != std::string::npos, line);
        if (line[0] == ' ') at += text.size();
    }
    return reference;
}

// ---- Building ------------------------------------------------------------------------------------------------

struct Built {
    Page precision = precision_page(), layout = layout_page();
    Outcome program = {}, test = {}, memory = {};  // ./llm-plain of the copy; its test_cache and test_memory
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
        fs::create_directory_symlink(fs::absolute("weights_tools"), scratch / "weights_tools");
        for (std::string file : {"scene.h", "files.h", "program.h", "test_cache.cpp"})
            fs::copy("tests/" + file, scratch / "tests" / file);
        spill(scratch / "tests/reference.h", patched(built.precision, 1, slurp("tests/reference.h")));
        spill(scratch / "tests/test_memory.cpp", patched(built.precision, 0, slurp("tests/test_memory.cpp")));
        for (const Page &page : {built.precision, built.layout})
            spill(scratch / page.file, applied(page, slurp(page.file)));
        std::string enter = "cd " + scratch.string() + " && ", libraries = " -lcjson -lonig -lutf8proc";
        std::string c = compile + "-x c -std=c11 ";
        built.program =
            shell(enter + c + "tokenizer.c -c -o tokenizer.o && " + c + "base/tokenizer_json.c -c -o tokenizer_json.o");
        std::string objects = " -x none tokenizer.o tokenizer_json.o" + libraries;
        std::thread test([&] {
            built.test = shell(enter + compile + "-std=c++17 tests/test_cache.cpp" + objects +
                               " -o test_cache && ./test_cache -tce=\"*thousands of steps*\"");
        });
        built.program = shell(enter + compile + "-std=c++17 -DPLAIN -x c++ llm.cu" + objects + " -o llm");
        test.join();
        built.memory = shell(enter + compile + "-std=c++17 tests/test_memory.cpp" + objects + " -o test_memory && cd " +
                             fs::current_path().string() + " && LLM=" + built.llm + (scratch / "test_memory").string() +
                             " -tce='what is resident at 32k positions*'");  // minutes, without fast/
        return built;
    }();
    return result;
}

// ---- Tests ---------------------------------------------------------------------------------------------------

TEST_CASE("the page's lists are those of the sources and its own types") {
    for (const Page &page : {precision_page(), layout_page()}) {
        auto without = [](const std::string &line, const std::string &type) {
            return std::regex_replace(line, std::regex(", " + type + "\\b"), "");
        };
        std::string line = list_line(page, slurp(page.file));
        for (const std::string &other : others) line = without(line, other);
        CHECK(without(page.list, page.type) != page.list);
        INFO("what the page does not know has its place in `others` of this test");
        CHECK((page.list == line || without(page.list, page.type) == line));
    }
}

TEST_CASE("the page's code builds without a warning, and keeps what the tests ask of any precision and layout") {
    CHECK_MESSAGE(built().program.status == 0, built().program.out);
    CHECK_MESSAGE(built().test.status == 0, built().test.out.substr(0, 4000));
    CHECK_MESSAGE(built().memory.status == 0, built().memory.out.substr(0, 4000));
}

TEST_CASE("flags, help, messages and commands know them") {
    REQUIRE(built().program.status == 0);
    const std::string precision = built().precision.name, layout = built().layout.name, llm = built().llm;
    for (auto [command, page] : {std::pair{"--kv f17", built().precision}, {"--cache heap", built().layout}}) {
        Outcome unknown = shell(llm + "generate -p x " + command);
        CHECK(unknown.status == 2);
        CHECK(contains(unknown.out, " " + page.name));
        CHECK_MESSAGE(contains(page.text, unknown.out), unknown.out);
        CHECK(contains(shell(llm + "generate --help").out, page.name));
    }
    std::string builtin = " -m weights_tools/builtin ";
    Outcome diff = shell(llm + "diff -n 12 -p \"Once upon a time\" --kv " + precision + " --cache " + layout + builtin);
    CHECK_MESSAGE(diff.status == 0, diff.out);
    CHECK(contains(diff.out, "K " + precision + ", V " + precision));
    CHECK(contains(diff.out, "tokens      identical"));
    Outcome memory = shell(llm + "memory" + builtin);  // contiguous comes first
    CHECK(memory.status == 0);
    std::smatch line;
    REQUIRE(std::regex_search(memory.out, line, std::regex("\n" + precision + " .*\n")));
    CHECK_MESSAGE(contains(built().precision.text, line.str()), line.str());
    CHECK(std::regex_search(memory.out, std::regex("\n" + layout + ": ")));
}

TEST_CASE("every layout stores every precision, with the same result") {
    REQUIRE(built().program.status == 0);
    std::string command = built().llm + "generate -m tests/fixtures/models/qwen3 --ignore-eos -n 40 --ids 5,9,33,12";
    for (std::string type : {built().precision.name, std::string("int4")}) {
        auto text = [&](const std::string &cache) {
            Outcome outcome = shell(command + " --kv " + type + " --cache " + cache + " 2>/dev/null");
            CHECK(outcome.status == 0);
            return outcome.out;
        };
        std::string contiguous = text("contiguous");
        CHECK(contiguous.size() > 40);
        for (std::string cache : {"paged --page 8", "ring", built().layout.name.c_str()})
            CHECK(text(cache) == contiguous);
    }
}
