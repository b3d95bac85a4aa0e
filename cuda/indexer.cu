// The indexer of CSA layers: score_w = sum over heads of a_h * relu(iq_h . K_w).
//
// score_entries: a dot product is one thread's chain of fmaf over the channels; heads are added in groups of 16, groups in
// order. score8, for exact=False: dot products by tensor cores, channels in an order of its own.
#include "common.cuh"

enum { ENTRIES = 64, GROUP = 16 };
enum { TILE = 8, PARTS = 8, MOST_GROUPS = 8 };  // score8: entries at a time; 16-channel parts of a key; groups of heads

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

// Four neighbouring channels of a cached row, rounded to what tensor cores read; a half is unchanged by it.
__device__ __forceinline__ void load_tf32(const Run &run, const uint8_t *row, int k, uint32_t *v) {
    float4 f;
    if (run.cache_half) {
        const uint2 h = *(const uint2 *)((const __half *)row + k);
        f = make_float4(half_bits(h.x & 0xffffu), half_bits(h.x >> 16), half_bits(h.y & 0xffffu), half_bits(h.y >> 16));
    } else {
        f = *(const float4 *)((const float *)row + k);
    }
    v[0] = to_tf32(f.x), v[1] = to_tf32(f.y), v[2] = to_tf32(f.z), v[3] = to_tf32(f.w);
}

// The 16 heads from h0 on of one row as fragments, rotated on the way unless finish_queries did it (for the cache roundings,
// which take a whole head): part j holds the channels 16 j + 4 t .. + 3 of lane 4 g + t, the first
// two for one product, the others for the next. Keys are cut the same way, so both sides load 16 bytes at a time.
__device__ __forceinline__ void load_heads(const Run &run, const Layer &layer, int row, int h0, uint32_t (*a)[2][4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, dim = run.index_dim, n_heads = run.index_heads;
    const int tail = run.roundings ? dim : dim - run.rope_dim;
    const float *cosine = cos_of(run, layer, row), *sine = sin_of(run, layer, row);
    const float *q = run.iq + ((long long)row * n_heads + h0 + g) * dim;
#pragma unroll
    for (int j = 0; j < PARTS; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int k = 16 * j + 4 * t;
            const bool is_there = k < dim && h0 + g + 8 * half < n_heads;
            const float4 own = is_there ? *(const float4 *)(q + 8 * half * dim + k) : make_float4(0, 0, 0, 0);
            float v[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
            for (int p = 0; p < 4; p += 2)
                if (is_there && k + p >= tail) rotate_pair(v + p, 0, cosine[(k + p - tail) / 2], sine[(k + p - tail) / 2]);
            a[j][0][half] = to_tf32(v[0]), a[j][0][half + 2] = to_tf32(v[1]);
            a[j][1][half] = to_tf32(v[2]), a[j][1][half + 2] = to_tf32(v[3]);
        }
}

// sum[i]: entry 2 t + i, a_h * relu(iq_h . K) added up over the warp's heads: each lane's two, then all lanes of a column.
__device__ __forceinline__ void score_tile(const Run &run, const uint8_t *key, const uint32_t (*a)[2][4], float low, float high,
                                           float *sum) {
    const int t = threadIdx.x % 4, dim = run.index_dim;
    uint32_t b[PARTS][4];
    float c[2][4] = {};
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
        if (16 * j + 4 * t < dim)
            load_tf32(run, key, 16 * j + 4 * t, b[j]);
        else
            b[j][0] = b[j][1] = b[j][2] = b[j][3] = 0;
    }
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
        mma_tf32(c[0], a[j][0], b[j]);
        mma_tf32(c[1], a[j][1], b[j] + 2);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] = fmaf(low, fmaxf(c[0][i] + c[1][i], 0.0f), high * fmaxf(c[0][i + 2] + c[1][i + 2], 0.0f));
        for (int off = 4; off < 32; off *= 2) sum[i] += __shfl_xor_sync(FULL, sum[i], off);
    }
}

// grid (rows, blocks), block 32 x groups of 16 heads: at most 8 groups, at most 128 channels. Blocks take tiles of 8
// entries in turn; a warp keeps its heads in registers.
extern "C" __global__ void __launch_bounds__(32 * MOST_GROUPS) score8(const Run run, const Layer layer, int row0) {
    __shared__ float part[2][MOST_GROUPS][TILE];
    const int row = row0 + blockIdx.x, dim = run.index_dim, n_heads = run.index_heads, n_warps = blockDim.x / 32;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, h0 = warp * GROUP;
    const int visible = row < *run.n_rows ? (run.pos[row] + 1) / CSA : 0;
    if (visible <= run.top_k || blockIdx.y * TILE >= visible) return follow();
    const int item = run.row_item[row], bytes = dim * cache_bytes(run);
    const uint8_t *key = entry_slot(run, layer, item, min((int)blockIdx.y * TILE + g, visible - 1), layer.index_keys, dim);
    for (int at = (warp * 4 + t) * 128; at < bytes; at += n_warps * 512) prefetch_l2(key + at);  // old keys are there
    follow();
    uint32_t a[PARTS][2][4];
    load_heads(run, layer, row, h0, a);
    const float *weight = run.ia + (long long)row * n_heads + h0 + g;
    const float low = h0 + g < n_heads ? weight[0] : 0.0f, high = h0 + g + 8 < n_heads ? weight[8] : 0.0f;
    int side = 0;  // the sums of one tile are read while those of the next are written
    for (int first = blockIdx.y * TILE; first < visible; first += gridDim.y * TILE, side ^= 1) {
        float sum[2];
        score_tile(run, key, a, low, high, sum);
        key = entry_slot(run, layer, item, min(first + (int)gridDim.y * TILE + g, visible - 1), layer.index_keys, dim);
        if (g == 0) part[side][warp][2 * t] = sum[0], part[side][warp][2 * t + 1] = sum[1];
        __syncthreads();
        const int e = threadIdx.x;
        if (e >= TILE || first + e >= visible) continue;
        float score = part[side][0][e];
        for (int other = 1; other < n_warps; other++) score += part[side][other][e];
        run.scores[(long long)row * run.max_entries + first + e] = score;
    }
}
