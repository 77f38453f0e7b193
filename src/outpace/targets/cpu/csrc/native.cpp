// The functions that Python calls (native.py): products, weights in blocks, and passes through layers.
//
// This is the one file that is compiled; the headers hold the rest. Each includes those above it at most:
//
//   lanes.h, team.h                      vectors of floats; threads
//   linear.h, block_formats.h            weights, as they are held
//   gguf_blocks.h, block_panels.h        weights in blocks: as files hold them, and as products read them
//   dense_products.h, block_*.h          products with weights of each kind, on one thread
//   products.h, transposed_products.h    products on all threads; products the other way round
//   ops.h, attention_kernel.h, kv_cache.h, experts.h, recurrence.h    parts of a layer
//   layer.h                              a layer and a pass, as Python describes them
//   attention.h, latent_attention.h      attention of a layer
//   scratch.h, forward*.h                a pass through layers
//
// A token gets the same bits when it is decoded alone and when it is scored among drafts: every sum runs in
// one order whatever shares the call.

#include <cstdint>

#include "block_panels.h"
#include "forward.h"
#include "forward_experts.h"
#include "forward_mixers.h"
#include "gguf_blocks.h"
#include "products.h"
#include "scratch.h"

namespace {

struct Call {
  Product product;
  Threads threads;
  Team team = {};
};

} // namespace

extern "C" {

int outpace_lanes() { return LANES; }

// The outputs whose weights may lie side by side.
int64_t outpace_panel() { return PANEL; }

// The number of kinds of weights: float16 comes last, because not all compilers have it.
int outpace_kinds() {
#ifdef HAS_FLOAT16
  return 4;
#else
  return 3;
#endif
}

// quantized: room for `outpace_quantized_size` bytes, whole lines of the cache, if weights are in blocks.
void outpace_products(const float *x, float *y, int64_t rows, int64_t k, const Linear *linears,
                      int64_t count, void *quantized, Parallel parallel, int (*size)(), int threads) {
  Call call{{x, y, rows, k, linears, count, static_cast<ActivationBlock *>(quantized)},
            {parallel, size, threads}};
  call.threads.run(
      [](void *given) {
        Call &call = *static_cast<Call *>(given);
        int size = call.threads.size_here();
        if (call.product.in_blocks()) quantize_inputs(call.product, call.team, size);
        multiply(call.product, call.team, size);
      },
      &call);
}

int64_t outpace_quantized_size(int64_t rows, int64_t k) {
  return rows * blocks_of(k) * int64_t(sizeof(ActivationBlock));
}

// The bytes of a weight in blocks once it is in panels.
int64_t outpace_blocks_size(int kind, int64_t outputs, int64_t inputs) {
  return (outputs + BLOCK_PANEL - 1) / BLOCK_PANEL * panel_bytes(BLOCK_FORMATS[kind], blocks_of(inputs));
}

// Packs the panels from first to last of a weight that a file holds in blocks, the first ones before
// others. grid: of its kind, or null.
void outpace_lay_out_blocks(int kind, const uint8_t *raw, const uint8_t *grid, int64_t outputs,
                            int64_t inputs, int64_t first, int64_t last, uint8_t *to, Parallel parallel,
                            int (*size)(), int threads) {
  if (first == 0) prefer_large_pages(to, outpace_blocks_size(kind, outputs, inputs));
  const int64_t blocks = blocks_of(inputs);
  PackingJob job{kind, raw, grid, outputs, blocks, first, last, to, {parallel, size, threads}};
  job.threads.run([](void *given) { static_cast<PackingJob *>(given)->compute(); }, &job);
}

// Writes a weight in panels as floats [outputs, inputs].
void outpace_dequantize_blocks(int kind, uint8_t *panels, int64_t outputs, int64_t inputs, float *to) {
  const int64_t blocks = blocks_of(inputs), size = panel_bytes(BLOCK_FORMATS[kind], blocks);
  for (int64_t o = 0; o < outputs; o++)
    dequantize_output(kind, panels + o / BLOCK_PANEL * size, o % BLOCK_PANEL, blocks, to + o * inputs);
}

// Writes rows of a weight as a file holds it, as floats [rows, inputs].
void outpace_dequantize_rows(int kind, const uint8_t *raw, const uint8_t *grid, int64_t rows,
                             int64_t inputs, float *to) {
  const int64_t bytes = inputs / BLOCK_FORMATS[kind].inputs * BLOCK_FORMATS[kind].bytes;
  for (int64_t r = 0; r < rows; r++)
    dequantize_row(kind, raw + r * bytes, grid, blocks_of(inputs), to + r * inputs);
}

// The floats of scratch memory that layers need for a pass over some tokens, each of which may see
// `view` slots, on n threads. One line of the cache more is needed to begin with one.
int64_t outpace_scratch(const Layer *layers, int64_t count, int64_t rows, int64_t columns, int64_t view,
                        int threads) {
  return scratch_floats(layers, count, rows, columns, view, threads);
}

// x: [tokens, hidden], what comes in, and then what comes out of all layers, normalised if there is
// a norm for that. Where there are heads, logits are written instead: of each [rows, keep, outputs].
// states: null, or where each layer's output is written to, too, as many floats apart as stride says.
// reading: how layers that keep a state read the columns; not looked at where there are none.
void outpace_layers(const Layer *layers, int64_t layer_count, const Pass *pass, float *x,
                    const KVCache *cache, const StatePointers *reading, const Norm *norm,
                    const Linear *heads, int64_t head_count, float *logits, int64_t keep, float scale,
                    float cap, float *states, int64_t stride, Parallel parallel, int (*size)(),
                    int threads) {
  ForwardPass forward{layers,   layer_count,
                      *pass,    x,
                      *cache,   {norm, heads, head_count, logits, keep, scale, cap, states, stride},
                      *reading, {parallel, size, threads}};
  forward.threads.run([](void *given) { static_cast<ForwardPass *>(given)->compute(); }, &forward);
}
}
