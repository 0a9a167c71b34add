// slim_linear: several packed parts times the same activation rows, activations prepared once.
#include "multiply.h"
#include "pool.h"

namespace slim {

void silu_rows(const float* gate_up, int64_t rows, int64_t n, bool limited, float limit, float* y);  // rows.cpp
void gelu_rows(const float* gate_up, int64_t rows, int64_t n, float* y);

namespace {

enum Scratch { ACTIVATIONS = 2, GATE_UP = 4, ACTIVATED = 5 };
constexpr int64_t ALONE_ELEMENTS = 1 << 15;  // fewer activations are prepared by the calling thread

}  // namespace

void linear(const Part* parts, int num_parts, const void* x, int x_type, int64_t rows, const Output& out,
            bool float_activations) {
  if (rows <= 0) return;
  Needs needs;
  for (int i = 0; i < num_parts; ++i) needs.add(parts[i].format, float_activations);
  const int64_t columns = parts[0].columns;
  Activations activations(needs, columns, rows, tile_width(rows));
  activations.place((uint8_t*)scratch(ACTIVATIONS, activations.bytes()));
  const int64_t row_bytes = columns * type_bytes(x_type);
  const auto write_tile = [&](int64_t tile) {
    const void* sources[MAX_ROWS];
    for (int t = 0; t < activations.tile_rows(tile); ++t)
      sources[t] = (const uint8_t*)x + (tile * activations.width() + t) * row_bytes;
    activations.write_tile(tile, sources, x_type);
  };
  if (rows * columns <= ALONE_ELEMENTS) {
    for (int64_t tile = 0; tile < activations.tiles(); ++tile) write_tile(tile);
  } else {
    parallel(activations.tiles(), write_tile);
  }
  int64_t total = 0;
  for (int i = 0; i < num_parts; ++i) total += num_panels(parts[i]);
  constexpr int MAX_PARTS = 16;
  int64_t start[MAX_PARTS + 1] = {0}, per_task[MAX_PARTS];
  for (int i = 0; i < num_parts; ++i) {
    per_task[i] = panels_per_task(parts[i], total, rows);
    start[i + 1] = start[i] + (num_panels(parts[i]) + per_task[i] - 1) / per_task[i];
  }
  parallel(start[num_parts], [&](int64_t task) {
    int i = 0;
    while (task >= start[i + 1]) ++i;
    const int64_t first = (task - start[i]) * per_task[i], panels = num_panels(parts[i]);
    const int64_t last = first + per_task[i] < panels ? first + per_task[i] : panels;
    multiply_panels(parts[i], activations, first, last, float_activations, out);
  });
}

}  // namespace slim

extern "C" void slim_linear(const slim::Part* parts, int num_parts, const void* x, int x_type, int64_t rows, void* y,
                            int y_type, int64_t y_stride, int float_activations) {
  slim::linear(parts, num_parts, x, x_type, rows, {y, y_type, y_stride}, float_activations != 0);
}

// y = down(act(gate) * up) in one call; `gate_up` gives 2 F outputs, gate first. kind 0: SiLU, 1: SiLU with limit,
// 2: GELU (tanh). The rows between stay float32.
extern "C" void slim_gated_mlp(const slim::Part* gate_up, int num_gate_up, const slim::Part* down, int num_down,
                               const void* x, int x_type, int64_t rows, int kind, float limit, void* y, int y_type,
                               int64_t y_stride, int float_activations) {
  using namespace slim;
  constexpr int64_t PIECE = 256;  // rows whose intermediate values stay in cache
  const int64_t inner = down[0].columns, most = rows < PIECE ? rows : PIECE;
  float* both = (float*)scratch(GATE_UP, (size_t)(most * 2 * inner) * 4);
  float* activated = (float*)scratch(ACTIVATED, (size_t)(most * inner) * 4);
  for (int64_t first = 0; first < rows; first += PIECE) {
    const int64_t count = rows - first < PIECE ? rows - first : PIECE;
    const uint8_t* in = (const uint8_t*)x + first * gate_up[0].columns * type_bytes(x_type);
    uint8_t* out = (uint8_t*)y + first * y_stride * type_bytes(y_type);
    linear(gate_up, num_gate_up, in, x_type, count, {both, TYPE_F32, 2 * inner}, float_activations != 0);
    if (kind == 2) gelu_rows(both, count, inner, activated);
    else silu_rows(both, count, inner, kind == 1, limit, activated);
    linear(down, num_down, activated, TYPE_F32, count, {out, y_type, y_stride}, float_activations != 0);
  }
}
