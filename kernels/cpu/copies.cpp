// Pages to and from a flat buffer, with checksums; the C ABI of kernels/copy_pages.py. One thread, the caller's.
#include "abi.h"

using Copy = uint32_t (*)(uint8_t* to, const uint8_t* from, int64_t length, uint32_t crc);

#if defined(__x86_64__)
uint32_t pf_copy_pclmul(uint8_t* to, const uint8_t* from, int64_t length, uint32_t crc);
uint32_t pf_copy_vpclmul(uint8_t* to, const uint8_t* from, int64_t length, uint32_t crc);
#endif

namespace {

Copy copy_of(int32_t level) {
#if defined(__x86_64__)
    return level >= 2 ? pf_copy_vpclmul : pf_copy_pclmul;
#else
    (void)level;
    return nullptr;
#endif
}

// The first fp16 that isn't finite or, of scales, not positive: -1 where there is none.
int32_t first_bad(const uint8_t* bytes, int64_t length, bool is_scale) {
    constexpr uint16_t kInfinity = 0x7C00;
    const uint16_t* bits = (const uint16_t*)bytes;
    int32_t count = (int32_t)(length / 2);
    // Less one, a scale of 0 wraps: then it is too large, as negative ones are.
    uint16_t less = is_scale ? 1 : 0, mask = is_scale ? 0xFFFF : 0x7FFF, limit = kInfinity - less, largest = 0;
    for (int32_t i = 0; i < count; i++) {
        uint16_t size = (uint16_t)(bits[i] - less) & mask;
        largest = size > largest ? size : largest;
    }
    if (largest < limit) return -1;
    for (int32_t i = 0; i < count; i++)
        if (((uint16_t)(bits[i] - less) & mask) >= limit) return i;
    return -1;
}

void check_factors(const pf::PageCopy& part, pf::PageCheck& check) {
    for (int32_t i = 1; i < 3; i++) {
        const uint8_t* factors = part.page + part.starts[i];
        int32_t index = first_bad(factors, part.lengths[i], i == 1);
        if (index < 0) continue;
        check.bad_part = i;
        check.bad_index = index;
        check.bad_bits = ((const uint16_t*)factors)[index];
        return;
    }
}

}  // namespace

#define PF_EXPORT extern "C" __attribute__((visibility("default")))

// 0: none on this machine; 1: 128-bit vectors; 2: 512-bit vectors.
PF_EXPORT int32_t pf_copy_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul")) return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") ? 2 : 1;
#else
    return 0;
#endif
}

PF_EXPORT void pf_read_pages(int32_t level, const pf::PageCopy* parts, int32_t num_parts, uint8_t* buffer,
                             pf::PageCheck* checks) {
    Copy copy = copy_of(level);
    for (int32_t i = 0; i < num_parts; i++) {
        const pf::PageCopy& part = parts[i];
        uint8_t* to = buffer + part.offset;
        uint32_t crc = ~0u;
        for (int32_t j = 0; j < 3; to += part.lengths[j++])
            crc = copy(to, part.page + part.starts[j], part.lengths[j], crc);
        checks[i] = {~crc, 0, 0, 0};
    }
}

PF_EXPORT void pf_write_pages(int32_t level, const pf::PageCopy* parts, int32_t num_parts, const uint8_t* buffer,
                              pf::PageCheck* checks) {
    Copy copy = copy_of(level);
    for (int32_t i = 0; i < num_parts; i++) {
        const pf::PageCopy& part = parts[i];
        const uint8_t* from = buffer + part.offset;
        uint32_t crc = ~0u;
        for (int32_t j = 0; j < 3; from += part.lengths[j++])
            crc = copy(part.page + part.starts[j], from, part.lengths[j], crc);
        checks[i] = {~crc, 0, 0, 0};
        check_factors(part, checks[i]);
    }
}
