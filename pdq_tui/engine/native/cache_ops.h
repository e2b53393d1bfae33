// Operators over the KV cache: attention of one new token a sequence, and writing rows in their format.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <omp.h>

#include "attention.h"
#include "cache_rows.h"

namespace pdq {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Positions of one piece of work: fewer would not pay for joining them.
constexpr int64_t LEAST_PIECE = 256;

inline bool is(const Tensor& t, ScalarType type) { return t.scalar_type() == type; }

inline void expect_cache(const Tensor& data, const Tensor& scale, const Tensor& low, int64_t D) {
  STD_TORCH_CHECK(data.dim() == 5 && data.is_contiguous() && data.size(0) == 2, "a layer's cache [2, B, kv_heads, slots, width] is expected");
  STD_TORCH_CHECK(D % 8 == 0 && data.size(4) == (is(data, ScalarType::Byte) ? D / 2 : D), "heads of a multiple of 8");
  if (is(data, ScalarType::Float) || is(data, ScalarType::BFloat16)) return;
  const auto fits = [&](const Tensor& t) {
    return t.dim() == 5 && t.is_contiguous() && is(t, ScalarType::BFloat16) && t.size(3) == data.size(3) && t.size(2) == data.size(2) && t.size(1) == data.size(1);
  };
  STD_TORCH_CHECK(fits(scale), "bf16 scales of the same rows are expected");
  if (!is(data, ScalarType::Byte)) return;
  STD_TORCH_CHECK(fits(low) && D % 16 == 0 && D % scale.size(4) == 0 && D / scale.size(4) % 8 == 0, "groups of a multiple of 8");
}

// Calls f(Row type) for the format that ``data`` is in.
template <typename F>
void with_row(const Tensor& data, F f) {
  switch (data.scalar_type()) {
    case ScalarType::Float: return f(static_cast<PlainRow<float>*>(nullptr));
    case ScalarType::BFloat16: return f(static_cast<PlainRow<bf16>*>(nullptr));
    case ScalarType::Char: return f(static_cast<Int8Row*>(nullptr));
    case ScalarType::Float8_e4m3fn: return f(static_cast<Fp8Row*>(nullptr));
    case ScalarType::Byte: return f(static_cast<Int4Row*>(nullptr));
    default: STD_TORCH_CHECK(false, "float32, bf16, int8, fp8 or packed int4 is expected");
  }
}

template <typename Row>
void pieces(const Stored& from, int64_t G, int64_t base, int64_t first, int64_t last, const float* query, const float* mask, float scaling,
            float softcap, float* largest, float* sum, float* out) {
  for (int64_t g = 0; g < G; g += HEADS) {
    const auto call = [&](auto R) {
      piece<Row, R.value>(from, base, first, last, query + g * from.D, mask, scaling, softcap, largest + g, sum + g, out + g * from.D);
    };
    switch (std::min(HEADS, G - g)) {
      case 4: call(std::integral_constant<int, 4>{}); break;
      case 3: call(std::integral_constant<int, 3>{}); break;
      case 2: call(std::integral_constant<int, 2>{}); break;
      default: call(std::integral_constant<int, 1>{});
    }
  }
}

// q [B, H, D] float32 or bf16 over the first ``count`` slots → [B, H, D]. mask: float32 [B, at least count], added to the
// scores, or empty. softcap: 0 for none. scale, low: empty where the format has none.
inline Tensor attend(Tensor q, Tensor data, Tensor scale, Tensor low, int64_t count, Tensor mask, double scaling, double softcap) {
  STD_TORCH_CHECK(q.dim() == 3 && q.is_contiguous() && (is(q, ScalarType::Float) || is(q, ScalarType::BFloat16)), "q [B, H, D] in float32 or bf16 is expected");
  const int64_t B = q.size(0), H = q.size(1), D = q.size(2), kv_heads = data.size(2), slots = data.size(3), G = H / kv_heads;
  expect_cache(data, scale, low, D);
  STD_TORCH_CHECK(data.size(1) == B && H % kv_heads == 0 && count > 0 && count <= slots, "q and the cache do not belong together");
  const bool masked = mask.numel() != 0;
  STD_TORCH_CHECK(!masked || (mask.dim() == 2 && mask.size(0) == B && mask.size(1) >= count && mask.stride(1) == 1 && is(mask, ScalarType::Float)),
                  "mask [B, count] in float32 is expected");
  std::vector<float> wide(B * H * D);
  for (int64_t i = 0; i < B * H * D; ++i)
    wide[i] = is(q, ScalarType::Float) ? static_cast<const float*>(q.data_ptr())[i] : widen(static_cast<const bf16*>(q.data_ptr())[i]);

  const int64_t groups = is(data, ScalarType::Byte) ? scale.size(4) : 1, group = D / groups;
  const int64_t width = data.size(4) * (is(data, ScalarType::Float) ? 4 : is(data, ScalarType::BFloat16) ? 2 : 1);
  const int64_t rows = B * kv_heads * slots;
  const auto half = [&](const Tensor& t, int which) -> const bf16* {
    return t.numel() == 0 ? nullptr : static_cast<const bf16*>(t.data_ptr()) + which * rows * groups;
  };
  const char* bytes = static_cast<const char*>(data.data_ptr());
  const Stored from{{bytes, bytes + rows * width}, {half(scale, 0), half(scale, 1)}, {half(low, 0), half(low, 1)}, D, group};

  const int64_t heads = B * kv_heads;
  const int64_t wanted = (omp_get_max_threads() * 2 + heads - 1) / heads;
  const int64_t most = (count + LEAST_PIECE - 1) / LEAST_PIECE;
  const int64_t cuts = std::max<int64_t>(1, std::min(wanted, most));
  const int64_t each = ((count + cuts - 1) / cuts + POSITIONS - 1) / POSITIONS * POSITIONS;
  std::vector<float> largest(heads * cuts * G, -std::numeric_limits<float>::infinity()), sum(heads * cuts * G, 0.0f);
  std::vector<float> parts(heads * cuts * G * D, 0.0f);
  with_row(data, [&](auto* kind) {
    using Row = std::remove_pointer_t<decltype(kind)>;
#pragma omp parallel for schedule(static)
    for (int64_t item = 0; item < heads * cuts; ++item) {
      const int64_t head = item / cuts, first = item % cuts * each, last = std::min(count, first + each);
      const float* columns = masked ? static_cast<const float*>(mask.data_ptr()) + head / kv_heads * mask.stride(0) : nullptr;
      pieces<Row>(from, G, head * slots, first, last, wide.data() + head * G * D, columns, static_cast<float>(scaling), static_cast<float>(softcap),
                  &largest[item * G], &sum[item * G], &parts[item * G * D]);
    }
  });

  Tensor out = torch::stable::new_empty(q, {B, H, D});
  std::vector<float> joined(D);
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t g = 0; g < G; ++g) {
      float top = -std::numeric_limits<float>::infinity();
      for (int64_t c = 0; c < cuts; ++c) top = std::fmax(top, largest[(head * cuts + c) * G + g]);
      float total = 0.0f;
      std::fill(joined.begin(), joined.end(), 0.0f);
      for (int64_t c = 0; c < cuts; ++c) {
        const int64_t at = (head * cuts + c) * G + g;
        if (sum[at] == 0.0f) continue;  // a piece of masked positions, or none
        const float by = std::exp(largest[at] - top);
        total += sum[at] * by;
        for (int64_t i = 0; i < D; ++i) joined[i] += parts[at * D + i] * by;
      }
      const int64_t to = (head * G + g) * D;
      for (int64_t i = 0; i < D; ++i) {
        const float value = joined[i] / total;
        if (is(q, ScalarType::Float)) static_cast<float*>(out.data_ptr())[to + i] = value;
        else static_cast<bf16*>(out.data_ptr())[to + i] = narrow_bf16(value);
      }
    }
  return out;
}

// Writes keys and values [B, kv_heads, n, D] (float32 or bf16, D contiguous) into the slots from ``slot`` on.
inline void put(Tensor keys, Tensor values, Tensor data, Tensor scale, Tensor low, int64_t slot) {
  const int64_t B = keys.size(0), heads = keys.size(1), n = keys.size(2), D = keys.size(3), slots = data.size(3);
  expect_cache(data, scale, low, D);
  STD_TORCH_CHECK(data.size(1) == B && data.size(2) == heads && slot >= 0 && slot + n <= slots, "the rows do not fit the cache");
  for (const Tensor* t : {&keys, &values})
    STD_TORCH_CHECK(t->dim() == 4 && t->stride(3) == 1 && t->size(2) == n && t->scalar_type() == keys.scalar_type() &&
                        (is(*t, ScalarType::Float) || is(*t, ScalarType::BFloat16)),
                    "keys and values [B, kv_heads, n, D] in float32 or bf16 are expected");
  const int64_t groups = is(data, ScalarType::Byte) ? scale.size(4) : 1;
  const bool wide = is(keys, ScalarType::Float);
  const ScalarType kind = data.scalar_type();
  STD_TORCH_CHECK(kind == ScalarType::Char || kind == ScalarType::Float8_e4m3fn || kind == ScalarType::Byte, "int8, fp8 or packed int4 is expected");
  const int64_t total = 2 * B * heads * n;
#pragma omp parallel if (total >= 64)
  {
    std::vector<float> row(D);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < total; ++item) {
      const int64_t which = item / (B * heads * n), b = item / (heads * n) % B, h = item / n % heads, t = item % n;
      const Tensor& from = which ? values : keys;
      const int64_t at = b * from.stride(0) + h * from.stride(1) + t * from.stride(2);
      if (wide) std::memcpy(row.data(), static_cast<const float*>(from.data_ptr()) + at, D * sizeof(float));
      else for (int64_t i = 0; i < D; ++i) row[i] = widen(static_cast<const bf16*>(from.data_ptr())[at + i]);
      const int64_t to = ((which * B + b) * heads + h) * slots + slot + t;
      uint8_t* codes = static_cast<uint8_t*>(data.data_ptr()) + to * data.size(4);
      bf16* scales = static_cast<bf16*>(scale.data_ptr()) + to * groups;
      if (kind == ScalarType::Char) encode_int8(row.data(), D, reinterpret_cast<int8_t*>(codes), scales);
      else if (kind == ScalarType::Float8_e4m3fn) encode_fp8(row.data(), D, codes, scales);
      else encode_int4(row.data(), D, D / groups, codes, scales, static_cast<bf16*>(low.data_ptr()) + to * groups);
    }
  }
}

}  // namespace pdq
