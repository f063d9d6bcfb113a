// Packing of weights into panels, and quantising them on the way.
#pragma once
#include "linear.h"

namespace OCTAVO_ISA {

ALWAYS float source_value(const OctPack& p, int64_t row, int64_t i) {
  const int64_t at = row * p.k + i;
  if (p.source_type == OCT_F32) return ((const float*)p.source)[at];
  if (p.source_type == OCT_BF16) return bf16_to_float(((const bf16*)p.source)[at]);
  const uint16_t h = ((const uint16_t*)p.source)[at];
  uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
  float f;
  memcpy(&f, &bits, 4);
  f *= 0x1p112f;
  return h & 0x8000 ? -f : f;
}

// Where output column n of the source goes.
ALWAYS int packed_column(const OctPack& p, int n) {
  if (!p.interleave) return p.first + n;
  const int column = p.first + n;  // of this half
  return column / 16 * PANEL + (p.interleave == 2 ? 16 : 0) + column % 16;
}

inline void pack_column(const OctPack& p, int n) {
  const int column = packed_column(p, n), lane = column % PANEL;
  char* panel = (char*)p.data + (int64_t)(column / PANEL) * panel_bytes(p.type, p.k);
  const int k = p.k;
  if (p.type == OCT_F32) {
    for (int i = 0; i < k; i++) ((float*)panel)[(int64_t)i * PANEL + lane] = source_value(p, n, i);
  } else if (p.type == OCT_BF16) {
    for (int i = 0; i < k; i++) ((bf16*)panel)[(int64_t)(i / 2 * PANEL + lane) * 2 + i % 2] = float_to_bf16(source_value(p, n, i));
  } else if (p.type == OCT_F16) {
    const bool same = p.source_type == OCT_F16;
    for (int i = 0; i < k; i++) {
      uint16_t h[16];
      if (same) h[0] = ((const uint16_t*)p.source)[(int64_t)n * k + i];
      else store_f16(h, splat(source_value(p, n, i)));
      ((uint16_t*)panel)[(int64_t)i * PANEL + lane] = h[0];
    }
  } else if (p.type == OCT_I8) {
    float amax = 0.f;
    for (int i = 0; i < k; i++) amax = fmaxf(amax, fabsf(source_value(p, n, i)));
    const float inverse = amax > 0.f ? 127.f / amax : 0.f;
    for (int i = 0; i < k; i++) ((uint8_t*)panel)[(int64_t)(i / 4 * PANEL + lane) * 4 + i % 4] = (uint8_t)(lrintf(source_value(p, n, i) * inverse) + 128);
    ((float*)(panel + (int64_t)k * PANEL))[lane] = amax / 127.f;
  } else {
    const bool half = p.type != OCT_I8_GROUP, affine = p.type == OCT_I4_AFFINE;
    const int weights = half ? GROUP * PANEL / 2 : GROUP * PANEL, bytes = weights + (affine ? 128 : 64);
    for (int g = 0; g < k / GROUP; g++) {
      char* to = panel + (int64_t)g * bytes;
      float x[GROUP], low = INFINITY, high = -INFINITY, peak = 0.f;
      for (int i = 0; i < GROUP; i++) {
        x[i] = source_value(p, n, (int64_t)g * GROUP + i);
        low = fminf(low, x[i]), high = fmaxf(high, x[i]);
        if (fabsf(x[i]) > fabsf(peak)) peak = x[i];
      }
      // int8: symmetric. int4: the largest magnitude becomes -8 (llama.cpp's Q4_0), or a minimum and 15 steps (Q4_1).
      float scale = p.type == OCT_I8_GROUP ? fabsf(peak) / 127.f : affine ? (high - low) / 15.f : peak / -8.f;
      alignas(64) uint16_t h[16];
      store_f16(h, splat(scale));
      ((uint16_t*)(to + weights))[lane] = h[0];
      scale = load_f16(h)[0];
      if (affine) {
        store_f16(h, splat(low));
        ((uint16_t*)(to + weights + 64))[lane] = h[0];
        low = load_f16(h)[0];
      }
      const float inverse = scale != 0.f ? 1.f / scale : 0.f;
      for (int i = 0; i < GROUP; i++) {
        const int q = (int)lrintf((affine ? x[i] - low : x[i]) * inverse);
        if (!half) {
          ((uint8_t*)to)[(i / 4 * PANEL + lane) * 4 + i % 4] = (uint8_t)((q > 127 ? 127 : q < -127 ? -127 : q) + 128);
          continue;
        }
        const int stored = affine ? q : q + 8, nibble = stored < 0 ? 0 : stored > 15 ? 15 : stored;
        uint8_t* byte = (uint8_t*)to + ((i / 4 % 4) * PANEL + lane) * 4 + i % 4;  // quads 0-3 low, 4-7 high
        *byte = i < 16 ? (uint8_t)((*byte & 0xf0) | nibble) : (uint8_t)((*byte & 0x0f) | nibble << 4);
      }
    }
  }
}

inline int pack(const OctPack* p) {
  // By panels of columns, so that two threads never write into one cache line at a time.
  const int step = p->interleave ? 16 : PANEL;
#pragma omp parallel for num_threads(p->threads) schedule(dynamic, 4)
  for (int at = 0; at < p->n; at += step)
    for (int n = at; n < p->n && n < at + step; n++) pack_column(*p, n);
  return 0;
}

}  // namespace OCTAVO_ISA
