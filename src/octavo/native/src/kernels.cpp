// Compiled once for each instruction set, with OCTAVO_ISA as its name.
#ifndef OCTAVO_ISA
#error "compile with -DOCTAVO_ISA=<name>"
#endif
#include <algorithm>
#include <type_traits>

#include "decoder.h"
#include "pack.h"
#include "table.h"

namespace OCTAVO_ISA {

static int64_t read_bytes(const uint8_t* data, int64_t bytes, int threads) {
  int64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static)
  for (int64_t at = 0; at < bytes / 4096; at++) {
    u32x16 s = {};
    for (int i = 0; i < 4096; i += 64) s += load<u32x16>(data + at * 4096 + i);
    total += s[0] + s[7];
  }
  return total;
}

extern const Table table;
const Table table = {scratch_bytes, run_step, attend_bytes, run_attend, panel_bytes, pack, read_bytes};

}  // namespace OCTAVO_ISA
