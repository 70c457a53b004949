// The forward pass of a Llama-family decoder in one call: embeddings to logits over paged keys and values.
#pragma once
#include "append.h"
#include "attention.h"
#include "likeliest.h"
#include "linear.h"

namespace pf::PF_ISA {

struct StepBuffers {
    float* residual;  // [rows, hidden]
    float* normed;    // [rows, hidden]
    float* qkv;       // [rows, (H + 2 Hk) D]; queries and keys are turned in place
    float* attended;  // [rows, H D]
    Quantised input;  // [rows, hidden or H D]
    Quantised gated;  // [rows, inner]
    Work* groups;     // [groups]: the items of each
    Work work;        // for all of them: scratch, and most partials
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
    Arena arena = {workspace, 0};
    StepBuffers b;
    b.residual = arena.take<float>(rows * hidden);
    b.normed = arena.take<float>(rows * hidden);
    b.qkv = arena.take<float>(rows * qkv);
    b.attended = arena.take<float>(rows * attended);
    b.input = take_quantised(arena, rows, larger(hidden, attended));
    b.gated = take_quantised(arena, rows, inner);
    b.groups = arena.take<Work>(pool.num_groups);
    b.work = {};
    Attention attention = attention_of(m, b, pages);
    for (int g = 0; g < pool.num_groups; g++) {
        const Pages& group = pool.layers[pool.first_layers[g]];
        Work work = take_items(arena, attention, group, batch, team);
        b.work.num_partials = (int32_t)larger(b.work.num_partials, work.num_partials);
        if (!workspace) continue;
        list_items(batch, group, attention, team.size, work.items, nullptr);
        b.groups[g] = work;
    }
    take_scratch(arena, attention, pages, team, b.work);
    b.used = arena.used;
    return b;
}

static int64_t step_bytes(const Model& m, const Pool& pool, const Batch& batch, int threads) {
    return step_buffers(m, pool, batch, {nullptr, threads}, nullptr).used;
}

static void norm_rows(Team team, const StepBuffers& b, const float* weight, const Model& m, int64_t rows) {
    int64_t hidden = m.hidden_size;
    team.share(rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; r++) {
            rms_norm_row(b.residual + r * hidden, weight, b.normed + r * hidden, (int)hidden, m.eps);
            quantise_row(b.normed + r * hidden, b.input, r, (int)hidden);
        }
    });
}

static void run_layer(Team team, const Model& m, const Layer& layer, const Pages& pages, const Batch& batch,
                      const StepBuffers& b, const Work& work) {
    int64_t rows = batch.num_rows;
    norm_rows(team, b, layer.attention_norm, m, rows);
    project(team, layer.qkv, b.input, rows, b.qkv);
    rotate_append(team, b.qkv, {m.cos, m.sin, layer.q_norm, layer.k_norm, m.eps, 0}, pages, batch, m.num_heads);
    Attention attention = attention_of(m, b, pages);
    attend(team, attention, pages, batch, work);
    if (pages.tail_bytes) write_tails(team, b.qkv, attention.query_stride, pages, batch, m.num_heads);
    quantise(team, b.attended, b.input, rows, m.num_heads * pages.head_dim);
    project_onto(team, layer.output, b.input, rows, b.residual);
    norm_rows(team, b, layer.mlp_norm, m, rows);
    project_gated(team, layer.gate_up, b.input, rows, b.gated);
    project_onto(team, layer.down, b.gated, rows, b.residual);
}

// Stores the batch's keys and values; logits of the sampled rows, and the likeliest token of each.
static void step(Team team, const Model& m, const Pool& pool, const Batch& batch, const Tokens& tokens,
                 uint8_t* workspace) {
    StepBuffers b = step_buffers(m, pool, batch, team, workspace);
    int64_t hidden = m.hidden_size;
    unpack(team, m.embedding, tokens.ids, b.residual, batch.num_rows);
    for (int i = 0; i < m.num_layers; i++) {
        Work work = b.groups[pool.layers[i].group];
        work.partials = b.work.partials;
        work.scratch = b.work.scratch;
        work.scratch_floats = b.work.scratch_floats;
        run_layer(team, m, m.layers[i], pool.layers[i], batch, b, work);
    }
    team.share(tokens.num_sampled, kRowGrain, [&](int64_t begin, int64_t end, int) {
        for (int64_t s = begin; s < end; s++) {
            const float* residual = b.residual + tokens.sampled_rows[s] * hidden;
            rms_norm_row(residual, m.norm, b.normed + s * hidden, (int)hidden, m.eps);
            quantise_row(b.normed + s * hidden, b.input, s, (int)hidden);
        }
    });
    multiply(team, m.head, b.input, tokens.num_sampled, tokens.logits);
    find_likeliest(team, tokens.logits, tokens.num_sampled, m.head.rows, tokens.likeliest);
}

}  // namespace pf::PF_ISA
