// Operators of torch's stable C++ interface: what multiplies packed weights on a CPU with AVX2, or better.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <omp.h>

#include "cache_ops.h"
#include "prefill.h"
#include "widen.h"

namespace {

using namespace pdq;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

Tensor result(const Tensor& x, int64_t N) { return torch::stable::new_empty(x, {x.size(0), N}); }

void expect(bool fact, const char* what) { STD_TORCH_CHECK(fact, what); }

void expect_rows(const Tensor& x, const Tensor& w) {
  expect(x.dim() == 2 && w.dim() == 2 && x.is_contiguous() && w.is_contiguous(), "x [rows, K] and w [N, k] must be contiguous");
}

bool is_bf16(const Tensor& t) {
  const auto type = t.scalar_type();
  expect(type == ScalarType::BFloat16 || type == ScalarType::Float, "bf16 or float32 is expected");
  return type == ScalarType::BFloat16;
}

template <int n>
using Count = std::integral_constant<int, n>;

#ifdef PDQ_WIDE
namespace best = pdq::wide;
#else
namespace best = pdq;
#endif

// Calls f(R, first of R rows, channel) until all rows × channels [first, last) are covered.
template <int64_t MOST = GEMV_ROWS, typename F>
void by_rows(int64_t rows, int64_t first, int64_t last, F f) {
  for (int64_t from = 0; from < rows; from += MOST)
    for (int64_t n = first; n < last; ++n) switch (std::min<int64_t>(MOST, rows - from)) {
        case 8: if constexpr (MOST >= 8) f(Count<8>{}, from, n); break;
        case 7: if constexpr (MOST >= 8) f(Count<7>{}, from, n); break;
        case 6: if constexpr (MOST >= 8) f(Count<6>{}, from, n); break;
        case 5: if constexpr (MOST >= 8) f(Count<5>{}, from, n); break;
        case 4: f(Count<4>{}, from, n); break;
        case 3: f(Count<3>{}, from, n); break;
        case 2: f(Count<2>{}, from, n); break;
        default: f(Count<1>{}, from, n);
      }
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

// -- weights of the model's own dtype ---------------------------------------------------------------------------------

template <typename T>
void run_dense(const Tensor& x, const Tensor& w, Tensor& out) {
  const int64_t rows = x.size(0), K = x.size(1), N = w.size(0);
  std::vector<float> wide(rows * K);
  const T* from = data<const T>(x);
  for (int64_t i = 0; i < rows * K; ++i) wide[i] = widen(from[i]);
  const T* weights = data<const T>(w);
  T* to = data<T>(out);
#pragma omp parallel
  {
    const Share mine(N);
    by_rows(rows, mine.first, mine.last, [&](auto R, int64_t r, int64_t n) {
      channel_dense<R.value>(wide.data() + r * K, weights, K, n, to + r * N, N);
    });
  }
}

#if defined(PDQ_WIDE) && defined(__AVX512BF16__)
template <>
void run_dense<bf16>(const Tensor& x, const Tensor& w, Tensor& out) {
  const int64_t rows = x.size(0), K = x.size(1), N = w.size(0);
  const bf16 *from = data<const bf16>(x), *weights = data<const bf16>(w);
  bf16* to = data<bf16>(out);
#pragma omp parallel
  {
    const Share mine(N);
    by_rows<wide::BYTE_ROWS>(rows, mine.first, mine.last, [&](auto R, int64_t r, int64_t n) {
      wide::channel_bf16<R.value>(from + r * K, weights, K, n, to + r * N, N);
    });
  }
}
#endif

Tensor dense(Tensor x, Tensor w) {
  expect_rows(x, w);
  expect(x.size(1) == w.size(1) && x.scalar_type() == w.scalar_type(), "x [rows, K] and w [N, K] of one dtype");
  Tensor out = result(x, w.size(0));
  is_bf16(x) ? run_dense<bf16>(x, w, out) : run_dense<float>(x, w, out);
  return out;
}

// -- int8 -------------------------------------------------------------------------------------------------------------

#ifdef PDQ_WIDE

template <typename T>
void run_int8(const Tensor& x, const Tensor& w, const Tensor& scales, bool tokens, Tensor& out) {
  const int64_t rows = x.size(0), N = w.size(0), k = w.size(1);
  Activations a;
  quantize_rows(data<const T>(x), rows, x.size(1), k, tokens, a);
  const int8_t* weights = data<const int8_t>(w);
  const T* by = data<const T>(scales);
  T* to = data<T>(out);
  const auto wide_scales = [&](int64_t n, float* scale, float*) {
    for (int64_t c = 0; c < std::min(wide::PANEL, N - n); ++c) scale[c] = widen(by[n + c]);
  };
  if (tokens) {
    const wide::Bytes bytes(a);
    if (rows <= wide::BYTE_ROWS) {
#pragma omp parallel
      {
        const Share mine(N);
        by_rows<wide::BYTE_ROWS>(rows, mine.first, mine.last, [&](auto R, int64_t r, int64_t n) {
          wide::channel_tokens<R.value>(a, bytes, r, weights, by, n, to + r * N, N);
        });
      }
      return;
    }
    const wide::Tiles tiles(bytes.q.data(), rows, k / 4);
    const auto unpack = [&](int64_t n, int64_t c) { return wide::bytes_int8(weights + n * k + c); };
    const auto expand = [&](int64_t n, int32_t* panel) { wide::panel_bytes(unpack, k, n, N, panel); };
    wide::multiply_all(wide::TokensPanel{a, tiles, bytes.sum.data()}, rows, k / 4, N, 1, 0, expand, wide_scales, to);
    return;
  }
  if (rows <= 2 * GEMV_ROWS) {
#pragma omp parallel
    {
      const Share mine(N);
      by_rows(rows, mine.first, mine.last, [&](auto R, int64_t r, int64_t n) {
        wide::channel_int8<R.value>(a, r, weights, by, n, to + r * N, N);
      });
    }
    return;
  }
  const wide::Tiles tiles(a.q.data(), rows, k / 2);
  const auto unpack = [&](int64_t n, int64_t c, __m512i two[2]) { wide::words_int8(weights + n * k + c, two); };
  const auto expand = [&](int64_t n, int32_t* panel) { wide::panel_words(unpack, k, n, N, panel); };
  wide::multiply_all(wide::BlocksPanel{a, tiles}, rows, k / 2, N, 1, 0, expand, wide_scales, to);
}

#else

template <typename T>
void run_int8(const Tensor& x, const Tensor& w, const Tensor& scales, bool tokens, Tensor& out) {
  const int64_t rows = x.size(0), N = w.size(0), k = w.size(1);
  Activations a;
  quantize_rows(data<const T>(x), rows, x.size(1), k, tokens, a);
  const int8_t* weights = data<const int8_t>(w);
  const T* by = data<const T>(scales);
  T* to = data<T>(out);
  if (rows <= 2 * GEMV_ROWS) {
#pragma omp parallel
    {
      const Share mine(N);
      by_rows(rows, mine.first, mine.last, [&](auto R, int64_t r, int64_t n) {
        if (tokens) channel_int8<R.value, true>(a, r, weights, by, n, to + r * N, N);
        else channel_int8<R.value, false>(a, r, weights, by, n, to + r * N, N);
      });
    }
    return;
  }
#pragma omp parallel
  {
    std::vector<int16_t> panel(k * PANEL);
    float scale[PANEL] = {};
#pragma omp for schedule(static)
    for (int64_t n = 0; n < N; n += PANEL) {
      expand_int8(weights, k, n, N, panel.data());
      for (int64_t c = 0; c < std::min(PANEL, N - n); ++c) scale[c] = widen(by[n + c]);
      multiply_panel(a, panel.data(), {0, scale, scale}, n, N, to);
    }
  }
}

#endif

// tokens: activations as −127…127 with one scale a row (W8A8), else as 16-bit whole numbers by blocks (W8A16).
Tensor int8(Tensor x, Tensor w, Tensor scales, bool tokens) {
  expect_rows(x, w);
  expect(w.size(1) % BLOCK == 0 && x.size(1) <= w.size(1), "int8 weights [N, k] with k a multiple of 64");
  expect(scales.size(0) == w.size(0) && scales.is_contiguous() && scales.scalar_type() == x.scalar_type(), "one scale a channel");
  Tensor out = result(x, w.size(0));
  is_bf16(x) ? run_int8<bf16>(x, w, scales, tokens, out) : run_int8<float>(x, w, scales, tokens, out);
  return out;
}

// -- int4 in groups ---------------------------------------------------------------------------------------------------

void run_int4(const Tensor& x, const Tensor& w, const Tensor& scales, int64_t group, bool tokens, Tensor& out) {
  const int64_t rows = x.size(0), N = w.size(0), k = w.size(1) * 2, groups = k / group;
  Activations a;
  quantize_rows(data<const bf16>(x), rows, x.size(1), k, tokens, a);
  const uint8_t* weights = data<const uint8_t>(w);
  const bf16* by = data<const bf16>(scales);
  bf16* to = data<bf16>(out);
  if (rows <= 2 * GEMV_ROWS) {
    const Groups shared(a, group);
#pragma omp parallel
    {
      const Share mine(N);
      std::vector<float> room(shared.room(GEMV_ROWS));
      by_rows(rows, mine.first, mine.last, [&](auto R, int64_t r, int64_t n) {
        if (group == HALF) best::channel_int4<R.value, true>(a, r, shared, weights, by, n, room.data(), to + r * N, N);
        else best::channel_int4<R.value, false>(a, r, shared, weights, by, n, room.data(), to + r * N, N);
      });
    }
    return;
  }
#ifdef PDQ_WIDE
  if (tokens) {
    const wide::Bytes bytes(a);
    const wide::Tiles tiles(bytes.q.data(), rows, k / 4);
    const std::vector<float> sums = wide::group_sums(a, group);
    const auto unpack = [&](int64_t n, int64_t c) { return wide::bytes_int4(weights + n * (k / 2) + c / 2); };
    const auto expand = [&](int64_t n, int32_t* panel) { wide::panel_bytes(unpack, k, n, N, panel); };
    const auto scales_of = [&](int64_t n, float* scale, float* zero) {
      for (int64_t c = 0; c < std::min(wide::PANEL, N - n); ++c)
        for (int64_t g = 0; g < groups; ++g) {
          const bf16* pair = by + ((n + c) * groups + g) * 2;
          scale[g * wide::PANEL + c] = widen(pair[0]);
          zero[g * wide::PANEL + c] = widen(pair[1]) - 8.0f * widen(pair[0]);
        }
    };
    wide::multiply_all(wide::TokenGroupsPanel{a, tiles, sums.data()}, rows, k / 4, N, groups, group, expand, scales_of, to);
    return;
  }
  const wide::Tiles tiles(a.q.data(), rows, k / 2);
  const __m512i eight = _mm512_set1_epi16(8);
  const auto unpack = [&](int64_t n, int64_t c, __m512i two[2]) {
    wide::words_int4(weights + n * (k / 2) + c / 2, two);
    two[0] = _mm512_sub_epi16(two[0], eight), two[1] = _mm512_sub_epi16(two[1], eight);
  };
  const auto expand = [&](int64_t n, int32_t* panel) { wide::panel_words(unpack, k, n, N, panel); };
  const auto scales_of = [&](int64_t n, float* scale, float* zero) {
    for (int64_t c = 0; c < std::min(wide::PANEL, N - n); ++c)
      for (int64_t g = 0; g < groups; ++g) {
        scale[g * wide::PANEL + c] = widen(by[((n + c) * groups + g) * 2]);
        zero[g * wide::PANEL + c] = widen(by[((n + c) * groups + g) * 2 + 1]);
      }
  };
  wide::multiply_all(wide::BlocksPanel{a, tiles}, rows, k / 2, N, groups, group, expand, scales_of, to);
#else
#pragma omp parallel
  {
    std::vector<int16_t> panel(k * PANEL);
    std::vector<float> scale(groups * PANEL, 0.0f), zero(groups * PANEL, 0.0f);
#pragma omp for schedule(static)
    for (int64_t n = 0; n < N; n += PANEL) {
      expand_int4(weights, k, n, N, panel.data());
      for (int64_t c = 0; c < std::min(PANEL, N - n); ++c)
        for (int64_t g = 0; g < groups; ++g) {
          scale[g * PANEL + c] = widen(by[((n + c) * groups + g) * 2]);
          zero[g * PANEL + c] = widen(by[((n + c) * groups + g) * 2 + 1]);
        }
      multiply_panel(a, panel.data(), {group, scale.data(), zero.data()}, n, N, to);
    }
  }
#endif
}

// tokens: activations as −127…127 with one scale a row (W4A8), else as 16-bit whole numbers by blocks (W4A16).
Tensor int4(Tensor x, Tensor w, Tensor scales, int64_t group, bool tokens) {
  expect_rows(x, w);
  const int64_t k = w.size(1) * 2;
  expect(k % BLOCK == 0 && x.size(1) <= k && group % HALF == 0 && (group == HALF || group % BLOCK == 0) && k % group == 0,
         "int4 weights [N, k / 2], k a multiple of 64 and of group, group 32 or a multiple of 64");
  expect(scales.is_contiguous() && scales.dim() == 3 && scales.size(0) == w.size(0) && scales.size(1) == k / group, "scales [N, k / group, 2]");
  expect(is_bf16(x) && scales.scalar_type() == ScalarType::BFloat16, "int4 takes bf16");
  Tensor out = result(x, w.size(0));
  run_int4(x, w, scales, group, tokens, out);
  return out;
}

// -- nested 16 → 8, and dense matrices for stages that multiply them --------------------------------------------------

void expect_nested(const Tensor& w, const Tensor& residual, const Tensor& scales) {
  expect(w.dim() == 2 && w.is_contiguous() && residual.is_contiguous() && residual.dim() == 2 && residual.size(0) == w.size(0) &&
             residual.size(1) == w.size(1) && w.scalar_type() == ScalarType::Char && residual.scalar_type() == ScalarType::Char,
         "int8 weights and residuals [N, k] are expected");
  expect(scales.size(0) == w.size(0) && scales.is_contiguous(), "one scale a channel");
}

Tensor nested(Tensor x, Tensor w, Tensor residual, Tensor scales) {
  expect_rows(x, w);
  expect_nested(w, residual, scales);
  expect(w.size(1) % BLOCK == 0 && x.size(1) <= w.size(1) && is_bf16(x) && is_bf16(scales), "bf16, k a multiple of 64");
  const int64_t rows = x.size(0), N = w.size(0), k = w.size(1);
  Tensor out = result(x, N);
  Activations a;
  quantize_rows(data<const bf16>(x), rows, x.size(1), k, false, a);
#pragma omp parallel
  {
    const Share mine(N);
    by_rows(rows, mine.first, mine.last, [&](auto R, int64_t r, int64_t n) {
      channel_nested<R.value>(a, r, data<const int8_t>(w), data<const int8_t>(residual), data<const bf16>(scales), n, data<bf16>(out) + r * N, N);
    });
  }
  return out;
}

void expect_dense(const Tensor& out, int64_t N, int64_t k) {
  expect(out.dim() == 2 && out.size(0) == N && out.size(1) == k && out.is_contiguous(), "a dense matrix [N, k] is expected");
  is_bf16(out);
}

void widen_int4_rows(Tensor w, Tensor scales, int64_t group, Tensor out) {
  const int64_t N = w.size(0), k = w.size(1) * 2;
  expect(w.dim() == 2 && w.is_contiguous() && k % BLOCK == 0 && group % HALF == 0 && k % group == 0, "int4 weights [N, k / 2], k a multiple of 64 and of group");
  expect(scales.is_contiguous() && scales.dim() == 3 && scales.size(0) == N && scales.size(1) == k / group && scales.scalar_type() == ScalarType::BFloat16,
         "bf16 scales [N, k / group, 2]");
  expect_dense(out, N, k);
  const auto all = [&](auto* to) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; ++n) widen_int4(data<const uint8_t>(w) + n * k / 2, data<const bf16>(scales) + n * (k / group) * 2, k, group, to + n * k);
  };
  is_bf16(out) ? all(data<bf16>(out)) : all(data<float>(out));
}

void widen_nested_rows(Tensor w, Tensor residual, Tensor scales, Tensor out) {
  expect_nested(w, residual, scales);
  const int64_t N = w.size(0), k = w.size(1);
  expect_dense(out, N, k);
  const bool narrow = is_bf16(scales);
  const auto all = [&](auto* to) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; ++n) {
      const float scale = narrow ? widen(data<const bf16>(scales)[n]) : data<const float>(scales)[n];
      widen_nested(data<const int8_t>(w) + n * k, data<const int8_t>(residual) + n * k, scale, k, to + n * k);
    }
  };
  is_bf16(out) ? all(data<bf16>(out)) : all(data<float>(out));
}

// -- attention over a prompt ------------------------------------------------------------------------------------------

#ifdef PDQ_PREFILL
// q [B, H, P, D], k and v [B, heads, P, D] of bf16, D contiguous → [B, P, H, D]. window: positions that a query sees.
Tensor causal(Tensor q, Tensor k, Tensor v, double scaling, int64_t window) {
  for (const Tensor* t : {&q, &k, &v})
    expect(t->dim() == 4 && t->scalar_type() == ScalarType::BFloat16 && t->stride(3) == 1, "[B, heads, P, D] of bf16, D contiguous, is expected");
  const int64_t B = q.size(0), H = q.size(1), P = q.size(2), D = q.size(3), heads = k.size(1);
  for (const Tensor* t : {&k, &v})
    expect(t->size(0) == B && t->size(1) == heads && t->size(2) == P && t->size(3) == D, "keys and values of the queries' positions are expected");
  expect(H % heads == 0 && D % 32 == 0 && window > 0 && P <= INT32_MAX, "heads of a multiple of 32, and a window");
  Tensor out = torch::stable::new_empty(q, {B, P, H, D});
  const auto view = [](const Tensor& t) { return wide::Heads{data<const bf16>(t), t.stride(0), t.stride(1), t.stride(2)}; };
  wide::attend_prompt(view(q), view(k), view(v), B, H, heads, P, D, static_cast<float>(scaling), std::min(window, P), data<bf16>(out));
  return out;
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY(pdq_native, m) {
#ifdef PDQ_PREFILL
  m.def("causal(Tensor q, Tensor k, Tensor v, float scaling, int window) -> Tensor");
#endif
  m.def("dense(Tensor x, Tensor w) -> Tensor");
  m.def("int8(Tensor x, Tensor w, Tensor scales, bool tokens) -> Tensor");
  m.def("int4(Tensor x, Tensor w, Tensor scales, int group, bool tokens) -> Tensor");
  m.def("nested(Tensor x, Tensor w, Tensor residual, Tensor scales) -> Tensor");
  m.def("widen_int4(Tensor w, Tensor scales, int group, Tensor(a!) out) -> ()");
  m.def("widen_nested(Tensor w, Tensor residual, Tensor scales, Tensor(a!) out) -> ()");
  m.def("attend(Tensor q, Tensor data, Tensor scale, Tensor low, int count, Tensor mask, float scaling, float softcap) -> Tensor");
  m.def("put(Tensor keys, Tensor values, Tensor(a!) data, Tensor(b!) scale, Tensor(c!) low, int slot) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pdq_native, CPU, m) {
#ifdef PDQ_PREFILL
  m.impl("causal", TORCH_BOX(&causal));
#endif
  m.impl("dense", TORCH_BOX(&dense));
  m.impl("int8", TORCH_BOX(&int8));
  m.impl("int4", TORCH_BOX(&int4));
  m.impl("nested", TORCH_BOX(&nested));
  m.impl("widen_int4", TORCH_BOX(&widen_int4_rows));
  m.impl("widen_nested", TORCH_BOX(&widen_nested_rows));
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("put", TORCH_BOX(&put));
}
