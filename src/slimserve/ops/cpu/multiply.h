// Products of activation tiles with panels, shared by linear and expert_linear.
#pragma once
#include "activations.h"

namespace slim {

struct Output {
  void* data;
  int32_t type;
  int64_t stride;        // elements between rows
};

INLINE int64_t num_panels(const Part& part) { return (part.rows + ROWS - 1) / ROWS; }

// Multiplies panels [first, last) of `part` with all activation rows. Called from one thread.
void multiply_panels(const Part& part, const Activations& x, int64_t first, int64_t last, bool float_activations,
                     const Output& out);

// How many panels one task should take, from the bytes (few rows) or the work (many rows) of a panel.
int64_t panels_per_task(const Part& part, int64_t total_panels, int64_t rows);

// Calls with at most this many rows multiply packed codes, decoded anew for each tile: measured, a panel decoded for
// all tiles pays from there on.
constexpr int64_t PACKED_ROWS = DIRECT_ROWS * 6;

// Width of activation tiles for a call with `rows` rows.
INLINE int tile_width(int64_t rows) {
  if (rows > PACKED_ROWS) return WIDE_ROWS;
  const int64_t tiles = (rows + DIRECT_ROWS - 1) / DIRECT_ROWS;
  return tiles > 1 ? (int)((rows + tiles - 1) / tiles) : rows > 0 ? (int)rows : 1;
}

}  // namespace slim
