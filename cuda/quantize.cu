// Twins of work buffers that are written by products: a pass of its own, since a block of 32 channels has many writers.
#include "rehearse.cuh"
#include "int8.cuh"

// grid (rows, parts of 1024), block 128.
extern "C" __global__ void quantize_low(const Run run, int row0) {
    const int row = row0 + blockIdx.x, k = blockIdx.y * 1024 + threadIdx.x * 8, n = run.o_groups * run.o_lora, n_rows = *run.n_rows;
    if (row >= n_rows) return follow();
    rehearse([&](bool real) {
        float v[8] = {};
        if (k < n) fresh8(run.low + (long long)row * n, k, n, v);
        quantize8(v, run.low_q, row, k, n, real && k < n);
    });
}

// grid (rows, experts and the shared one, parts of 1024), block 128. is_raw: the shared expert's gate and up are raw still.
extern "C" __global__ void quantize_act(const Run run, const Layer layer, int row0, int is_raw) {
    const int row = row0 + blockIdx.x, k = blockIdx.z * 1024 + threadIdx.x * 8, slot = blockIdx.y, n_rows = *run.n_rows;
    if (row >= n_rows) return follow();
    const long long pair = slot < run.n_used ? (long long)row * run.n_used + slot : (long long)run.max_rows * run.n_used + row;
    float *const act = run.act + pair * run.ffn_width;
    const bool has_raw = is_raw && slot == run.n_used;
    rehearse([&](bool real) {
        float v[8] = {};
        if (k < run.ffn_width && has_raw) {
            float gate[8], up[8];
            fresh8(run.gate + (long long)row * run.ffn_width, k, run.ffn_width, gate);
            fresh8(run.up + (long long)row * run.ffn_width, k, run.ffn_width, up);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                v[i] = swiglu(gate[i], up[i], layer.clamp);
                if (real) act[k + i] = v[i];
            }
        } else if (k < run.ffn_width) {
            fresh8(act, k, run.ffn_width, v);
        }
        quantize8(v, run.act_q, pair, k, run.ffn_width, real && k < run.ffn_width);
    });
}
