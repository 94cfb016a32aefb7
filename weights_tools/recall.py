#!/usr/bin/env python3
"""Held-out recall of a checkpoint: are questions about the distant past answered, and only from there?

Asks `--questions` questions of held-out stories whose answer was told `--distance` or more tokens before,
first with the whole past visible, then with a sliding window of the last `--window` tokens. An answer is
right if greedy decoding after "Where is the red key?" gives the whole sentence "The red key is in the
attic.", token by token. (The story is run once: the decoded sentence is the true one exactly if each of
its tokens is the argmax after the true tokens before it. Earlier answers of a story are the true ones.)
Weights are the saved bf16 ones; everything is computed in float32.

    recall.py builtin [--json] [--transformers]

Exit: 0 the bars are met, 1 they are not, 2 wrong input.
"""
import json
import sys

import torch

from stories_text import PLACES, Parser, tell
from train import CONTEXT, forward, load


def ask(weights, shape, tokenizer, questions, distance, window):
    """How many questions and stories, how many right with all and with `window` tokens visible, the distances,
    and the smallest margin (top logit minus the next) at a place word that was right with all visible."""
    result = {"questions": 0, "stories": 0, "all": 0, "window": 0, "distances": []}
    margins = []
    while result["questions"] < questions:
        story = tell("heldout", result["stories"], 10, CONTEXT - 20)
        result["stories"] += 1
        encoding = tokenizer.encode(story.text)
        ids = torch.tensor([encoding.ids])
        picked = []
        for q in story.questions:
            fact, start = encoding.char_to_token(q.fact_char), encoding.char_to_token(q.answer_char)
            place = encoding.char_to_token(q.place_char)
            if start - fact >= distance:
                picked.append((start - fact, start, place))
        picked = picked[:questions - result["questions"]]
        if not picked:
            continue
        full, windowed = (forward(weights, shape, ids, w)[0] for w in (0, window))
        for back, start, place in picked:
            # The answer runs from the token at `start` (" The") to the full stop after the place.
            answer = ids[0, start:place + 2]
            right = bool((full[start - 1:place + 1].argmax(-1) == answer).all())
            result["all"] += right
            result["window"] += bool((windowed[start - 1:place + 1].argmax(-1) == answer).all())
            if right:
                first, second = full[place - 1].topk(2).values.tolist()
                margins.append(first - second)
            result["distances"].append(back)
        result["questions"] += len(picked)
    result["smallest_margin"] = min(margins, default=None)
    return result


def disagreement(path, weights, shape, tokenizer):
    """|logits here - logits of Transformers| / |logits of Transformers|, both f32, over one held-out story."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    text = tell("heldout", 0, 10, CONTEXT - 20).text
    ids = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")["input_ids"]
    if ids[0].tolist() != tokenizer.encode(text).ids:
        raise ValueError("Transformers' tokenizer gives other ids")
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
    return ((forward(weights, shape, ids) - theirs).norm() / theirs.norm()).item()


def main():
    parser = Parser(description="Measures held-out recall of a checkpoint of train.py.")
    parser.add_argument("path", metavar="DIR")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--distance", type=int, default=600, help="tokens between a fact and its answer, at least")
    parser.add_argument("--window", type=int, default=128, help="tokens visible in the second run")
    parser.add_argument("--bar", type=float, default=95, help="least recall with all visible, percent")
    parser.add_argument("--window-bar", type=float, default=40, help="recall with the window stays below, percent")
    parser.add_argument("--transformers", action="store_true", help="compare logits with Transformers too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.questions < 1 or args.window < 1 or not 0 <= args.distance <= CONTEXT // 2:
        parser.error(f"--questions and --window must be positive, --distance between 0 and {CONTEXT // 2}")
    torch.set_num_threads(args.threads)
    try:
        weights, shape, tokenizer = load(args.path)
    except Exception as error:
        print(f"recall.py: {args.path}: {error}", file=sys.stderr)
        return 2
    with torch.no_grad():
        result = ask(weights, shape, tokenizer, args.questions, args.distance, args.window)
    distances = sorted(result.pop("distances"))
    result.update(recall=100 * result.pop("all") / args.questions, window=args.window,
                  window_recall=100 * result.pop("window") / args.questions,
                  nearest=distances[0], median=distances[len(distances) // 2], farthest=distances[-1])
    if args.transformers:
        result["transformers_relative_error"] = disagreement(args.path, weights, shape, tokenizer)
    passed = result["recall"] >= args.bar and result["window_recall"] < args.window_bar
    result["passed"] = passed
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{args.questions} questions of {result['stories']} held-out stories, told {result['nearest']} to "
              f"{result['farthest']} tokens before (median {result['median']}); a guess is right in {100 / len(PLACES):.1f} %")
        print(f"  visible            recall   bar")
        print(f"  everything         {result['recall']:5.1f} %   >= {args.bar:g} %")
        print(f"  last {args.window:4} tokens   {result['window_recall']:5.1f} %   <  {args.window_bar:g} %")
        if result["smallest_margin"] is not None:
            print(f"  smallest margin of a right place word: {result['smallest_margin']:.2f} (logits)")
        if args.transformers:
            print(f"  logits beside Transformers, float32: relative error {result['transformers_relative_error']:.1e}")
        print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
