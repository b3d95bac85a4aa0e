// Twins of activations for tensor cores: int8 codes, with a scale per 32 channels (for Q8_0, Q4_0 and MXFP4) or per 256 (for the other
// quantised dtypes, whose own scales are integers within 256 weights), and halves (for F16).
//
// Quantising a row depends on that row alone. Layouts: codes and halves [rows / 8][n / 32][8 rows][32], scales
// [rows / 8][n / 32 or n / 256][8], sums [rows / 8][n / 16][8], as tensor.cuh reads them.
#pragma once
#include "common.cuh"

// Codes of eight values with 127 / top = inverse, four to a word; returns their sum.
__device__ __forceinline__ int codes_of(const float *v, float inverse, uint32_t *word) {
    int sum = 0;
    word[0] = word[1] = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int q = __float2int_rn(v[i] * inverse);
        sum += q;
        word[i / 4] |= (uint32_t)(q & 255) << 8 * (i % 4);
    }
    return sum;
}

// Eight values v of a row -> one of their twins. All lanes of a warp call it with neighbouring k, the channel of v[0]. n:
// channels of a row of `to`, a multiple of 32 (else nothing reads the twins); lanes that do not store bring zeros.
__device__ __forceinline__ float largest(const float *v) {
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(v[i]));
    return top;
}

__device__ __forceinline__ float largest_of_lanes(float top, int first, int end) {
    for (int off = first; off < end; off *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, off));
    return top;
}

__device__ __forceinline__ long long code_at(long long row, int k, int n) {
    return (row / 8 * (n / 32) + k / 32) * 256 + row % 8 * 32 + k % 32;
}

__device__ __forceinline__ void quantize_by_32(const float *v, const Quant &to, long long row, int k, int n, bool store) {
    const float top = largest_of_lanes(largest(v), 1, 4);
    uint32_t word[2];
    if (!store) return;
    codes_of(v, top > 0.0f ? 127.0f / top : 0.0f, word);
    *(uint2 *)(to.q + code_at(row, k, n)) = make_uint2(word[0], word[1]);
    if (k % 32 == 0) to.d[(row / 8 * (n / 32) + k / 32) * 8 + row % 8] = top / 127.0f;
}

// The warp has 256 channels from a multiple of 256 on.
__device__ __forceinline__ void quantize_by_256(const float *v, const Quant &to, long long row, int k, int n, bool store) {
    const float top = largest_of_lanes(largest(v), 1, 32);
    uint32_t word[2];
    const int sum = codes_of(v, top > 0.0f ? 127.0f / top : 0.0f, word), other = __shfl_xor_sync(FULL, sum, 1);
    if (!store) return;
    *(uint2 *)(to.kq + code_at(row, k, n)) = make_uint2(word[0], word[1]);
    if (k % 16 == 0) to.ks[(row / 8 * (n / 16) + k / 16) * 8 + row % 8] = (float)(sum + other);
    if (k % 256 == 0) to.kd[(row / 8 * (n / 256) + k / 256) * 8 + row % 8] = top / 127.0f;
}

__device__ __forceinline__ void to_halves(const float *v, const Quant &to, long long row, int k, int n, bool store) {
    uint32_t h[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        h[i] = __half_as_ushort(__float2half_rn(v[2 * i])) | (uint32_t)__half_as_ushort(__float2half_rn(v[2 * i + 1])) << 16;
    if (store) *(uint4 *)(to.h + code_at(row, k, n)) = make_uint4(h[0], h[1], h[2], h[3]);
}

// All twins that there are. `role` of `roles`: warps that have the same values may share them.
__device__ __forceinline__ void quantize8(const float *v, const Quant &to, long long row, int k, int n, bool store, int role = 0, int roles = 1) {
    if (to.q && 1 % roles == role) quantize_by_32(v, to, row, k, n, store);
    if (to.kq && 2 % roles == role) quantize_by_256(v, to, row, k, n, store);
    if (to.h && 3 % roles == role) to_halves(v, to, row, k, n, store);
}
