// Sixteen lanes as two halves on AVX2 with FMA and F16C. Sums have the order that vec_avx512.h says, so that both give
// equal bits.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace pf::PF_ISA {

struct F16 {
    __m256 lo, hi;
};
struct I16 {
    __m256i lo, hi;
};
constexpr int kTileRows = 4, kTiles = 1;

static inline F16 zero16() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F16 set16(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F16 load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store16(float* p, F16 x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
static inline F16 add16(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline F16 sub16(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline F16 mul16(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline F16 div16(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline F16 fma16(F16 a, F16 b, F16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline F16 abs16(F16 a) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
// Both give b where a or b is not a number.
static inline F16 max16(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline F16 min16(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
static inline F16 round16(F16 a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
static inline __m256 keep8(__m256 x, uint32_t lanes, __m256 other) {
    __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i kept = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int32_t)lanes), bit), bit);
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(kept));
}
static inline F16 keep16(F16 x, uint32_t lanes, F16 other) {
    return {keep8(x.lo, lanes, other.lo), keep8(x.hi, lanes >> 8, other.hi)};
}

static inline __m256 load8_int8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline F16 load16_int8(const int8_t* p) { return {load8_int8(p), load8_int8(p + 8)}; }
static inline F16 widen16(__m128i bytes) {  // signed
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
static inline F16 load16_uint8(const uint8_t* p) {
    __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
// Sixteen bytes of eight: low halves at even places, high ones behind them.
static inline __m128i nibbles(const uint8_t* p) {
    __m128i w = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
    return _mm_and_si128(_mm_or_si128(w, _mm_slli_epi16(w, 4)), _mm_set1_epi8(15));
}
static inline F16 load16_int4(const uint8_t* p) {
    __m128i sign = _mm_set1_epi8(8);  // two's complement of four bits
    return widen16(_mm_sub_epi8(_mm_xor_si128(nibbles(p), sign), sign));
}
static inline F16 load16_uint4(const uint8_t* p) { return widen16(nibbles(p)); }
static inline __m256 load8_fp8(const uint8_t* p) {  // moved to where fp16 has sign, exponent, mantissa: 2^-8 of it
    __m128i bits = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
    __m256 scaled = _mm256_cvtph_ps(_mm_and_si128(bits, _mm_set1_epi16((int16_t)0xbfff)));
    return _mm256_mul_ps(scaled, _mm256_set1_ps(256.0f));
}
static inline F16 load16_fp8(const uint8_t* p) { return {load8_fp8(p), load8_fp8(p + 8)}; }
static inline __m256 load8_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline F16 load16_bf16(const uint16_t* p) { return {load8_bf16(p), load8_bf16(p + 8)}; }
static inline F16 load16_half(const uint16_t* p) {
    const __m128i* halves = (const __m128i*)p;
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
static inline void store16_half(uint16_t* p, F16 a) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}

static inline I16 iset16(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline I16 iadd16(I16 a, I16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
static inline F16 float16(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
static inline I16 round_int16(F16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
static inline void store16_int8(int8_t* p, I16 a) {
    alignas(32) int32_t lanes[16];
    _mm256_store_si256((__m256i*)lanes, a.lo);
    _mm256_store_si256((__m256i*)(lanes + 8), a.hi);
    for (int i = 0; i < 16; i++) p[i] = (int8_t)lanes[i];
}
static inline void store16_int4(uint8_t* p, I16 a) {  // the even index in the low half
    int8_t bytes[16];
    store16_int8(bytes, a);
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)((bytes[2 * i] & 15) | (bytes[2 * i + 1] & 15) << 4);
}
static inline int32_t isum16(I16 a) {
    alignas(32) int32_t lanes[8];
    _mm256_store_si256((__m256i*)lanes, _mm256_add_epi32(a.lo, a.hi));
    int32_t sum = 0;
    for (int i = 0; i < 8; i++) sum += lanes[i];
    return sum;
}
static inline __m256 power_of_two8(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline F16 power_of_two16(F16 n) { return {power_of_two8(n.lo), power_of_two8(n.hi)}; }

static inline float max_of16(F16 a) {
    __m256 m = _mm256_max_ps(a.lo, a.hi);
    m = _mm256_max_ps(m, _mm256_permute2f128_ps(m, m, 1));
    m = _mm256_max_ps(m, _mm256_permute_ps(m, 0x4e));
    return _mm256_cvtss_f32(_mm256_max_ps(m, _mm256_permute_ps(m, 0xb1)));
}
static inline __m128 sum8(__m256 a) {
    a = _mm256_add_ps(a, _mm256_permute_ps(a, 0x4e));
    a = _mm256_add_ps(a, _mm256_permute_ps(a, 0xb1));
    return _mm_add_ss(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
}
static inline float sum16(F16 a) { return _mm_cvtss_f32(_mm_add_ss(sum8(a.lo), sum8(a.hi))); }

// Lane t: the product of `query` with row t of `rows` [16, dim].
static inline F16 products16(const float* query, const float* rows, int dim) {
    alignas(32) float out[16];
    for (int t = 0; t < 16; t += 4) {
        F16 a[4] = {zero16(), zero16(), zero16(), zero16()};
        for (int i = 0; i < dim; i += 16) {
            F16 q = load16(query + i);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) a[j] = fma16(q, load16(rows + (t + j) * dim + i), a[j]);
        }
        for (int j = 0; j < 4; j++) out[t + j] = sum16(a[j]);
    }
    return load16(out);
}

// Sixteen rows of four bytes each, times the same four int8.
using W64 = I16;
static inline W64 load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
static inline W64 low_nibbles(const uint8_t* p) {
    W64 w = load_bytes(p);
    __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(w.lo, mask), _mm256_and_si256(w.hi, mask)};
}
static inline W64 high_nibbles(const uint8_t* p) {
    W64 w = load_bytes(p);
    __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(w.lo, 4), mask), _mm256_and_si256(_mm256_srli_epi16(w.hi, 4), mask)};
}
static inline W64 load_q8(const uint8_t* p) {  // the offset of 128 taken off again
    W64 w = load_bytes(p);
    __m256i offset = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(w.lo, offset), _mm256_xor_si256(w.hi, offset)};
}
static inline I16 broadcast4(const int8_t* p) {
    int32_t word;
    memcpy(&word, p, 4);
    return iset16(word);
}
// Pairs of products fit 16 bits: 2 * 15 * 127 for nibbles, 2 * 128 * 127 for |w| times x with w's sign.
static inline __m256i dot8(__m256i sum, __m256i w, __m256i x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
static inline I16 dot_q4(I16 sum, W64 w, I16 x) { return {dot8(sum.lo, w.lo, x.lo), dot8(sum.hi, w.hi, x.hi)}; }
static inline I16 dot_q8(I16 sum, W64 w, I16 x) {
    return {dot8(sum.lo, _mm256_abs_epi8(w.lo), _mm256_sign_epi8(x.lo, w.lo)),
            dot8(sum.hi, _mm256_abs_epi8(w.hi), _mm256_sign_epi8(x.hi, w.hi))};
}
static inline int32_t q8_start(int32_t) { return 0; }

static inline uint16_t half_of(float x) { return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
static inline float float_of_half(uint16_t x) { return _cvtsh_ss(x); }

}  // namespace pf::PF_ISA
