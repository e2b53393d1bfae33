// Causal attention over a whole prompt, where AVX512-BF16 multiplies: softmax on the way (Milakov and Gimelshein, arXiv
// 1805.02867), a tile of queries against blocks of keys, as in FlashAttention (Dao and others, arXiv 2205.14135).
//
// Keys are put into panels of 32 positions with the pairs of a head's dimension as steps, values into panels of 32
// dimensions with pairs of positions as steps, once for all queries and heads that read them (see wide.h). Scores and sums
// are float32; shares are rounded to bf16 before they multiply the values, as torch's own kernel does it.
#pragma once

#include "wide.h"

#if defined(PDQ_WIDE) && defined(__AVX512BF16__)
#define PDQ_PREFILL 1
namespace pdq::wide {

// Positions whose scores a tile holds at once.
constexpr int64_t KEYS = 128;

// A tensor [B, heads, P, D] of bf16, D contiguous.
struct Heads {
  const bf16* data;
  int64_t batch, head, position;  // strides

  const bf16* at(int64_t b, int64_t h, int64_t p) const { return data + b * batch + h * head + p * position; }
};

// 2^x for x ≤ about 0, within 4 units in the last place; 0 far below. NaN stays NaN.
inline __m512 two_to(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);  // the second where one is NaN; −∞ − −∞ would be one
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.32669706e-03f);  // least squares of the relative error over −½ … ½, at most 1.5e-7
  for (const float c : {9.67545994e-03f, 5.55074252e-02f, 2.40221217e-01f, 6.93146944e-01f, 1.00000012e+00f}) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

// R rows of pairs × a panel → R × 32 sums. Pair s of row r is a[s * STEP + r * ROW]: constants, so that an address is one register.
template <int R, int64_t STEP, int64_t ROW>
inline void multiply_pairs(const int32_t* a, const int32_t* panel, int64_t width, int64_t steps, __m512 out[R][2]) {
  __m512 acc[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  for (int64_t s = 0; s < steps; ++s) {
    const __m512bh low = (__m512bh)load64(panel + s * width), high = (__m512bh)load64(panel + s * width + 16);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m512bh lane = (__m512bh)_mm512_set1_epi32(a[s * STEP + r * ROW]);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], low, lane);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], high, lane);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) out[r][0] = acc[r][0], out[r][1] = acc[r][1];
}

// Keys and values of all KV heads in panels; positions beyond T are zeros.
struct Cache {
  int64_t D, padded;  // padded: positions, a multiple of KEYS
  std::vector<int32_t> keys, values;

  Cache(const Heads& k, const Heads& v, int64_t B, int64_t heads, int64_t T, int64_t D)
      : D(D), padded((T + KEYS - 1) / KEYS * KEYS), keys(B * heads * padded * D / 2), values(keys.size()) {
    const int64_t panels = padded / PANEL;
#pragma omp parallel for schedule(static)
    for (int64_t item = 0; item < B * heads * panels; ++item) {
      const int64_t b = item / panels / heads, h = item / panels % heads, first = item % panels * PANEL;
      int32_t* key = keys.data() + item * PANEL * D / 2;
      for (int64_t half = 0; half < PANEL; half += 16)
        for (int64_t d = 0; d < D; d += 32) {
          __m512i rows[16];
          for (int64_t i = 0; i < 16; ++i) {
            const int64_t p = first + half + i;
            rows[i] = p < T ? load64(k.at(b, h, p) + d) : _mm512_setzero_si512();
          }
          transpose16(rows, key + d / 2 * PANEL + half);
        }
      int32_t* value = values.data() + item * PANEL * D / 2;  // [pairs of positions][D]
      for (int64_t pair = 0; pair < PANEL / 2; ++pair)
        for (int64_t d = 0; d < D; d += 16) {
          __m512i two[2];
          for (int64_t i = 0; i < 2; ++i) {
            const int64_t p = first + 2 * pair + i;
            two[i] = p < T ? _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(v.at(b, h, p) + d)))
                           : _mm512_setzero_si512();
          }
          _mm512_storeu_si512(value + pair * D + d, _mm512_or_si512(two[0], _mm512_slli_epi32(two[1], 16)));
        }
    }
  }
  const int32_t* key_panel(int64_t head, int64_t position) const { return keys.data() + (head * padded + position) * D / 2; }
  const int32_t* value_pairs(int64_t head, int64_t position) const { return values.data() + (head * padded + position) * D / 2; }
};

// What a thread needs for a tile of queries.
struct Tile {
  std::vector<int32_t> rows, query;             // TILE rows of D / 2 pairs, and the same as a tile (wide.h)
  std::vector<float> out;                       // TILE × D, not yet divided
  alignas(64) float scores[TILE][KEYS];
  alignas(64) int32_t shares[TILE][KEYS / 2];   // pairs of bf16
  float largest[TILE], sum[TILE];

  explicit Tile(int64_t D) : rows(TILE * D / 2), query(TILE * D / 2), out(TILE * D) {}
};

// Queries first … first + 11 (the last one again beyond P) of one head over the keys that they see. offset: keys before query 0.
// window: positions that a query sees, itself among them.
inline void attend_tile(const Heads& q, int64_t b, int64_t h, int64_t first, int64_t P, int64_t offset, const Cache& cache, int64_t kv_head, float scaling,
                        int64_t window, Tile& t) {
  const int64_t D = cache.D, pairs = D / 2;
  for (int r = 0; r < TILE; ++r) std::memcpy(t.rows.data() + r * pairs, q.at(b, h, std::min(first + r, P - 1)), D * sizeof(bf16));
  interleave(t.rows.data(), TILE, pairs, pairs, t.query.data());
  std::fill(t.out.begin(), t.out.end(), 0.0f);
  std::fill(t.largest, t.largest + TILE, -std::numeric_limits<float>::infinity());
  std::fill(t.sum, t.sum + TILE, 0.0f);
  const int64_t last = offset + std::min(first + TILE, P), begin = std::max<int64_t>(0, offset + first - window + 1) / KEYS * KEYS;
  const float by = scaling * 1.44269504f;  // e^x = 2^(x / ln 2)
  const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t at = begin; at < last; at += KEYS) {
    const int64_t n = (std::min(KEYS, last - at) + PANEL - 1) / PANEL * PANEL;
    for (int64_t p = 0; p < n; p += PANEL) {
      __m512 value[TILE][2];
      multiply_pairs<TILE, TILE, 1>(t.query.data(), cache.key_panel(kv_head, at + p), PANEL, pairs, value);
      for (int r = 0; r < TILE; ++r)
        for (int half = 0; half < 2; ++half) _mm512_store_ps(&t.scores[r][p + 16 * half], value[r][half]);
    }
    for (int r = 0; r < TILE; ++r) {
      // Seen: positions in (query − window, query].
      const int64_t query = offset + std::min(first + r, P - 1);
      const bool whole = at + n - 1 <= query && at > query - window;
      __m512 top = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
      if (whole) {
        for (int64_t i = 0; i < n; i += 16) top = _mm512_max_ps(top, _mm512_load_ps(&t.scores[r][i]));
      } else {
        const __m512i high = _mm512_set1_epi32(static_cast<int>(query - at)), low = _mm512_set1_epi32(static_cast<int>(std::max<int64_t>(-1, query - window - at)));
        for (int64_t i = 0; i < n; i += 16) {
          const __m512i p = _mm512_add_epi32(count, _mm512_set1_epi32(static_cast<int>(i)));
          const __mmask16 hidden = _mm512_cmpgt_epi32_mask(p, high) | _mm512_cmple_epi32_mask(p, low);
          const __m512 s = _mm512_mask_mov_ps(_mm512_load_ps(&t.scores[r][i]), hidden, _mm512_set1_ps(-std::numeric_limits<float>::infinity()));
          _mm512_store_ps(&t.scores[r][i], s);
          top = _mm512_max_ps(top, s);
        }
      }
      const float most = std::fmax(t.largest[r], _mm512_reduce_max_ps(top));
      const float base = most == -std::numeric_limits<float>::infinity() ? 0.0f : most;  // nothing seen yet
      const float keep = t.largest[r] == most ? 1.0f : std::exp2((t.largest[r] - base) * by);
      const __m512 times = _mm512_set1_ps(by), less = _mm512_set1_ps(base * by);
      __m512 total = _mm512_setzero_ps();
      for (int64_t i = 0; i < n; i += 16) {
        const __m512 e = two_to(_mm512_fmsub_ps(_mm512_load_ps(&t.scores[r][i]), times, less));
        total = _mm512_add_ps(total, e);
        _mm256_store_si256(reinterpret_cast<__m256i*>(&t.shares[r][i / 2]), (__m256i)_mm512_cvtneps_pbh(e));
      }
      t.sum[r] = t.sum[r] * keep + _mm512_reduce_add_ps(total);
      t.largest[r] = most;
      if (keep != 1.0f)
        for (int64_t d = 0; d < D; d += 16) _mm512_storeu_ps(&t.out[r * D + d], _mm512_mul_ps(_mm512_loadu_ps(&t.out[r * D + d]), _mm512_set1_ps(keep)));
    }
    for (int64_t d = 0; d < D; d += PANEL) {
      __m512 value[TILE][2];
      multiply_pairs<TILE, 1, KEYS / 2>(&t.shares[0][0], cache.value_pairs(kv_head, at) + d, D, n / 2, value);
      for (int r = 0; r < TILE; ++r)
        for (int half = 0; half < 2; ++half) {
          float* to = &t.out[r * D + d + 16 * half];
          _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), value[r][half]));
        }
    }
  }
}

// q [B, H, P, D], the last P of T positions; k and v [B, heads, T, D] → out [B, P, H, D].
inline void attend_prompt(const Heads& q, const Heads& k, const Heads& v, int64_t B, int64_t H, int64_t heads, int64_t P, int64_t T, int64_t D, float scaling,
                          int64_t window, bf16* out) {
  const Cache cache(k, v, B, heads, T, D);
  const int64_t tiles = (P + TILE - 1) / TILE;
#pragma omp parallel
  {
    Tile t(D);
    // The last tiles see the most keys and come first, so that no thread is left alone with one of them.
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < B * H * tiles; ++item) {
      const int64_t first = (tiles - 1 - item / (B * H)) * TILE, b = item % (B * H) / H, h = item % H;
      attend_tile(q, b, h, first, P, T - P, cache, b * heads + h / (H / heads), scaling, window, t);
      for (int64_t r = 0; r < std::min<int64_t>(TILE, P - first); ++r) {
        const __m512 by = _mm512_set1_ps(t.sum[r]);
        bf16* to = out + ((b * P + first + r) * H + h) * D;
        for (int64_t d = 0; d < D; d += 16) store16(to + d, _mm512_div_ps(_mm512_loadu_ps(&t.out[r * D + d]), by), lanes_of(16));
      }
    }
  }
}

}  // namespace pdq::wide
#endif
