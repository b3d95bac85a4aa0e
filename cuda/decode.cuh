// Weight decoders: eight neighbouring weights of a row (decode8, for the matrix kernels) and a single one (decode1, for
// the reference path and the embedding). Both give the same bits; they are written separately so that each tests the
// other. Values are those of the GGUF formats: scale times integer, minus the minimum where there is one (one fmaf).
#pragma once
#include "common.cuh"

// A byte as a float without a conversion instruction: 2^23 + byte, minus 2^23.
__device__ __forceinline__ float byte_float(uint32_t word, int i, float base) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540 + i)) - base;
}
#define BASE_U 8388608.0f  // unsigned bytes
#define BASE_S 8388736.0f  // signed bytes with their top bit flipped

__device__ __forceinline__ uint32_t load_u16(const uint8_t *p) { return *(const unsigned short *)p; }
__device__ __forceinline__ uint32_t load_2x16(const uint8_t *p) { return load_u16(p) | load_u16(p + 2) << 16; }
__device__ __forceinline__ uint32_t load_4x8(const uint8_t *p) {
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

__device__ __forceinline__ void scale_min(const uint8_t *s, int j, int *scale, int *min) {
    if (j < 4) {
        *scale = s[j] & 63;
        *min = s[j + 4] & 63;
    } else {
        *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        *min = s[j + 4] >> 4 | (s[j] >> 6) << 4;
    }
}

__device__ __forceinline__ float e8m0_half(uint32_t e) {  // half of 2^(e - 127)
    return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

// Where weight k of a row lies among tiles of 16 rows and n inputs: the tile, and row g or g + 8 (half) in it.
struct TileAt {
    long long tile;
    int g, half;
    __device__ __forceinline__ TileAt(const Mat &m, long long row, int k, int n)
        : tile(row / 16 * (m.n_in / n) + k / n), g((int)(row % 8)), half((int)(row % 16 / 8)) {}
};

template <typename Fn> __device__ __forceinline__ void unpack(uint32_t lo, uint32_t hi, float base, Fn fn) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        fn(i, byte_float(lo, i, base));
        fn(i + 4, byte_float(hi, i, base));
    }
}

// Weights k .. k + 7 of row `row`, k a multiple of 8 and k < n_in. `grid` is the IQ2_XXS table in shared memory.
template <int DT> __device__ __forceinline__ void decode8(const Mat &m, long long row, int k, const uint2 *grid, float *w) {
    if constexpr (DT == F32 || DT == F16 || DT == BF16) {
        const uint8_t *p = m.q + row * m.row_bytes;
        if (m.n_in % 8 == 0) {
            if constexpr (DT == F32) {
                const float4 a = *(const float4 *)(p + 4 * k), b = *(const float4 *)(p + 4 * k + 16);
                w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
            } else {
                const uint4 v = *(const uint4 *)(p + 2 * k);
                const uint32_t u[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    w[2 * i] = DT == F16 ? half_bits(u[i] & 0xffffu) : __uint_as_float(u[i] << 16);
                    w[2 * i + 1] = DT == F16 ? half_bits(u[i] >> 16) : __uint_as_float(u[i] & 0xffff0000u);
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                w[i] = 0.0f;
                if (k + i >= m.n_in) continue;
                if constexpr (DT == F32) w[i] = ((const float *)p)[k + i];
                else if constexpr (DT == F16) w[i] = half_bits(((const unsigned short *)p)[k + i]);
                else w[i] = __uint_as_float((uint32_t)((const unsigned short *)p)[k + i] << 16);
            }
        }
    } else if constexpr (DT == Q8_0) {
        const TileAt at(m, row, k, 32);
        const uint32_t *v = (const uint32_t *)(m.q + at.tile * 512 + (at.g * 4 + k % 32 / 8) * 16) + at.half;
        const float d = half_bits(((const unsigned short *)m.d)[at.tile * 16 + at.g * 2 + at.half]);
        unpack(v[0] ^ 0x80808080u, v[2] ^ 0x80808080u, BASE_S, [&](int i, float q) { w[i] = q * d; });
    } else if constexpr (DT == IQ2_XXS) {
        const TileAt at(m, row, k, 256);
        const unsigned short *words = (const unsigned short *)(m.q + at.tile * 1024 + at.half * 512 + at.g * 64) + k % 256 / 32;
        const float d = half_bits(((const unsigned short *)m.d)[at.tile * 16 + at.g * 2 + at.half]);
        const uint32_t scale = words[0] >> 15 | words[8] >> 15 << 1 | words[16] >> 15 << 2 | words[24] >> 15 << 3;
        const float a = d * (0.5f + (float)scale) * 0.25f;
        const uint32_t word = words[k % 32];
        uint32_t sign = word & 127;
        sign |= (__popc(sign) & 1) << 7;
        const uint2 v = grid[word >> 7 & 255];
        unpack(v.x, v.y, BASE_U, [&](int i, float q) {
            w[i] = __uint_as_float(__float_as_uint(a * q) ^ (sign << (31 - i) & 0x80000000u));
        });
    } else if constexpr (DT == Q2_K) {
        const TileAt at(m, row, k, 256);
        const int l = k % 256 / 8, shift = l % 16 / 4 * 2;
        const uint32_t *v = (const uint32_t *)(m.q + at.tile * 1024 + at.half * 512 + (at.g * 4 + l % 4) * 16 + l / 16 * 8);
        const uint8_t *scales = m.d + at.tile * 320;
        const uint32_t s = scales[(at.g * 2 + l % 4 / 2) * 16 + at.half * 8 + l / 4];
        const uint32_t dd = *(const uint32_t *)(scales + 256 + at.g * 8 + at.half * 4);
        const float a = half_bits(dd & 0xffffu) * (float)(s & 15), b = half_bits(dd >> 16) * (float)(s >> 4);
        unpack(v[0] >> shift & 0x03030303u, v[1] >> shift & 0x03030303u, BASE_U,
               [&](int i, float q) { w[i] = fmaf(a, q, -b); });
    } else if constexpr (DT == Q4_K || DT == Q5_K) {
        const uint8_t *p = m.q + row * m.row_bytes + k / 256 * (DT == Q4_K ? 144 : 176);
        const int l = k % 256 / 8, j = l / 4, shift = j % 2 * 4;
        const uint32_t *v = (const uint32_t *)(p + (DT == Q4_K ? 16 : 48) + j / 2 * 32 + l % 4 * 8);
        const uint32_t dd = *(const uint32_t *)p;
        int scale, min;
        scale_min(p + 4, j, &scale, &min);
        const float a = half_bits(dd & 0xffffu) * (float)scale, b = half_bits(dd >> 16) * (float)min;
        uint32_t lo = v[0] >> shift & 0x0f0f0f0fu, hi = v[1] >> shift & 0x0f0f0f0fu;
        if constexpr (DT == Q5_K) {
            const uint32_t *h = (const uint32_t *)(p + 16 + l % 4 * 8);
            lo |= (h[0] >> j & 0x01010101u) << 4;
            hi |= (h[1] >> j & 0x01010101u) << 4;
        }
        unpack(lo, hi, BASE_U, [&](int i, float q) { w[i] = fmaf(a, q, -b); });
    } else if constexpr (DT == Q6_K) {
        const TileAt at(m, row, k, 256);
        const int l = k % 256 / 8, j = l / 4;
        const uint32_t *v = (const uint32_t *)(m.q + at.tile * 3072 + at.half * 1536) + (at.g * 4 + l % 4) * 4;
        const uint32_t low = v[j / 4 * 128 + j % 4], high = v[256 + j / 2] >> j % 2 * 4;
        const uint8_t *side = m.d + at.tile * 288;
        const float a = half_bits(((const unsigned short *)(side + 256))[at.g * 2 + at.half]) *
                        (float)((const int8_t *)side)[(at.g + 8 * at.half) * 16 + l / 2];
        unpack((low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4, (low >> 4 & 0x0f0f0f0fu) | (high >> 2 & 0x03030303u) << 4,
               BASE_U + 32.0f, [&](int i, float q) { w[i] = a * q; });
    } else if constexpr (DT == Q4_0) {
        const TileAt at(m, row, k, 32);
        const uint32_t v = *(const uint32_t *)(m.q + at.tile * 256 + (at.g * 4 + k % 32 / 8) * 8 + at.half * 4);
        const float d = half_bits(((const unsigned short *)m.d)[at.tile * 16 + at.g * 2 + at.half]);
        unpack(v & 0x0f0f0f0fu, v >> 4 & 0x0f0f0f0fu, BASE_U + 8.0f, [&](int i, float q) { w[i] = d * q; });
    } else {  // MXFP4
        const TileAt at(m, row, k, 32);
        const uint32_t v = *(const uint32_t *)(m.q + at.tile * 256 + (at.g * 4 + k % 32 / 8) * 8 + at.half * 4);
        const float d = e8m0_half(m.d[at.tile * 16 + at.g * 2 + at.half]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t c = v >> 4 * i & 15, magnitude = 0xc8643210u >> 4 * (c & 7) & 15;
            const float value = d * (float)magnitude;
            w[i] = c & 8 ? -value : value;
        }
    }
}

// Weight k of row `row`, any dtype, one at a time.
__device__ inline float decode1(const Mat &m, long long row, int k, const uint2 *grid) {
    const uint8_t *p = m.q + row * m.row_bytes;
    const int j = k % 256 / 32, t = k % 32;
    switch (m.dtype) {
    case F32: return ((const float *)p)[k];
    case F16: return half_bits(((const unsigned short *)p)[k]);
    case BF16: return __uint_as_float((uint32_t)((const unsigned short *)p)[k] << 16);
    case Q8_0: {
        const TileAt at(m, row, k, 32);
        const float d = half_bits(((const unsigned short *)m.d)[at.tile * 16 + at.g * 2 + at.half]);
        return (float)((const int8_t *)m.q)[at.tile * 512 + at.g * 64 + t / 8 * 16 + t % 8 / 4 * 8 + at.half * 4 + t % 4] * d;
    }
    case Q4_0: {
        const TileAt at(m, row, k, 32);
        const float d = half_bits(((const unsigned short *)m.d)[at.tile * 16 + at.g * 2 + at.half]);
        const int byte = m.q[at.tile * 256 + (at.g * 4 + t / 8) * 8 + at.half * 4 + t % 4];
        return d * (float)((t % 8 < 4 ? byte & 15 : byte >> 4) - 8);
    }
    case Q4_K:
    case Q5_K: {
        const bool five = m.dtype == Q5_K;
        p += k / 256 * (five ? 176 : 144);
        int scale, min, q = p[(five ? 48 : 16) + j / 2 * 32 + t] >> j % 2 * 4 & 15;
        if (five) q |= (p[16 + t] >> j & 1) << 4;
        scale_min(p + 4, j, &scale, &min);
        return fmaf(half_bits(load_u16(p)) * (float)scale, (float)q, -(half_bits(load_u16(p + 2)) * (float)min));
    }
    case Q6_K: {
        const TileAt at(m, row, k, 256);
        const uint8_t *v = m.q + at.tile * 3072 + at.half * 1536 + (at.g * 4 + t / 8) * 16;
        const int low = v[j / 4 * 512 + j % 4 * 4 + t % 4] >> t % 8 / 4 * 4 & 15, high = v[1024 + j / 2 * 4 + t % 4] >> (j % 2 * 4 + t % 8 / 4 * 2) & 3;
        const uint8_t *side = m.d + at.tile * 288;
        return half_bits(((const unsigned short *)(side + 256))[at.g * 2 + at.half]) *
               (float)((const int8_t *)side)[(at.g + 8 * at.half) * 16 + k % 256 / 16] * (float)((low | high << 4) - 32);
    }
    case Q2_K: {
        const TileAt at(m, row, k, 256);
        const uint8_t *code = m.q + at.tile * 1024 + at.half * 512 + at.g * 64 + t / 8 * 16, *side = m.d + at.tile * 320;
        const int q = code[k % 256 / 128 * 8 + t % 8] >> k % 128 / 32 * 2 & 3, s = side[at.g * 32 + t / 16 * 16 + at.half * 8 + j];
        const uint8_t *d = side + 256 + at.g * 8 + at.half * 4;
        return fmaf(half_bits(load_u16(d)) * (float)(s & 15), (float)q, -(half_bits(load_u16(d + 2)) * (float)(s >> 4)));
    }
    case IQ2_XXS: {
        const TileAt at(m, row, k, 256);
        const unsigned short *words = (const unsigned short *)(m.q + at.tile * 1024 + at.half * 512 + at.g * 64) + j;
        const float d = half_bits(((const unsigned short *)m.d)[at.tile * 16 + at.g * 2 + at.half]);
        int scale = 0;
        for (int i = 0; i < 4; i++) scale |= words[8 * i] >> 15 << i;
        const float a = d * (0.5f + (float)scale) * 0.25f;
        const uint32_t word = words[t / 8 * 8];
        uint32_t sign = word & 127;
        sign |= (__popc(sign) & 1) << 7;
        const float value = a * (float)((const uint8_t *)(grid + (word >> 7 & 255)))[t % 8];
        return sign >> t % 8 & 1 ? -value : value;
    }
    default: {  // MXFP4
        const TileAt at(m, row, k, 32);
        const int c = m.q[at.tile * 256 + (at.g * 4 + t / 8) * 8 + at.half * 4 + t % 8 / 2] >> t % 2 * 4 & 15;
        const float value = e8m0_half(m.d[at.tile * 16 + at.g * 2 + at.half]) * (float)(0xc8643210u >> 4 * (c & 7) & 15);
        return c & 8 ? -value : value;
    }
    }
}
