// How a warp walks along the weights of its tasks: copied ahead to a ring in shared memory that belongs to it alone.
#pragma once
#include "kquants.cuh"
#include "nibbles.cuh"

#ifndef DS4_RING
#define DS4_RING 11264  // bytes of weights in a warp's ring, about; less where a multiprocessor has little shared memory
#endif

struct Cut {  // of K
    int segments, blocks;  // their number; blocks of 32 per segment
};

// NT tiles of neighbouring rows that travel through the ring with the weights of Q8_0, Q4_0, MXFP4 or F16: per tile and step the codes
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
    enum { PIECES = CODES / 512 + (SCALES > 0) };  // of 16 bytes that a lane brings, per tile
    // Calls fn(i, to, from) for the i-th 16 bytes of this lane; `to` counts from a stage's beginning.
    template <typename Fn> __device__ __forceinline__ void each(int block, Fn fn) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < NT; i++) {
            const uint8_t *from = q + (uint32_t)(i * blocks + block) * (uint32_t)ITEM;
#pragma unroll
            for (int k = 0; k < CODES / 512; k++) {
                const int piece = lane + 32 * k, row = i * 8 + piece % (ITEM / 16) / (ITEM / 128);
                if (row < n_rows && block + piece / (ITEM / 16) < blocks) fn(i * PIECES + k, lane * 16 + i * CODES + k * 512, from + k * 512);
            }
            if (SCALES && lane < SCALES / 16 && block + lane / 2 < blocks)
                fn(i * PIECES + CODES / 512, lane * 16 + NT * CODES + i * SCALES, (const uint8_t *)(d + (uint32_t)(i * blocks + block) * 8));
        }
    }
    __device__ __forceinline__ void copy(int block, Shared to) const {
        each(block, [&](int, int at, const uint8_t *from) { (to + at).copy16(from); });
    }
    struct Held {  // a step's rows on their way through registers
        uint4 v[NT * PIECES];
    };
    __device__ __forceinline__ void load(int block, Held &held) const {
        each(block, [&](int i, int, const uint8_t *from) { held.v[i] = *(const uint4 *)from; });
    }
    __device__ __forceinline__ void store(int block, Shared to, const Held &held) const {
        each(block, [&](int i, int at, const uint8_t *) { (to + at).store16(held.v[i]); });
    }
    struct At {  // in shared memory
        Shared codes_at, scales_at;  // this lane's
        __device__ __forceinline__ explicit At(Shared p)
            : codes_at(p + threadIdx.x % 32 * (ITEM / 32)), scales_at(p + NT * CODES + threadIdx.x % 4 * 8) {}
        __device__ __forceinline__ const At &at(int) const { return *this; }
        __device__ __forceinline__ uint2 codes(int i, int block) const { return (codes_at + i * CODES + block * 256).load8(); }
        __device__ __forceinline__ uint4 halves(int i, int block) const { return (codes_at + i * CODES + block * 512).load16(); }
        __device__ __forceinline__ float2 scales(int i, int block) const {
            const uint2 v = (scales_at + i * SCALES + block * 32).load8();
            return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
        }
    };
};

template <bool FIRST, class A, class B> struct Choose { using type = A; };
template <class A, class B> struct Choose<false, A, B> { using type = B; };

struct NoRing {  // rows are read where they lie
    enum { BYTES = 0 };
    struct At {};
    struct Held {};
    __device__ __forceinline__ void copy(int, Shared) const {}
    __device__ __forceinline__ void load(int, Held &) const {}
    __device__ __forceinline__ void store(int, Shared, const Held &) const {}
};

template <int DT, int MT, class Ring> struct RingSize {  // as `ring` in ds4_cuda/tensor.py
    enum { STEP = MT * Raw<DT>::BYTES + Ring::BYTES, ROOM = DT == IQ2_XXS ? DS4_RING * 5 / 8 : DT == Q2_K ? DS4_RING / 2 : DS4_RING };
    enum { DEPTH = ROOM / STEP < 2 ? 2 : ROOM / STEP, BYTES = DEPTH * STEP };  // steps in the ring
};

// A warp's share of the tasks of its block, one after the other: segments s0 .. s1 - 1 of a tile of outputs each. Weights
// are copied ahead to `ring`, the warp's own room, across the borders of tasks. Tasks (a class) has
//     count(), matrix(j), tile(j): number of tasks, their weights (tile < 0: nothing to do for this warp), known before
//     follow(), which ready() calls;
//     Ring, ring(j): the activations, if they go through the ring; rows(j): if not;
//     segment(j, s, acc): takes a segment's sums;  finish(j): all threads of the block call it.
template <int DT, int NT, class Tasks>
__device__ __forceinline__ void stream(const Cut &cut, int s0, int s1, uint8_t *room, const uint32_t *tables, Tasks &tasks) {
    using R = Raw<DT>;
    using Source = typename R::Source;
    using Ring = typename Tasks::Ring;
    using Size = RingSize<DT, 1, Ring>;
    enum { IN_RING = Ring::BYTES > 0 };
    const int n = tasks.count();
    if (n <= 0) return tasks.ready();
    const Shared ring(room);
    const int begin = s0 * cut.blocks, end = min(s1 * cut.blocks, tasks.matrix(0).n_in / 32);
    int task = 0, place = begin, tile = tasks.tile(0);  // of the copy
    Source from(tasks.matrix(0), max(tile, 0));
    Ring x;
    const auto copy = [&](Shared to, bool with_rows) {
        if (task < n && place < end) {
            if (tile >= 0) {
                R::copy(from, place, to);
                if (with_rows) x.copy(place, to + R::BYTES);
            }
            place += R::BLOCKS;
            if (place >= end && ++task < n) {
                place = begin, tile = tasks.tile(task);
                from = Source(tasks.matrix(task), max(tile, 0));
                if (IN_RING && with_rows) x = tasks.ring(task);
            }
        }
        copy_commit();
    };
    for (int i = 0; i + 1 < Size::DEPTH; i++) copy(ring + i * Size::STEP, false);
    tasks.ready();
    if (IN_RING) {  // the rows of the steps under way, which could not be read before: all loads, then all stores
        typename Ring::Held held[Size::DEPTH - 1];
        const auto each = [&](auto fn) {
            int j = 0, at = begin;
            x = tasks.ring(0);
#pragma unroll
            for (int i = 0; i + 1 < Size::DEPTH; i++) {
                if (j >= n || begin >= end) break;
                fn(i, at);
                at += R::BLOCKS;
                if (at >= end && ++j < n) at = begin, x = tasks.ring(j);
            }
        };
        each([&](int i, int at) { x.load(at, held[i]); });
        each([&](int i, int at) { x.store(at, ring + i * Size::STEP + R::BYTES, held[i]); });
    }
    int stage = 0, free = (Size::DEPTH - 1) * Size::STEP;  // bytes from the ring's beginning: to take, taken a step ago
    auto b = tasks.rows(0);
    for (int j = 0; j < n; j++) {
        float acc[1][tiles_of(NT)][4] = {};
        int s = s0, stop = min((s0 + 1) * cut.blocks, end);
        for (int block = begin; block < end; block += R::BLOCKS) {
            R raw;
            copy_wait<Size::DEPTH - 2>();
            __syncwarp();  // rows and scales are read by other lanes than copied them
            const Shared taken = ring + stage;
            raw.take(taken);
            copy(ring + free, true);
            if constexpr (IN_RING) R::template step<1, NT>(&raw, block, stop, typename Ring::At(taken + R::BYTES), acc, tables);
            else R::template step<1, NT>(&raw, block, stop, b, acc, tables);
            free = stage;
            stage = stage + Size::STEP == Size::BYTES ? 0 : stage + Size::STEP;
            if (block + R::BLOCKS < stop) continue;
            tasks.segment(j, s, acc);
#pragma unroll
            for (int i = 0; i < tiles_of(NT) * 4; i++) (&acc[0][0][0])[i] = 0.0f;
            s++, stop = min(stop + cut.blocks, end);
        }
        tasks.finish(j);
        if (j + 1 < n) b = tasks.rows(j + 1);
    }
    copy_wait<0>();
}
