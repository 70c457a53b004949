// Sixteen lanes in plain C++, left to the compiler; no fused multiply-add, so bits differ from the other two.
#pragma once
#include <cstdint>
#include <cstring>

namespace pf::PF_ISA {

struct F16 {
    float v[16];
};
struct I16 {
    int32_t v[16];
};
constexpr int kTileRows = 2, kTiles = 1;

#define PF_LANES(T, expression)                        \
    T out;                                             \
    for (int i = 0; i < 16; i++) out.v[i] = expression; \
    return out

static inline float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
// To nearest even for |x| < 2^22: the sum's last bit is worth 1.
static inline float round_even(float x) {
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23
    return (x + magic) - magic;
}
static inline F16 zero16() { PF_LANES(F16, 0.0f); }
static inline F16 set16(float x) { PF_LANES(F16, x); }
static inline F16 load16(const float* p) { PF_LANES(F16, p[i]); }
static inline void store16(float* p, const F16& x) { memcpy(p, x.v, sizeof x.v); }
static inline F16 add16(const F16& a, const F16& b) { PF_LANES(F16, a.v[i] + b.v[i]); }
static inline F16 sub16(const F16& a, const F16& b) { PF_LANES(F16, a.v[i] - b.v[i]); }
static inline F16 mul16(const F16& a, const F16& b) { PF_LANES(F16, a.v[i] * b.v[i]); }
static inline F16 div16(const F16& a, const F16& b) { PF_LANES(F16, a.v[i] / b.v[i]); }
static inline F16 fma16(const F16& a, const F16& b, const F16& c) { PF_LANES(F16, a.v[i] * b.v[i] + c.v[i]); }
static inline F16 abs16(const F16& a) { PF_LANES(F16, float_of_bits(bits_of(a.v[i]) & 0x7fffffffu)); }
// Both give b where a or b is not a number.
static inline F16 max16(const F16& a, const F16& b) { PF_LANES(F16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline F16 min16(const F16& a, const F16& b) { PF_LANES(F16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
static inline F16 round16(const F16& a) { PF_LANES(F16, round_even(a.v[i])); }
static inline F16 keep16(const F16& x, uint32_t lanes, const F16& other) {
    PF_LANES(F16, lanes >> i & 1 ? x.v[i] : other.v[i]);
}

static inline uint16_t half_of(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // rounds to 65520 or more
    if (rest < 0x38800000u) {                                     // below 2^-14: units of 2^-24
        return (uint16_t)(sign | (uint32_t)round_even(float_of_bits(rest) * 16777216.0f));
    }
    rest += 0xfffu + (rest >> 13 & 1u);  // to nearest even
    return (uint16_t)(sign | (rest - 0x38000000u) >> 13);
}
static inline float float_of_half(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, rest = x & 0x7fffu;
    if (rest >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    if (rest < 0x400u) return float_of_bits(sign | bits_of((float)rest * 5.9604644775390625e-8f));  // 2^-24
    return float_of_bits(sign | ((rest << 13) + 0x38000000u));
}
static inline F16 load16_int8(const int8_t* p) { PF_LANES(F16, (float)p[i]); }
static inline F16 load16_uint8(const uint8_t* p) { PF_LANES(F16, (float)p[i]); }
static inline F16 load16_uint4(const uint8_t* p) { PF_LANES(F16, (float)(p[i / 2] >> i % 2 * 4 & 15)); }
static inline F16 load16_int4(const uint8_t* p) { PF_LANES(F16, (float)(((p[i / 2] >> i % 2 * 4 & 15) ^ 8) - 8)); }
static inline F16 load16_fp8(const uint8_t* p) {  // moved to where fp16 has sign, exponent, mantissa: 2^-8 of it
    PF_LANES(F16, float_of_half((uint16_t)((p[i] & 128) << 8 | (p[i] & 127) << 7)) * 256.0f);
}
static inline F16 load16_bf16(const uint16_t* p) { PF_LANES(F16, float_of_bits((uint32_t)p[i] << 16)); }
static inline F16 load16_half(const uint16_t* p) { PF_LANES(F16, float_of_half(p[i])); }
static inline void store16_half(uint16_t* p, const F16& a) {
    for (int i = 0; i < 16; i++) p[i] = half_of(a.v[i]);
}

static inline I16 iset16(int32_t x) { PF_LANES(I16, x); }
static inline I16 iadd16(const I16& a, const I16& b) { PF_LANES(I16, a.v[i] + b.v[i]); }
static inline F16 float16(const I16& a) { PF_LANES(F16, (float)a.v[i]); }
static inline I16 round_int16(const F16& a) {  // what does not fit becomes 0
    PF_LANES(I16, a.v[i] > -4e6f && a.v[i] < 4e6f ? (int32_t)round_even(a.v[i]) : 0);
}
static inline void store16_int8(int8_t* p, const I16& a) {
    for (int i = 0; i < 16; i++) p[i] = (int8_t)a.v[i];
}
static inline void store16_int4(uint8_t* p, const I16& a) {  // the even index in the low half
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)((a.v[2 * i] & 15) | (a.v[2 * i + 1] & 15) << 4);
}
static inline int32_t isum16(const I16& a) {
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += a.v[i];
    return sum;
}
static inline F16 power_of_two16(const F16& n) {
    PF_LANES(F16, float_of_bits((uint32_t)((int32_t)n.v[i] + 127) << 23));
}

static inline float max_of16(const F16& a) {
    float m = a.v[0];
    for (int i = 1; i < 16; i++) m = a.v[i] > m ? a.v[i] : m;
    return m;
}
static inline float sum16(const F16& a) {
    float q[4];
    for (int i = 0; i < 4; i++) q[i] = (a.v[4 * i] + a.v[4 * i + 2]) + (a.v[4 * i + 1] + a.v[4 * i + 3]);
    return (q[0] + q[1]) + (q[2] + q[3]);
}

// Lane t: the product of `query` with row t of `rows` [16, dim].
static inline F16 products16(const float* query, const float* rows, int dim) {
    F16 out;
    for (int t = 0; t < 16; t++) {
        F16 a = zero16();
        for (int i = 0; i < dim; i += 16) a = fma16(load16(query + i), load16(rows + t * dim + i), a);
        out.v[t] = sum16(a);
    }
    return out;
}

// Sixteen rows of four bytes each, times the same four int8.
struct W64 {
    int16_t v[64];
};
struct X4 {
    int16_t v[4];
};
static inline W64 low_nibbles(const uint8_t* p) {
    W64 w;
    for (int i = 0; i < 64; i++) w.v[i] = p[i] & 15;
    return w;
}
static inline W64 high_nibbles(const uint8_t* p) {
    W64 w;
    for (int i = 0; i < 64; i++) w.v[i] = p[i] >> 4;
    return w;
}
static inline W64 load_q8(const uint8_t* p) {
    W64 w;
    for (int i = 0; i < 64; i++) w.v[i] = (int16_t)(p[i] - 128);
    return w;
}
static inline X4 broadcast4(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
static inline I16 dot_q4(const I16& sum, const W64& w, const X4& x) {
    PF_LANES(I16, sum.v[i] + w.v[4 * i] * x.v[0] + w.v[4 * i + 1] * x.v[1] + w.v[4 * i + 2] * x.v[2] +
                      w.v[4 * i + 3] * x.v[3]);
}
static inline I16 dot_q8(const I16& sum, const W64& w, const X4& x) { return dot_q4(sum, w, x); }
static inline int32_t q8_start(int32_t) { return 0; }

#undef PF_LANES

}  // namespace pf::PF_ISA
