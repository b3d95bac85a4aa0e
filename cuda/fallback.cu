// The reference path: matrix products, index scores and attention of one row in plain loops, one weight at a time.
//
// Products that have a tensor-core kernel run that kernel on one row instead (reference.py), whose sums no plain loop
// gives. The rest shares with the fast kernels the cache addresses, the small per-row operations (norms, rotation, routing) and the
// order of every sum, so that both must give the same bits; tiles, planes, key blocks in parallel and experts grouped
// by row are what it does without.
#include "matmul.cuh"

// The dot product as matmul.cuh defines it, by one warp.
__device__ inline float dot(const Run &run, const Mat &m, long long row, const float *x, int segment) {
    float total = 0.0f;
    for (int first = 0; first < m.n_in; first += segment) {
        const int end = min(first + segment, m.n_in);
        float acc = 0.0f;
        for (int k = first + threadIdx.x % 32 * 8; k < end; k += 256)
            for (int i = k; i < k + 8 && i < end; i++) acc = fmaf(decode1(m, row, i, run.grid), x[i], acc);
        acc = warp_sum(acc);
        total = first ? total + acc : acc;
    }
    return total;
}

// grid outputs, block 32. Job `i` of a launch, for row x_row of its input into row y_row of its output.
extern "C" __global__ void product_simple(const Run run, const Jobs jobs, int i, int x_row, int y_row) {
    follow();
    const Job &job = jobs.job[i];
    const float v = dot(run, job.mat, job.first_row + blockIdx.x, job.x + (long long)x_row * job.x_stride, jobs.segment);
    if (threadIdx.x == 0) job.y[(long long)y_row * job.y_stride + blockIdx.x] = v;
}

// grid ffn_width, block 32. Slot n_used is the shared expert.
extern "C" __global__ void gate_up_simple(const Run run, const Layer layer, int row, int slot, int segment) {
    follow();
    const bool shared = slot == run.n_used;
    const float *x = run.xn + (long long)row * run.hidden;
    const long long pair = shared ? (long long)run.max_rows * run.n_used + row : row * run.n_used + slot;
    const long long at = shared ? blockIdx.x : (long long)run.route[row * run.n_used + slot] * run.ffn_width + blockIdx.x;
    const float gate = dot(run, layer.mat[shared ? M_GATE_SH : M_GATE_EXPS], at, x, segment);
    const float up = dot(run, layer.mat[shared ? M_UP_SH : M_UP_EXPS], at, x, segment);
    if (threadIdx.x == 0) run.act[pair * run.ffn_width + blockIdx.x] = swiglu(gate, up, layer.clamp);
}

// grid hidden, block 32.
extern "C" __global__ void down_simple(const Run run, const Layer layer, int row, int slot, int segment) {
    follow();
    const bool shared = slot == run.n_used;
    const long long pair = shared ? (long long)run.max_rows * run.n_used + row : row * run.n_used + slot;
    const long long at = shared ? blockIdx.x : (long long)run.route[row * run.n_used + slot] * run.hidden + blockIdx.x;
    const float v = dot(run, layer.mat[shared ? M_DOWN_SH : M_DOWN_EXPS], at, run.act + pair * run.ffn_width, segment);
    if (threadIdx.x == 0) run.expert_out[pair * run.hidden + blockIdx.x] = v;
}

// One thread per entry.
extern "C" __global__ void score_simple(const Run run, const Layer layer, int row) {
    follow();
    const int w = blockIdx.x * blockDim.x + threadIdx.x, dim = run.index_dim, visible = (run.pos[row] + 1) / CSA;
    if (visible <= run.top_k || w >= visible) return;
    const uint8_t *key = entry_slot(run, layer, run.row_item[row], w, layer.index_keys, dim);
    float total = 0.0f;
    for (int h0 = 0; h0 < run.index_heads; h0 += 16) {
        float sum = 0.0f;
        for (int h = h0; h < h0 + 16 && h < run.index_heads; h++) {
            const float *q = run.iq + ((long long)row * run.index_heads + h) * dim;
            float product = 0.0f;
            for (int d = 0; d < dim; d++) product = fmaf(q[d], load_cached(run, key, d), product);
            sum = fmaf(run.ia[(long long)row * run.index_heads + h], fmaxf(product, 0.0f), sum);
        }
        total = h0 ? total + sum : sum;
    }
    run.scores[(long long)row * run.max_entries + w] = total;
}

// grid heads, block 128. Queries in run.q become attention output in place. Scores lie in part_o, which has room for
// them: a head's share of it is n_splits * head_dim floats.
extern "C" __global__ void attend_simple(const Run run, const Layer layer, int row) {
    follow();
    enum { KEYS = 64 };
    const int head = blockIdx.x, dim = run.head_dim, n_pairs = run.rope_dim / 2, lane = threadIdx.x % 32;
    extern __shared__ __align__(16) float out[];
    const View view = view_of(run, layer, row);
    const int n = view.n_raw + view.n_entries;
    const float sink = layer.vec[V_SINKS][head];
    float *q = run.q + ((long long)row * run.n_heads + head) * dim;
    float *score = run.part_o + (long long)head * run.n_splits * KEYS;
    for (int t = threadIdx.x / 32; t < n; t += blockDim.x / 32) {
        const uint8_t *key = visible_at(run, layer, view, t);
        float s = 0.0f;
        for (int k0 = lane * 4; k0 < dim; k0 += 128)
            for (int k = k0; k < k0 + 4 && k < dim; k++) s = fmaf(q[k], load_cached(run, key, k), s);
        s = warp_sum(s);
        if (lane == 0) score[t] = s * run.attn_scale;
    }
    __syncthreads();
    float top = sink, total = 0.0f;
    for (int t = 0; t < n; t++) top = fmaxf(top, score[t]);
    for (int first = 0; first < n; first += KEYS) {
        const int end = min(first + KEYS, n);
        float block_top = -INFINITY, sum = 0.0f;
        for (int t = first; t < end; t++) block_top = fmaxf(block_top, score[t]);
        for (int t = first + lane; t < end; t += 32) sum += expf(score[t] - block_top);
        total = fmaf(warp_sum(sum), expf(block_top - top), total);
    }
    total += expf(sink - top);
    for (int c = threadIdx.x; c < dim; c += blockDim.x) {
        float acc = 0.0f;
        for (int first = 0; first < n; first += KEYS) {
            const int end = min(first + KEYS, n);
            float block_top = -INFINITY, sum = 0.0f;
            for (int t = first; t < end; t++) block_top = fmaxf(block_top, score[t]);
            for (int t = first; t < end; t++)
                sum = fmaf(expf(score[t] - block_top), load_cached(run, visible_at(run, layer, view, t), c), sum);
            acc = fmaf(sum, expf(block_top - top), acc);
        }
        out[c] = acc / total;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x)
        rotate_pair(out + dim - run.rope_dim, i, cos_of(run, layer, row)[i], -sin_of(run, layer, row)[i]);
    __syncthreads();
    for (int c = threadIdx.x; c < dim; c += blockDim.x) q[c] = out[c];
}
