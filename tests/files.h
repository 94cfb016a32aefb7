// Files and folders that a test makes, breaks and reads again, and the errors it expects.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>

#include "../base/json.h"

namespace fs = std::filesystem;

// A directory that is gone at the end of the test.
struct Scratch {
    fs::path path;
    Scratch() {
        std::string name = (fs::temp_directory_path() / ("test_llm." + std::string(6, 'X'))).string();
        REQUIRE(mkdtemp(name.data()));
        path = name;
    }
    ~Scratch() { fs::remove_all(path); }
    std::string str() const { return path.string(); }
    std::string operator/(const std::string &name) const { return (path / name).string(); }
};

// A variable of the environment, with a value or without one (nullptr). At the end of the test it is as it was.
struct Environment {
    std::string name, before;
    bool was_set;
    Environment(const char *variable, const char *value) : name(variable), was_set(getenv(variable)) {
        if (was_set) before = getenv(variable);
        value ? setenv(variable, value, 1) : unsetenv(variable);
    }
    ~Environment() { was_set ? setenv(name.c_str(), before.c_str(), 1) : unsetenv(name.c_str()); }
};

inline std::string slurp(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    REQUIRE_MESSAGE(file, path);
    return {std::istreambuf_iterator<char>(file), {}};
}

inline void spill(const std::string &path, const std::string &bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

// The models of tests/fixtures by name.
inline std::vector<std::string> fixture_names() {
    std::vector<std::string> names;
    for (auto &entry : fs::directory_iterator("tests/fixtures/models")) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    REQUIRE(names.size() >= 20);
    return names;
}

struct Matrix {
    size_t rows = 0, cols = 0;
    std::vector<float> values;
};

// A NumPy file of float32, as its format document has it: magic, version 1.0, length of the header, a header that
// makes the data begin at a multiple of 64, the data and nothing else.
inline Matrix read_npy(const std::string &path) {
    std::string bytes = slurp(path);
    REQUIRE(bytes.substr(0, 8) == std::string("\x93NUMPY\x01\x00", 8));
    size_t start = 10 + ((uint8_t)bytes[8] | (size_t)(uint8_t)bytes[9] << 8);
    REQUIRE(start <= bytes.size());
    CHECK(start % 64 == 0);
    CHECK(bytes[start - 1] == '\n');
    Matrix matrix;
    std::string header = bytes.substr(10, start - 10);
    REQUIRE_MESSAGE(sscanf(header.c_str(), "{'descr': '<f4', 'fortran_order': False, 'shape': (%zu, %zu), }",
                           &matrix.rows, &matrix.cols) == 2,
                    header);
    REQUIRE(bytes.size() == start + matrix.rows * matrix.cols * sizeof(float));
    matrix.values.resize(matrix.rows * matrix.cols);
    memcpy(matrix.values.data(), &bytes[start], bytes.size() - start);
    return matrix;
}

// The first `from` becomes `to`.
inline std::string replaced(std::string text, const std::string &from, const std::string &to) {
    size_t at = text.find(from);
    REQUIRE_MESSAGE(at != std::string::npos, from);
    return text.replace(at, from.size(), to);
}

inline bool contains(const std::string &text, const std::string &part) { return text.find(part) != std::string::npos; }

template <class... Parts>
void check_contains(const std::string &text, const Parts &...parts) {
    for (const std::string &part : {std::string(parts)...})
        CHECK_MESSAGE(contains(text, part), "\"" << text << "\" lacks \"" << part << "\"");
}

// The one line that `action` fails with; "" if it does not fail.
inline std::string error_of(const std::function<void()> &action) {
    try {
        action();
    } catch (const Error &error) {
        std::string line = error.what();
        CHECK((!line.empty() && !contains(line, "\n")));
        return line;
    }
    return "";
}
