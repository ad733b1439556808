// Which experts a token goes to, and with which weights.
#pragma once

#include <vector>

#include "outrider.h"

namespace outrider {

// Chooses `experts.active` of `experts.count` experts by their scores, and their weights. A tie goes to
// the lower index. `scores` is overwritten; `choice_bias` may be null; `scratch` has `count` floats.
void choose_experts(const OutriderExperts& experts, float* scores, const float* choice_bias,
                    int32_t* chosen, float* weights, float* scratch);

// The union of the experts that a pass touches. An assignment is row * active + place.
struct Union {
  std::vector<int32_t> experts;      // those with at least one row, ascending
  std::vector<int32_t> starts;       // [experts + 1] into `assignments`
  std::vector<int32_t> assignments;  // expert by expert, rows ascending
  std::vector<int32_t> place_of;     // of each assignment: its index in `assignments`

  void build(const int32_t* chosen, int rows, int active, int count);
};

}  // namespace outrider
