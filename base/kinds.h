// Groups layers that are alike: a model has a short list of kinds, and each layer is of one kind.
#pragma once

#include <algorithm>
#include <climits>
#include <tuple>
#include <vector>

#include "rope.h"

// What layers with the same rows have in common. A cache keeps the rows of a kind in one store (cache.h).
struct Kind {
    int kv_heads = 0;
    int key_width = 0, value_width = 0;  // numbers in a head's row: D. MLA: rank + rope, and 0: the key holds the value
    int window = 0;         // the query at position p sees positions max(0, p - window + 1) .. p; 0: all of 0 .. p
    double rope_theta = 0;  // 0: no RoPE
    RopeScaling rope = {};
    int layers = 0;  // how many of them store rows
    int taps = 0;    // L of a short convolution, 0: attention. It has no keys: its state is stored as rows of 1 head,
                     // hidden wide, with a window of L
    int rotary() const { return (int)(key_width * rope.rotary); }
    QueryScale query_scale() const {
        return {(float)(rope.attention_factor * rope.attention_factor), (float)rope.query_growth,
                std::max(1, rope.original_context)};
    }
    auto of_rows() const {  // all fields but `layers`
        return std::tuple_cat(std::tie(kv_heads, key_width, value_width, window, rope_theta, taps), rope.all());
    }
};

// Where a layer's rows are.
struct LayerRows {
    int kind = 0, index = 0;  // place in Config::kinds, and among the layers of that kind that store rows
    bool own = true;          // false: the layer reads rows that an earlier one stored
    bool last = true;         // false: a later layer reads them, too
};

// Appends a layer; equal kinds are merged. own = false: it reads the rows of its kind's last layer that stores some.
inline void add_layer(std::vector<Kind> &kinds, std::vector<LayerRows> &rows, const Kind &kind, bool own = true) {
    auto alike = [&](const Kind &other) { return other.of_rows() == kind.of_rows(); };
    const size_t at = (size_t)(std::find_if(kinds.begin(), kinds.end(), alike) - kinds.begin());
    if (at == kinds.size()) kinds.push_back(kind), kinds.back().layers = 0;
    kinds[at].layers += own;
    const LayerRows added = {(int)at, kinds[at].layers - 1, own};
    for (LayerRows &earlier : rows)
        if (earlier.kind == added.kind && earlier.index == added.index) earlier.last = false;
    rows.push_back(added);
}

// The widest window in positions, or 0 if some layers have no window.
inline int widest_window(const std::vector<Kind> &kinds) {
    int widest = 0;
    for (const Kind &kind : kinds) widest = std::max(widest, kind.window ? kind.window : INT_MAX);
    return widest == INT_MAX ? 0 : widest;
}
