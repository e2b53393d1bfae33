// One token a sequence through a whole decoder layer of Llama's kind: RMS norms, grouped-query attention with rotary
// positions over the layer's cache, a gated MLP. One call and five waits of the threads for each other a layer, where
// single operators are ten calls and as many waits; every thread computes norms, rounding and the join of attention's pieces
// for itself.
//
// Sums are float32. Results are rounded to T where they are stored as such: of each matrix and each sum with the residual, of a
// head's norm and its turn; not inside of them.
#pragma once

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

template <typename T>
float rounded(float x) {
  T narrow;
  store(&narrow, x);
  return widen(narrow);
}

// x / rms(x) · weight (Zhang and Sennrich, arXiv 1910.07467).
template <typename T, typename O>
void rms_norm(const T* x, const T* weight, int64_t n, float eps, O* out) {
  __m256 acc = _mm256_setzero_ps();
  float squares = 0.0f;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 v = load8(x + i);
    acc = _mm256_fmadd_ps(v, v, acc);
  }
  for (; i < n; ++i) squares += widen(x[i]) * widen(x[i]);
  const float by = 1.0f / std::sqrt((squares + sum8(acc)) / static_cast<float>(n) + eps);
  const __m256 all = _mm256_set1_ps(by);
  for (i = 0; i + 8 <= n; i += 8) store8(out + i, _mm256_mul_ps(_mm256_mul_ps(load8(x + i), all), load8(weight + i)));
  for (; i < n; ++i) store(out + i, widen(x[i]) * by * widen(weight[i]));
}

// A head's row: normed where there is a norm, turned by its position (Su and others, arXiv 2104.09864), halves paired.
template <typename T>
void turned(const T* x, const T* norm, float eps, const T* cos, const T* sin, int64_t D, float* room, float* out) {
  if (norm == nullptr) {
    for (int64_t i = 0; i < D; ++i) room[i] = widen(x[i]);
  } else {
    rms_norm(x, norm, D, eps, room);
    for (int64_t i = 0; i < D; ++i) room[i] = rounded<T>(room[i]);
  }
  const int64_t half = D / 2;
  for (int64_t i = 0; i < half; ++i) {
    out[i] = rounded<T>(room[i] * widen(cos[i]) - room[i + half] * widen(sin[i]));
    out[i + half] = rounded<T>(room[i + half] * widen(cos[i + half]) + room[i] * widen(sin[i + half]));
  }
}

// to = x · sigmoid(x) · other, n a multiple of 8.
template <typename T>
void silu_times(const T* x, const T* other, int64_t n, T* to) {
  const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
  for (int64_t i = 0; i < n; i += 8) {
    const __m256 v = load8(x + i), e = exp8(_mm256_or_ps(v, sign));  // e^-|x|
    const __m256 share = _mm256_div_ps(_mm256_blendv_ps(one, e, v), _mm256_add_ps(one, e));
    store8(to + i, _mm256_mul_ps(_mm256_mul_ps(v, share), load8(other + i)));
  }
}

// out += x for channels [first, last) of all rows, rounded.
template <typename T>
void add(const T* x, int64_t rows, int64_t stride, int64_t first, int64_t last, T* out) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = first; n < last; ++n) store(out + r * stride + n, widen(out[r * stride + n]) + widen(x[r * stride + n]));
}

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
    in.read(rows.data(), B, layer.o);
    few_rows(layer.o, in, mine.first, mine.last, state.data(), hidden);
    add(x, B, hidden, mine.first, mine.last, state.data());
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
    add(state.data(), B, hidden, mine.first, mine.last, out);
  }
}

}  // namespace pdq
