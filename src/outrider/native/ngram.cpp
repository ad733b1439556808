// Prompt lookup as in outrider/proposers/ngram_index.py, but by a scan: reading the text once is
// fast compared with a pass over all weights, and a scan needs no index.
#include "lookup.h"
#include "step.h"

namespace outrider {
namespace {

class Ngram : public OutriderLookup {
 public:
  Ngram(std::vector<int32_t> trusted, int min_n, int max_n, std::vector<int32_t> finish)
      : OutriderLookup(std::move(trusted), std::move(finish)), min_n_(min_n), max_n_(max_n) {}

  void draft(int budget, int32_t* out) const override {
    out[0] = out[1] = 0;
    int start = 0, longest = 0;
    for (int end = int(text.size()) - 1; end > 0 && longest < max_n_; --end) {
      const int n = agreement(end, max_n_);
      if (n > longest) longest = n, start = end;
    }
    if (longest < min_n_) return;
    const int count = std::min(budget, trusted[size_t(agreement(start, int(trusted.size()) - 1))]);
    int32_t* tokens = out + 2;
    const int period = int(text.size()) - start;
    while (out[0] < count) {
      const int i = out[0]++;
      tokens[i] = i < period ? text[size_t(start + i)] : tokens[i - period];
      if (finishes(tokens[i])) break;
    }
    for (int i = 0; i < out[0]; ++i) tokens[out[0] + i] = i - 1;
  }

 private:
  // The number of tokens before `end` that equal those before the text's end, at most `most`.
  int agreement(int end, int most) const {
    const int32_t *here = text.data() + text.size(), *there = text.data() + end;
    int n = 0;
    while (n < most && n < end && here[-1 - n] == there[-1 - n]) ++n;
    return n;
  }

  int min_n_, max_n_;
};

}  // namespace
}  // namespace outrider

extern "C" {

OutriderLookup* outrider_ngram_new(const int32_t* trusted, int32_t depth, int32_t min_n,
                                   int32_t max_n, const int32_t* finish, int32_t num_finish) {
  if (depth < 1 || min_n < 1 || max_n < min_n || num_finish < 0)
    return outrider::set_error("no such index"), nullptr;
  try {
    return new outrider::Ngram({trusted, trusted + depth + 1}, min_n, max_n,
                               {finish, finish + num_finish});
  } catch (...) {
    return outrider::set_error("not enough memory"), nullptr;
  }
}

void outrider_lookup_free(OutriderLookup* index) { delete index; }

int64_t outrider_lookup_size(const OutriderLookup* index) { return int64_t(index->text.size()); }

int32_t outrider_lookup_extend(OutriderLookup* index, const int32_t* tokens, int32_t count) {
  return outrider::guarded([&] { return index->extend(tokens, count), OUTRIDER_OK; });
}

int32_t outrider_lookup_draft(OutriderLookup* index, const int32_t* tokens, int32_t count,
                              int32_t budget, int32_t* out) {
  return outrider::guarded([&] {
    index->extend(tokens, count);
    return index->draft(budget, out), OUTRIDER_OK;
  });
}

}  // extern "C"
