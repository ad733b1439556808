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
inline __m256 load_bytes8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline V load_bytes(const int8_t* p) { return {load_bytes8(p), load_bytes8(p + 8)}; }
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

struct B {  // a line of packed codes
  __m256i a, b;
};
inline B load_bytes(const char* p) { return {line_half(p, 0), line_half(p, 1)}; }
template <int kBy>
inline B shift_bytes(B x) {
  if constexpr (kBy > 0) return {_mm256_slli_epi16(x.a, kBy), _mm256_slli_epi16(x.b, kBy)};
  if constexpr (kBy < 0) return {_mm256_srli_epi16(x.a, -kBy), _mm256_srli_epi16(x.b, -kBy)};
  return x;
}
inline B and_bytes(B x, int mask) {
  const __m256i m = _mm256_set1_epi8(char(mask));
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
inline B or_bytes(B x, B y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline B look_up(B table, B i) {
  return {_mm256_shuffle_epi8(table.a, i.a), _mm256_shuffle_epi8(table.b, i.b)};
}
// Sums of pairs of products must fit into 16 bits. Codes of a byte are made signed, and the sign
// goes over to the activation.
constexpr bool kDotIsCentred = true;
constexpr bool kLoadsAreCentred = false, kDotsPairs = false;
template <int kTop>
inline __m256i pair_sums(__m256i w, __m256i x) {
  if constexpr (kTop < 255) return _mm256_maddubs_epi16(w, x);
  const __m256i centred = _mm256_xor_si256(w, _mm256_set1_epi8(char(128)));
  return _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(x, centred));
}
// The sums of kSteps x 4 products per output.
template <int kTop, int kSteps>
inline I dot(const B* w, const int8_t* x) {
  constexpr int kRun = kTop <= 15 ? 8 : kTop <= 31 ? 4 : kTop <= 63 ? 2 : 1;  // pairs that fit
  constexpr int kFit = kRun < kSteps ? kRun : kSteps;
  const __m256i ones = _mm256_set1_epi16(1);
  I acc = iset1(0);
#pragma GCC unroll 8
  for (int first = 0; first < kSteps; first += kFit) {
    __m256i a = _mm256_setzero_si256(), b = a;
#pragma GCC unroll 8
    for (int s = first; s < first + kFit; ++s) {
      int32_t four;
      __builtin_memcpy(&four, x + 4 * s, 4);
      const __m256i y = _mm256_set1_epi32(four);
      a = _mm256_add_epi16(a, pair_sums<kTop>(w[s].a, y));
      b = _mm256_add_epi16(b, pair_sums<kTop>(w[s].b, y));
    }
    acc.a = _mm256_add_epi32(acc.a, _mm256_madd_epi16(a, ones));
    acc.b = _mm256_add_epi32(acc.b, _mm256_madd_epi16(b, ones));
  }
  return acc;
}
// Sixteen numbers of 16 bits or of a byte.
inline __m128i load_16(const char* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline __m128i load_8(const char* p) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}
inline V load_half(const char* p) {
  return {_mm256_cvtph_ps(load_16(p)), _mm256_cvtph_ps(load_16(p + 16))};
}
inline __m256 widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline V load_bf16(const char* p) { return {widen_bf16(load_16(p)), widen_bf16(load_16(p + 16))}; }
inline V load_unsigned(const char* p) {
  return to_float(I{_mm256_cvtepu8_epi32(load_8(p)), _mm256_cvtepu8_epi32(load_8(p + 8))});
}
inline V load_signed(const char* p) {
  return to_float(I{_mm256_cvtepi8_epi32(load_8(p)), _mm256_cvtepi8_epi32(load_8(p + 8))});
}
inline void load_nibbles(const char* p, V& low, V& high) {
  const __m256i a = _mm256_cvtepu8_epi32(load_8(p)), b = _mm256_cvtepu8_epi32(load_8(p + 8));
  const __m256i m = _mm256_set1_epi32(15);
  low = to_float(I{_mm256_and_si256(a, m), _mm256_and_si256(b, m)});
  high = to_float(I{_mm256_srli_epi32(a, 4), _mm256_srli_epi32(b, 4)});
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
