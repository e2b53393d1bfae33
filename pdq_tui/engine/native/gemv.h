// Few rows of activations against all weights: every weight is read once, widened in registers, and used for each row.
// One channel at a time: reading several at once was slower, the memory's prefetcher follows one stream best.
#pragma once

#include "weights.h"

namespace pdq {

// Rows of activations that share one reading of the weights.
constexpr int64_t GEMV_ROWS = 4;

// out[r, n]. x: R rows of K floats, widened beforehand.
template <int R, typename W, typename O>
inline void channel_dense(const float* x, const W* w, int64_t K, int64_t n, O* out, int64_t stride) {
  __m256 acc[R][4];
  for (auto& row : acc)
    for (auto& lanes : row) lanes = _mm256_setzero_ps();
  const W* from = w + n * K;
  int64_t i = 0;
  for (; i + 32 <= K; i += 32)
    for (int u = 0; u < 4; ++u) {
      const __m256 v = load8(from + i + 8 * u);
      for (int r = 0; r < R; ++r) acc[r][u] = _mm256_fmadd_ps(v, _mm256_loadu_ps(x + r * K + i + 8 * u), acc[r][u]);
    }
  for (int r = 0; r < R; ++r) {
    float total = sum8(_mm256_add_ps(_mm256_add_ps(acc[r][0], acc[r][1]), _mm256_add_ps(acc[r][2], acc[r][3])));
    for (int64_t j = i; j < K; ++j) total += widen(from[j]) * x[r * K + j];
    store(out + r * stride + n, total);
  }
}

// Vectors of weights with those of a row's whole numbers: half a block, and a whole one.
inline __m256i madd2(const __m256i w[2], const int16_t* q) {
  return _mm256_add_epi32(_mm256_madd_epi16(w[0], load16i(q)), _mm256_madd_epi16(w[1], load16i(q + 16)));
}
inline __m256i madd4(const __m256i w[4], const int16_t* q) {
  return _mm256_add_epi32(madd2(w, q), madd2(w + 2, q + HALF));
}

// A8: whole numbers all the way, exact up to k = 2^31 / 127^2.
template <int R, bool TOKENS, typename S, typename O>
inline void channel_int8(const Activations& x, int64_t from, const int8_t* w, const S* scales, int64_t n, O* out,
                         int64_t stride) {
  const int64_t k = x.k, whole = k / BLOCK;
  const int16_t* q = x.q.data() + from * k;
  const float* by = x.scale.data() + from * x.blocks;
  __m256 acc[R];
  __m256i exact[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm256_setzero_ps(), exact[r] = _mm256_setzero_si256();
  for (int64_t b = 0; b < whole; ++b) {
    __m256i v[4];
    unpack_int8(w + n * k + b * BLOCK, v);
    for (int r = 0; r < R; ++r) {
      const __m256i part = madd4(v, q + r * k + b * BLOCK);
      if constexpr (TOKENS)
        exact[r] = _mm256_add_epi32(exact[r], part);
      else
        acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(part), _mm256_broadcast_ss(by + r * x.blocks + b), acc[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    const float total = TOKENS ? static_cast<float>(sum8(exact[r])) * by[r] : sum8(acc[r]);
    store(out + r * stride + n, total * widen(scales[n]));
  }
}

// Sums of the activations by group of weights, each row's rounded up to sixteen groups with zeros. A unit is the longest run
// of columns under one scale of either side; factors: the activations' scale of each, rows × span, zeros beyond the units.
struct Groups {
  int64_t group, groups, padded, unit, units, span;
  std::vector<float> sums, factors;

  int64_t room(int64_t rows) const { return (rows + 1) * span + padded; }

  Groups(const Activations& x, int64_t group) : group(group), groups(x.k / group), padded((groups + 15) / 16 * 16) {
    unit = group == HALF ? HALF : BLOCK, units = x.k / unit, span = (units + 15) / 16 * 16;
    sums.assign(x.rows * padded, 0.0f);
    const int64_t halves = x.k / HALF;
    factors.assign(x.rows * span, 0.0f);
    for (int64_t r = 0; r < x.rows; ++r) {
      for (int64_t h = 0; h < halves; ++h) sums[r * padded + h * HALF / group] += x.sum[r * halves + h];
      for (int64_t u = 0; u < units; ++u)
        factors[r * span + u] = x.scale[r * x.blocks + (x.blocks == 1 ? 0 : u * unit / BLOCK)];
    }
  }
};

// What a channel's scales mean for R rows. room: first R × span factors of the sums, one for each unit of columns, then
// what they are made of. start: what each row's result begins with.
// Σ x·((q − 8)·s + z) = Σ_groups s·Σ x·q + (z − 8 s)·Σ x.
template <int R, typename S>
inline void scales_int4(const Activations& x, int64_t from, const Groups& g, const S* scales, int64_t n, float* room,
                        float start[R]) {
  const __m256 eight = _mm256_set1_ps(8.0f);
  const int64_t per_group = g.group / g.unit;
  float* by_group = room + R * g.span;
  // One unit a group: no pass of its own for the factors.
  const bool at_once = per_group == 1;
  __m256 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm256_setzero_ps();
  for (int64_t i = 0; i < g.groups; i += 8) {
    __m256 s, z;
    load_pairs(scales + (n * g.groups + i) * 2, std::min<int64_t>(8, g.groups - i), &s, &z);
    _mm256_storeu_ps(by_group + i, s);
    const __m256 offset = _mm256_fnmadd_ps(eight, s, z);
    for (int r = 0; r < R; ++r) {
      acc[r] = _mm256_fmadd_ps(offset, _mm256_loadu_ps(g.sums.data() + (from + r) * g.padded + i), acc[r]);
      if (at_once) _mm256_storeu_ps(room + r * g.span + i, _mm256_mul_ps(s, _mm256_loadu_ps(g.factors.data() + (from + r) * g.span + i)));
    }
  }
  float* by_unit = by_group + g.padded;
  if (!at_once)
    for (int64_t i = 0; i < g.groups; ++i)
      for (int64_t u = 0; u < per_group; ++u) by_unit[i * per_group + u] = by_group[i];
  for (int r = 0; r < R; ++r) {
    start[r] = sum8(acc[r]);
    if (at_once) continue;
    const float* __restrict__ by = g.factors.data() + (from + r) * g.span;
    float* __restrict__ to = room + r * g.span;
    for (int64_t u = 0; u < g.units; ++u) to[u] = by_unit[u] * by[u];
  }
}

// group: a multiple of HALF that divides k. room: `Groups::room(R)` floats.
template <int R, bool HALVES, typename S, typename O>
inline void channel_int4(const Activations& x, int64_t from, const Groups& g, const uint8_t* w, const S* scales,
                         int64_t n, float* room, O* out, int64_t stride) {
  const int64_t k = x.k, whole = k / BLOCK;
  const int16_t* q = x.q.data() + from * k;
  float start[R];
  scales_int4<R>(x, from, g, scales, n, room, start);
  __m256 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm256_setzero_ps();
  for (int64_t b = 0; b < whole; ++b) {
    __m256i v[4];
    unpack_int4(w + n * (k / 2) + b * (BLOCK / 2), v);
    for (int r = 0; r < R; ++r) {
      const int16_t* block = q + r * k + b * BLOCK;
      const float* by = room + r * g.span;
      if constexpr (HALVES) {
        acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(madd2(v, block)), _mm256_broadcast_ss(by + 2 * b), acc[r]);
        acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(madd2(v + 2, block + HALF)), _mm256_broadcast_ss(by + 2 * b + 1), acc[r]);
      } else {
        acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(madd4(v, block)), _mm256_broadcast_ss(by + b), acc[r]);
      }
    }
  }
  for (int r = 0; r < R; ++r) store(out + r * stride + n, sum8(acc[r]) + start[r]);
}

}  // namespace pdq
