// Keeps the states of recurrent layers by slot, and plans what a pass does with them.
#include "states.h"

#include <algorithm>
#include <cmath>

#include "step.h"

namespace outrider {
namespace {

constexpr int kMostKept = 64;                        // inputs of one sequence's pass
constexpr size_t kLeastBytes = size_t(1) << 28;      // of checkpoints
constexpr size_t kRecentBytes = size_t(1) << 26;     // of the last passes, if these are not more
constexpr int kReplayed = 512;  // tokens of one pass that computes lost states again

}  // namespace

void StateStore::begin(int num_slots, int block_size, size_t kv_bytes) {
  if (!sizes.layers) return;
  const size_t floats = size_t(sizes.layers) * sizes.state(), bytes = 4 * floats;
  const int blocks = num_slots / block_size;
  const size_t room = std::max(kv_bytes, kLeastBytes) / bytes;
  const int checkpoints = 2 + int(std::min(size_t(blocks), room));
  block_size_ = block_size;
  // Only every so many-th block end of a text is a checkpoint, and the last one.
  stride_ = (blocks + checkpoints - 1) / checkpoints;
  most_recent_ = int(std::min(size_t(64), 2 + kRecentBytes / bytes));
  most_rows_ = checkpoints + most_recent_;
  most_inputs_ = kMostKept;
  states_.begin(floats);
  kept_.begin(size_t(sizes.layers) * sizes.inputs());
  free_.clear();
  state_of_.assign(size_t(num_slots), -1);
  inputs_of_.assign(size_t(num_slots), -1);
  tokens_.assign(size_t(num_slots), 0);
  use_of_.clear();
  recent_.clear();
  checkpoints_.clear();
  slot_of_inputs_.clear();
  needed_in_.clear();
  next_inputs_ = 0;
}

void StateStore::make_room(int starts, int states, int inputs, int checkpoints) {
  most_recent_ = std::max(most_recent_, starts + states);
  most_rows_ = std::max(most_rows_, most_recent_ + starts + states + checkpoints + 1);
  most_inputs_ = std::max(most_inputs_, 4 * inputs);
}

const float* StateStore::state(int slot) {
  Uses& list = uses(slot);
  const int row = state_of_[size_t(slot)];
  list.splice(list.end(), list, use_of_[size_t(row)]);
  return states_[row];
}

const float* StateStore::inputs(int slot) {
  const int row = inputs_of_[size_t(slot)];
  needed_in_[size_t(row)] = pass_;
  return kept_[row];
}

void StateStore::drop(int slot) {
  int32_t& row = state_of_[size_t(slot)];
  if (row >= 0) {
    uses(slot).erase(use_of_[size_t(row)]);
    free_.push_back(row);
    row = -1;
  }
  int32_t& kept = inputs_of_[size_t(slot)];
  if (kept >= 0) slot_of_inputs_[size_t(kept)] = -1;
  kept = -1;
}

void StateStore::write(int slot, int32_t token) {
  drop(slot);
  tokens_[size_t(slot)] = token;
}

void StateStore::put(int slot, int row) {
  state_of_[size_t(slot)] = row;
  Uses& list = uses(slot);
  use_of_[size_t(row)] = list.insert(list.end(), slot);
}

float* StateStore::take_state(int slot) {
  auto evict = [&](Uses& list) {
    const int oldest = list.front();
    free_.push_back(state_of_[size_t(oldest)]);
    state_of_[size_t(oldest)] = -1;
    list.pop_front();
  };
  if (state_of_[size_t(slot)] >= 0) return states_[state_of_[size_t(slot)]];
  if (!ends_block(slot))
    while (int(recent_.size()) >= most_recent_) evict(recent_);
  if (free_.empty()) {
    if (states_.count() < most_rows_) {
      free_.push_back(states_.add());
      use_of_.emplace_back();
    } else {
      evict(checkpoints_.empty() ? recent_ : checkpoints_);
    }
  }
  const int row = free_.back();
  free_.pop_back();
  put(slot, row);
  if (poison) std::fill(states_[row], states_[row] + states_.size(), std::nanf(""));
  return states_[row];
}

float* StateStore::take_inputs(int slot) {
  int row = -1;
  if (kept_.count() < most_inputs_) {
    row = kept_.add();
    slot_of_inputs_.push_back(-1);
    needed_in_.push_back(0);
  } else {
    do {
      row = next_inputs_;
      next_inputs_ = (next_inputs_ + 1) % kept_.count();
    } while (needed_in_[size_t(row)] == pass_);
    const int before = slot_of_inputs_[size_t(row)];
    if (before >= 0) inputs_of_[size_t(before)] = -1;
  }
  slot_of_inputs_[size_t(row)] = slot;
  inputs_of_[size_t(slot)] = row;
  needed_in_[size_t(row)] = pass_;
  if (poison) std::fill(kept_[row], kept_[row] + kept_.size(), std::nanf(""));
  return kept_[row];
}

void StateStore::move(const int32_t* source, const int32_t* target, int count) {
  struct Moved {
    int state, inputs;
    int32_t token;
  };
  std::vector<Moved> moved;
  for (int i = 0; i < count; ++i) {
    const size_t slot = size_t(source[i]);
    moved.push_back({state_of_[slot], inputs_of_[slot], tokens_[slot]});
    if (state_of_[slot] >= 0) uses(source[i]).erase(use_of_[size_t(state_of_[slot])]);
    state_of_[slot] = inputs_of_[slot] = -1;
  }
  for (int i = 0; i < count; ++i) drop(target[i]);
  for (int i = 0; i < count; ++i) {
    const Moved& from = moved[size_t(i)];
    tokens_[size_t(target[i])] = from.token;
    if (from.state >= 0) put(target[i], from.state);
    if (from.inputs < 0) continue;
    inputs_of_[size_t(target[i])] = from.inputs;
    slot_of_inputs_[size_t(from.inputs)] = target[i];
  }
}

void StateStore::forget() {
  for (size_t slot = 0; slot < state_of_.size(); ++slot) drop(int(slot));
}

namespace {

int slot_at(const OutriderModel& m, const StepArgs& s, int seq, int index) {
  const int32_t* table = s.tables + int64_t(seq) * s.table_width;
  return table[index / m.block_size] * m.block_size + index % m.block_size;
}

// The first token before the sequence's context whose inputs a pass has to read, because the state
// after the token before it is the nearest one; -1: there is none.
int first_repeated(const OutriderModel& m, const StepArgs& s, int seq) {
  int at = s.context[seq];
  for (; at > 0; --at) {
    const int slot = slot_at(m, s, seq, at - 1);
    if (m.states.has(slot)) return at;
    if (!m.states.has_inputs(slot)) return -1;
  }
  return 0;
}

// Whether tokens of a sequence besides the last one have logits: a commit may end there.
bool is_speculative(const StepArgs& s, const std::vector<bool>& wanted, int seq) {
  const int last = s.starts[seq + 1] - 1;
  for (int t = s.starts[seq]; t < last; ++t)
    if (wanted[size_t(t)]) return true;
  return false;
}

struct Planner {
  OutriderModel& m;
  const StepArgs& s;
  StatePlan& p = m.state_plan;
  StateStore& store = m.states;
  bool partial;  // the states are those of the first layers only
  std::vector<bool> wanted;
  struct Wish {
    int node, slot;
    bool inputs;
  };
  std::vector<Wish> wishes;  // what to keep, by sequence

  Planner(OutriderModel& model, const StepArgs& step)
      : m(model), s(step), partial(s.exit_layer >= 0 && s.exit_layer < m.config.layers) {
    wanted.assign(size_t(s.num_tokens), false);
    for (int r = 0; r < s.num_rows; ++r) wanted[size_t(s.logit_rows[r])] = true;
  }

  void add_node(int parent, const float* inputs) {
    p.parents.push_back(parent);
    p.owners.push_back(int32_t(p.sequences.size()));
    p.inputs.push_back(inputs);
  }

  // Whether the state after the token at this index of the text serves a repeat of the text up to `end`.
  bool serves(int index, int end) const {
    const int n = index + 1, size = m.block_size;
    return n % (store.stride() * size) == 0 || n == end / size * size || n == (end - 1) / size * size;
  }

  // Nodes of a sequence: repeated ones of its text, those of earlier passes of a tree, new ones.
  void add_sequence(int seq, int from) {
    const int n = s.starts[seq + 1] - s.starts[seq], context = s.context[seq];
    const int fed = s.fed ? s.fed[seq] : 0, repeated = context - from, skip = repeated + fed;
    StatePlan::Sequence q{};
    q.first = p.num_nodes(), q.count = skip + n, q.skip = skip, q.row = s.starts[seq];
    q.start = from ? store.state(slot_at(m, s, seq, from - 1)) : nullptr;
    for (int i = 0; i < repeated; ++i)
      add_node(i - 1, store.inputs(slot_at(m, s, seq, from + i)));
    for (int i = 0; i < fed; ++i) {
      const int above = s.lineage[seq][i];
      add_node(repeated + above, store.inputs(slot_at(m, s, seq, context + i)));
    }
    for (int j = 0; j < n; ++j) {
      int above = fed + j - 1;
      if (s.lineage) {
        above = s.lineage[seq][fed + j];
      } else if (s.parents) {
        above = s.parents[s.starts[seq] + j];
      }
      add_node(repeated + above, nullptr);
    }
    for (int i = 0; i < q.count; ++i) q.tree |= p.parents[size_t(q.first + i)] != i - 1;
    p.sequences.push_back(q);
    wish(seq, from, fed, q.tree);
  }

  void wish(int seq, int from, int fed, bool tree) {
    const int n = s.starts[seq + 1] - s.starts[seq], context = s.context[seq], repeated = context - from, skip = repeated + fed;
    // Later passes of a growing tree read the inputs of all its nodes, also while it is still a chain.
    const bool branches = tree || s.fed, speculative = branches || is_speculative(s, wanted, seq);
    const int lazy = !speculative ? n : branches ? 0 : std::max(0, n - kMostKept);
    // The text that is surely committed, and up to where drafts may be.
    const int sure = context + (speculative ? lazy : n), end = branches ? context : context + n;
    for (int i = from; i < end; ++i) {
      const bool last = i + 1 == sure && (!partial || i >= context);
      if (last || (!partial && serves(i, end))) wishes.push_back({i - from, slot_at(m, s, seq, i), false});
    }
    for (int j = lazy; j < n; ++j)
      wishes.push_back({skip + j, slot_at(m, s, seq, context + fed + j), true});
  }

  void keep() {
    size_t at = 0;
    for (size_t i = 0; i < p.sequences.size(); ++i) {
      StatePlan::Sequence& q = p.sequences[i];
      q.first_save = int(p.saves.size());
      for (; at < wishes.size() && at < ends[i]; ++at) {
        const Wish& w = wishes[at];
        if (w.inputs) {
          p.kept.push_back({q.first + w.node, store.take_inputs(w.slot)});
        } else if (w.node >= q.skip || !store.has(w.slot)) {
          p.saves.push_back({w.node, store.take_state(w.slot)});
        }
      }
      q.num_saves = int(p.saves.size()) - q.first_save;
    }
  }
  std::vector<size_t> ends;  // of the wishes of each sequence in the plan

  bool run() {
    p.sequences.clear(), p.parents.clear(), p.owners.clear(), p.inputs.clear();
    p.saves.clear(), p.kept.clear();
    std::vector<int> from(size_t(s.num_seqs), 0);
    for (int i = 0; i < s.num_seqs; ++i) {
      if (s.starts[i + 1] == s.starts[i]) continue;
      from[size_t(i)] = first_repeated(m, s, i);
      if (from[size_t(i)] < 0) return set_error("the state of a sequence is lost");
    }
    store.begin_pass();
    for (int i = 0; i < s.num_seqs; ++i) {
      if (s.starts[i + 1] == s.starts[i]) continue;
      add_sequence(i, from[size_t(i)]);
      ends.push_back(wishes.size());
    }
    const int inputs = int(std::count_if(wishes.begin(), wishes.end(), [](const Wish& w) { return w.inputs; }));
    const int repeated = int(std::count_if(p.inputs.begin(), p.inputs.end(), [](const float* x) { return x; }));
    for (int t = 0; t < s.num_tokens; ++t) store.write(m.plan.slots[size_t(t)], s.tokens[t]);
    store.make_room(int(p.sequences.size()), int(wishes.size()) - inputs, inputs + repeated);
    keep();
    lay_out_buffers();
    return true;
  }

  void lay_out_buffers() {
    const MixerSizes& z = store.sizes;
    const size_t nodes = size_t(p.num_nodes());
    p.convolved.resize(nodes * size_t(round_up(z.channels(), kLanes)) + kLanes);
    p.coefficients.resize(nodes * size_t(2 * z.of.heads));
    int most = 0;
    for (const auto& q : p.sequences) most = std::max(most, q.tree ? q.count : 0);
    p.scratch.resize(size_t(std::max(int(p.scratch.size()), s.threads)));
    for (auto& own : p.scratch) own.resize(std::max(own.size(), size_t(most + 1) * z.block()));
  }
};

}  // namespace

bool plan_states(OutriderModel& m, const StepArgs& s) {
  if (!m.states.sizes.layers) return true;
  if (s.begun) return set_error("a pass over recurrent layers starts from tokens");
  return Planner(m, s).run();
}

namespace {

// Computes at most kReplayed lost tokens of a sequence again, after its nearest state.
int32_t replay(OutriderModel& m, const StepArgs& s, int seq) {
  int done = s.context[seq];
  while (done > 0 && !m.states.has(slot_at(m, s, seq, done - 1))) --done;
  const int n = std::min(s.context[seq] - done, kReplayed);
  std::vector<int32_t> packed;
  for (int i = 0; i < n; ++i) packed.push_back(m.states.token(slot_at(m, s, seq, done + i)));
  for (int i = 0; i < n; ++i) packed.push_back(done + i);
  packed.insert(packed.end(), {0, n, done});
  const int32_t* table = s.tables + int64_t(seq) * s.table_width;
  packed.insert(packed.end(), table, table + s.table_width);
  OutriderStep part{};
  part.num_tokens = n, part.num_seqs = 1, part.table_width = s.table_width;
  part.exit_layer = -1, part.threads = s.threads;
  m.states.replayed += n;
  return run_locked(m, {packed.data(), part});
}

}  // namespace

int32_t restore_states(OutriderModel& m, const StepArgs& s) {
  if (!m.states.sizes.layers) return OUTRIDER_OK;
  // A pass that computes lost tokens keeps so many states, and must leave what others start from.
  m.states.make_room(s.num_seqs, s.num_seqs, 0, 4 + kReplayed / (m.states.stride() * m.block_size));
  for (int seq = 0; seq < s.num_seqs; ++seq) {
    if (s.starts[seq + 1] == s.starts[seq]) continue;
    while (first_repeated(m, s, seq) < 0) {
      for (int other = 0; other < s.num_seqs; ++other) {
        const int from = s.starts[other + 1] == s.starts[other] ? 0 : first_repeated(m, s, other);
        if (from > 0) m.states.state(slot_at(m, s, other, from - 1));  // a use: the oldest are evicted
      }
      if (const int32_t code = replay(m, s, seq)) return code;
    }
  }
  return OUTRIDER_OK;
}

}  // namespace outrider

extern "C" int64_t outrider_states(OutriderModel* m, int32_t what, int32_t slot) {
  std::lock_guard<std::mutex> lock(m->mutex);
  outrider::StateStore& store = m->states;
  if (!store.sizes.layers) return 1;
  if (what == OUTRIDER_STATES_REPLAYED) return store.replayed;
  if (what == OUTRIDER_STATES_POISON) return store.poison = true;
  if (what == OUTRIDER_STATES_FORGET) return store.forget(), 1;
  return slot >= 0 && slot < m->num_blocks * m->block_size && store.has(slot);
}
