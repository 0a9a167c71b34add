// Formats whose codes index tables of vectors, or hold base-3 digits: rows stay as in the file and are decoded to
// bytes (value + 64) and float32 scales, a panel at a time. Layouts: slimserve/quant/decode_grid.py.
#include "kernels.h"

namespace slim {
namespace {

// Table vectors as int8, set once by slim_set_grid from slimserve.quant.grids: IQ2_XXS, IQ2_XS, IQ2_S (8 wide),
// IQ3_XXS, IQ3_S (4 wide), IQ1 (8 wide), and the 128 sign bytes of 7-bit indices.
enum Grid { GRID_2XXS, GRID_2XS, GRID_2S, GRID_3XXS, GRID_3S, GRID_1, GRID_SIGNS, NUM_GRIDS };
const int8_t* grids[NUM_GRIDS];

INLINE uint16_t u16_at(const uint8_t* p) {
  uint16_t x;
  std::memcpy(&x, p, 2);
  return x;
}
INLINE uint32_t u32_at(const uint8_t* p) {
  uint32_t x;
  std::memcpy(&x, p, 4);
  return x;
}
INLINE float half_at(const uint8_t* p) { return half_to_float(u16_at(p)); }

INLINE void signed8(int8_t* v, const int8_t* values, uint8_t signs) {
  for (int i = 0; i < 8; ++i) v[i] = (signs >> i & 1) ? (int8_t)-values[i] : values[i];
}
INLINE void signed44(int8_t* v, const int8_t* first, const int8_t* second, uint8_t signs) {
  int8_t both[8];
  std::memcpy(both, first, 4);
  std::memcpy(both + 4, second, 4);
  signed8(v, both, signs);
}

// Each Block type: bytes, elements per scale, and decode of 256 elements to values v and scales s.
struct Iq2Xxs {
  static constexpr int BYTES = 66, GROUP = 32;
  static INLINE void decode(const uint8_t* b, int8_t* v, float* s) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const uint8_t* f = b + 2 + 8 * g;
      const uint32_t word = u32_at(f + 4);
      s[g] = d * (0.5f + (float)(word >> 28)) * 0.25f;
      for (int i = 0; i < 4; ++i)
        signed8(v + 32 * g + 8 * i, grids[GRID_2XXS] + 8 * f[i], (uint8_t)grids[GRID_SIGNS][word >> (7 * i) & 127]);
    }
  }
};

struct Iq2Xs {
  static constexpr int BYTES = 74, GROUP = 16;
  static INLINE void decode(const uint8_t* b, int8_t* v, float* s) {
    const float d = half_at(b);
    for (int i = 0; i < 16; ++i) s[i] = d * (0.5f + (float)(b[66 + i / 2] >> (4 * (i & 1)) & 15)) * 0.25f;
    for (int i = 0; i < 32; ++i) {
      const uint16_t code = u16_at(b + 2 + 2 * i);
      signed8(v + 8 * i, grids[GRID_2XS] + 8 * (code & 511), (uint8_t)grids[GRID_SIGNS][code >> 9]);
    }
  }
};

struct Iq2S {
  static constexpr int BYTES = 82, GROUP = 16;
  static INLINE void decode(const uint8_t* b, int8_t* v, float* s) {
    const float d = half_at(b);
    for (int i = 0; i < 16; ++i) s[i] = d * (0.5f + (float)(b[74 + i / 2] >> (4 * (i & 1)) & 15)) * 0.25f;
    for (int i = 0; i < 32; ++i) {
      const int index = b[2 + i] | (b[66 + i / 4] >> (2 * (i & 3)) & 3) << 8;
      signed8(v + 8 * i, grids[GRID_2S] + 8 * index, b[34 + i]);
    }
  }
};

struct Iq3Xxs {
  static constexpr int BYTES = 98, GROUP = 32;
  static INLINE void decode(const uint8_t* b, int8_t* v, float* s) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const uint32_t word = u32_at(b + 66 + 4 * g);
      s[g] = d * (0.5f + (float)(word >> 28)) * 0.5f;
      for (int i = 0; i < 4; ++i) {
        const uint8_t* q = b + 2 + 8 * g + 2 * i;
        signed44(v + 32 * g + 8 * i, grids[GRID_3XXS] + 4 * q[0], grids[GRID_3XXS] + 4 * q[1],
                 (uint8_t)grids[GRID_SIGNS][word >> (7 * i) & 127]);
      }
    }
  }
};

struct Iq3S {
  static constexpr int BYTES = 110, GROUP = 32;
  static INLINE void decode(const uint8_t* b, int8_t* v, float* s) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) s[g] = d * (1.0f + 2.0f * (float)(b[106 + g / 2] >> (4 * (g & 1)) & 15));
    for (int i = 0; i < 32; ++i) {
      const int high = b[66 + i / 4] >> (2 * (i & 3));
      const int first = b[2 + 2 * i] | (high & 1) << 8, second = b[3 + 2 * i] | (high >> 1 & 1) << 8;
      signed44(v + 8 * i, grids[GRID_3S] + 4 * first, grids[GRID_3S] + 4 * second, b[74 + i]);
    }
  }
};

INLINE void delta8(int8_t* v, int index, bool negative) {
  const int8_t* row = grids[GRID_1] + 8 * index;
  for (int i = 0; i < 8; ++i) v[i] = (int8_t)(8 * row[i] + (negative ? -1 : 1));
}

struct Iq1S {
  static constexpr int BYTES = 50, GROUP = 32;
  static INLINE void decode(const uint8_t* b, int8_t* v, float* s) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const uint16_t qh = u16_at(b + 34 + 2 * g);
      s[g] = d * (float)(2 * (qh >> 12 & 7) + 1) * 0.125f;
      for (int i = 0; i < 4; ++i)
        delta8(v + 32 * g + 8 * i, b[2 + 4 * g + i] | (qh >> (3 * i) & 7) << 8, (qh & 0x8000) != 0);
    }
  }
};

struct Iq1M {
  static constexpr int BYTES = 56, GROUP = 16;
  static INLINE void decode(const uint8_t* b, int8_t* v, float* s) {
    uint16_t words[4], bits = 0;
    for (int i = 0; i < 4; ++i) {
      words[i] = u16_at(b + 48 + 2 * i);
      bits = (uint16_t)(bits | (words[i] & 0xf000) >> (12 - 4 * i));
    }
    const float d = half_to_float(bits);
    for (int i = 0; i < 16; ++i) s[i] = d * (float)(2 * (words[i / 4] >> (3 * (i & 3)) & 7) + 1) * 0.125f;
    for (int i = 0; i < 32; ++i) {
      const int qh = b[32 + i / 2] >> (4 * (i & 1)) & 15;
      delta8(v + 8 * i, b[i] | (qh & 7) << 8, (qh & 8) != 0);
    }
  }
};

struct Tq1 {
  static constexpr int BYTES = 54, GROUP = 32;
  static INLINE void trits(const uint8_t* b, int count, int digits, int8_t* v) {
    static const uint8_t powers[5] = {1, 3, 9, 27, 81};
    for (int n = 0; n < digits; ++n)
      for (int i = 0; i < count; ++i) v[n * count + i] = (int8_t)(((uint8_t)(b[i] * powers[n]) * 3 >> 8) - 1);
  }
  static INLINE void decode(const uint8_t* b, int8_t* v, float* s) {
    for (int g = 0; g < 8; ++g) s[g] = half_at(b + 52);
    trits(b, 32, 5, v);
    trits(b + 32, 16, 5, v + 160);
    trits(b + 48, 4, 4, v + 240);
  }
};

struct Tq2 {
  static constexpr int BYTES = 66, GROUP = 32;
  static INLINE void decode(const uint8_t* b, int8_t* v, float* s) {
    for (int g = 0; g < 8; ++g) s[g] = half_at(b + 64);
    for (int i = 0; i < 256; ++i) v[i] = (int8_t)((b[i / 128 * 32 + (i & 31)] >> (2 * (i / 32 & 3)) & 3) - 1);
  }
};

template <class B>
void decode_rows(const uint8_t* data, const uint8_t*, const Part& part, int64_t groups, uint8_t* codes,
                 float* scales) {
  const int64_t row_bytes = part.panel_bytes / ROWS, blocks = groups / 8;
  constexpr int PER = 256 / B::GROUP;
  for (int row = 0; row < ROWS; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      alignas(32) int8_t v[256];
      float s[16];
      if (row < part.rows) {
        B::decode(data + row * row_bytes + block * B::BYTES, v, s);
      } else {
        std::memset(v, 0, sizeof v);
        std::memset(s, 0, sizeof s);
      }
      for (int i = 0; i < PER; ++i) scales[(block * PER + i) * ROWS + row] = s[i];
      for (int i = 0; i < 256; ++i) v[i] = (int8_t)(v[i] + 64);
      for (int j = 0; j < 64; ++j) std::memcpy(codes + (block * 64 + j) * 64 + 4 * row, v + 4 * j, 4);
    }
  }
}

template <class B>
const FormatKernels* raw_of() {
  static const FormatKernels k = {0, 64, B::GROUP, 256, B::BYTES, false, false, {nullptr}, decode_rows<B>};
  return &k;
}

}  // namespace

const FormatKernels* kernels_raw(int format) {
  switch (format) {
    case IQ2_XXS: return raw_of<Iq2Xxs>();
    case IQ2_XS: return raw_of<Iq2Xs>();
    case IQ2_S: return raw_of<Iq2S>();
    case IQ3_XXS: return raw_of<Iq3Xxs>();
    case IQ3_S: return raw_of<Iq3S>();
    case IQ1_S: return raw_of<Iq1S>();
    case IQ1_M: return raw_of<Iq1M>();
    case TQ1_0: return raw_of<Tq1>();
    case TQ2_0: return raw_of<Tq2>();
    default: return nullptr;
  }
}

}  // namespace slim

extern "C" void slim_set_grid(int index, const int8_t* table) {
  if (index >= 0 && index < slim::NUM_GRIDS) slim::grids[index] = table;
}
