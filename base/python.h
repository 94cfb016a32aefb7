// What readers of a checkpoint's files, in C and C++, have in common: files that are something else, and numbers of
// Python's. Its json writes NaN, Infinity and -Infinity, which JSON has not.
#ifndef PYTHON_H
#define PYTHON_H

#include <stdbool.h>
#include <string.h>
#include <strings.h>

// The end of a line about a file that is something else, whatever it should be; NULL: it is none of these.
static inline const char *instead_of_file(const char *text, size_t length) {
    if (length >= 23 && !memcmp(text, "version https://git-lfs", 23))
        return "is a Git LFS pointer, not the file itself: run `git lfs pull` where it came from";
    if (length >= 14 && (!strncasecmp(text, "<!doctype html", 14) || !strncasecmp(text, "<html", 5)))
        return "is a web page, not the file itself: fetch it again (on huggingface.co: /resolve/, not /blob/)";
    return NULL;
}

// Replaced in as many bytes, so that an error names the place it has in the file: for Infinity a number that overflows,
// for NaN `nan`, of 3 bytes. `json`: (length), and then a NUL. Texts keep the words.
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
