// The table of inner kernels per format, filled by kernels_*.cpp and used by the drivers.
#pragma once
#include "tile.h"

namespace slim {

// DIRECT_ROWS: most rows of a tile multiplied straight from packed codes; WIDE_ROWS: of a tile over decoded panels.
#if defined(SLIM_AVX512)
constexpr int DIRECT_ROWS = 8, WIDE_ROWS = 6;
#elif defined(SLIM_AVX2)
constexpr int DIRECT_ROWS = 4, WIDE_ROWS = 3;
#else
constexpr int DIRECT_ROWS = 2, WIDE_ROWS = 2;  // arrays instead of registers: more rows only cost compile time
#endif
constexpr int MAX_ROWS = DIRECT_ROWS > WIDE_ROWS ? DIRECT_ROWS : WIDE_ROWS;

// out [T][16]: one panel times one tile; `block_scale` is that of plain weights that have one per block.
using TileFn = void (*)(const uint8_t* panel, const float* block_scale, int64_t groups, const ActTile& tile,
                        float* out);
using DecodeFn = void (*)(const uint8_t* panel, const Part& part, int64_t groups, uint8_t* out_codes,
                          float* out_scales);

// A format with `bits` 0 has no relayout: its rows stay as in the file and only `decode` reads them (kernels_raw.cpp);
// there `part.panel_bytes` is the bytes of 16 rows and `unit_bytes` those of a file block.
struct FormatKernels {
  int bits, top, offset, group, unit, scale_bytes, unit_bytes;  // top: the largest code
  bool min, full;
  TileFn direct[DIRECT_ROWS + 1];
  DecodeFn decode;
};

// out [T][16], or [2][T][16] for a pair: decoded panels, code_stride and scale_stride bytes apart, times one tile,
// added to out's content unless `first`: K comes in pieces that stay in the nearest cache.
using DecodedFn = void (*)(const Sets& sets, int64_t groups, const ActTile& tile, bool first, float* out);
// The same with float activations; `offset` is that of the codes.
using RealFn = void (*)(const Sets& sets, int64_t groups, const ActTile& tile, int rows, int offset, bool first,
                        float* out);

// Kernels over decoded panels (codes P8, float32 scales). `pair` has the widths of most tiles only, since it takes long
// to compile, and none where vectors hold half a panel.
struct DecodedKernels {
  DecodedFn integer[MAX_ROWS + 1];
  DecodedFn pair[WIDE_ROWS + 1];
  RealFn real;
};

const FormatKernels* packed_kernels(int format);  // null: a plain format or an unknown one
const DecodedKernels& decoded_kernels(const FormatKernels& format);
TileFn plain_kernel(int format, int rows);        // F32, F16, BF16, F8, F8_BLOCK: null otherwise

template <class Y, int T>
void run_direct(const uint8_t* panel, const float*, int64_t groups, const ActTile& tile, float* out) {
  F acc[HALVES][T];
  unroll<HALVES>(EACH(h) { unroll<T>(EACH(t) { acc[h][t] = f_zero(); }); });
  tile_int<Y, T, HALVES>({panel + Y::Scale::BYTES, panel, 0, 0}, groups, tile, acc);
  for (int t = 0; t < T; ++t)
    for (int h = 0; h < HALVES; ++h) f_store(out + t * ROWS + L * h, acc[h][t]);
}

template <class Y>
void run_decode(const uint8_t* panel, const Part&, int64_t groups, uint8_t* out_codes, float* out_scales) {
  decode_panel<Y>(panel, groups, out_codes, out_scales);
}

template <class Y, int... T>
FormatKernels make_kernels(std::integer_sequence<int, T...>) {
  using S = typename Y::Scale;
  return {Y::BITS, Y::TOP, Y::OFFSET, S::GROUP, S::UNIT, S::BYTES, Y::UNIT_BYTES, S::MIN, Y::FULL,
          {nullptr, run_direct<Y, T + 1>...}, run_decode<Y>};
}
template <class Y>
const FormatKernels* kernels_of() {
  static const FormatKernels k = make_kernels<Y>(std::make_integer_sequence<int, DIRECT_ROWS>{});
  return &k;
}

const FormatKernels* kernels_blocks(int format);  // kernels_blocks.cpp
const FormatKernels* kernels_k(int format);       // kernels_k.cpp
const FormatKernels* kernels_tables(int format);  // kernels_tables.cpp
const FormatKernels* kernels_raw(int format);     // kernels_raw.cpp

}  // namespace slim
