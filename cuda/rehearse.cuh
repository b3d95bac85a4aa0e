// A kernel of a few microseconds spends most of them on the way of its own instructions: between two runs of it the other
// kernels of a step have pushed them out of the caches. So a kernel that waits long for the one before may run its body
// twice: once while it waits, on whatever the memory holds, and then on the data. It pays for store_rows and quantize_*
// at one row (2 microseconds a layer), not for kernels whose predecessor is short or that need much of a
// multiprocessor: docs/decisions/010.
#pragma once
#include "common.cuh"

// body(false), follow(), body(true). body(false) must store nothing to device memory, and what other kernels write must
// be loaded with fresh().
template <class Body> __device__ __forceinline__ void rehearse(Body body) {
#ifdef DS4_REHEARSE
#pragma unroll 1
    for (int pass = unknown_zero(); pass < 2; pass++) {
        if (pass) follow();
        body(pass != 0);
    }
#else
    follow();
    body(true);
#endif
}

// From L2, past L1, where the rehearsal may have left what was there before.
template <class T> __device__ __forceinline__ T fresh(const T *p) { return __ldcg(p); }

__device__ __forceinline__ void fresh8(const float *x, int k, int n, float *v) {  // 0 from n on
    if (n % 8 == 0) {
        const float4 a = fresh((const float4 *)(x + k)), b = fresh((const float4 *)(x + k + 4));
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = k + i < n ? fresh(x + k + i) : 0.0f;
    }
}
