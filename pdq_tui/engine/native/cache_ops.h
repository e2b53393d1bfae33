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

// A layer's cache: data, and where the format has them scales and minima by group, of [2, B, kv_heads, slots] rows.
struct LayerCache {
  ScalarType kind;
  int64_t B, kv_heads, slots, D, groups, width;  // width: bytes of a row
  char* data;
  bf16 *scale, *low;

  LayerCache(const Tensor& data_, const Tensor& scale_, const Tensor& low_, int64_t D) : kind(data_.scalar_type()), D(D) {
    expect_cache(data_, scale_, low_, D);
    B = data_.size(1), kv_heads = data_.size(2), slots = data_.size(3);
    const bool plain = kind == ScalarType::Float || kind == ScalarType::BFloat16;
    groups = kind == ScalarType::Byte ? scale_.size(4) : 1;
    width = data_.size(4) * (kind == ScalarType::Float ? 4 : kind == ScalarType::BFloat16 ? 2 : 1);
    data = static_cast<char*>(data_.data_ptr());
    scale = plain ? nullptr : static_cast<bf16*>(scale_.data_ptr());
    low = kind == ScalarType::Byte ? static_cast<bf16*>(low_.data_ptr()) : nullptr;
  }
  int64_t rows() const { return B * kv_heads * slots; }
  Stored stored() const {
    const auto half = [&](const bf16* from, int which) { return from == nullptr ? nullptr : from + which * rows() * groups; };
    return {{data, data + rows() * width}, {half(scale, 0), half(scale, 1)}, {half(low, 0), half(low, 1)}, D, D / groups};
  }
  // A row of keys (which 0) or values (1) of KV head `head` of B × kv_heads.
  void write(int which, int64_t head, int64_t slot, const float* row) const {
    const int64_t to = which * rows() + head * slots + slot;
    uint8_t* codes = reinterpret_cast<uint8_t*>(data) + to * width;
    bf16 *scales = scale + to * groups, *lows = low + to * groups;
    switch (kind) {
      case ScalarType::Float: std::memcpy(codes, row, D * sizeof *row); break;
      case ScalarType::BFloat16: for (int64_t i = 0; i < D; ++i) reinterpret_cast<bf16*>(codes)[i] = narrow_bf16(row[i]); break;
      case ScalarType::Char: encode_int8(row, D, reinterpret_cast<int8_t*>(codes), scales); break;
      case ScalarType::Float8_e4m3fn: encode_fp8(row, D, codes, scales); break;
      default: encode_int4(row, D, D / groups, codes, scales, lows);
    }
  }
};

// Calls f(Row type) for the format of the cache.
template <typename F>
void with_row(ScalarType kind, F f) {
  switch (kind) {
    case ScalarType::Float: return f(static_cast<PlainRow<float>*>(nullptr));
    case ScalarType::BFloat16: return f(static_cast<PlainRow<bf16>*>(nullptr));
    case ScalarType::Char: return f(static_cast<Int8Row*>(nullptr));
    case ScalarType::Float8_e4m3fn: return f(static_cast<Fp8Row*>(nullptr));
    case ScalarType::Byte: return f(static_cast<Int4Row*>(nullptr));
    default: STD_TORCH_CHECK(false, "float32, bf16, int8, fp8 or packed int4 is expected");
  }
}

// One query row a head over the first `count` slots, cut into pieces that threads take (``items``), and joined afterwards.
struct Attention {
  const LayerCache& cache;
  Stored from;
  int64_t G, count, cuts, each;
  const float* mask;  // a row a sequence, added to the scores; null: none
  int64_t mask_stride;
  float scaling, softcap;  // softcap: 0 for none
  std::vector<float> largest, sum, parts;

  Attention(const LayerCache& cache, int64_t H, int64_t count, const Tensor& mask_, double scaling, double softcap)
      : cache(cache), from(cache.stored()), G(H / cache.kv_heads), count(count), mask(nullptr), mask_stride(0),
        scaling(static_cast<float>(scaling)), softcap(static_cast<float>(softcap)) {
    STD_TORCH_CHECK(H % cache.kv_heads == 0 && count > 0 && count <= cache.slots, "the queries and the cache do not belong together");
    if (mask_.numel() != 0) {
      STD_TORCH_CHECK(mask_.dim() == 2 && mask_.size(0) == cache.B && mask_.size(1) >= count && mask_.stride(1) == 1 && is(mask_, ScalarType::Float),
                      "mask [B, count] in float32 is expected");
      mask = static_cast<const float*>(mask_.data_ptr()), mask_stride = mask_.stride(0);
    }
    const int64_t heads = cache.B * cache.kv_heads, wanted = (omp_get_max_threads() * 2 + heads - 1) / heads;
    cuts = std::max<int64_t>(1, std::min(wanted, (count + LEAST_PIECE - 1) / LEAST_PIECE));
    each = ((count + cuts - 1) / cuts + POSITIONS - 1) / POSITIONS * POSITIONS;
    largest.assign(heads * cuts * G, -std::numeric_limits<float>::infinity());
    sum.assign(heads * cuts * G, 0.0f);
    parts.assign(heads * cuts * G * cache.D, 0.0f);
  }
  int64_t items() const { return cache.B * cache.kv_heads * cuts; }
  int64_t head(int64_t item) const { return item / cuts; }  // of B × kv_heads
  int64_t first(int64_t item) const { return item % cuts * each; }
  int64_t last(int64_t item) const { return std::min(count, first(item) + each); }

  // query: G × D of the item's KV head.
  void run(int64_t item, const float* query) {
    const float* columns = mask == nullptr ? nullptr : mask + head(item) / cache.kv_heads * mask_stride;
    with_row(cache.kind, [&](auto* kind) {
      using Row = std::remove_pointer_t<decltype(kind)>;
      for (int64_t g = 0; g < G; g += HEADS) {
        const int64_t at = item * G + g;
        const auto call = [&](auto R) {
          piece<Row, R.value>(from, head(item) * cache.slots, first(item), last(item), query + g * cache.D, columns, scaling, softcap,
                              &largest[at], &sum[at], &parts[at * cache.D]);
        };
        switch (std::min(HEADS, G - g)) {
          case 4: call(std::integral_constant<int, 4>{}); break;
          case 3: call(std::integral_constant<int, 3>{}); break;
          case 2: call(std::integral_constant<int, 2>{}); break;
          default: call(std::integral_constant<int, 1>{});
        }
      }
    });
  }

  // Result of query head g of KV head `head`. room: D floats.
  template <typename T>
  void join(int64_t head, int64_t g, float* room, T* to) const {
    const int64_t D = cache.D;
    float top = -std::numeric_limits<float>::infinity(), total = 0.0f;
    for (int64_t c = 0; c < cuts; ++c) top = std::fmax(top, largest[(head * cuts + c) * G + g]);
    std::fill(room, room + D, 0.0f);
    for (int64_t c = 0; c < cuts; ++c) {
      const int64_t at = (head * cuts + c) * G + g;
      if (sum[at] == 0.0f) continue;  // a piece of masked positions, or none
      const float by = std::exp(largest[at] - top);
      total += sum[at] * by;
      for (int64_t i = 0; i < D; ++i) room[i] += parts[at * D + i] * by;
    }
    for (int64_t i = 0; i < D; ++i) store(to + i, room[i] / total);
  }
};

// q [B, H, D] float32 or bf16 over the first ``count`` slots → [B, H, D]. mask: float32 [B, at least count], added to the
// scores, or empty. softcap: 0 for none. scale, low: empty where the format has none.
inline Tensor attend(Tensor q, Tensor data, Tensor scale, Tensor low, int64_t count, Tensor mask, double scaling, double softcap) {
  STD_TORCH_CHECK(q.dim() == 3 && q.is_contiguous() && (is(q, ScalarType::Float) || is(q, ScalarType::BFloat16)), "q [B, H, D] in float32 or bf16 is expected");
  const int64_t B = q.size(0), H = q.size(1), D = q.size(2);
  const LayerCache cache(data, scale, low, D);
  STD_TORCH_CHECK(cache.B == B, "q and the cache do not belong together");
  Attention work(cache, H, count, mask, scaling, softcap);
  Tensor out = torch::stable::new_empty(q, {B, H, D});
  const auto all = [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    std::vector<float> wide(B * H * D), room(D);
    for (int64_t i = 0; i < B * H * D; ++i) wide[i] = widen(static_cast<const T*>(q.data_ptr())[i]);
#pragma omp parallel for schedule(static)
    for (int64_t item = 0; item < work.items(); ++item) work.run(item, wide.data() + work.head(item) * work.G * D);
    for (int64_t head = 0; head < B * cache.kv_heads; ++head)
      for (int64_t g = 0; g < work.G; ++g) work.join(head, g, room.data(), static_cast<T*>(out.data_ptr()) + (head * work.G + g) * D);
  };
  is(q, ScalarType::Float) ? all(static_cast<float*>(nullptr)) : all(static_cast<bf16*>(nullptr));
  return out;
}

// Writes keys and values [B, kv_heads, n, D] (float32 or bf16, D contiguous) into the slots from ``slot`` on.
inline void put(Tensor keys, Tensor values, Tensor data, Tensor scale, Tensor low, int64_t slot) {
  const int64_t B = keys.size(0), heads = keys.size(1), n = keys.size(2), D = keys.size(3);
  const LayerCache cache(data, scale, low, D);
  STD_TORCH_CHECK(cache.B == B && cache.kv_heads == heads && slot >= 0 && slot + n <= cache.slots, "the rows do not fit the cache");
  for (const Tensor* t : {&keys, &values})
    STD_TORCH_CHECK(t->dim() == 4 && t->stride(3) == 1 && t->size(2) == n && t->scalar_type() == keys.scalar_type() &&
                        (is(*t, ScalarType::Float) || is(*t, ScalarType::BFloat16)),
                    "keys and values [B, kv_heads, n, D] in float32 or bf16 are expected");
  const bool wide = is(keys, ScalarType::Float);
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
      cache.write(static_cast<int>(which), b * heads + h, slot + t, row.data());
    }
  }
}

}  // namespace pdq
