// The sampler of llm.cu: which tokens may come, and how often each does. Draws are a function of seed and position, so
// each test gives the same result every time; bounds on frequencies are beyond five standard deviations.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#ifndef PLAIN  // compiles in a tenth of the time
#define PLAIN
#endif
#include "scene.h"

// ---- Helpers -----------------------------------------------------------------------------------------------

Sampler sampler_of(double temperature, double top_p = 1, double min_p = 0, int top_k = 0, uint64_t seed = 1) {
    return {temperature, top_p, min_p, top_k, seed};
}

// Logits of which softmax gives these probabilities, up to a shift that must not matter.
std::vector<float> logits_of(const std::vector<double> &probabilities) {
    std::vector<float> logits;
    for (double p : probabilities) logits.push_back((float)(std::log(p) + 7));
    return logits;
}

std::vector<int> drawn(const Sampler &sampler, const std::vector<float> &logits, int draws) {
    std::vector<int> counts(logits.size());
    for (int i = 0; i < draws; i++) counts.at(sample(sampler, logits, i))++;
    return counts;
}

std::set<int> tokens_drawn(const Sampler &sampler, const std::vector<float> &logits) {
    std::vector<int> counts = drawn(sampler, logits, 5000);
    std::set<int> tokens;
    for (size_t i = 0; i < counts.size(); i++)
        if (counts[i]) tokens.insert((int)i);
    return tokens;
}

// Pearson's chi-square has a mean of k - 1 and a variance of 2 (k - 1): in how many deviations is it above the mean?
double deviations(const std::vector<int> &counts, const std::vector<double> &probabilities) {
    double total = 0, square = 0, draws = 0, freedom = -1;
    for (double p : probabilities) total += p;
    for (int count : counts) draws += count;
    for (size_t i = 0; i < counts.size(); i++) {
        double expected = draws * probabilities[i] / total;
        if (probabilities[i] == 0) {
            square += counts[i] ? INFINITY : 0;
            continue;
        }
        square += (counts[i] - expected) * (counts[i] - expected) / expected;
        freedom++;
    }
    return (square - freedom) / std::sqrt(2 * std::max(1.0, freedom));
}

// The definition: the whole vocabulary sorted, summed up token by token, in double precision. off: by how many times
// 10^-6 each cut and the point drawn are moved, from -1 to 1, as sums of float32 are off by less.
int sample_by_sorting(Sampler sampler, const std::vector<float> &logits, int position, double off = 0) {
    int likeliest = argmax(logits.data(), (int)logits.size());
    if (sampler.temperature == 0) return likeliest;
    sampler.top_p *= 1 + off * 1e-6, sampler.min_p *= 1 + off * 1e-6;
    std::vector<std::pair<double, int>> list;  // -p, token
    for (size_t i = 0; i < logits.size(); i++)
        list.push_back({-std::exp(((double)logits[i] - logits[likeliest]) / sampler.temperature), (int)i});
    std::sort(list.begin(), list.end());
    if (sampler.top_k > 0 && (size_t)sampler.top_k < list.size()) list.resize((size_t)sampler.top_k);
    double total = 0, kept = 0;
    for (auto &entry : list) total -= entry.first;
    size_t count = 0;
    while (count < list.size() && (count == 0 || kept < sampler.top_p * total)) kept -= list[count++].first;
    while (count > 1 && -list[count - 1].first < sampler.min_p) kept += list[--count].first;
    double point = (draw(sampler.seed, position) + off * 1e-6) * kept;
    for (size_t i = 0; i + 1 < count; point += list[i++].first)
        if (point < -list[i].first) return list[i].second;
    return list[count - 1].second;
}

// The likeliest is neither first nor last, and no two are equal: 4, 1, 6, 3, 0, 5, 2 is the order.
const std::vector<double> seven = {0.08, 0.22, 0.03, 0.13, 0.35, 0.05, 0.14};

// ---- The likeliest -----------------------------------------------------------------------------------------

TEST_CASE("temperature 0 takes the likeliest token, the first of equals, whatever else is asked") {
    for (uint64_t seed : {1, 2, 3}) {
        Sampler sampler = sampler_of(0, 0.9, 0.1, 5, seed);
        CHECK(sample(sampler, {-3, 2, 7, 7, 7, -1}, 3) == 2);
        CHECK(sample(sampler, {9, 9}, 3) == 0);
        CHECK(sample(sampler, {-5, -4}, 3) == 1);
        CHECK(sample(sampler, {-1e30f}, 3) == 0);
        CHECK(sample(sampler, logits_of(seven), 3) == 4);
    }
}

TEST_CASE("a tiny temperature takes the likeliest token") {
    for (double temperature : {1e-4, 1e-30, 1e-300, 5e-324}) {
        CHECK(tokens_drawn(sampler_of(temperature), logits_of(seven)) == std::set<int>{4});
        CHECK(tokens_drawn(sampler_of(temperature), {0, 1e30f, -1e30f}) == std::set<int>{1});
    }
}

TEST_CASE("a huge temperature makes all tokens alike") {
    CHECK(deviations(drawn(sampler_of(1e6), logits_of(seven), 100000), std::vector<double>(7, 1)) < 5);
}

// ---- The distribution --------------------------------------------------------------------------------------

TEST_CASE("draws follow softmax(logits / temperature)") {
    for (double temperature : {0.5, 1.0, 1.7}) {
        std::vector<double> expected;
        for (double p : seven) expected.push_back(std::pow(p, 1 / temperature));
        CAPTURE(temperature);
        CHECK(deviations(drawn(sampler_of(temperature), logits_of(seven), 100000), expected) < 5);
    }
}

TEST_CASE("what is kept keeps its proportions") {
    const std::vector<double> first_three = {0, 0.22, 0, 0, 0.35, 0, 0.14};
    CHECK(deviations(drawn(sampler_of(1, 1, 0, 3), logits_of(seven), 100000), first_three) < 5);
    CHECK(deviations(drawn(sampler_of(1, 0.6), logits_of(seven), 100000), first_three) < 5);
    CHECK(deviations(drawn(sampler_of(1, 1, 0.38), logits_of(seven), 100000), first_three) < 5);
}

TEST_CASE("draws from a large vocabulary follow it, too") {
    reference::Random random{1};
    std::vector<double> probabilities;
    for (int i = 0; i < 1000; i++) probabilities.push_back(random.uniform(0.5, 5));
    CHECK(deviations(drawn(sampler_of(1), logits_of(probabilities), 20000), probabilities) < 5);
}

TEST_CASE("huge logits are nothing special") {
    CHECK(deviations(drawn(sampler_of(1), {1e4f, 1e4f, -1e30f}, 10000), {1, 1, 0}) < 5);
    CHECK(deviations(drawn(sampler_of(1), {-1e4f, -1e4f, -1e4f}, 10000), {1, 1, 1}) < 5);
}

TEST_CASE("the same seed draws the same tokens, another seed others; neighbours have nothing to do with each other") {
    auto sequence = [](uint64_t seed) {
        Sampler sampler = sampler_of(1, 0.95, 0.01, 6, seed);
        std::vector<int> tokens;
        for (int i = 0; i < 100; i++) tokens.push_back(sample(sampler, logits_of(seven), i));
        return tokens;
    };
    CHECK(sequence(7) == sequence(7));
    CHECK(sequence(7) != sequence(8));
    CHECK(sequence(0) != sequence(1));
    // Whoever noted a seed finds the text again: these never change (computed apart, with Python's whole numbers). One
    // round of mixing in place of two passes every statistical test tried here, 2^21 pairs of draws; not this one.
    CHECK(draw(0, 0) == 0x1.4e0dba5e9a32fp-1);
    CHECK(draw(1, 0) == 0x1.1adcf9e7c30dep-2);
    CHECK(draw(0, 1) == 0x1.7906ac21d0e58p-2);
    CHECK(draw(9007199254740993, 1 << 30) == 0x1.49af50be7cf62p-2);
    // Pairs of draws, of neighbouring positions and of neighbouring seeds, fill a table of 8 by 8 evenly.
    for (bool seeds : {false, true}) {
        std::vector<int> counts(64);
        for (int i = 0; i < 64000; i++) {
            double a = seeds ? draw((uint64_t)i, 5) : draw(9, i), b = seeds ? draw((uint64_t)i + 1, 5) : draw(9, i + 1);
            REQUIRE((a >= 0 && a < 1));
            counts[(int)(a * 8) * 8 + (int)(b * 8)]++;
        }
        CHECK(deviations(counts, std::vector<double>(64, 1)) < 5);
    }
}

// ---- What is kept ------------------------------------------------------------------------------------------

TEST_CASE("top-k keeps the k likeliest") {
    const std::vector<std::set<int>> kept = {{4}, {4, 1}, {4, 1, 6}, {4, 1, 6, 3}, {4, 1, 6, 3, 0}};
    for (int k = 1; k <= 5; k++) CHECK(tokens_drawn(sampler_of(1, 1, 0, k), logits_of(seven)) == kept[k - 1]);
    for (int k : {0, 7, 8, 1000000}) CHECK(tokens_drawn(sampler_of(1, 1, 0, k), logits_of(seven)).size() == 7);
}

TEST_CASE("top-k of equals keeps the first") {
    CHECK(tokens_drawn(sampler_of(1, 1, 0, 2), {1, 5, 5, 5, 5}) == std::set<int>{1, 2});
}

TEST_CASE("top-p keeps the fewest that reach it") {
    auto kept = [](double top_p) { return tokens_drawn(sampler_of(1, top_p), logits_of(seven)); };
    CHECK(kept(0) == std::set<int>{4});
    CHECK(kept(0.3499) == std::set<int>{4});
    CHECK(kept(0.3501) == std::set<int>{4, 1});
    CHECK(kept(0.5699) == std::set<int>{4, 1});
    CHECK(kept(0.5701) == std::set<int>{4, 1, 6});
    CHECK(kept(0.9699) == std::set<int>{4, 1, 6, 3, 0, 5});
    CHECK(kept(0.9701).size() == 7);
    CHECK(kept(1).size() == 7);
}

TEST_CASE("min-p keeps what is at least that share of the likeliest") {
    auto kept = [](double min_p) { return tokens_drawn(sampler_of(1, 1, min_p), logits_of(seven)); };
    CHECK(kept(0).size() == 7);
    CHECK(kept(0.085).size() == 7);  // 0.03 / 0.35 = 0.0857
    CHECK(kept(0.0865) == std::set<int>{4, 1, 6, 3, 0, 5});
    CHECK(kept(0.62) == std::set<int>{4, 1});  // 0.22 / 0.35 = 0.6286
    CHECK(kept(0.63) == std::set<int>{4});
    CHECK(kept(1) == std::set<int>{4});
    CHECK(tokens_drawn(sampler_of(1, 1, 1), {2, 5, 1, 5}) == std::set<int>{1, 3});
}

TEST_CASE("top-p counts what top-k has left, at the asked temperature") {
    const std::vector<float> logits = logits_of({0.1, 0.4, 0.2, 0.3});
    CHECK(tokens_drawn(sampler_of(1, 0.5), logits) == std::set<int>{1, 3});
    CHECK(tokens_drawn(sampler_of(1, 0.5, 0, 2), logits) == std::set<int>{1});       // 0.4 of 0.7 is more than half
    CHECK(tokens_drawn(sampler_of(0.5, 0.5), logits) == std::set<int>{1});           // 0.16 of 0.30, too
    CHECK(tokens_drawn(sampler_of(1, 0.8, 0.7, 0), logits) == std::set<int>{1, 3});  // 0.2 / 0.4 is below min-p
}

TEST_CASE("top-p at an exact tie keeps what reaches it and no more") {
    auto kept = [](double top_p, const std::vector<float> &logits) {
        return tokens_drawn(sampler_of(1, top_p), logits);
    };
    const float half = (float)std::log(0.5);
    CHECK(kept(0.5, {3, 3, 3, 3}) == std::set<int>{0, 1});  // each has 1, of 4: sums are exact
    CHECK(kept(std::nextafter(0.5, 1), {3, 3, 3, 3}) == std::set<int>{0, 1, 2});
    CHECK(kept(0.25, {3, 3, 3, 3}) == std::set<int>{0});
    CHECK(kept(0.75, {-1e30f, 3, 3, 3, 3}) == std::set<int>{1, 2, 3});
    CHECK(kept(0.5, {half, half, 0, -200}).size() == 1);  // e^-200 is lost in the sum
}

TEST_CASE("as many ids as a vocabulary may have, all alike, fit a bucket") {
    const std::vector<float> alike(max_ids, 3.0f);
    const Ranking ranking(alike, 1, 0);
    CHECK(ranking.total == max_ids);
    CHECK(ranking.find([](auto &place) { return place.sum > max_ids - 1; }).token == max_ids - 1);
}

TEST_CASE("e^x of the ranking is within two units of its last digit") {
    for (float x = 0; x >= -87; x = x > -1 ? x - 0x1p-14f : std::nextafter(x * 1.0001f, -100.0f)) {
        const double right = std::exp((double)x);
        const float digit = (float)right - std::nextafter((float)right, 0.0f);
        CHECK_MESSAGE(std::fabs(exp_below_one(x) - right) <= 2 * digit, x);
    }
    CHECK(exp_below_one(0) == 1);
}

TEST_CASE("what is drawn is what a sort of the whole vocabulary gives, for every flag") {
    reference::Random random{scene::seed_of_run()};
    CAPTURE(scene::seed_of_run());
    auto one_of = [&](const std::vector<double> &list) { return list[random.bits() % list.size()]; };
    int all = 0, at_a_border = 0;
    auto check = [&](int count, int draws) {
        std::vector<float> logits;
        const double spread = one_of({0.1, 1, 5, 30});
        for (int i = 0; i < count; i++) {
            double x = random.uniform(-spread, spread);
            logits.push_back((float)(random.bits() % 3 ? x : std::round(x)));  // equals, too
        }
        for (int i = 0; i < draws; i++) {
            Sampler sampler = sampler_of(one_of({0.01, 0.3, 0.8, 1, 1.5, 100}), one_of({1, 0.95, 0.5, 0.1, 0}),
                                         one_of({0, 0, 0.02, 0.5, 1}), (int)one_of({0, 0, 1, 5, 40, 2000}),
                                         random.bits());
            const int token = sample(sampler, logits, i);
            all++;
            if (token == sample_by_sorting(sampler, logits, i)) continue;
            at_a_border++;
            bool moved = false;  // in steps of half a last digit of p below 1: each cut that float32 can make
            for (int step = -32; step <= 32; step++) moved |= token == sample_by_sorting(sampler, logits, i, step / 32.0);
            if (moved) continue;
            FAIL_CHECK("T " << sampler.temperature << " top-p " << sampler.top_p << " min-p " << sampler.min_p
                            << " top-k " << sampler.top_k << " of " << count);
        }
    };
    for (int i = 0; i < 6000; i++) check(1 + (int)(random.bits() % 60), 50);
    for (int i = 0; i < 10; i++) check(5000, 20);
    check(128256, 8);
    CHECK(at_a_border <= all / 1000);
}

TEST_CASE("one token is always that token") {
    CHECK(tokens_drawn(sampler_of(1, 0, 1, 1), {-4}) == std::set<int>{0});
    CHECK(tokens_drawn(sampler_of(1), {3}) == std::set<int>{0});
}
