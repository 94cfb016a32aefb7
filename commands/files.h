// Files that a command writes: whole, or not at all.
#pragma once

#include <filesystem>

#include "open.h"

// Writes the file that a flag names: under another name in the same folder, until finish() renames it.
class PartFile {
public:
    PartFile(const std::string &path, const std::string &flag) : path_(path), flag_(flag) {
        struct stat status;
        if (lstat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
            refuse(flag, path, "is not a regular file: name one, or one that is not there yet");
        if (stat(path.c_str(), &status) == 0 && files_read.count({status.st_dev, status.st_ino}))
            refuse(flag, path, "is a file that is read: name another");
        int descriptor = -1;
        for (int i = 0; descriptor < 0 && (i == 0 || errno == EEXIST); i++) {
            part_ = std::filesystem::path(path).replace_filename(formatted(".llm-%d-%d.part", getpid(), i));
            descriptor = open(part_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        }
        if (descriptor < 0) refuse(flag, path, std::string("cannot write there: ") + strerror(errno));
        file_.reset(fdopen(descriptor, "wb"));
        *(name_ = std::find(unfinished, std::end(unfinished), nullptr)) = part_.c_str();
    }
    ~PartFile() {
        if (name_->exchange(nullptr)) remove(part_.c_str());
    }
    void write(const std::string &bytes, long at = -1) {
        require(at < 0 || fseek(file_.get(), at, SEEK_SET) == 0);
        require(fwrite(bytes.data(), 1, bytes.size(), file_.get()) == bytes.size());
    }
    void finish() {
        require(!ferror(file_.get()) && fclose(file_.release()) == 0 && rename(part_.c_str(), path_.c_str()) == 0);
        *name_ = nullptr;
    }

private:
    void require(bool done) const {
        if (done) return;
        throw Error(formatted("%s %s: cannot write it: %s", flag_.c_str(), path_.c_str(), strerror(errno)), 1);
    }
    std::string path_, part_, flag_;
    std::atomic<const char *> *name_;  // the entry of part_ in `unfinished`
    std::unique_ptr<FILE, int (*)(FILE *)> file_{nullptr, fclose};
};

// --dump-logits: writes a NumPy file of float32 rows, `width` numbers each. Without the flag it does nothing.
class LogitsFile {
public:
    LogitsFile(const Options &options, int width) : width_(width) {
        if (!options.has("--dump-logits")) return;
        part_ = std::make_unique<PartFile>(options.dump_logits, "--dump-logits");
        part_->write("", header_bytes);
    }
    UseLogits add() {
        if (!part_) return nullptr;
        return [this](const std::vector<float> &rows) {
            part_->write({(const char *)rows.data(), rows.size() * sizeof(float)});
            count_ += rows.size() / (size_t)width_;
        };
    }
    // Writes the header: magic, version 1.0, length of the rest, a Python dictionary.
    void finish() {
        if (!part_) return;
        std::string start("\x93NUMPY\x01\x00\x76\x00", 10), shape = formatted("(%zu, %d)", count_, width_);
        start += "{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + ", }";
        start.resize(header_bytes - 1, ' ');
        part_->write(start + "\n", 0);
        part_->finish();
    }

private:
    static constexpr int header_bytes = 128;
    std::unique_ptr<PartFile> part_;
    int width_;
    size_t count_ = 0;
};
