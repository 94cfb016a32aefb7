// A checkpoint on disk becomes Config + Weights.
//
// A Hugging Face directory, as downloaded:
//   config.json                     the shape of the model                       -> Config
//   generation_config.json          where generation ends (optional)             -> Config::end_ids
//   model.safetensors               the weights, or, when they are split,
//   model.safetensors.index.json    which tensor lies in which shard             -> Model
//
// Weights are mapped, not read: loading touches the headers only, a page of weights comes from the disk when the
// first product needs it, and a model takes its file's size in memory (shared with the page cache) and no more.
//
// Nothing in these files is trusted. Whatever is wrong with them ends in fail(): an Error that holds one line, which
// names the file, what was found, what was expected and, where there is one, the cure.
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "formats.h"
#include "json.h"

// ---- What a checkpoint becomes -------------------------------------------------------------------------------------

// The last two are never in a file. int8: formats.h says how its numbers lie. bf16_pairs: bf16, of which products take
// two neighbours at a time, with inputs that are rounded to bf16, too.
enum class DType { f32, f16, bf16, int8, bf16_pairs };

inline int dtype_bytes(DType type) { return type == DType::f32 ? 4 : type == DType::int8 ? 1 : 2; }
inline const char *dtype_name(DType type) {
    const char *names[] = {"f32", "f16", "bf16", "int8", "bf16"};
    return names[(int)type];
}

// A matrix (rows, cols), row-major, where it lies in the mapped file. A vector has one row.
struct Tensor {
    const void *data = nullptr;  // nullptr: this model has no such tensor
    DType type = DType::f32;
    int64_t rows = 0, cols = 0;
};

HOST_DEVICE inline float number_of(const Tensor &tensor, int64_t i) {
    if (tensor.type == DType::f32) return ((const float *)tensor.data)[i];
    if (tensor.type == DType::f16) return to_float(((const f16 *)tensor.data)[i]);
    return to_float(((const bf16 *)tensor.data)[i]);
}

struct Linear {     // y = weight x + bias
    Tensor weight;  // (outputs, inputs)
    Tensor bias;    // (1, outputs), absent in most families
};

// With D the width of its kind's keys. Rows of query, key and value are head after head, D rows each; a head's rows are
// in the half-split order of RoPE: component i turns together with component i + D / 2.
struct LayerWeights {
    Tensor attention_norm;                  // (1, hidden)
    Linear query;                           // (heads * D, hidden)
    Linear key, value;                      // (kv_heads * D, hidden); absent where another layer's rows are read
    Linear output;                          // (hidden, heads * D)
    Tensor query_norm, key_norm;            // (1, D): RMSNorm of each head before RoPE (Qwen3), absent elsewhere
    Tensor value_norm;                      // (1, D): likewise (Gemma 4)
    Tensor sinks;                           // (1, heads): learned sinks, scores without a value (gpt-oss)
    Tensor mlp_norm;                        // (1, hidden)
    Linear gate, up;                        // (ffn, hidden)
    Linear down;                            // (hidden, ffn)
    Tensor attention_out_norm, mlp_out_norm;  // (1, hidden): RMSNorm of what is added to x (Gemma 3), absent elsewhere
    Tensor taps, taps_bias;  // (hidden, L), (1, hidden): of a short convolution (LFM2), whose query, key and value are
                             // the parts C, B and x of its in_proj, (hidden, hidden) each
    float scale = 1;                          // what x is multiplied with at the layer's end; where it is not 1, it has
                                              // an mlp_out_norm (Gemma 4)
};

// How the frequencies f_i = theta^(-2i/D) are stretched so that a model reads further than it was trained at first.
//   linear: f_i / factor (Chen et al. 2023, Position Interpolation).
//   llama3: with w_i = 2 pi / f_i, the wavelength in positions, and C = original_context:
//           w_i > C / low_freq_factor: f_i / factor;  w_i < C / high_freq_factor: f_i;  between them
//           (1 - s) f_i / factor + s f_i,  s = (C / w_i - low_freq_factor) / (high_freq_factor - low_freq_factor).
struct RopeScaling {
    enum Kind { none, linear, llama3 } kind = none;
    double factor = 1, low_freq_factor = 1, high_freq_factor = 4;
    int original_context = 0;
    double turned = 1;  // the part of a head's pairs that turn, the first ones; f_i of the others is 0 (Gemma 4)
    auto all() const { return std::tie(kind, factor, low_freq_factor, high_freq_factor, original_context, turned); }
};

// What layers have in common whose rows are alike: a cache keeps the rows of a kind in one store (cache.h).
struct Kind {
    int kv_heads = 0;
    int key_width = 0, value_width = 0;  // numbers of a head's row: D. MLA: rank + rope, and 0: the value is in the key
    int window = 0;         // the query at position p sees positions max(0, p - window + 1) .. p; 0: all of 0 .. p
    double rope_theta = 0;  // 0: nothing turns, whatever the position
    RopeScaling rope = {};
    int layers = 0;  // that store rows
    int taps = 0;    // L of a short convolution, which has no keys: 1 head, whose rows are its state, hidden wide; its
                     // window is L. 0: attention
    auto of_rows() const {  // all but the layers
        return std::tuple_cat(std::tie(kv_heads, key_width, value_width, window, rope_theta, taps), rope.all());
    }
};

// Where a layer's rows are.
struct LayerRows {
    int kind = 0, index = 0;  // in Config::kinds, and among the layers of that kind that store rows
    bool own = true;          // false: the layer reads rows that an earlier one stored
    bool last = true;         // false: a later layer reads them, too
};

struct Family;

struct Config {
    const Family *family = nullptr;        // of a config that was read
    std::string architecture, model_type;  // "LlamaForCausalLM", "llama"
    std::string dtype;                     // what the config says of the weights; each Tensor knows its own type
    int layers = 0, hidden = 0, ffn = 0, heads = 0, vocabulary = 0;
    int context = 0;  // positions the model was made for
    double norm_epsilon = 0;
    double embedding_scale = 1;  // of what a token's embedding enters x with
    double score_scale = 0;      // q k is multiplied with; 0: 1 / sqrt(D)
    bool gelu = false;           // the gate of the MLP: GELU by tanh, otherwise SiLU
    std::vector<Kind> kinds;
    std::vector<LayerRows> rows;  // (layers)
    bool tied = false;         // in a Model: the head is the embedding, not a matrix of its own
    std::vector<int> end_ids;  // generation stops after any of them; empty: it never does
    int bos_id = -1;           // -1: none
    bool qkv_bias = false, output_bias = false, mlp_bias = false, qk_norm = false;
    bool convolution_bias = false;  // of a convolution's taps and matrices
    const Kind &kind(int layer) const { return kinds[(size_t)rows[(size_t)layer].kind]; }
};

// One more layer, whose kind others may have, too. Without rows of its own it reads those of its kind's last that has.
inline void add_layer(std::vector<Kind> &kinds, std::vector<LayerRows> &rows, const Kind &kind, bool own = true) {
    auto alike = [&](const Kind &other) { return other.of_rows() == kind.of_rows(); };
    const size_t at = (size_t)(std::find_if(kinds.begin(), kinds.end(), alike) - kinds.begin());
    if (at == kinds.size()) kinds.push_back(kind), kinds.back().layers = 0;
    kinds[at].layers += own;
    const LayerRows added = {(int)at, kinds[at].layers - 1, own};
    for (LayerRows &earlier : rows)
        if (earlier.kind == added.kind && earlier.index == added.index) earlier.last = false;
    rows.push_back(added);
}

// Move-only: tensors point into files (or copies), which live as long as the model.
struct Model {
    Config config;
    Tensor embedding;   // (vocabulary, hidden)
    Tensor final_norm;  // (1, hidden)
    Tensor head;        // (vocabulary, hidden): the embedding itself when tied
    std::vector<LayerWeights> layers;
    int64_t weight_bytes = 0, parameters = 0;  // of all tensors above; a tied head counts once
    std::vector<Mapping> files;
    std::vector<std::unique_ptr<char[]>> copies;  // tensors that lie at an odd address in their file, or were 1 less
    std::string beside;  // the file's tensors that are none of the text model's: "score.weight and 2 others"
};

// ---- config.json ---------------------------------------------------------------------------------------------------

// What a family fixes, and what Transformers takes where a config is silent (transformers/models/*/configuration_*.py).
// hidden_size, intermediate_size and num_hidden_layers have no default here: a checkpoint without them is none.
struct Family {
    const char *architecture, *model_type;
    int heads, kv_heads, head_dim, vocabulary;  // 0: must be said; as many as heads; hidden_size / heads; must be said
    int context, window;
    int pattern;         // n: each n-th layer sees everything, the others slide; -n: the first of each n; 0: all alike
    int bos_id, end_id;  // -1: none
    // Biases, with a ? where the config's attention_bias or mlp_bias asks; norms of q and k; keys of a config that the
    // others do not have; and under whose name what is done otherwise stands here.
    const char *words;
    const char *names = "";  // of tensors, where they are not Llama's: "mlp.gate_proj=feed_forward.w1 ..."
    bool has(const char *word) const { return ::has(words, word); }
};

// clang-format off
constexpr Family families[] = {
    //                             heads kv  dim   vocab context window    bos end
    {"LlamaForCausalLM",   "llama",    0,  0,   0,     0,   2048,    0, 0,  1,  2, "qkv? output? mlp?"},
    {"MistralForCausalLM", "mistral",  0,  8,   0,     0, 131072, 4096, 0,  1,  2, ""},
    {"Qwen2ForCausalLM",   "qwen2",    0, 32,   0,     0,  32768, 4096, 0, -1, -1, "qkv"},
    {"Qwen3ForCausalLM",   "qwen3",    0, 32, 128,     0,  32768, 4096, 0, -1, -1, "qkv? output? norms"},
    {"Gemma3ForCausalLM", "gemma3_text", 8, 4, 256, 262208, 131072, 4096, 6, 2, 1,
     "qkv? output? norms gemma gemma3 query_pre_attn_scalar"},
    {"Gemma4ForCausalLM", "gemma4_text", 8, 4, 256, 262144, 131072,  512, 6, 2, 1,
     "qkv? output? norms gemma gemma4 num_kv_shared_layers per_layer_config"},
    {"GraniteSWAForCausalLM", "granite_swa", 20, 4, 0, 100352, 8192, 128, -4, 100257, 100257,
     "qkv? output? mlp? granite embedding_multiplier attention_multiplier layer_rope_theta"},
    {"Lfm2ForCausalLM", "lfm2", 32, 8, 0, 65536, 128000, 0, 0, 1, 2, "norms lfm2",
     "norm=embedding_norm input_layernorm=operator_norm post_attention_layernorm=ffn_norm q_norm=q_layernorm "
     "k_norm=k_layernorm o_proj=out_proj mlp.gate_proj=feed_forward.w1 mlp.up_proj=feed_forward.w3 "
     "mlp.down_proj=feed_forward.w2"},
};
// clang-format on

// No size in a config may exceed this, nor may heads * head_dim: products of two fit an int64_t with room to spare.
constexpr int max_size = 1 << 24;
constexpr int max_layers = 10000;

// `known`: words with a blank between.
inline void require_known(const Section &section, const char *what, const std::string &word, const std::string &known) {
    if (word.find(' ') == std::string::npos && (" " + known + " ").find(" " + word + " ") != std::string::npos) return;
    fail("%s: %s %s is not supported; supported %s %s", section.name.c_str(), what, printable(word).c_str(),
         known.find(' ') == std::string::npos ? "is" : "are", known.c_str());
}

// `text`: in it, the config of the text model, of one that also sees or hears and has another name.
inline const Family &find_family(const Section &config, const Section &text) {
    std::string model_type = config.text("model_type", ""), wanted = model_type, known;
    const cJSON *list = config.find("architectures");
    if (list && (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != 1 || !cJSON_IsString(list->child)))
        config.refuse("architectures", list, "a list of one name");
    if (list) wanted = list->child->valuestring;
    if (wanted == "LLaMAForCausalLM") wanted = "LlamaForCausalLM";  // as the first conversions spell it
    if (wanted.empty()) config.need("architectures");
    for (const Family &family : families) {
        known += (known.empty() ? "" : " ") + std::string(family.architecture);
        std::string name = family.architecture, type = family.model_type;
        if (text.object)
            name.replace(name.find("CausalLM"), 8, "ConditionalGeneration"), type = type.substr(0, type.find("_text"));
        if (wanted != (list ? name : type)) continue;
        if (text.object)
            require_known(text, "model_type", text.text("model_type", family.model_type), family.model_type);
        if (!model_type.empty() && model_type != type)
            fail("%s: model_type is %s, but %s asks for %s", config.name.c_str(), printable(model_type).c_str(),
                 name.c_str(), type.c_str());
        return family;
    }
    fail("%s: architecture %s is not supported; supported are %s", config.name.c_str(), printable(wanted).c_str(),
         known.c_str());
}

// Whether a key asks for nothing: `neutral` or a list of nothing else, false being 0 and true 1; or nothing at all.
inline bool is_neutral(const cJSON *item, double neutral) {
    if (cJSON_IsNumber(item)) return std::fabs(item->valuedouble - neutral) <= 1e-5 * std::fabs(neutral);
    if (cJSON_IsBool(item)) return cJSON_IsTrue(item) == (neutral != 0);
    if (cJSON_IsString(item)) return !*item->valuestring;
    for (const cJSON *each : items_of(item))
        if (!cJSON_IsArray(item) || !is_neutral(each, neutral)) return false;
    return true;
}

// What other architectures compute differently and no tensor shows: Granite, Cohere, MiniCPM, Falcon-H1 scale
// embedding, residual stream, scores or logits; Gemma 2 and OLMo cut them off; SmolLM3, Llama 4, MPT and DeepSeek place
// tokens in other ways; then experts, the order of steps, norms of q and k, more of Gemma 4. By what changes nothing:
inline void refuse_foreign_keys(const Section &config, const Family &family, const Config &sizes, const Kind &kind) {
    const std::pair<double, const char *> table[] = {
        {1,
         "embedding_multiplier residual_multiplier logits_scaling logit_scale scale_emb lm_head_multiplier "
         "key_multiplier attention_in_multiplier attention_out_multiplier mlp_multipliers no_rope_layers "
         "partial_rotary_factor rotary_pct"},
        {0,
         "attn_logit_softcapping final_logit_softcapping attn_logit_softcap clip_qkv no_rope_layer_interval "
         "nope_layer_interval attention_chunk_size attn_temperature_tuning rope_interleave alibi kv_lora_rank "
         "num_experts num_local_experts n_routed_experts use_parallel_residual parallel_attn attention_k_eq_v "
         "enable_moe_block use_double_wide_mlp hidden_size_per_layer_input use_bidirectional_attention "
         "num_kv_shared_layers layer_rope_theta per_layer_config"},
        {family.has("norms"), "use_qk_norm qk_layernorm"},
        {1 / std::sqrt(kind.key_width), "attention_multiplier"},
        {kind.key_width, "query_pre_attn_scalar"},
        {std::sqrt(sizes.layers), "scale_depth"},
        {sizes.hidden, "dim_model_base"}};
    for (const auto &[neutral, keys] : table) {
        for (const std::string &key : split(keys)) {
            const cJSON *item = config.find(key.c_str());
            if (item && !family.has(key.c_str()) && !is_neutral(item, neutral))
                config.refuse(key.c_str(), item,
                              formatted("%g, or no such key: %s computes without it", neutral, family.architecture));
        }
    }
}

// Throws unless the heads of a kind can be computed with.
inline void check_heads(const char *name, int heads, const Kind &kind) {
    if (heads % kind.kv_heads)
        fail("%s: num_attention_heads is %d, expected a multiple of num_key_value_heads, %d", name, heads,
             kind.kv_heads);
    if (kind.key_width % 2) fail("%s: head_dim is %d, expected an even number: RoPE turns pairs", name, kind.key_width);
    if (kind.key_width > max_size / heads)
        fail("%s: num_attention_heads * head_dim is %lld, expected at most %d", name, (long long)heads * kind.key_width,
             max_size);
}

// LFM2's own spellings of sizes. As in Transformers, w1 and w3 have two thirds of the rows that the config names, times
// a factor, up to a multiple of some number; unless it says that they have as many as it names.
inline int read_ffn(const Section &config) {
    const char *key = config.find("block_ff_dim") ? "block_ff_dim" : "intermediate_size";
    const int named = config.integer(key, 1, max_size);
    const double factor = config.number("block_ffn_dim_multiplier", 1e-6, 1e6, 1);
    const int unit = config.integer("block_multiple_of", 1, max_size, 256);
    if (!config.flag("block_auto_adjust_ff_dim", true)) return named;
    const double rows = unit * std::ceil(std::floor(factor * (2 * named / 3)) / unit);
    if (rows < 1 || rows > max_size)
        fail("%s: %s and block_ffn_dim_multiplier make an MLP of %.0f rows, expected 1 to %d", config.name.c_str(), key,
             rows, max_size);
    return (int)rows;
}

// `kind` is what the layers have in common.
inline void read_sizes(const Section &config, const Family &family, Config &out, Kind &kind) {
    auto or_none = [](int value) { return value ? std::optional<int>(value) : std::nullopt; };
    out.layers = config.integer("num_hidden_layers", 1, max_layers);
    out.hidden = config.integer("hidden_size", 1, max_size);
    out.ffn = family.has("lfm2") ? read_ffn(config) : config.integer("intermediate_size", 1, max_size);
    out.vocabulary = config.integer("vocab_size", 1, max_size, or_none(family.vocabulary));
    out.context = config.integer("max_position_embeddings", 1, 1 << 30, family.context);
    out.heads = config.integer("num_attention_heads", 1, max_size, or_none(family.heads));
    // A null asks for as many KV heads as heads; only a key that is not there takes the family's default.
    bool as_heads = config.has_null("num_key_value_heads") || family.kv_heads == 0;
    kind.kv_heads = config.integer("num_key_value_heads", 1, max_size, as_heads ? out.heads : family.kv_heads);
    int &width = kind.key_width = config.integer("head_dim", 1, max_size, family.head_dim);
    if (width == 0) {
        if (out.hidden % out.heads)
            fail("%s: hidden_size is %d, expected a multiple of num_attention_heads, %d (or a head_dim)",
                 config.name.c_str(), out.hidden, out.heads);
        width = out.hidden / out.heads;
    }
    check_heads(config.name.c_str(), out.heads, kind);
    out.norm_epsilon = config.number(family.has("lfm2") ? "norm_eps" : "rms_norm_eps", 1e-30, 1,
                                     family.has("granite") || family.has("lfm2") ? 1e-5 : 1e-6);
}

// Two spellings: rope_theta beside rope_scaling {type or rope_type, factor, ...}, or all of it in rope_parameters.
// As in Transformers, rope_scaling goes before rope_parameters, and a theta in either before the one beside them.
// Gemma's local layers turn in another way: first by rope_local_base_freq alone, later each kind has an object.
inline void read_rope(const Section &config, const Family &family, int context, Kind &kind) {
    const bool by_kind = family.has("gemma"), local = by_kind && kind.window;
    Section rope = config.section("rope_scaling");
    if (local || !rope.object || !rope.object->child) {
        rope = config.section("rope_parameters");
        if (by_kind) rope = rope.section(local ? "sliding_attention" : "full_attention");
    }
    const char *name = rope.name.c_str();
    for (const cJSON *item : items_of(rope.object))
        if (cJSON_IsObject(item))
            rope.refuse(printable(item->string).c_str(), item, "no object: one RoPE for all layers");
    kind.rope_theta = local ? config.number("rope_local_base_freq", 1, 1e15, 10000)
                            : config.number("rope_theta", 1, 1e15, by_kind || family.has("lfm2") ? 1e6 : 10000);
    kind.rope_theta = rope.number("rope_theta", 1, 1e15, kind.rope_theta);
    const bool partial = family.has("gemma4") && !local && !rope.object;

    std::string type = rope.text("rope_type", rope.text("type", partial ? "proportional" : "default"));
    kind.rope = {};
    kind.rope.turned = rope.number("partial_rotary_factor", 0, 1, partial ? 0.25 : 1);
    if (kind.rope.turned != 1 && type != "proportional")
        fail("%s: partial_rotary_factor is not supported; supported is 1", name);
    if (type == "default") return;
    require_known(rope, "rope_type", type, "default linear llama3 proportional");
    const std::optional<double> no_factor = type == "proportional" ? std::optional<double>(1) : std::nullopt;
    kind.rope.factor = rope.number("factor", 1e-6, 1e6, no_factor);
    if (kind.rope.factor == no_factor) return;
    kind.rope.kind = type == "llama3" ? RopeScaling::llama3 : RopeScaling::linear;
    if (type != "llama3") return;
    kind.rope.low_freq_factor = rope.number("low_freq_factor", 1e-6, 1e6);
    kind.rope.high_freq_factor = rope.number("high_freq_factor", 1e-6, 1e6);
    if (kind.rope.high_freq_factor <= kind.rope.low_freq_factor)
        fail("%s: high_freq_factor is %g, expected more than low_freq_factor, %g", name, kind.rope.high_freq_factor,
             kind.rope.low_freq_factor);
    int original = rope.integer("original_max_position_embeddings", 1, 1 << 30, context);
    kind.rope.original_context = config.integer("original_max_position_embeddings", 1, 1 << 30, original);
}

// How far the layers look back that look furthest; 0: some to the first position.
inline int widest_window(const std::vector<Kind> &kinds) {
    int widest = 0;
    for (const Kind &kind : kinds) widest = std::max(widest, kind.window ? kind.window : INT_MAX);
    return widest == INT_MAX ? 0 : widest;
}

// Mistral: every layer slides. Qwen: only with use_sliding_window, and then the layers from max_window_layers on. Gemma
// and Granite: by a pattern. These three, but not Llama and Mistral, may name other layers in layer_types.
inline std::vector<int> read_windows(const Section &config, const Family &family, int layers) {
    const std::string model_type = family.model_type;
    const bool qwen = model_type == "qwen2" || model_type == "qwen3", mixes = qwen || family.pattern;
    int window = 0;
    if (family.window > 0 && (!qwen || config.flag("use_sliding_window", false)))
        window = config.integer("sliding_window", 1, 1 << 30, config.has_null("sliding_window") ? 0 : family.window);
    const int first = qwen ? config.integer("max_window_layers", 0, max_layers, 28) : 0;
    const int every =
        family.pattern > 0 ? config.integer("sliding_window_pattern", 1, max_layers, family.pattern) : -family.pattern;
    std::vector<int> windows;
    for (int layer = 0; layer < layers; layer++) {
        const bool full = every ? (layer + (family.pattern > 0)) % every == 0 : layer < first;
        windows.push_back(full ? 0 : window);
    }

    const std::vector<const cJSON *> types = config.by_layer("layer_types", layers, " names");
    for (size_t i = 0; i < types.size(); i++) {
        int &layer = windows[i];
        std::string word = cJSON_IsString(types[i]) ? types[i]->valuestring : "";
        const char *other = mixes || layer ? "sliding_attention" : "full_attention";
        if (word != other && (!mixes || word != "full_attention"))
            config.refuse("an entry of layer_types", types[i],
                          (mixes ? "full_attention or " : "") + std::string(other));
        layer = word == "full_attention" ? 0 : window;
        if (word == "sliding_attention" && layer == 0)
            fail("%s: layer_types has sliding_attention, but use_sliding_window and sliding_window give no window",
                 config.name.c_str());
    }
    return windows;
}

// Which layers are short convolutions: LFM2 names them in layer_types, or the others by number.
inline std::vector<bool> read_convolutions(const Section &config, int layers) {
    std::vector<bool> convolves((size_t)layers);
    if (const cJSON *list = config.find("full_attn_idxs")) {
        if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) > layers)
            config.refuse("full_attn_idxs", list, formatted("a list of at most %d (num_hidden_layers) layers", layers));
        convolves.assign((size_t)layers, true);
        for (const cJSON *item : items_of(list)) {
            if (!is_whole(item, 0, layers - 1))
                config.refuse("an entry of full_attn_idxs", item, formatted("a layer from 0 to %d", layers - 1));
            convolves[(size_t)item->valuedouble] = false;
        }
    }
    const std::vector<const cJSON *> types = config.by_layer("layer_types", layers, " names");
    for (size_t i = 0; i < types.size(); i++) {
        const std::string word = cJSON_IsString(types[i]) ? types[i]->valuestring : "";
        if (word != "conv" && word != "full_attention")
            config.refuse("an entry of layer_types", types[i], "conv or full_attention");
        convolves[i] = word == "conv";
    }
    if (std::count(convolves.begin(), convolves.end(), false) == 0)
        fail("%s: all %d layers are convolutions, expected one with attention at least", config.name.c_str(), layers);
    return convolves;
}

// LFM2: convolutions, and between them layers that attend alike. Their kind comes first: of it commands say most.
inline void read_layers_of_lfm2(const Section &config, const Family &family, Kind kind, Config &out) {
    const int taps = config.integer("conv_L_cache", 1, 1000, 3);
    Kind convolution;
    convolution.kv_heads = 1, convolution.key_width = out.hidden, convolution.window = convolution.taps = taps;
    out.convolution_bias = config.flag("conv_bias", false);
    kind.value_width = kind.key_width;
    read_rope(config, family, out.context, kind);
    out.kinds = {kind};
    for (bool convolves : read_convolutions(config, out.layers))
        add_layer(out.kinds, out.rows, convolves ? convolution : kind);
}

// What differs from layer to layer: window, RoPE, and in Gemma 4 heads, which Transformers 5 writes to
// per_layer_config. The last num_kv_shared_layers read the rows of others.
inline void read_layers(const Section &config, const Family &family, const Kind &common, Config &out) {
    const bool gemma4 = family.has("gemma4");
    const std::vector<int> windows = read_windows(config, family, out.layers);
    const int own = out.layers - config.integer("num_kv_shared_layers", 0, out.layers - 1, 0);
    const Section by_layer = config.section("per_layer_config");
    const cJSON *thetas = family.has("layer_rope_theta") ? config.find("layer_rope_theta") : nullptr;
    if (thetas && (!cJSON_IsArray(thetas) || cJSON_GetArraySize(thetas) != out.layers))
        config.refuse("layer_rope_theta", thetas, "a number for each of the layers");
    const cJSON *theta = thetas ? thetas->child : nullptr;
    for (int layer = 0; layer < out.layers; layer++) {
        Kind kind = common;
        kind.window = gemma4 && layer == out.layers - 1 ? 0 : windows[(size_t)layer];  // the last sees everything
        const Section mine = by_layer.section(std::to_string(layer).c_str());
        mine.refuse_others("head_dim num_key_value_heads", "no such key: all layers have it in common");
        if (gemma4 && !kind.window && !by_layer.object)
            kind.key_width = config.integer("global_head_dim", 1, max_size, 512);
        kind.kv_heads = mine.integer("num_key_value_heads", 1, max_size, kind.kv_heads);
        kind.value_width = kind.key_width = mine.integer("head_dim", 1, max_size, kind.key_width);
        check_heads((mine.object ? mine : config).name.c_str(), out.heads, kind);
        read_rope(config, family, out.context, kind);
        if (theta && !(cJSON_IsNumber(theta) && theta->valuedouble >= 0 && theta->valuedouble <= 1e15))
            config.refuse("layer_rope_theta", theta, "numbers from 0 to 1e15");
        if (theta) kind.rope_theta = theta->valuedouble, theta = theta->next;
        add_layer(out.kinds, out.rows, kind, layer < own);
        if (out.rows.back().index < 0)
            fail("%s: num_kv_shared_layers is %d, but layer %d has no earlier one of its kind whose rows it could read",
                 config.name.c_str(), out.layers - own, layer);
    }
}

// generation_config.json goes before config.json, and there what is outside of text_config; the family comes last.
inline void read_special_ids(const Section &root, const Section &text, const Section &generation, const Family &family,
                             Config &out) {
    const int last = out.vocabulary - 1;
    auto with = [&](const char *key) { return generation.find(key) ? generation : root.find(key) ? root : text; };
    const Section bos = with("bos_token_id"), end = with("eos_token_id");
    bool no_bos = bos.has_null("bos_token_id") || family.bos_id > last;
    out.bos_id = bos.integer("bos_token_id", 0, last, no_bos ? -1 : family.bos_id);

    const cJSON *ids = end.find("eos_token_id");
    bool no_end = end.has_null("eos_token_id") || family.end_id < 0 || family.end_id > last;
    if (!ids && !no_end) out.end_ids = {family.end_id};
    for (const cJSON *id = cJSON_IsArray(ids) ? ids->child : ids; id; id = cJSON_IsArray(ids) ? id->next : nullptr) {
        if (!is_whole(id, 0, last))
            end.refuse("eos_token_id", ids, "ids from 0 to " + std::to_string(last) + " (vocab_size - 1)");
        out.end_ids.push_back((int)id->valuedouble);
    }
}

// From the two texts in memory; `generation_text` may be empty: no such file. Names are for messages.
inline Config parse_config(const std::string &name, const std::string &text, const std::string &generation_name,
                           const std::string &generation_text) {
    Json root = parse_json(name, text, /*as_python=*/true), generation_root;
    if (!generation_text.empty()) generation_root = parse_json(generation_name, generation_text, true);
    const Section whole{name, root.get()}, generation{generation_name, generation_root.get()};
    const Section text_config = whole.section("text_config"), &config = text_config.object ? text_config : whole;

    Config out;
    const Family &family = find_family(whole, text_config);
    out.family = &family;
    out.architecture = family.architecture;
    out.model_type = family.model_type;
    for (const Section &section : {config, whole})
        out.dtype = section.text("dtype", section.text("torch_dtype", out.dtype));
    if (out.dtype.rfind("torch.", 0) == 0) out.dtype = out.dtype.substr(6);
    if (out.dtype == "auto") out.dtype = "";  // as it is stored
    if (!out.dtype.empty()) require_known(config, "dtype", out.dtype, "float32 float16 bfloat16");
    const bool gemma = family.has("gemma");
    const char *key = gemma ? "hidden_activation" : "hidden_act", *other = gemma ? "hidden_act" : "hidden_activation";
    std::string activation = config.text(key, gemma ? "gelu_pytorch_tanh" : "silu");
    if (config.text(other, activation) != activation)
        config.refuse(other, config.find(other), activation + ", as " + key + " says");
    if (activation == "swish") activation = "silu";  // two names: x * sigmoid(x)
    require_known(config, key, activation, "silu gelu_pytorch_tanh");
    out.gelu = activation != "silu";
    for (const Section &section : {config, whole})
        if (const cJSON *item = section.find("quantization_config"))
            section.refuse("quantization_config", item,
                           "weights as they were trained, in F32 F16 BF16, and no such key");
    Kind kind;
    read_sizes(config, family, out, kind);
    refuse_foreign_keys(config, family, out, kind);
    family.has("lfm2") ? read_layers_of_lfm2(config, family, kind, out) : read_layers(config, family, kind, out);
    read_special_ids(whole, config, generation, family, out);
    if (gemma) out.embedding_scale = std::sqrt(out.hidden);
    if (family.has("gemma3")) out.score_scale = 1 / std::sqrt(config.number("query_pre_attn_scalar", 1e-6, 1e9, 256));
    if (family.has("gemma4")) out.score_scale = 1, config.need("hidden_size_per_layer_input");  // or it is 256
    if (family.has("granite")) {
        out.embedding_scale = config.number("embedding_multiplier", -1e9, 1e9, 1);
        out.score_scale = config.number("attention_multiplier", 1e-9, 1e9, 1);
    }
    out.tied = config.flag("tie_word_embeddings", whole.flag("tie_word_embeddings", family.heads > 0));
    if (family.has("lfm2")) out.tied = config.flag("tie_embedding", out.tied);
    auto biased = [&](const std::string &what, const char *asked) {
        return family.has(what.c_str()) || (family.has((what + "?").c_str()) && config.flag(asked, false));
    };
    out.qkv_bias = biased("qkv", "attention_bias");
    out.output_bias = biased("output", "attention_bias");
    out.mlp_bias = biased("mlp", "mlp_bias");
    out.qk_norm = family.has("norms");
    return out;
}

// What to do about a directory that holds no config.json, by what was given in its place.
inline std::string directory_cure(const std::string &given) {
    const size_t slash = given.find('/');
    if (std::filesystem::path(given).extension() == ".gguf")
        return "GGUF is not read here: fetch the checkpoint it was made from, with its safetensors, and name its "
               "directory";
    // models--org--name of the hub's cache, or its snapshots.
    std::string all = given.substr(0, given.find_last_not_of('/') + 1);
    if (std::filesystem::path(all).filename() != "snapshots") all = join_path(given, "snapshots");
    std::error_code none;
    if (std::filesystem::directory_iterator snapshots(all, none); !none) {
        std::string found;
        for (const auto &entry : snapshots)
            if (file_exists(entry.path() / "config.json")) found = std::max(found, entry.path().string());
        return found.empty() ? "it holds no whole snapshot: fetch it again" : "give its snapshot: -m " + found;
    }
    if (slash && slash != std::string::npos && given.find('/', slash + 1) == std::string::npos && given[0] != '.' &&
        slash + 1 < given.size() && !file_exists(given))
        return "no such directory; of the hub: `hf download " + given + " --local-dir " + given.substr(slash + 1) +
               "`, then -m " + given.substr(slash + 1);
    return "expected the directory that holds config.json and model.safetensors";
}

// The text of DIR/config.json, and what messages call it.
inline std::pair<std::string, std::string> read_config_file(const std::string &directory) {
    std::string name = join_path(directory, "config.json");
    if (!file_exists(name)) {
        std::string problem = strerror(errno);
        fail("%s: cannot open it: %s; %s", name.c_str(), problem.c_str(), directory_cure(directory).c_str());
    }
    return {name, read_file(name, max_json_bytes)};
}

inline Config load_config(const std::string &directory) {
    auto [name, text] = read_config_file(directory);
    std::string generation = join_path(directory, "generation_config.json");
    return parse_config(name, text, generation, file_exists(generation) ? read_file(generation, max_json_bytes) : "");
}

// ---- safetensors ---------------------------------------------------------------------------------------------------
// A file is: 8 bytes, the length n of the header (little-endian); n bytes of JSON,
//   {"model.norm.weight": {"dtype": "BF16", "shape": [64], "data_offsets": [0, 128]}, ..., "__metadata__": {...}}
// and the data. Offsets count from the start of the data; the tensors cover all of it, and none overlaps another.

struct StoredTensor {
    std::string file, dtype;  // the file as messages call it; the type as the file calls it
    std::vector<int64_t> shape;
    const char *data = nullptr;
    size_t bytes = 0;
};

struct TensorTable {
    std::string name;  // the file that lists them: model.safetensors, or the index of the shards
    std::map<std::string, StoredTensor> tensors;
};

// Bytes of an element, from the bits in its type's name: "BF16", "I64", "F8_E4M3"; 0: not known here, or not whole, so
// the tensor's size is not checked. Only F32, F16 and BF16 can be used; others may lie in the file beside them.
inline size_t stored_dtype_bytes(const std::string &dtype) {
    size_t digit = dtype.find_first_of("0123456789");
    if (digit == std::string::npos) return dtype == "BOOL";
    return strtoul(dtype.c_str() + digit, nullptr, 10) / 8;
}

inline std::vector<int64_t> read_counts(const Section &tensor, const char *key) {
    const cJSON *list = tensor.need(key);
    if (!cJSON_IsArray(list)) tensor.refuse(key, list, "a list of whole numbers");
    std::vector<int64_t> counts;
    for (const cJSON *item : items_of(list)) {
        if (!is_whole(item, 0, 1LL << 53)) tensor.refuse(key, list, "a list of whole numbers");  // exact in a double
        counts.push_back((int64_t)item->valuedouble);
    }
    return counts;
}

// One entry of the header. `data` (data_bytes) is the part of the file behind the header.
inline StoredTensor read_entry(const std::string &file, const cJSON *item, const char *data, size_t data_bytes) {
    Section entry{file + ": tensor " + printable(item->string), item};
    const char *name = entry.name.c_str();
    if (!cJSON_IsObject(item)) fail("%s: expected an object", name);
    entry.need("dtype");
    StoredTensor tensor{file, entry.text("dtype", ""), read_counts(entry, "shape")};
    std::vector<int64_t> offsets = read_counts(entry, "data_offsets");
    if (offsets.size() != 2 || offsets[0] > offsets[1])
        entry.refuse("data_offsets", entry.find("data_offsets"), "[begin, end]");
    if ((uint64_t)offsets[1] > data_bytes)
        fail("%s ends at byte %lld of the data, but the file holds %zu: it is cut off, fetch it again", name,
             (long long)offsets[1], data_bytes);
    tensor.data = data + offsets[0];
    tensor.bytes = (size_t)(offsets[1] - offsets[0]);

    size_t element = stored_dtype_bytes(tensor.dtype), expected = element;
    for (int64_t count : tensor.shape) {
        if (count && expected > SIZE_MAX / (size_t)count)
            entry.refuse("shape", entry.find("shape"), "one that fits a file");
        expected *= (size_t)count;
    }
    if (element && expected != tensor.bytes)
        fail("%s has %zu bytes, its shape %s in %s asks for %zu", name, tensor.bytes,
             printable(json_of(tensor.shape)).c_str(), tensor.dtype.c_str(), expected);
    return tensor;
}

// Throws unless the tensors cover the data from its first byte to its last, each byte once.
inline void check_coverage(const TensorTable &table, const char *data, size_t data_bytes) {
    std::set<std::tuple<const char *, size_t, std::string>> order;
    for (const auto &[name, tensor] : table.tensors) order.insert({tensor.data, tensor.bytes, name});
    const char *covered = data;
    for (const auto &[begin, bytes, name] : order) {
        if (begin != covered)
            fail("%s: tensor %s begins at byte %td of the data, expected %td: tensors %s", table.name.c_str(),
                 printable(name).c_str(), begin - data, covered - data, begin < covered ? "overlap" : "leave a gap");
        covered += bytes;
    }
    if (covered != data + data_bytes)
        fail("%s: holds %zu bytes of data, its header speaks of %td", table.name.c_str(), data_bytes, covered - data);
}

// The tensors of one file, given as its bytes in memory; nothing behind the header is read.
inline TensorTable parse_safetensors(const std::string &name, const char *bytes, size_t size) {
    const char lfs[] = "version https://git-lfs";
    if (size >= sizeof lfs - 1 && memcmp(bytes, lfs, sizeof lfs - 1) == 0)
        fail("%s: is a Git LFS pointer, not the weights: run `git lfs pull` where it came from", name.c_str());
    uint64_t header_bytes = 0;
    if (size < sizeof header_bytes) fail("%s: is %zu bytes long, too short for a safetensors file", name.c_str(), size);
    memcpy(&header_bytes, bytes, sizeof header_bytes);
    const size_t rest = size - sizeof header_bytes, most = std::min(rest, max_json_bytes);
    if (header_bytes > most)
        fail("%s: its header is said to be %llu bytes long, expected at most %zu: %s", name.c_str(),
             (unsigned long long)header_bytes, most,
             header_bytes > max_json_bytes ? "not a safetensors file" : "it is cut off, fetch it again");
    const char *header = bytes + sizeof header_bytes, *data = header + header_bytes;
    Json root = parse_json(name + ": header", std::string(header, (size_t)header_bytes));
    TensorTable table{name, {}};
    for (const cJSON *item : items_of(root.get()))
        if (strcmp(item->string, "__metadata__") != 0)
            table.tensors[item->string] = read_entry(name, item, data, rest - (size_t)header_bytes);
    check_coverage(table, data, rest - (size_t)header_bytes);
    return table;
}

inline TensorTable open_safetensors(const std::string &path, std::vector<Mapping> &files) {
    files.push_back(map_file(path));
    return parse_safetensors(path, files.back().get(), files.back().get_deleter().size);
}

// The shards that the index names, each opened once; a tensor is taken from the shard the index gives.
inline TensorTable open_shards(const std::string &directory, const std::string &index, std::vector<Mapping> &files) {
    Json root = parse_json(index, read_file(index, max_json_bytes), /*as_python=*/true);
    Section whole{index, root.get()}, map = whole.section("weight_map");
    whole.need("weight_map");
    TensorTable all{index, {}};
    std::map<std::string, TensorTable> shards;
    for (const cJSON *item : items_of(map.object)) {
        std::string shard = map.text(item->string, "");
        if (shard.empty() || shard == "." || shard == ".." || shard.find('/') != std::string::npos)
            map.refuse(printable(item->string).c_str(), item, "the name of a file in the same directory");
        if (!shards.count(shard)) {
            std::string path = join_path(directory, shard);
            if (!file_exists(path))
                fail("%s: cannot open it: %s; %s names it", path.c_str(), strerror(errno), index.c_str());
            shards[shard] = open_safetensors(path, files);
        }
        auto found = shards[shard].tensors.find(item->string);
        if (found == shards[shard].tensors.end())
            fail("%s: tensor %s is missing, %s says it is here", shards[shard].name.c_str(),
                 printable(item->string).c_str(), index.c_str());
        all.tensors[item->string] = found->second;
    }
    return all;
}

inline TensorTable open_weights(const std::string &directory, std::vector<Mapping> &files) {
    std::string single = join_path(directory, "model.safetensors"), index = single + ".index.json";
    if (!file_exists(single)) {
        if (file_exists(index)) return open_shards(directory, index, files);
        fail("%s: neither model.safetensors nor model.safetensors.index.json is there; no other format is read",
             directory.c_str());
    }
    return open_safetensors(single, files);
}

// ---- Config + tensors = Model --------------------------------------------------------------------------------------

// Takes tensors out of the table by name, with the shape the config asks for.
struct Binder {
    const TensorTable &table;
    Model &model;
    std::string prefix = "model.", head = "lm_head.";
    std::set<std::string> taken = {};

    // The family's name of a tensor, from Llama's: of each part, between dots, that has another one there.
    std::string named(std::string name) const {
        for (const std::string &pair : split(model.config.family->names)) {
            const size_t length = pair.find('=');
            const size_t at = ("." + name + ".").find("." + pair.substr(0, length) + ".");
            if (at != std::string::npos) name.replace(at, length, pair.substr(length + 1));
        }
        return name;
    }
    const StoredTensor *find(const std::string &name) const {
        auto found = table.tensors.find(named(name));
        return found == table.tensors.end() ? nullptr : &found->second;
    }
    Tensor take(const std::string &llama_name, const std::vector<int64_t> &shape) {
        const std::string name = named(llama_name);
        const StoredTensor *stored = find(llama_name);
        if (!stored)
            fail("%s: tensor %s is missing, config.json asks for it (%s, %d layers)", table.name.c_str(), name.c_str(),
                 model.config.architecture.c_str(), model.config.layers);
        if (stored->shape != shape)
            fail("%s: tensor %s has shape %s, config.json asks for %s", stored->file.c_str(), name.c_str(),
                 printable(json_of(stored->shape)).c_str(), json_of(shape).c_str());
        taken.insert(name);
        static const std::map<std::string, DType> types = {
            {"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16}};
        auto type = types.find(stored->dtype);
        if (type == types.end())
            fail("%s: tensor %s has dtype %s, supported are F32 F16 BF16", stored->file.c_str(), name.c_str(),
                 printable(stored->dtype).c_str());
        Tensor tensor{stored->data, type->second, shape.size() == 1 ? 1 : shape[0], shape.back()};
        if ((uintptr_t)tensor.data % (uintptr_t)dtype_bytes(tensor.type)) {
            model.copies.emplace_back(new char[stored->bytes]);
            memcpy(model.copies.back().get(), stored->data, stored->bytes);
            tensor.data = model.copies.back().get();
        }
        model.weight_bytes += (int64_t)stored->bytes;
        model.parameters += tensor.rows * tensor.cols;
        return tensor;
    }
    // A vector of float32 that is in no file as it is.
    template <class Number>
    Tensor made(int width, Number number) {
        model.copies.emplace_back(new char[(size_t)width * sizeof(float)]);
        float *copy = (float *)model.copies.back().get();
        for (int i = 0; i < width; i++) copy[i] = number(i);
        return {copy, DType::f32, 1, width};
    }
    // What RMSNorm multiplies with. Gemma 3 stores what is to be added to 1.
    Tensor norm(const std::string &name, int width) {
        const Tensor stored = take(name + ".weight", {width});
        if (!model.config.family->has("gemma3")) return stored;
        return made(width, [&](int i) { return 1 + number_of(stored, i); });
    }
    Linear linear(const std::string &name, int outputs, int inputs, bool bias) {
        return {take(name + ".weight", {outputs, inputs}), bias ? take(name + ".bias", {outputs}) : Tensor{}};
    }
};

// A layer with a short convolution. in_proj (3 hidden, hidden) has the rows of B, of C and of x, each as a slice.
inline LayerWeights bind_convolution(Binder &binder, const Config &config, const std::string &layer, int taps) {
    const int hidden = config.hidden;
    const bool bias = config.convolution_bias;
    const Linear all = binder.linear(layer + "conv.in_proj", 3 * hidden, hidden, bias);
    auto third = [&](int i) {
        auto slice = [&](Tensor tensor, int64_t rows, int64_t columns) {
            if (!tensor.data) return Tensor{};
            const char *start = (const char *)tensor.data + i * rows * columns * dtype_bytes(tensor.type);
            return Tensor{start, tensor.type, rows, columns};
        };
        return Linear{slice(all.weight, hidden, hidden), slice(all.bias, 1, hidden)};
    };
    LayerWeights out;
    out.attention_norm = binder.norm(layer + "input_layernorm", hidden);
    out.key = third(0), out.query = third(1), out.value = third(2);
    out.taps = binder.take(layer + "conv.conv.weight", {hidden, 1, taps});
    if (bias) out.taps_bias = binder.take(layer + "conv.conv.bias", {hidden});
    out.output = binder.linear(layer + "conv.out_proj", hidden, hidden, bias);
    out.mlp_norm = binder.norm(layer + "post_attention_layernorm", hidden);
    out.gate = binder.linear(layer + "mlp.gate_proj", config.ffn, hidden, config.mlp_bias);
    out.up = binder.linear(layer + "mlp.up_proj", config.ffn, hidden, config.mlp_bias);
    out.down = binder.linear(layer + "mlp.down_proj", hidden, config.ffn, config.mlp_bias);
    return out;
}

inline LayerWeights bind_layer(Binder &binder, const Config &config, int index) {
    const std::string layer = binder.prefix + "layers." + std::to_string(index) + ".", attention = layer + "self_attn.",
                      mlp = layer + "mlp.";
    const Family &family = *config.family;
    const Kind &kind = config.kind(index);
    if (kind.taps) return bind_convolution(binder, config, layer, kind.taps);
    const bool own = config.rows[(size_t)index].own;
    const int hidden = config.hidden, width = kind.key_width;
    const int query_width = config.heads * width, kv_width = kind.kv_heads * width;
    LayerWeights out;
    out.attention_norm = binder.norm(layer + "input_layernorm", hidden);
    out.query = binder.linear(attention + "q_proj", query_width, hidden, config.qkv_bias);
    if (own) {
        out.key = binder.linear(attention + "k_proj", kv_width, hidden, config.qkv_bias);
        out.value = binder.linear(attention + "v_proj", kv_width, hidden, config.qkv_bias);
        if (config.qk_norm) out.key_norm = binder.norm(attention + "k_norm", width);
        if (family.has("gemma4")) out.value_norm = binder.made(width, [](int) { return 1.0f; });
    } else {  // files may have them all the same
        for (const char *unused : {"k_proj", "v_proj", "k_norm", "v_norm"})
            binder.taken.insert(binder.named(attention + unused + ".weight"));
    }
    out.output = binder.linear(attention + "o_proj", hidden, query_width, config.output_bias);
    if (config.qk_norm) out.query_norm = binder.norm(attention + "q_norm", width);
    if (family.has("granite")) out.sinks = binder.take(attention + "sinks", {config.heads});
    if (family.has("gemma")) {  // Llama's name for the norm before the MLP is that of another one here
        out.attention_out_norm = binder.norm(layer + "post_attention_layernorm", hidden);
        out.mlp_out_norm = binder.norm(layer + "post_feedforward_layernorm", hidden);
    }
    out.mlp_norm =
        binder.norm(layer + (family.has("gemma") ? "pre_feedforward_layernorm" : "post_attention_layernorm"), hidden);
    out.gate = binder.linear(mlp + "gate_proj", config.ffn, hidden, config.mlp_bias);
    out.up = binder.linear(mlp + "up_proj", config.ffn, hidden, config.mlp_bias);
    out.down = binder.linear(mlp + "down_proj", hidden, config.ffn, config.mlp_bias);
    if (family.has("gemma4")) out.scale = number_of(binder.take(layer + "layer_scalar", {1}), 0);
    return out;
}

// The head is the embedding when the config ties them. As in Transformers 5, what is stored has the last word: if a
// tied checkpoint stores both, each is used as it is (some store the same matrix twice), if one, that for both.
inline void bind_embedding_and_head(Binder &binder, Model &model) {
    const std::vector<int64_t> shape = {model.config.vocabulary, model.config.hidden};
    const std::string embedding = binder.prefix + "embed_tokens.weight", head = binder.head + "weight";
    const bool has_head = binder.find(head);
    model.config.tied = model.config.tied && !(binder.find(embedding) && has_head);
    model.embedding = binder.take(model.config.tied && has_head ? head : embedding, shape);
    model.head = model.config.tied ? model.embedding : binder.take(head, shape);
}

// A tensor of the model proper that nothing here reads means another computation than this one: an architecture under
// another's name, a bias the config does not speak of, more layers than it says. Left aside, as in Transformers, are
// the RoPE tables that old Llamas store (rotary_emb.inv_freq), which follow from the config, and what stands beside the
// text model: what sees or hears, heads for other tasks (score, v_head).
inline void refuse_unused(Binder &binder) {
    const Config &config = binder.model.config;
    size_t beside = 0;
    for (const auto &[name, tensor] : binder.table.tensors) {
        if (binder.taken.count(name) || name.find("rotary_emb.") != std::string::npos) continue;
        if (name.rfind(binder.prefix, 0) == 0 || name.rfind(binder.head, 0) == 0)
            fail("%s: tensor %s is none of a %s with %d layers: config.json must name the architecture it belongs to",
                 tensor.file.c_str(), printable(name).c_str(), config.architecture.c_str(), config.layers);
        if (beside++ == 0) binder.model.beside = printable(name);
    }
    if (beside > 1) binder.model.beside += formatted(" and %zu others", beside - 1);
}

// Points the model's tensors into the table's; the caller keeps what the table points into alive.
inline Model bind_weights(Config config, const TensorTable &table) {
    Model model;
    model.config = std::move(config);
    Binder binder{table, model};
    for (const char *prefix : {"model.language_model.", "language_model.model."}) {  // of a part of a larger model
        const auto at = table.tensors.lower_bound(prefix);
        if (at != table.tensors.end() && at->first.rfind(prefix, 0) == 0) binder.prefix = prefix;
    }
    if (binder.find("language_model.lm_head.weight")) binder.head = "language_model.lm_head.";
    bind_embedding_and_head(binder, model);
    for (int i = 0; i < model.config.layers; i++) model.layers.push_back(bind_layer(binder, model.config, i));
    model.final_norm = binder.norm(binder.prefix + "norm", model.config.hidden);
    refuse_unused(binder);
    return model;
}

inline Model load_model(const std::string &directory) {
    Config config = load_config(directory);
    std::vector<Mapping> files;
    Model model = bind_weights(std::move(config), open_weights(directory, files));
    model.files = std::move(files);
    return model;
}
