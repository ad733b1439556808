// Routers: every row decides by its own scores alone, in one order of operations.
#include "route.h"

#include <algorithm>
#include <cmath>

namespace outrider {
namespace {

// exp(x - max) / sum, over values that are not -inf.
void softmax(float* x, int n) {
  const float top = *std::max_element(x, x + n);
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += x[i] = std::exp(x[i] - top);
  for (int i = 0; i < n; ++i) x[i] /= sum;
}

// The largest of x, marked as used with -inf; the lowest unused index if all are NaN.
int take_best(float* x, int n, const int32_t* used, int num_used) {
  int best = -1;
  for (int i = 0; i < n; ++i) {
    if (x[i] > -INFINITY && (best < 0 || x[i] > x[best])) best = i;
  }
  for (int i = 0; best < 0 && i < n; ++i)
    if (std::find(used, used + num_used, i) == used + num_used) best = i;
  x[best] = -INFINITY;
  return best;
}

void close_groups(const OutriderExperts& e, float* choice) {
  const int size = e.count / e.groups;
  std::vector<float> scores(size_t(e.groups), 0.0f), group(static_cast<size_t>(size));
  std::vector<int32_t> open;
  for (int g = 0; g < e.groups; ++g) {
    std::copy(choice + g * size, choice + (g + 1) * size, group.begin());
    for (int i = 0; i < std::min(e.group_best, size); ++i) {
      const auto best = std::max_element(group.begin(), group.end());
      scores[size_t(g)] += *best;
      *best = -INFINITY;
    }
  }
  for (int i = 0; i < e.open_groups; ++i)
    open.push_back(take_best(scores.data(), e.groups, open.data(), int(open.size())));
  for (int g = 0; g < e.groups; ++g) {
    if (std::find(open.begin(), open.end(), g) == open.end())
      std::fill(choice + g * size, choice + (g + 1) * size, -INFINITY);
  }
}

void sparsemixer(const OutriderExperts& e, const float* scores, int32_t* chosen, float* weights,
                 float* left) {
  std::vector<float> near(static_cast<size_t>(e.count));
  std::copy(scores, scores + e.count, left);
  for (int place = 0; place < 2; ++place) {
    std::copy(left, left + e.count, near.begin());
    const int best = take_best(left, e.count, chosen, place);
    const float top = near[size_t(best)];
    for (int i = 0; i < e.count; ++i) {
      const float scale = std::max(std::fabs(scores[i]), top);
      if ((top - scores[i]) / scale > 2 * e.jitter) near[size_t(i)] = -INFINITY;
    }
    softmax(near.data(), e.count);
    chosen[place] = best;
    weights[place] = near[size_t(best)];
  }
}

}  // namespace

void choose_experts(const OutriderExperts& e, float* scores, const float* choice_bias,
                    int32_t* chosen, float* weights, float* scratch) {
  if (e.router == OUTRIDER_SPARSEMIXER) return sparsemixer(e, scores, chosen, weights, scratch);
  if (e.router == OUTRIDER_SOFTMAX) softmax(scores, e.count);
  if (e.router == OUTRIDER_SIGMOID)
    for (int i = 0; i < e.count; ++i) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
  for (int i = 0; i < e.count; ++i) scratch[i] = scores[i] + (choice_bias ? choice_bias[i] : 0.0f);
  if (e.groups > 1) close_groups(e, scratch);
  float sum = 0;
  for (int place = 0; place < e.active; ++place) {
    chosen[place] = take_best(scratch, e.count, chosen, place);
    sum += weights[place] = scores[chosen[place]];
  }
  if (e.router == OUTRIDER_SOFTMAX_OF_CHOSEN) return softmax(weights, e.active);
  if (e.router == OUTRIDER_SIGMOID_OF_CHOSEN) {
    for (int place = 0; place < e.active; ++place)
      weights[place] = 1.0f / (1.0f + std::exp(-weights[place]));
    return;
  }
  const float by = e.normalised ? e.scale / std::max(sum, e.least_sum) : e.scale;
  for (int place = 0; place < e.active; ++place) weights[place] *= by;
}

void Union::build(const int32_t* chosen, int rows, int active, int count) {
  const int total = rows * active;
  std::vector<int32_t> sizes(size_t(count) + 1, 0);
  for (int i = 0; i < total; ++i) ++sizes[size_t(chosen[i]) + 1];
  experts.clear();
  starts.assign(1, 0);
  for (int e = 0; e < count; ++e) {
    if (sizes[size_t(e) + 1]) {
      experts.push_back(e);
      starts.push_back(starts.back() + sizes[size_t(e) + 1]);
    }
    sizes[size_t(e) + 1] += sizes[size_t(e)];
  }
  assignments.resize(size_t(total));
  place_of.resize(size_t(total));
  for (int i = 0; i < total; ++i) {
    const int32_t place = sizes[size_t(chosen[i])]++;
    assignments[size_t(place)] = i;
    place_of[size_t(i)] = place;
  }
}

}  // namespace outrider
