// What a row adds to the cache, in one launch: its latent row and, where it ends a window of a compressor, the entry made
// of that window. And qr, which the row's queries are made of.
//
// A compressor turns r consecutive tokens into one entry by a softmax over the tokens, for every channel alone. Rows of
// this step lie in the step buffers as the products left them: ape is added to their gates by whoever reads them, here
// and in publish.cu. Rows in a slab's ring have it.
#include "matmul.cuh"
#include "rehearse.cuh"

enum { SLICES = 4, CHUNK = 2 };  // slices of a window's rows, for threads of the same channels; rows a thread loads at a time
enum Role { QUERY_INPUT, LATENT, ENTRY, INDEX_KEY };

__device__ __forceinline__ void load8_or_zero(const float *x, int k, int n, float *v) {
    if (k < n) return load8(x, k, n, v);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = 0.0f;
}

__device__ __forceinline__ void fresh8_or_zero(const float *x, int k, int n, float *v) {
    if (k < n) return fresh8(x, k, n, v);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = 0.0f;
}

// qr: the row's low-rank query input after its norm, and its twins.
__device__ __forceinline__ void store_query_input(const Run &run, const Layer &layer, int row, float *room) {
    const int n = run.q_lora, k1 = threadIdx.x * 8, step = blockDim.x * 8, warp_k = threadIdx.x / 32 * 256;
    const float *raw = run.qr_raw + (long long)row * n, *norm = layer.vec[V_Q_A_NORM];
    float weight[8];
    load8_or_zero(norm, k1, n, weight);
    rehearse([&](bool real) {
        float v[8], squares = 0.0f;
        for (int k0 = 0; k0 < n; k0 += step) {
            fresh8_or_zero(raw, k0 + k1, n, v);
#pragma unroll
            for (int i = 0; i < 8; i++) squares = fmaf(v[i], v[i], squares);
        }
        const float inverse = 1.0f / sqrtf(block_sum(squares, room) / (float)n + run.rms_eps);
        for (int k0 = 0; k0 + warp_k < n; k0 += step) {  // whole warps, as quantize8 wants them
            const int k = k0 + k1;
            float *to = run.qr + (long long)row * n + k, w[8];
#pragma unroll
            for (int i = 0; i < 8; i++) w[i] = weight[i];
            if (n > step) fresh8_or_zero(raw, k, n, v);  // else it is still there
            if (k0) load8_or_zero(norm, k, n, w);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                v[i] = v[i] * inverse * w[i];
                if (real && k + i < n) to[i] = v[i];
            }
            if (run.int8) quantize8(v, run.qr_q, row, k, n, real && k < n && n % 32 == 0);
            if (!real) break;
        }
    });
}

// The row's keys and values after norm and rotation, to the step buffer. A thread per channel.
__device__ __forceinline__ void store_latent(const Run &run, const Layer &layer, int row, float *kv, float *room) {
    const int dim = run.head_dim, c = threadIdx.x;
    const bool is_channel = c < dim, is_pair = c < run.rope_dim / 2;
    const float weight = is_channel ? layer.vec[V_KV_NORM][c] : 0.0f;
    rehearse([&](bool real) {
        const float v = is_channel ? fresh(run.kv + (long long)row * dim + c) : 0.0f;
        const float cosine = is_pair ? fresh(cos_of(run, layer, row) + c) : 0.0f, sine = is_pair ? fresh(sin_of(run, layer, row) + c) : 0.0f;
        const float inverse = 1.0f / sqrtf(block_sum(v * v, room) / (float)dim + run.rms_eps);
        if (is_channel) kv[c] = v * inverse * weight;
        __syncthreads();
        if (is_pair) rotate_pair(kv + dim - run.rope_dim, c, cosine, sine);
        __syncthreads();
        if (run.roundings) round_latent(kv, dim, dim - run.rope_dim);
        if (real && is_channel) store_cached(run, layer.step_latent + (long long)row * dim * cache_bytes(run), c, kv[c]);
    });
}

// A session's rows of the compressor of entries or of index keys, and its weights.
struct Source {
    const float *ring, *step, *ape, *norm;  // rows of k, then of the gate; step: as if the session's rows began at position 0
    int in_step, slots, dim, width;         // positions from in_step on are in the step buffer
    __device__ __forceinline__ const float *row(int pos) const {
        return pos < in_step ? ring + 2LL * (pos % slots) * width : step + 2LL * pos * width;
    }
};

__device__ __forceinline__ Source source_of(const Run &run, const Layer &layer, int item, bool is_key) {
    Source s;
    s.dim = is_key ? run.index_dim : run.head_dim, s.width = is_key ? 2 * run.index_dim : layer.comp_width;
    s.in_step = run.item_pos[item], s.slots = layer.comp_ring;
    s.ring = (const float *)(slab_of(run, item) + (is_key ? layer.index_comp : layer.comp));
    s.step = (is_key ? layer.step_index_comp : layer.step_comp) + 2LL * (run.item_row[item] - s.in_step) * s.width;
    s.ape = layer.vec[is_key ? V_IX_COMP_APE : V_COMP_APE], s.norm = layer.vec[is_key ? V_IX_COMP_NORM : V_COMP_NORM];
    return s;
}

// CSA takes the first halves of the window before and the second halves of this one.
template <int RATIO> struct Window {
    static constexpr int ROWS = RATIO == CSA ? 2 * CSA : RATIO;
    static __device__ __forceinline__ int first(int w) { return RATIO * (w + 1) - ROWS; }  // negative: there is none before
    static __device__ __forceinline__ int channel(int w, int pos, int dim) { return RATIO == CSA && pos >= RATIO * w ? dim : 0; }
};

// Brings the older rows of entry w, and ape for the others, near while the kernel before this one ends.
template <int RATIO> __device__ __forceinline__ void prefetch(const Source &from, int w) {
    const int lines = (from.dim + 31) / 32;
    for (int i = threadIdx.x; i < 2 * lines * Window<RATIO>::ROWS; i += blockDim.x) {
        const int pos = Window<RATIO>::first(w) + i / (2 * lines), is_gate = i / lines % 2;
        const int at = Window<RATIO>::channel(w, pos, from.dim) + i % lines * 32;
        if (pos < 0) continue;
        if (pos < from.in_step) prefetch_l2(from.row(pos) + is_gate * from.width + at);
        else if (is_gate) prefetch_l2(from.ape + pos % RATIO * from.width + at);
    }
}

// Four channels of a slice of entry w's rows: the largest gate, the sum of the weights exp(gate - largest), the weighted
// sum of k.
template <int RATIO>
__device__ __forceinline__ void weigh(const Source &from, int w, int slice, int c, float *top, float *total, float *sum) {
    constexpr int PER_SLICE = Window<RATIO>::ROWS / SLICES;
    const int begin = Window<RATIO>::first(w) + slice * PER_SLICE;
#pragma unroll
    for (int j = 0; j < 4; j++) top[j] = -INFINITY, total[j] = sum[j] = 0.0f;
    if (begin < 0) return;
    for (int first = begin; first < begin + PER_SLICE; first += CHUNK) {
        float k[CHUNK][4], gate[CHUNK][4], more[CHUNK][4];
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            const int pos = first + i, at = c + Window<RATIO>::channel(w, pos, from.dim);
            const float *row = from.row(pos) + at, *ape = from.ape + pos % RATIO * from.width + at;
            const float4 a = fresh((const float4 *)row), b = fresh((const float4 *)(row + from.width));
            const float4 d = pos < from.in_step ? make_float4(0, 0, 0, 0) : *(const float4 *)ape;
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

// A channel of entry w: the softmax over the window, by slices that are joined in order. `slices`: 3 x SLICES x dim floats.
template <int RATIO> __device__ __forceinline__ float compress(const Source &from, int w, float *slices) {
    const int dim = from.dim, quads = dim / 4, channel = threadIdx.x;
    for (int i = threadIdx.x; i < SLICES * quads; i += blockDim.x) {
        const int slice = i / quads, c = i % quads * 4;
        float v[3][4];
        weigh<RATIO>(from, w, slice, c, v[0], v[1], v[2]);
#pragma unroll
        for (int a = 0; a < 3; a++)
            *(float4 *)(slices + (a * SLICES + slice) * dim + c) = make_float4(v[a][0], v[a][1], v[a][2], v[a][3]);
    }
    __syncthreads();
    if (channel >= dim) return 0.0f;
    const float *mine = slices + channel;
    float top = mine[0], total = 0.0f, sum = 0.0f;
#pragma unroll
    for (int s = 1; s < SLICES; s++) top = fmaxf(top, mine[s * dim]);
#pragma unroll
    for (int s = 0; s < SLICES; s++) {
        const float scale = expf(mine[s * dim] - top);
        total = fmaf(mine[(SLICES + s) * dim], scale, total);
        sum = fmaf(mine[(2 * SLICES + s) * dim], scale, sum);
    }
    return sum / total;
}

// A row that ends a window computes its entry or index key and writes it into its page slot. A thread per channel.
template <int RATIO>
__device__ __forceinline__ void complete_entry(const Run &run, const Layer &layer, int row, bool is_key, float *entry,
                                               float *room) {
    const int last = run.pos[row], item = run.row_item[row], w = last / RATIO, c = threadIdx.x;
    if ((last + 1) % RATIO) return follow();
    const Source from = source_of(run, layer, item, is_key);
    const int dim = from.dim;
    const bool is_channel = c < dim, is_pair = c < run.rope_dim / 2;
    prefetch<RATIO>(from, w);
    const float weight = is_channel ? from.norm[c] : 0.0f;
    uint8_t *to = entry_slot(run, layer, item, w, is_key ? layer.index_keys : layer.entries, dim);
    const double angle = is_pair ? (double)(RATIO * w) * run.freq[1][c] : 0.0;  // the window's first position
    const float cosine = (float)cos(angle), sine = (float)sin(angle);
    rehearse([&](bool real) {
        const float v = compress<RATIO>(from, w, entry + dim);
        const float inverse = 1.0f / sqrtf(block_sum(v * v, room) / (float)dim + run.rms_eps);
        if (is_channel) entry[c] = v * inverse * weight;
        __syncthreads();
        if (is_pair) rotate_pair(entry + dim - run.rope_dim, c, cosine, sine);
        __syncthreads();
        if (run.roundings && !is_key) round_latent(entry, dim, dim - run.rope_dim);
        if (run.roundings && is_key) {
            round_index(entry, dim);
            if (is_channel) entry[c] = __half2float(__float2half_rn(entry[c]));
        }
        if (real && is_channel) store_cached(run, to, c, entry[c]);
    });
}

// grid (rows, roles the layer has), block 512, shared: head_dim floats; in layers with a compressor (1 + 3 x SLICES) x the
// larger of head_dim and index_dim, which are 512 at most.
extern "C" __global__ void __launch_bounds__(512, 2) store_rows(const Run run, const Layer layer, int row0) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float room[16];
    const int row = row0 + blockIdx.x;
    if (row >= *run.n_rows) return follow();
    if (blockIdx.y == QUERY_INPUT) return store_query_input(run, layer, row, room);
    if (blockIdx.y == LATENT) return store_latent(run, layer, row, shared, room);
    if (layer.ratio == CSA) return complete_entry<CSA>(run, layer, row, blockIdx.y == INDEX_KEY, shared, room);
    complete_entry<HCA>(run, layer, row, false, shared, room);
}
