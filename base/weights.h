// A model's weights: their numbers, whatever type they have, and how they move into a machine's memory, maybe as int8.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <set>

#include "device.h"
#include "model.h"

// ---- Numbers -------------------------------------------------------------------------------------------------

// Calls use(p) with a tensor's numbers as a file stores them: `const float *`, `const f16 *` or `const bf16 *`.
template <class Use>
void with_numbers(const Tensor &tensor, Use use) {
    if (tensor.type == DType::f32) return use((const float *)tensor.data);
    if (tensor.type == DType::f16) return use((const f16 *)tensor.data);
    if (tensor.type == DType::bf16) return use((const bf16 *)tensor.data);
    fail("%s weights where only numbers as a file stores them are read", dtype_name(tensor.type));
}

// ---- Moving --------------------------------------------------------------------------------------------------

inline size_t stored_bytes(const Tensor &tensor) {
    if (tensor.type == DType::int8) return int8_bytes(tensor.rows, tensor.cols);
    return (size_t)(tensor.rows * tensor.cols) * dtype_bytes(tensor.type);
}

// Calls use(tensor, matrix) for each; `matrix` if it is one that every token is multiplied with.
template <class M, class Use>
void for_each_tensor(M &model, Use use) {
    visit_tensors(model, [&](auto &tensor, bool, const Origin &from) { use(tensor, from.matrix); });
}

// Whether products with a model's matrices, all in bf16, round their inputs to bf16, too.
inline void round_inputs(Model &model, bool rounded) {
    for_each_tensor(model, [&](Tensor &tensor, bool matrix) {
        if (!matrix || !tensor.data) return;
        if (tensor.type != DType::bf16 && tensor.type != DType::bf16_pairs)
            fail("--activations bf16: belongs to weights in bf16, here are some in %s: leave it out",
                 dtype_name(tensor.type));
        tensor.type = rounded ? DType::bf16_pairs : DType::bf16;
    });
}

// Writes the int8 numbers of a matrix. Threads share its blocks of rows.
inline void write_int8(Cpu &cpu, Int8Block *to, const Tensor &matrix) {
    std::atomic<bool> good{true};
    int64_t groups = int8_groups(matrix.cols);
    with_numbers(matrix, [&](auto *numbers) {
        cpu.run([&] {
            cpu.for_each(int8_panels(matrix.rows), [&](int64_t panel, Alone) {
                int rows = (int)std::min<int64_t>(int8_rows, matrix.rows - panel * int8_rows);
                if (!quantize(to + panel * groups, numbers + panel * int8_rows * matrix.cols, rows, matrix.cols))
                    good = false;
            });
        });
    });
    if (!good)
        fail("--weights int8: a weight is NaN or beyond 8.3e6, which its scales cannot hold: leave the flag out");
}

// Moves the model's tensors from the mapped files into the machine's memory, which is returned: all as they are, or the
// matrices as int8. These are not looked up by token: a tied model's embedding then stays, and is no longer its head.
inline std::shared_ptr<void> move_weights(Model &model, Machine &machine, bool to_int8) {
    constexpr size_t alignment = 256, piece = 64 << 20;
    Memory &memory = std::visit([](auto &m) -> Memory & { return m; }, machine);
    auto moves = [&](const Tensor &tensor, bool matrix) { return tensor.data && (matrix || !to_int8); };
    auto moved = [&](Tensor tensor) { return tensor.type = to_int8 ? DType::int8 : tensor.type, tensor; };

    // A place for each tensor, once: a tied head is the embedding. The map has them in the order of the files.
    std::map<const void *, std::pair<Tensor, size_t>> places;  // what, and to which byte of the memory
    size_t total = 0;
    for_each_tensor(model, [&](const Tensor &tensor, bool matrix) {
        if (!moves(tensor, matrix) || places.count(tensor.data)) return;
        places[tensor.data] = {tensor, total};
        total += (stored_bytes(moved(tensor)) + alignment - 1) / alignment * alignment;
    });
    Room room = memory.room();
    if ((double)total > room.bytes)
        fail("the weights need %.3f GiB, %s has %.3f GiB free: choose a smaller model, another --weights or --device",
             (double)total / 0x1p30, room.name.c_str(), room.bytes / 0x1p30);
    std::shared_ptr<void> weights =
        memory.reserve(total, "the weights", "choose a smaller model, or leave --weights out");
    char *start = (char *)weights.get();

    // In pieces, so that Ctrl-C is heard. A file's pages are not kept once they were read.
    Progress progress("weights", (double)total / 1e6, "MB");
    for (auto &[data, place] : places) {
        const size_t bytes = stored_bytes(moved(place.first));
        char *to = start + place.second;
        if (to_int8) write_int8(std::get<Cpu>(machine), (Int8Block *)to, place.first);
        for (size_t at = 0; !to_int8 && at < bytes && !interrupted(); at += piece)
            memory.write(to + at, (const char *)data + at, std::min(piece, bytes - at));
        stop_if_interrupted();
        Progress::add((double)bytes / 1e6);
        for (const Mapping &file : model.files) forget_pages(file);
    }

    // From now on the model's tensors are there, and as int8 they take other bytes.
    std::set<const void *> counted;
    model.weight_bytes = 0;
    for_each_tensor(model, [&](Tensor &tensor, bool matrix) {
        if (moves(tensor, matrix)) tensor = moved(tensor), tensor.data = start + places.at(tensor.data).second;
        if (tensor.data && counted.insert(tensor.data).second) model.weight_bytes += (int64_t)stored_bytes(tensor);
    });
    return weights;
}
