// Shared by chains and growing trees: the parameters of a request, and its draws.
#pragma once

#include <vector>

#include "noise.h"
#include "step.h"

namespace outrider {

// The unpacked parameters of drafting; one entry per sequence.
struct DraftParams {
  const uint64_t* key;
  const float* temperature;
  const int32_t *num_tokens, *top_k;
  const float *top_p, *min_p;
  static constexpr size_t BYTES = 28;  // of a sequence
  DraftParams(const void* packed, int num_seqs)
      : key(static_cast<const uint64_t*>(packed)),
        temperature(reinterpret_cast<const float*>(key + num_seqs)),
        num_tokens(reinterpret_cast<const int32_t*>(temperature + num_seqs)),
        top_k(num_tokens + num_seqs),
        top_p(reinterpret_cast<const float*>(top_k + num_seqs)),
        min_p(top_p + num_seqs) {}
  bool filters(int seq) const {
    return temperature[seq] > 0 && (top_k[seq] > 0 || top_p[seq] < 1 || min_p[seq] > 0);
  }
};

// A draft in progress: the running step, with its own arrays from the second pass on.
struct Drafting {
  Step step;
  DraftParams params;
  bool failed = false;
  std::vector<int32_t> tokens, positions, starts, context, rows, active;  // active: seq of a row
  std::vector<int32_t> next_position;                                     // [S], to be fed
  std::vector<float> logits, states;
  std::vector<std::vector<float>> scratch;  // of each thread, if filters are used

  Drafting(OutriderModel& m, const StepArgs& s, const DraftParams& p) : step{&m, s}, params(p) {}

  // A decoder's states after its last layer here, for all rows of each pass; before `begin`.
  void keep_states();
  int32_t tap_layer = 0;
  float* tap_out = nullptr;
  std::vector<float> tapped;

  // Checks everything and builds the first plan; `extra`: additional slots of each sequence.
  // `length` becomes the longest possible length of a sequence.
  int32_t begin(const std::vector<int32_t>& extra, int* length);

  // The key of the draw after `depth` drafts. The last row of a head is one token earlier.
  uint64_t draw_key(int seq, int depth) const {
    const int next = first_position[size_t(seq)] + depth + (step.m->config.kind ? 1 : 0);
    return mix(params.key[seq] + uint64_t(int64_t(next)));
  }
  // The smallest scaled logit of a row that the filters of its sequence keep.
  float floor(const float* x, int seq, int thread);

  // Appends what the next row of a head reads: the state in row `row` of the pass.
  void append_state(std::vector<float>& to, int row) const {
    const OutriderModel& m = *step.m;
    const int n = m.config.hidden;
    const float* state = m.buffers.x + row * m.buffers.ldx;
    to.insert(to.end(), state, state + n);
    float* own = to.data() + to.size() - size_t(n);
    if (m.varies(OUTRIDER_FEEDS_NORMED))
      m.kernels->rms_norm(own, m.final_norm.data(), n, m.config.eps, own);
  }

  // Sets the step's pointers to the arrays above; false, with `failed` set, if sizes do not fit.
  bool plan();

 private:
  std::vector<int32_t> first_position;  // [S]
};

}  // namespace outrider
