// The forward pass of a Llama-family decoder in one call: embeddings to logits over paged keys and values.
#pragma once
#include "append.h"
#include "attention.h"
#include "linear.h"

namespace pf::PF_ISA {

struct StepBuffers {
    float* residual;  // [rows, hidden]
    float* normed;    // [rows, hidden]
    float* qkv;       // [rows, (H + 2 Hk) D]; queries and keys are turned in place
    float* attended;  // [rows, H D]
    float* gate_up;   // [rows, 2 inner]
    float* gated;     // [rows, inner]
    float* added;     // [rows, hidden]: what the residual takes next
    Quantised input;  // [rows, widest]
    Work* groups;       // [groups]: the items of each
    Work work;          // for all of them: scratch, and most partials
    int32_t* counters;  // [layers]: work.next of each
    int64_t used;
};

static inline Attention attention_of(const Model& m, const StepBuffers& b, const Pages& pages) {
    float scale = 1.0f / sqrtf((float)pages.head_dim);
    int64_t stride = (int64_t)(m.num_heads + 2 * pages.num_kv_heads) * pages.head_dim;
    return {b.qkv, b.attended, stride, m.num_heads, scale};
}

static StepBuffers step_buffers(const Model& m, const Pool& pool, const Batch& batch, Team team, uint8_t* workspace) {
    const Pages& pages = pool.layers[0];
    int64_t rows = batch.num_rows, hidden = m.hidden_size, inner = m.intermediate_size;
    int64_t attended = (int64_t)m.num_heads * pages.head_dim;
    int64_t qkv = attended + 2 * (int64_t)pages.num_kv_heads * pages.head_dim;
    int64_t widest = larger(larger(hidden, inner), attended);
    Arena arena = {workspace, 0};
    StepBuffers b;
    b.residual = arena.take<float>(rows * hidden);
    b.normed = arena.take<float>(rows * hidden);
    b.qkv = arena.take<float>(rows * qkv);
    b.attended = arena.take<float>(rows * attended);
    b.gate_up = arena.take<float>(rows * 2 * inner);
    b.gated = arena.take<float>(rows * inner);
    b.added = arena.take<float>(rows * hidden);
    b.input = take_quantised(arena, rows, widest);
    b.counters = arena.take<int32_t>(m.num_layers);
    b.groups = arena.take<Work>(pool.num_groups);
    b.work = {};
    Attention attention = attention_of(m, b, pages);
    for (int g = 0; g < pool.num_groups; g++) {
        const Pages& group = pool.layers[pool.first_layers[g]];
        Work work = take_items(arena, attention, group, batch, team);
        b.work.num_partials = (int32_t)larger(b.work.num_partials, work.num_partials);
        if (!workspace || team.rank) continue;
        list_items(batch, group, attention, team.size, work.items, nullptr);
        b.groups[g] = work;
    }
    take_scratch(arena, attention, pages, team, b.work);
    b.used = arena.used;
    return b;
}

static int64_t step_bytes(const Model& m, const Pool& pool, const Batch& batch, int threads) {
    return step_buffers(m, pool, batch, {0, threads, nullptr, nullptr}, nullptr).used;
}

// residual += added (but before the first layer), then its norm, quantised.
static void norm_rows(Team team, const StepBuffers& b, const float* added, const float* weight, const Model& m,
                      int64_t rows) {
    int64_t hidden = m.hidden_size;
    for (int64_t r = team.begin(rows); r < team.end(rows); r++) {
        if (added) add_row(added + r * hidden, b.residual + r * hidden, (int)hidden);
        rms_norm_row(b.residual + r * hidden, weight, b.normed + r * hidden, (int)hidden, m.eps);
        quantise_rows(b.normed, b.input, r, (int)hidden);
    }
    team.barrier();
}

static void run_layer(Team team, const Model& m, const Layer& layer, const Pages& pages, const Batch& batch,
                      const StepBuffers& b, Work work, const float* added) {
    int64_t rows = batch.num_rows, width = (int64_t)m.num_heads * pages.head_dim;
    norm_rows(team, b, added, layer.attention_norm, m, rows);
    project(team, layer.qkv, b.input, rows, b.qkv);
    team.barrier();
    rotate_append(team, b.qkv, {m.cos, m.sin, layer.q_norm, layer.k_norm, m.eps, 0}, pages, batch, m.num_heads);
    team.barrier();
    Attention attention = attention_of(m, b, pages);
    attend(attention, pages, batch, work);
    team.barrier();
    if (pages.tail_bytes) write_tails(team, b.qkv, attention.query_stride, pages, batch, m.num_heads);
    if (work.num_partials) {
        merge_partials(team, attention, pages, work);
        team.barrier();
    }
    for (int64_t r = team.begin(rows); r < team.end(rows); r++) quantise_rows(b.attended, b.input, r, (int)width);
    team.barrier();
    project(team, layer.output, b.input, rows, b.added);
    team.barrier();
    norm_rows(team, b, b.added, layer.mlp_norm, m, rows);
    project(team, layer.gate_up, b.input, rows, b.gate_up);
    team.barrier();
    int64_t inner = m.intermediate_size;
    for (int64_t r = team.begin(rows); r < team.end(rows); r++) {
        silu_mul_row(b.gate_up + r * 2 * inner, b.gated + r * inner, (int)inner);
        quantise_rows(b.gated, b.input, r, (int)inner);
    }
    team.barrier();
    project(team, layer.down, b.input, rows, b.added);
    team.barrier();
}

// Stores the batch's keys and values; logits of the sampled rows.
static void step(Team team, const Model& m, const Pool& pool, const Batch& batch, const Tokens& tokens,
                 uint8_t* workspace) {
    StepBuffers b = step_buffers(m, pool, batch, team, workspace);
    int64_t rows = batch.num_rows, hidden = m.hidden_size;
    if (team.rank == 0) memset(b.counters, 0, (size_t)m.num_layers * sizeof(int32_t));
    for (int64_t r = team.begin(rows); r < team.end(rows); r++)
        unpack_row(m.embedding, tokens.ids[r], b.residual + r * hidden);
    team.barrier();
    for (int i = 0; i < m.num_layers; i++) {
        Work work = b.groups[pool.layers[i].group];
        work.next = b.counters + i;
        work.partials = b.work.partials;
        work.scratch = b.work.scratch;
        run_layer(team, m, m.layers[i], pool.layers[i], batch, b, work, i ? b.added : nullptr);
    }
    for (int64_t s = team.begin(tokens.num_sampled); s < team.end(tokens.num_sampled); s++) {
        int64_t row = tokens.sampled_rows[s];
        float* sum = b.normed + s * hidden;  // the norms of the layers are no longer needed
        memcpy(sum, b.residual + row * hidden, (size_t)hidden * sizeof(float));
        if (m.num_layers) add_row(b.added + row * hidden, sum, (int)hidden);
        rms_norm_row(sum, m.norm, sum, (int)hidden, m.eps);
        quantise_rows(b.normed, b.input, s, (int)hidden);
    }
    team.barrier();
    multiply(team, m.head, b.input, tokens.num_sampled, tokens.logits, m.head.rows);
}

}  // namespace pf::PF_ISA
