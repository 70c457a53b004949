// Attention over paged keys and values; see kernels/paged_attention.py for the formula.
//
// Softmax runs in blocks of 16 tokens within spans of 256, counted from position 0, and the spans are merged in order:
// whether a row comes alone or in a chunk, and whether its spans are shared among threads or not, its bits are the
// same.
#pragma once
#include "decode.h"
#include "work.h"

namespace pf::PF_ISA {

constexpr int32_t kMergeGrain = 16;  // heads whose partial states are worth another thread

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

// An item of one KV head.
struct Task {
    const Attention& a;
    const Pages& pages;
    const Batch& batch;
    const Item& item;
    const int32_t* table;
    int kv_head;
    int group;     // query heads
    int position;  // of the first row
    int first;     // that it sees behind the sinks

    // Positions `begin` to `end` of the block at `base`, from pages before `open` and from the open page behind it.
    void fill(const Tile& tile, int base, int begin, int end, int open) const {
        for (int side = 0; side < 2; side++) {
            float* out = (side ? tile.values : tile.keys) + (begin - base) * pages.head_dim;
            int at = begin;
            for (int stop = (int)smaller(end, open); at < stop;) {
                int slot = at % pages.page_size, count = (int)smaller(pages.page_size - slot, stop - at);
                decode_rows(pages, pages.sides[side], table[at / pages.page_size], kv_head, slot, count, out);
                prefetch(side, at + kBlock, count);
                out += count * pages.head_dim;
                at += count;
            }
            if (at == end) continue;
            OpenTokens tokens =
                open_tokens(pages, batch, a.query, a.query_stride, a.num_heads, item.seq, side, kv_head);
            for (; at < end; at++, out += pages.head_dim)
                for (int i = 0; i < pages.head_dim; i += 16) store16(out + i, tokens.at(at).at(i));
        }
    }

    // Memory takes longer than a block does.
    PF_INLINE void prefetch(int side, int at, int count) const {
        if (at < first || at >= item.end) return;  // behind the item, the table may end
        int slot = at % pages.page_size;
        count = (int)smaller(count, smaller(pages.page_size - slot, item.end - at));
        prefetch_rows(pages, pages.sides[side], table[at / pages.page_size], kv_head, slot, count);
    }

    // Rows `begin` to `end` of the item meet the block that lies in the tile.
    void attend(const Tile& tile, int base, int begin, int end) const {
        constexpr uint64_t whole = ~(uint64_t)0 >> (64 - kBlock);
        int dim = pages.head_dim, whole_from = 0, whole_to = 0;  // rows that see the whole block
        for (int r = begin; r < end; r++) {
            uint64_t seen = seen_in(pages, base, position + r);
            if (seen == whole) {
                if (whole_to == 0) whole_from = r;
                whole_to = r + 1;
            } else if (seen) {
                const float* queries = tile.queries + (int64_t)r * group * dim;
                attend_block(tile.parts + r * group, group, queries, tile.keys, tile.values, seen, dim);
            }
        }
        if (whole_to)
            attend_block(tile.parts + whole_from * group, (whole_to - whole_from) * group,
                         tile.queries + (int64_t)whole_from * group * dim, tile.keys, tile.values, whole, dim);
    }

    void meet_block(const Tile& tile, int base) const {
        int size = pages.page_size;
        for (int r = 0; r < item.num_rows;) {
            int open = pages.tail_bytes ? (position + r + 1) / size * size : item.end, last = item.num_rows;
            int stop = (int)smaller(base + kBlock, item.end);
            if (open < stop) {  // rows that have the page open
                last = (int)smaller(last, open + size - 1 - position);
                stop = (int)smaller(stop, position + last);
            }
            int sinks = (int)smaller(pages.sinks, stop), begin = (int)larger(base, first);
            if (base < sinks && sinks < begin)
                fill(tile, base, base, sinks, open);
            else if (base < sinks)
                begin = base;
            if (begin < stop) fill(tile, base, begin, stop, open);
            attend(tile, base, r, last);
            r = last;
        }
    }
};

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
    int position = batch.positions[item.row], first = first_seen(pages, position);
    const int32_t* table = tables.pages + tables.starts[item.seq];
    Task task = {a, pages, batch, item, table, kv_head, group, position, first};
    int base = item.begin & ~(kBlock - 1), span = base / kSpan;
    for (; base < item.end; base = next_block(pages, first, base)) {
        if (base / kSpan != span) {
            for (int v = 0; v < vectors; v++) {
                merge(tile.totals[v], tile.parts[v], dim);
                reset(tile.parts[v], dim);
            }
            span = base / kSpan;
        }
        task.meet_block(tile, base);
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
