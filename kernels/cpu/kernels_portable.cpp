// The kernels for any processor; setup.py compiles this file with the flags.
#define PF_PORTABLE
#define PF_ISA portable
#include "kernels_table.h"

const pf::Kernels pf::kPortableKernels = PF_TABLE;
