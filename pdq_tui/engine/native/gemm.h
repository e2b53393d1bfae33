// Many rows of activations: weights are widened once to panels of sixteen channels, which all rows then use.
//
// A panel holds, for every pair of columns, the two whole numbers of each channel side by side: one multiply-add takes
// eight channels, one 32-bit broadcast the pair of a row. Twelve accumulators, 6 rows × 16 channels, stay in registers.
#pragma once

#include "weights.h"

namespace pdq {

constexpr int64_t PANEL = 16;
constexpr int TILE = 6;

// rows[16]: 64 columns each as four vectors of 16-bit lanes → 32 pairs × 16 channels.
inline void transpose_block(const __m256i rows[PANEL][4], int16_t* panel) {
  for (int v = 0; v < 4; ++v) {        // 16 columns: 8 pairs
    for (int half = 0; half < 2; ++half) {  // 8 channels
      __m256i t[8], u[8];
      const auto& in = rows + half * 8;
      for (int i = 0; i < 4; ++i) {
        t[2 * i] = _mm256_unpacklo_epi32(in[2 * i][v], in[2 * i + 1][v]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(in[2 * i][v], in[2 * i + 1][v]);
      }
      for (int i = 0; i < 2; ++i) {
        u[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
      }
      for (int i = 0; i < 4; ++i) {
        int16_t* low = panel + ((v * 8 + i) * PANEL + half * 8) * 2;
        int16_t* high = panel + ((v * 8 + 4 + i) * PANEL + half * 8) * 2;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm256_permute2x128_si256(u[i], u[4 + i], 0x20));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm256_permute2x128_si256(u[i], u[4 + i], 0x31));
      }
    }
  }
}

inline void expand_int8(const int8_t* w, int64_t k, int64_t n, int64_t N, int16_t* panel) {
  for (int64_t b = 0; b < k / BLOCK; ++b) {
    __m256i rows[PANEL][4];
    for (int64_t i = 0; i < PANEL; ++i) unpack_int8(w + std::min(n + i, N - 1) * k + b * BLOCK, rows[i]);
    transpose_block(rows, panel + b * BLOCK * PANEL);
  }
}

inline void expand_int4(const uint8_t* w, int64_t k, int64_t n, int64_t N, int16_t* panel) {
  const __m256i eight = _mm256_set1_epi16(8);
  for (int64_t b = 0; b < k / BLOCK; ++b) {
    __m256i rows[PANEL][4];
    for (int64_t i = 0; i < PANEL; ++i) {
      unpack_int4(w + std::min(n + i, N - 1) * (k / 2) + b * (BLOCK / 2), rows[i]);
      for (auto& v : rows[i]) v = _mm256_sub_epi16(v, eight);
    }
    transpose_block(rows, panel + b * BLOCK * PANEL);
  }
}

// Products of R rows (k apart) and a panel over `pairs` pairs of columns. The sums are copied out at the end: through a
// reference the compiler would keep them in memory.
template <int R>
inline void multiply(const int16_t* a, int64_t k, const int16_t* panel, int64_t pairs, __m256i out[R][2]) {
  __m256i acc[R][2];
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
  for (int64_t p = 0; p < pairs; ++p) {
    const __m256i low = load16i(panel + p * PANEL * 2), high = load16i(panel + p * PANEL * 2 + 16);
    for (int r = 0; r < R; ++r) {
      int32_t both;
      std::memcpy(&both, a + r * k + 2 * p, sizeof both);
      const __m256i pair = _mm256_set1_epi32(both);
      acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(pair, low));
      acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(pair, high));
    }
  }
  for (int r = 0; r < R; ++r) out[r][0] = acc[r][0], out[r][1] = acc[r][1];
}

// The sixteen channels of a panel: their scales (and zeros) by group, groups × 16 floats. Without groups the scale of a
// channel is applied at the end.
struct PanelScales {
  int64_t group;  // 0: one scale a channel
  const float *scale, *zero;
};

// R rows from `from` on × one panel → result[R][16].
template <int R>
void tile(const Activations& x, int64_t from, const int16_t* panel, const PanelScales& s, float result[TILE][PANEL]) {
  const int16_t* a = x.q.data() + from * x.k;
  const bool tokens = x.blocks == 1;
  __m256 total[R][2];
  for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm256_setzero_ps();
  // The longest run of columns under one scale of either side.
  const int64_t unit = s.group == 0 ? (tokens ? x.k : BLOCK) : std::min(s.group, tokens ? s.group : BLOCK);
  for (int64_t begin = 0; begin < x.k; begin += unit) {
    __m256i acc[R][2];
    multiply<R>(a + begin, x.k, panel + begin * PANEL, unit / 2, acc);
    const float *scale = s.scale, *zero = s.zero;
    if (s.group) scale += begin / s.group * PANEL, zero += begin / s.group * PANEL;
    for (int r = 0; r < R; ++r) {
      const __m256 by = _mm256_broadcast_ss(x.scale.data() + (from + r) * x.blocks + (tokens ? 0 : begin / BLOCK));
      for (int h = 0; h < 2; ++h) {
        __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][h]), by);
        if (s.group) {
          float sum = 0.0f;
          for (int64_t c = begin; c < begin + unit; c += HALF) sum += x.sum[(from + r) * (x.k / HALF) + c / HALF];
          total[r][h] = _mm256_fmadd_ps(_mm256_loadu_ps(zero + 8 * h), _mm256_set1_ps(sum), total[r][h]);
          total[r][h] = _mm256_fmadd_ps(part, _mm256_loadu_ps(scale + 8 * h), total[r][h]);
        } else {
          total[r][h] = _mm256_fmadd_ps(part, _mm256_loadu_ps(scale + 8 * h), total[r][h]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < 2; ++h) _mm256_storeu_ps(result[r] + 8 * h, total[r][h]);
}

// All rows × one panel, written to out[:, n : n + 16].
template <typename O>
void multiply_panel(const Activations& x, const int16_t* panel, const PanelScales& s, int64_t n, int64_t N, O* out) {
  const int64_t width = std::min(PANEL, N - n);
  float result[TILE][PANEL];
  for (int64_t from = 0; from < x.rows; from += TILE) {
    const int64_t count = std::min<int64_t>(TILE, x.rows - from);
    switch (count) {
      case 6: tile<6>(x, from, panel, s, result); break;
      case 5: tile<5>(x, from, panel, s, result); break;
      case 4: tile<4>(x, from, panel, s, result); break;
      case 3: tile<3>(x, from, panel, s, result); break;
      case 2: tile<2>(x, from, panel, s, result); break;
      default: tile<1>(x, from, panel, s, result);
    }
    for (int64_t r = 0; r < count; ++r)
      for (int64_t c = 0; c < width; ++c) store(out + (from + r) * N + n + c, result[r][c]);
  }
}

}  // namespace pdq
