// Attention of one tile of queries over a paged cache, in three passes: scores, softmax, values.
//
// Every query sees its keys in the order of its own path (context, then ancestors, then itself),
// by index along that path. So the sums of a tree node equal those of the same tokens in a chain,
// and the result depends neither on the block size nor on the physical placement.
#pragma once

namespace outrider {
namespace {

constexpr int value_width(int queries) {
  return tile_panels(queries) < 4 ? tile_panels(queries) : 4;
}

// Keys and values as floats, or as int8 with a scale for each slot, sixteen of which follow a tile's data.
// Scales multiply scores and weights, so that few numbers are converted twice.
template <bool kBytes>
struct Slots {
  static constexpr int kSize = kBytes ? 1 : 4;  // bytes of a number
  static V get(const char* p) {
    if constexpr (kBytes) return load_bytes(reinterpret_cast<const int8_t*>(p));
    return load(reinterpret_cast<const float*>(p));
  }
  static const char* tile(const float* first, const Attention& a, int index) {
    return reinterpret_cast<const char*>(first + size_t(index) * a.tile_stride);
  }
  static const float* scales(const char* tile, const Attention& a) {
    return reinterpret_cast<const float*>(tile + 16 * a.dim_p);
  }
};

// Scores of QT queries against NS tiles of sixteen keys; one chain over d for each. Prefetches
// the values of the same slots for the last pass, and the keys of the next tiles (`left` of them),
// which may lie anywhere.
template <int QT, int NS, bool kBytes>
__attribute__((noinline)) void score_tiles(const Attention& a, const float* q, const Segment* s, int left,
                                           float* scores) {
  using S = Slots<kBytes>;
  constexpr int kLine = 16 * S::kSize;
  V acc[QT][NS];
  const char *k[NS], *values[NS], *following[NS];
#pragma GCC unroll 8
  for (int i = 0; i < NS; ++i) {
    k[i] = S::tile(a.keys, a, s[i].tile);
    values[i] = S::tile(a.values, a, s[i].tile);
    following[i] = S::tile(a.keys, a, s[i < left ? NS + i : i].tile);
#pragma GCC unroll 16
    for (int j = 0; j < QT; ++j) acc[j][i] = zero();
  }
  for (int d = 0; d < a.dim; ++d) {
    V key[NS];
#pragma GCC unroll 8
    for (int i = 0; i < NS; ++i) {
      if (!kBytes || d % 4 == 0) {  // once for each line
        __builtin_prefetch(values[i] + d * kLine);
        __builtin_prefetch(following[i] + d * kLine);
      }
      key[i] = S::get(k[i] + d * kLine);
    }
#pragma GCC unroll 16
    for (int j = 0; j < QT; ++j) {
      const V b = set1(q[d * QT + j]);
#pragma GCC unroll 8
      for (int i = 0; i < NS; ++i) acc[j][i] = fma(b, key[i], acc[j][i]);
    }
  }
  const V scale = set1(a.scale);
#pragma GCC unroll 8
  for (int i = 0; i < NS; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < QT; ++j) {
      float* out = scores + j * a.score_ld + s[i].start;
      V v = mul(acc[j][i], scale);
      if constexpr (kBytes) v = mul(v, load(S::scales(k[i], a)));
      if (s[i].count == 16) {
        store(out, v);
      } else {
        float t[16];
        store(t, v);
        for (int lane = 0; lane < s[i].count; ++lane) out[lane] = t[s[i].lane + lane];
      }
    }
}

template <int QT, bool kBytes>
void score(const Attention& a, const float* q, int from, int need, float* scores) {
  constexpr int NS = value_width(QT);
  int i = 0, n = a.num_segments;
  while (n > 0 && a.segments[n - 1].start >= need) --n;
  while (i < n && a.segments[i].start + a.segments[i].count <= from) ++i;
  for (; i + NS <= n; i += NS) score_tiles<QT, NS, kBytes>(a, q, a.segments + i, n - i - NS, scores);
  for (; i < n; ++i) score_tiles<QT, 1, kBytes>(a, q, a.segments + i, n - i - 1, scores);
}

// out[j] += sum of p[j][slot] * v[slot] over logical slots from..to-1, in order, for the 16 * DV
// dimensions from `first` on, where `out` points.
template <int QT, int DV, bool kBytes>
__attribute__((noinline)) void value_tiles(const Attention& a, const float* p, int from, int to, int first,
                 float* out) {
  using S = Slots<kBytes>;
  V acc[QT][DV];
#pragma GCC unroll 16
  for (int j = 0; j < QT; ++j)
#pragma GCC unroll 4
    for (int d = 0; d < DV; ++d) acc[j][d] = load(out + j * a.dim_p + 16 * d);
  for (int i = 0; i < a.num_segments; ++i) {
    const Segment& s = a.segments[i];
    int lo = s.start, hi = s.start + s.count;
    if (hi <= from) continue;
    if (lo >= to) break;
    lo = lo < from ? from : lo;
    hi = hi > to ? to : hi;
    const char* tile = S::tile(a.values, a, s.tile);
    int lane = s.lane + lo - s.start;
    const char* v = tile + (ptrdiff_t(lane) * a.dim_p + first) * S::kSize;
    RowPointers<QT, float> weight(p + lo, a.score_ld);
#pragma GCC unroll 1
    for (int slot = lo; slot < hi; ++slot, ++lane, v += a.dim_p * S::kSize, weight.advance(1)) {
      V row[DV];
#pragma GCC unroll 4
      for (int d = 0; d < DV; ++d) row[d] = S::get(v + 16 * d * S::kSize);
#pragma GCC unroll 16
      for (int j = 0; j < QT; ++j) {
        float w = *weight.row(j);
        if constexpr (kBytes) w *= S::scales(tile, a)[lane];
        const V b = set1(w);
#pragma GCC unroll 4
        for (int d = 0; d < DV; ++d) acc[j][d] = fma(b, row[d], acc[j][d]);
      }
    }
  }
#pragma GCC unroll 16
  for (int j = 0; j < QT; ++j)
#pragma GCC unroll 4
    for (int d = 0; d < DV; ++d) store(out + j * a.dim_p + 16 * d, acc[j][d]);
}

template <int QT, bool kBytes>
void shared_values(const Attention& a, const float* p, int from, int to, float* out) {
  constexpr int DV = value_width(QT);
  int d = 0;
  for (; d + 16 * DV <= a.dim_p; d += 16 * DV)
    value_tiles<QT, DV, kBytes>(a, p, from, to, d, out + d);
  for (; d < a.dim_p; d += 16) value_tiles<QT, 1, kBytes>(a, p, from, to, d, out + d);
}

// The same for one query and path indices from..to-1, slot by slot.
template <bool kBytes>
void own_values(const Attention& a, const float* p, const int32_t* path, int from, int to,
                float* out) {
  using S = Slots<kBytes>;
  for (int i = from; i < to; ++i) {
    const int slot = path && i >= a.context ? a.context + path[i - a.context] : i;
    const int s = a.table[slot / a.block_size] * a.block_size + slot % a.block_size;
    const char* tile = S::tile(a.values, a, s / 16);
    const char* v = tile + ptrdiff_t(s % 16) * a.dim_p * S::kSize;
    float w = p[i];
    if constexpr (kBytes) w *= S::scales(tile, a)[s % 16];
    const V b = set1(w);
    for (int d = 0; d < a.dim_p; d += 16) store(out + d, fma(b, S::get(v + d * S::kSize), load(out + d)));
  }
}

// Turns scores[from..to) into unnormalised probabilities; returns their sum. Lanes of the first
// and last vector that lie outside become zero.
// `sink`: a score without a value, or null.
__attribute__((noinline)) float softmax(float* scores, int from, int to, const float* sink) {
  const int first = from & ~15, last = (to + 15) & ~15;
  const float low = -__builtin_inff();
  for (int i = first; i < from; ++i) scores[i] = low;
  for (int i = to; i < last; ++i) scores[i] = low;
  V m = set1(low);
  for (int i = first; i < last; i += 16) m = max(m, load(scores + i));
  float most = horizontal_max(m);
  if (sink && *sink > most) most = *sink;
  const V top = set1(most);
  for (int i = first; i < last; i += 16) store(scores + i, exp(sub(load(scores + i), top)));
  for (int i = first; i < from; ++i) scores[i] = 0;
  for (int i = to; i < last; ++i) scores[i] = 0;
  V sum = zero();
  for (int i = first; i < last; i += 16) sum = add(sum, load(scores + i));
  float total = horizontal_sum(sum);
  if (sink) {
    float t[16];
    store(t, exp(sub(set1(*sink), top)));
    total += t[0];
  }
  return total;
}

// What scores lose with their distance from the last one.
inline void slope(float* scores, int n, float by) {
  for (int i = 0; i < n; ++i) scores[i] -= by * float(n - 1 - i);
}

// Prefetches the first keys of a task.
inline void fetch_first_keys(const Attention& a, int num_tiles) {
  for (int i = 0; i < num_tiles && i < a.num_segments; ++i) {
    const float* keys = a.keys + size_t(a.segments[i].tile) * a.tile_stride;
    for (int d = 0; d < (a.bytes ? a.dim / 4 : a.dim); ++d) __builtin_prefetch(keys + d * 16);
  }
}

template <int QT, bool kBytes>
void attend(const Attention& a) {
  fetch_first_keys(a, value_width(QT));
  float* scores = a.scratch;
  float* q = scores + kMaxQueries * a.score_ld;
  float* out = q + kMaxQueries * a.dim_p;
  int row[QT], length[QT], from[QT];
  const int32_t* path[QT];
  bool tree = false;
  int common_from = 0, first = 1 << 30;
  for (int j = 0; j < QT; ++j) {
    row[j] = (a.first + j) / a.group;
    path[j] = a.path ? a.path[row[j]] : nullptr;
    tree = tree || path[j];
    length[j] = a.context + (path[j] ? a.depth[row[j]] : a.whole ? a.ahead : row[j] + 1);
    const int place = a.whole ? a.context + row[j] + 1 : length[j];  // a window ends there
    from[j] = a.window > 0 && place > a.window ? place - a.window : 0;
    if (a.chunk > 0) from[j] = (length[j] - 1) / a.chunk * a.chunk;
    common_from = from[j] > common_from ? from[j] : common_from;
    first = from[j] < first ? from[j] : first;
    const float* src = a.q + row[j] * a.ldq + ((a.first + j) % a.group) * a.dim_p;
    for (int d = 0; d < a.dim; ++d) q[d * QT + j] = src[d];
    for (int d = 0; d < a.dim_p; d += 16) store(out + j * a.dim_p + d, zero());
  }
  score<QT, kBytes>(a, q, first, a.context + (a.ahead ? a.ahead : row[QT - 1] + 1), scores);
  float sum[QT];
  for (int j = 0; j < QT; ++j) {
    float* s = scores + j * a.score_ld;
    if (path[j])
      for (int i = 0; i < length[j] - a.context; ++i) s[a.context + i] = s[a.context + path[j][i]];
    if (a.slopes) slope(s + from[j], length[j] - from[j], a.slopes[(a.first + j) % a.group]);
    if (a.cap > 0) soft_cap(s + (from[j] & ~15), length[j] - (from[j] & ~15), a.cap);
    sum[j] = softmax(s, from[j], length[j], a.sinks ? a.sinks + (a.first + j) % a.group : nullptr);
  }
  // The slots that every query of the tile sees at the same place of its path.
  const int common_to = a.context + (tree ? 0 : a.whole ? a.ahead : row[0] + 1);
  const bool shared = common_from < common_to;
  for (int j = 0; j < QT; ++j)
    own_values<kBytes>(a, scores + j * a.score_ld, path[j], from[j], shared ? common_from : length[j],
               out + j * a.dim_p);
  if (shared) shared_values<QT, kBytes>(a, scores, common_from, common_to, out);
  for (int j = 0; j < QT; ++j) {
    float* o = out + j * a.dim_p;
    if (shared)
      own_values<kBytes>(a, scores + j * a.score_ld, path[j], common_to, length[j], o);
    const float inverse = 1.0f / sum[j];
    float* dst = a.out + row[j] * a.ldo + ((a.first + j) % a.group) * a.value_dim;
    for (int d = 0; d < a.value_dim; ++d) dst[d] = o[d] * inverse;
  }
}

template <bool kBytes, int... Q>
struct Attends {
  static constexpr void (*table[])(const Attention&) = {nullptr, attend<Q + 1, kBytes>...};
};
template <bool kBytes, int N, int... Q>
struct MakeAttends : MakeAttends<kBytes, N - 1, N - 1, Q...> {};
template <bool kBytes, int... Q>
struct MakeAttends<kBytes, 0, Q...> : Attends<kBytes, Q...> {};

void attention(const Attention& a) {
  (a.bytes ? MakeAttends<true, kMaxRows>::table : MakeAttends<false, kMaxRows>::table)[a.count](a);
}

}  // namespace
}  // namespace outrider
