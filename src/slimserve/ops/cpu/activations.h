// Activation rows in the form the tiles read, written once per call and shared by all parts.
#pragma once
#include "kernels.h"

namespace slim {

enum Type : int32_t { TYPE_F32 = 0, TYPE_BF16 = 1, TYPE_F16 = 2, TYPE_F8 = 3 };

// What the parts of a call need from the activations.
struct Needs {
  static constexpr int MAX_INITS = 12;
  bool integer = false, real = false;
  bool min_group[2] = {false, false};  // sums per 32, per 16
  int num_inits = 0;
  int init_group[MAX_INITS], init_offset[MAX_INITS];

  void add(int format, bool float_activations);
  int find(int group, int offset) const;
};

// Rows [0, T) of a workspace, in tiles of `width` rows (the last may be narrower).
class Activations {
 public:
  Activations(const Needs& needs, int64_t columns, int64_t rows, int width);
  size_t bytes() const { return (size_t)(tiles() * tile_bytes_); }
  void place(uint8_t* memory) { memory_ = memory; }
  int64_t tiles() const { return (rows_ + width_ - 1) / width_; }
  int tile_rows(int64_t tile) const { return (int)(rows_ - tile * width_ < width_ ? rows_ - tile * width_ : width_); }
  int64_t tile_bytes() const { return tile_bytes_; }
  int64_t groups() const { return groups_; }
  int64_t width() const { return width_; }
  int64_t rows() const { return rows_; }
  // The view of one tile for a format's kernels.
  ActTile view(int64_t tile, int group, int offset) const;
  // Quantizes or copies the rows of a tile; `sources` holds one pointer to columns_ values of `type` per row.
  void write_tile(int64_t tile, const void* const* sources, int type);

 private:
  void write_group(uint8_t* m, int64_t g, int t, int w, const void* source, int type);
  void write_integers(uint8_t* m, int64_t g, int t, int w, const float* x);

  const Needs& needs_;
  int64_t columns_, groups_, rows_;
  int width_;
  int64_t tile_bytes_ = 0, at_q_ = 0, at_dx_ = 0, at_init_[Needs::MAX_INITS] = {}, at_dxs_[2] = {}, at_x_ = 0,
          at_xs_[2] = {};
  uint8_t* memory_ = nullptr;
};

INLINE float read_value(const void* p, int64_t i, int type) {
  switch (type) {
    case TYPE_BF16: return bf16_to_float(((const uint16_t*)p)[i]);
    case TYPE_F16: return half_to_float(((const uint16_t*)p)[i]);
    case TYPE_F8: return e4m3_to_float(((const uint8_t*)p)[i]);
    default: return ((const float*)p)[i];
  }
}

uint16_t float_to_half(float x);

INLINE void write_value(void* p, int64_t i, int type, float x) {
  switch (type) {
    case TYPE_BF16: ((uint16_t*)p)[i] = float_to_bf16(x); break;
    case TYPE_F16: ((uint16_t*)p)[i] = float_to_half(x); break;
    default: ((float*)p)[i] = x;
  }
}

INLINE int64_t type_bytes(int type) { return type == TYPE_F32 ? 4 : type == TYPE_F8 ? 1 : 2; }

}  // namespace slim
