// Copies with checksums by 128-bit vectors; setup.py compiles this file with the flags.
#if defined(__x86_64__)
#include <nmmintrin.h>
#include <wmmintrin.h>

#include <cstdint>

#define PF_FOLD pclmul

namespace pf::PF_FOLD {
using Vec = __m128i;
using Consts = __m128i;
inline Vec load(const uint8_t* from) { return _mm_loadu_si128((const Vec*)from); }
inline void store(uint8_t* to, Vec value) { _mm_storeu_si128((Vec*)to, value); }
inline Vec add(Vec a, Vec b) { return _mm_xor_si128(a, b); }
inline Vec with_low(uint32_t value) { return _mm_cvtsi32_si128((int)value); }
inline Consts constants(uint64_t low, uint64_t high) { return _mm_set_epi64x((long long)high, (long long)low); }
inline Vec fold(Vec a, Consts k) { return add(_mm_clmulepi64_si128(a, k, 0x00), _mm_clmulepi64_si128(a, k, 0x11)); }
}  // namespace pf::PF_FOLD

#include "copies.h"

uint32_t pf_copy_pclmul(uint8_t* to, const uint8_t* from, int64_t length, uint32_t crc) {
    return pf::PF_FOLD::copy(to, from, length, crc);
}
#endif
