// safetensors: which tensors a file has, and where they are in it. Files are mapped; only their headers are read.
//
// A file is: 8 bytes, the length n of the header (little-endian); n bytes of JSON,
//   {"model.norm.weight": {"dtype": "BF16", "shape": [64], "data_offsets": [0, 128]}, ..., "__metadata__": {...}}
// and the data. Offsets count from the start of the data; the tensors cover all of it, and none overlaps another.
//
// Every fault of a file ends in fail(), with a line that names the file.
#pragma once

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "json.h"

struct StoredTensor {
    std::string file, dtype;  // the file as messages call it; the type as the file calls it
    std::vector<int64_t> shape;
    const char *data = nullptr;
    size_t bytes = 0;
};

struct TensorTable {
    std::string name;  // the file that lists them: model.safetensors, or the index of the shards
    std::map<std::string, StoredTensor> tensors;
};

// Bytes of an element, from the bits in its type's name: "BF16", "I64", "F8_E4M3"; 0: not known, or not whole, so the
// tensor's size is not checked. Only F32, F16 and BF16 can be used; a file may have unused tensors of other types.
inline size_t stored_dtype_bytes(const std::string &dtype) {
    size_t digit = dtype.find_first_of("0123456789");
    if (digit == std::string::npos) return dtype == "BOOL";
    return strtoul(dtype.c_str() + digit, nullptr, 10) / 8;
}

inline std::vector<int64_t> read_counts(const Section &tensor, const char *key) {
    const Json *list = tensor.need(key);
    std::vector<int64_t> counts;
    for (const Json *item : items_of(list))
        if (is_whole(item, 0, 1LL << 53)) counts.push_back((int64_t)item->number);  // exact in a double
    if (!is_list(list) || (int)counts.size() != count_of(list))
        tensor.refuse(key, list, "a list of whole numbers");
    return counts;
}

// Reads one entry of the header. `data` (data_bytes) is the part of the file after the header.
inline StoredTensor read_entry(const std::string &file, const Json *item, const char *data, size_t data_bytes) {
    Section entry{file + ": tensor " + printable(item->key), item};
    const char *name = entry.name.c_str();
    if (!is_object(item)) fail("%s: expected an object", name);
    entry.need("dtype");
    StoredTensor tensor{file, entry.text("dtype", ""), read_counts(entry, "shape")};
    std::vector<int64_t> offsets = read_counts(entry, "data_offsets");
    if (offsets.size() != 2 || offsets[0] > offsets[1])
        entry.refuse("data_offsets", entry.find("data_offsets"), "[begin, end]");
    if ((uint64_t)offsets[1] > data_bytes)
        fail("%s ends at byte %lld of the data, but the file holds %zu: it is cut off, fetch it again", name,
             (long long)offsets[1], data_bytes);
    tensor.data = data + offsets[0];
    tensor.bytes = (size_t)(offsets[1] - offsets[0]);

    size_t element = stored_dtype_bytes(tensor.dtype), expected = element;
    for (int64_t count : tensor.shape) {
        if (count && expected > SIZE_MAX / (size_t)count)
            entry.refuse("shape", entry.find("shape"), "one that fits a file");
        expected *= (size_t)count;
    }
    if (element && expected != tensor.bytes)
        fail("%s has %zu bytes, its shape %s in %s asks for %zu", name, tensor.bytes,
             printable(json_of(tensor.shape)).c_str(), tensor.dtype.c_str(), expected);
    return tensor;
}

// Throws unless the tensors cover the data from its first byte to its last, each byte once.
inline void check_coverage(const TensorTable &table, const char *data, size_t data_bytes) {
    std::set<std::tuple<const char *, size_t, std::string>> order;
    for (const auto &[name, tensor] : table.tensors) order.insert({tensor.data, tensor.bytes, name});
    const char *covered = data;
    for (const auto &[begin, bytes, name] : order) {
        if (begin != covered)
            fail("%s: tensor %s begins at byte %td of the data, expected %td: tensors %s", table.name.c_str(),
                 printable(name).c_str(), begin - data, covered - data, begin < covered ? "overlap" : "leave a gap");
        covered += bytes;
    }
    if (covered != data + data_bytes)
        fail("%s: holds %zu bytes of data, its header speaks of %td", table.name.c_str(), data_bytes, covered - data);
}

// Returns the tensors of one file, given as its bytes in memory; only the header is read.
inline TensorTable parse_safetensors(const std::string &name, const char *bytes, size_t size) {
    if (const char *instead = instead_of_file(bytes, size)) fail("%s: %s", name.c_str(), instead);
    uint64_t header_bytes = 0;
    if (size < sizeof header_bytes)
        fail("%s: is %s long, too short for a safetensors file", name.c_str(), counted((int64_t)size, "byte").c_str());
    memcpy(&header_bytes, bytes, sizeof header_bytes);
    const size_t rest = size - sizeof header_bytes, most = std::min(rest, max_json_bytes);
    if (header_bytes > most)
        fail("%s: its header is said to be %llu bytes long, expected at most %zu: %s", name.c_str(),
             (unsigned long long)header_bytes, most,
             header_bytes > max_json_bytes ? "not a safetensors file" : "it is cut off, fetch it again");
    const char *header = bytes + sizeof header_bytes, *data = header + header_bytes;
    Json root = parse_json(name + ": header", std::string(header, (size_t)header_bytes));
    TensorTable table{name, {}};
    for (const Json *item : items_of(&root))
        if (item->key != "__metadata__")
            table.tensors[item->key] = read_entry(name, item, data, rest - (size_t)header_bytes);
    check_coverage(table, data, rest - (size_t)header_bytes);
    return table;
}

inline TensorTable open_safetensors(const std::string &path, std::vector<Mapping> &files) {
    files.push_back(map_file(path));
    return parse_safetensors(path, files.back().get(), files.back().get_deleter().size);
}

// Opens each shard that the index names, once, and takes each tensor from the shard that the index gives.
inline TensorTable open_shards(const std::string &directory, const std::string &index, std::vector<Mapping> &files) {
    Json root = parse_json(index, read_file(index, max_json_bytes), /*as_python=*/true);
    Section whole{index, &root}, map = whole.section("weight_map");
    whole.need("weight_map");
    TensorTable all{index, {}};
    std::map<std::string, TensorTable> shards;
    for (const Json *item : items_of(map.object)) {
        std::string shard = map.text(item->key.c_str(), "");
        if (shard.empty() || shard == "." || shard == ".." || shard.find('/') != std::string::npos)
            map.refuse(printable(item->key).c_str(), item, "the name of a file in the same directory");
        if (!shards.count(shard)) {
            std::string path = join_path(directory, shard);
            if (!file_exists(path))
                fail("%s: cannot open it: %s; %s names it", path.c_str(), strerror(errno), index.c_str());
            shards[shard] = open_safetensors(path, files);
        }
        auto found = shards[shard].tensors.find(item->key);
        if (found == shards[shard].tensors.end())
            fail("%s: tensor %s is missing, %s says it is here", shards[shard].name.c_str(),
                 printable(item->key).c_str(), index.c_str());
        all.tensors[item->key] = found->second;
    }
    return all;
}

inline TensorTable open_weights(const std::string &directory, std::vector<Mapping> &files) {
    std::string single = join_path(directory, "model.safetensors"), index = single + ".index.json";
    if (file_exists(single)) return open_safetensors(single, files);
    if (file_exists(index)) return open_shards(directory, index, files);
    fail("%s: neither model.safetensors nor model.safetensors.index.json is there; no other format is read",
         directory.c_str());
}
