// llm memory: the formula, as the program prints it and as the functions of cache.h have it, beside the numbers that
// it must give, the bytes of caches that were really opened, and an account of every byte that is written down here.
// Run from the repository's root. The environment variable LLM says which program; without it, ./llm.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <map>

#include "../cache.h"
#include "program.h"

using namespace program;

const double MiB = 0x1p20, GiB = 0x1p30;

// ---- Running the program -----------------------------------------------------------------------------------

Outcome run_line(const std::string &line) { return run(words_of(line)); }
Json run_json(const std::string &line) { return program::run_json(words_of(line)); }
Json memory(const std::string &flags) { return run_json("memory " + flags); }

const Json *results(const Json &root) { return at(root, "results"); }

// The one entry of `results` for a cache.
const Json *row(const Json &root, const std::string &layout, const std::string &type_k, const std::string &type_v) {
    const Json *found = nullptr;
    for (const Json *item : items_of(results(root))) {
        if (text(item, "layout") != layout || text(item, "type_k") != type_k || text(item, "type_v") != type_v)
            continue;
        CHECK(!found);
        found = item;
    }
    REQUIRE_MESSAGE(found, layout << " " << type_k << " " << type_v);
    return found;
}
const Json *row(const Json &root, const std::string &layout, const std::string &type) {
    return row(root, layout, type, type);
}

double cell(const Json &root, const std::string &layout, const std::string &type, const std::string &key) {
    return number(row(root, layout, type), key);
}

void check_refused(const std::string &arguments, const Words &parts) {
    for (const char *json : {"", " --json"}) program::check_refused(run_line("memory " + arguments + json), parts);
}

// ---- The same from the functions ---------------------------------------------------------------------------

std::string shape_flags(int layers, int kv_heads, int width, int positions, int sequences = 1) {
    return formatted("--layers %d --kv-heads %d --head-dim %d -c %d --batch %d ", layers, kv_heads, width, positions,
                     sequences);
}
std::string flags_of(const CacheShape &shape) {
    return shape_flags(shape.layers, shape.kv_heads, shape.key_width, shape.capacity, shape.sequences) +
           formatted("--page %d --window %d --sinks %d", shape.page, shape.window, shape.sinks);
}

CacheShape shape_of(int layers, int kv_heads, int width, int sequences, int capacity) {
    return {layers, kv_heads, width, width, sequences, capacity};
}

// Calls use(layout, type) for all layouts with all precisions.
template <class Use>
void for_each_cache(Use use) {
    for_each_type<Layout>([&](auto layout) {
        for_each_type<Precision>([&](auto type) {
            CAPTURE(std::string(layout.name));
            CAPTURE(std::string(type.name));
            use(Layout(layout), Precision(type));
        });
    });
}

// ---- The same, counted by hand -----------------------------------------------------------------------------

// Positions of a layer that the formula counts: of a ring its window and sinks.
double kept_by_hand(const CacheShape &shape, const std::string &layout, double rows) {
    return layout == "ring" ? shape.sequences * ((double)shape.window + shape.sinks) : rows;
}

// Rows of a layer: of a paged cache those of whole pages; of a ring in 32s, with an eighth of the window (32 to 512)
// for the positions of a pass.
double rows_by_hand(const CacheShape &shape, const std::string &layout) {
    auto round_up = [](double count, double step) { return std::ceil(count / step) * step; };
    double positions = shape.capacity;
    if (layout == "paged") positions = round_up(positions, shape.page);
    double pass = std::min(512.0, std::max(32.0, std::floor(shape.window / 8 / 32.0) * 32));
    if (layout == "ring") positions = round_up(shape.window + shape.sinks + pass - 1, 32);
    return shape.sequences * positions;
}

// Bytes of K, or of V. A group of 32 numbers of int4 takes 16 bytes, of int2 8, and 2 + 2 for its scale and zero point.
CacheBytes side_by_hand(const CacheShape &shape, const std::string &layout, const std::string &type) {
    struct Row {
        double bits, bytes;  // of a number's code; of a row
    };
    const double width = shape.key_width, groups = std::ceil(width / 32), heads = (double)shape.layers * shape.kv_heads;
    const std::map<std::string, Row> known = {
        {"f32", {32, 4 * width}},        {"f16", {16, 2 * width}}, {"bf16", {16, 2 * width}},
        {"fp8", {8, 2 + width}},         {"int8", {8, 2 + width}}, {"int4", {4, groups * (16 + 4)}},
        {"int2", {2, groups * (8 + 4)}},
    };
    REQUIRE_MESSAGE(known.count(type), "side_by_hand() in tests/test_memory.cpp does not know the bytes of " << type);
    const auto [bits, row] = known.at(type);
    double payload = std::ceil(width * bits / 8);
    double newest = bits <= 4 ? heads * shape.sequences * 32 * width * 2 : 0;  // 32 positions in f16
    double sinks = layout == "ring" ? heads * shape.sequences * shape.sinks * width * 4 : 0;
    double rows = heads * rows_by_hand(shape, layout), kept = heads * kept_by_hand(shape, layout, rows / heads);
    return {kept * payload, rows * row - kept * payload + newest + sinks};
}

// Of a paged cache: for each page an entry in a table, a count of references and a place in the free list.
double table_by_hand(const CacheShape &shape, const std::string &layout) {
    return layout == "paged" ? 3 * 4 * rows_by_hand(shape, layout) / shape.page : 0;
}

const std::vector<CacheShape> shapes = {
    {80, 64, 128, 128, 1, 32768, 16, 0, 32764, 4}, {32, 8, 128, 128, 4, 4096, 64, 0, 1024, 4},
    {3, 5, 80, 80, 7, 1001, 7, 0, 300, 0},         {1, 1, 1, 1, 1, 1, 1, 0, 1, 0},
    {2, 3, 33, 33, 2, 31, 32, 0, 40, 39},          {61, 1, 576, 576, 3, 131072, 256, 0, 4096, 64},
};

TEST_CASE("every layout and precision is there, and every byte is accounted for") {
    for (const CacheShape &shape : shapes) {
        CAPTURE(flags_of(shape));
        Json root = memory(flags_of(shape));
        int count = 0;
        for_each_cache([&](Layout layout, Precision type) {
            count++;
            std::string place = name_of(layout), name = name_of(type);
            const Json *item = row(root, place, name);
            CacheBytes side = side_by_hand(shape, place, name), printed = full_bytes({shape}, {layout, type, type});
            double table = table_by_hand(shape, place), rows = rows_by_hand(shape, place);
            CHECK(number(item, "payload_bytes") == 2 * side.payload);
            CHECK(number(item, "metadata_bytes") == 2 * side.metadata + table);
            CHECK(number(item, "bytes") == printed.total());
            CHECK(number(item, "metadata_percent") == 100 * printed.metadata / printed.payload);
            CHECK(number(item, "times_smaller") == cell(root, place, "f32", "bytes") / printed.total());
            CHECK(number(item, "payload_bytes") == printed.payload);
            CHECK(number(item, "metadata_bytes") == printed.metadata);
            CHECK(number(item, "rows") == rows);
            CHECK((at(item, "pages") != nullptr) == (place == "paged"));
            if (place == "paged") CHECK(number(item, "pages") == rows / shape.page);
            CHECK(number(item, "bytes_per_layer") * shape.layers == number(item, "bytes") - table);
            double row_bytes = (double)std::visit([&](auto form) { return form.row_bytes(shape.key_width); }, type);
            CHECK(number(item, "bytes_per_token") == 2.0 * shape.layers * shape.kv_heads * row_bytes);
            for (const char *key : {"bytes", "payload_bytes", "metadata_bytes", "rows"})
                CHECK(number(item, std::string("kinds.0.") + key) == number(item, key));
        });
        CHECK(count_of(results(root)) == count);
        const int told[] = {shape.layers,   shape.kv_heads, shape.key_width, shape.sequences,
                            shape.capacity, shape.page,     shape.window,    shape.sinks};
        const Words keys = words_of("layers kv_heads head_dim batch positions page window sinks");
        for (size_t i = 0; i < keys.size(); i++) CHECK_MESSAGE(number(root, keys[i]) == told[i], keys[i]);
    }
}

// ---- The numbers of the formula ----------------------------------------------------------------------------

TEST_CASE("the answers that are known") {
    struct Case {
        std::string shape;
        const char *layout, *type, *key;
        double answer;
    };
    for (const Case &each : std::vector<Case>{
             {shape_flags(80, 64, 128, 32768), "contiguous", "bf16", "bytes", 85899345920},
             {shape_flags(80, 64, 128, 32768), "contiguous", "bf16", "bytes_per_layer", GiB},
             {shape_flags(80, 64, 128, 32768), "contiguous", "bf16", "bytes_per_token", 2621440},
             {shape_flags(80, 8, 128, 32768), "contiguous", "bf16", "bytes", 10 * GiB},
             {shape_flags(80, 1, 128, 32768), "contiguous", "bf16", "bytes", 1.25 * GiB},
             {shape_flags(80, 64, 128, 32768), "contiguous", "int8", "payload_bytes", 40 * GiB},
             {shape_flags(80, 64, 128, 32768), "contiguous", "int8", "metadata_bytes", 40 * GiB * 0.015625},
             {shape_flags(80, 8, 128, 32768), "contiguous", "int8", "payload_bytes", 5 * GiB},
             {shape_flags(80, 8, 128, 32768), "contiguous", "int8", "metadata_bytes", 5 * GiB * 0.015625},
             {shape_flags(80, 64, 128, 16384), "contiguous", "bf16", "bytes", 40 * GiB},
             {shape_flags(32, 32, 128, 4096, 4), "contiguous", "bf16", "bytes", 8 * GiB},
             {shape_flags(32, 8, 128, 8192), "contiguous", "bf16", "bytes", GiB},
             {shape_flags(32, 32, 128, 8192), "contiguous", "bf16", "bytes", 4 * GiB},
             {shape_flags(32, 32, 128, 8192), "contiguous", "f16", "bytes_per_token", 524288},
             {shape_flags(48, 56, 128, 1024, 128), "contiguous", "f16", "bytes", 180388626432},
             {shape_flags(1, 2, 4, 3), "contiguous", "bf16", "bytes", 48 + 48},
             {shape_flags(80, 8, 128, 16), "paged", "bf16", "bytes_per_layer", 65536},
             {shape_flags(80, 8, 128, 16), "paged", "bf16", "payload_bytes", 5 * MiB},
             {shape_flags(80, 8, 128, 16), "paged", "bf16", "pages", 1},
             {shape_flags(80, 8, 128, 900), "paged", "bf16", "pages", 57},
             {shape_flags(80, 8, 128, 900), "paged", "bf16", "payload_bytes", 285 * MiB},
             {shape_flags(80, 64, 128, 32768), "contiguous", "bf16", "bytes_read_per_token", 80 * GiB},
             {shape_flags(80, 64, 128, 1048576), "contiguous", "bf16", "bytes", 2560 * GiB},
             {shape_flags(80, 64, 128, 32768), "contiguous", "int8", "metadata_percent", 1.5625},
             {shape_flags(80, 64, 128, 32768), "contiguous", "int4", "bytes", 25 * GiB + 80 * 64 * 32 * 512},
             {shape_flags(80, 64, 128, 32768) + "--budget 40GiB ", "contiguous", "bf16", "tokens_in_budget", 16384},
             {shape_flags(80, 64, 128, 32768) + "--budget 40GiB ", "contiguous", "f32", "tokens_in_budget", 8192},
             // Its table takes a page's place.
             {shape_flags(80, 64, 128, 32768) + "--budget 40GiB ", "paged", "bf16", "tokens_in_budget", 16384 - 16},
         }) {
        std::string flags = each.shape + "--cache " + each.layout + " --kv " + each.type;  // a ring's by default
        CAPTURE(flags);
        Json root = memory(flags);
        CHECK(cell(root, each.layout, each.type, each.key) == each.answer);
        CHECK(number(root, "bytes") == cell(root, each.layout, each.type, "bytes"));
        CHECK(count_of(results(root)) == 1);  // the flags select it
    }
}

TEST_CASE("a pair of types is in every layout, and the flags choose the cache at the top") {
    const std::string shape = "--layers 4 --kv-heads 2 --head-dim 64 -c 1000";
    Json root = memory(shape + " -ctk int8 -ctv int2"), all = memory(shape);
    CHECK(count_of(results(root)) == (int)std::variant_size_v<Layout>);
    for_each_type<Layout>([&](auto layout) {
        const Json *pair = row(root, layout.name, "int8", "int2"), *k = row(all, layout.name, "int8");
        const Json *v = row(all, layout.name, "int2");
        for (const char *key : {"payload_bytes", "metadata_bytes", "bytes_per_token", "bytes_read_per_token"})
            CHECK(2 * number(pair, key) == number(k, key) + number(v, key));
    });
    Json ring = memory(shape + " -ctk int8 -ctv int2 --cache ring,paged --page 10");
    CHECK(count_of(results(ring)) == 2);
    CHECK(text(ring, "layout") + text(ring, "type_k") + text(ring, "type_v") == "ringint8int2");
    for (const char *key : {"bytes", "payload_bytes", "metadata_bytes"})
        CHECK(number(ring, key) == number(row(ring, "ring", "int8", "int2"), key));
    CHECK(count_of(results(memory(shape + " --kv f32,int4 --cache paged"))) == 2);
    CHECK(number(all, "bytes") == cell(all, "contiguous", "f16", "bytes"));
    CHECK(number(memory(shape + " --sinks 9"), "window") == 991);
    const int few[][3] = {{1, 1, 0}, {4, 3, 1}, {8, 5, 3}, {9, 5, 4}, {1000, 996, 4}};  // positions, window, sinks
    for (auto [positions, window, sinks] : few) {
        Json small = memory(shape_flags(1, 1, 1, positions));
        CHECK((number(small, "window") == window && number(small, "sinks") == sinks));
    }
}

// ---- Beside caches that were opened ------------------------------------------------------------------------

TEST_CASE("generate reports the same bytes for a cache that it filled") {
    for_each_cache([&](Layout layout, Precision type) {
        std::string choice = std::string(" --cache ") + name_of(layout) + " --kv " + name_of(type);
        std::string place = std::holds_alternative<Ring>(layout) ? "" : " -c 105";
        Json real = run_json("generate --ids 1,2,3 -t 1 --ignore-eos -n 102" + choice + place);
        Json formula = memory(choice + place);
        for (const std::string &key : Words{"bytes", "payload_bytes", "metadata_bytes"}) {
            CHECK(number(real, "cache." + key) == number(formula, key));
            CHECK(number(real, "cache." + key) == cell(formula, name_of(layout), name_of(type), key));
        }
    });
}

TEST_CASE("generate reads as many bytes for its last token") {
    for_each_cache([&](Layout layout, Precision type) {
        std::string choice = std::string(" --cache ") + name_of(layout) + " --kv " + name_of(type);
        if (std::holds_alternative<Ring>(layout)) choice += " --window 50 --sinks 3";  // most of it dropped
        auto read = [&](int count) {
            std::string line = "generate --ids 1,2,3 -t 1 --ignore-eos" + choice + " -n " + std::to_string(count);
            return number(run_json(line), "decode.bytes");
        };
        Json formula = memory("-c 103" + choice);
        const Json *item = row(formula, name_of(layout), name_of(type));
        CHECK(number(item, "bytes_read_per_token") == read(101) - read(100));
    });
}

TEST_CASE("without flags: the built-in checkpoint, its whole context, and its weights are read") {
    Json about = run_json("info"), root = memory("");
    for (const char *key : {"layers", "kv_heads", "head_dim"}) CHECK(number(root, key) == number(about, key));
    CHECK(number(root, "positions") == number(about, "context"));
    CHECK(number(root, "bytes_per_token") == number(about, "cache_bytes_per_token_f16"));
    CHECK(number(root, "weight_bytes_read") == number(about, "weight_bytes"));  // tied: the table is the head
    const Json *item = row(root, "contiguous", "f16");
    CHECK(number(item, "bytes_read_per_token") == number(item, "bytes") + number(root, "weight_bytes_read"));
    CHECK(number(memory("-m weights_tools/builtin"), "bytes") == number(root, "bytes"));
}

// ---- Budget ------------------------------------------------------------------------------------------------

// The bytes of a cache that holds so many positions, or so many and a position of each sequence (of a paged cache, a
// page; of a ring, a position of the window) more.
double bytes_of_tokens(CacheShape shape, const Layout &layout, const Precision &type, double tokens, int more) {
    int64_t each = (int64_t)tokens / shape.sequences;
    if (std::holds_alternative<Paged>(layout)) {
        shape.pages = (int)((int64_t)tokens / shape.page) + more;
        shape.capacity = (shape.pages + shape.sequences - 1) / shape.sequences * shape.page;
        REQUIRE(std::fmod(tokens, shape.page) == 0);
    } else {
        REQUIRE(std::fmod(tokens, shape.sequences) == 0);
        shape.capacity = (int)each + more;
        shape.window = (int)each - shape.sinks + more;
    }
    return full_bytes({shape}, {layout, type, type}).total();
}

TEST_CASE("the tokens of a budget fit, and one more does not") {
    for (const CacheShape &shape : shapes) {
        for (double budget : {32 * MiB, 40 * GiB, 1e10, 123456789.0}) {
            CAPTURE(flags_of(shape));
            CAPTURE(budget);
            std::string flag = formatted(" --budget %.0f", budget);
            CacheShape one = shape_of(shape.layers, shape.kv_heads, shape.key_width, shape.sequences, 1);
            if (full_bytes({one}, {Contiguous{}, Int8{}, Int8{}}).total() > budget) {
                check_refused(flags_of(shape) + flag, {"--budget", "the smallest of these needs", "raise it"});
                continue;
            }
            Json root = memory(flags_of(shape) + flag);
            for_each_cache([&](Layout layout, Precision type) {
                double tokens = cell(root, name_of(layout), name_of(type), "tokens_in_budget");
                double least = std::holds_alternative<Ring>(layout) ? 2.0 * shape.sinks * shape.sequences : 0;
                CAPTURE(tokens);
                if (tokens > 0) CHECK(bytes_of_tokens(shape, layout, type, tokens, 0) <= budget);
                if (tokens < 0x1p30) CHECK(bytes_of_tokens(shape, layout, type, tokens ? tokens : least, 1) > budget);
            });
        }
    }
}

TEST_CASE("what no flag of positions can say is not promised") {
    Json root = memory("--layers 1 --kv-heads 1 --head-dim 1 -c 8 --budget 1TB");
    for_each_cache([&](Layout layout, Precision type) {
        CHECK(cell(root, name_of(layout), name_of(type), "tokens_in_budget") == 0x1p30);
    });
}

// ---- Roofline ----------------------------------------------------------------------------------------------

TEST_CASE("tokens a second are the bandwidth over the bytes of a token") {
    for (const char *flags : {"", "--batch 7 -c 100", "--layers 80 --kv-heads 8 --head-dim 128 -c 8192 --batch 5",
                              "--layers 80 --kv-heads 8 --head-dim 128 -c 8192 --weight-bytes 140GB"}) {
        Json root = memory(std::string(flags) + " --bandwidth 3350.5");
        double batch = number(root, "batch"), weights = number(root, "weight_bytes_read");
        CHECK(number(root, "bandwidth_gb_per_second") == 3350.5);
        for_each_cache([&](Layout layout, Precision type) {
            const Json *item = row(root, name_of(layout), name_of(type));
            double read = number(item, "bytes_read_per_token");
            const char *rate = weights > 0 ? "tokens_per_second" : "cache_only_tokens_per_second";
            CHECK(number(item, rate) == doctest::Approx(3350.5e9 / read).epsilon(1e-15));
            CHECK(number(item, "bytes_read_per_step") == doctest::Approx(read * batch).epsilon(1e-15));
            // Rows are read as they are stored; of int4 and int2 the newest 32 positions or fewer are f16.
            double stored = number(root, "positions") * number(item, "bytes_per_token");
            double newest = 32 * cell(root, "contiguous", "f16", "bytes_per_token");
            CHECK(number(item, "bytes_read_per_step") >= weights + batch * stored);
            CHECK(number(item, "bytes_read_per_step") <= weights + batch * (stored + (has_blocks(type) ? newest : 0)));
        });
    }
}

TEST_CASE("a ring reads its window, whatever came before, and the sinks in f32") {
    Json root = memory("--layers 3 --kv-heads 2 --head-dim 64 -c 100000 --window 1000 --sinks 10");
    const Json *item = row(root, "ring", "int8");
    CHECK(number(item, "bytes_read_per_token") == 2 * 3 * 2 * (1000 * 66 + 10 * 64 * 4));
    CHECK(cell(root, "paged", "int8", "bytes_read_per_token") == 2 * 3 * 2 * 100000.0 * 66);
    CHECK((!at(item, "tokens_per_second") && !at(item, "tokens_in_budget")));
}

TEST_CASE("a layer with a sliding window of its own reads no more than that") {
    Json root = memory("-m tests/fixtures/models/mistral_window"),
         about = run_json("info -m tests/fixtures/models/mistral_window");
    double window = number(about, "window"), token = number(about, "cache_bytes_per_token_f16");
    REQUIRE(window > 0);
    REQUIRE(window < number(about, "context"));
    CHECK(number(root, "window") == window);
    CHECK(number(root, "sinks") == 0);
    for_each_type<Layout>([&](auto layout) {  // also one that is new
        double read = cell(root, layout.name, "f16", "bytes_read_per_token");
        CHECK(read == number(root, "weight_bytes_read") + window * token);
    });
}

// ---- Large shapes ------------------------------------------------------------------------------------------

TEST_CASE("bytes are exact to the last digit below 2^53") {
    Outcome result = run_line("memory --layers 1 --kv-heads 1 --head-dim 1048573 -c 1073741789 --json");
    REQUIRE_MESSAGE(result.status == 0, result);
    for (int64_t row : {8 * 1048573, 4 * 1048573, 2 * 1048575}) {  // f32, f16 and int8, K and V
        std::string exact = "\"bytes\": " + std::to_string(row * 1073741789) + ",";
        check_contains(result.out, exact);
    }
}

TEST_CASE("what no double can tell, or no page table number, is refused") {
    const int most = 1 << 30;
    check_refused(shape_flags(most, most, most, most), {"2^53", "lower"});
    check_refused(shape_flags(most, most, most, 1), {"2^53", "lower"});
    check_refused(shape_flags(1, 1, 1, most, most), {"lower"});
    check_refused(shape_flags(1, 1, 1, most, 2) + "--page 1", {"pages", "--page"});
    check_refused(shape_flags(1, 1, 1048577, most), {"2^53"});
    for (const std::string &shape : {shape_flags(most, 1, 1, 1), shape_flags(1, most, 1, 1), shape_flags(1, 1, most, 1),
                                     shape_flags(1, 1, 1, most), shape_flags(1, 1, 1, 1, most)})
        CHECK(number(memory(shape), "bytes") == 4 * GiB);
}

// ---- The table ---------------------------------------------------------------------------------------------

TEST_CASE("the table has a line a cache, under 120 columns, and says the shape") {
    Outcome result =
        run_line("memory --layers 80 --kv-heads 64 --head-dim 128 -c 900 --batch 3 --budget 40GiB --bandwidth 3350");
    REQUIRE_MESSAGE(result.status == 0, result);
    CHECK(result.err.empty());
    std::map<std::string, int> starts;
    for (const std::string &line : split(result.out, '\n')) {
        CHECK_MESSAGE(line.size() < 120, line);
        starts[line.substr(0, line.find_first_of(" :"))]++;
    }
    for_each_type<Layout>([&](auto layout) { CHECK(starts[layout.name] == 1); });
    for_each_type<Precision>([&](auto type) { CHECK(starts[type.name] == std::variant_size_v<Layout>); });
    check_contains(result.out, "2 (K, V) x 80 layers x 64 KV heads x 128 numbers x 3 sequences x 900 positions",
                   "171 pages", "cache only/s", "no weights are counted", "fits", "a window of 896, 4 sinks");
    for (const char *part : {"nan", "inf"}) CHECK_MESSAGE(!contains(result.out, part), result.out);
}

TEST_CASE("the table reads well: three digits and a unit") {
    std::string out = run_line("memory --layers 80 --kv-heads 64 --head-dim 128 -c 32768").out;
    check_contains(out, "bf16         80 GiB       0 B    80 GiB         0         2   2.5 MiB     1 GiB    80 GiB\n",
                   "int8         40 GiB   640 MiB  40.6 GiB      1.56      3.94");
    CHECK(out.find("/s") == std::string::npos);
    check_contains(run_line("memory --bandwidth 10").out, "tokens/s\n");
    check_contains(run_line("memory --cache ring -ctk int8").out, "\nint8/f16 ");
    out = run_line("memory --layers 1 --kv-heads 1 --head-dim 8 -c 1 --cache contiguous").out;
    check_contains(out, "x 1 layer x 1 KV head x 8 numbers x 1 sequence x 1 position x");
}

// ---- Any checkpoint ------------------------------------------------------------------------------------------

const std::string gemma3_1b = R"({"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
    "hidden_size": 1152, "head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 26,
    "sliding_window": 512, "sliding_window_pattern": 6, "max_position_embeddings": 32768, "vocab_size": 262144})";

TEST_CASE("of any config.json, also where the model does not run") {
    struct Case {
        const char *config;
        double bytes_per_token;  // bf16
        int layers, key_width, context;
    };
    Scratch scratch;
    const std::string directory = scratch.str(), config = scratch / "config.json";
    for (const Case &each : std::vector<Case>{
             {R"("architectures":["DeepseekV3ForCausalLM"],"num_hidden_layers":61,"num_attention_heads":128,
                 "kv_lora_rank":512,"qk_rope_head_dim":64,"max_position_embeddings":163840,"hidden_size":7168)",
              70272, 61, 576, 163840},
             {R"("architectures":["MiniCPM3ForCausalLM"],"num_hidden_layers":62,"num_attention_heads":40,
                 "num_key_value_heads":40,"kv_lora_rank":256,"qk_rope_head_dim":32,"max_position_embeddings":32768,
                 "hidden_size":2560)",
              35712, 62, 288, 32768},
             {R"("architectures":["GPT2LMHeadModel"],"n_layer":12,"n_head":12,"n_embd":768,"n_positions":1024)", 36864,
              12, 64, 1024},
         }) {
        spill(config, std::string("{") + each.config + "}");
        Json root = memory("-m " + directory + " --kv bf16,int8");
        double rows = each.bytes_per_token / 2 / each.key_width;  // of a token; each has a scale in int8
        for_each_type<Layout>([&](auto layout) {
            CHECK(cell(root, layout.name, "bf16", "bytes_per_token") == each.bytes_per_token);
            CHECK(cell(root, layout.name, "int8", "bytes_per_token") == each.bytes_per_token / 2 + 2 * rows);
        });
        const Json *whole = row(root, "contiguous", "int8");
        CHECK(number(whole, "bytes_read_per_token") == number(whole, "bytes"));  // all of it, and no weights are known
        CHECK(number(whole, "bytes") == number(whole, "bytes_per_token") * each.context);
        CHECK((number(root, "layers") == each.layers && number(root, "head_dim") == each.key_width));
        CHECK(number(memory("-m " + directory + " --weight-bytes 8G"), "weight_bytes_read") == 8 * GiB);
        Outcome info = run_line("info -m " + directory);
        CHECK_MESSAGE(info.status == 1, info);
        check_contains(info.out, "will it run    no: ", "is not supported", "a token in f16");
        Json json = program::run_json({"info", "-m", directory}, 1);
        CHECK(number(json, "cache_bytes_per_token_f16") == each.bytes_per_token);
        CHECK(json_text(*at(json, "runs")) == "false");
    }
    spill(config, R"({"architectures":["X"],"n_layer":2,"n_head":2,"n_embd":8})");
    check_refused("-m " + directory, {directory, "for how many positions", "-c N"});
    CHECK(number(memory("-m " + directory + " -c 10 --kv bf16"), "bytes") == 2 * 2 * 8 * 2 * 10);
    spill(config, R"({"architectures":["X"]})");
    check_refused("-m " + directory, {directory, "num_hidden_layers"});
    CHECK(number(memory("--weight-bytes 5"), "weight_bytes_read") == 5);  // a model's, as if they were others
}

TEST_CASE("windows of any config.json: what is read, what a ring sees, what info says of them") {
    Scratch scratch;
    const std::string directory = scratch.str(), config = scratch / "config.json", of = "-m " + directory;
    const std::string sizes = R"("hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "vocab_size": 300, "max_position_embeddings": 32768, "num_hidden_layers": 2)";
    spill(config, gemma3_1b);  // 22 of its 26 layers look back 512; 1,024 bytes a position of a layer
    CHECK(cell(memory(of + " -c 32768"), "contiguous", "bf16", "bytes_read_per_token") == 145752064);
    for (const char *more : {"", R"(, "quantization_config": {"bits": 4, "quant_method": "awq"})",
                             R"(, "rope_scaling": {"type": "yarn", "factor": 4.0})"}) {
        spill(config, "{\"model_type\": \"mistral\", \"sliding_window\": 4096, " + sizes + more + "}");
        CHECK(number(memory(of + " --cache ring"), "window") == 4096);
        CHECK(number(memory(of + " --cache ring"), "sinks") == 0);
    }
    spill(config, "{\"model_type\": \"qwen2\", \"use_sliding_window\": true, \"sliding_window\": 4096, " + sizes +
                      R"(, "layer_types": ["sliding_attention", "full_attention"]})");
    check_contains(
        run_line("info " + of).out, "2 layers of 2 kinds; 1 of the layers look back 4096\n",
        "1 layer x 2 KV heads x 16 numbers, looking back 4096: 4096 of 32768 positions, 512 KiB + 64 KiB of");
    CHECK(number(memory(of + " --cache ring"), "window") == 32764);
    // Phi-4-mini: a window longer than the context is none, in a ring as elsewhere.
    spill(config, "{\"model_type\": \"mistral\", \"sliding_window\": 262144, " + sizes + "}");
    CHECK(number(memory(of + " --cache ring"), "window") == 32764);
    CHECK(number(memory(of + " --cache ring"), "sinks") == 4);
    CHECK(!contains(run_line("info " + of).out, "look"));
}

TEST_CASE("-c says how long texts are: a ring sees no further, of a model, of a shape, of layers that slide") {
    Scratch scratch;
    spill(scratch / "config.json", R"({"model_type": "mistral", "sliding_window": 64, "hidden_size": 64,
        "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 300, "num_hidden_layers": 2})");
    const struct {
        std::string flags;
        int window, sinks;
    } cases[] = {{"", 1276, 4},
                 {"-c 100", 96, 4},
                 {"-c 100 --window 50", 50, 4},
                 {"-c 100 --sinks 8", 92, 8},
                 {"-c 2k", 1276, 4},  // no further than the model was made for
                 {"-c 1", 1, 0},
                 {"--layers 2 --kv-heads 2 --head-dim 16 -c 100", 96, 4},
                 {"-c 100 -m " + scratch.str(), 64, 0},
                 {"-c 50 -m " + scratch.str(), 50, 0}};
    for (const auto &[flags, window, sinks] : cases) {
        const Json root = memory(flags + " --cache ring");
        CAPTURE(flags);
        CHECK((number(root, "window") == window && number(root, "sinks") == sinks));
    }
}

TEST_CASE("where a smaller type takes more than a larger one, a line says why; elsewhere there is none") {
    auto line = [](const std::string &flags) {
        const std::string out = run_line("memory " + flags).out;
        const size_t at = out.find(": more than a larger type");
        const size_t begin = at == std::string::npos ? at : out.rfind('\n', at) + 1;
        return at == std::string::npos ? "" : out.substr(begin, out.find('\n', at) - begin);
    };
    const std::string shape = "--layers 2 --kv-heads 2 --head-dim ", why =
                                                                         ": more than a larger type, as 32 positions "
                                                                         "are stored together, the newest ones at f16";
    CHECK(line(shape + "16 -c 1024") == "int4" + why + ", and 16 numbers as 32");
    CHECK(line(shape + "36 -c 10k --cache ring") == "int4" + why + ", and 36 numbers as 64");
    CHECK(line(shape + "32 -c 30") == "int2, int4" + why);
    CHECK(line(shape + "128 -c 1024") == "");
    CHECK(line(shape + "16 -c 1024 --kv f16,int8,int2") == "");
    CHECK(line(shape + "16 -c 1024 -ctk int8 -ctv int4,int8") == "int8/int4" + why + ", and 16 numbers as 32");
}

TEST_CASE("a config whose cache is not known has no size, and says which flags give a shape") {
    Scratch scratch;
    const std::string directory = scratch.str(), config = scratch / "config.json";
    spill(config, R"({"architectures": ["Step3ForCausalLM"], "num_hidden_layers": 4, "num_attention_heads": 32,
        "hidden_size": 4096, "attention_other_setting": [4, 4, 2, 1]})");
    const Words parts = {config + ": attention_other_setting is [4,4,2,1]: ", "--layers N --kv-heads N"};
    check_refused("-m " + directory, parts);
    Outcome info = run_line("info -m " + directory);
    CHECK(info.status == 1);
    check_contains(info.out, "KV cache       not known: " + parts[0], parts[1], "will it run    no: ");
    CHECK(!contains(info.out, "a token in f16"));
    Json json = program::run_json({"info", "-m", directory}, 1);
    for (const char *key : {"layers", "kv_heads", "key_width", "cache_bytes_per_token_f16", "context"})
        CHECK(is_null(at(json, key)));
    check_contains(text(json, "no_size"), parts[0]);
    // No context in the file: no "0 B for all positions".
    spill(config,
          R"({"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32})");
    info = run_line("info -m " + directory);
    check_contains(info.out, "positions      not said\n", "32 layers, 1 KV head of 64\n", " 8 KiB a token in f16\n");
    CHECK(!contains(info.out, "for all positions"));
}

// ---- Layers of several kinds ---------------------------------------------------------------------------------

TEST_CASE("the formula is a sum over kinds of layers: Gemma 3 1B from its config.json") {
    Scratch scratch;
    spill(scratch / "config.json", gemma3_1b);
    const std::string flags = "-m " + scratch.str() + " -c 32768 --kv bf16";
    Json root = memory(flags), full = memory(flags + " --swa-full");
    CHECK(number(full, "payload_bytes") == 832 * MiB);
    for_each_type<Layout>([&](auto layout) {
        const double all = std::string(layout.name) == "ring" ? 32764 + 4 : 32768;
        const Json *item = row(root, layout.name, "bf16");
        CHECK(number(item, "payload_bytes") == (11 + 128) * MiB);
        CHECK(number(item, "kinds.0.payload_bytes") == 11 * MiB);
        CHECK(number(item, "kinds.1.payload_bytes") == 128 * MiB);
        CHECK(number(item, "kinds.0.positions") == 512);
        CHECK(number(item, "kinds.1.positions") == all);
        CHECK(cell(full, layout.name, "bf16", "kinds.0.payload_bytes") == 704 * MiB);
        CHECK(number(item, "bytes_read_per_token") == 139 * MiB);
        CHECK(cell(full, layout.name, "bf16", "bytes_read_per_token") == 139 * MiB);  // kept, but not seen
    });
    // A ring of the window and a pass of 64, less the one that both have, in 32s; or all pages that these may touch.
    CHECK(cell(root, "contiguous", "bf16", "kinds.0.rows") == 576);
    CHECK(cell(root, "contiguous", "bf16", "metadata_bytes") == 22 * 64 * 1024);
    CHECK(cell(root, "paged", "bf16", "kinds.0.rows") == 16 * ((512 + 64 + 30) / 16 + 2));
    const int kind[] = {22, 0, 1, 256, 256, 512};
    const Words keys = words_of("layers shared_layers kv_heads key_width value_width window");
    for (size_t i = 0; i < keys.size(); i++) CHECK(number(root, "kinds.0." + keys[i]) == kind[i]);
    CHECK(number(root, "layers") == 26);
    const std::string local = "22 layers x 1 KV head x 256 numbers, looking back 512: 512 of 32768 positions, 11 MiB";
    const std::string global = "4 layers x 1 KV head x 256 numbers: 32768 positions, 128 MiB";
    check_contains(run_line("memory " + flags).out, "\n  " + local + " + 1.38 MiB of metadata\n  " + global + "\n",
                   "bf16        139 MiB  1.38 MiB   140 MiB");
    check_contains(run_line("info -m " + scratch.str()).out, "26 layers of 2 kinds; 22 of the layers look back 512\n",
                   local, global, "26 KiB a token in f16, 140 MiB for all positions");
    // What fits: local layers take what they take, of the rest each position has 4,096 bytes.
    const double rest = 256 * MiB - 22 * 576 * 1024;
    CHECK(cell(memory(flags + " --budget 256MiB"), "contiguous", "bf16", "tokens_in_budget") ==
          std::floor(rest / 4096));
}

// tests/fixtures/configs/expected.json: counted by weights_tools/count_caches.py from the same files.
TEST_CASE("the sizes of models that people download, from their config.json") {
    const std::string configs = "tests/fixtures/configs/";
    Json expected = parse_json("expected.json", slurp(configs + "expected.json"));
    int models = 0;
    for (const Json *item : items_of(&expected)) {
        CAPTURE(item->key);
        const std::string model = " -m " + configs + item->key;
        Json root = memory("--kv f16 -c " + std::to_string((int)number(item, "positions")) + model);
        CHECK(number(root, "payload_bytes") == number(item, "cache_bytes"));
        double rows = 0, states = 0;
        for (const Json *kind : items_of(at(root, "kinds")))
            (number(kind, "taps") ? states : rows) += number(kind, "layers") - number(kind, "shared_layers");
        CHECK(rows == number(item, "layers_with_rows"));
        CHECK(states == number(item, "layers_with_state"));
        Outcome info = run_line("info" + model);
        check_contains(info.out, "neither model.safetensors nor");  // nothing else is in the way
        models++;
    }
    CHECK(models >= 19);
}

// LFM2-1.2B: 6 layers of 8 KV heads of 64; the 10 others keep 3 states of 2,048 numbers in f32, and rows to spare.
TEST_CASE("a state has one size: LFM2-1.2B from its config.json") {
    Scratch scratch;
    std::string form;
    SUBCASE("as published") {}
    SUBCASE("quantized, where it does not run") { form = R"("quantization_config": {"quant_method": "awq"}, )"; }
    spill(scratch / "config.json", "{" + form + R"("architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2",
        "block_ff_dim": 12288, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048,
        "max_position_embeddings": 128000, "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rope_theta": 1000000.0, "vocab_size": 65536})");
    const std::pair<const char *, double> rows[] = {{"f32", 256}, {"f16", 128}, {"int8", 66}, {"int4", 40}};  // bytes
    for (const int positions : {1000, 32768, 128000})
        for (const auto &[type, bytes] : rows) {
            const std::string flags = "-m " + scratch.str() + formatted(" -c %d --kv %s", positions, type);
            Json root = memory(flags);
            for_each_type<Layout>([&](auto layout) {
                const Json *item = row(root, layout.name, type);
                const bool paged = std::string(layout.name) == "paged";
                const double pages = (3 + 128 + 30) / 16 + 2;
                const double table = paged ? std::ceil(positions / 16.0) + 2 * pages : 0;
                CHECK(number(item, "kinds.1.payload_bytes") == 10 * 3 * 2048 * 4);
                CHECK(number(item, "kinds.1.metadata_bytes") ==
                      10 * ((paged ? 16 * pages : 160) - 3) * 2048 * 4 + 4 * table);
                const char *keys[] = {"layers", "taps", "key_width", "value_width", "window", "positions"};
                const double values[] = {10, 3, 2048, 0, 3, 3};
                for (int i = 0; i < 6; i++) CHECK(number(item, std::string("kinds.1.") + keys[i]) == values[i]);
                CHECK(number(item, "kinds.0.taps") == 0);
                CHECK(number(item, "bytes_per_token") == 6 * 2 * 8 * bytes);
            });
        }
    const std::string flags = "-m " + scratch.str() + " -c 32768";
    Json f16 = memory(flags + " --kv f16");
    CHECK(number(f16, "payload_bytes") == 384 * MiB + 240 * 1024);
    CHECK(number(row(f16, "contiguous", "f16"), "bytes_read_per_token") == 384 * MiB + 240 * 1024);
    const std::string states = "10 layers of short convolutions x 2048 numbers at f32, looking back 3: ";
    check_contains(run_line("memory " + flags).out, "payload = 2 (K, V; states: 1) x",
                   "\n  6 layers x 8 KV heads x 64 numbers: 32768 positions, 384 MiB\n",
                   "\n  " + states + "3 of 32768 positions, 240 KiB + 12.3 MiB of metadata\n");
    check_contains(run_line("info -m " + scratch.str()).out, states,
                   "; 10 of 16 layers are short convolutions of 3 positions\n", "12 KiB a token in f16");
}

TEST_CASE("layers that read rows of others are counted where they read, not where rows are stored") {
    Scratch scratch;
    spill(scratch / "config.json", R"({"model_type": "gemma4_text", "num_hidden_layers": 4, "hidden_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 16, "sliding_window": 32,
        "num_kv_shared_layers": 2, "max_position_embeddings": 1000, "layer_types": ["sliding_attention",
        "full_attention", "sliding_attention", "full_attention"]})");
    Json root = memory("-m " + scratch.str() + " --kv f16");
    CHECK(number(root, "kinds.0.layers") == 2);
    CHECK(number(root, "kinds.0.shared_layers") == 1);
    CHECK(number(root, "payload_bytes") == 2 * 2 * (32 * 8 + 1000 * 16));
    CHECK(cell(root, "contiguous", "f16", "bytes_read_per_token") == 2 * number(root, "payload_bytes"));
    check_contains(run_line("memory -m " + scratch.str()).out,
                   "1 layer (and 1 that read their rows) x 1 KV head x 8 n");
}

TEST_CASE("generate and show report the same kinds as the formula, for caches that they filled") {
    for (const char *model : {"qwen2_window", "qwen3_layer_types", "mistral_window"}) {
        for_each_cache([&](Layout layout, Precision type) {
            for (const char *full : {"", " --swa-full"}) {
                std::string choice = std::string(" -m tests/fixtures/models/") + model + " --cache " + name_of(layout) +
                                     " --kv " + name_of(type) + full;
                CAPTURE(choice);
                std::string place = std::holds_alternative<Ring>(layout) ? "" : " -c 105";
                Json real = run_json("generate --ids 3,4,5 -t 1 --ignore-eos -n 102" + choice + place);
                Json formula = memory(choice + place);
                Words keys = words_of("layers shared_layers kv_heads key_width value_width window");
                if (!std::holds_alternative<Paged>(layout))  // of which generate counts the pages that are used
                    keys = keys + words_of("rows bytes payload_bytes metadata_bytes");
                double sum = 0, most = 0;
                for (int i = 0; i < count_of(at(formula, "kinds")); i++) {
                    const std::string kind = "kinds." + std::to_string(i) + ".";
                    for (const std::string &key : keys)
                        CHECK(number(real, "cache." + kind + key) == number(formula, kind + key));
                    sum += number(real, "cache." + kind + "bytes"), most += number(formula, kind + "bytes");
                    const double window = *full ? 0 : number(formula, kind + "window");
                    if (window) CHECK(number(real, "cache." + kind + "positions") == window);
                }
                CHECK((sum == number(real, "cache.bytes") && most == number(formula, "bytes") && sum <= most));
            }
        });
    }
    check_contains(run_line("show -m tests/fixtures/models/qwen2_window --ids 3,4,5").out,
                   "\n2 layers x 2 KV heads x 8 numbers, looking back 6: 3 positions, 384 B\n");
    check_contains(run_line("eval -m tests/fixtures/models/qwen2_window --ids 3,4,5 --kv f16").out,
                   "\n  2 layers x 2 KV heads x 8 numbers, looking back 6: ");
    CHECK(!contains(run_line("show --ids 3,4,5").out, "Kinds of layers"));
}

// A Qwen3 of small vectors and few ids, all of its weights 1/64, whose cache is that of Gemma 3 1B.
void write_like_gemma3_1b(const std::string &directory) {
    std::string types, header, bf16_ones("\x80\x3c", 2);
    size_t end = 0;
    auto add = [&](const std::string &name, int rows, int cols) {
        const size_t begin = end;
        end += (size_t)std::max(1, rows) * cols * 2;
        const std::string shape = rows ? formatted("[%d, %d]", rows, cols) : formatted("[%d]", cols);
        header += formatted("%s\"%s\": {\"dtype\": \"BF16\", \"shape\": %s, \"data_offsets\": [%zu, %zu]}",
                            begin ? ", " : "{", name.c_str(), shape.c_str(), begin, end);
    };
    add("model.embed_tokens.weight", 32, 16), add("model.norm.weight", 0, 16);
    for (int i = 0; i < 26; i++) {
        const std::string layer = formatted("model.layers.%d.", i), attention = layer + "self_attn.";
        types += std::string(i ? ", " : "") + (i % 6 == 5 ? "\"full_attention\"" : "\"sliding_attention\"");
        for (const char *name : {"q_proj.weight", "k_proj.weight", "v_proj.weight"}) add(attention + name, 256, 16);
        add(attention + "o_proj.weight", 16, 256);
        add(attention + "q_norm.weight", 0, 256), add(attention + "k_norm.weight", 0, 256);
        for (const char *name : {"gate", "up", "down"}) add(layer + "mlp." + name + "_proj.weight", 16, 16);
        add(layer + "input_layernorm.weight", 0, 16), add(layer + "post_attention_layernorm.weight", 0, 16);
    }
    header += "}";
    std::string file(8, '\0');
    for (int i = 0; i < 8; i++) file[i] = (char)(header.size() >> 8 * i);
    file += header;
    while (end > 0) file += bf16_ones, end -= 2;
    spill(directory + "/model.safetensors", file);
    spill(directory + "/config.json", R"({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 16, "head_dim": 256,
        "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 26,
        "vocab_size": 32, "max_position_embeddings": 32768, "tie_word_embeddings": true, "use_sliding_window": true,
        "sliding_window": 512, "layer_types": [)" +
                                          types + "]}");
}

// Peak memory at depth 32,704 less that at depth 1,024; of the cache that bench fills alone.
TEST_CASE("what is resident at 32k positions is what the formula says, with layers of two kinds") {
    Scratch scratch;
    write_like_gemma3_1b(scratch.str());
    const std::string model = " -m " + scratch.str();
    for (const char *choice : {" --cache contiguous", " --cache paged", " --cache contiguous --swa-full"}) {
        CAPTURE(std::string(choice));
        double formula[2], resident[2];
        for (int i : {0, 1}) {
            const int depth = i ? 32704 : 1024;
            const std::string flags = model + choice + " --kv bf16";
            formula[i] = number(memory(formatted("-c %d", depth + 64) + flags), "bytes");
            Json run = run_json("bench -t 1 --repeats 1 -n 64 --prefill 1" + formatted(" --depth %d", depth) + flags);
            resident[i] = number(run, "memory.peak_bytes");
        }
        CHECK((resident[1] - resident[0]) / (formula[1] - formula[0]) == doctest::Approx(1).epsilon(0.02));
    }
    const double full = number(memory(model + " -c 32768 --kv bf16 --swa-full"), "payload_bytes");
    CHECK((full == 832 * MiB && number(memory(model + " -c 32768 --kv bf16"), "payload_bytes") == 139 * MiB));
}

TEST_CASE("--swa-full is taken where it changes nothing") {
    for (const std::string &words : {std::string(""), shape_flags(1, 1, 1, 1)})
        CHECK(number(memory(words + " --swa-full"), "payload_bytes") == number(memory(words), "payload_bytes"));
}

// ---- Bad input ---------------------------------------------------------------------------------------------

TEST_CASE("what does not fit together is refused with the cure") {  // of flags alone: test_flags
    const std::string shape = "--layers 2 --kv-heads 2 --head-dim 64 -c 1000 ";
    // A position of this shape in f16: 2 * 2 layers * 2 heads * 64 * 2 = 1,024 bytes. A page of 16, with its entry in
    // the table, its count and its place: 16,384 + 12. A ring of a window of 5 and 4 sinks: 64 rows.
    const std::vector<std::pair<std::string, int>> least = {{"contiguous", 1024}, {"paged", 16396}, {"ring", 73728}};
    for (auto &[layout, bytes] : least) {
        const std::string flags = shape + "--kv f16 --cache " + layout + " --budget ";
        check_refused(flags + std::to_string(bytes - 1), {"--budget", "needs " + std::to_string(bytes), "raise it"});
        CHECK(run_line("memory " + flags + std::to_string(bytes)).status == 0);
    }
    check_refused("-m /nowhere", {"/nowhere"});
    check_refused(shape + "--window 4 --sinks 4", {"--sinks 4", "a window of 4"});
    check_refused(shape + "--sinks 1000", {"--sinks 1000"});
    check_refused("--budget 1", {"--budget", "raise it"});
}
