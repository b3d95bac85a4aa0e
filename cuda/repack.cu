// After upload: file blocks become two planes, so that lanes load neighbouring aligned words. Same total size.
#include "common.cuh"

// 34-byte blocks: codes [n_blocks, 32] and scales [n_blocks]; first_block: where this piece of the tensor begins.
extern "C" __global__ void repack_q8_0(const uint8_t *from, uint8_t *q, uint8_t *d, long long first_block, long long n_blocks) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n_blocks * 17; i += (long long)gridDim.x * blockDim.x) {
        const long long block = i / 17, part = i % 17;
        const unsigned short v = ((const unsigned short *)from)[i];
        if (part == 0) ((unsigned short *)d)[first_block + block] = v;
        else ((unsigned short *)q)[(first_block + block) * 16 + part - 1] = v;
    }
}

// 66-byte blocks: codes [n_blocks, 64 bytes] and scales [n_blocks].
extern "C" __global__ void repack_iq2_xxs(const uint8_t *from, uint8_t *q, uint8_t *d, long long first_block, long long n_blocks) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n_blocks * 33; i += (long long)gridDim.x * blockDim.x) {
        const long long block = i / 33, part = i % 33;
        const unsigned short v = ((const unsigned short *)from)[i];
        if (part == 0) ((unsigned short *)d)[first_block + block] = v;
        else ((unsigned short *)q)[(first_block + block) * 32 + part - 1] = v;
    }
}
