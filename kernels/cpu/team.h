// What a kernel sees of its threads and of its workspace. One thread calls a kernel, and shares out items of it. How
// they are shared never changes a result: each output is computed whole by one thread, in one order.
#pragma once
#include <cstdint>

// Inlined always, so that no copy compiled for one instruction set is called from another.
#define PF_INLINE inline __attribute__((always_inline))

namespace pf {

struct Crew;  // threads that help a caller; see crew.cpp

// Items `begin` to `end`, on the thread numbered `rank`.
using Body = void (*)(const void* context, int32_t begin, int32_t end, int32_t rank);
void run_on(Crew* crew, int32_t count, int32_t grain, Body body, const void* context);

struct Team {
    Crew* crew;
    int32_t size;

    // Calls f(begin, end, rank) until all items are done; `rank`, below `size`, is that of the thread which calls it.
    // Another thread is given `grain` items or more: fewer take less time than to hand them over.
    template <class F>
    PF_INLINE void share(int64_t count, int32_t grain, const F& f) const {
        if (size == 1 || count <= grain) {
            if (count > 0) f(0, (int32_t)count, 0);
            return;
        }
        Body body = [](const void* context, int32_t begin, int32_t end, int32_t rank) {
            (*(const F*)context)(begin, end, rank);
        };
        run_on(crew, (int32_t)count, grain, body, &f);
    }
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
