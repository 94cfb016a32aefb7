#!/usr/bin/env python3
"""Attention in numpy, without and with a KV cache, on the weights of the built-in checkpoint: prints the tables of
chapters 1 to 3, as `llm show` does.   python3 docs/attention.py   (needs numpy: Debian's python3-numpy)"""
import json
import pathlib

import numpy as np

with open(pathlib.Path(__file__).parent / "../weights_tools/builtin/model.safetensors", "rb") as file:
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))  # the header's length, and the header
    numbers = (np.frombuffer(file.read(), "<u2").astype("<u4") << 16).view("<f4")  # bf16: half of a float32
D, theta, epsilon = 32, 1e6, 1e-5  # width of a head, RoPE, RMSNorm: from config.json
ids, texts = [0, 761, 762, 260, 488], ['""', '"Once"', '" upon"', '" a"', '" time"']  # from llm tokenize


def weight(name):
    begin, end = header[name]["data_offsets"]  # in bytes
    return numbers[begin // 2:end // 2].reshape(header[name]["shape"])


def attend(q, K, V):  # q (D), K and V (positions, D)
    scores = K @ q / np.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    weights = weights / weights.sum()
    return scores, weights, weights @ V


def norm(x, w):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * w


def rotate(x, position):  # x (tokens, heads, D), position (tokens); a pair (a, b) as the complex number a + bi
    angle = position[:, None, None] * theta ** (-2 * np.arange(D // 2) / D)
    pairs = (x[..., :D // 2] + 1j * x[..., D // 2:]) * np.exp(1j * angle)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


# cache: of each layer K and V of the tokens before (2, positions, KV heads, D); they grow. store: new rows as they are kept
def forward(ids, cache, store=np.array):
    position = np.arange(len(ids)) + (cache[0].shape[1] if cache else 0)
    x = weight("model.embed_tokens.weight")[ids].astype(float)
    for layer in range(3):  # of 4: the tables are of head 4 in layer 2. 4 query heads read a KV head
        w = {name.split(".")[-2]: weight(name) for name in header if name.startswith(f"model.layers.{layer}.")}
        n = norm(x, w["input_layernorm"])
        q, k, v = ((n @ w[name].T).reshape(len(ids), -1, D) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = rotate(q, position), rotate(k, position)
        K, V = cache[layer] = np.append(cache.get(layer, np.zeros((2, 0, 2, D))), store([k, v]), axis=1)
        o = [attend(q[t, h], K[:p + 1, h // 4], V[:p + 1, h // 4])[2] for t, p in enumerate(position) for h in range(8)]
        x = x + np.reshape(o, x.shape) @ w["o_proj"].T
        n = norm(x, w["post_attention_layernorm"])
        gate, up = n @ w["gate_proj"].T, n @ w["up_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down_proj"].T
    return q[-1, 4], K[:, 1], V[:, 1]


def table(chapter, q, K, V):
    scores, weights, output = attend(q, K, V)
    row = lambda *numbers: "".join(f" {number:8.4f}" for number in numbers)
    print(f"chapter {chapter}\nquery   {row(*q[:8])}  .. ({D})")
    for t, weight in enumerate(weights):
        print(f"{t:8}  {texts[t]:12}{row(*K[t, :2], *V[t, :2])} {row(scores[t], weight)}  {'#' * round(24 * weight)}")
    print(f"output  {row(*output[:8])}  .. ({D})")


if __name__ == "__main__":
    table(1, *forward(ids[:4], {}))     # naive: all tokens so far
    table(2, *forward(ids, {}))         # and all of them again
    cache = {}
    forward(ids[:4], cache)             # prefill
    table(3, *forward(ids[4:], cache))  # decode: one token, and the rows of the others
