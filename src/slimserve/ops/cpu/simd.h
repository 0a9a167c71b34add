// Vectors of L lanes in three builds: AVX-512 with VNNI (L = 16), AVX2 with FMA (L = 8), plain arrays (L = 8).
// Every kernel is written once over these functions. Each lane is one output, so no result depends on L.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#define SLIM_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SLIM_AVX2 1
#endif
#if defined(SLIM_AVX512) || defined(SLIM_AVX2)
#include <immintrin.h>
#endif

namespace slim {

// Calls f(integral_constant 0), ..., f(integral_constant N - 1): indices are constants, so arrays become registers.
template <class F, int... J>
INLINE void unroll_impl(F&& f, std::integer_sequence<int, J...>) {
  (f(std::integral_constant<int, J>{}), ...);
}
template <int N, class F>
INLINE void unroll(F&& f) {
  unroll_impl(f, std::make_integer_sequence<int, N>{});
}
#define UNROLLED(index) [&](auto index) __attribute__((always_inline))
// For indices that are no template arguments: one function is compiled, not one per index.
#define EACH(index) [&](int index) __attribute__((always_inline))

INLINE float half_to_float(uint16_t h) {
#if defined(SLIM_AVX512) || defined(SLIM_AVX2)
  return _cvtsh_ss(h);
#else
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
  if (rest >= 0x7c00) {
    bits = sign | 0x7f800000u | (uint32_t)(rest & 0x3ff) << 13;
  } else {
    bits = rest << 13;  // a half's exponent read as a float's: too small by 2^112
    float value;
    std::memcpy(&value, &bits, 4);
    value *= 0x1p112f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
#endif
}

INLINE float bf16_to_float(uint16_t b) {
  uint32_t bits = (uint32_t)b << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// Round to nearest even; NaN stays a (quiet) NaN.
INLINE uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

INLINE float e4m3_to_float(uint8_t b) {
  if ((b & 0x7f) == 0x7f) return NAN;
  uint16_t h = (uint16_t)((b & 0x80) << 8 | (b & 0x7f) << 7);  // as a half: too small by 2^8, subnormals included
  return half_to_float(h) * 256.0f;
}

#if defined(SLIM_AVX512)

constexpr int L = 16;
constexpr const char* ISA = "avx512-vnni";
using F = __m512;
using I = __m512i;
INLINE __mmask16 lane_mask(int n) { return (__mmask16)((1u << n) - 1u); }
INLINE F f_zero() { return _mm512_setzero_ps(); }
INLINE F f_set(float x) { return _mm512_set1_ps(x); }
INLINE F f_load(const float* p) { return _mm512_loadu_ps(p); }
INLINE F f_load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(lane_mask(n), p); }
INLINE void f_store(float* p, F x) { _mm512_storeu_ps(p, x); }
INLINE void f_store_n(float* p, F x, int n) { _mm512_mask_storeu_ps(p, lane_mask(n), x); }
INLINE F f_add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F f_div(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F f_max(F a, F b) { return _mm512_max_ps(a, b); }
INLINE F f_min(F a, F b) { return _mm512_min_ps(a, b); }
INLINE F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F f_fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
INLINE F f_abs(F a) { return _mm512_abs_ps(a); }
INLINE F f_from_i(I a) { return _mm512_cvtepi32_ps(a); }
INLINE I i_round(F a) { return _mm512_cvtps_epi32(a); }
INLINE F f_bits(I a) { return _mm512_castsi512_ps(a); }
INLINE I i_bits(F a) { return _mm512_castps_si512(a); }
INLINE F f_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE F f_bf16(const void* p) {
  return f_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
INLINE I i_u8(const void* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I i_s8(const void* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I i_u16(const void* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
INLINE I i_zero() { return _mm512_setzero_si512(); }
INLINE I i_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE I i_bcast(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}
INLINE I i_load(const void* p) { return _mm512_loadu_si512(p); }
INLINE void i_store(void* p, I x) { _mm512_storeu_si512(p, x); }
INLINE I i_and(I a, I b) { return _mm512_and_si512(a, b); }
INLINE I i_or(I a, I b) { return _mm512_or_si512(a, b); }
INLINE I i_xor(I a, I b) { return _mm512_xor_si512(a, b); }
INLINE I i_or_and(I a, I b, I c) { return _mm512_ternarylogic_epi32(a, b, c, 0xf8); }  // a | (b & c)
INLINE I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I i_sub(I a, I b) { return _mm512_sub_epi32(a, b); }
INLINE I i_max(I a, I b) { return _mm512_max_epi32(a, b); }
// Shift of the bits of each 32-bit lane, left for n > 0; callers mask what crosses a byte.
template <int N>
INLINE I i_shift(I a) {
  if constexpr (N > 0) return _mm512_slli_epi32(a, N);
  if constexpr (N < 0) return _mm512_srli_epi32(a, -N);
  return a;
}
INLINE I i_table16(I table, I index) { return _mm512_shuffle_epi8(table, index); }
INLINE I i_table_load(const void* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
// acc[lane] += sum of four products of unsigned bytes of w (below 128 unless FULL) and signed bytes of x.
template <bool FULL>
INLINE I dot4(I acc, I w, I x) {
  return _mm512_dpbusd_epi32(acc, w, x);
}
constexpr bool FULL_IS_SIGNED = false;
INLINE F f_half_of(I bits) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits)); }  // low 16 bits of each lane
// Both halves of the 64-bit products of unsigned lanes.
INLINE void i_multiply(I a, I b, I& high, I& low) {
  I even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
  high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
  low = _mm512_mullo_epi32(a, b);
}
INLINE float f_reduce_max(F a) { return _mm512_reduce_max_ps(a); }
INLINE I i_select_gt(I a, I b, I yes, I no) { return _mm512_mask_mov_epi32(no, _mm512_cmpgt_epi32_mask(a, b), yes); }
INLINE F f_select_lt(I a, I b, F yes, F no) { return _mm512_mask_mov_ps(no, _mm512_cmplt_epi32_mask(a, b), yes); }

#elif defined(SLIM_AVX2)

constexpr int L = 8;
#if defined(__AVXVNNI__)
constexpr const char* ISA = "avx2-vnni";
#else
constexpr const char* ISA = "avx2";
#endif
using F = __m256;
using I = __m256i;
INLINE F f_zero() { return _mm256_setzero_ps(); }
INLINE F f_set(float x) { return _mm256_set1_ps(x); }
INLINE F f_load(const float* p) { return _mm256_loadu_ps(p); }
INLINE F f_load_n(const float* p, int n) {
  alignas(32) float tmp[8] = {};
  std::memcpy(tmp, p, 4 * (size_t)n);
  return _mm256_load_ps(tmp);
}
INLINE void f_store(float* p, F x) { _mm256_storeu_ps(p, x); }
INLINE void f_store_n(float* p, F x, int n) {
  alignas(32) float tmp[8];
  _mm256_store_ps(tmp, x);
  std::memcpy(p, tmp, 4 * (size_t)n);
}
INLINE F f_add(F a, F b) { return _mm256_add_ps(a, b); }
INLINE F f_sub(F a, F b) { return _mm256_sub_ps(a, b); }
INLINE F f_mul(F a, F b) { return _mm256_mul_ps(a, b); }
INLINE F f_div(F a, F b) { return _mm256_div_ps(a, b); }
INLINE F f_max(F a, F b) { return _mm256_max_ps(a, b); }
INLINE F f_min(F a, F b) { return _mm256_min_ps(a, b); }
INLINE F f_fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
INLINE F f_fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE F f_abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE F f_from_i(I a) { return _mm256_cvtepi32_ps(a); }
INLINE I i_round(F a) { return _mm256_cvtps_epi32(a); }
INLINE F f_bits(I a) { return _mm256_castsi256_ps(a); }
INLINE I i_bits(F a) { return _mm256_castps_si256(a); }
INLINE F f_half(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE F f_bf16(const void* p) {
  return f_bits(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE I i_u8(const void* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE I i_s8(const void* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE I i_u16(const void* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I i_zero() { return _mm256_setzero_si256(); }
INLINE I i_set(int32_t x) { return _mm256_set1_epi32(x); }
INLINE I i_bcast(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm256_set1_epi32(x);
}
INLINE I i_load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE void i_store(void* p, I x) { _mm256_storeu_si256((__m256i*)p, x); }
INLINE I i_and(I a, I b) { return _mm256_and_si256(a, b); }
INLINE I i_or(I a, I b) { return _mm256_or_si256(a, b); }
INLINE I i_xor(I a, I b) { return _mm256_xor_si256(a, b); }
INLINE I i_or_and(I a, I b, I c) { return _mm256_or_si256(a, _mm256_and_si256(b, c)); }
INLINE I i_add(I a, I b) { return _mm256_add_epi32(a, b); }
INLINE I i_sub(I a, I b) { return _mm256_sub_epi32(a, b); }
INLINE I i_max(I a, I b) { return _mm256_max_epi32(a, b); }
template <int N>
INLINE I i_shift(I a) {
  if constexpr (N > 0) return _mm256_slli_epi32(a, N);
  if constexpr (N < 0) return _mm256_srli_epi32(a, -N);
  return a;
}
INLINE I i_table16(I table, I index) { return _mm256_shuffle_epi8(table, index); }
INLINE I i_table_load(const void* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
#if defined(__AVXVNNI__)
template <bool FULL>
INLINE I dot4(I acc, I w, I x) {
  return _mm256_dpbusd_avx_epi32(acc, w, x);
}
constexpr bool FULL_IS_SIGNED = false;
#else
// Without VNNI two byte products are added in 16 bits. Codes below 128 fit; codes that use all eight bits hold
// value + 128 and are multiplied as |value| times x with value's sign, which fits too (x is never -128). Of small codes
// several such sums fit: they are added in 16 bits first (`vectors_at_once`).
#define SLIM_SHORT_SUMS 1
INLINE I pair_products(I w, I x) { return _mm256_maddubs_epi16(w, x); }
INLINE I add_pairs(I a, I b) { return _mm256_add_epi16(a, b); }
INLINE I widen_pairs(I acc, I pairs) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
template <bool FULL>
INLINE I dot4(I acc, I w, I x) {
  I pairs;
  if constexpr (FULL) {
    I value = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
    pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(value), _mm256_sign_epi8(x, value));
  } else {
    pairs = pair_products(w, x);
  }
  return widen_pairs(acc, pairs);
}
constexpr bool FULL_IS_SIGNED = true;
#endif
INLINE F f_half_of(I bits) {
  I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
INLINE void i_multiply(I a, I b, I& high, I& low) {
  I even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  low = _mm256_mullo_epi32(a, b);
}
INLINE float f_reduce_max(F a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
INLINE I i_select_gt(I a, I b, I yes, I no) { return _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi32(a, b)); }
INLINE F f_select_lt(I a, I b, F yes, F no) {
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(_mm256_cmpgt_epi32(b, a)));
}

#else

#if !defined(SLIM_LANES)
#define SLIM_LANES 8  // 16 as well: tests hold both against the builds with vectors
#endif
constexpr int L = SLIM_LANES;
constexpr const char* ISA = "portable";
typedef float F __attribute__((vector_size(4 * SLIM_LANES)));
typedef int32_t I __attribute__((vector_size(4 * SLIM_LANES)));
typedef uint32_t U __attribute__((vector_size(4 * SLIM_LANES)));
#define EACH_LANE for (int lane = 0; lane < L; ++lane)
INLINE F f_zero() { return F{}; }
INLINE F f_set(float x) { return F{} + x; }
INLINE F f_load(const float* p) {
  F x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
INLINE F f_load_n(const float* p, int n) {
  F x{};
  std::memcpy(&x, p, 4 * (size_t)n);
  return x;
}
INLINE void f_store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
INLINE void f_store_n(float* p, F x, int n) { std::memcpy(p, &x, 4 * (size_t)n); }
INLINE F f_add(F a, F b) { return a + b; }
INLINE F f_sub(F a, F b) { return a - b; }
INLINE F f_mul(F a, F b) { return a * b; }
INLINE F f_div(F a, F b) { return a / b; }
INLINE F f_max(F a, F b) {
  EACH_LANE a[lane] = a[lane] > b[lane] ? a[lane] : b[lane];
  return a;
}
INLINE F f_min(F a, F b) {
  EACH_LANE a[lane] = a[lane] < b[lane] ? a[lane] : b[lane];
  return a;
}
INLINE F f_fma(F a, F b, F c) {
  EACH_LANE c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return c;
}
INLINE F f_fnma(F a, F b, F c) { return f_fma(-a, b, c); }
INLINE F f_abs(F a) {
  EACH_LANE a[lane] = __builtin_fabsf(a[lane]);
  return a;
}
INLINE F f_from_i(I a) { return __builtin_convertvector(a, F); }
INLINE I i_round(F a) {
  I out;
  EACH_LANE out[lane] = __builtin_fabsf(a[lane]) < 2147483520.0f ? (int32_t)__builtin_rintf(a[lane]) : INT32_MIN;
  return out;
}
INLINE F f_bits(I a) { return (F)a; }
INLINE I i_bits(F a) { return (I)a; }
INLINE F f_half(const void* p) {
  F out;
  EACH_LANE {
    uint16_t h;
    std::memcpy(&h, (const char*)p + 2 * lane, 2);
    out[lane] = half_to_float(h);
  }
  return out;
}
INLINE I i_u16(const void* p) {
  uint16_t x[L];
  std::memcpy(x, p, sizeof x);
  I out;
  EACH_LANE out[lane] = x[lane];
  return out;
}
INLINE F f_bf16(const void* p) { return f_bits(i_u16(p) << 16); }
INLINE I i_u8(const void* p) {
  I out;
  EACH_LANE out[lane] = ((const uint8_t*)p)[lane];
  return out;
}
INLINE I i_s8(const void* p) {
  I out;
  EACH_LANE out[lane] = ((const int8_t*)p)[lane];
  return out;
}
INLINE I i_zero() { return I{}; }
INLINE I i_set(int32_t x) { return I{} + x; }
INLINE I i_bcast(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return i_set(x);
}
INLINE I i_load(const void* p) {
  I x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
INLINE void i_store(void* p, I x) { std::memcpy(p, &x, sizeof x); }
INLINE I i_and(I a, I b) { return a & b; }
INLINE I i_or(I a, I b) { return a | b; }
INLINE I i_xor(I a, I b) { return a ^ b; }
INLINE I i_or_and(I a, I b, I c) { return a | (b & c); }
INLINE I i_add(I a, I b) { return a + b; }
INLINE I i_sub(I a, I b) { return a - b; }
INLINE I i_max(I a, I b) {
  EACH_LANE a[lane] = a[lane] > b[lane] ? a[lane] : b[lane];
  return a;
}
template <int N>
INLINE I i_shift(I a) {
  if constexpr (N > 0) return a << N;
  if constexpr (N < 0) return (I)((U)a >> -N);
  return a;
}
INLINE I i_table16(I table, I index) {
  uint8_t t[4 * L], x[4 * L];
  std::memcpy(t, &table, sizeof t);
  std::memcpy(x, &index, sizeof x);
  for (int i = 0; i < 4 * L; ++i) x[i] = t[x[i] & 15];
  std::memcpy(&index, x, sizeof x);
  return index;
}
INLINE I i_table_load(const void* p) {
  I out;
  std::memcpy(&out, p, 16);
  std::memcpy((char*)&out + 16, p, 16);
  return out;
}
template <bool FULL>
INLINE I dot4(I acc, I w, I x) {
  uint8_t wb[4 * L];
  int8_t xb[4 * L];
  std::memcpy(wb, &w, sizeof wb);
  std::memcpy(xb, &x, sizeof xb);
  EACH_LANE {
    for (int c = 0; c < 4; ++c) acc[lane] += (int32_t)wb[4 * lane + c] * xb[4 * lane + c];
  }
  return acc;
}
constexpr bool FULL_IS_SIGNED = false;
INLINE F f_half_of(I bits) {
  F out;
  EACH_LANE out[lane] = half_to_float((uint16_t)bits[lane]);
  return out;
}
INLINE void i_multiply(I a, I b, I& high, I& low) {
  EACH_LANE {
    const uint64_t product = (uint64_t)(uint32_t)a[lane] * (uint32_t)b[lane];
    high[lane] = (int32_t)(product >> 32);
    low[lane] = (int32_t)product;
  }
}
INLINE float f_reduce_max(F a) {
  float best = a[0];
  for (int lane = 1; lane < L; ++lane) best = a[lane] > best ? a[lane] : best;
  return best;
}
INLINE I i_select_gt(I a, I b, I yes, I no) {
  EACH_LANE no[lane] = a[lane] > b[lane] ? yes[lane] : no[lane];
  return no;
}
INLINE F f_select_lt(I a, I b, F yes, F no) {
  EACH_LANE no[lane] = a[lane] < b[lane] ? yes[lane] : no[lane];
  return no;
}

#endif

#if defined(SLIM_SHORT_SUMS)
constexpr bool SHORT_SUMS = true;
#else
constexpr bool SHORT_SUMS = false;
#endif

// e^x with the same bits for every lane: x = n ln 2 + r, |r| <= ln 2 / 2, polynomial of degree 6 in r, error below
// 2 units in the last place. Below -87.3 the result is 0, so masked scores (-inf) weigh nothing.
INLINE F f_exp(F x) {
  const F low = f_set(-87.33f), high = f_set(88.37f);
  F clamped = f_min(f_max(x, low), high);
  I n = i_round(f_mul(clamped, f_set(1.44269504f)));
  F nf = f_from_i(n);
  F r = f_fnma(nf, f_set(0.693359375f), clamped);
  r = f_fnma(nf, f_set(-2.12194440e-4f), r);
  F p = f_set(1.9875691500e-4f);
  p = f_fma(p, r, f_set(1.3981999507e-3f));
  p = f_fma(p, r, f_set(8.3334519073e-3f));
  p = f_fma(p, r, f_set(4.1665795894e-2f));
  p = f_fma(p, r, f_set(1.6666665459e-1f));
  p = f_fma(p, r, f_set(5.0000001201e-1f));
  F y = f_add(f_fma(f_mul(r, r), p, r), f_set(1.0f));
  y = f_bits(i_add(i_bits(y), i_shift<23>(n)));
  // comparing bit patterns as integers: for negative floats a larger magnitude is a larger pattern
  F zero_below = f_select_lt(i_set(0), i_sub(i_and(i_bits(x), i_set((int32_t)0x7fffffff)), i_bits(f_set(87.33f))),
                             f_select_lt(i_bits(x), i_set(0), f_zero(), y), y);
  return zero_below;
}

// Natural logarithm of positive normal numbers, error about 1e-7: x = 2^e m, m in [sqrt(1/2), sqrt(2)).
INLINE F f_log(F x) {
  const I bits = i_sub(i_bits(x), i_set(0x3f3504f3));  // sqrt(1/2)
  const F e = f_from_i(i_sub(i_shift<-23>(i_add(bits, i_set(0x3f800000))), i_set(127)));
  const F m = f_sub(f_bits(i_add(i_and(bits, i_set(0x007fffff)), i_set(0x3f3504f3))), f_set(1.0f));
  F p = f_set(7.0376836292e-2f);
  p = f_fma(p, m, f_set(-1.1514610310e-1f));
  p = f_fma(p, m, f_set(1.1676998740e-1f));
  p = f_fma(p, m, f_set(-1.2420140846e-1f));
  p = f_fma(p, m, f_set(1.4249322787e-1f));
  p = f_fma(p, m, f_set(-1.6668057665e-1f));
  p = f_fma(p, m, f_set(2.0000714765e-1f));
  p = f_fma(p, m, f_set(-2.4999993993e-1f));
  p = f_fma(p, m, f_set(3.3333331174e-1f));
  const F m2 = f_mul(m, m);
  const F tail = f_fma(f_mul(m, m2), p, f_mul(m2, f_set(-0.5f)));
  return f_fma(e, f_set(0.693147182f), f_add(m, tail));
}

INLINE float f_sum8(const float* v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// Sine and cosine, |x| up to about 1e6: x = n pi / 2 + r in three steps with fused multiply-adds.
INLINE void f_sincos(F x, F& sine, F& cosine) {
  I n = i_round(f_mul(x, f_set(0.636619772f)));
  F nf = f_from_i(n);
  F r = f_fnma(nf, f_set(1.57079637050628662109375f), x);
  r = f_fnma(nf, f_set(-4.37113900018624283e-8f), r);
  r = f_fnma(nf, f_set(-1.71512447892e-15f), r);
  F r2 = f_mul(r, r);
  F s = f_fma(f_fma(f_set(-1.9515295891e-4f), r2, f_set(8.3321608736e-3f)), r2, f_set(-1.6666654611e-1f));
  s = f_fma(f_mul(s, r2), r, r);
  F c = f_fma(f_fma(f_set(2.443315711809948e-5f), r2, f_set(-1.388731625493765e-3f)), r2, f_set(4.166664568298827e-2f));
  c = f_fma(f_mul(c, r2), r2, f_fma(f_set(-0.5f), r2, f_set(1.0f)));
  const I one = i_set(1), two = i_set(2);
  const I odd = i_and(n, one);
  F first = f_select_lt(odd, one, s, c), second = f_select_lt(odd, one, c, s);
  sine = f_bits(i_xor(i_bits(first), i_shift<30>(i_and(n, two))));
  cosine = f_bits(i_xor(i_bits(second), i_shift<30>(i_and(i_add(n, one), two))));
}

}  // namespace slim
