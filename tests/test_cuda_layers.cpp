// layers.cu and what stores a pass, on the card: every kernel against double precision, or against the CPU's bytes.
// With tests/cuda_on_cpu.h the kernels run on the CPU; nvcc compiles the same for a real card.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#ifndef __CUDACC__
#include "cuda_on_cpu.h"
#endif
#include "../attention.cu"

#include <doctest/doctest.h>

#include <limits>

#include "cuda_caches.h"
#include "reference.h"

using reference::Expected;
using reference::Random;
using reference::random_floats;
using reference::same_bits;
using reference::worst;

static const DType dtypes[] = {DType::f32, DType::f16, DType::bf16};
constexpr float infinity = std::numeric_limits<float>::infinity();

// ---- Helpers -----------------------------------------------------------------------------------------------

static Device &card() {
    static Device device;
    return device;
}

// A tensor on the card, and its numbers as they read after rounding to its type.
struct OnCard {
    DeviceArray<char> memory;
    std::vector<float> numbers;
    Tensor tensor;
};

static OnCard on_card(const std::vector<float> &numbers, DType type, int64_t rows) {
    OnCard result{{}, numbers, {nullptr, type, rows, (int64_t)numbers.size() / rows}};
    std::vector<char> bytes(numbers.size() * dtype_bytes(type));
    with_numbers(Tensor{bytes.data(), type, 0, 0}, [&](auto *data) {
        using Number = std::decay_t<decltype(*data)>;
        for (size_t i = 0; i < numbers.size(); i++) {
            from_float(((Number *)bytes.data())[i], numbers[i]);
            result.numbers[i] = to_float(data[i]);
        }
    });
    result.memory = upload(card(), bytes);
    result.tensor.data = result.memory.data();
    return result;
}

static OnCard random_on_card(Random &random, DType type, int rows, int cols) {
    return on_card(random_floats(random, (size_t)rows * cols), type, rows);
}

// Memory that nothing was written to: NaN.
static DeviceArray<float> unwritten(size_t count) { return upload(card(), std::vector<float>(count, NAN)); }

template <class Number>
static std::vector<float> numbers_of(const DeviceArray<Number> &array, size_t count) {
    std::vector<float> numbers;
    for (Number number : download(card(), array.data(), count)) numbers.push_back(to_float(number));
    return numbers;
}

// Calls use(number) with a number of each type that weights have.
template <class Use>
static void for_each_number(Use use) {
    use(float{}), use(f16{}), use(bf16{});
}

static const double half_step[] = {0x1p-24, 0x1p-11, 0x1p-8};  // of a number rounded to f32, f16, bf16

template <class Number>
static double rounding(Number) {
    return std::is_same_v<Number, float> ? half_step[0] : std::is_same_v<Number, f16> ? half_step[1] : half_step[2];
}

// ---- One vector --------------------------------------------------------------------------------------------

struct ProductCase {
    std::vector<int> outputs;  // of the matrices
    int inputs, count;
    DType type;
    bool norm, bias, add, swiglu;
};

// What a number sums up to in double precision, and how far a float32 sum of `terms` may be from it.
struct Sum {
    double value = 0, size = 0, error = 0;
    void add(double weight, double x, double x_error) {
        value += weight * x, size += std::fabs(weight * x), error += std::fabs(weight) * x_error;
    }
    double bound(int terms) const { return reference::gamma(terms + 2) * size + error; }
};

// The products of a case as the card leaves them and as they should be; -1: with the plain rung.
static double run_products(Random &random, const ProductCase &shape, bool plain) {
    const double epsilon = 1e-5;
    int inputs = shape.inputs, matrices = (int)shape.outputs.size();
    std::vector<float> x = random_floats(random, (size_t)shape.count * inputs, -2, 3);
    DeviceArray<float> there = upload(card(), x);
    OnCard gain = random_on_card(random, DType::bf16, 1, inputs);
    Products task;
    task.x = there.data();
    task.count = shape.count;
    task.epsilon = (float)epsilon;
    task.store = shape.add ? Store::add : Store::set;
    task.swiglu = shape.swiglu;
    if (shape.norm) task.norm = gain.tensor;
    std::vector<OnCard> weights, biases;
    std::vector<DeviceArray<float>> results;
    std::vector<std::vector<float>> before;
    for (int m = 0; m < matrices; m++) {
        weights.push_back(random_on_card(random, shape.type, shape.outputs[m], inputs));
        biases.push_back(random_on_card(random, DType::f16, 1, shape.outputs[m]));
        before.push_back(random_floats(random, (size_t)shape.count * shape.outputs[m]));
        results.push_back(shape.add ? upload(card(), before[m]) : unwritten(before[m].size()));
        task.add({weights[m].tensor, shape.bias ? biases[m].tensor : Tensor{}}, results[m].data());
    }
    if (plain) {
        dim3 blocks(blocks_for(task.rows() / (shape.swiglu ? 2 : 1), stream_warps), shape.count);
        Grid grid = {blocks, block_threads, shared_size(stream_warps * sizeof(float))};
        with_numbers(weights[0].tensor, [&](auto *weight) {
            launch(card(), grid, linear_plain_kernel<std::decay_t<decltype(*weight)>>, task);
        });
    } else {
        linear(card(), task);
    }
    double most = 0;
    for (int t = 0; t < shape.count; t++) {
        Expected read;  // what the products read
        std::vector<float> vector(x.begin() + (size_t)t * inputs, x.begin() + (size_t)(t + 1) * inputs);
        if (shape.norm)
            reference::rms_norm(read, vector.data(), gain.numbers, epsilon);
        else
            for (float number : vector) read.add(number, 0);
        auto sum_of = [&](int m, int o) {
            Sum sum;
            for (int i = 0; i < inputs; i++)
                sum.add(weights[m].numbers[(size_t)o * inputs + i], read.value[i], read.bound[i]);
            if (shape.bias) sum.add(biases[m].numbers[o], 1, 0);
            return sum;
        };
        for (int m = 0; m < (shape.swiglu ? 1 : matrices); m++) {
            Expected expected;
            for (int o = 0; o < shape.outputs[m]; o++) {
                Sum sum = sum_of(m, o);
                double value = sum.value, bound = sum.bound(inputs), old = 0;
                if (shape.swiglu) {  // silu changes by at most 1.1 times what its argument does
                    Sum up = sum_of(1, o);
                    double silu = value / (1 + std::exp(-value));
                    bound = (std::fabs(silu) + 1.1 * bound) * (std::fabs(up.value) + up.bound(inputs)) *
                                (1 + reference::gamma(10)) -
                            std::fabs(silu * up.value);
                    value = silu * up.value;
                }
                if (shape.add) old = before[m][(size_t)t * shape.outputs[m] + o];
                expected.add(value + old, bound + reference::unit * std::fabs(value + old));
            }
            std::vector<float> all = numbers_of(results[m], before[m].size());
            auto row = all.begin() + (size_t)t * shape.outputs[m];
            most = std::max(most, worst({row, row + shape.outputs[m]}, expected));
        }
    }
    return most;
}

TEST_CASE("products of one vector: both rungs, every type, narrow and wide rows, ends of tiles") {
    Random random{1};
    for (DType type : dtypes) {
        for (int inputs : {1, 7, 8, 64, 200, 576, 1000, 2048, 4104, 9000, 18944, 33000}) {
            for (int outputs : {1, 3, 66, 131}) {
                if (inputs > 1000 && outputs > 3) continue;
                CAPTURE(dtype_name(type));
                CAPTURE(inputs);
                CAPTURE(outputs);
                ProductCase shape = {{outputs}, inputs, 1, type, false, false, false, false};
                CHECK(run_products(random, shape, false) <= 1);
                CHECK(run_products(random, shape, true) <= 1);
            }
        }
    }
}

TEST_CASE("what stands before and behind the products of one vector: norm, bias, residual sum, SwiGLU, three in one") {
    Random random{2};
    for (bool plain : {false, true}) {
        for (DType type : dtypes) {
            for (int inputs : {40, 577, 1024}) {
                CAPTURE(plain);
                CAPTURE(dtype_name(type));
                CAPTURE(inputs);
                CHECK(run_products(random, {{70}, inputs, 1, type, true, false, false, false}, plain) <= 1);
                CHECK(run_products(random, {{70}, inputs, 1, type, false, true, true, false}, plain) <= 1);
                CHECK(run_products(random, {{64, 16, 16}, inputs, 1, type, true, true, false, false}, plain) <= 1);
                CHECK(run_products(random, {{9, 5, 1}, inputs, 3, type, true, true, true, false}, plain) <= 1);
                CHECK(run_products(random, {{67, 67}, inputs, 2, type, true, false, false, true}, plain) <= 1);
                CHECK(run_products(random, {{33, 33}, inputs, 1, type, true, true, false, true}, plain) <= 1);
            }
        }
    }
}

TEST_CASE("a vector's products have the same bits alone and beside others") {
    Random random{3};
    const int inputs = 600, outputs = 70, count = 3;
    std::vector<float> x = random_floats(random, (size_t)count * inputs);
    DeviceArray<float> there = upload(card(), x), together = unwritten(count * outputs), alone = unwritten(outputs);
    OnCard weight = random_on_card(random, DType::bf16, outputs, inputs);
    auto run = [&](const float *from, int vectors, float *to) {
        Products task;
        task.x = from;
        task.count = vectors;
        task.add({weight.tensor, {}}, to);
        linear(card(), task);
    };
    run(there.data(), count, together.data());
    for (int t = 0; t < count; t++) {
        run(there.data() + t * inputs, 1, alone.data());
        CHECK(same_bits(download(card(), alone.data(), outputs),
                        download(card(), together.data() + t * outputs, outputs)));
    }
}

// ---- Many vectors ------------------------------------------------------------------------------------------

TEST_CASE("products of many vectors: bias, residual sum, every type") {
    Random random{4};
    for_each_number([&](auto number) {
        using Number = decltype(number);
        const DType type = std::is_same_v<Number, float> ? DType::f32
                           : std::is_same_v<Number, f16> ? DType::f16
                                                         : DType::bf16;
        for (int count : {1, 5, 33}) {
            const int inputs = 72, outputs = 21;
            OnCard weight = random_on_card(random, type, outputs, inputs), bias = random_on_card(random, type, 1, 21);
            OnCard x = random_on_card(random, type, count, inputs);
            std::vector<float> before = random_floats(random, (size_t)count * outputs);
            for (bool add : {false, true}) {
                DeviceArray<float> y = add ? upload(card(), before) : unwritten(before.size());
                linear(card(), y.data(), (const Number *)x.tensor.data, {weight.tensor, bias.tensor}, count,
                       add ? Store::add : Store::set);
                Expected expected;
                for (int t = 0; t < count; t++)
                    reference::linear(expected, weight.numbers, &x.numbers[t * inputs], bias.numbers,
                                      add ? &before[t * outputs] : nullptr, outputs, inputs);
                CHECK(worst(numbers_of(y, before.size()), expected) <= 1);
            }
        }
    });
}

TEST_CASE("embedding, RMSNorm, SwiGLU and conversion write each number as their reader wants it") {
    Random random{5};
    for (DType type : dtypes) {
        OnCard table = random_on_card(random, type, 50, 24);
        DeviceArray<int> tokens = upload(card(), std::vector<int>{49, 0, 7, 7});
        DeviceArray<float> x = unwritten(4 * 24);
        embed(card(), x.data(), table.tensor, tokens.data(), 4);
        std::vector<float> expected, got = numbers_of(x, 4 * 24);
        for (int token : {49, 0, 7, 7})
            expected.insert(expected.end(), &table.numbers[token * 24], &table.numbers[token * 24] + 24);
        CHECK(same_bits(got, expected));
    }
    for_each_number([&](auto number) {
        using Number = decltype(number);
        auto check = [&](const DeviceArray<Number> &got, Expected expected) {
            for (size_t i = 0; i < expected.value.size(); i++)
                expected.bound[i] += rounding(number) * (std::fabs(expected.value[i]) + expected.bound[i]) + 0x1p-25;
            CHECK(worst(numbers_of(got, expected.value.size()), expected) <= 1);
        };
        for (int width : {1, 24, 255, 1000}) {
            const int count = 3;
            std::vector<float> x = random_floats(random, (size_t)count * width, -3, 4);
            DeviceArray<float> there = upload(card(), x);
            DeviceArray<Number> out;
            out.resize(card(), x.size());
            OnCard gain = random_on_card(random, DType::f16, 1, width);
            rms_norm(card(), out.data(), there.data(), gain.tensor, count, 1e-6);
            Expected normed, converted, gated;
            for (int t = 0; t < count; t++) reference::rms_norm(normed, &x[t * width], gain.numbers, 1e-6);
            check(out, normed);
            convert(card(), out.data(), there.data(), (int64_t)x.size());
            for (float one : x) converted.add(one, 0);
            check(out, converted);
            std::vector<float> up = random_floats(random, x.size());
            DeviceArray<float> up_there = upload(card(), up);
            swiglu(card(), out.data(), there.data(), up_there.data(), (int64_t)x.size());
            for (size_t i = 0; i < x.size(); i++) reference::swiglu(gated, x[i], up[i]);
            check(out, gated);
        }
    });
}

static std::vector<int> likeliest_of(const std::vector<float> &logits, int vocabulary) {
    int count = (int)logits.size() / vocabulary;
    DeviceArray<float> there = upload(card(), logits);
    DeviceArray<unsigned long long> best = upload(card(), std::vector<unsigned long long>(count, 0));
    argmax(card(), best.data(), there.data(), count, vocabulary);
    std::vector<int> tokens;
    for (unsigned long long rank : download(card(), best.data(), count)) tokens.push_back(token_of(rank));
    return tokens;
}

TEST_CASE("the likeliest token is the first of equals, and a logit that is not finite is told") {
    const int vocabulary = 3001;
    auto likeliest = [](const std::vector<float> &logits) { return likeliest_of(logits, vocabulary); };
    Random random{6};
    std::vector<float> logits = random_floats(random, 2 * vocabulary, -9, -1);
    logits[17] = logits[2900] = -0.5f;
    logits[vocabulary + 3000] = 1e30f;
    CHECK(likeliest(logits) == std::vector<int>{17, 3000});
    CHECK(likeliest(std::vector<float>(vocabulary, -3)) == std::vector<int>{0});
    for (float bad : {NAN, infinity, -infinity, -NAN}) {
        std::vector<float> damaged = logits;
        damaged[1234] = bad;
        CHECK(likeliest(damaged) == std::vector<int>{-1, 3000});
    }
}

// ---- Norm, rotation and storing ----------------------------------------------------------------------------

// One pass of one sequence through rope_and_store(), beside the CPU's functions.
struct Storing {
    Heads heads;
    int count;
    std::vector<float> query, key, value, frequencies;
    OnCard query_norm, key_norm;
    Storing(Random &random, const Heads &shape, int rows)
        : heads(shape),
          count(rows),
          query(random_floats(random, (size_t)rows * shape.query * shape.width, -3, 3)),
          key(random_floats(random, (size_t)rows * shape.kv * shape.width, -3, 3)),
          value(random_floats(random, (size_t)rows * shape.kv * shape.width, -3, 3)),
          query_norm(random_on_card(random, DType::f32, 1, shape.width)),
          key_norm(random_on_card(random, DType::bf16, 1, shape.width)) {
        for (int i = 0; i < shape.width / 2; i++) frequencies.push_back(std::pow(10000.0f, -2.0f * i / shape.width));
    }
    Expected turned(const std::vector<float> &x, const OnCard &gain, bool norm, int position) const {
        Expected out;
        size_t width = heads.width, vectors = x.size() / width;
        for (size_t v = 0; v < vectors; v++) {
            std::vector<float> one(x.begin() + v * width, x.begin() + (v + 1) * width);
            double norm_error = 0, most = 0;
            if (norm) {
                Expected normed;
                reference::rms_norm(normed, one.data(), gain.numbers, 1e-6);
                for (size_t i = 0; i < width; i++) {
                    one[i] = (float)normed.value[i];
                    most = std::max(most, std::fabs(normed.value[i]));
                }
                norm_error = 2 * reference::gamma((double)width + 10) * most;
            }
            reference::rope(out, one.data(), position + (int)(v / (vectors / count)), frequencies);
            for (size_t i = v * width; norm && i < (v + 1) * width; i++) out.bound[i] += norm_error;
        }
        return out;
    }
};

// The bytes of a cache's side, in the order of (layer, sequence, position, head).
static std::vector<char> stored_bytes(const Cache &cache, const CacheRows &side, int sequence, int from, int to) {
    std::vector<char> bytes;
    for (int t = from; t < to; t++)
        for (int head = 0; head < side.kv_heads; head++) {
            const char *row = side.at(1, row_of(cache, sequence, t), head);
            bytes.insert(bytes.end(), row, row + side.row_bytes);
        }
    return bytes;
}

static void bring_back(const Device &device, const CacheView &view, Cache &cache) {
    auto bring = [&](const CacheRows &from, CacheRows &to) {
        if (to.data) copy(device, to.data, from.data, to.bytes(cache.shape.layers));
    };
    bring(view.keys, cache.keys);
    bring(view.values, cache.values);
    bring(view.recent_keys, cache.recent_keys);
    bring(view.recent_values, cache.recent_values);
    bring(view.sink_keys, cache.sink_keys);
    bring(view.sink_values, cache.sink_values);
    device.wait();
}

// The vectors of a pass as the card has them once they are stored.
struct StoredPass {
    std::vector<float> query, key, value;
};

static StoredPass store_on_card(const Storing &pass, const CardCache &cache, int layer, const std::vector<Span> &spans,
                                bool norm) {
    DeviceArray<float> query = upload(card(), pass.query), key = upload(card(), pass.key);
    DeviceArray<float> value = upload(card(), pass.value), frequencies = upload(card(), pass.frequencies);
    DeviceArray<Span> there = upload(card(), spans);
    bool decoding = pass.count == 1;
    DeviceStore task = {query.data(), key.data(),       value.data(),       {},      {}, 1e-6f, cache.view, layer,
                        pass.heads,   pass.heads.width, frequencies.data(), decoding};
    if (norm) task.query_norm = pass.query_norm.tensor, task.key_norm = pass.key_norm.tensor;
    rope_and_store(card(), task, there.data(), (int)spans.size(), group_size);
    if (!decoding) keep_recent(card(), task, there.data(), (int)spans.size());
    return {download(card(), query.data(), pass.query.size()), download(card(), key.data(), pass.key.size()),
            download(card(), value.data(), pass.value.size())};
}

// Passes of these sizes, again in each round, the ones marked as decoding a token at a time, into one sequence of a
// cache on the card; what is there then is what the CPU stores of the same vectors, byte for byte.
static void check_storing(const Layout &layout, const Precision &type_k, const Precision &type_v, bool norm,
                          const Heads &heads = {6, 2, 20}, int rounds = 1) {
    Random random{7};
    const int layer = 1, sequence = 1;
    std::vector<int> sizes;
    for (int round = 0; round < rounds; round++) sizes.insert(sizes.end(), {5, 31, 1, 1, 30, 1});
    CacheShape shape{2, heads.kv, heads.width, heads.width, 2, 100 * rounds};
    shape.page = 4;
    shape.window = 70;
    shape.sinks = 3;
    Cache cache = open_cache(shape, layout, type_k, type_v), other = open_cache(shape, layout, type_k, type_v);
    grow(cache, 0, 5), grow(other, 0, 5);  // so that pages do not stand in order
    for (int size : sizes) {
        int position = cache.lengths[sequence];
        grow(cache, sequence, size), grow(other, sequence, size);
        Storing pass(random, heads, size);
        CardCache there(card(), cache);
        std::vector<int> sequences(size, sequence), positions;
        for (int t = 0; t < size; t++) positions.push_back(position + t);
        std::vector<Span> spans = spans_of(sequences.data(), positions.data(), size, group_size, true);
        auto [query, keys, values] = store_on_card(pass, there, layer, spans, norm);
        CHECK(worst(query, pass.turned(pass.query, pass.query_norm, norm, position)) <= 1);
        // The vectors as the card has them, stored by the CPU.
        if (!has_blocks(type_k)) CHECK(worst(keys, pass.turned(pass.key, pass.key_norm, norm, position)) <= 1);
        for (const Span &span : spans)
            for (int head = 0; head < heads.kv; head++)
                store_span(other, layer, span, head, keys.data(), values.data());
        for (const Span &span : spans)
            for (int head = 0; head < heads.kv; head++)
                keep_recent(other, layer, span, head, keys.data(), values.data());
        bring_back(card(), there.view, cache);
        int end = position + size;
        auto stored_to = [&](const Precision &type) { return has_blocks(type) ? end / group_size * group_size : end; };
        int first = std::max(0, end - 60);  // what a ring still has
        int first_block = (first + group_size - 1) / group_size * group_size;
        CHECK(stored_bytes(cache, cache.keys, sequence, has_blocks(type_k) ? first_block : first, stored_to(type_k)) ==
              stored_bytes(other, other.keys, sequence, has_blocks(type_k) ? first_block : first, stored_to(type_k)));
        CHECK(
            stored_bytes(cache, cache.values, sequence, has_blocks(type_v) ? first_block : first, stored_to(type_v)) ==
            stored_bytes(other, other.values, sequence, has_blocks(type_v) ? first_block : first, stored_to(type_v)));
        for (int t = end / group_size * group_size; t < end; t++) {
            for (int head = 0; head < heads.kv; head++) {
                int64_t row = sequence * group_size + t % group_size;
                auto same = [&](const CacheRows &a, const CacheRows &b) {
                    return !a.data || memcmp(a.at(layer, row, head), b.at(layer, row, head), a.row_bytes) == 0;
                };
                CHECK(same(cache.recent_keys, other.recent_keys));
                CHECK(same(cache.recent_values, other.recent_values));
            }
        }
        if (std::holds_alternative<Ring>(layout) && position == 0) {
            for (int t = 0; t < 3; t++) {  // keys turned back to where they were
                for (int head = 0; head < heads.kv; head++) {
                    const float *sink = (const float *)cache.sink_keys.at(layer, sequence * 3 + t, head);
                    Expected forth;
                    reference::rope(forth, sink, t, pass.frequencies);
                    for (double &bound : forth.bound) bound *= 2;  // there and back
                    auto at = keys.begin() + (t * heads.kv + head) * heads.width;
                    CHECK(worst({at, at + heads.width}, forth) <= 1);
                    const float *sink_value = (const float *)cache.sink_values.at(layer, sequence * 3 + t, head);
                    auto value_at = values.begin() + (t * heads.kv + head) * heads.width;
                    CHECK(std::equal(sink_value, sink_value + heads.width, value_at));
                }
            }
        }
    }
}

TEST_CASE("a pass's keys and values are stored as the CPU stores them: every layout and precision") {
    int turn = 0;
    for_each_type<Layout>([&](auto layout) {
        for_each_type<Precision>([&](auto type_k) {
            for_each_type<Precision>([&](auto type_v) {
                CAPTURE(layout.name);
                CAPTURE(type_k.name);
                CAPTURE(type_v.name);
                check_storing(layout, type_k, type_v, turn++ % 2);
            });
        });
    });
}

TEST_CASE("so they are over 1,000 positions") {
    check_storing(Contiguous{}, FP8{}, Int4{}, false, {3, 1, 20}, 15);
    check_storing(Paged{}, Int2{}, Int8{}, true, {3, 1, 20}, 15);
    check_storing(Ring{}, Int4{}, Int2{}, false, {3, 1, 20}, 15);
}

TEST_CASE("so they are for every head dimension and group") {
    const Precision types[] = {Int4{}, BF16{}, Int8{}, Int2{}, FP8{}};
    int turn = 0;
    for (int width : {64, 80, 96, 128, 256}) {
        for (int group : {1, 3, 7, 8}) {
            CAPTURE(width);
            CAPTURE(group);
            check_storing(Paged{}, types[turn % 5], types[(turn + turn / 5) % 5], turn % 2, {group, 1, width});
            turn++;
        }
    }
}

TEST_CASE("a cut sequence's block is recent again, as it reads") {
    Random random{8};
    for_each_type<Precision>([&](auto type) {
        CacheShape shape{2, 2, 20, 36, 2, 100};
        Cache host = open_cache(shape, Paged{}, type, type), device = open_cache(shape, Paged{}, type, type, &card());
        grow(host, 1, 3), grow(device, 1, 3);
        grow(host, 0, 70), grow(device, 0, 70);
        std::vector<float> keys = random_floats(random, 70 * 2 * 20), values = random_floats(random, 70 * 2 * 36);
        std::vector<int> sequences(70, 0), positions;
        for (int t = 0; t < 70; t++) positions.push_back(t);
        for (const Span &span : spans_of(sequences.data(), positions.data(), 70, group_size, true))
            for (int layer = 0; layer < 2; layer++)
                for (int head = 0; head < 2; head++) store_span(host, layer, span, head, keys.data(), values.data());
        for (auto [from, to] : {std::pair{&host.keys, &device.keys}, std::pair{&host.values, &device.values}})
            copy(card(), to->data, from->data, from->bytes(2));
        for (auto [from, to] :
             {std::pair{&host.recent_keys, &device.recent_keys}, std::pair{&host.recent_values, &device.recent_values}})
            if (from->data) copy(card(), to->data, from->data, from->bytes(2));
        shrink(host, 0, 45), shrink(device, 0, 45);
        for (auto [from, to] : {std::pair{&host.recent_keys, &device.recent_keys},
                                std::pair{&host.recent_values, &device.recent_values}}) {
            if (!from->data) continue;
            std::vector<char> got = download(card(), to->data, to->bytes(2));
            for (int layer = 0; layer < 2; layer++)
                for (int t = 32; t < 45; t++)
                    for (int head = 0; head < 2; head++) {
                        const char *row = from->at(layer, t - 32, head);
                        CHECK(memcmp(row, got.data() + (row - from->data), from->row_bytes) == 0);
                    }
        }
    });
}

TEST_CASE("what does not fit on the card is told in one line, with both numbers and a cure") {
    CacheShape shape{80, 64, 128, 128, 1, 1 << 24};
    try {
        open_cache(shape, Contiguous{}, F32{}, F32{}, &card());
        CHECK(false);
    } catch (const Error &error) {
        std::string line = error.what();
        CHECK(line.find("the KV cache needs") != std::string::npos);
        CHECK(line.find(card().properties.name) != std::string::npos);
        CHECK(line.find("enough for") != std::string::npos);
        CHECK(line.find("lower -c") != std::string::npos);
        CHECK(line.find('\n') == std::string::npos);
    }
}

#ifdef CUDA_ON_CPU
// ---- Faults ------------------------------------------------------------------------------------------------

// The bytes that a kernel leaves are the same as before.
static std::function<bool()> repeats(std::function<std::vector<char>()> run) {
    return [run, expected = run()] { return run() == expected; };
}

static void append(std::vector<char> &bytes, const std::vector<float> &numbers) {
    bytes.insert(bytes.end(), (const char *)numbers.data(), (const char *)(numbers.data() + numbers.size()));
}

static std::vector<char> bytes_after_storing(const Precision &type_k, const Precision &type_v) {
    Random random{9};
    CacheShape shape{2, 2, 80, 80, 1, 100};
    shape.window = 60, shape.sinks = 3;
    Cache cache = open_cache(shape, Ring{}, type_k, type_v);
    CardCache there(card(), cache);
    std::vector<char> bytes;
    for (int size : {40, 23, 1, 1}) {
        int position = grow(cache, 0, size);
        std::vector<int> sequences(size, 0), positions;
        for (int t = 0; t < size; t++) positions.push_back(position + t);
        std::vector<Span> spans = spans_of(sequences.data(), positions.data(), size, group_size, true);
        StoredPass stored = store_on_card(Storing(random, {6, 2, 80}, size), there, 1, spans, true);
        for (const std::vector<float> *vectors : {&stored.query, &stored.key, &stored.value}) append(bytes, *vectors);
    }
    bring_back(card(), there.view, cache);
    for (const CacheRows *side : {&cache.keys, &cache.values, &cache.sink_keys, &cache.sink_values})
        if (side->data) bytes.insert(bytes.end(), side->data, side->data + side->bytes(shape.layers));
    return bytes;
}

TEST_CASE("a barrier or a wait left out, a shuffle from the wrong lane: nowhere does one go unnoticed") {
    auto products = [](const ProductCase &shape, bool plain) {
        return [=] {
            Random random{10};
            return run_products(random, shape, plain) <= 1;
        };
    };
    const ProductCase gated = {{300, 300}, 1100, 2, DType::bf16, true, true, false, true};
    auto normed = repeats([] {
        Random random{11};
        OnCard gain = random_on_card(random, DType::f16, 1, 500);
        DeviceArray<float> x = upload(card(), random_floats(random, 1000, -3, 4)), out = unwritten(1000);
        rms_norm(card(), out.data(), x.data(), gain.tensor, 2, 1e-6);
        std::vector<char> bytes;
        append(bytes, download(card(), out.data(), 1000));
        return bytes;
    });
    auto likeliest = [] {
        bool right = true;
        for (int token = 1200; token < 1200 + warp_size; token++) {
            std::vector<float> logits(3000, 0);
            logits[token] = 1;
            right = right && likeliest_of(logits, 3000) == std::vector<int>{token};
        }
        return right;
    };
    auto storing = [](const Precision &type_k, const Precision &type_v) {
        return repeats([=] { return bytes_after_storing(type_k, type_v); });
    };
    const std::vector<std::function<bool()>> kernels[] = {
        {products(gated, true)},
        {products(gated, false)},
        {normed},
        {likeliest},
        {storing(Int4{}, Int4{}), storing(Int8{}, F16{}), storing(FP8{}, Int8{})}};
    for (const auto &checks : kernels)
        for (const std::string &place : cuda_on_cpu::unnoticed_faults(checks)) FAIL_CHECK(place);
}
#endif
