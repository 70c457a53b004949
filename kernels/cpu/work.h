// How attention is cut up: a batch into items that threads take, and an item into the blocks that its rows see.
#pragma once
#include "softmax.h"
#include "tails.h"

namespace pf::PF_ISA {

constexpr int kSpan = 256;  // tokens, whole blocks

// Consecutive rows of one sequence, over those positions from `begin` to `end` that one of them sees; `end` is a span's
// end, or that of what the last row sees.
struct Item {
    int32_t seq;
    int32_t row;
    int32_t num_rows;
    int32_t begin;
    int32_t end;
    int32_t partial;  // where the state is left for merge_partials, or -1: the item is all of its rows' positions
};

struct Work {
    Item* items;
    int32_t num_items;
    int32_t num_partials;
    float* partials;    // [partial][head]: accumulator[head_dim], largest, sum
    float* scratch;     // of each thread, `scratch_floats` apart
    int64_t scratch_floats;
};

// The first position behind the sinks that a row at `position` sees.
static inline int first_seen(const Pages& pages, int position) {
    return pages.window && position >= pages.window ? position - pages.window + 1 : 0;
}
// `position`, or the next one that is a sink or not before `first`.
static inline int next_seen(const Pages& pages, int first, int position) {
    return position < pages.sinks ? position : (int)larger(position, first);
}
static inline int rows_per_tile(int group, int dim) {
    int64_t rows = 2048 / ((int64_t)group * dim);
    return (int)larger(1, smaller(rows, 16));
}
static inline int64_t scratch_floats(const Attention& a, const Pages& pages) {
    int64_t dim = pages.head_dim, group = a.num_heads / pages.num_kv_heads;
    int64_t vectors = group * rows_per_tile((int)group, (int)dim);
    int64_t states = 2 * vectors * (int64_t)(sizeof(State) / sizeof(float));
    return 2 * kBlock * dim + vectors * 3 * dim + ((states + 15) & ~(int64_t)15);
}

// Lists the batch's items into `items`, or with null only counts them; gives the number of partials too.
static int list_items(const Batch& batch, const Pages& pages, const Attention& a, int threads, Item* items,
                      int32_t* num_partials) {
    int tile = rows_per_tile(a.num_heads / pages.num_kv_heads, pages.head_dim);
    int num_items = 0, partials = 0;
    bool may_split = batch.num_seqs * pages.num_kv_heads < 4 * threads;  // else there is work enough for all threads
    for (int seq = 0; seq < batch.num_seqs; seq++) {
        int stop = batch.row_starts[seq + 1];
        bool single = may_split && stop - batch.row_starts[seq] == 1;
        for (int row = batch.row_starts[seq]; row < stop;) {
            int rows = (int)smaller(tile, stop - row);
            int first = first_seen(pages, batch.positions[row]), end = batch.positions[row + rows - 1] + 1;
            int begin = next_seen(pages, first, 0);
            bool split = single && begin / kSpan != (end - 1) / kSpan;
            while (begin < end) {
                int until = split ? (int)smaller(end, (begin / kSpan + 1) * kSpan) : end;
                if (items) items[num_items] = {seq, row, rows, begin, until, split ? partials : -1};
                partials += split;
                num_items++;
                begin = next_seen(pages, first, until);
            }
            row += rows;
        }
    }
    if (num_partials) *num_partials = partials;
    return num_items;
}

// Room for the items of one cache group; they are to be listed before `attend`.
static Work take_items(Arena& arena, const Attention& a, const Pages& pages, const Batch& batch, Team team) {
    Work work = {};
    work.num_items = list_items(batch, pages, a, team.size, nullptr, &work.num_partials);
    work.items = arena.take<Item>(work.num_items);
    return work;
}

// Room to attend in, for items of which at most `num_partials` are partial.
static void take_scratch(Arena& arena, const Attention& a, const Pages& pages, Team team, Work& work) {
    work.partials = arena.take<float>((int64_t)work.num_partials * a.num_heads * (pages.head_dim + 2));
    work.scratch_floats = (scratch_floats(a, pages) + 15) & ~(int64_t)15;
    work.scratch = arena.take<float>(team.size * work.scratch_floats);
}

// The block after the one at `base` of which a row that sees `first` and the sinks sees something.
static inline int next_block(const Pages& pages, int first, int base) {
    return next_seen(pages, first, base + kBlock) & ~(kBlock - 1);
}

// A bit for each of the block's tokens that a row at `position` sees.
static inline uint64_t seen_in(const Pages& pages, int base, int position) {
    int high = (int)smaller(kBlock, position + 1 - base), low = first_seen(pages, position) - base;
    if (high <= 0) return 0;
    uint64_t seen = ~(uint64_t)0 >> (64 - high);
    if (low <= 0) return seen;
    int sinks = (int)larger(0, smaller(kBlock, pages.sinks - base));
    uint64_t before = low < 64 ? ~(uint64_t)0 << low : 0;
    return seen & (before | (sinks ? ~(uint64_t)0 >> (64 - sinks) : 0));
}

}  // namespace pf::PF_ISA
