// A loaded model: packed weights, the paged cache and the buffers of a step.
#pragma once

#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"
#include "outrider.h"
#include "route.h"
#include "states.h"
#include "stored.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace outrider {

// Poisons the gap after `used` bytes of a field of `size` bytes for AddressSanitizer, which does
// not know the fields inside our mappings.
inline void guard(void* field, size_t used, size_t size) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(field, used);
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(field) + used, size - used);
#else
  (void)field, (void)used, (void)size;
#endif
}

// Zeroed memory straight from the system, 2 MB aligned, huge pages where they exist.
class Memory {
 public:
  Memory() = default;
  ~Memory() { release(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  bool reserve(size_t bytes);  // the contents are lost; false: not enough memory
  void release();
  char* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }
  size_t size() const { return size_; }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

// Tensors that are multiplied with the same input. One matrix if they have one type. Otherwise a
// matrix each, which follow one another or, gate and up, take turns panel by panel.
struct Weights {
  Matrix part[3];
  int parts = 1;
  bool take_turns = false;
  int panels = 0;
};

struct Layer {
  std::vector<float> attention_norm, mlp_norm, q_norm, k_norm, qkv_bias, o_bias, gate_up_bias, down_bias;
  std::vector<float> attention_norm_bias, mlp_norm_bias, attention_out_norm, mlp_out_norm, sinks;
  Weights qkv, gate_up;
  Matrix o, down;
  Matrix q_a, q_b, kv_a, kv_b;  // of latent attention, instead of qkv
  std::vector<float> q_a_norm, kv_a_norm;
  Matrix router;  // float32; a last row for the gate of the shared MLP
  std::vector<Matrix> expert_gate_up, expert_down;
  std::vector<float> router_bias, choice_bias, expert_gate_up_bias, expert_down_bias;
  std::vector<uint8_t> expert_seen;  // bit per part
  int inner = 0;  // of the MLP, or of the one beside the experts
  // A convolution in place of attention: qkv is the product before it.
  int width = 0;
  std::vector<float> mix_bias, convolution, convolution_bias;
  int place = 0;  // how many layers before it have keys and values, or with a width: inputs
  // A recurrent part, in place of attention or beside it.
  bool attends = true;
  int state = -1;  // how many layers before it have a state; -1: it has none
  Matrix state_in, state_out, o_gate;
  std::vector<float> state_in_bias, state_out_bias, step_bias, rate, skip, state_norm, o_gate_bias;
  // Of norms that replace the residual; 0: they do not. Their weights are here, not in *_norm.
  float stays[2] = {0, 0};
  std::vector<float> standing[2], standing_bias[2];
  int window = 0, chunk = 0, rope = 0;
  bool causal = false;  // DFlash: a place sees places before it only
  bool sparse() const { return !expert_down.empty(); }
  uint64_t seen = 0;  // bit per tensor kind
};

constexpr int kMaxRopes = 16;
struct RopeTable {
  std::vector<float> cosine, sine;
};

struct AttentionTask {
  int32_t seq, first, count;  // flat query range within the sequence
  int32_t out_shift;          // rows between a query's row and the row of its result
  int32_t from, to;           // positions, multiples of kRange
  int32_t record;             // of each KV head: the first of its results by range; -1: there are none
};

// Attention of one layer: what tasks compute, then queries whose ranges several tasks have.
struct AttentionTasks {
  std::vector<AttentionTask> tasks, combined;
  int32_t records = 0;  // of each KV head
  void clear() { tasks.clear(), combined.clear(), records = 0; }
};

// The rows of a step in flight and the scratch of each thread, all within one mapping.
struct Buffers {
  Memory memory;
  float *x, *q, *att, *hidden;  // residual, queries, attention output, MLP activation
  float* k;                     // keys before a norm over the row
  float *latent_q, *latent_kv;  // of latent attention
  float* added;                 // what attention or MLP adds, before its norm
  float* beside;                // EAGLE-3: embeddings, the second input of its layer
  float *mix, *mixed;           // of recurrent layers: the product, and the result
  float* gate;                  // of attention
  float* norm;                  // prepared input of more than kSmall rows
  uint32_t* pairs;
  int8_t* quant;
  float* quant_scale;
  int32_t* quant_sum;
  Block* blocks;
  // Experts: scores of rows, chosen experts and their weights, and by assignment activations and outputs.
  float *scores, *weights, *expert_hidden, *expert_out;
  int32_t* chosen;
  Union touched;
  ptrdiff_t ldscores;
  ptrdiff_t ldlatent;
  ptrdiff_t ldx, ldq, ldk, ldatt, ldh, ldnorm, ldpairs, ldquant, ldblocks, ldmix, ldmixed;
  ptrdiff_t score_ld;
  struct Private {
    float *c, *attention, *norm, *row;
    float* rest;  // what rounding took of a row
    float *gathered, *gathered_scale, *route;
    uint32_t* gathered_pairs;
    int8_t* gathered_quant;
    outrider::Block* gathered_blocks;
    int32_t* gathered_sum;
    uint32_t* pairs;
    int8_t* quant;
    float* quant_scale;
    int32_t* quant_sum;
    Block* blocks;
  };
  std::vector<Private> own;     // per thread
  int rows = 0, length = 0, ahead = 0;  // the allocated size
};

// The parts of a step that are the same in all layers.
struct Plan {
  std::vector<Segment> segments;
  std::vector<int32_t> segment_starts;        // [S + 1]
  std::vector<int32_t> slots;                 // [T] physical slot of every token
  std::vector<int32_t> depth;                 // [T], trees only
  std::vector<int32_t> path_data;
  std::vector<const int32_t*> path;           // [T], trees only
  AttentionTasks tasks, last_tasks;
  std::vector<float> records;                 // of attention: [KV heads][records]
  std::vector<int32_t> kept;                  // rows that are computed after the last attention
  std::vector<int32_t> head_rows;             // [R] index into the kept rows
  bool tree = false, prune = false;
  int max_length = 0;                         // context + new tokens
  int most_ahead = 0;                         // new slots of a sequence, to come ones included
};

}  // namespace outrider

struct OutriderModel {
  OutriderConfig config{};
  const outrider::Kernels* kernels = nullptr;
  std::mutex mutex;  // one call at a time

  std::vector<outrider::Layer> layers;
  std::vector<float> final_norm, hidden_norm, final_norm_bias, head_bias, positions, fc_bias;
  std::vector<float> slopes, embedding_norm, embedding_norm_bias;
  outrider::Matrix head, fc, markov_head;
  std::vector<outrider::Matrix> heads;  // Medusa: of each guess; empty: all have `head`
  int heads_seen = 0;
  std::vector<float> markov_embed;  // [vocab][markov_rank]
  std::vector<int32_t> ids;         // target id of each row of the head; empty: the row itself
  outrider::Memory weights;
  outrider::StoredWeights stored;
  const char* embed = nullptr;
  int embed_type = 0;
  outrider::Matrix own_embedding;
  const outrider::Matrix* embedding = nullptr;  // if packed: its own, or the head
  bool blocks = false;  // whether weights of blocks may occur
  uint64_t seen = 0;

  std::vector<outrider::RopeTable> ropes;
  int rope_positions = 0, last_rope = 0;  // the highest index of a table that a layer uses

  outrider::Memory cache;
  int num_blocks = 0, block_size = 0;

  // Derived sizes.
  int dim_p = 0;            // head_dim rounded up to 16
  // The cache: the data of sixteen slots, over all layers, is contiguous, so that a sequence uses
  // few pages of memory.
  size_t head_stride = 0;   // floats of one tile of keys or values, with a line of padding so
                            // that tiles do not share their cache sets
  size_t tile_stride = 0;   // floats of sixteen slots: tiles of all layers and heads
  float* keys(int layer, int head) const {
    const size_t place = size_t(layers[size_t(layer)].place);
    return cache.floats() + (place * 2 * config.kv_heads + head) * head_stride;
  }
  // The inputs of convolutions are kept for every slot, like keys: whatever path a token continues,
  // the inputs before it are there, and rejected tokens leave nothing to undo.
  outrider::Memory inputs;
  int convolutions = 0;  // layers
  float* input(const outrider::Layer& layer, int slot) const {
    return inputs.floats() + (size_t(slot) * convolutions + layer.place) * config.hidden;
  }
  outrider::StateStore states;
  outrider::StatePlan state_plan;
  std::vector<float> unit_weight[2];  // of the norms that give queries and keys their length
  float* values(int layer, int head) const { return keys(layer, config.kv_heads + head); }
  float* tile(float* first, int slot) const { return first + size_t(slot / outrider::kLanes) * tile_stride; }
  void store_key(int layer, int head, int slot, const float* key) const;
  void store_value(int layer, int head, int slot, const float* value) const;
  int value_dim() const { return config.parts.value_dim ? config.parts.value_dim : config.head_dim; }
  bool is(int32_t kind) const { return config.kind == kind; }
  // Whether 8-bit blocks meet activations in 16 bits: two rows of 8 bits, the second the rest.
  bool fine() const { return config.kind && outrider::is_packed(config.weight_type); }
  bool varies(int32_t bit) const { return config.variant & bit; }
  bool joins_inputs(int layer) const {
    return layer == 0 && is(OUTRIDER_EAGLE3) && !varies(OUTRIDER_PROJECTS);
  }
  int layer_inputs(int layer) const { return (joins_inputs(layer) ? 2 : 1) * config.hidden; }
  int widest_inputs() const { return (is(OUTRIDER_EAGLE3) ? 2 : 1) * config.hidden; }
  int fc_inputs() const {  // 0: no fc
    if (is(OUTRIDER_EAGLE3) && varies(OUTRIDER_PROJECTS)) return 2 * config.hidden;
    if (is(OUTRIDER_EAGLE3) && varies(OUTRIDER_FUSED)) return 0;
    return is(OUTRIDER_EAGLE3) || is(OUTRIDER_DFLASH) ? config.feature_width : 0;
  }

  outrider::Plan plan;
  outrider::Buffers buffers;
};

namespace outrider {

bool set_error(const std::string& message);  // always false
const Kernels* kernels_or_error();
inline int round_up(int n, int to) { return (n + to - 1) / to * to; }
float half_to_float(uint16_t h);
inline float bf16_to_float(uint16_t h) {
  const uint32_t b = uint32_t(h) << 16;
  float x;
  memcpy(&x, &b, 4);
  return x;
}

// Describes n outputs of width k; returns the size of the matrix in bytes.
size_t describe(Matrix& m, int32_t type, int n, int k);

void pack_rows(Matrix& m, const PackSource& source, int threads);

// The same for packed types, where source and matrix have one type (pack.cpp).
void pack_blocks(Matrix& m, const PackSource& source, int threads);
// The same for Q8_0 made of floats.
void pack_rounded(Matrix& m, const PackSource& source, int threads);
void read_row(const char* p, int32_t type, int n, float* out);  // of float32, bfloat16 or float16
int source_bytes(int32_t type);
// A panel, packed for the calling thread and until its next call if it is stored.
char* panel_of(const Matrix& m, int panel);
void unpack_row(const Matrix& m, int output, float* out);  // m.k floats
int packed_block(int32_t type);  // values of a block in a file; 0: no packed type
int packed_lines(int32_t type, int k);  // of a panel

}  // namespace outrider
