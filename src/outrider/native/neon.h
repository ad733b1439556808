// ARM, sixteen lanes as four registers. Included by kernels_neon.cpp, kernels_dotprod.cpp and
// kernels_i8mm.cpp, which are compiled for more and more instructions and compute the same bits: float
// operations are the same, integer sums are exact. They are also the bits of AVX2: every
// multiply-add is fused there, too, and codes of a byte are made signed in the same places.
#pragma once

#include <arm_neon.h>

#include <utility>

#include "kernels.h"
#include "noise.h"

namespace outrider {
namespace {

constexpr int kMaxRows = 6, kSquareRows = 6;
constexpr int tile_panels(int rows) { return rows <= 1 ? 4 : rows <= 2 ? 2 : 1; }

struct V {
  float32x4_t v[4];
};
// An intrinsic has no address that could be linked, so `f` is a lambda around it.
template <class R, class F, class... X>
inline R each(F f, const X&... x) {
  return {{f(x.v[0]...), f(x.v[1]...), f(x.v[2]...), f(x.v[3]...)}};
}
inline V set1(float x) {
  const float32x4_t r = vdupq_n_f32(x);
  return {{r, r, r, r}};
}
inline V zero() { return set1(0.0f); }
inline V load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
inline V load_bytes(const int8_t* p) {
  const int8x16_t x = vld1q_s8(p);
  const int16x8_t a = vmovl_s8(vget_low_s8(x)), b = vmovl_s8(vget_high_s8(x));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(a))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(a))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(b))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(b)))}};
}
inline void store(float* p, const V& x) {
  vst1q_f32(p, x.v[0]);
  vst1q_f32(p + 4, x.v[1]);
  vst1q_f32(p + 8, x.v[2]);
  vst1q_f32(p + 12, x.v[3]);
}
inline V add(const V& x, const V& y) {
  return each<V>([](auto a, auto b) { return vaddq_f32(a, b); }, x, y);
}
inline V sub(const V& x, const V& y) {
  return each<V>([](auto a, auto b) { return vsubq_f32(a, b); }, x, y);
}
inline V mul(const V& x, const V& y) {
  return each<V>([](auto a, auto b) { return vmulq_f32(a, b); }, x, y);
}
inline V div(const V& x, const V& y) {
  return each<V>([](auto a, auto b) { return vdivq_f32(a, b); }, x, y);
}
inline V fma(const V& x, const V& y, const V& z) {
  return each<V>([](auto a, auto b, auto c) { return vfmaq_f32(c, a, b); }, x, y, z);
}
// Not the processor's own maximum: the second operand where one is a NaN, as on the other processors.
inline float32x4_t larger(float32x4_t x, float32x4_t y) {
  return vbslq_f32(vcgtq_f32(x, y), x, y);
}
inline V max(const V& x, const V& y) { return each<V>(larger, x, y); }
inline V min(const V& x, const V& y) {
  return each<V>([](auto a, auto b) { return vbslq_f32(vcltq_f32(a, b), a, b); }, x, y);
}
inline V abs(const V& x) { return each<V>([](auto a) { return vabsq_f32(a); }, x); }
inline V round(const V& x) { return each<V>([](auto a) { return vrndnq_f32(a); }, x); }
inline V scale_by_power(const V& x, const V& n) {
  return each<V>(
      [](auto a, auto b) {
        const int32x4_t e = vaddq_s32(vcvtq_s32_f32(b), vdupq_n_s32(127));
        return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(e, 23)));
      },
      x, n);
}
struct U {
  uint32x4_t v[4];
};
inline unsigned mask_greater_equal(const V& x, const V& y) {
  const U m = each<U>([](auto a, auto b) { return vcgeq_f32(a, b); }, x, y);
  const uint8x16_t lanes = vcombine_u8(
      vmovn_u16(vcombine_u16(vmovn_u32(m.v[0]), vmovn_u32(m.v[1]))),
      vmovn_u16(vcombine_u16(vmovn_u32(m.v[2]), vmovn_u32(m.v[3]))));
  const uint8_t places[8] = {1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x8_t bit = vld1_u8(places);
  return unsigned(vaddv_u8(vand_u8(vget_low_u8(lanes), bit))) |
         unsigned(vaddv_u8(vand_u8(vget_high_u8(lanes), bit))) << 8;
}
inline V where_greater_equal(const V& x, const V& y, const V& z) {
  return each<V>(
      [](auto a, auto b, auto c) {
        return vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(a, b), vreinterpretq_u32_f32(c)));
      },
      x, y, z);
}

// Lane i with lane i + 8, then 4, 2, 1 apart: the order of every instruction set.
template <class F>
inline float fold(const V& x, F f) {
  float32x4_t q = f(f(x.v[0], x.v[2]), f(x.v[1], x.v[3]));
  q = f(q, vextq_f32(q, q, 2));
  return vgetq_lane_f32(f(q, vextq_f32(q, q, 1)), 0);
}
inline float horizontal_sum(const V& x) {
  return fold(x, [](auto a, auto b) { return vaddq_f32(a, b); });
}
inline float horizontal_max(const V& x) { return fold(x, larger); }

inline V load_f32(const char* line) { return load(reinterpret_cast<const float*>(line)); }
inline U load_words(const char* line) {
  const auto* p = reinterpret_cast<const uint32_t*>(line);
  return {{vld1q_u32(p), vld1q_u32(p + 4), vld1q_u32(p + 8), vld1q_u32(p + 12)}};
}
inline float32x4_t even_of(uint32x4_t pairs) { return vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16)); }
inline float32x4_t odd_of(uint32x4_t pairs) {
  return vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
}
inline V load_bf16_even(const char* line) { return each<V>(even_of, load_words(line)); }
inline V load_bf16_odd(const char* line) { return each<V>(odd_of, load_words(line)); }
inline V broadcast_even(uint32_t pair) {
  const float32x4_t x = even_of(vdupq_n_u32(pair));
  return {{x, x, x, x}};
}
inline V broadcast_odd(uint32_t pair) {
  const float32x4_t x = odd_of(vdupq_n_u32(pair));
  return {{x, x, x, x}};
}

struct I {
  int32x4_t v[4];
};
struct B {  // a line of packed codes
  uint8x16_t v[4];
};
inline I iset1(int32_t x) {
  const int32x4_t r = vdupq_n_s32(x);
  return {{r, r, r, r}};
}
inline V to_float(const I& x) { return each<V>([](auto a) { return vcvtq_f32_s32(a); }, x); }
inline B load_bytes(const char* line) {
  const auto* p = reinterpret_cast<const uint8_t*>(line);
  return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
}
template <int kBy>
inline B shift_bytes(const B& x) {
  if constexpr (kBy > 0) return each<B>([](auto a) { return vshlq_n_u8(a, kBy); }, x);
  if constexpr (kBy < 0) return each<B>([](auto a) { return vshrq_n_u8(a, -kBy); }, x);
  return x;
}
inline B and_bytes(const B& x, int mask) {
  return each<B>([=](auto a) { return vandq_u8(a, vdupq_n_u8(uint8_t(mask))); }, x);
}
inline B or_bytes(const B& x, const B& y) {
  return each<B>([](auto a, auto b) { return vorrq_u8(a, b); }, x, y);
}
inline B look_up(const B& table, const B& index) {
  return each<B>([](auto a, auto i) { return vqtbl1q_u8(a, i); }, table, index);
}

// Signed bytes of sixteen outputs, and the four of a row in every lane.
struct W8 {
  int8x16_t v[4];
};
using X8 = int8x16_t;
constexpr bool kDotIsCentred = true;     // dot() subtracts 128 from codes of a byte
constexpr bool kLoadsAreCentred = true;  // load_u8() subtracts 128, load_u4() 8
template <int kZero>
inline W8 centred(const B& x) {
  return each<W8>([](auto a) { return vreinterpretq_s8_u8(vsubq_u8(a, vdupq_n_u8(kZero))); }, x);
}
template <int kTop>
inline W8 as_signed(const B& x) {
  if constexpr (kTop == 255) return centred<128>(x);
  return each<W8>([](auto a) { return vreinterpretq_s8_u8(a); }, x);
}
inline W8 load_u8(const char* line) { return centred<128>(load_bytes(line)); }
inline void load_u4(const char* line, W8& low, W8& high) {
  const B x = load_bytes(line);
  low = centred<8>(and_bytes(x, 15));
  high = centred<8>(shift_bytes<-4>(x));
}
inline X8 broadcast4(const int8_t* x) {
  int32_t v;
  __builtin_memcpy(&v, x, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(v));
}

#if defined(__ARM_FEATURE_DOTPROD)
inline I dot4(const I& acc, const W8& w, X8 x) {
  return each<I>([=](auto a, auto b) { return vdotq_s32(a, b, x); }, acc, w);
}
template <int kLane>
inline I dot_lane(const I& acc, const W8& w, int8x16_t x) {
  return each<I>([=](auto a, auto b) { return vdotq_laneq_s32(a, b, x, kLane); }, acc, w);
}
template <int kTop, size_t... S>
__attribute__((always_inline)) inline I dot_steps(const B* w, const int8_t* x, std::index_sequence<S...>) {
  I acc = iset1(0);
  ((acc = dot_lane<S % 4>(acc, as_signed<kTop>(w[S]), vld1q_s8(x + S / 4 * 16))), ...);
  return acc;
}
// The sums of kSteps x 4 products per output.
template <int kTop, int kSteps>
__attribute__((always_inline)) inline I dot(const B* w, const int8_t* x) {
  return dot_steps<kTop>(w, x, std::make_index_sequence<kSteps>());
}
#else
// Each output's four sums of 16 bits, as one.
inline int32x4_t joined(int16x8_t low, int16x8_t high) {
  return vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
}
inline I dot4(const I& acc, const W8& w, X8 x) {
  return each<I>(
      [=](auto a, auto b) {
        return vaddq_s32(a, joined(vmull_s8(vget_low_s8(b), vget_low_s8(x)), vmull_high_s8(b, x)));
      },
      acc, w);
}
// The sums of kSteps x 4 products per output.
template <int kTop, int kSteps>
__attribute__((always_inline)) inline I dot(const B* w, const int8_t* x) {
  constexpr int kRun = kTop <= 31 ? 8 : kTop <= 63 ? 4 : 2;  // products whose sum fits into 16 bits
  constexpr int kFit = kRun < kSteps ? kRun : kSteps;
  I acc = iset1(0);
#pragma GCC unroll 4
  for (int first = 0; first < kSteps; first += kFit) {
    int16x8_t low[4], high[4];
#pragma GCC unroll 8
    for (int s = first; s < first + kFit; ++s) {
      const X8 y = broadcast4(x + 4 * s);
      const W8 b = as_signed<kTop>(w[s]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        low[i] = s == first ? vmull_s8(vget_low_s8(b.v[i]), vget_low_s8(y))
                            : vmlal_s8(low[i], vget_low_s8(b.v[i]), vget_low_s8(y));
        high[i] = s == first ? vmull_high_s8(b.v[i], y) : vmlal_high_s8(high[i], b.v[i], y);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) acc.v[i] = vaddq_s32(acc.v[i], joined(low[i], high[i]));
  }
  return acc;
}
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
// An instruction multiplies eight values of two rows by those of two outputs, so it needs the next
// four values of an output beside the first.
constexpr bool kDotsPairs = true;
inline int8x16_t outputs_0_1(int8x16_t step, int8x16_t next) {
  return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(step), vreinterpretq_s32_s8(next)));
}
inline int8x16_t outputs_2_3(int8x16_t step, int8x16_t next) {
  return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(step), vreinterpretq_s32_s8(next)));
}
inline int32x4_t row_0(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}
inline int32x4_t row_1(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}
// dot() of two rows.
template <int kTop, int kSteps>
__attribute__((always_inline)) inline void dot_pair(const B* w, const int8_t* x0, const int8_t* x1, I& sum0, I& sum1) {
  I a = iset1(0), b = a;  // outputs 0 and 1 of each register, of both rows; outputs 2 and 3
#pragma GCC unroll 4
  for (int s = 0; s < kSteps; s += 2) {
    const int8x16_t x = vcombine_s8(vld1_s8(x0 + 4 * s), vld1_s8(x1 + 4 * s));
    const W8 step = as_signed<kTop>(w[s]), next = as_signed<kTop>(w[s + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      a.v[i] = vmmlaq_s32(a.v[i], x, outputs_0_1(step.v[i], next.v[i]));
      b.v[i] = vmmlaq_s32(b.v[i], x, outputs_2_3(step.v[i], next.v[i]));
    }
  }
  sum0 = each<I>(row_0, a, b);
  sum1 = each<I>(row_1, a, b);
}
#else
constexpr bool kDotsPairs = false;
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// acc + odd * odd, then + even * even, of bfloat16, each fused. (The instruction that multiplies
// pairs rounds otherwise.)
struct PairDot {
  struct Line {
    bfloat16x8_t v[4];
  };
  static bfloat16x8_t row(uint32_t pair) { return vreinterpretq_bf16_u32(vdupq_n_u32(pair)); }
  static Line weights(const char* line) {
    return each<Line>([](auto a) { return vreinterpretq_bf16_u32(a); }, load_words(line));
  }
  static V add(const V& acc, bfloat16x8_t x, const Line& w) {
    return each<V>(
        [=](auto a, auto b) { return vbfmlalbq_f32(vbfmlaltq_f32(a, x, b), x, b); }, acc, w);
  }
};
#endif

// Sixteen numbers of 16 bits or of a byte.
inline V load_half(const char* p) {
  const auto* h = reinterpret_cast<const float16_t*>(p);
  return {{vcvt_f32_f16(vld1_f16(h)), vcvt_f32_f16(vld1_f16(h + 4)), vcvt_f32_f16(vld1_f16(h + 8)),
           vcvt_f32_f16(vld1_f16(h + 12))}};
}
inline V load_bf16(const char* p) {
  const auto* h = reinterpret_cast<const uint16_t*>(p);
  const auto widened = [](const uint16_t* four) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(four), 16));
  };
  return {{widened(h), widened(h + 4), widened(h + 8), widened(h + 12)}};
}
inline V floats(uint8x16_t x) {
  const uint16x8_t a = vmovl_u8(vget_low_u8(x)), b = vmovl_high_u8(x);
  const U u{{vmovl_u16(vget_low_u16(a)), vmovl_high_u16(a), vmovl_u16(vget_low_u16(b)),
             vmovl_high_u16(b)}};
  return each<V>([](auto w) { return vcvtq_f32_u32(w); }, u);
}
inline V load_unsigned(const char* p) { return floats(vld1q_u8(reinterpret_cast<const uint8_t*>(p))); }
inline V load_signed(const char* p) {
  const int8x16_t x = vld1q_s8(reinterpret_cast<const int8_t*>(p));
  const int16x8_t a = vmovl_s8(vget_low_s8(x)), b = vmovl_high_s8(x);
  return to_float(I{{vmovl_s16(vget_low_s16(a)), vmovl_high_s16(a), vmovl_s16(vget_low_s16(b)),
                     vmovl_high_s16(b)}});
}
inline void load_nibbles(const char* p, V& low, V& high) {
  const uint8x16_t x = vld1q_u8(reinterpret_cast<const uint8_t*>(p));
  low = floats(vandq_u8(x, vdupq_n_u8(15)));
  high = floats(vshrq_n_u8(x, 4));
}

// Sixteen floats that are integers of -127..127.
inline void store_i8(int8_t* p, const V& x) {
  const I i = each<I>([](auto a) { return vcvtq_s32_f32(a); }, x);
  const int16x8_t a = vcombine_s16(vmovn_s32(i.v[0]), vmovn_s32(i.v[1]));
  const int16x8_t b = vcombine_s16(vmovn_s32(i.v[2]), vmovn_s32(i.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
}

inline V uniform16(uint64_t key, uint64_t first) {
  float t[16];
  for (int i = 0; i < 16; ++i) t[i] = uniform(key, first + uint64_t(i));
  return load(t);
}
inline V exponent(const V& u) {
  return each<V>(
      [](auto a) {
        const int32x4_t e = vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_f32(a), 23));
        return vcvtq_f32_s32(vsubq_s32(e, vdupq_n_s32(127)));
      },
      u);
}

inline int compress(float* p, const V& x, unsigned mask) {
  float t[16];
  store(t, x);
  int n = 0;
  for (; mask; mask &= mask - 1) p[n++] = t[__builtin_ctz(mask)];
  return n;
}

}  // namespace
}  // namespace outrider
