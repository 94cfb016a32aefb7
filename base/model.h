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

#include <dirent.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

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
};

// What layers have in common whose rows are alike: a cache keeps the rows of a kind in one store (cache.h).
struct Kind {
    int kv_heads = 0;
    int key_width = 0, value_width = 0;  // numbers of a head's row: D. MLA: rank + rope, and 0: the value is in the key
    int window = 0;         // the query at position p sees positions max(0, p - window + 1) .. p; 0: all of 0 .. p
    double rope_theta = 0;  // 0: nothing turns, whatever the position
    RopeScaling rope = {};
    int layers = 0;  // that store rows
};

// Where a layer's rows are.
struct LayerRows {
    int kind = 0, index = 0;  // in Config::kinds, and among the layers of that kind that store rows
    bool own = true;          // false: the layer reads rows that an earlier one stored
    bool last = true;         // false: a later layer reads them, too
};

struct Config {
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
    const Kind &kind(int layer) const { return kinds[(size_t)rows[(size_t)layer].kind]; }
};

inline bool same_scaling(const RopeScaling &a, const RopeScaling &b) {
    return a.kind == b.kind && a.factor == b.factor && a.low_freq_factor == b.low_freq_factor &&
           a.high_freq_factor == b.high_freq_factor && a.original_context == b.original_context;
}

// One more layer, of a kind that others may have, too. Without rows of its own it reads those of the last layer of its
// kind that has some.
inline void add_layer(std::vector<Kind> &kinds, std::vector<LayerRows> &rows, const Kind &kind, bool own = true) {
    auto alike = [&](const Kind &other) {
        return kind.kv_heads == other.kv_heads && kind.key_width == other.key_width &&
               kind.value_width == other.value_width && kind.window == other.window &&
               kind.rope_theta == other.rope_theta && same_scaling(kind.rope, other.rope);
    };
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
    std::vector<std::unique_ptr<char[]>> copies;  // tensors that lie at an odd address in their file
};

// ---- config.json ---------------------------------------------------------------------------------------------------

// What a family fixes, and what Transformers takes where a config is silent (transformers/models/*/configuration_*.py).
// The five sizes hidden_size, intermediate_size, num_hidden_layers, num_attention_heads and vocab_size have no default
// here: a checkpoint without them is not a checkpoint.
struct Family {
    const char *architecture, *model_type;
    int kv_heads, head_dim;  // 0: as many as heads; hidden_size / heads
    int context, window;
    int bos_id, end_id;                                           // -1: none
    enum Bias { never, always, if_asked } qkv_bias, output_bias;  // if_asked: where attention_bias is true
    bool reads_mlp_bias, qk_norm;
};

// clang-format off
constexpr Family families[] = {
    //                               kv  dim context  window bos end  q, k, v bias      output bias       mlp    qk_norm
    {"LlamaForCausalLM",   "llama",   0,   0,   2048,    0,  1,  2,  Family::if_asked, Family::if_asked, true,  false},
    {"MistralForCausalLM", "mistral", 8,   0, 131072, 4096,  1,  2,  Family::never,    Family::never,    false, false},
    {"Qwen2ForCausalLM",   "qwen2",  32,   0,  32768, 4096, -1, -1,  Family::always,   Family::never,    false, false},
    {"Qwen3ForCausalLM",   "qwen3",  32, 128,  32768, 4096, -1, -1,  Family::if_asked, Family::if_asked, false, true},
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

inline const Family &find_family(const Section &config) {
    std::string model_type = config.text("model_type", ""), wanted = model_type, known;
    const cJSON *list = config.find("architectures");
    if (list && (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != 1 || !cJSON_IsString(list->child)))
        config.refuse("architectures", list, "a list of one name");
    if (list) wanted = list->child->valuestring;
    if (wanted == "LLaMAForCausalLM") wanted = "LlamaForCausalLM";  // as the first conversions spell it
    if (wanted.empty()) config.need("architectures");
    for (const Family &family : families) {
        known += (known.empty() ? "" : " ") + std::string(family.architecture);
        if (wanted != (list ? family.architecture : family.model_type)) continue;
        if (!model_type.empty() && model_type != family.model_type) {
            fail("%s: model_type is %s, but %s asks for %s", config.name.c_str(), printable(model_type).c_str(),
                 family.architecture, family.model_type);
        }
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
    for (const cJSON *child = item->child; child; child = child->next)
        if (!cJSON_IsArray(item) || !is_neutral(child, neutral)) return false;
    return true;
}

// What other architectures compute differently and no tensor shows: Granite, Cohere, MiniCPM, Falcon-H1 scale
// embedding, residual stream, scores or logits; Gemma 2 and OLMo cut them off; SmolLM3, Llama 4, MPT and DeepSeek place
// tokens in other ways; then experts, the order of a layer's steps, and norms of q and k. By the value that changes
// nothing:
inline void refuse_foreign_keys(const Section &config, const Family &family, const Config &sizes, const Kind &kind) {
    const std::pair<double, const char *> table[] = {
        {1,
         "embedding_multiplier residual_multiplier logits_scaling logit_scale scale_emb lm_head_multiplier "
         "key_multiplier attention_in_multiplier attention_out_multiplier mlp_multipliers no_rope_layers "
         "partial_rotary_factor rotary_pct"},
        {0,
         "attn_logit_softcapping final_logit_softcapping attn_logit_softcap clip_qkv no_rope_layer_interval "
         "nope_layer_interval attention_chunk_size attn_temperature_tuning rope_interleave alibi kv_lora_rank "
         "num_experts num_local_experts n_routed_experts use_parallel_residual parallel_attn"},
        {family.qk_norm, "use_qk_norm qk_layernorm"},
        {1 / std::sqrt(kind.key_width), "attention_multiplier"},
        {kind.key_width, "query_pre_attn_scalar"},
        {std::sqrt(sizes.layers), "scale_depth"},
        {sizes.hidden, "dim_model_base"}};
    for (const auto &[neutral, keys] : table) {
        std::istringstream words(keys);
        for (std::string key; words >> key;) {
            const cJSON *item = config.find(key.c_str());
            if (item && !is_neutral(item, neutral))
                config.refuse(key.c_str(), item,
                              formatted("%g, or no such key: %s computes without it", neutral, family.architecture));
        }
    }
}

// `kind` is what the layers have in common.
inline void read_sizes(const Section &config, const Family &family, Config &out, Kind &kind) {
    const char *name = config.name.c_str();
    out.layers = config.integer("num_hidden_layers", 1, max_layers);
    out.hidden = config.integer("hidden_size", 1, max_size);
    out.ffn = config.integer("intermediate_size", 1, max_size);
    out.vocabulary = config.integer("vocab_size", 1, max_size);
    out.context = config.integer("max_position_embeddings", 1, 1 << 30, family.context);
    out.heads = config.integer("num_attention_heads", 1, max_size);
    // A null asks for as many KV heads as heads; only a key that is not there takes the family's default.
    bool as_heads = config.has_null("num_key_value_heads") || family.kv_heads == 0;
    kind.kv_heads = config.integer("num_key_value_heads", 1, max_size, as_heads ? out.heads : family.kv_heads);
    if (out.heads % kind.kv_heads) {
        fail("%s: num_attention_heads is %d, expected a multiple of num_key_value_heads, %d", name, out.heads,
             kind.kv_heads);
    }
    int &width = kind.key_width = config.integer("head_dim", 1, max_size, family.head_dim);
    if (width == 0) {
        if (out.hidden % out.heads) {
            fail("%s: hidden_size is %d, expected a multiple of num_attention_heads, %d (or a head_dim)", name,
                 out.hidden, out.heads);
        }
        width = out.hidden / out.heads;
    }
    if (width % 2) fail("%s: head_dim is %d, expected an even number: RoPE turns pairs", name, width);
    if (width > max_size / out.heads) {
        fail("%s: num_attention_heads * head_dim is %lld, expected at most %d", name,
             (long long)out.heads * width, max_size);
    }
    kind.value_width = width;
    out.norm_epsilon = config.number("rms_norm_eps", 1e-30, 1, 1e-6);
}

// Two spellings: rope_theta beside rope_scaling {type or rope_type, factor, ...}, or all of it in rope_parameters.
// As in Transformers, rope_scaling goes before rope_parameters, and a theta in either before the one beside them.
inline void read_rope(const Section &config, int context, Kind &kind) {
    Section rope = config.section("rope_scaling");
    if (!rope.object || !rope.object->child) rope = config.section("rope_parameters");
    const char *name = rope.name.c_str();
    for (const cJSON *item = rope.object ? rope.object->child : nullptr; item; item = item->next) {
        if (cJSON_IsObject(item))
            rope.refuse(printable(item->string).c_str(), item, "no object: one RoPE for all layers");
    }
    if (rope.number("partial_rotary_factor", 0, 1, 1) != 1)
        fail("%s: partial_rotary_factor is not supported; supported is 1", name);
    kind.rope_theta = rope.number("rope_theta", 1, 1e15, config.number("rope_theta", 1, 1e15, 10000));

    std::string type = rope.text("rope_type", rope.text("type", "default"));
    if (type == "default") return;
    require_known(rope, "rope_type", type, "default linear llama3");
    kind.rope.kind = type == "linear" ? RopeScaling::linear : RopeScaling::llama3;
    kind.rope.factor = rope.number("factor", 1e-6, 1e6);
    if (type == "linear") return;
    kind.rope.low_freq_factor = rope.number("low_freq_factor", 1e-6, 1e6);
    kind.rope.high_freq_factor = rope.number("high_freq_factor", 1e-6, 1e6);
    if (kind.rope.high_freq_factor <= kind.rope.low_freq_factor) {
        fail("%s: high_freq_factor is %g, expected more than low_freq_factor, %g", name, kind.rope.high_freq_factor,
             kind.rope.low_freq_factor);
    }
    int original = rope.integer("original_max_position_embeddings", 1, 1 << 30, context);
    kind.rope.original_context = config.integer("original_max_position_embeddings", 1, 1 << 30, original);
}

// How far the layers look back that look furthest; 0: some to the first position.
inline int widest_window(const std::vector<Kind> &kinds) {
    int widest = 0;
    for (const Kind &kind : kinds) {
        if (kind.window == 0) return 0;
        widest = std::max(widest, kind.window);
    }
    return widest;
}

// Mistral: every layer slides. Qwen: only with use_sliding_window, and then the layers from max_window_layers on, or
// those that layer_types names. Llama: none. Of these two, layer_types may say nothing else.
inline std::vector<int> read_windows(const Section &config, const Family &family, int layers) {
    const std::string model_type = family.model_type;
    bool qwen = model_type == "qwen2" || model_type == "qwen3";
    int window = 0;
    if (family.window > 0 && (!qwen || config.flag("use_sliding_window", false))) {
        window =
            config.integer("sliding_window", 1, 1 << 30, config.has_null("sliding_window") ? 0 : family.window);
    }
    int first = qwen ? config.integer("max_window_layers", 0, max_layers, 28) : 0;
    std::vector<int> windows;
    for (int layer = 0; layer < layers; layer++) windows.push_back(layer < first ? 0 : window);

    const cJSON *types = config.find("layer_types");
    if (!types) return windows;
    if (!cJSON_IsArray(types) || cJSON_GetArraySize(types) != layers) {
        config.refuse("layer_types", types, "a list of " + std::to_string(layers) + " (num_hidden_layers) names");
    }
    const cJSON *type = types->child;
    for (int &layer : windows) {
        std::string word = cJSON_IsString(type) ? type->valuestring : "";
        const char *other = qwen || layer ? "sliding_attention" : "full_attention";
        if (word != other && (!qwen || word != "full_attention"))
            config.refuse("an entry of layer_types", type, (qwen ? "full_attention or " : "") + std::string(other));
        layer = word == "full_attention" ? 0 : window;
        if (word == "sliding_attention" && layer == 0) {
            fail("%s: layer_types has sliding_attention, but use_sliding_window and sliding_window give no window",
                 config.name.c_str());
        }
        type = type->next;
    }
    return windows;
}

// generation_config.json goes before config.json; a family's default counts only where neither has the key.
inline void read_special_ids(const Section &config, const Section &generation, const Family &family, Config &out) {
    const int last = out.vocabulary - 1;
    const Section &bos = generation.find("bos_token_id") ? generation : config;
    bool no_bos = bos.has_null("bos_token_id") || family.bos_id > last;
    out.bos_id = bos.integer("bos_token_id", 0, last, no_bos ? -1 : family.bos_id);

    const Section &end = generation.find("eos_token_id") ? generation : config;
    const cJSON *ids = end.find("eos_token_id");
    bool no_end = end.has_null("eos_token_id") || family.end_id < 0 || family.end_id > last;
    if (!ids && !no_end) out.end_ids = {family.end_id};
    for (const cJSON *id = cJSON_IsArray(ids) ? ids->child : ids; id; id = cJSON_IsArray(ids) ? id->next : nullptr) {
        if (!is_whole(id, 0, last)) {
            end.refuse("eos_token_id", ids, "ids from 0 to " + std::to_string(last) + " (vocab_size - 1)");
        }
        out.end_ids.push_back((int)id->valuedouble);
    }
}

// From the two texts in memory; `generation_text` may be empty: no such file. Names are for messages.
inline Config parse_config(const std::string &name, const std::string &text, const std::string &generation_name,
                           const std::string &generation_text) {
    Json root = parse_json(name, text, /*as_python=*/true), generation_root;
    if (!generation_text.empty()) generation_root = parse_json(generation_name, generation_text, true);
    const Section config{name, root.get()}, generation{generation_name, generation_root.get()};

    Config out;
    const Family &family = find_family(config);
    out.architecture = family.architecture;
    out.model_type = family.model_type;
    out.dtype = config.text("dtype", config.text("torch_dtype", ""));
    if (out.dtype.rfind("torch.", 0) == 0) out.dtype = out.dtype.substr(6);
    if (out.dtype == "auto") out.dtype = "";  // as it is stored
    if (!out.dtype.empty()) require_known(config, "dtype", out.dtype, "float32 float16 bfloat16");
    for (const char *key : {"hidden_act", "hidden_activation"}) {
        std::string activation = config.text(key, "silu");
        require_known(config, key, activation == "swish" ? "silu" : activation, "silu");  // two names: x * sigmoid(x)
    }
    if (const cJSON *item = config.find("quantization_config"))
        config.refuse("quantization_config", item, "weights as they were trained, in F32 F16 BF16, and no such key");
    Kind kind;
    read_sizes(config, family, out, kind);
    refuse_foreign_keys(config, family, out, kind);
    read_rope(config, out.context, kind);
    for (int window : read_windows(config, family, out.layers)) {
        kind.window = window;
        add_layer(out.kinds, out.rows, kind);
    }
    read_special_ids(config, generation, family, out);
    out.tied = config.flag("tie_word_embeddings", false);
    bool attention_bias = config.flag("attention_bias", false);
    auto biased = [&](Family::Bias bias) {
        return bias == Family::always || (bias != Family::never && attention_bias);
    };
    out.qkv_bias = biased(family.qkv_bias);
    out.output_bias = biased(family.output_bias);
    out.mlp_bias = family.reads_mlp_bias && config.flag("mlp_bias", false);
    out.qk_norm = family.qk_norm;
    return out;
}

// What to do about a directory that holds no config.json, by what was given in its place.
inline std::string directory_cure(const std::string &given) {
    const size_t slash = given.find('/'), length = given.size();
    if (length > 5 && given.compare(length - 5, 5, ".gguf") == 0)
        return "GGUF is not read here: fetch the checkpoint it was made from, with its safetensors, and name its "
               "directory";
    if (DIR *snapshots = opendir(join_path(given, "snapshots").c_str())) {  // models--org--name of the hub's cache
        std::string found;
        while (const dirent *entry = readdir(snapshots)) {
            std::string directory = join_path(given, std::string("snapshots/") + entry->d_name);
            if (entry->d_name[0] != '.' && file_exists(join_path(directory, "config.json")))
                found = std::max(found, directory);
        }
        closedir(snapshots);
        return found.empty() ? "it holds no whole snapshot: fetch it again" : "give its snapshot: -m " + found;
    }
    if (slash && slash != std::string::npos && given.find('/', slash + 1) == std::string::npos && given[0] != '.' &&
        slash + 1 < length && !file_exists(given))
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
    for (const cJSON *item = list->child; item; item = item->next) {
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
    StoredTensor tensor;
    tensor.file = file;
    tensor.dtype = entry.text("dtype", "");
    tensor.shape = read_counts(entry, "shape");
    std::vector<int64_t> offsets = read_counts(entry, "data_offsets");
    if (offsets.size() != 2 || offsets[0] > offsets[1]) {
        entry.refuse("data_offsets", entry.find("data_offsets"), "[begin, end]");
    }
    if ((uint64_t)offsets[1] > data_bytes) {
        fail("%s ends at byte %lld of the data, but the file holds %zu: it is cut off, fetch it again", name,
             (long long)offsets[1], data_bytes);
    }
    tensor.data = data + offsets[0];
    tensor.bytes = (size_t)(offsets[1] - offsets[0]);

    size_t element = stored_dtype_bytes(tensor.dtype), expected = element;
    for (int64_t count : tensor.shape) {
        if (count && expected > SIZE_MAX / (size_t)count)
            entry.refuse("shape", entry.find("shape"), "one that fits a file");
        expected *= (size_t)count;
    }
    if (element && expected != tensor.bytes) {
        fail("%s has %zu bytes, its shape %s in %s asks for %zu", name, tensor.bytes,
             printable(json_of(tensor.shape)).c_str(), tensor.dtype.c_str(), expected);
    }
    return tensor;
}

// Throws unless the tensors cover the data from its first byte to its last, each byte once.
inline void check_coverage(const TensorTable &table, const char *data, size_t data_bytes) {
    std::vector<std::pair<const StoredTensor *, const std::string *>> order;
    for (const auto &[name, tensor] : table.tensors) order.push_back({&tensor, &name});
    std::sort(order.begin(), order.end(), [](const auto &a, const auto &b) {
        return std::make_pair(a.first->data, a.first->bytes) < std::make_pair(b.first->data, b.first->bytes);
    });
    const char *covered = data;
    for (const auto &[tensor, name] : order) {
        if (tensor->data != covered) {
            fail("%s: tensor %s begins at byte %td of the data, expected %td: tensors %s", table.name.c_str(),
                 printable(*name).c_str(), tensor->data - data, covered - data,
                 tensor->data < covered ? "overlap" : "leave a gap");
        }
        covered += tensor->bytes;
    }
    if (covered != data + data_bytes) {
        fail("%s: holds %zu bytes of data, its header speaks of %td", table.name.c_str(), data_bytes, covered - data);
    }
}

// The tensors of one file, given as its bytes in memory; nothing behind the header is read.
inline TensorTable parse_safetensors(const std::string &name, const char *bytes, size_t size) {
    const char lfs[] = "version https://git-lfs";
    if (size >= sizeof lfs - 1 && memcmp(bytes, lfs, sizeof lfs - 1) == 0) {
        fail("%s: is a Git LFS pointer, not the weights: run `git lfs pull` where it came from", name.c_str());
    }
    uint64_t header_bytes = 0;
    if (size < sizeof header_bytes) fail("%s: is %zu bytes long, too short for a safetensors file", name.c_str(), size);
    memcpy(&header_bytes, bytes, sizeof header_bytes);
    const size_t rest = size - sizeof header_bytes;
    const size_t most = std::min(rest, max_json_bytes);
    if (header_bytes > most) {
        fail("%s: its header is said to be %llu bytes long, expected at most %zu: %s", name.c_str(),
             (unsigned long long)header_bytes, most,
             header_bytes > max_json_bytes ? "not a safetensors file" : "it is cut off, fetch it again");
    }
    const char *header = bytes + sizeof header_bytes, *data = header + header_bytes;
    Json root = parse_json(name + ": header", std::string(header, (size_t)header_bytes));
    TensorTable table{name, {}};
    for (const cJSON *item = root->child; item; item = item->next) {
        if (strcmp(item->string, "__metadata__") == 0) continue;
        table.tensors[item->string] = read_entry(name, item, data, rest - (size_t)header_bytes);
    }
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
    for (const cJSON *item = map.object->child; item; item = item->next) {
        std::string shard = map.text(item->string, "");
        if (shard.empty() || shard == "." || shard == ".." || shard.find('/') != std::string::npos) {
            map.refuse(printable(item->string).c_str(), item, "the name of a file in the same directory");
        }
        if (!shards.count(shard)) {
            std::string path = join_path(directory, shard);
            if (!file_exists(path)) {
                fail("%s: cannot open it: %s; %s names it", path.c_str(), strerror(errno), index.c_str());
            }
            shards[shard] = open_safetensors(path, files);
        }
        auto found = shards[shard].tensors.find(item->string);
        if (found == shards[shard].tensors.end()) {
            fail("%s: tensor %s is missing, %s says it is here", shards[shard].name.c_str(),
                 printable(item->string).c_str(), index.c_str());
        }
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
    std::set<std::string> taken = {};

    const StoredTensor *find(const std::string &name) const {
        auto found = table.tensors.find(name);
        return found == table.tensors.end() ? nullptr : &found->second;
    }
    Tensor take(const std::string &name, const std::vector<int64_t> &shape) {
        const StoredTensor *stored = find(name);
        if (!stored) {
            fail("%s: tensor %s is missing, config.json asks for it (%s, %d layers)", table.name.c_str(), name.c_str(),
                 model.config.architecture.c_str(), model.config.layers);
        }
        if (stored->shape != shape) {
            fail("%s: tensor %s has shape %s, config.json asks for %s", stored->file.c_str(), name.c_str(),
                 printable(json_of(stored->shape)).c_str(), json_of(shape).c_str());
        }
        taken.insert(name);
        static const std::map<std::string, DType> types = {
            {"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16}};
        auto type = types.find(stored->dtype);
        if (type == types.end()) {
            fail("%s: tensor %s has dtype %s, supported are F32 F16 BF16", stored->file.c_str(), name.c_str(),
                 printable(stored->dtype).c_str());
        }
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
    Linear linear(const std::string &name, int outputs, int inputs, bool bias) {
        return {take(name + ".weight", {outputs, inputs}), bias ? take(name + ".bias", {outputs}) : Tensor{}};
    }
};

inline LayerWeights bind_layer(Binder &binder, const Config &config, int index) {
    const std::string layer = "model.layers." + std::to_string(index) + ".", attention = layer + "self_attn.",
                      mlp = layer + "mlp.";
    const Kind &kind = config.kind(index);
    const int width = kind.key_width, query_width = config.heads * width, kv_width = kind.kv_heads * width;
    LayerWeights out;
    out.attention_norm = binder.take(layer + "input_layernorm.weight", {config.hidden});
    out.query = binder.linear(attention + "q_proj", query_width, config.hidden, config.qkv_bias);
    out.key = binder.linear(attention + "k_proj", kv_width, config.hidden, config.qkv_bias);
    out.value = binder.linear(attention + "v_proj", kv_width, config.hidden, config.qkv_bias);
    out.output = binder.linear(attention + "o_proj", config.hidden, query_width, config.output_bias);
    if (config.qk_norm) {
        out.query_norm = binder.take(attention + "q_norm.weight", {width});
        out.key_norm = binder.take(attention + "k_norm.weight", {width});
    }
    out.mlp_norm = binder.take(layer + "post_attention_layernorm.weight", {config.hidden});
    out.gate = binder.linear(mlp + "gate_proj", config.ffn, config.hidden, config.mlp_bias);
    out.up = binder.linear(mlp + "up_proj", config.ffn, config.hidden, config.mlp_bias);
    out.down = binder.linear(mlp + "down_proj", config.hidden, config.ffn, config.mlp_bias);
    return out;
}

// The head is the embedding when the config ties them. As in Transformers 5, what is stored has the last word: where a
// tied checkpoint stores both, each is used as it is (some store the same matrix twice), and if only one, that for
// both.
inline void bind_embedding_and_head(Binder &binder, Model &model) {
    const std::vector<int64_t> shape = {model.config.vocabulary, model.config.hidden};
    const bool embedding = binder.find("model.embed_tokens.weight"), head = binder.find("lm_head.weight");
    model.config.tied = model.config.tied && !(embedding && head);
    model.embedding = binder.take(model.config.tied && head ? "lm_head.weight" : "model.embed_tokens.weight", shape);
    model.head = model.config.tied ? model.embedding : binder.take("lm_head.weight", shape);
}

// A tensor of the model proper that nothing here reads means another computation than this one: an architecture under
// another's name, a bias the config does not speak of, more layers than it says. Left aside, as in Transformers, are
// the RoPE tables that old Llamas store (rotary_emb.inv_freq), which follow from the config, and what stands beside the
// model: heads for other tasks (score, v_head).
inline void refuse_unused(const Binder &binder) {
    for (const auto &[name, tensor] : binder.table.tensors) {
        bool inside = name.rfind("model.", 0) == 0 || name.rfind("lm_head.", 0) == 0;
        if (!inside || binder.taken.count(name) || name.find("rotary_emb.") != std::string::npos) continue;
        const Config &config = binder.model.config;
        fail("%s: tensor %s is none of a %s with %d layers: config.json must name the architecture it belongs to",
             tensor.file.c_str(), printable(name).c_str(), config.architecture.c_str(), config.layers);
    }
}

// Points the model's tensors into the table's; the caller keeps what the table points into alive.
inline Model bind_weights(Config config, const TensorTable &table) {
    Model model;
    model.config = std::move(config);
    Binder binder{table, model};
    bind_embedding_and_head(binder, model);
    for (int layer = 0; layer < model.config.layers; layer++) {
        model.layers.push_back(bind_layer(binder, model.config, layer));
    }
    model.final_norm = binder.take("model.norm.weight", {model.config.hidden});
    refuse_unused(binder);
    return model;
}

inline Model load_model(const std::string &directory) {
    Config config = load_config(directory);
    std::vector<Mapping> files;
    TensorTable table = open_weights(directory, files);
    Model model = bind_weights(std::move(config), table);
    model.files = std::move(files);
    return model;
}
