// Drafts: somebody quick guesses the next tokens, and one pass of the model checks all guesses.
//
// A pass reads the weights and the cache once, whether it computes one token or five (Leviathan et al. 2023; Chen et
// al. 2023). Who guesses is a smaller model with the same tokenizer, the draft, or the text itself: what followed its
// last words before (n-grams; Saxena 2023, prompt lookup). The model that checks is the target:
//   propose     a line break is to be read next; the guesses at what follows:  At noon , Tom
//   verify      one pass:                \n   At     noon   ,   Tom
//               the target's own next:   At   noon   ,      it
//   accept      three guesses are its own tokens; the fourth is not, and "it" stands in its place
//   roll back   the cache forgets "Tom"
// Why the text is the one without drafts: a token's vectors have the same bits in any pass, and the draw for a position
// is a function of seed and position alone: a guess is right if it is what the target draws there anyway. (Not so on a
// GPU, where several tokens go through other kernels than one: there a text may part at a tie.)
#pragma once

#include <deque>

// A sequence whose next tokens are wanted, and the guesses at them.
struct Proposal {
    int sequence;
    const std::vector<int> &tokens;  // so far; the last one is not read yet
    const Sampler &sampler;
    int most;  // guesses at most
    std::vector<int> guesses = {};
    std::vector<std::vector<double>> drawn = {};  // (guess): by Leviathan's rule, the distribution that it is from
    int match = 0;                                // n-grams: how many of the last ids stood before,
    bool paused = false;                          // and guesses at what follows would cost more time than they save
    int token(size_t position) const {
        return position < tokens.size() ? tokens[position] : guesses[position - tokens.size()];
    }
    // How many guesses are right. take(row) takes the target's own token after that row of the pass, and ended() says
    // whether nothing may follow it.
    template <class Take, class Ended>
    int accept(Take take, Ended ended) const {
        int row = 0;
        for (; take(row) == (row < (int)guesses.size() ? guesses[row] : -1); row++)
            if (ended()) return row + 1;
        return row;
    }
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
    struct Checked {
        int match, tokens, right;  // match: 0 where it is of many texts; tokens: that the pass brought
        std::vector<int> guesses;
        bool paused;
        double seconds, guessing;  // of all, 0 where it read prompts, too; of the guesses
    };
    struct Counts {
        int passes = 0, drafted = 0, accepted = 0, paused = 0, guessed = 0;  // guessed: passes with guesses
        std::vector<int> tried = {}, right = {};                             // (guess): looked at, and right
        double guessing = 0, checking[2] = {};  // seconds: of all guesses; of the rest of passes without and with them
    };
    std::deque<Checked> log = {};  // the last passes,
    Counts counts = {};            // and all since these were emptied
    void add(const Checked &pass) {
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
inline int guesses_of_pass(const Cache &cache, int first, int end, int most);
inline void propose(Drafter &drafter, Proposal &proposal);

// The next tokens of a text: guesses that are right, `most` at most, and one more; none after an end id, if it `ends`.
// use(logits, position) is told of each token's.
template <class Use>
std::vector<int> next_tokens(Engine &engine, Cache &cache, Drafter &drafter, const Sampler &sampler,
                             const std::vector<int> &tokens, int most, bool ends, Use use) {
    const double start = now();
    const Config &config = engine.model.config;
    const int last = (int)tokens.size() - 1;  // the position of the token that is read next
    Proposal proposal{0, tokens, sampler, guesses_of_pass(cache, last, last + 1, std::min(most, drafter.most))};
    propose(drafter, proposal);
    const double guessing = now() - start;
    const std::vector<float> found = all_or_nothing(cache, [&] {  // (1 + guesses, vocabulary)
        Batch batch;
        const int count = 1 + (int)proposal.guesses.size(), first = grow(cache, 0, count);
        for (int t = first; t < first + count; t++) batch.add(proposal.token(t), 0, t);
        forward(engine, batch, cache.stores);
        return logits(engine, 0, batch.count());
    });
    std::vector<int> next;
    auto take = [&](int row) {
        const auto from = found.begin() + row * config.vocabulary;
        const std::vector<float> own(from, from + config.vocabulary);
        use(own, last + row);
        next.push_back(drafter.rejection ? by_rejection(proposal, row, own, draw) : sample(sampler, own, last + row));
        return next.back();
    };
    const int right = proposal.accept(take, [&] { return ends && config.ends(next.back()); });
    const int read = last + (int)next.size();
    if (rewind(cache, 0, read) < read) fail("guesses went further than the cache goes back: a fault here");
    drafter.add({proposal.match, (int)next.size(), right, proposal.guesses, proposal.paused, now() - start, guessing});
    return next;
}

// ---- Guesses -------------------------------------------------------------------------------------------------------

// Guesses behind the tokens of a pass, which are at positions [first, end): as many as the cache can take back. int4
// and int2 encode 32 positions together, and only those that are certain: guesses never fill such a block.
inline int guesses_of_pass(const Cache &cache, int first, int end, int most) {
    most = std::min({most, chunk_of(cache) - (end - first), limit_of(cache) - end});
    const bool same_block = end % group_size || first % group_size == 0;
    if (blocks_of(cache)) most = std::min(most, same_block ? group_size - 1 - end % group_size : 0);
    return std::max(0, most);
}

// How many guesses after such a match are worth their time: compares what a token took in passes with guesses and in
// those without, of the last ones. If there are none with guesses, one guess is tried.
inline int worth(const Drafter &drafter, Proposal &proposal) {
    if (!drafter.pauses) return proposal.most;
    double seconds[2] = {}, tokens[2] = {};  // (guesses or none)
    for (const Drafter::Checked &pass : drafter.log) {
        const bool with = !pass.guesses.empty(), other = with && pass.match && pass.match != proposal.match;
        if (!other && pass.seconds > 0) seconds[with] += pass.seconds, tokens[with] += pass.tokens;
    }
    if (tokens[1] == 0) return std::min(proposal.most, tokens[0] > 0 ? 1 : 0);
    proposal.paused = seconds[1] * tokens[0] > seconds[0] * tokens[1];
    return proposal.paused ? 0 : proposal.most;
}

// What followed the last three tokens where they stood before, or the last two, or one. A text that says the same again
// and again goes on with the guesses themselves.
inline void look_up(const Drafter &drafter, Proposal &proposal) {
    const std::vector<int> &tokens = proposal.tokens;
    const int count = (int)tokens.size();
    int from = 0;
    for (int at = count - 1; at > 0 && proposal.match < 3; at--) {
        int match = 0;
        while (match < std::min(3, at) && tokens[at - 1 - match] == tokens[count - 1 - match]) match++;
        if (match > proposal.match) proposal.match = match, from = at;
    }
    const int guesses = proposal.match ? worth(drafter, proposal) : 0;
    for (int i = 0; i < guesses; i++) proposal.guesses.push_back(proposal.token(from + i));
}

// The draft reads what it has not read of the text, then each of its own guesses but the last. What it had read that
// was guessed wrong, or is of another text, shows when tokens are compared: nobody need tell it.
inline void propose(Drafter &drafter, Proposal &proposal) {
    if (proposal.most == 0) return;
    if (!drafter.engine) return look_up(drafter, proposal);
    const std::vector<int> &tokens = proposal.tokens;
    std::vector<int> &held = drafter.held[proposal.sequence];
    const auto differs = std::mismatch(held.begin(), held.end(), tokens.begin(), tokens.end() - 1).first;
    const int same = rewind(drafter.cache, proposal.sequence, (int)(differs - held.begin()));
    held.resize(same);
    std::vector<int> unread(tokens.begin() + same, tokens.end());
    if (*std::max_element(unread.begin(), unread.end()) >= drafter.engine->model.config.vocabulary) return;
    proposal.most = std::min(proposal.most, limit_of(drafter.cache) - (int)tokens.size());  // its own context
    while ((int)proposal.guesses.size() < proposal.most) {
        std::vector<float> row = prefill(*drafter.engine, drafter.cache, proposal.sequence, unread);
        held.insert(held.end(), unread.begin(), unread.end());
        const int position = (int)held.size() - 1;
        require_finite(*drafter.engine, &drafter.cache, held, row, position, "the draft, ");
        row.resize(drafter.vocabulary, -INFINITY);  // a head may be wider than the tokenizer that both have
        if (drafter.rejection) proposal.drawn.push_back(distribution(proposal.sampler, row));
        unread = {drafter.rejection ? draw_from(proposal.drawn.back(), draw(proposal.sampler.seed, position))
                                    : argmax(row.data(), (int)row.size())};
        proposal.guesses.push_back(unread[0]);
    }
}
