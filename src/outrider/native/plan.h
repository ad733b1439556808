#pragma once

#include "model.h"

namespace outrider {

// The arrays of a step inside its packed argument.
struct StepArgs : OutriderStep {
  const int32_t *tokens, *positions, *starts, *context, *tables, *logit_rows, *parents;
  const float* states = nullptr;  // [num_tokens][hidden]: residual inputs instead of features
  bool keys_only = false;         // DFlash: compute only keys and values of the features
  bool whole = false;             // DFlash: every new token sees all new ones of its sequence
  // A tree that grows over several passes: the number of nodes that earlier passes wrote after the
  // context of each sequence, and the parents of all nodes, as indices among them.
  const int32_t* fed = nullptr;             // [num_seqs]
  const int32_t* const* lineage = nullptr;  // [num_seqs] -> [fed + new]
  StepArgs() = default;
  StepArgs(const int32_t* packed, const OutriderStep& step);  // sizes must not be negative
};

// Whether the sizes allow to split `packed` into arrays; sets an error otherwise.
bool sizes_make_sense(const OutriderStep& step);

// Validates `step` and fills model.plan; false with an error set. `extra` (or null): slots per
// sequence that drafting will use beyond the step's own tokens.
bool make_plan(OutriderModel& model, const StepArgs& step, const int32_t* extra);

}  // namespace outrider
