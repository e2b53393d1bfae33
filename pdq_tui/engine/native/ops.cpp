// Operators of torch's stable C++ interface: what multiplies packed weights on a CPU with AVX2.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <omp.h>

#include "cache_ops.h"
#include "gemm.h"
#include "gemv.h"

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

// Calls f(R, first of R rows, channel) until all rows × channels [first, last) are covered.
template <typename F>
void by_rows(int64_t rows, int64_t first, int64_t last, F f) {
  for (int64_t from = 0; from < rows; from += GEMV_ROWS)
    for (int64_t n = first; n < last; ++n) switch (std::min<int64_t>(GEMV_ROWS, rows - from)) {
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

Tensor dense(Tensor x, Tensor w) {
  expect_rows(x, w);
  expect(x.size(1) == w.size(1) && x.scalar_type() == w.scalar_type(), "x [rows, K] and w [N, K] of one dtype");
  Tensor out = result(x, w.size(0));
  is_bf16(x) ? run_dense<bf16>(x, w, out) : run_dense<float>(x, w, out);
  return out;
}

// -- int8 -------------------------------------------------------------------------------------------------------------

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

void run_int4(const Tensor& x, const Tensor& w, const Tensor& scales, int64_t group, Tensor& out) {
  const int64_t rows = x.size(0), N = w.size(0), k = w.size(1) * 2, groups = k / group;
  Activations a;
  quantize_rows(data<const bf16>(x), rows, x.size(1), k, false, a);
  const uint8_t* weights = data<const uint8_t>(w);
  const bf16* by = data<const bf16>(scales);
  bf16* to = data<bf16>(out);
  if (rows <= 2 * GEMV_ROWS) {
    const Groups shared(a, group);
#pragma omp parallel
    {
      const Share mine(N);
      std::vector<float> room(GEMV_ROWS * shared.units + shared.padded);
      by_rows(rows, mine.first, mine.last, [&](auto R, int64_t r, int64_t n) {
        if (group == HALF) channel_int4<R.value, true>(a, r, shared, weights, by, n, room.data(), to + r * N, N);
        else channel_int4<R.value, false>(a, r, shared, weights, by, n, room.data(), to + r * N, N);
      });
    }
    return;
  }
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
}

Tensor int4(Tensor x, Tensor w, Tensor scales, int64_t group) {
  expect_rows(x, w);
  const int64_t k = w.size(1) * 2;
  expect(k % BLOCK == 0 && x.size(1) <= k && group % HALF == 0 && (group == HALF || group % BLOCK == 0) && k % group == 0,
         "int4 weights [N, k / 2], k a multiple of 64 and of group, group 32 or a multiple of 64");
  expect(scales.is_contiguous() && scales.dim() == 3 && scales.size(0) == w.size(0) && scales.size(1) == k / group, "scales [N, k / group, 2]");
  expect(is_bf16(x) && scales.scalar_type() == ScalarType::BFloat16, "int4 takes bf16");
  Tensor out = result(x, w.size(0));
  run_int4(x, w, scales, group, out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(pdq_native, m) {
  m.def("dense(Tensor x, Tensor w) -> Tensor");
  m.def("int8(Tensor x, Tensor w, Tensor scales, bool tokens) -> Tensor");
  m.def("int4(Tensor x, Tensor w, Tensor scales, int group) -> Tensor");
  m.def("attend(Tensor q, Tensor data, Tensor scale, Tensor low, int count, Tensor mask, float scaling, float softcap) -> Tensor");
  m.def("put(Tensor keys, Tensor values, Tensor(a!) data, Tensor(b!) scale, Tensor(c!) low, int slot) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pdq_native, CPU, m) {
  m.impl("dense", TORCH_BOX(&dense));
  m.impl("int8", TORCH_BOX(&int8));
  m.impl("int4", TORCH_BOX(&int4));
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("put", TORCH_BOX(&put));
}
