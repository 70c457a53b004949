// The structures that cross the C ABI; kernels/cpu_library.py mirrors them field by field.
// Plain data, no functions: files compiled for different instruction sets share this header.
#pragma once
#include <cstdint>

namespace pf {

enum Isa : int32_t { PORTABLE = 0, AVX2 = 1, AVX512 = 2, NUM_ISAS = 3 };
enum Format : int32_t { FP32 = 0, BF16 = 1, INT8 = 2 };
enum WeightKind : int32_t { Q4 = 0, Q8 = 1 };

// A matrix [rows, columns] of groups of 32 weights along the columns, packed by kernels/quantised_linear.py:
// [rows / 16][columns / 32][block], where a block holds one group of 16 rows:
//   Q4: fp16 d[16], fp16 m[16], uint8 q[4][16][4]; byte [c][r][j] has weight 4c + j of row r in its low half and
//       weight 16 + 4c + j in its high half; a weight is q d + m
//   Q8: fp16 d[16], uint8 q[8][16][4]; byte [c][r][j] is weight 4c + j of row r plus 128; a weight is (q - 128) d
struct Matrix {
    const uint8_t* blocks;
    const float* bias;  // [rows] or null
    int32_t kind;
    int32_t rows;
    int32_t columns;
    int32_t reserved;
};

// Rows of one projection: matrices whose results lie side by side.
struct Projection {
    Matrix parts[3];
    int32_t num_parts;
    int32_t num_rows;  // of all parts
};

// One layer's part of a pool of pages; see core/layout.py.
struct Pages {
    uint8_t* payload;  // of page 0
    uint8_t* scales;   // of page 0, fp16; unused but for int8
    int64_t page_bytes;
    int32_t format;
    int32_t page_size;
    int32_t num_kv_heads;
    int32_t head_dim;
};

// A flat batch of sequences: rows row_starts[s] to row_starts[s + 1] are of consecutive positions.
struct Batch {
    const int32_t* token_ids;     // [num_rows]
    const int32_t* positions;     // [num_rows]
    const int32_t* row_starts;    // [num_seqs + 1]
    const int32_t* table_starts;  // [num_seqs + 1]
    const int32_t* table;         // page tables, one after the other
    const int32_t* sampled_rows;  // [num_sampled]
    int32_t num_rows;
    int32_t num_seqs;
    int32_t num_sampled;
    int32_t reserved;
};

struct Rotary {
    const float* cos;  // [positions, head_dim / 2]
    const float* sin;
    const float* q_norm;  // [head_dim] or null: RMS norm of each head before the rotation
    const float* k_norm;
    float eps;
    int32_t reserved;
};

struct Attention {
    const float* query;  // row r's head h at query + r * query_stride + h * head_dim
    float* out;          // [num_rows, num_heads, head_dim]
    int64_t query_stride;
    int32_t num_heads;
    int32_t window;  // 0: none
    float scale;
    int32_t reserved;
};

struct Layer {
    const float* attention_norm;
    const float* q_norm;
    const float* k_norm;
    const float* mlp_norm;
    Projection qkv;
    Projection output;
    Projection gate_up;
    Projection down;
};

struct Model {
    const Layer* layers;
    const float* norm;
    const float* cos;
    const float* sin;
    Matrix embedding;
    Matrix head;
    int32_t num_layers;
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t num_heads;
    int32_t window;
    float eps;
};

// The pool of all layers.
struct Pool {
    Pages first;                  // of layer 0
    int64_t payload_layer_bytes;  // from one layer to the next
    int64_t scale_layer_bytes;
};

}  // namespace pf
