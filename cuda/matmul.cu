// Matrix products of all rows of a step: y = W x, each weight read once per tile of 8 rows.
//
// grid (row tiles, blocks of output rows), block up to 8 warps: n_groups groups of 4 output rows, each with one warp per
// segment (warps take turns when there are more segments); a block goes on to `loops` such sets of rows. One launch
// runs several jobs of one dtype. Tiles are the fast axis, so that the tiles of a weight block share it in the L2 cache.
#include "matmul.cuh"

template <int DT, int ROWS, int WARPS, int NB>
__device__ __forceinline__ void tile(const Job &job, const Jobs &jobs, int first_row, int n, int block, const uint2 *grid,
                                     float *part) {
    enum { V = ROWS * NB };
    const int warp = threadIdx.x / 32, n_segments = jobs.n_segments, per_group = min(n_segments, (int)WARPS), group = warp / per_group;
    const int out0 = block * jobs.loops * jobs.n_groups * ROWS, last = job.n_out - 1;
    const float *x[NB];
#pragma unroll
    for (int i = 0; i < NB; i++) {
        const int row = first_row + (i < n ? i : n - 1);
        x[i] = job.x + (long long)row * job.x_stride;
    }
    for (int loop = 0; loop < jobs.loops; loop++) {
        const int set = loop * jobs.n_groups + group, out = out0 + set * ROWS;
        for (int s = warp % per_group; s < n_segments; s += WARPS) {
            const int first = s * jobs.segment, end = min(first + jobs.segment, job.mat.n_in);
            const long long row = job.first_row + min(out, last);
            partial<DT, ROWS, NB>(job.mat, job.mat, row, row + ROWS / 2, job.first_row + last, x, first, end, grid,
                                        part + (set * n_segments + s) * V);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < jobs.loops * jobs.n_groups * V; i += blockDim.x) {
        const int set = i / V, r = i % V / NB, row = i % NB, at = out0 + set * ROWS + r;
        if (at > last || row >= n) continue;
        const float *p = part + set * n_segments * V + r * NB + row;
        float sum = p[0];
        for (int s = 1; s < n_segments; s++) sum += p[s * V];
        job.y[(long long)(first_row + row) * job.y_stride + at] = sum;
    }
}

template <int DT, int ROWS, int WARPS> __device__ __forceinline__ void product(const Run &run, const Jobs &jobs) {
    __shared__ float part[PARTS];
    __shared__ uint2 grid[DT == IQ2_XXS ? 256 : 1];
    follow();
    const int first_row = blockIdx.x * TILE, n = min(*jobs.count - first_row, (int)TILE);
    if (n <= 0) return;
    if constexpr (DT == IQ2_XXS) load_grid(run.grid, grid);
    int j = 0;
    while (j + 1 < jobs.n_jobs && blockIdx.y >= jobs.job[j + 1].first_block) j++;
    const Job &job = jobs.job[j];
    const int block = blockIdx.y - job.first_block;
    if (n == 1) tile<DT, ROWS, WARPS, 1>(job, jobs, first_row, n, block, grid, part);
    else if (n == 2) tile<DT, ROWS, WARPS, 2>(job, jobs, first_row, n, block, grid, part);
    else if (n <= 4) tile<DT, ROWS, WARPS, 4>(job, jobs, first_row, n, block, grid, part);
    else tile<DT, ROWS, WARPS, 8>(job, jobs, first_row, n, block, grid, part);
}

#define PRODUCT(NAME)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) product_##NAME(const Run run, const Jobs jobs) { \
        product<NAME, 4, 8>(run, jobs);                                                               \
    }
// For the few outputs of the hyper-connections: one output row per warp and up to 16 warps, so that many blocks share them.
#define PRODUCT1(NAME)                                                                                  \
    extern "C" __global__ void __launch_bounds__(512) product1_##NAME(const Run run, const Jobs jobs) { \
        product<NAME, 1, 16>(run, jobs);                                                         \
    }
PRODUCT1(F32)
PRODUCT1(F16)
PRODUCT1(BF16)
PRODUCT(F32)
PRODUCT(F16)
PRODUCT(BF16)
PRODUCT(Q8_0)
PRODUCT(Q4_0)
PRODUCT(Q4_K)
PRODUCT(Q5_K)
PRODUCT(Q6_K)
PRODUCT(Q2_K)
PRODUCT(IQ2_XXS)
PRODUCT(MXFP4)
