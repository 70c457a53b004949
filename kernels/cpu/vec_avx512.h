// Sixteen lanes on AVX-512 with VNNI.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace pf::PF_ISA {

using F16 = __m512;
using I16 = __m512i;
constexpr int kTileRows = 6, kTiles = 2;  // of the matmul's register block: 12 + 12 accumulators

static inline F16 zero16() { return _mm512_setzero_ps(); }
static inline F16 set16(float x) { return _mm512_set1_ps(x); }
static inline F16 load16(const float* p) { return _mm512_loadu_ps(p); }
static inline void store16(float* p, F16 x) { _mm512_storeu_ps(p, x); }
static inline F16 add16(F16 a, F16 b) { return _mm512_add_ps(a, b); }
static inline F16 sub16(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
static inline F16 mul16(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
static inline F16 div16(F16 a, F16 b) { return _mm512_div_ps(a, b); }
static inline F16 fma16(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
static inline F16 abs16(F16 a) { return _mm512_abs_ps(a); }
// Both give b where a or b is not a number.
static inline F16 max16(F16 a, F16 b) { return _mm512_max_ps(a, b); }
static inline F16 min16(F16 a, F16 b) { return _mm512_min_ps(a, b); }
static inline F16 round16(F16 a) { return _mm512_roundscale_ps(a, 0); }
static inline F16 keep16(F16 x, uint32_t lanes, F16 other) { return _mm512_mask_blend_ps((__mmask16)lanes, other, x); }

// Sixteen bytes of eight: low halves at even places, high ones behind them.
static inline __m128i nibbles(const uint8_t* p) {
    __m128i w = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
    return _mm_and_si128(_mm_or_si128(w, _mm_slli_epi16(w, 4)), _mm_set1_epi8(15));
}
static inline F16 load16_int8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline F16 load16_uint8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline F16 load16_int4(const uint8_t* p) {
    __m128i sign = _mm_set1_epi8(8);  // two's complement of four bits
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_sub_epi8(_mm_xor_si128(nibbles(p), sign), sign)));
}
static inline F16 load16_uint4(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(nibbles(p))); }
static inline F16 load16_fp8(const uint8_t* p) {  // moved to where fp16 has sign, exponent, mantissa: 2^-8 of it
    __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    F16 scaled = _mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16((int16_t)0xbfff)));
    return mul16(scaled, set16(256.0f));
}
static inline F16 load16_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline F16 load16_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline void store16_half(uint16_t* p, F16 a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline I16 iset16(int32_t x) { return _mm512_set1_epi32(x); }
static inline I16 iadd16(I16 a, I16 b) { return _mm512_add_epi32(a, b); }
static inline F16 float16(I16 a) { return _mm512_cvtepi32_ps(a); }
static inline I16 round_int16(F16 a) { return _mm512_cvtps_epi32(a); }
static inline void store16_int8(int8_t* p, I16 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }
static inline void store16_int4(uint8_t* p, I16 a) {  // the even index in the low half
    __m128i bytes = _mm_and_si128(_mm512_cvtepi32_epi8(a), _mm_set1_epi8(15));
    __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));
    _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(pairs, pairs));
}
static inline int32_t isum16(I16 a) { return _mm512_reduce_add_epi32(a); }
static inline F16 power_of_two16(F16 n) {  // n whole, from -126 to 127
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), iset16(127)), 23));
}

static inline float max_of16(F16 a) { return _mm512_reduce_max_ps(a); }

// Of each vector the sum of its lanes: (x0 + x2) + (x1 + x3) in each quarter, then (Q0 + Q1) + (Q2 + Q3).
static inline F16 sums16(const F16 a[16]) {
    F16 pairs[8], quads[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        pairs[i] = add16(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(pairs[2 * i]), y = _mm512_castps_pd(pairs[2 * i + 1]);
        quads[i] = add16(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    F16 u = add16(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88), _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd));
    F16 v = add16(_mm512_shuffle_f32x4(quads[2], quads[3], 0x88), _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd));
    return add16(_mm512_shuffle_f32x4(u, v, 0x88), _mm512_shuffle_f32x4(u, v, 0xdd));
}
static inline float sum16(F16 a) {
    a = add16(a, _mm512_permute_ps(a, 0x4e));
    a = add16(a, _mm512_permute_ps(a, 0xb1));
    a = add16(a, _mm512_shuffle_f32x4(a, a, 0xb1));
    a = add16(a, _mm512_shuffle_f32x4(a, a, 0x4e));
    return _mm512_cvtss_f32(a);
}

// Lane t: the product of `query` with row t of `rows` [16, dim].
static inline F16 products16(const float* query, const float* rows, int dim) {
    F16 a[16];
#pragma GCC unroll 16
    for (int t = 0; t < 16; t++) a[t] = zero16();
    for (int i = 0; i < dim; i += 16) {
        F16 q = load16(query + i);
#pragma GCC unroll 16
        for (int t = 0; t < 16; t++) a[t] = fma16(q, load16(rows + t * dim + i), a[t]);
    }
    return sums16(a);
}

// Sixteen rows of four bytes each, times the same four int8.
using W64 = __m512i;
static inline W64 low_nibbles(const uint8_t* p) {
    return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(15));
}
static inline W64 high_nibbles(const uint8_t* p) {
    return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), 4), _mm512_set1_epi8(15));
}
static inline W64 load_q8(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline I16 broadcast4(const int8_t* p) {
    int32_t word;
    memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}
static inline I16 dot_q4(I16 sum, W64 w, I16 x) { return _mm512_dpbusd_epi32(sum, w, x); }
static inline I16 dot_q8(I16 sum, W64 w, I16 x) { return _mm512_dpbusd_epi32(sum, w, x); }
// dot_q8 takes weights with their offset of 128: what a group's sum starts at, given the sum of its x.
static inline int32_t q8_start(int32_t sum_of_x) { return -128 * sum_of_x; }

static inline uint16_t half_of(float x) { return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
static inline float float_of_half(uint16_t x) { return _cvtsh_ss(x); }

}  // namespace pf::PF_ISA
