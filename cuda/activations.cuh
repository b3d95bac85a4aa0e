// What a lane reads of activations for a tensor-core product: from device memory, or from a chunk in shared memory.
#pragma once
#include "decode.cuh"

// NT tiles of 8 rows; NT = 0 is a tile of at most 4 rows, in columns 0, 2, 4, 6, which halves the work behind a product.
__host__ __device__ constexpr int tiles_of(int nt) { return nt ? nt : 1; }
__host__ __device__ constexpr bool used(int nt, int c) { return nt || c % 2 == 0; }  // element c of a fragment of C
__device__ __forceinline__ int column_row(int nt, int tile, int column) { return nt ? tile * 8 + column : column / 2; }

__host__ __device__ constexpr bool per_256(int dt) {  // scales of activations
    return dt != Q8_0 && dt != Q4_0 && dt != MXFP4 && dt != F16;
}

// What a lane reads of NT tiles of rows in device memory: codes (or halves) of column g, scales of columns 2 t, 2 t + 1,
// sums of column g. Pointers are at some block of 32 inputs; at(block) moves them.
template <int NT, bool K> struct Rows {
    enum { TILES = tiles_of(NT) };
    const int8_t *q[TILES];
    const uint16_t *h[TILES];
    const float *d[TILES][2], *s[TILES];

    __device__ __forceinline__ uint2 codes(int i, int block) const { return *(const uint2 *)(q[i] + block * 256); }
    __device__ __forceinline__ uint4 halves(int i, int block) const { return *(const uint4 *)(h[i] + block * 256); }
    __device__ __forceinline__ float2 scales(int i, int block) const {  // K: block counts 256 inputs
        return make_float2(d[i][0][block * 8], NT ? d[i][1][block * 8] : 0.0f);
    }
    __device__ __forceinline__ float sums(int i, int sixteen) const { return s[i][sixteen * 8]; }
    __device__ __forceinline__ Rows at(int block) const {
        Rows r = *this;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            r.q[i] += block * 256, r.h[i] += block * 256, r.s[i] += block * 16;
            for (int c = 0; c < 2; c++) r.d[i][c] += block * (K ? 1 : 8);
        }
        return r;
    }

    // Any rows: n channels to a row; row(i): where the i-th of n_rows lies.
    template <typename Row> static __device__ __forceinline__ Rows gather(const Quant &x, int n, int n_rows, Row row) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const long long blocks = n / 32;
        Rows r;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const int at = row(min(column_row(NT, i, g), n_rows - 1));
            const long long place = at / 8 * blocks * 8 + at % 8;
            r.q[i] = (K ? x.kq : x.q) + place * 32 + t * 8;
            r.h[i] = x.h + place * 32 + t * 8;
            r.s[i] = x.ks + at / 8 * blocks * 16 + at % 8;
            for (int c = 0; c < 2; c++) {
                const int other = row(min(column_row(NT, i, 2 * t + c), n_rows - 1));
                r.d[i][c] = (K ? x.kd : x.d) + other / 8 * (K ? blocks / 8 : blocks) * 8 + other % 8;
            }
        }
        return r;
    }
};

// The same for neighbouring rows, a multiple of 8 the first: one pointer for all tiles.
template <int NT, bool K> struct Neighbours {
    const int8_t *q;
    const uint16_t *h;
    const float *d, *s;
    int blocks;  // of a row

    __device__ __forceinline__ uint2 codes(int i, int block) const { return *(const uint2 *)(q + (i * blocks + block) * 256); }
    __device__ __forceinline__ uint4 halves(int i, int block) const { return *(const uint4 *)(h + (i * blocks + block) * 256); }
    __device__ __forceinline__ float2 scales(int i, int block) const {
        return *(const float2 *)(d + (i * (K ? blocks / 8 : blocks) + block) * 8);
    }
    __device__ __forceinline__ float sums(int i, int sixteen) const { return s[(i * blocks * 2 + sixteen) * 8]; }
    __device__ __forceinline__ Neighbours at(int block) const {
        return {q + block * 256, h + block * 256, d + block * (K ? 1 : 8), s + block * 16, blocks};
    }
    static __device__ __forceinline__ Neighbours from(const Quant &x, int n, int tile) {
        const int lane = threadIdx.x % 32;
        const long long blocks = n / 32, first = tile * blocks;
        return {(K ? x.kq : x.q) + first * 256 + lane * 8, x.h + first * 256 + lane * 8,
                (K ? x.kd + tile * (blocks / 8) * 8 : x.d + first * 8) + lane % 4 * 2, x.ks + first * 16 + lane / 4, (int)blocks};
    }
};

enum { CHUNK = 8 };  // blocks of 32 inputs that are staged at a time

// The same from a chunk in shared memory.
template <bool K> struct Staged {
    enum { SCALES = K ? 1 : CHUNK };  // of a row and chunk
    const uint8_t *q;  // [tiles][CHUNK][8][32 codes or halves]
    const float *d, *s;  // [tiles][SCALES][8], [tiles][2 CHUNK][8]
    int first;  // block of the chunk's beginning

    struct At {
        const uint8_t *q;
        const float *d, *s;
        int from;  // block in the chunk
        __device__ __forceinline__ uint2 codes(int i, int block) const {
            return *(const uint2 *)(q + (i * CHUNK + from + block) * 256 + threadIdx.x % 32 * 8);
        }
        __device__ __forceinline__ uint4 halves(int i, int block) const {
            return *(const uint4 *)(q + (i * CHUNK + from + block) * 512 + threadIdx.x % 32 * 16);
        }
        __device__ __forceinline__ float2 scales(int i, int block) const {
            return *(const float2 *)(d + (i * SCALES + (K ? 0 : from + block)) * 8 + threadIdx.x % 4 * 2);
        }
        __device__ __forceinline__ float sums(int i, int sixteen) const {
            return s[(i * 2 * CHUNK + 2 * from + sixteen) * 8 + threadIdx.x % 32 / 4];
        }
    };
    __device__ __forceinline__ At at(int block) const { return {q, d, s, block - first}; }
};

