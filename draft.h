// Drafts: something quick guesses the next tokens, and one pass of the model checks all guesses.
//
// A pass reads the weights and the cache once, for one token as for five (Leviathan et al. 2023; Chen et al. 2023).
// Guesses are made by the draft, a smaller model with the same tokenizer, or taken from the text itself: what followed
// its last tokens before (n-grams; Saxena 2023, prompt lookup). The model that checks them is the target:
//   propose     a line break is to be read next; the guesses at what follows:  At noon , Tom
//   step        one pass:                \n   At     noon   ,   Tom
//               the target's own next:   At   noon   ,      it
//   accept      three guesses are right; the fourth is not, and "it" is taken in its place
//   rewind      "Tom" is cut from the cache
// The text is the one without drafts: a token's vectors have the same bits in any pass, and the draw for a position is
// a function of seed and position alone. A guess is right if the target draws the same token there. (On a GPU several
// tokens use other kernels than one does, so a text may change where two logits are nearly equal.)
#pragma once

#include <deque>

#include "forward.cu"
#include "sample.h"

// Guesses at what follows a text.
struct Guesses {
    std::vector<int> tokens = {};
    std::vector<std::vector<double>> drawn = {};  // (guess): for rejection sampling, what it was drawn from
    int match = 0;                                // n-grams: how many of the last ids were found earlier
    bool paused = false;                          // n-grams: guesses would cost more time than they save
};

// One step of the target: what its guesses cost and saved.
struct PassLog {
    int match;   // Guesses::match; 0 if it was of many texts
    int tokens;  // drawn in it
    int right;   // right guesses
    std::vector<int> guesses;
    bool paused;
    double seconds;   // of the whole step; 0 if it read prompts, too
    double guessing;  // seconds of that for making guesses
};

// Makes guesses, by a draft model or by n-grams, and counts how many were right.
struct Drafter {
    int most = 0;                              // guesses of a pass at most; 0: none are made
    int vocabulary = 0;                        // ids that the target knows
    std::unique_ptr<Engine> engine = nullptr;  // the draft model; nullptr: n-grams
    Cache cache = {};                          // the draft model's, with the target's sequences
    std::vector<std::vector<int>> held = {};   // (sequence): tokens that this cache holds
    bool rejection = false;                    // check by rejection sampling: --draft-rule leviathan
    bool pauses = false;                       // n-grams: no guesses while they cost more time than they save
    struct Counts {
        int passes = 0, drafted = 0, accepted = 0, paused = 0, guessed = 0;  // guessed: passes with guesses
        std::vector<int> tried = {}, right = {};                             // (guess): checked; right
        double guessing = 0, checking[2] = {};  // seconds: to make guesses; the rest of steps without, with guesses
    };
    std::deque<PassLog> log = {};  // of the last 128 passes
    Counts counts = {};            // of all passes since the last reset
    void add(const PassLog &pass) {
        const int count = (int)pass.guesses.size();
        log.push_back(pass);
        if (log.size() > 128) log.pop_front();
        counts.tried.resize(most), counts.right.resize(most);
        counts.passes++, counts.drafted += count, counts.accepted += pass.right;
        counts.guessed += count > 0, counts.paused += pass.paused;
        counts.guessing += pass.guessing, counts.checking[count > 0] += pass.seconds - pass.guessing;
        for (int i = 0; i < std::min({count, pass.right + 1, most}); i++)
            counts.tried[i]++, counts.right[i] += i < pass.right;
    }
};

inline void look_up(const Drafter &drafter, const std::vector<int> &tokens, int most, Guesses &guesses);
inline void ask_draft(Drafter &drafter, int sequence, const std::vector<int> &tokens, const Sampler &sampler, int most,
                      Guesses &guesses);

// Returns at most `most` guesses at what follows a text, whose last token is not read yet.
inline Guesses propose(Drafter &drafter, int sequence, const std::vector<int> &tokens, const Sampler &sampler,
                       int most) {
    Guesses guesses;
    if (most > 0 && drafter.engine) ask_draft(drafter, sequence, tokens, sampler, most, guesses);
    else if (most > 0) look_up(drafter, tokens, most, guesses);
    return guesses;
}

// Returns how many guesses, at most `most`, can follow a pass's tokens at positions [first, end). The cache must be
// able to forget them, so they never fill one of the blocks of 32 positions that int4 and int2 encode together.
inline int guesses_of_pass(const Cache &cache, int first, int end, int most) {
    most = std::min({most, chunk_of(cache) - (end - first), limit_of(cache) - end});
    const bool same_block = end % group_size || first % group_size == 0;
    if (blocks_of(cache)) most = std::min(most, same_block ? group_size - 1 - end % group_size : 0);
    return std::max(0, most);
}

// Draws the token after `position`, for which guess number `i` was made, if there is one.
inline int next_token(const Drafter &drafter, const Guesses &guesses, int i, const Sampler &sampler,
                      const std::vector<float> &logits, int position) {
    if (!drafter.rejection) return sample(sampler, logits, position);
    const bool any = i < (int)guesses.tokens.size();
    const int guess = any ? guesses.tokens[i] : 0;
    std::vector<double> q;
    if (any) q = guesses.drawn.empty() ? point_mass(guess, logits.size()) : guesses.drawn[i];
    return check_guess(sampler, logits, position, guess, q);
}

// Returns how many guesses are right: the first ones that equal the tokens of the text from index `size` on.
inline int count_right(const Guesses &guesses, const std::vector<int> &tokens, size_t size) {
    const auto begin = guesses.tokens.begin();
    return (int)(std::mismatch(begin, guesses.tokens.end(), tokens.begin() + size, tokens.end()).first - begin);
}

// One step of a cache's only text (sequence 0), with at most `most` guesses, or none without --draft. Adds each drawn
// token to `tokens`, then calls take(logits), which returns whether the text goes on.
template <class Take>
void step_with_guesses(Engine &engine, Cache &cache, Drafter &drafter, const Sampler &sampler, std::vector<int> &tokens,
                       int most, Take take) {
    const double start = now();
    const int size = (int)tokens.size();
    const Guesses guesses =
        propose(drafter, 0, tokens, sampler, guesses_of_pass(cache, size - 1, size, std::min(most, drafter.most)));
    const double guessing = now() - start;
    const std::vector<Text> texts = {{0, {tokens.back()}, guesses.tokens}};
    step(engine, cache, texts, [&](int, const std::vector<float> &logits) {
        const int position = (int)tokens.size() - 1;
        require_finite(logits, position, &cache);
        tokens.push_back(next_token(drafter, guesses, (int)tokens.size() - size, sampler, logits, position));
        return take(logits) ? tokens.back() : -1;
    });
    drafter.add({guesses.match, (int)tokens.size() - size, count_right(guesses, tokens, size), guesses.tokens,
                 guesses.paused, now() - start, guessing});
}

// ---- Guesses -------------------------------------------------------------------------------------------------------

// Returns how many guesses are worth their time after a match of guesses.match ids: all or none, or one to try if no
// recent pass had guesses. Compares the seconds per token of recent passes with guesses and without.
inline int guesses_worth_making(const Drafter &drafter, int most, Guesses &guesses) {
    if (!drafter.pauses) return most;
    double seconds[2] = {}, tokens[2] = {};  // (without guesses, with them)
    for (const PassLog &pass : drafter.log) {
        const bool with = !pass.guesses.empty(), other = with && pass.match && pass.match != guesses.match;
        if (!other && pass.seconds > 0) seconds[with] += pass.seconds, tokens[with] += pass.tokens;
    }
    if (tokens[1] == 0) return std::min(most, tokens[0] > 0 ? 1 : 0);
    guesses.paused = seconds[1] * tokens[0] > seconds[0] * tokens[1];
    return guesses.paused ? 0 : most;
}

// N-grams: guesses what followed the last three tokens where they were before, else the last two, else the last one.
// Past the end of the text come the guesses themselves, so a text that repeats itself goes on.
inline void look_up(const Drafter &drafter, const std::vector<int> &tokens, int most, Guesses &guesses) {
    const int count = (int)tokens.size();
    int from = 0;
    for (int at = count - 1; at > 0 && guesses.match < 3; at--) {
        int match = 0;
        while (match < std::min(3, at) && tokens[at - 1 - match] == tokens[count - 1 - match]) match++;
        if (match > guesses.match) guesses.match = match, from = at;
    }
    most = guesses.match ? guesses_worth_making(drafter, most, guesses) : 0;
    for (int i = from; i < from + most; i++)
        guesses.tokens.push_back(i < count ? tokens[i] : guesses.tokens[i - count]);
}

// The draft reads the tokens of the text that it has not read, then each of its own guesses but the last. First it
// rewinds to the longest prefix that its cache shares with the text, so wrong guesses and new texts need no call.
inline void ask_draft(Drafter &drafter, int sequence, const std::vector<int> &tokens, const Sampler &sampler, int most,
                      Guesses &guesses) {
    std::vector<int> &held = drafter.held[sequence];
    const auto differs = std::mismatch(held.begin(), held.end(), tokens.begin(), tokens.end() - 1).first;
    held.resize(rewind(drafter.cache, sequence, (int)(differs - held.begin())));
    std::vector<int> unread(tokens.begin() + held.size(), tokens.end());
    if (*std::max_element(unread.begin(), unread.end()) >= drafter.engine->model.config.vocabulary) return;
    most = std::min(most, limit_of(drafter.cache) - (int)tokens.size());  // its own context may be shorter
    while ((int)guesses.tokens.size() < most) {
        std::vector<float> row = prefill(*drafter.engine, drafter.cache, sequence, unread);
        held.insert(held.end(), unread.begin(), unread.end());
        const int position = (int)held.size() - 1;
        require_finite(row, position, &drafter.cache, "the draft, ");
        row.resize(drafter.vocabulary, -INFINITY);  // its head may have more rows than the tokenizer has ids
        if (drafter.rejection) guesses.drawn.push_back(distribution(sampler, row));
        unread = {drafter.rejection ? draw_from(guesses.drawn.back(), draw(sampler.seed, position))
                                    : argmax(row.data(), (int)row.size())};
        guesses.tokens.push_back(unread[0]);
    }
}
