// Reads JSON with the parser of nlohmann-json. It is compiled here alone, as its header takes seconds; and it fills a
// tree of our own, as the library's objects sort their keys, or compare each new key with all before.
#include "json.h"

#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_set>

#include "tokenizer.h"

namespace {

// What Python writes and JSON has not becomes a number that nobody writes, in as many bytes, so that errors name the
// place in the file.
const std::string nan_mark = "0E0", infinity_mark = "0E1", minus_infinity_mark = "-0E1";

void mark_python_numbers(std::string &json) {
    auto at = [&](size_t i, const char *set) { return i < json.size() && strchr(set, json[i]); };
    bool inside = false;  // a text
    for (size_t i = 0; i < json.size(); i++) {
        if (json[i] == '"') inside = !inside;
        if (json[i] == '\\') i++;
        const size_t length = inside ? 0 : !json.compare(i, 3, "NaN") ? 3 : !json.compare(i, 8, "Infinity") ? 8 : 0;
        const char *before = length == 3 ? " \t\r\n:,[" : " \t\r\n:,[-";
        if (length && at(i - 1, before) && at(i + length, " \t\r\n,]}"))
            json.replace(i, length, length == 3 ? nan_mark : infinity_mark + "     ");
    }
}

// As long double the library also takes 1e999, which is infinite as a double.
using Library = nlohmann::basic_json<std::map, std::vector, std::string, bool, int64_t, uint64_t, long double>;

// The library calls these functions in the order of the text. They return true: go on.
struct Builder : nlohmann::json_sax<Library> {
    const std::string &name, &json;
    const bool as_python;
    Json root;
    std::string next_key;
    std::vector<Json *> open;  // the objects and lists around this place

    Builder(const std::string &name, const std::string &json, bool as_python)
        : name(name), json(json), as_python(as_python) {}

    Json &add(Json::Type type, double number = 0) {
        Json &item = open.empty() ? root : open.back()->items.emplace_back();
        item.type = type, item.number = number;
        item.key.swap(next_key);
        return item;
    }
    bool begin(Json::Type type) {
        open.push_back(&add(type));
        if (open.size() > 1000) fail("%s: not valid JSON here: nested deeper than 1,000", name.c_str());
        return true;
    }
    [[noreturn]] void refuse(size_t position) const {
        if (const size_t valid = utf8_valid(json.data(), json.size()); valid < json.size())
            fail(("%s: " NOT_UTF8), name.c_str(), valid, (unsigned)(uint8_t)json[valid]);
        const auto line = 1 + std::count(json.begin(), json.begin() + (std::ptrdiff_t)position, '\n');
        fail("%s: not valid JSON near line %td, byte %zu", name.c_str(), line, position);
    }

    void refuse_nul(const std::string &text) const {
        if (text.find('\0') != std::string::npos) fail("%s: \\u0000 ends a text here: leave it out", name.c_str());
    }

    bool null() override { return add(Json::Type::null), true; }
    bool boolean(bool value) override { return add(Json::Type::boolean, value), true; }
    bool number_integer(int64_t value) override { return add(Json::Type::number, (double)value), true; }
    bool number_unsigned(uint64_t value) override { return add(Json::Type::number, (double)value), true; }
    bool number_float(long double, const std::string &digits) override {
        double value = strtod(digits.c_str(), nullptr);
        if (as_python && digits == nan_mark) value = NAN;
        if (as_python && digits == infinity_mark) value = INFINITY;
        if (as_python && digits == minus_infinity_mark) value = -INFINITY;
        return add(Json::Type::number, value), true;
    }
    bool string(std::string &value) override {
        refuse_nul(value);
        return add(Json::Type::text).text.swap(value), true;
    }
    bool binary(Library::binary_t &) override { return false; }  // JSON has none
    bool start_object(size_t) override { return begin(Json::Type::object); }
    bool start_array(size_t) override { return begin(Json::Type::list); }
    bool end_array() override { return open.pop_back(), true; }
    bool key(std::string &value) override { return refuse_nul(value), next_key.swap(value), true; }
    bool end_object() override {
        std::unordered_set<std::string_view> keys(open.back()->items.size());
        for (const Json &item : open.back()->items)
            if (!keys.insert(item.key).second)
                fail("%s: key \"%s\" stands twice in one object", name.c_str(), printable(item.key).c_str());
        return open.pop_back(), true;
    }
    bool parse_error(size_t read, const std::string &, const nlohmann::detail::exception &) override {
        refuse(std::min(read, json.size() + 1) - 1);
    }
};

}  // namespace

Json parse_json(const std::string &name, std::string text, bool as_python, size_t limit) {
    if (text.size() > limit) fail("%s: JSON of %zu bytes is too long", name.c_str(), text.size());
    if (as_python) mark_python_numbers(text);
    Builder builder(name, text, as_python);
    if (const size_t nul = text.find('\0'); nul != std::string::npos) builder.refuse(nul);  // which would end it
    Library::sax_parse(text.data(), text.data() + text.size(), &builder);
    if (!is_object(&builder.root)) fail("%s: expected a JSON object", name.c_str());
    return std::move(builder.root);
}

std::string json_text(const Json &item) {
    if (item.type == Json::Type::null) return "null";
    if (item.type == Json::Type::boolean) return item.number ? "true" : "false";
    if (item.type == Json::Type::text) return json_of(item.text);
    if (item.type == Json::Type::number)
        return std::isnan(item.number)   ? "NaN"
               : std::isinf(item.number) ? (item.number < 0 ? "-Infinity" : "Infinity")
                                         : json_of(item.number);
    const bool object = item.type == Json::Type::object;
    std::string text;
    for (const Json &each : item.items)
        text += (text.empty() ? "" : ",") + (object ? json_of(each.key) + ":" : "") + json_text(each);
    return object ? "{" + text + "}" : "[" + text + "]";
}
