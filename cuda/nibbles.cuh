// Q4_0 and MXFP4 on tensor cores: blocks of 32 with one scale, like Q8_0, and codes of 4 bits.
#pragma once
#include "tensor.cuh"

// Eight codes of a lane as signed bytes, two words of four.
template <int DT> __device__ __forceinline__ void signed_codes(uint32_t word, uint32_t *low, uint32_t *high);

// code - 8; the top bits keep the bytes' differences apart.
template <> __device__ __forceinline__ void signed_codes<Q4_0>(uint32_t word, uint32_t *low, uint32_t *high) {
    *low = ((word & 0x0f0f0f0fu | 0x80808080u) - 0x08080808u) ^ 0x80808080u;
    *high = ((word >> 4 & 0x0f0f0f0fu | 0x80808080u) - 0x08080808u) ^ 0x80808080u;
}

// Twice the E2M1 values: 0 1 2 3 4 6 8 12 by the low three bits, negative with the fourth.
template <> __device__ __forceinline__ void signed_codes<MXFP4>(uint32_t word, uint32_t *low, uint32_t *high) {
    const uint32_t which = word & 0x77777777u, signs = word >> 3 & 0x11111111u;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t magnitude = pick_bytes(0x03020100u, 0x0c080604u, which >> 16 * i & 0xffffu);
        const uint32_t negative = (0x80808080u - magnitude) ^ 0x80808080u, mask = pick_bytes(0x0000ff00u, 0, signs >> 16 * i & 0xffffu);
        *(i ? high : low) = (magnitude & ~mask) | (negative & mask);
    }
}

// Q4_0: a half per row; MXFP4: an exponent. SIDE: bytes of a tile's scales.
template <int DT> struct RawNibbles {
    enum { SIDE = DT == Q4_0 ? 32 : 16, BLOCKS = 4, BYTES = BLOCKS * (256 + SIDE) };
    uint2 codes[BLOCKS];  // of rows g and g + 8
    uint32_t d[BLOCKS];

    struct Source {
        const uint8_t *q, *d;  // d: of all lanes
        int n;                 // blocks of a row
        Source() = default;
        __device__ __forceinline__ Source(const Mat &m, int tile) : n(m.n_in / 32) {
            const long long at = (long long)tile * n;
            q = m.q + at * 256 + threadIdx.x % 32 * 8;
            d = m.d + at * SIDE;
        }
    };
    static __device__ __forceinline__ float scale(uint32_t d, int half) {
        return DT == Q4_0 ? half_bits(d >> 16 * half & 0xffffu) : e8m0_half(d >> 8 * half & 255);
    }
    __device__ __forceinline__ void load(const Source &from, int block) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const int at = min(block + i, from.n - 1), g = threadIdx.x % 32 / 4;
            codes[i] = __ldg((const uint2 *)(from.q + at * 256));
            d[i] = DT == Q4_0 ? __ldg((const uint32_t *)(from.d + at * SIDE) + g) : __ldg((const unsigned short *)(from.d + at * SIDE) + g);
        }
    }
    static __device__ __forceinline__ void copy(const Source &from, int block, Shared to) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
            if (i == 0 || block + i < from.n) (to + lane * 8 + i * 256).copy8(from.q + (uint32_t)(block + i) * 256);
        if (lane * 16 < BLOCKS * SIDE && block + lane * 16 / SIDE < from.n)
            (to + lane * 16 + BLOCKS * 256).copy16(from.d + (uint32_t)block * SIDE + lane * 16);
    }
    __device__ __forceinline__ void take(Shared from) {
        const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            codes[i] = (from + lane * 8 + i * 256).load8();
            d[i] = (from + BLOCKS * 256 + i * SIDE + g * (SIDE / 8) / 4 * 4).load4() >> (DT == Q4_0 ? 0 : g % 2 * 16);
        }
    }
    template <int MT, int NT, class B>
    static __device__ __forceinline__ void step(const RawNibbles *raw, int block, int end, const B &b, float (*acc)[tiles_of(NT)][4], const uint32_t *) {
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
                uint32_t a[4];
                signed_codes<DT>(raw[mt].codes[i].x, &a[0], &a[2]);
                signed_codes<DT>(raw[mt].codes[i].y, &a[1], &a[3]);
                multiply<NT>(acc[mt], a, scale(raw[mt].d[i], 0), scale(raw[mt].d[i], 1), codes, scales);
            }
        }
    }
};

template <> struct Raw<Q4_0> : RawNibbles<Q4_0> {};
template <> struct Raw<MXFP4> : RawNibbles<MXFP4> {};
