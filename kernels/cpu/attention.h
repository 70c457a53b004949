// Attention over paged keys and values; see kernels/paged_attention.py for the formula.
//
// Softmax runs block by block within a span of 256 tokens, counted from position 0, and the spans are merged in order:
// whether a row comes alone or in a chunk, and whether its spans are shared among threads or not, its bits are the
// same.
#pragma once
#include "decode.h"
#include "work.h"

namespace pf::PF_ISA {

constexpr int32_t kMergeGrain = 16;  // heads whose partial states are worth another thread
constexpr int kAhead = 4;  // blocks that are asked for while one is computed: memory takes longer than a block does

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

// Rows `begin` to `end` of an item meet the block whose tokens lie in the tile.
static void attend_rows(const Tile& tile, const Pages& pages, const Batch& batch, const Item& item, int base,
                        int tokens, int begin, int end, int group) {
    constexpr uint32_t whole = (1u << kBlock) - 1u;
    int dim = pages.head_dim, whole_from = 0, whole_to = 0;  // rows that see the whole block
    for (int r = begin; r < end; r++) {
        uint32_t seen = seen_in(pages, base, tokens, batch.positions[item.row + r]);
        if (!seen) continue;
        if (seen == whole) {
            if (whole_to == 0) whole_from = r;
            whole_to = r + 1;
            continue;
        }
        const float* queries = tile.queries + (int64_t)r * group * dim;
        attend_block(tile.parts + r * group, group, queries, tile.keys, tile.values, seen, dim);
    }
    if (whole_to)
        attend_block(tile.parts + whole_from * group, (whole_to - whole_from) * group,
                     tile.queries + (int64_t)whole_from * group * dim, tile.keys, tile.values, whole, dim);
}

static PF_INLINE void prefetch_at(const Pages& pages, const int32_t* table, int kv_head, const Cursor& at, int end) {
    if (at.base >= end) return;
    int64_t page = table[at.index];
    prefetch_block(pages, pages.sides[0], page, kv_head, at.slot);
    prefetch_block(pages, pages.sides[1], page, kv_head, at.slot);
}

// Rows before `num_open` meet the block as it was when its page was not full.
static void attend_open(const Attention& a, const Tile& tile, const Pages& pages, const Batch& batch, const Item& item,
                        const Cursor& at, int num_open, int kv_head, int group) {
    int dim = pages.head_dim, end = batch.positions[item.row] + num_open;
    int tokens = (int)smaller(at.tokens(pages), end - at.base);
    for (int side = 0; side < 2; side++) {
        float* out = side ? tile.values : tile.keys;
        OpenTokens open = open_tokens(pages, batch, a.query, a.query_stride, a.num_heads, item.seq, side, kv_head);
        for (int t = 0; t < tokens; t++)
            for (int i = 0; i < dim; i += 16) store16(out + t * dim + i, open.at(at.base + t).at(i));
    }
    attend_rows(tile, pages, batch, item, at.base, at.tokens(pages), 0, num_open, group);
}

static void attend_item(const Attention& a, const Pages& pages, const Batch& batch, const Work& work, const Item& item,
                        int kv_head, float* scratch) {
    int dim = pages.head_dim, group = a.num_heads / pages.num_kv_heads, vectors = item.num_rows * group;
    Tile tile(scratch, vectors, dim);
    for (int v = 0; v < vectors; v++) {
        int head = kv_head * group + v % group;
        const float* query = a.query + (item.row + v / group) * a.query_stride + head * dim;
        for (int i = 0; i < dim; i += 16) store16(tile.queries + v * dim + i, mul16(load16(query + i), set16(a.scale)));
    }
    const Tables& tables = batch.tables[pages.group];
    const int32_t* table = tables.pages + tables.starts[item.seq];
    int position = batch.positions[item.row], first = first_seen(pages, position);
    int span = span_tokens(pages.page_size), span_end = (item.begin / span + 1) * span;
    Cursor at, ahead;
    at.set(pages, item.begin);
    ahead = at;
    for (int i = 0; i < kAhead; i++, ahead.advance(pages, first)) prefetch_at(pages, table, kv_head, ahead, item.end);
    for (; at.base < item.end; at.advance(pages, first)) {
        prefetch_at(pages, table, kv_head, ahead, item.end);
        ahead.advance(pages, first);
        if (at.base >= span_end) {
            for (int v = 0; v < vectors; v++) {
                merge(tile.totals[v], tile.parts[v], dim);
                reset(tile.parts[v], dim);
            }
            span_end = (at.base / span + 1) * span;
        }
        int num_open = 0;
        if (pages.tail_bytes) {  // rows that come before the page's last token
            num_open = (int)smaller(item.num_rows, larger(0, (at.index + 1) * pages.page_size - 1 - position));
            if (num_open) attend_open(a, tile, pages, batch, item, at, num_open, kv_head, group);
            if (num_open == item.num_rows) continue;
        }
        int tokens = at.tokens(pages), high = (int)smaller(tokens, item.end - at.base);
        int low = at.base < pages.sinks ? 0 : (int)larger(0, first - at.base);
        decode_block(pages, pages.sides[0], table[at.index], kv_head, at.slot, low, high, tile.keys);
        decode_block(pages, pages.sides[1], table[at.index], kv_head, at.slot, low, high, tile.values);
        attend_rows(tile, pages, batch, item, at.base, tokens, num_open, item.num_rows, group);
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

// Rows that were split over the sequence.
static void merge_partials(Team team, const Attention& a, const Pages& pages, const Work& work) {
    int dim = pages.head_dim;
    team.share(a.num_heads, kMergeGrain, [&](int begin, int end, int rank) {
        for (int head = begin; head < end; head++) {
            for (int first = 0; first < work.num_items;) {
                const Item& item = work.items[first];
                int last = first + 1;
                while (last < work.num_items && work.items[last].row == item.row) last++;
                if (item.partial >= 0) {
                    State total = {work.scratch + rank * work.scratch_floats, kNone, 0.0f};
                    for (int i = first; i < last; i++) {
                        int64_t at = (int64_t)work.items[i].partial * a.num_heads + head;
                        float* partial = work.partials + at * (dim + 2);
                        merge(total, {partial, partial[dim], partial[dim + 1]}, dim);
                    }
                    finish(total, a.out + ((int64_t)item.row * a.num_heads + head) * dim, dim);
                }
                first = last;
            }
        }
    });
}

static void attend(Team team, const Attention& a, const Pages& pages, const Batch& batch, const Work& work) {
    int total = work.num_items * pages.num_kv_heads;
    team.share(total, 1, [&](int begin, int end, int rank) {
        for (int taken = begin; taken < end; taken++) {
            int reversed = total - 1 - taken;  // a chunk's last rows see most, and should not come last
            const Item& item = work.items[reversed / pages.num_kv_heads];
            float* scratch = work.scratch + rank * work.scratch_floats;
            attend_item(a, pages, batch, work, item, reversed % pages.num_kv_heads, scratch);
        }
    });
    if (work.num_partials) merge_partials(team, a, pages, work);
}

// With tails, these take the batch's open rows at the end: `a.query` is then what rotate_append has turned.
static void attention(Team team, const Attention& a, const Pages& pages, const Batch& batch, uint8_t* workspace) {
    Arena arena = {workspace, 0};
    Work work = take_items(arena, a, pages, batch, team);
    take_scratch(arena, a, pages, team, work);
    list_items(batch, pages, a, team.size, work.items, nullptr);
    attend(team, a, pages, batch, work);
    if (pages.tail_bytes) write_tails(team, a.query, a.query_stride, pages, batch, a.num_heads);
}

static int64_t attention_bytes(const Attention& a, const Pages& pages, const Batch& batch, int threads) {
    Arena arena = {nullptr, 0};
    Team team = {nullptr, threads};
    Work work = take_items(arena, a, pages, batch, team);
    take_scratch(arena, a, pages, team, work);
    return arena.used;
}

}  // namespace pf::PF_ISA
