// Mixture of experts: routing, grouping of (row, slot) pairs by expert, the experts' products, and their sum.
//
// Pair row * n_used + slot has a place of its own in `act` and `expert_out`, so grouping decides only what runs
// together. Outputs are added in the router's order, the shared expert last.
#include "matmul.cuh"

// ---------------------------------------------------------------- routing

// grid rows, block 256. Router logits -> choice and weights. Hash layers: the token decides, the router only weighs.
extern "C" __global__ void route_rows(const Run run, const Layer layer, int row0) {
    extern __shared__ float prob[];  // [n_experts] probabilities, then [n_experts] ranking scores
    __shared__ float best_score[8];
    __shared__ int best_expert[8];
    const int row = row0 + blockIdx.x, n = run.n_experts, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= *run.n_rows) return;
    float *score = prob + n;
    int *route = run.route + row * run.n_used;
    const float *bias = layer.vec[V_ROUTER_BIAS];
    for (int e = threadIdx.x; e < n; e += blockDim.x) {
        const float v = run.router[(long long)row * n + e];
        prob[e] = sqrtf(v > 20.0f ? v : log1pf(expf(v)));
        const float s = bias ? prob[e] + bias[e] : prob[e];
        score[e] = s == s ? s : -INFINITY;
    }
    __syncthreads();
    for (int slot = 0; slot < run.n_used; slot++) {
        if (layer.tid2eid) {
            if (threadIdx.x == 0) route[slot] = layer.tid2eid[(long long)run.tokens[row] * run.n_used + slot];
            continue;
        }
        // the best free expert: largest score, of equal ones the lower index; taken ones are marked with NaN
        float top = -INFINITY;
        int at = n;
        for (int e = threadIdx.x; e < n; e += blockDim.x) {
            const float s = score[e];
            if (s == s && (at == n || s > top)) top = s, at = e;
        }
        for (int off = 16; off; off >>= 1) {
            const float s = __shfl_xor_sync(FULL, top, off);
            const int e = __shfl_xor_sync(FULL, at, off);
            if (e < n && (at == n || s > top || (s == top && e < at))) top = s, at = e;
        }
        if (lane == 0) best_score[warp] = top, best_expert[warp] = at;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < blockDim.x / 32; w++) {
                const float s = best_score[w];
                const int e = best_expert[w];
                if (e < n && (at == n || s > top || (s == top && e < at))) top = s, at = e;
            }
            route[slot] = at;
            score[at] = NAN;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int i = 0; i < run.n_used; i++) sum += prob[route[i]];
        for (int i = 0; i < run.n_used; i++)
            run.route_weight[row * run.n_used + i] = prob[route[i]] / (sum + 1e-20f) * run.expert_scale;
    }
}

// One block of 1024. Pairs by expert, and tiles of at most TILE pairs of one expert.
extern "C" __global__ void group_pairs(const Run run) {
    extern __shared__ int room[];  // [n_experts] counts, then starts; [n_experts] tiles before
    int *start = room, *before = room + run.n_experts;
    const int n = run.n_experts, n_pairs = *run.n_rows * run.n_used;
    for (int e = threadIdx.x; e < n; e += blockDim.x) start[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x) atomicAdd(&start[run.route[i]], 1);
    __syncthreads();
    if (threadIdx.x < 32) {  // running sums of pairs and of tiles, 32 experts at a time
        int pairs = 0, tiles = 0;
        for (int e0 = 0; e0 < n; e0 += 32) {
            const int e = e0 + threadIdx.x, count = e < n ? start[e] : 0, own = (count + TILE - 1) / TILE;
            int p = count, t = own;
            for (int off = 1; off < 32; off <<= 1) {
                const int q = __shfl_up_sync(FULL, p, off), u = __shfl_up_sync(FULL, t, off);
                if (threadIdx.x >= off) p += q, t += u;
            }
            if (e < n) {
                start[e] = pairs + p - count;
                before[e] = tiles + t - own;
                for (int i = 0; i < own; i++) {
                    int *tile = run.tiles + 1 + 3 * (before[e] + i);
                    tile[0] = e;
                    tile[1] = start[e] + i * TILE;
                    tile[2] = min(count - i * TILE, (int)TILE);
                }
            }
            pairs += __shfl_sync(FULL, p, 31);
            tiles += __shfl_sync(FULL, t, 31);
        }
        if (threadIdx.x == 0) run.tiles[0] = tiles;
    }
    __syncthreads();
    // The order of pairs within an expert is of no consequence: every pair has its own sums and its own place.
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x) run.pairs[atomicAdd(&start[run.route[i]], 1)] = i;
}

// ---------------------------------------------------------------- the experts' products

struct Work {
    const Run &run;
    const uint2 *grid;
    float *part;  // [groups, segments, values]
    int n_segments, segment, n_groups;
};

// act[pair] = swiglu(gate[expert] x, up[expert] x) for ROWS/2 outputs per warp, gate and up together.
template <int DT, int NB>
__device__ __forceinline__ void gate_up_tile(const Work &k, const Mat &gate, const Mat &up, long long first_row,
                                             const float *const *x, float *const *y, int n, float clamp) {
    enum { R = 2, V = 2 * R * NB, STRIDE = 2 * R * TILE };
    const int warp = threadIdx.x / 32, per_group = min(k.n_segments, 8), group = warp / per_group;
    const int out = (blockIdx.y * k.n_groups + group) * R, n_out = k.run.ffn_width;
    for (int s = warp % per_group; s < k.n_segments; s += 8) {
        float acc[2][R][NB] = {};
        const int first = s * k.segment, end = min(first + k.segment, gate.n_in);
        dot_segment<DT, R, NB>(gate, first_row + out, first_row + n_out - 1, x, first, end, k.grid, acc[0]);
        dot_segment<DT, R, NB>(up, first_row + out, first_row + n_out - 1, x, first, end, k.grid, acc[1]);
        reduce_to<V>(&acc[0][0][0], k.part + (group * k.n_segments + s) * STRIDE);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < k.n_groups * R * NB; i += blockDim.x) {
        const int g = i / (R * NB), r = i % (R * NB) / NB, row = i % NB, at = out - group * R + g * R + r;
        if (at >= n_out || row >= n) continue;
        const float *p = k.part + g * k.n_segments * STRIDE + r * NB + row;
        float a = p[0], b = p[R * NB];
        for (int s = 1; s < k.n_segments; s++) a += p[s * STRIDE], b += p[s * STRIDE + R * NB];
        y[row][at] = swiglu(a, b, clamp);
    }
}

template <int DT, int NB>
__device__ __forceinline__ void gate_up_pairs(const Work &k, const Layer &layer, const int *pairs, int expert, int n) {
    const float *x[NB];
    __shared__ float *y[TILE];
#pragma unroll
    for (int i = 0; i < NB; i++) {
        const int pair = pairs[i < n ? i : n - 1];
        x[i] = k.run.xn + (long long)(pair / k.run.n_used) * k.run.hidden;
        if (threadIdx.x == 0) y[i] = k.run.act + (long long)pair * k.run.ffn_width;
    }
    gate_up_tile<DT, NB>(k, layer.mat[M_GATE_EXPS], layer.mat[M_UP_EXPS], (long long)expert * k.run.ffn_width, x, y, n,
                         layer.clamp);
}

template <int DT, int NB>
__device__ __forceinline__ void gate_up_shared(const Work &k, const Layer &layer, int first, int n) {
    const float *x[NB];
    __shared__ float *y[TILE];
#pragma unroll
    for (int i = 0; i < NB; i++) {
        const long long row = first + (i < n ? i : n - 1);
        x[i] = k.run.xn + row * k.run.hidden;
        if (threadIdx.x == 0) y[i] = k.run.act + ((long long)k.run.max_rows * k.run.n_used + row) * k.run.ffn_width;
    }
    gate_up_tile<DT, NB>(k, layer.mat[M_GATE_SH], layer.mat[M_UP_SH], 0, x, y, n, layer.clamp);
}

// expert_out[pair] = down[expert] act[pair]; pairs: null = the shared expert, row `first` on.
template <int DT, int NB>
__device__ __forceinline__ void down_tile(const Work &k, const Mat &down, long long first_row, const int *pairs,
                                          long long first, int n) {
    enum { R = 4, STRIDE = R * TILE };
    const float *x[NB];
    __shared__ float *y[TILE];
    const int warp = threadIdx.x / 32, per_group = min(k.n_segments, 8), group = warp / per_group;
    const int out = (blockIdx.y * k.n_groups + group) * R, n_out = k.run.hidden;
#pragma unroll
    for (int i = 0; i < NB; i++) {
        const int j = i < n ? i : n - 1;
        const long long pair = pairs ? pairs[j] : (long long)k.run.max_rows * k.run.n_used + first + j;
        x[i] = k.run.act + pair * k.run.ffn_width;
        if (threadIdx.x == 0) y[i] = k.run.expert_out + pair * k.run.hidden;
    }
    for (int s = warp % per_group; s < k.n_segments; s += 8) {
        float acc[R][NB] = {};
        const int begin = s * k.segment, end = min(begin + k.segment, down.n_in);
        dot_segment<DT, R, NB>(down, first_row + out, first_row + n_out - 1, x, begin, end, k.grid, acc);
        reduce_to<R * NB>(&acc[0][0], k.part + (group * k.n_segments + s) * STRIDE);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < k.n_groups * R * NB; i += blockDim.x) {
        const int g = i / (R * NB), r = i % (R * NB) / NB, row = i % NB, at = out - group * R + g * R + r;
        if (at >= n_out || row >= n) continue;
        const float *p = k.part + g * k.n_segments * STRIDE + r * NB + row;
        float sum = p[0];
        for (int s = 1; s < k.n_segments; s++) sum += p[s * STRIDE];
        y[row][at] = sum;
    }
}

#define BY_COUNT(N, CALL)          \
    if (N == 1) { enum { NB = 1 }; CALL; } \
    else if (N == 2) { enum { NB = 2 }; CALL; } \
    else if (N <= 4) { enum { NB = 4 }; CALL; } \
    else { enum { NB = 8 }; CALL; }

// grid (tiles, blocks of outputs). `shared` chooses the shared expert (tiles of rows) or the routed ones (tiles of pairs).
#define EXPERTS(NAME)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) gate_up_##NAME(const Run run, const Layer layer, int shared,    \
                                                                     int n_segments, int segment, int n_groups) {     \
        __shared__ float part[32 * 4 * TILE];                                                                         \
        __shared__ uint2 grid[NAME == IQ2_XXS ? 256 : 1];                                                             \
        const int *tile = run.tiles + 1 + 3 * blockIdx.x, first = shared ? blockIdx.x * TILE : 0;                     \
        const int n = shared ? min(*run.n_rows - first, (int)TILE) : blockIdx.x < run.tiles[0] ? tile[2] : 0;         \
        if (n <= 0) return;                                                                                           \
        if (NAME == IQ2_XXS) load_grid(run.grid, grid);                                                               \
        const Work work = {run, grid, part, n_segments, segment, n_groups};                                           \
        if (shared) { BY_COUNT(n, (gate_up_shared<NAME, NB>(work, layer, first, n))) }                                \
        else { BY_COUNT(n, (gate_up_pairs<NAME, NB>(work, layer, run.pairs + tile[1], tile[0], n))) }                 \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) down_##NAME(const Run run, const Layer layer, int shared,       \
                                                                  int n_segments, int segment, int n_groups) {        \
        __shared__ float part[32 * 4 * TILE];                                                                         \
        __shared__ uint2 grid[NAME == IQ2_XXS ? 256 : 1];                                                             \
        const int *tile = run.tiles + 1 + 3 * blockIdx.x, first = shared ? blockIdx.x * TILE : 0;                     \
        const int n = shared ? min(*run.n_rows - first, (int)TILE) : blockIdx.x < run.tiles[0] ? tile[2] : 0;         \
        if (n <= 0) return;                                                                                           \
        if (NAME == IQ2_XXS) load_grid(run.grid, grid);                                                               \
        const Work work = {run, grid, part, n_segments, segment, n_groups};                                           \
        const Mat &down = layer.mat[shared ? M_DOWN_SH : M_DOWN_EXPS];                                                \
        const long long first_row = shared ? 0 : (long long)tile[0] * run.hidden;                                     \
        const int *pairs = shared ? nullptr : run.pairs + tile[1];                                                    \
        BY_COUNT(n, (down_tile<NAME, NB>(work, down, first_row, pairs, first, n)))                                    \
    }
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

// grid (rows, parts of hidden): y = weighted outputs in the router's order, then the shared expert's.
extern "C" __global__ void combine_experts(const Run run, int row0) {
    const int row = row0 + blockIdx.x, k = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *run.n_rows || k >= run.hidden) return;
    const float *out = run.expert_out + (long long)row * run.n_used * run.hidden + k;
    const float *weight = run.route_weight + row * run.n_used;
    float sum = weight[0] * out[0];
    for (int i = 1; i < run.n_used; i++) sum += weight[i] * out[(long long)i * run.hidden];
    run.y[(long long)row * run.hidden + k] =
        sum + run.expert_out[((long long)run.max_rows * run.n_used + row) * run.hidden + k];
}
