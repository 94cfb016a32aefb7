#!/usr/bin/env python3
"""Writes tests/fixtures/real_figures.json: what the docs say of a real model on a real text.

    python3 weights_tools/real_figures.py        needs ./llm, `make smollm2 build/history.txt`, and an hour of a core

    caches    what each cache does to 8,020 tokens read in one go: perplexity, KL divergence to f32
    needles   which facts in such a text are still known at its end (needles.py)
    guesses   how often n-grams are right: about the text itself, and about what the model writes after a piece of it
    short     the same of a beginning of the text, in a minute: what tests/test_real.py measures again
"""
import json
import pathlib
import subprocess
import tempfile

import needles

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ["-m", "models/SmolLM2-135M-Instruct"]
TEXT = ROOT / "build/history.txt"
FIXTURE = ROOT / "tests/fixtures/real_figures.json"
TYPES = ["f16,bf16,fp8,int8,int4,int2"]
PAIRS = [("fp8,int8", "int4"), ("int4", "int8,int2")]
# What is asked for after a piece of the text: as a template of chat has it, or as the text goes on.
PROMPTS = {"chat": "<|im_start|>user\nSum up this text in a few sentences:\n\n{}<|im_end|>\n<|im_start|>assistant\n",
           "summary": "{}\n\nIn short, the text says that", "free": "{}\n\nA year later"}


def said(*words):
    done = subprocess.run(["./llm", *map(str, words), "--json"], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def rows(path, *flags):
    """cache -> its row of `llm eval`."""
    found = said("eval", *MODEL, "-f", path, "--repeats", 1, *flags)["results"]
    ring = lambda row: f"ring {row['window']} + {row['sinks']} " if row["layout"] == "ring" else ""
    return {ring(row) + f"{row['type_k']}/{row['type_v']}": row for row in found}


def caches(path, window):
    found = rows(path, "--kv", *TYPES)
    for type_k, type_v in PAIRS:
        found |= rows(path, "-ctk", type_k, "-ctv", type_v)
    for sinks, types in ((4, "f16,int4"), (0, "f16")):
        found |= rows(path, "--cache", "ring", "--window", window, "--sinks", sinks, "--kv", types)
    return {name: {key: row[key] for key in ("bytes_per_token", "perplexity", "standard_error", "kl")}
            for name, row in found.items()}


def recall(path, window):
    found = rows(path, "--kv", "fp8,int8,int4,int2") | rows(path, "--cache", "ring", "--window", window)
    return {name: row["recall"] for name, row in found.items()}


def guess(tokens, most=4):
    """What look_up() of draft.h guesses: what followed the last three tokens where they came before, or two, or one."""
    best, start = 0, 0
    for at in range(len(tokens) - 1, 0, -1):
        match = 0
        while match < min(3, at) and tokens[at - 1 - match] == tokens[-1 - match]:
            match += 1
        if match > best:
            best, start = match, at
        if best == 3:
            break
    longer = list(tokens)
    for i in range(most if best else 0):
        longer.append(longer[start + i])
    return longer[len(tokens):]


def passes_of(tokens, begin):
    """The passes in which a text is written from `begin` on, with guesses at it by n-grams."""
    passes, first, right = 0, [0, 0], 0
    while begin < len(tokens):
        guesses, rest = guess(tokens[:begin])[:len(tokens) - begin - 1], tokens[begin:]
        same = next(i for i in range(len(rest)) if guesses[i:i + 1] != rest[i:i + 1])
        first[0] += bool(guesses)
        first[1] += same > 0
        passes, right, begin = passes + 1, right + same, begin + same + 1
    return dict(passes=passes, accepted=right, first=first)


def prompt(text, name):
    """The project's beginning and its name, about 400 tokens of the text, and what is asked for."""
    return PROMPTS[name].format(text[text.index("1.1. In the Beginning"):text.index("Chapter 2.")].rstrip())


def guesses(text, scratch):
    """Of the text itself, and of up to 128 tokens that the model writes: greedy, or drawn at temperature 0.8."""
    found = {"text": passes_of(said("tokenize", *MODEL, "-p", text)["ids"], 32)}
    for name in PROMPTS:
        (scratch / "prompt.txt").write_text(prompt(text, name) + "\n")
        for temperature in (0, 0.8):
            words = ["-f", scratch / "prompt.txt", "-n", 128, "--temp", temperature, "-s", 1]
            written = said("generate", *MODEL, *words)
            found[f"{name}, temperature {temperature}"] = passes_of(written["prompt_ids"] + written["tokens"],
                                                                   len(written["prompt_ids"]))
    return found


def short(text, scratch):
    """A beginning of the text, small enough for a test."""
    (scratch / "short.txt").write_text(text[:2400])
    (scratch / "needles.jsonl").write_text(json.dumps(needles.hide(text[:2400])))
    return dict(caches=caches(scratch / "short.txt", 256), needles=recall(scratch / "needles.jsonl", 256))


# ---- What the docs say -------------------------------------------------------------------------------------------


def small(kl):
    """1.1e-6; 0.28 where it is large."""
    return "0" if kl == 0 else f"{kl:.2g}" if kl >= 0.1 else f"{kl:.1e}".replace("e-0", "e-")


def table(found):
    """The rows of `llm eval`, without recall and time."""
    for name, row in found.items():
        ring, types = name.rsplit(" ", 1) if " " in name else ("contiguous", name)
        times = found["f32/f32"]["bytes_per_token"] / row["bytes_per_token"]
        yield (f"{ring:18} {types.split('/')[0]:4} {types.split('/')[1]:4} {row['bytes_per_token']:8.1f} {times:6.2f} "
               f"{row['perplexity']:9.4f} {row['standard_error']:7.4f} {row['kl']:9.2e}")


def known(rows):
    """The cells of a row of needles: right of all, by distance."""
    return " | ".join(f"{each['right']} of {each['questions']}" for each in rows)


def lines(found):
    """file -> what must be in it."""
    rows = found["caches"]
    cells = lambda show, key: " | ".join(show(rows[f"{name}/{name}"][key])
                                         for name in ("f32", "f16", "bf16", "fp8", "int8", "int4", "int2"))
    two = lambda number: f"{number:.2f}"
    last = lambda types: types.split("/")[-1]  # the type of both, or of V; what the row of a ring ends with
    needle_rows = [f"{last(types)} | {known(row)} |" for types, row in found["needles"].items()]
    guesses = [f"| {1 + each['accepted'] / each['passes']:.2f} | {100 * each['first'][1] / each['first'][0]:.0f} % |"
               for each in found["guesses"].values()]
    types = {name: last(name) if name == f"{last(name)}/{last(name)}" else f'"{name}"'
             for name in rows if "ring" not in name}
    return {"docs/quality.md": [*table(rows), *needle_rows],
            "README.md": [f"| perplexity | {cells(two, 'perplexity')} |",
                          f"| KL divergence to f32, nats | {cells(small, 'kl')} |"],
            "docs/07_how_small.md": [two(rows[f"{name}/{name}"]["perplexity"]) for name in ("f32", "int8", "int4", "int2")],
            "docs/12_guess_then_check.md": guesses,
            "docs/explorer.html": [f"{shown}: [{rows[name]['perplexity']:.2f}, {small(rows[name]['kl'])}]"
                                   for name, shown in types.items()]}


def main():
    text = TEXT.read_text()
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        (scratch / "needles.jsonl").write_text(json.dumps(needles.hide(needles.beginning(text))))
        found = dict(caches=caches(TEXT, 2048), needles=recall(scratch / "needles.jsonl", 2048),
                     guesses=guesses(text, scratch), short=short(text, scratch))
    FIXTURE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
