#!/usr/bin/env python3
"""GGUF files that llama.cpp's converter wrote of tiny models (weights_tools/make_gguf_fixtures.py) come back as directories
with Transformers' logits and ids; damaged and cut ones, and what is not known, get one line. Run by `make test-real`.

    python3 tests/test_from_gguf.py, from the repository's root, with ./llm built; needs gguf, safetensors, tokenizers
"""
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import gguf
import numpy as np
from tokenizers import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "weights_tools"))
from make_tokenizer_fixtures import checksum, odd_texts

FIXTURES = ROOT / "tests/fixtures/gguf"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


def run(*command):
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, errors="replace")


def convert(source, directory, *flags):
    return run(sys.executable, "weights_tools/from_gguf.py", source, directory, *flags)


def check_refused(source, directory, *words):
    """One line, exit status 2, and nothing is left."""
    done = convert(source, directory)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout, (done.returncode, done.stderr[-600:])
    assert all(word in done.stderr for word in (str(source), *words)), done.stderr
    assert not any(directory.parent.glob(directory.name + "*")), "something was left"


def check_model(name, scratch):
    """The last logits and the ids of a thousand texts; and Q8_0 is near what it was made of."""
    expected, directory = EXPECTED[name], scratch / "model"
    done = convert(FIXTURES / f"{name}.gguf", directory)
    assert done.returncode == 0, done.stderr
    ids = ",".join(map(str, expected["prompt_ids"]))
    done = run("./llm", "generate", "-m", directory, "--ids", ids, "-n", 0, "--kv", "f32", "--dump-logits", scratch / "l.npy")
    assert done.returncode == 0, done.stderr
    found, truth = np.load(scratch / "l.npy")[len(expected["prompt_ids"]) - 1], np.array(expected["last_logits"])
    error = float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
    assert error <= (2e-2 if name == "llama_smollm" else 1e-5), f"relative error {error}"
    tokenizer, texts = Tokenizer.from_file(str(directory / "tokenizer.json")), odd_texts()
    assert len(texts) > 1000
    assert checksum(tokenizer.encode(text).ids for text in texts) == expected["ids"], "other ids"
    for text in texts[::40]:
        done = run("./llm", "tokenize", "-m", directory, "-p", text, "--json")
        assert json.loads(done.stdout)["ids"] == tokenizer.encode(text).ids, (text, done.stdout, done.stderr)


def changed(name, path, **changes):
    """A copy of a fixture with other keys: None leaves one out. `arch`: another architecture."""
    reader = gguf.GGUFReader(FIXTURES / f"{name}.gguf")
    writer = gguf.GGUFWriter(path, changes.get("arch", reader.fields["general.architecture"].contents()))
    keys = {key: (field.contents(), field.types) for key, field in reader.fields.items()
            if not key.startswith("GGUF.") and key != "general.architecture"}
    for key, value in changes.get("keys", {}).items():
        keys.pop(key, None)
        if value is not None:
            keys[key] = value
    for key, (value, types) in keys.items():
        writer.add_key_value(key, value, types[0], sub_type=types[-1] if types[0] == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        if tensor.name not in changes.get("without", []):
            renamed = changes.get("names", {}).get(tensor.name, tensor.name)
            writer.add_tensor(renamed, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def unknown_things(scratch):
    word, whole, real = ([kind] for kind in (gguf.GGUFValueType.STRING, gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32))
    words = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]
    there, path = scratch / "model", scratch / "changed.gguf"
    for expected, changes in [
            (["architecture mamba is not known", "qwen3"], dict(arch="mamba")),
            (["tokenizer.ggml.pre is klingon", "smollm"], dict(keys={"tokenizer.ggml.pre": ("klingon", word)})),
            (["tokenizer.ggml.model is t5"], dict(keys={"tokenizer.ggml.model": ("t5", word)})),
            (["qwen3.attention.temperature_scale is not known"], dict(keys={"qwen3.attention.temperature_scale": (0.5, real)})),
            (["qwen3.rope.scaling.type ntk"], dict(keys={"qwen3.rope.scaling.type": ("ntk", word)})),
            (["qwen3.embedding_length is missing"], dict(keys={"qwen3.embedding_length": None})),
            (["qwen3.block_count is 0"], dict(keys={"qwen3.block_count": (0, whole)})),
            (["bos_token_id is 70000"], dict(keys={"tokenizer.ggml.bos_token_id": (70000, whole)})),
            (["tensor blk.0.attn_rotten.weight is not known"], dict(names={"blk.0.attn_q.weight": "blk.0.attn_rotten.weight"})),
            (["tokenizer.ggml.merges has 'a klingon'"], dict(keys={"tokenizer.ggml.merges": (["a klingon"], words)})),
            (["tensor blk.0.weight is not known"], dict(names={"blk.0.attn_q.weight": "blk.0.weight"})),
            (["token_embd.weight is missing"], dict(without=["token_embd.weight"]))]:
        check_refused(changed("qwen3", path, **changes), there, *expected)
        path.unlink()


def not_a_gguf(scratch):
    for content, word in [(b"", "GGUF"), (b"PK\3\4" + bytes(100), "GGUF"), (b"GGUF", "ends within"),
                          (b"GGUF" + (9).to_bytes(4, "little") + bytes(16), "version 9")]:
        (scratch / "odd.gguf").write_bytes(content)
        check_refused(scratch / "odd.gguf", scratch / "model", word)
    check_refused(scratch / "none.gguf", scratch / "model", "not a file")


def what_is_there_stays(scratch):
    there = scratch / "model"
    there.mkdir()
    (there / "mine.txt").write_text("mine")
    done = convert(FIXTURES / "qwen2.gguf", there)
    assert done.returncode == 2 and "is there already" in done.stderr, done.stderr
    assert [path.name for path in there.iterdir()] == ["mine.txt"]


def damaged(scratch):
    """Cut anywhere, and with bits and lengths flipped in the header: one line, or a directory that llm runs or refuses."""
    whole = (FIXTURES / "llama_smollm.gguf").read_bytes()
    draw, path, there = random.Random(1), scratch / "damaged.gguf", scratch / "model"
    for _ in range(12):
        path.write_bytes(whole[:draw.randrange(4, len(whole) - 64)])
        check_refused(path, there)
    for _ in range(30):
        flipped = bytearray(whole)
        for _ in range(draw.choice([1, 1, 4])):
            flipped[draw.randrange(8, 1500 if draw.random() < 0.7 else len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        done = convert(path, there)
        assert done.returncode in (0, 2) and done.stderr.count("\n") == (done.returncode == 2), (done.returncode, done.stderr)
        if done.returncode == 0:
            done = run("./llm", "generate", "-m", there, "--ids", "1,2,3", "-n", 2)
            assert done.returncode in (0, 2), (done.returncode, done.stderr)
            run("rm", "-r", there)


def main():
    cases = {name: lambda scratch, name=name: check_model(name, scratch) for name in EXPECTED}
    cases |= {case.__name__: case for case in (unknown_things, not_a_gguf, what_is_there_stays, damaged)}
    failed = 0
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as scratch:
            try:
                case(pathlib.Path(scratch))
            except AssertionError as wrong:
                failed += 1
                print(f"{name}: {wrong}")
    print(f"[doctest] test cases: {len(cases)} | {len(cases) - failed} passed | {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
