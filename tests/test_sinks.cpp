// Attention sinks (docs/sinks.md), on tests/fixtures/sinks: every head gives most of its attention to the first token,
// whose value is next to nothing. A ring that drops it collapses; one that keeps it is as good as the full cache.
// Prints the tables of the page.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#ifndef PLAIN  // compiles in a tenth of the time
#define PLAIN
#endif
#include "scene.h"

using namespace scene;

constexpr int first_token = 1;    // it begins every text, and stands nowhere else
constexpr int sink_channel = 31;  // of a head: where its key is large, and every query has the same bias
constexpr int positions = 512, window = 64;
constexpr int first_scored = window + 4;  // from here on, rings of up to 4 sinks have dropped something
constexpr int scored = positions - first_scored;

// The checkpoint, as it is and with other numbers.
struct Checkpoint {
    Engine engine = engine_of("tests/fixtures/sinks", 2);
    const Config &config = engine.model.config;
    std::vector<Vector> replaced;

    void replace(Tensor &tensor, const Vector &numbers) {
        replaced.push_back(numbers);
        tensor.data = replaced.back().data();
        tensor.type = DType::f32;
    }
    // No query looks for the first token any more.
    void remove_sinks() {
        for (LayerWeights &layer : engine.model.layers) {
            Vector bias;
            for (int i = 0; i < config.heads * config.kinds[0].key_width; i++)
                bias.push_back(i % config.kinds[0].key_width == sink_channel ? 0 : number_of(layer.query.bias, i));
            replace(layer.query.bias, bias);
        }
    }
    // All after `layer` go. Its values become hidden channel 0, which no token but the first has: what a head brings
    // is then the first token's share of its attention, times a constant.
    void probe(int layer) {
        engine.model.config.layers = layer + 1;
        Vector weight((size_t)config.kinds[0].kv_heads * config.kinds[0].key_width * config.hidden);
        for (size_t row = 0; row < weight.size(); row += config.hidden) weight[row] = 1;
        replace(engine.model.layers[layer].value.weight, weight);
    }
    Cache full() { return cache_for(engine, F32{}, F32{}, positions); }
    Cache ring(int sinks, const Precision &type = F32{}, int of = window) {
        return cache_for(engine, type, type, positions, scene::ring(of, sinks));
    }
};

// A text that the model itself says.
struct Sampled {
    Tokens tokens = {first_token};
    std::vector<Vector> logits;  // (position): of the next token, with the full f32 cache
};

static Sampled sample_text(Checkpoint &checkpoint) {
    Sampled text;
    Sampler sampler{1, 1, 0, 0, 1};  // temperature 1, nothing cut off
    Cache cache = checkpoint.full();
    for (int t = 0; t < positions; t++) {
        text.logits.push_back(decode(checkpoint.engine, cache, {0}, {text.tokens[t]}));
        Vector allowed = text.logits.back();
        allowed[first_token] = -1e30f;
        text.tokens.push_back(sample(sampler, allowed, t));
    }
    return text;
}

// (position, head) of a layer: the first token's share of attention, from the naive path.
static std::vector<double> shares(const Sampled &text, int layer, bool with_sinks = true) {
    Checkpoint checkpoint;
    if (!with_sinks) checkpoint.remove_sinks();
    checkpoint.probe(layer);
    int heads = checkpoint.config.heads, width = checkpoint.config.kinds[0].key_width;
    naive_pass(checkpoint.engine, part(text.tokens, 0, positions));
    const float *brought = checkpoint.engine.a.attended.data();
    std::vector<double> result;
    for (int i = 0; i < positions * heads; i++)
        result.push_back(brought[(size_t)i * width] / brought[(size_t)(i % heads) * width]);  // position 0: all of it
    return result;
}

static double length(const float *x, int count) {
    double squares = 0;
    for (int i = 0; i < count; i++) squares += (double)x[i] * x[i];
    return std::sqrt(squares);
}

TEST_CASE("every head gives the first token most of its attention; without the queries' bias none does") {
    Checkpoint checkpoint;
    Sampled text = sample_text(checkpoint);
    int heads = checkpoint.config.heads;
    for (bool with_sinks : {true, false}) {
        printf("the first token's share of attention, by head%s\n", with_sinks ? "" : ", without sinks");
        for (int layer = 0; layer < checkpoint.config.layers; layer++) {
            std::vector<double> of_layer = shares(text, layer, with_sinks);
            printf("  layer %d  ", layer);
            for (int head = 0; head < heads; head++) {
                double mean = 0;
                for (int t = first_scored; t < positions; t++) mean += of_layer[t * heads + head] / scored;
                printf("  %6.2f %%", 100 * mean);
                CHECK(with_sinks == (mean > 0.8));    // measured 95.7 to 96.5 %
                CHECK(with_sinks == !(mean < 0.01));  // measured 0.00 %
            }
            printf("\n");
        }
    }
}

TEST_CASE("the first token's value is next to nothing") {
    Checkpoint checkpoint;
    Sampled text = sample_text(checkpoint);
    Cache cache = checkpoint.full();
    prefill(checkpoint.engine, cache, 0, part(text.tokens, 0, positions));
    for (int layer = 0; layer < checkpoint.config.layers; layer++) {
        for (int head = 0; head < checkpoint.config.kinds[0].kv_heads; head++) {
            std::vector<double> lengths;
            double others = 0;
            for (int t = 0; t < positions; t++) {
                const CacheRows &values = cache.stores[0].view.values;
                lengths.push_back(
                    length((const float *)values.at(layer, row_of(cache.stores[0], 0, t), head), values.width));
                if (t > 0) others += lengths[t] * lengths[t] / (positions - 1);
            }
            double root = std::sqrt(checkpoint.config.kinds[0].key_width);
            printf("layer %d, KV head %d: rms of the first value %.3f, of the others %.3f\n", layer, head,
                   lengths[0] / root, std::sqrt(others) / root);
            CHECK(lengths[0] / std::sqrt(others) < 0.03);  // measured 0.001 to 0.006
        }
    }
}

// ---- What dropping it does -----------------------------------------------------------------------------------

// What the first layer's heads bring: (position, head), the length of the vector.
static std::vector<double> brought(Checkpoint &first_layer, const Sampled &text, Cache cache) {
    std::vector<double> lengths;
    int heads = first_layer.config.heads, width = first_layer.config.kinds[0].key_width;
    for (int t = 0; t < positions; t++) {
        decode(first_layer.engine, cache, {0}, {text.tokens[t]});
        for (int head = 0; head < heads; head++)
            lengths.push_back(length(first_layer.engine.a.attended.data() + (size_t)head * width, width));
    }
    return lengths;
}

TEST_CASE("without its sink, a head brings 1 / (1 - share) times as much") {
    Checkpoint checkpoint;
    Sampled text = sample_text(checkpoint);
    std::vector<double> of_first = shares(text, 0);
    checkpoint.engine.model.config.layers = 1;
    std::vector<double> full = brought(checkpoint, text, checkpoint.full());
    std::vector<double> dropped = brought(checkpoint, text, checkpoint.ring(0));
    std::vector<double> kept = brought(checkpoint, text, checkpoint.ring(1));
    int begin = first_scored * checkpoint.config.heads, count = (int)full.size() - begin;
    double expected = 0, without = 0, with = 0;
    for (int i = begin; i < begin + count; i++) {
        expected += 1 / (1 - of_first[i]) / count;
        without += dropped[i] / full[i] / count;
        with += kept[i] / full[i] / count;
    }
    printf(
        "first layer: mean of 1 / (1 - share) %.1f; a head brings %.1f times as much without the sink, %.3f with it\n",
        expected, without, with);
    CHECK(without == doctest::Approx(expected).epsilon(0.25));  // 31.9, 31.0 expected
    CHECK(with == doctest::Approx(1).epsilon(0.1));             // 0.997
}

struct Quality {
    double kl = 0;          // nats, mean over the scored positions, from the full f32 cache
    double perplexity = 0;  // of the text
};

static Quality quality(Checkpoint &checkpoint, const Sampled &text, const std::string &name, Cache cache) {
    Quality result;
    for (int t = 0; t < positions; t++) {
        Vector found = decode(checkpoint.engine, cache, {0}, {text.tokens[t]});
        if (t < first_scored) continue;
        result.kl += compare(text.logits[t], found).kl / scored;
        result.perplexity += (log_sum_exp(found.data(), (int)found.size()) - found[text.tokens[t + 1]]) / scored;
    }
    result.perplexity = std::exp(result.perplexity);
    printf("  %-22s KL %8.5f  perplexity %8.2f\n", name.c_str(), result.kl, result.perplexity);
    return result;
}

TEST_CASE("a ring without sinks collapses; with one or four it is as good as the full cache, in 8 and 4 bits too") {
    Checkpoint checkpoint;
    Sampled text = sample_text(checkpoint);
    printf("with sinks, window %d\n", window);
    Quality full = quality(checkpoint, text, "full, f32", checkpoint.full());
    CHECK(full.kl < 1e-9);
    CHECK(full.perplexity < 32);  // 14.21; the vocabulary has 128
    for (const Precision &type : {Precision(F32{}), Precision(F16{}), Precision(Int8{}), Precision(Int4{})}) {
        for (int sinks : {0, 1, 4}) {
            std::string name = "ring + " + std::to_string(sinks) + ", " + name_of(type);
            CAPTURE(name);
            Quality ring = quality(checkpoint, text, name, checkpoint.ring(sinks, type));
            if (sinks == 0) {
                CHECK(ring.kl > 1);                            // 2.64
                CHECK(ring.perplexity > 5 * full.perplexity);  // 187
            } else {
                CHECK(ring.kl < 0.02);  // f32, f16 0.0014, int8 0.0018, int4 0.0050
                CHECK(ring.perplexity == doctest::Approx(full.perplexity).epsilon(0.05));  // 14.18 to 14.21
            }
        }
    }
    // What is left of attention counts: sinks are no cure for a window that is too small.
    CHECK(quality(checkpoint, text, "window 4, 4 sinks, f32", checkpoint.ring(4, F32{}, 4)).kl > 0.1);  // 0.98
}

TEST_CASE("the same checkpoint without sinks: a ring is as good with them as without") {
    Checkpoint checkpoint;
    checkpoint.remove_sinks();
    Sampled text = sample_text(checkpoint);
    printf("without sinks, window %d\n", window);
    Quality full = quality(checkpoint, text, "full, f32", checkpoint.full());
    for (int sinks : {0, 1, 4}) {
        std::string name = "ring + " + std::to_string(sinks) + ", f32";
        Quality ring = quality(checkpoint, text, name, checkpoint.ring(sinks));
        CHECK(ring.kl < 0.05);  // 0.0063, 0.0063, 0.0061
        CHECK(ring.perplexity == doctest::Approx(full.perplexity).epsilon(0.05));
    }
}
