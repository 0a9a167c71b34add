#include "kernels.h"

namespace slim {
namespace {

// Rows [t, t + T) of a tile, then the rest, in ever fewer: widths are few because each takes its time to compile.
template <class Y, int T>
void run_real_rows(const Sets& sets, int64_t groups, const ActTile& tile, int rows, int t, int offset, bool first,
                   float* out) {
  for (; rows - t >= T; t += T) {
    for (int h = 0; h < HALVES; ++h) {
      F acc[T];
      float* at = out + t * ROWS + L * h;
      unroll<T>(EACH(i) { acc[i] = first ? f_zero() : f_load(at + i * ROWS); });
      tile_codes_float<Y, T>(sets.codes, sets.scales, offset, h, groups, tile, rows, t, acc);
      unroll<T>(EACH(i) { f_store(at + i * ROWS, acc[i]); });
    }
  }
  if constexpr (T > 1) {
    if (t < rows) run_real_rows<Y, (T > 4 ? 4 : T > 2 ? 2 : 1)>(sets, groups, tile, rows, t, offset, first, out);
  }
}
template <class Y>
void run_real(const Sets& sets, int64_t groups, const ActTile& tile, int rows, int offset, bool first, float* out) {
  run_real_rows<Y, WIDE_ROWS>(sets, groups, tile, rows, 0, offset, first, out);
}

// P sets: the halves of one panel, or two panels.
template <class Y, int T, int P>
void run_decoded(const Sets& sets, int64_t groups, const ActTile& tile, bool first, float* out) {
  const auto at = [&](int p, int t) { return L == ROWS ? out + (p * T + t) * ROWS : out + t * ROWS + L * p; };
  F acc[P][T];
  unroll<P>(EACH(p) { unroll<T>(EACH(t) { acc[p][t] = first ? f_zero() : f_load(at(p, t)); }); });
  tile_int<Y, T, P>(sets, groups, tile, acc);
  unroll<P>(EACH(p) { unroll<T>(EACH(t) { f_store(at(p, t), acc[p][t]); }); });
}

template <class Y, int... T>
DecodedKernels make_decoded(std::integer_sequence<int, T...>) {
  DecodedKernels k{{nullptr, run_decoded<Y, T + 1, HALVES>...}, {nullptr}, run_real<Y>};
  if constexpr (L == ROWS) {
    if constexpr (WIDE_ROWS > 4) k.pair[4] = run_decoded<Y, 4, 2>;
    k.pair[WIDE_ROWS] = run_decoded<Y, WIDE_ROWS, 2>;
  }
  return k;
}
template <class Y>
const DecodedKernels& decoded_of() {
  static const DecodedKernels k = make_decoded<Y>(std::make_integer_sequence<int, MAX_ROWS>{});
  return k;
}

template <class W, int T, bool PER_BLOCK>
void run_plain(const uint8_t* panel, const float* block_scale, int64_t groups, const ActTile& tile, float* out) {
  for (int h = 0; h < HALVES; ++h) {
    F acc[T];
    tile_plain<W, T, PER_BLOCK>(panel, block_scale, h, groups, tile, acc);
    for (int t = 0; t < T; ++t) f_store(out + t * ROWS + L * h, acc[t]);
  }
}

template <class W, bool PER_BLOCK, int... T>
TileFn plain_of(int rows, std::integer_sequence<int, T...>) {
  static const TileFn k[] = {nullptr, run_plain<W, T + 1, PER_BLOCK>...};
  return k[rows];
}

}  // namespace

const DecodedKernels& decoded_kernels(const FormatKernels& format) {
  if (format.full) return decoded_of<LayoutDecoded<32, false, true, 255>>();
  if (format.min) {  // codes of five bits and fewer
    return format.group == 32 ? decoded_of<LayoutDecoded<32, true, false, 31>>()
                              : decoded_of<LayoutDecoded<16, true, false, 31>>();
  }
  if (format.group == 32) {
    return format.top <= 31 ? decoded_of<LayoutDecoded<32, false, false, 31>>()
                            : decoded_of<LayoutDecoded<32, false, false, 127>>();
  }
  return format.top <= 63 ? decoded_of<LayoutDecoded<16, false, false, 63>>()
                          : decoded_of<LayoutDecoded<16, false, false, 127>>();
}

TileFn plain_kernel(int format, int rows) {
  constexpr auto all = std::make_integer_sequence<int, MAX_ROWS>{};
  switch (format) {
    case F32: return plain_of<LoadF32, false>(rows, all);
    case F16: return plain_of<LoadF16, false>(rows, all);
    case BF16: return plain_of<LoadBF16, false>(rows, all);
    case F8: return plain_of<LoadF8, false>(rows, all);
    case F8_BLOCK: return plain_of<LoadF8, true>(rows, all);
    default: return nullptr;
  }
}

const FormatKernels* packed_kernels(int format) {
  if (const FormatKernels* k = kernels_blocks(format)) return k;
  if (const FormatKernels* k = kernels_k(format)) return k;
  if (const FormatKernels* k = kernels_tables(format)) return k;
  return kernels_raw(format);
}

}  // namespace slim
