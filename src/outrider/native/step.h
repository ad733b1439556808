// The state of one pass, shared by its threads.
#pragma once

#include "plan.h"
#include "pool.h"

namespace outrider {

struct Buffers {
  float *x, *q, *att, *hidden;  // residual, queries, attention output, MLP activation
  float* norm;                  // prepared input of more than kSmall rows
  int8_t* quant;
  float* quant_scale;
  int32_t* quant_sum;
  ptrdiff_t ldx, ldq, ldatt, ldh, ldquant;
  int groups;                   // scale groups per row, at most
  struct Private {
    float *c, *attention, *norm;
    int8_t* quant;
    float* quant_scale;
    int32_t* quant_sum;
  };
  Private own[kMaxThreads];
};

// A step being run: the caller's arguments (threads already clamped) and where to put things.
struct Step {
  OutriderModel* m;
  OutriderStep s;
  Buffers b;
};

// Room for `rows` rows over `length` slots; false: out of memory.
bool lay_out(Step& step, int rows, int length);

// Thread `thread`'s part of the pass that step.s and the model's plan describe.
void run_part(Step& step, Team& team, int thread);

// Whether the rotary table reaches every position, and `extra` beyond (or null).
bool rope_reaches(const OutriderModel& model, const OutriderStep& step, const int32_t* extra);

template <class F>
int32_t guarded(F f) {
  try {
    return f();
  } catch (...) {
    set_error("not enough memory");
    return OUTRIDER_MEMORY;
  }
}

}  // namespace outrider
