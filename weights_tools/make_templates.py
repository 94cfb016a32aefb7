#!/usr/bin/env python3
"""Writes tests/fixtures/chat_templates.json: what Transformers makes of conversations with models' chat templates.

    python3 weights_tools/make_templates.py DIR [--out tests/fixtures/chat_templates.json]

DIR holds a template for each name in TOKENS and UNKNOWN: NAME.jinja, which is chat_template.jinja of that checkpoint,
or "chat_template" of its tokenizer_config.json. Needs transformers (made with 5.24). The templates are programs of
others and stay out of the fixture. It has

    today           the date of all texts
    conversations   {title: {"system": text or null, "turns": [[what the user says, the answer or null], ...]}}
    templates       [{"name", "form": what llm calls it, null where it must be refused, "bos", "eos",
                      "extract": the template's quoted texts and a few of its words, without its logic,
                      "texts": {title: text, or null where the template refuses the conversation}}]

An extract leaves out long texts that stand in no rendering (what is said about tools).
"""
import argparse
import ast
import datetime
import json
import pathlib

import jinja2
from transformers.utils import chat_template_utils

TODAY = datetime.datetime(2026, 3, 5)
CHATML, LLAMA2, LLAMA3 = ("<|im_start|>", "<|im_end|>"), ("<s>", "</s>"), ("<|begin_of_text|>", "<|eot_id|>")
GEMMA, PHI, OLMO = ("<bos>", "<eos>"), ("<|endoftext|>", "<|endoftext|>"), ("<|endoftext|>", "<|endoftext|>")
GRANITE, LFM = ("<|end_of_text|>", "<|end_of_text|>"), ("<|startoftext|>", "<|im_end|>")
R1 = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
TOKENS = {  # template: the name of its form, and the tokens that begin and end a text
    "SmolLM2-1.7B-Instruct": ("chatml", CHATML), "Qwen-Qwen2.5-7B-Instruct": ("chatml", (None, "<|im_end|>")),
    "Qwen-Qwen3-0.6B": ("qwen3", (None, "<|im_end|>")),
    "LFM2-8B-A1B": ("lfm2", LFM), "LFM2.5-Instruct": ("lfm2.5", LFM), "LFM2.5-8B-A1B": ("lfm2.5", LFM),
    "SmolLM3-3B": ("smollm3", (None, "<|im_end|>")), "HuggingFaceTB-SmolLM3-3B": ("smollm3", (None, "<|im_end|>")),
    "Llama-2-7b-chat": ("llama2", LLAMA2), "Meta-Llama-3-8B-Instruct": ("llama3", LLAMA3),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3.1", LLAMA3), "meta-llama-Llama-3.2-3B-Instruct": ("llama3.1", LLAMA3),
    "Mistral-7B-Instruct-v0.1": ("mistral-v1", LLAMA2), "Mistral-7B-Instruct-v0.2": ("mistral-v1", LLAMA2),
    "Mistral-7B-Instruct-v0.2-old": ("mistral-v1", LLAMA2), "Mistral-7B-Instruct-v0.3": ("mistral-v3", LLAMA2),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral-nemo", LLAMA2),
    "Mistral-Large-Instruct-2411": ("mistral-v7", LLAMA2),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral-tekken", LLAMA2),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral-tekken", LLAMA2),
    "google-gemma-2-2b-it": ("gemma2", GEMMA), "gemma-3-4b-it": ("gemma3", GEMMA),
    "google-gemma-4-31B-it": ("gemma4", GEMMA), "google-gemma-4-31B-it-interleaved": ("gemma4", GEMMA),
    "microsoft-Phi-3.5-mini-instruct": ("phi3", PHI),
    "Phi-4-mini-instruct": ("phi4-mini", PHI), "phi-4": ("phi4", PHI),
    "ibm-granite-granite-3.0-8b-instruct": ("granite", GRANITE), "ibm-granite-granite-4.1": ("granite", GRANITE),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", GRANITE), "ibm-granite-granite-4.0": ("granite", GRANITE),
    "DeepSeek-R1": ("deepseek-r1", R1), "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek-r1", R1),
    "OLMo-2-1124-7B-Instruct": ("olmo2", OLMO), "Llama-3.1-Tulu-3-8B": ("olmo2", LLAMA3),
    "TinyLlama-1.1B-Chat-v1.0": ("zephyr", LLAMA2),
}
UNKNOWN = ["fireworks-ai-llama-3-firefunction-v2", "Llama-3.2-11B-Vision-Instruct", "MiniCPM3-4B",
           "openbmb-MiniCPM5-1B", "llama-cpp-deepseek-r1", "openai-gpt-oss-120b",
           "CohereForAI-c4ai-command-r7b-12-2024-tool_use", "GLM-4.6", "moonshotai-Kimi-K2", "Qwen-QwQ-32B",
           "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "NVIDIA-Nemotron-Nano-v2", "MadeAgents-Hammer2.1",
           "unsloth-Apriel-1.5", "Qwen3.5-4B", "Bielik-11B-v3.0-Instruct", "meetkai-functionary-medium-v3.2"]
# What stands in an extract beside the quoted texts.
WORDS = {"bos_token", "eos_token", "trim", "strip", "lstrip", "rstrip", "split", "replace", "strftime_now",
         "enable_thinking"}

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
    """The text, or None where the template refuses the conversation."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for user, answer in turns:
        messages.append({"role": "user", "content": user})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    named = {key: token for key, token in zip(("bos_token", "eos_token"), tokens) if token is not None}
    try:
        texts, _ = chat_template_utils.render_jinja_template([messages], chat_template=template,
                                                             add_generation_prompt=True, **named)
    except jinja2.exceptions.TemplateError:
        return None
    return texts[0]


def extract(template, texts):
    """The quoted texts as the template has them, and its WORDS, each once, in order."""
    seen, everything = {}, "".join(text or "" for text in texts)
    for _, kind, value in jinja2.Environment().lex(template):
        if kind == "string":
            text = ast.literal_eval(value.replace("\n", "\\n"))
            if len(text) < 60 or text in everything:
                seen[value] = None
        elif kind == "name" and value in WORDS:
            seen[value] = None
    return "".join("{{ %s }}" % piece for piece in seen)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default="tests/fixtures/chat_templates.json")
    arguments = parser.parse_args()
    chat_template_utils.datetime = Frozen
    templates = []
    for name, (form, tokens) in {**TOKENS, **{name: (None, LLAMA2) for name in UNKNOWN}}.items():
        template = (arguments.directory / f"{name}.jinja").read_text(encoding="utf-8")
        texts = {title: rendered(template, tokens, *said) for title, said in CONVERSATIONS.items()}
        templates.append({"name": name, "form": form, "bos": tokens[0], "eos": tokens[1],
                          "extract": extract(template, texts.values()), "texts": texts if form else {}})
    said = {title: {"system": system, "turns": turns} for title, (system, turns) in CONVERSATIONS.items()}
    whole = {"today": TODAY.strftime("%Y-%m-%d"), "conversations": said, "templates": templates}
    arguments.out.write_text(json.dumps(whole, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
