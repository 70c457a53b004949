// The kernels for AVX2 with FMA and F16C; setup.py compiles this file with the flags.
#if defined(__x86_64__)
#define PF_AVX2
#define PF_ISA avx2
#include "kernels_table.h"

const pf::Kernels pf::kAvx2Kernels = PF_TABLE;
#endif
