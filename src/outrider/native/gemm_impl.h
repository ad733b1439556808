// Skinny matrix products. Included by each kernels_*.cpp inside its own instruction set.
//
// Output element (row, n) is one chain of multiply-adds over k, in order, whatever the tile. A
// register tile covers MT rows x NV panels; a chain may be stored in `c` between two blocks of k,
// which changes no bit.
#pragma once

#include <type_traits>

namespace outrider {
namespace {

constexpr int kBlockK = 512;    // k values per block when the rows need several register tiles
// The prefetch distance within a panel: longer with fewer streams.
constexpr int ahead_lines(int panels) { return panels >= 8 ? 16 : panels >= 2 ? 32 : 64; }

// acc[m][v] = add(acc[m][v], row(m), weights(v)), keeping in registers whichever of rows and
// panels are fewer.
template <int MT, int NV, class R, class W, class A>
inline void combine(V (&acc)[MT][NV], R row, W weights, A add) {
  if constexpr (MT < NV) {
    decltype(row(0)) b[MT];
#pragma GCC unroll 16
    for (int m = 0; m < MT; ++m) b[m] = row(m);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const auto w = weights(v);
#pragma GCC unroll 16
      for (int m = 0; m < MT; ++m) acc[m][v] = add(acc[m][v], b[m], w);
    }
  } else {
    decltype(weights(0)) w[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) w[v] = weights(v);
#pragma GCC unroll 16
    for (int m = 0; m < MT; ++m) {
      const auto b = row(m);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[m][v] = add(acc[m][v], b, w[v]);
    }
  }
}

inline V multiply_add(V acc, V x, V w) { return fma(x, w, acc); }

// One line of NV panels against as many values of MT rows.
template <int32_t kType>
struct FloatLine {
  static constexpr int kPerLine = kType == kF32 ? 1 : 2, kPrefetch = kToL1;
  static constexpr int ahead(int panels) { return ahead_lines(panels); }
  template <int MT, int NV>
  static inline void add(V (&acc)[MT][NV], const RowPointers<MT, float>& x, const char* w,
                         size_t panel) {
    if constexpr (kType == kF16) {
      combine(acc, [&](int m) { return set1(x.row(m)[0]); },
              [&](int v) { return load_half(w + size_t(v) * panel); }, multiply_add);
      combine(acc, [&](int m) { return set1(x.row(m)[1]); },
              [&](int v) { return load_half(w + size_t(v) * panel + 32); }, multiply_add);
    } else if constexpr (kType == kBF16) {  // reading a line twice takes less time than holding both halves
      combine(acc, [&](int m) { return set1(x.row(m)[0]); },
              [&](int v) { return load_bf16_even(w + size_t(v) * panel); }, multiply_add);
      combine(acc, [&](int m) { return set1(x.row(m)[1]); },
              [&](int v) { return load_bf16_odd(w + size_t(v) * panel); }, multiply_add);
    } else {
      combine(acc, [&](int m) { return set1(*x.row(m)); },
              [&](int v) { return load_f32(w + size_t(v) * panel); }, multiply_add);
    }
  }
};

// bfloat16 by bfloat16. Such a product is exact in float32, so a pair is two additions, the odd k
// first: that is what the processor's own instruction (Dot, or void) does, and everything above
// 2^-126 has the same bits with it and without.
template <class Dot>
struct PairLine {
  static constexpr int kPerLine = 1;
  // Where the instruction is used the processors are AMD's, on which this is faster by a tenth.
  static constexpr int kPrefetch = std::is_void_v<Dot> ? kToL1 : kToL2;
  static constexpr int ahead(int panels) {
    return std::is_void_v<Dot> || panels > 2 ? ahead_lines(panels) : 96;
  }
  template <int MT, int NV>
  static inline void add(V (&acc)[MT][NV], const RowPointers<MT, uint32_t>& x, const char* w,
                         size_t panel) {
    if constexpr (!std::is_void_v<Dot>) {
      combine(acc, [&](int m) { return Dot::row(*x.row(m)); },
              [&](int v) { return Dot::weights(w + size_t(v) * panel); }, Dot::add);
    } else {
      combine(acc, [&](int m) { return broadcast_odd(*x.row(m)); },
              [&](int v) { return load_bf16_odd(w + size_t(v) * panel); }, multiply_add);
      combine(acc, [&](int m) { return broadcast_even(*x.row(m)); },
              [&](int v) { return load_bf16_even(w + size_t(v) * panel); }, multiply_add);
    }
  }
};

// `wanted`: the memory to prefetch, `pace` bytes of each panel with every line.
template <class Line, int MT, int NV, class T>
inline void add_lines(V (&acc)[MT][NV], const T* first, ptrdiff_t ldx, const char* w, size_t panel,
                      int lines, const char* wanted, ptrdiff_t pace = 64) {
  RowPointers<MT, T> x(first, ldx);
#pragma GCC unroll 1
  for (int l = 0; l < lines; ++l, w += 64, wanted += pace, x.advance(Line::kPerLine)) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) prefetch<Line::kPrefetch>(wanted + size_t(v) * panel);
    Line::add(acc, x, w, panel);
  }
}

struct TileArgs {
  const Matrix* w;
  const Rows* x;
  int row;            // first row of the tile
  int line, lines;    // range of lines within each panel
  const char* panel;  // first line of the range in the first panel
  float* c;           // first row, first column
  ptrdiff_t ldc;
  bool resume;        // add to what c holds
  // What to prefetch. pace 0: the lines of this tile, at the usual distance, then those of `next`.
  // Otherwise `pace` bytes of each panel with every line, starting `ahead` bytes after the first.
  ptrdiff_t pace, ahead;
  ptrdiff_t next;     // bytes from the first panel to the first one of the following tile
};

template <class Line, int MT, int NV, class T>
void real_tile(const TileArgs& a, const T* rows, ptrdiff_t ld) {
  const size_t panel = a.w->panel_bytes();
  const T* x = rows + a.row * ld + ptrdiff_t(a.line) * Line::kPerLine;
  V acc[MT][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MT; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[m][v] = a.resume ? load(a.c + m * a.ldc + 16 * v) : zero();
  if (a.pace) {
    add_lines<Line>(acc, x, ld, a.panel, panel, a.lines, a.panel + a.ahead, a.pace);
  } else {
    constexpr int kAheadLines = Line::ahead(NV);
    const int tail = a.lines < kAheadLines ? a.lines : kAheadLines;
    const int head = a.lines - tail;
    add_lines<Line>(acc, x, ld, a.panel, panel, head, a.panel + kAheadLines * 64);
    add_lines<Line>(acc, x + head * Line::kPerLine, ld, a.panel + head * 64, panel, tail,
                    a.panel + a.next);
  }
#pragma GCC unroll 16
  for (int m = 0; m < MT; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) store(a.c + m * a.ldc + 16 * v, acc[m][v]);
}

// Integer weights are stored unsigned (zero point 128 or 8) against signed activations. Within a
// group the sum is exact; group sums are scaled and added in order.
template <int MT, int NV, bool kNibbles>
void integer_tile(const TileArgs& a) {
  const Matrix& w = *a.w;
  const size_t panel = w.panel_bytes();
  const int zero_point = kLoadsAreCentred ? 0 : kNibbles ? 8 : 128;
  constexpr int kPerLine = kNibbles ? 8 : 4, kAheadLines = ahead_lines(NV);
  const int group_lines = w.group / kPerLine;
  const int first_panel = int((a.panel - w.data) / ptrdiff_t(panel));
  for (int l = a.line; l < a.line + a.lines; l += group_lines) {
    const int g = l / group_lines;
    const int end = l + group_lines < a.line + a.lines ? l + group_lines : a.line + a.lines;
    I acc[MT][NV];
#pragma GCC unroll 16
    for (int m = 0; m < MT; ++m) {
      const I start = iset1(-zero_point * a.x->sum[(a.row + m) * w.groups + g]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[m][v] = start;
    }
    RowPointers<MT, int8_t> q(a.x->q + a.row * a.x->ldq + ptrdiff_t(l) * kPerLine, a.x->ldq);
    const char* p = a.panel + ptrdiff_t(l - a.line) * 64;
    const ptrdiff_t ahead = a.row > 0                           ? 64
                            : end + kAheadLines <= w.lines      ? kAheadLines * 64
                                                                : a.next - ptrdiff_t(l) * 64;
#pragma GCC unroll 1
    for (int i = l; i < end; ++i, p += 64, q.advance(kPerLine)) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) prefetch(p + size_t(v) * panel + ahead);
      if constexpr (kNibbles) {
        W8 low[NV], high[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) load_u4(p + size_t(v) * panel, low[v], high[v]);
#pragma GCC unroll 16
        for (int m = 0; m < MT; ++m) {
          const X8 x0 = broadcast4(q.row(m)), x1 = broadcast4(q.row(m) + 4);
#pragma GCC unroll 8
          for (int v = 0; v < NV; ++v) acc[m][v] = dot4(dot4(acc[m][v], low[v], x0), high[v], x1);
        }
      } else {
        W8 row[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) row[v] = load_u8(p + size_t(v) * panel);
#pragma GCC unroll 16
        for (int m = 0; m < MT; ++m) {
          const X8 x0 = broadcast4(q.row(m));
#pragma GCC unroll 8
          for (int v = 0; v < NV; ++v) acc[m][v] = dot4(acc[m][v], row[v], x0);
        }
      }
    }
    const bool last = end == w.lines;
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      V ws = set1(1.0f);
      if (kNibbles) ws = load(w.scale + (size_t(first_panel + v) * w.groups + g) * 16);
#pragma GCC unroll 16
      for (int m = 0; m < MT; ++m) {
        float* c = a.c + m * a.ldc + 16 * v;
        V s = set1(a.x->scale[(a.row + m) * w.groups + g]);
        if (kNibbles) s = mul(s, ws);
        V sum = g == 0 ? mul(to_float(acc[m][v]), s) : fma(to_float(acc[m][v]), s, load(c));
        if (!kNibbles && last) sum = mul(sum, load(w.scale + size_t(first_panel + v) * 16));
        store(c, sum);
      }
    }
  }
}

using Tile = void (*)(const TileArgs&);

template <int MT, int NV, class Dot>
void any_tile(const TileArgs& a) {
  switch (a.w->type) {
    case kF32: return real_tile<FloatLine<kF32>, MT, NV>(a, a.x->f, a.x->ld);
    case kF16: return real_tile<FloatLine<kF16>, MT, NV>(a, a.x->f, a.x->ld);
    case kBF16:
      return a.x->pairs ? real_tile<PairLine<Dot>, MT, NV>(a, a.x->pairs, a.x->ldp)
                        : real_tile<FloatLine<kBF16>, MT, NV>(a, a.x->f, a.x->ld);
    case kI8: return integer_tile<MT, NV, false>(a);
    default: return integer_tile<MT, NV, true>(a);
  }
}

// The panels of one task for MT rows, widest register tile first.
template <int MT, class Dot>
void row_tile(TileArgs a, int num_panels) {
  constexpr int kWide = tile_panels(MT);
  const size_t panel = a.w->panel_bytes();
  const char* first = a.panel;
  float* c = a.c;
  int p = 0;
  auto at = [&](int width) {
    a.panel = first + size_t(p) * panel;
    a.c = c + 16 * p;
    // After the last panel of the task, its thread continues with the next panels.
    a.next = ptrdiff_t(width * panel);
    p += width;
  };
  while (num_panels - p >= kWide) at(kWide), any_tile<MT, kWide, Dot>(a);
  if constexpr (kWide > 4)
    if (num_panels - p >= 4) at(4), any_tile<MT, 4, Dot>(a);
  if constexpr (kWide > 2)
    if (num_panels - p >= 2) at(2), any_tile<MT, 2, Dot>(a);
  if constexpr (kWide > 1)
    if (num_panels - p >= 1) at(1), any_tile<MT, 1, Dot>(a);
}

using RowTile = void (*)(TileArgs, int);

template <class Dot, int... M>
struct RowTiles {
  static constexpr RowTile table[] = {nullptr, row_tile<M + 1, Dot>...};
};
template <class Dot, int N, int... M>
struct MakeRowTiles : MakeRowTiles<Dot, N - 1, N - 1, M...> {};
template <class Dot, int... M>
struct MakeRowTiles<Dot, 0, M...> : RowTiles<Dot, M...> {};

template <class Dot>
void gemm(const Matrix& w, const Rows& x, int first, int num_panels, float* c, ptrdiff_t ldc) {
  if (x.rows <= 0) return;
  if (is_packed(w.type)) return packed_gemm(w, x, first, num_panels, c, ldc);
  // The first tile waits for memory, so it takes as many rows as it can; later tiles find the panel
  // in the cache. Many rows are fastest in squarer tiles of equal size.
  const int most = x.rows > 2 * kMaxRows ? kSquareRows : kMaxRows;
  const int tiles = (x.rows + most - 1) / most;
  const int per_line = values_per_line(w.type);
  const int block = tiles == 1 ? w.lines : kBlockK / per_line;
  TileArgs a{};
  a.w = &w;
  a.x = &x;
  a.ldc = ldc;
  for (int line = 0; line < w.lines; line += block) {
    a.line = line;
    a.lines = w.lines - line < block ? w.lines - line : block;
    a.panel = w.data + size_t(first) * w.panel_bytes() + size_t(line) * 64;
    a.resume = line > 0;
    for (int r = 0, left = tiles; left > 0; --left) {
      const int rows = (x.rows - r + left - 1) / left;
      a.row = r;
      a.c = c + r * ldc;
      // Tiles after the first find everything in the cache, so each prefetches an equal part of
      // the next task.
      a.pace = left == tiles ? 0 : 64 / (tiles - 1);
      a.ahead = ptrdiff_t(num_panels * w.panel_bytes()) + (tiles - 1 - left) * a.lines * a.pace;
      MakeRowTiles<Dot, kMaxRows>::table[rows](a, num_panels);
      r += rows;
    }
  }
}

}  // namespace
}  // namespace outrider
