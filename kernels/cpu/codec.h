// Elements of pages: one codec for each kind that has scales; see kernels/quantise.py for the formulas.
#pragma once
#include "abi.h"
#include "team.h"
#include "vec.h"

namespace pf::PF_ISA {

static inline uint16_t bf16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// To nearest even, for |x| up to 448; -0 stays -0.
static inline uint8_t fp8_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
    float magnitude;
    memcpy(&magnitude, &size, 4);
    float steps = magnitude + 16384.0f;  // its last bit is worth 2^-9, the step below 2^-6
    uint32_t small;
    memcpy(&small, &steps, 4);
    uint32_t large = (size + 0x7ffffu + (size >> 20 & 1u) - (120u << 23)) >> 20;  // exponents' offsets: 127 and 7
    return (uint8_t)(sign | (size < 121u << 23 ? small - 0x46800000u : large));
}

// x = q scale (+ zero), q at most kTop. `load` gives 16 elements of a row from number i on, `store` writes them.
struct Int8 {
    static constexpr bool kIsSymmetric = true;
    static constexpr float kTop = 127.0f;
    static PF_INLINE F16 load(const uint8_t* row, int i) { return load16_int8((const int8_t*)row + i); }
    static PF_INLINE void store(uint8_t* row, int i, F16 x) { store16_int8((int8_t*)row + i, round_int16(x)); }
};
struct Uint8 {
    static constexpr bool kIsSymmetric = false;
    static constexpr float kTop = 255.0f;
    static PF_INLINE F16 load(const uint8_t* row, int i) { return load16_uint8(row + i); }
    static PF_INLINE void store(uint8_t* row, int i, F16 x) { store16_int8((int8_t*)row + i, round_int16(x)); }
};
struct Int4 {
    static constexpr bool kIsSymmetric = true;
    static constexpr float kTop = 7.0f;
    static PF_INLINE F16 load(const uint8_t* row, int i) { return load16_int4(row + i / 2); }
    static PF_INLINE void store(uint8_t* row, int i, F16 x) { store16_int4(row + i / 2, round_int16(x)); }
};
struct Uint4 {
    static constexpr bool kIsSymmetric = false;
    static constexpr float kTop = 15.0f;
    static PF_INLINE F16 load(const uint8_t* row, int i) { return load16_uint4(row + i / 2); }
    static PF_INLINE void store(uint8_t* row, int i, F16 x) { store16_int4(row + i / 2, round_int16(x)); }
};
struct Fp8 {
    static constexpr bool kIsSymmetric = true;
    static constexpr float kTop = 448.0f;
    static PF_INLINE F16 load(const uint8_t* row, int i) { return load16_fp8(row + i); }
    static PF_INLINE void store(uint8_t* row, int i, F16 x) {
        float lanes[16];
        store16(lanes, x);
        for (int k = 0; k < 16; k++) row[i + k] = fp8_of(lanes[k]);
    }
};

// Calls `f` with the codec of a side that has scales.
template <class F>
static PF_INLINE void with_codec(const Side& side, const F& f) {
    if (side.element == INT8 && !side.zeros)
        f(Int8());
    else if (side.element == INT8)
        f(Uint8());
    else if (side.element == INT4 && !side.zeros)
        f(Int4());
    else if (side.element == INT4)
        f(Uint4());
    else
        f(Fp8());
}

}  // namespace pf::PF_ISA
