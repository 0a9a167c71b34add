// Paged attention with grouped queries, causal over absolute positions, optional window and soft cap.
//
// For each (token, head) alone: the context is walked in its 64-token pages; inside a segment of 512 tokens the
// running maximum, sum and weighted values are updated page by page; segments are merged in order. Scores are chains
// over the head dimension, weighted values chains over keys. So tiles of tokens, groups of heads and the number of
// threads only decide what is computed side by side.
#include "activations.h"
#include "pool.h"
#include "rows.h"

namespace slim {
namespace {

enum Scratch { KEYS = 0, VALUES = 1, QUERIES = 3, PARTIALS = 2, OUTPUTS = 4 };
constexpr int PAGE = 64;
constexpr int SEGMENT_PAGES = 8;
constexpr int VECS = PAGE / L;  // score vectors of a page
constexpr int TILE_QUERIES = 64;
constexpr int ALONE_PAGES = 3;  // page visits that cost less than waking a thread
#if defined(SLIM_AVX512)
constexpr int QUERY_BLOCK = 6, VEC_BLOCK = 4;
#else
constexpr int QUERY_BLOCK = 3, VEC_BLOCK = 4;
#endif

struct Call {
  const void *q, *k, *v;
  int q_type, kv_type;
  int64_t q_token_stride, q_head_stride;
  const int32_t* table;
  int64_t table_stride, num_pages;
  int64_t q_heads, kv_heads, dim, value_dim;
  float scale, softcap;
  int64_t window;  // 0: none
  void* out;       // [T, q_heads, value_dim] of q_type
};

// One tile: tokens [first, first + count) of a row, whose first is at `position`; one key/value head.
struct Tile {
  int64_t first, position, row, head;
  int count;
};

INLINE F load_kv(const uint8_t* p, int type) {
  switch (type) {
    case TYPE_BF16: return f_bf16(p);
    case TYPE_F16: return f_half(p);
    case TYPE_F8: return LoadF8::load(p);
    default: return f_load((const float*)p);
  }
}

#if defined(SLIM_AVX512)
INLINE void transpose_block(const F* in, float* out, int64_t stride) {
  __m512 a[16], b[16];
  unroll<8>(UNROLLED(i) {
    a[2 * i] = _mm512_unpacklo_ps(in[2 * i], in[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_ps(in[2 * i], in[2 * i + 1]);
  });
  unroll<4>(UNROLLED(i) {
    auto d = [](__m512 x) { return _mm512_castps_pd(x); };
    auto s = [](__m512d x) { return _mm512_castpd_ps(x); };
    b[4 * i] = s(_mm512_unpacklo_pd(d(a[4 * i]), d(a[4 * i + 2])));
    b[4 * i + 1] = s(_mm512_unpackhi_pd(d(a[4 * i]), d(a[4 * i + 2])));
    b[4 * i + 2] = s(_mm512_unpacklo_pd(d(a[4 * i + 1]), d(a[4 * i + 3])));
    b[4 * i + 3] = s(_mm512_unpackhi_pd(d(a[4 * i + 1]), d(a[4 * i + 3])));
  });
  unroll<4>(UNROLLED(i) {
    __m512 x0 = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), x1 = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
    __m512 y0 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88), y1 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
    f_store(out + i * stride, _mm512_shuffle_f32x4(x0, y0, 0x88));
    f_store(out + (i + 4) * stride, _mm512_shuffle_f32x4(x1, y1, 0x88));
    f_store(out + (i + 8) * stride, _mm512_shuffle_f32x4(x0, y0, 0xdd));
    f_store(out + (i + 12) * stride, _mm512_shuffle_f32x4(x1, y1, 0xdd));
  });
}
#else
INLINE void transpose_block(const F* in, float* out, int64_t stride) {
  alignas(64) float m[L * L];
  for (int i = 0; i < L; ++i) f_store(m + i * L, in[i]);
  for (int d = 0; d < L; ++d)
    for (int i = 0; i < L; ++i) out[d * stride + i] = m[i * L + d];
}
#endif

// Keys of a page as float32 [dim rounded up to L][64].
void load_keys(const uint8_t* page, int type, int64_t dim, float* out) {
  const int64_t size = type_bytes(type);
  for (int64_t d = 0; d < dim; d += L) {
    for (int key = 0; key < PAGE; key += L) {
      F rows[L];
      for (int i = 0; i < L; ++i) {
        const uint8_t* p = page + ((key + i) * dim + d) * size;
        if (dim - d >= L) {
          rows[i] = load_kv(p, type);
        } else {
          alignas(64) float tail[L] = {};
          for (int64_t e = 0; e < dim - d; ++e) tail[e] = read_value(p, e, type);
          rows[i] = f_load(tail);
        }
      }
      transpose_block(rows, out + d * PAGE + key, PAGE);
    }
  }
}

// Values of keys [low, high) as float32 [64][padded].
void load_values(const uint8_t* page, int type, int64_t dim, int64_t padded, int low, int high, float* out) {
  const int64_t size = type_bytes(type);
  for (int key = low; key < high; ++key) {
    const uint8_t* p = page + key * dim * size;
    int64_t d = 0;
    for (; d + L <= dim; d += L) f_store(out + key * padded + d, load_kv(p + d * size, type));
    for (; d < padded; ++d) out[key * padded + d] = d < dim ? read_value(p, d, type) : 0.0f;
  }
}

template <int N>
void score_block(const float* q, int64_t q_stride, const float* keys, int64_t dim, F scale, float* scores) {
  for (int v0 = 0; v0 < VECS; v0 += VEC_BLOCK) {
    F acc[N][VEC_BLOCK];
    unroll<N>(UNROLLED(n) { unroll<VEC_BLOCK>(UNROLLED(v) { acc[n][v] = f_zero(); }); });
    const float* key = keys + v0 * L;
    for (int64_t d = 0; d < dim; ++d, key += PAGE) {
      F k[VEC_BLOCK];
      unroll<VEC_BLOCK>(UNROLLED(v) { k[v] = f_load(key + v * L); });
      unroll<N>(UNROLLED(n) {
        const F x = f_set(q[n * q_stride + d]);
        unroll<VEC_BLOCK>(UNROLLED(v) { acc[n][v] = f_fma(x, k[v], acc[n][v]); });
      });
    }
    unroll<N>(UNROLLED(n) {
      unroll<VEC_BLOCK>(UNROLLED(v) { f_store(scores + n * PAGE + (v0 + v) * L, f_mul(acc[n][v], scale)); });
    });
  }
}

// out[n][d] = out[n][d] * keep[n] + sum over keys of p[n][key] * values[key][d], keys in order.
template <int N>
void value_block(const float* p, const float* keep, const float* values, int64_t padded, int low, int high,
                 float* out) {
  for (int64_t d = 0; d < padded; d += VEC_BLOCK * L) {
    const int vecs = (int)((padded - d) / L < VEC_BLOCK ? (padded - d) / L : VEC_BLOCK);
    const auto run = [&](auto width) __attribute__((always_inline)) {
      constexpr int W = decltype(width)::value;
      F acc[N][W];
      unroll<N>(UNROLLED(n) {
        unroll<W>(UNROLLED(v) { acc[n][v] = f_mul(f_load(out + n * padded + d + v * L), f_set(keep[n])); });
      });
      for (int key = low; key < high; ++key) {
        const float* row = values + key * padded + d;
        F x[W];
        unroll<W>(UNROLLED(v) { x[v] = f_load(row + v * L); });
        unroll<N>(UNROLLED(n) {
          const F weight = f_set(p[n * PAGE + key]);
          unroll<W>(UNROLLED(v) { acc[n][v] = f_fma(weight, x[v], acc[n][v]); });
        });
      }
      unroll<N>(UNROLLED(n) {
        unroll<W>(UNROLLED(v) { f_store(out + n * padded + d + v * L, acc[n][v]); });
      });
    };
    if (vecs == 4) run(std::integral_constant<int, 4>{});
    else if (vecs == 3) run(std::integral_constant<int, 3>{});
    else if (vecs == 2) run(std::integral_constant<int, 2>{});
    else run(std::integral_constant<int, 1>{});
  }
}

template <class Fn>
INLINE void by_count(int n, const Fn& f) {
  switch (n) {
    case 1: f(std::integral_constant<int, 1>{}); break;
    case 2: f(std::integral_constant<int, 2>{}); break;
    case 3: f(std::integral_constant<int, 3>{}); break;
#if defined(SLIM_AVX512)
    case 4: f(std::integral_constant<int, 4>{}); break;
    case 5: f(std::integral_constant<int, 5>{}); break;
    case 6: f(std::integral_constant<int, 6>{}); break;
#endif
    default: break;
  }
}

alignas(64) const int32_t LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Scores of one query on a page to weights, and its running maximum and sum; keys outside [low, high) weigh 0.
INLINE void soften(float* scores, int low, int high, float softcap, float& maximum, float& total, float& keep) {
  const F none = f_set(-INFINITY);
  const I from = i_set(low), to = i_set(high);
  F s[VECS], most = none;
  unroll<VECS>(UNROLLED(v) {
    F x = f_load(scores + v * L);
    if (softcap > 0.0f) {  // c tanh(x / c) = c (1 - 2 / (1 + exp(2 x / c)))
      F e = f_exp(f_mul(x, f_set(2.0f / softcap)));
      x = f_mul(f_sub(f_set(1.0f), f_div(f_set(2.0f), f_add(f_set(1.0f), e))), f_set(softcap));
    }
    const I at = i_add(i_load(LANES), i_set(v * L));
    x = f_select_lt(at, from, none, f_select_lt(at, to, x, none));
    s[v] = x;
    most = f_max(most, x);
  });
  const float page_maximum = f_reduce_max(most);
  const float next = page_maximum > maximum ? page_maximum : maximum;
  const float base = next == -INFINITY ? 0.0f : next;
  F sum[16 / L];
  unroll<16 / L>(UNROLLED(c) { sum[c] = f_zero(); });
  unroll<VECS>(UNROLLED(v) {
    const I at = i_add(i_load(LANES), i_set(v * L));
    F p = f_exp(f_sub(s[v], f_set(base)));
    p = f_select_lt(at, from, f_zero(), f_select_lt(at, to, p, f_zero()));
    f_store(scores + v * L, p);
    sum[v % (16 / L)] = f_add(sum[v % (16 / L)], p);
  });
  alignas(64) float alpha[L];
  f_store(alpha, f_exp(f_set(maximum - base)));
  keep = maximum == -INFINITY ? 0.0f : alpha[0];
  total = total * keep + reduce16(sum);
  maximum = next;
}

INLINE float exp_one(float x) {
  alignas(64) float v[L];
  f_store(v, f_exp(f_set(x)));
  return v[0];
}

struct Range {
  int64_t low, high;  // visible keys of a token: absolute positions [low, high)
};
INLINE Range visible(const Call& c, int64_t position) {
  const int64_t low = c.window > 0 && position + 1 > c.window ? position + 1 - c.window : 0;
  return {low, position + 1};
}

// State of queries: per query maximum, total, values [padded].
struct State {
  float *maximum, *total, *values;
};

// Walks the pages of one segment for a tile; state starts empty.
void attend_segment(const Call& c, const Tile& tile, int64_t segment, const float* q, int64_t padded_dim,
                    int64_t padded, State state) {
  const int64_t group = c.q_heads / c.kv_heads, size = type_bytes(c.kv_type);
  const int queries = (int)(tile.count * group);
  for (int i = 0; i < queries; ++i) {
    state.maximum[i] = -INFINITY;
    state.total[i] = 0.0f;
  }
  std::memset(state.values, 0, (size_t)(queries * padded) * 4);
  float* keys = (float*)scratch(KEYS, (size_t)(padded_dim * PAGE) * 4);
  float* values = (float*)scratch(VALUES, (size_t)(padded * PAGE) * 4);
  alignas(64) float scores[QUERY_BLOCK * PAGE];
  float keep[QUERY_BLOCK];
  const int64_t low_page = visible(c, tile.position).low / PAGE;
  const int64_t last_page = (tile.position + tile.count - 1) / PAGE;
  const int64_t begin = segment * SEGMENT_PAGES > low_page ? segment * SEGMENT_PAGES : low_page;
  const int64_t end = (segment + 1) * SEGMENT_PAGES < last_page + 1 ? (segment + 1) * SEGMENT_PAGES : last_page + 1;
  const F scale = f_set(c.scale);
  for (int64_t page = begin; page < end; ++page) {
    int64_t id = c.table[tile.row * c.table_stride + page];
    if (id < 0 || id >= c.num_pages) id = 0;
    const int64_t base = page * PAGE, at = (id * c.kv_heads + tile.head) * PAGE;
    load_keys((const uint8_t*)c.k + at * c.dim * size, c.kv_type, c.dim, keys);
    const int64_t written = tile.position + tile.count - base;
    load_values((const uint8_t*)c.v + at * c.value_dim * size, c.kv_type, c.value_dim, padded, 0,
                (int)(written < PAGE ? written : PAGE), values);
    // Runs of queries with the same visible keys of this page go together.
    for (int token = 0; token < tile.count;) {
      const Range r = visible(c, tile.position + token);
      const int low = (int)(r.low > base ? r.low - base : 0), high = (int)(r.high - base < PAGE ? r.high - base : PAGE);
      int next = token + 1;
      for (; next < tile.count; ++next) {
        const Range n = visible(c, tile.position + next);
        if ((n.low > base ? n.low - base : 0) != low || (n.high - base < PAGE ? n.high - base : PAGE) != high) break;
      }
      if (low < high && low < PAGE && high > 0) {
        const int first = (int)(token * group), last = (int)(next * group);
        for (int i = first; i < last; i += QUERY_BLOCK) {
          const int n = last - i < QUERY_BLOCK ? last - i : QUERY_BLOCK;
          by_count(n, [&](auto count) __attribute__((always_inline)) {
            constexpr int N = decltype(count)::value;
            score_block<N>(q + i * padded_dim, padded_dim, keys, c.dim, scale, scores);
            for (int m = 0; m < N; ++m)
              soften(scores + m * PAGE, low, high, c.softcap, state.maximum[i + m], state.total[i + m], keep[m]);
            value_block<N>(scores, keep, values, padded, low, high, state.values + i * padded);
          });
        }
      }
      token = next;
    }
  }
}

// total state (a) takes in a later segment (b).
void merge(State a, State b, int queries, int64_t padded) {
  for (int i = 0; i < queries; ++i) {
    if (b.maximum[i] == -INFINITY) continue;
    if (a.maximum[i] == -INFINITY) {
      a.maximum[i] = b.maximum[i];
      a.total[i] = b.total[i];
      std::memcpy(a.values + i * padded, b.values + i * padded, (size_t)padded * 4);
      continue;
    }
    const float next = a.maximum[i] > b.maximum[i] ? a.maximum[i] : b.maximum[i];
    const float old = exp_one(a.maximum[i] - next), fresh = exp_one(b.maximum[i] - next);
    a.total[i] = a.total[i] * old + b.total[i] * fresh;
    float *x = a.values + i * padded, *y = b.values + i * padded;
    for (int64_t d = 0; d < padded; d += L)
      f_store(x + d, f_fma(f_load(y + d), f_set(fresh), f_mul(f_load(x + d), f_set(old))));
    a.maximum[i] = next;
  }
}

void write_out(const Call& c, const Tile& tile, State s, int64_t padded) {
  const int64_t group = c.q_heads / c.kv_heads;
  for (int i = 0; i < tile.count * group; ++i) {
    const int64_t token = tile.first + i / group, head = tile.head * group + i % group;
    const int64_t at = (token * c.q_heads + head) * c.value_dim;
    for (int64_t d = 0; d < c.value_dim; ++d)
      write_value(c.out, at + d, c.q_type, s.values[i * padded + d] / s.total[i]);
  }
}

const float* load_queries(const Call& c, const Tile& tile, int64_t padded_dim) {
  const int64_t group = c.q_heads / c.kv_heads;
  float* q = (float*)scratch(QUERIES, (size_t)(tile.count * group * padded_dim) * 4);
  for (int i = 0; i < tile.count * group; ++i) {
    const int64_t at = (tile.first + i / group) * c.q_token_stride + (tile.head * group + i % group) * c.q_head_stride;
    for (int64_t d = 0; d < c.dim; ++d) q[i * padded_dim + d] = read_value(c.q, at + d, c.q_type);
  }
  return q;
}

INLINE State state_at(float* memory, int queries) {
  return {memory, memory + queries, memory + (2 * queries + L - 1) / L * L};
}
INLINE int64_t state_floats(int queries, int64_t padded) { return (2 * queries + L - 1) / L * L + queries * padded; }

struct Segments {
  int64_t first, last;  // [first, last)
};
INLINE Segments segments_of(const Call& c, const Tile& tile) {
  return {visible(c, tile.position).low / PAGE / SEGMENT_PAGES,
          (tile.position + tile.count - 1) / PAGE / SEGMENT_PAGES + 1};
}

void attend_tile(const Call& c, const Tile& tile, int64_t padded_dim, int64_t padded) {
  const int queries = (int)(tile.count * (c.q_heads / c.kv_heads));
  const int64_t floats = state_floats(queries, padded);
  float* memory = (float*)scratch(OUTPUTS, (size_t)(2 * floats) * 4);
  const State total = state_at(memory, queries), part = state_at(memory + floats, queries);
  const float* q = load_queries(c, tile, padded_dim);
  const Segments s = segments_of(c, tile);
  attend_segment(c, tile, s.first, q, padded_dim, padded, total);
  for (int64_t segment = s.first + 1; segment < s.last; ++segment) {
    attend_segment(c, tile, segment, q, padded_dim, padded, part);
    merge(total, part, queries, padded);
  }
  write_out(c, tile, total, padded);
}

}  // namespace

void paged_attention(const Call& c, const int32_t* row_offsets, const int32_t* starts, int64_t rows) {
  const int64_t group = c.q_heads / c.kv_heads;
  const int64_t padded_dim = (c.dim + L - 1) / L * L, padded = (c.value_dim + L - 1) / L * L;
  const int64_t tile_tokens = group < TILE_QUERIES ? TILE_QUERIES / group : 1;
  int64_t tiles_total = 0, segments_total = 0, pages_total = 0;
  for (int64_t r = 0; r < rows; ++r) tiles_total += (row_offsets[r + 1] - row_offsets[r] + tile_tokens - 1) / tile_tokens;
  if (tiles_total <= 0) return;
  Tile* tiles = (Tile*)scratch(6, (size_t)(tiles_total * c.kv_heads) * sizeof(Tile));
  int64_t count = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t length = row_offsets[r + 1] - row_offsets[r];
    for (int64_t t = 0; t < length; t += tile_tokens) {
      const int n = (int)(length - t < tile_tokens ? length - t : tile_tokens);
      for (int64_t h = 0; h < c.kv_heads; ++h) {
        tiles[count] = {row_offsets[r] + t, starts[r] + t, r, h, n};
        const Segments s = segments_of(c, tiles[count]);
        segments_total += s.last - s.first;
        pages_total += (starts[r] + t + n - 1) / PAGE - visible(c, starts[r] + t).low / PAGE + 1;
        ++count;
      }
    }
  }
  if (pages_total <= ALONE_PAGES) {
    for (int64_t i = 0; i < count; ++i) attend_tile(c, tiles[i], padded_dim, padded);
    return;
  }
  if (count >= 2 * pool_threads() || segments_total < 2 * count || pool_threads() == 1) {
    parallel(count, [&](int64_t i) { attend_tile(c, tiles[i], padded_dim, padded); });
    return;
  }
  // Few tiles over long contexts: segments in parallel, merged afterwards in the same order.
  const int64_t floats = state_floats((int)(tile_tokens * group), padded);
  float* memory = (float*)scratch(PARTIALS, (size_t)(segments_total * floats) * 4);
  struct Task {
    int64_t tile, segment;
  };
  Task* tasks = (Task*)scratch(7, (size_t)segments_total * sizeof(Task));
  int64_t n = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Segments s = segments_of(c, tiles[i]);
    for (int64_t segment = s.first; segment < s.last; ++segment) tasks[n++] = {i, segment};
  }
  parallel(n, [&](int64_t i) {
    const Tile& tile = tiles[tasks[i].tile];
    const int queries = (int)(tile.count * group);
    attend_segment(c, tile, tasks[i].segment, load_queries(c, tile, padded_dim), padded_dim, padded,
                   state_at(memory + i * floats, queries));
  });
  for (int64_t i = 0; i < n;) {
    const Tile& tile = tiles[tasks[i].tile];
    const int queries = (int)(tile.count * group);
    const State total = state_at(memory + i * floats, queries);
    int64_t j = i + 1;
    for (; j < n && tasks[j].tile == tasks[i].tile; ++j)
      merge(total, state_at(memory + j * floats, queries), queries, padded);
    write_out(c, tile, total, padded);
    i = j;
  }
}

}  // namespace slim

// q [T, Hq, D] with element strides; k [pages, Hkv, 64, D], v [pages, Hkv, 64, Dv]; out [T, Hq, Dv] of q's type.
extern "C" void slim_paged_attention(const void* q, int q_type, int64_t q_token_stride, int64_t q_head_stride,
                                     const void* k, const void* v, int kv_type, int64_t num_pages,
                                     const int32_t* table, int64_t table_stride, const int32_t* row_offsets,
                                     const int32_t* starts, int64_t rows, int64_t q_heads, int64_t kv_heads,
                                     int64_t dim, int64_t value_dim, float scale, float softcap, int64_t window,
                                     void* out) {
  const slim::Call call{q,         k,        v,       q_type,   kv_type, q_token_stride, q_head_stride,
                        table,     table_stride, num_pages, q_heads, kv_heads, dim, value_dim,
                        scale,     softcap,  window,  out};
  slim::paged_attention(call, row_offsets, starts, rows);
}
