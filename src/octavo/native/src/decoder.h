// One step of a decoder-only transformer: all layers in one parallel region, phase after phase.
//
//   norm → [q k v] → head norms, rope, KV into its slots → attention → out (+) → norm → [gate up] → down (+)
//
// The residual stream stays in f32; what a linear reads is rounded to its input type once.
#pragma once
#include "attention.h"

namespace OCTAVO_ISA {

// The inputs of a linear, and the f32 rows [rows][k] from which they are made where they cannot be written in place:
// int8 needs whole rows for their scale, and rows of one block share cache lines, so that one thread should write them.
struct Feed {
  Inputs inputs;
  float* wide;
};

struct Run {
  const OctModel* model;
  const OctStep* step;
  int threads, rows;            // rows: tokens of the step
  float *residual, *wide, *qkv, *branch;  // [rows][hidden], widest f32 rows, [rows][qkv], [rows][hidden]
  void* q;                      // [rows][heads * head_dim] for attention, f32 or bf16
  Feed feed;                    // inputs of the next linear
  uint8_t* units;               // memory of feed.inputs
  int32_t *seq_of, *position;   // [rows]
  float *cos, *sin;             // [rows][ropes][rotary_half]
  Tasks* tasks;                 // per layer group with its own window
  Task** task_memory;
  Scratch* scratch;             // [threads]
  float* normed;                // [threads][normed_stride] one row of each thread
  int64_t normed_stride;
  Part* parts;
  float* part_values;
  float* best;                  // [threads][logit rows]
  int32_t* best_at;
  double since;                 // when the phase began

  void spent(OctPart part) {
    const double now = seconds_now();
    step->seconds[part] += now - since;
    since = now;
  }
};

struct Arena {
  uint8_t *at, *end;
  template <class T>
  T* take(int64_t n) {
    at = (uint8_t*)(((uintptr_t)at + 63) & ~(uintptr_t)63);
    T* p = (T*)at;
    at += n * sizeof(T);
    return p;
  }
};

inline int widest(const OctModel& m) {
  int k = m.hidden > m.intermediate ? m.hidden : m.intermediate;
  for (int i = 0; i < m.n_layers; i++) k = m.layers[i].o.k > k ? m.layers[i].o.k : k;
  return k;
}
inline int widest_qkv(const OctModel& m) {
  int n = 0;
  for (int i = 0; i < m.n_layers; i++) n = m.layers[i].qkv.n > n ? m.layers[i].qkv.n : n;
  return n;
}
inline int most_kv_heads(const OctModel& m) {
  int n = 1;
  for (int i = 0; i < m.n_layers; i++) n = m.layers[i].kv_heads > n ? m.layers[i].kv_heads : n;
  return n;
}

// Lays the working memory of a step out; with arena.at == null it only counts.
inline void lay_out(Run& r, Arena& arena, const OctModel& m, int rows, int seqs, int logit_rows, int groups, int threads) {
  const int k = widest(m), padded = (k + PANEL - 1) / PANEL * PANEL;
  r.residual = arena.take<float>((int64_t)rows * m.hidden + PANEL);
  r.branch = arena.take<float>((int64_t)rows * m.hidden + PANEL);
  r.wide = arena.take<float>((int64_t)rows * padded + PANEL);
  r.qkv = arena.take<float>((int64_t)rows * widest_qkv(m) + PANEL);
  r.q = arena.take<uint8_t>(inputs_bytes(rows, k));  // also the inputs of `down`
  r.units = arena.take<uint8_t>(inputs_bytes(rows > logit_rows ? rows : logit_rows, k));
  r.seq_of = arena.take<int32_t>(rows);
  r.position = arena.take<int32_t>(rows);
  r.cos = arena.take<float>((int64_t)rows * m.n_ropes * m.rotary_half);
  r.sin = arena.take<float>((int64_t)rows * m.n_ropes * m.rotary_half);
  r.tasks = arena.take<Tasks>(groups);
  r.task_memory = arena.take<Task*>(groups);
  for (int g = 0; g < groups; g++) {
    Task* memory = (Task*)arena.take<uint8_t>(task_bytes(rows, seqs, most_kv_heads(m), threads));
    if (arena.end) r.task_memory[g] = memory;
  }
  r.scratch = arena.take<Scratch>(threads);
  r.normed_stride = m.hidden + 64;
  r.normed = arena.take<float>(threads * r.normed_stride);
  r.parts = arena.take<Part>(part_slots(threads) * MOST_DIRECT);
  r.part_values = arena.take<float>(part_slots(threads) * MOST_DIRECT * MOST_DIM);
  r.best = arena.take<float>((int64_t)threads * logit_rows);
  r.best_at = arena.take<int32_t>((int64_t)threads * logit_rows);
}

// The next linear's inputs: `rows` rows for matrix `m`.
inline Feed feed_for(Run& r, const OctLinear& m, int rows) {
  Inputs x = make_inputs(r.units, rows, m.k, is_int8_input(m.type) ? m.type : m.type == OCT_BF16 ? OCT_BF16 : OCT_F32);
  return Feed{x, r.wide};
}

// One f32 row → its inputs.
ALWAYS void feed_row(const Inputs& x, int row, const float* values) {
  if (is_int8_input(x.type)) return x.quantise(row, values);
  uint32_t* to = x.row(row);
  for (int i = 0; i < x.k; i += 16) x.put(to, i, load<f32x16>(values + i));
}

// f32 rows → inputs, block by block.
inline void feed_rows(Team& team, Run& r, const OctLinear& next) {
  const Inputs& x = r.feed.inputs;
  team.share(x.rows, x.stride, [&](int first, int last) {
    for (int row = first; row < last; row++) feed_row(x, row, r.feed.wide + (int64_t)row * x.k);
  }, [&] { r.spent(OCT_NORM_ROPE); }, first_panel(next));
}

ALWAYS float root_mean_square(const float* x, int n, float eps) {
  f32x16 total = splat(0.f);
  for (int i = 0; i < n; i += 16) { f32x16 v = load<f32x16>(x + i); total += v * v; }
  return 1.f / sqrtf(sum(total) / n + eps);
}

// Adds the last branch to the residual where it has a norm of its own (else the linear has added it), and leaves
// norm(residual) for the next linear.
inline void add_and_norm(Run& r, int row, int out_row, const float* branch_norm, const float* norm) {
  const int n = r.model->hidden;
  float* h = r.residual + (int64_t)row * n;
  if (branch_norm) {
    const float* b = r.branch + (int64_t)row * n;
    const float scale = root_mean_square(b, n, r.model->eps);
    for (int i = 0; i < n; i += 16) store(h + i, load<f32x16>(h + i) + load<f32x16>(b + i) * scale * load<f32x16>(branch_norm + i));
  }
  const float scale = root_mean_square(h, n, r.model->eps);
  float* normed = r.normed + (int64_t)Team::me() * r.normed_stride;  // of this thread: stays in its cache
  for (int i = 0; i < n; i += 16) store(normed + i, load<f32x16>(h + i) * scale * load<f32x16>(norm + i));
  feed_row(r.feed.inputs, out_row, normed);
}

ALWAYS f32x16 bias_at(const OctLinear& m, int column) { return m.bias ? load<f32x16>(m.bias + column) : splat(0.f); }

// Columns [at, at + 16) of a row of n floats; the last panel may be padded.
ALWAYS void store_columns(float* row, int at, int n, f32x16 v) {
  if (at + 16 <= n) store(row + at, v);
  else for (int i = at; i < n; i++) row[i] = v[i - at];
}

// The embedding of `token`, read back from its column of the packed matrix.
inline void embed_row(const OctModel& m, int token, float* out) {
  const OctLinear& e = m.embedding;
  const int column = token % PANEL;
  const char* panel = (const char*)e.data + (int64_t)(token / PANEL) * panel_bytes(e.type, e.k);
  for (int i = 0; i < e.k; i++) {
    float v;
    if (e.type == OCT_BF16) v = bf16_to_float(((const bf16*)panel)[(i / 2 * PANEL + column) * 2 + i % 2]);
    else if (e.type == OCT_F32) v = ((const float*)panel)[(int64_t)i * PANEL + column];
    else if (e.type == OCT_F16) v = load_f16(panel + 2 * ((int64_t)i * PANEL + column - column % 16))[column % 16];
    else if (e.type == OCT_I8) {
      const int q = (int)((const uint8_t*)panel)[(i / 4 * PANEL + column) * 4 + i % 4] - 128;
      v = q * ((const float*)(panel + (int64_t)e.k * PANEL))[column];
    } else {  // OCT_I8_GROUP
      const char* group = panel + (int64_t)(i / GROUP) * (GROUP * PANEL + 2 * PANEL);
      const int q = (int)((const uint8_t*)group)[(i % GROUP / 4 * PANEL + column) * 4 + i % 4] - 128;
      v = q * load_f16(group + GROUP * PANEL + 2 * (column - column % 16))[column % 16];
    }
    out[i] = v * m.embedding_scale;
  }
}

// The angles of one token's position, in single precision as the models were trained.
inline void turn_row(Run& r, int row) {
  const OctModel& m = *r.model;
  const int n = m.n_ropes * m.rotary_half;
  float *cos = r.cos + (int64_t)row * n, *sin = r.sin + (int64_t)row * n;
  const float position = (float)r.position[row];
  for (int i = 0; i < n; i++) cos[i] = cosf(position * m.frequencies[i]), sin[i] = sinf(position * m.frequencies[i]);
}

// Writes one head's vector into its slot. V (and quantised K) that is no finite number becomes 0, because the next
// holder of the block multiplies what it finds by 0.
inline void store_kv(const OctBatch& b, int type, int block, int64_t at, int64_t scale_at, int64_t index, const float* x, int dim, bool finite) {
  uint8_t* page = b.kv + block * b.page_bytes;
  alignas(64) float clean[MOST_DIM];
  const f32x16 largest = splat(type == OCT_F16 ? 65504.f : 0x1.fep127f);  // the largest numbers of both
  f32x16 top = splat(0.f);
  for (int i = 0; i < dim; i += 16) {
    f32x16 v = load<f32x16>(x + i);
    if (finite) v = v - v == 0.f ? v : splat(0.f);
    if (type == OCT_BF16 || type == OCT_F16) v = vmin(largest, vmax(-largest, v));  // in this order NaN stays
    top = vmax(top, vmax(v, -v));
    store(clean + i, v);
  }
  uint8_t* to = page + at + index * dim * kv_bytes(type);
  if (type == OCT_F32) memcpy(to, clean, dim * 4);
  else if (type == OCT_BF16) for (int i = 0; i < dim; i += 16) store(to + 2 * i, to_bf16(load<f32x16>(clean + i)));
  else if (type == OCT_F16) for (int i = 0; i < dim; i += 16) store_f16(to + 2 * i, load<f32x16>(clean + i));
  else {
    const float limit = type == OCT_I8 ? 127.f : 448.f;
    const bf16 rounded = float_to_bf16(highest(top) / limit);
    const float scale = bf16_to_float(rounded);
    ((bf16*)(page + scale_at))[index] = rounded;
    const f32x16 magic = splat(12582912.f);
    for (int i = 0; i < dim; i += 16) {
      const f32x16 v = scale > 0.f ? vmin(vmax(load<f32x16>(clean + i) / scale, splat(-limit)), splat(limit)) : splat(0.f);
      if (type == OCT_I8) store(to + i, __builtin_convertvector(__builtin_convertvector((v + magic) - magic, i32x16), i8x16));
      else for (int j = 0; j < 16; j++) to[i + j] = float_to_fp8(v[j]);
    }
  }
}

// Head norm and rotation of one head of one token, in place. cos, sin: [rotary_dim / 2].
inline void norm_and_rotate(float* x, const OctLayer& l, const float* norm, const float* cos, const float* sin, float eps) {
  if (norm) {
    const float scale = root_mean_square(x, l.head_dim, eps);
    for (int i = 0; i < l.head_dim; i += 16) store(x + i, load<f32x16>(x + i) * scale * load<f32x16>(norm + i));
  }
  if (!cos) return;
  const int half = l.rotary_dim / 2;
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const f32x16 a = load<f32x16>(x + i), b = load<f32x16>(x + i + half), c = load<f32x16>(cos + i), s = load<f32x16>(sin + i);
    store(x + i, a * c - b * s);
    store(x + i + half, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

// Heads [first, last) of [q heads, k heads, v heads] of one token: q into its buffer, k and v into the cache.
inline void place_heads(Run& r, const OctLayer& l, int row, int first, int last) {
  const OctStep& s = *r.step;
  const OctBatch& b = s.batch;
  const int dim = l.head_dim, seq = r.seq_of[row], position = r.position[row];
  const int32_t* table = b.tables + ((int64_t)l.group * b.n_seqs + seq) * b.table_width;
  const int block = table[position / b.block_size], slot = position % b.block_size;
  const float *cos = nullptr, *sin = nullptr;
  if (l.rope >= 0) {
    const int64_t at = ((int64_t)row * r.model->n_ropes + l.rope) * r.model->rotary_half;
    cos = r.cos + at, sin = r.sin + at;
  }
  for (int h = first; h < last; h++) {
    alignas(64) float x[MOST_DIM];
    memcpy(x, r.qkv + (int64_t)row * l.qkv.n + (int64_t)h * dim, dim * 4);
    if (h < l.heads) {
      norm_and_rotate(x, l, l.q_norm, cos, sin, r.model->eps);
      const int64_t at = ((int64_t)row * l.heads + h) * dim;
      if (r.model->compute == OCT_BF16) for (int i = 0; i < dim; i += 16) store((bf16*)r.q + at + i, to_bf16(load<f32x16>(x + i)));
      else memcpy((float*)r.q + at, x, dim * 4);
    } else {
      const bool is_k = h < l.heads + l.kv_heads;
      if (is_k) norm_and_rotate(x, l, l.k_norm, cos, sin, r.model->eps);
      const int kv = (h - l.heads) % l.kv_heads, type = r.model->kv_type;
      store_kv(b, type, block, is_k ? l.k_at : l.v_at, is_k ? l.k_scale_at : l.v_scale_at, (int64_t)kv * b.block_size + slot, x, dim,
               !is_k || kv_scaled(type));
    }
  }
}

ALWAYS f32x16 activate(int kind, f32x16 x) {
  if (kind == OCT_SILU) return x / (1.f + vexp(-x));
  if (kind == OCT_GELU_TANH) return 0.5f * x * (1.f + vtanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  f32x16 out;
  for (int i = 0; i < 16; i++) out[i] = 0.5f * x[i] * (1.f + erff(x[i] * 0.70710678f));
  return out;
}

// Output of `m` is added to the residual, or kept as a branch where a norm comes in between. `next`: the linear after it.
inline void add_linear(Team& team, Run& r, const OctLinear& m, bool branch, const OctLinear& next) {
  const int n = r.model->hidden;
  float* to = branch ? r.branch : r.residual;
  const float scale = r.model->residual_scale;
  linear(team, r.feed.inputs, m, [&](int p, int row, f32x16 x, f32x16 y) __attribute__((always_inline)) {
    float* out = to + (int64_t)row * n + p * PANEL;
    x += bias_at(m, p * PANEL), y += bias_at(m, p * PANEL + 16);
    store(out, branch ? x : load<f32x16>(out) + scale * x);
    if (p * PANEL + 16 < n) store(out + 16, branch ? y : load<f32x16>(out + 16) + scale * y);
  });
  team.barrier([&] { r.spent(OCT_LINEAR), r.feed = feed_for(r, next, r.rows); }, first_panel(next));
}

// After the last attention only the rows whose logits are wanted go on: they are moved to the front. `rows` ascend.
inline void keep_wanted(Team& team, Run& r) {
  const OctStep& s = *r.step;
  team.barrier([&] {
    for (int i = 0; i < s.n_rows; i++) {
      memmove(r.residual + (int64_t)i * r.model->hidden, r.residual + (int64_t)s.rows[i] * r.model->hidden, r.model->hidden * 4);
      memmove(r.feed.wide + (int64_t)i * r.feed.inputs.k, r.feed.wide + (int64_t)s.rows[i] * r.feed.inputs.k, r.feed.inputs.k * 4);
    }
    r.rows = s.n_rows;
    r.feed.inputs = make_inputs(r.units, r.rows, r.feed.inputs.k, r.feed.inputs.type);
  });
}

inline void layer(Team& team, Run& r, int index) {
  const OctModel& m = *r.model;
  const OctLayer &l = m.layers[index], *before = index ? &l - 1 : nullptr;
  const bool last = index == m.n_layers - 1;
  int rows = r.rows;
  const float* last_norm = before ? before->norm_after_mlp : nullptr;
  team.share(rows, r.feed.inputs.stride, [&](int first, int last) {
    for (int row = first; row < last; row++) add_and_norm(r, row, row, last_norm, l.norm_in);
  }, [&] { r.spent(OCT_NORM_ROPE); }, first_panel(l.qkv));

  linear(team, r.feed.inputs, l.qkv, [&](int p, int row, f32x16 x, f32x16 y) __attribute__((always_inline)) {
    float* out = r.qkv + (int64_t)row * l.qkv.n;
    store_columns(out, p * PANEL, l.qkv.n, x + bias_at(l.qkv, p * PANEL));
    store_columns(out, p * PANEL + 16, l.qkv.n, y + bias_at(l.qkv, p * PANEL + 16));
  });
  team.barrier([&] { r.spent(OCT_LINEAR), r.feed = feed_for(r, l.o, rows); });

  Attention a{&r.step->batch, r.q, m.compute == OCT_BF16, r.feed.wide, false,
              l.k_at, l.v_at, l.k_scale_at, l.v_scale_at, l.heads, l.kv_heads, l.head_dim, l.head_dim, l.window, l.group, m.kv_type, l.scale, l.softcap, l.sinks};
  const int heads = l.heads + 2 * l.kv_heads, own = r.feed.inputs.stride;
  if (rows >= 4 * r.threads) {
    team.drain([&](int q) { return own * (team.part(r.feed.inputs.blocks(), q + 1) - team.part(r.feed.inputs.blocks(), q)); }, [&](int q, int item, int) {
      const int row = own * team.part(r.feed.inputs.blocks(), q) + item;
      if (row < rows) place_heads(r, l, row, 0, heads);
    });
  } else {
    team.deal(rows * heads, [&](int i, int) { place_heads(r, l, i / heads, i % heads, i % heads + 1); });
  }
  warm_up(a, r.tasks[l.group]);
  team.barrier([&] { r.spent(OCT_NORM_ROPE); });
  attend(team, a, r.tasks[l.group], r.scratch[Team::me()], r.parts, r.part_values, [&] { r.spent(OCT_ATTENTION); }, first_panel(l.o));
  if (last && r.step->n_rows < rows) {
    keep_wanted(team, r);
    rows = r.rows;
    if (!rows) return;  // a prompt chunk that is not the last: its KV is all that was wanted
  }
  feed_rows(team, r, l.o);
  add_linear(team, r, l.o, l.norm_after_attention != nullptr, l.gate_up);

  team.share(rows, r.feed.inputs.stride, [&](int first, int last) {
    for (int row = first; row < last; row++) add_and_norm(r, row, row, l.norm_after_attention, l.norm_before_mlp);
  }, [&] { r.spent(OCT_NORM_ROPE); }, first_panel(l.gate_up));

  // gate_up reads r.feed while its result is laid down for `down`: the second set of inputs lies in the q buffer.
  Inputs x = r.feed.inputs;
  Feed next = feed_for(r, l.down, rows);
  next.inputs = make_inputs(r.q, rows, l.down.k, next.inputs.type);
  float* wide = is_int8_input(l.down.type) ? next.wide : nullptr;  // others: two threads never write the same inputs
  linear(team, x, l.gate_up, [&](int p, int row, f32x16 gate, f32x16 up) __attribute__((always_inline)) {
    gate += bias_at(l.gate_up, p * PANEL), up += bias_at(l.gate_up, p * PANEL + 16);
    const f32x16 v = activate(m.activation, gate) * up;
    if (wide) store(wide + (int64_t)row * l.down.k + p * 16, v);
    else next.inputs.put(next.inputs.row(row), p * 16, v);
  });
  team.barrier([&] { r.spent(OCT_LINEAR), r.feed = next; }, first_panel(l.down));
  if (wide) feed_rows(team, r, l.down);
  add_linear(team, r, l.down, l.norm_after_mlp != nullptr, last ? m.head : (&l + 1)->qkv);
}

// Logits of the wanted rows, or only the best token of each.
inline void logits(Team& team, Run& r) {
  const OctModel& m = *r.model;
  const OctStep& s = *r.step;
  const float* last_norm = m.layers[m.n_layers - 1].norm_after_mlp;
  team.share(s.n_rows, 1, [&](int i, int) { add_and_norm(r, i, i, last_norm, m.final_norm); }, [&] { r.spent(OCT_NORM_ROPE); }, first_panel(m.head));
  float* best = r.best + (int64_t)Team::me() * s.n_rows;
  int32_t* best_at = r.best_at + (int64_t)Team::me() * s.n_rows;
  for (int i = 0; i < s.n_rows; i++) best[i] = -INFINITY, best_at[i] = 0;
  const float cap = m.logit_softcap;
  linear(team, r.feed.inputs, m.head, [&](int p, int row, f32x16 x, f32x16 y) __attribute__((always_inline)) {
    x += bias_at(m.head, p * PANEL), y += bias_at(m.head, p * PANEL + 16);
    if (cap > 0.f) x = cap * vtanh(x * (1.f / cap)), y = cap * vtanh(y * (1.f / cap));
    if (s.logits) {
      float* out = s.logits + (int64_t)row * m.vocabulary;
      store_columns(out, p * PANEL, m.vocabulary, x);
      store_columns(out, p * PANEL + 16, m.vocabulary, y);
    }
    const bool tail = (p + 1) * PANEL > m.vocabulary;
    if (!tail && highest(vmax(x, y)) <= best[row]) return;
    for (int i = 0; i < PANEL && p * PANEL + i < m.vocabulary; i++) {
      const float v = i < 16 ? x[i] : y[i - 16];
      if (v > best[row]) best[row] = v, best_at[row] = p * PANEL + i;
    }
  });
  team.barrier([&] {
    for (int i = 0; i < s.n_rows; i++) {
      int winner = 0;
      for (int t = 1; t < team.threads(); t++) {
        const float mine = r.best[(int64_t)winner * s.n_rows + i], other = r.best[(int64_t)t * s.n_rows + i];
        if (other > mine || (other == mine && r.best_at[(int64_t)t * s.n_rows + i] < r.best_at[(int64_t)winner * s.n_rows + i])) winner = t;
      }
      s.argmax[i] = r.best_at[(int64_t)winner * s.n_rows + i];
    }
    r.spent(OCT_HEAD);
  });
}

inline void begin(Run& r) {
  const OctStep& s = *r.step;
  for (int q = 0; q < s.batch.n_seqs; q++)
    for (int t = s.batch.offsets[q]; t < s.batch.offsets[q + 1]; t++) r.seq_of[t] = q, r.position[t] = s.batch.starts[q] + t - s.batch.offsets[q];
  for (int g = 0; g < s.batch.n_groups; g++) r.tasks[g].tasks = nullptr;
  for (int i = 0; i < r.model->n_layers; i++) {
    const OctLayer& l = r.model->layers[i];
    if (!r.tasks[l.group].tasks) r.tasks[l.group] = deal_tasks(s.batch, l.heads, l.kv_heads, l.window, r.threads, r.task_memory[l.group]);
  }
}

inline int64_t scratch_bytes(const OctModel* m, int tokens, int seqs, int rows, int groups) {
  Run r{};
  Arena arena{nullptr, nullptr};
  lay_out(r, arena, *m, tokens, seqs, rows, groups, m->threads);
  return (int64_t)(uintptr_t)arena.at + 4096;
}

inline int run_step(const OctModel* m, const OctStep* s) {
  Run r{};
  r.model = m, r.step = s, r.threads = m->threads, r.rows = s->batch.n_tokens;
  Arena arena{s->scratch, s->scratch + s->scratch_bytes};
  lay_out(r, arena, *m, r.rows, s->batch.n_seqs, s->n_rows, s->batch.n_groups, r.threads);
  if (arena.at > arena.end) return 1;
  r.since = seconds_now();
  begin(r);
  Team team(r.threads);
#pragma omp parallel num_threads(r.threads)
  {
    team.gather();
    team.share(r.rows, 1, [&](int row, int) {
      embed_row(*m, s->ids[row], r.residual + (int64_t)row * m->hidden);
      turn_row(r, row);
    }, [&] { r.spent(OCT_EMBED), r.feed = feed_for(r, m->layers[0].qkv, r.rows); });
    for (int i = 0; i < m->n_layers; i++) layer(team, r, i);
    if (s->n_rows) logits(team, r);  // of the rows that are left
  }
  return 0;
}

inline int run_attend(const OctAttend* x) {
  Arena arena{x->scratch, x->scratch + x->scratch_bytes};
  Task* memory = (Task*)arena.take<uint8_t>(task_bytes(x->batch.n_tokens, x->batch.n_seqs, x->kv_heads, x->threads));
  Scratch* scratch = arena.take<Scratch>(x->threads);
  Part* parts = arena.take<Part>(part_slots(x->threads) * MOST_DIRECT);
  float* values = arena.take<float>(part_slots(x->threads) * MOST_DIRECT * MOST_DIM);
  if (arena.at > arena.end) return 1;
  const bool half = x->type == OCT_BF16;
  Attention a{&x->batch, x->q, half, x->out, half, x->k_at, x->v_at, x->k_scale_at, x->v_scale_at,
              x->heads, x->kv_heads, x->k_dim, x->v_dim, x->window, x->group, x->kv_type, x->scale, x->softcap, x->sinks};
  Tasks tasks = deal_tasks(x->batch, x->heads, x->kv_heads, x->window, x->threads, memory);
  Team team(x->threads);
#pragma omp parallel num_threads(x->threads)
  {
    team.gather();
    attend(team, a, tasks, scratch[Team::me()], parts, values, [] {});
  }
  return 0;
}

inline int64_t attend_bytes(int tokens, int seqs, int kv_heads, int threads) {
  return task_bytes(tokens, seqs, kv_heads, threads) + threads * (int64_t)sizeof(Scratch) + part_slots(threads) * MOST_DIRECT * (int64_t)(sizeof(Part) + 4 * MOST_DIM) + 4096;
}

}  // namespace OCTAVO_ISA
