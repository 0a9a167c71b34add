// Pieces that row kernels share: padded rows, and sums in an order that their length alone fixes, so that every build
// adds in the same one.
#pragma once
#include "simd.h"

namespace slim {

INLINE int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

// Sixteen chains to one float by halving.
INLINE float reduce16(const float* chain) {
  float half[8];
  for (int i = 0; i < 8; ++i) half[i] = chain[i] + chain[i + 8];
  return f_sum8(half);
}

// The same of sixteen chains held in vectors.
INLINE float reduce16(const F (&chain)[16 / L]) {
  alignas(64) float lanes[16];
  unroll<16 / L>(UNROLLED(j) { f_store(lanes + j * L, chain[j]); });
  return reduce16(lanes);
}

// Sum of x[i] * y[i] over n (a multiple of 16).
INLINE float dot16(const float* x, const float* y, int64_t n) {
  F chain[16 / L];
  unroll<16 / L>(UNROLLED(j) { chain[j] = f_zero(); });
  for (int64_t i = 0; i < n; i += 16)
    unroll<16 / L>(UNROLLED(j) { chain[j] = f_fma(f_load(x + i + j * L), f_load(y + i + j * L), chain[j]); });
  return reduce16(chain);
}

}  // namespace slim
