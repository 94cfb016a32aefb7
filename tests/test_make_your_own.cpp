// docs/09_make_your_own.md: its blocks of C++, a precision and a layout, applied to a copy of the sources, must build
// and do what the page says; and so must docs/add_a_family.md with its diffs; also where the sources have them already.
// Run from the repository's root. Builds ./llm-plain's twin under build/make_your_own with $CXX, or else the compiler of
// this test.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <regex>
#include <thread>

#include "../base/safetensors.h"
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
    return program::run_shell("exec 2>&1; " + command);
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

// A file with the lines that a diff puts in.
static std::string patched(const std::string &diff, std::string source) {
    std::istringstream lines(diff);
    size_t at = 0;  // behind the last line of the page
    for (std::string line; std::getline(lines, line);) {
        REQUIRE(!line.empty());
        std::string text = line.substr(1) + "\n";
        size_t found = source.find(text);
        if (line[0] == '+' && found == std::string::npos) source.insert(found = at, text);
        if (line[0] == ' ') REQUIRE_MESSAGE(found != std::string::npos, line);
        if (line[0] == ' ' || line[0] == '+') at = found + text.size();
    }
    return source;
}

struct Change {
    std::string file, diff;
};

// The diffs of a page, each with the source that is named last before it.
static std::vector<Change> changes_of(const std::string &page) {
    std::vector<Change> changes;
    const std::string fence = "```diff\n";
    const std::regex source("`([\\w/]+\\.(h|cu|cpp))`");
    for (size_t at = 0, begin; (begin = page.find(fence, at)) != std::string::npos;) {
        Change change;
        const std::string before = page.substr(at, begin - at);
        for (std::sregex_iterator name(before.begin(), before.end(), source), end; name != end; ++name)
            change.file = (*name)[1];
        begin += fence.size(), at = page.find("```\n", begin);
        change.diff = page.substr(begin, at - begin);
        REQUIRE_MESSAGE(!change.file.empty(), "no file is named above\n" << change.diff);
        changes.push_back(change);
    }
    return changes;
}

static const std::string chapter = "docs/09_make_your_own.md", family_page = "docs/add_a_family.md";

// What exercises change of a page's own code: each line that a diff of that page takes away, with the one in its place,
// or with "".
static std::vector<std::pair<std::string, std::string>> answers_of(const std::string &file) {
    const std::string page = slurp(file), fence = "```diff " + file + "\n";
    std::vector<std::pair<std::string, std::string>> changes;
    for (size_t at = 0; (at = page.find(fence, at)) != std::string::npos;) {
        at += fence.size();
        std::istringstream lines(page.substr(at, page.find("```", at) - at));
        size_t next = changes.size();
        for (std::string line; lines >> std::ws && std::getline(lines, line);) {
            const std::string text = line.substr(std::min(line.size(), line.find_first_not_of(' ', 1)));
            if (line[0] == '-') changes.push_back({text, ""});
            if (line[0] == '+') REQUIRE(next < changes.size());
            if (line[0] == '+') changes[next++].second = text;
        }
    }
    REQUIRE(!changes.empty());
    return changes;
}

// A line that does what another one does where EXERCISE is set: both return or assign something, or `other` is "".
static std::string either(const std::string &line, const std::string &other) {
    if (other.empty()) return "if (!exercise()) " + line;
    const size_t differs = std::mismatch(line.begin(), line.end(), other.begin(), other.end()).first - line.begin();
    const size_t value = line.rfind("return ", differs), begin = value == std::string::npos ? line.rfind("= ", differs) + 2
                                                                                            : value + 7;
    const size_t end = line.find(';', differs), rest = line.size() - end;
    return line.substr(0, begin) + "exercise() ? " + other.substr(begin, other.size() - rest - begin) + " : " +
           line.substr(begin);
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
        for (std::string file : {"scene.h", "check_pages.h", "files.h", "program.h", "test_cache.cpp"})
            fs::copy("tests/" + file, scratch / "tests" / file);
        for (std::string file : {"reference.h", "test_memory.cpp"}) fs::copy("tests/" + file, scratch / "tests" / file);
        for (const Page &page : {built.precision, built.layout})
            spill(scratch / page.file, applied(page, slurp(page.file)));
        for (const std::string &page : {built.precision.text, slurp(family_page)})
            for (const auto &[file, diff] : changes_of(page))
                spill(scratch / file, patched(diff, slurp(scratch / file)));
        for (const std::string &page : {chapter, family_page})
            for (const auto &[line, other] : answers_of(page))
                for (std::string file : {"cache.h", "base/families.h", "base/config.h", "base/weights.h"})
                    if (const std::string text = slurp(scratch / file); contains(text, line))
                        spill(scratch / file, replaced(text, line, either(line, other)));
        spill(scratch / "exercise.h", "#include <cstdlib>\ninline bool exercise() {\n"
                                      "    static const bool asked = getenv(\"EXERCISE\");\n    return asked;\n}\n");
        std::string enter = "cd " + scratch.string() + " && ", libraries = " -lonig -lutf8proc -ledit";
        built.program = shell(enter + compile + "-x c -std=c11 tokenizer.c -c -o tokenizer.o && " + compile +
                              "-std=c++17 base/json.cpp base/tokenizer_json.cpp -c");
        std::string objects = " -x none json.o tokenizer.o tokenizer_json.o" + libraries;
        std::thread test([&] {
            built.test = shell(enter + compile + "-std=c++17 -include exercise.h tests/test_cache.cpp" + objects +
                               " -o test_cache && ./test_cache -tce=\"*thousands of steps*\"");
        });
        built.program = shell(enter + compile + "-std=c++17 -include exercise.h -DPLAIN -x c++ llm.cu" + objects + " -o llm");
        test.join();
        built.memory = shell(enter + compile + "-std=c++17 -include exercise.h tests/test_memory.cpp" + objects + " -o test_memory && cd " +
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
    REQUIRE(built().llm != "");  // before a message asks for it: what fails while it is made can then be said
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
    Outcome diff = shell(llm + "diff -n 12 --tolerance 10 -p \"Once upon a time\" --kv " + precision + " --cache " +
                         layout + builtin);
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
    std::string command = built().llm + "generate -m tests/fixtures/models/qwen3 --ignore-eos -n 40 ";
    for (std::string type : {built().precision.name, std::string("int4")})
        for (std::string flags : {"--ids 5,9,33,12", "--ids $(seq -s, 3 44) --temp 1 -s 5 --samples 3"}) {
            auto text = [&](const std::string &cache) {
                Outcome outcome = shell(command + flags + " --kv " + type + " --cache " + cache + " 2>/dev/null");
                CHECK(outcome.status == 0);
                return outcome.out;
            };
            std::string contiguous = text("contiguous");
            CHECK(contiguous.size() > 40);
            for (std::string cache : {"paged --page 32", "ring", built().layout.name.c_str()})
                CHECK(text(cache) == contiguous);
        }
}

// ---- Exercises -------------------------------------------------------------------------------------------------

TEST_CASE("an exercise: int5 has the bytes and the error that the answer says") {
    REQUIRE(built().program.status == 0);
    std::string source = built().precision.structure;
    for (const auto &[line, other] : answers_of(chapter))
        if (contains(source, line)) source = replaced(source, line, other);
    spill(scratch / "int5.cpp", "#include \"precision.h\"\n#include <cstdio>\n" + source + R"(
        int main() {
            float numbers[96], worst = 0;
            for (int i = 0; i < 96; i++) numbers[i] = std::sin(i + 1.0f);  // the largest is 1, within 10^-4
            std::vector<char> row(Int5::row_bytes(96));
            Int5::encode(row.data(), numbers, 96);
            for (int i = 0; i < 96; i++) worst = std::max(worst, std::fabs(Int5::number(row.data(), i) - numbers[i]));
            printf("%zu %g %g", row.size(), Int5::bits, worst / Int5::unit_roundoff);
        })");
    Outcome int5 = shell("cd " + scratch.string() + " && " + compile + "-std=c++17 int5.cpp -o int5 && ./int5");
    REQUIRE_MESSAGE(int5.status == 0, int5.out);
    std::istringstream numbers(int5.out);
    double bytes = 0, bits = 0, worst = 0;
    numbers >> bytes >> bits >> worst;
    CHECK(bytes == 2 + 3 * 20);
    CHECK(bits == 5.125);
    CHECK((worst > 0.9 && worst < 1.01));
}

TEST_CASE("an exercise: a layout with a wrong row fails as the answer says") {
    REQUIRE(built().test.status == 0);
    Outcome wrong = shell("cd " + scratch.string() + " && EXERCISE=1 ./test_cache -tc='rows never*'");
    CHECK(wrong.status == 1);
    std::smatch found;
    for (const char *line : {"TEST CASE:.*", "values: .*", "logged: .*"}) {
        REQUIRE_MESSAGE(std::regex_search(wrong.out, found, std::regex(line)), wrong.out);
        CHECK_MESSAGE(contains(built().layout.text, found.str()), found.str());
    }
}

// ---- A family --------------------------------------------------------------------------------------------------

// Slate, and a Llama that has the same logits: the rows of its embedding are normed already, in double precision, and
// its final norm is multiplied with the factor. Both are made of a fixture, and stay where the page says.

struct Stored {
    std::vector<int64_t> shape;
    std::vector<float> numbers;
};
using Checkpoint = std::map<std::string, Stored>;

static const std::string fixture = "tests/fixtures/models/llama_mha", embedding = "model.embed_tokens.weight";
static const std::string first_norm = "model.embed_norm.weight", final_norm = "model.norm.weight";
static constexpr double factor = 0.37, epsilon = 0.1;

static std::string folder_of(const std::string &name) { return (scratch / name).string(); }

static void write_checkpoint(const std::string &name, const Checkpoint &checkpoint, const std::string &config) {
    std::string header, data;
    for (const auto &[tensor, stored] : checkpoint) {
        const size_t begin = data.size();
        data.append((const char *)stored.numbers.data(), stored.numbers.size() * sizeof(float));
        header += formatted("%s\"%s\": {\"dtype\": \"F32\", \"shape\": %s, \"data_offsets\": [%zu, %zu]}",
                            header.empty() ? "{" : ", ", tensor.c_str(), json_of(stored.shape).c_str(), begin,
                            data.size());
    }
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const uint64_t length = header.size();
    fs::create_directories(folder_of(name));
    spill(folder_of(name) + "/config.json", config);
    spill(folder_of(name) + "/model.safetensors", std::string((const char *)&length, sizeof length) + header + data);
}

static std::string llama_config() { return slurp(fixture + "/config.json"); }
static std::string with_factor(const std::string &config, double multiplier) {
    return replaced(config, "{\n", formatted("{\n  \"logit_multiplier\": %g,\n", multiplier));
}
static std::string slate_config(double multiplier) {
    const std::string named = replaced(llama_config(), "LlamaForCausalLM", "SlateForCausalLM");
    return with_factor(replaced(named, "\"llama\"", "\"slate\""), multiplier);
}

static Checkpoint slate_checkpoint() {
    std::vector<Mapping> files;
    Checkpoint slate;
    for (const auto &[name, tensor] : open_weights(fixture, files).tensors) {
        REQUIRE(tensor.dtype == "F32");
        slate[name] = {tensor.shape, std::vector<float>(tensor.bytes / sizeof(float))};
        memcpy(slate[name].numbers.data(), tensor.data, tensor.bytes);
    }
    slate[first_norm] = slate.at(final_norm);
    std::vector<float> &weights = slate[first_norm].numbers;
    for (size_t i = 0; i < weights.size(); i++) weights[i] = 0.5f + 0.125f * (float)(i % 9);
    return slate;
}

static Checkpoint equivalent_llama(Checkpoint slate) {
    const std::vector<float> weights = slate.at(first_norm).numbers;
    std::vector<float> &rows = slate.at(embedding).numbers;
    for (size_t row = 0; row < rows.size(); row += weights.size()) {
        double squares = 0;
        for (size_t i = 0; i < weights.size(); i++) squares += (double)rows[row + i] * rows[row + i];
        const double size = std::sqrt(squares / (double)weights.size() + epsilon);
        for (size_t i = 0; i < weights.size(); i++) rows[row + i] = (float)(rows[row + i] / size * weights[i]);
    }
    for (float &weight : slate.at(final_norm).numbers) weight = (float)(weight * factor);
    slate.erase(first_norm);
    return slate;
}

// Of prompt and generated tokens. "generate -m build/make_your_own/slate ..."
static std::string generate(const std::string &name, const std::string &flags) {
    return built().llm + "generate -m " + folder_of(name) + " --ids 5,9,33,12 -n 20 --ignore-eos " + flags;
}
static std::vector<float> logits_of(const std::string &name, const std::string &flags) {
    const std::string file = folder_of(name) + "/logits.npy";
    Outcome outcome = shell(generate(name, flags + " --dump-logits " + file));
    REQUIRE_MESSAGE(outcome.status == 0, outcome.out);
    return read_npy(file).values;
}

static double relative_error(const std::vector<float> &found, const std::vector<float> &expected) {
    double worst = 0, largest = 0;
    REQUIRE(found.size() == expected.size());
    for (size_t i = 0; i < found.size(); i++) {
        worst = std::max(worst, std::fabs((double)found[i] - expected[i]));
        largest = std::max(largest, std::fabs((double)expected[i]));
    }
    return worst / largest;
}

TEST_CASE("a family: the page adds at most 15 lines, each in the file that it names") {
    int added = 0;
    built();
    for (const auto &[file, diff] : changes_of(slurp(family_page))) {
        std::istringstream lines(diff);
        for (std::string line; std::getline(lines, line);) {
            if (line == "...") continue;
            added += line[0] == '+';
            CHECK_MESSAGE((line[0] == '+' || line[0] == ' '), line);
            for (const auto &[from, to] : answers_of(family_page))
                if (contains(line, from)) line = replaced(line, from, either(from, to));
            CHECK_MESSAGE(contains(slurp(scratch / file), line.substr(1) + "\n"), file << " of the copy lacks " << line);
        }
    }
    MESSAGE(added << " lines");
    CHECK((added >= 1 && added <= 15));
}

TEST_CASE("a family: Slate has the logits of the Llama that is equivalent to it") {
    REQUIRE(built().program.status == 0);
    const double tolerance = 1e-5;
    const Checkpoint slate = slate_checkpoint();
    Checkpoint other = slate;
    for (size_t i = 0; i < 3; i++) other[first_norm].numbers[i] *= 1.5f;
    write_checkpoint("slate", slate, slate_config(factor));
    write_checkpoint("slate_other_norm", other, slate_config(factor));
    write_checkpoint("slate_other_factor", slate, slate_config(factor * 1.1));
    write_checkpoint("llama", equivalent_llama(slate), llama_config());
    for (const std::string flags : {"--cache none", "--kv f32", "--kv f32 --weights copied"}) {
        const std::vector<float> llama = logits_of("llama", flags);
        CHECK(llama.size() == (4 + 20) * 64);
        INFO(flags);
        CHECK(relative_error(logits_of("slate", flags), llama) <= tolerance);
        for (const std::string changed : {"slate_other_norm", "slate_other_factor"}) {
            INFO(changed);
            CHECK(relative_error(logits_of(changed, flags), llama) >= 100 * tolerance);
        }
    }
}

TEST_CASE("a family: what a forgotten line leads to") {
    REQUIRE(built().program.status == 0);
    const std::string page = slurp(family_page);
    // Of Llama, for which no line reads the tensor and no field allows the key.
    const Checkpoint slate = slate_checkpoint();
    write_checkpoint("slate_as_llama", slate, llama_config());
    write_checkpoint("llama_with_factor", equivalent_llama(slate), with_factor(llama_config(), factor));
    for (const std::string name : {"slate_as_llama", "llama_with_factor"}) {
        Outcome refused = shell(generate(name, ""));
        CHECK(refused.status == 2);
        CHECK_MESSAGE(contains(page, replaced(replaced(refused.out, "Llama", "Slate"), name, "slate")), refused.out);
    }
    // Each tensor is moved, once.
    write_checkpoint("slate", slate, slate_config(factor));
    write_checkpoint("llama", equivalent_llama(slate), llama_config());
    auto bytes = [&](const std::string &flags) {
        Outcome outcome = shell(generate("slate", "--json " + flags));
        REQUIRE_MESSAGE(outcome.status == 0, outcome.out);
        return program::number(parse_json("generate", outcome.out), "decode.bytes");
    };
    CHECK(bytes("--weights copied") == bytes(""));
    // The exercise: the factor is divided by.
    setenv("EXERCISE", "1", 1);
    std::smatch found;
    REQUIRE(std::regex_search(page, found, std::regex("CHECK\\( ([0-9.]+) <= 1e-05")));
    CHECK(relative_error(logits_of("slate", "--cache none"), logits_of("llama", "--cache none")) ==
          doctest::Approx(std::stod(found[1])).epsilon(1e-4));
    unsetenv("EXERCISE");
}
