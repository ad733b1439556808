// AVX2 + FMA: two registers hold the sixteen outputs of a panel.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"
#include "noise.h"

namespace outrider {
namespace {

constexpr int kMaxRows = 6, kSquareRows = 6;
constexpr int tile_panels(int rows) { return rows <= 1 ? 4 : rows <= 2 ? 2 : 1; }

struct V {
  __m256 a, b;
};
inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V fma(V x, V y, V z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline V round(V x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 scale_by_power(__m256 a, __m256 n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
}
inline V scale_by_power(V x, V n) { return {scale_by_power(x.a, n.a), scale_by_power(x.b, n.b)}; }
inline unsigned mask_greater_equal(V x, V y) {
  return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ))) |
         unsigned(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ))) << 8;
}
inline V where_greater_equal(V x, V y, V z) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), z.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ), z.b)};
}
inline V abs(V x) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}

// Lane i with lane i + 8, then 4, 2, 1 apart: the order of every instruction set.
inline float horizontal_sum(__m256 r) {
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(r), _mm256_extractf128_ps(r, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float horizontal_max(__m256 r) {
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(r), _mm256_extractf128_ps(r, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float horizontal_sum(V x) { return horizontal_sum(_mm256_add_ps(x.a, x.b)); }
inline float horizontal_max(V x) { return horizontal_max(_mm256_max_ps(x.a, x.b)); }

inline __m256i line_half(const char* line, int half) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(line) + half);
}
inline V load_f32(const char* line) { return load(reinterpret_cast<const float*>(line)); }
inline V load_bf16_even(const char* line) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(line_half(line, 0), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(line_half(line, 1), 16))};
}
inline V load_bf16_odd(const char* line) {
  const __m256i high = _mm256_set1_epi32(int(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(line_half(line, 0), high)),
          _mm256_castsi256_ps(_mm256_and_si256(line_half(line, 1), high))};
}
inline V broadcast_even(uint32_t pair) {
  const __m256 x = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_set1_epi32(int(pair)), 16));
  return {x, x};
}
inline V broadcast_odd(uint32_t pair) {
  const __m256 x = _mm256_castsi256_ps(_mm256_set1_epi32(int(pair & 0xffff0000)));
  return {x, x};
}

struct I {
  __m256i a, b;
};
// Bytes 0 and 2 of each output in `even`, 1 and 3 in `odd`, as 16-bit: products cannot saturate.
struct W8 {
  __m256i even_a, odd_a, even_b, odd_b;
};
struct X8 {
  __m256i even, odd;
};
inline I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline V to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline W8 split_bytes(__m256i x, __m256i y) {
  const __m256i m = _mm256_set1_epi16(0xff);
  return {_mm256_and_si256(x, m), _mm256_srli_epi16(x, 8), _mm256_and_si256(y, m),
          _mm256_srli_epi16(y, 8)};
}
inline W8 load_u8(const char* line) { return split_bytes(line_half(line, 0), line_half(line, 1)); }
inline void load_u4(const char* line, W8& low, W8& high) {
  const __m256i x = line_half(line, 0), y = line_half(line, 1), m = _mm256_set1_epi8(15);
  low = split_bytes(_mm256_and_si256(x, m), _mm256_and_si256(y, m));
  high = split_bytes(_mm256_and_si256(_mm256_srli_epi16(x, 4), m),
                     _mm256_and_si256(_mm256_srli_epi16(y, 4), m));
}
inline X8 broadcast4(const int8_t* x) {
  int32_t v;
  __builtin_memcpy(&v, x, 4);
  const __m256i b = _mm256_set1_epi32(v);
  return {_mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8), _mm256_srai_epi16(b, 8)};
}
inline I dot4(I acc, const W8& w, const X8& x) {
  const __m256i a = _mm256_add_epi32(_mm256_madd_epi16(w.even_a, x.even),
                                     _mm256_madd_epi16(w.odd_a, x.odd));
  const __m256i b = _mm256_add_epi32(_mm256_madd_epi16(w.even_b, x.even),
                                     _mm256_madd_epi16(w.odd_b, x.odd));
  return {_mm256_add_epi32(acc.a, a), _mm256_add_epi32(acc.b, b)};
}
// Sixteen floats that are integers of -127..127.
inline void store_i8(int8_t* p, V x) {
  alignas(32) int32_t t[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(t), _mm256_cvtps_epi32(x.a));
  _mm256_store_si256(reinterpret_cast<__m256i*>(t + 8), _mm256_cvtps_epi32(x.b));
  for (int i = 0; i < 16; ++i) p[i] = int8_t(t[i]);
}

inline V uniform16(uint64_t key, uint64_t first) {
  alignas(32) float t[16];
  for (int i = 0; i < 16; ++i) t[i] = uniform(key, first + uint64_t(i));
  return load(t);
}
inline __m256 exponent(__m256 u) {
  const __m256i e = _mm256_srli_epi32(_mm256_castps_si256(u), 23);
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(e, _mm256_set1_epi32(127)));
}
inline V exponent(V u) { return {exponent(u.a), exponent(u.b)}; }

inline int compress(float* p, V x, unsigned mask) {
  alignas(32) float t[16];
  store(t, x);
  int n = 0;
  for (; mask; mask &= mask - 1) p[n++] = t[__builtin_ctz(mask)];
  return n;
}

}  // namespace
}  // namespace outrider

#include "kernels_impl.h"

namespace outrider {
namespace {
constexpr Kernels kTable = table<void>("avx2");
}
const Kernels* avx2_kernels() { return &kTable; }
}  // namespace outrider
#endif
