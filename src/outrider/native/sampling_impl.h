// Drawing a token from a row of logits without sorting it.
//
// All three filters keep the tokens above some logit, so together they are one threshold. It is
// found by bisection over the bit patterns of the floats, which drops one side each time.
#pragma once

namespace outrider {
namespace {

constexpr float kMaxGumbel = 23.0f;  // -log(2^-33) = 22.87
constexpr float kNegInf = -__builtin_inff();

// Floats as integers with the same order.
inline int32_t order_key(float x) {
  int32_t b;
  __builtin_memcpy(&b, &x, 4);
  return b >= 0 ? b : int32_t(0x80000000u - uint32_t(b));
}
inline float from_key(int32_t k) {
  const int32_t b = k >= 0 ? k : int32_t(0x80000000u - uint32_t(k));
  float x;
  __builtin_memcpy(&x, &b, 4);
  return x;
}

int argmax(const float* x, int n, float* best) {
  V top = set1(kNegInf);
  int i = 0;
  // max(a, b) keeps its second operand when the first is NaN.
  for (; i + 16 <= n; i += 16) top = max(load(x + i), top);
  if (i < n) top = max(load_tail(x + i, n - i, kNegInf), top);
  const float m = horizontal_max(top);
  *best = m;
  for (i = 0; i + 16 <= n; i += 16) {
    const unsigned hit = mask_greater_equal(load(x + i), set1(m));
    if (hit) return i + __builtin_ctz(hit);
  }
  for (; i < n; ++i)
    if (x[i] >= m) return i;
  return 0;
}

int gumbel_argmax(const float* x, int n, int base, float temperature, float floor, uint64_t key,
                  int index, float* best) {
  const V t = set1(temperature), low = set1(floor), reach = set1(kMaxGumbel);
  float top = *best;
  for (int i = 0; i < n; i += 16) {
    V z = n - i >= 16 ? load(x + i) : load_tail(x + i, n - i, kNegInf);
    if (temperature != 1.0f) z = div(z, t);
    unsigned hit = mask_greater_equal(z, low) & mask_greater_equal(add(z, reach), set1(top));
    if (n - i < 16) hit &= (1u << (n - i)) - 1;
    if (!hit) continue;
    const V u = uniform16(key, uint64_t(base + i));
    // gumbel <= -log(u) <= -floor(log2 u) log 2: this excludes most lanes without a logarithm.
    const V bound = fma(exponent(u), set1(-0.6931472f), set1(0.01f));
    hit &= mask_greater_equal(add(z, bound), set1(top));
    if (!hit) continue;
    float zs[16], us[16];
    store(zs, z);
    store(us, u);
    for (; hit; hit &= hit - 1) {
      const int lane = __builtin_ctz(hit);
      const float v = zs[lane] + gumbel_from_uniform(us[lane]);
      const int id = base + i + lane;
      if (v > top || index < 0 || (v == top && id < index)) {
        top = v;
        index = id;
      }
    }
  }
  *best = top;
  return index;
}

// log x to about 1e-6 for normal x > 0.
inline V log(V x) {
  const V e = exponent(x);
  // m in [1, 2), then t in [-1/3, 1/3): log m = 2 atanh((m - 1.5) / (m + 1.5)) + log 1.5
  const V m = scale_by_power(x, sub(zero(), e));
  const V t = div(sub(m, set1(1.5f)), add(m, set1(1.5f)));
  const V s = mul(t, t);
  V p = set1(2.0f / 9);
  p = fma(p, s, set1(2.0f / 7));
  p = fma(p, s, set1(2.0f / 5));
  p = fma(p, s, set1(2.0f / 3));
  p = fma(p, s, set1(2.0f));
  return fma(e, set1(0.69314718f), fma(p, t, set1(0.40546511f)));
}

// -log(-log1p(-u)) to about 1e-5: good for ranking guesses, not for drawing.
inline V rough_gumbel(V u) {
  // Below 1/64 the series is exact enough; above it the rounding of 1 - u is small enough.
  const V series = mul(u, fma(u, fma(u, fma(u, set1(0.25f), set1(1.0f / 3)), set1(0.5f)), set1(1.0f)));
  const V direct = sub(zero(), log(sub(set1(1.0f), u)));
  const V small = sub(series, where_greater_equal(u, set1(1.0f / 64), series));
  return sub(zero(), log(add(small, where_greater_equal(u, set1(1.0f / 64), direct))));
}

float noisy_row(const float* x, int n, float temperature, float floor, uint64_t key, float* out) {
  const V t = set1(temperature), low = set1(floor);
  V top = set1(kNegInf);
  for (int i = 0; i < n; i += 16) {
    V v = n - i >= 16 ? load(x + i) : load_tail(x + i, n - i, kNegInf);
    if (temperature > 0) {
      const V z = temperature == 1.0f ? v : div(v, t);
      const unsigned keep = mask_greater_equal(z, low);
      v = fma(t, rough_gumbel(uniform16(key, uint64_t(i))), v);
      if (keep != 0xffffu) {
        float lanes[16];
        store(lanes, v);
        for (int lane = 0; lane < 16; ++lane)
          if (!(keep >> lane & 1)) lanes[lane] = kNegInf;
        v = load(lanes);
      }
    }
    top = max(v, top);
    store(out + i, v);
  }
  const float highest = horizontal_max(top);
  if (!(highest > kNegInf) || highest == -kNegInf) return highest;
  double sum = 0;
  for (int i = 0; i < n; i += 16) {
    const V v = n - i >= 16 ? load(out + i) : load_tail(out + i, n - i, kNegInf);
    sum += horizontal_sum(where_greater_equal(v, set1(highest - 80), exp(sub(v, set1(highest)))));
  }
  return highest + float(::log(sum));
}

// Splits z, and e with it unless null, at `pivot`: lanes >= pivot move to the front of their own
// buffer, the others to z_low and e_low. Buffers have 16 floats to spare. NaNs count as low.
struct Split {
  int high, low;
};
Split split(float* z, float* e, int n, float pivot, float* z_low, float* e_low) {
  Split s{0, 0};
  const V p = set1(pivot);
  for (int i = 0; i < n; i += 16) {
    const unsigned all = n - i >= 16 ? 0xffffu : (1u << (n - i)) - 1;
    const V zi = load(z + i);
    const unsigned high = mask_greater_equal(zi, p) & all, low = all & ~high;
    if (e) {
      const V ei = load(e + i);
      compress(e + s.high, ei, high);
      compress(e_low + s.low, ei, low);
    }
    s.high += compress(z + s.high, zi, high);
    s.low += compress(z_low + s.low, zi, low);
  }
  return s;
}

double mass_of(const float* e, int n) {
  double total = 0;
  for (int i = 0; i < n; i += 128) {
    V s = zero();
    const int end = i + 128 < n ? i + 128 : n;
    for (int j = i; j < end; j += 16)
      s = add(s, end - j >= 16 ? load(e + j) : load_tail(e + j, end - j, 0.0f));
    total += wide_sum(s);
  }
  return total;
}

inline int32_t middle(int32_t lo, int32_t hi) {  // in (lo, hi] for lo < hi
  return int32_t(int64_t(lo) + (int64_t(hi) - lo + 1) / 2);
}

inline void exchange(float*& a, float*& b) {
  float* t = a;
  a = b;
  b = t;
}

// A value that at least k of z[0..n) reach: the least of k or more maxima of disjoint parts.
float reached_by(const float* z, int n, int k) {
  const int vectors = n / 16, groups = (k + 15) / 16;
  if (groups > vectors) return kNegInf;
  V least = set1(-kNegInf);
  for (int g = 0; g < groups; ++g) {
    V m = set1(kNegInf);
    const int end = int(int64_t(vectors) * (g + 1) / groups);
    for (int i = int(int64_t(vectors) * g / groups); i < end; ++i) m = max(load(z + 16 * i), m);
    least = min(least, m);
  }
  float t[16];
  store(t, least);
  float low = t[0];
  for (int i = 1; i < 16; ++i) low = t[i] < low ? t[i] : low;
  return low;
}

// The k-th largest of z[0..n), 1 <= k <= n, none above `highest`. Destroys z and `spare`.
float kth_largest(float* z, float* spare, int n, int k, float highest) {
  const float low = reached_by(z, n, k);
  if (low > kNegInf) n = split(z, nullptr, n, low, spare, nullptr).high;
  int32_t lo = order_key(low), hi = order_key(highest);
  while (lo < hi) {
    const int32_t mid = middle(lo, hi);
    const Split s = split(z, nullptr, n, from_key(mid), spare, nullptr);
    if (s.high >= k) {
      lo = mid;
      n = s.high;
    } else {
      hi = mid - 1;
      k -= s.high;
      n = s.low;
      exchange(z, spare);
    }
  }
  return from_key(lo);
}

// The smallest z that top-p keeps, i.e. with less than `limit` of the mass e strictly above it.
// Destroys its buffers.
float nucleus(float* z, float* e, float* z_spare, float* e_spare, int n, double limit,
              float lowest, float highest) {
  int32_t lo = order_key(lowest), hi = order_key(highest);
  double above = 0;
  float kept = highest;
  while (lo < hi && n > 0) {
    const int32_t mid = middle(lo, hi);
    const Split s = split(z, e, n, from_key(mid), z_spare, e_spare);
    const double mass = mass_of(e, s.high);
    if (above + mass >= limit) {  // values below mid have too much mass above them
      lo = mid;
      n = s.high;
    } else {
      for (int i = 0; i < s.high; ++i) kept = z[i] < kept ? z[i] : kept;
      hi = mid - 1;
      above += mass;
      n = s.low;
      exchange(z, z_spare);
      exchange(e, e_spare);
    }
  }
  return n > 0 && above < limit ? from_key(lo) : kept;
}

float floor_of_kept(const float* x, int n, float temperature, int top_k, float top_p, float min_p,
                    float* scratch) {
  const bool by_count = top_k > 0 && top_k < n, by_mass = top_p < 1.0f, by_peak = min_p > 0.0f;
  if (!by_count && !by_mass && !by_peak) return kNegInf;
  const int size = n + 16;
  float *z = scratch, *z0 = z + size, *e0 = z0 + size, *z1 = e0 + size, *e1 = z1 + size;
  const V t = set1(temperature);
  V top = set1(kNegInf);
  for (int i = 0; i < n; i += 16) {
    V zi = n - i >= 16 ? load(x + i) : load_tail(x + i, n - i, kNegInf);
    if (temperature != 1.0f) zi = div(zi, t);
    top = max(zi, top);
    store(z + i, zi);
    if (by_count) store(z0 + i, zi);
  }
  const float highest = horizontal_max(top);
  if (!(highest > kNegInf) || highest == -kNegInf) return highest;
  float floor = kNegInf;
  if (by_count) floor = kth_largest(z0, z1, n, top_k, highest);
  if (!by_mass && !by_peak) return floor;

  // Values below `cut` are filtered out in any case, so only the others are examined. The mass of
  // the former still counts: with (1 - p) of the total spread over n tokens, none reaches `cut`.
  float cut = floor > highest - 87.0f ? floor : highest - 87.0f;  // exp clamps below
  double total = 0;
  if (by_mass) {
    for (int i = 0; i < n; i += 128) {
      V s = zero();
      for (int j = i; j < n && j < i + 128; j += 16) {
        const V zj = load(z + j);
        s = add(s, where_greater_equal(zj, set1(cut), exp(sub(zj, set1(highest)))));
      }
      total += wide_sum(s);
    }
    const float low = highest + float(::log((1.0 - double(top_p)) * total / n)) - 0.01f;
    cut = low > cut ? low : cut;
  }
  if (by_peak) {
    const float low = highest + float(::log(double(min_p))) - 0.01f;
    cut = low > cut ? low : cut;
  }
  cut = cut < highest ? cut : highest;
  int m = 0;
  for (int i = 0; i < n; i += 16) {
    const V zi = load(z + i);
    unsigned keep = mask_greater_equal(zi, set1(cut));
    if (n - i < 16) keep &= (1u << (n - i)) - 1;
    if (!keep) continue;
    compress(e0 + m, exp(sub(zi, set1(highest))), keep);
    m += compress(z0 + m, zi, keep);
  }
  float least = by_peak ? highest : kNegInf;
  if (by_peak)
    for (int i = 0; i < m; ++i)
      if (e0[i] >= min_p && z0[i] < least) least = z0[i];
  if (!by_mass) return least > floor ? least : floor;
  const float in = nucleus(z0, e0, z1, e1, m, double(top_p) * total, cut, highest);
  return in > least ? in : least;
}

}  // namespace
}  // namespace outrider
