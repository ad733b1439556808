#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace outrider {
namespace {

constexpr int kSpins = 4000;   // roughly 50-150 microseconds
constexpr int kYields = 50;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The number of sleeping threads: waking costs nothing if it is zero.
std::atomic<int> sleepers{0};

struct Pool {
  std::mutex mutex;               // held while a job runs
  std::atomic<uint32_t> epoch{0};
  std::atomic<uint32_t> left{0};  // helpers still inside the job
  Job job = nullptr;
  void* context = nullptr;
  Team* team = nullptr;
  int helpers = 0;
  Team::Share shares[2 * kMaxThreads];
};

struct Helper {
  Pool* pool;
  int index;  // 1, 2, ...
  uint32_t seen;
};

void* help(void* argument) {
  Helper h = *static_cast<Helper*>(argument);
  delete static_cast<Helper*>(argument);
  for (;;) {
    wait_for_change(h.pool->epoch, h.seen);
    h.seen = h.pool->epoch.load(std::memory_order_acquire);
    if (h.index < h.pool->team->size()) {
      h.pool->job(h.pool->context, *h.pool->team, h.index);
    }
    if (h.pool->left.fetch_sub(1) == 1) wake_all(h.pool->left);
  }
  return nullptr;
}

std::atomic<Pool*> the_pool{nullptr};
pthread_once_t fork_once = PTHREAD_ONCE_INIT;

// The child of a fork has none of the threads; it starts its own pool when it needs one. It does
// not touch the old pool, whose lock may stay held forever.
void after_fork() {
  the_pool.store(nullptr);
  sleepers.store(0);
}

Pool* pool() {
  pthread_once(&fork_once, [] { pthread_atfork(nullptr, nullptr, after_fork); });
  Pool* p = the_pool.load();
  if (!p) {
    Pool* fresh = new Pool;
    if (the_pool.compare_exchange_strong(p, fresh)) return fresh;
    delete fresh;
  }
  return p;
}

// Starts helpers until there are `wanted`; returns their number.
int grow(Pool* p, int wanted) {
  while (p->helpers < wanted) {
    Helper* h = new Helper{p, p->helpers + 1, p->epoch.load()};
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    const int failed = pthread_create(&thread, &attributes, help, h);
    pthread_attr_destroy(&attributes);
    if (failed) {
      delete h;
      break;
    }
    ++p->helpers;
  }
  return p->helpers;
}

}  // namespace

void wait_for_change(const std::atomic<uint32_t>& word, uint32_t value) {
  for (int i = 0; i < kSpins; ++i) {
    if (word.load(std::memory_order_acquire) != value) return;
    relax();
  }
  for (int i = 0; i < kYields; ++i) {
    if (word.load(std::memory_order_acquire) != value) return;
    sched_yield();
  }
  sleepers.fetch_add(1);
  while (word.load() == value) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value,
            nullptr, nullptr, 0);
#else
    const timespec pause = {0, 50000};
    nanosleep(&pause, nullptr);
#endif
  }
  sleepers.fetch_sub(1);
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  if (sleepers.load()) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
            nullptr, 0);
  }
#else
  (void)word;
#endif
}

void Team::sync() {
  if (size_ == 1) {
    for (int i = 0; i < 2; ++i) shares_[i].taken.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t phase = phase_.value.load(std::memory_order_relaxed);
  if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(size_)) {
    for (int t = 0; t < size_; ++t) {
      shares_[phase % 2 * size_ + t].taken.store(0, std::memory_order_relaxed);
    }
    arrived_.value.store(0, std::memory_order_relaxed);
    phase_.value.store(phase + 1);
    wake_all(phase_.value);
  } else {
    wait_for_change(phase_.value, phase);
  }
}

int Team::next_task(int thread, int num_tasks) {
  Share* queue = shares_ + phase_.value.load(std::memory_order_relaxed) % 2 * size_;
  for (int i = 0; i < size_; ++i) {
    const int owner = (thread + i) % size_;
    const int first = int(int64_t(num_tasks) * owner / size_);
    const int count = int(int64_t(num_tasks) * (owner + 1) / size_) - first;
    if (queue[owner].taken.load(std::memory_order_relaxed) >= count) continue;
    const int n = queue[owner].taken.fetch_add(1, std::memory_order_relaxed);
    if (n < count) return first + n;
  }
  return -1;
}

int Team::probably_after(int thread, int task, int num_tasks) const {
  const int first = int(int64_t(num_tasks) * thread / size_);
  const int end = int(int64_t(num_tasks) * (thread + 1) / size_);
  return task >= first && task + 1 < end ? task + 1 : -1;
}

int available_cores() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? int(n) : 1;
}

void run_alone(Job job, void* context) {
  Team::Share shares[2];
  Team team(1, shares);
  job(context, team, 0);
}

void run_on_pool(int threads, Job job, void* context) {
  threads = threads < 1 ? 1 : threads > kMaxThreads ? kMaxThreads : threads;
  Pool* p = pool();
  std::lock_guard<std::mutex> lock(p->mutex);
  const int helpers = threads > 1 ? grow(p, threads - 1) : 0;
  Team team(helpers + 1 < threads ? helpers + 1 : threads, p->shares);
  if (team.size() == 1) {
    job(context, team, 0);
    return;
  }
  p->job = job;
  p->context = context;
  p->team = &team;
  p->left.store(uint32_t(p->helpers));
  p->epoch.fetch_add(1);
  wake_all(p->epoch);
  job(context, team, 0);
  for (;;) {
    const uint32_t left = p->left.load(std::memory_order_acquire);
    if (left == 0) break;
    wait_for_change(p->left, left);
  }
}

}  // namespace outrider
