// Routing, and grouping of (row, slot) pairs by expert, for kernels in which one block does both (moe.cu, product8.cu).
#pragma once
#include "common.cuh"

enum { KEY = 1024 };  // more than the number of pairs of route_pairs

// ---------------------------------------------------------------- routing

__device__ __forceinline__ float probability(float v) { return sqrtf(v > 20.0f ? v : log1pf(expf(v))); }

// Scores as integers in the same order; 0 is below all of them. NaN counts as the smallest score.
__device__ __forceinline__ uint32_t rank_of(float score) {
    const uint32_t bits = __float_as_uint(score == score ? score : -INFINITY);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A warp's room in shared memory for one row, an element per expert: probabilities and ranks. Little code matters more
// here than registers: a block that routes runs it once, and its instructions come from far.
struct Choice {
    float *prob;
    uint32_t *rank;
    __device__ __forceinline__ Choice(const Run &run, int *room) {
        prob = (float *)room + threadIdx.x / 32 * 2 * run.n_experts;
        rank = (uint32_t *)prob + run.n_experts;
    }
    // Biases, which no kernel writes, ahead of follow(); they lie in `rank` until `choose`.
    __device__ __forceinline__ void load_biases(const Run &run, const Layer &layer) {
        const float *bias = layer.tid2eid ? nullptr : layer.vec[V_ROUTER_BIAS];
        for (int e = threadIdx.x % 32; e < run.n_experts; e += 32) rank[e] = __float_as_uint(bias ? bias[e] : 0.0f);
    }
};

// The experts of a row by router score: lane `slot` gets the slot-th best and its probability. Largest score first, of
// equal ones the lower index.
__device__ __forceinline__ void choose(const Run &run, const float *router, const Choice &c, int *expert, float *prob) {
    const int n = run.n_experts, lane = threadIdx.x % 32;
#pragma unroll 8
    for (int e = lane; e < n; e += 32) c.prob[e] = router[e];
#pragma unroll 1
    for (int e = lane; e < n; e += 32) {
        const float p = probability(c.prob[e]);
        c.prob[e] = p, c.rank[e] = rank_of(p + __uint_as_float(c.rank[e]));
    }
    __syncwarp();
#pragma unroll 1
    for (int slot = 0; slot < run.n_used; slot++) {
        uint32_t top = 0;
        int at = lane;
#pragma unroll 4
        for (int e = lane; e < n; e += 32) {
            const uint32_t r = c.rank[e];
            if (r > top) top = r, at = e;
        }
        const uint32_t best = __reduce_max_sync(FULL, top);
        const int found = (int)__reduce_min_sync(FULL, top == best ? (uint32_t)at : 0xffffffffu);
        if (lane == found % 32) c.rank[found] = 0;
        if (lane == slot) *expert = found, *prob = c.prob[found];
    }
}

// One warp: choice and weights of a row. Hash layers: the token decides, the router only weighs. Lane `slot` returns the
// slot's expert.
__device__ __forceinline__ int route_row(const Run &run, const Layer &layer, Choice &choice, int row) {
    const int lane = threadIdx.x % 32;
    const float *router = run.router + (long long)row * run.n_experts;
    int expert = 0;
    float prob = 0.0f, sum = 0.0f;
    if (!layer.tid2eid) {
        choose(run, router, choice, &expert, &prob);
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

// ---------------------------------------------------------------- grouping
//
// Pairs row * n_used + slot in the order of their experts, and tiles of at most `tile_rows` pairs of one expert. The order
// of an expert's pairs is of no consequence: every pair has its own sums and its own place.

__device__ __forceinline__ void write_tile(const Run &run, int at, int expert, int first, int n) {
    int *tile = run.tiles + 1 + 3 * at;
    tile[0] = expert, tile[1] = first, tile[2] = n;
}

// One block: routing and grouping at once, for at most 32 rows. Every pair finds its place by comparing itself with all
// others: for few pairs that is less than counting by expert. `key`: 3 ints for each of the bucket's pairs, `room` of
// them (keys expert * KEY + pair, the same in order, the number of pairs of the tile that starts at a place), then each
// warp's Choice.
__device__ __forceinline__ void route_pairs(const Run &run, const Layer &layer, int tile_rows, int *key, int room) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_used = run.n_used, n_rows = *run.n_rows, n_pairs = n_rows * n_used;
    int *const sorted = key + room, *const tile_pairs = sorted + room;
    Choice choice(run, tile_pairs + room);
    if (warp < n_rows) choice.load_biases(run, layer);
    follow();
    for (int row = warp; row < n_rows; row += blockDim.x / 32) {
        if (row != warp) choice.load_biases(run, layer);
        const int expert = route_row(run, layer, choice, row), pair = row * n_used + lane;
        if (lane < n_used) key[pair] = expert * KEY + pair;
        __syncwarp();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x) {
        const int mine = key[i], expert = mine / KEY;
        int place = 0, first = 0, end = 0;  // keys below this pair, below its expert's first, up to its last
#pragma unroll 2
        for (int j = 0; j < n_pairs; j++) {
            const int other = key[j];
            place += other < mine, first += other < expert * KEY, end += other < (expert + 1) * KEY;
        }
        run.pairs[place] = i;
        sorted[place] = mine;
        tile_pairs[place] = (place - first) % tile_rows ? 0 : min(end - place, tile_rows);
    }
    __syncthreads();
    if (warp) return;
    int n_tiles = 0;
    for (int first = 0; first < n_pairs; first += 32) {
        const int place = first + lane, n = place < n_pairs ? tile_pairs[place] : 0;
        const uint32_t begins = __ballot_sync(FULL, n > 0);
        if (n > 0) write_tile(run, n_tiles + __popc(begins & ((1u << lane) - 1)), sorted[place] / KEY, place, n);
        n_tiles += __popc(begins);
    }
    if (lane == 0) run.tiles[0] = n_tiles;
}
