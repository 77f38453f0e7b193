// A decoder layer, and a pass, as Python describes them.
//
// Python has structures with the same fields in the same order: `_Layer` (native_layers/stack.py), and
// `_Angles`, `_Mask` and `_Pass` (native_layers/passes.py).
#pragma once

#include <cstdint>

#include "experts.h"
#include "linear.h"
#include "ops.h"
#include "recurrence.h"

namespace {

// The head sizes of multi-head latent attention.
struct Latent {
  int64_t size;       // of a latent; 0: there are none
  int64_t nope, rope; // numbers of a query: those without a position come first
  int64_t value;

  int64_t query() const { return nope + rope; }
};

// What a decoder layer computes: transformers' module of it, as Python has read it.
struct Layer {
  // Where the MLP is not gated there is no gate. In latent attention `key` is kv_a_proj_with_mqa, which
  // makes latents, with the key that all heads share after each, and `value` is kv_b_proj, which makes
  // keys and values of them.
  Linear query, key, value, output, gate, up, down;
  Linear query_a; // makes the inputs of `query`, if these are not the hidden states
  Linear key_b;   // of latents, makes keys the other way round, where `value` makes values alone
  Norm before_attention, after_attention;
  Norm before_mlp, after_mlp;
  Norm query_norm, key_norm; // of each head, or of all heads together, or of what `query_a` makes and
                             // of latents
  Norm embedding_norm;       // of embeddings, where attention reads them
  // kv_heads: of latents, groups of heads that one thread takes. dim: numbers of a value in the cache.
  int64_t hidden, heads, kv_heads, dim, inner;
  int64_t has_attention, has_mlp; // 0 of a part that is skipped
  int64_t reads_embeddings;       // whether attention reads them, too, before the hidden states (EAGLE-3)
  int64_t parallel;               // whether the MLP is given what attention is given
  int64_t norm_over_heads;        // whether all heads are normalised together
  int64_t norm_stride;            // between the weights of the norms of two heads: 0 if they share them
  int64_t activation, rotary;
  int64_t gated_heads;       // whether each query has the gate of its head's output after it
  int64_t angles, mask;      // which ones of the pass
  float scaling, cap;        // of scores; 0: they have no bound
  float residual_multiplier; // by which is multiplied what is added to the residual stream
  Clip clip;                 // of SWIGLU_OAI
  const float *sinks;        // [heads]: scores of a slot without values that all tokens see; or null
  Mixture mixture;
  Latent latent;
  Recurrence recurrence; // instead of attention, if it has a kind

  bool gated() const { return gate.weight; }

  // Numbers of a token that attention reads.
  int64_t attention_inputs() const { return reads_embeddings ? 2 * hidden : hidden; }

  // Numbers of a query, with its gate, and of a key.
  int64_t query_dim() const { return latent.size ? dim + latent.rope : gated_heads ? 2 * dim : dim; }
  // Numbers of all queries, and of what they have seen, as their products make and take them.
  int64_t query_width() const { return heads * (latent.size ? latent.query() : query_dim()); }
  int64_t attended_width() const {
    return recurrence.kind ? recurrence.width : heads * (latent.size ? latent.value : dim);
  }

  // The floats per token that the products before the MLP, and queries, need.
  int64_t scratch_per_token() const {
    if (recurrence.kind) return recurrence.scratch_per_token();
    if (!latent.size)
      return query_width() + 2 * kv_heads * dim + attended_width() + (reads_embeddings ? 2 * hidden : 0);
    return query_a.outputs + key.outputs + query_width() + heads * (query_dim() + dim) + attended_width();
  }

  void apply_activation(float *gate, const float *up, int64_t n) const {
    activation == SWIGLU_OAI ? swiglu_oai(clip, gate, up, n) : activate(activation, gate, up, n);
  }
};

// The table of rotary position embeddings, by position or by token.
struct Angles {
  const float *cosines, *sines; // [positions, dim]
  const int64_t *positions;     // [rows, columns], or null: of the tokens in their order
  int64_t dim;                  // of a row
};

// Which slots tokens see.
struct Mask {
  const uint8_t *seen; // [rows, columns, view], or null: all
  int64_t row_stride, column_stride;
};

// A pass of `columns` tokens in each of `rows` rows, of which token t of row a is r = a columns + t.
struct Pass {
  int64_t rows, columns, view; // view: slots that may be seen
  const Angles *angles;        // of each kind of layers
  const Mask *masks;
  const int64_t *firsts; // [rows]: where each row's slots begin in the cache
  const int64_t *starts; // [rows]: the slot, of the row's own, of its first token
  int64_t slots;         // of a head of the cache
  const float *embeddings; // [tokens, hidden], or null where no layer reads them
  float *scratch;
};

} // namespace
