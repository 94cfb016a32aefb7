#!/usr/bin/env python3
"""Writes tests/fixtures/configs/expected.json: what a cache takes, counted from each config.json there.

    python3 weights_tools/count_caches.py [--configs tests/fixtures/configs]

Per config: the positions counted (32,768, or the model's context where that is shorter), its layers, how many of them
store rows of keys and values, how many store the state of a convolution, and the bytes of a cache with rows of 2-byte
numbers and states of 4-byte numbers. A layer with a window stores as many rows as the window has positions; a layer
that reads the rows of another stores none. With torch and transformers (5.24) also the parameters of the text model,
where a tied head counts once, and whether it is tied.

The configs have the sizes and the keys of the published models. The factors of phi-3-mini-128k are made up and only
have the right number; granite-swa-2b is Transformers' default, and in those of gemma-4, ministral-3 and lfm2 some keys
that say nothing about sizes may differ.
"""
import argparse
import json
import pathlib


def kinds_of(config):
    layers = range(config["num_hidden_layers"])
    if config["model_type"] == "phi3":  # all layers have a window
        return ["sliding_attention" for _ in layers]
    if "layer_types" in config:
        return config["layer_types"]
    if "full_attn_idxs" in config:
        return ["full_attention" if layer in config["full_attn_idxs"] else "conv" for layer in layers]
    every = config.get("sliding_window_pattern", 1)
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in layers]


def count(config):
    config = config.get("text_config", config)
    positions = min(32768, config["max_position_embeddings"])
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    width = config.get("head_dim") or hidden // config["num_attention_heads"]
    rows = states = total = 0
    for kind in kinds_of(config)[:layers - config.get("num_kv_shared_layers", 0)]:
        if kind == "conv":
            states += 1
            total += config["conv_L_cache"] * hidden * 4
            continue
        rows += 1
        full = kind == "full_attention"
        row = config["num_key_value_heads"] * (config.get("global_head_dim", width) if full else width) * 2
        total += 2 * row * (positions if full else min(config["sliding_window"], positions))
    return dict(positions=positions, layers=layers, layers_with_rows=rows, layers_with_state=states, cache_bytes=total)


def weigh(directory):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    config = AutoConfig.from_pretrained(directory)
    auto = AutoModelForImageTextToText if config.model_type == "mistral3" else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    model.tie_weights()
    text = {name: weight.numel() for name, weight in model.named_parameters()
            if not any(part in name for part in ("vision", "audio", "multi_modal"))}
    return dict(parameters=sum(text.values()), tied="lm_head.weight" not in text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=pathlib.Path, default=pathlib.Path("tests/fixtures/configs"))
    directory = parser.parse_args().configs
    found = {path.parent.name: {**count(json.loads(path.read_text())), **weigh(path.parent)}
             for path in sorted(directory.glob("*/config.json"))}
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in found.items()]
    (directory / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
