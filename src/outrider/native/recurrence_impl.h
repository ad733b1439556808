// Selective scans and the gated delta rule: sixteen outputs of a head at a time.
#pragma once

namespace outrider {
namespace {

// One node: `to` becomes its state, from that of its parent (null: zeros). They may be the same.
template <bool kDelta>
inline V advance(const float* from, float* to, int rows, const float* in, const float* out, V x,
                 float decay, float strength) {
  const V d = set1(decay);
  V sum[4] = {zero(), zero(), zero(), zero()};
  if (kDelta && from) {
    for (int r = 0; r < rows; ++r)
      sum[r % 4] = fma(load(from + 16 * r), set1(in[r]), sum[r % 4]);
    x = sub(x, mul(d, add(add(sum[0], sum[1]), add(sum[2], sum[3]))));
  }
  const V change = mul(x, set1(strength));
  for (auto& s : sum) s = zero();
  int r = 0;
  auto one = [&](int at, V& total) {
    const V before = from ? mul(load(from + 16 * at), d) : zero();
    const V now = fma(set1(in[at]), change, before);
    store(to + 16 * at, now);
    total = fma(now, set1(out[at]), total);
  };
  for (; r + 4 <= rows; r += 4) {
    one(r, sum[0]);
    one(r + 1, sum[1]);
    one(r + 2, sum[2]);
    one(r + 3, sum[3]);
  }
  for (; r < rows; ++r) one(r, sum[0]);
  return add(add(sum[0], sum[1]), add(sum[2], sum[3]));
}

void recur(const Recurrence& a) {
  const size_t size = size_t(a.rows) * 16;
  for (int block = 0; block * 16 < a.outputs; ++block) {
    const int width = a.outputs - block * 16;
    const float* start = a.start ? a.start + size_t(block) * size : nullptr;
    const SavedState *save = a.saves, *end = a.saves + a.num_saves;
    for (int node = 0; node < a.count; ++node) {
      const int parent = a.parents ? a.parents[node] : node - 1;
      float* to = a.parents ? a.scratch + size_t(node) * size : a.scratch;
      const float* from = parent < 0 ? start : a.parents ? a.scratch + size_t(parent) * size : to;
      const float* p = a.x + node * a.ld + block * 16;
      const V x = width >= 16 ? load(p) : load_tail(p, width, 0.0f);
      const float *in = a.in + node * a.ld, *out = a.out + node * a.ld;
      const float decay = a.decay[node * a.ldd], strength = a.strength[node * a.ldd];
      const V y = a.delta ? advance<true>(from, to, a.rows, in, out, x, decay, strength)
                          : advance<false>(from, to, a.rows, in, out, x, decay, strength);
      if (node >= a.skip) {
        float* at = a.y + (node - a.skip) * a.ldy + block * 16;
        if (width >= 16) {
          store(at, y);
        } else {
          float t[16];
          store(t, y);
          for (int i = 0; i < width; ++i) at[i] = t[i];
        }
      }
      for (; save != end && save->node == node; ++save)
        __builtin_memcpy(save->row + a.offset + size_t(block) * size, to, size * 4);
    }
  }
}

}  // namespace
}  // namespace outrider
