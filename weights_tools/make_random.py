#!/usr/bin/env python3
"""Writes a checkpoint of a real model's shape with random weights: for speed and memory, where text does not matter.

    python3 weights_tools/make_random.py smollm2-135m OUT [--dtype bf16] [--seed 0]

Needs numpy. OUT becomes a Hugging Face directory: config.json, generation_config.json, model.safetensors (matrices
~ N(0, 0.02), norms 1, written a few MiB at a time) and a tokenizer.json that can encode any text (a token a byte) and
decode any id of the vocabulary (made-up words).
"""
import argparse
import json
import os
import pathlib
import sys
import time

import numpy as np


def shape(hidden, ffn, layers, heads, kv_heads, vocabulary, context, theta, tied, bos, end, scaling=None):
    return dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=hidden, intermediate_size=ffn,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary,
        max_position_embeddings=context, rope_theta=theta, rope_scaling=scaling, rms_norm_eps=1e-5, hidden_act="silu",
        tie_word_embeddings=tied, attention_bias=False, mlp_bias=False, bos_token_id=bos, eos_token_id=end)


def llama3(factor):
    return dict(rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192)


SHAPES = {
    "smollm2-135m": shape(576, 1536, 30, 9, 3, 49152, 8192, 100000.0, True, 0, 0),
    "vocabulary-128k": shape(512, 1024, 3, 8, 4, 128256, 4096, 10000.0, True, 0, 0),
    "tinyllama-1.1b": shape(2048, 5632, 22, 32, 4, 32000, 2048, 10000.0, False, 1, 2),
    "llama-3.2-1b": shape(2048, 8192, 16, 32, 8, 128256, 131072, 500000.0, True, 128000, 128001, llama3(32.0)),
    "llama-3.1-8b": shape(4096, 14336, 32, 32, 8, 128256, 131072, 500000.0, False, 128000, 128001, llama3(8.0)),
}
DTYPES = {"f32": ("F32", "float32", 4), "f16": ("F16", "float16", 2), "bf16": ("BF16", "bfloat16", 2)}
CHUNK = 1 << 20  # values made and written at a time


def tensors(config):
    """(name, shape) of every tensor; a matrix is (outputs, inputs)."""
    hidden, ffn, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        for name, rows, columns in (("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", kv, hidden),
                                    ("self_attn.v_proj", kv, hidden), ("self_attn.o_proj", hidden, hidden)):
            yield f"{layer}.{name}.weight", (rows, columns)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        for name, rows, columns in (("mlp.gate_proj", ffn, hidden), ("mlp.up_proj", ffn, hidden),
                                    ("mlp.down_proj", hidden, ffn)):
            yield f"{layer}.{name}.weight", (rows, columns)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden)


def encode(values, dtype):
    """float32 values as the bytes of a dtype; numpy has no bfloat16: the upper half of a float32, rounded to even."""
    if dtype != "bf16":
        return values.astype({"f32": "<f4", "f16": "<f2"}[dtype]).tobytes()
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def random_values(seed):
    """values(name, dims, start, count) of every tensor in the order of tensors(): vectors are ones."""
    random = np.random.default_rng(seed)

    def values(_, dims, start, count):
        ones = len(dims) == 1
        return np.ones(count, np.float32) if ones else random.standard_normal(count, np.float32) * np.float32(0.02)
    return values


def write_weights(path, config, dtype, values):
    stored, _, width = DTYPES[dtype]
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, dims in tensors(config):
        size = int(np.prod(dims)) * width
        header[name] = dict(dtype=stored, shape=dims, data_offsets=[offset, offset + size])
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins at a multiple of 8

    written, start = 0, time.time()
    part = path.with_suffix(".part")
    with open(part, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, dims in tensors(config):
            size = int(np.prod(dims))
            for first in range(0, size, CHUNK):
                written += out.write(encode(values(name, dims, first, min(CHUNK, size - first)), dtype))
            if written == offset or sys.stderr.isatty():
                print(f"\r{path}: {written / 1e9:.2f} of {offset / 1e9:.2f} GB, {time.time() - start:.0f} s",
                      end="", file=sys.stderr, flush=True)
    os.replace(part, path)
    print(file=sys.stderr)


def byte_characters():
    """The printable stand-in that byte-level BPE has for each byte (Radford et al. 2019, GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


def tokenizer(config):
    """Byte-level BPE without merges. Ids that are neither special nor a byte are words that only decoding meets."""
    special = {config["bos_token_id"]: "<s>", config["eos_token_id"]: "</s>"}
    bytes_left, vocabulary = iter(byte_characters()), {}
    for i in range(config["vocab_size"]):
        letters = "".join(chr(ord("a") + i // 26 ** place % 26) for place in range(4))
        vocabulary[special.get(i) or next(bytes_left, "\u0120" + letters)] = i
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    return dict(
        version="1.0", truncation=None, padding=None,
        added_tokens=[dict(id=i, content=content, **flags) for i, content in sorted(special.items())],
        normalizer=None, pre_tokenizer=byte_level, post_processor=None, decoder=byte_level,
        model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
                   fuse_unk=False, byte_fallback=False, ignore_merges=False, vocab=vocabulary, merges=[]))


def write_checkpoint(out, name, dtype, seed):
    config = dict(SHAPES[name], torch_dtype=DTYPES[dtype][1])
    ids = dict(bos_token_id=config["bos_token_id"], eos_token_id=config["eos_token_id"])
    out.mkdir(parents=True, exist_ok=True)
    for file, value, indent in (("config.json", config, 2), ("generation_config.json", ids, 2),
                                ("tokenizer.json", tokenizer(config), None)):
        (out / file).write_text(json.dumps(value, indent=indent) + "\n")
    write_weights(out / "model.safetensors", config, dtype, random_values(seed))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_checkpoint(arguments.out, arguments.shape, arguments.dtype, arguments.seed)


if __name__ == "__main__":
    main()
