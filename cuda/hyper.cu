// Hyper-connections: mixing the streams into a sub-layer's input and its output back into them; embedding; output head.
#include "matmul.cuh"

// grid (rows, parts of hidden), block 256. A row's embedding into every stream, and the rotation of its position.
extern "C" __global__ void start_rows(const Run run, int row0) {
    __shared__ float room[8];
    const int row = row0 + blockIdx.x, n_pairs = run.rope_dim / 2, k = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *run.n_rows) return;
    float squares = 0.0f;
    if (k < run.hidden) {
        const float v = decode1(run.embedding, run.tokens[row], k, run.grid);
        for (int i = 0; i < run.n_streams; i++) run.streams[((long long)row * run.n_streams + i) * run.hidden + k] = v;
        squares = v * v * (float)run.n_streams;
    }
    squares = block_sum(squares, room);
    if (threadIdx.x == 0) run.squares[row * parts_of(run) + blockIdx.y] = squares;
    for (int i = threadIdx.x; i < 2 * n_pairs && blockIdx.y == 0; i += blockDim.x) {
        const int kind = i / n_pairs, pair = i % n_pairs;
        const double angle = (double)run.pos[row] * run.freq[kind][pair];
        const long long at = ((long long)kind * run.max_rows + row) * n_pairs + pair;
        run.cosines[at] = (float)cos(angle);
        run.sines[at] = (float)sin(angle);
    }
}

__device__ __forceinline__ float inverse_rms(float squares, int n, float eps) { return 1.0f / sqrtf(squares / (float)n + eps); }

// The norm of a row's streams before `fn`, applied to fn's result; the sums of squares lie ready. Whole warps.
__device__ __forceinline__ float streams_norm(const Run &run, int row) {
    float total = 0.0f;
    for (int i = threadIdx.x % 32; i < parts_of(run); i += 32) total += run.squares[row * parts_of(run) + i];
    return inverse_rms(warp_sum(total), run.n_streams * run.hidden, run.rms_eps);
}

// x = sum of weighted streams; xn = rms(x) * norm, with its int8 twin. Eight channels per thread.
__device__ __forceinline__ void mix(const Run &run, const float *streams, const float *weight, const float *norm, float *x,
                                    float *xn, const Quant &q, long long row, float *room) {
    float squares = 0.0f;
    for (int k = threadIdx.x * 8; k < run.hidden; k += blockDim.x * 8) {
        float sum[8], v[8];
        load8(streams, k, run.hidden, v);
        for (int i = 0; i < 8; i++) sum[i] = weight[0] * v[i];
        for (int j = 1; j < run.n_streams; j++) {
            load8(streams + (long long)j * run.hidden, k, run.hidden, v);
            for (int i = 0; i < 8; i++) sum[i] = fmaf(weight[j], v[i], sum[i]);
        }
        for (int i = 0; i < 8 && k + i < run.hidden; i++) {
            x[k + i] = sum[i];
            squares = fmaf(sum[i], sum[i], squares);
        }
    }
    const float inverse = inverse_rms(block_sum(squares, room), run.hidden, run.rms_eps);
    for (int k0 = 0; k0 < run.hidden; k0 += blockDim.x * 8) {
        const int k = k0 + threadIdx.x * 8;
        float v[8] = {}, w[8];
        if (k < run.hidden) {
            load8(x, k, run.hidden, v);
            load8(norm, k, run.hidden, w);
            for (int i = 0; i < 8; i++) v[i] = v[i] * inverse * w[i];
            for (int i = 0; i < 8 && k + i < run.hidden; i++) xn[k + i] = v[i];
        }
        if (run.int8) quantize8(v, q, row, k, run.hidden, k < run.hidden && run.hidden % 32 == 0);
    }
}

// grid rows, block 512. z = fn @ streams -> coefficients; x, xn. is_ffn: which of the layer's two sub-layers.
extern "C" __global__ void __launch_bounds__(512) mix_streams(const Run run, const Layer layer, int row0, int is_ffn) {
    __shared__ float room[16], pre[8];
    const int row = row0 + blockIdx.x, n = run.n_streams, n_z = (2 + n) * n;
    if (row >= *run.n_rows) return;
    const float *streams = run.streams + (long long)row * n * run.hidden;
    const float *scale = layer.vec[is_ffn ? V_HC_FFN_SCALE : V_HC_ATTN_SCALE];
    const float *base = layer.vec[is_ffn ? V_HC_FFN_BASE : V_HC_ATTN_BASE];
    if (threadIdx.x < 32) {  // one entry of C per lane; n * n <= 32
        const float *z = run.z + (long long)row * n_z;
        float *coef = run.coef + (long long)row * n_z;
        const float inverse = streams_norm(run, row);
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
            float total = c;
            if (n == 4) {
                const int step = half % 2 ? 1 : 4;
                total += __shfl_xor_sync(FULL, total, step);
                total += __shfl_xor_sync(FULL, total, 2 * step);
            } else {
                total = 0.0f;
                for (int m = 0; m < n; m++) total += __shfl_sync(FULL, c, half % 2 ? i * n + m : m * n + j);
            }
            c = __fdividef(c, total + run.hc_eps);
        }
        if (lane < n * n) coef[2 * n + lane] = c;
    }
    __syncthreads();
    mix(run, streams, pre, layer.vec[is_ffn ? V_FFN_NORM : V_ATTN_NORM], run.x + (long long)row * run.hidden,
        run.xn + (long long)row * run.hidden, run.xn_q, row, room);
}

// grid (rows, parts of hidden), block 256. The attention's output goes into the streams.
extern "C" __global__ void update_streams(const Run run, int row0) {
    __shared__ float room[8];
    const int row = row0 + blockIdx.x, k = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *run.n_rows) return;
    update_channel(run, row, k, k < run.hidden ? run.y[(long long)row * run.hidden + k] : 0.0f, room);
}

// grid logit rows, block 512. The same for the output head: logit row j -> x[j], xn[j].
extern "C" __global__ void __launch_bounds__(512) mix_head(const Run run, int j0) {
    __shared__ float room[16], weight[8];
    const int j = j0 + blockIdx.x, n = run.n_streams;
    if (j >= *run.n_logit_rows) return;
    const float *streams = run.streams + (long long)run.logit_rows[j] * n * run.hidden;
    const float inverse = streams_norm(run, run.logit_rows[j]);
    if (threadIdx.x < n)
        weight[threadIdx.x] = sigmoid(run.z[(long long)j * n + threadIdx.x] * inverse * run.output_hc_scale[0] +
                                      run.output_hc_base[threadIdx.x]) + run.hc_eps;
    __syncthreads();
    mix(run, streams, weight, run.output_norm, run.x + (long long)j * run.hidden, run.xn + (long long)j * run.hidden, run.xn_q, j, room);
}
