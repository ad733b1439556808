// Every 64-bit ARM processor.
#if defined(__aarch64__)
#include "neon.h"

#include "kernels_impl.h"

namespace outrider {
namespace {
constexpr Kernels kTable = table<void>("neon");
}
const Kernels* neon_kernels() { return &kTable; }
}  // namespace outrider
#endif
