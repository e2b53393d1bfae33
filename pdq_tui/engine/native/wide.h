// The same products with 512-bit vectors and the dot products of AVX512-VNNI: four bytes or two 16-bit numbers a lane.
//
// Many rows: what is multiplied stands in lanes of 32 bits, a "step" of 4 columns (bytes) or 2 (words). A panel holds for
// every step the lanes of 32 channels side by side; activations lie in tiles of 12 rows, for every step the lanes of the
// rows side by side, so that a tile is read from its beginning to its end whatever k is. 24 accumulators stay in registers.
//
// Bytes: the instruction multiplies unsigned with signed numbers. Weights become unsigned by adding 128, and 128 times the
// sum of a row's activations is taken off at the end: whole numbers all the way, exact up to k = 2^31 / (255 · 127).
#pragma once

#include <omp.h>

#include <memory>

#include "gemm.h"
#include "gemv.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#define PDQ_WIDE 1
#endif

#ifdef PDQ_WIDE
namespace pdq::wide {

constexpr int64_t PANEL = 32;
constexpr int TILE = 12;
// Panels that a thread holds at once are kept below this many bytes: they and a tile of rows stay in the second cache.
constexpr int64_t HELD = 256 << 10;
// Rows of bytes that share one reading of the weights without a panel; of words, twice as long, fewer fit the first cache.
constexpr int64_t BYTE_ROWS = 8;

inline __m512i load64(const void* from) { return _mm512_loadu_si512(from); }

// Scaled whole numbers of W8A8 as bytes, rows × k, and the sum of each row's.
struct Bytes {
  std::vector<int8_t> q;
  std::vector<int32_t> sum;

  Bytes() = default;
  explicit Bytes(const Activations& x) { read(x); }

  void read(const Activations& x) {
    q.resize(x.rows * x.k), sum.resize(x.rows);
    const __m256i ones = _mm256_set1_epi16(1);
    each_row(x.rows, [&](int64_t r) {
      const int16_t* from = x.q.data() + r * x.k;
      __m256i total = _mm256_setzero_si256();
      for (int64_t i = 0; i < x.k; i += 16) {
        const __m256i words = load16i(from + i);
        total = _mm256_add_epi32(total, _mm256_madd_epi16(words, ones));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(q.data() + r * x.k + i), _mm256_cvtepi16_epi8(words));
      }
      sum[r] = sum8(total);
    });
  }
};

// 16 rows of 16 lanes → 16 columns, the first `LANES` rows of each stored, STRIDE lanes after the one before.
template <int64_t STRIDE = PANEL, int LANES = 16>
inline void transpose16(__m512i r[16], int32_t* to) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  const auto put = [to](int column, __m512i x) { _mm512_mask_storeu_epi32(to + column * STRIDE, static_cast<__mmask16>((1 << LANES) - 1), x); };
  for (int c = 0; c < 4; ++c) {  // 128-bit quarter q of r[4 g + c] is column 4 q + c of rows 4 g … 4 g + 3
    const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88), e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    put(c, _mm512_shuffle_i32x4(a, d, 0x88));
    put(4 + c, _mm512_shuffle_i32x4(b, e, 0x88));
    put(8 + c, _mm512_shuffle_i32x4(a, d, 0xdd));
    put(12 + c, _mm512_shuffle_i32x4(b, e, 0xdd));
  }
}

// Room that is not filled with zeros first: all of it is written.
using Lanes = std::unique_ptr<int32_t[]>;

// Up to TILE rows of `steps` lanes, `stride` lanes apart, → a tile; rows that are not there are zeros. steps: a multiple of 16.
inline void interleave(const int32_t* rows, int64_t count, int64_t stride, int64_t steps, int32_t* tile) {
  for (int64_t s = 0; s < steps; s += 16) {
    __m512i r[16];
    for (int64_t i = 0; i < 16; ++i) r[i] = i < count ? load64(rows + i * stride + s) : _mm512_setzero_si512();
    transpose16<TILE, TILE>(r, tile + s * TILE);
  }
}

inline int64_t tiles_of(int64_t rows) { return (rows + TILE - 1) / TILE; }

// Rows of `steps` lanes each → tiles of TILE rows.
struct Tiles {
  int64_t steps;
  Lanes lanes;

  Tiles(const void* rows, int64_t count, int64_t steps) : steps(steps), lanes(new int32_t[tiles_of(count) * TILE * steps]) {
    const int32_t* from = static_cast<const int32_t*>(rows);
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tiles_of(count); ++t)
      interleave(from + t * TILE * steps, std::min<int64_t>(TILE, count - t * TILE), steps, steps, lanes.get() + t * TILE * steps);
  }
  const int32_t* tile(int64_t first_row) const { return lanes.get() + first_row * steps; }
};

inline __m512 load16(const float* from, __mmask16 which) { return _mm512_maskz_loadu_ps(which, from); }
inline __m512 load16(const bf16* from, __mmask16 which) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(which, from)), 16));
}
inline __mmask16 lanes_of(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); }

// Largest magnitude of a row, which the bits without the sign are in the order of; infinity or more where one is not finite.
inline float largest(const bf16* x, int64_t n) {
  __m512i top = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += 32) {
    const __mmask32 which = n - i >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((1u << (n - i)) - 1);
    top = _mm512_max_epu16(top, _mm512_and_si512(_mm512_maskz_loadu_epi16(which, x + i), _mm512_set1_epi16(0x7fff)));
  }
  const __m512i high = _mm512_srli_epi32(top, 16), low = _mm512_and_si512(top, _mm512_set1_epi32(0xffff));
  return widen(bf16{static_cast<uint16_t>(_mm512_reduce_max_epu32(_mm512_max_epu32(high, low)))});
}
inline float largest(const float* x, int64_t n) {
  __m512i top = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += 16)
    top = _mm512_max_epu32(top, _mm512_and_si512(_mm512_castps_si512(load16(x + i, lanes_of(n - i))), _mm512_set1_epi32(0x7fffffff)));
  const uint32_t bits = _mm512_reduce_max_epu32(top);
  float most;
  std::memcpy(&most, &bits, sizeof most);
  return most;
}

// W8A8's and W4A8's activations for many rows: bytes in tiles, one scale a row as `quantize` makes it, and the sums of a row's
// bytes in `groups` equal parts of a multiple of 32.
struct Tokens {
  int64_t rows, k, groups;
  Lanes lanes;
  std::vector<float> scale;
  std::vector<int32_t> sums;

  template <typename T>
  Tokens(const T* x, int64_t rows, int64_t K, int64_t k, int64_t groups)
      : rows(rows), k(k), groups(groups), lanes(new int32_t[tiles_of(rows) * TILE * (k / 4)]), scale(rows), sums(rows * groups) {
#pragma omp parallel
    {
      const Lanes room(new int32_t[TILE * (k / 4)]);
#pragma omp for schedule(static)
      for (int64_t t = 0; t < tiles_of(rows); ++t) {
        const int64_t count = std::min<int64_t>(TILE, rows - t * TILE);
        for (int64_t r = 0; r < count; ++r) row(x + (t * TILE + r) * K, K, t * TILE + r, reinterpret_cast<int8_t*>(room.get() + r * (k / 4)));
        interleave(room.get(), count, k / 4, k / 4, lanes.get() + t * TILE * (k / 4));
      }
    }
  }
  // A row that is there: tiles have more.
  int64_t row(int64_t r) const { return std::min(r, rows - 1); }
  const int32_t* tile(int64_t first_row) const { return lanes.get() + first_row * (k / 4); }

 private:
  template <typename T>
  void row(const T* x, int64_t K, int64_t which, int8_t* q) {
    const float most = largest(x, K);
    int32_t* sum = sums.data() + which * groups;
    if (!(most < std::numeric_limits<float>::infinity())) {  // as in `quantize`
      std::memset(q, 0, k);
      std::fill(sum, sum + groups, 0);
      scale[which] = std::numeric_limits<float>::quiet_NaN();
      return;
    }
    scale[which] = std::fmax(most / 127.0f, 1e-30f);
    const __m512 by = _mm512_set1_ps(scale[which]);
    for (int64_t i = 0; i < k; i += 16)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(q + i), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_div_ps(load16(x + i, lanes_of(K - i)), by))));
    const __m256i ones = _mm256_set1_epi8(1);
    for (int64_t g = 0, each = k / groups; g < groups; ++g) {
      __m256i total = _mm256_setzero_si256();
      for (int64_t i = g * each; i < (g + 1) * each; i += 32)
        total = _mm256_dpbusd_epi32(total, ones, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + i)));
      sum[g] = sum8(total);
    }
  }
};

// 64 columns of a row of int4 weights (0 … 15) or int8 weights as two vectors of words.
inline void words_int4(const uint8_t* block, __m512i out[2]) {
  const __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block)));
  const __m512i low = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_setzero_si256(), 0);
  const __m512i high = _mm512_inserti64x4(_mm512_set1_epi16(12), _mm256_set1_epi16(8), 0);
  const __m512i nibble = _mm512_set1_epi16(15);
  out[0] = _mm512_and_si512(_mm512_srlv_epi16(both, low), nibble);
  out[1] = _mm512_and_si512(_mm512_srlv_epi16(both, high), nibble);
}
inline void words_int8(const int8_t* block, __m512i out[2]) {
  for (int h = 0; h < 2; ++h)
    out[h] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 32 * h)));
}

// int8 weights plus 128, and int4 weights 0 … 15, as unsigned bytes of 64 columns.
inline __m512i bytes_int8(const int8_t* block) {
  return _mm512_xor_si512(load64(block), _mm512_set1_epi8(static_cast<char>(0x80)));
}
inline __m512i bytes_int4(const uint8_t* block) {
  __m512i two[2];
  words_int4(block, two);
  const __m256i low = _mm512_cvtepi16_epi8(two[0]), high = _mm512_cvtepi16_epi8(two[1]);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// Channels n … n + 31 (the last one again beyond N) → a panel.
template <typename Unpack>  // (channel, first column) → 64 unsigned bytes
void panel_bytes(Unpack unpack, int64_t k, int64_t n, int64_t N, int32_t* panel) {
  for (int64_t half = 0; half < PANEL; half += 16)
    for (int64_t c = 0; c < k; c += 64) {
      __m512i rows[16];
      for (int64_t i = 0; i < 16; ++i) rows[i] = unpack(std::min(n + half + i, N - 1), c);
      transpose16(rows, panel + c / 4 * PANEL + half);
    }
}
template <typename Unpack>  // (channel, first column, two vectors of words)
void panel_words(Unpack unpack, int64_t k, int64_t n, int64_t N, int32_t* panel) {
  for (int64_t half = 0; half < PANEL; half += 16)
    for (int64_t c = 0; c < k; c += BLOCK) {
      __m512i rows[16], more[16];
      for (int64_t i = 0; i < 16; ++i) {
        __m512i two[2];
        unpack(std::min(n + half + i, N - 1), c, two);
        rows[i] = two[0], more[i] = two[1];
      }
      transpose16(rows, panel + c / 2 * PANEL + half);
      transpose16(more, panel + (c / 2 + 16) * PANEL + half);
    }
}

// R rows of a tile × a panel over `steps` lanes.
template <int R, bool BYTES>
inline void multiply(const int32_t* a, const int32_t* panel, int64_t steps, __m512i out[R][2]) {
  __m512i acc[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
  for (int64_t s = 0; s < steps; ++s) {
    const __m512i low = load64(panel + s * PANEL), high = load64(panel + s * PANEL + 16);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m512i lane = _mm512_set1_epi32(a[s * TILE + r]);
      if constexpr (BYTES) {
        acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], low, lane);
        acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], high, lane);
      } else {
        acc[r][0] = _mm512_dpwssd_epi32(acc[r][0], low, lane);
        acc[r][1] = _mm512_dpwssd_epi32(acc[r][1], high, lane);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) out[r][0] = acc[r][0], out[r][1] = acc[r][1];
}

inline void store16(float* to, __m512 x, __mmask16 which) { _mm512_mask_storeu_ps(to, which, x); }
inline void store16(bf16* to, __m512 x, __mmask16 which) {  // rounds to nearest even; a NaN stays one
#ifdef __AVX512BF16__
  _mm256_mask_storeu_epi16(to, which, (__m256i)_mm512_cvtneps_pbh(x));
#else
  const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
  _mm256_mask_storeu_epi16(to, which, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
#endif
}
// Result of R rows × 32 channels from one panel. scale (and zero): PANEL floats, or groups × PANEL.
struct TokensPanel {
  const Tokens& x;

  template <int R>
  void operator()(int64_t from, const int32_t* panel, const PanelScales& s, __m512 out[R][2]) const {
    __m512i acc[R][2];
    multiply<R, true>(x.tile(from), panel, x.k / 4, acc);
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < 2; ++h) {
        const int64_t row = x.row(from + r);
        const __m512i exact = _mm512_sub_epi32(acc[r][h], _mm512_set1_epi32(x.sums[row] * 128));
        const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_set1_ps(x.scale[row]));
        out[r][h] = _mm512_mul_ps(value, _mm512_loadu_ps(s.scale + 16 * h));
      }
  }
};
// int4 weights 0 … 15. zero: PANEL floats a group, what the middle of 8 and the zero point add to each of its activations.
struct TokenGroupsPanel {
  const Tokens& x;

  template <int R>
  void operator()(int64_t from, const int32_t* panel, const PanelScales& s, __m512 out[R][2]) const {
    const int64_t groups = x.groups, steps = s.group / 4;
    for (int r = 0; r < R; ++r) out[r][0] = out[r][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g) {
      __m512i acc[R][2];
      multiply<R, true>(x.tile(from) + g * steps * TILE, panel + g * steps * PANEL, steps, acc);
      for (int h = 0; h < 2; ++h) {
        const __m512 scale = _mm512_loadu_ps(s.scale + g * PANEL + 16 * h), zero = _mm512_loadu_ps(s.zero + g * PANEL + 16 * h);
        for (int r = 0; r < R; ++r) {
          out[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][h]), scale, out[r][h]);
          out[r][h] = _mm512_fmadd_ps(zero, _mm512_set1_ps(static_cast<float>(x.sums[x.row(from + r) * groups + g])), out[r][h]);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < 2; ++h) out[r][h] = _mm512_mul_ps(out[r][h], _mm512_set1_ps(x.scale[x.row(from + r)]));
  }
};

struct BlocksPanel {
  const Activations& x;
  const Tiles& tiles;

  template <int R>
  void operator()(int64_t from, const int32_t* panel, const PanelScales& s, __m512 out[R][2]) const {
    for (int r = 0; r < R; ++r) out[r][0] = out[r][1] = _mm512_setzero_ps();
    const int64_t unit = s.group ? std::min(s.group, BLOCK) : BLOCK;
    for (int64_t begin = 0; begin < x.k; begin += unit) {
      __m512i acc[R][2];
      multiply<R, false>(tiles.tile(from) + begin / 2 * TILE, panel + begin / 2 * PANEL, unit / 2, acc);
      const float *scale = s.scale, *zero = s.zero;
      if (s.group) scale += begin / s.group * PANEL, zero += begin / s.group * PANEL;
      for (int r = 0; r < R; ++r) {
        const int64_t row = x.row(from + r);
        const __m512 by = _mm512_set1_ps(x.scale[row * x.blocks + begin / BLOCK]);
        float sum = 0.0f;
        if (s.group)
          for (int64_t c = begin; c < begin + unit; c += HALF) sum += x.sum[row * (x.k / HALF) + c / HALF];
        for (int h = 0; h < 2; ++h) {
          const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][h]), by);
          if (s.group) out[r][h] = _mm512_fmadd_ps(_mm512_loadu_ps(zero + 16 * h), _mm512_set1_ps(sum), out[r][h]);
          out[r][h] = _mm512_fmadd_ps(part, _mm512_loadu_ps(scale + 16 * h), out[r][h]);
        }
      }
    }
  }
};

// The first `count` of R rows; what the last tile has beyond them is computed and left.
template <int R, typename Product, typename O>
void tile(int64_t count, const Product& product, int64_t from, const int32_t* panel, const PanelScales& s, int64_t n, int64_t N,
          O* out) {
  __m512 value[R][2];
  product.template operator()<R>(from, panel, s, value);
  for (int r = 0; r < count; ++r)
    for (int h = 0; h < 2; ++h) store16(out + (from + r) * N + n + 16 * h, value[r][h], lanes_of(N - n - 16 * h));
}

template <typename Product, typename O>
void tile_of(int64_t count, const Product& product, int64_t from, const int32_t* panel, const PanelScales& s, int64_t n,
             int64_t N, O* out) {
  if (count > 8) tile<12>(count, product, from, panel, s, n, N, out);
  else if (count > 4) tile<8>(count, product, from, panel, s, n, N, out);
  else tile<4>(count, product, from, panel, s, n, N, out);
}

// What one thread multiplies: its channels in whole panels, and where there are more threads than panels, its rows.
struct Part {
  int64_t first, last, first_row, last_row;

  Part(int64_t rows, int64_t N) {
    const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num(), panels = (N + PANEL - 1) / PANEL;
    const int64_t across = std::min(threads, panels), down = threads / across, each = (panels + across - 1) / across;
    const int64_t tiles = (rows + TILE - 1) / TILE, deep = (tiles + down - 1) / down;
    first = std::min(N, me % across * each * PANEL), last = std::min(N, first + each * PANEL);
    first_row = std::min(rows, me / across * deep * TILE), last_row = std::min(rows, first_row + deep * TILE);
  }
};

// All rows × all channels → out [rows, N]. steps: lanes of a row. groups: of scales a channel.
// expand(n, panel) makes a panel, scales(n, scale, zero) its scales.
template <typename Product, typename Expand, typename Scales, typename O>
void multiply_all(const Product& product, int64_t rows, int64_t steps, int64_t N, int64_t groups, int64_t group,
                  Expand expand, Scales scales, O* out) {
  const int64_t held = std::max<int64_t>(1, HELD / (steps * PANEL * static_cast<int64_t>(sizeof(int32_t))));
#pragma omp parallel
  {
    const Part mine(rows, N);
    if (mine.first < mine.last && mine.first_row < mine.last_row) {
      const int64_t most = std::min(held, (mine.last - mine.first + PANEL - 1) / PANEL);
      std::vector<int32_t> panel(most * steps * PANEL);
      std::vector<float> scale(most * groups * PANEL, 0.0f), zero(most * groups * PANEL, 0.0f);
      for (int64_t begin = mine.first; begin < mine.last; begin += most * PANEL) {
        const int64_t end = std::min(mine.last, begin + most * PANEL);
        for (int64_t n = begin, p = 0; n < end; n += PANEL, ++p) {
          expand(n, panel.data() + p * steps * PANEL);
          scales(n, scale.data() + p * groups * PANEL, zero.data() + p * groups * PANEL);
        }
        for (int64_t r = mine.first_row; r < mine.last_row; r += TILE)
          for (int64_t n = begin, p = 0; n < end; n += PANEL, ++p) {
            const PanelScales s{group, scale.data() + p * groups * PANEL, zero.data() + p * groups * PANEL};
            tile_of(std::min<int64_t>(TILE, mine.last_row - r), product, r, panel.data() + p * steps * PANEL, s, n, N, out);
          }
      }
    }
  }
}

// e^x for x ≤ 0, within 2 units in the last place; 0 below −87. NaN stays NaN.
inline __m512 exp16(__m512 x) {
  const __mmask16 none = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0f));
  return _mm512_mask_mov_ps(_mm512_scalef_ps(p, n), none, _mm512_setzero_ps());
}

// -- few rows ---------------------------------------------------------------------------------------------------------

inline float sum16(__m512 x) { return _mm512_reduce_add_ps(x); }

#ifdef __AVX512BF16__
// bf16 weights and activations: products exact in float32, sums in float32. x: R rows of K.
template <int R, typename O>
inline void channel_bf16(const bf16* x, const bf16* w, int64_t K, int64_t n, O* out, int64_t stride) {
  __m512 acc[R][2];
  for (auto& row : acc) row[0] = row[1] = _mm512_setzero_ps();
  const bf16* from = w + n * K;
  const auto pairs = [](const bf16* at) { return (__m512bh)load64(at); };
  int64_t i = 0;
  for (; i + 64 <= K; i += 64) {
    const __m512bh low = pairs(from + i), high = pairs(from + i + 32);
    for (int r = 0; r < R; ++r) {
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], low, pairs(x + r * K + i));
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], high, pairs(x + r * K + i + 32));
    }
  }
  for (int r = 0; r < R; ++r) {
    float total = sum16(_mm512_add_ps(acc[r][0], acc[r][1]));
    for (int64_t j = i; j < K; ++j) total += widen(from[j]) * widen(x[r * K + j]);
    store(out + r * stride + n, total);
  }
}
#endif

// W8A8: out[r, n] of R rows.
template <int R, typename S, typename O>
inline void channel_tokens(const Activations& x, const Bytes& bytes, int64_t from, const int8_t* w, const S* scales,
                           int64_t n, O* out, int64_t stride) {
  const int64_t k = x.k;
  const int8_t* q = bytes.q.data() + from * k;
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
  __m512i acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_si512();
  for (int64_t c = 0; c < k; c += 64) {
    const __m512i v = _mm512_xor_si512(load64(w + n * k + c), flip);
    for (int r = 0; r < R; ++r) acc[r] = _mm512_dpbusd_epi32(acc[r], v, load64(q + r * k + c));
  }
  for (int r = 0; r < R; ++r) {
    const int32_t exact = _mm512_reduce_add_epi32(acc[r]) - 128 * bytes.sum[from + r];
    store(out + r * stride + n, static_cast<float>(exact) * x.scale[from + r] * widen(scales[n]));
  }
}

// int8 weights, activations as words by blocks.
template <int R, typename S, typename O>
inline void channel_int8(const Activations& x, int64_t from, const int8_t* w, const S* scales, int64_t n, O* out,
                         int64_t stride) {
  const int64_t k = x.k, whole = k / BLOCK;
  const int16_t* q = x.q.data() + from * k;
  const float* by = x.scale.data() + from * x.blocks;
  __m512 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
  for (int64_t b = 0; b < whole; ++b) {
    __m512i v[2];
    words_int8(w + n * k + b * BLOCK, v);
    for (int r = 0; r < R; ++r) {
      const int16_t* block = q + r * k + b * BLOCK;
      __m512i part = _mm512_dpwssd_epi32(_mm512_setzero_si512(), v[0], load64(block));
      part = _mm512_dpwssd_epi32(part, v[1], load64(block + HALF));
      acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part), _mm512_set1_ps(by[r * x.blocks + b]), acc[r]);
    }
  }
  for (int r = 0; r < R; ++r) store(out + r * stride + n, sum16(acc[r]) * widen(scales[n]));
}

// int4 weights in groups: `pdq::channel_int4` with vectors twice as wide.
template <int R, bool HALVES, typename S, typename O>
inline void channel_int4(const Activations& x, int64_t from, const Groups& g, const uint8_t* w, const S* scales,
                         int64_t n, float* room, O* out, int64_t stride) {
  const int64_t k = x.k, whole = k / BLOCK;
  const int16_t* q = x.q.data() + from * k;
  float start[R];
  scales_int4<R>(x, from, g, scales, n, room, start);
  // Two sums a row, each in a register of its own: one would wait for its own addition at every step.
  __m512 acc[R], more[R];
  for (int r = 0; r < R; ++r) acc[r] = more[r] = _mm512_setzero_ps();
  const auto block = [&](int64_t b, __m512 (&first)[R], __m512 (&second)[R]) {
    __m512i v[2];
    words_int4(w + n * (k / 2) + b * (BLOCK / 2), v);
    for (int r = 0; r < R; ++r) {
      const int16_t* x16 = q + r * k + b * BLOCK;
      const float* by = room + r * g.span;
      const __m512i low = _mm512_dpwssd_epi32(_mm512_setzero_si512(), v[0], load64(x16));
      if constexpr (HALVES) {
        const __m512i high = _mm512_dpwssd_epi32(_mm512_setzero_si512(), v[1], load64(x16 + HALF));
        first[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), _mm512_set1_ps(by[2 * b]), first[r]);
        second[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(by[2 * b + 1]), second[r]);
      } else {
        const __m512i both = _mm512_dpwssd_epi32(low, v[1], load64(x16 + HALF));
        first[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(both), _mm512_set1_ps(by[b]), first[r]);
      }
    }
  };
  int64_t b = 0;
  for (; b + 2 <= whole; b += 2) block(b, acc, more), block(b + 1, more, acc);
  if (b < whole) block(b, acc, more);
  for (int r = 0; r < R; ++r) store(out + r * stride + n, sum16(_mm512_add_ps(acc[r], more[r])) + start[r]);
}

#ifdef __AVX512VBMI__
#define PDQ_NIBBLES 1
// int4 weights as bytes, 64 columns a vector, multiplied with the bytes of the activations: one or two dot products a block where
// words take two, and less to unpack. Lanes of 32 bits hold four columns of the first and of the second half of the block in turn.

// Byte p of a vector of weights → its column.
inline int64_t column_of(int64_t p) {
  const int64_t half = p / 32, qword = p % 32 / 8, byte = p % 8;
  return 4 * qword + 2 * half + byte % 4 / 2 + 16 * (byte % 2 + byte / 4 * 2);
}
inline __m512i nibbles(const uint8_t* block) {
  // Byte p's nibble begins at these bits of its 64: two words of four nibbles for each half of the vector.
  const __m512i bits = _mm512_inserti64x4(_mm512_set1_epi64(0x1c180c0814100400), _mm256_set1_epi64x(0x3c382c2834302420), 1);
  const __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block)));
  return _mm512_and_si512(_mm512_multishift_epi64_epi8(bits, both), _mm512_set1_epi8(15));
}

// Activations as bytes in the order of `nibbles`: of tokens one a column, else the high (signed) and then the low ones, block by
// block, of a 16-bit number.
struct Parts {
  int64_t each = 0;  // bytes a row
  std::vector<int8_t> bytes;

  void read(const Activations& x, bool tokens) {
    each = x.k * (tokens ? 1 : 2);
    bytes.resize(x.rows * each);
    alignas(64) int8_t order[64];
    for (int64_t p = 0; p < 64; ++p) order[p] = static_cast<int8_t>(column_of(p));
    const __m512i columns = _mm512_load_si512(order);
    for (int64_t r = 0; r < x.rows; ++r)
      for (int64_t c = 0; c < x.k; c += BLOCK) {
        const __m512i low = load64(x.q.data() + r * x.k + c), high = load64(x.q.data() + r * x.k + c + HALF);
        const auto put = [&](__m512i one, __m512i two, int8_t* to) {
          const __m512i joined = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(one)), _mm512_cvtepi16_epi8(two), 1);
          _mm512_storeu_si512(to, _mm512_permutexvar_epi8(columns, joined));
        };
        int8_t* to = bytes.data() + r * each + c * (tokens ? 1 : 2);
        if (!tokens) put(_mm512_srai_epi16(low, 8), _mm512_srai_epi16(high, 8), to), to += 64;
        put(low, high, to);
      }
  }
};

// `channel_int4` by bytes. HALVES: groups of half a block, else of a multiple of one.
// Inlined, so that constants stay in registers from channel to channel.
template <int R, bool HALVES, bool TOKENS, typename S, typename O>
__attribute__((always_inline)) inline void channel_nibbles(const Activations& x, const Parts& parts, int64_t from, const Groups& g, const uint8_t* w, const S* scales,
                            int64_t n, float* room, O* out, int64_t stride) {
  constexpr int64_t STEP = TOKENS ? 64 : 128, BLOCKS = HALVES ? 8 : 16;  // bytes of a block; blocks that a vector has factors for
  const int64_t k = x.k, whole = k / BLOCK;
  const uint8_t* weights = w + n * (k / 2);
  const int8_t* bytes = parts.bytes.data() + from * parts.each;
  const bool at_once = g.group == g.unit;  // else factors are made beforehand, and the sums' beginning with them
  // Two sums a row, each in a register of its own: one would wait for its own addition at every step.
  __m512 sum[2][R], factors[R];
  float start[R];
  for (int r = 0; r < R; ++r) sum[0][r] = sum[1][r] = _mm512_setzero_ps();
  if (!at_once) {
    scales_int4<R>(x, from, g, scales, n, room, start);
    for (int r = 0; r < R; ++r) sum[0][r] = _mm512_maskz_mov_ps(1, _mm512_set1_ps(start[r]));
  }
  for (int64_t begin = 0; begin < whole; begin += BLOCKS) {
    const int64_t unit = begin * 16 / BLOCKS;
    __m512 s;
    if (at_once) {
      const __m512i both = _mm512_maskz_loadu_epi32(lanes_of(g.groups - unit), scales + (n * g.groups + unit) * 2);
      s = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      const __m512 zero = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
      const __m512 offset = _mm512_fnmadd_ps(_mm512_set1_ps(8.0f), s, zero);
      for (int r = 0; r < R; ++r) sum[0][r] = _mm512_fmadd_ps(offset, _mm512_loadu_ps(g.sums.data() + (from + r) * g.padded + unit), sum[0][r]);
    }
    for (int r = 0; r < R; ++r)
      factors[r] = at_once ? _mm512_mul_ps(s, _mm512_loadu_ps(g.factors.data() + (from + r) * g.span + unit)) : _mm512_loadu_ps(room + r * g.span + unit);
    __m512i which = _mm512_setzero_si512();  // block, counted in a register: from a number it would take two steps each time
    const auto block = [&](int64_t b, __m512 (&to)[R]) {
      const __m512i v = nibbles(weights + (begin + b) * (BLOCK / 2));
      for (int r = 0; r < R; ++r) {
        const int8_t* at = bytes + r * parts.each + (begin + b) * STEP;
        __m512i part = _mm512_dpbusd_epi32(_mm512_setzero_si512(), v, load64(at));
        if constexpr (!TOKENS) part = _mm512_dpbusd_epi32(_mm512_slli_epi32(part, 8), load64(at + 64), v);  // the low bytes have no sign
        const __m512 scale = HALVES ? _mm512_castpd_ps(_mm512_permutexvar_pd(which, _mm512_castps_pd(factors[r]))) : _mm512_permutexvar_ps(which, factors[r]);
        to[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part), scale, to[r]);
      }
      which = HALVES ? _mm512_add_epi64(which, _mm512_set1_epi64(1)) : _mm512_add_epi32(which, _mm512_set1_epi32(1));
      asm("" : "+v"(which));  // else the compiler unrolls it into just that
    };
    const int64_t count = std::min(BLOCKS, whole - begin);
    int64_t b = 0;
    for (; b + 2 <= count; b += 2) block(b, sum[0]), block(b + 1, sum[1]);
    if (b < count) block(b, sum[1]);
  }
  for (int r = 0; r < R; ++r) store(out + r * stride + n, sum16(_mm512_add_ps(sum[0][r], sum[1][r])));
}
#endif

}  // namespace pdq::wide
#endif
