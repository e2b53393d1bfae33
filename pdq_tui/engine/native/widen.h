// Packed weights back to a dense matrix, for stages in which a dense product is the faster kernel: at the memory's speed,
// and with no memory but the result's.
#pragma once

#include "gemv.h"

namespace pdq {

inline void store8(float* to, __m256 x) { _mm256_storeu_ps(to, x); }
inline void store8(bf16* to, __m256 x) {  // rounds to nearest even; a NaN stays one
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}

// A row of int4 weights, k columns: (q − 8) · scale + zero. pairs: (scale, zero) of each group.
template <typename O>
inline void widen_int4(const uint8_t* w, const bf16* pairs, int64_t k, int64_t group, O* out) {
  for (int64_t b = 0; b < k / BLOCK; ++b) {
    __m256i q[4];
    unpack_int4(w + b * (BLOCK / 2), q);
    for (int v = 0; v < 4; ++v) {
      const int64_t column = b * BLOCK + 16 * v;
      const bf16* pair = pairs + column / group * 2;
      const __m256 scale = _mm256_set1_ps(widen(pair[0])), low = _mm256_set1_ps(widen(pair[1]) - 8.0f * widen(pair[0]));
      const __m256i halves[2] = {_mm256_cvtepi16_epi32(_mm256_castsi256_si128(q[v])), _mm256_cvtepi16_epi32(_mm256_extracti128_si256(q[v], 1))};
      for (int h = 0; h < 2; ++h) store8(out + column + 8 * h, _mm256_fmadd_ps(_mm256_cvtepi32_ps(halves[h]), scale, low));
    }
  }
}

// A row of nested weights: an int8 byte and 256ths of its step.
template <typename O>
inline void widen_nested(const int8_t* w, const int8_t* residual, float scale, int64_t k, O* out) {
  const __m256 step = _mm256_set1_ps(scale / 256.0f);
  int64_t i = 0;
  for (; i + 8 <= k; i += 8) {
    const __m256i high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(w + i)));
    const __m256i low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(residual + i)));
    store8(out + i, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(high, 8), low)), step));
  }
  for (; i < k; ++i) store(out + i, static_cast<float>(w[i] * 256 + residual[i]) * (scale / 256.0f));
}

// Nested weights against R rows of activations in blocks: both bytes are read once.
template <int R, typename O>
inline void channel_nested(const Activations& x, int64_t from, const int8_t* w, const int8_t* residual, const bf16* scales, int64_t n, O* out,
                           int64_t stride) {
  const int64_t k = x.k, whole = k / BLOCK;
  const int16_t* q = x.q.data() + from * k;
  const float* by = x.scale.data() + from * x.blocks;
  __m256 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm256_setzero_ps();
  for (int64_t b = 0; b < whole; ++b) {
    __m256i high[4], low[4];
    unpack_int8(w + n * k + b * BLOCK, high);
    unpack_int8(residual + n * k + b * BLOCK, low);
    for (int r = 0; r < R; ++r) {
      const int16_t* block = q + r * k + b * BLOCK;
      const __m256 both = _mm256_fmadd_ps(_mm256_cvtepi32_ps(madd4(high, block)), _mm256_set1_ps(256.0f), _mm256_cvtepi32_ps(madd4(low, block)));
      acc[r] = _mm256_fmadd_ps(both, _mm256_broadcast_ss(by + r * x.blocks + b), acc[r]);
    }
  }
  for (int r = 0; r < R; ++r) store(out + r * stride + n, sum8(acc[r]) * (widen(scales[n]) / 256.0f));
}

}  // namespace pdq
