// Helpers of all kernels: cache addresses, block sums, rotation, cache roundings.
//
// The build has contraction off (-fmad=false); fused operations are written as fmaf where they are meant. So an
// expression rounds the same way in every kernel that contains it.
#pragma once
#include <cuda_fp16.h>

#include "ptx.cuh"
#include "records.cuh"

#define FULL 0xffffffffu

__device__ __forceinline__ float half_bits(uint32_t bits) { return __half2float(__ushort_as_half((unsigned short)bits)); }

__device__ __forceinline__ float warp_sum(float v) {
    for (int off = 16; off; off >>= 1) v += __shfl_xor_sync(FULL, v, off);
    return v;
}

// Sum over the block in a fixed order; every thread gets it. `room` holds one float per warp.
__device__ __forceinline__ float block_sum(float v, float *room) {
    const int n_warps = blockDim.x / 32;
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
    __syncthreads();
    float total = room[0];
    for (int w = 1; w < n_warps; w++) total += room[w];
    return total;
}

__device__ __forceinline__ float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
    const float a = gate > limit ? limit : gate;
    const float b = up > limit ? limit : up < -limit ? -limit : up;
    return a * sigmoid(a) * b;
}

// ---------------------------------------------------------------- cached rows

__device__ __forceinline__ uint8_t *slab_of(const Run &run, int item) {
    return run.slabs + (long long)run.item_slab[item] * run.slab_bytes;
}

__device__ __forceinline__ int cache_bytes(const Run &run) { return run.cache_half ? 2 : 4; }

// Positions from item_pos on lie in the step buffers, older ones in the slab's ring.
__device__ __forceinline__ const uint8_t *latent_at(const Run &run, const Layer &layer, int item, int pos) {
    const int bytes = run.head_dim * cache_bytes(run), first = run.item_pos[item];
    if (pos >= first) return layer.step_latent + (long long)(run.item_row[item] + pos - first) * bytes;
    return slab_of(run, item) + layer.latent + (long long)(pos % run.ring) * bytes;
}

__device__ __forceinline__ uint8_t *entry_slot(const Run &run, const Layer &layer, int item, int w, long long offset,
                                               int dim) {
    const int per_page = PAGE_TOKENS / layer.ratio, page = run.page_ids[run.page_start[item] + w / per_page];
    return run.pages + (long long)page * run.page_bytes + offset + (long long)(w % per_page) * dim * cache_bytes(run);
}

__device__ __forceinline__ float load_cached(const Run &run, const uint8_t *row, int k) {
    return run.cache_half ? __half2float(((const __half *)row)[k]) : ((const float *)row)[k];
}

__device__ __forceinline__ void store_cached(const Run &run, uint8_t *row, int k, float v) {
    if (run.cache_half)
        ((__half *)row)[k] = __float2half_rn(v);
    else
        ((float *)row)[k] = v;
}

// What a row attends to: raw positions [first, first + n_raw), then n_entries compressed entries.
struct View {
    int item, first, n_raw, n_entries;
    const int *selected;  // null: entries 0 .. n_entries - 1
};

__device__ __forceinline__ View view_of(const Run &run, const Layer &layer, int row) {
    const int pos = run.pos[row];
    View v = {run.row_item[row], pos + 1 > run.window ? pos + 1 - run.window : 0, 0, 0, nullptr};
    v.n_raw = pos + 1 - v.first;
    if (layer.ratio) v.n_entries = (pos + 1) / layer.ratio;
    if (layer.ratio == CSA && v.n_entries > run.top_k) {
        v.n_entries = run.top_k;
        v.selected = run.selected + (long long)row * run.top_k;
    }
    return v;
}

__device__ __forceinline__ const uint8_t *visible_at(const Run &run, const Layer &layer, const View &v, int t) {
    if (t < v.n_raw) return latent_at(run, layer, v.item, v.first + t);
    t -= v.n_raw;
    return entry_slot(run, layer, v.item, v.selected ? v.selected[t] : t, layer.entries, run.head_dim);
}

// Attention runs on tensor cores, which finishes its queries itself.
__device__ __forceinline__ bool attends8(const Run &run) { return run.int8 && run.head_dim % 8 == 0; }

// ---------------------------------------------------------------- rotation

__device__ __forceinline__ const float *cos_of(const Run &run, const Layer &layer, int row) {
    return run.cosines + ((long long)(layer.ratio != 0) * run.max_rows + row) * (run.rope_dim / 2);
}

__device__ __forceinline__ const float *sin_of(const Run &run, const Layer &layer, int row) {
    return run.sines + ((long long)(layer.ratio != 0) * run.max_rows + row) * (run.rope_dim / 2);
}

__device__ __forceinline__ void rotate_pair(float *tail, int i, float c, float s) {
    const float a = tail[2 * i], b = tail[2 * i + 1];
    tail[2 * i] = a * c - b * s;
    tail[2 * i + 1] = a * s + b * c;
}

// ---------------------------------------------------------------- the original engine's cache roundings

__device__ inline float power_of_two_above(float v) {
    int exponent;
    const float fraction = frexpf(v, &exponent);  // in [0.5, 1)
    return ldexpf(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

__device__ inline float nearest_e4m3(float v) {
    int exponent;
    v = v > 448.0f ? 448.0f : v < -448.0f ? -448.0f : v;
    frexpf(v, &exponent);
    const float step = ldexpf(1.0f, (exponent - 1 > -6 ? exponent - 1 : -6) - 3);
    return rintf(v / step) * step;
}

__device__ inline float nearest_e2m1(float v) {
    const float a = fabsf(v);
    const float q = a <= 0.25f ? 0.0f : a < 0.75f ? 0.5f : a <= 1.25f ? 1.0f : a < 1.75f ? 1.5f : a <= 2.5f ? 2.0f
                    : a < 3.5f ? 3.0f : a <= 5.0f ? 4.0f : 6.0f;
    return copysignf(q, v);
}

// Rounds a row that lies in shared memory; all threads of the block call it. FP8 in groups of 64, then F16.
__device__ inline void round_latent(float *row, int n, int n_plain) {
    __syncthreads();
    for (int at = threadIdx.x * 64; at < n_plain; at += blockDim.x * 64) {
        float top = 1e-4f;
        for (int k = at; k < at + 64; k++) top = fabsf(row[k]) > top ? fabsf(row[k]) : top;
        const float scale = power_of_two_above(top / 448.0f);
        for (int k = at; k < at + 64; k++) row[k] = nearest_e4m3(row[k] / scale) * scale;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < n; k += blockDim.x) row[k] = __half2float(__float2half_rn(row[k]));
    __syncthreads();
}

// Walsh-Hadamard transform, then FP4 in groups of 32.
__device__ inline void round_index(float *row, int n) {
    for (int half = 1; half < n; half *= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
            const int k = i / half * 2 * half + i % half;
            const float a = row[k], b = row[k + half];
            row[k] = a + b;
            row[k + half] = a - b;
        }
    }
    __syncthreads();
    const float scale = (float)(1.0 / sqrt((double)n));
    for (int at = threadIdx.x * 32; at < n; at += blockDim.x * 32) {
        float top = 7e-38f;
        for (int k = at; k < at + 32; k++) {
            row[k] *= scale;
            top = fabsf(row[k]) > top ? fabsf(row[k]) : top;
        }
        const float step = power_of_two_above(top / 6.0f);
        for (int k = at; k < at + 32; k++) row[k] = nearest_e2m1(row[k] / step) * step;
    }
    __syncthreads();
}
