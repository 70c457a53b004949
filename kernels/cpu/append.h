// Rotary embedding and the writing of keys and values into their pages; see kernels/rotary.py, kernels/append_pages.py.
#pragma once
#include "abi.h"
#include "elementwise.h"

namespace pf::PF_ISA {

// Halves form, in place: y[i] = x[i] cos[i] - x[i + D/2] sin[i], y[i + D/2] = x[i + D/2] cos[i] + x[i] sin[i].
static inline void rotate(float* x, const float* cos, const float* sin, int dim) {
    int half = dim / 2, whole = half & ~15;
    for (int i = 0; i < whole; i += 16) {
        F16 a = load16(x + i), b = load16(x + half + i), c = load16(cos + i), s = load16(sin + i);
        store16(x + i, fma16(sub16(zero16(), b), s, mul16(a, c)));
        store16(x + half + i, fma16(a, s, mul16(b, c)));
    }
    for (int i = whole; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

static inline uint16_t bf16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// s = fp16(max |x| / 127), q = round(x / s) to nearest even, at most 127 either way; s = 0 stores q = 0, s = 1; an s
// that is not finite stores q = 0, so that a reader gets NaN.
static inline uint16_t store_int8(const float* x, int8_t* to, int dim) {
    F16 largest = zero16(), zeros = zero16();
    for (int i = 0; i < dim; i += 16) {
        F16 v = load16(x + i);
        largest = max16(largest, abs16(v));
        zeros = fma16(v, zero16(), zeros);
    }
    float bad = sum16(zeros);
    uint16_t scale = half_of(max_of16(largest) / 127.0f);
    if (bad != 0.0f) {  // NaN: then the scale is NaN, or infinite where nothing but infinities was there
        bool has_nan = false;
        for (int i = 0; i < dim; i++) has_nan |= x[i] != x[i];
        scale = has_nan ? 0x7e00 : 0x7c00;
    }
    if (scale >= 0x7c00 || scale == 0) {
        memset(to, 0, (size_t)dim);
        return scale ? scale : 0x3c00;
    }
    F16 divisor = set16(float_of_half(scale)), high = set16(127.0f), low = set16(-127.0f);
    for (int i = 0; i < dim; i += 16)
        store16_int8(to + i, round_int16(max16(low, min16(high, div16(load16(x + i), divisor)))));
    return scale;
}

// `side` is 0 for keys and 1 for values.
static inline void store_head(const Pages& pages, int64_t page, int side, int head, int slot, const float* x) {
    int dim = pages.head_dim;
    int64_t vector = ((int64_t)(side * pages.num_kv_heads + head)) * pages.page_size + slot;
    uint8_t* payload = pages.payload + page * pages.page_bytes;
    if (pages.format == INT8) {
        uint16_t scale = store_int8(x, (int8_t*)payload + vector * dim, dim);
        memcpy(pages.scales + page * pages.page_bytes + 2 * vector, &scale, 2);
    } else if (pages.format == BF16) {
        uint16_t* to = (uint16_t*)payload + vector * dim;
        for (int i = 0; i < dim; i++) to[i] = bf16_of(x[i]);
    } else {
        memcpy((float*)payload + vector * dim, x, (size_t)dim * sizeof(float));
    }
}

// Rows [queries | keys | values] of heads: norms and turns queries and keys in place, stores keys and values.
static void rotate_append(Team team, float* qkv, const Rotary& rotary, const Pages& pages, const Batch& batch,
                          int num_heads) {
    int dim = pages.head_dim, kv_heads = pages.num_kv_heads, width = (num_heads + 2 * kv_heads) * dim;
    for (int seq = 0; seq < batch.num_seqs; seq++) {
        const int32_t* table = batch.table + batch.table_starts[seq];
        int64_t first = larger(batch.row_starts[seq], team.begin(batch.num_rows));
        int64_t last = smaller(batch.row_starts[seq + 1], team.end(batch.num_rows));
        for (int64_t row = first; row < last; row++) {
            float* heads = qkv + row * width;
            int position = batch.positions[row];
            int64_t page = table[position / pages.page_size];
            int slot = position % pages.page_size;
            const float* cos = rotary.cos + (int64_t)position * (dim / 2);
            const float* sin = rotary.sin + (int64_t)position * (dim / 2);
            for (int h = 0; h < num_heads + kv_heads; h++) {
                const float* norm = h < num_heads ? rotary.q_norm : rotary.k_norm;
                if (norm) rms_norm_row(heads + h * dim, norm, heads + h * dim, dim, rotary.eps);
                rotate(heads + h * dim, cos, sin, dim);
            }
            for (int h = 0; h < 2 * kv_heads; h++)
                store_head(pages, page, h / kv_heads, h % kv_heads, slot, heads + (num_heads + h) * dim);
        }
    }
}

}  // namespace pf::PF_ISA
