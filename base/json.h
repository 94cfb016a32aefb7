// The base of all reading and writing: errors of one line, files, and JSON.
#pragma once

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


// ---- What went wrong, in one line ----------------------------------------------------------------------------------

struct Error : std::runtime_error {
    int status;  // the program's exit status: 2, the input is wrong; 1, it could not finish
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

// A list of words is one text, with a blank, comma or bar between the words.
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
// Device and inode of each file that was read: no output may replace one of them.
inline std::set<std::pair<dev_t, ino_t>> files_read;
inline void remember_read(const std::string &path) {
    struct stat status;
    if (stat(path.c_str(), &status) == 0) files_read.insert({status.st_dev, status.st_ino});
}

// Returns how an error line ends if the file is a Git LFS pointer or a web page; nullptr if it is neither.
inline const char *instead_of_file(const char *text, size_t length) {
    if (length >= 23 && !memcmp(text, "version https://git-lfs", 23))
        return "is a Git LFS pointer, not the file itself: run `git lfs pull` where it came from";
    if (length >= 14 && (!strncasecmp(text, "<!doctype html", 14) || !strncasecmp(text, "<html", 5)))
        return "is a web page, not the file itself: fetch it again (on huggingface.co: /resolve/, not /blob/)";
    return nullptr;
}

using Mapping = std::unique_ptr<const char, Unmap>;  // a whole file, read-only; its size is get_deleter().size

inline std::string join_path(const std::string &directory, const std::string &name) {
    return !directory.empty() && directory.back() == '/' ? directory + name : directory + "/" + name;
}

// True also for a broken link: opening it then reports an error, where a missing file would be accepted.
inline bool file_exists(const std::string &path) {
    struct stat status;
    return lstat(path.c_str(), &status) == 0;
}

// Maps a regular file that is not empty. O_NONBLOCK: opening a FIFO must not wait for a writer.
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

// Gives back the memory that the file's pages take here. A later read gets them from the kernel's cache or the disk.
inline void forget_pages(const Mapping &file) {
    madvise(const_cast<char *>(file.get()), file.get_deleter().size, MADV_DONTNEED);
}

// Returns the whole file as text. `limit`, in bytes, bounds what a wrong file can make us allocate.
inline std::string read_file(const std::string &path, size_t limit) {
    Mapping file = map_file(path);
    size_t size = file.get_deleter().size;
    if (const char *instead = instead_of_file(file.get(), size)) fail("%s: %s", path.c_str(), instead);
    if (size > limit) fail("%s: is %zu bytes long, expected at most %zu", path.c_str(), size, limit);
    return std::string(file.get(), size);
}

// ---- JSON, read -----------------------------------------------------------------------------------------------------

// Bounds memory, too: a value takes 104 bytes, in the text perhaps 2. A header of 10,000 tensors has 1 MiB.
constexpr size_t max_json_bytes = 16 << 20;

// A value of a JSON text. Members and entries have the order of the text.
struct Json {
    enum class Type { null, boolean, number, text, list, object } type = Type::null;
    std::string key;          // of a member of an object
    std::string text;         // UTF-8, without NUL
    double number = 0;        // true is 1; NaN or infinite where Python writes that
    std::vector<Json> items;  // of a list or an object
};

// Returns the JSON object that a text is, or throws. `as_python` also allows what Python's json allows. `name` is what
// messages call the text. Refused are two equal keys in an object (readers disagree about them), nesting deeper than
// 1,000 (so that recursion over the result is bounded), \u0000 (it ends a text in C), and more than `limit` bytes.
Json parse_json(const std::string &name, std::string text, bool as_python = false, size_t limit = max_json_bytes);

std::string json_text(const Json &item);  // without white space; NaN and Infinity as Python writes them

inline bool is_null(const Json *item) { return item && item->type == Json::Type::null; }
inline bool is_bool(const Json *item) { return item && item->type == Json::Type::boolean; }
inline bool is_number(const Json *item) { return item && item->type == Json::Type::number; }
inline bool is_text(const Json *item) { return item && item->type == Json::Type::text; }
inline bool is_list(const Json *item) { return item && item->type == Json::Type::list; }
inline bool is_object(const Json *item) { return item && item->type == Json::Type::object; }

// Makes a file's text safe for a message: only ASCII, and at most 80 characters.
inline std::string printable(std::string text) {
    if (text.size() > 80) text = text.substr(0, 77) + "...";
    for (char &c : text) c = c < ' ' || c > '~' ? '?' : c;
    return text;
}
inline std::string printable(const Json *item) { return printable(json_text(*item)); }

// Returns the members of an object or the entries of a list; none for anything else or nullptr.
inline std::vector<const Json *> items_of(const Json *whole) {
    std::vector<const Json *> items;
    if (whole)
        for (const Json &item : whole->items) items.push_back(&item);
    return items;
}
// Returns the entries of a list, or the one value that is given in place of a list.
inline std::vector<const Json *> entries_of(const Json *item) {
    return !item || is_list(item) ? items_of(item) : std::vector<const Json *>{item};
}
inline int count_of(const Json *whole) { return whole ? (int)whole->items.size() : 0; }

// Returns the member with this key, which may be null, or nullptr if there is none.
inline const Json *member(const Json *object, const std::string &key) {
    if (is_object(object))
        for (const Json &item : object->items)
            if (item.key == key) return &item;
    return nullptr;
}

inline bool is_whole(const Json *item, double low, double high) {
    const double number = is_number(item) ? item->number : NAN;
    return number >= low && number <= high && number == std::floor(number);
}

// Whether a value changes nothing: `neutral` (false is 0, true is 1), a list of only `neutral`, or something empty.
inline bool is_neutral(const Json *item, double neutral) {
    if (is_number(item)) return std::fabs(item->number - neutral) <= 1e-5 * std::fabs(neutral);
    if (is_bool(item)) return item->number == (neutral != 0);
    if (is_text(item)) return item->text.empty();
    for (const Json *each : items_of(item))
        if (!is_list(item) || !is_neutral(each, neutral)) return false;
    return true;
}

// A JSON object whose keys are read by type and checked. A key whose value is null counts as missing.
struct Section {
    std::string name;     // as messages call it: "DIR/config.json"
    const Json *object;  // nullptr: every key is missing

    const Json *find(const char *key) const {
        const Json *item = member(object, key);
        return is_null(item) ? nullptr : item;
    }
    bool has_null(const char *key) const { return is_null(member(object, key)); }
    [[noreturn]] void refuse(const char *key, const Json *item, const std::string &expected) const {
        fail("%s: %s is %s, expected %s", name.c_str(), key, printable(item).c_str(), expected.c_str());
    }
    const Json *need(const char *key) const {
        const Json *item = find(key);
        if (!item) fail("%s: %s is missing", name.c_str(), key);
        return item;
    }
    // Returns the value of a key. A missing key gives `otherwise`, or is refused without one.
    int integer(const char *key, int low, int high, std::optional<int> otherwise = {}) const {
        if (otherwise && !find(key)) return *otherwise;
        const Json *item = need(key);
        if (!is_whole(item, low, high)) refuse(key, item, formatted("a whole number from %d to %d", low, high));
        return (int)item->number;
    }
    double number(const char *key, double low, double high, std::optional<double> otherwise = {}) const {
        if (otherwise && !find(key)) return *otherwise;
        const Json *item = need(key);
        double value = is_number(item) ? item->number : NAN;
        if (!(value >= low && value <= high)) refuse(key, item, formatted("a number from %g to %g", low, high));
        return value;
    }
    std::vector<double> numbers(const char *key, int count, double low, double high) const {
        const Json *list = need(key);
        std::vector<double> found;
        for (const Json *item : items_of(list))
            if (is_number(item) && item->number >= low && item->number <= high)
                found.push_back(item->number);
        if (!is_list(list) || (int)found.size() != count || count_of(list) != count)
            refuse(key, list, "a list of " + counted(count, "number") + formatted(" from %g to %g", low, high));
        return found;
    }
    bool flag(const char *key, bool otherwise) const {
        const Json *item = find(key);
        if (item && !is_bool(item)) refuse(key, item, "true or false");
        return item ? item->number != 0 : otherwise;
    }
    std::string text(const char *key, const std::string &otherwise) const {
        const Json *item = find(key);
        if (item && !is_text(item)) refuse(key, item, "a text");
        return item ? item->text : otherwise;
    }
    Section section(const char *key) const {
        const Json *item = find(key);
        if (item && !is_object(item)) refuse(key, item, "an object");
        return {name + ": " + key, item};
    }
    // Returns a list's entries, one per layer; none if the key is missing. `what`, for the message: " names".
    std::vector<const Json *> by_layer(const char *key, int layers, const char *what = "") const {
        const Json *item = find(key);
        if (item && (!is_list(item) || count_of(item) != layers))
            refuse(key, item, formatted("a list of %d (num_hidden_layers)%s", layers, what));
        return items_of(item);
    }
    // Throws unless `word` is one of `known`: words with a blank between.
    void require_known(const char *what, const std::string &word, const std::string &known) const {
        if (has(known, word)) return;
        fail("%s: %s %s is not supported; supported %s %s", name.c_str(), what, printable(word).c_str(),
             known.find(' ') == std::string::npos ? "is" : "are", known.c_str());
    }
    // Throws if the object has a key that is not one of `known`: words with a blank between.
    void refuse_others(const std::string &known, const std::string &expected) const {
        for (const Json *item : items_of(object))
            if (!has(known, item->key)) refuse(printable(item->key).c_str(), item, expected);
    }
};

// ---- JSON, written -------------------------------------------------------------------------------------------------

// A number with enough digits to read it back exactly; null if it is infinite or NaN.
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
