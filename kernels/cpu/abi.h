// The structures that cross the C ABI; kernels/cpu_library.py mirrors them field by field.
// Plain data, no functions: files compiled for different instruction sets share this header.
#pragma once
#include <cstdint>

namespace pf {

enum Isa : int32_t { PORTABLE = 0, AVX2 = 1, AVX512 = 2, NUM_ISAS = 3 };
enum Element : int32_t { FP32 = 0, BF16 = 1, FP16 = 2, FP8_E4M3 = 3, INT8 = 4, INT4 = 5 };
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

// The keys, or the values, of one layer in a pool of pages: pointers into page 0; see core/layout.py.
struct Side {
    uint8_t* payload;   // [Hk, B, D] elements
    uint8_t* scales;    // [Hk, B] fp16, per channel [Hk, D], or null
    uint8_t* zeros;     // as the scales; null where symmetric
    uint8_t* tails;     // [Hk, B, D] fp16 of tail 0, or null
    int64_t row_bytes;  // of one token's elements
    int32_t element;
    int32_t is_per_channel;
};

// One layer's part of the pools, and which tokens before it a query reads: all, or the last `window` and first `sinks`.
struct Pages {
    Side sides[2];       // keys, values
    int64_t page_bytes;  // from one page to the next
    int64_t tail_bytes;  // from one tail to the next; 0: pages are written token by token, and there are no tails
    int32_t page_size;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t group;   // whose page tables are the layer's
    int32_t window;  // 0: none
    int32_t sinks;
};

// Page tables of one cache group, one after the other; -1 where no page is held.
struct Tables {
    const int32_t* starts;  // [num_seqs + 1]
    const int32_t* pages;
};

// A flat batch of sequences: rows row_starts[s] to row_starts[s + 1] are of consecutive positions.
struct Batch {
    const int32_t* positions;   // [num_rows]
    const int32_t* row_starts;  // [num_seqs + 1]
    const Tables* tables;       // of each cache group
    const int32_t* tails;       // [num_seqs], or null
    int32_t num_rows;
    int32_t num_seqs;
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
    const float* query;  // row r's head h at query + r * query_stride + h * head_dim; with tails, then keys and values
    float* out;          // [num_rows, num_heads, head_dim]
    int64_t query_stride;
    int32_t num_heads;
    float scale;
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
    float eps;
    int32_t reserved;
};

// What a step's rows are, and whose logits it gives.
struct Tokens {
    const int32_t* ids;           // [num_rows]
    const int32_t* sampled_rows;  // [num_sampled]
    float* logits;                // [num_sampled, vocabulary]
    int32_t* likeliest;           // [num_sampled]; -1 for a row of which a number is not finite
    int32_t num_sampled;
    int32_t reserved;
};

// The pools of all layers.
struct Pool {
    const Pages* layers;          // [num_layers]
    const int32_t* first_layers;  // [num_groups]: one layer of each cache group
    int32_t num_groups;
    int32_t reserved;
};

// Some layers of one page, which lie in a flat buffer at `offset`, one range after the other.
struct PageCopy {
    uint8_t* page;
    int64_t starts[3];   // in the page, of its elements, scales and zero points
    int64_t lengths[3];  // 0: none
    int64_t offset;
};

// What a copy was found to be.
struct PageCheck {
    uint32_t crc32c;
    int32_t bad_part;   // 1: a scale isn't finite and positive, 2: a zero point isn't finite, 0: neither
    int32_t bad_index;  // which of them
    int32_t bad_bits;   // as it is
};

}  // namespace pf
