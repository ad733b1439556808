// Grows a tree of drafts, best nodes first: repeats a pass and the choice of children.
//
// The score of a node is the sum, along its path, of the log probabilities that each token is the
// target's draw. A child never scores above its parent, so a node that is not among the best so
// far, or is the last of them, needs no children. Slots of earlier passes stay valid: a pass feeds
// new nodes only.
#include <algorithm>
#include <numeric>

#include "draft.h"

namespace outrider {
namespace {

struct Tree {
  int limit = 0;
  std::vector<int32_t> tokens, parents, depth, fed_as;  // by node; fed_as: -1 not yet
  std::vector<float> score;
  std::vector<int32_t> fed, lineage;   // nodes in the order they were fed, their parents among these
  std::vector<float> states;           // EAGLE-3: [1 + fed][hidden], of the root first

  std::vector<int32_t> best() const {
    std::vector<int32_t> order(tokens.size());
    std::iota(order.begin(), order.end(), 0);
    const size_t size = std::min(order.size(), size_t(limit));
    std::partial_sort(order.begin(), order.begin() + ptrdiff_t(size), order.end(),
                      [&](int a, int b) { return score[size_t(a)] != score[size_t(b)]
                                                 ? score[size_t(a)] > score[size_t(b)] : a < b; });
    order.resize(size);
    return order;
  }
};

struct Guess {
  float score;
  int32_t token;
};

struct Growth : Drafting {
  const OutriderTree& d;
  int pass = 0;
  bool done = false;
  std::vector<Tree> trees;                 // [S]
  std::vector<int32_t> nodes;              // node of each row in flight
  std::vector<int32_t> fed;                // [S], before this pass
  std::vector<const int32_t*> lineages;    // [S]
  std::vector<Guess> guesses;              // [rows][children]
  std::vector<std::vector<float>> noisy;   // of each thread
  Growth(OutriderModel& m, const StepArgs& s, const DraftParams& p, const OutriderTree& given)
      : Drafting(m, s, p), d(given) {}
};

void guess_rows(Growth& f, Team& team, int thread) {
  const OutriderModel& m = *f.step.m;
  const Kernels& k = *m.kernels;
  const int n = m.config.num_tokens;
  float* noisy = f.noisy[size_t(thread)].data();
  for (int t; (t = team.next_task(thread, int(f.active.size()))) >= 0;) {
    const int seq = f.active[size_t(t)], node = f.nodes[size_t(t)];
    const int depth = node < 0 ? 0 : f.trees[size_t(seq)].depth[size_t(node)];
    const float* x = f.step.s.logits + size_t(t) * m.config.vocab;
    const float all = k.noisy(x, n, f.params.temperature[seq], f.floor(x, seq, thread),
                              f.draw_key(seq, depth), noisy);
    for (int c = 0; c < f.d.children; ++c) {
      Guess& g = f.guesses[size_t(t) * f.d.children + c];
      g.token = k.argmax(noisy, n, &g.score);
      noisy[g.token] = -__builtin_inff();
      g.score -= all;  // NaN or -inf if no token is left
    }
  }
}

// Adds the children and lays out the next pass; returns whether there is none. One thread.
void grow_on(Growth& f) {
  StepArgs& s = f.step.s;
  const OutriderModel& m = *f.step.m;
  const int hidden = m.config.kind ? m.config.hidden : 0;
  for (size_t row = 0; row < f.active.size(); ++row) {
    Tree& tree = f.trees[size_t(f.active[row])];
    const int node = f.nodes[row];
    if (hidden) f.append_state(tree.states, m.plan.head_rows[row]);
    for (int c = 0; c < f.d.children; ++c) {
      const Guess& g = f.guesses[row * f.d.children + c];
      if (!(g.score > -__builtin_inff())) break;
      tree.tokens.push_back(g.token);
      tree.parents.push_back(node);
      tree.depth.push_back(node < 0 ? 1 : tree.depth[size_t(node)] + 1);
      tree.score.push_back(g.score + (node < 0 ? 0.0f : tree.score[size_t(node)]));
      tree.fed_as.push_back(-1);
    }
  }
  if (f.pass == 0)
    for (int i = 0; i < s.num_seqs; ++i) f.context[size_t(i)] += s.starts[i + 1] - s.starts[i];
  f.tokens.clear();
  f.positions.clear();
  f.rows.clear();
  f.active.clear();
  f.nodes.clear();
  f.states.clear();
  if (++f.pass < f.d.passes) {
    for (int i = 0; i < s.num_seqs; ++i) {
      Tree& tree = f.trees[size_t(i)];
      f.starts[size_t(i)] = int32_t(f.tokens.size());
      f.fed[size_t(i)] = int32_t(tree.fed.size());
      const auto best = tree.best();
      int width = 0;
      for (size_t b = 0; int(b) + 1 < tree.limit && b < best.size() && width < f.d.width; ++b) {
        const int node = best[b], parent = tree.parents[size_t(node)];
        if (tree.fed_as[size_t(node)] >= 0 || tree.depth[size_t(node)] >= f.d.passes) continue;
        const int above = parent < 0 ? -1 : tree.fed_as[size_t(parent)];
        tree.fed_as[size_t(node)] = int32_t(tree.fed.size());
        tree.fed.push_back(node);
        tree.lineage.push_back(above);
        f.rows.push_back(int32_t(f.tokens.size()));
        f.active.push_back(i);
        f.nodes.push_back(node);
        f.tokens.push_back(tree.tokens[size_t(node)]);
        f.positions.push_back(f.next_position[size_t(i)] + tree.depth[size_t(node)] - 1);
        if (hidden) {
          const float* state = tree.states.data() + size_t(above + 1) * hidden;
          f.states.insert(f.states.end(), state, state + hidden);
        }
        ++width;
      }
      f.lineages[size_t(i)] = tree.lineage.data();
    }
    f.starts[size_t(s.num_seqs)] = int32_t(f.tokens.size());
  }
  f.done = f.active.empty();
  if (f.done) return;
  s.fed = f.fed.data();
  s.lineage = f.lineages.data();
  f.plan();
}

void grow_job(void* context, Team& team, int thread) {
  Growth& f = *static_cast<Growth*>(context);
  for (;;) {
    run_part(f.step, team, thread);
    team.sync();
    guess_rows(f, team, thread);
    team.sync();
    if (thread == 0) grow_on(f);
    team.sync();
    if (f.failed || f.done) return;
  }
}

void hand_over(const Growth& f) {
  const OutriderTree& d = f.d;
  for (size_t i = 0; i < f.trees.size(); ++i) {
    const Tree& tree = f.trees[i];
    auto chosen = tree.best();
    std::sort(chosen.begin(), chosen.end());
    std::vector<int32_t> place(tree.tokens.size(), -1);
    for (size_t c = 0; c < chosen.size(); ++c) {
      const size_t node = size_t(chosen[c]), at = i * size_t(d.out_width) + c;
      place[node] = int32_t(c);
      d.tokens[at] = tree.tokens[node];
      d.parents[at] = tree.parents[node] < 0 ? -1 : place[size_t(tree.parents[node])];
    }
    d.counts[i] = int32_t(chosen.size());
    d.fed_counts[i] = int32_t(tree.fed.size());
    for (size_t j = 0; j < tree.fed.size(); ++j) {
      const size_t at = i * size_t(d.passes) * size_t(d.width) + j;
      d.fed_tokens[at] = tree.tokens[size_t(tree.fed[j])];
      d.fed_parents[at] = tree.lineage[j];
    }
  }
}

int32_t run_grow(OutriderModel& m, const StepArgs& given, const DraftParams& p,
                 const OutriderTree& d) {
  std::lock_guard<std::mutex> lock(m.mutex);
  if (m.is(OUTRIDER_DFLASH)) return set_error("DFlash drafts chains"), OUTRIDER_INVALID;
  if (d.passes < 1 || d.width < 1 || d.children < 1 || d.passes > 1024 || d.width > 1024 ||
      d.children > m.config.num_tokens)
    return set_error("passes, width or children out of range"), OUTRIDER_INVALID;
  Growth f(m, given, p, d);
  StepArgs& s = f.step.s;
  f.trees.resize(size_t(std::max(0, s.num_seqs)));
  std::vector<int32_t> extra(f.trees.size());
  for (size_t i = 0; i < extra.size(); ++i) {
    if (p.num_tokens[i] > d.out_width) return set_error("out is too narrow"), OUTRIDER_INVALID;
    f.trees[i].limit = std::max(0, p.num_tokens[i]);
    extra[i] = p.num_tokens[i] > 0 ? (d.passes - 1) * d.width : 0;
  }
  int length = 0;
  if (const int32_t code = f.begin(extra, &length)) return code;
  const size_t rows = f.active.size() * size_t(d.width);
  if (s.num_tokens && rows) {
    f.nodes.assign(f.active.size(), -1);
    f.fed.assign(extra.size(), 0);
    f.lineages.assign(extra.size(), nullptr);
    f.guesses.resize(rows * size_t(d.children));
    f.logits.resize(rows * m.config.vocab);
    s.logits = f.logits.data();
    f.noisy.resize(size_t(s.threads));
    for (auto& own : f.noisy) own.resize(size_t(m.config.num_tokens) + 16);
    const int most = std::max(s.num_tokens, int(rows));
    if (const int32_t code = run_job(m, s, most, length, grow_job, &f)) return code;
  }
  if (f.failed) return OUTRIDER_INVALID;
  hand_over(f);
  return OUTRIDER_OK;
}

}  // namespace
}  // namespace outrider

extern "C" int32_t outrider_grow(OutriderModel* m, const int32_t* packed, const OutriderStep* s,
                                 const void* draft_packed, const OutriderTree* d) {
  if (!outrider::sizes_make_sense(*s)) return OUTRIDER_INVALID;
  return outrider::guarded([&] {
    return outrider::run_grow(*m, {packed, *s}, {draft_packed, s->num_seqs}, *d);
  });
}
