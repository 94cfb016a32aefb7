#!/usr/bin/env python3
"""Prints requests for llm batch, of random token ids: for speed and memory, where text does not matter.

    python3 weights_tools/make_requests.py --count 32 --shared 1024 --own 64 -n 64 > requests.jsonl

All begin with the same --shared tokens. A range, as 8-400, is drawn anew for each request.
"""
import argparse
import json
import random


def drawn(text):
    low, _, high = text.partition("-")
    return random.randint(int(low), int(high or low))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--count", type=int, default=16, help="requests")
parser.add_argument("--shared", type=int, default=0, help="tokens that all begin with")
parser.add_argument("--own", default="64", help="tokens of a prompt behind them")
parser.add_argument("-n", default="64", help="tokens to generate")
parser.add_argument("--vocabulary", type=int, default=30000)
parser.add_argument("--seed", type=int, default=1)
given = parser.parse_args()
random.seed(given.seed)
beginning = [random.randrange(3, given.vocabulary) for _ in range(given.shared)]
for number in range(given.count):
    own = [random.randrange(3, given.vocabulary) for _ in range(drawn(given.own))]
    print(json.dumps({"id": str(number), "ids": beginning + own, "n": drawn(given.n)}))
