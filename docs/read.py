#!/usr/bin/env python3
"""Writes docs/read.html, the source as a book: comments at the left, the code they are about at the right.

    python3 docs/read.py        or: make read

Each line of the story, which is the source files at the top of the repository, stands in it once. Lines that are
nothing but comment become paragraphs; those of them that are indented, a drawing or a table, stay as they are. A type,
and a name that is called, is a link to where the story defines it, if there is no doubt which one is meant. What
stands around it, and how it looks, is in read_frame.html.
"""
import html
import itertools
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
# In reading order: a file, what its chapter is called, and its sections. "" is what stands before the first one; None:
# all sections that no other chapter has.
CHAPTERS = [
    ("llm.cu", "What happens to my prompt?", ["", "A pass", "Prefill and decode"]),
    ("attention.cu", "How does a query read the past?", None),
    ("layers.cu", "What else is in a layer?", None),
    ("cache.h", "Where does position 37 live?", None),
    ("precision.h", "How is a row stored?", None),
    ("pages.h", "Who holds which page?", None),
    ("draft.h", "Who guesses, and who checks?", None),
    ("batch.h", "Who computes with whom, and who must wait?", None),
    ("tokenizer.c", "How does text become ids, and ids text?", None),
    ("llm.cu", "The rest: the engine, sampling, the program", None),
]
KEYWORDS = set("""auto bool break case catch char class const constexpr continue decltype default do double else enum
explicit false float for if inline int int8_t int32_t int64_t namespace new nullptr operator private public return
size_t sizeof static struct switch template throw true try typedef typename uint8_t uint32_t uint64_t using void while
HOST_DEVICE NULL""".split())
SECTION = re.compile(r"// -{4} (.*?) -+$")
COMMENT = re.compile(r"\s*//( |$)")
TYPE = re.compile(r"(?:struct|enum class|using) (\w+)(?=.*[{=])|\} (\w+);$")
FUNCTION = re.compile(r"(    )?(?!\s|#|typedef|else|return)[\w:<>,*&\s\[\]]*?[\w>*&]\s[*&]*(\w+)\(")
TAGS = {"//": "i", "/*": "i", "'": "u", '"': "u", "#": "b"}  # by how a word of code begins
TOKEN = re.compile(r"""//.*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])+'|^#\w+|[A-Za-z_]\w*|\d[\w.]*|[<>&]""")
# In prose: what stands between backticks; files, functions and members; what else has an underscore.
NAME = re.compile(r"`([^`]+)`|(?<![\w/.])((?:[\w/]+\.(?:h|cu|cpp|c|py|md)(?!\w))|\w+(?:::\w+)*\(\)|\w+(?:::\w+)+|"
                  r"\w{2,}_\w{2,})|[<>&]")


def read(folder):
    return {path.relative_to(ROOT).as_posix(): path.read_text().split("\n")[:-1] for path in sorted(folder.iterdir())
            if path.suffix in (".cu", ".h", ".c")}


def definitions(files):
    """{name: [(file, line, kind)]}, the kind one of "type", "function", "plain" (in that namespace), "member"."""
    found = {}
    for file, lines in files.items():
        inside = plain = False  # in a struct, in namespace plain
        for at, line in enumerate(lines):
            if re.match(r"\w|\}", line):
                inside = line.startswith(("struct", "class", "typedef struct")) or inside and line.endswith(":")
                plain = line == "namespace plain {" or plain and not line.startswith("}  //")
            later = (re.sub(r"\s*//.*", "", each) for each in lines[at:])
            ends = (each for each in later if each.endswith(("{", "}", ";")))
            if named := TYPE.match(line):
                found.setdefault(named[1] or named[2], []).append((file, at + 1, "type"))
            elif (call := FUNCTION.match(line)) and bool(call[1]) <= inside and not next(ends, ";").endswith(";"):
                kind = "member" if call[1] else "plain" if plain else "function"
                found.setdefault(call[2], []).append((file, at + 1, kind))
    return {name: places for name, places in found.items() if name not in KEYWORDS}


story = read(ROOT)
defined = definitions({**story, **read(ROOT / "base")})


def link(name, shown, file, *kinds):
    """A link to the definition of `name` of the first of these kinds that there is, if it is the one that is meant: of
    members the only one; of others the one in this file, or else in the only file; of overloads the first."""
    for kind in kinds:
        places = [place for place in defined.get(name, []) if place[2] == kind]
        if kind != "member" and len({place[0] for place in places}) > 1:
            places = [place for place in places if place[0] == file]
        if places and places[0][0] in story and not (kind == "member" and len(places) > 1):
            return f"<a href=#{places[0][0]}-{places[0][1]}>{shown}</a>"
    return shown


def code(line, file, at, parameters):
    def coloured(match):
        word, shown = match[0], html.escape(match[0], quote=False)
        before, after = line[:match.start()], line[match.end():]
        defines = any(place[:2] == (file, at) for place in defined.get(word, []))
        tag = "b" if word in KEYWORDS else "dfn" if defines else ""
        tag = next((tag for start, tag in TAGS.items() if word.startswith(start)), tag)
        if tag:
            return f"<{tag}>{shown}</{tag}>"
        kinds = ([] if word in parameters or before.endswith("std::") else
                 ["type"] if not re.match(r"(<[\w, ()]+>)?\(", after) else
                 ["plain"] if before.endswith(("best::", "plain::")) else
                 ["member"] if before.endswith((".", "->", "::")) else ["type", "function", "plain", "member"])
        return link(word, shown, file, *kinds)
    return TOKEN.sub(coloured, line)


def prose(text, file):
    def mono(match):
        name = match[1] or match[2] or match[0]
        shown = html.escape(name, quote=False)
        if name in "<>&":
            return shown
        if name in story or re.fullmatch(r"docs/\w+\.md", name):
            return f"<a href={'#' + name if name in story else name[5:]}><code>{shown}</code></a>"
        shown = f"<code>{shown}</code>"
        if called := re.fullmatch(r"(?:\w+::)*(\w+)\(\)", name):
            return link(called[1], shown, file, "function", "plain", "member")
        return link(name, shown, file, "type") if match[1] else shown
    return NAME.sub(mono, text)


def number(file, at):
    return f"<a id={file}-{at} href=#{file}-{at} tabindex=-1>{at}</a>"


def left(lines, file):
    """A comment as paragraphs; the number of the first line is seen, the others can be linked to."""
    out = ""
    for (_, before), (at, text) in zip([(0, ""), *lines], lines):
        out += f"<p>{number(file, at)}" if text and not before else f"<a id={file}-{at}></a>"
        out += prose(text, file) + "\n" if text else "</p>" if before else ""
    return out + "</p>" if lines and lines[-1][1] else out


def right(lines, file):
    parameters = set(re.findall(r"(?:class|typename) (\w+)(?=[,>])", "\n".join(line for _, line in lines)))
    last = max((at for at, line in lines if line), default=0)
    out = ""
    for at, line in lines:
        indent = len(line) - len(line.lstrip())
        style = f" style=--i:{indent}" if indent else ""
        shown = f"<span{style}>{number(file, at)}{code(line, file, at, parameters)}\n</span>"
        out += shown if at <= last else f"<a id={file}-{at}></a>"
    return f"<pre>{out}</pre>" if out else ""


def row(comment, lines, file):
    """A comment and its code; a drawing stands where code would, beside what is said before it."""
    before = story[file][(comment + lines)[0][0] - 2]
    out, text, start = "", [], "<div class=r>" if before and not SECTION.match(before) else "<div class='r new'>"
    for drawn, part in itertools.groupby(comment, lambda line: line[1].startswith(" ")):
        part = list(part)
        if drawn:
            cut = min(len(line) - len(line.lstrip()) for _, line in part)
            spans = (f"<span>{number(file, at)}{html.escape(line[cut:], quote=False)}\n</span>" for at, line in part)
            out += (f"{start}<div>{left(text, file)}</div><pre class=drawn tabindex=0 role=group aria-label=Drawing>"
                    f"{''.join(spans)}</pre></div>\n")
            start = "<div class=r>"
        text = [] if drawn else part
    return out + (f"{start}<div>{left(text, file)}</div>{right(lines, file)}</div>\n" if text or lines else "")


def sections(file):
    """{name: HTML}, in order. A row begins with a comment, or behind a blank line if the row so far has a comment."""
    done, rows = {"": ""}, [("", [], [])]  # name of the section, comment, code
    for at, line in enumerate(story[file], 1):
        name, comment, code_ = rows[-1]
        if section := SECTION.match(line):
            done[section[1]] = f"<h3 id={file}-{at}>{prose(section[1], file)}</h3>\n"
            rows.append((section[1], [], []))
        elif COMMENT.match(line):
            if code_:
                rows.append((name, [], []))
            rows[-1][1].append((at, re.sub(r"^\s*// ?", "", line)))
        elif line or code_:
            apart = code_ and not code_[-1][1] and any(text for _, text in comment)
            if apart and re.match(r"(?!private)[^\s#}]", line):
                rows.append((name, [], []))
            rows[-1][2].append((at, line))
        else:  # behind a comment that is about no code of its own
            comment.append((at, ""))
            if len(comment) > 1:
                rows.append((name, [], []))
    for name, comment, code_ in rows:
        done[name] += row(comment, code_, file) if comment or code_ else ""
    return done


def page():
    unknown = set(story) ^ {file for file, _, _ in CHAPTERS}
    assert not unknown, f"CHAPTERS in docs/read.py and the sources at the top differ by {sorted(unknown)}"
    named = {(file, name) for file, _, names in CHAPTERS for name in names or []}
    contents = body = bar = ""
    for count, (file, title, names) in enumerate(CHAPTERS, 1):
        of_file = sections(file)
        names = names or [name for name in of_file if (file, name) not in named]
        unknown = set(names) - set(of_file)
        assert not unknown, f"{file} has no section {sorted(unknown)}: CHAPTERS in docs/read.py"
        id_ = file if f"id={file}>" not in body else f"{file}-more"
        text = "".join(of_file[name] for name in names)
        items = "".join(f"<li><a href=#{at}>{re.sub('<.*?>', '', heading)}</a></li>"
                        for at, heading in re.findall(r"<h3 id=(\S+?)>(.*?)</h3>", text))
        bar += f"<a href=#{id_}>{count} <code>{file}</code></a>\n"
        contents += f"<li><a href=#{id_}><code>{file}</code> {title}</a>{f'<ul>{items}</ul>' if items else ''}</li>\n"
        body += f"<section><h2 id={id_}><span>{count}</span> <code>{file}</code> {title}</h2>\n{text}</section>\n"
    frame, lines = (ROOT / "docs/read_frame.html").read_text(), f"{sum(map(len, story.values())):,}"
    return frame.replace("CONTENTS", contents).replace("BAR", bar).replace("LINES", lines).replace("BODY", body)


if __name__ == "__main__":
    (ROOT / "docs/read.html").write_text(page())
