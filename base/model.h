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

// With D = head_dim. Rows of query, key and value are head after head, D rows each; a head's rows are in the half-split
// order of RoPE: component i turns together with component i + D / 2.
struct LayerWeights {
    Tensor attention_norm;        // (1, hidden)
    Linear query;                 // (heads * D, hidden)
    Linear key, value;            // (kv_heads * D, hidden)
    Linear output;                // (hidden, heads * D)
    Tensor query_norm, key_norm;  // (1, D): RMSNorm of each head before RoPE (Qwen3), absent elsewhere
    Tensor mlp_norm;              // (1, hidden)
    Linear gate, up;              // (ffn, hidden)
    Linear down;                  // (hidden, ffn)
    int window = 0;  // the query at position p sees positions max(0, p - window + 1) .. p; 0: all of 0 .. p
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

struct Config {
    std::string architecture, model_type;  // "LlamaForCausalLM", "llama"
    std::string dtype;                     // what the config says of the weights; each Tensor knows its own type
    int layers = 0, hidden = 0, ffn = 0, heads = 0, kv_heads = 0, head_dim = 0, vocabulary = 0;
    int context = 0;  // positions the model was made for
    double norm_epsilon = 0, rope_theta = 0;
    RopeScaling rope;
    bool tied = false;         // in a Model: the head is the embedding, not a matrix of its own
    std::vector<int> end_ids;  // generation stops after any of them; empty: it never does
    int bos_id = -1;           // -1: none
    int window = 0;            // sliding window in positions of the layers that have one; 0: no layer has
    std::vector<int> windows;  // (layers): LayerWeights::window of each
    bool qkv_bias = false, output_bias = false, mlp_bias = false, qk_norm = false;
};

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
inline void refuse_foreign_keys(const Section &config, const Family &family, const Config &sizes) {
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
        {1 / std::sqrt(sizes.head_dim), "attention_multiplier"},
        {sizes.head_dim, "query_pre_attn_scalar"},
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

inline void read_sizes(const Section &config, const Family &family, Config &out) {
    const char *name = config.name.c_str();
    out.layers = config.integer("num_hidden_layers", 1, max_layers);
    out.hidden = config.integer("hidden_size", 1, max_size);
    out.ffn = config.integer("intermediate_size", 1, max_size);
    out.vocabulary = config.integer("vocab_size", 1, max_size);
    out.context = config.integer("max_position_embeddings", 1, 1 << 30, family.context);
    out.heads = config.integer("num_attention_heads", 1, max_size);
    // A null asks for as many KV heads as heads; only a key that is not there takes the family's default.
    bool as_heads = config.has_null("num_key_value_heads") || family.kv_heads == 0;
    out.kv_heads = config.integer("num_key_value_heads", 1, max_size, as_heads ? out.heads : family.kv_heads);
    if (out.heads % out.kv_heads) {
        fail("%s: num_attention_heads is %d, expected a multiple of num_key_value_heads, %d", name, out.heads,
             out.kv_heads);
    }
    out.head_dim = config.integer("head_dim", 1, max_size, family.head_dim);
    if (out.head_dim == 0) {
        if (out.hidden % out.heads) {
            fail("%s: hidden_size is %d, expected a multiple of num_attention_heads, %d (or a head_dim)", name,
                 out.hidden, out.heads);
        }
        out.head_dim = out.hidden / out.heads;
    }
    if (out.head_dim % 2) fail("%s: head_dim is %d, expected an even number: RoPE turns pairs", name, out.head_dim);
    if (out.head_dim > max_size / out.heads) {
        fail("%s: num_attention_heads * head_dim is %lld, expected at most %d", name,
             (long long)out.heads * out.head_dim, max_size);
    }
    out.norm_epsilon = config.number("rms_norm_eps", 1e-30, 1, 1e-6);
}

// Two spellings: rope_theta beside rope_scaling {type or rope_type, factor, ...}, or all of it in rope_parameters.
// As in Transformers, rope_scaling goes before rope_parameters, and a theta in either before the one beside them.
inline void read_rope(const Section &config, Config &out) {
    Section rope = config.section("rope_scaling");
    if (!rope.object || !rope.object->child) rope = config.section("rope_parameters");
    const char *name = rope.name.c_str();
    for (const cJSON *item = rope.object ? rope.object->child : nullptr; item; item = item->next) {
        if (cJSON_IsObject(item))
            rope.refuse(printable(item->string).c_str(), item, "no object: one RoPE for all layers");
    }
    if (rope.number("partial_rotary_factor", 0, 1, 1) != 1)
        fail("%s: partial_rotary_factor is not supported; supported is 1", name);
    out.rope_theta = rope.number("rope_theta", 1, 1e15, config.number("rope_theta", 1, 1e15, 10000));

    std::string type = rope.text("rope_type", rope.text("type", "default"));
    if (type == "default") return;
    require_known(rope, "rope_type", type, "default linear llama3");
    out.rope.kind = type == "linear" ? RopeScaling::linear : RopeScaling::llama3;
    out.rope.factor = rope.number("factor", 1e-6, 1e6);
    if (type == "linear") return;
    out.rope.low_freq_factor = rope.number("low_freq_factor", 1e-6, 1e6);
    out.rope.high_freq_factor = rope.number("high_freq_factor", 1e-6, 1e6);
    if (out.rope.high_freq_factor <= out.rope.low_freq_factor) {
        fail("%s: high_freq_factor is %g, expected more than low_freq_factor, %g", name, out.rope.high_freq_factor,
             out.rope.low_freq_factor);
    }
    int original = rope.integer("original_max_position_embeddings", 1, 1 << 30, out.context);
    out.rope.original_context = config.integer("original_max_position_embeddings", 1, 1 << 30, original);
}

// How far the layers look back that look furthest; 0: some to the first position.
inline int widest_window(const std::vector<int> &windows) {
    if (windows.empty() || *std::min_element(windows.begin(), windows.end()) == 0) return 0;
    return *std::max_element(windows.begin(), windows.end());
}

// Mistral: every layer slides. Qwen: only with use_sliding_window, and then the layers from max_window_layers on, or
// those that layer_types names. Llama: none. Of these two, layer_types may say nothing else.
inline void read_windows(const Section &config, const Family &family, Config &out) {
    bool qwen = out.model_type == "qwen2" || out.model_type == "qwen3";
    if (family.window > 0 && (!qwen || config.flag("use_sliding_window", false))) {
        out.window =
            config.integer("sliding_window", 1, 1 << 30, config.has_null("sliding_window") ? 0 : family.window);
    }
    int first = qwen ? config.integer("max_window_layers", 0, max_layers, 28) : 0;
    for (int layer = 0; layer < out.layers; layer++) out.windows.push_back(layer < first ? 0 : out.window);

    const cJSON *types = config.find("layer_types");
    if (!types) return;
    if (!cJSON_IsArray(types) || cJSON_GetArraySize(types) != out.layers) {
        config.refuse("layer_types", types, "a list of " + std::to_string(out.layers) + " (num_hidden_layers) names");
    }
    const cJSON *type = types->child;
    for (int &window : out.windows) {
        std::string word = cJSON_IsString(type) ? type->valuestring : "";
        const char *other = qwen || window ? "sliding_attention" : "full_attention";
        if (word != other && (!qwen || word != "full_attention"))
            config.refuse("an entry of layer_types", type, (qwen ? "full_attention or " : "") + std::string(other));
        window = word == "full_attention" ? 0 : out.window;
        if (word == "sliding_attention" && window == 0) {
            fail("%s: layer_types has sliding_attention, but use_sliding_window and sliding_window give no window",
                 config.name.c_str());
        }
        type = type->next;
    }
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
    read_sizes(config, family, out);
    refuse_foreign_keys(config, family, out);
    read_rope(config, out);
    read_windows(config, family, out);
    out.window = *std::max_element(out.windows.begin(), out.windows.end());
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
    // models--org--name of the hub's cache, or its snapshots.
    std::string all = given.substr(0, given.find_last_not_of('/') + 1);
    if (all.size() < 9 || all.compare(all.size() - 9, 9, "snapshots")) all = join_path(given, "snapshots");
    if (DIR *snapshots = opendir(all.c_str())) {
        std::string found;
        while (const dirent *entry = readdir(snapshots)) {
            std::string directory = join_path(all, entry->d_name);
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
    const int query_width = config.heads * config.head_dim, kv_width = config.kv_heads * config.head_dim;
    LayerWeights out;
    out.attention_norm = binder.take(layer + "input_layernorm.weight", {config.hidden});
    out.query = binder.linear(attention + "q_proj", query_width, config.hidden, config.qkv_bias);
    out.key = binder.linear(attention + "k_proj", kv_width, config.hidden, config.qkv_bias);
    out.value = binder.linear(attention + "v_proj", kv_width, config.hidden, config.qkv_bias);
    out.output = binder.linear(attention + "o_proj", config.hidden, query_width, config.output_bias);
    if (config.qk_norm) {
        out.query_norm = binder.take(attention + "q_norm.weight", {config.head_dim});
        out.key_norm = binder.take(attention + "k_norm.weight", {config.head_dim});
    }
    out.mlp_norm = binder.take(layer + "post_attention_layernorm.weight", {config.hidden});
    out.gate = binder.linear(mlp + "gate_proj", config.ffn, config.hidden, config.mlp_bias);
    out.up = binder.linear(mlp + "up_proj", config.ffn, config.hidden, config.mlp_bias);
    out.down = binder.linear(mlp + "down_proj", config.hidden, config.ffn, config.mlp_bias);
    out.window = config.windows[(size_t)index];
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

// ---- The cache of any checkpoint -----------------------------------------------------------------------------------

// What a cache's size follows from, also of architectures that do not run here.
struct CacheSizes {
    std::string architecture, why_not;  // why_not: the line that load_model() fails with; "": it runs
    std::string no_size;                // why nothing below is known; "": it is
    int layers = 0;                     // with keys and values: not those of linear attention or convolutions
    int kv_heads = 0, key_width = 0, value_width = 0;  // MLA: 1, rank + rope, 0: a value is a part of its key
    int context = 0;                                   // 0: the config does not say
    std::vector<int> windows;                          // (layers), as in Config
};

// What Transformers takes where a config is silent, as those of models that also see mostly are.
struct Defaults {
    const char *model_type;
    int layers, hidden, heads, kv_heads, head_dim, context;  // kv_heads, head_dim 0: as in Family
    int window, pattern;  // every pattern-th layer sees everything, the others look back over the window; 0: none does
};
constexpr Defaults known_defaults[] = {
    {"llama", 32, 4096, 32, 0, 0, 2048, 0, 0},
    {"mistral", 32, 4096, 32, 8, 0, 131072, 4096, 0},
    {"mixtral", 32, 4096, 32, 8, 0, 131072, 0, 0},
    {"phi3", 32, 3072, 32, 0, 0, 4096, 0, 0},
    {"phimoe", 32, 4096, 32, 8, 0, 131072, 0, 0},
    {"starcoder2", 30, 3072, 24, 2, 0, 4096, 0, 0},
    {"qwen2", 32, 4096, 32, 32, 0, 32768, 4096, 0},
    {"qwen3", 32, 4096, 32, 32, 128, 32768, 4096, 0},
    {"gemma", 28, 3072, 16, 16, 256, 8192, 0, 0},
    {"gemma2", 26, 2304, 8, 4, 256, 8192, 4096, 2},
    {"gemma3_text", 26, 2304, 8, 4, 256, 131072, 4096, 6},
    {"cohere2", 40, 8192, 64, 0, 0, 8192, 4096, 4},
};

// Others whose heads have a width of their own, hidden_size / heads only by chance: it must be said.
inline const std::set<std::string> fixed_width = {
    "ernie4_5",     "gemma3n_text",     "gemma4_text", "glm",        "glm4",       "gpt_oss",
    "helium",       "internlm3",        "llama4_text", "minimax_m2", "ministral3", "nemotron_h",
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next",  "seed_oss",   "vaultgemma"};

// Whether `text` has one of the parts, words with a blank between.
inline bool has_part(const std::string &text, const char *parts) {
    std::istringstream words(parts);
    for (std::string part; words >> part;)
        if (text.find(part) != std::string::npos) return true;
    return false;
}

// New architectures come with keys of their own, and a size that leaves one out is wrong without a word. So a key that
// sounds like attention or layers must be one that is read here, or of a sort that no size follows from; or it asks for
// nothing. `mixed`: the config says which layers attend, so those of the others do not matter.
inline void refuse_unknown_shape(const Section &config, bool mixed) {
    const std::string read =
        " num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads "
        "num_key_value_heads num_kv_heads n_kv_heads n_head_kv kv_n_heads multi_query_group_num head_dim kv_channels "
        "attention_head_dim v_head_dim qk_head_dim kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim use_mla "
        "num_kv_shared_layers layer_types layers_block_type attention_layers attention_types hybrid_override_pattern "
        "full_attn_idxs attn_layer_indices full_attention_interval attn_layer_period attn_layer_offset sliding_window "
        "sliding_window_size sliding_window_pattern _sliding_window_pattern max_window_layers use_sliding_window "
        "multi_query_attention attn_config attn_type ";
    for (const cJSON *item = config.object->child; item; item = item->next) {
        const std::string key = item->string;
        bool shape = has_part(key,
                              "attn attention layer head kv_ _kv key_value window swa latent block_type block_config "
                              "mamba ssm state recurrent lru linear_ conv_ _conv hybrid sparse compress_ use_cla "
                              "index_ loop");
        bool harmless =
            has_part(key,
                     "drop bias norm _eps scal softcap softmax temperature rope rotary mlp moe expert _gate "
                     "ffn vision image visual audio video speech use_cache mtp nextn flash logn impl "
                     "lm_head classification_head prediction_head embd per_layer_input layer_switch "
                     "interleaved_layers dense_ full_attn_mod multiplier upcast fp32 sparsity sparse_step num_ln "
                     "parallel output_ initializer key_value_groups") ||
            (mixed &&
             has_part(key,
                      "mamba ssm state lru linear_ conv window_size window_pattern global_attn attn_alpha attn_beta"));
        if (!shape || harmless || is_neutral(item, 0) || read.find(" " + key + " ") != std::string::npos) continue;
        fail("%s: %s is %s: what that does to the size of a cache is not known here", config.name.c_str(),
             printable(key).c_str(), printable(item).c_str());
    }
}

// A word for each layer, "attention", "mamba", "sliding_attention", where a config says which layers attend; or none.
inline std::vector<std::string> layer_words(const Section &config, int layers) {
    std::vector<std::string> words;
    for (const char *key : {"layer_types", "layers_block_type", "attention_layers", "hybrid_override_pattern"}) {
        const cJSON *list = config.find(key);
        if (!list) continue;
        for (const char *c = cJSON_IsString(list) ? list->valuestring : ""; *c; c++)  // Nemotron-H: "M-M*-"
            words.push_back(*c == '*' ? "attention" : strchr("ME-", *c) ? "mamba" : std::string(1, *c));
        for (const cJSON *item = cJSON_IsArray(list) ? list->child : nullptr; item; item = item->next)
            words.push_back(cJSON_IsString(item) ? item->valuestring : "");
        if ((int)words.size() != layers)
            config.refuse(key, list, "a list of " + std::to_string(layers) + " (num_hidden_layers) names");
        return words;
    }
    for (const char *key : {"full_attn_idxs", "attn_layer_indices"}) {
        const cJSON *list = config.find(key);
        if (!list) continue;
        words.assign((size_t)layers, "conv");
        for (const cJSON *item = list->child; item; item = item->next)
            is_whole(item, 0, layers - 1) ? words[(size_t)item->valuedouble] = "attention"
                                          : (config.refuse(key, list, "a list of layers"), "");
        return words;
    }
    const bool period = config.find("attn_layer_period");  // Jamba; the other is Qwen3-Next's
    if (!period && !config.find("full_attention_interval")) return words;
    int every = config.integer(period ? "attn_layer_period" : "full_attention_interval", 1, max_layers);
    int first = config.integer("attn_layer_offset", 0, max_layers, period ? 0 : every - 1);
    for (int i = 0; i < layers; i++) words.push_back(i % every == first ? "attention" : "mamba");
    return words;
}

// `model_type`: whose defaults count. A config inside another must say all that has none.
inline void read_any_sizes(Section config, const std::string &model_type, bool inside, CacheSizes &out) {
    const Defaults *known = nullptr;
    for (const Defaults &defaults : known_defaults)
        if (model_type == defaults.model_type) known = &defaults;
    // The first of these spellings that is there; without `otherwise` one must be.
    auto size = [&](std::initializer_list<const char *> keys, int most, std::optional<int> otherwise = {}) {
        for (const char *key : keys)
            if (config.find(key)) return config.integer(key, 1, most);
        return config.integer(*keys.begin(), 1, most, otherwise);
    };
    auto or_default = [&](int Defaults::*value) { return known ? std::optional<int>(known->*value) : std::nullopt; };
    const int layers =
        size({"num_hidden_layers", "n_layer", "n_layers", "num_layers"}, max_layers, or_default(&Defaults::layers));
    out.context = size({"max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"},
                       1 << 30, known ? known->context : 0);
    std::vector<std::string> words = layer_words(config, layers);
    refuse_unknown_shape(config, !words.empty() || model_type == "falcon_h1");  // all its layers attend

    int window = known && !config.has_null("sliding_window") ? known->window : 0;
    for (const char *key : {"window_size", "sliding_window_size", "sliding_window"})
        if (config.find(key)) window = config.integer(key, 0, 1 << 30);
    if (model_type == "qwen2" || model_type == "qwen3") {
        Config qwen;
        qwen.layers = layers, qwen.model_type = model_type;
        read_windows(config, families[model_type == "qwen2" ? 2 : 3], qwen);
        out.windows = qwen.windows;
    } else if (words.empty()) {
        if (!config.flag("use_sliding_window", true) || (!known && window >= out.context)) window = 0;
        int pattern =
            size({"sliding_window_pattern", "_sliding_window_pattern"}, max_layers, known ? known->pattern : -1);
        if (window && pattern < 0)
            config.refuse("sliding_window", config.find("sliding_window"),
                          "layer_types beside it: which layers slide?");
        for (int i = 1; i <= layers; i++) out.windows.push_back(pattern > 0 && i % pattern == 0 ? 0 : window);
    }
    for (const std::string &word : out.windows.empty() ? words : std::vector<std::string>{}) {
        const bool slides = word == "sliding_attention" || word == "local";
        if (slides && !window) config.need("sliding_window");
        if (slides || word == "full_attention" || word == "attention" || word == "global")
            out.windows.push_back(slides ? window : 0);
        else if (!has_part(" " + word + " ", "linear_attention mamba mamba2 conv recurrent moe mlp"))
            fail("%s: a layer of the kind %s is not known here", config.name.c_str(), printable(word).c_str());
    }
    int shared = config.integer("num_kv_shared_layers", 0, (int)out.windows.size(), 0);  // read those of layers before
    out.windows.resize(out.windows.size() - (size_t)shared);
    out.layers = (int)out.windows.size();
    if (!out.layers) fail("%s: no layer has keys and values", config.name.c_str());

    const cJSON *rank = config.find("kv_lora_rank");
    if (rank && !is_neutral(rank, 0)) {  // DeepSeek-AI 2024, DeepSeek-V2, section 2.1: one row for all heads
        out.kv_heads = 1;
        out.key_width = config.integer("kv_lora_rank", 1, max_size) + config.integer("qk_rope_head_dim", 0, max_size);
        return;
    }
    const int heads =
        size({"num_attention_heads", "n_head", "n_heads", "num_heads"}, max_size, or_default(&Defaults::heads));
    std::optional<int> kv_heads = heads;
    if (!config.has_null("num_key_value_heads") && known && known->kv_heads) kv_heads = known->kv_heads;
    if (inside && !known && !config.has_null("num_key_value_heads")) kv_heads = {};
    const Section attention = config.section("attn_config");  // MPT, DBRX
    if (attention.object) refuse_unknown_shape(attention, false);
    const bool falcon = model_type == "falcon" || model_type == "gpt_bigcode";
    const bool one = (config.flag("multi_query", falcon) && !config.flag("new_decoder_architecture", false)) ||
                     attention.text("attn_type", "") == "multiquery_attention";
    if (one)
        out.kv_heads = 1;
    else if (attention.find("kv_n_heads"))
        out.kv_heads = attention.integer("kv_n_heads", 1, max_size);
    else if (config.flag("multi_query_attention", false))  // ChatGLM
        out.kv_heads = size({"multi_query_group_num"}, max_size, 1);
    else
        out.kv_heads = size({"num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"}, max_size, kv_heads);
    out.key_width = size({"head_dim", "kv_channels", "attention_head_dim"}, max_size, known ? known->head_dim : 0);
    if (!out.key_width) {
        const int hidden =
            size({"hidden_size", "n_embd", "n_embed", "d_model"}, max_size, or_default(&Defaults::hidden));
        if (hidden % heads || fixed_width.count(model_type)) config.need("head_dim");
        out.key_width = hidden / heads;
    }
    const cJSON *values = config.find("v_head_dim");
    out.value_width = values && !is_neutral(values, 0) ? size({"v_head_dim"}, max_size) : out.key_width;
}

inline CacheSizes read_cache_sizes(const std::string &name, const std::string &text) {
    CacheSizes out;
    try {
        Config c = parse_config(name, text, "", "");
        return {c.architecture, "", "", c.layers, c.kv_heads, c.head_dim, c.head_dim, c.context, c.windows};
    } catch (const Error &error) {
        out.why_not = error.what();
    }
    Json root = parse_json(name, text, /*as_python=*/true);
    Section config{name, root.get()};
    const cJSON *names = config.find("architectures");
    bool named = cJSON_IsArray(names) && cJSON_IsString(names->child), inside = false;
    try {
        std::string model_type = config.text("model_type", "");
        out.architecture = named ? names->child->valuestring : config.text("model_type", "unknown");
        for (const Family &family : families)
            if (model_type.empty() && out.architecture == family.architecture) model_type = family.model_type;
        for (const char *key : {"text_config", "llm_config", "language_config"}) {  // of models that also see or hear
            if (inside || !config.find(key)) continue;
            config = config.section(key), model_type = config.text("model_type", ""), inside = true;
        }
        read_any_sizes(config, model_type, inside, out);
    } catch (const Error &error) {
        CacheSizes none;
        none.architecture = out.architecture, none.why_not = out.why_not;
        out = none;
        out.no_size =
            error.what() + std::string("; `llm memory` takes a shape: --layers N --kv-heads N --head-dim N -c N");
    }
    return out;
}

// Refuses only what is no JSON; what load_model() refuses stands in why_not.
inline CacheSizes load_cache_sizes(const std::string &directory) {
    auto [name, text] = read_config_file(directory);
    CacheSizes sizes = read_cache_sizes(name, text);
    try {
        if (sizes.why_not.empty()) load_model(directory);
    } catch (const Error &error) {
        sizes.why_not = error.what();
    }
    return sizes;
}
