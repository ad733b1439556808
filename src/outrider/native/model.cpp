// Loads a model: checks every shape, repacks weights into panels, owns the cache.
#include "model.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "packed.h"
#include "pool.h"

namespace outrider {

namespace {
thread_local std::string last_error;

uint16_t float_to_bf16(float x) {  // to nearest, ties to even
  uint32_t b;
  memcpy(&b, &x, 4);
  if ((b & 0x7fffffff) > 0x7f800000) return uint16_t((b >> 16) | 64);
  return uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

inline int nibble(float value, float inverse) {
  const float v = value * inverse;
  return v != v ? 0 : int(std::nearbyint(v < -8.0f ? -8.0f : v > 7.0f ? 7.0f : v));
}

// The step with the least squared error, among those that map the value of largest magnitude to
// -8 or slightly below. Zero for a group that is zero or not finite.
float best_step(const float* x, int n) {
  float top = 0;
  for (int i = 0; i < n; ++i)
    if (!(std::fabs(x[i]) <= std::fabs(top))) top = x[i];
  if (top == 0 || !std::isfinite(top) || !std::isfinite(8.0f / top)) return 0;
  float best = 0, least = INFINITY;
  for (float deepest : {8.0f, 8.5f, 9.0f, 9.6f, 10.4f}) {
    const float d = top / -deepest, inverse = 1.0f / d;
    float loss = 0;
    for (int i = 0; i < n; ++i) {
      const float r = x[i] - d * float(nibble(x[i], inverse));
      loss += r * r;
    }
    if (loss < least) least = loss, best = d;
  }
  return best;
}

// Writes one output's values, already as floats and zero-padded, into its lane of a panel.
void pack_lane(Matrix& m, int output, const float* row) {
  const int panel = output / kLanes, lane = output % kLanes;
  char* base = m.data + size_t(panel) * m.panel_bytes();
  if (m.type == kF32) {
    for (int l = 0; l < m.lines; ++l) memcpy(base + size_t(l) * 64 + lane * 4, row + l, 4);
  } else if (m.type == kBF16) {
    for (int l = 0; l < m.lines; ++l) {
      const uint16_t two[2] = {float_to_bf16(row[2 * l]), float_to_bf16(row[2 * l + 1])};
      memcpy(base + size_t(l) * 64 + lane * 4, two, 4);
    }
  } else if (m.type == kI8) {
    float top = 0;
    for (int i = 0; i < m.k; ++i) top = std::fmax(top, std::fabs(row[i]));
    const float inverse = top > 0 && std::isfinite(top) ? 127.0f / top : 0.0f;
    m.scale[output] = inverse > 0 ? top / 127.0f : 0.0f;
    for (int l = 0; l < m.lines; ++l) {
      uint8_t four[4];
      for (int i = 0; i < 4; ++i) {
        const float v = row[4 * l + i] * inverse;
        four[i] = uint8_t(128 + (std::isfinite(v) ? int(std::nearbyint(v)) : 0));
      }
      memcpy(base + size_t(l) * 64 + lane * 4, four, 4);
    }
  } else {
    std::vector<uint8_t> q(size_t(m.lines) * 8);
    for (int g = 0; g < m.groups; ++g) {
      const int end = std::min((g + 1) * m.group, m.lines * 8);
      const float d = best_step(row + g * m.group, end - g * m.group);
      const float inverse = d != 0 ? 1.0f / d : 0.0f;
      m.scale[(size_t(panel) * m.groups + g) * kLanes + lane] = d;
      for (int i = g * m.group; i < end; ++i) q[size_t(i)] = uint8_t(nibble(row[i], inverse) + 8);
    }
    for (int l = 0; l < m.lines; ++l) {
      uint8_t four[4];
      for (int i = 0; i < 4; ++i)
        four[i] = uint8_t(q[size_t(l) * 8 + i] | q[size_t(l) * 8 + 4 + i] << 4);
      memcpy(base + size_t(l) * 64 + lane * 4, four, 4);
    }
  }
}

// Half precision is stored as it is: the sixteen outputs' values of an even k, then of the odd one.
void pack_halves(Matrix& m, int output, const char* row) {
  char* base = m.data + size_t(output / kLanes) * m.panel_bytes() + output % kLanes * 2;
  for (int i = 0; i < m.k; ++i) memcpy(base + i / 2 * 64 + i % 2 * 32, row + 2 * i, 2);
}

struct PackJob {
  Matrix* m;
  const PackSource* s;
};

void pack_job(void* context, Team& team, int thread) {
  auto& job = *static_cast<PackJob*>(context);
  const PackSource& s = *job.s;
  // Sixteen outputs of a panel share its lines, so a task packs whole runs of sixteen rows.
  std::vector<float> row(size_t(job.m->lines) * values_per_line(job.m->type));
  const size_t bytes = size_t(s.columns) * source_bytes(s.type);
  for (int t; (t = team.next_task(thread, (s.rows + kLanes - 1) / kLanes)) >= 0;) {
    const int end = std::min(s.rows, (t + 1) * kLanes);
    for (int r = t * kLanes; r < end; ++r) {
      const int output = s.first + r / s.run * s.run_step + r % s.run;
      if (job.m->type == kF16) {
        pack_halves(*job.m, output, s.data + size_t(r) * bytes);
        continue;
      }
      read_row(s.data + size_t(r) * bytes, s.type, s.columns, row.data());
      pack_lane(*job.m, output, row.data());
    }
  }
}

}  // namespace

int source_bytes(int32_t type) { return type == kF32 ? 4 : 2; }

void read_row(const char* p, int32_t type, int n, float* out) {
  if (type == kF32) {
    memcpy(out, p, size_t(n) * 4);
    return;
  }
  for (int i = 0; i < n; ++i) {
    uint16_t h;
    memcpy(&h, p + 2 * i, 2);
    out[i] = type == kBF16 ? bf16_to_float(h) : half_to_float(h);
  }
}

float half_to_float(uint16_t h) {
  const uint32_t rest = uint32_t(h & 0x7fff) << 13;
  float x;
  memcpy(&x, &rest, 4);
  x *= 0x1p112f;  // the exponent, right below the normal range, too
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((h & 0x7c00) == 0x7c00) bits = rest | 0x7f800000;
  bits |= uint32_t(h & 0x8000) << 16;
  memcpy(&x, &bits, 4);
  return x;
}

bool set_error(const std::string& message) {
  last_error = message;
  return false;
}

bool Memory::reserve(size_t bytes) {
  constexpr size_t kPage = size_t(2) << 20;
  bytes = (bytes + 8192 + 4095) / 4096 * 4096;  // prefetches and full-width loads may overrun
  if (bytes > kPage) bytes = (bytes + kPage - 1) / kPage * kPage;
  release();
  const size_t mapped = bytes + kPage;
  void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return set_error("not enough memory");
  char* raw = static_cast<char*>(p);
  char* aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + kPage - 1) / kPage *
                                          kPage);
  if (aligned > raw) munmap(raw, size_t(aligned - raw));
  if (aligned + bytes < raw + mapped) {
    munmap(aligned + bytes, size_t(raw + mapped - aligned - bytes));
  }
#if defined(MADV_HUGEPAGE)
  if (bytes >= kPage) madvise(aligned, bytes, MADV_HUGEPAGE);
#endif
  data_ = aligned;
  size_ = bytes;
  return true;
}

void Memory::release() {
  if (data_) {
    guard(data_, size_, size_);
    munmap(data_, size_);
  }
  data_ = nullptr;
  size_ = 0;
}

size_t describe(Matrix& m, int32_t type, int n, int k) {
  m.type = type;
  m.n = n;
  m.k = k;
  m.panels = (n + kLanes - 1) / kLanes;
  m.lines = is_packed(type) ? packed_lines(type, k)
                            : (k + values_per_line(type) - 1) / values_per_line(type);
  m.group = type == kI4 ? 64 : kActGroup;
  m.groups = (k + m.group - 1) / m.group;
  const size_t scales = type == kI8   ? size_t(m.panels) * kLanes
                        : type == kI4 ? size_t(m.panels) * kLanes * m.groups
                                      : 0;
  return size_t(m.panels) * m.panel_bytes() + scales * 4;
}

void pack_rows(Matrix& m, const PackSource& source, int threads) {
  if (is_packed(source.type)) return pack_blocks(m, source, threads);
  if (is_packed(m.type)) return pack_rounded(m, source, threads);
  PackJob job{&m, &source};
  run_on_pool(threads, pack_job, &job);
}

namespace {

bool fail_shape(int kind, int layer, int64_t rows, int64_t columns) {
  return set_error("tensor kind " + std::to_string(kind) + " of layer " + std::to_string(layer) +
                   " has an unexpected shape [" + std::to_string(rows) + ", " +
                   std::to_string(columns) + "]");
}

bool set_vector(std::vector<float>& v, size_t at, const void* data, int32_t type, int n) {
  if (v.size() < at + size_t(n)) v.resize(at + size_t(n));
  read_row(static_cast<const char*>(data), type, n, v.data() + at);
  return true;
}

// A bias or norm per head, spread over the padded heads.
bool set_heads(OutriderModel& m, std::vector<float>& v, int first_head, int heads,
               const void* data, int32_t type) {
  const auto& c = m.config;
  v.resize(size_t(c.heads + 2 * c.kv_heads) * m.dim_p);
  const char* p = static_cast<const char*>(data);
  for (int h = 0; h < heads; ++h) {
    read_row(p + size_t(h) * c.head_dim * source_bytes(type), type, c.head_dim,
             v.data() + size_t(first_head + h) * m.dim_p);
  }
  return true;
}

// [rows][columns] as [columns][rows].
void set_turned(std::vector<float>& v, const void* data, int32_t type, int rows, int columns) {
  std::vector<float> all;
  set_vector(all, 0, data, type, rows * columns);
  v.resize(all.size());
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < columns; ++i) v[size_t(i) * rows + r] = all[size_t(r) * columns + i];
}

// The bias of gates (`which` 0) or ups, panel by panel in turns.
void spread_half(const char* data, int32_t type, int n, int which, float* out) {
  std::vector<float> row(static_cast<size_t>(n));
  read_row(data, type, n, row.data());
  for (int i = 0; i < n; ++i) out[(i / kLanes * 2 + which) * kLanes + i % kLanes] = row[size_t(i)];
}

// Kinds of matrix that may be of blocks.
bool may_be_packed(int kind) {
  for (int k : {OUTRIDER_EMBED, OUTRIDER_HEAD, OUTRIDER_Q, OUTRIDER_K, OUTRIDER_V, OUTRIDER_O, OUTRIDER_GATE,
                OUTRIDER_UP, OUTRIDER_DOWN, OUTRIDER_MIX, OUTRIDER_STATE_IN, OUTRIDER_STATE_OUT,
                OUTRIDER_Q_A, OUTRIDER_KV_A})
    if (k == kind) return true;
  return false;
}

// Packs rows, or notes where they are. `type` with flags.
bool place_rows(OutriderModel& m, Matrix& w, PackSource s, int32_t type, int threads) {
  if (!(type & OUTRIDER_IN_FILE)) return pack_rows(w, s, threads), true;
  const auto* at = reinterpret_cast<const OutriderStored*>(s.data);
  s.file = m.stored.file(at->descriptor);
  s.offset = at->offset;
  const int64_t blocks = int64_t(s.rows) * (s.columns / packed_block(s.type));
  if (!s.file->holds(s.offset, blocks * int64_t(packed_block_bytes(s.type))))
    return set_error("the file of the weights has changed; load the model again");
  m.stored.add(w, s);
  return true;
}

bool set_tensor(OutriderModel& m, int kind, int layer, const void* data, int32_t type,
                int64_t rows, int64_t columns, int threads) {
  const auto& c = m.config;
  const int turned = type & OUTRIDER_TURNED ? c.rotary_dim : 0;
  const int32_t flags = type & (OUTRIDER_TURNED | OUTRIDER_IN_FILE);
  type &= ~flags;
  if (!data) return set_error("null tensor");
  if ((is_packed(type) || flags) && !(is_packed(type) && may_be_packed(kind)))
    return set_error("blocks are for matrices");
  const bool of_heads = (kind >= OUTRIDER_FC && kind <= OUTRIDER_MARKOV_HEAD) || kind == OUTRIDER_FC_BIAS;
  const bool global = kind <= OUTRIDER_HEAD || of_heads ||
                      (kind >= OUTRIDER_FINAL_NORM_BIAS && kind <= OUTRIDER_POSITIONS) ||
                      (kind >= OUTRIDER_SLOPES && kind <= OUTRIDER_EMBEDDING_NORM_BIAS);
  if (kind < 0 || kind > OUTRIDER_CONVOLUTION_BIAS || (of_heads && !c.kind) || (!global && (layer < 0 || layer >= c.layers)))
    return set_error("no such tensor");
  auto shape = [&](int64_t r, int64_t k) {
    return (rows == r && columns == k) || fail_shape(kind, layer, rows, columns);
  };
  const int q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim, dp = m.dim_p;
  const char* p = static_cast<const char*>(data);
  Layer* l = global ? nullptr : &m.layers[size_t(layer)];
  uint64_t& seen = global ? m.seen : l->seen;
  auto pack = [&](Matrix& w, const PackSource& source) {
    const bool given = w.type == kF16 || (is_packed(w.type) && !c.kind);
    if (given ? type != w.type : type != kF32 && type != kBF16 && type != kF16)
      return set_error("a tensor of a type that its matrix is not made of");
    return place_rows(m, w, source, flags, threads);
  };
  auto heads_into_qkv = [&](int which, int first, int count) {
    const OutriderParts& parts = c.parts;
    if (parts.latent_kv) {
      const int inputs = which ? parts.latent_kv : parts.latent_q ? parts.latent_q : c.hidden;
      return shape(int64_t(count) * c.head_dim, inputs) &&
             pack(which ? l->kv_b : l->q_b,
                  {p, type, int(rows), inputs, c.head_dim, dp, which == 2 ? count * dp : 0});
    }
    if (!shape(int64_t(count) * c.head_dim, m.layer_inputs(layer))) return false;
    Weights& w = l->qkv;
    const int output = w.parts == 1 ? first * dp : 0;
    return pack(w.part[w.parts == 1 ? 0 : which],
                {p, type, int(rows), int(columns), c.head_dim, dp, output, turned});
  };
  auto whole = [&](Matrix& w, int n, int k) {
    return shape(n, k) && pack(w, {p, type, n, k, n, n, 0});
  };
  auto vector = [&](std::vector<float>& v, int n) {
    return shape(1, n) && set_vector(v, 0, data, type, n);
  };
  auto half_of_gate_up = [&](int which) {
    if (c.parts.plain_mlp) return whole(l->gate_up.part[0], l->inner, c.hidden);
    if (!shape(l->inner, c.hidden)) return false;
    Weights& w = l->gate_up;
    if (w.parts == 2) return pack(w.part[which], {p, type, int(rows), c.hidden, kLanes, kLanes, 0});
    return pack(w.part[0], {p, type, int(rows), c.hidden, kLanes, 2 * kLanes, which * kLanes});
  };
  auto half_of_bias = [&](int which) {
    if (!shape(1, l->inner)) return false;
    if (c.parts.plain_mlp) {
      l->gate_up_bias.resize(size_t(round_up(l->inner, kLanes)));
      read_row(p, type, l->inner, l->gate_up_bias.data());
      return true;
    }
    l->gate_up_bias.resize(size_t(round_up(l->inner, kLanes)) * 2);
    spread_half(p, type, l->inner, which, l->gate_up_bias.data());
    return true;
  };
  const bool takes_heads = l && l->attends && !l->width, recurs = l && l->state >= 0;
  const MixerSizes& mixer = m.states.sizes;
  bool good = false;
  switch (kind) {
    case OUTRIDER_EMBED:
      good = shape(c.vocab, c.hidden) && is_packed(type) == (m.embedding != nullptr);
      if (!good) break;
      m.embed = p, m.embed_type = type;
      if (m.embedding == &m.own_embedding) good = whole(m.own_embedding, c.vocab, c.hidden);
      if (m.embedding == &m.head) good = whole(m.head, c.vocab, c.hidden), seen |= 1u << OUTRIDER_HEAD;
      break;
    case OUTRIDER_FINAL_NORM:
      good = shape(1, c.hidden) && set_vector(m.final_norm, 0, data, type, c.hidden);
      break;
    case OUTRIDER_HEAD: {
      const bool many = !m.heads.empty();
      if (many && (layer < 0 || size_t(layer) >= m.heads.size())) return set_error("no such head");
      good = whole(many ? m.heads[size_t(layer)] : m.head, c.head_rows, c.hidden);
      if (many && good) ++m.heads_seen;
      break;
    }
    case OUTRIDER_FC: good = whole(m.fc, c.hidden, m.fc_inputs()); break;
    case OUTRIDER_FC_BIAS:
      good = shape(1, c.hidden) && set_vector(m.fc_bias, 0, data, type, c.hidden);
      break;
    case OUTRIDER_HIDDEN_NORM:
      good = shape(1, c.hidden) && set_vector(m.hidden_norm, 0, data, type, c.hidden);
      break;
    case OUTRIDER_MARKOV_EMBED:
      good = shape(c.vocab, c.markov_rank);
      for (int i = 0; good && i < c.vocab; ++i) {
        const size_t row = size_t(i) * size_t(c.markov_rank);
        set_vector(m.markov_embed, row, p + row * source_bytes(type), type, c.markov_rank);
      }
      break;
    case OUTRIDER_MARKOV_HEAD: good = whole(m.markov_head, c.head_rows, c.markov_rank); break;
    case OUTRIDER_ATTENTION_NORM:
      good = shape(1, c.hidden) && set_vector(l->attention_norm, 0, data, type, c.hidden);
      break;
    case OUTRIDER_MLP_NORM:
      good = shape(1, c.hidden) && set_vector(l->mlp_norm, 0, data, type, c.hidden);
      break;
    case OUTRIDER_Q: good = takes_heads && heads_into_qkv(0, 0, c.heads); break;
    case OUTRIDER_K: good = takes_heads && heads_into_qkv(1, c.heads, c.kv_heads); break;
    case OUTRIDER_V: good = takes_heads && heads_into_qkv(2, c.heads + c.kv_heads, c.kv_heads); break;
    case OUTRIDER_O:
      good = l->attends &&
             whole(l->o, c.hidden,
                   m.is(OUTRIDER_MEDUSA) || l->width ? c.hidden : c.heads * m.value_dim());
      break;
    case OUTRIDER_MIX: good = l->width && whole(l->qkv.part[0], 3 * c.hidden, c.hidden); break;
    case OUTRIDER_MIX_BIAS: good = l->width && vector(l->mix_bias, 3 * c.hidden); break;
    case OUTRIDER_CONVOLUTION:
      good = l->width && shape(c.hidden, l->width) &&
             set_vector(l->convolution, 0, data, type, c.hidden * l->width);
      break;
    case OUTRIDER_CONVOLUTION_BIAS: good = l->width && vector(l->convolution_bias, c.hidden); break;
    case OUTRIDER_STATE_IN: good = recurs && whole(l->state_in, mixer.product(), c.hidden); break;
    case OUTRIDER_STATE_IN_BIAS: good = recurs && vector(l->state_in_bias, mixer.product()); break;
    case OUTRIDER_STATE_OUT: good = recurs && whole(l->state_out, c.hidden, mixer.inner()); break;
    case OUTRIDER_STATE_OUT_BIAS: good = recurs && vector(l->state_out_bias, c.hidden); break;
    case OUTRIDER_STEP_BIAS: good = recurs && vector(l->step_bias, mixer.of.heads); break;
    case OUTRIDER_RATE: good = recurs && vector(l->rate, mixer.of.heads); break;
    case OUTRIDER_SKIP: good = recurs && vector(l->skip, mixer.of.heads); break;
    case OUTRIDER_STATE_NORM: good = recurs && vector(l->state_norm, mixer.inner()); break;
    case OUTRIDER_STATE_CONVOLUTION:
      good = recurs && shape(mixer.channels(), mixer.of.width);
      if (good) set_turned(l->convolution, data, type, mixer.channels(), mixer.of.width);
      break;
    case OUTRIDER_STATE_CONVOLUTION_BIAS:
      good = recurs && vector(l->convolution_bias, mixer.channels());
      break;
    case OUTRIDER_O_GATE:
      good = c.parts.gates_attention && takes_heads &&
             whole(l->o_gate, c.heads * c.head_dim, c.hidden);
      break;
    case OUTRIDER_O_GATE_BIAS: good = takes_heads && vector(l->o_gate_bias, c.heads * c.head_dim); break;
    case OUTRIDER_Q_BIAS:
      good = shape(1, q) && set_heads(m, l->qkv_bias, 0, c.heads, data, type);
      break;
    case OUTRIDER_K_BIAS:
      good = shape(1, kv) && set_heads(m, l->qkv_bias, c.heads, c.kv_heads, data, type);
      break;
    case OUTRIDER_V_BIAS:
      good = shape(1, kv) && set_heads(m, l->qkv_bias, c.heads + c.kv_heads, c.kv_heads, data, type);
      break;
    case OUTRIDER_O_BIAS:
      good = shape(1, c.hidden) && set_vector(l->o_bias, 0, data, type, c.hidden);
      break;
    case OUTRIDER_Q_NORM: good = vector(l->q_norm, c.parts.qk_span ? q : c.head_dim); break;
    case OUTRIDER_K_NORM: good = vector(l->k_norm, c.parts.qk_span ? kv : c.head_dim); break;
    case OUTRIDER_ATTENTION_NORM_BIAS: good = vector(l->attention_norm_bias, c.hidden); break;
    case OUTRIDER_MLP_NORM_BIAS: good = vector(l->mlp_norm_bias, c.hidden); break;
    case OUTRIDER_ATTENTION_OUT_NORM: good = vector(l->attention_out_norm, c.hidden); break;
    case OUTRIDER_MLP_OUT_NORM: good = vector(l->mlp_out_norm, c.hidden); break;
    case OUTRIDER_SINKS: good = vector(l->sinks, c.heads); break;
    case OUTRIDER_FINAL_NORM_BIAS: good = vector(m.final_norm_bias, c.hidden); break;
    case OUTRIDER_HEAD_BIAS: good = vector(m.head_bias, c.head_rows); break;
    case OUTRIDER_ROUTER:
    case OUTRIDER_SHARED_GATE: {
      const int count = kind == OUTRIDER_ROUTER ? c.experts.count : 1;
      const int first = kind == OUTRIDER_ROUTER ? 0 : c.experts.count;
      good = l->sparse() && (kind == OUTRIDER_ROUTER || c.experts.shared_gate) &&
             shape(count, c.hidden) && pack(l->router, {p, type, count, c.hidden, count, count, first});
      break;
    }
    case OUTRIDER_ROUTER_BIAS: good = vector(l->router_bias, c.experts.count); break;
    case OUTRIDER_CHOICE_BIAS: good = vector(l->choice_bias, c.experts.count); break;
    case OUTRIDER_POSITIONS:
      good = shape(c.parts.position_rows, c.hidden);
      for (int i = 0; good && i < c.parts.position_rows; ++i) {
        const size_t row = size_t(i) * size_t(c.hidden);
        set_vector(m.positions, row, p + row * source_bytes(type), type, c.hidden);
      }
      break;
    case OUTRIDER_Q_A: good = whole(l->q_a, c.parts.latent_q, c.hidden); break;
    case OUTRIDER_Q_A_NORM: good = vector(l->q_a_norm, c.parts.latent_q); break;
    case OUTRIDER_KV_A:
      good = whole(l->kv_a, c.parts.latent_kv + c.parts.latent_rope, c.hidden);
      break;
    case OUTRIDER_KV_A_NORM: good = vector(l->kv_a_norm, c.parts.latent_kv); break;
    case OUTRIDER_SLOPES: good = vector(m.slopes, c.heads); break;
    case OUTRIDER_EMBEDDING_NORM: good = vector(m.embedding_norm, c.hidden); break;
    case OUTRIDER_EMBEDDING_NORM_BIAS: good = vector(m.embedding_norm_bias, c.hidden); break;
    case OUTRIDER_GATE: good = half_of_gate_up(0); break;
    case OUTRIDER_UP: good = half_of_gate_up(1); break;
    case OUTRIDER_DOWN: good = whole(l->down, c.hidden, l->inner); break;
    case OUTRIDER_GATE_BIAS: good = half_of_bias(0); break;
    case OUTRIDER_UP_BIAS: good = half_of_bias(1); break;
    case OUTRIDER_DOWN_BIAS:
      good = shape(1, c.hidden) && set_vector(l->down_bias, 0, data, type, c.hidden);
      break;
  }
  if (good) seen |= uint64_t(1) << kind;
  return good;
}

bool set_expert(OutriderModel& m, int part, int layer, int expert, const void* data, int32_t type,
                int64_t rows, int64_t columns, int threads) {
  const auto& c = m.config;
  const OutriderExperts& e = c.experts;
  if (!data || layer < 0 || layer >= c.layers || !m.layers[size_t(layer)].sparse() || expert < 0 ||
      expert >= e.count || part < 0 || part > OUTRIDER_EXPERT_DOWN_BIAS)
    return set_error("no such expert");
  Layer& l = m.layers[size_t(layer)];
  const char* p = static_cast<const char*>(data);
  const int which = part % 3, hidden = c.hidden, inner = e.inner, flags = type & OUTRIDER_IN_FILE;
  type &= ~OUTRIDER_IN_FILE;
  if (c.parts.plain_mlp && which == OUTRIDER_EXPERT_GATE) return set_error("experts without gates");
  const Matrix& made = which == OUTRIDER_EXPERT_DOWN ? l.expert_down[0] : l.expert_gate_up[0];
  const bool same = part <= OUTRIDER_EXPERT_DOWN && (is_packed(made.type) || made.type == kF16);
  if ((flags && !is_packed(type)) ||
      (same ? type != made.type : type != kF32 && type != kBF16 && type != kF16))
    return set_error("a tensor of a type that its matrix is not made of");
  const bool down = which == OUTRIDER_EXPERT_DOWN, bias = part > OUTRIDER_EXPERT_DOWN;
  const int outputs = down ? hidden : inner, inputs = down ? inner : hidden;
  if (rows != (bias ? 1 : outputs) || columns != (bias ? outputs : inputs) || (bias && !e.bias))
    return fail_shape(100 + part, layer, rows, columns);
  if (bias) {
    const size_t width = down ? size_t(hidden) : size_t(round_up(inner, kLanes)) * 2;
    std::vector<float>& v = down ? l.expert_down_bias : l.expert_gate_up_bias;
    v.resize(width * size_t(e.count));
    float* out = v.data() + width * size_t(expert);
    if (down) {
      read_row(p, type, hidden, out);
    } else {
      spread_half(p, type, inner, which, out);
    }
  } else {
    Matrix& w = (down ? l.expert_down : l.expert_gate_up)[size_t(expert)];
    const bool alone = down || c.parts.plain_mlp;
    const int run = alone ? outputs : kLanes;
    const PackSource source{p, type, outputs, inputs, run, alone ? run : 2 * kLanes,
                            alone ? 0 : which * kLanes};
    if (!place_rows(m, w, source, flags, threads)) return false;
  }
  l.expert_seen[size_t(expert)] |= uint8_t(1 << part);
  return true;
}

// Copies one slot of a tile of keys and one of values to `keep`, or back.
template <class T>
void copy_slot(T* keys, T* values, int lane, int dim_p, T* keep, bool back) {
  T *k = keys + lane, *v = values + size_t(lane) * size_t(dim_p);
  for (int d = 0; d < dim_p; ++d) {
    if (back) {
      k[d * kLanes] = keep[d], v[d] = keep[dim_p + d];
    } else {
      keep[d] = k[d * kLanes], keep[dim_p + d] = v[d];
    }
  }
}

// Rounds n floats to int8, `step` apart, and returns their scale: NaN if one of them is not finite.
float put_bytes(const float* x, int n, int8_t* out, int step) {
  float top = 0;
  bool finite = true;
  for (int i = 0; i < n; ++i) {
    finite = finite && std::isfinite(x[i]);
    top = std::max(top, std::fabs(x[i]));
  }
  const float inverse = finite && top > 0 ? 127.0f / top : 0.0f;
  for (int i = 0; i < n; ++i) out[i * step] = int8_t(std::isfinite(inverse) && finite ? std::nearbyint(x[i] * inverse) : 0);
  return finite ? top / 127.0f : std::nanf("");
}

constexpr int kLayerTypes = 9;  // of a layer's matrices in OutriderConfig.types

// One mapping for all weights, in the order a step reads them: few huge pages, no gaps.
class Places {
 public:
  explicit Places(int32_t type) : type_(type) {}

  void add(Matrix& w, int n, int k, int32_t type = kUsual) {
    if (n == 0 || k == 0) return;
    const size_t bytes = describe(w, type == kUsual ? type_ : type, n, k);
    places_.push_back({&w, total_, bytes});
    total_ += (bytes + 4096) / 4096 * 4096;
  }

  // `types` null: all of the usual type.
  void add_together(Weights& w, std::initializer_list<int> outputs, int k, const int32_t* types) {
    const int count = int(outputs.size());
    int n = 0, i = 0;
    for (int part : outputs) n += part;
    w.panels = (n + kLanes - 1) / kLanes;
    w.parts = types && std::any_of(types, types + count, [&](int t) { return t != *types; }) ? count
                                                                                             : 1;
    if (w.parts == 1) return add(w.part[0], n, k, types ? *types : kUsual);
    for (int part : outputs) add(w.part[i], part, k, types[i]), ++i;
  }

  bool reserve(Memory& memory) {
    if (!memory.reserve(total_)) return false;
    for (auto& p : places_) {
      p.m->data = memory.data() + p.offset;
      guard(p.m->data, p.bytes, (p.bytes + 4096) / 4096 * 4096);
      p.m->scale = reinterpret_cast<float*>(p.m->data + size_t(p.m->panels) * p.m->panel_bytes());
    }
    return true;
  }

  static constexpr int32_t kUsual = -2;

 private:
  struct Place {
    Matrix* m;
    size_t offset, bytes;
  };
  std::vector<Place> places_;
  size_t total_ = 0;
  int32_t type_;
};

bool place_weights(OutriderModel& m) {
  const auto& c = m.config;
  const int32_t* types = c.types;
  Places places(c.weight_type);
  if (types && is_packed(types[0])) {
    m.embedding = types[1] == OUTRIDER_TIED ? &m.head : &m.own_embedding;
    if (m.embedding != &m.head) places.add(m.own_embedding, c.vocab, c.hidden, types[0]);
  }
  const int32_t precise = m.fine() ? kBF16 : Places::kUsual;
  if (m.fc_inputs()) places.add(m.fc, c.hidden, m.fc_inputs(), precise);
  const int dp = m.dim_p;
  for (int i = 0; i < c.layers; ++i) {
    Layer& l = m.layers[size_t(i)];
    const int32_t* own = types ? types + 2 + kLayerTypes * i : nullptr;
    if (m.is(OUTRIDER_MEDUSA)) {
      places.add(l.o, c.hidden, c.hidden, precise);
      continue;
    }
    const OutriderParts& parts = c.parts;
    const int32_t type_of_o = own ? own[3] : Places::kUsual;
    if (l.state >= 0) {
      // Without attention, they take the types of its products.
      const MixerSizes& mixer = m.states.sizes;
      const bool alone = own && !l.attends;
      places.add(l.state_in, mixer.product(), c.hidden, alone ? own[0] : own ? kF32 : Places::kUsual);
      places.add(l.state_out, c.hidden, mixer.inner(), alone ? own[3] : own ? kF32 : Places::kUsual);
    }
    if (!l.attends) {
    } else if (l.width) {
      places.add_together(l.qkv, {3 * c.hidden}, c.hidden, own);
    } else if (parts.latent_kv) {
      places.add(l.q_a, parts.latent_q, c.hidden, type_of_o);
      places.add(l.q_b, c.heads * dp, parts.latent_q ? parts.latent_q : c.hidden, type_of_o);
      places.add(l.kv_a, parts.latent_kv + parts.latent_rope, c.hidden, type_of_o);
      places.add(l.kv_b, 2 * c.kv_heads * dp, parts.latent_kv, type_of_o);
    } else {
      places.add_together(l.qkv, {c.heads * dp, c.kv_heads * dp, c.kv_heads * dp},
                          m.layer_inputs(i), own);
    }
    if (l.attends) places.add(l.o, c.hidden, l.width ? c.hidden : c.heads * m.value_dim(), type_of_o);
    if (l.attends && parts.gates_attention)
      places.add(l.o_gate, c.heads * c.head_dim, c.hidden, own ? kF32 : Places::kUsual);
    const int inner = round_up(l.inner, kLanes);
    if (c.parts.plain_mlp) {
      places.add_together(l.gate_up, {inner}, c.hidden, own ? own + 5 : nullptr);
    } else {
      places.add_together(l.gate_up, {inner, inner}, c.hidden, own ? own + 4 : nullptr);
      l.gate_up.take_turns = l.gate_up.parts == 2;
    }
    places.add(l.down, c.hidden, l.inner, own ? own[6] : Places::kUsual);
    if (!l.sparse()) continue;
    places.add(l.router, c.experts.count + (c.experts.shared_gate ? 1 : 0), c.hidden, kF32);
    for (size_t e = 0; e < l.expert_down.size(); ++e) {
      const int rows = round_up(c.experts.inner, kLanes) * (c.parts.plain_mlp ? 1 : 2);
      places.add(l.expert_gate_up[e], rows, c.hidden, own ? own[7] : Places::kUsual);
      places.add(l.expert_down[e], c.hidden, c.experts.inner, own ? own[8] : Places::kUsual);
    }
  }
  const int32_t head = !types ? Places::kUsual : types[1] == OUTRIDER_TIED ? types[0] : types[1];
  if (m.is(OUTRIDER_MEDUSA) && m.varies(OUTRIDER_OWN_HEADS)) {
    m.heads.resize(size_t(c.intermediate));
    for (Matrix& own : m.heads) places.add(own, c.head_rows, c.hidden);
  } else {
    places.add(m.head, c.head_rows, c.hidden, head);
  }
  places.add(m.markov_head, c.head_rows, c.markov_rank, kF32);  // a row of it is too short to quantise
  m.blocks = types || m.fine();
  m.config.types = nullptr;  // the caller's
  return places.reserve(m.weights);
}

// Whether a matrix of width k can be of this type.
bool suits(int32_t type, int k) {
  return type == kF32 || type == kBF16 || type == kF16 ||
         (packed_block(type) && k % packed_block(type) == 0);
}

bool types_suit(const OutriderConfig& c) {
  const int32_t* types = c.types;
  if (!types) return true;
  if (c.kind || !suits(types[0], c.hidden)) return false;
  if (types[1] != OUTRIDER_TIED ? !suits(types[1], c.hidden) : !is_packed(types[0])) return false;
  for (int l = 0; l < c.layers; ++l) {
    for (int i = 0; i < kLayerTypes; ++i) {
      const int value_dim = c.parts.value_dim ? c.parts.value_dim : c.head_dim;
      const int inner = i == 8 ? c.experts.inner : c.experts.inner_of ? c.experts.inner_of[l] : c.intermediate;
      const bool alone = c.mixer.mixes && !(c.mixer.mixes[l] & OUTRIDER_ATTENDS);
      const int width_of_o = alone ? c.mixer.heads * c.mixer.outputs : c.heads * value_dim;
      const int k = i == 3 ? width_of_o : i == 6 || i == 8 ? inner : c.hidden;
      if (!suits(types[2 + kLayerTypes * l + i], k)) return false;
    }
  }
  return true;
}

bool experts_make_sense(const OutriderConfig& c) {
  const OutriderExperts& e = c.experts;
  auto in = [](int64_t v, int64_t lo, int64_t hi) { return v >= lo && v <= hi; };
  if (!e.count) return true;
  if (!in(e.count, 1, 4096) || !in(e.active, 1, e.count) || !in(e.inner, 1, 1 << 20) || !e.inner_of ||
      !e.sparse || !in(e.router, OUTRIDER_SOFTMAX, OUTRIDER_SIGMOID_OF_CHOSEN) || !in(e.groups, 1, e.count) ||
      e.count % e.groups || !in(e.open_groups, 1, e.groups) || e.group_best < 1 ||
      e.active > e.count / e.groups * e.open_groups || c.kind || (c.parts.plain_mlp && e.bias) ||
      c.parts.parallel || (e.router == OUTRIDER_SPARSEMIXER && (e.active != 2 || e.count < 2)))
    return false;
  for (int l = 0; l < c.layers; ++l) {
    if (!in(e.inner_of[l], 0, 1 << 20)) return false;
    // The norm of what a layer adds would be over both, and experts are added alone.
    if (e.sparse[l] && e.inner_of[l] && c.parts.out_norms) return false;
  }
  return true;
}

bool latent_makes_sense(const OutriderConfig& c) {
  const OutriderParts& p = c.parts;
  auto in = [](int64_t v, int64_t lo, int64_t hi) { return v >= lo && v <= hi; };
  if (!in(p.value_dim, 0, c.head_dim)) return false;
  if (!p.latent_kv) return !p.latent_q && !p.latent_rope;
  for (int i = 0; c.types && i < kLayerTypes * c.layers; ++i)
    if (i % kLayerTypes < 3 && is_packed(c.types[2 + i])) return false;  // queries, keys and values
  return in(p.latent_kv, 1, 1 << 17) && in(p.latent_q, 0, 1 << 17) && in(p.latent_rope, 0, c.head_dim) &&
         c.heads == c.kv_heads && !c.qk_norm && !c.kind && !p.layer_norm;
}

bool mixer_makes_sense(const OutriderConfig& c) {
  const OutriderMixer& x = c.mixer;
  auto in = [](int64_t v, int64_t lo, int64_t hi) { return v >= lo && v <= hi; };
  if (c.parts.gates_attention && (c.kind || c.parts.latent_kv || c.parts.value_dim)) return false;
  if (!x.mixes) return in(x.rows, 0, 0);
  const int64_t inner = int64_t(x.heads) * x.outputs;
  bool good = in(x.heads, 1, 4096) && in(x.groups, 1, x.heads) && x.heads % x.groups == 0 &&
              in(x.rows, 1, 4096) && in(x.outputs, 1, 4096) && in(x.width, 1, 64) && in(inner, 1, 1 << 20) &&
              in(x.norm_groups, 0, inner) && (!x.norm_groups || inner % x.norm_groups == 0) && !c.kind &&
              !c.parts.parallel && !c.parts.no_input_norms;
  for (int l = 0; good && l < c.layers; ++l) good = in(x.mixes[l], 0, 3) && !(c.widths && c.widths[l]);
  return good;
}

bool stays_make_sense(const OutriderConfig& c) {
  const OutriderParts& p = c.parts;
  if (p.either_norms && (!p.out_norms || p.no_input_norms || c.stays)) return false;
  if (!c.stays) return true;
  for (int l = 0; l < c.layers; ++l)
    if (!(c.stays[2 * l] >= 0) || !(c.stays[2 * l + 1] > 0)) return false;
  return !c.kind && !c.widths && !p.parallel && !p.one_norm && !p.no_input_norms && !p.latent_kv;
}

bool valid(const OutriderConfig& c) {
  auto in = [](int64_t v, int64_t lo, int64_t hi) { return v >= lo && v <= hi; };
  return in(c.hidden, 1, 1 << 17) && in(c.layers, 0, 4096) && in(c.heads, 1, 4096) &&
         in(c.kv_heads, 1, c.heads) && c.heads % c.kv_heads == 0 && in(c.head_dim, 1, 1024) &&
         in(c.intermediate, 1, 1 << 20) && in(c.vocab, 1, 1 << 24) &&
         in(c.num_tokens, 1, c.vocab) && in(c.rotary_dim, 0, c.head_dim) &&
         c.rotary_dim % 2 == 0 && (in(c.weight_type, 0, 4) || (c.kind && c.weight_type == kQ8_0)) &&
         in(c.rounds, 0, c.weight_type == kBF16) && c.eps >= 0 && c.attention_scale > 0 &&
         in(c.kind, OUTRIDER_DECODER, OUTRIDER_MEDUSA) && in(c.head_rows, 1, c.vocab) &&
         in(c.kv_bytes, 0, c.kind == OUTRIDER_DECODER) && in(c.feature_width, c.kind ? 1 : 0, c.kind ? 1 << 20 : 0) && c.feature_width % 2 == 0 &&
         in(c.markov_rank, 0, c.kind == OUTRIDER_DFLASH ? 4096 : 0) &&
         in(c.parts.qk_span, OUTRIDER_HEAD_SPAN, OUTRIDER_ROW_SPAN) &&
         in(c.parts.activation, OUTRIDER_SILU, OUTRIDER_RELU2) &&
         in(c.parts.position_rows, 0, 1 << 24) && in(c.parts.position_offset, 0, 1 << 16) &&
         c.parts.growth_every >= (c.parts.growth != 0) && c.parts.score_cap >= 0 && c.parts.logit_cap >= 0 && experts_make_sense(c) && latent_makes_sense(c) &&
         mixer_makes_sense(c) && stays_make_sense(c) &&
         (c.kind != OUTRIDER_EAGLE3 || c.layers > 0) && in(c.variant, 0, c.kind ? 127 : 0) &&
         (!(c.variant & (OUTRIDER_PROJECTS | OUTRIDER_FUSED)) || c.feature_width == c.hidden) &&
         (c.kind != OUTRIDER_MEDUSA ||
          (c.layers % c.intermediate == 0 && c.feature_width == c.hidden)) &&
         types_suit(c);
}

}  // namespace
}  // namespace outrider

using namespace outrider;

void OutriderModel::store_key(int layer, int head, int slot, const float* key) const {
  float* k = tile(keys(layer, head), slot);
  const int lane = slot % kLanes;
  if (config.kv_bytes) {
    k[dim_p * kLanes / 4 + lane] = put_bytes(key, config.head_dim, reinterpret_cast<int8_t*>(k) + lane, kLanes);
    return;
  }
  for (int d = 0; d < config.head_dim; ++d) k[d * kLanes + lane] = key[d];
}

void OutriderModel::store_value(int layer, int head, int slot, const float* value) const {
  float* v = tile(values(layer, head), slot);
  const int lane = slot % kLanes;
  if (config.kv_bytes) {
    int8_t* at = reinterpret_cast<int8_t*>(v) + lane * dim_p;
    v[dim_p * kLanes / 4 + lane] = put_bytes(value, config.head_dim, at, 1);
    return;
  }
  memcpy(v + size_t(lane) * dim_p, value, size_t(config.head_dim) * 4);
}

extern "C" {

const char* outrider_error(void) { return last_error.c_str(); }

OutriderModel* outrider_new(const OutriderConfig* config) {
  const Kernels* kernels = kernels_or_error();
  if (!kernels) return nullptr;
  if (!config || !valid(*config)) {
    set_error("the model's sizes make no sense to the native engine");
    return nullptr;
  }
  auto* m = new (std::nothrow) OutriderModel;
  if (!m) return nullptr;
  m->config = *config;
  m->kernels = kernels;
  m->layers = std::vector<Layer>(size_t(config->layers));
  m->dim_p = round_up(config->head_dim, kLanes);
  m->head_stride = size_t(kLanes) * m->dim_p / (config->kv_bytes ? 4 : 1) + kLanes;
  int attentions = 0;
  const OutriderMixer& mixer = config->mixer;
  MixerSizes& sizes = m->states.sizes;
  for (int l = 0; l < config->layers; ++l) {
    Layer& layer = m->layers[size_t(l)];
    layer.width = config->widths ? config->widths[l] : 0;
    layer.attends = !mixer.mixes || mixer.mixes[l] & OUTRIDER_ATTENDS;
    for (int i = 0; config->stays && i < 2; ++i) layer.stays[i] = config->stays[2 * l + i];
    if (mixer.mixes && mixer.mixes[l] & OUTRIDER_RECURS) layer.state = sizes.layers++;
    if (layer.attends) layer.place = layer.width ? m->convolutions++ : attentions++;
  }
  sizes.of = mixer;
  m->unit_weight[0].assign(size_t(mixer.rows), 1.0f / float(mixer.rows));
  m->unit_weight[1].assign(size_t(mixer.rows), 1.0f / std::sqrt(float(mixer.rows)));
  m->config.widths = m->config.mixer.mixes = sizes.of.mixes = nullptr;  // the caller's
  m->config.stays = nullptr;
  m->tile_stride = size_t(attentions) * 2 * size_t(config->kv_heads) * m->head_stride;
  const OutriderExperts& experts = config->experts;
  for (int l = 0; l < config->layers; ++l) {
    Layer& layer = m->layers[size_t(l)];
    layer.inner = experts.inner_of ? experts.inner_of[l] : config->intermediate;
    if (!experts.count || !experts.sparse[l]) continue;
    layer.expert_gate_up = std::vector<Matrix>(size_t(experts.count));
    layer.expert_down = std::vector<Matrix>(size_t(experts.count));
    layer.expert_seen.assign(size_t(experts.count), 0);
  }
  m->config.experts.inner_of = m->config.experts.sparse = nullptr;  // the caller's
  if (!place_weights(*m)) {
    delete m;
    return nullptr;
  }
  return m;
}

void outrider_free(OutriderModel* model) { delete model; }

int32_t outrider_set_tensor(OutriderModel* m, int32_t kind, int32_t layer, const void* data,
                            int32_t type, int64_t rows, int64_t columns, int32_t threads) {
  std::lock_guard<std::mutex> lock(m->mutex);
  return set_tensor(*m, kind, layer, data, type, rows, columns, threads) ? OUTRIDER_OK
                                                                         : OUTRIDER_INVALID;
}

int32_t outrider_set_expert(OutriderModel* m, int32_t part, int32_t layer, int32_t expert,
                            const void* data, int32_t type, int64_t rows, int64_t columns,
                            int32_t threads) {
  std::lock_guard<std::mutex> lock(m->mutex);
  return set_expert(*m, part, layer, expert, data, type, rows, columns, threads) ? OUTRIDER_OK
                                                                                 : OUTRIDER_INVALID;
}

int32_t outrider_set_layer(OutriderModel* m, int32_t layer, int32_t window, int32_t chunk,
                           int32_t rope, int32_t causal) {
  if (layer < 0 || layer >= m->config.layers || window < 0 || chunk < 0 || rope < -1 ||
      rope >= kMaxRopes) {
    return set_error("no such layer, window, chunk or rope"), OUTRIDER_INVALID;
  }
  Layer& l = m->layers[size_t(layer)];
  l.window = window, l.chunk = chunk, l.rope = rope, l.causal = causal != 0;
  m->last_rope = std::max(m->last_rope, rope);
  return OUTRIDER_OK;
}

int32_t outrider_set_rope(OutriderModel* m, int32_t index, const float* cosine, const float* sine,
                          int32_t positions) {
  std::lock_guard<std::mutex> lock(m->mutex);
  if (positions < 0 || index < 0 || index >= kMaxRopes)
    return set_error("no such rope or positions"), OUTRIDER_INVALID;
  const size_t n = size_t(positions) * (m->config.rotary_dim / 2);
  if (m->ropes.size() <= size_t(index)) m->ropes.resize(size_t(index) + 1);
  m->ropes[size_t(index)].cosine.assign(cosine, cosine + n);
  m->ropes[size_t(index)].sine.assign(sine, sine + n);
  m->rope_positions = positions;
  return OUTRIDER_OK;
}

int32_t outrider_set_ids(OutriderModel* m, const int32_t* ids, int32_t count) {
  std::lock_guard<std::mutex> lock(m->mutex);
  if (count != m->config.head_rows) return set_error("one id per row of the head"), OUTRIDER_INVALID;
  for (int32_t i = 0; i < count; ++i) {
    if (ids[i] < (i ? ids[i - 1] + 1 : 0) || ids[i] >= m->config.vocab) {
      return set_error("ids must ascend within the vocabulary"), OUTRIDER_INVALID;
    }
  }
  m->ids.assign(ids, ids + count);
  return OUTRIDER_OK;
}

int32_t outrider_pack(OutriderModel* m, int32_t threads) {
  std::lock_guard<std::mutex> lock(m->mutex);
  return m->stored.pack(SIZE_MAX, threads) ? OUTRIDER_OK : OUTRIDER_CHANGED;
}

int32_t outrider_ready(OutriderModel* m) {
  auto has = [](uint64_t seen, std::initializer_list<int> kinds) {
    for (int k : kinds)
      if (!(seen >> k & 1)) return false;
    return true;
  };
  const bool projects = m->is(OUTRIDER_EAGLE3) && m->varies(OUTRIDER_PROJECTS);
  const bool normed = (!projects || m->varies(OUTRIDER_FEEDS_NORMED)) && !m->varies(OUTRIDER_AS_GIVEN);
  bool good = has(m->seen, {OUTRIDER_HEAD}) && (!normed || has(m->seen, {OUTRIDER_FINAL_NORM}));
  good = good && m->heads_seen == int(m->heads.size());
  if (!m->is(OUTRIDER_MEDUSA)) good = good && has(m->seen, {OUTRIDER_EMBED});
  if (m->fc.data) good = good && has(m->seen, {OUTRIDER_FC});
  if ((m->fc.data || m->is(OUTRIDER_EAGLE3)) && !projects)
    good = good && has(m->seen, {OUTRIDER_HIDDEN_NORM});
  if (m->config.markov_rank)
    good = good && has(m->seen, {OUTRIDER_MARKOV_EMBED, OUTRIDER_MARKOV_HEAD});
  if (m->config.parts.position_rows) good = good && has(m->seen, {OUTRIDER_POSITIONS});
  good = good && (m->config.head_rows == m->config.vocab || !m->ids.empty());
  for (auto& l : m->layers) {
    if (m->is(OUTRIDER_MEDUSA)) {
      good = good && has(l.seen, {OUTRIDER_O});
      continue;
    }
    const OutriderParts& parts = m->config.parts;
    const OutriderExperts& experts = m->config.experts;
    const bool norms_attended = l.attends || l.state >= 0;
    if (l.state >= 0) {
      const OutriderMixer& mixer = m->states.sizes.of;
      good = good && has(l.seen, {OUTRIDER_STATE_IN, OUTRIDER_STATE_OUT, OUTRIDER_STEP_BIAS,
                                  OUTRIDER_RATE, OUTRIDER_STATE_CONVOLUTION});
      if (!mixer.delta) good = good && has(l.seen, {OUTRIDER_SKIP});
      if (mixer.norm_groups) good = good && has(l.seen, {OUTRIDER_STATE_NORM});
    }
    if (l.attends && parts.gates_attention) good = good && has(l.seen, {OUTRIDER_O_GATE});
    if (!l.attends) {
    } else if (l.width) {
      good = good && has(l.seen, {OUTRIDER_MIX, OUTRIDER_CONVOLUTION, OUTRIDER_O});
    } else {
      good = good && has(l.seen, {OUTRIDER_Q, OUTRIDER_K, OUTRIDER_V, OUTRIDER_O});
    }
    if (parts.latent_kv) good = good && has(l.seen, {OUTRIDER_KV_A, OUTRIDER_KV_A_NORM});
    if (parts.latent_q) good = good && has(l.seen, {OUTRIDER_Q_A, OUTRIDER_Q_A_NORM});
    if (l.inner) good = good && has(l.seen, {OUTRIDER_UP, OUTRIDER_DOWN});
    if (l.inner && !parts.plain_mlp) good = good && has(l.seen, {OUTRIDER_GATE});
    if (l.sparse()) good = good && has(l.seen, {OUTRIDER_ROUTER});
    if (l.sparse() && experts.shared_gate) good = good && has(l.seen, {OUTRIDER_SHARED_GATE});
    for (uint8_t seen : l.expert_seen) good = good && seen == (experts.bias ? 63 : parts.plain_mlp ? 6 : 7);
    const bool after = parts.out_norms && !(parts.either_norms && l.attention_out_norm.empty());
    const bool before = !parts.no_input_norms && !(parts.either_norms && after);
    const bool begins = l.stays[1] != 0 && l.stays[0] == 0;  // attention reads the residual itself
    if (before && norms_attended && !begins && (!projects || &l != &m->layers[0]))
      good = good && has(l.seen, {OUTRIDER_ATTENTION_NORM});
    if (before && !parts.one_norm && (l.inner || l.sparse())) good = good && has(l.seen, {OUTRIDER_MLP_NORM});
    if (after)
      good = good && has(l.seen, {OUTRIDER_ATTENTION_OUT_NORM, OUTRIDER_MLP_OUT_NORM});
    if (m->config.qk_norm && l.attends && !l.width && !(parts.qk_rotated && l.rope < 0)) good = good && has(l.seen, {OUTRIDER_Q_NORM, OUTRIDER_K_NORM});
  }
  if (!good) return set_error("the checkpoint lacks tensors"), OUTRIDER_INVALID;
  for (auto& l : m->layers) {
    if (!l.standing[1].empty()) continue;  // asked before
    if (l.stays[0] != 0) l.standing[0].swap(l.attention_norm), l.standing_bias[0].swap(l.attention_norm_bias);
    if (l.stays[1] != 0) l.standing[1].swap(l.mlp_norm), l.standing_bias[1].swap(l.mlp_norm_bias);
  }
  return OUTRIDER_OK;
}

int32_t outrider_allocate(OutriderModel* m, int32_t blocks, int32_t block_size) {
  std::lock_guard<std::mutex> lock(m->mutex);
  if (blocks < 1 || block_size < 1 || int64_t(blocks) * block_size > (int64_t(1) << 30)) {
    return set_error("a cache needs at least one block of at least one slot"), OUTRIDER_INVALID;
  }
  const size_t tiles = (size_t(blocks) * block_size + kLanes - 1) / kLanes;
  m->num_blocks = m->block_size = 0;
  const size_t bytes = tiles * m->tile_stride * 4;
  if (!m->cache.reserve(bytes)) return OUTRIDER_MEMORY;
  const size_t inputs = size_t(m->convolutions) * size_t(m->config.hidden) * size_t(blocks) * block_size;
  if (inputs && !m->inputs.reserve(inputs * 4)) return OUTRIDER_MEMORY;
  m->states.begin(blocks * block_size, block_size, bytes);
  guard(m->cache.data(), bytes, m->cache.size());
  m->num_blocks = blocks;
  m->block_size = block_size;
  return OUTRIDER_OK;
}

int64_t outrider_populate(OutriderModel* m, int64_t offset, int64_t bytes) {
#if defined(__linux__)
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers lack
  const int64_t left = int64_t(m->cache.size()) - offset;
  bytes = std::min(bytes, left);
  if (offset < 0 || offset % 4096 || bytes <= 0) return 0;
  return madvise(m->cache.data() + offset, size_t(bytes), kPopulateWrite) == 0 ? bytes : 0;
#else
  (void)m, (void)offset, (void)bytes;
  return 0;
#endif
}

int64_t outrider_weight_bytes(const OutriderModel* m) {
  return int64_t(m->weights.size());
}

int32_t outrider_copy_slots(OutriderModel* m, const int32_t* source, const int32_t* target,
                            int32_t count) {
  std::lock_guard<std::mutex> lock(m->mutex);
  const int64_t slots = int64_t(m->num_blocks) * m->block_size;
  for (int32_t i = 0; i < count; ++i) {
    if (source[i] < 0 || source[i] >= slots || target[i] < 0 || target[i] >= slots) {
      return set_error("slot out of range"), OUTRIDER_INVALID;
    }
  }
  if (m->states.sizes.layers) m->states.move(source, target, count);
  const int dp = m->dim_p, heads = m->config.kv_heads;
  const size_t per_slot = size_t(2) * dp;
  std::vector<float> kept(size_t(count) * heads * per_slot);  // as they are stored
  const size_t wide = size_t(m->convolutions) * size_t(m->config.hidden);
  std::vector<float> inputs(size_t(count) * wide);
  for (int pass = 0; wide && pass < 2; ++pass) {
    for (int32_t i = 0; i < count; ++i) {
      float* slot = m->inputs.floats() + size_t(pass ? target[i] : source[i]) * wide;
      float* keep = inputs.data() + size_t(i) * wide;
      memcpy(pass ? slot : keep, pass ? keep : slot, wide * 4);
    }
  }
  for (size_t layer = 0; layer < m->layers.size(); ++layer) {
    if (m->layers[layer].width || !m->layers[layer].attends) continue;
    for (int pass = 0; pass < 2; ++pass) {
      for (int32_t i = 0; i < count; ++i) {
        const int32_t slot = pass ? target[i] : source[i];
        for (int h = 0; h < heads; ++h) {
          float* keep = kept.data() + (size_t(i) * heads + h) * per_slot;
          float *k = m->tile(m->keys(int(layer), h), slot), *v = m->tile(m->values(int(layer), h), slot);
          if (m->config.kv_bytes) {
            copy_slot(reinterpret_cast<int8_t*>(k), reinterpret_cast<int8_t*>(v), slot % kLanes, dp,
                      reinterpret_cast<int8_t*>(keep), pass);
            float *scales[] = {k + dp * kLanes / 4, v + dp * kLanes / 4}, *of = keep + dp;
            for (int w = 0; w < 2; ++w) (pass ? scales[w][slot % kLanes] : of[w]) = pass ? of[w] : scales[w][slot % kLanes];
          } else {
            copy_slot(k, v, slot % kLanes, dp, keep, pass);
          }
        }
      }
    }
  }
  return OUTRIDER_OK;
}

}  // extern "C"
