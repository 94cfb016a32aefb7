#!/usr/bin/env python3
"""Writes the tutorial and the source as one book of web pages: build/book/index.html is the first of them.

    python3 docs/read.py        or: make read

Pages of docs/ come in the order in which README.md links to them, then the source: the story in reading order, base/,
fast/ and commands/. Each line of a source file is in its page once, in the order of the file, and a comment is at the
left of the code that follows it. The indented lines of a comment, a drawing or a table, stay as they are. A type and a
name that is called are links to where they are defined, if there is no doubt which definition is meant. What is around
a page is in read_frame.html, and how it looks in read.css.
"""
import html
import itertools
import keyword
import os
import pathlib
import re
import shutil
import string
import sys

sys.path.append("/usr/lib/python3/dist-packages")  # Debian's packages, if another python3 comes first
import markdown_it

ROOT = pathlib.Path(__file__).resolve().parent.parent
READING_ORDER = """llm.cu forward.cu attention.cu layers.cu states.cu pass.h cache.h precision.h tokenizer.c pages.h
sample.h batch.h draft.h""".split()  # files that are not named here follow
KEYWORDS = {"cpp": set("""auto bool break case catch char class const constexpr continue decltype default do double else
enum explicit extern false float for if inline int int8_t int32_t int64_t namespace new nullptr operator private public
return size_t sizeof static struct switch template this throw true try typedef typename uint8_t uint32_t uint64_t using
void while HOST_DEVICE NULL""".split()), "python": set(keyword.kwlist)}
SECTION = re.compile(r"// -{4} (.*?) -+$")
COMMENT = re.compile(r"\s*//( |$)")
TYPE = re.compile(r"(?:struct|class|enum class|using) (\w+)(?=.*[{=])|\} (\w+);$")
FUNCTION = re.compile(r"(    )?(?!\s|#|typedef|else|return)[\w:<>,*&\s\[\]]*?[\w>*&]\s[*&]*(\w+)\(")
STANDARD = set("at back begin clear count data empty end erase find front get insert reserve resize size".split())
TAGS = {"//": "i", "/*": "i", "#": "i", "'": "u", '"': "u"}  # by how a word of code begins
WORD = r"""|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])+'|[A-Za-z_]\w*|\d[\w.]*|[<>&]"""
TOKEN = {"cpp": re.compile(r"//.*|/\*.*?\*/|^#\w+" + WORD), "python": re.compile("#.*" + WORD)}
# In a comment: what is between backticks; files, functions and members; what else has an underscore.
NAME = re.compile(r"`([^`]+)`|(?<![\w/.])((?:[\w/]+\.(?:h|cu|cpp|c|py|md|json)(?!\w))|\w+(?:::\w+)*\(\)|\w+(?:::\w+)+|"
                  r"\w{2,}_\w{2,})|[<>&]")


def escape(text):
    return html.escape(text, quote=False)


# ---- What is in the book ---------------------------------------------------------------------------------------------


def sources(folder):
    found = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).iterdir()
                   if path.suffix in (".cu", ".cpp", ".h", ".c"))
    return sorted(found, key=lambda file: READING_ORDER.index(file) if file in READING_ORDER else len(READING_ORDER))


def parts():
    """{name of a part: its files}, in reading order."""
    readme = (ROOT / "README.md").read_text()
    chapters, linked = (list(dict.fromkeys(re.findall(r"\((\w+/\w+\.md)", text)))
                        for text in ("\n".join(re.findall(r"(?m)^\d+\. .*", readme)), readme))
    pages = dict.fromkeys([*linked, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
                           "weights_tools/README.md"])
    return {"The cover": ["README.md"], "The tutorial": chapters,
            "More": [page for page in pages if page not in chapters],
            "The source": sources(""), **{f"{folder}/": sources(folder) for folder in ("base", "fast", "commands")}}


PARTS = parts()
TEXT = {file: (ROOT / file).read_text() for files in PARTS.values() for file in files}
LINES = {file: text.split("\n")[:-1] for file, text in TEXT.items() if not file.endswith(".md")}


def address(file):
    """What a page is called in the book; pictures and the like, which have none, keep their names."""
    name = re.sub("^docs/", "", file)
    return ("index.html" if file == "README.md" else name if file not in TEXT else
            name.replace("/", "-").removesuffix(".md") + ".html")


def title(file):
    """HTML: a page's heading, or the name of a source file and how its first comment begins."""
    if file.endswith(".md"):
        return escape(re.search(r"(?m)^# (.*)", TEXT[file])[1].replace("`", ""))
    says = re.match(r"// (.{,50}?(?=[:;.]\s| \(|\n)|.+?(?=[:;.,]\s| \(|\n))", TEXT[file])
    return f"<code>{file}</code>" + (f" <small>{escape(says[1])}</small>" if says else "")


# ---- Names and where they are defined --------------------------------------------------------------------------------


def definitions():
    """{name: [(file, line, kind)]}, the kind one of "type", "function", "member"."""
    found = {}
    for file, lines in LINES.items():
        inside = False  # a struct
        for at, line in enumerate(lines, 1):
            if re.match(r"\w|\}", line):
                inside = line.startswith(("struct", "class", "typedef struct")) or inside and line.endswith(":")
            later = (re.sub(r"\s*//.*", "", each) for each in lines[at - 1:])
            ends = (each for each in later if each.endswith(("{", "}", ";")))
            if named := TYPE.match(line):
                found.setdefault(named[1] or named[2], []).append((file, at, "type"))
            elif (call := FUNCTION.match(line)) and bool(call[1]) <= inside and not next(ends, ";").endswith(";"):
                found.setdefault(call[2], []).append((file, at, "member" if call[1] else "function"))
    return {name: places for name, places in found.items() if name not in KEYWORDS["cpp"]}


DEFINED = definitions()
FIRST = {(file, name): line for name, places in DEFINED.items() for file, line, kind in reversed(places)
         if kind != "member"}  # the line where a page has the anchor #name


def link(name, shown, file, *kinds):
    """A link to the definition of `name` of the first of these kinds that there is, if it is clear which one is meant:
    the only member; a type or function of this file, or of the one file of the story, or of all files, that has it."""
    for kind in kinds:
        places = [place for place in DEFINED.get(name, []) if place[2] == kind]
        own = [place for place in places if place[0] == file]
        story = [place for place in places if "/" not in place[0]]
        for choice in [places] if kind == "member" else [own, story, places]:
            if len(set(choice) if kind == "member" else {place[0] for place in choice}) == 1:
                to, line, _ = choice[0]  # the first of overloads
                anchor = name if FIRST.get((to, name)) == line else f"L{line}"
                return f"<a href={address(to)}#{anchor}>{shown}</a>"
    return shown


def link_file(name, shown, file):
    """A link to the page of a file, which may be named without the folder that it shares with `file`."""
    for path in (name, os.path.join(os.path.dirname(file), name)):
        if path in TEXT:
            return f"<a href={address(path)}>{shown}</a>"
    return shown


def mono(name, file):
    """A word of prose that is a name of the source, in HTML."""
    shown = f"<code>{escape(name)}</code>"
    if called := re.fullmatch(r"(?:\w+::)*(\w+)\(\)", name):
        return link(called[1], shown, file, "function", "member")
    return link(name, shown, file, "type") if name.isidentifier() else link_file(name, shown, file)


# ---- Code ------------------------------------------------------------------------------------------------------------


def code(line, file, at=0, local=(), language="cpp"):
    def coloured(match):
        word, shown = match[0], escape(match[0])
        before, after = line[:match.start()], line[match.end():]
        if before == "#include ":
            shown = link_file(word.strip('"'), shown, file)
        elif (file, at) in [place[:2] for place in DEFINED.get(word, [])] and not re.search(rf"\b{word}\b", before):
            return f"<dfn id={word}>{shown}</dfn>" if FIRST.get((file, word)) == at else f"<dfn>{shown}</dfn>"
        tag = "b" if word in KEYWORDS[language] else next((TAGS[start] for start in TAGS if word.startswith(start)), "")
        if tag:
            return f"<{tag}>{shown}</{tag}>"
        kinds = ([] if word in local or before.endswith("std::") else
                 ["type"] if not re.match(r"(<[\w, ()]+>)?\(", after) else
                 ["type", "function", "member"] if not before.endswith((".", "->")) else
                 ["member"] if word not in STANDARD else [])
        return link(word, shown, "" if before.endswith(("best::", "plain::")) else file, *kinds)
    return TOKEN[language].sub(coloured, line)


def number(at):
    return f"<a id=L{at} href=#L{at} tabindex=-1>{at}</a>"


def left(lines, file):
    """A comment as paragraphs; the number of the first line is seen, the others can be linked to."""
    def word(match):
        return escape(match[0]) if match[0] in "<>&" else mono(match[1] or match[2] or match[0], file)
    out = ""
    for (_, before), (at, text) in zip([(0, ""), *lines], lines):
        out += f"<p>{number(at)}" if text and not before else f"<a id=L{at}></a>"
        out += NAME.sub(word, text) + "\n" if text else "</p>" if before else ""
    return out + "</p>" if lines and lines[-1][1] else out


def right(lines, file):
    text = "\n".join(line for _, line in lines)
    local = set(re.findall(r"(?:class|typename) (\w+)(?=[,>])", text) + re.findall(r"auto (\w+) = \[", TEXT[file]))
    last = max((at for at, line in lines if line), default=0)
    out = ""
    for at, line in lines:
        shown = code(line, file, at, local)
        style = ""
        if " <i>//" in shown:  # on a narrow screen the comment comes above its code
            style = f" style=--i:{len(line) - len(line.lstrip())}"
            shown = f"<span>{shown.replace('<i>//', '</span><i>//', 1)}"
        out += f"<span{style}>{number(at)}{shown}\n</span>" if at <= last else f"<a id=L{at}></a>"
    return f"<pre>{out}</pre>" if last else out


def row(comment, lines, file):
    """A comment and its code; a drawing is where code would be, next to what is said before it."""
    first = (comment + lines)[0][0]
    kind = " head" if first == 1 else "" if LINES[file][first - 2] else " new"
    out, text = "", []
    for drawn, part in itertools.groupby(comment, lambda line: line[1].startswith(" ")):
        part = list(part)
        if drawn:
            cut = min(len(line) - len(line.lstrip()) for _, line in part)
            spans = (f"<span>{number(at)}{escape(line[cut:])}\n</span>" for at, line in part)
            out += f"<div class='r{kind}'><div>{left(text, file)}</div><pre class=drawn>{''.join(spans)}</pre></div>\n"
            kind = kind.replace(" new", "")
        text = [] if drawn else part
    if text or lines:
        out += f"<div class='r{kind}'><div>{left(text, file)}</div>{right(lines, file)}</div>\n"
    return out


def source_page(file):
    """A row begins with a comment, and has all code up to the next one."""
    rows, headings = [([], [])], []
    for at, line in enumerate(LINES[file], 1):
        comment = COMMENT.match(line)
        if SECTION.match(line) or comment and rows[-1][1]:
            rows.append(([], []))
        rows[-1][not comment].append((at, re.sub(r"^\s*// ?", "", line) if comment else line))
    body = f"<h1>{title(file)}</h1>\n"
    for comment, lines in rows:
        if comment and (section := SECTION.match(LINES[file][comment[0][0] - 1])):
            body += f"<h2 id=L{comment[0][0]}>{escape(section[1])}</h2>\n"
            headings.append((comment[0][0], f"L{comment[0][0]}", escape(section[1])))
            comment = comment[1:]
        body += row(comment, lines, file) if comment or lines else ""
    names = [(line, name, f"<code>{name}</code>") for (where, name), line in FIRST.items() if where == file]
    return body, [item[1:] for item in sorted(headings + names)]


# ---- The tutorial ----------------------------------------------------------------------------------------------------


class Renderer(markdown_it.renderer.RendererHTML):
    """Markdown as HTML: links lead to pages of this book, names of the source are links, code has its colours."""
    def code_inline(self, tokens, at, options, env):
        in_link = sum(token.nesting for token in tokens[:at] if token.type.startswith("link_"))
        name = tokens[at].content
        return f"<code>{escape(name)}</code>" if in_link else mono(name, env["file"])

    def fence(self, tokens, at, options, env):
        language, file = (tokens[at].info.split() + ["", ""])[:2]
        lines = tokens[at].content.rstrip("\n").split("\n")
        caption = ""
        if file in LINES:
            places = [at for at, line in enumerate(LINES[file], 1) if line.strip() == lines[0].lstrip("+- ").strip()]
            caption = f"<figcaption><a href={address(file)}{f'#L{places[0]}' if places else ''}>{file}</a></figcaption>"
        if language in TOKEN:
            shown = [code(line, file, language=language) for line in lines]
        else:
            tags = {"console": {"$": "b"}, "diff": {"+": "ins", "-": "del"}}.get(language, {})
            marked = ((tags.get(line[:1]), escape(line)) for line in lines)
            shown = [f"<{tag}>{line}</{tag}>" if tag else line for tag, line in marked]
        return f"<figure>{caption}<pre>{chr(10).join(shown)}</pre></figure>\n"

    def table_open(self, *_):
        return "<div class=wide><table>"

    def table_close(self, *_):
        return "</table></div>\n"


def text_page(file, copies):
    """HTML and headings; the pictures that the page shows come to `copies`."""
    parser = markdown_it.MarkdownIt("commonmark", renderer_cls=Renderer).enable("table")
    tokens = parser.parse(TEXT[file], env := {"file": file})
    headings = []
    for token, inline in zip(tokens, tokens[1:]):
        if token.type == "heading_open":
            token.attrSet("id", re.sub(r"[^\w\- ]", "", inline.content.lower()).replace(" ", "-"))
            if token.tag == "h2":
                headings.append((token.attrs["id"], escape(inline.content.replace("`", ""))))
    for token in (child for token in tokens for child in token.children or []):
        for name in {"href", "src"} & set(token.attrs):
            to, hash_, anchor = token.attrs[name].partition("#")
            path = os.path.normpath(os.path.join(os.path.dirname(file), to)) if to else file
            if not re.match(r"\w+:", to):
                token.attrs[name] = address(path) + hash_ + anchor
                copies |= {path} - TEXT.keys()
    return parser.renderer.render(tokens, parser.options, env), headings


# ---- The book --------------------------------------------------------------------------------------------------------


def contents(file, headings):
    """The table of contents, with the headings of this page."""
    out = ""
    here = "".join(f"<li><a href=#{anchor}>{shown}</a></li>" for anchor, shown in headings)
    for part, files in PARTS.items():
        items = "".join(f"<li><a href={address(each)} aria-current=page>{title(each)}</a><ul>{here}</ul></li>\n"
                        if each == file else f"<li><a href={address(each)}>{title(each)}</a></li>\n" for each in files)
        is_open = "" if part.endswith("/") and file not in files else " open"
        out += f"<details{is_open}><summary>{part}</summary><ul>\n{items}</ul></details>\n"
    return out


def write(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    frame = string.Template((ROOT / "docs/read_frame.html").read_text())
    copies, files = {"docs/read.css"}, list(TEXT)
    for at, file in enumerate(files):
        body, headings = text_page(file, copies) if file.endswith(".md") else source_page(file)
        turn = "".join(f"<a rel={rel} href={address(files[to])}>{title(files[to])}</a>\n"
                       for rel, to in (("prev", at - 1), ("next", at + 1)) if 0 <= to < len(files))
        (folder / address(file)).write_text(frame.substitute(
            kind="text" if file.endswith(".md") else "source", name=title(file), plain=re.sub("<.*?>", "", title(file)),
            contents=contents(file, headings), turn=turn, body=body))
    for path in copies:
        (folder / address(path)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / address(path))


if __name__ == "__main__":
    write(ROOT / "build/book")
    print(f"build/book/index.html and {len(TEXT) - 1} more pages: open it in a browser")
