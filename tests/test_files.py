#!/usr/bin/env python3
"""Each file of the story, of base/ and of commands/ compiles alone, and includes only what is below it in the house.
Run from the repository's root. The last line is that of the other tests, for tests/run.sh.
"""

import concurrent.futures
import fnmatch
import os
import pathlib
import re
import subprocess
import sys

# From below to above: a file includes files of its own floor, and of those before it.
FLOORS = ["base/*", "precision.h", "pages.h", "cache.h", "pass.h", "layers.cu attention.cu states.cu", "fast/*",
          "forward.cu", "sample.h draft.h batch.h", "llm.cu", "commands/*"]
INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)
COMPILE = "-std=c++17 -march=native -fopenmp -w -DPLAIN -fsyntax-only -x c++"


def floor_of(path):
    """The number of a file's floor, or None."""
    return next((i for i, floor in enumerate(FLOORS) for name in floor.split() if fnmatch.fnmatch(path, name)), None)


def problem_of(path):
    """What a compiler says of a file alone, or ''."""
    command = [os.environ.get("CXX", "g++"), *COMPILE.split(), path]
    said = subprocess.run(command, capture_output=True, text=True)
    return f"{path} does not compile alone:\n{said.stderr[:400]}" if said.returncode else ""


def check_alone(files):
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [problem for problem in pool.map(problem_of, files) if problem]


def check_floors(files):
    problems = []
    for path in files:
        for name in INCLUDE.findall(pathlib.Path(path).read_text()):
            included = os.path.normpath(os.path.join(os.path.dirname(path), name))
            # The program's main() is where the story is, and runs the commands.
            if floor_of(included) > floor_of(path) and (path, included) != ("llm.cu", "commands/main.h"):
                problems.append(f"{path} includes {included}, which is above it")
    return problems


def main():
    patterns = ("*.h", "*.cu", "base/*.h", "commands/*.h")
    files = sorted(str(path) for pattern in patterns for path in pathlib.Path().glob(pattern))
    problems = [f"{path} is on no floor of tests/test_files.py" for path in files if floor_of(path) is None]
    results = [problems or check_floors(files), check_alone(files)]
    for result in results:
        print(*result, sep="\n", end="\n" if result else "")
    failed = sum(bool(result) for result in results)
    print(f"[doctest] test cases: {len(results)} | {len(results) - failed} passed | {failed} failed | 0 skipped")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
