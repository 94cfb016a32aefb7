// One order of sums in products: a token has the same bits among any others. Also built for other kinds of SIMD than
// this machine's: with 4, 8 or 16 lanes, other tiles and other remainders are whole.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "../fast/fast.h"

#include <doctest/doctest.h>

#include "reference.h"

using reference::Random;
using reference::random_floats;
using Vector = std::vector<float>;

static std::vector<char> stored_as(DType type, const Vector &x) {
    std::vector<char> bytes(x.size() * dtype_bytes(type));
    with_numbers({bytes.data(), type, 1, 1}, [&](auto *data) {
        auto *to = const_cast<std::remove_const_t<std::remove_pointer_t<decltype(data)>> *>(data);
        for (size_t i = 0; i < x.size(); i++) from_float(to[i], x[i]);
    });
    return bytes;
}

// Tiles of tokens, panels of rows and Vecs of channels that are whole, and such as are not.
TEST_CASE("a product has the bits of one token alone, among any number of tokens, rows and channels") {
    const int most = 100;
    uint64_t seed = 1;
    const std::vector<std::pair<int, int>> shapes = {{1, 1},   {3, 15},  {16, 16},  {31, 17},   {32, 32},  {33, 40},
                                                     {64, 48}, {65, 63}, {70, 100}, {130, 576}, {97, 131}, {40, 1100}};
    for (DType type : {DType::f32, DType::f16, DType::bf16, DType::bf16_pairs})
        for (const auto &shape : shapes) {
            if (type == DType::bf16_pairs && !multiplies_pairs) continue;
            const DType stored = type == DType::bf16_pairs ? DType::bf16 : type;
            const int outputs = shape.first, inputs = shape.second;
            CAPTURE((int)type);
            CAPTURE(outputs);
            CAPTURE(inputs);
            Random random{seed++};
            const std::vector<char> weight = stored_as(stored, random_floats(random, (size_t)outputs * inputs));
            const std::vector<char> bias = stored_as(stored, random_floats(random, outputs));
            Vector x = random_floats(random, (size_t)most * inputs, -2, 2);
            Vector earlier = random_floats(random, (size_t)most * outputs), alone = earlier;
            const Linear linear = {{weight.data(), type, outputs, inputs},
                                   {bias.data(), stored, 1, outputs}};
            auto multiply = [&](int threads, int first, int count, Vector &y) {
                Cpu cpu(threads);
                const float *from = &x[(size_t)first * inputs];
                cpu.run([&] {
                    fast::linear(cpu, from, count, {{linear, &y[(size_t)first * outputs]}}, Into::add);
                });
            };
            for (int t = 0; t < most; t++) multiply(1, t, 1, alone);
            for (int count = 2; count <= most; count += count < 40 ? 1 : 7) {
                CAPTURE(count);
                const int first = count % 2 * (most - count);
                Vector y = earlier, expected = earlier;
                multiply(1 + count % 3, first, count, y);
                std::copy_n(&alone[(size_t)first * outputs], (size_t)count * outputs,
                            &expected[(size_t)first * outputs]);
                CHECK(reference::same_bits(y, expected));
            }
        }
}
