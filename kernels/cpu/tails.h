// Pages that are quantised as a whole: the tokens of an open page, and what becomes of them.
//
// A query at p reads tokens t < floor((p + 1) / B) B as pages store them, and those from there to p in fp16: a chunk's
// own from its rows, earlier ones from the sequence's tail. A page is sealed from both when its last token is there.
#pragma once
#include "encode.h"

namespace pf::PF_ISA {

constexpr int32_t kTailGrain = 12;  // heads whose tails are worth another thread

// One head of K or V of a sequence, by position, from a page that is open before the chunk or in it.
struct OpenTokens {
    const uint16_t* tail;  // [B, D]
    const float* rows;     // of position `start`, already rounded to fp16
    int64_t stride;
    int start;  // of the chunk
    int page_size;
    int dim;

    PF_INLINE Numbers at(int position) const {
        if (position < start) return {nullptr, tail + (int64_t)(position % page_size) * dim};
        return {rows + (position - start) * stride, nullptr};
    }
};

// A page's tokens, counted from its first.
struct PageTokens {
    OpenTokens open;
    int first;

    PF_INLINE Numbers at(int t) const { return open.at(first + t); }
};

static inline uint16_t* tail_of(const Pages& pages, const Batch& batch, int seq, int side, int head) {
    uint8_t* tail = pages.sides[side].tails + batch.tails[seq] * pages.tail_bytes;
    return (uint16_t*)tail + (int64_t)head * pages.page_size * pages.head_dim;
}

// `rows` of queries | keys | values, `stride` apart.
static inline OpenTokens open_tokens(const Pages& pages, const Batch& batch, const float* rows, int64_t stride,
                                     int num_heads, int seq, int side, int head) {
    int row = batch.row_starts[seq], dim = pages.head_dim;
    int64_t column = (int64_t)(num_heads + side * pages.num_kv_heads + head) * dim;
    return {tail_of(pages, batch, seq, side, head), rows + row * stride + column, stride, batch.positions[row],
            pages.page_size, dim};
}

static void seal(const Pages& pages, int side_index, int64_t page, int head, const PageTokens& tokens) {
    const Side& side = pages.sides[side_index];
    int size = pages.page_size, dim = pages.head_dim;
    uint8_t* rows = side.payload + page * pages.page_bytes + (int64_t)head * size * side.row_bytes;
    if (!side.scales) {
        for (int t = 0; t < size; t++) store_plain(tokens.at(t), rows + t * side.row_bytes, dim, side.element);
        return;
    }
    int64_t at = page * pages.page_bytes + 2 * (int64_t)head * (side.is_per_channel ? dim : size);
    uint16_t* scales = (uint16_t*)(side.scales + at);
    uint16_t* zeros = side.zeros ? (uint16_t*)(side.zeros + at) : nullptr;
    with_codec(side, [&](auto codec) {
        using Codec = decltype(codec);
        if (side.is_per_channel) {
            for (int i = 0; i < dim; i += 16)
                store_channels<Codec>(tokens, size, i, rows, side.row_bytes, scales, zeros);
            return;
        }
        for (int t = 0; t < size; t++) {
            Factors factors = store_vector<Codec>(tokens.at(t), rows + t * side.row_bytes, dim);
            scales[t] = factors.scale;
            if (zeros) zeros[t] = factors.zero;
        }
    });
}

// The pages that the batch's rows fill. All rows are turned and rounded.
static void seal_pages(Team team, const float* qkv, int64_t stride, const Pages& pages, const Batch& batch,
                       int num_heads) {
    const Tables& tables = batch.tables[pages.group];
    int heads = 2 * pages.num_kv_heads, size = pages.page_size;
    team.share(batch.num_seqs * heads, 1, [&](int begin, int end, int) {
        for (int unit = begin; unit < end; unit++) {
            int seq = unit / heads, side = unit % heads / pages.num_kv_heads, head = unit % heads % pages.num_kv_heads;
            OpenTokens open = open_tokens(pages, batch, qkv, stride, num_heads, seq, side, head);
            int last = (open.start + batch.row_starts[seq + 1] - batch.row_starts[seq]) / size;
            for (int index = open.start / size; index < last; index++)
                seal(pages, side, tables.pages[tables.starts[seq] + index], head, {open, index * size});
        }
    });
}

// The batch's rows that lie in an open page, into the tails; zeros behind them where the page begins with them. Nothing
// reads the tails any more.
static void write_tails(Team team, const float* qkv, int64_t stride, const Pages& pages, const Batch& batch,
                        int num_heads) {
    int heads = 2 * pages.num_kv_heads, size = pages.page_size, dim = pages.head_dim;
    team.share(batch.num_seqs * heads, kTailGrain, [&](int begin, int end, int) {
        for (int unit = begin; unit < end; unit++) {
            int seq = unit / heads, side = unit % heads / pages.num_kv_heads, head = unit % heads % pages.num_kv_heads;
            OpenTokens open = open_tokens(pages, batch, qkv, stride, num_heads, seq, side, head);
            int stop = open.start + batch.row_starts[seq + 1] - batch.row_starts[seq], first = stop / size * size;
            uint16_t* tail = tail_of(pages, batch, seq, side, head);
            for (int position = (int)larger(first, open.start); position < stop; position++)
                store_halves(open.at(position), tail + (int64_t)(position - first) * dim, dim);
            if (first >= open.start && first < stop)
                memset(tail + (int64_t)(stop - first) * dim, 0, (size_t)(first + size - stop) * dim * sizeof(uint16_t));
        }
    });
}

}  // namespace pf::PF_ISA
