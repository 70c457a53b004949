// y = x W^T + b with W in groups of 32 quantised weights (see Matrix) and x quantised in the same groups.
//
// For each group g of a row:  y += (sum_k q_x q_w) s_x d_w + m_w s_x sum_k q_x,  the sums over k exact in int32, those
// over g in fp32 in the groups' order. A lane holds one output from first to last group, so bits do not depend on the
// blocking.
#pragma once
#include "abi.h"
#include "elementwise.h"
#include "team.h"

namespace pf::PF_ISA {

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
    static inline F16 add(F16 y, F16 sum, const uint8_t* block, float scale, int32_t sum_of_x) {
        F16 d = load16_half((const uint16_t*)block), m = load16_half((const uint16_t*)block + 16);
        return fma16(mul16(sum, set16(scale)), d, fma16(m, set16(scale * (float)sum_of_x), y));
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
    static inline F16 add(F16 y, F16 sum, const uint8_t* block, float scale, int32_t) {
        return fma16(mul16(sum, set16(scale)), load16_half((const uint16_t*)block), y);
    }
};

// Rows of x times Tiles times 16 rows of W.
template <class Group, int Rows, int Tiles>
static void multiply_tile(const Matrix& w, const Quantised& x, int64_t row, int64_t tile, float* y, int64_t y_stride) {
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
                                          x.sums[at + r * groups]);
        for (int t = 0; t < Tiles; t++) {
            if (Rows <= 2)  // few rows wait for memory: ask ahead
                for (int line = 0; line < Group::kBytes; line += 64) __builtin_prefetch(blocks[t] + 2048 + line);
            blocks[t] += Group::kBytes;
        }
    }
    for (int t = 0; t < Tiles; t++) {
        int64_t column = (tile + t) * 16, width = smaller(16, w.rows - column);
        for (int r = 0; r < Rows; r++) {
            float lanes[16];
            store16(lanes, totals[r][t]);
            float* to = y + (row + r) * y_stride + column;
            for (int i = 0; i < width; i++) to[i] = w.bias ? lanes[i] + w.bias[column + i] : lanes[i];
        }
    }
}

template <class Group, int Tiles>
static void multiply_rows(const Matrix& w, const Quantised& x, int64_t row, int64_t end, int64_t tile, float* y,
                          int64_t y_stride) {
    for (; row + kTileRows <= end; row += kTileRows)
        multiply_tile<Group, kTileRows, Tiles>(w, x, row, tile, y, y_stride);
    if constexpr (kTileRows > 4) {
        if (row + 4 <= end) {
            multiply_tile<Group, 4, Tiles>(w, x, row, tile, y, y_stride);
            row += 4;
        }
    }
    if constexpr (kTileRows > 2) {
        if (row + 2 <= end) {
            multiply_tile<Group, 2, Tiles>(w, x, row, tile, y, y_stride);
            row += 2;
        }
    }
    if (row < end) multiply_tile<Group, 1, Tiles>(w, x, row, tile, y, y_stride);
}

template <class Group>
static void multiply_matrix(Team team, const Matrix& w, const Quantised& x, int64_t rows, float* y, int64_t y_stride) {
    constexpr int64_t kRowBlock = 48;
    int64_t tiles = (w.rows + 15) / 16, steps = (tiles + kTiles - 1) / kTiles;
    int64_t row_blocks = (rows + kRowBlock - 1) / kRowBlock;
    // Weights stay in the nearest cache while the rows of a block pass.
    for (int64_t item = team.begin(steps * row_blocks); item < team.end(steps * row_blocks); item++) {
        int64_t tile = item / row_blocks * kTiles, row = item % row_blocks * kRowBlock;
        int64_t end = smaller(rows, row + kRowBlock);
        if (tile + kTiles <= tiles)
            multiply_rows<Group, kTiles>(w, x, row, end, tile, y, y_stride);
        else
            multiply_rows<Group, 1>(w, x, row, end, tile, y, y_stride);
    }
}

static void multiply(Team team, const Matrix& w, const Quantised& x, int64_t rows, float* y, int64_t y_stride) {
    if (w.kind == Q4)
        multiply_matrix<Q4Group>(team, w, x, rows, y, y_stride);
    else
        multiply_matrix<Q8Group>(team, w, x, rows, y, y_stride);
}

static void project(Team team, const Projection& w, const Quantised& x, int64_t rows, float* y) {
    int64_t column = 0;
    for (int part = 0; part < w.num_parts; part++) {
        multiply(team, w.parts[part], x, rows, y + column, w.num_rows);
        column += w.parts[part].rows;
    }
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
    for (int64_t r = team.begin(rows); r < team.end(rows); r++) unpack_row(w, row_ids[r], y + r * w.columns);
}

static Quantised take_quantised(Arena& arena, int64_t rows, int64_t columns) {
    int64_t groups = rows * columns / 32;
    return {arena.take<int8_t>(rows * columns), arena.take<float>(groups), arena.take<int32_t>(groups)};
}

static void linear(Team team, const Matrix& w, const float* x, float* y, int rows, uint8_t* workspace) {
    Arena arena = {workspace, 0};
    Quantised input = take_quantised(arena, rows, w.columns);
    for (int64_t r = team.begin(rows); r < team.end(rows); r++) quantise_rows(x, input, r, w.columns);
    team.barrier();
    multiply(team, w, input, rows, y, w.rows);
}

static int64_t linear_bytes(const Matrix& w, int rows) {
    Arena arena = {nullptr, 0};
    take_quantised(arena, rows, w.columns);
    return arena.used;
}

}  // namespace pf::PF_ISA
