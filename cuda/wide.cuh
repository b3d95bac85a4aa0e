// Products of many activation rows (prefill): a block stages 256 inputs of up to 64 rows at a time in shared memory, and
// each of its warps multiplies one tile of 16 weight rows with all of them. The sums are those of tensor.cuh.
#pragma once
#include "ring.cuh"

enum { WIDE = 64 };  // activation rows of a block

__host__ __device__ constexpr bool has_min(int dt) { return dt == Q2_K || dt == Q4_K || dt == Q5_K; }

// One stage of NT tiles of 8 rows: codes (or halves), scales, sums.
template <int DT, int NT> struct Stage {
    enum { K = per_256(DT), ITEM = DT == F16 ? 64 : 32, CODES = NT * CHUNK * 8 * ITEM };
    enum { SCALES = DT == F16 ? 0 : NT * Staged<K>::SCALES * 8 * 4, SUMS = has_min(DT) ? NT * 2 * CHUNK * 8 * 4 : 0 };
    enum { BYTES = CODES + SCALES + SUMS };

    static __device__ __forceinline__ Staged<K> view(const uint8_t *at, int first) {
        return {at, (const float *)(at + CODES), (const float *)(at + CODES + SCALES), first};
    }
    // Starts copying the chunk from block `first` on; blank rows repeat another. at[r]: row r's place, in blocks.
    static __device__ __forceinline__ void copy(uint8_t *to, const Quant &x, const int *at, int first, int n_blocks) {
        const uint8_t *from = DT == F16 ? (const uint8_t *)x.h : (const uint8_t *)(K ? x.kq : x.q);
        enum { PIECES = ITEM / 16, PER = Staged<K>::SCALES };
        for (int i = threadIdx.x; i < CODES / 16; i += blockDim.x) {
            const int piece = i % PIECES, r = i / PIECES % 8, block = i / PIECES / 8 % CHUNK, nt = i / PIECES / 8 / CHUNK;
            if (first + block < n_blocks)
                copy_async(to + i * 16, from + ((long long)at[nt * 8 + r] + (first + block) * 8) * ITEM + piece * 16);
        }
        for (int i = threadIdx.x; i < SCALES / 4; i += blockDim.x) {
            const int r = i % 8, block = i / 8 % PER, nt = i / 8 / PER, place = at[nt * 8 + r];
            if (first + block >= n_blocks) continue;
            if (K) copy_async4(to + CODES + i * 4, x.kd + (place - place % 8) / 8 + place % 8 + first);
            else copy_async4(to + CODES + i * 4, x.d + place + (first + block) * 8);
        }
        for (int i = threadIdx.x; i < SUMS / 4; i += blockDim.x) {
            const int r = i % 8, half = i / 8 % (2 * CHUNK), nt = i / 8 / (2 * CHUNK), place = at[nt * 8 + r];
            copy_async4(to + CODES + SCALES + i * 4, x.ks + 2 * (place - place % 8) + place % 8 + (2 * first + half) * 8);
        }
        copy_commit();
    }
};

// Place of a row of n channels in a twin, in blocks of 32: block b of it lies 8 b further.
__device__ __forceinline__ int place_of(int row, int n) { return row / 8 * (n / 32) * 8 + row % 8; }

// total = tile `tile` of m times the rows at `at`. All threads of the block call it with the same n_in; `room` holds two
// stages.
template <int DT, int NT>
__device__ __forceinline__ void wide_walk(const Mat &m, int tile, const Cut &cut, const Quant &x, const int *at, uint8_t *room,
                                          const uint32_t *tables, float (*total)[4]) {
    using S = Stage<DT, NT>;
    const int n = m.n_in / 32;
    Raw<DT> now, next;
    const typename Raw<DT>::Source from(m, tile);
    now.load(from, 0);
    S::copy(room, x, at, 0, n);
    float acc[1][NT][4] = {};
    for (int first = 0; first < n; first += CHUNK) {
        const int turn = first / CHUNK % 2;
        copy_wait<0>();
        __syncthreads();  // the chunk is there, and nobody reads the other stage any more
        if (first + CHUNK < n) S::copy(room + (1 - turn) * S::BYTES, x, at, first + CHUNK, n);
        const auto b = S::view(room + turn * S::BYTES, first);
        const int stop = min(first + CHUNK, n);
        for (int block = first; block < stop; block += Raw<DT>::BLOCKS) {
            if (block + Raw<DT>::BLOCKS < n) next.load(from, block + Raw<DT>::BLOCKS);
            Raw<DT>::template step<1, NT>(&now, block, stop, b, acc, tables);
            now = next;
        }
        if (stop % cut.blocks && stop < n) continue;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                total[nt][c] = stop <= cut.blocks ? acc[0][nt][c] : total[nt][c] + acc[0][nt][c];
                acc[0][nt][c] = 0.0f;
            }
    }
}
