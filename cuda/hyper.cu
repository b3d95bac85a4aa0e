// Hyper-connections: mixing the streams into a sub-layer's input and its output back into them; embedding; output head.
#include "decode.cuh"

// grid rows, block 256. A row's embedding into every stream, and the rotation of its position.
extern "C" __global__ void start_rows(const Run run, int row0) {
    const int row = row0 + blockIdx.x, n_pairs = run.rope_dim / 2;
    if (row >= *run.n_rows) return;
    float *streams = run.streams + (long long)row * run.n_streams * run.hidden;
    for (int k = threadIdx.x; k < run.hidden; k += blockDim.x) {
        const float v = decode1(run.embedding, run.tokens[row], k, run.grid);
        for (int i = 0; i < run.n_streams; i++) streams[(long long)i * run.hidden + k] = v;
    }
    for (int i = threadIdx.x; i < 2 * n_pairs; i += blockDim.x) {
        const int kind = i / n_pairs, pair = i % n_pairs;
        const double angle = (double)run.pos[row] * run.freq[kind][pair];
        const long long at = ((long long)kind * run.max_rows + row) * n_pairs + pair;
        run.cosines[at] = (float)cos(angle);
        run.sines[at] = (float)sin(angle);
    }
}

__device__ __forceinline__ float inverse_rms(float squares, int n, float eps) { return 1.0f / sqrtf(squares / (float)n + eps); }

// Sum of squares of a row's streams: the norm before `fn`, applied to fn's result.
__device__ __forceinline__ float streams_norm(const Run &run, const float *streams, float *room) {
    float squares = 0.0f;
    for (int k = threadIdx.x; k < run.n_streams * run.hidden; k += blockDim.x) squares = fmaf(streams[k], streams[k], squares);
    return inverse_rms(block_sum(squares, room), run.n_streams * run.hidden, run.rms_eps);
}

// x = sum of weighted streams; xn = rms(x) * norm.
__device__ __forceinline__ void mix(const Run &run, const float *streams, const float *weight, const float *norm, float *x,
                                    float *xn, float *room) {
    float squares = 0.0f;
    for (int k = threadIdx.x; k < run.hidden; k += blockDim.x) {
        float sum = weight[0] * streams[k];
        for (int i = 1; i < run.n_streams; i++) sum = fmaf(weight[i], streams[(long long)i * run.hidden + k], sum);
        x[k] = sum;
        squares = fmaf(sum, sum, squares);
    }
    const float inverse = inverse_rms(block_sum(squares, room), run.hidden, run.rms_eps);
    for (int k = threadIdx.x; k < run.hidden; k += blockDim.x) xn[k] = x[k] * inverse * norm[k];
}

// grid rows, block 512. z = fn @ streams -> coefficients; x, xn. is_ffn: which of the layer's two sub-layers.
extern "C" __global__ void __launch_bounds__(512) mix_streams(const Run run, const Layer layer, int row0, int is_ffn) {
    __shared__ float room[16], pre[8];
    const int row = row0 + blockIdx.x, n = run.n_streams, n_z = (2 + n) * n;
    if (row >= *run.n_rows) return;
    const float *streams = run.streams + (long long)row * n * run.hidden;
    const float *scale = layer.vec[is_ffn ? V_HC_FFN_SCALE : V_HC_ATTN_SCALE];
    const float *base = layer.vec[is_ffn ? V_HC_FFN_BASE : V_HC_ATTN_BASE];
    const float inverse = streams_norm(run, streams, room);
    if (threadIdx.x < 32) {  // one entry of C per lane; n * n <= 32
        const float *z = run.z + (long long)row * n_z;
        float *coef = run.coef + (long long)row * n_z;
        const int lane = threadIdx.x, at = lane < n * n ? lane : 0, i = at / n, j = at % n;
        if (lane < n) {
            const float p = sigmoid(z[lane] * inverse * scale[0] + base[lane]) + run.hc_eps;
            pre[lane] = coef[lane] = p;
            coef[n + lane] = 2.0f * sigmoid(z[n + lane] * inverse * scale[1] + base[n + lane]);
        }
        float c = z[2 * n + at] * inverse * scale[2] + base[2 * n + at], top = -INFINITY, sum = 0.0f;
        for (int m = 0; m < n; m++) top = fmaxf(top, __shfl_sync(FULL, c, i * n + m));
        c = expf(c - top);
        for (int m = 0; m < n; m++) sum += __shfl_sync(FULL, c, i * n + m);
        c = c / sum + run.hc_eps;
        for (int half = 0; half < 2 * run.sinkhorn_iters - 1; half++) {  // columns, then (rows, columns) again and again
            float total = 0.0f;
            for (int m = 0; m < n; m++) total += __shfl_sync(FULL, c, half % 2 ? i * n + m : m * n + j);
            c /= total + run.hc_eps;
        }
        if (lane < n * n) coef[2 * n + lane] = c;
    }
    __syncthreads();
    mix(run, streams, pre, layer.vec[is_ffn ? V_FFN_NORM : V_ATTN_NORM], run.x + (long long)row * run.hidden,
        run.xn + (long long)row * run.hidden, room);
}

// grid (rows, parts of hidden), block 256. streams[k] = post[k] y + sum_j C[j, k] streams[j].
extern "C" __global__ void update_streams(const Run run, int row0) {
    const int row = row0 + blockIdx.x, k = blockIdx.y * blockDim.x + threadIdx.x, n = run.n_streams;
    if (row >= *run.n_rows || k >= run.hidden) return;
    const float *coef = run.coef + (long long)row * (2 + n) * n, *post = coef + n, *c = coef + 2 * n;
    float *streams = run.streams + (long long)row * n * run.hidden + k, old[8];
    const float y = run.y[(long long)row * run.hidden + k];
    for (int j = 0; j < n; j++) old[j] = streams[(long long)j * run.hidden];
    for (int i = 0; i < n; i++) {
        float sum = post[i] * y;
        for (int j = 0; j < n; j++) sum = fmaf(c[j * n + i], old[j], sum);
        streams[(long long)i * run.hidden] = sum;
    }
}

// grid logit rows, block 512. The same for the output head: logit row j -> x[j], xn[j].
extern "C" __global__ void __launch_bounds__(512) mix_head(const Run run, int j0) {
    __shared__ float room[16], weight[8];
    const int j = j0 + blockIdx.x, n = run.n_streams;
    if (j >= *run.n_logit_rows) return;
    const float *streams = run.streams + (long long)run.logit_rows[j] * n * run.hidden;
    const float inverse = streams_norm(run, streams, room);
    if (threadIdx.x < n)
        weight[threadIdx.x] = sigmoid(run.z[(long long)j * n + threadIdx.x] * inverse * run.output_hc_scale[0] +
                                      run.output_hc_base[threadIdx.x]) + run.hc_eps;
    __syncthreads();
    mix(run, streams, weight, run.output_norm, run.x + (long long)j * run.hidden, run.xn + (long long)j * run.hidden, room);
}
