// Operators of torch's stable C++ interface: what multiplies packed weights on a CPU with AVX2, or better.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <omp.h>

#include <memory>
#include <mutex>
#include <unordered_map>

#include "layer.h"
#include "many.h"
#include "prefill.h"

namespace {

using namespace pdq;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

void expect(bool fact, const char* what) { STD_TORCH_CHECK(fact, what); }

void expect_rows(const Tensor& x, const Tensor& w) {
  expect(x.dim() == 2 && w.dim() == 2 && x.is_contiguous() && w.is_contiguous(), "x [rows, K] and w [N, k] must be contiguous");
}

bool is_bf16(const Tensor& t) {
  const auto type = t.scalar_type();
  expect(type == ScalarType::BFloat16 || type == ScalarType::Float, "bf16 or float32 is expected");
  return type == ScalarType::BFloat16;
}

// -- one matrix -------------------------------------------------------------------------------------------------------

// x [rows, K] → [rows, N].
Tensor product(const Tensor& x, const Linear& w) {
  Tensor out = torch::stable::new_empty(x, {x.size(0), w.N});
  is_bf16(x) ? multiply_rows<bf16>({w}, data<const bf16>(x), x.size(0), {data<bf16>(out)})
             : multiply_rows<float>({w}, data<const float>(x), x.size(0), {data<float>(out)});
  return out;
}

Tensor dense(Tensor x, Tensor w) {
  expect_rows(x, w);
  expect(x.size(1) == w.size(1) && x.scalar_type() == w.scalar_type(), "x [rows, K] and w [N, K] of one dtype");
  return product(x, {Form::dense, w.size(0), x.size(1), x.size(1), 0, w.data_ptr(), nullptr, nullptr, nullptr});
}

// tokens: activations as −127…127 with one scale a row (W8A8), else as 16-bit whole numbers by blocks (W8A16).
Tensor int8(Tensor x, Tensor w, Tensor scales, bool tokens) {
  expect_rows(x, w);
  expect(w.size(1) % BLOCK == 0 && x.size(1) <= w.size(1), "int8 weights [N, k] with k a multiple of 64");
  expect(scales.size(0) == w.size(0) && scales.is_contiguous() && scales.scalar_type() == x.scalar_type(), "one scale a channel");
  return product(x, {tokens ? Form::w8a8 : Form::int8, w.size(0), x.size(1), w.size(1), 0, w.data_ptr(), scales.data_ptr(), nullptr, nullptr});
}

// tokens: activations as −127…127 with one scale a row (W4A8), else as 16-bit whole numbers by blocks (W4A16).
Tensor int4(Tensor x, Tensor w, Tensor scales, int64_t group, bool tokens) {
  expect_rows(x, w);
  const int64_t k = w.size(1) * 2;
  expect(k % BLOCK == 0 && x.size(1) <= k && group % HALF == 0 && (group == HALF || group % BLOCK == 0) && k % group == 0,
         "int4 weights [N, k / 2], k a multiple of 64 and of group, group 32 or a multiple of 64");
  expect(scales.is_contiguous() && scales.dim() == 3 && scales.size(0) == w.size(0) && scales.size(1) == k / group, "scales [N, k / group, 2]");
  expect(is_bf16(x) && scales.scalar_type() == ScalarType::BFloat16, "int4 takes bf16");
  return product(x, {tokens ? Form::w4a8 : Form::int4, w.size(0), x.size(1), k, group, w.data_ptr(), scales.data_ptr(), nullptr, nullptr});
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
  return product(x, {Form::nested, w.size(0), x.size(1), w.size(1), 0, w.data_ptr(), scales.data_ptr(), residual.data_ptr(), nullptr});
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
  expect(H % heads == 0 && D % 32 == 0 && window > 0 && scaling > 0 && P <= T && T <= INT32_MAX, "heads of a multiple of 32, a window, a scale above 0, and keys of all queries");
  Tensor out = torch::stable::new_empty(q, {B, P, H, D});
  const auto view = [](const Tensor& t) { return wide::Heads{data<const bf16>(t), t.stride(0), t.stride(1), t.stride(2)}; };
  wide::attend_prompt(view(q), view(k), view(v), B, H, heads, P, T, D, static_cast<float>(scaling), std::min(window, T), data<bf16>(out));
  return out;
}
#endif

// -- a whole decoder layer --------------------------------------------------------------------------------------------

// Norms stand before the matrices in what describes a layer.
constexpr int64_t NORMS = 4;

// tensors: from `begin` on weight, scales, residual and bias of each matrix, empty where there is none; numbers: form, K and group.
template <typename T>
Linear linear_of(const std::vector<Tensor>& tensors, int64_t begin, const std::vector<int64_t>& numbers, int64_t which) {
  const Tensor *given = tensors.data() + begin + 4 * which, &w = given[0];
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

// A layer that was described once, and what keeps its memory: to hand over 32 tensors at every call takes some ten microseconds.
struct Prepared {
  std::vector<Tensor> kept;
  bool narrow;
  int64_t D;
  Layer<bf16> of_bf16;
  Layer<float> of_float;

  template <typename T>
  const Layer<T>& of() const {
    if constexpr (std::is_same_v<T, bf16>) return of_bf16;
    else return of_float;
  }
};

// Never destroyed: a model may outlive what the system tears down at its end.
struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<const Prepared>> layers;
  int64_t next = 1;

  static Registry& the() {
    static Registry* one = new Registry;
    return *one;
  }
  std::shared_ptr<const Prepared> get(int64_t id) {
    const std::lock_guard lock(mutex);
    const auto found = layers.find(id);
    expect(found != layers.end(), "a layer that was prepared and not forgotten is expected");
    return found->second;
  }
};

template <typename T>
Layer<T> layer_of(const std::vector<Tensor>& tensors, const std::vector<int64_t>& numbers, int64_t D, double eps) {
  const auto one = [&](int64_t i) { return linear_of<T>(tensors, NORMS, numbers, i); };
  const Linear q = one(0), k = one(1), v = one(2), o = one(3), gate = one(4), up = one(5), down = one(6);
  const int64_t hidden = down.N, inner = gate.N;
  constexpr ScalarType own = std::is_same_v<T, bf16> ? ScalarType::BFloat16 : ScalarType::Float;
  const auto norm = [&](int64_t i, int64_t n) -> const T* {
    if (tensors[i].numel() == 0 && i >= 2) return nullptr;
    expect(tensors[i].numel() == n && tensors[i].scalar_type() == own && tensors[i].is_contiguous(), "norms of the model's dtype");
    return data<const T>(tensors[i]);
  };
  expect(D > 0 && q.N % D == 0 && k.N % D == 0 && v.N == k.N && q.N % k.N == 0, "the heads do not belong together");
  expect(q.K == hidden && k.K == hidden && v.K == hidden && o.K == q.N && o.N == hidden && gate.K == hidden && up.K == hidden && up.N == inner &&
             down.K == inner && inner % 8 == 0,
         "the matrices do not belong together");
  return {q, k, v, o, gate, up, down, norm(0, hidden), norm(1, hidden), norm(2, D), norm(3, D), static_cast<float>(eps)};
}

// tensors: both norms, the heads' norms or empty, then as in linear_of of q, k, v, o, gate, up, down; D: a head's size → the layer's
// number. It holds its tensors until it is forgotten.
int64_t prepare_layer(std::vector<Tensor> tensors, std::vector<int64_t> numbers, int64_t D, double eps) {
  expect(tensors.size() == 32 && numbers.size() == 21, "32 tensors and 21 numbers describe a layer");
  auto made = std::make_shared<Prepared>();
  made->narrow = is_bf16(tensors[0]), made->D = D;
  if (made->narrow) made->of_bf16 = layer_of<bf16>(tensors, numbers, D, eps);
  else made->of_float = layer_of<float>(tensors, numbers, D, eps);
  made->kept = std::move(tensors);
  Registry& all = Registry::the();
  const std::lock_guard lock(all.mutex);
  all.layers.emplace(all.next, std::move(made));
  return all.next++;
}

void forget_layer(int64_t id) {
  Registry& all = Registry::the();
  std::shared_ptr<const Prepared> last;  // let go outside of the lock
  const std::lock_guard lock(all.mutex);
  const auto found = all.layers.find(id);
  if (found == all.layers.end()) return;
  last = std::move(found->second);
  all.layers.erase(found);
}

// x [B, 1, hidden], cos and sin [B or 1, 1, D]. mean, spread: of the channels of keys, or empty. The new position is written to `slot`
// of the layer's cache, and the first `count` slots are attended over.
Tensor layer(Tensor x, Tensor cos, Tensor sin, int64_t id, double scaling, Tensor cache_data, Tensor cache_scale, Tensor cache_low, Tensor mean,
             Tensor spread, int64_t slot, int64_t count, Tensor mask) {
  const std::shared_ptr<const Prepared> prepared = Registry::the().get(id);
  expect(x.dim() == 3 && x.size(1) == 1 && x.is_contiguous() && is_bf16(x) == prepared->narrow, "x [B, 1, hidden] of the layer's dtype");
  const int64_t B = x.size(0), hidden = x.size(2), D = prepared->D;
  for (const Tensor* t : {&cos, &sin})
    expect(t->dim() == 3 && t->is_contiguous() && (t->size(0) == B || t->size(0) == 1) && t->size(1) == 1 && t->size(2) == D && t->scalar_type() == x.scalar_type(),
           "cos and sin [B, 1, D]");
  expect(cos.size(0) == sin.size(0), "cos and sin of the same rows");
  Tensor out = torch::stable::new_empty(x, {B, 1, hidden});
  const auto all = [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    const Layer<T>& made = prepared->of<T>();
    const LayerCache cache(cache_data, cache_scale, cache_low, D);
    expect(made.down.N == hidden && cache.B == B && made.k.N == cache.kv_heads * D && slot >= 0 && slot < count, "the layer and the cache do not belong together");
    Channels channels{nullptr, nullptr};
    if (mean.numel() != 0) {
      for (const Tensor* t : {&mean, &spread})
        expect(t->numel() == B * cache.kv_heads * D && t->is_contiguous() && t->scalar_type() == ScalarType::Float, "channels [B, kv_heads, 1, D] of float32");
      channels = {data<const float>(mean), data<const float>(spread)};
    }
    Attention attention(cache, made.q.N / D, count, mask, scaling, 0.0);
    const Turns<T> turns{data<const T>(cos), data<const T>(sin), cos.size(0) == 1 ? 0 : D};
    run_layer(made, data<const T>(x), turns, channels, attention, slot, data<T>(out));
  };
  prepared->narrow ? all(static_cast<bf16*>(nullptr)) : all(static_cast<float*>(nullptr));
  return out;
}

// -- what stands around the matrices of a prompt ----------------------------------------------------------------------

// Calls f(a null pointer of the element type) for bf16 or float32.
template <typename F>
void typed(const Tensor& t, F f) {
  is_bf16(t) ? f(static_cast<bf16*>(nullptr)) : f(static_cast<float*>(nullptr));
}

template <typename F>
void every(int64_t rows, F f) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) f(r);
}

void expect_like(const Tensor& x, const Tensor& other) {
  expect(x.is_contiguous() && other.is_contiguous() && x.numel() == other.numel() && x.scalar_type() == other.scalar_type(),
         "contiguous tensors of one shape and dtype are expected");
}

// x [..., n] → its RMS norm times weight [n].
Tensor norm(Tensor x, Tensor weight, double eps) {
  const int64_t n = x.size(-1);
  expect(x.is_contiguous() && weight.numel() == n && weight.is_contiguous() && weight.scalar_type() == x.scalar_type(), "x [..., n] and a norm of n");
  Tensor out = torch::stable::empty_like(x);
  typed(x, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    every(x.numel() / n, [&](int64_t r) { rms_norm(data<const T>(x) + r * n, data<const T>(weight), n, static_cast<float>(eps), data<T>(out) + r * n); });
  });
  return out;
}

// state += x, both [..., n] → the norm of that.
Tensor add_norm(Tensor state, Tensor x, Tensor weight, double eps) {
  const int64_t n = x.size(-1);
  expect_like(state, x);
  expect(weight.numel() == n && weight.is_contiguous() && weight.scalar_type() == x.scalar_type(), "a norm of n");
  Tensor out = torch::stable::empty_like(x);
  typed(x, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    every(x.numel() / n, [&](int64_t r) {
      T* to = data<T>(state) + r * n;
      add_row(data<const T>(x) + r * n, n, to);
      rms_norm(to, data<const T>(weight), n, static_cast<float>(eps), data<T>(out) + r * n);
    });
  });
  return out;
}

// state += x.
void add(Tensor state, Tensor x) {
  const int64_t n = x.size(-1);
  expect_like(state, x);
  typed(x, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    every(x.numel() / n, [&](int64_t r) { add_row(data<const T>(x) + r * n, n, data<T>(state) + r * n); });
  });
}

// x [B, P, heads · D] in place: every head's row normed by weight [D], where it is not empty, and turned by cos and sin [B or 1, P, D].
void turn(Tensor x, Tensor cos, Tensor sin, Tensor weight, double eps) {
  expect(x.dim() == 3 && x.is_contiguous() && cos.dim() == 3 && cos.is_contiguous() && cos.size(1) == x.size(1), "x [B, P, heads · D], cos and sin [B or 1, P, D]");
  expect_like(cos, sin);
  const int64_t B = x.size(0), P = x.size(1), N = x.size(2), D = cos.size(2);
  expect((cos.size(0) == B || cos.size(0) == 1) && N % D == 0 && D % 2 == 0 && cos.scalar_type() == x.scalar_type(), "cos and sin of the heads' size and dtype");
  expect(weight.numel() == 0 || (weight.numel() == D && weight.is_contiguous() && weight.scalar_type() == x.scalar_type()), "a norm of a head");
  typed(x, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    const T* by = weight.numel() == 0 ? nullptr : data<const T>(weight);
#pragma omp parallel
    {
      std::vector<float> room(D);
#pragma omp for schedule(static)
      for (int64_t r = 0; r < B * P; ++r) {
        const int64_t at = (cos.size(0) == 1 ? r % P : r) * D;
        for (T *head = data<T>(x) + r * N, *end = head + N; head < end; head += D)
          turned(head, by, static_cast<float>(eps), data<const T>(cos) + at, data<const T>(sin) + at, D, room.data(), head);
      }
    }
  });
}

// gate = silu(gate) · up, both [..., n].
void gated(Tensor gate, Tensor up) {
  const int64_t n = gate.size(-1);
  expect_like(gate, up);
  expect(n % 8 == 0, "rows of a multiple of 8");
  typed(gate, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    every(gate.numel() / n, [&](int64_t r) { silu_times(data<const T>(gate) + r * n, data<const T>(up) + r * n, n, data<T>(gate) + r * n); });
  });
}

// x [rows, K] through some matrices (`linear_of`) → outs [rows, N] each.
void products(Tensor x, std::vector<Tensor> tensors, std::vector<int64_t> numbers, std::vector<Tensor> outs) {
  expect(x.dim() == 2 && x.is_contiguous() && tensors.size() == 4 * outs.size() && numbers.size() == 3 * outs.size(), "4 tensors and 3 numbers a matrix");
  typed(x, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    std::vector<Linear> matrices;
    std::vector<T*> to;
    for (size_t i = 0; i < outs.size(); ++i) {
      matrices.push_back(linear_of<T>(tensors, 0, numbers, static_cast<int64_t>(i)));
      expect(matrices[i].K == x.size(1) && outs[i].is_contiguous() && outs[i].numel() == x.size(0) * matrices[i].N && outs[i].scalar_type() == x.scalar_type(),
             "results [rows, N] of x [rows, K]");
      to.push_back(data<T>(outs[i]));
    }
    multiply_rows<T>(matrices, data<const T>(x), x.size(0), to);
  });
}

}  // namespace

// Operators by several names: what a profiler shows says which form the matrices have, and how many one call multiplies.
constexpr const char* WORDS[] = {"dense", "int8", "int4", "nested", "mixed"};
constexpr int MOST_PRODUCTS = 3;

STABLE_TORCH_LIBRARY(pdq_native, m) {
  for (const std::string word : WORDS) {
    const std::string schema = "layer_" + word +
        "(Tensor x, Tensor cos, Tensor sin, int layer, float scaling, Tensor(a!) data, Tensor(b!) scale, Tensor(c!) low, Tensor mean, "
        "Tensor spread, int slot, int count, Tensor mask) -> Tensor";
    m.def(schema.c_str());
    for (int n = 1; n <= MOST_PRODUCTS; ++n)
      m.def(("products_" + word + "_" + std::to_string(n) + "(Tensor x, Tensor[] tensors, int[] numbers, Tensor(a!)[] outs) -> ()").c_str());
  }
#ifdef PDQ_PREFILL
  m.def("causal(Tensor q, Tensor k, Tensor v, float scaling, int window) -> Tensor");
#endif
  m.def("prepare_layer(Tensor[] tensors, int[] numbers, int head, float eps) -> int");
  m.def("forget_layer(int layer) -> ()");
  m.def("norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_norm(Tensor(a!) state, Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add(Tensor(a!) state, Tensor x) -> ()");
  m.def("turn(Tensor(a!) x, Tensor cos, Tensor sin, Tensor weight, float eps) -> ()");
  m.def("gated(Tensor(a!) gate, Tensor up) -> ()");
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
  for (const std::string word : WORDS) {
    m.impl(("layer_" + word).c_str(), TORCH_BOX(&layer));
    for (int n = 1; n <= MOST_PRODUCTS; ++n) m.impl(("products_" + word + "_" + std::to_string(n)).c_str(), TORCH_BOX(&products));
  }
#ifdef PDQ_PREFILL
  m.impl("causal", TORCH_BOX(&causal));
#endif
  m.impl("prepare_layer", TORCH_BOX(&prepare_layer));
  m.impl("norm", TORCH_BOX(&norm));
  m.impl("add_norm", TORCH_BOX(&add_norm));
  m.impl("add", TORCH_BOX(&add));
  m.impl("turn", TORCH_BOX(&turn));
  m.impl("gated", TORCH_BOX(&gated));
  m.impl("dense", TORCH_BOX(&dense));
  m.impl("int8", TORCH_BOX(&int8));
  m.impl("int4", TORCH_BOX(&int4));
  m.impl("nested", TORCH_BOX(&nested));
  m.impl("widen_int4", TORCH_BOX(&widen_int4_rows));
  m.impl("widen_nested", TORCH_BOX(&widen_nested_rows));
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("put", TORCH_BOX(&put));
}

// No tensor says where it belongs.
STABLE_TORCH_LIBRARY_IMPL(pdq_native, CompositeExplicitAutograd, m) { m.impl("forget_layer", TORCH_BOX(&forget_layer)); }
