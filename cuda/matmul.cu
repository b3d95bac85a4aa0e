// Matrix products of all rows of a step: y = W x, each weight read once per tile of 8 rows.
//
// grid (row tiles, blocks of output rows), block up to 8 warps: n_groups groups of 4 output rows, each with one warp per
// segment (8 warps take turns when there are more segments). One launch runs several jobs of one dtype. Tiles are the fast axis, so that the tiles of a weight block run side by side and share it in the L2 cache.
#include "matmul.cuh"

enum { ROWS = 4 };  // weight rows per warp

template <int DT, int NB>
__device__ __forceinline__ void tile(const Job &job, const Jobs &jobs, int first_row, int n, int group, int segment,
                                     int out, const uint2 *grid, float *part) {
    const float *x[NB];
#pragma unroll
    for (int i = 0; i < NB; i++) {
        const int row = first_row + (i < n ? i : n - 1);
        x[i] = job.x + (long long)(job.x_rows ? job.x_rows[row] : row) * job.x_stride;
    }
    for (; segment < jobs.n_segments; segment += 8) {
        float acc[ROWS][NB] = {};
        const int first = segment * jobs.segment, end = min(first + jobs.segment, job.mat.n_in);
        dot_segment<DT, ROWS, NB>(job.mat, job.first_row + out, job.first_row + job.n_out - 1, x, first, end, grid, acc);
        reduce_to<ROWS * NB>(&acc[0][0], part + (group * jobs.n_segments + segment) * ROWS * TILE);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < jobs.n_groups * ROWS * NB; i += blockDim.x) {
        const int g = i / (ROWS * NB), r = i % (ROWS * NB) / NB, row = i % NB;
        const int at = out - group * ROWS + g * ROWS + r;
        if (at >= job.n_out || row >= n) continue;
        const float *p = part + g * jobs.n_segments * ROWS * TILE + r * NB + row;
        float sum = p[0];
        for (int s = 1; s < jobs.n_segments; s++) sum += p[s * ROWS * TILE];
        job.y[(long long)(first_row + row) * job.y_stride + at] = sum;
    }
}

template <int DT> __device__ __forceinline__ void product(const Run &run, const Jobs &jobs) {
    __shared__ float part[32 * ROWS * TILE];
    __shared__ uint2 grid[DT == IQ2_XXS ? 256 : 1];
    const int first_row = blockIdx.x * TILE, n = min(*jobs.count - first_row, (int)TILE);
    if (n <= 0) return;
    if constexpr (DT == IQ2_XXS) load_grid(run.grid, grid);
    int j = 0;
    while (j + 1 < jobs.n_jobs && blockIdx.y >= jobs.job[j + 1].first_block) j++;
    const Job &job = jobs.job[j];
    const int warp = threadIdx.x / 32, per_group = min(jobs.n_segments, 8);
    const int group = warp / per_group, segment = warp % per_group;
    const int out = ((blockIdx.y - job.first_block) * jobs.n_groups + group) * ROWS;
    if (n == 1) tile<DT, 1>(job, jobs, first_row, n, group, segment, out, grid, part);
    else if (n == 2) tile<DT, 2>(job, jobs, first_row, n, group, segment, out, grid, part);
    else if (n <= 4) tile<DT, 4>(job, jobs, first_row, n, group, segment, out, grid, part);
    else tile<DT, 8>(job, jobs, first_row, n, group, segment, out, grid, part);
}

#define PRODUCT(NAME)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) product_##NAME(const Run run, const Jobs jobs) { \
        product<NAME>(run, jobs);                                                                      \
    }
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
