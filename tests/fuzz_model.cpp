// A libFuzzer target for config.json, generation_config.json and model.safetensors, all in memory:
//   make CUDA=0 build/fuzz_model && build/fuzz_model -max_total_time=60 -max_len=8192
// An input is three parts, split by NUL bytes: config, generation config, weights. Weights that begin with '{' are a
// header alone: its length is put in front and as much data behind it as the largest number in it says, so that one
// changed number is enough to come past the checks that compare numbers with the file's size.
// No seeds are needed: the mutator starts from small whole checkpoints of each family, and comes back to them.
#include <cstdlib>

#include "../base/weights.h"
#include "../commands/sizes.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

// The runs of digits in a text: (where, how many).
static std::vector<std::pair<size_t, size_t>> numbers_in(const std::string &text) {
    std::vector<std::pair<size_t, size_t>> runs;
    for (size_t i = 0; i < text.size(); i++) {
        if (!isdigit((unsigned char)text[i])) continue;
        size_t end = text.find_first_not_of("0123456789", i);
        runs.push_back({i, (end == std::string::npos ? text.size() : end) - i});
        i += runs.back().second;
    }
    return runs;
}

static std::string whole_file(const std::string &header) {
    size_t data = 0;
    for (auto [at, length] : numbers_in(header)) {
        size_t number = strtoull(header.substr(at, length).c_str(), nullptr, 10);
        if (number <= 65536) data = std::max(data, number);
    }
    uint64_t size = header.size();
    return std::string((const char *)&size, sizeof size) + header + std::string(data, '?');
}

// A checkpoint of one layer, 4 wide, 2 heads on 1, that loads.
static std::string small_checkpoint(const Family &family) {
    struct Entry {
        const char *name, *shape;
        int bytes;
    };
    std::vector<Entry> entries = {{"embed_tokens.weight", "[3,4]", 48}, {"norm.weight", "[4]", 16}};
    const bool fused = family.fused_qkv, fused_mlp = family.fused_mlp;
    const bool all_norms = family.all_norms, before = family.norms_before;
    std::vector<Entry> layer = {{"self_attn.o_proj.weight", "[4,4]", 64},
                                {"mlp.down_proj.weight", "[4,1]", 16},
                                {"post_attention_layernorm.weight", "[4]", 16}};
    auto add_if = [&](bool wanted, std::vector<Entry> more) {
        if (wanted) layer.insert(layer.end(), more.begin(), more.end());
    };
    add_if(before, {{"input_layernorm.weight", "[4]", 16}});
    add_if(fused, {{"self_attn.qkv_proj.weight", "[8,4]", 128}});
    add_if(!fused, {{"self_attn.q_proj.weight", "[4,4]", 64},
                    {"self_attn.k_proj.weight", "[2,4]", 32},
                    {"self_attn.v_proj.weight", "[2,4]", 32}});
    add_if(fused_mlp, {{"mlp.gate_up_proj.weight", "[2,4]", 32}});
    add_if(!fused_mlp, {{"mlp.gate_proj.weight", "[1,4]", 16}, {"mlp.up_proj.weight", "[1,4]", 16}});
    add_if(family.qkv_bias == Bias::always, {{"self_attn.q_proj.bias", "[4]", 16},
                               {"self_attn.k_proj.bias", "[2]", 8},
                               {"self_attn.v_proj.bias", "[2]", 8}});
    add_if(family.head_norms, {{"self_attn.q_norm.weight", "[2]", 8}, {"self_attn.k_norm.weight", "[2]", 8}});
    add_if(all_norms, {{"self_attn.q_norm.weight", "[4]", 16}, {"self_attn.k_norm.weight", "[2]", 8}});
    add_if(family.norms_after, {{"post_feedforward_layernorm.weight", "[4]", 16}});
    add_if(family.norms_after && before, {{"pre_feedforward_layernorm.weight", "[4]", 16}});
    add_if(family.sinks, {{"self_attn.sinks", "[2]", 8}});
    if (family.ways == Ways::gemma4) {
        add_if(true, {{"layer_scalar", "[1]", 4},
                      {"per_layer_input_gate.weight", "[2,4]", 32},
                      {"per_layer_projection.weight", "[4,2]", 32},
                      {"post_per_layer_input_norm.weight", "[4]", 16}});
        entries.insert(entries.end(), {{"embed_tokens_per_layer.weight", "[3,2]", 24},
                                       {"per_layer_model_projection.weight", "[2,4]", 32},
                                       {"per_layer_projection_norm.weight", "[2]", 8}});
    }

    std::string header;
    int offset = 0;
    auto add = [&](const std::string &name, const Entry &entry) {
        header += (header.empty() ? "{\"" : ",\"") + name + "\":{\"dtype\":\"F32\",\"shape\":" + entry.shape +
                  ",\"data_offsets\":[" + std::to_string(offset) + "," + std::to_string(offset + entry.bytes) + "]}";
        offset += entry.bytes;
    };
    Model model;
    model.config.family = &family;
    const TensorTable none = {};
    const Binder binder{none, model};
    for (const Entry &entry : entries) add(binder.named(entry.name), entry);
    for (const Entry &entry : layer) add(binder.named(std::string("layers.0.") + entry.name), entry);

    const std::string rope = fused ? "longrope" : family.query_growth ? "yarn" : "llama3";
    std::string config =
        std::string("{\"architectures\":[\"") + family.architecture + "\"],\"model_type\":\"" + family.model_type +
        "\",\"hidden_size\":4,\"intermediate_size\":1,\"num_hidden_layers\":1,\"num_attention_heads\":2,"
        "\"num_key_value_heads\":1,\"head_dim\":2,\"vocab_size\":3,\"tie_word_embeddings\":true,"
        "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,\"torch_dtype\":\"float32\","
        "\"norm_eps\":1e-5,\"block_auto_adjust_ff_dim\":false,\"conv_L_cache\":3,\"num_local_experts\":0,"
        "\"position_embedding_type\":\"rope\",\"shared_intermediate_size\":1,"
        "\"residual_multiplier\":1,\"logits_scaling\":1,\"no_rope_layers\":[1],\"partial_rotary_factor\":1,\"kv_lora_"
        "rank\":0,\"qk_rope_head_dim\":2,"
        "\"final_logit_softcapping\":0,\"vocab_size_per_layer_input\":3,\"attention_k_eq_v\":false,"
        "\"use_sliding_window\":true,\"sliding_window\":3,\"max_window_layers\":0,\"hidden_act\":\"silu\","
        "\"layer_types\":[\"" +
        (family.window ? "sliding" : "full") +
        "_attention\"],\"layer_rope_theta\":[0],\"num_kv_shared_layers\":0,"
        "\"per_layer_config\":{" +
        (family.ways == Ways::gemma4 ? "\"0\":{\"head_dim\":2}" : "") +
        "},\"hidden_size_per_layer_input\":" + (family.ways == Ways::gemma4 ? "2" : "0") +
        ",\"rope_theta\":1e4,"
        "\"hidden_activation\":\"silu\",\"eos_token_id\":[1,2],"
        "\"rope_scaling\":{\"rope_type\":\"" +
        rope +
        "\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,"
        "\"original_max_position_embeddings\":16,\"short_factor\":[1],\"long_factor\":[4],\"beta_fast\":32,"
        "\"beta_slow\":1,\"truncate\":true,\"attention_factor\":1,\"mscale\":1,\"mscale_all_dim\":1}}";
    const std::string nul(1, '\0');
    return config + nul + "{\"eos_token_id\":2,\"bos_token_id\":1}" + nul + header + "}";
}

// Another number in the place of one: near it, twice it, elsewhere in the text, or at an edge.
static std::string change_number(std::string text, unsigned seed) {
    auto runs = numbers_in(text);
    if (runs.empty()) return text;
    auto [at, length] = runs[seed % runs.size()];
    auto [from, count] = runs[seed / 7 % runs.size()];
    const unsigned long long number = strtoull(text.substr(at, length).c_str(), nullptr, 10);
    const std::string choices[] = {std::to_string(number + 1),
                                   std::to_string(number - 1),
                                   std::to_string(number * 2),
                                   std::to_string(number / 2),
                                   text.substr(from, count),
                                   std::to_string(number + 8),
                                   std::to_string(number - 8),
                                   "0",
                                   "2147483648",
                                   "4294967296",
                                   "9007199254740992",
                                   "18446744073709551616",
                                   "-1",
                                   "1.5"};
    return text.replace(at, length, choices[seed / 11 % std::size(choices)]);
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed) {
    std::string input((const char *)data, size);
    if (size < 64 || seed % 500 == 0) input = small_checkpoint(families[seed / 500 % std::size(families)]);
    if (seed % 2) input = change_number(input, seed / 2);
    size = std::min(input.size(), max_size);
    memcpy(data, input.data(), size);
    return seed % 2 || seed % 3 == 0 ? size : LLVMFuzzerMutate(data, size, max_size);
}

// Reads every byte a tensor claims to have, so that the sanitizer sees a claim that is too large.
static unsigned touch(const Tensor &tensor) {
    unsigned sum = 0;
    const int64_t bytes = tensor.data ? tensor.rows * tensor.cols * dtype_bytes(tensor.type) : 0;
    for (int64_t i = 0; i < bytes; i++) sum += ((const unsigned char *)tensor.data)[i];
    return sum;
}

static unsigned touch(Model &model) {
    unsigned sum = 0;
    for_each_tensor(model, [&](const Tensor &tensor, bool) { sum += touch(tensor); });
    return sum;
}

// What load_model does, without the files.
static void load(const std::string &config_text, const std::string &generation_text, const std::string &weights) {
    Config config = parse_config("config.json", config_text, "generation_config.json", generation_text);
    if (config.rows.size() != (size_t)config.layers) abort();
    for (const Kind &kind : config.kinds)
        if (kind.key_width % 2 || config.heads % kind.kv_heads) abort();
    // A heap block of exactly this size: reading behind its end is an error.
    std::unique_ptr<char[]> bytes(new char[weights.size()]);
    memcpy(bytes.get(), weights.data(), weights.size());
    TensorTable table = parse_safetensors("model.safetensors", bytes.get(), weights.size());
    Model model = bind_weights(config, table);
    volatile unsigned sum = touch(model);
    (void)sum;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    std::string input((const char *)data, size), parts[3];
    size_t from = 0;
    for (std::string &part : parts) {
        size_t end = &part == &parts[2] ? std::string::npos : input.find('\0', from);
        part = input.substr(from, end == std::string::npos ? end : end - from);
        from = end == std::string::npos ? input.size() : end + 1;
    }
    if (!parts[2].empty() && parts[2][0] == '{') parts[2] = whole_file(parts[2]);
    auto check = [](auto action) {
        try {
            action();
        } catch (const Error &error) {
            std::string line = error.what();
            if (line.empty() || line.size() > 1000 || line.find('\n') != std::string::npos) abort();
        }
    };
    check([&] { load(parts[0], parts[1], parts[2]); });
    check([&] { read_cache_sizes("config.json", parts[0]); });
    return 0;
}
