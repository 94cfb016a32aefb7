#!/usr/bin/env python3
"""Two pictures of what a cache costs the text: recall against distance, and KL divergence against bytes.

    ./llm eval --all --json > eval.json
    plot_eval.py eval.json --out docs/quality.png

Texts without questions (llm eval -f my.txt) have no recall: then the second picture stands alone.
"""
import json

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

from stories_text import Parser


def label(cache):
    types = cache["type_k"] if cache["type_k"] == cache["type_v"] else f"K {cache['type_k']}, V {cache['type_v']}"
    if cache["layout"] == "ring":
        return f"{types}, ring {cache['window']} + {cache['sinks']}"
    return types if cache["layout"] == "contiguous" else f"{types}, {cache['layout']}"


def plot_recall(axes, caches):
    # Lines that would lie on one another are drawn once, under all their names.
    lines = {}
    for cache in caches:
        points = tuple((entry["distance"], 100 * entry["right"] / entry["questions"]) for entry in cache["recall"])
        if points:
            lines.setdefault(points, []).append(label(cache))
    for points, names in lines.items():
        x, y = zip(*points)
        shown = "; ".join(names[:4]) + (f"; {len(names) - 4} more" if len(names) > 4 else "")
        axes.plot([at + 100 for at in x], y, marker="o", label=shown)
    axes.set_xlabel("tokens between a fact and the answer that needs it")
    axes.set_ylabel("answers right, %")
    axes.set_ylim(-3, 103)
    axes.legend(fontsize=7, loc="center right")
    axes.grid(alpha=0.3)


def plot_bytes(axes, caches):
    markers = {"contiguous": "o", "paged": "s", "ring": "^"}
    labelled = []  # labels of neighbours go above and below their points in turn
    for cache in caches:
        if not cache["kl"] or cache["kl"] <= 0:  # the reference; null where nothing was read
            continue
        x, y = cache["bytes_per_token"], cache["kl"]
        axes.plot([x], [y], marker=markers.get(cache["layout"], "D"), color="C0" if cache["layout"] != "ring" else "C3")
        near = sum(abs(x / a - 1) < 0.3 and 0.5 < y / b < 2 for a, b in labelled)
        axes.annotate(label(cache), (x, y), fontsize=7, xytext=(4, -10 if near % 2 else 4), textcoords="offset points")
        labelled.append((x, y))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
    axes.set_xlabel("bytes a token of the longest text, metadata included")
    axes.set_ylabel("KL divergence to the f32 cache, nats a token")
    axes.grid(alpha=0.3, which="both")
    axes.margins(x=0.2)


def read_eval(path, parser):
    """The caches of a file that `llm eval --json` wrote."""
    try:
        with open(path) as file:
            caches = json.load(file)["results"]
        assert caches and all({"layout", "kl", "recall", "bytes_per_token"} <= cache.keys() for cache in caches)
        return caches
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        parser.error(f"{path}: expected the output of llm eval --json with one cache or more: {error!r}")


def main():
    parser = Parser(description="Draws recall and quality of caches.")
    parser.add_argument("eval", metavar="EVAL.json", help="output of llm eval --json")
    parser.add_argument("--out", required=True, metavar="FILE.png")
    args = parser.parse_args()
    caches = read_eval(args.eval, parser)
    plots = [plot_recall, plot_bytes] if any(cache["recall"] for cache in caches) else [plot_bytes]
    figure, panels = plt.subplots(1, len(plots), figsize=(6 * len(plots), 4.6), squeeze=False)
    for plot, panel in zip(plots, panels[0]):
        plot(panel, caches)
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
