#!/usr/bin/env python3
"""Writes tests/fixtures/real.json: what Transformers makes of a real model (make smollm2), for tests/test_real.py.

    python3 weights_tools/make_real_goldens.py [DIR]        needs torch, transformers and tokenizers

    ids      of 200 odd texts (make_tokenizer_fixtures.py)
    texts    three texts: their ids, and the 20 largest logits, with whose they are, at up to 64 positions of each
    greedy   100 tokens after the beginnings of the texts
    chat     four turns: what the user says, the ids of the conversation so far, and the answer, greedy, 32 tokens at most

All in float32, without a cache for the logits. The weights are not among it.
"""
import json
import pathlib
import sys

import torch
import transformers

import make_tokenizer_fixtures as shapes

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXTS = [
    "The ferry left at six, while the harbour was still dark. Anna stood at the rail with both hands in her pockets and "
    "watched the lights of the town grow small. She had packed one bag, the blue one, and in it lay the letters that her "
    "grandfather had written from the island forty years before. Nobody had answered them then. \"You'll be cold out "
    "there,\" said the man who sold tickets, and she told him that she had been cold in warmer places. By noon the fog "
    "had lifted, and the cliffs rose out of the water as he had described them: grey, white and green.",
    "A hash table stores pairs of a key and a value. A function turns the key into a number, and the number modulo the "
    "size of the table says in which slot the pair belongs. Two keys may want the same slot; this is called a collision. "
    "One answer is to keep a list in each slot. Another is open addressing: the pair goes to the next slot that is free, "
    "and a search walks the same way until it finds the key or an empty slot. When the table is more than two thirds "
    "full, it is copied into one that is twice as large, so that an insertion takes constant time on average.",
    "def mean(numbers):\n    total = 0.0\n    for number in numbers:\n        total += number\n    return total / len(numbers)\n\n\n"
    "def variance(numbers):\n    middle = mean(numbers)\n    return mean([(number - middle) ** 2 for number in numbers])\n\n\n"
    "# What are the mean and the variance of the first five odd numbers, 1, 3, 5, 7 and 9?\nodd = [1, 3, 5, 7, 9]\n"
    "print(mean(odd), variance(odd))  # 5.0 8.0\n",
]
SAYS = ["Name three primary colours.", "Which of them is the colour of the sky?", "Write one short sentence about a cat.",
        "Thank you. What was my first question?"]


def main():
    directory = sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct"
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()

    def after(ids, count, ends):
        options = dict(do_sample=False, max_new_tokens=count, min_new_tokens=0 if ends else count, pad_token_id=0)
        with torch.no_grad():
            return model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **options)[0, len(ids):].tolist()

    golden = dict(ids=[tokenizer.encode(text) for text in shapes.odd_texts()[:200]], texts=[], greedy=[], chat=[])
    for text in TEXTS:
        ids = tokenizer.encode(text)
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
        positions = sorted({round(i * (len(ids) - 1) / 63) for i in range(64)})
        largest = [torch.topk(logits[position], 20) for position in positions]
        golden["texts"].append(dict(text=text, ids=ids, positions=positions, tokens=[top.indices.tolist() for top in largest],
                                    logits=[[round(x, 4) for x in top.values.tolist()] for top in largest]))
        golden["greedy"].append(dict(ids=ids[:40], next=after(ids[:40], 100, ends=False)))
    turns = []
    for says in SAYS:
        turns.append(dict(role="user", content=says))
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        answer = after(ids, 32, ends=True)
        golden["chat"].append(dict(user=says, prompt_ids=ids, tokens=answer))
        turns.append(dict(role="assistant", content=tokenizer.decode(answer, skip_special_tokens=True)))
    (ROOT / "tests/fixtures/real.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
