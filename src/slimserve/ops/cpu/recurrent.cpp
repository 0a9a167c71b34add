// Linear attention over open chunks: short convolution and gated delta rule, one token at a time. A token reads the
// chunk's opening state and the chunk's earlier rows only, in one order, so no cut of a prompt changes its bits.
#include <cstddef>

#include "pool.h"
#include "rows.h"

namespace slim {
namespace {

constexpr int CHUNK = 64;
constexpr float NORM_EPS = 1e-6f;
enum Scratch { RECURRENT = 6, CONVOLUTION = 6 };  // never nested

void normalise(float* x, int64_t n, float scale) {
  const float factor = scale / std::sqrt(dot16(x, x, n) + NORM_EPS);
  for (int64_t i = 0; i < n; i += L) f_store(x + i, f_mul(f_load(x + i), f_set(factor)));
}

void copy_padded(float* to, const float* from, int64_t n, int64_t room) {
  std::memcpy(to, from, 4 * (size_t)n);
  std::memset(to + n, 0, 4 * (size_t)(room - n));
}

}  // namespace

// Everything a row and a head of a step needs; pointers are those of RecurrentStorage and GroupInput.
struct DeltaRule {
  const float *q, *k, *v, *g, *beta;
  float *out, *state, *open_k, *open_g, *open_d;
  const int32_t *state_in, *state_out, *open_index, *row_offsets, *start_positions;
  int64_t rows, key_heads, heads, key_dim, value_dim, ring, crossings;
  int per_channel, tiled;
};

namespace {

struct Head {
  const DeltaRule& a;
  int64_t row, head, key_head, open_row, begin, start, stop;
  int64_t kp, vp, gp;  // padded key, value and decay widths
  float *state, *keys, *total, *written, *grown, *query, *key, *target, *result, *pairs;

  Head(const DeltaRule& arguments, int64_t row, int64_t head, int64_t key_head, int64_t begin, int64_t start,
       int64_t stop, float* room)
      : a(arguments), row(row), head(head), key_head(key_head), open_row(arguments.open_index[row]), begin(begin),
        start(start), stop(stop), kp(padded(a.key_dim)), vp(padded(a.value_dim)), gp(a.per_channel ? kp : 1) {
    const auto take = [&](int64_t floats) {
      float* taken = room;
      room += floats;
      return taken;
    };
    state = take(a.key_dim * vp);
    keys = take(CHUNK * kp);
    written = take(CHUNK * vp);
    grown = take(2 * kp);
    query = take(kp);
    key = take(kp);
    target = take(vp);
    result = take(vp);
    pairs = take(2 * CHUNK);
    total = take(CHUNK * gp);
  }
  static int64_t floats(const DeltaRule& a) {
    const int64_t kp = padded(a.key_dim), vp = padded(a.value_dim), gp = a.per_channel ? kp : 1;
    return a.key_dim * vp + CHUNK * (kp + gp + vp) + 4 * kp + 2 * vp + 2 * CHUNK;
  }

  const float* ring_key(int64_t position) const {
    return a.open_k + ((open_row * a.ring + position % a.ring) * a.key_heads + key_head) * a.key_dim;
  }
  float* ring_decay(int64_t position) const {
    return a.open_g + ((open_row * a.ring + position % a.ring) * a.heads + head) * (a.per_channel ? a.key_dim : 1);
  }
  float* ring_written(int64_t position) const {
    return a.open_d + ((open_row * a.ring + position % a.ring) * a.heads + head) * a.value_dim;
  }

  // Key and cumulative decay of chunk row `index`.
  void enter(int64_t index, const float* raw_key, const float* decay) {
    float* row_key = keys + index * kp;
    copy_padded(row_key, raw_key, a.key_dim, kp);
    normalise(row_key, kp, 1.0f);
    const int64_t width = a.per_channel ? a.key_dim : 1;
    float* here = total + index * gp;
    for (int64_t c = 0; c < width; ++c) here[c] = decay[c] + (index ? here[c - gp] : 0.0f);
    for (int64_t c = width; c < gp; ++c) here[c] = 0.0f;
  }

  // sum_c left_c right_c exp(G_index,c - G_other,c) for key and query at once.
  void pair(int64_t index, int64_t other, float& with_key, float& with_query) const {
    const float *right = keys + other * kp, *now = total + index * gp, *then = total + other * gp;
    if (!a.per_channel) {
      alignas(64) float factor[16] = {};
      factor[0] = now[0] - then[0];
      f_store(factor, f_exp(f_load(factor)));
      with_key = dot16(key, right, kp) * factor[0];
      with_query = dot16(query, right, kp) * factor[0];
      return;
    }
    for (int64_t c = 0; c < kp; c += L)
      f_store(grown + c, f_mul(f_load(right + c), f_exp(f_sub(f_load(now + c), f_load(then + c)))));
    with_key = dot16(key, grown, kp);
    with_query = dot16(query, grown, kp);
  }

  void decayed(float* to, const float* from, const float* decay) const {
    for (int64_t c = 0; c < kp; c += L) {
      const F factor = f_exp(a.per_channel ? f_load(decay + c) : f_set(decay[0]));
      f_store(to + c, f_mul(f_load(from + c), factor));
    }
  }

  void token(int64_t index, int64_t source) {
    std::memcpy(key, keys + index * kp, 4 * (size_t)kp);
    copy_padded(query, a.q + (source * a.key_heads + key_head) * a.key_dim, a.key_dim, kp);
    normalise(query, kp, 1.0f / std::sqrt((float)a.key_dim));
    float *pairs_key = pairs, *pairs_query = pairs + CHUNK;
    for (int64_t other = 0; other <= index; ++other) pair(index, other, pairs_key[other], pairs_query[other]);
    const float* now = total + index * gp;
    decayed(grown, key, now);        // k exp G
    decayed(grown + kp, query, now);  // q exp G
    for (int64_t u = 0; u < vp; u += L) {
      F taken = f_zero(), read = f_zero();
      for (int64_t c = 0; c < a.key_dim; ++c) {
        const F s = f_load(state + c * vp + u);
        taken = f_fma(f_set(grown[c]), s, taken);
        read = f_fma(f_set(grown[kp + c]), s, read);
      }
      for (int64_t other = 0; other < index; ++other) {
        const F d = f_load(written + other * vp + u);
        taken = f_fma(f_set(pairs_key[other]), d, taken);
        read = f_fma(f_set(pairs_query[other]), d, read);
      }
      f_store(target + u, taken);
      f_store(result + u, read);
    }
    const float beta = a.beta[source * a.heads + head];
    const float* value = a.v + (source * a.heads + head) * a.value_dim;
    float* here = written + index * vp;
    for (int64_t u = 0; u < a.value_dim; ++u) here[u] = beta * (value[u] - target[u]);
    for (int64_t u = a.value_dim; u < vp; ++u) here[u] = 0.0f;
    float* out = a.out + (source * a.heads + head) * a.value_dim;
    for (int64_t u = 0; u < a.value_dim; ++u) out[u] = result[u] + pairs_query[index] * here[u];
  }

  // The state after a whole chunk, into `state`.
  void advance() {
    const float* last = total + (CHUNK - 1) * gp;
    alignas(64) float factor[16];
    for (int64_t c = 0; c < a.key_dim; ++c) {
      const float at = last[a.per_channel ? c : 0];
      f_store(factor, f_exp(f_set(at)));
      const float kept = factor[0];
      for (int64_t index = 0; index < CHUNK; ++index)
        pairs[index] = at - total[index * gp + (a.per_channel ? c : 0)];
      for (int64_t index = 0; index < CHUNK; index += L) f_store(pairs + index, f_exp(f_load(pairs + index)));
      for (int64_t index = 0; index < CHUNK; ++index) pairs[index] *= keys[index * kp + c];
      for (int64_t u = 0; u < vp; u += L) {
        F sum = f_mul(f_set(kept), f_load(state + c * vp + u));
        for (int64_t index = 0; index < CHUNK; ++index)
          sum = f_fma(f_set(pairs[index]), f_load(written + index * vp + u), sum);
        f_store(state + c * vp + u, sum);
      }
    }
  }

  void run() {
    const int64_t size = a.key_dim * a.value_dim;
    const int64_t slot = a.state_in[row];
    for (int64_t c = 0; c < a.key_dim; ++c) {
      if (slot > 0)
        copy_padded(state + c * vp, a.state + (slot * a.heads + head) * size + c * a.value_dim, a.value_dim, vp);
      else
        std::memset(state + c * vp, 0, 4 * (size_t)vp);
    }
    const int64_t decay_width = a.per_channel ? a.key_dim : 1;
    int64_t crossing = 0;
    for (int64_t position = start; position < stop;) {
      const int64_t base = position - position % CHUNK;
      const int64_t end = base + CHUNK < stop ? base + CHUNK : stop;
      for (int64_t old = base; old < position; ++old) {
        enter(old - base, ring_key(old), ring_decay(old));
        copy_padded(written + (old - base) * vp, ring_written(old), a.value_dim, vp);
      }
      for (; position < end; ++position) {
        const int64_t source = begin + position - start;
        enter(position - base, a.k + (source * a.key_heads + key_head) * a.key_dim,
              a.g + (source * a.heads + head) * decay_width);
        token(position - base, source);
        // The ring of written values belongs to this head alone; keys and decays are kept when all heads are done.
        std::memcpy(ring_written(position), written + (position - base) * vp, 4 * (size_t)a.value_dim);
      }
      if (end != base + CHUNK) break;
      advance();
      const int64_t kept = a.state_out[row * a.crossings + crossing++];
      if (kept > 0)
        for (int64_t c = 0; c < a.key_dim; ++c)
          std::memcpy(a.state + (kept * a.heads + head) * size + c * a.value_dim, state + c * vp,
                      4 * (size_t)a.value_dim);
    }
  }
};

void keep_rows(const float* source, float* ring, int64_t width, int64_t ring_rows, const int32_t* open_index,
               const int32_t* row_offsets, const int32_t* starts, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t begin = row_offsets[row], count = row_offsets[row + 1] - begin, start = starts[row];
    for (int64_t i = count > ring_rows ? count - ring_rows : 0; i < count; ++i)
      std::memcpy(ring + (open_index[row] * ring_rows + (start + i) % ring_rows) * width, source + (begin + i) * width,
                  4 * (size_t)width);
  }
}

}  // namespace

void delta_rule(const DeltaRule& a) {
  parallel(a.rows * a.heads, [&](int64_t task) {
    float* room = (float*)scratch(RECURRENT, 4 * (size_t)Head::floats(a));
    const int64_t row = task / a.heads, head = task % a.heads;
    const int64_t key_head = a.tiled ? head % a.key_heads : head / (a.heads / a.key_heads);
    const int64_t begin = a.row_offsets[row], start = a.start_positions[row];
    Head(a, row, head, key_head, begin, start, start + a.row_offsets[row + 1] - begin, room).run();
  });
  const int64_t decay_width = a.heads * (a.per_channel ? a.key_dim : 1);
  keep_rows(a.k, a.open_k, a.key_heads * a.key_dim, a.ring, a.open_index, a.row_offsets, a.start_positions, a.rows);
  keep_rows(a.g, a.open_g, decay_width, a.ring, a.open_index, a.row_offsets, a.start_positions, a.rows);
}

struct Convolution {
  const float *x, *weight;
  float *out, *open_conv, *conv_tail;
  const int32_t *state_in, *state_out, *open_index, *row_offsets, *start_positions;
  int64_t rows, tokens, channels, width, ring, crossings;
};

namespace {

// Input of the convolution at an absolute position of a row, or null before the sequence's first token.
const float* conv_input(const Convolution& a, int64_t row, int64_t position) {
  const int64_t start = a.start_positions[row], base = start - start % CHUNK;
  if (position >= start) return a.x + (a.row_offsets[row] + position - start) * a.channels;
  if (position >= base) return a.open_conv + (a.open_index[row] * a.ring + position % a.ring) * a.channels;
  const int64_t slot = a.state_in[row], tap = position - base + a.width - 1;
  return slot > 0 && tap >= 0 ? a.conv_tail + (slot * (a.width - 1) + tap) * a.channels : nullptr;
}

}  // namespace

void convolve(const Convolution& a) {
  constexpr int64_t BLOCK = 2048;
  const int64_t blocks = (a.channels + BLOCK - 1) / BLOCK;
  parallel(a.tokens * blocks, [&](int64_t task) {
    const int64_t token = task / blocks, first = task % blocks * BLOCK;
    const int64_t last = first + BLOCK < a.channels ? first + BLOCK : a.channels, room = padded(last - first);
    float* sum = (float*)scratch(CONVOLUTION, 4 * (size_t)room);
    int64_t row = 0;
    while (a.row_offsets[row + 1] <= token) ++row;
    const int64_t position = a.start_positions[row] + token - a.row_offsets[row];
    std::memset(sum, 0, 4 * (size_t)room);
    for (int64_t tap = 0; tap < a.width; ++tap) {
      const float* input = conv_input(a, row, position - (a.width - 1) + tap);
      if (!input) continue;
      for (int64_t c = first; c < last; ++c) sum[c - first] += input[c] * a.weight[c * a.width + tap];
    }
    for (int64_t c = 0; c < room; c += L) {
      const F y = f_load(sum + c);
      f_store(sum + c, f_div(y, f_add(f_set(1.0f), f_exp(f_sub(f_zero(), y)))));
    }
    std::memcpy(a.out + token * a.channels + first, sum, 4 * (size_t)(last - first));
  });
  // Tails first: they may read ring rows that this step's own inputs then overwrite.
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t start = a.start_positions[row], stop = start + a.row_offsets[row + 1] - a.row_offsets[row];
    int64_t crossing = 0;
    for (int64_t boundary = start - start % CHUNK + CHUNK; boundary <= stop; boundary += CHUNK) {
      const int64_t slot = a.state_out[row * a.crossings + crossing++];
      if (slot <= 0) continue;
      for (int64_t tap = 0; tap + 1 < a.width; ++tap)
        std::memcpy(a.conv_tail + (slot * (a.width - 1) + tap) * a.channels,
                    conv_input(a, row, boundary - (a.width - 1) + tap), 4 * (size_t)a.channels);
    }
  }
  keep_rows(a.x, a.open_conv, a.channels, a.ring, a.open_index, a.row_offsets, a.start_positions, a.rows);
}

}  // namespace slim

extern "C" {
void slim_delta_rule(const slim::DeltaRule* arguments) { slim::delta_rule(*arguments); }
void slim_convolution(const slim::Convolution* arguments) { slim::convolve(*arguments); }
}
