// y = x W^T for packed weights. Everything is counted in units of four bytes: one f32, two bf16 or four int8 inputs.
//
// Weights: panels of 32 outputs; in a panel, unit after unit, 32 columns of one unit each (128 bytes). A thread reads a
// panel from front to back, which is what the memory likes best, and each panel is read from memory once, whatever the
// number of rows. Inputs: blocks of at most MOST_ROWS rows; in a block, unit after unit, one unit of each row.
#pragma once
#include "octavo.h"
#include "team.h"
#include "vec.h"

#include <utility>

namespace OCTAVO_ISA {

#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12;  // 24 accumulators of 16 floats, 2 weights, 1 input: the 32 registers of AVX-512
#else
constexpr int MOST_ROWS = 3;
#endif
constexpr int MOST_GROUP_ROWS = MOST_ROWS / 2;  // group formats keep a second set of accumulators
constexpr int GROUP = 32;                       // inputs that share a scale in the group formats
constexpr int PANEL = 32;                       // columns of a panel
constexpr int64_t GROUP_BYTES = 448 << 10;      // of panels that are worked on together: a part of the second-level cache
constexpr int OWN_BLOCKS = 2;                   // blocks of rows per thread from which on each thread keeps to its own
constexpr int64_t WARM = 128 << 10;             // bytes fetched while waiting: a part of the second-level cache

ALWAYS constexpr bool is_int8_input(int type) { return type == OCT_I8 || type == OCT_I8_GROUP || type == OCT_I4 || type == OCT_I4_AFFINE; }
ALWAYS constexpr bool has_groups(int type) { return type == OCT_I8_GROUP || type == OCT_I4 || type == OCT_I4_AFFINE; }
ALWAYS constexpr int inputs_per_unit(int type) { return is_int8_input(type) ? 4 : type == OCT_BF16 ? 2 : 1; }

// Bytes of one packed panel with k inputs.
ALWAYS int64_t panel_bytes(int type, int64_t k) {
  switch (type) {
    case OCT_F32: return k * PANEL * 4;
    case OCT_BF16: case OCT_F16: return k * PANEL * 2;
    case OCT_I8: return k * PANEL + PANEL * 4;                                 // then one f32 scale per column
    case OCT_I8_GROUP: return k / GROUP * (GROUP * PANEL + PANEL * 2);         // per group: weights, f16 scales
    case OCT_I4: return k / GROUP * (GROUP * PANEL / 2 + PANEL * 2);
    default: return k / GROUP * (GROUP * PANEL / 2 + PANEL * 4);               // OCT_I4_AFFINE: scales and minima
  }
}

// The inputs of a linear, blocked. int8 inputs carry a scale per row (groups == 1) or per row and group, and -128 times
// (or 1 times, for int4) the sum of the int8 values, because the weights are stored unsigned.
struct Inputs {
  uint32_t* units;
  float* scales;  // [rows][groups]
  int32_t* sums;  // [rows][groups]
  int rows, k, type, stride, groups;  // stride: rows of a block

  ALWAYS int units_per_row() const { return k / inputs_per_unit(type); }
  ALWAYS uint32_t* block(int b) const { return units + (int64_t)b * units_per_row() * stride; }
  ALWAYS int blocks() const { return (rows + stride - 1) / stride; }

  // Where the units of one row are: `stride` apart, from here on.
  ALWAYS uint32_t* row(int r) const { return block(r / stride) + r % stride; }

  // 16 values of a row from input `at` on (a multiple of 16). Not for int8: see quantise.
  ALWAYS void put(uint32_t* row, int at, f32x16 v) const {
    const int64_t step = stride;
    if (type == OCT_BF16) {
      uint32_t pairs[8];
      store(pairs, to_bf16(v));
      uint32_t* to = row + at / 2 * step;
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) to[i * step] = pairs[i];
    } else {
      uint32_t words[16];
      store(words, v);
      uint32_t* to = row + at * step;
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) to[i * step] = words[i];
    }
  }

  // A whole row of int8 inputs from floats [k].
  void quantise(int r, const float* x) const {
    const int size = k / groups;
    uint32_t* units_of_row = row(r);
    for (int g = 0; g < groups; g++) {
      const float* part = x + g * size;
      f32x16 top = splat(0.f);
      for (int i = 0; i < size; i += 16) { f32x16 v = load<f32x16>(part + i); top = vmax(top, vmax(v, -v)); }
      const float amax = highest(top), scale = amax / 127.f, inverse = amax > 0.f ? 127.f / amax : 0.f;
      uint32_t* to = units_of_row + (int64_t)(g * size / 4) * stride;
      i32x16 total = {};
      for (int i = 0; i < size; i += 16) {
        const f32x16 magic = splat(12582912.f);
        const f32x16 q = (load<f32x16>(part + i) * inverse + magic) - magic;
        const i32x16 whole = __builtin_convertvector(q, i32x16);
        total += whole;
        uint32_t words[4];
        store(words, __builtin_convertvector(whole, i8x16));
        for (int j = 0; j < 4; j++) to[(i / 4 + j) * stride] = words[j];
      }
      int32_t s = 0;
      for (int i = 0; i < 16; i++) s += total[i];
      scales[(int64_t)r * groups + g] = scale;
      sums[(int64_t)r * groups + g] = s;
    }
  }
};

ALWAYS Inputs make_inputs(void* memory, int rows, int k, int type) {
  const int most = has_groups(type) ? MOST_GROUP_ROWS : MOST_ROWS;
  const int blocks = (rows + most - 1) / most;
  Inputs x{};
  x.rows = rows, x.k = k, x.type = type, x.stride = rows ? (rows + blocks - 1) / blocks : 1;
  x.groups = has_groups(type) ? k / GROUP : 1;
  x.units = (uint32_t*)memory;
  const int64_t units = (int64_t)(rows + x.stride) * x.units_per_row();
  x.scales = (float*)(x.units + units);
  x.sums = (int32_t*)(x.scales + (int64_t)rows * x.groups);
  return x;
}

ALWAYS int64_t inputs_bytes(int rows, int k) { return (int64_t)(rows + MOST_ROWS) * k * 4 + (int64_t)rows * k / 4 + 4096; }

// acc += x · w for one unit of 16 columns.
ALWAYS f32x16 dot_bf16(f32x16 acc, uint32_t x, u32x16 w) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(x), (__m512bh)w);
#else
  float low, high;
  uint32_t l = x << 16, h = x & 0xffff0000u;
  memcpy(&low, &l, 4);
  memcpy(&high, &h, 4);
  return acc + low * (f32x16)(w << 16) + high * (f32x16)(w & 0xffff0000u);
#endif
}
ALWAYS i32x16 dot_i8(i32x16 acc, uint32_t x, u32x16 w) {  // w: four unsigned bytes a lane, x: four signed bytes
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#else
  for (int i = 0; i < 4; i++) acc += (i32x16)((w >> (8 * i)) & 255) * (int32_t)(int8_t)(x >> (8 * i));
  return acc;
#endif
}

// What to fetch while a tile is computed: each block of rows its part of the panel that this thread will want next. A
// fixed distance ahead in the same panel reached half the speed at 8 rows (a line has too little time to arrive), and
// 15 % more at 1 and 2 rows, which keep it.
constexpr int NEAR_ROWS = 2, NEAR = 2048;
struct Ahead {
  const char* next;
  int block, blocks;
};

// One tile: R rows of a block against one panel; out[r] are the 32 results of row r.
using TileOut = float (*)[PANEL];

template <int R, int TYPE>
ALWAYS void tile_plain(const Inputs& x, int block, const char* w, Ahead ahead, TileOut out) {
  constexpr int BYTES = TYPE == OCT_F16 ? 64 : 128;  // of one unit
  const int units = x.units_per_row(), stride = x.stride;
  const uint32_t* xu = x.block(block);
  f32x16 a[R][2] = {};
  const int step = (BYTES + ahead.blocks - 1) / ahead.blocks;
  const char* far = R <= NEAR_ROWS ? w + NEAR : ahead.next + (int64_t)ahead.block * units * step;
  const char* end = R <= NEAR_ROWS ? w + (int64_t)units * BYTES : nullptr;
  for (int u = 0; u < units; u++, xu += stride, w += BYTES, far += step) {
    if (R <= NEAR_ROWS) far = far == end ? ahead.next : far;
    prefetch(far);
    if (BYTES == 128) prefetch(far + 64);
    if constexpr (TYPE == OCT_BF16) {
      const u32x16 w0 = load<u32x16>(w), w1 = load<u32x16>(w + 64);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) a[r][0] = dot_bf16(a[r][0], xu[r], w0), a[r][1] = dot_bf16(a[r][1], xu[r], w1);
    } else {
      const f32x16 w0 = TYPE == OCT_F16 ? load_f16(w) : load<f32x16>(w), w1 = TYPE == OCT_F16 ? load_f16(w + 32) : load<f32x16>(w + 64);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        float f;
        memcpy(&f, xu + r, 4);
        a[r][0] += f * w0, a[r][1] += f * w1;
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) store(out[r], a[r][0]), store(out[r] + 16, a[r][1]);
}

template <int R>
ALWAYS void tile_int8(const Inputs& x, int block, const char* w, Ahead ahead, TileOut out) {
  const int units = x.units_per_row(), stride = x.stride, first = block * stride;
  const uint32_t* xu = x.block(block);
  i32x16 a[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) a[r][0] = a[r][1] = i32x16{} - 128 * x.sums[first + r];
  const int step = (128 + ahead.blocks - 1) / ahead.blocks;
  const char* far = R <= NEAR_ROWS ? w + NEAR : ahead.next + (int64_t)ahead.block * units * step;
  const char* end = R <= NEAR_ROWS ? w + (int64_t)units * 128 : nullptr;
  for (int u = 0; u < units; u++, xu += stride, w += 128, far += step) {
    if (R <= NEAR_ROWS) far = far == end ? ahead.next : far;
    prefetch(far);
    prefetch(far + 64);
    const u32x16 w0 = load<u32x16>(w), w1 = load<u32x16>(w + 64);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) a[r][0] = dot_i8(a[r][0], xu[r], w0), a[r][1] = dot_i8(a[r][1], xu[r], w1);
  }
  const f32x16 s0 = load<f32x16>(w), s1 = load<f32x16>(w + 64);  // behind the last unit
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    const float scale = x.scales[first + r];
    store(out[r], __builtin_convertvector(a[r][0], f32x16) * s0 * scale);
    store(out[r] + 16, __builtin_convertvector(a[r][1], f32x16) * s1 * scale);
  }
}

// Group formats: whole-number sums within 32 inputs, then scaled and added up as floats.
template <int R, int TYPE>
ALWAYS void tile_groups(const Inputs& x, int block, const char* w, Ahead ahead, TileOut out) {
  constexpr bool HALF = TYPE != OCT_I8_GROUP, AFFINE = TYPE == OCT_I4_AFFINE;
  constexpr int WEIGHTS = HALF ? GROUP * PANEL / 2 : GROUP * PANEL, BYTES = WEIGHTS + (AFFINE ? 128 : 64);
  const int stride = x.stride, first = block * stride, groups = x.groups;
  const uint32_t* xu = x.block(block);
  f32x16 f[R][2] = {};
  for (int g = 0; g < groups; g++, w += BYTES, xu += GROUP / 4 * stride) {
    const char* far = g + 2 < groups ? w + 2 * BYTES : ahead.next + (g + 2 - groups) * BYTES;
    for (int i = 0; i < BYTES; i += 64) prefetch(far + i);
    i32x16 a[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      // Weights are stored as q + 128 (int8) or q + 8 (int4), or as they are where a minimum goes with them.
      const int offset = AFFINE ? 0 : HALF ? 8 : 128;
      a[r][0] = a[r][1] = i32x16{} - offset * x.sums[(int64_t)(first + r) * groups + g];
    }
    if constexpr (HALF) {
#pragma GCC unroll 4
      for (int u = 0; u < GROUP / 8; u++) {  // a byte holds input quad u in its low and quad u + 4 in its high half
        const u32x16 p0 = load<u32x16>(w + u * 128), p1 = load<u32x16>(w + u * 128 + 64);
        const u32x16 l0 = p0 & 0x0f0f0f0f, l1 = p1 & 0x0f0f0f0f, h0 = (p0 >> 4) & 0x0f0f0f0f, h1 = (p1 >> 4) & 0x0f0f0f0f;
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const uint32_t lo = xu[u * stride + r], hi = xu[(u + 4) * stride + r];
          a[r][0] = dot_i8(dot_i8(a[r][0], lo, l0), hi, h0);
          a[r][1] = dot_i8(dot_i8(a[r][1], lo, l1), hi, h1);
        }
      }
    } else {
#pragma GCC unroll 8
      for (int u = 0; u < GROUP / 4; u++) {
        const u32x16 w0 = load<u32x16>(w + u * 128), w1 = load<u32x16>(w + u * 128 + 64);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const uint32_t in = xu[u * stride + r];
          a[r][0] = dot_i8(a[r][0], in, w0), a[r][1] = dot_i8(a[r][1], in, w1);
        }
      }
    }
    const f32x16 s0 = load_f16(w + WEIGHTS), s1 = load_f16(w + WEIGHTS + 32);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const int64_t at = (int64_t)(first + r) * groups + g;
      const float scale = x.scales[at];
      f[r][0] += __builtin_convertvector(a[r][0], f32x16) * (s0 * scale);
      f[r][1] += __builtin_convertvector(a[r][1], f32x16) * (s1 * scale);
      if constexpr (AFFINE) {
        const float total = scale * (float)x.sums[at];
        f[r][0] += total * load_f16(w + WEIGHTS + 64);
        f[r][1] += total * load_f16(w + WEIGHTS + 96);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) store(out[r], f[r][0]), store(out[r] + 16, f[r][1]);
}

template <int R, int TYPE>
__attribute__((noinline)) void tile(const Inputs& x, int block, const char* w, Ahead ahead, TileOut out) {
  if constexpr (TYPE == OCT_I8) tile_int8<R>(x, block, w, ahead, out);
  else if constexpr (has_groups(TYPE)) tile_groups<R, TYPE>(x, block, w, ahead, out);
  else tile_plain<R, TYPE>(x, block, w, ahead, out);
}

// The tile function of a type for a number of rows that is known only at run time.
using Tile = void (*)(const Inputs&, int, const char*, Ahead, TileOut);

template <int TYPE, int... R>
ALWAYS Tile tile_of(int rows, std::integer_sequence<int, R...>) {
  static constexpr Tile all[] = {tile<R + 1, TYPE>...};
  return all[rows - 1];
}
template <int TYPE>
ALWAYS Tile tile_of(int rows) { return tile_of<TYPE>(rows, std::make_integer_sequence<int, has_groups(TYPE) ? MOST_GROUP_ROWS : MOST_ROWS>()); }

inline Tile tile_for(int type, int rows) {
  switch (type) {
    case OCT_F32: return tile_of<OCT_F32>(rows);
    case OCT_BF16: return tile_of<OCT_BF16>(rows);
    case OCT_F16: return tile_of<OCT_F16>(rows);
    case OCT_I8: return tile_of<OCT_I8>(rows);
    case OCT_I8_GROUP: return tile_of<OCT_I8_GROUP>(rows);
    case OCT_I4: return tile_of<OCT_I4>(rows);
    default: return tile_of<OCT_I4_AFFINE>(rows);
  }
}

// Blocks [from, to) of the rows against `panels` panels that follow each other, `bytes` apart; next: the panels after
// them. A block of rows goes through all of them while it is in the cache. finish(panel, row, left 16 columns, right 16).
template <class Finish>
ALWAYS void rows_of_panels(const Inputs& x, int from, int to, int type, const char* w, const char* next, int panels, int64_t bytes, Finish finish) {
  alignas(64) float out[MOST_ROWS][PANEL];
  for (int b = from; b < to; b++) {
    const int first = b * x.stride, rows = x.rows - first < x.stride ? x.rows - first : x.stride;
    const Tile run = tile_for(type, rows);
    for (int p = 0; p < panels; p++) {
      run(x, b, w + p * bytes, Ahead{next + p * bytes, b - from, to - from}, out);
      for (int r = 0; r < rows; r++) finish(p, first + r, load<f32x16>(out[r]), load<f32x16>(out[r] + 16));
    }
  }
}

// What this thread will read first of a matrix.
ALWAYS Stream first_panel(const OctLinear& m) {
  const int64_t bytes = panel_bytes(m.type, m.k);
  const char* data = (const char*)m.data + Team::me() * bytes;
  return Team::me() * PANEL < m.n ? Stream{data, data + (bytes < WARM ? bytes : WARM)} : Stream{nullptr, nullptr};
}

// How many panels are worked on at a time: with many rows several, so that the rows, which then exceed the cache, are
// read once for all of them.
ALWAYS int panels_at_once(int blocks, int count, int64_t bytes) {
  const int most = blocks < 4 ? 1 : (int)(GROUP_BYTES / bytes < 4 ? GROUP_BYTES / bytes : 4);
  for (int n = most; n > 1; n--)
    if (count % n == 0) return n;
  return 1;
}

// All rows against all panels, by all threads. finish(panel, row, left, right) for columns panel*32 .. +31.
//
// Few rows: the panels are dealt out, so that each is read once. Many rows: each thread has rows of its own, the same
// in every phase of the step, and goes through all panels; what a thread reads next is then what it has written itself,
// and of two threads that read a panel the second finds it in the shared cache.
template <class Finish>
ALWAYS void linear(Team& team, const Inputs& x, const OctLinear& m, Finish finish) {
  const int64_t bytes = panel_bytes(m.type, m.k);
  const int count = (m.n + PANEL - 1) / PANEL, blocks = x.blocks();
  const char* data = (const char*)m.data;
  if (blocks < OWN_BLOCKS * team.threads()) {
    team.deal(count, [&](int p, int next) __attribute__((always_inline)) {
      const char* w = data + p * bytes;
      rows_of_panels(x, 0, blocks, m.type, w, next < 0 ? w : data + next * bytes, 1, bytes,
                     [&](int, int row, f32x16 l, f32x16 r) __attribute__((always_inline)) { finish(p, row, l, r); });
    });
    return;
  }
  const int step = panels_at_once(blocks / team.threads(), count, bytes);
  team.drain([&](int) { return count / step; }, [&](int q, int item, int next) __attribute__((always_inline)) {
    const char* w = data + item * step * bytes;
    rows_of_panels(x, team.part(blocks, q), team.part(blocks, q + 1), m.type, w, next < 0 ? w : data + next * step * bytes, step, bytes,
                   [&](int i, int row, f32x16 l, f32x16 r) __attribute__((always_inline)) { finish(item * step + i, row, l, r); });
  });
}

}  // namespace OCTAVO_ISA
