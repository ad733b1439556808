// Several decoding cycles in one call: draft, pass, draws, verdict. A pass over all weights evicts
// the caller's code from the processor's caches; one call runs it once for many tokens.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <queue>

#include "draft.h"
#include "lookup.h"

namespace outrider {
namespace {

double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

template <class T>
void append(std::vector<int32_t>& out, const std::vector<T>& values) {
  static_assert(sizeof(T) == 4, "");
  const auto* first = reinterpret_cast<const int32_t*>(values.data());
  out.insert(out.end(), first, first + values.size());
}

// The parameters of the draws of all rows, as outrider_sample reads them.
class RowDraws {
 public:
  // A row that draws the token at `position` of sequence i.
  void add(const DraftParams& p, size_t i, int64_t position) {
    keys_.push_back(p.temperature[i] == 0 ? 0 : mix(p.key[i] + uint64_t(position)));
    temperature_.push_back(p.temperature[i]);
    top_k_.push_back(p.top_k[i]);
    top_p_.push_back(p.top_p[i]);
    min_p_.push_back(p.min_p[i]);
  }

  const void* packed() {
    packed_.resize(2 * keys_.size());
    memcpy(packed_.data(), keys_.data(), 8 * keys_.size());
    append(packed_, temperature_), append(packed_, top_k_), append(packed_, top_p_);
    append(packed_, min_p_);
    return packed_.data();
  }

 private:
  std::vector<uint64_t> keys_;
  std::vector<float> temperature_, top_p_, min_p_;
  std::vector<int32_t> top_k_, packed_;
};

// A node that Medusa may draft: guess `rank` at `depth`, under a path of score `above`.
struct Guess {
  double total;
  int32_t order, parent, depth, rank;
  double above;
  bool operator<(const Guess& other) const {  // the best is last
    return total != other.total ? total < other.total : order > other.order;
  }
};

// What drafted.
enum Source : int32_t { kNothing = 0, kFound = 1, kDrafted = 2 };

class Cycles {
 public:
  Cycles(OutriderModel& m, const int32_t* packed, const void* params, OutriderCycles& a)
      : m_(m),
        a_(a),
        seqs_(size_t(a.num_seqs)),
        width_(size_t(a.width)),
        params_(seqs_ * DraftParams::BYTES / 8 + 1),
        p_(params_.data(), a.num_seqs),
        asked_(const_cast<int32_t*>(p_.num_tokens)) {
    memcpy(params_.data(), params, seqs_ * DraftParams::BYTES);
    const int32_t* at = packed;
    auto take = [&](int64_t n) { return at += n, at - n; };
    for (auto* field : {&last_, &context_, &left_, &fed_, &shift_, &most_found_}) {
      const int32_t* first = take(a.num_seqs);
      field->assign(first, at);
    }
    tables_ = take(int64_t(a.num_seqs) * a.table_width);
    draft_tables_ = take(int64_t(a.num_seqs) * a.draft_table_width);
    pending_.resize(seqs_);
    const int32_t* starts = take(int64_t(a.num_seqs) + 1);
    const int32_t* tokens = take(starts[a.num_seqs]);
    for (size_t i = 0; i < seqs_; ++i) pending_[i].assign(tokens + starts[i], tokens + starts[i + 1]);
    finish_starts_ = take(int64_t(a.num_seqs) + 1);
    finish_ = take(finish_starts_[a.num_seqs]);
    take_ = at;
    begun_ = context_;
    num_seen_.resize(seqs_);
    features_.resize(seqs_);
    for (size_t i = 0; reads_features() && i < seqs_; ++i) {
      const float* first = a_.features + size_t(starts[i]) * feature_width();
      features_[i].assign(first, first + pending_[i].size() * feature_width());
    }
    most_drafts_.assign(p_.num_tokens, p_.num_tokens + seqs_);
    sources_.resize(seqs_);
    counts_.resize(seqs_);
    num_levels_.resize(seqs_);
    levels_.resize(seqs_ * width_);
    drafts_.resize(seqs_ * width_);
    found_.resize(seqs_ * (2 * width_ + 2));
    parents_.resize(seqs_);
  }

  int32_t run() {
    for (size_t i = 0; i < seqs_; ++i) {
      if (std::min(most_drafts_[i], most_found_[i]) < 0 ||
          std::max(most_drafts_[i], most_found_[i]) > a_.width)
        return set_error("more drafts than there is room for"), OUTRIDER_INVALID;
    }
    return run_cycles();
  }

 private:
  int32_t run_cycles() {
    const double begun = now();
    double cycle = 0;
    for (a_.cycles = 0; a_.cycles < a_.most_cycles; ++a_.cycles) {
      const double started = now();
      if (!fits()) break;
      if (a_.cycles && (started + cycle - begun > a_.limit_s || (a_.stop && *a_.stop))) break;
      if (const int32_t code = draft()) return failed(code);
      const double drafted = now();
      if (const int32_t code = pass()) return failed(code);
      // A row with a NaN has no draw: the caller repeats this cycle and reports it.
      if (*std::min_element(drawn_.begin(), drawn_.end()) < 0) break;
      const bool finished = judge();
      const double ended = now();
      a_.seconds[2 * a_.cycles] = drafted - started;
      a_.seconds[2 * a_.cycles + 1] = ended - drafted;
      cycle = ended - started;
      if (finished) return ++a_.cycles, OUTRIDER_OK;
    }
    return OUTRIDER_OK;
  }

  // For Medusa: the target's state of sequence i's newest computed token, in this cycle.
  float* states(size_t i) const {
    return a_.states + (size_t(a_.cycles) * seqs_ + i) * size_t(m_.config.hidden);
  }

  bool guesses() const { return a_.drafter && a_.drafter->is(OUTRIDER_MEDUSA); }

  // EAGLE: the drafter reads the target's states of each token.
  bool reads_features() const { return a_.drafter && a_.drafter->is(OUTRIDER_EAGLE3); }
  size_t feature_width() const { return size_t(a_.num_taps) * size_t(m_.config.hidden); }

  // Cycles before a failed one remain valid.
  int32_t failed(int32_t code) const { return a_.cycles ? OUTRIDER_OK : code; }

  static int64_t reach(const int32_t* table, int width, int block_size) {
    int blocks = 0;
    while (blocks < width && table[blocks] >= 0) ++blocks;
    return int64_t(blocks) * block_size;
  }

  // Drafts after which the target may still emit its own token.
  int at_most(size_t i, int most) const { return std::min(most, left_[i] - 1); }

  // Whether every sequence has slots for all of a cycle's tokens.
  bool fits() const {
    for (size_t i = 0; i < seqs_; ++i) {
      if (left_[i] < 1) return false;
      const int k = at_most(i, most_drafts_[i]), widest = std::max(k, at_most(i, most_found_[i]));
      if (a_.copies && num_right(i) < k) return false;
      const int32_t* table = tables_ + i * size_t(a_.table_width);
      if (context_[i] + 1 + widest > reach(table, a_.table_width, m_.block_size)) return false;
      if (!k || !a_.drafter || guesses()) continue;
      const int32_t* own = draft_tables_ + i * size_t(a_.draft_table_width);
      const int scribbled = a_.passes ? (a_.passes - 1) * a_.breadth : k - 1;
      const int64_t end = fed_[i] + int64_t(pending_[i].size()) + scribbled;
      if (end > reach(own, a_.draft_table_width, a_.drafter->block_size)) return false;
    }
    return true;
  }

  const int32_t* found(size_t i) const { return found_.data() + i * (2 * width_ + 2); }
  int32_t* drafts(size_t i) { return drafts_.data() + i * width_; }

  int32_t draft() {
    bool asks = false;
    for (size_t i = 0; i < seqs_; ++i) {
      asked_[i] = at_most(i, look_up(i));
      num_levels_[i] = 0;
      if (asked_[i]) {
        sources_[i] = kDrafted;
        counts_[i] = asked_[i];
        asks = true;
      }
    }
    if (asks && (a_.drafter || a_.exit_layer)) {
      if (const int32_t code = guesses() ? guess() : ask()) return code;
    }
    if (a_.script) follow_script();
    return OUTRIDER_OK;
  }

  // Drafts what the look-up finds, if it is to be taken; returns the number of drafts of the drafter.
  int look_up(size_t i) {
    sources_[i] = kNothing;
    counts_[i] = 0;
    parents_[i] = nullptr;
    int32_t* out = found_.data() + i * (2 * width_ + 2);
    out[0] = out[1] = 0;
    const int most = at_most(i, most_found_[i]);
    if (!a_.lookups || !a_.lookups[i]) return most_drafts_[i];
    if (most) a_.lookups[i]->draft(most, out);
    const int size = out[0], count = std::min(size, take_[i * (width_ + 1) + size_t(size)]);
    if (count <= 0) return std::min(-count, most_drafts_[i]);
    sources_[i] = kFound;
    counts_[i] = count;
    std::copy(out + 2, out + 2 + count, drafts(i));
    if (out[1]) parents_[i] = out + 2 + size;
    return 0;
  }

  // Drafts with the drafter or the target's first layers, which have read all but the newest token.
  int32_t ask() {
    std::vector<int32_t> tokens, positions, starts(1, 0), context;
    std::vector<float> features;
    for (size_t i = 0; i < seqs_; ++i) {
      int first = !asked_[i] ? 0 : a_.exit_layer ? context_[i] : fed_[i];
      context.push_back(first);
      if (!a_.exit_layer) first += shift_[i];
      if (asked_[i]) features.insert(features.end(), features_[i].begin(), features_[i].end());
      if (asked_[i] && a_.exit_layer) tokens.push_back(last_[i]);
      if (asked_[i] && !a_.exit_layer)
        tokens.insert(tokens.end(), pending_[i].begin(), pending_[i].end());
      for (int j = 0; positions.size() < tokens.size(); ++j) positions.push_back(first + j);
      starts.push_back(int32_t(tokens.size()));
    }
    const int32_t* tables = a_.exit_layer ? tables_ : draft_tables_;
    const int table_width = a_.exit_layer ? a_.table_width : a_.draft_table_width;
    packed_.clear();
    append(packed_, tokens), append(packed_, positions), append(packed_, starts);
    append(packed_, context);
    packed_.insert(packed_.end(), tables, tables + seqs_ * size_t(table_width));
    OutriderStep s{};
    s.num_tokens = int32_t(tokens.size());
    s.num_seqs = a_.num_seqs;
    s.table_width = table_width;
    s.exit_layer = a_.exit_layer ? a_.exit_layer : -1;
    s.threads = a_.threads;
    if (a_.exit_layer) states_.resize(seqs_ * (width_ + 1) * size_t(m_.config.hidden));
    if (reads_features()) s.features = features.data();
    if (a_.passes) return grow_tree(s);
    OutriderDraft d{};
    d.out = drafts_.data();
    d.out_width = a_.width;
    d.states = a_.exit_layer ? states_.data() : nullptr;
    std::vector<int32_t> counts(seqs_);
    if (a_.stop_rules.chances) {
      d.stop_rules = a_.stop_rules;
      d.levels = levels_.data();
      d.drawn = num_levels_.data();
      d.counts = counts.data();
    }
    OutriderModel* model = a_.exit_layer ? &m_ : a_.drafter;
    if (const int32_t code = outrider_draft(model, packed_.data(), &s, params_.data(), &d))
      return code;
    for (size_t i = 0; a_.stop_rules.chances && i < seqs_; ++i)
      if (asked_[i]) counts_[i] = counts[i];
    return OUTRIDER_OK;
  }

  // The drafter grows a tree; its parents are reported in the place of levels.
  int32_t grow_tree(const OutriderStep& s) {
    const size_t fed = size_t(a_.passes) * size_t(a_.breadth);
    std::vector<int32_t> room(seqs_ * (2 * fed + 2));
    int32_t* const counts = room.data();
    OutriderTree t{};
    t.tokens = drafts_.data();
    t.parents = levels_.data();
    t.counts = counts;
    t.fed_counts = counts + seqs_;
    t.fed_tokens = counts + 2 * seqs_;
    t.fed_parents = t.fed_tokens + seqs_ * fed;
    t.out_width = a_.width;
    t.passes = a_.passes;
    t.width = a_.breadth;
    t.children = std::min(a_.children, m_.config.num_tokens);
    if (const int32_t code = outrider_grow(a_.drafter, packed_.data(), &s, params_.data(), &t))
      return code;
    for (size_t i = 0; i < seqs_; ++i) {
      if (!asked_[i]) continue;
      num_levels_[i] = counts_[i] = counts[i];
      parents_[i] = levels_.data() + i * width_;
    }
    return OUTRIDER_OK;
  }

  // Medusa: the best tokens of every head, and the likeliest paths through them.
  int32_t guess() {
    std::vector<size_t> members;
    std::vector<float> features;
    int depth = 0;
    const size_t hidden = size_t(m_.config.hidden), vocab = size_t(a_.drafter->config.vocab);
    for (size_t i = 0; i < seqs_; ++i) {
      if (!asked_[i]) continue;
      members.push_back(i);
      features.insert(features.end(), states(i), states(i) + hidden);
      depth = std::max(depth, std::min(asked_[i], a_.drafter->config.intermediate));
    }
    const int rows = depth * int(members.size());
    const int children = std::min(a_.children, m_.config.num_tokens);
    guess_logits_.resize(size_t(rows) * vocab);
    OutriderStep s{};
    s.logits = guess_logits_.data();
    s.features = features.data();
    s.num_tokens = int32_t(members.size());
    s.num_rows = rows;
    s.exit_layer = -1;
    s.threads = a_.threads;
    const int32_t nothing = 0;
    if (const int32_t code = outrider_step(a_.drafter, &nothing, &s)) return code;
    RowDraws draws;
    for (int r = 0; r < rows; ++r) {  // row d * members + m: head d, member m
      const size_t i = members[size_t(r) % members.size()];
      draws.add(p_, i, int64_t(context_[i]) + 1 + r / int(members.size()));
    }
    std::vector<int32_t> tokens(size_t(rows) * size_t(children));
    std::vector<float> scores(tokens.size());
    OutriderSample sample{};
    sample.logits = guess_logits_.data();
    sample.out = tokens.data();
    sample.scores = scores.data();
    sample.num_rows = rows;
    sample.vocab = int32_t(vocab);
    sample.num_tokens = m_.config.num_tokens;
    sample.threads = a_.threads;
    sample.children = children;
    if (const int32_t code = outrider_sample(draws.packed(), &sample)) return code;
    for (size_t m = 0; m < members.size(); ++m) {
      grow(members[m], depth, children, [&](int d, int rank, double* score) {
        const size_t at = (size_t(d) * members.size() + m) * size_t(children) + size_t(rank);
        *score = double(scores[at]);
        return tokens[at];
      });
    }
    return OUTRIDER_OK;
  }

  // `likeliest` of outrider/proposers/medusa.py for one sequence; used like the tree of a look-up.
  template <class F>
  void grow(size_t i, int depth, int children, F guessed) {
    const double least = a_.floor > 0 ? std::log(a_.floor) : -__builtin_inf();
    std::priority_queue<Guess> open;
    int32_t pushed = 0, count = 0;
    auto push = [&](int32_t parent, int32_t d, int32_t rank, double above) {
      double score = 0;
      if (d >= depth || rank >= children || guessed(d, rank, &score) < 0) return;
      if (above + score >= least) open.push({above + score, pushed++, parent, d, rank, above});
    };
    std::vector<int32_t> parents;
    push(-1, 0, 0, 0.0);
    while (!open.empty() && count < asked_[i]) {
      const Guess g = open.top();
      open.pop();
      push(g.parent, g.depth, g.rank + 1, g.above);
      double score;
      const int32_t token = drafts(i)[count++] = guessed(g.depth, g.rank, &score);
      parents.push_back(g.parent);
      if (!finishes(i, token)) push(count - 1, g.depth + 1, 0, g.total);
    }
    int32_t* out = found_.data() + i * (2 * width_ + 2);
    out[0] = counts_[i] = count;
    out[1] = a_.children > 1;
    std::copy(drafts(i), drafts(i) + count, out + 2);
    std::copy(parents.begin(), parents.end(), out + 2 + count);
    sources_[i] = count ? kFound : kNothing;
    if (count && a_.children > 1) parents_[i] = out + 2 + count;
  }

  bool finishes(size_t i, int32_t token) const {
    const int32_t *from = finish_ + finish_starts_[i], *to = finish_ + finish_starts_[i + 1];
    return std::find(from, to, token) != to;
  }

  const int32_t* script(size_t i) const { return a_.script + 2 * i * size_t(a_.script_length); }
  // The place of the sequence's next draft in its script.
  int place(size_t i) const { return context_[i] - begun_[i]; }
  // The number of drafts from there on that follow the script.
  int num_right(size_t i) const {
    return place(i) < a_.script_length ? script(i)[a_.script_length + place(i)] : 0;
  }

  void follow_script() {
    for (size_t i = 0; i < seqs_; ++i) {
      const int right = num_right(i);
      for (int j = 0; j < counts_[i]; ++j) {
        const int at = place(i) + j;
        int32_t token = at < a_.script_length ? script(i)[at] : 0;
        if (j >= right) token = (token + 1) % m_.config.num_tokens;
        drafts(i)[j] = token;
      }
    }
  }

  int32_t pass() {
    std::vector<int32_t> tokens, positions, starts(1, 0), rows, parents, depths;
    RowDraws draws;
    bool trees = false;
    for (size_t i = 0; i < seqs_; ++i) {
      trees = trees || parents_[i];
      depths.assign(1, 0);
      for (int j = 0; j <= counts_[i]; ++j) {
        // Parents as indices of the sequence's tokens; index 0 is the last committed token.
        const int parent = j && parents_[i] ? parents_[i][j - 1] + 1 : j - 1;
        if (j) depths.push_back(depths[size_t(parent)] + 1);
        const int64_t position = int64_t(context_[i]) + depths.back();
        rows.push_back(int32_t(tokens.size()));
        tokens.push_back(j ? drafts(i)[j - 1] : last_[i]);
        positions.push_back(int32_t(position));
        parents.push_back(parent);
        draws.add(p_, i, position + 1);
      }
      starts.push_back(int32_t(tokens.size()));
    }
    packed_.clear();
    append(packed_, tokens), append(packed_, positions), append(packed_, starts);
    append(packed_, context_);
    packed_.insert(packed_.end(), tables_, tables_ + seqs_ * size_t(a_.table_width));
    append(packed_, rows);
    if (trees) append(packed_, parents);
    drawn_.resize(rows.size());
    OutriderStep s{};
    s.logits = a_.logits;
    s.num_tokens = s.num_rows = int32_t(rows.size());
    s.num_seqs = a_.num_seqs;
    s.table_width = a_.table_width;
    s.has_parents = trees;
    s.exit_layer = -1;
    if (a_.exit_layer && !m_.states.sizes.layers && *std::min_element(counts_.begin(), counts_.end())) {
      // The drafter has run the first layers for all rows.
      const size_t hidden = size_t(m_.config.hidden);
      begun_states_.clear();
      for (size_t i = 0; i < seqs_; ++i) {
        const float* first = states_.data() + i * (width_ + 1) * hidden;
        begun_states_.insert(begun_states_.end(), first, first + size_t(counts_[i] + 1) * hidden);
      }
      s.begun = begun_states_.data();
      s.start_layer = a_.exit_layer;
    }
    s.threads = a_.threads;
    const int32_t last_layer = m_.config.layers;
    std::vector<float*> tapped;
    if (guesses() || a_.num_taps) {
      s.num_taps = a_.num_taps ? a_.num_taps : 1;
      s.taps = a_.num_taps ? a_.taps : &last_layer;
      const size_t size = rows.size() * size_t(m_.config.hidden);
      tapped_.resize(size_t(s.num_taps) * size);
      for (int t = 0; t < s.num_taps; ++t) tapped.push_back(tapped_.data() + size_t(t) * size);
      s.tap_out = tapped.data();
    }
    return outrider_step_and_draw(&m_, packed_.data(), &s, draws.packed(), drawn_.data());
  }

  // Verifies and reports the drafts and advances every sequence; true if the call must stop.
  bool judge() {
    bool finished = false;
    const size_t stride = 5 * width_ + 7;
    int32_t* out = a_.out + size_t(a_.cycles) * seqs_ * stride;
    const int32_t* drawn = drawn_.data();
    for (size_t i = 0; i < seqs_; ++i) {
      const int k = counts_[i];
      // The nodes on the path of the draws, and these draws.
      std::vector<int32_t> path, emitted(1, drawn[0]);
      for (int node = 0, last = -1; node < k; ++node) {
        const int parent = parents_[i] ? parents_[i][node] : node - 1;
        if (parent != last || drafts(i)[node] != emitted.back()) continue;
        last = node;
        path.push_back(node);
        emitted.push_back(drawn[1 + node]);
      }
      const int kept = int(path.size());
      report(i, path, emitted.back(), out);
      for (const int32_t token : emitted) finished = finished || finishes(i, token);
      if (guesses()) {
        const size_t hidden = size_t(m_.config.hidden);
        const size_t row = size_t(drawn - drawn_.data()) + (kept ? size_t(path.back()) + 1 : 0);
        const float* state = tapped_.data() + row * hidden;
        std::copy(state, state + hidden, states(i) + seqs_ * hidden);
      }
      if (a_.num_taps) see(i, size_t(drawn - drawn_.data()), path);
      if (parents_[i]) line_up(i, path);
      if (a_.lookups && a_.lookups[i]) a_.lookups[i]->extend(emitted.data(), kept + 1);
      if (sources_[i] == kDrafted) {
        // The drafter's KV has its input and all its drafts but the last one. A head reads accepted
        // drafts again, with the target's states.
        const int held = reads_features() ? 0 : std::min(kept, std::max(k, num_levels_[i]) - 1);
        fed_[i] += int32_t(pending_[i].size()) + held;
        pending_[i].assign(emitted.begin() + held, emitted.end());
      } else {
        pending_[i].insert(pending_[i].end(), emitted.begin(), emitted.end());
      }
      if (a_.copies && k) {
        const int at = place(i) + k;  // of the token after the drafts
        finished = finished || kept < k || num_right(i) <= k || script(i)[at] != emitted.back();
      }
      last_[i] = emitted.back();
      context_[i] += kept + 1;
      left_[i] -= kept + 1;
      finished = finished || left_[i] <= 0;
      out += stride;
      drawn += k + 1;
    }
    return finished;
  }

  // Notes the states of sequence i's new tokens: of the row `root` and of those on the path.
  void see(size_t i, size_t root, const std::vector<int32_t>& path) {
    const size_t hidden = size_t(m_.config.hidden), width = feature_width();
    if (sources_[i] == kDrafted) features_[i].clear();  // they have been read
    const size_t room = size_t(a_.most_cycles) * (width_ + 1);
    for (size_t j = 0; j <= path.size(); ++j) {
      const size_t row = root + (j ? size_t(path[j - 1]) + 1 : 0);
      float* out = a_.features_out + (i * room + size_t(num_seen_[i]++)) * width;
      for (int t = 0; t < a_.num_taps; ++t) {
        const float* state = tapped_.data() + (size_t(t) * drawn_.size() + row) * hidden;
        std::copy(state, state + hidden, out + size_t(t) * hidden);
      }
      if (reads_features()) features_[i].insert(features_[i].end(), out, out + width);
    }
  }

  void report(size_t i, const std::vector<int32_t>& path, int32_t next, int32_t* out) {
    const int k = counts_[i], size = found(i)[0];
    out[0] = sources_[i];
    out[1] = k;
    out[2] = size;
    out[3] = found(i)[1];
    out[4] = num_levels_[i];
    out[5] = int32_t(path.size());
    out[6] = next;
    out += 7;
    std::copy(drafts(i), drafts(i) + k, out);
    out += width_;
    for (const int32_t* from : {found(i) + 2, found(i) + 2 + size}) {
      std::copy(from, from + size, out);
      out += width_;
    }
    const int32_t* levels = levels_.data() + i * width_;
    std::copy(levels, levels + num_levels_[i], out);
    std::copy(path.begin(), path.end(), out + width_);
  }

  // Moves the keys and values of a path through a tree to the slots of a chain.
  void line_up(size_t i, const std::vector<int32_t>& path) {
    const int32_t* table = tables_ + i * size_t(a_.table_width);
    std::vector<int32_t> source, target;
    auto slot = [&](int32_t node) {
      const int32_t at = context_[i] + 1 + node;
      return table[at / m_.block_size] * m_.block_size + at % m_.block_size;
    };
    for (size_t k = 0; k < path.size(); ++k) {
      if (path[k] == int32_t(k)) continue;
      source.push_back(slot(path[k]));
      target.push_back(slot(int32_t(k)));
    }
    if (!source.empty())
      outrider_copy_slots(&m_, source.data(), target.data(), int32_t(source.size()));
  }

  OutriderModel& m_;
  OutriderCycles& a_;
  size_t seqs_, width_;
  std::vector<uint64_t> params_;
  DraftParams p_;
  int32_t* asked_;  // the drafter's number of drafts in this cycle; a part of its parameters
  std::vector<int32_t> last_, context_, left_, fed_, shift_, most_found_, begun_, most_drafts_;
  const int32_t *tables_, *draft_tables_, *finish_starts_, *finish_, *take_;
  std::vector<std::vector<int32_t>> pending_;
  // Of this cycle, by sequence: the source of drafts, their number, the drafts, what was found and,
  // for trees, its parents.
  std::vector<int32_t> sources_, counts_, drafts_, found_;
  std::vector<int32_t> num_levels_, levels_;  // of the tokens that the drafter drew
  std::vector<const int32_t*> parents_;
  std::vector<int32_t> drawn_, packed_;
  std::vector<float> tapped_, guess_logits_;
  std::vector<int32_t> num_seen_;                 // tokens whose states were noted
  std::vector<std::vector<float>> features_;      // of the tokens in `pending_`
  std::vector<float> states_, begun_states_;  // after `exit_layer` layers
};

}  // namespace
}  // namespace outrider

extern "C" int32_t outrider_run_cycles(OutriderModel* m, const int32_t* packed, const void* params,
                                      OutriderCycles* a) {
  a->cycles = 0;
  if (a->num_seqs < 1 || a->width < 0 || a->table_width < 0 || a->draft_table_width < 0) {
    return outrider::set_error("negative size"), OUTRIDER_INVALID;
  }
  return outrider::guarded([&] { return outrider::Cycles(*m, packed, params, *a).run(); });
}
