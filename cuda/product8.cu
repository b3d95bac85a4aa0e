// Matrix products of all rows of a step on tensor cores (see tensor.cuh): few rows directly, many rows staged.
#include "wide.cuh"

enum { OUT = 20 };  // floats between columns of partial sums: no bank is met twice

// Stores one value per (output, row) of a warp's tile: c[0], c[1] are rows 2 t, 2 t + 1 of output g, c[2], c[3] of g + 8.
template <int NT> __device__ __forceinline__ void store_tile(const Job &job, int tile, int first_row, int n, const float (*v)[4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int row = nt * 8 + 2 * t + c % 2, out = tile * M_TILE + g + c / 2 * 8;
            if (row < n && out < job.n_out) job.y[(long long)(first_row + row) * job.y_stride + out] = v[nt][c];
        }
}

// `room`: a ring for each warp, then the partial sums.
template <int DT, int NT>
__device__ __forceinline__ void direct(const Job &job, const Jobs &jobs, int block, const uint32_t *tables, uint8_t *room) {
    enum { V = 8 * NT * OUT };
    const int warp = threadIdx.x / 32, wk = warp % jobs.loops, wm = warp / jobs.loops, tile = block * jobs.n_groups + wm;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const Cut cut = {jobs.n_segments, jobs.segment / 32};
    const bool busy = tile * M_TILE < job.n_out && wm < jobs.n_groups;
    const Mat *const mats[1] = {&job.mat};
    const int s0 = busy ? wk * cut.segments / jobs.loops : 0, s1 = busy ? (wk + 1) * cut.segments / jobs.loops : 0;
    Walk<DT, 1> walk(mats, job.first_row / M_TILE + tile, cut, s0, s1, room + warp * Walk<DT, 1>::RING);
    float *part = (float *)(room + 8 * Walk<DT, 1>::RING);
    follow();
    const int first = jobs.count ? blockIdx.x * 8 * NT : jobs.row, n = jobs.count ? min(*jobs.count - first, 8 * NT) : 1;
    if (n <= 0) return;
    float total[NT][4];
    Direct<NT, per_256(DT)> b;
    b.set(job.xq, job.x_stride, n, [&](int i) { return first + i; });
    walk.template run<NT>(b, tables, [&](int s, const float (*acc)[NT][4]) {
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (jobs.loops == 1) total[nt][c] = s ? total[nt][c] + acc[0][nt][c] : acc[0][nt][c];
                else part[(wm * cut.segments + s) * V + (nt * 8 + 2 * t + c % 2) * OUT + g + c / 2 * 8] = acc[0][nt][c];
            }
    });
    if (jobs.loops == 1) {
        if (busy) store_tile<NT>(job, tile, first, n, total);
        return;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < jobs.n_groups * NT * 8 * M_TILE; i += blockDim.x) {
        const int out = i % M_TILE, row = i / M_TILE % (NT * 8), set = i / M_TILE / (NT * 8), at = (block * jobs.n_groups + set) * M_TILE + out;
        if (at >= job.n_out || row >= n) continue;
        const float *p = part + set * cut.segments * V + row * OUT + out;
        float sum = p[0];
        for (int s = 1; s < cut.segments; s++) sum += p[s * V];
        job.y[(long long)(first + row) * job.y_stride + at] = sum;
    }
}

__device__ __forceinline__ const Job &job_of(const Jobs &jobs, int *block) {
    int j = 0;
    while (j + 1 < jobs.n_jobs && *block >= jobs.job[j + 1].first_block) j++;
    *block -= jobs.job[j].first_block;
    return jobs.job[j];
}

// grid (tiles of 8 NT rows, blocks of n_groups * 16 outputs), block 256: n_groups tiles times `loops` warps that share the
// segments of a tile. Shared: the tables of IQ2_XXS, rings, partial sums. Jobs of Q8_0 and F16 go together.
template <int DT, int NT> __device__ __forceinline__ void product8(const Run &run, const Jobs &jobs) {
    extern __shared__ __align__(16) uint8_t room[];
    uint32_t *tables = (uint32_t *)room;
    if (DT == IQ2_XXS) load_tables(run.tables, tables);
    int block = blockIdx.y;
    const Job &job = job_of(jobs, &block);
    if (DT == Q8_0 && job.mat.dtype == F16) direct<F16, NT>(job, jobs, block, tables, room);
    else direct<DT, NT>(job, jobs, block, tables, room + (DT == IQ2_XXS ? (GRID_WORDS + SIGN_WORDS) * COPIES * 4 : 0));
}

// grid (tiles of 64 rows, blocks of 128 outputs), block 256. Shared: the tables of IQ2_XXS, then two stages.
template <int DT> __device__ __forceinline__ void wide(const Run &run, const Job &job, const Cut &cut, int first, int n, int block, uint8_t *room) {
    __shared__ int at[WIDE];
    uint32_t *tables = (uint32_t *)room;
    if (DT == IQ2_XXS) load_tables(run.tables, tables);
    if (threadIdx.x < WIDE) at[threadIdx.x] = place_of(first + min((int)threadIdx.x, n - 1), job.x_stride);
    __syncthreads();
    const int tile = block * 8 + threadIdx.x / 32, last = (job.n_out - 1) / M_TILE;
    float total[8][4];
    wide_walk<DT, 8>(job.mat, job.first_row / M_TILE + min(tile, last), cut, job.xq, at,
                     room + (DT == IQ2_XXS ? (GRID_WORDS + SIGN_WORDS) * COPIES * 4 : 0), tables, total);
    if (tile <= last) store_tile<8>(job, tile, first, n, total);
}

template <int DT> __device__ __forceinline__ void product8w(const Run &run, const Jobs &jobs) {
    extern __shared__ __align__(16) uint8_t room[];
    follow();
    const int first = blockIdx.x * WIDE, n = min(*jobs.count - first, (int)WIDE);
    if (n <= 0) return;
    int block = blockIdx.y;
    const Job &job = job_of(jobs, &block);
    const Cut cut = {jobs.n_segments, jobs.segment / 32};
    if (DT == Q8_0 && job.mat.dtype == F16) wide<F16>(run, job, cut, first, n, block, room);
    else wide<DT>(run, job, cut, first, n, block, room);
}

#define DIRECT8(NAME, NT, BLOCKS)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) product8_##NT##_##NAME(const Run run, const Jobs jobs) {       \
        product8<NAME, NT>(run, jobs);                                                                                       \
    }
#define PRODUCT8(NAME)                                                                                      \
    DIRECT8(NAME, 1, 2)                                                                                     \
    DIRECT8(NAME, 2, 2)                                                                                     \
    DIRECT8(NAME, 4, 2)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 1) product8_8_##NAME(const Run run, const Jobs jobs) { \
        product8w<NAME>(run, jobs);                                                                         \
    }
PRODUCT8(Q8_0)
PRODUCT8(Q4_K)
PRODUCT8(Q2_K)
PRODUCT8(IQ2_XXS)
