// Matrix products on tensor cores, for engines opened with exact=False, and the order of their sums:
//
//     K is cut into at most 8 segments of 256 * ceil(n_in / 2048) inputs (a function of n_in alone);
//     in a segment the inputs are taken in ascending order: the integer product of a block (Q8_0, Q4_0, MXFP4: of 32 inputs, the other
//     quantised dtypes: of 256, their own small scales and minima included) is exact, one fmaf with the scales adds it;
//     F16 weights: two mma_f16 add each 32 inputs;
//     segments are added in ascending order.
//
// Weights are the wide side (16 rows) and activation rows the narrow side (8) of every product. How many tiles a warp
// has, how segments are shared among warps and whether activations pass through shared memory changes no sum.
//
// Layouts. Activations: int8.cuh; the 8 bytes (16 for halves) of a lane are neighbours of the next lane's. Weights: in the order in which
// lanes take them, see repack.cu.
#pragma once
#include "activations.cuh"


enum { M_TILE = 16, COPIES = 32 };  // weight rows of a product; copies of the IQ2_XXS tables, one per bank
// Tables of IQ2_XXS in shared memory: selectors of magnitudes, then of signs, COPIES of each word side by side.
enum { GRID_WORDS = 256, SIGN_WORDS = 128, TABLE_WORDS = GRID_WORDS + SIGN_WORDS, TABLE_BYTES = TABLE_WORDS * COPIES * 4 };

#define MAGIC 0x4b400000     // 1.5 * 2^23: an int below 2^22 added to it is a float's mantissa
#define MAGIC_F 12582912.0f

__device__ __forceinline__ float exact_float(int v) { return __int_as_float(v) - MAGIC_F; }  // of a sum begun at MAGIC

// ---------------------------------------------------------------- one step of weights

// acc += the product of a block of 32, whose weights are a and have scales w0 (rows g) and w1 (rows g + 8).
template <int NT>
__device__ __forceinline__ void multiply(float (*acc)[4], const uint32_t *a, float w0, float w1, const uint2 *codes, const float2 *scales) {
#pragma unroll
    for (int i = 0; i < tiles_of(NT); i++) {
        int c[4];
        const uint32_t b[2] = {codes[i].x, codes[i].y};
        mma_s8(c, a, b, MAGIC);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (used(NT, j)) acc[i][j] = fmaf(exact_float(c[j]), (j < 2 ? w0 : w1) * (j % 2 ? scales[i].y : scales[i].x), acc[i][j]);
    }
}

// sum += the product of a block times the integer scales s0 (rows g) and s1 (rows g + 8) of its weights.
template <int NT> __device__ __forceinline__ void multiply(int (*sum)[4], const uint32_t *a, int s0, int s1, const uint2 *codes) {
#pragma unroll
    for (int i = 0; i < tiles_of(NT); i++) {
        int c[4];
        const uint32_t b[2] = {codes[i].x, codes[i].y};
        mma_s8(c, a, b, 0);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (used(NT, j)) sum[i][j] += c[j] * (j < 2 ? s0 : s1);
    }
}

template <int NT, class At> __device__ __forceinline__ void fetch(const At &b, int block, uint2 *codes) {
#pragma unroll
    for (int i = 0; i < tiles_of(NT); i++) codes[i] = b.codes(i, block);
}

// acc += w * x * v for 256 inputs whose scales are w0, w1 and those of the columns.
template <int NT, class At, class V>
__device__ __forceinline__ void add_scaled(float (*acc)[4], const V (*v)[4], float w0, float w1, const At &b) {
#pragma unroll
    for (int i = 0; i < tiles_of(NT); i++) {
        const float2 x = b.scales(i, 0);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (used(NT, j)) acc[i][j] = fmaf((float)v[i][j], (j < 2 ? w0 : w1) * (j % 2 ? x.y : x.x), acc[i][j]);
    }
}

// Raw<DT>: what a lane needs of BLOCKS blocks of a tile of 16 rows. A Source points to a tile (counted from the matrix's
// beginning), for this lane. `load` reads from it; `copy` starts copying to a stage of BYTES in shared memory that belongs
// to the warp, where `take` finds it: a lane takes what it copied and, of Q8_0's scales, what other lanes did, so that
// __syncwarp comes between. `step` multiplies; blocks from `end` on are skipped.
template <int DT> struct Raw;

template <> struct Raw<Q8_0> {
    enum { BLOCKS = 4, BYTES = BLOCKS * 544 };
    uint4 a[BLOCKS];
    uint32_t d[BLOCKS];

    struct Source {
        const uint8_t *q, *d;  // d: of all lanes
        int n;  // blocks of a row
        Source() = default;
        __device__ __forceinline__ Source(const Mat &m, int tile) : n(m.n_in / 32) {
            const long long at = (long long)tile * n;
            q = m.q + at * 512 + threadIdx.x % 32 * 16;
            d = m.d + at * 32;
        }
    };
    __device__ __forceinline__ void load(const Source &from, int block) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const int at = min(block + i, from.n - 1);
            a[i] = load_once(from.q + at * 512);
            d[i] = __ldg((const uint32_t *)(from.d + at * 32) + threadIdx.x % 32 / 4);
        }
    }
    static __device__ __forceinline__ void copy(const Source &from, int block, Shared to) {
        const int lane = threadIdx.x % 32;
        const uint8_t *q = from.q + (uint32_t)block * 512, *d = from.d + (uint32_t)block * 32 + lane * 16;
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
            if (i == 0 || block + i < from.n) (to + lane * 16 + i * 512).copy16(q + i * 512);
        if (lane < 2 * BLOCKS && block + lane / 2 < from.n) (to + lane * 16 + BLOCKS * 512).copy16(d);
    }
    __device__ __forceinline__ void take(Shared from) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            a[i] = (from + i * 512 + lane * 16).load16();
            d[i] = (from + BLOCKS * 512 + i * 32 + lane / 4 * 4).load4();
        }
    }
    template <int MT, int NT, class B>
    static __device__ __forceinline__ void step(const Raw *raw, int block, int end, const B &b, float (*acc)[tiles_of(NT)][4], const uint32_t *) {
        const auto &at = b.at(block);
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            if (block + i >= end) break;
            uint2 codes[tiles_of(NT)];
            float2 scales[tiles_of(NT)];
            fetch<NT>(at, i, codes);
#pragma unroll
            for (int j = 0; j < tiles_of(NT); j++) scales[j] = at.scales(j, i);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                const uint4 v = raw[mt].a[i];
                const uint32_t a[4] = {v.x, v.y, v.z, v.w};
                multiply<NT>(acc[mt], a, half_bits(raw[mt].d[i] & 0xffffu), half_bits(raw[mt].d[i] >> 16), codes, scales);
            }
        }
    }
};

template <> struct Raw<F16> {
    enum { BLOCKS = 2, BYTES = BLOCKS * 1024 };
    uint4 a[BLOCKS][2];

    struct Source {
        const uint8_t *row[2];  // g, g + 8
        int last;
        Source() = default;
        __device__ __forceinline__ Source(const Mat &m, int tile) : last(m.n_in / 32 - 1) {
            for (int i = 0; i < 2; i++) {
                const int r = min(tile * M_TILE + (int)threadIdx.x % 32 / 4 + 8 * i, m.n_out - 1);
                row[i] = m.q + (long long)r * m.row_bytes + threadIdx.x % 4 * 16;
            }
        }
    };
    __device__ __forceinline__ void load(const Source &from, int block) {
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; i++) a[i / 2][i % 2] = load_once(from.row[i % 2] + min(block + i / 2, from.last) * 64);
    }
    static __device__ __forceinline__ void copy(const Source &from, int block, Shared to) {
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; i++)
            (to + threadIdx.x % 32 * 16 + i * 512).copy16(from.row[i % 2] + min(block + i / 2, from.last) * 64);
    }
    __device__ __forceinline__ void take(Shared from) {
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; i++) a[i / 2][i % 2] = (from + threadIdx.x % 32 * 16 + i * 512).load16();
    }

    template <int MT, int NT, class B>
    static __device__ __forceinline__ void step(const Raw *raw, int block, int end, const B &b, float (*acc)[tiles_of(NT)][4], const uint32_t *) {
        const auto &at = b.at(block);
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            if (block + i >= end) break;
#pragma unroll
            for (int nt = 0; nt < tiles_of(NT); nt++) {
                const uint4 x = at.halves(nt, i);
                const uint32_t low[2] = {x.x, x.y}, high[2] = {x.z, x.w};
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    const uint4 u = raw[mt].a[i][0], v = raw[mt].a[i][1];
                    const uint32_t first[4] = {u.x, v.x, u.y, v.y}, second[4] = {u.z, v.z, u.w, v.w};
                    mma_f16(acc[mt][nt], first, low);
                    mma_f16(acc[mt][nt], second, high);
                }
            }
        }
    }
};

template <> struct Raw<IQ2_XXS> {
    enum { BLOCKS = 8, BYTES = 1024 + 128 };
    uint4 r[2];  // rows g and g + 8: 16 bits for each block of 32: 7 signs, index, one bit of the block's scale
    uint32_t d;

    struct Source {
        const uint8_t *q, *d;
        Source() = default;
        __device__ __forceinline__ Source(const Mat &m, int tile) {
            const long long at = (long long)tile * (m.n_in / 256);
            q = m.q + at * 1024 + threadIdx.x % 32 * 16;
            d = m.d + at * 32 + threadIdx.x % 32 / 4 * 4;
        }
    };
    __device__ __forceinline__ void load(const Source &from, int block) {
        r[0] = load_once(from.q + block * 128);
        r[1] = load_once(from.q + block * 128 + 512);
        d = __ldg((const uint32_t *)(from.d + block * 4));
    }
    static __device__ __forceinline__ void copy(const Source &from, int block, Shared to) {
        const int lane = threadIdx.x % 32;
        (to + lane * 16).copy16(from.q + block * 128);
        (to + lane * 16 + 512).copy16(from.q + block * 128 + 512);
        (to + lane * 4 + 1024).copy4(from.d + block * 4);
    }
    __device__ __forceinline__ void take(Shared from) {
        const int lane = threadIdx.x % 32;
        r[0] = (from + lane * 16).load16();
        r[1] = (from + lane * 16 + 512).load16();
        d = (from + lane * 4 + 1024).load4();
    }
    // The scales of all blocks of a row, 4 bits each: block i at nibble i % 2 * 4 + i / 2. Lane t has bit t of each.
    static __device__ __forceinline__ uint32_t gather(const uint4 &v) {
        const uint32_t own = (v.x >> 15 & 0x00010001u) | (v.y >> 11 & 0x00100010u) | (v.z >> 7 & 0x01000100u) | (v.w >> 3 & 0x10001000u);
        uint32_t all = own << threadIdx.x % 4;
        all |= __shfl_xor_sync(FULL, all, 1);
        return all | __shfl_xor_sync(FULL, all, 2);
    }
    // Eight weights from 16 bits: selectors of magnitudes and of signs, added; a byte permutation picks from 6 values.
    static __device__ __forceinline__ void decode(uint32_t word, bool high, const uint32_t *tables, uint32_t *lo, uint32_t *hi) {
        static_assert(COPIES == 32, "a word's copies fill the 128 bytes between the bits below");
        const uint32_t lane = threadIdx.x % 32 * 4;
        const uint32_t index = ((high ? word >> 16 : word) & 0x7f80u) | lane, sign = ((high ? word >> 9 : word << 7) & 0x3f80u) | lane;
        const uint32_t at = *(const uint32_t *)((const uint8_t *)tables + index) +
                            *(const uint32_t *)((const uint8_t *)(tables + GRID_WORDS * COPIES) + sign);
        *lo = pick_bytes(0x002b1908u, 0x00d5e7f8u, at);  // 8, 25, 43 and their negatives
        *hi = pick_bytes(0x002b1908u, 0x00d5e7f8u, at >> 16);
    }
    // 2 s + 1 for the nibbles s of all blocks of a row, a byte each: blocks 0, 4, 1, 5, then 2, 6, 3, 7.
    static __device__ __forceinline__ uint2 odd_scales(uint32_t all) {
        return make_uint2((all & 0x0f0f0f0fu) * 2 + 0x01010101u, (all >> 4 & 0x0f0f0f0fu) * 2 + 0x01010101u);
    }
    static __device__ __forceinline__ int scale(const uint2 &odd, int i) {
        return (int)pick_bytes(i / 2 % 2 ? odd.y : odd.x, 0, 0x4440u + i / 4 + i % 2 * 2);
    }
    // A weight is d / 8 * (2 s + 1) * code.
    template <int MT, int NT, class B>
    static __device__ __forceinline__ void step(const Raw *raw, int block, int, const B &b, float (*acc)[tiles_of(NT)][4], const uint32_t *tables) {
        const auto at = b.at(block);
        int sum[MT][tiles_of(NT)][4] = {};
        uint2 odd[MT][2];
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            for (int h = 0; h < 2; h++) odd[mt][h] = odd_scales(gather(raw[mt].r[h]));
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            uint2 codes[tiles_of(NT)];
            fetch<NT>(at, i, codes);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                const uint4 u = raw[mt].r[0], v = raw[mt].r[1];
                const uint32_t w0 = i / 2 == 0 ? u.x : i / 2 == 1 ? u.y : i / 2 == 2 ? u.z : u.w;
                const uint32_t w1 = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
                uint32_t a[4];
                decode(w0, i % 2, tables, &a[0], &a[2]);
                decode(w1, i % 2, tables, &a[1], &a[3]);
                multiply<NT>(sum[mt], a, scale(odd[mt][0], i), scale(odd[mt][1], i), codes);
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            add_scaled<NT>(acc[mt], sum[mt], half_bits(raw[mt].d & 0xffffu) * 0.125f, half_bits(raw[mt].d >> 16) * 0.125f, at);
    }
};

// The tables of IQ2_XXS. Whole warps.
__device__ __forceinline__ void load_tables(const uint32_t *from, uint32_t *to) {
    const int lane = threadIdx.x % 32;
    for (int first = threadIdx.x / 32 * 32; first < TABLE_WORDS; first += blockDim.x) {
        const uint32_t own = __ldg(from + first + lane);
#pragma unroll
        for (int i = 0; i < 32; i++) to[(first + i) * COPIES + lane] = __shfl_sync(FULL, own, i);
    }
    __syncthreads();
}
