// Softmax attention of query vectors over blocks of 16 keys and values, and the decoding of blocks from pages.
//
// Keys and values are decoded to fp32, and met by one query vector after the other, so a vector's result depends on the
// tokens that it sees and on nothing else that shares its tile, chunk or batch.
#pragma once
#include "abi.h"
#include "team.h"
#include "vec.h"

namespace pf::PF_ISA {

constexpr int kBlock = 16;
constexpr float kNone = -__builtin_inff();

// Running softmax of one query vector: out = accumulator / sum, all relative to e^largest.
struct State {
    float* accumulator;  // [head_dim]
    float largest;
    float sum;
};

// Tokens low to high of the 16 from `slot` on, as numbers, to the same rows of `out` [16, dim].
static inline void decode_block(const Pages& pages, int64_t page, int side, int head, int slot, int low, int high,
                                float* out) {
    int dim = pages.head_dim, count = high - low;
    int64_t vector = ((int64_t)(side * pages.num_kv_heads + head)) * pages.page_size + slot + low;
    const uint8_t* payload = pages.payload + page * pages.page_bytes;
    out += low * dim;
    if (pages.format == INT8) {
        const int8_t* from = (const int8_t*)payload + vector * dim;
        const uint16_t* scales = (const uint16_t*)(pages.scales + page * pages.page_bytes) + vector;
        for (int t = 0; t < count; t++) {
            F16 scale = set16(float_of_half(scales[t]));
            for (int i = 0; i < dim; i += 16) store16(out + t * dim + i, mul16(load16_int8(from + t * dim + i), scale));
        }
    } else if (pages.format == BF16) {
        const uint16_t* from = (const uint16_t*)payload + vector * dim;
        for (int i = 0; i < count * dim; i += 16) store16(out + i, load16_bf16(from + i));
    } else {
        memcpy(out, (const float*)payload + vector * dim, (size_t)count * dim * sizeof(float));
    }
}

// Inlined always: GCC drops calls of a function that does nothing but prefetch.
static PF_INLINE void prefetch_block(const Pages& pages, int64_t page, int side, int head, int slot) {
    int bytes = pages.head_dim * (pages.format == INT8 ? 1 : pages.format == BF16 ? 2 : 4);
    int64_t vector = ((int64_t)(side * pages.num_kv_heads + head)) * pages.page_size + slot;
    const uint8_t* from = pages.payload + page * pages.page_bytes + vector * bytes;
    for (int i = 0; i < kBlock * bytes; i += 64) __builtin_prefetch(from + i);
    if (pages.format == INT8) __builtin_prefetch(pages.scales + page * pages.page_bytes + 2 * vector);
}

// accumulator += sum over tokens of weight[t] values[t], for Vectors vectors and 16 * Lanes of their numbers.
template <int Vectors, int Lanes>
static inline void weigh(State* states, const float (*weights)[kBlock], const float* values, int low, int high, int dim,
                         int i) {
    F16 sums[Vectors][Lanes];
    for (int v = 0; v < Vectors; v++)
        for (int n = 0; n < Lanes; n++) sums[v][n] = load16(states[v].accumulator + i + 16 * n);
    for (int t = low; t < high; t++) {
        F16 value[Lanes];
        for (int n = 0; n < Lanes; n++) value[n] = load16(values + t * dim + i + 16 * n);
        for (int v = 0; v < Vectors; v++) {
            F16 weight = set16(weights[v][t]);
            for (int n = 0; n < Lanes; n++) sums[v][n] = fma16(weight, value[n], sums[v][n]);
        }
    }
    for (int v = 0; v < Vectors; v++)
        for (int n = 0; n < Lanes; n++) store16(states[v].accumulator + i + 16 * n, sums[v][n]);
}

// One block, of whose tokens those from low to high are seen, for several vectors at once.
template <int Vectors>
static inline void attend_vectors(State* states, const float* queries, const float* keys, const float* values, int low,
                                  int high, int dim) {
    float weights[Vectors][kBlock];
    uint32_t seen = ((1u << high) - 1u) & ~((1u << low) - 1u);
    for (int v = 0; v < Vectors; v++) {
        State& state = states[v];
        F16 scores = keep16(products16(queries + v * dim, keys, dim), seen, set16(kNone));
        float largest = max_of16(scores);
        if (largest > state.largest) {
            float factor = exp1(state.largest - largest);
            for (int i = 0; i < dim; i += 16)
                store16(state.accumulator + i, mul16(load16(state.accumulator + i), set16(factor)));
            state.sum *= factor;
            state.largest = largest;
        }
        F16 weight = keep16(exp16(sub16(scores, set16(state.largest))), seen, zero16());
        state.sum += sum16(weight);
        store16(weights[v], weight);
    }
    int i = 0;
    for (; i + 64 <= dim; i += 64) weigh<Vectors, 4>(states, weights, values, low, high, dim, i);
    for (; i < dim; i += 16) weigh<Vectors, 1>(states, weights, values, low, high, dim, i);
}

static inline void attend_block(State* states, int count, const float* queries, const float* keys, const float* values,
                                int low, int high, int dim) {
    int v = 0;
    for (; v + 4 <= count; v += 4) attend_vectors<4>(states + v, queries + v * dim, keys, values, low, high, dim);
    if (count - v == 3) attend_vectors<3>(states + v, queries + v * dim, keys, values, low, high, dim);
    if (count - v == 2) attend_vectors<2>(states + v, queries + v * dim, keys, values, low, high, dim);
    if (count - v == 1) attend_vectors<1>(states + v, queries + v * dim, keys, values, low, high, dim);
}

static inline void reset(State& state, int dim) {
    memset(state.accumulator, 0, (size_t)dim * sizeof(float));
    state.largest = kNone;
    state.sum = 0.0f;
}

// total += part; a part that has seen nothing changes nothing.
static inline void merge(State& total, const State& part, int dim) {
    if (part.sum == 0.0f) return;
    if (total.sum == 0.0f) {
        memcpy(total.accumulator, part.accumulator, (size_t)dim * sizeof(float));
        total.largest = part.largest;
        total.sum = part.sum;
        return;
    }
    float largest = part.largest > total.largest ? part.largest : total.largest;
    float of_total = exp1(total.largest - largest), of_part = exp1(part.largest - largest);
    for (int i = 0; i < dim; i += 16) {
        F16 scaled = mul16(load16(total.accumulator + i), set16(of_total));
        store16(total.accumulator + i, fma16(load16(part.accumulator + i), set16(of_part), scaled));
    }
    total.sum = total.sum * of_total + part.sum * of_part;
    total.largest = largest;
}

static inline void finish(const State& total, float* out, int dim) {
    F16 inverse = set16(1.0f / total.sum);
    for (int i = 0; i < dim; i += 16) store16(out + i, mul16(load16(total.accumulator + i), inverse));
}

}  // namespace pf::PF_ISA
