// Chooses the instruction set at run time; OUTRIDER_ISA names one instead.
#include <cstdlib>

#include "model.h"
#include "pool.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace outrider {
namespace {

bool always() { return true; }

#if defined(__x86_64__)
bool runs_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
bool runs_avx512_bf16() { return runs_avx512() && __builtin_cpu_supports("avx512bf16"); }
bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
// Intel's processors have the bfloat16 instruction too, at half the speed of two multiply-adds.
bool is_amd() { return __builtin_cpu_is("amd"); }
#elif defined(__aarch64__)
#if defined(__APPLE__)
bool has(const char* feature) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value;
}
bool runs_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
bool runs_i8mm() {
  return runs_dotprod() && has("hw.optional.arm.FEAT_I8MM") && has("hw.optional.arm.FEAT_BF16");
}
#elif defined(__linux__)
bool runs_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }
bool runs_i8mm() { return runs_dotprod() && (getauxval(AT_HWCAP2) >> 13 & 3) == 3; }  // and bfloat16
#else
bool runs_dotprod() { return false; }
bool runs_i8mm() { return false; }
#endif
#endif

struct Choice {
  const char* name;
  bool (*runs)();       // on this processor
  bool (*preferred)();  // over those that follow
  const Kernels* (*kernels)();
};
const Choice kChoices[] = {
#if defined(__x86_64__)
    {"avx512_bf16", runs_avx512_bf16, is_amd, avx512_bf16_kernels},
    {"avx512", runs_avx512, always, avx512_kernels},
    {"avx2", runs_avx2, always, avx2_kernels},
#elif defined(__aarch64__)
    {"i8mm", runs_i8mm, always, i8mm_kernels},
    {"dotprod", runs_dotprod, always, dotprod_kernels},
    {"neon", always, always, neon_kernels},
#endif
    {"portable", always, always, portable_kernels},
};

}  // namespace

const Kernels* pick_kernels(const char* forced) {
  const std::string name = forced ? forced : "";
  for (const Choice& c : kChoices)
    if (c.runs() && (name.empty() ? c.preferred() : name == c.name)) return c.kernels();
  return nullptr;
}

const Kernels* kernels_or_error() {
  const Kernels* k = pick_kernels(std::getenv("OUTRIDER_ISA"));
  if (k) return k;
  std::string names;
  for (const Choice& c : kChoices)
    if (c.runs()) names += (names.empty() ? "" : ", ") + std::string(c.name);
  set_error("OUTRIDER_ISA must be one of those that this processor runs: " + names);
  return nullptr;
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
