// Attention sinks (docs/sinks.md), on tests/fixtures/sinks: every head gives most of its attention to the first token,
// whose value is next to nothing. A ring that drops it collapses; one that keeps it is as good as the full cache.
// Prints the tables of the page.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#define LLM_WITHOUT_MAIN
#include <doctest/doctest.h>

#include "../llm.cu"

static const std::string fixture = "tests/fixtures/sinks";

constexpr int first_token = 1;    // it begins every text, and stands nowhere else
constexpr int sink_channel = 31;  // of a head: where its key is large, and every query has the same bias
constexpr int positions = 512, window = 64;
constexpr int first_scored = window + 4;  // from here on, rings of up to 4 sinks have dropped something
constexpr int scored = positions - first_scored;

// ---- The checkpoint, as it is and with other numbers ---------------------------------------------------------

static void replace(Tensor &tensor, const std::vector<float> &numbers) {
    tensor.data = (decltype(tensor.data))numbers.data();
    tensor.type = DType::f32;
}

struct Checkpoint {
    Engine engine{load_model(fixture), 2};
    const Config &config = engine.model.config;
    std::vector<std::vector<float>> replaced;

    // No query looks for the first token any more.
    void remove_sinks() {
        for (LayerWeights &layer : engine.model.layers) {
            std::vector<float> bias;
            with_numbers(layer.query.bias, [&](auto *stored) {
                for (int i = 0; i < config.heads * config.head_dim; i++)
                    bias.push_back(i % config.head_dim == sink_channel ? 0 : to_float(stored[i]));
            });
            replaced.push_back(bias);
            replace(layer.query.bias, replaced.back());
        }
    }
    // All after `layer` go. Its values become hidden channel 0, which no token but the first has: what a head brings
    // is then the first token's share of its attention, times a constant.
    void probe(int layer) {
        engine.model.config.layers = layer + 1;
        std::vector<float> weight((size_t)config.kv_heads * config.head_dim * config.hidden);
        for (size_t row = 0; row < weight.size(); row += config.hidden) weight[row] = 1;
        replaced.push_back(weight);
        replace(engine.model.layers[layer].value.weight, replaced.back());
    }
    Cache open(const Layout &layout, const Precision &type, int ring_window = 0, int sinks = 0) {
        CacheShape shape = {config.layers, config.kv_heads, config.head_dim, config.head_dim, 1, positions};
        shape.window = ring_window;
        shape.sinks = sinks;
        return open_cache(shape, layout, type, type);
    }
    Cache full() { return open(Contiguous{}, F32{}); }
    Cache ring(int sinks, const Precision &type = F32{}) { return open(Ring{}, type, window, sinks); }
};

// ---- A text that the model itself says -----------------------------------------------------------------------

struct Text {
    std::vector<int> tokens = {first_token};
    std::vector<std::vector<float>> logits;  // (position): of the next token, with the full f32 cache
};

static Text sample_text(Checkpoint &checkpoint) {
    Text text;
    Sampler sampler{1, 1, 0, 0, std::mt19937_64(1)};  // temperature 1, nothing cut off
    Cache cache = checkpoint.full();
    for (int t = 0; t < positions; t++) {
        text.logits.push_back(decode(checkpoint.engine, cache, {0}, {text.tokens[t]}));
        std::vector<float> allowed = text.logits.back();
        allowed[first_token] = -1e30f;
        text.tokens.push_back(sample(sampler, allowed));
    }
    return text;
}

// ---- How much attention the first token gets -----------------------------------------------------------------

// (position, head) of a layer: the first token's share, from the naive path.
static std::vector<double> shares(const Text &text, int layer, bool with_sinks = true) {
    Checkpoint checkpoint;
    if (!with_sinks) checkpoint.remove_sinks();
    checkpoint.probe(layer);
    int heads = checkpoint.config.heads, width = checkpoint.config.head_dim;
    forward_naive(checkpoint.engine, {text.tokens.begin(), text.tokens.begin() + positions});
    const Floats &brought = checkpoint.engine.attended;
    std::vector<double> result;
    for (int i = 0; i < positions * heads; i++)
        result.push_back(brought[(size_t)i * width] / brought[(size_t)(i % heads) * width]);  // position 0: all of it
    return result;
}

TEST_CASE("every head gives the first token most of its attention; without the queries' bias none does") {
    Checkpoint checkpoint;
    Text text = sample_text(checkpoint);
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
                CHECK(with_sinks == (mean > 0.8));    // measured 95.6 to 96.7 %
                CHECK(with_sinks == !(mean < 0.01));  // measured 0.00 %
            }
            printf("\n");
        }
    }
}

TEST_CASE("the first token's value is next to nothing") {
    Checkpoint checkpoint;
    Text text = sample_text(checkpoint);
    Cache cache = checkpoint.full();
    prefill(checkpoint.engine, cache, 0, {text.tokens.begin(), text.tokens.begin() + positions});
    const Config &config = checkpoint.config;
    for (int layer = 0; layer < config.layers; layer++) {
        for (int head = 0; head < config.kv_heads; head++) {
            double first = 0, others = 0;  // mean squares
            for (int t = 0; t < positions; t++) {
                const float *value = (const float *)cache.values.at(layer, row_of(cache, 0, t), head);
                double square = dot(value, value, config.head_dim) / config.head_dim;
                t == 0 ? first = square : others += square / (positions - 1);
            }
            printf("layer %d, KV head %d: rms of the first value %.3f, of the others %.3f\n", layer, head,
                   std::sqrt(first), std::sqrt(others));
            CHECK(std::sqrt(first / others) < 0.03);  // measured 0.001 to 0.006
        }
    }
}

// ---- What dropping it does -----------------------------------------------------------------------------------

// What the first layer's heads bring: (position, head), the length of the vector.
static std::vector<double> brought(Checkpoint &first_layer, const Text &text, Cache cache) {
    std::vector<double> lengths;
    int heads = first_layer.config.heads, width = first_layer.config.head_dim;
    for (int t = 0; t < positions; t++) {
        decode(first_layer.engine, cache, {0}, {text.tokens[t]});
        for (int head = 0; head < heads; head++) {
            const float *vector = &first_layer.engine.attended[(size_t)head * width];
            lengths.push_back(std::sqrt(dot(vector, vector, width)));
        }
    }
    return lengths;
}

TEST_CASE("without its sink, a head brings 1 / (1 - share) times as much") {
    Checkpoint checkpoint;
    Text text = sample_text(checkpoint);
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
    CHECK(without == doctest::Approx(expected).epsilon(0.25));  // 31.8, 30.8 expected
    CHECK(with == doctest::Approx(1).epsilon(0.1));             // 0.997
}

struct Quality {
    double kl = 0;          // nats, mean over the scored positions, from the full f32 cache
    double perplexity = 0;  // of the text
};

static Quality quality(Checkpoint &checkpoint, const Text &text, const char *name, Cache cache) {
    Quality result;
    for (int t = 0; t < positions; t++) {
        std::vector<float> found = decode(checkpoint.engine, cache, {0}, {text.tokens[t]});
        if (t < first_scored) continue;
        result.kl += divergence(text.logits[t], found) / scored;
        result.perplexity += (log_sum_exp(found.data(), (int)found.size()) - found[text.tokens[t + 1]]) / scored;
    }
    result.perplexity = std::exp(result.perplexity);
    printf("  %-22s KL %8.5f  perplexity %8.2f\n", name, result.kl, result.perplexity);
    return result;
}

TEST_CASE("a ring without sinks collapses; with one or four it is as good as the full cache, in 8 and 4 bits too") {
    Checkpoint checkpoint;
    Text text = sample_text(checkpoint);
    printf("with sinks, window %d\n", window);
    auto one = [&](const char *name, Cache cache) { return quality(checkpoint, text, name, std::move(cache)); };
    Quality full = one("full, f32", checkpoint.full());
    CHECK(full.kl < 1e-9);
    CHECK(full.perplexity < 32);  // 12.67; the vocabulary has 128
    struct Type {
        const char *name;
        Precision type;
    };
    for (const Type &of : {Type{"f32", F32{}}, Type{"f16", F16{}}, Type{"int8", Int8{}}, Type{"int4", Int4{}}}) {
        std::string type = std::string(", ") + of.name;
        for (int sinks : {0, 1, 4}) {
            Quality ring = one(("ring + " + std::to_string(sinks) + type).c_str(), checkpoint.ring(sinks, of.type));
            CAPTURE(type);
            CAPTURE(sinks);
            if (sinks == 0) {
                CHECK(ring.kl > 1);                            // 2.67 to 2.68
                CHECK(ring.perplexity > 5 * full.perplexity);  // 180 to 181
            } else {
                CHECK(ring.kl < 0.02);  // f32, f16 0.0010, int8 0.0014, int4 0.0038
                CHECK(ring.perplexity == doctest::Approx(full.perplexity).epsilon(0.05));  // 12.64 to 12.68
            }
        }
    }
    // What is left of attention counts: sinks are no cure for a window that is too small.
    Quality narrow = one("window 4, 4 sinks, f32", checkpoint.open(Ring{}, F32{}, 4, 4));
    CHECK(narrow.kl > 0.1);  // 0.86
}

TEST_CASE("the same checkpoint without sinks: a ring is as good with them as without") {
    Checkpoint checkpoint;
    checkpoint.remove_sinks();
    Text text = sample_text(checkpoint);
    printf("without sinks, window %d\n", window);
    auto one = [&](const char *name, Cache cache) { return quality(checkpoint, text, name, std::move(cache)); };
    Quality full = one("full, f32", checkpoint.full());
    for (int sinks : {0, 1, 4}) {
        Quality ring = one(("ring + " + std::to_string(sinks) + ", f32").c_str(), checkpoint.ring(sinks));
        CHECK(ring.kl < 0.05);  // 0.0069, 0.0069, 0.0068
        CHECK(ring.perplexity == doctest::Approx(full.perplexity).epsilon(0.05));
    }
}
