// Sparse latent attention, its pooled indexer, hyper-connections and the expert router. Every task is one token
// (or one token and head), walked in an order that depends on that token alone.
#include <algorithm>
#include <cstddef>
#include <functional>

#include "pool.h"
#include "rows.h"

namespace slim {
namespace {

constexpr int64_t PAGE = 64;
enum Scratch { SCORES = 7, LATENT = 7, STREAMS = 7 };  // never nested
enum Type { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, E4M3 = 3 };  // as activations.h numbers them

void read_row(float* to, const void* from, int type, int64_t index, int64_t n, int64_t room) {
  if (type == FLOAT32) {
    std::memcpy(to, (const float*)from + index, 4 * (size_t)n);
  } else if (type == BFLOAT16) {
    const uint16_t* source = (const uint16_t*)from + index;
    for (int64_t i = 0; i < n; ++i) to[i] = bf16_to_float(source[i]);
  } else if (type == FLOAT16) {
    const uint16_t* source = (const uint16_t*)from + index;
    for (int64_t i = 0; i < n; ++i) to[i] = half_to_float(source[i]);
  } else {
    const uint8_t* source = (const uint8_t*)from + index;
    for (int64_t i = 0; i < n; ++i) to[i] = e4m3_to_float(source[i]);
  }
  for (int64_t i = n; i < room; ++i) to[i] = 0.0f;
}

void write_row(void* to, int type, int64_t index, const float* from, int64_t n) {
  if (type == FLOAT32) std::memcpy((float*)to + index, from, 4 * (size_t)n);
  else
    for (int64_t i = 0; i < n; ++i) ((uint16_t*)to)[index + i] = float_to_bf16(from[i]);
}

float exp1(float x) {
  alignas(64) float lanes[16];
  f_store(lanes, f_exp(f_set(x)));
  return lanes[0];
}

float sigmoid1(float x) { return 1.0f / (1.0f + exp1(-x)); }

// The row that owns a flat token.
int64_t row_of(const int32_t* row_offsets, int64_t token) {
  int64_t row = 0;
  while (row_offsets[row + 1] <= token) ++row;
  return row;
}

// A float's place in the total order as an unsigned integer; NaN and -inf come last.
uint32_t ordered(float x) {
  if (x != x) return 0;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace

struct Pools {
  const float *keys, *gates, *ape;
  void* pages;
  float* raw;
  const int32_t *block_table, *open_index, *row_offsets, *start_positions;
  int64_t rows, pool, dim, ring, blocks;
  int page_type;
};

void update_pools(const Pools& a) {
  const int64_t room = padded(a.dim);
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t begin = a.row_offsets[row], count = a.row_offsets[row + 1] - begin, start = a.start_positions[row];
    const int64_t first = start / a.pool, last = (start + count) / a.pool;
    float* ring = a.raw + a.open_index[row] * a.ring * 2 * a.dim;
    const auto member = [&](int64_t position, int64_t part) {
      if (position < start) return (const float*)ring + (position % a.ring) * 2 * a.dim + part * a.dim;
      return (part ? a.gates : a.keys) + (begin + position - start) * a.dim;
    };
    parallel(last - first, [&](int64_t task) {
      const int64_t pool = first + task;
      float* out = (float*)scratch(SCORES, 4 * (size_t)(4 * room));
      float *best = out + room, *total = best + room, *weight = total + room;
      for (int64_t m = 0; m < a.pool; ++m) {
        const float *gate = member(pool * a.pool + m, 1), *ape = a.ape + m * a.dim;
        for (int64_t c = 0; c < a.dim; ++c)
          best[c] = m ? std::max(best[c], gate[c] + ape[c]) : gate[c] + ape[c];
      }
      for (int64_t c = a.dim; c < room; ++c) best[c] = 0.0f;
      for (int64_t m = 0; m < a.pool; ++m) {
        const float *gate = member(pool * a.pool + m, 1), *key = member(pool * a.pool + m, 0), *ape = a.ape + m * a.dim;
        for (int64_t c = 0; c < a.dim; ++c) weight[c] = gate[c] + ape[c] - best[c];
        for (int64_t c = a.dim; c < room; ++c) weight[c] = 0.0f;
        for (int64_t c = 0; c < room; c += L) f_store(weight + c, f_exp(f_load(weight + c)));
        for (int64_t c = 0; c < a.dim; ++c) {
          total[c] = m ? total[c] + weight[c] : weight[c];
          out[c] = m ? out[c] + weight[c] * key[c] : weight[c] * key[c];
        }
      }
      for (int64_t c = 0; c < a.dim; ++c) out[c] /= total[c];
      const int64_t per_page = PAGE / a.pool, page = a.block_table[row * a.blocks + pool / per_page];
      write_row(a.pages, a.page_type, (page * per_page + pool % per_page) * a.dim, out, a.dim);
    });
    for (int64_t i = count > a.ring ? count - a.ring : 0; i < count; ++i) {
      float* to = ring + ((start + i) % a.ring) * 2 * a.dim;
      std::memcpy(to, a.keys + (begin + i) * a.dim, 4 * (size_t)a.dim);
      std::memcpy(to + a.dim, a.gates + (begin + i) * a.dim, 4 * (size_t)a.dim);
    }
  }
}

struct Selection {
  const float *queries, *head_weights;
  const void* pages;
  const int32_t *block_table, *row_offsets, *start_positions;
  int32_t* chosen;
  int64_t tokens, heads, dim, pool, top_pools, blocks;
  float scale;
  int page_type;
};

namespace {

constexpr int64_t GROUP = 8;  // tokens that share the decoding of keys

// What one token of a group scores with, and where its ranks go; ranks is null where every visible pool is chosen.
struct Scored {
  const float *queries, *weights;
  uint64_t* ranks;
  int64_t visible;
};

// sum_h w_h relu(q_h . P * scale) of L pools at once: a lane is a pool, and its products are added in channel order.
F score_pools(const Selection& a, const Scored& token, const float* keys) {
  F score = f_zero();
  const auto add = [&](F dots, int64_t head) {
    // The second operand stands where one is NaN: a NaN product must rank last, not count as zero.
    score = f_fma(f_set(token.weights[head]), f_max(f_zero(), f_mul(dots, f_set(a.scale))), score);
  };
  int64_t head = 0;
  for (; head + 4 <= a.heads; head += 4) {
    const float* q = token.queries + head * a.dim;
    F dots[4];
    unroll<4>(UNROLLED(j) { dots[j] = f_zero(); });
    for (int64_t c = 0; c < a.dim; ++c) {
      const F key = f_load(keys + c * L);
      unroll<4>(UNROLLED(j) { dots[j] = f_fma(f_set(q[j * a.dim + c]), key, dots[j]); });
    }
    unroll<4>(UNROLLED(j) { add(dots[j], head + j); });
  }
  for (; head < a.heads; ++head) {
    F dots = f_zero();
    for (int64_t c = 0; c < a.dim; ++c) dots = f_fma(f_set(token.queries[head * a.dim + c]), f_load(keys + c * L), dots);
    add(dots, head);
  }
  return score;
}

// Pools first .. first + L - 1 of a row, channel by channel: [dim, L]; pools behind the last are zero.
void load_pools(const Selection& a, int64_t row, int64_t first, int64_t last, float* keys, float* line) {
  const int64_t per_page = PAGE / a.pool;
  for (int64_t lane = 0; lane < L; ++lane) {
    const int64_t pool = first + lane;
    if (pool < last) {
      const int64_t page = a.block_table[row * a.blocks + pool / per_page];
      read_row(line, a.pages, a.page_type, (page * per_page + pool % per_page) * a.dim, a.dim, a.dim);
    }
    for (int64_t c = 0; c < a.dim; ++c) keys[c * L + lane] = pool < last ? line[c] : 0.0f;
  }
}

// Tokens begin .. end - 1 of one row.
void select_group(const Selection& a, int64_t row, int64_t begin, int64_t end) {
  const int64_t first_position = a.start_positions[row] + begin - a.row_offsets[row];
  const int64_t most = (first_position + end - begin) / a.pool;
  Scored tokens[GROUP];
  uint8_t* memory = (uint8_t*)scratch(SCORES, 8 * (size_t)(GROUP * most) + 4 * (size_t)(a.dim * (L + 1)));
  float *keys = (float*)(memory + 8 * GROUP * most), *line = keys + a.dim * L;
  bool scoring = false;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t visible = (first_position + i - begin + 1) / a.pool;
    uint64_t* ranks = visible > a.top_pools ? (uint64_t*)memory + (i - begin) * most : nullptr;
    tokens[i - begin] = {a.queries + i * a.heads * a.dim, a.head_weights + i * a.heads, ranks, visible};
    scoring |= ranks != nullptr;
  }
  for (int64_t first = 0; scoring && first < most; first += L) {
    load_pools(a, row, first, most, keys, line);
    for (int64_t i = 0; i < end - begin; ++i) {
      if (!tokens[i].ranks || first >= tokens[i].visible) continue;
      alignas(64) float scores[16];
      f_store(scores, score_pools(a, tokens[i], keys));
      // A higher rank is a better pool; among equals the lower index.
      for (int64_t pool = first; pool < std::min(first + L, tokens[i].visible); ++pool)
        tokens[i].ranks[pool] = (uint64_t)ordered(scores[pool - first]) << 32 | (uint32_t)~(uint32_t)pool;
    }
  }
  for (int64_t i = 0; i < end - begin; ++i) {
    int32_t* out = a.chosen + (begin + i) * a.top_pools;
    uint64_t* ranks = tokens[i].ranks;
    const int64_t count = std::min(tokens[i].visible, a.top_pools);
    if (ranks) std::nth_element(ranks, ranks + count - 1, ranks + tokens[i].visible, std::greater<uint64_t>());
    for (int64_t place = 0; place < count; ++place) out[place] = ranks ? (int32_t)~(uint32_t)ranks[place] : (int32_t)place;
    for (int64_t place = count; place < a.top_pools; ++place) out[place] = -1;
    if (ranks) std::sort(out, out + count);
  }
}

}  // namespace

void select_pools(const Selection& a) {
  parallel((a.tokens + GROUP - 1) / GROUP, [&](int64_t task) {
    const int64_t stop = std::min(a.tokens, (task + 1) * GROUP);
    for (int64_t token = task * GROUP; token < stop;) {
      const int64_t row = row_of(a.row_offsets, token);
      const int64_t end = std::min<int64_t>(stop, a.row_offsets[row + 1]);
      select_group(a, row, token, end);
      token = end;
    }
  });
}

struct LatentAttention {
  const float* q;
  const void* latent;
  const int32_t *block_table, *pools, *row_offsets, *start_positions;
  float* out;
  int64_t tokens, heads, dim, pool, num_pools, blocks;
  float scale;
  int latent_type;
};

namespace {

// Attention of one head over listed tokens, in blocks of 64 list entries with a running maximum.
void attend(const LatentAttention& a, int64_t row, const float* query, const int64_t* tokens, int64_t count, float* keys,
            float* sum, int64_t room) {
  alignas(64) float weights[PAGE];
  float best = -INFINITY, total = 0.0f;
  std::memset(sum, 0, 4 * (size_t)room);
  for (int64_t first = 0; first < count; first += PAGE) {
    const int64_t block = std::min(PAGE, count - first);
    float top = best;
    for (int64_t i = 0; i < block; ++i) {
      const int64_t token = tokens[first + i], page = a.block_table[row * a.blocks + token / PAGE];
      read_row(keys + i * room, a.latent, a.latent_type, (page * PAGE + token % PAGE) * a.dim, a.dim, room);
      weights[i] = dot16(query, keys + i * room, room) * a.scale;
      top = std::max(top, weights[i]);
    }
    for (int64_t i = block; i < PAGE; ++i) weights[i] = -INFINITY;
    const float fade = best == -INFINITY ? 0.0f : exp1(best - top);
    for (int64_t i = 0; i < PAGE; i += L) f_store(weights + i, f_exp(f_sub(f_load(weights + i), f_set(top))));
    float mass = 0.0f;
    for (int64_t i = 0; i < block; ++i) mass += weights[i];
    total = total * fade + mass;
    for (int64_t c = 0; c < room; c += L) {
      F z = f_mul(f_load(sum + c), f_set(fade));
      for (int64_t i = 0; i < block; ++i) z = f_fma(f_set(weights[i]), f_load(keys + i * room + c), z);
      f_store(sum + c, z);
    }
    best = top;
  }
  const float factor = total > 0.0f ? 1.0f / total : total == total ? 0.0f : total;
  for (int64_t c = 0; c < room; c += L) f_store(sum + c, f_mul(f_load(sum + c), f_set(factor)));
}

}  // namespace

void latent_attention(const LatentAttention& a) {
  const int64_t room = padded(a.dim);
  parallel(a.tokens * a.heads, [&](int64_t task) {
    const int64_t token = task / a.heads, row = row_of(a.row_offsets, token);
    const int64_t position = a.start_positions[row] + token - a.row_offsets[row];
    const int64_t most = a.pools ? a.num_pools * a.pool + a.pool : position + 1;
    uint8_t* memory = (uint8_t*)scratch(LATENT, 8 * (size_t)most + 4 * (size_t)(room * (PAGE + 2)));
    int64_t *tokens = (int64_t*)memory, count = 0;
    float *keys = (float*)(memory + 8 * most), *query = keys + room * PAGE, *sum = query + room;
    const int64_t visible = (position + 1) / a.pool, tail = a.pools ? visible * a.pool : 0;
    if (a.pools)
      for (int64_t i = 0; i < a.num_pools; ++i) {
        const int64_t pool = a.pools[token * a.num_pools + i];
        if (pool < 0 || pool >= visible) continue;
        for (int64_t m = 0; m < a.pool; ++m) tokens[count++] = pool * a.pool + m;
      }
    for (int64_t t = tail; t <= position; ++t) tokens[count++] = t;
    read_row(query, a.q, FLOAT32, task * a.dim, a.dim, room);
    attend(a, row, query, tokens, count, keys, sum, room);
    std::memcpy(a.out + task * a.dim, sum, 4 * (size_t)a.dim);
  });
}

struct HyperPre {
  const float *streams, *mixes, *base, *scale;
  float *collapsed, *post, *comb;
  int64_t tokens, count, hidden, iterations;
  float norm_eps, eps;
};

void hyper_pre(const HyperPre& a) {
  const int64_t n = a.count, coefficients = (2 + n) * n, size = n * a.hidden;
  parallel(a.tokens, [&](int64_t token) {
    const float *x = a.streams + token * size, *mixes = a.mixes + token * coefficients;
    alignas(64) float chain[16] = {};
    for (int64_t i = 0; i < size; ++i) chain[i % 16] += x[i] * x[i];
    const float inverse = 1.0f / std::sqrt(reduce16(chain) / (float)size + a.norm_eps);
    float pre[16], *post = a.post + token * n, *comb = a.comb + token * n * n;
    const auto mixed = [&](int64_t i, int part) { return mixes[i] * inverse * a.scale[part] + a.base[i]; };
    for (int64_t i = 0; i < n; ++i) {
      pre[i] = sigmoid1(mixed(i, 0)) + a.eps;
      post[i] = 2.0f * sigmoid1(mixed(n + i, 1));
    }
    for (int64_t i = 0; i < n; ++i) {
      float top = -INFINITY, sum = 0.0f;
      for (int64_t j = 0; j < n; ++j) top = std::max(top, comb[i * n + j] = mixed(2 * n + i * n + j, 2));
      for (int64_t j = 0; j < n; ++j) sum += comb[i * n + j] = exp1(comb[i * n + j] - top);
      for (int64_t j = 0; j < n; ++j) comb[i * n + j] = comb[i * n + j] / sum + a.eps;
    }
    const auto balance = [&](int64_t across, int64_t along) {  // divide each line by its sum
      for (int64_t i = 0; i < n; ++i) {
        float sum = 0.0f;
        for (int64_t j = 0; j < n; ++j) sum += comb[i * across + j * along];
        for (int64_t j = 0; j < n; ++j) comb[i * across + j * along] /= sum + a.eps;
      }
    };
    balance(1, n);  // columns first
    for (int64_t step = 1; step < a.iterations; ++step) {
      balance(n, 1);
      balance(1, n);
    }
    float* out = a.collapsed + token * a.hidden;
    for (int64_t c = 0; c < a.hidden; ++c) out[c] = pre[0] * x[c];
    for (int64_t i = 1; i < n; ++i)
      for (int64_t c = 0; c < a.hidden; ++c) out[c] += pre[i] * x[i * a.hidden + c];
  });
}

struct HyperPost {
  const float *streams, *block_out, *post, *comb;
  float* out;
  int64_t tokens, count, hidden;
};

void hyper_post(const HyperPost& a) {
  const int64_t n = a.count;
  parallel(a.tokens * n, [&](int64_t task) {
    const int64_t token = task / n, target = task % n;
    const float *x = a.streams + token * n * a.hidden, *y = a.block_out + token * a.hidden;
    const float post = a.post[token * n + target], *comb = a.comb + token * n * n;
    float* out = a.out + task * a.hidden;
    for (int64_t c = 0; c < a.hidden; ++c) out[c] = post * y[c];
    for (int64_t i = 0; i < n; ++i) {
      const float weight = comb[i * n + target];
      for (int64_t c = 0; c < a.hidden; ++c) out[c] += weight * x[i * a.hidden + c];
    }
  });
}

struct Routing {
  const float *logits, *bias;
  int32_t* ids;
  float* weights;
  int64_t tokens, experts, top_k;
  float scaling;
  int normalise;
};

void route(const Routing& a) {
  parallel(a.tokens, [&](int64_t token) {
    const int64_t room = padded(a.experts);
    uint8_t* memory = (uint8_t*)scratch(STREAMS, 12 * (size_t)room);
    uint64_t* order = (uint64_t*)memory;
    float* scores = (float*)(memory + 8 * room);
    read_row(scores, a.logits, FLOAT32, token * a.experts, a.experts, room);
    for (int64_t e = 0; e < room; e += L)
      f_store(scores + e, f_div(f_set(1.0f), f_add(f_set(1.0f), f_exp(f_sub(f_zero(), f_load(scores + e))))));
    for (int64_t e = 0; e < a.experts; ++e)
      order[e] = (uint64_t)ordered(scores[e] + a.bias[e]) << 32 | (uint32_t)~(uint32_t)e;
    std::partial_sort(order, order + a.top_k, order + a.experts, std::greater<uint64_t>());
    float total = 0.0f;
    for (int64_t i = 0; i < a.top_k; ++i) {
      const uint32_t expert = ~(uint32_t)order[i];
      a.ids[token * a.top_k + i] = (int32_t)expert;
      total += a.weights[token * a.top_k + i] = scores[expert];
    }
    const float divisor = a.normalise ? total + 1e-20f : 1.0f;
    for (int64_t i = 0; i < a.top_k; ++i) {
      float& weight = a.weights[token * a.top_k + i];
      weight = weight / divisor * a.scaling;
    }
  });
}

struct LayerNorm {
  const float *x, *weight, *bias;
  float* out;
  int64_t rows, size;
  float eps;
};

void layer_norm(const LayerNorm& a) {
  parallel(a.rows, [&](int64_t row) {
    const float* x = a.x + row * a.size;
    float* out = a.out + row * a.size;
    alignas(64) float chain[16] = {};
    for (int64_t i = 0; i < a.size; ++i) chain[i % 16] += x[i];
    const float mean = reduce16(chain) / (float)a.size;
    std::memset(chain, 0, sizeof chain);
    for (int64_t i = 0; i < a.size; ++i) chain[i % 16] += (x[i] - mean) * (x[i] - mean);
    const float inverse = 1.0f / std::sqrt(reduce16(chain) / (float)a.size + a.eps);
    for (int64_t i = 0; i < a.size; ++i) out[i] = (x[i] - mean) * inverse * a.weight[i] + a.bias[i];
  });
}

// Elementwise gates over n values; every value takes the same path, wherever it stands.
struct Gate {
  const float *x, *gate;
  float* out;
  int64_t n;
  int silu;
};

void gate_multiply(const Gate& a) {
  constexpr int64_t BLOCK = 4096;
  parallel((a.n + BLOCK - 1) / BLOCK, [&](int64_t task) {
    const int64_t last = std::min(a.n, (task + 1) * BLOCK);
    for (int64_t i = task * BLOCK; i < last; i += L) {
      const int count = (int)std::min<int64_t>(L, last - i);
      const F gate = f_load_n(a.gate + i, count);
      F factor = f_div(f_set(1.0f), f_add(f_set(1.0f), f_exp(f_sub(f_zero(), gate))));
      if (a.silu) factor = f_mul(gate, factor);
      f_store_n(a.out + i, f_mul(f_load_n(a.x + i, count), factor), count);
    }
  });
}

struct LogDecay {
  const float *u, *bias, *rate;
  float* out;
  int64_t tokens, heads, width;
  float lower_bound;
  int bounded;
};

void log_decay(const LogDecay& a) {
  parallel(a.tokens, [&](int64_t token) {
    for (int64_t h = 0; h < a.heads; ++h)
      for (int64_t c = 0; c < a.width; ++c) {
        const int64_t i = h * a.width + c;
        const float x = a.u[token * a.heads * a.width + i] + a.bias[i], rate = a.rate[h];
        float& out = a.out[token * a.heads * a.width + i];
        if (a.bounded) out = a.lower_bound * sigmoid1(-rate * x);
        else out = rate * (x > 20.0f ? x : std::log1p(std::exp(x)));
      }
  });
}

}  // namespace slim

extern "C" {
void slim_gate_multiply(const slim::Gate* arguments) { slim::gate_multiply(*arguments); }
void slim_log_decay(const slim::LogDecay* arguments) { slim::log_decay(*arguments); }
void slim_update_pools(const slim::Pools* arguments) { slim::update_pools(*arguments); }
void slim_select_pools(const slim::Selection* arguments) { slim::select_pools(*arguments); }
void slim_latent_attention(const slim::LatentAttention* arguments) { slim::latent_attention(*arguments); }
void slim_hyper_pre(const slim::HyperPre* arguments) { slim::hyper_pre(*arguments); }
void slim_hyper_post(const slim::HyperPost* arguments) { slim::hyper_post(*arguments); }
void slim_route(const slim::Routing* arguments) { slim::route(*arguments); }
void slim_layer_norm(const slim::LayerNorm* arguments) { slim::layer_norm(*arguments); }
}
