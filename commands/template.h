// A conversation as the text that a model was tuned on. A checkpoint brings its chat template as a program, in Jinja's
// language. Who runs it otherwise than Jinja does writes nearly the right text, gets worse answers, and is not told
// why. So Jinja runs it, in a process of its own: weights_tools/chat_template.py.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <csignal>

#include "../base/text.h"
#include "../base/usable.h"
#include "report.h"

// One turn: what the user says, and what the model answered; the last one is not answered yet.
struct Turn {
    std::string user, answer;
};

// A text as a model reads it. `typed`: of a special token's spelling that comes from outside the template the
// first byte is 1, as it is text there; all others are 0.
struct Rendered {
    std::string text, typed;
};

// The program that runs a template: it writes a line of JSON, and then one for each line that it reads. And the special
// tokens that nobody else may write.
struct ChatTemplate {
    pid_t child;
    std::shared_ptr<FILE> channel;  // both ways; closed, it ends the program
    std::vector<std::string> specials = {};
    std::string before = "", end = "";  // what stands before all that it writes; what it writes behind an answer

    void ask(const std::string &question) const {
        const auto before = signal(SIGPIPE, SIG_IGN);  // if it is gone, text() says so
        dprintf(fileno(channel.get()), "%s\n", question.c_str());
        signal(SIGPIPE, before);
    }
    // What its next line says under a key.
    std::string text(const char *key) const {
        std::string line;
        for (int c; (c = getc(channel.get())) != '\n'; line += (char)c)
            if (c == EOF)
                fail("the chat template's program ended: expected python3 to be there, and a template to end");
        const Json reply = parse_json("the chat template", line);
        const Section said{"the chat template", reply.get()};
        if (said.find("error")) fail("%s", said.text("error", "").c_str());
        return said.text(key, "");
    }
};

// `asked`: as --template has it; "": the checkpoint's own.
inline ChatTemplate open_template(const std::string &directory, const std::string &asked, const Tokenizer *tokenizer) {
    const std::string script = file_of_project("weights_tools/chat_template.py");
    if (!file_exists(script)) fail("%s: is not there, expected it beside the program", script.c_str());
    int ends[2];  // ours and its
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
    opened.end = opened.text("end");
    return opened;
}

// What comes from outside has a mark before each special token's spelling, and before a mark. A template takes it for a
// letter, which it never looks for; one that cuts texts within a spelling may leave it elsewhere. NUL, which ends texts
// of cJSON, is another letter behind a mark.
const char mark = '\1', nul = '\2';
inline std::string marked(const ChatTemplate &with, const std::string &text, const char *what) {
    require_utf8(what, text);
    std::string result;
    for (size_t i = 0; i < text.size(); i++) {
        auto is_here = [&](const std::string &special) {
            return special[0] == text[i] && text.compare(i, special.size(), special) == 0;
        };
        const bool special = std::any_of(with.specials.begin(), with.specials.end(), is_here);
        if (special || text[i] == mark || text[i] == '\0') result += mark;
        result += text[i] == '\0' ? nul : text[i];
    }
    return result;
}

// A text without its marks, and what they marked.
inline Rendered unmarked(const std::string &text) {
    Rendered all;
    for (size_t i = 0; i < text.size(); i++) {
        const bool is_mark = text[i] == mark;
        if (is_mark && ++i == text.size()) break;
        all.text += is_mark && text[i] == nul ? '\0' : text[i];
        all.typed += is_mark && text[i] != nul && text[i] != mark;
    }
    return all;
}

inline Report message(const ChatTemplate &with, const std::string &role, const std::string &text, const char *what) {
    return Report().add("role", role).add("content", marked(with, text, what));
}

// The conversation up to where the model's next answer begins, with its marks.
inline std::string render(const ChatTemplate &with, const std::vector<Report> &messages) {
    with.ask(Report().list("messages", messages).json());
    return with.before + with.text("text");
}
// The same of turns. system: "" if none is given.
inline std::string render(const ChatTemplate &with, const std::string &system, const std::vector<Turn> &turns) {
    std::vector<Report> messages;
    auto add = [&](const char *role, const std::string &text, const char *what = "this turn") {
        messages.push_back(message(with, role, text, what));
    };
    if (!system.empty()) add("system", system, "--system");
    for (const Turn &turn : turns) add("user", turn.user), add("assistant", turn.answer);
    messages.pop_back();  // the last answer is to come
    return render(with, messages);
}
