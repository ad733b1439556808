// The kernels, written once over the sixteen-lane vector `V` that each kernels_*.cpp defines.
#pragma once

namespace outrider {
namespace {

enum { kToL2 = 2, kToL1 = 3 };
template <int kWhere = kToL1>
inline void prefetch(const char* p) {
  __builtin_prefetch(p, 0, kWhere);
}

inline double wide_sum(V a) {
  float t[16];
  store(t, a);
  double s = 0;
  for (int i = 0; i < 16; ++i) s += double(t[i]);
  return s;
}

// e^x to about one unit in the last place; x is clamped to the normal range.
inline V exp(V x) {
  x = min(max(x, set1(-87.0f)), set1(88.0f));
  const V n = round(mul(x, set1(1.44269504f)));
  V r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(mul(r, r), p, r);
  return scale_by_power(add(p, set1(1.0f)), n);
}

// Copies n < 16 floats and pads with `fill`.
inline V load_tail(const float* p, int n, float fill) {
  float t[16];
  for (int i = 0; i < 16; ++i) t[i] = i < n ? p[i] : fill;
  return load(t);
}

void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  V s = zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) s = fma(load(x + i), load(x + i), s);
  if (i < n) {
    const V t = load_tail(x + i, n - i, 0.0f);
    s = fma(t, t, s);
  }
  const float r = 1.0f / __builtin_sqrtf(horizontal_sum(s) / float(n) + eps);
  const V scale = set1(r);
  for (i = 0; i + 16 <= n; i += 16)
    store(out + i, mul(load(weight + i), mul(load(x + i), scale)));
  for (; i < n; ++i) out[i] = weight[i] * (x[i] * r);
}

void round_pairs(const float* x, int n, uint32_t* pairs) {
  auto* out = reinterpret_cast<uint16_t*>(pairs);
  for (int i = 0; i < n; ++i) {
    uint32_t b;
    __builtin_memcpy(&b, x + i, 4);
    const bool nan = (b & 0x7fffffff) > 0x7f800000;  // rounding could carry it into infinity
    out[i] = uint16_t(nan ? (b >> 16) | 64 : (b + 0x7fff + (b >> 16 & 1)) >> 16);
  }
  if (n % 2) out[n] = 0;
}

// Symmetric int8 per group of `group` values; k is padded with zeros to whole groups' lines by the
// caller's buffer.
void quantize(const float* x, int k, int group, int8_t* q, float* scale, int32_t* sum) {
  for (int g = 0; g * group < k; ++g) {
    const float* p = x + g * group;
    const int n = k - g * group < group ? k - g * group : group;
    V m = zero();
    int i = 0;
    for (; i + 16 <= n; i += 16) m = max(m, abs(load(p + i)));
    if (i < n) m = max(m, abs(load_tail(p + i, n - i, 0.0f)));
    const float top = horizontal_max(m);
    // A row that is not finite must not reach the float-to-int conversion.
    const bool usable = top > 0 && top < __builtin_inff();
    const V inverse = set1(usable ? 127.0f / top : 0.0f);
    scale[g] = usable ? top / 127.0f : (top == 0 ? 0.0f : top);
    int8_t* o = q + g * group;
    V s = zero();  // of integers small enough to be exact
    for (i = 0; i < n; i += 16) {
      const V v = n - i >= 16 ? load(p + i) : load_tail(p + i, n - i, 0.0f);
      const V r = round(mul(v, inverse));
      s = add(s, r);
      store_i8(o + i, r);
    }
    sum[g] = int32_t(horizontal_sum(s));
  }
}

void silu_mul(const float* gate, const float* up, int n, float* out) {
  for (int i = 0; i < n; i += 16) {
    const V g = load(gate + i);
    const V s = div(g, add(set1(1.0f), exp(sub(zero(), g))));
    store(out + i, mul(s, load(up + i)));
  }
}

void layer_norm(const float* x, const float* weight, const float* bias, int n, float eps,
                float* out) {
  const int whole = n / 16 * 16;
  V s = zero();
  for (int i = 0; i < whole; i += 16) s = add(s, load(x + i));
  if (whole < n) s = add(s, load_tail(x + whole, n - whole, 0.0f));
  const float mean = horizontal_sum(s) / float(n);
  const V middle = set1(mean);
  s = zero();
  for (int i = 0; i < whole; i += 16) {
    const V d = sub(load(x + i), middle);
    s = fma(d, d, s);
  }
  if (whole < n) {
    const V d = sub(load_tail(x + whole, n - whole, mean), middle);
    s = fma(d, d, s);
  }
  const float r = 1.0f / __builtin_sqrtf(horizontal_sum(s) / float(n) + eps);
  for (int i = 0; i < n; ++i) {
    const float v = weight[i] * ((x[i] - mean) * r);
    out[i] = bias ? v + bias[i] : v;
  }
}

// Odd in x, absolute error of about 1e-7; a NaN stays one.
inline V tanh(V x) {
  const V y = max(set1(-10.0f), min(set1(10.0f), x));  // in this order they return a NaN
  const V e = exp(mul(set1(2.0f), y));
  return add(sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))), sub(y, y));
}

// erf by formula 7.1.26 of Abramowitz and Stegun: absolute error of about 2e-7.
inline V erf_positive(V x) {
  const V t = div(set1(1.0f), fma(set1(0.3275911f), x, set1(1.0f)));
  V p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  return sub(set1(1.0f), mul(mul(p, t), exp(sub(zero(), mul(x, x)))));
}

inline V activation(int kind, V x) {
  const V half = set1(0.5f), one = set1(1.0f);
  switch (kind) {
    case 0: return div(x, add(one, exp(sub(zero(), x))));
    case 1: {  // x (1 + erf(x / sqrt 2)) / 2 = max(x, 0) - |x| (1 - erf(|x| / sqrt 2)) / 2
      const V far = abs(x);
      const V rest = sub(one, erf_positive(mul(far, set1(0.70710678f))));
      return sub(max(zero(), x), mul(mul(half, far), rest));
    }
    case 2: {
      const V inner = mul(set1(0.79788456f), fma(mul(set1(0.044715f), mul(x, x)), x, x));
      return mul(mul(half, x), add(one, tanh(inner)));
    }
    case 3: return max(zero(), x);
    default: {
      const V r = max(zero(), x);
      return mul(r, r);
    }
  }
}

void activate(int kind, const float* gate, const float* up, int n, float* out) {
  for (int i = 0; i < n; i += 16) {
    const V a = activation(kind, load(gate + i));
    store(out + i, up ? mul(a, load(up + i)) : a);
  }
}

void activate_clamped(const float* gate, const float* up, int n, float limit, float alpha,
                      float* out) {
  const V most = set1(limit), least = set1(-limit), one = set1(1.0f), a = set1(alpha);
  for (int i = 0; i < n; i += 16) {
    const V g = min(most, load(gate + i)), u = max(least, min(most, load(up + i)));
    const V s = div(g, add(one, exp(sub(zero(), mul(a, g)))));
    store(out + i, mul(add(u, one), s));
  }
}

void soft_cap(float* x, int n, float cap) {
  const V c = set1(cap);
  for (int i = 0; i < n; i += 16) store(x + i, mul(c, tanh(div(load(x + i), c))));
}

float read_streams(const float* x, int64_t n) {
  const int64_t part = n / 8 / 16 * 16;
  V sum[8];
  for (auto& s : sum) s = zero();
  for (int64_t i = 0; i < part; i += 16) {
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s) {
      __builtin_prefetch(x + s * part + i + 256);
      sum[s] = add(sum[s], load(x + s * part + i));
    }
  }
  for (int s = 1; s < 8; ++s) sum[0] = add(sum[0], sum[s]);
  return horizontal_sum(sum[0]);
}

void add_rows(float* x, const float* y, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) store(x + i, add(load(x + i), load(y + i)));
  for (; i < n; ++i) x[i] += y[i];
}

// Rows as a few base pointers and strides, so that one addressing mode reaches every row: pointers
// to all rows would not fit into the registers.
template <int MT, class T>
struct RowPointers {
  static constexpr int kBases = (MT + 3) / 4;
  const T* base[kBases];
  ptrdiff_t ld;
  RowPointers(const T* x, ptrdiff_t stride) : ld(stride) {
#pragma GCC unroll 8
    for (int i = 0; i < kBases; ++i) base[i] = x + 4 * i * stride;
  }
  const T* row(int m) const { return base[m / 4] + (m % 4) * ld; }
  void advance(int n) {
#pragma GCC unroll 8
    for (int i = 0; i < kBases; ++i) base[i] += n;
  }
};

}  // namespace
}  // namespace outrider

#include "attention_impl.h"
#include "packed_impl.h"
#include "gemm_impl.h"
#include "recurrence_impl.h"
#include "sampling_impl.h"

namespace outrider {
namespace {

template <class Dot>
constexpr Kernels table(const char* name) {
  return {name,     kMaxRows,  gemm<Dot>, rms_norm,      round_pairs,   quantize,  quantize_blocks, silu_mul,
          add_rows, attention, combine, argmax,         gumbel_argmax, floor_of_kept, noisy_row, layer_norm, activate,
          activate_clamped, soft_cap, recur, read_streams};
}

}  // namespace
}  // namespace outrider
