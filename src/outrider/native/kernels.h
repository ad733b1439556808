// The functions of a step that depend on the processor: one table per instruction set.
//
// Every function here has a FIXED order of operations for each output element. It depends on the
// inputs of the element only, never on the number of rows, panels or threads in the call. So a
// verified row is bitwise equal to a decoded one. Do not change this: no reassociation, no split of
// a sum that depends on the shape, no -ffast-math.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outrider {

constexpr int kLanes = 16;       // outputs of one weight panel; keys of one K tile
constexpr int kRowBlock = 240;   // rows of activations one task works through at a time
constexpr int kMaxTask = 8;      // panels one task may span
constexpr int kMaxQueries = 24;  // queries of one attention task: a few register tiles
constexpr int kRange = 1024;     // positions whose softmax is computed as one
constexpr int kRecordHead = 16;  // floats before the values of a range's result
constexpr int kActGroup = 128;   // activations that share a scale under int8 weights

enum WeightType : int32_t {
  kF32 = 0,
  kBF16 = 1,
  kI8 = 2,
  kI4 = 3,
  kF16 = 4,
  // Blocks of GGUF files, see packed.h: 64 + the number of the type in a file.
  kQ4_0 = 66,
  kQ4_1 = 67,
  kQ5_0 = 70,
  kQ5_1 = 71,
  kQ8_0 = 72,
  kQ2_K = 74,
  kQ3_K = 75,
  kQ4_K = 76,
  kQ5_K = 77,
  kQ6_K = 78,
  kIQ4_NL = 84,
  kIQ4_XS = 87,
  kMXFP4 = 103,
};
constexpr bool is_packed(int32_t type) { return type >= 64; }
constexpr int values_per_line(int32_t type) {  // of one output; not for packed types
  return type == kF32 ? 1 : type == kBF16 || type == kF16 ? 2 : type == kI8 ? 4 : 8;
}

// A weight matrix [n, k] packed into panels of 16 outputs. One 64-byte line of a panel holds, for
// each of its 16 outputs, the next 1 (f32), 2 (bf16, f16), 4 (i8) or 8 (i4) values along k, so a step
// reads every panel front to back exactly once.
struct Stored;
struct Matrix {
  char* data = nullptr;
  float* scale = nullptr;  // i8: [panels][16]; i4: [panels][groups][16]
  int32_t type = kF32;
  int32_t n = 0, k = 0;
  int32_t panels = 0, lines = 0;  // lines per panel
  int32_t group = 0, groups = 0;  // activations (and i4 weights) that share a scale
  Stored* stored = nullptr;  // of blocks that are not in `data` yet, see stored.h
  // One line of padding: panels a power of two apart would share their cache sets.
  size_t panel_bytes() const { return size_t(lines + !is_packed(type)) * 64; }
};

// 32 activations as int8, for packed weights: value = scale * int8. The sums are of the rounded
// values, of all 32 and of each half.
struct alignas(16) Block {
  float scale, sum, half_sum[2];
};

// Rows of activations, as floats, as bfloat16 or quantised; a type of weights reads one of them.
struct Rows {
  const float* f = nullptr;
  ptrdiff_t ld = 0;
  const uint32_t* pairs = nullptr;  // [rows][ldp]: two bfloat16, the even k below, the odd above
  ptrdiff_t ldp = 0;
  const int8_t* q = nullptr;       // [rows][ldq]
  ptrdiff_t ldq = 0;
  const float* scale = nullptr;    // [rows][groups]
  const int32_t* sum = nullptr;    // [rows][groups]: sum of the group's int8 values
  const Block* blocks = nullptr;   // [rows][ldb], with `q`: for packed weights
  ptrdiff_t ldb = 0;
  int rows = 0;
};

// Sixteen consecutive physical slots share one tile of keys ([d][16]) and of values ([16][d]).
struct Segment {
  int32_t tile;   // physical slot / 16
  int16_t lane;   // first slot inside the tile
  int16_t count;  // slots used, 1..16
  int32_t start;  // logical slot of the first one
};

// Some queries of one sequence and one KV head, of the flat index row * group + head-in-group, over
// the ranges of positions that begin in from..to-1.
struct Attention {
  const float* q;         // first row of the sequence, first head of the group; head stride dim_p
  ptrdiff_t ldq;
  int first, count;       // flat query range
  int from, to;           // multiples of kRange
  int group;              // query heads per KV head
  int dim, dim_p;         // head size, and rounded up to 16
  int value_dim;          // of a head's result: at most dim
  float scale;
  int window, chunk;      // 0: everything
  float cap;              // of scores; 0: none
  const float* slopes;    // null, or [group]: what a score loses with each position of distance
  const float* sinks;     // null, or [group]: a score of each head that has no value
  int context;            // logical slots before the sequence's new tokens
  const int32_t* depth;   // [rows] or null: chain. Number of ancestors incl. itself
  const int32_t* const* path;  // [rows] new-token indices from root to self; null entry: chain
  int new_tokens;
  const Segment* segments;
  int num_segments;
  const float *keys, *values;  // tile 0 of this layer and head
  bool bytes;             // of int8: the data of a tile, then the scale of each slot
  size_t tile_stride;     // floats between consecutive tiles of the same head
  int ahead;              // new slots that are visible; 0: those before a row
  bool whole;             // every row sees all of them
  const int32_t* table;   // the sequence's block table
  int block_size;
  float* out;             // row of flat query 0's row, first head of the group; head stride value_dim
  ptrdiff_t ldo;
  // Null if no other task has these queries. Else the results of all ranges, of kRecordHead + dim_p
  // floats, [range][count]: of queries that see several.
  float* records;
  // The keys that this thread probably reads next: `num_next` segments. May be none.
  const float* next_keys;
  const Segment* next;
  int num_next;
  float* scratch;         // kMaxQueries * (score_ld + 3 * dim_p + kRecordHead)
  // A multiple of 16, with 16 to spare: >= kRange, or for trees kRange + visible new slots, or the
  // number of slots.
  ptrdiff_t score_ld;
};

// A state to write: that of layer and head `offset` within a row.
struct SavedState {
  int32_t node;
  float* row;
};

// The recurrence of one head of one sequence over its nodes. A state is made of blocks of sixteen
// outputs, [rows][16] each. With decay d and strength s of the node:
//   scan   state = d state + (s x) in',  y = state out
//   delta  state = d state, then state += s (x - state in) in',  y = state out
struct Recurrence {
  bool delta;
  int rows, outputs;
  int count, skip;         // nodes; the first `skip` give no y
  const int32_t* parents;  // null: each follows the one before it; -1: the start
  const float* start;      // null: zeros
  const float *x, *in, *out;  // of node 0
  ptrdiff_t ld;
  const float *decay, *strength;
  ptrdiff_t ldd;
  float* y;                // of node `skip`
  ptrdiff_t ldy;
  const SavedState* saves;  // in the order of nodes
  int num_saves;
  size_t offset;
  float* scratch;          // [1, or with parents count][rows][16]
};

struct Kernels {
  const char* name;
  int max_queries;  // of one register tile of attention
  // c[row][0..16*num_panels) = x[row] . w for panels first..first+num_panels-1
  void (*gemm)(const Matrix& w, const Rows& x, int first, int num_panels, float* c, ptrdiff_t ldc);
  void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
  // n floats to nearest bfloat16, ties to even, in pairs; an odd last one is paired with zero
  void (*round_pairs)(const float* x, int n, uint32_t* pairs);
  void (*quantize)(const float* x, int k, int group, int8_t* q, float* scale, int32_t* sum);
  // The same in blocks of 32, with zeros up to `padded`, a multiple of 32. `rest`: null, or room for
  // `padded` values: what rounding took away.
  void (*quantize_blocks)(const float* x, int k, int padded, int8_t* q, Block* blocks, float* rest);
  void (*silu_mul)(const float* gate, const float* up, int n, float* out);
  void (*add)(float* x, const float* y, int n);
  void (*attention)(const Attention& a);
  // Completes the queries whose ranges several tasks have: the same argument, with all records.
  void (*combine)(const Attention& a);
  // argmax of x[0..n), lowest index on ties; NaNs never win
  int (*argmax)(const float* x, int n, float* best);
  // argmax of x[i] / temperature + gumbel(key, base + i) over i with x[i] / temperature >= floor.
  // `best` and the returned index carry the running result in and out (index -1: none yet).
  int (*gumbel_argmax)(const float* x, int n, int base, float temperature, float floor,
                       uint64_t key, int index, float* best);
  // The smallest scaled logit that survives top-k, then top-p, then min-p. scratch: 5 (n + 16).
  float (*floor)(const float* x, int n, float temperature, int top_k, float top_p, float min_p,
                 float* scratch);
  // out[i] = x[i] + temperature * gumbel(key, i), to about 1e-5, or -inf where x[i] / temperature
  // < floor; returns the logarithm of the sum of their exponentials. out: n + 16.
  float (*noisy)(const float* x, int n, float temperature, float floor, uint64_t key, float* out);
  // (x - mean) / deviation * weight + bias; `bias` may be null
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int n, float eps,
                     float* out);
  // activation(gate) * up for n (a multiple of 16) values; `up` may be null: without a factor
  void (*activate)(int kind, const float* gate, const float* up, int n, float* out);
  // min(gate, limit) * sigmoid(alpha * it) * (up within limits + 1) for n (a multiple of 16) values
  void (*activate_clamped)(const float* gate, const float* up, int n, float limit, float alpha,
                           float* out);
  // x = cap * tanh(x / cap); n is rounded up to 16
  void (*soft_cap)(float* x, int n, float cap);
  void (*recur)(const Recurrence& r);
  // Sum of n floats in eight parallel streams, to measure the memory, not the processor.
  float (*read)(const float* x, int64_t n);
};

const Kernels* portable_kernels();
#if defined(__x86_64__)
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();
#elif defined(__aarch64__)
const Kernels* neon_kernels();
const Kernels* dotprod_kernels();
const Kernels* i8mm_kernels();
#endif

// The best table for this processor, or the one that OUTRIDER_ISA names; null: it cannot run here.
const Kernels* pick_kernels(const char* forced);

}  // namespace outrider
