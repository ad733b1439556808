// Drafting: the step, a draw, and round again, without leaving the parallel region.
#include <algorithm>

#include "noise.h"
#include "step.h"

namespace outrider {
namespace {

struct Drawn {
  float value;
  int32_t token;
};

struct DraftArgs : OutriderDraft {
  const uint64_t* key;
  const float* temperature;
  const int32_t* num_tokens;
  DraftArgs(const void* packed, int num_seqs, const OutriderDraft& d)
      : OutriderDraft(d),
        key(static_cast<const uint64_t*>(packed)),
        temperature(reinterpret_cast<const float*>(key + num_seqs)),
        num_tokens(reinterpret_cast<const int32_t*>(temperature + num_seqs)) {}
};

struct Draft {
  Step step;
  const DraftArgs* d;
  bool failed = false;
  int round = 0, rounds = 0, chunks = 1;
  std::vector<int32_t> tokens, positions, starts, context, rows, active;  // active: seq of a row
  std::vector<int32_t> next_position;                                     // [S]
  std::vector<float> logits;
  std::vector<Drawn> drawn;                                               // [rows][chunks]
};

// The best token of one piece of the vocabulary.
Drawn draw(const Kernels& k, const float* x, int n, int base, float temperature, uint64_t key) {
  Drawn d;
  d.token = base + k.argmax(x, n, &d.value);
  if (temperature > 0) {
    const float z = temperature == 1.0f ? d.value : d.value / temperature;
    d.value = z + gumbel_from_uniform(uniform(key, uint64_t(d.token)));
    d.token = k.gumbel_argmax(x, n, base, temperature, -__builtin_inff(), key, d.token, &d.value);
  }
  return d;
}

void draw_rows(Draft& f, Team& team, int thread) {
  const OutriderModel& m = *f.step.m;
  const int rows = f.step.s.num_rows, n = m.config.num_tokens;
  for (int t; (t = team.next_task(thread, rows * f.chunks)) >= 0;) {
    const int row = t / f.chunks, chunk = t % f.chunks, seq = f.active[size_t(row)];
    const int from = int(int64_t(n) * chunk / f.chunks), to = int(int64_t(n) * (chunk + 1) / f.chunks);
    const uint64_t key = mix(f.d->key[seq] + uint64_t(int64_t(f.next_position[size_t(seq)])));
    f.drawn[size_t(t)] = draw(*m.kernels, f.step.s.logits + size_t(row) * m.config.vocab + from,
                              to - from, from, f.d->temperature[seq], key);
  }
}

// Notes the drawn tokens and makes them the next step's input. One thread, others wait.
void feed_back(Draft& f) {
  StepArgs& s = f.step.s;
  std::vector<int32_t> drawn(size_t(s.num_seqs), -1);
  for (int row = 0; row < s.num_rows; ++row) {
    Drawn best = f.drawn[size_t(row) * f.chunks];
    for (int c = 1; c < f.chunks; ++c) {  // ties go to the lower token, i.e. the earlier chunk
      const Drawn& other = f.drawn[size_t(row) * f.chunks + c];
      if (other.value > best.value) best = other;
    }
    const int seq = f.active[size_t(row)];
    drawn[size_t(seq)] = best.token;
    f.d->out[int64_t(seq) * f.d->out_width + f.round] = best.token;
  }
  ++f.round;
  if (f.round == f.rounds) return;
  for (int i = 0; i < s.num_seqs; ++i) f.context[size_t(i)] += s.starts[i + 1] - s.starts[i];
  f.tokens.clear();
  f.positions.clear();
  f.rows.clear();
  f.active.clear();
  for (int i = 0; i < s.num_seqs; ++i) {
    f.starts[size_t(i)] = int32_t(f.tokens.size());
    if (drawn[size_t(i)] < 0 || f.d->num_tokens[i] <= f.round) continue;
    f.rows.push_back(int32_t(f.tokens.size()));
    f.active.push_back(i);
    f.tokens.push_back(drawn[size_t(i)]);
    f.positions.push_back(f.next_position[size_t(i)]++);
  }
  f.starts[size_t(s.num_seqs)] = int32_t(f.tokens.size());
  s.tokens = f.tokens.data();
  s.positions = f.positions.data();
  s.starts = f.starts.data();
  s.context = f.context.data();
  s.logit_rows = f.rows.data();
  s.num_tokens = s.num_rows = int32_t(f.tokens.size());
  s.parents = nullptr;
  s.num_taps = 0;
  f.failed = !make_plan(*f.step.m, s, nullptr);
}

void draft_job(void* context, Team& team, int thread) {
  Draft& f = *static_cast<Draft*>(context);
  for (;;) {
    run_part(f.step, team, thread);
    if (f.rounds == 0) return;
    team.sync();
    draw_rows(f, team, thread);
    team.sync();
    if (thread == 0) feed_back(f);
    team.sync();
    if (f.failed || f.round == f.rounds) return;
  }
}

int32_t run_draft(OutriderModel& m, const StepArgs& given, const DraftArgs& d) {
  std::lock_guard<std::mutex> lock(m.mutex);
  Draft f;
  f.d = &d;
  f.step.m = &m;
  StepArgs& s = f.step.s;
  s = given;
  s.threads = std::clamp(s.threads, 1, kMaxThreads);
  s.num_taps = 0;
  s.num_rows = 0;
  std::vector<int32_t> extra(size_t(std::max(0, s.num_seqs)));
  for (size_t i = 0; i < extra.size(); ++i) {
    if (d.num_tokens[i] > d.out_width) return set_error("out is too narrow"), OUTRIDER_INVALID;
    extra[i] = std::max(0, d.num_tokens[i] - 1);
    f.rounds = std::max(f.rounds, d.num_tokens[i]);
    if (!(d.temperature[i] >= 0)) return set_error("negative temperature"), OUTRIDER_INVALID;
  }
  if (!make_plan(m, s, extra.data())) return OUTRIDER_INVALID;
  if (!rope_reaches(m, s, extra.data())) return OUTRIDER_ROPE_SHORT;
  if (m.plan.tree) return set_error("a draft continues a chain, not a tree"), OUTRIDER_INVALID;
  int longest = 0;
  for (int i = 0; i < s.num_seqs; ++i) {
    longest = std::max(longest, extra[size_t(i)]);
    const int last = s.starts[i + 1] - 1;
    f.next_position.push_back(last >= s.starts[i] ? s.positions[last] + 1 : 0);
    if (d.num_tokens[i] <= 0) continue;
    if (last < s.starts[i]) {
      return set_error("a sequence that drafts needs a token to start from"), OUTRIDER_INVALID;
    }
    f.rows.push_back(last);
    f.active.push_back(i);
  }
  if (s.num_tokens == 0) return OUTRIDER_OK;
  const int length = m.plan.max_length + longest;
  s.num_rows = int32_t(f.rows.size());
  s.logit_rows = f.rows.data();
  if (!make_plan(m, s, extra.data())) return OUTRIDER_INVALID;
  f.logits.resize(size_t(s.num_rows) * m.config.vocab);
  s.logits = f.logits.data();
  f.chunks = s.num_rows >= s.threads || m.config.num_tokens < 2048 ? 1 : s.threads;
  f.drawn.resize(size_t(s.num_rows) * f.chunks);
  f.context.assign(s.context, s.context + s.num_seqs);
  f.starts.resize(size_t(s.num_seqs) + 1);
  if (!lay_out(m, s.threads, std::max(s.num_tokens, s.num_seqs), length)) return OUTRIDER_MEMORY;
  run_on_pool(s.threads, draft_job, &f);
  return f.failed ? OUTRIDER_INVALID : OUTRIDER_OK;
}

}  // namespace
}  // namespace outrider

extern "C" int32_t outrider_draft(OutriderModel* m, const int32_t* packed, const OutriderStep* s,
                                  const void* draft_packed, const OutriderDraft* d) {
  if (!outrider::sizes_make_sense(*s)) return OUTRIDER_INVALID;
  return outrider::guarded([&] {
    return outrider::run_draft(*m, {packed, *s}, {draft_packed, s->num_seqs, *d});
  });
}
