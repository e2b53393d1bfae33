// The two packed layouts, and what one row of them looks like to a kernel.
//
// int8: [N, k] bytes, one scale an output channel; the layout that every int8 kernel of this project reads.
// int4: [N, k / 2] bytes in blocks of BLOCK columns; the 16-bit word j of a block's sixteen holds the columns
// j, 16 + j, 32 + j, 48 + j in its nibbles from the lowest on, so that three shifts and masks give four vectors of
// 16-bit lanes in the order of the columns. Scales [N, k / group, 2]: (scale, zero), w = (q − 8) · scale + zero.
#pragma once

#include "activations.h"

namespace pdq {

inline void unpack_int4(const uint8_t* block, __m256i out[4]) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block));
  const __m256i nibble = _mm256_set1_epi16(15);
  out[0] = _mm256_and_si256(words, nibble);
  out[1] = _mm256_and_si256(_mm256_srli_epi16(words, 4), nibble);
  out[2] = _mm256_and_si256(_mm256_srli_epi16(words, 8), nibble);
  out[3] = _mm256_srli_epi16(words, 12);
}

inline void unpack_int8(const int8_t* block, __m256i out[4]) {
  for (int i = 0; i < 4; ++i)
    out[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 16 * i)));
}

// Up to eight (scale, zero) pairs, zeros beyond n.
inline void load_pairs(const bf16* pairs, int64_t n, __m256* scale, __m256* zero) {
  const __m256i there = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i both = n >= 8 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs))
                              : _mm256_maskload_epi32(reinterpret_cast<const int*>(pairs), there);
  *scale = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  *zero = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

}  // namespace pdq
