// The kernels for AVX-512 (F, BW, DQ, VL) with VNNI; setup.py compiles this file with the flags.
#if defined(__x86_64__)
#define PF_AVX512
#define PF_ISA avx512
#include "kernels_table.h"

const pf::Kernels pf::kAvx512Kernels = PF_TABLE;
#endif
