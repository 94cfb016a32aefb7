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

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "formats.h"
#include "json.h"
#include "kinds.h"
#include "safetensors.h"

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

// What a layer adds to x of a second embedding of each token, its own, P numbers wide (Gemma 4 E2B and E4B).
struct PerLayer {
    Linear projection;  // (P, hidden), of the first embedding; what comes out is normed, and the second one added
    Linear gate;        // (P, hidden), of x
    Linear output;      // (hidden, P)
    Tensor out_norm;    // (1, hidden)
    float scale = 1;    // what x is multiplied with at the end
};

// With D the width of its kind's keys. Rows of query, key and value are head after head, D rows each; a head's rows are
// in the half-split order of RoPE: component i turns together with component i + D / 2.
struct LayerWeights {
    Tensor attention_norm;                  // (1, hidden)
    Linear query;                           // (heads * D, hidden)
    Linear key, value;                      // (kv_heads * D, hidden); absent where another layer's rows are read
    Linear output;                          // (hidden, heads * D)
    Tensor query_norm, key_norm;            // (1, D): RMSNorm of each head before RoPE (Qwen3), absent elsewhere
    Tensor all_query_norm, all_key_norm;    // (1, heads * D), (1, kv_heads * D): of all heads as one vector (OLMo 2)
    Tensor value_norm;                      // (1, D): likewise (Gemma 4)
    Tensor sinks;                           // (1, heads): learned sinks, scores without a value (gpt-oss)
    Tensor mlp_norm;                        // (1, hidden)
    Linear gate, up;                        // (ffn, hidden)
    Linear down;                            // (hidden, ffn)
    Tensor attention_out_norm, mlp_out_norm;  // (1, hidden): RMSNorm of what is added to x (Gemma 3), absent elsewhere
    Tensor taps, taps_bias;  // (hidden, L), (1, hidden): of a short convolution (LFM2), whose query, key and value are
                             // the parts C, B and x of its in_proj, (hidden, hidden) each
    float scale = 1;  // what x is multiplied with at the end of the MLP; where it is not 1, it has an mlp_out_norm
    PerLayer per_layer;
};

struct Family;

struct Config {
    const Family *family = nullptr;  // of a config that was read
    std::string dtype;               // what the config says of the weights; each Tensor knows its own type
    int layers = 0, hidden = 0, ffn = 0, heads = 0, vocabulary = 0;
    int shared_ffn = 0;            // of layers that read others' rows; 0: ffn, too
    bool keys_are_values = false;  // of layers without a window: the value is the key before its norm and RoPE
    int per_layer = 0, layer_vocabulary = 0;  // P of PerLayer, and of how many ids; 0: there is no second embedding
    float layer_scale = 0;                    // what that is multiplied with
    int context = 0;  // positions the model was made for
    double norm_epsilon = 0;
    double embedding_scale = 1;  // of what a token's embedding enters x with
    double score_scale = 0;      // q k is multiplied with; 0: 1 / sqrt(D)
    double logit_scale = 1;      // of logits
    double logit_cap = 0;        // c: a logit becomes c tanh(logit / c); 0: it stays
    bool gelu = false;           // the gate of the MLP: GELU by tanh, otherwise SiLU
    std::vector<Kind> kinds;
    std::vector<LayerRows> rows;  // (layers)
    bool tied = false;         // in a Model: the head is the embedding, not a matrix of its own
    std::vector<int> end_ids;  // a text ends after any of them; empty: it ends at -n or the context alone
    int bos_id = -1;           // -1: none
    bool qkv_bias = false, output_bias = false, mlp_bias = false;
    bool convolution_bias = false;  // of a convolution's taps and matrices
    const Kind &kind(int layer) const { return kinds[(size_t)rows[(size_t)layer].kind]; }
    bool ends(int id) const { return std::count(end_ids.begin(), end_ids.end(), id) > 0; }
};

// Move-only: tensors point into files (or copies), which live as long as the model.
struct Model {
    Config config;
    Tensor embedding;   // (vocabulary, hidden)
    Tensor final_norm;  // (1, hidden)
    Tensor head;        // (vocabulary, hidden): the embedding itself when tied
    Tensor layer_embedding;  // (vocabulary, layers * P): a token's second embedding, one for each layer, or absent
    Tensor layer_norm;       // (1, P): see PerLayer
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
    int context, window;                        // window -1: none where a config is silent; 0: whatever it says
    int pattern;  // n: each n-th layer sees everything, the others slide; -n: the first of each n; 0: all alike
    int bos_id = -1, end_id = -1;  // -1: none
    double epsilon = 0, theta = 0;
    // What it does that Llama does not, in the words below, and keys of a config that the others do not have.
    const char *words = "";
    const char *wrapper = "";  // "Gemma3": the family of those that also see or hear, and have this one as text_config
    const char *names = "";    // of tensors, where they are not Llama's: "mlp.gate_proj=feed_forward.w1 ..."
    bool has(const char *word) const { return ::has(words, word); }
};

// qkv, output, mlp      biases; with a ? where attention_bias or mlp_bias asks for them
// head-norms            RMSNorm of each head's query and key; all-norms: of all heads as one vector; value-norms: of
//                       each head's value, without weights
// norms-after           RMSNorm of what attention and MLP add to x; no-norms-before: and none of what they read
// one-plus              norms multiply with 1 + w
// gelu                  in the MLP's gate, where the config does not say otherwise, under another key
// sqrt-hidden           embeddings times sqrt(hidden);  unscaled: scores are not divided by sqrt(D)
// ropes                 one for each kind of layers
// fused-qkv, fused-mlp  query, key and value are one matrix in a file; gate and up are
// tied                  where the config is silent;  some-slide: by layer_types;  sinks: learned ones
// gemma4                widths by kind, rows that are shared, a layer's scale, embeddings by layer
// clang-format off
constexpr Family families[] = {
    //                               heads kv  dim   vocab context window   bos end  epsilon theta
    {"LlamaForCausalLM",    "llama",     0,  0,   0,     0,   2048,    0, 0,  1,  2, 1e-6, 1e4, "qkv? output? mlp?"},
    {"MistralForCausalLM",  "mistral",   0,  8,   0,     0, 131072, 4096, 0,  1,  2, 1e-6, 1e4, "", "Mistral3"},
    {"Ministral3ForCausalLM", "ministral3", 32, 8, 128, 131072, 262144, -1, 0, 1, 2, 1e-5, 1e4,
     "llama_4_scaling_beta", "Mistral3"},
    {"Qwen2ForCausalLM",    "qwen2",     0, 32,   0,     0,  32768, 4096, 0, -1, -1, 1e-6, 1e4, "qkv some-slide"},
    {"Qwen3ForCausalLM",    "qwen3",     0, 32, 128,     0,  32768, 4096, 0, -1, -1, 1e-6, 1e4,
     "qkv? output? head-norms some-slide"},
    {"SmolLM3ForCausalLM",  "smollm3",  16,  4,   0, 128256, 32768,   -1, 0, 128000, 128001, 1e-6, 2e6,
     "qkv? output? mlp? tied some-slide no_rope_layers no_rope_layer_interval"},
    {"Olmo2ForCausalLM",    "olmo2",    32,  0,   0,  50304,  2048,    0, 0, -1, 50279, 1e-5, 1e4,
     "qkv? output? all-norms norms-after no-norms-before"},
    {"Phi3ForCausalLM",     "phi3",     32,  0,   0,  32064,  4096,   -1, 0,  1, 32000, 1e-5, 1e4,
     "fused-qkv fused-mlp partial_rotary_factor"},
    {"GraniteForCausalLM",  "granite",  32,  0,   0,  32000,  2048,    0, 0,  1,  2, 1e-6, 1e4,
     "qkv? output? mlp? embedding_multiplier attention_multiplier residual_multiplier logits_scaling"},
    {"GraniteMoeHybridForCausalLM", "granitemoehybrid", 32, 0, 0, 32000, 2048, 0, 0, 1, 2, 1e-6, 1e4,
     "qkv? output? fused-mlp shared_intermediate_size position_embedding_type embedding_multiplier "
     "attention_multiplier residual_multiplier logits_scaling", "",
     "mlp.gate_up_proj=shared_mlp.input_linear mlp.down_proj=shared_mlp.output_linear"},
    {"GraniteSWAForCausalLM", "granite_swa", 20, 4, 0, 100352, 8192, 128, -4, 100257, 100257, 1e-5, 1e4,
     "qkv? output? mlp? tied some-slide sinks layer_rope_theta embedding_multiplier attention_multiplier "
     "residual_multiplier logits_scaling"},
    {"Gemma3ForCausalLM", "gemma3_text", 8,  4, 256, 262208, 131072, 4096, 6, 2, 1, 1e-6, 1e6,
     "qkv? output? head-norms norms-after one-plus gelu sqrt-hidden ropes tied some-slide query_pre_attn_scalar",
     "Gemma3"},
    {"Gemma4ForCausalLM", "gemma4_text", 8,  4, 256, 262144, 131072,  512, 6, 2, 1, 1e-6, 1e6,
     "qkv? output? head-norms value-norms norms-after gelu sqrt-hidden unscaled ropes tied some-slide gemma4 "
     "num_kv_shared_layers per_layer_config attention_k_eq_v use_double_wide_mlp hidden_size_per_layer_input "
     "final_logit_softcapping use_bidirectional_attention", "Gemma4"},
    {"Lfm2ForCausalLM", "lfm2",         32,  8,   0,  65536, 128000,   0, 0,  1,  2, 1e-5, 1e6,
     "head-norms tied lfm2", "",
     "norm=embedding_norm input_layernorm=operator_norm post_attention_layernorm=ffn_norm q_norm=q_layernorm "
     "k_norm=k_layernorm o_proj=out_proj mlp.gate_proj=feed_forward.w1 mlp.up_proj=feed_forward.w3 "
     "mlp.down_proj=feed_forward.w2"},
};

// Families that do not run here, and what their configs leave open of a cache's size (commands/sizes.h): numbers as
// above, or, where there is no context, words alone:
// own-width             of heads, hidden_size / heads only by chance: head_dim must be said
// multi-query           one KV head, where a config is silent
// swa-heads             of layers with a window must be said
// hybrid                is what layers with attention are called;  all-attend: beside what else a layer has
// attention_chunk_size  of layers that RoPE turns: a query sees its own chunk of the text alone
constexpr Family others[] = {
    //                     heads kv  dim v. context window
    {"", "mixtral phimoe",     0,  8,   0, 0, 131072,   -1, 0},
    {"", "starcoder2",        24,  2,   0, 0,   4096,   -1, 0},
    {"", "gemma",             16, 16, 256, 0,   8192,    0, 0},
    {"", "gemma2",             8,  4, 256, 0,   8192, 4096, 2, -1, -1, 0, 0, "some-slide"},
    {"", "cohere2",           64,  0,   0, 0,   8192, 4096, 4, -1, -1, 0, 0, "some-slide"},
    {"", "falcon gpt_bigcode", 0,  0,   0, 0,      0,    0, 0, -1, -1, 0, 0, "multi-query"},
    {"", "mimo_v2_flash",      0,  0,   0, 0,      0,    0, 0, -1, -1, 0, 0, "swa-heads"},
    {"", "falcon_h1",          0,  0,   0, 0,      0,    0, 0, -1, -1, 0, 0, "all-attend"},
    {"", "zamba zamba2",       0,  0,   0, 0,      0,    0, 0, -1, -1, 0, 0, "hybrid"},
    {"", "llama4_text",        0,  0,   0, 0,      0, 8192, 0, -1, -1, 0, 0,
     "own-width attention_chunk_size no_rope_layers"},
    {"", "ernie4_5 gemma3n_text glm glm4 gpt_oss helium internlm3 minimax_m2 nemotron_h qwen3_5_text "
     "qwen3_5_moe_text qwen3_next seed_oss vaultgemma", 0, 0, 0, 0, 0, 0, 0, -1, -1, 0, 0, "own-width"},
};
// clang-format on

// No size in a config may exceed this, nor may heads * head_dim: products of two fit an int64_t with room to spare.
constexpr int max_size = 1 << 24, max_ids = max_size - 1;  // base/ranking.h counts ids in 24 bits
constexpr int max_layers = 10000;

// What is asked for and does not run here: the family that is nearest to it, and what is in its way.
constexpr struct {
    const char *begins, *family, *differs;
} nearest_families[] = {
    {"Gemma", "Gemma3ForCausalLM", "caps of scores (Gemma 2), or with the norms and windows it has (Gemma)"},
    {"Gemma3n", "Gemma4ForCausalLM", "AltUp and LAuReL, more residual streams than one"},
    {"Qwen3Moe", "Qwen3ForCausalLM", "experts"},
    {"Qwen3Next", "Qwen3ForCausalLM", "linear attention and experts"},
    {"Qwen3_5", "Qwen3ForCausalLM", "linear attention"},
    {"Qwen2Moe", "Qwen2ForCausalLM", "experts"},
    {"Mixtral", "MistralForCausalLM", "experts"},
    {"Ministral", "MistralForCausalLM", "windows of some layers"},
    {"Llama4", "LlamaForCausalLM", "experts, chunks of attention, and layers without RoPE"},
    {"Deepseek", "LlamaForCausalLM", "latents (MLA) and experts"},
    {"GptOss", "GraniteSWAForCausalLM", "experts"},
    {"GraniteMoe", "GraniteForCausalLM", "experts and Mamba layers"},
    {"Olmo3", "Olmo2ForCausalLM", "windows of some layers"},
    {"PhiFor", "Phi3ForCausalLM", "LayerNorm, and attention beside the MLP"},
    {"Cohere", "LlamaForCausalLM", "LayerNorm, and attention beside the MLP"},
    {"Glm", "LlamaForCausalLM", "RoPE of neighbours, of half a head"},
    {"GPT", "LlamaForCausalLM", "learned positions and LayerNorm"},
};

// `text`: in it, the config of the text model, of one that also sees or hears and has another name. A base model,
// without a head of its own (Qwen3Model, as embedding models are published), is one whose head is tied.
inline const Family &find_family(const Section &config, const Section &text) {
    std::string model_type = config.text("model_type", ""), wanted = model_type, known;
    const Json *list = config.find("architectures");
    if (list && (!is_list(list) || count_of(list) != 1 || !is_text(&list->items[0])))
        config.refuse("architectures", list, "a list of one name");
    if (list) wanted = list->items[0].text;
    if (wanted == "LLaMAForCausalLM") wanted = "LlamaForCausalLM";  // as the first conversions spell it
    if (wanted.empty()) config.need("architectures");
    std::string types;  // of the text models of a wrapper
    for (const Family &family : families) {
        known += " " + std::string(family.architecture, strlen(family.architecture) - strlen("ForCausalLM"));
        std::string type = family.model_type, name = family.architecture, stem = name.substr(0, name.find("ForCausal"));
        std::string base = stem + (type.find("_text") == std::string::npos ? "Model" : "TextModel");
        if (text.object) {
            type = stem = family.wrapper, name = stem + "ForConditionalGeneration", base = stem + "Model";
            std::transform(type.begin(), type.end(), type.begin(), ::tolower);
        }
        if (wanted != (list ? name : type) && !(list && wanted == base)) continue;
        types += (types.empty() ? "" : " ") + std::string(family.model_type);
        if (text.object && text.text("model_type", family.model_type) != family.model_type) continue;
        if (!model_type.empty() && model_type != type)
            fail("%s: model_type is %s, but %s asks for %s", config.name.c_str(), printable(model_type).c_str(),
                 name.c_str(), type.c_str());
        return family;
    }
    if (!types.empty()) text.require_known("model_type", text.text("model_type", ""), types);
    std::string nearest;
    for (const auto &other : nearest_families)
        if (wanted.rfind(other.begins, 0) == 0)
            nearest = formatted(": nearest is %s, without its %s", other.family, other.differs);
    fail("%s: architecture %s is not supported%s", config.name.c_str(), printable(wanted).c_str(),
         (nearest.empty() ? "; supported are" + known + ", each ForCausalLM" : nearest).c_str());
}

// What other architectures compute differently and no tensor shows: Granite, Cohere, MiniCPM, Falcon-H1 scale
// embedding, residual stream, scores or logits; Gemma 2 and OLMo cut them off; SmolLM3, Llama 4, MPT and DeepSeek place
// tokens in other ways; then experts, the order of steps, norms of q and k, more of Gemma 4. By what changes nothing:
inline void refuse_foreign_keys(const Section &config, const Family &family, const Config &sizes, const Kind &kind) {
    const std::pair<double, const char *> table[] = {
        {1,
         "embedding_multiplier residual_multiplier logits_scaling logit_scale scale_emb lm_head_multiplier "
         "key_multiplier attention_in_multiplier attention_out_multiplier mlp_multipliers no_rope_layers "
         "partial_rotary_factor rotary_pct is_causal"},
        {0,
         "attn_logit_softcapping final_logit_softcapping attn_logit_softcap clip_qkv no_rope_layer_interval "
         "nope_layer_interval attention_chunk_size attn_temperature_tuning rope_interleave alibi kv_lora_rank "
         "num_experts num_local_experts n_routed_experts use_parallel_residual parallel_attn attention_k_eq_v "
         "enable_moe_block use_double_wide_mlp hidden_size_per_layer_input use_bidirectional_attention "
         "num_kv_shared_layers layer_rope_theta per_layer_config"},
        {family.has("head-norms"), "use_qk_norm qk_layernorm"},
        {1 / std::sqrt(kind.key_width), "attention_multiplier"},
        {kind.key_width, "query_pre_attn_scalar"},
        {std::sqrt(sizes.layers), "scale_depth"},
        {sizes.hidden, "dim_model_base"}};
    for (const auto &[neutral, keys] : table) {
        for (const std::string &key : split(keys)) {
            const Json *item = config.find(key.c_str());
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
    const int named = config.integer(key, 1, max_size), unit = config.integer("block_multiple_of", 1, max_size, 256);
    const double factor = config.number("block_ffn_dim_multiplier", 1e-6, 1e6, 1);
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
    const char *ffn = family.has("shared_intermediate_size") ? "shared_intermediate_size" : "intermediate_size";
    out.ffn = family.has("lfm2") ? read_ffn(config) : config.integer(ffn, 1, max_size);
    out.vocabulary = config.integer("vocab_size", 1, max_ids, or_none(family.vocabulary));
    out.context = config.integer("max_position_embeddings", 1, 1 << 30, family.context);
    out.heads = config.integer("num_attention_heads", 1, max_size, or_none(family.heads));
    // A null asks for as many KV heads as heads; only a key that is not there takes the family's default.
    bool as_heads = config.has_null("num_key_value_heads") || family.kv_heads == 0;
    kind.kv_heads = config.integer("num_key_value_heads", 1, max_size, as_heads ? out.heads : family.kv_heads);
    int &width = kind.key_width = config.integer("head_dim", 1, max_size, family.head_dim);
    if (width == 0 && out.hidden % out.heads)
        fail("%s: hidden_size is %d, expected a multiple of num_attention_heads, %d (or a head_dim)",
             config.name.c_str(), out.hidden, out.heads);
    if (width == 0) width = out.hidden / out.heads;
    check_heads(config.name.c_str(), out.heads, kind);
    out.norm_epsilon = config.number(family.has("lfm2") ? "norm_eps" : "rms_norm_eps", 1e-30, 1, family.epsilon);
}

// Two spellings: rope_theta beside rope_scaling {type or rope_type, factor, ...}, or all of it in rope_parameters.
// As in Transformers, rope_scaling goes before rope_parameters, and a theta in either before the one beside them.
// Gemma's local layers turn in another way: first by rope_local_base_freq alone, later each kind has an object.
inline void read_rope(const Section &config, const Family &family, int context, Kind &kind) {
    const bool by_kind = family.has("ropes"), local = by_kind && kind.window;
    Section rope = config.section("rope_scaling");
    if (by_kind && count_of(rope.object) && config.find("rope_parameters"))
        config.refuse("rope_scaling", rope.object, "none beside rope_parameters");
    if (local || !count_of(rope.object)) {
        rope = config.section("rope_parameters");
        if (by_kind) rope = rope.section(local ? "sliding_attention" : "full_attention");
    }
    if (family.has("llama_4_scaling_beta") && !rope.object) config.need("rope_parameters");  // or YaRN by 16
    const char *name = rope.name.c_str();
    for (const Json *item : items_of(rope.object))
        if (is_object(item))
            rope.refuse(printable(item->key).c_str(), item, "no object: one RoPE for all layers");
    const Section nothing{config.name, nullptr}, beside = family.has("gemma4") ? nothing : config;  // there it has none
    if (!beside.object && rope.object && !rope.find("rope_theta") && config.find("rope_theta"))
        config.refuse("rope_theta", config.find("rope_theta"), "it in rope_parameters, for each kind of layers");
    kind.rope_theta = local ? beside.number("rope_local_base_freq", 1, 1e15, 10000)
                            : beside.number("rope_theta", 1, 1e15, family.theta);
    kind.rope_theta = rope.number("rope_theta", 1, 1e15, kind.rope_theta);
    const bool partial = family.has("gemma4") && !local && !rope.object;

    for (const char *key : {"type", "truncate"})  // Transformers 4 and 5 read these in other ways
        if (const Json *item = member(rope.object, key); by_kind && item)
            rope.refuse(key, item, "no such key (but rope_type)");
    std::string type = rope.text("rope_type", rope.text("type", partial ? "proportional" : "default"));
    if (family.has("fused-qkv") && (type == "su" || type == "yarn")) type = "longrope";  // of the first Phi-3
    const double part = config.number("partial_rotary_factor", 0, 1, 1);
    kind.rope = read_scaling(by_kind ? nothing : config, rope, type, partial ? 0.25 : part, kind.key_width, context,
                             family.has("fused-qkv") ? family.context : 0);
    if (kind.rope.rotary != 1 && !family.has("partial_rotary_factor"))
        fail("%s: partial_rotary_factor is not supported; supported is 1", name);
    if (!family.has("llama_4_scaling_beta")) return;
    kind.rope.query_growth = rope.number("llama_4_scaling_beta", 0, 1e3);
    if (!kind.rope.original_context)
        kind.rope.original_context = rope.integer("original_max_position_embeddings", 1, 1 << 30, context);
}

// Which layers RoPE turns: not each fourth one of SmolLM3, and of Granite 4 all or none.
inline std::vector<bool> read_turning(const Section &config, const Family &family, int layers) {
    std::vector<bool> turning((size_t)layers, true);
    if (family.has("position_embedding_type")) {
        const std::string type = config.text("position_embedding_type", "");
        if (!type.empty()) config.require_known("position_embedding_type", type, "rope nope");
        turning.assign((size_t)layers, type == "rope");
        config.need("num_local_experts"), config.need("layer_types");  // or there are 8, and no layer attends
    }
    if (!family.has("no_rope_layers")) return turning;
    const Json *list = config.find("no_rope_layers");
    std::vector<const Json *> listed;  // [], as Llama 4 is published, is no list
    if (!is_list(list) || count_of(list)) listed = config.by_layer("no_rope_layers", layers, " of 0 and 1");
    const int every = config.integer("no_rope_layer_interval", 1, max_layers, 4);
    for (size_t i = 0; i < turning.size(); i++) {
        if (!listed.empty() && !is_whole(listed[i], 0, 1)) config.refuse("no_rope_layers", listed[i], "0 or 1 in it");
        turning[i] = listed.empty() ? (int)(i + 1) % every != 0 : listed[i]->number != 0;
    }
    return turning;
}

// Mistral: every layer slides. Qwen: only with use_sliding_window, and then the layers from max_window_layers on. Gemma
// and Granite: by a pattern. SmolLM3: those that RoPE does not turn. Some may name other layers in layer_types.
// A window as long as the context is none: no text of the model's is longer (Phi-4-mini: 262,144 of 131,072).
inline std::vector<int> read_windows(const Section &config, const Family &family, const std::vector<bool> &turning,
                                     int context) {
    const int layers = (int)turning.size();
    const bool mixes = family.has("some-slide"), asked = mixes && !family.pattern, qwen = asked && family.window > 0;
    int window = 0;
    if (family.window && (!asked || config.flag("use_sliding_window", false)))
        window = config.integer("sliding_window", 1, 1 << 30,
                                config.has_null("sliding_window") ? 0 : std::max(0, family.window));
    const int first = qwen ? config.integer("max_window_layers", 0, max_layers, 28) : 0;
    const int every =
        family.pattern > 0 ? config.integer("sliding_window_pattern", 1, max_layers, family.pattern) : -family.pattern;
    std::vector<int> windows;
    for (int layer = 0; layer < layers; layer++) {
        bool full = every ? (layer + (family.pattern > 0)) % every == 0 : layer < first;
        if (family.has("no_rope_layers")) full = turning[(size_t)layer];
        windows.push_back(full ? 0 : window);
    }

    const std::vector<const Json *> types = config.by_layer("layer_types", layers, " names");
    for (size_t i = 0; i < types.size(); i++) {
        int &layer = windows[i];
        std::string word = is_text(types[i]) ? types[i]->text : "";
        if (word == "attention") word = "full_attention";  // Granite 4
        const char *other = mixes || layer ? "sliding_attention" : "full_attention";
        if (word != other && (!mixes || word != "full_attention"))
            config.refuse("an entry of layer_types", types[i],
                          (mixes ? "full_attention or " : "") + std::string(other));
        layer = word == "full_attention" ? 0 : window;
        if (word == "sliding_attention" && layer == 0)
            fail("%s: layer_types has sliding_attention, but use_sliding_window and sliding_window give no window",
                 config.name.c_str());
    }
    if (family.has("gemma4")) windows.back() = 0;  // whatever the config says, the last sees everything
    for (int &back : windows) back = back < context ? back : 0;
    return windows;
}

// Which layers are short convolutions: LFM2 names them in layer_types, or the others by number.
inline std::vector<bool> read_convolutions(const Section &config, int layers) {
    const Json *list = config.find("full_attn_idxs");
    std::vector<bool> convolves((size_t)layers, list);
    if (list && (!is_list(list) || count_of(list) > layers))
        config.refuse("full_attn_idxs", list, formatted("a list of at most %d (num_hidden_layers) layers", layers));
    for (const Json *item : items_of(list)) {
        if (!is_whole(item, 0, layers - 1))
            config.refuse("an entry of full_attn_idxs", item, formatted("a layer from 0 to %d", layers - 1));
        convolves[(size_t)item->number] = false;
    }
    const std::vector<const Json *> types = config.by_layer("layer_types", layers, " names");
    for (size_t i = 0; i < types.size(); i++) {
        const std::string word = is_text(types[i]) ? types[i]->text : "";
        if (word != "conv" && word != "full_attention" && word != "attention")
            config.refuse("an entry of layer_types", types[i], "conv or full_attention");
        convolves[i] = word == "conv";
    }
    if (std::count(convolves.begin(), convolves.end(), false) == 0)
        fail("%s: all layers are convolutions, expected one with attention at least", config.name.c_str());
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
    const std::vector<bool> turning = read_turning(config, family, out.layers);
    const std::vector<int> windows = read_windows(config, family, turning, out.context);
    const int own = out.layers - config.integer("num_kv_shared_layers", 0, out.layers - 1, 0);
    const Section by_layer = config.section("per_layer_config");
    std::vector<Section> of_layer((size_t)out.layers, {config.name, nullptr});  // "05" is layer 5
    for (const Json *item : items_of(by_layer.object)) {
        const std::string key = item->key;
        const size_t layer = strtoull(key.c_str(), nullptr, 10);
        if (key.find_first_not_of("0123456789") != std::string::npos || layer >= of_layer.size())
            by_layer.refuse(printable(key).c_str(), item, formatted("layers from 0 to %d as keys", out.layers - 1));
        of_layer[layer] = by_layer.section(key.c_str());
    }
    const Json *thetas = family.has("layer_rope_theta") ? config.find("layer_rope_theta") : nullptr;
    if (thetas && (!is_list(thetas) || count_of(thetas) != out.layers))
        config.refuse("layer_rope_theta", thetas, "a number for each of the layers");
    for (int layer = 0; layer < out.layers; layer++) {
        Kind kind = common;
        kind.window = windows[(size_t)layer];
        const Section &mine = of_layer[(size_t)layer];
        mine.refuse_others("head_dim num_key_value_heads", "no such key: all layers have it in common");
        if (gemma4 && !kind.window && !by_layer.object && !config.has_null("per_layer_config")) {
            kind.key_width = config.integer("global_head_dim", 1, max_size, 512);
            if (config.flag("attention_k_eq_v", false))
                kind.kv_heads = config.integer("num_global_key_value_heads", 1, max_size, kind.kv_heads);
        }
        kind.kv_heads = mine.integer("num_key_value_heads", 1, max_size, kind.kv_heads);
        kind.value_width = kind.key_width = mine.integer("head_dim", 1, max_size, kind.key_width);
        check_heads(mine.name.c_str(), out.heads, kind);
        read_rope(config, family, out.context, kind);
        const Json *theta = thetas ? &thetas->items[(size_t)layer] : nullptr;
        if (theta && !(is_number(theta) && theta->number >= 0 && theta->number <= 1e15))
            config.refuse("layer_rope_theta", theta, "numbers from 0 to 1e15");
        if (theta) kind.rope_theta = theta->number;
        if (!turning[(size_t)layer]) kind.rope_theta = 0;
        if (kind.rope_theta == 0) kind.rope = {};
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

    const Json *ids = end.find("eos_token_id");
    bool no_end = end.has_null("eos_token_id") || family.end_id < 0 || family.end_id > last;
    if (!ids && !no_end) out.end_ids = {family.end_id};
    for (const Json *id : entries_of(ids)) {
        if (!is_whole(id, 0, last))
            end.refuse("eos_token_id", ids, "ids from 0 to " + std::to_string(last) + " (vocab_size - 1)");
        out.end_ids.push_back((int)id->number);
    }
}

// Granite adds r y to x where others add y. RMSNorm does not see how large x is, so x / r is kept in its place: it
// begins at 1 / r of the embedding, and epsilon, which is added to the mean of x^2, becomes epsilon / r^2.
inline void read_factors(const Section &config, const Family &family, Config &out) {
    if (family.has("sqrt-hidden")) out.embedding_scale = std::sqrt(out.hidden);
    if (family.has("unscaled")) out.score_scale = 1;
    if (family.has("query_pre_attn_scalar"))
        out.score_scale = 1 / std::sqrt(config.number("query_pre_attn_scalar", 1e-6, 1e9, 256));
    if (family.has("embedding_multiplier")) {
        const double residual = config.number("residual_multiplier", 1e-6, 1e6, 1);
        out.embedding_scale = config.number("embedding_multiplier", -1e9, 1e9, 1) / residual;
        out.norm_epsilon /= residual * residual;
        out.score_scale = config.number("attention_multiplier", 1e-9, 1e9, 1);
        out.logit_scale = 1 / config.number("logits_scaling", 1e-9, 1e9, 1);
    }
    if (!family.has("gemma4")) return;
    out.logit_cap = config.number("final_logit_softcapping", 0, 1e9, 0);
    out.per_layer = config.integer("hidden_size_per_layer_input", 0, max_size / out.layers, 256);
    out.layer_scale = std::sqrt((float)out.per_layer / 2);
    const int least = out.per_layer ? out.vocabulary : 0;
    out.layer_vocabulary = config.integer("vocab_size_per_layer_input", least, max_size, family.vocabulary);
    const std::string both_ways = config.text("use_bidirectional_attention", "vision");  // among an image's tokens
    config.require_known("use_bidirectional_attention", both_ways, "vision");
    out.keys_are_values = config.flag("attention_k_eq_v", false);
    if (config.flag("use_double_wide_mlp", false)) out.shared_ffn = 2 * out.ffn;
}

inline Config read_config(const Section &whole, const Section &generation) {
    const Section text_config = whole.section("text_config"), &config = text_config.object ? text_config : whole;

    Config out;
    const Family &family = find_family(whole, text_config);
    out.family = &family;
    for (const Section &section : {config, whole})
        out.dtype = section.text("dtype", section.text("torch_dtype", out.dtype));
    if (out.dtype.rfind("torch.", 0) == 0) out.dtype = out.dtype.substr(6);
    if (out.dtype == "auto") out.dtype = "";  // as it is stored
    if (!out.dtype.empty()) config.require_known("dtype", out.dtype, "float32 float16 bfloat16");
    const bool gelu = family.has("gelu");
    const char *key = gelu ? "hidden_activation" : "hidden_act", *other = gelu ? "hidden_act" : "hidden_activation";
    std::string activation = config.text(key, gelu ? "gelu_pytorch_tanh" : "silu");
    if (config.text(other, activation) != activation)
        config.refuse(other, config.find(other), activation + ", as " + key + " says");
    if (activation == "swish") activation = "silu";  // two names: x * sigmoid(x)
    config.require_known(key, activation, family.has("lfm2") ? "silu" : "silu gelu_pytorch_tanh");
    out.gelu = activation != "silu";
    for (const Section &section : {config, whole})
        if (const Json *item = section.find("quantization_config"))
            section.refuse("quantization_config", item,
                           "weights as they were trained, in F32 F16 BF16, and no such key");
    Kind kind;
    read_sizes(config, family, out, kind);
    refuse_foreign_keys(config, family, out, kind);
    family.has("lfm2") ? read_layers_of_lfm2(config, family, kind, out) : read_layers(config, family, kind, out);
    read_special_ids(whole, config, generation, family, out);
    read_factors(config, family, out);
    out.tied = whole.flag("tie_word_embeddings", text_config.object || family.has("tied"));
    if (family.has("lfm2")) out.tied = config.flag("tie_embedding", out.tied);
    auto biased = [&](const std::string &what, const char *asked) {
        return family.has(what.c_str()) || (family.has((what + "?").c_str()) && config.flag(asked, false));
    };
    out.qkv_bias = biased("qkv", "attention_bias");
    out.output_bias = biased("output", "attention_bias");
    out.mlp_bias = biased("mlp", "mlp_bias");
    return out;
}

// From the two texts in memory; `generation_text` may be empty: no such file. Names are for messages.
inline Config parse_config(const std::string &name, const std::string &text, const std::string &generation_name,
                           const std::string &generation_text) {
    Json root = parse_json(name, text, /*as_python=*/true), generation_root;
    if (!generation_text.empty()) generation_root = parse_json(generation_name, generation_text, true);
    return read_config({name, &root}, {generation_name, &generation_root});
}

// What to do about what was given as a directory and holds no config.json, by what is found in its place.
inline std::string directory_cure(const std::string &given) {
    const std::string cure = ": weights_tools/from_gguf.py FILE DIR makes a directory of it";
    const size_t slash = given.find('/');
    const std::filesystem::path path = given;
    std::error_code none;
    if (path.extension() == ".gguf") return "GGUF is not read here" + cure;
    if (given[0] == '~') return "a shell does not replace ~ within quotes: write $HOME, or leave the quotes out";
    if (std::filesystem::is_regular_file(path, none))
        return "it is a file: give its directory" +
               (path.has_parent_path() ? ", -m " + path.parent_path().string() : ", -m .");
    // models--org--name of the hub's cache, or its snapshots.
    const std::string all = given.substr(0, given.find_last_not_of('/') + 1);
    const std::string snapshots =
        std::filesystem::path(all).filename() == "snapshots" ? all : join_path(all, "snapshots");
    if (std::filesystem::is_directory(snapshots, none)) {
        std::string best, main;
        for (const auto &entry : std::filesystem::directory_iterator(snapshots, none))
            if (file_exists(entry.path() / "config.json")) best = std::max(best, entry.path().string());
        std::ifstream(join_path(snapshots, "../refs/main")) >> main;  // names the one that was fetched last
        if (!main.empty() && file_exists(join_path(join_path(snapshots, main), "config.json")))
            best = join_path(snapshots, main);
        return best.empty() ? "it holds no whole snapshot: fetch it again" : "give its snapshot: -m " + best;
    }
    if (file_exists(path / "adapter_config.json"))
        return "it holds an adapter (LoRA): merge it into its base model, with merge_and_unload() of peft, and save "
               "that";
    for (const auto &entry : std::filesystem::directory_iterator(path, none))
        if (entry.path().extension() == ".gguf")
            return "it holds GGUF, " + entry.path().filename().string() + ", which is not read here" + cure;
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

// ---- Config + tensors = Model --------------------------------------------------------------------------------------

// Where a tensor comes from.
struct Part {
    int first = 0, all = 0;  // rows from `first` on of a matrix of `all` rows; 0: a matrix of its own
};
struct Origin {
    std::string name;            // Llama's, below "model."; "": it is in no file, and each number is 1
    std::vector<int64_t> shape;  // of a vector its width
    bool matrix = false;         // every token is multiplied with it
    Part part = {};              // also of the bias of such a matrix
    bool norm = false;           // RMSNorm multiplies with it, all of it times `scale`
    double scale = 1;
};
inline Origin norm_of(const std::string &name, int width, double scale = 1) {
    return {name + ".weight", {width}, false, {}, /*norm=*/true, scale};
}
inline bool has(const Config &config, const char *word) { return config.family && config.family->has(word); }

// Each tensor of a layer, once: visit(tensor, whether this layer has it, its origin). Loading and moving them and
// counting operations all go through this list.
template <class Layer, class Visit>
void visit_layer(Layer &w, const Config &config, int index, Visit &visit) {
    const Kind &kind = config.kind(index);
    const bool own = config.rows[(size_t)index].own, convolves = kind.taps > 0, attends = !convolves;
    const int hidden = config.hidden, more = config.per_layer, width = kind.key_width;
    const int query = (convolves ? 1 : config.heads) * width, kv = kind.kv_heads * width;
    const std::string layer = "layers." + std::to_string(index) + ".", mlp = layer + "mlp.";
    const std::string mixer = layer + (convolves ? "conv." : "self_attn.");
    auto linear = [&](auto &to, bool here, const std::string &name, int outputs, int inputs, bool bias,
                      Part part = {}) {
        visit(to.weight, here, Origin{name + ".weight", {outputs, inputs}, /*matrix=*/true, part});
        visit(to.bias, here && bias, Origin{name + ".bias", {outputs}, false, part});
    };

    // Some files have query, key and value in one matrix; of a convolution they are C, B and x, in another order.
    const bool bias = convolves ? config.convolution_bias : config.qkv_bias;
    const bool output_bias = convolves ? config.convolution_bias : config.output_bias;
    const std::string joint = convolves ? "in_proj" : has(config, "fused-qkv") ? "qkv_proj" : "";
    auto input = [&](auto &to, bool here, const char *name, int outputs, int first) {
        if (joint.empty()) return linear(to, here, mixer + name, outputs, hidden, bias);
        linear(to, here, mixer + joint, outputs, hidden, bias, {first, query + 2 * kv});
    };
    input(w.query, true, "q_proj", query, convolves ? kv : 0);
    input(w.key, own, "k_proj", kv, convolves ? 0 : query);
    input(w.value, own, config.keys_are_values && !kind.window ? "k_proj" : "v_proj", kv, query + kv);
    visit(w.query_norm, attends && has(config, "head-norms"), norm_of(mixer + "q_norm", width));
    visit(w.key_norm, attends && has(config, "head-norms") && own, norm_of(mixer + "k_norm", width));
    visit(w.value_norm, attends && has(config, "value-norms") && own, Origin{"", {width}});
    visit(w.all_query_norm, has(config, "all-norms"), norm_of(mixer + "q_norm", query));
    visit(w.all_key_norm, has(config, "all-norms"), norm_of(mixer + "k_norm", kv));
    visit(w.sinks, has(config, "sinks"), Origin{mixer + "sinks", {config.heads}});
    visit(w.taps, convolves, Origin{mixer + "conv.weight", {hidden, 1, kind.taps}});
    visit(w.taps_bias, convolves && bias, Origin{mixer + "conv.bias", {hidden}});
    linear(w.output, true, mixer + "o_proj", hidden, query, output_bias);

    const int ffn = !own && config.shared_ffn ? config.shared_ffn : config.ffn;
    const bool both = has(config, "fused-mlp");
    const std::string gate = both ? "gate_up_proj" : "gate_proj", up = both ? gate : "up_proj";
    linear(w.gate, true, mlp + gate, ffn, hidden, config.mlp_bias, both ? Part{0, 2 * ffn} : Part{});
    linear(w.up, true, mlp + up, ffn, hidden, config.mlp_bias, both ? Part{ffn, 2 * ffn} : Part{});
    linear(w.down, true, mlp + "down_proj", hidden, ffn, config.mlp_bias);

    // Where there are norms after, Llama's name for the one before the MLP is that of another one.
    const bool before = !has(config, "no-norms-before"), after = has(config, "norms-after");
    visit(w.attention_norm, before, norm_of(layer + "input_layernorm", hidden));
    const char *mlp_norm = after ? "pre_feedforward_layernorm" : "post_attention_layernorm";
    visit(w.mlp_norm, before, norm_of(layer + mlp_norm, hidden));
    visit(w.attention_out_norm, after, norm_of(layer + "post_attention_layernorm", hidden));
    visit(w.mlp_out_norm, after, norm_of(layer + "post_feedforward_layernorm", hidden));

    auto &second = w.per_layer;
    const Part mine = {index * more, config.layers * more};
    linear(second.projection, more, "per_layer_model_projection", more, hidden, false, mine);
    linear(second.gate, more, layer + "per_layer_input_gate", more, hidden, false);
    linear(second.output, more, layer + "per_layer_projection", hidden, more, false);
    visit(second.out_norm, more, norm_of(layer + "post_per_layer_input_norm", hidden));
}

// And each of a model. The second embedding of tokens and what the first adds to it come to
// (embedding * sqrt(P) + RMSNorm(projection)) / sqrt(2): what both are divided by is in Config::layer_scale, and put
// into the norm's weights here.
template <class M, class Visit>
void visit_tensors(M &model, Visit visit) {
    const Config &config = model.config;
    const int hidden = config.hidden, more = config.per_layer;
    visit(model.embedding, true, Origin{"embed_tokens.weight", {config.vocabulary, hidden}});
    visit(model.head, true, Origin{"lm_head.weight", {config.vocabulary, hidden}, /*matrix=*/true});
    visit(model.layer_embedding, more,
          Origin{"embed_tokens_per_layer.weight", {config.layer_vocabulary, config.layers * more}});
    visit(model.layer_norm, more, norm_of("per_layer_projection_norm", more, std::sqrt(0.5)));
    for (int i = 0; i < config.layers; i++) visit_layer(model.layers[(size_t)i], config, i, visit);
    visit(model.final_norm, true, norm_of("norm", hidden, config.logit_scale));
}

// Takes tensors out of the table by name, with the shape the config asks for.
struct Binder {
    const TensorTable &table;
    Model &model;
    std::string outer = "", prefix = "model.";  // of lm_head, and of all else
    std::map<std::string, Tensor> taken = {};

    // The name in this file, from Llama's: a family has others for some parts between dots, and where the head is the
    // embedding, a file may have either.
    std::string named(std::string name) const {
        const std::string embedding = "embed_tokens.weight", head = "lm_head.weight";
        if (model.config.tied && (name == embedding || name == head))
            name = table.tensors.count(outer + head) ? head : embedding;
        name = (name.rfind("lm_head.", 0) == 0 ? outer : prefix) + name;
        for (const std::string &pair : split(model.config.family->names)) {
            const size_t length = pair.find('=');
            const size_t at = ("." + name + ".").find("." + pair.substr(0, length) + ".");
            if (at != std::string::npos) name.replace(at, length, pair.substr(length + 1));
        }
        return name;
    }
    // Bytes that live as long as the model.
    char *room(size_t bytes) { return model.copies.emplace_back(new char[bytes]).get(); }
    Tensor take(const std::string &llama_name, const std::vector<int64_t> &shape) {
        const std::string name = named(llama_name);
        const auto found = table.tensors.find(name);
        const StoredTensor *stored = found == table.tensors.end() ? nullptr : &found->second;
        if (!stored)
            fail("%s: tensor %s is missing, config.json asks for it (%s, %s)", table.name.c_str(), name.c_str(),
                 model.config.family->architecture, counted(model.config.layers, "layer").c_str());
        if (stored->shape != shape)
            fail("%s: tensor %s has shape %s, config.json asks for %s", stored->file.c_str(), name.c_str(),
                 printable(json_of(stored->shape)).c_str(), json_of(shape).c_str());
        if (taken.count(name)) return taken.at(name);
        const std::vector<std::string> types = {"F32", "F16", "BF16"};  // in the order of DType
        const auto type = std::find(types.begin(), types.end(), stored->dtype);
        if (type == types.end())
            fail("%s: tensor %s has dtype %s, supported are F32 F16 BF16", stored->file.c_str(), name.c_str(),
                 printable(stored->dtype).c_str());
        Tensor tensor{stored->data, (DType)(type - types.begin()), shape.size() == 1 ? 1 : shape[0], shape.back()};
        if ((uintptr_t)tensor.data % (uintptr_t)dtype_bytes(tensor.type))
            tensor.data = memcpy(room(stored->bytes), stored->data, stored->bytes);
        model.weight_bytes += (int64_t)stored->bytes;
        model.parameters += tensor.rows * tensor.cols;
        return taken[name] = tensor;
    }
    // A vector of float32 that is in no file as it is.
    template <class Number>
    Tensor made(int64_t width, Number number) {
        float *copy = (float *)room((size_t)width * sizeof(float));
        for (int64_t i = 0; i < width; i++) copy[i] = number(i);
        return {copy, DType::f32, 1, width};
    }
    // Gemma 3 stores what is to be added to 1.
    void operator()(Tensor &to, bool here, const Origin &from) {
        if (!here) return;
        if (from.name.empty()) return void(to = made(from.shape[0], [](int64_t) { return 1.0f; }));
        std::vector<int64_t> shape = from.shape;
        if (from.part.all) shape[0] = from.part.all;
        to = take(from.name, shape);
        int64_t &length = shape.size() == 1 ? to.cols : to.rows, row = shape.size() == 1 ? 1 : to.cols;
        to.data = (const char *)to.data + from.part.first * row * dtype_bytes(to.type), length = from.shape[0];
        const float one = from.norm && model.config.family->has("one-plus");
        if (one == 0 && from.scale == 1) return;
        to = made(to.cols, [&, stored = to](int64_t i) { return (one + number_of(stored, i)) * (float)from.scale; });
    }
};

// A tensor of the model proper that nothing here reads means another computation than this one: an architecture under
// another's name, a bias the config does not speak of, more layers than it says. Left aside, as in Transformers, are
// the RoPE tables that old Llamas store (rotary_emb.inv_freq), which follow from the config, and what stands beside the
// text model: what sees or hears, heads for other tasks (score, v_head).
inline void refuse_unused(Binder &binder) {
    const Config &config = binder.model.config;
    size_t beside = 0;
    std::set<std::string> parts;
    for (const auto &[name, tensor] : binder.taken) parts.insert(name.substr(0, name.find('.') + 1));
    for (const auto &[name, tensor] : binder.table.tensors) {
        if (binder.taken.count(name) || name.find("rotary_emb.") != std::string::npos) continue;
        const std::string part = name.substr(0, name.find('.') + 1);  // of a base model's "layers." and the like
        const bool own = binder.prefix.empty() ? parts.count(part) > 0 : name.rfind(binder.prefix, 0) == 0;
        if (own || name.rfind(binder.outer + "lm_head.", 0) == 0)
            fail("%s: tensor %s is none of a %s with %s: config.json must name the architecture it belongs to",
                 tensor.file.c_str(), printable(name).c_str(), config.family->architecture,
                 counted(config.layers, "layer").c_str());
        if (beside++ == 0) binder.model.beside = printable(name);
    }
    if (beside > 1) binder.model.beside += " and " + counted((int64_t)beside - 1, "other");
}

// Points the model's tensors into the table's; the caller keeps what the table points into alive. The head is the
// embedding when the config ties them. As in Transformers 5, what is stored has the last word: if a tied checkpoint
// stores both, each is used as it is (some store the same matrix twice), if one, that for both.
inline Model bind_weights(Config config, const TensorTable &table) {
    Model model;
    model.config = std::move(config);
    model.layers.resize((size_t)model.config.layers);
    Binder binder{table, model};
    // Of a part of a larger model; of a base model, alone or as a part.
    for (const char *prefix : {"", "language_model.", "model.", "language_model.model.", "model.language_model."}) {
        const auto at = table.tensors.lower_bound(prefix + std::string("layers."));
        if (at != table.tensors.end() && at->first.rfind(prefix + std::string("layers."), 0) == 0)
            binder.prefix = prefix;
    }
    if (table.tensors.count("language_model.lm_head.weight")) binder.outer = "language_model.";
    if (table.tensors.count(binder.prefix + "embed_tokens.weight") &&
        table.tensors.count(binder.outer + "lm_head.weight"))
        model.config.tied = false;
    visit_tensors(model, std::ref(binder));
    for (int i = 0; i < model.config.layers; i++) {
        const std::string layer = "layers." + std::to_string(i) + ".", attention = layer + "self_attn.";
        LayerWeights &w = model.layers[(size_t)i];
        if (model.config.family->has("gemma4"))  // of what comes last
            (model.config.per_layer ? w.per_layer.scale : w.scale) =
                number_of(binder.take(layer + "layer_scalar", {1}), 0);
        if (model.config.rows[(size_t)i].own) continue;
        for (const char *unused : {"k_proj", "v_proj", "k_norm", "v_norm"})  // of shared rows, files may have them
            binder.taken[binder.named(attention + unused + ".weight")] = {};
    }
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
