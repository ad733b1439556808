// How the block types of GGUF files lie in panels. The codes and scales of a file are kept as they
// are, bit for bit; only their places change, so that sixteen outputs fill a register.
//
// A panel is a row of chunks: a header of scales, then for each 32 values `kBits` lines of codes.
// Step s of a block is its values 4s..4s+3: four bytes of an output's lane.
//   4 bits: a line holds step 2l in its low half bytes and step 2l + 1 in the high ones
//   2 bits: a line holds four steps, the first in the lowest bits; 8 bits: one step
//   3, 5, 6 bits: as 2, 4, 4 bits; then lines with the upper bits, the first step lowest
#pragma once

#include "kernels.h"

namespace outrider {

enum class Scales {
  kHalf,     // per 32 values a half-precision scale
  kHalfMin,  // ... and an offset
  kPower,    // per 32 values a power of two, as bfloat16
  kByteMin,  // per 256 two half-precision factors, per 32 a byte for the scale, one for the offset
  kByte,     // per 256 one factor, per 32 a signed byte
  kByte16,   // per 256 one factor, per 16 a signed byte
  kNibbles,  // per 256 two factors, per 16 a byte: the scale below, the offset above
};

// A value is scale * (code - kZero) + offset, or scale * (table[code] - 128).
template <int32_t kTypeOf, int kBitsOf, Scales kScalesOf, int kZeroOf>
struct Format {
  static constexpr int32_t kType = kTypeOf;
  static constexpr int kBits = kBitsOf;
  static constexpr Scales kScales = kScalesOf;
  static constexpr bool kTable = kTypeOf == kIQ4_NL || kTypeOf == kIQ4_XS || kTypeOf == kMXFP4;
  static constexpr int kZero = kTable ? 128 : kZeroOf;
  static constexpr int kTop = kTable || kBits == 8 ? 255 : (1 << kBits) - 1;  // largest code
  static constexpr bool kSmall = kScales <= Scales::kPower;
  static constexpr bool kSixteen = kScales == Scales::kByte16 || kScales == Scales::kNibbles;
  static constexpr bool kMin = kScales == Scales::kHalfMin || kScales == Scales::kByteMin ||
                               kScales == Scales::kNibbles;
  static constexpr int kChunk = kSmall ? 64 : 256;
  // Half-precision numbers first (of 64 values two per output, of 256 the one or two factors), then
  // the offsets of 64 values or the bytes.
  static constexpr int kHeader = kScales == Scales::kHalfMin   ? 2
                                 : kSmall                      ? 1
                                 : kScales == Scales::kByte    ? 3
                                                               : 5;
  static constexpr int kLines = kHeader + kBits * kChunk / 32;  // of a chunk
};

using Q4_0 = Format<kQ4_0, 4, Scales::kHalf, 8>;
using Q4_1 = Format<kQ4_1, 4, Scales::kHalfMin, 0>;
using Q5_0 = Format<kQ5_0, 5, Scales::kHalf, 16>;
using Q5_1 = Format<kQ5_1, 5, Scales::kHalfMin, 0>;
using Q8_0 = Format<kQ8_0, 8, Scales::kHalf, 128>;
using Q2_K = Format<kQ2_K, 2, Scales::kNibbles, 0>;
using Q3_K = Format<kQ3_K, 3, Scales::kByte16, 4>;
using Q4_K = Format<kQ4_K, 4, Scales::kByteMin, 0>;
using Q5_K = Format<kQ5_K, 5, Scales::kByteMin, 0>;
using Q6_K = Format<kQ6_K, 6, Scales::kByte16, 32>;
using IQ4_NL = Format<kIQ4_NL, 4, Scales::kHalf, 0>;
using IQ4_XS = Format<kIQ4_XS, 4, Scales::kByte, 0>;
using MXFP4 = Format<kMXFP4, 4, Scales::kPower, 0>;

// Calls f with the format of a packed type; false if there is none.
template <class F>
constexpr bool with_format(int32_t type, F f) {
  switch (type) {
    case kQ4_0: return f(Q4_0{}), true;
    case kQ4_1: return f(Q4_1{}), true;
    case kQ5_0: return f(Q5_0{}), true;
    case kQ5_1: return f(Q5_1{}), true;
    case kQ8_0: return f(Q8_0{}), true;
    case kQ2_K: return f(Q2_K{}), true;
    case kQ3_K: return f(Q3_K{}), true;
    case kQ4_K: return f(Q4_K{}), true;
    case kQ5_K: return f(Q5_K{}), true;
    case kQ6_K: return f(Q6_K{}), true;
    case kIQ4_NL: return f(IQ4_NL{}), true;
    case kIQ4_XS: return f(IQ4_XS{}), true;
    case kMXFP4: return f(MXFP4{}), true;
    default: return false;
  }
}

// The size of a block in a file.
constexpr size_t packed_block_bytes(int32_t type) {
  switch (type) {
    case kMXFP4: return 17;
    case kQ4_0: case kIQ4_NL: return 18;
    case kQ4_1: return 20;
    case kQ5_0: return 22;
    case kQ5_1: return 24;
    case kQ8_0: return 34;
    case kQ2_K: return 84;
    case kQ3_K: return 110;
    case kIQ4_XS: return 136;
    case kQ4_K: return 144;
    case kQ5_K: return 176;
    case kQ6_K: return 210;
    default: return 0;
  }
}

// The values that half bytes stand for, plus 128, four times over: registers look up 16 bytes each.
struct alignas(64) CodeTable {
  uint8_t bytes[64];
};
constexpr CodeTable code_table(const int (&values)[16]) {
  CodeTable t{};
  for (int i = 0; i < 64; ++i) t.bytes[i] = uint8_t(128 + values[i % 16]);
  return t;
}
constexpr CodeTable kUneven = code_table(
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113});
// Twice the numbers that four bits of floating point stand for.
constexpr CodeTable kFloat4 = code_table({0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12});

template <class F>
constexpr const CodeTable& table_of() {
  return F::kType == kMXFP4 ? kFloat4 : kUneven;
}

}  // namespace outrider
