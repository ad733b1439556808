// AVX-512 (F, BW, DQ, VL, VNNI): one register holds the sixteen outputs of a panel.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"
#include "noise.h"

namespace outrider {
namespace {

constexpr int kMaxRows = 12;    // of one register tile
constexpr int kSquareRows = 6;  // when there are many
// Panels one register tile spans for `rows` rows: at most 24 accumulators.
constexpr int tile_panels(int rows) { return rows <= 3 ? 8 : rows <= 6 ? 4 : 2; }

using V = __m512;
inline V zero() { return _mm512_setzero_ps(); }
inline V set1(float a) { return _mm512_set1_ps(a); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline V load_bytes(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, V a) { _mm512_storeu_ps(p, a); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V div(V a, V b) { return _mm512_div_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline V round(V a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline V scale_by_power(V a, V n) { return _mm512_scalef_ps(a, n); }
inline unsigned mask_greater_equal(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
// x where a >= b, zero elsewhere.
inline V where_greater_equal(V a, V b, V x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), x);
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
inline float horizontal_sum(V a) {
  return horizontal_sum(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
}
inline float horizontal_max(V a) {
  return horizontal_max(_mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
}

inline V load_f32(const char* line) { return _mm512_load_ps(line); }
// Two bf16 of one output share a 32-bit lane: the even k below, the odd k above.
inline V load_bf16_even(const char* line) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_load_si512(line), 16));
}
inline V load_bf16_odd(const char* line) {
  const __m512i high = _mm512_set1_epi32(int(0xffff0000));
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_load_si512(line), high));
}
inline V broadcast_even(uint32_t pair) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_set1_epi32(int(pair)), 16));
}
inline V broadcast_odd(uint32_t pair) {
  return _mm512_castsi512_ps(_mm512_set1_epi32(int(pair & 0xffff0000)));
}

using I = __m512i;
using W8 = __m512i;  // 16 outputs x 4 unsigned bytes along k
using X8 = __m512i;  // the row's 4 signed bytes, in every lane
inline I iset1(int32_t a) { return _mm512_set1_epi32(a); }
inline V to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline W8 load_u8(const char* line) { return _mm512_load_si512(line); }
inline void load_u4(const char* line, W8& low, W8& high) {
  const __m512i x = _mm512_load_si512(line), m = _mm512_set1_epi8(15);
  low = _mm512_and_si512(x, m);
  high = _mm512_and_si512(_mm512_srli_epi16(x, 4), m);
}
inline X8 broadcast4(const int8_t* x) {
  int32_t v;
  __builtin_memcpy(&v, x, 4);
  return _mm512_set1_epi32(v);
}
// In assembly: with the intrinsic, compilers copy and spill accumulators.
inline I dot4(I acc, W8 w, X8 x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
  return acc;
}

using B = __m512i;  // a line of packed codes
inline B load_bytes(const char* p) { return _mm512_load_si512(p); }
template <int kBy>
inline B shift_bytes(B x) {
  if constexpr (kBy > 0) return _mm512_slli_epi16(x, kBy);
  if constexpr (kBy < 0) return _mm512_srli_epi16(x, -kBy);
  return x;
}
inline B and_bytes(B x, int mask) { return _mm512_and_si512(x, _mm512_set1_epi8(char(mask))); }
inline B or_bytes(B x, B y) { return _mm512_or_si512(x, y); }
inline B look_up(B table, B index) { return _mm512_shuffle_epi8(table, index); }
constexpr bool kDotIsCentred = false;
constexpr bool kLoadsAreCentred = false, kDotsPairs = false;
// The sums of kSteps x 4 products per output.
template <int kTop, int kSteps>
inline I dot(const B* w, const int8_t* x) {
  I acc = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int s = 0; s < kSteps; ++s) {
    asm("vpdpbusd %2%{1to16%}, %1, %0"
        : "+v"(acc)
        : "v"(w[s]), "m"(*reinterpret_cast<const char(*)[4]>(x + 4 * s)));
  }
  return acc;
}
// Sixteen numbers of 16 bits or of a byte.
inline V load_half(const char* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline V load_bf16(const char* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline __m128i load_16(const char* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline V load_unsigned(const char* p) { return to_float(_mm512_cvtepu8_epi32(load_16(p))); }
inline V load_signed(const char* p) { return to_float(_mm512_cvtepi8_epi32(load_16(p))); }
inline void load_nibbles(const char* p, V& low, V& high) {
  const __m512i x = _mm512_cvtepu8_epi32(load_16(p));
  low = to_float(_mm512_and_si512(x, _mm512_set1_epi32(15)));
  high = to_float(_mm512_srli_epi32(x, 4));
}

// acc + odd * odd, then + even * even, of bfloat16. In assembly for the same reason, and because a
// flag for the whole file would let the compiler use it on processors without it.
struct PairDot {
  static I row(uint32_t pair) { return _mm512_set1_epi32(int(pair)); }
  static I weights(const char* line) { return _mm512_load_si512(line); }
  static V add(V acc, I x, I w) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(x), "v"(w));
    return acc;
  }
};

// Sixteen floats that are integers of -127..127.
inline void store_i8(int8_t* p, V a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
}
inline V abs(V a) { return _mm512_abs_ps(a); }

inline __m512i mix8(__m512i x) {
  x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 30));
  x = _mm512_mullo_epi64(x, _mm512_set1_epi64(int64_t(0xBF58476D1CE4E5B9ull)));
  x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 27));
  x = _mm512_mullo_epi64(x, _mm512_set1_epi64(int64_t(0x94D049BB133111EBull)));
  return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}

// u(first .. first + 15) of `key`.
inline V uniform16(uint64_t key, uint64_t first) {
  const __m512i step = _mm512_set_epi64(
      int64_t(8 * kGamma), int64_t(7 * kGamma), int64_t(6 * kGamma), int64_t(5 * kGamma),
      int64_t(4 * kGamma), int64_t(3 * kGamma), int64_t(2 * kGamma), int64_t(kGamma));
  const uint64_t base = key + first * kGamma;
  const __m512i a = mix8(_mm512_add_epi64(_mm512_set1_epi64(int64_t(base)), step));
  const __m512i b = mix8(_mm512_add_epi64(_mm512_set1_epi64(int64_t(base + 8 * kGamma)), step));
  const __m256i ha = _mm512_cvtepi64_epi32(_mm512_srli_epi64(a, 32));
  const __m256i hb = _mm512_cvtepi64_epi32(_mm512_srli_epi64(b, 32));
  const __m512i h = _mm512_inserti64x4(_mm512_castsi256_si512(ha), hb, 1);
  const V u = mul(add(_mm512_cvtepu32_ps(h), set1(0.5f)), set1(0x1p-32f));
  return min(u, set1(1.0f - 0x1p-24f));
}

// floor(log2(u)) for positive normal u.
inline V exponent(V u) { return _mm512_getexp_ps(u); }

// Appends the lanes of `a` in `mask` to p, which has room for sixteen; returns how many.
// (The compressing store to memory is microcoded on some processors.)
inline int compress(float* p, V a, unsigned mask) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(__mmask16(mask), a));
  return __builtin_popcount(mask);
}

}  // namespace
}  // namespace outrider

#include "kernels_impl.h"

namespace outrider {
namespace {
constexpr Kernels kPlain = table<void>("avx512"), kWithPairs = table<PairDot>("avx512_bf16");
}
const Kernels* avx512_kernels() { return &kPlain; }
const Kernels* avx512_bf16_kernels() { return &kWithPairs; }
}  // namespace outrider
#endif
