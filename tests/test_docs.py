#!/usr/bin/env python3
"""What README and docs/ say is true: commands run and print what is shown, code stands where it is said to, links lead
somewhere. One test case a page.  python3 tests/test_docs.py [PAGE ...], from the repository's root, with ./llm built.

What stands in a page:
  ```console           "$ command", then what it prints. A line "..." leaves lines out. The text is the same; a number
                       with a decimal point may differ by 2 in its last digit, as other processors sum in another order.
                       Words that a line leaves out are "..." in it, also at its end.
  ```console roughly   numbers are free: times, tokens/s.        ```console unrun   downloads: only looked at.
  ```cpp FILE          these lines stand in FILE; a line "..." leaves lines out.      ```python FILE   too.
  other blocks         lines that begin with ./llm, make or python3 are commands that are not refused.
  `name()`, `FILE.h`   the sources have such a function, and such a file.
  ```diff FILE         in the answer of an exercise: a change of FILE. The console blocks that follow it, up to the
                       answer's end, are run with the program so changed (Exercises, below); they run each test that the
                       exercise names. FILE.md: a change of the code on that page, which
                       tests/test_make_your_own.cpp tries.
A chapter is two screens at most, and ends with the one sentence to keep. And docs/attention.py and docs/cache.py print
the numbers of ./llm; and the book that docs/read.py writes has no broken link, and each line of the source once.
"""
import html.parser
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.dont_write_bytecode = True
sys.path.append(str(ROOT / "docs"))
import read  # docs/read.py

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "weights_tools/README.md"]
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.]*\w)|-?\d+\.\d+")
NUMERAL = r"(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
FILES = [path for path in subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True,
                                         text=True).stdout.split("\n") if path]
SOURCES = "\n".join((ROOT / path).read_text(errors="replace") for path in FILES
                    if path.endswith((".cu", ".h", ".c", ".cpp", ".py")) and (ROOT / path).is_file())
# Debian's numpy is that of /usr/bin/python3, which need not be the first one.
HAS_NUMPY = subprocess.run(["python3", "-c", "import numpy"], stderr=subprocess.DEVNULL).returncode == 0
PATH = os.environ["PATH"] if HAS_NUMPY else "/usr/bin:" + os.environ["PATH"]
LIMIT = 180  # seconds for a command whose output is shown
CHAPTER = 130  # lines, two screens


def near(shown, found):
    """Whether two numbers as they are written are the same, but for 2 in the last digit of one with a point."""
    if shown == found:
        return True
    mantissa, _, exponent = shown.lower().partition("e")
    digits = len(mantissa.partition(".")[2])
    if not digits:
        return False
    return abs(float(shown) - float(found)) <= 2.5 * 10.0 ** (int(exponent or 0) - digits)


def same_line(shown, found, roughly):
    """Whether the words are the same, and the numbers near. A word "..." of `shown` is any words, at least one."""
    words = (r"\S.*" if word == "..." else NUMERAL.join(map(re.escape, NUMBER.split(word))) for word in shown.split())
    match = re.fullmatch(r"\s+".join(words), found.strip())
    return match is not None and (roughly or all(map(near, NUMBER.findall(shown), match.groups())))


def first_difference(shown, found, same):
    """None if `found` has the lines `shown`, in which "..." stands for any lines; else the line that is missing."""
    at = 0
    anywhere = False
    for i, line in enumerate(shown):
        if line.strip() == "...":
            anywhere = True
            continue
        last = anywhere and "..." not in [later.strip() for later in shown[i:]]
        if last:  # what follows the last gap is the end
            at = max(at, len(found) - (len(shown) - i))
        while anywhere and at < len(found) and not same(line, found[at]):
            at += 1
        if at >= len(found) or not same(line, found[at]):
            return line
        at, anywhere = at + 1, False
    return None if anywhere or at == len(found) else "(the end; found " + found[at] + ")"


def compiler(sources, output, *flags):
    """A command that compiles C++ as the Makefile does, but quickly, without optimization."""
    return [os.environ.get("CXX", "g++"), *"-std=c++17 -O0 -march=native -ffp-contract=off -fopenmp -Wall -Wextra -Werror "
            "-Wfatal-errors -ftemplate-backtrace-limit=1 -x c++".split(), *flags, *sources, *output]


class Exercises:
    """The changes that exercises ask for (```diff FILE). A change replaces whole statements, so one copy of the sources
    can have them all: `if (exercise(3)) { the new lines } else { the old ones }`. It is compiled once, and EXERCISE=3
    runs the third. A second copy has the new lines alone, as a reader would have them. It must compile without a warning:
    all changes at once, as they do not meet."""
    def __init__(self, pages, scratch):
        self.folder, self.problems, self.numbers, self.started = scratch / "exercises", [], {}, False
        self.changed = {}  # file: its lines with all changes, and with a choice
        for page in pages:
            for words, start, lines in page.blocks:
                if words[:1] == ["diff"] and len(words) > 1 and not words[1].endswith(".md"):
                    number = self.numbers.setdefault(page.end_of_answer(start), len(self.numbers) + 1)
                    page.expect(self.apply(words[1], lines, number), start, f"{words[1]} has no such lines, or twice")
                    page.check_exercise(start)

    def apply(self, file, lines, number):
        if not (ROOT / file).is_file():
            return False
        versions = self.changed.setdefault(file, [(ROOT / file).read_text().split("\n")] * 2)
        old = [line[1:].strip() for line in lines if line[0] in " -"]
        new = [line[1:] for line in lines if line[0] in " +"]
        chosen = [f"if (exercise({number})) {{", *new, "} else {", *[line[1:] for line in lines if line[0] in " -"], "}"]
        for which, by in enumerate((new, chosen)):
            text = [line.strip() for line in versions[which]]
            places = [i for i in range(len(text)) if text[i:i + len(old)] == old]
            if len(places) != 1:
                return False
            versions[which] = versions[which][:places[0]] + by + versions[which][places[0] + len(old):]
        return True

    def start(self):
        """Both copies; the one is compiled while the other is checked."""
        self.started = True
        for which, name in enumerate(("alone", "chosen")):
            for path in FILES:
                if path.endswith((".cu", ".h", ".c", ".cpp")) and (ROOT / path).is_file():
                    (self.folder / name / path).parent.mkdir(parents=True, exist_ok=True)
                    lines = self.changed.get(path)
                    (self.folder / name / path).write_text("\n".join(lines[which]) if lines else (ROOT / path).read_text())
        (self.folder / "chosen/weights_tools").symlink_to(ROOT / "weights_tools")  # beside llm-plain, which looks there
        (self.folder / "exercise.h").write_text(
            "#include <cstdlib>\ninline bool exercise(int number) {\n"
            "    static const char *const asked = getenv(\"EXERCISE\");\n    return asked && atoi(asked) == number;\n}\n")
        check = subprocess.Popen(compiler(["llm.cu"], ["-fsyntax-only"], "-DPLAIN"), cwd=self.folder / "alone", text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.build("llm-plain", "llm.cu", "-DPLAIN")
        said = check.communicate()[0]
        if check.returncode:
            self.problems.append("the exercises' changes do not compile:\n" + "\n".join(said.split("\n")[:12]))

    def build(self, program, source, *flags):
        objects = [ROOT / f"build/{name}.o" for name in ("attend", "linear", "json", "tokenizer", "tokenizer_json")]
        command = compiler([source], ["-x", "none", *objects, *"-lonig -lutf8proc -ledit -o".split(), program],
                           "-include", self.folder / "exercise.h", *flags)
        (self.folder / "chosen/build").mkdir(exist_ok=True)
        said = subprocess.run(command, cwd=self.folder / "chosen", capture_output=True, text=True)
        if said.returncode:
            self.problems.append(f"{program} with the exercises' changes:\n" + "\n".join(said.stderr.split("\n")[:12]))

    def told(self):
        """What is wrong with the changed sources, once."""
        problems, self.problems = self.problems, []
        return problems

    def environment(self, page, start, command, limit):
        """What to run for a command: after an exercise's change the changed program, as if `make` had been called."""
        number = self.numbers.get(page.end_of_answer(start))
        if not number:
            return command, limit, {}
        if not self.started:
            self.start()
        for test in re.findall(r"build/(test_\w+)", command):
            if not (self.folder / "chosen/build" / test).exists():
                self.build(f"build/{test}", f"tests/{test}.cpp")
        command = re.sub(r"make (CUDA=0 )?(plain|build/test_\w+)? *&& *", "", command)
        command = re.sub(r"\./llm(-plain)?\b", "exercises/chosen/llm-plain", command)
        return command.replace("build/test_", "exercises/chosen/build/test_"), limit, {"EXERCISE": str(number)}


class Page:
    def __init__(self, path, scratch):
        self.path, self.scratch, self.problems = path, scratch, []
        self.blocks, self.prose = [], []
        inside, indent = None, 0
        for number, line in enumerate(path.read_text().split("\n"), 1):
            if line.strip().startswith("```"):
                if inside is None:
                    inside, indent = (line.strip()[3:].split(), number, []), len(line) - len(line.lstrip())
                else:
                    self.blocks.append(inside)
                    inside = None
            elif inside is not None:
                inside[2].append(line[indent:])
            else:
                self.prose.append((number, line))
        self.expect(inside is None, len(self.prose), "a block does not end")

    def end_of_answer(self, number):
        """The line at which the folded answer ends that has this line, or None."""
        marks = [(at, line.strip()) for at, line in self.prose if at > number and "details>" in line]
        return (self.path, marks[0][0]) if marks and marks[0][1] == "</details>" else None

    def expect(self, good, number, problem):
        if not good:
            self.problems.append(f"{self.path.relative_to(ROOT)}:{number}: {problem}")

    def check_exercise(self, start):
        """An answer with a diff at `start` runs something, and each test that the exercise names."""
        begin = max(at for at, line in self.prose if at < start and re.match(r"\d+\. ", line))
        lines = [line.strip() for line in self.path.read_text().split("\n")[begin - 1:self.end_of_answer(start)[1]]]
        ran = " ".join(line for line in lines if line.startswith("$ "))
        self.expect(ran, start, "nothing is run with this change")
        for test in sorted(set(re.findall(r"\btest_\w+", " ".join(lines)))):
            self.expect(test in ran, start, f"{test} is named, but not run with this change")

    def run(self, command, limit, more={}):
        environment = dict(os.environ, PATH=PATH, HOME=str(self.scratch / "home"), NO_COLOR="1", PYTHONDONTWRITEBYTECODE="1",
                           **more)
        try:
            result = subprocess.run(["bash", "-c", command], cwd=self.scratch, env=environment, timeout=limit,
                                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
            return result.returncode, result.stdout.rstrip("\n").split("\n")
        except subprocess.TimeoutExpired:
            return None, []

    def check_console(self, kind, start, lines, exercises):
        commands = []
        for number, line in enumerate(lines, start + 1):
            if line.startswith("$ "):
                commands.append((number, line[2:], []))
            elif commands:
                commands[-1][2].append(line)
            else:
                self.expect(False, number, "a console block begins with a command: $ ...")
        for number, command, shown in commands:
            if "unrun" in kind:
                continue
            while shown and not shown[-1].strip():
                shown.pop()
            status, found = self.run(*exercises.environment(self, start, command, LIMIT))
            self.expect(status is not None, number, f"{command}: runs longer than {LIMIT} s")
            lacks = first_difference(shown, found, lambda a, b: same_line(a, b, "roughly" in kind)) if shown else None
            self.expect(lacks is None, number, f"{command}: does not print\n  {lacks}\nbut\n  " + "\n  ".join(found[:40]))

    def check_commands(self, start, lines):
        for number, line in enumerate(lines, start + 1):
            command = re.split(r"\s{2,}|\s+#", re.sub(r"^(\S+ \w+) +-", r"\1 -", line.strip()))[0]
            if command.startswith("./llm"):
                status, found = self.run(f"timeout 2 {command} >out 2>&1; s=$?; head -c 300 out; exit $s", 20)
                self.expect(status in (0, 1, 124), number, f"{command}: status {status}: {' '.join(found)}")
            elif command.startswith("make "):
                words = [word for word in command.split()[1:] if "=" not in word and not word.startswith("-")]
                status, found = self.run(f"make -n {' '.join(words)} 2>&1 >/dev/null | head -3", 60)
                self.expect("No rule" not in " ".join(found), number, f"{command}: {' '.join(found)}")
            elif re.match(r"python3 \S+\.py", command):
                script = ROOT / command.split()[1]
                self.expect(script.is_file(), number, f"{command}: no such script")
                for flag in re.findall(r"\s(--[\w-]+)", command) if script.is_file() else []:
                    self.expect(f'"{flag}"' in script.read_text(), number, f"{command}: no {flag} in it")

    def check_code(self, name, start, lines):
        path = ROOT / name
        if not path.is_file():
            return self.expect(False, start, f"{name}: no such file")
        text = [line.strip() for line in path.read_text().split("\n")]
        at = 0
        part = []
        for line in [line.strip() for line in lines] + ["..."]:
            if line != "...":
                part.append(line)
                continue
            while part and at < len(text) and text[at:at + len(part)] != part:
                at += 1
            if at >= len(text):
                return self.expect(False, start, f"{name} has no such lines, in this order:\n  " + "\n  ".join(part))
            at, part = at + len(part), []

    def anchors(self, path):
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    def check_prose(self):
        for number, line in self.prose:
            for alt, target in re.findall(r"(!?\[[^\]]*\])\(([^)\s]+)\)", line):
                if re.match(r"\w+:", target):
                    continue
                file, _, anchor = target.partition("#")
                path = (self.path.parent / file).resolve() if file else self.path
                self.expect(path.exists(), number, f"{target}: no such file")
                self.expect(alt != "![]", number, f"{target}: a picture without a text that says what is on it")
                if anchor and path.suffix == ".md" and path.exists():
                    self.expect(anchor in self.anchors(path), number, f"{target}: no such heading")
            for word in re.findall(r"`([^`]+)`", line):
                if re.fullmatch(r"\w+\(\)", word):
                    self.expect(re.search(rf"\b{word[:-2]}\(", SOURCES), number, f"{word}: no such function")
                if re.fullmatch(r"[\w/.-]*\w\.(cu|h|c|cpp|py|md|html|sh|svg)", word):
                    self.expect(any(("/" + path).endswith("/" + word) for path in FILES), number, f"{word}: no such file")

    def check_length(self):
        """Of a chapter, what is seen at first: neither folded answers nor the code that chapter 9 is there to copy."""
        seen = re.sub(r"(?ms)^ *<details>.*?</details>\n|^```cpp\n.*?^```\n", "", self.path.read_text())
        chapter = re.match(r"\d\d_", self.path.name)
        self.expect(not chapter or seen.count("\n") <= CHAPTER, 1, f"{seen.count(chr(10))} lines, expected {CHAPTER}")
        kept = re.search(r"\n\*\*To keep:\*\* ([^.]|\.\S)+\.\n\n(Next|Back).*\n?$", seen)
        self.expect(not chapter or kept, 1, "no sentence to keep at the end: **To keep:** ...")

    def check(self, exercises):
        for words, start, lines in self.blocks:
            if words[:1] == ["console"]:
                self.check_console(words[1:], start, lines, exercises)
            elif words[:1] in (["cpp"], ["python"]) and len(words) > 1:
                self.check_code(words[1], start, lines)
            elif not words:
                self.check_commands(start, lines)
        self.check_prose()
        self.check_length()
        return self.problems


def check_numpy(scratch):
    """The tables of docs/attention.py beside those that ./llm prints of the same texts: query, positions, output."""
    def tables(command):
        result = subprocess.run(["bash", "-c", command], cwd=scratch, env=dict(os.environ, PATH=PATH), text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return re.findall(r"(?m)^(?:query|output| +\d+  \").*$", result.stdout) or [result.stdout]
    texts = (("Once upon a", "--cache none"), ("Once upon a time", "--cache none"), ("Once upon a time", "--kv f32"))
    shown = [line for text, flags in texts for line in tables(f'./llm show -p "{text}" --layer 2 --head 4 {flags}')
             if not re.match(r" +\d+  \"", line) or len(NUMBER.findall(line)) > 5]
    found = tables("python3 docs/attention.py")
    lines = 6 + 7 + 7
    pairs = [(a.split("   the sum")[0], b) for a, b in zip(shown, found)]
    wrong = [f"docs/attention.py: llm show says\n  {a}\nand it says\n  {b}" for a, b in pairs
             if not same_line(a, b, roughly=False)]
    return wrong[:2] if len(shown) == len(found) == lines else [
        f"docs/attention.py: {len(found)} lines, llm show {len(shown)}, expected {lines}:\n" + "\n".join(found[:9])]


def check_cache(scratch):
    """What docs/cache.py prints: commands, and below each what it computed that they print."""
    page = Page(ROOT / "docs/cache.py", scratch)
    status, lines = page.run("python3 docs/cache.py", LIMIT)
    page.expect(status == 0, 1, f"status {status}")
    page.check_console([], 0, lines, Exercises([], scratch))
    return page.problems


class Book(html.parser.HTMLParser):
    """A page of the book: its ids and links, and what it shows of each line of source, without the line's number."""
    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.lines, self.open = [], set(), [], []
        self.feed(path.read_text())
        assert not self.open, f"{path.name}: {self.open} not closed"

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in ("meta", "link", "img", "br", "hr"):
            self.open.append("number" if "tabindex" in attributes else tag)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if re.fullmatch(r"L\d+", attributes.get("id", "")):
            self.lines.append([attributes["id"], "pre" in self.open, ""])
        self.links |= {attributes[name] for name in ("href", "src") if name in attributes}

    handle_startendtag = handle_starttag

    def handle_endtag(self, tag):
        assert self.open.pop() in (tag, "number"), f"{self.getpos()}: </{tag}>"

    def handle_data(self, data):
        if self.lines and "main" in self.open and not {"number", "nav"} & set(self.open):
            self.lines[-1][2] += data


def check_book(scratch):
    """The book of make read: all links lead somewhere; each line of source once, or a comment's words."""
    read.write(scratch / "book")
    pages = {path.name: Book(path) for path in (scratch / "book").glob("*.html") if path.name != "explorer.html"}
    problems = [] if "cache.h.html#Cache" in pages["llm.cu.html"].links else ["llm.cu.html does not link to Cache"]
    for name, page in pages.items():
        problems += [f"{name}: the id {id} is there twice" for id in sorted(set(page.ids)) if page.ids.count(id) > 1]
        for link in sorted(link for link in page.links if not re.match(r"\w+:", link)):
            file, _, anchor = link.partition("#")
            good = (scratch / "book" / (file or name)).is_file() and (not anchor or anchor in pages[file or name].ids)
            problems += [] if good else [f"{name}: {link} leads nowhere"]

    def words(line):
        return re.sub(r"^ *// ?|[`\s]", "", re.sub(r"^// -{4} (.*?) -+$", r"\1", line))
    for file in (path for path in FILES if re.fullmatch(r"((base|fast|commands)/)?\w+\.(cu|cpp|h|c)", path)):
        lines = (ROOT / file).read_text().split("\n")[:-1]
        page = pages.get(read.address(file))
        shown = page.lines if page else []
        problems += [] if len(shown) == len(lines) else [f"{file}: {len(shown)} of {len(lines)} lines are in the book"]
        for number, (line, (id, in_code, text)) in enumerate(zip(lines, shown), 1):
            same = (text.rstrip() == line if in_code and "//" != line.strip()[:2] else
                    re.sub(r"[`\s]", "", text) == words(line))
            problems += [] if same and id == f"L{number}" else [f"{file}:{number}: the book has {text!r} in its place"]
    return problems[:9]


def json_type(value):
    if isinstance(value, list):
        return "list of objects" if value and isinstance(value[0], dict) else "list of numbers"
    return {bool: "true or false", str: "text", dict: "object"}.get(type(value), "number")


def check_json(scratch):
    """Each key that a command prints has the type of docs/json.md, and each key there is printed by a command."""
    page = (ROOT / "docs/json.md").read_text()
    named = {key: kind for kind, keys in re.findall(r"^\| (\w[\w ]*) \| (`.*)\|$", page, re.M)
             for key in re.findall("`(.*?)`", keys)}
    prompt = "-p Once -n 4 "
    lines = {"generate": [f"{prompt} --draft ngram --temp 1", f"{prompt} --samples 2 --temp 1 --cache paged", prompt],
             "diff": [prompt, f"{prompt} --kv f16,int2 --against full", f"{prompt} --draft ngram"],
             "bench": ["-n 4 --depth 8 --prefill 8 --repeats 1 --cache none,paged", "-n 8 --draft ngram --repeats 1"],
             "eval": ["--repeats 1 --kv f16"], "show": ["-p Once", "-p Once --cache paged", "-p Once --cache ring"],
             "memory": ["", "--layers 4 --kv-heads 2 --head-dim 64 -c 100 --budget 1GiB --bandwidth 10"],
             "info": ["", "-m tests/fixtures/models/gemma3"], "tokenize": ["-p Once"],
             "chat": [f"{prompt[8:]} --template plain --draft ngram --temp 1 <<< Once"],
             "batch": ["-f docs/requests.jsonl -n 4 --draft ngram --against alone --events events && cat events",
                       "-f docs/two.jsonl --page 4 --pool 24 --admission optimistic --events events && cat events"]}
    problems, seen = [], set()

    def look(command, found):
        for key, value in found.items():
            kind = json_type(value)
            expected = named.get(key, "number")
            if key == "tokens":
                expected = "list of numbers" if "stop" in found or "guessed" in found else "number"
            good = value is None or kind == expected or (value == [] and expected.startswith("list"))
            problems.extend([] if good else [f"docs/json.md: {command}: {key} is a {kind}, the page says {expected}"])
            seen.add(key)
            inner = value if kind == "list of objects" else [value] if kind == "object" and key != "pieces" else []
            for each in inner:
                look(command, each)
    for command, flags in ((command, flags) for command in lines for flags in lines[command]):
        done = subprocess.run(["bash", "-c", f"./llm {command} --json {flags}"], cwd=scratch, capture_output=True,
                              text=True)
        try:
            objects = [json.loads(done.stdout)]
        except ValueError:
            objects = [json.loads(line) for line in done.stdout.splitlines()]
        problems += [] if objects else [f"docs/json.md: {command} {flags}: {done.stderr.strip()}"]
        for found in objects:
            look(f"{command} {flags}", found)
    seen |= {"interrupted", "error"}
    return problems + [f"docs/json.md: no command prints {key}" for key in named if key not in seen]


def main():
    paths = [pathlib.Path(page).resolve() for page in sys.argv[1:] if not page.startswith("-")] or PAGES
    extra = [check_numpy, check_cache, check_json, check_book]
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        for entry in ROOT.iterdir():  # what commands write stays here
            if entry.name not in (".git", "build"):
                (scratch / entry.name).symlink_to(entry)
        (scratch / "llm").unlink(missing_ok=True)
        if (ROOT / "llm").is_file():
            shutil.copy(ROOT / "llm", scratch / "llm")  # it looks for the built-in checkpoint beside itself
        (scratch / "my.txt").write_text("Tom went to the sea. He saw a boat there.\n" * 20)
        (scratch / "build").mkdir()
        (scratch / "home/models").mkdir(parents=True)
        (scratch / "home/models/SmolLM2-135M").symlink_to(ROOT / "weights_tools/builtin")
        texts = [page.read_text() for page in PAGES]
        orphans = [path for path in FILES if path.endswith(".svg") and not any(path[5:] in text for text in texts)]
        pages = [Page(page, scratch) for page in paths]
        exercises = Exercises(pages, scratch)
        for page in [*pages, *(extra if paths == PAGES else [])]:
            problems = page(scratch) if page in extra else page.check(exercises)
            problems += exercises.told()
            problems += [f"{path}: no page shows it" for path in orphans if page is pages[0] and paths[0] == PAGES[0]]
            failed += bool(problems)
            print("\n".join(problems), end="\n" if problems else "")
    cases = len(pages) + (paths == PAGES) * len(extra)
    print(f"[doctest] test cases: {cases} | {cases - failed} passed | {failed} failed | 0 skipped")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
