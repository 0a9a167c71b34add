// Candidates of a Gumbel draw over a whole vocabulary. The winner is decided in slimserve/ops/reference/random.py's
// arithmetic; here every token's score is computed to about 1e-5, and those within reach of the best are returned.
#include "pool.h"
#include "simd.h"

namespace slim {
namespace {

enum Scratch { SCORES = 2 };
constexpr int64_t PIECE = 8192;
constexpr float SLACK = 1e-3f;  // far above the error of both computations

// First word of Philox4x32-10 with counter (token, position low, position high, purpose).
INLINE I philox(I token, uint32_t k0, uint32_t k1, int64_t position, int purpose) {
  I c0 = token, c1 = i_set((int32_t)position), c2 = i_set((int32_t)(position >> 32)), c3 = i_set(purpose);
  const I m0 = i_set((int32_t)0xD2511F53u), m1 = i_set((int32_t)0xCD9E8D57u);
  for (int round = 0; round < 10; ++round) {
    I high0, low0, high1, low1;
    i_multiply(c0, m0, high0, low0);
    i_multiply(c2, m1, high1, low1);
    c0 = i_xor(i_xor(high1, c1), i_set((int32_t)k0));
    c1 = low1;
    c2 = i_xor(i_xor(high0, c3), i_set((int32_t)k1));
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

INLINE F gumbel(I word) {
  const F high = f_from_i(i_shift<-16>(word)), low = f_from_i(i_and(word, i_set(0xffff)));
  const F v = f_mul(f_add(f_fma(high, f_set(65536.0f), low), f_set(0.5f)), f_set(0x1p-32f));
  const F u = f_min(v, f_set(1.0f - 0x1p-24f));
  const F series = f_mul(u, f_fma(u, f_fma(u, f_fma(u, f_set(0.25f), f_set(1.0f / 3.0f)), f_set(0.5f)), f_set(1.0f)));
  const F plain = f_sub(f_zero(), f_log(f_sub(f_set(1.0f), u)));
  // positive floats compare as their bit patterns
  const F e = f_select_lt(i_bits(u), i_bits(f_set(1.0f / 64.0f)), series, plain);
  return f_sub(f_zero(), f_log(e));
}

}  // namespace
}  // namespace slim

extern "C" {

// ids [room] of x [n] whose (x - best) * inverse + Gumbel draw may be the largest, ascending; returns their number,
// or -1 where they are more than `room` or none.
int64_t slim_gumbel_candidates(const float* x, int64_t n, float best, float inverse, uint64_t seed, int64_t position,
                               int purpose, int64_t* ids, int64_t room) {
  using namespace slim;
  alignas(64) static const int32_t LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float* scores = (float*)scratch(SCORES, (size_t)(n + 16) * 4);
  const int64_t pieces = (n + PIECE - 1) / PIECE;
  parallel(pieces, [&](int64_t piece) {
    const F shift = f_set(best), factor = f_set(inverse);
    for (int64_t i = piece * PIECE; i < n && i < (piece + 1) * PIECE; i += L) {
      const I token = i_add(i_set((int32_t)i), i_load(LANES));
      const F noise = gumbel(philox(token, (uint32_t)seed, (uint32_t)(seed >> 32), position, purpose));
      const F value = n - i >= L ? f_load(x + i) : f_load_n(x + i, (int)(n - i));
      f_store(scores + i, f_fma(f_sub(value, shift), factor, noise));
    }
  });
  for (int64_t i = n; i < n + 16; ++i) scores[i] = -INFINITY;
  F best_lanes = f_set(-INFINITY);
  for (int64_t i = 0; i < n; i += L) best_lanes = f_max(best_lanes, f_load(scores + i));
  const float most = f_reduce_max(best_lanes);
  if (most == -INFINITY) return -1;
  int64_t count = 0;
  for (int64_t first = 0; first < n; first += 64) {
    F block = f_set(-INFINITY);
    for (int64_t i = first; i < first + 64 && i < n; i += L) block = f_max(block, f_load(scores + i));
    if (f_reduce_max(block) < most - SLACK) continue;
    for (int64_t i = first; i < first + 64 && i < n; ++i) {
      if (scores[i] < most - SLACK) continue;
      if (count == room) return -1;
      ids[count++] = i;
    }
  }
  return count;
}

// The random words themselves, for tests.
void slim_random_words(const int64_t* tokens, int64_t n, uint64_t seed, int64_t position, int purpose, uint32_t* out) {
  using namespace slim;
  for (int64_t i = 0; i < n; ++i) {
    alignas(64) int32_t word[L];
    i_store(word, philox(i_set((int32_t)tokens[i]), (uint32_t)seed, (uint32_t)(seed >> 32), position, purpose));
    out[i] = (uint32_t)word[0];
  }
}

}  // extern "C"
