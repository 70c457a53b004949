// Copies of pages' byte ranges with crc32c of what was copied, in one pass: each vector is loaded once, stored, and
// folded into the checksum from the register, so that a peer that writes to the source meanwhile can't part the two.
//
// Folding: the bytes so far are a polynomial over GF(2), of which only the remainder matters; carry-less multiplication
// moves it up by the bytes of a round (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ",
// 2009). What is left goes through the crc32 instruction.
//
// A file that includes this defines Vec, load, store, fold (two constants to a vector) and PF_FOLD.
#pragma once
#include <nmmintrin.h>

#include <cstring>

#include "abi.h"

namespace pf::PF_FOLD {

// x^n mod P, bit-reversed, and shifted once as the product of reversed polynomials must be.
constexpr uint64_t power_of_x(int n) {
    uint32_t value = 0x80000000u;
    for (int i = 0; i < n; i++) value = (value >> 1) ^ (value & 1 ? 0x82F63B78u : 0);
    return (uint64_t)value << 1;
}

constexpr int kVectors = 4;
constexpr int kVectorBytes = sizeof(Vec);
constexpr int kRoundBits = kVectors * kVectorBytes * 8;

// Keeps the compiler from loading the value from memory again.
inline void pin(Vec& value) { asm("" : "+v"(value)); }
inline void pin(uint64_t& value) { asm("" : "+r"(value)); }
inline void pin(uint8_t& value) { asm("" : "+q"(value)); }

inline uint32_t copy_short(uint8_t* to, const uint8_t* from, int64_t length, uint32_t crc) {
    uint64_t state = crc;
    for (; length >= 8; length -= 8, to += 8, from += 8) {
        uint64_t word;
        memcpy(&word, from, 8);
        pin(word);
        memcpy(to, &word, 8);
        state = _mm_crc32_u64(state, word);
    }
    for (; length > 0; length--, to++, from++) {
        uint8_t byte = *from;
        pin(byte);
        *to = byte;
        state = _mm_crc32_u8((uint32_t)state, byte);
    }
    return (uint32_t)state;
}

// Copies, and returns the state of the checksum behind these bytes.
inline uint32_t copy(uint8_t* to, const uint8_t* from, int64_t length, uint32_t crc) {
    constexpr int64_t kRound = kVectors * kVectorBytes;
    if (length < kRound) return copy_short(to, from, length, crc);
    Vec sums[kVectors] = {with_low(crc)};
    const Consts round = constants(power_of_x(kRoundBits + 32), power_of_x(kRoundBits - 32));
    for (bool first = true; length >= kRound; length -= kRound, to += kRound, from += kRound, first = false) {
        for (int i = 0; i < kVectors; i++) {
            Vec bytes = load(from + i * kVectorBytes);
            pin(bytes);
            store(to + i * kVectorBytes, bytes);
            sums[i] = first ? add(sums[i], bytes) : add(fold(sums[i], round), bytes);
        }
    }
    const Consts one = constants(power_of_x(kVectorBytes * 8 + 32), power_of_x(kVectorBytes * 8 - 32));
    for (int i = 1; i < kVectors; i++) sums[i] = add(fold(sums[i - 1], one), sums[i]);
    alignas(64) uint64_t words[kVectorBytes / 8];
    store((uint8_t*)words, sums[kVectors - 1]);
    uint64_t state = 0;
    for (uint64_t word : words) state = _mm_crc32_u64(state, word);
    return copy_short(to, from, length, (uint32_t)state);
}

}  // namespace pf::PF_FOLD
