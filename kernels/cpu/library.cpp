// The C ABI: picks the instruction set and runs a kernel on a team of OpenMP threads (or on the caller's alone).
//
// OpenMP rather than a pool of our own: torch uses the same run-time and its threads, so that a step and the sampling
// after it share them instead of two pools contending for the cores. But threads wait for each other in a way of our
// own: a step does so hundreds of times, and OpenMP's barrier spins for milliseconds where a busy machine has taken the
// core of one; ours sleeps after some microseconds.
#include "kernels.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#if defined(_OPENMP)
#include <omp.h>
#endif

using pf::Team;

struct pf::Meeting {
    int32_t arrived;
    int32_t round;  // counts up when all have arrived
    int32_t num_sleepers;
};

namespace {

// Raised whenever a structure or a function's arguments change.
constexpr int32_t kAbiVersion = 2;

const pf::Kernels& kernels(int32_t isa) {
#if defined(__x86_64__)
    if (isa == pf::AVX512) return pf::kAvx512Kernels;
    if (isa == pf::AVX2) return pf::kAvx2Kernels;
#endif
    (void)isa;
    return pf::kPortableKernels;
}

constexpr int kSpins = 2000;  // some tens of microseconds: longer than threads that all run are apart

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

#if defined(__linux__)
void sleep_while(int32_t* word, int32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_sleepers(int32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
void sleep_while(int32_t*, int32_t) { sched_yield(); }
void wake_sleepers(int32_t*) {}
#endif

void wait_for_all(pf::Meeting* meeting, int32_t num_threads) {
    int32_t round = __atomic_load_n(&meeting->round, __ATOMIC_SEQ_CST);
    if (__atomic_add_fetch(&meeting->arrived, 1, __ATOMIC_SEQ_CST) == num_threads) {
        __atomic_store_n(&meeting->arrived, 0, __ATOMIC_SEQ_CST);
        __atomic_store_n(&meeting->round, round + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&meeting->num_sleepers, __ATOMIC_SEQ_CST)) wake_sleepers(&meeting->round);
        return;
    }
    for (int spins = 0; spins < kSpins; spins++) {
        if (__atomic_load_n(&meeting->round, __ATOMIC_SEQ_CST) != round) return;
        pause();
    }
    __atomic_add_fetch(&meeting->num_sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&meeting->round, __ATOMIC_SEQ_CST) == round) sleep_while(&meeting->round, round);
    __atomic_sub_fetch(&meeting->num_sleepers, 1, __ATOMIC_SEQ_CST);
}

template <class Body>
void on_team(int32_t threads, Body body) {
#if defined(_OPENMP)
    if (threads > 1) {
        pf::Meeting meeting = {};
#pragma omp parallel num_threads(threads)
        body(Team{omp_get_thread_num(), omp_get_num_threads(), &meeting, wait_for_all});
        return;
    }
#endif
    (void)threads;
    body(Team{0, 1, nullptr, nullptr});
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
    on_team(threads, [=](Team team) { kernels(isa).rms_norm(team, x, residual, weight, y, rows, columns, eps); });
}

PF_EXPORT void pf_silu_mul(int32_t isa, int32_t threads, const float* gate_up, float* y, int32_t rows,
                           int32_t columns) {
    on_team(threads, [=](Team team) { kernels(isa).silu_mul(team, gate_up, y, rows, columns); });
}

PF_EXPORT int64_t pf_linear_bytes(int32_t isa, int32_t, const pf::Matrix* w, int32_t rows) {
    return kernels(isa).linear_bytes(*w, rows);
}

PF_EXPORT void pf_linear(int32_t isa, int32_t threads, const pf::Matrix* w, int32_t rows, const float* x, float* y,
                         uint8_t* workspace) {
    on_team(threads, [=](Team team) { kernels(isa).linear(team, *w, x, y, rows, workspace); });
}

PF_EXPORT void pf_unpack(int32_t isa, int32_t threads, const pf::Matrix* w, const int32_t* row_ids, float* y,
                         int32_t rows) {
    on_team(threads, [=](Team team) { kernels(isa).unpack(team, *w, row_ids, y, rows); });
}

PF_EXPORT void pf_append(int32_t isa, int32_t threads, float* qkv, const pf::Rotary* rotary, const pf::Pages* pages,
                         const pf::Batch* batch, int32_t num_heads) {
    on_team(threads, [=](Team team) { kernels(isa).append(team, qkv, *rotary, *pages, *batch, num_heads); });
}

PF_EXPORT int64_t pf_attention_bytes(int32_t isa, int32_t threads, const pf::Attention* attention,
                                     const pf::Pages* pages, const pf::Batch* batch) {
    return kernels(isa).attention_bytes(*attention, *pages, *batch, threads);
}

PF_EXPORT void pf_attention(int32_t isa, int32_t threads, const pf::Attention* attention, const pf::Pages* pages,
                            const pf::Batch* batch, uint8_t* workspace) {
    on_team(threads, [=](Team team) { kernels(isa).attention(team, *attention, *pages, *batch, workspace); });
}

PF_EXPORT int64_t pf_step_bytes(int32_t isa, int32_t threads, const pf::Model* model, const pf::Pool* pool,
                                const pf::Batch* batch) {
    return kernels(isa).step_bytes(*model, *pool, *batch, threads);
}

PF_EXPORT void pf_step(int32_t isa, int32_t threads, const pf::Model* model, const pf::Pool* pool,
                       const pf::Batch* batch, const pf::Tokens* tokens, uint8_t* workspace) {
    on_team(threads, [=](Team team) { kernels(isa).step(team, *model, *pool, *batch, *tokens, workspace); });
}
