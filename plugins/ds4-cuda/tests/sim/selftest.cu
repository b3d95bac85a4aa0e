// Kernels that test what the others stand on: each does one thing right or wrong on purpose.
#include <cuda_fp16.h>

#include "sim_ptx.h"

#define FULL 0xffffffffu

// Block sums over several warps, with threads that leave early.
extern "C" __global__ void sums(int *out, int n) {
    extern __shared__ __align__(16) int part[];
    __shared__ int total;
    if ((int)threadIdx.x >= n) return;
    int v = threadIdx.x;
    for (int off = 16; off; off >>= 1) v += __shfl_xor_sync(FULL, v, off);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        total = 0;
        for (int w = 0; w < n / 32; w++) total += part[w];
    }
    __syncthreads();
    out[blockIdx.x * n + threadIdx.x] = total + (int)blockIdx.x;
}

// One product of each kind; a, b: registers as lane fragments, c and d: 4 values per lane.
extern "C" __global__ void products(const uint32_t *a, const uint32_t *b, int *s8, float *f16, float *tf32) {
    const int lane = threadIdx.x;
    int i[4] = {1, 2, 3, 4};
    float h[4] = {}, t[4] = {};
    mma_s8(i, a + lane * 4, b + lane * 2);
    mma_f16(h, a + 128 + lane * 4, b + 64 + lane * 2);
    mma_tf32(t, a + 256 + lane * 4, b + 128 + lane * 2);
    for (int k = 0; k < 4; k++) s8[lane * 4 + k] = i[k], f16[lane * 4 + k] = h[k], tf32[lane * 4 + k] = t[k];
}

extern "C" __global__ void words(const uint32_t *in, uint32_t *out) {
    const uint32_t a = in[0], b = in[1], lane = threadIdx.x;
    const uint32_t made[] = {
        __byte_perm(a, b, 0x7250),
        pick_bytes(a, b, 0xf35c),
        (uint32_t)__dp4a((int)a, (int)b, 5),
        __float_as_uint(__half2float(__float2half_rn(__uint_as_float(in[2])))),
        to_tf32(__uint_as_float(in[3])),
        __ballot_sync(FULL, lane % 3 == 0),
        (uint32_t)__shfl_up_sync(FULL, lane, 3),
        (uint32_t)__shfl_down_sync(FULL, lane, 3),
        (uint32_t)__shfl_sync(FULL, lane, 9),
        __reduce_max_sync(FULL, lane * 7 % 32),
        (uint32_t)(__shfl_xor_sync(FULL, 1ll << 40 | lane, 5) >> 8),
        (uint32_t)__float2int_rn(2.5f),
    };
    for (int i = 0; i < 12; i++) out[lane * 12 + i] = made[i];
}

__noinline__ __device__ float deep(const uint8_t *in, int n) {
    volatile char big[200000];
    for (int k = 199999; k >= 0; k--) big[k] = in[0];
    return big[n];
}

// Mistakes, by number.
extern "C" __global__ void mistake(const uint8_t *in, float *out, int which, int n) {
    extern __shared__ __align__(16) float room[];
    const int i = threadIdx.x;
    switch (which) {
    case 0: out[i] = room[i]; break;                                        // nobody wrote it
    case 1: out[n + i] = 1.0f; break;                                       // beyond an allocation
    case 2: room[n] = 1.0f, out[i] = 0.0f; break;                           // beyond the shared memory that was asked for
    case 3: if (i < 5) __syncthreads(), __shfl_sync(FULL, i, 0); else __shfl_sync(FULL, i, 0); break;
    case 4: out[i] = ((const float2 *)(in + 4))->x; break;                  // misaligned
    case 5: copy_async(room + 4 * i, in + 16 * i), copy_commit(), out[i] = room[4 * i]; break;  // not waited for
    case 6: room[i] = (float)i, out[i] = room[(i + 1) % blockDim.x]; break;  // no barrier
    case 7: out[i] = (float)(1 << n); break;                                // wide shift
    case 8: if (i) __shfl_sync(1, i, 0); break;                             // not of the mask
    case 9: out[i] = deep(in, n); break;                                     // a stack that is too small
    }
}
