// What pages store to numbers.
#pragma once
#include "codec.h"

namespace pf::PF_ISA {

// `count` tokens of a head from `slot` on, as numbers, to `out` [count, dim].
template <class Codec>
static PF_INLINE void decode_scaled(const Pages& pages, const Side& side, int64_t page, int head, int slot, int count,
                                    float* out) {
    int dim = pages.head_dim;
    int64_t vector = (int64_t)head * pages.page_size + slot;
    const uint8_t* rows = side.payload + page * pages.page_bytes + vector * side.row_bytes;
    int64_t at = page * pages.page_bytes + 2 * (side.is_per_channel ? (int64_t)head * dim : vector);
    const uint16_t* scales = (const uint16_t*)(side.scales + at);
    const uint16_t* zeros = Codec::kIsSymmetric ? nullptr : (const uint16_t*)(side.zeros + at);
    if (side.is_per_channel) {
        for (int i = 0; i < dim; i += 16) {
            F16 scale = load16_half(scales + i), zero = Codec::kIsSymmetric ? zero16() : load16_half(zeros + i);
            for (int t = 0; t < count; t++) {
                F16 x = Codec::load(rows + t * side.row_bytes, i);
                store16(out + t * dim + i, Codec::kIsSymmetric ? mul16(x, scale) : fma16(x, scale, zero));
            }
        }
        return;
    }
    for (int t = 0; t < count; t++) {
        F16 scale = set16(float_of_half(scales[t]));
        F16 zero = Codec::kIsSymmetric ? zero16() : set16(float_of_half(zeros[t]));
        for (int i = 0; i < dim; i += 16) {
            F16 x = Codec::load(rows + t * side.row_bytes, i);
            store16(out + t * dim + i, Codec::kIsSymmetric ? mul16(x, scale) : fma16(x, scale, zero));
        }
    }
}

static inline void decode_rows(const Pages& pages, const Side& side, int64_t page, int head, int slot, int count,
                               float* out) {
    if (side.scales) {
        with_codec(side, [&](auto codec) {
            decode_scaled<decltype(codec)>(pages, side, page, head, slot, count, out);
        });
        return;
    }
    int numbers = count * pages.head_dim;
    int64_t vector = (int64_t)head * pages.page_size + slot;
    const uint8_t* from = side.payload + page * pages.page_bytes + vector * side.row_bytes;
    if (side.element == FP32)
        memcpy(out, from, (size_t)numbers * sizeof(float));
    else if (side.element == BF16)
        for (int i = 0; i < numbers; i += 16) store16(out + i, load16_bf16((const uint16_t*)from + i));
    else
        for (int i = 0; i < numbers; i += 16) store16(out + i, load16_half((const uint16_t*)from + i));
}

static PF_INLINE void prefetch_bytes(const uint8_t* from, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + i);
}

// Inlined always: GCC drops calls of a function that does nothing but prefetch.
static PF_INLINE void prefetch_rows(const Pages& pages, const Side& side, int64_t page, int head, int slot, int count) {
    int64_t vector = (int64_t)head * pages.page_size + slot, begin = page * pages.page_bytes;
    prefetch_bytes(side.payload + begin + vector * side.row_bytes, count * side.row_bytes);
    if (!side.scales) return;
    int64_t at = begin + 2 * (side.is_per_channel ? (int64_t)head * pages.head_dim : vector);
    int64_t bytes = 2 * (side.is_per_channel ? pages.head_dim : count);
    prefetch_bytes(side.scales + at, bytes);
    if (side.zeros) prefetch_bytes(side.zeros + at, bytes);
}

}  // namespace pf::PF_ISA
