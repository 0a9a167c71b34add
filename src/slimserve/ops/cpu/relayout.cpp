// From the rows of a file to panels (see panel.h), once at load; and single rows of panels back to float32.
#include <atomic>

#include "multiply.h"
#include "pool.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace slim {
namespace {

// A scale field of a block: `count` values of `size` bytes from byte `offset`, stored for 16 rows side by side.
struct Field {
  int offset, size, count;
};
struct Shape {
  int block, bytes;   // elements and bytes of one file block
  int num_fields;
  Field fields[4];
};

const Shape* shape_of(int format) {
  static const Shape q4_0{32, 18, 1, {{0, 2, 1}}}, q4_1{32, 20, 1, {{0, 2, 2}}}, q5_0{32, 22, 1, {{0, 2, 1}}},
      q5_1{32, 24, 1, {{0, 2, 2}}}, q8_0{32, 34, 1, {{0, 2, 1}}}, q2_k{256, 84, 2, {{0, 1, 16}, {80, 2, 2}}},
      q3_k{256, 110, 2, {{96, 1, 12}, {108, 2, 1}}}, q4_k{256, 144, 2, {{0, 2, 2}, {4, 1, 12}}},
      q5_k{256, 176, 2, {{0, 2, 2}, {4, 1, 12}}}, q6_k{256, 210, 2, {{192, 1, 16}, {208, 2, 1}}},
      iq4_xs{256, 136, 2, {{0, 2, 2}, {4, 1, 4}}}, mxfp4{32, 17, 1, {{0, 1, 1}}}, nvfp4{64, 36, 1, {{0, 1, 4}}},
      e2m1{32, 16, 0, {}}, int4{128, 64, 0, {}};
  switch (format) {
    case Q4_0: case IQ4_NL: return &q4_0;
    case Q4_1: return &q4_1;
    case Q5_0: return &q5_0;
    case Q5_1: return &q5_1;
    case Q8_0: return &q8_0;
    case Q2_K: return &q2_k;
    case Q3_K: return &q3_k;
    case Q4_K: return &q4_k;
    case Q5_K: return &q5_k;
    case Q6_K: return &q6_k;
    case IQ4_XS: return &iq4_xs;
    case MXFP4: return &mxfp4;
    case NVFP4: return &nvfp4;
    case E2M1_G16: return &e2m1;
    case INT4: return &int4;
    default: return nullptr;
  }
}

INLINE void nibbles16(const uint8_t* p, uint8_t* c) {
  for (int i = 0; i < 16; ++i) {
    c[i] = p[i] & 15;
    c[i + 16] = p[i] >> 4;
  }
}

// The integer codes of one block, in element order.
void block_codes(int format, const uint8_t* b, uint8_t* c) {
  switch (format) {
    case Q4_0: case IQ4_NL: nibbles16(b + 2, c); break;
    case Q4_1: nibbles16(b + 4, c); break;
    case MXFP4: nibbles16(b + 1, c); break;
    case Q5_0: case Q5_1: {
      const uint8_t* qh = b + (format == Q5_0 ? 2 : 4);
      nibbles16(qh + 4, c);
      for (int i = 0; i < 32; ++i) c[i] = (uint8_t)(c[i] | (qh[i / 8] >> (i % 8) & 1) << 4);
      break;
    }
    case Q8_0:
      for (int i = 0; i < 32; ++i) c[i] = b[2 + i] ^ 0x80;
      break;
    case Q2_K: case Q3_K: {
      const uint8_t* q = b + (format == Q2_K ? 16 : 32);
      for (int i = 0; i < 256; ++i) {
        c[i] = q[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3;
        if (format == Q3_K) c[i] = (uint8_t)(c[i] | (b[i % 32] >> (i / 32) & 1) << 2);
      }
      break;
    }
    case Q4_K: case Q5_K: {
      const uint8_t* q = b + (format == Q4_K ? 16 : 48);
      for (int i = 0; i < 256; ++i) {
        c[i] = q[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
        if (format == Q5_K) c[i] = (uint8_t)(c[i] | (b[16 + i % 32] >> (i / 32) & 1) << 4);
      }
      break;
    }
    case Q6_K:
      for (int i = 0; i < 256; ++i) {
        const int half = i / 128, group = i / 32 % 4, e = i % 32;
        const int low = b[half * 64 + (group & 1) * 32 + e] >> (group / 2 * 4) & 15;
        c[i] = (uint8_t)(low | (b[128 + half * 32 + e] >> (2 * group) & 3) << 4);
      }
      break;
    case IQ4_XS:
      for (int g = 0; g < 8; ++g) nibbles16(b + 8 + 16 * g, c + 32 * g);
      break;
    case NVFP4:
      for (int i = 0; i < 64; ++i) c[i] = b[4 + i / 16 * 8 + i % 8] >> (i / 8 % 2 * 4) & 15;
      break;
    case E2M1_G16: case INT4: {  // low nibble = even element
      const int count = format == INT4 ? 128 : 32;
      for (int i = 0; i < count; ++i) c[i] = b[i / 2] >> (i % 2 * 4) & 15;
      break;
    }
  }
}

// Writes 32 codes of `row` into the planes of a group.
void put_group(int bits, const uint8_t* c, int row, uint8_t* group) {
  for (int e = 0; e < 4; ++e) {
    const int at = 4 * row + e;
    const auto code = [&](int j) { return c[4 * j + e]; };
    if (bits == 8) {
      for (int j = 0; j < 8; ++j) group[64 * j + at] = code(j);
      continue;
    }
    uint8_t* top = group;
    int shift = 0;
    if (bits >= 4) {
      for (int j = 0; j < 4; ++j) group[64 * j + at] = (uint8_t)((code(j) & 15) | (code(j + 4) & 15) << 4);
      top = group + 256;
      shift = 4;
    }
    if (bits == 2 || bits == 3 || bits == 6) {
      for (int half = 0; half < 2; ++half) {
        uint8_t packed = 0;
        for (int j = 0; j < 4; ++j) packed = (uint8_t)(packed | (code(4 * half + j) >> shift & 3) << (2 * j));
        top[64 * half + at] = packed;
      }
      top += 128;
      shift += 2;
    }
    if (bits == 3 || bits == 5) {
      uint8_t packed = 0;
      for (int j = 0; j < 8; ++j) packed = (uint8_t)(packed | (code(j) >> shift & 1) << j);
      top[at] = packed;
    }
  }
}

INLINE int get_code(int bits, const uint8_t* group, int row, int element) {
  const int j = element / 4, at = 4 * row + element % 4;
  if (bits == 8) return group[64 * j + at];
  int code = 0, shift = 0;
  const uint8_t* top = group;
  if (bits >= 4) {
    code = group[64 * (j & 3) + at] >> (j < 4 ? 0 : 4) & 15;
    top = group + 256;
    shift = 4;
  }
  if (bits == 2 || bits == 3 || bits == 6) {
    code |= (top[64 * (j >> 2) + at] >> (2 * (j & 3)) & 3) << shift;
    top += 128;
    shift += 2;
  }
  if (bits == 3 || bits == 5) code |= (top[at] >> j & 1) << shift;
  return code;
}

int plain_bytes(int format) { return format == F32 ? 4 : format == F16 || format == BF16 ? 2 : 1; }

void relayout_plain(int format, const uint8_t* rows, int64_t row_stride, int64_t num_rows, int64_t columns,
                    uint8_t* out) {
  const int size = plain_bytes(format);
  for (int64_t k = 0; k < columns; ++k)
    for (int64_t row = 0; row < num_rows; ++row)
      std::memcpy(out + (k * ROWS + row) * size, rows + row * row_stride + k * size, (size_t)size);
}

// Side scales of safetensors formats: E4M3 bytes [N, K / 16] or float32 [N, K / 128].
struct Side {
  const uint8_t* data;
  int64_t stride;
};

void relayout_panel(int format, const FormatKernels& k, const uint8_t* rows, int64_t row_stride, const Side& side,
                    int64_t num_rows, int64_t columns, uint8_t* out) {
  const Shape& shape = *shape_of(format);
  const int64_t blocks = columns / shape.block, group_bytes = 64 * k.bits;
  for (int64_t row = 0; row < num_rows; ++row) {
    const uint8_t* source = rows + row * row_stride;
    for (int64_t block = 0; block < blocks; ++block) {
      const uint8_t* b = source + block * shape.bytes;
      uint8_t codes[256];
      block_codes(format, b, codes);
      uint8_t* s = out + block * k.unit_bytes;
      for (int g = 0; g < shape.block / 32; ++g)
        put_group(k.bits, codes + 32 * g, (int)row, s + k.scale_bytes + g * group_bytes);
      for (int f = 0; f < shape.num_fields; ++f) {
        const Field& field = shape.fields[f];
        for (int i = 0; i < field.count; ++i) {
          std::memcpy(s + row * field.size, b + field.offset + i * field.size, (size_t)field.size);
          s += ROWS * field.size;
        }
      }
      if (format == E2M1_G16) {
        for (int i = 0; i < 2; ++i) s[ROWS * i + row] = side.data[row * side.stride + block * 2 + i];
      } else if (format == INT4) {
        std::memcpy(s + 4 * row, side.data + row * side.stride + block * 4, 4);
      }
    }
  }
}

}  // namespace
}  // namespace slim

extern "C" {

// Bytes of one panel; 0 for raw formats (16 rows of the file) and -1 for unknown ones.
int64_t slim_panel_bytes(int format, int64_t columns) {
  using namespace slim;
  const int64_t groups = (columns + 31) / 32;
  if (plain_kernel(format, 1) != nullptr) return groups * 32 * ROWS * plain_bytes(format);
  const FormatKernels* k = packed_kernels(format);
  if (k == nullptr || columns <= 0 || columns % k->unit != 0) return -1;
  if (k->bits == 0) return 0;
  return (columns / k->unit * k->unit_bytes + 63) / 64 * 64;
}

// rows [N] of `row_stride` bytes -> panels at `out` (whole panels; rows past N and padding become zero bytes).
void slim_relayout(int format, const uint8_t* rows, int64_t row_stride, const uint8_t* side, int64_t side_stride,
                   int64_t num_rows, int64_t columns, uint8_t* out) {
  using namespace slim;
  const int64_t panel_bytes = slim_panel_bytes(format, columns);
  if (panel_bytes <= 0) return;
  const FormatKernels* k = packed_kernels(format);
  const int64_t panels = (num_rows + ROWS - 1) / ROWS, per_task = panels / 64 + 1;
  parallel((panels + per_task - 1) / per_task, [&](int64_t task) {
    for (int64_t panel = task * per_task; panel < panels && panel < (task + 1) * per_task; ++panel) {
      uint8_t* to = out + panel * panel_bytes;
      std::memset(to, 0, (size_t)panel_bytes);
      const uint8_t* from = rows + panel * ROWS * row_stride;
      const int64_t count = num_rows - panel * ROWS < ROWS ? num_rows - panel * ROWS : ROWS;
      if (k == nullptr) {
        relayout_plain(format, from, row_stride, count, columns, to);
      } else {
        relayout_panel(format, *k, from, row_stride, {side + panel * ROWS * side_stride, side_stride}, count, columns,
                       to);
      }
    }
  });
}

// Asks the system for huge pages under [p, p + bytes): weights are read in long streams.
void slim_advise(void* p, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t start = ((uintptr_t)p + 4095) / 4096 * 4096, end = ((uintptr_t)p + (uintptr_t)bytes) / 4096 * 4096;
  if (end > start) madvise((void*)start, end - start, MADV_HUGEPAGE);
#else
  (void)p;
  (void)bytes;
#endif
}

// Loads every byte of [p, p + bytes) once, whole pages of 4 KB, on all threads: what a product of one row is held against.
// The result says nothing; it keeps the loads.
uint32_t slim_read(const uint8_t* p, int64_t bytes) {
  using namespace slim;
  constexpr int64_t PAGE = 4096, TASK = 64 * PAGE;
  const int64_t pages = bytes / PAGE * PAGE;
  std::atomic<uint32_t> seen{0};
  parallel((pages + TASK - 1) / TASK, [&](int64_t task) {
    I x[4] = {i_zero(), i_zero(), i_zero(), i_zero()};
    const int64_t end = (task + 1) * TASK < pages ? (task + 1) * TASK : pages;
    for (int64_t at = task * TASK; at < end; at += 16 * L)
      unroll<4>(EACH(i) { x[i] = i_xor(x[i], i_load(p + at + 4 * L * i)); });
    uint32_t words[L];
    i_store(words, i_xor(i_xor(x[0], x[1]), i_xor(x[2], x[3])));
    for (int i = 0; i < L; ++i) seen.fetch_xor(words[i], std::memory_order_relaxed);
  });
  return seen.load();
}

// Rows ids[T] of a part in panel form -> y [T, K]; ids outside [0, N) are clamped.
void slim_panel_rows(const slim::Part* part, const int64_t* ids, int64_t count, void* y, int y_type) {
  using namespace slim;
  const FormatKernels* k = packed_kernels(part->format);
  const int64_t columns = part->columns, groups = (columns + 31) / 32;
  parallel(count, [&](int64_t i) {
    int64_t id = ids[i] < 0 ? 0 : ids[i] >= part->rows ? part->rows - 1 : ids[i];
    const int64_t panel = id / ROWS;
    const int row = (int)(id % ROWS);
    const uint8_t* data = part->data + panel * part->panel_bytes;
    const float row_scale = part->row_scale != nullptr ? part->row_scale[id] : 1.0f;
    if (k == nullptr) {
      const int size = plain_bytes(part->format);
      const int type = part->format == F32 ? TYPE_F32 : part->format == F16 ? TYPE_F16 : part->format == BF16 ? TYPE_BF16 : TYPE_F8;
      for (int64_t e = 0; e < columns; ++e) {
        float value = read_value(data + (e * ROWS + row) * size, 0, type);
        if (part->block_scale != nullptr) value *= part->block_scale[id / 128 * ((columns + 127) / 128) + e / 128];
        write_value(y, i * columns + e, y_type, value * row_scale);
      }
      return;
    }
    const int words = k->min ? 2 : 1, per = 32 / k->group;
    if (k->bits == 0) {  // raw rows: decode this one alone
      uint8_t* codes = (uint8_t*)scratch(3, (size_t)(groups * 512));
      float* scales = (float*)scratch(4, (size_t)(groups * per * ROWS * 4));
      Part one = *part;
      one.rows = 1;
      k->decode(data + row * (part->panel_bytes / ROWS), one, groups, codes, scales);
      for (int64_t e = 0; e < columns; ++e) {
        const int code = codes[e / 4 * 64 + e % 4] - k->offset;
        write_value(y, i * columns + e, y_type, scales[e / k->group * ROWS] * (float)code * row_scale);
      }
      return;
    }
    uint8_t* codes = (uint8_t*)scratch(3, (size_t)(groups * 512));
    float* scales = (float*)scratch(4, (size_t)(groups * per * words * ROWS * 4));
    k->decode(data, *part, groups, codes, scales);
    for (int64_t e = 0; e < columns; ++e) {
      const int code = codes[e / 4 * 64 + 4 * row + e % 4] - k->offset;
      const float* s = scales + (e / k->group * words) * ROWS + row;
      float value = s[0] * (float)code;
      if (k->min) value += s[ROWS];
      write_value(y, i * columns + e, y_type, value * row_scale);
    }
  });
}

// Rows ids[T] of a table in the file's layout (raw rows) -> y [T, K].
void slim_file_rows(int format, const uint8_t* rows, int64_t row_stride, int64_t num_rows, int64_t columns,
                    const int64_t* ids, int64_t count, void* y, int y_type) {
  using namespace slim;
  const int size = plain_bytes(format);
  const int64_t panel_bytes = slim_panel_bytes(format, columns);
  if (panel_bytes < 0) return;
  const FormatKernels* k = packed_kernels(format);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = ids[i] < 0 ? 0 : ids[i] >= num_rows ? num_rows - 1 : ids[i];
    const uint8_t* row = rows + id * row_stride;
    uint8_t* out = (uint8_t*)y + i * columns * type_bytes(y_type);
    if (k == nullptr) {
      const int type = format == F32 ? TYPE_F32 : format == F16 ? TYPE_F16 : format == BF16 ? TYPE_BF16 : TYPE_F8;
      for (int64_t e = 0; e < columns; ++e) write_value(out, e, y_type, read_value(row + e * size, 0, type));
      continue;
    }
    Part part{};
    part.format = format;
    part.rows = 1;
    part.columns = columns;
    part.data = row;
    part.panel_bytes = row_stride * ROWS;
    if (k->bits != 0) {
      uint8_t* panel = (uint8_t*)scratch(5, (size_t)panel_bytes);
      std::memset(panel, 0, (size_t)panel_bytes);
      relayout_panel(format, *k, row, row_stride, {nullptr, 0}, 1, columns, panel);
      part.data = panel;
      part.panel_bytes = panel_bytes;
    }
    const int64_t zero = 0;
    slim_panel_rows(&part, &zero, 1, out, y_type);
  }
}

}  // extern "C"
