// A decoding step on the GPU, recorded once as a CUDA graph and then replayed. Otherwise the host, with microseconds
// for each launch, would be slower than the GPU. Tokens, positions and page tables are data. A graph holds the
// addresses of all memory that it uses, so it fits one cache and one set of activations.
#pragma once

#include <list>

#include "linear.cu"

#ifdef HAS_CUDA
namespace fast {

struct StepGraph {
    Pass pass;
    std::vector<Store> stores;
    std::shared_ptr<void> step = nullptr;  // nullptr: such a pass ran once, and now has the memory that it needs
    bool is_for(const Pass &other, const std::vector<Store> &others) const {
        bool same = pass.count == other.count && pass.tokens == other.tokens && pass.spans == other.spans;
        for (size_t i = 0; i < stores.size(); i++) same = same && is_same(stores[i].view, others[i].view);
        return same && stores.size() == others.size();
    }
    static bool is_same(const CacheView &cache, const CacheView &view) {
        static_assert(std::has_unique_object_representations_v<CacheRows>, "equal if their bytes are");
        bool same = cache.sinks == view.sinks && cache.layout == view.layout;
        same = same && cache.type_k == view.type_k && cache.type_v == view.type_v;
        for (auto side : {&CacheView::keys, &CacheView::values, &CacheView::residual_keys, &CacheView::residual_values,
                          &CacheView::sink_keys, &CacheView::sink_values})
            same = same && memcmp(&(cache.*side), &(view.*side), sizeof(CacheRows)) == 0;
        return same;
    }
};

struct StepGraphs {
    static constexpr size_t most = 64;  // so many caches can decode in turn without a new recording
    std::list<StepGraph> list;          // the newest first
    int reservations = 0;               // Gpu::reservations at the last recording: a later one may have moved memory
};

// Runs body(). The first decoding pass with a cache just runs, the second is recorded, and later ones are replayed.
template <class Body>
void run(Gpu &m, const std::vector<Pass> &passes, const std::vector<Store> &stores, Body body) {
    const Pass &pass = passes[0];
    Between &between = m.kept<Between>();
    between.out = nullptr;
    auto one_token = [](const Span &span) { return span.end == span.first + 1; };
    const Span *spans = pass.spans_on_host;
    between.decoding = stores[0].view.keys.data && std::all_of(spans, spans + pass.count, one_token);
    if (!between.decoding) return body();
    StepGraphs &graphs = m.kept<StepGraphs>();
    if (graphs.reservations != m.reservations) graphs.list.clear();
    graphs.reservations = m.reservations;
    for (StepGraph &known : graphs.list) {
        if (!known.is_for(pass, stores)) continue;
        if (!known.step) {
            cudaGraph_t graph = nullptr;
            cudaGraphExec_t step = nullptr;
            check(cudaStreamBeginCapture(m.stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
            body();
            check(cudaStreamEndCapture(m.stream, &graph), "cudaStreamEndCapture");
            check(cudaGraphInstantiate(&step, graph, 0), "cudaGraphInstantiate");
            cudaGraphDestroy(graph);
            known.step = {step, cudaGraphExecDestroy};
        }
        return check(cudaGraphLaunch((cudaGraphExec_t)known.step.get(), m.stream), "cudaGraphLaunch");
    }
    body();
    if (graphs.reservations != m.reservations) graphs.list.clear();
    graphs.reservations = m.reservations;
    if (graphs.list.size() == graphs.most) graphs.list.pop_back();
    graphs.list.push_front({pass, stores});
}

}  // namespace fast
#endif
