#!/usr/bin/env python3
"""A race: this engine and others, in turn, on the same shape and the same weights.

    race.py --llama-bench PATH --ik-llama-bench PATH --llama2c DIR [--shape tinyllama-1.1b] [--rows 'decode/*/0/f16']

Weights are random, but for smollm2-135m those of the real model, where it is there (make smollm2). Then there are rows
of a real text, too (make build/history.txt), since guesses depend on it.

A machine's bandwidth drifts, so only neighbours are compared: in each round the engines run a row one after the other,
and what counts is the median over the rounds of the ratio within a round. Each run is a process, warmed up, which
repeats the row --repeats times and gives the median.

A row is decode/WEIGHTS/DEPTH/CACHE (tokens/s of --tokens tokens after DEPTH others),
batch/WEIGHTS/DEPTH/CACHE/SEQUENCES (the same of so many sequences together; llama.cpp's by the llama-batched-bench
next to its llama-bench), prefill/WEIGHTS/TOKENS, or ngram/WEIGHTS/TEXT and draft/WEIGHTS/TEXT: --tokens tokens after a
text, with 4 guesses a pass by n-grams or by the model itself (llama.cpp's by the llama-lookup and the
llama-speculative-simple next to its llama-bench). TEXT says what is asked for: chat, summary or free. int8 and int4 are
each engine's own: weights q8_0 in llama.cpp, groups of 64 in llama2.c; caches q8_0 and q4_0 in llama.cpp. llama2.c
knows no cache but f32; it races at depth 0.
"""
import argparse
import contextlib
import dataclasses
import fnmatch
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

import numpy as np

import make_random
import peer_formats
import real_figures

ROOT = pathlib.Path(__file__).resolve().parent.parent
WEIGHTS = ("f32", "f16", "bf16", "int8")
GGML_CACHES = {"f16": "f16", "int8": "q8_0", "int4": "q4_0"}
REAL = {"smollm2-135m": ROOT / "models/SmolLM2-135M-Instruct"}
VOCABULARY = ROOT / "build/smollm2.gguf"  # what the real model was converted from
GUESSES = 4


class Wrong(Exception):
    """One line: what it is about, what was found, what was expected, the cure."""


# ---- the same shape in everyone's format -----------------------------------------------------------------------------


@contextlib.contextmanager
def whole(path):
    """Yields a path to write to, which becomes `path` once all is written."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    finally:
        shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)


def make(directory, name, shape, real):
    """Path of a file, written if it is not there yet. Its name says what it is: bf16.hf, int8.gguf, f32.llama2c. `real`:
    the directory of the real model, or None."""
    path, config, (weights, kind) = directory / name, make_random.SHAPES[shape], name.split(".")
    if real and name == "bf16.hf":
        return real
    if path.exists():
        return path
    if real or kind in ("gguf", "llama2c"):
        values = peer_formats.read_values(make(directory, "bf16.hf", shape, real) / "model.safetensors")
    show_progress(f"writing {path}")
    with whole(path) as part:
        if kind == "hf" and real:
            shutil.copytree(real, part, ignore=shutil.ignore_patterns("*.safetensors"))
            make_random.write_weights(part / "model.safetensors", config, weights,
                                      lambda name, _, start, count: values(name).ravel()[start:start + count])
        elif kind == "hf":
            make_random.write_checkpoint(part, shape, weights, seed=0)
        elif kind == "txt":
            part.write_text(real_figures.prompt(real_figures.TEXT.read_text(), weights) + "\n")
        elif kind == "tokenizer":
            peer_formats.write_llama2c_tokenizer(part, config)
        else:
            write = {"gguf": peer_formats.write_gguf, "llama2c": peer_formats.write_llama2c}[kind]
            write(part, weights, config, values, *([VOCABULARY] if real and kind == "gguf" else []))
    return path


# ---- who races -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    work: str  # decode, batch, prefill, ngram or draft
    weights: str
    depth: int  # positions in the cache before the first token that is timed
    cache: str
    tokens: int  # of a sequence
    sequences: int = 1
    text: pathlib.Path = None  # the prompt, of ngram and draft

    def __str__(self):
        ends = {"decode": f"{self.depth}/{self.cache}", "batch": f"{self.depth}/{self.cache}/{self.sequences}"}
        if self.text:
            return f"{self.work}/{self.weights}/{self.text.stem}"
        return f"{self.work}/{self.weights}/{ends.get(self.work, self.tokens)}"


class Llm:
    """This engine. Its bench quantizes int8 weights when it loads, and fills a cache with random numbers."""
    def __init__(self, binary, activations="f32"):
        self.binary, self.activations = binary, activations

    def file(self, row):
        rounds = self.activations == "bf16"
        return f"{'bf16' if row.weights == 'int8' else row.weights}.hf" if not rounds or row.weights == "bf16" else None

    def command(self, row, path, threads, repeats):
        steps = (["-f", row.text, "-n", row.tokens, "--draft-tokens", GUESSES, "--draft",
                  "ngram" if row.work == "ngram" else path] if row.text else
                 ["--prefill", row.tokens, "--depth", "0", "-n", "1"] if row.work == "prefill" else
                 ["--prefill", "1", "--depth", row.depth, "-n", row.tokens, "-np", row.sequences])
        return [self.binary, "bench", "-m", path, "-t", threads, "--kv", row.cache, "--repeats", repeats, "--json",
                *steps, "--weights", "int8" if row.weights == "int8" else "copied", "--activations", self.activations]

    def rate(self, row, done, parameters):
        results = json.loads(done.stdout)["results"]
        if row.text:
            return next(result["tokens_per_second"] for result in results if result["guesses"] == GUESSES)
        return next(result["tokens_per_second"] for result in results
                    if (result["name"] == "prefill") == (row.work == "prefill"))


class LlamaBench:
    """llama.cpp or its fork ik_llama.cpp, with flash attention. Both fill a cache by a prefill that is not timed."""
    def __init__(self, binary, fork):
        self.binary, self.fork = binary, fork

    def file(self, row):
        return f"{row.weights}.gguf" if not (row.text and self.fork) else None

    def command(self, row, path, threads, repeats):
        cache = GGML_CACHES[row.cache]
        common = ["-m", path, "-t", threads, "-ctk", cache, "-ctv", cache]
        if row.text:
            name, more = (("llama-lookup", []) if row.work == "ngram" else
                          ("llama-speculative-simple", ["-md", path, "--spec-type", "draft-simple"]))
            return [self.binary.with_name(name), *common, "-fa", "on", "-f", row.text, "-n", row.tokens, "--temp", "0",
                    "--spec-draft-n-max", GUESSES, *more]
        if row.work == "batch":
            return [self.binary.with_name("llama-batched-bench"), *common, "-fa", "on", "-npp", row.depth,
                    "-ntg", ",".join([str(row.tokens)] * repeats), "-npl", row.sequences,
                    "-c", row.sequences * (row.depth + row.tokens)]
        if row.work == "prefill":
            # The fork warms up with one token, so one more repeat, the first, is its warm-up.
            steps = ["-p", row.tokens, "-n", "0", "-r", repeats + self.fork]
        elif self.fork and row.depth:
            steps = ["-p", "0", "-n", "0", "-gp", f"{row.depth},{row.tokens}", "-r", "1"]  # it would prefill for each
        else:
            steps = ["-p", "0", "-n", row.tokens, "-r", repeats, *(["-d", row.depth] if row.depth else [])]
        return [self.binary, *common, "-fa", "1", "-o", "json", *steps]

    def rate(self, row, done, parameters):
        if row.text:
            return float(re.findall(r"decoded .* speed: +([0-9.]+) t/s", done.stdout + done.stderr)[0])
        if row.work == "batch":  # a table: the fork knows no JSON here
            lines = [line.split("|") for line in (done.stdout + done.stderr).splitlines() if line.startswith("|")]
            speed = [name.strip() for name in lines[0]].index("S_TG t/s")
            return statistics.median(float(line[speed]) for line in lines[2:])
        result, = json.loads(done.stdout)
        expected = parameters["with a tied head twice" if self.fork else "all"]
        if result["model_n_params"] != expected:
            raise Wrong(f"{self.binary}: it loaded {result['model_n_params']:,} parameters, expected {expected:,}: "
                        "remove the files in --work and race again")
        return statistics.median(result["samples_ts"][self.fork and row.work == "prefill":])


class Llama2c:
    """run.c and runq.c, which say tokens/s on stderr, once. The prompt is longer than the run, so no end is chosen."""
    def __init__(self, directory):
        self.directory = directory

    def file(self, row):
        fits = row.work == "decode" and row.depth == 0 and row.weights in ("f32", "int8")
        return f"{row.weights}.llama2c" if fits else None

    def command(self, row, path, threads, repeats):
        return ["env", f"OMP_NUM_THREADS={threads}", self.directory / {"f32": "run", "int8": "runq"}[row.weights], path,
                "-z", path.with_name("llama2c.tokenizer"), "-t", "0", "-n", row.tokens + 1, "-i", "a" * row.tokens]

    def rate(self, row, done, parameters):
        return float(done.stderr.split("achieved tok/s: ")[1].split()[0])


def cpu_seconds():
    """CPU time so far that was not ours: of all programs and of neighbours on the same host, less what we started."""
    with open("/proc/stat") as file:
        user, nice, system, idle, wait, *more = [int(word) for word in file.readline().split()[1:9]]
    times = os.times()
    return sum((user, nice, system, *more)) / os.sysconf("SC_CLK_TCK") - times.children_user - times.children_system


def run(engine, row, path, arguments, parameters):
    """One run: tokens/s, and the share of the processors that others took meanwhile."""
    command = [str(word) for word in engine.command(row, path, arguments.threads, arguments.repeats)]
    start, others = time.time(), cpu_seconds()
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    others = (cpu_seconds() - others) / (time.time() - start) / os.cpu_count()
    said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
    again = f"run it yourself: {' '.join(command)}"
    if done.returncode:
        raise Wrong(f"{row}: exit status {done.returncode} and \"{said}\", expected 0; {again}")
    try:
        return engine.rate(row, done, parameters), max(others, 0.0)
    except (ValueError, LookupError, StopIteration):
        raise Wrong(f"{row}: no tokens/s in what was printed, which ends with \"{said}\"; {again}") from None


# ---- the race --------------------------------------------------------------------------------------------------------


def show_progress(text):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def rows_of(tokens, context, texts):
    """All rows that fit a context, and those of the texts."""
    rows = [Row("decode", weights, 0, "f16", tokens) for weights in WEIGHTS]
    rows += [Row("decode", weights, depth, cache, tokens) for weights in ("bf16", "int8")
             for depth in (1024, 4096, 8000) for cache in GGML_CACHES]
    rows += [Row("batch", weights, 512, "f16", tokens, count) for weights in ("bf16", "int8") for count in (4, 16)]
    rows += [Row("prefill", weights, 0, "f16", length) for weights in ("f16", "bf16", "int8") for length in (512, 2048)]
    rows += [Row(work, weights, 0, "f16", tokens, text=text) for work in ("ngram", "draft") for weights in ("bf16", "int8")
             for text in texts]
    return [row for row in rows if row.depth + row.tokens <= context]


def spread(values, digits):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def results_of(runs):
    """runs: (row, engine) -> (tokens/s, others) of each round; ratios say how many times as fast as the engine llm is."""
    return [dict(row=str(row), engine=engine, tokens_per_second=[rate for rate, _ in rounds],
                 ratios=[own / rate for (own, _), (rate, _) in zip(runs[row, "llm"], rounds)],
                 others=[others for _, others in rounds])
            for (row, engine), rounds in runs.items()]


def print_table(results):
    print("median (least .. most) of the rounds; others: the processors' time that other programs took meanwhile")
    print(f"{'row':24} {'engine':13} {'tokens/s':>28}  others   llm is so many times as fast")
    for result in results:
        ratio = "" if result["engine"] == "llm" else spread(result["ratios"], 2)
        rates = spread(result["tokens_per_second"], 1)
        others = f"{100 * statistics.median(result['others']):.0f} %"
        print(f"{result['row']:24} {result['engine']:13} {rates:>28}  {others:>6}   {ratio}".rstrip())


def program(flag, path):
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise Wrong(f"{flag}: {path} is not a program that can be run, expected one: build it, or correct the path")
    return path.resolve()


def engines_of(arguments):
    engines = {"llm": Llm(program("--llm", arguments.llm))}
    if arguments.bf16:
        engines["llm bf16"] = Llm(engines["llm"].binary, "bf16")
    if arguments.llama_bench:
        engines["llama.cpp"] = LlamaBench(program("--llama-bench", arguments.llama_bench), fork=False)
    if arguments.ik_llama_bench:
        engines["ik_llama.cpp"] = LlamaBench(program("--ik-llama-bench", arguments.ik_llama_bench), fork=True)
    if arguments.llama2c:
        for name in ("run", "runq"):
            program("--llama2c", arguments.llama2c / name)
        engines["llama2.c"] = Llama2c(arguments.llama2c.resolve())
    if len(engines) == 1:
        raise Wrong("nobody to race with: expected --llama-bench, --ik-llama-bench or --llama2c")
    return engines


def race(arguments, runs):
    """Adds to `runs` one by one, so that what was measured before something breaks is not lost."""
    engines, shape = engines_of(arguments), make_random.SHAPES[arguments.shape]
    real = None if arguments.random else REAL.get(arguments.shape)
    real = real if real and (real / "config.json").exists() and VOCABULARY.exists() else None
    directory = arguments.work / (arguments.shape + ("-real" if real else ""))
    texts = [directory / f"{name}.txt" for name in real_figures.PROMPTS] if real and real_figures.TEXT.exists() else []
    rows = rows_of(arguments.tokens, shape["max_position_embeddings"], texts)
    for pattern in arguments.rows:
        if not fnmatch.filter(map(str, rows), pattern):
            raise Wrong(f"--rows {pattern}: no such row; {arguments.shape} has {' '.join(map(str, rows))}")
    rows = [row for row in rows if any(fnmatch.fnmatch(str(row), pattern) for pattern in arguments.rows)]
    directory.mkdir(parents=True, exist_ok=True)
    entries = [(row, name, make(directory, engine.file(row), arguments.shape, real))
               for row in rows for name, engine in engines.items() if engine.file(row)]
    for name in {row.text.name for row in rows if row.text} | ({"llama2c.tokenizer"} if arguments.llama2c else set()):
        make(directory, name, arguments.shape, real)
    count = sum(int(np.prod(dims)) for _, dims in make_random.tensors(shape))
    tied = shape["vocab_size"] * shape["hidden_size"] if shape["tie_word_embeddings"] else 0
    parameters = {"all": count, "with a tied head twice": count + tied}  # as llama.cpp and its fork count
    for turn in range(arguments.rounds):
        for i, (row, name, path) in enumerate(entries[::-1] if turn % 2 else entries):  # each is first as often as last
            show_progress(f"round {turn + 1} of {arguments.rounds}, run {i + 1} of {len(entries)}: {row} {name}")
            result = run(engines[name], row, path, arguments, parameters)
            runs.setdefault((row, name), []).append(result)


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return number


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = [name for name, config in make_random.SHAPES.items() if not config["rope_scaling"]]
    parser.add_argument("--llm", type=pathlib.Path, default=ROOT / "llm", help="this engine")
    parser.add_argument("--llama-bench", type=pathlib.Path, help="llama.cpp's")
    parser.add_argument("--ik-llama-bench", type=pathlib.Path, help="ik_llama.cpp's")
    parser.add_argument("--bf16", action="store_true", help="bf16 rows also with --activations bf16, as the two round")
    parser.add_argument("--llama2c", type=pathlib.Path, metavar="DIR", help="where llama2.c's run and runq are")
    parser.add_argument("--shape", choices=shapes, default=shapes[0])
    parser.add_argument("--random", action="store_true", help="random weights, also where the real model is there")
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="default: all that fit")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--repeats", type=positive, default=3, help="of a row in each run")
    parser.add_argument("--tokens", type=positive, default=64, help="tokens of a decode row")
    parser.add_argument("-t", "--threads", type=positive, default=2)
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build" / "race", help="where models are kept")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    runs, status = {}, 0
    try:
        race(arguments, runs)
    except (Wrong, OSError, KeyboardInterrupt) as wrong:
        show_progress("")
        print(f"race: {str(wrong) or 'interrupted'}", file=sys.stderr)
        status = 2
    show_progress("")
    results = results_of(runs)
    if arguments.json:
        print(json.dumps(dict(shape=arguments.shape, threads=arguments.threads, results=results), indent=1))
    elif results:
        print_table(results)
    return status


if __name__ == "__main__":
    sys.exit(main())
