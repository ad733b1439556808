// Drafts chains: repeats a pass and a draw inside one parallel region.
#include "draft.h"

#include <algorithm>
#include <numeric>

namespace outrider {

void Drafting::keep_states() {
  const StepArgs& s = step.s;
  const OutriderModel& m = *step.m;
  tapped.resize(size_t(std::max(s.num_tokens, s.num_seqs)) * m.config.hidden);
  tap_layer = s.exit_layer < 0 ? m.config.layers : s.exit_layer;
  tap_out = tapped.data();
}

int32_t Drafting::begin(const std::vector<int32_t>& extra, int* length) {
  OutriderModel& m = *step.m;
  StepArgs& s = step.s;
  if (!s.features != !m.config.kind) return set_error("features are for heads"), OUTRIDER_INVALID;
  if (m.is(OUTRIDER_MEDUSA)) return set_error("Medusa has nothing to feed"), OUTRIDER_INVALID;
  s.threads = std::clamp(s.threads, 1, kMaxThreads);
  s.num_taps = tap_out ? 1 : 0;
  s.taps = &tap_layer;
  s.tap_out = &tap_out;
  s.start_layer = 0;
  s.begun = nullptr;
  s.num_rows = 0;
  bool filters = false;
  for (int i = 0; i < s.num_seqs; ++i) {
    if (!(params.temperature[i] >= 0)) return set_error("negative temperature"), OUTRIDER_INVALID;
    filters = filters || params.filters(i);
  }
  if (!make_plan(m, s, extra.data())) return OUTRIDER_INVALID;
  if (!rope_reaches(m, s, extra.data())) return OUTRIDER_ROPE_SHORT;
  if (m.plan.tree) return set_error("a draft continues a chain, not a tree"), OUTRIDER_INVALID;
  int longest = 0;
  for (int i = 0; i < s.num_seqs; ++i) {
    longest = std::max(longest, extra[size_t(i)]);
    const int last = s.starts[i + 1] - 1;
    next_position.push_back(last >= s.starts[i] ? s.positions[last] + 1 : 0);
    if (params.num_tokens[i] <= 0) continue;
    if (last < s.starts[i]) {
      return set_error("a sequence that drafts needs a token to start from"), OUTRIDER_INVALID;
    }
    rows.push_back(last);
    active.push_back(i);
  }
  first_position = next_position;
  *length = m.plan.max_length + longest;
  context.assign(s.context, s.context + s.num_seqs);
  starts.resize(size_t(s.num_seqs) + 1);
  if (filters) {
    scratch.resize(size_t(s.threads));
    for (auto& own : scratch) own.resize(5 * (size_t(m.config.num_tokens) + 16));
  }
  s.num_rows = int32_t(rows.size());
  s.logit_rows = rows.data();
  if (const int32_t code = restore_states(m, s)) return code;
  // The states after all drafts: each of them may be where the next draft begins.
  m.states.make_room(std::accumulate(extra.begin(), extra.end(), 2 * s.num_seqs), 0, 0);
  return make_plan(m, s, extra.data()) && plan_states(m, s) ? OUTRIDER_OK : OUTRIDER_INVALID;
}

float Drafting::floor(const float* x, int seq, int thread) {
  if (!params.filters(seq)) return -__builtin_inff();
  return step.m->kernels->floor(x, step.m->config.num_tokens, params.temperature[seq],
                                params.top_k[seq], params.top_p[seq], params.min_p[seq],
                                scratch[size_t(thread)].data());
}

bool Drafting::plan() {
  StepArgs& s = step.s;
  s.tokens = tokens.data();
  s.positions = positions.data();
  s.starts = starts.data();
  s.context = context.data();
  s.logit_rows = rows.data();
  s.num_tokens = int32_t(tokens.size());
  s.num_rows = int32_t(rows.size());
  s.parents = nullptr;
  s.states = states.empty() ? nullptr : states.data();
  failed = !make_plan(*step.m, s, nullptr) || !plan_states(*step.m, s);
  return !failed;
}

namespace {

struct Drawn {
  float value;
  int32_t token;
  float second;  // the runner-up's value, if needed
};

struct Chain : Drafting {
  const OutriderDraft& d;
  int round = 0, rounds = 0, chunks = 1;
  std::vector<Drawn> drawn;  // [rows][chunks]
  std::vector<int32_t> limits;  // [S]: the most tokens to draft; fewer after a stop
  std::vector<float> chances;   // [S]: the probability that the whole chain is accepted
  int taken = 0;                // drafts of all sequences
  // DFlash: the logits of all places, [active][rounds], and the input of the next bias.
  std::vector<float> places, previous;
  Chain(OutriderModel& m, const StepArgs& s, const DraftParams& p, const OutriderDraft& given)
      : Drafting(m, s, p),
        d(given),
        limits(p.num_tokens, p.num_tokens + s.num_seqs),
        chances(size_t(s.num_seqs), 1.0f) {}

  bool has_rules() const { return d.stop_rules.chances; }
  float floor_now() const {
    const OutriderStopRules& c = d.stop_rules;
    return c.num_floors ? c.floors[std::min(taken, c.num_floors - 1)] : 0.0f;
  }
};

// The best token of one part of the vocabulary, and the second value if needed.
Drawn draw(const Kernels& k, const float* x, int n, int base, float temperature, float floor,
           uint64_t key, bool second) {
  Drawn d;
  d.second = -__builtin_inff();
  d.token = base + k.argmax(x, n, &d.value);
  if (temperature > 0) {
    const float z = temperature == 1.0f ? d.value : d.value / temperature;
    d.value = z + gumbel_from_uniform(uniform(key, uint64_t(d.token)));
    d.token = k.gumbel_argmax(x, n, base, temperature, floor, key, d.token, &d.value);
  }
  const int at = d.token - base;
  const int from[] = {0, at + 1}, size[] = {at, n - at - 1};
  for (int side = 0; second && side < 2; ++side) {
    if (size[side] <= 0) continue;
    float best = -__builtin_inff();
    if (temperature > 0) {
      k.gumbel_argmax(x + from[side], size[side], base + from[side], temperature, floor, key, -1,
                      &best);
    } else {
      k.argmax(x + from[side], size[side], &best);
    }
    d.second = std::max(d.second, best);
  }
  return d;
}

int32_t level_of(const Drawn& d) {
  const float level = (d.value - d.second) / OUTRIDER_LEVEL_STEP;
  if (!(level > 0)) return 0;
  return level < OUTRIDER_LEVELS - 1 ? int32_t(level) : OUTRIDER_LEVELS - 1;
}

void draw_rows(Chain& f, Team& team, int thread) {
  const OutriderModel& m = *f.step.m;
  const int rows = int(f.active.size()), n = m.config.num_tokens;
  for (int t; (t = team.next_task(thread, rows * f.chunks)) >= 0;) {
    const int row = t / f.chunks, chunk = t % f.chunks, seq = f.active[size_t(row)];
    const int from = int(int64_t(n) * chunk / f.chunks), to = int(int64_t(n) * (chunk + 1) / f.chunks);
    const float* x = f.step.s.logits + size_t(row) * m.config.vocab;
    f.drawn[size_t(t)] = draw(*m.kernels, x + from, to - from, from, f.params.temperature[seq],
                              f.floor(x, seq, thread), f.draw_key(seq, f.round),
                              f.has_rules());
  }
}

// Whether a drawn token becomes a draft; sets `limits` at the end of a chain.
bool is_taken(Chain& f, const Drawn& token, int seq) {
  const int level = level_of(token);
  f.d.levels[int64_t(seq) * f.d.out_width + f.round] = level;
  f.d.drawn[seq] = f.round + 1;
  float& chance = f.chances[size_t(seq)];
  chance *= f.d.stop_rules.chances[seq * OUTRIDER_LEVELS + level];
  if (chance < f.floor_now()) return f.limits[size_t(seq)] = f.round, false;
  f.d.counts[seq] = f.round + 1;
  ++f.taken;
  if (f.d.stop_rules.num_floors && chance < f.floor_now() + f.d.stop_rules.toll / float(f.active.size()))
    f.limits[size_t(seq)] = f.round + 1;
  return true;
}

// Records the drawn tokens; returns those of each sequence, -1 for none.
std::vector<int32_t> note(Chain& f) {
  std::vector<int32_t> drawn(size_t(f.step.s.num_seqs), -1);
  for (size_t row = 0; row < f.active.size(); ++row) {
    Drawn best = f.drawn[row * f.chunks];
    for (int c = 1; c < f.chunks; ++c) {  // ties go to the lower token, i.e. the earlier chunk
      Drawn other = f.drawn[row * f.chunks + c];
      if (other.value > best.value) std::swap(best, other);
      best.second = std::max(best.second, other.value);
    }
    const int seq = f.active[row];
    if (f.has_rules() && !is_taken(f, best, seq)) continue;
    drawn[size_t(seq)] = best.token;
    f.d.out[int64_t(seq) * f.d.out_width + f.round] = best.token;
  }
  ++f.round;
  return drawn;
}

// Copies the states of each sequence's last row.
void keep(Chain& f) {
  const StepArgs& s = f.step.s;
  const size_t hidden = size_t(f.step.m->config.hidden), width = size_t(f.d.out_width) + 1;
  for (int i = 0; i < s.num_seqs; ++i) {
    if (s.starts[i + 1] == s.starts[i]) continue;
    const float* row = f.tapped.data() + size_t(s.starts[i + 1] - 1) * hidden;
    std::copy(row, row + hidden, f.d.states + (size_t(i) * width + size_t(f.round)) * hidden);
  }
}

// Makes the drawn tokens the input of the next step. One thread; the others wait.
void feed_back(Chain& f) {
  StepArgs& s = f.step.s;
  const OutriderModel& m = *f.step.m;
  const std::vector<int32_t> drawn = note(f);
  if (f.has_rules())
    f.rounds = std::min(f.rounds, *std::max_element(f.limits.begin(), f.limits.end()));
  if (f.round >= f.rounds && !f.d.states) return;
  const std::vector<int32_t> before = m.plan.head_rows;
  std::vector<int32_t> active;
  for (int i = 0; i < s.num_seqs; ++i) f.context[size_t(i)] += s.starts[i + 1] - s.starts[i];
  f.tokens.clear();
  f.positions.clear();
  f.rows.clear();
  f.states.clear();
  for (size_t row = 0; row < f.active.size(); ++row) {
    const int seq = f.active[row];
    if (f.limits[size_t(seq)] <= f.round) continue;
    active.push_back(seq);
    if (m.config.kind) f.append_state(f.states, before[row]);
  }
  f.active = active;
  for (int i = 0; i < s.num_seqs; ++i) {
    f.starts[size_t(i)] = int32_t(f.tokens.size());
    const bool goes_on = f.limits[size_t(i)] > f.round;
    if (drawn[size_t(i)] < 0 || !(goes_on || f.d.states)) continue;
    if (goes_on) f.rows.push_back(int32_t(f.tokens.size()));
    f.tokens.push_back(drawn[size_t(i)]);
    f.positions.push_back(f.next_position[size_t(i)]++);
  }
  f.starts[size_t(s.num_seqs)] = int32_t(f.tokens.size());
  f.plan();
}

void draft_job(void* context, Team& team, int thread) {
  Chain& f = *static_cast<Chain*>(context);
  for (;;) {
    run_part(f.step, team, thread);
    if (f.rounds == 0) return;
    team.sync();
    if (f.d.states && thread == 0) keep(f);
    if (f.round == f.rounds) return;  // this pass only computes the last states
    draw_rows(f, team, thread);
    team.sync();
    if (thread == 0) feed_back(f);
    team.sync();
    if (f.failed || (f.round >= f.rounds && !f.d.states)) return;
  }
}

// The places of a DFlash block; the first of them guesses nothing, unless it guesses after itself.
int block_places(const Chain& f) {
  return f.d.out_width + (f.step.m->varies(OUTRIDER_FROM_ANCHOR) ? 0 : 1);
}

// DFlash: keys and values of the features are stored; drafts the blocks one after another.
void lay_blocks(Chain& f) {
  StepArgs& s = f.step.s;
  f.tokens.clear();
  f.positions.clear();
  f.rows.clear();
  std::vector<int32_t> first(f.active.size());
  for (size_t i = 0; i < f.active.size(); ++i)
    first[i] = s.tokens[s.starts[f.active[i] + 1] - 1];  // the last committed token
  for (int i = 0; i < s.num_seqs; ++i) f.context[size_t(i)] += s.starts[i + 1] - s.starts[i];
  for (int i = 0, next = 0; i < s.num_seqs; ++i) {
    f.starts[size_t(i)] = int32_t(f.tokens.size());
    if (next == int(f.active.size()) || f.active[size_t(next)] != i) continue;
    const int skipped = block_places(f) - f.d.out_width;
    for (int place = 0; place < block_places(f); ++place) {
      if (place >= skipped && place < skipped + f.rounds)
        f.rows.push_back(int32_t(f.tokens.size()));
      f.tokens.push_back(place ? f.d.mask_token : first[size_t(next)]);
      f.positions.push_back(f.next_position[size_t(i)] + place);
    }
    ++next;
  }
  f.starts[size_t(s.num_seqs)] = int32_t(f.tokens.size());
  f.previous.resize(f.active.size() * size_t(f.step.m->config.markov_rank));
  f.drawn.assign(f.active.size(), {0, 0, 0});
  for (size_t i = 0; i < first.size(); ++i) f.drawn[i].token = first[i];
  s.keys_only = false;
  s.whole = true;
  s.logits = f.places.data();
  f.plan();
}

// Adds the bias of the previously drawn token to the logits of place `round`.
void bias_places(Chain& f, Team& team, int thread) {
  OutriderModel& m = *f.step.m;
  const int rank = m.config.markov_rank, rows = int(f.active.size());
  const Matrix& w = m.markov_head;
  Rows x;
  x.rows = rows;
  x.f = f.previous.data();
  x.ld = rank;
  float* c = m.buffers.own[size_t(thread)].c;
  constexpr int kUnit = 4;
  for (int t; (t = team.next_task(thread, rank ? (w.panels + kUnit - 1) / kUnit : 0)) >= 0;) {
    const int first = t * kUnit, panels = std::min(kUnit, w.panels - first);
    m.kernels->gemm(w, x, first, panels, c, kUnit * kLanes);
    const int width = std::min(panels * kLanes, m.config.head_rows - first * kLanes);
    for (int r = 0; r < rows; ++r) {
      float* row = f.places.data() + (size_t(r) * f.rounds + f.round) * m.config.vocab;
      const float* bias = c + r * kUnit * kLanes;
      if (m.ids.empty()) {
        m.kernels->add(row + first * kLanes, bias, width);
      } else {
        for (int i = 0; i < width; ++i) row[m.ids[size_t(first * kLanes + i)]] += bias[i];
      }
    }
  }
}

void block_job(void* context, Team& team, int thread) {
  Chain& f = *static_cast<Chain*>(context);
  const OutriderModel& m = *f.step.m;
  const int rank = m.config.markov_rank, n = m.config.num_tokens;
  run_part(f.step, team, thread);
  team.sync();
  if (thread == 0) lay_blocks(f);
  team.sync();
  if (f.failed) return;
  run_part(f.step, team, thread);
  for (;;) {
    if (thread == 0) {
      for (size_t i = 0; rank && i < f.drawn.size(); ++i) {
        const float* row = m.markov_embed.data() + size_t(f.drawn[i].token) * rank;
        std::copy(row, row + rank, f.previous.begin() + ptrdiff_t(i) * rank);
      }
    }
    team.sync();
    bias_places(f, team, thread);
    team.sync();
    for (int t; (t = team.next_task(thread, int(f.active.size()))) >= 0;) {
      const int seq = f.active[size_t(t)];
      const float* x = f.places.data() + (size_t(t) * f.rounds + f.round) * m.config.vocab;
      f.drawn[size_t(t)] = draw(*m.kernels, x, n, 0, f.params.temperature[seq],
                                f.floor(x, seq, thread), f.draw_key(seq, f.round), false);
    }
    team.sync();
    if (thread == 0) note(f);
    team.sync();
    if (f.round == f.rounds) return;
  }
}

int32_t run_draft(OutriderModel& m, const StepArgs& given, const DraftParams& p,
                  const OutriderDraft& d) {
  std::lock_guard<std::mutex> lock(m.mutex);
  Chain f(m, given, p, d);
  StepArgs& s = f.step.s;
  const bool blocks = m.is(OUTRIDER_DFLASH);
  if (blocks && (d.mask_token < 0 || d.mask_token >= m.config.vocab))
    return set_error("no such mask token"), OUTRIDER_INVALID;
  std::vector<int32_t> extra(size_t(std::max(0, s.num_seqs)));
  for (size_t i = 0; i < extra.size(); ++i) {
    if (p.num_tokens[i] > d.out_width) return set_error("out is too narrow"), OUTRIDER_INVALID;
    extra[i] = blocks ? block_places(f) : std::max(0, p.num_tokens[i] - (d.states ? 0 : 1));
    f.rounds = std::max(f.rounds, p.num_tokens[i]);
  }
  if (d.stop_rules.chances && (blocks || d.states))
    return set_error("stop rules are for plain chains"), OUTRIDER_INVALID;
  for (int i = 0; d.stop_rules.chances && i < s.num_seqs; ++i) d.drawn[i] = d.counts[i] = 0;
  if (d.states) {
    if (m.config.kind) return set_error("heads keep no states"), OUTRIDER_INVALID;
    f.keep_states();
  }
  s.keys_only = blocks;
  int length = 0;
  if (const int32_t code = f.begin(extra, &length)) return code;
  if (s.num_tokens == 0) return OUTRIDER_OK;
  const size_t rows = f.active.size();
  const bool filters = !f.scratch.empty();  // filters need whole rows
  f.chunks = blocks || filters || int(rows) >= s.threads || m.config.num_tokens < 2048 ? 1 : s.threads;
  f.drawn.resize(rows * size_t(f.chunks));
  f.logits.resize(blocks ? 0 : rows * m.config.vocab);
  f.places.resize(blocks ? rows * f.rounds * m.config.vocab : 0);
  s.logits = f.logits.data();
  const int most = blocks ? int(rows) * block_places(f) : s.num_seqs;
  if (const int32_t code = run_job(m, s, std::max(s.num_tokens, most), length,
                                   blocks && f.rounds ? block_job : draft_job, &f))
    return code;
  return f.failed ? OUTRIDER_INVALID : OUTRIDER_OK;
}

}  // namespace
}  // namespace outrider

extern "C" int32_t outrider_draft(OutriderModel* m, const int32_t* packed, const OutriderStep* s,
                                  const void* draft_packed, const OutriderDraft* d) {
  if (!outrider::sizes_make_sense(*s)) return OUTRIDER_INVALID;
  return outrider::guarded([&] {
    return outrider::run_draft(*m, {packed, *s}, {draft_packed, s->num_seqs}, *d);
  });
}
