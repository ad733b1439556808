// The counter-based noise of outrider/noise.py, bit for bit up to the two logarithms, which are
// rounded from double precision so that every instruction set draws the same token.
#pragma once

#include <cmath>
#include <cstdint>

namespace outrider {
namespace {

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15ull;

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline float uniform_from_bits(uint32_t high) {
  float u = (float(high) + 0.5f) * 0x1p-32f;
  const float cap = 1.0f - 0x1p-24f;
  return u < cap ? u : cap;
}

inline float uniform(uint64_t key, uint64_t i) {
  return uniform_from_bits(uint32_t(mix(key + (i + 1) * kGamma) >> 32));
}

inline float gumbel_from_uniform(float u) {
  const float e = float(-::log1p(-double(u)));
  return float(-::log(double(e)));
}

}  // namespace
}  // namespace outrider
