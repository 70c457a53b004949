// The kernels of one instruction set as a table; each set's file is compiled with that set's flags.
#pragma once
#include "abi.h"
#include "team.h"

namespace pf {

// Called by one thread, which shares the work out to its team. Those that end in `_bytes` say how large the workspace of
// such a call must be.
struct Kernels {
    void (*rms_norm)(Team, const float* x, float* residual, const float* weight, float* y, int rows, int columns,
                     float eps);
    void (*silu_mul)(Team, const float* gate_up, float* y, int rows, int columns);
    void (*linear)(Team, const Matrix&, const float* x, float* y, int rows, uint8_t* workspace);
    int64_t (*linear_bytes)(const Matrix&, int rows);
    void (*unpack)(Team, const Matrix&, const int32_t* row_ids, float* y, int rows);
    void (*append)(Team, float* qkv, const Rotary&, const Pages&, const Batch&, int num_heads);
    void (*attention)(Team, const Attention&, const Pages&, const Batch&, uint8_t* workspace);
    int64_t (*attention_bytes)(const Attention&, const Pages&, const Batch&, int threads);
    void (*step)(Team, const Model&, const Pool&, const Batch&, const Tokens&, uint8_t* workspace);
    int64_t (*step_bytes)(const Model&, const Pool&, const Batch&, int threads);
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace pf
