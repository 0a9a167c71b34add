#include "multiply.h"

#include "pool.h"

namespace slim {
namespace {

enum Scratch { CODES = 0, SCALES = 1, ACCUMULATORS = 3 };
constexpr int64_t TILE_BYTES = 512 << 10;  // of activations and accumulators that stay near the core

// acc [width][16], scaled and with bias, to the rows of one tile.
void store(const Part& part, int64_t panel, const float* acc, int64_t first_row, int width, const Output& out) {
  const int64_t n0 = panel * ROWS;
  const int count = (int)(part.rows - n0 < ROWS ? part.rows - n0 : ROWS);
  F scale[HALVES], bias[HALVES];
  for (int h = 0; h < HALVES; ++h) {
    const int lanes = count - L * h < 0 ? 0 : count - L * h > L ? L : count - L * h;
    if (part.row_scale != nullptr) scale[h] = f_load_n(part.row_scale + n0 + L * h, lanes);
    if (part.bias != nullptr) bias[h] = f_load_n(part.bias + n0 + L * h, lanes);
  }
  for (int t = 0; t < width; ++t) {
    const int64_t at = (first_row + t) * out.stride + part.out_column + n0;
    alignas(64) float value[ROWS];
    const bool direct = out.type == TYPE_F32 && count == ROWS;
    float* to = direct ? (float*)out.data + at : value;
    for (int h = 0; h < HALVES; ++h) {
      F x = f_load(acc + t * ROWS + L * h);
      if (part.row_scale != nullptr) x = f_mul(x, scale[h]);
      if (part.bias != nullptr) x = f_add(x, bias[h]);
      f_store(to + L * h, x);
    }
    if (direct) continue;
    for (int i = 0; i < count; ++i) write_value(out.data, at + i, out.type, value[i]);
  }
}

const float* plain_scales(const Part& part, int64_t panel) {
  if (part.block_scale == nullptr) return nullptr;
  return part.block_scale + panel * ROWS / 128 * ((part.columns + 127) / 128);
}

void multiply_direct(const Part& part, const FormatKernels* k, const Activations& x, int64_t first, int64_t last,
                     const Output& out) {
  alignas(64) float acc[DIRECT_ROWS * ROWS];
  for (int64_t panel = first; panel < last; ++panel) {
    for (int64_t tile = 0; tile < x.tiles(); ++tile) {
      const int width = x.tile_rows(tile);
      const ActTile view = x.view(tile, k->group, k->offset);
      k->direct[width](part.data + panel * part.panel_bytes, nullptr, x.groups(), view, acc);
      store(part, panel, acc, tile * x.width(), width, out);
    }
  }
}

void multiply_plain(const Part& part, const Activations& x, int64_t first, int64_t last, const Output& out) {
  alignas(64) float acc[MAX_ROWS * ROWS];
  for (int64_t panel = first; panel < last; ++panel) {
    const uint8_t* data = part.data + panel * part.panel_bytes;
    for (int64_t i = 0; i < x.tiles(); ++i) {
      const int width = x.tile_rows(i);
      plain_kernel(part.format, width)(data, plain_scales(part, panel), x.groups(), x.view(i, 32, 0), acc);
      store(part, panel, acc, i * x.width(), width, out);
    }
  }
}

// A block of panels times a block of tiles: K comes in pieces, whose panels are decoded once and used for every tile
// while they lie in the nearest caches.
struct Block {
  static constexpr int64_t PANELS = 8, PIECE = 32;  // 32 groups of 512 bytes per panel
  static constexpr int64_t SLOT = 2 * MAX_ROWS * ROWS;  // accumulators of a pair of panels and a tile
  const Part& part;
  const FormatKernels& k;
  const Activations& x;
  bool real;
  const Output& out;
  const DecodedKernels& kernels;
  int64_t scale_bytes;  // decoded scales of one group
  uint8_t *codes, *scales;

  void decode(int64_t panel, int64_t index, int64_t g, int64_t count) const {
    const uint8_t* data = part.data + panel * part.panel_bytes + g * 32 / k.unit * k.unit_bytes;
    Part own = part;
    own.rows = part.rows - panel * ROWS;  // raw rows past the end must not be read
    k.decode(data, own, count, codes + index * PIECE * 512, (float*)(scales + index * PIECE * scale_bytes));
  }

  void run(int64_t first, int64_t panels, int64_t tile0, int64_t tile1, float* acc) const {
    const int per = 32 / k.group;
    const bool pairs = !real && kernels.pair[WIDE_ROWS] != nullptr && x.width() == WIDE_ROWS;
    for (int64_t g = 0; g < x.groups(); g += PIECE) {
      const int64_t count = x.groups() - g < PIECE ? x.groups() - g : PIECE;
      for (int64_t i = 0; i < panels; ++i) decode(first + i, i, g, count);
      for (int64_t i = 0; i < panels;) {
        const bool pair = pairs && i + 1 < panels;
        const auto sets = [&](int64_t j) -> Sets {
          return {codes + j * PIECE * 512, scales + j * PIECE * scale_bytes, PIECE * 512, PIECE * scale_bytes};
        };
        for (int64_t tile = tile0; tile < tile1; ++tile) {
          const int width = x.tile_rows(tile);
          float* own = acc + ((tile - tile0) * PANELS + i) * (SLOT / 2);
          const ActTile view = x.view(tile, k.group, k.offset).from(g, width, per);
          if (real) {
            kernels.real(sets(i), count, view, width, k.offset, g == 0, own);
          } else if (pair && kernels.pair[width] != nullptr) {
            kernels.pair[width](sets(i), count, view, g == 0, own);
          } else {
            kernels.integer[width](sets(i), count, view, g == 0, own);
            if (pair) kernels.integer[width](sets(i + 1), count, view, g == 0, own + width * ROWS);
          }
          if (g + count < x.groups()) continue;
          store(part, first + i, own, tile * x.width(), width, out);
          if (pair) store(part, first + i + 1, own + width * ROWS, tile * x.width(), width, out);
        }
        i += pair ? 2 : 1;
      }
    }
  }
};

void multiply_decoded(const Part& part, const FormatKernels* k, const Activations& x, int64_t first, int64_t last,
                      bool real, const Output& out) {
  const int64_t scale_bytes = (32 / k->group) * (k->min ? 2 : 1) * ROWS * 4;
  const Block block{part, *k, x, real, out, decoded_kernels(*k), scale_bytes,
                    (uint8_t*)scratch(CODES, (size_t)(Block::PANELS * Block::PIECE * 512)),
                    (uint8_t*)scratch(SCALES, (size_t)(Block::PANELS * Block::PIECE * scale_bytes))};
  const int64_t piece_bytes = x.tile_bytes() / ((x.groups() + Block::PIECE - 1) / Block::PIECE);
  int64_t chunk = TILE_BYTES / (piece_bytes + Block::PANELS * Block::SLOT * 2);
  if (chunk < 1) chunk = 1;
  if (chunk > x.tiles()) chunk = x.tiles();
  float* acc = (float*)scratch(ACCUMULATORS, (size_t)(chunk * Block::PANELS * Block::SLOT / 2) * 4);
  for (int64_t tile0 = 0; tile0 < x.tiles(); tile0 += chunk) {
    const int64_t tile1 = tile0 + chunk < x.tiles() ? tile0 + chunk : x.tiles();
    for (int64_t base = first; base < last; base += Block::PANELS)
      block.run(base, last - base < Block::PANELS ? last - base : Block::PANELS, tile0, tile1, acc);
  }
}

}  // namespace

void multiply_panels(const Part& part, const Activations& x, int64_t first, int64_t last, bool float_activations,
                     const Output& out) {
  const FormatKernels* k = packed_kernels(part.format);
  if (k == nullptr) {
    multiply_plain(part, x, first, last, out);
  } else if (x.rows() <= PACKED_ROWS && !float_activations && k->bits != 0) {
    multiply_direct(part, k, x, first, last, out);
  } else {
    multiply_decoded(part, k, x, first, last, float_activations, out);
  }
}

int64_t panels_per_task(const Part& part, int64_t total_panels, int64_t rows) {
  int64_t count = (64 << 10) / (part.panel_bytes > 0 ? part.panel_bytes : 1);
  if (rows > PACKED_ROWS) count = 8;
  const int64_t share = total_panels / (4 * pool_threads());
  if (count > share) count = share;
  return count < 1 ? 1 : count;
}

}  // namespace slim
