// Whole cycles one behind the other: draft, pass, draws, verdict, and round again, without coming
// back to the caller. After a pass over all weights the caller's own code is cold; here it is
// needed once for many tokens.
#include <algorithm>
#include <chrono>

#include "draft.h"

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

class Ahead {
 public:
  Ahead(OutriderModel& m, const int32_t* packed, const void* params, OutriderAhead& a)
      : m_(m), a_(a), params_(copied(params, a.num_seqs)), p_(params_.data(), a.num_seqs),
        counts_(const_cast<int32_t*>(p_.num_tokens)), seqs_(size_t(a.num_seqs)) {
    const int32_t* at = packed;
    auto take = [&](int64_t n) { return at += n, at - n; };
    for (auto* field : {&last_, &context_, &left_, &fed_}) {
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
    begun_ = context_;
    drafts_.resize(seqs_ * size_t(a.width));
  }

  int32_t run() {
    for (size_t i = 0; i < seqs_; ++i) {
      if (p_.num_tokens[i] < 0 || p_.num_tokens[i] > a_.width)
        return set_error("more drafts than there is room for"), OUTRIDER_INVALID;
    }
    const double begun = now();
    double cycle = 0;
    for (a_.cycles = 0; a_.cycles < a_.most_cycles; ++a_.cycles) {
      const double started = now();
      shorten();
      if (!fits() || (a_.cycles && started + cycle - begun > a_.limit_s)) break;
      if (const int32_t code = draft()) return failed(code);
      const double drafted = now();
      if (const int32_t code = pass()) return failed(code);
      // A row that is not a number has no draw: the caller repeats this cycle and finds out.
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

 private:
  // The parameters of DraftParams, since how many tokens are drafted changes.
  static std::vector<uint64_t> copied(const void* params, int num_seqs) {
    const size_t size = size_t(num_seqs) * DraftParams::BYTES;
    std::vector<uint64_t> copy(size / 8 + 1);
    memcpy(copy.data(), params, size);
    return copy;
  }
  int drafting(size_t i) const { return counts_[i]; }

  // What went well before stands.
  int32_t failed(int32_t code) const { return a_.cycles ? OUTRIDER_OK : code; }

  static int64_t reach(const int32_t* table, int width, int block_size) {
    int blocks = 0;
    while (blocks < width && table[blocks] >= 0) ++blocks;
    return int64_t(blocks) * block_size;
  }

  // Near its end a sequence drafts less: a cycle emits a token besides the drafts.
  void shorten() {
    num_rows_ = 0;
    for (size_t i = 0; i < seqs_; ++i) {
      counts_[i] = std::max(0, std::min(counts_[i], left_[i] - 1));
      num_rows_ += 1 + drafting(i);
    }
    drawn_.resize(size_t(num_rows_));
  }

  // Whether every sequence may emit all of a cycle's tokens and has slots for them.
  bool fits() const {
    for (size_t i = 0; i < seqs_; ++i) {
      const int k = drafting(i);
      if (left_[i] < k + 1) return false;
      if (a_.copies && num_right(i) < k) return false;
      const int32_t* table = tables_ + i * size_t(a_.table_width);
      if (context_[i] + 1 + k > reach(table, a_.table_width, m_.block_size)) return false;
      if (!k || !a_.drafter) continue;
      const int32_t* own = draft_tables_ + i * size_t(a_.draft_table_width);
      const int64_t end = fed_[i] + int64_t(pending_[i].size()) + k - 1;
      if (end > reach(own, a_.draft_table_width, a_.drafter->block_size)) return false;
    }
    return true;
  }

  int32_t draft() {
    if (a_.drafter && num_rows_ > a_.num_seqs) {
      std::vector<int32_t> tokens, positions, starts(1, 0), context;
      for (size_t i = 0; i < seqs_; ++i) {
        const bool drafts = drafting(i) > 0;
        context.push_back(drafts ? fed_[i] : 0);
        for (size_t j = 0; drafts && j < pending_[i].size(); ++j) {
          tokens.push_back(pending_[i][j]);
          positions.push_back(fed_[i] + int32_t(j));
        }
        starts.push_back(int32_t(tokens.size()));
      }
      packed_.clear();
      append(packed_, tokens), append(packed_, positions), append(packed_, starts);
      append(packed_, context);
      packed_.insert(packed_.end(), draft_tables_,
                     draft_tables_ + seqs_ * size_t(a_.draft_table_width));
      OutriderStep s{};
      s.num_tokens = int32_t(tokens.size());
      s.num_seqs = a_.num_seqs;
      s.table_width = a_.draft_table_width;
      s.exit_layer = -1;
      s.threads = a_.threads;
      const OutriderDraft d{drafts_.data(), a_.width, 0, nullptr};
      if (const int32_t code = outrider_draft(a_.drafter, packed_.data(), &s, p_.key, &d))
        return code;
    }
    if (a_.script) follow_script();
    return OUTRIDER_OK;
  }

  const int32_t* script(size_t i) const { return a_.script + 2 * i * size_t(a_.script_length); }
  // Where the sequence's next draft stands in its script.
  int place(size_t i) const { return context_[i] - begun_[i]; }
  // How many drafts from there on are as the script has them.
  int num_right(size_t i) const {
    return place(i) < a_.script_length ? script(i)[a_.script_length + place(i)] : 0;
  }

  void follow_script() {
    for (size_t i = 0; i < seqs_; ++i) {
      const int right = num_right(i);
      for (int j = 0; j < drafting(i); ++j) {
        const int at = place(i) + j;
        int32_t token = at < a_.script_length ? script(i)[at] : 0;
        if (j >= right) token = (token + 1) % m_.config.num_tokens;
        drafts_[i * size_t(a_.width) + size_t(j)] = token;
      }
    }
  }

  int32_t pass() {
    std::vector<int32_t> tokens, positions, starts(1, 0), rows, top_k;
    std::vector<float> temperature, top_p, min_p;
    std::vector<uint64_t> keys;
    for (size_t i = 0; i < seqs_; ++i) {
      for (int j = 0; j <= drafting(i); ++j) {
        rows.push_back(int32_t(tokens.size()));
        tokens.push_back(j ? drafts_[i * size_t(a_.width) + size_t(j) - 1] : last_[i]);
        positions.push_back(context_[i] + j);
        const bool greedy = p_.temperature[i] == 0;
        keys.push_back(greedy ? 0 : mix(p_.key[i] + uint64_t(int64_t(context_[i]) + 1 + j)));
        temperature.push_back(p_.temperature[i]);
        top_k.push_back(p_.top_k[i]);
        top_p.push_back(p_.top_p[i]);
        min_p.push_back(p_.min_p[i]);
      }
      starts.push_back(int32_t(tokens.size()));
    }
    packed_.clear();
    append(packed_, tokens), append(packed_, positions), append(packed_, starts);
    append(packed_, context_);
    packed_.insert(packed_.end(), tables_, tables_ + seqs_ * size_t(a_.table_width));
    append(packed_, rows);
    row_params_.resize(2 * keys.size());
    memcpy(row_params_.data(), keys.data(), 8 * keys.size());
    append(row_params_, temperature), append(row_params_, top_k), append(row_params_, top_p);
    append(row_params_, min_p);
    OutriderStep s{};
    s.logits = a_.logits;
    s.num_tokens = s.num_rows = num_rows_;
    s.num_seqs = a_.num_seqs;
    s.table_width = a_.table_width;
    s.exit_layer = -1;
    s.threads = a_.threads;
    return outrider_step_and_draw(&m_, packed_.data(), &s, row_params_.data(), drawn_.data());
  }

  // Notes drafts and draws, and moves every sequence on; true where it is time to stop.
  bool judge() {
    bool finished = false;
    const size_t stride = 2 * size_t(a_.width) + 1;
    int32_t* out = a_.out + size_t(a_.cycles) * seqs_ * stride;
    const int32_t* drawn = drawn_.data();
    for (size_t i = 0; i < seqs_; ++i) {
      const int k = drafting(i);
      const int32_t* drafts = drafts_.data() + i * size_t(a_.width);
      std::fill(std::copy(drafts, drafts + k, out), out + a_.width, -1);
      std::copy(drawn, drawn + k + 1, out + a_.width);
      int kept = 0;
      while (kept < k && drafts[kept] == drawn[kept]) ++kept;
      for (int j = 0; j <= kept; ++j) {
        const int32_t *from = finish_ + finish_starts_[i], *to = finish_ + finish_starts_[i + 1];
        finished = finished || std::find(from, to, drawn[j]) != to;
      }
      if (k) {
        // The drafter holds what it was given and all its drafts but the last.
        const int held = std::min(kept, k - 1);
        fed_[i] += int32_t(pending_[i].size()) + held;
        pending_[i].assign(drawn + held, drawn + kept + 1);
      }
      if (a_.copies && k) {
        const int at = place(i) + k;  // of the token behind the drafts
        finished = finished || kept < k || num_right(i) <= k || script(i)[at] != drawn[kept];
      }
      last_[i] = drawn[kept];
      context_[i] += kept + 1;
      left_[i] -= kept + 1;
      finished = finished || left_[i] <= 0;
      out += stride;
      drawn += k + 1;
    }
    return finished;
  }

  OutriderModel& m_;
  OutriderAhead& a_;
  std::vector<uint64_t> params_;
  DraftParams p_;
  int32_t* counts_;  // of drafts; in `params_`
  size_t seqs_;
  int num_rows_ = 0;
  std::vector<int32_t> last_, context_, left_, fed_, begun_;
  const int32_t *tables_, *draft_tables_, *finish_starts_, *finish_;
  std::vector<std::vector<int32_t>> pending_;
  std::vector<int32_t> drafts_, drawn_, packed_, row_params_;
};

}  // namespace
}  // namespace outrider

extern "C" int32_t outrider_run_ahead(OutriderModel* m, const int32_t* packed, const void* params,
                                      OutriderAhead* a) {
  a->cycles = 0;
  if (a->num_seqs < 1 || a->width < 0 || a->table_width < 0 || a->draft_table_width < 0) {
    return outrider::set_error("negative size"), OUTRIDER_INVALID;
  }
  return outrider::guarded([&] { return outrider::Ahead(*m, packed, params, *a).run(); });
}
