#!/usr/bin/env python3
"""Page tables while each pass computes, or the passes that are named, from the events of one kind of layers:

    ./llm batch -f docs/two.jsonl --page 4 --events events; python3 docs/tables.py events [PASS ...]
"""
import json
import sys


def passes(path):
    """For each pass its event, the page table of each request that holds pages, and the pages known to hold something
    although nobody holds them."""
    tables, known, shown = {}, set(), None
    for event in map(json.loads, open(path)):
        what, page = event["event"], event.get("page")
        if what in ("publish", "end", "pass") and shown is None:  # the pass has been computed
            shown = {name: list(table) for name, table in tables.items() if table}
            held = {page for table in shown.values() for page in table}
            unheld = known - held
        table = tables.setdefault(event["id"], []) if "id" in event else None
        if what in ("take", "share"):
            if None in table:  # in place of one that was given back
                table[table.index(None)] = page
            else:
                table.append(page)
        elif what == "copy":
            table.pop()
            table[table.index(event["from"])] = page
        elif what == "release" and page in table:
            table[table.index(page)] = None
            if not any(number is not None for number in table):
                table.clear()
        elif what == "pass":
            yield event, shown, unheld
            shown = None
        if what == "publish":
            known.add(page)
        if what in ("take", "evict"):
            known.discard(page)


def main():
    rows = list(passes(sys.argv[1]))
    names = list(dict.fromkeys(name for _, tables, _ in rows for name in tables))
    texts = [[" ".join(map(str, tables.get(name, ""))) for name in names] + [" ".join(map(str, sorted(unheld)))]
             for _, tables, unheld in rows]
    names.append("held by nobody")
    widths = [max(map(len, column)) for column in zip(names, *texts)]
    print("pass tokens pages  " + "   ".join(map(str.ljust, names, widths)).rstrip())
    for number, ((event, tables, _), line) in enumerate(zip(rows, texts), 1):
        if sys.argv[2:] and str(number) not in sys.argv[2:]:
            continue
        held = len({page for table in tables.values() for page in table})
        print(f"{number:4} {event['count']:6} {held:5}  " + "   ".join(map(str.ljust, line, widths)).rstrip())


if __name__ == "__main__":
    main()
