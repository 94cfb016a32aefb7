// Drafts: something quick guesses the next tokens, and one pass of the model checks all guesses.
//
// A pass reads the weights and the cache once, whether it computes one token or five (Leviathan et al. 2023; Chen et
// al. 2023). Who guesses is a smaller model with the same tokenizer, the draft, or the text itself: what followed its
// last words before (n-grams; Saxena 2023, prompt lookup). The model that checks is the target:
//   propose     a line break is to be read next; the guesses at what follows:  At noon , Tom
//   step        one pass:                \n   At     noon   ,   Tom
//               the target's own next:   At   noon   ,      it
//   accept      three guesses are its own tokens; the fourth is not, and "it" is taken in its place
//   go back     the cache forgets "Tom"
// Why the text is the one without drafts: a token's vectors have the same bits in any pass, and the draw for a position
// is a function of seed and position alone: a guess is right if it is what the target draws there anyway. (Not so on a
// GPU, where several tokens go through other kernels than one: there a text may part at a tie.)
#pragma once

#include <deque>

#include "forward.cu"
#include "sample.h"

// Guesses at what follows a text.
struct Guesses {
    std::vector<int> tokens = {};
    std::vector<std::vector<double>> drawn = {};  // (guess): by Leviathan's rule, the distribution that it is from
    int match = 0;                                // n-grams: so many of the last ids were found earlier in the text,
    bool paused = false;                          // and guesses would cost more time than they save
};

// What a pass of the target brought.
struct PassLog {
    int match;   // of its n-grams; 0 if it was of many texts
    int tokens;  // that it brought
    int right;   // guesses
    std::vector<int> guesses;
    bool paused;
    double seconds;   // of all; 0 where it read prompts, too
    double guessing;  // of the guesses
};

// Who guesses, and what came of it.
struct Drafter {
    int most = 0;                              // guesses of a pass
    int vocabulary = 0;                        // ids that the target knows
    std::unique_ptr<Engine> engine = nullptr;  // the draft; n-grams where there is none
    Cache cache = {};                          // the draft's: a sequence for each of the target's,
    std::vector<std::vector<int>> held = {};   // (sequence): and the tokens that it has read
    bool rejection = false;                    // --draft-rule leviathan
    bool pauses = false;                       // n-grams: no guesses while they cost more time than they save
    struct Counts {
        int passes = 0, drafted = 0, accepted = 0, paused = 0, guessed = 0;  // guessed: passes with guesses
        std::vector<int> tried = {}, right = {};                             // (guess): looked at, and right
        double guessing = 0, checking[2] = {};  // seconds: of all guesses; of the rest of passes without and with them
    };
    std::deque<PassLog> log = {};  // the last passes,
    Counts counts = {};            // and all since these were emptied
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

// At most so many guesses at what follows a text, whose last token is not read yet.
inline Guesses propose(Drafter &drafter, int sequence, const std::vector<int> &tokens, const Sampler &sampler,
                       int most) {
    Guesses guesses;
    if (most > 0 && drafter.engine) ask_draft(drafter, sequence, tokens, sampler, most, guesses);
    else if (most > 0) look_up(drafter, tokens, most, guesses);
    return guesses;
}

// Guesses that can follow the tokens of a pass, which are at positions [first, end): as many as the cache can take
// back. int4 and int2 encode 32 positions together, and only those that are certain: guesses never fill such a block.
inline int guesses_of_pass(const Cache &cache, int first, int end, int most) {
    most = std::min({most, chunk_of(cache) - (end - first), limit_of(cache) - end});
    const bool same_block = end % group_size || first % group_size == 0;
    if (blocks_of(cache)) most = std::min(most, same_block ? group_size - 1 - end % group_size : 0);
    return std::max(0, most);
}

// The token after `position`, at which guess number `i` was made.
inline int next_token(const Drafter &drafter, const Guesses &guesses, int i, const Sampler &sampler,
                      const std::vector<float> &logits, int position) {
    if (!drafter.rejection) return sample(sampler, logits, position);
    const bool any = i < (int)guesses.tokens.size();
    const int guess = any ? guesses.tokens[i] : 0;
    std::vector<double> q;
    if (any) q = guesses.drawn.empty() ? point_mass(guess, logits.size()) : guesses.drawn[i];
    return check_guess(sampler, logits, position, guess, q);
}

// How many guesses are right: those with which the text went on from token `size` on.
inline int count_right(const Guesses &guesses, const std::vector<int> &tokens, size_t size) {
    const auto begin = guesses.tokens.begin();
    return (int)(std::mismatch(begin, guesses.tokens.end(), tokens.begin() + size, tokens.end()).first - begin);
}

// The next tokens of the only text of a cache, `most` guesses among them: a pass over its last token and the guesses.
// take(logits) adds what follows to `tokens`, and says whether the text may go on. The last one is of next_token().
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

// How many guesses are worth their time after a match of so many ids: compares what a token took in passes with guesses
// and in those without, in the last passes. If there are none with guesses, one guess is tried.
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

// N-grams: what followed the last three tokens where they were found before, or the last two, or one. A text that
// repeats itself goes on with the guesses themselves.
inline void look_up(const Drafter &drafter, const std::vector<int> &tokens, int most, Guesses &guesses) {
    const int count = (int)tokens.size();
    int from = 0;
    for (int at = count - 1; at > 0 && guesses.match < 3; at--) {
        int match = 0;
        while (match < std::min(3, at) && tokens[at - 1 - match] == tokens[count - 1 - match]) match++;
        if (match > guesses.match) guesses.match = match, from = at;
    }
    most = guesses.match ? guesses_worth_making(drafter, most, guesses) : 0;
    for (int i = from; i < from + most; i++) guesses.tokens.push_back(i < count ? tokens[i] : guesses.tokens[i - count]);
}

// The draft reads what it has not read of the text, then each of its own guesses but the last. First it rewinds to the
// longest prefix that its cache shares with the text, so wrong guesses and new texts need no call.
inline void ask_draft(Drafter &drafter, int sequence, const std::vector<int> &tokens, const Sampler &sampler, int most,
                      Guesses &guesses) {
    std::vector<int> &held = drafter.held[sequence];
    const auto differs = std::mismatch(held.begin(), held.end(), tokens.begin(), tokens.end() - 1).first;
    held.resize(rewind(drafter.cache, sequence, (int)(differs - held.begin())));
    std::vector<int> unread(tokens.begin() + held.size(), tokens.end());
    if (*std::max_element(unread.begin(), unread.end()) >= drafter.engine->model.config.vocabulary) return;
    most = std::min(most, limit_of(drafter.cache) - (int)tokens.size());  // its own context
    while ((int)guesses.tokens.size() < most) {
        std::vector<float> row = prefill(*drafter.engine, drafter.cache, sequence, unread);
        held.insert(held.end(), unread.begin(), unread.end());
        const int position = (int)held.size() - 1;
        require_finite(row, position, &drafter.cache, "the draft, ");
        row.resize(drafter.vocabulary, -INFINITY);  // a head may be wider than the tokenizer that both have
        if (drafter.rejection) guesses.drawn.push_back(distribution(sampler, row));
        unread = {drafter.rejection ? draw_from(guesses.drawn.back(), draw(sampler.seed, position))
                                    : argmax(row.data(), (int)row.size())};
        guesses.tokens.push_back(unread[0]);
    }
}
