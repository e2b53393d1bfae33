// Operators of torch's stable C++ interface: what multiplies packed weights on a CPU with AVX2, or better.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <omp.h>

#include "layer.h"
#include "prefill.h"

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

// -- weights of the model's own dtype ---------------------------------------------------------------------------------

template <typename T>
void run_few(const Linear& w, const Tensor& x, Tensor& out) {
  few_rows(w, Input<T>(data<const T>(x), x.size(0), w), data<T>(out));
}

Tensor dense(Tensor x, Tensor w) {
  expect_rows(x, w);
  expect(x.size(1) == w.size(1) && x.scalar_type() == w.scalar_type(), "x [rows, K] and w [N, K] of one dtype");
  Tensor out = result(x, w.size(0));
  const Linear linear{Form::dense, w.size(0), x.size(1), x.size(1), 0, w.data_ptr(), nullptr, nullptr, nullptr};
  is_bf16(x) ? run_few<bf16>(linear, x, out) : run_few<float>(linear, x, out);
  return out;
}

// -- int8 -------------------------------------------------------------------------------------------------------------

// More rows than `few_rows` is for.
template <typename T>
void run_int8(const Tensor& x, const Tensor& w, const Tensor& scales, bool tokens, Tensor& out) {
  const int64_t rows = x.size(0), N = w.size(0), k = w.size(1);
  Activations a;
  quantize_rows(data<const T>(x), rows, x.size(1), k, tokens, false, a);
  const int8_t* weights = data<const int8_t>(w);
  const T* by = data<const T>(scales);
  T* to = data<T>(out);
#ifdef PDQ_WIDE
  const auto wide_scales = [&](int64_t n, float* scale, float*) {
    for (int64_t c = 0; c < std::min(wide::PANEL, N - n); ++c) scale[c] = widen(by[n + c]);
  };
  if (tokens) {
    const wide::Bytes bytes(a);
    const wide::Tiles tiles(bytes.q.data(), rows, k / 4);
    const auto unpack = [&](int64_t n, int64_t c) { return wide::bytes_int8(weights + n * k + c); };
    const auto expand = [&](int64_t n, int32_t* panel) { wide::panel_bytes(unpack, k, n, N, panel); };
    wide::multiply_all(wide::TokensPanel{a, tiles, bytes.sum.data()}, rows, k / 4, N, 1, 0, expand, wide_scales, to);
    return;
  }
  const wide::Tiles tiles(a.q.data(), rows, k / 2);
  const auto unpack = [&](int64_t n, int64_t c, __m512i two[2]) { wide::words_int8(weights + n * k + c, two); };
  const auto expand = [&](int64_t n, int32_t* panel) { wide::panel_words(unpack, k, n, N, panel); };
  wide::multiply_all(wide::BlocksPanel{a, tiles}, rows, k / 2, N, 1, 0, expand, wide_scales, to);
#else
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
#endif
}

// tokens: activations as −127…127 with one scale a row (W8A8), else as 16-bit whole numbers by blocks (W8A16).
Tensor int8(Tensor x, Tensor w, Tensor scales, bool tokens) {
  expect_rows(x, w);
  expect(w.size(1) % BLOCK == 0 && x.size(1) <= w.size(1), "int8 weights [N, k] with k a multiple of 64");
  expect(scales.size(0) == w.size(0) && scales.is_contiguous() && scales.scalar_type() == x.scalar_type(), "one scale a channel");
  Tensor out = result(x, w.size(0));
  const Form form = tokens ? Form::w8a8 : Form::int8;
  const Linear linear{form, w.size(0), x.size(1), w.size(1), 0, w.data_ptr(), scales.data_ptr(), nullptr, nullptr};
  const bool few = x.size(0) <= most_few(form);
  if (is_bf16(x)) few ? run_few<bf16>(linear, x, out) : run_int8<bf16>(x, w, scales, tokens, out);
  else few ? run_few<float>(linear, x, out) : run_int8<float>(x, w, scales, tokens, out);
  return out;
}

// -- int4 in groups ---------------------------------------------------------------------------------------------------

// More rows than `few_rows` is for.
void run_int4(const Tensor& x, const Tensor& w, const Tensor& scales, int64_t group, bool tokens, Tensor& out) {
  const int64_t rows = x.size(0), N = w.size(0), k = w.size(1) * 2, groups = k / group;
  Activations a;
  quantize_rows(data<const bf16>(x), rows, x.size(1), k, tokens, true, a);
  const uint8_t* weights = data<const uint8_t>(w);
  const bf16* by = data<const bf16>(scales);
  bf16* to = data<bf16>(out);
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
  const Form form = tokens ? Form::w4a8 : Form::int4;
  if (x.size(0) <= most_few(form)) run_few<bf16>({form, w.size(0), x.size(1), k, group, w.data_ptr(), scales.data_ptr(), nullptr, nullptr}, x, out);
  else run_int4(x, w, scales, group, tokens, out);
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
  Tensor out = result(x, w.size(0));
  run_few<bf16>({Form::nested, w.size(0), x.size(1), w.size(1), 0, w.data_ptr(), scales.data_ptr(), residual.data_ptr(), nullptr}, x, out);
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
// q [B, H, P, D], the last P of T positions; k and v [B, heads, T, D], all bf16, D contiguous → [B, P, H, D]. window: positions that a query sees.
Tensor causal(Tensor q, Tensor k, Tensor v, double scaling, int64_t window) {
  for (const Tensor* t : {&q, &k, &v})
    expect(t->dim() == 4 && t->scalar_type() == ScalarType::BFloat16 && t->stride(3) == 1, "[B, heads, P, D] of bf16, D contiguous, is expected");
  const int64_t B = q.size(0), H = q.size(1), P = q.size(2), D = q.size(3), heads = k.size(1), T = k.size(2);
  for (const Tensor* t : {&k, &v})
    expect(t->size(0) == B && t->size(1) == heads && t->size(2) == T && t->size(3) == D, "keys and values of the same positions are expected");
  expect(H % heads == 0 && D % 32 == 0 && window > 0 && P <= T && T <= INT32_MAX, "heads of a multiple of 32, a window, and keys of all queries");
  Tensor out = torch::stable::new_empty(q, {B, P, H, D});
  const auto view = [](const Tensor& t) { return wide::Heads{data<const bf16>(t), t.stride(0), t.stride(1), t.stride(2)}; };
  wide::attend_prompt(view(q), view(k), view(v), B, H, heads, P, T, D, static_cast<float>(scaling), std::min(window, T), data<bf16>(out));
  return out;
}
#endif

// -- a whole decoder layer --------------------------------------------------------------------------------------------

// Norms stand before the matrices in what describes a layer.
constexpr int64_t NORMS = 4;

// tensors: the norms, then weight, scales, residual and bias of each of seven matrices, empty where there is none; numbers: form,
// K and group.
template <typename T>
Linear linear_of(const std::vector<Tensor>& tensors, const std::vector<int64_t>& numbers, int64_t which) {
  const Tensor *given = tensors.data() + NORMS + 4 * which, &w = given[0];
  const auto form = static_cast<Form>(numbers[3 * which]);
  const int64_t K = numbers[3 * which + 1], group = numbers[3 * which + 2];
  const auto pointer = [](const Tensor& t) -> const void* { return t.numel() == 0 ? nullptr : t.data_ptr(); };
  constexpr ScalarType own = std::is_same_v<T, bf16> ? ScalarType::BFloat16 : ScalarType::Float;
  for (int i = 0; i < 4; ++i) expect(given[i].is_contiguous(), "contiguous tensors are expected");
  expect(w.dim() == 2 && numbers[3 * which] >= 0 && numbers[3 * which] <= static_cast<int64_t>(Form::nested), "a matrix of a known form");
  Linear made{form, w.size(0), K, w.size(1), group, pointer(w), pointer(given[1]), pointer(given[2]), pointer(given[3])};
  if (form == Form::dense) {
    expect(w.scalar_type() == own && made.k == K, "dense weights [N, K] of the model's dtype");
  } else if (made.int4()) {
    made.k *= 2;
    expect(w.scalar_type() == ScalarType::Byte && group % HALF == 0 && (group == HALF || group % BLOCK == 0) && made.k % group == 0 &&
               given[1].dim() == 3 && given[1].size(0) == made.N && given[1].size(1) == made.k / group && given[1].size(2) == 2,
           "int4 weights [N, k / 2] in groups, scales [N, k / group, 2]");
  } else {
    expect(w.scalar_type() == ScalarType::Char && given[1].numel() == made.N, "int8 weights [N, k], one scale a channel");
  }
  if (form != Form::dense) expect(given[1].scalar_type() == own && made.k % BLOCK == 0 && K <= made.k, "scales of the model's dtype, k a multiple of 64");
  if (made.int4() || form == Form::nested) expect(own == ScalarType::BFloat16, "int4 and nested take bf16");
  if (form == Form::nested) expect(given[2].scalar_type() == ScalarType::Char && given[2].numel() == w.numel(), "residuals [N, k]");
  expect(made.bias == nullptr || (given[3].scalar_type() == own && given[3].numel() == made.N), "a bias of N");
  return made;
}

// x [B, 1, hidden], cos and sin [B or 1, 1, D]. mean, spread: of the channels of keys, or empty. tensors: both norms, the heads' norms or empty, then as in linear_of of q, k, v, o,
// gate, up, down. The new position is written to `slot` of the layer's cache, and the first `count` slots are attended over.
Tensor layer(Tensor x, Tensor cos, Tensor sin, std::vector<Tensor> tensors, std::vector<int64_t> numbers, double eps, double scaling,
             Tensor cache_data, Tensor cache_scale, Tensor cache_low, Tensor mean, Tensor spread, int64_t slot, int64_t count, Tensor mask) {
  expect(tensors.size() == 32 && numbers.size() == 21, "32 tensors and 21 numbers describe a layer");
  expect(x.dim() == 3 && x.size(1) == 1 && x.is_contiguous(), "x [B, 1, hidden]");
  expect(cos.dim() == 3 && cos.is_contiguous() && sin.is_contiguous(), "cos and sin [B, 1, D]");
  const int64_t B = x.size(0), hidden = x.size(2), D = cos.size(2);
  Tensor out = torch::stable::new_empty(x, {B, 1, hidden});
  const auto all = [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    const auto one = [&](int64_t i) { return linear_of<T>(tensors, numbers, i); };
    const auto norm = [&](int64_t i, int64_t n) -> const T* {
      if (tensors[i].numel() == 0 && i >= 2) return nullptr;
      expect(tensors[i].numel() == n && tensors[i].scalar_type() == x.scalar_type() && tensors[i].is_contiguous(), "norms of the model's dtype");
      return data<const T>(tensors[i]);
    };
    Layer<T> made{one(0), one(1), one(2), one(3), one(4), one(5), one(6), norm(0, hidden), norm(1, hidden), norm(2, D), norm(3, D),
                  static_cast<float>(eps)};
    const LayerCache cache(cache_data, cache_scale, cache_low, D);
    const int64_t H = made.q.N / D, inner = made.gate.N;
    expect(cache.B == B && made.q.N == H * D && made.k.N == cache.kv_heads * D && made.v.N == made.k.N && slot >= 0 && slot < count,
           "the heads and the cache do not belong together");
    expect(made.q.K == hidden && made.k.K == hidden && made.v.K == hidden && made.o.K == H * D && made.o.N == hidden && made.gate.K == hidden &&
               made.up.K == hidden && made.up.N == inner && made.down.K == inner && made.down.N == hidden && inner % 8 == 0,
           "the matrices do not belong together");
    for (const Tensor* t : {&cos, &sin})
      expect(t->dim() == 3 && (t->size(0) == B || t->size(0) == 1) && t->size(1) == 1 && t->size(2) == D && t->scalar_type() == x.scalar_type(), "cos and sin [B, 1, D]");
    expect(cos.size(0) == sin.size(0), "cos and sin of the same rows");
    Channels channels{nullptr, nullptr};
    if (mean.numel() != 0) {
      for (const Tensor* t : {&mean, &spread})
        expect(t->numel() == B * cache.kv_heads * D && t->is_contiguous() && t->scalar_type() == ScalarType::Float, "channels [B, kv_heads, 1, D] of float32");
      channels = {data<const float>(mean), data<const float>(spread)};
    }
    Attention attention(cache, H, count, mask, scaling, 0.0);
    const Turns<T> turns{data<const T>(cos), data<const T>(sin), cos.size(0) == 1 ? 0 : D};
    run_layer(made, data<const T>(x), turns, channels, attention, slot, data<T>(out));
  };
  is_bf16(x) ? all(static_cast<bf16*>(nullptr)) : all(static_cast<float*>(nullptr));
  return out;
}

}  // namespace

// One operator by several names: what a profiler shows says which form the layer's matrices have.
constexpr const char* LAYERS[] = {"layer_dense", "layer_int8", "layer_int4", "layer_nested", "layer_mixed"};

STABLE_TORCH_LIBRARY(pdq_native, m) {
  for (const char* name : LAYERS) {
    const std::string schema = std::string(name) +
        "(Tensor x, Tensor cos, Tensor sin, Tensor[] tensors, int[] numbers, float eps, float scaling, Tensor(a!) data, Tensor(b!) scale, "
        "Tensor(c!) low, Tensor mean, Tensor spread, int slot, int count, Tensor mask) -> Tensor";
    m.def(schema.c_str());
  }
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
  for (const char* name : LAYERS) m.impl(name, TORCH_BOX(&layer));
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
