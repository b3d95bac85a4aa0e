// The indexer of CSA layers: score_w = sum over heads of a_h * relu(iq_h . K_w), and the top_k entries of every row.
//
// A dot product is one thread's chain of fmaf over the channels; heads are added in groups of 16, groups in order.
#include "common.cuh"

enum { ENTRIES = 64, GROUP = 16 };

// grid (rows, blocks of 64 entries), block 64 x head groups, shared: the row's index queries.
extern "C" __global__ void score_entries(const Run run, const Layer layer, int row0) {
    follow();
    extern __shared__ float query[];
    const int row = row0 + blockIdx.x, first = blockIdx.y * ENTRIES, dim = run.index_dim, n_heads = run.index_heads;
    if (row >= *run.n_rows) return;
    const int visible = (run.pos[row] + 1) / CSA;
    if (visible <= run.top_k || first >= visible) return;
    for (int i = threadIdx.x; i < n_heads * dim; i += blockDim.x) query[i] = run.iq[(long long)row * n_heads * dim + i];
    float *sums = query + n_heads * dim;  // [groups, 64]
    __syncthreads();
    const int e = threadIdx.x % ENTRIES, group = threadIdx.x / ENTRIES, h0 = group * GROUP, w = min(first + e, visible - 1);
    const uint8_t *key = entry_slot(run, layer, run.row_item[row], w, layer.index_keys, dim);
    float acc[GROUP] = {};
    for (int d = 0; d < dim; d += 4) {
        float k[4];
        for (int i = 0; i < 4; i++) k[i] = load_cached(run, key, d + i);
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            const float4 q = *(const float4 *)(query + min(h0 + h, n_heads - 1) * dim + d);
            acc[h] = fmaf(q.x, k[0], acc[h]);
            acc[h] = fmaf(q.y, k[1], acc[h]);
            acc[h] = fmaf(q.z, k[2], acc[h]);
            acc[h] = fmaf(q.w, k[3], acc[h]);
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int h = 0; h < GROUP; h++)
        if (h0 + h < n_heads) sum = fmaf(run.ia[(long long)row * n_heads + h0 + h], fmaxf(acc[h], 0.0f), sum);
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (group || first + e >= visible) return;
    for (int g = 1; g < blockDim.x / ENTRIES; g++) sum += sums[g * ENTRIES + e];
    run.scores[(long long)row * run.max_entries + first + e] = sum;
}

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
    follow();
    __shared__ int count[256], room[32];
    __shared__ uint32_t s_found;
    __shared__ int s_need;
    const int row = row0 + blockIdx.x;
    if (row >= *run.n_rows) return;
    const int n = (run.pos[row] + 1) / CSA;
    if (n <= run.top_k) return;
    const float *scores = run.scores + (long long)row * run.max_entries;
    int *selected = run.selected + (long long)row * run.top_k;
    uint32_t found = 0, mask = 0;
    int need = run.top_k;
    for (int shift = 24; shift >= 0; shift -= 8) {  // one histogram per byte finds the rank of the last one kept
        if (threadIdx.x < 256) count[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            const uint32_t r = rank_of(scores[i]);
            if ((r & mask) == found) atomicAdd(&count[r >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255;
            while (count[digit] < need) need -= count[digit--];
            s_found = found | (uint32_t)digit << shift;
            s_need = need;
        }
        __syncthreads();
        found = s_found;
        need = s_need;
        mask |= 255u << shift;
    }
    int kept = 0, equal = 0;
    for (int i0 = 0; i0 < n; i0 += blockDim.x) {
        const int i = i0 + threadIdx.x;
        const uint32_t r = i < n ? rank_of(scores[i]) : 0;
        int total;
        const int is_equal = i < n && r == found, rank = equal + scan(is_equal, room, &total);
        equal += total;
        const int keep = i < n && (r > found || (is_equal && rank < need));
        const int slot = kept + scan(keep, room, &total);
        kept += total;
        if (keep) selected[slot] = i;
    }
}
