// Twins of work buffers that are written by products: a pass of its own, since a block of 32 channels has many writers.
#include "matmul.cuh"

// grid (rows, parts of 1024), block 128.
extern "C" __global__ void quantize_low(const Run run, int row0) {
    follow();
    const int row = row0 + blockIdx.x, k = blockIdx.y * 1024 + threadIdx.x * 8, n = run.o_groups * run.o_lora;
    if (row >= *run.n_rows) return;
    float v[8] = {};
    if (k < n) load8(run.low + (long long)row * n + k, 0, 8, v);
    quantize8(v, run.low_q, row, k, n, k < n);
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
