// Q2_K, Q4_K, Q5_K and Q6_K on tensor cores: steps of 256 inputs whose small scales and minima are integers.
#pragma once
#include "tensor.cuh"

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
    };
    __device__ __forceinline__ void load(const Source &from, int block) {
        r[0] = load_once(from.q + block * 128);
        r[1] = load_once(from.q + block * 128 + 512);
        s = __ldg((const uint4 *)(from.s + block * 40));
        d = __ldg((const uint2 *)(from.d + block * 40));
    }
    static __device__ __forceinline__ void copy(const Source &from, int block, Shared to) {
        const int lane = threadIdx.x % 32;
        (to + lane * 16).copy16(from.q + block * 128);
        (to + lane * 16 + 512).copy16(from.q + block * 128 + 512);
        (to + lane * 16 + 1024).copy16(from.s + block * 40);
        (to + lane * 8 + 1536).copy8(from.d + block * 40);
    }
    __device__ __forceinline__ void take(Shared from) {
        const int lane = threadIdx.x % 32;
        r[0] = (from + lane * 16).load16();
        r[1] = (from + lane * 16 + 512).load16();
        s = (from + lane * 16 + 1024).load16();
        d = (from + lane * 8 + 1536).load8();
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

// Q4_K, or Q5_K, which has a fifth bit of every code: rows lie as in the file, in blocks of 144 or 176 bytes.
template <bool FIVE> struct Raw45 {
    enum { BLOCKS = 8, BYTES = 1024 + 2048 + FIVE * 512, PER_32 = FIVE ? 22 : 18, CODES = FIVE ? 48 : 16 };  // bytes
    uint4 head[2];  // d and dmin, 12 bytes of scales
    uint2 q[2][4], fifth[2];  // fifth: bit i of a byte is that of block i; not set for Q4_K

    struct Source {
        const uint8_t *row[2];  // g, g + 8
        Source() = default;
        __device__ __forceinline__ Source(const Mat &m, int tile) {
            for (int i = 0; i < 2; i++) {
                const int r = tile * M_TILE + threadIdx.x % 32 / 4 + 8 * i;
                row[i] = m.q + (long long)row_of(m, r, m.n_out - 1) * m.row_bytes;
            }
        }
    };
    __device__ __forceinline__ void load(const Source &from, int block) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint8_t *p = from.row[h] + block * PER_32;
            head[h] = __ldg((const uint4 *)p);
#pragma unroll
            for (int i = 0; i < 4; i++) q[h][i] = __ldg((const uint2 *)(p + CODES + 32 * i) + threadIdx.x % 4);
            if (FIVE) fifth[h] = __ldg((const uint2 *)(p + 16) + threadIdx.x % 4);
        }
    }
    static __device__ __forceinline__ void copy(const Source &from, int block, Shared to) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint8_t *p = from.row[h] + block * PER_32;
            (to + lane * 16 + h * 512).copy16(p);
#pragma unroll
            for (int i = 0; i < 4; i++) (to + lane * 8 + 1024 + (h * 4 + i) * 256).copy8(p + CODES + 32 * i + lane % 4 * 8);
            if (FIVE) (to + lane * 8 + 3072 + h * 256).copy8(p + 16 + lane % 4 * 8);
        }
    }
    __device__ __forceinline__ void take(Shared from) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            head[h] = (from + lane * 16 + h * 512).load16();
#pragma unroll
            for (int i = 0; i < 4; i++) q[h][i] = (from + lane * 8 + 1024 + (h * 4 + i) * 256).load8();
            if (FIVE) fifth[h] = (from + lane * 8 + 3072 + h * 256).load8();
        }
    }
    // Stacked experts have more rows than n_out; their number is a multiple of 16 then, so only a plain matrix is clamped.
    static __device__ __forceinline__ int row_of(const Mat &m, int row, int last) { return m.n_out % M_TILE ? min(row, last) : row; }
    static __device__ __forceinline__ uint32_t six(uint32_t low, uint32_t top, bool upper, uint32_t nibbles) {  // four of the 6-bit values
        return upper ? (nibbles & 0x0f0f0f0fu) | (top >> 2 & 0x30303030u) : low & 0x3f3f3f3fu;
    }
    template <int MT, int NT, class B>
    static __device__ __forceinline__ void step(const Raw45 *raw, int block, int, const B &b, float (*acc)[tiles_of(NT)][4], const uint32_t *) {
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
                uint32_t a[4] = {u.x >> shift & 0x0f0f0f0fu, v.x >> shift & 0x0f0f0f0fu, u.y >> shift & 0x0f0f0f0fu,
                                 v.y >> shift & 0x0f0f0f0fu};
                if (FIVE) {
                    const uint2 low = raw[mt].fifth[0], high = raw[mt].fifth[1];
                    a[0] |= (low.x >> i & 0x01010101u) << 4, a[1] |= (high.x >> i & 0x01010101u) << 4;
                    a[2] |= (low.y >> i & 0x01010101u) << 4, a[3] |= (high.y >> i & 0x01010101u) << 4;
                }
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

template <> struct Raw<Q4_K> : Raw45<false> {};
template <> struct Raw<Q5_K> : Raw45<true> {};

// Q6_K: a scale of 8 bits per 16 inputs, which lanes t < 2 and t >= 2 have apart: a block of 32 takes two products.
template <> struct Raw<Q6_K> {
    enum { BLOCKS = 8, SIDE = 288, BYTES = 3072 + SIDE };
    uint4 low[2][2], high[2], scales[2];  // of rows g and g + 8
    uint32_t d;

    struct Source {
        const uint8_t *q, *d;  // d: of all lanes
        Source() = default;
        __device__ __forceinline__ Source(const Mat &m, int tile) {
            const long long at = (long long)tile * (m.n_in / 256);
            q = m.q + at * 3072 + threadIdx.x % 32 * 16;
            d = m.d + at * SIDE;
        }
    };
    __device__ __forceinline__ void load(const Source &from, int block) {
        const int g = threadIdx.x % 32 / 4;
        const uint8_t *q = from.q + block * 384, *side = from.d + block * (SIDE / 8);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            low[h][0] = load_once(q + h * 1536), low[h][1] = load_once(q + h * 1536 + 512), high[h] = load_once(q + h * 1536 + 1024);
            scales[h] = __ldg((const uint4 *)side + g + 8 * h);
        }
        d = __ldg((const uint32_t *)(side + 256) + g);
    }
    static __device__ __forceinline__ void copy(const Source &from, int block, Shared to) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 6; i++) (to + lane * 16 + i * 512).copy16(from.q + block * 384 + i * 512);
        if (lane < SIDE / 16) (to + lane * 16 + 3072).copy16(from.d + block * (SIDE / 8) + lane * 16);
    }
    __device__ __forceinline__ void take(Shared from) {
        const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            low[h][0] = (from + lane * 16 + h * 1536).load16(), low[h][1] = (from + lane * 16 + h * 1536 + 512).load16();
            high[h] = (from + lane * 16 + h * 1536 + 1024).load16();
            scales[h] = (from + g * 16 + 3072 + h * 128).load16();
        }
        d = (from + g * 4 + 3072 + 256).load4();
    }
    static __device__ __forceinline__ uint32_t word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
    // Low and high bits, less 32, as signed bytes; the top bits keep the bytes' differences apart.
    static __device__ __forceinline__ uint32_t signed_codes(uint32_t low, uint32_t high) {
        return ((low & 0x0f0f0f0fu | (high & 0x03030303u) << 4 | 0x80808080u) - 0x20202020u) ^ 0x80808080u;
    }
    static __device__ __forceinline__ int scale(const uint4 &v, int i) { return (int)(int8_t)(word_of(v, i / 4) >> i % 4 * 8 & 255); }
    template <int MT, int NT, class B>
    static __device__ __forceinline__ void step(const Raw *raw, int block, int, const B &b, float (*acc)[tiles_of(NT)][4], const uint32_t *) {
        const auto &at = b.at(block);
        const bool is_first = threadIdx.x % 4 < 2;
        int sum[MT][tiles_of(NT)][4] = {};
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            uint2 codes[tiles_of(NT)], first[tiles_of(NT)], second[tiles_of(NT)];
            fetch<NT>(at, i, codes);
#pragma unroll
            for (int j = 0; j < tiles_of(NT); j++) {
                first[j] = is_first ? codes[j] : make_uint2(0, 0);
                second[j] = is_first ? make_uint2(0, 0) : codes[j];
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                uint32_t a[4];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint32_t low = word_of(raw[mt].low[h][i / 4], i % 4), high = word_of(raw[mt].high[h], i / 2) >> i % 2 * 4;
                    a[h] = signed_codes(low, high), a[h + 2] = signed_codes(low >> 4, high >> 2);
                }
                multiply<NT>(sum[mt], a, scale(raw[mt].scales[0], 2 * i), scale(raw[mt].scales[1], 2 * i), first);
                multiply<NT>(sum[mt], a, scale(raw[mt].scales[0], 2 * i + 1), scale(raw[mt].scales[1], 2 * i + 1), second);
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            add_scaled<NT>(acc[mt], sum[mt], half_bits(raw[mt].d & 0xffffu), half_bits(raw[mt].d >> 16), at);
    }
};
