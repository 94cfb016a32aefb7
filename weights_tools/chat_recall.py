#!/usr/bin/env python3
"""What a chat forgets when its context is full: facts of held-out stories, told a turn a line and asked for at the end.

    chat_recall.py [--context 256] [--llm ./llm] [--json]

Each line of a story of builtin/heldout_mixed.jsonl is a turn of `llm chat` with the built-in model, which answers with
the rest of the line; then come the questions. An answer is right if it is the true sentence. Once all of it fits the
context; then the oldest turns are dropped (--when-full drop), or the context is a ring with as many positions.
"""
import argparse
import json
import pathlib
import subprocess

here = pathlib.Path(__file__).resolve().parent


def talk(llm, story, flags):
    """The turns of a chat that tells the story up to its first question, and asks all of them."""
    questions = story["questions"]
    told = story["text"][: min(q["question_char"] for q in questions)].rstrip("\n").split("\n")
    lines = told + [q["question"] for q in questions]
    result = subprocess.run([llm, "chat", "--template", "plain", "--json", *flags], input="\n".join(lines) + "\n", capture_output=True,
                            text=True, check=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--llm", default="./llm")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    context = str(options.context)
    policies = {"all fits": [], "drop": ["--when-full", "drop", "-c", context, "-n", "32"],
                "ring": ["--when-full", "ring", "--window", context]}
    stories = [json.loads(line) for line in open(here / "builtin" / "heldout_mixed.jsonl")]
    rows = []
    for name, flags in policies.items():
        row = {"policy": name, "questions": 0, "right": 0, "near": 0, "near_right": 0, "read": 0, "first_token_ms": []}
        for story in stories:
            turns = talk(options.llm, story, flags)
            row["read"] += sum(turn["read"] for turn in turns)
            row["first_token_ms"] += [turn["seconds_to_first_token"] * 1e3 for turn in turns]
            for question, turn in zip(story["questions"], turns[-len(story["questions"]):]):
                right = turn["text"].strip() == question["answer"]
                near = question["distance"] < options.context
                row["questions"] += 1
                row["right"] += right
                row["near"] += near
                row["near_right"] += near and right
        times = sorted(row.pop("first_token_ms"))
        row["median_first_token_ms"] = times[len(times) // 2]
        row["slowest_first_token_ms"] = times[-1]
        rows.append(row)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print("policy     right of questions    of near ones  tokens read   first token: median   slowest")
    for row in rows:
        print(f"{row['policy']:9} {row['right']:6} of {row['questions']:4}    {row['near_right']:6} of {row['near']:4}"
              f"  {row['read']:11} {row['median_first_token_ms']:17.2f} ms {row['slowest_first_token_ms']:6.1f} ms")


if __name__ == "__main__":
    main()
