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

// Scores of QT queries against NS tiles of sixteen keys; one chain over d for each. Prefetches
// the values of the same slots for the last pass, and the keys of the next tiles (`left` of them),
// which may lie anywhere.
template <int QT, int NS>
__attribute__((noinline)) void score_tiles(const Attention& a, const float* q, const Segment* s, int left,
                                           float* scores) {
  V acc[QT][NS];
  const float *k[NS], *values[NS], *following[NS];
#pragma GCC unroll 8
  for (int i = 0; i < NS; ++i) {
    k[i] = a.keys + size_t(s[i].tile) * a.tile_stride;
    values[i] = a.values + size_t(s[i].tile) * a.tile_stride;
    following[i] = a.keys + size_t(s[i < left ? NS + i : i].tile) * a.tile_stride;
#pragma GCC unroll 16
    for (int j = 0; j < QT; ++j) acc[j][i] = zero();
  }
  for (int d = 0; d < a.dim; ++d) {
    V key[NS];
#pragma GCC unroll 8
    for (int i = 0; i < NS; ++i) {
      __builtin_prefetch(values[i] + d * 16);
      __builtin_prefetch(following[i] + d * 16);
      key[i] = load(k[i] + d * 16);
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
      const V v = mul(acc[j][i], scale);
      if (s[i].count == 16) {
        store(out, v);
      } else {
        float t[16];
        store(t, v);
        for (int lane = 0; lane < s[i].count; ++lane) out[lane] = t[s[i].lane + lane];
      }
    }
}

template <int QT>
void score(const Attention& a, const float* q, int from, int need, float* scores) {
  constexpr int NS = value_width(QT);
  int i = 0, n = a.num_segments;
  while (n > 0 && a.segments[n - 1].start >= need) --n;
  while (i < n && a.segments[i].start + a.segments[i].count <= from) ++i;
  for (; i + NS <= n; i += NS) score_tiles<QT, NS>(a, q, a.segments + i, n - i - NS, scores);
  for (; i < n; ++i) score_tiles<QT, 1>(a, q, a.segments + i, n - i - 1, scores);
}

// out[j] += sum of p[j][slot] * v[slot] over logical slots from..to-1, in order, for the 16 * DV
// dimensions that `v` and `out` point at.
template <int QT, int DV>
__attribute__((noinline)) void value_tiles(const Attention& a, const float* p, int from, int to, const float* v0,
                 float* out) {
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
    const float* v = v0 + size_t(s.tile) * a.tile_stride + (s.lane + lo - s.start) * a.dim_p;
    RowPointers<QT, float> weight(p + lo, a.score_ld);
#pragma GCC unroll 1
    for (int slot = lo; slot < hi; ++slot, v += a.dim_p, weight.advance(1)) {
      V row[DV];
#pragma GCC unroll 4
      for (int d = 0; d < DV; ++d) row[d] = load(v + 16 * d);
#pragma GCC unroll 16
      for (int j = 0; j < QT; ++j) {
        const V b = set1(*weight.row(j));
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

template <int QT>
void shared_values(const Attention& a, const float* p, int from, int to, float* out) {
  constexpr int DV = value_width(QT);
  const float* v = a.values;
  int d = 0;
  for (; d + 16 * DV <= a.dim_p; d += 16 * DV)
    value_tiles<QT, DV>(a, p, from, to, v + d, out + d);
  for (; d < a.dim_p; d += 16) value_tiles<QT, 1>(a, p, from, to, v + d, out + d);
}

// The same for one query and path indices from..to-1, slot by slot.
void own_values(const Attention& a, const float* p, const int32_t* path, int from, int to,
                float* out) {
  for (int i = from; i < to; ++i) {
    const int slot = path && i >= a.context ? a.context + path[i - a.context] : i;
    const int s = a.table[slot / a.block_size] * a.block_size + slot % a.block_size;
    const float* v = a.values + size_t(s / 16) * a.tile_stride + (s % 16) * a.dim_p;
    const V b = set1(p[i]);
    for (int d = 0; d < a.dim_p; d += 16) store(out + d, fma(b, load(v + d), load(out + d)));
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
    for (int d = 0; d < a.dim; ++d) __builtin_prefetch(keys + d * 16);
  }
}

template <int QT>
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
    from[j] = a.window > 0 && length[j] > a.window ? length[j] - a.window : 0;
    if (a.chunk > 0) from[j] = (length[j] - 1) / a.chunk * a.chunk;
    common_from = from[j] > common_from ? from[j] : common_from;
    first = from[j] < first ? from[j] : first;
    const float* src = a.q + row[j] * a.ldq + ((a.first + j) % a.group) * a.dim_p;
    for (int d = 0; d < a.dim; ++d) q[d * QT + j] = src[d];
    for (int d = 0; d < a.dim_p; d += 16) store(out + j * a.dim_p + d, zero());
  }
  score<QT>(a, q, first, a.context + (a.ahead ? a.ahead : row[QT - 1] + 1), scores);
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
    own_values(a, scores + j * a.score_ld, path[j], from[j], shared ? common_from : length[j],
               out + j * a.dim_p);
  if (shared) shared_values<QT>(a, scores, common_from, common_to, out);
  for (int j = 0; j < QT; ++j) {
    float* o = out + j * a.dim_p;
    if (shared)
      own_values(a, scores + j * a.score_ld, path[j], common_to, length[j], o);
    const float inverse = 1.0f / sum[j];
    float* dst = a.out + row[j] * a.ldo + ((a.first + j) % a.group) * a.value_dim;
    for (int d = 0; d < a.value_dim; ++d) dst[d] = o[d] * inverse;
  }
}

template <int... Q>
struct Attends {
  static constexpr void (*table[])(const Attention&) = {nullptr, attend<Q + 1>...};
};
template <int N, int... Q>
struct MakeAttends : MakeAttends<N - 1, N - 1, Q...> {};
template <int... Q>
struct MakeAttends<0, Q...> : Attends<Q...> {};

void attention(const Attention& a) { MakeAttends<kMaxRows>::table[a.count](a); }

}  // namespace
}  // namespace outrider
