// One token a sequence through a whole decoder layer of Llama's kind: RMS norms, grouped-query attention with rotary
// positions over the layer's cache, a gated MLP. One call and five waits of the threads for each other a layer, where
// single operators are ten calls and as many waits; every thread computes norms, rounding and the join of attention's pieces
// for itself.
//
// Sums are float32. Results are rounded to T where they are stored as such: of each matrix and each sum with the residual, of a
// head's norm and its turn; not inside of them.
#pragma once

#include "around.h"
#include "cache_ops.h"
#include "linear.h"

namespace pdq {

template <typename T>
struct Layer {
  Linear q, k, v, o, gate, up, down;
  const T *before_attention, *before_mlp;
  const T *q_norm, *k_norm;  // over a head's dimension; null: none
  float eps;
};

// Some matrices side by side against the same rows: channels [first, last) of all of them together.
template <typename T, size_t COUNT>
void project(const Linear* const (&linears)[COUNT], T* const (&outs)[COUNT], const T* x, int64_t rows, Input<T>& in) {
  int64_t total = 0, begin = 0;
  for (const Linear* w : linears) total += w->N;
  const Share mine(total);
  for (size_t i = 0; i < COUNT; begin += linears[i]->N, ++i) {
    const Linear& w = *linears[i];
    const int64_t first = std::max<int64_t>(0, mine.first - begin), last = std::min(w.N, mine.last - begin);
    if (first >= last) continue;
    if (!in.serves(x, w)) in.read(x, rows, w);
    few_rows(w, in, first, last, outs[i], w.N);
  }
}

// What keys are held apart from, [B, kv_heads, D] each: as (k − mean) / spread; null: held whole.
struct Channels {
  const float *mean, *spread;
};

// cos and sin of the positions: [D] of row b at b * stride; 0: one position for all.
template <typename T>
struct Turns {
  const T *cos, *sin;
  int64_t stride;
};

// x and out [B, hidden]; slot: where the new position is written, of the attention's count of them.
template <typename T>
void run_layer(const Layer<T>& layer, const T* x, const Turns<T>& turns, const Channels& channels, Attention& attention, int64_t slot, T* out) {
  const LayerCache& cache = attention.cache;
  const int64_t B = cache.B, D = cache.D, G = attention.G, hidden = layer.down.N, inner = layer.gate.N;
  std::vector<T> q(B * layer.q.N), k(B * layer.k.N), v(B * layer.v.N), state(B * hidden), gate(B * inner), up(B * inner);
#pragma omp parallel
  {
    std::vector<T> rows(B * std::max(hidden, layer.o.K));
    std::vector<float> query(G * D), key(D), room(D);
    Input<T> in;
    for (int64_t b = 0; b < B; ++b) rms_norm(x + b * hidden, layer.before_attention, hidden, layer.eps, rows.data() + b * hidden);
    project<T>({&layer.q, &layer.k, &layer.v}, {q.data(), k.data(), v.data()}, rows.data(), B, in);
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t item = 0; item < attention.items(); ++item) {
      const int64_t head = attention.head(item), turn = head / cache.kv_heads * turns.stride;
      const T *cos = turns.cos + turn, *sin = turns.sin + turn;
      for (int64_t g = 0; g < G; ++g)
        turned(q.data() + (head * G + g) * D, layer.q_norm, layer.eps, cos, sin, D, room.data(), query.data() + g * D);
      const float *mean = channels.mean + head * D, *spread = channels.spread + head * D;
      if (channels.mean != nullptr)
        for (int64_t i = 0; i < G * D; ++i) query[i] *= spread[i % D];
      if (slot >= attention.first(item) && slot < attention.last(item)) {
        turned(k.data() + head * D, layer.k_norm, layer.eps, cos, sin, D, room.data(), key.data());
        if (channels.mean != nullptr)
          for (int64_t i = 0; i < D; ++i) key[i] = (key[i] - mean[i]) / spread[i];
        cache.write(0, head, slot, key.data());
        for (int64_t i = 0; i < D; ++i) key[i] = widen(v[head * D + i]);
        cache.write(1, head, slot, key.data());
      }
      attention.run(item, query.data());
    }
    for (int64_t head = 0; head < B * cache.kv_heads; ++head)
      for (int64_t g = 0; g < G; ++g) attention.join(head, g, room.data(), rows.data() + (head * G + g) * D);
    const Share mine(hidden);
    const auto add_share = [&](const T* from, T* to) {
      for (int64_t b = 0; b < B; ++b) add_row(from + b * hidden + mine.first, mine.last - mine.first, to + b * hidden + mine.first);
    };
    in.read(rows.data(), B, layer.o);
    few_rows(layer.o, in, mine.first, mine.last, state.data(), hidden);
    add_share(x, state.data());
#pragma omp barrier
    for (int64_t b = 0; b < B; ++b) rms_norm(state.data() + b * hidden, layer.before_mlp, hidden, layer.eps, rows.data() + b * hidden);
    const Share inside(inner);
    in.read(rows.data(), B, layer.gate);
    few_rows(layer.gate, in, inside.first, inside.last, gate.data(), inner);
    if (!in.serves(rows.data(), layer.up)) in.read(rows.data(), B, layer.up);
    few_rows(layer.up, in, inside.first, inside.last, up.data(), inner);
    for (int64_t b = 0; b < B && inside.first < inside.last; ++b) {
      const int64_t at = b * inner + inside.first;
      silu_times(gate.data() + at, up.data() + at, inside.last - inside.first, gate.data() + at);
    }
#pragma omp barrier
    in.read(gate.data(), B, layer.down);
    few_rows(layer.down, in, mine.first, mine.last, out, hidden);
    add_share(state.data(), out);
  }
}

}  // namespace pdq
