// Numbers to what pages store: elements, scales and zero points; see kernels/quantise.py for the formulas.
#pragma once
#include "codec.h"

namespace pf::PF_ISA {

constexpr uint16_t kHalfNan = 0x7e00, kHalfInfinity = 0x7c00, kHalfOne = 0x3c00;

// One token's numbers of a head: fp32, or fp16 where `halves` is set.
struct Numbers {
    const float* floats;
    const uint16_t* halves;

    PF_INLINE F16 at(int i) const { return halves ? load16_half(halves + i) : load16(floats + i); }
};

static inline F16 clamp16(F16 x, float low, float high) { return max16(set16(low), min16(set16(high), x)); }
static inline F16 negated16(F16 x) { return sub16(zero16(), x); }

// The range of numbers that share a scale: `highest` is of |x| where symmetric, and `lowest` of -x.
template <class Codec>
struct Range {
    F16 highest = Codec::kIsSymmetric ? zero16() : set16(-__builtin_inff());
    F16 lowest = set16(-__builtin_inff());
    F16 zeros = zero16();  // NaN where a number was not finite

    PF_INLINE void add(F16 x) {
        highest = max16(highest, Codec::kIsSymmetric ? abs16(x) : x);
        if (!Codec::kIsSymmetric) lowest = max16(lowest, negated16(x));
        zeros = fma16(x, zero16(), zeros);
    }
};

struct Factors {
    uint16_t scale;
    uint16_t zero;
};

// Of numbers without NaN.
template <class Codec>
static inline Factors factors_of(float highest, float negated_lowest) {
    if (Codec::kIsSymmetric) {
        uint16_t scale = half_of(highest / Codec::kTop);
        return {scale ? scale : kHalfOne, 0};
    }
    float lowest = 0.0f - negated_lowest;  // never -0: which of two zeros is the least would depend on their order
    uint16_t zero = half_of(lowest), scale = half_of((highest - lowest) / Codec::kTop);
    if ((zero & 0x7fffu) >= kHalfInfinity) scale = kHalfNan;
    return {(scale & 0x7fffu) ? scale : kHalfOne, zero == 0x8000u ? (uint16_t)0 : zero};
}

// What no finite scale holds: zeros, but that -x / infinity is -0, which fp8 has.
template <class Codec>
static void store_not_finite(const Numbers& x, uint8_t* row, int dim, uint16_t scale) {
    float lanes[16];
    for (int i = 0; i < dim; i += 16) {
        store16(lanes, x.at(i));
        for (int k = 0; k < 16; k++) {
            bool is_negative = scale == kHalfInfinity && __builtin_signbit(lanes[k]) && lanes[k] - lanes[k] == 0.0f;
            lanes[k] = is_negative ? -0.0f : 0.0f;
        }
        Codec::store(row, i, load16(lanes));
    }
}

template <class Codec>
static Factors store_vector(const Numbers& x, uint8_t* row, int dim) {
    Range<Codec> range;
    for (int i = 0; i < dim; i += 16) range.add(x.at(i));
    bool has_nan = false;
    if (sum16(range.zeros) != 0.0f) {
        float lanes[16];
        for (int i = 0; i < dim; i += 16) {
            store16(lanes, x.at(i));
            for (int k = 0; k < 16; k++) has_nan |= lanes[k] != lanes[k];
        }
    }
    Factors factors = {kHalfNan, kHalfNan};
    if (!has_nan) factors = factors_of<Codec>(max_of16(range.highest), max_of16(range.lowest));
    if ((factors.scale & 0x7fffu) >= kHalfInfinity) {
        store_not_finite<Codec>(x, row, dim, factors.scale);
        return factors;
    }
    F16 scale = set16(float_of_half(factors.scale)), zero = set16(float_of_half(factors.zero));
    constexpr float low = Codec::kIsSymmetric ? -Codec::kTop : 0.0f;
    for (int i = 0; i < dim; i += 16) {
        F16 number = Codec::kIsSymmetric ? x.at(i) : sub16(x.at(i), zero);
        Codec::store(row, i, clamp16(div16(number, scale), low, Codec::kTop));
    }
    return factors;
}

// Channels i to i + 15 of a page's tokens, which are finite in fp16 or NaN.
template <class Codec, class Tokens>
static void store_channels(const Tokens& tokens, int num_tokens, int i, uint8_t* rows, int64_t row_bytes,
                           uint16_t* scales, uint16_t* zeros) {
    Range<Codec> range;
    for (int t = 0; t < num_tokens; t++) range.add(tokens.at(t).at(i));
    float highest[16], lowest[16], bad[16], scale[16], zero[16];
    store16(highest, range.highest);
    store16(lowest, range.lowest);
    store16(bad, range.zeros);
    uint32_t good = 0;
    for (int k = 0; k < 16; k++) {
        Factors factors = {kHalfNan, kHalfNan};
        if (bad[k] == 0.0f) factors = factors_of<Codec>(highest[k], lowest[k]);
        good |= (uint32_t)(bad[k] == 0.0f) << k;
        scales[i + k] = factors.scale;
        if (!Codec::kIsSymmetric) zeros[i + k] = factors.zero;
        scale[k] = float_of_half(factors.scale);
        zero[k] = float_of_half(factors.zero);
    }
    constexpr float low = Codec::kIsSymmetric ? -Codec::kTop : 0.0f;
    for (int t = 0; t < num_tokens; t++) {
        F16 number = tokens.at(t).at(i);
        if (!Codec::kIsSymmetric) number = sub16(number, load16(zero));
        F16 scaled = clamp16(div16(number, load16(scale)), low, Codec::kTop);
        Codec::store(rows + t * row_bytes, i, keep16(scaled, good, zero16()));
    }
}

// To nearest even; a vector that is not finite then is NaN as a whole.
static void store_halves(const Numbers& x, uint16_t* to, int dim) {
    F16 zeros = zero16();
    for (int i = 0; i < dim; i += 16) {
        store16_half(to + i, x.at(i));
        zeros = fma16(load16_half(to + i), zero16(), zeros);
    }
    if (sum16(zeros) == 0.0f) return;
    for (int i = 0; i < dim; i++) to[i] = kHalfNan;
}

// What `store_halves` would store, as fp32 in place.
static void round_to_halves(float* x, int dim) {
    F16 zeros = zero16();
    uint16_t halves[16];
    for (int i = 0; i < dim; i += 16) {
        store16_half(halves, load16(x + i));
        F16 rounded = load16_half(halves);
        store16(x + i, rounded);
        zeros = fma16(rounded, zero16(), zeros);
    }
    if (sum16(zeros) == 0.0f) return;
    for (int i = 0; i < dim; i++) x[i] = __builtin_nanf("");
}

static void store_plain(const Numbers& x, uint8_t* row, int dim, int32_t element) {
    if (element == FP16) {
        store_halves(x, (uint16_t*)row, dim);
        return;
    }
    float lanes[16];
    for (int i = 0; i < dim; i += 16) {
        store16(lanes, x.at(i));
        if (element == FP32)
            memcpy((float*)row + i, lanes, sizeof lanes);
        else
            for (int k = 0; k < 16; k++) ((uint16_t*)row)[i + k] = bf16_of(lanes[k]);
    }
}

}  // namespace pf::PF_ISA
