// Sixteen lanes of the instruction set being compiled, and what is built on them alone. Everything lies in a namespace
// of that instruction set, and nothing of the standard library's templates is used, so that the linker can't mix them.
#pragma once
#if defined(PF_AVX512)
#include "vec_avx512.h"
#elif defined(PF_AVX2)
#include "vec_avx2.h"
#else
#include "vec_portable.h"
#endif

namespace pf::PF_ISA {

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// e^x for x up to 88, at least e^-87: 2^n times a polynomial of the rest (Cephes' expf), relative error 2e-7. NaN stays
// NaN.
static inline F16 exp16(F16 x) {
    x = max16(set16(-87.0f), x);
    F16 n = round16(mul16(x, set16(1.44269504f)));
    F16 r = fma16(n, set16(-0.693359375f), x);
    r = fma16(n, set16(2.12194440e-4f), r);
    F16 p = set16(1.9875691500e-4f);
    p = fma16(p, r, set16(1.3981999507e-3f));
    p = fma16(p, r, set16(8.3334519073e-3f));
    p = fma16(p, r, set16(4.1665795894e-2f));
    p = fma16(p, r, set16(1.6666665459e-1f));
    p = fma16(p, r, set16(5.0000001201e-1f));
    p = fma16(p, mul16(r, r), add16(r, set16(1.0f)));
    return mul16(p, power_of_two16(n));
}

static inline float exp1(float x) {
    float lanes[16];
    store16(lanes, exp16(set16(x)));
    return lanes[0];
}

}  // namespace pf::PF_ISA
