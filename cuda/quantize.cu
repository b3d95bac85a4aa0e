// Twins of work buffers that are written by products: a pass of its own, since a block of 32 channels has many writers.
#include "matmul.cuh"

// grid (rows, parts of 1024), block 128. Twins of n elements of rows that are n apart (n a multiple of 32).
extern "C" __global__ void quantize_rows(const Run run, const float *x, int8_t *q, float *d, float *s, int row0, int n) {
    follow();
    const int row = row0 + blockIdx.x, k = blockIdx.y * 1024 + threadIdx.x * 8;
    if (row >= *run.n_rows) return;
    const Quant to = {q, d, s, nullptr};
    float v[8] = {};
    if (k < n) load8(x + (long long)row * n + k, 0, 8, v);
    quantize8(v, to, row, k, n, k < n);
}

// grid (rows, experts and the shared one, parts of 1024), block 128.
extern "C" __global__ void quantize_act(const Run run, int row0) {
    follow();
    const int row = row0 + blockIdx.x, k = blockIdx.z * 1024 + threadIdx.x * 8, slot = blockIdx.y;
    if (row >= *run.n_rows) return;
    const long long pair = slot < run.n_used ? (long long)row * run.n_used + slot : (long long)run.max_rows * run.n_used + row;
    float v[8] = {};
    if (k < run.ffn_width) load8(run.act + pair * run.ffn_width + k, 0, 8, v);
    quantize8(v, run.act_q, pair, k, run.ffn_width, k < run.ffn_width);
}
