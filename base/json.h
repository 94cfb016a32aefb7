// What everything stands on that reads or writes: errors of one line, files, and JSON, read and written.
#pragma once

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "python.h"

// ---- What went wrong, in one line ----------------------------------------------------------------------------------

struct Error : std::runtime_error {
    int status;  // that the program ends with: 2, the input is wrong; 1, it could not finish
    explicit Error(const std::string &line, int status = 2) : std::runtime_error(line), status(status) {}
};

// printf into a string.
__attribute__((format(printf, 1, 0))) inline std::string vformatted(const char *format, va_list arguments) {
    va_list again;
    va_copy(again, arguments);
    std::string text((size_t)std::max(0, vsnprintf(nullptr, 0, format, again)), '\0');
    va_end(again);
    vsnprintf(text.data(), text.size() + 1, format, arguments);
    return text;
}

__attribute__((format(printf, 1, 2))) inline std::string formatted(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string text = vformatted(format, arguments);
    va_end(arguments);
    return text;
}

// Throws Error with the formatted line, cut at 5,000 bytes (a path may have 4,096). Control characters become '?'.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string line = vformatted(format, arguments).substr(0, 5000);
    va_end(arguments);
    for (char &c : line) c = (unsigned char)c < ' ' || c == 127 ? '?' : c;
    throw Error(line);
}

// ---- Words ---------------------------------------------------------------------------------------------------------

// Lists of words stand in texts, with a blank, comma or bar between.
inline std::vector<std::string> split(const std::string &list, char between = ' ') {
    std::vector<std::string> words(1);
    for (char c : list) c == between ? words.push_back("") : words.back().push_back(c);
    return words;
}
inline bool has(const std::string &list, const std::string &word, char between = ' ') {
    std::vector<std::string> words = split(list, between);
    return std::count(words.begin(), words.end(), word) > 0;
}

// "1 token", "    12 tokens"; "1 pass", "2 passes".
inline std::string counted(int64_t count, const std::string &what, int width = 0) {
    return formatted("%*lld %s%s", width, (long long)count, what.c_str(), count == 1 ? "" : "s");
}
inline std::string counted(int64_t count, const std::string &one, const std::string &many) {
    return formatted("%lld %s", (long long)count, (count == 1 ? one : many).c_str());
}

// ---- Files ---------------------------------------------------------------------------------------------------------

struct Unmap {
    size_t size = 0;
    void operator()(const char *data) const { munmap(const_cast<char *>(data), size); }
};
// Device and number of each file that was read: what is written replaces none of them.
inline std::set<std::pair<dev_t, ino_t>> files_read;
inline void remember_read(const std::string &path) {
    struct stat status;
    if (stat(path.c_str(), &status) == 0) files_read.insert({status.st_dev, status.st_ino});
}

using Mapping = std::unique_ptr<const char, Unmap>;  // a whole file, read-only; its size is get_deleter().size

inline std::string join_path(const std::string &directory, const std::string &name) {
    return !directory.empty() && directory.back() == '/' ? directory + name : directory + "/" + name;
}

// Also a link that leads nowhere: whoever opens it then hears so, where a missing file would be nothing.
inline bool file_exists(const std::string &path) {
    struct stat status;
    return lstat(path.c_str(), &status) == 0;
}

// Maps a regular file that is not empty. O_NONBLOCK: opening a FIFO must not wait for somebody to write to it.
inline Mapping map_file(const std::string &path) {
    int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) fail("%s: cannot open it: %s", path.c_str(), strerror(errno));
    struct stat status;
    const char *problem = nullptr;
    void *data = nullptr;
    if (fstat(descriptor, &status) != 0)
        problem = strerror(errno);
    else if (!S_ISREG(status.st_mode))
        problem = S_ISDIR(status.st_mode) ? "is a directory, expected a file" : "is not a regular file";
    else if (status.st_size == 0)
        problem = "is empty";
    else if ((data = mmap(nullptr, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0)) == MAP_FAILED)
        problem = strerror(errno);
    close(descriptor);
    if (problem) fail("%s: %s", path.c_str(), problem);
    files_read.insert({status.st_dev, status.st_ino});
    return Mapping((const char *)data, Unmap{(size_t)status.st_size});
}

// Gives the memory back that its pages take here. Who reads them again gets them from the kernel's cache, or the disk.
inline void forget_pages(const Mapping &file) {
    madvise(const_cast<char *>(file.get()), file.get_deleter().size, MADV_DONTNEED);
}

// The whole file as text. `limit` bounds what a wrong file can make us allocate.
inline std::string read_file(const std::string &path, size_t limit) {
    Mapping file = map_file(path);
    size_t size = file.get_deleter().size;
    if (const char *instead = instead_of_file(file.get(), size)) fail("%s: %s", path.c_str(), instead);
    if (size > limit) fail("%s: is %zu bytes long, expected at most %zu", path.c_str(), size, limit);
    return std::string(file.get(), size);
}

// ---- JSON, read -----------------------------------------------------------------------------------------------------

// A node takes 64 bytes where the text may take 2: this bounds the memory, too. A header of 10,000 tensors takes 1 MiB.
constexpr size_t max_json_bytes = 16 << 20;

struct DeleteJson {
    void operator()(cJSON *item) const { cJSON_Delete(item); }
};
using Json = std::unique_ptr<cJSON, DeleteJson>;

// What a file says, fit for a message, whatever it is: ASCII, and at most 80 characters of it.
inline std::string printable(std::string text) {
    if (text.size() > 80) text = text.substr(0, 77) + "...";
    for (char &c : text) c = c < ' ' || c > '~' ? '?' : c;
    return text;
}

const char nan_mark[] = "\x7f";  // a text that Python's NaN becomes, so that whoever needs a number finds none

inline bool is_nan(const cJSON *item) { return cJSON_IsString(item) && item->valuestring == std::string(nan_mark); }

inline std::string printable(const cJSON *item) {
    if (is_nan(item)) return "NaN";
    if (cJSON_IsNumber(item) && std::isinf(item->valuedouble)) return item->valuedouble < 0 ? "-Infinity" : "Infinity";
    char *text = cJSON_PrintUnformatted(item);
    std::string result = printable(std::string(text ? text : "?"));
    cJSON_free(text);
    return result;
}

// The members of an object or the entries of a list; of anything else, and of nullptr, none.
inline std::vector<const cJSON *> items_of(const cJSON *whole) {
    std::vector<const cJSON *> items;
    for (const cJSON *item = whole ? whole->child : nullptr; item; item = item->next) items.push_back(item);
    return items;
}

inline bool is_whole(const cJSON *item, double low, double high) {
    const double number = cJSON_IsNumber(item) ? item->valuedouble : NAN;
    return number >= low && number <= high && number == std::floor(number);
}

// Whether a key asks for nothing: `neutral` or a list of nothing else, false being 0 and true 1; or nothing at all.
inline bool is_neutral(const cJSON *item, double neutral) {
    if (cJSON_IsNumber(item)) return std::fabs(item->valuedouble - neutral) <= 1e-5 * std::fabs(neutral);
    if (cJSON_IsBool(item)) return cJSON_IsTrue(item) == (neutral != 0);
    if (cJSON_IsString(item)) return !*item->valuestring;
    for (const cJSON *each : items_of(item))
        if (!cJSON_IsArray(item) || !is_neutral(each, neutral)) return false;
    return true;
}

// JSON leaves open which of two equal keys counts, so readers differ; a file that has any is refused.
inline void refuse_duplicate_keys(const std::string &name, const cJSON *item) {
    std::set<std::string> keys;
    for (const cJSON *child : items_of(item)) {
        if (child->string && !keys.insert(child->string).second)
            fail("%s: key \"%s\" stands twice in one object", name.c_str(), printable(child->string).c_str());
        if (child->child) refuse_duplicate_keys(name, child);
    }
}

// `name` is what messages call the text. Throws unless it is one JSON object, and white space; `as_python`: or what
// Python's json takes for one. cJSON refuses nesting deeper than 1,000, so recursion over the result is bounded.
inline Json parse_json(const std::string &name, std::string text, bool as_python = false) {
    if (as_python) replace_python_numbers(text.data(), text.size(), formatted("\"%s\"", nan_mark).c_str());
    if (text.size() > max_json_bytes) fail("%s: JSON of %zu bytes is too long", name.c_str(), text.size());
    const char *end = text.c_str();
    Json root(cJSON_ParseWithLengthOpts(text.c_str(), text.size() + 1, &end, /*require_null_terminated=*/true));
    size_t position = std::min((size_t)(end - text.c_str()), text.size());
    if (!root || text.find('\0') != std::string::npos) {
        int line = 1 + (int)std::count(text.begin(), text.begin() + (std::ptrdiff_t)position, '\n');
        fail("%s: not valid JSON near line %d, byte %zu", name.c_str(), line, position);
    }
    if (!cJSON_IsObject(root.get())) fail("%s: expected a JSON object", name.c_str());
    refuse_duplicate_keys(name, root.get());
    return root;
}

// A JSON object and the questions a loader asks of it. A key whose value is null counts as missing.
struct Section {
    std::string name;     // as messages call it: "DIR/config.json"
    const cJSON *object;  // nullptr: every key is missing

    const cJSON *find(const char *key) const {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
        return item && !cJSON_IsNull(item) ? item : nullptr;
    }
    bool has_null(const char *key) const { return cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(object, key)); }
    [[noreturn]] void refuse(const char *key, const cJSON *item, const std::string &expected) const {
        fail("%s: %s is %s, expected %s", name.c_str(), key, printable(item).c_str(), expected.c_str());
    }
    const cJSON *need(const char *key) const {
        const cJSON *item = find(key);
        if (!item) fail("%s: %s is missing", name.c_str(), key);
        return item;
    }
    // The value of a key that must be there, unless there is an `otherwise`.
    int integer(const char *key, int low, int high, std::optional<int> otherwise = {}) const {
        if (otherwise && !find(key)) return *otherwise;
        const cJSON *item = need(key);
        if (!is_whole(item, low, high)) refuse(key, item, formatted("a whole number from %d to %d", low, high));
        return (int)item->valuedouble;
    }
    double number(const char *key, double low, double high, std::optional<double> otherwise = {}) const {
        if (otherwise && !find(key)) return *otherwise;
        const cJSON *item = need(key);
        double value = cJSON_IsNumber(item) ? item->valuedouble : NAN;
        if (!(value >= low && value <= high)) refuse(key, item, formatted("a number from %g to %g", low, high));
        return value;
    }
    std::vector<double> numbers(const char *key, int count, double low, double high) const {
        const cJSON *list = need(key);
        std::vector<double> found;
        for (const cJSON *item : items_of(list))
            if (cJSON_IsNumber(item) && item->valuedouble >= low && item->valuedouble <= high)
                found.push_back(item->valuedouble);
        if (!cJSON_IsArray(list) || (int)found.size() != count || cJSON_GetArraySize(list) != count)
            refuse(key, list, "a list of " + counted(count, "number") + formatted(" from %g to %g", low, high));
        return found;
    }
    bool flag(const char *key, bool otherwise) const {
        const cJSON *item = find(key);
        if (item && !cJSON_IsBool(item)) refuse(key, item, "true or false");
        return item ? cJSON_IsTrue(item) : otherwise;
    }
    std::string text(const char *key, const std::string &otherwise) const {
        const cJSON *item = find(key);
        if (item && (!cJSON_IsString(item) || is_nan(item))) refuse(key, item, "a text");
        return item ? item->valuestring : otherwise;
    }
    Section section(const char *key) const {
        const cJSON *item = find(key);
        if (item && !cJSON_IsObject(item)) refuse(key, item, "an object");
        return {name + ": " + key, item};
    }
    // A list with an entry for each layer; nothing where the key is missing. `what`: " names".
    std::vector<const cJSON *> by_layer(const char *key, int layers, const char *what = "") const {
        const cJSON *item = find(key);
        if (item && (!cJSON_IsArray(item) || cJSON_GetArraySize(item) != layers))
            refuse(key, item, formatted("a list of %d (num_hidden_layers)%s", layers, what));
        return items_of(item);
    }
    // `known`: words with a blank between.
    void require_known(const char *what, const std::string &word, const std::string &known) const {
        if (has(known, word)) return;
        fail("%s: %s %s is not supported; supported %s %s", name.c_str(), what, printable(word).c_str(),
             known.find(' ') == std::string::npos ? "is" : "are", known.c_str());
    }
    // For an object that may have no other keys than the `known` ones, words with a blank between.
    void refuse_others(const std::string &known, const std::string &expected) const {
        for (const cJSON *item : items_of(object))
            if (!has(known, item->string)) refuse(printable(item->string).c_str(), item, expected);
    }
};

// ---- JSON, written -------------------------------------------------------------------------------------------------

// A number with all its digits, as few as give it back; null if it is infinite or none.
template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
std::string json_of(Number number) {
    if constexpr (std::is_same_v<Number, bool>) return number ? "true" : "false";
    if constexpr (std::is_integral_v<Number>) return std::to_string(number);
    const double value = (double)number;
    if (!std::isfinite(value)) return "null";
    if (value == std::floor(value) && std::fabs(value) < 1e18) return formatted("%.0f", value);
    int digits = 15;
    while (digits < 17 && strtod(formatted("%.*g", digits, value).c_str(), nullptr) != value) digits++;
    return formatted("%.*g", digits, value);
}

inline std::string json_of(const std::string &text) {  // which may hold NUL
    std::string json = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') json += '\\';
        json += c == '\n' ? "\\n" : (unsigned char)c < ' ' ? formatted("\\u%04x", c) : std::string(1, c);
    }
    return json + '"';
}

template <class Number>
std::string json_of(const std::vector<Number> &list) {
    std::string items;
    for (Number number : list) items += (items.empty() ? "" : ", ") + json_of(number);
    return "[" + items + "]";
}
