// What a recurrent layer computes besides its products, node by node (see StatePlan).
#pragma once

#include <algorithm>
#include <cmath>

#include "model.h"

namespace outrider {

class Mixing {
 public:
  Mixing(OutriderModel& m, const Layer& layer)
      : m_(m), layer_(layer), k_(*m.kernels), z_(m.states.sizes), p_(m.state_plan),
        state_at_(size_t(layer.state) * z_.state()), inputs_at_(size_t(layer.state) * z_.inputs()),
        ldc_(round_up(z_.channels(), kLanes)) {}

  // The convolution of a node's channels, silu, and the coefficients of its heads.
  void convolve(int node) {
    const OutriderMixer& of = z_.of;
    const int channels = z_.channels();
    float* out = p_.convolved.data() + ptrdiff_t(node) * ldc_;
    if (layer_.convolution_bias.empty()) {
      std::fill(out, out + ldc_, 0.0f);
    } else {
      std::copy(layer_.convolution_bias.begin(), layer_.convolution_bias.end(), out);
      std::fill(out + channels, out + ldc_, 0.0f);
    }
    for (int back = of.width - 1; back >= 0; --back) {
      const float* in = before(node, back);
      if (!in) continue;  // the text begins later
      const float* weight = layer_.convolution.data() + ptrdiff_t(of.width - 1 - back) * channels;
      for (int i = 0; i < channels; ++i) out[i] += weight[i] * in[i];
    }
    k_.activate(OUTRIDER_SILU, out, nullptr, ldc_, out);
    if (of.delta) {
      for (int i = 0; i < 2 * of.groups; ++i) {
        float* head = out + i * of.rows;
        k_.rms_norm(head, m_.unit_weight[i >= of.groups].data(), of.rows, 1e-6f / float(of.rows), head);
      }
    }
    coefficients(extras(node), p_.coefficients.data() + size_t(node) * size_t(2 * of.heads));
  }

  void recur(const StatePlan::Sequence& q, int head, float* scratch) {
    const OutriderMixer& of = z_.of;
    const float* first = p_.convolved.data() + ptrdiff_t(q.first) * ldc_;
    const int group = head / (of.heads / of.groups), shared = z_.shared();
    Recurrence r{};
    r.delta = of.delta, r.rows = of.rows, r.outputs = of.outputs;
    r.count = q.count, r.skip = q.skip;
    r.parents = q.tree ? p_.parents.data() + q.first : nullptr;
    r.offset = state_at_ + z_.tail() + size_t(head) * z_.head();
    r.start = q.start ? q.start + r.offset : nullptr;
    const float* in = first + (of.delta ? shared : z_.inner());
    r.x = first + (of.delta ? 2 * shared : 0) + head * of.outputs;
    r.in = in + group * of.rows;
    r.out = (of.delta ? first : in + shared) + group * of.rows;
    r.ld = ldc_;
    r.decay = p_.coefficients.data() + size_t(q.first) * size_t(2 * of.heads) + head;
    r.strength = r.decay + of.heads;
    r.ldd = 2 * of.heads;
    r.y = m_.buffers.mixed + q.row * m_.buffers.ldmixed + head * of.outputs;
    r.ldy = m_.buffers.ldmixed;
    r.saves = p_.saves.data() + q.first_save;
    r.num_saves = q.num_saves;
    r.scratch = scratch;
    k_.recur(r);
  }

  // The last inputs of the convolution, which are a part of each state.
  void save_tails(const StatePlan::Sequence& q) {
    const size_t channels = size_t(z_.channels());
    for (int i = q.first_save; i < q.first_save + q.num_saves; ++i) {
      const SavedState& save = p_.saves[size_t(i)];
      float* tail = save.row + state_at_;
      for (int k = 0; k < z_.before(); ++k, tail += channels) {
        const float* in = before(q.first + save.node, z_.before() - 1 - k);
        if (in) {
          std::copy(in, in + channels, tail);
        } else {
          std::fill(tail, tail + channels, 0.0f);
        }
      }
    }
  }

  void keep_inputs(const StatePlan::Kept& kept) {
    float* to = kept.to + inputs_at_;
    to = std::copy(channels(kept.node), channels(kept.node) + z_.channels(), to);
    std::copy(extras(kept.node), extras(kept.node) + z_.extras(), to);
  }

  // Adds the skip, normalises and gates one row.
  void finish(int row) {
    const OutriderMixer& of = z_.of;
    const int inner = z_.inner(), width = of.norm_groups ? inner / of.norm_groups : inner;
    float* y = m_.buffers.mixed + row * m_.buffers.ldmixed;
    float* gate = m_.buffers.mix + row * m_.buffers.ldmix + z_.gate_at();
    if (!layer_.skip.empty()) {
      const float* x = p_.convolved.data() + ptrdiff_t(node_of(row)) * ldc_;
      for (int h = 0; h < of.heads; ++h)
        for (int i = h * of.outputs; i < (h + 1) * of.outputs; ++i) y[i] += layer_.skip[size_t(h)] * x[i];
    }
    if (!of.norm_first) multiply(gate, y, inner);
    const float eps = of.eps > 0 ? of.eps : m_.config.eps;
    for (int g = 0; g < of.norm_groups; ++g)
      k_.rms_norm(y + g * width, layer_.state_norm.data() + g * width, width, eps, y + g * width);
    if (of.norm_first) multiply(gate, y, inner);
  }

 private:
  // y *= silu(gate), or sigmoid(gate); both have room up to a multiple of sixteen.
  void multiply(const float* gate, float* y, int n) {
    for (int i = 0; z_.of.sigmoid_gate && i < n; ++i) y[i] *= 1.0f / (1.0f + std::exp(-gate[i]));
    if (z_.of.sigmoid_gate) return;
    const int whole = n / kLanes * kLanes;
    k_.silu_mul(gate, y, whole, y);
    if (whole == n) return;
    float a[kLanes] = {}, b[kLanes] = {};
    std::copy(gate + whole, gate + n, a);
    std::copy(y + whole, y + n, b);
    k_.silu_mul(a, b, kLanes, b);
    std::copy(b, b + n - whole, y + whole);
  }

  const StatePlan::Sequence& sequence_of(int node) const {
    return p_.sequences[size_t(p_.owners[size_t(node)])];
  }

  int row_of(int node) const {
    const StatePlan::Sequence& q = sequence_of(node);
    return q.row + node - q.first - q.skip;
  }

  int node_of(int row) const {
    size_t i = 0;
    while (i + 1 < p_.sequences.size() && p_.sequences[i + 1].row <= row) ++i;
    const StatePlan::Sequence& q = p_.sequences[i];
    return q.first + q.skip + row - q.row;
  }

  const float* product(int node) const {
    return m_.buffers.mix + ptrdiff_t(row_of(node)) * m_.buffers.ldmix;
  }

  const float* channels(int node) const {
    const float* kept = p_.inputs[size_t(node)];
    return kept ? kept + inputs_at_ : product(node) + z_.channels_at();
  }

  const float* extras(int node) const {
    const float* kept = p_.inputs[size_t(node)];
    return kept ? kept + inputs_at_ + z_.channels() : product(node) + z_.extras_at();
  }

  // The channels of the ancestor `back` nodes before a node; null: the text begins later.
  const float* before(int node, int back) const {
    const StatePlan::Sequence& q = sequence_of(node);
    int at = node - q.first;
    for (; back > 0 && at >= 0; --back) at = p_.parents[size_t(q.first + at)];
    if (at >= 0) return channels(q.first + at);
    if (!q.start) return nullptr;
    return q.start + state_at_ + ptrdiff_t(z_.before() - 1 - back) * z_.channels();
  }

  static float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

  void coefficients(const float* from, float* decay) const {
    const OutriderMixer& of = z_.of;
    float* strength = decay + of.heads;
    const float most = of.most_strength > 0 ? of.most_strength : 1.0f;
    for (int h = 0; h < of.heads; ++h) {
      float step = softplus(from[of.delta ? of.heads + h : h] + layer_.step_bias[size_t(h)]);
      if (!of.delta) step = std::min(std::max(step, of.least_step), of.most_step);
      decay[h] = std::exp(step * layer_.rate[size_t(h)]);
      strength[h] = of.delta ? most / (1.0f + std::exp(-from[h])) : step;
    }
  }

  OutriderModel& m_;
  const Layer& layer_;
  const Kernels& k_;
  const MixerSizes& z_;
  StatePlan& p_;
  size_t state_at_, inputs_at_;
  int ldc_;
};

}  // namespace outrider
