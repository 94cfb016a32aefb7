#!/usr/bin/env python3
"""A GGUF file becomes a directory as Hugging Face publishes them, which llm (and Transformers) can run.

    python3 weights_tools/from_gguf.py FILE.gguf DIR [--dtype bf16|f16|f32]        needs gguf, safetensors, numpy

DIR gets config.json, generation_config.json, model.safetensors (shards with an index where it is large), tokenizer.json
and tokenizer_config.json, whole or not at all. Matrices are dequantized to --dtype (default bf16); vectors stay float32,
as in the file. What this program does not know (an architecture, a key of one, a pre-tokenizer, a tensor) is refused by
name, since it might change what the model computes.

What differs between the two formats, and is undone here:
    rows of q and k   llama.cpp rotates neighbours, Hugging Face the two halves of a head; families converted from
                      Llama have their rows in the other order
    norms             Gemma multiplies with 1 + w; a GGUF holds 1 + w
    RoPE              Llama 3's scaling is a tensor of factors (rope_freqs), Phi-3's two
    SentencePiece     pieces have scores; tokenizer.json wants pairs to merge, in order
"""
import argparse
import json
import os
import pathlib
import shutil
import struct
import sys

try:
    import gguf
    import numpy as np
    import safetensors
except ImportError as missing:
    sys.exit(f"from_gguf: {missing.name} is not installed: pip install -r weights_tools/requirements-gguf.txt, or take "
             "build/python/bin/python, which `make smollm2` makes")

SHARD = 4 << 30  # bytes of one safetensors file at most
TORCH_NAMES = dict(bf16="bfloat16", f16="float16", f32="float32")


class Wrong(Exception):
    """One line: what it is about, what was found, what was expected, the cure."""


# ---- The file ----------------------------------------------------------------------------------------------------

FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by GGUF's types
STRING, ARRAY = 8, 9


def check_lengths(path):
    """Walks through the header. The gguf package believes every length in it: damaged ones would take all memory."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        def number(kind):
            data = file.read(struct.calcsize(kind))
            if len(data) < struct.calcsize(kind):
                raise Wrong(f"ends within its header, at byte {size}: is the download whole?")
            return struct.unpack("<" + kind, data)[0]

        def skip(length, what):
            if length > size - file.tell():
                raise Wrong(f"{what} has {length} bytes at byte {file.tell()} of {size}: damaged, or cut: fetch it again")
            file.seek(length, os.SEEK_CUR)

        def value(kind, what):
            if kind == STRING:
                skip(number("Q"), what)
            elif kind == ARRAY:
                inner, count = number("I"), number("Q")
                if inner in FIXED:
                    skip(count * FIXED[inner], what)
                elif inner == STRING and count * 8 <= size:
                    for _ in range(count):
                        skip(number("Q"), what)
                else:
                    raise Wrong(f"{what} is a list of {count} values of type {inner}: damaged: fetch it again")
            elif kind in FIXED:
                skip(FIXED[kind], what)
            else:
                raise Wrong(f"{what} has type {kind}, expected 0 to 12: damaged: fetch it again")

        if file.read(4) != b"GGUF":
            raise Wrong("does not begin with GGUF: expected a GGUF file")
        version, tensors, keys = number("I"), number("Q"), number("Q")
        if version not in (2, 3):
            raise Wrong(f"is GGUF version {version}, expected 2 or 3")
        if max(tensors, keys) * 8 > size:
            raise Wrong(f"says it has {tensors} tensors and {keys} keys in {size} bytes: damaged: fetch it again")
        for i in range(keys):
            skip(number("Q"), f"the name of key {i}")
            value(number("I"), f"key {i}")
        for i in range(tensors):
            skip(number("Q"), f"the name of tensor {i}")
            dims = number("I")
            if dims > 4:
                raise Wrong(f"tensor {i} has {dims} dimensions, expected 4 at most: damaged: fetch it again")
            skip(8 * dims + 4 + 8, f"tensor {i}")


class File:
    """A GGUF's keys and tensors. It remembers which keys were asked for: what nobody asked for is not understood."""
    def __init__(self, path):
        self.path, self.asked = path, set()
        try:
            check_lengths(path)
            reader = gguf.GGUFReader(path)
            self.keys = {name: field.contents() for name, field in reader.fields.items()}
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as wrong:
            raise Wrong(f"cannot be read, damaged or cut ({str(wrong).splitlines()[0] if str(wrong) else wrong!r}): "
                        "fetch it again") from None
        self.arch = self.need("general.architecture", str)

    def get(self, key, kind, default=None):
        if key.startswith("."):
            key = self.arch + key
        self.asked.add(key)
        found = self.keys.get(key)
        if found is None:
            return default
        if kind is float and isinstance(found, (int, float)) and not isinstance(found, bool):
            return float(str(np.float32(found)))  # 1e-05, not 9.999999747378752e-06
        if not isinstance(found, kind) or kind is int and isinstance(found, bool):
            raise Wrong(f"{key} is {str(found)[:40]!r}, expected {kind.__name__}")
        return found

    def need(self, key, kind):
        found = self.get(key, kind)
        if found is None:
            raise Wrong(f"{self.arch + key if key.startswith('.') else key} is missing, expected it in every such file")
        return found

    def size(self, key, default=None, least=1):
        found = self.get(key, int, default) if default is not None else self.need(key, int)
        if not least <= found <= 1 << 24:
            raise Wrong(f"{self.arch + key} is {found}, expected {least} to {1 << 24}")
        return found


# ---- config.json -------------------------------------------------------------------------------------------------

# Architecture: Hugging Face's class and type; whether rows of q and k are those of neighbours; what a layer's tensors are
# called, where they have other names than most.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama", True, {}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", False, {}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", False, {}),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", False, {
        "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm"}),
    "phi3": ("Phi3ForCausalLM", "phi3", False, {"ffn_up": "mlp.gate_up_proj"}),
    "granite": ("GraniteForCausalLM", "granite", True, {}),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", False, {"post_attention_norm": "post_attention_layernorm"}),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", True, {}),
    "lfm2": ("Lfm2ForCausalLM", "lfm2", False, {
        "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm", "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj"}),
}


def llama3_scaling(file, config):
    """Of rope_freqs, what each frequency is divided by, the scaling that made it: Llama 3's, if it is one."""
    found = np.asarray(file.tensors["rope_freqs.weight"].data, np.float32).flatten()
    dims, theta = config["head_dim"], config["rope_theta"]
    wave = 2 * np.pi * theta ** (np.arange(0, dims, 2) / dims)
    for original in (8192, config["max_position_embeddings"], *(2 ** power for power in range(5, 18))):
        factor, low, high = float(str(found.max())), 1.0, 4.0
        smooth = np.clip((original / wave - low) / (high - low), 0, 1)
        if len(found) == len(wave) and np.allclose(1 / ((1 - smooth) / factor + smooth), found, rtol=1e-5):
            return dict(rope_type="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high,
                        original_max_position_embeddings=original)
    raise Wrong("rope_freqs.weight is not Llama 3's scaling with low and high factors 1 and 4, the only one known here")


def rope_scaling(file, config):
    kind, factor = file.get(".rope.scaling.type", str, "none"), file.get(".rope.scaling.factor", float)
    original = file.get(".rope.scaling.original_context_length", int)
    if "rope_freqs.weight" in file.tensors:
        return llama3_scaling(file, config)
    if kind == "none":
        return None
    if kind == "linear" and factor:
        return dict(rope_type="linear", factor=factor)
    if kind == "yarn" and factor and original:
        names = dict(yarn_attn_factor="attention_factor", yarn_beta_fast="beta_fast", yarn_beta_slow="beta_slow")
        more = {there: file.get(f".rope.scaling.{here}", float) for here, there in names.items()}
        return dict(rope_type="yarn", factor=factor, original_max_position_embeddings=original,
                    **{key: value for key, value in more.items() if value is not None})
    if kind == "longrope" and config["model_type"] == "phi3":
        return None  # by its two tensors
    raise Wrong(f"{file.arch}.rope.scaling.type {kind} with factor {factor} is not known here; known are none, linear, yarn")


def config_of(file):
    if file.arch not in ARCHITECTURES:
        raise Wrong(f"architecture {file.arch} is not known here; known are {' '.join(ARCHITECTURES)}")
    architecture, model_type, *_ = ARCHITECTURES[file.arch]
    if "token_embd.weight" not in file.tensors:
        raise Wrong("tensor token_embd.weight is missing, expected it in every such file")
    heads, layers, hidden = file.size(".attention.head_count"), file.size(".block_count"), file.size(".embedding_length")
    kv_heads = file.get(".attention.head_count_kv", (int, list), heads)
    by_layer = kv_heads if isinstance(kv_heads, list) else [kv_heads] * layers
    if len(by_layer) != layers or len({count for count in by_layer if count}) != 1 or file.arch != "lfm2" and 0 in by_layer:
        raise Wrong(f"{file.arch}.attention.head_count_kv is {str(kv_heads)[:60]}: expected one number for all layers"
                    + ("" if file.arch != "lfm2" else ", or 0 where a layer is a convolution"))
    head_dim = file.size(".attention.key_length", hidden // heads)
    rotary = file.size(".rope.dimension_count", head_dim)
    if file.size(".attention.value_length", head_dim) != head_dim:
        raise Wrong(f"{file.arch}.attention.value_length differs from key_length {head_dim}, expected it to be the same")
    if rotary != head_dim and file.arch != "phi3":
        raise Wrong(f"{file.arch}.rope.dimension_count is {rotary}, expected all {head_dim} numbers of a head")
    ends = [file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(id for id in ends if id is not None))
    config = dict(
        architectures=[architecture], model_type=model_type, hidden_size=hidden, num_hidden_layers=layers,
        intermediate_size=file.size(".feed_forward_length"), num_attention_heads=heads,
        num_key_value_heads=max(by_layer), head_dim=head_dim, hidden_act="silu",
        vocab_size=int(file.tensors["token_embd.weight"].shape[1]), max_position_embeddings=file.size(".context_length"),
        rms_norm_eps=file.need(".attention.layer_norm_rms_epsilon", float),
        rope_theta=file.get(".rope.freq_base", float, 10000.0), tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int), eos_token_id=ends if len(ends) > 1 else (ends or [None])[0])
    config["rope_scaling"] = rope_scaling(file, config)
    if file.arch != "qwen2":  # which has those of q, k and v always
        config.update(attention_bias="blk.0.attn_q.bias" in file.tensors, mlp_bias="blk.0.ffn_up.bias" in file.tensors)
    FAMILIES.get(file.arch, lambda *_: None)(file, config, by_layer)
    left = [key for key in file.keys if key.startswith(file.arch + ".") and key not in file.asked
            and not key.endswith((".vocab_size", ".attention.causal"))]
    if left or file.keys.get(file.arch + ".attention.causal") is False:
        raise Wrong(f"key {(left or [file.arch + '.attention.causal'])[0]} is not known here, so what it changes would be lost")
    return config


def gemma3(file, config, _):
    window, pattern = file.get(".attention.sliding_window", int), file.get(".attention.sliding_window_pattern", (int, list), 6)
    slides = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(config["num_hidden_layers"])]
    # Of 27B alone, scores are divided by the root of hidden / heads; llama.cpp knows it by its 62 layers.
    scale = config["hidden_size"] // config["num_attention_heads"] if len(slides) == 62 else config["head_dim"]
    config.pop("hidden_act")
    config.update(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=scale, sliding_window=window,
                  final_logit_softcapping=file.get(".final_logit_softcapping", float),
                  rope_local_base_freq=file.get(".rope.freq_base_swa", float, 10000.0),
                  layer_types=[f"{'sliding' if window and slide else 'full'}_attention" for slide in slides])


def phi3(file, config, _):
    rotary, original = file.get(".rope.dimension_count", int), file.get(".rope.scaling.original_context_length", int)
    file.get(".rope.scaling.attn_factor", float)  # follows from the two contexts
    config.update(sliding_window=file.get(".attention.sliding_window", int) or None,
                  partial_rotary_factor=rotary / config["head_dim"], original_max_position_embeddings=original)
    factors = {name: file.tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short")}
    if all(factors.values()):
        config["rope_scaling"] = dict(type="longrope", **{
            f"{name}_factor": [float(str(x)) for x in tensor.data.flatten()] for name, tensor in factors.items()})


def granite(file, config, _):
    config.update(attention_multiplier=file.get(".attention.scale", float, config["head_dim"] ** -0.5),
                  embedding_multiplier=file.get(".embedding_scale", float, 1.0),
                  residual_multiplier=file.get(".residual_scale", float, 1.0),
                  logits_scaling=file.get(".logit_scale", float, 1.0))


def lfm2(file, config, by_layer):
    config.update(conv_L_cache=file.size(".shortconv.l_cache"), conv_bias=False, block_auto_adjust_ff_dim=False,
                  norm_eps=config["rms_norm_eps"], layer_types=["full_attention" if count else "conv" for count in by_layer])


FAMILIES = dict(gemma3=gemma3, phi3=phi3, granite=granite, lfm2=lfm2,
                qwen2=lambda file, config, _: config.update(use_sliding_window=False),
                qwen3=lambda file, config, _: config.update(use_sliding_window=False),
                smollm3=lambda file, config, _: config.update(no_rope_layer_interval=4))


# ---- The tensors -------------------------------------------------------------------------------------------------

LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
         "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj",
         "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
         "post_ffw_norm": "post_feedforward_layernorm"}
OTHERS = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm",
          "token_embd_norm": "model.embedding_norm"}  # the last one is LFM2's last norm
CONSUMED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}  # they went into the config


def name_of(name, file):
    stem, _, part = name.rpartition(".")
    if stem.startswith("blk."):
        layer, _, stem = stem[len("blk."):].partition(".")
        known = {**LAYER, **ARCHITECTURES[file.arch][3]}.get(stem)
        stem = known and f"model.layers.{layer}.{known}"
    else:
        stem = OTHERS.get(stem)
    if not stem or part not in ("weight", "bias"):
        raise Wrong(f"tensor {name} is not known here, expected those of {file.arch}")
    return f"{stem}.{part}"


def halves(x, heads):
    """Rows of q or k in the order that Hugging Face rotates: first halves of the heads, then second ones."""
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def numbers_of(tensor, name, file, config):
    """A tensor's numbers in float32, as the family has them."""
    try:
        x = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError:
        raise Wrong(f"tensor {tensor.name} has type {tensor.tensor_type.name}, which the gguf package cannot read") from None
    stem = name.rsplit(".", 1)[0]
    if ARCHITECTURES[file.arch][2] and stem.endswith(("q_proj", "k_proj")):
        heads = config["num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"]
        if x.shape[0] % (2 * heads):
            raise Wrong(f"tensor {tensor.name} has {x.shape[0]} rows, expected a multiple of 2 for each of {heads} heads")
        x = halves(x, heads)
    if file.arch == "gemma3" and stem.endswith("norm"):
        x = x - 1
    return x[:, None] if stem.endswith("conv.conv") else x


def rounded(x, dtype):
    """Numbers as they are stored; bf16, which numpy has not, as the upper half of float32."""
    if dtype == "bf16":
        bits = x.view(np.uint32)
        return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
    return x.astype(dict(f16=np.float16, f32=np.float32)[dtype])


def write_tensors(file, config, directory, dtype):
    names = {name: name_of(name, file) for name in file.tensors if name not in CONSUMED}
    size = {name: int(np.prod(file.tensors[name].shape)) * (4 if dtype == "f32" else 2) for name in names}
    shards, filled = [[]], 0
    for name in names:
        if filled and filled + size[name] > SHARD:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size[name]
    index, total, done = {}, 0, 0
    for number, shard in enumerate(shards, 1):
        place = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors, stored = {}, []
        for name in shard:
            show_progress(f"tensor {done + 1} of {len(names)}: {name}")
            done += 1
            x = np.ascontiguousarray(numbers_of(file.tensors[name], names[name], file, config))
            if not np.isfinite(x).all():
                raise Wrong(f"tensor {name} has numbers that are not finite: damaged: fetch the file again")
            kind = dtype if x.ndim > 1 else "f32"
            stored.append(rounded(x, kind))  # which the serializer reads through a pointer
            tensors[names[name]] = safetensors.TensorSpec(dtype=TORCH_NAMES[kind], shape=x.shape, data_len=stored[-1].nbytes,
                                                          data_ptr=stored[-1].ctypes.data)
            index[names[name]] = place
            total += stored[-1].nbytes
        safetensors.serialize_file(tensors, directory / place, metadata={"format": "pt"})
        (directory / place).chmod(0o644)
    if len(shards) > 1:
        write_json(directory / "model.safetensors.index.json", dict(metadata=dict(total_size=total), weight_map=index))
    return total


# ---- The tokenizer -----------------------------------------------------------------------------------------------

# How pieces are split before they are merged, by tokenizer.ggml.pre: the patterns that these tokenizers have in common.
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+END|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*END|\p{{N}}DIGITS"
         r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
THREE, SUFFIX = "{1,3}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def by_pattern(pattern):
    return [dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False), byte_level(False)]


def byte_level(use_regex):
    return dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=use_regex)


DIGITS_FIRST = [dict(type="Digits", individual_digits=True), byte_level(True)]
LLAMA3, QWEN2 = by_pattern(WORDS.replace("DIGITS", THREE)), by_pattern(WORDS.replace("DIGITS", ""))
TEKKEN = by_pattern(CASED.replace("DIGITS", "").replace("END", ""))
GPT4O = by_pattern(CASED.replace("DIGITS", THREE).replace("END", SUFFIX))
# name: steps, normalizer, whether a word that is a token is never split into others, whether a text begins with BOS
PRE_TOKENIZERS = {
    "gpt-2": ([byte_level(True)], None, False, False), "olmo": ([byte_level(True)], None, False, False),
    "smollm": (DIGITS_FIRST, None, False, False), "refact": (DIGITS_FIRST, None, False, False),
    "starcoder": (DIGITS_FIRST, None, False, False),
    "qwen2": (QWEN2, dict(type="NFC"), False, False), "deepseek-r1-qwen": (QWEN2, dict(type="NFC"), False, False),
    "llama-bpe": (LLAMA3, None, True, True), "lfm2": (LLAMA3, None, True, True), "falcon3": (LLAMA3, None, True, True),
    "smaug-bpe": (LLAMA3, None, False, False), "dbrx": (LLAMA3, None, False, False),
    "tekken": (TEKKEN, None, True, True), "gpt-4o": (GPT4O, None, False, False),
}
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def bpe(vocab, merges, **more):
    return dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
                fuse_unk=False, byte_fallback=False, ignore_merges=False, vocab=vocab, merges=merges) | more


def merges_of(pieces):
    """Pairs to merge, in order: those that make an added piece (of blanks, in Gemma) first, as those pieces come; then by
    the score of what they make, best first. Of equals those with longer parts first, then by the ids of the parts."""
    ids = {piece: id for id, piece in enumerate(pieces)}
    first, pairs = [], []
    for piece, score in pieces.items():
        parts = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in ids and piece[i:] in ids]
        if score is None:
            first += parts
        else:
            pairs += [(score, *pair) for pair in sorted(parts, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    pairs.sort(key=lambda pair: (pair[0], len(pair[1]), len(pair[2])), reverse=True)
    return first + [pair[1:] for pair in pairs]


def tokenizer_of(file, config):
    """tokenizer.json and tokenizer_config.json."""
    model, tokens = file.need("tokenizer.ggml.model", str), file.need("tokenizer.ggml.tokens", list)
    types = file.get("tokenizer.ggml.token_type", list, [NORMAL] * len(tokens))
    ids = {name: file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos", "unknown", "padding")}
    if len(types) != len(tokens) or not all(isinstance(token, str) for token in tokens):
        raise Wrong(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens, expected as many")
    if len(tokens) > config["vocab_size"]:
        raise Wrong(f"tokenizer.ggml.tokens has {len(tokens)} tokens, the embedding {config['vocab_size']} rows")
    for name, id in ids.items():
        if id is not None and not 0 <= id < len(tokens):
            raise Wrong(f"tokenizer.ggml.{name}_token_id is {id}, expected an id below {len(tokens)}")
    if model == "llama":  # an added piece of blanks is one of the text's own letters there
        tokens = ["▁" * len(token) if kind == USER and token and not token.strip(" ") else token
                  for token, kind in zip(tokens, types)]
    added = [dict(id=id, content=token, single_word=False, lstrip=False, rstrip=False, normalized=False, special=kind == CONTROL)
             for id, (token, kind) in enumerate(zip(tokens, types)) if kind in (CONTROL, USER) or id == ids["unknown"]
             and kind == UNKNOWN]
    whole = dict(version="1.0", truncation=None, padding=None, added_tokens=added)
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        twice = next(token for id, token in enumerate(tokens) if vocab[token] != id)
        raise Wrong(f"tokenizer.ggml.tokens has {twice[:40]!r} twice, expected each once")
    if model == "gpt2":
        pre = file.get("tokenizer.ggml.pre", str, "none")
        if pre not in PRE_TOKENIZERS:
            raise Wrong(f"tokenizer.ggml.pre is {pre}, which is not known here; known are {' '.join(PRE_TOKENIZERS)}")
        steps, normalizer, whole_words, opens = PRE_TOKENIZERS[pre]
        merges = file.need("tokenizer.ggml.merges", list)
        for merge in map(str, merges):
            parts = merge.split(" ")
            if len(parts) != 2 or not {*parts, "".join(parts)} <= vocab.keys():
                raise Wrong(f"tokenizer.ggml.merges has {merge[:40]!r}, expected two tokens that make a third: damaged")
        whole |= dict(normalizer=normalizer, pre_tokenizer=dict(type="Sequence", pretokenizers=steps), decoder=byte_level(True),
                      model=bpe(vocab, merges, ignore_merges=whole_words))
    elif model == "llama":
        scores, opens = file.need("tokenizer.ggml.scores", list), True
        if len(scores) != len(tokens):
            raise Wrong(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens, expected as many")
        prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
        blanks = dict(type="Replace", pattern=dict(String=" "), content="▁")
        normalizer = dict(type="Sequence", normalizers=[dict(type="Prepend", prepend="▁"), blanks]) if prefix else blanks
        decoders = [dict(type="Replace", pattern=dict(String="▁"), content=" "), dict(type="ByteFallback"), dict(type="Fuse")]
        decoders += [dict(type="Strip", content=" ", start=1, stop=0)] if prefix else []
        pieces = {token: None if kind == USER else score for token, score, kind in zip(tokens, scores, types)
                  if kind not in (CONTROL, BYTE, UNKNOWN)}
        whole |= dict(normalizer=normalizer, pre_tokenizer=None, decoder=dict(type="Sequence", decoders=decoders),
                      model=bpe(vocab, merges_of(pieces), byte_fallback=True, fuse_unk=True,
                                unk_token=tokens[ids["unknown"] or 0]))
    else:
        raise Wrong(f"tokenizer.ggml.model is {model}, which is not known here; known are gpt2 llama")
    name = {key: tokens[id] for key, id in ids.items() if id is not None}
    around = [("bos", file.get("tokenizer.ggml.add_bos_token", bool, opens)), ("eos", file.get("tokenizer.ggml.add_eos_token", bool, False))]
    before, after = [[name[key]] if wanted and key in name else [] for key, wanted in around]
    token, text = lambda name: dict(SpecialToken=dict(id=name, type_id=0)), lambda id: dict(Sequence=dict(id=id, type_id=0))
    whole["post_processor"] = dict(
        type="TemplateProcessing", single=[*map(token, before), text("A"), *map(token, after)],
        pair=[*map(token, before), text("A"), *map(token, after), text("B")],
        special_tokens={name: dict(id=name, ids=[vocab[name]], tokens=[name]) for name in before + after}) if before + after else None
    words = dict(bos_token=name.get("bos"), eos_token=name.get("eos"), unk_token=name.get("unknown"), pad_token=name.get("padding"),
                 add_bos_token=bool(before), add_eos_token=bool(after), clean_up_tokenization_spaces=False,
                 tokenizer_class="PreTrainedTokenizerFast", model_max_length=config["max_position_embeddings"],
                 chat_template=file.get("tokenizer.chat_template", str))
    return whole, {key: value for key, value in words.items() if value is not None}


# ---- The directory -----------------------------------------------------------------------------------------------


def show_progress(text):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def convert(path, directory, dtype="bf16"):
    """Writes the directory, and returns how many bytes its tensors have."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise Wrong(f"{directory} is there already, expected a place for a new directory: name another, or remove it")
    if not path.is_file():
        raise Wrong(f"{path} is not a file, expected a GGUF")
    part = directory.with_name(directory.name + ".part")
    try:
        part.mkdir(parents=True)
    except FileExistsError:
        raise Wrong(f"{part} is there, left by a run that was killed or is running: remove it") from None
    try:
        file = File(path)
        config = config_of(file)
        tokenizer, tokenizer_config = tokenizer_of(file, config)
        total = write_tensors(file, config, part, dtype)
        write_json(part / "config.json", config | dict(torch_dtype=TORCH_NAMES[dtype]))
        write_json(part / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
        write_json(part / "tokenizer.json", tokenizer)
        write_json(part / "tokenizer_config.json", tokenizer_config)
        if directory.exists():
            directory.rmdir()
        part.rename(directory)
        return total
    except Wrong as wrong:
        raise Wrong(f"{path}: {wrong}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
        show_progress("")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path, metavar="FILE.gguf")
    parser.add_argument("directory", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16", help="of matrices (default bf16)")
    arguments = parser.parse_args()
    try:
        total = convert(arguments.file, arguments.directory, arguments.dtype)
    except Wrong as wrong:
        print(f"from_gguf: {wrong}", file=sys.stderr)
        return 2
    except OSError as wrong:
        print(f"from_gguf: {wrong.filename or arguments.directory}: {wrong.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("from_gguf: interrupted, nothing was written", file=sys.stderr)
        return 130
    print(f"{arguments.directory}: {total / 1e6:.1f} MB of tensors in {arguments.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
