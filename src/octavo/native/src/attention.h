// Attention over paged KV: one kernel for decode (few query rows: walk the tokens) and one for prompts (many rows:
// matrix products over tiles that are repacked once). Both keep running maxima and sums (online softmax).
#pragma once
#include "linear.h"

namespace OCTAVO_ISA {

constexpr int TILE = 64;          // tokens whose scores are held at once
constexpr int MOST_DIRECT = 8;    // query rows (tokens x heads of one KV head) up to which walking is cheaper
constexpr int QUERY_ROWS = 96;    // query rows of one prompt task
constexpr int MOST_DIM = 256;
constexpr int SPLIT_TOKENS = 256; // least context of a part when one sequence's context is split over threads

// One layer's view of the cache and how its scores become weights.
struct Attention {
  const OctBatch* batch;
  const void* q;  // [tokens][heads][k_dim], f32 or bf16
  bool q_bf16;
  void* rows;  // the result [tokens][heads][v_dim], f32 or bf16
  bool rows_bf16;
  int64_t k_at, v_at, k_scale_at, v_scale_at;
  int heads, kv_heads, k_dim, v_dim, window, group, kv_type;
  float scale, softcap;
  const float* sinks;

  int per_kv() const { return heads / kv_heads; }

  void put(int token, int head, int dim, f32x16 v) const {
    const int64_t at = (int64_t)head * v_dim + dim;
    if (rows_bf16) store((bf16*)rows + (int64_t)token * heads * v_dim + at, to_bf16(v));
    else store((float*)rows + (int64_t)token * heads * v_dim + at, v);
  }
};

// Query tokens [first, first + count) of sequence `seq` against the KV tokens [from, to) of one KV head.
// part: -1, or the slot in which a partial result is left.
struct Task {
  int32_t seq, kv_head, first, count, from, to, part;
};

// What is left of part of a context: per head the maximum, the sum of weights and the weighted values.
struct Part {
  float top, total;
};

ALWAYS constexpr int kv_bytes(int type) { return type == OCT_F32 ? 4 : type == OCT_I8 || type == OCT_FP8 ? 1 : 2; }
ALWAYS constexpr bool kv_scaled(int type) { return type == OCT_I8 || type == OCT_FP8; }

// K or V of one tile, as the kernels want it: groups of 16 tokens whose rows follow each other, in f32 or bf16. Rows of
// the cache that lie so are used where they are; others (quantised, another type, blocks that are no multiple of 16
// tokens) are copied first.
constexpr int RUN = 16;
struct Side {
  const char* at[TILE / RUN];
  alignas(64) float scale[TILE];  // of each token, for quantised caches
};

template <bool HALF>
struct Kernel {
  static constexpr int SIZE = HALF ? 2 : 4;
  static constexpr int TYPE = HALF ? OCT_BF16 : OCT_F32;
};

template <bool HALF>
ALWAYS f32x16 load_row(const char* p) {
  if constexpr (HALF) return load_bf16(p);
  else return load<f32x16>(p);
}

// `n` values of the cache's type at `from`, as f32 or bf16 at `to`. Quantised values stay in units of their scale; both
// kinds have few enough bits to be a bf16.
template <bool HALF, int TYPE>
ALWAYS void convert(const char* from, int n, char* to) {
  auto at = [&](int i) __attribute__((always_inline)) {
    if constexpr (TYPE == OCT_F32) return load<f32x16>(from + 4 * i);
    else if constexpr (TYPE == OCT_BF16) return load_bf16(from + 2 * i);
    else if constexpr (TYPE == OCT_F16) return load_f16(from + 2 * i);
    else if constexpr (TYPE == OCT_I8) return load_i8(from + i);
    else return load_fp8_tiny(from + i) * 0x1p120f;
  };
#pragma GCC unroll 4
  for (int i = 0; i < n; i += 16) {
    if constexpr (HALF) store(to + 2 * i, to_bf16(at(i)));
    else store(to + 4 * i, at(i));
  }
}

template <bool HALF>
ALWAYS void convert(int type, const char* from, int n, char* to) {
  switch (type) {
    case OCT_F32: return convert<HALF, OCT_F32>(from, n, to);
    case OCT_BF16: return convert<HALF, OCT_BF16>(from, n, to);
    case OCT_F16: return convert<HALF, OCT_F16>(from, n, to);
    case OCT_I8: return convert<HALF, OCT_I8>(from, n, to);
    default: return convert<HALF, OCT_FP8>(from, n, to);
  }
}

// Where one side (K or V) of the cache is.
struct Plane {
  int64_t at, scale_at;
  int dim;
};

template <bool HALF>
ALWAYS void find_side(const Attention& a, const Task& t, const Plane& plane, int from, int count, Side* side, char* copies) {
  const OctBatch& b = *a.batch;
  const int32_t* table = b.tables + ((int64_t)a.group * b.n_seqs + t.seq) * b.table_width;
  const int slots = b.block_size, bytes = plane.dim * kv_bytes(a.kv_type);
  const int64_t head = (int64_t)t.kv_head * slots, row = (int64_t)plane.dim * Kernel<HALF>::SIZE;
  const bool runs = slots % RUN == 0, in_place = runs && a.kv_type == Kernel<HALF>::TYPE;
  // In steps of a whole run where blocks hold whole runs, else token by token.
  const int step = runs ? RUN : 1;
  for (int i = 0; i < TILE; i += step) {
    if (i % RUN == 0) side->at[i / RUN] = copies + i * row;
    if (i >= count || (!runs && from + i < t.from)) {  // a block before a window's first token may be given back
      if (in_place) side->at[i / RUN] = side->at[0];
      else memset(copies + i * row, 0, step * row), memset(side->scale + i, 0, step * sizeof(float));
      continue;
    }
    const uint8_t* page = b.kv + table[(from + i) / slots] * b.page_bytes;
    const int64_t index = head + (from + i) % slots;
    const char* rows = (const char*)page + plane.at + index * bytes;
    if (in_place) side->at[i / RUN] = rows;
    else convert<HALF>(a.kv_type, rows, step * plane.dim, copies + i * row);
    if (!kv_scaled(a.kv_type)) continue;
    const bf16* scale = (const bf16*)(page + plane.scale_at) + index;
    if (runs) store(side->scale + i, load_bf16(scale));
    else side->scale[i] = bf16_to_float(*scale);
  }
  // Stale scales of slots that nobody has written may be anything: their tokens must weigh nothing.
  if (kv_scaled(a.kv_type)) for (int i = count; i < TILE; i++) side->scale[i] = 0.f;
}

// Run `i` of the tile that begins at token `from` of a task whose tokens end at `to`.
ALWAYS Stream stream_of(const Attention& a, const Task& t, const Plane& plane, int from, int i) {
  const OctBatch& b = *a.batch;
  const int slots = b.block_size, token = from + i * RUN;
  if (token >= t.to) return Stream{nullptr, nullptr};
  const int32_t* table = b.tables + ((int64_t)a.group * b.n_seqs + t.seq) * b.table_width;
  const int bytes = plane.dim * kv_bytes(a.kv_type), count = slots < RUN ? slots : RUN;
  const char* p = (const char*)b.kv + table[token / slots] * b.page_bytes + plane.at + ((int64_t)t.kv_head * slots + token % slots) * bytes;
  return Stream{p, p + count * bytes};
}

// Which of the tile's tokens [from, from + count) a query at position `at` sees, none before `least`: [low, high).
ALWAYS void visible(const Attention& a, int at, int from, int count, int least, int* low, int* high) {
  const int first = a.window && at + 1 - a.window > least ? at + 1 - a.window : least;
  *low = first > from ? (first - from < count ? first - from : count) : 0;
  *high = at + 1 - from < count ? at + 1 - from : count;
  if (*high < *low) *high = *low;
}

// Scores [TILE] of one row become weights, and the running maximum and sum move on. Returns the factor for what has
// been added up so far.
ALWAYS float soften(float* s, int low, int high, float softcap, Part* state) {
  const f32x16 none = splat(-INFINITY);
  f32x16 top = none;
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int i = 0; i < TILE; i += 16) {
    f32x16 v = load<f32x16>(s + i);
    if (softcap > 0.f) v = softcap * vtanh(v * (1.f / softcap));
    v = (lane + i >= low) & (lane + i < high) ? v : none;
    store(s + i, v);
    top = vmax(top, v);
  }
  const float peak = highest(top), now = peak > state->top ? peak : state->top;
  if (now == -INFINITY) {  // nothing visible yet
    for (int i = 0; i < TILE; i++) s[i] = 0.f;
    return 1.f;
  }
  f32x16 total = splat(0.f);
  for (int i = 0; i < TILE; i += 16) {
    const f32x16 v = load<f32x16>(s + i);
    const f32x16 w = v == none ? splat(0.f) : vexp(v - now);
    store(s + i, w);
    total += w;
  }
  const float factor = state->top == -INFINITY ? 0.f : expf(state->top - now);
  state->total = state->total * factor + sum(total);
  state->top = now;
  return factor;
}

ALWAYS Part fresh(const Attention& a, int head, bool first_part) {
  if (a.sinks && first_part) return Part{a.sinks[head], 1.f};
  return Part{-INFINITY, 0.f};
}

// --- few query rows -------------------------------------------------------------------------------------------------

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;  // bf16 x bf16 products in pairs
#else
constexpr bool PAIRS = false;
#endif

// Scores of one query row (bf16 where that is what the hardware multiplies, else f32) against 16 tokens.
template <bool HALF, int DIM>
ALWAYS f32x16 direct_scores(const char* k, int any_dim, const void* q, Stream& ahead, int lines) {
  const int dim = DIM ? DIM : any_dim;  // a known size keeps all 16 rows within reach of one address
  f32x16 acc[RUN];
#pragma GCC unroll 16
  for (int i = 0; i < RUN; i++) acc[i] = splat(0.f);
  if constexpr (HALF && PAIRS) {
#if defined(__AVX512BF16__)
#pragma GCC unroll 4
    for (int d = 0; d < dim; d += 32) {
      ahead.step(lines);
      const __m512bh part = (__m512bh)load<u32x16>((const bf16*)q + d);
#pragma GCC unroll 16
      for (int i = 0; i < RUN; i++) acc[i] = (f32x16)_mm512_dpbf16_ps((__m512)acc[i], part, (__m512bh)load<u32x16>(k + 2 * (i * dim + d)));
    }
#endif
  } else {
    for (int d = 0; d < dim; d += 16) {
      ahead.step(lines);
      const f32x16 part = load<f32x16>((const float*)q + d);
#pragma GCC unroll 16
      for (int i = 0; i < RUN; i++) acc[i] += part * load_row<HALF>(k + Kernel<HALF>::SIZE * (i * dim + d));
    }
  }
  return sums(acc);
}

// out[n] += weights[n] . V for N rows, 16 tokens and dims [dim, dim + 32 W). In pairs the dims come out in the order in
// which two rows of bf16 interleave: see in_order.
template <bool HALF, int DIM, int N, int W>
ALWAYS void direct_values(const char* v, int any_dim, int dim, const void* const* w, int at, float* const* out, Stream& ahead) {
  const int row_dim = DIM ? DIM : any_dim;
  f32x16 acc[N][2 * W];
#pragma GCC unroll 4
  for (int n = 0; n < N; n++)
#pragma GCC unroll 8
    for (int i = 0; i < 2 * W; i++) acc[n][i] = load<f32x16>(out[n] + dim + 16 * i);
  if constexpr (HALF && PAIRS) {
#if defined(__AVX512BF16__)
    const char* p = v + 2 * dim;
    const int32_t* pairs[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) pairs[n] = (const int32_t*)w[n] + at / 2;
#pragma GCC unroll 2
    for (int t = 0; t < RUN / 2; t++, p += 4 * row_dim) {
      ahead.step(4);
#pragma GCC unroll 4
      for (int i = 0; i < W; i++) {
        const __m512i even = _mm512_loadu_si512(p + 64 * i), odd = _mm512_loadu_si512(p + 2 * row_dim + 64 * i);
        const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(even, odd), high = (__m512bh)_mm512_unpackhi_epi16(even, odd);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
          const __m512bh pair = (__m512bh)_mm512_set1_epi32(pairs[n][t]);
          acc[n][2 * i] = (f32x16)_mm512_dpbf16_ps((__m512)acc[n][2 * i], pair, low);
          acc[n][2 * i + 1] = (f32x16)_mm512_dpbf16_ps((__m512)acc[n][2 * i + 1], pair, high);
        }
      }
    }
#endif
  } else {
    for (int t = 0; t < RUN; t++) {
      ahead.step(4);
      const char* p = v + Kernel<HALF>::SIZE * (t * row_dim + dim);
#pragma GCC unroll 8
      for (int i = 0; i < 2 * W; i++) {
        const f32x16 x = load_row<HALF>(p + 16 * Kernel<HALF>::SIZE * i);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) acc[n][i] += ((const float*)w[n])[at + t] * x;
      }
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; n++)
#pragma GCC unroll 8
    for (int i = 0; i < 2 * W; i++) store(out[n] + dim + 16 * i, acc[n][i]);
}

// Two vectors of 16 dims as direct_values leaves them, in the order of the dims.
template <bool HALF>
ALWAYS void in_order(float* x, int dim) {
  if constexpr (HALF && PAIRS)
    for (int d = 0; d < dim; d += 32) {
      const f32x16 low = load<f32x16>(x + d), high = load<f32x16>(x + d + 16);
      const i32x16 first = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
      const i32x16 second = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
      store(x + d, __builtin_shuffle(low, high, first));
      store(x + d + 16, __builtin_shuffle(low, high, second));
    }
}

// f(N, first row) for rows [0, rows) in groups of at most 4; N is a compile-time number.
template <class F>
ALWAYS void by_four(int rows, F f) {
  int at = 0;
  for (; at + 4 <= rows; at += 4) f(std::integral_constant<int, 4>(), at);
  if (rows - at == 3) f(std::integral_constant<int, 3>(), at);
  else if (rows - at == 2) f(std::integral_constant<int, 2>(), at);
  else if (rows - at == 1) f(std::integral_constant<int, 1>(), at);
}

// Memory of one thread.
struct Scratch {
  alignas(64) float scores[QUERY_ROWS + MOST_ROWS][TILE];
  alignas(64) bf16 weights[MOST_DIRECT][TILE];
  alignas(64) float out[QUERY_ROWS + MOST_ROWS][MOST_DIM];
  alignas(64) float q[MOST_DIRECT][MOST_DIM];
  alignas(64) char k_rows[TILE * MOST_DIM * 4];
  alignas(64) char v_rows[TILE * MOST_DIM * 4];
  alignas(64) uint32_t k_tile[2 * MOST_DIM * PANEL];             // [TILE / 32 panels][units][32]
  alignas(64) uint32_t v_tile[MOST_DIM / PANEL * TILE * PANEL];  // [dim panels][units][32]
  alignas(64) uint32_t q_units[(QUERY_ROWS + MOST_ROWS) * MOST_DIM];
  alignas(64) uint32_t w_units[(QUERY_ROWS + MOST_ROWS) * TILE];
  Part state[QUERY_ROWS];
  Side k, v;
};

// The scores of query row `r`, whose token is at `position`, against the tile of `count` tokens at `from` become
// weights, and what the row has added up so far is scaled to the new maximum. No token before `least` is seen.
ALWAYS void weigh_row(const Attention& a, Scratch& m, int r, int position, int from, int count, int least) {
  int low, high;
  visible(a, position, from, count, least, &low, &high);
  if (kv_scaled(a.kv_type))
    for (int i = 0; i < TILE; i += 16) store(m.scores[r] + i, load<f32x16>(m.scores[r] + i) * load<f32x16>(m.k.scale + i));
  const float factor = soften(m.scores[r], low, high, a.softcap, &m.state[r]);
  if (factor != 1.f)
    for (int d = 0; d < a.v_dim; d += 16) store(m.out[r] + d, load<f32x16>(m.out[r] + d) * factor);
}

inline void write_out(const Attention& a, const Task& t, int row, const float* acc, Part state, Part* parts, float* part_values) {
  const int g = a.per_kv(), token = t.first + row / g, head = t.kv_head * g + row % g;
  if (t.part >= 0) {
    const int64_t slot = (int64_t)t.part * g + row % g;
    parts[slot] = state;
    memcpy(part_values + slot * a.v_dim, acc, a.v_dim * 4);
    return;
  }
  const float inverse = state.total > 0.f ? 1.f / state.total : 0.f;
  for (int d = 0; d < a.v_dim; d += 16) a.put(token, head, d, load<f32x16>(acc + d) * inverse);
}

// A row of queries as direct_scores wants it.
template <bool HALF>
ALWAYS const void* direct_query(const Attention& a, int64_t at, float* copy) {
  const bool wants_half = HALF && PAIRS;
  if (wants_half == a.q_bf16) return a.q_bf16 ? (const void*)((const bf16*)a.q + at) : (const void*)((const float*)a.q + at);
  for (int i = 0; i < a.k_dim; i += 16) {
    if (wants_half) store((bf16*)copy + i, to_bf16(load<f32x16>((const float*)a.q + at + i)));
    else store(copy + i, load_bf16((const bf16*)a.q + at + i));
  }
  return copy;
}

// `coming`: the task that this thread will take next, whose first tile is fetched while the last of this is computed.
template <bool HALF, int DIM>
__attribute__((noinline)) void direct_task(const Attention& a, const Task& t, const Task* coming, Scratch& m, Part* parts, float* part_values) {
  const OctBatch& b = *a.batch;
  const Plane ks{a.k_at, a.k_scale_at, a.k_dim}, vs{a.v_at, a.v_scale_at, a.v_dim};
  const int g = a.per_kv(), rows = t.count * g;
  const int position = b.starts[t.seq] + (t.first - b.offsets[t.seq]);
  const bool first_part = t.part < 0 || t.from == 0 || (a.window && t.from <= position + 1 - a.window);
  const int lines = (8 + rows - 1) / rows * Kernel<HALF>::SIZE;  // per step, so that a run's lines are spread over its rows
  const void *q[MOST_DIRECT], *w[MOST_DIRECT];
  float* out[MOST_DIRECT];
  for (int r = 0; r < rows; r++) {
    q[r] = direct_query<HALF>(a, ((int64_t)(t.first + r / g) * a.heads + t.kv_head * g + r % g) * a.k_dim, m.q[r]);
    m.state[r] = fresh(a, t.kv_head * g + r % g, first_part);
    w[r] = HALF && PAIRS ? (const void*)m.weights[r] : (const void*)m.scores[r];
    out[r] = m.out[r];
    memset(out[r], 0, a.v_dim * 4);
  }
  for (int from = t.from / RUN * RUN; from < t.to; from += TILE) {
    const int count = t.to - from < TILE ? t.to - from : TILE, runs = (count + RUN - 1) / RUN;
    const bool last = from + TILE >= t.to;
    const Task* ahead = last ? coming : &t;
    const int ahead_from = last ? (coming ? coming->from / RUN * RUN : 0) : from + TILE;
    find_side<HALF>(a, t, ks, from, count, &m.k, m.k_rows);
    for (int i = 0; i < TILE / RUN; i++) {
      Stream s = ahead ? stream_of(a, *ahead, ks, ahead_from, i) : Stream{nullptr, nullptr};
      if (i < runs)
        for (int r = 0; r < rows; r++) store(m.scores[r] + i * RUN, direct_scores<HALF, DIM>(m.k.at[i], a.k_dim, q[r], s, lines) * a.scale);
      s.step(1 << 20);
    }
    find_side<HALF>(a, t, vs, from, count, &m.v, m.v_rows);
    for (int r = 0; r < rows; r++) {
      weigh_row(a, m, r, position + r / g, from, count, t.from);
      for (int i = 0; i < TILE; i += 16) {
        f32x16 x = load<f32x16>(m.scores[r] + i);
        if (kv_scaled(a.kv_type)) x *= load<f32x16>(m.v.scale + i);
        if (HALF && PAIRS) store(m.weights[r] + i, to_bf16(x));
        else if (kv_scaled(a.kv_type)) store(m.scores[r] + i, x);
      }
    }
    for (int i = 0; i < TILE / RUN; i++) {
      Stream s = ahead ? stream_of(a, *ahead, vs, ahead_from, i) : Stream{nullptr, nullptr};
      if (i < runs)
        by_four(rows, [&](auto n, int at) {
          int d = 0;
          for (; d + 64 <= a.v_dim; d += 64) direct_values<HALF, DIM, n(), 2>(m.v.at[i], a.v_dim, d, w + at, i * RUN, out + at, s);
          for (; d < a.v_dim; d += 32) direct_values<HALF, DIM, n(), 1>(m.v.at[i], a.v_dim, d, w + at, i * RUN, out + at, s);
        });
      s.step(1 << 20);
    }
  }
  for (int r = 0; r < rows; r++) {
    in_order<HALF>(out[r], a.v_dim);
    write_out(a, t, r, out[r], m.state[r], parts, part_values);
  }
}

// --- many query rows ------------------------------------------------------------------------------------------------

// A tile of K as weights of a linear: panels of 32 tokens, units of the head dimension.
template <bool HALF>
ALWAYS void pack_k(const Side& k, int count, int dim, uint32_t* out) {
  const int units = dim * Kernel<HALF>::SIZE / 4;
  for (int i = 0; i < TILE / RUN; i++) {
    uint32_t* to = out + (int64_t)(i * RUN / PANEL) * units * PANEL + i * RUN % PANEL;
    for (int u = 0; u < units; u += 16) {
      u32x16 v[16] = {};
      const int rows = i * RUN < count ? 16 : 0;
      for (int r = 0; r < rows; r++) v[r] = load<u32x16>(k.at[i] + 4 * (r * units + u));
      transpose(v);
      for (int r = 0; r < 16 && u + r < units; r++) store(to + (u + r) * PANEL, v[r]);
    }
  }
}

// A tile of V as weights of a linear: panels of 32 dims, units of tokens.
template <bool HALF>
ALWAYS void pack_v(const Side& v, int count, int dim, uint32_t* out) {
  constexpr int STEP = HALF ? 2 : 1, UNITS = TILE / STEP;
  const int padded = (dim + PANEL - 1) / PANEL * PANEL;
  for (int t = 0; t < TILE; t += STEP)
    for (int d = 0; d < padded; d += 16) {
      uint32_t* to = out + (int64_t)(d / PANEL) * UNITS * PANEL + (t / STEP) * PANEL + d % PANEL;
      if (t >= count || d >= dim) {
        store(to, u32x16{});
        continue;
      }
      const char* row = v.at[t / RUN] + Kernel<HALF>::SIZE * ((t % RUN) * dim + d);
      if constexpr (HALF) {
        const u32x16 even = widen(load<u16x16>(row)), odd = widen(load<u16x16>(row + 2 * dim));
        store(to, even | (odd << 16));
      } else store(to, load<f32x16>(row));
    }
}

template <bool HALF>
__attribute__((noinline)) void prompt_task(const Attention& a, const Task& t, Scratch& m) {
  constexpr int FORMAT = Kernel<HALF>::TYPE, STEP = HALF ? 2 : 1;
  const OctBatch& b = *a.batch;
  const Plane ks{a.k_at, a.k_scale_at, a.k_dim}, vs{a.v_at, a.v_scale_at, a.v_dim};
  const int g = a.per_kv(), rows = t.count * g;
  const int position = b.starts[t.seq] + (t.first - b.offsets[t.seq]);
  Inputs q = make_inputs(m.q_units, rows, a.k_dim, FORMAT), w = make_inputs(m.w_units, rows, TILE, FORMAT);
  for (int r = 0; r < rows; r++) {
    const int64_t at = ((int64_t)(t.first + r / g) * a.heads + t.kv_head * g + r % g) * a.k_dim;
    uint32_t* to = q.row(r);
    for (int i = 0; i < a.k_dim; i += 16)
      q.put(to, i, a.q_bf16 ? load_bf16((const bf16*)a.q + at + i) : load<f32x16>((const float*)a.q + at + i));
    m.state[r] = fresh(a, t.kv_head * g + r % g, true);
    memset(m.out[r], 0, a.v_dim * 4);
  }
  const int panels_v = (a.v_dim + PANEL - 1) / PANEL, units = a.k_dim / STEP;
  for (int from = t.from / RUN * RUN; from < t.to; from += TILE) {
    const int count = t.to - from < TILE ? t.to - from : TILE;
    find_side<HALF>(a, t, ks, from, count, &m.k, m.k_rows);
    find_side<HALF>(a, t, vs, from, count, &m.v, m.v_rows);
    pack_k<HALF>(m.k, count, a.k_dim, m.k_tile);
    pack_v<HALF>(m.v, count, a.v_dim, m.v_tile);
    const char *k_panels = (const char*)m.k_tile, *v_panels = (const char*)m.v_tile;
    rows_of_panels(q, 0, q.blocks(), FORMAT, k_panels, k_panels, (count + PANEL - 1) / PANEL, units * PANEL * 4, [&](int p, int r, f32x16 x, f32x16 y) __attribute__((always_inline)) {
      store(m.scores[r] + p * PANEL, x * a.scale);
      store(m.scores[r] + p * PANEL + 16, y * a.scale);
    });
    for (int r = 0; r < rows; r++) {
      weigh_row(a, m, r, position + r / g, from, count, t.from);
      uint32_t* to = w.row(r);
      for (int i = 0; i < TILE; i += 16) {
        const f32x16 x = load<f32x16>(m.scores[r] + i);
        w.put(to, i, kv_scaled(a.kv_type) ? x * load<f32x16>(m.v.scale + i) : x);
      }
    }
    rows_of_panels(w, 0, w.blocks(), FORMAT, v_panels, v_panels, panels_v, TILE / STEP * PANEL * 4, [&](int p, int r, f32x16 x, f32x16 y) __attribute__((always_inline)) {
      float* to = m.out[r] + p * PANEL;
      store(to, load<f32x16>(to) + x);
      store(to + 16, load<f32x16>(to + 16) + y);
    });
  }
  for (int r = 0; r < rows; r++) write_out(a, t, r, m.out[r], m.state[r], nullptr, nullptr);
}

// --- who does what --------------------------------------------------------------------------------------------------

// All tasks of one layer group in one step, the longest first; the same for all of its layers.
struct Tasks {
  Task* tasks;
  int count, split_tasks, parts;  // split_tasks: (sequence, KV head) pairs whose context is split
  Task* splits;                   // one per such pair: from = first part, to = number of parts
};

inline int64_t most_tasks(int tokens, int seqs, int kv_heads, int threads) {
  return (int64_t)kv_heads * (tokens + seqs) + 64 * threads;
}

inline Tasks deal_tasks(const OctBatch& b, int heads, int kv_heads, int window, int threads, Task* memory) {
  const int g = heads / kv_heads;
  Tasks out{memory, 0, 0, 0, nullptr};
  const int wanted = 4 * threads, decodes = b.n_seqs * kv_heads;
  Task* splits = memory + most_tasks(b.n_tokens, b.n_seqs, kv_heads, threads);
  out.splits = splits;
  for (int s = 0; s < b.n_seqs; s++) {
    const int first = b.offsets[s], count = b.offsets[s + 1] - first, start = b.starts[s];
    const int rows_each = count * g <= MOST_DIRECT ? count : QUERY_ROWS / g > 0 ? QUERY_ROWS / g : 1;
    for (int at = 0; at < count; at += rows_each) {
      const int n = count - at < rows_each ? count - at : rows_each, to = start + at + n;
      const int low = window ? start + at + 1 - window : 0, from = low > 0 ? low : 0;
      int pieces = 1;
      if (count == 1 && g <= MOST_DIRECT && decodes < wanted) {
        pieces = (wanted + decodes - 1) / decodes;
        if (pieces > (to - from) / SPLIT_TOKENS) pieces = (to - from) / SPLIT_TOKENS;
        if (pieces < 1) pieces = 1;
      }
      for (int h = 0; h < kv_heads; h++) {
        if (pieces == 1) {
          out.tasks[out.count++] = Task{s, h, first + at, n, from, to, -1};
          continue;
        }
        splits[out.split_tasks++] = Task{s, h, first + at, n, out.parts, pieces, 0};
        const int base = from / RUN * RUN, each = ((to - base + pieces - 1) / pieces + TILE - 1) / TILE * TILE;
        for (int p = 0; p < pieces; p++) {
          const int low = base + p * each < to ? base + p * each : to, hi = low + each < to ? low + each : to, lo = p ? low : from;
          out.tasks[out.count++] = Task{s, h, first + at, n, lo, hi, out.parts++};
        }
      }
    }
  }
  auto work = [](const Task& t) { return (int64_t)t.count * (t.to - t.from); };
  std::stable_sort(out.tasks, out.tasks + out.count, [&](const Task& x, const Task& y) { return work(x) > work(y); });
  return out;
}

inline int64_t task_bytes(int tokens, int seqs, int kv_heads, int threads) {
  return (most_tasks(tokens, seqs, kv_heads, threads) + (int64_t)seqs * kv_heads + 64) * sizeof(Task);
}

// Room for the parts of split contexts: at most 4 per thread more than there are pairs.
inline int64_t part_slots(int threads) { return 16 * threads; }

inline void run_task(const Attention& a, const Task& t, const Task* coming, Scratch& m, Part* parts, float* values) {
  const bool direct = t.count * a.per_kv() <= MOST_DIRECT;
  const int dim = a.k_dim == a.v_dim ? a.k_dim : 0;
  if (!direct) a.q_bf16 ? prompt_task<true>(a, t, m) : prompt_task<false>(a, t, m);
  else if (!a.q_bf16) direct_task<false, 0>(a, t, coming, m, parts, values);
  else if (dim == 64) direct_task<true, 64>(a, t, coming, m, parts, values);
  else if (dim == 128) direct_task<true, 128>(a, t, coming, m, parts, values);
  else direct_task<true, 0>(a, t, coming, m, parts, values);
}

// Put the parts of one split context together.
inline void join_parts(const Attention& a, const Task& s, const Part* parts, const float* values) {
  const int g = a.per_kv();
  for (int i = 0; i < g; i++) {
    float top = -INFINITY, total = 0.f;
    for (int p = 0; p < s.to; p++) top = fmaxf(top, parts[(int64_t)(s.from + p) * g + i].top);
    alignas(64) float acc[MOST_DIM] = {};
    for (int p = 0; p < s.to; p++) {
      const int64_t slot = (int64_t)(s.from + p) * g + i;
      if (parts[slot].top == -INFINITY) continue;
      const float factor = expf(parts[slot].top - top);
      total += parts[slot].total * factor;
      for (int d = 0; d < a.v_dim; d += 16) store(acc + d, load<f32x16>(acc + d) + factor * load<f32x16>(values + slot * a.v_dim + d));
    }
    const float inverse = total > 0.f ? 1.f / total : 0.f;
    for (int d = 0; d < a.v_dim; d += 16) a.put(s.first, s.kv_head * g + i, d, load<f32x16>(acc + d) * inverse);
  }
}

// Fetch the first tile of this thread's first task.
inline void warm_up(const Attention& a, const Tasks& tasks) {
  if (Team::me() >= tasks.count) return;
  const Task& t = tasks.tasks[Team::me()];
  for (int i = 0; i < TILE / RUN; i++) {
    stream_of(a, t, Plane{a.k_at, a.k_scale_at, a.k_dim}, t.from / RUN * RUN, i).step(1 << 20);
    stream_of(a, t, Plane{a.v_at, a.v_scale_at, a.v_dim}, t.from / RUN * RUN, i).step(1 << 20);
  }
}

// The whole attention of one layer, by all threads of a team; a barrier with `alone` and `warm` follows.
template <class Alone>
void attend(Team& team, const Attention& a, const Tasks& tasks, Scratch& mine, Part* parts, float* values, Alone alone, Stream warm = {nullptr, nullptr}) {
  team.deal(tasks.count, [&](int i, int next) { run_task(a, tasks.tasks[i], next < 0 ? nullptr : tasks.tasks + next, mine, parts, values); });
  if (!tasks.split_tasks) return team.barrier(alone, warm);
  team.barrier([] {}, warm);
  team.share(tasks.split_tasks, 1, [&](int i, int) { join_parts(a, tasks.splits[i], parts, values); }, alone);
}

}  // namespace OCTAVO_ISA
