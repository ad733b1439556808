// The state of one pass, shared by its threads.
#pragma once

#include "plan.h"
#include "pool.h"

namespace outrider {

// A step being run: the caller's arguments, threads already clamped.
struct Step {
  OutriderModel* m;
  StepArgs s;
};

// Runs the passes of a job, with room for `rows` rows over `length` slots.
int32_t run_job(OutriderModel& model, const StepArgs& step, int rows, int length, Job job,
                void* context);

// Thread `thread`'s part of the pass that step.s and the model's plan describe.
void run_part(Step& step, Team& team, int thread);

// A whole pass; the caller holds the model's lock.
int32_t run_locked(OutriderModel& model, const StepArgs& step);

// Whether the rotary table covers every position, and `extra` more (or null).
bool rope_reaches(const OutriderModel& model, const StepArgs& step, const int32_t* extra);

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
