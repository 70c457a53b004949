// What a kernel sees of its threads and of its workspace. Every thread of a team calls the kernel with the same
// arguments. How work is shared never changes a result: each output is computed whole by one thread, in one order.
#pragma once
#include <cstdint>

// Inlined always, so that no copy compiled for one instruction set is called from another.
#define PF_INLINE inline __attribute__((always_inline))

namespace pf {

struct Meeting;  // where a team's threads wait for each other; see library.cpp

struct Team {
    int32_t rank;
    int32_t size;
    Meeting* meeting;
    void (*wait)(Meeting*, int32_t num_threads);

    // Waits for all threads of the team.
    PF_INLINE void barrier() const {
        if (size > 1) wait(meeting, size);
    }

    // First item of this thread's contiguous share; its end is the next rank's begin.
    PF_INLINE int64_t begin(int64_t num_items) const { return num_items * rank / size; }
    PF_INLINE int64_t end(int64_t num_items) const { return num_items * (rank + 1) / size; }
};

// Cuts a workspace into arrays; with a null base it only counts the bytes.
struct Arena {
    uint8_t* base;
    int64_t used;

    template <class T>
    PF_INLINE T* take(int64_t count) {
        int64_t at = used;
        used += (count * (int64_t)sizeof(T) + 63) & ~(int64_t)63;
        return base ? (T*)(base + at) : nullptr;
    }
};

}  // namespace pf
