// One pool of threads for the whole process, and the barrier that separates the phases of a step.
//
// Waiting threads spin for a moment, because phases last microseconds, then sleep in the kernel, so
// that an idle engine uses no processor time. A running step owns the pool; other steps wait.
#pragma once

#include <atomic>
#include <cstdint>

namespace outrider {

constexpr int kMaxThreads = 256;

// Waits until `word` differs from `value`.
void wait_for_change(const std::atomic<uint32_t>& word, uint32_t value);
void wake_all(std::atomic<uint32_t>& word);

class Team;
using Job = void (*)(void* context, Team& team, int thread);

// The threads of one running job.
class Team {
 public:
  struct alignas(64) Share {
    std::atomic<int32_t> taken;
  };
  // `shares` has room for two per thread and outlives the team.
  Team(int size, Share* shares) : size_(size), shares_(shares) {
    for (int i = 0; i < 2 * size; ++i) shares[i].taken.store(0, std::memory_order_relaxed);
  }
  int size() const { return size_; }

  // Ends a phase: waits for all threads, then continues. Also opens the next phase's queue.
  void sync();

  // The next task of this phase, or -1. Each thread first takes its own share in order, so that
  // it streams one region of memory, then tasks of other threads.
  int next_task(int thread, int num_tasks);
  // The task that follows `task` if the thread keeps to its own share, or -1.
  int probably_after(int thread, int task, int num_tasks) const;

 private:
  struct alignas(64) Word {
    std::atomic<uint32_t> value{0};
  };
  int size_;
  Share* shares_;  // [2][size]: the queues of even and odd phases
  Word arrived_, phase_;
};

// The number of cores that this process may use.
int available_cores();
// Runs job(context, team, 0) in the calling thread.
void run_alone(Job job, void* context);
// Runs job(context, team, t) for t in 0..threads-1; thread 0 is the caller.
void run_on_pool(int threads, Job job, void* context);

}  // namespace outrider
