// The top_k entries of every row by their index scores.
//
// A radix select: histograms of 11, 11 and 10 bits find the rank of the last entry kept, one pass more collects.
#include "common.cuh"

enum { BINS = 2048, PER_THREAD = 4 };

// Unsigned integers in the order of the scores; both zeros are equal, NaN counts as -infinity.
__device__ __forceinline__ uint32_t rank_of(float score) {
    const uint32_t bits = __float_as_uint(score == score ? score + 0.0f : -INFINITY);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Sum over earlier threads of the block (exclusive), and the total. Block of 1024.
__device__ __forceinline__ int scan(int v, int *room, int *total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = v;
    for (int off = 1; off < 32; off <<= 1) {
        const int up = __shfl_up_sync(FULL, sum, off);
        if (lane >= off) sum += up;
    }
    __syncthreads();
    if (lane == 31) room[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        int s = room[lane];
        for (int off = 1; off < 32; off <<= 1) {
            const int up = __shfl_up_sync(FULL, s, off);
            if (lane >= off) s += up;
        }
        room[lane] = s;
    }
    __syncthreads();
    *total = room[31];
    return sum - v + (warp ? room[warp - 1] : 0);
}

// grid rows, block 1024. The top_k best entries, ascending; a tie goes to the lower entry.
extern "C" __global__ void __launch_bounds__(1024) select_entries(const Run run, int row0) {
    __shared__ int count[BINS], room[32];
    __shared__ uint32_t s_found;
    __shared__ int s_need;
    const int row = row0 + blockIdx.x, n = row < *run.n_rows ? (run.pos[row] + 1) / CSA : 0;
    count[threadIdx.x] = count[threadIdx.x + 1024] = 0;
    follow();
    if (n <= run.top_k) return;
    const float *scores = run.scores + (long long)row * run.max_entries;
    int *selected = run.selected + (long long)row * run.top_k;
    uint32_t found = 0, known = 0;  // bits of the last one's rank
    int need = run.top_k, total;
    for (int top = 32; top > 0; top -= 11) {
        const int shift = max(top - 11, 0);
        __syncthreads();
#pragma unroll 4
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            const uint32_t r = rank_of(scores[i]);
            if ((r & known) == found) atomicAdd(&count[(r & ~known) >> shift], 1);
        }
        __syncthreads();
        int *const bins = count + BINS - 2 - 2 * threadIdx.x;  // the first thread has the highest two
        const int low = bins[0], high = bins[1], above = scan(low + high, room, &total);
        bins[0] = bins[1] = 0;
        if (above < need && above + high + low >= need) {
            const bool is_high = above + high >= need;
            s_found = found | (uint32_t)(bins - count + is_high) << shift;
            s_need = need - above - (is_high ? 0 : high);
        }
        __syncthreads();
        found = s_found, need = s_need, known = ~0u << shift;
    }
    int n_above = 0, n_equal = 0;
    for (int first = 0; first < n; first += PER_THREAD * blockDim.x) {
        const int i0 = first + threadIdx.x * PER_THREAD;
        uint32_t r[PER_THREAD];
        int mine = 0;  // above found, and equal to it in the high half
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            r[i] = i0 + i < n ? rank_of(scores[i0 + i]) : 0;  // no score has rank 0
            mine += (r[i] > found) + ((r[i] == found) << 16);
        }
        const int before = scan(mine, room, &total);
        int above = n_above + (before & 0xffff), equal = n_equal + (before >> 16);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            if (r[i] > found) selected[above++ + min(equal, need)] = i0 + i;
            if (r[i] == found && equal++ < need) selected[above + equal - 1] = i0 + i;
        }
        n_above += total & 0xffff, n_equal += total >> 16;
    }
}
