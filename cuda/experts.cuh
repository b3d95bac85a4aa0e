// The experts' products, float and int8: included by experts.cu and experts8.cu, which compile side by side.
//
// Pair row * n_used + slot has a place of its own in `act` and `expert_out`, so grouping decides only what runs together.
#pragma once
#include "matmul.cuh"

struct Work {
    const Run &run;
    const uint2 *grid;
    float *part;  // [turns, groups, segments, values]
    int n_segments, segment, n_groups, loops;
};

// The pairs (or, for the shared expert, rows) of a block's tile.
struct Tile {
    const int *pairs;  // null: the shared expert
    int expert, first, n;
};

__device__ __forceinline__ Tile tile_of(const Run &run, int shared) {
    if (shared) {
        const int first = blockIdx.x * TILE;
        return {nullptr, 0, first, min(*run.n_rows - first, (int)TILE)};
    }
    if (blockIdx.x >= run.tiles[0]) return {nullptr, 0, 0, 0};
    const int *tile = run.tiles + 1 + 3 * blockIdx.x;
    return {run.pairs + tile[1], tile[0], tile[1], tile[2]};
}

__device__ __forceinline__ long long pair_at(const Run &run, const Tile &t, int i) {
    return t.pairs ? t.pairs[i] : (long long)run.max_rows * run.n_used + t.first + i;
}

// act[pair] = swiglu(gate[expert] x, up[expert] x); 2 outputs per warp and turn, gate and up together.
template <int DT, bool INT8, int NB>
__device__ __forceinline__ void gate_up_tile(const Work &k, const Layer &layer, const Tile &t) {
    enum { R = 2, HALF = R * NB, V = 2 * HALF };
    const int warp = threadIdx.x / 32, per_group = min(k.n_segments, 8), group = warp / per_group;
    const int out0 = blockIdx.y * k.loops * k.n_groups * R, last = k.run.ffn_width - 1;
    const Mat &gate = layer.mat[t.pairs ? M_GATE_EXPS : M_GATE_SH], &up = layer.mat[t.pairs ? M_UP_EXPS : M_UP_SH];
    const long long base = (long long)t.expert * k.run.ffn_width;
    const Source from = {k.run.xn, k.run.xn_q};
    long long x[NB];
#pragma unroll
    for (int i = 0; i < NB; i++) {
        const int j = i < t.n ? i : t.n - 1;
        x[i] = (long long)(t.pairs ? t.pairs[j] / k.run.n_used : t.first + j) * k.run.hidden;
    }
    for (int loop = 0; loop < k.loops; loop++) {
        const int set = loop * k.n_groups + group, out = min(out0 + set * R, last);
        for (int s = warp % per_group; s < k.n_segments; s += 8) {
            const int first = s * k.segment, end = min(first + k.segment, gate.n_in);
            partial<DT, INT8, 2 * R, NB>(gate, up, base + out, base + out, base + last, from, x, first, end, k.grid,
                                         k.part + (set * k.n_segments + s) * V);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < k.loops * k.n_groups * HALF; i += blockDim.x) {
        const int set = i / HALF, r = i % HALF / NB, row = i % NB, at = out0 + set * R + r;
        if (at > last || row >= t.n) continue;
        const float *p = k.part + set * k.n_segments * V + r * NB + row;
        float a = p[0], b = p[HALF];
        for (int s = 1; s < k.n_segments; s++) a += p[s * V], b += p[s * V + HALF];
        k.run.act[pair_at(k.run, t, row) * k.run.ffn_width + at] = swiglu(a, b, layer.clamp);
    }
}

// expert_out[pair] = down[expert] act[pair]
template <int DT, bool INT8, int NB>
__device__ __forceinline__ void down_tile(const Work &k, const Layer &layer, const Tile &t) {
    enum { R = 4, V = R * NB };
    const int warp = threadIdx.x / 32, per_group = min(k.n_segments, 8), group = warp / per_group;
    const int out0 = blockIdx.y * k.loops * k.n_groups * R, last = k.run.hidden - 1;
    const Mat &down = layer.mat[t.pairs ? M_DOWN_EXPS : M_DOWN_SH];
    const long long base = (long long)t.expert * k.run.hidden;
    const Source from = {k.run.act, k.run.act_q};
    long long x[NB];
#pragma unroll
    for (int i = 0; i < NB; i++) x[i] = pair_at(k.run, t, i < t.n ? i : t.n - 1) * k.run.ffn_width;
    for (int loop = 0; loop < k.loops; loop++) {
        const int set = loop * k.n_groups + group, out = min(out0 + set * R, last);
        for (int s = warp % per_group; s < k.n_segments; s += 8) {
            const int first = s * k.segment, end = min(first + k.segment, down.n_in);
            partial<DT, INT8, R, NB>(down, down, base + out, base + out + R / 2, base + last, from, x,
                                     first, end, k.grid, k.part + (set * k.n_segments + s) * V);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < k.loops * k.n_groups * V; i += blockDim.x) {
        const int set = i / V, r = i % V / NB, row = i % NB, at = out0 + set * R + r;
        if (at > last || row >= t.n) continue;
        const float *p = k.part + set * k.n_segments * V + r * NB + row;
        float sum = p[0];
        for (int s = 1; s < k.n_segments; s++) sum += p[s * V];
        k.run.expert_out[pair_at(k.run, t, row) * k.run.hidden + at] = sum;
    }
}

// grid (tiles, blocks of outputs). `shared` chooses the shared expert (tiles of rows) or the routed ones (tiles of pairs).
#define EXPERT_KERNEL(KERNEL, BODY, NAME, INT8)                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        KERNEL##_##NAME(const Run run, const Layer layer, int shared, int n_segments, int segment, int n_groups, int loops) { \
        __shared__ float part[PARTS];                                                                                  \
        __shared__ uint2 grid[NAME == IQ2_XXS ? 256 * GRID_COPIES : 1];                                                \
        const Tile t = tile_of(run, shared);                                                                           \
        if (t.n <= 0) return;                                                                                          \
        if (NAME == IQ2_XXS) load_grid(run.grid, grid, INT8 ? GRID_COPIES : 1);                                        \
        const Work work = {run, grid, part, n_segments, segment, n_groups, loops};                                     \
        if (t.n == 1) BODY<NAME, INT8, 1>(work, layer, t);                                                             \
        else if (t.n == 2) BODY<NAME, INT8, 2>(work, layer, t);                                                        \
        else if (t.n <= 4) BODY<NAME, INT8, 4>(work, layer, t);                                                        \
        else BODY<NAME, INT8, 8>(work, layer, t);                                                                      \
    }
#define EXPERTS(NAME)                                \
    EXPERT_KERNEL(gate_up, gate_up_tile, NAME, false) \
    EXPERT_KERNEL(down, down_tile, NAME, false)
#define EXPERTS8(NAME)                               \
    EXPERT_KERNEL(gate_up8, gate_up_tile, NAME, true) \
    EXPERT_KERNEL(down8, down_tile, NAME, true)
#ifdef DS4_EXPERTS8
EXPERTS8(Q8_0)
EXPERTS8(Q4_K)
EXPERTS8(Q2_K)
EXPERTS8(IQ2_XXS)
#else
EXPERTS(F32)
EXPERTS(F16)
EXPERTS(BF16)
EXPERTS(Q8_0)
EXPERTS(Q4_0)
EXPERTS(Q4_K)
EXPERTS(Q5_K)
EXPERTS(Q6_K)
EXPERTS(Q2_K)
EXPERTS(IQ2_XXS)
EXPERTS(MXFP4)
#endif
