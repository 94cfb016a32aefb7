#!/usr/bin/env python3
"""Writes docs/read.html, the source as a book: comments at the left, the code they are about at the right.

    python3 docs/read.py        or: make read

Each line of the story, which is the source files at the top of the repository, stands in it once. Lines that are
nothing but comment become paragraphs; those of them that are indented, a drawing or a table, stay as they are. A type,
and a name that is called, is a link to where the story defines it, if there is no doubt which one is meant.
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
        for tag, starts in (("i", ("//", "/*")), ("u", ("'", '"')), ("b", "#")):
            if word.startswith(starts):
                return f"<{tag}>{shown}</{tag}>"
        if word in KEYWORDS:
            return f"<b>{shown}</b>"
        if any(place[:2] == (file, at) for place in defined.get(word, [])):
            return f"<dfn>{shown}</dfn>"
        if word in parameters or before.endswith("std::"):
            return shown
        if not re.match(r"(<[\w, ()]+>)?\(", after):
            return link(word, shown, file, "type")
        if before.endswith((".", "->", "::")) and not before.endswith(("best::", "plain::")):
            return link(word, shown, file, "member")
        kinds = ["plain"] if before.endswith("::") else ["type", "function", "plain", "member"]
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
        start = f"<span style=--i:{indent}>" if indent else "<span>"
        shown = f"{start}{number(file, at)}{code(line, file, at, parameters)}\n</span>"
        out += shown if at <= last else f"<a id={file}-{at}></a>"
    return f"<pre>{out}</pre>" if out else ""


def drawing(lines, file):
    cut = min(len(text) - len(text.lstrip()) for _, text in lines)
    return "<pre class=drawn tabindex=0 role=group aria-label=Drawing>" + "".join(
        f"<span>{number(file, at)}{html.escape(text[cut:], quote=False)}\n</span>" for at, text in lines) + "</pre>"


def row(comment, lines, file, new):
    """A comment and its code; a drawing stands where code would, beside what is said before it."""
    out, text, start = "", [], "<div class='r new'>" if new else "<div class=r>"
    for drawn, part in itertools.groupby(comment, lambda line: line[1].startswith(" ")):
        if drawn:
            out += f"{start}<div>{left(text, file)}</div>{drawing(list(part), file)}</div>\n"
            text, start = [], "<div class=r>"
        else:
            text = list(part)
    return out + (f"{start}<div>{left(text, file)}</div>{right(lines, file)}</div>\n" if text or lines else "")


def sections(file):
    """{name: HTML}, in order. A row begins with a comment, or behind a blank line if the row so far has a comment."""
    lines, done, name, comment, code_ = story[file], {"": ""}, "", [], []

    def end_row():
        if comment or code_:
            before = lines[(comment + code_)[0][0] - 2]
            done[name] += row(comment, code_, file, not before or bool(SECTION.match(before)))
        comment.clear()
        code_.clear()
    for at, line in enumerate(lines, 1):
        if section := SECTION.match(line):
            end_row()
            name = section[1]
            done[name] = f"<h3 id={file}-{at}>{prose(name, file)}</h3>\n"
        elif COMMENT.match(line):
            if code_:
                end_row()
            comment.append((at, re.sub(r"^\s*// ?", "", line)))
        elif line or code_:
            apart = code_ and not code_[-1][1] and re.match(r"(?!private)[^\s#}]", line)
            if apart and any(text for _, text in comment):
                end_row()
            code_.append((at, line))
        else:  # behind a comment that is about no code of its own
            comment.append((at, ""))
            if len(comment) > 1:
                end_row()
    end_row()
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
    lines = f"{sum(map(len, story.values())):,}"
    return PAGE.replace("CONTENTS", contents).replace("BAR", bar).replace("LINES", lines).replace("BODY", body)


PAGE = """<!doctype html>
<!-- Written by docs/read.py from the sources: make read. One file: open it in a browser. -->
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>The source as a book</title>
<style>
:root {
  color-scheme: light dark;
  --paper: #f7f6f3; --card: #fff; --ink: #1c2733; --soft: #56626e; --line: #dcdad4;
  --teal: #0f766e; --orange: #b23c0b; --grey: #aab2ba; --track: #eceae5;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #11161b; --card: #1a2128; --ink: #e7ebef; --soft: #a3afba; --line: #313c46;
    --teal: #2dd4bf; --orange: #fb923c; --grey: #66727e; --track: #263039;
  }
}
* { box-sizing: border-box; }
html { scroll-padding-top: 60px; }
body {
  margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
}
header, main { max-width: 1440px; margin: 0 auto; padding: 0 20px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 24px 0 8px; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 56px 0 8px; padding-top: 12px; border-top: 3px solid var(--teal); }
h2 span { color: var(--teal); }
h3 { font-size: 1.1rem; line-height: 1.3; margin: 28px 0 8px; }
p { margin: 0 0 10px; max-width: 44rem; }
a { color: var(--teal); }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { font-size: .875em; }
:focus-visible { outline: 3px solid var(--teal); outline-offset: 2px; border-radius: 4px; }
.skip { position: absolute; left: -9999px; }
.skip:focus { left: 20px; top: 8px; z-index: 2; padding: 8px 12px; background: var(--card); }
#bar { display: flex; flex-wrap: wrap; gap: 2px 18px; padding: 10px max(20px, 50% - 700px); background: var(--card);
  border-block: 1px solid var(--line); font-size: .9rem; }
#contents { columns: 3 260px; column-gap: 28px; padding-left: 20px; margin: 12px 0 0; }
#contents > li { break-inside: avoid; margin-bottom: 12px; }
#contents ul { padding-left: 0; list-style: none; font-size: .875rem; }

/* A row: a comment, and the code it is about. A line that is too long goes on below, 4 columns further in. */
.r > div > p { position: relative; padding-left: 44px; font-size: 15px; }
.new > :not(.drawn) { padding-top: 12px; }
pre { margin: 0; font-size: 12px; line-height: 1.5; background: var(--card); white-space: pre-wrap; padding: 0 10px; }
pre > span {
  --h: calc((var(--i, 0) + 4) * 1ch);
  display: block; position: relative; padding-left: calc(44px + var(--h)); text-indent: calc(0px - var(--h));
}
[tabindex="-1"] {  /* the number of a line */
  position: absolute; left: 0; width: 34px; text-align: right; text-indent: 0; color: var(--soft); user-select: none;
  font: 11px/1.65 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; text-decoration: none;
}
p > [tabindex="-1"] { left: -4px; line-height: 2; }
pre a { color: inherit; text-decoration: underline dotted var(--grey); text-underline-offset: 2px; }
pre a:hover { color: var(--teal); }
.r > :only-child { grid-column: 1 / -1; }
.drawn { background: none; align-self: end; overflow-x: auto; white-space: pre; padding: 6px 9px; margin-bottom: 10px;
  border: 1px solid var(--line); border-radius: 6px; }
pre b { font-weight: normal; color: var(--teal); } pre i { font-style: normal; color: var(--soft); }
pre u { text-decoration: none; color: var(--orange); } dfn { font-style: normal; font-weight: bold; }
:target { background: var(--track); } span:has(> :target), p:has(> :target) { background: var(--track); }
@media (min-width: 1100px) {
  #bar { position: sticky; top: 0; z-index: 1; }
  .r { display: grid; grid-template-columns: minmax(300px, 1fr) minmax(0, 940px); gap: 0 24px; }
  .r > pre { grid-column: 2; }
}
@media (max-width: 1099px) {
  pre { border-radius: 6px; padding-block: 8px; }
  .r { margin-bottom: 10px; } .new { margin-top: 20px; }
}
@media (max-width: 600px) {
  header, main { padding: 0 12px; }
  pre, .drawn { font-size: 11px; padding-inline: 4px; }
  pre > span { --h: calc((min(var(--i, 0), 6) + 2) * 1ch); padding-left: calc(30px + var(--h)); }
  [tabindex="-1"] { width: 26px; font-size: 10px; }
  .r > div > p { padding-left: 32px; } p > [tabindex="-1"] { left: 0; line-height: 2.2; }
}
@media print {
  #bar, .skip { display: none; }
  h2, h3 { break-after: avoid; } pre > span { break-inside: avoid; }
  .drawn { font-size: 9px; overflow: visible; }
}
</style>
</head>
<body>
<a class="skip" href="#llm.cu">Skip to the first chapter</a>
<header>
  <h1>The source as a book</h1>
  <p>All LINES lines of the story, in the order a token travels: comments at the left, the code they are about at the
  right. A name with dots under it leads to where it is defined. What is not here is in <code>base/</code>,
  <code>fast/</code> and <code>commands/</code>. New to all of this? Read <a href="01_a_word.md">chapter 1 of the
  tutorial</a> first; the words are in the <a href="glossary.md">glossary</a>.</p>
</header>
<nav id="bar" aria-label="Files">BAR</nav>
<main>
<nav aria-label="Contents"><ol id="contents">
CONTENTS</ol></nav>
BODY</main>
</body>
</html>
"""

if __name__ == "__main__":
    (ROOT / "docs/read.html").write_text(page())
