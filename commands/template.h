// A conversation as the text that a model was tuned on. A checkpoint brings its chat template as a program (Jinja),
// which is not run but recognised as a form of commands/template_forms.h. Why not run it: its language is larger than
// this command line. A program of no known form is refused: nearly the right text gets worse answers, and nobody is
// told why.
#pragma once

#include <ctime>

#include "../base/json.h"
#include "template_forms.h"

extern "C" size_t utf8_valid(const char *text, size_t length);  // of the tokenizer: the first byte that is not UTF-8

// One turn: what the user says, and what the model answered; the last one is not answered yet.
struct Turn {
    std::string user, answer;
};

// A conversation as a model reads it, and which of its bytes come from outside the template: there a special token's
// spelling is text.
struct Rendered {
    std::string text;
    std::vector<char> typed;  // (bytes of text): 1 from outside, 0 from the template
    void add(const std::string &part, char outside) { text += part, typed.resize(text.size(), outside); }
};

// A form, and what the checkpoint has for it: its program as fenced() has it; the conversation begins with `bos`.
struct ChatTemplate {
    const Form *form = nullptr;
    std::string program, bos, eos;
    std::vector<std::string> standing;
};
const char fence = '\x1f', blank = '\x1e';  // see fenced(); a fence is ` in the table

// What a model writes behind its answer.
inline std::string end_of_answer(const ChatTemplate &found) {
    const std::string answer = *found.form->answer ? found.form->answer : found.form->turn;
    const std::string end = answer.substr(answer.find("{}") + 2);
    return end.find("{eos}") < 2 ? found.eos : end;
}

inline std::string template_names() {
    std::string names;
    for (const Form &form : forms)
        if (!has(names, form.name)) names += (names.empty() ? "" : " ") + std::string(form.name);
    return names;
}

// The program without its comments and what stands outside its tags; texts have a fence in place of each quote. Blanks
// and line breaks outside of tags become a `blank` where Jinja, as Transformers uses it, writes them: it drops all of
// them beside {%- or -%}, else a line break behind a {% tag %} and blanks from a line's beginning to one.
inline std::string fenced(const std::string &program) {
    std::string all, outside;
    char tag = 0, quote = 0;  // the second character of {{, {% or {# where we are in one; the quote we are in
    bool drops = false, begins_line = true;
    for (size_t i = 0; i + 1 < program.size(); i++) {
        const char c = program[i], next = program[i + 1], third = i + 2 < program.size() ? program[i + 2] : 0;
        if (quote && c == '\\') {
            all += next == 'n' ? '\n' : next, i++;
        } else if (quote) {
            all += c == quote ? fence : c, quote = c == quote ? 0 : quote;
        } else if (!tag && c == '{' && (next == '{' || next == '%' || next == '#')) {
            const size_t line = outside.find_last_not_of(" \t") + 1;  // is empty up to here
            if (next != '{' && (line ? outside[line - 1] == '\n' : begins_line)) outside.resize(line);
            const bool empty = third == '-' || drops || outside.empty();
            if (!empty && outside.find_first_not_of(" \t\n") == std::string::npos) all += blank;
            tag = next, outside = "", i++;
        } else if (tag && next == '}' && c == (tag == '{' ? '}' : tag)) {
            drops = program[i - 1] == '-', begins_line = tag != '{' && third == '\n';
            i += 1 + begins_line, tag = 0;
        } else if (tag && tag != '#') {
            quote = c == '\'' || c == '"' ? c : 0;
            all += quote ? fence : c;
        } else if (!tag) {
            outside += c;
        }
    }
    return all;
}

// Whether the program is of a form; if so, `chosen` has its standing texts.
inline bool is_of(const Form &form, ChatTemplate &chosen) {
    auto parts = [](std::string list) { return std::replace(list.begin(), list.end(), '`', fence), split(list, '~'); };
    const std::string &program = chosen.program;
    chosen.standing.clear();
    for (const std::string &mark : parts(form.marks)) {
        const bool absent = mark[0] == '!', found = program.find(mark.substr(absent)) != std::string::npos;
        if (found == absent) return false;
    }
    if (program.find(blank) != std::string::npos) return false;
    if (!*form.standing && program.find(fence + std::string("You are")) != std::string::npos) return false;
    for (const std::string &start : parts(form.standing)) {
        if (start.empty()) return true;
        size_t begin = 0, end = 0;  // of a text that begins so, and has more
        do {
            begin = program.find(fence + start, end);
            if (begin == std::string::npos) return false;
            end = program.find(fence, ++begin);
        } while (end == begin + start.size());
        chosen.standing.push_back(program.substr(begin, end - begin));
    }
    return true;
}

// A file of the checkpoint; nothing where it is not there.
inline Json json_file(const std::string &path) {
    return file_exists(path) ? parse_json(path, read_file(path, max_json_bytes), /*as_python=*/true) : Json();
}

// The checkpoint's own template, "" if it has none; `path`: where it was looked for.
inline std::string own_template(const std::string &directory, const Section &config, std::string &path) {
    path = join_path(directory, "chat_template.jinja");
    if (file_exists(path)) return read_file(path, max_json_bytes);
    path = config.name + ": chat_template";
    const cJSON *item = config.find("chat_template");
    if (!cJSON_IsArray(item)) return config.text("chat_template", "");
    std::string program;
    for (const cJSON *one : items_of(item)) {
        const Section named{path, one};
        if (named.text("name", "") == "default") program = named.text("template", "");
    }
    return program;
}

// `name`: as --template has it; "": the form is recognised by the checkpoint's own template.
inline ChatTemplate find_template(const std::string &directory, const std::string &name) {
    const std::string known = template_names(), file = join_path(directory, "tokenizer_config.json"),
                      beside = join_path(directory, "special_tokens_map.json");
    if (!name.empty() && !has(known, name)) fail("--template %.80s: known are %s", name.c_str(), known.c_str());
    const Json root = json_file(file), more = json_file(beside);
    const Section config{file, root.get()}, map{beside, more.get()};
    std::string path;
    const std::string program = own_template(directory, config, path);
    if (const size_t valid = utf8_valid(program.data(), program.size()); valid < program.size())
        fail("%s: not UTF-8 at byte %zu", path.c_str(), valid);
    auto token = [&](const char *key) {  // a text, or an object that has it
        const Section &where = config.find(key) ? config : map;
        return cJSON_IsObject(where.find(key)) ? where.section(key).text("content", "") : where.text(key, "");
    };
    ChatTemplate chosen{nullptr, fenced(program), token("bos_token"), token("eos_token"), {}};
    for (const Form &form : forms) {
        if (!name.empty() && name != form.name) continue;
        const bool fits = is_of(form, chosen);
        if (fits || !name.empty()) chosen.form = &form;
        if (fits) break;
    }
    if (!chosen.form)
        fail("%s: %s: give --template NAME (%s), or take llm generate, which reads a prompt as it stands", path.c_str(),
             program.empty() ? "no chat template is there" : "a chat template of no known form", known.c_str());
    if (chosen.eos.empty() && (strstr(chosen.form->answer, "{eos}") || strstr(chosen.form->turn, "{eos}")))
        fail("%s: eos_token is missing, and chat template %s ends answers with it", file.c_str(), chosen.form->name);
    const bool begins =
        program.empty() ? has(chosen.form->words, "bos") : program.find("bos_token") != std::string::npos;
    if (!begins) chosen.bos = "";
    return chosen;
}

// Without what Unicode calls white space, as of Python's strip() and rstrip().
inline std::string trimmed(const std::string &text, bool left = true) {
    static const std::string blanks =
        " \t\n\v\f\r\x1c\x1d\x1e\x1f\u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008"
        "\u2009\u200a\u2028\u2029\u202f\u205f\u3000";
    size_t first = left ? text.size() : 0, last = 0;
    for (size_t i = 0, next; i < text.size(); i = next) {
        for (next = i + 1; next < text.size() && (text[next] & 0xc0) == 0x80;) next++;
        if (blanks.find(text.substr(i, next - i)) == std::string::npos) first = std::min(first, i), last = next;
    }
    return last ? text.substr(first, last - first) : "";
}

// What a form keeps of an earlier answer.
inline std::string kept(std::string text, const std::string &words, bool last) {
    if (has(words, "trim")) text = trimmed(text);
    const size_t thought = text.rfind("</think>");
    const bool drops = has(words, "drop") && thought != std::string::npos && !(last && has(words, "but-last"));
    if (drops) text.erase(0, thought + strlen("</think>"));
    if (has(words, "lines-first") || (drops && has(words, "lines"))) text.erase(0, text.find_first_not_of('\n'));
    if (has(words, "channels")) {
        std::string rest = text + "<channel|>";
        text = "";
        for (size_t end; (end = rest.find("<channel|>")) != std::string::npos;
             rest.erase(0, end + strlen("<channel|>")))
            text += rest.substr(0, std::min(end, rest.find("<|channel>")));
    }
    const bool trims =
        has(words, "trim-answer") || has(words, "whole") || has(words, "channels") || (drops && has(words, "blanks"));
    return trims ? trimmed(text) : text;
}

inline std::string dated(const std::string &text, const std::tm &today) {
    char date[1000];
    return strftime(date, sizeof date, text.c_str(), &today) ? date : text;
}

// What leads a conversation: the system, or what the model's own template has where none is given; `stands` then.
inline std::string leading_text(const ChatTemplate &found, const std::string &system, bool stands,
                                const std::tm &today) {
    const Form &form = *found.form;
    const bool folds = has(form.words, "first") || has(form.words, "last");
    if (!system.empty() && trimmed(system).empty()) fail("--system: there is nothing but white space");
    if (!system.empty() && has(form.words, "none")) fail("--system: chat template %s has no place for it", form.name);
    for (const std::string &slash : split("/think /no_think /system_override"))
        if (has(form.words, "no-slashes") && system.find(slash) != std::string::npos)
            fail("--system: chat template %s writes other texts for %s, not supported", form.name, slash.c_str());
    if (stands && found.standing.empty())
        fail("--template %s: its text without --system stands in the model's own template: give --system", form.name);
    std::string all = system;
    for (const std::string &text : stands ? found.standing : std::vector<std::string>())
        all += text[0] == '%' ? dated(text, today) : text;
    if (has(form.words, "trim") && !folds) return trimmed(all);
    return has(form.words, "trim-system") ? trimmed(all, false) : all;
}

// The conversation up to where the model's next answer begins. system: "" if none is given.
inline Rendered render(const ChatTemplate &found, const std::string &system, const std::vector<Turn> &turns,
                       const std::tm &today) {
    const Form &form = *found.form;
    auto word = [&](const char *each) { return has(form.words, each); };
    auto written = [&](std::string text, const std::string &role) {
        text = dated(text, today);
        for (auto &[name, value] : {std::pair{"{role}", role}, {"{bos}", found.bos}, {"{eos}", found.eos}})
            if (const size_t at = text.find(name); at != std::string::npos) text.replace(at, strlen(name), value);
        return text;
    };
    Rendered all;
    auto around = [&](const std::string &pattern, const char *role, const auto &said) {
        all.add(written(pattern.substr(0, pattern.find("{}")), role), 0);
        said();
        all.add(written(pattern.substr(pattern.find("{}") + 2), role), 0);
    };
    const bool stands = system.empty() && *form.standing;
    const std::string rules = leading_text(found, system, stands, today);
    const std::string lead = word("turn") && stands ? "{}" : *form.system ? form.system : form.turn;
    auto lead_on = [&] { around(lead, "system", [&] { all.add(rules, !stands); }); };
    const std::string reply = *form.answer ? form.answer : form.turn;
    const size_t folded = word("first") ? 0 : word("last") ? turns.size() - 1 : turns.size();  // into that turn
    all.add(strstr(form.turn, "{bos}") ? "" : found.bos, 0);
    if (word("always") || (!rules.empty() && folded == turns.size())) lead_on();
    for (size_t i = 0; i < turns.size(); i++) {
        if (word("lines") && turns[i].user.find("<tool_response>") != std::string::npos)
            fail("<tool_response>: chat template %s reads it as a tool's, which is not supported", form.name);
        around(form.turn, "user", [&] {
            const bool leads = !rules.empty() && i == folded;
            if (leads) lead_on();
            const bool trims = word("trim") || word("whole");
            all.add(trims ? trimmed(turns[i].user, word("trim") || !leads) : turns[i].user, 1);
        });
        if (i + 1 < turns.size())
            around(reply, "assistant", [&] { all.add(kept(turns[i].answer, form.words, i + 2 == turns.size()), 1); });
    }
    const std::string head = word("mute") ? "" : written(reply.substr(0, reply.find("{}")), "assistant");
    all.add(head, 0);
    for (const std::string opening : {"<think>\n", "<|channel>thought\n<channel|>"})
        for (const std::string &text : {opening, head + opening})
            if (found.program.find(fence + text + fence) != std::string::npos) all.add(opening, 0);
    return all;
}
