// Mixture of experts: routing, and grouping of (row, slot) pairs by expert. The experts' products are in experts.cuh, the
// sum of their outputs in hyper.cu.
#include "matmul.cuh"

enum { MAX_PER_LANE = 16, FEW_ROWS = 32, KEY = 1024 };  // experts per lane of a row's warp; rows and keys of route_group

// ---------------------------------------------------------------- routing

__device__ __forceinline__ float probability(float v) { return sqrtf(v > 20.0f ? v : log1pf(expf(v))); }

// Scores as integers in the same order; 0 is below all of them. NaN counts as the smallest score.
__device__ __forceinline__ uint32_t rank_of(float score) {
    const uint32_t bits = __float_as_uint(score == score ? score : -INFINITY);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The experts of a row by router score: lane `slot` gets the slot-th best and its probability. Largest score first, of
// equal ones the lower index.
__device__ __forceinline__ void choose(const Run &run, const float *router, const float *bias, int *expert, float *prob) {
    const int n = run.n_experts, lane = threadIdx.x % 32;
    float p[MAX_PER_LANE];
    uint32_t rank[MAX_PER_LANE];
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; i++) {
        const int e = lane + 32 * i;
        rank[i] = 0, p[i] = 0.0f;
        if (32 * i >= n) continue;
        if (e < n) p[i] = probability(router[e]), rank[i] = rank_of(bias ? p[i] + bias[e] : p[i]);
    }
    for (int slot = 0; slot < run.n_used; slot++) {
        uint32_t top = 0;
        int at = 0;
#pragma unroll
        for (int i = 0; i < MAX_PER_LANE; i++)
            if (rank[i] > top) top = rank[i], at = i;
        const uint32_t best = __reduce_max_sync(FULL, top);
        const int found = (int)__reduce_min_sync(FULL, top == best ? (uint32_t)(lane + 32 * at) : 0xffffffffu);
        float mine = 0.0f;
#pragma unroll
        for (int i = 0; i < MAX_PER_LANE; i++)
            if (found == lane + 32 * i) mine = p[i], rank[i] = 0;
        mine = __shfl_sync(FULL, mine, found % 32);
        if (lane == slot) *expert = found, *prob = mine;
    }
}

// One warp: choice and weights of a row. Hash layers: the token decides, the router only weighs. Lane `slot` returns the
// slot's expert.
__device__ __forceinline__ int route_row(const Run &run, const Layer &layer, int row) {
    const int lane = threadIdx.x % 32;
    const float *router = run.router + (long long)row * run.n_experts;
    int expert = 0;
    float prob = 0.0f, sum = 0.0f;
    if (!layer.tid2eid) {
        choose(run, router, layer.vec[V_ROUTER_BIAS], &expert, &prob);
    } else if (lane < run.n_used) {
        expert = layer.tid2eid[(long long)run.tokens[row] * run.n_used + lane];
        prob = probability(router[expert]);
    }
    for (int i = 0; i < run.n_used; i++) sum += __shfl_sync(FULL, prob, i);
    if (lane < run.n_used) {
        run.route[row * run.n_used + lane] = expert;
        run.route_weight[row * run.n_used + lane] = prob / (sum + 1e-20f) * run.expert_scale;
    }
    return expert;
}

// grid (rows over warps of a block), block any number of warps: one per row.
extern "C" __global__ void __launch_bounds__(256) route_rows(const Run run, const Layer layer, int row0) {
    const int row = row0 + (blockIdx.x * blockDim.x + threadIdx.x) / 32, n_rows = *run.n_rows;
    follow();
    if (row < n_rows) route_row(run, layer, row);
}

// ---------------------------------------------------------------- grouping
//
// Pairs row * n_used + slot in the order of their experts, and tiles of at most `tile_rows` pairs of one expert. The order
// of an expert's pairs is of no consequence: every pair has its own sums and its own place.

__device__ __forceinline__ void write_tile(const Run &run, int at, int expert, int first, int n) {
    int *tile = run.tiles + 1 + 3 * at;
    tile[0] = expert, tile[1] = first, tile[2] = n;
}

// grid 1, block: a warp per row of the bucket, at most 32. Routing and grouping at once. Every pair finds its place by
// comparing itself with all others: for few pairs that is less than counting by expert.
extern "C" __global__ void __launch_bounds__(32 * FEW_ROWS) route_group(const Run run, const Layer layer, int tile_rows) {
    extern __shared__ int key[];  // [warps * n_used] of every pair, then as many: pairs of the tile that starts at a place
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_used = run.n_used, n_pairs = *run.n_rows * n_used;
    int *tile_pairs = key + blockDim.x / 32 * n_used;
    follow();
    if (warp * n_used < n_pairs) {
        const int expert = route_row(run, layer, warp), pair = warp * n_used + lane;
        if (lane < n_used) key[pair] = expert * KEY + pair;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x) {
        const int mine = key[i], expert = mine / KEY;
        int place = 0, first = 0, end = 0;  // keys below this pair, below its expert's first, up to its last
#pragma unroll 8
        for (int j = 0; j < n_pairs; j++) {
            const int other = key[j];
            place += other < mine, first += other < expert * KEY, end += other < (expert + 1) * KEY;
        }
        run.pairs[place] = i;
        tile_pairs[place] = (place - first) % tile_rows ? 0 : min(end - place, tile_rows);
    }
    __syncthreads();
    if (warp) return;
    int n_tiles = 0;
    for (int first = 0; first < n_pairs; first += 32) {
        const int place = first + lane, n = place < n_pairs ? tile_pairs[place] : 0;
        const uint32_t begins = __ballot_sync(FULL, n > 0);
        if (n > 0) write_tile(run, n_tiles + __popc(begins & ((1u << lane) - 1)), key[run.pairs[place]] / KEY, place, n);
        n_tiles += __popc(begins);
    }
    if (lane == 0) run.tiles[0] = n_tiles;
}

// Sum of the values before this thread's, over the block. `room`: an int per warp.
__device__ __forceinline__ int sum_before(int v, int *room) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int up_to = v;
    for (int off = 1; off < 32; off <<= 1) {
        const int other = __shfl_up_sync(FULL, up_to, off);
        if (lane >= off) up_to += other;
    }
    if (lane == 31) room[warp] = up_to;
    __syncthreads();
    int before = up_to - v;
    for (int w = 0; w < warp; w++) before += room[w];
    __syncthreads();
    return before;
}

// One block of 1024, for any number of rows and at most as many experts.
extern "C" __global__ void __launch_bounds__(1024, 1) group_pairs(const Run run, int tile_rows) {
    extern __shared__ int place[];  // [n_experts]: counts, then where the next pair goes
    __shared__ int room[32];
    const int n = run.n_experts, e = threadIdx.x, n_pairs = *run.n_rows * run.n_used;
    follow();
    if (e < n) place[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x) atomicAdd(&place[run.route[i]], 1);
    __syncthreads();
    const int count = e < n ? place[e] : 0, own = (count + tile_rows - 1) / tile_rows;
    const int first = sum_before(count, room), before = sum_before(own, room);
    if (e < n) place[e] = first;
    for (int i = 0; i < own; i++) write_tile(run, before + i, e, first + i * tile_rows, min(count - i * tile_rows, tile_rows));
    if (e == n - 1) run.tiles[0] = before + own;
    __syncthreads();
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x) run.pairs[atomicAdd(&place[run.route[i]], 1)] = i;
}
