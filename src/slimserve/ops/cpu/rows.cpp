// Row operations: norms, gated activations, rotary embedding, page writes. Each row is computed alone.
#include "activations.h"
#include "pool.h"
#include "rows.h"

namespace slim {
namespace {

enum Scratch { ROW_A = 6, ROW_B = 7 };
constexpr int64_t ALONE = 1 << 14;  // elements below which the calling thread works alone

// Splits rows over the pool in pieces worth waking a thread for.
template <class Body>
void for_rows(int64_t rows, int64_t row_elements, const Body& body) {
  if (rows * row_elements <= ALONE) {
    for (int64_t row = 0; row < rows; ++row) body(row);
    return;
  }
  const int64_t piece = ALONE / 2 / (row_elements > 0 ? row_elements : 1) + 1;
  parallel((rows + piece - 1) / piece, [&](int64_t task) {
    for (int64_t row = task * piece; row < rows && row < (task + 1) * piece; ++row) body(row);
  });
}

const float* widen(const void* p, int type, int64_t count, int slot) {
  if (type == TYPE_F32) return (const float*)p;
  float* out = (float*)scratch(slot, (size_t)count * 4);
  for (int64_t i = 0; i < count; ++i) out[i] = read_value(p, i, type);
  return out;
}

void narrow(void* p, int type, const float* x, int64_t count) {
  if (type == TYPE_BF16) {
    for (int64_t i = 0; i < count; ++i) ((uint16_t*)p)[i] = float_to_bf16(x[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) write_value(p, i, type, x[i]);
  }
}

// Four times sixteen chains, then a fixed tree.
float sum_squares(const float* x, int64_t n) {
  constexpr int V = 16 / L;  // vectors of sixteen chains
  F acc[4][V], sum[V];
  unroll<4 * V>(UNROLLED(c) { acc[c / V][c % V] = f_zero(); });
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    unroll<4 * V>(UNROLLED(c) {
      F v = f_load(x + i + c * L);
      acc[c / V][c % V] = f_fma(v, v, acc[c / V][c % V]);
    });
  }
  for (; i < n; i += 16) {
    unroll<V>(UNROLLED(c) {
      const int64_t left = n - i - c * L;
      F v = left >= L ? f_load(x + i + c * L) : f_load_n(x + i + c * L, left > 0 ? (int)left : 0);
      acc[0][c] = f_fma(v, v, acc[0][c]);
    });
  }
  unroll<V>(UNROLLED(c) { sum[c] = f_add(f_add(acc[0][c], acc[1][c]), f_add(acc[2][c], acc[3][c])); });
  return reduce16(sum);
}

void norm_row(const float* x, const float* weight, float offset, float eps, int64_t n, float* y) {
  const float inverse = 1.0f / std::sqrt(sum_squares(x, n) / (float)n + eps);
  const F scale = f_set(inverse), add = f_set(offset);
  for (int64_t i = 0; i < n; i += L) {
    const int count = (int)(n - i < L ? n - i : L);
    if (count == L) {
      f_store(y + i, f_mul(f_mul(f_load(x + i), scale), f_add(f_load(weight + i), add)));
    } else {
      f_store_n(y + i, f_mul(f_mul(f_load_n(x + i, count), scale), f_add(f_load_n(weight + i, count), add)), count);
    }
  }
}

struct Silu {
  F limit, low;
  bool limited;
  INLINE F operator()(F gate, F up) const {
    if (limited) {
      gate = f_min(gate, limit);
      up = f_max(f_min(up, limit), low);
    }
    return f_mul(f_div(gate, f_add(f_set(1.0f), f_exp(f_sub(f_zero(), gate)))), up);
  }
};

struct GeluTanh {  // 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z)), z = sqrt(2 / pi) (g + 0.044715 g^3)
  INLINE F operator()(F gate, F up) const {
    F cubic = f_fma(f_mul(f_mul(gate, gate), gate), f_set(0.044715f), gate);
    F e = f_exp(f_mul(cubic, f_set(-2.0f * 0.7978845608f)));
    return f_mul(f_div(gate, f_add(f_set(1.0f), e)), up);
  }
};

template <class Gate>
void gate_row(const float* gate_up, int64_t n, const Gate& gate, float* y) {
  const float* up = gate_up + n;
  for (int64_t i = 0; i < n; i += L) {
    const int count = (int)(n - i < L ? n - i : L);
    if (count == L) f_store(y + i, gate(f_load(gate_up + i), f_load(up + i)));
    else f_store_n(y + i, gate(f_load_n(gate_up + i, count), f_load_n(up + i, count)), count);
  }
}

template <class Gate>
void gate_rows(const void* gate_up, int type, int64_t rows, int64_t n, const Gate& gate, void* y) {
  const int64_t size = type_bytes(type);
  for_rows(rows, 2 * n, [&](int64_t row) {
    const float* x = widen((const uint8_t*)gate_up + row * 2 * n * size, type, 2 * n, ROW_A);
    if (type == TYPE_F32) {
      gate_row(x, n, gate, (float*)y + row * n);
    } else {
      float* out = (float*)scratch(ROW_B, (size_t)n * 4);
      gate_row(x, n, gate, out);
      narrow((uint8_t*)y + row * n * size, type, out, n);
    }
  });
}

INLINE uint8_t float_to_e4m3(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint8_t)(sign | 0x7f);
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  if (magnitude >= 448.0f) return (uint8_t)(sign | 0x7e);
  if (magnitude < 0x1p-6f) return (uint8_t)(sign | (uint8_t)__builtin_rintf(magnitude * 512.0f));
  bits += 0x7ffff + (bits >> 20 & 1);
  return (uint8_t)(sign | ((bits >> 20) - (120 << 3)));
}

// Cosines and sines of one token: [half] each, the second `half + L` floats after the first.
const float* angles(int64_t position, const float* inv_freq, int64_t half, float scale) {
  float* cosine = (float*)scratch(ROW_A, (size_t)(2 * (half + L)) * 4);
  float* sine = cosine + half + L;
  const F at = f_set((float)position), factor = f_set(scale);
  for (int64_t i = 0; i < half; i += L) {
    const F f = half - i >= L ? f_load(inv_freq + i) : f_load_n(inv_freq + i, (int)(half - i));
    F s, c;
    f_sincos(f_mul(at, f), s, c);
    f_store(cosine + i, f_mul(c, factor));
    f_store(sine + i, f_mul(s, factor));
  }
  return cosine;
}

void rotate_head(void* p, int type, const float* cosine, int64_t half, bool interleaved) {
  const float* sine = cosine + half + L;
  if (type == TYPE_F32 && !interleaved) {
    float *a = (float*)p, *b = a + half;
    for (int64_t i = 0; i < half; i += L) {
      const int n = (int)(half - i < L ? half - i : L);
      const F c = f_load(cosine + i), s = f_load(sine + i);
      const F u = n == L ? f_load(a + i) : f_load_n(a + i, n), v = n == L ? f_load(b + i) : f_load_n(b + i, n);
      const F first = f_sub(f_mul(u, c), f_mul(v, s)), second = f_add(f_mul(v, c), f_mul(u, s));
      f_store_n(a + i, first, n);
      f_store_n(b + i, second, n);
    }
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    const int64_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
    const float u = read_value(p, first, type), v = read_value(p, second, type);
    write_value(p, first, type, u * cosine[i] - v * sine[i]);
    write_value(p, second, type, v * cosine[i] + u * sine[i]);
  }
}

// One head of one token into its slot of pages [pages, heads, 64, D].
void write_head(const uint8_t* from, int type, int64_t dim, void* pages, int page_type, int64_t heads, int64_t head,
                int64_t slot) {
  uint8_t* to = (uint8_t*)pages + (((slot / 64) * heads + head) * 64 + slot % 64) * dim * type_bytes(page_type);
  if (type == page_type) {
    std::memcpy(to, from, (size_t)(dim * type_bytes(type)));
  } else if (page_type == TYPE_F8) {
    for (int64_t i = 0; i < dim; ++i) to[i] = float_to_e4m3(read_value(from, i, type));
  } else if (type == TYPE_F32) {
    narrow(to, page_type, (const float*)from, dim);
  } else {
    for (int64_t i = 0; i < dim; ++i) write_value(to, i, page_type, read_value(from, i, type));
  }
}

}  // namespace

void silu_rows(const float* gate_up, int64_t rows, int64_t n, bool limited, float limit, float* y) {
  gate_rows(gate_up, TYPE_F32, rows, n, Silu{f_set(limit), f_set(-limit), limited}, y);
}

void gelu_rows(const float* gate_up, int64_t rows, int64_t n, float* y) {
  gate_rows(gate_up, TYPE_F32, rows, n, GeluTanh{}, y);
}

}  // namespace slim

extern "C" {

// y = norm(x) with weight [n] + offset; where residual is given: total = x + residual in x's type, y = norm(total).
void slim_rms_norm(const void* x, const void* residual, int type, const float* weight, float offset, float eps,
                   int64_t rows, int64_t n, void* total, void* y) {
  using namespace slim;
  const int64_t size = type_bytes(type);
  for_rows(rows, n, [&](int64_t row) {
    const float* in = widen((const uint8_t*)x + row * n * size, type, n, ROW_A);
    void* out = (uint8_t*)y + row * n * size;
    if (residual != nullptr) {
      uint8_t* sum = (uint8_t*)total + row * n * size;
      const uint8_t* other = (const uint8_t*)residual + row * n * size;
      if (type == TYPE_F32) {
        for (int64_t i = 0; i < n; ++i) ((float*)sum)[i] = in[i] + ((const float*)other)[i];
        in = (const float*)sum;
      } else {
        float* wide = (float*)scratch(ROW_A, (size_t)n * 4);
        for (int64_t i = 0; i < n; ++i) wide[i] = in[i] + read_value(other, i, type);
        narrow(sum, type, wide, n);
        in = widen(sum, type, n, ROW_A);
      }
    }
    if (type == TYPE_F32) {
      norm_row(in, weight, offset, eps, n, (float*)out);
    } else {
      float* wide = (float*)scratch(ROW_B, (size_t)n * 4);
      norm_row(in, weight, offset, eps, n, wide);
      narrow(out, type, wide, n);
    }
  });
}

void slim_silu_mul(const void* gate_up, int type, int64_t rows, int64_t n, int limited, float limit, void* y) {
  using namespace slim;
  gate_rows(gate_up, type, rows, n, Silu{f_set(limit), f_set(-limit), limited != 0}, y);
}

void slim_gelu_tanh_mul(const void* gate_up, int type, int64_t rows, int64_t n, void* y) {
  slim::gate_rows(gate_up, type, rows, n, slim::GeluTanh{}, y);
}

// x [T, heads, D] with element strides; pairs (i, i + half) or (2i, 2i + 1); angle = position * inv_freq in float32.
void slim_rope(void* x, int type, const int64_t* positions, const float* inv_freq, int64_t tokens, int64_t heads,
               int64_t token_stride, int64_t head_stride, int64_t rotary_dim, int interleaved, float scale) {
  using namespace slim;
  const int64_t half = rotary_dim / 2, size = type_bytes(type);
  for_rows(tokens, heads * rotary_dim, [&](int64_t t) {
    const float* cosine = angles(positions[t], inv_freq, half, scale);
    for (int64_t h = 0; h < heads; ++h)
      rotate_head((uint8_t*)x + (t * token_stride + h * head_stride) * size, type, cosine, half, interleaved != 0);
  });
}

// values [T, heads, D] (element strides) to pages [pages, heads, 64, D] at slots [T]; slots out of range are skipped.
void slim_write_pages(const void* values, int type, int64_t tokens, int64_t heads, int64_t dim, int64_t token_stride,
                      int64_t head_stride, void* pages, int page_type, int64_t num_pages, const int64_t* slots) {
  using namespace slim;
  const int64_t size = type_bytes(type);
  for_rows(tokens, heads * dim, [&](int64_t t) {
    const int64_t slot = slots[t];
    if (slot < 0 || slot >= num_pages * 64) return;
    for (int64_t h = 0; h < heads; ++h)
      write_head((const uint8_t*)values + (t * token_stride + h * head_stride) * size, type, dim, pages, page_type,
                 heads, h, slot);
  });
}

// x [T, q_heads + 2 kv_heads, D] float32, contiguous, changed in place: norms of query and key heads (weights [D], or
// null), rotation (inv_freq null: none), then keys and values into their pages. The same steps as the single calls.
void slim_place_heads(float* x, int64_t tokens, int64_t q_heads, int64_t kv_heads, int64_t dim, const float* q_norm,
                      const float* k_norm, float eps, const int64_t* positions, const float* inv_freq,
                      int64_t rotary_dim, int interleaved, float scale, void* k_pages, void* v_pages, int page_type,
                      int64_t num_pages, const int64_t* slots) {
  using namespace slim;
  const int64_t heads = q_heads + 2 * kv_heads, half = rotary_dim / 2;
  for_rows(tokens, heads * dim, [&](int64_t t) {
    float* row = x + t * heads * dim;
    for (int64_t h = 0; h < q_heads + kv_heads; ++h) {
      const float* weight = h < q_heads ? q_norm : k_norm;
      if (weight != nullptr) norm_row(row + h * dim, weight, 0.0f, eps, dim, row + h * dim);
    }
    if (inv_freq != nullptr) {
      const float* cosine = angles(positions[t], inv_freq, half, scale);
      for (int64_t h = 0; h < q_heads + kv_heads; ++h)
        rotate_head(row + h * dim, TYPE_F32, cosine, half, interleaved != 0);
    }
    const int64_t slot = slots[t];
    if (slot < 0 || slot >= num_pages * 64) return;
    for (int64_t h = 0; h < kv_heads; ++h) {
      write_head((const uint8_t*)(row + (q_heads + h) * dim), TYPE_F32, dim, k_pages, page_type, kv_heads, h, slot);
      write_head((const uint8_t*)(row + (q_heads + kv_heads + h) * dim), TYPE_F32, dim, v_pages, page_type, kv_heads, h,
                 slot);
    }
  });
}

}  // extern "C"
