// Twins of activations for tensor cores: int8 codes with a scale per 32 channels, sums per 16, and halves.
//
// Quantising a row depends on that row alone. Layouts are [rows / 8][n / 32][8 rows][...], as tensor.cuh reads them.
#pragma once
#include "common.cuh"

// Eight values v of a row from channel k on -> their twins, by four neighbouring lanes for each block of 32. All lanes of
// a warp call it; n: channels of a row of `to`, a multiple of 32 (else nothing reads the twins).
__device__ __forceinline__ void quantize8(const float *v, const Quant &to, long long row, int k, int n, bool store) {
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(v[i]));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
    const float d = top / 127.0f, inverse = top > 0.0f ? 127.0f / top : 0.0f;
    uint32_t word[2] = {0, 0};
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int q = __float2int_rn(v[i] * inverse);
        sum += q;
        word[i / 4] |= (uint32_t)(q & 255) << 8 * (i % 4);
    }
    const int other = __shfl_xor_sync(FULL, sum, 1);
    if (!store) return;
    const long long tile = row / 8 * (n / 32) + k / 32;
    const int r = (int)(row % 8), at = r * 32 + k % 32;
    *(uint2 *)(to.q + tile * 256 + at) = make_uint2(word[0], word[1]);
    sum += other;
    // Sums meet minima in tf32 products, which see no more bits than these.
    if (k % 16 == 0) to.s[tile * 16 + k % 32 / 16 * 8 + r] = __uint_as_float(to_tf32(d * (float)sum));
    if (k % 32 == 0) to.d[tile * 8 + r] = d;
    if (!to.h) return;
    uint32_t h[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        h[i] = __half_as_ushort(__float2half_rn(v[2 * i])) | (uint32_t)__half_as_ushort(__float2half_rn(v[2 * i + 1])) << 16;
    *(uint4 *)(to.h + tile * 256 + at) = make_uint4(h[0], h[1], h[2], h[3]);
}
