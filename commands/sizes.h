// Which rows the cache of any checkpoint has, from its config.json alone: also of architectures that do not run here.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "../base/model.h"

// What a cache's size follows from, also of architectures that do not run here.
struct CacheSizes {
    std::string architecture, why_not;  // why_not: the line that load_model() fails with; "": it runs
    std::string no_size;                // why nothing below is known; "": it is
    int context = 0;                    // 0: the config does not say
    std::vector<Kind> kinds;            // of layers with keys and values: not those of linear attention or convolutions
    std::vector<LayerRows> rows;        // (layers of these kinds)
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

    std::vector<int> windows;  // (layers that attend)
    int window = known && !config.has_null("sliding_window") ? known->window : 0;
    for (const char *key : {"window_size", "sliding_window_size", "sliding_window"})
        if (config.find(key)) window = config.integer(key, 0, 1 << 30);
    if (model_type == "qwen2" || model_type == "qwen3") {
        windows = read_windows(config, families[model_type == "qwen2" ? 2 : 3], layers);
    } else if (words.empty()) {
        if (!config.flag("use_sliding_window", true) || (!known && window >= out.context)) window = 0;
        int pattern =
            size({"sliding_window_pattern", "_sliding_window_pattern"}, max_layers, known ? known->pattern : -1);
        if (window && pattern < 0)
            config.refuse("sliding_window", config.find("sliding_window"),
                          "layer_types beside it: which layers slide?");
        for (int i = 1; i <= layers; i++) windows.push_back(pattern > 0 && i % pattern == 0 ? 0 : window);
    }
    for (const std::string &word : windows.empty() ? words : std::vector<std::string>{}) {
        const bool slides = word == "sliding_attention" || word == "local";
        if (slides && !window) config.need("sliding_window");
        if (slides || word == "full_attention" || word == "attention" || word == "global")
            windows.push_back(slides ? window : 0);
        else if (!has_part(" " + word + " ", "linear_attention mamba mamba2 conv recurrent moe mlp"))
            fail("%s: a layer of the kind %s is not known here", config.name.c_str(), printable(word).c_str());
    }
    int shared = config.integer("num_kv_shared_layers", 0, (int)windows.size(), 0);  // read those of layers before
    if (windows.empty()) fail("%s: no layer has keys and values", config.name.c_str());

    Kind kind;
    auto add_layers = [&] {
        for (size_t layer = 0; layer < windows.size(); layer++) {
            kind.window = windows[layer];
            add_layer(out.kinds, out.rows, kind, layer + (size_t)shared < windows.size());
        }
    };
    const cJSON *rank = config.find("kv_lora_rank");
    if (rank && !is_neutral(rank, 0)) {  // DeepSeek-AI 2024, DeepSeek-V2, section 2.1: one row for all heads
        kind.kv_heads = 1;
        kind.key_width = config.integer("kv_lora_rank", 1, max_size) + config.integer("qk_rope_head_dim", 0, max_size);
        return add_layers();
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
        kind.kv_heads = 1;
    else if (attention.find("kv_n_heads"))
        kind.kv_heads = attention.integer("kv_n_heads", 1, max_size);
    else if (config.flag("multi_query_attention", false))  // ChatGLM
        kind.kv_heads = size({"multi_query_group_num"}, max_size, 1);
    else
        kind.kv_heads = size({"num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"}, max_size, kv_heads);
    kind.key_width = size({"head_dim", "kv_channels", "attention_head_dim"}, max_size, known ? known->head_dim : 0);
    if (!kind.key_width) {
        const int hidden =
            size({"hidden_size", "n_embd", "n_embed", "d_model"}, max_size, or_default(&Defaults::hidden));
        if (hidden % heads || fixed_width.count(model_type)) config.need("head_dim");
        kind.key_width = hidden / heads;
    }
    const cJSON *values = config.find("v_head_dim");
    kind.value_width = values && !is_neutral(values, 0) ? size({"v_head_dim"}, max_size) : kind.key_width;
    add_layers();
}

inline CacheSizes read_cache_sizes(const std::string &name, const std::string &text) {
    CacheSizes out;
    try {
        Config c = parse_config(name, text, "", "");
        return {c.architecture, "", "", c.context, c.kinds, c.rows};
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
