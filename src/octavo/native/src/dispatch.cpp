// Picks the instruction set at run time and forwards the C ABI to it.
#include <string.h>

#include "table.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

#ifdef OCTAVO_HAS_AVX512_BF16
namespace avx512_bf16 { extern const Table table; }
#endif
#ifdef OCTAVO_HAS_AVX512
namespace avx512 { extern const Table table; }
#endif
#ifdef OCTAVO_HAS_AVX2
namespace avx2 { extern const Table table; }
#endif
namespace portable { extern const Table table; }

namespace {

struct Choice {
  const char* name;
  const Table* table;
  bool usable;
};

const Choice* choices(int* count) {
  static const Choice all[] = {
#ifdef OCTAVO_HAS_AVX512_BF16
      {"avx512_bf16", &avx512_bf16::table, __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw")},
#endif
#ifdef OCTAVO_HAS_AVX512
      {"avx512", &avx512::table, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
#endif
#ifdef OCTAVO_HAS_AVX2
      {"avx2", &avx2::table, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")},
#endif
      {"portable", &portable::table, true},
  };
  *count = sizeof all / sizeof *all;
  return all;
}

const Choice* best() {
  int count;
  const Choice* all = choices(&count);
  for (int i = 0; i < count; i++)
    if (all[i].usable) return all + i;
  return all + count - 1;
}

const Choice* chosen = nullptr;

const Table& table() {
  if (!chosen) chosen = best();
  return *chosen->table;
}

}  // namespace

EXPORT int octavo_abi(void) { return OCTAVO_ABI; }
EXPORT const char* octavo_isa(void) { return table(), chosen->name; }
EXPORT int octavo_use_isa(const char* name) {  // 0: done, 1: unknown or not on this machine
  int count;
  const Choice* all = choices(&count);
  for (int i = 0; i < count; i++)
    if (!strcmp(all[i].name, name) && all[i].usable) return chosen = all + i, 0;
  return 1;
}
EXPORT int64_t octavo_scratch_bytes(const OctModel* m, int tokens, int seqs, int rows, int groups) { return table().scratch_bytes(m, tokens, seqs, rows, groups); }
EXPORT int octavo_step(const OctModel* m, const OctStep* s) { return table().run_step(m, s); }
EXPORT int64_t octavo_attend_bytes(int tokens, int seqs, int kv_heads, int threads) { return table().attend_bytes(tokens, seqs, kv_heads, threads); }
EXPORT int octavo_attend(const OctAttend* a) { return table().run_attend(a); }
EXPORT int64_t octavo_panel_bytes(int type, int64_t k) { return table().panel_bytes(type, k); }
EXPORT int octavo_pack(const OctPack* p) { return table().pack(p); }
EXPORT int64_t octavo_read_bytes(const uint8_t* data, int64_t bytes, int threads) { return table().read_bytes(data, bytes, threads); }
