// Prints a hash of the bits of everything that the kernels compute, a line per case, through the C
// interface alone. The instruction set is that of OUTRIDER_ISA. Two instruction sets compute the same
// if this prints the same. Every case also runs row by row and in one pass; other bits there, or a
// number that is not finite, end it with exit code 1.
//
// Data comes from integers and exactly rounded operations, so it is the same on every machine.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "outrider.h"

namespace {

bool failed = false;

void fail(const std::string& name, const std::string& why) {
  std::printf("%s: %s\n", name.c_str(), why.c_str());
  failed = true;
}

void check(int32_t code) {
  if (code == OUTRIDER_OK) return;
  std::printf("error: %s\n", outrider_error());
  std::exit(1);
}

struct Hash {
  uint64_t value = 0xcbf29ce484222325ull;
  void add(const void* data, size_t bytes) {
    const auto* p = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < bytes; ++i) value = (value ^ p[i]) * 0x100000001b3ull;
  }
  template <class T>
  void add(const std::vector<T>& v) {
    add(v.data(), v.size() * sizeof(T));
  }
  void print(const std::string& name) const {
    std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(value));
  }
};

struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint32_t next() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return uint32_t(state >> 32);
  }
  // Of [-1, 1), more often small.
  float number() {
    const float a = float(int32_t(next() >> 8) - (1 << 23)) * 0x1p-23f;
    const float b = float(next() >> 8) * 0x1p-24f;
    return a * b;
  }
  std::vector<float> numbers(size_t count, float size, float around = 0) {
    std::vector<float> found(count);
    for (float& x : found) x = around + size * number();
    return found;
  }
};

// Block types of GGUF files: where the half-precision scales of a block lie, and a size for them.
struct BlockType {
  const char* name;
  int32_t type;
  int values, bytes, scale_at, scale_2_at;
  float scale, scale_2;
};
const BlockType kBlockTypes[] = {
    {"Q4_0", 66, 32, 18, 0, -1, 0.2f, 0},      {"Q4_1", 67, 32, 20, 0, 2, 0.2f, -1.5f},
    {"Q5_0", 70, 32, 22, 0, -1, 0.1f, 0},      {"Q5_1", 71, 32, 24, 0, 2, 0.1f, -1.5f},
    {"Q8_0", 72, 32, 34, 0, -1, 0.014f, 0},    {"Q2_K", 74, 256, 84, 80, 82, 0.1f, 0.1f},
    {"Q3_K", 75, 256, 110, 108, -1, 0.02f, 0}, {"Q4_K", 76, 256, 144, 0, 2, 0.006f, 0.04f},
    {"Q5_K", 77, 256, 176, 0, 2, 0.003f, 0.04f}, {"Q6_K", 78, 256, 210, 208, -1, 0.0006f, 0},
    {"IQ4_NL", 84, 32, 18, 0, -1, 0.014f, 0},  {"IQ4_XS", 87, 256, 136, 0, -1, 0.0006f, 0},
    {"MXFP4", 103, 32, 17, -1, -1, 0, 0},
};

// Half precision of a number below 65536; the lowest bits are cut off.
uint16_t half(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  const uint32_t sign = b >> 16 & 0x8000, exponent = b >> 23 & 255;
  if (exponent < 113) return uint16_t(sign | uint32_t(std::fabs(x) * 0x1p24f));
  return uint16_t(sign | (exponent - 112) << 10 | (b >> 13 & 0x3ff));
}

std::vector<uint8_t> random_blocks(const BlockType& t, int rows, int columns, Random& rng) {
  std::vector<uint8_t> out(size_t(rows) * columns / t.values * t.bytes);
  for (uint8_t& b : out) b = uint8_t(rng.next() >> 24);
  const float size = 1.0f / std::sqrt(float(columns));
  for (size_t at = 0; at < out.size(); at += t.bytes) {
    const float vary = 0.5f + float(rng.next() >> 8) * 0x1p-25f;
    const uint16_t d = half(t.scale * size * vary), m = half(t.scale_2 * size * vary);
    if (t.scale_at >= 0) std::memcpy(&out[at + t.scale_at], &d, 2);
    if (t.scale_2_at >= 0) std::memcpy(&out[at + t.scale_2_at], &m, 2);
    if (t.scale_at < 0) out[at] = uint8_t(120 + rng.next() % 3);
  }
  return out;
}

struct Shape {
  std::string name;
  OutriderConfig config{};
  const BlockType* blocks = nullptr;
  int window = 0;
  bool sinks = false, trees = true, slopes = false;
  int positions = 64, block_size = 4, num_blocks = 32;
};

Shape shape_of(const std::string& name, int hidden, int head_dim, int inner) {
  Shape s;
  s.name = name;
  OutriderConfig& c = s.config;
  c.hidden = hidden, c.head_dim = head_dim, c.intermediate = inner;
  c.layers = 2, c.heads = 4, c.kv_heads = 2, c.vocab = c.num_tokens = c.head_rows = 77;
  c.rotary_dim = head_dim;
  c.eps = 1e-6f;
  c.attention_scale = 0.25f;
  return s;
}

struct Model {
  Shape shape;
  OutriderModel* model;
  std::vector<std::vector<float>> kept;  // the embedding is used where it is
  std::vector<std::vector<uint8_t>> kept_blocks;
  std::vector<std::unique_ptr<std::FILE, int (*)(std::FILE*)>> files;
  Random rng{7};

  explicit Model(const Shape& given) : shape(given) {
    OutriderConfig c = shape.config;
    // Embedding and output head, then nine matrices of each layer: see OutriderConfig.types.
    std::vector<int32_t> types(2 + 9 * size_t(c.layers), shape.blocks ? shape.blocks->type : 0);
    if (shape.blocks) c.types = types.data();
    const std::vector<int32_t> inner(size_t(c.layers), 0), sparse(size_t(c.layers), 1);
    if (c.experts.count) c.experts.inner_of = inner.data(), c.experts.sparse = sparse.data();
    // The second layer has a state besides its attention.
    const int32_t mixes[] = {OUTRIDER_ATTENDS, OUTRIDER_ATTENDS | OUTRIDER_RECURS};
    if (c.mixer.rows) c.mixer.mixes = mixes;
    model = outrider_new(&c);
    if (!model) check(1);
    const int q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
    matrix(OUTRIDER_EMBED, 0, c.vocab, c.hidden, 1.0f * std::sqrt(float(c.hidden)));
    vector(OUTRIDER_FINAL_NORM, 0, c.hidden, 1.0f);
    if (shape.slopes) vector(OUTRIDER_SLOPES, 0, c.heads, 0.0f);
    matrix(OUTRIDER_HEAD, 0, c.vocab, c.hidden);
    for (int layer = 0; layer < c.layers; ++layer) {
      vector(OUTRIDER_ATTENTION_NORM, layer, c.hidden, 1.0f);
      if (!c.parts.one_norm) vector(OUTRIDER_MLP_NORM, layer, c.hidden, 1.0f);
      matrix(OUTRIDER_Q, layer, q, c.hidden);
      matrix(OUTRIDER_K, layer, kv, c.hidden);
      matrix(OUTRIDER_V, layer, kv, c.hidden);
      matrix(OUTRIDER_O, layer, c.hidden, q);
      vector(OUTRIDER_Q_BIAS, layer, q, 0.0f);
      if (shape.sinks) vector(OUTRIDER_SINKS, layer, c.heads, 0.0f);
      if (c.parts.layer_norm) vector(OUTRIDER_ATTENTION_NORM_BIAS, layer, c.hidden, 0.0f);
      if (c.experts.count) {
        experts(layer);
      } else {
        if (!c.parts.plain_mlp) matrix(OUTRIDER_GATE, layer, c.intermediate, c.hidden);
        matrix(OUTRIDER_UP, layer, c.intermediate, c.hidden);
        matrix(OUTRIDER_DOWN, layer, c.hidden, c.intermediate);
      }
      if (c.mixer.rows && layer) recurrent(layer);
      check(outrider_set_layer(model, layer, layer ? shape.window : 0, 0, 0, 0));
    }
    // Rotations by angles with rational sines.
    const int half_dim = c.rotary_dim / 2;
    std::vector<float> cosine(size_t(shape.positions) * half_dim), sine(cosine.size());
    for (int p = 0; p < shape.positions; ++p)
      for (int i = 0; i < half_dim; ++i) {
        const float t = float(p % 16) / float(1 + 3 * i), s = 1 + t * t;
        cosine[size_t(p) * half_dim + i] = (1 - t * t) / s;
        sine[size_t(p) * half_dim + i] = 2 * t / s;
      }
    check(outrider_set_rope(model, 0, cosine.data(), sine.data(), shape.positions));
    check(outrider_ready(model));
    clear();
  }
  ~Model() { outrider_free(model); }

  void matrix(int kind, int layer, int rows, int columns, float size = 1) {
    const float each = size / std::sqrt(float(columns));
    if (shape.blocks) {
      const std::vector<uint8_t> blocks = random_blocks(*shape.blocks, rows, columns, rng);
      files.emplace_back(std::tmpfile(), std::fclose);
      std::fwrite(blocks.data(), 1, blocks.size(), files.back().get());
      std::fflush(files.back().get());
      const OutriderStored stored{0, fileno(files.back().get())};
      const bool in_file = layer;  // the second layer's: passes read it, then pack it
      check(outrider_set_tensor(
          model, kind, layer, in_file ? static_cast<const void*>(&stored) : blocks.data(),
          shape.blocks->type | (in_file ? OUTRIDER_IN_FILE : 0), rows, columns, 1));
    } else if (shape.config.weight_type == 4) {
      std::vector<uint8_t> halves(2 * size_t(rows) * columns);
      for (size_t i = 0; i < halves.size(); i += 2) {
        const uint16_t h = half(3 * each * rng.number());
        std::memcpy(&halves[i], &h, 2);
      }
      kept_blocks.push_back(halves);
      check(outrider_set_tensor(model, kind, layer, kept_blocks.back().data(), 4, rows, columns, 1));
    } else {
      kept.push_back(rng.numbers(size_t(rows) * columns, 3 * each));
      check(outrider_set_tensor(model, kind, layer, kept.back().data(), 0, rows, columns, 1));
    }
  }
  void vector(int kind, int layer, int columns, float around) {
    const auto values = rng.numbers(size_t(columns), 0.5f, around);
    check(outrider_set_tensor(model, kind, layer, values.data(), 0, 1, columns, 1));
  }
  void recurrent(int layer) {
    const OutriderMixer& x = shape.config.mixer;
    const int hidden = shape.config.hidden, inner = x.heads * x.outputs;
    const int channels = inner + 2 * x.groups * x.rows, scalars = (x.delta ? 2 : 1) * x.heads;
    matrix(OUTRIDER_STATE_IN, layer, channels + inner + scalars, hidden);
    matrix(OUTRIDER_STATE_OUT, layer, hidden, inner);
    matrix(OUTRIDER_STATE_CONVOLUTION, layer, channels, x.width);
    vector(OUTRIDER_STATE_CONVOLUTION_BIAS, layer, channels, 0.0f);
    vector(OUTRIDER_STEP_BIAS, layer, x.heads, 0.0f);
    vector(OUTRIDER_RATE, layer, x.heads, -0.7f);
    if (!x.delta) vector(OUTRIDER_SKIP, layer, x.heads, 1.0f);
    vector(OUTRIDER_STATE_NORM, layer, inner, 1.0f);
  }
  void experts(int layer) {
    const OutriderConfig& c = shape.config;
    const OutriderExperts& e = c.experts;
    const auto router = rng.numbers(size_t(e.count) * c.hidden, 1.0f);
    check(outrider_set_tensor(model, OUTRIDER_ROUTER, layer, router.data(), 0, e.count, c.hidden, 1));
    for (int i = 0; i < e.count; ++i)
      for (int part = OUTRIDER_EXPERT_GATE; part <= OUTRIDER_EXPERT_DOWN; ++part) {
        const int rows = part == OUTRIDER_EXPERT_DOWN ? c.hidden : e.inner;
        const int columns = part == OUTRIDER_EXPERT_DOWN ? e.inner : c.hidden;
        const auto w = rng.numbers(size_t(rows) * columns, 3 / std::sqrt(float(columns)));
        check(outrider_set_expert(model, part, layer, i, w.data(), 0, rows, columns, 1));
      }
  }

  void clear() { check(outrider_allocate(model, shape.num_blocks, shape.block_size)); }

  // The logits of `count` tokens after `context` ones; `parents` for a tree.
  void pass(int context, const int32_t* tokens, int count, float* logits,
            const std::vector<int32_t>& parents = {}, int threads = 1) {
    const int blocks = shape.num_blocks;
    std::vector<int32_t> packed(tokens, tokens + count), depth(size_t(count), 0);
    for (int i = 0; i < count; ++i) {
      if (!parents.empty()) depth[i] = parents[i] < 0 ? 0 : depth[parents[i]] + 1;
      packed.push_back(context + (parents.empty() ? i : depth[i]));
    }
    packed.insert(packed.end(), {0, count, context});
    for (int i = 0; i < blocks; ++i) packed.push_back((i * 11 + 3) % blocks);
    for (int i = 0; i < count; ++i) packed.push_back(i);
    packed.insert(packed.end(), parents.begin(), parents.end());
    OutriderStep step{};
    step.logits = logits;
    step.num_tokens = step.num_rows = count;
    step.num_seqs = 1;
    step.table_width = blocks;
    step.has_parents = !parents.empty();
    step.exit_layer = -1;
    step.threads = threads;
    check(outrider_step(model, packed.data(), &step));
  }
};

constexpr int kTokens = 34;

void decoder(const Shape& shape) {
  Model m(shape);
  const size_t vocab = size_t(shape.config.vocab);
  int32_t tokens[kTokens];
  for (int32_t& t : tokens) t = int32_t(m.rng.next() % 77);
  std::vector<float> plain(kTokens * vocab), wide(plain.size());
  for (int i = 0; i < kTokens; ++i) m.pass(i, tokens + i, 1, &plain[i * vocab]);
  for (float x : plain)
    if (!std::isfinite(x)) return fail(shape.name, "a logit is not finite");
  for (int width : {2, 3, 5, 6, 7, 13, 17, kTokens}) {
    m.clear();
    for (int i = 0; i < kTokens; i += width) {
      const int count = std::min(width, kTokens - i);
      m.pass(i, tokens + i, count, &wide[i * vocab]);
    }
    if (std::memcmp(plain.data(), wide.data(), plain.size() * 4) != 0)
      fail(shape.name, "other bits in passes of " + std::to_string(width) + " rows");
  }
  Hash hash;
  hash.add(plain);
  if (shape.trees) {  // two branches after the first 20 tokens; one of them is the text
    const std::vector<int32_t> parents = {-1, 0, 0, 1, 3, 2, 4, 5};
    int32_t nodes[8];
    const int text[8] = {0, 1, -1, 2, 3, -1, 4, -1};
    for (int i = 0; i < 8; ++i) nodes[i] = text[i] < 0 ? 5 + i : tokens[20 + text[i]];
    m.clear();
    m.pass(0, tokens, 20, wide.data());
    m.pass(20, nodes, 8, wide.data(), parents);
    for (int i = 0; i < 8; ++i)
      if (text[i] >= 0 &&
          std::memcmp(&wide[i * vocab], &plain[(20 + text[i]) * vocab], vocab * 4) != 0)
        fail(shape.name, "other bits in a tree");
    hash.add(wide.data(), 8 * vocab * 4);
  }
  hash.print(shape.name);
}

// Rows around the end of the first range of positions, alone, together, by several threads and in trees.
void long_context(const Shape& shape) {
  constexpr int kBefore = 1015, kRows = 24;
  Model m(shape);
  const size_t vocab = size_t(shape.config.vocab);
  std::vector<int32_t> tokens(kBefore + kRows);
  for (int32_t& t : tokens) t = int32_t(m.rng.next() % 77);
  std::vector<float> plain(kRows * vocab), other(kBefore * vocab);
  auto read = [&](int chunk, int threads) {
    m.clear();
    for (int i = 0; i < kBefore; i += chunk)
      m.pass(i, &tokens[i], std::min(chunk, kBefore - i), other.data(), {}, threads);
  };
  read(203, 1);
  for (int i = 0; i < kRows; ++i) m.pass(kBefore + i, &tokens[kBefore + i], 1, &plain[i * vocab]);
  for (float x : plain)
    if (!std::isfinite(x)) return fail(shape.name, "a logit is not finite");
  read(kBefore, 2);  // its last row sees one range, rows after it several
  for (int threads = 1; threads <= 5; ++threads)
    for (int width : {1, 2, 5, 7, 17, kRows}) {
      for (int i = 0; i < kRows; i += width)
        m.pass(kBefore + i, &tokens[kBefore + i], std::min(width, kRows - i), &other[i * vocab], {}, threads);
      if (std::memcmp(plain.data(), other.data(), plain.size() * 4) != 0)
        fail(shape.name, "other bits in " + std::to_string(width) + " rows, " + std::to_string(threads) + " threads");
    }
  // The text is every second node, from the first on; the others are leaves.
  std::vector<int32_t> nodes(2 * kRows), parents(2 * kRows);
  for (int i = 0; i < 2 * kRows; ++i) {
    nodes[i] = i % 2 ? 5 + i : tokens[kBefore + i / 2];
    parents[i] = i < 2 ? -1 : i % 2 ? i - 3 : i - 2;
  }
  for (int threads = 1; threads <= 3; ++threads) {
    m.pass(kBefore, nodes.data(), 2 * kRows, other.data(), parents, threads);
    for (int i = 0; i < kRows; ++i)
      if (std::memcmp(&other[2 * i * vocab], &plain[i * vocab], vocab * 4) != 0)
        fail(shape.name, "other bits in a tree");
  }
  Hash hash;
  hash.add(plain);
  hash.print(shape.name);
}

// Tokens drawn with every filter, and the best guesses of a draw.
void sampling() {
  constexpr int kRows = 48, kVocab = 1003, kChildren = 5;
  Random rng(3);
  const std::vector<float> logits = rng.numbers(kRows * kVocab, 12);
  std::vector<uint8_t> packed;
  auto put = [&](const auto& value) {
    const auto* p = reinterpret_cast<const uint8_t*>(&value);
    packed.insert(packed.end(), p, p + sizeof value);
  };
  for (int i = 0; i < kRows; ++i) put(uint64_t(i) * 0x123456789abcdefull + 5);
  for (int i = 0; i < kRows; ++i) put(i % 6 == 0 ? 0.0f : 0.5f * float(i % 6));
  for (int i = 0; i < kRows; ++i) put(int32_t(i % 4 == 1 ? 3 * i : 0));
  for (int i = 0; i < kRows; ++i) put(i % 4 == 2 ? 0.9f : i % 8 == 7 ? 0.3f : 1.0f);
  for (int i = 0; i < kRows; ++i) put(i % 8 == 3 ? 0.05f : 0.0f);
  std::vector<int32_t> drawn(kRows), guesses(kRows * kChildren);
  std::vector<float> scores(kRows * kChildren);
  OutriderSample sample{logits.data(), drawn.data(), nullptr, kRows, kVocab, kVocab - 3, 1, 0};
  check(outrider_sample(packed.data(), &sample));
  Hash hash;
  hash.add(drawn);
  hash.print("drawn");
  sample.out = guesses.data(), sample.scores = scores.data(), sample.children = kChildren;
  check(outrider_sample(packed.data(), &sample));
  Hash best;
  best.add(guesses);
  best.add(scores);
  best.print("guesses");
  std::vector<float> uniform(1000), gumbel(1000);
  check(outrider_noise(42, 1000, uniform.data(), gumbel.data()));
  Hash noise;
  noise.add(uniform);
  noise.add(gumbel);
  noise.print("noise");
}

}  // namespace

int main() {
  if (!outrider_isa()) {
    std::printf("error: %s\n", outrider_error());
    return 1;
  }
  std::printf("isa %s\n", outrider_isa());
  const char* types[] = {"float32", "bfloat16", "int8", "int4", "float16"};
  for (int type = 0; type < 5; ++type) {
    Shape s = shape_of(types[type], 138, 22, 53);
    s.config.weight_type = type;
    decoder(s);
  }
  Shape rounded = shape_of("bfloat16 rounded", 138, 22, 53);
  rounded.config.weight_type = 1, rounded.config.rounds = 1;
  decoder(rounded);
  for (const BlockType& type : kBlockTypes) {
    Shape s = type.values == 32 ? shape_of(type.name, 96, 24, 160) : shape_of(type.name, 256, 64, 512);
    s.blocks = &type;
    decoder(s);
  }
  for (int kind = 0; kind <= OUTRIDER_RELU2; ++kind) {
    Shape s = shape_of("activation " + std::to_string(kind), 42, 16, 53);
    s.config.parts.activation = kind;
    s.config.parts.plain_mlp = kind % 2;
    s.config.parts.layer_norm = kind == 2;
    s.config.parts.score_cap = kind == 1 ? 5.0f : 0;
    s.config.parts.logit_cap = kind == 3 ? 4.0f : 0;
    s.sinks = kind == 4;
    s.window = kind == 0 ? 9 : 0;
    decoder(s);
  }
  for (int delta = 0; delta < 2; ++delta) {
    Shape s = shape_of(delta ? "delta rule" : "selective scan", 42, 16, 53);
    OutriderMixer& x = s.config.mixer;
    x.delta = delta, x.heads = 4, x.groups = 2, x.rows = 13, x.outputs = 21, x.width = 4;
    x.norm_groups = delta ? 4 : 2, x.norm_first = delta, x.most_step = 10;
    decoder(s);
  }
  Shape experts = shape_of("experts", 42, 16, 53);
  experts.config.experts.count = 5, experts.config.experts.active = 2;
  experts.config.experts.inner = 40, experts.config.experts.scale = 1;
  experts.config.experts.groups = experts.config.experts.open_groups = 1;
  experts.config.experts.group_best = 1;
  experts.config.experts.clamp = 2, experts.config.experts.alpha = 1.702f;
  decoder(experts);
  for (int variant = 0; variant < 4; ++variant) {
    Shape s = shape_of("long context " + std::to_string(variant), 42, variant == 3 ? 20 : 16, 53);
    s.positions = 1100, s.block_size = 16, s.num_blocks = 70;
    s.config.kv_bytes = variant % 2;
    s.window = variant == 2 ? 600 : variant == 3 ? 20 : 0;
    s.sinks = variant > 1, s.slopes = variant == 1;
    s.config.parts.score_cap = variant == 2 ? 5.0f : 0;
    long_context(s);
  }
  sampling();
  return failed;
}
