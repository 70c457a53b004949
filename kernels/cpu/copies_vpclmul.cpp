// Copies with checksums by 512-bit vectors; setup.py compiles this file with the flags.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#define PF_FOLD vpclmul

namespace pf::PF_FOLD {
using Vec = __m512i;
using Consts = __m512i;
inline Vec load(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline void store(uint8_t* to, Vec value) { _mm512_storeu_si512(to, value); }
inline Vec add(Vec a, Vec b) { return _mm512_xor_si512(a, b); }
inline Vec with_low(uint32_t value) { return _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)value)); }
inline Consts constants(uint64_t low, uint64_t high) {
    return _mm512_broadcast_i32x4(_mm_set_epi64x((long long)high, (long long)low));
}
inline Vec fold(Vec a, Consts k) {
    return add(_mm512_clmulepi64_epi128(a, k, 0x00), _mm512_clmulepi64_epi128(a, k, 0x11));
}
}  // namespace pf::PF_FOLD

#include "copies.h"

uint32_t pf_copy_vpclmul(uint8_t* to, const uint8_t* from, int64_t length, uint32_t crc) {
    return pf::PF_FOLD::copy(to, from, length, crc);
}
#endif
