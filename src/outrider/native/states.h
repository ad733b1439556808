// The states of recurrent layers: which are kept, and what a pass reads and writes.
//
// As in outrider/kv/states.py, a state is kept under the slot of the token after which it holds, and
// never changed in place. Here a pass over drafts does not write a state after each of them. It keeps
// what the recurrence read of them (their *inputs*), and the next pass repeats the recurrence over the
// accepted ones, which gives the same bits. So a pass reads and writes one state for a sequence,
// however many drafts it has.
#pragma once

#include <list>
#include <memory>
#include <vector>

#include "kernels.h"
#include "outrider.h"

struct OutriderModel;

namespace outrider {

struct StepArgs;

// The sizes of the recurrent part of a layer, in floats.
struct MixerSizes {
  OutriderMixer of{};
  int layers = 0;  // with a state; 0: none
  int inner() const { return of.heads * of.outputs; }
  int shared() const { return of.groups * of.rows; }
  int channels() const { return inner() + 2 * shared(); }
  int extras() const { return of.delta ? 2 * of.heads : of.heads; }  // besides them, for the recurrence
  int product() const { return channels() + inner() + extras(); }
  // The parts of the product: what the convolution reads, the gate, the rest.
  int channels_at() const { return of.delta ? 0 : inner(); }
  int gate_at() const { return of.delta ? channels() : 0; }
  int extras_at() const { return channels() + inner(); }
  int before() const { return of.width - 1; }
  int blocks() const { return (of.outputs + kLanes - 1) / kLanes; }
  size_t block() const { return size_t(of.rows) * kLanes; }
  size_t tail() const { return size_t(before()) * size_t(channels()); }
  size_t head() const { return size_t(blocks()) * block(); }
  size_t state() const { return tail() + size_t(of.heads) * head(); }  // of a layer
  size_t inputs() const { return size_t(channels() + extras()); }      // of a layer
};

// Rows of `size` floats that grow without moving. Memory is taken when a row is first used.
class FloatRows {
 public:
  void begin(size_t size) { rows_.clear(), size_ = size; }
  int add() { return rows_.emplace_back(new float[size_]), int(rows_.size()) - 1; }
  int count() const { return int(rows_.size()); }
  float* operator[](int row) const { return rows_[size_t(row)].get(); }
  size_t size() const { return size_; }

 private:
  std::vector<std::unique_ptr<float[]>> rows_;
  size_t size_ = 0;
};

class StateStore {
 public:
  MixerSizes sizes;
  int64_t replayed = 0;  // tokens computed again because their state was gone
  bool poison = false;   // in tests: rows are NaN until a pass writes them

  void begin(int num_slots, int block_size, size_t kv_bytes);
  bool has(int slot) const { return state_of_[size_t(slot)] >= 0; }
  bool has_inputs(int slot) const { return inputs_of_[size_t(slot)] >= 0; }
  int32_t token(int slot) const { return tokens_[size_t(slot)]; }
  int stride() const { return stride_; }
  void begin_pass() { ++pass_; }
  // Room for a pass that starts from and keeps at most so many states, and reads and keeps inputs;
  // and for so many more states at the ends of blocks, which other passes keep before it.
  void make_room(int starts, int states, int inputs, int checkpoints = 0);
  const float* state(int slot);   // which counts as a use
  const float* inputs(int slot);  // which stay until the next pass
  void write(int slot, int32_t token);  // another token stands in the slot
  float* take_state(int slot);
  float* take_inputs(int slot);
  void move(const int32_t* source, const int32_t* target, int count);
  void forget();  // in tests: all states and inputs

 private:
  using Uses = std::list<int32_t>;  // slots, the oldest use first
  bool ends_block(int slot) const { return (slot + 1) % block_size_ == 0; }
  Uses& uses(int slot) { return ends_block(slot) ? checkpoints_ : recent_; }
  void drop(int slot);
  void put(int slot, int row);

  int block_size_ = 1, stride_ = 1, most_rows_ = 0, most_recent_ = 0, most_inputs_ = 0;
  int64_t pass_ = 0;
  FloatRows states_, kept_;
  std::vector<int> free_;
  std::vector<int32_t> state_of_, inputs_of_, tokens_;  // by slot
  std::vector<Uses::iterator> use_of_;  // by row
  Uses recent_, checkpoints_;
  std::vector<int32_t> slot_of_inputs_;  // by row, -1: none
  std::vector<int64_t> needed_in_;       // by row: the last pass that reads it
  int next_inputs_ = 0;
};

// What the recurrent layers of a pass compute: nodes are tokens of the pass, after those of earlier
// passes over which the recurrence is repeated.
struct StatePlan {
  struct Sequence {
    int first, count;    // nodes
    int skip;            // of them repeated
    int row;             // of the first new one
    bool tree;
    const float* start;  // null: zeros
    int first_save, num_saves;
  };
  struct Kept {
    int node;
    float* to;
  };
  std::vector<Sequence> sequences;
  std::vector<int32_t> parents;        // [nodes] within the sequence; -1: the start
  std::vector<int32_t> owners;         // [nodes]
  std::vector<const float*> inputs;    // [nodes] of earlier passes; null: a row of this one
  std::vector<SavedState> saves;       // by sequence, in the order of their nodes
  std::vector<Kept> kept;              // inputs
  std::vector<float> convolved, coefficients;  // [nodes][..]
  std::vector<std::vector<float>> scratch;     // of each thread
  int num_nodes() const { return int(parents.size()); }
};

// Computes again what is lost of the texts before the step's tokens. Not within a parallel region.
int32_t restore_states(OutriderModel& model, const StepArgs& step);

// Fills model.state_plan, after `make_plan`; false with an error set.
bool plan_states(OutriderModel& model, const StepArgs& step);

}  // namespace outrider
