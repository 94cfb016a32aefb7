#!/usr/bin/env python3
"""How often a draft's guess is the token that the target draws at random, by how it guesses; over held-out stories.

    which_guess.py [--llm ./llm] [--stories 12]

likeliest  the token that the draft finds likeliest
same u     both draw by the same uniform number, each from its likeliest token on, as sample() does
same ids   the same, in the order of ids
Gumbel     both take the largest of log p + Gumbel noise, with the same noise for a token
1 - TV     the most that a guess with the draft's own distribution can reach, and what the rule of Leviathan reaches
Draws at another temperature than the target's are in columns of their own: x 2 doubles the draft's logits.
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

import numpy as np

TOOLS = pathlib.Path(__file__).resolve().parent
SETTINGS = ((0.5, 1.0), (0.8, 0.95), (1.0, 1.0), (1.5, 1.0))  # temperature, top-p


def logits(llm, model, text):
    with tempfile.TemporaryDirectory() as folder:
        file, rows = pathlib.Path(folder) / "text", pathlib.Path(folder) / "rows.npy"
        file.write_text(text)
        subprocess.run([llm, "generate", "-m", TOOLS / model, "-f", file, "-n", "1", "--dump-logits", rows],
                       check=True, capture_output=True)
        return np.load(rows).astype(float)


def distribution(rows, temperature, top_p):
    """Probabilities, and the ids from the likeliest on."""
    p = np.exp((rows - rows.max(1, keepdims=True)) / temperature)
    order = np.argsort(-p, 1, kind="stable")
    sorted_p = np.take_along_axis(p / p.sum(1, keepdims=True), order, 1)
    sorted_p[np.cumsum(sorted_p, 1) - sorted_p >= top_p] = 0
    np.put_along_axis(p, order, sorted_p / sorted_p.sum(1, keepdims=True), 1)
    return p, order


def drawn(p, order, u):
    at = (np.cumsum(np.take_along_axis(p, order, 1), 1) <= u).sum(1, keepdims=True)
    return np.take_along_axis(order, np.minimum(at, p.shape[1] - 1), 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", default="./llm")
    parser.add_argument("--stories", type=int, default=12)
    options = parser.parse_args()
    lines = (TOOLS / "builtin" / "heldout.jsonl").read_text().splitlines()[:options.stories]
    texts = [json.loads(line)["text"] for line in lines]
    target, draft = (np.concatenate([logits(options.llm, model, text) for text in texts]) for model in ("builtin", "draft"))
    random = np.random.default_rng(0)
    print(f"{len(target)} positions\n   T  top-p  likeliest  same u  x 2  same ids  Gumbel  x 2  1 - TV")
    for temperature, top_p in SETTINGS:
        p, order = distribution(target, temperature, top_p)
        found = [np.take_along_axis(p, draft.argmax(1)[:, None], 1).mean()]
        for sharper, ways in ((1, ("u", "ids", "gumbel")), (2, ("u", "gumbel"))):
            q, draft_order = distribution(draft, temperature / sharper, top_p)
            ids = np.broadcast_to(np.arange(p.shape[1]), p.shape)
            for way in ways:
                u, noise = random.random((len(p), 1)), -np.log(-np.log(random.random(p.shape)))
                with np.errstate(divide="ignore"):
                    pairs = {"u": lambda: (drawn(p, order, u), drawn(q, draft_order, u)),
                             "ids": lambda: (drawn(p, ids, u), drawn(q, ids, u)),
                             "gumbel": lambda: ((np.log(p) + noise).argmax(1), (np.log(q) + noise).argmax(1))}
                    found.append(np.equal(*pairs[way]()).mean())
        best = np.minimum(p, distribution(draft, temperature, top_p)[0]).sum(1).mean()
        likeliest, same_u, same_ids, gumbel, sharper_u, sharper_gumbel = found
        print(f"{temperature:4}{top_p:7}{likeliest:11.3f}{same_u:8.3f}{sharper_u:6.3f}{same_ids:9.3f}{gumbel:8.3f}"
              f"{sharper_gumbel:6.3f}{best:8.3f}")


if __name__ == "__main__":
    main()
