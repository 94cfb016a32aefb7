// The model families: a row for each that runs here, and for each that does not but whose cache can be sized. A row has
// the defaults that Transformers uses for missing keys, and what the family does that Llama does not. A new family is a
// new row; if it has keys of its own, also a reader in config.h.
#pragma once

#include <utility>

enum class Bias { none, asked, always };  // asked: if attention_bias or mlp_bias is true

// Families with a reader of their own in config.h.
enum class Ways { none, phi3, granite4, gemma4, lfm2 };

struct Family {
    const char *architecture = "", *model_type = "";  // in `others`: "", and maybe several model_types
    const char *wrapper = "";  // "Gemma3": models that also see or hear, with this family as text_config
    Ways ways = Ways::none;

    // Transformers' defaults for missing keys (transformers/models/*/configuration_*.py). hidden_size,
    // intermediate_size and num_hidden_layers have no default here: every checkpoint must have them.
    int heads = 0, kv_heads = 0, head_dim = 0;  // 0: required; as many as heads; hidden_size / heads
    int vocabulary = 0;                         // 0: required
    int context = 0, window = 0;                // window -1: none by default; 0: never one
    int bos_id = -1, end_id = -1;               // -1: none
    double epsilon = 1e-6, theta = 1e4;
    bool tied = false;  // the head is the embedding

    // Tensors.
    Bias qkv_bias = Bias::none, output_bias = Bias::none, mlp_bias = Bias::none;
    bool fused_qkv = false, fused_mlp = false;   // one matrix in a file for query, key and value; for gate and up
    bool head_norms = false, all_norms = false;  // RMSNorm of each head's query and key; of all heads as one vector
    bool value_norms = false;                    // RMSNorm of each head's value, without weights
    bool norms_before = true, norms_after = false;  // norms of what attention and MLP read; of what they add
    bool one_plus = false;                          // norms multiply by 1 + w
    bool sinks = false;                             // learned sinks
    std::pair<const char *, const char *> names[9] = {};  // parts of tensor names: Llama's, this family's

    // Layers, and the rest.
    int pattern = 0;  // n: each n-th layer sees everything, the others a window; -n: the first of each n; 0: all alike
    bool some_slide = false;        // some layers have a window: layer_types
    bool ropes = false;             // layers with and without a window differ in RoPE
    bool some_turn = false;         // only some layers have RoPE: no_rope_layers, no_rope_layer_interval
    bool layer_thetas = false;      // each layer has its own theta: layer_rope_theta
    bool part_turns = false;        // RoPE rotates a part of a head: partial_rotary_factor
    bool query_growth = false;      // queries grow with the position: llama_4_scaling_beta
    bool gelu = false;              // the MLP's default activation, under the key hidden_activation
    bool scaled_embedding = false;  // the embedding is multiplied by sqrt(hidden)
    bool unscaled_scores = false;   // scores are not divided by sqrt(D)
    bool query_scalar = false;      // scores are divided by sqrt(query_pre_attn_scalar)
    bool multipliers = false;       // factors of embedding, scores, logits and what is added to x

    // What the cache's size depends on in families that do not run (commands/sizes.h).
    bool own_width = false;    // head_dim is required: it need not be hidden_size / heads
    bool multi_query = false;  // one KV head by default
    bool swa_heads = false;    // the KV heads of layers with a window are required
    bool hybrid = false;       // layers with attention are called "hybrid"
    bool all_attend = false;   // each layer has attention next to its other parts
    bool chunks = false;       // layers with RoPE see only a chunk of the text: attention_chunk_size
};

constexpr Family families[] = {
    {.architecture = "LlamaForCausalLM", .model_type = "llama", .context = 2048, .bos_id = 1, .end_id = 2,
     .qkv_bias = Bias::asked, .output_bias = Bias::asked, .mlp_bias = Bias::asked},
    {.architecture = "MistralForCausalLM", .model_type = "mistral", .wrapper = "Mistral3", .kv_heads = 8,
     .context = 131072, .window = 4096, .bos_id = 1, .end_id = 2},
    {.architecture = "Ministral3ForCausalLM", .model_type = "ministral3", .wrapper = "Mistral3", .heads = 32,
     .kv_heads = 8, .head_dim = 128, .vocabulary = 131072, .context = 262144, .window = -1, .bos_id = 1, .end_id = 2,
     .epsilon = 1e-5, .query_growth = true},
    {.architecture = "Qwen2ForCausalLM", .model_type = "qwen2", .kv_heads = 32, .context = 32768, .window = 4096,
     .qkv_bias = Bias::always, .some_slide = true},
    {.architecture = "Qwen3ForCausalLM", .model_type = "qwen3", .kv_heads = 32, .head_dim = 128, .context = 32768,
     .window = 4096, .qkv_bias = Bias::asked, .output_bias = Bias::asked, .head_norms = true, .some_slide = true},
    {.architecture = "SmolLM3ForCausalLM", .model_type = "smollm3", .heads = 16, .kv_heads = 4, .vocabulary = 128256,
     .context = 32768, .window = -1, .bos_id = 128000, .end_id = 128001, .theta = 2e6, .tied = true,
     .qkv_bias = Bias::asked, .output_bias = Bias::asked, .mlp_bias = Bias::asked, .some_slide = true,
     .some_turn = true},
    {.architecture = "Olmo2ForCausalLM", .model_type = "olmo2", .heads = 32, .vocabulary = 50304, .context = 2048,
     .end_id = 50279, .epsilon = 1e-5, .qkv_bias = Bias::asked, .output_bias = Bias::asked, .all_norms = true,
     .norms_before = false, .norms_after = true},
    {.architecture = "Phi3ForCausalLM", .model_type = "phi3", .ways = Ways::phi3, .heads = 32, .vocabulary = 32064,
     .context = 4096, .window = -1, .bos_id = 1, .end_id = 32000, .epsilon = 1e-5, .fused_qkv = true,
     .fused_mlp = true, .part_turns = true},
    {.architecture = "GraniteForCausalLM", .model_type = "granite", .heads = 32, .vocabulary = 32000, .context = 2048,
     .bos_id = 1, .end_id = 2, .qkv_bias = Bias::asked, .output_bias = Bias::asked, .mlp_bias = Bias::asked,
     .multipliers = true},
    {.architecture = "GraniteMoeHybridForCausalLM", .model_type = "granitemoehybrid", .ways = Ways::granite4,
     .heads = 32, .vocabulary = 32000, .context = 2048, .bos_id = 1, .end_id = 2, .qkv_bias = Bias::asked,
     .output_bias = Bias::asked, .fused_mlp = true,
     .names = {{"mlp.gate_up_proj", "shared_mlp.input_linear"}, {"mlp.down_proj", "shared_mlp.output_linear"}},
     .multipliers = true},
    {.architecture = "GraniteSWAForCausalLM", .model_type = "granite_swa", .heads = 20, .kv_heads = 4,
     .vocabulary = 100352, .context = 8192, .window = 128, .bos_id = 100257, .end_id = 100257, .epsilon = 1e-5,
     .tied = true, .qkv_bias = Bias::asked, .output_bias = Bias::asked, .mlp_bias = Bias::asked, .sinks = true,
     .pattern = -4, .some_slide = true, .layer_thetas = true, .multipliers = true},
    {.architecture = "Gemma3ForCausalLM", .model_type = "gemma3_text", .wrapper = "Gemma3", .heads = 8, .kv_heads = 4,
     .head_dim = 256, .vocabulary = 262208, .context = 131072, .window = 4096, .bos_id = 2, .end_id = 1, .theta = 1e6,
     .tied = true, .qkv_bias = Bias::asked, .output_bias = Bias::asked, .head_norms = true, .norms_after = true,
     .one_plus = true, .pattern = 6, .some_slide = true, .ropes = true, .gelu = true, .scaled_embedding = true,
     .query_scalar = true},
    {.architecture = "Gemma4ForCausalLM", .model_type = "gemma4_text", .wrapper = "Gemma4", .ways = Ways::gemma4,
     .heads = 8, .kv_heads = 4, .head_dim = 256, .vocabulary = 262144, .context = 131072, .window = 512, .bos_id = 2,
     .end_id = 1, .theta = 1e6, .tied = true, .qkv_bias = Bias::asked, .output_bias = Bias::asked, .head_norms = true,
     .value_norms = true, .norms_after = true, .pattern = 6, .some_slide = true, .ropes = true, .gelu = true,
     .scaled_embedding = true, .unscaled_scores = true},
    {.architecture = "Lfm2ForCausalLM", .model_type = "lfm2", .ways = Ways::lfm2, .heads = 32, .kv_heads = 8,
     .vocabulary = 65536, .context = 128000, .bos_id = 1, .end_id = 2, .epsilon = 1e-5, .theta = 1e6, .tied = true,
     .head_norms = true,
     .names = {{"norm", "embedding_norm"}, {"input_layernorm", "operator_norm"},
               {"post_attention_layernorm", "ffn_norm"}, {"q_norm", "q_layernorm"}, {"k_norm", "k_layernorm"},
               {"o_proj", "out_proj"}, {"mlp.gate_proj", "feed_forward.w1"}, {"mlp.up_proj", "feed_forward.w3"},
               {"mlp.down_proj", "feed_forward.w2"}}},
};

// Families that do not run here. In a row without a context, the numbers are unknown.
constexpr Family others[] = {
    {.model_type = "mixtral phimoe", .kv_heads = 8, .context = 131072, .window = -1},
    {.model_type = "starcoder2", .heads = 24, .kv_heads = 2, .context = 4096, .window = -1},
    {.model_type = "gemma", .heads = 16, .kv_heads = 16, .head_dim = 256, .context = 8192},
    {.model_type = "gemma2", .heads = 8, .kv_heads = 4, .head_dim = 256, .context = 8192, .window = 4096,
     .pattern = 2, .some_slide = true},
    {.model_type = "cohere2", .heads = 64, .context = 8192, .window = 4096, .pattern = 4, .some_slide = true},
    {.model_type = "falcon gpt_bigcode", .multi_query = true},
    {.model_type = "mimo_v2_flash", .swa_heads = true},
    {.model_type = "falcon_h1", .all_attend = true},
    {.model_type = "zamba zamba2", .hybrid = true},
    {.model_type = "llama4_text", .window = 8192, .some_turn = true, .own_width = true, .chunks = true},
    {.model_type = "ernie4_5 gemma3n_text glm glm4 gpt_oss helium internlm3 minimax_m2 nemotron_h qwen3_5_text "
                   "qwen3_5_moe_text qwen3_next seed_oss vaultgemma",
     .own_width = true},
};

// Architectures that do not run here: how the name begins, the nearest family that runs, and what it lacks.
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
