// A ragged pass in one parallel region: embedding, layers, head.
#include "step.h"

#include <algorithm>

namespace outrider {
namespace {

constexpr int kSmall = 16;  // up to this many rows, every thread prepares its own input
// The initial allocation: unused memory costs nothing, new memory costs time.
constexpr int kFirstRows = 256, kFirstLength = 2048;
constexpr float kOnes[kLanes] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// Rows are padded so that a power-of-two width does not put all rows into the same cache sets.
ptrdiff_t padded(int n) { return round_up(n, 16) + 16; }

class Worker {
 public:
  Worker(Step& st, Team& team, int thread)
      : m_(*st.m), k_(*st.m->kernels), c_(st.m->config), s_(st.s), b_(st.m->buffers),
        team_(team), thread_(thread), own_(st.m->buffers.own[size_t(thread)]) {}

  void run() {
    if (m_.is(OUTRIDER_MEDUSA)) return guess_ahead();
    if (s_.keys_only) return keys_of_features();
    if (s_.start_layer > 0) {
      my_rows(s_.num_tokens, [&](int r) {
        memcpy(b_.x + r * b_.ldx, s_.begun + size_t(r) * c_.hidden, size_t(c_.hidden) * 4);
      });
    } else {
      embed();
    }
    if (m_.is(OUTRIDER_EAGLE3)) continue_from_features();
    team_.sync();
    const int exit = s_.exit_layer < 0 ? c_.layers : s_.exit_layer;
    int rows = s_.num_tokens;
    tap(s_.start_layer);
    for (int l = s_.start_layer; l < exit; ++l) {
      const bool prune = m_.plan.prune && l + 1 == exit;
      attention_layer(l, rows, prune);
      if (prune) rows = int(m_.plan.kept.size());
      mlp(l, rows);
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
      if (m_.embedding) return unpack_row(*m_.embedding, s_.tokens[r], x);
      const size_t at = size_t(s_.tokens[r]) * c_.hidden;
      if (m_.embed_type == kF32) {
        memcpy(x, table + at * 4, size_t(c_.hidden) * 4);
        return;
      }
      for (int i = 0; i < c_.hidden; ++i) {
        uint16_t h;
        memcpy(&h, table + (at + size_t(i)) * 2, 2);
        x[i] = m_.embed_type == kBF16 ? bf16_to_float(h) : half_to_float(h);
      }
    });
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
    if (!s_.states) return fuse();
    my_rows(s_.num_tokens, [&](int r) {
      memcpy(b_.x + r * b_.ldx, s_.states + size_t(r) * c_.hidden, size_t(c_.hidden) * 4);
    });
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
    my_rows(depth * n, [&](int r) {  // row d * n + s: guess d of sequence s
      k_.rms_norm(s_.features + size_t(r % n) * c_.hidden, m_.final_norm.data(), c_.hidden, c_.eps,
                  b_.x + r * b_.ldx);
    });
    team_.sync();
    float *from = b_.x, *to = b_.beside;
    for (int block = 0; block < blocks; ++block, std::swap(from, to)) {
      for (int d = 0; d < depth; ++d) {
        const Matrix& w = m_.layers[size_t(d * blocks + block)].o;
        const ptrdiff_t at = ptrdiff_t(d) * n * b_.ldx;
        product(w, prepare(w, from + at, b_.ldx, n, nullptr), unit_for(w, 1),
                [&](int row, int rows, int panel, int panels, float* c, ptrdiff_t ldc) {
                  for (int r = 0; r < rows; ++r) {
                    for (int p = 0; p < panels; ++p) {
                      const int first = (panel + p) * kLanes;
                      const int width = std::min(kLanes, c_.hidden - first);
                      float* out = to + at + (row + r) * b_.ldx + first;
                      k_.silu_mul(c + r * ldc + p * kLanes, kOnes, kLanes, out);
                      k_.add(out, from + at + (row + r) * b_.ldx + first, width);
                    }
                  }
                });
        team_.sync();
      }
    }
    write_logits(prepare(m_.head, from, b_.ldx, depth * n, nullptr));
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

  // The input of a product with `in.w`: rows of `x` (through `index` unless null), normalised unless
  // `norm` is null, quantised if the weights are integers, rounded if the model says so. Every
  // thread prepares few rows itself, which takes less time than a barrier.
  // `beside` puts rows of the embedding, normalised by `beside_norm`, before those of x.
  Rows prepare(const Input& in, const float* x, ptrdiff_t ld, int rows, const float* norm,
               const int32_t* index = nullptr, const float* beside = nullptr,
               const float* beside_norm = nullptr) {
    const Matrix& w = in.w;
    const bool integer = w.type == kI8 || w.type == kI4, rounds = c_.rounds && w.type == kBF16;
    const bool small = rows <= kSmall;
    Rows out;
    out.rows = rows;
    out.f = x;
    out.ld = ld;
    if (!norm && !integer && !in.blocks && !rounds && !index) return out;
    float* f = small ? own_.norm : b_.norm;
    uint32_t* pairs = small ? own_.pairs : b_.pairs;
    int8_t* q = small ? own_.quant : b_.quant;
    float* scale = small ? own_.quant_scale : b_.quant_scale;
    int32_t* sum = small ? own_.quant_sum : b_.quant_sum;
    Block* blocks = small ? own_.blocks : b_.blocks;
    auto one = [&](int r) {
      const float* src = x + (index ? index[r] : r) * ld;
      if (norm) {
        float* dst = f + r * b_.ldnorm;
        if (beside) {
          k_.rms_norm(beside + r * b_.ldx, beside_norm, c_.hidden, c_.eps, dst);
          k_.rms_norm(src, norm, c_.hidden, c_.eps, dst + c_.hidden);
        } else {
          k_.rms_norm(src, norm, w.k, c_.eps, dst);
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
        k_.quantize_blocks(src, w.k, round_up(w.k, 64), q + r * b_.ldquant,
                           blocks + r * b_.ldblocks);
      }
    };
    if (small) {
      for (int r = 0; r < rows; ++r) one(r);
    } else {
      my_rows(rows, one);
      team_.sync();
    }
    if (norm) out.f = f, out.ld = b_.ldnorm;
    if (rounds) out.pairs = pairs, out.ldp = b_.ldpairs;
    if (integer) out.q = q, out.ldq = b_.ldquant, out.scale = scale, out.sum = sum;
    if (in.blocks) out.q = q, out.ldq = b_.ldquant, out.blocks = blocks, out.ldb = b_.ldblocks;
    return out;
  }

  void multiply(const Matrix& w, const Rows& x, int first, int panels, float* c, ptrdiff_t ldc) {
    k_.gemm(w, x, first, panels, c, ldc);
  }

  void multiply(const Weights& w, const Rows& x, int first, int panels, float* c, ptrdiff_t ldc) {
    if (w.take_turns) {
      for (int p = first; p < first + panels; ++p)
        k_.gemm(w.part[p % 2], x, p / 2, 1, c + (p - first) * kLanes, ldc);
      return;
    }
    int i = 0;  // tasks do not cross parts: these are whole heads
    while (w.parts > 1 && first >= w.part[i].panels) first -= w.part[i++].panels;
    k_.gemm(w.part[i], x, first, panels, c, ldc);
  }

  // c = x . w for the panels from `from` on, in tasks of `unit` panels; done(row, rows, panel,
  // panels, c, ldc).
  template <class W, class F>
  void product(const W& w, const Rows& x, int unit, F done, int from = 0) {
    const int tasks = (w.panels - from + unit - 1) / unit;
    const ptrdiff_t ldc = unit * kLanes, groups = Input(w).w.groups;
    const int blocks = (x.rows + kRowBlock - 1) / kRowBlock;
    const int block = blocks > 1 ? round_up((x.rows + blocks - 1) / blocks, 12) : kRowBlock;
    for (int t; (t = team_.next_task(thread_, tasks)) >= 0;) {
      const int first = from + t * unit, panels = std::min(unit, w.panels - first);
      for (int r = 0; r < x.rows; r += block) {
        Rows part = x;
        part.rows = std::min(block, x.rows - r);
        part.f = x.f + r * x.ld;
        if (x.pairs) part.pairs = x.pairs + r * x.ldp;
        if (x.q) part.q = x.q + r * x.ldq;
        if (x.scale) part.scale = x.scale + r * groups, part.sum = x.sum + r * groups;
        if (x.blocks) part.blocks = x.blocks + r * x.ldb;
        multiply(w, part, first, panels, own_.c, ldc);
        done(r, part.rows, first, panels, own_.c, ldc);
      }
    }
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
    const float* norm = layer.attention_norm.data();
    if (m_.is(OUTRIDER_EAGLE3)) {
      make_heads(l, prepare(layer.qkv, b_.x, b_.ldx, rows, m_.hidden_norm.data(), nullptr,
                            b_.beside, norm));
    } else {
      make_heads(l, prepare(layer.qkv, b_.x, b_.ldx, rows, norm));
    }
    team_.sync();
    attend(l, layer, prune);
    team_.sync();
    if (prune) rows = int(m_.plan.kept.size());
    const Rows a = prepare(layer.o, b_.att, b_.ldatt, rows, nullptr);
    add_product(layer.o, a, layer.o_bias);
    team_.sync();
  }

  // Queries, keys and values of the rows, from head `from` on.
  void make_heads(int l, const Rows& x, int from = 0) {
    Layer& layer = m_.layers[size_t(l)];
    const int unit = m_.dim_p / kLanes;
    product(layer.qkv, x, unit,
            [&](int row, int n, int panel, int, float* c, ptrdiff_t ldc) {
              const int head = panel * kLanes / m_.dim_p;
              for (int r = 0; r < n; ++r) finish_head(l, layer, head, row + r, c + r * ldc);
            }, from * unit);
  }

  void add_product(const Matrix& w, const Rows& x, const std::vector<float>& bias) {
    product(w, x, unit_for(w, 1),
            [&](int row, int n, int panel, int panels, float* c, ptrdiff_t ldc) {
              const int first = panel * kLanes;
              const int width = std::min(panels * kLanes, c_.hidden - first);
              for (int r = 0; r < n; ++r) {
                if (!bias.empty()) k_.add(c + r * ldc, bias.data() + first, width);
                k_.add(b_.x + (row + r) * b_.ldx + first, c + r * ldc, width);
              }
            });
  }

  // Bias, norm and rotation of one head of one row, then into the query buffer or the cache.
  void finish_head(int l, const Layer& layer, int head, int row, float* c) {
    const int dim = c_.head_dim, dp = m_.dim_p;
    if (!layer.qkv_bias.empty()) k_.add(c, layer.qkv_bias.data() + size_t(head) * dp, dim);
    const bool is_q = head < c_.heads, is_k = !is_q && head < c_.heads + c_.kv_heads;
    if (is_q || is_k) {
      if (c_.qk_norm) {
        k_.rms_norm(c, is_q ? layer.q_norm.data() : layer.k_norm.data(), dim, c_.eps, c);
      }
      rotate(c, s_.positions[row]);
    }
    if (is_q) {
      memcpy(b_.q + row * b_.ldq + ptrdiff_t(head) * dp, c, size_t(dp) * 4);
      return;
    }
    const int kv_head = (head - c_.heads) % c_.kv_heads;
    const int slot = m_.plan.slots[size_t(row)];
    const size_t tile = size_t(slot / kLanes) * m_.tile_stride;
    if (is_k) {
      float* k = m_.keys(l, kv_head) + tile + slot % kLanes;
      for (int d = 0; d < dim; ++d) k[d * kLanes] = c[d];
    } else {
      float* v = m_.values(l, kv_head) + tile + size_t(slot % kLanes) * dp;
      memcpy(v, c, size_t(dim) * 4);
    }
  }

  void rotate(float* v, int position) const {
    const int half = c_.rotary_dim / 2;
    const float* cosine = m_.cosine.data() + size_t(position) * half;
    const float* sine = m_.sine.data() + size_t(position) * half;
    for (int i = 0; i < half; ++i) {
      const float a = v[i], b = v[i + half];
      v[i] = a * cosine[i] - b * sine[i];
      v[i + half] = b * cosine[i] + a * sine[i];
    }
  }

  void attend(int l, const Layer& layer, bool prune) {
    const Plan& p = m_.plan;
    const auto& tasks = prune ? p.last_tasks : p.tasks;
    const int group = c_.heads / c_.kv_heads, count = int(tasks.size());
    Attention a{};
    a.ldq = b_.ldq;
    a.group = group;
    a.dim = c_.head_dim;
    a.dim_p = m_.dim_p;
    a.scale = c_.attention_scale;
    a.window = layer.window;
    a.tile_stride = m_.tile_stride;
    a.block_size = m_.block_size;
    a.ldo = b_.ldatt;
    a.scratch = own_.attention;
    a.score_ld = b_.score_ld;
    for (int t; (t = team_.next_task(thread_, count * c_.kv_heads)) >= 0;) {
      const int head = t / count;
      const AttentionTask& task = tasks[size_t(t % count)];
      const int seq = task.seq, first = s_.starts[seq];
      a.q = b_.q + first * b_.ldq + ptrdiff_t(head) * group * m_.dim_p;
      a.first = task.first;
      a.count = task.count;
      a.context = s_.context[seq];
      a.new_tokens = s_.starts[seq + 1] - first;
      a.whole = s_.whole;
      a.ahead = s_.whole ? a.new_tokens : s_.fed ? a.new_tokens + s_.fed[seq] : 0;
      a.depth = p.tree ? p.depth.data() + first : nullptr;
      a.path = p.tree ? p.path.data() + first : nullptr;
      a.segments = p.segments.data() + p.segment_starts[size_t(seq)];
      a.num_segments = p.segment_starts[size_t(seq) + 1] - p.segment_starts[size_t(seq)];
      a.keys = m_.keys(l, head);
      a.values = m_.values(l, head);
      a.table = s_.tables + int64_t(seq) * s_.table_width;
      a.out = b_.att + (first + task.out_shift) * b_.ldatt + ptrdiff_t(head) * group * c_.head_dim;
      k_.attention(a);
    }
    // Attention does not read the residual, so its kept rows can become contiguous here.
    if (prune && thread_ == 0) {
      for (size_t i = 0; i < p.kept.size(); ++i) {
        if (p.kept[i] == int32_t(i)) continue;
        memcpy(b_.x + ptrdiff_t(i) * b_.ldx, b_.x + p.kept[i] * b_.ldx, size_t(c_.hidden) * 4);
      }
    }
  }

  void mlp(int l, int rows) {
    Layer& layer = m_.layers[size_t(l)];
    const Rows x = prepare(layer.gate_up, b_.x, b_.ldx, rows, layer.mlp_norm.data());
    product(layer.gate_up, x, unit_for(layer.gate_up, 2),
            [&](int row, int n, int panel, int panels, float* c, ptrdiff_t ldc) {
              for (int r = 0; r < n; ++r) {
                if (!layer.gate_up_bias.empty()) {
                  k_.add(c + r * ldc, layer.gate_up_bias.data() + panel * kLanes, panels * kLanes);
                }
                float* h = b_.hidden + (row + r) * b_.ldh + panel / 2 * kLanes;
                for (int p = 0; p < panels; p += 2) {
                  const float* gate = c + r * ldc + p * kLanes;
                  k_.silu_mul(gate, gate + kLanes, kLanes, h + p / 2 * kLanes);
                }
              }
            });
    team_.sync();
    const Rows h = prepare(layer.down, b_.hidden, b_.ldh, rows, nullptr);
    add_product(layer.down, h, layer.down_bias);
    team_.sync();
  }

  void logits() {
    if (s_.num_rows == 0) return;
    if (!m_.ids.empty()) {
      my_rows(s_.num_rows, [&](int r) {
        float* row = s_.logits + size_t(r) * c_.vocab;
        std::fill(row, row + c_.vocab, -__builtin_inff());
      });
      team_.sync();
    }
    write_logits(prepare(m_.head, b_.x, b_.ldx, s_.num_rows, m_.final_norm.data(),
                         m_.plan.head_rows.data()));
  }

  void write_logits(const Rows& x) {
    product(m_.head, x, unit_for(m_.head, 1),
            [&](int row, int n, int panel, int panels, float* c, ptrdiff_t ldc) {
              const int first = panel * kLanes;
              const int width = std::min(panels * kLanes, c_.head_rows - first);
              for (int r = 0; r < n; ++r) {
                if (!m_.ids.empty()) {
                  float* out = s_.logits + size_t(row + r) * c_.vocab;
                  for (int i = 0; i < width; ++i) out[m_.ids[size_t(first + i)]] = c[r * ldc + i];
                  continue;
                }
                memcpy(s_.logits + size_t(row + r) * c_.vocab + first, c + r * ldc,
                       size_t(width) * 4);
              }
            });
  }

  OutriderModel& m_;
  const Kernels& k_;
  const OutriderConfig& c_;
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
  const bool medusa = m.is(OUTRIDER_MEDUSA);
  if (!s.features != !m.config.kind) return set_error("features are for heads"), OUTRIDER_INVALID;
  const int exit = s.exit_layer < 0 ? m.config.layers : s.exit_layer;
  if (s.start_layer != 0 && (m.config.kind || !s.begun || s.start_layer < 0 || s.start_layer >= exit))
    return set_error("a pass continues from states, below its last layer"), OUTRIDER_INVALID;
  if (medusa) {
    if (s.num_tokens < 1 || s.num_rows < 1 || s.num_rows % s.num_tokens ||
        s.num_rows / s.num_tokens > m.config.intermediate) {
      return set_error("as many rows for each sequence, and no more than heads"), OUTRIDER_INVALID;
    }
  } else {
    if (!make_plan(m, s, nullptr)) return OUTRIDER_INVALID;
    if (!rope_reaches(m, s, nullptr)) return OUTRIDER_ROPE_SHORT;
    if (s.num_tokens == 0) return OUTRIDER_OK;
  }
  Step step{&m, s};
  step.s.threads = std::clamp(s.threads, 1, kMaxThreads);
  const int rows = medusa ? s.num_rows : s.num_tokens;
  if (!lay_out(m, step.s.threads, rows, medusa ? 0 : m.plan.max_length)) return OUTRIDER_MEMORY;
  run_on_pool(step.s.threads, step_job, &step);
  return OUTRIDER_OK;
}

}  // namespace

bool lay_out(OutriderModel& m, int threads, int rows, int length) {
  Buffers& b = m.buffers;
  if (rows <= b.rows && length <= b.length && threads <= int(b.own.size())) return true;
  const auto& c = m.config;
  // With room to spare, so that a growing context does not reallocate at every step.
  rows = std::max({b.rows, kFirstRows, rows + rows / 4});
  length = std::max({b.length, kFirstLength, length + length / 4});
  threads = std::max(threads, int(b.own.size()));
  b.rows = b.length = 0;
  const int width = std::max({m.layer_inputs(), c.heads * c.head_dim, c.intermediate,
                              c.feature_width});
  b.ldx = padded(c.hidden);
  b.ldnorm = padded(m.layer_inputs());
  b.ldq = padded(c.heads * m.dim_p);
  b.ldatt = padded(c.heads * c.head_dim);
  b.ldh = padded(c.intermediate);
  b.ldpairs = padded((width + 1) / 2);
  b.ldquant = round_up(width, 128) + 64;
  b.ldblocks = round_up(width, 64) / 32 + 4;
  b.score_ld = round_up(length, 16) + 32;
  const int unit = std::max(kMaxTask * kLanes, m.dim_p);
  const bool integer = c.weight_type == kI8 || c.weight_type == kI4, blocks = m.blocks;
  struct Field {
    void** at;
    size_t used, bytes;
  };
  std::vector<Field> fields;
  auto want = [&](auto*& p, size_t bytes) {
    fields.push_back({reinterpret_cast<void**>(&p), bytes, (bytes + 127) / 64 * 64});
  };
  const size_t n = size_t(rows), groups = size_t(width + 63) / 64;
  want(b.x, n * b.ldx * 4);
  want(b.q, n * b.ldq * 4);
  want(b.att, n * b.ldatt * 4);
  want(b.hidden, n * b.ldh * 4);
  want(b.beside, c.kind ? n * b.ldx * 4 : 0);
  want(b.norm, n * b.ldnorm * 4);
  want(b.pairs, c.rounds ? n * b.ldpairs * 4 : 0);
  want(b.quant, integer || blocks ? n * b.ldquant : 0);
  want(b.quant_scale, integer ? n * groups * 4 : 0);
  want(b.quant_sum, integer ? n * groups * 4 : 0);
  want(b.blocks, blocks ? n * b.ldblocks * sizeof(Block) : 0);
  b.own.resize(size_t(threads));
  for (auto& own : b.own) {
    want(own.c, size_t(std::min(rows, kRowBlock)) * unit * 4);
    want(own.attention, kMaxQueries * size_t(b.score_ld + 2 * m.dim_p) * 4);
    want(own.norm, size_t(kSmall) * b.ldnorm * 4);
    want(own.pairs, c.rounds ? size_t(kSmall) * b.ldpairs * 4 : 0);
    want(own.quant, integer || blocks ? size_t(kSmall) * b.ldquant : 0);
    want(own.quant_scale, integer ? kSmall * groups * 4 : 0);
    want(own.quant_sum, integer ? kSmall * groups * 4 : 0);
    want(own.blocks, blocks ? size_t(kSmall) * b.ldblocks * sizeof(Block) : 0);
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
  return true;
}

void run_part(Step& step, Team& team, int thread) { Worker(step, team, thread).run(); }

bool rope_reaches(const OutriderModel& m, const StepArgs& s, const int32_t* extra) {
  for (int i = 0; i < s.num_seqs; ++i)
    for (int t = s.starts[i]; t < s.starts[i + 1]; ++t)
      if (int64_t(s.positions[t]) + (extra ? std::max(0, extra[i]) : 0) >= m.rope_positions)
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
