// Matrix products of all rows of a step on tensor cores (see tensor.cuh): few rows directly, many rows staged.
#include "int8.cuh"
#include "route.cuh"
#include "wide.cuh"

enum { OUT = 20 };  // floats between columns of partial sums: no bank is met twice

// Stores one value per (output, row) of a warp's tile, for the rows [first, end) of tiles that begin at a multiple of 8:
// c[0], c[1] are rows 2 t, 2 t + 1 of output g, c[2], c[3] of g + 8.
template <int NT> __device__ __forceinline__ void store_tile(const Job &job, int tile, int first, int end, const float (*v)[4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int row = first / 8 * 8 + nt * 8 + 2 * t + c % 2, out = tile * M_TILE + g + c / 2 * 8;
            if (row >= first && row < end && out < job.n_out) job.y[(long long)row * job.y_stride + out] = v[nt][c];
        }
}

__device__ __forceinline__ const Job &job_of(const Jobs &jobs, int *block) {
    int j = 0;
    while (j + 1 < jobs.n_jobs && *block >= jobs.job[j + 1].first_block) j++;
    *block -= jobs.job[j].first_block;
    return jobs.job[j];
}

// The tasks of a block: n_groups tiles of outputs each, of the blocks first, first + step, ... below end.
template <int DT, int NT> struct Products {
    enum { V = 8 * NT * OUT };
    using Ring = typename Choose<per_256(DT) || NT == 4, NoRing, RowRing<DT, NT>>::type;
    const Jobs &jobs;
    int first, step, end;
    float *part;  // partial sums
    int warps_per_tile, set, first_row, end_row;
    float total[NT][4];

    __device__ __forceinline__ Products(const Jobs &jobs, int first, int step, int end, float *part)
        : jobs(jobs), first(first), step(step), end(end), part(part), warps_per_tile(jobs.loops), set(threadIdx.x / 32 / jobs.loops) {}
    __device__ __forceinline__ int count() const { return first < end ? (end - 1 - first) / step + 1 : 0; }
    __device__ __forceinline__ const Job &at(int j, int *block) const {
        *block = first + j * step;
        return job_of(jobs, block);
    }
    __device__ __forceinline__ const Mat &matrix(int j) const {
        int block;
        return at(j, &block).mat;
    }
    __device__ __forceinline__ int tile(int j) const {
        int block;
        const Job &job = at(j, &block);
        const int tile = block * jobs.n_groups + set;
        return tile * M_TILE < job.n_out && set < jobs.n_groups ? job.first_row / M_TILE + tile : -1;
    }
    __device__ __forceinline__ void ready() {
        first_row = jobs.count ? blockIdx.x * 8 * NT : jobs.row;
        end_row = jobs.count ? min(*jobs.count, first_row + 8 * NT) : jobs.row + 1;
        follow();
    }
    __device__ __forceinline__ Ring ring(int j) const {
        int block;
        const Job &job = at(j, &block);
        if constexpr (Ring::BYTES > 0) return Ring::from(job.xq, job.x_stride, first_row / 8, end_row - first_row / 8 * 8);
        else return {};
    }
    __device__ __forceinline__ Neighbours<NT, per_256(DT)> rows(int j) const {
        int block;
        const Job &job = at(j, &block);
        return Neighbours<NT, per_256(DT)>::from(job.xq, job.x_stride, first_row / 8);
    }
    __device__ __forceinline__ void segment(int, int s, const float (*acc)[NT][4]) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (warps_per_tile == 1) total[nt][c] = s ? total[nt][c] + acc[0][nt][c] : acc[0][nt][c];
                else part[(set * jobs.n_segments + s) * V + (nt * 8 + 2 * t + c % 2) * OUT + g + c / 2 * 8] = acc[0][nt][c];
            }
    }
    __device__ __forceinline__ void finish(int j) {
        int block;
        const Job &job = at(j, &block);
        if (warps_per_tile == 1) return store_tile<NT>(job, block * jobs.n_groups + set, first_row, end_row, total);
        __syncthreads();
        if (jobs.twin_q) return finish_with_twin(job, block);
        for (int i = threadIdx.x; i < jobs.n_groups * NT * 8 * M_TILE; i += blockDim.x) {
            const int out = i % M_TILE, row = i / M_TILE % (NT * 8), tile = i / M_TILE / (NT * 8);
            const int at = (block * jobs.n_groups + tile) * M_TILE + out;
            const int to = first_row / 8 * 8 + row;
            if (at >= job.n_out || to < first_row || to >= end_row) continue;
            const float *p = part + tile * jobs.n_segments * V + row * OUT + out;
            float sum = p[0];
            for (int s = 1; s < jobs.n_segments; s++) sum += p[s * V];
            job.y[(long long)to * job.y_stride + at] = sum;
        }
        __syncthreads();  // before the next task's sums
    }
    // The same where a block has 32 neighbouring outputs: a warp has those of a row, and writes their twin as
    // quantize_by_32 does.
    __device__ __forceinline__ void finish_with_twin(const Job &job, int block) {
        const int lane = threadIdx.x % 32, out = block * 32 + lane, channel = job.channel + block * 32;
        for (int row = threadIdx.x / 32; row < NT * 8; row += blockDim.x / 32) {
            const int to = first_row / 8 * 8 + row;
            if (to < first_row || to >= end_row) continue;
            const float *p = part + lane / 16 * jobs.n_segments * V + row * OUT + lane % 16;
            float sum = p[0];
            for (int s = 1; s < jobs.n_segments; s++) sum += p[s * V];
            job.y[(long long)to * job.y_stride + out] = sum;
            const float top = largest_of_lanes(fabsf(sum), 1, 32);
            jobs.twin_q[code_at(to, channel + lane, jobs.channels)] = (int8_t)__float2int_rn(sum * (top > 0.0f ? 127.0f / top : 0.0f));
            if (lane == 0) jobs.twin_d[(to / 8 * (jobs.channels / 32) + channel / 32) * 8 + to % 8] = top / 127.0f;
        }
        __syncthreads();  // before the next task's sums
    }
};

template <int DT, int NT>
__device__ __forceinline__ void products(const Jobs &jobs, int first, int step, int end, const uint32_t *tables, uint8_t *room) {
    const int warp = threadIdx.x / 32, k = warp % jobs.loops;
    const Cut cut = {jobs.n_segments, jobs.segment / 32};
    enum { RING = RingSize<DT, 1, typename Products<DT, NT>::Ring>::BYTES };
    Products<DT, NT> tasks(jobs, first, step, end, (float *)(room + 8 * RING));
    stream<DT, NT>(cut, k * cut.segments / jobs.loops, (k + 1) * cut.segments / jobs.loops, room + warp * RING, tables, tasks);
}

// Block `y` of n_blocks that take turns. Jobs of Q8_0 and, from n_first on, F16 go together.
template <int DT, int NT> __device__ __forceinline__ void product8(const Run &run, const Jobs &jobs, int y, int n_blocks) {
    extern __shared__ __align__(16) uint8_t room[];
    uint32_t *tables = (uint32_t *)room;
    if (DT == IQ2_XXS) load_tables(run.tables, tables);
    const bool has_halves = DT == Q8_0 && jobs.n_first < jobs.n_blocks;
    if (!has_halves || y < jobs.n_first)
        products<DT, NT>(jobs, y, n_blocks, jobs.n_first, tables, room + (DT == IQ2_XXS ? TABLE_BYTES : 0));
    if (has_halves) {
        const int turns = jobs.n_first > y ? (jobs.n_first - 1 - y) / n_blocks + 1 : 0;
        products<F16, NT>(jobs, y + turns * n_blocks, n_blocks, jobs.n_blocks, tables, room);
    }
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
                     room + (DT == IQ2_XXS ? TABLE_BYTES : 0), tables, total);
    if (tile <= last) store_tile<8>(job, tile, first, first + n, total);
}

template <int DT> __device__ __forceinline__ void product8w(const Run &run, const Jobs &jobs) {
    extern __shared__ __align__(16) uint8_t room[];
    const int first = blockIdx.x * WIDE, n = min(*jobs.count - first, (int)WIDE);
    follow();
    if (n <= 0) return;
    int block = blockIdx.y;
    const Job &job = job_of(jobs, &block);
    const Cut cut = {jobs.n_segments, jobs.segment / 32};
    if (DT == Q8_0 && job.mat.dtype == F16) wide<F16>(run, job, cut, first, n, block, room);
    else wide<DT>(run, job, cut, first, n, block, room);
}

// grid (tiles of 8 NT rows, blocks that take turns), block 256: n_groups tiles of 16 outputs times `loops` warps that share
// the segments of a tile. Shared: the tables of IQ2_XXS, rings, partial sums.
#define DIRECT8(NAME, NT, BLOCKS)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) product8_##NT##_##NAME(const Run run, const Jobs jobs) {       \
        product8<NAME, NT>(run, jobs, blockIdx.y, gridDim.y);                                                                \
    }
#define PRODUCT8(NAME)                                                                                      \
    DIRECT8(NAME, 1, 2)                                                                                     \
    DIRECT8(NAME, 2, 2)                                                                                     \
    DIRECT8(NAME, 4, 2)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 2) product8_8_##NAME(const Run run, const Jobs jobs) { \
        product8w<NAME>(run, jobs);                                                                         \
    }
PRODUCT8(Q8_0)
PRODUCT8(Q4_0)
PRODUCT8(MXFP4)
PRODUCT8(Q4_K)
PRODUCT8(Q5_K)
PRODUCT8(Q6_K)
PRODUCT8(Q2_K)
PRODUCT8(IQ2_XXS)

// The same with a first block more, which meanwhile routes the rows (at most 32): neither needs the other. pairs: those of
// the bucket.
#define ROUTE8(NT)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                               \
        route8_##NT(const Run run, const Layer layer, const Jobs jobs, int tile_rows, int pairs) {                     \
        extern __shared__ __align__(16) int key[];                                                                     \
        if (blockIdx.y == 0) return route_pairs(run, layer, tile_rows, key, pairs);                                    \
        product8<Q8_0, NT>(run, jobs, blockIdx.y - 1, gridDim.y - 1);                                                  \
    }
ROUTE8(1)
ROUTE8(2)
ROUTE8(4)
