// Looked-up drafts: an index of a text that finds how the text may continue.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "outrider.h"

struct OutriderLookup {
  OutriderLookup(std::vector<int32_t> t, std::vector<int32_t> f)
      : trusted(std::move(t)), finish(std::move(f)) {}
  virtual ~OutriderLookup() = default;

  void extend(const int32_t* tokens, int count) {
    text.insert(text.end(), tokens, tokens + count);
    for (int i = 0; i < count; ++i) append(tokens[i]);
  }

  // At most `budget` nodes: their number, whether they branch, tokens, parents.
  virtual void draft(int budget, int32_t* out) const = 0;

  std::vector<int32_t> text;

 protected:
  virtual void append(int32_t) {}
  bool finishes(int32_t token) const {
    return std::find(finish.begin(), finish.end(), token) != finish.end();
  }

  const std::vector<int32_t> trusted;  // [depth + 1]: the most nodes after a match of this length
  const std::vector<int32_t> finish;
};
