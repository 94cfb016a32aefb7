#!/usr/bin/env python3
"""Draws loss and answer accuracy over the training steps from the loss.csv files of train.py.

    plot_loss.py builtin/loss.csv draft/loss.csv --out builtin/loss.png
"""
import csv
import os

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

from stories_text import Parser


def main():
    parser = Parser(description="Draws loss curves.")
    parser.add_argument("csv", nargs="+", metavar="loss.csv")
    parser.add_argument("--out", required=True, metavar="FILE.png")
    args = parser.parse_args()
    figure, panels = plt.subplots(1, len(args.csv), figsize=(5 * len(args.csv), 3), squeeze=False)
    for panel, path in zip(panels[0], args.csv):
        try:
            with open(path) as file:
                rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
        except (OSError, ValueError, TypeError) as error:
            parser.error(f"{path}: {error}")
        if not rows:
            parser.error(f"{path}: no steps in it")
        steps = [row["step"] for row in rows]
        panel.plot(steps, [row["loss"] for row in rows], color="tab:blue", linewidth=1)
        panel.set_title(os.path.basename(os.path.dirname(os.path.abspath(path))))
        panel.set_xlabel("step")
        panel.set_ylabel("loss (answers weigh 10)", color="tab:blue")
        panel.set_ylim(0, 3)
        accuracy = panel.twinx()
        accuracy.plot(steps, [100 * row["answer_accuracy"] for row in rows], color="tab:orange", linewidth=1)
        accuracy.set_ylim(0, 102)
        accuracy.set_ylabel("training answers right, %", color="tab:orange")
        for before, row in zip([{"step": 0, "context": 0}] + rows, rows):
            if row["context"] != before["context"]:
                panel.axvline(before["step"], color="grey", linewidth=0.5)
                panel.text(before["step"], 2.0, f" {row['context']:.0f} tokens", va="top", fontsize=7, color="grey",
                           rotation=90)
    figure.tight_layout()
    figure.savefig(args.out, dpi=80)


if __name__ == "__main__":
    main()
