#!/usr/bin/env python3
"""Draws where a token's time goes: milliseconds a token against the positions in the cache, from `llm bench --json`.

    ./llm bench -m DIR --cache none,contiguous --kv f16 --depth 0,128,256,512,1024 --prefill 128 --json > naive.json
    ./llm bench -m DIR --kv f32,f16,int8,int4,int2 --depth 0,1024,2048,4096,8000 --prefill 128 --json > cached.json
    python3 weights_tools/plot_bench.py naive.json cached.json --out docs/where_the_time_goes.png

Left the naive path beside one cache, right the caches of both files; dashed the roofline of each: what the bytes and
operations of a token take at least, at the rates that were measured around it.
"""
import json

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

from stories_text import Parser


def read_bench(path, parser):
    """{name of a line: [(depth, ms a token, least ms a token)]} from a file that `llm bench --json` wrote."""
    try:
        with open(path) as file:
            results = json.load(file)["results"]
        lines = {}
        for each in results:
            if each["name"] == "prefill":
                continue
            types = sorted({each["type_k"], each["type_v"]})
            name = "naive" if each["name"] == "naive" else "cached, " + " / ".join(types)
            milliseconds = 1e3 * each["seconds"] / each["tokens"]
            lines.setdefault(name, []).append((each["depth"], milliseconds, milliseconds * each["of_roofline"]))
        assert lines
        return lines
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        parser.error(f"{path}: expected the output of llm bench --json with decoding or naive steps: {error!r}")


def draw(panel, lines):
    for name, points in lines.items():
        depths, milliseconds, least = zip(*sorted(points))
        line, = panel.plot(depths, milliseconds, marker="o", markersize=3, label=name)
        panel.plot(depths, least, color=line.get_color(), linestyle="--", linewidth=1)
    panel.set_xlabel("positions in the cache")
    panel.grid(alpha=0.3)
    panel.legend(loc="upper left", fontsize=8)


def main():
    parser = Parser(description="Draws milliseconds a token against the positions in the cache, and the roofline.")
    parser.add_argument("naive", metavar="naive.json", help="llm bench --cache none,contiguous --json")
    parser.add_argument("cached", metavar="cached.json", help="llm bench --kv f16,int8,... --json")
    parser.add_argument("--out", required=True, metavar="FILE.png")
    args = parser.parse_args()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    draw(left, read_bench(args.naive, parser))
    draw(right, read_bench(args.cached, parser))
    left.set_yscale("log")
    left.set_ylabel("ms for the next token")
    right.set_ylim(bottom=0)
    figure.suptitle("measured (solid) and roofline (dashed)", fontsize=9)
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
