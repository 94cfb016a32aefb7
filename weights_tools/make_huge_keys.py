#!/usr/bin/env python3
"""Writes tests/fixtures/huge_keys: a small random Qwen2 checkpoint whose first layer has huge keys in a few channels.

    python3 weights_tools/make_huge_keys.py [--out tests/fixtures/huge_keys] [--seed 0] [--norm 600]

Needs torch and transformers (made with 5.23). The k_proj bias of layer 0 has a norm of 600, as in Qwen2.5-7B, and
nearly all of it in three channels of each KV head. They lie in the slowest pairs of RoPE, where a rotated key is nearly
constant over a block of positions; docs/huge_keys.md says what happens in the fast ones. Everything else is drawn so
that the logits depend on attention: scores have a standard deviation of SHARPNESS, so that a query looks at a few
positions, and what attention brings is as large as what was there before.

Prompts are given as ids (llm diff -m DIR --ids 5,17,...): there is no tokenizer.
"""
import argparse
import json
import pathlib
import shutil

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

SHARPNESS = 2.0
HUGE = {31: 0.5, 60: -0.4, 27: 0.3}  # channel of each head: its share; pairs are (i, i + 32), 31 the slowest
CONFIG = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
              head_dim=64, vocab_size=128, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
              rope_parameters=dict(rope_type="default", rope_theta=1000000.0), tie_word_embeddings=False)


def fill(model, norm, seed):
    """Random weights, scaled by the width that they read, so that vectors keep their size from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    gains = {"q_proj": SHARPNESS ** 0.5, "k_proj": SHARPNESS ** 0.5, "o_proj": 1.5, "lm_head": 2.0}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                weight.copy_(0.5 * noise if name.endswith("bias") else 1 + 0.25 * noise)
            elif "embed_tokens" in name:
                weight.copy_(noise)
            else:
                gain = next((gain for part, gain in gains.items() if part in name), 1.0)
                weight.copy_(gain * noise / weight.shape[1] ** 0.5)
        bias = model.model.layers[0].self_attn.k_proj.bias
        shares = torch.zeros(CONFIG["num_key_value_heads"], CONFIG["head_dim"])
        for channel, share in HUGE.items():
            shares[:, channel] = share
        bias.add_(norm * shares.flatten() / shares.norm())


def old_spelling(path):
    """Rewrites a config.json as Transformers 4 wrote it, and as Qwen2.5 is published: rope_theta and torch_dtype."""
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write(model, directory):
    """Writes a checkpoint in bf16, in place of what the directory held, and returns its bytes."""
    shutil.rmtree(directory, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    old_spelling(directory / "config.json")
    return sum(file.stat().st_size for file in directory.iterdir())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/fixtures/huge_keys"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--norm", type=float, default=600.0, help="of the first layer's k_proj bias")
    arguments = parser.parse_args()
    model = Qwen2ForCausalLM(Qwen2Config(**CONFIG))
    fill(model, arguments.norm, arguments.seed)
    size = write(model, arguments.out)
    norms = [f"{layer.self_attn.k_proj.bias.float().norm():.0f}" for layer in model.model.layers]
    print(f"{arguments.out}: {size} bytes, norms of the k_proj biases: {', '.join(norms)}")


if __name__ == "__main__":
    main()
