#pragma once

#include "model.h"

namespace outrider {

// A step with its arrays found.
struct StepArgs : OutriderStep {
  const int32_t *tokens, *positions, *starts, *context, *tables, *logit_rows, *parents;
  const float* states = nullptr;  // [num_tokens][hidden]: residual inputs instead of features
  bool keys_only = false;         // DFlash: make keys and values of the features, nothing else
  bool whole = false;             // DFlash: every new token sees all new ones of its sequence
  // A tree that grows over several passes: what earlier ones wrote behind the context of each
  // sequence, and the parents of these and the new nodes, among themselves.
  const int32_t* fed = nullptr;             // [num_seqs]
  const int32_t* const* lineage = nullptr;  // [num_seqs] -> [fed + new]
  StepArgs() = default;
  StepArgs(const int32_t* packed, const OutriderStep& step);  // sizes must not be negative
};

// Whether the sizes are such that `packed` can be taken apart; sets an error otherwise.
bool sizes_make_sense(const OutriderStep& step);

// Validates `step` and fills model.plan; false with an error set. `extra` (or null): slots per
// sequence that drafting will use beyond the step's own tokens.
bool make_plan(OutriderModel& model, const StepArgs& step, const int32_t* extra);

}  // namespace outrider
