// The C ABI between Python and the native code: plain structs, filled by octavo/native/calls.py field by field.
// Change a struct here and there together, and raise OCTAVO_ABI.
#pragma once
#include <stdint.h>

#define OCTAVO_ABI 2

extern "C" {

// Element types of weights, activations and the KV cache.
enum OctType : int32_t { OCT_F32 = 0, OCT_BF16 = 1, OCT_F16 = 2, OCT_I8 = 3, OCT_FP8 = 4, OCT_I8_GROUP = 5, OCT_I4 = 6, OCT_I4_AFFINE = 7 };

enum OctActivation : int32_t { OCT_SILU = 0, OCT_GELU_TANH = 1, OCT_GELU = 2 };

// A packed matrix y = x W^T + bias. Columns are dealt into panels of 32; `data` holds the panels one after the other.
struct OctLinear {
  const void* data;
  const float* bias;  // [n] or null
  int32_t n, k;       // outputs, inputs
  int32_t type;       // OctType
  int32_t pad_;
};

// One decoder layer. Norm weights are f32 [dim]; null: that norm is absent.
struct OctLayer {
  OctLinear qkv, o, gate_up, down;  // gate_up: panels of 16 gate and the matching 16 up columns
  const float *norm_in, *norm_after_attention, *norm_before_mlp, *norm_after_mlp;
  const float *q_norm, *k_norm, *sinks;  // [head_dim], [head_dim], [heads]
  int64_t k_at, v_at, k_scale_at, v_scale_at;  // byte offsets in a page
  int32_t heads, kv_heads, head_dim, rotary_dim;
  int32_t window;  // 0: none
  int32_t group;   // which block table
  int32_t rope;    // which frequencies, -1: none
  float scale, softcap;  // softcap 0: none
  int32_t pad_;
};

struct OctModel {
  const OctLayer* layers;
  OctLinear embedding;  // packed like a linear; often the same data as `head`
  OctLinear head;
  const float* final_norm;
  const float* frequencies;  // [n_ropes][rotary_half] inverse frequencies of rotary embeddings
  int32_t n_ropes, rotary_half;
  int32_t n_layers, hidden, intermediate, vocabulary;
  int32_t activation;  // OctActivation
  int32_t compute;     // OctType of attention inputs: OCT_BF16 or OCT_F32
  int32_t kv_type;     // OctType of the cache
  int32_t threads;
  float eps, embedding_scale, logit_softcap, residual_scale;
};

// Paged KV memory and the sequences of one step.
struct OctBatch {
  uint8_t* kv;
  int64_t page_bytes;
  int32_t block_size, n_seqs, n_tokens, n_groups, table_width, pad_;
  const int32_t* starts;   // [n_seqs] position of the first new token
  const int32_t* offsets;  // [n_seqs + 1] place of it in the flat batch
  const int32_t* tables;   // [n_groups][n_seqs][table_width] block ids
};

struct OctStep {
  OctBatch batch;
  const int32_t* ids;             // [n_tokens]
  const int32_t* rows;            // [n_rows] places in the flat batch whose logits are wanted
  int32_t n_rows, pad_;
  float* logits;                  // [n_rows][vocabulary] or null: only argmax
  int32_t* argmax;                // [n_rows]
  uint8_t* scratch;
  int64_t scratch_bytes;
  double* seconds;                // [OCT_PARTS], added to
};

enum OctPart : int32_t { OCT_LINEAR = 0, OCT_ATTENTION = 1, OCT_NORM_ROPE = 2, OCT_HEAD = 3, OCT_EMBED = 4, OCT_PARTS = 5 };

// Attention of one layer for other model code. q and out: [n_tokens][heads][dim] in `type` (OCT_F32 or OCT_BF16).
struct OctAttend {
  OctBatch batch;
  const void* q;
  void* out;
  const float* sinks;
  int64_t k_at, v_at, k_scale_at, v_scale_at;
  int32_t heads, kv_heads, k_dim, v_dim, window, group, type, kv_type;
  float scale, softcap;
  int32_t threads, pad_;
  uint8_t* scratch;
  int64_t scratch_bytes;
};

// Packing of a row-major matrix [n][k] into panels.
struct OctPack {
  const void* source;   // [n][k] rows of f32, bf16 or f16; for group types already quantised, see pack.h
  void* data;
  int32_t n, k, source_type, type;
  int32_t first, interleave;  // first output column; interleave 1, 2: gate or up half of 16+16 panels, 0: plain
  int32_t threads, pad_;
};

}  // extern "C"
