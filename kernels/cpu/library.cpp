// The C ABI: picks the instruction set and runs a kernel on a crew of threads.
#include "crew.h"
#include "kernels.h"

namespace {

// Raised whenever a structure or a function's arguments change.
constexpr int32_t kAbiVersion = 3;

const pf::Kernels& kernels(int32_t isa) {
#if defined(__x86_64__)
    if (isa == pf::AVX512) return pf::kAvx512Kernels;
    if (isa == pf::AVX2) return pf::kAvx2Kernels;
#endif
    (void)isa;
    return pf::kPortableKernels;
}

template <class Call>
void on_crew(int32_t threads, Call call) {
    pf::Hired hired(threads);
    call(hired.team());
}

}  // namespace

#define PF_EXPORT extern "C" __attribute__((visibility("default")))

PF_EXPORT int32_t pf_abi_version() { return kAbiVersion; }

PF_EXPORT int32_t pf_best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
    if (has_avx2 && has_avx512) return pf::AVX512;
    if (has_avx2) return pf::AVX2;
#endif
    return pf::PORTABLE;
}

PF_EXPORT void pf_rms_norm(int32_t isa, int32_t threads, const float* x, float* residual, const float* weight,
                           float* y, int32_t rows, int32_t columns, float eps) {
    on_crew(threads, [=](pf::Team team) { kernels(isa).rms_norm(team, x, residual, weight, y, rows, columns, eps); });
}

PF_EXPORT void pf_silu_mul(int32_t isa, int32_t threads, const float* gate_up, float* y, int32_t rows,
                           int32_t columns) {
    on_crew(threads, [=](pf::Team team) { kernels(isa).silu_mul(team, gate_up, y, rows, columns); });
}

PF_EXPORT int64_t pf_linear_bytes(int32_t isa, int32_t, const pf::Matrix* w, int32_t rows) {
    return kernels(isa).linear_bytes(*w, rows);
}

PF_EXPORT void pf_linear(int32_t isa, int32_t threads, const pf::Matrix* w, int32_t rows, const float* x, float* y,
                         uint8_t* workspace) {
    on_crew(threads, [=](pf::Team team) { kernels(isa).linear(team, *w, x, y, rows, workspace); });
}

PF_EXPORT void pf_unpack(int32_t isa, int32_t threads, const pf::Matrix* w, const int32_t* row_ids, float* y,
                         int32_t rows) {
    on_crew(threads, [=](pf::Team team) { kernels(isa).unpack(team, *w, row_ids, y, rows); });
}

PF_EXPORT void pf_append(int32_t isa, int32_t threads, float* qkv, const pf::Rotary* rotary, const pf::Pages* pages,
                         const pf::Batch* batch, int32_t num_heads) {
    on_crew(threads, [=](pf::Team team) { kernels(isa).append(team, qkv, *rotary, *pages, *batch, num_heads); });
}

PF_EXPORT int64_t pf_attention_bytes(int32_t isa, int32_t threads, const pf::Attention* attention,
                                     const pf::Pages* pages, const pf::Batch* batch) {
    return kernels(isa).attention_bytes(*attention, *pages, *batch, threads);
}

PF_EXPORT void pf_attention(int32_t isa, int32_t threads, const pf::Attention* attention, const pf::Pages* pages,
                            const pf::Batch* batch, uint8_t* workspace) {
    on_crew(threads, [=](pf::Team team) { kernels(isa).attention(team, *attention, *pages, *batch, workspace); });
}

PF_EXPORT int64_t pf_step_bytes(int32_t isa, int32_t threads, const pf::Model* model, const pf::Pool* pool,
                                const pf::Batch* batch) {
    return kernels(isa).step_bytes(*model, *pool, *batch, threads);
}

PF_EXPORT void pf_step(int32_t isa, int32_t threads, const pf::Model* model, const pf::Pool* pool,
                       const pf::Batch* batch, const pf::Tokens* tokens, uint8_t* workspace) {
    on_crew(threads, [=](pf::Team team) { kernels(isa).step(team, *model, *pool, *batch, *tokens, workspace); });
}
