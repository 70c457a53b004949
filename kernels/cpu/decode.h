// What pages store to numbers.
#pragma once
#include "codec.h"

namespace pf::PF_ISA {

// Tokens low to high of the 16 from `slot` of a head on, as numbers, to the same rows of `out` [16, dim].
template <class Codec>
static PF_INLINE void decode_scaled(const Pages& pages, const Side& side, int64_t page, int head, int slot, int low,
                                    int high, float* out) {
    int dim = pages.head_dim;
    int64_t vector = (int64_t)head * pages.page_size + slot;
    const uint8_t* rows = side.payload + page * pages.page_bytes + vector * side.row_bytes;
    int64_t at = page * pages.page_bytes + 2 * (side.is_per_channel ? (int64_t)head * dim : vector);
    const uint16_t* scales = (const uint16_t*)(side.scales + at);
    const uint16_t* zeros = Codec::kIsSymmetric ? nullptr : (const uint16_t*)(side.zeros + at);
    if (side.is_per_channel) {
        for (int i = 0; i < dim; i += 16) {
            F16 scale = load16_half(scales + i), zero = Codec::kIsSymmetric ? zero16() : load16_half(zeros + i);
            for (int t = low; t < high; t++) {
                F16 x = Codec::load(rows + t * side.row_bytes, i);
                store16(out + t * dim + i, Codec::kIsSymmetric ? mul16(x, scale) : fma16(x, scale, zero));
            }
        }
        return;
    }
    for (int t = low; t < high; t++) {
        F16 scale = set16(float_of_half(scales[t]));
        F16 zero = Codec::kIsSymmetric ? zero16() : set16(float_of_half(zeros[t]));
        for (int i = 0; i < dim; i += 16) {
            F16 x = Codec::load(rows + t * side.row_bytes, i);
            store16(out + t * dim + i, Codec::kIsSymmetric ? mul16(x, scale) : fma16(x, scale, zero));
        }
    }
}

static inline void decode_block(const Pages& pages, const Side& side, int64_t page, int head, int slot, int low,
                                int high, float* out) {
    if (side.scales) {
        with_codec(side, [&](auto codec) {
            decode_scaled<decltype(codec)>(pages, side, page, head, slot, low, high, out);
        });
        return;
    }
    int dim = pages.head_dim, count = (high - low) * dim;
    int64_t vector = (int64_t)head * pages.page_size + slot + low;
    const uint8_t* from = side.payload + page * pages.page_bytes + vector * side.row_bytes;
    out += low * dim;
    if (side.element == FP32)
        memcpy(out, from, (size_t)count * sizeof(float));
    else if (side.element == BF16)
        for (int i = 0; i < count; i += 16) store16(out + i, load16_bf16((const uint16_t*)from + i));
    else
        for (int i = 0; i < count; i += 16) store16(out + i, load16_half((const uint16_t*)from + i));
}

// Inlined always: GCC drops calls of a function that does nothing but prefetch.
static PF_INLINE void prefetch_block(const Pages& pages, const Side& side, int64_t page, int head, int slot) {
    int64_t vector = (int64_t)head * pages.page_size + slot, begin = page * pages.page_bytes;
    const uint8_t* from = side.payload + begin + vector * side.row_bytes;
    for (int i = 0; i < 16 * side.row_bytes; i += 64) __builtin_prefetch(from + i);
    if (!side.scales) return;
    int64_t at = begin + 2 * (side.is_per_channel ? (int64_t)head * pages.head_dim : vector);
    int bytes = 2 * (side.is_per_channel ? pages.head_dim : 16);
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(side.scales + at + i);
    if (!side.zeros) return;
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(side.zeros + at + i);
}

}  // namespace pf::PF_ISA
