#!/usr/bin/env python3
"""Writes tests/fixtures/sinks: a small random Qwen2 checkpoint whose heads look mostly at the first token.

    python3 weights_tools/make_sinks.py [--out tests/fixtures/sinks] [--seed 0] [--share 0.95]

Needs torch and transformers (made with 5.23). Every text begins with id 1, which stands nowhere else. Hidden channel 0
is that token's own: only its embedding has anything there, and no layer writes to it. Each k_proj reads it into one
channel of the slowest RoPE pair, where each q_proj has a bias; no v_proj reads it. So the score of the first token is
the same for every query, its value is next to nothing, and o_proj is scaled up to make the rest of attention count.
docs/sinks.md says what happens when the first token leaves the window.

The rest of a score is where and what: biases of q_proj and k_proj in a few pairs of RoPE give LOCAL times a sum of
cosines of the distance, which is largest at 0; random weights in the other pairs give a standard deviation of CONTENT.

Prompts are given as ids (llm diff -m DIR --ids 1,17,...): there is no tokenizer.
"""
import argparse
import math
import pathlib

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from make_huge_keys import write

BOS, MASSIVE = 1, 64.0  # the first token; its embedding's hidden channel 0; others 0.01, other tokens' 1
SINK_KEY = 20.0         # its key in channel SINK_CHANNEL
SINK_CHANNEL = 31       # pairs are (i, i + 16): pair 15, the slowest, turns by 0.0000024 radians a position
LOCAL, LOCAL_PAIRS = 2.0, (2, 3, 4, 5, 6)  # 0.18 to 0.0056 radians a position
CONTENT = 1.0
CONFIG = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              head_dim=32, vocab_size=128, max_position_embeddings=4096, bos_token_id=BOS, eos_token_id=2,
              rope_parameters=dict(rope_type="default", rope_theta=1000000.0), tie_word_embeddings=False)
WIDTH, HALF = CONFIG["head_dim"], CONFIG["head_dim"] // 2


def sink_score(share):
    """Score that gives the first token this share, if the others' are local(distance) + CONTENT * a normal number."""
    distances = torch.arange(1024)
    local = sum(LOCAL * torch.cos(distances * 1e6 ** (-pair / HALF)) for pair in LOCAL_PAIRS)
    return torch.logsumexp(local, 0).item() + CONTENT ** 2 / 2 + math.log(share / (1 - share))


def fill(model, share, seed):
    """Random weights, scaled by the width that they read, so that vectors keep their size from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    named = [channel for pair in (*LOCAL_PAIRS, HALF - 1) for channel in (pair, pair + HALF)]  # no content here
    content = (CONTENT * (WIDTH / (WIDTH - len(named))) ** 0.5) ** 0.5
    gains = {"q_proj": content, "k_proj": content, "o_proj": 2.0 / (1 - share), "lm_head": 2.5}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                weight.copy_(torch.zeros_like(noise) if name.endswith("bias") else 1 + 0.25 * noise)
                if "norm" in name:
                    weight[0] = 1
            elif "embed_tokens" in name:
                weight.copy_(noise)
                weight[:, 0] = 0
                weight[BOS] *= 0.01
                weight[BOS, 0] = MASSIVE
            else:
                gain = next((gain for part, gain in gains.items() if part in name), 1.0)
                weight.copy_(gain * noise / weight.shape[1] ** 0.5)
        model.lm_head.weight[BOS] = 0  # rarely predicted
        for layer in model.model.layers:
            attention = layer.self_attn
            mlp = layer.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                linear.weight[:, 0] = 0
            for linear in (attention.o_proj, mlp.down_proj):
                linear.weight[0] = 0
            where = (LOCAL * WIDTH ** 0.5) ** 0.5
            for linear in (attention.q_proj, attention.k_proj):
                linear.weight.view(-1, WIDTH, CONFIG["hidden_size"])[:, named] = 0
                linear.bias.view(-1, WIDTH)[:, LOCAL_PAIRS] = where
            normed = CONFIG["hidden_size"] ** 0.5  # the first token's hidden channel 0 behind RMSNorm
            of_first = attention.k_proj.weight.view(-1, WIDTH, CONFIG["hidden_size"])[:, :, 0]
            of_first[:, SINK_CHANNEL] = SINK_KEY / normed
            of_first[:, LOCAL_PAIRS] = -where / normed  # its score is the same at every distance
            attention.q_proj.bias.view(-1, WIDTH)[:, SINK_CHANNEL] = sink_score(share) * WIDTH ** 0.5 / SINK_KEY


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/fixtures/sinks"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.95, help="of attention that the first token is to get")
    arguments = parser.parse_args()
    model = Qwen2ForCausalLM(Qwen2Config(**CONFIG))
    fill(model, arguments.share, arguments.seed)
    size = write(model, arguments.out)
    print(f"{arguments.out}: {size} bytes, the first token's score is {sink_score(arguments.share):.1f}")


if __name__ == "__main__":
    main()
