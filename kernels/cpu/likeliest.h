// The likeliest token of each row of logits, while the rows are still in a cache.
#pragma once
#include "abi.h"
#include "elementwise.h"

namespace pf::PF_ISA {

// The first of the largest numbers; -1 where one is not finite.
static int32_t likeliest_of(const float* row, int64_t count) {
    F16 most = set16(-__builtin_inff()), zeros = zero16();
    int64_t whole = count & ~(int64_t)15;
    for (int64_t i = 0; i < whole; i += 16) {
        F16 x = load16(row + i);
        most = max16(most, x);
        zeros = fma16(x, zero16(), zeros);  // NaN from where one is not finite
    }
    float largest = max_of16(most), zero = sum16(zeros);
    for (int64_t i = whole; i < count; i++) {
        largest = row[i] > largest ? row[i] : largest;
        zero += row[i] * 0.0f;
    }
    if (zero != 0.0f) return -1;
    int32_t id = 0;
    while (row[id] != largest) id++;
    return id;
}

static void find_likeliest(Team team, const float* logits, int64_t rows, int64_t vocabulary, int32_t* ids) {
    team.share(rows, 1, [=](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; r++) ids[r] = likeliest_of(logits + r * vocabulary, vocabulary);
    });
}

}  // namespace pf::PF_ISA
