// slim_experts: routed experts of a layer. (row, slot) pairs are grouped by expert; each pair is its own activation
// row, so what else an expert serves in the step never shows in a pair's bits.
#include <vector>

#include "multiply.h"
#include "pool.h"

namespace slim {

void silu_rows(const float* gate_up, int64_t rows, int64_t n, bool limited, float limit, float* y);  // rows.cpp

namespace {

enum Scratch { ACTIVATIONS = 2, GATE_UP = 4, ACTIVATED = 5, DOWN = 6 };

struct Group {
  int64_t expert, first, count;  // pairs [first, first + count) in expert order
};

// Products of every group's rows with its expert's parts; source row of pair p is `x + source[p] * row_bytes`.
void grouped(const Part* parts, int parts_per_expert, const std::vector<Group>& groups, const void* x, int x_type,
             const int64_t* source, bool float_activations, float* y, int64_t y_stride) {
  const int64_t columns = parts[0].columns, row_bytes = columns * type_bytes(x_type);
  Needs needs;
  for (int i = 0; i < parts_per_expert; ++i) needs.add(parts[i].format, float_activations);
  std::vector<Activations> activations;
  activations.reserve(groups.size());
  size_t bytes = 0;
  for (const Group& g : groups) {
    activations.emplace_back(needs, columns, g.count, tile_width(g.count));
    bytes += activations.back().bytes();
  }
  uint8_t* memory = (uint8_t*)scratch(ACTIVATIONS, bytes);
  for (Activations& a : activations) {
    a.place(memory);
    memory += a.bytes();
  }
  parallel((int64_t)groups.size(), [&](int64_t i) {
    Activations& own = activations[(size_t)i];
    for (int64_t tile = 0; tile < own.tiles(); ++tile) {
      const void* sources[MAX_ROWS];
      for (int t = 0; t < own.tile_rows(tile); ++t) {
        const int64_t pair = groups[(size_t)i].first + tile * own.width() + t;
        sources[t] = (const uint8_t*)x + (source != nullptr ? source[pair] : pair) * row_bytes;
      }
      own.write_tile(tile, sources, x_type);
    }
  });
  struct Task {
    int64_t group;
    int part;
    int64_t first, last;
  };
  std::vector<Task> tasks;
  for (size_t i = 0; i < groups.size(); ++i) {
    for (int p = 0; p < parts_per_expert; ++p) {
      const Part& part = parts[groups[i].expert * parts_per_expert + p];
      const int64_t panels = num_panels(part);
      const int64_t step = panels_per_task(part, panels * (int64_t)groups.size(), groups[i].count);
      for (int64_t first = 0; first < panels; first += step)
        tasks.push_back({(int64_t)i, p, first, first + step < panels ? first + step : panels});
    }
  }
  parallel((int64_t)tasks.size(), [&](int64_t t) {
    const Task& task = tasks[(size_t)t];
    const Group& g = groups[(size_t)task.group];
    multiply_panels(parts[g.expert * parts_per_expert + task.part], activations[(size_t)task.group], task.first,
                    task.last, float_activations, {y + g.first * y_stride, TYPE_F32, y_stride});
  });
}

}  // namespace

// `gate_up`: parts_per_expert (1 or 2) parts per expert; `down`: one. ids [T, k] are valid; weights [T, k]; y [T, H].
void experts(const Part* gate_up, int parts_per_expert, const Part* down, int64_t num_experts, const void* x,
             int x_type, int64_t rows, int64_t slots, const int64_t* ids, const float* weights, bool limited,
             float limit, bool float_activations, void* y) {
  const int64_t pairs = rows * slots, hidden = down[0].rows, inner = down[0].columns;
  std::vector<int64_t> start((size_t)num_experts + 1, 0), source((size_t)pairs), place((size_t)pairs);
  for (int64_t p = 0; p < pairs; ++p) ++start[(size_t)ids[p] + 1];
  std::vector<Group> groups;
  for (int64_t e = 0; e < num_experts; ++e) {
    if (start[(size_t)e + 1] > 0) groups.push_back({e, start[(size_t)e], start[(size_t)e + 1]});
    start[(size_t)e + 1] += start[(size_t)e];
  }
  for (int64_t p = 0; p < pairs; ++p) {
    place[(size_t)p] = start[(size_t)ids[p]]++;
    source[(size_t)place[(size_t)p]] = p / slots;
  }
  float* both = (float*)scratch(GATE_UP, (size_t)(pairs * 2 * inner) * 4);
  float* activated = (float*)scratch(ACTIVATED, (size_t)(pairs * inner) * 4);
  float* results = (float*)scratch(DOWN, (size_t)(pairs * hidden) * 4);
  grouped(gate_up, parts_per_expert, groups, x, x_type, source.data(), float_activations, both, 2 * inner);
  silu_rows(both, pairs, inner, limited, limit, activated);
  grouped(down, 1, groups, activated, TYPE_F32, nullptr, float_activations, results, hidden);
  parallel(rows, [&](int64_t t) {
    for (int64_t i = 0; i < hidden; ++i) {
      float total = 0.0f;
      for (int64_t j = 0; j < slots; ++j)
        total += weights[t * slots + j] * results[place[(size_t)(t * slots + j)] * hidden + i];
      write_value(y, t * hidden + i, x_type, total);
    }
  });
}

}  // namespace slim

extern "C" void slim_experts(const slim::Part* gate_up, int parts_per_expert, const slim::Part* down,
                             int64_t num_experts, const void* x, int x_type, int64_t rows, int64_t slots,
                             const int64_t* ids, const float* weights, int limited, float limit,
                             int float_activations, void* y) {
  if (rows <= 0 || slots <= 0) return;
  slim::experts(gate_up, parts_per_expert, down, num_experts, x, x_type, rows, slots, ids, weights, limited != 0,
                limit, float_activations != 0, y);
}
