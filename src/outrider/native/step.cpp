// A ragged pass in one parallel region: embedding, layers, head.
#include "step.h"

#include <algorithm>
#include <cmath>

#include "mixing.h"

namespace outrider {
namespace {

constexpr int kSmall = 16;  // up to this many rows, every thread prepares its own input
// The initial allocation: unused memory costs nothing, new memory costs time.
constexpr int kFirstRows = 256, kFirstLength = 2048;
constexpr float kOnes[kLanes] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// The weights of a norm; a null weight: no norm.
struct Norm {
  const float *weight, *bias;
  Norm(std::nullptr_t) : weight(nullptr), bias(nullptr) {}
  Norm(const std::vector<float>& w) : weight(w.data()), bias(nullptr) {}
  Norm(const std::vector<float>& w, const std::vector<float>& b)
      : weight(w.empty() ? nullptr : w.data()), bias(b.empty() ? nullptr : b.data()) {}
};

// Rows are padded so that a power-of-two width does not put all rows into the same cache sets.
ptrdiff_t padded(int n) { return round_up(n, 16) + 16; }

class Worker {
 public:
  Worker(Step& st, Team& team, int thread)
      : m_(*st.m), k_(*st.m->kernels), c_(st.m->config), p_(c_.parts), s_(st.s), b_(st.m->buffers),
        team_(team), thread_(thread), own_(st.m->buffers.own[size_t(thread)]) {}

  void run() {
    if (m_.is(OUTRIDER_MEDUSA)) return guess_ahead();
    if (s_.keys_only) return keys_of_features();
    if (s_.begun) {
      my_rows(s_.num_tokens, [&](int r) {
        memcpy(b_.x + r * b_.ldx, s_.begun + size_t(r) * c_.hidden, size_t(c_.hidden) * 4);
      });
    } else {
      embed();
    }
    if (m_.is(OUTRIDER_EAGLE3)) continue_from_features();
    team_.sync();
    if (m_.is(OUTRIDER_EAGLE3)) enter_layers();
    const int exit = s_.exit_layer < 0 ? c_.layers : s_.exit_layer;
    int rows = s_.num_tokens;
    tap(s_.start_layer);
    for (int l = s_.start_layer; l < exit; ++l) {
      const bool prune = m_.plan.prune && l + 1 == exit;
      const Layer& layer = m_.layers[size_t(l)];
      replace_residual(layer, 0, rows);
      if (layer.state >= 0) recurrent_layer(layer, rows);
      if (layer.width) {
        convolution_layer(l, rows);
      } else if (layer.attends) {
        attention_layer(l, rows, prune);
      }
      if (prune) rows = int(m_.plan.kept.size());
      scale_residual(layer, 0, rows);
      // Before the output products, the residual is what attention read.
      if (p_.parallel) inner_of_mlp(l, rows);
      if (layer.state >= 0) output_of_state(layer, rows);
      if (layer.attends) output_of_attention(l, rows);
      replace_residual(layer, 1, rows);
      if (layer.sparse()) {
        experts(l, rows);
      } else if (layer.inner) {
        if (!p_.parallel) inner_of_mlp(l, rows);
        scale_residual(layer, 1, rows);
        output_of_mlp(l, rows);
      }
      tap(l + 1);
    }
    logits();
  }

 private:
  template <class F>
  void my_rows(int rows, F f) {
    const int end = int(int64_t(rows) * (thread_ + 1) / team_.size());
    for (int r = int(int64_t(rows) * thread_ / team_.size()); r < end; ++r) f(r);
  }

  void embed() {
    const char* table = m_.embed;
    float* rows = m_.is(OUTRIDER_EAGLE3) ? b_.beside : b_.x;
    my_rows(s_.num_tokens, [&](int r) {
      float* x = rows + r * b_.ldx;
      const size_t at = size_t(s_.tokens[r]) * c_.hidden;
      if (m_.embedding) {
        unpack_row(*m_.embedding, s_.tokens[r], x);
      } else if (m_.embed_type == kF32) {
        memcpy(x, table + at * 4, size_t(c_.hidden) * 4);
      } else {
        for (int i = 0; i < c_.hidden; ++i) {
          uint16_t h;
          memcpy(&h, table + (at + size_t(i)) * 2, 2);
          x[i] = m_.embed_type == kBF16 ? bf16_to_float(h) : half_to_float(h);
        }
      }
      if (p_.embedding_scale != 0) scale(x, c_.hidden, p_.embedding_scale);
      if (p_.position_rows) {
        const size_t row = size_t(s_.positions[r] + p_.position_offset) * size_t(c_.hidden);
        k_.add(x, m_.positions.data() + row, c_.hidden);
      }
      if (!m_.embedding_norm.empty())
        normalise(x, {m_.embedding_norm, m_.embedding_norm_bias}, c_.hidden, x);
    });
  }

  static void scale(float* x, int n, float factor) {
    for (int i = 0; i < n; ++i) x[i] *= factor;
  }

  void normalise(const float* x, const Norm& norm, int n, float* out) const {
    if (p_.layer_norm) return k_.layer_norm(x, norm.weight, norm.bias, n, c_.eps, out);
    k_.rms_norm(x, norm.weight, n, c_.eps, out);
  }

  // Where a norm replaces the residual: what attention (`part` 0) or the MLP (1) reads.
  void replace_residual(const Layer& layer, int part, int rows) {
    if (layer.stays[part] == 0) return;
    const Norm norm(layer.standing[part], layer.standing_bias[part]);
    my_rows(rows, [&](int r) { normalise(b_.x + r * b_.ldx, norm, c_.hidden, b_.x + r * b_.ldx); });
    team_.sync();
  }

  // The same once it has been read, before anything is added.
  void scale_residual(const Layer& layer, int part, int rows) {
    const float factor = layer.stays[part];
    if (factor == 0 || factor == 1) return;
    my_rows(rows, [&](int r) { scale(b_.x + r * b_.ldx, c_.hidden, factor); });
    team_.sync();
  }

  // x = fc . features
  void fuse() {
    const Rows rows = prepare(m_.fc, s_.features, c_.feature_width, s_.num_tokens, nullptr);
    product(m_.fc, rows, unit_for(m_.fc, 1),
            [&](int row, int n, int panel, int panels, float* c, ptrdiff_t ldc) {
              const int first = panel * kLanes;
              const int width = std::min(panels * kLanes, c_.hidden - first);
              for (int r = 0; r < n; ++r)
                memcpy(b_.x + (row + r) * b_.ldx + first, c + r * ldc, size_t(width) * 4);
            });
  }

  void continue_from_features() {
    const bool fused = m_.varies(OUTRIDER_FUSED) || m_.varies(OUTRIDER_PROJECTS);
    if (!s_.states && !fused) return fuse();
    const float* from = s_.states ? s_.states : s_.features;
    my_rows(s_.num_tokens, [&](int r) {
      memcpy(b_.x + r * b_.ldx, from + size_t(r) * c_.hidden, size_t(c_.hidden) * 4);
    });
  }

  // What layer 0 adds to, where it is not the features themselves.
  void enter_layers() {
    if (m_.varies(OUTRIDER_PROJECTS)) {
      const Rows rows = prepare(m_.fc, b_.x, b_.ldx, s_.num_tokens, nullptr, nullptr, b_.beside);
      team_.sync();  // the product overwrites its input
      product(m_.fc, rows, unit_for(m_.fc, 1),
              [&](int row, int n, int panel, int panels, float* c, ptrdiff_t ldc) {
                const int first = panel * kLanes;
                const int width = std::min(panels * kLanes, c_.hidden - first);
                for (int r = 0; r < n; ++r) {
                  if (!m_.fc_bias.empty()) k_.add(c + r * ldc, m_.fc_bias.data() + first, width);
                  memcpy(b_.x + (row + r) * b_.ldx + first, c + r * ldc, size_t(width) * 4);
                }
              });
      team_.sync();
    } else if (m_.varies(OUTRIDER_NORM_RESIDUAL)) {
      my_rows(s_.num_tokens, [&](int r) {
        float* x = b_.x + r * b_.ldx;
        k_.rms_norm(x, m_.hidden_norm.data(), c_.hidden, c_.eps, x);
      });
      team_.sync();
    }
  }

  void keys_of_features() {
    fuse();
    team_.sync();
    my_rows(s_.num_tokens, [&](int r) {
      float* x = b_.x + r * b_.ldx;
      k_.rms_norm(x, m_.hidden_norm.data(), c_.hidden, c_.eps, x);
    });
    team_.sync();
    for (int l = 0; l < c_.layers; ++l) {
      Layer& layer = m_.layers[size_t(l)];
      make_heads(l, prepare(layer.qkv, b_.x, b_.ldx, s_.num_tokens, nullptr), c_.heads);
      team_.sync();
    }
  }

  // Medusa: every guess is a residual stream that starts with the target's last state.
  void guess_ahead() {
    const int n = s_.num_tokens, depth = s_.num_rows / n, blocks = c_.layers / c_.intermediate;
    const float* norm = m_.varies(OUTRIDER_AS_GIVEN) ? nullptr : m_.final_norm.data();
    my_rows(depth * n, [&](int r) {  // row d * n + s: guess d of sequence s
      put(s_.features + size_t(r % n) * c_.hidden, norm, c_.hidden, b_.x + r * b_.ldx);
    });
    team_.sync();
    float *from = b_.x, *to = b_.beside;
    for (int block = 0; block < blocks; ++block, std::swap(from, to)) {
      for (int d = 0; d < depth; ++d) {
        const Matrix& w = m_.layers[size_t(d * blocks + block)].o;
        const std::vector<float>& bias = m_.layers[size_t(d * blocks + block)].o_bias;
        const ptrdiff_t at = ptrdiff_t(d) * n * b_.ldx;
        product(w, prepare(w, from + at, b_.ldx, n, nullptr), unit_for(w, 1),
                [&](int row, int rows, int panel, int panels, float* c, ptrdiff_t ldc) {
                  for (int r = 0; r < rows; ++r) {
                    for (int p = 0; p < panels; ++p) {
                      const int first = (panel + p) * kLanes;
                      const int width = std::min(kLanes, c_.hidden - first);
                      float* out = to + at + (row + r) * b_.ldx + first;
                      if (!bias.empty()) k_.add(c + r * ldc + p * kLanes, bias.data() + first, width);
                      k_.silu_mul(c + r * ldc + p * kLanes, kOnes, kLanes, out);
                      k_.add(out, from + at + (row + r) * b_.ldx + first, width);
                    }
                  }
                });
        team_.sync();
      }
    }
    clear_logits();
    if (m_.heads.empty()) return write_logits(m_.head, prepare(m_.head, from, b_.ldx, depth * n, nullptr));
    const int first = std::max(0, s_.exit_layer);
    for (int d = 0; d < depth; ++d) {
      if (d) team_.sync();  // a phase has one product
      const Matrix& own = m_.heads[size_t(first + d)];
      write_logits(own, prepare(own, from + ptrdiff_t(d) * n * b_.ldx, b_.ldx, n, nullptr), d * n);
    }
  }

  void tap(int layer) {
    for (int i = 0; i < s_.num_taps; ++i) {
      if (s_.taps[i] != layer) continue;
      my_rows(s_.num_tokens, [&](int r) {
        memcpy(s_.tap_out[i] + size_t(r) * c_.hidden, b_.x + r * b_.ldx, size_t(c_.hidden) * 4);
      });
    }
  }

  // What matrices that are multiplied together read of their input.
  struct Input {
    const Matrix& w;  // the first of them
    bool blocks = false;
    Input(const Matrix& m) : w(m), blocks(is_packed(m.type)) {}
    Input(const Weights& m) : w(m.part[0]) {
      for (int i = 0; i < m.parts; ++i) blocks |= is_packed(m.part[i].type);
    }
  };

  // The rows of 8 bits that one row of activations becomes.
  int pieces_of(const Input& in) const { return in.blocks && m_.fine() ? 2 : 1; }

  // `norm` null: copies.
  void put(const float* x, const float* norm, int n, float* out) const {
    if (norm) return k_.rms_norm(x, norm, n, c_.eps, out);
    memcpy(out, x, size_t(n) * 4);
  }

  // The input of a product with `in.w`: rows of `x` (through `index` unless null), normalised unless
  // `norm` is null, quantised if the weights are integers, rounded if the model says so. Every
  // thread prepares few rows itself, which takes less time than a barrier.
  // `beside` puts rows of the embedding, normalised by `beside_norm`, before those of x.
  Rows prepare(const Input& in, const float* x, ptrdiff_t ld, int rows, const Norm& norm,
               const int32_t* index = nullptr, const float* beside = nullptr,
               const float* beside_norm = nullptr) {
    const Matrix& w = in.w;
    const bool integer = w.type == kI8 || w.type == kI4, rounds = c_.rounds && w.type == kBF16;
    const bool small = rows <= kSmall;
    const int pieces = pieces_of(in);
    Rows out;
    out.rows = rows;
    out.f = x;
    out.ld = ld;
    const bool copies = norm.weight || beside || (index && !integer && !in.blocks && !rounds);
    if (!copies && !integer && !in.blocks && !rounds) return out;
    float* f = small ? own_.norm : b_.norm;
    uint32_t* pairs = small ? own_.pairs : b_.pairs;
    int8_t* q = small ? own_.quant : b_.quant;
    float* scale = small ? own_.quant_scale : b_.quant_scale;
    int32_t* sum = small ? own_.quant_sum : b_.quant_sum;
    Block* blocks = small ? own_.blocks : b_.blocks;
    auto one = [&](int r) {
      const float* src = x + (index ? index[r] : r) * ld;
      if (copies) {
        float* dst = f + r * b_.ldnorm;
        if (beside) {
          put(beside + r * b_.ldx, beside_norm, c_.hidden, dst);
          put(src, norm.weight, c_.hidden, dst + c_.hidden);
        } else if (norm.weight) {
          normalise(src, norm, w.k, dst);
        } else {
          put(src, nullptr, w.k, dst);
        }
        for (int i = w.k; i < int(b_.ldnorm); ++i) dst[i] = 0;
        src = dst;
      }
      if (rounds) k_.round_pairs(src, w.k, pairs + r * b_.ldpairs);
      if (integer) {
        int8_t* dst = q + r * b_.ldquant;
        k_.quantize(src, w.k, w.group, dst, scale + ptrdiff_t(r) * w.groups,
                    sum + ptrdiff_t(r) * w.groups);
        for (int i = w.k; i < w.lines * values_per_line(w.type); ++i) dst[i] = 0;
      }
      if (in.blocks) {
        const int wide = round_up(w.k, 64);
        for (int i = 0; i < pieces; ++i) {
          const ptrdiff_t at = ptrdiff_t(r) * pieces + i;
          k_.quantize_blocks(i ? own_.rest : src, i ? wide : w.k, wide, q + at * b_.ldquant,
                             blocks + at * b_.ldblocks, i + 1 < pieces ? own_.rest : nullptr);
        }
      }
    };
    if (small) {
      for (int r = 0; r < rows; ++r) one(r);
    } else {
      my_rows(rows, one);
      team_.sync();
    }
    if (copies) out.f = f, out.ld = b_.ldnorm;
    if (rounds) out.pairs = pairs, out.ldp = b_.ldpairs;
    if (integer) out.q = q, out.ldq = b_.ldquant, out.scale = scale, out.sum = sum;
    if (in.blocks) out.q = q, out.ldq = b_.ldquant, out.blocks = blocks, out.ldb = b_.ldblocks;
    return out;
  }

  void multiply(const Matrix& w, const Rows& x, int first, int panels, float* c, ptrdiff_t ldc) {
    multiply_panels(k_, w, x, first, panels, c, ldc);
  }

  void multiply(const Weights& w, const Rows& x, int first, int panels, float* c, ptrdiff_t ldc) {
    if (w.take_turns) {
      for (int p = first; p < first + panels; ++p)
        multiply_panels(k_, w.part[p % 2], x, p / 2, 1, c + (p - first) * kLanes, ldc);
      return;
    }
    int i = 0;  // tasks do not cross parts: these are whole heads
    while (w.parts > 1 && first >= w.part[i].panels) first -= w.part[i++].panels;
    multiply_panels(k_, w.part[i], x, first, panels, c, ldc);
  }

  // c = x . w for the panels from `from` on, in tasks of `unit` panels; done(row, rows, panel,
  // panels, c, ldc).
  template <class W, class F>
  void product(const W& w, const Rows& x, int unit, F done, int from = 0) {
    const int tasks = (w.panels - from + unit - 1) / unit;
    const ptrdiff_t ldc = unit * kLanes, groups = Input(w).w.groups;
    const int pieces = pieces_of(w), most = kRowBlock / pieces;
    const int blocks = (x.rows + most - 1) / most;
    const int block = blocks > 1 ? round_up((x.rows + blocks - 1) / blocks, 12) : most;
    for (int t; (t = team_.next_task(thread_, tasks)) >= 0;) {
      const int first = from + t * unit, panels = std::min(unit, w.panels - first);
      for (int r = 0; r < x.rows; r += block) {
        Rows part = x;
        const int rows = std::min(block, x.rows - r);
        part.rows = rows * pieces;
        part.f = x.f + r * x.ld;
        if (x.pairs) part.pairs = x.pairs + r * x.ldp;
        if (x.q) part.q = x.q + r * pieces * x.ldq;
        if (x.scale) part.scale = x.scale + r * groups, part.sum = x.sum + r * groups;
        if (x.blocks) part.blocks = x.blocks + r * pieces * x.ldb;
        multiply(w, part, first, panels, own_.c, ldc);
        for (int i = 0; pieces == 2 && i < rows; ++i)
          add_pair(own_.c + 2 * i * ldc, ldc, panels * kLanes, own_.c + i * ldc);
        done(r, rows, first, panels, own_.c, ldc);
      }
    }
  }

  // out = the sum of two rows, of which it may be the first.
  static void add_pair(const float* two, ptrdiff_t ld, int n, float* out) {
    for (int i = 0; i < n; ++i) out[i] = two[i] + two[ld + i];
  }

  // As wide as possible, with enough tasks for all threads.
  template <class W>
  int unit_for(const W& w, int least) const {
    int unit = kMaxTask;
    while (unit > least && w.panels < unit * 4 * team_.size()) unit /= 2;
    return unit;
  }

  void attention_layer(int l, int rows, bool prune) {
    Layer& layer = m_.layers[size_t(l)];
    if (m_.joins_inputs(l)) {
      const Norm norm = m_.varies(OUTRIDER_NORM_RESIDUAL) ? Norm(nullptr) : Norm(m_.hidden_norm);
      make_heads(l, prepare(layer.qkv, b_.x, b_.ldx, rows, norm, nullptr, b_.beside,
                            layer.attention_norm.data()));
    } else if (p_.latent_kv) {
      make_latent_heads(l, layer, rows);
    } else {
      make_heads(l, prepare(layer.qkv, b_.x, b_.ldx, rows,
                            {layer.attention_norm, layer.attention_norm_bias}));
    }
    team_.sync();
    if (row_norms()) {
      my_rows(rows, [&](int r) { finish_row(l, layer, r); });
      team_.sync();
    }
    if (p_.gates_attention) {
      make_gate(layer, rows);
      team_.sync();
    }
    attend(l, layer, prune);
    team_.sync();
    if (!p_.gates_attention) return;
    const int kept = prune ? int(m_.plan.kept.size()) : rows, width = c_.heads * m_.value_dim();
    my_rows(kept, [&](int r) {
      const float* gate = b_.gate + (prune ? m_.plan.kept[size_t(r)] : r) * b_.ldatt;
      float* out = b_.att + r * b_.ldatt;
      for (int i = 0; i < width; ++i) out[i] *= 1.0f / (1.0f + std::exp(-gate[i]));
    });
    team_.sync();
  }

  // What scales the attention, before its sigmoid.
  void make_gate(const Layer& layer, int rows) {
    const Rows x = prepare(layer.o_gate, b_.x, b_.ldx, rows, {layer.attention_norm, layer.attention_norm_bias});
    store_product(layer.o_gate, x, layer.o_gate_bias, b_.gate, b_.ldatt);
  }

  // out = x . w + bias, whole rows.
  void store_product(const Matrix& w, const Rows& x, const std::vector<float>& bias, float* out, ptrdiff_t ld) {
    product(w, x, unit_for(w, 1),
            [&](int row, int n, int panel, int panels, float* c, ptrdiff_t ldc) {
              const int first = panel * kLanes, width = std::min(panels * kLanes, w.n - first);
              for (int r = 0; r < n; ++r) {
                if (!bias.empty()) k_.add(c + r * ldc, bias.data() + first, width);
                memcpy(out + (row + r) * ld + first, c + r * ldc, size_t(width) * 4);
              }
            });
  }

  // A selective scan or the delta rule; its result is in `mixed`.
  void recurrent_layer(const Layer& layer, int rows) {
    const Rows x = prepare(layer.state_in, b_.x, b_.ldx, rows, {layer.attention_norm, layer.attention_norm_bias});
    store_product(layer.state_in, x, layer.state_in_bias, b_.mix, b_.ldmix);
    team_.sync();
    Mixing mixing(m_, layer);
    StatePlan& p = m_.state_plan;
    my_rows(p.num_nodes(), [&](int node) { mixing.convolve(node); });
    team_.sync();
    const int heads = m_.states.sizes.of.heads, count = int(p.sequences.size()) * heads;
    float* scratch = p.scratch[size_t(thread_)].data();
    for (int t; (t = team_.next_task(thread_, count)) >= 0;)
      mixing.recur(p.sequences[size_t(t / heads)], t % heads, scratch);
    my_rows(int(p.sequences.size()), [&](int i) { mixing.save_tails(p.sequences[size_t(i)]); });
    my_rows(int(p.kept.size()), [&](int i) { mixing.keep_inputs(p.kept[size_t(i)]); });
    team_.sync();
    my_rows(rows, [&](int r) { mixing.finish(r); });
    team_.sync();
  }

  void output_of_state(const Layer& layer, int rows) {
    const Rows a = prepare(layer.state_out, b_.mixed, b_.ldmixed, rows, nullptr);
    add_product(layer.state_out, a, layer.state_out_bias, layer.attention_out_norm);
    team_.sync();
  }

  // C * convolution(B * x), in place of attention.
  void convolution_layer(int l, int rows) {
    Layer& layer = m_.layers[size_t(l)];
    const int hidden = c_.hidden;
    const Rows x = prepare(layer.qkv, b_.x, b_.ldx, rows, {layer.attention_norm, layer.attention_norm_bias});
    product(layer.qkv, x, unit_for(layer.qkv, 1),
            [&](int row, int n, int panel, int panels, float* c, ptrdiff_t ldc) {
              const int first = panel * kLanes, width = std::min(panels * kLanes, 3 * hidden - first);
              for (int r = 0; r < n; ++r) {
                if (!layer.mix_bias.empty()) k_.add(c + r * ldc, layer.mix_bias.data() + first, width);
                memcpy(b_.hidden + (row + r) * b_.ldh + first, c + r * ldc, size_t(width) * 4);
              }
            });
    team_.sync();
    my_rows(rows, [&](int r) {
      const float* b = b_.hidden + r * b_.ldh;
      float* in = m_.input(layer, m_.plan.slots[size_t(r)]);
      for (int i = 0; i < hidden; ++i) in[i] = b[i] * b[2 * hidden + i];
    });
    team_.sync();
    my_rows(rows, [&](int r) { convolve(layer, r); });
    team_.sync();
  }

  void convolve(const Layer& layer, int r) {
    const int hidden = c_.hidden, width = layer.width;
    int seq = 0;
    while (s_.starts[seq + 1] <= r) ++seq;
    float* out = b_.att + r * b_.ldatt;
    const float* c = b_.hidden + r * b_.ldh + hidden;
    if (layer.convolution_bias.empty()) {
      std::fill(out, out + hidden, 0.0f);
    } else {
      memcpy(out, layer.convolution_bias.data(), size_t(hidden) * 4);
    }
    for (int back = width - 1; back >= 0; --back) {
      const int slot = slot_before(seq, r, back);
      if (slot < 0) continue;  // the text begins later
      const float* in = m_.input(layer, slot);
      const float* weight = layer.convolution.data() + width - 1 - back;
      for (int i = 0; i < hidden; ++i) out[i] += weight[i * width] * in[i];
    }
    for (int i = 0; i < hidden; ++i) out[i] *= c[i];
  }

  // The physical slot of the token `back` tokens before that of row r on its path; -1: there is none.
  int slot_before(int seq, int r, int back) const {
    const Plan& p = m_.plan;
    int at = s_.context[seq] + (s_.fed ? s_.fed[seq] : 0) + r - s_.starts[seq] - back;
    if (p.tree && p.path[size_t(r)]) {
      const int depth = p.depth[size_t(r)];
      at = s_.context[seq] + (back < depth ? p.path[size_t(r)][depth - 1 - back] : depth - 1 - back);
    }
    if (at < 0) return -1;
    const int32_t* table = s_.tables + int64_t(seq) * s_.table_width;
    return table[at / m_.block_size] * m_.block_size + at % m_.block_size;
  }

  void output_of_attention(int l, int rows) {
    Layer& layer = m_.layers[size_t(l)];
    const Rows a = prepare(layer.o, b_.att, b_.ldatt, rows, nullptr);
    add_product(layer.o, a, layer.o_bias, layer.attention_out_norm);
    team_.sync();
  }

  // Queries, keys and values of the rows, from head `from` on.
  void make_heads(int l, const Rows& x, int from = 0) {
    heads_of(l, m_.layers[size_t(l)].qkv, x, 0, from);
  }

  // The heads that `w` makes of x: the first of them is head `first` of the layer.
  template <class W>
  void heads_of(int l, const W& w, const Rows& x, int first, int from = 0) {
    const Layer& layer = m_.layers[size_t(l)];
    const int unit = m_.dim_p / kLanes;
    product(w, x, unit,
            [&](int row, int n, int panel, int, float* c, ptrdiff_t ldc) {
              const int head = first + panel * kLanes / m_.dim_p;
              for (int r = 0; r < n; ++r) finish_head(l, layer, head, row + r, c + r * ldc);
            }, from * unit);
  }

  // Queries, keys and values by way of small vectors, which are normalised first.
  void make_latent_heads(int l, const Layer& layer, int rows) {
    constexpr float kEps = 1e-6f;  // whatever the other norms have
    const Rows x = prepare(layer.kv_a, b_.x, b_.ldx, rows, {layer.attention_norm});
    store_product(layer.kv_a, x, {}, b_.latent_kv, b_.ldlatent);
    team_.sync();
    if (p_.latent_q) {
      store_product(layer.q_a, x, {}, b_.latent_q, b_.ldlatent);
    } else {
      heads_of(l, layer.q_b, x, 0);
    }
    team_.sync();
    my_rows(rows, [&](int r) {
      float* kv = b_.latent_kv + r * b_.ldlatent;
      k_.rms_norm(kv, layer.kv_a_norm.data(), p_.latent_kv, kEps, kv);
      float* q = b_.latent_q + r * b_.ldlatent;
      if (p_.latent_q) k_.rms_norm(q, layer.q_a_norm.data(), p_.latent_q, kEps, q);
    });
    team_.sync();
    if (p_.latent_q) {
      heads_of(l, layer.q_b, prepare(layer.q_b, b_.latent_q, b_.ldlatent, rows, nullptr), 0);
      team_.sync();
    }
    heads_of(l, layer.kv_b, prepare(layer.kv_b, b_.latent_kv, b_.ldlatent, rows, nullptr), c_.heads);
  }

  // Adds x . w + bias to the residual, scaled and normalised as the model says.
  // `factors` (or null): of each row, `ldscores` apart.
  void add_product(const Matrix& w, const Rows& x, const std::vector<float>& bias,
                   const std::vector<float>& norm, const float* factors = nullptr) {
    const bool normed = !norm.empty();
    float* out = normed ? b_.added : b_.x;
    product(w, x, unit_for(w, 1),
            [&](int row, int n, int panel, int panels, float* c, ptrdiff_t ldc) {
              const int first = panel * kLanes;
              const int width = std::min(panels * kLanes, c_.hidden - first);
              for (int r = 0; r < n; ++r) {
                float* at = out + (row + r) * b_.ldx + first;
                if (!bias.empty()) k_.add(c + r * ldc, bias.data() + first, width);
                if (normed) {
                  memcpy(at, c + r * ldc, size_t(width) * 4);
                  continue;
                }
                if (factors) scale(c + r * ldc, width, factors[(row + r) * b_.ldscores]);
                if (p_.residual_scale != 0) scale(c + r * ldc, width, p_.residual_scale);
                k_.add(at, c + r * ldc, width);
              }
            });
    if (!normed) return;
    team_.sync();
    my_rows(x.rows, [&](int r) {
      float* row = b_.added + r * b_.ldx;
      normalise(row, norm, c_.hidden, row);
      if (p_.residual_scale != 0) scale(row, c_.hidden, p_.residual_scale);
      k_.add(b_.x + r * b_.ldx, row, c_.hidden);
    });
  }

  // Whether queries and keys are normalised over all of their heads.
  bool row_norms() const { return c_.qk_norm && p_.qk_span == OUTRIDER_ROW_SPAN; }

  void norm_head(float* c, const std::vector<float>& weights, int head) const {
    const float* weight = weights.data() + (p_.qk_span ? size_t(head) * c_.head_dim : 0);
    if (p_.qk_layer_norm) return k_.layer_norm(c, weight, nullptr, c_.head_dim, c_.eps, c);
    k_.rms_norm(c, weight, c_.head_dim, c_.eps, c);
  }

  // Norm over the row, then rotation, of all queries and keys of one row.
  void finish_row(int l, const Layer& layer, int row) {
    const int dim = c_.head_dim, dp = m_.dim_p;
    auto each = [&](float* heads, int count, const std::vector<float>& weight) {
      for (int h = 0; h < count; ++h) memcpy(own_.row + h * dim, heads + h * dp, size_t(dim) * 4);
      k_.rms_norm(own_.row, weight.data(), count * dim, c_.eps, own_.row);
      for (int h = 0; h < count; ++h) {
        memcpy(heads + h * dp, own_.row + h * dim, size_t(dim) * 4);
        rotate(layer, heads + h * dp, s_.positions[row]);
      }
    };
    each(b_.q + row * b_.ldq, c_.heads, layer.q_norm);
    grow(layer, b_.q + row * b_.ldq, c_.heads * dp, s_.positions[row]);
    float* keys = b_.k + row * b_.ldk;
    each(keys, c_.kv_heads, layer.k_norm);
    for (int h = 0; h < c_.kv_heads; ++h) m_.store_key(l, h, m_.plan.slots[size_t(row)], keys + h * dp);
  }

  // Bias, norm and rotation of one head of one row, then into the query buffer or the cache.
  void finish_head(int l, const Layer& layer, int head, int row, float* c) {
    const int dim = c_.head_dim, dp = m_.dim_p;
    if (!layer.qkv_bias.empty()) k_.add(c, layer.qkv_bias.data() + size_t(head) * dp, dim);
    const bool is_q = head < c_.heads, is_k = !is_q && head < c_.heads + c_.kv_heads;
    if (is_k && p_.latent_rope)
      memcpy(c, b_.latent_kv + row * b_.ldlatent + p_.latent_kv, size_t(p_.latent_rope) * 4);
    if (is_q || is_k) {
      const std::vector<float>& weight = is_q ? layer.q_norm : layer.k_norm;
      const int index = is_q ? head : head - c_.heads;
      if (row_norms()) {  // the rest follows when the row is complete
        float* raw = is_q ? b_.q + row * b_.ldq : b_.k + row * b_.ldk;
        memcpy(raw + ptrdiff_t(index) * dp, c, size_t(dp) * 4);
        return;
      }
      const bool norms = c_.qk_norm && !weight.empty();
      if (norms && !p_.qk_late) norm_head(c, weight, index);
      rotate(layer, c, s_.positions[row]);
      if (norms && p_.qk_late) norm_head(c, weight, index);
    }
    if (is_q) {
      grow(layer, c, dim, s_.positions[row]);
      memcpy(b_.q + row * b_.ldq + ptrdiff_t(head) * dp, c, size_t(dp) * 4);
      return;
    }
    const int kv_head = (head - c_.heads) % c_.kv_heads;
    const int slot = m_.plan.slots[size_t(row)];
    if (is_k) return m_.store_key(l, kv_head, slot, c);
    m_.store_value(l, kv_head, slot, c);
  }

  // Scales queries by their position.
  void grow(const Layer& layer, float* q, int n, int position) const {
    if (p_.growth == 0 || (layer.rope >= 0 && !p_.growth_everywhere)) return;
    const int steps = (position + p_.growth_first) / p_.growth_every;
    scale(q, n, 1.0f + p_.growth * std::log1p(float(steps)));
  }

  void rotate(const Layer& layer, float* v, int position) const {
    if (layer.rope < 0) return;
    const RopeTable& table = m_.ropes[size_t(layer.rope)];
    const int half = c_.rotary_dim / 2;
    const float* cosine = table.cosine.data() + size_t(position) * half;
    const float* sine = table.sine.data() + size_t(position) * half;
    for (int i = 0; i < half; ++i) {
      const float a = v[i], b = v[i + half];
      v[i] = a * cosine[i] - b * sine[i];
      v[i + half] = b * cosine[i] + a * sine[i];
    }
  }

  void attend(int l, const Layer& layer, bool prune) {
    const Plan& p = m_.plan;
    const AttentionTasks& work = prune ? p.last_tasks : p.tasks;
    Attention a = attention_of(layer);
    const int count = int(work.tasks.size()), total = count * c_.kv_heads;
    for (int t; (t = team_.next_task(thread_, total)) >= 0;) {
      begin_task(a, l, layer, work, work.tasks[size_t(t % count)], t / count);
      const int after = team_.probably_after(thread_, t, total);
      expect_task(a, l, after < 0 ? nullptr : &work.tasks[size_t(after % count)], after / count);
      k_.attention(a);
    }
    // Attention does not read the residual, so its kept rows can become contiguous here.
    if (prune && thread_ == 0) {
      for (size_t i = 0; i < p.kept.size(); ++i) {
        if (p.kept[i] == int32_t(i)) continue;
        memcpy(b_.x + ptrdiff_t(i) * b_.ldx, b_.x + p.kept[i] * b_.ldx, size_t(c_.hidden) * 4);
      }
    }
    if (work.combined.empty()) return;
    team_.sync();
    const int combined = int(work.combined.size());
    for (int t; (t = team_.next_task(thread_, combined * c_.kv_heads)) >= 0;) {
      begin_task(a, l, layer, work, work.combined[size_t(t % combined)], t / combined);
      k_.combine(a);
    }
  }

  // What is the same for all tasks of a layer.
  Attention attention_of(const Layer& layer) const {
    Attention a{};
    a.ldq = b_.ldq;
    a.group = c_.heads / c_.kv_heads;
    a.dim = c_.head_dim;
    a.dim_p = m_.dim_p;
    a.value_dim = m_.value_dim();
    a.scale = c_.attention_scale;
    a.window = layer.window;
    a.chunk = layer.chunk;
    a.cap = p_.score_cap;
    a.tile_stride = m_.tile_stride;
    a.bytes = c_.kv_bytes;
    a.block_size = m_.block_size;
    a.ldo = b_.ldatt;
    a.scratch = own_.attention;
    // Rows of scores that lie close together share pages.
    a.score_ld = m_.plan.tree ? b_.score_ld : std::min(b_.score_ld, ptrdiff_t(kRange + 32));
    return a;
  }

  void begin_task(Attention& a, int l, const Layer& layer, const AttentionTasks& work,
                  const AttentionTask& task, int head) {
    const Plan& p = m_.plan;
    const int seq = task.seq, first = s_.starts[seq];
    a.q = b_.q + first * b_.ldq + ptrdiff_t(head) * a.group * m_.dim_p;
    a.first = task.first;
    a.count = task.count;
    a.from = task.from;
    a.to = task.to;
    a.context = s_.context[seq];
    a.new_tokens = s_.starts[seq + 1] - first;
    a.whole = s_.whole && !layer.causal;
    a.ahead = a.whole ? a.new_tokens : s_.fed ? a.new_tokens + s_.fed[seq] : 0;
    a.depth = p.tree ? p.depth.data() + first : nullptr;
    a.path = p.tree ? p.path.data() + first : nullptr;
    a.segments = p.segments.data() + p.segment_starts[size_t(seq)];
    a.num_segments = p.segment_starts[size_t(seq) + 1] - p.segment_starts[size_t(seq)];
    a.sinks = layer.sinks.empty() ? nullptr : layer.sinks.data() + ptrdiff_t(head) * a.group;
    a.slopes = m_.slopes.empty() ? nullptr : m_.slopes.data() + ptrdiff_t(head) * a.group;
    a.keys = m_.keys(l, head);
    a.values = m_.values(l, head);
    a.table = s_.tables + int64_t(seq) * s_.table_width;
    a.out = b_.att + (first + task.out_shift) * b_.ldatt + ptrdiff_t(head) * a.group * a.value_dim;
    const size_t place = size_t(head) * work.records + size_t(std::max(0, task.record));
    a.records = task.record < 0 ? nullptr : m_.plan.records.data() + place * (kRecordHead + m_.dim_p);
  }

  // The keys that a thread reads after its task: those of the task after it, if there is one.
  void expect_task(Attention& a, int l, const AttentionTask* task, int head) const {
    a.num_next = 0;
    if (!task) return;
    const Plan& p = m_.plan;
    const int seq = task->seq, row = task->first / a.group;
    const int seen = s_.context[seq] + row + 1;
    const int from = std::max(task->from, a.window > 0 ? seen - a.window : 0);
    const Segment* begin = p.segments.data() + p.segment_starts[size_t(seq)];
    const Segment* end = p.segments.data() + p.segment_starts[size_t(seq) + 1];
    a.next = std::partition_point(begin, end,
                                  [&](const Segment& s) { return s.start + s.count <= from; });
    a.num_next = int(end - a.next);
    a.next_keys = m_.keys(l, head);
  }

  // The activations of the MLP; `down` makes its output of them.
  void inner_of_mlp(int l, int rows) {
    Layer& layer = m_.layers[size_t(l)];
    const Norm norm = p_.one_norm ? Norm(layer.attention_norm, layer.attention_norm_bias)
                                  : Norm(layer.mlp_norm, layer.mlp_norm_bias);
    const Rows x = prepare(layer.gate_up, b_.x, b_.ldx, rows, norm);
    const int step = p_.plain_mlp ? 1 : 2;
    product(layer.gate_up, x, unit_for(layer.gate_up, step),
            [&](int row, int n, int panel, int panels, float* c, ptrdiff_t ldc) {
              for (int r = 0; r < n; ++r) {
                if (!layer.gate_up_bias.empty()) {
                  k_.add(c + r * ldc, layer.gate_up_bias.data() + panel * kLanes, panels * kLanes);
                }
                float* h = b_.hidden + (row + r) * b_.ldh + panel / step * kLanes;
                for (int p = 0; p < panels; p += step) {
                  const float* gate = c + r * ldc + p * kLanes;
                  const float* up = p_.plain_mlp ? nullptr : gate + kLanes;
                  if (p_.plain_mlp || p_.activation != OUTRIDER_SILU) {
                    k_.activate(p_.activation, gate, up, kLanes, h + p / step * kLanes);
                  } else {
                    k_.silu_mul(gate, up, kLanes, h + p / step * kLanes);
                  }
                }
              }
            });
    team_.sync();
  }

  // `factors` (or null): one for each row of the output.
  void output_of_mlp(int l, int rows, const float* factors = nullptr) {
    Layer& layer = m_.layers[size_t(l)];
    const Rows h = prepare(layer.down, b_.hidden, b_.ldh, rows, nullptr);
    add_product(layer.down, h, layer.down_bias, layer.mlp_out_norm, factors);
    team_.sync();
  }

  // The experts of a layer: the union of those that the rows touch is read once.
  void experts(int l, int rows) {
    Layer& layer = m_.layers[size_t(l)];
    const OutriderExperts& e = c_.experts;
    const Rows x = prepare(layer.expert_gate_up[0], b_.x, b_.ldx, rows,
                           {layer.mlp_norm, layer.mlp_norm_bias});
    Rows plain = x;
    plain.pairs = nullptr, plain.q = nullptr, plain.scale = nullptr, plain.blocks = nullptr;
    product(layer.router, plain, 1,
            [&](int row, int n, int panel, int, float* c, ptrdiff_t ldc) {
              for (int r = 0; r < n; ++r)
                memcpy(b_.scores + (row + r) * b_.ldscores + panel * kLanes, c + r * ldc, kLanes * 4);
            });
    team_.sync();
    my_rows(rows, [&](int r) { route(layer, r); });
    team_.sync();
    if (thread_ == 0) b_.touched.build(b_.chosen, rows, e.active, e.count);
    team_.sync();
    inner_of_experts(layer, x);
    team_.sync();
    // The residual must still be what the experts read.
    if (layer.inner) inner_of_mlp(l, rows);
    output_of_experts(layer);
    team_.sync();
    scale_residual(layer, 1, rows);
    my_rows(rows, [&](int r) { add_experts(layer, r); });
    team_.sync();
    // The score after the experts' is the gate of the shared MLP.
    if (layer.inner) output_of_mlp(l, rows, e.shared_gate ? b_.scores + e.count : nullptr);
  }

  void route(const Layer& layer, int r) {
    const OutriderExperts& e = c_.experts;
    float* scores = b_.scores + r * b_.ldscores;
    if (!layer.router_bias.empty()) k_.add(scores, layer.router_bias.data(), e.count);
    if (e.shared_gate) scores[e.count] = 1.0f / (1.0f + std::exp(-scores[e.count]));
    choose_experts(e, scores, layer.choice_bias.empty() ? nullptr : layer.choice_bias.data(),
                   b_.chosen + ptrdiff_t(r) * e.active, b_.weights + ptrdiff_t(r) * e.active, own_.route);
  }

  // c = x . w over the panels of all touched experts; rows(first, count) gives the input of some of an
  // expert's assignments, done(expert, first, count, panel, panels, c, ldc) takes the output.
  template <class R, class F>
  void product_of_experts(const std::vector<Matrix>& w, int least, R rows, F done) {
    const Union& u = b_.touched;
    const int touched = int(u.experts.size()), panels = w[0].panels;
    int unit = kMaxTask;
    while (unit > least && panels * touched < unit * 4 * team_.size()) unit /= 2;
    const int per_expert = (panels + unit - 1) / unit;
    for (int t; (t = team_.next_task(thread_, touched * per_expert)) >= 0;) {
      const int i = t / per_expert, first = t % per_expert * unit;
      const int count = std::min(unit, panels - first), expert = u.experts[size_t(i)];
      for (int a = u.starts[size_t(i)]; a < u.starts[size_t(i) + 1]; a += kRowBlock) {
        const int n = std::min(kRowBlock, u.starts[size_t(i) + 1] - a);
        const Rows part = rows(a, n);
        multiply_panels(k_, w[size_t(expert)], part, first, count, own_.c, ptrdiff_t(unit) * kLanes);
        done(expert, a, n, first, count, own_.c, ptrdiff_t(unit) * kLanes);
      }
    }
  }

  void inner_of_experts(const Layer& layer, const Rows& x) {
    const OutriderExperts& e = c_.experts;
    const Union& u = b_.touched;
    const Matrix& w = layer.expert_gate_up[0];
    auto rows = [&](int first, int n) { return gather(x, w, u.assignments.data() + first, n); };
    const int step = p_.plain_mlp ? 1 : 2;
    product_of_experts(layer.expert_gate_up, step, rows,
        [&](int expert, int first, int n, int panel, int panels, float* c, ptrdiff_t ldc) {
          const size_t bias_at = size_t(expert) * w.panels * kLanes + size_t(panel) * kLanes;
          for (int r = 0; r < n; ++r) {
            float* row = c + r * ldc;
            if (e.bias) k_.add(row, layer.expert_gate_up_bias.data() + bias_at, panels * kLanes);
            if (e.weighs_input)
              scale(row, panels * kLanes, b_.weights[u.assignments[size_t(first + r)]]);
            float* h = b_.expert_hidden + (first + r) * b_.ldh + panel / step * kLanes;
            for (int p = 0; p < panels; p += step) {
              const float *gate = row + p * kLanes, *up = gate + kLanes;
              float* out = h + p / step * kLanes;
              if (p_.plain_mlp) {
                k_.activate(p_.activation, gate, nullptr, kLanes, out);
              } else if (e.clamp > 0) {
                k_.activate_clamped(gate, up, kLanes, e.clamp, e.alpha, out);
              } else if (p_.activation == OUTRIDER_SILU) {
                k_.silu_mul(gate, up, kLanes, out);
              } else {
                k_.activate(p_.activation, gate, up, kLanes, out);
              }
            }
          }
        });
  }

  void output_of_experts(const Layer& layer) {
    const Union& u = b_.touched;
    const Rows h = prepare(layer.expert_down[0], b_.expert_hidden, b_.ldh, int(u.assignments.size()),
                           nullptr);
    const ptrdiff_t groups = layer.expert_down[0].groups;
    auto rows = [&](int first, int n) { return rows_of(h, first, n, groups); };
    product_of_experts(layer.expert_down, 1, rows,
        [&](int expert, int first, int n, int panel, int panels, float* c, ptrdiff_t ldc) {
          const int at = panel * kLanes, width = std::min(panels * kLanes, c_.hidden - at);
          const float* bias = layer.expert_down_bias.empty() ? nullptr
                              : layer.expert_down_bias.data() + size_t(expert) * size_t(c_.hidden) + at;
          for (int r = 0; r < n; ++r) {
            float* out = b_.expert_out + (first + r) * b_.ldx + at;
            memcpy(out, c + r * ldc, size_t(width) * 4);
            if (bias) k_.add(out, bias, width);
          }
        });
  }

  // Sums the outputs of a row's experts in the order of its choice.
  void add_experts(const Layer& layer, int r) {
    const OutriderExperts& e = c_.experts;
    float* sum = nullptr;
    for (int place = 0; place < e.active; ++place) {
      const ptrdiff_t assignment = ptrdiff_t(r) * e.active + place;
      float* out = b_.expert_out + b_.touched.place_of[size_t(assignment)] * b_.ldx;
      if (!e.weighs_input) scale(out, c_.hidden, b_.weights[assignment]);
      if (sum) {
        k_.add(sum, out, c_.hidden);
      } else {
        sum = out;
      }
    }
    if (!layer.mlp_out_norm.empty()) normalise(sum, layer.mlp_out_norm, c_.hidden, sum);
    if (p_.residual_scale != 0) scale(sum, c_.hidden, p_.residual_scale);
    k_.add(b_.x + r * b_.ldx, sum, c_.hidden);
  }

  static Rows rows_of(const Rows& x, int first, int n, ptrdiff_t groups) {
    Rows part = x;
    part.rows = n;
    part.f = x.f + first * x.ld;
    if (x.pairs) part.pairs = x.pairs + first * x.ldp;
    if (x.q) part.q = x.q + first * x.ldq;
    if (x.scale) part.scale = x.scale + first * groups, part.sum = x.sum + first * groups;
    if (x.blocks) part.blocks = x.blocks + first * x.ldb;
    return part;
  }

  // The rows of `x` that n assignments name, one after another.
  Rows gather(const Rows& x, const Matrix& w, const int32_t* assignments, int n) {
    const int active = c_.experts.active;
    const ptrdiff_t groups = w.groups;
    if (n == 1) return rows_of(x, assignments[0] / active, 1, groups);
    Rows out = x;
    out.rows = n;
    out.f = own_.gathered;
    if (x.pairs) out.pairs = own_.gathered_pairs;
    if (x.q) out.q = own_.gathered_quant;
    if (x.scale) out.scale = own_.gathered_scale, out.sum = own_.gathered_sum;
    if (x.blocks) out.blocks = own_.gathered_blocks;
    out.ld = b_.ldnorm;
    for (int i = 0; i < n; ++i) {
      const ptrdiff_t r = assignments[i] / active;
      if (x.pairs) {
        memcpy(own_.gathered_pairs + i * x.ldp, x.pairs + r * x.ldp, size_t(x.ldp) * 4);
      } else if (x.q) {
        memcpy(own_.gathered_quant + i * x.ldq, x.q + r * x.ldq, size_t(x.ldq));
        if (x.blocks) {
          memcpy(own_.gathered_blocks + i * x.ldb, x.blocks + r * x.ldb, size_t(x.ldb) * sizeof(Block));
          continue;
        }
        memcpy(own_.gathered_scale + i * groups, x.scale + r * groups, size_t(groups) * 4);
        memcpy(own_.gathered_sum + i * groups, x.sum + r * groups, size_t(groups) * 4);
      } else {
        memcpy(own_.gathered + i * b_.ldnorm, x.f + r * x.ld, size_t(w.k) * 4);
      }
    }
    return out;
  }

  void logits() {
    if (s_.num_rows == 0) return;
    clear_logits();
    write_logits(m_.head, prepare(m_.head, b_.x, b_.ldx, s_.num_rows,
                                  {m_.final_norm, m_.final_norm_bias}, m_.plan.head_rows.data()));
  }

  // Where the head has few ids, the others are impossible.
  void clear_logits() {
    if (m_.ids.empty()) return;
    my_rows(s_.num_rows, [&](int r) {
      float* row = s_.logits + size_t(r) * c_.vocab;
      std::fill(row, row + c_.vocab, -__builtin_inff());
    });
    team_.sync();
  }

  // The logits from row `start` on.
  void write_logits(const Matrix& head, const Rows& x, int start = 0) {
    product(head, x, unit_for(head, 1),
            [&](int row, int n, int panel, int panels, float* c, ptrdiff_t ldc) {
              const int first = panel * kLanes;
              const int width = std::min(panels * kLanes, c_.head_rows - first);
              for (int r = 0; r < n; ++r) {
                finish_logits(c + r * ldc, first, width);
                if (!m_.ids.empty()) {
                  float* out = s_.logits + size_t(start + row + r) * c_.vocab;
                  for (int i = 0; i < width; ++i) out[m_.ids[size_t(first + i)]] = c[r * ldc + i];
                  continue;
                }
                memcpy(s_.logits + size_t(start + row + r) * c_.vocab + first, c + r * ldc,
                       size_t(width) * 4);
              }
            });
  }

  void finish_logits(float* c, int first, int width) const {
    if (!m_.head_bias.empty()) k_.add(c, m_.head_bias.data() + first, width);
    if (p_.logit_scale != 0) scale(c, width, p_.logit_scale);
    if (p_.logit_cap > 0) k_.soft_cap(c, width, p_.logit_cap);
  }

  OutriderModel& m_;
  const Kernels& k_;
  const OutriderConfig& c_;
  const OutriderParts& p_;
  const StepArgs& s_;
  Buffers& b_;
  Team& team_;
  int thread_;
  Buffers::Private& own_;
};

void step_job(void* context, Team& team, int thread) {
  run_part(*static_cast<Step*>(context), team, thread);
}

int32_t run_step(OutriderModel& m, const StepArgs& s) {
  std::lock_guard<std::mutex> lock(m.mutex);
  return run_locked(m, s);
}

}  // namespace

int32_t run_locked(OutriderModel& m, const StepArgs& s) {
  const bool medusa = m.is(OUTRIDER_MEDUSA);
  if (!s.features != !m.config.kind) return set_error("features are for heads"), OUTRIDER_INVALID;
  const int exit = s.exit_layer < 0 ? m.config.layers : s.exit_layer;
  if ((s.begun ? m.config.kind || s.start_layer < 0 || s.start_layer >= exit : s.start_layer != 0))
    return set_error("a pass continues from states, below its last layer"), OUTRIDER_INVALID;
  if (medusa) {
    const int first = std::max(0, s.exit_layer);  // of the guesses
    if (s.num_tokens < 1 || s.num_rows < 1 || s.num_rows % s.num_tokens ||
        s.num_rows / s.num_tokens > m.config.intermediate - first || (first && m.heads.empty())) {
      return set_error("as many rows for each sequence, and no more than heads"), OUTRIDER_INVALID;
    }
  } else {
    if (!make_plan(m, s, nullptr)) return OUTRIDER_INVALID;
    if (!rope_reaches(m, s, nullptr)) return OUTRIDER_ROPE_SHORT;
    if (s.num_tokens == 0) return OUTRIDER_OK;
    if (m.states.sizes.layers) {
      if (const int32_t code = restore_states(m, s)) return code;
      if (!make_plan(m, s, nullptr) || !plan_states(m, s)) return OUTRIDER_INVALID;
    }
  }
  Step step{&m, s};
  step.s.threads = std::clamp(s.threads, 1, kMaxThreads);
  const int rows = medusa ? s.num_rows : s.num_tokens;
  return run_job(m, step.s, rows, medusa ? 0 : m.plan.max_length, step_job, &step);
}

// Room for `rows` rows over `length` slots; false: out of memory.
static bool lay_out(OutriderModel& m, int threads, int rows, int length) {
  Buffers& b = m.buffers;
  int ahead = m.plan.most_ahead;
  if (rows <= b.rows && length <= b.length && ahead <= b.ahead && threads <= int(b.own.size()))
    return true;
  const auto& c = m.config;
  // With room to spare, so that a growing context does not reallocate at every step.
  rows = std::max({b.rows, kFirstRows, rows + rows / 4});
  length = std::max({b.length, kFirstLength, length + length / 4});
  ahead = std::max({b.ahead, kFirstRows, ahead + ahead / 4});
  threads = std::max(threads, int(b.own.size()));
  b.rows = b.length = b.ahead = 0;
  const OutriderExperts& experts = c.experts;
  int inner = c.intermediate;
  for (const Layer& l : m.layers) inner = std::max(inner, l.inner);
  inner = std::max(inner, experts.inner);
  if (m.convolutions) inner = std::max(inner, 3 * c.hidden);
  const MixerSizes& mixer = m.states.sizes;
  const bool recurs = mixer.layers;
  const int width = std::max({m.widest_inputs(), c.heads * c.head_dim, inner, c.feature_width,
                              c.parts.latent_q, c.parts.latent_kv, recurs ? mixer.inner() : 0});
  b.ldx = padded(c.hidden);
  b.ldnorm = padded(m.widest_inputs());
  b.ldq = padded(c.heads * m.dim_p);
  b.ldk = padded(c.kv_heads * m.dim_p);
  b.ldlatent = padded(std::max(c.parts.latent_q, c.parts.latent_kv + c.parts.latent_rope));
  b.ldatt = padded(std::max(c.heads * c.head_dim, m.convolutions ? c.hidden : 0));
  b.ldh = padded(inner);
  b.ldmix = recurs ? padded(mixer.product()) : 0;
  b.ldmixed = recurs ? padded(mixer.inner()) : 0;
  b.ldscores = padded(experts.count + 1);
  b.ldpairs = padded((width + 1) / 2);
  b.ldquant = round_up(width, 128) + 64;
  b.ldblocks = round_up(width, 64) / 32 + 4;
  b.score_ld = round_up(std::min(length, kRange + ahead), 16) + 32;
  const int unit = std::max(kMaxTask * kLanes, m.dim_p);
  const bool integer = c.weight_type == kI8 || c.weight_type == kI4, blocks = m.blocks;
  const bool row_span = c.qk_norm && c.parts.qk_span == OUTRIDER_ROW_SPAN;
  struct Field {
    void** at;
    size_t used, bytes;
  };
  std::vector<Field> fields;
  auto want = [&](auto*& p, size_t bytes) {
    fields.push_back({reinterpret_cast<void**>(&p), bytes, (bytes + 127) / 64 * 64});
  };
  const size_t n = size_t(rows), groups = size_t(width + 63) / 64, pieces = m.fine() ? 2 : 1;
  const size_t assigned = n * size_t(experts.active);  // rows of experts
  const size_t most = std::max(n, assigned), gathered = experts.count ? std::min(rows, kRowBlock) : 0;
  want(b.x, n * b.ldx * 4);
  want(b.q, n * b.ldq * 4);
  want(b.k, row_span ? n * b.ldk * 4 : 0);
  want(b.latent_q, c.parts.latent_q ? n * b.ldlatent * 4 : 0);
  want(b.latent_kv, c.parts.latent_kv ? n * b.ldlatent * 4 : 0);
  want(b.added, c.parts.out_norms ? n * b.ldx * 4 : 0);
  want(b.att, n * b.ldatt * 4);
  want(b.gate, c.parts.gates_attention ? n * b.ldatt * 4 : 0);
  want(b.hidden, n * b.ldh * 4);
  want(b.mix, n * b.ldmix * 4);
  want(b.mixed, n * b.ldmixed * 4);
  want(b.beside, c.kind ? n * b.ldx * 4 : 0);
  want(b.norm, n * b.ldnorm * 4);
  want(b.pairs, c.rounds ? most * b.ldpairs * 4 : 0);
  want(b.quant, integer || blocks ? most * pieces * b.ldquant : 0);
  want(b.quant_scale, integer ? most * groups * 4 : 0);
  want(b.quant_sum, integer ? most * groups * 4 : 0);
  want(b.scores, experts.count ? n * b.ldscores * 4 : 0);
  want(b.weights, assigned * 4);
  want(b.chosen, assigned * 4);
  want(b.expert_hidden, assigned * b.ldh * 4);
  want(b.expert_out, assigned * b.ldx * 4);
  want(b.blocks, blocks ? most * pieces * b.ldblocks * sizeof(Block) : 0);
  b.own.resize(size_t(threads));
  for (auto& own : b.own) {
    want(own.c, std::min(n * pieces, size_t(kRowBlock)) * unit * 4);
    want(own.attention, kMaxQueries * size_t(b.score_ld + 3 * m.dim_p + kRecordHead) * 4);
    want(own.norm, size_t(kSmall) * b.ldnorm * 4);
    want(own.row, row_span ? size_t(c.heads) * c.head_dim * 4 : 0);
    want(own.route, size_t(experts.count) * 4);
    want(own.gathered, gathered * b.ldnorm * 4);
    want(own.gathered_pairs, c.rounds ? gathered * b.ldpairs * 4 : 0);
    want(own.gathered_quant, integer || blocks ? gathered * b.ldquant : 0);
    want(own.gathered_blocks, blocks ? gathered * b.ldblocks * sizeof(Block) : 0);
    want(own.gathered_scale, integer ? gathered * groups * 4 : 0);
    want(own.gathered_sum, integer ? gathered * groups * 4 : 0);
    want(own.pairs, c.rounds ? size_t(kSmall) * b.ldpairs * 4 : 0);
    want(own.quant, integer || blocks ? kSmall * pieces * b.ldquant : 0);
    want(own.quant_scale, integer ? kSmall * groups * 4 : 0);
    want(own.quant_sum, integer ? kSmall * groups * 4 : 0);
    want(own.blocks, blocks ? kSmall * pieces * b.ldblocks * sizeof(Block) : 0);
    want(own.rest, m.fine() ? size_t(b.ldquant) * 4 : 0);
  }
  size_t total = 0;
  for (auto& f : fields) total += f.bytes;
  if (!b.memory.reserve(total)) return false;
  char* p = b.memory.data();
  for (auto& f : fields) {
    *f.at = p;
    guard(p, f.used, f.bytes);
    p += f.bytes;
  }
  b.rows = rows;
  b.length = length;
  b.ahead = ahead;
  return true;
}

int32_t run_job(OutriderModel& m, const StepArgs& s, int rows, int length, Job job, void* context) {
  if (!lay_out(m, s.threads, rows, length)) return OUTRIDER_MEMORY;
  if (!m.stored.before_pass(s.num_tokens, s.threads)) return OUTRIDER_CHANGED;
  run_on_pool(s.threads, job, context);
  return m.stored.is_sound() ? OUTRIDER_OK : OUTRIDER_CHANGED;
}

void run_part(Step& step, Team& team, int thread) { Worker(step, team, thread).run(); }

bool rope_reaches(const OutriderModel& m, const StepArgs& s, const int32_t* extra) {
  const OutriderParts& parts = m.config.parts;
  int limit = m.last_rope < int(m.ropes.size()) ? m.rope_positions : 0;
  if (parts.position_rows) limit = std::min(limit, parts.position_rows - parts.position_offset);
  for (int i = 0; i < s.num_seqs; ++i)
    for (int t = s.starts[i]; t < s.starts[i + 1]; ++t)
      if (int64_t(s.positions[t]) + (extra ? std::max(0, extra[i]) : 0) >= limit)
        return set_error("a position lies beyond the rotary table");
  return true;
}

}  // namespace outrider

extern "C" int32_t outrider_step(OutriderModel* m, const int32_t* packed, const OutriderStep* s) {
  if (!outrider::sizes_make_sense(*s)) return OUTRIDER_INVALID;
  return outrider::guarded([&] { return outrider::run_step(*m, {packed, *s}); });
}

extern "C" int32_t outrider_step_and_draw(OutriderModel* m, const int32_t* packed,
                                          const OutriderStep* s, const void* row_packed,
                                          int32_t* drawn) {
  const int32_t code = outrider_step(m, packed, s);
  if (code != OUTRIDER_OK) return code;
  const auto& c = m->config;
  const OutriderSample rows{s->logits,    drawn,      nullptr, s->num_rows, c.vocab,
                            c.num_tokens, s->threads, 0};
  return outrider_sample(row_packed, &rows);
}
