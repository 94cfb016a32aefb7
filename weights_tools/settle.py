#!/usr/bin/env python3
"""Settles a trained checkpoint: where two tokens were about equally likely, one becomes clearly likelier.

    settle.py builtin --out builtin
    settle.py builtin --out builtin --seed 2 --rounds 2     # again, with other texts

An instrument for caches must not toss coins. A cache in bf16 moves a logit by a tenth or two; where the two
best tokens are closer than that, it may choose another word than a cache in f32, and from there on another
story, although it forgot nothing. So this last stage of training adds to the loss, at every position, what the
two best logits lack of a distance of `MARGIN`; on training stories, and on texts that the model continues greedily
itself from beginnings of many kinds, where it must decide alone.
"""
import os
import random
import sys
import time

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from stories_text import Parser, tell
from train import CONTEXT, END, PHASES, batch_of, forward, load, save

MARGIN = 1.5        # logits
MARGIN_WEIGHT = 2.0
RATE = 3e-4
ROWS = 3            # stories in a step, and as many continued texts
FIRST_STORY = 900_000_000
FIXED = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight")  # as in train.py


def beginnings(tokenizer, count, rng):
    """Ids of `count` beginnings: the first words of a story, or a few words from anywhere in one."""
    end = tokenizer.token_to_id(END)
    result = []
    for index in range(count):
        ids = tokenizer.encode(tell("train", FIRST_STORY + rng.randrange(10**6), rng.randint(4, 10), 700).text).ids[1:]
        start = 0 if rng.random() < 0.5 else rng.randrange(len(ids) - 40)
        result.append([end] + ids[start:start + rng.randint(1, 30)])
    return result


def continue_greedily(path, prompts, end):
    """Each prompt with its greedy continuation up to the context, (prompts, CONTEXT + 1); past an end: ends."""
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), end)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt):] = torch.tensor(prompt)
        mask[row, longest - len(prompt):] = 1
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=mask, max_length=CONTEXT + 1, do_sample=False,
                             pad_token_id=end)
    result = torch.full((len(prompts), CONTEXT + 1), end)
    for row, prompt in enumerate(prompts):
        text = out[row, longest - len(prompt):]
        result[row, :len(text)] = text[:CONTEXT + 1]
    return result


def settle(path, out, rounds, steps, texts, seed):
    weights, shape, tokenizer = load(path)
    end = tokenizer.token_to_id(END)
    learned = [w.requires_grad_() for name, w in weights.items() if name not in FIXED]
    optimizer = torch.optim.AdamW(learned, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    phase = PHASES["builtin"][-1]
    phase = type(phase)(phase.steps, CONTEXT, ROWS, phase.facts, phase.plain, phase.shortest, phase.reach)
    rng, start, step, total = random.Random(seed), time.time(), 0, rounds * steps
    for number in range(rounds):
        print(f"round {number + 1}/{rounds}: continuing {texts} texts", file=sys.stderr, flush=True)
        own = continue_greedily(path if number == 0 else out, beginnings(tokenizer, texts, rng), end)
        for _ in range(steps):
            ids, _, weight, _ = batch_of(phase, tokenizer, FIRST_STORY + (seed - 1) * 1_000_000 + step * ROWS)
            mine = own[torch.tensor(rng.sample(range(texts), ROWS))]
            rows = torch.cat((ids, mine))
            # A text counts up to its first end; what fills the row behind it does not.
            alive = (mine[:, 1:] == end).cumsum(-1) - (mine[:, 1:] == end).long() == 0
            counts = torch.cat((weight > 0, alive)).float()
            with torch.autocast("cpu", torch.bfloat16):
                logits = forward(weights, shape, rows[:, :-1])
            logits = logits.float()
            stories = F.cross_entropy(logits[:ROWS].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            best = logits.topk(2).values
            lacking = F.relu(MARGIN - (best[..., 0] - best[..., 1]))
            undecided = (lacking * counts).sum() / counts.sum()
            loss = (stories * weight.flatten()).sum() / weight.sum() + MARGIN_WEIGHT * undecided
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1, (step + 1) / 10, (total - step) / (0.5 * total))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                close = ((best[..., 0] - best[..., 1] < 0.25).float() * counts).sum() / counts.sum()
                left = (time.time() - start) / step * (total - step)
                print(f"step {step}/{total}  loss {loss.item():.3f}  lacking {undecided.item():.4f}  closer than 0.25: "
                      f"{100 * close.item():.2f} %  {left / 60:.0f} min left", file=sys.stderr, flush=True)
        save(out, weights, shape, tokenizer)


def main():
    parser = Parser(description="Widens the distance between the two likeliest tokens of a trained checkpoint.")
    parser.add_argument("path", metavar="DIR")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of each round")
    parser.add_argument("--texts", type=int, default=48, help="continued greedily in each round")
    parser.add_argument("--seed", type=int, default=1, help="chooses the texts")
    args = parser.parse_args()
    if not os.path.exists(os.path.join(args.path, "config.json")):
        parser.error(f"{args.path}: no config.json there: give a checkpoint that train.py wrote")
    settle(args.path, args.out, args.rounds, args.steps, args.texts, args.seed)


if __name__ == "__main__":
    main()
