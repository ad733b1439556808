#pragma once

#include "model.h"

namespace outrider {

// Validates `step` and fills model.plan; false with an error set. `extra` (or null): slots per
// sequence that drafting will use beyond the step's own tokens.
bool make_plan(OutriderModel& model, const OutriderStep& step, const int32_t* extra);

}  // namespace outrider
