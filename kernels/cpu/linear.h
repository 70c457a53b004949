// y = x W^T + b with W in groups of 32 quantised weights (see Matrix) and x quantised in the same groups.
//
// For each group g of a row:  y += (sum_k q_x q_w) s_x d_w + m_w s_x sum_k q_x,  the sums over k exact in int32, those
// over g in fp32 in the groups' order. A lane holds one output from first to last group, so bits do not depend on the
// blocking.
#pragma once
#include "abi.h"
#include "elementwise.h"

namespace pf::PF_ISA {

constexpr int64_t kRowBlock = 48;  // rows of x that meet the same weights

template <int Count>
struct RowCount {
    static constexpr int kCount = Count;
};

static inline int64_t block_bytes(int32_t kind) { return kind == Q4 ? 64 + 256 : 32 + 512; }

struct Q4Group {
    static constexpr int64_t kBytes = 64 + 256;

    template <int Rows, int Tiles>
    static inline void multiply(I16 (*sums)[Tiles], const uint8_t* const* blocks, const int8_t* x, int64_t stride) {
        for (int c = 0; c < 4; c++) {
            W64 low[Tiles], high[Tiles];
            for (int t = 0; t < Tiles; t++) {
                low[t] = low_nibbles(blocks[t] + 64 + 64 * c);
                high[t] = high_nibbles(blocks[t] + 64 + 64 * c);
            }
            for (int r = 0; r < Rows; r++) {
                auto first = broadcast4(x + r * stride + 4 * c), second = broadcast4(x + r * stride + 16 + 4 * c);
                for (int t = 0; t < Tiles; t++)
                    sums[r][t] = dot_q4(dot_q4(sums[r][t], low[t], first), high[t], second);
            }
        }
    }
    static inline int32_t start(int32_t) { return 0; }
    static inline F16 add(F16 y, F16 sum, const uint8_t* block, float scale, float offset) {
        F16 d = load16_half((const uint16_t*)block), m = load16_half((const uint16_t*)block + 16);
        return fma16(mul16(sum, set16(scale)), d, fma16(m, set16(offset), y));
    }
};

struct Q8Group {
    static constexpr int64_t kBytes = 32 + 512;

    template <int Rows, int Tiles>
    static inline void multiply(I16 (*sums)[Tiles], const uint8_t* const* blocks, const int8_t* x, int64_t stride) {
        for (int c = 0; c < 8; c++) {
            W64 w[Tiles];
            for (int t = 0; t < Tiles; t++) w[t] = load_q8(blocks[t] + 32 + 64 * c);
            for (int r = 0; r < Rows; r++) {
                auto values = broadcast4(x + r * stride + 4 * c);
                for (int t = 0; t < Tiles; t++) sums[r][t] = dot_q8(sums[r][t], w[t], values);
            }
        }
    }
    static inline int32_t start(int32_t sum_of_x) { return q8_start(sum_of_x); }
    static inline F16 add(F16 y, F16 sum, const uint8_t* block, float scale, float) {
        return fma16(mul16(sum, set16(scale)), load16_half((const uint16_t*)block), y);
    }
};

// Where results go; `adds` to what is there.
struct Output {
    float* y;
    int64_t stride;
    bool adds;
};

static inline void put(const Matrix& w, F16 sums, int64_t column, const Output& out, int64_t row) {
    float* to = out.y + row * out.stride + column;
    if (column + 16 <= w.rows) {
        F16 y = w.bias ? add16(sums, load16(w.bias + column)) : sums;
        store16(to, out.adds ? add16(load16(to), y) : y);
        return;
    }
    float lanes[16];
    store16(lanes, sums);
    for (int64_t i = 0; column + i < w.rows; i++) {
        float y = w.bias ? lanes[i] + w.bias[column + i] : lanes[i];
        to[i] = out.adds ? to[i] + y : y;
    }
}

// Rows of x times Tiles times 16 rows of W; the first row goes to the output's first.
template <class Group, int Rows, int Tiles>
static void multiply_tile(const Matrix& w, const Quantised& x, int64_t row, int64_t tile, const Output& out) {
    int groups = w.columns / 32;
    F16 totals[Rows][Tiles];
    for (int r = 0; r < Rows; r++)
        for (int t = 0; t < Tiles; t++) totals[r][t] = zero16();
    const uint8_t* blocks[Tiles];
    for (int t = 0; t < Tiles; t++) blocks[t] = w.blocks + (tile + t) * groups * Group::kBytes;
    for (int g = 0; g < groups; g++) {
        const int64_t at = row * groups + g;
        I16 sums[Rows][Tiles];
        for (int r = 0; r < Rows; r++)
            for (int t = 0; t < Tiles; t++) sums[r][t] = iset16(Group::start(x.sums[at + r * groups]));
        Group::template multiply<Rows, Tiles>(sums, blocks, x.values + at * 32, w.columns);
        for (int r = 0; r < Rows; r++)
            for (int t = 0; t < Tiles; t++)
                totals[r][t] = Group::add(totals[r][t], float16(sums[r][t]), blocks[t], x.scales[at + r * groups],
                                          x.offsets[at + r * groups]);
        for (int t = 0; t < Tiles; t++) {
            if (Rows <= 2)  // few rows wait for memory: ask ahead
                for (int line = 0; line < Group::kBytes; line += 64) __builtin_prefetch(blocks[t] + 2048 + line);
            blocks[t] += Group::kBytes;
        }
    }
    for (int t = 0; t < Tiles; t++)
        for (int r = 0; r < Rows; r++) put(w, totals[r][t], (tile + t) * 16, out, r);
}

template <class Group, int Tiles>
static void multiply_rows(const Matrix& w, const Quantised& x, int64_t row, int64_t end, int64_t tile, Output out) {
    auto multiply = [&](auto rows) {
        multiply_tile<Group, decltype(rows)::kCount, Tiles>(w, x, row, tile, out);
        row += decltype(rows)::kCount;
        out.y += decltype(rows)::kCount * out.stride;
    };
    while (row + kTileRows <= end) multiply(RowCount<kTileRows>());
    if constexpr (kTileRows > 4)
        if (row + 4 <= end) multiply(RowCount<4>());
    if constexpr (kTileRows > 2)
        if (row + 2 <= end) multiply(RowCount<2>());
    if (row < end) multiply(RowCount<1>());
}

// Rows of x from `row` to `end` times kTiles tiles of W, or what it has left; to the output's first rows.
static void multiply_tiles(const Matrix& w, const Quantised& x, int64_t row, int64_t end, int64_t tile,
                           const Output& out) {
    bool whole = (tile + kTiles) * 16 < w.rows + 16;
    if (w.kind == Q4 && whole) multiply_rows<Q4Group, kTiles>(w, x, row, end, tile, out);
    if (w.kind == Q4 && !whole) multiply_rows<Q4Group, 1>(w, x, row, end, tile, out);
    if (w.kind == Q8 && whole) multiply_rows<Q8Group, kTiles>(w, x, row, end, tile, out);
    if (w.kind == Q8 && !whole) multiply_rows<Q8Group, 1>(w, x, row, end, tile, out);
}

static inline int64_t steps_of(const Matrix& w) { return (w.rows + kTiles * 16 - 1) / (kTiles * 16); }

// Matrices whose results lie side by side.
static void multiply_parts(Team team, const Matrix* parts, int num_parts, const Quantised& x, int64_t rows,
                           const Output& out) {
    int64_t row_blocks = (rows + kRowBlock - 1) / kRowBlock, steps = 0;
    for (int part = 0; part < num_parts; part++) steps += steps_of(parts[part]);
    // Weights stay in the nearest cache while the rows of a block pass.
    team.share(steps * row_blocks, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t item = begin; item < end; item++) {
            int64_t step = item / row_blocks, row = item % row_blocks * kRowBlock;
            Output to = {out.y + row * out.stride, out.stride, out.adds};
            const Matrix* w = parts;
            for (; step >= steps_of(*w); w++) {
                step -= steps_of(*w);
                to.y += w->rows;
            }
            multiply_tiles(*w, x, row, smaller(rows, row + kRowBlock), step * kTiles, to);
        }
    });
}

static void multiply(Team team, const Matrix& w, const Quantised& x, int64_t rows, float* y) {
    multiply_parts(team, &w, 1, x, rows, {y, w.rows, false});
}

static void project(Team team, const Projection& w, const Quantised& x, int64_t rows, float* y) {
    multiply_parts(team, w.parts, w.num_parts, x, rows, {y, w.num_rows, false});
}

static void project_onto(Team team, const Projection& w, const Quantised& x, int64_t rows, float* residual) {
    multiply_parts(team, w.parts, w.num_parts, x, rows, {residual, w.num_rows, true});
}

// Rows `first` to `first + num_rows` of a projection, which lie in one of its parts; 16 divides `first`.
static Matrix rows_of(const Projection& w, int64_t first, int64_t num_rows) {
    const Matrix* part = w.parts;
    for (; first >= part->rows; part++) first -= part->rows;
    Matrix rows = *part;
    rows.blocks += first / 16 * (part->columns / 32) * block_bytes(part->kind);
    if (part->bias) rows.bias += first;
    rows.rows = (int32_t)num_rows;
    return rows;
}

// SiLU(x G^T) (x U^T) of the rows [G | U] of a projection, quantised.
static void project_gated(Team team, const Projection& w, const Quantised& x, int64_t rows, const Quantised& to) {
    int64_t inner = w.num_rows / 2, groups = inner / 32, row_blocks = (rows + kRowBlock - 1) / kRowBlock;
    team.share(groups * row_blocks, 1, [&](int64_t begin, int64_t end, int) {
        float gate_up[kRowBlock * 64], gated[32];
        for (int64_t item = begin; item < end; item++) {
            int64_t group = item / row_blocks, row = item % row_blocks * kRowBlock;
            int64_t until = smaller(rows, row + kRowBlock);
            Matrix gate = rows_of(w, group * 32, 32), up = rows_of(w, inner + group * 32, 32);
            for (int64_t tile = 0; tile < 2; tile += kTiles) {
                multiply_tiles(gate, x, row, until, tile, {gate_up, 64, false});
                multiply_tiles(up, x, row, until, tile, {gate_up + 32, 64, false});
            }
            for (int64_t r = row; r < until; r++) {
                const float* from = gate_up + (r - row) * 64;
                for (int i = 0; i < 32; i += 16)
                    store16(gated + i, silu_mul16(load16(from + i), load16(from + 32 + i)));
                quantise_group(gated, to, r * groups + group);
            }
        }
    });
}

// Row `row` of W as numbers.
static void unpack_row(const Matrix& w, int64_t row, float* out) {
    int64_t groups = w.columns / 32, lane = row % 16;
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t* block = w.blocks + (row / 16 * groups + g) * block_bytes(w.kind);
        float d = float_of_half(((const uint16_t*)block)[lane]);
        if (w.kind == Q8) {
            for (int k = 0; k < 32; k++)
                out[g * 32 + k] = (float)(block[32 + k / 4 * 64 + lane * 4 + k % 4] - 128) * d;
            continue;
        }
        float m = float_of_half(((const uint16_t*)block)[16 + lane]);
        for (int k = 0; k < 16; k++) {
            uint8_t byte = block[64 + k / 4 * 64 + lane * 4 + k % 4];
            out[g * 32 + k] = (float)(byte & 15) * d + m;
            out[g * 32 + 16 + k] = (float)(byte >> 4) * d + m;
        }
    }
}

static void unpack(Team team, const Matrix& w, const int32_t* row_ids, float* y, int rows) {
    team.share(rows, kRowGrain, [=, &w](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; r++) unpack_row(w, row_ids[r], y + r * w.columns);
    });
}

static Quantised take_quantised(Arena& arena, int64_t rows, int64_t columns) {
    int64_t groups = rows * columns / 32;
    return {arena.take<int8_t>(rows * columns), arena.take<float>(groups), arena.take<int32_t>(groups),
            arena.take<float>(groups)};
}

static void linear(Team team, const Matrix& w, const float* x, float* y, int rows, uint8_t* workspace) {
    Arena arena = {workspace, 0};
    Quantised input = take_quantised(arena, rows, w.columns);
    quantise(team, x, input, rows, w.columns);
    multiply(team, w, input, rows, y);
}

static int64_t linear_bytes(const Matrix& w, int rows) {
    Arena arena = {nullptr, 0};
    take_quantised(arena, rows, w.columns);
    return arena.used;
}

}  // namespace pf::PF_ISA
