// The int8 path: quantised weights as small integers, activations as int8 with a scale per 32, dp4a for eight at a time.
//
// Integer sums are exact; each group of eight is then added to its lane with one fmaf (two where a dtype has minima), in
// the order that matmul.cuh defines. Quantising a row depends on that row alone.
#pragma once
#include "decode.cuh"

__host__ __device__ constexpr bool has_int8(int dt) { return dt == Q8_0 || dt == IQ2_XXS || dt == Q2_K || dt == Q4_K; }
__host__ __device__ constexpr bool has_min(int dt) { return dt == Q2_K || dt == Q4_K; }

struct Codes {
    uint32_t lo, hi;  // eight int8
    float a, b;       // weight = a * code - b
};

enum { GRID_COPIES = 4 };  // of the IQ2_XXS table in shared memory: fewer bank conflicts

template <int DT> __device__ __forceinline__ Codes decode_codes(const Mat &m, long long row, int k, const uint2 *grid, int copies) {
    Codes c = {0, 0, 0.0f, 0.0f};
    if constexpr (DT == Q8_0) {
        const uint2 v = *(const uint2 *)(m.q + row * m.n_in + k);
        c.lo = v.x, c.hi = v.y;
        c.a = half_bits(((const unsigned short *)m.d)[row * (m.n_in / 32) + k / 32]);
    } else if constexpr (DT == IQ2_XXS) {
        const uint2 code = *(const uint2 *)(m.q + (row * (m.n_in / 32) + k / 32) * 8);
        const float d = half_bits(((const unsigned short *)m.d)[row * (m.n_in / 256) + k / 256]);
        const int g = k % 32 / 8;
        c.a = d * (0.5f + (float)(code.y >> 28)) * 0.25f;
        uint32_t sign = code.y >> 7 * g & 127;
        sign |= (__popc(sign) & 1) << 7;
        const uint2 v = grid[(code.x >> 8 * g & 255) * copies + threadIdx.x % copies];
        // bit i of a nibble to the lowest bit of byte i; -v = (v ^ 0xff) + 1, and no byte carries since v is not 0
        const uint32_t lo = (sign & 15) * 0x00204081u & 0x01010101u, hi = (sign >> 4) * 0x00204081u & 0x01010101u;
        c.lo = (v.x ^ lo * 255u) + lo;
        c.hi = (v.y ^ hi * 255u) + hi;
    } else if constexpr (DT == Q2_K) {
        const uint8_t *p = m.q + row * m.row_bytes + k / 256 * 84;
        const int l = k % 256 / 8, shift = l % 16 / 4 * 2;
        const uint32_t *v = (const uint32_t *)(p + 16 + l / 16 * 32 + l % 4 * 8);
        const uint32_t s = p[l / 2], dd = *(const uint32_t *)(p + 80);
        c.a = half_bits(dd & 0xffffu) * (float)(s & 15);
        c.b = half_bits(dd >> 16) * (float)(s >> 4);
        c.lo = v[0] >> shift & 0x03030303u;
        c.hi = v[1] >> shift & 0x03030303u;
    } else if constexpr (DT == Q4_K) {
        const uint8_t *p = m.q + row * m.row_bytes + k / 256 * 144;
        const int l = k % 256 / 8, j = l / 4, shift = j % 2 * 4;
        const uint2 v = *(const uint2 *)(p + 16 + j / 2 * 32 + l % 4 * 8);
        const uint32_t dd = *(const uint32_t *)p;
        int scale, min;
        scale_min(p + 4, j, &scale, &min);
        c.a = half_bits(dd & 0xffffu) * (float)scale;
        c.b = half_bits(dd >> 16) * (float)min;
        c.lo = v.x >> shift & 0x0f0f0f0fu;
        c.hi = v.y >> shift & 0x0f0f0f0fu;
    }
    return c;
}

__device__ __forceinline__ int dot8(uint32_t lo, uint32_t hi, uint2 x) {
    return __dp4a((int)hi, (int)x.y, __dp4a((int)lo, (int)x.x, 0));
}

// acc[r][n] += segment of rows row + r; the int8 twin of dot_segment. x[n] are element offsets into `from`.
template <int DT, int R, int NB>
__device__ __forceinline__ void dot_segment8(const Mat &m, long long row, long long last, const Quant &from, const long long *x,
                                             int first, int end, const uint2 *grid, float (*acc)[NB]) {
#pragma unroll (NB <= 2 ? 4 : 1)
    for (int k = first + threadIdx.x % 32 * 8; k < end; k += 256) {
        Codes w[R];
#pragma unroll
        for (int r = 0; r < R; r++) w[r] = decode_codes<DT>(m, row + r < last ? row + r : last, k, grid, GRID_COPIES);
#pragma unroll
        for (int n = 0; n < NB; n++) {
            const long long at = x[n] + k;
            const uint2 v = *(const uint2 *)(from.q + at);
            const float d = from.d[at >> 5], s = has_min(DT) ? from.s[at >> 3] : 0.0f;
#pragma unroll
            for (int r = 0; r < R; r++) {
                acc[r][n] = fmaf(w[r].a * d, (float)dot8(w[r].lo, w[r].hi, v), acc[r][n]);
                if (has_min(DT)) acc[r][n] = fmaf(-w[r].b, s, acc[r][n]);
            }
        }
    }
}

// Eight values -> codes, by four neighbouring lanes for each block of 32. All lanes of a warp call it.
__device__ __forceinline__ void quantize8(const float *v, const Quant &to, long long at, bool store) {
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
    if (!store) return;
    *(uint2 *)(to.q + at) = make_uint2(word[0], word[1]);
    to.s[at >> 3] = d * (float)sum;
    if (threadIdx.x % 4 == 0) to.d[at >> 5] = d;
}
