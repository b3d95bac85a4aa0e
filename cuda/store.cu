// What a row adds to the cache, in one launch: its latent row and, where it ends a window of a compressor, the entry made
// of that window. And qr, which the row's queries are made of.
//
// A compressor turns r consecutive tokens into one entry by a softmax over the tokens, for every channel alone. Rows of
// this step lie in the step buffers as the products left them: ape is added to their gates by whoever reads them, here
// and in publish.cu. Rows in a slab's ring have it.
#include "matmul.cuh"

enum { SLICES = 4 };  // of a window's rows, for threads that work on the same channels
enum Role { QUERY_INPUT, LATENT, ENTRY, INDEX_KEY };

__device__ __forceinline__ void load8_or_zero(const float *x, int k, int n, float *v) {
    if (k < n) return load8(x, k, n, v);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = 0.0f;
}

// qr: the row's low-rank query input after its norm, and its twins.
__device__ __forceinline__ void store_query_input(const Run &run, const Layer &layer, int row, float *room) {
    const int n = run.q_lora, k1 = threadIdx.x * 8, step = blockDim.x * 8, warp_k = threadIdx.x / 32 * 256;
    const float *raw = run.qr_raw + (long long)row * n, *norm = layer.vec[V_Q_A_NORM];
    float weight[8], v[8], squares = 0.0f;
    load8_or_zero(norm, k1, n, weight);
    follow();
    for (int k0 = 0; k0 < n; k0 += step) {
        load8_or_zero(raw, k0 + k1, n, v);
#pragma unroll
        for (int i = 0; i < 8; i++) squares = fmaf(v[i], v[i], squares);
    }
    const float inverse = 1.0f / sqrtf(block_sum(squares, room) / (float)n + run.rms_eps);
    for (int k0 = 0; k0 + warp_k < n; k0 += step) {  // whole warps, as quantize8 wants them
        const int k = k0 + k1;
        float *to = run.qr + (long long)row * n + k;
        load8_or_zero(raw, k, n, v);
        if (k0) load8_or_zero(norm, k, n, weight);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = v[i] * inverse * weight[i];
            if (k + i < n) to[i] = v[i];
        }
        if (run.int8) quantize8(v, run.qr_q, row, k, n, k < n && n % 32 == 0);
    }
}

// The row's keys and values after norm and rotation, to the step buffer.
__device__ __forceinline__ void store_latent(const Run &run, const Layer &layer, int row, float *kv, float *room) {
    const int dim = run.head_dim, n_pairs = run.rope_dim / 2, c1 = threadIdx.x;
    const float *raw = run.kv + (long long)row * dim, *norm = layer.vec[V_KV_NORM];
    const float weight = c1 < dim ? norm[c1] : 0.0f;
    follow();
    float squares = 0.0f;
    for (int c = c1; c < dim; c += blockDim.x) squares = fmaf(raw[c], raw[c], squares);
    const float inverse = 1.0f / sqrtf(block_sum(squares, room) / (float)dim + run.rms_eps);
    for (int c = c1; c < dim; c += blockDim.x) kv[c] = raw[c] * inverse * (c == c1 ? weight : norm[c]);
    __syncthreads();
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x)
        rotate_pair(kv + dim - run.rope_dim, i, cos_of(run, layer, row)[i], sin_of(run, layer, row)[i]);
    __syncthreads();
    if (run.roundings) round_latent(kv, dim, dim - run.rope_dim);
    uint8_t *to = layer.step_latent + (long long)row * dim * cache_bytes(run);
    for (int c = c1; c < dim; c += blockDim.x) store_cached(run, to, c, kv[c]);
}

// Four channels of a slice of entry w's rows: the largest gate, the sum of the weights exp(gate - largest), the weighted
// sum of k. CSA takes the first halves of the window before and the second halves of this one.
template <int RATIO>
__device__ __forceinline__ void weigh(const Run &run, const Layer &layer, int item, int w, int slice, bool is_key, int c,
                                      float *top, float *total, float *sum) {
    constexpr int ROWS = RATIO == CSA ? 2 * CSA : RATIO, PER_SLICE = ROWS / SLICES, CHUNK = PER_SLICE < 4 ? PER_SLICE : 4;
    const int dim = is_key ? run.index_dim : run.head_dim, width = is_key ? 2 * run.index_dim : layer.comp_width;
    const int begin = RATIO * (w + 1) - ROWS + slice * PER_SLICE, in_step = run.item_pos[item];
    const float *ape = layer.vec[is_key ? V_IX_COMP_APE : V_COMP_APE];
#pragma unroll
    for (int j = 0; j < 4; j++) top[j] = -INFINITY, total[j] = sum[j] = 0.0f;
    if (begin < 0) return;  // the first window has none before it
    for (int first = begin; first < begin + PER_SLICE; first += CHUNK) {
        float k[CHUNK][4], gate[CHUNK][4], more[CHUNK][4];
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            const int pos = first + i, at = c + (RATIO == CSA && pos >= RATIO * w ? dim : 0);
            const float *row = (is_key ? index_comp_at(run, layer, item, pos) : comp_at(run, layer, item, pos)) + at;
            const float4 a = *(const float4 *)row, b = *(const float4 *)(row + width);
            const float4 d = pos < in_step ? make_float4(0, 0, 0, 0) : *(const float4 *)(ape + pos % RATIO * width + at);
            k[i][0] = a.x, k[i][1] = a.y, k[i][2] = a.z, k[i][3] = a.w;
            gate[i][0] = b.x, gate[i][1] = b.y, gate[i][2] = b.z, gate[i][3] = b.w;
            more[i][0] = d.x, more[i][1] = d.y, more[i][2] = d.z, more[i][3] = d.w;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float most = top[j];
#pragma unroll
            for (int i = 0; i < CHUNK; i++) most = fmaxf(most, gate[i][j] += more[i][j]);
            const float scale = expf(top[j] - most);
            total[j] *= scale, sum[j] *= scale, top[j] = most;
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                const float weight = expf(gate[i][j] - most);
                total[j] += weight;
                sum[j] = fmaf(weight, k[i][j], sum[j]);
            }
        }
    }
}

// entry[dim]: the softmax over the window, by slices that are joined in order. `slices` holds 3 x SLICES x dim floats.
__device__ __forceinline__ void compress(const Run &run, const Layer &layer, int item, int w, bool is_key, float *slices, float *entry) {
    const int dim = is_key ? run.index_dim : run.head_dim, quads = dim / 4;
    for (int i = threadIdx.x; i < SLICES * quads; i += blockDim.x) {
        const int slice = i / quads, c = i % quads * 4;
        float v[3][4];
        if (layer.ratio == CSA)
            weigh<CSA>(run, layer, item, w, slice, is_key, c, v[0], v[1], v[2]);
        else
            weigh<HCA>(run, layer, item, w, slice, is_key, c, v[0], v[1], v[2]);
#pragma unroll
        for (int a = 0; a < 3; a++)
            *(float4 *)(slices + (a * SLICES + slice) * dim + c) = make_float4(v[a][0], v[a][1], v[a][2], v[a][3]);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < dim; c += blockDim.x) {
        float top = slices[c], total = 0.0f, sum = 0.0f;
        for (int s = 1; s < SLICES; s++) top = fmaxf(top, slices[s * dim + c]);
        for (int s = 0; s < SLICES; s++) {
            const float scale = expf(slices[s * dim + c] - top);
            total = fmaf(slices[(SLICES + s) * dim + c], scale, total);
            sum = fmaf(slices[(2 * SLICES + s) * dim + c], scale, sum);
        }
        entry[c] = sum / total;
    }
}

// A row that ends a window computes its entry or index key and writes it into its page slot.
__device__ __forceinline__ void complete_entry(const Run &run, const Layer &layer, int row, bool is_key, float *entry, float *room) {
    const int last = run.pos[row], item = run.row_item[row], ratio = layer.ratio, w = last / ratio;
    if ((last + 1) % ratio) return follow();
    const int dim = is_key ? run.index_dim : run.head_dim, n_pairs = run.rope_dim / 2, c1 = threadIdx.x;
    const float *norm = layer.vec[is_key ? V_IX_COMP_NORM : V_COMP_NORM];
    const float weight = c1 < dim ? norm[c1] : 0.0f;
    float *slices = entry + dim, *turn = slices + 3 * SLICES * dim, squares = 0.0f;
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x) {  // the window's first position
        const double angle = (double)(ratio * w) * run.freq[1][i];
        turn[2 * i] = (float)cos(angle), turn[2 * i + 1] = (float)sin(angle);
    }
    uint8_t *to = entry_slot(run, layer, item, w, is_key ? layer.index_keys : layer.entries, dim);
    follow();
    compress(run, layer, item, w, is_key, slices, entry);
    for (int c = c1; c < dim; c += blockDim.x) squares = fmaf(entry[c], entry[c], squares);
    const float inverse = 1.0f / sqrtf(block_sum(squares, room) / (float)dim + run.rms_eps);
    for (int c = c1; c < dim; c += blockDim.x) entry[c] = entry[c] * inverse * (c == c1 ? weight : norm[c]);
    __syncthreads();
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x)
        rotate_pair(entry + dim - run.rope_dim, i, turn[2 * i], turn[2 * i + 1]);
    __syncthreads();
    if (run.roundings && !is_key) round_latent(entry, dim, dim - run.rope_dim);
    if (run.roundings && is_key) {
        round_index(entry, dim);
        for (int c = c1; c < dim; c += blockDim.x) entry[c] = __half2float(__float2half_rn(entry[c]));
        __syncthreads();
    }
    for (int c = c1; c < dim; c += blockDim.x) store_cached(run, to, c, entry[c]);
}

// grid (rows, roles the layer has), block 512, shared: head_dim floats; in layers with a compressor (1 + 3 x SLICES) x the
// larger of head_dim and index_dim, and rope_dim.
extern "C" __global__ void __launch_bounds__(512) store_rows(const Run run, const Layer layer, int row0) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float room[16];
    const int row = row0 + blockIdx.x;
    if (row >= *run.n_rows) return follow();
    if (blockIdx.y == QUERY_INPUT) return store_query_input(run, layer, row, room);
    if (blockIdx.y == LATENT) return store_latent(run, layer, row, shared, room);
    complete_entry(run, layer, row, blockIdx.y == INDEX_KEY, shared, room);
}
