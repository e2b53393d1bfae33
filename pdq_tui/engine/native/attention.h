// One query row a head over keys and values as they are stored. A row of them is widened in registers and used for all
// query heads of its KV head, so that the cache is read once, in its stored form; everything is summed in float32.
//
// A layer's rows lie as [2, B, kv_heads, slots, width]: keys, then values. Softmax is taken on the way (Milakov and
// Gimelshein, arXiv 1805.02867): scores of one block of positions, then their values, older sums scaled to the new maximum.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace pdq {

// Positions whose scores are held at once, and query heads that share one reading of a row.
constexpr int64_t POSITIONS = 64;
constexpr int64_t HEADS = 4;

// e^x for x <= 0, to 2 units in the last place; 0 below -87, and for -inf. NaN stays NaN.
inline __m256 exp8(__m256 x) {
  const __m256 none = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ);
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
  p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(none, _mm256_mul_ps(p, _mm256_castsi256_ps(bits)));
}

// -- rows in each format ----------------------------------------------------------------------------------------------
// at(i): eight numbers from i on. factor(): what a product with them has to be multiplied by.

template <typename T>
struct PlainRow {
  const T* row;
  PlainRow(const void* data, const bf16*, const bf16*, int64_t index, int64_t D, int64_t) : row(static_cast<const T*>(data) + index * D) {}
  __m256 at(int64_t i) const { return load8(row + i); }
  float factor() const { return 1.0f; }
};

struct Int8Row {
  const int8_t* row;
  float scale;
  Int8Row(const void* data, const bf16* scales, const bf16*, int64_t index, int64_t D, int64_t)
      : row(static_cast<const int8_t*>(data) + index * D), scale(widen(scales[index])) {}
  __m256 at(int64_t i) const {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + i))));
  }
  float factor() const { return scale; }
};

// E4M3's bits in the places of a half's, whose exponent is biased by 8 more: the half is 2^-8 of the number. The NaN of
// E4M3 is not read as one: the scale of a row with anything that is not finite is not finite either.
struct Fp8Row {
  const uint8_t* row;
  float scale;
  Fp8Row(const void* data, const bf16* scales, const bf16*, int64_t index, int64_t D, int64_t)
      : row(static_cast<const uint8_t*>(data) + index * D), scale(widen(scales[index])) {}
  __m256 at(int64_t i) const {
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + i)));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
    return _mm256_cvtph_ps(_mm_or_si128(sign, _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7)));
  }
  // NaN for an infinite scale too: a score of -inf would be a masked position.
  float factor() const { return scale * 256.0f + (scale - scale); }
};

// Byte j holds number j in its low half and number j + D / 2 in its high half. The group is a multiple of 8.
struct Int4Row {
  const uint8_t* row;
  const bf16 *scales, *lows;
  int64_t half, group;
  Int4Row(const void* data, const bf16* scale, const bf16* low, int64_t index, int64_t D, int64_t group)
      : row(static_cast<const uint8_t*>(data) + index * (D / 2)),
        scales(scale + index * (D / group)),
        lows(low + index * (D / group)),
        half(D / 2),
        group(group) {}
  __m256 at(int64_t i) const {
    const bool high = i >= half;
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + (high ? i - half : i)));
    const __m256i wide = _mm256_cvtepu8_epi32(bytes);
    const __m256i codes = high ? _mm256_srli_epi32(wide, 4) : _mm256_and_si256(wide, _mm256_set1_epi32(15));
    const int64_t g = i / group;
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes), _mm256_set1_ps(widen(scales[g])), _mm256_set1_ps(widen(lows[g])));
  }
  float factor() const { return 1.0f; }
};

// -- one piece of the positions for some heads -------------------------------------------------------------------------

// A layer's cache: of keys (0) and values (1) the data, scales and minima; strides count rows.
struct Stored {
  const void* data[2];
  const bf16 *scale[2], *low[2];
  int64_t D, group;
};

// Sums of one piece for one KV head: largest score, sum of e^(score - largest), values weighted by that. R heads.
template <typename Row, int R>
void piece(const Stored& from, int64_t base, int64_t first, int64_t last, const float* query, const float* mask, float scaling,
           float softcap, float* largest, float* sum, float* out) {
  const int64_t D = from.D;
  alignas(32) float scores[R][POSITIONS];
  for (int64_t start = first; start < last; start += POSITIONS) {
    const int64_t n = std::min(POSITIONS, last - start);
    for (int64_t t = 0; t < n; ++t) {
      const Row row(from.data[0], from.scale[0], from.low[0], base + start + t, D, from.group);
      __m256 acc[R];
      for (int r = 0; r < R; ++r) acc[r] = _mm256_setzero_ps();
      for (int64_t i = 0; i < D; i += 8) {
        const __m256 v = row.at(i);
        for (int r = 0; r < R; ++r) acc[r] = _mm256_fmadd_ps(v, _mm256_loadu_ps(query + r * D + i), acc[r]);
      }
      const float by = row.factor() * scaling;
      for (int r = 0; r < R; ++r) scores[r][t] = sum8(acc[r]) * by;
    }
    for (int r = 0; r < R; ++r) {
      float* s = scores[r];
      if (softcap > 0)
        for (int64_t t = 0; t < n; ++t) s[t] = softcap * std::tanh(s[t] / softcap);
      if (mask != nullptr)
        for (int64_t t = 0; t < n; ++t) s[t] += mask[start + t];
      for (int64_t t = n; t < POSITIONS; ++t) s[t] = -std::numeric_limits<float>::infinity();
      float most = largest[r];
      for (int64_t t = 0; t < n; ++t) most = s[t] > most ? s[t] : most;
      // Nothing but masked positions so far: the exponentials are of 0 - inf, whatever is subtracted.
      const float from_here = most == -std::numeric_limits<float>::infinity() ? 0.0f : most;
      const float keep = largest[r] == -std::numeric_limits<float>::infinity() ? 0.0f : std::exp(largest[r] - from_here);
      __m256 total = _mm256_setzero_ps();
      for (int64_t t = 0; t < POSITIONS; t += 8) {
        const __m256 e = exp8(_mm256_sub_ps(_mm256_load_ps(s + t), _mm256_set1_ps(from_here)));
        _mm256_store_ps(s + t, e);
        total = _mm256_add_ps(total, e);
      }
      sum[r] = sum[r] * keep + sum8(total);
      largest[r] = most;
      if (keep != 1.0f)
        for (int64_t i = 0; i < D; i += 8) _mm256_storeu_ps(out + r * D + i, _mm256_mul_ps(_mm256_loadu_ps(out + r * D + i), _mm256_set1_ps(keep)));
    }
    // Four rows at a time, so that the sums are read and written a quarter as often.
    for (int64_t t = 0; t < n; t += 4) {
      const int64_t rows = std::min<int64_t>(4, n - t);
      const auto row = [&](int64_t k) {
        return Row(from.data[1], from.scale[1], from.low[1], base + start + t + std::min(k, rows - 1), D, from.group);
      };
      const Row row0 = row(0), row1 = row(1), row2 = row(2), row3 = row(3);
      __m256 by[R][4];
      for (int r = 0; r < R; ++r) {
        by[r][0] = _mm256_set1_ps(scores[r][t] * row0.factor());
        by[r][1] = _mm256_set1_ps(rows > 1 ? scores[r][t + 1] * row1.factor() : 0.0f);
        by[r][2] = _mm256_set1_ps(rows > 2 ? scores[r][t + 2] * row2.factor() : 0.0f);
        by[r][3] = _mm256_set1_ps(rows > 3 ? scores[r][t + 3] * row3.factor() : 0.0f);
      }
      for (int64_t i = 0; i < D; i += 8) {
        const __m256 v0 = row0.at(i), v1 = row1.at(i), v2 = row2.at(i), v3 = row3.at(i);
        for (int r = 0; r < R; ++r) {
          float* to = out + r * D + i;
          __m256 a = _mm256_fmadd_ps(v0, by[r][0], _mm256_loadu_ps(to));
          a = _mm256_fmadd_ps(v1, by[r][1], a);
          a = _mm256_fmadd_ps(v2, by[r][2], a);
          _mm256_storeu_ps(to, _mm256_fmadd_ps(v3, by[r][3], a));
        }
      }
    }
  }
}

}  // namespace pdq
