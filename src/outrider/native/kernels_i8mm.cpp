// ARM with products of int8 matrices and of bfloat16, optional from ARMv8.2 on.
#if defined(__aarch64__)
#include "neon.h"

#include "kernels_impl.h"

namespace outrider {
namespace {
constexpr Kernels kTable = table<PairDot>("i8mm");
}
const Kernels* i8mm_kernels() { return &kTable; }
}  // namespace outrider
#endif
