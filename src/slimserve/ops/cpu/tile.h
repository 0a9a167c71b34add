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

  // The same tile from group `g` on.
  INLINE ActTile from(int64_t g, int rows, int per) const {
    const int64_t groups = g * rows;
    return {q + groups * 32, dx + groups, init + groups * per, dxs + groups * per, x + groups * 32, xs + groups * per};
  }
};

// Bytes ahead of the stream in use: hardware prefetch stops at pages of 4 KB (measured with measure.kernels_cpu).
constexpr int PREFETCH = 8192;

// P sets of L outputs side by side, so that one broadcast of activations serves P products. Set p is panel p of a
// decoded pair where L = 16, and half p of the one panel where L = 8.
struct Sets {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t code_stride, scale_stride;  // to the next panel (L = 16)
  INLINE const uint8_t* code(int p) const { return L == ROWS ? codes + p * code_stride : codes + 4 * L * p; }
  INLINE const uint8_t* scale(int p) const { return L == ROWS ? scales + p * scale_stride : scales; }
  static INLINE int half(int p) { return L == ROWS ? 0 : p; }
};

// Scales of long units are decoded in one function that all tiles call: inlined into each, they took half the time that
// the kernels take to compile.
template <class S>
__attribute__((noinline)) void load_long_unit(const uint8_t* p, int h, ScaleBuffer& b) {
  S::load(p, h, b);
}
template <class S>
INLINE void load_scales(const uint8_t* p, int h, ScaleBuffer& b) {
  if constexpr (S::UNIT >= 256) load_long_unit<S>(p, h, b);
  else S::load(p, h, b);
}

// One broadcast of four activations of each row serves P products.
template <bool FULL, int T, int P>
INLINE void dot_rows(I (*s)[T], const I* v, const int8_t* q) {
  unroll<T>(EACH(t) {
    const I x = i_bcast(q + 4 * t);
    unroll<P>(EACH(p) { s[p][t] = dot4<FULL>(s[p][t], v[p], x); });
  });
}

// The same into sums of pairs, to begin with or to add to.
template <bool FIRST, int T, int P>
INLINE void pair_rows(I (*pairs)[T], const I* v, const int8_t* q) {
#if defined(SLIM_SHORT_SUMS)
  unroll<T>(EACH(t) {
    const I x = i_bcast(q + 4 * t);
    unroll<P>(EACH(p) {
      const I products = pair_products(v[p], x);
      if constexpr (FIRST) pairs[p][t] = products;
      else pairs[p][t] = add_pairs(pairs[p][t], products);
    });
  });
#endif
}
template <int T, int P>
INLINE void widen_rows(I (*s)[T], I (*pairs)[T]) {
#if defined(SLIM_SHORT_SUMS)
  unroll<P>(EACH(p) { unroll<T>(EACH(t) { s[p][t] = widen_pairs(s[p][t], pairs[p][t]); }); });
#endif
}

// How many of `vectors` vectors of codes up to TOP are multiplied before their sums leave 16 bits: 2 * 127 * TOP each.
template <int TOP>
constexpr int vectors_at_once(int vectors) {
  if (!SHORT_SUMS) return 1;
  while (vectors > 1 && vectors * 254 * TOP > 32767) vectors /= 2;
  return vectors;
}

// Adds `groups` groups to acc, which the caller has set.
template <class Y, int T, int P>
INLINE void tile_int(const Sets& sets, int64_t groups, const ActTile& a, F (*acc)[T]) {
  using S = typename Y::Scale;
  constexpr int UG = S::UNIT / 32, PER = 32 / S::GROUP;  // groups per unit, scale groups per 32
  const I table = Y::table();
  const int8_t* q = a.q;
  for (int64_t unit = 0; unit < groups / UG; ++unit) {
    ScaleBuffer b[P];
    unroll<P>(EACH(p) { load_scales<S>(sets.scale(p) + unit * Y::SCALE_STRIDE, Sets::half(p), b[p]); });
    if constexpr (!Y::IN_CACHE)
      unroll<(S::BYTES + 63) / 64>(EACH(i) {
        __builtin_prefetch(sets.scales + unit * Y::SCALE_STRIDE + PREFETCH + 64 * i);
      });
    for (int ug = 0; ug < UG; ++ug) {
      const int64_t g = unit * UG + ug;
      typename Y::Code c[P];
      unroll<P>(EACH(p) { c[p].p = sets.code(p) + unit * Y::CODE_STRIDE + ug * Y::Code::GROUP_BYTES; });
      if constexpr (!Y::IN_CACHE)
        unroll<Y::Code::GROUP_BYTES / 64>(EACH(i) { __builtin_prefetch(c[0].p + PREFETCH + 64 * i); });
      F sum[P][T];
      unroll<PER>(UNROLLED(part) {
        constexpr int VECS = 8 / PER, RUN = vectors_at_once<Y::TOP>(VECS);
        I s[P][T];
        unroll<T>(EACH(t) {
          const I init = i_set(a.init[(g * PER + part) * T + t]);
          unroll<P>(EACH(p) { s[p][t] = init; });
        });
        unroll<VECS / RUN>(UNROLLED(run) {
          [[maybe_unused]] I pairs[P][T];
          unroll<RUN>(UNROLLED(i) {
            constexpr int j = part * VECS + run * RUN + i;
            I v[P];
            unroll<P>(EACH(p) {
              v[p] = c[p].template vec<j>();
              if constexpr (Y::HAS_TABLE) v[p] = i_table16(table, v[p]);
            });
            if constexpr (RUN == 1) dot_rows<Y::FULL, T, P>(s, v, q + j * T * 4);
            else pair_rows<i == 0, T, P>(pairs, v, q + j * T * 4);
          });
          if constexpr (RUN > 1) widen_rows<T, P>(s, pairs);
        });
        unroll<P>(EACH(p) {
          const F scale = b[p].s[ug * PER + part];
          unroll<T>(EACH(t) {
            if constexpr (part == 0) sum[p][t] = f_mul(f_from_i(s[p][t]), scale);
            else sum[p][t] = f_fma(f_from_i(s[p][t]), scale, sum[p][t]);
          });
        });
      });
      q += 32 * T;
      unroll<T>(EACH(t) {
        const F dx = f_set(a.dx[g * T + t]);
        unroll<P>(EACH(p) { acc[p][t] = f_fma(sum[p][t], dx, acc[p][t]); });
      });
      if constexpr (S::MIN) {
        unroll<PER>(EACH(part) {
          unroll<T>(EACH(t) {
            const F dxs = f_set(a.dxs[(g * PER + part) * T + t]);
            unroll<P>(EACH(p) { acc[p][t] = f_fma(b[p].m[ug * PER + part], dxs, acc[p][t]); });
          });
        });
      }
    }
  }
}

// T of the `rows` rows of a tile, from `x` on, times four codes each.
template <int T>
INLINE void multiply_four(I v, I offset, const float* x, int rows, F* sum) {
  const I byte = i_set(255);
  unroll<4>(UNROLLED(c) {
    const F w = f_from_i(i_sub(i_and(i_shift<-8 * c>(v), byte), offset));
    unroll<T>(EACH(t) { sum[t] = f_fma(w, f_set(x[c * rows + t]), sum[t]); });
  });
}

// Float activations, T of a tile's `rows` rows from `first` on, over decoded codes (P8), added to acc; `offset` is
// subtracted exactly before the product.
template <class Y, int T>
INLINE void tile_codes_float(const uint8_t* codes, const uint8_t* scales, int offset, int h, int64_t groups,
                             const ActTile& a, int rows, int first, F* acc) {
  using S = typename Y::Scale;
  constexpr int PER = 32 / S::GROUP;
  const I off = i_set(offset);
  const float *x = a.x + first, *xs = a.xs + first;
  for (int64_t g = 0; g < groups; ++g) {
    ScaleBuffer b;
    S::load(scales + g * S::BYTES, h, b);
    const uint8_t* p8 = codes + g * 512 + 4 * L * h;
    unroll<PER>(EACH(p) {
      F sum[T];
      unroll<T>(EACH(t) { sum[t] = f_zero(); });
      for (int j = 0; j < 8 / PER; ++j) {
        I v = i_load(p8 + 64 * (p * 8 / PER + j));
        multiply_four<T>(v, off, x, rows, sum);
        x += 4 * rows;
      }
      unroll<T>(EACH(t) { acc[t] = f_fma(sum[t], b.s[p], acc[t]); });
      if constexpr (S::MIN) {
        unroll<T>(EACH(t) { acc[t] = f_fma(b.m[p], f_set(xs[(g * PER + p) * rows + t]), acc[t]); });
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
  unroll<T>(EACH(t) { acc[t] = f_zero(); });
  const float* x = a.x;
  const uint8_t* p = data + W::BYTES * L * h;
  for (int64_t g = 0; g < groups; ++g) {
    F sum[T];
    unroll<T>(EACH(t) { sum[t] = f_zero(); });
    for (int k = 0; k < 32; ++k) {
      F w = W::load(p);
      unroll<T>(EACH(t) { sum[t] = f_fma(w, f_set(x[t]), sum[t]); });
      p += W::BYTES * ROWS;
      x += T;
    }
    if constexpr (PER_BLOCK) {
      const F scale = f_set(block_scale[g / 4]);
      unroll<T>(EACH(t) { acc[t] = f_fma(sum[t], scale, acc[t]); });
    } else {
      unroll<T>(EACH(t) { acc[t] = f_add(acc[t], sum[t]); });
    }
  }
}

// Writes all codes of a panel as P8 (table applied) and its scales as float32, in the form ScaleDecoded reads.
template <class Y>
INLINE void decode_panel(const uint8_t* panel, int64_t groups, uint8_t* out_codes, float* out_scales) {
  using S = typename Y::Scale;
  constexpr int UG = S::UNIT / 32, PER = 32 / S::GROUP, WORDS = S::MIN ? 2 : 1;
  const I table = Y::table();
  for (int h = 0; h < HALVES; ++h) {
    for (int64_t unit = 0; unit < groups / UG; ++unit) {
      ScaleBuffer b;
      const uint8_t* at = panel + unit * Y::UNIT_BYTES;
      load_scales<S>(at, h, b);
      for (int i = 0; i < UG * PER; ++i) {
        float* f = out_scales + (unit * UG * PER + i) * WORDS * ROWS + L * h;
        f_store(f, b.s[i]);
        if constexpr (S::MIN) f_store(f + ROWS, b.m[i]);
      }
      for (int ug = 0; ug < UG; ++ug) {
        const int64_t g = unit * UG + ug;
        typename Y::Code c{at + S::BYTES + ug * Y::Code::GROUP_BYTES + 4 * L * h};
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
