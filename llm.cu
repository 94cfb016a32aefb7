// llm: a small language model, with and without a KV cache.
// generate() makes a text: it reads the prompt (prefill), then takes one decode step at a time. run_lockstep() (llm
// diff) makes a text on the naive path and on caches, and compares their logits. A step is in forward.cu, its guesses
// are in draft.h, a token is drawn in sample.h. The flags and the other commands are in commands/.
#ifndef LLM_CU
#define LLM_CU

#include "base/text.h"
#include "batch.h"

// ---- llm generate ------------------------------------------------------------------------------------------

// Returns how many of `count` tokens can follow a prompt. Each needs a position, except the last, which is never read.
inline int room_for(int prompt, int count, int positions) {
    return (int)std::min<int64_t>(count, (int64_t)positions - prompt + 1);
}

// One text, and what generating it needs, on the naive or the cached path.
struct Session {
    Engine engine;
    TokenizerPointer tokenizer;
    std::vector<Cache> caches = {};  // generate: one, or none on the naive path; diff: those compared
    Drafter drafter = {};            // makes no guesses unless --draft is set
    std::vector<int> tokens = {};    // the prompt, then what was generated
    int prompt = 0;                  // tokens of the prompt
    int count = 0;                   // tokens to generate at most
    int limit = 0;                   // positions that the cache has room for
    bool ignore_end = false;         // goes on after an end id
    Sampler sampler = {};

    int generated() const { return (int)tokens.size() - prompt; }
    int left() const { return room_for(prompt, count, limit) - generated(); }
};

// Returns why the text ends here, or nullptr if it goes on.
inline const char *reason_to_stop(const Session &session) {
    const bool ended = session.generated() && session.engine.model.config.ends(session.tokens.back());
    if (interrupted()) return "interrupted";
    if (ended && !session.ignore_end) return "end id";
    if (session.generated() >= session.count) return "length";
    if (session.left() <= 0) return "context full";
    return nullptr;
}

struct Generation {
    std::string text, thought, stop;
    double prefill_seconds = 0, decode_seconds = 0;
    int prefilled = 0, decoded = 0;  // prompt tokens read by prefill; tokens drawn by decode steps
    std::vector<int> passes = {};    // (decode step): positions that the last token it read sees
};

using UseLogits = std::function<void(const std::vector<float> &)>;  // called with (rows, vocabulary)

inline std::vector<float> read_prompt(Session &session, const UseLogits &dump);

// Prefill, then decode steps. show(part) gets the text as it comes; `dump`, if set, gets the logits of every token.
inline Generation generate(Session &session, Writer text, const UseLogits &dump,
                           const std::function<void(const std::string &)> &show) {
    Engine &engine = session.engine;
    std::vector<int> &tokens = session.tokens;
    Cache *cache = session.caches.empty() ? nullptr : &session.caches[0];
    const int kept = cache ? cache->lengths[0] : 0;  // positions of earlier turns of a chat
    Generation result;
    const char *stop = reason_to_stop(session);
    std::string drawn;  // the text of the tokens that this step drew
    // Call it after a token is drawn. Returns whether the text goes on.
    auto go_on = [&] {
        drawn += text.next(tokens.back());
        stop = text.stopped ? "stop" : reason_to_stop(session);
        return !stop;
    };
    auto draw_next = [&](const std::vector<float> &found) {
        const int position = (int)tokens.size() - 1;
        require_finite(found, position, cache);
        if (!stop) tokens.push_back(sample(session.sampler, found, position)), go_on();
    };
    auto use = [&](const std::vector<float> &found) {
        if (dump) dump(found);
    };
    double start = now();
    try {
        const std::vector<float> first = read_prompt(session, dump);
        result.prefilled = session.prompt - kept, result.prefill_seconds = now() - start;
        draw_next(first);
        show(std::exchange(drawn, ""));
        while (!stop) {
            start = now();
            const int size = (int)tokens.size();
            if (cache) {
                step_with_guesses(engine, *cache, session.drafter, session.sampler, tokens, session.left() - 1,
                                  [&](const std::vector<float> &found) { return use(found), go_on(); });
            } else {
                const std::vector<float> found = forward_naive(engine, tokens);
                use(found), draw_next(found);
            }
            result.decode_seconds += now() - start;
            result.decoded += (int)tokens.size() - size;
            result.passes.push_back((int)tokens.size() - 1);
            show(std::exchange(drawn, ""));
        }
        // Only `dump` wants the logits after the last token: one more pass, if there is room.
        if (dump && session.generated() && (int)tokens.size() <= session.limit)
            use(cache ? decode(engine, *cache, {0}, {tokens.back()}) : forward_naive(engine, tokens));
    } catch (Interrupted) {
        stop = "interrupted";
        if (result.prefilled == 0) {
            result.prefill_seconds = now() - start;
            result.prefilled = cache ? cache->lengths[0] - kept : 0;
        }
    }
    show(drawn + text.flush());
    result.text = text.text, result.thought = text.thought, result.stop = stop;
    return result;
}

// Prefill: reads the tokens that the cache does not hold yet. Returns the logits (vocabulary) of the last one. `dump`,
// if set, is called with the logits of every token, 32 at a time since a vocabulary is wide.
inline std::vector<float> read_prompt(Session &session, const UseLogits &dump) {
    Engine &engine = session.engine;
    std::vector<int> &tokens = session.tokens;
    auto after_chunk = [&](int count) {
        for (int first = 0; dump && first < count; first += 32)
            dump(logits(engine, first, std::min(32, count - first)));
    };
    int row = (int)tokens.size() - 1;
    if (session.caches.empty()) {
        naive_pass(engine, tokens), after_chunk((int)tokens.size());
    } else {
        Cache &cache = session.caches[0];
        row = prefill_pass(engine, cache, 0, {tokens.begin() + cache.lengths[0], tokens.end()}, after_chunk);
    }
    return logits(engine, row, 1);
}

// ---- llm diff ----------------------------------------------------------------------------------------------

// One token's logits from a cache, compared with the reference's (run_lockstep).
struct DiffStep {
    int token = 0, cached_token = 0;                   // the likeliest: by the reference, by the cache
    bool same_bits = false;                            // of all logits
    double difference = 0, kl = 0;                     // max |logit - logit|; Kullback-Leibler divergence, nats
    double tv = 0;                                     // total variation: half the sum of |p - q|
    double margin = 0;                                 // reference's logits: its token's less the cache's token's
    double reference_seconds = 0, cached_seconds = 0;  // for the logits of this step
};

inline double log_sum_exp(const float *logits, int count) {
    double most = *std::max_element(logits, logits + count), total = 0;
    for (int i = 0; i < count; i++) total += std::exp(logits[i] - most);
    return most + std::log(total);
}

// Compares cached logits with the true ones, in double precision. KL: sum p log(p / q) for p, q = softmax of each.
inline DiffStep compare(const std::vector<float> &truth, const std::vector<float> &cached) {
    DiffStep step;
    int count = (int)truth.size();
    double p_sum = log_sum_exp(truth.data(), count), q_sum = log_sum_exp(cached.data(), count);
    for (int i = 0; i < count; i++) {
        double log_p = truth[i] - p_sum, log_q = cached[i] - q_sum;
        step.difference = std::max(step.difference, std::fabs((double)truth[i] - cached[i]));
        step.kl += std::exp(log_p) * (log_p - log_q);
        step.tv += std::fabs(std::exp(log_p) - std::exp(log_q)) / 2;
    }
    step.kl = std::max(0.0, step.kl);
    step.same_bits = memcmp(truth.data(), cached.data(), truth.size() * sizeof(float)) == 0;
    step.token = argmax(truth.data(), count);
    step.cached_token = argmax(cached.data(), count);
    step.margin = (double)truth[step.token] - truth[step.cached_token];
    return step;
}

// Generates one text on the reference and on each cache; all read the tokens that the reference finds likeliest. The
// reference is the naive path, which sees all, whatever a cache drops; or, if `full` (--against full), the first cache.
// After each token show() gets a step of each other cache.
inline void run_lockstep(Session &session, bool full,
                         const std::function<void(const std::vector<DiffStep> &)> &show) {
    Engine &engine = session.engine;
    std::vector<int> &tokens = session.tokens;
    std::vector<Cache> &caches = session.caches;
    auto cached = [&](Cache &cache) {
        return cache.lengths[0] ? decode(engine, cache, {0}, {tokens.back()}) : prefill(engine, cache, 0, tokens);
    };
    auto timed = [&](double &seconds, const Cache *cache, auto path) {
        double start = now();
        std::vector<float> found = path();
        seconds = now() - start;
        require_finite(found, (int)tokens.size() - 1, cache);
        return found;
    };
    while (!reason_to_stop(session)) {
        double reference_seconds, seconds;
        std::vector<DiffStep> steps;
        std::vector<float> truth =
            timed(reference_seconds, nullptr, [&] { return full ? cached(caches[0]) : forward_naive(engine, tokens); });
        for (size_t i = full; i < caches.size(); i++) {
            steps.push_back(compare(truth, timed(seconds, &caches[i], [&] { return cached(caches[i]); })));
            steps.back().reference_seconds = reference_seconds;
            steps.back().cached_seconds = seconds;
        }
        tokens.push_back(steps[0].token);
        show(steps);
    }
}

// ---- The program -------------------------------------------------------------------------------------------

#ifndef LLM_WITHOUT_MAIN
#include "commands/main.h"

int main(int argc, char **argv) { return run_program({argv + 1, argv + argc}); }
#endif

#endif
