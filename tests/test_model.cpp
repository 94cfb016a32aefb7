// base/families.h, config.h, weights.h, json.h, usable.h and commands/report.h: every fixture loads with the config and the weights that
// Transformers sees in it, and every kind of broken checkpoint ends in one line that says what is wrong. Run from the
// repository's root. Its parts: what is right loads, the head and the embedding; what is broken: a directory, a config,
// weights; the cache of any config; results as text and JSON; what this process may use.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "../base/weights.h"

#include "../base/usable.h"
#include "../commands/report.h"
#include "../commands/sizes.h"

#include <random>

#include "files.h"
#include "reference.h"

const std::string fixtures = "tests/fixtures/models/";

// ---- Helpers -------------------------------------------------------------------------------------------------------

// A checkpoint to break: a copy of a fixture, and the line it is then refused with; "": it loads.
struct Checkpoint : Scratch {
    explicit Checkpoint(const std::string &fixture) {
        fs::copy(fixtures + fixture, path, fs::copy_options::recursive | fs::copy_options::overwrite_existing);
    }
    std::string error() const {
        return error_of([&] { load_model(str()); });
    }
    std::string error_with(const std::string &name, const std::string &bytes) const {
        spill(*this / name, bytes);
        return error();
    }
};

Json json_file(const std::string &path) { return parse_json(path, slurp(path)); }

// Element i of a tensor, by the definition of its type, not by the engine's own conversion.
double value_at(const Tensor &tensor, int64_t i) {
    if (tensor.type == DType::f32) return ((const float *)tensor.data)[i];
    const bool half = tensor.type == DType::f16;
    return reference::value_of(((const uint16_t *)tensor.data)[i], half ? 5 : 8, half ? 10 : 7);
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

// What a config is refused with; "": it loads.
std::string refusal(const std::string &config, const std::string &generation = "") {
    return error_of([&] { parse(config, generation); });
}

// A small config, key by key, so that a case can change or leave out one. "" leaves a key out. The architecture is that
// of a family with "ForCausalLM" behind its name.
using Keys = std::map<std::string, std::string>;
std::string config_text(const Keys &changes, const std::string &family = "Llama") {
    Keys keys = {{"architectures", "[\"" + family + "ForCausalLM\"]"},
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
    for (const Case &each : cases) {
        std::string config = config_text(each.keys, family), line = refusal(config);
        bool whole = each.line.empty() || each.line.rfind("config.json: ", 0) == 0;
        bool good = whole ? line == each.line : contains(line, each.line);
        CHECK_MESSAGE(good, config.substr(0, 300) << " says \"" << line << "\", not \"" << each.line << "\"");
    }
}

void check_cases(const std::vector<Case> &cases) { check_cases("Llama", cases); }

// Chance, the same with the same seed, which a failure prints.
std::mt19937 random_numbers(unsigned seed = std::random_device()()) {
    MESSAGE("seed " << seed);
    return std::mt19937(seed);
}

// ---- What is right loads -------------------------------------------------------------------------------------------

std::vector<int> windows_of(const Config &c) {
    std::vector<int> windows;
    for (int layer = 0; layer < c.layers; layer++) windows.push_back(c.kind(layer).window);
    return windows;
}

// Of a config all that a family or a key decides, in one line. Left out is what most have: an epsilon of 1e-6, a theta
// of 10000, the ids 1 and 2 for begin and end.
std::string summary(const Config &c) {
    const Kind &kind = c.kinds[0];
    const RopeScaling &rope = kind.rope;
    const std::vector<int> windows = windows_of(c);
    std::string text = formatted("%s %d x %d heads %d / %d x %d vocab %d context %d", c.family->model_type, c.layers,
                                 c.hidden, c.heads, kind.kv_heads, kind.key_width, c.vocabulary, c.context);
    if (c.norm_epsilon != 1e-6) text += formatted(" eps %g", c.norm_epsilon);
    if (kind.rope_theta != 10000) text += formatted(" theta %g", kind.rope_theta);
    if (rope.kind == RopeScaling::linear) text += formatted(" rope / %g", rope.factor);
    if (rope.kind == RopeScaling::llama3)
        text += formatted(" rope / %g (%g %g %d)", rope.factor, rope.low_turns, rope.high_turns, rope.original_context);
    if (rope.kind == RopeScaling::yarn)
        text += formatted(" yarn / %g (%g %g %d%s)", rope.factor, rope.low_turns, rope.high_turns,
                          rope.original_context, rope.truncate ? "" : " not truncated");
    if (rope.kind == RopeScaling::longrope)
        text +=
            formatted(" longrope (%g .. %g of %zu, %g .. %g, %d)", rope.short_factors[0], rope.short_factors.back(),
                      rope.short_factors.size(), rope.long_factors[0], rope.long_factors.back(), rope.original_context);
    if (rope.attention_factor != 1) text += formatted(" attention x %g", rope.attention_factor);
    if (rope.query_growth != 0) text += formatted(" queries grow by %g", rope.query_growth);
    if (rope.rotary != 1) text += formatted(" rotary %g", rope.rotary);
    if (c.bos_id != 1) text += formatted(" bos %d", c.bos_id);
    if (c.end_ids != std::vector<int>{2}) text += " end " + json_of(c.end_ids);
    if (*std::max_element(windows.begin(), windows.end()) > 0) text += " windows " + json_of(windows);
    for (const Kind &other : c.kinds) {  // what of the others differs, but for their windows
        if (other.kv_heads != kind.kv_heads || other.key_width != kind.key_width)
            text += formatted(" and %d x %d", other.kv_heads, other.key_width);
        if (other.rope_theta != kind.rope_theta) text += formatted(" and theta %g", other.rope_theta);
        if (other.rope.factor != rope.factor) text += formatted(" / %g", other.rope.factor);
        if (other.rope.turned != rope.turned) text += formatted(" turns %g", other.rope.turned);
    }
    for (int layer = 0; layer < c.layers; layer++)
        if (!c.rows[layer].own) text += formatted(" %d reads %d:%d", layer, c.rows[layer].kind, c.rows[layer].index);
    if (c.embedding_scale != 1) text += formatted(" embedding x %g", c.embedding_scale);
    if (c.score_scale != 0) text += formatted(" scores x %g", c.score_scale);
    if (c.logit_scale != 1) text += formatted(" logits x %g", c.logit_scale);
    if (c.logit_cap != 0) text += formatted(" logits below %g", c.logit_cap);
    if (c.shared_ffn != 0) text += formatted(" shared ffn %d", c.shared_ffn);
    if (c.per_layer != 0) text += formatted(" %d per layer of %d ids", c.per_layer, c.layer_vocabulary);
    text += c.keys_are_values ? " keys are values" : "";
    text += c.gelu ? " gelu" : "";
    text += std::string(c.qkv_bias ? " qkv" : "") + (c.output_bias ? " output" : "") + (c.mlp_bias ? " mlp" : "");
    return text + (c.family->head_norms ? " norms" : "") + (c.tied ? " tied" : "") +
           (c.dtype.empty() ? "" : " " + c.dtype);
}

struct Expected {
    std::string name, sizes, rest = " float32";
    int context = 128;
};

const Expected expected[] = {
    {"llama_mha", "llama 2 x 32 heads 4 / 4 x 8 vocab 64", " eps 0.1 float32"},
    {"llama_gqa_9_on_3", "llama 2 x 36 heads 9 / 3 x 4 vocab 64", " tied float32"},
    {"llama_mqa", "llama 2 x 32 heads 4 / 1 x 8 vocab 64"},
    {"llama_bias", "llama 2 x 32 heads 4 / 2 x 8 vocab 64", " qkv output mlp float32"},
    {"llama_rope_theta", "llama 2 x 32 heads 4 / 2 x 8 vocab 64", " theta 500000 float32"},
    {"llama_rope_linear", "llama 2 x 32 heads 4 / 2 x 8 vocab 64", " rope / 4 float32"},
    {"llama_rope_llama3", "llama 2 x 32 heads 4 / 2 x 16 vocab 64", " rope / 8 (1 4 64) end [2, 5, 7] tied float32"},
    {"llama_new_spelling", "llama 2 x 32 heads 4 / 2 x 16 vocab 64", " theta 20000 rope / 8 (1 4 64) float32"},
    {"llama_f16", "llama 2 x 64 heads 8 / 1 x 8 vocab 64", " float16"},
    {"llama_bf16", "llama 2 x 64 heads 8 / 2 x 8 vocab 64", " tied bfloat16"},
    {"llama_tied_with_head", "llama 2 x 32 heads 4 / 2 x 8 vocab 64", " bfloat16"},
    {"llama_sharded", "llama 2 x 32 heads 4 / 2 x 8 vocab 96", " bfloat16"},
    {"mistral_window", "mistral 2 x 32 heads 4 / 2 x 8 vocab 64", " windows [8, 8] float32"},
    {"mistral_no_window", "mistral 2 x 32 heads 4 / 2 x 16 vocab 64"},
    {"qwen2_14_on_2", "qwen2 2 x 56 heads 14 / 2 x 4 vocab 64", " theta 1e+06 end [0, 1] qkv tied float32"},
    {"qwen2_window", "qwen2 3 x 32 heads 4 / 2 x 8 vocab 64", " windows [0, 6, 6] qkv float32"},
    {"qwen3", "qwen3 2 x 32 heads 4 / 2 x 16 vocab 64", " theta 1e+06 norms tied float32"},
    {"qwen3_layer_types", "qwen3 3 x 32 heads 4 / 2 x 16 vocab 64", " windows [5, 0, 5] qkv output norms bfloat16"},
    {"qwen2_window_16", "qwen2 3 x 24 heads 4 / 2 x 6 vocab 64", " windows [0, 16, 0] qkv float32"},
    {"qwen3_window_40", "qwen3 3 x 32 heads 4 / 2 x 16 vocab 64", " windows [40, 0, 40] norms bfloat16"},
    {"gemma3", "gemma3_text 4 x 24 heads 4 / 2 x 8 vocab 64",
     " windows [7, 0, 7, 0] and theta 1e+06 / 8 embedding x 4.89898 scores x 0.204124 gelu norms tied float32"},
    {"gemma3_vision", "gemma3_text 3 x 24 heads 4 / 2 x 16 vocab 64",
     " windows [7, 0, 7] and theta 1e+06 embedding x 4.89898 scores x 0.0625 gelu norms tied bfloat16"},
    {"gemma4_shared", "gemma4_text 7 x 16 heads 4 / 2 x 8 vocab 64",
     " windows [7, 0, 7, 0, 7, 7, 0] and 1 x 16 and theta 1e+06 turns 0.25 4 reads 0:1 5 reads 0:1 6 reads 1:1 "
     "embedding x 4 scores x 1 gelu norms tied bfloat16"},
    {"granite_swa", "granite_swa 4 x 24 heads 4 / 2 x 6 vocab 64",
     " eps 1e-05 theta 0 windows [0, 7, 7, 7] and theta 10000 and theta 500 embedding x 3 scores x 0.25 tied float32"},
    {"smollm3", "smollm3 4 x 16 heads 4 / 2 x 4 vocab 64", " theta 2e+06 and theta 0 tied float32"},
    {"smollm3_list", "smollm3 4 x 16 heads 4 / 2 x 4 vocab 64", " theta 0 and theta 2e+06 float32"},
    {"granite", "granite 4 x 16 heads 4 / 2 x 4 vocab 64",
     " eps 2.06612e-05 embedding x 2.27273 scores x 0.25 logits x 2 qkv output mlp float32"},
    {"granite4", "granitemoehybrid 4 x 16 heads 4 / 2 x 4 vocab 64",
     " eps 2.06612e-05 embedding x 2.27273 scores x 0.25 logits x 2 float32"},
    {"granite_swa_scaled", "granite_swa 4 x 16 heads 4 / 2 x 4 vocab 64",
     " eps 0.000206612 theta 0 windows [0, 7, 7, 7] and theta 10000 and theta 500 embedding x 2.27273 scores x "
     "0.25 logits x 2 float32"},
    {"phi3", "phi3 2 x 32 heads 4 / 2 x 8 vocab 64", " eps 1e-05 theta 100 rotary 0.75 windows [7, 7] tied float32"},
    {"phi3_longrope_short", "phi3 2 x 32 heads 2 / 1 x 16 vocab 64",
     " eps 1e-05 theta 1000 longrope (1 .. 1.25 of 6, 1.2 .. 3.7, 128) attention x 1.13389 rotary 0.75 float32", 512},
    {"phi3_longrope_long", "phi3 2 x 32 heads 2 / 1 x 16 vocab 64",
     " eps 1e-05 theta 1000 longrope (1 .. 1.25 of 6, 1.2 .. 3.7, 40) attention x 1.14687 rotary 0.75 tied "
     "float32"},
    {"olmo2", "olmo2 4 x 16 heads 4 / 2 x 4 vocab 64", " eps 0.01 float32"},
    {"ministral3", "ministral3 2 x 32 heads 2 / 1 x 16 vocab 64",
     " eps 1e-05 theta 100 yarn / 8 (1 32 16) queries grow by 0.1 float32"},
    {"ministral3_vision", "ministral3 2 x 32 heads 2 / 1 x 16 vocab 64",
     " eps 1e-05 theta 100 yarn / 8 (1 32 16) queries grow by 0.1 tied bfloat16"},
    {"mistral3_vision", "mistral 2 x 32 heads 2 / 1 x 16 vocab 64", " theta 1e+09 bfloat16"},
    {"qwen2_yarn", "qwen2 2 x 32 heads 2 / 1 x 16 vocab 64",
     " theta 100 yarn / 4 (1 32 32) attention x 1.13863 qkv float32"},
    {"qwen3_yarn_plain", "qwen3 2 x 32 heads 2 / 1 x 16 vocab 64",
     " theta 1000 yarn / 2 (0.5 4 64 not truncated) attention x 1.3 norms tied float32"},
    {"gemma4", "gemma4_text 5 x 16 heads 2 / 1 x 8 vocab 64",
     " eps 0.01 windows [7, 0, 7, 7, 0] and 1 x 16 and theta 1e+06 turns 0.25 3 reads 0:1 4 reads 1:0 embedding "
     "x 4 scores x 1 logits below 3 shared ffn 32 8 per layer of 64 ids gelu norms tied float32"},
    {"gemma4_vision", "gemma4_text 5 x 16 heads 2 / 1 x 8 vocab 64",
     " eps 0.01 windows [7, 0, 7, 7, 0] and 1 x 16 and theta 1e+06 turns 0.25 3 reads 0:1 4 reads 1:0 embedding "
     "x 4 scores x 1 logits below 3 shared ffn 32 8 per layer of 64 ids gelu norms tied bfloat16"},
    {"gemma4_k_eq_v", "gemma4_text 4 x 16 heads 4 / 2 x 8 vocab 64",
     " eps 0.01 windows [7, 0, 7, 0] and 1 x 16 and theta 1e+06 turns 0.25 embedding x 4 scores x 1 logits "
     "below 3 keys are values gelu norms tied bfloat16"},
    {"lfm2", "lfm2 5 x 16 heads 2 / 1 x 8 vocab 64",
     " eps 1e-05 windows [3, 0, 3, 0, 3] and 1 x 16 and theta 0 norms tied float32"},
    {"lfm2_bias", "lfm2 5 x 16 heads 4 / 2 x 4 vocab 64",
     " eps 1e-05 windows [4, 0, 4, 0, 4] and 1 x 16 and theta 0 norms bfloat16"},
    {"head_dim_64", "llama 1 x 16 heads 2 / 1 x 64 vocab 64"},
    {"head_dim_80", "llama 1 x 16 heads 2 / 1 x 80 vocab 64"},
    {"head_dim_96", "llama 1 x 16 heads 2 / 1 x 96 vocab 64"},
    {"head_dim_128", "llama 1 x 16 heads 2 / 1 x 128 vocab 64"},
    {"head_dim_256", "llama 1 x 16 heads 2 / 1 x 256 vocab 64"},
};

// Every tensor of the model under the name it has in a file.
std::map<std::string, Tensor> by_name(const Model &model) {
    std::map<std::string, Tensor> all = {{"model.embed_tokens.weight", model.embedding},
                                         {"model.norm.weight", model.final_norm},
                                         {"lm_head.weight", model.head}};
    for (size_t i = 0; i < model.layers.size(); i++) {
        const LayerWeights &layer = model.layers[i];
        const Family &family = *model.config.family;
        const bool after = family.norms_after, before = family.norms_before;
        std::string prefix = "model.layers." + std::to_string(i) + ".";
        const std::pair<const char *, const Linear *> linears[] = {
            {"self_attn.q_proj", &layer.query},  {"self_attn.k_proj", &layer.key}, {"self_attn.v_proj", &layer.value},
            {"self_attn.o_proj", &layer.output}, {"mlp.gate_proj", &layer.gate},   {"mlp.up_proj", &layer.up},
            {"mlp.down_proj", &layer.down}};
        for (const auto &[name, linear] : linears) {
            all[prefix + name + ".weight"] = linear->weight;
            all[prefix + name + ".bias"] = linear->bias;
        }
        all[prefix + "input_layernorm.weight"] = layer.attention_norm;
        if (before) all[prefix + (after ? "pre_feedforward" : "post_attention") + "_layernorm.weight"] = layer.mlp_norm;
        if (after) all[prefix + "post_attention_layernorm.weight"] = layer.attention_out_norm;
        all[prefix + "post_feedforward_layernorm.weight"] = layer.mlp_out_norm;
        all[prefix + "self_attn.sinks"] = layer.sinks;
        const float &scale = model.config.per_layer ? layer.per_layer.scale : layer.scale;
        if (scale != 1) all[prefix + "layer_scalar"] = {&scale, DType::f32, 1, 1};
        all[prefix + "self_attn.q_norm.weight"] = layer.query_norm.data ? layer.query_norm : layer.all_query_norm;
        all[prefix + "self_attn.k_norm.weight"] = layer.key_norm.data ? layer.key_norm : layer.all_key_norm;
        if (family.ways == Ways::granite4) {  // Granite 4
            const Tensor &gate = layer.gate.weight;  // `up` lies behind it
            all[prefix + "shared_mlp.input_linear.weight"] = {gate.data, gate.type, 2 * gate.rows, gate.cols};
            all[prefix + "shared_mlp.output_linear.weight"] = layer.down.weight;
            for (const char *part : {"gate_proj", "up_proj", "down_proj"})
                all.erase(prefix + "mlp." + part + ".weight");
        }
        if (family.fused_qkv) {  // the parts lie behind one another
            const Tensor &query = layer.query.weight, &gate = layer.gate.weight;
            const int64_t rows = query.rows + layer.key.weight.rows + layer.value.weight.rows;
            all[prefix + "self_attn.qkv_proj.weight"] = {query.data, query.type, rows, query.cols};
            all[prefix + "mlp.gate_up_proj.weight"] = {gate.data, gate.type, 2 * gate.rows, gate.cols};
            for (const char *part :
                 {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"})
                all.erase(prefix + part + ".weight");
        }
        if (layer.key.weight.data == layer.value.weight.data) all.erase(prefix + "self_attn.v_proj.weight");
        if (family.ways == Ways::lfm2) {
            const std::pair<const char *, const char *> names[] = {
                {"input_layernorm.weight", "operator_norm.weight"},
                {"post_attention_layernorm.weight", "ffn_norm.weight"},
                {"self_attn.q_norm.weight", "self_attn.q_layernorm.weight"},
                {"self_attn.k_norm.weight", "self_attn.k_layernorm.weight"},
                {"mlp.gate_proj.weight", "feed_forward.w1.weight"},
                {"mlp.up_proj.weight", "feed_forward.w3.weight"},
                {"mlp.down_proj.weight", "feed_forward.w2.weight"},
                {"self_attn.o_proj.weight", layer.taps.data ? "conv.out_proj.weight" : "self_attn.out_proj.weight"},
                {"self_attn.o_proj.bias", "conv.out_proj.bias"}};
            for (const auto &[ours, theirs] : names) {
                all[prefix + theirs] = all[prefix + ours];
                all.erase(prefix + ours);
            }
            Tensor in = layer.key.weight, bias = layer.key.bias;  // of B, and those of C and x lie behind it
            in.rows *= 3, bias.cols *= 3;
            all[prefix + "conv.in_proj.weight"] = in, all[prefix + "conv.in_proj.bias"] = bias;
            all[prefix + "conv.conv.weight"] = layer.taps, all[prefix + "conv.conv.bias"] = layer.taps_bias;
            if (layer.taps.data)
                for (const char *part : {"q_proj", "k_proj", "v_proj"})
                    for (const char *what : {".weight", ".bias"}) all.erase(prefix + "self_attn." + part + what);
            else
                all[prefix + "conv.in_proj.weight"] = all[prefix + "conv.in_proj.bias"] = {};
            all["model.embedding_norm.weight"] = model.final_norm;
            all.erase("model.norm.weight");
        }
        if (!model.config.per_layer) continue;
        all["model.per_layer_projection_norm.weight"] = model.layer_norm;
        const PerLayer &more = layer.per_layer;
        const Tensor &first = model.layers[0].per_layer.projection.weight;  // those of all layers lie behind it
        all["model.per_layer_model_projection.weight"] = {first.data, first.type,
                                                          first.rows * (int64_t)model.layers.size(), first.cols};
        all["model.embed_tokens_per_layer.weight"] = model.layer_embedding;
        all[prefix + "per_layer_input_gate.weight"] = more.gate.weight;
        all[prefix + "per_layer_projection.weight"] = more.output.weight;
        all[prefix + "post_per_layer_input_norm.weight"] = more.out_norm;
    }
    return all;
}

TEST_CASE("every fixture loads with its sizes, and with what it is there for") {
    std::map<std::string, std::string> beside = {
        {"gemma3_vision", "multi_modal_projector.mm_input_projection_weight and 22 others"},
        {"ministral3_vision", "multi_modal_projector.linear_1.weight and 14 others"},
        {"mistral3_vision", "multi_modal_projector.linear_1.weight and 14 others"},
        {"gemma4_vision", "model.audio_tower.layers.0.feed_forward1.ffw_layer_1.input_max and 113 others"}};
    size_t directories = 0;
    for (const auto &entry : fs::directory_iterator(fixtures)) directories += entry.is_directory();
    CHECK(directories == std::size(expected));
    for (const Expected &want : expected) {
        CAPTURE(want.name);
        Model model = load_model(fixtures + want.name);
        const Config &config = model.config;
        CHECK(summary(config) == want.sizes + formatted(" context %d", want.context) + want.rest);
        CHECK(model.layers.size() == (size_t)config.layers);
        CHECK(config.rows.size() == (size_t)config.layers);
        CHECK((model.head.data == model.embedding.data) == config.tied);
        CHECK(config.dtype == std::vector<std::string>{"float32", "float16", "bfloat16"}[(size_t)model.embedding.type]);
        const Family &family = *config.family;
        CHECK(model.copies.empty() ==
              (!family.one_plus && !family.value_norms && config.logit_scale == 1));
        CHECK(model.beside == beside[want.name]);
        const LayerWeights &layer = model.layers.back();
        const Kind &kind = config.kind(config.layers - 1);
        CHECK(layer.query.weight.rows == (kind.taps ? 1 : config.heads) * kind.key_width);
        CHECK(layer.down.weight.cols == (config.shared_ffn ? config.shared_ffn : config.ffn));
        CHECK(model.final_norm.rows == 1);
        CHECK(model.final_norm.cols == config.hidden);
        CHECK(model.weight_bytes == model.parameters * dtype_bytes(model.embedding.type));
    }
}

TEST_CASE("every tensor holds the values Transformers finds under its name") {
    for (const Expected &want : expected) {
        Model model = load_model(fixtures + want.name);
        Json root = json_file(fixtures + want.name + "/expected.json");
        std::map<std::string, Tensor> tensors = by_name(model);
        std::set<std::string> seen;
        for (const Json *item : items_of(member(&root, "weights"))) {
            CAPTURE(want.name);
            CAPTURE(item->key);
            REQUIRE(tensors.count(item->key));
            const Tensor &tensor = tensors[item->key];
            REQUIRE(tensor.data);
            const int64_t count = tensor.rows * tensor.cols;
            const std::string name = item->key;
            const bool layers = name == "model.per_layer_projection_norm.weight", last = name == "model.norm.weight";
            const double factor = layers ? std::sqrt(0.5) : last ? model.config.logit_scale : 1;
            auto number = [&](int64_t i) { return value_at(tensor, i) / factor; };
            double sum = 0, largest = 0;
            for (int64_t i = 0; i < count; i++) {
                sum += number(i);
                largest = std::max(largest, std::fabs(number(i)));
            }
            if (factor != 1) {  // a norm that was scaled: float32 numbers once more
                CHECK(number(0) == doctest::Approx(item->items[0].number).epsilon(1e-6));
                CHECK(sum == doctest::Approx(item->items[2].number).epsilon(1e-6));
                seen.insert(item->key);
                continue;
            }
            CHECK(number(0) == item->items[0].number);
            CHECK(number(count - 1) == item->items[1].number);
            // Both sums are of the same numbers in double: count * 2^-53 of their size, and a good deal of slack.
            CHECK(std::fabs(sum - item->items[2].number) <= 1e-12 * (double)count * largest);
            seen.insert(item->key);
        }
        // What the reference does not have, the model has not either.
        for (const auto &entry : tensors) {
            if (contains(entry.first, ".layers.0.") && model.layers.size() > 1) continue;
            CHECK_MESSAGE((entry.second.data != nullptr) == (seen.count(entry.first) == 1),
                          want.name << ": " << entry.first);
        }
    }
}

static const std::string stories = "../shared/checkpoints/stories260K/";

TEST_CASE("the trained checkpoint next to the project, where it is" * doctest::skip(!fs::exists(stories))) {
    Model model = load_model(stories);
    CHECK(model.parameters == 260032);
    CHECK(model.config.ffn == 172);
    CHECK(model.config.tied);
}

// Defaults as in Transformers 5.23: LlamaConfig(), MistralConfig(), Qwen2Config(), Qwen3Config(). Null is not the same
// as missing where Transformers tells them apart.
TEST_CASE("a key that is missing has its family's default, and both spellings of one say the same") {
    const std::string llama3 = R"({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4})";
    const std::string theta = R"({"rope_type": "default", "rope_theta": 5e5})";
    const std::string llama = "llama 2 x 64 heads 8 / 4 x 8 vocab 100 context 2048",
                      mistral = "mistral 2 x 64 heads 8 / 8 x 8 vocab 100 context 131072";
    struct Family {
        std::string name, line;
        Keys keys;
    };
    std::vector<Family> cases = {
        {"Llama", "llama 2 x 64 heads 8 / 8 x 8 vocab 100 context 2048", {{"num_key_value_heads", ""}}},
        {"Mistral", mistral + " windows [4096, 4096]", {{"num_key_value_heads", ""}}},
        {"Mistral", mistral + " windows [4096, 4096]", {{"num_key_value_heads", "null"}}},
        {"Mistral",
         "mistral 2 x 64 heads 16 / 16 x 4 vocab 100 context 131072 windows [4096, 4096]",
         {{"num_key_value_heads", "null"}, {"num_attention_heads", "16"}}},
        {"Mistral", mistral, {{"num_key_value_heads", "8"}, {"sliding_window", "null"}}},
        {"Qwen2",
         "qwen2 2 x 128 heads 64 / 32 x 2 vocab 100 context 32768 bos -1 end [] qkv",
         {{"num_attention_heads", "64"}, {"hidden_size", "128"}, {"num_key_value_heads", ""}}},
        {"Qwen3", "qwen3 2 x 64 heads 8 / 4 x 128 vocab 100 context 32768 bos -1 end [] norms", {}},
        {"Qwen3",
         "qwen3 2 x 64 heads 8 / 4 x 128 vocab 100 context 32768 bos -1 end [] norms",
         {{"model_type", "\"qwen3\""}, {"architectures", ""}}},
        {"Llama", llama + " end []", {{"eos_token_id", "null"}}},
        {"Llama", llama + " bos -1", {{"bos_token_id", "null"}}},
        {"Llama", llama, {{"head_dim", "null"}, {"rope_scaling", "null"}}},
        {"Llama", llama + " float16", {{"torch_dtype", "\"torch.float16\""}}},
        {"Llama", llama + " bfloat16", {{"dtype", "\"bfloat16\""}}},
        {"Llama", llama + " theta 500000", {{"rope_parameters", theta}}},
        {"Llama", llama + " theta 500000", {{"rope_theta", "500000.0"}}},
        // original_max_position_embeddings: its own, or else the context.
        {"Llama",
         "llama 2 x 64 heads 8 / 4 x 8 vocab 100 context 777 rope / 8 (1 4 777)",
         {{"rope_scaling", llama3}, {"max_position_embeddings", "777"}}},
        {"Llama",
         llama + " rope / 8 (1 4 333)",
         {{"rope_scaling", llama3}, {"original_max_position_embeddings", "333"}}}};
    for (const std::string scaling :
         {R"({"type": "linear", "factor": 2.5})", R"({"rope_type": "linear", "factor": 2.5})"})
        for (const char *key : {"rope_scaling", "rope_parameters"})
            cases.push_back({"Llama", llama + " theta 7000 rope / 2.5", {{key, scaling}, {"rope_theta", "7000"}}});
    for (const auto &[name, line, keys] : cases) CHECK(summary(parse(config_text(keys, name))) == line);
}

// Of Gemma3TextConfig, Gemma4TextConfig and GraniteSWAConfig, 5.24. That of gemma-3-4b, as published, leaves out heads,
// KV heads, their width and the vocabulary.
TEST_CASE("kinds of layers: defaults, both spellings, a config inside another") {
    const std::string inside = R"("hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 7)";
    const std::string in_4b = R"({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152}, "text_config": {
        "model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, )";
    const std::string gemma = " windows [1024, 1024, 1024, 1024, 1024, 0, 1024] and theta 1e+06",
                      scaled = " embedding x 50.5964 scores x 0.0625 gelu norms tied";
    const std::string sizes = "gemma3_text 7 x 2560 heads 8 / 4 x 256 vocab 262208 context 131072 bos 2 end ";
    CHECK(summary(parse(in_4b + inside + "}}")) == sizes + "[1, 106]" + gemma + " / 8" + scaled + " bfloat16");
    auto gemma3 = [&](const std::string &more) {
        return summary(parse(R"({"model_type": "gemma3_text", "sliding_window": 1024, )" + more + inside + "}"));
    };
    CHECK(gemma3("") == sizes + "[1]" + gemma + scaled);
    const std::string turned = replaced(sizes, " bos", " theta 300 bos") + "[1]";
    CHECK(gemma3(R"("rope_theta": 5e5, "rope_local_base_freq": 300, )") ==
          turned + replaced(gemma, "1e+06", "500000") + scaled);
    CHECK(gemma3(R"("rope_theta": 9, "rope_local_base_freq": 9, "rope_parameters": {"sliding_attention": {"rope_theta":
                 300}, "full_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2}}, )") ==
          turned + replaced(gemma, "1e+06", "500000 / 2") + scaled);
    CHECK(gemma3(R"("query_pre_attn_scalar": 64, "sliding_window_pattern": 2, )") ==
          sizes + "[1] windows [1024, 0, 1024, 0, 1024, 0, 1024] and theta 1e+06" +
              replaced(scaled, "0.0625", "0.125"));

    // Gemma 4: the widths of global layers in both spellings, RoPE's defaults, the last layer.
    auto gemma4 = [&](const std::string &more) {
        return summary(
            parse(R"({"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, )" + more + inside + "}"));
    };
    auto wanted = [](int window, const std::string &global, const std::string &rows = "") {
        std::string w = std::to_string(window) + ", ";
        return "gemma4_text 7 x 2560 heads 8 / 4 x 256 vocab 262144 context 131072 bos 2 end [1] windows [" + w + w +
               w + w + w + "0, 0] and " + global + " and theta 1e+06 turns 0.25" + rows +
               " embedding x 50.5964 scores x 1 gelu norms tied";
    };
    CHECK(gemma4("") == wanted(512, "4 x 512"));
    CHECK(gemma4(R"("sliding_window": 9, "global_head_dim": 128, "num_global_key_value_heads": 2, )") ==
          wanted(9, "4 x 128"));  // these KV heads count only where K is V
    CHECK(gemma4(R"("per_layer_config": {"5": {"head_dim": 64, "num_key_value_heads": 1}, "6": {"head_dim": 64,
                 "num_key_value_heads": 1}}, "num_kv_shared_layers": 1, )") == wanted(512, "1 x 64", " 6 reads 1:0"));

    // Granite SWA: the first of four layers sees everything, unless layer_types says otherwise.
    auto granite = [&](const std::string &more) {
        return summary(parse(R"({"model_type": "granite_swa", )" + more + inside + "}"));
    };
    const std::string shape = "granite_swa 7 x 2560 heads 20 / 4 x 128 vocab 100352 context 8192 eps 1e-05";
    CHECK(granite("") == shape + " bos 100257 end [100257] windows [0, 128, 128, 128, 0, 128, 128] scores x 1 tied");
    CHECK(
        granite(R"("layer_rope_theta": [0, 500, 500, 500, 0, 500, 500], "attention_multiplier": 0.5, )") ==
        shape +
            " theta 0 bos 100257 end [100257] windows [0, 128, 128, 128, 0, 128, 128] and theta 500 scores x 0.5 tied");
    const std::string sliding = R"("sliding_attention", )";
    CHECK(granite(R"("embedding_multiplier": 12, "layer_types": [)" + sliding + sliding + sliding + sliding + sliding +
                  sliding + R"("full_attention"], )") ==
          shape + " bos 100257 end [100257] windows [128, 128, 128, 128, 128, 128, 0] embedding x 12 scores x 1 tied");
}

// Of Lfm2Config and Lfm2MLP, 5.24.
TEST_CASE("short convolutions: defaults, both spellings, which layers, the rows of the MLP") {
    auto lfm2 = [&](const Keys &keys) { return parse(config_text(keys, "Lfm2")); };
    const std::string sizes = "lfm2 2 x 64 heads 8 / 4 x 8 vocab 100 context 128000 eps 1e-05 theta 1e+06",
                      mixed = " windows [3, 0] and 1 x 64 and theta 0 norms tied";
    CHECK(summary(lfm2({})) == sizes + " norms tied");
    CHECK(summary(lfm2({{"layer_types", R"(["conv", "full_attention"])"}})) == sizes + mixed);
    CHECK(summary(lfm2({{"full_attn_idxs", "[1]"}})) == sizes + mixed);
    CHECK(summary(lfm2({{"full_attn_idxs", "[0, 1]"}, {"layer_types", R"(["conv", "full_attention"])"}})) ==
          sizes + mixed);
    CHECK(summary(lfm2({{"full_attn_idxs", "[1]"},
                        {"conv_L_cache", "7"},
                        {"tie_embedding", "false"},
                        {"norm_eps", "1e-6"},
                        {"rope_theta", "500"}})) ==
          replaced(replaced(sizes, " eps 1e-05", ""), "1e+06", "500") + " windows [7, 0] and 1 x 64 and theta 0 norms");
    const Config c = lfm2({{"full_attn_idxs", "[1]"}, {"conv_bias", "true"}});
    CHECK((c.convolution_bias && c.kinds[0].taps == 0 && c.kinds[1].taps == 3 && c.kinds[1].value_width == 0));
    CHECK((c.rows[0].kind == 1 && c.rows[1].kind == 0 && c.kinds[0].layers == 1 && c.kinds[1].layers == 1));
    const std::pair<Keys, int> rows[] = {
        {{}, 256},
        {{{"block_multiple_of", "10"}}, 90},  // 85 of 128
        {{{"block_multiple_of", "10"}, {"block_ffn_dim_multiplier", "1.5"}}, 130},
        {{{"block_multiple_of", "5"}}, 85},
        {{{"block_auto_adjust_ff_dim", "false"}}, 128},
        {{{"block_ff_dim", "12288"}}, 8192},
        {{{"block_ff_dim", "12288"}, {"intermediate_size", ""}, {"block_auto_adjust_ff_dim", "false"}}, 12288}};
    for (const auto &[keys, ffn] : rows) CHECK(lfm2(keys).ffn == ffn);

    const std::string words = "an entry of layer_types is ", conv = ", expected conv or full_attention";
    check_cases("Lfm2",
                {{{{"conv_L_cache", "0"}}, "config.json: conv_L_cache is 0, expected a whole number from 1 to 1000"},
                 {{{"conv_L_cache", "-3"}}, "conv_L_cache is -3"},
                 {{{"conv_L_cache", "1e9"}}, "conv_L_cache is 1000000000"},
                 {{{"conv_L_cache", "2.5"}}, "conv_L_cache is 2.5"},
                 {{{"conv_L_cache", "\"3\""}}, "conv_L_cache is \"3\""},
                 {{{"conv_bias", "1"}}, "config.json: conv_bias is 1, expected true or false"},
                 {{{"layer_types", R"(["conv"])"}}, R"(layer_types is ["conv"], expected a list of 2)"},
                 {{{"layer_types", R"(["conv", "conv", "full_attention"])"}}, "expected a list of 2"},
                 {{{"layer_types", "\"conv\""}}, "expected a list of 2"},
                 {{{"layer_types", R"(["conv", "mamba"])"}}, words + "\"mamba\"" + conv},
                 {{{"layer_types", R"(["sliding_attention", "conv"])"}}, words + "\"sliding_attention\"" + conv},
                 {{{"layer_types", R"([1, "conv"])"}}, words + "1" + conv},
                 {{{"layer_types", R"(["conv", "conv"])"}},
                  "config.json: all layers are convolutions, expected one with attention at least"},
                 {{{"full_attn_idxs", "[]"}}, "all layers are convolutions"},
                 {{{"full_attn_idxs", "1"}}, "full_attn_idxs is 1, expected a list of at most 2"},
                 {{{"full_attn_idxs", "[0, 1, 1]"}}, "full_attn_idxs is [0,1,1], expected a list of at most 2"},
                 {{{"full_attn_idxs", "[2]"}}, "an entry of full_attn_idxs is 2, expected a layer from 0 to 1"},
                 {{{"full_attn_idxs", "[-1]"}}, "an entry of full_attn_idxs is -1"},
                 {{{"full_attn_idxs", "[\"1\"]"}}, "an entry of full_attn_idxs is \"1\""},
                 {{{"block_ff_dim", "0"}}, "block_ff_dim is 0"},
                 {{{"block_multiple_of", "0"}}, "block_multiple_of is 0"},
                 {{{"block_multiple_of", "true"}}, "block_multiple_of is true"},
                 {{{"block_ffn_dim_multiplier", "-1"}}, "block_ffn_dim_multiplier is -1"},
                 {{{"block_ffn_dim_multiplier", "\"1\""}}, "block_ffn_dim_multiplier is \"1\""},
                 {{{"block_ffn_dim_multiplier", "1e6"}}, "make an MLP of 85000192 rows, expected 1 to 16777216"},
                 {{{"block_ff_dim", "1"}}, "make an MLP of 0 rows"},
                 {{{"block_auto_adjust_ff_dim", "1"}}, "block_auto_adjust_ff_dim is 1, expected true or false"},
                 {{{"tie_embedding", "0"}}, "tie_embedding is 0, expected true or false"},
                 {{{"norm_eps", "0"}}, "norm_eps is 0"}});
}

TEST_CASE("end ids: generation_config.json goes before config.json") {
    std::string config = config_text({{"eos_token_id", "[3, 4]"}, {"bos_token_id", "9"}});
    const std::pair<const char *, std::vector<int>> cases[] = {{"", {3, 4}},
                                                               {"{}", {3, 4}},
                                                               {R"({"eos_token_id": 5})", {5}},
                                                               {R"({"eos_token_id": [5, 6, 7]})", {5, 6, 7}},
                                                               {R"({"eos_token_id": null})", {3, 4}}};
    for (const auto &[generation, ids] : cases) CHECK(parse(config, generation).end_ids == ids);
    CHECK(parse(config, R"({"bos_token_id": 8})").bos_id == 8);
    CHECK(parse(config).bos_id == 9);
}

TEST_CASE("a window of Qwen: which layers have one") {
    struct Window {
        std::string family, used, first;
        std::vector<int> windows;
    };
    const std::vector<int> none = {0, 0, 0, 0}, all = {16, 16, 16, 16};
    const Window cases[] = {{"Qwen2", "true", "", none},  // from layer 28 on
                            {"Qwen2", "true", "3", {0, 0, 0, 16}}, {"Qwen3", "true", "0", all},
                            {"Llama", "true", "0", none},          {"Qwen2", "false", "0", none},
                            {"Mistral", "false", "0", all}};
    for (const auto &[family, used, first, windows] : cases) {
        Keys keys = {{"num_hidden_layers", "4"},
                     {"sliding_window", "16"},
                     {"use_sliding_window", used},
                     {"max_window_layers", first}};
        CHECK(windows_of(parse(config_text(keys, family))) == windows);
        keys["max_position_embeddings"] = "16";  // no text is longer than such a window: there is none
        CHECK(windows_of(parse(config_text(keys, family))) == none);
        keys["max_position_embeddings"] = "17";
        CHECK(windows_of(parse(config_text(keys, family))) == windows);
    }
}

// ---- The head and the embedding ------------------------------------------------------------------------------------

// A file with one tensor more behind its others.
std::string add_tensor(const std::string &file, const std::string &name, const std::string &type,
                       const std::string &shape, const std::string &data) {
    std::string header = header_of(file), body = file.substr(8 + header.size());
    header.erase(header.find_last_of('}'));
    header += formatted(R"(, "%s": {"dtype": "%s", "shape": %s, "data_offsets": [%zu, %zu]}})", name.c_str(),
                        type.c_str(), shape.c_str(), body.size(), body.size() + data.size());
    return safetensors(header, body + data);
}

TEST_CASE("tied, and what is stored") {
    Checkpoint scratch("llama_bf16");
    std::string file = slurp(scratch / "model.safetensors"), config = slurp(scratch / "config.json");
    Model tied = load_model(scratch.str());
    const std::string embedding((const char *)tied.embedding.data, 64 * 64 * 2);

    SUBCASE("a head is stored, too: it is used") {
        spill(scratch / "model.safetensors",
              add_tensor(file, "lm_head.weight", "BF16", "[64, 64]", std::string(64 * 64 * 2, '\x3f')));
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
        std::string untied = replaced(config, "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
        check_contains(scratch.error_with("config.json", untied),
                       "/model.safetensors: tensor lm_head.weight is missing, config.json asks for it");
    }
}

TEST_CASE("a tensor of another computation is refused; of none, whatever its type, ignored") {
    Checkpoint scratch("llama_bf16");
    const std::string path = scratch / "model.safetensors", file = slurp(path);
    auto with = [&](const std::string &name, const std::string &type) {
        return scratch.error_with("model.safetensors", add_tensor(file, name, type, "[1]", "12345678"));
    };
    for (const std::string name : {"model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq",
                                   "score.weight", "v_head.summary.bias", "odd"}) {
        CHECK(with(name, "I64") == "");
        CHECK(with(name, "F4") == "");
    }
    for (const std::string name :
         {"model.layers.0.pre_feedforward_layernorm.weight", "model.layers.0.self_attn.q_norm.weight",
          "model.layers.1.self_attn.q_proj.bias", "model.layers.1.self_attn.sinks", "model.layers.2.mlp.up_proj.weight",
          "model.norm.bias", "model.embed_positions.weight", "lm_head.bias"}) {
        CHECK(with(name, "I64") == path + ": tensor " + name + " is none of a LlamaForCausalLM with 2 layers: " +
                                       "config.json must name the architecture it belongs to");
    }
}

// The text half under each name that versions of Transformers gave it; what belongs to images has one of its own.
TEST_CASE("a text model inside a larger one, and weights that its shared layers do not use") {
    Checkpoint scratch("gemma3_vision");
    const std::string path = scratch / "model.safetensors", file = slurp(path);
    const Model old = load_model(scratch.str());
    std::string renamed = file;
    for (size_t at; (at = renamed.find("\"language_model.model.")) != std::string::npos;)
        renamed.replace(at, 22, "\"model.language_model.");
    CHECK(scratch.error_with("model.safetensors", renamed) == "");
    const Model model = load_model(scratch.str());
    CHECK(model.parameters == old.parameters);
    CHECK(value_at(model.layers[2].down.weight, 3) == value_at(old.layers[2].down.weight, 3));
    CHECK(model.beside == old.beside);
    const std::string head(64 * 24 * 2, '\x3f');
    spill(path, add_tensor(file, "language_model.lm_head.weight", "BF16", "[64, 24]", head));
    const Model untied = load_model(scratch.str());
    CHECK_FALSE(untied.config.tied);
    CHECK(memcmp(untied.head.data, head.data(), head.size()) == 0);
    check_contains(scratch.error_with("model.safetensors",
                                      add_tensor(file, "language_model.model.layers.3.x", "BF16", "[1]", "12")),
                   "tensor language_model.model.layers.3.x is none of a Gemma3ForCausalLM with 3 layers");

    Checkpoint shared("gemma4_shared");
    const std::string weights = slurp(shared / "model.safetensors");
    auto with = [&](const std::string &name) {
        return shared.error_with("model.safetensors", add_tensor(weights, "model.layers." + name, "BF16", "[1]", "12"));
    };
    for (const char *name : {"k_proj", "v_proj", "k_norm", "v_norm"})
        CHECK(with(std::string("4.self_attn.") + name + ".weight") == "");
    for (const char *name : {"3.self_attn.v_norm.weight", "4.self_attn.k_proj.bias", "4.per_layer_projection.weight"})
        check_contains(with(name), "is none of a Gemma4ForCausalLM with 7 layers");
}

TEST_CASE("a base model as Transformers saves it, alone or as a part: names without model., its own class or another") {
    const struct {
        std::string fixture, from, to, architecture, base;
    } cases[] = {
        {"qwen3", "\"model.", "\"", "Qwen3ForCausalLM", "Qwen3Model"},
        {"gemma3", "\"model.", "\"", "Gemma3ForCausalLM", "Gemma3TextModel"},
        {"lfm2", "\"model.", "\"", "Lfm2ForCausalLM", "Lfm2Model"},
        {"gemma3_vision", "\"language_model.model.", "\"language_model.", "Gemma3ForConditionalGeneration",
         "Gemma3Model"},
    };
    for (const auto &[fixture, from, to, architecture, base] : cases) {
        Checkpoint scratch(fixture);
        const std::string file = slurp(scratch / "model.safetensors"), config = slurp(scratch / "config.json");
        const Model old = load_model(scratch.str());
        const double weight = value_at(old.layers[1].down.weight, 3);  // before the file is another one
        std::string header = header_of(file), data = file.substr(8 + header.size());
        for (size_t at; (at = header.find(from)) != std::string::npos;) header.replace(at, from.size(), to);
        const std::string flat = safetensors(header, data);
        CHECK(scratch.error_with("model.safetensors", flat) == "");
        CHECK(scratch.error_with("config.json", replaced(config, architecture, base)) == "");
        const Model model = load_model(scratch.str());
        CHECK((model.config.tied && model.parameters == old.parameters && model.beside == old.beside));
        CHECK(value_at(model.layers[1].down.weight, 3) == weight);
        // Its own tensors are all used; a head for another task is not the text model's.
        const std::string prefix = to.substr(1);
        check_contains(
            scratch.error_with("model.safetensors", add_tensor(flat, prefix + "layers.9.x", "BF16", "[1]", "12")),
            "tensor " + prefix + "layers.9.x is none of a ");
        CHECK(scratch.error_with("model.safetensors", add_tensor(flat, "score.weight", "BF16", "[1]", "12")) == "");
        check_contains(load_model(scratch.str()).beside, fixture == "gemma3_vision" ? "others" : "score.weight");
        if (fixture != "qwen3") continue;
        const std::string untied = replaced(config, "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
        spill(scratch / "model.safetensors", flat);
        check_contains(scratch.error_with("config.json", untied), "tensor lm_head.weight is missing");
    }
}

TEST_CASE("a checkpoint under another architecture's name is refused, naming its first tensor too many") {
    struct Renamed {
        std::string fixture, from, to, tensor;
    };
    const Renamed cases[] = {
        {"qwen3", "Qwen3ForCausalLM", "LlamaForCausalLM", "model.layers.0.self_attn.k_norm.weight"},
        {"qwen2_14_on_2", "Qwen2ForCausalLM", "LlamaForCausalLM", "model.layers.0.self_attn.k_proj.bias"},
        {"llama_bias", "LlamaForCausalLM", "MistralForCausalLM", "model.layers.0.mlp.down_proj.bias"},
        {"llama_bias", "\"mlp_bias\": true", "\"mlp_bias\": false", "model.layers.0.mlp.down_proj.bias"},
        {"llama_mha", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1", "model.layers.1.input_layernorm.weight"}};
    for (const auto &[fixture, from, to, tensor] : cases) {
        Checkpoint scratch(fixture);
        std::string config = replaced(slurp(scratch / "config.json"), from, to);
        if (size_t at = config.find("\"model_type\""); from != to && from[0] != '"')  // the architecture says it
            config.erase(at, config.find('\n', at) - at);
        check_contains(scratch.error_with("config.json", config),
                       "model.safetensors: tensor " + tensor + " is none of a ");
    }
}

TEST_CASE("tensors at odd addresses are copied, alone, and have the same values") {
    for (const std::string name : {"llama_mha", "llama_f16", "llama_bf16"}) {
        Checkpoint scratch(name);
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
    auto mapped = [] { return contains(slurp("/proc/self/maps"), ".safetensors"); };
    const auto before = open_files();
    {
        Model model = load_model(fixtures + "llama_sharded");
        CHECK(open_files() == before);
        CHECK(mapped());
    }
    Checkpoint scratch("llama_sharded");
    CHECK(scratch.error_with("model-00003-of-00003.safetensors", "short") != "");
    CHECK(open_files() == before);
    CHECK_FALSE(mapped());
}

// ---- A broken directory --------------------------------------------------------------------------------------------

TEST_CASE("files that are not there, or are no files") {
    Scratch empty;
    const std::pair<std::string, std::string> directories[] = {
        {empty / "nowhere", "/nowhere/config.json: cannot open it: No such file or directory; expected the directory"},
        {fixtures + "llama_mha/config.json",
         "cannot open it: Not a directory; it is a file: give its directory, -m " + fixtures + "llama_mha"},
        {empty.str(), "/config.json: cannot open it: No such file or directory; expected the directory that holds"},
        {empty / "no\nsuch\tplace\x1b[31m", "no?such?place?[31m"}};
    for (const auto &[directory, line] : directories)
        check_contains(error_of([&, name = directory] { load_model(name); }), line);
    for (const char *name : {"config.json", "generation_config.json", "model.safetensors"}) {
        Checkpoint broken("llama_mha");
        const std::string path = broken / name;
        CHECK(broken.error_with(name, "") == path + ": is empty");
        fs::remove(path);
        fs::create_directory(path);
        CHECK(broken.error() == path + ": is a directory, expected a file");
        fs::remove(path);
        REQUIRE(mkfifo(path.c_str(), 0600) == 0);
        CHECK(broken.error() == path + ": is not a regular file");
        for (const char *target : {"nowhere", name}) {  // a link that dangles, one that leads to itself
            fs::remove(path);
            fs::create_symlink(target, path);
            check_contains(broken.error(), path + ": cannot open it: ");
        }
    }
    Checkpoint broken("llama_mha");
    fs::remove(broken / "generation_config.json");  // which is optional
    CHECK(broken.error() == "");
    CHECK(load_config(broken.str()).end_ids == std::vector<int>{2});
    spill(broken / "model.safetensors", "short");
    CHECK(error_of([&] { load_model(broken.str() + "/"); }) ==  // the directory is named as it was given
          broken.str() + "/model.safetensors: is 5 bytes long, too short for a safetensors file");
    fs::remove(broken / "model.safetensors");
    check_contains(broken.error_with("pytorch_model.bin", "x"),
                   ": neither model.safetensors nor model.safetensors.index.json is there");
}

// ---- A broken config -----------------------------------------------------------------------------------------------

TEST_CASE("config values that cannot be, and keys that must be there") {
    struct Group {
        std::vector<std::string> keys, values;
        std::string expected;
    };
    const std::vector<std::string> sizes = {"hidden_size", "intermediate_size", "num_attention_heads"};
    const Group groups[] = {
        {sizes,
         {"0", "-1", "-64", "64.5", "1e9", "99999999999999999999", "1e999", "-1e999", "\"64\"", "true", "[64]", "{}"},
         "a whole number from 1 to 16777216"},
        {{"vocab_size"},
         {"0", "-1", "-64", "64.5", "16777216", "1e9", "99999999999999999999", "1e999", "-1e999", "\"64\"", "true",
          "[64]", "{}"},
         "a whole number from 1 to 16777215"},
        {{"num_key_value_heads", "head_dim"},
         {"0", "-1", "64.5", "1e9", "1e999", "\"64\"", "true", "{}"},
         "a whole number from 1 to 16777216"},
        {{"num_hidden_layers"},
         {"0", "-1", "2.5", "1000000", "4294967297", "1e30", "\"2\""},
         "a whole number from 1 to 10000"},
        {{"max_position_embeddings"}, {"0", "-1", "0.5", "1e12", "\"x\""}, "a whole number from 1 to 1073741824"},
        {{"rms_norm_eps"}, {"0", "-1e-6", "2", "1e999", "\"1e-6\"", "false"}, "a number from 1e-30 to 1"},
        {{"rope_theta"}, {"0", "-10000", "0.5", "1e300", "1e999", "\"10000\""}, "a number from 1 to 1e+15"},
        {{"tie_word_embeddings", "attention_bias", "mlp_bias"}, {"1", "\"true\"", "[]"}, "true or false"},
        {{"hidden_act", "torch_dtype", "dtype", "model_type"}, {"3"}, "a text"},
        {{"eos_token_id"},
         {"-1", "100", "1e99", "1.5", "\"2\"", "[1, 100]", "[\"a\"]", "{\"a\": 1}", "true"},
         "ids from 0 to 99 (vocab_size - 1)"},
        {{"architectures"}, {R"(["LlamaForCausalLM", "X"])", "[]", "\"Llama\"", "[7]"}, "a list of one name"},
        {{"bos_token_id"}, {"100", "-1"}, "a whole number from 0 to 99"}};
    for (const auto &[keys, values, expected] : groups) {
        for (const std::string &key : keys) {
            for (const std::string &value : values) {
                check_contains(refusal(config_text({{key, value}})), "config.json: " + key + " is ",
                               ", expected " + expected);
            }
        }
    }
    check_cases({{{{"hidden_size", "\"0\""}},
                  "config.json: hidden_size is \"0\", expected a whole number from 1 to 16777216"}});
    for (const std::string key : {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                  "vocab_size", "architectures"})
        for (const char *value : {"", "null"}) check_cases({{{{key, value}}, "config.json: " + key + " is missing"}});
}

TEST_CASE("what does not fit, is not supported, or stands twice") {
    check_cases(
        {{{{"num_key_value_heads", "3"}}, "num_attention_heads is 8, expected a multiple of num_key_value_heads, 3"},
         {{{"num_key_value_heads", "16"}}, "num_attention_heads is 8, expected a multiple of num_key_value_heads, 16"},
         {{{"hidden_size", "65"}}, "hidden_size is 65, expected a multiple of num_attention_heads, 8 (or a head_dim)"},
         {{{"hidden_size", "65"}, {"head_dim", "8"}}, ""},
         {{{"head_dim", "7"}}, "head_dim is 7, expected an even number: RoPE turns pairs"},
         {{{"hidden_size", "72"}}, "head_dim is 9, expected an even"},
         {{{"hidden_size", "4"}}, "hidden_size is 4, expected a mult"},
         {{{"head_dim", "16777216"}}, "num_attention_heads * head_dim is 134217728, expected at most 16777216"},
         {{{"architectures", "[\"GPT2LMHeadModel\"]"}},
          "config.json: architecture GPT2LMHeadModel is not supported: nearest is LlamaForCausalLM, without its "
          "learned positions and LayerNorm"},
         {{{"architectures", "[\"OPTForCausalLM\"]"}},
          "config.json: architecture OPTForCausalLM is not supported; supported are Llama Mistral Ministral3 Qwen2 "
          "Qwen3 SmolLM3 Olmo2 Phi3 Granite GraniteMoeHybrid GraniteSWA Gemma3 Gemma4 Lfm2, each ForCausalLM"},
         {{{"architectures", "[\"LlamaModel\"]"}}, ""},
         {{{"architectures", "[\"Llama\"]"}}, "architecture Llama is not supported"},
         {{{"architectures", ""}, {"model_type", "\"gemma2\""}}, "architecture gemma2 is not supported"},
         {{{"architectures", ""}, {"model_type", "\"LlamaForCausalLM\""}}, "LlamaForCausalLM is not supported"},
         {{{"model_type", "\"mistral\""}}, "model_type is mistral, but LlamaForCausalLM asks for llama"},
         {{{"hidden_act", "\"gelu\""}},
          "config.json: hidden_act gelu is not supported; supported are silu gelu_pytorch_tanh"},
         {{{"hidden_activation", "\"gelu_pytorch_tanh\""}},
          "config.json: hidden_activation is \"gelu_pytorch_tanh\", expected silu, as hidden_act says"},
         {{{"hidden_act", "\"swish\""}}, ""},
         {{{"torch_dtype", "\"float64\""}}, "dtype float64 is not supported; supported are float32 float16 bfloat16"},
         {{{"dtype", "\"float8_e4m3fn\""}}, "dtype float8_e4m3fn is not supported"},
         {{{"dtype", "\"float32 float16\""}}, "dtype float32 float16 is not supported"},
         {{{"quantization_config", R"({"quant_method": "gptq", "bits": 4})"}},
          R"(quantization_config is {"quant_method":"gptq","bits":4}, expected weights as they were trained)"},
         {{{"rope_scaling", R"({"factor": 1, "factor": 2})"}}, "key \"factor\" stands twice"},
         {{{"x", R"([[{"a": 1, "a": 1}]])"}}, "key \"a\" stands twice"},
         {{{"x", R"({"a": {"a": 1}, "b": {"a": 2}})"}}, ""}});
    check_contains(refusal(replaced(config_text({}), "{", "{\"hidden_size\": 32, ")),
                   "config.json: key \"hidden_size\" stands twice in one object");
}

TEST_CASE("keys by which another architecture's config gives itself away") {
    struct Group {
        std::vector<std::string> keys, foreign, neutral;
    };
    const Group groups[] = {
        // Granite, MiniCPM, Phi
        {{"embedding_multiplier", "residual_multiplier", "logits_scaling", "scale_emb", "partial_rotary_factor"},
         {"12.0", "0.22", "0", "\"8\""},
         {"1", "1.0", "null"}},
        // Gemma 2, OLMo, SmolLM3, Llama 4, MPT, DeepSeek
        {{"attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "no_rope_layer_interval", "alibi",
          "attention_chunk_size", "num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank",
          "use_qk_norm"},
         {"50.0", "8", "true", "[64]", "{\"a\": 1}"},
         {"null", "false", "0", "[]", "{}", "\"\""}},
        {{"no_rope_layers"}, {"[1, 0]", "[0, 0]"}, {"[1, 1]", "[]"}},  // 0 is a layer without
        {{"is_causal"}, {"false"}, {"true", "null"}},
        {{"attention_multiplier"}, {"0.0078125", "1.0"}, {"0.35355339059327379", "0.353553"}},  // 1 / sqrt(8)
        {{"query_pre_attn_scalar"}, {"224"}, {"8"}},
        {{"scale_depth"}, {"1.4"}, {"1.4142136"}},
        {{"dim_model_base"}, {"256"}, {"64"}}};
    for (const auto &[keys, foreign, neutral] : groups) {
        for (const std::string &key : keys) {
            for (const std::string &value : neutral) check_cases({{{{key, value}}, ""}});
            for (const std::string &value : foreign) {
                check_contains(refusal(config_text({{key, value}})),
                               "config.json: " + key + " is " + value.substr(0, 1),
                               ", or no such key: LlamaForCausalLM computes without it");
            }
        }
    }
    check_cases({{{{"residual_multiplier", "0.22"}},
                  "config.json: residual_multiplier is 0.22, expected 1, or no such key: LlamaForCausalLM computes "
                  "without it"}});
    check_cases("Qwen3", {{{{"use_qk_norm", "true"}}, ""}, {{{"use_qk_norm", "false"}}, "expected 1, or no"}});
}

TEST_CASE("what of Gemma and Granite is not computed here, or makes no sense") {
    check_cases("Gemma3", {{{{"use_bidirectional_attention", "true"}}, "use_bidirectional_attention is true"},
                           {{{"attn_logit_softcapping", "50.0"}}, "attn_logit_softcapping is 50"},
                           {{{"query_pre_attn_scalar", "0"}}, "query_pre_attn_scalar is 0, expected a number"},
                           {{{"num_kv_shared_layers", "1"}}, "num_kv_shared_layers is 1, expected 0"},
                           {{{"sliding_window_pattern", "0"}}, "sliding_window_pattern is 0, expected a whole"},
                           {{{"rope_local_base_freq", "0"}}, "rope_local_base_freq is 0, expected a number"},
                           {{{"hidden_activation", "\"silu\""}}, ""}});
    auto gemma4 = [](Keys keys) {
        keys.insert({"hidden_size_per_layer_input", "0"});
        return keys;
    };
    check_cases("Gemma4", {{gemma4({{"enable_moe_block", "true"}}), "enable_moe_block is true"}});
    const std::string shared = "config.json: num_kv_shared_layers is 1, but layer 1 has no earlier one of its kind";
    check_cases(
        "Gemma4",
        {{gemma4({}), ""},
         {{}, ""},
         {gemma4({{"num_kv_shared_layers", "2"}}), "num_kv_shared_layers is 2, expected a whole number from 0 to 1"},
         {gemma4({{"num_kv_shared_layers", "1"}}), shared + " whose rows it could read"},
         {gemma4({{"global_head_dim", "33"}}), "head_dim is 33, expected an even number"},
         {gemma4({{"per_layer_config", R"({"1": {"head_dim": 9}})"}}),
          "per_layer_config: 1: head_dim is 9, expected an even number"},
         {gemma4({{"per_layer_config", R"({"1": {"num_key_value_heads": 3}})"}}), "expected a multiple of num_key"},
         {gemma4({{"per_layer_config", R"({"1": {"sliding_window": 3}})"}}),
          "per_layer_config: 1: sliding_window is 3, expected no such key"}});
    check_cases("GraniteSWA",
                {{{{"layer_rope_theta", "[1]"}}, "layer_rope_theta is [1], expected a number for each of the layers"},
                 {{{"layer_rope_theta", "[1, -1]"}}, "layer_rope_theta is -1, expected numbers from 0"},
                 {{{"attention_multiplier", "0"}}, "attention_multiplier is 0, expected a number"},
                 {{{"logits_scaling", "0"}}, "logits_scaling is 0, expected a number from 1e-09"},
                 {{{"residual_multiplier", "0"}}, "residual_multiplier is 0, expected a number from 1e-06"}});
    check_cases({{{{"layer_rope_theta", "[1e4, 1e4]"}}, "layer_rope_theta is [10000,10000], expected 0"},
                 {{{"per_layer_config", R"({"0": {"num_key_value_heads": 2}})"}}, "expected 0, or no such key"},
                 {{{"text_config", "{}"}}, "architecture LlamaForCausalLM is not supported"}});
    check_contains(refusal(R"({"architectures": ["Gemma3ForConditionalGeneration"], "text_config":
                                {"model_type": "llama"}})"),
                   "config.json: text_config: model_type llama is not supported; supported is gemma3_text");
}

TEST_CASE("keys of the newer families, each with values that make no sense") {
    struct Group {
        std::string family, key, expected;
        std::vector<std::string> values;
    };
    const std::string many = "[" + std::string(4000, '1') + "]";
    const Group groups[] = {
        {"Phi3", "partial_rotary_factor", "a number from 0 to 1", {"2", "-0.5", "\"1\"", "[1]", "1e999"}},
        {"Granite", "residual_multiplier", "a number from 1e-06 to 1e+06", {"0", "-1", "\"1\"", "1e9", "[]"}},
        {"Granite", "logits_scaling", "a number from 1e-09 to 1e+09", {"0", "-8", "true", "1e30"}},
        {"Granite", "embedding_multiplier", "a number from -1e+09 to 1e+09", {"\"12\"", "1e30", "{}"}},
        {"Granite", "attention_multiplier", "a number from 1e-09 to 1e+09", {"0", "-1", "\"\"", "1e30"}},
        {"SmolLM3", "no_rope_layers", "a list of 2 (num_hidden_layers)", {"[1]", "[1, 1, 1]", "3", "\"x\""}},
        {"SmolLM3", "no_rope_layers", "0 or 1", {"[1, 2]", "[-1, 1]", "[0.5, 1]", "[1, \"0\"]"}},
        {"SmolLM3", "no_rope_layer_interval", "a whole number from 1 to 10000", {"0", "-4", "1e9", "[4]"}},
        {"Gemma4", "hidden_size_per_layer_input", "a whole number from 0", {"-1", "1e9", "8.5", "\"8\""}},
        {"Gemma4", "vocab_size_per_layer_input", "a whole number from 100", {"99", "-1", "1e9", "[]"}},
        {"Gemma4", "final_logit_softcapping", "a number from 0 to 1e+09", {"-1", "\"30\"", "1e30", "[30]"}},
        {"Gemma4", "use_double_wide_mlp", "true or false", {"1", "\"true\"", "[]"}},
        {"Gemma4", "attention_k_eq_v", "true or false", {"2", "\"true\"", "[]"}},
        {"Phi3", "original_max_position_embeddings", "a whole number from 2", {"0", "1", "-4096", "1e12"}},
    };
    for (const Group &group : groups) {
        for (const std::string &value : group.values) {
            Keys keys = {{group.key, value}};
            if (group.key == "original_max_position_embeddings")
                keys["rope_scaling"] =
                    R"({"type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [1, 1, 1, 1]})";
            check_cases(group.family, {{keys, "expected " + group.expected}});
        }
    }
    check_cases("Phi3", {{{{"partial_rotary_factor", "0.75"}}, ""},
                         {{{"partial_rotary_factor", "0.4"}}, "in a head 3 of 8 numbers turn, expected an even"}});
    check_cases("Gemma4", {{{{"attention_k_eq_v", "true"}, {"num_global_key_value_heads", "0"}},
                            "num_global_key_value_heads is 0, expected a whole number from 1"}});
    for (const std::string bad : {"[1, 1, 1]", "[1, 1, 1, 1, 1]", "[1, 1, 1, 0]", "[1, 1, 1, -2]", "[1, 1, 1, \"2\"]",
                                  "4", "[1, 1, 1, 1e30]", "[[1], 1, 1, 1]", "\"1 1 1 1\"", many.c_str()})
        for (const std::string key : {"short_factor", "long_factor"}) {
            const std::string other = key == "short_factor" ? "long_factor" : "short_factor";
            const std::string rope =
                R"({"type": "longrope", ")" + key + "\": " + bad + ", \"" + other + "\": [1, 1, 1, 1]}";
            check_cases("Phi3", {{{{"rope_scaling", rope}}, key + " is " + bad.substr(0, 1)}});
            check_contains(refusal(config_text({{"rope_scaling", rope}}, "Phi3")),
                           "expected a list of 4 numbers from 1e-06 to 1e+06");
        }
    auto yarn = [](const std::string &line, const std::string &key, const std::string &value) {
        return Case{{{"rope_scaling", R"({"type": "yarn", "factor": 4, ")" + key + "\": " + value + "}"}}, line};
    };
    check_cases({yarn("", "truncate", "false"), yarn("truncate is 1, expected true or false", "truncate", "1"),
                 yarn("beta_fast is 0.5, expected more than beta_slow, 1", "beta_fast", "0.5"),
                 yarn("beta_slow is -1, expected a number", "beta_slow", "-1"),
                 yarn("mscale is -1, expected a number from 0", "mscale", "-1"),
                 yarn("mscale_all_dim is [], expected a number from 0", "mscale_all_dim", "[]"),
                 yarn("attention_factor is 0, expected a number from 0.001", "attention_factor", "0"),
                 yarn("original_max_position_embeddings is 0, expected", "original_max_position_embeddings", "0")});
    check_cases("Ministral3",
                {yarn("llama_4_scaling_beta is -1, expected a number from 0", "llama_4_scaling_beta", "-1"),
                 yarn("llama_4_scaling_beta is \"x\", expected a number", "llama_4_scaling_beta", "\"x\"")});
}

// Found by comparing random and shortened configs with Transformers.
TEST_CASE("keys that are not there, null, or spelled in another way: as Transformers reads them") {
    auto parsed = [](const Keys &keys, const std::string &family) { return parse(config_text(keys, family)); };
    const std::string yarn = R"({"rope_type": "yarn", "factor": 4)";

    // What does not turn has no attention factor either, for another theta or none.
    for (const Config &config :
         {parsed({{"rope_scaling", yarn + "}"}, {"no_rope_layer_interval", "2"}}, "SmolLM3"),
          parsed({{"rope_scaling", yarn + "}"}, {"layer_rope_theta", "[1e4, 0]"}}, "GraniteSWA")}) {
        CHECK(config.kind(0).query_scale().needed());
        CHECK(config.kind(1).rope_theta == 0);
        CHECK(!config.kind(1).query_scale().needed());
    }
    const Kind null = parsed({{"rope_scaling", yarn + R"(, "truncate": null})"}}, "Llama").kind(0);
    CHECK(!null.rope.truncate);

    auto ministral = [&](const std::string &rope) { return parsed({{"rope_parameters", rope}}, "Ministral3").kind(0); };
    const Kind plain = ministral(
        R"({"rope_type": "default", "llama_4_scaling_beta": 0.2, "original_max_position_embeddings": 8})");
    CHECK((plain.rope_theta == 10000 && plain.rope.query_growth == 0.2 && plain.rope.original_context == 8));
    // The original context beside all of RoPE goes before the one in it; not where each kind of layers has its own
    // RoPE.
    const std::string inner = yarn + R"(, "rope_theta": 100, "original_max_position_embeddings": 64)";
    const Keys outer = {{"original_max_position_embeddings", "16"}, {"max_position_embeddings", "128"}};
    auto both = [&](const std::string &rope, const std::string &family) {
        Keys keys = outer;
        keys["rope_parameters"] = rope;
        return parsed(keys, family).kinds;
    };
    CHECK(both(inner + R"(, "llama_4_scaling_beta": 0.1})", "Ministral3")[0].rope.original_context == 16);
    CHECK(both(inner + "}", "Llama")[0].rope.original_context == 16);
    for (const Kind &kind : both(R"({"full_attention": )" + inner + "}}", "Gemma3"))
        CHECK(kind.rope.original_context == (kind.window ? 0 : 64));
    check_cases("Gemma3", {{{{"rope_scaling", yarn + "}"}, {"rope_parameters", "{\"full_attention\": {}}"}},
                            "expected none beside rope_parameters"}});
    check_cases("Gemma4",
                {{{{"rope_theta", "37"}, {"rope_parameters", R"({"full_attention": {"rope_type": "linear", "factor": 4},
                   "sliding_attention": {"rope_type": "default"}})"}},
                  "rope_theta is 37, expected it in rope_parameters, for each kind of layers"}});
    check_cases("Gemma3", {{{{"rope_scaling", R"({"type": "linear", "factor": 8})"}, {"num_hidden_layers", "6"}},
                            "type is \"linear\", expected no such key"},
                           {{{"rope_scaling", yarn + R"(, "truncate": null})"}, {"num_hidden_layers", "6"}},
                            "truncate is null, expected no such key"}});
    check_cases("Lfm2", {{{{"hidden_act", "\"gelu_pytorch_tanh\""}}, "supported is silu"}});
    check_cases("Ministral3", {{{}, "rope_parameters is missing"},
                               {{{"rope_parameters", yarn + "}"}}, "llama_4_scaling_beta is missing"}});

    const std::string eleven = R"({"05": {"head_dim": 16}, "10": {"head_dim": 16}})";
    auto gemma4 = [&](Keys keys) { return parsed(keys, "Gemma4"); };
    const Config padded = gemma4({{"num_hidden_layers", "11"}, {"per_layer_config", eleven}, {"head_dim", "8"}});
    for (int layer = 0; layer < 11; layer++) CHECK(padded.kind(layer).key_width == (layer % 5 || !layer ? 8 : 16));
    CHECK(gemma4({{"per_layer_config", "null"}, {"head_dim", "8"}}).kind(1).key_width == 8);
    CHECK(gemma4({{"head_dim", "8"}}).kind(1).key_width == 512);
    CHECK(gemma4({{"rope_theta", "7"}, {"rope_local_base_freq", "7"}}).kind(0).rope_theta == 10000);
    CHECK(gemma4({{"hidden_size_per_layer_input", "0"}, {"vocab_size_per_layer_input", "0"}}).per_layer == 0);
    check_cases("Gemma4",
                {{{{"use_bidirectional_attention", "\"vision\""}}, ""},
                 {{{"use_bidirectional_attention", "\"all\""}}, "use_bidirectional_attention all is not supported"},
                 {{{"per_layer_config", R"({"2": {"head_dim": 16}})"}}, "expected layers from 0 to 1 as keys"},
                 {{{"per_layer_config", R"({"x": {"head_dim": 16}})"}}, "expected layers from 0 to 1 as keys"}});
    check_cases("Lfm2", {{{{"layer_types", R"(["attention", "conv"])"}}, ""}});
}

TEST_CASE("an architecture that does not run: the nearest that does, and what is in its way") {
    auto line = [](const std::string &name) { return refusal(replaced(config_text({}), "LlamaForCausalLM", name)); };
    check_contains(line("Qwen3MoeForCausalLM"),
                   "architecture Qwen3MoeForCausalLM is not supported: nearest is "
                   "Qwen3ForCausalLM, without its experts");
    check_contains(line("Gemma2ForCausalLM"), "nearest is Gemma3ForCausalLM, without its caps of scores");
    check_contains(line("Gemma3nForCausalLM"), "nearest is Gemma4ForCausalLM");
    check_contains(line("XyzForCausalLM"), "architecture XyzForCausalLM is not supported; supported are Llama");
}

TEST_CASE("rope scaling that is not supported, or half of one") {
    auto scaled = [](const std::string &line, const std::string &scaling) {
        return Case{{{"rope_scaling", scaling}}, line};
    };
    check_cases({scaled("rope_scaling: rope_type dynamic is not supported: its frequencies change as a text grows",
                        R"({"factor": 2, "type": "dynamic"})")});
    for (const std::string type : {"mrope", "su", "LLAMA3", ""}) {
        check_cases({scaled("config.json: rope_scaling: rope_type " + type +
                                " is not supported; supported are default linear llama3 proportional yarn longrope",
                            R"({"factor": 2, "type": ")" + type + "\"}")});
    }
    check_cases(
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
    check_cases("Qwen2",
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
    check_cases({{{{"layer_types", "[" + full + ", " + full + "]"}}, ""},
                 {{{"layer_types", both}}, "layer_types is \"sliding_attention\", expected full_attention"}});
    check_cases("Mistral",
                {{{{"layer_types", "[" + sliding + ", " + sliding + "]"}}, ""},
                 {{{"layer_types", both}}, "layer_types is \"full_attention\", expected sliding_attention"}});
}

TEST_CASE("config.json that is not JSON") {
    const std::string good = config_text({}), nul(1, '\0');
    for (size_t length = 1; length < good.size(); length++) CHECK(refusal(good.substr(0, length)) != "");
    check_contains(refusal("{\n\"a\": 1,\n}"), "config.json: not valid JSON near line 3, byte 1");
    check_contains(refusal(good + "x"), "not valid JSON near line 1, byte " + std::to_string(good.size()));
    for (const std::string &text : {good + good, good + nul, nul + good})
        check_contains(refusal(text), "not valid JSON");
    check_contains(refusal("\xff\xfe{}"), "config.json: byte 0, 0xFF, is not UTF-8");
    for (const char *text : {"[]", "3", "null", "\"x\"", "true"})
        check_contains(refusal(text), "expected a JSON object");
    CHECK(refusal(good + " \n\t") == "");
    check_contains(refusal(good, "{"), "generation_config.json: not valid JSON");
}

TEST_CASE("NaN and Infinity, as Python writes them, are numbers: of no use where one is used") {
    const char *const numbers[] = {"NaN", "Infinity", "-Infinity"};
    for (const std::string number : numbers) {
        for (const std::string &value : {number, "[0.0, " + number + "]", "{\"a\":" + number + "}", "[" + number + "]"})
            check_cases({{{{"time_step_limit", value}}, ""}});
        for (const std::string key : {"hidden_size", "head_dim", "rope_theta", "rms_norm_eps", "num_key_value_heads",
                                      "bos_token_id", "residual_multiplier", "max_position_embeddings"})
            check_contains(refusal(config_text({{key, number}})), key + " is " + number + ", expected");
        for (const std::string key : {"dtype", "model_type", "hidden_act"})
            check_contains(refusal(config_text({{key, number}})), key + " is " + number + ", expected a text");
        check_contains(refusal(config_text({}), "{\"eos_token_id\": " + number + "}"),
                       "eos_token_id is " + number + ", expected ids");
        for (const std::string &text :
             {number, "{" + number + ": 1}", "{\"a\": x" + number + "}", "{\"a\": " + number + "5}",
              "{\"a\": 1" + number + "}", "{\"a\": --" + number + "}", "{\"a\": +" + number + "}"})
            check_contains(error_of([&] { parse_json("c", text, true); }), "c: ");
        // A text may hold the word, or what stands for it; and no other reader takes it for a number.
        for (const std::string &inside :
             {"a, " + number + " ,b", "\\\", " + number + ", \\\"", std::string("\\u007f")}) {
            const Json root = parse_json("c", "{\"a\": \"" + inside + "\"}", true);
            CHECK(json_text(root) == json_text(parse_json("c", "{\"a\": \"" + inside + "\"}")));
            CHECK(is_text(&root.items[0]));
        }
        check_contains(error_of([&] { parse_json("c", "{\"a\": " + number + "}"); }), "not valid JSON near line 1");
    }
    check_contains(refusal("{\n\"a\": NaN, \"b\": Infinity,\n}"), "not valid JSON near line 3, byte 27");
    const std::string file = safetensors("{\"__metadata__\": {\"a\": NaN}}", "");
    check_contains(error_of([&] { parse_safetensors("w", file.data(), file.size()); }), "w: header: not valid JSON");
}

TEST_CASE("deep nesting, and more than 16 MiB") {
    for (size_t depth : {900u, 1100u, 100000u, 5000000u}) {
        std::string nested = std::string(depth, '[') + std::string(depth, ']');
        std::string line = refusal(config_text({{"x", nested}}));
        CHECK((line == "") == (depth < 1000));
        check_contains(refusal(std::string(depth, '[')), "not valid JSON");
    }
    check_contains(refusal(std::string((16 << 20) + 1, ' ')), "JSON of 16777217 bytes is too long");
    check_contains(Checkpoint("llama_mha").error_with("config.json", std::string((16 << 20) + 1, ' ')),
                   "/config.json: is 16777217 bytes long, expected at most 16777216");
}

// ---- Broken weights ------------------------------------------------------------------------------------------------

// What this config with this file of weights is refused with; the ends of every tensor are read.
std::string load(const std::string &config, const std::string &weights) {
    // In a buffer of exactly that length, so that the sanitizer sees a read behind its end.
    std::vector<char> bytes(weights.begin(), weights.end());
    return error_of([&] {
        TensorTable table = parse_safetensors("w", bytes.data(), bytes.size());
        [[maybe_unused]] volatile double last = 0;
        for (auto &[key, tensor] : by_name(bind_weights(parse(config), table)))
            if (tensor.data) last = value_at(tensor, 0) + value_at(tensor, tensor.rows * tensor.cols - 1);
    });
}

TEST_CASE("a checkpoint cut off or damaged anywhere ends in one line, or is another one that loads") {
    const std::string name = fixtures + "llama_rope_linear/", config = slurp(name + "config.json");
    const std::string file = slurp(name + "model.safetensors");
    REQUIRE(load(config, file) == "");
    std::mt19937 random = random_numbers();
    std::vector<size_t> lengths = {1, 7, 8, 9, file.size() - 4, file.size() - 1};
    for (int i = 0; i < 1000; i++) lengths.push_back(1 + random() % (file.size() - 1));
    for (size_t length : lengths) CHECK_MESSAGE(load(config, file.substr(0, length)) != "", length);
    const size_t header = 8 + header_of(file).size();
    for (int i = 0; i < 3000; i++) {
        std::string damaged[] = {config, file};
        std::string &text = damaged[i % 4 > 0];
        for (size_t flips = 1 + random() % 3; flips > 0; flips--)
            text[random() % (i % 4 ? header : config.size())] ^= (char)(1 << random() % 8);
        load(damaged[0], damaged[1]);
    }
    Checkpoint scratch("llama_rope_linear");
    for (size_t length : {(size_t)100, file.size() / 2, file.size() - 1}) {
        check_contains(scratch.error_with("model.safetensors", file.substr(0, length)),
                       scratch / "model.safetensors: ", "cut off, fetch it again");
    }
}

std::string parse_error(const std::string &file) {
    return error_of([&] { parse_safetensors("w", file.data(), file.size()); });
}

// One or two tensors in a file with 8 bytes of data: what they are refused with; "": they are not.
std::string entry_error(const std::string &entries) {
    return parse_error(safetensors("{" + entries + "}", "12345678"));
}

std::string entry(const std::string &name, const std::string &type, const std::string &shape,
                  const std::string &offsets) {
    return formatted(R"("%s": {"dtype": %s, "shape": %s, "data_offsets": %s})", name.c_str(), type.c_str(),
                     shape.c_str(), offsets.c_str());
}

TEST_CASE("headers that cannot be") {
    auto file = [](uint64_t size, const std::string &rest) {
        return std::string((const char *)&size, sizeof size) + rest;
    };
    const std::pair<std::string, std::string> files[] = {
        {file(3, "{}"), "w: its header is said to be 3 bytes long, expected at most 2: it is cut off"},
        {file(UINT64_MAX, "{}"), "its header is said to be 18446744073709551615 bytes long, expected at most"},
        {file(UINT64_MAX - 7, "{}"), "not a safetensors file"},
        {file(1ull << 63, "{}"), "not a safetensors file"},
        {file(0, "{}"), "w: header: not valid JSON"},
        {file(1, "{}"), "w: header: not valid JSON"},
        {file(2, "[]"), "w: header: expected a JSON object"},
        {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
         "w: is a Git LFS pointer, not the file itself: run `git lfs pull`"}};
    for (const auto &[bytes, line] : files) check_contains(parse_error(bytes), line);
    const std::string f32 = "\"F32\"", f16 = "\"F16\"", i8 = "\"I8\"", all = "[0, 8]";
    for (const std::string &error :
         {parse_error(file(2, "{}")), parse_error(file(4, "{}  ")), entry_error(entry("a", f32, "[2]", all)),
          entry_error(entry("a", f16, "[2, 2]", all)), entry_error(entry("a", "\"F64\"", "[]", all))})
        CHECK(error == "");
    std::vector<std::pair<std::string, std::string>> cases = {
        {"\"a\": 3", "w: tensor a: expected an object"},
        {"\"a\": []", "w: tensor a: expected an object"},
        {"\"a\": {}", "w: tensor a: dtype is missing"},
        {R"("a": {"dtype": "F32"})", "w: tensor a: shape is missing"},
        {R"("a": {"dtype": "F32", "shape": [2]})", "w: tensor a: data_offsets is missing"},
        {entry("a", "32", "[2]", all), "dtype is 32, expected a text"},
        {entry("a", f32, "[3]", "[0, 12]"),
         "w: tensor a ends at byte 12 of the data, but the file holds 8: it is cut off, fetch it again"},
        {entry("a", f32, "[2]", "[9007199254740984, 9007199254740992]"), "ends at byte 9007199254740992"},
        {entry("a", f32, "[3]", all), "w: tensor a has 8 bytes, its shape [3] in F32 asks for 12"},
        {entry("a", f16, "[2]", all), "its shape [2] in F16 asks for 4"},
        {entry("a", f32, "[0]", all), "its shape [0] in F32 asks for 0"},
        {entry("a", i8, "[9]", all), "its shape [9] in I8 asks for 9"},
        // 2^32 * 2^32 * 4 bytes are 0 modulo 2^64; 2^53 * 2^53 overflows, too.
        {entry("a", f32, "[4294967296, 4294967296]", "[0, 0]"), "expected one that fits a file"},
        {entry("a", i8, "[9007199254740992, 9007199254740992]", all), "fits a file"},
        {entry("a", i8, "[7]", "[0, 7]"), "w: holds 8 bytes of data, its header speaks of 7"},
        {R"("__metadata__": {"format": "pt"})", "holds 8 bytes of data, its header speaks of 0"}};
    for (const char *shape : {"2", "\"2\"", "{\"a\": 2}", "[\"2\"]", "[-2]", "[1.5]", "[1e30]", "[[2]]", "[null]"})
        cases.push_back({entry("a", f32, shape, all), "expected a list of whole numbers"});
    for (const char *offsets : {"8", "[-1, 8]", "[0, 8.5]", "[\"0\", 8]", "[0, 1e300]"})
        cases.push_back({entry("a", f32, "[2]", offsets), "expected a list of whole numbers"});
    for (const char *offsets : {"[]", "[0]", "[0, 4, 8]", "[8, 0]"})
        cases.push_back({entry("a", f32, "[2]", offsets), "expected [begin, end]"});
    for (const auto &[entries, line] : cases) check_contains(entry_error(entries), line);
    // Offsets that overlap or leave a gap, and two tensors of one name.
    const std::vector<std::string> twos[] = {
        {"b", "[0, 4]", "[4, 8]", ""},
        {"b", "[4, 8]", "[0, 4]", ""},
        {"b", "[0, 4]", "[3, 7]", "w: tensor b begins at byte 3 of the data, expected 4: tensors overlap"},
        {"b", "[0, 4]", "[0, 4]", "w: tensor b begins at byte 0 of the data, expected 4: tensors overlap"},
        {"b", "[1, 5]", "[4, 8]", "w: tensor a begins at byte 1 of the data, expected 0: tensors leave a gap"},
        {"a", "[0, 4]", "[4, 8]", "w: header: key \"a\" stands twice in one object"}};
    for (const auto &two : twos)
        CHECK(entry_error(entry("a", i8, "[4]", two[1]) + ", " + entry(two[0], i8, "[4]", two[2])) == two[3]);
}

TEST_CASE("tensors that are not what config.json asks for") {
    const std::string name = fixtures + "llama_rope_linear/", config = slurp(name + "config.json");
    const std::string file = slurp(name + "model.safetensors");
    const std::string k_proj = "model.layers.1.self_attn.k_proj.weight",
                      entry_of_k = k_proj + R"(":{"dtype":"F32","shape":)";
    struct Change {
        std::string from, to, line;
    };
    const Change in_weights[] = {
        {k_proj, "model.layers.1.self_attn.k_proj.weighs",
         "w: tensor " + k_proj + " is missing, config.json asks for it (LlamaForCausalLM, 2 layers)"},
        {"model.norm.weight", "model.norn.weight", "w: tensor model.norm.weight is missing"},
        {"model.embed_tokens.weight", "model.embed_token.weight", "w: tensor model.embed_tokens.weight is missing"},
        {entry_of_k + "[16,32]", entry_of_k + "[32,16]",
         "w: tensor " + k_proj + " has shape [32, 16], config.json asks for [16, 32]"},
        {entry_of_k + "[16,32]", entry_of_k + "[512]  ", "has shape [512], config.json asks for [16, 32]"},
        {"model.norm.weight\":{\"dtype\":\"F32", "model.norm.weight\":{\"dtype\":\"I32",
         "w: tensor model.norm.weight has dtype I32, supported are F32 F16 BF16"}};
    const Change in_config[] = {
        {"\"vocab_size\": 64", "\"vocab_size\": 63",
         "w: tensor model.embed_tokens.weight has shape [64, 32], config.json asks for [63, 32]"},
        {"\"intermediate_size\": 48", "\"intermediate_size\": 47",
         "mlp.gate_proj.weight has shape [48, 32], config.json asks for [47, 32]"},
        {"\"head_dim\": 8", "\"head_dim\": 16", "q_proj.weight has shape [32, 32], config.json asks for [64, 32]"},
        {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4",
         "k_proj.weight has shape [16, 32], config.json asks for [32, 32]"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 9999",
         "w: tensor model.layers.2.self_attn.q_proj.weight is missing, config.json asks for it (LlamaForCausalLM, "
         "9999 "
         "layers)"},
        {"\"attention_bias\": false", "\"attention_bias\": true", "q_proj.bias is missing"},
        {"\"mlp_bias\": false", "\"mlp_bias\": true", "gate_proj.bias is missing"}};
    for (const auto &[from, to, line] : in_weights) check_contains(load(config, with_header(file, from, to)), line);
    for (const auto &[from, to, line] : in_config) check_contains(load(replaced(config, from, to), file), line);
}

TEST_CASE("shards and their index") {
    Checkpoint scratch("llama_sharded");
    const std::string path = scratch / "model.safetensors.index.json", index = slurp(path);
    const std::string first = "model-00001-of-00003.safetensors", second = "model-00002-of-00003.safetensors";
    auto load = [&] { return scratch.error(); };
    auto indexed = [&](const std::string &from, const std::string &to) {
        return scratch.error_with("model.safetensors.index.json", replaced(index, from, to));
    };
    CHECK(load() == "");
    SUBCASE("a shard is cut off, and missing") {
        check_contains(scratch.error_with(second, slurp(scratch / second).substr(0, 5000)), (scratch / second) + ": ",
                       "cut off, fetch it again");
        fs::remove(scratch / second);
        CHECK(load() == (scratch / second) + ": cannot open it: No such file or directory; " + path + " names it");
    }
    SUBCASE("an index that is wrong") {
        for (const char *name : {"../x.safetensors", "/etc/passwd", "a/b", "", ".", ".."})
            check_contains(indexed("\"" + first, std::string("\"") + name + "\", \"x\": \"" + first),
                           "\", expected the name of a file in the same directory");
        check_contains(indexed("\"weight_map\"", "\"weights\""), path + ": weight_map is missing");
        check_contains(indexed("\"" + first + "\"", "7"), " is 7, expected a text");
        check_contains(indexed("\"" + first + "\"", "null"), "is null, expected the name of a file");
        check_contains(indexed("{", "["), "not valid JSON");
        check_contains(indexed("\"lm_head.weight\"", "\"nowhere.weight\""),
                       ": tensor nowhere.weight is missing, " + path);
        check_contains(indexed(index, R"({"weight_map": []})"), "weight_map is [], expected an object");
        check_contains(indexed(index, R"({"weight_map": {}})"), path + ": tensor model.embed_tokens.weight is missing");
    }
    SUBCASE("a tensor the index does not list") {
        Json root = parse_json(path, index);
        const auto listed = [](const Json &item) { return item.key == "model.norm.weight"; };
        for (Json &map : root.items)
            map.items.erase(std::remove_if(map.items.begin(), map.items.end(), listed), map.items.end());
        spill(path, json_text(root));
        check_contains(load(), path + ": tensor model.norm.weight is missing, config.json asks for it");
    }
    SUBCASE("a whole model.safetensors goes before the index") {
        check_contains(scratch.error_with("model.safetensors", "short"), "/model.safetensors: is 5 bytes long");
    }
}

TEST_CASE("names out of a file, however odd, leave one short line") {
    std::string name = "\\n\\u0001\\u00e9" + std::string(3000000, 'x');
    std::string line = entry_error("\"" + name + "\": 3");
    CHECK(line.size() < 200);
    check_contains(line, "w: tensor ????xxxx");
    CHECK(refusal(config_text({{"hidden_act", "\"" + name + "\""}})).size() < 200);
    CHECK(refusal(config_text({{"hidden_size", "\"" + name + "\""}})).size() < 200);
    CHECK(refusal(config_text({{name, "1}, {"}})).size() < 200);
}

// ---- The cache of any config ---------------------------------------------------------------------------------------

std::string sizes_of(const CacheSizes &s) {
    int layers = 0;
    std::vector<int> windows;
    for (const Kind &kind : s.kinds) layers += kind.layers;
    for (const LayerRows &rows : s.rows)
        if (rows.own) windows.push_back(s.kinds[rows.kind].window);
    const Kind &kind = s.kinds[0];
    return formatted("%s %d layers %d x %d + %d context %d windows %s", s.architecture.c_str(), layers, kind.kv_heads,
                     kind.key_width, kind.value_width, s.context, json_of(windows).c_str());
}

TEST_CASE("the sizes of a cache, also of an architecture that does not run, and why it does not") {
    const std::string two = R"("num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64)";
    const std::string mla =
        R"("num_attention_heads": 128, "num_key_value_heads": 128, "v_head_dim": 128, "hidden_size": 7168)";
    const std::pair<std::string, std::string> cases[] = {
        {R"({"model_type": "gpt2", "n_layer": 2, "n_head": 12, "n_embd": 768, "n_positions": 1024})",
         "gpt2 2 layers 12 x 64 + 64 context 1024 windows [0, 0]"},
        {"{" + two + R"(, "multi_query": true})", "unknown 2 layers 1 x 8 + 8 context 0 windows [0, 0]"},
        {"{" + two + R"(, "num_key_value_heads": null, "head_dim": 16, "v_head_dim": 4})",
         "unknown 2 layers 8 x 16 + 4 context 0 windows [0, 0]"},
        // A text model inside another, and layers of it that slide or have no cache.
        {R"({"architectures": ["G"], "text_config": {)" + replaced(two, "layers\": 2", "layers\": 5") +
             R"(, "sliding_window": 5, "num_kv_shared_layers": 1, "num_key_value_heads": 8,
            "layer_types": ["sliding_attention", "linear_attention", "conv", "full_attention", "full_attention"]}})",
         "G 2 layers 8 x 8 + 8 context 0 windows [5, 0]"},
        {R"({"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 3, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "max_position_embeddings": 163840, )" +
             mla + "}",
         "DeepseekV3ForCausalLM 3 layers 1 x 576 + 0 context 163840 windows [0, 0, 0]"},
        {config_text({{"rope_scaling", R"({"type": "dynamic"})"}, {"max_position_embeddings", "99"}}),
         "LlamaForCausalLM 2 layers 4 x 8 + 8 context 99 windows [0, 0]"}};
    for (const auto &[config, line] : cases) {
        CacheSizes sizes = read_cache_sizes("config.json", config);
        CHECK(sizes_of(sizes) == line);
        CHECK(sizes.why_not == refusal(config));
        CHECK(sizes.why_not != "");
    }
    for (const Expected &want : expected) {  // one that runs: what runs
        CacheSizes sizes = load_cache_sizes(fixtures + want.name);
        Config c = load_config(fixtures + want.name);
        CHECK(sizes_of(sizes) == sizes_of({c.family->architecture, "", "", want.context, c.kinds, c.rows}));
        CHECK(sizes.why_not == "");
    }
    Scratch scratch;
    spill(scratch / "config.json", slurp(fixtures + "qwen3/config.json"));
    check_contains(load_cache_sizes(scratch.str()).why_not, ": neither model.safetensors nor ");
    for (const std::string wrong : {"{}", R"({"num_hidden_layers": 0})", R"({"n_layer": 2, "n_head": -1})",
                                    "{\"n_layer\": 1e9}", R"({"n_layer": 2, "n_head": 2, "head_dim": "x"})", "[]"})
        check_contains(error_of([&] {
                           if (std::string line = read_cache_sizes("c", wrong).no_size; !line.empty())
                               fail("%s", line.c_str());
                       }),
                       "c: ");
}

// Of published configs, what says something about attention, layers and the cache; a size from Transformers 5.24's
// classes and the models' own code, or the key that forbids one.
TEST_CASE("the sizes of configs as they are published, or none; never a wrong one") {
    const std::string path = "tests/fixtures/published_configs.json";
    const Json root = json_file(path);
    int sizes = 0, refused = 0;
    for (const Json *item : items_of(Section{path, &root}.need("configs"))) {
        const Section published{path, item};
        const std::string file = json_text(*published.need("config"));
        CAPTURE(file);
        CacheSizes s = read_cache_sizes("c", file);
        if (!s.no_size.empty()) {
            check_contains(s.no_size, "c: " + published.text("no_size", "none"),
                           "--layers N --kv-heads N --head-dim N");
            refused++;
            continue;
        }
        sizes++;
        std::string line;
        for (size_t i = 0; i < s.kinds.size(); i++) {
            const Kind &kind = s.kinds[i];
            line += formatted("%s%d x %d x %d + %d", i ? ", " : "", kind.layers, kind.kv_heads, kind.key_width,
                              kind.value_width);
            if (kind.window) line += formatted(" window %d", kind.window);
            int shared = 0;
            for (const LayerRows &rows : s.rows) shared += rows.kind == (int)i && !rows.own;
            if (shared) line += formatted(" and %d that read", shared);
        }
        CHECK(line == published.text("sizes", "none"));
    }
    CHECK((sizes >= 50 && refused >= 13));
    // A window that may be of some layers asks for more, also where no context is said.
    check_contains(
        read_cache_sizes("c", R"({"architectures": ["XForCausalLM"], "model_type": "x", "num_hidden_layers": 4,
        "num_attention_heads": 4, "hidden_size": 64, "sliding_window": 8})")
            .no_size,
        "which layers slide?");
    check_contains(read_cache_sizes("c", R"({"model_type": "mimo_v2_flash", "num_hidden_layers": 2, "hidden_size": 128,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "v_head_dim": 8, "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"], "max_position_embeddings": 64})")
                       .no_size,
                   "swa_num_key_value_heads is missing");
    // Mistral's window stays, whatever else its config is refused for.
    for (const char *why : {"\"a\": 1", R"("quantization_config": {"bits": 4, "quant_method": "awq"})",
                            R"("rope_scaling": {"type": "dynamic", "factor": 4.0})", R"("hidden_act": "gelu")"}) {
        std::string text = config_text({{"sliding_window", "4096"}}, "Mistral");
        CacheSizes sizes = read_cache_sizes("c", replaced(text, "{", std::string("{") + why + ", "));
        CHECK((sizes.kinds.size() == 1 && sizes.kinds[0].window == 4096 && sizes.kinds[0].layers == 2));
        CHECK(sizes.why_not.empty() == (why[1] == 'a'));
    }
}

// ---- Results -------------------------------------------------------------------------------------------------------

TEST_CASE("a result described once is text, and JSON with every digit") {
    Report prefill, report;
    prefill.add("tokens", 3, formatted("prefill %3d tokens", 3)).add("seconds", 0.5, " in 0.5 s\n");
    std::vector<Report> rows(2);
    for (int i = 0; i < 2; i++) {
        rows[i].add("name", i ? "b" : "a", formatted("%-5s", i ? "b" : "a"), "name");
        rows[i].add("rate", 1.5 * i, formatted(" %8.1f", 1.5 * i), "tokens/s").add("parts", prefill.json());
        rows[i].say(" |").add("type", "f16", "  f16 ", "K");
    }
    report.say("head\n").add("text", std::string("a\0\"\\\n\x1f\xc3\xa9", 8)).add("ids", std::vector<int>{1, -2});
    report.add("exact", INT64_MAX)
        .add("unsigned", UINT64_MAX)
        .add("whole", 0x1p53)
        .add("tenth", 0.1)
        .add("small", 5e-324);
    report.add("nothing", NAN).add("endless", -INFINITY).add("yes", true).add("third", 1.0 / 3).add("big", 1e300);
    report.add("prefill", prefill).table("rows", rows).list("none", {});
    CHECK(report.text ==
          "head\nprefill   3 tokens in 0.5 s\nname  tokens/s    K\na          0.0 |  f16 \nb          1.5 |  f16 \n");
    // NUL is written, but not read: a text ends at it in C.
    Json parsed = parse_json("json", replaced(report.json(), "\\u0000", ""));
    auto item = [&](const char *key) { return json_text(*member(&parsed, key)); };
    CHECK(report.json().rfind(R"({"text": "a\u0000\"\\\n\u001f)"
                              "\xc3\xa9"
                              R"(", "ids": [1, -2], "exact": 9223372036854775807, )"
                              R"("unsigned": 18446744073709551615, "whole": 9007199254740992, "tenth": 0.1, )",
                              0) == 0);
    CHECK(item("nothing") + item("endless") + item("yes") == "nullnulltrue");
    CHECK(item("prefill") == R"({"tokens":3,"seconds":0.5})");
    CHECK(item("none") == "[]");
    for (auto [key, value] : {std::pair{"third", 1.0 / 3}, {"small", 5e-324}, {"big", 1e300}})
        CHECK(member(&parsed, key)->number == value);
    CHECK(count_of(member(&parsed, "rows")) == 2);
    // Printed, a key takes a line and so does a row; both spellings are the same JSON.
    Scratch scratch;
    FILE *saved = stdout, *file = fopen((scratch / "out").c_str(), "w");
    stdout = file;
    report.print(true);
    stdout = saved;
    fclose(file);
    std::string printed = slurp(scratch / "out");
    CHECK(std::count(printed.begin(), printed.end(), '\n') == 2 + 15 + 3);  // braces, keys, two rows and their bracket
    CHECK(json_text(parse_json("printed", replaced(printed, "\\u0000", ""))) == json_text(parsed));
}

// ---- What this process may use -------------------------------------------------------------------------------------

// A folder that stands for "/", with these files.
void make_root(const Scratch &scratch, const std::map<std::string, std::string> &files) {
    for (const auto &[name, content] : files) {
        fs::create_directories((scratch.path / name).parent_path());
        spill(scratch / name, content + "\n");
    }
}

TEST_CASE("memory: what is free, and less in a container") {
    struct Tree {
        std::string group, folder, most, used, extra_file, extra;
        double kib;  // below 800: the container's
    };
    const std::string big = "512000", small = "102400";
    const Tree trees[] = {
        {"0::/a/b", "a/b/", big, small, "", "", 400},
        {"0::/a/b", "a/", big, small, "", "", 400},  // of a group around it
        {"0::/a/b", "", big, small, "", "", 400},    // inside a container its own folder is the top
        {"0::/", "", big, small, "", "", 400},
        {"0::/a", "unified/a/", big, small, "", "", 400},
        {"0::/a", "a/", "max", small, "", "", 800},
        {"0::/a", "b/", big, small, "", "", 800},
        {"0::/a", "a/", small, big, "", "", 0},
        {"0::/a", "a/", "99999999999", small, "", "", 800},
        {"0::/a", "a/", big, small, "a/memory.stat", "anon 5\ninactive_file 40960\nactive_file 10240", 450},
        {"0::/a/b", "a/", big, small, "a/b/memory.max", "1024", 1},
        {"4:memory:/x", "memory/x/", big, small, "", "", 400},
        {"4:cpu,memory:/x", "memory/", big, small, "", "", 400},
        {"4:memory:/x", "memory/", "9223372036854771712", small, "", "", 800},
        {"4:memory:/x", "memory/", big, small, "memory/memory.stat", "inactive_file 7\ntotal_inactive_file 1024", 401},
        {"nonsense", "memory/", big, small, "", "", 800}};
    for (const Tree &tree : trees) {
        Scratch scratch;
        const std::string cgroup = "sys/fs/cgroup/", folder = cgroup + tree.folder;
        bool old = tree.folder.rfind("memory/", 0) == 0;
        make_root(scratch, {{"proc/meminfo", "MemTotal: 999 kB\nMemFree: 1 kB\nMemAvailable: 800 kB"},
                            {"proc/self/cgroup", "3:cpuset:/\n" + tree.group},
                            {folder + (old ? "memory.limit_in_bytes" : "memory.max"), tree.most},
                            {folder + (old ? "memory.usage_in_bytes" : "memory.current"), tree.used},
                            {cgroup + (tree.extra.empty() ? "none" : tree.extra_file), tree.extra}});
        const Room memory = free_memory_of_host(scratch.str());
        CAPTURE(tree.group + " " + tree.folder);
        CHECK(memory.bytes == tree.kib * 1024);
        CHECK(memory.name == (tree.kib < 800 ? "this container" : "this machine"));
    }
    CHECK(free_memory_of_host("/nowhere").bytes > 0);
    CHECK(free_memory_of_host().bytes <= (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGE_SIZE));
}

TEST_CASE("threads: the processors of this process, a container's share of time, OMP_NUM_THREADS") {
    const Environment before("OMP_NUM_THREADS", nullptr);
    const int all = usable_threads("/nowhere");
    CHECK(all >= 1);
    const std::string v2 = "sys/fs/cgroup/";
    struct Share {
        std::string group, file, content;
        int threads;
    };
    const Share shares[] = {{"0::/a", v2 + "a/cpu.max", "100000 100000", 1},
                            {"0::/a/b", v2 + "cpu.max", "1000 100000", 1},
                            {"0::/a", v2 + "a/cpu.max", "100001 100000", std::min(all, 2)},
                            {"0::/a", v2 + "a/cpu.max", "max 100000", all},
                            {"0::/a", v2 + "a/cpu.max", "6400000 100000", std::min(all, 64)},
                            {"2:cpu,cpuacct:/a", v2 + "cpu/a/cpu.cfs_quota_us", "50000", 1},
                            {"2:cpu,cpuacct:/a", v2 + "cpu/a/cpu.cfs_quota_us", "-1", all},
                            {"2:cpuset:/a", v2 + "cpu/a/cpu.cfs_quota_us", "50000", all}};
    for (const auto &[group, file, content, threads] : shares) {
        Scratch scratch;
        make_root(scratch, {{"proc/self/cgroup", group}, {file, content}, {v2 + "cpu/a/cpu.cfs_period_us", "100000"}});
        CHECK(usable_threads(scratch.str()) == threads);
    }
    for (auto [wanted, threads] :
         {std::pair{"1", 1}, {"1,4", 1}, {"100000", all}, {"0", all}, {"-3", all}, {"x", all}, {"", all}}) {
        setenv("OMP_NUM_THREADS", wanted, 1);
        CHECK(usable_threads("/nowhere") == threads);
    }
}
