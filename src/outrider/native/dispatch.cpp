// Chooses the instruction set at run time; OUTRIDER_ISA names one instead.
#include <cstdlib>

#include "model.h"
#include "pool.h"

namespace outrider {
namespace {

bool runs_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

bool runs_avx512_bf16() {
#if defined(__x86_64__)
  return runs_avx512() && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

bool runs_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

}  // namespace

const Kernels* pick_kernels(const char* forced) {
  const std::string name = forced ? forced : "";
#if defined(__x86_64__)
  if (name == "avx512_bf16") return runs_avx512_bf16() ? avx512_bf16_kernels() : nullptr;
  if (name == "avx512") return runs_avx512() ? avx512_kernels() : nullptr;
  if (name == "avx2") return runs_avx2() ? avx2_kernels() : nullptr;
  // Intel's processors have the instruction too, at half the speed of two multiply-adds.
  if (name.empty() && runs_avx512_bf16() && __builtin_cpu_is("amd")) return avx512_bf16_kernels();
  if (name.empty() && runs_avx512()) return avx512_kernels();
  if (name.empty() && runs_avx2()) return avx2_kernels();
#endif
  return name.empty() || name == "portable" ? portable_kernels() : nullptr;
}

const Kernels* kernels_or_error() {
  const Kernels* k = pick_kernels(std::getenv("OUTRIDER_ISA"));
  if (!k) {
    set_error("OUTRIDER_ISA must be avx512_bf16, avx512, avx2 or portable, and this processor's own");
  }
  return k;
}

}  // namespace outrider

extern "C" {

const char* outrider_isa(void) {
  const outrider::Kernels* k = outrider::kernels_or_error();
  return k ? k->name : nullptr;
}

int32_t outrider_cores(void) { return outrider::available_cores(); }

uint64_t outrider_struct_sizes(void) {
  return uint64_t(sizeof(OutriderConfig)) | uint64_t(sizeof(OutriderStep)) << 10 |
         uint64_t(sizeof(OutriderDraft)) << 20 | uint64_t(sizeof(OutriderTree)) << 30 |
         uint64_t(sizeof(OutriderSample)) << 40 | uint64_t(sizeof(OutriderCycles)) << 50;
}

}  // extern "C"
