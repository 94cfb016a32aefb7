#!/usr/bin/env python3
"""docs/explorer.html, in a real browser, next to the program; and how the book of make read and docs/pictures look. Run
from the repository's root.

    python3 tests/test_explorer.py                      the tests; the environment variable LLM says which program
    python3 tests/test_explorer.py --picture NAME.png   and draws docs/explorer.png
    python3 tests/test_explorer.py --seed N             other random settings, or the same again

Needs Chromium, and of Python nothing but itself: the browser is told what to do over a pipe (the DevTools protocol,
JSON messages with a NUL behind each). The last line is that of the other tests, for tests/run.sh.
"""

import argparse
import base64
import fcntl
import io
import itertools
import json
import os
import pathlib
import random
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "explorer.html").resolve().as_uri()
BOOK = PAGE.replace("docs/explorer.html", "build/book/")
LLM = os.environ.get("LLM", "./llm")
SETTINGS = 200


# ---- The browser ---------------------------------------------------------------------------------------------------


class Browser:
    def __init__(self, program):
        self.profile = tempfile.TemporaryDirectory()
        reads, self.to_browser = os.pipe()
        self.from_browser, writes = os.pipe()

        def as_3_and_4():  # where --remote-debugging-pipe looks for them
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (reads, writes)]
            for end, wanted in zip(ends, (3, 4)):
                os.dup2(end, wanted)

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars",
                 "--disable-lcd-text"]
        self.process = subprocess.Popen([program, *flags, f"--user-data-dir={self.profile.name}", "about:blank"],
                                        preexec_fn=as_3_and_4, close_fds=False, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(reads)
        os.close(writes)
        self.count, self.rest, self.session = 0, b"", None
        self.events = []  # all that the page said on its own
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(domain + ".enable")

    def message(self):
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.from_browser], [], [], 60)
            part = os.read(self.from_browser, 1 << 20) if ready else b""
            assert part, "the browser says nothing more"
            self.rest += part
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **parameters):
        self.count += 1
        request = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            request["sessionId"] = self.session
        data = json.dumps(request).encode() + b"\0"
        while data:
            data = data[os.write(self.to_browser, data):]
        while (answer := self.message()).get("id") != self.count:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, address="", width=1200, colours="light", page=PAGE):
        """Loads the page anew; `address` is what follows its name."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": colours}])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=page + address)
        self.wait("document.readyState === 'complete'")

    def wait(self, condition):
        assert self.evaluate(f"""new Promise(done => {{
            const end = Date.now() + 20000, look = () => {condition} ? done(true) : Date.now() > end ? done(false) :
            setTimeout(look, 5); look(); }})"""), condition

    def press(self, key, modifiers=0):
        codes = {"Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "a": 65, " ": 32}
        event = {"key": key, "code": "KeyA" if key == "a" else "Space" if key == " " else key,
                 "windowsVirtualKeyCode": codes[key], "modifiers": modifiers}
        more = {"commands": ["selectAll"]} if key == "a" else {"text": " "} if key == " " else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def tab_to(self, element):
        for _ in range(100):
            if self.evaluate("document.activeElement.id") == element:
                return
            self.press("Tab")
        raise AssertionError(f"Tab does not reach {element}")

    def type(self, element, text):
        self.tab_to(element)
        self.press("a", modifiers=2)
        self.call("Input.insertText", text=text)

    def picture(self, name):
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        from PIL import Image  # of the tests none needs it: pip install pillow
        image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
        image.quantize(128, dither=Image.Dither.NONE).save(name, optimize=True)

    def close(self):
        self.session = None
        self.call("Browser.close")
        self.process.wait(20)
        self.profile.cleanup()


# ---- Settings, and what the program says to them -------------------------------------------------------------------


def random_setting(draw, fields):
    """One that the page takes; one in ten is so large that the program may refuse it."""
    huge = draw.random() < 0.1
    size = lambda top, least=1: max(least, int(2 ** draw.uniform(0, top)) - draw.randint(0, 1))
    setting = {
        "model": draw.choice(fields["models"]), "card": draw.choice(fields["cards"]),
        "attention": draw.choice(["heads", "heads", "heads", "mla"]),
        "layers": draw.choice([size(7), 10000 if huge else 80]), "queryHeads": size(8),
        "kvHeads": size(20 if huge else 7), "headDim": draw.choice([64, 80, 128, size(9), size(24 if huge else 9)]),
        "rank": size(24 if huge else 11), "rope": size(7, least=0),
        "localLayers": draw.choice([0, 0, size(6), 10000]), "sharedLayers": draw.choice([0, 0, size(5)]),
        "localWindow": draw.choice([size(7), size(12), size(24)]), "localHeads": size(7),
        "localDim": draw.choice([64, 128, size(9)]),
        "context": draw.choice([size(7), size(20), 2**30 if huge else 8192]),
        "sequences": draw.choice([1, size(9), 2**30 if huge else 2]),
        "k": draw.choice(fields["types"]), "v": draw.choice(fields["types"]),
        "layout": draw.choice(["contiguous", "paged", "ring"]), "page": draw.choice([1, 16, size(10), size(16)]),
        "window": draw.choice([size(7), size(17), size(24)]), "sinks": draw.choice([0, 4, size(6), size(16)]),
        "memory": round(2 ** draw.uniform(-8, 9), draw.randint(0, 3)) or 24,
        "bandwidth": round(2 ** draw.uniform(3, 13), draw.randint(0, 3)),
        "weights": draw.choice([0, size(38)]), "weightsRead": draw.choice([0, size(38)]),
    }
    if setting["layout"] == "ring" and draw.random() < 0.9:  # else the sinks may be refused
        setting["sinks"] = min(setting["sinks"], setting["window"] - 1)
    if setting["layout"] == "ring" and draw.random() < 0.3:  # about where it begins to drop positions
        setting["context"] = max(1, setting["window"] + setting["sinks"] + draw.randint(-1, 2))
    return setting


def run(command, setting):
    """The program with a command of the page. Of some shapes it reads the sizes from a config.json."""
    assert command.startswith("./llm memory "), command
    with tempfile.TemporaryDirectory() as directory:
        config = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": setting["layers"],
                  "num_attention_heads": setting["queryHeads"], "kv_lora_rank": setting["rank"],
                  "qk_rope_head_dim": setting["rope"], "max_position_embeddings": 163840}
        if setting["attention"] == "heads":
            layers, shared = setting["layers"], setting["sharedLayers"]
            local = min(layers, setting["localLayers"])
            words = lambda all, local: local * ["sliding_attention"] + (all - local) * ["full_attention"]
            config = {"architectures": ["NewForCausalLM"], "num_hidden_layers": layers + shared,
                      "num_attention_heads": setting["queryHeads"], "num_key_value_heads": setting["kvHeads"],
                      "head_dim": setting["headDim"], "swa_num_key_value_heads": setting["localHeads"],
                      "swa_head_dim": setting["localDim"], "sliding_window": setting["localWindow"],
                      "layer_types": words(layers, local) + words(shared, shared * local // layers),
                      "num_kv_shared_layers": shared, "max_position_embeddings": 163840}
        pathlib.Path(directory, "config.json").write_text(json.dumps(config))
        line = [LLM] + [directory if word == "DIR" else word for word in shlex.split(command)[1:]]
        return subprocess.run(line, capture_output=True, text=True)


def check(setting, page):
    """That the program has each number that the page has, and refuses what the page says that it does."""
    result = run(page["command"], setting)
    where = f"\nsetting {setting}\npage    {page}\n{result.stdout[:1500]}{result.stderr}"
    assert result.returncode == (2 if page["refusal"] else 0), where
    if page["refusal"]:
        return
    found = json.loads(result.stdout)["results"]
    assert len(found) == 1, where
    for key, value in page["answer"].items():
        if key == "tokens_in_budget" and not value:  # nothing fits
            continue
        assert found[0][key] == value, f"{key}: the page has {value}, the program {found[0].get(key)}{where}"
    if not page["answer"]["tokens_in_budget"] and page["budget"] >= 1:
        refused = run(f"{page['command']} --budget {page['budget']}", setting)
        assert refused.returncode == 2 and "--budget" in refused.stderr, f"{where}{refused}"


def ask(browser, settings):
    """What the page's functions answer. Its whole numbers come as texts, for they may be large."""
    text = browser.evaluate("""JSON.stringify(%s.map(s => ({answer: answer(s), command: command(s), budget: budgetOf(s),
        refusal: refusal(cacheOf(s))})), (key, value) => typeof value === "bigint" ? `${value}n` : value)"""
                            % json.dumps(settings))
    return json.loads(re.sub(r'"(-?\d+)n"', r"\1", text))


def total(browser):
    return int(re.sub(r"\D", "", browser.evaluate("at('total').textContent")))


def setting_of(browser):
    return browser.evaluate("({...setting})")


def check_shown(browser):
    """That what stands on the page is what the program says to the command on the page."""
    setting = setting_of(browser)
    page, = ask(browser, [setting])
    assert browser.evaluate("at('command').textContent") == page["command"]
    assert total(browser) == page["answer"]["bytes"]
    check(setting, page)


# ---- The tests -----------------------------------------------------------------------------------------------------


def test_random_settings_equal_the_program(browser, settings):
    browser.open()
    refused = 0
    for setting, page in zip(settings, ask(browser, settings)):
        check(setting, page)
        refused += bool(page["refusal"])
    assert refused < SETTINGS / 4, f"{refused} of the settings are refused: they test little"


def test_known_answers(browser, settings):
    """Bytes a position at f16 of the models as they come: by hand, from their papers and config.json."""
    known = {"built-in": 1024, "SmolLM2-135M": 23040, "TinyLlama-1.1B": 22528, "Llama-3.2-1B": 32768,
             "Llama-2-7B": 524288, "Falcon-7B": 8192, "Mistral-7B-v0.1": 131072, "Llama-3.1-8B": 131072,
             "Qwen3-8B": 147456, "Llama-3.1-70B": 327680, "DeepSeek-V3": 70272, "Gemma-3-1B": 26624,
             "Gemma-4-E2B": 18432, "gpt-oss-20b": 49152, "Qwen3.5-4B": 32768}
    browser.open()
    models = browser.evaluate("Object.keys(MODELS)")
    assert sorted(models) == sorted(known)
    presets = [browser.evaluate(f"preset({json.dumps(model)}, 'RTX 4090')") for model in models]
    for model, setting, page in zip(models, presets, ask(browser, presets)):
        assert page["answer"]["bytes_per_token"] == known[model], model
        check(setting, page)
    browser.open("#model=built-in&k=int4&v=int2")
    assert "perplexity with this cache; KL to f32\n1.453; 0.0041" in browser.evaluate("at('bytes').innerText")
    browser.open("#model=Gemma-3-1B&context=32768")
    assert total(browser) == (11 + 128) * 2**20 + 22 * 64 * 1024
    assert "22 of 26 layers look back 512 positions" in browser.evaluate("at('formula').innerText")
    cards = {"a laptop": (16, 100), "Apple M4 Max": (128, 546), "RTX 4090": (24, 1008), "RTX 5090": (32, 1792),
             "A100 80 GB": (80, 2039), "H100 SXM 80 GB": (80, 3350), "H200 141 GB": (141, 4800), "B200": (180, 8000)}
    assert browser.evaluate("CARDS") == {card: {"memory": memory, "bandwidth": bandwidth}
                                         for card, (memory, bandwidth) in cards.items()}
    # DeepSeek-V3 as published: FP8 with an f32 for 128 x 128 numbers; 58 of 61 layers have 256 experts and read 8.
    fp8 = lambda rows, columns: rows * columns + -(-rows // 128) * -(-columns // 128) * 4
    mlp = lambda width: 3 * fp8(width, 7168)
    attention = (fp8(1536, 7168) + fp8(128 * 192, 1536) + fp8(576, 7168) + fp8(128 * 256, 512) + fp8(7168, 128 * 128) +
                 2 * (1536 + 512 + 2 * 7168))
    table = 2 * 129280 * 7168
    all_ = 61 * attention + 3 * mlp(18432) + 58 * (257 * mlp(2048) + 256 * (2 * 7168 + 4)) + 2 * table + 2 * 7168
    browser.open("#model=DeepSeek-V3")
    found = setting_of(browser)
    assert (found["weights"], found["weightsRead"]) == (all_, all_ - table - 58 * 248 * mlp(2048))
    assert "71.1 times less than MHA" in browser.evaluate("at('heads').textContent")
    browser.open("#model=Llama-3.1-70B&kvHeads=64&context=32768&k=bf16&v=bf16")
    assert total(browser) == 80 * 2**30


def test_where_the_program_refuses(browser, settings):
    """Each of a pair is as large as it may be, and one more: bytes, pages, sinks."""
    one = {"layers": 1, "kvHeads": 1, "headDim": 1, "k": "f16", "v": "f16", "weights": 0}
    bytes_ = {**one, "context": 2**30, "sequences": 2}
    pages = {**one, "layout": "paged", "page": 2, "sequences": 4}
    sinks = {**one, "layout": "ring", "window": 100}
    for good, bad in [({**bytes_, "headDim": 2**20 - 1}, {**bytes_, "headDim": 2**20}),
                      ({**pages, "context": 2**30 - 2}, {**pages, "context": 2**30 - 1}),
                      ({**sinks, "sinks": 99}, {**sinks, "sinks": 100})]:
        pair = [{**browser.evaluate("preset('Llama-3.1-8B', 'RTX 4090')"), **each} for each in (good, bad)]
        pages_say = ask(browser, pair)
        assert [bool(page["refusal"]) for page in pages_say] == [False, True], (good, bad)
        for setting, page in zip(pair, pages_say):
            check(setting, page)


def test_beyond_double(browser, settings):
    """No digit is lost where doubles end, and the page says that the program stops there."""
    size = {"layers": 9999, "kvHeads": 16777215, "headDim": 127, "context": 1073741823, "sequences": 1073741823}
    browser.open("#" + "&".join(f"{key}={value}" for key, value in size.items()))
    product = 2 * 2
    for value in size.values():
        product *= value
    assert total(browser) == product
    assert "2^53" in browser.evaluate("at('bytes').textContent")


def test_formula_on_the_page(browser, settings):
    """A term's factors multiply to its bytes, the terms sum up to the whole, the steps of growth multiply to it, and as
    many sequences fit as it says, and no more."""
    browser.open()
    for setting in settings[:40]:
        browser.evaluate(f"setting = {json.dumps(setting)}; draw()")
        lines = browser.evaluate("""[...document.querySelectorAll("#formula .term")].map(term =>
            [term.querySelector(".row > :last-child").textContent, term.querySelector(".soft")?.textContent ?? ""])""")
        numbers = [(int(re.sub(r"\D", "", bytes)), factors) for bytes, factors in lines]
        for bytes, factors in numbers[:-1]:
            product = 1
            for factor in re.sub(r"\([^)]*\)", "", factors).split("×"):
                product *= int(re.match(r"\s*([\d,]+)", factor)[1].replace(",", ""))
            assert product == bytes, (setting, bytes, factors)
        assert sum(bytes for bytes, _ in numbers[:-1]) == numbers[-1][0] == total(browser)
        fit = int(re.sub(r"\D", "", browser.evaluate(
            "document.querySelector('#fit .term .row:last-child > :last-child').textContent")))
        at_most, beyond = ask(browser, [{**setting, "sequences": max(1, fit)}, {**setting, "sequences": fit + 1}])
        assert not fit or at_most["answer"]["bytes"] <= at_most["budget"], setting
        assert fit == 2**30 or beyond["answer"]["bytes"] > beyond["budget"], setting
        too_much = "too much" in browser.evaluate("at('summary').textContent")
        assert too_much == (total(browser) > beyond["budget"]), setting
        off = browser.evaluate("""growth(setting).reduce((all, {factor}) => all * factor, 1) *
            ratio(bytesOf(cacheOf(preset(setting.model, setting.card))), answer(setting).bytes) - 1""")
        assert abs(off) < 1e-9, (setting, off)
    browser.open("#model=Llama-3.1-8B&context=65536&k=f32")
    said = browser.evaluate("[...document.querySelectorAll('#growth .row')].map(each => each.innerText.split('\\n'))")
    assert said == [["Context 8,192 → 65,536", "× 8"], ["Precision of K f16 → f32", "× 1.5"]], said


def test_curve(browser, settings):
    """Bytes over context: those of the program, up to where the memory is full; and drawn to scale."""
    browser.open()
    presets = [browser.evaluate(f"preset({json.dumps(model)}, {json.dumps(card)})") for model, card in
               (("Llama-3.1-8B", "RTX 4090"), ("SmolLM2-135M", "RTX 5090"), ("Gemma-3-1B", "a laptop"),
                ("DeepSeek-V3", "H200 141 GB"), ("Mistral-7B-v0.1", "RTX 4090"))]
    for setting in [*presets, *settings[:20]]:
        fits, to, points = json.loads(browser.evaluate("""(() => { setting = %s; draw();
            const {fits, to, points} = curve(setting);
            return JSON.stringify([fits, to, points.map(({context, bytes}) => [context, `${bytes}`])]); })()"""
                                                       % json.dumps(setting)))
        assert points[0][0] == 1 and points[-1][0] == to >= setting["context"], (setting, to)
        some = [(context, int(bytes)) for context, bytes in (points[0], points[21], points[-1])]
        contexts = [context for context, _ in some]
        asked = [{**setting, "context": context} for context in (*contexts, fits or 1, fits + 1)]
        pages = ask(browser, asked)
        for page, with_context, (_, bytes_) in zip(pages, asked, some):
            assert page["answer"]["bytes"] == bytes_, setting
            check(with_context, page)
        assert not fits or pages[3]["answer"]["bytes"] <= pages[3]["budget"], setting
        assert fits == 2**30 or pages[4]["answer"]["bytes"] > pages[4]["budget"], setting
        drawn, weights, memory, title = browser.evaluate("""[
            [...document.querySelectorAll("#curve polyline")].flatMap(line => [...line.points].map(({x, y}) => [x, y])),
            Number(document.querySelector("#curve rect").getAttribute("y")),
            Number(document.querySelector("#curve line").getAttribute("y1")),
            document.querySelector("#curve h2").textContent]""")
        if setting["weights"] and memory < 169:  # heights are bytes: at 170 there are none
            drawn = sorted(set(map(tuple, drawn)))
            a_byte = (170 - memory) / (setting["memory"] * 2**30)
            heights = [(weights, setting["weights"])] + [
                (y, setting["weights"] + int(bytes_)) for (_, y), (_, bytes_) in zip(drawn, points, strict=True)]
            for y, bytes_ in heights:
                assert abs(170 - y - bytes_ * a_byte) < 0.2 + 0.1 * (170 - y) / (170 - memory), (setting, y, bytes_)
        expected = f"{fits:,} position" if 0 < fits < 2**30 else "however long" if fits else "weights"
        assert expected in title, (setting, title)


def test_address_holds_the_setting(browser, settings):
    browser.open()
    back = browser.evaluate("%s.map(s => fromHash(toHash(s)))" % json.dumps(settings))
    assert back == [[setting, []] for setting in settings]
    for setting in settings[:5]:
        address = browser.evaluate(f"toHash({json.dumps(setting)})")
        browser.open(address)
        assert setting_of(browser) == setting
        check_shown(browser)
    browser.evaluate("location.hash = '#model=Falcon-7B&context=77'")  # typed into the address bar
    browser.wait("setting.context === 77")
    check_shown(browser)
    browser.open("#model=GPT-9&layers=abc&page=0&context=2.5&sinks=&red=1&window=<img src=x onerror=boom()>&k=int8")
    default = browser.evaluate("preset('Llama-3.1-8B', 'RTX 4090')")
    assert setting_of(browser) == {**default, "k": "int8"}
    said = browser.evaluate("at('summary').textContent")
    for word in ("GPT-9", "layers abc", "page 0", "context 2.5", "sinks", "red", "window <img src=x"):
        assert word in said, (word, said)


FOCUS_IS_SEEN = """(() => {
    const it = document.activeElement, style = getComputedStyle(it), box = it.getClientRects()[0];
    const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
    return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2 &&
        box.top >= 0 && box.bottom <= innerHeight && it.contains(document.elementFromPoint(x, y)); })()"""


def test_keyboard(browser, settings):
    """Everything can be reached and changed with keys alone, and is seen where the focus is."""
    for width in (1200, 360):
        browser.open("#layout=ring", width)
        shown = browser.evaluate("""[...document.querySelectorAll("a, button, input, select")]
            .filter(each => each.getClientRects().length).map(each => each.id || each.innerText)""")
        for back, expected in ((0, shown), (8, shown[-2::-1])):  # Tab to the last, then Shift and Tab to the first
            for name in expected:
                browser.press("Tab", modifiers=back)
                assert browser.evaluate("document.activeElement.id || document.activeElement.innerText") == name
                assert browser.evaluate(FOCUS_IS_SEEN), (width, back, name)

    browser.open()
    for element, text in (("layers", "7"), ("context", "12345"), ("sequences", "3"), ("weights", "123456789")):
        browser.type(element, text)
        assert setting_of(browser)[element] == int(text)
        check_shown(browser)
    for element in ("slide-layers", "slide-context", "slide-kvHeads"):
        before = setting_of(browser)
        browser.tab_to(element)
        browser.press("ArrowRight")
        field = element[6:]
        assert setting_of(browser)[field] > before[field], element
        assert browser.evaluate(f"at('{field}').value") == f"{setting_of(browser)[field]:,}"
        check_shown(browser)
    for element in ("model", "k", "v", "layout", "card", "attention", "model"):
        before = setting_of(browser)
        browser.tab_to(element)
        browser.press("ArrowDown" if before[element] != "DeepSeek-V3" else "ArrowUp")
        assert setting_of(browser)[element] != before[element], element
        check_shown(browser)
        address = browser.evaluate("location.hash")
        after = setting_of(browser)
        browser.open(address)
        assert setting_of(browser) == after
    before = setting_of(browser)
    browser.type("layers", "0")
    assert setting_of(browser) == before
    assert browser.evaluate("at('layers').getAttribute('aria-invalid')") == "true"
    assert "from 1 to 10,000" in browser.evaluate("at('problem-layers').textContent")
    browser.press("Tab")
    assert browser.evaluate("at('layers').value") == str(before["layers"])
    for text, bytes_ in (("16,060,522,496", 16060522496), ("15 GiB", 15 * 2**30), ("1.5TB", 1500000000000), ("0", 0)):
        browser.type("weights", text)
        assert setting_of(browser)["weights"] == bytes_, text
        browser.press("Tab")
        assert browser.evaluate("at('weights').value") == f"{bytes_:,}"
    for text in ("15 XiB", "GiB", "1,5 GiB of it", "-1 GiB"):
        browser.type("weights", text)
        assert "or as 15 GiB" in browser.evaluate("at('problem-weights').textContent"), text
    assert setting_of(browser)["weights"] == 0
    browser.tab_to("reset")
    browser.press(" ")
    assert setting_of(browser) == browser.evaluate("preset(setting.model, setting.card)")


FAINT_TEXT = """(() => {
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const linear = x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
    const light = colour => numbers(colour).slice(0, 3).reduce((sum, x, i) =>
        sum + linear(x / 255) * [0.2126, 0.7152, 0.0722][i], 0);
    const seen = colour => (numbers(colour)[3] ?? 1) > 0;
    const behind = each => seen(getComputedStyle(each).backgroundColor) ? getComputedStyle(each).backgroundColor :
        behind(each.parentElement);
    const has_text = each => each.matches("[type=text], select") ||
        [...each.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
    return [...document.querySelectorAll("body *")].filter(each => each.getClientRects().length && has_text(each))
        .map(each => [light(getComputedStyle(each).color), light(behind(each)), each.outerHTML.slice(0, 80)])
        .filter(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5); })()"""

VIEWS = ["", "#model=DeepSeek-V3&layout=paged&k=int2", "#layout=ring&k=int4&v=fp8&context=131072&kvHeads=5&sinks=9999",
         "#layers=9999&kvHeads=16777215&headDim=127&context=1073741823&sequences=1073741823&layout=paged&k=int4&page=x"]


def test_narrow_wide_light_dark(browser, settings):
    """Nothing is wider than the window, and all text stands out from what is behind it (WCAG 2.1: 4.5 to 1)."""
    papers = set()
    for view, width, colours in itertools.product(VIEWS, (360, 1200), ("light", "dark")):
        browser.open(view, width, colours)
        where = f"{view} {width} {colours}"
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, where
        wide = browser.evaluate("""[...document.querySelectorAll("body *")].filter(each =>
            each.getBoundingClientRect().right > innerWidth + 0.5).map(each => each.outerHTML.slice(0, 100))""")
        assert not wide, (where, wide)
        papers.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        faint = browser.evaluate(FAINT_TEXT)
        assert not faint, (where, faint)
    assert len(papers) == 2, papers  # one for light and one for dark


def test_named_for_screen_readers(browser, settings):
    for view in VIEWS:
        browser.open(view)
        roles = {}
        for node in browser.call("Accessibility.getFullAXTree")["nodes"]:
            role = node.get("role", {}).get("value")
            if role in ("slider", "textbox", "combobox", "button", "link", "form", "group") and not node["ignored"]:
                roles.setdefault(role, []).append(node.get("name", {}).get("value", ""))
        assert all(all(names) for names in roles.values()), roles
        assert all(len(set(names)) == len(names) for names in roles.values()), roles
        assert {"slider", "textbox", "combobox", "button", "link", "form"} <= set(roles), roles


def test_book(browser, settings):
    """make read: no page is wider than the window, all text stands out, what keys reach is seen, comments have room,
    and the bar says where one is."""
    subprocess.run([sys.executable, "docs/read.py"], check=True, stdout=subprocess.DEVNULL)
    for width, colours in itertools.product((360, 800, 1280, 1600), ("light", "dark")):
        for page in ("index.html", "06_where_a_row_lives.html", "cache.h.html"):
            browser.open("", width, colours, BOOK + page)
            where = (page, width, colours)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, where
            faint = browser.evaluate(FAINT_TEXT)
            assert not faint, (where, faint)
            browser.press("Tab")
            assert browser.evaluate("document.activeElement.innerText") == "Skip to the page", where
            assert browser.evaluate(FOCUS_IS_SEEN), where
        cut = browser.evaluate("""[...document.querySelectorAll("pre span + i")].filter(each =>
            each.getBoundingClientRect().right > innerWidth).map(each => each.innerText)""")
        assert width > 720 or not cut, (width, cut)  # comments at the end of a line
        columns = browser.evaluate(
            "[...document.querySelectorAll('.r:not(.head) > div')].map(each => each.offsetWidth)")
        assert width < 1280 or set(columns) == {360}, (width, columns)
        browser.evaluate("document.getElementById('Paged').closest('span').querySelector('a').click()")
        browser.wait("document.querySelector(':target') === document.activeElement")
        assert browser.evaluate(FOCUS_IS_SEEN), width
        browser.wait("document.getElementById('the-place').innerText === 'Paged'")


# What is wrong with the labels of an SVG, opened by itself: faint on what is painted under one of five points of it,
# nearer to an edge than 18 of 800, or on another label.
BAD_LABELS = """(() => {
    const numbers = text => text.match(/[\\d.]+/g).map(Number);
    const linear = x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
    const light = colour => colour.reduce((sum, x, i) => sum + linear(x / 255) * [0.2126, 0.7152, 0.0722][i], 0);
    const svg = document.documentElement, view = svg.viewBox.baseVal, found = [];
    const under = (x, y, text) => document.elementsFromPoint(x, y).reverse().reduce((paper, each) => {
        const style = getComputedStyle(each), fill = each === svg ? style.backgroundColor : style.fill;
        if (each.tagName === "text" || fill === "none") return paper;
        const share = (numbers(fill)[3] ?? 1) * (each === svg ? 1 : style.fillOpacity);
        return paper.map((old, i) => old * (1 - share) + numbers(fill)[i] * share); }, [128, 128, 128]);
    const texts = [...document.querySelectorAll("text")];
    const boxes = texts.map(each => each.getBBox());
    texts.forEach((each, at) => {
        const box = boxes[at], name = each.textContent, scale = svg.getScreenCTM();
        if (box.x < 18 || box.x + box.width > view.width - 18 || box.y < 8 || box.y + box.height > view.height - 4)
            found.push(`${name}: cut, ${Math.round(box.x)} to ${Math.round(box.x + box.width)}`);
        const ink = light(numbers(getComputedStyle(each).fill).slice(0, 3));
        const least = Math.min(...[0.02, 0.25, 0.5, 0.75, 0.98].map(share => {
            const paper = light(under((box.x + share * box.width) * scale.a + scale.e,
                                      (box.y + box.height / 2) * scale.d + scale.f));
            return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); }));
        if (least < 4.5) found.push(`${name}: faint, ${least.toFixed(1)} to 1`);
        for (let other = 0; other < at; other++) {
            const it = boxes[other];
            if (it.x < box.x + box.width - 1 && box.x < it.x + it.width - 1 && it.y < box.y + box.height - 5 &&
                box.y < it.y + it.height - 5) found.push(`${name}: on ${texts[other].textContent}`);
        } });
    return found; })()"""
PICTURES = [path.resolve().as_uri() for path in sorted(pathlib.Path(PAGE[7:]).parent.glob("pictures/*.svg"))]


def test_pictures(browser, settings):
    """docs/pictures: each has a background of its own in light and dark, and no label is faint, cut or on another."""
    assert PICTURES
    for picture, colours in itertools.product(PICTURES, ("light", "dark")):
        browser.open("", 838, colours, picture)
        where = f"{picture} {colours}"
        paper = browser.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[colours], (where, paper)
        bad = browser.evaluate(BAD_LABELS)
        assert not bad, (where, bad)


def test_says_and_fetches_nothing(browser, settings):
    """In all of the tests above."""
    browser.evaluate("1")
    loud = [event for event in browser.events if event["method"] in (
        "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")]
    assert not loud, loud
    fetched = {event["params"]["request"]["url"].split("#")[0] for event in browser.events
               if event["method"] == "Network.requestWillBeSent"}
    fetched = {address for address in fetched if not address.startswith(BOOK)}
    assert fetched <= {PAGE, "about:blank", *PICTURES} and PAGE in fetched, fetched


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--picture", metavar="NAME.png")
    arguments, _ = parser.parse_known_args()  # tests/run.sh has some for doctest
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    tests = [test for name, test in globals().items() if name.startswith("test_")]
    failed = 0
    if not chromium or not shutil.which(LLM):
        print("no Chromium: apt-get install chromium" if not chromium else f"no {LLM}: make llm, or LLM=PROGRAM")
        failed = len(tests)
    else:
        browser = Browser(chromium)
        browser.open()
        names = "{models: Object.keys(MODELS), cards: Object.keys(CARDS), types: Object.keys(TYPES)}"
        fields = browser.evaluate(f"({names})")
        draw = random.Random(arguments.seed)
        settings = [random_setting(draw, fields) for _ in range(SETTINGS)]
        for test in tests:
            try:
                test(browser, settings)
            except Exception:
                failed += 1
                print(f"{test.__name__}, --seed {arguments.seed}")
                traceback.print_exc(file=sys.stdout)
        if arguments.picture:
            browser.open("#context=65536&sequences=2&k=int8&v=int4&layout=paged")
            browser.picture(arguments.picture)
        browser.close()
        print(f"seed {arguments.seed}")
    print(f"[doctest] test cases: {len(tests)} | {len(tests) - failed} passed | {failed} failed | 0 skipped")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
