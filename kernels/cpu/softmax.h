// Softmax attention of query vectors over blocks of 16 keys and values.
//
// Keys and values are decoded to fp32, and met by one query vector after the other, so a vector's result depends on the
// tokens that it sees and on nothing else that shares its tile, chunk or batch.
#pragma once
#include "team.h"
#include "vec.h"

namespace pf::PF_ISA {

constexpr int kBlock = 16;  // at most 64: a block's tokens are bits
constexpr float kNone = -__builtin_inff();

// Running softmax of one query vector: out = accumulator / sum, all relative to e^largest.
struct State {
    float* accumulator;  // [head_dim]
    float largest;
    float sum;
};

// accumulator = accumulator factor + sum over tokens of weight[t] values[t], for Vectors vectors and 16 * Lanes of
// their numbers.
template <int Vectors, int Lanes>
static inline void weigh(State* states, const float* factors, const float (*weights)[kBlock], const float* values,
                         int low, int high, int dim, int i) {
    F16 sums[Vectors][Lanes];
    for (int v = 0; v < Vectors; v++)
        for (int n = 0; n < Lanes; n++)
            sums[v][n] = mul16(load16(states[v].accumulator + i + 16 * n), set16(factors[v]));
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

static inline uint32_t lanes_of(uint64_t seen, int t) { return (uint32_t)(seen >> t) & 0xffffu; }

// One block, of whose tokens those in `seen` (a bit each, not none) are seen, for several vectors at once.
template <int Vectors>
static inline void attend_vectors(State* states, const float* queries, const float* keys, const float* values,
                                  uint64_t seen, int dim) {
    int begin = __builtin_ctzll(seen) & ~15, end = 64 - __builtin_clzll(seen);
    float weights[Vectors][kBlock], before[16] = {}, largest[16] = {}, factors[16];
    for (int v = 0; v < Vectors; v++) {
        F16 most = set16(kNone);
        for (int t = begin; t < end; t += 16) {
            F16 scores = products16(queries + v * dim, keys + t * dim, dim);
            scores = keep16(scores, lanes_of(seen, t), set16(kNone));
            store16(weights[v] + t, scores);
            most = max16(most, scores);
        }
        before[v] = states[v].largest;
        largest[v] = max_of16(most);
        if (!(largest[v] > before[v])) largest[v] = before[v];
    }
    store16(factors, exp16(sub16(load16(before), load16(largest))));
    for (int v = 0; v < Vectors; v++) {
        F16 sums = zero16();
        for (int t = begin; t < end; t += 16) {
            F16 weight = exp16(sub16(load16(weights[v] + t), set16(largest[v])));
            weight = keep16(weight, lanes_of(seen, t), zero16());
            store16(weights[v] + t, weight);
            sums = add16(sums, weight);
        }
        states[v].largest = largest[v];
        states[v].sum = states[v].sum * factors[v] + sum16(sums);
    }
    for (uint64_t rest = seen; rest;) {  // mostly one run; two where a window begins in a block of sinks
        int low = __builtin_ctzll(rest), high = ~(rest >> low) ? low + __builtin_ctzll(~(rest >> low)) : 64;
        int i = 0;
        for (; i + 64 <= dim; i += 64) weigh<Vectors, 4>(states, factors, weights, values, low, high, dim, i);
        for (; i < dim; i += 16) weigh<Vectors, 1>(states, factors, weights, values, low, high, dim, i);
        store16(factors, set16(1.0f));
        rest = high < 64 ? rest & ~(uint64_t)0 << high : 0;
    }
}

static inline void attend_block(State* states, int count, const float* queries, const float* keys, const float* values,
                                uint64_t seen, int dim) {
    int v = 0;
    for (; v + 4 <= count; v += 4) attend_vectors<4>(states + v, queries + v * dim, keys, values, seen, dim);
    if (count - v == 3) attend_vectors<3>(states + v, queries + v * dim, keys, values, seen, dim);
    if (count - v == 2) attend_vectors<2>(states + v, queries + v * dim, keys, values, seen, dim);
    if (count - v == 1) attend_vectors<1>(states + v, queries + v * dim, keys, values, seen, dim);
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
