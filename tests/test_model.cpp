// base/model.h, json.h, limits.h: every fixture loads with the config and the weights Transformers sees in it, and
// every kind of broken checkpoint ends in one line that says what is wrong. Run from the repository's root. Its parts:
// what is right loads, the head and the embedding; what is broken: a directory, a config, weights; the cache of any
// config; results as text and JSON; what this process may use.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "../base/model.h"

#include "../base/limits.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <random>

namespace fs = std::filesystem;

const std::string fixtures = "tests/fixtures/models/";

// ---- Helpers -------------------------------------------------------------------------------------------------------

// A directory that is gone at the end of the test.
struct Scratch {
    fs::path path;
    Scratch() {
        std::string name = (fs::temp_directory_path() / ("test_model." + std::string(6, 'X'))).string();
        if (!mkdtemp(name.data())) throw std::runtime_error("no temporary directory");
        path = name;
    }
    ~Scratch() { fs::remove_all(path); }
    std::string str() const { return path.string(); }
    std::string operator/(const std::string &name) const { return (path / name).string(); }
};

std::string slurp(const std::string &path) {
    std::ifstream in(path, std::ios::binary);
    REQUIRE(in.good());
    return {std::istreambuf_iterator<char>(in), {}};
}

void spill(const std::string &path, const std::string &bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

void copy_fixture(const std::string &name, const Scratch &scratch) {
    fs::copy(fixtures + name, scratch.path, fs::copy_options::recursive | fs::copy_options::overwrite_existing);
}

std::string replaced(std::string text, const std::string &from, const std::string &to) {
    size_t at = text.find(from);
    REQUIRE_MESSAGE(at != std::string::npos, from);
    return text.replace(at, from.size(), to);
}

// The one line that `action` fails with; "" when it does not fail.
std::string error_of(const std::function<void()> &action) {
    try {
        action();
    } catch (const Error &error) {
        std::string line = error.what();
        CHECK(!line.empty());
        CHECK(line.find('\n') == std::string::npos);
        return line;
    }
    return "";
}

void check_contains(const std::string &line, const std::string &part) {
    CHECK_MESSAGE(line.find(part) != std::string::npos, "\"" << line << "\" lacks \"" << part << "\"");
}

Json json_file(const std::string &path) { return parse_json(path, slurp(path)); }

// Element i of a tensor, by the definition of its type, not by the engine's own conversion.
double value_at(const Tensor &tensor, int64_t i) {
    if (tensor.type == DType::f32) return ((const float *)tensor.data)[i];
    uint32_t bits = ((const uint16_t *)tensor.data)[i];
    if (tensor.type == DType::bf16) {
        bits <<= 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    int exponent = (int)(bits >> 10 & 31), mantissa = (int)(bits & 1023);
    double size = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    return bits >> 15 ? -size : size;
}

// A safetensors file: what stands between the data_offsets can be wrong on purpose.
std::string safetensors(const std::string &header, const std::string &data) {
    uint64_t size = header.size();
    return std::string((const char *)&size, sizeof size) + header + data;
}

std::string header_of(const std::string &file) {
    uint64_t size;
    memcpy(&size, file.data(), sizeof size);
    return file.substr(8, size);
}

// A fixture's model.safetensors with one change of its header; blanks keep its length.
std::string with_header(const std::string &file, const std::string &from, const std::string &to) {
    std::string header = header_of(file);
    return safetensors(replaced(header, from, to), file.substr(8 + header.size()));
}

Config parse(const std::string &config, const std::string &generation = "") {
    return parse_config("config.json", config, "generation_config.json", generation);
}

// A small config, key by key, so that a case can change or leave out one. "" leaves a key out.
using Keys = std::map<std::string, std::string>;
std::string config_text(const Keys &changes, const std::string &architecture = "LlamaForCausalLM") {
    Keys keys = {{"architectures", "[\"" + architecture + "\"]"},
                 {"hidden_size", "64"},
                 {"intermediate_size", "128"},
                 {"num_hidden_layers", "2"},
                 {"num_attention_heads", "8"},
                 {"num_key_value_heads", "4"},
                 {"vocab_size", "100"}};
    for (const auto &[key, value] : changes) keys[key] = value;
    std::string text;
    for (const auto &[key, value] : keys) {
        if (!value.empty()) text += (text.empty() ? "{\"" : ", \"") + key + "\": " + value;
    }
    return text + "}";
}

// What a config with these keys is refused with; "": it loads. A line that begins with "config.json: " is the whole
// one.
struct Case {
    Keys keys;
    std::string line;
};

void check_cases(const std::string &family, const std::vector<Case> &cases) {
    for (const auto &[keys, expected] : cases) {
        std::string config = config_text(keys, family), line = error_of([&] { parse(config); });
        bool whole = expected.empty() || expected.rfind("config.json: ", 0) == 0;
        bool good = whole ? line == expected : line.find(expected) != std::string::npos;
        CHECK_MESSAGE(good, config.substr(0, 300) << " says \"" << line << "\", not \"" << expected << "\"");
    }
}

// Chance, the same with the same seed, which a failure prints.
std::mt19937 random_numbers(unsigned seed = std::random_device()()) {
    MESSAGE("seed " << seed);
    return std::mt19937(seed);
}

// ---- What is right loads -------------------------------------------------------------------------------------------

struct Expected {
    std::string name, architecture;
    int layers, hidden, heads, kv_heads, head_dim, vocabulary;
    bool tied;
    DType type;
};

const Expected expected[] = {
    {"llama_mha", "LlamaForCausalLM", 2, 32, 4, 4, 8, 64, false, DType::f32},
    {"llama_gqa_9_on_3", "LlamaForCausalLM", 2, 36, 9, 3, 4, 64, true, DType::f32},
    {"llama_mqa", "LlamaForCausalLM", 2, 32, 4, 1, 8, 64, false, DType::f32},
    {"llama_bias", "LlamaForCausalLM", 2, 32, 4, 2, 8, 64, false, DType::f32},
    {"llama_rope_theta", "LlamaForCausalLM", 2, 32, 4, 2, 8, 64, false, DType::f32},
    {"llama_rope_linear", "LlamaForCausalLM", 2, 32, 4, 2, 8, 64, false, DType::f32},
    {"llama_rope_llama3", "LlamaForCausalLM", 2, 32, 4, 2, 16, 64, true, DType::f32},
    {"llama_new_spelling", "LlamaForCausalLM", 2, 32, 4, 2, 16, 64, false, DType::f32},
    {"llama_f16", "LlamaForCausalLM", 2, 64, 8, 1, 8, 64, false, DType::f16},
    {"llama_bf16", "LlamaForCausalLM", 2, 64, 8, 2, 8, 64, true, DType::bf16},
    {"llama_tied_with_head", "LlamaForCausalLM", 2, 32, 4, 2, 8, 64, false, DType::bf16},
    {"llama_sharded", "LlamaForCausalLM", 2, 32, 4, 2, 8, 96, false, DType::bf16},
    {"mistral_window", "MistralForCausalLM", 2, 32, 4, 2, 8, 64, false, DType::f32},
    {"mistral_no_window", "MistralForCausalLM", 2, 32, 4, 2, 16, 64, false, DType::f32},
    {"qwen2_14_on_2", "Qwen2ForCausalLM", 2, 56, 14, 2, 4, 64, true, DType::f32},
    {"qwen2_window", "Qwen2ForCausalLM", 3, 32, 4, 2, 8, 64, false, DType::f32},
    {"qwen3", "Qwen3ForCausalLM", 2, 32, 4, 2, 16, 64, true, DType::f32},
    {"qwen3_layer_types", "Qwen3ForCausalLM", 3, 32, 4, 2, 16, 64, false, DType::bf16},
    {"head_dim_64", "LlamaForCausalLM", 1, 16, 2, 1, 64, 64, false, DType::f32},
    {"head_dim_80", "LlamaForCausalLM", 1, 16, 2, 1, 80, 64, false, DType::f32},
    {"head_dim_96", "LlamaForCausalLM", 1, 16, 2, 1, 96, 64, false, DType::f32},
    {"head_dim_128", "LlamaForCausalLM", 1, 16, 2, 1, 128, 64, false, DType::f32},
    {"head_dim_256", "LlamaForCausalLM", 1, 16, 2, 1, 256, 64, false, DType::f32},
};

// Every tensor of the model under the name it has in a file.
std::map<std::string, Tensor> by_name(const Model &model) {
    std::map<std::string, Tensor> all = {{"model.embed_tokens.weight", model.embedding},
                                         {"model.norm.weight", model.final_norm},
                                         {"lm_head.weight", model.head}};
    for (size_t i = 0; i < model.layers.size(); i++) {
        const LayerWeights &layer = model.layers[i];
        std::string prefix = "model.layers." + std::to_string(i) + ".";
        auto add = [&](const std::string &name, const Linear &linear) {
            all[prefix + name + ".weight"] = linear.weight;
            all[prefix + name + ".bias"] = linear.bias;
        };
        add("self_attn.q_proj", layer.query);
        add("self_attn.k_proj", layer.key);
        add("self_attn.v_proj", layer.value);
        add("self_attn.o_proj", layer.output);
        add("mlp.gate_proj", layer.gate);
        add("mlp.up_proj", layer.up);
        add("mlp.down_proj", layer.down);
        all[prefix + "input_layernorm.weight"] = layer.attention_norm;
        all[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm;
        all[prefix + "self_attn.q_norm.weight"] = layer.query_norm;
        all[prefix + "self_attn.k_norm.weight"] = layer.key_norm;
    }
    return all;
}

TEST_CASE("every fixture loads with its sizes") {
    size_t directories = 0;
    for (const auto &entry : fs::directory_iterator(fixtures)) directories += entry.is_directory();
    CHECK(directories == std::size(expected));
    for (const Expected &want : expected) {
        CAPTURE(want.name);
        Model model = load_model(fixtures + want.name);
        const Config &config = model.config;
        CHECK(config.architecture == want.architecture);
        CHECK(config.layers == want.layers);
        CHECK(model.layers.size() == (size_t)want.layers);
        CHECK(config.hidden == want.hidden);
        CHECK(config.heads == want.heads);
        CHECK(config.kv_heads == want.kv_heads);
        CHECK(config.head_dim == want.head_dim);
        CHECK(config.vocabulary == want.vocabulary);
        CHECK(config.tied == want.tied);
        CHECK((model.head.data == model.embedding.data) == want.tied);
        CHECK(config.context == 128);
        CHECK(config.bos_id == 1);
        CHECK(model.embedding.type == want.type);
        CHECK(model.copies.empty());
        const LayerWeights &layer = model.layers.back();
        CHECK(layer.query.weight.rows == want.heads * want.head_dim);
        CHECK(layer.key.weight.rows == want.kv_heads * want.head_dim);
        CHECK(layer.value.weight.cols == want.hidden);
        CHECK(layer.output.weight.cols == want.heads * want.head_dim);
        CHECK(layer.gate.weight.rows == config.ffn);
        CHECK(layer.down.weight.cols == config.ffn);
        CHECK(model.final_norm.rows == 1);
        CHECK(model.final_norm.cols == want.hidden);
        CHECK(model.weight_bytes == model.parameters * dtype_bytes(want.type));
    }
}

TEST_CASE("every tensor holds the values Transformers finds under its name") {
    for (const Expected &want : expected) {
        Model model = load_model(fixtures + want.name);
        Json root = json_file(fixtures + want.name + "/expected.json");
        std::map<std::string, Tensor> tensors = by_name(model);
        std::set<std::string> seen;
        const cJSON *weights = cJSON_GetObjectItem(root.get(), "weights");
        for (const cJSON *item = weights->child; item; item = item->next) {
            CAPTURE(want.name);
            CAPTURE(item->string);
            REQUIRE(tensors.count(item->string));
            const Tensor &tensor = tensors[item->string];
            REQUIRE(tensor.data);
            const int64_t count = tensor.rows * tensor.cols;
            double sum = 0, largest = 0;
            for (int64_t i = 0; i < count; i++) {
                sum += value_at(tensor, i);
                largest = std::max(largest, std::fabs(value_at(tensor, i)));
            }
            CHECK(value_at(tensor, 0) == cJSON_GetArrayItem(item, 0)->valuedouble);
            CHECK(value_at(tensor, count - 1) == cJSON_GetArrayItem(item, 1)->valuedouble);
            // Both sums are of the same numbers in double: count * 2^-53 of their size, and a good deal of slack.
            CHECK(std::fabs(sum - cJSON_GetArrayItem(item, 2)->valuedouble) <= 1e-12 * (double)count * largest);
            seen.insert(item->string);
        }
        // What the reference does not have, the model has not either.
        for (const auto &entry : tensors) {
            if (entry.first.find(".layers.0.") != std::string::npos && model.layers.size() > 1) continue;
            CHECK_MESSAGE((entry.second.data != nullptr) == (seen.count(entry.first) == 1),
                          want.name << ": " << entry.first);
        }
    }
}

TEST_CASE("what a fixture is there for is in its config") {
    auto config_of = [](const std::string &name) { return load_config(fixtures + name); };
    CHECK(config_of("llama_mha").norm_epsilon == 0.1);
    CHECK(config_of("llama_mqa").norm_epsilon == 1e-6);
    CHECK(config_of("llama_mha").rope.kind == RopeScaling::none);
    CHECK(config_of("llama_rope_theta").rope_theta == 500000);

    Config linear = config_of("llama_rope_linear");
    CHECK(linear.rope.kind == RopeScaling::linear);
    CHECK(linear.rope.factor == 4);
    CHECK(linear.rope_theta == 10000);
    for (const char *name : {"llama_rope_llama3", "llama_new_spelling"}) {
        Config llama3 = config_of(name);
        CHECK(llama3.rope.kind == RopeScaling::llama3);
        CHECK(llama3.rope.factor == 8);
        CHECK(llama3.rope.low_freq_factor == 1);
        CHECK(llama3.rope.high_freq_factor == 4);
        CHECK(llama3.rope.original_context == 64);
    }
    CHECK(config_of("llama_new_spelling").rope_theta == 20000);
    CHECK(config_of("llama_new_spelling").dtype == "float32");
    CHECK(config_of("llama_bf16").dtype == "bfloat16");

    CHECK(config_of("llama_mha").end_ids == std::vector<int>{2});
    CHECK(config_of("llama_rope_llama3").end_ids == std::vector<int>{2, 5, 7});
    CHECK(config_of("qwen2_14_on_2").end_ids == std::vector<int>{0, 1});

    CHECK(config_of("mistral_window").window == 8);
    CHECK(config_of("mistral_window").windows == std::vector<int>{8, 8});
    CHECK(config_of("mistral_no_window").windows == std::vector<int>{0, 0});
    CHECK(config_of("qwen2_14_on_2").windows == std::vector<int>{0, 0});  // use_sliding_window is false
    CHECK(config_of("qwen2_window").windows == std::vector<int>{0, 6, 6});
    CHECK(config_of("qwen3_layer_types").windows == std::vector<int>{5, 0, 5});
    CHECK(load_model(fixtures + "qwen3_layer_types").layers[2].window == 5);
    CHECK(load_model(fixtures + "qwen3_layer_types").layers[1].window == 0);

    CHECK(config_of("llama_bias").qkv_bias);
    CHECK(config_of("llama_bias").output_bias);
    CHECK(config_of("llama_bias").mlp_bias);
    CHECK(config_of("qwen2_14_on_2").qkv_bias);
    CHECK_FALSE(config_of("qwen2_14_on_2").output_bias);
    CHECK(config_of("qwen3").qk_norm);
    CHECK_FALSE(config_of("qwen2_window").qk_norm);
}

TEST_CASE("the trained checkpoint next to the project, where it is") {
    const std::string directory = "../shared/checkpoints/stories260K";
    if (!fs::exists(directory)) return;
    Model model = load_model(directory + "/");
    CHECK(model.parameters == 260032);
    CHECK(model.config.ffn == 172);
    CHECK(model.config.tied);
}

// Defaults as in Transformers 5.23: LlamaConfig(), MistralConfig(), Qwen2Config(), Qwen3Config().
TEST_CASE("a key that is missing has its family's default") {
    Config llama = parse(config_text({{"num_key_value_heads", ""}}));
    CHECK(llama.model_type == "llama");
    CHECK(llama.kv_heads == 8);
    CHECK(llama.head_dim == 8);
    CHECK(llama.context == 2048);
    CHECK(llama.norm_epsilon == 1e-6);
    CHECK(llama.rope_theta == 10000);
    CHECK(llama.rope.kind == RopeScaling::none);
    CHECK_FALSE(llama.tied);
    CHECK(llama.bos_id == 1);
    CHECK(llama.end_ids == std::vector<int>{2});
    CHECK(llama.dtype.empty());
    CHECK_FALSE(llama.qkv_bias);
    CHECK_FALSE(llama.mlp_bias);

    Config mistral = parse(config_text({{"num_key_value_heads", ""}}, "MistralForCausalLM"));
    CHECK(mistral.kv_heads == 8);
    CHECK(mistral.context == 131072);
    CHECK(mistral.windows == std::vector<int>{4096, 4096});
    Config qwen2 = parse(config_text(
        {{"num_attention_heads", "64"}, {"hidden_size", "128"}, {"num_key_value_heads", ""}}, "Qwen2ForCausalLM"));
    CHECK(qwen2.kv_heads == 32);
    CHECK(qwen2.head_dim == 2);
    CHECK(qwen2.context == 32768);
    CHECK(qwen2.bos_id == -1);
    CHECK(qwen2.end_ids.empty());
    CHECK(qwen2.window == 0);
    CHECK(qwen2.qkv_bias);
    CHECK_FALSE(qwen2.output_bias);
    Config qwen3 = parse(config_text({}, "Qwen3ForCausalLM"));
    CHECK(qwen3.head_dim == 128);
    CHECK_FALSE(qwen3.qkv_bias);
    CHECK(qwen3.qk_norm);
}

TEST_CASE("null is not the same as missing where Transformers tells them apart") {
    CHECK(parse(config_text({{"num_key_value_heads", "null"}}, "MistralForCausalLM")).kv_heads == 8);
    CHECK(parse(config_text({{"num_attention_heads", "16"}, {"num_key_value_heads", "null"}}, "MistralForCausalLM"))
              .kv_heads == 16);
    CHECK(parse(config_text({{"sliding_window", "null"}}, "MistralForCausalLM")).window == 0);
    CHECK(parse(config_text({{"eos_token_id", "null"}})).end_ids.empty());
    CHECK(parse(config_text({{"bos_token_id", "null"}})).bos_id == -1);
    CHECK(parse(config_text({{"head_dim", "null"}, {"rope_scaling", "null"}})).head_dim == 8);
}

TEST_CASE("both spellings of a config say the same") {
    Config theta = parse(config_text({{"rope_parameters", R"({"rope_type": "default", "rope_theta": 5e5})"}}));
    CHECK(theta.rope_theta == 500000);
    CHECK(theta.rope.kind == RopeScaling::none);
    CHECK(parse(config_text({{"rope_theta", "500000.0"}})).rope_theta == 500000);
    for (const char *scaling : {R"({"type": "linear", "factor": 2.5})", R"({"rope_type": "linear", "factor": 2.5})"}) {
        for (const char *key : {"rope_scaling", "rope_parameters"}) {
            Config config = parse(config_text({{key, scaling}, {"rope_theta", "7000"}}));
            CHECK(config.rope.kind == RopeScaling::linear);
            CHECK(config.rope.factor == 2.5);
            CHECK(config.rope_theta == 7000);
        }
    }
    CHECK(parse(config_text({{"torch_dtype", "\"torch.float16\""}})).dtype == "float16");
    CHECK(parse(config_text({{"dtype", "\"bfloat16\""}})).dtype == "bfloat16");
    CHECK(parse(config_text({{"model_type", "\"qwen3\""}, {"architectures", ""}})).architecture == "Qwen3ForCausalLM");
    // original_max_position_embeddings: its own, or else the context.
    const char *llama3 = R"({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4})";
    CHECK(parse(config_text({{"rope_scaling", llama3}, {"max_position_embeddings", "777"}})).rope.original_context ==
          777);
    CHECK(parse(config_text({{"rope_scaling", llama3}, {"original_max_position_embeddings", "333"}}))
              .rope.original_context == 333);
}

TEST_CASE("end ids: generation_config.json goes before config.json") {
    std::string config = config_text({{"eos_token_id", "[3, 4]"}, {"bos_token_id", "9"}});
    CHECK(parse(config).end_ids == std::vector<int>{3, 4});
    CHECK(parse(config, "{}").end_ids == std::vector<int>{3, 4});
    CHECK(parse(config, R"({"eos_token_id": 5})").end_ids == std::vector<int>{5});
    CHECK(parse(config, R"({"eos_token_id": [5, 6, 7]})").end_ids == std::vector<int>{5, 6, 7});
    CHECK(parse(config, R"({"eos_token_id": null})").end_ids == std::vector<int>{3, 4});
    CHECK(parse(config, R"({"bos_token_id": 8})").bos_id == 8);
    CHECK(parse(config).bos_id == 9);
}

TEST_CASE("a window of Qwen: which layers have one") {
    Keys keys = {{"num_hidden_layers", "4"}, {"use_sliding_window", "true"}, {"sliding_window", "16"}};
    CHECK(parse(config_text(keys, "Qwen2ForCausalLM")).windows == std::vector<int>{0, 0, 0, 0});  // from layer 28 on
    keys["max_window_layers"] = "3";
    CHECK(parse(config_text(keys, "Qwen2ForCausalLM")).windows == std::vector<int>{0, 0, 0, 16});
    keys["max_window_layers"] = "0";
    CHECK(parse(config_text(keys, "Qwen3ForCausalLM")).windows == std::vector<int>{16, 16, 16, 16});
    CHECK(parse(config_text(keys, "LlamaForCausalLM")).windows == std::vector<int>{0, 0, 0, 0});
    keys["use_sliding_window"] = "false";
    CHECK(parse(config_text(keys, "Qwen2ForCausalLM")).windows == std::vector<int>{0, 0, 0, 0});
    CHECK(parse(config_text(keys, "MistralForCausalLM")).windows == std::vector<int>{16, 16, 16, 16});
}

// ---- The head and the embedding ------------------------------------------------------------------------------------

// A file of llama_bf16, which is tied, with a head behind its tensors.
std::string add_head(const std::string &file, const std::string &data) {
    std::string header = header_of(file), body = file.substr(8 + header.size());
    header.erase(header.find_last_of('}'));
    header += ", \"lm_head.weight\": {\"dtype\": \"BF16\", \"shape\": [64, 64], \"data_offsets\": [" +
              std::to_string(body.size()) + ", " + std::to_string(body.size() + data.size()) + "]}}";
    return safetensors(header, body + data);
}

TEST_CASE("tied, and what is stored") {
    Scratch scratch;
    copy_fixture("llama_bf16", scratch);
    std::string file = slurp(scratch / "model.safetensors"), config = slurp(scratch / "config.json");
    Model tied = load_model(scratch.str());
    const std::string embedding((const char *)tied.embedding.data, 64 * 64 * 2);

    SUBCASE("a head is stored, too: it is used") {
        spill(scratch / "model.safetensors", add_head(file, std::string(64 * 64 * 2, '\x3f')));
        Model model = load_model(scratch.str());
        CHECK_FALSE(model.config.tied);
        CHECK(memcmp(model.embedding.data, embedding.data(), embedding.size()) == 0);
        CHECK(std::string((const char *)model.head.data, 64 * 64 * 2) == std::string(64 * 64 * 2, '\x3f'));
        CHECK(model.parameters == tied.parameters + 64 * 64);
        CHECK(model.weight_bytes == tied.weight_bytes + 64 * 64 * 2);
    }
    SUBCASE("only the head is stored: it is the embedding") {
        spill(scratch / "model.safetensors", with_header(file, "model.embed_tokens.weight", "lm_head.weight"));
        Model model = load_model(scratch.str());
        CHECK(model.config.tied);
        CHECK(memcmp(model.embedding.data, embedding.data(), embedding.size()) == 0);
    }
    SUBCASE("untied and no head") {
        spill(scratch / "config.json",
              replaced(config, "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false"));
        std::string line = error_of([&] { load_model(scratch.str()); });
        check_contains(line, "/model.safetensors: tensor lm_head.weight is missing, config.json asks for it");
    }
}

TEST_CASE("tensors nobody asks for are ignored, whatever their type") {
    Scratch scratch;
    copy_fixture("llama_bf16", scratch);
    std::string file = slurp(scratch / "model.safetensors"), header = header_of(file);
    std::string body = file.substr(8 + header.size());
    header.erase(header.find_last_of('}'));
    std::string end = std::to_string(body.size()), after = std::to_string(body.size() + 8);
    header +=
        ", \"model.layers.0.self_attn.rotary_emb.inv_freq\": {\"dtype\": \"I64\", \"shape\": [1], "
        "\"data_offsets\": [" +
        end + ", " + after +
        "]}, "
        "\"odd\": {\"dtype\": \"F4\", \"shape\": [], \"data_offsets\": [" +
        after + ", " + after + "]}}";
    spill(scratch / "model.safetensors", safetensors(header, body + std::string(8, 'x')));
    CHECK(error_of([&] { load_model(scratch.str()); }) == "");
}

TEST_CASE("tensors at odd addresses are copied, alone, and have the same values") {
    for (const std::string name : {"llama_mha", "llama_f16", "llama_bf16"}) {
        Scratch scratch;
        copy_fixture(name, scratch);
        std::string file = slurp(scratch / "model.safetensors"), header = header_of(file);
        while (header.back() == ' ') header.pop_back();
        header += std::string((1 + 8 - header.size() % 8) % 8, ' ');  // the data begins at 8 n + 1
        spill(scratch / "model.safetensors", safetensors(header, file.substr(8 + header_of(file).size())));
        Model odd = load_model(scratch.str()), even = load_model(fixtures + name);
        auto odd_tensors = by_name(odd), even_tensors = by_name(even);
        CHECK(odd.copies.size() > 10);
        CHECK(odd.weight_bytes == even.weight_bytes);
        for (const auto &[key, tensor] : even_tensors) {
            const Tensor &other = odd_tensors[key];
            CHECK((other.data == nullptr) == (tensor.data == nullptr));
            if (!tensor.data) continue;
            CHECK((uintptr_t)other.data % (uintptr_t)dtype_bytes(other.type) == 0);
            CHECK(memcmp(other.data, tensor.data, (size_t)(tensor.rows * tensor.cols * dtype_bytes(tensor.type))) == 0);
        }
    }
}

TEST_CASE("a model can be moved; its tensors stay where they are") {
    Model model = load_model(fixtures + "llama_sharded");
    const void *data = model.layers[1].down.weight.data;
    double value = value_at(model.layers[1].down.weight, 5);
    Model moved = std::move(model);
    CHECK(moved.layers[1].down.weight.data == data);
    CHECK(value_at(moved.layers[1].down.weight, 5) == value);
    CHECK(moved.files.size() == 3);
}

TEST_CASE("nothing stays open or mapped, whether it loads or not") {
    auto open_files = [] { return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator()); };
    auto mapped = [] { return slurp("/proc/self/maps").find(".safetensors") != std::string::npos; };
    const auto before = open_files();
    {
        Model model = load_model(fixtures + "llama_sharded");
        CHECK(open_files() == before);
        CHECK(mapped());
    }
    Scratch scratch;
    copy_fixture("llama_sharded", scratch);
    spill(scratch / "model-00003-of-00003.safetensors", "short");
    CHECK(error_of([&] { load_model(scratch.str()); }) != "");
    CHECK(open_files() == before);
    CHECK_FALSE(mapped());
}

// ---- A broken directory --------------------------------------------------------------------------------------------

TEST_CASE("files that are not there, or are no files") {
    Scratch scratch;
    auto load = [&] { load_model(scratch.str()); };
    check_contains(error_of([&] { load_model(scratch / "nowhere"); }),
                   "/nowhere: cannot open it: No such file or directory; expected the directory that holds");
    check_contains(error_of([&] { load_model(fixtures + "llama_mha/config.json"); }),
                   "is a file, expected the directory that holds config.json");
    check_contains(error_of(load), "/config.json: no such file; expected the directory that holds config.json");
    copy_fixture("llama_mha", scratch);

    SUBCASE("no weights") {
        fs::remove(scratch / "model.safetensors");
        spill(scratch / "pytorch_model.bin", "x");
        check_contains(error_of(load), ": neither model.safetensors nor model.safetensors.index.json is there");
    }
    SUBCASE("generation_config.json is optional") {
        fs::remove(scratch / "generation_config.json");
        CHECK(error_of(load) == "");
        CHECK(load_config(scratch.str()).end_ids == std::vector<int>{2});
    }
}

TEST_CASE("a file that is empty, a directory or a FIFO") {
    for (const char *name : {"config.json", "generation_config.json", "model.safetensors"}) {
        Scratch scratch;
        copy_fixture("llama_mha", scratch);
        auto load = [&] { load_model(scratch.str()); };
        const std::string path = scratch / name;
        spill(path, "");
        CHECK(error_of(load) == path + ": is empty");
        fs::remove(path);
        fs::create_directory(path);
        CHECK(error_of(load) == path + ": is a directory, expected a file");
        fs::remove(path);
        REQUIRE(mkfifo(path.c_str(), 0600) == 0);
        CHECK(error_of(load) == path + ": is not a regular file");
    }
}

TEST_CASE("an error names the directory as it was given") {
    Scratch scratch;
    copy_fixture("llama_mha", scratch);
    spill(scratch / "model.safetensors", "short");
    std::string given = scratch.str() + "/";
    CHECK(error_of([&] { load_model(given); }) ==
          given + "model.safetensors: is 5 bytes long, too short for a safetensors file");
}

TEST_CASE("a name with control characters still gives one line") {
    Scratch scratch;
    std::string line = error_of([&] { load_model(scratch / "no\nsuch\tplace\x1b[31m"); });
    check_contains(line, "no?such?place?[31m");
}

// ---- A broken config -----------------------------------------------------------------------------------------------

TEST_CASE("config values that cannot be") {
    struct Case {
        std::string key, value, message;
    };
    const std::string whole = "expected a whole number from 1 to 16777216";
    std::vector<Case> cases;
    for (const char *key :
         {"hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"}) {
        for (const char *value : {"0", "-1", "-64", "64.5", "1e9", "99999999999999999999", "1e999", "-1e999", "\"64\"",
                                  "true", "[64]", "{}"}) {
            cases.push_back({key, value, whole});
        }
    }
    for (const char *value : {"0", "-1", "2.5", "1000000", "4294967297", "1e30", "\"2\""}) {
        cases.push_back({"num_hidden_layers", value, "expected a whole number from 1 to 10000"});
    }
    for (const char *value : {"0", "-1", "0.5", "1e12", "\"x\""}) {
        cases.push_back({"max_position_embeddings", value, "expected a whole number from 1 to 1073741824"});
    }
    for (const char *value : {"0", "-1e-6", "2", "1e999", "\"1e-6\"", "false"}) {
        cases.push_back({"rms_norm_eps", value, "expected a number from 1e-30 to 1"});
    }
    for (const char *value : {"0", "-10000", "0.5", "1e300", "1e999", "\"10000\""}) {
        cases.push_back({"rope_theta", value, "expected a number from 1 to 1e+15"});
    }
    for (const char *key : {"tie_word_embeddings", "attention_bias", "mlp_bias"}) {
        for (const char *value : {"1", "\"true\"", "[]"}) cases.push_back({key, value, "expected true or false"});
    }
    for (const char *key : {"hidden_act", "torch_dtype", "dtype", "model_type"}) {
        cases.push_back({key, "3", "expected a text"});
    }
    for (const char *value : {"-1", "100", "1e99", "1.5", "\"2\"", "[1, 100]", "[\"a\"]", "{\"a\": 1}", "true"}) {
        cases.push_back({"eos_token_id", value, "expected ids from 0 to 99 (vocab_size - 1)"});
    }
    cases.push_back({"bos_token_id", "100", "expected a whole number from 0 to 99"});
    cases.push_back({"bos_token_id", "-1", "expected a whole number from 0 to 99"});
    for (const Case &wrong : cases) {
        CAPTURE(wrong.key);
        CAPTURE(wrong.value);
        std::string line = error_of([&] { parse(config_text({{wrong.key, wrong.value}})); });
        check_contains(line, "config.json: " + wrong.key + " is ");
        check_contains(line, wrong.message);
    }
    CHECK(error_of([] {
              parse(config_text({{"hidden_size", "0"}}));
          }) == "config.json: hidden_size is 0, expected a whole number from 1 to 16777216");
    CHECK(error_of([] {
              parse(config_text({{"vocab_size", "\"100\""}}));
          }) == "config.json: vocab_size is \"100\", expected a whole number from 1 to 16777216");
}

TEST_CASE("config keys that must be there") {
    for (const char *key : {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                            "vocab_size", "architectures"}) {
        for (const char *value : {"", "null"}) {
            CHECK(error_of([&] {
                      parse(config_text({{key, value}}));
                  }) == std::string("config.json: ") + key + " is missing");
        }
    }
}

TEST_CASE("sizes that do not fit each other") {
    check_cases(
        "LlamaForCausalLM",
        {{{{"num_key_value_heads", "3"}}, "num_attention_heads is 8, expected a multiple of num_key_value_heads, 3"},
         {{{"num_key_value_heads", "16"}}, "num_attention_heads is 8, expected a multiple of num_key_value_heads, 16"},
         {{{"hidden_size", "65"}}, "hidden_size is 65, expected a multiple of num_attention_heads, 8 (or a head_dim)"},
         {{{"hidden_size", "65"}, {"head_dim", "8"}}, ""},
         {{{"head_dim", "7"}}, "head_dim is 7, expected an even number: RoPE turns pairs"},
         {{{"hidden_size", "72"}}, "head_dim is 9, expected an even"},
         {{{"hidden_size", "4"}}, "hidden_size is 4, expected a mult"},
         {{{"head_dim", "16777216"}}, "num_attention_heads * head_dim is 134217728, expected at most 16777216"}});
}

TEST_CASE("what is not supported is said, with what is") {
    check_cases(
        "LlamaForCausalLM",
        {{{{"architectures", "[\"GPT2LMHeadModel\"]"}},
          "config.json: architecture GPT2LMHeadModel is not supported; supported are LlamaForCausalLM "
          "MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM"},
         {{{"architectures", "[\"LlamaModel\"]"}}, "architecture LlamaModel is not supported"},
         {{{"architectures", "[\"LlamaForCausalLM\", \"X\"]"}}, "expected a list of one name"},
         {{{"architectures", "[]"}}, "architectures is [], expected a list of one name"},
         {{{"architectures", "\"LlamaForCausalLM\""}}, "expected a list of one name"},
         {{{"architectures", "[7]"}}, "expected a list of one name"},
         {{{"architectures", ""}, {"model_type", "\"gemma2\""}}, "architecture gemma2 is not supported"},
         {{{"architectures", ""}, {"model_type", "\"LlamaForCausalLM\""}}, "LlamaForCausalLM is not supported"},
         {{{"model_type", "\"mistral\""}}, "model_type is mistral, but LlamaForCausalLM asks for llama"},
         {{{"hidden_act", "\"gelu\""}}, "config.json: hidden_act gelu is not supported; supported is silu"},
         {{{"hidden_activation", "\"gelu_pytorch_tanh\""}}, "hidden_activation gelu_pytorch_tanh is not supported"},
         {{{"hidden_act", "\"swish\""}}, ""},
         {{{"torch_dtype", "\"float64\""}}, "dtype float64 is not supported; supported are float32 float16 bfloat16"},
         {{{"dtype", "\"float8_e4m3fn\""}}, "dtype float8_e4m3fn is not supported"},
         {{{"dtype", "\"float32 float16\""}}, "dtype float32 float16 is not supported"},
         {{{"quantization_config", R"({"quant_method": "gptq", "bits": 4})"}},
          R"(quantization_config is {"quant_method":"gptq","bits":4}, expected weights as they were trained)"}});
}

TEST_CASE("keys by which another architecture's config gives itself away") {
    struct Key {
        std::string key;
        std::vector<std::string> foreign, neutral;
    };
    const std::vector<Key> keys = {
        {"embedding_multiplier", {"12.0", "0"}, {"1", "1.0"}},  // Granite
        {"residual_multiplier", {"0.22"}, {"1.0", "null"}},
        {"attention_multiplier", {"0.0078125", "1.0"}, {"0.35355339059327379", "0.353553"}},  // 1 / sqrt(8)
        {"logits_scaling", {"8.0", "\"8\""}, {"1"}},
        {"scale_emb", {"12"}, {"1"}},  // MiniCPM
        {"scale_depth", {"1.4"}, {"1.4142136"}},
        {"dim_model_base", {"256"}, {"64"}},
        {"attn_logit_softcapping", {"50.0", "true"}, {"null", "false", "0"}},  // Gemma 2
        {"final_logit_softcapping", {"30.0"}, {"null"}},
        {"query_pre_attn_scalar", {"224"}, {"8"}},
        {"clip_qkv", {"8.0"}, {"null"}},                             // OLMo
        {"no_rope_layers", {"[1, 0]", "[0, 0]"}, {"[1, 1]", "[]"}},  // SmolLM3: 0 is a layer without
        {"no_rope_layer_interval", {"4"}, {"null"}},
        {"partial_rotary_factor", {"0.5", "\"half\""}, {"1", "1.0"}},  // Phi
        {"attention_chunk_size", {"8192"}, {"null"}},                  // Llama 4
        {"num_experts", {"128"}, {"0", "null"}},
        {"num_local_experts", {"8"}, {"0"}},
        {"n_routed_experts", {"64", "[64]"}, {"[]", "{}"}},
        {"kv_lora_rank", {"512"}, {"null"}},  // DeepSeek
        {"use_qk_norm", {"true"}, {"false"}},
        {"alibi", {"true", "{\"a\": 1}"}, {"false", "\"\""}}};
    for (const auto &[key, foreign, neutral] : keys) {
        for (const std::string &value : neutral) check_cases("LlamaForCausalLM", {{{{key, value}}, ""}});
        for (const std::string &value : foreign) {
            std::string line = error_of([&] { parse(config_text({{key, value}})); });
            check_contains(line, "config.json: " + key + " is " + value.substr(0, 2));
            check_contains(line, ", or no such key: LlamaForCausalLM computes without it");
        }
    }
    CHECK(error_of([] {
              parse(config_text({{"residual_multiplier", "0.22"}}));
          }) ==
          "config.json: residual_multiplier is 0.22, expected 1, or no such key: LlamaForCausalLM computes without it");
    check_cases("Qwen3ForCausalLM",
                {{{{"use_qk_norm", "true"}}, ""}, {{{"use_qk_norm", "false"}}, "expected 1, or no"}});
}

TEST_CASE("rope scaling that is not supported, or half of one") {
    auto scaled = [](const std::string &line, const std::string &scaling) {
        return Case{{{"rope_scaling", scaling}}, line};
    };
    for (const std::string type : {"yarn", "dynamic", "longrope", "mrope", "su", "LLAMA3", ""}) {
        check_cases("LlamaForCausalLM", {scaled("config.json: rope_scaling: rope_type " + type +
                                                    " is not supported; supported are default linear llama3",
                                                R"({"factor": 2, "type": ")" + type + "\"}")});
    }
    check_cases(
        "LlamaForCausalLM",
        {scaled("config.json: rope_scaling: factor is missing", R"({"type": "linear"})"),
         scaled("factor is 0, expected a number from 1e-06 to 1e+06", R"({"type": "linear", "factor": 0})"),
         scaled("factor is \"2\", expected a number", R"({"type": "linear", "factor": "2"})"),
         scaled("rope_theta is -1, expected a number", R"({"type": "linear", "factor": 2, "rope_theta": -1})"),
         scaled("partial_rotary_factor is not supported", R"({"rope_type": "default", "partial_rotary_factor": 0.5})"),
         scaled("rope_scaling: low_freq_factor is missing", R"({"rope_type": "llama3", "factor": 8})"),
         scaled("high_freq_factor is missing", R"({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1})"),
         scaled("high_freq_factor is 4, expected more than low_freq_factor, 4",
                R"({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4})"),
         scaled("original_max_position_embeddings is 0, expected a whole number from 1",
                R"({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
                   "original_max_position_embeddings": 0})"),
         scaled("rope_scaling: type is 5, expected a text", R"({"type": 5})"),
         scaled("rope_scaling is [], expected an object", "[]"),
         scaled("rope_scaling is \"linear\", expected an object", "\"linear\""),
         scaled("", "{}"),
         {{{"rope_parameters", R"({"full_attention": {"rope_type": "default"}})"}},
          "full_attention is {\"rope_type\":\"default\"}, expected no object: one RoPE for all layers"}});
}

TEST_CASE("windows that make no sense") {
    const std::string full = "\"full_attention\"", sliding = "\"sliding_attention\"",
                      both = "[" + full + ", " + sliding + "]";
    auto with = [](const std::string &key, const std::string &value) {
        Keys keys = {{"use_sliding_window", "true"}, {"sliding_window", "16"}};
        keys[key] = value;
        return keys;
    };
    check_cases("Qwen2ForCausalLM",
                {{with("sliding_window", "0"), "sliding_window is 0, expected a whole number from 1"},
                 {with("sliding_window", "-4"), "sliding_window is -4, expected a whole number from 1"},
                 {with("max_window_layers", "-1"), "max_window_layers is -1, expected a whole number from 0"},
                 {with("use_sliding_window", "1"), "use_sliding_window is 1, expected true or false"},
                 {with("layer_types", "[" + full + "]"), "expected a list of 2 (num_hidden_layers) names"},
                 {with("layer_types", "{\"a\": 1, \"b\": 2}"), "expected a list of 2"},
                 {with("layer_types", "[" + full + ", \"linear_attention\"]"),
                  "layer_types is \"linear_attention\", expected full_attention or sliding_attention"},
                 {with("layer_types", "[" + full + ", 3]"), "layer_types is 3, expected full_attention"},
                 {{{"layer_types", both}},
                  "layer_types has sliding_attention, but use_sliding_window and sliding_window give no window"}});
    // Where the family says which layers slide, layer_types cannot say otherwise.
    check_cases("LlamaForCausalLM",
                {{{{"layer_types", "[" + full + ", " + full + "]"}}, ""},
                 {{{"layer_types", both}}, "layer_types is \"sliding_attention\", expected full_attention"}});
    check_cases("MistralForCausalLM",
                {{{{"layer_types", "[" + sliding + ", " + sliding + "]"}}, ""},
                 {{{"layer_types", both}}, "layer_types is \"full_attention\", expected sliding_attention"}});
}

TEST_CASE("config.json that is not JSON") {
    auto line = [](const std::string &text) { return error_of([&] { parse(text); }); };
    const std::string good = config_text({});
    for (size_t length = 1; length < good.size(); length++) CHECK(line(good.substr(0, length)) != "");
    check_contains(line("{\n\"a\": 1,\n}"), "config.json: not valid JSON near line 3, byte 1");
    check_contains(line(good + "x"), "not valid JSON near line 1, byte " + std::to_string(good.size()));
    check_contains(line(good + good), "not valid JSON");
    check_contains(line(good + std::string(1, '\0')), "not valid JSON");
    check_contains(line(std::string(1, '\0') + good), "not valid JSON");
    for (const char *text : {"[]", "3", "null", "\"x\"", "true"}) check_contains(line(text), "expected a JSON object");
    check_contains(line(replaced(good, "64", "NaN")), "not valid JSON");
    check_contains(line(replaced(good, "64", "Infinity")), "not valid JSON");
    check_contains(line("\xff\xfe{}"), "not valid JSON");
    CHECK(line(good + " \n\t") == "");
    check_contains(error_of([&] { parse(good, "{"); }), "generation_config.json: not valid JSON");
}

TEST_CASE("equal keys") {
    check_contains(error_of([] { parse(replaced(config_text({}), "{", "{\"hidden_size\": 32, ")); }),
                   "config.json: key \"hidden_size\" stands twice in one object");
    check_contains(error_of([] {
                       parse(config_text({{"rope_scaling", R"({"factor": 1, "factor": 2})"}}));
                   }),
                   "key \"factor\" stands twice");
    check_contains(error_of([] { parse(config_text({{"x", R"([[{"a": 1, "a": 1}]])"}})); }), "key \"a\" stands twice");
    // The same key in two objects is no trouble.
    CHECK(error_of([] { parse(config_text({{"x", R"({"a": {"a": 1}, "b": {"a": 2}})"}})); }) == "");
}

TEST_CASE("deep nesting, and more than 16 MiB") {
    for (size_t depth : {900u, 1100u, 100000u, 5000000u}) {
        std::string nested = std::string(depth, '[') + std::string(depth, ']');
        std::string line = error_of([&] { parse(config_text({{"x", nested}})); });
        CHECK((line == "") == (depth < 1000));
        check_contains(error_of([&] { parse(std::string(depth, '[')); }), "not valid JSON");
    }
    check_contains(error_of([] { parse(std::string((16 << 20) + 1, ' ')); }), "JSON of 16777217 bytes is too long");
    Scratch scratch;
    copy_fixture("llama_mha", scratch);
    spill(scratch / "config.json", std::string((16 << 20) + 1, ' '));
    check_contains(error_of([&] { load_model(scratch.str()); }),
                   "/config.json: is 16777217 bytes long, expected at most 16777216");
}

// ---- Broken weights ------------------------------------------------------------------------------------------------

TEST_CASE("a safetensors file cut off anywhere") {
    const std::string file = slurp(fixtures + "llama_rope_linear/model.safetensors");
    Scratch scratch;
    copy_fixture("llama_rope_linear", scratch);
    std::vector<size_t> lengths = {1, 2, 7, 8, 9, file.size() - 1, file.size() - 4};
    for (size_t length = 64; length < file.size(); length += 64) lengths.push_back(length);
    for (size_t length : lengths) {
        // In a buffer of exactly that length, so that the sanitizer sees a read behind its end.
        std::vector<char> cut(file.begin(), file.begin() + (std::ptrdiff_t)length);
        std::string line = error_of([&] { parse_safetensors("x", cut.data(), cut.size()); });
        CHECK_MESSAGE(line != "", length);
    }
    for (size_t length : {(size_t)4, (size_t)100, file.size() / 2, file.size() - 1}) {
        spill(scratch / "model.safetensors", file.substr(0, length));
        std::string line = error_of([&] { load_model(scratch.str()); });
        check_contains(line, scratch / "model.safetensors: ");
        CHECK((line.find("cut off, fetch it again") != std::string::npos || length == 4));
    }
}

TEST_CASE("a header length that lies") {
    auto line = [](uint64_t size, const std::string &rest) {
        std::string file((const char *)&size, sizeof size);
        return error_of([&] { parse_safetensors("w", (file + rest).data(), file.size() + rest.size()); });
    };
    check_contains(line(3, "{}"), "w: its header is said to be 3 bytes long, but the file holds 2: it is cut off");
    check_contains(line(UINT64_MAX, "{}"),
                   "its header is said to be 18446744073709551615 bytes long, expected at most");
    check_contains(line(UINT64_MAX - 7, "{}"), "not a safetensors file");
    check_contains(line(1ull << 63, "{}"), "not a safetensors file");
    check_contains(line(0, "{}"), "w: header: not valid JSON");
    check_contains(line(1, "{}"), "w: header: not valid JSON");
    CHECK(line(2, "{}") == "");
    CHECK(line(4, "{}  ") == "");
    check_contains(line(2, "[]"), "w: header: expected a JSON object");
    std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n";
    check_contains(error_of([&] { parse_safetensors("w", pointer.data(), pointer.size()); }),
                   "w: is a Git LFS pointer, not the weights: run `git lfs pull`");
}

// One or two tensors in a file with 8 bytes of data.
std::string entry_error(const std::string &entries) {
    std::string file = safetensors("{" + entries + "}", "12345678");
    return error_of([&] { parse_safetensors("w", file.data(), file.size()); });
}

TEST_CASE("header entries that cannot be") {
    auto entry = [](const std::string &dtype, const std::string &shape, const std::string &offsets) {
        return "\"a\": {\"dtype\": " + dtype + ", \"shape\": " + shape + ", \"data_offsets\": " + offsets + "}";
    };
    CHECK(entry_error(entry("\"F32\"", "[2]", "[0, 8]")) == "");
    CHECK(entry_error(entry("\"F16\"", "[2, 2]", "[0, 8]")) == "");
    CHECK(entry_error(entry("\"F64\"", "[]", "[0, 8]")) == "");

    check_contains(entry_error("\"a\": 3"), "w: tensor a: expected an object");
    check_contains(entry_error("\"a\": []"), "w: tensor a: expected an object");
    check_contains(entry_error("\"a\": {}"), "w: tensor a: dtype is missing");
    check_contains(entry_error("\"a\": {\"dtype\": \"F32\"}"), "w: tensor a: shape is missing");
    check_contains(entry_error(R"("a": {"dtype": "F32", "shape": [2]})"), "w: tensor a: data_offsets is missing");
    check_contains(entry_error(entry("32", "[2]", "[0, 8]")), "dtype is 32, expected a text");
    for (const char *shape : {"2", "\"2\"", "{\"a\": 2}", "[\"2\"]", "[-2]", "[1.5]", "[1e30]", "[[2]]", "[null]"}) {
        check_contains(entry_error(entry("\"F32\"", shape, "[0, 8]")), "expected a list of whole numbers");
    }
    for (const char *offsets : {"8", "[-1, 8]", "[0, 8.5]", "[\"0\", 8]", "[0, 1e300]"}) {
        check_contains(entry_error(entry("\"F32\"", "[2]", offsets)), "expected a list of whole numbers");
    }
    for (const char *offsets : {"[]", "[0]", "[0, 4, 8]", "[8, 0]"}) {
        check_contains(entry_error(entry("\"F32\"", "[2]", offsets)), "expected [begin, end]");
    }
    check_contains(entry_error(entry("\"F32\"", "[3]", "[0, 12]")),
                   "w: tensor a ends at byte 12 of the data, but the file holds 8: it is cut off, fetch it again");
    check_contains(entry_error(entry("\"F32\"", "[2]", "[9007199254740984, 9007199254740992]")),
                   "ends at byte 9007199254740992");
    check_contains(entry_error(entry("\"F32\"", "[3]", "[0, 8]")),
                   "w: tensor a has 8 bytes, its shape [3] in F32 asks for 12");
    check_contains(entry_error(entry("\"F16\"", "[2]", "[0, 8]")), "its shape [2] in F16 asks for 4");
    check_contains(entry_error(entry("\"F32\"", "[0]", "[0, 8]")), "its shape [0] in F32 asks for 0");
    check_contains(entry_error(entry("\"I8\"", "[9]", "[0, 8]")), "its shape [9] in I8 asks for 9");
    // 2^32 * 2^32 * 4 bytes are 0 modulo 2^64; 2^53 * 2^53 overflows, too.
    check_contains(entry_error(entry("\"F32\"", "[4294967296, 4294967296]", "[0, 0]")),
                   "expected one that fits a file");
    check_contains(entry_error(entry("\"I8\"", "[9007199254740992, 9007199254740992]", "[0, 8]")), "fits a file");
}

TEST_CASE("offsets that overlap, leave a gap or leave data over") {
    auto two = [](const std::string &first, const std::string &second) {
        return entry_error("\"a\": {\"dtype\": \"U8\", \"shape\": [4], \"data_offsets\": " + first +
                           "}, \"b\": {\"dtype\": \"U8\", \"shape\": [4], \"data_offsets\": " + second + "}");
    };
    CHECK(two("[0, 4]", "[4, 8]") == "");
    CHECK(two("[4, 8]", "[0, 4]") == "");
    check_contains(two("[0, 4]", "[3, 7]"), "w: tensor b begins at byte 3 of the data, expected 4: tensors overlap");
    check_contains(two("[0, 4]", "[0, 4]"), "begins at byte 0 of the data, expected 4: tensors overlap");
    check_contains(two("[1, 5]", "[4, 8]"),
                   "w: tensor a begins at byte 1 of the data, expected 0: tensors leave a gap");
    check_contains(entry_error(R"("a": {"dtype": "U8", "shape": [7], "data_offsets": [0, 7]})"),
                   "w: holds 8 bytes of data, its header speaks of 7");
    check_contains(entry_error(R"("__metadata__": {"format": "pt"})"), "holds 8 bytes of data, its header speaks of 0");
    check_contains(two("[0, 4]", "[4, 8]}, \"a\": {\"dtype\": \"U8\", \"shape\": [0], \"data_offsets\": [8, 8]"),
                   "w: header: key \"a\" stands twice in one object");
}

TEST_CASE("tensors that are not what config.json asks for") {
    const std::string name = "llama_rope_linear", file = slurp(fixtures + name + "/model.safetensors");
    const std::string config = slurp(fixtures + name + "/config.json");
    Scratch scratch;
    copy_fixture(name, scratch);
    const std::string where = scratch / "model.safetensors: tensor ";
    auto weights = [&](const std::string &from, const std::string &to) {
        spill(scratch / "model.safetensors", with_header(file, from, to));
        return error_of([&] { load_model(scratch.str()); });
    };
    auto configured = [&](const std::string &from, const std::string &to) {
        spill(scratch / "config.json", replaced(config, from, to));
        return error_of([&] { load_model(scratch.str()); });
    };
    const std::string key = "model.layers.1.self_attn.k_proj.weight";
    SUBCASE("missing") {
        CHECK(weights(key, "model.layers.1.self_attn.k_proj.weighs") ==
              where + key + " is missing, config.json asks for it (LlamaForCausalLM, 2 layers)");
        check_contains(weights("model.norm.weight", "model.norn.weight"), where + "model.norm.weight is missing");
        check_contains(weights("model.embed_tokens.weight", "model.embed_token.weight"),
                       where + "model.embed_tokens.weight is missing");
    }
    SUBCASE("another shape") {
        size_t at = header_of(file).find(key);
        std::string header = header_of(file);
        header.replace(header.find("[16,32]", at), 7, "[32,16]");
        spill(scratch / "model.safetensors", safetensors(header, file.substr(8 + header.size())));
        CHECK(error_of([&] { load_model(scratch.str()); }) ==
              where + key + " has shape [32, 16], config.json asks for [16, 32]");
        header.replace(header.find("[32,16]", at), 7, "[512]  ");
        spill(scratch / "model.safetensors", safetensors(header, file.substr(8 + header.size())));
        check_contains(error_of([&] { load_model(scratch.str()); }), "has shape [512], config.json asks for [16, 32]");
    }
    SUBCASE("another type") {
        std::string header = header_of(file);
        size_t at = header.find("\"F32\"", header.find("model.norm.weight"));
        header.replace(at, 5, "\"I32\"");
        spill(scratch / "model.safetensors", safetensors(header, file.substr(8 + header.size())));
        CHECK(error_of([&] { load_model(scratch.str()); }) ==
              where + "model.norm.weight has dtype I32, supported are F32 F16 BF16");
    }
    SUBCASE("vocabulary and embedding disagree") {
        CHECK(configured("\"vocab_size\": 64", "\"vocab_size\": 63") ==
              where + "model.embed_tokens.weight has shape [64, 32], config.json asks for [63, 32]");
    }
    SUBCASE("other sizes than the config's") {
        check_contains(configured("\"intermediate_size\": 48", "\"intermediate_size\": 47"),
                       "mlp.gate_proj.weight has shape [48, 32], config.json asks for [47, 32]");
        check_contains(configured("\"head_dim\": 8", "\"head_dim\": 16"),
                       "q_proj.weight has shape [32, 32], config.json asks for [64, 32]");
        check_contains(configured("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4"),
                       "k_proj.weight has shape [16, 32], config.json asks for [32, 32]");
        check_contains(configured("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 9999"),
                       "tensor model.layers.2.input_layernorm.weight is missing, config.json asks for it "
                       "(LlamaForCausalLM, 9999 layers)");
        check_contains(configured("\"attention_bias\": false", "\"attention_bias\": true"), "q_proj.bias is missing");
        check_contains(configured("\"mlp_bias\": false", "\"mlp_bias\": true"), "gate_proj.bias is missing");
    }
}

TEST_CASE("shards and their index") {
    Scratch scratch;
    copy_fixture("llama_sharded", scratch);
    const std::string path = scratch / "model.safetensors.index.json", index = slurp(path);
    const std::string first = "model-00001-of-00003.safetensors", second = "model-00002-of-00003.safetensors";
    auto load = [&] { return error_of([&] { load_model(scratch.str()); }); };
    auto indexed = [&](const std::string &from, const std::string &to) {
        spill(path, replaced(index, from, to));
        return load();
    };
    CHECK(load() == "");
    SUBCASE("a shard is missing") {
        fs::remove(scratch / second);
        CHECK(load() == (scratch / second) + ": cannot open it: No such file or directory; " + path + " names it");
    }
    SUBCASE("a shard is cut off") {
        spill(scratch / second, slurp(scratch / second).substr(0, 5000));
        check_contains(load(), (scratch / second) + ": ");
        check_contains(load(), "cut off, fetch it again");
    }
    SUBCASE("a name outside the directory") {
        for (const char *name : {"../"
                                 "x.safetensors",
                                 "/etc/passwd", "a/b", "", ".", ".."}) {
            check_contains(indexed("\"" + first, std::string("\"") + name + "\", \"x\": \"" + first),
                           "\", expected the name of a file in the same directory");
        }
    }
    SUBCASE("not a map of names") {
        check_contains(indexed("\"weight_map\"", "\"weights\""), path + ": weight_map is missing");
        check_contains(indexed("\"" + first + "\"", "7"), " is 7, expected a text");
        check_contains(indexed("\"" + first + "\"", "null"), "is null, expected the name of a file");
        check_contains(indexed("{", "["), "not valid JSON");
        spill(path, "{\"weight_map\": []}");
        check_contains(load(), "weight_map is [], expected an object");
        spill(path, "{\"weight_map\": {}}");
        check_contains(load(), path + ": tensor model.embed_tokens.weight is missing");
    }
    SUBCASE("a tensor that is not in the shard it is said to be in") {
        check_contains(indexed("\"lm_head.weight\"", "\"nowhere.weight\""),
                       ": tensor nowhere.weight is missing, " + path);
        CHECK(error_of([&] { spill(path, index); }) == "");
    }
    SUBCASE("a tensor the index does not list") {
        size_t at = index.find("\"model.norm.weight\""), end = index.find('\n', at);
        std::string cut = index;
        cut.erase(at, end - at);
        size_t comma = cut.find_last_of(',', at);
        if (cut.find_first_not_of(" \n", comma + 1) == cut.find('}', comma)) cut.erase(comma, 1);
        spill(path, cut);
        check_contains(load(), path + ": tensor model.norm.weight is missing, config.json asks for it");
    }
    SUBCASE("a whole model.safetensors goes before the index") {
        spill(scratch / "model.safetensors", "short");
        check_contains(load(), "/model.safetensors: is 5 bytes long");
    }
}

TEST_CASE("names out of a file, however odd, leave one short line") {
    std::string name = "\\n\\u0001\\u00e9" + std::string(3000000, 'x');
    std::string line = entry_error("\"" + name + "\": 3");
    CHECK(line.size() < 200);
    check_contains(line, "w: tensor ????xxxx");
    CHECK(error_of([&] { parse(config_text({{"hidden_act", "\"" + name + "\""}})); }).size() < 200);
    CHECK(error_of([&] { parse(config_text({{"hidden_size", "\"" + name + "\""}})); }).size() < 200);
    CHECK(error_of([&] { parse(config_text({{name, "1}, {"}})); }).size() < 200);
}
