// One row of keys or values into its format; the same numbers, bit for bit, as the formats' definition in Python.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace pdq {

// span / steps in bf16, 1 for rows of zeros.
inline float row_scale(float span, float steps, bf16* to) {
  *to = narrow_bf16(span / steps);
  if (widen(*to) == 0.0f) *to = narrow_bf16(1.0f);
  return widen(*to);
}

inline float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

inline float absolute_largest(const float* row, int64_t D) {
  float most = 0.0f;
  bool known = true;
  for (int64_t i = 0; i < D; ++i) {
    const float v = std::fabs(row[i]);
    known = known && !(v != v);
    most = v > most ? v : most;
  }
  return known ? most : std::numeric_limits<float>::quiet_NaN();
}

// The nearest whole number, ties to even; what is no number becomes 0, its scale shows it.
inline int32_t whole(float x, float low, float high) {
  const float at = clamp(std::nearbyint(x), low, high);
  return at == at ? static_cast<int32_t>(at) : 0;
}

inline void encode_int8(const float* row, int64_t D, int8_t* codes, bf16* scale) {
  const float by = row_scale(absolute_largest(row, D), 127.0f, scale);
  for (int64_t i = 0; i < D; ++i) codes[i] = static_cast<int8_t>(whole(row[i] / by, -127.0f, 127.0f));
}

// E4M3 of |x| <= 448: sign, 4 bits of exponent (bias 7), 3 of mantissa; to nearest, ties to even.
inline uint8_t narrow_fp8(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  const float size = std::fabs(x);
  if (!(size == size)) return sign | 0x7fu;
  if (size < 0.015625f)  // 2^-6: below it steps are 2^-9
    return sign | static_cast<uint8_t>(std::nearbyint(size * 512.0f));
  bits &= 0x7fffffffu;
  bits += 0x0007ffffu + (bits >> 20 & 1u);
  return sign | static_cast<uint8_t>((bits >> 20) - (120u << 3));
}

inline void encode_fp8(const float* row, int64_t D, uint8_t* codes, bf16* scale) {
  const float by = row_scale(absolute_largest(row, D), 448.0f, scale);
  for (int64_t i = 0; i < D; ++i) codes[i] = narrow_fp8(clamp(row[i] / by, -448.0f, 448.0f));
}

inline void encode_int4(const float* row, int64_t D, int64_t group, uint8_t* packed, bf16* scales, bf16* lows) {
  const int64_t half = D / 2;
  std::memset(packed, 0, half);
  for (int64_t g = 0; g < D / group; ++g) {
    float low = 0.0f, high = 0.0f;
    bool known = true;
    for (int64_t i = g * group; i < (g + 1) * group; ++i) {
      known = known && row[i] == row[i];
      low = row[i] < low ? row[i] : low;
      high = row[i] > high ? row[i] : high;
    }
    if (!known) low = high = std::numeric_limits<float>::quiet_NaN();
    lows[g] = narrow_bf16(low);
    const float from = widen(lows[g]), by = row_scale(high - from, 15.0f, scales + g);
    for (int64_t i = g * group; i < (g + 1) * group; ++i) {
      const uint8_t code = static_cast<uint8_t>(whole((row[i] - from) / by, 0.0f, 15.0f));
      packed[i < half ? i : i - half] |= i < half ? code : static_cast<uint8_t>(code << 4);
    }
  }
}

}  // namespace pdq
