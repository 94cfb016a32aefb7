// layers.cu: every layer against double precision, and the promise that neither the number of threads nor what else
// is computed in the same pass moves a bit of a result.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "../layers.cu"

#include <doctest/doctest.h>

#include <limits>

#include "reference.h"

using reference::Expected;
using reference::Random;
using reference::random_floats;
using reference::same_bits;
using reference::worst;

constexpr float infinity = std::numeric_limits<float>::infinity();
const DType dtypes[] = {DType::f32, DType::f16, DType::bf16};
const DType product_types[] = {DType::f32, DType::f16, DType::bf16, DType::int8};

// ---- Helpers -----------------------------------------------------------------------------------------------

// A tensor with memory of its own, and its numbers as they read after rounding to its type.
struct Stored {
    std::vector<char> bytes;
    std::vector<float> numbers;
    Tensor tensor;
};

Stored stored(const std::vector<float> &numbers, DType type, int64_t rows) {
    Stored result{std::vector<char>(numbers.size() * dtype_bytes(type)), std::vector<float>(numbers.size()), {}};
    result.tensor = {result.bytes.data(), type, rows, (int64_t)numbers.size() / rows};
    with_numbers(result.tensor, [&](auto *data) {
        using Number = std::remove_cv_t<std::remove_reference_t<decltype(*data)>>;
        for (size_t i = 0; i < numbers.size(); i++) {
            from_float(((Number *)result.bytes.data())[i], numbers[i]);
            result.numbers[i] = to_float(data[i]);
        }
    });
    return result;
}

// A projection with random weights; bias: 0 for none, or 1 + the place of its type in dtypes.
struct Projection {
    Stored weight, bias;
    Aligned<Int8Block> blocks;
    Linear linear;
    Projection(Random &random, int outputs, int inputs, DType type, int bias_type = 0)
        : weight(stored(random_floats(random, (size_t)outputs * inputs), type == DType::int8 ? DType::f32 : type,
                        outputs)) {
        if (bias_type) bias = stored(random_floats(random, outputs), dtypes[bias_type - 1], 1);
        linear = {weight.tensor, bias.tensor};
        if (type == DType::int8) REQUIRE(to_int8());
    }
    // What --weights int8 does.
    bool to_int8() {
        bool good = true;
        blocks.resize(int8_bytes(weight.tensor) / sizeof(Int8Block));
#pragma omp parallel num_threads(3) reduction(&& : good)
        good = quantize(blocks.data(), weight.tensor) && good;
        linear.weight = {blocks.data(), DType::int8, weight.tensor.rows, weight.tensor.cols};
        return good;
    }
    int outputs() const { return (int)linear.weight.rows; }
    int inputs() const { return (int)linear.weight.cols; }
};

// What linear() leaves in y: at first `before`, or NaN, which Store::set must not let through.
// With `matrix` as a pass over many tokens multiplies.
std::vector<float> product(const Projection &projection, const std::vector<float> &x, int count,
                           const std::vector<float> &before = {}, int threads = 1, bool matrix = false) {
    std::vector<float> y((size_t)count * projection.outputs(), NAN);
    if (!before.empty()) y = before;
    Store store = before.empty() ? Store::set : Store::add;
    InputBuffers buffers;
    buffers.resize(count, projection.inputs());
#pragma omp parallel num_threads(threads)
    {
        Inputs in = inputs_of(buffers, x.data(), count, projection.linear.weight, matrix);
        linear(y.data(), in, projection.linear, store);
    }
    return y;
}

std::vector<float> matrix_product(const Projection &projection, const std::vector<float> &x, int count,
                                  const std::vector<float> &before = {}, int threads = 1) {
    return product(projection, x, count, before, threads, true);
}

std::vector<float> plain_product(const Projection &projection, const std::vector<float> &x, int count,
                                 const std::vector<float> &before = {}) {
    std::vector<float> y((size_t)count * projection.outputs(), NAN);
    if (!before.empty()) y = before;
    linear_plain(y.data(), x.data(), projection.linear, count, before.empty() ? Store::set : Store::add);
    return y;
}

// ---- Matrix products ---------------------------------------------------------------------------------------

// Checks linear() against linear_plain(), set and add, bit for bit. Where linear() takes the columns of bf16 in pairs,
// linear_plain() gets them in that order.
bool agrees_with_plain(Random &random, int outputs, int inputs, int count, DType type, int bias_type) {
    Projection projection(random, outputs, inputs, type, bias_type);
    std::vector<float> x = random_floats(random, (size_t)count * inputs);
    std::vector<float> before = random_floats(random, (size_t)count * outputs);
    std::vector<float> found = product(projection, x, count), added = product(projection, x, count, before);
    if (type == DType::bf16 && inputs % PairedRow::line_numbers == 0) {
        std::vector<float> numbers(projection.weight.numbers), ordered(x);
        in_pairs(numbers.data(), projection.weight.numbers.data(), numbers.size());
        in_pairs(ordered.data(), x.data(), x.size());
        projection.weight = stored(numbers, type, outputs);
        projection.linear.weight = projection.weight.tensor;
        x = ordered;
    }
    return same_bits(found, plain_product(projection, x, count)) &&
           same_bits(added, plain_product(projection, x, count, before));
}

TEST_CASE("linear() gives linear_plain()'s bits for every shape, type and bias") {
    Random random{1};
    for (int outputs = 1; outputs <= 70; outputs++) {
        for (int count = 1; count <= 14; count++) {
            int inputs = 1 + (outputs * 14 + count) * 11 % 70, turn = outputs + count;
            CAPTURE(outputs);
            CAPTURE(inputs);
            CAPTURE(count);
            for (DType type : product_types) REQUIRE(agrees_with_plain(random, outputs, inputs, count, type, turn % 4));
        }
    }
    for (int inputs = 1; inputs <= 70; inputs++) {
        CAPTURE(inputs);
        for (int count : {1, 6, 7, 13})
            for (DType type : product_types) REQUIRE(agrees_with_plain(random, 37, inputs, count, type, inputs % 4));
    }
}

TEST_CASE("linear() gives linear_plain()'s bits for a real width") {
    Random random{2};
    for (DType type : product_types)
        for (int bias_type = 0; bias_type < 4; bias_type++)
            for (int count : {1, 5, 12, 14}) CHECK(agrees_with_plain(random, 67, 576, count, type, bias_type));
}

// Checks both products, set and add, against double precision.
void check_within_bound(Random &random, int outputs, int inputs, int count, DType type, int bias_type, bool matrix) {
    Projection projection(random, outputs, inputs, type, bias_type);
    std::vector<float> x = random_floats(random, (size_t)count * inputs);
    std::vector<float> before = random_floats(random, (size_t)count * outputs);
    Expected set, added;
    for (int t = 0; t < count; t++) {
        const std::vector<float> &weight = projection.weight.numbers, &bias = projection.bias.numbers;
        const float *to_add = &before[(size_t)t * outputs];
        reference::linear(set, weight, &x[(size_t)t * inputs], bias, nullptr, outputs, inputs);
        reference::linear(added, weight, &x[(size_t)t * inputs], bias, to_add, outputs, inputs);
    }
    CHECK(worst(product(projection, x, count, {}, 1, matrix), set) <= 1);
    CHECK(worst(product(projection, x, count, before, 1, matrix), added) <= 1);
}

TEST_CASE("linear() is within the bound of a float32 sum in double precision") {
    Random random{3};
    for (DType type : dtypes)
        for (int bias_type = 0; bias_type < 4; bias_type++)
            for (int inputs : {1, 16, 41, 576}) check_within_bound(random, 35, inputs, 8, type, bias_type, false);
}

TEST_CASE("linear() has the same bits with 1, 2, 3 and 5 threads") {
    Random random{4};
    for (DType type : product_types) {
        for (int count : {1, 9}) {
            Projection projection(random, 333, 70, type, 1);
            std::vector<float> x = random_floats(random, (size_t)count * 70);
            std::vector<float> before = random_floats(random, (size_t)count * 333);
            for (int threads : {2, 3, 5}) {
                CHECK(same_bits(product(projection, x, count), product(projection, x, count, {}, threads)));
                CHECK(same_bits(product(projection, x, count, before), product(projection, x, count, before, threads)));
            }
        }
    }
}

TEST_CASE("linear() gives a token the same bits alone and among others") {
    Random random{5};
    for (DType type : product_types) {
        Projection projection(random, 70, 100, type, 3);
        std::vector<float> x = random_floats(random, 14 * 100), together = product(projection, x, 14), alone;
        for (int t = 0; t < 14; t++) {
            std::vector<float> y = product(projection, {x.begin() + t * 100, x.begin() + (t + 1) * 100}, 1);
            alone.insert(alone.end(), y.begin(), y.end());
        }
        CHECK(same_bits(together, alone));
    }
}

// ---- Int8 weights ------------------------------------------------------------------------------------------

TEST_CASE("whole numbers are multiplied without a loss, whatever their signs") {
    int8_t weights[lanes][4];
    int left = -127, right = 127;
    for (int round = 0; round < 255 * 255; round++) {
        Int8x4 x;
        int expected[lanes] = {};
        for (int c = 0; c < 4; c++) {
            x.number[c] = (int8_t)right;
            x.magnitude[c] = (uint8_t)std::abs(right);
            for (int i = 0; i < lanes; i++) {
                weights[i][c] = (int8_t)((left + i + 127) % 255 - 127);
                expected[i] += weights[i][c] * right;
            }
            if (round % 2) right = right == -127 ? 127 : right - 1;  // all four alike, and four different ones
        }
        left = left == 127 ? -127 : left + 1;
        if (left == -127) right = right == -127 ? 127 : right - 1;
        float found[lanes];
        store(found, to_floats(add_products(add_products({}, weights, x), weights, x)));
        for (int i = 0; i < lanes; i++) REQUIRE(found[i] == 2 * expected[i]);
    }
}

// The largest magnitude of 32 neighbours, over 127: their distance from one whole number to the next.
static std::vector<double> steps_of(const float *numbers, int count) {
    std::vector<double> steps;
    for (int first = 0; first < count; first += int8_group) {
        double most = 0;
        for (int i = first; i < std::min(first + int8_group, count); i++)
            most = std::max(most, std::fabs((double)numbers[i]));
        steps.push_back(most / 127);
    }
    return steps;
}

TEST_CASE("int8 products are within what rounding weights and inputs takes") {
    Random random{21};
    for (int inputs : {1, 31, 32, 33, 70, 576}) {
        Projection projection(random, 37, inputs, DType::int8);
        std::vector<float> x = random_floats(random, (size_t)3 * inputs), y = product(projection, x, 3);
        double worst_share = 0;
        for (int t = 0; t < 3; t++) {
            std::vector<double> x_steps = steps_of(&x[(size_t)t * inputs], inputs);
            for (int o = 0; o < 37; o++) {
                const float *weight = &projection.weight.numbers[(size_t)o * inputs];
                std::vector<double> weight_steps = steps_of(weight, inputs);
                double exact = 0, bound = 0;
                for (int i = 0; i < inputs; i++) {
                    double number = x[(size_t)t * inputs + i], dx = x_steps[i / int8_group] / 2;
                    double dw = weight_steps[i / int8_group] / 2 * (1 + 0x1p-10);  // its scale is an f16
                    exact += weight[i] * number;
                    bound += std::fabs(weight[i]) * dx + std::fabs(number) * dw + dx * dw;
                    bound += std::fabs(weight[i] * number) * 0x1p-18;  // sums in float32
                }
                worst_share = std::max(worst_share, std::fabs(y[(size_t)t * 37 + o] - exact) / bound);
            }
        }
        CHECK(worst_share <= 1);
        CHECK(worst_share > 0.01);  // it is a bound that is felt
    }
}

TEST_CASE("int8 numbers of a vector: zeros, tiny and huge numbers, and what is not a number") {
    float x[int8_group] = {};
    Int8Group group;
    quantize(group, x, int8_group);
    CHECK(group.scale == 0);
    for (const Int8x4 &four : group.four) CHECK((word(four.number) == 0 && word(four.magnitude) == 0));
    for (float most : {1e-45f, 3e-44f, 1e-38f, 1.0f, 3e38f}) {
        x[5] = -most;
        x[6] = most / 3;
        quantize(group, x, 7);
        CHECK(std::fabs((double)group.four[1].number[1] * group.scale + most) <= group.scale / 2 + 2e-43);
        CHECK(std::fabs((double)group.four[1].number[2] * group.scale - x[6]) <= group.scale / 2 * (1 + 1e-6) + 2e-43);
        CHECK(group.four[1].magnitude[1] == -group.four[1].number[1]);
    }
    Random random{22};
    for (float bad : {NAN, infinity, -infinity}) {
        Projection projection(random, 9, 70, DType::int8);
        std::vector<float> vectors = random_floats(random, 2 * 70);
        vectors[66] = bad;
        std::vector<float> y = product(projection, vectors, 2);
        for (int o = 0; o < 9; o++) CHECK((!std::isfinite(y[o]) && std::isfinite(y[9 + o])));
    }
}

TEST_CASE("int8 weights: zero rows stay zero; NaN, infinite and too large ones are refused") {
    Random random{23};
    Projection zero(random, 9, 40, DType::f32);
    std::fill((float *)zero.weight.bytes.data(), (float *)zero.weight.bytes.data() + 9 * 40, 0.0f);
    REQUIRE(zero.to_int8());
    for (float number : product(zero, random_floats(random, 40), 1)) CHECK(number == 0);
    for (float bad : {NAN, infinity, -infinity, 8.4e6f}) {
        for (int at : {0, 39, 8 * 40 + 33}) {
            Projection projection(random, 9, 40, DType::f32);
            ((float *)projection.weight.bytes.data())[at] = bad;
            CHECK_FALSE(projection.to_int8());
        }
    }
}

// ---- Many tokens -------------------------------------------------------------------------------------------

TEST_CASE("products of many tokens are within the bound of a float32 sum in double precision") {
    Random random{24};
    for (DType type : dtypes) {
        for (int outputs : {1, panel_rows - 1, panel_rows, panel_rows + 1, 67}) {
            for (int inputs : {1, 33, panel_depth, panel_depth + 1, 2 * panel_depth + 1}) {
                CAPTURE(outputs);
                CAPTURE(inputs);
                for (int count : {1, panel_tokens - 1, panel_tokens, 2 * panel_tokens + 1})
                    check_within_bound(random, outputs, inputs, count, type, count % 4, true);
            }
        }
    }
}

TEST_CASE("products of many tokens: a token's bits are the same alone and among others, with any number of threads") {
    Random random{25};
    const int inputs = panel_depth + 5, count = 2 * panel_tokens + 3;
    for (DType type : product_types) {
        Projection projection(random, 70, inputs, type, 2);
        std::vector<float> x = random_floats(random, count * inputs), alone;
        std::vector<float> together = matrix_product(projection, x, count);
        CHECK(same_bits(together, product(projection, x, count)) == (type == DType::int8));  // it is another order
        for (int threads : {2, 3, 5}) CHECK(same_bits(together, matrix_product(projection, x, count, {}, threads)));
        for (int t = 0; t < count; t++) {
            std::vector<float> y =
                matrix_product(projection, {x.begin() + t * inputs, x.begin() + (t + 1) * inputs}, 1);
            alone.insert(alone.end(), y.begin(), y.end());
        }
        CHECK(same_bits(together, alone));
    }
}

TEST_CASE("matrix tiles are within the bound of a float32 sum in double precision" * doctest::skip(!amx_allowed())) {
    Random random{15};
    for (int outputs : {32, 96, 128, 224}) {
        for (int inputs : {32, 64, 576}) {
            for (int count : {1, 31, 32, 33, 70}) {
                CAPTURE(outputs);
                CAPTURE(inputs);
                CAPTURE(count);
                check_within_bound(random, outputs, inputs, count, DType::bf16, count % 4, true);
            }
        }
    }
}

TEST_CASE("matrix tiles give a token the same bits alone and among others, with any number of threads" *
          doctest::skip(!amx_allowed())) {
    Random random{16};
    Projection projection(random, 224, 96, DType::bf16, 2);
    std::vector<float> x = random_floats(random, 70 * 96), together = matrix_product(projection, x, 70), alone;
    CHECK(!same_bits(together, product(projection, x, 70)));  // it is another order of summation
    for (int threads : {2, 3, 5}) CHECK(same_bits(together, matrix_product(projection, x, 70, {}, threads)));
    for (int t = 0; t < 70; t++) {
        std::vector<float> y = matrix_product(projection, {x.begin() + t * 96, x.begin() + (t + 1) * 96}, 1);
        alone.insert(alone.end(), y.begin(), y.end());
    }
    CHECK(same_bits(together, alone));
}

TEST_CASE("matrix tiles use every part of a number" * doctest::skip(!amx_allowed())) {
    Random random{18};
    const int outputs = 32, inputs = 64;
    Projection projection(random, outputs, inputs, DType::bf16, 0);
    projection.linear.bias = {};
    std::vector<float> values = random_floats(random, inputs), x((size_t)inputs * inputs);
    for (int t = 0; t < inputs; t++) x[(size_t)t * inputs + t] = values[t];  // token t has one number, the t-th
    std::vector<float> y = matrix_product(projection, x, inputs);
    for (int t = 0; t < inputs; t++) {
        for (int o = 0; o < outputs; o++) {
            double exact = (double)values[t] * projection.weight.numbers[(size_t)o * inputs + t];
            REQUIRE(std::fabs(y[(size_t)t * outputs + o] - exact) <= 0x1p-22 * std::fabs(exact));  // two sums, rounded
        }
    }
}

TEST_CASE("three bf16 parts add up to the number") {
    Random random{17};
    std::vector<float> x = random_floats(random, 32 * 64);
    x[0] = 0, x[1] = 1e30f, x[2] = -3e-20f, x[3] = 0x1.fffffep0f;
    InputBuffers buffers;
    buffers.resize(32, 64);
    Inputs in;
#pragma omp parallel num_threads(2)
    in = inputs_of(buffers, x.data(), 32, {nullptr, DType::bf16, 1, 64}, true);
    REQUIRE((in.in_parts != nullptr) == amx_allowed());
    for (size_t i = 0; in.in_parts && i < x.size(); i++) {
        double total = 0;
        for (int p = 0; p < bf16_parts; p++) total += to_float(in.in_parts[p * x.size() + i]);
        REQUIRE(total == x[i]);
    }
}

// ---- Embedding and RMSNorm ---------------------------------------------------------------------------------

TEST_CASE("embed() copies each token's row") {
    Random random{6};
    for (DType type : dtypes) {
        for (int threads : {1, 3}) {
            Stored table = stored(random_floats(random, 11 * 19), type, 11);
            const int tokens[] = {10, 0, 3, 3, 7};
            std::vector<float> x(5 * 19, NAN), expected;
#pragma omp parallel num_threads(threads)
            embed(x.data(), table.tensor, tokens, 5);
            for (int token : tokens)
                expected.insert(expected.end(), &table.numbers[token * 19], &table.numbers[token * 19] + 19);
            CHECK(same_bits(x, expected));
        }
    }
}

TEST_CASE("rms_norm() is within its bound, in place too, whatever the number of threads") {
    Random random{7};
    for (DType type : dtypes) {
        for (int width : {1, 8, 17, 64, 576}) {
            for (double epsilon : {1e-6, 0.5}) {
                const int count = 7;
                Stored gain = stored(random_floats(random, width), type, 1);
                std::vector<float> x = random_floats(random, (size_t)count * width, -0.3, 0.3), in_place = x;
                std::vector<float> out(x.size(), NAN), threaded(x.size(), NAN);
                Expected expected;
                for (int t = 0; t < count; t++)
                    reference::rms_norm(expected, &x[(size_t)t * width], gain.numbers, epsilon);
                rms_norm(out.data(), x.data(), gain.tensor, count, epsilon);
                rms_norm(in_place.data(), in_place.data(), gain.tensor, count, epsilon);
#pragma omp parallel num_threads(3)
                rms_norm(threaded.data(), x.data(), gain.tensor, count, epsilon);
                CHECK(worst(out, expected) <= 1);
                CHECK(same_bits(out, in_place));
                CHECK(same_bits(out, threaded));
            }
        }
    }
}

TEST_CASE("rms_norm() of zeros is zero") {
    Stored gain = stored(std::vector<float>(8, 1), DType::f32, 1);
    std::vector<float> x(8);
    rms_norm(x.data(), x.data(), gain.tensor, 1, 1e-5);
    CHECK(x == std::vector<float>(8));
}

// ---- Rotary positions --------------------------------------------------------------------------------------

Config rope_config(int head_dim, double theta, RopeScaling scaling = {}) {
    Config config;
    config.head_dim = head_dim, config.rope_theta = theta, config.rope = scaling;
    return config;
}

// x (positions, heads, head_dim), rotated.
std::vector<float> rotated(std::vector<float> x, const std::vector<float> &frequencies,
                           const std::vector<int> &positions, int heads, int threads = 1) {
    int count = (int)positions.size(), head_dim = 2 * (int)frequencies.size();
    std::vector<float> turn((size_t)count * head_dim, NAN);
#pragma omp parallel num_threads(threads)
    {
        rope_angles(turn.data(), frequencies, positions.data(), count);
        barrier();
        rope(x.data(), turn.data(), count, heads, head_dim);
    }
    return x;
}

TEST_CASE("rope() turns each pair by its position's angle, whatever the number of threads") {
    Random random{8};
    const std::vector<int> positions = {0, 1, 2, 100, 99, 8191, 100000};
    for (int head_dim : {2, 8, 64, 80, 128}) {
        for (int heads : {1, 3}) {
            std::vector<float> frequencies = rope_frequencies(rope_config(head_dim, 10000));
            std::vector<float> x = random_floats(random, positions.size() * heads * head_dim);
            Expected expected;
            for (size_t t = 0; t < positions.size(); t++)
                for (int head = 0; head < heads; head++)
                    reference::rope(expected, &x[(t * heads + head) * head_dim], positions[t], frequencies);
            std::vector<float> turned = rotated(x, frequencies, positions, heads);
            CHECK(worst(turned, expected) <= 1);
            CHECK(same_bits(turned, rotated(x, frequencies, positions, heads, 3)));
        }
    }
}

TEST_CASE("rope() at position 0 changes nothing, and nowhere a length") {
    Random random{9};
    std::vector<float> frequencies = rope_frequencies(rope_config(64, 10000)), x = random_floats(random, 64);
    CHECK(rotated(x, frequencies, {0}, 1) == x);
    double length = 0;
    for (float number : x) length += (double)number * number;
    for (int position : {1, 17, 1000, 131071}) {
        double turned = 0;
        for (float number : rotated(x, frequencies, {position}, 1)) turned += (double)number * number;
        CHECK(std::fabs(turned - length) <= reference::gamma(10) * length);
    }
}

TEST_CASE("what a rotated query and key say to each other depends on their distance alone") {
    Random random{10};
    const int head_dim = 64;
    std::vector<float> frequencies = rope_frequencies(rope_config(head_dim, 10000));
    std::vector<float> query = random_floats(random, head_dim), key = random_floats(random, head_dim);
    auto score = [&](int query_position, int key_position) {
        std::vector<float> q = rotated(query, frequencies, {query_position}, 1);
        std::vector<float> k = rotated(key, frequencies, {key_position}, 1);
        double sum = 0;
        for (int i = 0; i < head_dim; i++) sum += (double)q[i] * k[i];
        return sum;
    };
    auto error = [&](int query_position, int key_position) {  // of the angles, and of the rotated numbers
        double sum = 0;
        for (int i = 0; i < head_dim / 2; i++) {
            double size = std::hypot(query[i], query[i + head_dim / 2]) * std::hypot(key[i], key[i + head_dim / 2]);
            double angle = (double)(query_position + key_position) * frequencies[i];
            sum += size * (reference::unit * angle + reference::gamma(16));
        }
        return sum;
    };
    for (int distance : {0, 1, 13, 500}) {
        for (int position : {1, 7, 200, 4000}) {
            double bound = error(distance, 0) + error(position + distance, position);
            CHECK(std::fabs(score(distance, 0) - score(position + distance, position)) <= bound);
        }
    }
    CHECK(std::fabs(score(1, 0) - score(0, 1)) > 0.1);  // but on its sign, too
}

TEST_CASE("rope frequencies: none, linear and llama3 scaling") {
    RopeScaling none, linear, llama3, narrow;
    linear.kind = RopeScaling::linear, linear.factor = 4;
    llama3.kind = RopeScaling::llama3, llama3.factor = 32, llama3.original_context = 8192;
    narrow = llama3, narrow.factor = 8, narrow.low_freq_factor = 2, narrow.high_freq_factor = 3;
    for (int head_dim : {2, 64, 80, 128, 256}) {
        for (double theta : {10000.0, 500000.0}) {
            for (const RopeScaling &scaling : {none, linear, llama3, narrow}) {
                CAPTURE(head_dim);
                CAPTURE(theta);
                CAPTURE((int)scaling.kind);
                std::vector<float> got = rope_frequencies(rope_config(head_dim, theta, scaling));
                REQUIRE((int)got.size() == head_dim / 2);
                Expected expected;
                for (int i = 0; i < head_dim / 2; i++) {
                    double plain = std::exp(-2.0 * i / head_dim * std::log(theta)), frequency = plain;
                    double wave = 2 * M_PI / plain, error = reference::gamma(std::log(theta) + 5);
                    if (scaling.kind == RopeScaling::linear) frequency = plain / scaling.factor;
                    if (scaling.kind == RopeScaling::llama3) {
                        double low = scaling.low_freq_factor, high = scaling.high_freq_factor;
                        double smooth = (scaling.original_context / wave - low) / (high - low);
                        if (wave > scaling.original_context / low)
                            frequency = plain / scaling.factor;
                        else if (wave >= scaling.original_context / high)
                            frequency = (1 - smooth) * plain / scaling.factor + smooth * plain;
                        error *= 1 + scaling.factor * high / (high - low);
                    }
                    expected.add(frequency, error * frequency);
                }
                CHECK(worst(got, expected) <= 1);
            }
        }
    }
}

// ---- SwiGLU ------------------------------------------------------------------------------------------------

TEST_CASE("swiglu() is within its bound for every length and number of threads") {
    Random random{11};
    for (int count : {1, 15, 16, 17, 255, 256, 257, 1000, 1537}) {
        CAPTURE(count);
        std::vector<float> gate = random_floats(random, count, -30, 30), up = random_floats(random, count);
        std::vector<float> out(count);
        Expected expected;
        for (int i = 0; i < count; i++) reference::swiglu(expected, gate[i], up[i]);
        swiglu(out.data(), gate.data(), up.data(), count);
        CHECK(worst(out, expected) <= 1);
        for (int threads : {2, 3, 5}) {
            std::vector<float> threaded = gate;
#pragma omp parallel num_threads(threads)
            swiglu(threaded.data(), threaded.data(), up.data(), count);
            CHECK(same_bits(out, threaded));
        }
    }
}

TEST_CASE("swiglu() of extreme numbers is finite, of infinities and NaN it is not, and neighbours are untouched") {
    std::vector<float> gate = {1000, -1000, 1e30f, -1e30f, 88, -88, -89, -104, 0, -0.0f, 1e-40f, 3};
    std::vector<float> up(gate.size(), 2), out(gate.size());
    Expected expected;
    for (float x : gate) reference::swiglu(expected, x, 2);
    for (double &bound : expected.bound) bound += 1e-44;
    swiglu(out.data(), gate.data(), up.data(), (int64_t)out.size());
    CHECK(worst(out, expected) <= 1);

    std::vector<float> broken = {infinity, 1, -infinity, 1, NAN, 1, 1, 1};
    swiglu(broken.data(), broken.data(), std::vector<float>{1, 1, 1, 1, 1, 1, NAN, 1}.data(), 8);
    CHECK(broken[0] == infinity);
    CHECK(!std::isfinite(broken[2]));
    CHECK(std::isnan(broken[4]));
    CHECK(std::isnan(broken[6]));
    for (int i : {1, 3, 5, 7}) CHECK(broken[i] == doctest::Approx(0.7310586));
}

// ---- Threads -----------------------------------------------------------------------------------------------

TEST_CASE("nobody passes barrier() before everybody came") {
#ifdef _OPENMP
    for (int threads : {1, 2, 3, 5}) {
        std::atomic<int> arrived{0}, early{0};
#pragma omp parallel num_threads(threads)
        {
            for (int round = 1; round <= 200; round++) {
                arrived++;
                barrier();
                early += arrived < round * omp_get_num_threads();
                barrier();
            }
        }
        CHECK(early == 0);
    }
#endif
}
