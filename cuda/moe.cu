// Mixture of experts: routing, grouping of (row, slot) pairs by expert, and the sum of their outputs in the router's order,
// the shared expert last. The experts' products are in experts.cuh.
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

// One block of 1024. Pairs by expert, and tiles of at most tile_rows pairs of one expert.
extern "C" __global__ void group_pairs(const Run run, int tile_rows) {
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
            const int e = e0 + threadIdx.x, count = e < n ? start[e] : 0, own = (count + tile_rows - 1) / tile_rows;
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
                    tile[1] = start[e] + i * tile_rows;
                    tile[2] = min(count - i * tile_rows, tile_rows);
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

// grid (rows, parts of hidden), block 256: y = weighted outputs in the router's order, the shared expert's last; then the
// streams are updated with it.
extern "C" __global__ void combine_experts(const Run run, int row0) {
    __shared__ float room[8];
    const int row = row0 + blockIdx.x, k = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *run.n_rows) return;
    float sum = 0.0f;
    if (k < run.hidden) {
        const float *out = run.expert_out + (long long)row * run.n_used * run.hidden + k;
        const float *weight = run.route_weight + row * run.n_used;
        sum = weight[0] * out[0];
        for (int i = 1; i < run.n_used; i++) sum += weight[i] * out[(long long)i * run.hidden];
        sum += run.expert_out[((long long)run.max_rows * run.n_used + row) * run.hidden + k];
    }
    update_channel(run, row, k, sum, room);
}
