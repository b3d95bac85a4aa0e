// The experts' products on float activations, one kernel per dtype.
//
// Pair row * n_used + slot has a place of its own in `act` and `expert_out`, so grouping decides only what runs together.
#include "matmul.cuh"
#include "tiles.cuh"

struct Work {
    const Run &run;
    const uint2 *grid;
    float *part;  // [turns, groups, segments, values]
    int n_segments, segment, n_groups, loops;
};

// act[pair] = swiglu(gate[expert] x, up[expert] x); 2 outputs per warp and turn, gate and up together.
template <int DT, int NB>
__device__ __forceinline__ void gate_up_tile(const Work &k, const Layer &layer, const Tile &t) {
    enum { R = 2, HALF = R * NB, V = 2 * HALF };
    const int warp = threadIdx.x / 32, per_group = min(k.n_segments, 8), group = warp / per_group;
    const int out0 = blockIdx.y * k.loops * k.n_groups * R, last = k.run.ffn_width - 1;
    const Mat &gate = layer.mat[t.shared ? M_GATE_SH : M_GATE_EXPS], &up = layer.mat[t.shared ? M_UP_SH : M_UP_EXPS];
    const long long base = (long long)t.expert * k.run.ffn_width;
    const float *x[NB];
#pragma unroll
    for (int i = 0; i < NB; i++) {
        x[i] = k.run.xn + (long long)row_at(k.run, t, i < t.n ? i : t.n - 1) * k.run.hidden;
    }
    for (int loop = 0; loop < k.loops; loop++) {
        const int set = loop * k.n_groups + group, out = min(out0 + set * R, last);
        for (int s = warp % per_group; s < k.n_segments; s += 8) {
            const int first = s * k.segment, end = min(first + k.segment, gate.n_in);
            partial<DT, 2 * R, NB>(gate, up, base + out, base + out, base + last, x, first, end, k.grid,
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
        k.run.act[(long long)pair_at(t, row) * k.run.ffn_width + at] = swiglu(a, b, layer.clamp);
    }
}

// expert_out[pair] = down[expert] act[pair]
template <int DT, int NB>
__device__ __forceinline__ void down_tile(const Work &k, const Layer &layer, const Tile &t) {
    enum { R = 4, V = R * NB };
    const int warp = threadIdx.x / 32, per_group = min(k.n_segments, 8), group = warp / per_group;
    const int out0 = blockIdx.y * k.loops * k.n_groups * R, last = k.run.hidden - 1;
    const Mat &down = layer.mat[t.shared ? M_DOWN_SH : M_DOWN_EXPS];
    const long long base = (long long)t.expert * k.run.hidden;
    const float *x[NB];
#pragma unroll
    for (int i = 0; i < NB; i++) x[i] = k.run.act + (long long)pair_at(t, i < t.n ? i : t.n - 1) * k.run.ffn_width;
    for (int loop = 0; loop < k.loops; loop++) {
        const int set = loop * k.n_groups + group, out = min(out0 + set * R, last);
        for (int s = warp % per_group; s < k.n_segments; s += 8) {
            const int first = s * k.segment, end = min(first + k.segment, down.n_in);
            partial<DT, R, NB>(down, down, base + out, base + out + R / 2, base + last, x,
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
        k.run.expert_out[(long long)pair_at(t, row) * k.run.hidden + at] = sum;
    }
}

// grid (tiles, blocks of outputs). `shared` chooses the shared expert (tiles of rows) or the routed ones (tiles of pairs).
template <int DT, bool DOWN>
__device__ __forceinline__ void expert_tile(const Run &run, const Layer &layer, int shared, int n_segments, int segment, int n_groups, int loops) {
    __shared__ float part[PARTS];
    __shared__ uint2 grid[DT == IQ2_XXS ? 256 : 1];
    follow();
    const Tile t = tile_of(run, shared, TILE, -1, blockIdx.x);
    if (t.n <= 0) return;
    if (DT == IQ2_XXS) load_grid(run.grid, grid);
    const Work work = {run, grid, part, n_segments, segment, n_groups, loops};
    const int n = t.n;
#define BODY(NB) (DOWN ? down_tile<DT, NB>(work, layer, t) : gate_up_tile<DT, NB>(work, layer, t))
    n == 1 ? BODY(1) : n == 2 ? BODY(2) : n <= 4 ? BODY(4) : BODY(8);
#undef BODY
}

#define EXPERT_KERNEL(KERNEL, DOWN, NAME)                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        KERNEL##_##NAME(const Run run, const Layer layer, int shared, int n_segments, int segment, int n_groups, int loops) { \
        expert_tile<NAME, DOWN>(run, layer, shared, n_segments, segment, n_groups, loops);                             \
    }
#define EXPERTS(NAME)                          \
    EXPERT_KERNEL(gate_up, false, NAME) \
    EXPERT_KERNEL(down, true, NAME)
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
