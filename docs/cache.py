#!/usr/bin/env python3
"""A KV cache in numpy: its bytes (chapter 4), a page table (6), int8 (7), who is in a pass (10). Prints commands of these
chapters, and below each what it prints, but computed here.   python3 docs/cache.py   (needs numpy, as attention.py does)"""
import json

import numpy as np

from attention import D, attend, forward, ids


# Chapter 4
def bytes_of(L, B, S, H_kv, D, number):
    K = np.empty((L, B, S, H_kv, D), number)  # for each layer, text, position and KV head: D numbers
    V = np.empty_like(K)
    return K.nbytes + V.nbytes


# Chapter 6: pages of P positions
P, free = 4, [7, 6, 5, 4, 3, 2, 1, 0]  # the last one of `free` is handed out next


def grow(table, length):
    while len(table) * P < length:
        table.append(free.pop())


def row(table, position):
    return table[position // P] * P + position % P


# Chapter 7
def int8(rows):  # (..., D): a scale for each row, in f16 and rounded up, and D codes
    exact = np.abs(rows).max(axis=-1, keepdims=True) / 127
    scale = exact.astype(np.float16)
    scale = np.where(scale < exact, np.nextafter(scale, np.float16(np.inf)), scale)
    return scale, np.rint(rows / scale).astype(np.int8)


# Chapter 10
def passes(waiting, places, most):  # a request: its name, tokens to read before it writes the next one, tokens to write
    running = []
    while waiting or running:
        turn = sorted(running, key=lambda r: r["read"] > 1) + waiting[:places - len(running)]
        pieces, left = {}, most  # of each request so many tokens
        for r in turn:  # first those that write, then those that read, last those that come in
            if left > 0:
                pieces[r["name"]] = min(r["read"], left)
                left -= pieces[r["name"]]
        yield pieces
        running += [r for r in waiting if r["name"] in pieces]
        waiting = [r for r in waiting if r["name"] not in pieces]
        for r in running:
            r["read"] -= pieces.get(r["name"], 0)
            if r["read"] == 0:  # all is read, so the pass brought its next token
                r["read"], r["write"] = 1, r["write"] - 1
        running = [r for r in running if r["write"] > 0]


def numbers(name, vector):
    print(f"{name:8}" + "".join(f" {number:8.4f}" for number in vector[:8]) + f"  .. ({D})", end="")


def chapter_4():
    print("$ ./llm memory --layers 32 --kv-heads 8 --head-dim 128 -c 8192 --kv f16,int8 --cache contiguous")
    print(f"...\nf16 {bytes_of(32, 1, 8192, 8, 128, np.float16) / 2**30:g} GiB ...")
    payload, scales = bytes_of(32, 1, 8192, 8, 128, np.int8), bytes_of(32, 1, 8192, 8, 1, np.float16)
    print(f"int8 {payload / 2**20:g} MiB {scales / 2**20:g} MiB {(payload + scales) / 2**20:g} MiB ...\n...")


def chapter_6():
    tables = [[], []]
    def show(when, *lengths):
        print(when)
        for i in 0, 1:
            print(f"  sequence {i}, {lengths[i]:2} positions, table", *tables[i])
    print("$ g++ -std=c++17 -I. docs/two_sequences.cpp -o build/two && build/two")
    for more in range(8):  # two prompts, then 7 times a token of each
        grow(tables[0], 6 + more), grow(tables[1], 3 + more)
        if more in (0, 7):
            show("both have decoded 7 tokens" if more else "both prompts are read", 6 + more, 3 + more)
    free.extend(reversed(tables[0])), tables[0].clear()  # its first page is handed out first
    grow(tables[1], 19), grow(tables[0], 5)
    show("sequence 0 ended, 1 went on by 9, a new 0 has begun", 5, 19)
    print("position 6 of sequence 1 is in row", row(tables[1], 6))

    q, keys, values = forward(ids, {})
    K, V = np.zeros((2, 32, D))  # one layer and KV head, 8 pages
    rows = [row([5, 2], position) for position in range(5)]
    K[rows], V[rows] = keys, values
    print('$ ./llm show -p "Once upon a time" --layer 2 --head 4 --cache paged --page 4 --kv f32\n...')
    numbers("output", attend(q, K[rows], V[rows])[2])
    print("   the sum of weight x value\n...")


def chapter_7():
    before = []
    def store(rows):
        before.append(rows)
        scale, codes = int8(rows)
        return scale * codes.astype(float)
    forward(ids, {}, store)
    k, v = before[2]  # layer 2
    print('$ ./llm show -p "Once upon a time" --layer 2 --head 4 --kv int8')
    for name, rows in ("K", k), ("V", v):
        scale, codes = int8(rows[4, 1])  # position 4, KV head 1
        stored = (scale.tobytes() + codes.tobytes()).hex()
        print(f"...\n{name}      int8, from ... {len(stored) // 2} bytes")
        print("stored ", *(stored[i:i + 16] for i in range(0, 64, 16)), "..")
        numbers("reads", scale * codes.astype(float)), print()
        numbers("before", rows[4, 1]), print()
    print("...")


def chapter_10():
    print("$ ./llm batch -f docs/requests.jsonl -np 2 --pass-tokens 8 --cache contiguous --events passes\n...")
    print("$ grep pieces passes")
    requests = [dict(name=name, read=read, write=write) for name, read, write in
                (("A", 5, 10), ("B", 18, 3), ("C", 11, 4), ("D", 3, 3))]  # docs/requests.jsonl
    for pieces in passes(requests, 2, 8):
        print(f'{{"event": "pass", "count": {sum(pieces.values())}, "pieces": {json.dumps(pieces)}, ...')


if __name__ == "__main__":
    chapter_4(), chapter_6(), chapter_7(), chapter_10()
