// Twins of activations for tensor cores: int8 codes, with a scale per 32 channels (for Q8_0) or per 256 (for the other
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

// Eight values v of a row -> their twins. All lanes of a warp call it with neighbouring k, the channel of v[0], and where
// there is kq the warp has 256 channels from a multiple of 256 on. n: channels of a row of `to`, a multiple of 32 (else
// nothing reads the twins); lanes that do not store bring zeros.
__device__ __forceinline__ void quantize8(const float *v, const Quant &to, long long row, int k, int n, bool store) {
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(v[i]));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
    const long long tile = row / 8 * (n / 32) + k / 32;
    const int r = (int)(row % 8), at = r * 32 + k % 32;
    uint32_t word[2];
    if (to.q && store) {
        codes_of(v, top > 0.0f ? 127.0f / top : 0.0f, word);
        *(uint2 *)(to.q + tile * 256 + at) = make_uint2(word[0], word[1]);
        if (k % 32 == 0) to.d[tile * 8 + r] = top / 127.0f;
    }
    if (to.kq) {
        for (int off = 4; off < 32; off *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, off));
        const int sum = codes_of(v, top > 0.0f ? 127.0f / top : 0.0f, word), other = __shfl_xor_sync(FULL, sum, 1);
        if (store) {
            *(uint2 *)(to.kq + tile * 256 + at) = make_uint2(word[0], word[1]);
            if (k % 16 == 0) to.ks[tile * 16 + k % 32 / 16 * 8 + r] = (float)(sum + other);
            if (k % 256 == 0) to.kd[(row / 8 * (n / 256) + k / 256) * 8 + r] = top / 127.0f;
        }
    }
    if (!to.h || !store) return;
    uint32_t h[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        h[i] = __half_as_ushort(__float2half_rn(v[2 * i])) | (uint32_t)__half_as_ushort(__float2half_rn(v[2 * i + 1])) << 16;
    *(uint4 *)(to.h + tile * 256 + at) = make_uint4(h[0], h[1], h[2], h[3]);
}
