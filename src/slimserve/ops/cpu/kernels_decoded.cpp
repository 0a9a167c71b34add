#include "kernels.h"

namespace slim {
namespace {

template <class Y, int T>
void run_codes_float(const uint8_t* codes, const uint8_t* scales, const Part& part, int64_t groups,
                     const ActTile& tile, float* out) {
  const int offset = packed_kernels(part.format)->offset;
  for (int h = 0; h < HALVES; ++h) {
    F acc[T];
    tile_codes_float<Y, T>(codes, scales, offset, h, groups, tile, acc);
    for (int t = 0; t < T; ++t) f_store(out + t * ROWS + L * h, acc[t]);
  }
}

template <class Y, int... T>
DecodedKernels make_decoded(std::integer_sequence<int, T...>) {
  return {{nullptr, run_direct<Y, T + 1>...}, {nullptr, run_codes_float<Y, T + 1>...}};
}
template <class Y>
const DecodedKernels& decoded_of() {
  static const DecodedKernels k = make_decoded<Y>(std::make_integer_sequence<int, TILE_ROWS>{});
  return k;
}

template <class W, int T, bool PER_BLOCK>
void run_plain(const uint8_t* codes, const uint8_t* scales, const Part&, int64_t groups, const ActTile& tile,
               float* out) {
  for (int h = 0; h < HALVES; ++h) {
    F acc[T];
    tile_plain<W, T, PER_BLOCK>(codes, (const float*)scales, h, groups, tile, acc);
    for (int t = 0; t < T; ++t) f_store(out + t * ROWS + L * h, acc[t]);
  }
}

template <class W, bool PER_BLOCK, int... T>
TileFn plain_of(int rows, std::integer_sequence<int, T...>) {
  static const TileFn k[] = {nullptr, run_plain<W, T + 1, PER_BLOCK>...};
  return k[rows];
}

}  // namespace

const DecodedKernels& decoded_kernels(int group, bool min, bool full) {
  if (full) return decoded_of<LayoutDecoded<32, false, true>>();
  if (group == 32) return min ? decoded_of<LayoutDecoded<32, true, false>>() : decoded_of<LayoutDecoded<32, false, false>>();
  return min ? decoded_of<LayoutDecoded<16, true, false>>() : decoded_of<LayoutDecoded<16, false, false>>();
}

TileFn plain_kernel(int format, int rows) {
  constexpr auto all = std::make_integer_sequence<int, TILE_ROWS>{};
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
