// Hyper-connections: the streams between two sub-layers, in two kernels (project.cu, hyper.cu).
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
#pragma once
#include "matmul.cuh"

enum { PART = 64, MAX_STREAMS = 5 };  // channels of a part

// N: the number of streams where it is four, the usual one, so that loops over them are straight code; else 0.
template <int N> __device__ __forceinline__ int streams_of(const Run &run) { return N ? N : run.n_streams; }

__device__ __forceinline__ int parts_of(const Run &run) { return (run.hidden + PART - 1) / PART; }
__device__ __forceinline__ int n_coefs(const Run &run) { return (2 + run.n_streams) * run.n_streams; }
__device__ __forceinline__ constexpr int pair_of(int i, int j) { return i * (i + 1) / 2 + j; }  // j <= i
__device__ __forceinline__ int values_of(const Run &run) { return n_coefs(run) + pair_of(run.n_streams, 0); }

__device__ __forceinline__ float *part_at(const Run &run, int row, int part) {
    return run.part_z + ((long long)row * parts_of(run) + part) * values_of(run);
}
