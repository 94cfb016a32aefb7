// The command line, in the process: what is understood, what is refused and in which words, help. Over the tables of
// commands/flags.h, so that a new flag is tested as soon as it stands there.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#define LLM_WITHOUT_MAIN
#define PLAIN
#include "../commands/main.h"

#include <thread>

#include "files.h"

using Words = std::vector<std::string>;

Words operator+(Words a, const Words &b) { return a.insert(a.end(), b.begin(), b.end()), a; }

std::string joined_words(const Words &words) { return joined(words, "|"); }

// The one line that a command line is refused with; "": it is not.
std::string refusal(const Words &words) {
    try {
        parse_options(words);
    } catch (const Error &error) {
        CHECK(error.status == 2);
        CHECK(!contains(error.what(), "\n"));
        return error.what();
    }
    return "";
}

void check_refused(const Words &words, const Words &parts) {
    std::string line = refusal(words);
    CAPTURE(joined_words(words));
    CHECK(!line.empty());
    for (const std::string &part : parts) check_contains(line, part);
}

// The least that a command line of a command must say.
Words start_of(const std::string &command) {
    if (command == "batch") return {command, "-f", "/dev/null"};
    return has("generate diff show tokenize", command) ? Words{command, "-p", "x"} : Words{command};
}

// What must stand beside a flag so that it has an effect.
Words beside(const std::string &flag) {
    if (flag == "--page") return {"--cache", "paged"};
    if (flag == "--window" || flag == "--sinks") return {"--cache", "ring"};
    if (flag == "--draft-rule") return {"--draft", "ngram", "--temp", "1"};
    if (flag == "--draft-tokens") return {"--draft", "ngram"};
    Words shape;
    for (const std::string &each : split("--layers --kv-heads --head-dim -c"))
        if (each != flag && has("--layers --kv-heads --head-dim", flag)) shape = shape + Words{each, "1"};
    return shape;
}

// Command lines with every command that knows a flag. Where the flag gives the text, no other does.
std::vector<Words> lines_with(const Flag &flag, const Words &value) {
    std::vector<Words> lines;
    const std::string first = split(flag.names)[0];
    for (const std::string &command : split(flag.commands)) {
        bool text = has("-p -f --ids", first);
        Words others = first == "--samples" && command == "generate" ? Words{"--temp", "1"} : Words{};
        if (command == "bench" && has("-p -f --ids --temp --top-k --top-p --min-p -s", first))
            others = {"--draft", "ngram"};
        lines.push_back((text ? Words{command} : start_of(command)) + beside(first) + others + Words{first} + value);
    }
    return lines;
}

// Standard output while `work` runs.
template <class Work>
std::string printed(Work work) {
    fflush(stdout);
    int before = dup(1);
    FILE *file = tmpfile();
    REQUIRE(file);
    dup2(fileno(file), 1);
    work();
    fflush(stdout);
    dup2(before, 1);
    close(before);
    rewind(file);
    std::string text;
    for (int c; (c = fgetc(file)) != EOF;) text += (char)c;
    fclose(file);
    return text;
}

// ---- What is understood --------------------------------------------------------------------------------------

TEST_CASE("every spelling of a flag and its value") {
    for (const Words &words : {Words{"-n", "5"}, {"-n5"}, {"-n=5"}, {"--predict", "5"}, {"--predict=5"}}) {
        Options options = parse_options(Words{"generate", "-p", "x"} + words);
        CHECK(options.count == 5);
        CHECK(options.has("-n"));
    }
    CHECK(parse_options({"generate", "-p", "x", "-c128k"}).context == 131072);
    CHECK(parse_options({"generate", "-p", "x", "-c", "1M"}).context == 1 << 20);
    CHECK(parse_options({"bench", "--depth", "4k,0,1K"}).depths == std::vector<int>{4096, 0, 1024});
    CHECK(parse_options({"generate", "-p=-n"}).prompt == "-n");
    CHECK(parse_options({"generate", "--prompt=a=b"}).prompt == "a=b");
    CHECK(parse_options({"generate", "-p", ""}).prompt.empty());
    CHECK(parse_options({"diff", "--ids", "1,0,2147483647"}).prompt_ids == std::vector<int>{1, 0, INT_MAX});
    CHECK(parse_options({"generate", "-p", "x", "--temp", "1e-6", "-s", "9007199254740992"}).seed == 1LL << 53);
    CHECK(parse_options({"generate", "-p", "x", "-s", "9007199254740991"}).seed == (1LL << 53) - 1);
    for (const char *beyond : {"9007199254740993", "18446744073709551616", "99999999999999999999999"})
        check_refused({"generate", "-p", "x", "-s", beyond}, {"expected a whole number from -1 to 9007199254740992"});
    CHECK(parse_options({"diff", "-p", "x", "--tolerance", "1e-4"}).tolerance == 1e-4);
    CHECK(parse_options({"generate", "-p", "x"}).count == 256);
    for (const Words &words : {Words{"-n", "-1"}, {"-n-1"}, {"--predict=-1"}})  // until the end
        CHECK(parse_options(Words{"diff", "-p", "x"} + words).count == INT_MAX / 2);
    CHECK(parse_options({"generate", "-p", "x", "-s", "5"}).temperature == 0);  // scripts give a seed to everything
    CHECK(parse_options({"bench"}).count == 64);
    CHECK(parse_options({"bench", "--activations", "bf16"}).activations == "bf16");
    check_refused({"bench", "--activations", "f16"}, {"--activations f16: expected f32|bf16"});
    check_refused({"bench", "--activations", "bf16", "--device", "cuda"}, {"--activations bf16: is for the CPU"});
    check_refused({"bench", "--activations", "bf16", "--weights", "int8"}, {"--activations bf16: int8 weights are"});
    CHECK(parse_options({"bench", "-n", "256"}).count == 256);
    CHECK(parse_options({"generate", "-p", "x"}).threads == usable_threads());
    CHECK(parse_options({"generate", "-p", "x", "-t", "1"}).threads == 1);
    for (const char *more : {"64", "256"})  // than there are processors, which then wait for one another
        CHECK(parse_options({"generate", "-p", "x", "-t", more}).threads == usable_threads("", nullptr));
    const int before = usable_threads("", nullptr);
    Environment one("OMP_NUM_THREADS", "1");  // is for those who say nothing
    CHECK(parse_options({"generate", "-p", "x", "-t", std::to_string(before)}).threads == before);
}

TEST_CASE("types by the names of others, layouts and types in any case") {
    const Words names = split("fp16 F16 float16 FP8 INT8 fp32 Float32 bfloat16 Int4");
    const Words types = split("f16 f16 f16 fp8 int8 f32 f32 bf16 int4");
    for (size_t i = 0; i < names.size(); i++) {
        const std::string &name = names[i], &type = types[i];
        for (const std::string &flag : Words{"--kv", "-ctk", "-ctv"}) {
            CacheChoice cache = parse_options({"generate", "-p", "x", flag, name}).caches().at(0);
            CHECK(name_of(cache.type_k) == (flag == "-ctv" ? "f16" : type));
            CHECK(name_of(cache.type_v) == (flag == "-ctk" ? "f16" : type));
        }
    }
    for (const auto &[theirs, type] : {std::pair("q8_0", "int8"), {"Q4_0", "int4"}, {"q4_1", "int4"}}) {
        held_notes = "";
        CHECK(name_of(parse_options({"generate", "-p", "x", "-ctk", theirs}).types_k.at(0)) == std::string(type));
        check_contains(*held_notes, std::string(": taken as ") + type);
    }
    check_refused({"generate", "-p", "x", "--kv", "q5_0"}, {"--kv q5_0: unknown type; known are f32"});
    CHECK(name_of(parse_options({"generate", "-p", "x", "--cache", "Paged"}).layouts.at(0)) == std::string("paged"));
    CHECK(parse_options({"generate", "-p", "x", "--cache", "NONE"}).naive);
}

TEST_CASE("every layout and type of the lists can be asked for") {
    for_each_type<Layout>([](auto layout) {
        for_each_type<Precision>([&](auto type) {
            for (const std::string &command : split("generate diff eval bench memory")) {
                Words words = start_of(command) + Words{"--cache", layout.name, "--kv", type.name};
                CacheChoice cache = parse_options(words).caches().at(0);
                CHECK(name_of(cache.layout) == std::string(layout.name));
                CHECK(name_of(cache.type_v) == std::string(type.name));
            }
        });
    });
}

TEST_CASE("several caches: each layout with each pair of types, --kv with pairs of equals") {
    auto caches = [](const Words &words) {
        std::string list;
        for (const CacheChoice &cache : parse_options(Words{"bench"} + words).caches())
            list += std::string(name_of(cache.layout))[0] + std::string(name_of(cache.type_k)) + "/" +
                    name_of(cache.type_v) + " ";
        return list;
    };
    CHECK(caches({}) == "cf16/f16 ");
    CHECK(caches({"--cache", "ring,paged", "--kv", "f32,int4"}) == "rf32/f32 rint4/int4 pf32/f32 pint4/int4 ");
    CHECK(caches({"-ctk", "f32,int4", "-ctv", "f16,int2"}) == "cf32/f16 cf32/int2 cint4/f16 cint4/int2 ");
    CHECK(caches({"-ctk", "f32,int4"}) == "cf32/f16 cint4/f16 ");
    CHECK(caches({"--cache", "none"}) == "");
    Options both = parse_options({"bench", "--cache", "none,contiguous"});
    CHECK((both.naive && both.layouts.size() == 1));
    CHECK(parse_options({"memory"}).layouts.size() == std::variant_size_v<Layout>);
    CHECK(refusal(split("diff -p x --cache paged,ring --window 9 -c 64")) == "");
}

TEST_CASE("bytes with their units") {
    const double GiB = 0x1p30;
    const std::vector<std::pair<std::string, double>> texts = {
        {"40GiB", 40 * GiB},    {"8G", 8 * GiB},
        {"1.5KiB", 1536},       {"2k", 2048},
        {"0.5M", 0x1p19},       {"2TiB", 2048 * GiB},
        {"2T", 2048 * GiB},     {"2kB", 2000},
        {"2.5MB", 2500000},     {"2.3GB", 2300000000},
        {"1.5 GB", 1500000000}, {"1TB", 1e12},
        {"2.01kB", 2010},       {"1000000", 1000000},
        {"1000000B", 1000000},  {"7 KiB", 7168},
        {"0.1GiB", 107374182},  {".5GiB", GiB / 2},
        {"16.GiB", 16 * GiB},   {"8191TiB", 8191 * 1024 * GiB},
        {"1e9", 1e9},           {"9007199254740991", 9007199254740991}};
    for (auto &each : texts)
        CHECK_MESSAGE(parse_options({"memory", "--budget", each.first}).budget == each.second, each.first);
    for (const char *nonsense : {"40Gib", "40gb", "40 GiB GiB", "GiB", "-5", "-5GiB", "nan", "inf", "0", "0.4",
                                 "1,5GiB", "1.2.3MB", ".", "40PiB", "9000TiB", "1e400", "4 0", "40GiB ", " 7 KiB"})
        check_refused({"memory", "--budget", nonsense},
                      {"--budget " + std::string(nonsense) + ": expected", "40GiB", "8G", "KiB .. TiB", "kB .. TB"});
}

TEST_CASE("a seed that is not given is drawn where there is a temperature") {
    std::set<int64_t> seeds;
    for (int i = 0; i < 4; i++) seeds.insert(parse_options({"generate", "-p", "x", "--temp", "1"}).seed);
    CHECK(seeds.size() > 1);
    CHECK(*seeds.begin() >= 0);
    CHECK(parse_options({"generate", "-p", "x", "--temp", "1", "-s", "7"}).seed == 7);
    CHECK(parse_options({"generate", "-p", "x"}).seed == 0);
    seeds.clear();
    for (int i = 0; i < 4; i++) seeds.insert(parse_options({"generate", "-p", "x", "--temp", "1", "-s", "-1"}).seed);
    CHECK((seeds.size() > 1 && *seeds.begin() >= 0));  // as llama.cpp's -s -1
}

TEST_CASE("a text from a file, a pipe, standard input") {
    Scratch scratch;
    const std::string name = scratch.str(), text("a\0b", 3);
    spill(name + "/text", text);
    spill(name + "/empty", "");
    REQUIRE(mkfifo((name + "/pipe").c_str(), 0600) == 0);
    CHECK(parse_options({"generate", "-f", name + "/text"}).prompt == text);
    CHECK(parse_options({"generate", "-f", name + "/empty"}).prompt.empty());
    CHECK(parse_options({"eval", "--file=" + name + "/text"}).prompt_file == name + "/text");
    std::string large(300000, 'x');
    std::thread writer([&] { spill(name + "/pipe", large); });
    CHECK(parse_options({"tokenize", "-f", name + "/pipe"}).prompt == large);
    writer.join();
    const Words files = {"x\n", "x\n\n", "x\r\n", "x\r", "\n", "\xef\xbb\xbfx\n", "\xef\xbb\xbf", "x\xef\xbb\xbf"},
                texts = {"x", "x\n", "x", "x\r", "", "x", "", "x\xef\xbb\xbf"};
    for (size_t i = 0; i < files.size(); i++) {
        spill(name + "/text", files[i]);
        CHECK(parse_options({"generate", "-f", name + "/text"}).prompt == texts[i]);
    }
    for (const char *mark : {"\xff\xfe", "\xfe\xff"}) {
        spill(name + "/text", std::string(mark) + "x");
        check_refused({"generate", "-f", name + "/text"}, {"-f " + name + "/text: is UTF-16, expected UTF-8", "iconv"});
    }
    spill(name + "/text", text);
    check_refused({"generate", "-f", name}, {"-f " + name, "Is a directory", "expected a file"});
    check_refused({"eval", "-f", name + "/missing"}, {"-f " + name + "/missing", "No such file"});
    for (const Words &words : {Words{"diff", "-f", "-"}, {"diff"}, {"tokenize"}}) {  // none is given: that from a pipe
        REQUIRE(freopen((name + "/text").c_str(), "r", stdin));
        CHECK(parse_options(words).prompt == text);
    }
    CHECK(parse_options({"generate", "-p", "x"}).prompt == "x");
    check_refused({"generate", "-f", "/dev/zero"}, {"-f /dev/zero: is longer than 1 MiB, expected a text"});  // at once
}

// ---- What is refused -----------------------------------------------------------------------------------------

TEST_CASE("every flag: its range, nothing beyond, and a value at all") {
    for (const Flag &flag : flags()) {
        const std::string first = split(flag.names)[0], argument = flag.argument;
        auto refuses = [&](const std::string &value, const Words &parts) {
            for (const Words &line : lines_with(flag, {value})) check_refused(line, parts);
        };
        auto takes = [&](const std::string &value) {
            for (const Words &line : lines_with(flag, {value}))
                CHECK_MESSAGE(refusal(line) == "", joined_words(line) << ": " << refusal(line));
        };
        auto in_range = [&](double least, double most, const std::string &expected) {
            if (first != "-n") takes(formatted("%.0f", least));  // of diff and bench not 0
            if (first != "--sinks") takes(formatted("%.0f", most));
            for (const std::string &bad : split("x 1.5 nan 5x 1e99 0x10 99999999999999999999 1e3 - " +
                                                formatted("%.0f %.0f", least - 1, most * 1.001 + 1)))
                refuses(bad, {first + " " + bad + ": ", expected + formatted(" from %.0f to %.0f", least, most)});
        };
        if (argument.empty()) {
            check_refused(start_of(split(flag.commands)[0]) + Words{first + "=yes"},
                          {first + "=yes", "takes no value"});
            continue;
        }
        for (const Words &line : lines_with(flag, {}))
            check_refused(line, {first + ": needs a value: " + first + " " + argument});
        refuses("--json", {first + ": needs a value, found the flag --json", first + "=--json"});
        if (first != "-p") refuses("", {first + ": its value is empty, expected " + argument});
        if (auto *range = std::get_if<Range<int>>(&flag.value))
            in_range(range->least, range->most, "expected a whole number");
        if (auto *range = std::get_if<Range<int64_t>>(&flag.value))
            in_range(range->least, range->most, "expected a whole number");
        if (auto *range = std::get_if<Range<std::vector<int>>>(&flag.value)) {
            in_range(range->least, range->most, "expected whole numbers");
            for (const std::string &bad : Words{"5,", ",5", "5,,6", ",", "5 6", "5,-2", "5,2x"})
                refuses(bad, {first + " " + bad + ": \"", "\" at character ", "expected whole numbers"});
            refuses("5,2x", {"\"2x\" at character 3"});
        }
        if (auto *range = std::get_if<Range<double>>(&flag.value)) {
            takes(formatted("%.17g", range->least)), takes(formatted("%.17g", range->most));
            for (const std::string &bad :
                 split("x nan inf 1x " + formatted("%g %g", range->least - 1, range->most * 1.01)))
                refuses(bad, {first + " " + bad + ": expected a number from"});
        }
        if (islower(argument[0])) {
            refuses("tpu", {first + " tpu: expected " + argument});
            for (const std::string &word : split(argument, '|')) takes(word);
        }
    }
}

TEST_CASE("a flag of another command is refused with those that know it") {
    for (const Command &command : commands)
        for (const Flag &flag : flags())
            for (const std::string &name : split(flag.names))
                if (!has(find_flag(name, command.name)->commands, command.name))
                    check_refused(start_of(command.name) + Words{name, "1"},
                                  {name + ": llm " + command.name + " has no such flag", commands_with(name)});
}

TEST_CASE("what is near is suggested, what is not is not") {
    for (auto &[words, expected] : std::vector<std::pair<std::string, std::string>>{
             {"genrate",
              "genrate: expected one of: generate chat diff eval bench batch memory show tokenize info; did you mean "
              "generate?"},
             {"difff -h", "; did you mean diff?"},
             {"generate --tmp 1", "--tmp: unknown flag; did you mean --temp? (llm generate --help lists all)"},
             {"generate --top_k 1", "did you mean --top-k?"},
             {"generate -temp 1", "did you mean --temp?"},
             {"diff --tolerence=1", "--tolerence: unknown flag; did you mean --tolerance?"},
             {"info --mode x", "did you mean --model?"},
             {"memory --bandwith 5", "did you mean --bandwidth?"},
             {"generate --chace ring", "did you mean --cache?"},
             {"ifno", "did you mean info?"},  // two neighbours swapped are one mistake
             {"-p Hello", "show tokenize info, then the flags (llm --help says more)"},
             {"generate --foo", "--foo: unknown flag (llm generate --help lists all)"},
             {"generate -x", "-x: unknown flag (llm"},
             {"generate -", "-: unknown flag (llm"},
             {"generate --", "--: unknown flag (llm"},
             {"tokenize --toleranse", "--toleranse: unknown flag (llm"},  // which only diff has
             {"run", "run: expected one of: generate chat diff eval bench batch memory show tokenize info (llm --help"},
         }) {
        std::string line = refusal(split(words));
        check_contains(line, expected);
        bool suggests = expected.find("did you mean") != std::string::npos;
        CHECK_MESSAGE((line.find("did you mean") != std::string::npos) == suggests, line);
    }
}

TEST_CASE("flags that other programs have: what does the same here, or that nothing does") {
    const Options same = parse_options(split("generate -p x --temperature=1 --max_new_tokens 5 --num-ctx 9"));
    CHECK((same.temperature == 1 && same.count == 5 && same.context == 9 && same.has("-n")));
    for (auto &[words, expected] : std::vector<std::pair<std::string, std::string>>{
             {"diff --temperature 1", "; here it is --temp, which belongs to: generate chat bench ("},
             {"generate -p x --n-predict x", "--n-predict x: expected a whole number"},
             {"bench -b 5", "-ub"},
             {"generate -ngl 99", "-ngl: unknown flag; the whole model is on one device: --device"},
             {"generate -cnv", "llm chat is for conversations"},
             {"generate -i", "llm chat is for conversations"},
             {"generate --max-length 9", "-n counts new tokens, -c the prompt's, too"},
             {"tokenize --reverse-prompt x", "; here it is --stop, which belongs to: generate"},
             {"generate --repeat-penalty 1.1", "--min-p"},
             {"generate --repetition_penalty 1.1", "--min-p"},
             {"generate -hf x/y", "nothing is downloaded"},
         })
        check_contains(refusal(split(words)), expected);
    std::set<std::string> names;
    for (auto &[words, hint] : elsewhere) {
        for (const std::string &name : split(words)) {
            CHECK_MESSAGE(names.insert(name).second, name);
            for (const char *dashes : {"-", "--"})
                CHECK_MESSAGE(!find_flag(dashes + name), name << " is a flag of this program");
        }
        std::string text = hint;  // all flags that it names are there
        for (size_t at = 0; (at = text.find('-', at)) != std::string::npos; at++)
            if (at == 0 || text[at - 1] == ' ') {
                std::string flag = text.substr(at, text.find_first_not_of("abcdefghijklmnopqrstuvwxyz-", at) - at);
                CHECK_MESSAGE((find_flag(flag) || flag == "--local-dir"), text);
            }
    }
}

TEST_CASE("of a flag that is given twice the last one holds; flags that change nothing are taken") {
    const Options twice =
        parse_options(split("generate -p a -n 1 --predict 2 --prompt b --json --json --kv f32 --kv int8"));
    CHECK((twice.count == 2 && twice.prompt == "b" && name_of(twice.types_v.at(0)) == std::string("int8")));
    const Options layout = parse_options(split("generate -p a --cache none --cache paged"));
    CHECK((!layout.naive && layout.layouts.size() == 1));
    for (const char *words : {"generate -p x --top-k 5 --top-p 0.5 --min-p 0.1", "generate -p x --cache none --kv int8",
                              "generate -p x --draft-tokens 3", "generate -p x --draft ngram --draft-rule leviathan",
                              "bench -p x --temp 1", "generate -p x --cache none --swa-full"})
        CHECK_MESSAGE(refusal(split(words)) == "", words);
}

TEST_CASE("flags that make no sense or contradict each other") {
    struct Case {
        const char *commands;
        Words words, parts;
    };
    const char *all = "generate diff eval bench memory", *working = "generate diff eval bench";
    const char *several = "diff eval bench memory", *texts = "generate diff show tokenize";
    for (const Case &each : std::vector<Case>{
             {"generate", {"Once upon a time"}, {"Once upon a time: expected a flag", "-p", "in quotes"}},
             {"generate", {""}, {"expected a flag", "-p"}},
             {"generate", {"--\n\x1b[2J"}, {"unknown flag"}},
             {texts, {"-f", "b"}, {"-p x: -p, -f and --ids", "keep one"}},
             {texts, {"--ids", "1"}, {"-p x: -p, -f and --ids", "keep one"}},
             {"eval", {"--ids", "1", "-f", "b"}, {"-f b: -p, -f and --ids", "keep one"}},
             {all, {"--kv", "f16", "-ctk", "f32"}, {"--kv f16", "-ctk and -ctv"}},
             {all, {"-ctv", "f32", "--kv", "f16"}, {"--kv f16", "-ctk and -ctv"}},
             {all, {"--kv", "int3"}, {"--kv int3: unknown type", precision_names()}},
             {all, {"-ctk", "?"}, {"-ctk ?: unknown type", precision_names()}},
             {all, {"-ctv", "f17"}, {"-ctv f17: unknown type", precision_names()}},
             {all, {"--cache", "foo"}, {"--cache foo: unknown layout", "none", layout_names()}},
             {several, {"--cache", "paged,foo"}, {"foo: unknown layout"}},
             {"generate", {"--kv", "f16,int8"}, {"--kv f16,int8", "takes one", "the other commands take several"}},
             {"generate", {"-ctk", "f16,"}, {"-ctk f16,", "takes one"}},
             {"generate", {"--cache", "contiguous,paged"}, {"--cache contiguous,paged", "takes one"}},
             {several, {"--kv", "f16,,int8"}, {"--kv f16,,int8", "empty"}},
             {several, {"--kv", ","}, {"--kv ,", "empty"}},
             {several, {"-ctv", ",f16"}, {"-ctv ,f16", "empty"}},
             {several, {"--cache", "paged,"}, {"--cache paged,", "empty"}},
             {working, {"--page", "16"}, {"--page 16", "--cache paged", "found --cache contiguous"}},
             {all, {"--cache", "ring", "--page", "16"}, {"--page 16", "--cache paged", "found --cache ring"}},
             {working, {"--window", "16"}, {"--window 16", "--cache ring", "found --cache contiguous"}},
             {all, {"--cache", "paged", "--sinks", "1"}, {"--sinks 1", "--cache ring", "found --cache paged"}},
             {"generate bench", {"--cache", "none", "--window", "5"}, {"--window 5", "found --cache none"}},
             {"generate bench", {"--cache", "none", "--page", "5"}, {"--page 5", "found --cache none"}},
             {"diff eval memory", {"--cache", "none"}, {"--cache none", "is about caches", layout_names()}},
             {"eval memory", {"--cache", "contiguous,none"}, {"--cache contiguous,none", "is about caches"}},
             {"generate show", {"-c", "64", "--cache", "ring"}, {"-c 64", "a ring", "drop -c"}},
             {working, {"--weights", "int8", "--device", "cuda"}, {"--weights int8", "--device cuda", "auto"}},
             {working, {"--weights", "copied", "--device", "cuda"}, {"--weights copied", "--device cuda"}},
             {"diff", {"-n", "0"}, {"-n 0: expected 1 or more"}},
             {"bench", {"-n", "-1"}, {"-n -1: expected a whole number from 1"}},
             {"eval", {"--all", "--kv", "f16"}, {"--kv f16: --all", "drop one"}},
             {"eval", {"--all", "-ctk", "f16"}, {"-ctk f16: --all"}},
             {"eval", {"--all", "--cache", "paged", "--page", "3"}, {"--cache paged: --all"}},
             {"eval", {"--all", "--window", "30"}, {"--window 30: --all"}},
             {"memory", {"-m", "x", "--layers", "2"}, {"-m x: a model has a shape", "drop -m"}},
             {"memory", {"--layers", "2"}, {"--layers 2: a shape is", "--kv-heads N --head-dim N -c N"}},
             {"memory", {"--kv-heads", "2", "--head-dim", "64", "-c", "9"}, {"--kv-heads 2: a shape is --layers"}},
             {"memory", {"--layers", "2", "--kv-heads", "2", "--head-dim", "64"}, {"--layers 2: a shape is", "-c N"}},
             {"memory", {"--bandwidth", "100GB"}, {"--bandwidth 100GB: expected a number from"}},
             {"memory", {"--budget", "40PiB"}, {"--budget 40PiB: expected"}},
         })
        for (const std::string &command : split(each.commands))
            check_refused(start_of(command) + each.words, each.parts);
    REQUIRE(freopen("/dev/null", "r", stdin));
    for (const std::string &command : split(texts))
        check_refused({command}, {"no prompt", "-p TEXT", "-f FILE", "--ids 1,2,3"});
    check_refused({}, {"no command", "generate chat diff", "llm --help"});
    check_refused({"help", "genrate"}, {"genrate: expected one of: generate", "did you mean generate?"});
    check_refused({""}, {"expected one of: generate chat diff"});
    check_refused({"-p", "hi"}, {"-p: expected one of: generate chat diff"});
    check_refused({"--json"}, {"--json: expected one of"});
    for (const std::string &words :
         Words{"--page 9", "--window 9 --sinks 2", "--cache ring -c 9", "--cache paged --page 3"})
        CHECK(refusal(Words{"memory"} + split(words)) == "");  // which shows all layouts
}

TEST_CASE("a long value does not push the reason out of the line") {
    std::string ids = "1";
    for (int i = 0; i < 5000; i++) ids += ",1";
    check_refused({"generate", "--ids", ids + ",x"},
                  {"--ids 1,1,", "\"x\" at character 10003", "whole numbers from 0"});
}

// ---- Text and tables in so many columns ----------------------------------------------------------------------

TEST_CASE("a signal takes all files that are not complete, and no other") {
    Scratch scratch;
    auto count = [&] { return std::distance(fs::directory_iterator(scratch.path), fs::directory_iterator()); };
    PartFile first(scratch / "first", "--a"), second(scratch / "second", "--b");
    PartFile(scratch / "third", "--c").finish();
    CHECK(count() == 3);
    leave_nothing();
    CHECK((count() == 1 && fs::exists(scratch / "third")));
}

TEST_CASE("lines are broken at blanks, where they are too long") {
    CHECK(wrapped("one two\n\nthree four five\n", 9) == "one two\n\nthree\nfour five\n");
    CHECK(wrapped("one two", 7) == "one two");
    CHECK(wrapped("one two", 6, 2) == "one\n  two");
    CHECK(wrapped("  a longword b", 6, 2) == "  a\n  longword\n  b");  // what has no blank stays
    CHECK(wrapped("    longword", 6, 4) == "    longword");
    CHECK(wrapped("one      ", 5) == "one  ");
    CHECK(wrapped("", 5) == "");
    CHECK(wrapped("one two", SIZE_MAX) == "one two");
    const std::unique_ptr<FILE, int (*)(FILE *)> file(tmpfile(), fclose);
    for (const char *columns : {"40", "0", "x", (const char *)nullptr}) {  // also of what is no terminal
        Environment given("COLUMNS", columns);
        CHECK(columns_of(file.get()) == (columns && atoi(columns) ? 40 : SIZE_MAX));
    }
}

TEST_CASE("the columns of a table that do not fit come below, behind the names of the rows") {
    std::vector<Report> rows(2);
    for (int i = 0; i < 2; i++) {
        rows[i].add("unseen", 7).add("name", std::string(i ? "b" : "a"), i ? "b     " : "a     ", "name");
        rows[i].add("kind", std::string("x"), " x  ", "kind").add("one", 10 + i, formatted(" %5d", 10 + i), "one");
        rows[i].add("two", 20 + i, formatted(" %5d", 20 + i)).add("three", 30, "    30", " a head that is long");
        rows[i].say("!");
    }
    rows[1].above = "over b\n";
    auto shown = [&](size_t width) { return Report().table("", rows, width).text; };
    const std::string whole =
        "name  kind   one       a head that is long\n"
        "a      x      10    20    30!\nover b\nb      x      11    21    30!\n";
    CHECK(shown(SIZE_MAX) == whole);
    CHECK(shown(42) == whole);
    CHECK(shown(41) ==
          "name  kind   one\na      x      10    20\nover b\nb      x      11    21\n"
          "name  kind a head that is long\na      x      30!\nover b\nb      x      30!\n");
    CHECK(shown(5) == shown(21));  // a column at least
    CHECK(Report().table("", {}, 9).text == "");
}

// ---- Help ----------------------------------------------------------------------------------------------------

TEST_CASE("help names every command, and of each all its flags and an example that runs") {
    Words arguments = {"--help"};
    std::string general = printed([&] { print_help(parse_options({"--help"})); });
    for (const Words &words : {Words{"-h"}, {"help"}, {"help", "help"}})
        CHECK(printed([&] { print_help(parse_options(words)); }) == general);
    check_contains(general, "Exit status: 0 done; 1", "llm COMMAND --help", "llm --version");
    for (const Command &command : commands) {
        check_contains(general, std::string("llm ") + command.name + " ", command.help);
        std::string help = printed([&] { print_help(parse_options({command.name, "--help"})); });
        for (const Words &words : {Words{command.name, "-h", "-m", "x"}, {"help", command.name}, {"-h", command.name}})
            CHECK(printed([&] { print_help(parse_options(words)); }) == help);
        for (const Flag &flag : flags()) {
            const Flag &row = *find_flag(split(flag.names)[0], command.name);
            const std::string names = "\n  " + joined(split(row.names), ", ") + " " + row.argument;
            CHECK(contains(help, names) == has(row.commands, command.name));
        }
        check_contains(help, "\nText:\n  -m, --model", "Output:\n");
        for (const Command &other : commands) CHECK_MESSAGE(!contains(help, std::string(" ") + other.name + ":"), help);
        std::istringstream lines(general + help);
        for (std::string line; std::getline(lines, line);) CHECK_MESSAGE(line.size() <= 100, line);
        check_contains(help, std::string("For example: llm ") + command.name + " " + command.example);
        Words example = {command.name};
        bool quoted = false;
        for (const std::string &word : split(command.example)) {  // "Once upon a time" is one
            if (quoted) example.back() += " " + word;
            if (!quoted) example.push_back(word);
            if (std::count(word.begin(), word.end(), '"') == 1) quoted = !quoted;
        }
        std::string line = refusal(example);
        CHECK_MESSAGE((line.empty() || contains(line, ": No such file or directory")), line);
    }
    std::string caches = printed([&] { print_help(parse_options({"eval", "--help"})); });
    for_each_type<Layout>([&](auto layout) { check_contains(caches, layout.name); });
    for_each_type<Precision>([&](auto type) { check_contains(caches, type.name); });
    check_contains(caches, "128k is 131072");
}

TEST_CASE("--version says what this is and how it was built") {
    std::string version = printed([&] { print_help(parse_options({"--version"})); });
    for (const char *other : {"-V", "version"})
        CHECK(printed([&] { print_help(parse_options({other})); }) == version);
    check_contains(version, "llm 1.", "built with", "CUDA");
    CHECK(std::count(version.begin(), version.end(), '\n') == 1);
}

TEST_CASE("a number has three digits, and none becomes 1.05e+03") {
    CHECK(in_digits(0.01234) == "0.0123");
    CHECK(in_digits(45.14) == "45.1");
    CHECK(in_digits(999.4) == "999");
    CHECK(in_digits(1050.4) == "1050");
}
