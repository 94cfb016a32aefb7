// Turns a conversation into the text that a model was tuned on. A checkpoint brings its chat template as a program in
// Jinja's language. An imitation of Jinja would write nearly the right text, and the answers would get worse without a
// message. So Jinja itself runs it, in a process of its own: weights_tools/chat_template.py.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <csignal>

#include "../base/text.h"
#include "../base/usable.h"
#include "report.h"

// One message of a conversation. role: "system", "user", "assistant", or another one that the template knows.
struct Message {
    std::string role, content;  // with its marks: see marked()
};

// A text as a model reads it. `typed` (byte): 1 at the first byte of a special token's spelling that comes from outside
// the template, so that it stays plain text; else 0.
struct Rendered {
    std::string text, typed;
};

// The process that runs a template, and the special tokens, which only a template and the model may write. The process
// answers each line with a line of JSON.
struct ChatTemplate {
    pid_t child;
    std::shared_ptr<FILE> channel;  // both ways; closing it ends the process
    std::vector<std::string> specials = {};
    std::string before = "", end = "";  // put before all that it writes; what it writes after an answer

    void ask(const std::string &question) const {
        const auto before = signal(SIGPIPE, SIG_IGN);  // if the process has ended, text() says so
        dprintf(fileno(channel.get()), "%s\n", question.c_str());
        signal(SIGPIPE, before);
    }
    // The text that the process's next line has under a key.
    std::string text(const char *key) const {
        std::string line;
        for (int c; (c = getc(channel.get())) != '\n'; line += (char)c)
            if (c == EOF)
                fail("the chat template's program ended: expected python3 to be there, and a template to end");
        const Json reply = parse_json("the chat template", line);
        const Section said{"the chat template", &reply};
        if (said.find("error")) fail("%s", said.text("error", "").c_str());
        return said.text(key, "");
    }
};

// Text from outside gets `mark` before each special token's spelling and `end_mark` after it. A template takes them for
// letters; where it cuts a text at a spelling, one of them may remain alone. A text's own letters equal to `mark`,
// `nul` or `end_mark` are written after a `mark`, and so is NUL, which would end the text, as `nul`.
const char mark = '\1', nul = '\2', end_mark = '\3';
inline size_t special_at(const ChatTemplate &with, const std::string &text, size_t at) {  // bytes of the longest, or 0
    size_t most = 0;
    for (const std::string &special : with.specials)
        if (special[0] == text[at] && text.compare(at, special.size(), special) == 0)
            most = std::max(most, special.size());
    return most;
}
inline std::string marked(const ChatTemplate &with, const std::string &text, const char *what) {
    require_utf8(what, text);
    std::string result;
    std::multiset<size_t> ends;
    for (size_t i = 0; i <= text.size(); i++) {
        result += std::string(ends.count(i), end_mark);
        if (i == text.size()) break;
        const size_t special = special_at(with, text, i);
        if (special) ends.insert(i + special);
        if (special || (text[i] != nul && (uint8_t)text[i] <= end_mark)) result += mark;
        result += text[i] == '\0' ? nul : text[i];
    }
    return result;
}

// Starts the process of a template. `asked`: what --template says; "": the checkpoint's own. `arguments`: NAME=VALUE,
// the template's variables. `system`: the system text of the conversation, or "", used to find what ends an answer.
inline ChatTemplate open_template(const std::string &directory, const std::string &asked, const Tokenizer *tokenizer,
                                  const std::string &system = "", const std::vector<std::string> &arguments = {}) {
    const std::string script = file_of_project("weights_tools/chat_template.py");
    if (!file_exists(script)) fail("%s: is not there, expected it beside the program", script.c_str());
    int ends[2];  // ours, and the process's
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) fail("python3: no pipe to it (%s)", strerror(errno));
    for (int end : ends) fcntl(end, F_SETFD, FD_CLOEXEC);
    const pid_t child = fork();
    if (child < 0) fail("python3: cannot be started (%s)", strerror(errno));
    if (child == 0) {
        dup2(ends[1], 0), dup2(ends[1], 1);
        signal(SIGINT, SIG_IGN);  // Ctrl-C is meant for an answer
        execlp("python3", "python3", script.c_str(), directory.c_str(), asked.c_str(), nullptr);
        _exit(127);
    }
    close(ends[1]);
    for (const char *name : {"chat_template.jinja", "tokenizer_config.json"}) remember_read(join_path(directory, name));
    remember_read(asked);
    auto end_program = [child](FILE *file) { fclose(file), waitpid(child, nullptr, 0); };
    ChatTemplate opened{child, {fdopen(ends[0], "r"), end_program}};
    for (int id = 0; id < tokenizer_size(tokenizer); id++)
        if (tokenizer_is_special(tokenizer, id)) opened.specials.push_back(tokenizer_token(tokenizer, id));
    opened.ask(Report().add("system", marked(opened, system, "--system")).add("arguments", arguments).json());
    opened.end = opened.text("end");
    return opened;
}

// Removes the marks. `typed` is set where a special token had one on either side.
inline Rendered unmarked(const ChatTemplate &with, const std::string &text) {
    Rendered all;
    std::vector<size_t> begins;
    std::set<size_t> ends;
    for (size_t i = 0; i < text.size(); i++) {
        const bool letter = text[i] == mark && i + 1 < text.size() && (uint8_t)text[i + 1] <= end_mark;
        if (letter)
            i++, all.text += text[i] == nul ? '\0' : text[i];
        else if (text[i] == mark)
            begins.push_back(all.text.size());
        else if (text[i] == end_mark)
            ends.insert(all.text.size());
        else
            all.text += text[i];
    }
    all.typed.assign(all.text.size(), 0);
    for (size_t at : begins)
        for (const std::string &special : with.specials)
            if (all.text.compare(at, special.size(), special) == 0 && ends.count(at + special.size()))
                all.typed[at] = 1;
    return all;
}

// What begins and ends a thought, in the models that write any.
constexpr const char *thoughts[][2] = {{"<think>", "</think>"},
                                       {"[THINK]", "[/THINK]"},
                                       {"<|channel>", "<channel|>"},
                                       {"<thought>", "</thought>"},
                                       {"<reasoning>", "</reasoning>"},
                                       {"<seed:think>", "</seed:think>"},
                                       {"<|START_THINKING|>", "<|END_THINKING|>"},
                                       {"<|inner_prefix|>", "<|inner_suffix|>"}};

// Reads a message from outside: of a request, or a line of llm chat. Without a role it is the user's.
inline Message message_of(const ChatTemplate &with, const Section &from) {
    from.refuse_others("role content", "role and content alone");
    from.need("content");
    const std::string role = from.text("role", "user");  // roles get no marks, so they must need none
    if (marked(with, role, "role") != role) from.refuse("role", from.find("role"), "no special token in it");
    return {role, marked(with, from.text("content", ""), from.name.c_str())};
}

// Renders the conversation up to where the model's next answer begins. Texts with marks are rendered without them, too,
// and that text counts: a mark may keep a template from trimming white space, or remain alone where the template cuts a
// text at a special token. The text with marks only tells which special tokens come from outside.
inline Rendered render(const ChatTemplate &with, const std::vector<Message> &messages) {
    auto ask = [&](bool marks) {
        std::vector<Report> all;
        for (const Message &each : messages) {
            std::string content;
            for (size_t i = 0; i < each.content.size(); i++) {
                const char c = each.content[i];
                const bool letter = c == mark && (uint8_t)each.content[i + 1] <= end_mark;
                if (marks || letter || (c != mark && c != end_mark)) content += c;
                if (letter) content += each.content[++i];
            }
            all.push_back(Report().add("role", each.role).add("content", content));
        }
        with.ask(Report().list("messages", all).json());
        return unmarked(with, with.before + with.text("text"));
    };
    const Rendered found = ask(true);
    auto any = [](const Message &each) { return each.content.find(mark) != std::string::npos; };
    if (std::none_of(messages.begin(), messages.end(), any)) return found;
    auto places = [&](const std::string &text) {
        std::vector<size_t> all;
        for (size_t i = 0; i < text.size(); i++)
            if (special_at(with, text, i)) all.push_back(i);
        return all;
    };
    Rendered plain = ask(false);
    const std::vector<size_t> from = places(found.text), to = places(plain.text);
    if (from.size() != to.size()) fail("the chat template cuts a special token that was typed: leave it out");
    for (size_t i = 0; i < to.size(); i++) plain.typed[to[i]] = found.typed[from[i]];
    return plain;
}
inline std::vector<int> encode(const Tokenizer *tokenizer, const Rendered &text, const char *what) {
    return encode(tokenizer, text.text, what, text.typed.data());
}

// The special token that a template writes after an answer, or -1. It ends answers even if no config says so.
inline int end_id(const ChatTemplate &with, const Tokenizer *tokenizer) {
    for (int id : encode(tokenizer, {with.end, std::string(with.end.size(), '\0')}, "the template"))
        if (tokenizer_is_special(tokenizer, id)) return id;
    return -1;
}
