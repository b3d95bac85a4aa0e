// The records every kernel gets by value: sizes, pointers and the layer. Mirrored field by field by ds4_cuda/records.py.
//
// A kernel parameter lies in constant memory, so a record costs no dependent load. Pointers stay the same from open to
// close; everything that changes from step to step is read from device memory (`Run.plan`), so that a captured graph
// can be replayed. All fields are 4 or 8 bytes in an order that leaves no padding.
#pragma once
#include "integers.cuh"

enum { SLIDING = 0, CSA = 4, HCA = 128, PAGE_TOKENS = 256 };
enum Dtype { F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, Q2_K, IQ2_XXS, MXFP4 };

// A matrix, experts stacked. Quantised ones but Q4_K and Q5_K lie in tiles of 16 rows (repack.cu), in two planes: `q` the codes, `d`
// the scales. All other dtypes are as in the file, row-major (`row_bytes` each), and have no `d`.
struct Mat {
    const uint8_t *q, *d;
    int n_in, n_out, dtype, row_bytes;
};

enum LayerMat {
    M_HC_ATTN, M_HC_FFN, M_Q_A, M_Q_B, M_KV, M_O_A, M_O_B, M_COMP_KV, M_COMP_GATE, M_IX_COMP_KV, M_IX_COMP_GATE,
    M_IX_Q_B, M_IX_PROJ, M_ROUTER, M_GATE_EXPS, M_UP_EXPS, M_DOWN_EXPS, M_GATE_SH, M_UP_SH, M_DOWN_SH, N_MATS
};
enum LayerVec {
    V_HC_ATTN_SCALE, V_HC_ATTN_BASE, V_HC_FFN_SCALE, V_HC_FFN_BASE, V_ATTN_NORM, V_FFN_NORM, V_Q_A_NORM, V_KV_NORM,
    V_SINKS, V_COMP_APE, V_COMP_NORM, V_IX_COMP_APE, V_IX_COMP_NORM, V_ROUTER_BIAS, N_VECS
};

struct Layer {
    int ratio, comp_ring, comp_width;
    float clamp;
    long long latent, comp, index_comp, entries, index_keys;  // byte offsets in a slab and a page; -1 = none
    uint8_t *step_latent;                                     // step buffers, [max_rows, ...]
    float *step_comp, *step_index_comp;
    const int *tid2eid;  // int32 [vocab, n_used] on hash layers, else null
    const float *vec[N_VECS];
    Mat mat[N_MATS];
};

// Twins of a float buffer for tensor cores, laid out as int8.cuh says; null where no matrix reads them. For Q8_0, Q4_0 and MXFP4: codes q
// and a scale d per 32 channels. For the other quantised dtypes: codes kq, a scale kd per 256 and the sums ks of 16 codes.
// For F16: halves h.
struct Quant {
    int8_t *q;
    float *d;
    int8_t *kq;
    float *kd, *ks;
    uint16_t *h;
};

struct Run {
    int n_layers, hidden, vocab, n_heads, head_dim, rope_dim, q_lora, o_groups, o_lora, n_experts, n_used, ffn_width;
    int window, index_heads, index_dim, top_k, n_streams, sinkhorn_iters, ring, cache_half, roundings, max_rows;
    int max_entries, n_splits, attend_rows, int8;  // int8: quantised weights meet int8 activations
    float hc_eps, rms_eps, expert_scale, attn_scale;
    // the step: int32 arrays written by one copy per step
    const int *n_rows, *n_items, *n_logit_rows, *tokens, *pos, *row_item, *item_row, *item_pos, *item_slab;
    const int *page_start, *logit_rows, *page_ids;
    // the cache
    uint8_t *slabs, *pages;
    long long slab_bytes, page_bytes;
    const double *freq[2];  // [rope_dim / 2]: sliding layers, compressed layers
    const uint2 *grid;      // IQ2_XXS magnitudes, 8 bytes for each of 256 indices
    const uint32_t *tables;  // its selectors of magnitudes (256) and of signs (128), a nibble per weight
    // work buffers; max_rows is a multiple of 8
    float *streams;       // [max_rows, n_streams, hidden]
    float *part_z;        // [max_rows, parts of 64 channels, (2 + n) * n + n * (n + 1) / 2]: sums for the next sub-layer
    float *coef;          // [max_rows, (2 + n) * n]: unused, post, C
    float *xn, *y;        // [max_rows, hidden]: sub-layer input after its norm, output
    float *qr_raw, *qr;   // [max_rows, q_lora]
    float *kv;            // [max_rows, head_dim]
    float *q;             // [max_rows, n_heads, head_dim]: queries, then attention output
    float *low;           // [max_rows, o_groups * o_lora]
    float *iq, *ia;       // [max_rows, index_heads, index_dim], [max_rows, index_heads]
    float *cosines, *sines;  // [2, max_rows, rope_dim / 2]
    float *router;        // [max_rows, n_experts]
    float *route_weight;  // [max_rows, n_used]
    float *act;           // [max_rows * (n_used + 1), ffn_width]: pair row * n_used + slot; the shared expert's behind
    float *gate, *up;     // [max_rows, ffn_width]: of the shared expert, where they are products like any other
    float *expert_out;    // [max_rows * (n_used + 1), hidden]
    float *part_o;        // [attend_rows, n_splits, n_heads, head_dim]: attention of one key block
    float *part_ml;       // [attend_rows, n_splits, n_heads, 2]: its largest score and its sum
    float *scores;        // [max_rows, max_entries]: index scores
    float *logits;        // [max_rows, vocab]
    int *route;           // [max_rows, n_used]
    int *selected;        // [max_rows, top_k]
    int *pairs;           // [max_rows * n_used]: pair numbers grouped by expert
    int *tiles;           // [1 + 3 * tiles]: count, then (expert, first, n) each
    Quant xn_q, qr_q, q_q, low_q, act_q;
    const float *output_hc_scale, *output_hc_base, *output_norm;
    Mat embedding, output, output_hc;
};

// One matrix product of a launch: y[row] = mat[first_row ..] @ x[row].
struct Job {
    Mat mat;
    const float *x;
    Quant xq;  // the same values
    float *y;
    int x_stride, y_stride, first_row, n_out, first_block, channel;  // channel: of y in its twin's rows, see Jobs
};

enum { MAX_JOBS = 16 };
struct Jobs {
    Job job[MAX_JOBS];
    const int *count;  // rows of this step
    // Where the outputs' twins go, codes and scales per 32 channels of rows of `channels`; null: they get none here.
    int8_t *twin_q;
    float *twin_d;
    int n_jobs, n_segments, segment, n_groups, loops;  // segment: inputs per warp; groups per block, and turns
    // Tensor-core products: n_groups tiles of 16 outputs at a time, segments shared by `loops` warps; blocks from n_first on
    // are of F16 jobs; count null: only `row`.
    int row, n_first, n_blocks, channels, unused;
};

#ifdef DS4_RUN_BYTES  // given by ds4_cuda.kernels: the sizes of the records as the host writes them
static_assert(sizeof(Run) == DS4_RUN_BYTES && sizeof(Layer) == DS4_LAYER_BYTES && sizeof(Mat) == DS4_MAT_BYTES &&
              sizeof(Jobs) == DS4_JOBS_BYTES, "records.py and records.cuh differ");
#endif
