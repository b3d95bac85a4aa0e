// Hyper-connections, first half: the output of a sub-layer into the streams, and the sums that the next one needs of them.
#include "hyper.cuh"

enum { GROUP = 8, OUTS = 3 };  // rows at a time; outputs of fn per warp and turn

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
