#pragma once

#include "model.h"

namespace outrider {

// A step with its arrays found.
struct StepArgs : OutriderStep {
  const int32_t *tokens, *positions, *starts, *context, *tables, *logit_rows, *parents;
  StepArgs() = default;
  StepArgs(const int32_t* packed, const OutriderStep& step);  // sizes must not be negative
};

// Whether the sizes are such that `packed` can be taken apart; sets an error otherwise.
bool sizes_make_sense(const OutriderStep& step);

// Validates `step` and fills model.plan; false with an error set. `extra` (or null): slots per
// sequence that drafting will use beyond the step's own tokens.
bool make_plan(OutriderModel& model, const StepArgs& step, const int32_t* extra);

}  // namespace outrider
