#!/usr/bin/env python3
"""Trains the tokenizer and a small Llama-architecture GQA decoder on the stories of stories_text.py.

    train.py builtin --out builtin --work build/builtin      # the built-in model
    train.py draft   --out draft   --work build/draft        # its draft, with the tokenizer of builtin/

Retrieval ("Where is the red key?") is learned as a circuit that forms suddenly, and much sooner where
questions are many and answers near: so the curriculum begins with short stories that are nothing but
facts and questions, then spreads them over all positions, and only then tells whole stories. Everything is drawn from fixed seeds; the last
checkpoint in --work is resumed. Progress goes to stderr, the loss to WORK/loss.csv, and a Hugging Face
directory (weights in bf16) to --out at every checkpoint.
"""
import json
import math
import os
import random
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from stories_text import Parser, tell

END = "<|endoftext|>"       # opens and ends every text
VOCAB = 1280
CONTEXT = 1280
ANSWER_WEIGHT = 10.0        # loss of a place word in an answer, beside 1 for any other token


@dataclass
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int = VOCAB
    theta: float = 1000000.0
    eps: float = 1e-5


@dataclass
class Phase:
    steps: int
    context: int            # tokens in a row; a row is one story
    batch: int              # rows in a step
    facts: tuple            # fewest and most objects in a story
    plain: float            # share of stories that are nothing but facts and questions
    shortest: int = 0       # stories with scenes have between this many tokens and the context
    reach: int = 0          # positions of the questions are moved on by a random gap, up to here


SHAPES = {
    "builtin": Shape(hidden=256, layers=4, heads=8, kv_heads=2, head_dim=32, ffn=704),
    "draft": Shape(hidden=64, layers=3, heads=4, kv_heads=2, head_dim=32, ffn=192),
}
PHASES = {
    "builtin": [Phase(120, 288, 24, (2, 7), 1.0),
                Phase(130, 288, 24, (5, 10), 0.9, 288, reach=CONTEXT),
                Phase(130, CONTEXT, 6, (6, 10), 0.0, 700),
                Phase(150, 288, 24, (5, 8), 0.2, 288, reach=CONTEXT),
                Phase(150, CONTEXT, 6, (6, 10), 0.0, 700),
                Phase(150, 288, 24, (5, 8), 0.2, 288, reach=CONTEXT),
                Phase(280, CONTEXT, 6, (6, 10), 0.0, 700)],
    "draft": [Phase(120, 288, 24, (2, 7), 1.0),
              Phase(130, 288, 24, (5, 10), 0.9, 288, reach=CONTEXT),
              Phase(130, CONTEXT, 6, (6, 10), 0.0, 700),
              Phase(150, 288, 24, (5, 8), 0.2, 288, reach=CONTEXT),
              Phase(150, CONTEXT, 6, (6, 10), 0.0, 700)],
}
PEAK_RATE = {"builtin": 4e-3, "draft": 4e-3}
WARMUP = 30                 # steps from a learning rate of 0 to its peak
DECAY = 0.6                   # share of all steps over which it falls back to 0


# --- tokenizer ---------------------------------------------------------------------------------------

def train_tokenizer():
    """Byte-level BPE over 4,000 stories: every word of the grammar becomes one token or few."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator((tell("train", -1 - i).text for i in range(4000)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, tokenizer.token_to_id(END))])
    return tokenizer


# --- model -------------------------------------------------------------------------------------------

def new_weights(shape, seed=1):
    """Random f32 weights under their Hugging Face names, matrices (out, in).

    Binding a place to the colour and noun a few words before it is what training is slowest to find. So head h
    of the first layer is made to look exactly h + 1 tokens back, and is not trained: every embedding has a part
    in common (+c), which the keys turn into one fixed vector, and query head h into that vector rotated by
    h + 1 positions (RoPE does the rest).
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}

    def matrix(name, out, into, scale=1.0):
        weights[name + ".weight"] = torch.randn(out, into, generator=generator) * scale * into ** -0.5

    matrix("model.embed_tokens", shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        at, small = f"model.layers.{layer}.", 0.3 / math.sqrt(2 * shape.layers)
        matrix(at + "self_attn.q_proj", shape.heads * shape.head_dim, shape.hidden)
        matrix(at + "self_attn.k_proj", shape.kv_heads * shape.head_dim, shape.hidden)
        matrix(at + "self_attn.v_proj", shape.kv_heads * shape.head_dim, shape.hidden)
        matrix(at + "self_attn.o_proj", shape.hidden, shape.heads * shape.head_dim, small)
        matrix(at + "mlp.gate_proj", shape.ffn, shape.hidden)
        matrix(at + "mlp.up_proj", shape.ffn, shape.hidden)
        matrix(at + "mlp.down_proj", shape.hidden, shape.ffn, small)
        weights[at + "input_layernorm.weight"] = torch.ones(shape.hidden)
        weights[at + "post_attention_layernorm.weight"] = torch.ones(shape.hidden)
    weights["model.norm.weight"] = torch.ones(shape.hidden)

    half, c = shape.head_dim // 2, torch.full((shape.hidden,), shape.hidden ** -0.5)
    weights["model.embed_tokens.weight"] += 0.5 * c
    seen = shape.hidden ** 0.5 * 0.5 / math.hypot(0.5, 1.0)     # length of the common part after RMSNorm
    key = torch.zeros(half)
    key[:4] = torch.tensor([6.7, 5.3, 3.4, 3.4])    # squared, over sqrt(32): a distance off by one scores 4 less
    frequency = shape.theta ** (-torch.arange(half) / half)
    q, k = (weights[f"model.layers.0.self_attn.{name}_proj.weight"].zero_() for name in "qk")
    for head in range(shape.kv_heads):
        k[head * 2 * half:][:half] = torch.outer(key, c) / seen
    for head in range(shape.heads):
        angle, at = -frequency * (head + 1), head * 2 * half
        q[at:at + half] = torch.outer(key * angle.cos(), c) / seen
        q[at + half:at + 2 * half] = torch.outer(key * angle.sin(), c) / seen
    return weights


def attend(q, k, v, window):
    """Causal attention; q (B, heads, T, D), k and v (B, kv_heads, T, D), rotated. A window shows each
    position only itself and the window - 1 before it."""
    B, heads, T, D = q.shape
    if not window and T > 384:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    # Short rows: two batched products over all query heads of a KV head are faster on a CPU.
    kv = k.shape[1]
    position = torch.arange(T)
    hidden = position[:, None] < position[None, :]
    if window:
        hidden = hidden | (position[:, None] >= position[None, :] + window)
    mask = torch.zeros(T, T).masked_fill(hidden, -1e9).to(q.dtype)
    scores = torch.bmm(q.reshape(B * kv, -1, D), k.reshape(B * kv, T, D).transpose(1, 2)) * D ** -0.5
    p = (scores.view(B * kv, heads // kv, T, T) + mask).softmax(-1).to(v.dtype)
    return torch.bmm(p.view(B * kv, -1, T), v.reshape(B * kv, T, D)).view(B, heads, T, D)


def forward(w, shape, ids, window=0, positions=None):
    """ids (B, T), at positions (B, T) or 0..T-1, -> logits (B, T, vocab). Written out, as it trains twice as
    fast as the library's."""
    B, T = ids.shape
    inverse = shape.theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angle = (torch.arange(T)[None] if positions is None else positions)[:, None, :, None] * inverse  # (B, 1, T, D/2)

    def heads(x, count):
        return x.view(B, T, count, shape.head_dim).transpose(1, 2)

    def rotate(x):
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def norm(x, name):
        return F.rms_norm(x, (shape.hidden,), w[name + ".weight"], shape.eps)

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(shape.layers):
        def linear(y, name):
            return F.linear(y, w[f"model.layers.{layer}.{name}.weight"])

        h = norm(x, f"model.layers.{layer}.input_layernorm")
        q = rotate(heads(linear(h, "self_attn.q_proj"), shape.heads))
        k = rotate(heads(linear(h, "self_attn.k_proj"), shape.kv_heads))
        v = heads(linear(h, "self_attn.v_proj"), shape.kv_heads)
        x = x + linear(attend(q, k, v, window).transpose(1, 2).reshape(B, T, -1), "self_attn.o_proj")
        h = norm(x, f"model.layers.{layer}.post_attention_layernorm")
        x = x + linear(F.silu(linear(h, "mlp.gate_proj")) * linear(h, "mlp.up_proj"), "mlp.down_proj")
    return F.linear(norm(x, "model.norm"), w["model.embed_tokens.weight"])


# --- a Hugging Face directory ------------------------------------------------------------------------

def save(path, weights, shape, tokenizer):
    """Writes what Transformers' from_pretrained reads; weights in bf16, head tied to the embedding."""
    os.makedirs(path, exist_ok=True)
    end = tokenizer.token_to_id(END)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab, "hidden_size": shape.hidden, "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "max_position_embeddings": CONTEXT, "rope_theta": shape.theta, "rms_norm_eps": shape.eps,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "bos_token_id": end, "eos_token_id": end,
    }
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": end, "eos_token_id": end, "do_sample": False},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END,
                                  "clean_up_tokenization_spaces": False, "model_max_length": CONTEXT},
    }
    for name, content in files.items():
        with open(os.path.join(path, name), "w") as file:
            file.write(json.dumps(content, indent=2) + "\n")
    tokenizer.save(os.path.join(path, "tokenizer.json"))
    save_file({name: w.detach().to(torch.bfloat16).contiguous() for name, w in weights.items()},
              os.path.join(path, "model.safetensors"), metadata={"format": "pt"})


def load(path):
    """(weights as f32 by name, Shape, Tokenizer) of a directory that save() wrote."""
    with open(os.path.join(path, "config.json")) as file:
        c = json.load(file)
    shape = Shape(c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"], c["num_key_value_heads"],
                  c["head_dim"], c["intermediate_size"], c["vocab_size"], c["rope_theta"], c["rms_norm_eps"])
    weights = {name: w.float() for name, w in load_file(os.path.join(path, "model.safetensors")).items()}
    return weights, shape, Tokenizer.from_file(os.path.join(path, "tokenizer.json"))


# --- training ----------------------------------------------------------------------------------------

def batch_of(phase, tokenizer, first):
    """(ids (batch, context + 1), positions (batch, context), loss weight of each target (batch, context), which
    targets are answers). Rows are stories number `first` and on; what remains of a row is filled with ends that
    weigh nothing. Moving the questions on by a gap in their positions trains distances of a thousand tokens at
    the price of short rows (Zhu et al. 2023, PoSE)."""
    end = tokenizer.token_to_id(END)
    ids = torch.full((phase.batch, phase.context + 1), end)
    positions = torch.arange(phase.context).repeat(phase.batch, 1)
    weight = torch.zeros(phase.batch, phase.context)
    answers = torch.zeros(phase.batch, phase.context, dtype=torch.bool)
    stories, plains = [], []
    for index in range(first, first + phase.batch):
        rng = random.Random(f"plan {index}")
        plain = rng.random() < phase.plain
        plains.append(plain)
        # Half of the long stories are as long as the row, so that its last positions are trained as well.
        room = phase.context if rng.random() < 0.5 else rng.randint(phase.shortest, phase.context)
        stories.append(tell("train", index, rng.randint(*phase.facts), room, plain))
    for row, (story, encoding) in enumerate(zip(stories, tokenizer.encode_batch([s.text for s in stories]))):
        text = encoding.ids[:phase.context]
        ids[row, :len(text)] = torch.tensor(text)
        weight[row, :len(text)] = 0.2 if plains[row] else 1     # a plain story is there for its answers
        asked = encoding.char_to_token(story.questions[0].question_char - 1)
        positions[row, asked:] += random.Random(f"gap {first + row}").randint(0, max(0, phase.reach - phase.context))
        for question in story.questions:
            token = encoding.char_to_token(question.place_char)
            if token <= phase.context:
                weight[row, token - 1] = ANSWER_WEIGHT
                answers[row, token - 1] = True
    return ids, positions, weight, answers


def train(name, tokenizer, out, work):
    shape, phases = SHAPES[name], PHASES[name]
    total = sum(phase.steps for phase in phases)
    weights = {key: w.requires_grad_() for key, w in new_weights(shape).items()}
    # Muon for the matrices inside the layers (Jordan et al. 2024): the retrieval circuit forms in a fraction of
    # the steps AdamW takes. AdamW for the embedding and the norms.
    fixed = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight")
    inner = [w for key, w in weights.items() if key.endswith("_proj.weight") and key not in fixed]
    outer = [w for key, w in weights.items() if not key.endswith("_proj.weight")]
    optimizers = [torch.optim.Muon(inner, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW(outer, betas=(0.9, 0.98), weight_decay=0.0, fused=True)]
    print(f"{name}: {sum(w.numel() for w in weights.values()):,} parameters, {total} steps", file=sys.stderr)
    step = 0
    checkpoint = os.path.join(work, "checkpoint.pt")
    log = os.path.join(work, "loss.csv")
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint)
        step = state["step"]
        for key, w in weights.items():
            w.data.copy_(state["weights"][key])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        print(f"resuming at step {step}", file=sys.stderr)
    else:
        with open(log, "w") as file:
            file.write("step,context,loss,answer_accuracy,tokens_per_second\n")

    def loss_of(ids, positions, weight):
        logits = forward(weights, shape, ids[:, :-1], 0, positions)
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return (loss * weight.flatten()).sum() / weight.sum(), logits

    compiled = torch.compile(loss_of, dynamic=False)
    start, start_step, since, tokens, losses, right, asked = time.time(), step, time.time(), 0, [], 0, 0
    while step < total:
        before = 0
        for number, phase in enumerate(phases):
            if step < before + phase.steps:
                break
            before += phase.steps
        # Stories of different phases never share an index, and a resumed run meets the stories it would have met.
        ids, positions, weight, answers = batch_of(phase, tokenizer, number * 10_000_000 + (step - before) * phase.batch)
        rate = PEAK_RATE[name] * min(1, (step + 1) / WARMUP, (total - step) / (DECAY * total))
        for optimizer, share in zip(optimizers, (1.0, 0.2)):
            optimizer.param_groups[0]["lr"] = rate * share
        with torch.autocast("cpu", torch.bfloat16):
            loss, logits = compiled(ids, positions, weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(inner + outer, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        for w in weights.values():
            w.grad = None
        step += 1
        with torch.no_grad():
            right += (logits[answers].argmax(-1) == ids[:, 1:][answers]).sum().item()
        asked += answers.sum().item()
        tokens += weight.count_nonzero().item()
        losses.append(loss.item())
        if step % 20 == 0 or step == total:
            now = time.time()
            mean, accuracy, speed = sum(losses) / len(losses), right / max(asked, 1), tokens / (now - since)
            left = (now - start) / (step - start_step) * (total - step)
            print(f"step {step}/{total}  context {phase.context}  loss {mean:.3f}  answers {accuracy:.3f}  "
                  f"{speed:,.0f} tokens/s  {left / 60:.0f} min left in steps like these", file=sys.stderr, flush=True)
            with open(log, "a") as file:
                file.write(f"{step},{phase.context},{mean:.4f},{accuracy:.4f},{speed:.0f}\n")
            since, tokens, losses, right, asked = now, 0, [], 0, 0
        if step % 50 == 0 or step == total:
            torch.save({"step": step, "weights": weights, "optimizers": [o.state_dict() for o in optimizers]}, checkpoint + ".part")
            os.replace(checkpoint + ".part", checkpoint)
            save(out, weights, shape, tokenizer)


def main():
    parser = Parser(description="Trains the built-in model or its draft.")
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--out", required=True, metavar="DIR", help="the Hugging Face directory to write")
    parser.add_argument("--work", required=True, metavar="DIR", help="checkpoints and loss.csv; resumed if there")
    parser.add_argument("--tokenizer", metavar="DIR", help="take this directory's tokenizer, train none")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    os.makedirs(args.work, exist_ok=True)
    if args.tokenizer:
        try:
            tokenizer = Tokenizer.from_file(os.path.join(args.tokenizer, "tokenizer.json"))
        except Exception as error:
            parser.error(f"--tokenizer {args.tokenizer}: {error}")
    else:
        tokenizer = train_tokenizer()
    if tokenizer.get_vocab_size() != VOCAB:
        parser.error(f"tokenizer has {tokenizer.get_vocab_size()} tokens, expected {VOCAB}")
    train(args.name, tokenizer, args.out, args.work)


if __name__ == "__main__":
    main()
