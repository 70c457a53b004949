// RMS norm, SiLU-gated product, and the int8 activations that the matmuls take.
#pragma once
#include <math.h>

#include "team.h"
#include "vec.h"

namespace pf::PF_ISA {

constexpr int32_t kRowGrain = 4;  // rows of such work as here that are worth another thread

// Rows of activations in groups of 32: x = q scale.
struct Quantised {
    int8_t* values;  // [rows, columns]
    float* scales;   // [rows, columns / 32]
    int32_t* sums;   // of a group's q
    float* offsets;  // scale times sum: what a group of x is worth where all weights are 1
};

// scale = max |x| / 127, q = round(x / scale). A group with what is no finite number gets scale NaN and q = 0.
static inline void quantise_group(const float* x, const Quantised& to, int64_t group) {
    F16 a = load16(x), b = load16(x + 16);
    F16 zeros = fma16(a, zero16(), mul16(b, zero16()));  // NaN where anything is not finite
    float largest = max_of16(max16(abs16(a), abs16(b))), bad = sum16(zeros);
    int8_t* values = to.values + group * 32;
    if (bad != 0.0f || !(largest > 0.0f)) {
        memset(values, 0, 32);
        to.scales[group] = bad != 0.0f ? bad : 0.0f;
        to.sums[group] = 0;
        to.offsets[group] = to.scales[group] * 0.0f;
        return;
    }
    // Below 2^-120 the inverse may overflow; such a group counts as zeros.
    F16 inverse = set16(largest > 1e-36f ? 127.0f / largest : 0.0f);
    I16 first = round_int16(mul16(a, inverse)), second = round_int16(mul16(b, inverse));
    store16_int8(values, first);
    store16_int8(values + 16, second);
    to.scales[group] = largest / 127.0f;
    to.sums[group] = isum16(iadd16(first, second));
    to.offsets[group] = to.scales[group] * (float)to.sums[group];
}

static inline void quantise_row(const float* x, const Quantised& to, int64_t row, int columns) {
    int groups = columns / 32;
    for (int g = 0; g < groups; g++) quantise_group(x + g * 32, to, row * groups + g);
}

static void quantise(Team team, const float* x, const Quantised& to, int64_t rows, int columns) {
    team.share(rows, kRowGrain, [=, &to](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; r++) quantise_row(x + r * columns, to, r, columns);
    });
}

static inline float lane_sum_tail(const float* x, int begin, int end) {
    float sum = 0.0f;
    for (int k = begin; k < end; k++) sum += x[k] * x[k];
    return sum;
}

// y = x / sqrt(mean(x^2) + eps) * w; y may be x.
static inline void rms_norm_row(const float* x, const float* weight, float* y, int columns, float eps) {
    F16 squares = zero16();
    int whole = columns & ~15;
    for (int k = 0; k < whole; k += 16) {
        F16 v = load16(x + k);
        squares = fma16(v, v, squares);
    }
    float mean = (sum16(squares) + lane_sum_tail(x, whole, columns)) / (float)columns;
    float factor = 1.0f / sqrtf(mean + eps);
    F16 factors = set16(factor);
    for (int k = 0; k < whole; k += 16) store16(y + k, mul16(mul16(load16(x + k), factors), load16(weight + k)));
    for (int k = whole; k < columns; k++) y[k] = x[k] * factor * weight[k];
}

static inline void add_row(const float* x, float* residual, int columns) {
    int whole = columns & ~15;
    for (int k = 0; k < whole; k += 16) store16(residual + k, add16(load16(residual + k), load16(x + k)));
    for (int k = whole; k < columns; k++) residual[k] += x[k];
}

// With `x`, residual += x first.
static void rms_norm(Team team, const float* x, float* residual, const float* weight, float* y, int rows,
                     int columns, float eps) {
    team.share(rows, kRowGrain, [=](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; r++) {
            if (x) add_row(x + r * columns, residual + r * columns, columns);
            rms_norm_row(residual + r * columns, weight, y + r * columns, columns, eps);
        }
    });
}

static inline F16 silu_mul16(F16 gate, F16 up) {
    // Beyond 88 the exponential would overflow, and the result is 0 to the last bit anyway.
    F16 e = exp16(min16(set16(88.0f), sub16(zero16(), gate)));
    return mul16(div16(gate, add16(set16(1.0f), e)), up);
}

// y = g / (1 + e^-g) u of rows [g | u].
static inline void silu_mul_row(const float* gate_up, float* y, int columns) {
    int whole = columns & ~15;
    for (int k = 0; k < whole; k += 16)
        store16(y + k, silu_mul16(load16(gate_up + k), load16(gate_up + columns + k)));
    if (whole == columns) return;
    float gate[16] = {}, up[16] = {}, out[16];
    memcpy(gate, gate_up + whole, (size_t)(columns - whole) * sizeof(float));
    memcpy(up, gate_up + columns + whole, (size_t)(columns - whole) * sizeof(float));
    store16(out, silu_mul16(load16(gate), load16(up)));
    memcpy(y + whole, out, (size_t)(columns - whole) * sizeof(float));
}

static void silu_mul(Team team, const float* gate_up, float* y, int rows, int columns) {
    team.share(rows, kRowGrain, [=](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; r++) silu_mul_row(gate_up + r * 2 * columns, y + r * columns, columns);
    });
}

}  // namespace pf::PF_ISA
