// Hyper-connections: the streams between two sub-layers, in two kernels.
//
//     project_*    y of the sub-layer before -> streams; for each part of 64 channels the sums that the next one needs
//     mix_*        sums of the parts -> coefficients, x = sum of weighted streams, its norm: the sub-layer's input
//
// A part's sums (`run.part_z`) are fn @ streams and the products S_i . S_j of the streams with each other. With the
// products known, |x|^2 = sum_ij pre_i pre_j (S_i . S_j) is known before x is, so that blocks may share a row without
// waiting for each other, and x is written once, normed. The weights pre are positive and the streams are mixtures of
// one another with positive coefficients (C is doubly stochastic, post positive), so they point much the same way and
// little cancels: were |x| only a tenth of sum pre_i |S_i|, 1e-7 in the products would still be 1e-5 in |x|^2.
//
// Order of every sum, a function of the model alone: lane l has the quads l, l + 32, ... of a part's inputs (stream after
// stream), lanes are a butterfly, parts are summed in runs and the runs in order. Tiles and slices change none.
//
// Weights and the step's arrays (no kernel writes them) are read ahead of follow(), so that their latency is nobody's.
#include "matmul.cuh"

enum { PART = 64, GROUP = 8, MAX_STREAMS = 5, OUTS = 3 };  // OUTS: outputs of fn per warp and turn

// N: the number of streams where it is four, the usual one, so that loops over them are straight code; else 0.
template <int N> __device__ __forceinline__ int streams_of(const Run &run) { return N ? N : run.n_streams; }

__device__ __forceinline__ int parts_of(const Run &run) { return (run.hidden + PART - 1) / PART; }
__device__ __forceinline__ int n_coefs(const Run &run) { return (2 + run.n_streams) * run.n_streams; }
__device__ __forceinline__ constexpr int pair_of(int i, int j) { return i * (i + 1) / 2 + j; }  // j <= i
__device__ __forceinline__ int values_of(const Run &run) { return n_coefs(run) + pair_of(run.n_streams, 0); }

__device__ __forceinline__ float *part_at(const Run &run, int row, int part) {
    return run.part_z + ((long long)row * parts_of(run) + part) * values_of(run);
}

// Two neighbouring channels, 0 beyond the row; rows have an even number of channels.
__device__ __forceinline__ float2 load2(const float *p, int k, int n) {
    return k < n ? *(const float2 *)(p + k) : make_float2(0.0f, 0.0f);
}

__device__ __forceinline__ float2 fma2(float a, float2 b, float2 c) { return make_float2(fmaf(a, b.x, c.x), fmaf(a, b.y, c.y)); }

// ---------------------------------------------------------------- streams

enum Before { EMBEDDING, ATTENTION, EXPERTS };  // what the streams are made from

// A sub-layer's output; that of the experts is their weighted sum in the router's order, the shared one's last.
template <int FROM> __device__ __forceinline__ float2 output_of(const Run &run, int row, int k) {
    if constexpr (FROM == ATTENTION) {
        return load2(run.y + (long long)row * run.hidden, k, run.hidden);
    } else {
        const float *out = run.expert_out + (long long)row * run.n_used * run.hidden;
        const float *shared = run.expert_out + ((long long)run.max_rows * run.n_used + row) * run.hidden;
        const int lane = threadIdx.x % 32;
        const float weight = lane < run.n_used ? run.route_weight[row * run.n_used + lane] : 0.0f;  // n_used <= 32
        const float2 last = load2(shared, k, run.hidden);
        float2 sum = make_float2(0.0f, 0.0f);
        for (int first = 0; first < run.n_used; first += 8) {  // eight loads on their way at once
            float2 v[8];
#pragma unroll
            for (int i = 0; i < 8; i++)
                v[i] = load2(out + (first + i) * run.hidden, first + i < run.n_used ? k : run.hidden, run.hidden);
#pragma unroll
            for (int i = 0; i < 8; i++) sum = fma2(__shfl_sync(FULL, weight, first + i), v[i], sum);
        }
        return make_float2(sum.x + last.x, sum.y + last.y);
    }
}

// A row's coefficients, spread over the lanes of a warp, so that they are on their way with the first of the data.
template <int N> struct Coefs {
    float low, high;
    __device__ __forceinline__ Coefs(const Run &run, int row) {
        const int lane = threadIdx.x % 32, n = n_coefs(run);
        const float *coef = run.coef + (long long)row * n;
        low = lane < n ? coef[lane] : 0.0f;
        high = N == 0 && lane + 32 < n ? coef[lane + 32] : 0.0f;
    }
    __device__ __forceinline__ float at(int i) const { return N || i < 32 ? __shfl_sync(FULL, low, i) : __shfl_sync(FULL, high, i - 32); }
};

// The streams of two channels after the sub-layer: new[i] = post[i] y + sum_j C[j, i] old[j]. At the start: n copies of
// the embedding.
template <int FROM, int N> __device__ __forceinline__ void make_streams(const Run &run, int row, int k, float2 *made) {
    enum { MOST = N ? N : MAX_STREAMS };
    const int n = streams_of<N>(run);
    float *streams = run.streams + (long long)row * n * run.hidden;
    if constexpr (FROM == EMBEDDING) {
        float2 v = {0.0f, 0.0f};
        if (k < run.hidden) {
            v.x = decode1(run.embedding, run.tokens[row], k, run.grid);
            v.y = decode1(run.embedding, run.tokens[row], k + 1, run.grid);
        }
#pragma unroll
        for (int i = 0; i < MOST; i++) made[i] = v;
    } else {
        const Coefs<N> c(run, row);
        float2 old[MOST];
#pragma unroll
        for (int j = 0; j < MOST; j++)
            if (j < n) old[j] = load2(streams + j * run.hidden, k, run.hidden);
        const float2 y = output_of<FROM>(run, row, k);
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            if (i >= n) break;
            const float post = c.at(n + i);
            made[i] = make_float2(post * y.x, post * y.y);
#pragma unroll
            for (int j = 0; j < MOST; j++)
                if (j < n) made[i] = fma2(c.at((2 + j) * n + i), old[j], made[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < MOST; i++)
        if (i < n && k < run.hidden) *(float2 *)(streams + i * run.hidden + k) = made[i];
}

// A row's part by one warp: streams to device and shared memory ([n_streams, PART], 0 beyond the row), their products
// with each other into `sums`.
template <int FROM, int N> __device__ __forceinline__ void update_part(const Run &run, int row, int part, float *held, float *sums) {
    enum { MOST = N ? N : MAX_STREAMS };
    const int n = streams_of<N>(run), lane = threadIdx.x % 32;
    float2 s[MOST];
    make_streams<FROM, N>(run, row, part * PART + 2 * lane, s);
    float product[16] = {};
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        if (i >= n) break;
        *(float2 *)(held + i * PART + 2 * lane) = s[i];
#pragma unroll
        for (int j = 0; j <= i; j++) product[pair_of(i, j)] = fmaf(s[i].y, s[j].y, s[i].x * s[j].x);
    }
    const int at = reduce<16>(product);
    if (lane % 2 == 0 && at < pair_of(n, 0)) sums[n_coefs(run) + at] = product[0];
}

// ---------------------------------------------------------------- fn @ streams

// Eight weights of fn's row `out` for a stream's channels k .. k + 7, 0 beyond the row.
template <int DT> __device__ __forceinline__ void octet_of(const Run &run, const Mat &fn, int out, int stream, int k, float *w) {
    const int at = stream * run.hidden + k;
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = 0.0f;
    if (DT == F32 || DT == F16 || DT == BF16) {
        if (k < run.hidden) decode8<DT>(fn, out, at, nullptr, w);
    } else {
        for (int i = 0; i < 8 && k + i < run.hidden; i++) w[i] = decode1(fn, out, at + i, run.grid);
    }
}

// A part's weights as floats, [n_out, n_streams, PART]; three octets of a thread at once, which is all for four streams.
template <int DT> __device__ __forceinline__ void load_weights(const Run &run, const Mat &fn, int part, float *weights) {
    const int per_out = run.n_streams * (PART / 8), n = fn.n_out * per_out;
    for (int first = threadIdx.x; first < n; first += 3 * blockDim.x) {
        float w[3][8];
#pragma unroll
        for (int q = 0; q < 3; q++) {
            const int at = min(first + q * (int)blockDim.x, n - 1), out = at / per_out, octet = at - out * per_out;
            octet_of<DT>(run, fn, out, octet / 8, part * PART + octet % 8 * 8, w[q]);
        }
#pragma unroll
        for (int q = 0; q < 3; q++) {
            float4 *to = (float4 *)(weights + 8 * min(first + q * (int)blockDim.x, n - 1));
            to[0] = make_float4(w[q][0], w[q][1], w[q][2], w[q][3]);
            to[1] = make_float4(w[q][4], w[q][5], w[q][6], w[q][7]);
        }
    }
}

// A part's sums of outputs out0 .. out0 + OUTS - 1 for NB rows, of which n count.
template <int NB, int N>
__device__ __forceinline__ void multiply_rows(const Run &run, const float *weights, const float *held, int row, int n, int part,
                                              int out0, int n_out) {
    const int lane = threadIdx.x % 32, n_inputs = streams_of<N>(run) * PART;
    float acc[OUTS][NB] = {};
#pragma unroll 1
    for (int k = 4 * lane; k < n_inputs; k += 128) {
        float4 w[OUTS];
#pragma unroll
        for (int o = 0; o < OUTS; o++) w[o] = *(const float4 *)(weights + min(out0 + o, n_out - 1) * n_inputs + k);
#pragma unroll
        for (int r = 0; r < NB; r++) {
            const float4 v = *(const float4 *)(held + min(r, n - 1) * n_inputs + k);
#pragma unroll
            for (int o = 0; o < OUTS; o++)
                acc[o][r] = fmaf(w[o].w, v.w, fmaf(w[o].z, v.z, fmaf(w[o].y, v.y, fmaf(w[o].x, v.x, acc[o][r]))));
        }
    }
#pragma unroll
    for (int o = 0; o < OUTS; o++) {
        const int r = reduce<NB>(acc[o]);
        if (lane % (32 / NB) == 0 && r < n && out0 + o < n_out) part_at(run, row + r, part)[out0 + o] = acc[o][0];
    }
}

// Tiles of GROUP rows: their streams by a warp each, then the sums by three outputs of a warp.
template <int FROM, int N>
__device__ __forceinline__ void project_rows(const Run &run, const float *weights, int n_out, int first, int end, float *held) {
    const int warp = threadIdx.x / 32, part = blockIdx.y, n_inputs = streams_of<N>(run) * PART;
    for (int row = first; row < end; row += GROUP) {
        const int n = min(end - row, (int)GROUP);
        if (warp < n) update_part<FROM, N>(run, row + warp, part, held + warp * n_inputs, part_at(run, row + warp, part));
        __syncthreads();
        for (int out0 = warp * OUTS; out0 < n_out; out0 += 8 * OUTS) {
            if (n == 1) multiply_rows<1, N>(run, weights, held, row, n, part, out0, n_out);
            else if (n <= 4) multiply_rows<4, N>(run, weights, held, row, n, part, out0, n_out);
            else multiply_rows<8, N>(run, weights, held, row, n, part, out0, n_out);
        }
        __syncthreads();
    }
}

template <int FROM> __device__ __forceinline__ void project(const Run &run, const Mat &fn, int row0, int tile_rows, float *weights) {
    const int part = blockIdx.y, first = row0 + blockIdx.x * tile_rows, end = min(first + tile_rows, *run.n_rows);
    float *held = weights + fn.n_out * run.n_streams * PART;
    if (run.hidden % 8) load_weights<MXFP4>(run, fn, part, weights);
    else if (fn.dtype == F16) load_weights<F16>(run, fn, part, weights);
    else if (fn.dtype == BF16) load_weights<BF16>(run, fn, part, weights);
    else if (fn.dtype == F32) load_weights<F32>(run, fn, part, weights);
    else load_weights<MXFP4>(run, fn, part, weights);  // any dtype and size
    follow();
    if (run.n_streams == 4) project_rows<FROM, 4>(run, weights, fn.n_out, first, end, held);
    else project_rows<FROM, 0>(run, weights, fn.n_out, first, end, held);
}

// Cosines and sines of the rows' positions, for both kinds of layers.
__device__ __forceinline__ void rotations(const Run &run, int first, int n) {
    const int n_pairs = run.rope_dim / 2, end = min(first + n, *run.n_rows);
    for (int i = threadIdx.x; i < (end - first) * 2 * n_pairs; i += blockDim.x) {
        const int row = first + i / (2 * n_pairs), kind = i / n_pairs % 2, pair = i % n_pairs;
        const double angle = (double)run.pos[row] * run.freq[kind][pair];
        const long long at = ((long long)kind * run.max_rows + row) * n_pairs + pair;
        run.cosines[at] = (float)cos(angle);
        run.sines[at] = (float)sin(angle);
    }
}

// grid (tiles of `tile_rows` rows, parts of 64 channels), block 256: a warp per row, then three outputs of fn per warp.
// Shared memory: fn's weights of the part and GROUP rows of it, floats. fn is the next sub-layer's; its weights are read
// once per tile, before the kernel has to wait for the one in front. The start has one more part, for the rotations.
extern "C" __global__ void __launch_bounds__(256) project_start(const Run run, const Mat fn, int row0, int tile_rows) {
    extern __shared__ __align__(16) float weights[];
    if (blockIdx.y < parts_of(run)) {
        project<EMBEDDING>(run, fn, row0, tile_rows, weights);
    } else {
        follow();
        rotations(run, row0 + blockIdx.x * tile_rows, tile_rows);
    }
}

extern "C" __global__ void __launch_bounds__(256) project_attention(const Run run, const Mat fn, int row0, int tile_rows) {
    extern __shared__ __align__(16) float weights[];
    project<ATTENTION>(run, fn, row0, tile_rows, weights);
}

extern "C" __global__ void __launch_bounds__(256) project_experts(const Run run, const Mat fn, int row0, int tile_rows) {
    extern __shared__ __align__(16) float weights[];
    project<EXPERTS>(run, fn, row0, tile_rows, weights);
}

// ---------------------------------------------------------------- mixing

// Sums of a row's parts in `total`, in runs of parts that depend on the model alone. All 256 threads.
__device__ __forceinline__ void sum_parts(const Run &run, int row, float *room, float *total) {
    const int n = values_of(run), n_runs = blockDim.x / n, parts = parts_of(run), length = (parts + n_runs - 1) / n_runs;
    const int v = threadIdx.x % n, r = threadIdx.x / n, end = min(parts, (r + 1) * length);
    const float *from = part_at(run, row, 0) + v;
    float sum = 0.0f;
    for (int p = r * length; p < end && r < n_runs; p += 16) {
        float got[16];
#pragma unroll
        for (int i = 0; i < 16; i++) got[i] = p + i < end ? from[(long long)(p + i) * n] : 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) sum += got[i];
    }
    room[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < n) {
        sum = room[threadIdx.x];
        for (int i = 1; i < n_runs; i++) sum += room[i * n + threadIdx.x];
        total[threadIdx.x] = sum;
    }
    __syncthreads();
}

__device__ __forceinline__ float inverse_rms(float squares, int n, float eps) { return rsqrtf(squares / (float)n + eps); }

// The norm of all streams together, which fn's result is multiplied with.
template <int N> __device__ __forceinline__ float streams_norm(const Run &run, const float *products) {
    float squares = products[0];
    for (int i = 1; i < streams_of<N>(run); i++) squares += products[pair_of(i, i)];
    return inverse_rms(squares, streams_of<N>(run) * run.hidden, run.rms_eps);
}

// What mixing reads of the model, ahead of follow().
struct Mixing {
    const float *norm;
    float scale, base[MAX_STREAMS], w[8];  // w: norm of the thread's first octet
};

__device__ __forceinline__ Mixing mixing_of(const Run &run, const float *scale, const float *base, const float *norm, int slice) {
    const int k = blockIdx.y * slice + threadIdx.x * 8;
    Mixing m = {norm, scale[0]};
#pragma unroll
    for (int i = 0; i < MAX_STREAMS; i++) m.base[i] = i < run.n_streams ? base[i] : 0.0f;
    if (k < run.hidden) load8(norm, k, run.hidden, m.w);
    return m;
}

// The weights of the streams in x, and the norm of x. `total`: sums of the parts.
template <int N> __device__ __forceinline__ float weigh(const Run &run, const Mixing &m, const float *total, float *pre) {
    const float *products = total + n_coefs(run);
    const float inverse = streams_norm<N>(run, products);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < MAX_STREAMS; i++) {
        if (i >= streams_of<N>(run)) break;
        pre[i] = sigmoid(fmaf(total[i] * inverse, m.scale, m.base[i])) + run.hc_eps;
#pragma unroll
        for (int j = 0; j < i; j++) squares = fmaf(2.0f * pre[i] * pre[j], products[pair_of(i, j)], squares);
        squares = fmaf(pre[i] * pre[i], products[pair_of(i, i)], squares);
    }
    return inverse_rms(fmaxf(squares, 0.0f), run.hidden, run.rms_eps);
}

template <int N> __device__ __forceinline__ void load_streams(const Run &run, const float *streams, int k, float (*v)[8]) {
#pragma unroll
    for (int j = 0; j < MAX_STREAMS; j++)
        if (j < streams_of<N>(run)) load8(streams + j * run.hidden, k, run.hidden, v[j]);
}

__device__ __forceinline__ void store8(float *p, int k, int n, const float *v) {
    if (n % 8 == 0) {
        *(float4 *)(p + k) = make_float4(v[0], v[1], v[2], v[3]);
        *(float4 *)(p + k + 4) = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        for (int i = 0; i < 8 && k + i < n; i++) p[k + i] = v[i];
    }
}

// xn[out] = rms(x) * norm for the channels [blockIdx.y * slice, + slice) of a row, with its int8 twin. Eight channels per
// thread.
template <int N>
__device__ __forceinline__ void mix(const Run &run, Mixing &m, int row, int out, int slice, float *room, float *total) {
    const int begin = blockIdx.y * slice, end = min(begin + slice, run.hidden), n = streams_of<N>(run);
    const float *streams = run.streams + (long long)row * n * run.hidden;
    float v[MAX_STREAMS][8], pre[MAX_STREAMS];
    int k = begin + threadIdx.x * 8;
    if (k < end) load_streams<N>(run, streams, k, v);  // on their way while the parts are summed
    sum_parts(run, row, room, total);
    const float inverse = weigh<N>(run, m, total, pre);
    for (; k - threadIdx.x % 32 * 8 < end; k += blockDim.x * 8) {  // whole warps, for the twins
        if (k >= begin + blockDim.x * 8 && k < end) {
            load_streams<N>(run, streams, k, v);
            load8(m.norm, k, run.hidden, m.w);
        }
        float sum[8];
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = k < end ? pre[0] * v[0][i] : 0.0f;
#pragma unroll
        for (int j = 1; j < MAX_STREAMS; j++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (j < n && k < end) sum[i] = fmaf(pre[j], v[j][i], sum[i]);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = k < end ? sum[i] * inverse * m.w[i] : 0.0f;
        if (k < end) store8(run.xn + (long long)out * run.hidden, k, run.hidden, sum);
        if (run.int8) quantize8(sum, run.xn_q, out, k, run.hidden, k < end && run.hidden % 32 == 0);
    }
}

// ---------------------------------------------------------------- coefficients of the way back

__device__ __forceinline__ void divide4(float &a, float &b, float &c, float &d, float eps) {
    const float r = reciprocal((a + b) + (c + d) + eps);
    a *= r, b *= r, c *= r, d *= r;
}

// Sinkhorn for four streams: every lane has the whole matrix, so that no step waits for a shuffle.
__device__ __forceinline__ void sinkhorn4(float entry, int rounds, float eps, float *c) {
    float m[16];
#pragma unroll
    for (int i = 0; i < 16; i++) m[i] = __shfl_sync(FULL, entry, i);
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int i = 0; i < 16 && round > 0; i += 4) divide4(m[i], m[i + 1], m[i + 2], m[i + 3], eps);
#pragma unroll
        for (int j = 0; j < 4; j++) divide4(m[j], m[4 + j], m[8 + j], m[12 + j], eps);
    }
    if (threadIdx.x) return;
#pragma unroll
    for (int i = 0; i < 16; i += 4) *(float4 *)(c + i) = make_float4(m[i], m[i + 1], m[i + 2], m[i + 3]);
}

// Places of a lane: entry (i, j) of C, in row-major order; spare lanes repeat entry 0.
struct Entry {
    int at, i, j;
    float post_scale, post_base, scale, base;  // of the lane's post and entry, read ahead of follow()
};

__device__ __forceinline__ Entry entry_of(const Run &run, const float *scale, const float *base) {
    const int n = run.n_streams, lane = threadIdx.x % 32, at = lane < n * n ? lane : 0;
    return {at, at / n, at % n, scale[1], base[n + min(lane, n - 1)], scale[2], base[2 * n + at]};
}

// One warp: post and C of a row. One entry of C per lane, n * n <= 32; for four streams Sinkhorn goes its own way.
__device__ __forceinline__ void write_coefs(const Run &run, const Entry &e, int row, const float *z) {
    const int n = run.n_streams, lane = threadIdx.x, i = e.i, j = e.j;
    const float inverse = streams_norm<0>(run, z + n_coefs(run));
    float *coef = run.coef + (long long)row * n_coefs(run);
    if (lane < n) coef[n + lane] = 2.0f * sigmoid(fmaf(z[n + lane] * inverse, e.post_scale, e.post_base));
    float c = fmaf(z[2 * n + e.at] * inverse, e.scale, e.base), top = -INFINITY, sum = 0.0f;
    for (int m = 0; m < n; m++) top = fmaxf(top, __shfl_sync(FULL, c, i * n + m));
    c = expf(c - top);
    for (int m = 0; m < n; m++) sum += __shfl_sync(FULL, c, i * n + m);
    c = c / sum + run.hc_eps;
    if (n == 4) return sinkhorn4(c, run.sinkhorn_iters, run.hc_eps, coef + 2 * n);
    for (int half = 0; half < 2 * run.sinkhorn_iters - 1; half++) {  // columns, then (rows, columns) again and again
        float total = 0.0f;
        for (int m = 0; m < n; m++) total += __shfl_sync(FULL, c, half % 2 ? i * n + m : m * n + j);
        c *= reciprocal(total + run.hc_eps);
    }
    if (lane < n * n) coef[2 * n + lane] = c;
}

// grid (rows, slices of the channels and one), block 256. The last block of a row writes the coefficients that
// project_* needs: Sinkhorn takes as long as all the rest and nobody else waits for it. is_ffn: which sub-layer.
extern "C" __global__ void __launch_bounds__(256) mix_streams(const Run run, const Layer layer, int row0, int is_ffn, int slice) {
    __shared__ float room[256], total[64];
    const float *scale = layer.vec[is_ffn ? V_HC_FFN_SCALE : V_HC_ATTN_SCALE];
    const float *base = layer.vec[is_ffn ? V_HC_FFN_BASE : V_HC_ATTN_BASE];
    const int row = row0 + blockIdx.x;
    const bool is_there = row < *run.n_rows;
    if (blockIdx.y + 1 < gridDim.y) {
        Mixing m = mixing_of(run, scale, base, layer.vec[is_ffn ? V_FFN_NORM : V_ATTN_NORM], slice);
        follow();
        if (!is_there) return;
        if (run.n_streams == 4) mix<4>(run, m, row, row, slice, room, total);
        else mix<0>(run, m, row, row, slice, room, total);
    } else {
        const Entry e = entry_of(run, scale, base);
        follow();
        if (!is_there) return;
        sum_parts(run, row, room, total);
        if (threadIdx.x < 32) write_coefs(run, e, row, total);
    }
}

// grid (logit rows, slices of the channels), block 256. The same for the output head: row logit_rows[j] -> xn[j].
extern "C" __global__ void __launch_bounds__(256) mix_head(const Run run, int j0, int slice) {
    __shared__ float room[256], total[64];
    const int j = j0 + blockIdx.x, row = j < *run.n_logit_rows ? run.logit_rows[j] : -1;
    Mixing m = mixing_of(run, run.output_hc_scale, run.output_hc_base, run.output_norm, slice);
    follow();
    if (row < 0) return;
    if (run.n_streams == 4) mix<4>(run, m, row, j, slice, room, total);
    else mix<0>(run, m, row, j, slice, room, total);
}
