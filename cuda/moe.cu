// Mixture of experts: routing, and grouping of (row, slot) pairs by expert. The experts' products are in experts.cu and
// experts8.cu, the sum of their outputs in project.cu.
#include "route.cuh"

enum { FEW_ROWS = 32 };  // of route_group

// grid (rows over warps of a block), block any number of warps: one per row. Shared: 2 words per expert and warp.
extern "C" __global__ void __launch_bounds__(256) route_rows(const Run run, const Layer layer, int row0) {
    const int row = row0 + (blockIdx.x * blockDim.x + threadIdx.x) / 32, n_rows = *run.n_rows;
    extern __shared__ int room[];
    Choice choice(run, room);
    choice.load_biases(run, layer);
    follow();
    if (row < n_rows) route_row(run, layer, choice, row);
}

// grid 1, block: a warp per row of the bucket, at most 32. Routing and grouping at once. Shared: 3 ints per pair,
// 2 words per expert and warp.
extern "C" __global__ void __launch_bounds__(32 * FEW_ROWS) route_group(const Run run, const Layer layer, int tile_rows) {
    extern __shared__ int key[];
    route_pairs(run, layer, tile_rows, key, blockDim.x / 32 * run.n_used);
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
