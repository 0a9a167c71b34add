// The panel layout: how a packed weight [N, K] lies in memory while it serves.
//
// A panel is 16 output rows: one stream of units of K (32 to 256 elements), each its scales, then its codes, so that
// whoever multiplies reads memory in order. The bits are those of the file, in another order.
// Codes: K is cut into groups of 32. A group is a few planes of 64 bytes; byte 4 * row + c of "vector" j (0..7) is the
// code of element 4 * j + c of the group. Planes pack those eight vectors by bit width:
//   P8: vector j is plane j;   P4: vectors j and j + 4 are the low and high nibbles of plane j;
//   P2: vector j is bits 2 (j mod 4) and up of plane j / 4;   P1: vector j is bit j of the one plane.
// 5-bit codes are P4 then P1, 6-bit codes P4 then P2, 3-bit codes P2 then P1. One load gives 16 rows x 4 elements to
// the dot-product instruction, whose accumulator lanes are the 16 outputs: no horizontal sums, one order over K for
// any number of activation rows.
// Scales: the fields of the file's block, which is the unit, each stored for the 16 rows side by side.
#pragma once
#include "simd.h"

namespace slim {

constexpr int ROWS = 16;
constexpr int HALVES = ROWS / L;

enum Format : int32_t {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
  Q6_K = 14, IQ2_XXS = 16, IQ2_XS = 17, IQ3_XXS = 18, IQ1_S = 19, IQ4_NL = 20, IQ3_S = 21, IQ2_S = 22, IQ4_XS = 23,
  IQ1_M = 29, BF16 = 30, TQ1_0 = 34, TQ2_0 = 35, MXFP4 = 39, NVFP4 = 40,
  F8 = 100, F8_BLOCK = 101, E2M1_G16 = 102, INT4 = 103,
};

// One weight part as the kernels see it. y = row_scale * (sum over K) + bias, both per row and optional;
// block_scale [ceil(N / 128), ceil(K / 128)] belongs to F8_BLOCK.
struct Part {
  const uint8_t* data;
  const float* block_scale;
  const float* row_scale;
  const float* bias;
  int64_t panel_bytes;
  int64_t rows;
  int64_t columns;
  int64_t out_column;
  int32_t format;
};

// ---- codes ----------------------------------------------------------------------------------------------------

template <int BITS>
struct Codes {
  static constexpr int GROUP_BYTES = 64 * BITS;
  const uint8_t* p;

  INLINE I plane(int index) const { return i_load(p + 64 * index); }
  static INLINE I mask(int byte) { return i_set(byte * 0x01010101); }

  template <int J>
  INLINE I vec() const {
    if constexpr (BITS == 8) return plane(J);
    if constexpr (BITS == 1) return i_and(i_shift<-J>(plane(0)), mask(1));
    if constexpr (BITS == 2 || BITS == 3) {
      I low = i_and(i_shift<-2 * (J & 3)>(plane(J >> 2)), mask(3));
      if constexpr (BITS == 2) return low;
      return i_or_and(low, i_shift<2 - J>(plane(2)), mask(4));
    }
    if constexpr (BITS >= 4 && BITS <= 6) {
      I low = i_and(i_shift<(J < 4 ? 0 : -4)>(plane(J & 3)), mask(15));
      if constexpr (BITS == 4) return low;
      if constexpr (BITS == 5) return i_or_and(low, i_shift<4 - J>(plane(4)), mask(16));
      return i_or_and(low, i_shift<4 - 2 * (J & 3)>(plane(4 + (J >> 2))), mask(48));
    }
  }
};

// ---- scales: fill s (and m) for one unit; value of a code = s * (code - OFFSET) + m --------------------------------

struct ScaleBuffer {
  F s[16], m[16];
};

INLINE F f_u8(const void* p) { return f_from_i(i_u8(p)); }

struct ScaleD {  // d, fp16 per 32
  static constexpr int UNIT = 32, GROUP = 32, BYTES = 32;
  static constexpr bool MIN = false;
  static INLINE void load(const uint8_t* p, int h, ScaleBuffer& b) { b.s[0] = f_half(p + 2 * L * h); }
};

struct ScaleDM {  // d, m, fp16 per 32
  static constexpr int UNIT = 32, GROUP = 32, BYTES = 64;
  static constexpr bool MIN = true;
  static INLINE void load(const uint8_t* p, int h, ScaleBuffer& b) {
    b.s[0] = f_half(p + 2 * L * h);
    b.m[0] = f_half(p + 32 + 2 * L * h);
  }
};

struct ScaleK45 {  // d, dmin, twelve bytes of 6-bit (scale, min) pairs: Q4_K, Q5_K
  static constexpr int UNIT = 256, GROUP = 32, BYTES = 256;
  static constexpr bool MIN = true;
  static INLINE void load(const uint8_t* p, int h, ScaleBuffer& b) {
    F d = f_half(p + 2 * L * h), dmin = f_sub(f_zero(), f_half(p + 32 + 2 * L * h));
    const uint8_t* s = p + 64 + L * h;
    const I six = i_set(63), four = i_set(15), high = i_set(48);
    unroll<4>(UNROLLED(j) {
      I a = i_u8(s + 16 * j), c = i_u8(s + 16 * (j + 4)), e = i_u8(s + 16 * (j + 8));
      b.s[j] = f_mul(d, f_from_i(i_and(a, six)));
      b.m[j] = f_mul(dmin, f_from_i(i_and(c, six)));
      b.s[j + 4] = f_mul(d, f_from_i(i_or_and(i_and(e, four), i_shift<-2>(a), high)));
      b.m[j + 4] = f_mul(dmin, f_from_i(i_or_and(i_shift<-4>(e), i_shift<-2>(c), high)));
    });
  }
};

struct ScaleK6 {  // sixteen int8, d: Q6_K
  static constexpr int UNIT = 256, GROUP = 16, BYTES = 288;
  static constexpr bool MIN = false;
  static INLINE void load(const uint8_t* p, int h, ScaleBuffer& b) {
    F d = f_half(p + 256 + 2 * L * h);
    unroll<16>(UNROLLED(i) { b.s[i] = f_mul(d, f_from_i(i_s8(p + 16 * i + L * h))); });
  }
};

struct ScaleK3 {  // twelve bytes of sixteen 6-bit scales minus 32, d: Q3_K
  static constexpr int UNIT = 256, GROUP = 16, BYTES = 224;
  static constexpr bool MIN = false;
  static INLINE void load(const uint8_t* p, int h, ScaleBuffer& b) {
    F d = f_half(p + 192 + 2 * L * h);
    const uint8_t* s = p + L * h;
    unroll<16>(UNROLLED(i) {
      I low = i_and(i_shift<(i < 8 ? 0 : -4)>(i_u8(s + 16 * (i & 7))), i_set(15));
      I top = i_shift<4 - 2 * (i / 4)>(i_u8(s + 16 * (8 + i % 4)));
      b.s[i] = f_mul(d, f_from_i(i_sub(i_or_and(low, top, i_set(48)), i_set(32))));
    });
  }
};

struct ScaleK2 {  // sixteen bytes (scale low, min high), d, dmin: Q2_K
  static constexpr int UNIT = 256, GROUP = 16, BYTES = 320;
  static constexpr bool MIN = true;
  static INLINE void load(const uint8_t* p, int h, ScaleBuffer& b) {
    F d = f_half(p + 256 + 2 * L * h), dmin = f_sub(f_zero(), f_half(p + 288 + 2 * L * h));
    unroll<16>(UNROLLED(i) {
      I both = i_u8(p + 16 * i + L * h);
      b.s[i] = f_mul(d, f_from_i(i_and(both, i_set(15))));
      b.m[i] = f_mul(dmin, f_from_i(i_shift<-4>(both)));
    });
  }
};

struct ScaleIQ4XS {  // d, scales_h, four bytes of scales_l: eight 6-bit scales minus 32
  static constexpr int UNIT = 256, GROUP = 32, BYTES = 128;
  static constexpr bool MIN = false;
  static INLINE void load(const uint8_t* p, int h, ScaleBuffer& b) {
    F d = f_half(p + 2 * L * h);
    I high = i_u16(p + 32 + 2 * L * h);
    unroll<8>(UNROLLED(i) {
      I low = i_and(i_shift<(i % 2 ? -4 : 0)>(i_u8(p + 64 + 16 * (i / 2) + L * h)), i_set(15));
      b.s[i] = f_mul(d, f_from_i(i_sub(i_or_and(low, i_shift<4 - 2 * i>(high), i_set(48)), i_set(32))));
    });
  }
};

struct ScaleE8M0 {  // one exponent byte per 32, half of 2^(e - 127): MXFP4
  static constexpr int UNIT = 32, GROUP = 32, BYTES = 16;
  static constexpr bool MIN = false;
  static INLINE void load(const uint8_t* p, int h, ScaleBuffer& b) {
    I e = i_u8(p + L * h);
    I normal = i_shift<23>(i_sub(e, i_set(1)));
    I tiny = i_select_gt(e, i_set(0), i_set(0x00400000), i_set(0x00200000));
    b.s[0] = f_bits(i_select_gt(e, i_set(1), normal, tiny));
  }
};

// A byte's seven low bits as E4M3 (4 exponent, 3 mantissa bits), subnormals included, as float32 times 0.5.
INLINE F half_e4m3(I bits) { return f_mul(f_half_of(i_shift<7>(bits)), f_set(128.0f)); }

struct ScaleUE4M3 {  // four UE4M3 bytes per 64, 0x7f means 0: GGUF NVFP4
  static constexpr int UNIT = 64, GROUP = 16, BYTES = 64;
  static constexpr bool MIN = false;
  static INLINE void load(const uint8_t* p, int h, ScaleBuffer& b) {
    unroll<4>(UNROLLED(i) {
      I bits = i_u8(p + 16 * i + L * h);
      b.s[i] = half_e4m3(i_select_gt(i_set(127), bits, bits, i_zero()));
    });
  }
};

struct ScaleE4M3 {  // two E4M3 bytes per 32: safetensors NVFP4
  static constexpr int UNIT = 32, GROUP = 16, BYTES = 32;
  static constexpr bool MIN = false;
  static INLINE void load(const uint8_t* p, int h, ScaleBuffer& b) {
    unroll<2>(UNROLLED(i) {
      b.s[i] = half_e4m3(i_and(i_u8(p + 16 * i + L * h), i_set(127)));
    });
  }
};

struct ScaleInt4 {  // one float32 per 128: symmetric int4
  static constexpr int UNIT = 128, GROUP = 32, BYTES = 64;
  static constexpr bool MIN = false;
  static INLINE void load(const uint8_t* p, int h, ScaleBuffer& b) {
    F d = f_load((const float*)p + L * h);
    unroll<4>(UNROLLED(i) { b.s[i] = d; });
  }
};

// Decoded panels: codes P8, float32 scales (and minima) per group, written by `decode_panel`.
template <int GROUP_, bool MIN_>
struct ScaleDecoded {
  static constexpr int UNIT = 32, GROUP = GROUP_, BYTES = (32 / GROUP_) * 64 * (MIN_ ? 2 : 1);
  static constexpr bool MIN = MIN_;
  static INLINE void load(const uint8_t* p, int h, ScaleBuffer& b) {
    const float* f = (const float*)p + L * h;
    unroll<32 / GROUP>(UNROLLED(i) {
      b.s[i] = f_load(f + ROWS * (MIN ? 2 * i : i));
      if constexpr (MIN) b.m[i] = f_load(f + ROWS * (2 * i + 1));
    });
  }
};

// ---- formats -----------------------------------------------------------------------------------------------------

alignas(16) inline constexpr uint8_t TABLE_IQ4[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                 129, 141, 153, 166, 181, 197, 217, 241};  // value + 128
alignas(16) inline constexpr uint8_t TABLE_E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                  12, 11, 10, 9,  8,  6,  4,  0};  // twice the value, + 12

constexpr int largest(const uint8_t* table) {
  int most = 0;
  for (int i = 0; i < 16; ++i) most = table[i] > most ? table[i] : most;
  return most;
}

// BITS of a code, its scales, OFFSET so that value = s * (code - OFFSET) + m, and a 16-entry table where codes index one.
// IN_CACHE: decoded panels, which need no prefetch. TOP: the largest code.
template <int BITS_, class SCALE_, int OFFSET_, const uint8_t* TABLE_ = nullptr, bool IN_CACHE_ = false,
          int TOP_ = (1 << BITS_) - 1>
struct Layout {
  static constexpr bool IN_CACHE = IN_CACHE_;
  static constexpr int BITS = BITS_, OFFSET = OFFSET_;
  using Scale = SCALE_;
  using Code = Codes<BITS>;
  // From unit to unit: one stream in a panel, two in decoded panels.
  static constexpr int CODE_BYTES = Scale::UNIT / 32 * Code::GROUP_BYTES, UNIT_BYTES = Scale::BYTES + CODE_BYTES;
  static constexpr int CODE_STRIDE = IN_CACHE ? CODE_BYTES : UNIT_BYTES;
  static constexpr int SCALE_STRIDE = IN_CACHE ? Scale::BYTES : UNIT_BYTES;
  static constexpr bool FULL = OFFSET == 128;
  static constexpr bool HAS_TABLE = TABLE_ != nullptr;
  static constexpr int top() {
    if constexpr (HAS_TABLE) return largest(TABLE_);
    return TOP_;
  }
  static constexpr int TOP = top();
  static INLINE I table() {
    if constexpr (HAS_TABLE) return i_table_load(TABLE_);
    return i_zero();
  }
};

using LayoutQ4_0 = Layout<4, ScaleD, 8>;
using LayoutQ4_1 = Layout<4, ScaleDM, 0>;
using LayoutQ5_0 = Layout<5, ScaleD, 16>;
using LayoutQ5_1 = Layout<5, ScaleDM, 0>;
using LayoutQ8_0 = Layout<8, ScaleD, 128>;
using LayoutQ2_K = Layout<2, ScaleK2, 0>;
using LayoutQ3_K = Layout<3, ScaleK3, 4>;
using LayoutQ4_K = Layout<4, ScaleK45, 0>;
using LayoutQ5_K = Layout<5, ScaleK45, 0>;
using LayoutQ6_K = Layout<6, ScaleK6, 32>;
using LayoutIQ4_NL = Layout<4, ScaleD, 128, TABLE_IQ4>;
using LayoutIQ4_XS = Layout<4, ScaleIQ4XS, 128, TABLE_IQ4>;
using LayoutMXFP4 = Layout<4, ScaleE8M0, 12, TABLE_E2M1>;
using LayoutNVFP4 = Layout<4, ScaleUE4M3, 12, TABLE_E2M1>;
using LayoutE2M1_G16 = Layout<4, ScaleE4M3, 12, TABLE_E2M1>;
using LayoutInt4 = Layout<4, ScaleInt4, 8>;
// Of OFFSET only whether it is 128 counts here, and TOP only where sums are short, where a product must know; the value
// of OFFSET comes at run time.
template <int GROUP, bool MIN, bool FULL, int TOP>
using LayoutDecoded = Layout<8, ScaleDecoded<GROUP, MIN>, FULL && FULL_IS_SIGNED ? 128 : 64, nullptr, true,
                             SHORT_SUMS ? TOP : 127>;

// Calls f(Layout{}) for the panel formats of packed codes; false for any other format.
template <class Fn>
INLINE bool with_layout(int format, Fn&& f) {
  switch (format) {
    case Q4_0: f(LayoutQ4_0{}); return true;
    case Q4_1: f(LayoutQ4_1{}); return true;
    case Q5_0: f(LayoutQ5_0{}); return true;
    case Q5_1: f(LayoutQ5_1{}); return true;
    case Q8_0: f(LayoutQ8_0{}); return true;
    case Q2_K: f(LayoutQ2_K{}); return true;
    case Q3_K: f(LayoutQ3_K{}); return true;
    case Q4_K: f(LayoutQ4_K{}); return true;
    case Q5_K: f(LayoutQ5_K{}); return true;
    case Q6_K: f(LayoutQ6_K{}); return true;
    case IQ4_NL: f(LayoutIQ4_NL{}); return true;
    case IQ4_XS: f(LayoutIQ4_XS{}); return true;
    case MXFP4: f(LayoutMXFP4{}); return true;
    case NVFP4: f(LayoutNVFP4{}); return true;
    case E2M1_G16: f(LayoutE2M1_G16{}); return true;
    case INT4: f(LayoutInt4{}); return true;
    default: return false;
  }
}

}  // namespace slim
