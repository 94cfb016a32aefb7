// Python's json writes NaN, Infinity and -Infinity, which JSON has not: what stands in their place for a reader that
// has JSON alone. For C, too, as tokenizer_json.c reads files that Python wrote.
#ifndef PYTHON_H
#define PYTHON_H

#include <stdbool.h>
#include <string.h>

// In as many bytes, so that an error names the place it has in the file: for Infinity a number that overflows, for NaN
// `nan`, of 3 bytes. `json`: (length), and a NUL behind it. Texts keep the words.
static inline void replace_python_numbers(char *json, size_t length, const char *nan) {
    bool inside = false;  // a text
    for (size_t i = 0; i < length; i++) {
        const bool begins = !inside && i > 0 && strchr(" \t\r\n:,[-", json[i - 1]);
        if (json[i] == '"') inside = !inside;
        if (begins && !strncmp(json + i, "Infinity", 8)) memcpy(json + i, "1e999   ", 8);
        if (begins && !strncmp(json + i, "NaN", 3)) memcpy(json + i, nan, 3), i += 2;
        if (json[i] == '\\') i++;
    }
}

#endif
