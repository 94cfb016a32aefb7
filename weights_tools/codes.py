#!/usr/bin/env python3
"""What a cache's code does to a model, in numpy: the place where a code is tried before it is built.

    python3 codes.py                           the built-in model, tests/fixtures/huge_keys, tests/fixtures/sinks
    python3 codes.py -m DIR -f TEXT [-n 320]   a checkpoint of your own, the first tokens of a text
    --codes int4 'int4, fitted'                some codes; default: all. --from 0: positions that count, default 64

For each code: the KL divergence to the exact model, in nats, mean over the positions, and the share of positions with
the same likeliest token. The whole text is one pass, and each query reads the keys and values that the code gives back,
so the KL of int8, int4 and int2 is that of `llm eval` (--from 0). A code that the engine does not have is a function
here: write it, add it to CODES, and look at all the models.

Needs numpy, and ../llm for the ids of a text. Models: llama, qwen2 and qwen3 without scaled RoPE and without windows.
"""
import argparse
import json
import pathlib
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = 32  # positions, or channels, that share a scale in int4 and int2


def refuse(problem):
    print(f"codes.py: {problem}", file=sys.stderr)
    sys.exit(2)


# ---- The model -------------------------------------------------------------------------------------------------

class Model:
    """A checkpoint, and its forward pass over a whole text in float64."""

    def __init__(self, directory):
        if not (directory / "config.json").is_file():
            refuse(f"{directory / 'config.json'}: no such file")
        config = json.loads((directory / "config.json").read_text())
        kind, rope = config.get("model_type"), config.get("rope_scaling") or config.get("rope_parameters") or {}
        if kind not in ("llama", "qwen2", "qwen3") or rope.get("rope_type", "default") != "default" or (
                config.get("use_sliding_window")):
            refuse(f"{directory}: is a {kind} or has scaled RoPE or a window, expected a llama, qwen2 or "
                   "qwen3 without")
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads", self.heads)
        self.width = config.get("head_dim") or config["hidden_size"] // self.heads
        self.theta, self.epsilon = config.get("rope_theta") or rope.get("rope_theta", 10000.0), config["rms_norm_eps"]
        self.vocabulary = config["vocab_size"]
        self.tensors = {name: numbers for path in directory.glob("*.safetensors") for name, numbers in read(path)}

    def product(self, x, name):
        """x times the matrix `name`, plus its bias if it has one."""
        return x @ self.tensors[name + ".weight"].T.astype(float) + self.tensors.get(name + ".bias", 0)

    def norm(self, x, name):
        if name + ".weight" not in self.tensors:  # of queries and keys: Qwen3 alone
            return x
        size = np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon)
        return x / size * self.tensors[name + ".weight"]

    def rotate(self, x):  # x (tokens, heads, width); a pair (a, b) as the complex number a + bi
        half = self.width // 2
        angle = np.arange(len(x))[:, None, None] * self.theta ** (-np.arange(half) / half)
        pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag], -1)

    def forward(self, ids, code):
        """The logits (tokens, vocabulary) with keys and values as `code` gives them back."""
        x = self.tensors["model.embed_tokens.weight"][ids].astype(float)
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            n = self.norm(x, name + "input_layernorm")
            q, k, v = (self.product(n, f"{name}self_attn.{which}_proj").reshape(len(ids), -1, self.width)
                       for which in "qkv")
            q, k = self.norm(q, name + "self_attn.q_norm"), self.norm(k, name + "self_attn.k_norm")
            q, k = self.rotate(q), self.rotate(k)
            x = x + self.product(attend(q, *code(k, v)).reshape(len(ids), -1), name + "self_attn.o_proj")
            n = self.norm(x, name + "post_attention_layernorm")
            gate, up = self.product(n, name + "mlp.gate_proj"), self.product(n, name + "mlp.up_proj")
            x = x + self.product(gate / (1 + np.exp(-gate)) * up, name + "mlp.down_proj")
        head = "lm_head" if "lm_head.weight" in self.tensors else "model.embed_tokens"
        return self.product(self.norm(x, "model.norm"), head)


def read(path):
    """The tensors of a safetensors file: name and numbers."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")  # the header's length, and the header
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[entry["dtype"]]
            numbers = np.frombuffer(data[start + begin:start + end], kind).reshape(entry["shape"])
            yield name, (numbers.astype("<u4") << 16).view("<f4") if kind == "<u2" else numbers


def attend(q, k, v, newest=None):
    """Attention of all heads. newest: keys and values (tokens, KV heads, width) that a query reads in place of k and v
    where a position is in its own block of 32; None: it reads k and v everywhere."""
    tokens, heads, width = q.shape
    t = np.arange(tokens)
    near = t[None] // BLOCK == t[:, None] // BLOCK  # (query, position)
    out = np.empty_like(q)
    for h in range(heads):
        kv = h * k.shape[1] // heads
        scores = q[:, h] @ k[:, kv].T
        if newest:
            scores = np.where(near, q[:, h] @ newest[0][:, kv].T, scores)
        scores = np.where(t[None] > t[:, None], -np.inf, scores / np.sqrt(width))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        far = np.where(near, 0, weights) if newest else weights
        out[:, h] = far @ v[:, kv] + (0 if newest is None else (weights - far) @ newest[1][:, kv])
    return out


# ---- Codes -----------------------------------------------------------------------------------------------------
#
# A code takes the keys and values of all positions, (tokens, KV heads, width) each, and returns them as they are read:
# keys, values, and the two that a query reads from its own block of 32, if these are others.

def exact(k, v):
    return k, v


def f16(x):
    return np.asarray(x).astype(np.float16).astype(float)


def f16_above(x):  # scales are rounded up, and zero points down, so that no number is outside of the codes
    near = np.asarray(x).astype(np.float16)
    return np.where(near.astype(float) < x, np.nextafter(near, np.float16(np.inf)), near).astype(float)


def uniform(x, bits, axis, shrinks=(1,)):
    """Codes along `axis`, from the lowest number to the highest. shrinks: the range is shrunk around its middle by each
    of these factors, and the one with the smallest squared error is taken."""
    largest, low, high = 2 ** bits - 1, x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    best, least = x, np.inf
    for shrink in shrinks:
        cut = (high - low) * (1 - shrink) / 2
        zero = -f16_above(-(low + cut))
        scale = f16_above((high - cut - zero) / largest)
        scale = np.where(scale == 0, 1, scale)
        y = zero + scale * np.clip(np.rint((x - zero) / scale), 0, largest)
        error = ((y - x) ** 2).sum(axis, keepdims=True)
        best, least = np.where(error < least, y, best), np.minimum(error, least)
    return best


def by_token(bits, shrinks=(1,)):
    """A scale and a zero point for 32 channels of a row."""
    def code_rows(x):
        return uniform(x.reshape(*x.shape[:-1], -1, min(BLOCK, x.shape[-1])), bits, -1, shrinks).reshape(x.shape)
    return code_rows


def kivi(bits, shrinks=(1,)):
    """int4 and int2 of the engine: keys by channel over 32 positions, values by token, the newest block at f16 (Liu et
    al. 2024, KIVI)."""
    def code(k, v):
        read_k = f16(k)
        for begin in range(0, len(k) - BLOCK + 1, BLOCK):  # whole blocks
            read_k[begin:begin + BLOCK] = uniform(read_k[begin:begin + BLOCK], bits, 0, shrinks)
        return read_k, by_token(bits, shrinks)(f16(v)), (f16(k), f16(v))
    return code


def int8(x):
    scale = f16_above(np.abs(x).max(-1, keepdims=True) / 127)
    return scale * np.rint(x / np.where(scale == 0, 1, scale))


def gaussian_levels(bits):
    """The levels of a Gaussian with the least squared error, by Lloyd's steps on many random numbers."""
    numbers = np.sort(np.random.default_rng(0).standard_normal(400_000))
    levels = np.quantile(numbers, (np.arange(2 ** bits) + .5) / 2 ** bits)
    for _ in range(200):
        nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, numbers)
        levels = np.bincount(nearest, numbers) / np.bincount(nearest)
        levels = (levels - levels[::-1]) / 2
    return levels


def gaussian(bits):
    """The levels of a Gaussian, and for each row its norm in f16."""
    levels = gaussian_levels(bits)

    def code_rows(x):
        size = np.sqrt((x * x).mean(-1, keepdims=True))
        y = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x / np.where(size == 0, 1, size))]
        return y * f16(size / np.sqrt((y * y).mean(-1, keepdims=True)))
    return code_rows


def hadamard(width):
    """A rotation that spreads each channel over all; `width` is a power of two."""
    h = np.ones((1, 1))
    while len(h) < width:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(width)


def rows(code_rows, rotated=False, centred=0, kept=0):
    """A code of single rows. rotated: by a Hadamard matrix first. centred: the mean key of so many positions after the
    first is taken away before, and added after. kept: the first rows are kept at f16."""
    def code(k, v):
        turn = hadamard(k.shape[-1]) if rotated else np.eye(k.shape[-1])
        mean = f16(k[1:1 + centred].mean(0)) if centred else 0
        read_k, read_v = code_rows((k - mean) @ turn) @ turn.T + mean, code_rows(v @ turn) @ turn.T
        read_k[:kept], read_v[:kept] = f16(k[:kept]), f16(v[:kept])
        return read_k, read_v
    return code


SHRINKS = (1, .9, .8, .7, .6, .5)
CODES = {
    "f16": rows(f16),
    "int8": rows(int8),
    "int8, centred": rows(int8, centred=32),
    "int8, rotated": rows(int8, rotated=True),
    "int4": kivi(4),
    "int4, fitted": kivi(4, SHRINKS),
    "int2": kivi(2),
    "int2, fitted": kivi(2, SHRINKS),
    "4 bits by token": rows(by_token(4)),
    "the same, rotated, centred, 4 rows kept": rows(by_token(4), rotated=True, centred=32, kept=4),
    "gaussian 4": rows(gaussian(4)),
    "gaussian 4, rotated": rows(gaussian(4), rotated=True),
    "gaussian 4, rotated, centred": rows(gaussian(4), rotated=True, centred=32),
    "the same, 4 rows kept": rows(gaussian(4), rotated=True, centred=32, kept=4),
    "gaussian 2, rotated, centred": rows(gaussian(2), rotated=True, centred=32),
}


# ---- The table -------------------------------------------------------------------------------------------------

def ids_of(directory, flags):
    said = subprocess.run([ROOT / "llm", "tokenize", "-m", directory, *flags, "--json"], capture_output=True, text=True)
    if said.returncode:
        refuse(f"{said.stderr.strip()}")
    return json.loads(said.stdout)["ids"]


def instruments():
    """The model and the texts of each: the built-in one with 4 stories, two of the tests with 320 random tokens."""
    directory = ROOT / "weights_tools/builtin"
    with open(directory / "heldout.jsonl") as lines:
        stories = [json.loads(line)["text"] for line, _ in zip(lines, range(4))]
    yield "builtin", Model(directory), [ids_of(directory, ["-p", story])[:700] for story in stories]
    for name in ("huge_keys", "sinks"):
        model = Model(ROOT / "tests/fixtures" / name)
        yield name, model, [np.random.default_rng(1).integers(3, model.vocabulary, 320)]


def log_probabilities(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def compare(model, text, right, code, first):
    """KL (positions) of a code, and where its likeliest token is the right one."""
    found = log_probabilities(model.forward(text, code)[first:])
    return (np.exp(right) * (right - found)).sum(-1), right.argmax(-1) == found.argmax(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", type=pathlib.Path, metavar="DIR")
    parser.add_argument("-f", type=pathlib.Path, metavar="TEXT")
    parser.add_argument("-n", type=int, default=320)
    parser.add_argument("--from", type=int, default=64, dest="first")
    parser.add_argument("--codes", nargs="+", choices=CODES, default=CODES, metavar="CODE")
    flags = parser.parse_args()
    if (flags.m is None) != (flags.f is None):
        parser.error("-m DIR and -f TEXT come together")
    if not (ROOT / "llm").is_file():
        refuse(f"{ROOT / 'llm'}: no such file: make builds it")
    if flags.m:
        models = [(flags.m.name, Model(flags.m), [ids_of(flags.m, ["-f", flags.f])[:flags.n]])]
    else:
        models = [*instruments()]
    for name, _, texts in models:
        shortest = min(map(len, texts))
        if shortest <= flags.first:
            refuse(f"{name}: a text has {shortest} tokens, expected more than --from {flags.first}")
    right = [[log_probabilities(model.forward(text, exact)[flags.first:]) for text in texts]
             for _, model, texts in models]
    print(" " * 40 + "".join(f"{name:>24}" for name, _, _ in models))
    for code in flags.codes:
        print(f"{code:40}", end="")
        for (_, model, texts), logs in zip(models, right):
            parts = [compare(model, text, log, CODES[code], flags.first) for text, log in zip(texts, logs)]
            kl, same = map(np.concatenate, zip(*parts))
            print(f"{kl.mean():15.2e} {100 * same.mean():6.1f} %", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
