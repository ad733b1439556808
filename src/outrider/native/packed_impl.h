// Products with packed weights (see packed.h). Included by each kernels_*.cpp, after its types.
//
// Activations are int8 in blocks of 32 with a scale each. Of a block the integer sum is exact; the
// sums are scaled and added in order, so an output is one chain of operations over k, whatever the
// number of rows. A tile is some rows x one panel: a panel streams from memory line by line.
#pragma once

#include <algorithm>
#include <utility>

#include "packed.h"

namespace outrider {
namespace {

// The bits of every byte moved by kBy (right if negative), those of kMask kept.
template <int kBy, int kMask>
inline B field(B x) {
  return and_bytes(shift_bytes<kBy>(x), kMask);
}

template <class F, size_t... S>
__attribute__((always_inline)) inline void decode(const char* p, B (&w)[8], std::index_sequence<S...>) {
  if constexpr (F::kBits == 8) {
    ((w[S] = load_bytes(p + 64 * S)), ...);
  } else if constexpr (F::kBits >= 4) {
    ((w[S] = field<-4 * int(S % 2), 15>(load_bytes(p + 64 * (S / 2)))), ...);
  } else {
    ((w[S] = field<-2 * int(S % 4), 3>(load_bytes(p + 64 * (S / 4)))), ...);
  }
  if constexpr (F::kBits == 5) {
    const B high = load_bytes(p + 256);
    ((w[S] = or_bytes(w[S], field<4 - int(S), 16>(high))), ...);
  } else if constexpr (F::kBits == 6) {
    ((w[S] = or_bytes(w[S], field<4 - 2 * int(S % 4), 48>(load_bytes(p + 256 + 64 * (S / 4))))),
     ...);
  } else if constexpr (F::kBits == 3) {
    const B high = load_bytes(p + 128);
    ((w[S] = or_bytes(w[S], field<2 - int(S), 4>(high))), ...);
  } else if constexpr (F::kTable) {
    const B table = load_bytes(reinterpret_cast<const char*>(table_of<F>().bytes));
    ((w[S] = look_up(table, w[S])), ...);
  }
}

// The scales of one block of 32 of a panel, or of its two halves, and the offsets, among which is
// the one that the zero point makes.
template <class F>
struct BlockScales {
  static constexpr int kParts = F::kSixteen ? 2 : 1;
  // The dot product of some instruction sets subtracts the zero point of bytes itself.
  static constexpr int kZero = F::kTop == 255 && kDotIsCentred ? 0 : F::kZero;
  static constexpr bool kOffset = F::kMin || kZero != 0;
  V scale[kParts], offset[kParts];

  __attribute__((always_inline)) inline void read(const char* header, int block, V d, V dmin) {
    if constexpr (F::kSmall) {
      scale[0] = F::kScales == Scales::kPower ? load_bf16(header + 32 * block)
                                              : load_half(header + 32 * block);
      if constexpr (F::kMin) offset[0] = load_half(header + 64 + 32 * block);
    } else if constexpr (F::kScales == Scales::kByteMin) {
      scale[0] = mul(d, load_unsigned(header + 64 + 16 * block));
      offset[0] = mul(dmin, load_unsigned(header + 192 + 16 * block));
    } else if constexpr (F::kScales == Scales::kByte) {
      scale[0] = mul(d, load_signed(header + 64 + 16 * block));
    } else if constexpr (F::kScales == Scales::kByte16) {
      for (int i = 0; i < 2; ++i) scale[i] = mul(d, load_signed(header + 64 + 32 * block + 16 * i));
    } else {
      for (int i = 0; i < 2; ++i) {
        V low, high;
        load_nibbles(header + 64 + 32 * block + 16 * i, low, high);
        scale[i] = mul(d, low);
        offset[i] = mul(dmin, high);
      }
    }
    if constexpr (!F::kMin && kZero != 0)
      for (int i = 0; i < kParts; ++i) offset[i] = mul(scale[i], set1(-float(kZero)));
  }

  __attribute__((always_inline)) inline V add_sums(V acc, const I (&sum)[kParts], const Block& x) const {
    if constexpr (F::kSixteen) {
      V both = mul(to_float(sum[0]), scale[0]);
      both = fma(to_float(sum[1]), scale[1], both);
      acc = fma(both, set1(x.scale), acc);
      if constexpr (kOffset) {
        acc = fma(offset[0], set1(x.half_sum[0]), acc);
        acc = fma(offset[1], set1(x.half_sum[1]), acc);
      }
    } else {
      acc = fma(mul(to_float(sum[0]), scale[0]), set1(x.scale), acc);
      if constexpr (kOffset) acc = fma(offset[0], set1(x.sum), acc);
    }
    return acc;
  }

  __attribute__((always_inline)) inline V add(V acc, const B (&w)[8], const int8_t* q, const Block& x) const {
    I sum[kParts];
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) sum[i] = dot<F::kTop, 8 / kParts>(w + 4 * i, q + 16 * i);
    return add_sums(acc, sum, x);
  }
};

// dot() of two rows at once, where the instruction set has it (kDotsPairs).
template <int kTop, int kSteps>
void dot_pair(const B* w, const int8_t* x0, const int8_t* x1, I& sum0, I& sum1);

struct PackedTile {
  const char* panel;  // first chunk
  int chunks;
  const int8_t* q;    // first row, first value
  ptrdiff_t ldq;
  const Block* x;
  ptrdiff_t ldb;
  float* c;
  ptrdiff_t ldc;
  bool resume;        // add to what c holds
  bool fetch;         // the panel comes from memory: fetches what lies `ahead` bytes further on
  ptrdiff_t ahead;
};

// How far ahead a panel is fetched: shorter, and wide passes wait for memory; into the second-level
// cache, because the first is too small for it beside the rows.
constexpr ptrdiff_t kFetchAhead = 8192;  // bytes

constexpr int kRowBytes = 256 << 10;  // of a block's activations: a part of the cache

template <class F, int MT>
void packed_tile(const PackedTile& a) {
  V acc[MT];
#pragma GCC unroll 16
  for (int m = 0; m < MT; ++m) acc[m] = a.resume ? load(a.c + m * a.ldc) : zero();
  RowPointers<MT, int8_t> q(a.q, a.ldq);
  RowPointers<MT, Block> x(a.x, a.ldb);
  const char* chunk = a.panel;
#pragma GCC unroll 1
  for (int i = 0; i < a.chunks; ++i, chunk += F::kLines * 64) {
    V d = zero(), dmin = zero();
    if constexpr (!F::kSmall) {
      d = load_half(chunk);
      if constexpr (F::kMin) dmin = load_half(chunk + 32);
    }
    const char* p = chunk + F::kHeader * 64;
    if (a.fetch)
      for (int l = 0; l < F::kHeader; ++l) prefetch<kToL2>(chunk + a.ahead + l * 64);
#pragma GCC unroll 1
    for (int b = 0; b < F::kChunk / 32; ++b, p += F::kBits * 64, q.advance(32), x.advance(1)) {
      if (a.fetch) {
#pragma GCC unroll 8
        for (int l = 0; l < F::kBits; ++l) prefetch<kToL2>(p + a.ahead + l * 64);
      }
      B w[8];
      decode<F>(p, w, std::make_index_sequence<8>());
      BlockScales<F> scales;
      scales.read(chunk, b, d, dmin);
      int m = 0;
      if constexpr (kDotsPairs) {
#pragma GCC unroll 8
        for (; m + 1 < MT; m += 2) {
          constexpr int kParts = BlockScales<F>::kParts;
          I sum[2][kParts];
#pragma GCC unroll 2
          for (int i = 0; i < kParts; ++i)
            dot_pair<F::kTop, 8 / kParts>(w + 4 * i, q.row(m) + 16 * i, q.row(m + 1) + 16 * i,
                                          sum[0][i], sum[1][i]);
          acc[m] = scales.add_sums(acc[m], sum[0], *x.row(m));
          acc[m + 1] = scales.add_sums(acc[m + 1], sum[1], *x.row(m + 1));
        }
      }
#pragma GCC unroll 16
      for (; m < MT; ++m) acc[m] = scales.add(acc[m], w, q.row(m), *x.row(m));
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MT; ++m) store(a.c + m * a.ldc, acc[m]);
}

template <class F, int... M>
constexpr auto packed_tiles(std::integer_sequence<int, M...>) {
  struct Table {
    void (*tile[sizeof...(M) + 1])(const PackedTile&);
  };
  return Table{{nullptr, packed_tile<F, M + 1>...}};
}

template <class F>
void packed_product(const Matrix& w, const Rows& x, int first, int num_panels, float* c,
                    ptrdiff_t ldc) {
  static constexpr auto kTiles = packed_tiles<F>(std::make_integer_sequence<int, kMaxRows>());
  const int tiles = (x.rows + kMaxRows - 1) / kMaxRows;
  const int chunks = w.lines / F::kLines;
  // Many rows are taken in blocks of k, so that they stay in the second-level cache. Tiles after the
  // first find the panels of a block there, too.
  const int block = std::max(1024, kRowBytes / x.rows) / F::kChunk;
  for (int i = 0; i < chunks; i += block) {
    const int k = i * F::kChunk, count = std::min(block, chunks - i);
    const ptrdiff_t bytes = ptrdiff_t(count) * F::kLines * 64, panel = ptrdiff_t(w.panel_bytes());
    for (int r = 0, left = tiles; left > 0; --left) {
      const int rows = (x.rows - r + left - 1) / left;
      PackedTile a{nullptr, count, x.q + r * x.ldq + k, x.ldq, x.blocks + r * x.ldb + k / 32, x.ldb,
                   nullptr, ldc,   i > 0,               left == tiles, kFetchAhead};
      for (int p = 0; p < num_panels; ++p) {
        a.panel = w.data + (first + p) * panel + ptrdiff_t(i) * F::kLines * 64;
        a.c = c + r * ldc + 16 * p;
        if (count < chunks) a.ahead = p + 1 < num_panels ? panel : bytes - p * panel;
        kTiles.tile[rows](a);
      }
      r += rows;
    }
  }
}

void packed_gemm(const Matrix& w, const Rows& x, int first, int num_panels, float* c,
                 ptrdiff_t ldc) {
  with_format(w.type, [&](auto f) {
    packed_product<decltype(f)>(w, x, first, num_panels, c, ldc);
  });
}

void quantize_blocks(const float* x, int k, int padded, int8_t* q, Block* blocks, float* rest) {
  for (int at = 0; at < padded; at += 32, ++blocks) {
    V v[2];
    for (int h = 0; h < 2; ++h) {
      const int first = at + 16 * h;
      v[h] = first + 16 <= k ? load(x + first)
                             : load_tail(x + first, k > first ? k - first : 0, 0.0f);
    }
    const float top = horizontal_max(max(abs(v[0]), abs(v[1])));
    const float total = horizontal_sum(add(v[0], v[1]));  // not finite if a value is not
    // What is not finite must not reach the float-to-int conversion.
    const bool usable = top > 0 && total - total == 0;
    const V inverse = set1(127.0f / top);
    blocks->scale = usable ? top / 127.0f : total - total;  // zero or NaN
    for (int h = 0; h < 2; ++h) {
      const V r = usable ? round(mul(v[h], inverse)) : zero();
      store_i8(q + at + 16 * h, r);
      if (rest) store(rest + at + 16 * h, fma(r, set1(-blocks->scale), v[h]));
      blocks->half_sum[h] = blocks->scale * horizontal_sum(r);
    }
    blocks->sum = blocks->half_sum[0] + blocks->half_sum[1];
  }
}

}  // namespace
}  // namespace outrider
