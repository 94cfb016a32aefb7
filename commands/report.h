// How a command reports what it found: numbers with units, text wrapped to the columns there are, and results that are
// described once, as text for a reader and as JSON for a program.
#pragma once

#include <sys/ioctl.h>

#include "../base/progress.h"

// ---- Numbers and words ---------------------------------------------------------------------------------------------

// A number in three digits, or in all of those before the point: 0.0123, 45.1, 1050.
inline std::string in_digits(double number) { return formatted(number < 999.5 ? "%.3g" : "%.0f", number); }

// Bytes in three digits and a unit: "1.25 GiB".
inline std::string in_units(double bytes) {
    const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    int unit = 0;
    for (; bytes >= 1023.5 && unit < 5; unit++) bytes /= 1024;
    return in_digits(bytes) + " " + units[unit];
}

inline std::string joined(const std::vector<std::string> &items, const char *between) {
    std::string all;
    for (size_t i = 0; i < items.size(); i++) all += (i ? between : "") + items[i];
    return all;
}

// Words in green ("32"), red ("31") or dim ("2") if the stream is a terminal and NO_COLOR (no-color.org) is not set,
// else unchanged.
inline std::string painted(const char *colour, const std::string &words, int stream = 1) {
    const char *none = getenv("NO_COLOR");
    const bool plain = !isatty(stream) || (none && *none) || words.empty();
    return plain ? words : formatted("\033[%sm", colour) + words + "\033[0m";
}

// ---- Text in as many columns as there are ---------------------------------------------------------------------------

// Columns of a stream's lines: COLUMNS, or the terminal's width. Lines of files and pipes have no limit: SIZE_MAX.
inline size_t columns_of(FILE *stream) {
    const char *given = getenv("COLUMNS");
    int columns = given ? atoi(given) : 0;
    winsize size = {};
    if (columns <= 0 && ioctl(fileno(stream), TIOCGWINSZ, &size) == 0) columns = size.ws_col;
    return columns > 0 ? (size_t)columns : SIZE_MAX;
}

// Breaks lines of more than `columns` bytes at their blanks. The rest begins on a new line after `indent` blanks.
inline std::string wrapped(const std::string &text, size_t columns, size_t indent = 0) {
    std::vector<std::string> lines;
    for (std::string line : split(text, '\n')) {
        while (line.size() > columns) {
            const size_t first = line.find_first_not_of(' ');
            size_t blank = line.rfind(' ', columns);
            if (blank == std::string::npos || blank < first) blank = line.find(' ', first);
            const size_t rest = line.find_first_not_of(' ', blank);
            if (rest == std::string::npos) {  // only blanks are left
                line.resize(std::min(blank, line.size()));
                break;
            }
            lines.push_back(line.substr(0, blank));
            line = std::string(indent, ' ') + line.substr(rest);
        }
        lines.push_back(line);
    }
    return joined(lines, "\n");
}

// ---- Results, described once: as text for a reader, as JSON for a program ------------------------------------------

// What a command found, or a row or part of it, in the order of the calls. A value with a key goes to the JSON. A value
// with a text goes to the text, as it is given, so several may share a line. For example
//   Report report;
//   report.add("tokens", 12, formatted("prefill  %6d tokens", 12)).add("seconds", 0.5, "  24.0 tokens/s\n");
// says "prefill      12 tokens  24.0 tokens/s" or {"tokens": 12, "seconds": 0.5}.
class Report {
public:
    std::string text;
    std::string heads;  // column heads of such rows: right-aligned above numbers, else left-aligned with the text
    std::string above;  // lines of their own above such a row

    template <class Value>
    Report &add(const char *key, const Value &value, const std::string &shown = "", const std::string &head = "") {
        put(key, json_of(value), json_of(value));
        return say(shown, head, std::is_arithmetic_v<Value>);
    }
    // The same as add(), with printf's format for this one value.
    template <class Value>
    Report &show(const char *key, const Value &value, const char *format, const std::string &head = "") {
        if constexpr (std::is_same_v<Value, std::string>)
            return add(key, value, formatted(format, value.c_str()), head);
        else
            return add(key, value, formatted(format, value), head);
    }
    Report &add(const char *key, const Report &object) {
        put(key, object.json(), object.json());
        return say(object.text);
    }
    Report &say(const std::string &shown, const std::string &head = "", bool number = true) {
        if (!shown.empty() && (!head.empty() || columns.empty())) {
            columns.push_back({text.size(), heads.size()});
            names += !number && names + 1 == columns.size();
        }
        size_t missing = shown.size() - std::min(shown.size(), head.size());
        size_t before = number ? missing : std::min(missing, shown.find_first_not_of(' '));
        heads += std::string(before, ' ') + head + std::string(missing - before, ' ');
        text += shown;
        return *this;
    }
    // Adds rows to the JSON alone. table() adds them to the text, too: the heads, then a line a row.
    Report &list(const char *key, const std::vector<Report> &rows) {
        std::vector<std::string> items;
        for (const Report &row : rows) items.push_back(row.json());
        put(key, "[" + joined(items, ", ") + "]", rows.empty() ? "[]" : "[\n    " + joined(items, ",\n    ") + "\n  ]");
        return *this;
    }
    Report &table(const char *key, const std::vector<Report> &rows, size_t width = columns_of(stdout)) {
        if (!rows.empty()) say(lines_of(rows, width));
        return list(key, rows);
    }
    // This row, or its heads, in lines of at most `width` columns: what does not fit goes on below.
    std::string folded(bool head, size_t width = columns_of(stdout)) const {
        std::string lines, last;
        for (size_t i = 0; i < columns.size(); i++) {
            const std::string cell = part(head, i, i + 1);
            if (!last.empty() && trimmed(last + cell).size() > width)
                lines += trimmed(last) + "\n", last = std::string(part(head, 0, 1).size(), ' ');
            last += cell;
        }
        return lines + trimmed(last) + "\n";
    }
    std::string json() const { return "{" + joined(short_items, ", ") + "}"; }
    // Prints the JSON to standard output, a key a line, or else the text to `readers`. Returns `status`, the program's,
    // or 130 after Ctrl-C.
    int print(bool as_json, FILE *readers = stdout, int status = 0) const {
        begin_work();
        std::string all = "{\n  " + joined(long_items, ",\n  ") + "\n}\n";
        if (!as_json) all = wrapped(text, columns_of(readers));
        fwrite(all.data(), 1, all.size(), as_json ? stdout : readers);
        return interrupted() ? 130 : status;
    }

private:
    struct Column {
        size_t text, head;  // where it begins in each
    };
    std::vector<Column> columns;
    size_t names = 0;                                  // how many of the first columns are no numbers
    std::vector<std::string> short_items, long_items;  // "key": value; the long ones have a line for each row of a list

    static std::string trimmed(const std::string &line) { return line.substr(0, line.find_last_not_of(' ') + 1); }

    // The columns [from, to) of this row, or of its heads.
    std::string part(bool head, size_t from, size_t to) const {
        const std::string &line = head ? heads : text;
        auto place = [&](size_t i) {
            return i >= columns.size() ? line.size() : head ? columns[i].head : columns[i].text;
        };
        return line.substr(place(from), place(to) - place(from));
    }
    // A table's lines. Columns that do not fit go below in further blocks, each with the names at its left.
    static std::string lines_of(const std::vector<Report> &rows, size_t width) {
        const size_t count = rows[0].columns.size(), names = std::min(std::max<size_t>(1, rows[0].names), count);
        std::string result;
        for (size_t from = names, to; from < count || result.empty(); from = to) {
            auto line = [&](const Report &row, bool head) {
                const std::string text = row.part(head, 0, names) + row.part(head, from, to);
                return head ? trimmed(text) : text;
            };
            auto fits = [&](const Report &row) {
                return std::max(line(row, true).size(), line(row, false).size()) <= width;
            };
            for (to = count; to > from + 1 && !std::all_of(rows.begin(), rows.end(), fits);) to--;
            result += line(rows[0], true) + "\n";
            for (const Report &row : rows) result += row.above + line(row, false) + "\n";
        }
        return result;
    }
    void put(const std::string &key, const std::string &brief, const std::string &broken) {
        short_items.push_back(json_of(key) + ": " + brief);
        long_items.push_back(json_of(key) + ": " + broken);
    }
};

[[noreturn]] inline void refuse(const std::string &flag, const std::string &value, const std::string &why) {
    size_t size = std::min<size_t>(80, value.size());
    while (size < value.size() && (value[size] & 0xc0) == 0x80) size--;  // keeps characters whole
    fail("%s%s%s: %s", flag.c_str(), value.empty() ? "" : " ", value.substr(0, size).c_str(), why.c_str());
}

// Flushes standard output; fails if it cannot, as on a full disk. (Without a reader of its pipe, SIGPIPE ends llm.)
inline void flush_output() {
    begin_work();
    if (fflush(stdout) != 0 || ferror(stdout))
        throw Error("standard output: not all could be written: is the disk full?", 1);
}

// A token's text on one line: characters that would break the line or the column are shown as escapes.
inline std::string on_one_line(const std::string &text) {
    std::string result;
    for (char c : text) {
        bool shown = (unsigned char)c >= ' ' && c != 127;
        result += shown ? std::string(1, c) : c == '\n' ? "\\n" : formatted("\\x%02x", (unsigned char)c);
    }
    return result;
}
