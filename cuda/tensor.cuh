// Matrix products on tensor cores, for engines opened with exact=False, and the order of their sums:
//
//     K is cut into at most 8 segments of 256 * ceil(n_in / 2048) inputs (a function of n_in alone);
//     in a segment the inputs are taken in ascending order: the integer product of a block (Q8_0: of 32 inputs, the other
//     quantised dtypes: of 256, their own small scales and minima included) is exact, one fmaf with the scales adds it;
//     F16 weights: two mma_f16 add each 32 inputs;
//     segments are added in ascending order.
//
// Weights are the wide side (16 rows) and activation rows the narrow side (8) of every product. How many tiles a warp
// has, how segments are shared among warps and whether activations pass through shared memory changes no sum.
//
// Layouts. Activations: int8.cuh; the 8 bytes (16 for halves) of a lane are neighbours of the next lane's. Weights Q8_0, Q2_K and IQ2_XXS: in the order in which lanes take them, see repack.cu.
#pragma once
#include "decode.cuh"

#ifndef DS4_RING
#define DS4_RING 11264  // bytes of weights in a warp's ring, about; less where a multiprocessor has little shared memory
#endif

enum { M_TILE = 16, COPIES = 32 };  // weight rows of a product; copies of the IQ2_XXS tables, one per bank
// Tables of IQ2_XXS in shared memory: selectors of magnitudes, then of signs, COPIES of each word side by side.
enum { GRID_WORDS = 256, SIGN_WORDS = 128, TABLE_WORDS = GRID_WORDS + SIGN_WORDS, TABLE_BYTES = TABLE_WORDS * COPIES * 4 };

#define MAGIC 0x4b400000     // 1.5 * 2^23: an int below 2^22 added to it is a float's mantissa
#define MAGIC_F 12582912.0f

__device__ __forceinline__ float exact_float(int v) { return __int_as_float(v) - MAGIC_F; }  // of a sum begun at MAGIC

// ---------------------------------------------------------------- activations

// NT tiles of 8 rows; NT = 0 is a tile of at most 4 rows, in columns 0, 2, 4, 6, which halves the work behind a product.
__host__ __device__ constexpr int tiles_of(int nt) { return nt ? nt : 1; }
__host__ __device__ constexpr bool used(int nt, int c) { return nt || c % 2 == 0; }  // element c of a fragment of C
__device__ __forceinline__ int column_row(int nt, int tile, int column) { return nt ? tile * 8 + column : column / 2; }

__host__ __device__ constexpr bool per_256(int dt) { return dt != Q8_0 && dt != F16; }  // scales of activations

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

__device__ __forceinline__ float small_float(uint32_t v) { return __uint_as_float(0x4b000000u | v) - 8388608.0f; }

// Minima times sums of codes, exactly: both are small integers. minima: of rows g and g + 8 for k = t and t + 4 of each of
// two products; which sums meet them is up to the caller.
template <int NT, class Sum> __device__ __forceinline__ void multiply_minima(float (*c)[4], const uint32_t (*minima)[4], Sum sum) {
#pragma unroll
    for (int i = 0; i < tiles_of(NT); i++)
#pragma unroll
        for (int p = 0; p < 2; p++) {
            const uint32_t b[2] = {__float_as_uint(sum(i, p, 0)), __float_as_uint(sum(i, p, 1))};
            mma_tf32(c[i], minima[p], b);
        }
}

// Raw<DT>: what a lane needs of BLOCKS blocks of a tile of 16 rows. A Source points to a tile (counted from the matrix's
// beginning), for this lane. `load` reads from it; `copy` starts copying to a stage of BYTES in shared memory that belongs
// to the warp, where `take` finds it: a lane takes what it copied, so that no barrier is needed. `step` multiplies; blocks
// from `end` on are skipped.
template <int DT> struct Raw;

template <> struct Raw<Q8_0> {
    enum { BLOCKS = 2, BYTES = BLOCKS * 640 };
    uint4 a[BLOCKS];
    uint32_t d[BLOCKS];

    struct Source {
        const uint8_t *q, *d;
        int last;
        Source() = default;
        __device__ __forceinline__ Source(const Mat &m, int tile) : last(m.n_in / 32 - 1) {
            const long long at = (long long)tile * (m.n_in / 32);
            q = m.q + at * 512 + threadIdx.x % 32 * 16;
            d = m.d + at * 32 + threadIdx.x % 32 / 4 * 4;
        }
        __device__ __forceinline__ void move(const Mat &a, const Mat &b) { q += b.q - a.q, d += b.d - a.d; }  // to the same tile of b
    };
    __device__ __forceinline__ void load(const Source &from, int block) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const int at = min(block + i, from.last);
            a[i] = load_once(from.q + at * 512);
            d[i] = __ldg((const uint32_t *)(from.d + at * 32));
        }
    }
    static __device__ __forceinline__ void copy(const Source &from, int block, uint8_t *to) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const int at = min(block + i, from.last);
            copy_async(to + i * 512 + lane * 16, from.q + at * 512);
            copy_async4(to + BLOCKS * 512 + i * 128 + lane * 4, from.d + at * 32);
        }
    }
    __device__ __forceinline__ void take(const uint8_t *from) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            a[i] = *(const uint4 *)(from + i * 512 + lane * 16);
            d[i] = *(const uint32_t *)(from + BLOCKS * 512 + i * 128 + lane * 4);
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
                const uint32_t a[4] = {v.x, v.z, v.y, v.w};
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
        __device__ __forceinline__ void move(const Mat &a, const Mat &b) { row[0] += b.q - a.q, row[1] += b.q - a.q; }
    };
    __device__ __forceinline__ void load(const Source &from, int block) {
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; i++) a[i / 2][i % 2] = load_once(from.row[i % 2] + min(block + i / 2, from.last) * 64);
    }
    static __device__ __forceinline__ void copy(const Source &from, int block, uint8_t *to) {
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; i++)
            copy_async(to + i * 512 + threadIdx.x % 32 * 16, from.row[i % 2] + min(block + i / 2, from.last) * 64);
    }
    __device__ __forceinline__ void take(const uint8_t *from) {
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; i++) a[i / 2][i % 2] = *(const uint4 *)(from + i * 512 + threadIdx.x % 32 * 16);
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
        __device__ __forceinline__ void move(const Mat &a, const Mat &b) { q += b.q - a.q, d += b.d - a.d; }
    };
    __device__ __forceinline__ void load(const Source &from, int block) {
        r[0] = load_once(from.q + block * 128);
        r[1] = load_once(from.q + block * 128 + 512);
        d = __ldg((const uint32_t *)(from.d + block * 4));
    }
    static __device__ __forceinline__ void copy(const Source &from, int block, uint8_t *to) {
        const int lane = threadIdx.x % 32;
        copy_async(to + lane * 16, from.q + block * 128);
        copy_async(to + 512 + lane * 16, from.q + block * 128 + 512);
        copy_async4(to + 1024 + lane * 4, from.d + block * 4);
    }
    __device__ __forceinline__ void take(const uint8_t *from) {
        const int lane = threadIdx.x % 32;
        r[0] = *(const uint4 *)(from + lane * 16);
        r[1] = *(const uint4 *)(from + 512 + lane * 16);
        d = *(const uint32_t *)(from + 1024 + lane * 4);
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

template <> struct Raw<Q2_K> {
    enum { BLOCKS = 8, BYTES = 1024 + 512 + 256 };
    uint4 r[2], s;  // codes of rows g and g + 8; bytes of scale and minimum of sub-blocks t / 2, t / 2 + 2, ...
    uint2 d;

    struct Source {
        const uint8_t *q, *s, *d;
        Source() = default;
        __device__ __forceinline__ Source(const Mat &m, int tile) {
            const long long at = (long long)tile * (m.n_in / 256);
            q = m.q + at * 1024 + threadIdx.x % 32 * 16;
            s = m.d + at * 320 + threadIdx.x % 32 / 2 * 16;
            d = m.d + at * 320 + 256 + threadIdx.x % 32 / 4 * 8;
        }
        __device__ __forceinline__ void move(const Mat &a, const Mat &b) { q += b.q - a.q, s += b.d - a.d, d += b.d - a.d; }
    };
    __device__ __forceinline__ void load(const Source &from, int block) {
        r[0] = load_once(from.q + block * 128);
        r[1] = load_once(from.q + block * 128 + 512);
        s = __ldg((const uint4 *)(from.s + block * 40));
        d = __ldg((const uint2 *)(from.d + block * 40));
    }
    static __device__ __forceinline__ void copy(const Source &from, int block, uint8_t *to) {
        const int lane = threadIdx.x % 32;
        copy_async(to + lane * 16, from.q + block * 128);
        copy_async(to + 512 + lane * 16, from.q + block * 128 + 512);
        copy_async(to + 1024 + lane * 16, from.s + block * 40);
        copy_async8(to + 1536 + lane * 8, from.d + block * 40);
    }
    __device__ __forceinline__ void take(const uint8_t *from) {
        const int lane = threadIdx.x % 32;
        r[0] = *(const uint4 *)(from + lane * 16);
        r[1] = *(const uint4 *)(from + 512 + lane * 16);
        s = *(const uint4 *)(from + 1024 + lane * 16);
        d = *(const uint2 *)(from + 1536 + lane * 8);
    }
    // Four codes times their scale of 4 bits: at most 45, so no byte carries into the next.
    static __device__ __forceinline__ uint32_t scaled(uint32_t codes, int shift, uint32_t scale) { return (codes >> shift & 0x03030303u) * scale; }
    template <int MT, int NT, class B>
    static __device__ __forceinline__ void step(const Raw *raw, int block, int, const B &b, float (*acc)[tiles_of(NT)][4], const uint32_t *) {
        const auto &at = b.at(block);
        int sum[MT][tiles_of(NT)][4] = {};
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            uint2 codes[tiles_of(NT)];
            fetch<NT>(at, i, codes);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                const uint4 u = raw[mt].r[0], v = raw[mt].r[1], s = raw[mt].s;
                const uint32_t s0 = (i < 4 ? s.x : s.y) >> i % 4 * 8 & 15, s1 = (i < 4 ? s.z : s.w) >> i % 4 * 8 & 15;
                const int shift = i % 4 * 2;
                const uint32_t a[4] = {scaled(i < 4 ? u.x : u.z, shift, s0), scaled(i < 4 ? v.x : v.z, shift, s1),
                                       scaled(i < 4 ? u.y : u.w, shift, s0), scaled(i < 4 ? v.y : v.w, shift, s1)};
#pragma unroll
                for (int j = 0; j < tiles_of(NT); j++) {
                    const uint32_t x[2] = {codes[j].x, codes[j].y};
                    add_mma_s8(sum[mt][j], a, x);
                }
            }
        }
        // Lane t brings the minima of the sub-blocks 2 j + t / 2, j = 4 (t % 2) .. + 3; which k they stand at is free.
        const int odd = threadIdx.x % 2, half = threadIdx.x % 4 / 2;
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            const uint32_t low = odd ? raw[mt].s.y : raw[mt].s.x, high = odd ? raw[mt].s.w : raw[mt].s.z;
            uint32_t minima[2][4];
#pragma unroll
            for (int p = 0; p < 2; p++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    minima[p][2 * j] = __float_as_uint(small_float(low >> (16 * p + 8 * j + 4) & 15));
                    minima[p][2 * j + 1] = __float_as_uint(small_float(high >> (16 * p + 8 * j + 4) & 15));
                }
            float c[tiles_of(NT)][4] = {};
            multiply_minima<NT>(c, minima, [&](int i, int p, int j) { return at.sums(i, 2 * (4 * odd + 2 * p + j) + half); });
            add_scaled<NT>(acc[mt], sum[mt], half_bits(raw[mt].d.x & 0xffffu), half_bits(raw[mt].d.y & 0xffffu), at);
            add_scaled<NT>(acc[mt], c, -half_bits(raw[mt].d.x >> 16), -half_bits(raw[mt].d.y >> 16), at);
        }
    }
};

template <> struct Raw<Q4_K> {
    enum { BLOCKS = 8, BYTES = 1024 + 2048 };
    uint4 head[2];  // d and dmin, 12 bytes of scales
    uint2 q[2][4];

    struct Source {
        const uint8_t *row[2];  // g, g + 8
        Source() = default;
        __device__ __forceinline__ Source(const Mat &m, int tile) {
            for (int i = 0; i < 2; i++) {
                const int r = tile * M_TILE + threadIdx.x % 32 / 4 + 8 * i;
                row[i] = m.q + (long long)row_of(m, r, m.n_out - 1) * m.row_bytes;
            }
        }
        __device__ __forceinline__ void move(const Mat &a, const Mat &b) { row[0] += b.q - a.q, row[1] += b.q - a.q; }
    };
    __device__ __forceinline__ void load(const Source &from, int block) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint8_t *p = from.row[h] + block * 18;
            head[h] = __ldg((const uint4 *)p);
#pragma unroll
            for (int i = 0; i < 4; i++) q[h][i] = __ldg((const uint2 *)(p + 16 + 32 * i) + threadIdx.x % 4);
        }
    }
    static __device__ __forceinline__ void copy(const Source &from, int block, uint8_t *to) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint8_t *p = from.row[h] + block * 18;
            copy_async(to + h * 512 + lane * 16, p);
#pragma unroll
            for (int i = 0; i < 4; i++) copy_async8(to + 1024 + (h * 4 + i) * 256 + lane * 8, p + 16 + 32 * i + lane % 4 * 8);
        }
    }
    __device__ __forceinline__ void take(const uint8_t *from) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            head[h] = *(const uint4 *)(from + h * 512 + lane * 16);
#pragma unroll
            for (int i = 0; i < 4; i++) q[h][i] = *(const uint2 *)(from + 1024 + (h * 4 + i) * 256 + lane * 8);
        }
    }
    // Stacked experts have more rows than n_out; their number is a multiple of 16 then, so only a plain matrix is clamped.
    static __device__ __forceinline__ int row_of(const Mat &m, int row, int last) { return m.n_out % M_TILE ? min(row, last) : row; }
    static __device__ __forceinline__ uint32_t six(uint32_t low, uint32_t top, bool upper, uint32_t nibbles) {  // four of the 6-bit values
        return upper ? (nibbles & 0x0f0f0f0fu) | (top >> 2 & 0x30303030u) : low & 0x3f3f3f3fu;
    }
    template <int MT, int NT, class B>
    static __device__ __forceinline__ void step(const Raw *raw, int block, int, const B &b, float (*acc)[tiles_of(NT)][4], const uint32_t *) {
        const auto &at = b.at(block);
        int sum[MT][tiles_of(NT)][4] = {};
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            uint2 codes[tiles_of(NT)];
            fetch<NT>(at, i, codes);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                const uint4 h0 = raw[mt].head[0], h1 = raw[mt].head[1];
                const uint2 u = raw[mt].q[0][i / 2], v = raw[mt].q[1][i / 2];
                const int shift = i % 2 * 4, byte = i % 4 * 8;
                const uint32_t a[4] = {u.x >> shift & 0x0f0f0f0fu, v.x >> shift & 0x0f0f0f0fu, u.y >> shift & 0x0f0f0f0fu,
                                       v.y >> shift & 0x0f0f0f0fu};
                multiply<NT>(sum[mt], a, (int)(six(h0.y, h0.y, i >= 4, h0.w) >> byte & 63), (int)(six(h1.y, h1.y, i >= 4, h1.w) >> byte & 63), codes);
            }
        }
        // Lane t brings the minima of the sub-blocks of 32 t and t + 4, for both of their halves.
        const int byte = threadIdx.x % 4 * 8;
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            const uint4 h0 = raw[mt].head[0], h1 = raw[mt].head[1];
            const uint32_t minima[4] = {__float_as_uint(small_float(six(h0.z, h0.z, false, 0) >> byte & 63)),
                                        __float_as_uint(small_float(six(h1.z, h1.z, false, 0) >> byte & 63)),
                                        __float_as_uint(small_float(six(h0.z, h0.z, true, h0.w >> 4) >> byte & 63)),
                                        __float_as_uint(small_float(six(h1.z, h1.z, true, h1.w >> 4) >> byte & 63))};
            const uint32_t twice[2][4] = {{minima[0], minima[1], minima[2], minima[3]}, {minima[0], minima[1], minima[2], minima[3]}};
            float c[tiles_of(NT)][4] = {};
            multiply_minima<NT>(c, twice, [&](int i, int p, int j) { return at.sums(i, 2 * (threadIdx.x % 4 + 4 * j) + p); });
            add_scaled<NT>(acc[mt], sum[mt], half_bits(h0.x & 0xffffu), half_bits(h1.x & 0xffffu), at);
            add_scaled<NT>(acc[mt], c, -half_bits(h0.x >> 16), -half_bits(h1.x >> 16), at);
        }
    }
};

// ---------------------------------------------------------------- segments

struct Cut {  // of K
    int segments, blocks;  // their number; blocks of 32 per segment
};

// Activations of a step, read a step ahead.
template <int NT, int DT, class B> struct Ahead {
    enum { BLOCKS = Raw<DT>::BLOCKS, TILES = tiles_of(NT) };
    B from;
    uint2 c[BLOCKS][TILES];
    float2 x[BLOCKS][TILES];
    uint4 h[BLOCKS][TILES];

    __device__ __forceinline__ void fetch(const B &b, int block, int end) {
        from = b.at(block);
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const int j = BLOCKS < 8 ? min(i, end - 1 - block) : i;  // only a step of few blocks can go beyond the end
#pragma unroll
            for (int k = 0; k < TILES; k++) {
                if constexpr (DT == F16) h[i][k] = from.halves(k, j);
                else c[i][k] = from.codes(k, j);
                if constexpr (DT == Q8_0) x[i][k] = from.scales(k, j);
            }
        }
    }
    __device__ __forceinline__ const Ahead &at(int) const { return *this; }
    __device__ __forceinline__ uint2 codes(int i, int block) const { return c[block][i]; }
    __device__ __forceinline__ uint4 halves(int i, int block) const { return h[block][i]; }
    __device__ __forceinline__ float2 scales(int i, int block) const { return DT == Q8_0 ? x[block][i] : from.scales(i, block); }
    __device__ __forceinline__ float sums(int i, int sixteen) const { return from.sums(i, sixteen); }
};

// NT tiles of neighbouring rows that travel through the ring with the weights of Q8_0 or F16: per tile and step the codes
// (or halves) of its blocks, then the scales of all tiles.
template <int DT, int NT> struct RowRing {
    enum { BLOCKS = Raw<DT>::BLOCKS, ITEM = DT == F16 ? 512 : 256, CODES = BLOCKS * ITEM, SCALES = DT == F16 ? 0 : BLOCKS * 32 };
    enum { BYTES = NT * (CODES + SCALES) };
    const uint8_t *q;  // this lane's first 16 bytes
    const float *d;
    int blocks, n_rows;  // blocks of a row; rows that are there

    __device__ __forceinline__ static RowRing from(const Quant &x, int n, int tile, int n_rows) {
        const int lane = threadIdx.x % 32;
        const long long blocks = n / 32, first = tile * blocks;
        return {(DT == F16 ? (const uint8_t *)x.h : (const uint8_t *)x.q) + first * ITEM + lane * 16, x.d + first * 8 + lane * 4, (int)blocks, n_rows};
    }
    // Calls fn(to, from) for every 16 bytes of this lane.
    template <typename Fn> __device__ __forceinline__ void each(int block, uint8_t *to, Fn fn) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < NT; i++) {
            const uint8_t *from = q + (long long)(i * blocks + block) * ITEM;
#pragma unroll
            for (int k = 0; k < CODES / 512; k++) {
                const int piece = lane + 32 * k, row = i * 8 + piece % (ITEM / 16) / (ITEM / 128);
                if (row < n_rows && block + piece / (ITEM / 16) < blocks) fn(to + i * CODES + piece * 16, from + k * 512);
            }
            if (SCALES && lane < SCALES / 16 && block + lane / 2 < blocks)
                fn(to + NT * CODES + i * SCALES + lane * 16, (const uint8_t *)(d + (i * blocks + block) * 8));
        }
    }
    __device__ __forceinline__ void copy(int block, uint8_t *to) const {
        each(block, to, [](uint8_t *to, const uint8_t *from) { copy_async(to, from); });
    }
    __device__ __forceinline__ void read(int block, uint8_t *to) const {  // at once
        each(block, to, [](uint8_t *to, const uint8_t *from) { *(uint4 *)to = *(const uint4 *)from; });
    }
    struct At {  // in shared memory
        const uint8_t *p;
        __device__ __forceinline__ const At &at(int) const { return *this; }
        __device__ __forceinline__ uint2 codes(int i, int block) const { return *(const uint2 *)(p + i * CODES + block * 256 + threadIdx.x % 32 * 8); }
        __device__ __forceinline__ uint4 halves(int i, int block) const { return *(const uint4 *)(p + i * CODES + block * 512 + threadIdx.x % 32 * 16); }
        __device__ __forceinline__ float2 scales(int i, int block) const {
            return *(const float2 *)(p + NT * CODES + i * SCALES + block * 32 + threadIdx.x % 4 * 8);
        }
    };
};
template <bool FIRST, class A, class B> struct Choose { using type = A; };
template <class A, class B> struct Choose<false, A, B> { using type = B; };

struct NoRing {  // rows are read where they lie
    enum { BYTES = 0 };
    struct At {};
    __device__ __forceinline__ void copy(int, uint8_t *) const {}
    __device__ __forceinline__ void read(int, uint8_t *) const {}
};

template <int DT, int MT, class Ring> struct RingSize {  // as `ring` in ds4_cuda/tensor.py
    enum { STEP = MT * Raw<DT>::BYTES + Ring::BYTES, ROOM = DT == IQ2_XXS ? DS4_RING * 5 / 8 : DS4_RING };  // the tables take the rest
    enum { DEPTH = ROOM / STEP < 2 ? 2 : ROOM / STEP, BYTES = DEPTH * STEP };
};

// A warp's share of the tasks of its block, one after the other: segments s0 .. s1 - 1 of a tile of outputs each. Weights
// are copied ahead to `ring`, the warp's own room, across the borders of tasks. Tasks (a class) has
//     count(), matrix(j, i), tile(j): number of tasks, their weights (tile < 0: nothing to do for this warp);
//     EARLY: these are known before follow(), which ready() calls;
//     Ring, ring(j): the activations, if they go through the ring; rows(j): if not;
//     segment(j, s, acc): takes a segment's sums;  finish(j): all threads of the block call it.
template <int DT, int MT, int NT, class Tasks>
__device__ __forceinline__ void stream(const Cut &cut, int s0, int s1, uint8_t *ring, const uint32_t *tables, Tasks &tasks) {
    using R = Raw<DT>;
    using Source = typename R::Source;
    using Ring = typename Tasks::Ring;
    using Size = RingSize<DT, MT, Ring>;
    enum { IN_RING = Ring::BYTES > 0, AHEAD = !IN_RING && NT <= 1 && MT == 1 && DT != IQ2_XXS };
    if (!Tasks::EARLY) tasks.ready();
    const int n = tasks.count();
    if (n <= 0) {
        if (Tasks::EARLY) tasks.ready();
        return;
    }
    const int begin = s0 * cut.blocks, end = min(s1 * cut.blocks, tasks.matrix(0, 0).n_in / 32);
    int task = 0, place = begin, tile = tasks.tile(0);  // of the copy
    Source from(tasks.matrix(0, 0), max(tile, 0));
    Ring x;
    const auto copy = [&](uint8_t *to, bool with_rows) {
        if (task < n && place < end) {
            if (tile >= 0) {
                R::copy(from, place, to);
                if (MT == 2) {  // not kept: registers are scarce
                    Source other = from;
                    other.move(tasks.matrix(task, 0), tasks.matrix(task, 1));
                    R::copy(other, place, to + R::BYTES);
                }
                if (with_rows) x.copy(place, to + MT * R::BYTES);
            }
            place += R::BLOCKS;
            if (place >= end && ++task < n) {
                place = begin, tile = tasks.tile(task);
                from = Source(tasks.matrix(task, 0), max(tile, 0));
                if (IN_RING && with_rows) x = tasks.ring(task);
            }
        }
        copy_commit();
    };
    for (int i = 0; i + 1 < Size::DEPTH; i++) copy(ring + i * Size::STEP, false);
    if (Tasks::EARLY) tasks.ready();
    if (IN_RING) {  // the rows of the steps under way, which could not be read before
        int j = 0, at = begin;
        x = tasks.ring(0);
        for (int i = 0; i + 1 < Size::DEPTH && j < n && begin < end; i++) {
            x.read(at, ring + i * Size::STEP + MT * R::BYTES);
            at += R::BLOCKS;
            if (at >= end && ++j < n) at = begin, x = tasks.ring(j);
        }
    }
    int stage = 0;
    auto b = tasks.rows(0);
    Ahead<NT, DT, decltype(b)> now, next;
    if (AHEAD && begin < end) now.fetch(b, begin, end);
    for (int j = 0; j < n; j++) {
        float acc[MT][tiles_of(NT)][4] = {};
        int s = s0, stop = min((s0 + 1) * cut.blocks, end);
        for (int block = begin; block < end; block += R::BLOCKS) {
            if (AHEAD) {
                if (block + R::BLOCKS < end) next.fetch(b, block + R::BLOCKS, end);
                else if (j + 1 < n) b = tasks.rows(j + 1), next.fetch(b, begin, end);
            }
            R raw[MT];
            copy_wait<Size::DEPTH - 2>();
            if (IN_RING) __syncwarp();  // rows are read by other lanes than copied them
            const uint8_t *const taken = ring + stage * Size::STEP;
#pragma unroll
            for (int i = 0; i < MT; i++) raw[i].take(taken + i * R::BYTES);
            copy(ring + (stage ? stage - 1 : Size::DEPTH - 1) * Size::STEP, true);  // the stage that was taken a step ago
            if constexpr (IN_RING) R::template step<MT, NT>(raw, block, stop, typename Ring::At{taken + MT * R::BYTES}, acc, tables);
            else if constexpr (AHEAD) R::template step<MT, NT>(raw, block, stop, now, acc, tables);
            else R::template step<MT, NT>(raw, block, stop, b, acc, tables);
            stage = stage + 1 == Size::DEPTH ? 0 : stage + 1;
            if (AHEAD) now = next;
            if (block + R::BLOCKS < stop) continue;
            tasks.segment(j, s, acc);
#pragma unroll
            for (int i = 0; i < MT * tiles_of(NT) * 4; i++) (&acc[0][0][0])[i] = 0.0f;
            s++, stop = min(stop + cut.blocks, end);
        }
        tasks.finish(j);
        if (!AHEAD && j + 1 < n) b = tasks.rows(j + 1);
    }
    copy_wait<0>();
}

// A warp's stretch of one task's K: the segments s0 .. s1 - 1 of the same tile of MT matrices, for tasks whose weights are
// known late (the experts'). `stream` without what goes beyond a task: it takes fewer registers.
template <int DT, int MT> struct Walk {
    using R = Raw<DT>;
    using Size = RingSize<DT, MT, NoRing>;
    typename R::Source from[MT];
    int s0, s1, begin, end;
    Cut cut;
    uint8_t *ring;

    __device__ __forceinline__ Walk(const Mat *const *m, int tile, const Cut &cut, int s0, int s1, uint8_t *ring)
        : s0(s0), s1(s1), begin(s0 * cut.blocks), end(min(s1 * cut.blocks, m[0]->n_in / 32)), cut(cut), ring(ring) {
        for (int i = 0; i < MT; i++) from[i] = typename R::Source(*m[i], tile);
        for (int i = 0; i + 1 < Size::DEPTH; i++) copy(begin + i * R::BLOCKS, i);
    }
    __device__ __forceinline__ void copy(int block, int stage) {
        if (block < end)
#pragma unroll
            for (int i = 0; i < MT; i++) R::copy(from[i], block, ring + (stage * MT + i) * R::BYTES);
        copy_commit();
    }
    // done(s, acc) gets the sums of each segment.
    template <int NT, class B, class Done> __device__ __forceinline__ void run(const B &b, const uint32_t *tables, Done done) {
        int stage = 0, block = begin;
        for (int s = s0; s < s1; s++) {
            float acc[MT][tiles_of(NT)][4] = {};
            const int stop = min((s + 1) * cut.blocks, end);
            for (; block < stop; block += R::BLOCKS) {
                R raw[MT];
                copy_wait<Size::DEPTH - 2>();
#pragma unroll
                for (int i = 0; i < MT; i++) raw[i].take(ring + (stage * MT + i) * R::BYTES);
                copy(block + (Size::DEPTH - 1) * R::BLOCKS, stage ? stage - 1 : Size::DEPTH - 1);  // taken a step ago
                R::template step<MT, NT>(raw, block, stop, b, acc, tables);
                stage = stage + 1 == Size::DEPTH ? 0 : stage + 1;
            }
            done(s, acc);
        }
        copy_wait<0>();  // the room is free for the next stretch
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
