// Drawing tokens from finished rows of logits.
#include <algorithm>

#include "noise.h"
#include "step.h"

namespace outrider {
namespace {

struct Sampling {
  const OutriderSample* s;
  const Kernels* k;
  float* scratch;
};

void sample_job(void* context, Team& team, int thread) {
  const Sampling& job = *static_cast<Sampling*>(context);
  const OutriderSample& s = *job.s;
  const int n = s.num_tokens;
  float* scratch = job.scratch + size_t(thread) * 5 * (size_t(n) + 16);
  for (int r; (r = team.next_task(thread, s.num_rows)) >= 0;) {
    const float* x = s.logits + size_t(r) * s.vocab;
    float best;
    int token = job.k->argmax(x, n, &best);
    const float t = s.temperature[r];
    if (t > 0) {
      const float floor = job.k->floor(x, n, t, s.top_k ? s.top_k[r] : 0,
                                       s.top_p ? s.top_p[r] : 1.0f, s.min_p ? s.min_p[r] : 0.0f,
                                       scratch);
      best = (t == 1.0f ? best : best / t) +
             gumbel_from_uniform(uniform(s.key[r], uint64_t(token)));
      token = job.k->gumbel_argmax(x, n, 0, t, floor, s.key[r], token, &best);
    }
    s.out[r] = token;
  }
}

int32_t run_sample(const OutriderSample& s) {
  const Kernels* k = kernels_or_error();
  if (!k) return OUTRIDER_INVALID;
  if (s.num_rows < 0 || s.vocab < 1 || s.num_tokens < 1 || s.num_tokens > s.vocab)
    return set_error("rows, vocabulary or number of tokens out of range"), OUTRIDER_INVALID;
  bool filtered = false;
  for (int r = 0; r < s.num_rows; ++r) {
    if (!(s.temperature[r] >= 0)) return set_error("negative temperature"), OUTRIDER_INVALID;
    filtered = filtered || (s.top_k && s.top_k[r] > 0) || (s.top_p && s.top_p[r] < 1) ||
               (s.min_p && s.min_p[r] > 0);
  }
  // Waking the pool costs more than a few small rows.
  const bool alone = int64_t(s.num_rows) * s.num_tokens < 65536;
  const int threads = alone ? 1 : std::clamp(s.threads, 1, std::min(kMaxThreads, s.num_rows));
  static thread_local std::vector<float> scratch;
  const size_t need = filtered ? size_t(threads) * 5 * (size_t(s.num_tokens) + 16) : 0;
  if (scratch.size() < need) scratch.resize(need);
  Sampling job{&s, k, scratch.data()};
  if (threads == 1) {
    Team team(1);
    sample_job(&job, team, 0);
  } else {
    run_on_pool(threads, sample_job, &job);
  }
  return OUTRIDER_OK;
}

}  // namespace
}  // namespace outrider

extern "C" {

int32_t outrider_sample(const OutriderSample* s) {
  return outrider::guarded([&] { return outrider::run_sample(*s); });
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
