// After upload: the blocks of a file go where tensor.cuh's lanes take them. Same total size (rows padded to 16).
//
// A tile is 16 rows by one block of 32 (Q8_0) or 256 inputs; lane 4 g + t has rows g and g + 8 and in every 32 inputs the
// eight from 8 t on. Per tile:
//     Q8_0     codes 512: [lane][inputs 0 .. 3 of row g, of row g + 8, inputs 4 .. 7 alike];  scales 32: [g][row g, row g + 8]
//              halves
//     Q4_0     codes 256: [lane][row g, row g + 8]: 4 bytes, input i of the lane's eight in the low half of byte i, input 4 + i
//              in the high half;  scales 32 as above
//     MXFP4    codes 256: [lane][row g, row g + 8]: 4 bytes, inputs in ascending order;  scales 16: [g][row g, row g + 8] bytes
//     Q6_K     codes 3072: for row g, then g + 8: [low bits of blocks 0 .. 3, of blocks 4 .. 7, high bits][lane]: 16 bytes. Low: a
//              word per block as in Q4_0; high: a word per two blocks, its byte i has two bits each of inputs i and 4 + i of the
//              first and of the second;  then per tile 288: [16 rows] 16 scales, [g][row g, row g + 8] d
//     IQ2_XXS  codes 1024: [row g, row g + 8][lane][8 blocks of 32]: 16 bits, seven signs, a grid index and bit t of the
//              block's scale;  scales 32 as above
//     Q2_K     codes 1024: [row g, row g + 8][lane][inputs < 128, the others][8 bytes];  then per tile 320:
//              [g][sub-block even, odd][row g: 8 bytes of scale and minimum, row g + 8: 8 bytes], [g][row g, row g + 8] d, dmin
#include "common.cuh"

struct Place {
    long long tile;
    int g, half;
    __device__ __forceinline__ Place(long long block, long long per_row)
        : tile(block / per_row / 16 * per_row + block % per_row), g(block / per_row % 8), half(block / per_row % 16 / 8) {}
};

// Calls fn(block in this piece, part, place) for n_parts parts of every block. first: where this piece of the tensor begins.
template <typename Fn> __device__ __forceinline__ void each_part(long long first, long long n_blocks, long long per_row, int n_parts, Fn fn) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n_blocks * n_parts; i += (long long)gridDim.x * blockDim.x)
        fn(i / n_parts, (int)(i % n_parts), Place(first + i / n_parts, per_row));
}

__device__ __forceinline__ uint32_t read32(const uint8_t *p) {  // two bytes aligned
    return *(const unsigned short *)p | (uint32_t)*(const unsigned short *)(p + 2) << 16;
}

extern "C" __global__ void repack_q8_0(const uint8_t *from, uint8_t *q, uint8_t *d, long long first, long long n_blocks, long long per_row) {
    each_part(first, n_blocks, per_row, 5, [&](long long block, int part, const Place &at) {
        const uint8_t *p = from + block * 34;
        if (part == 4) ((unsigned short *)d)[at.tile * 16 + at.g * 2 + at.half] = *(const unsigned short *)p;
        else
            for (int i = 0; i < 2; i++) *(uint32_t *)(q + at.tile * 512 + (at.g * 4 + part) * 16 + 8 * i + at.half * 4) = read32(p + 2 + 8 * part + 4 * i);
    });
}

// The eight nibbles of lane t's inputs in a block of 32, in ascending order: inputs 0 .. 15 are in the low halves.
__device__ __forceinline__ uint32_t eight_nibbles(const uint8_t *codes, int t) {
    uint32_t v = 0;
    for (int i = 0; i < 8; i++) v |= (uint32_t)(codes[t % 2 * 8 + i] >> t / 2 * 4 & 15) << 4 * i;
    return v;
}

extern "C" __global__ void repack_q4_0(const uint8_t *from, uint8_t *q, uint8_t *d, long long first, long long n_blocks, long long per_row) {
    each_part(first, n_blocks, per_row, 5, [&](long long block, int part, const Place &at) {
        const uint8_t *p = from + block * 18;
        if (part == 4) {
            ((unsigned short *)d)[at.tile * 16 + at.g * 2 + at.half] = *(const unsigned short *)p;
            return;
        }
        const uint32_t v = eight_nibbles(p + 2, part);
        uint32_t word = 0;
        for (int i = 0; i < 4; i++) word |= (v >> 4 * i & 15) << 8 * i | (v >> (16 + 4 * i) & 15) << (8 * i + 4);
        *(uint32_t *)(q + at.tile * 256 + (at.g * 4 + part) * 8 + at.half * 4) = word;
    });
}

extern "C" __global__ void repack_mxfp4(const uint8_t *from, uint8_t *q, uint8_t *d, long long first, long long n_blocks, long long per_row) {
    each_part(first, n_blocks, per_row, 5, [&](long long block, int part, const Place &at) {
        const uint8_t *p = from + block * 17;
        if (part == 4) d[at.tile * 16 + at.g * 2 + at.half] = *p;
        else *(uint32_t *)(q + at.tile * 256 + (at.g * 4 + part) * 8 + at.half * 4) = eight_nibbles(p + 1, part);
    });
}

// part: t, then 4 for scales and d.
extern "C" __global__ void repack_q6_k(const uint8_t *from, uint8_t *q, uint8_t *d, long long first, long long n_blocks, long long per_row) {
    each_part(first, n_blocks, per_row, 5, [&](long long block, int part, const Place &at) {
        const uint8_t *p = from + block * 210;
        uint8_t *side = d + at.tile * 288;
        if (part == 4) {
            for (int i = 0; i < 16; i++) side[(at.g + 8 * at.half) * 16 + i] = p[192 + i];
            for (int i = 0; i < 2; i++) side[256 + at.g * 4 + at.half * 2 + i] = p[208 + i];
            return;
        }
        uint32_t *to = (uint32_t *)(q + at.tile * 3072 + at.half * 1536) + (at.g * 4 + part) * 4;
        uint32_t high[4] = {0, 0, 0, 0};
        for (int j = 0; j < 8; j++) {  // a block of 32: half j / 4 of the file's block, its quarter j % 4
            uint32_t low = 0;
            for (int i = 0; i < 8; i++) {
                const int at_low = j / 4 * 64 + j % 2 * 32 + part * 8 + i, at_high = 128 + j / 4 * 32 + part * 8 + i;
                low |= (uint32_t)(p[at_low] >> j / 2 % 2 * 4 & 15) << (i % 4 * 8 + i / 4 * 4);
                high[j / 2] |= (uint32_t)(p[at_high] >> j % 4 * 2 & 3) << (i % 4 * 8 + i / 4 * 2 + j % 2 * 4);
            }
            to[j / 4 * 128 + j % 4] = low;
        }
        for (int i = 0; i < 4; i++) to[256 + i] = high[i];
    });
}

extern "C" __global__ void repack_iq2_xxs(const uint8_t *from, uint8_t *q, uint8_t *d, long long first, long long n_blocks, long long per_row) {
    each_part(first, n_blocks, per_row, 9, [&](long long block, int part, const Place &at) {
        const uint8_t *p = from + block * 66;
        if (part == 8) {
            ((unsigned short *)d)[at.tile * 16 + at.g * 2 + at.half] = *(const unsigned short *)p;
            return;
        }
        const uint32_t index = read32(p + 2 + 8 * part), bits = read32(p + 6 + 8 * part);
        unsigned short *to = (unsigned short *)(q + at.tile * 1024 + at.half * 512 + at.g * 64) + part;
        for (int t = 0; t < 4; t++)
            to[8 * t] = (unsigned short)((bits >> 7 * t & 127) | (index >> 8 * t & 255) << 7 | (bits >> (28 + t) & 1) << 15);
    });
}

extern "C" __global__ void repack_q2_k(const uint8_t *from, uint8_t *q, uint8_t *d, long long first, long long n_blocks, long long per_row) {
    each_part(first, n_blocks, per_row, 11, [&](long long block, int part, const Place &at) {
        const uint8_t *p = from + block * 84;
        uint8_t *side = d + at.tile * 320;
        if (part < 8) {
            const uint32_t *v = (const uint32_t *)(p + 16 + 8 * part);  // part: half of 128 inputs, t
            *(uint2 *)(q + at.tile * 1024 + at.half * 512 + (at.g * 4 + part % 4) * 16 + part / 4 * 8) = make_uint2(v[0], v[1]);
        } else if (part < 10) {
            for (int j = 0; j < 8; j++) side[(at.g * 2 + part - 8) * 16 + at.half * 8 + j] = p[2 * j + part - 8];
        } else {
            *(uint32_t *)(side + 256 + at.g * 8 + at.half * 4) = *(const uint32_t *)(p + 80);
        }
    });
}
