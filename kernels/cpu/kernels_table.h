// What each kernels_*.cpp puts into its table.
#pragma once
#include "kernels.h"
#include "step.h"

#define PF_TABLE                                                                                                    \
    {pf::PF_ISA::rms_norm,  pf::PF_ISA::silu_mul,        pf::PF_ISA::linear, pf::PF_ISA::linear_bytes,               \
     pf::PF_ISA::unpack,    pf::PF_ISA::rotate_append,   pf::PF_ISA::attention, pf::PF_ISA::attention_bytes,         \
     pf::PF_ISA::step,      pf::PF_ISA::step_bytes}
