#!/usr/bin/env python3
"""Facts in a real text, as a line of JSON that `llm eval -f` reads: is what was told long ago still known?

    needles.py TEXT > needles.jsonl

Sixteen sentences that have nothing to do with the text are put between its paragraphs, at equal distances. At the end all
of them come once more, in another order. A question is the beginning of such a sentence, and its answer the last word:
only the sentence itself, up to the whole text before it, says which.
"""
import argparse
import json
import pathlib
import random

SENTENCES = """The gardener hid his old violin in the bakery.
A sailor sold her blue parrot to the doctor.
My uncle painted the wooden gate purple.
The baker's only daughter married a pilot.
Every Tuesday evening the choir sings in the tunnel.
The umbrella that was lost on the train belongs to the judge.
The tallest tower in the valley is made of glass.
The favourite fruit of the queen is the lemon.
The twins buried their wooden horse under the bridge.
The mayor's white dog is afraid of thunder.
Grandmother's recipe for soup begins with garlic.
The captain paid for his breakfast with a button.
The narrow door in the cellar opens with a whistle.
The night train to the mountains leaves from platform seven.
The youngest of the four dancers comes from Norway.
The broken clock over the stable stopped at noon.""".split("\n")


def place(sentence):
    """Where the last word begins."""
    return sentence.rindex(" ") + 1


def hide(text, sentences=SENTENCES):
    paragraphs, facts, asked = text.split("\n\n"), [], []
    out = ""
    for i, paragraph in enumerate(paragraphs):
        out += paragraph + "\n\n"
        while len(facts) < len(sentences) and (2 * len(facts) + 1) * len(paragraphs) <= 2 * (i + 1) * len(sentences):
            facts.append(len(out) + place(sentences[len(facts)]))
            out += sentences[len(facts) - 1] + "\n\n"
    for i in random.Random(0).sample(range(len(sentences)), len(sentences)):
        answer = len(out) + place(sentences[i])
        asked.append(dict(fact_char=facts[i], answer_char=answer, place_char=answer))
        out += sentences[i] + "\n"
    return dict(text=out, questions=asked)


def beginning(text, size=29600):
    """The paragraphs that end within so many bytes: with the sentences twice, what 8,192 tokens can hold."""
    return text.encode()[:size].decode(errors="ignore").rsplit("\n\n", 1)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path)
    print(json.dumps(hide(beginning(parser.parse_args().text.read_text()))))


if __name__ == "__main__":
    main()
