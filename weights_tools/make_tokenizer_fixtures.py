"""Writes tests/fixtures/tokenizers: what the tokenizers library makes of a few hundred strings.

    python weights_tools/make_tokenizer_fixtures.py [OUT_DIR]        (pip install tokenizers)

Trains one small tokenizer for each shape of tokenizer.json found in the wild, on the text below, and encodes and
decodes the strings below with it. Files:

    strings.json    [string]; U+E000 stands for NUL, which many JSON readers cannot hold
    <shape>.json    the tokenizer.json of a shape
    expected.json   {shape: {"ids": [[id]], "before": [id], "after": [id], "decoded": [string or null],
                     "skipped": [string or null]}}
                    ids with special tokens (before and after: those around a text); decoded with special tokens
                    shown, and skipped; null where that is the string itself
"""

import hashlib
import json
import random
import sys
from collections import Counter
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

NUL = "\ue000"

CORPUS = """
The old mill stands by the river, and the river does not mind. Anna counts the boats: one, two, three, forty-five.
"Where's the key?" asked Tom. "It's where you'd left it, they've not moved it; I'll look, we're late, I'm sure."
In 1987 there were 12345 people here; in 2024 only 678. Prices rose 3.14 % to $99.95 (or 1,000,000 in total).
Der Müller öffnet die Tür, größer als früher; das Mädchen isst süße Äpfel. Übermorgen fährt er über die Straße.
L'été dernier, où étais-tu ? Ça va très bien, merci : les élèves n'ont pas oublié leurs fenêtres.
El niño pequeño comió piñas mañana, ¿verdad? ¡Qué sueño! Ñandú y pingüino corren por la montaña.
Старая мельница стоит у реки, и река не против. Анна считает лодки: одна, две, три, сорок пять.
Ο παλιός μύλος στέκεται δίπλα στο ποτάμι και το ποτάμι δεν νοιάζεται.
古い水車小屋は川のそばに立っています。アンナは船を数えます。一、二、三。
老磨坊立在河边,河流并不介意。安娜数着船:一条、两条、三条。今天天气很好。
오래된 방앗간은 강가에 서 있고 강은 신경 쓰지 않는다. 안나는 배를 센다.
الطاحونة القديمة تقف بجانب النهر، والنهر لا يمانع. تعد آنا القوارب.
הטחנה הישנה עומדת ליד הנהר, ולנהר לא אכפת.
पुरानी चक्की नदी के किनारे खड़ी है और नदी को कोई आपत्ति नहीं है।
โรงสีเก่าตั้งอยู่ริมแม่น้ำ และแม่น้ำไม่ว่าอะไร
Chiếc cối xay cũ đứng bên dòng sông, và dòng sông không phiền.
def count(boats):
    total = 0
    for boat in boats:
        if boat.name != "Anna" and boat['size'] >= 10:
            total += 1  # one more
    return total
int main(void) { for (int i = 0; i < 10; i++) { printf("%d\\n", i); } return 0; }
SELECT name, size FROM boats WHERE size > 3 ORDER BY name; -- all of them
<p class="old">The <b>mill</b> &amp; the river</p>   https://example.org/mill?id=42
😀 😃 🚣 🌊 👍🏽 👩‍👩‍👧 🇩🇪 → ← ≤ ≥ ∑ √ ½ ²
"""

# ------------------------------------------------------------------------------------------------- the strings

LANGUAGES = [
    "The old mill stands by the river.", "It's late, we're tired; they'LL SEE, I'VE SEEN, he'd go, don'T",
    "hello world", "Die Tür zur größeren Straße fährt über Äpfel", "L'été, où étais-tu ? Ça va.", "¿Qué sueño? ¡Ñandú!",
    "Zażółć gęślą jaźń", "Старая мельница стоит у реки", "ЁЖИК и ёлка № 7", "Ο παλιός μύλος δίπλα στο ποτάμι",
    "ΣΊΣΥΦΟΣ σίσυφος ς", "古い水車小屋は川のそば", "アンナは船を数えます。ｶﾀｶﾅ", "スープ・ラーメン", "老磨坊立在河边,河流并不介意。", "繁體中文測試", "오래된 방앗간은 강가에",
    "한글", "الطاحونة القديمة تقف", "العربية ١٢٣٤٥", "הטחנה הישנה עומדת", "שָׁלוֹם", "पुरानी चक्की नदी के किनारे",
    "क्षत्रिय १२३", "โรงสีเก่าตั้งอยู่", "Chiếc cối xay cũ đứng bên", "ქართული ენა", "Հայերեն", "አማርኛ", "မြန်မာ",
    "ខ្មែរ", "தமிழ்", "ᏣᎳᎩ", "𐍈𐌰𐌿𐍂𐌲𐍃", "𠮷野家 𩸽", "ǅ ǆ Ǆ ª º ʰ", "mixed: Anna считает 三 boats und fährt", "naïve café",
    "ſ long s: 'ſ 'ſt K Kelvin",
]
EMOJI = [
    "😀", "😀😃", "hi 😀!", "👍🏽👍", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷🇯", "🏴\U000e0067\U000e0062\U000e007f", "❤️ ❤", "1️⃣2️⃣", "☃︎",
    "🤷🏾‍♀️ ok", "a😀b", "🚣🌊 🚣",
]
MARKS = [
    "e\u0301", "é", "A\u030a Å \u212b", "o\u0323\u0302 ộ o\u0302\u0323", "q\u0307\u0323",
    "q\u0307\u0323q e\u0301\u0323b", "\u0301", " \u0301x", "a\u0301\u0301\u0301", "n\u0303andu\u0301 Ñandú",
    "N\u0303andu\u0301", "\u1100\u1161\u11a8 각", "\u0958 \u0915\u093c", "ﬁ ﬀ ½ ² ①", "\u0344", "x\u20dd\u0338",
    "Z\u0351\u036b\u0343a\u0321l\u0334go\u0489", "\ufb1d \u05d9\u05b4",
]
SPACES = [
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "a b", " a", "a ", "  a  ", "a  b", "a   b    c", "\ta\tb",
    "a\n\nb", "a \n b", "a\r\n\r\nb", "  \n  \n  x", "x  \n", "x\n  ", "a\u00a0b", "\u00a0\u00a0a", "a\u3000b",
    "\u2003x\u2009y", "a\u2028b\u2029c", "\u0085x\u0085 y", "a\u180eb", "\u180e \u180ex", "a\u200bb", "\ufeffa",
    "a\ufeff b", "\u001c\u001d\u001e\u001f x\u001c", "\u000b\u000cx", "\u1680y", "\u202fz\u205f", "tab\t\tend\t",
    "!\n\n", "! \n", "?\r\n\r\n  z", "x" + " " * 17 + "y", " " * 40, "\n" * 20, " \t \n\t\r x",
]
NUMBERS = [
    "0", "7", "42", "123", "1234", "12345", "1234567890123", "3.14", "1,000,000", "-5e-10", "0x1F", "v2.0.1",
    "1\n2 3\n4", "2024-11-21", "12:30", "a1b22c333", "½ ²³ Ⅳ ④", "١٢٣٤", "१२३४५६", "１２３４", "1 2 3", " 12 345",
    "99%", "$9.99", "n°5",
    "10⁻³", "㉈ ㊿ 〇", "1st2nd", "\U0001d7ce\U0001d7cf",
]
CODE = [
    "def f(x):\n    return x + 1\n", "for (int i = 0; i < 10; i++) {\n\tprintf(\"%d\\n\", i);\n}", "a->b::c.d",
    "if(x!=y&&z<=w)", "x = {'k': [1, 2, 3]}", "// comment\n/* block */", "#include <stdio.h>",
    "<p class=\"x\">&amp;</p>", "SELECT * FROM t WHERE a='b';", "https://example.org/a?b=c&d=%20#e", "C:\\dir\\file",
    "snake_case camelCase PascalCase", "__init__", "$var @decorator `tick`", "!!!", "...", "---", "===>", "(((",
    "[[a]]", "{{x}}", "*bold* _it_ ~~s~~", "a+b-c*d/e", "\\", "\"'`", "'s 't 're 've 'm 'll 'd 'S 'T 'RE", "''s", " 's",
    "e-mail: x@y.zz", "%s%d%%", "→←≤≥∑√", "«quoted» „so“ ‘x’", "a…b—c–d", "\n\n    if x:\n        y()\n\n",
    "|a|b|\n|-|-|",
]
CONTROL = [
    NUL, "a" + NUL + "b", NUL * 3, "\x01\x02\x03", "\x7f", "\x1b[31mred\x1b[0m", "a\bb", "\x80\x81", "\u009f", "\ufffd",
    "\ufffe\uffff", "\U0010ffff", "\ue001", "\u2060\u200d\u200e", "\u00ad-",
]
ADDED = [
    "<s>", "</s>", "<unk>", "<|endoftext|>", "<s>a", "a<s>", "<s> a", "a <s> b", "<s><s>", "  <s>  ", "<s", "s>",
    "<<s>>", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "a<L>b", "a   <L>   b", "\n<L>", "<L><L>",
    "  <L>  <L>  ", "a<R>b", "a   <R>   b", "<R>\n\n", "<R>  <R>  x", "a  <B>  b", "<B>", "  <B>", "<B>\u3000\u00a0x",
    "x\u2003<B>", "mill", "mill mill", "windmill", "mills", "the mill.", "_mill", "mill_", "mill-mill", "5mill",
    "émill", "mill\u0301", "(mill)", "\u200dmill", "millⒶ", "mill\n", "mill<s>mill", "<one>", "<one><two>", "<one><two",
    "<one><one><two>", "<on<one>", "<one>two>", "Ñandú", "N\u0303andu\u0301", "aÑandúb", " Ñandú ", "Ñand", "space tok",
    "a space tok b", "space  tok", "space tokspace tok", "<N>", "a<N>b", " <N> ", "a  <N>  <N>", "₪", "a₪b", "a ₪", "▁",
    "▁▁", "a▁b", "▁a ▁", " ▁ ", "Ġ", "aĠb", "<0x41>", "<0x0A>x", "<L> <R>", "<R> <L>", "<R>  <B>  <L>",
]
ODD = [
    "", "a", "A", "é", "日", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "abababababab", "the the the the",
    "thethethethe", "TheTHEthe", "Anna" * 6, "river" * 3 + "mill", "zzzzzqqqqxxxx", "ß" * 9,
]


def random_strings(count, seed):
    """Strings of random characters from everywhere, and of random bytes read as UTF-8 with U+FFFD for what is none."""
    rng = random.Random(seed)
    pool = [chr(c) for c in range(1, 0x250)] + list("the and a of  \n\n\t'.,") * 20 + list("0123456789") * 10
    pool += [chr(rng.randrange(0x250, 0xD7FF)) for _ in range(300)]
    pool += [chr(rng.randrange(0x10000, 0x20000)) for _ in range(60)]
    texts = ["".join(rng.choice(pool) for _ in range(rng.randint(1, 24))) for _ in range(count)]
    raw = [bytes(rng.randrange(256) for _ in range(rng.randint(1, 20))) for _ in range(count)]
    return texts + [one.decode("utf-8", "replace") for one in raw]


def strings():
    random_ones = [text.replace("\0", NUL) for text in random_strings(20, 1)]
    return LANGUAGES + EMOJI + MARKS + SPACES + NUMBERS + CODE + CONTROL + ADDED + ODD + random_ones


def odd_texts():
    """A thousand and more: those above, and random characters and bytes."""
    return [text for text in [*strings(), *random_strings(450, 2)] if NUL not in text]


def checksum(ids):
    return hashlib.sha256(json.dumps([list(map(int, each)) for each in ids]).encode()).hexdigest()


# -------------------------------------------------------------------------------------------------- the shapes

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
DEEPSEEK3 = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
             r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CASED = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN = CASED.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")
SPM_DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]

# (content, flags): the same in every shape, so that the strings above meet every flag in every shape
COMMON = [
    ("<L>", {"lstrip": True}), ("<R>", {"rstrip": True}), ("<B>", {"lstrip": True, "rstrip": True}),
    ("mill", {"single_word": True}), ("<one>", {}), ("<one><two>", {}), ("₪", {"single_word": True}),
    ("Ñandú", {"normalized": True}), ("space tok", {"normalized": True}), ("<N>", {"normalized": True}),
]


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def level(use_regex, add_prefix_space=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


def train(pre_tokenizer, vocabulary, special, normalizer=None, spm=False, corpus=CORPUS):
    """The trained tokenizer.json as a dictionary; `spm`: byte tokens, <unk>, and no 256-character alphabet."""
    if spm:
        special = special + ["<0x%02X>" % byte for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True) if spm else models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    counts = Counter(corpus.replace(" ", "▁").replace("\n", ""))
    common = sorted(counts, key=lambda character: (-counts[character], character))[:120]
    alphabet = common if spm else pre_tokenizers.ByteLevel.alphabet()  # named, as ties are cut at random
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet,
                                  limit_alphabet=len(alphabet), show_progress=False, max_token_length=16)
    tokenizer.train_from_iterator(corpus.split("\n") * 4, trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    return data


def template(data, before=(), after=()):
    """A TemplateProcessing that puts these tokens around a text."""
    ids = {token["content"]: token["id"] for token in data["added_tokens"]}
    token = lambda name: {"SpecialToken": {"id": name, "type_id": 0}}
    text = lambda name: {"Sequence": {"id": name, "type_id": 0}}
    single = [*map(token, before), text("A"), *map(token, after)]
    return {"type": "TemplateProcessing", "single": single, "pair": single + [text("B")],
            "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (*before, *after)}}


def finish(data, decoder, post_processor=None, merges="pairs", common=True, **model):
    """Adds the common tokens and the decoder; merges as pairs or as strings; entries of the model set as given."""
    data["decoder"] = json.loads(decoder.__getstate__())
    data["post_processor"] = post_processor
    if merges == "strings":
        data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    data["model"].update(model)
    next_id = len({*data["model"]["vocab"], *(token["content"] for token in data["added_tokens"])})
    for content, flags in COMMON if common else []:
        known = data["model"]["vocab"].get(content)
        token = {"id": next_id if known is None else known, "content": content, "single_word": False, "lstrip": False,
                 "rstrip": False, "normalized": False, "special": False}
        data["added_tokens"].append({**token, **flags})
        next_id += known is None
    return data


def byte_level_shapes():
    sequence, digits, byte_level = pre_tokenizers.Sequence, pre_tokenizers.Digits, decoders.ByteLevel()
    offsets = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    chat, made = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {}

    data = train(level(True), 600, ["<|endoftext|>"])
    made["gpt2"] = finish(data, byte_level, offsets, merges="strings")
    data = train(level(True, True), 500, ["<s>", "</s>"])
    made["gpt2_prefix"] = finish(data, byte_level)
    data = train(sequence([split(LLAMA3), level(False)]), 700, ["<s>", "</s>"])
    del data["model"]["merges"][::9]  # tokens that only ignore_merges reaches
    both = {"type": "Sequence", "processors": [offsets, template(data, ["<s>"])]}
    made["llama3"] = finish(data, byte_level, both, ignore_merges=True)
    data = train(sequence([split(QWEN2), level(False)]), 700, chat, normalizers.NFC())
    made["qwen2"] = finish(data, byte_level, merges="strings")
    data = train(sequence([digits(True), level(True)]), 600, chat)
    made["smollm2"] = finish(data, byte_level)
    data = train(sequence([digits(False), level(True)]), 500, ["<|endoftext|>", "<s>"])
    made["starcoder"] = finish(data, byte_level, merges="strings")
    splits = [split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK3)]
    data = train(sequence([*splits, level(False)]), 700, ["<s>", "</s>"])
    made["deepseek3"] = finish(data, byte_level)
    splits = [split(r"[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split("[一-龥ࠀ-一가-\ud7ff]+")]
    data = train(sequence([*splits, digits(True), level(False)]), 500, ["<s>", "</s>"])
    made["deepseek1"] = finish(data, byte_level, template(data, ["<s>", "</s>"], ["</s>"]))
    data = train(sequence([split(TEKKEN), level(False)]), 500, ["<unk>", "<s>", "</s>"])
    made["tekken"] = finish(data, byte_level, template(data, ["<s>"]), ignore_merges=True)
    data = train(sequence([split(CASED, "removed", True), level(False)]), 500, [])
    ids = dict(zip(chat, (550, 552, 553)))  # of the vocabulary, with gaps before them
    data["model"]["vocab"].update(ids)
    data["added_tokens"] = [{"id": ids[name], "content": name, "single_word": False, "lstrip": False, "rstrip": True,
                             "normalized": False, "special": True} for name in chat]
    made["phi4"] = finish(data, byte_level, {"type": "Sequence", "processors": [offsets, template(data)]})
    return made


def sentencepiece_shapes():
    metaspace, spaces = pre_tokenizers.Metaspace, [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    decoder, made = decoders.Sequence(SPM_DECODER), {}

    data = train(None, 900, ["<unk>", "<s>", "</s>"], normalizers.Sequence(spaces), spm=True)
    made["llama2"] = finish(data, decoder, template(data, ["<s>"]), merges="strings")
    special, blanks = ["<unk>", "<bos>", "<|im_start|>", "<|im_end|>"], ["\n\n", "\n\n\n", "▁▁", "▁▁▁"]
    words = pre_tokenizers.Split(" ", "merged_with_previous")  # finds nothing: no blank is left
    data = train(words, 700, special + blanks, spaces[1], spm=True)
    for token in data["added_tokens"][-len(blanks):]:
        token["special"] = False
    made["gemma"] = finish(data, decoders.Sequence(SPM_DECODER[:3]), template(data, ["<bos>"]))
    data = train(metaspace("▁", "first", False), 900, ["<unk>", "<s>", "</s>"], spm=True)
    made["mistral"] = finish(data, decoder, template(data, ["<s>"]))
    data = train(metaspace("▁", "always", True), 700, ["<unk>", "<s>"], spm=True)
    made["metaspace"] = finish(data, decoders.Metaspace("▁", "always", True))
    changes = [normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    data = train(None, 500, ["<unk>", "<s>"], normalizers.Sequence(changes), spm=True)
    made["no_bytes"] = finish(data, decoders.Fuse(), byte_fallback=False, fuse_unk=False)
    data = train(None, 600, ["<unk>"], normalizers.Sequence(spaces), spm=True)  # bytes from 0xE0 on are unknown
    known = [token for token in data["model"]["vocab"] if not "<0xE0>" <= token <= "<0xFF>"]
    data["model"]["vocab"] = {token: id for id, token in enumerate(known)}  # (the library wants ids without gaps)
    made["some_bytes"] = finish(data, decoders.Sequence([*SPM_DECODER[:2], decoders.Strip("e", 2, 0)]))
    return made


def variations(made):
    """What is not found in the wild together, on vocabularies made above."""
    load, sequence = lambda part: json.loads(part.__getstate__()), pre_tokenizers.Sequence
    metaspace = pre_tokenizers.Metaspace
    behaviors = [split(" ", "removed"), split("[aeiou]", "merged_with_previous"), split("[0-9]", "merged_with_next"),
                 split(r"\p{P}", "contiguous"), split("[a-zäöü]+|[A-Z]", "isolated", True),
                 split("[Α-Ωα-ω]", "contiguous", True), pre_tokenizers.Split("th", "merged_with_next"),
                 level(False, True)]
    words = [split(r"^\d|\d$|\p{Katakana}+", "removed"), split(r"\s", "removed"), split("(?=[A-Z])"),
             split("[^k-p]", "removed", True), level(False)]
    ruby = [split(r"(?<=\d)\b|\B(?=[A-Z])"), split(r"[a-z&&[^aeiou]]{2}+", "merged_with_next"),  # Oniguruma's dialect
            split(r"\h{2,}(?i:ST|ß)|[[:punct:]](?<x>\S)\k<x>", "contiguous"), split(r"[\s[あ-ん]]|\X(?=\u0301)|(?~mi)$"),
            level(False)]
    pieces = [split("[,;] ?", "merged_with_previous"), metaspace("▁", "first", True)]
    return {
        "behaviors": {**made["gpt2_prefix"], "pre_tokenizer": load(sequence(behaviors)), "decoder": None},
        "words": {**made["gpt2_prefix"], "pre_tokenizer": load(sequence(words))},
        "ruby": {**made["gpt2_prefix"], "pre_tokenizer": load(sequence(ruby))},
        "first_pieces": {**made["mistral"], "normalizer": load(normalizers.Strip(left=True, right=False)),
                         "pre_tokenizer": load(sequence(pieces)), "decoder": load(decoders.Metaspace("▁", "first"))},
        "never": {**made["mistral"], "normalizer": load(normalizers.Strip(left=False, right=True)),
                  "pre_tokenizer": load(metaspace("▁", "never", True)),
                  "decoder": load(decoders.Metaspace("▁", "never"))},
    }


def shapes():
    """{name: tokenizer.json as a dictionary}."""
    made = {**byte_level_shapes(), **sentencepiece_shapes()}
    return {**made, **variations(made)}


def expected(tokenizer, texts):
    """What the library makes of the texts, as in expected.json."""
    ids = [tokenizer.encode(text).ids for text in texts]
    empty = tokenizer.encode("x").ids
    middle = tokenizer.encode("x", add_special_tokens=False).ids
    before = next(i for i in range(len(empty) + 1) if empty[i:i + len(middle)] == middle)
    decode = lambda skip: [tokenizer.decode(one, skip_special_tokens=skip) for one in ids]
    differing = lambda decoded: [None if one == text else one.replace("\0", NUL) for one, text in zip(decoded, texts)]
    return {"ids": ids, "before": empty[:before], "after": empty[before + len(middle):],
            "decoded": differing(decode(False)), "skipped": differing(decode(True))}


def compact(data):
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def main():
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "tests/fixtures/tokenizers")
    out.mkdir(parents=True, exist_ok=True)
    texts = strings()
    (out / "strings.json").write_text(compact(texts) + "\n", encoding="utf-8")
    results = {}
    for name, data in shapes().items():
        (out / f"{name}.json").write_text(compact(data) + "\n", encoding="utf-8")
        results[name] = expected(Tokenizer.from_str(compact(data)), [text.replace(NUL, "\0") for text in texts])
    lines = ",\n".join(f"{compact(name)}:{compact(value)}" for name, value in results.items())
    (out / "expected.json").write_text("{" + lines + "}\n", encoding="utf-8")
    sizes = sum(file.stat().st_size for file in out.glob("*.json"))
    print(f"{len(results)} shapes, {len(texts)} strings, {sizes:,} bytes in {out}")


if __name__ == "__main__":
    main()
