// Reads config.json and generation_config.json into a Config, or refuses them with one line.
//
// Nothing in these files is trusted. Every fault ends in fail(): an Error of one line that names the file, what was
// found, what was expected and, if there is one, the cure.
#pragma once

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "families.h"
#include "json.h"
#include "kinds.h"

struct Config {
    const Family *family = &families[0];
    std::string dtype;               // the weights' type by the config; each Tensor has its own type
    int layers = 0, hidden = 0, ffn = 0, heads = 0, vocabulary = 0;
    int shared_ffn = 0;            // in layers that read another layer's rows; 0: ffn
    bool keys_are_values = false;  // in layers without a window, the value is the key before norm and RoPE
    int per_layer = 0, layer_vocabulary = 0;  // second embedding: P (see PerLayer), and its ids; 0: none
    float layer_scale = 0;                    // its factor
    int context = 0;  // positions that the model was made for
    double norm_epsilon = 0;
    double embedding_scale = 1;  // factor of a token's embedding on entering x
    double score_scale = 0;      // factor of q k; 0: 1 / sqrt(D)
    double logit_scale = 1;      // factor of the logits
    double logit_cap = 0;        // c: a logit becomes c tanh(logit / c); 0: no cap
    bool gelu = false;           // the MLP's activation: GELU by tanh, otherwise SiLU
    std::vector<Kind> kinds;
    std::vector<LayerRows> rows;  // (layers)
    bool tied = false;         // the head is the embedding; bind_weights() clears it if the files have both
    std::vector<int> end_ids;  // a text ends after any of them; empty: only at -n or with the context
    int bos_id = -1;           // -1: none
    bool qkv_bias = false, output_bias = false, mlp_bias = false;
    bool convolution_bias = false;  // for the taps and matrices of convolutions
    const Kind &kind(int layer) const { return kinds[(size_t)rows[(size_t)layer].kind]; }
    bool ends(int id) const { return std::count(end_ids.begin(), end_ids.end(), id) > 0; }
};

// The largest size in a config, and the largest heads * head_dim: a product of two fits an int64_t with room to spare.
constexpr int max_size = 1 << 24, max_ids = max_size - 1;  // base/ranking.h counts ids in 24 bits
constexpr int max_layers = 10000;

// Returns the family that a config names, or refuses it. `text`: the text_config of a model that also sees or hears. A
// base model, which has no head (Qwen3Model: embedding models are published so), counts as one with a tied head.
inline const Family &find_family(const Section &config, const Section &text) {
    std::string model_type = config.text("model_type", ""), wanted = model_type, known;
    const Json *list = config.find("architectures");
    if (list && (!is_list(list) || count_of(list) != 1 || !is_text(&list->items[0])))
        config.refuse("architectures", list, "a list of one name");
    if (list) wanted = list->items[0].text;
    if (wanted == "LLaMAForCausalLM") wanted = "LlamaForCausalLM";  // the first conversions' spelling
    if (wanted.empty()) config.need("architectures");
    std::string types;  // model_types that this wrapper may contain
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

// Refuses keys that change the computation without a tensor: factors of embedding, residual stream, scores or logits
// (Granite, Cohere, MiniCPM, Falcon-H1), caps (Gemma 2, OLMo), positions (SmolLM3, Llama 4, MPT, DeepSeek), experts,
// the order of steps, norms of q and k, parts of Gemma 4. A row: the value that changes nothing, then the keys.
inline void refuse_foreign_keys(const Section &config, const Family &family, const Config &sizes, const Kind &kind) {
    const struct {
        double neutral;
        const char *keys;
        bool read = false;  // this family reads these keys
    } table[] = {
        {1, "embedding_multiplier residual_multiplier logits_scaling", family.multipliers},
        {1, "logit_scale scale_emb lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier "
            "mlp_multipliers rotary_pct is_causal"},
        {1, "no_rope_layers", family.some_turn},
        {1, "partial_rotary_factor", family.part_turns},
        {0, "attn_logit_softcapping attn_logit_softcap clip_qkv nope_layer_interval attention_chunk_size "
            "attn_temperature_tuning rope_interleave alibi kv_lora_rank num_experts num_local_experts "
            "n_routed_experts use_parallel_residual parallel_attn enable_moe_block"},
        {0, "no_rope_layer_interval", family.some_turn},
        {0, "layer_rope_theta", family.layer_thetas},
        {0, "final_logit_softcapping attention_k_eq_v use_double_wide_mlp hidden_size_per_layer_input "
            "use_bidirectional_attention num_kv_shared_layers per_layer_config",
         family.ways == Ways::gemma4},
        {(double)family.head_norms, "use_qk_norm qk_layernorm"},
        {1 / std::sqrt(kind.key_width), "attention_multiplier", family.multipliers},
        {(double)kind.key_width, "query_pre_attn_scalar", family.query_scalar},
        {std::sqrt(sizes.layers), "scale_depth"},
        {(double)sizes.hidden, "dim_model_base"}};
    for (const auto &row : table) {
        const std::string cure =
            formatted("%g, or no such key: %s computes without it", row.neutral, family.architecture);
        for (const std::string &key : split(row.keys)) {
            const Json *item = config.find(key.c_str());
            if (item && !row.read && !is_neutral(item, row.neutral)) config.refuse(key.c_str(), item, cure);
        }
    }
}

// Throws unless attention can compute with heads of these sizes.
inline void check_heads(const char *name, int heads, const Kind &kind) {
    if (heads % kind.kv_heads)
        fail("%s: num_attention_heads is %d, expected a multiple of num_key_value_heads, %d", name, heads,
             kind.kv_heads);
    if (kind.key_width % 2) fail("%s: head_dim is %d, expected an even number: RoPE turns pairs", name, kind.key_width);
    if (kind.key_width > max_size / heads)
        fail("%s: num_attention_heads * head_dim is %lld, expected at most %d", name, (long long)heads * kind.key_width,
             max_size);
}

// Reads `key` into each of `sizes`, if the section has it.
inline void take(const Section &own, const char *key, std::initializer_list<int *> sizes) {
    for (int *size : sizes)
        if (own.find(key)) *size = own.integer(key, 1, max_size);
}

// Read the head sizes of one layer that has its own, and those of all layers without a window.
inline void read_own_heads(const Section &own, Kind &kind) {
    take(own, "head_dim", {&kind.key_width, &kind.value_width});
    take(own, "num_key_value_heads", {&kind.kv_heads});
}
inline void read_global_heads(const Section &config, const Family &family, Kind &kind) {
    const bool gemma4 = family.ways == Ways::gemma4;
    if (gemma4 && !config.find("per_layer_config")) kind.key_width = kind.value_width = 512;
    take(config, "global_head_dim", {&kind.key_width, &kind.value_width});
    if (config.flag("attention_k_eq_v", !gemma4)) take(config, "num_global_key_value_heads", {&kind.kv_heads});
}

// Returns per_layer_config (written by Transformers 5) as one section per layer; the key "05" is layer 5.
inline std::vector<Section> sections_of_layers(const Section &config, int layers) {
    const Section by_layer = config.section("per_layer_config");
    std::vector<Section> sections((size_t)layers, {config.name, nullptr});
    for (const Json *item : items_of(by_layer.object)) {
        const size_t layer = strtoull(item->key.c_str(), nullptr, 10);
        if (item->key.find_first_not_of("0123456789") != std::string::npos || layer >= sections.size())
            by_layer.refuse(printable(item->key).c_str(), item, formatted("layers from 0 to %d as keys", layers - 1));
        sections[layer] = by_layer.section(item->key.c_str());
    }
    return sections;
}

// Reads the sizes of the model into `out`, and what its layers have in common into `kind`.
inline void read_sizes(const Section &config, const Family &family, Config &out, Kind &kind) {
    auto or_none = [](int value) { return value ? std::optional<int>(value) : std::nullopt; };
    out.layers = config.integer("num_hidden_layers", 1, max_layers);
    out.hidden = config.integer("hidden_size", 1, max_size);
    const char *ffn = family.ways == Ways::granite4 ? "shared_intermediate_size" : "intermediate_size";
    if (family.ways != Ways::lfm2) out.ffn = config.integer(ffn, 1, max_size);
    out.vocabulary = config.integer("vocab_size", 1, max_ids, or_none(family.vocabulary));
    out.context = config.integer("max_position_embeddings", 1, 1 << 30, family.context);
    out.heads = config.integer("num_attention_heads", 1, max_size, or_none(family.heads));
    // null means as many KV heads as heads; only a missing key means the family's default.
    bool as_heads = config.has_null("num_key_value_heads") || family.kv_heads == 0;
    kind.kv_heads = config.integer("num_key_value_heads", 1, max_size, as_heads ? out.heads : family.kv_heads);
    int &width = kind.key_width = config.integer("head_dim", 1, max_size, family.head_dim);
    if (width == 0 && out.hidden % out.heads)
        fail("%s: hidden_size is %d, expected a multiple of num_attention_heads, %d (or a head_dim)",
             config.name.c_str(), out.hidden, out.heads);
    if (width == 0) width = out.hidden / out.heads;
    check_heads(config.name.c_str(), out.heads, kind);
    if (family.ways != Ways::lfm2) out.norm_epsilon = config.number("rms_norm_eps", 1e-30, 1, family.epsilon);
}

// Phi-3: its first files say su or yarn but mean longrope. The original context is always the same.
inline void read_phi3(const Family &family, std::string &rope_type, int &original_context) {
    if (rope_type == "su" || rope_type == "yarn") rope_type = "longrope";
    original_context = family.context;
}

// Reads RoPE into `kind`. Two spellings: rope_theta next to rope_scaling {type or rope_type, factor, ...}, or all of it
// in rope_parameters. As in Transformers, rope_scaling wins over rope_parameters, and a theta in either wins over the
// one next to them. Gemma's local layers have their own: rope_local_base_freq at first, later an object per kind.
inline void read_rope(const Section &config, const Family &family, int context, Kind &kind) {
    const bool by_kind = family.ropes, local = by_kind && kind.window;
    Section rope = config.section("rope_scaling");
    if (by_kind && count_of(rope.object) && config.find("rope_parameters"))
        config.refuse("rope_scaling", rope.object, "none beside rope_parameters");
    if (local || !count_of(rope.object)) {
        rope = config.section("rope_parameters");
        if (by_kind) rope = rope.section(local ? "sliding_attention" : "full_attention");
    }
    if (family.query_growth && !rope.object) config.need("rope_parameters");  // the default would be YaRN by 16
    const char *name = rope.name.c_str();
    for (const Json *item : items_of(rope.object))
        if (is_object(item))
            rope.refuse(printable(item->key).c_str(), item, "no object: one RoPE for all layers");
    const bool gemma4 = family.ways == Ways::gemma4;
    const Section nothing{config.name, nullptr}, around = gemma4 ? nothing : config;
    if (!around.object && rope.object && !rope.find("rope_theta") && config.find("rope_theta"))
        config.refuse("rope_theta", config.find("rope_theta"), "it in rope_parameters, for each kind of layers");
    kind.rope_theta = local ? around.number("rope_local_base_freq", 1, 1e15, 10000)
                            : around.number("rope_theta", 1, 1e15, family.theta);
    kind.rope_theta = rope.number("rope_theta", 1, 1e15, kind.rope_theta);
    for (const char *key : {"type", "truncate"})  // Transformers 4 and 5 read these differently
        if (const Json *item = member(rope.object, key); by_kind && item)
            rope.refuse(key, item, "no such key (but rope_type)");
    std::string type = rope.text("rope_type", rope.text("type", "default"));
    double part = config.number("partial_rotary_factor", 0, 1, 1);
    int original = 0;
    if (gemma4 && !local && !rope.object) type = "proportional", part = 0.25;
    if (family.ways == Ways::phi3) read_phi3(family, type, original);
    kind.rope = read_scaling(by_kind ? nothing : config, rope, type, part, kind.key_width, context, original);
    if (kind.rope.rotary != 1 && !family.part_turns)
        fail("%s: partial_rotary_factor is not supported; supported is 1", name);
    if (!family.query_growth) return;
    kind.rope.query_growth = rope.number("llama_4_scaling_beta", 0, 1e3);
    if (!kind.rope.original_context)
        kind.rope.original_context = rope.integer("original_max_position_embeddings", 1, 1 << 30, context);
}

// Returns for each layer whether it has RoPE. SmolLM3: all but each fourth. Granite 4: all or none.
inline std::vector<bool> read_turning(const Section &config, const Family &family, int layers) {
    std::vector<bool> turning((size_t)layers, true);
    if (family.ways == Ways::granite4) {
        const std::string type = config.text("position_embedding_type", "");
        if (!type.empty()) config.require_known("position_embedding_type", type, "rope nope");
        turning.assign((size_t)layers, type == "rope");
        config.need("num_local_experts"), config.need("layer_types");  // the defaults: 8, and no attention
    }
    if (!family.some_turn) return turning;
    const Json *list = config.find("no_rope_layers");
    std::vector<const Json *> listed;  // [], as in published Llama 4, counts as missing
    if (!is_list(list) || count_of(list)) listed = config.by_layer("no_rope_layers", layers, " of 0 and 1");
    const int every = config.integer("no_rope_layer_interval", 1, max_layers, 4);
    for (size_t i = 0; i < turning.size(); i++) {
        if (!listed.empty() && !is_whole(listed[i], 0, 1)) config.refuse("no_rope_layers", listed[i], "0 or 1 in it");
        turning[i] = listed.empty() ? (int)(i + 1) % every != 0 : listed[i]->number != 0;
    }
    return turning;
}

// ---- Which layers attend, and how far they look back ---------------------------------------------------------------

enum class Sees { nothing, window, all };  // nothing: a layer without keys (linear attention, a convolution, an MLP)

// A key with a word per layer in a list or a letter per layer in a text, and the words for each thing a layer may see.
struct LayerWords {
    const char *key, *all, *window, *nothing;
    bool repeats;  // the words are a pattern that repeats over the layers
};
constexpr LayerWords layer_words[] = {
    {"layer_types", "full_attention attention indexed_attention deepseek_sparse_attention",
     "sliding_attention chunked_attention", "linear_attention mamba mamba2 conv recurrent moe mlp", false},
    {"layers_block_type", "full_attention attention", "sliding_attention", "linear_attention mamba mamba2 moe mlp",
     false},
    {"attention_layers", "global", "local", "", false},    // GPT-Neo
    {"hybrid_override_pattern", "*", "", "M E -", false},  // Nemotron-H
    {"hybrid_layer_pattern", "0", "1", "", false},         // MiMo
    {"attn_type_list", "1", "", "0", false},               // MiniMax
    {"block_types", "", "attention", "recurrent", true},   // RecurrentGemma
    {"sliding_window_pattern", "G", "L", "", true},        // EXAONE 4
};

// A key with the numbers of some layers, what these see (`named`), and what all others see.
struct LayerNumbers {
    const char *section, *key;
    Sees named, others;
    int first = 0;  // the number of the first layer
};
constexpr LayerNumbers layer_numbers[] = {
    {"", "full_attn_idxs", Sees::all, Sees::nothing},                      // LFM2
    {"", "attn_layer_indices", Sees::all, Sees::nothing},                  // Bamba
    {"", "hybrid_layer_ids", Sees::all, Sees::nothing},                    // Zamba2
    {"", "local_layer_ids", Sees::window, Sees::all},                      // Inkling
    {"linear_attn_config", "full_attn_layers", Sees::all, Sees::nothing, 1},  // Kimi Linear
};

// Returns what each layer sees by one of these keys; empty without the key. hybrid: a layer of that name attends.
inline std::vector<Sees> layers_named(const Section &config, const LayerWords &known, int layers, bool hybrid = false) {
    std::vector<Sees> sees;
    const Json *list = config.find(known.key);
    if (!list || is_number(list)) return sees;
    std::vector<std::string> words;
    for (char letter : list->text) words.push_back({letter});
    for (const Json *item : items_of(is_list(list) ? list : nullptr))
        words.push_back(is_text(item) ? item->text : printable(item));
    if (words.empty() || (!known.repeats && (int)words.size() != layers))
        config.refuse(known.key, list, formatted("a list of %d (num_hidden_layers) names", layers));
    for (int i = 0; i < layers; i++) {
        const std::string &word = words[(size_t)i % words.size()];
        if (word == "indexed_attention" || word == "deepseek_sparse_attention") config.need("index_head_dim");
        const bool last = word == "L" && i + 1 == layers;  // EXAONE 4: it sees everything
        if (last || (hybrid && word == "hybrid") || has(known.all, word))
            sees.push_back(Sees::all);
        else if (has(known.window, word) || has(known.nothing, word))
            sees.push_back(has(known.window, word) ? Sees::window : Sees::nothing);
        else
            fail("%s: a layer of the kind %s is not known here", config.name.c_str(), printable(word).c_str());
    }
    return sees;
}
inline std::vector<Sees> layers_numbered(const Section &config, const LayerNumbers &known, int layers) {
    const Section in = *known.section ? config.section(known.section) : config;
    const Json *list = in.find(known.key);
    if (!list) return {};
    if (!is_list(list) || count_of(list) > layers)
        in.refuse(known.key, list, formatted("a list of at most %d (num_hidden_layers) layers", layers));
    std::vector<Sees> sees((size_t)layers, known.others);
    for (const Json *item : items_of(list)) {
        const int last = known.first + layers - 1;
        if (!is_whole(item, known.first, last))
            in.refuse((std::string("an entry of ") + known.key).c_str(), item,
                      formatted("a layer from %d to %d", known.first, last));
        sees[(size_t)item->number - (size_t)known.first] = known.named;
    }
    return sees;
}

// Returns what each layer sees by layer_types, empty without it. Refuses words that are not in `expected`.
inline std::vector<Sees> read_layer_types(const Section &config, int layers, const std::string &expected) {
    std::string either;
    for (const std::string &word : split(expected)) either += (either.empty() ? "" : " or ") + word;
    for (const Json *item : config.by_layer("layer_types", layers, " names"))
        if (!is_text(item) || !has(expected, item->text == "attention" ? "full_attention" : item->text))
            config.refuse("an entry of layer_types", item, either);
    return layers_named(config, layer_words[0], layers);
}

// Returns each layer's window in positions, 0: none. Mistral: every layer has one. Qwen: with use_sliding_window, from
// layer max_window_layers on. Gemma and Granite: by a pattern. SmolLM3: layers without RoPE. layer_types overrides
// this. A window as long as the context counts as none, as no text is longer (Phi-4-mini: 262,144 of 131,072).
inline std::vector<int> read_windows(const Section &config, const Family &family, const std::vector<bool> &turning,
                                     int context) {
    const int layers = (int)turning.size();
    const bool mixes = family.some_slide, asked = mixes && !family.pattern, qwen = asked && family.window > 0;
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
        if (family.some_turn) full = turning[(size_t)layer];
        windows.push_back(full ? 0 : window);
    }

    const char *expected = mixes ? "full_attention sliding_attention" : window ? "sliding_attention" : "full_attention";
    const std::vector<Sees> named = read_layer_types(config, layers, expected);
    for (size_t i = 0; i < named.size(); i++) windows[i] = named[i] == Sees::all ? 0 : window;
    if (!window && std::count(named.begin(), named.end(), Sees::window))
        fail("%s: layer_types has sliding_attention, but use_sliding_window and sliding_window give no window",
             config.name.c_str());
    if (family.ways == Ways::gemma4) windows.back() = 0;  // the last sees everything, whatever the config says
    for (int &back : windows) back = back < context ? back : 0;
    return windows;
}

// LFM2: short convolutions, and between them layers with attention, given by layer_types or by their numbers in
// full_attn_idxs. As in Transformers, the MLP's width is two thirds of the config's, times a factor, rounded up to a
// multiple of block_multiple_of; if block_auto_adjust_ff_dim is false, it is the config's.
inline void read_lfm2(const Section &config, Config &out, std::vector<Kind> &layers) {
    const char *key = config.find("block_ff_dim") ? "block_ff_dim" : "intermediate_size";
    const int named = config.integer(key, 1, max_size), unit = config.integer("block_multiple_of", 1, max_size, 256);
    const double factor = config.number("block_ffn_dim_multiplier", 1e-6, 1e6, 1);
    const bool adjusted = config.flag("block_auto_adjust_ff_dim", true);
    const double rows = adjusted ? unit * std::ceil(std::floor(factor * (2 * named / 3)) / unit) : named;
    if (rows < 1 || rows > max_size)
        fail("%s: %s and block_ffn_dim_multiplier make an MLP of %.0f rows, expected 1 to %d", config.name.c_str(), key,
             rows, max_size);
    out.ffn = (int)rows;
    out.norm_epsilon = config.number("norm_eps", 1e-30, 1, out.family->epsilon);
    out.tied = config.flag("tie_embedding", out.tied);
    out.convolution_bias = config.flag("conv_bias", false);

    Kind convolution;
    convolution.kv_heads = 1, convolution.key_width = out.hidden;
    convolution.window = convolution.taps = config.integer("conv_L_cache", 1, 1000, 3);
    std::vector<Sees> sees = read_layer_types(config, out.layers, "conv full_attention");
    if (sees.empty()) sees = layers_numbered(config, layer_numbers[0], out.layers);
    for (size_t i = 0; i < sees.size(); i++)
        if (sees[i] == Sees::nothing) layers[i] = convolution;
}

// Gemma 4: returns how many of the last layers read another layer's rows (num_kv_shared_layers). Layers without a
// window have their own head sizes; in per_layer_config, which Transformers 5 writes, any layer may. Each token has a
// second embedding for each layer.
inline int read_gemma4(const Section &config, Config &out, std::vector<Kind> &layers) {
    const std::vector<Section> own = sections_of_layers(config, out.layers);
    out.keys_are_values = config.flag("attention_k_eq_v", false);
    for (size_t i = 0; i < layers.size(); i++) {
        if (!layers[i].window && !config.find("per_layer_config") && !config.has_null("per_layer_config"))
            read_global_heads(config, *out.family, layers[i]);
        own[i].refuse_others("head_dim num_key_value_heads", "no such key: all layers have it in common");
        read_own_heads(own[i], layers[i]);
        check_heads(own[i].name.c_str(), out.heads, layers[i]);
    }
    out.logit_cap = config.number("final_logit_softcapping", 0, 1e9, 0);
    out.per_layer = config.integer("hidden_size_per_layer_input", 0, max_size / out.layers, 256);
    out.layer_scale = std::sqrt((float)out.per_layer / 2);
    const int least = out.per_layer ? out.vocabulary : 0;
    out.layer_vocabulary = config.integer("vocab_size_per_layer_input", least, max_size, out.family->vocabulary);
    const std::string both_ways = config.text("use_bidirectional_attention", "vision");  // between an image's tokens
    config.require_known("use_bidirectional_attention", both_ways, "vision");
    if (config.flag("use_double_wide_mlp", false)) out.shared_ffn = 2 * out.ffn;
    return config.integer("num_kv_shared_layers", 0, out.layers - 1, 0);
}

// Reads what differs from layer to layer: window, RoPE, and what only one family has. The first kind is one with
// attention, because commands say most about the first.
inline void read_layers(const Section &config, const Family &family, const Kind &common, Config &out) {
    std::vector<Kind> layers((size_t)out.layers, common);
    const std::vector<bool> turning = read_turning(config, family, out.layers);
    int shared = 0;
    if (family.ways == Ways::lfm2) {
        read_lfm2(config, out, layers);
    } else {
        const std::vector<int> windows = read_windows(config, family, turning, out.context);
        for (size_t i = 0; i < layers.size(); i++) layers[i].window = windows[i];
    }
    if (family.ways == Ways::gemma4) shared = read_gemma4(config, out, layers);
    const Json *thetas = family.layer_thetas ? config.find("layer_rope_theta") : nullptr;
    if (thetas && (!is_list(thetas) || count_of(thetas) != out.layers))
        config.refuse("layer_rope_theta", thetas, "a number for each of the layers");
    for (size_t i = 0; i < layers.size(); i++) {
        Kind &kind = layers[i];
        if (kind.taps) continue;
        kind.value_width = kind.key_width;
        read_rope(config, family, out.context, kind);
        const Json *theta = thetas ? &thetas->items[i] : nullptr;
        if (theta && !(is_number(theta) && theta->number >= 0 && theta->number <= 1e15))
            config.refuse("layer_rope_theta", theta, "numbers from 0 to 1e15");
        if (theta) kind.rope_theta = theta->number;
        if (!turning[i]) kind.rope_theta = 0;
        if (kind.rope_theta == 0) kind.rope = {};
    }
    const auto attends = std::find_if(layers.begin(), layers.end(), [](const Kind &kind) { return !kind.taps; });
    if (attends == layers.end())
        fail("%s: all layers are convolutions, expected one with attention at least", config.name.c_str());
    out.kinds = {*attends};
    for (int i = 0; i < out.layers; i++) {
        add_layer(out.kinds, out.rows, layers[(size_t)i], i < out.layers - shared);
        if (out.rows.back().index < 0)
            fail("%s: num_kv_shared_layers is %d, but layer %d has no earlier one of its kind whose rows it could read",
                 config.name.c_str(), shared, i);
    }
}

// Reads BOS and EOS from generation_config.json, else config.json outside text_config, else inside it, else the family.
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

// Reads the factors. Granite adds r y to x where others add y. RMSNorm ignores the scale of x, so x / r is kept: the
// embedding is divided by r, and epsilon, which is added to the mean of x^2, by r^2.
inline void read_factors(const Section &config, const Family &family, Config &out) {
    if (family.scaled_embedding) out.embedding_scale = std::sqrt(out.hidden);
    if (family.unscaled_scores) out.score_scale = 1;
    if (family.query_scalar)
        out.score_scale = 1 / std::sqrt(config.number("query_pre_attn_scalar", 1e-6, 1e9, 256));
    if (family.multipliers) {
        const double residual = config.number("residual_multiplier", 1e-6, 1e6, 1);
        out.embedding_scale = config.number("embedding_multiplier", -1e9, 1e9, 1) / residual;
        out.norm_epsilon /= residual * residual;
        out.score_scale = config.number("attention_multiplier", 1e-9, 1e9, 1);
        out.logit_scale = 1 / config.number("logits_scaling", 1e-9, 1e9, 1);
    }
}

inline Config read_config(const Section &whole, const Section &generation) {
    const Section text_config = whole.section("text_config"), &config = text_config.object ? text_config : whole;

    Config out;
    const Family &family = find_family(whole, text_config);
    out.family = &family;
    for (const Section &section : {config, whole})
        out.dtype = section.text("dtype", section.text("torch_dtype", out.dtype));
    if (out.dtype.rfind("torch.", 0) == 0) out.dtype = out.dtype.substr(6);
    if (out.dtype == "auto") out.dtype = "";  // the type as stored
    if (!out.dtype.empty()) config.require_known("dtype", out.dtype, "float32 float16 bfloat16");
    const bool gelu = family.gelu;
    const char *key = gelu ? "hidden_activation" : "hidden_act", *other = gelu ? "hidden_act" : "hidden_activation";
    std::string activation = config.text(key, gelu ? "gelu_pytorch_tanh" : "silu");
    if (config.text(other, activation) != activation)
        config.refuse(other, config.find(other), activation + ", as " + key + " says");
    if (activation == "swish") activation = "silu";  // two names of x * sigmoid(x)
    config.require_known(key, activation, family.ways == Ways::lfm2 ? "silu" : "silu gelu_pytorch_tanh");
    out.gelu = activation != "silu";
    for (const Section &section : {config, whole})
        if (const Json *item = section.find("quantization_config"))
            section.refuse("quantization_config", item,
                           "weights as they were trained, in F32 F16 BF16, and no such key");
    Kind kind;
    read_sizes(config, family, out, kind);
    refuse_foreign_keys(config, family, out, kind);
    out.tied = whole.flag("tie_word_embeddings", text_config.object || family.tied);
    read_layers(config, family, kind, out);
    read_special_ids(whole, config, generation, family, out);
    read_factors(config, family, out);
    auto biased = [&](Bias bias, const char *asked) {
        return bias == Bias::always || (bias == Bias::asked && config.flag(asked, false));
    };
    out.qkv_bias = biased(family.qkv_bias, "attention_bias");
    out.output_bias = biased(family.output_bias, "attention_bias");
    out.mlp_bias = biased(family.mlp_bias, "mlp_bias");
    return out;
}

// Reads the two files as texts in memory; an empty `generation_text` means no such file. Names are for messages.
inline Config parse_config(const std::string &name, const std::string &text, const std::string &generation_name,
                           const std::string &generation_text) {
    Json root = parse_json(name, text, /*as_python=*/true), generation_root;
    if (!generation_text.empty()) generation_root = parse_json(generation_name, generation_text, true);
    return read_config({name, &root}, {generation_name, &generation_root});
}

// Returns advice for a model path without a config.json, by what is found there instead.
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
    // The hub's cache: models--org--name, or the snapshots in it.
    const std::string all = given.substr(0, given.find_last_not_of('/') + 1);
    const std::string snapshots =
        std::filesystem::path(all).filename() == "snapshots" ? all : join_path(all, "snapshots");
    if (std::filesystem::is_directory(snapshots, none)) {
        std::string best, main;
        for (const auto &entry : std::filesystem::directory_iterator(snapshots, none))
            if (file_exists(entry.path() / "config.json")) best = std::max(best, entry.path().string());
        std::ifstream(join_path(snapshots, "../refs/main")) >> main;  // the snapshot that was fetched last
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

// Returns the name of DIR/config.json for messages, and its text.
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
