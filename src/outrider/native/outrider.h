// The C interface of the native engine. Every function returns 0 or an error code; the reason is
// in outrider_error(). Nothing here throws, and no argument can make it read out of bounds as
// long as the arrays have the lengths their counts say.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OUTRIDER_API __attribute__((visibility("default")))

typedef struct OutriderModel OutriderModel;

enum { OUTRIDER_OK = 0, OUTRIDER_INVALID = 1, OUTRIDER_MEMORY = 2, OUTRIDER_ROPE_SHORT = 3 };

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
  OUTRIDER_HIDDEN_NORM = 22,  // of what comes from the target
  OUTRIDER_MARKOV_EMBED = 23, // [vocab][markov_rank]
  OUTRIDER_MARKOV_HEAD = 24,  // [vocab][markov_rank]
};

// What a model is: a decoder, or a head that drafts from a decoder's hidden states.
//   EAGLE-3  one layer over [embedding of token i + 1, features of token i]; position i guesses i + 2
//   DFlash   layers over a block of masks that also see keys and values made of the features
//   Medusa   residual blocks (matrix O), as many for each of `intermediate` guesses ahead
enum { OUTRIDER_DECODER = 0, OUTRIDER_EAGLE3 = 1, OUTRIDER_DFLASH = 2, OUTRIDER_MEDUSA = 3 };

typedef struct {
  int32_t hidden, layers, heads, kv_heads, head_dim, intermediate, vocab;
  int32_t num_tokens;   // ids from here on are padding and never drawn
  int32_t rotary_dim;   // leading dimensions of a head that rotate
  int32_t weight_type;  // 0 float32, 1 bfloat16, 2 int8, 3 int4
  int32_t rounds;       // bfloat16 weights only: products round their activations to bfloat16 too
  int32_t qk_norm;
  int32_t kind;
  int32_t feature_width;  // hidden states of the target that a head reads, side by side
  int32_t head_rows;      // ids the output head knows; fewer than vocab: see outrider_set_ids
  int32_t markov_rank;    // DFlash: 0 for none
  float eps;
  float attention_scale;
} OutriderConfig;

// A step's integers come as one array, `packed`, so that the caller has one pointer to find:
//   tokens [num_tokens], positions [num_tokens], starts [num_seqs + 1], context [num_seqs],
//   tables [num_seqs][table_width], logit_rows [num_rows], and parents [num_tokens] if has_parents.
typedef struct {
  const int32_t* taps;     // [num_taps]
  float* const* tap_out;   // [num_taps] -> [num_tokens][hidden]
  float* logits;           // [num_rows][vocab]
  const float* features;   // [num_tokens][feature_width]; null for decoders
  const float* begun;      // [num_tokens][hidden]: the states after `start_layer` layers
  int32_t num_tokens, num_seqs, table_width, num_rows, has_parents, num_taps;
  int32_t exit_layer;      // -1: all layers
  int32_t start_layer;     // 0, or how many layers were run before: their keys and values stand
  int32_t threads;
} OutriderStep;

// When a drafter stops by itself. A draft's level says by how much its score beats the runner-up's,
// noise included: floor(margin / OUTRIDER_LEVEL_STEP), at most the last of OUTRIDER_LEVELS.
// `chances` is how often drafts of a level hold; along a chain they multiply. Where that falls
// below `floors[n]`, n drafts of the pass being taken by then, the draft is left out and the chain ends;
// it also ends behind one that is above, but not by the round's `toll`, shared by all that are
// still drafting. Without floors nothing is left out.
enum { OUTRIDER_LEVELS = 25 };
#define OUTRIDER_LEVEL_STEP 0.25f
typedef struct {
  const float* chances;  // [num_seqs][OUTRIDER_LEVELS]; null: levels are not asked for
  const float* floors;   // [num_floors]; the last stands for all that follow
  int32_t num_floors;
  float toll;
} OutriderStopRules;

// A draft's parameters as one array: sequence keys (64 bits each), then temperature (float), the
// number of tokens to draft and top_k (int32), top_p and min_p (float), [num_seqs] each.
typedef struct {
  int32_t* out;       // [num_seqs][out_width]
  int32_t out_width;
  int32_t mask_token; // DFlash: what stands for the places to guess
  // Null, or [num_seqs][out_width + 1][hidden]: the states that the layers run here leave for the
  // last given token and every draft, the last of which is fed for that alone. Decoders only.
  float* states;
  OutriderStopRules stop_rules;  // of chains without `states`
  int32_t* levels;  // [num_seqs][out_width], set if asked for: of every token that was drawn, ...
  int32_t* drawn;   // [num_seqs]: ... how many that were, ...
  int32_t* counts;  // [num_seqs]: ... and how many of them are drafts; the same or one less
} OutriderDraft;

// A tree of at most `num_tokens` nodes per sequence, grown best first: in each of at most `passes`
// passes the `width` best nodes that have none get `children` children. `tokens` and `parents` are
// the tree; `fed_*` what the cache holds behind the context, in order, parents among themselves.
typedef struct {
  int32_t *tokens, *parents, *counts;              // [num_seqs][out_width] twice, [num_seqs]
  int32_t *fed_tokens, *fed_parents, *fed_counts;  // [num_seqs][passes * width] twice, [num_seqs]
  int32_t out_width, passes, width, children;
} OutriderTree;

// A row's parameters come as one array too: draw keys (64 bits each), then temperature, top_k
// (int32; 0: off), top_p and min_p (float), [num_rows] each.
typedef struct {
  const float* logits;  // [num_rows][vocab]
  int32_t* out;         // [num_rows]
  float* scores;        // [num_rows][children]; null: draw one token
  int32_t num_rows, vocab, num_tokens, threads;
  int32_t children;     // out is [num_rows][children] then
} OutriderSample;

// A text by its endings, and how it may go on: outrider_suffix_new, outrider_ngram_new.
typedef struct OutriderLookup OutriderLookup;

// Several cycles of decoding sequences. Their integers as one array: last token, context, tokens
// that may still be emitted, the drafter's context, most drafts of a look-up [num_seqs each];
// tables [num_seqs][table_width], the drafter's [num_seqs][draft_table_width]; starts
// [num_seqs + 1] and tokens that the drafter is to be fed first; starts [num_seqs + 1] and ids that
// finish; with `lookups`, how much to take of what was found, by its size [num_seqs][width + 1]
// (0 or less: the drafter is asked, for so many tokens). Their parameters as for a draft. Stops
// where a sequence finishes, has no slots left for a cycle, or `limit_s` is over.
//
// Of each cycle and sequence `out` has: what drafted (0 nothing, 1 the look-up or Medusa, 2 the
// drafter or the script), how many tokens, how many were found, whether these are a tree, how many
// levels there are, how many drafts were accepted, and the target's token after these; then, each
// with room for `width`, the drafts, what was found, its parents, the levels, and the accepted drafts'
// indices.
typedef struct {
  OutriderModel* drafter;  // null: nobody drafts
  float* logits;           // [rows of a cycle][vocab]
  int32_t* out;            // [most_cycles][num_seqs][5 * width + 7]
  double* seconds;         // [most_cycles][2]: drafting, pass
  const int32_t* script;   // null, or [num_seqs][2][script_length]: what to draft instead: the text
                           // that is expected, and how many drafts from each place on follow it
  OutriderLookup* const* lookups;  // null, or [num_seqs], each null or its text up to now
  const volatile int32_t* stop;  // null, or: not 0 any more, and no further cycle is begun
  // Where the drafter is Medusa: [most_cycles + 1][num_seqs][hidden], the target's last hidden state of
  // each newest computed token, given before the first cycle and written after each; `children`
  // guesses of each head are considered, and paths at least as likely as `floor`.
  float* states;
  OutriderStopRules stop_rules; // of the drafter, unless it is Medusa
  double floor, limit_s;
  int32_t num_seqs, table_width, draft_table_width, width, most_cycles, threads, script_length;
  int32_t copies;          // stops where a sequence leaves its script, or there is no more of it
  int32_t exit_layer;      // 0, or how many of the model's own layers draft instead of a drafter
  int32_t children;
  int32_t cycles;          // set: how many were run
} OutriderCycles;

OUTRIDER_API const char* outrider_error(void);
OUTRIDER_API const char* outrider_isa(void);  // null: OUTRIDER_ISA names one that cannot run
OUTRIDER_API int32_t outrider_cores(void);
OUTRIDER_API uint64_t outrider_struct_sizes(void);  // to catch a stale library

OUTRIDER_API OutriderModel* outrider_new(const OutriderConfig* config);
OUTRIDER_API void outrider_free(OutriderModel* model);
// `data` is row-major [rows][columns] of `type` (0 float32, 1 bfloat16, 4 float16). The embedding
// is kept by reference and must outlive the model; everything else is repacked.
OUTRIDER_API int32_t outrider_set_tensor(OutriderModel* model, int32_t kind, int32_t layer,
                                         const void* data, int32_t type, int64_t rows,
                                         int64_t columns, int32_t threads);
OUTRIDER_API int32_t outrider_set_window(OutriderModel* model, int32_t layer, int32_t window);
OUTRIDER_API int32_t outrider_set_rope(OutriderModel* model, const float* cosine,
                                       const float* sine, int32_t positions);
// The target's id of each row of the output head, ascending; all others are impossible.
OUTRIDER_API int32_t outrider_set_ids(OutriderModel* model, const int32_t* ids, int32_t count);
OUTRIDER_API int32_t outrider_ready(OutriderModel* model);  // whether every tensor has been set
OUTRIDER_API int32_t outrider_allocate(OutriderModel* model, int32_t blocks, int32_t block_size);
// Has the system provide up to `bytes` of the cache's memory from `offset` on, which it otherwise does
// at the first use. Returns how many it was, 0 at the end or where it cannot be asked for that.
// Steps may run meanwhile; `outrider_allocate` and `outrider_free` may not.
OUTRIDER_API int64_t outrider_populate(OutriderModel* model, int64_t offset, int64_t bytes);
OUTRIDER_API int64_t outrider_weight_bytes(const OutriderModel* model);
OUTRIDER_API int32_t outrider_step(OutriderModel* model, const int32_t* packed,
                                   const OutriderStep* step);
// The same, and then a token drawn at every row while its logits are still in the cache:
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
// Draws a token per row; -1 where the row has a NaN. With `scores`, instead: the best guesses of
// the draw and how likely each is to be it, as logarithms, by the largest of logits + temperature
// * gumbel among what the filters keep; -1 where fewer are left.
OUTRIDER_API int32_t outrider_sample(const void* packed, const OutriderSample* sample);
// Reads `count` floats (a multiple of 128 per thread is best) and returns their sum: what this
// machine's memory can deliver, measured with the loops of the engine.
OUTRIDER_API float outrider_read(const float* data, int64_t count, int32_t threads);
// Look-ups. `trusted` [depth + 1]: most nodes to draft after a match of so many tokens; behind tokens
// in `finish` nothing is drafted.
// Texts as a suffix automaton. `floor`: the least product of count ratios along a path.
OUTRIDER_API OutriderLookup* outrider_suffix_new(const int32_t* trusted, int32_t depth,
                                                 double floor, int32_t tree, const int32_t* finish,
                                                 int32_t num_finish);
OUTRIDER_API int32_t outrider_suffix_begin(OutriderLookup* index);  // what comes is another text
// Drafts may come from these suffix automata too, which must live for as long.
OUTRIDER_API int32_t outrider_suffix_others(OutriderLookup* index, OutriderLookup* const* others,
                                            int32_t num_others);
// One text, by its endings of `min_n` to `max_n` tokens.
OUTRIDER_API OutriderLookup* outrider_ngram_new(const int32_t* trusted, int32_t depth,
                                                int32_t min_n, int32_t max_n,
                                                const int32_t* finish, int32_t num_finish);
OUTRIDER_API void outrider_lookup_free(OutriderLookup* index);
OUTRIDER_API int64_t outrider_lookup_size(const OutriderLookup* index);  // tokens, of all texts
OUTRIDER_API int32_t outrider_lookup_extend(OutriderLookup* index, const int32_t* tokens,
                                            int32_t count);
// Takes in `tokens` and writes the best continuation: how many nodes, whether they are a tree, their
// tokens and their parents. `out` has room for twice `budget` and two.
OUTRIDER_API int32_t outrider_lookup_draft(OutriderLookup* index, const int32_t* tokens,
                                           int32_t count, int32_t budget, int32_t* out);
// u(0..size-1) and gumbel(0..size-1) of a draw key; either output may be null.
OUTRIDER_API int32_t outrider_noise(uint64_t key, int32_t size, float* uniform, float* gumbel);

#ifdef __cplusplus
}
#endif
