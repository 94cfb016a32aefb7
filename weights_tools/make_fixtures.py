#!/usr/bin/env python3
"""Writes tests/fixtures/models: tiny random checkpoints, one per family and special case, with Transformers' answers.

    python3 weights_tools/make_fixtures.py [--out tests/fixtures/models] [--only NAME ...]

Needs torch and transformers (made with 5.23, from qwen2_window_16 on with 5.24). Each directory is laid out as a
downloaded checkpoint (config.json, generation_config.json, model.safetensors or shards with an index; no tokenizer:
prompts are ids) and holds

    expected.json        prompt_ids (P of them), greedy_ids (the next 16 by argmax), weights: first value, last value
                         and sum of every tensor (after layer 0, which has the same names); of norms by 1 + w, of that
    expected_logits.npy  float32 (P + 15, vocabulary): the logits behind each of prompt_ids + greedy_ids[:15]

computed by Transformers, loaded back from that very directory, in float32 with eager attention and no cache. Weights
stored as f16 or bf16 are rounded first and widened for the computation, so the reference sees what the engine sees.

Random weights are made so that a wrong engine shows: logits are lively, norms are not 1 and biases not 0, the two
best logits of a greedy step lie more than GAP apart, and what a case is there for (`matters`) moves the logits.
"""
import argparse
import json
import pathlib
import shutil

import numpy as np
import safetensors.torch
import torch
from transformers import (AutoModelForCausalLM, Gemma3Config, Gemma3TextConfig, Gemma4TextConfig, GraniteSWAConfig,
                          LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)

PROMPT, GREEDY = 32, 16
GAP = 1e-2  # between the best and the second logit of every greedy step: 100 times what float32 may move one
FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config,
            "gemma3": Gemma3TextConfig, "gemma3_vision": Gemma3Config, "gemma4": Gemma4TextConfig,
            "granite_swa": GraniteSWAConfig}

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


def two_ropes(theta=1e6, local=1e4, **scaling):
    return dict(full_attention=dict(dict(rope_type="default"), rope_theta=theta, **scaling),
                sliding_attention=dict(rope_type="default", rope_theta=local))


# Per case: the family, the config, how it is stored (dtype, old or new spelling, shards), end ids where there are
# several, the length of the prompt, and `matters`: a change of the config, or several, after each of which the same
# weights must give other logits.
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
            elif "embed_tokens" in name:
                tied = model.config.get_text_config().tie_word_embeddings
                scaled = hasattr(model.get_input_embeddings(), "embed_scale")
                weight.copy_(noise * (0.12 if scaled else 0.25 if tied else 1))
            else:
                weight.copy_(noise * 1.2 / weight.shape[1] ** 0.5)


def old_spelling(path):
    """Rewrites a config.json as Transformers 4 wrote it: rope_theta, rope_scaling and torch_dtype."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if rope["rope_type"] == "linear" and "rope_local_base_freq" not in config:
        rope["type"] = rope.pop("rope_type")
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def logits_of(model, ids):
    # Without output_hidden_states, 5.24 cannot compute shared layers that have no embeddings of their own.
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).logits[0].float()


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def try_seed(directory, case, seed):
    """Writes the checkpoint for one seed; returns (prompt, greedy, logits), or None where a step is too close."""
    ends = case.get("ends", 2)
    config = FAMILIES[case["family"]](**case["config"], bos_token_id=1, eos_token_id=ends, pad_token_id=None)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    fill(model, seed)
    model.to(case.get("dtype", torch.float32))
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = 1, ends
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory, max_shard_size=case.get("shard", "1GB"))
    if case.get("stored_head"):
        tensors = safetensors.torch.load_file(directory / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
        safetensors.torch.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if case.get("spelling", "old") == "old":
        old_spelling(directory / "config.json")

    model = load(directory)
    random = np.random.default_rng(seed)
    count = case.get("prompt", PROMPT)
    prompt = [1] + random.integers(8, config.get_text_config().vocab_size, count - 1).tolist()
    ids = list(prompt)
    for _ in range(GREEDY):
        best = torch.topk(logits_of(model, ids)[-1], 2)
        if best.values[0] - best.values[1] < GAP:
            return None
        ids.append(int(best.indices[0]))
    greedy = ids[count:]
    if len(set(greedy)) < 6 or set(greedy) & set(np.atleast_1d(ends).tolist()):
        return None
    return prompt, greedy, logits_of(model, ids[:-1])


def probes(model):
    """[first, last, sum] of each tensor of the text model but those of layer 0: what a loader must find under each
    name, without the text model's prefix."""
    found = {}
    for name, weight in model.state_dict().items():
        if "vision" in name or "multi_modal" in name:
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
        other = FAMILIES[case["family"]](**{**case["config"], **matters}, attn_implementation="eager")
        model = AutoModelForCausalLM.from_config(other).eval()
        model.load_state_dict(load(directory).state_dict())
        change = float((logits_of(model, ids) - logits).norm() / logits.norm())
        assert change > 1e-2, f"{directory.name}: {matters} moves the logits by {change} only"


def make(directory, case):
    for seed in range(1000):
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
