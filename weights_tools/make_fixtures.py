#!/usr/bin/env python3
"""Writes tests/fixtures/models: tiny random checkpoints, one per family and special case, with Transformers' answers.

    python3 weights_tools/make_fixtures.py [--out tests/fixtures/models] [--only NAME ...]

Needs torch and transformers (made with 5.24, but head_dim_* and those before qwen2_window_16 with 5.23). Each directory
is laid out as a downloaded checkpoint (config.json, generation_config.json, model.safetensors or shards with an index;
no tokenizer: prompts are ids) and holds

    expected.json        prompt_ids (P of them), greedy_ids (the next G by argmax: 16, or as many as `greedy` says),
                         weights: first value, last value and sum of every tensor (after layer 0, which has the same
                         names but where layers differ in kind); of norms by 1 + w, of that
    expected_logits.npy  float32 (P + G - 1, vocabulary): the logits behind each of prompt_ids + greedy_ids[:-1]

computed by Transformers, loaded back from that very directory, in float32 with eager attention and no cache. Weights
stored as f16 or bf16 are rounded first and widened for the computation, so the reference sees what the engine sees.
Old spelling is what Transformers 4 wrote and most downloads still have; what else a case drops from or writes into
its config.json (`drop`, `write`) is there to have the spelling of the files of that family that people download.

Random weights are made so that a wrong engine shows: logits are lively, norms are not 1 and biases not 0, the two
best logits of a greedy step lie more than GAP apart, and what a case is there for (`matters`) moves the logits. Those
with long runs are also steady(): float32 can compute them.
"""
import argparse
import copy
import json
import pathlib
import shutil

import numpy as np
import safetensors.torch
import torch
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3Config,
                          Gemma3TextConfig, Gemma4Config, Gemma4TextConfig, GraniteConfig,
                          GraniteMoeHybridConfig, GraniteSWAConfig, Lfm2Config, LlamaConfig, Ministral3Config, Mistral3Config, MistralConfig, Olmo2Config,
                          Phi3Config, Qwen2Config, Qwen3Config, SmolLM3Config)

PROMPT, GREEDY = 32, 16
GAP = 1e-2  # between the best and the second logit of every greedy step: 100 times what float32 may move one
FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config,
            "gemma3": Gemma3TextConfig, "gemma3_vision": Gemma3Config, "gemma4": Gemma4TextConfig,
            "granite_swa": GraniteSWAConfig, "gemma4_vision": Gemma4Config, "granite": GraniteConfig,
            "lfm2": Lfm2Config, "ministral3": Ministral3Config, "mistral3_vision": Mistral3Config,
            "granite4": GraniteMoeHybridConfig, "olmo2": Olmo2Config, "phi3": Phi3Config, "smollm3": SmolLM3Config}

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=64, max_position_embeddings=128)
LLAMA3_ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64)
# A head wider than hidden / heads keeps the file small.
WIDE_HEAD = dict(SMALL, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=1)

# Smaller ones, where a case needs some more layers.
SMALLER = dict(SMALL, hidden_size=24, intermediate_size=32, num_hidden_layers=3)
GEMMA = dict(SMALLER, sliding_window=7, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True)


# Four layers, where a greedy run is long.
TINY = dict(SMALL, hidden_size=16, intermediate_size=24, num_hidden_layers=4)
PHI = dict(SMALL, hidden_size=32, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
GRANITE = dict(embedding_multiplier=0.5, residual_multiplier=0.22, attention_multiplier=0.25, logits_scaling=0.5)
MINISTRAL_ROPE = dict(rope_type="yarn", rope_theta=100.0, factor=8.0, original_max_position_embeddings=16,
                      beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
# Of eight frequencies the first is kept, two lie between, five are divided.
QWEN2_YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=32)
# Two are kept, two lie between, four are divided.
QWEN3_YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=2.0, original_max_position_embeddings=64, beta_fast=4.0,
                  beta_slow=0.5, attention_factor=1.3, truncate=False)
GEMMA4 = dict(GEMMA, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
              global_head_dim=16, vocab_size_per_layer_input=64, rms_norm_eps=1e-2)
PIXTRAL = dict(model_type="pixtral", hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
               image_size=8, patch_size=4, head_dim=8)


def longrope(original, dims=12, **changes):
    short = [1 + 0.05 * i for i in range(dims // 2)]
    return dict(dict(rope_type="longrope", rope_theta=1000.0, partial_rotary_factor=dims / 16, short_factor=short,
                     long_factor=[1.2 + 0.5 * i for i in range(dims // 2)],
                     original_max_position_embeddings=original), **changes)


def kinds(words):
    return [word if word == "conv" else f"{word}_attention" for word in words.split()]


def weights(part, value, where=...):
    """A change of weights for `matters`: each tensor with `part` in its name becomes `value` where it says."""
    return dict(weights=(part, where, value))


def two_ropes(theta=1e6, local=1e4, **scaling):
    return dict(full_attention=dict(dict(rope_type="default"), rope_theta=theta, **scaling),
                sliding_attention=dict(rope_type="default", rope_theta=local))


# Per case: the family, the config, how it is stored (dtype, old or new spelling, shards, keys that are left out of
# config.json or written into it), end ids where there are several, the length of the prompt and of the greedy run, and
# `matters`: a change of the config or of weights(), or several, after each of which the model must give other logits.
CASES = {
    "llama_mha": dict(family="llama", config=dict(SMALL, num_key_value_heads=4, rms_norm_eps=0.1),
                      matters=dict(rms_norm_eps=1e-6)),
    "llama_gqa_9_on_3": dict(family="llama", config=dict(
        SMALL, hidden_size=36, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)),
    "llama_mqa": dict(family="llama", config=dict(SMALL, num_key_value_heads=1)),
    "llama_bias": dict(family="llama", config=dict(SMALL, attention_bias=True, mlp_bias=True)),
    "llama_rope_theta": dict(family="llama", config=dict(
        SMALL, rope_parameters=dict(rope_type="default", rope_theta=500000.0)),
        matters=dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
    "llama_rope_linear": dict(family="llama", config=dict(
        SMALL, rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=10000.0)),
        matters=dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
    # 8 frequencies: 2 kept, 1 or 2 between, the rest divided by 8.
    "llama_rope_llama3": dict(family="llama", ends=[2, 5, 7], config=dict(
        SMALL, head_dim=16, tie_word_embeddings=True, rope_parameters=dict(LLAMA3_ROPE, rope_theta=10000.0)),
        matters=dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
    "llama_new_spelling": dict(family="llama", spelling="new", config=dict(
        SMALL, head_dim=16, rope_parameters=dict(LLAMA3_ROPE, rope_theta=20000.0)),
        matters=dict(rope_parameters=dict(LLAMA3_ROPE, rope_theta=10000.0))),
    "llama_f16": dict(family="llama", dtype=torch.float16, config=dict(
        SMALL, hidden_size=64, num_attention_heads=8, num_key_value_heads=1)),
    "llama_bf16": dict(family="llama", dtype=torch.bfloat16, config=dict(
        SMALL, hidden_size=64, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True)),
    # The config ties, the file stores a head that differs: Transformers 5 believes the file.
    "llama_tied_with_head": dict(family="llama", stored_head=True, dtype=torch.bfloat16, config=dict(
        SMALL, tie_word_embeddings=True)),
    "llama_sharded": dict(family="llama", dtype=torch.bfloat16, shard="16KB", config=dict(SMALL, vocab_size=96)),
    "mistral_window": dict(family="mistral", config=dict(SMALL, sliding_window=8), matters=dict(sliding_window=9)),
    "mistral_no_window": dict(family="mistral", spelling="new", config=dict(SMALL, sliding_window=None, head_dim=16)),
    "qwen2_14_on_2": dict(family="qwen2", ends=[0, 1], config=dict(
        SMALL, hidden_size=56, num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
        sliding_window=8, max_window_layers=0, rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
    "qwen2_window": dict(family="qwen2", config=dict(
        SMALL, num_hidden_layers=3, use_sliding_window=True, sliding_window=6, max_window_layers=1),
        matters=dict(sliding_window=7)),
    "qwen3": dict(family="qwen3", config=dict(
        SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
    "qwen3_layer_types": dict(family="qwen3", spelling="new", dtype=torch.bfloat16, config=dict(
        SMALL, num_hidden_layers=3, head_dim=16, use_sliding_window=True, sliding_window=5, attention_bias=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
        matters=dict(layer_types=["sliding_attention", "sliding_attention", "full_attention"])),
    # Layers of several kinds: the prompt is longer than the window, and long enough for what lies behind it to tell.
    "qwen2_window_16": dict(family="qwen2", spelling="new", prompt=48, config=dict(
        SMALLER, use_sliding_window=True, sliding_window=16,
        layer_types=["full_attention", "sliding_attention", "full_attention"]), matters=dict(sliding_window=17)),
    "qwen3_window_40": dict(family="qwen3", spelling="new", prompt=72, dtype=torch.bfloat16, config=dict(
        SMALL, num_hidden_layers=3, head_dim=16, use_sliding_window=True, sliding_window=40,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"]), matters=dict(sliding_window=41)),
    "gemma3": dict(family="gemma3", config=dict(
        GEMMA, num_hidden_layers=4, head_dim=8, query_pre_attn_scalar=24, sliding_window_pattern=2,
        rope_parameters=two_ropes(rope_type="linear", factor=8.0)),
        matters=[dict(sliding_window=8), dict(query_pre_attn_scalar=8), dict(rope_parameters=two_ropes()),
                 dict(rope_parameters=two_ropes(local=1e6, rope_type="linear", factor=8.0))]),
    "gemma3_vision": dict(family="gemma3_vision", spelling="new", dtype=torch.bfloat16, config=dict(
        text_config=dict(GEMMA, head_dim=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                         rope_parameters=two_ropes()),
        vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                           image_size=8, patch_size=4, vision_use_head=False), mm_tokens_per_image=1)),
    # Of seven layers the last three read the rows of an earlier one: 4 and 5 of layer 2, and 6 of layer 3.
    "gemma4_shared": dict(family="gemma4", spelling="new", dtype=torch.bfloat16, config=dict(
        GEMMA, hidden_size=16, intermediate_size=24, num_hidden_layers=7, head_dim=8, hidden_size_per_layer_input=0,
        layer_types=[f"{word}_attention" for word in "sliding full sliding full sliding sliding full".split()],
        per_layer_config={layer: dict(head_dim=16, num_key_value_heads=1) for layer in (1, 3, 6)},
        rope_parameters=two_ropes(rope_type="proportional", partial_rotary_factor=0.25), num_kv_shared_layers=3),
        matters=[dict(sliding_window=8), dict(rope_parameters=two_ropes())]),
    # The full layer turns nothing: its theta is 0. Each head has a learned sink.
    "granite_swa": dict(family="granite_swa", spelling="new", config=dict(
        SMALLER, num_hidden_layers=4, sliding_window=7, layer_rope_theta=[0, 10000.0, 500.0, 10000.0],
        embedding_multiplier=3.0, attention_multiplier=0.25),
        matters=[dict(sliding_window=8), dict(attention_multiplier=1.0), dict(embedding_multiplier=1.0),
                 dict(layer_rope_theta=[10000.0, 10000.0, 500.0, 10000.0]),
                 dict(layer_rope_theta=[0, 10000.0, 10000.0, 10000.0])]),
    # Layers 1 and 3 turn nothing: every second one, or those of a list.
    "smollm3": dict(family="smollm3", greedy=60, drop=["no_rope_layers"], config=dict(TINY, no_rope_layer_interval=2),
                    matters=[dict(no_rope_layer_interval=4), dict(no_rope_layer_interval=9)]),
    "smollm3_list": dict(family="smollm3", greedy=60, spelling="new", config=dict(
        TINY, no_rope_layers=[0, 1, 1, 0], tie_word_embeddings=False),
        matters=[dict(no_rope_layers=[1, 1, 1, 0]), dict(no_rope_layers=[0, 1, 1, 1])]),
    "granite": dict(family="granite", greedy=60, config=dict(
        TINY, **GRANITE, attention_bias=True, mlp_bias=True),
        matters=[*({key: 1.0} for key in GRANITE), weights("o_proj.bias", 0), weights("down_proj.bias", 0)]),
    # Granite 4 without experts: its MLP is the one that all tokens share.
    "granite4": dict(family="granite4", greedy=60, spelling="new", config=dict(
        TINY, **GRANITE, num_local_experts=0, shared_intermediate_size=40, position_embedding_type="rope",
        mamba_n_heads=4, layer_types=["full_attention"] * TINY["num_hidden_layers"]),
        matters=[dict(position_embedding_type=None), dict(residual_multiplier=1.0)]),
    "granite_swa_scaled": dict(family="granite_swa", greedy=60, spelling="new", config=dict(
        TINY, **GRANITE, sliding_window=7, tie_word_embeddings=False, layer_rope_theta=[0, 10000.0, 500.0, 10000.0]),
        matters=[dict(sliding_window=8), *({key: 1.0} for key in GRANITE)]),
    # Of 8 numbers of a head 6 are turned, of 16 in the others 12.
    "phi3": dict(family="phi3", greedy=60, config=dict(
        PHI, num_attention_heads=4, num_key_value_heads=2, sliding_window=7, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.75)),
        matters=[dict(sliding_window=8), dict(rope_parameters=dict(
            rope_type="default", rope_theta=100.0, partial_rotary_factor=1.0))]),
    # The prompt alone is longer than the context of old: Transformers then takes the long factors for all positions.
    "phi3_longrope_long": dict(family="phi3", greedy=60, prompt=48, config=dict(
        PHI, tie_word_embeddings=True, original_max_position_embeddings=40, rope_parameters=longrope(40)),
        matters=[dict(original_max_position_embeddings=127, max_position_embeddings=128 * 4),
                 dict(max_position_embeddings=40), dict(rope_parameters=longrope(40, 16))]),
    "phi3_longrope_short": dict(family="phi3", greedy=60, spelling="new", config=dict(
        PHI, max_position_embeddings=512, original_max_position_embeddings=128, rope_parameters=longrope(128)),
        matters=[dict(original_max_position_embeddings=32), dict(max_position_embeddings=128),
                 dict(rope_parameters=longrope(128, short_factor=[1.0] * 6))]),
    # A head's numbers share one norm with those of the other heads; the layers begin without one.
    "olmo2": dict(family="olmo2", greedy=60, config=dict(TINY, rms_norm_eps=1e-2), matters=[
        dict(rms_norm_eps=1e-6), weights("q_norm", 1), weights("k_norm", 1)]),
    # Of eight frequencies the first is kept, one lies between. Queries grow at positions 16, 32, 48 and so on.
    "ministral3": dict(family="ministral3", greedy=60, spelling="new", config=dict(
        PHI, head_dim=16, rope_parameters=MINISTRAL_ROPE), matters=[
            dict(rope_parameters=dict(MINISTRAL_ROPE, llama_4_scaling_beta=0.0)),
            dict(rope_parameters=dict(MINISTRAL_ROPE, mscale=2.0)),
            dict(rope_parameters=dict(MINISTRAL_ROPE, original_max_position_embeddings=128))]),
    "ministral3_vision": dict(family="mistral3_vision", greedy=60, spelling="new", dtype=torch.bfloat16, config=dict(
        text_config=dict(PHI, model_type="ministral3", head_dim=16, rope_parameters=MINISTRAL_ROPE),
        vision_config=PIXTRAL)),
    "mistral3_vision": dict(family="mistral3_vision", greedy=60, dtype=torch.bfloat16, config=dict(
        text_config=dict(PHI, model_type="mistral", head_dim=16, sliding_window=None, tie_word_embeddings=False,
                         rope_parameters=dict(rope_type="default", rope_theta=1e9)),
        vision_config=PIXTRAL, tie_word_embeddings=False)),
    "qwen2_yarn": dict(family="qwen2", greedy=60, config=dict(PHI, rope_parameters=QWEN2_YARN), matters=[
        dict(rope_parameters=dict(QWEN2_YARN, attention_factor=1.0)),
        dict(rope_parameters=dict(QWEN2_YARN, original_max_position_embeddings=128)),
        dict(rope_parameters=dict(QWEN2_YARN, factor=1.0, attention_factor=1.1386))]),
    "qwen3_yarn_plain": dict(family="qwen3", greedy=60, spelling="new", config=dict(
        PHI, head_dim=16, tie_word_embeddings=True, rope_parameters=QWEN3_YARN), matters=[
            {"rope_parameters": {**QWEN3_YARN, **change}} for change in (
                dict(truncate=True), dict(beta_fast=32.0), dict(beta_slow=1.0), dict(attention_factor=None))]),
    # The last two layers read the rows of layers 0 and 1 and have a wider MLP. Every layer has an embedding of its own.
    # Epsilon is large, so that a factor that is missing before a norm tells.
    "gemma4": dict(family="gemma4", greedy=60, spelling="gemma4", config=dict(
        GEMMA4, num_hidden_layers=5, layer_types=kinds("sliding full sliding sliding full"), num_kv_shared_layers=2,
        hidden_size_per_layer_input=8, use_double_wide_mlp=True, final_logit_softcapping=3.0,
        rope_parameters=two_ropes(rope_type="proportional", partial_rotary_factor=0.25)),
        matters=[dict(final_logit_softcapping=None), dict(sliding_window=8), dict(rope_parameters=two_ropes()),
                 dict(rms_norm_eps=1e-6), weights("layer_scalar", 1), weights("embed_tokens_per_layer", 0),
                 weights("per_layer_model_projection", 0), weights("per_layer_projection.", 0),
                 weights("4.mlp.down_proj", 0, np.s_[:, 16:])]),
    "gemma4_vision": dict(family="gemma4_vision", greedy=60, spelling="gemma4", dtype=torch.bfloat16, config=dict(
        text_config=dict(
            GEMMA4, num_hidden_layers=5, layer_types=kinds("sliding full sliding sliding full"),
            num_kv_shared_layers=2, hidden_size_per_layer_input=8, use_double_wide_mlp=True,
            final_logit_softcapping=3.0, pad_token_id=0,
            rope_parameters=two_ropes(rope_type="proportional", partial_rotary_factor=0.25)),
        vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                           num_key_value_heads=1, head_dim=8, patch_size=2, position_embedding_size=4,
                           use_clipped_linears=True),
        audio_config=dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, output_proj_dims=8,
                          subsampling_conv_channels=[4, 4]))),
    # Full layers have no value projection: values are the keys before their norm.
    "gemma4_k_eq_v": dict(family="gemma4", greedy=60, spelling="gemma4", dtype=torch.bfloat16, config=dict(
        GEMMA4, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, final_logit_softcapping=3.0,
        layer_types=kinds("sliding full sliding full"),
        rope_parameters=two_ropes(rope_type="proportional", partial_rotary_factor=0.25)),
        matters=[dict(sliding_window=8), weights("1.self_attn.k_norm", 1), weights("layer_scalar", 1)]),
    # 40 become 32: two thirds, times 1.2, up to a multiple of 8.
    "lfm2": dict(family="lfm2", greedy=60, config=dict(
        TINY, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=1, intermediate_size=40,
        layer_types=kinds("conv full conv full conv"), block_ffn_dim_multiplier=1.2, block_multiple_of=8,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
        matters=[weights(f"{layer}.conv.conv.weight", 0, np.s_[..., tap]) for layer in (0, 4) for tap in range(3)]),
    "lfm2_bias": dict(family="lfm2", greedy=60, dtype=torch.bfloat16, drop=["intermediate_size", "tie_word_embeddings"],
        write=dict(block_ff_dim=24, tie_embedding=False), config=dict(
        TINY, num_hidden_layers=5, full_attn_idxs=[1, 3], conv_bias=True, conv_L_cache=4,
        block_auto_adjust_ff_dim=False, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
        matters=[*(weights("conv.conv.weight", 0, np.s_[..., tap]) for tap in range(4)),
                 *(weights(f"conv.{part}.bias", 0) for part in ("conv", "in_proj", "out_proj"))]),
    **{f"head_dim_{dim}": dict(family="llama", config=dict(WIDE_HEAD, head_dim=dim)) for dim in (64, 80, 96, 128, 256)},
}


def adds_one(model, name):
    """Whether it is a norm that multiplies with 1 + w."""
    return type(model).__name__.startswith("Gemma3") and "norm" in name


def fill(model, seed):
    """Random weights: matrices keep the scale of what passes through them, norms lie around 1. A tied embedding is
    small, or the head would see in every position little more than the token that stands there, and repeat it."""
    generator = torch.Generator().manual_seed(seed)
    scalars = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *scalars]:
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("bias"):
                weight.copy_(0.5 * noise)
            elif name.endswith("sinks"):
                weight.copy_(2 + noise)
            elif adds_one(model, name):
                weight.copy_(0.25 * noise)
            elif weight.dim() == 1:  # Gemma 4 does not divide its scores by sqrt(D): there they come small from q and k
                small = type(model).__name__.startswith("Gemma4") and name.endswith(("q_norm.weight", "k_norm.weight"))
                weight.copy_((0.4 if small else 1) * (1 + 0.25 * noise))
            elif "embed_tokens_per_layer" in name:
                weight.copy_(noise * 0.35)
            elif "embed_tokens" in name:
                tied = model.config.tie_word_embeddings  # of a model with vision the whole, not the text model, says it
                scaled = hasattr(model.get_input_embeddings(), "embed_scale")
                weight.copy_(noise * (0.12 if scaled else 0.25 if tied else 1))
            else:  # a convolution over positions makes one number of its taps, which are last
                weight.copy_(noise * 1.2 / weight.shape[-1 if weight.dim() == 3 else 1] ** 0.5)


def old_spelling(path):
    """Rewrites a config.json as Transformers 4 wrote it: rope_theta, rope_scaling and torch_dtype."""
    whole = json.loads(path.read_text())
    config = whole.get("text_config", whole)
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if rope["rope_type"] in ("linear", "longrope") and "rope_local_base_freq" not in config:
        rope["type"] = rope.pop("rope_type")
    if "original_max_position_embeddings" in config:
        rope.pop("original_max_position_embeddings", None)
    whole["torch_dtype"] = whole.pop("dtype")
    if config["model_type"] != "lfm2" or config["full_attn_idxs"]:
        config.pop("layer_types", None)
    path.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")


def gemma4_spelling(path):
    """Rewrites a config.json as those are that Google released: two keys instead of an entry per layer."""
    whole = json.loads(path.read_text())
    config = whole.get("text_config", whole)
    layer = config.pop("per_layer_config")[str(config["layer_types"].index("full_attention"))]
    config["global_head_dim"] = layer["head_dim"]
    config["num_global_key_value_heads"] = layer.get("num_key_value_heads")
    path.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")


def rewrite(path, case):
    """The config.json of a case, from the one that Transformers wrote."""
    spelling = dict(old=old_spelling, gemma4=gemma4_spelling, new=lambda path: None)
    spelling[case.get("spelling", "old")](path)
    if "drop" in case or "write" in case:
        config = {key: value for key, value in json.loads(path.read_text()).items() if key not in case.get("drop", [])}
        path.write_text(json.dumps({**config, **case.get("write", {})}, indent=2, sort_keys=True) + "\n")


def logits_of(model, ids):
    # Without output_hidden_states, 5.24 cannot compute shared layers that have no embeddings of their own.
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).logits[0].float()


def auto(config):
    return AutoModelForImageTextToText if config.model_type == "mistral3" else AutoModelForCausalLM


def load(directory):
    config = AutoConfig.from_pretrained(directory)
    return auto(config).from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def config_of(case, **changes):
    return FAMILIES[case["family"]](**copy.deepcopy({**case["config"], **changes}))  # which writes into what it gets


def try_seed(directory, case, seed):
    """Writes the checkpoint for one seed; returns (prompt, greedy, logits), or None where a step is too close."""
    ends = case.get("ends", 2)
    config = config_of(case, bos_token_id=1, eos_token_id=ends, pad_token_id=None)
    torch.manual_seed(seed)
    model = auto(config).from_config(config)
    fill(model, seed)
    model.to(case.get("dtype", torch.float32))
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = 1, ends
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory, max_shard_size=case.get("shard", "1GB"))
    if case.get("stored_head"):
        tensors = safetensors.torch.load_file(directory / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
        safetensors.torch.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    rewrite(directory / "config.json", case)

    model = load(directory)
    random = np.random.default_rng(seed)
    count = case.get("prompt", PROMPT)
    prompt = [1] + random.integers(8, config.get_text_config().vocab_size, count - 1).tolist()
    ids = list(prompt)
    for _ in range(case.get("greedy", GREEDY)):
        best = torch.topk(logits_of(model, ids)[-1], 2)
        if best.values[0] - best.values[1] < GAP:
            return None
        ids.append(int(best.indices[0]))
    greedy = ids[count:]
    if len(set(greedy)) < (6 if len(greedy) == GREEDY else 10) or set(greedy) & set(np.atleast_1d(ends).tolist()):
        return None
    logits = logits_of(model, ids[:-1])
    return (prompt, greedy, logits) if len(greedy) == GREEDY or steady(model, ids[:-1], logits) else None


def steady(model, ids, logits):
    """Whether rounding stays small: the longer a run, the likelier a position where almost all cancels."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.mul_(1 + 6e-8 * torch.randn(embedding.shape, generator=generator))
    return float((logits_of(model, ids) - logits).abs().max()) < 1e-5


def probes(model):
    """[first, last, sum] of each tensor of the text model but those of layer 0: what a loader must find under each
    name, without the text model's prefix."""
    found = {}
    for name, weight in model.state_dict().items():
        if any(part in name for part in ("vision", "audio", "multi_modal")):
            continue
        if ".layers.0." not in name or model.config.get_text_config().num_hidden_layers == 1:
            numbers = 1 + weight.flatten() if adds_one(model, name) else weight.flatten()
            found[name.replace(".language_model.", ".")] = [float(numbers[0]), float(numbers[-1]),
                                                            float(numbers.double().sum())]
    return found


def check_matters(directory, case, ids, logits):
    """The reference itself, with the case's feature changed, must be far away: else the case tests nothing."""
    changes = case.get("matters", [])
    for matters in changes if isinstance(changes, list) else [changes]:
        keys = {key: value for key, value in matters.items() if key != "weights"}
        other = config_of(case, **keys, pad_token_id=None, attn_implementation="eager")
        model = auto(other).from_config(other).eval()
        state = load(directory).state_dict()
        if "weights" in matters:
            part, where, value = matters["weights"]
            for name in [name for name in state if part in name]:
                state[name][where] = value
        model.load_state_dict(state)
        change = float((logits_of(model, ids) - logits).norm() / logits.norm())
        assert change > 1e-2, f"{directory.name}: {matters} moves the logits by {change} only"


def make(directory, case):
    for seed in range(4000):
        found = try_seed(directory, case, seed)
        if found:
            break
    prompt, greedy, logits = found
    check_matters(directory, case, (prompt + greedy)[:-1], logits)
    np.save(directory / "expected_logits.npy", logits.numpy().astype(np.float32))
    expected = dict(prompt_ids=prompt, greedy_ids=greedy, weights=probes(load(directory)))
    (directory / "expected.json").write_text(json.dumps(expected) + "\n")
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{directory.name:20} seed {seed:3}  {size:7} bytes  logits {logits.std():.2f} wide  greedy {greedy[:8]}",
          flush=True)
    return size


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/fixtures/models"))
    parser.add_argument("--only", nargs="*", choices=list(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [make(arguments.out / name, CASES[name]) for name in arguments.only or CASES]
    print(f"{len(sizes)} checkpoints, {sum(sizes)} bytes")


if __name__ == "__main__":
    main()
