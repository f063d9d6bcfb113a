// Sixteen floats at a time, with GCC's vector extensions, so that one source compiles for every instruction set.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ALWAYS inline __attribute__((always_inline))

namespace OCTAVO_ISA {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint16_t bf16;

template <class V> ALWAYS V load(const void* p) { V v; memcpy(&v, p, sizeof v); return v; }
template <class V> ALWAYS void store(void* p, V v) { memcpy(p, &v, sizeof v); }
ALWAYS f32x16 splat(float x) { return f32x16{} + x; }
ALWAYS f32x16 vmax(f32x16 a, f32x16 b) { return a > b ? a : b; }
ALWAYS f32x16 vmin(f32x16 a, f32x16 b) { return a < b ? a : b; }

ALWAYS float sum(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = 0;
  for (int i = 0; i < 16; i++) s += v[i];
  return s;
#endif
}

ALWAYS float highest(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float s = v[0];
  for (int i = 1; i < 16; i++) s = v[i] > s ? v[i] : s;
  return s;
#endif
}

ALWAYS f32x16 bits_to_float(u32x16 v) { return (f32x16)v; }

// bfloat16: the upper half of a float; rounded to nearest even.
ALWAYS u32x16 widen(u16x16 v) {
#if defined(__AVX512F__)
  return (u32x16)_mm512_cvtepu16_epi32((__m256i)v);
#else
  return __builtin_convertvector(v, u32x16);
#endif
}
ALWAYS f32x16 load_bf16(const void* p) { return (f32x16)(widen(load<u16x16>(p)) << 16); }
ALWAYS u16x16 to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  u32x16 b = (u32x16)v;
  b += 0x7fff + ((b >> 16) & 1);
  return __builtin_convertvector(b >> 16, u16x16);
#endif
}
ALWAYS float bf16_to_float(bf16 x) { uint32_t b = (uint32_t)x << 16; float f; memcpy(&f, &b, 4); return f; }
ALWAYS bf16 float_to_bf16(float x) { uint32_t b; memcpy(&b, &x, 4); return (bf16)((b + 0x7fff + ((b >> 16) & 1)) >> 16); }

ALWAYS f32x16 load_f16(const void* p) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else  // exponent of half as exponent of float, then 2^(127 - 15) times as much: right for subnormals, too
  u32x16 h = __builtin_convertvector(load<u16x16>(p), u32x16);
  f32x16 magnitude = bits_to_float((h & 0x7fff) << 13) * 0x1p112f;
  return bits_to_float((u32x16)magnitude | ((h & 0x8000) << 16));
#endif
}
ALWAYS void store_f16(void* p, f32x16 v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#else
  uint16_t out[16];
  for (int i = 0; i < 16; i++) {
    float magnitude = fabsf(v[i]);
    uint32_t bits, sign = signbit(v[i]) ? 0x8000u : 0u, half;
    if (magnitude >= 65520.f) half = 0x7c00;
    else {
      float scaled = magnitude < 0x1p-14f ? magnitude * 0x1p24f : 0.f;  // a subnormal half counts units of 2^-24
      memcpy(&bits, &magnitude, 4);
      half = magnitude < 0x1p-14f ? (uint32_t)lrintf(scaled) : ((bits + 0xfff + ((bits >> 13) & 1)) >> 13) - (112u << 10);
    }
    out[i] = (uint16_t)(half | sign);
  }
  memcpy(p, out, 32);
#endif
}

ALWAYS f32x16 load_i8(const void* p) {
#if defined(__AVX512F__)  // GCC 12 takes a long way round for the generic conversion
  return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
  return __builtin_convertvector(__builtin_convertvector(load<i8x16>(p), i32x16), f32x16);
#endif
}

// float8 e4m3fn as a float 2^120 too small; callers fold the factor into the scale of the vector.
ALWAYS f32x16 load_fp8_tiny(const void* p) {
#if defined(__AVX512F__)
  u32x16 b = (u32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  u32x16 b = __builtin_convertvector(load<u8x16>(p), u32x16);
#endif
  return bits_to_float(((b & 0x7f) << 20) | ((b & 0x80) << 24));
}
ALWAYS uint8_t float_to_fp8(float x) {  // |x| <= 448
  uint32_t bits;
  float magnitude = fabsf(x) * 0x1p-120f;  // the exponent of e4m3 is then the low end of the float's; rounds as a float
  memcpy(&bits, &magnitude, 4);
  bits += 0x7ffff + ((bits >> 20) & 1);
  return (uint8_t)((bits >> 20) | (signbit(x) ? 0x80 : 0));
}

// e^x with a relative error below 2e-7 (Cephes' expf: reduction by ln 2 in two parts, polynomial of degree 5).
ALWAYS f32x16 vexp(f32x16 x) {
  x = vmin(vmax(x, splat(-87.3f)), splat(88.3f));
  f32x16 n = x * 1.44269504088896341f;
  const f32x16 magic = splat(12582912.f);  // adding it rounds to a whole number
  n = (n + magic) - magic;
  x = x - n * 0.693359375f + n * 2.12194440e-4f;
  f32x16 p = splat(1.9875691500e-4f);
  p = p * x + 1.3981999507e-3f;
  p = p * x + 8.3334519073e-3f;
  p = p * x + 4.1665795894e-2f;
  p = p * x + 1.6666665459e-1f;
  p = p * x + 5.0000001201e-1f;
  p = p * (x * x) + x + 1.f;
  return p * (f32x16)((__builtin_convertvector(n, i32x16) + 127) << 23);
}

ALWAYS f32x16 vtanh(f32x16 x) { return 1.f - 2.f / (vexp(2.f * x) + 1.f); }

// One level of a butterfly over two vectors: lanes whose bit DISTANCE is 0 come from a, the others from b; `kept` where
// they are, `crossed` from the lane on the other side of the bit.
template <int DISTANCE>
ALWAYS i32x16 kept_lanes() {
  i32x16 m;
  for (int i = 0; i < 16; i++) m[i] = i & DISTANCE ? 16 + i : i;
  return m;
}
template <int DISTANCE>
ALWAYS i32x16 crossed_lanes() {
  i32x16 m;
  for (int i = 0; i < 16; i++) m[i] = i & DISTANCE ? 16 + (i ^ DISTANCE) : i ^ DISTANCE;
  return m;
}
template <int DISTANCE>
ALWAYS f32x16 fold(f32x16 a, f32x16 b) {
  return __builtin_shuffle(a, b, kept_lanes<DISTANCE>()) + __builtin_shuffle(a, b, crossed_lanes<DISTANCE>());
}

// Lane i of the result is the sum of all lanes of v[i]: a tree of 15 folds instead of 16 reductions.
ALWAYS f32x16 sums(const f32x16* v) {
  f32x16 a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) a[i] = fold<1>(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) b[i] = fold<2>(a[2 * i], a[2 * i + 1]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) c[i] = fold<4>(b[2 * i], b[2 * i + 1]);
  return fold<8>(c[0], c[1]);
}

// v as a 16 x 16 matrix of words, transposed in place.
template <int DISTANCE>
ALWAYS void exchange(u32x16* v) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++)
    if (!(i & DISTANCE)) {
      const u32x16 a = v[i], b = v[i + DISTANCE];
      i32x16 low, high;
      for (int l = 0; l < 16; l++) low[l] = l & DISTANCE ? 16 + (l ^ DISTANCE) : l, high[l] = l & DISTANCE ? 16 + l : l ^ DISTANCE;
      v[i] = __builtin_shuffle(a, b, low);
      v[i + DISTANCE] = __builtin_shuffle(a, b, high);
    }
}
ALWAYS void transpose(u32x16* v) { exchange<1>(v), exchange<2>(v), exchange<4>(v), exchange<8>(v); }

ALWAYS void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }  // into the second level: a stream must not empty the first

}  // namespace OCTAVO_ISA
