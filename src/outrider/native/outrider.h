// The C interface of the native engine. Every function returns 0 or an error code; the reason is
// in outrider_error(). No function throws, and none reads out of bounds if the arrays have the
// lengths that their counts say.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OUTRIDER_API __attribute__((visibility("default")))

typedef struct OutriderModel OutriderModel;

enum { OUTRIDER_OK = 0, OUTRIDER_INVALID = 1, OUTRIDER_MEMORY = 2, OUTRIDER_ROPE_SHORT = 3, OUTRIDER_CHANGED = 4 };

// Kinds of tensor for outrider_set_tensor.
enum {
  OUTRIDER_EMBED = 0,
  OUTRIDER_FINAL_NORM = 1,
  OUTRIDER_HEAD = 2,
  OUTRIDER_ATTENTION_NORM = 3,
  OUTRIDER_Q = 4,
  OUTRIDER_K = 5,
  OUTRIDER_V = 6,
  OUTRIDER_O = 7,
  OUTRIDER_Q_BIAS = 8,
  OUTRIDER_K_BIAS = 9,
  OUTRIDER_V_BIAS = 10,
  OUTRIDER_O_BIAS = 11,
  OUTRIDER_Q_NORM = 12,
  OUTRIDER_K_NORM = 13,
  OUTRIDER_MLP_NORM = 14,
  OUTRIDER_GATE = 15,
  OUTRIDER_UP = 16,
  OUTRIDER_DOWN = 17,
  OUTRIDER_GATE_BIAS = 18,
  OUTRIDER_UP_BIAS = 19,
  OUTRIDER_DOWN_BIAS = 20,
  // Of drafting heads only.
  OUTRIDER_FC = 21,           // [hidden][feature_width]
  OUTRIDER_HIDDEN_NORM = 22,  // of the features
  OUTRIDER_MARKOV_EMBED = 23, // [vocab][markov_rank]
  OUTRIDER_MARKOV_HEAD = 24,  // [head_rows][markov_rank]
  // Of decoders that deviate from Llama.
  OUTRIDER_ATTENTION_NORM_BIAS = 25,
  OUTRIDER_MLP_NORM_BIAS = 26,
  OUTRIDER_ATTENTION_OUT_NORM = 27,  // of what attention adds
  OUTRIDER_MLP_OUT_NORM = 28,
  OUTRIDER_SINKS = 29,  // [heads]: scores that take part in the softmax only
  OUTRIDER_FINAL_NORM_BIAS = 30,
  OUTRIDER_HEAD_BIAS = 31,
  OUTRIDER_POSITIONS = 32,  // [position_rows][hidden]
  OUTRIDER_ROUTER = 33,       // [experts][hidden]
  OUTRIDER_ROUTER_BIAS = 34,  // of the scores
  OUTRIDER_CHOICE_BIAS = 35,  // of the weights, for the choice only
  OUTRIDER_SHARED_GATE = 36,  // [hidden]: its sigmoid scales the MLP beside the experts
  OUTRIDER_FC_BIAS = 37,  // of heads only: EAGLE-1
  // Of layers with a recurrent state; see OutriderMixer. Vectors are float32.
  OUTRIDER_STATE_IN = 38,    // the product before the convolution
  OUTRIDER_STATE_IN_BIAS = 39,
  OUTRIDER_STATE_OUT = 40,   // [hidden][inner]
  OUTRIDER_STATE_OUT_BIAS = 41,
  OUTRIDER_STEP_BIAS = 42,   // [heads]
  OUTRIDER_RATE = 43,        // [heads]: negative
  OUTRIDER_SKIP = 44,        // [heads]
  OUTRIDER_STATE_NORM = 45,  // [inner]
  OUTRIDER_STATE_CONVOLUTION = 46,  // [channels][width], the newest input last
  OUTRIDER_STATE_CONVOLUTION_BIAS = 47,
  OUTRIDER_O_GATE = 48,      // [heads * head_dim][hidden]: its sigmoid scales what attention gives
  OUTRIDER_O_GATE_BIAS = 49,
  // Of decoders again.
  OUTRIDER_SLOPES = 50,  // [heads]: what a score loses with each position of distance
  OUTRIDER_EMBEDDING_NORM = 51,
  OUTRIDER_EMBEDDING_NORM_BIAS = 52,
  // Of latent attention. Q reads the normalised product of Q_A (or the residual, if there is none), K
  // and V that of KV_A, whose last `latent_rope` rows are the leading dimensions of every key.
  OUTRIDER_Q_A = 53,   // [latent_q][hidden]
  OUTRIDER_Q_A_NORM = 54,
  OUTRIDER_KV_A = 55,  // [latent_kv + latent_rope][hidden]
  OUTRIDER_KV_A_NORM = 56,
  // Of layers with a convolution in place of attention; O is the product after it.
  OUTRIDER_MIX = 57,  // [3 * hidden][hidden]: B, C, x
  OUTRIDER_MIX_BIAS = 58,
  OUTRIDER_CONVOLUTION = 59,  // [hidden][width], the newest input last
  OUTRIDER_CONVOLUTION_BIAS = 60,
};

// Types of tensor data: 0 float32, 1 bfloat16, 4 float16; 64 + the number that GGUF files give a type of
// blocks. OUTRIDER_TURNED is added for rows of queries and keys whose rotary pairs are neighbours.
// OUTRIDER_TIED: no tensor of its own. OUTRIDER_IN_FILE is added for blocks whose `data` is an OutriderStored:
// steps read them from the file until they have packed them. Where the file changed before, a step fails
// with OUTRIDER_CHANGED.
enum { OUTRIDER_TURNED = 1 << 8, OUTRIDER_IN_FILE = 1 << 9, OUTRIDER_TIED = -1 };
typedef struct {
  int64_t offset;
  int32_t descriptor;  // stays open until outrider_free
} OutriderStored;

// Kinds of model: a decoder, or a head that drafts from a decoder's hidden states.
//   EAGLE-3  a layer over [embedding of token i + 1, features of token i], then plain layers; position
//            i predicts i + 2. With OUTRIDER_PROJECTS it is EAGLE-1: fc makes one input of the two, and
//            the norms before layer 0 and after the last layer may be left out
//   DFlash   layers over a block of masks that also see keys and values made of the features
//   Medusa   residual blocks (matrix O), equally many for each of `intermediate` heads. With
//            OUTRIDER_OWN_HEADS each has an output head of its own (OUTRIDER_HEAD with its number as
//            layer); `exit_layer` is then the first head that a step runs
enum { OUTRIDER_DECODER = 0, OUTRIDER_EAGLE3 = 1, OUTRIDER_DFLASH = 2, OUTRIDER_MEDUSA = 3 };

enum { OUTRIDER_SILU = 0, OUTRIDER_GELU = 1, OUTRIDER_GELU_TANH = 2, OUTRIDER_RELU = 3, OUTRIDER_RELU2 = 4 };
// Norms of queries and keys: the same weights for each head, others for each, or one over all heads.
enum { OUTRIDER_HEAD_SPAN = 0, OUTRIDER_HEADS_SPAN = 1, OUTRIDER_ROW_SPAN = 2 };

// Parts of an expert for outrider_set_expert.
enum {
  OUTRIDER_EXPERT_GATE = 0, OUTRIDER_EXPERT_UP = 1, OUTRIDER_EXPERT_DOWN = 2,
  OUTRIDER_EXPERT_GATE_BIAS = 3, OUTRIDER_EXPERT_UP_BIAS = 4, OUTRIDER_EXPERT_DOWN_BIAS = 5,
};
enum { OUTRIDER_SOFTMAX = 0, OUTRIDER_SOFTMAX_OF_CHOSEN = 1, OUTRIDER_SIGMOID = 2, OUTRIDER_SPARSEMIXER = 3,
       OUTRIDER_SIGMOID_OF_CHOSEN = 4 };

// The experts of a decoder; all zeros: none.
typedef struct {
  int32_t count, active, inner;  // experts, those of a token, their intermediate size
  int32_t router;
  int32_t normalised;            // weights are divided by their sum, or by `least_sum` if it is more
  int32_t groups, open_groups;   // experts are chosen in the best groups,
  int32_t group_best;            // by the sum of this many
  int32_t weighs_input, shared_gate, bias;
  float least_sum, scale, jitter;
  float clamp, alpha;            // limit of gate and up; then: g * sigmoid(alpha g) * (up + 1)
  // [layers] each, read by outrider_new alone: the intermediate size of a layer's MLP (0: it has none),
  // and whether the layer has experts. Decoders without experts may give the sizes, too.
  const int32_t *inner_of, *sparse;
} OutriderExperts;

// The recurrent part of a decoder's layers; all zeros: none. A product gives a gate z, the channels of a
// convolution and scalars of heads; the channels go through the convolution and silu.
//   scan   (z, x, B, C, dt): step = softplus(dt + step bias) within limits, decay = exp(step * rate),
//          state = decay state + step x B', y = state C + skip x
//   delta  (q, k, v, z, b, a): q and k get length 1, decay = exp(softplus(a + step bias) * rate),
//          state = decay state, then state += most_strength sigmoid(b) (v - state k) k',
//          y = state q / sqrt(rows)
// y is normalised in `norm_groups` parts (0: not at all), before it is multiplied by silu(z) or after.
// `sigmoid_gate`: by sigmoid(z) instead.
enum { OUTRIDER_ATTENDS = 1, OUTRIDER_RECURS = 2 };
typedef struct {
  int32_t delta;
  int32_t heads, groups;   // groups of heads share B and C, or q and k
  int32_t rows, outputs;   // a head's state is [rows][outputs]: [state][x] of a scan, [k][v]
  int32_t width;           // of the convolution
  int32_t norm_groups, norm_first, sigmoid_gate;
  float least_step, most_step;
  float most_strength, eps;  // 0: 1, and that of the other norms
  const int32_t* mixes;    // [layers] bits; null: all attend. Read by outrider_new alone
} OutriderMixer;

// How a decoder deviates from Llama; all zeros: not at all. A factor or cap of 0 is none.
typedef struct {
  int32_t layer_norm;      // norms subtract the mean
  int32_t no_input_norms;  // attention and MLP read the residual itself
  int32_t out_norms;       // what attention and MLP add is normalised
  int32_t parallel;        // the MLP reads what attention reads ...
  int32_t one_norm;        // ... through the same norm
  int32_t qk_layer_norm, qk_span;
  int32_t qk_late;         // normalised after the rotation
  int32_t activation;
  int32_t plain_mlp;       // without a gate
  int32_t position_rows, position_offset;  // learned positions; row of position 0
  int32_t qk_rotated;      // queries and keys are normalised in layers that rotate only
  // Queries at position p are multiplied by 1 + growth * log(1 + floor((p + growth_first) / growth_every)).
  int32_t growth_every, growth_first;
  int32_t growth_everywhere;  // 0: only in layers that do not rotate
  int32_t latent_q, latent_kv, latent_rope;  // latent attention; see the kinds of tensors
  int32_t value_dim;       // of a head; 0: head_dim
  int32_t gates_attention;  // see OUTRIDER_O_GATE
  int32_t either_norms;    // a layer has the norms of what it reads, or of what it adds
  float score_cap, embedding_scale, residual_scale, logit_scale, logit_cap;
  float growth;
} OutriderParts;
// How heads of one kind differ.
enum {
  OUTRIDER_PROJECTS = 1,       // EAGLE: see above; features are [hidden], fc is [hidden][2 hidden]
  OUTRIDER_FUSED = 2,          // EAGLE-3: features are [hidden], there is no fc
  OUTRIDER_NORM_RESIDUAL = 4,  // EAGLE-3: layer 0 adds to the normalised features
  OUTRIDER_FEEDS_NORMED = 8,   // EAGLE: the next position reads the normalised state
  OUTRIDER_FROM_ANCHOR = 16,   // DFlash: a place predicts the token after it, not the one at it
  OUTRIDER_OWN_HEADS = 32,     // Medusa: see above
  OUTRIDER_AS_GIVEN = 64,      // Medusa: features are not normalised
};

typedef struct {
  int32_t hidden, layers, heads, kv_heads, head_dim, intermediate, vocab;
  int32_t num_tokens;   // ids from here on are padding and never drawn
  int32_t rotary_dim;   // leading dimensions of a head that rotate
  // 0 float32, 1 bfloat16, 2 int8, 3 int4, 4 float16. Of heads also 72, the blocks of Q8_0, which are made
  // of the floats that they are given: then activations are rounded to 16 bits, and products that
  // take little time have weights in bfloat16.
  int32_t weight_type;
  int32_t rounds;       // bfloat16 weights only: products round their activations to bfloat16 too
  int32_t qk_norm;
  int32_t kind;
  int32_t feature_width;  // width of the target's features that a head reads
  int32_t head_rows;      // rows of the output head; if fewer than vocab: see outrider_set_ids
  int32_t markov_rank;    // DFlash: 0 for none
  int32_t variant;        // how heads of one kind differ, as bits
  int32_t kv_bytes;       // keys and values are kept as int8, with a scale for each slot and head
  float eps;
  float attention_scale;
  // Null, or the types of a decoder's matrices, which replace `weight_type`: of the embedding, the
  // output head (OUTRIDER_TIED: the embedding, which is packed) and, for each layer, Q, K, V, O, gate,
  // up and down, an expert's gate and up, and its down. Read by outrider_new alone.
  const int32_t* types;
  // Null, or for each layer the width of the convolution that stands in place of attention: it gives
  // C * convolution(B * x). 0: attention. Read by outrider_new alone.
  const int32_t* widths;
  // Null, or for each layer two factors: the norms before attention and before the MLP replace the
  // residual, which is multiplied by the factor before more is added. 0: there is no norm. Read by
  // outrider_new alone.
  const float* stays;
  OutriderParts parts;
  OutriderExperts experts;
  OutriderMixer mixer;
} OutriderConfig;

// The integers of a step are one array, `packed`, so that the caller computes one address only:
//   tokens [num_tokens], positions [num_tokens], starts [num_seqs + 1], context [num_seqs],
//   tables [num_seqs][table_width], logit_rows [num_rows], and parents [num_tokens] if has_parents.
typedef struct {
  const int32_t* taps;     // [num_taps]
  float* const* tap_out;   // [num_taps] -> [num_tokens][hidden]
  float* logits;           // [num_rows][vocab]
  const float* features;   // [num_tokens][feature_width]; null for decoders
  const float* begun;      // [num_tokens][hidden]: the states after `start_layer` layers; null: tokens are embedded
  int32_t num_tokens, num_seqs, table_width, num_rows, has_parents, num_taps;
  int32_t exit_layer;      // -1: all layers
  int32_t start_layer;     // 0, or the number of layers that have run; their keys and values are stored
  int32_t threads;
} OutriderStep;

// The stop rules of a drafter. The level of a draft is the margin of its score, noise included, over
// the runner-up's: floor(margin / OUTRIDER_LEVEL_STEP), at most OUTRIDER_LEVELS - 1. `chances` is the
// probability, by level, that a draft is accepted; along a chain they multiply. If the product falls
// below `floors[n]`, where n is the number of drafts of the pass so far, the draft is left out and the
// chain ends. The chain also ends after a draft that is less than `toll`, divided by the number of
// sequences still drafting, above its floor. Without floors no draft is left out.
enum { OUTRIDER_LEVELS = 25 };
#define OUTRIDER_LEVEL_STEP 0.25f
typedef struct {
  const float* chances;  // [num_seqs][OUTRIDER_LEVELS]; null: no levels
  const float* floors;   // [num_floors]; the last one is used for all larger n
  int32_t num_floors;
  float toll;
} OutriderStopRules;

// A draft's parameters as one array: sequence keys (64 bits each), then temperature (float), the
// number of tokens to draft and top_k (int32), top_p and min_p (float), [num_seqs] each.
typedef struct {
  int32_t* out;       // [num_seqs][out_width]
  int32_t out_width;
  int32_t mask_token; // DFlash: the token at the places to predict
  // Null, or [num_seqs][out_width + 1][hidden]: the states of the last given token and of every
  // draft after the layers that run here; the last draft is fed for its state. Decoders only.
  float* states;
  OutriderStopRules stop_rules;  // of chains without `states`
  int32_t* levels;  // [num_seqs][out_width], with stop rules: the level of every drawn token, ...
  int32_t* drawn;   // [num_seqs]: ... the number of drawn tokens, ...
  int32_t* counts;  // [num_seqs]: ... and the number of drafts: the same or one less
} OutriderDraft;

// A tree of at most `num_tokens` nodes per sequence, grown best first: in each of at most `passes`
// passes the `width` best nodes without children get `children` children. `tokens` and `parents` are
// the tree; `fed_*` the tokens in the cache after the context, in order, with parents among them.
typedef struct {
  int32_t *tokens, *parents, *counts;              // [num_seqs][out_width] twice, [num_seqs]
  int32_t *fed_tokens, *fed_parents, *fed_counts;  // [num_seqs][passes * width] twice, [num_seqs]
  int32_t out_width, passes, width, children;
} OutriderTree;

// The parameters of rows are one array: draw keys (64 bits each), then temperature, top_k
// (int32; 0: off), top_p and min_p (float), [num_rows] each.
typedef struct {
  const float* logits;  // [num_rows][vocab]
  int32_t* out;         // [num_rows]
  float* scores;        // [num_rows][children]; null: draw one token
  int32_t num_rows, vocab, num_tokens, threads;
  int32_t children;     // out is [num_rows][children] then
} OutriderSample;

// An index of a text that finds how it may continue: outrider_suffix_new, outrider_ngram_new.
typedef struct OutriderLookup OutriderLookup;

// Several cycles of decoding sequences. Their integers as one array: last token, context, tokens
// that may still be emitted, the drafter's context, by how much its positions are higher than that,
// most drafts of a look-up [num_seqs each];
// tables [num_seqs][table_width], the drafter's [num_seqs][draft_table_width]; starts
// [num_seqs + 1] and tokens that the drafter reads first; starts [num_seqs + 1] and ids that
// finish; with `lookups`, the number of found tokens to take, by the number found,
// [num_seqs][width + 1] (-k or 0: the drafter drafts k tokens instead). The parameters are those of
// a draft. The call ends when a sequence finishes or has no slots for a cycle, or after `limit_s`.
//
// Of each cycle and sequence `out` has: what drafted (0 nothing, 1 the look-up or Medusa, 2 the
// drafter or the script), how many tokens, how many were found, whether these are a tree, how many
// levels there are, how many drafts were accepted, and the target's token after these; then, each
// with room for `width`, the drafts, what was found, its parents, the levels, and the accepted drafts'
// indices.
typedef struct {
  OutriderModel* drafter;  // null: there is no drafter
  float* logits;           // [rows of a cycle][vocab]
  int32_t* out;            // [most_cycles][num_seqs][5 * width + 7]
  double* seconds;         // [most_cycles][2]: drafting, pass
  const int32_t* script;   // null, or [num_seqs][2][script_length], used as drafts: the expected
                           // text, and the number of drafts from each place on that follow it
  OutriderLookup* const* lookups;  // null, or [num_seqs], each null or the index of its text
  const volatile int32_t* stop;  // null, or: no cycle starts once this is not 0
  // If the drafter is Medusa: [most_cycles + 1][num_seqs][hidden], the target's last hidden state of
  // each newest computed token, given before the first cycle and written after each. Medusa considers
  // `children` tokens of each head, and paths at least as likely as `floor`.
  float* states;
  // Null, or [num_taps]: the layers of the target whose states are noted for each new token, side by
  // side: [num_seqs][most_cycles * (width + 1)][num_taps * hidden]. If the drafter is EAGLE, it reads
  // them, and those in `features` with the first tokens. With `passes` it grows trees, at most
  // `breadth` nodes a pass, each of `children` children; their parents are in the place of levels.
  const int32_t* taps;
  const float* features;
  float* features_out;
  OutriderStopRules stop_rules; // of the drafter, unless it is Medusa
  double floor, limit_s;
  int32_t num_seqs, table_width, draft_table_width, width, most_cycles, threads, script_length;
  int32_t copies;          // stops when a sequence leaves its script or reaches its end
  int32_t exit_layer;      // 0, or the number of the model's own layers that draft
  int32_t children, num_taps, passes, breadth;
  int32_t cycles;          // output: the number of cycles that ran
} OutriderCycles;

OUTRIDER_API const char* outrider_error(void);
OUTRIDER_API const char* outrider_isa(void);  // null: the one of OUTRIDER_ISA cannot run here
OUTRIDER_API int32_t outrider_cores(void);
OUTRIDER_API uint64_t outrider_struct_sizes(void);  // to detect an outdated library

OUTRIDER_API OutriderModel* outrider_new(const OutriderConfig* config);
OUTRIDER_API void outrider_free(OutriderModel* model);
// `data` is row-major [rows][columns] of `type`. Blocks and float16 matrices keep their type. The
// embedding is kept by reference, unless it is of blocks, and must outlive the model; all other
// tensors are repacked.
OUTRIDER_API int32_t outrider_set_tensor(OutriderModel* model, int32_t kind, int32_t layer,
                                         const void* data, int32_t type, int64_t rows,
                                         int64_t columns, int32_t threads);
OUTRIDER_API int32_t outrider_set_expert(OutriderModel* model, int32_t part, int32_t layer,
                                         int32_t expert, const void* data, int32_t type,
                                         int64_t rows, int64_t columns, int32_t threads);
// `window` and `chunk`: 0 for none; a token sees its own chunk of positions only. `rope`: the index of
// the layer's table; -1: no rotation. `causal`, of DFlash: a place sees places before it only.
OUTRIDER_API int32_t outrider_set_layer(OutriderModel* model, int32_t layer, int32_t window,
                                        int32_t chunk, int32_t rope, int32_t causal);
// Table `index`; all tables have equally many positions.
OUTRIDER_API int32_t outrider_set_rope(OutriderModel* model, int32_t index, const float* cosine,
                                       const float* sine, int32_t positions);
// The target's id of each row of the output head, ascending; other ids have probability 0.
OUTRIDER_API int32_t outrider_set_ids(OutriderModel* model, const int32_t* ids, int32_t count);
// Packs all that is in files.
OUTRIDER_API int32_t outrider_pack(OutriderModel* model, int32_t threads);
OUTRIDER_API int32_t outrider_ready(OutriderModel* model);  // whether every tensor has been set
OUTRIDER_API int32_t outrider_allocate(OutriderModel* model, int32_t blocks, int32_t block_size);
// Makes the system allocate up to `bytes` of the cache's memory, starting at `offset`, which otherwise
// happens at the first use. Returns the number of bytes; 0 at the end or if the system cannot do it.
// Steps may run at the same time; `outrider_allocate` and `outrider_free` may not.
OUTRIDER_API int64_t outrider_populate(OutriderModel* model, int64_t offset, int64_t bytes);
OUTRIDER_API int64_t outrider_weight_bytes(const OutriderModel* model);
OUTRIDER_API int32_t outrider_step(OutriderModel* model, const int32_t* packed,
                                   const OutriderStep* step);
// The same, then draws a token at every row while its logits are still in the cache:
// `row_packed` as for outrider_sample, `drawn` [num_rows].
OUTRIDER_API int32_t outrider_step_and_draw(OutriderModel* model, const int32_t* packed,
                                            const OutriderStep* step, const void* row_packed,
                                            int32_t* drawn);
OUTRIDER_API int32_t outrider_draft(OutriderModel* model, const int32_t* packed,
                                    const OutriderStep* step, const void* draft_packed,
                                    const OutriderDraft* draft);
OUTRIDER_API int32_t outrider_grow(OutriderModel* model, const int32_t* packed,
                                   const OutriderStep* step, const void* draft_packed,
                                   const OutriderTree* tree);
OUTRIDER_API int32_t outrider_run_cycles(OutriderModel* model, const int32_t* packed,
                                        const void* draft_packed, OutriderCycles* cycles);
OUTRIDER_API int32_t outrider_copy_slots(OutriderModel* model, const int32_t* source,
                                         const int32_t* target, int32_t count);
// The states of recurrent layers: whether a pass may start after the token in a slot (always, if there
// are none), how many tokens were computed again because their state was gone; for tests, fills states
// with NaN until they are written, and forgets all.
enum { OUTRIDER_STATES_HAS = 0, OUTRIDER_STATES_REPLAYED = 1, OUTRIDER_STATES_POISON = 2, OUTRIDER_STATES_FORGET = 3 };
OUTRIDER_API int64_t outrider_states(OutriderModel* model, int32_t what, int32_t slot);
// Draws a token per row; -1 if the row has a NaN. With `scores`: writes instead the best guesses of
// the draw and their log probabilities, by the largest of logits + temperature * gumbel among the
// tokens that the filters keep; -1 if fewer are left.
OUTRIDER_API int32_t outrider_sample(const void* packed, const OutriderSample* sample);
// Reads `count` floats (a multiple of 128 per thread is best) and returns their sum: this
// measures the memory bandwidth with the loops of the engine.
OUTRIDER_API float outrider_read(const float* data, int64_t count, int32_t threads);
// Look-ups. `trusted` [depth + 1]: the most drafts after a match of each length; nothing is drafted
// after tokens in `finish`.
// Texts as a suffix automaton. `floor`: the least product of count ratios along a path.
OUTRIDER_API OutriderLookup* outrider_suffix_new(const int32_t* trusted, int32_t depth,
                                                 double floor, int32_t tree, const int32_t* finish,
                                                 int32_t num_finish);
OUTRIDER_API int32_t outrider_suffix_begin(OutriderLookup* index);  // starts another text
// Also drafts from these suffix automata, which must live as long as `index`.
OUTRIDER_API int32_t outrider_suffix_others(OutriderLookup* index, OutriderLookup* const* others,
                                            int32_t num_others);
// One text; matches its last `min_n` to `max_n` tokens.
OUTRIDER_API OutriderLookup* outrider_ngram_new(const int32_t* trusted, int32_t depth,
                                                int32_t min_n, int32_t max_n,
                                                const int32_t* finish, int32_t num_finish);
OUTRIDER_API void outrider_lookup_free(OutriderLookup* index);
OUTRIDER_API int64_t outrider_lookup_size(const OutriderLookup* index);  // tokens, of all texts
OUTRIDER_API int32_t outrider_lookup_extend(OutriderLookup* index, const int32_t* tokens,
                                            int32_t count);
// Appends `tokens` to the text and writes the best continuation: the number of nodes, whether they are
// a tree, their tokens and their parents. `out` has 2 * `budget` + 2 entries.
OUTRIDER_API int32_t outrider_lookup_draft(OutriderLookup* index, const int32_t* tokens,
                                           int32_t count, int32_t budget, int32_t* out);
// u(0..size-1) and gumbel(0..size-1) of a draw key; either output may be null.
OUTRIDER_API int32_t outrider_noise(uint64_t key, int32_t size, float* uniform, float* gumbel);

#ifdef __cplusplus
}
#endif
