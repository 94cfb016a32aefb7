// Runs the command that the words of the command line ask for, and returns the exit status.
#pragma once

#include "flags.h"

inline int run(const std::vector<std::string> &words) {
    Options options = parse_options(words);
    int status = 0;
    try {
        if (options.help || options.version)
            print_help(options);
        else
            for (const Command &command : commands)
                if (options.command == command.name) status = command.run(options);
    } catch (Interrupted) {  // before there was any result
        Report().add("interrupted", true, "llm: interrupted\n").print(options.json, stderr);
        status = 130;
    }
    flush_output();
    return status;
}

inline int run_program(const std::vector<std::string> &words) {
    prepare_process();
    try {
        return run(words);
    } catch (const Error &error) {
        fputs(said(error.what()).c_str(), stderr);
        return error.status;
    } catch (const std::exception &error) {
        fputs(said(error.what()).c_str(), stderr);
    }
    return 2;
}
