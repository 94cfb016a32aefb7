#!/usr/bin/env python3
"""Draws what the cache saves: milliseconds a token, naive and cached, from `llm diff --json`.

    ./llm diff -p "Once upon a time" -n 1200 --json > diff.json
    python3 weights_tools/plot_diff.py diff.json --out docs/naive_and_cached.png
"""
import json

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

from stories_text import Parser


def read_diff(path, parser):
    """(tokens of the prompt, steps) from a file that `llm diff --json` wrote."""
    try:
        with open(path) as file:
            diff = json.load(file)
        prompt, steps = len(diff["prompt_tokens"]), diff["steps"]
        assert len(steps) >= 2 and {"naive_seconds", "cached_seconds"} <= steps[0].keys()
        return prompt, steps
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        parser.error(f"{path}: expected the output of llm diff --json with two steps or more: {error!r}")


def running_median(values, width=15):
    """Each value's median with its neighbours, so that one interrupted step does not hide the others."""
    half = width // 2
    windows = (sorted(values[max(0, i - half):i + half + 1]) for i in range(len(values)))
    return [window[len(window) // 2] for window in windows]


def main():
    parser = Parser(description="Draws milliseconds a token against the position, naive and cached.")
    parser.add_argument("json", metavar="diff.json")
    parser.add_argument("--out", required=True, metavar="FILE.png")
    args = parser.parse_args()
    prompt, steps = read_diff(args.json, parser)
    positions = [prompt + i for i in range(1, len(steps))]  # step 0 is the prompt's
    figure, (each, total) = plt.subplots(1, 2, figsize=(10, 3.4))
    for name, color in (("naive", "tab:red"), ("cached", "tab:blue")):
        milliseconds = [1e3 * step[name + "_seconds"] for step in steps[1:]]
        each.plot(positions, running_median(milliseconds), color=color, label=name)
        sums = [sum(milliseconds[:i + 1]) / 1e3 for i in range(len(milliseconds))]
        total.plot(positions, sums, color=color, label=name)
        total.annotate(f"{sums[-1]:.2f} s", (positions[-1], sums[-1]), color=color, ha="right", va="bottom")
    each.set_yscale("log")
    each.set_ylabel("ms for the next token")
    total.set_ylabel("seconds in all")
    for panel in (each, total):
        panel.set_xlabel("position")
        panel.grid(alpha=0.3)
        panel.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
