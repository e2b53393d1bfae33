// Many rows of activations through packed matrices: rows are rounded once for all matrices that read them, weights are put into
// panels that all rows use (gemm.h, wide.h).
#pragma once

#include "around.h"
#include "linear.h"

namespace pdq {

// Rows [rows, K] as the kernels of one form want them.
template <typename T>
struct ManyRows {
  const T* x;
  int64_t rows, k, group;
  Form form;
  Activations a;
#ifdef PDQ_WIDE
  std::optional<wide::Tokens> tokens;
  std::optional<wide::Tiles> words;
#endif

  ManyRows(const T* x, int64_t rows, const Linear& w) : x(x), rows(rows), k(w.k), group(w.int4() ? w.group : 0), form(w.form) {
#ifdef PDQ_WIDE
    if (w.tokens()) {
      tokens.emplace(x, rows, w.K, k, group ? k / group : 1);
      return;
    }
#endif
    quantize_rows(x, rows, w.K, k, w.tokens(), w.int4(), a);
#ifdef PDQ_WIDE
    words.emplace(a.q.data(), rows, k / 2);
#endif
  }
  bool serves(const T* from, const Linear& w) const { return x == from && form == w.form && k == w.k && group == (w.int4() ? w.group : 0); }
};

// Scales of channels n … n + width − 1 by group, groups × `panel` floats: of int8 one group, no zeros. middle: what a zero point is
// to count from where weights are multiplied as 0 … 15.
template <typename T>
void panel_scales(const Linear& w, int64_t n, int64_t panel, float middle, float* scale, float* zero) {
  const T* by = static_cast<const T*>(w.scales);
  const int64_t width = std::min(panel, w.N - n), groups = w.int4() ? w.k / w.group : 1;
  for (int64_t c = 0; c < width; ++c)
    for (int64_t g = 0; g < groups; ++g) {
      if (!w.int4()) {
        scale[c] = widen(by[n + c]);
        continue;
      }
      const T* pair = by + ((n + c) * groups + g) * 2;
      scale[g * panel + c] = widen(pair[0]);
      zero[g * panel + c] = widen(pair[1]) - middle * widen(pair[0]);
    }
}

// All channels of int8, W8A8, int4 or W4A8 weights, by all threads → out [rows, N].
template <typename T>
void many_rows(const Linear& w, const ManyRows<T>& in, T* out) {
  const int64_t k = w.k, N = w.N, groups = w.int4() ? k / w.group : 1;
  const int8_t* bytes = static_cast<const int8_t*>(w.weight);
  const uint8_t* nibbles = static_cast<const uint8_t*>(w.weight);
#ifdef PDQ_WIDE
  const auto scales = [&](int64_t n, float* scale, float* zero) { panel_scales<T>(w, n, wide::PANEL, w.tokens() ? 8.0f : 0.0f, scale, zero); };
  const auto multiply = [&](const auto& product, int64_t steps, auto expand) {
    wide::multiply_all(product, in.rows, steps, N, groups, w.int4() ? w.group : 0, expand, scales, out);
  };
  switch (w.form) {
    case Form::w8a8:
      return multiply(wide::TokensPanel{*in.tokens}, k / 4, [&](int64_t n, int32_t* panel) {
        wide::panel_bytes([&](int64_t c, int64_t i) { return wide::bytes_int8(bytes + c * k + i); }, k, n, N, panel);
      });
    case Form::w4a8:
      return multiply(wide::TokenGroupsPanel{*in.tokens}, k / 4, [&](int64_t n, int32_t* panel) {
        wide::panel_bytes([&](int64_t c, int64_t i) { return wide::bytes_int4(nibbles + c * (k / 2) + i / 2); }, k, n, N, panel);
      });
    case Form::int8:
      return multiply(wide::BlocksPanel{in.a, *in.words}, k / 2, [&](int64_t n, int32_t* panel) {
        wide::panel_words([&](int64_t c, int64_t i, __m512i two[2]) { wide::words_int8(bytes + c * k + i, two); }, k, n, N, panel);
      });
    default:
      return multiply(wide::BlocksPanel{in.a, *in.words}, k / 2, [&](int64_t n, int32_t* panel) {
        const __m512i eight = _mm512_set1_epi16(8);
        wide::panel_words([&](int64_t c, int64_t i, __m512i two[2]) {
          wide::words_int4(nibbles + c * (k / 2) + i / 2, two);
          two[0] = _mm512_sub_epi16(two[0], eight), two[1] = _mm512_sub_epi16(two[1], eight);
        }, k, n, N, panel);
      });
  }
#else
#pragma omp parallel
  {
    std::vector<int16_t> panel(k * PANEL);
    std::vector<float> scale(groups * PANEL, 0.0f), zero(groups * PANEL, 0.0f);
#pragma omp for schedule(static)
    for (int64_t n = 0; n < N; n += PANEL) {
      w.int4() ? expand_int4(nibbles, k, n, N, panel.data()) : expand_int8(bytes, k, n, N, panel.data());
      panel_scales<T>(w, n, PANEL, 0.0f, scale.data(), zero.data());
      multiply_panel(in.a, panel.data(), {w.int4() ? w.group : 0, scale.data(), zero.data()}, n, N, out);
    }
  }
#endif
}

// x [rows, K] through every matrix → its out [rows, N], bias added, rows rounded anew only where a matrix wants them otherwise.
template <typename T>
void multiply_rows(const std::vector<Linear>& matrices, const T* x, int64_t rows, const std::vector<T*>& outs) {
  std::optional<Input<T>> few;
  std::optional<ManyRows<T>> many;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const Linear& w = matrices[i];
    if (rows <= most_few(w.form)) {
      if (!few || !few->serves(x, w)) few.emplace(x, rows, w);
      few_rows(w, *few, outs[i]);
      continue;
    }
    if (!many || !many->serves(x, w)) many.emplace(x, rows, w);
    many_rows(w, *many, outs[i]);
    if (w.bias == nullptr) continue;
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r) add_row(static_cast<const T*>(w.bias), w.N, outs[i] + r * w.N);
  }
}

}  // namespace pdq
