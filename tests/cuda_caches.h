// A cache that was filled on the CPU, once more on the card: what the tests of the CUDA kernels read.
#pragma once

#include "../cache.h"

// Each piece of memory is as large as it must be, so that an access behind it is out of bounds.
struct CardCache {
    CacheView view;
    std::vector<std::shared_ptr<void>> owned;

    CardCache(const Device &device, const Cache &cache) : view(view_of(cache)) {
        auto clone = [&](const void *from, size_t bytes) {
            owned.push_back(device_memory(device, bytes, "the copy of a cache", "make the test smaller"));
            copy(device, owned.back().get(), from, bytes);
            device.wait();
            return owned.back().get();
        };
        for (CacheRows *side :
             {&view.keys, &view.values, &view.recent_keys, &view.recent_values, &view.sink_keys, &view.sink_values})
            if (side->data) side->data = (char *)clone(side->data, side->bytes(cache.shape.layers));
        if (auto *paged = std::get_if<Paged>(&cache.layout)) {
            Paged there = *paged;
            there.table = (const int *)clone(cache.pool->table.data(), cache.pool->table.size() * sizeof(int));
            view.layout = OnDevice<Layout>(there);
        }
    }
};
