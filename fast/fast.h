// The fast twins: single functions of the story again, with the same names and parameters, for what costs time. What is
// not here is taken from the story, and so is what a machine has nothing better for.
#pragma once

#include "../attention.cu"
#include "attend.h"
#include "decode.cu"
#include "linear.cu"
#include "linear.h"
#include "prefill.cu"
#include "step.cu"

namespace fast {
using plain::attention;
using plain::embed;
using plain::keep_residual;
using plain::linear;
using plain::norm_and_rope;
using plain::rms_norm;
using plain::rope_angles;
using plain::run;
using plain::store;
using plain::swiglu;
}  // namespace fast
