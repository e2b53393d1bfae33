// What stands around the matrices of a decoder layer of Llama's kind, a row at a time: RMS norms, rotary positions, the gate.
//
// Inside of each everything is float32; results are rounded to T once, where they are stored as such.
#pragma once

#include <type_traits>

#include "attention.h"
#include "wide.h"
#include "widen.h"

namespace pdq {

// x as T holds it.
template <typename T>
float rounded(float x) {
  T narrow;
  store(&narrow, x);
  return widen(narrow);
}
template <typename T>
__m256 rounded8(__m256 x) {
  alignas(32) T narrow[8];
  store8(narrow, x);
  return load8(narrow);
}

// x / rms(x) · weight (Zhang and Sennrich, arXiv 1910.07467).
template <typename T, typename O>
void rms_norm(const T* x, const T* weight, int64_t n, float eps, O* out) {
#ifdef PDQ_WIDE
  __m512 acc[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t i = 0; i < n; i += 32)
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t at = i + 16 * half;
      const __m512 v = wide::load16(x + at, wide::lanes_of(n - at));
      acc[half] = _mm512_fmadd_ps(v, v, acc[half]);
    }
  const float squares = _mm512_reduce_add_ps(_mm512_add_ps(acc[0], acc[1]));
  const __m512 all = _mm512_set1_ps(1.0f / std::sqrt(squares / static_cast<float>(n) + eps));
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 which = wide::lanes_of(n - i);
    wide::store16(out + i, _mm512_mul_ps(_mm512_mul_ps(wide::load16(x + i, which), all), wide::load16(weight + i, which)), which);
  }
#else
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
#endif
}

// out += x, rounded.
template <typename T>
void add_row(const T* x, int64_t n, T* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store8(out + i, _mm256_add_ps(load8(out + i), load8(x + i)));
  for (; i < n; ++i) store(out + i, widen(out[i]) + widen(x[i]));
}

// A head's row of D, a multiple of 2: normed where there is a norm, turned by its position (Su and others, arXiv 2104.09864),
// halves paired, and rounded to T. room: D floats. out may be x.
template <typename T, typename O>
void turned(const T* x, const T* norm, float eps, const T* cos, const T* sin, int64_t D, float* room, O* out) {
  if (norm == nullptr) {
    for (int64_t i = 0; i < D; ++i) room[i] = widen(x[i]);
  } else {
    rms_norm(x, norm, D, eps, room);
    for (int64_t i = 0; i < D; ++i) room[i] = rounded<T>(room[i]);
  }
  const int64_t half = D / 2;
  const auto put = [](O* to, __m256 v) {
    if constexpr (std::is_same_v<O, T>) store8(to, v);
    else store8(to, rounded8<T>(v));
  };
  int64_t i = 0;
  for (; i + 8 <= half; i += 8) {
    const __m256 low = load8(room + i), high = load8(room + i + half);
    put(out + i, _mm256_fnmadd_ps(high, load8(sin + i), _mm256_mul_ps(low, load8(cos + i))));
    put(out + i + half, _mm256_fmadd_ps(low, load8(sin + i + half), _mm256_mul_ps(high, load8(cos + i + half))));
  }
  for (; i < half; ++i) {
    store(out + i, rounded<T>(room[i] * widen(cos[i]) - room[i + half] * widen(sin[i])));
    store(out + i + half, rounded<T>(room[i + half] * widen(cos[i + half]) + room[i] * widen(sin[i + half])));
  }
}

// to = x · sigmoid(x) · other, n a multiple of 8.
template <typename T>
void silu_times(const T* x, const T* other, int64_t n, T* to) {
#ifdef PDQ_WIDE
  const __m512 one = _mm512_set1_ps(1.0f);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 which = wide::lanes_of(n - i);
    const __m512 v = wide::load16(x + i, which), e = wide::exp16(_mm512_or_ps(v, _mm512_set1_ps(-0.0f)));  // e^-|x|
    const __m512 above = _mm512_mask_mov_ps(one, _mm512_movepi32_mask(_mm512_castps_si512(v)), e);
    const __m512 share = _mm512_div_ps(above, _mm512_add_ps(one, e));
    wide::store16(to + i, _mm512_mul_ps(_mm512_mul_ps(v, share), wide::load16(other + i, which)), which);
  }
#else
  const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
  for (int64_t i = 0; i < n; i += 8) {
    const __m256 v = load8(x + i), e = exp8(_mm256_or_ps(v, sign));  // e^-|x|
    const __m256 share = _mm256_div_ps(_mm256_blendv_ps(one, e, v), _mm256_add_ps(one, e));
    store8(to + i, _mm256_mul_ps(_mm256_mul_ps(v, share), load8(other + i)));
  }
#endif
}

}  // namespace pdq
