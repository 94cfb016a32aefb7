// llm show: one head at one position, in numbers that can be checked by hand: query, scores, their softmax, output;
// where the position's row is stored, its bytes, and the numbers they read as; how far the cache is off an f32 one.
#pragma once

#include "about.h"

// ---- Attention of one head -----------------------------------------------------------------------------------

struct SeenPosition {
    int position;
    std::vector<float> key, value;  // as the query reads them
    double score = 0, weight = 0;   // q . k, scaled; softmax of the scores
};

// The key or the value of position t as a query reads it. Keys are rotated by `frequencies` if the segment asks for it.
inline std::vector<float> read_row(const Segment &segment, bool keys, int t, const float *frequencies = nullptr,
                                   int rotary = 0) {
    const Source &source = keys ? segment.keys : segment.values;
    std::vector<float> numbers;
    source.type.visit([&](auto format) {
        using Format = decltype(format);
        for (int c = 0; c < source.width; c++)
            numbers.push_back(keys ? plain::key_number<Format>(segment, t, c, frequencies, rotary)
                                   : Format::number(source.row(t), c));
    });
    return numbers;
}

// Runs the last token's pass again, up to and including `layer`: engine.a then has what that layer computed.
inline void stop_after(Session &session, int layer) {
    Engine &engine = session.engine;
    const int all = std::exchange(engine.model.config.layers, layer + 1), last = (int)session.tokens.size() - 1;
    const auto restore = [all](int *layers) { *layers = all; };
    const std::unique_ptr<int, decltype(restore)> at_end(&engine.model.config.layers, restore);  // also if it throws
    Batch batch;
    batch.add(session.tokens[last], 0, last);
    session.caches.empty() ? naive_pass(engine, session.tokens) : forward(engine, batch, session.caches[0].stores);
}

// The positions that a head's query reads in the pass of `span`, as plain::attend_query does, with scores and weights.
inline std::vector<SeenPosition> look_back(const Attention &task, const Span &span, const float *frequencies,
                                           int head) {
    const float *query = task.query + (span.row * (int64_t)task.heads.query + head) * task.heads.width;
    HeadRows rows = {task.cache, task.layer, task.heads.kv_head(head), task.keys, task.values};
    Segments segments;
    add_sinks(segments, rows, span, task.visible);
    add_rows(segments, rows, span, task.visible);
    std::vector<SeenPosition> seen;
    double largest = task.sink(head);
    for (int i = 0; i < segments.count; i++) {
        const Segment &segment = segments.list[i];
        for (int t = segment.begin; t < segment.end; t++) {
            SeenPosition one = {t, read_row(segment, /*keys=*/true, t, frequencies, task.heads.rotary),
                                read_row(segment, /*keys=*/false, t)};
            for (int c = 0; c < task.heads.width; c++) one.score += (double)query[c] * one.key[c] * task.scale;
            largest = std::max(largest, seen.emplace_back(one).score);
        }
    }
    double total = std::exp(task.sink(head) - largest);
    for (SeenPosition &one : seen) total += one.weight = std::exp(one.score - largest);
    for (SeenPosition &one : seen) one.weight /= total;
    return seen;
}

// The first few numbers, and how many there are.
inline std::string first_of(const std::vector<float> &numbers, size_t most = 8) {
    std::string text;
    for (size_t i = 0; i < std::min(most, numbers.size()); i++) text += formatted(" %8.4f", numbers[i]);
    return text + (numbers.size() > most ? formatted("  .. (%zu)", numbers.size()) : "");
}

inline void add_attention(Report &report, Session &session, const Options &options,
                          const std::vector<std::string> &texts) {
    const Engine &engine = session.engine;
    const Config &config = engine.model.config;
    const Attention task = attention_of(engine.a, engine.model, options.layer,
                                        session.caches.empty() ? nothing_stored(config) : session.caches[0].stores);
    const float *frequencies = engine.a.kinds[config.rows[options.layer].kind].frequencies.data();
    const Span &span = engine.a.spans_on_host.back();
    const Heads heads = task.heads;
    const bool scaled = config.score_scale;  // by the model's own factor
    const int width = heads.width, kv_head = heads.kv_head(options.head);
    auto vector_at = [&](const float *of) {
        const float *start = of + ((int64_t)span.row * heads.query + options.head) * width;
        return std::vector<float>(start, start + width);
    };
    std::vector<float> query = vector_at(task.query), output = vector_at(task.out);
    report.say(formatted("\nAttention of query head %d, layer %d, at position %zu. It reads KV head %d.\n",
                         options.head, options.layer, texts.size() - 1, kv_head));
    report.add("layer", options.layer).add("head", options.head).add("kv_head", kv_head);
    report.add("query", query, "query   " + first_of(query) + "\n");
    const int zeros = (int)std::count(query.begin(), query.end(), 0.0f);
    if (zeros) report.say(formatted("        %d of %d are exactly 0: q.k is that of the others alone\n", zeros, width));
    if (zeros && options.layer == 0 && !options.has("-m"))
        report.say(
            formatted("        (layer 0 of the built-in model was set, not trained: head %d looks %d back, by the 4 "
                      "fastest\n        pairs of RoPE; --layer 1 and beyond were trained)\n",
                      options.head, options.head + 1));
    std::vector<Report> rows;
    for (const SeenPosition &one : look_back(task, span, frequencies, options.head)) {
        Report line;
        line.show("position", one.position, "%8d", "position").say(formatted("  %-12s", texts[one.position].c_str()));
        line.add("key", one.key, first_of({one.key.begin(), one.key.begin() + 2}), "   key (first 2)");
        line.add("value", one.value, first_of({one.value.begin(), one.value.begin() + 2}), "   value (first 2)");
        line.show("score", one.score, "%10.4f", scaled ? "  q.k * scale" : "  q.k/sqrt(D)");
        line.show("weight", one.weight, "%9.4f  ", "softmax  ");
        rows.push_back(line.say(std::string((size_t)std::lround(24 * one.weight), '#')));
    }
    report.table("seen", rows);
    report.add("output", output, "output  " + first_of(output) + "   the sum of weight x value\n");
}

// ---- Where a row lives, and what is in it --------------------------------------------------------------------

// The segment from which the next query, at position `length`, reads position t of a head: stored rows, or the residual
// block, if a type has blocks and t is in a newest block that is not full.
inline Segment stored_at(const Attention &task, int kv_head, int length, int t) {
    Segments stored;
    const HeadRows head = {task.cache, task.layer, kv_head, task.keys, task.values};
    Span next = {};
    next.position = next.first = next.end = length;
    add_rows(stored, head, next, Visible{});
    return *std::find_if(stored.list, stored.list + stored.count, [&](auto &segment) { return t < segment.end; });
}

// Where a position is stored: layout, page, row.
inline Report place_of(const Store &cache, int length, int position) {
    Report report;
    std::string sum, others;
    int64_t row = row_of(cache, 0, position);
    report.add("layout", name_of(cache.layout), formatted("%s: ", name_of(cache.layout)));
    if (auto *paged = std::get_if<Paged>(&cache.layout)) {
        std::vector<int> table(paged->table, paged->table + pages_for(length, paged->page));
        int logical = position / paged->page, offset = position % paged->page;
        report.add("page_table", table, "page table " + json_of(table));
        report.add("logical_page", logical, formatted("; position %d is in logical page %d", position, logical));
        report.show("offset", offset, " at offset %d;\n       ");
        report.show("physical_page", table[logical], "physical page %d, ");
        std::vector<int> shared, holders;  // pages that others hold; sequences that hold the first of them
        for (int page : table)
            if (cache.pool->references[page] > 1) shared.push_back(page);
        for (int other = 1; !shared.empty() && other < cache.shape.sequences; other++)
            if (cache.pool->entry(other, 0) == shared[0]) holders.push_back(other);
        report.add("shared_pages", shared).add("sharing_sequences", holders);
        if (!shared.empty()) others = "sequences " + json_of(holders) + " hold pages " + json_of(shared) + ", too\n";
        sum = formatted("%d x %d + %d = ", table[logical], paged->page, offset);
    }
    if (auto *ring = std::get_if<Ring>(&cache.layout)) sum = formatted("%d mod %d = ", position, ring->slots);
    return report.add("row", row, "row " + sum + std::to_string(row) + "\n").say(others);
}

// The last position's key or value: its bytes, the numbers they read as, and the numbers before they were stored.
inline Report stored_report(const Session &session, int layer, int kv_head, bool keys) {
    const Engine &engine = session.engine;
    const Cache &cache = session.caches[0];
    const int length = cache.lengths[0], position = length - 1;
    const Attention task = attention_of(engine.a, engine.model, layer, cache.stores);
    const Segment segment = stored_at(task, kv_head, length, position);
    const Source &source = keys ? segment.keys : segment.values;
    const CacheView &view = task.cache;
    const bool blocks = has_blocks(keys ? view.type_k : view.type_v), residual = blocks && !has_blocks(source.type);
    const CacheRows &all = keys ? view.keys : view.values, &newest = keys ? view.residual_keys : view.residual_values;
    const CacheRows &rows = residual ? newest : all;
    const float *before = (keys ? task.keys : task.values).start + (int64_t)kv_head * rows.width;
    const std::vector<float> reads = read_row(segment, keys, position), was(before, before + rows.width);
    const char *row = source.row(position);
    const std::string name = keys ? "K" : "V", type = source.type.visit([](auto format) { return format.name; });
    std::string hex, shown;
    for (size_t i = 0; i < rows.row_bytes; i++) hex += formatted("%02x", (unsigned char)row[i]);
    for (size_t i = 0; i < std::min<size_t>(64, hex.size()); i += 16) shown += " " + hex.substr(i, 16);
    Report report;
    report.add("type", type, name + formatted("      %s, ", type.c_str()));
    report.add("in_residual_block", residual, residual ? "in the residual block of the newest 32 positions, " : "");
    report.show("byte", row - rows.data, "from byte %td ");
    report.show("bytes", rows.row_bytes, "of its memory on, %zu bytes\n");
    if (keys && blocks && !residual)
        report.say("       these hold a few channels of 32 positions, not all channels of this one\n");
    report.add("hex", hex, "stored " + shown + (hex.size() > 64 ? " ..\n" : "\n"));
    report.add("reads_as", reads, "reads  " + first_of(reads) + "\n");
    report.add("before", was, "before " + first_of(was) + "\n");
    return report;
}

// ---- How far a cache is off ----------------------------------------------------------------------------------

// Adds each head's errors over the positions that the last one sees. `exact` is the same cache at f32.
inline void add_errors(Report &report, const Session &session, const Cache &exact) {
    const Engine &engine = session.engine;
    const Config &config = engine.model.config;
    const int length = exact.lengths[0];
    std::multimap<double, Report, std::greater<double>> list;  // the largest first
    auto add_head = [&](bool keys, int layer, int head) {
        stop_if_interrupted();
        const Attention task = attention_of(engine.a, engine.model, layer, session.caches[0].stores);
        const Attention true_task = attention_of(engine.a, engine.model, layer, exact.stores);
        double squares = 0, truth = 0, worst = -1, channel = 0, at = 0;
        for (int t = task.visible.first(length - 1); t < length; t++) {
            const std::vector<float> is = read_row(stored_at(task, head, length, t), keys, t),
                                     was = read_row(stored_at(true_task, head, length, t), keys, t);
            for (size_t c = 0; c < is.size(); c++) {
                double error = std::fabs((double)is[c] - was[c]);
                squares += error * error, truth += (double)was[c] * was[c];
                if (error > worst) worst = error, channel = (double)c, at = t;
            }
        }
        double relative = truth > 0 ? std::sqrt(squares / truth) : 0;
        Report row;
        row.show("side", std::string(keys ? "K" : "V"), "   %s", "side");
        row.show("layer", layer, "%6d", " layer").show("kv_head", head, "%8d", "KV head");
        row.show("relative_error", relative, "%14.3g", "error / size");
        row.show("largest_error", worst, "%12.3g", "largest");
        row.show("channel", channel, "%9.0f", "channel").show("position", at, "%10.0f", "position");
        list.emplace(relative, row);
    };
    for (int layer = 0; layer < config.layers; layer++) {
        const Kind &kind = config.kind(layer);
        if (kind.taps || !config.rows[layer].own) continue;  // states are f32 in both
        for (int head = 0; head < kind.kv_heads; head++) add_head(true, layer, head), add_head(false, layer, head);
    }
    std::vector<Report> rows;
    for (auto &entry : list) rows.push_back(entry.second);
    std::vector<Report> shown(rows.begin(), rows.begin() + (int64_t)std::min<size_t>(8, rows.size()));
    report.say(formatted("\nOff an f32 cache (root mean square; the %zu largest of %zu)\n", shown.size(), rows.size()));
    report.list("errors", rows).say(Report().table("", shown).text);
}

// ---- llm show ------------------------------------------------------------------------------------------------

inline int run_show(const Options &given) {
    Options options = given;
    options.count = 0, options.device = "cpu";  // its memory can be read here
    Session session = open_session(options);
    const Config &config = session.engine.model.config;
    auto check = [](const char *flag, int value, int end) {
        if (value >= end) refuse(flag, std::to_string(value), formatted("expected 0 to %d", end - 1));
    };
    check("--layer", options.layer, config.layers);
    check("--head", options.head, config.heads);
    if (config.kind(options.layer).taps) {
        std::string others;
        for (int layer = 0; layer < config.layers; layer++)
            if (!config.kind(layer).taps) others += " " + std::to_string(layer);
        refuse("--layer", std::to_string(options.layer),
               "is a short convolution, which has no scores: expected one of" + others);
    }
    check("--position", options.position, session.prompt);
    if (options.has("--position")) session.tokens.resize(options.position + 1);
    const int last = (int)session.tokens.size() - 1;
    const int kv_head = heads_of(config, config.kind(options.layer)).kv_head(options.head);
    TextStream stream(session.tokenizer.get());
    std::vector<std::string> texts;
    std::vector<Report> tokens;
    for (int token : session.tokens) {
        Report row;
        row.show("position", texts.size(), "%8zu", "position").show("token", token, "%8d  ", "id  ");
        texts.push_back('"' + on_one_line(stream.next(token)) + '"');
        tokens.push_back(row.add("text", texts.back(), texts.back(), "text"));
    }
    Report report;
    report.table("prompt", tokens);
    Cache *cache = session.caches.empty() ? nullptr : &session.caches[0];
    try {
        require_finite(
            cache ? prefill(session.engine, *cache, 0, session.tokens) : forward_naive(session.engine, session.tokens),
            last, cache);
        for (int i = 1; i < options.sequences; i++) fork(*cache, 0, i);
        stop_after(session, options.layer);
        add_attention(report, session, options, texts);
        if (cache) {
            const std::vector<Report> kinds = kinds_of(config, *cache);
            report.list("kinds", kinds).say(kinds.size() > 1 ? "\nKinds of layers\n" : "").say(lines_of(kinds, ""));
            report.say(formatted("\nThe row of position %d, KV head %d, layer %d\n", last, kv_head, options.layer));
            report.add("place", place_of(cache->stores[config.rows[options.layer].kind], last + 1, last));
            report.add("stored_key", stored_report(session, options.layer, kv_head, /*keys=*/true));
            report.add("stored_value", stored_report(session, options.layer, kv_head, /*keys=*/false));
            Cache exact =
                open_cache(options, session.engine, {options.caches()[0].layout, F32{}, F32{}}, session.limit);
            prefill_pass(session.engine, exact, 0, session.tokens);
            add_errors(report, session, exact);
        }
    } catch (Interrupted) {
        report.add("interrupted", true, "\ninterrupted\n");
    }
    return report.print(options.json);
}
