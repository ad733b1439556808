// Any processor: sixteen lanes as four of the compiler's own 4-wide vectors.
#include <cstring>

#include "kernels.h"
#include "noise.h"

namespace outrider {
namespace {

constexpr int kMaxRows = 4, kSquareRows = 4;
constexpr int tile_panels(int rows) { return rows <= 1 ? 2 : 1; }

typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef uint32_t u4 __attribute__((vector_size(16)));

struct V {
  f4 v[4];
};
template <class F>
inline V each(F f) {
  V r;
  for (int i = 0; i < 4; ++i) r.v[i] = f(i);
  return r;
}
inline V zero() { return each([](int) { return f4{0, 0, 0, 0}; }); }
inline V set1(float x) { return each([=](int) { return f4{x, x, x, x}; }); }
inline V load(const float* p) {
  V r;
  memcpy(&r, p, 64);
  return r;
}
inline V load_bytes(const int8_t* p) {
  return each([=](int i) {
    const int8_t* q = p + 4 * i;
    return f4{float(q[0]), float(q[1]), float(q[2]), float(q[3])};
  });
}
inline void store(float* p, const V& x) { memcpy(p, &x, 64); }
inline V add(const V& x, const V& y) { return each([&](int i) { return x.v[i] + y.v[i]; }); }
inline V sub(const V& x, const V& y) { return each([&](int i) { return x.v[i] - y.v[i]; }); }
inline V mul(const V& x, const V& y) { return each([&](int i) { return x.v[i] * y.v[i]; }); }
inline V div(const V& x, const V& y) { return each([&](int i) { return x.v[i] / y.v[i]; }); }
// Two roundings: a fused operation is not portable, and a library call per lane is slow.
inline V fma(const V& x, const V& y, const V& z) {
  return each([&](int i) { return x.v[i] * y.v[i] + z.v[i]; });
}
inline V max(const V& x, const V& y) {
  return each([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; });
}
inline V min(const V& x, const V& y) {
  return each([&](int i) { return x.v[i] < y.v[i] ? x.v[i] : y.v[i]; });
}
// The nearest integer for |x| < 2^22, which is enough for exp.
inline V round(const V& x) {
  const f4 magic = f4{12582912.f, 12582912.f, 12582912.f, 12582912.f};
  return each([&](int i) { return (x.v[i] + magic) - magic; });
}
inline V scale_by_power(const V& x, const V& n) {
  return each([&](int i) {
    const i4 e = (__builtin_convertvector(n.v[i], i4) + 127) << 23;
    f4 power;
    memcpy(&power, &e, 16);
    return x.v[i] * power;
  });
}
inline unsigned mask_greater_equal(const V& x, const V& y) {
  unsigned m = 0;
  for (int i = 0; i < 16; ++i) m |= unsigned(x.v[i / 4][i % 4] >= y.v[i / 4][i % 4]) << i;
  return m;
}
inline V where_greater_equal(const V& x, const V& y, const V& z) {
  return each([&](int i) { return x.v[i] >= y.v[i] ? z.v[i] : f4{0, 0, 0, 0}; });
}
inline V abs(const V& x) { return max(x, sub(zero(), x)); }

inline V load_f32(const char* line) { return load(reinterpret_cast<const float*>(line)); }
template <class F>
inline V widened(const char* line, F f) {
  return each([&](int i) {
    u4 x;
    memcpy(&x, line + 16 * i, 16);
    const u4 bits = f(x);
    f4 r;
    memcpy(&r, &bits, 16);
    return r;
  });
}
inline V load_bf16_even(const char* line) {
  return widened(line, [](u4 x) { return x << 16; });
}
inline V load_bf16_odd(const char* line) {
  return widened(line, [](u4 x) { return x & 0xffff0000u; });
}
inline V broadcast_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return set1(x);
}
inline V broadcast_even(uint32_t pair) { return broadcast_bits(pair << 16); }
inline V broadcast_odd(uint32_t pair) { return broadcast_bits(pair & 0xffff0000u); }

// Lane i with lane i + 8, then 4, 2, 1 apart: the order of every instruction set.
inline float horizontal_sum(const V& a) {
  float t[16];
  store(t, a);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) t[i] += t[i + half];
  return t[0];
}

inline float horizontal_max(const V& a) {
  float t[16];
  store(t, a);
  float m = t[0];
  for (int i = 1; i < 16; ++i) m = t[i] > m ? t[i] : m;
  return m;
}

struct I {
  int32_t v[16];
};
struct W8 {
  uint8_t v[64];
};
struct X8 {
  int32_t v[4];
};
inline I iset1(int32_t x) {
  I r;
  for (int i = 0; i < 16; ++i) r.v[i] = x;
  return r;
}
inline V to_float(const I& x) {
  V r;
  for (int i = 0; i < 16; ++i) r.v[i / 4][i % 4] = float(x.v[i]);
  return r;
}
inline W8 load_u8(const char* line) {
  W8 r;
  memcpy(r.v, line, 64);
  return r;
}
inline void load_u4(const char* line, W8& low, W8& high) {
  for (int i = 0; i < 64; ++i) {
    low.v[i] = uint8_t(line[i]) & 15;
    high.v[i] = uint8_t(line[i]) >> 4;
  }
}
inline X8 broadcast4(const int8_t* x) { return {{x[0], x[1], x[2], x[3]}}; }
inline I dot4(const I& acc, const W8& w, const X8& x) {
  I r;
  for (int i = 0; i < 16; ++i) {
    r.v[i] = acc.v[i] + int32_t(w.v[4 * i]) * x.v[0] + int32_t(w.v[4 * i + 1]) * x.v[1] +
             int32_t(w.v[4 * i + 2]) * x.v[2] + int32_t(w.v[4 * i + 3]) * x.v[3];
  }
  return r;
}

using B = W8;  // a line of packed codes
inline B load_bytes(const char* p) { return load_u8(p); }
template <class F>
inline B bytes(F f) {
  B r;
  for (int i = 0; i < 64; ++i) r.v[i] = uint8_t(f(i));
  return r;
}
template <int kBy>
inline B shift_bytes(const B& x) {
  return bytes([&](int i) { return kBy > 0 ? x.v[i] << (kBy & 7) : x.v[i] >> (-kBy & 7); });
}
inline B and_bytes(const B& x, int mask) {
  return bytes([&](int i) { return x.v[i] & mask; });
}
inline B or_bytes(const B& x, const B& y) {
  return bytes([&](int i) { return x.v[i] | y.v[i]; });
}
inline B look_up(const B& table, const B& index) {
  return bytes([&](int i) { return table.v[index.v[i]]; });
}
constexpr bool kDotIsCentred = false;
constexpr bool kLoadsAreCentred = false, kDotsPairs = false;
// The sums of kSteps x 4 products per output.
template <int kTop, int kSteps>
inline I dot(const B* w, const int8_t* x) {
  I acc = iset1(0);
  for (int s = 0; s < kSteps; ++s) acc = dot4(acc, w[s], broadcast4(x + 4 * s));
  return acc;
}
// Sixteen numbers of 16 bits or of a byte.
inline u4 load_16_bits(const char* p, int i) {
  uint16_t h[4];
  memcpy(h, p + 8 * i, 8);
  return u4{h[0], h[1], h[2], h[3]};
}
inline f4 as_floats(u4 bits) {
  f4 r;
  memcpy(&r, &bits, 16);
  return r;
}
inline V load_half(const char* p) {
  return each([&](int i) {
    const u4 h = load_16_bits(p, i), rest = (h & 0x7fff) << 13;
    // The exponent by a product, which also makes numbers below the normal range right.
    const u4 finite = (u4)(as_floats(rest) * 0x1p112f);
    const u4 special = (u4)((h & 0x7c00) == 0x7c00);
    return as_floats(((special & (rest | 0x7f800000u)) | (~special & finite)) | (h & 0x8000) << 16);
  });
}
inline V load_bf16(const char* p) {
  return each([&](int i) { return as_floats(load_16_bits(p, i) << 16); });
}
template <class T>
inline V load_small(const char* p) {
  V r;
  for (int i = 0; i < 16; ++i) r.v[i / 4][i % 4] = float(T(p[i]));
  return r;
}
inline V load_unsigned(const char* p) { return load_small<uint8_t>(p); }
inline V load_signed(const char* p) { return load_small<int8_t>(p); }
inline void load_nibbles(const char* p, V& low, V& high) {
  for (int i = 0; i < 16; ++i) {
    low.v[i / 4][i % 4] = float(uint8_t(p[i]) & 15);
    high.v[i / 4][i % 4] = float(uint8_t(p[i]) >> 4);
  }
}

// Sixteen floats that are integers of -127..127.
inline void store_i8(int8_t* p, const V& x) {
  for (int i = 0; i < 16; ++i) p[i] = int8_t(int32_t(x.v[i / 4][i % 4]));
}

inline V uniform16(uint64_t key, uint64_t first) {
  float t[16];
  for (int i = 0; i < 16; ++i) t[i] = uniform(key, first + uint64_t(i));
  return load(t);
}
inline V exponent(const V& u) {
  V r;
  for (int i = 0; i < 16; ++i) {
    const float x = u.v[i / 4][i % 4];
    uint32_t b;
    memcpy(&b, &x, 4);
    r.v[i / 4][i % 4] = float(int32_t(b >> 23) - 127);
  }
  return r;
}
inline int compress(float* p, const V& x, unsigned mask) {
  int n = 0;
  for (; mask; mask &= mask - 1) {
    const int i = __builtin_ctz(mask);
    p[n++] = x.v[i / 4][i % 4];
  }
  return n;
}

}  // namespace
}  // namespace outrider

#include "kernels_impl.h"

namespace outrider {
namespace {
constexpr Kernels kTable = table<void>("portable");
}
const Kernels* portable_kernels() { return &kTable; }
}  // namespace outrider
