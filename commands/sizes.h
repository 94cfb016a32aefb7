// Which rows a checkpoint's cache has, from its config.json alone, also for architectures that do not run here.
#pragma once

#include "../base/weights.h"

// What a cache's size is computed from.
struct CacheSizes {
    std::string architecture, why_not;  // why_not: the line that load_model() fails with; "": it runs
    std::string no_size;                // why all below is unknown; "": it is known
    int context = 0;                    // 0: the config does not say
    std::vector<Kind> kinds;            // without layers that have no keys, except short convolutions, which run here
    std::vector<LayerRows> rows;        // one for each layer of these kinds
};

// True: `text` contains one of `parts`, words with blanks between.
inline bool has_part(const std::string &text, const char *parts) {
    const std::vector<std::string> words = split(parts);
    return std::any_of(words.begin(), words.end(), [&](auto &part) { return text.find(part) != std::string::npos; });
}

// Fails on a key that sounds like attention or layers, unless it is read here, is of a sort that changes no size, or
// asks for nothing. New architectures bring new keys, and a size that ignores one would be wrong without a word.
// `mixed`: the config says which layers attend, so keys of the other layers do not matter.
inline void refuse_unknown_shape(const Section &config, const Family &family, bool mixed) {
    const std::string read =
        "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads "
        "num_key_value_heads num_kv_heads n_kv_heads n_head_kv kv_n_heads multi_query_group_num head_dim kv_channels "
        "attention_head_dim v_head_dim qk_head_dim kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim use_mla "
        "num_kv_shared_layers layer_types layers_block_type attention_layers attention_types hybrid_override_pattern "
        "hybrid_layer_pattern attn_type_list block_types full_attn_idxs attn_layer_indices hybrid_layer_ids "
        "local_layer_ids linear_attn_config full_attention_interval attn_layer_period attn_layer_offset sliding_window "
        "sliding_window_size attention_window_size sliding_window_pattern _sliding_window_pattern max_window_layers "
        "use_sliding_window multi_query_attention attn_config attn_type num_key_value_heads_per_layer block_configs "
        "per_layer_config swa_num_attention_heads swa_num_key_value_heads swa_head_dim swa_v_head_dim global_head_dim "
        "num_global_key_value_heads attention_k_eq_v index_head_dim index_n_heads index_topk indexer_types";
    const Json *window = config.find("sliding_window");
    for (const Json *item : items_of(config.object)) {
        const std::string key = item->key;
        bool shape = has_part(key,
                              "attn attention layer head kv_ _kv key_value window swa latent block_type block_config "
                              "mamba ssm state recurrent lru linear_ conv_ _conv hybrid sparse compress_ use_cla "
                              "index_ indexer loop");
        bool harmless =
            has_part(key,
                     "drop bias norm _eps scal softcap softmax temperature rope rotary mlp moe expert _gate "
                     "ffn vision image visual audio video speech use_cache mtp nextn flash logn impl projection "
                     "lm_head classification_head prediction_head embd per_layer_input layer_switch "
                     "interleaved_layers dense_ full_attn_mod multiplier upcast fp32 sparsity sparse_step num_ln "
                     "parallel output_ initializer key_value_groups") ||
            (mixed && has_part(key,
                               "mamba ssm state lru linear_ conv window_size window_pattern global_attn attn_alpha "
                               "attn_beta attention_hidden_size adapter")) ||
            (key == "attention_chunk_size" && window && item->number == window->number);  // MiMo: equals the window
        const bool own = (family.chunks && key == "attention_chunk_size") ||
                         (family.ways == Ways::gemma4 && key == "use_bidirectional_attention");
        if (!shape || harmless || own || is_neutral(item, 0) || has(read, key)) continue;
        fail("%s: %s is %s: what that does to the size of a cache is not known here", config.name.c_str(),
             printable(key).c_str(), printable(item).c_str());
    }
}

// ---- The sizes -----------------------------------------------------------------------------------------------------

// What each layer sees, for a config that has a rule and no list; empty if it has no rule that is known here.
inline std::vector<Sees> layers_by_rule(const Section &config, const Family &family, int layers) {
    std::vector<Sees> sees;
    if (family.chunks) {  // Llama 4; null: all layers see everything
        for (bool turns : read_turning(config, family, layers))
            sees.push_back(turns && !config.has_null("attention_chunk_size") ? Sees::window : Sees::all);
        return sees;
    }
    const bool period = config.find("attn_layer_period");  // Jamba; the other is Qwen3-Next's
    if (family.hybrid || (!period && !config.find("full_attention_interval"))) return sees;
    int every = config.integer(period ? "attn_layer_period" : "full_attention_interval", 1, max_layers);
    int first = config.integer("attn_layer_offset", 0, max_layers, period ? 0 : every - 1);
    for (int i = 0; i < layers; i++) sees.push_back(i % every == first ? Sees::all : Sees::nothing);
    return sees;
}

// KV heads of each layer; 0: the model's usual number. Layers without attention become Sees::nothing in `sees`.
inline std::vector<int> read_heads_by_layer(const Section &config, int heads, std::vector<Sees> &sees) {
    const int layers = (int)sees.size();
    std::vector<int> own((size_t)layers, 0);
    for (const char *key : {"num_key_value_heads_per_layer", "num_key_value_heads", "num_kv_heads", "block_configs"}) {
        const Json *list = config.find(key);
        if (!is_list(list)) continue;
        int i = 0;
        for (const Json *item : config.by_layer(key, layers)) {
            const Section attention = Section{config.name + ": an entry of " + key, item}.section("attention");
            if (attention.flag("no_op", false) || attention.flag("replace_with_linear", false)) {  // Nemotron-NAS
                sees[i] = Sees::nothing;
            } else if (attention.object) {
                own[i] = heads / attention.integer("n_heads_in_group", 1, heads);
                for (const Json *other : items_of(attention.object))
                    if (!has("n_heads_in_group", other->key) && !is_neutral(other, 0))
                        attention.refuse(printable(other->key).c_str(), other, "none");
            } else {
                if (!is_whole(item, 1, max_size)) config.refuse(key, list, "a whole number for each layer");
                own[i] = (int)item->number;
            }
            i++;
        }
    }
    return own;
}

// Reads the sizes into `out`; defaults are those of `model_type`. A config inside another must say all that has none.
inline void read_any_sizes(Section config, const std::string &model_type, bool inside, CacheSizes &out) {
    Family known = {};
    for (const Family &family : families)
        if (model_type == family.model_type) known = family;
    for (const Family &other : others)
        if (has(other.model_type, model_type)) known = other;
    const bool numbers = known.context > 0;  // the family's numbers are known, not its words alone
    // Transformers gives families without a usual number of heads the shape of the first Llama, 7B.
    auto if_7b = [&](int value) { return numbers && !known.heads ? std::optional<int>(value) : std::nullopt; };
    // The value of the first of these keys that is there; without `otherwise` one must be.
    auto size = [&](std::initializer_list<const char *> keys, int most, std::optional<int> otherwise = {}) {
        for (const char *key : keys)
            if (config.find(key)) return config.integer(key, 1, most);
        return config.integer(*keys.begin(), 1, most, otherwise);
    };
    const int blocks = (int)items_of(config.find("layers_block_type")).size();  // Nemotron 3 gives no other count
    const int layers = size({"num_hidden_layers", "n_layer", "n_layers", "num_layers"}, max_layers,
                            blocks ? std::optional<int>(blocks) : if_7b(32));
    out.context = size({"max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length",
                        "model_max_length"},
                       1 << 30, known.context);
    std::vector<Sees> sees;
    for (const LayerWords &words : layer_words)
        if (sees.empty()) sees = layers_named(config, words, layers, known.hybrid);
    for (const LayerNumbers &listed : layer_numbers)
        if (sees.empty()) sees = layers_numbered(config, listed, layers);
    if (sees.empty()) sees = layers_by_rule(config, known, layers);
    refuse_unknown_shape(config, known, !sees.empty() || known.all_attend);

    Kind all, local;
    int &window = local.window = config.has_null("sliding_window") ? 0 : std::max(0, known.window);
    const char *window_key = "sliding_window";
    for (const char *key :
         {"attention_chunk_size", "window_size", "attention_window_size", "sliding_window_size", "sliding_window"})
        if (config.find(key)) window_key = key, window = config.integer(key, 0, 1 << 30);
    if (numbers && (sees.empty() || known.some_slide)) {
        sees.clear();
        for (int back : read_windows(config, known, read_turning(config, known, layers), out.context)) {
            sees.push_back(back ? Sees::window : Sees::all);
            if (back) window = back;
        }
    } else if (sees.empty()) {
        if (!config.flag("use_sliding_window", true) || (out.context && window >= out.context)) window = 0;
        const int pattern = size({"sliding_window_pattern", "_sliding_window_pattern"}, max_layers, -1);
        if (window && pattern < 0)
            config.refuse(window_key, config.need(window_key), "layer_types beside it: which layers slide?");
        for (int i = 1; i <= layers; i++) sees.push_back(!window || i % pattern == 0 ? Sees::all : Sees::window);
    }
    if (!window && std::count(sees.begin(), sees.end(), Sees::window)) config.need("sliding_window");

    std::vector<int> own_heads((size_t)layers, 0);
    const Json *rank = config.find("kv_lora_rank"), *values = config.find("v_head_dim");
    const std::optional<int> no_index = config.find("index_topk") ? std::nullopt : std::optional<int>(0);
    const int index_width = config.integer("index_head_dim", 1, max_size, no_index);  // V3.2: its index keys
    if (rank && !is_neutral(rank, 0)) {  // DeepSeek-AI 2024, DeepSeek-V2, section 2.1: one row for all heads
        all.kv_heads = 1;
        all.key_width = config.integer("kv_lora_rank", 1, max_size) + config.integer("qk_rope_head_dim", 0, max_size);
    } else {
        if (index_width) config.need("kv_lora_rank");
        const std::optional<int> usual = known.heads ? std::optional<int>(known.heads) : if_7b(32);
        const int heads = size({"num_attention_heads", "n_head", "n_heads", "num_heads"}, max_size, usual);
        own_heads = read_heads_by_layer(config, heads, sees);
        std::optional<int> kv_heads = heads;
        if (!config.has_null("num_key_value_heads") && known.kv_heads) kv_heads = known.kv_heads;
        if (inside && !numbers && !config.has_null("num_key_value_heads")) kv_heads = {};
        const Section attention = config.section("attn_config");  // MPT, DBRX
        if (attention.object) refuse_unknown_shape(attention, {}, false);
        const bool multi_query = config.flag("multi_query", known.multi_query);
        const bool one = (multi_query && !config.flag("new_decoder_architecture", false)) ||
                         attention.text("attn_type", "") == "multiquery_attention";
        if (one || *std::max_element(own_heads.begin(), own_heads.end()))
            all.kv_heads = 1;
        else if (attention.find("kv_n_heads"))
            all.kv_heads = attention.integer("kv_n_heads", 1, max_size);
        else if (config.flag("multi_query_attention", false))  // ChatGLM
            all.kv_heads = size({"multi_query_group_num"}, max_size, 1);
        else
            all.kv_heads = size({"num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"}, max_size, kv_heads);
        all.key_width = size({"head_dim", "kv_channels", "attention_head_dim"}, max_size, known.head_dim);
        if (!all.key_width) {
            const int hidden = size({"hidden_size", "n_embd", "n_embed", "d_model"}, max_size, if_7b(4096));
            if (hidden % heads || known.own_width) config.need("head_dim");
            all.key_width = hidden / heads;
        }
        all.value_width = values && !is_neutral(values, 0) ? size({"v_head_dim"}, max_size) : all.key_width;
    }

    // Sizes that only layers with a window have, only those without, or only single layers.
    local.kv_heads = all.kv_heads, local.key_width = all.key_width, local.value_width = all.value_width;
    if (known.swa_heads) config.need("swa_num_key_value_heads");
    take(config, "swa_num_key_value_heads", {&local.kv_heads});
    take(config, "swa_head_dim", {&local.key_width, &local.value_width});
    take(config, "swa_v_head_dim", {&local.value_width});
    read_global_heads(config, known, all);
    const std::vector<Section> own = sections_of_layers(config, layers);
    const int shared = config.integer("num_kv_shared_layers", 0, layers, 0);  // the last ones: they store nothing
    // "shared": uses the index keys of a layer before it
    const std::vector<const Json *> indexers = config.by_layer("indexer_types", layers, " names");
    if (!indexers.empty() && !index_width)
        config.refuse("indexer_types", config.find("indexer_types"), "none without index_topk");
    for (int i = 0; i < layers; i++) {
        if (sees[i] == Sees::nothing) continue;
        Kind kind = sees[i] == Sees::window ? local : all;
        if (own_heads[i]) kind.kv_heads = own_heads[i];
        const Json *indexer = indexers.empty() ? nullptr : indexers[(size_t)i];
        if (!is_text(indexer) || indexer->text != "shared") kind.key_width += index_width;
        own[i].refuse_others("head_dim num_key_value_heads num_attention_heads intermediate_size", "none");
        read_own_heads(own[i], kind);
        add_layer(out.kinds, out.rows, kind, i + shared < layers);
    }
    if (out.kinds.empty()) fail("%s: no layer has keys and values", config.name.c_str());
    for (const Kind &kind : out.kinds)
        if (!kind.layers) config.refuse("num_kv_shared_layers", config.find("num_kv_shared_layers"), "fewer than that");
}

inline void forget_key(Json &object, const char *key) {
    for (Json &item : object.items)
        if (item.key == key) item.type = Json::Type::null, item.items.clear();
}

inline CacheSizes read_cache_sizes(const std::string &name, const std::string &text) {
    CacheSizes out;
    Json root = parse_json(name, text, /*as_python=*/true);
    Section config{name, &root};
    for (bool again : {false, true}) {  // a quantized checkpoint does not run, but has the original's cache
        try {
            const Config c = read_config(config, {"", nullptr});
            return {c.family->architecture, out.why_not, "", c.context, c.kinds, c.rows};
        } catch (const Error &error) {
            if (!again) out.why_not = error.what();
        }
        forget_key(root, "quantization_config");
        for (Json &section : root.items)
            if (section.key == "text_config") forget_key(section, "quantization_config");
    }
    const Json *names = config.find("architectures");
    bool named = is_list(names) && count_of(names) && is_text(&names->items[0]), inside = false;
    try {
        std::string model_type = config.text("model_type", "");
        out.architecture = named ? names->items[0].text : config.text("model_type", "unknown");
        for (const Family &family : families)
            if (model_type.empty() && out.architecture == family.architecture) model_type = family.model_type;
        for (const char *key : {"text_config", "llm_config", "language_config"}) {  // of models that also see or hear
            if (inside || !config.find(key)) continue;
            config = config.section(key), inside = true;
            model_type = config.text("model_type", model_type + "_text");
        }
        read_any_sizes(config, model_type, inside, out);
    } catch (const Error &error) {
        const char *cure = "; `llm memory` takes a shape: --layers N --kv-heads N --head-dim N -c N";
        return {out.architecture, out.why_not, error.what() + std::string(cure), 0, {}, {}};
    }
    return out;
}

// The sizes of a checkpoint's cache. Fails only if it is no JSON; why load_model() fails is in why_not.
inline CacheSizes load_cache_sizes(const std::string &directory) {
    auto [name, text] = read_config_file(directory);
    CacheSizes sizes = read_cache_sizes(name, text);
    try {
        load_model(directory);
        sizes.why_not.clear();  // generation_config.json may correct config.json
    } catch (const Error &error) {
        sizes.why_not = error.what();
    }
    return sizes;
}
