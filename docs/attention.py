#!/usr/bin/env python3
"""Attention in numpy, without and with a KV cache, on the weights of the built-in checkpoint: prints the tables of
chapters 1 to 3, as `llm show` does.   python3 docs/attention.py   (needs numpy: Debian's python3-numpy)"""
import json
import pathlib

import numpy as np

file = (pathlib.Path(__file__).resolve().parent.parent / "weights_tools/builtin/model.safetensors").read_bytes()
start = 8 + int.from_bytes(file[:8], "little")  # how long the header is, the header, the numbers
header = json.loads(file[8:start])
layers, heads, kv_heads, D, theta, epsilon = 4, 8, 2, 32, 1e6, 1e-5  # from config.json
ids, texts = [0, 761, 762, 260, 488], ['""', '"Once"', '" upon"', '" a"', '" time"']  # from llm tokenize


def weight(name):  # a bf16 number is the upper half of a float32
    begin, end = header[name]["data_offsets"]
    halves = np.frombuffer(file[start + begin:start + end], "<u2")
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(header[name]["shape"])


def attend(q, K, V):  # q (D), K and V (positions, D)
    scores = K @ q / np.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    weights = weights / weights.sum()
    return scores, weights, weights @ V


def norm(x, w):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * w


def rotate(x, position):  # x (tokens, heads, D), position (tokens)
    angle = position[:, None, None] * theta ** (-2 * np.arange(D // 2) / D)
    a, b = x[..., :D // 2], x[..., D // 2:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def forward(ids, cache):  # cache: of each layer K and V of the tokens before, (positions, KV heads, D); they grow
    before, count = len(cache[0][0]), len(ids)
    x = weight("model.embed_tokens.weight")[ids].astype(float)
    for layer in range(layers):
        w = {name.split(".")[-2]: weight(name) for name in header if name.startswith(f"model.layers.{layer}.")}
        n = norm(x, w["input_layernorm"])
        q, k, v = ((n @ w[name].T).reshape(count, -1, D) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = (rotate(vectors, before + np.arange(count)) for vectors in (q, k))
        K, V = cache[layer] = [np.concatenate([old, new]) for old, new in zip(cache[layer], (k, v))]
        o = [[attend(q[t, h], K[:before + t + 1, h // 4], V[:before + t + 1, h // 4])[2] for h in range(heads)]
             for t in range(count)]  # 4 query heads read a KV head
        x = x + np.reshape(o, (count, -1)) @ w["o_proj"].T
        n = norm(x, w["post_attention_layernorm"])
        gate, up = n @ w["gate_proj"].T, n @ w["up_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down_proj"].T
        if layer == 2: shown = q[-1, 4], K[:, 1], V[:, 1]
    return shown


def table(chapter, q, K, V):
    scores, weights, output = attend(q, K, V)
    numbers = lambda vector: "".join(f" {number:8.4f}" for number in vector)
    print(f"chapter {chapter}\nquery   {numbers(q[:8])}  .. ({D})")
    for t, text in enumerate(texts[:len(K)]):
        print(f"{t:8}  {text:12}{numbers(K[t, :2])}{numbers(V[t, :2])}{scores[t]:10.4f}{weights[t]:9.4f}  "
              + "#" * round(24 * weights[t]))
    print(f"output  {numbers(output[:8])}  .. ({D})")


empty = [(np.zeros((0, kv_heads, D)),) * 2] * layers
table(1, *forward(ids[:4], list(empty)))  # naive: all tokens so far
table(2, *forward(ids, list(empty)))      # and all of them again
cache = list(empty)
forward(ids[:4], cache)                   # prefill
table(3, *forward(ids[4:], cache))        # decode: one token, and the rows of the others
