// ARM with the dot product of bytes, optional from ARMv8.2 on.
#if defined(__aarch64__)
#include "neon.h"

#include "kernels_impl.h"

namespace outrider {
namespace {
constexpr Kernels kTable = table<void>("dotprod");
}
const Kernels* dotprod_kernels() { return &kTable; }
}  // namespace outrider
#endif
