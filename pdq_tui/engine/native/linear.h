// Few rows of activations through one packed matrix, channel by channel: what the operators and a whole decoder layer share.
#pragma once

#include <omp.h>

#include <optional>
#include <type_traits>

#include "wide.h"
#include "widen.h"

namespace pdq {

#ifdef PDQ_WIDE
namespace best = pdq::wide;
#else
namespace best = pdq;
#endif

enum class Form : int64_t { dense, int8, w8a8, int4, w4a8, nested };

// A packed matrix [N, k] over K ≤ k columns; group: of int4, which takes bf16 only, as nested does. Scales are of the
// model's dtype, and so is the bias [N], or none.
struct Linear {
  Form form;
  int64_t N, K, k, group;
  const void *weight, *scales, *residual, *bias;

  bool tokens() const { return form == Form::w8a8 || form == Form::w4a8; }
  bool int4() const { return form == Form::int4 || form == Form::w4a8; }
};

// Rows that are multiplied channel by channel; more of them pay for panels, where a form has such a kernel.
inline int64_t most_few(Form form) {
#ifdef PDQ_WIDE
  if (form == Form::w8a8) return wide::BYTE_ROWS;
#endif
  return form == Form::dense || form == Form::nested ? INT64_MAX : 2 * GEMV_ROWS;
}

template <int n>
using Count = std::integral_constant<int, n>;

// Calls f(R as a constant) for a number of rows up to MOST.
template <int64_t MOST, typename F>
void counted(int64_t rows, F f) {
  switch (rows) {
    case 8: if constexpr (MOST >= 8) f(Count<8>{}); break;
    case 7: if constexpr (MOST >= 8) f(Count<7>{}); break;
    case 6: if constexpr (MOST >= 8) f(Count<6>{}); break;
    case 5: if constexpr (MOST >= 8) f(Count<5>{}); break;
    case 4: f(Count<4>{}); break;
    case 3: f(Count<3>{}); break;
    case 2: f(Count<2>{}); break;
    default: f(Count<1>{});
  }
}

// Calls f(R, first of R rows, channel) until all rows × channels [first, last) are covered: a channel for all rows, so that
// its weights come from the memory once.
template <int64_t MOST = GEMV_ROWS, typename F>
void by_rows(int64_t rows, int64_t first, int64_t last, F f) {
  if (rows <= MOST) {  // decided once, not for each channel
    counted<MOST>(rows, [&](auto R) {
      for (int64_t n = first; n < last; ++n) f(R, 0, n);
    });
    return;
  }
  for (int64_t n = first; n < last; ++n)
    for (int64_t from = 0; from < rows; from += MOST)
      counted<MOST>(std::min<int64_t>(MOST, rows - from), [&](auto R) { f(R, from, n); });
}

// Channels of a thread, whole cache lines of the result where possible.
struct Share {
  int64_t first, last;
  explicit Share(int64_t N) {
    const int64_t threads = omp_get_num_threads(), step = 32, pieces = (N + step - 1) / step;
    const int64_t each = (pieces + threads - 1) / threads * step;
    first = std::min(N, omp_get_thread_num() * each), last = std::min(N, first + each);
  }
};

#if defined(PDQ_WIDE) && defined(__AVX512BF16__)
template <typename T>
constexpr bool MULTIPLIES_BF16 = std::is_same_v<T, bf16>;
#else
template <typename T>
constexpr bool MULTIPLIES_BF16 = false;
#endif

// Rows [rows, K] as the kernels of one form want them. Made once for several matrices where they want the same.
template <typename T>
struct Input {
  Form form = Form::dense;
  int64_t rows = 0, k = 0, group = 0;
  const T* x = nullptr;
  std::vector<float> wide;
  Activations a;
  std::optional<Groups> groups;
#ifdef PDQ_WIDE
  wide::Bytes bytes;
#endif
#ifdef PDQ_NIBBLES
  wide::Parts parts;
#endif

  Input() = default;
  Input(const T* x, int64_t rows, const Linear& w) { read(x, rows, w); }

  bool serves(const T* from, const Linear& w) const {
    return x == from && form == w.form && k == w.k && group == (w.int4() ? w.group : 0);
  }

  void read(const T* from, int64_t count, const Linear& w) {
    x = from, rows = count, form = w.form, k = w.k, group = w.int4() ? w.group : 0;
    if (form == Form::dense) {
      if constexpr (!MULTIPLIES_BF16<T>) {
        wide.resize(rows * k);
        for (int64_t i = 0; i < rows * k; ++i) wide[i] = widen(x[i]);
      }
      return;
    }
    quantize_rows(x, rows, w.K, k, w.tokens(), w.int4(), a);
    if (w.int4()) groups.emplace(a, group);
#ifdef PDQ_NIBBLES
    if (w.int4()) parts.read(a, w.tokens());
#endif
#ifdef PDQ_WIDE
    if (form == Form::w8a8) bytes.read(a);
#endif
  }
};

// Channels [first, last) of the product with all rows → out[r * stride + n], bias added.
template <typename T>
void few_rows(const Linear& w, const Input<T>& in, int64_t first, int64_t last, T* out, int64_t stride) {
  const int64_t rows = in.rows, k = w.k;
  const T* scales = static_cast<const T*>(w.scales);
  if (first >= last) return;
  switch (w.form) {
    case Form::dense: {
      const T* weights = static_cast<const T*>(w.weight);
#if defined(PDQ_WIDE) && defined(__AVX512BF16__)
      if constexpr (MULTIPLIES_BF16<T>) {
        by_rows<wide::BYTE_ROWS>(rows, first, last, [&](auto R, int64_t r, int64_t n) {
          wide::channel_bf16<R.value>(in.x + r * k, weights, k, n, out + r * stride, stride);
        });
        break;
      }
#endif
      by_rows(rows, first, last, [&](auto R, int64_t r, int64_t n) {
        channel_dense<R.value>(in.wide.data() + r * k, weights, k, n, out + r * stride, stride);
      });
      break;
    }
    case Form::int8: {
      const int8_t* weights = static_cast<const int8_t*>(w.weight);
      by_rows(rows, first, last, [&](auto R, int64_t r, int64_t n) {
#ifdef PDQ_WIDE
        wide::channel_int8<R.value>(in.a, r, weights, scales, n, out + r * stride, stride);
#else
        channel_int8<R.value, false>(in.a, r, weights, scales, n, out + r * stride, stride);
#endif
      });
      break;
    }
    case Form::w8a8: {
      const int8_t* weights = static_cast<const int8_t*>(w.weight);
#ifdef PDQ_WIDE
      by_rows<wide::BYTE_ROWS>(rows, first, last, [&](auto R, int64_t r, int64_t n) {
        wide::channel_tokens<R.value>(in.a, in.bytes, r, weights, scales, n, out + r * stride, stride);
      });
#else
      by_rows(rows, first, last, [&](auto R, int64_t r, int64_t n) {
        channel_int8<R.value, true>(in.a, r, weights, scales, n, out + r * stride, stride);
      });
#endif
      break;
    }
    case Form::int4:
    case Form::w4a8: {
      if constexpr (std::is_same_v<T, bf16>) {
        const uint8_t* weights = static_cast<const uint8_t*>(w.weight);
        std::vector<float> room(in.groups->room(GEMV_ROWS));
        const auto by_group = [&](auto halves, auto tokens) {
          by_rows(rows, first, last, [&](auto R, int64_t r, int64_t n) {
#ifdef PDQ_NIBBLES
            wide::channel_nibbles<R.value, halves.value, tokens.value>(in.a, in.parts, r, *in.groups, weights, scales, n, room.data(), out + r * stride, stride);
#else
            best::channel_int4<R.value, halves.value>(in.a, r, *in.groups, weights, scales, n, room.data(), out + r * stride, stride);
#endif
          });
        };
        const auto by_form = [&](auto halves) { w.tokens() ? by_group(halves, std::true_type{}) : by_group(halves, std::false_type{}); };
        w.group == HALF ? by_form(std::true_type{}) : by_form(std::false_type{});
      }
      break;
    }
    case Form::nested: {
      if constexpr (std::is_same_v<T, bf16>) {
        const int8_t *weights = static_cast<const int8_t*>(w.weight), *residual = static_cast<const int8_t*>(w.residual);
        by_rows(rows, first, last, [&](auto R, int64_t r, int64_t n) {
          channel_nested<R.value>(in.a, r, weights, residual, scales, n, out + r * stride, stride);
        });
      }
      break;
    }
  }
  if (w.bias != nullptr) {
    const T* bias = static_cast<const T*>(w.bias);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t n = first; n < last; ++n) store(out + r * stride + n, widen(out[r * stride + n]) + widen(bias[n]));
  }
}

// All channels, by all threads.
template <typename T>
void few_rows(const Linear& w, const Input<T>& in, T* out) {
#pragma omp parallel
  {
    const Share mine(w.N);
    few_rows(w, in, mine.first, mine.last, out, w.N);
  }
}

}  // namespace pdq
