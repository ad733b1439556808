// Drawing tokens from finished rows of logits.
#include <algorithm>

#include "noise.h"
#include "step.h"

namespace outrider {
namespace {

struct RowParameters {
  const uint64_t* key;
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
  RowParameters(const void* packed, int rows)
      : key(static_cast<const uint64_t*>(packed)),
        temperature(reinterpret_cast<const float*>(key + rows)),
        top_k(reinterpret_cast<const int32_t*>(temperature + rows)),
        top_p(reinterpret_cast<const float*>(top_k + rows)),
        min_p(top_p + rows) {}
};

struct Sampling {
  const OutriderSample* s;
  RowParameters p;
  const Kernels* k;
  float* scratch;
};

// The best guesses of a row: finds the best, removes it, and repeats.
void guess_job(void* context, Team& team, int thread) {
  const Sampling& job = *static_cast<Sampling*>(context);
  const OutriderSample& s = *job.s;
  const RowParameters& p = job.p;
  const int n = s.num_tokens;
  float* noisy = job.scratch + size_t(thread) * 6 * (size_t(n) + 16);
  for (int r; (r = team.next_task(thread, s.num_rows)) >= 0;) {
    const float* x = s.logits + size_t(r) * s.vocab;
    const float t = p.temperature[r];
    const float floor = t > 0 ? job.k->floor(x, n, t, p.top_k[r], p.top_p[r], p.min_p[r],
                                             noisy + n + 16)
                              : -__builtin_inff();
    const float all = job.k->noisy(x, n, t, floor, p.key[r], noisy);
    for (int c = 0; c < s.children; ++c) {
      float best;
      const int token = job.k->argmax(noisy, n, &best);
      const bool left = best > -__builtin_inff();
      s.out[size_t(r) * s.children + c] = left ? token : -1;
      s.scores[size_t(r) * s.children + c] = left ? best - all : -__builtin_inff();
      noisy[token] = -__builtin_inff();
    }
  }
}

void sample_job(void* context, Team& team, int thread) {
  const Sampling& job = *static_cast<Sampling*>(context);
  const OutriderSample& s = *job.s;
  const RowParameters& p = job.p;
  const int n = s.num_tokens;
  float* scratch = job.scratch + size_t(thread) * 6 * (size_t(n) + 16);
  for (int r; (r = team.next_task(thread, s.num_rows)) >= 0;) {
    const float* x = s.logits + size_t(r) * s.vocab;
    float best;
    int token = job.k->argmax(x, n, &best);
    const float t = p.temperature[r];
    if (t > 0) {
      const float floor =
          job.k->floor(x, n, t, p.top_k[r], p.top_p[r], p.min_p[r], scratch);
      best = (t == 1.0f ? best : best / t) +
             gumbel_from_uniform(uniform(p.key[r], uint64_t(token)));
      token = job.k->gumbel_argmax(x, n, 0, t, floor, p.key[r], token, &best);
    }
    int broken = 0;
    for (int i = 0; i < n; ++i) broken |= x[i] != x[i];
    s.out[r] = broken ? -1 : token;
  }
}

int32_t run_sample(const void* packed, const OutriderSample& s) {
  const Kernels* k = kernels_or_error();
  if (!k) return OUTRIDER_INVALID;
  const bool guess = s.scores != nullptr;
  if (s.num_rows < 0 || s.vocab < 1 || s.num_tokens < 1 || s.num_tokens > s.vocab ||
      (guess && (s.children < 1 || s.children > s.num_tokens)))
    return set_error("rows, vocabulary or number of tokens out of range"), OUTRIDER_INVALID;
  const RowParameters p(packed, s.num_rows);
  bool filtered = false;
  for (int r = 0; r < s.num_rows; ++r) {
    if (!(p.temperature[r] >= 0)) return set_error("negative temperature"), OUTRIDER_INVALID;
    filtered = filtered || p.top_k[r] > 0 || p.top_p[r] < 1 || p.min_p[r] > 0;
  }
  // Waking the pool costs more than a few small rows.
  const bool alone = int64_t(s.num_rows) * s.num_tokens < 65536;
  const int threads = alone ? 1 : std::clamp(s.threads, 1, std::min(kMaxThreads, s.num_rows));
  static thread_local std::vector<float> scratch;
  const size_t need =
      filtered || guess ? size_t(threads) * 6 * (size_t(s.num_tokens) + 16) : 0;
  if (scratch.size() < need) scratch.resize(need);
  Sampling job{&s, p, k, scratch.data()};
  if (threads == 1) {
    run_alone(guess ? guess_job : sample_job, &job);
  } else {
    run_on_pool(threads, guess ? guess_job : sample_job, &job);
  }
  return OUTRIDER_OK;
}

struct Reading {
  const Kernels* k;
  const float* data;
  int64_t count;
  float sums[kMaxThreads];
};

void read_job(void* context, Team& team, int thread) {
  auto& job = *static_cast<Reading*>(context);
  const int64_t part = job.count / team.size();
  job.sums[thread] = job.k->read(job.data + part * thread, part);
}

}  // namespace
}  // namespace outrider

extern "C" {

float outrider_read(const float* data, int64_t count, int32_t threads) {
  outrider::Reading job{outrider::kernels_or_error(), data, count, {}};
  if (!job.k || count < 0) return 0;
  outrider::run_on_pool(threads, outrider::read_job, &job);
  float sum = 0;
  for (float s : job.sums) sum += s;
  return sum;
}

int32_t outrider_sample(const void* packed, const OutriderSample* s) {
  return outrider::guarded([&] { return outrider::run_sample(packed, *s); });
}

int32_t outrider_noise(uint64_t key, int32_t size, float* u, float* g) {
  for (int32_t i = 0; i < size; ++i) {
    const float x = outrider::uniform(key, uint64_t(i));
    if (u) u[i] = x;
    if (g) g[i] = outrider::gumbel_from_uniform(x);
  }
  return OUTRIDER_OK;
}

}  // extern "C"
