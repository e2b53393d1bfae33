// Activations as whole numbers in 16-bit lanes: what the 16-bit multiply-add of AVX2 multiplies two weights a lane with.
//
// Tokens ("A8"): one scale a row, −127…127, as W8A8 is defined everywhere in this project; padded columns are 0.
// Blocks ("A16"): one scale a block of BLOCK columns, −32767…32767. Against the largest of its block an activation is
// kept to 2^-16, against bf16's 2^-9 of itself.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace pdq {

constexpr int64_t BLOCK = 64;
// Sums are kept for each half of a block: the smallest group of weights.
constexpr int64_t HALF = 32;

// q: rows × k whole numbers. scale: rows × blocks, one block where the scale is the row's. sum: rows × k / HALF sums of
// the activations that the whole numbers stand for.
struct Activations {
  int64_t rows, k, blocks;
  std::vector<int16_t> q;
  std::vector<float> scale, sum;

  // A row that is there: kernels that take several at once read the last one again for those beyond it.
  int64_t row(int64_t r) const { return std::min(r, rows - 1); }
};

// f(row) for every row, by all threads where there are many. Few rows are nobody's but the caller's, who may be one of several
// threads already.
template <typename F>
void each_row(int64_t rows, F f) {
  if (rows <= 16) {
    for (int64_t r = 0; r < rows; ++r) f(r);
    return;
  }
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) f(r);
}

template <typename T>
float largest(const T* x, int64_t n, bool* finite) {
  __m256 top = _mm256_setzero_ps(), bad = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 v = load8(x + i);
    bad = _mm256_or_ps(bad, _mm256_cmp_ps(_mm256_sub_ps(v, v), _mm256_setzero_ps(), _CMP_NEQ_UQ));
    top = _mm256_max_ps(top, abs8(v));
  }
  float most = max8(top);
  bool good = _mm256_movemask_ps(bad) == 0;
  for (; i < n; ++i) {
    const float v = widen(x[i]);
    good = good && std::isfinite(v);
    most = std::fmax(most, std::fabs(v));
  }
  *finite = good;
  return most;
}

// What is not finite has no whole number: the scale becomes NaN, and with it every result of the row. n: at most
// 2^31 / 32767; a multiple of 16 is fast.
template <typename T>
void quantize(const T* x, int64_t n, float limit, int16_t* q, float* scale) {
  bool finite;
  const float most = largest(x, n, &finite);
  if (!finite) {
    std::memset(q, 0, n * sizeof *q);
    *scale = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  *scale = std::fmax(most / limit, 1e-30f);
  // A division, not a product with the reciprocal: whole numbers are those of every other W8A8 kernel.
  const __m256 by = _mm256_set1_ps(*scale);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i low = _mm256_cvtps_epi32(_mm256_div_ps(load8(x + i), by));
    const __m256i high = _mm256_cvtps_epi32(_mm256_div_ps(load8(x + i + 8), by));
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + i), both);
  }
  for (; i < n; ++i) q[i] = static_cast<int16_t>(std::nearbyint(widen(x[i]) / *scale));
}

inline float sum_half(const int16_t* q, float scale) {
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i pairs = _mm256_add_epi32(_mm256_madd_epi16(load16i(q), ones), _mm256_madd_epi16(load16i(q + 16), ones));
  return sum8(_mm256_cvtepi32_ps(pairs)) * scale;
}

// x [rows, K] → whole numbers [rows, k], k ≥ K and a multiple of BLOCK. tokens: one scale a row, else one a block. sums: of
// halves as well, which weights with a zero point need.
template <typename T>
void quantize_rows(const T* x, int64_t rows, int64_t K, int64_t k, bool tokens, bool sums, Activations& out) {
  out.rows = rows, out.k = k, out.blocks = tokens ? 1 : k / BLOCK;
  const int64_t halves = k / HALF, width = tokens ? k : BLOCK;
  out.q.resize(rows * k);
  out.scale.resize(rows * out.blocks);
  out.sum.resize(sums ? rows * halves : 0);
  each_row(rows, [&](int64_t r) {
    int16_t* q = out.q.data() + r * k;
    float* scale = out.scale.data() + r * out.blocks;
    std::memset(q + K, 0, (k - K) * sizeof *q);
    for (int64_t b = 0; b < out.blocks; ++b) {
      const int64_t begin = b * width, n = std::min(width, K - begin);
      if (n > 0) quantize(x + r * K + begin, n, tokens ? 127.0f : 32767.0f, q + begin, scale + b);
      else scale[b] = 1.0f;  // a block of padding
    }
    for (int64_t h = 0; sums && h < halves; ++h) out.sum[r * halves + h] = sum_half(q + h * HALF, scale[h * HALF / width]);
  });
}

}  // namespace pdq
