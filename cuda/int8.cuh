// The int8 path: quantised weights as small integers, activations as int8 with a scale per 32, dp4a for four at a time.
//
// Integer sums are exact; a block of 32 is then added to its lane with fmaf, one per scale and minimum. In a segment of
// 1024 lane l has the blocks l, l + 32, ...; lanes and segments are added as matmul.cuh says. Quantising a row depends on
// that row alone.
#pragma once
#include "decode.cuh"

__host__ __device__ constexpr bool has_int8(int dt) { return dt == Q8_0 || dt == IQ2_XXS || dt == Q2_K || dt == Q4_K; }
__host__ __device__ constexpr bool has_min(int dt) { return dt == Q2_K || dt == Q4_K; }

// A block of 32 weights: weight = a * code - b, with a scale (and minimum) for each half of 16.
struct Codes {
    uint32_t w[8];  // 32 int8
    float a[2], b[2];
};

enum { GRID_COPIES = 4 };  // of the IQ2_XXS table in shared memory: fewer bank conflicts

__device__ __forceinline__ void words(const uint8_t *p, uint32_t *w) {  // 32 bytes, 16-byte aligned
    const uint4 u = *(const uint4 *)p, v = *(const uint4 *)(p + 16);
    w[0] = u.x, w[1] = u.y, w[2] = u.z, w[3] = u.w, w[4] = v.x, w[5] = v.y, w[6] = v.z, w[7] = v.w;
}

// Weights k .. k + 31 of a row, k a multiple of 32.
template <int DT> __device__ __forceinline__ Codes decode_codes(const Mat &m, long long row, int k, const uint2 *grid, int copies) {
    Codes c;
    c.a[1] = c.b[0] = c.b[1] = 0.0f;
    if constexpr (DT == Q8_0) {
        words(m.q + row * m.n_in + k, c.w);
        c.a[0] = half_bits(((const unsigned short *)m.d)[row * (m.n_in / 32) + k / 32]);
    } else if constexpr (DT == IQ2_XXS) {
        const uint2 code = *(const uint2 *)(m.q + (row * (m.n_in / 32) + k / 32) * 8);
        const float d = half_bits(((const unsigned short *)m.d)[row * (m.n_in / 256) + k / 256]);
        c.a[0] = d * (0.5f + (float)(code.y >> 28)) * 0.25f;
        // the parity of each 7-bit sign code, at its lowest bit
        const uint32_t x = code.y, y = x ^ x >> 1, parity = y ^ y >> 2 ^ y >> 4 ^ x >> 6;
#pragma unroll
        for (int g = 0; g < 4; g++) {
            const uint2 v = grid[(code.x >> 8 * g & 255) * copies + threadIdx.x % copies];
            // bit i of a nibble to the lowest bit of byte i; -v = (v ^ 0xff) + 1, and no byte carries since v is not 0
            const uint32_t low = x >> 7 * g & 15, high = (x >> (7 * g + 4) & 7) | (parity >> 7 * g & 1) << 3;
            const uint32_t lo = low * 0x00204081u & 0x01010101u, hi = high * 0x00204081u & 0x01010101u;
            c.w[2 * g] = (v.x ^ lo * 255u) + lo;
            c.w[2 * g + 1] = (v.y ^ hi * 255u) + hi;
        }
    } else if constexpr (DT == Q2_K) {
        const uint8_t *p = m.q + row * m.row_bytes + k / 256 * 84;
        const int j = k % 256 / 32;
        const uint32_t *v = (const uint32_t *)(p + 16 + j / 4 * 32);
        const uint32_t s = *(const unsigned short *)(p + 2 * j), dd = *(const uint32_t *)(p + 80);
        const float d = half_bits(dd & 0xffffu), dmin = half_bits(dd >> 16);
        c.a[0] = d * (float)(s & 15), c.a[1] = d * (float)(s >> 8 & 15);
        c.b[0] = dmin * (float)(s >> 4 & 15), c.b[1] = dmin * (float)(s >> 12);
#pragma unroll
        for (int i = 0; i < 8; i++) c.w[i] = v[i] >> j % 4 * 2 & 0x03030303u;
    } else if constexpr (DT == Q4_K) {
        const uint8_t *p = m.q + row * m.row_bytes + k / 256 * 144;
        const int j = k % 256 / 32;
        const uint32_t dd = *(const uint32_t *)p;
        int scale, min;
        scale_min(p + 4, j, &scale, &min);
        c.a[0] = half_bits(dd & 0xffffu) * (float)scale;
        c.b[0] = half_bits(dd >> 16) * (float)min;
        words(p + 16 + j / 2 * 32, c.w);
#pragma unroll
        for (int i = 0; i < 8; i++) c.w[i] = c.w[i] >> j % 2 * 4 & 0x0f0f0f0fu;
    }
    return c;
}

// acc + the block's product with 32 activations: `x` their codes, `d` their scale, `s` their sums per 16 (scaled).
template <int DT> __device__ __forceinline__ float add_block(const Codes &c, const uint32_t *x, float d, float2 s, float acc) {
    int sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i / 4] = __dp4a((int)c.w[i], (int)x[i], sum[i / 4]);
    if constexpr (DT == Q2_K) {
        acc = fmaf(c.a[0] * d, (float)sum[0], acc);
        acc = fmaf(c.a[1] * d, (float)sum[1], acc);
        acc = fmaf(-c.b[0], s.x, acc);
        return fmaf(-c.b[1], s.y, acc);
    } else {
        acc = fmaf(c.a[0] * d, (float)(sum[0] + sum[1]), acc);
        return DT == Q4_K ? fmaf(-c.b[0], s.x + s.y, acc) : acc;
    }
}

// acc[r][n] += segment of R / 2 rows of `m` and as many of `m2`, from rows row and row2 on; the int8 twin of
// dot_segment. Lane l takes the blocks l, l + 32, ... of the segment. x[n] are element offsets into `from`.
template <int DT, int R, int NB>
__device__ __forceinline__ void dot_segment8(const Mat &m, const Mat &m2, long long row, long long row2, long long last, const Quant &from,
                                             const long long *x, int first, int end, const uint2 *grid, float (*acc)[NB]) {
    for (int k = first + threadIdx.x % 32 * 32; k < end; k += 1024) {
        Codes w[R];
#pragma unroll
        for (int r = 0; r < R; r++)
            w[r] = decode_codes<DT>(r < R / 2 ? m : m2, min((r < R / 2 ? row : row2) + r % (R / 2), last), k, grid, GRID_COPIES);
#pragma unroll
        for (int n = 0; n < NB; n++) {
            const long long at = x[n] + k;
            uint32_t v[8];
            words((const uint8_t *)from.q + at, v);
            const float d = from.d[at >> 5];
            const float2 s = has_min(DT) ? *(const float2 *)(from.s + (at >> 4)) : make_float2(0.0f, 0.0f);
#pragma unroll
            for (int r = 0; r < R; r++) acc[r][n] = add_block<DT>(w[r], v, d, s, acc[r][n]);
        }
    }
}

// Eight values v of a row from channel k on -> their twins, by four neighbouring lanes for each block of 32. All lanes of
// a warp call it; n: channels of a row of `to`.
__device__ __forceinline__ void quantize8(const float *v, const Quant &to, long long row, int k, int n, bool store) {
    const long long at = row * n + k;
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
    *(uint2 *)(to.q + at) = make_uint2(word[0], word[1]);
    sum += other;
    if (threadIdx.x % 2 == 0) to.s[at >> 4] = d * (float)sum;
    if (threadIdx.x % 4 == 0) to.d[at >> 5] = d;
}
