#include "activations.h"

namespace slim {

uint16_t float_to_half(float x) {
#if defined(SLIM_AVX512) || defined(SLIM_AVX2)
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (rest < 0x38800000) {  // subnormal half: adding 0.5 rounds to multiples of 2^-24
    float tiny;
    std::memcpy(&tiny, &rest, 4);
    tiny += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &tiny, 4);
    return (uint16_t)(sign | (rounded - 0x3f000000));
  }
  return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13));
#endif
}

void Needs::add(int format, bool float_activations) {
  const FormatKernels* k = packed_kernels(format);
  if (k == nullptr) {
    real = true;
    return;
  }
  if (k->min) min_group[k->group == 16] = true;
  if (float_activations) {
    real = true;
    return;
  }
  integer = true;
  if (find(k->group, k->offset) < 0) {
    init_group[num_inits] = k->group;
    init_offset[num_inits++] = k->offset;
  }
}

int Needs::find(int group, int offset) const {
  for (int i = 0; i < num_inits; ++i)
    if (init_group[i] == group && init_offset[i] == offset) return i;
  return -1;
}

Activations::Activations(const Needs& needs, int64_t columns, int64_t rows, int width)
    : needs_(needs), columns_(columns), groups_((columns + 31) / 32), rows_(rows), width_(width) {
  int64_t at = 0;
  auto take = [&](int64_t bytes) {
    int64_t start = at;
    at += (bytes * width_ + 63) / 64 * 64;
    return start;
  };
  if (needs.integer) {
    at_q_ = take(groups_ * 32);
    at_dx_ = take(groups_ * 4);
    for (int i = 0; i < needs.num_inits; ++i) at_init_[i] = take(groups_ * (32 / needs.init_group[i]) * 4);
    for (int i = 0; i < 2; ++i)
      if (needs.min_group[i]) at_dxs_[i] = take(groups_ * (1 + i) * 4);
  }
  if (needs.real) {
    at_x_ = take(groups_ * 32 * 4);
    for (int i = 0; i < 2; ++i)
      if (needs.min_group[i]) at_xs_[i] = take(groups_ * (1 + i) * 4);
  }
  tile_bytes_ = at;
}

ActTile Activations::view(int64_t tile, int group, int offset) const {
  const uint8_t* m = memory_ + tile * tile_bytes_;
  const int init = needs_.find(group, offset), sixteen = group == 16;
  return {(const int8_t*)(m + at_q_),
          (const float*)(m + at_dx_),
          init < 0 ? nullptr : (const int32_t*)(m + at_init_[init]),
          (const float*)(m + at_dxs_[sixteen]),
          (const float*)(m + at_x_),
          (const float*)(m + at_xs_[sixteen])};
}

namespace {

#if defined(SLIM_AVX512)
INLINE void pack_bytes(const I* wide, int8_t* q) {
  unroll<2>(UNROLLED(i) { _mm_storeu_si128((__m128i*)(q + 16 * i), _mm512_cvtepi32_epi8(wide[i])); });
}
#elif defined(SLIM_AVX2)
INLINE void pack_bytes(const I* wide, int8_t* q) {
  const I words = _mm256_packs_epi16(_mm256_packs_epi32(wide[0], wide[1]), _mm256_packs_epi32(wide[2], wide[3]));
  const I order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs interleave the 128-bit halves
  i_store(q, _mm256_permutevar8x32_epi32(words, order));
}
#else
INLINE void pack_bytes(const I* wide, int8_t* q) {
  for (int i = 0; i < 32; ++i) q[i] = (int8_t)wide[i / L][i % L];
}
#endif

#if defined(SLIM_AVX512) || defined(SLIM_AVX2)
INLINE void sum_halves(const int8_t* q, int32_t* sums) {
  __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i*)q));
  __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  fours = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0xb1));
  fours = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
  sums[0] = _mm256_extract_epi32(fours, 0);
  sums[1] = _mm256_extract_epi32(fours, 4);
}
#else
INLINE void sum_halves(const int8_t* q, int32_t* sums) {
  sums[0] = sums[1] = 0;
  for (int i = 0; i < 32; ++i) sums[i / 16] += q[i];
}
#endif

// One block of 32: q = round to nearest (even) of x * 127 / amax, d = amax / 127. Sums of q per 16.
INLINE float quantize32(const float* x, int8_t* q, int32_t* sums) {
  F most = f_abs(f_load(x));
  for (int i = L; i < 32; i += L) most = f_max(most, f_abs(f_load(x + i)));
  const float amax = f_reduce_max(most);
  const float inverse = amax > 1e-30f ? 127.0f / amax : 0.0f;
  I wide[32 / L];
  unroll<32 / L>(UNROLLED(i) { wide[i] = i_round(f_mul(f_load(x + i * L), f_set(inverse))); });
  pack_bytes(wide, q);
  sum_halves(q, sums);
  return amax / 127.0f;
}

INLINE float sum_chain(const float* x, int n) {
  float total = 0.0f;
  for (int i = 0; i < n; ++i) total += x[i];
  return total;
}

}  // namespace

void Activations::write_tile(int64_t tile, const void* const* sources, int type) {
  const int w = tile_rows(tile);
  for (int64_t g = 0; g < groups_; ++g)
    for (int t = 0; t < w; ++t) write_group(memory_ + tile * tile_bytes_, g, t, w, sources[t], type);
}

INLINE void Activations::write_group(uint8_t* m, int64_t g, int t, int w, const void* source, int type) {
  alignas(64) float copy[32];
  const float* x = copy;
  const int64_t k0 = g * 32;
  const int count = (int)(columns_ - k0 < 32 ? columns_ - k0 : 32);
  if (type == TYPE_F32 && count == 32) {
    x = (const float*)source + k0;
  } else {
    for (int i = 0; i < 32; ++i) copy[i] = i < count ? read_value(source, k0 + i, type) : 0.0f;
  }
  if (needs_.integer) write_integers(m, g, t, w, x);
  if (!needs_.real) return;
  float* out = (float*)(m + at_x_) + k0 * w + t;
  for (int i = 0; i < 32; ++i) out[i * w] = x[i];
  if (needs_.min_group[0]) ((float*)(m + at_xs_[0]))[g * w + t] = sum_chain(x, 32);
  if (needs_.min_group[1]) {
    ((float*)(m + at_xs_[1]))[(g * 2) * w + t] = sum_chain(x, 16);
    ((float*)(m + at_xs_[1]))[(g * 2 + 1) * w + t] = sum_chain(x + 16, 16);
  }
}

INLINE void Activations::write_integers(uint8_t* m, int64_t g, int t, int w, const float* x) {
  alignas(32) int8_t q[32];
  int32_t sums[2];
  const float d = quantize32(x, q, sums);
  uint8_t* words = m + at_q_ + (g * 8 * w + t) * 4;
  for (int j = 0; j < 8; ++j) std::memcpy(words + j * w * 4, q + 4 * j, 4);
  ((float*)(m + at_dx_))[g * w + t] = d;
  for (int i = 0; i < needs_.num_inits; ++i) {
    int32_t* init = (int32_t*)(m + at_init_[i]);
    const int offset = FULL_IS_SIGNED && needs_.init_offset[i] == 128 ? 0 : -needs_.init_offset[i];
    if (needs_.init_group[i] == 32) {
      init[g * w + t] = offset * (sums[0] + sums[1]);
    } else {
      init[(g * 2) * w + t] = offset * sums[0];
      init[(g * 2 + 1) * w + t] = offset * sums[1];
    }
  }
  if (needs_.min_group[0]) ((float*)(m + at_dxs_[0]))[g * w + t] = d * (float)(sums[0] + sums[1]);
  if (needs_.min_group[1]) {
    ((float*)(m + at_dxs_[1]))[(g * 2) * w + t] = d * (float)sums[0];
    ((float*)(m + at_dxs_[1]))[(g * 2 + 1) * w + t] = d * (float)sums[1];
  }
}

}  // namespace slim
