// The dot products of the float path, and the order of their sums, which is part of the definition:
//
//     K is cut into segments of `segment` inputs (1024; a function of n_in alone);
//     in a segment, lane l of 32 adds w[k] * x[k] with fmaf over k = 8 l .. 8 l + 7, then k + 256, ...;
//     lanes are added as a butterfly (16, 8, 4, 2, 1), segments in ascending order.
//
// How many weight rows and activation rows a warp works on at a time changes no sum. Small counts are template
// arguments, chosen inside the kernel, so that one launch serves one row and many.
#pragma once
#include "decode.cuh"
#include "int8.cuh"

enum { TILE = 8 };  // activation rows per tile

__device__ __forceinline__ void load8(const float *x, int k, int n_in, float *v) {
    if (n_in % 8 == 0) {
        const float4 a = *(const float4 *)(x + k), b = *(const float4 *)(x + k + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = k + i < n_in ? x[k + i] : 0.0f;
    }
}

// acc[r][n] += segment, lanes not yet added up: see `partial`.
template <int DT, int R, int NB>
__device__ __forceinline__ void dot_segment(const Mat &m, const Mat &m2, long long row, long long row2, long long last,
                                            const float *const *x, int first, int end, const uint2 *grid, float (*acc)[NB]) {
    for (int k = first + threadIdx.x % 32 * 8; k < end; k += 256) {
        float w[R][8];
#pragma unroll
        for (int r = 0; r < R; r++)
            decode8<DT>(R == 1 || r < R / 2 ? m : m2, R == 1 ? row : min((r < R / 2 ? row : row2) + r % (R > 1 ? R / 2 : 1), last), k, grid, w[r]);
#pragma unroll
        for (int n = 0; n < NB; n++) {
            float v[8];
            load8(x[n], k, m.n_in, v);
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int i = 0; i < 8; i++) acc[r][n] = fmaf(w[r][i], v[i], acc[r][n]);
        }
    }
}

// Butterfly over lanes of COUNT values: each round adds lane pairs and keeps half of the values per lane while there
// is more than one. Value `index + i` of the result lies in v[i] of the lanes that return `index`.
template <int COUNT> __device__ __forceinline__ int reduce(float *v) {
    int index = 0, count = COUNT;
#pragma unroll
    for (int off = 16; off; off >>= 1) {
        if (count > 1) {
            count /= 2;
            const bool up = threadIdx.x & off;
#pragma unroll
            for (int i = 0; i < COUNT / 2; i++) {
                if (i >= count) break;
                const float send = up ? v[i] : v[i + count], keep = up ? v[i + count] : v[i];
                v[i] = keep + __shfl_xor_sync(FULL, send, off);
            }
            index += up ? count : 0;
        } else {
            v[0] += __shfl_xor_sync(FULL, v[0], off);
        }
    }
    return index;
}

// Values left per lane after reduce<COUNT>.
template <int COUNT> struct Left { static const int value = COUNT > 32 ? COUNT / 32 : 1; };

template <int COUNT> __device__ __forceinline__ void reduce_to(float *v, float *out) {
    const int index = reduce<COUNT>(v);
#pragma unroll
    for (int i = 0; i < Left<COUNT>::value; i++) out[index + i] = v[i];  // lanes that share a value write the same
}

__device__ __forceinline__ void load_grid(const uint2 *from, uint2 *to) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) to[i] = from[i];
    __syncthreads();
}

// Sums of one segment of NB activation rows with R / 2 weight rows of `m` from `row` on and as many of `m2` from `row2`,
// lanes added up, into out[r * NB + n]. Rows beyond `last` repeat it (unused).
template <int DT, int R, int NB>
__device__ __forceinline__ void partial(const Mat &m, const Mat &m2, long long row, long long row2, long long last, const float *const *x,
                                        int first, int end, const uint2 *grid, float *out) {
    float acc[R][NB] = {};
    dot_segment<DT, R, NB>(m, m2, row, row2, last, x, first, end, grid, acc);
    reduce_to<R * NB>(&acc[0][0], out);
}

enum { PARTS = 2048 };  // floats of partial sums per block: turns x warps x values
