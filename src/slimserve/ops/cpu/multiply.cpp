#include "multiply.h"

#include "pool.h"

namespace slim {
namespace {

enum Scratch { CODES = 0, SCALES = 1 };
constexpr int64_t CACHE_BYTES = 256 << 10;  // of decoded codes, and of activations, that stay near the core

// acc [w][16] (+ bias) to the rows of one tile.
void store(const Part& part, int64_t panel, const float* acc, int64_t first_row, int width, const Output& out) {
  const int64_t n0 = panel * ROWS;
  const int count = (int)(part.rows - n0 < ROWS ? part.rows - n0 : ROWS);
  for (int t = 0; t < width; ++t) {
    const int64_t at = (first_row + t) * out.stride + part.out_column + n0;
    alignas(64) float value[ROWS];
    std::memcpy(value, acc + t * ROWS, sizeof value);
    if (part.row_scale != nullptr)
      for (int i = 0; i < count; ++i) value[i] *= part.row_scale[n0 + i];
    if (part.bias != nullptr)
      for (int i = 0; i < count; ++i) value[i] += part.bias[n0 + i];
    if (out.type == TYPE_F32) {
      std::memcpy((float*)out.data + at, value, 4 * (size_t)count);
    } else {
      for (int i = 0; i < count; ++i) write_value(out.data, at + i, out.type, value[i]);
    }
  }
}

const uint8_t* plain_scales(const Part& part, int64_t panel) {
  if (part.block_scale == nullptr) return nullptr;
  return (const uint8_t*)(part.block_scale + panel * ROWS / 128 * ((part.columns + 127) / 128));
}

void multiply_direct(const Part& part, const FormatKernels* k, const Activations& x, int64_t first, int64_t last,
                     const Output& out) {
  alignas(64) float acc[DIRECT_ROWS * ROWS];
  const ActTile tile = x.view(0, k->group, k->offset);
  const int width = x.tile_rows(0);
  const TileFn run = k->direct[width];
  for (int64_t panel = first; panel < last; ++panel) {
    const uint8_t* data = part.data + panel * part.panel_bytes;
    run(data, data + part.scale_offset, part, x.groups(), tile, acc);
    store(part, panel, acc, 0, width, out);
  }
}

void multiply_plain(const Part& part, const Activations& x, int64_t first, int64_t last, const Output& out) {
  alignas(64) float acc[TILE_ROWS * ROWS];
  for (int64_t panel = first; panel < last; ++panel) {
    const uint8_t* data = part.data + panel * part.panel_bytes;
    for (int64_t i = 0; i < x.tiles(); ++i) {
      const int width = x.tile_rows(i);
      plain_kernel(part.format, width)(data, plain_scales(part, panel), part, x.groups(), x.view(i, 32, 0), acc);
      store(part, panel, acc, i * x.width(), width, out);
    }
  }
}

// Panels are decoded a few at a time and used for as many tiles as stay in cache.
void multiply_decoded(const Part& part, const FormatKernels* k, const Activations& x, int64_t first, int64_t last,
                      bool float_activations, const Output& out) {
  const int64_t code_bytes = x.groups() * 512;
  const int64_t scale_bytes = x.groups() * (32 / k->group) * (k->min ? 2 : 1) * ROWS * 4;
  int64_t batch = CACHE_BYTES / (code_bytes + scale_bytes);
  if (batch < 1) batch = 1;
  if (batch > last - first) batch = last - first;
  uint8_t* codes = (uint8_t*)scratch(CODES, (size_t)(batch * code_bytes));
  float* scales = (float*)scratch(SCALES, (size_t)(batch * scale_bytes));
  const DecodedKernels& kernels = decoded_kernels(k->group, k->min, k->full);
  int64_t chunk = CACHE_BYTES / x.tile_bytes();
  if (chunk < 1) chunk = 1;
  alignas(64) float acc[(TILE_ROWS > DIRECT_ROWS ? TILE_ROWS : DIRECT_ROWS) * ROWS];
  for (int64_t base = first; base < last; base += batch) {
    const int64_t count = last - base < batch ? last - base : batch;
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* data = part.data + (base + i) * part.panel_bytes;
      Part panel = part;
      panel.rows = part.rows - (base + i) * ROWS;  // raw rows past the end must not be read
      k->decode(data, data + part.scale_offset, panel, x.groups(), codes + i * code_bytes,
                (float*)((uint8_t*)scales + i * scale_bytes));
    }
    for (int64_t tile0 = 0; tile0 < x.tiles(); tile0 += chunk) {
      const int64_t tile1 = tile0 + chunk < x.tiles() ? tile0 + chunk : x.tiles();
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t tile = tile0; tile < tile1; ++tile) {
          const int width = x.tile_rows(tile);
          const TileFn run = float_activations ? kernels.real[width] : kernels.integer[width];
          run(codes + i * code_bytes, (const uint8_t*)scales + i * scale_bytes, part, x.groups(),
              x.view(tile, k->group, k->offset), acc);
          store(part, base + i, acc, tile * x.width(), width, out);
        }
      }
    }
  }
}

}  // namespace

void multiply_panels(const Part& part, const Activations& x, int64_t first, int64_t last, bool float_activations,
                     const Output& out) {
  const FormatKernels* k = packed_kernels(part.format);
  if (k == nullptr) {
    multiply_plain(part, x, first, last, out);
  } else if (x.tiles() == 1 && !float_activations && k->bits != 0 && x.tile_rows(0) <= DIRECT_ROWS) {
    multiply_direct(part, k, x, first, last, out);
  } else {
    multiply_decoded(part, k, x, first, last, float_activations, out);
  }
}

int64_t panels_per_task(const Part& part, int64_t total_panels, int64_t rows) {
  int64_t count = (64 << 10) / (part.panel_bytes > 0 ? part.panel_bytes : 1);
  if (rows > DIRECT_ROWS) count = 8;
  const int64_t share = total_panels / (4 * pool_threads());
  if (count > share) count = share;
  return count < 1 ? 1 : count;
}

}  // namespace slim
