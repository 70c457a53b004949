// Attention over paged keys and values; see kernels/paged_attention.py for the formula.
//
// Softmax runs block by block within a span of 256 tokens, counted from position 0, and the spans are merged in order:
// whether a row comes alone or in a chunk, and whether its spans are shared among threads or not, its bits are the
// same.
#pragma once
#include "abi.h"
#include "softmax.h"
#include "team.h"

namespace pf::PF_ISA {

constexpr int kSpanTokens = 256;
constexpr int kAhead = 4;  // blocks that are asked for while one is computed: memory takes longer than a block does

// Consecutive rows of one sequence, over the positions from `begin` to `end` (of whole spans, but for the last).
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
    int32_t* next;      // items times KV heads taken so far
    float* partials;    // [partial][head]: accumulator[head_dim], largest, sum
    float* scratch;     // of this thread
};

// Of whole pages.
static inline int span_tokens(int page_size) {
    return page_size >= kSpanTokens ? page_size : kSpanTokens / page_size * page_size;
}
static inline int first_seen(int position, int window) {
    return window && position >= window ? position - window + 1 : 0;
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
    int tile = rows_per_tile(a.num_heads / pages.num_kv_heads, pages.head_dim), span = span_tokens(pages.page_size);
    int num_items = 0, partials = 0;
    bool may_split = batch.num_seqs * pages.num_kv_heads < 4 * threads;  // else there is work enough for all threads
    for (int seq = 0; seq < batch.num_seqs; seq++) {
        int stop = batch.row_starts[seq + 1];
        bool single = may_split && stop - batch.row_starts[seq] == 1;
        for (int row = batch.row_starts[seq]; row < stop;) {
            int rows = (int)smaller(tile, stop - row);
            int begin = first_seen(batch.positions[row], a.window), end = batch.positions[row + rows - 1] + 1;
            bool split = single && begin / span != (end - 1) / span;
            while (begin < end) {
                int until = split ? (int)smaller(end, (begin / span + 1) * span) : end;
                if (items) items[num_items] = {seq, row, rows, begin, until, split ? partials : -1};
                partials += split;
                num_items++;
                begin = until;
            }
            row += rows;
        }
    }
    if (num_partials) *num_partials = partials;
    return num_items;
}

// `items` are to be listed, and `next` to be set, by one thread before `attend`.
static Work take_work(Arena& arena, const Attention& a, const Pages& pages, const Batch& batch, Team team) {
    Work work = {};
    work.num_items = list_items(batch, pages, a, team.size, nullptr, &work.num_partials);
    work.items = arena.take<Item>(work.num_items);
    work.partials = arena.take<float>((int64_t)work.num_partials * a.num_heads * (pages.head_dim + 2));
    int64_t floats = scratch_floats(a, pages);
    float* scratch = arena.take<float>(team.size * floats);
    work.scratch = scratch ? scratch + team.rank * floats : nullptr;
    return work;
}

// A thread's scratch, cut up: one tile of query vectors, row after row, each with its group of heads.
struct Tile {
    float* keys;
    float* values;
    float* queries;
    State* parts;
    State* totals;

    Tile(float* scratch, int vectors, int dim) {
        keys = scratch;
        values = keys + kBlock * dim;
        queries = values + kBlock * dim;
        float* accumulators = queries + (int64_t)vectors * dim;
        parts = (State*)(accumulators + 2 * (int64_t)vectors * dim);
        totals = parts + vectors;
        for (int v = 0; v < 2 * vectors; v++) parts[v].accumulator = accumulators + (int64_t)v * dim;
        for (int v = 0; v < 2 * vectors; v++) reset(parts[v], dim);
    }
};

// The rows of an item meet the 16 tokens (or what the page has left) from position `base` on.
static void attend_rows(const Tile& tile, const Batch& batch, const Attention& a, const Item& item, int base,
                        int tokens, int group, int dim) {
    int whole_from = 0, whole_to = 0;  // rows that see the whole block
    for (int r = 0; r < item.num_rows; r++) {
        int position = batch.positions[item.row + r];
        int low = (int)larger(0, first_seen(position, a.window) - base);
        int high = (int)smaller(tokens, position + 1 - base);
        if (low >= high) continue;
        if (low == 0 && high == kBlock) {
            if (whole_to == 0) whole_from = r;
            whole_to = r + 1;
            continue;
        }
        const float* queries = tile.queries + (int64_t)r * group * dim;
        attend_block(tile.parts + r * group, group, queries, tile.keys, tile.values, low, high, dim);
    }
    if (whole_to)
        attend_block(tile.parts + whole_from * group, (whole_to - whole_from) * group,
                     tile.queries + (int64_t)whole_from * group * dim, tile.keys, tile.values, 0, kBlock, dim);
}

static PF_INLINE void prefetch_position(const Pages& pages, const int32_t* table, int kv_head, int position,
                                        int end) {
    if (position >= end) return;
    int64_t page = table[position / pages.page_size];
    int slot = position % pages.page_size / kBlock * kBlock;
    prefetch_block(pages, page, 0, kv_head, slot);
    prefetch_block(pages, page, 1, kv_head, slot);
}

static void attend_item(const Attention& a, const Pages& pages, const Batch& batch, const Work& work, const Item& item,
                        int kv_head) {
    int dim = pages.head_dim, group = a.num_heads / pages.num_kv_heads, vectors = item.num_rows * group;
    Tile tile(work.scratch, vectors, dim);
    for (int v = 0; v < vectors; v++) {
        int head = kv_head * group + v % group;
        const float* query = a.query + (item.row + v / group) * a.query_stride + head * dim;
        for (int i = 0; i < dim; i += 16) store16(tile.queries + v * dim + i, mul16(load16(query + i), set16(a.scale)));
    }
    const int32_t* table = batch.table + batch.table_starts[item.seq];
    int span = span_tokens(pages.page_size);
    for (int i = 0; i < kAhead; i++) prefetch_position(pages, table, kv_head, item.begin + i * kBlock, item.end);
    for (int position = item.begin; position < item.end;) {
        int slot = position % pages.page_size / kBlock * kBlock;
        int base = position / pages.page_size * pages.page_size + slot;
        int tokens = (int)smaller(kBlock, pages.page_size - slot), end = (int)smaller(item.end, base + tokens);
        int64_t page = table[position / pages.page_size];
        prefetch_position(pages, table, kv_head, base + kAhead * kBlock, item.end);
        if (base % span == 0 && position != item.begin) {
            for (int v = 0; v < vectors; v++) {
                merge(tile.totals[v], tile.parts[v], dim);
                reset(tile.parts[v], dim);
            }
        }
        decode_block(pages, page, 0, kv_head, slot, position - base, end - base, tile.keys);
        decode_block(pages, page, 1, kv_head, slot, position - base, end - base, tile.values);
        attend_rows(tile, batch, a, item, base, tokens, group, dim);
        position = end;
    }
    for (int v = 0; v < vectors; v++) {
        merge(tile.totals[v], tile.parts[v], dim);
        int head = kv_head * group + v % group;
        if (item.partial < 0) {
            finish(tile.totals[v], a.out + ((int64_t)(item.row + v / group) * a.num_heads + head) * dim, dim);
            continue;
        }
        float* partial = work.partials + ((int64_t)item.partial * a.num_heads + head) * (dim + 2);
        memcpy(partial, tile.totals[v].accumulator, (size_t)dim * sizeof(float));
        partial[dim] = tile.totals[v].largest;
        partial[dim + 1] = tile.totals[v].sum;
    }
}

// Items go to whichever thread is free; `work.next` must be 0 before the first comes.
static void attend(const Attention& a, const Pages& pages, const Batch& batch, const Work& work) {
    int total = work.num_items * pages.num_kv_heads;
    for (;;) {
        int taken = __atomic_fetch_add(work.next, 1, __ATOMIC_RELAXED);
        if (taken >= total) return;
        int reversed = total - 1 - taken;  // a chunk's last rows see most, and should not come last
        attend_item(a, pages, batch, work, work.items[reversed / pages.num_kv_heads], reversed % pages.num_kv_heads);
    }
}

// Once all of `attend` is done: rows that were split over the sequence.
static void merge_partials(Team team, const Attention& a, const Pages& pages, const Work& work) {
    int dim = pages.head_dim;
    for (int64_t head = team.begin(a.num_heads); head < team.end(a.num_heads); head++) {
        for (int first = 0; first < work.num_items;) {
            const Item& item = work.items[first];
            int last = first + 1;
            while (last < work.num_items && work.items[last].row == item.row) last++;
            if (item.partial >= 0) {
                State total = {work.scratch, kNone, 0.0f};
                for (int i = first; i < last; i++) {
                    float* partial = work.partials + ((int64_t)work.items[i].partial * a.num_heads + head) * (dim + 2);
                    merge(total, {partial, partial[dim], partial[dim + 1]}, dim);
                }
                finish(total, a.out + ((int64_t)item.row * a.num_heads + head) * dim, dim);
            }
            first = last;
        }
    }
}

static void attention(Team team, const Attention& a, const Pages& pages, const Batch& batch, uint8_t* workspace) {
    Arena arena = {workspace, 0};
    int32_t* next = arena.take<int32_t>(1);
    Work work = take_work(arena, a, pages, batch, team);
    work.next = next;
    if (team.rank == 0) {
        list_items(batch, pages, a, team.size, work.items, nullptr);
        *next = 0;
    }
    team.barrier();
    attend(a, pages, batch, work);
    if (!work.num_partials) return;
    team.barrier();
    merge_partials(team, a, pages, work);
}

static int64_t attention_bytes(const Attention& a, const Pages& pages, const Batch& batch, int threads) {
    Arena arena = {nullptr, 0};
    arena.take<int32_t>(1);
    take_work(arena, a, pages, batch, {0, threads, nullptr, nullptr});
    return arena.used;
}

}  // namespace pf::PF_ISA
