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

typedef int8_t V8 __attribute__((vector_size(8)));
constexpr int8_t OFFSET = 64;

INLINE V8 eight(const int8_t* p) {
  V8 v;
  std::memcpy(&v, p, 8);
  return v;
}
INLINE V8 two_fours(const int8_t* first, const int8_t* second) {
  V8 v;
  std::memcpy(&v, first, 4);
  std::memcpy((int8_t*)&v + 4, second, 4);
  return v;
}

// -1 in byte i where bit i of the sign byte is set.
struct SignMasks {
  V8 of[256];
  SignMasks() {
    for (int s = 0; s < 256; ++s)
      for (int i = 0; i < 8; ++i) of[s][i] = (s >> i & 1) ? -1 : 0;
  }
};
const SignMasks masks;

INLINE V8 signed_by(V8 v, int sign_byte) {
  const V8 m = masks.of[sign_byte];
  return (v ^ m) - m;
}
INLINE int sign_byte(uint32_t index) { return (uint8_t)grids[GRID_SIGNS][index & 127]; }

// Takes eight values at a time to their places in the panel: element e of row r at (e / 4) * 64 + 4 r + e mod 4.
struct Sink {
  uint8_t* at;
  INLINE void put(int index, V8 v) const {
    v = v + OFFSET;
    std::memcpy(at + index * 128, &v, 4);
    std::memcpy(at + index * 128 + 64, (const uint8_t*)&v + 4, 4);
  }
  INLINE void put_all(const int8_t* values) const {
    for (int i = 0; i < 32; ++i) put(i, eight(values + 8 * i));
  }
};

// Each Block type: bytes, elements per scale, and decode of 256 elements to values and scales s.
struct Iq2Xxs {
  static constexpr int BYTES = 66, GROUP = 32;
  static INLINE void decode(const uint8_t* b, const Sink& sink, float* s) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const uint8_t* f = b + 2 + 8 * g;
      const uint32_t word = u32_at(f + 4);
      s[g] = d * (0.5f + (float)(word >> 28)) * 0.25f;
      for (int i = 0; i < 4; ++i)
        sink.put(4 * g + i, signed_by(eight(grids[GRID_2XXS] + 8 * f[i]), sign_byte(word >> (7 * i))));
    }
  }
};

struct Iq2Xs {
  static constexpr int BYTES = 74, GROUP = 16;
  static INLINE void decode(const uint8_t* b, const Sink& sink, float* s) {
    const float d = half_at(b);
    for (int i = 0; i < 16; ++i) s[i] = d * (0.5f + (float)(b[66 + i / 2] >> (4 * (i & 1)) & 15)) * 0.25f;
    for (int i = 0; i < 32; ++i) {
      const uint16_t code = u16_at(b + 2 + 2 * i);
      sink.put(i, signed_by(eight(grids[GRID_2XS] + 8 * (code & 511)), sign_byte(code >> 9)));
    }
  }
};

struct Iq2S {
  static constexpr int BYTES = 82, GROUP = 16;
  static INLINE void decode(const uint8_t* b, const Sink& sink, float* s) {
    const float d = half_at(b);
    for (int i = 0; i < 16; ++i) s[i] = d * (0.5f + (float)(b[74 + i / 2] >> (4 * (i & 1)) & 15)) * 0.25f;
    for (int i = 0; i < 32; ++i) {
      const int index = b[2 + i] | (b[66 + i / 4] >> (2 * (i & 3)) & 3) << 8;
      sink.put(i, signed_by(eight(grids[GRID_2S] + 8 * index), b[34 + i]));
    }
  }
};

struct Iq3Xxs {
  static constexpr int BYTES = 98, GROUP = 32;
  static INLINE void decode(const uint8_t* b, const Sink& sink, float* s) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const uint32_t word = u32_at(b + 66 + 4 * g);
      s[g] = d * (0.5f + (float)(word >> 28)) * 0.5f;
      for (int i = 0; i < 4; ++i) {
        const uint8_t* q = b + 2 + 8 * g + 2 * i;
        const V8 v = two_fours(grids[GRID_3XXS] + 4 * q[0], grids[GRID_3XXS] + 4 * q[1]);
        sink.put(4 * g + i, signed_by(v, sign_byte(word >> (7 * i))));
      }
    }
  }
};

struct Iq3S {
  static constexpr int BYTES = 110, GROUP = 32;
  static INLINE void decode(const uint8_t* b, const Sink& sink, float* s) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) s[g] = d * (1.0f + 2.0f * (float)(b[106 + g / 2] >> (4 * (g & 1)) & 15));
    for (int i = 0; i < 32; ++i) {
      const int high = b[66 + i / 4] >> (2 * (i & 3));
      const int first = b[2 + 2 * i] | (high & 1) << 8, second = b[3 + 2 * i] | (high >> 1 & 1) << 8;
      sink.put(i, signed_by(two_fours(grids[GRID_3S] + 4 * first, grids[GRID_3S] + 4 * second), b[74 + i]));
    }
  }
};

// Eight times (vector of -1, 0, 1 plus or minus an eighth).
INLINE V8 with_delta(int index, bool negative) {
  const int8_t delta = negative ? -1 : 1;
  return eight(grids[GRID_1] + 8 * index) * (int8_t)8 + delta;
}

struct Iq1S {
  static constexpr int BYTES = 50, GROUP = 32;
  static INLINE void decode(const uint8_t* b, const Sink& sink, float* s) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const uint16_t qh = u16_at(b + 34 + 2 * g);
      s[g] = d * (float)(2 * (qh >> 12 & 7) + 1) * 0.125f;
      for (int i = 0; i < 4; ++i)
        sink.put(4 * g + i, with_delta(b[2 + 4 * g + i] | (qh >> (3 * i) & 7) << 8, (qh & 0x8000) != 0));
    }
  }
};

struct Iq1M {
  static constexpr int BYTES = 56, GROUP = 16;
  static INLINE void decode(const uint8_t* b, const Sink& sink, float* s) {
    uint16_t words[4], bits = 0;
    for (int i = 0; i < 4; ++i) {
      words[i] = u16_at(b + 48 + 2 * i);
      bits = (uint16_t)(bits | (words[i] & 0xf000) >> (12 - 4 * i));
    }
    const float d = half_to_float(bits);
    for (int i = 0; i < 16; ++i) s[i] = d * (float)(2 * (words[i / 4] >> (3 * (i & 3)) & 7) + 1) * 0.125f;
    for (int i = 0; i < 32; ++i) {
      const int qh = b[32 + i / 2] >> (4 * (i & 1)) & 15;
      sink.put(i, with_delta(b[i] | (qh & 7) << 8, (qh & 8) != 0));
    }
  }
};

struct Tq1 {
  static constexpr int BYTES = 54, GROUP = 32;
  template <int COUNT, int DIGITS>
  static INLINE void trits(const uint8_t* b, int8_t* v) {
    static const uint8_t powers[5] = {1, 3, 9, 27, 81};
    for (int n = 0; n < DIGITS; ++n)
      for (int i = 0; i < COUNT; ++i) {
        const uint8_t fraction = (uint8_t)(b[i] * powers[n]);
        v[n * COUNT + i] = (int8_t)((fraction > 85) + (fraction > 170) - 1);  // 3 * fraction / 256, minus 1
      }
  }
  static INLINE void decode(const uint8_t* b, const Sink& sink, float* s) {
    for (int g = 0; g < 8; ++g) s[g] = half_at(b + 52);
    alignas(32) int8_t v[256];
    trits<32, 5>(b, v);
    trits<16, 5>(b + 32, v + 160);
    trits<4, 4>(b + 48, v + 240);
    sink.put_all(v);
  }
};

struct Tq2 {
  static constexpr int BYTES = 66, GROUP = 32;
  static INLINE void decode(const uint8_t* b, const Sink& sink, float* s) {
    for (int g = 0; g < 8; ++g) s[g] = half_at(b + 64);
    alignas(32) int8_t v[256];
    for (int half = 0; half < 2; ++half)
      for (int pair = 0; pair < 4; ++pair)
        for (int i = 0; i < 32; ++i)
          v[128 * half + 32 * pair + i] = (int8_t)((b[32 * half + i] >> (2 * pair) & 3) - 1);
    sink.put_all(v);
  }
};

template <class B>
void decode_rows(const uint8_t* data, const Part& part, int64_t groups, uint8_t* codes, float* scales) {
  const int64_t row_bytes = part.panel_bytes / ROWS, blocks = groups / 8;
  constexpr int PER = 256 / B::GROUP;
  for (int row = 0; row < ROWS; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const Sink sink{codes + block * 4096 + 4 * row};
      float s[16] = {};
      if (row < part.rows) B::decode(data + row * row_bytes + block * B::BYTES, sink, s);
      else
        for (int i = 0; i < 32; ++i) sink.put(i, V8{});
      for (int i = 0; i < PER; ++i) scales[(block * PER + i) * ROWS + row] = s[i];
    }
  }
}

template <class B>
const FormatKernels* raw_of() {
  static const FormatKernels k = {0, 2 * OFFSET - 1, OFFSET, B::GROUP, 256, 0, B::BYTES, false, false, {nullptr},
                                  decode_rows<B>};
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
