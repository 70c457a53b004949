// Rotary embedding and the writing of keys and values into their pages; see kernels/rotary.py, kernels/append_pages.py.
#pragma once
#include "elementwise.h"
#include "tails.h"

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

// Key or value of one token.
static inline void store_head(const Pages& pages, const Side& side, int64_t page, int head, int slot, const float* x) {
    int dim = pages.head_dim;
    int64_t vector = (int64_t)head * pages.page_size + slot, begin = page * pages.page_bytes;
    uint8_t* row = side.payload + begin + vector * side.row_bytes;
    if (!side.scales) {
        store_plain({x, nullptr}, row, dim, side.element);
        return;
    }
    Factors factors = {};
    with_codec(side, [&](auto codec) { factors = store_vector<decltype(codec)>({x, nullptr}, row, dim); });
    memcpy(side.scales + begin + 2 * vector, &factors.scale, 2);
    if (side.zeros) memcpy(side.zeros + begin + 2 * vector, &factors.zero, 2);
}

static void append_row(float* heads, const Rotary& rotary, const Pages& pages, int64_t page, int position,
                       int num_heads) {
    int dim = pages.head_dim, kv_heads = pages.num_kv_heads, slot = position % pages.page_size;
    const float* cos = rotary.cos + (int64_t)position * (dim / 2);
    const float* sin = rotary.sin + (int64_t)position * (dim / 2);
    for (int h = 0; h < num_heads + kv_heads; h++) {
        const float* norm = h < num_heads ? rotary.q_norm : rotary.k_norm;
        if (norm) rms_norm_row(heads + h * dim, norm, heads + h * dim, dim, rotary.eps);
        rotate(heads + h * dim, cos, sin, dim);
    }
    float* stored = heads + num_heads * dim;
    for (int h = 0; h < 2 * kv_heads; h++) {
        if (pages.tail_bytes)
            round_to_halves(stored + h * dim, dim);
        else
            store_head(pages, pages.sides[h / kv_heads], page, h % kv_heads, slot, stored + h * dim);
    }
}

// Rows [queries | keys | values] of heads: norms and turns queries and keys in place, stores keys and values. Where
// there are tails, keys and values are rounded to fp16 in place, and stored where they fill a page.
static void rotate_append(Team team, float* qkv, const Rotary& rotary, const Pages& pages, const Batch& batch,
                          int num_heads) {
    int dim = pages.head_dim, kv_heads = pages.num_kv_heads, width = (num_heads + 2 * kv_heads) * dim;
    const Tables& tables = batch.tables[pages.group];
    team.share(batch.num_rows, kRowGrain / 2, [&](int64_t begin, int64_t end, int) {
        for (int seq = 0; seq < batch.num_seqs; seq++) {
            const int32_t* table = tables.pages + tables.starts[seq];
            int64_t last = smaller(batch.row_starts[seq + 1], end);
            for (int64_t row = larger(batch.row_starts[seq], begin); row < last; row++) {
                int position = batch.positions[row];
                append_row(qkv + row * width, rotary, pages, table[position / pages.page_size], position, num_heads);
            }
        }
    });
    if (pages.tail_bytes) seal_pages(team, qkv, width, pages, batch, num_heads);
}

}  // namespace pf::PF_ISA
