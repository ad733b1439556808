// Attention of some queries over a paged cache: scores, softmax and values of one range of positions
// after another.
//
// Every query sees its keys in the order of its own path (context, then ancestors, then itself),
// by index along that path. So the sums of a tree node equal those of the same tokens in a chain,
// and the result depends neither on the block size nor on the physical placement. Ranges begin at
// multiples of kRange, and their results are added in order. So the result depends neither on the
// other queries nor on how ranges are distributed over tasks.
#pragma once

namespace outrider {
namespace {

constexpr int kMaxTiles = (kMaxQueries + kMaxRows - 1) / kMaxRows;
constexpr int kStep = 4;  // segments that all tiles read before the next ones

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
  static int scales_at(const Attention& a) { return 16 * a.dim_p; }
  static const char* tile(const float* first, const Attention& a, int index) {
    return reinterpret_cast<const char*>(first + size_t(index) * a.tile_stride);
  }
  static const float* scales(const char* tile, const Attention& a) {
    return reinterpret_cast<const float*>(tile + scales_at(a));
  }
};

// Memory that is read later is fetched meanwhile: of `turns` tiles of queries that read the same
// segments, each fetches for every `turns`-th one.
struct Turn {
  int turn, turns;
  bool takes(int index) const { return turns == 1 || index % turns == turn; }
};

// Scores of QT queries against NS tiles of sixteen keys; one chain over d for each. Fetches the
// values of the same slots, and the keys of the next tiles (`left` of them), which may lie anywhere.
// `scores`: of slot 0.
template <int QT, int NS, bool kBytes>
__attribute__((noinline)) void score_tiles(const Attention& a, const float* q, const Segment* s, int left,
                                           int index, Turn turn, float* scores) {
  using S = Slots<kBytes>;
  constexpr int kLine = 16 * S::kSize;
  V acc[QT][NS];
  const char *k[NS], *values[NS], *following[NS];
#pragma GCC unroll 8
  for (int i = 0; i < NS; ++i) {
    k[i] = S::tile(a.keys, a, s[i].tile);
    const bool fetches = turn.takes(index + i);
    values[i] = fetches ? S::tile(a.values, a, s[i].tile) : k[i];
    following[i] = fetches ? S::tile(a.keys, a, s[i < left ? NS + i : i].tile) : k[i];
    if constexpr (kBytes) {
      __builtin_prefetch(values[i] + S::scales_at(a));
      __builtin_prefetch(following[i] + S::scales_at(a));
    }
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

// Of segments i..to-1 of n.
template <int QT, bool kBytes>
void score(const Attention& a, const float* q, int i, int to, int n, Turn turn, float* scores) {
  constexpr int NS = value_width(QT);
  for (; i + NS <= to; i += NS)
    score_tiles<QT, NS, kBytes>(a, q, a.segments + i, n - i - NS, i, turn, scores);
  for (; i < to; ++i) score_tiles<QT, 1, kBytes>(a, q, a.segments + i, n - i - 1, i, turn, scores);
}

// What is read after the values: the keys of `count` segments, one for each segment from `first` on.
struct Next {
  const float* keys;
  const Segment* segments;
  int count, first;
};

// A run of slots and its segments i..end-1.
struct Run {
  int i, end, from, to;
};

// out[j] += sum of p[j][slot] * v[slot] over the logical slots of a run, in order, for the 16 * DV
// dimensions from `first` on, where `out` points. Fetches the next keys.
template <int QT, int DV, bool kBytes>
__attribute__((noinline)) void value_tiles(const Attention& a, const float* p, const Run& run, int first,
                                           const Next& next, Turn turn, float* out) {
  using S = Slots<kBytes>;
  V acc[QT][DV];
#pragma GCC unroll 16
  for (int j = 0; j < QT; ++j)
#pragma GCC unroll 4
    for (int d = 0; d < DV; ++d) acc[j][d] = load(out + j * a.dim_p + 16 * d);
  for (int i = run.i; i < run.end; ++i) {
    const Segment& s = a.segments[i];
    int lo = s.start, hi = s.start + s.count;
    if (hi <= run.from) continue;
    if (lo >= run.to) break;
    lo = lo < run.from ? run.from : lo;
    hi = hi > run.to ? run.to : hi;
    const char* tile = S::tile(a.values, a, s.tile);
    const int at = i - next.first;
    const bool fetches = at < next.count && turn.takes(i) && first * S::kSize % 64 == 0;
    const char* ahead = fetches ? S::tile(next.keys, a, next.segments[at].tile) : tile;
    if (kBytes) __builtin_prefetch(ahead + S::scales_at(a));
    const ptrdiff_t offset = (ptrdiff_t(s.lane + lo - s.start) * a.dim_p + first) * S::kSize;
    const char* v = tile + offset;
    const ptrdiff_t away = ahead - tile;
    RowPointers<QT, float> weight(p + lo, a.score_ld);
#pragma GCC unroll 1
    for (int slot = lo; slot < hi; ++slot, v += a.dim_p * S::kSize, weight.advance(1)) {
      V row[DV];
#pragma GCC unroll 4
      for (int d = 0; d < DV; ++d) {
        if (16 * d * S::kSize % 64 == 0) __builtin_prefetch(v + away + 16 * d * S::kSize);
        row[d] = S::get(v + 16 * d * S::kSize);
      }
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

template <int QT, bool kBytes>
void shared_values(const Attention& a, const float* p, const Run& run, const Next& next, Turn turn,
                   float* out) {
  constexpr int DV = value_width(QT);
  int d = 0;
  for (; d + 16 * DV <= a.dim_p; d += 16 * DV)
    value_tiles<QT, DV, kBytes>(a, p, run, d, next, turn, out + d);
  for (; d < a.dim_p; d += 16) value_tiles<QT, 1, kBytes>(a, p, run, d, next, turn, out + d);
}

// The weights of a run times the scales of its values.
void scale_weights(const Attention& a, const Run& run, float* p) {
  for (int i = run.i; i < run.end; ++i) {
    const Segment& s = a.segments[i];
    const float* scales = Slots<true>::scales(Slots<true>::tile(a.values, a, s.tile), a) + s.lane;
    const int lo = s.start < run.from ? run.from : s.start;
    const int hi = s.start + s.count > run.to ? run.to : s.start + s.count;
    if (hi - lo == 16) {
      store(p + lo, mul(load(p + lo), load(scales)));
    } else {
      for (int slot = lo; slot < hi; ++slot) p[slot] *= scales[slot - s.start];
    }
  }
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
// `sink`: a score without a value, or null. `highest`: the highest score.
__attribute__((noinline)) float softmax(float* scores, int from, int to, const float* sink,
                                        float* highest) {
  const int first = from & ~15, last = (to + 15) & ~15;
  const float low = -__builtin_inff();
  for (int i = first; i < from; ++i) scores[i] = low;
  for (int i = to; i < last; ++i) scores[i] = low;
  V m = set1(low);
  for (int i = first; i < last; i += 16) m = max(m, load(scores + i));
  float most = horizontal_max(m);
  if (sink && *sink > most) most = *sink;
  *highest = most;
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

// What scores from..to-1 lose with their distance from the last one of a path of `length`.
inline void slope(float* scores, int from, int to, int length, float by) {
  for (int i = from; i < to; ++i) scores[i] -= by * float(length - 1 - i);
}

// Prefetches the first keys of a task.
inline void fetch_first_keys(const Attention& a, int first) {
  for (int i = first; i < first + kStep && i < a.num_segments; ++i) {
    const float* keys = a.keys + size_t(a.segments[i].tile) * a.tile_stride;
    for (int d = 0; d < (a.bytes ? a.dim / 4 : a.dim); ++d) __builtin_prefetch(keys + d * 16);
  }
}

// A query and the path indices that it sees: from..length-1.
struct Query {
  int row, head, from, length;
  const int32_t* path;
  const float* sink;
  bool spans() const { return from / kRange != (length - 1) / kRange; }  // several ranges
};

inline Query query_of(const Attention& a, int j) {
  Query q;
  q.row = (a.first + j) / a.group;
  q.head = (a.first + j) % a.group;
  q.path = a.path ? a.path[q.row] : nullptr;
  q.length = a.context + (q.path ? a.depth[q.row] : a.whole ? a.ahead : q.row + 1);
  const int place = a.whole ? a.context + q.row + 1 : q.length;  // a window ends there
  q.from = a.window > 0 && place > a.window ? place - a.window : 0;
  if (a.chunk > 0) q.from = (q.length - 1) / a.chunk * a.chunk;
  q.sink = a.sinks ? a.sinks + q.head : nullptr;
  return q;
}

void finish(const Attention& a, const Query& q, const float* values, float sum) {
  const float inverse = 1.0f / sum;
  float* out = a.out + q.row * a.ldo + q.head * a.value_dim;
  for (int d = 0; d < a.value_dim; ++d) out[d] = values[d] * inverse;
}

// What a range gives a query: the highest score and the sum of exponentials relative to it, then
// from kRecordHead on the values.
void put_record(float* record, float highest, float sum, const float* values, int dim_p) {
  record[0] = highest;
  record[1] = sum;
  for (int d = 0; d < dim_p; d += 16) store(record + kRecordHead + d, load(values + d));
}

// Adds a range's record to that of the ranges before it.
void add_record(float* into, float highest, float sum, const float* values, int dim_p) {
  const float top = into[0] > highest ? into[0] : highest;
  float factors[16] = {into[0] - top, highest - top};
  store(factors, exp(load(factors)));
  const V keep = set1(factors[0]), gain = set1(factors[1]);
  into[0] = top;
  into[1] = into[1] * factors[0] + sum * factors[1];
  into += kRecordHead;
  for (int d = 0; d < dim_p; d += 16)
    store(into + d, fma(gain, load(values + d), mul(keep, load(into + d))));
}

void finish_record(const Attention& a, const Query& q, float* record) {
  if (q.sink) {  // a range without values
    const float top = record[0] > *q.sink ? record[0] : *q.sink;
    float factors[16] = {record[0] - top, *q.sink - top};
    store(factors, exp(load(factors)));
    record[1] = record[1] * factors[0] + factors[1];
    const V keep = set1(factors[0]);
    for (int d = 0; d < a.dim_p; d += 16) {
      float* at = record + kRecordHead + d;
      store(at, mul(keep, load(at)));
    }
  }
  finish(a, q, record + kRecordHead, record[1]);
}

// The queries of one register tile.
struct QueryTile {
  int first, count;
  bool tree;
  int common_from, common_to;  // slots that every query sees at the same place of its path
  float *scores, *q, *out;
};

template <bool kBytes>
struct Kernel {
  void (*score)(const Attention&, const float*, int, int, int, Turn, float*);
  void (*values)(const Attention&, const float*, const Run&, const Next&, Turn, float*);
};
template <bool kBytes, int... Q>
struct KernelTable {
  static constexpr Kernel<kBytes> of[] = {{nullptr, nullptr},
                                          {score<Q + 1, kBytes>, shared_values<Q + 1, kBytes>}...};
};
template <bool kBytes, int N, int... Q>
struct MakeKernels : MakeKernels<kBytes, N - 1, N - 1, Q...> {};
template <bool kBytes, int... Q>
struct MakeKernels<kBytes, 0, Q...> : KernelTable<kBytes, Q...> {};

// The first segment that ends after `slot`.
inline int segment_after(const Attention& a, int slot) {
  int low = 0, high = a.num_segments;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (a.segments[middle].start + a.segments[middle].count <= slot) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <bool kBytes>
struct Attending {
  const Attention& a;
  Query query[kMaxQueries];
  QueryTile tile[kMaxTiles];
  int tiles, begin = 1 << 30, end = 0, slots;  // slots: visible ones of the sequence
  float* records;

  explicit Attending(const Attention& given) : a(given) {
    float* at = a.scratch;
    tiles = (a.count + kMaxRows - 1) / kMaxRows;
    for (int t = 0, first = 0; t < tiles; ++t) {
      QueryTile& tl = tile[t];
      tl.first = first;
      tl.count = (a.count - first) / (tiles - t);
      first += tl.count;
      tl.scores = at;
      tl.q = at + tl.count * a.score_ld;
      tl.out = tl.q + tl.count * a.dim_p;
      at = tl.out + tl.count * a.dim_p;
      tl.tree = false;
      tl.common_from = 0;
      int shortest = 1 << 30;
      for (int j = 0; j < tl.count; ++j) {
        const Query q = query[tl.first + j] = query_of(a, tl.first + j);
        tl.tree = tl.tree || q.path;
        tl.common_from = q.from > tl.common_from ? q.from : tl.common_from;
        shortest = q.length < shortest ? q.length : shortest;
        begin = q.from < begin ? q.from : begin;
        end = q.length > end ? q.length : end;
        const float* src = a.q + q.row * a.ldq + q.head * a.dim_p;
        for (int d = 0; d < a.dim; ++d) tl.q[d * tl.count + j] = src[d];
      }
      tl.common_to = tl.tree ? a.context : shortest;
    }
    records = at;
    slots = a.context + (a.ahead ? a.ahead : query[a.count - 1].row + 1);
  }

  void run() {
    int lo = begin / kRange * kRange;
    lo = a.from > lo ? a.from : lo;
    if (lo < a.to && lo < end) fetch_first_keys(a, segment_after(a, lo > begin ? lo : begin));
    for (; lo < a.to && lo < end; lo += kRange) range(lo);
  }

  // Positions lo..lo + kRange - 1.
  void range(int lo) {
    const int hi = lo + kRange;
    bool tree = false;
    for (int t = 0; t < tiles; ++t) tree = tree || tile[t].tree;
    // New slots of a tree may lie at any place of a path before their own.
    const int need = slots < hi || (tree && hi > a.context) ? slots : hi;
    const int i = segment_after(a, lo > begin ? lo : begin), n = segment_after(a, need - 1) + 1;
    const auto* kernels = MakeKernels<kBytes, kMaxRows>::of;
    const int step = tiles == 1 ? n - i : kStep;
    for (int s = i; s < n; s += step)
      for (int t = 0; t < tiles; ++t)
        kernels[tile[t].count].score(a, tile[t].q, s, s + step < n ? s + step : n, n, {t, tiles},
                                     tile[t].scores - lo);
    float sum[kMaxQueries], highest[kMaxQueries];
    for (int t = 0; t < tiles; ++t) weigh(tile[t], lo, hi, i, n, sum, highest);
    const Next next = next_keys(lo, i);
    for (int s = i; s < n; s += step)
      for (int t = 0; t < tiles; ++t) {
        const Run run = common(tile[t], lo, hi, s, s + step < n ? s + step : n);
        if (run.from < run.to)
          kernels[tile[t].count].values(a, tile[t].scores - lo, run, next, {t, tiles}, tile[t].out);
      }
    for (int t = 0; t < tiles; ++t) take(tile[t], lo, hi, sum, highest);
  }

  // The part of segments i..end-1 that all queries of a tile share.
  static Run common(const QueryTile& tl, int lo, int hi, int i, int end) {
    return {i, end, tl.common_from > lo ? tl.common_from : lo, tl.common_to < hi ? tl.common_to : hi};
  }

  // What is read after the values of a range: the next range, or another task's first one.
  Next next_keys(int lo, int i) const {
    const int hi = lo + kRange;
    if (hi >= a.to || hi >= end) return {a.next_keys, a.next, a.num_next, i};
    const int from = segment_after(a, hi);
    return {a.keys, a.segments + from, a.num_segments - from, i};
  }

  // Scores become weights; the values of slots before the common ones are added.
  void weigh(QueryTile& tl, int lo, int hi, int i, int n, float* sum, float* highest) {
    const Run run = common(tl, lo, hi, i, n);
    for (int j = 0; j < tl.count; ++j) {
      const Query& q = query[tl.first + j];
      float *s = tl.scores + j * a.score_ld, *p = s - lo, *out = tl.out + j * a.dim_p;
      const int from = q.from > lo ? q.from : lo, to = q.length < hi ? q.length : hi;
      if (from >= to) continue;
      if (q.path)
        for (int at = a.context > lo ? a.context : lo; at < to; ++at)
          p[at] = p[a.context + q.path[at - a.context]];
      if (a.slopes) slope(p, from, to, q.length, a.slopes[q.head]);
      const int even = (from - lo) & ~15;
      if (a.cap > 0) soft_cap(s + even, to - lo - even, a.cap);
      const int k = tl.first + j;
      sum[k] = softmax(s, from - lo, to - lo, q.spans() ? nullptr : q.sink, highest + k);
      for (int d = 0; d < a.dim_p; d += 16) store(out + d, zero());
      own_values<kBytes>(a, p, q.path, from, run.from < run.to ? run.from : to, out);
      if (kBytes && run.from < run.to) scale_weights(a, run, p);
    }
  }

  // Adds the values of slots after the common ones, and hands the range's results over.
  void take(QueryTile& tl, int lo, int hi, const float* sum, const float* highest) {
    const Run run = common(tl, lo, hi, 0, 0);
    for (int j = 0; j < tl.count; ++j) {
      const int k = tl.first + j;
      const Query& q = query[k];
      float *p = tl.scores + j * a.score_ld - lo, *out = tl.out + j * a.dim_p;
      const int from = q.from > lo ? q.from : lo, to = q.length < hi ? q.length : hi;
      if (from >= to) continue;
      if (run.from < run.to) own_values<kBytes>(a, p, q.path, run.to, to, out);
      const size_t size = size_t(kRecordHead + a.dim_p);
      if (!q.spans()) {
        finish(a, q, out, sum[k]);
      } else if (a.records) {
        put_record(a.records + (size_t(lo / kRange) * a.count + k) * size, highest[k], sum[k], out, a.dim_p);
      } else {
        float* record = records + k * size;
        if (q.from >= lo) {
          put_record(record, highest[k], sum[k], out, a.dim_p);
        } else {
          add_record(record, highest[k], sum[k], out, a.dim_p);
        }
        if (q.length <= hi) finish_record(a, q, record);
      }
    }
  }
};

void attention(const Attention& a) {
  if (a.bytes) {
    Attending<true>(a).run();
  } else {
    Attending<false>(a).run();
  }
}

// The results of queries whose ranges several tasks computed.
void combine(const Attention& a) {
  const size_t size = size_t(kRecordHead + a.dim_p);
  for (int j = 0; j < a.count; ++j) {
    const Query q = query_of(a, j);
    if (!q.spans()) continue;
    const int first = q.from / kRange, last = (q.length - 1) / kRange;
    float* into = a.records + (size_t(first) * a.count + j) * size;
    for (int r = first + 1; r <= last; ++r) {
      const float* record = a.records + (size_t(r) * a.count + j) * size;
      add_record(into, record[0], record[1], record + kRecordHead, a.dim_p);
    }
    finish_record(a, q, into);
  }
}

}  // namespace
}  // namespace outrider
