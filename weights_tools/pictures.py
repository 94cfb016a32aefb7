#!/usr/bin/env python3
"""Draws the pictures of README and docs/ as SVG, from what the engine says: each runs ./llm and reads its --json.

    python3 weights_tools/pictures.py [NAME ...] [--kept] [--out docs/pictures] [--llm ./llm] [--model DIR]

NAME: one of those below, default all but quality, which takes two minutes. Some show times of your machine: roofline,
batch_steps (on Linux) and guesses those of the model in --model, too. What was measured is kept in the picture; --kept
draws it again from that. Needs nothing but Python. One style for all: the title says the message, a label is at what it
names, one colour for naive and one for cached, a background of its own on a light and on a dark desktop, and 20 of 800
left free at each side. tests/test_explorer.py looks for labels that are faint, cut or one on the other.
"""
import argparse
import html
import json
import math
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "docs"))
import tables  # docs/tables.py
import chat_recall

WIDTH = 800
MODEL_A = "SmolLM2-135M’s shape, bf16"  # weights_tools/make_random.py smollm2-135m
STYLE = """
svg { background: #fff } .paper { fill: #fff }
text { font: 15px system-ui, sans-serif; fill: #24292f } .title { font-size: 20px; font-weight: 600 }
.small { font-size: 13px; fill: #57606a } .mono { font-family: ui-monospace, monospace; font-size: 13px }
.naive { fill: #c2410c } .cached { fill: #0f766e } .soft { fill: #0f766e; fill-opacity: .22 } .none { fill: none }
.empty { fill: #8c959f; fill-opacity: .16 } .mark { fill: #c2410c; fill-opacity: .25 } .on { fill: #fff }
.over { fill: #000 } .one { fill: #2563eb } .two { fill: #a16207 } .grey { fill: #8c959f; fill-opacity: .6 }
.axis { stroke: #8c959f; stroke-width: 1; fill: none } .layer, .plus { stroke: #8c959f; fill: #fff }
.line { fill: none; stroke-width: 2.5 } .s-naive { stroke: #c2410c } .s-cached { stroke: #0f766e }
.s-two { stroke: #a16207 } .look { stroke: #24292f; stroke-width: 2; fill: none } .dash { stroke-dasharray: 5 4 } .bold { font-weight: 600 }
@media (prefers-color-scheme: dark) { svg { background: #0d1117 } .paper, .layer, .plus { fill: #0d1117 }
text { fill: #e6edf3 } .small { fill: #a8b0ba } .naive, .mark { fill: #fb923c } .cached, .soft { fill: #2dd4bf }
.s-naive { stroke: #fb923c } .s-cached { stroke: #2dd4bf } .on { fill: #0d1117 }
.one { fill: #79b8ff } .two { fill: #e3b341 } .s-two { stroke: #e3b341 } .look { stroke: #e6edf3 } }
"""
# f32 to int2, from dark to light.
RAMP = {"f32": "#134e4a", "f16": "#115e59", "bf16": "#0f766e", "fp8": "#0d9488", "int8": "#14b8a6", "int4": "#5aa9e6",
        "int2": "#93a8f4"}


class Picture:
    def __init__(self, title, height):
        self.height, self.parts = height, []
        self.title = title
        self.text(20, 32, title, "title")

    def text(self, x, y, text, style="", anchor="start"):
        if text == "":
            return
        text = str(text).replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(f'<text x="{x:.5g}" y="{y:.5g}" class="{style}" text-anchor="{anchor}">{text}</text>')

    def box(self, x, y, width, height, style, extra=""):
        self.parts.append(f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" rx="3" '
                          f'class="{style}" {extra}/>')

    def line(self, points, style):
        path = " ".join(f"{x:.5g},{y:.5g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="{style}"/>')

    def dot(self, x, y, style, extra=""):
        self.parts.append(f'<circle cx="{x:.5g}" cy="{y:.5g}" r="5" class="{style}" {extra}/>')

    def save(self, path, numbers):
        kept = f"<metadata>{html.escape(json.dumps(numbers), quote=False)}</metadata>\n" if numbers else ""
        path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img">'
                        f"<title>{self.title}</title><style>{STYLE}</style>\n{kept}"
                        '<rect width="100%" height="100%" class="paper"/>\n' + "\n".join(self.parts) + "\n</svg>\n")
        print(path)


def over(opacity):
    """The style of a text on a box of this opacity, so that it can be read on white and on black."""
    return "on" if opacity > 0.85 else "over" if opacity > 0.56 else ""


class Axes:
    """Where numbers are on a picture; `log`: equal factors are equally far apart."""
    def __init__(self, picture, box, x_range, y_range, log=False):
        self.picture, self.box, self.ranges, self.log = picture, box, (x_range, y_range), log
        left, top, right, bottom = box
        picture.line([(left, top), (left, bottom), (right, bottom)], "axis")

    def at(self, x, y):
        left, top, right, bottom = self.box
        scale = math.log if self.log else float
        share = [(scale(value) - scale(low)) / (scale(high) - scale(low))
                 for value, (low, high) in zip((x, y), self.ranges)]
        return left + share[0] * (right - left), bottom - share[1] * (bottom - top)

    def ticks(self, xs, ys, x_label, y_label):
        left, top, right, bottom = self.box
        for x in xs:
            self.picture.text(self.at(x, self.ranges[1][0])[0], bottom + 20, f"{x:,}", "small", "middle")
        for y in ys:
            self.picture.text(left - 8, self.at(self.ranges[0][0], y)[1] + 5, f"{y:,}", "small", "end")
        self.picture.text(right, bottom + 40, x_label, "small", "end")
        self.picture.text(left - 40, top - 12, y_label, "small")


class Engine:
    def __init__(self, program, model, kept):
        self.program, self.model, self.kept = program, ["-m", model] if model else [], kept
        self.drawn, self.numbers = None, None  # the picture's file, and what was measured for it

    def __call__(self, *words, program=None):
        result = subprocess.run([program or self.program, *words, "--json"], capture_output=True, text=True)
        if result.returncode not in (0, 1):
            raise SystemExit(result.stderr.strip() or f"{self.program}: status {result.returncode}")
        return json.loads(result.stdout)

    def measured(self, measure):
        """What measure() finds; with --kept, what is kept in the picture."""
        found = re.search("<metadata>(.*)</metadata>", self.drawn.read_text()) if self.kept else None
        if self.kept and not found:
            raise SystemExit(f"{self.drawn}: keeps no numbers: measure them, without --kept")
        self.numbers = json.loads(html.unescape(found[1]) if found else json.dumps(measure()))
        return self.numbers

    def show(self, position, *words):
        return self("show", "-p", "Once upon a time", "--layer", "2", "--head", "4", "--position", str(position), *words)


def head(llm):
    picture = Picture("Each token looks at itself and at what came before it", 330)
    rows = [llm.show(position, "--cache", "none") for position in range(4)]
    names = [token["text"].strip('"').strip() or "(begin)" for token in rows[3]["prompt"]]
    for i, name in enumerate(names):
        picture.text(235 + i * 110, 88, name, "bold", "middle")
        picture.text(165, 124 + i * 52, f"{name} asks", "", "end")
    picture.text(20, 88, "weights, in %", "small")
    for i, row in enumerate(rows):
        for j in range(4):
            x, y = 185 + j * 110, 98 + i * 52
            weight = row["seen"][j]["weight"] if j <= i else 0
            picture.box(x, y, 100, 42, "cached" if j <= i else "empty",
                        f'fill-opacity="{0.12 + 0.88 * weight:.3g}"' if j <= i else "")
            if j <= i:
                picture.text(x + 50, y + 27, f"{100 * weight:.1f}", over(0.12 + 0.88 * weight), "middle")
            else:
                picture.text(x + 50, y + 27, "not seen", "small", "middle")
    picture.text(632, 124, "A row adds up to 100:", "small")
    picture.text(632, 144, "softmax of q · k / √D.", "small")
    picture.text(632, 228, "Grey: the causal mask.", "small")
    picture.text(20, 318, "Head 4 of layer 2 of the built-in model (llm show).", "small")
    return picture


def whole_model(llm):
    about, text = llm("info"), "Once upon a"
    ids = llm("tokenize", "-p", text)["ids"]
    with tempfile.TemporaryDirectory() as folder:
        llm("generate", "-p", text, "-n", "1", "--dump-logits", f"{folder}/logits.npy")
        row = 4 * about["vocabulary"]  # bytes of a position's logits: those of the new token come last
        logits = struct.unpack(f"<{row // 4}f", pathlib.Path(f"{folder}/logits.npy").read_bytes()[-2 * row:-row])
    best = sorted(range(len(logits)), key=lambda i: -logits[i])[:3]
    heads, kv_heads, D, ffn, hidden = (about[key] for key in ("heads", "kv_heads", "key_width", "ffn", "hidden"))
    picture = Picture("From tokens to logits: the cache keeps keys and values alone", 560)
    spine = 90

    def arrow(*points):
        picture.line(points, "axis")
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        picture.line([(x - 6 * dx - 4 * dy, y - 6 * dy - 4 * dx), (x, y), (x - 6 * dx + 4 * dy, y - 6 * dy + 4 * dx)], "axis")

    def step(x, y, width, first, second="", style="empty", height=44):
        picture.box(x, y, width, height, style)
        picture.text(x + width / 2, y + (19 if second else height / 2 + 5), first, "on" if style == "cached" else "", "middle")
        picture.text(x + width / 2, y + 36, second, "small", "middle")

    def plus(y):
        picture.parts.append(f'<circle cx="{spine}" cy="{y}" r="10" class="plus"/>')
        picture.text(spine, y + 5, "+", "bold", "middle")

    names = [llm("tokenize", "--ids", str(i))["text"].strip() or "(begin)" for i in ids]
    for i, (name, number) in enumerate(zip(["(begin)", *names[1:]], ids)):
        step(20 + i * 86, 56, 78, name, str(number))
    picture.text(380, 74, "tokens, and their ids. Each looks up its embedding:", "small")
    picture.text(380, 92, f"a vector x of {hidden} numbers. Follow the one of “{names[-1]}”.", "small")
    for shift in (8, 4, 0):  # a pile of layers
        picture.box(20 + shift, 118 + shift, 752, 290, "layer")
    picture.text(spine + 20, 140, f"{about['layers']} layers, one after the other, each with its own matrices:", "bold")
    last = 20 + (len(ids) - 1) * 86 + 39
    arrow((last, 100), (last, 109), (spine, 109), (spine, 296))
    # attention
    arrow((spine, 190), (124, 190))
    step(124, 168, 92, "RMSNorm")
    for y, name, count, style in ((156, "q", heads, "empty"), (204, "k", kv_heads, "cached"), (252, "v", kv_heads, "cached")):
        arrow((216, 190), (230, 190), (230, y + 20), (246, y + 20))
        step(246, y, 104, f"{name}: {count} × {D}", style=style, height=40)
    arrow((350, 176), (520, 176))
    for i in range(len(ids)):
        for y in (204, 252):
            picture.box(366 + i * 18, y, 15, 40, "cached" if i == len(ids) - 1 else "soft")
    for y in (224, 272):
        arrow((444, y), (484, y), (484, 194), (520, 194))
    step(520, 160, 130, "attention", f"{heads} heads", height=50)
    picture.text(585, 236, "K, V: a row a token,", "cached bold", "middle")
    picture.text(585, 254, "kept for all that follow", "cached bold", "middle")
    arrow((650, 185), (670, 185))
    step(670, 163, 84, "matrix", f"{heads * D} → {hidden}")
    arrow((712, 207), (712, 306), (spine + 10, 306))
    plus(306)
    # MLP
    arrow((spine, 316), (spine, 378))
    arrow((spine, 346), (124, 346))
    step(124, 324, 92, "RMSNorm")
    arrow((216, 346), (246, 346))
    step(246, 324, 120, "gate, up", f"2 × {ffn}")
    arrow((366, 346), (396, 346))
    step(396, 324, 160, "silu(gate) · up", f"{ffn}: SwiGLU")
    arrow((556, 346), (586, 346))
    step(586, 324, 168, "matrix", f"{ffn} → {hidden}")
    arrow((670, 368), (670, 388), (spine + 10, 388))
    plus(388)
    # logits
    arrow((spine, 398), (spine, 470), (124, 470))
    step(124, 448, 92, "RMSNorm")
    arrow((216, 470), (246, 470))
    step(246, 448, 120, "matrix", f"{hidden} → {about['vocabulary']:,}")
    arrow((366, 470), (396, 470))
    picture.text(396, 436, "logits, the largest of them:", "small")
    for i, token in enumerate(best):
        name = llm("tokenize", "--ids", str(token))["text"].strip()
        width = 200 * logits[token] / logits[best[0]]
        picture.box(480, 446 + i * 24, max(2, width), 18, "naive" if i == 0 else "grey")
        picture.text(472, 460 + i * 24, name, "bold" if i == 0 else "", "end")
        picture.text(488 + max(2, width), 460 + i * 24, f"{logits[token]:.1f}", "small")
    picture.text(20, 550, "The built-in model after “Once upon a” (llm info, llm tokenize, llm generate --dump-logits). "
                 "Grey boxes are not kept.", "small")
    return picture


def naive_and_cached(llm):
    def measure():  # the median of 25 neighbours: a machine has other things to do now and then
        steps = llm("diff", "-p", "Once upon a time", "-n", "600")["steps"][1:]
        near = lambda key, i: sorted(step[key] * 1e3 for step in steps[max(0, i - 12):i + 13])
        return [[(5 + i, round(near(key, i)[len(near(key, i)) // 2], 4)) for i in range(0, len(steps), 6)]
                for key in ("naive_seconds", "cached_seconds")]
    naive, cached = llm.measured(measure)
    picture = Picture("Naive tokens cost more and more, cached ones hardly do", 380)
    most = max(y for _, y in naive)
    top = 10 ** math.floor(math.log10(most))
    top = next(top * factor for factor in (1, 2, 3, 4, 5, 6, 8, 10) if top * factor >= most)
    axes = Axes(picture, (80, 80, 640, 320), (0, 600), (0, top))
    axes.ticks([0, 200, 400, 600], [0, top // 2 if top % 2 == 0 else top / 2, top], "positions so far",
               "ms for the next token")
    for points, style in ((naive, "naive"), (cached, "cached")):
        picture.line([axes.at(*point) for point in points], f"line s-{style}")
        x, y = axes.at(*points[-1])
        time = points[-1][1]
        picture.text(x + 12, y + 5, f"{style} {time:{'.0f' if time >= 10 else '.2g'}} ms", style + " bold")
    picture.text(20, 370, "Built-in model, llm diff -n 600.", "small")
    return picture


def one_row_appended(llm):
    picture = Picture("K and V gain one row; the query is used and thrown away", 380)
    found = llm.show(4, "--kv", "f32")
    for side, x in (("key", 150), ("value", 410)):
        picture.text(x, 80, f"{side}s: {side[0].upper()}", "bold")
        for i, row in enumerate(found["seen"]):
            y = 90 + i * 40
            picture.box(x, y, 230, 34, "cached" if i == 4 else "soft")
            numbers = "  ".join(f"{number:7.4f}" for number in row[side][:2]) + "  .."
            picture.text(x + 12, y + 22, numbers, "mono on" if i == 4 else "mono")
    for i, token in enumerate(found["prompt"]):
        picture.text(135, 112 + i * 40, token["text"].strip('"').strip() or "(begin)", "bold" if i == 4 else "", "end")
    picture.text(651, 112, "read:", "small")
    picture.text(651, 132, "computed once,", "small")
    picture.text(651, 152, "never changed", "small")
    picture.text(651, 272, "new: appended", "cached bold")
    picture.box(150, 312, 230, 34, "none", 'stroke="#c2410c" stroke-dasharray="5 4"')
    picture.text(162, 334, "  ".join(f"{number:7.4f}" for number in found["query"][:2]) + "  ..", "mono")
    picture.text(135, 334, "query", "", "end")
    picture.text(395, 334, "multiplied with each key, then thrown away", "naive")
    picture.text(20, 372, "\"Once upon a time\": layer 2, query head 4, which reads KV head 1 (llm show).", "small")
    return picture


def size(count):
    return f"{count / 2**30:g} GiB" if count >= 2**30 else f"{count / 2**20:g} MiB"


def kv_heads(llm):
    picture = Picture("Fewer KV heads make the cache smaller by the same factor", 260)
    for i, (name, heads, note) in enumerate((("MHA", 32, "each query head has its own"),
                                             ("GQA", 8, "4 query heads share one: Llama-3.1-8B"),
                                             ("MQA", 1, "all query heads share one"))):
        found = llm("memory", "--layers", "32", "--kv-heads", str(heads), "--head-dim", "128", "-c", "8192", "--kv",
                    "bf16", "--cache", "contiguous")["bytes"]
        y, width = 62 + i * 58, 420 * found / 2**32
        picture.text(20, y + 26, f"{name}, {heads} KV head" + "s" * (heads > 1), "bold")
        picture.box(190, y, max(4, width), 40, "cached")
        picture.text(200 + width, y + 18, size(found), "bold")
        picture.text(200 + width if width < 300 else 200, y + (36 if width < 300 else 26), note,
                     "small" if width < 300 else "on")
    picture.text(20, 250, "32 layers, D 128, 8,192 positions, bf16 (llm memory).", "small")
    return picture


def roofline(llm):
    def measure():
        found = llm("bench", *llm.model, "--kv", "f16", "--depth", "0", "--prefill", "1,2,4,8,16,32,64,128,512",
                    "-n", "32", "--repeats", "3")
        rows = [(row["name"], row["tokens"], row["operations"] / row["bytes"], row["gflops"])
                for row in found["results"]]
        return [MODEL_A if llm.model else "Built-in model", found["device"], found["roofline"]["read_gb_per_second"],
                found["roofline"]["matrix_gflops"], rows]
    model, device, memory, processor, rows = llm.measured(measure)
    picture = Picture("Decode waits for the memory, prefill for the processor", 400)
    axes = Axes(picture, (90, 90, 680, 330), (0.5, 1000), (5, processor * 2), log=True)
    axes.ticks([1, 10, 100, 1000], [10, 100], "operations for each byte that is read", "10⁹ operations/s")
    corner = processor / memory
    picture.line([axes.at(0.5, memory / 2), axes.at(corner, processor), axes.at(1000, processor)], "axis dash")
    x, y = axes.at(100, processor)
    picture.text(x, y - 10, f"the processor: {processor:.0f} · 10⁹ operations/s", "small", "middle")
    x, y = axes.at(6, memory * 6)
    picture.text(x - 12, y, f"the memory: {memory:.0f} GB/s", "small", "end")
    for name, tokens, each_byte, rate in rows:
        x, y = axes.at(max(0.5, each_byte), rate)
        decode = name == "decode"
        picture.dot(x, y, "cached" if decode else "none", "" if decode else 'stroke="#5aa9e6" stroke-width="2.5"')
        if decode or tokens in (8, 64, 512):
            text = "decode: one token" if decode else f"prefill of {tokens}"
            picture.text(x + 12, y + (20 if decode else 18), text, "cached bold" if decode else "")
    picture.text(20, 390, f"{model}, {device}, llm bench.", "small")
    return picture


def layouts(llm):
    picture = Picture("Eleven positions, numbered in their rows, in three layouts", 350)
    table = (2, 0, 5)
    def rows(y, name, note, cells, count):
        picture.text(20, y + 22, name, "bold")
        picture.text(20, y + 42, note[0], "small")
        picture.text(20, y + 59, note[1], "small")
        for row in range(count):
            style = cells.get(row, (None, "empty"))
            picture.box(222 + row * 23, y, 21, 34, style[1])
            if style[0] is not None:
                picture.text(232 + row * 23, y + 22, style[0], "mono", "middle")
            if row % 4 == 0:
                picture.text(232 + row * 23, y + 50, row, "small", "middle")
    rows(70, "contiguous", ("row = position", "all rows reserved"), {t: (t, "soft") for t in range(11)}, 24)
    paged = {table[t // 4] * 4 + t % 4: (t, "soft") for t in range(11)}
    rows(160, "paged, P = 4", ("page table 2 0 5", "row = table[t / 4] · 4 + t % 4"), paged, 24)
    ring = {t % 8: (t, "soft") for t in range(11)}
    rows(250, "ring, 8 rows", ("row = t mod 8", "the last ones stay"), ring, 8)
    picture.text(430, 262, "positions 8, 9, 10 took the rows of 0, 1, 2", "small")
    picture.text(430, 282, "grey: free, or another sequence's", "small")
    return picture


def pages_of_two(llm):
    picture = Picture("Two texts grow in one pool of pages, and no row is moved", 330)
    steps = (("both prompts are read", {0: [0, 1], 1: [2]}, (6, 3)),
             ("both have decoded 7 tokens", {0: [0, 1, 4, 6], 1: [2, 3, 5]}, (13, 10)),
             ("0 ended, a new 0 began", {0: [4, 6], 1: [2, 3, 5, 0, 1]}, (5, 19)))
    for page in range(8):
        picture.text(325 + page * 60, 72, f"page {page}", "small", "middle")
    for i, (name, tables, lengths) in enumerate(steps):
        y = 84 + i * 72
        picture.text(20, y + 18, name, "bold")
        for sequence in (0, 1):
            table = " ".join(map(str, tables[sequence]))
            picture.text(20, y + 36 + sequence * 16, f"table of {sequence}: {table}", "two mono" if sequence else "one mono")
        for page in range(8):
            picture.box(298 + page * 60, y, 54, 44, "empty")
            for sequence in (0, 1):
                if page in tables[sequence]:
                    filled = min(4, lengths[sequence] - 4 * tables[sequence].index(page))
                    for k in range(filled):
                        picture.box(300 + page * 60 + k * 13, y + 3, 11, 38, "two" if sequence else "one")
    picture.text(20, 318, "Position 6 of text 1: logical page 6 / 4 = 1, entry 1 of its table is page 3, row 3 · 4 + 2 = 14.",
                 "small")
    return picture


def kinds(llm):
    picture = Picture("A local layer gives back the pages that it no longer sees", 376)
    ids = ",".join(str(3 + 7 * i % 40) for i in range(72))
    notes = (("the query at 71 sees only these",
              "–: given back. The pages 0 and 1 were used again for the newest positions"),
             ("", "it sees all positions, so it holds all pages"))
    for i, name in enumerate(("a local layer", "a global layer")):
        shown = llm("show", "-m", "tests/fixtures/models/gemma3", "--ids", ids, "--layer", str(i), "--head", "0",
                    "--cache", "paged", "--page", "4")
        weights = {one["position"]: one["weight"] for one in shown["seen"]}
        table, y, most = shown["place"]["page_table"], 58 + i * 140, max(weights.values())
        picture.text(20, y + 14, f"{name} sees {len(weights)} of 72", "bold")
        left = 20 + min(weights) // 4 * 42.2 + min(weights) % 4 * 10 - 2
        picture.box(left, y + 22, 780 - left, 34, "look")
        picture.text(780, y + 14, notes[i][0], "", "end")
        given_back = sum(physical < 0 for physical in table) or len(table)
        right = given_back * 42.2 + 16
        picture.line([(20, y + 94), (20, y + 98), (right, y + 98), (right, y + 94)], "look")
        picture.text(20, y + 116, notes[i][1])
        for page, physical in enumerate(table):
            x = 20 + page * 42.2
            for t in range(4 * page, 4 * page + 4):
                style, extra = ("cached", f'fill-opacity="{.1 + .9 * weights[t] / most:.3g}"') if t in weights else ("empty", "")
                picture.box(x + t % 4 * 10, y + 24, 9, 30, style, extra)
            picture.box(x - .5, y + 60, 40, 30, "empty" if physical < 0 else "soft")
            picture.text(x + 19.5, y + 80, "–" if physical < 0 else physical, "small" if physical < 0 else "", "middle")
    picture.text(20, 344, "Above: positions 0 to 71, stronger where the query at 71 puts more weight. Below: the page "
                 "table, P = 4.", "small")
    picture.text(20, 364, "tests/fixtures/models/gemma3 (llm show). Pages are given back 32 positions at a time.",
                 "small")
    return picture


def residues(llm):
    """The tree of a sum of 16 lanes, in the order in which products of many tokens compute it."""
    del llm  # nothing is asked
    picture = Picture("A sum of 16 lanes, one lane after the other: four tiles wait at most", 400)
    order = [int(f"{turn:04b}"[::-1], 2) for turn in range(16)]
    left, step, bottom, rise, done = 64, 46, 296, 56, 7
    places = [left + turn * step for turn in range(16)]
    kept = {(0, 2), (4, 1), (6, 0)}  # (first turn, level) of what is kept after `done` turns
    for level in range(4):
        for first in range(0, 16, 2 << level):
            x, y = sum(places[first:first + (2 << level)]) / (2 << level), bottom - (level + 1) * rise
            for half in (0, 1):
                start = first + half * (1 << level)
                below = sum(places[start:start + (1 << level)]) / (1 << level)
                picture.line([(below, y + rise - (16 if level == 0 else -1)), (below, y + 9), (x, y + 9)], "axis")
            finished = first + (2 << level) <= done
            on_stack = (first, level + 1) in kept
            picture.dot(x, y + 6, "cached" if on_stack else "grey" if finished else "plus", 'stroke-width="1.5"')
    for turn, residue in enumerate(order):
        style = "cached" if (turn, 0) in kept else "soft" if turn < done else "empty"
        picture.box(places[turn] - 17, bottom - 16, 34, 30, style)
        picture.text(places[turn], bottom + 5, residue, "bold" + (" on" if (turn, 0) in kept else ""), "middle")
        picture.text(places[turn], bottom + 34, turn + 1, "small", "middle")
    picture.text(20, bottom + 34, "turn", "small")
    picture.text(sum(places) / 16 + 14, bottom - 4 * rise + 2, "the sum", "small")
    picture.text(20, 362, "Box j: the channels j, j + 16, j + 32, … of all rows and tokens of a tile, added up in registers.",
                 "small")
    picture.text(20, 384, "A dot adds two finished tiles. Strong: what is kept after seven turns, two tiles on the stack "
                 "and one in registers.", "small")
    return picture


def int4_block(llm):
    picture = Picture("int4 keys: the 32 positions of a channel share a scale", 412)
    ids = ",".join(map(str, range(3, 43)))
    exact = llm("show", "-m", "tests/fixtures/huge_keys", "--ids", ids, "--kv", "f32")["seen"]
    picture.text(20, 74, "channel", "small")
    picture.text(90, 74, "positions 0 .. 31: codes from 0 to 15", "small")
    picture.text(548, 74, "their scale", "small")
    picture.text(782, 74, "32 .. 39 wait at f16", "small", "end")
    for line, channel in enumerate((0, 1, 2, 27, 30, 31)):
        y, numbers = 84 + line * 36 + 16 * (line > 2) + 16 * (line > 3), [row["key"][channel] for row in exact]
        low, high = min(numbers[:32]), max(numbers[:32])
        scale = (high - low) / 15
        picture.text(60, y + 20, channel, "mono", "end")
        if line in (2, 3):  # channels that are not shown
            picture.text(56, y + 44, "...", "small", "end")
        for t, number in enumerate(numbers[:32]):
            code = round((number - low) / scale) if scale else 0
            picture.box(90 + t * 14, y, 12, 28, "cached", f'fill-opacity="{0.1 + 0.06 * code:.3g}"')
        for t in range(8):
            picture.box(670 + t * 14, y, 12, 28, "mark")
        picture.box(86, y - 3, 574, 34, "axis")
        picture.text(546, y + 12, f"zero point {low:.1f}", "small")
        picture.text(546, y + 26, f"scale {scale:.2f}", "small")
    picture.text(20, 362, "A frame is what is stored of a channel: the stronger the colour, the larger the code.",
                 "small")
    picture.text(20, 382, "number ≈ zero point + scale · code. Channel 31 is near 300, and its steps are small.",
                 "small")
    picture.text(20, 402, "Keys of tests/fixtures/huge_keys (llm show).", "small")
    return picture


def blocks_of_32(llm):
    picture = Picture("A block of int4 keys is turned: a stored row holds a channel", 426)
    words = ("show", "--ids", ",".join(map(str, range(1, 33))), "--layer", "2", "--head", "4", "--kv", "f32")
    column = [row["key"][5] for row in llm(*words)["seen"]]
    top, side, left, right, low, high = 92, 8.5, 60, 500, min(column), max(column)
    bottom, x, y = top + 32 * side, left + 5 * side, top + 5 * side
    picture.text(left, 62, "computed: a row is a position", "bold")
    picture.text(right, 62, "stored: a row is a channel", "bold")
    picture.text(left, 82, "channels 0 .. 31", "small")
    picture.text(right, 82, "codes of positions 0 .. 31", "small")
    picture.text(right - 8, 82, "scale, zero point", "small", "end")
    shades = [f'fill-opacity="{.1 + .06 * round(15 * (number - low) / (high - low)):.3g}"' for number in column]
    for i, shade in enumerate(shades):
        at = top + i * side
        picture.box(left, at, 32 * side - 1.5, side - 1.5, "soft")
        picture.box(x, at, side - 1.5, side - 1.5, "on")
        picture.box(x, at, side - 1.5, side - 1.5, "naive", shade)
        for from_x, width in ((right - 74, 30), (right - 38, 30), (right, 32 * side - 1.5)):
            picture.box(from_x, at, width, side - 1.5, ("on" if from_x == right else "naive") if i == 5 else
                        "soft" if from_x == right else "grey")
    for i, shade in enumerate(shades):
        picture.box(right + i * side, y, side - 1.5, side - 1.5, "naive", shade)
    for name, number, at in (("position 0", "row 0", 0), ("31", "31", 31)):
        picture.text(left - 6, top + at * side + 9, name.split()[-1], "small", "end")
        picture.text(right - 82, top + at * side + 9, number, "small", "end")
    picture.text(right - 82, y + 8, "5", "naive bold", "end")
    picture.line([(x + 3.5, bottom), (x + 3.5, bottom + 12), (360, bottom + 12), (360, y + 3), (400, y + 3)], "s-naive none dash")
    picture.text(x + 14, bottom + 30, "channel 5 of 32 positions: one row, with one scale", "naive")
    picture.text(20, bottom + 52, "Codes of keys of the built-in model, D = 32 (llm show): strong is large. With D = 128 "
                 "a row has four channels.", "small")
    return picture


def quality(llm):
    values = llm.measured(lambda: [
        (row["bytes_per_token"], max(1e-8, row["kl"]), row["type_k"])
        for row in llm("eval", "--kv", "f32,f16,bf16,fp8,int8,int4,int2", "-t", "1")["results"]
        if row.get("type_k") == row.get("type_v") != "f32"])
    picture = Picture("Down to int4 the text stays as good; int2 breaks it", 360)
    axes = Axes(picture, (110, 90, 700, 300), (150, 1400), (1e-8, 10), log=True)
    axes.ticks([200, 400, 800], [], "bytes a token, metadata included", "KL divergence from an f32 cache, nats")
    for power in (-8, -6, -4, -2, 0):
        picture.text(102, axes.at(150, 10.0**power)[1] + 5, f"1e{power}", "small", "end")
    for x, y, name in values:
        at = axes.at(x, y)
        picture.dot(*at, "", f'fill="{RAMP[name]}" stroke="#8c959f"')
        below = name == "int8"
        picture.text(at[0] + 10, at[1] + (18 if below else -6), name, "bold")
    picture.text(20, 350, "Built-in model, 50 held-out stories, llm eval.", "small")
    return picture


def ladder(llm):
    words = ("bench", "--kv", "f16", "--depth", "0,1000", "--prefill", "512", "-n", "32", "--repeats", "3")
    programs = str(pathlib.Path(llm.program).resolve().parent / "llm-plain"), llm.program
    runs = llm.measured(lambda: [[(row["name"], row["depth"], row["tokens_per_second"])
                                  for row in llm(*words, program=program)["results"]] for program in programs])
    plain, fast = ({(name, depth): rate for name, depth, rate in run} for run in runs)
    most = max(fast[key] / plain[key] for key in fast)
    picture = Picture(f"The fast twins write the same text, up to {most:.0f} times as fast", 250)
    for i, (key, name) in enumerate(((("prefill", 0), "prefill of 512"), (("decode", 0), "decode, empty cache"),
                                     (("decode", 1000), "decode after 1,000"))):
        y, most = 64 + i * 56, max(max(fast.values()), 1)
        picture.text(20, y + 22, name)
        for k, (found, style, label) in enumerate(((plain, "grey", "plain"), (fast, "cached", "fast"))):
            width = 420 * found[key] / most
            picture.box(190, y + k * 22, max(2, width), 19, style)
            ratio = f", {fast[key] / plain[key]:.1f} times" if k else ""
            picture.text(198 + width, y + k * 22 + 15, f"{label} {found[key]:,.0f}{ratio}", "small")
    picture.text(20, 242, "tokens/s, built-in model, 2 threads (llm-plain bench, llm bench).", "small")
    return picture


def errors(llm):
    picture = Picture("int4 is 16 times as far off as int8; int6 should lie between", 380)
    axes = Axes(picture, (110, 90, 700, 310), (2, 20), (1e-4, 1), log=True)
    axes.ticks([2, 4, 8, 16], [], "bits a number, with its share of the scales", "error / size, root mean square")
    for power in range(-4, 1):
        picture.text(102, axes.at(2, 10.0**power)[1] + 5, f"{10.0**power:g}", "small", "end")
    ids = ",".join(str(1 + i * 37 % 1200) for i in range(64))
    for name, bits in (("f16", 16), ("bf16", 16), ("fp8", 8.125), ("int8", 8.125), ("int4", 5), ("int2", 3)):
        found = llm("show", "--ids", ids, "--kv", name)["errors"]
        first = [row["relative_error"] for row in found if row["layer"] == 0]  # later layers inherit errors
        at = axes.at(bits, sum(first) / len(first))
        picture.dot(*at, "", f'fill="{RAMP[name]}" stroke="#8c959f"')
        picture.text(at[0] + 12, at[1] + 5, f"{name} {sum(first) / len(first):.2g}", "bold")
    x, y = axes.at(6.125, 0.0184)
    picture.dot(x, y, "none", 'stroke="#8c959f" stroke-width="2" stroke-dasharray="3 3"')
    picture.text(x - 12, y + 5, "int6?", "small", "end")
    picture.text(20, 370, "Keys and values of layer 0 of the built-in model, 64 positions (llm show).", "small")
    return picture


def batch_run(llm, folder, file, *words):
    """What llm batch says of each request, by id, and where its events are."""
    events = f"{folder}/events"
    result = subprocess.run([llm.program, "batch", "-f", file, "--events", events, *words], capture_output=True,
                            text=True, check=True)
    return {line["id"]: line for line in map(json.loads, result.stdout.splitlines()) if "id" in line}, events


def three_batches(llm):
    picture = Picture("Four requests: the places of a continuous batch are never empty", 430)
    colours = dict(zip("ABCD", ("one", "two", "cached", "naive")))
    def cell(at, y, name, tokens, padded):
        x, share = 130 + at * 32, tokens / padded
        picture.box(x, y, 30 * share, 30, colours[name], 'fill-opacity=".35"' if padded == 1 else "")
        if share < 1:  # the number where there is more room
            picture.box(x + 30 * share, y, 30 * (1 - share), 30, "grey")
        picture.text(x + (15 if share in (0, 1) else 15 * share if share > 0.5 else 15 + 15 * share), y + 20,
                     name if padded == 1 else tokens, "bold" if padded == 1 or share <= 0.5 else "on bold", "middle")
    def panel(y, name, note, rows):  # rows: a place, its cells (name, tokens, padded to) or None
        picture.text(20, y + 20, name, "bold")
        picture.text(20, y + 38, f"{len(rows[0])} passes", "small")
        picture.text(20, y + 54, note, "small")
        for line, row in enumerate(rows):
            for at, one in enumerate(row):
                if one:
                    cell(at, y + line * 34, *one)
                else:
                    picture.box(130 + at * 32, y + line * 34, 30, 30, "empty dash", 'stroke="#8c959f"')
    def places(np):  # of a real run: who has which place in each pass
        rows, place, ended, reads = [[] for _ in range(np)], [None] * np, [], {}
        with tempfile.TemporaryDirectory() as folder:
            lines, events = batch_run(llm, folder, "docs/requests.jsonl", "-np", str(np), "--cache", "contiguous")
            for event in map(json.loads, open(events)):
                if event["event"] == "admit":
                    place[place.index(None)] = event["id"]
                    reads[event["id"]] = lines[event["id"]]["prompt_tokens"]
                elif event["event"] == "end":
                    ended.append(event["id"])
                elif event["event"] == "pass":  # the events of its ends came before
                    cells = [name and (name, reads[name], reads[name]) for name in place]
                    assert sum(cell[1] for cell in cells if cell) == event["count"], "not the tokens that the pass says"
                    for row, cell in zip(rows, cells):
                        row.append(cell)
                    reads = dict.fromkeys(reads, 1)
                    place = [None if name in ended else name for name in place]
        return lines, rows
    lines, alone = places(1)
    panel(60, "one by one", "", alone)
    static = [[], []]
    for pair in ("AB", "CD"):
        prompt = max(lines[name]["prompt_tokens"] for name in pair)
        passes = max(len(lines[name]["tokens"]) for name in pair)
        for row, name in zip(static, pair):
            own = len(lines[name]["tokens"])
            row += [(name, lines[name]["prompt_tokens"], prompt)] + [(name, 1, 1)] * (own - 1) + [None] * (passes - own)
    panel(142, "static batch", "of two", static)
    panel(254, "continuous", "two places", places(2)[1])
    picture.text(20, 364, "A column is a pass. A strong cell reads a prompt and says how many tokens; a pale one writes a token.",
                 "small")
    picture.text(20, 384, "Grey: padding, computed for nothing. Dashed: the text has ended, its place is held.", "small")
    picture.text(20, 418, "docs/requests.jsonl; one by one and continuous as they ran (llm batch -np 1 and -np 2 --events).",
                 "small")
    return picture


def pages_shared(llm):
    """Who holds which page while a pass computes: a page that several hold has the colours of all."""
    picture = Picture("Four questions about one story hold its pages together", 430)
    with tempfile.TemporaryDirectory() as folder:
        _, events = batch_run(llm, folder, "docs/agents.jsonl", "-n", "20", "-np", "2")
        columns = [rest for _, *rest in tables.passes(events)]
    names = dict.fromkeys(name for held, _ in columns for name in held)
    colours = dict(zip(names, ("one", "two", "cached", "naive")))
    pages = 1 + max(page for held, _ in columns for table in held.values() for page in table)
    left, top, height, width = 76, 76, 20, (WIDTH - 96) / len(columns)
    picture.text(20, top - 6, "pass", "small")
    picture.text(20, top + height - 4, "page", "small")
    for page in range(pages):
        picture.text(left - 8, top + page * height + height / 2 + 5, page, "small", "end")
    for at, (held, known) in enumerate(columns):
        picture.text(left + at * width + width / 2 - 1, top - 6, at + 1, "small", "middle")
        for page in range(pages):
            styles = [colours[name] for name in names if page in held.get(name, [])]
            styles = styles or ["grey" if page in known else "empty"]
            for i, style in enumerate(styles):
                share = (width - 2) / len(styles)
                picture.box(left + at * width + i * share, top + page * height, share, height - 2, style)
    shared = [page for page in range(pages) if all(sum(page in table for table in held.values()) > 1
                                                   for held, _ in columns[1:])]
    x, y = left + width - 2, top + min(shared) * height - 2
    picture.box(x, y, WIDTH - 22 - x, len(shared) * height + 2, "look")
    at = top + (max(shared) + 2) * height + 14
    picture.line([(x + 20, y + len(shared) * height + 2), (x + 20, at - 12)], "look")
    picture.text(x + 12, at, "the story: read in pass 1, held by two requests at a time from then on", "")
    copies = sorted(set.difference(*({page for table in held.values() for page in table} for held, _ in columns[:2])))
    picture.text(x + 12, at + 20, "(in pass 1 both read it; then the second copy, pages "
                 f"{copies[0]} to {copies[-1]}, is given back)", "small")
    x, y = left, top + pages * height + 24
    for name, style in [*colours.items(), ("known, held by no one", "grey"), ("free", "empty")]:
        picture.box(x, y - 12, 15, 15, style)
        picture.text(x + 20, y, name, "small")
        x += 44 + 7.2 * len(name)
    picture.text(20, y + 28, "A page with two colours is held by two requests. docs/agents.jsonl (llm batch -np 2 --events).",
                 "small")
    return picture


def cascade(llm):
    """What attention reads of four texts with one beginning, each by itself and together: from the page tables of a run,
    by splits of 256 positions (plan_attention in fast/attend.cpp)."""
    page, split, names = 16, 256, "ABCD"
    with tempfile.TemporaryDirectory() as folder:
        requests = pathlib.Path(folder) / "requests.jsonl"
        requests.write_text("".join(json.dumps({"id": name, "ids": [1 + i * 7 % 1000 for i in range(512)] + [
            3 + i + 50 * k for i in range(80 + 40 * k)]}) + "\n" for k, name in enumerate(names)))
        lines, events = batch_run(llm, folder, str(requests), "-np", "4", "--page", str(page), "-n", "8")
        tables_of = next(held for _, held, _ in tables.passes(events) if len(held) == 4 and all(
            len(held[name]) * page > lines[name]["prompt_tokens"] for name in names))
    lengths = {name: lines[name]["prompt_tokens"] for name in names}
    shared = 0
    while len({tuple(table[:(shared + split) // page]) for table in tables_of.values()}) == 1:
        shared += split
    alone, together = sum(lengths.values()), shared + sum(length - shared for length in lengths.values())
    picture = Picture("Four texts with one beginning: the rows of its pages are read once", 338)
    scale, height = 330 / max(lengths.values()), 30
    for left, title, count in ((50, "each text by itself", alone), (440, "together", together)):
        picture.text(left, 68, title, "bold")
        for k, (name, style) in enumerate(zip(names, ("one", "two", "cached", "naive"))):
            y = 82 + k * (height + 6)
            picture.text(left - 10, y + 20, name, "small", "end")
            for begin in range(0, lengths[name], split):
                own, width = begin >= shared, min(split, lengths[name] - begin) * scale - 2
                if left == 50 or own:
                    picture.box(left + begin * scale, y, width, height, style if own else "soft")
                if left == 50 and not own:
                    picture.text(left + begin * scale + width / 2, y + 20, f"pages {tables_of[name][begin // page]} .. "
                                 f"{tables_of[name][(begin + split) // page - 1]}", "small", "middle")
        for begin in range(0, shared if left > 50 else 0, split):
            picture.box(left + begin * scale, 82, split * scale - 2, 4 * height + 18, "soft")
            picture.text(left + (begin + split / 2) * scale, 148, "queries of", "small", "middle")
            picture.text(left + (begin + split / 2) * scale, 166, "A, B, C, D", "bold", "middle")
        for at in range(0, shared + 1, split):
            picture.text(left + at * scale, 242, at, "small", "middle" if at else "start")
        picture.text(left, 268, f"{count:,} rows of each KV head are read", "cached bold" if left > 50 else "bold")
    picture.text(20, 304, "Each box is a split of up to 256 positions. A split that all hold is one tile, with the queries "
                 "of all; what it gives", "small")
    picture.text(20, 322, "goes to each text, which merges its splits as it always does. So the bits are the same. "
                 "(llm batch -np 4 --events)", "small")
    return picture


def peak(llm):
    picture = Picture("The peak is 14 pages, though the three ends add up to 22", 400)
    with tempfile.TemporaryDirectory() as folder:
        lines, events = batch_run(llm, folder, "docs/peak.jsonl", "--page", "1", "--pool", "14")
        held = [{name: len(held) for name, held in pages.items()} for _, pages, _ in tables.passes(events)]
    colours, left, bottom, step, rise = {"B": "cached", "C": "two", "A": "one"}, 100, 330, 72, 11.5
    ends = {name: max(one.get(name, 0) for one in held) for name in colours}
    for at, one in enumerate(held):
        x, count = left + at * step, 0
        for name, style in colours.items():
            for _ in range(one.get(name, 0)):
                picture.box(x, bottom - (count + 1) * rise, 48, rise - 1.5, style)
                count += 1
            if one.get(name):
                picture.text(x + 54, bottom - (count - one[name] / 2) * rise + 5, name, f"{style} bold")
        last = [name for name in colours if one.get(name) and not (held + [{}])[at + 1].get(name)]
        picture.text(x + 24, bottom - count * rise - 6, count, "bold", "middle")
        picture.text(x + 24, bottom + 20, f"pass {at + 1}", "small", "middle")
        picture.text(x + 24, bottom + 36, f"{last[0]} ends" if last else "", "small", "middle")
    most, total = max(sum(one.get(name, 0) for name in colours) for one in held), sum(ends.values())
    for count, what, style in ((most, "", "s-naive"), (total, f"all three at their ends: {total}", "dash")):
        y = bottom - count * rise
        picture.text(left - 12, y + 5, count, "small", "end")
        picture.line([(left - 6, y), (left + 8 * step - 12, y)], f"axis {style}")
        picture.text(left + 8 * step - 12, y - 8, what, "small", "end")
    picture.text(20, 70, "pages", "small")
    picture.text(20, 390, "A box is a page of one position (llm batch -f docs/peak.jsonl --page 1 --pool 14 --events).", "small")
    return picture


def batch_steps(llm):
    """Time of a pass by texts in it, as the one thread's time on a processor: other programs may run next to it."""
    depths, sizes, steps, style = (16, 1000), (1, 2, 4, 8, 16), 30, {16: "cached", 1000: "naive"}
    def measure():
        times = {}
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "requests.jsonl"
            for depth, size in ((depth, size) for depth in depths for size in sizes):
                ids = [[1 + (37 * t * (i + 1) + i) % 1200 for t in range(depth)] for i in range(size)]
                requests = [{"id": f"{i}", "n": steps + 1, "ids": ids[i]} for i in range(size)]
                requests.append({"id": "read", "n": 1, "ids": [7]})  # ends when the prompts are read
                file.write_text("".join(json.dumps(request) + "\n" for request in requests))
                run = subprocess.Popen([llm.program, "batch", "-f", str(file), "-np", f"{size + 1}", "-t", "1",
                                        "--ignore-eos", "--pass-tokens", f"{size * depth + 1}", *llm.model], text=True,
                                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
                spent = []  # nanoseconds, at the end of each request
                for line in run.stdout:
                    if '"id"' in line and len(spent) < 2:
                        spent.append(int(pathlib.Path(f"/proc/{run.pid}/schedstat").read_text().split()[0]))
                times[depth, size] = (spent[1] - spent[0]) / steps / 1e6
                print(depth, size, f"{times[depth, size]:.2f} ms", flush=True)
        about = llm("info", *llm.model)
        return [MODEL_A if llm.model else "Built-in model", about["weight_bytes"], about["cache_bytes_per_token_f16"],
                [(*key, round(time, 3)) for key, time in times.items()]]
    model, weights, cache, times = llm.measured(measure)
    times = {(depth, size): time for depth, size, time in times}
    longer = [times[depth, 16] / times[depth, 1] for depth in depths]
    picture = Picture(f"16 texts in a pass take {min(longer):.1f} to {max(longer):.1f} times as long as one", 396)
    most = max(times.values())
    top = next(f * 10**p for p in range(-1, 5) for f in (1, 2, 4, 5, 8) if f * 10**p >= most)
    axes = Axes(picture, (80, 80, 540, 300), (0, 16), (0, top))
    axes.ticks(sizes, [0, top // 2, top], "texts in a pass", "ms for a pass")
    for depth in depths:
        rate = (weights + 16 * cache) / times[16, 1]  # what the memory gave
        picture.line([axes.at(size, (weights + size * depth * cache) / rate) for size in sizes], "axis dash")
        picture.line([axes.at(size, times[depth, size]) for size in sizes], f"line s-{style[depth]}")
        for size in sizes:
            picture.dot(*axes.at(size, times[depth, size]), style[depth])
        x, y = axes.at(16, times[depth, 16])
        picture.text(x + 12, y, f"after {depth:,} tokens each", style[depth] + " bold")
        picture.text(x + 12, y + 18, f"{16e3 / times[depth, 16]:.0f} tokens/s; one text {1e3 / times[depth, 1]:.0f}", "small")
    picture.text(20, 366, "Dashed: (weights + B · cache) / bandwidth, the memory's limit; above it the processor is the limit.",
                 "small")
    picture.text(20, 384, f"{model}, f16 cache, 1 thread's own time, mean of 30 passes (llm batch).", "small")
    return picture


def guesses(llm):
    """Speed-up by guesses a pass, predicted from acceptance and cost, and measured: the built-in pair, and with --model
    n-grams on two texts of that model. Its weights are random: at temperature 0 it repeats itself, at 1 it does not."""
    ngram = ("bench", *llm.model, "--draft", "ngram", "--ids", "1,2,3,4,5")
    runs = [("cached", ("built-in model and its draft",), ("bench", "--draft", "weights_tools/draft", "-p",
                                                           "Once upon a time", "-n", "300", "--draft-tokens", "5"))]
    if llm.model or llm.kept:
        runs += [("naive", ("n-grams, 269 MB of random weights,", "whose text repeats itself"),
                  (*ngram, "-n", "100", "--draft-tokens", "5")),
                 ("two", ("n-grams, the same weights,", "a text that does not repeat itself"),
                  (*ngram, "-n", "60", "--draft-tokens", "4", "--temp", "1", "-s", "1"))]
    def measure():
        found = [llm(*words) for _, _, words in runs]
        keys = ("guesses", "predicted", "measured", "tokens_per_pass", "check_cost", "guess_cost")
        results = [[[round(row[key], 3) for key in keys] for row in one["results"][:6]] for one in found]
        return [found[0]["device"], results]
    device, results = llm.measured(measure)
    top = math.ceil(0.2 + max(max(row[1:3]) for rows in results for row in rows))
    picture = Picture("Guesses pay if they are right and cost little", 396)
    axes = Axes(picture, (80, 80, 430, 300), (0, 5), (0, top))
    axes.ticks(range(6), range(top + 1), "guesses of a pass", "times as fast as without")
    picture.line([axes.at(0, 1), axes.at(5, 1)], "axis")
    for (style, names, _), rows in zip(runs, results):
        picture.line([axes.at(*row[:2]) for row in rows], "axis dash")
        picture.line([axes.at(row[0], row[2]) for row in rows], f"line s-{style}")
        for row in rows:
            picture.dot(*axes.at(row[0], row[2]), style)
        last, _, speed, tokens, check, guess = rows[-1]
        x, y = axes.at(5, speed)
        y += {"two": 42, "cached": -34}.get(style, 0)
        for line, name in enumerate(names):
            picture.text(x + 14, y - 9 + line * 18, name, style + " bold")
        y += 18 * len(names) - 9
        if tokens > 1.01:
            picture.text(x + 14, y, f"{last} guesses: {tokens:.1f} tokens a pass, which", "small")
            picture.text(x + 14, y + 18, f"costs {check:.1f}, and its guesses {guess:.1f}", "small")
        else:
            picture.text(x + 14, y, f"nothing to guess: {speed:.2f} times as fast", "small")
    picture.text(20, 366, "Dashed: predicted, (1 − a^(k+1)) / (1 − a) tokens a pass, over what a pass and its guesses cost.",
                 "small")
    picture.text(20, 384, f"{device}, f16 cache (llm bench --draft). 1 is the time without guesses.", "small")
    return picture


def conversation(llm):
    """Time to the first token of each turn of a chat, with and without its cache: of three chats the median."""
    def times(story, *flags):
        chats = [chat_recall.talk(llm.program, story, flags) for _ in range(3)]
        return [[(turn + 1, round(1e3 * sorted(chat[turn]["seconds_to_first_token"] for chat in chats)[1], 3))
                 for turn in range(len(chats[0]))], chats[0][-1]["kept"], chats[0][-1]["read"]]
    def measure():
        stories = [json.loads(line) for line in open("weights_tools/builtin/heldout_mixed.jsonl")]
        story = max(stories, key=lambda story: len(story["text"]))
        return [times(story, "--cache", "none")[0], *times(story)]
    naive, cached, kept, read = llm.measured(measure)
    picture = Picture("A turn reads what is new; without its cache, all of the conversation", 390)
    last = len(cached)
    top = 10 * math.ceil(max(y for _, y in naive) / 10)
    axes = Axes(picture, (80, 80, 580, 320), (1, last), (0, top))
    axes.ticks([1, *range(10, last + 1, 10)], [0, top // 2, top], "turn", "ms to the first token")
    for points, style, name in ((naive, "naive", "all read again"), (cached, "cached", "turns kept")):
        picture.line([axes.at(*point) for point in points], f"line s-{style}")
        x, y = axes.at(*points[-1])
        picture.text(x + 12, y + 5, f"{name}: {points[-1][1]:.{0 if points[-1][1] > 10 else 1}f} ms", style + " bold")
    picture.text(20, 382, "The longest held-out story, a line a turn, told to the built-in model. Its last turn keeps "
                 f"{kept:,} positions and reads {read}.", "small")
    return picture


PICTURES = [head, whole_model, naive_and_cached, one_row_appended, kv_heads, roofline, layouts, pages_of_two, kinds,
            residues, int4_block, blocks_of_32, ladder, errors, quality, three_batches, batch_steps, pages_shared, cascade,
            peak, guesses, conversation]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=" ".join(draw.__name__ for draw in PICTURES))
    parser.add_argument("--out", type=pathlib.Path, default="docs/pictures")
    parser.add_argument("--llm", default="./llm")
    parser.add_argument("--model", help="of roofline, batch_steps and guesses, default the built-in checkpoint")
    parser.add_argument("--kept", action="store_true", help="draw the numbers that are kept in the pictures")
    options = parser.parse_args()
    unknown = set(options.names) - {draw.__name__ for draw in PICTURES}
    if unknown:
        parser.error(f"unknown: {' '.join(sorted(unknown))}; known: {' '.join(draw.__name__ for draw in PICTURES)}")
    llm = Engine(options.llm, options.model, options.kept)
    options.out.mkdir(parents=True, exist_ok=True)
    for draw in PICTURES:
        if draw.__name__ in options.names or (not options.names and (options.kept or draw is not quality)):
            llm.drawn, llm.numbers = options.out / f"{draw.__name__}.svg", None
            picture = draw(llm)
            picture.save(llm.drawn, llm.numbers)


if __name__ == "__main__":
    main()
