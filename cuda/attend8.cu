// Attention of the inexact mode, on tensor cores. Q, K, V and the weights P are rounded to tf32; sums are float32.
//
// A row's keys are its visible rows in blocks of 32, counted from the first one. A block's scores are sums of eight parts
// of 64 channels in ascending order; blocks are joined one after the other, from the sink on. Which blocks and how many
// heads share a thread block changes no sum: few rows have their blocks attend apart (attend8_16, attend8_32, then join8),
// with many rows one thread block goes through all of them (attend8_all).
//
// Fragments, for lane = 4 g + t. The order of the channels in a sum and of the outputs in a product is free, so that
// every lane reads 16 bytes at a time: in 32 channels, lane t has 8 t .. 8 t + 7 of Q and K, two to an instruction; of V,
// column g is channel 16 (g % 2) + 4 (g / 2) + j of product j. Staged rows are 4 words longer than a multiple of 32, which
// keeps both free of bank conflicts.
#include "int8.cuh"

enum { KEYS8 = 32, WARPS8 = 8, CHUNK = 32, CHUNKS = 2 };  // CHUNKS of channels per warp: heads of up to 512

__device__ __forceinline__ int row_words(const Run &run) { return (run.head_dim + CHUNK - 1) / CHUNK * CHUNK + 4; }

// The low 13 bits are ignored: adding half of what they hold rounds to the nearest.
__device__ __forceinline__ uint32_t near_tf32(float v) { return __float_as_uint(v) + 0x1000u; }

// A softmax's largest score and sum so far, and what its parts are multiplied by when a block joins.
struct Joined {
    float top, total, before, block;
    __device__ __forceinline__ void add(float block_top, float sum) {
        const float now = fmaxf(top, block_top);
        before = expf(top - now), block = expf(block_top - now);
        total = fmaf(sum, block, total * before);
        top = now;
    }
};

// Channels c .. c + 7 of a head's output: rotated back, into run.q and its twin. All lanes of a warp with neighbouring c.
__device__ __forceinline__ void store_output(const Run &run, const Layer &layer, int row, int head, const float *out, int c) {
    const int dim = run.head_dim, tail = dim - run.rope_dim;
    float v[8] = {};
    if (c < dim) {
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = out[c + e];
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const int i = (c + e - tail) / 2;
            if (c + e >= tail) rotate_pair(v + e, 0, cos_of(run, layer, row)[i], -sin_of(run, layer, row)[i]);
        }
        float4 *to = (float4 *)(run.q + ((long long)row * run.n_heads + head) * dim + c);
        to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
    if (dim % 32 == 0) quantize8(v, run.q_q, row, head * dim + c, run.n_heads * dim, c < dim);
}

// Where visible row first + lane lies, null beyond the last: the look-ups of a block do not wait for one another.
__device__ __forceinline__ const uint8_t *find_key(const Run &run, const Layer &layer, const View &view, int first) {
    const int key = first + threadIdx.x % 32;
    return key < view.n_raw + view.n_entries ? visible_at(run, layer, view, key) : nullptr;
}

// Whether a visible row was there before this step, so that no kernel of it writes it.
__device__ __forceinline__ bool is_old(const Run &run, const Layer &layer, const View &view, int t) {
    const int before = run.item_pos[view.item];
    return t < view.n_raw ? view.first + t < before : (t - view.n_raw + 1) * layer.ratio <= before;
}

#define LATER ((const uint8_t *)1)  // a row that another call stages

// A block of 32 visible rows to shared memory, of which a lane knows one each; zeros for those that are not there and
// beyond the head.
__device__ __forceinline__ void stage_keys(const Run &run, const uint8_t *mine, float *to) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, words = row_words(run) - 4;
#pragma unroll
    for (int i = 0; i < KEYS8 / WARPS8; i++) {
        const int key = i * WARPS8 + warp;
        const uint8_t *from = (const uint8_t *)__shfl_sync(FULL, (unsigned long long)mine, key);
        float *row = to + key * (words + 4);
        if (from == LATER) continue;
        for (int k = lane * 4; k < words; k += 128) {
            if (!from || k >= run.head_dim) {
                *(float4 *)(row + k) = make_float4(0, 0, 0, 0);
            } else if (run.cache_half) {
                const uint2 v = *(const uint2 *)((const __half *)from + k);
                *(float4 *)(row + k) = make_float4(half_bits(v.x & 0xffffu), half_bits(v.x >> 16), half_bits(v.y & 0xffffu),
                                                   half_bits(v.y >> 16));
            } else {
                copy_async(row + k, (const float *)from + k);
            }
        }
    }
    copy_commit();
}

// The warp's channels of the queries as fragments: q[.][0] of head g, q[.][1] of head g + 8. Norm and rotation on the way.
template <int MT>
__device__ __forceinline__ void load_queries(const Run &run, const Layer &layer, int row, int h0, float *room,
                                             uint32_t (*q)[2][8 * CHUNKS]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, dim = run.head_dim;
    const int tail = dim - run.rope_dim;
#pragma unroll
    for (int m = 0; m < MT * 2; m++) {
        const int head = h0 + m * 8 + g;
        const float *from = run.q + ((long long)row * run.n_heads + head) * dim;
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * CHUNKS; i++) {
            const int k = (warp * CHUNKS + i / 2) * CHUNK + 8 * t + i % 2 * 4;
            const float4 v = head < run.n_heads && k < dim ? *(const float4 *)(from + k) : make_float4(0, 0, 0, 0);
            uint32_t *to = q[m / 2][m % 2] + 4 * i;
            to[0] = __float_as_uint(v.x), to[1] = __float_as_uint(v.y), to[2] = __float_as_uint(v.z), to[3] = __float_as_uint(v.w);
            squares = fmaf(v.x, v.x, squares), squares = fmaf(v.y, v.y, squares);
            squares = fmaf(v.z, v.z, squares), squares = fmaf(v.w, v.w, squares);
        }
        squares += __shfl_xor_sync(FULL, squares, 1);
        squares += __shfl_xor_sync(FULL, squares, 2);
        if (t == 0) room[warp * MT * 16 + m * 8 + g] = squares;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MT * 2; m++) {
        float squares = room[m * 8 + g];
#pragma unroll
        for (int w = 1; w < WARPS8; w++) squares += room[w * MT * 16 + m * 8 + g];
        const float inverse = 1.0f / sqrtf(squares / (float)dim + run.rms_eps);
#pragma unroll
        for (int e = 0; e < 8 * CHUNKS; e += 2) {
            const int k = (warp * CHUNKS + e / 8) * CHUNK + 8 * t + e % 8;
            uint32_t *at = q[m / 2][m % 2] + e;
            float v[2] = {__uint_as_float(at[0]) * inverse, __uint_as_float(at[1]) * inverse};
            if (k >= tail && k < dim) {
                const int i = (k - tail) / 2;
                rotate_pair(v, 0, cos_of(run, layer, row)[i], sin_of(run, layer, row)[i]);
            }
            at[0] = to_tf32(v[0]), at[1] = to_tf32(v[1]);
        }
    }
}

// Q K^T over the warp's channels -> its part, [heads][32 keys], keys turned by 8 (head % 4).
template <int MT>
__device__ __forceinline__ void add_scores(const Run &run, const float *keys, float *parts, const uint32_t (*q)[2][8 * CHUNKS]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, words = row_words(run);
    if (warp * CHUNKS * CHUNK >= run.head_dim) return;
#pragma unroll
    for (int n0 = 0; n0 < 4; n0 += 2) {
        float s[2][MT][4] = {};
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int c = (warp * CHUNKS + i) * CHUNK;
            if (c >= run.head_dim) break;
            uint32_t b[2][8];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float4 *from = (const float4 *)(keys + (8 * (n0 + n) + g) * words + c + 8 * t);
                const float4 v = from[0], u = from[1];
                b[n][0] = near_tf32(v.x), b[n][1] = near_tf32(v.y), b[n][2] = near_tf32(v.z), b[n][3] = near_tf32(v.w);
                b[n][4] = near_tf32(u.x), b[n][5] = near_tf32(u.y), b[n][6] = near_tf32(u.z), b[n][7] = near_tf32(u.w);
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    const uint32_t *low = q[m][0] + 8 * i + 2 * j, *high = q[m][1] + 8 * i + 2 * j;
                    const uint32_t a[4] = {low[0], high[0], low[1], high[1]};
                    mma_tf32(s[0][m], a, b[0] + 2 * j);
                    mma_tf32(s[1][m], a, b[1] + 2 * j);
                }
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int m = 0; m < MT; m++) {
                float *to = parts + (warp * MT * 16 + m * 16 + g) * KEYS8 + ((8 * (n0 + n) + 2 * t) ^ (g % 4 * 8));
                *(float2 *)to = make_float2(s[n][m][0], s[n][m][1]);
                *(float2 *)(to + 8 * KEYS8) = make_float2(s[n][m][2], s[n][m][3]);
            }
    }
}

// One head's weights of a block, a key per lane: into the head's row of part 0, keys turned by 4 (head % 8).
template <int MT>
__device__ __forceinline__ float2 block_weights(const Run &run, float *parts, int h, int n) {
    const int lane = threadIdx.x % 32, n_parts = (run.head_dim + CHUNKS * CHUNK - 1) / (CHUNKS * CHUNK);
    const float *from = parts + h * KEYS8 + (lane ^ (h % 4 * 8));
    float s = from[0];
#pragma unroll
    for (int p = 1; p < WARPS8; p++)
        if (p < n_parts) s += from[p * MT * 16 * KEYS8];
    s = lane < n ? s * run.attn_scale : -INFINITY;
    float top = s;
    for (int off = 16; off; off >>= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, off));
    const uint32_t weight = to_tf32(expf(s - top));
    __syncwarp();
    parts[h * KEYS8 + (lane ^ (h % 8 * 4))] = __uint_as_float(weight);
    return make_float2(top, warp_sum(__uint_as_float(weight)));
}

// P V for 32 channels from c on: out[m][j] is product j of 16 heads.
template <int MT>
__device__ __forceinline__ void weigh_values(const float *keys, int words, const float *weights, int c, float (*out)[4][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int j = 0; j < 16; j++) out[m][j / 4][j % 4] = 0.0f;
#pragma unroll
    for (int k = 0; k < KEYS8; k += 8) {
        const float4 *from = (const float4 *)(keys + (k + t) * words + c + g % 2 * 16 + g / 2 * 4);
        const float4 v = from[0], u = from[words];  // four rows on, of `words` floats
        const uint32_t b[4][2] = {{near_tf32(v.x), near_tf32(u.x)}, {near_tf32(v.y), near_tf32(u.y)},
                                  {near_tf32(v.z), near_tf32(u.z)}, {near_tf32(v.w), near_tf32(u.w)}};
#pragma unroll
        for (int m = 0; m < MT; m++) {
            const float *p = weights + (m * 16 + g) * KEYS8;
            const int low = (k + t) ^ (g * 4), high = (k + t + 4) ^ (g * 4);
            const uint32_t a[4] = {__float_as_uint(p[low]), __float_as_uint(p[8 * KEYS8 + low]), __float_as_uint(p[high]),
                                   __float_as_uint(p[8 * KEYS8 + high])};
#pragma unroll
            for (int j = 0; j < 4; j++) mma_tf32(out[m][j], a, b[j]);
        }
    }
}

// Where a lane's results r = 0 .. 3 of 4 products lie: head (r / 2) * 8 + g, channels r % 2 * 16 + 4 t .. + 3.
__device__ __forceinline__ float4 four_channels(const float (*out)[4], int r) {
    return make_float4(out[0][r], out[1][r], out[2][r], out[3][r]);
}

// grid (rows, groups of 16 * MT heads, key blocks), block 256, shared: 32 staged keys, 8 parts of the scores.
// What no kernel writes is read before follow().
template <int MT> __device__ __forceinline__ void attend_block(const Run &run, const Layer &layer, int row0) {
    extern __shared__ __align__(16) float keys[];
    const int row = row0 + blockIdx.x, h0 = blockIdx.y * MT * 16, first = blockIdx.z * KEYS8, dim = run.head_dim;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, words = row_words(run);
    const bool is_row = row < *run.n_rows;
    const View view = view_of(run, layer, row);
    const int n = view.n_raw + view.n_entries;
    if (!is_row || first >= n) return follow();
    float *parts = keys + KEYS8 * words;
    const uint8_t *key = LATER;
    if (!view.selected) {
        key = find_key(run, layer, view, first);
        const bool now = !key || is_old(run, layer, view, first + lane);
        stage_keys(run, now ? key : LATER, keys);
        if (now) key = LATER;
    }
    follow();
    if (view.selected) key = find_key(run, layer, view, first);
    stage_keys(run, key, keys);
    {
        uint32_t q[MT][2][8 * CHUNKS];
        load_queries<MT>(run, layer, row, h0, parts, q);
        copy_wait<0>();
        __syncthreads();
        add_scores<MT>(run, keys, parts, q);
    }
    __syncthreads();
    const long long part = ((long long)blockIdx.x * run.n_splits + blockIdx.z) * run.n_heads + h0;
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        const int h = warp * 2 * MT + i;
        const float2 found = block_weights<MT>(run, parts, h, n - first);
        if (lane == 0 && h0 + h < run.n_heads) *(float2 *)(run.part_ml + (part + h) * 2) = found;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int c = (warp * CHUNKS + i) * CHUNK;
        if (c >= dim) break;
        float out[MT][4][4];
        weigh_values<MT>(keys, words, parts, c, out);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int h = m * 16 + r / 2 * 8 + g, k = c + r % 2 * 16 + 4 * t;
                if (h0 + h < run.n_heads && k < dim) *(float4 *)(run.part_o + (part + h) * dim + k) = four_channels(out[m], r);
            }
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) attend8_16(const Run run, const Layer layer, int row0) {
    attend_block<1>(run, layer, row0);
}
extern "C" __global__ void __launch_bounds__(256, 2) attend8_32(const Run run, const Layer layer, int row0) {
    attend_block<2>(run, layer, row0);
}

// grid (rows, heads), block 128, shared: head_dim floats. Joins the key blocks; rotates back; into run.q.
extern "C" __global__ void join8(const Run run, const Layer layer, int row0) {
    enum { AHEAD = 8 };
    extern __shared__ __align__(16) float out[];
    const int row = row0 + blockIdx.x, head = blockIdx.y, dim = run.head_dim, c = threadIdx.x * 4;
    const bool is_row = row < *run.n_rows;
    const View view = view_of(run, layer, row);
    const int n = (view.n_raw + view.n_entries + KEYS8 - 1) / KEYS8;
    const long long part = (long long)blockIdx.x * run.n_splits * run.n_heads + head;
    Joined joined = {layer.vec[V_SINKS][head], 1.0f, 0.0f, 0.0f};
    float4 sum = make_float4(0, 0, 0, 0);
    follow();
    if (!is_row) return;
    for (int s0 = 0; s0 < n; s0 += AHEAD) {
        float2 ml[AHEAD];
        float4 o[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const long long p = part + (long long)min(s0 + i, n - 1) * run.n_heads;
            ml[i] = *(const float2 *)(run.part_ml + p * 2);
            o[i] = *(const float4 *)(run.part_o + p * dim + min(c, dim - 4));
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const bool is_block = s0 + i < n;  // selects, not branches, so that all loads go out together
            joined.add(is_block ? ml[i].x : -INFINITY, ml[i].y);
            const float before = joined.before, block = joined.block;
            sum.x = is_block ? fmaf(o[i].x, block, sum.x * before) : sum.x;
            sum.y = is_block ? fmaf(o[i].y, block, sum.y * before) : sum.y;
            sum.z = is_block ? fmaf(o[i].z, block, sum.z * before) : sum.z;
            sum.w = is_block ? fmaf(o[i].w, block, sum.w * before) : sum.w;
        }
    }
    if (c < dim) {
        const float total = joined.total;
        *(float4 *)(out + c) = make_float4(sum.x / total, sum.y / total, sum.z / total, sum.w / total);
    }
    __syncthreads();
    if (threadIdx.x < 64) store_output(run, layer, row, head, out, threadIdx.x * 8);
}

// grid (rows, groups of 32 heads), block 256, shared: 2 x 32 staged keys, 8 parts of the scores. Everything of a row's
// heads; keys are staged a block ahead.
extern "C" __global__ void __launch_bounds__(256, 1) attend8_all(const Run run, const Layer layer, int row0) {
    enum { MT = 2, HEADS = MT * 16 };
    extern __shared__ __align__(16) float keys[];
    __shared__ float2 factor[HEADS];  // of what was before, of the block
    const int row = row0 + blockIdx.x, h0 = blockIdx.y * HEADS, dim = run.head_dim;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, words = row_words(run);
    const bool is_row = row < *run.n_rows;
    const View view = view_of(run, layer, row);
    const int n = view.n_raw + view.n_entries;
    float *parts = keys + 2 * KEYS8 * words;
    follow();
    if (!is_row) return;
    stage_keys(run, find_key(run, layer, view, 0), keys);
    const uint8_t *next = find_key(run, layer, view, KEYS8);
    uint32_t q[MT][2][8 * CHUNKS];
    load_queries<MT>(run, layer, row, h0, parts, q);
    Joined joined[2 * MT];
#pragma unroll
    for (int i = 0; i < 2 * MT; i++)
        joined[i] = {layer.vec[V_SINKS][min(h0 + warp * 2 * MT + i, run.n_heads - 1)], 1.0f, 0.0f, 0.0f};
    float sum[CHUNKS][MT][4][4] = {};
    for (int first = 0; first < n; first += KEYS8) {
        float *now = keys + first / KEYS8 % 2 * KEYS8 * words;
        copy_wait<0>();
        __syncthreads();  // the other half was read before this
        if (first + KEYS8 < n) stage_keys(run, next, keys + (1 - first / KEYS8 % 2) * KEYS8 * words);
        next = find_key(run, layer, view, first + 2 * KEYS8);
        add_scores<MT>(run, now, parts, q);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) {
            const float2 found = block_weights<MT>(run, parts, warp * 2 * MT + i, n - first);
            joined[i].add(found.x, found.y);
            if (lane == 0) factor[warp * 2 * MT + i] = make_float2(joined[i].before, joined[i].block);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int c = (warp * CHUNKS + i) * CHUNK;
            if (c >= dim) break;
            float out[MT][4][4];
            weigh_values<MT>(now, words, parts, c, out);
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const float2 f = factor[m * 16 + r / 2 * 8 + g];
#pragma unroll
                    for (int j = 0; j < 4; j++) sum[i][m][j][r] = fmaf(out[m][j][r], f.y, sum[i][m][j][r] * f.x);
                }
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * MT; i++)
        if (lane == 0) factor[warp * 2 * MT + i].x = joined[i].total;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int h = m * 16 + r / 2 * 8 + g, k = (warp * CHUNKS + i) * CHUNK + r % 2 * 16 + 4 * t;
                const float4 v = four_channels(sum[i][m], r);
                const float total = factor[h].x;
                if (k < dim) *(float4 *)(keys + h * words + k) = make_float4(v.x / total, v.y / total, v.z / total, v.w / total);
            }
    __syncthreads();
    for (int h = warp; h < HEADS && h0 + h < run.n_heads; h += WARPS8)
        for (int c = lane * 8; c - lane * 8 < dim; c += 256) store_output(run, layer, row, h0 + h, keys + h * words, c);
}
