// Twins of work buffers that are written by products: a pass of its own, since a block of 32 channels has many writers.
#include "matmul.cuh"

// grid (rows, parts of 1024), block 128.
extern "C" __global__ void quantize_low(const Run run, int row0) {
    const int row = row0 + blockIdx.x, k = blockIdx.y * 1024 + threadIdx.x * 8, n = run.o_groups * run.o_lora, n_rows = *run.n_rows;
    follow();
    if (row >= n_rows) return;
    float v[8] = {};
    if (k < n) load8(run.low + (long long)row * n + k, 0, 8, v);
    quantize8(v, run.low_q, row, k, n, k < n);
}

// grid (rows, experts and the shared one, parts of 1024), block 128. is_raw: the shared expert's gate and up are raw still.
extern "C" __global__ void quantize_act(const Run run, const Layer layer, int row0, int is_raw) {
    const int row = row0 + blockIdx.x, k = blockIdx.z * 1024 + threadIdx.x * 8, slot = blockIdx.y, n_rows = *run.n_rows;
    follow();
    if (row >= n_rows) return;
    const long long pair = slot < run.n_used ? (long long)row * run.n_used + slot : (long long)run.max_rows * run.n_used + row;
    float v[8] = {};
    float *const act = run.act + pair * run.ffn_width + k;
    if (k < run.ffn_width && is_raw && slot == run.n_used) {
        float gate[8], up[8];
        load8(run.gate + (long long)row * run.ffn_width + k, 0, 8, gate);
        load8(run.up + (long long)row * run.ffn_width + k, 0, 8, up);
        for (int i = 0; i < 8; i++) act[i] = v[i] = swiglu(gate[i], up[i], layer.clamp);
    } else if (k < run.ffn_width) {
        load8(act, 0, 8, v);
    }
    quantize8(v, run.act_q, pair, k, run.ffn_width, k < run.ffn_width);
}
