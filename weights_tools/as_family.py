#!/usr/bin/env python3
"""Writes a random Llama once more as a model of another family, of the same shape: to compare what families cost.

    python3 weights_tools/make_random.py smollm2-135m A
    python3 weights_tools/as_family.py A lfm2 A-lfm2
    ./llm generate -m A-lfm2 --ids 1,2,3 -n 100 --ignore-eos

Needs torch and safetensors. Matrices are the Llama's where the family has the same; what it has besides is random. The
text means nothing in either.
"""
import argparse
import json
import pathlib

import safetensors.torch
import torch

FAMILIES = {"phi3": "Phi3", "olmo2": "Olmo2", "granite": "Granite", "smollm3": "SmolLM3", "ministral3": "Ministral3",
            "qwen2": "Qwen2", "gemma4": "Gemma4", "lfm2": "Lfm2"}
PER_LAYER = 64  # numbers of a token's second embedding in Gemma 4


def random(*shape):
    return (torch.randn(shape) * 0.02).bfloat16()


def ones(width):
    return torch.ones(width, dtype=torch.bfloat16)


def convert(family, config, tensors):
    """Changes both. A head's width is hidden / heads."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    width = hidden // config["num_attention_heads"]
    kv = width * config["num_key_value_heads"]
    config["head_dim"] = width
    for i in range(layers):
        layer = f"model.layers.{i}."
        attention, mlp = layer + "self_attn.", layer + "mlp."

        def join(names, to):
            tensors[to] = torch.cat([tensors.pop(name) for name in names])

        if family == "phi3":
            join([f"{attention}{part}_proj.weight" for part in "qkv"], attention + "qkv_proj.weight")
            join([mlp + "gate_proj.weight", mlp + "up_proj.weight"], mlp + "gate_up_proj.weight")
        if family == "olmo2":
            tensors[layer + "post_feedforward_layernorm.weight"] = tensors.pop(layer + "input_layernorm.weight")
            tensors[attention + "q_norm.weight"], tensors[attention + "k_norm.weight"] = ones(hidden), ones(kv)
        if family == "qwen2":
            for part, rows in ("q", hidden), ("k", kv), ("v", kv):
                tensors[f"{attention}{part}_proj.bias"] = random(rows)
        if family == "gemma4":
            for name in "pre_feedforward_layernorm", "post_feedforward_layernorm", "post_per_layer_input_norm":
                tensors[f"{layer}{name}.weight"] = ones(hidden)
            tensors[layer + "layer_scalar"] = ones(1)
            tensors[attention + "q_norm.weight"], tensors[attention + "k_norm.weight"] = ones(width), ones(width)
            tensors[layer + "per_layer_input_gate.weight"] = random(PER_LAYER, hidden)
            tensors[layer + "per_layer_projection.weight"] = random(hidden, PER_LAYER)
        if family == "lfm2" and i % 3 == 2:
            for part in "qk":
                tensors[f"{attention}{part}_layernorm.weight"] = ones(width)
        elif family == "lfm2":
            for part in "qkvo":
                del tensors[f"{attention}{part}_proj.weight"]
            tensors[layer + "conv.in_proj.weight"] = random(3 * hidden, hidden)
            tensors[layer + "conv.conv.weight"] = random(hidden, 1, 3)
            tensors[layer + "conv.out_proj.weight"] = random(hidden, hidden)

    changes = dict(
        phi3=dict(partial_rotary_factor=0.75), olmo2={}, smollm3={},
        granite=dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.125,
                     logits_scaling=8.0),
        ministral3=dict(rope_scaling=None, rope_parameters=dict(
            rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=1024, mscale=1.0,
            mscale_all_dim=1.0, llama_4_scaling_beta=0.1)),
        qwen2=dict(rope_scaling=dict(rope_type="yarn", factor=4.0)),
        gemma4=dict(hidden_activation="gelu_pytorch_tanh", hidden_size_per_layer_input=PER_LAYER, global_head_dim=width,
                    vocab_size_per_layer_input=config["vocab_size"], final_logit_softcapping=30.0, sliding_window=512),
        lfm2=dict(layer_types=["full_attention" if i % 3 == 2 else "conv" for i in range(layers)], norm_eps=1e-5,
                  block_auto_adjust_ff_dim=False, conv_L_cache=3))
    config.update(changes[family])
    config["architectures"] = [FAMILIES[family] + "ForCausalLM"]
    config["model_type"] = "gemma4_text" if family == "gemma4" else family
    if family == "gemma4":
        del config["hidden_act"]
        tensors["model.embed_tokens_per_layer.weight"] = random(config["vocab_size"], layers * PER_LAYER)
        tensors["model.per_layer_model_projection.weight"] = random(layers * PER_LAYER, hidden)
        tensors["model.per_layer_projection_norm.weight"] = ones(PER_LAYER)
    names = (("input_layernorm", "operator_norm"), ("post_attention_layernorm", "ffn_norm"),
             ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"),
             ("mlp.down_proj", "feed_forward.w2"), ("o_proj", "out_proj"), ("model.norm", "model.embedding_norm"))
    for name in list(tensors) if family == "lfm2" else []:
        to = name
        for ours, theirs in names:
            to = to.replace(ours, theirs)
        tensors[to] = tensors.pop(name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama", type=pathlib.Path)
    parser.add_argument("family", choices=list(FAMILIES))
    parser.add_argument("out", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = json.loads((arguments.llama / "config.json").read_text())
    tensors = safetensors.torch.load_file(arguments.llama / "model.safetensors")
    convert(arguments.family, config, tensors)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
                                arguments.out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
