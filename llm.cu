// llm: a small language model, with and without a KV cache.
//
// generate() makes a text: it reads the prompt (prefill), then takes step by step. run_lockstep() makes one on two paths
// side by side: without a cache, and with one. What a step computes is in forward.cu; how a token is drawn, in sample.h;
// the flags and the other commands are in commands/.
#ifndef LLM_CU
#define LLM_CU

#include "base/text.h"
#include "batch.h"

// ---- llm generate ------------------------------------------------------------------------------------------

// How many tokens may follow a prompt, of `count` that are asked for: all but the last of them are stored.
inline int room_for(int prompt, int count, int positions) {
    return (int)std::min<int64_t>(count, (int64_t)positions - prompt + 1);
}

// All that one text needs to go on, on either path.
struct Session {
    Engine engine;
    TokenizerPointer tokenizer;
    std::vector<Cache> caches = {};  // generate: one, or none on the naive path; diff: all that are compared
    Drafter drafter = {};            // guesses nothing unless --draft says who does
    std::vector<int> tokens = {};    // the prompt, then what was generated
    int prompt = 0;                  // tokens of the prompt
    int count = 0;                   // tokens to generate at most
    int limit = 0;                   // positions that the cache holds
    bool ignore_end = false;         // goes on after an end id
    Sampler sampler = {};

    int generated() const { return (int)tokens.size() - prompt; }
    int left() const { return room_for(prompt, count, limit) - generated(); }
};

// Why nothing follows the tokens so far, or nullptr if something may.
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
    int prefilled = 0, decoded = 0;  // tokens of the prompt that were read; tokens that were decoded,
    std::vector<int> passes = {};    // and in each pass the positions that the last of them sees
};

using UseLogits = std::function<void(const std::vector<float> &)>;  // rows of them

// Reads what the cache does not hold yet of session.tokens. Returns the logits of the last token. `dump`, if there is
// one, gets those of all, some at a time, since a vocabulary is wide.
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

// Prefill, then step by step. show(text) gets what `text` shows of the tokens, as they come.
inline Generation generate(Session &session, Writer text, const UseLogits &dump,
                           const std::function<void(const std::string &)> &show) {
    Engine &engine = session.engine;
    std::vector<int> &tokens = session.tokens;
    Cache *cache = session.caches.empty() ? nullptr : &session.caches[0];
    const int kept = cache ? cache->lengths[0] : 0;  // of the turns before, in a chat
    Generation result;
    const char *stop = reason_to_stop(session);
    std::string drawn;  // the text of the tokens that this step drew
    // After a token was drawn: does the text go on?
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
        // What follows the last token is asked for by `dump` alone, if there is room.
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

// ---- llm diff ----------------------------------------------------------------------------------------------

// A token of one cache compared with the reference: the naive path, or with --against full an f32 cache of all positions.
struct DiffStep {
    int token = 0, cached_token = 0;                   // what each finds likeliest, the reference first
    bool same_bits = false;                            // of all logits
    double difference = 0, kl = 0;                     // max |logit - logit|; Kullback-Leibler divergence, nats
    double tv = 0;                                     // total variation: half the sum of |p - q|
    double margin = 0;                                 // the reference's logit of its token less that of the cache's
    double reference_seconds = 0, cached_seconds = 0;  // for the logits of this step
};

inline double log_sum_exp(const float *logits, int count) {
    double most = *std::max_element(logits, logits + count), total = 0;
    for (int i = 0; i < count; i++) total += std::exp(logits[i] - most);
    return most + std::log(total);
}

// How far cached logits lie from the true ones, in double precision. KL: sum p log(p / q) for p, q = softmax of each.
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

// All get the tokens that the reference finds likeliest. It is the first cache if that is `full` (--against full), else
// the naive path, which sees all that the model does, whatever a cache drops. show(steps) is called after each token with a step of each cache.
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
