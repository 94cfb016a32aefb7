#!/usr/bin/env python3
"""Writes conversations as a checkpoint's chat template has them: runs it with Jinja2, as Transformers does.

    chat_template.py DIR [TEMPLATE]     llm chat starts it, and asks it at each turn

TEMPLATE is a name of chat_templates/ next to this file or a FILE.jinja; without one it is the checkpoint's own. The
first line of standard input is {"system": text or "", "arguments": ["NAME=VALUE", ...]}; its answer is {"end": what the
template writes after an answer}. Then each line {"messages": [{"role", "content"}, ...]} gets a line {"text": the
conversation, up to where the next answer begins}. Where that cannot be, it is {"error": why}. The date is that of the
start, or of SOURCE_DATE_EPOCH.

A template is a program that a stranger wrote: it runs in Jinja2's sandbox, with three seconds for a text and two gigabytes.
"""
import contextlib
import datetime
import json
import os
import pathlib
import resource
import signal
import sys
import time

try:
    import jinja2.ext
    import jinja2.sandbox
except ImportError:
    if sys.executable != "/usr/bin/python3" and os.path.exists("/usr/bin/python3"):
        os.execv("/usr/bin/python3", ["/usr/bin/python3", *sys.argv])
    print(json.dumps({"error": "chat templates need Jinja2: apt install python3-jinja2, or pip install jinja2"}))
    sys.exit()

NAMED = pathlib.Path(__file__).parent / "chat_templates"
ANSWER = "\2"  # in place of an answer: no template takes it for white space
SECONDS, BYTES = 3, 2 << 30


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks what a model is trained to write, and writes nothing itself."""
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


class Namespace(jinja2.utils.Namespace):
    """Without names that reach into Python."""
    def __init__(*words, **names):
        self, *words = words
        names = dict(*words, **names)
        jinja2.utils.Namespace.__init__(self)
        for name, value in names.items():
            self[name] = value

    def __setitem__(self, name, value):
        if str(name).startswith("_"):
            refuse(f"a namespace has no {name}")
        jinja2.utils.Namespace.__setitem__(self, name, value)


def refuse(message):
    raise jinja2.TemplateError(str(message))


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def out_of_time(*_):
    raise TimeoutError(f"it takes longer than {SECONDS} s")


def read_text(path):
    text = path.read_text(encoding="utf-8")
    if text.startswith("version https://git-lfs"):
        refuse(f"{path}: is a Git LFS pointer, not the file itself: run `git lfs pull` where it came from")
    return text


def read_object(path):
    """A file of the checkpoint; {} where it is not there."""
    try:
        found = json.loads(read_text(path)) if path.exists() else {}
    except (ValueError, RecursionError, OSError) as error:
        refuse(f"{path}: not valid JSON: {error}" if not isinstance(error, OSError) else f"{path}: {error.strerror}")
    if not isinstance(found, dict):
        refuse(f"{path}: expected a JSON object")
    return found


def read_program(path):
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            refuse(f"{path}: is not a regular file")
        return read_text(path)
    except OSError as error:
        refuse(f"{path}: {error.strerror}")
    except UnicodeDecodeError as error:
        refuse(f"{path}: byte {error.start}, 0x{error.object[error.start]:02X}, is not UTF-8")


def find_program(directory, config, asked):
    """A template and its place, as messages call it."""
    if asked.endswith(".jinja"):
        return read_program(pathlib.Path(asked)), asked
    names = sorted(path.stem for path in NAMED.glob("*.jinja"))
    if asked and asked not in names:
        refuse(f"--template {asked[:80]}: known are {' '.join(names)}, or FILE.jinja")
    path = NAMED / f"{asked}.jinja" if asked else directory / "chat_template.jinja"
    if os.path.lexists(path):  # also a link that leads nowhere
        return read_program(path), f"--template {asked}" if asked else str(path)
    program, place = config.get("chat_template"), f"{directory / 'tokenizer_config.json'}: chat_template"
    if isinstance(program, list):  # of several, the default one
        program = next((one.get("template") for one in program
                        if isinstance(one, dict) and one.get("name") == "default"), None)
    if not program:
        refuse(f"{path}: no chat template is there: give --template NAME ({' '.join(names)}) or FILE.jinja, or take llm "
               "generate, which reads a prompt as it stands")
    if not isinstance(program, str):
        refuse(f"{place}: expected a text")
    return program, place


def special_tokens(config, beside):
    """The variables that Transformers 5 makes of special tokens: all named ..._token, and those of an object of extra
    ones. special_tokens_map.json counts where tokenizer_config.json has no added_tokens_decoder; null is no token."""
    config = config if "added_tokens_decoder" in config else {**config, **beside}
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens"))
    for more in (config.get("model_specific_special_tokens"), extra):
        named.update(more if isinstance(more, dict) else {})
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def read_arguments(given):
    """NAME=VALUE of --template-arg: a value is JSON, or True, False or None as in Python, or else a text."""
    arguments = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name.isidentifier():
            refuse(f"--template-arg {each[:80]}: expected NAME=VALUE")
        if name in ("messages", "add_generation_prompt"):
            refuse(f"--template-arg {name}: the conversation sets it, expected another name")
        try:
            arguments[name] = json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
        except (ValueError, RecursionError):
            arguments[name] = value
    return arguments


class Template:
    def __init__(self, directory, asked, system, arguments):
        config = read_object(directory / "tokenizer_config.json")
        tokens = special_tokens(config, read_object(directory / "special_tokens_map.json"))
        self.variables = {**tokens, "tools": None, "documents": None, **read_arguments(arguments)}
        program, self.place = find_program(directory, config, asked)
        try:
            today = datetime.datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
        except (ValueError, OverflowError):
            refuse(f"SOURCE_DATE_EPOCH={os.environ['SOURCE_DATE_EPOCH']}: expected seconds since 1970")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = to_json
        environment.globals.update(raise_exception=refuse, strftime_now=today.strftime, namespace=Namespace)
        self.cure = ": --template NAME or FILE.jinja takes another one"
        self.program = self.guarded(lambda: environment.from_string(program))
        self.end_of_answer = self.find_end(system)

    def find_end(self, system):
        """What follows an answer: at the end, or where that is white space before a user's turn, as some templates end
        a turn only when another one comes. "" where the template refuses both conversations."""
        said = [{"role": "system", "content": system}] if system else []
        said += [{"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER}]
        for more in [], [{"role": "user", "content": "y"}]:
            with contextlib.suppress(jinja2.TemplateError):
                text = self.text(said + more, add_generation_prompt=False)
                end = text.rpartition(ANSWER)[2] if ANSWER in text else ""
                if end.strip() or more:
                    return end
        return ""

    def guarded(self, work):
        """What the template gives within its time, or refuses."""
        try:
            signal.alarm(SECONDS)
            signal.setitimer(signal.ITIMER_PROF, 2 * SECONDS)  # ends this process: C code hears of no exception
            return work()
        except Exception as error:  # a stranger's program may raise any
            what = "" if isinstance(error, jinja2.TemplateError) else type(error).__name__ + " "
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            refuse(f"{self.place}{line}: {what}{error}".rstrip() + self.cure)
        finally:
            signal.alarm(0)
            signal.setitimer(signal.ITIMER_PROF, 0)

    def text(self, messages, **more):
        def render():
            text = self.program.render(messages=messages, **self.variables, **more)
            if "\0" in text or len(text) > 1 << 24:
                refuse("it writes a NUL" if "\0" in text else "it writes more than 2^24 letters")
            text.encode()  # no lone surrogates
            return text
        return self.guarded(render)

    def conversation(self, messages):
        text = self.text(messages, add_generation_prompt=True)
        if messages[-1]["content"].strip() not in text:
            refuse(f"{self.place}: it does not write what was said")
        self.cure = ""  # it runs: what it refuses from now on is the conversation
        return text


def answer(work):
    try:
        reply = work()
    except Exception as error:
        what = "" if isinstance(error, jinja2.TemplateError) else type(error).__name__ + " "
        said = (what + str(error))[:2000].encode("utf-8", "replace").decode()
        reply = {"error": " ".join(said.split())[:1000]}
    print(json.dumps(reply), flush=True)
    return reply


def main():
    signal.signal(signal.SIGALRM, out_of_time)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # llm is gone
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (BYTES if hard == resource.RLIM_INFINITY else min(BYTES, hard), hard))
    found = []

    def open_template():
        asked = json.loads(sys.stdin.buffer.readline())
        found.append(Template(pathlib.Path(sys.argv[1]), "".join(sys.argv[2:]), asked["system"], asked["arguments"]))
        return {"end": found[0].end_of_answer}
    if "error" in answer(open_template):
        return
    for line in sys.stdin.buffer:
        answer(lambda: {"text": found[0].conversation(json.loads(line)["messages"])})


if __name__ == "__main__":
    main()
