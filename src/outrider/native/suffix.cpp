// Suffix decoding in one call: the automaton of outrider/proposers/suffix_automaton.py and the
// search of suffix_index.py, step by step. Those files explain the algorithm; this one runs it in
// a few microseconds. Python code takes a hundred, because a pass evicts it from the cache.
#include <algorithm>
#include <queue>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lookup.h"
#include "step.h"

namespace outrider {
namespace {

constexpr int32_t kRoot = 0, kNone = -1;
constexpr size_t kIndexed = 16;  // states with more ways out find them by hash

struct Context {
  int32_t state, size;
};

struct Way {
  int32_t token, next;
};

class Automaton {
 public:
  explicit Automaton(int depth) : depth_(depth) { add_state(0), begin(); }

  void begin() {
    last_ = kRoot;
    tail_ = {kRoot, 0};
  }

  void append(int32_t token) {
    last_ = extend(last_, token);
    // The new token may have split the tail's state: find it again before continuing.
    const Context tail = shorten(tail_, depth_);
    tail_ = shorten({get(tail.state, token), tail.size + 1}, depth_ + 1);
    for (int32_t s = tail_.state; s != kNone; s = states_[size_t(s)].link) ++states_[size_t(s)].count;
  }

  Context advance(Context c, int32_t token) const {
    int32_t next = get(c.state, token);
    while (next == kNone) {
      c.state = at(c.state).link;
      if (c.state == kNone) return {kRoot, 0};
      c.size = at(c.state).length;
      next = get(c.state, token);
    }
    return shorten({next, c.size + 1}, depth_);
  }

  // The longest suffix of a text that occurs in the index.
  Context find(const std::vector<int32_t>& text) const {
    Context c{kRoot, 0};
    const size_t depth = size_t(depth_);
    for (size_t i = text.size() > depth ? text.size() - depth : 0; i < text.size(); ++i)
      c = advance(c, text[i]);
    return c;
  }

  Context repeated_tail() const {
    const Context c = shorten(tail_, depth_);
    return at(c.state).count > 1 ? c : shorter(c);
  }

  Context shorter(Context c) const {
    const int32_t s = at(c.state).link;
    return s == kNone ? Context{kRoot, 0} : Context{s, at(s).length};
  }

  // The tokens after a context, in the order of their first occurrence, with their counts.
  void followers(Context c, std::vector<Way>& out) const {
    out.clear();
    const State& s = at(c.state);
    if (s.first.next != kNone) out.push_back({s.first.token, at(s.first.next).count});
    if (s.more != kNone)
      for (const Way& way : ways_[size_t(s.more)]) out.push_back({way.token, at(way.next).count});
  }

 private:
  struct State {
    int32_t length, link, count;
    Way first;     // most states have one way out ...
    int32_t more;  // ... or none; others: the index of further ways
  };

  const State& at(int32_t s) const { return states_[size_t(s)]; }

  static uint64_t key(int32_t state, int32_t token) {
    return uint64_t(uint32_t(state)) << 32 | uint32_t(token);
  }

  Way* find_way(int32_t state, int32_t token) {
    return const_cast<Way*>(static_cast<const Automaton*>(this)->find_way(state, token));
  }
  const Way* find_way(int32_t state, int32_t token) const {
    const State& s = at(state);
    if (s.first.next != kNone && s.first.token == token) return &s.first;
    if (s.more == kNone) return nullptr;
    const std::vector<Way>& ways = ways_[size_t(s.more)];
    if (ways.size() > kIndexed) {
      const auto found = index_.find(key(state, token));
      return found == index_.end() ? nullptr : &ways[found->second];
    }
    for (const Way& way : ways)
      if (way.token == token) return &way;
    return nullptr;
  }

  int32_t get(int32_t state, int32_t token) const {
    const Way* way = find_way(state, token);
    return way ? way->next : kNone;
  }

  void set(int32_t state, int32_t token, int32_t next) {
    if (Way* way = find_way(state, token)) {
      way->next = next;
      return;
    }
    State& s = states_[size_t(state)];
    if (s.first.next == kNone) {
      s.first = {token, next};
      return;
    }
    if (s.more == kNone) {
      s.more = int32_t(ways_.size());
      ways_.emplace_back();
    }
    std::vector<Way>& ways = ways_[size_t(s.more)];
    ways.push_back({token, next});
    if (ways.size() > kIndexed) index(state, ways.size() == kIndexed + 1 ? 0 : ways.size() - 1);
  }

  // Adds the further ways of a state, from the given one on, to the hash table.
  void index(int32_t state, size_t from) {
    const std::vector<Way>& ways = ways_[size_t(at(state).more)];
    for (size_t i = from; i < ways.size(); ++i)
      index_[key(state, ways[i].token)] = uint32_t(i);
  }

  int32_t add_state(int32_t length) {
    states_.push_back({length, kNone, 0, {kNone, kNone}, kNone});
    return int32_t(states_.size()) - 1;
  }

  Context shorten(Context c, int limit) const {
    c.size = std::min(c.size, limit);
    for (;;) {
      const int32_t link = at(c.state).link;
      if (link == kNone || at(link).length < c.size) return c;
      c.state = link;
    }
  }

  int32_t extend(int32_t last, int32_t token) {
    int32_t known = get(last, token);
    if (known != kNone) return split(last, token, known);  // an earlier text begins with these tokens
    const int32_t added = add_state(at(last).length + 1);
    int32_t s = last;
    while (s != kNone && (known = get(s, token)) == kNone) {
      set(s, token, added);
      s = at(s).link;
    }
    const int32_t link = s == kNone ? kRoot : split(s, token, known);
    states_[size_t(added)].link = link;
    return added;
  }

  int32_t split(int32_t state, int32_t token, int32_t next) {
    const int32_t length = at(state).length + 1;
    if (at(next).length == length) return next;
    const int32_t added = add_state(length);
    State copy = at(next);
    copy.length = length;
    if (copy.more != kNone) {
      copy.more = int32_t(ways_.size());
      ways_.push_back(std::vector<Way>(ways_[size_t(at(next).more)]));
    }
    states_[size_t(added)] = copy;
    if (copy.more != kNone && ways_.back().size() > kIndexed) index(added, 0);
    states_[size_t(next)].link = added;
    for (int32_t s = state; s != kNone && get(s, token) == next; s = at(s).link)
      set(s, token, added);
    return added;
  }

  int depth_;
  std::vector<State> states_;
  std::vector<std::vector<Way>> ways_;
  std::unordered_map<uint64_t, uint32_t> index_;  // place among a state's further ways
  int32_t last_ = kRoot;
  Context tail_{kRoot, 0};
};

struct Tree {
  std::vector<int32_t> tokens, parents;
  double score = 0;

  // The number of nodes, whether they branch, tokens, parents; depth first, earlier nodes first.
  void write(int32_t* out) const {
    const int32_t n = int32_t(tokens.size());
    int32_t *at = out + 2, *above = at + n, written = 0;
    out[0] = n;
    out[1] = 0;
    std::vector<std::pair<int32_t, int32_t>> open;  // (node, where its parent was written)
    int32_t node = -1, place = -1;
    for (;;) {
      for (int32_t child = n - 1; child > node; --child)
        if (parents[size_t(child)] == node) open.push_back({child, place});
      if (open.empty()) return;
      node = open.back().first;
      at[written] = tokens[size_t(node)];
      above[written] = open.back().second;
      if (open.back().second != written - 1) out[1] = 1;
      open.pop_back();
      place = written++;
    }
  }
};

struct Open {  // a node that may be drafted
  double chance;
  int32_t order, parent, token;
  Context context;
  bool operator<(const Open& other) const {  // the best is last
    return chance != other.chance ? chance < other.chance : order > other.order;
  }
};

class Suffix : public OutriderLookup {
 public:
  Suffix(std::vector<int32_t> trusted, double floor, bool tree, std::vector<int32_t> finish)
      : OutriderLookup(std::move(trusted), std::move(finish)),
        automaton_(int(this->trusted.size()) - 1), floor_(floor), tree_(tree) {}

  void begin() { automaton_.begin(); }
  void read(const std::vector<const Suffix*>& others) { others_ = others; }

  void draft(int budget, int32_t* out) const override {
    Tree best;
    search(automaton_, automaton_.repeated_tail(), budget, best);
    for (const Suffix* other : others_)
      search(other->automaton_, other->automaton_.find(text), budget, best);
    best.write(out);
  }

 private:
  void append(int32_t token) override { automaton_.append(token); }

  void search(const Automaton& place, Context context, int budget, Tree& best) const {
    for (; context.size; context = place.shorter(context)) {
      const int count = std::min(budget, trusted[size_t(context.size)]);
      if (count <= best.score) return;  // even certain tokens could not score higher
      Tree grown = grow(place, context, count);
      if (grown.score > best.score) best = std::move(grown);
    }
  }

  Tree grow(const Automaton& place, Context start, int count) const {
    Tree grown;
    std::priority_queue<Open> open;
    std::vector<Way> followers;
    int32_t pushed = 0;
    auto branch = [&](int32_t node, double probability, Context context) {
      place.followers(context, followers);
      while (followers.empty()) {  // a text's end: continue from its longest suffix, if long enough
        context = place.shorter(context);
        if (context.size < start.size) return;
        place.followers(context, followers);
      }
      int64_t total = 0;
      for (const Way& way : followers) total += way.next;
      if (!tree_) {
        Way likeliest = followers.back();
        for (size_t i = followers.size(); i-- > 0;)
          if (followers[i].next > likeliest.next) likeliest = followers[i];
        followers.assign(1, likeliest);
      }
      for (size_t i = followers.size(); i-- > 0;) {  // of equal ones, the latest first
        const double chance = probability * followers[i].next / double(total);
        if (chance >= floor_) open.push({chance, ++pushed, node, followers[i].token, context});
      }
    };
    branch(-1, 1.0, start);
    while (!open.empty() && int(grown.tokens.size()) < count) {
      const Open node = open.top();
      open.pop();
      grown.tokens.push_back(node.token);
      grown.parents.push_back(node.parent);
      grown.score += node.chance;
      if (!finishes(node.token))
        branch(int32_t(grown.tokens.size()) - 1, node.chance,
               place.advance(node.context, node.token));
    }
    return grown;
  }

  Automaton automaton_;
  double floor_;
  bool tree_;
  std::vector<const Suffix*> others_;
};

}  // namespace
}  // namespace outrider

extern "C" {

OutriderLookup* outrider_suffix_new(const int32_t* trusted, int32_t depth, double floor,
                                    int32_t tree, const int32_t* finish, int32_t num_finish) {
  if (depth < 1 || num_finish < 0) return outrider::set_error("no such index"), nullptr;
  try {
    return new outrider::Suffix({trusted, trusted + depth + 1}, floor, tree != 0,
                                {finish, finish + num_finish});
  } catch (...) {
    return outrider::set_error("not enough memory"), nullptr;
  }
}

int32_t outrider_suffix_begin(OutriderLookup* index) {
  auto* suffix = dynamic_cast<outrider::Suffix*>(index);
  if (!suffix) return outrider::set_error("not a suffix index"), OUTRIDER_INVALID;
  return suffix->begin(), OUTRIDER_OK;
}

int32_t outrider_suffix_others(OutriderLookup* index, OutriderLookup* const* others,
                               int32_t num_others) {
  return outrider::guarded([&] {
    auto* suffix = dynamic_cast<outrider::Suffix*>(index);
    std::vector<const outrider::Suffix*> known;
    for (int i = 0; i < num_others; ++i)
      known.push_back(dynamic_cast<const outrider::Suffix*>(others[i]));
    if (!suffix || std::find(known.begin(), known.end(), nullptr) != known.end())
      return outrider::set_error("not a suffix index"), OUTRIDER_INVALID;
    return suffix->read(known), OUTRIDER_OK;
  });
}

}  // extern "C"
