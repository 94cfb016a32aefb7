// The fast twins: functions of the story again, with the same names and parameters, for what costs time. All others are
// taken from the story, and so is each for which a machine has nothing better.
#pragma once

#include "../states.cu"
#include "decode.cu"
#include "linear.cu"
#include "prefill.cu"
#include "step.cu"

namespace fast {
// The CPU's are in attend.cpp and linear.cpp. plan() plans the attention of all layers.
void plan(Cpu &m, const std::vector<Pass> &passes, const std::vector<Store> &stores);
void attention(Cpu &m, const Attention &task, const Pass &pass);
void linear(Cpu &m, const float *x, int count, std::initializer_list<Product> products, Into into = Into::set);
double pairs_gain();
void swiglu(Cpu &m, float *out, const float *gate, const float *up, int64_t count, bool gelu = false);

template <class Body>
void run(Cpu &m, const std::vector<Pass> &passes, const std::vector<Store> &stores, Body body) {
    plan(m, passes, stores);
    m.run(body);
}

using plain::add_rms_norm, plain::attention, plain::cap_logits, plain::embed, plain::gate;
using plain::keep_residual, plain::linear, plain::norm_and_rope, plain::rms_norm, plain::rope_angles, plain::run;
using plain::short_convolution, plain::store_rows, plain::swiglu;
}  // namespace fast
