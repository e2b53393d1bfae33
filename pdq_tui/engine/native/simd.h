// Loads, stores and reductions of eight float lanes; AVX2 with FMA and F16C is the least that these kernels run on.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace pdq {

struct bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &wide, sizeof out);
  return out;
}

// Round to nearest, ties to even; a NaN stays one.
inline bf16 narrow_bf16(float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof wide);
  if ((wide & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((wide >> 16) | 0x40u)};
  return {static_cast<uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16)};
}

inline void store(float* to, float x) { *to = x; }
inline void store(bf16* to, float x) { *to = narrow_bf16(x); }

inline __m256 load8(const float* from) { return _mm256_loadu_ps(from); }
inline __m256 load8(const bf16* from) {
  const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

inline float sum8(__m256 x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

inline int32_t sum8(__m256i x) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

inline __m256 abs8(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

inline float max8(__m256 x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}

inline __m256i load16i(const int16_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

}  // namespace pdq
