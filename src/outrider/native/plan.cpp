// Checks a step once, and computes everything that is the same for all layers.
#include "plan.h"

#include <algorithm>

namespace outrider {
namespace {

bool bad(const char* what, int64_t index) {
  return set_error(std::string(what) + " (at index " + std::to_string(index) + ")");
}

bool check_tokens(const OutriderModel& m, const StepArgs& s) {
  for (int t = 0; t < s.num_tokens; ++t) {
    if (s.tokens[t] < 0 || s.tokens[t] >= m.config.vocab) return bad("token id out of range", t);
    if (s.positions[t] < 0) return bad("negative position", t);
  }
  for (int r = 0; r < s.num_rows; ++r) {
    if (s.logit_rows[r] < 0 || s.logit_rows[r] >= s.num_tokens)
      return bad("logit row out of range", r);
  }
  for (int i = 0; i < s.num_taps; ++i) {
    if (s.taps[i] < 0 || s.taps[i] > m.config.layers) return bad("no such tap", i);
  }
  if (s.exit_layer < -1 || s.exit_layer > m.config.layers) return set_error("no such exit layer");
  return true;
}

// `extra` slots beyond the new tokens must be reachable too (drafting).
bool check_sequences(const OutriderModel& m, const StepArgs& s, const int32_t* extra) {
  if (s.starts[0] != 0 || s.starts[s.num_seqs] != s.num_tokens)
    return set_error("starts do not span the tokens");
  for (int i = 0; i < s.num_seqs; ++i) {
    const int64_t n = int64_t(s.starts[i + 1]) - s.starts[i];
    if (n < 0 || s.starts[i] < 0 || s.starts[i + 1] > s.num_tokens)
      return bad("starts are not in order", i);
    if (s.context[i] < 0) return bad("negative context", i);
    if (n == 0) continue;
    const int64_t end = s.context[i] + n + (s.fed ? s.fed[i] : 0) + (extra ? std::max(0, extra[i]) : 0);
    const int64_t blocks = (end + m.block_size - 1) / m.block_size;
    if (blocks > s.table_width) return bad("sequence is longer than its block table", i);
    const int32_t* table = s.tables + int64_t(i) * s.table_width;
    for (int64_t b = 0; b < blocks; ++b) {
      if (table[b] < 0 || table[b] >= m.num_blocks) return bad("block out of range", b);
    }
    if (s.parents) {
      for (int64_t j = 0; j < n; ++j) {
        const int32_t parent = s.parents[s.starts[i] + j];
        if (parent < -1 || parent >= j) return bad("parent does not precede its child", j);
      }
    }
  }
  return true;
}

void add_segments(Plan& p, const OutriderModel& m, const int32_t* table, int length) {
  for (int slot = 0; slot < length;) {
    const int offset = slot % m.block_size;
    const int physical = table[slot / m.block_size] * m.block_size + offset;
    const int lane = physical % kLanes;
    const int count = std::min({kLanes - lane, m.block_size - offset, length - slot});
    // The kernel scores whole tiles, used or not.
    p.segments.push_back({physical / kLanes, int16_t(lane), int16_t(count), slot});
    slot += count;
  }
}

// The paths of all nodes that do not simply continue all earlier nodes.
void add_paths(Plan& p, const StepArgs& s, int seq) {
  const int first = s.starts[seq], n = s.starts[seq + 1] - first;
  int chain = 0;
  while (chain < n && s.parents[first + chain] == chain - 1) ++chain;
  for (int j = chain; j < n; ++j) {
    const int parent = s.parents[first + j];
    p.depth[size_t(first + j)] = 1 + (parent < 0          ? 0
                                      : parent < chain    ? parent + 1
                                                          : p.depth[size_t(first + parent)]);
    p.tree = true;
  }
  for (int j = 0; j < chain; ++j) p.depth[size_t(first + j)] = j + 1;
}

void fill_paths(Plan& p, const StepArgs& s) {
  size_t total = 0;
  for (int seq = 0; seq < s.num_seqs; ++seq)
    for (int t = s.starts[seq]; t < s.starts[seq + 1]; ++t)
      if (p.depth[size_t(t)] != t - s.starts[seq] + 1) total += size_t(p.depth[size_t(t)]);
  p.path_data.resize(total);
  int32_t* at = p.path_data.data();
  for (int seq = 0; seq < s.num_seqs; ++seq) {
    const int first = s.starts[seq];
    for (int t = first; t < s.starts[seq + 1]; ++t) {
      const int depth = p.depth[size_t(t)];
      if (depth == t - first + 1) continue;  // a chain up to here
      int node = t - first;
      for (int i = depth - 1; i >= 0; --i, node = s.parents[first + node]) at[i] = node;
      p.path[size_t(t)] = at;
      at += depth;
    }
  }
}

// The same for a growing tree: every new node has a path, which includes nodes of earlier passes.
void add_lineages(Plan& p, const StepArgs& s) {
  p.depth.assign(size_t(s.num_tokens), 0);
  p.path.assign(size_t(s.num_tokens), nullptr);
  p.path_data.clear();
  std::vector<size_t> at;
  for (int seq = 0; seq < s.num_seqs; ++seq) {
    const int32_t* parents = s.lineage[seq];
    for (int t = s.starts[seq]; t < s.starts[seq + 1]; ++t) {
      at.push_back(p.path_data.size());
      for (int node = s.fed[seq] + t - s.starts[seq]; node >= 0; node = parents[node]) {
        p.path_data.push_back(node);
      }
      std::reverse(p.path_data.begin() + ptrdiff_t(at.back()), p.path_data.end());
      p.depth[size_t(t)] = int32_t(p.path_data.size() - at.back());
    }
  }
  for (size_t t = 0; t < at.size(); ++t) p.path[t] = p.path_data.data() + at[t];
  p.tree = true;
}

// Rows of one sequence whose attention is computed, and its slots.
struct Span {
  int seq, from, to, out_shift, length;
  int ranges() const { return (length + kRange - 1) / kRange; }
};

// Cuts the queries of rows into tasks. Tasks of a long context read the same keys for more queries, and
// several share its ranges if whole ones would leave threads idle.
void add_tasks(AttentionTasks& out, const std::vector<Span>& all, const OutriderModel& m, int threads) {
  const int heads = m.config.kv_heads, group = m.config.heads / heads;
  int64_t work = 0;  // queries of ranges
  for (const Span& r : all) work += int64_t(r.to - r.from) * group * heads * r.ranges();
  const int most = int(std::clamp(work / threads, int64_t(1), int64_t(kMaxQueries)));
  for (const Span& r : all) {
    const int size = std::min(most, r.ranges() > 1 ? kMaxQueries : m.kernels->max_queries);
    const int first = r.from * group, end = r.to * group, ranges = r.ranges();
    const bool shares = threads > 1 && ranges > 1 &&
                        int64_t(std::min(size, end - first)) * ranges * 8 * threads > work;
    const int32_t record = out.records;
    for (int range = 0; range < (shares ? ranges : 1); ++range) {
      for (int q = first; q < end; q += size) {
        AttentionTask task{r.seq, q, std::min(size, end - q), r.out_shift, 0, ranges * kRange, -1};
        if (shares) {
          task.from = range * kRange;
          task.to = task.from + kRange;
          task.record = record + (q - first) * ranges;
        }
        out.tasks.push_back(task);
        if (shares && range == 0) out.combined.push_back(task);
      }
    }
    if (shares) out.records += (end - first) * ranges;
  }
}

// Room for the results of ranges; always true.
bool make_records(Plan& p, const OutriderModel& m) {
  const size_t each = size_t(m.config.kv_heads) * size_t(kRecordHead + m.dim_p);
  const size_t need = size_t(std::max(p.tasks.records, p.last_tasks.records)) * each;
  if (p.records.size() < need) p.records.resize(need);
  return true;
}

}  // namespace

StepArgs::StepArgs(const int32_t* packed, const OutriderStep& step) : OutriderStep(step) {
  const int64_t n = step.num_tokens, seqs = step.num_seqs;
  tokens = packed;
  positions = tokens + n;
  starts = positions + n;
  context = starts + seqs + 1;
  tables = context + seqs;
  logit_rows = tables + seqs * step.table_width;
  parents = step.has_parents ? logit_rows + step.num_rows : nullptr;
}

bool sizes_make_sense(const OutriderStep& s) {
  return (s.num_tokens >= 0 && s.num_seqs >= 0 && s.num_rows >= 0 && s.table_width >= 0 &&
          s.num_taps >= 0) ||
         set_error("negative size");
}

bool make_plan(OutriderModel& m, const StepArgs& s, const int32_t* extra) {
  Plan& p = m.plan;
  if (!m.num_blocks) return set_error("allocate the cache before the first step");
  if (!check_tokens(m, s) || !check_sequences(m, s, extra)) return false;

  p.segments.clear();
  p.segment_starts.assign(1, 0);
  p.tasks.clear();
  p.last_tasks.clear();
  p.kept.clear();
  p.tree = false;
  p.max_length = p.most_ahead = 0;
  p.slots.resize(size_t(s.num_tokens));
  if (s.parents) p.depth.assign(size_t(s.num_tokens), 0);
  std::vector<Span> all;
  for (int i = 0; i < s.num_seqs; ++i) {
    const int n = s.starts[i + 1] - s.starts[i];
    const int before = s.context[i] + (s.fed ? s.fed[i] : 0);
    const int length = n ? before + n : 0;
    p.max_length = std::max(p.max_length, length);
    p.most_ahead = std::max(p.most_ahead, length - s.context[i] + (extra ? std::max(0, extra[i]) : 0));
    if (n) all.push_back({i, 0, n, 0, length});
    const int32_t* table = s.tables + int64_t(i) * s.table_width;
    add_segments(p, m, table, length);
    for (int j = 0; j < n; ++j) {
      const int slot = before + j;
      p.slots[size_t(s.starts[i] + j)] =
          table[slot / m.block_size] * m.block_size + slot % m.block_size;
    }
    p.segment_starts.push_back(int32_t(p.segments.size()));
    if (s.parents) add_paths(p, s, i);
  }
  if (s.lineage) {
    add_lineages(p, s);
  } else if (p.tree) {
    p.path.assign(size_t(s.num_tokens), nullptr);
    fill_paths(p, s);
  }
  const int threads = std::max(1, s.threads);
  add_tasks(p.tasks, all, m, threads);

  // After the last layer's attention only the rows with logits are needed.
  const int exit = s.exit_layer < 0 ? m.config.layers : s.exit_layer;
  bool prune = exit > 0;
  for (int i = 0; i < s.num_taps; ++i) prune = prune && s.taps[i] != exit;
  if (prune) {
    const Layer& last = m.layers[size_t(exit - 1)];
    prune = !s.keys_only && !last.width && last.attends && last.state < 0;
  }
  p.head_rows.assign(s.logit_rows, s.logit_rows + s.num_rows);
  if (prune) {
    p.kept.assign(s.logit_rows, s.logit_rows + s.num_rows);
    std::sort(p.kept.begin(), p.kept.end());
    p.kept.erase(std::unique(p.kept.begin(), p.kept.end()), p.kept.end());
    prune = int(p.kept.size()) < s.num_tokens;
  }
  p.prune = prune;
  if (!prune) return make_records(p, m);
  all.clear();
  for (auto& row : p.head_rows)
    row = int32_t(std::lower_bound(p.kept.begin(), p.kept.end(), row) - p.kept.begin());
  int seq = 0;
  for (size_t i = 0; i < p.kept.size();) {
    const int row = p.kept[i];
    while (row >= s.starts[seq + 1]) ++seq;
    size_t j = i + 1;
    while (j < p.kept.size() && p.kept[j] == row + int(j - i) && p.kept[j] < s.starts[seq + 1]) ++j;
    const int from = row - s.starts[seq];
    const int length = s.starts[seq + 1] - s.starts[seq] + s.context[seq] + (s.fed ? s.fed[seq] : 0);
    all.push_back({seq, from, from + int(j - i), int(i) - row, length});
    i = j;
  }
  add_tasks(p.last_tasks, all, m, threads);
  return make_records(p, m);
}

}  // namespace outrider
