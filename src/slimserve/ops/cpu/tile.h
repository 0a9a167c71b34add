// The inner products: one half-panel (L outputs) times a tile of T activation rows.
//
// Order over K, the same for every T and every build: per group of 32 elements one exact integer sum (two where scales
// cover 16), then float32: acc = fma(sum * s, dx, acc), and acc = fma(m, dx * sum_x, acc) where the format has minima.
// With float activations: a chain of 32 (or 16) fused multiply-adds from zero, then the same scale and minimum steps.
#pragma once
#include "panel.h"

namespace slim {

// Activation rows of one tile, interleaved: everything of element k (or group g) lies at [k or g][row of the tile].
struct ActTile {
  const int8_t* q;       // [K / 4][T][4]
  const float* dx;       // [K / 32][T] scale of the block of 32
  const int32_t* init;   // [K / GROUP][T] minus OFFSET times the sum of q over the group
  const float* dxs;      // [K / GROUP][T] dx times the sum of q over the group (formats with minima)
  const float* x;        // float activations [K][T]
  const float* xs;       // [K / GROUP][T] sums of x over the group
};

// Bytes ahead of the codes in use: hardware prefetch stops at pages of 4 KB (measured with measure.kernels_cpu).
constexpr int PREFETCH = 2048;

template <class Y, int T>
INLINE void tile_int(const uint8_t* codes, const uint8_t* scales, int h, int64_t groups,
                     const ActTile& a, F* acc) {
  using S = typename Y::Scale;
  constexpr int UG = S::UNIT / 32, PER = 32 / S::GROUP;  // groups per unit, scale groups per 32
  const I table = Y::table();
  unroll<T>(UNROLLED(t) { acc[t] = f_zero(); });
  const int8_t* q = a.q;
  for (int64_t unit = 0; unit < groups / UG; ++unit) {
    ScaleBuffer b;
    S::load(scales + unit * S::BYTES, h, b);
    for (int ug = 0; ug < UG; ++ug) {
      const int64_t g = unit * UG + ug;
      typename Y::Code c{codes + g * Y::Code::GROUP_BYTES + 4 * L * h};
      if (h == 0) unroll<Y::Code::GROUP_BYTES / 64>(UNROLLED(line) { __builtin_prefetch(c.p + PREFETCH + 64 * line); });
      F sum[T];
      unroll<PER>(UNROLLED(p) {
        constexpr int VECS = 8 / PER;
        I s[T];
        unroll<T>(UNROLLED(t) { s[t] = i_set(a.init[(g * PER + p) * T + t]); });
        unroll<VECS>(UNROLLED(j) {
          I v = c.template vec<p * VECS + j>();
          if constexpr (Y::HAS_TABLE) v = i_table16(table, v);
          unroll<T>(UNROLLED(t) { s[t] = dot4<Y::FULL>(s[t], v, i_bcast(q + ((p * VECS + j) * T + t) * 4)); });
        });
        const F scale = b.s[ug * PER + p];
        unroll<T>(UNROLLED(t) {
          if constexpr (p == 0) sum[t] = f_mul(f_from_i(s[t]), scale);
          else sum[t] = f_fma(f_from_i(s[t]), scale, sum[t]);
        });
      });
      q += 32 * T;
      unroll<T>(UNROLLED(t) { acc[t] = f_fma(sum[t], f_set(a.dx[g * T + t]), acc[t]); });
      if constexpr (S::MIN) {
        unroll<PER>(UNROLLED(p) {
          const F m = b.m[ug * PER + p];
          unroll<T>(UNROLLED(t) { acc[t] = f_fma(m, f_set(a.dxs[(g * PER + p) * T + t]), acc[t]); });
        });
      }
    }
  }
}

// Float activations over decoded codes (P8); `offset` is subtracted exactly before the product.
template <class Y, int T>
INLINE void tile_codes_float(const uint8_t* codes, const uint8_t* scales, int offset, int h,
                             int64_t groups, const ActTile& a, F* acc) {
  using S = typename Y::Scale;
  constexpr int PER = 32 / S::GROUP;
  const I off = i_set(offset), byte = i_set(255);
  unroll<T>(UNROLLED(t) { acc[t] = f_zero(); });
  const float* x = a.x;
  for (int64_t g = 0; g < groups; ++g) {
    ScaleBuffer b;
    S::load(scales + g * S::BYTES, h, b);
    const uint8_t* p8 = codes + g * 512 + 4 * L * h;
    unroll<PER>(UNROLLED(p) {
      F sum[T];
      unroll<T>(UNROLLED(t) { sum[t] = f_zero(); });
      for (int j = 0; j < 8 / PER; ++j) {
        I v = i_load(p8 + 64 * (p * 8 / PER + j));
        unroll<4>(UNROLLED(c) {
          F w = f_from_i(i_sub(i_and(i_shift<-8 * c>(v), byte), off));
          unroll<T>(UNROLLED(t) { sum[t] = f_fma(w, f_set(x[c * T + t]), sum[t]); });
        });
        x += 4 * T;
      }
      unroll<T>(UNROLLED(t) { acc[t] = f_fma(sum[t], b.s[p], acc[t]); });
      if constexpr (S::MIN) {
        unroll<T>(UNROLLED(t) { acc[t] = f_fma(b.m[p], f_set(a.xs[(g * PER + p) * T + t]), acc[t]); });
      }
    });
  }
}

struct LoadF32 {
  static constexpr int BYTES = 4;
  static INLINE F load(const uint8_t* p) { return f_load((const float*)p); }
};
struct LoadF16 {
  static constexpr int BYTES = 2;
  static INLINE F load(const uint8_t* p) { return f_half(p); }
};
struct LoadBF16 {
  static constexpr int BYTES = 2;
  static INLINE F load(const uint8_t* p) { return f_bf16(p); }
};
struct LoadF8 {  // E4M3 (fn): 0x7f and 0xff are NaN
  static constexpr int BYTES = 1;
  static INLINE F load(const uint8_t* p) {
    I b = i_u8(p);
    I low = i_and(b, i_set(127));
    I value = i_bits(f_mul(half_e4m3(low), f_set(2.0f)));
    value = i_select_gt(low, i_set(126), i_set(0x7fc00000), value);
    return f_bits(i_or(value, i_shift<24>(i_and(b, i_set(128)))));
  }
};

// Plain weights [K][16], K padded with zeros to whole groups of 32; float activations. PER_BLOCK: one scale
// per 128 elements of K for all rows of the panel.
template <class W, int T, bool PER_BLOCK>
INLINE void tile_plain(const uint8_t* data, const float* block_scale, int h, int64_t groups, const ActTile& a, F* acc) {
  unroll<T>(UNROLLED(t) { acc[t] = f_zero(); });
  const float* x = a.x;
  const uint8_t* p = data + W::BYTES * L * h;
  for (int64_t g = 0; g < groups; ++g) {
    F sum[T];
    unroll<T>(UNROLLED(t) { sum[t] = f_zero(); });
    for (int k = 0; k < 32; ++k) {
      F w = W::load(p);
      unroll<T>(UNROLLED(t) { sum[t] = f_fma(w, f_set(x[t]), sum[t]); });
      p += W::BYTES * ROWS;
      x += T;
    }
    if constexpr (PER_BLOCK) {
      const F scale = f_set(block_scale[g / 4]);
      unroll<T>(UNROLLED(t) { acc[t] = f_fma(sum[t], scale, acc[t]); });
    } else {
      unroll<T>(UNROLLED(t) { acc[t] = f_add(acc[t], sum[t]); });
    }
  }
}

// Writes all codes of a panel as P8 (table applied) and its scales as float32, in the form ScaleDecoded reads.
template <class Y>
INLINE void decode_panel(const uint8_t* codes, const uint8_t* scales, int64_t groups,
                         uint8_t* out_codes, float* out_scales) {
  using S = typename Y::Scale;
  constexpr int UG = S::UNIT / 32, PER = 32 / S::GROUP, WORDS = S::MIN ? 2 : 1;
  const I table = Y::table();
  for (int h = 0; h < HALVES; ++h) {
    for (int64_t unit = 0; unit < groups / UG; ++unit) {
      ScaleBuffer b;
      S::load(scales + unit * S::BYTES, h, b);
      for (int i = 0; i < UG * PER; ++i) {
        float* f = out_scales + (unit * UG * PER + i) * WORDS * ROWS + L * h;
        f_store(f, b.s[i]);
        if constexpr (S::MIN) f_store(f + ROWS, b.m[i]);
      }
      for (int ug = 0; ug < UG; ++ug) {
        const int64_t g = unit * UG + ug;
        typename Y::Code c{codes + g * Y::Code::GROUP_BYTES + 4 * L * h};
        unroll<8>(UNROLLED(j) {
          I v = c.template vec<j>();
          if constexpr (Y::HAS_TABLE) v = i_table16(table, v);
          i_store(out_codes + g * 512 + 64 * j + 4 * L * h, v);
        });
      }
    }
  }
}

}  // namespace slim
