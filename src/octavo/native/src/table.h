// What each instruction set's object file offers.
#pragma once
#include "octavo.h"

struct Table {
  int64_t (*scratch_bytes)(const OctModel*, int tokens, int seqs, int rows, int groups);
  int (*run_step)(const OctModel*, const OctStep*);
  int64_t (*attend_bytes)(int tokens, int seqs, int kv_heads, int threads);
  int (*run_attend)(const OctAttend*);
  int64_t (*panel_bytes)(int type, int64_t k);
  int (*pack)(const OctPack*);
  int64_t (*read_bytes)(const uint8_t* data, int64_t bytes, int threads);
};
