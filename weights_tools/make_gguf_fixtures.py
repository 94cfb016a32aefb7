#!/usr/bin/env python3
"""Writes tests/fixtures/gguf: tiny random models as GGUF files, by llama.cpp's own converter, with Transformers' answers.

    python3 weights_tools/make_gguf_fixtures.py LLAMA_CPP [--out tests/fixtures/gguf] [--only NAME ...]

LLAMA_CPP is a checkout of llama.cpp (PyPI's llama-cpp-python has one in its source archive). Needs torch, transformers,
tokenizers, sentencepiece. A case is NAME.gguf and a part of expected.json:

    prompt_ids     some ids
    last_logits    what Transformers computes in float32 from the model before it was converted: those after the last id
    ids            a checksum of the ids of make_tokenizer_fixtures.odd_texts(), by the tokenizer before it was converted

llama.cpp's converter knows a pre-tokenizer by what it makes of one text. A tiny one makes something else of it, so its
name is given here.
"""
import argparse
import json
import pathlib
import sys
import tempfile

import sentencepiece
import torch
import transformers
from tokenizers import decoders, normalizers, pre_tokenizers
from transformers import (Gemma3TextConfig, GraniteConfig, Lfm2Config, LlamaConfig, Olmo2Config, Phi3Config, Qwen2Config,
                          Qwen3Config, SmolLM3Config)

import make_fixtures
import make_tokenizer_fixtures as shapes

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=None)
LONGROPE = dict(rope_type="longrope", rope_theta=1000.0, short_factor=[1 + 0.05 * i for i in range(4)],
                long_factor=[1.2 + 0.5 * i for i in range(4)], original_max_position_embeddings=64)
# Name: config, pre-tokenizer, and of how many bits a number is (16: bf16, or 8: Q8_0).
CASES = {
    "llama_llama3": (LlamaConfig(**SMALL | dict(head_dim=16), rope_parameters=dict(
        make_fixtures.LLAMA3_ROPE, rope_theta=10000.0)), "llama-bpe", 16),
    "llama_smollm": (LlamaConfig(**SMALL, tie_word_embeddings=True), "smollm", 8),
    "llama_pieces": (LlamaConfig(**SMALL, attention_bias=True, rope_parameters=dict(
        rope_type="linear", factor=4.0, rope_theta=10000.0)), "pieces with a blank before", 16),
    "llama_tekken": (LlamaConfig(**SMALL | dict(head_dim=16)), "tekken", 16),
    "qwen2": (Qwen2Config(**SMALL, tie_word_embeddings=True, rope_parameters=make_fixtures.QWEN2_YARN), "qwen2", 16),
    "qwen3": (Qwen3Config(**SMALL | dict(head_dim=16)), "qwen2", 16),
    "gemma3": (Gemma3TextConfig(**SMALL | dict(num_hidden_layers=7, hidden_size=24, head_dim=16), sliding_window=7,
               hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=16, tie_word_embeddings=True), "pieces", 16),
    "phi3": (Phi3Config(**SMALL | dict(max_position_embeddings=256), original_max_position_embeddings=64,
             sliding_window=None, rope_parameters=LONGROPE), "pieces with a blank before", 16),
    "phi4": (Phi3Config(**SMALL, sliding_window=None, tie_word_embeddings=True, original_max_position_embeddings=128,
             rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.75,
                                  original_max_position_embeddings=128)), "gpt-4o", 16),
    "granite": (GraniteConfig(**SMALL, **make_fixtures.GRANITE, tie_word_embeddings=True), "refact", 16),
    "olmo2": (Olmo2Config(**SMALL), "dbrx", 16),
    "smollm3": (SmolLM3Config(**SMALL | dict(num_hidden_layers=4), no_rope_layer_interval=4, tie_word_embeddings=True),
                "smaug-bpe", 16),
    "lfm2": (Lfm2Config(**SMALL | dict(num_hidden_layers=3), layer_types=make_fixtures.kinds("conv full conv"), block_auto_adjust_ff_dim=False,
             tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=10000.0)), "lfm2", 16),
}


def byte_level_tokenizer(pre, directory):
    """tokenizer.json as checkpoints with such a pre-tokenizer have it, trained on a page of text."""
    sequence, digits, level, split = pre_tokenizers.Sequence, pre_tokenizers.Digits, shapes.level, shapes.split
    steps = {"llama-bpe": [split(shapes.LLAMA3), level(False)], "smollm": [digits(True), level(True)],
             "tekken": [split(shapes.TEKKEN), level(False)], "qwen2": [split(shapes.QWEN2), level(False)],
             "gpt-4o": [split(shapes.CASED), level(False)]}
    steps |= {"refact": steps["smollm"], **{name: steps["llama-bpe"] for name in ("dbrx", "smaug-bpe", "lfm2")}}
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    data = shapes.train(sequence(steps[pre]), 480, special, normalizers.NFC() if pre == "qwen2" else None)
    opens = pre in ("llama-bpe", "tekken", "lfm2")
    shapes.finish(data, decoders.ByteLevel(), shapes.template(data, ["<s>"]) if opens else None, common=False,
                  ignore_merges=opens)
    data["added_tokens"].append(dict(data["added_tokens"][-1], id=len(data["model"]["vocab"]), content="<think>", special=False))
    (directory / "tokenizer.json").write_text(json.dumps(data))
    (directory / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="GPT2Tokenizer" if pre == "gpt-4o" else "PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>",
        chat_template="{{ messages[0].content }}")))


def piece_tokenizer(blank_before, directory):
    """tokenizer.model, and the tokenizer.json that Transformers makes of it."""
    pieces = ["\n\n", "\n\n\n", "▁▁", "▁▁▁"] if not blank_before else []
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(shapes.CORPUS.split("\n")), model_prefix=str(directory / "tokenizer"), vocab_size=700,
        model_type="bpe", byte_fallback=True, add_dummy_prefix=blank_before, normalization_rule_name="identity",
        remove_extra_whitespaces=False, character_coverage=0.99, unk_id=2, bos_id=0, eos_id=1, minloglevel=2,
        user_defined_symbols=["<turn>"] + pieces)
    kind = "LlamaTokenizer" if blank_before else "GemmaTokenizer"
    (directory / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class=kind, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True, add_prefix_space=blank_before)))
    transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(directory)
    # The files of Llama 2 and Phi-3 are older: a blank comes by a normalizer, and the tokens are in the config, too.
    data = json.loads((directory / "tokenizer.json").read_text())
    if blank_before:
        prepend, replace = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        data["normalizer"] = json.loads(normalizers.Sequence([prepend, replace]).__getstate__())
        data["pre_tokenizer"] = None
    (directory / "tokenizer.json").write_text(json.dumps(data))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {token["id"]: token for token in data["added_tokens"]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def make(name, out, scratch):
    config, pre, bits = CASES[name]
    directory = scratch / name
    directory.mkdir()
    piece_tokenizer("blank" in pre, directory) if pre.startswith("pieces") else byte_level_tokenizer(pre, directory)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    config.vocab_size = len(tokenizer) + 3  # as many have rows that no token needs
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    make_fixtures.fill(model, 0)
    model.to(torch.bfloat16)
    model.save_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    prompt = torch.randint(3, config.vocab_size, (24,)).tolist()
    logits = make_fixtures.logits_of(model.eval(), prompt)[-1].tolist()

    from conversion import base, get_model_class  # llama.cpp's
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    types = {16: base.gguf.LlamaFileType.MOSTLY_BF16, 8: base.gguf.LlamaFileType.MOSTLY_Q8_0}
    converter = get_model_class(config.architectures[0] if config.architectures else model.config.architectures[0])
    with torch.inference_mode():
        converter(directory, types[bits], out / f"{name}.gguf").write()
    print(f"{name:14} {(out / f'{name}.gguf').stat().st_size:7} bytes, {config.vocab_size} ids")
    return dict(prompt_ids=prompt, last_logits=[round(x, 6) for x in logits],
                ids=shapes.checksum(tokenizer.encode(text) for text in shapes.odd_texts()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/fixtures/gguf"))
    parser.add_argument("--only", nargs="*", choices=list(CASES))
    arguments = parser.parse_args()
    sys.path.insert(1, str(arguments.llama_cpp))
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "expected.json"
    expected = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.only or CASES:
            expected[name] = make(name, arguments.out, pathlib.Path(scratch))
    path.write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
