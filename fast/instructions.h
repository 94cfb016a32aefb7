// The few instructions of a GPU that C++ cannot express, as inline PTX: 2^x, pairs of 16-bit numbers, tensor cores,
// asynchronous copies. tests/cuda_on_cpu.h has a plain twin of each.
#pragma once

#include "../base/device.h"

#ifndef CUDA_ON_CPU
// Goes before a loop over registers: they cannot be indexed, so each must be named.
#define UNROLL _Pragma("unroll")

// 2^x within 2 units in the last place, in one instruction; 0 below 2^-126.
__device__ inline float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Two numbers rounded to 16 bits each, the first in the lower half.
template <class Number>  // f16 or bf16
__device__ inline uint32_t pack(float first, float second) {
    uint32_t both;
    if constexpr (std::is_same_v<Number, f16>)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}

// a * b + c for two bf16 numbers in each, rounded once.
__device__ inline uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// Transposes a matrix (8, 8) of 16-bit numbers, where lane i has columns 2 (i % 4) and 2 (i % 4) + 1 of row i / 4.
__device__ inline uint32_t transposed(uint32_t matrix) {
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
    return result;
}

// sums (16, 8) += a (16, 16) b (16, 8) for a warp: 16-bit numbers, two in a register, and float32 sums. With
// g = lane / 4 and c = lane % 4 a lane has
//   a      columns 2 c, 2 c + 1 of row g, then of row g + 8; then columns 2 c + 8, 2 c + 9 of both rows
//   b      rows 2 c, 2 c + 1 of column g, then rows 2 c + 8, 2 c + 9
//   sums   columns 2 c, 2 c + 1 of row g, then of row g + 8
template <class Number>  // f16 or bf16
__device__ inline void multiply_matrices(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#define MULTIPLY(type)                                                        \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "                  \
                 "{%8, %9}, {%0, %1, %2, %3};"                                \
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (std::is_same_v<Number, f16>)
        MULTIPLY("f16");
    else
        MULTIPLY("bf16");
#undef MULTIPLY
}

// Starts a copy of up to 16 bytes to to[i], filled up with zeros to 16. Both addresses are aligned to 16 bytes.
// commit_copies() closes a batch of this thread's copies; wait_copies<n>() waits until at most n of its batches are
// still under way. Other threads see the bytes after the next barrier.
template <class T>
__device__ inline void copy_async16(Shared<T> to, int i, const void *from, int bytes) {
    unsigned at = (unsigned)__cvta_generic_to_shared(&to[i]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int most>
__device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(most) : "memory");
}
#endif
