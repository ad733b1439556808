// Moves the blocks of GGUF files into panels, and reads rows of packed matrices.
#include <algorithm>
#include <cmath>

#include "model.h"
#include "packed.h"
#include "pool.h"

namespace outrider {
namespace {

// One chunk of one row, taken apart. `d` and `m` are half-precision numbers, of each 32 values or of
// all 256; `s` and `o` the bytes of scales and offsets.
struct Parts {
  uint8_t codes[256];
  uint16_t d[2], m[2];
  uint8_t s[16], o[8];
};

uint16_t read_half(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

// 32 values whose halves share bytes: the first sixteen below.
void take_nibbles(const uint8_t* p, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) codes[i] = p[i] & 15, codes[16 + i] = p[i] >> 4;
}

// 32 values' fifth bits, one each of four bytes.
void take_fifth_bits(const uint8_t* p, uint8_t* codes) {
  const uint32_t bits = uint32_t(read_half(p)) | uint32_t(read_half(p + 2)) << 16;
  for (int i = 0; i < 32; ++i) codes[i] |= uint8_t((bits >> i & 1) << 4);
}

// Blocks of 32 values; `i` is the block's place in the chunk.
template <class F>
void take_small(const uint8_t* p, int i, Parts& out) {
  uint8_t* codes = out.codes + 32 * i;
  if constexpr (F::kScales == Scales::kPower) {
    // 2^(p - 128), because the table has twice the values; subnormal where p is 0 or 1.
    out.d[i] = p[0] < 2 ? uint16_t(0x20 << p[0]) : uint16_t((p[0] - 1) << 7);
    p += 1;
  } else {
    out.d[i] = read_half(p);
    p += 2;
  }
  if constexpr (F::kScales == Scales::kHalfMin) out.m[i] = read_half(p), p += 2;
  if constexpr (F::kBits == 8) {
    for (int j = 0; j < 32; ++j) codes[j] = uint8_t(p[j] + 128);
  } else {
    take_nibbles(p + (F::kBits == 5 ? 4 : 0), codes);
    if constexpr (F::kBits == 5) take_fifth_bits(p, codes);
  }
}

// Twelve bytes hold eight 6-bit scales and eight 6-bit offsets.
void take_sixes(const uint8_t* p, Parts& out) {
  for (int i = 0; i < 4; ++i) {
    out.s[i] = p[i] & 63;
    out.o[i] = p[4 + i] & 63;
    out.s[4 + i] = uint8_t((p[8 + i] & 15) | p[i] >> 6 << 4);
    out.o[4 + i] = uint8_t(p[8 + i] >> 4 | p[4 + i] >> 6 << 4);
  }
}

// Two bits each: of every 128 values byte i holds the values i, 32 + i, 64 + i and 96 + i.
template <bool kAbove = false>  // above four bits that are there
void take_pairs(const uint8_t* p, uint8_t* codes) {
  for (int h = 0; h < 2; ++h, p += 32)
    for (int j = 0; j < 4; ++j, codes += 32)
      for (int i = 0; i < 32; ++i) {
        const uint8_t bits = p[i] >> 2 * j & 3;
        codes[i] = kAbove ? uint8_t(codes[i] | bits << 4) : bits;
      }
}

// Four bits each: of every 2 kHalf values byte i holds the values i and kHalf + i.
template <int kHalf>
void take_halves(const uint8_t* p, uint8_t* codes) {
  for (int h = 0; h < 128 / kHalf; ++h, p += kHalf, codes += 2 * kHalf)
    for (int i = 0; i < kHalf; ++i) codes[i] = p[i] & 15, codes[kHalf + i] = p[i] >> 4;
}

// One bit each, put in place kTo: byte i holds the values i, 32 + i, ..., the first lowest.
template <int kTo>
void take_bits(const uint8_t* p, uint8_t* codes) {
  for (int j = 0; j < 8; ++j, codes += 32)
    for (int i = 0; i < 32; ++i) codes[i] = uint8_t(codes[i] | (p[i] >> j & 1) << kTo);
}

void take(Q2_K, const uint8_t* p, Parts& out) {
  memcpy(out.s, p, 16);
  take_pairs(p + 16, out.codes);
  out.d[0] = read_half(p + 80);
  out.m[0] = read_half(p + 82);
}

void take(Q3_K, const uint8_t* p, Parts& out) {
  take_pairs(p + 32, out.codes);
  take_bits<2>(p, out.codes);
  const uint8_t* s = p + 96;
  for (int i = 0; i < 16; ++i) {
    const int low = s[i % 8] >> i / 8 * 4 & 15, high = s[8 + i % 4] >> i / 4 * 2 & 3;
    out.s[i] = uint8_t((low | high << 4) - 32);
  }
  out.d[0] = read_half(p + 108);
}

// Q4_K and Q5_K.
template <class F>
void take_sub_blocks(const uint8_t* p, Parts& out) {
  out.d[0] = read_half(p);
  out.m[0] = read_half(p + 2);
  take_sixes(p + 4, out);
  take_halves<32>(p + (F::kBits == 5 ? 48 : 16), out.codes);
  if constexpr (F::kBits == 5) take_bits<4>(p + 16, out.codes);
}

void take(Q4_K, const uint8_t* p, Parts& out) { take_sub_blocks<Q4_K>(p, out); }
void take(Q5_K, const uint8_t* p, Parts& out) { take_sub_blocks<Q5_K>(p, out); }

void take(Q6_K, const uint8_t* p, Parts& out) {
  take_halves<64>(p, out.codes);
  take_pairs<true>(p + 128, out.codes);
  memcpy(out.s, p + 192, 16);
  out.d[0] = read_half(p + 208);
}

void take(IQ4_XS, const uint8_t* p, Parts& out) {
  out.d[0] = read_half(p);
  const int high = read_half(p + 2);
  for (int i = 0; i < 8; ++i) {
    out.s[i] = uint8_t(((p[4 + i / 2] >> i % 2 * 4 & 15) | (high >> 2 * i & 3) << 4) - 32);
    take_nibbles(p + 8 + 16 * i, out.codes + 32 * i);
  }
}

void put_half(char* p, uint16_t h) { memcpy(p, &h, 2); }

// The header of a chunk. Factors of offsets are stored negated: files subtract them.
template <class F>
void put_header(const Parts& in, char* chunk, int lane) {
  if constexpr (F::kSmall) {
    for (int i = 0; i < 2; ++i) {
      put_half(chunk + 32 * i + 2 * lane, in.d[i]);
      if constexpr (F::kMin) put_half(chunk + 64 + 32 * i + 2 * lane, in.m[i]);
    }
  } else {
    put_half(chunk + 2 * lane, in.d[0]);
    put_half(chunk + 32 + 2 * lane, F::kMin ? in.m[0] ^ 0x8000 : 0);
    for (int i = 0; i < (F::kSixteen ? 16 : 8); ++i) chunk[64 + 16 * i + lane] = char(in.s[i]);
    if constexpr (F::kScales == Scales::kByteMin)
      for (int i = 0; i < 8; ++i) chunk[192 + 16 * i + lane] = char(in.o[i]);
  }
}

uint32_t four(const uint8_t* codes, int step) {
  uint32_t v;
  memcpy(&v, codes + 4 * step, 4);
  return v;
}

void put_four(char* block, int line, int lane, uint32_t v) {
  memcpy(block + 64 * line + 4 * lane, &v, 4);
}

template <class F>
void put_codes(const uint8_t* c, char* block, int lane) {
  constexpr uint32_t kOnes = 0x01010101;
  if constexpr (F::kBits == 8) {
    for (int s = 0; s < 8; ++s) put_four(block, s, lane, four(c, s));
  } else if constexpr (F::kBits >= 4) {
    for (int l = 0; l < 4; ++l)
      put_four(block, l, lane,
               (four(c, 2 * l) & 15 * kOnes) | (four(c, 2 * l + 1) & 15 * kOnes) << 4);
  } else {
    for (int l = 0; l < 2; ++l) {
      uint32_t v = 0;
      for (int s = 0; s < 4; ++s) v |= (four(c, 4 * l + s) & 3 * kOnes) << 2 * s;
      put_four(block, l, lane, v);
    }
  }
  if constexpr (F::kBits == 5 || F::kBits == 3) {
    uint32_t v = 0;
    for (int s = 0; s < 8; ++s) v |= (four(c, s) >> (F::kBits - 1) & kOnes) << s;
    put_four(block, F::kBits - 1, lane, v);
  } else if constexpr (F::kBits == 6) {
    for (int l = 0; l < 2; ++l) {
      uint32_t v = 0;
      for (int s = 0; s < 4; ++s) v |= (four(c, 4 * l + s) >> 4 & 3 * kOnes) << 2 * s;
      put_four(block, 4 + l, lane, v);
    }
  }
}

// The row of a source that becomes this output; -1: none.
int row_of(const PackSource& s, int output) {
  const int from = output - s.first;
  int at = from % s.run_step;
  if (from < 0 || at >= s.run) return -1;
  // Neighbours (i, i + 1) of a head become (i / 2, i / 2 + D / 2), if D of its dimensions rotate.
  if (at < s.turned) at = at < s.turned / 2 ? 2 * at : 2 * at - s.turned + 1;
  const int row = from / s.run_step * s.run + at;
  return row < s.rows ? row : -1;
}

// The rows of a panel, read into memory of this thread if they are in a file; null for outputs
// without one. False: there is no row.
bool find_rows(const PackSource& s, size_t bytes, int panel, const char* (&row)[kLanes]) {
  thread_local std::vector<char> memory;
  int at[kLanes];
  bool any = false;
  for (int i = 0; i < kLanes; ++i) {
    at[i] = row_of(s, panel * kLanes + i);
    row[i] = s.file || at[i] < 0 ? nullptr : s.data + size_t(at[i]) * bytes;
    any = any || at[i] >= 0;
  }
  if (!any || !s.file) return any;
  memory.resize(std::max(memory.size(), bytes * kLanes));
  for (int i = 0, end; i < kLanes; i = end) {
    end = i + 1;
    if (at[i] < 0) continue;
    while (end < kLanes && at[end] == at[i] + end - i) ++end;
    s.file->read(memory.data() + i * bytes, (end - i) * bytes, s.offset + int64_t(at[i] * bytes));
    for (int j = i; j < end; ++j) row[j] = memory.data() + j * bytes;
  }
  return true;
}

template <class F>
bool pack_panel(const Matrix& m, const PackSource& s, int panel, char* out) {
  constexpr size_t kBlock = packed_block_bytes(F::kType);
  const int per_row = s.columns / (F::kSmall ? 32 : 256), chunks = m.lines / F::kLines;
  const char* rows[kLanes];
  if (!find_rows(s, per_row * kBlock, panel, rows)) return false;
  if (std::count(rows, rows + kLanes, nullptr)) memset(out, 0, m.panel_bytes());
  Parts parts{};
  for (int i = 0; i < chunks; ++i, out += F::kLines * 64) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!rows[lane]) continue;
      const auto* p = reinterpret_cast<const uint8_t*>(rows[lane]);
      if constexpr (F::kSmall) {
        for (int j = 0; j < 2; ++j) {
          if (2 * i + j < per_row) {
            take_small<F>(p + size_t(2 * i + j) * kBlock, j, parts);
          } else {
            parts.d[j] = parts.m[j] = 0;
            memset(parts.codes + 32 * j, 0, 32);
          }
        }
      } else {
        take(F{}, p + size_t(i) * kBlock, parts);
      }
      put_header<F>(parts, out, lane);
      char* block = out + F::kHeader * 64;
      for (int b = 0; b < F::kChunk / 32; ++b, block += F::kBits * 64)
        put_codes<F>(parts.codes + 32 * b, block, lane);
    }
  }
  return true;
}

struct Packing {
  Matrix* m;
  const PackSource* s;
};

template <class F>
void pack_job(void* context, Team& team, int thread) {
  const Packing& job = *static_cast<Packing*>(context);
  for (int t; (t = team.next_task(thread, job.m->panels)) >= 0;)
    pack_panel<F>(*job.m, *job.s, t, job.m->data + size_t(t) * job.m->panel_bytes());
}

// The codes of one output of a block of 32.
template <class F>
void read_codes(const char* block, int lane, uint8_t* codes) {
  for (int i = 0; i < 32; ++i) {
    const int s = i / 4;
    auto byte = [&](int line) { return int(uint8_t(block[64 * line + 4 * lane + i % 4])); };
    int c = F::kBits == 8   ? byte(s)
            : F::kBits >= 4 ? byte(s / 2) >> s % 2 * 4 & 15
                            : byte(s / 4) >> s % 4 * 2 & 3;
    if (F::kBits == 5 || F::kBits == 3) c |= (byte(F::kBits - 1) >> s & 1) << (F::kBits - 1);
    if (F::kBits == 6) c |= (byte(4 + s / 4) >> s % 4 * 2 & 3) << 4;
    codes[i] = F::kTable ? table_of<F>().bytes[c] : uint8_t(c);
  }
}

template <class F>
void read_block(const char* chunk, int b, int lane, float* out) {
  uint8_t codes[32];
  read_codes<F>(chunk + 64 * (F::kHeader + F::kBits * b), lane, codes);
  auto half = [&](int at) {
    uint16_t h;
    memcpy(&h, chunk + at + 2 * lane, 2);
    return F::kScales == Scales::kPower ? bf16_to_float(h) : half_to_float(h);
  };
  for (int i = 0; i < 32; ++i) {
    float scale, offset = 0;
    if constexpr (F::kSmall) {
      scale = half(32 * b);
      if constexpr (F::kMin) offset = half(64 + 32 * b);
    } else {
      const int at = 64 + (F::kSixteen ? 32 * b + i / 16 * 16 : 16 * b) + lane;
      const uint8_t byte = uint8_t(chunk[at]);
      constexpr bool kNibbles = F::kScales == Scales::kNibbles;
      scale = half(0) * float(kNibbles ? byte & 15 : F::kMin ? byte : int8_t(byte));
      if constexpr (kNibbles) offset = half(32) * float(byte >> 4);
      if constexpr (F::kScales == Scales::kByteMin) offset = half(32) * float(uint8_t(chunk[at + 128]));
    }
    out[i] = scale * float(int(codes[i]) - F::kZero);
    if constexpr (F::kMin) out[i] += offset;
  }
}

// The smallest half-precision number that is not below x, which is finite and not negative.
uint16_t half_not_below(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint16_t h = x >= 65504.0f     ? uint16_t(0x7bff)
               : x >= 0x1p-14f   ? uint16_t((bits >> 13) - (112 << 10))
                                 : uint16_t(x * 0x1p24f);
  return half_to_float(h) < x && h < 0x7bff ? uint16_t(h + 1) : h;
}

struct Rounding {
  const PackSource* s;
  char* out;
  int per_row;  // blocks
};

void round_job(void* context, Team& team, int thread) {
  const auto& job = *static_cast<Rounding*>(context);
  const PackSource& s = *job.s;
  std::vector<float> row(size_t(job.per_row) * 32);
  for (int t; (t = team.next_task(thread, (s.rows + kLanes - 1) / kLanes)) >= 0;) {
    for (int r = t * kLanes; r < std::min(s.rows, (t + 1) * kLanes); ++r) {
      read_row(s.data + size_t(r) * s.columns * source_bytes(s.type), s.type, s.columns, row.data());
      char* p = job.out + size_t(r) * job.per_row * packed_block_bytes(kQ8_0);
      for (int i = 0; i < job.per_row; ++i, p += packed_block_bytes(kQ8_0)) {
        const float* x = row.data() + 32 * i;
        float top = 0;
        for (int j = 0; j < 32; ++j) top = std::fmax(top, std::fabs(x[j]));
        const uint16_t half = std::isfinite(top) ? half_not_below(top / 127.0f) : 0;
        const float scale = half_to_float(half), inverse = scale > 0 ? 1.0f / scale : 0.0f;
        put_half(p, half);
        for (int j = 0; j < 32; ++j) {
          const float v = std::nearbyint(x[j] * inverse);
          p[2 + j] = char(v >= -127 && v <= 127 ? int(v) : v > 0 ? 127 : v < 0 ? -127 : 0);
        }
      }
    }
  }
}

}  // namespace

void pack_rounded(Matrix& m, const PackSource& source, int threads) {
  const int per_row = (source.columns + 31) / 32;
  std::vector<char> blocks(size_t(source.rows) * size_t(per_row) * packed_block_bytes(kQ8_0));
  Rounding job{&source, blocks.data(), per_row};
  run_on_pool(threads, round_job, &job);
  PackSource rounded = source;
  rounded.data = blocks.data(), rounded.type = kQ8_0, rounded.columns = per_row * 32;
  pack_blocks(m, rounded, threads);
}

void pack_blocks(Matrix& m, const PackSource& source, int threads) {
  with_format(m.type, [&](auto f) {
    Packing job{&m, &source};
    run_on_pool(threads, pack_job<decltype(f)>, &job);
  });
}

char* panel_of(const Matrix& m, int panel) {
  struct alignas(64) Line {
    char bytes[64];
  };
  thread_local std::vector<Line> memory;
  bool found = false;
  if (m.stored) memory.resize(std::max(memory.size(), size_t(m.lines)));
  for (size_t i = 0; m.stored && i < m.stored->sources.size() && !found; ++i)
    with_format(m.type, [&](auto f) {
      found = pack_panel<decltype(f)>(m, m.stored->sources[i], panel, memory[0].bytes);
    });
  return found ? memory[0].bytes : m.data + size_t(panel) * m.panel_bytes();
}

void unpack_row(const Matrix& m, int output, float* out) {
  with_format(m.type, [&](auto f) {
    using F = decltype(f);
    const char* panel = panel_of(m, output / kLanes);
    for (int k = 0; k < m.k; k += 32)
      read_block<F>(panel + size_t(k / F::kChunk) * F::kLines * 64, k % F::kChunk / 32,
                    output % kLanes, out + k);
  });
}

int packed_block(int32_t type) {
  int values = 0;
  with_format(type, [&](auto f) { values = decltype(f)::kSmall ? 32 : 256; });
  return values;
}

int packed_lines(int32_t type, int k) {
  int lines = 0;
  with_format(type, [&](auto f) {
    using F = decltype(f);
    lines = (k + F::kChunk - 1) / F::kChunk * F::kLines;
  });
  return lines;
}

}  // namespace outrider
