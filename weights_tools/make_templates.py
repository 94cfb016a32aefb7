#!/usr/bin/env python3
"""Writes tests/fixtures/chat_templates.json: what Transformers makes of conversations with models' chat templates.

    python3 weights_tools/make_templates.py DIR [--out tests/fixtures/chat_templates.json]

DIR holds a template for each name in CHECKPOINTS: NAME.jinja, which is chat_template.jinja of that checkpoint, or
"chat_template" of its tokenizer_config.json. Needs transformers (made with 5.24). The templates are programs of others
and stay out of the fixture. It has

    today           the date of all texts
    conversations   {title: {"system": text or null, "turns": [[what the user says, the answer or null], ...]}}
    templates       [{"name", "ours": a template of this project that writes the same, "bos", "eos",
                      "texts": {title: text}}]
"""
import argparse
import datetime
import json
import pathlib

from transformers.utils import chat_template_utils

TODAY = datetime.datetime(2026, 3, 5)
LLAMA2, LLAMA3, GEMMA = ("<s>", "</s>"), ("<|begin_of_text|>", "<|eot_id|>"), ("<bos>", "<eos>")
GRANITE, PHI = ("<|end_of_text|>", "<|end_of_text|>"), ("<|endoftext|>", "<|endoftext|>")
R1 = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
# Of a template that has a system of its own, or refuses any, only the conversations with one count, or those without.
CHECKPOINTS = {
    "SmolLM2-1.7B-Instruct": ("chatml", ("<|im_start|>", "<|im_end|>"), "system"),
    "Qwen-Qwen2.5-7B-Instruct": ("chatml", (None, "<|im_end|>"), "system"),
    "Qwen-Qwen3-0.6B": ("qwen3", (None, "<|im_end|>"), "all"),
    "Llama-2-7b-chat": ("llama2", LLAMA2, "all"),
    "Meta-Llama-3-8B-Instruct": ("llama3", LLAMA3, "all"),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3.1", LLAMA3, "all"),
    "Mistral-7B-Instruct-v0.3": ("mistral", LLAMA2, "all"),
    "google-gemma-2-2b-it": ("gemma", GEMMA, "no system"),
    "gemma-3-4b-it": ("gemma", GEMMA, "all"),
    "microsoft-Phi-3.5-mini-instruct": ("phi3", PHI, "all"),
    "ibm-granite-granite-3.0-8b-instruct": ("granite", GRANITE, "all"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", GRANITE, "system"),
    "DeepSeek-R1": ("deepseek-r1", R1, "all"),
    "TinyLlama-1.1B-Chat-v1.0": ("zephyr", LLAMA2, "all"),
}
THREE = [["What is a lake?", "Water, mostly."], ["And a sea?", "More of it."], ["Grüße! 海は?", None]]
BLANK = [[" \n What is a lake?\t\n", "\n\n Water, mostly. \n"], ["\u00a0And a sea?\u3000", "\u2003More of it.\x1f\n"],
         ["\n Grüße! 海は?  ", None]]
THINK = [["What is a lake?", "<think>\nLet me see.\n</think>\n\nWater, mostly."],
         ["And a sea?", "Hm</think> <|channel>thought\nWet.<channel|>\nMore </think>\n of it."], ["Grüße! 海は?", None]]
SPELL = [["<|im_end|>\n<|im_start|>system [/INST]</s><|eot_id|><start_of_turn> {bos}{}",
          "<|turn> [SYSTEM_PROMPT]<bos>"],
         ["<|end|><|user|> <<SYS>> <｜User｜> {eos}", "<|end_of_text|> {date} %Y <｜end▁of▁sentence｜>"],
         ["<end_of_turn><turn|> <|end_of_role|> <|endoftext|>", None]]
CONVERSATIONS = {
    "one": (None, THREE[2:]), "system one": ("Be brief. 简短。", THREE[2:]), "three": (None, THREE),
    "system three": ("Be brief. 简短。", THREE), "blanks": (None, BLANK),
    "system blanks": ("\n Be  brief.\u2028\n", BLANK),
    "thinking": (None, THINK),
    "spelled": (None, SPELL), "system spelled": ("<|im_end|>[INST]<|eot_id|>{}<end_of_turn>", SPELL),
    "empty texts": (None, [["", "x"], ["y", None]]),
}


class Frozen(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return TODAY


def rendered(template, tokens, system, turns):
    messages = [] if system is None else [{"role": "system", "content": system}]
    for user, answer in turns:
        messages.append({"role": "user", "content": user})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    named = {key: token for key, token in zip(("bos_token", "eos_token"), tokens) if token is not None}
    texts, _ = chat_template_utils.render_jinja_template([messages], chat_template=template,
                                                         add_generation_prompt=True, **named)
    return texts[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default="tests/fixtures/chat_templates.json")
    arguments = parser.parse_args()
    chat_template_utils.datetime = Frozen
    templates = []
    for name, (ours, tokens, which) in CHECKPOINTS.items():
        template = (arguments.directory / f"{name}.jinja").read_text(encoding="utf-8")
        texts = {title: rendered(template, tokens, system, turns) for title, (system, turns) in CONVERSATIONS.items()
                 if which == "all" or (system is not None) == (which == "system")}
        templates.append({"name": name, "ours": ours, "bos": tokens[0], "eos": tokens[1], "texts": texts})
    said = {title: {"system": system, "turns": turns} for title, (system, turns) in CONVERSATIONS.items()}
    whole = {"today": TODAY.strftime("%Y-%m-%d"), "conversations": said, "templates": templates}
    arguments.out.write_text(json.dumps(whole, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
