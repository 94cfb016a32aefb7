// llm eval: how much quality each cache keeps. All caches read the same texts: perplexity, KL divergence to the f32
// cache, answers that need facts from far back, bytes, tokens/s.
#pragma once

#include <sstream>

#include "bench.h"

// ---- Texts -------------------------------------------------------------------------------------------------

// A question in a text: the tokens [start, end) are its answer, a fact that was told `distance` tokens before.
struct Recall {
    int start, end, distance;
};

struct EvalText {
    std::vector<int> tokens;
    std::vector<Recall> questions;
};

// Finds the tokens of a question's answer, and its fact's distance. `ends` (token): characters of the text up to there.
inline Recall read_question(const Section &question, const std::vector<size_t> &ends) {
    auto token_of = [&](const char *key) {
        int place = question.integer(key, 1, (int)ends.back() - 2);
        return (int)(std::upper_bound(ends.begin(), ends.end(), (size_t)place) - ends.begin());
    };
    int fact = token_of("fact_char"), start = token_of("answer_char");
    Recall recall{start, token_of("place_char") + 2, start - fact};  // up to the full stop after the place
    const char *where = question.name.c_str();
    if (recall.distance <= 0) fail("%s: fact_char does not stand before answer_char", where);
    if (recall.end > (int)ends.size() || recall.end <= recall.start)
        fail("%s: its answer ends before it begins, or behind the text", where);
    return recall;
}

// Reads a line of heldout_mixed.jsonl (weights_tools/README.md).
inline EvalText read_story(const std::string &where, const std::string &line, const Tokenizer *tokenizer) {
    Json root = parse_json(where, line);
    Section story{where, &root};
    story.need("text");
    const Json *questions = story.find("questions");
    if (questions && !is_list(questions)) story.refuse("questions", questions, "a list");
    EvalText result;
    result.tokens = encode(tokenizer, story.text("text", ""), where);
    std::vector<size_t> ends;
    TextStream stream(tokenizer);
    size_t characters = 0;
    for (int token : result.tokens) {
        for (char byte : stream.next(token)) characters += (byte & 0xc0) != 0x80;  // characters, not bytes
        ends.push_back(characters);
    }
    for (const Json *question : items_of(questions))
        result.questions.push_back(read_question({where + ": a question", question}, ends));
    return result;
}

// The texts of a .jsonl file with their questions; or any other text, cut into pieces as long as the context.
inline std::vector<EvalText> eval_texts(const Options &options, const std::string &directory, const Config &config,
                                        const Tokenizer *tokenizer) {
    std::vector<EvalText> texts;
    size_t context = options.context ? options.context : config.context;
    std::string file = options.prompt_file, content = options.prompt;
    bool from_ids = options.has("--ids");
    if (file.empty() && !from_ids) {
        file = join_path(directory, "heldout_mixed.jsonl");
        if (!file_exists(file)) fail("%s: no such file: give a text with -f FILE or --ids 1,2,3", file.c_str());
        content = read_file(file, 1 << 28);
    }
    if (content.empty() && !from_ids) fail("%s: is empty, expected a text", file.c_str());
    if (from_ids || std::filesystem::path(file).extension() != ".jsonl") {
        std::vector<int> tokens =
            from_ids ? prompt_tokens(options, tokenizer, config) : encode(tokenizer, content, file);
        if (tokens.size() < 2) fail("%s: one token, expected two or more", from_ids ? "--ids" : file.c_str());
        for (size_t begin = 0; begin + 1 < tokens.size(); begin += context) {
            size_t end = std::min(begin + context, tokens.size());
            texts.push_back({{tokens.begin() + (int64_t)begin, tokens.begin() + (int64_t)end}, {}});
        }
        return texts;
    }
    std::istringstream lines(content);
    for (std::string line; std::getline(lines, line);) {
        std::string where = file + " line " + std::to_string(texts.size() + 1);
        texts.push_back(read_story(where, line, tokenizer));
        size_t tokens = texts.back().tokens.size();
        if (tokens < 2 || tokens > context)
            fail("%s: has %s, expected 2 to the %zu of the context", where.c_str(),
                 counted((int64_t)tokens, "token").c_str(), context);
    }
    return texts;
}

// ---- Figures -----------------------------------------------------------------------------------------------

constexpr int recall_classes = 6;
// Width of a class of distances, in tokens: a sixth of the context, rounded down to hundreds, but 100 at least.
inline int recall_step(const Config &config) { return 100 * std::max(1, config.context / (100 * recall_classes)); }

// Sums and counts over the texts that a cache has read.
struct EvalFigures {
    double loss = 0, loss_squares = 0, kl = 0;  // sums over the predicted tokens, nats
    int predicted = 0;
    int asked[recall_classes] = {}, right[recall_classes] = {};
    int longest = 0;              // tokens of the longest text
    double bytes_per_token = 0;   // of the longest text
    std::vector<char> hits = {};  // (token of this text): it was predicted as the likeliest
    double mean_kl() const { return kl / predicted; }
    double perplexity() const { return std::exp(loss / predicted); }
    // The standard error of the perplexity: that of the mean loss, times the perplexity.
    double standard_error() const {
        double mean = loss / predicted, variance = std::max(0.0, loss_squares / predicted - mean * mean);
        return perplexity() * std::sqrt(variance / predicted);
    }
};

struct EvalResult : EvalFigures {
    Cache cache;
    std::string activations;         // f32 or bf16; "" without --activations bf16
    std::vector<double> rates = {};  // decode, tokens/s
};

struct Evaluation {
    Engine engine;
    std::vector<EvalResult> results;  // the first: of the f32 cache
    size_t texts;
};

// Rounds activations to bf16 or not, as the result asks: the same weights serve both kinds of rows.
inline void use_activations(Engine &engine, const EvalResult &result) {
    if (!result.activations.empty()) round_inputs(engine.model, result.activations == "bf16");
}

// Reads a text into all caches, a chunk at a time. The first one's predictions, in f32, are those to compare with. The
// text's own token comes next, whatever was predicted. After Ctrl-C the figures are of what all caches have read.
inline void eval_text(Engine &engine, std::vector<EvalResult> &results, const EvalText &text) {
    constexpr int chunk = 128;
    int count = (int)text.tokens.size(), vocabulary = engine.model.config.vocabulary;
    for (EvalResult &result : results) rewind(result.cache, 0, 0), result.hits.assign(count, 0);
    for (int begin = 0, end; begin < count; begin = end) {
        std::vector<double> reference;  // (tokens of the chunk, vocabulary): log-probabilities
        std::vector<EvalFigures> read(results.begin(), results.end());  // the same sums, with this chunk
        end = std::min(begin + chunk, count);
        for (size_t i = 0; i < read.size(); i++) {
            int next = begin;
            EvalFigures &result = read[i];
            Cache &cache = results[i].cache;
            use_activations(engine, results[i]);
            auto use = [&](const float *found, bool is_reference) {
                require_finite({found, found + vocabulary}, next - 1, &cache);
                double log_sum = log_sum_exp(found, vocabulary), loss = log_sum - found[text.tokens[next]];
                for (int id = 0; id < vocabulary; id++) {
                    if (is_reference) reference.push_back(found[id] - log_sum);
                    double log_p = reference[(size_t)(next - 1 - begin) * vocabulary + id];
                    if (!is_reference) result.kl += std::exp(log_p) * (log_p - (found[id] - log_sum));
                }
                result.loss += loss;
                result.loss_squares += loss * loss;
                result.predicted++;
                result.hits[next] = argmax(found, vocabulary) == text.tokens[next];
            };
            prefill_pass(engine, cache, 0, {&text.tokens[begin], &text.tokens[0] + end}, [&](int size) {
                std::vector<float> rows = logits(engine, 0, size);
                for (int row = 0; row < size && ++next < count; row++) use(&rows[(size_t)row * vocabulary], i == 0);
            });
            if (end < result.longest) continue;
            result.longest = end;
            result.bytes_per_token = bytes_of(cache).total() / end;
        }
        for (size_t i = 0; i < read.size(); i++) (EvalFigures &)results[i] = read[i];
    }
    for (const Recall &recall : text.questions) {
        int in = std::min(recall.distance / recall_step(engine.model.config), recall_classes - 1);
        for (EvalResult &result : results) {
            auto first = result.hits.begin() + recall.start, last = result.hits.begin() + recall.end;
            result.asked[in]++;
            result.right[in] += std::count(first, last, 1) == last - first;
        }
    }
}

constexpr int eval_steps = 32;  // tokens that are decoded to time one

// Times decoding after the last text, or after as much of it as leaves room, in rounds over all caches. The first round
// warms up.
inline void eval_decode(Engine &engine, std::vector<EvalResult> &results, const EvalText &text, int repeats) {
    for (int round = 0; round <= repeats; round++) {
        for (EvalResult &result : results) {
            const int end = std::min((int)text.tokens.size(), limit_of(result.cache) - eval_steps);
            use_activations(engine, result);
            const int kept = rewind(result.cache, 0, end);
            prefill_pass(engine, result.cache, 0, {text.tokens.begin() + kept, text.tokens.begin() + end});
            Progress::add(kept - end);  // counted when it was read first
            double start = now();
            decode_some(engine, result.cache, eval_steps);
            if (round > 0) result.rates.push_back(eval_steps / (now() - start));
        }
    }
}

// ---- What is said ------------------------------------------------------------------------------------------

// A row of the table; `f32` is the reference's result.
inline Report eval_row(const Config &config, const EvalResult &result, const EvalResult &f32) {
    Report report;
    const Cache &cache = result.cache;
    const std::vector<Report> kinds = kinds_of(config, cache);
    report.list("kinds", kinds).above = lines_of(kinds, "  ");
    add_names(report, &cache, "%-18s", " %-4s", " %-4s", {"cache", "K", "V"});
    if (!result.activations.empty()) report.show("activations", result.activations, " %-4s", "act.");
    const bool whole = !std::isnan(result.bytes_per_token);  // the longest text was read to its end
    report.show("bytes_per_token", result.bytes_per_token, whole ? " %8.1f" : "        -", "B/token");
    report.show("times_smaller", f32.bytes_per_token / result.bytes_per_token, whole ? " %6.2f" : "      -", "x");
    report.show("perplexity", result.perplexity(), " %9.4f", "perplex.");
    report.show("standard_error", result.standard_error(), " %7.4f", "+-");
    report.show("kl", result.mean_kl(), " %9.2e ", "KL to f32 ");
    std::vector<Report> recall;
    bool any = *std::max_element(f32.asked, f32.asked + recall_classes) > 0;
    for (int i = 0; any && i < recall_classes; i++) {
        const int step = recall_step(config), distance = i * step, asked = result.asked[i], right = result.right[i];
        const bool last = i + 1 == recall_classes;
        const std::string head = last ? formatted("%d+", distance) : formatted("<%-4d", distance + step);
        const int width = (int)head.size();
        report.say(asked ? formatted(" %*.0f %%", width - 2, 100.0 * right / asked) : formatted(" %*s", width, "-"),
                   head);
        if (asked) recall.push_back(Report().add("distance", distance).add("questions", asked).add("right", right));
    }
    report.list("recall", recall);
    return report.show("tokens_per_second", median(result.rates), result.rates.empty() ? "         -" : " %9.1f",
                       "tokens/s");
}

inline Report report_of(const Evaluation &eval) {
    const EvalResult &f32 = eval.results[0];
    std::vector<Report> rows;
    int asked = 0;
    for (const EvalResult &result : eval.results)
        if (result.predicted) rows.push_back(eval_row(eval.engine.model.config, result, f32));
    for (int count : f32.asked) asked += count;
    Report report;
    report.table("results", rows).add("texts", eval.texts);
    report.add("predicted_tokens", f32.predicted, "\n" + counted(f32.predicted, "token") + " predicted");
    report.say("; B/token: of the longest text, metadata included; x: times smaller than f32");
    if (asked)
        report.say(";\nrecall: " + counted(asked, "question") + " by the distance, in tokens, of the fact asked for");
    report.show("device", eval.engine.name(), "\ndevice: %s\n");
    if (interrupted()) report.add("interrupted", true, "interrupted\n");
    return report;
}

// Opens the f32 cache, a second one if --activations bf16 is given, then the caches that the flags ask for. --all gives
// each precision, two pairs that differ, a page table, and rings of a quarter of the context.
inline std::vector<EvalResult> open_results(const Options &options, Engine &engine, int capacity) {
    std::vector<EvalResult> results;
    auto add = [&](const CacheChoice &choice, int window = 0, int sinks = -1) {
        Options with = options;
        if (window) with.window = window, with.sinks = sinks;
        const char *activations = options.activations == "f32" ? "" : results.empty() ? "f32" : "bf16";
        EvalResult &result = results.emplace_back();  // with braces, g++ 12 -O3 warns that it is uninitialized
        result.cache = open_cache(with, engine, choice, capacity);
        result.activations = activations;
    };
    auto is_reference = [](const CacheChoice &choice) {
        return std::holds_alternative<Contiguous>(choice.layout) && types_of(choice) == "f32";
    };
    add({Contiguous{}, F32{}, F32{}});
    if (options.activations == "bf16") add({Contiguous{}, F32{}, F32{}});
    if (options.standard_set) {
        int window = std::max(8, engine.model.config.context / 4);
        for_each_type<Precision>([&](auto type) {
            if (!is_reference({Contiguous{}, type, type})) add({Contiguous{}, type, type});
        });
        add({Contiguous{}, Int8{}, Int4{}});
        add({Contiguous{}, Int4{}, Int2{}});
        add({Paged{}, Int4{}, Int4{}});
        for (int sinks : {0, 4}) add({Ring{}, F16{}, F16{}}, window, sinks);
        add({Ring{}, Int4{}, Int4{}}, window, 4);
        return results;
    }
    for (const CacheChoice &choice : options.caches())
        if (!is_reference(choice)) add(choice);
    return results;
}

inline Evaluation evaluate(const Options &options) {
    const std::string &directory = options.directory;
    Engine engine = open_engine(options, directory);
    const Config &config = engine.model.config;
    TokenizerPointer tokenizer = open_tokenizer(options, directory);
    if (options.context && (options.context > config.context || options.context < 2))
        fail("-c %d: expected 2 to %d positions, for which this model was made", options.context, config.context);
    std::vector<EvalText> texts = eval_texts(options, directory, config, tokenizer.get());
    int longest = 0;
    for (const EvalText &text : texts) longest = std::max(longest, (int)text.tokens.size());
    std::vector<EvalResult> results = open_results(options, engine, std::max(longest, eval_steps));
    try {
        double tokens = 0;
        for (const EvalText &text : texts) tokens += (double)(text.tokens.size() * results.size());
        Progress progress(counted((int64_t)texts.size(), "text") + ", " + counted((int64_t)results.size(), "cache"),
                          tokens + (double)(results.size() * eval_steps * (options.repeats + 1)));
        for (const EvalText &text : texts) eval_text(engine, results, text);
        eval_decode(engine, results, texts.back(), options.repeats);
    } catch (Interrupted) {
        for (EvalResult &result : results)
            if (result.longest < longest) result.bytes_per_token = NAN;
    }
    return {std::move(engine), std::move(results), texts.size()};
}

inline int run_eval(const Options &options) { return report_of(evaluate(options)).print(options.json); }
