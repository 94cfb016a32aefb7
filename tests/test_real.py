#!/usr/bin/env python3
"""A real model (make smollm2) against Transformers (weights_tools/make_real_goldens.py), and its caches, batches, drafts and
turns against each other. Run by `make test-real`, from the repository's root, with ./llm built.
"""
import filecmp
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "weights_tools"))
import race
import real_figures
from make_tokenizer_fixtures import odd_texts

MODEL = ["-m", "models/SmolLM2-135M-Instruct"]
GOLDEN = json.loads((ROOT / "tests/fixtures/real.json").read_text())
FIGURES = json.loads(real_figures.FIXTURE.read_text())
LAYOUTS = ("contiguous", "paged", "ring")
# What each type of a cache costs this model, for 100 tokens that follow the first text: how the verdict of diff begins, and
# the mean KL to the f32 cache, in nats.
TYPES = {"f32": ("the same", 0), "f16": ("as good as f16", 1.38e-7), "bf16": ("changes a word in", 7.97e-6),
         "fp8": ("changes a word in", 1.44e-3), "int8": ("changes a word in", 2.55e-4),
         "int4": ("changes a word in", 1.85e-3), "int2": ("breaks it", 0.114)}


def llm(*arguments, text=None, good=(0,)):
    done = subprocess.run(["./llm", *map(str, arguments)], cwd=ROOT, input=text, capture_output=True, text=True)
    assert done.returncode in good, (arguments, done.returncode, done.stderr[-500:])
    return done


def said(*arguments, **more):
    return json.loads(llm(*arguments, "--json", **more).stdout)


def ids(_):
    for text, expected in zip(odd_texts(), GOLDEN["ids"]):
        found = said("tokenize", *MODEL, "-p", text)["ids"]
        assert found == expected, (text, found, expected)


def largest_logits(scratch):
    """The twenty likeliest tokens, in their order but where two are closer than float32 can tell, and their logits."""
    for text in GOLDEN["texts"]:
        listed = ",".join(map(str, text["ids"]))
        llm("generate", *MODEL, "--ids", listed, "-n", 0, "--kv", "f32", "--dump-logits", scratch / "logits.npy")
        rows = np.load(scratch / "logits.npy", mmap_mode="r")
        for position, tokens, logits in zip(text["positions"], text["tokens"], text["logits"]):
            row = rows[position]
            error = np.abs(row[tokens] - logits).max()
            assert error < 1e-3, f"position {position}: a logit is {error} off"
            best = np.sort(row)[::-1][:20]
            assert np.abs(best - logits).max() < 1e-3, f"position {position}: other tokens are likelier"


def greedy(_):
    for case in GOLDEN["greedy"]:
        listed = ",".join(map(str, case["ids"]))
        for cache in ("none", "contiguous"):
            flags = ["--cache", cache] + (["--kv", "f32"] if cache != "none" else ["-n", 20])
            found = said("generate", *MODEL, "--ids", listed, "-n", 100, "--ignore-eos", *flags)["tokens"]
            assert found == case["next"][:len(found)], (cache, found, case["next"])


def chat(_):
    lines = "".join(turn["user"] + "\n" for turn in GOLDEN["chat"])
    kept = llm("chat", *MODEL, "--json", "-n", 32, "--kv", "f32", text=lines).stdout
    for turn, expected in zip(map(json.loads, kept.splitlines()), GOLDEN["chat"]):
        assert turn["prompt_ids"] == expected["prompt_ids"], (turn["prompt_ids"], expected["prompt_ids"])
        assert turn["tokens"] == expected["tokens"], (turn["tokens"], expected["tokens"])


def turns(scratch):
    """A turn has the bits that it has where all of the conversation is read again, and its draft's."""
    def rows(*flags):
        lines = "".join(turn["user"] + "\n" for turn in GOLDEN["chat"])
        found = llm("chat", *MODEL, "--json", "-n", 12, *flags, text=lines).stdout
        return [[json.loads(line)[key] for key in ("prompt_ids", "tokens", "text")] for line in found.splitlines()]

    usual = rows("--kv", "f32")
    assert rows("--cache", "none") == usual
    assert rows("--kv", "f32", "--draft", "ngram") == usual
    assert rows("--kv", "f32", "--cache", "paged") == usual


def caches(_):
    text = GOLDEN["texts"][0]["text"]
    kinds = ["--cache", ",".join(LAYOUTS), "--kv", ",".join(TYPES)]
    found = said("diff", *MODEL, "--against", "full", "-p", text, "-n", 100, "--ignore-eos", *kinds, good=(0, 1))["caches"]
    assert len(found) == len(LAYOUTS) * len(TYPES), len(found)
    for cache in found:
        name = cache["cache"]["layout"] + " " + cache["cache"]["type_k"]
        verdict, expected = TYPES[cache["cache"]["type_k"]]
        kl = float(np.mean([step["kl"] for step in cache["steps"]]))
        assert cache["verdict"].startswith(verdict), (name, cache["verdict"])
        assert abs(kl - expected) <= 0.1 * expected, f"{name}: KL {kl:.3e}, expected {expected:.3e}"


def batches(scratch):
    """Each request in company has the bits that it has alone; drafts change nothing."""
    requests = [dict(id=str(i), prompt=text["text"], n=24, seed=i, temp=i % 2) for i, text in enumerate(GOLDEN["texts"] * 2)]
    (scratch / "requests.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    for more in ([], ["--draft", "ngram"], ["--cache", "paged", "--kv", "int8"]):
        done = llm("batch", *MODEL, "-f", scratch / "requests.jsonl", "--against", "alone", *more)
        assert json.loads(done.stdout.splitlines()[-1])["same_alone"] == len(requests), done.stdout[-500:]


def short_figures(scratch):
    """What the docs say of a real text was measured by real_figures.py: a beginning of the text gives the same again."""
    expected, found = FIGURES["short"], real_figures.short(real_figures.TEXT.read_text(), scratch)
    assert found["needles"] == expected["needles"], (found["needles"], expected["needles"])
    assert list(found["caches"]) == list(expected["caches"]), list(found["caches"])
    for name, row in found["caches"].items():
        for key, value in expected["caches"][name].items():
            error = abs(row[key] - value) / max(value, 1e-9)
            assert error <= (0.1 if key == "kl" else 1e-3), f"{name}: {key} {row[key]}, expected {value}"


def guesses(scratch):
    """N-grams are as often right as was measured, and the engine's guesses are those of real_figures.py."""
    found = real_figures.guesses(real_figures.TEXT.read_text(), scratch)
    assert found == FIGURES["guesses"], (found, FIGURES["guesses"])
    for name in real_figures.PROMPTS:
        (scratch / "prompt.txt").write_text(real_figures.prompt(real_figures.TEXT.read_text(), name) + "\n")
        done = said("diff", *MODEL, "--draft", "ngram", "-f", scratch / "prompt.txt", "-n", 128)
        for step in done["steps"]:  # none where it pauses, one where it tries whether guesses pay again
            written = done["prompt_ids"] + [token for each in done["steps"] if each["position"] < step["position"]
                                            for token in each["tokens"]]
            assert step["guessed"] == real_figures.guess(written)[:len(step["guessed"])], (name, step)
        assert done["draft"]["accepted"] > 0, (name, done["draft"])


def peers(scratch):
    """race.py gives the others these weights: its GGUF comes back as the same directory. And it has rows of a real text."""
    directory = ROOT / MODEL[1]
    gguf = race.make(scratch, "bf16.gguf", "smollm2-135m", directory)
    subprocess.run([sys.executable, ROOT / "weights_tools/from_gguf.py", gguf, scratch / "back"], check=True, capture_output=True)
    names = sorted(path.name for path in directory.iterdir())
    assert filecmp.cmpfiles(directory, scratch / "back", names, shallow=False)[0] == names
    for name in ("llama-bench", "llama-lookup"):
        (scratch / name).write_text("#!/bin/sh\necho decoded 8 tokens in 1.0 seconds, speed: 8.0 t/s\n")
        (scratch / name).chmod(0o755)
    words = ["--rounds", "1", "--repeats", "1", "--tokens", "8", "--rows", "ngram/bf16/chat", "--work", scratch, "--json"]
    done = subprocess.run([sys.executable, ROOT / "weights_tools/race.py", "--llama-bench", scratch / "llama-bench", *words],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    own, other = json.loads(done.stdout)["results"]
    assert own["row"] == other["row"] == "ngram/bf16/chat" and own["tokens_per_second"][0] > 0, own
    assert (other["engine"], other["tokens_per_second"]) == ("llama.cpp", [8.0]), other


def commands(_):
    """The commands of two chapters that need the model print what is written there."""
    for path in ("docs/12_guess_then_check.md", "docs/13_a_conversation.md"):
        for block in re.findall(r"```console unrun\n(.*?)```", (ROOT / path).read_text(), re.S):
            script = [line[2:] for line in block.splitlines() if line[:2] in ("$ ", "  ")]
            done = subprocess.run(["bash", "-c", "\n".join(script)], cwd=ROOT, capture_output=True, text=True)
            for line in block.splitlines():
                shown = line.removesuffix("...").strip()
                assert line[:2] in ("$ ", "  ") or shown in done.stdout + done.stderr, (path, line, done.stdout, done.stderr)


def documented(_):
    """Each figure of the docs is one of tests/fixtures/real_figures.json."""
    for path, lines in real_figures.lines(FIGURES).items():
        text = (ROOT / path).read_text()
        for line in lines:
            assert line in text, f"{path} does not say: {line}"


def main():
    cases = [ids, largest_logits, greedy, chat, turns, caches, batches, documented]
    if real_figures.TEXT.exists():
        cases += [short_figures, guesses, peers, commands]
    else:
        print("build/history.txt is not there (make build/history.txt): figures of a real text are not measured again")
    failed = 0
    for case in cases:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                case(pathlib.Path(scratch))
            except AssertionError as wrong:
                failed += 1
                print(f"{case.__name__}: {wrong}")
    print(f"[doctest] test cases: {len(cases)} | {len(cases) - failed} passed | {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
