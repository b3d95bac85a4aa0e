/* The records of the CPU kernels: model, cache, plan, work buffers, and the run that ties them together.
 *
 * Nothing here owns memory. Weights point into the mapped model file, small vectors, cache and work buffers into
 * arrays that the Python side keeps alive. Sizes and constants have the names of ModelShape. */
#ifndef DS4_MODEL_H
#define DS4_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "leaf.h"
#include "pool.h"

#define DS4_MAX_STREAMS 8 /* hyper-connection streams; published models have 4 */
#define DS4_MAX_PAIRS 256 /* rope_dim / 2 */
#define DS4_PAGE_TOKENS 256
#define DS4_HEAD_GROUP 16 /* heads of a row that one thread attends with at a time */
#define DS4_ROW_BLOCK 64  /* cache rows it holds decoded at a time */
#define DS4_SCORE_ROWS 16 /* rows whose index scores exist at a time */
enum { DS4_SLIDING = 0, DS4_CSA = 4, DS4_HCA = 128 };

/* A matrix in its file format, row-major: y = W x with n_in inputs and n_out rows. Stacked experts: n_out per expert. */
typedef struct {
    const uint8_t *data;
    size_t row_bytes;
    int dtype, n_in, n_out;
} ds4_mat;

enum ds4_layer_mat {
    M_HC_ATTN,
    M_HC_FFN,
    M_Q_A,
    M_Q_B,
    M_KV,
    M_O_A,
    M_O_B,
    M_COMP_KV,
    M_COMP_GATE,
    M_IX_COMP_KV,
    M_IX_COMP_GATE,
    M_IX_Q_B,
    M_IX_PROJ,
    M_ROUTER,
    M_GATE_EXPS,
    M_UP_EXPS,
    M_DOWN_EXPS,
    M_GATE_SH,
    M_UP_SH,
    M_DOWN_SH,
    N_LAYER_MATS
};

/* Small weights, decoded to float32 when the model is opened. */
enum ds4_layer_vec {
    V_HC_ATTN_SCALE,
    V_HC_ATTN_BASE,
    V_HC_FFN_SCALE,
    V_HC_FFN_BASE,
    V_ATTN_NORM,
    V_FFN_NORM,
    V_Q_A_NORM,
    V_KV_NORM,
    V_SINKS,
    V_COMP_APE,
    V_COMP_NORM,
    V_IX_COMP_APE,
    V_IX_COMP_NORM,
    V_ROUTER_BIAS, /* NULL where the file has none */
    N_LAYER_VECS
};

typedef struct {
    int ratio;
    float clamp;
    ds4_mat mat[N_LAYER_MATS];
    const float *vec[N_LAYER_VECS];
    const uint8_t *tid2eid; /* int32 [vocab, n_experts_used], unaligned; NULL on score-routed layers */
    /* cache layout: offsets inside a slab and a page, and this layer's step buffers [max_rows, ...] */
    int comp_ring, comp_width;
    ptrdiff_t latent, comp, index_comp, entries, index_keys;
    uint8_t *step_latent;             /* cache dtype [head_dim] */
    float *step_comp, *step_index_comp; /* [2, width]: k row, then g row with ape added */
} ds4_layer;

typedef struct {
    int n_layers, hidden, vocab, n_heads, head_dim, rope_dim, q_lora, o_groups, o_lora;
    int n_experts, n_used, ffn_width, window, index_heads, index_dim, index_top_k;
    int n_streams, sinkhorn_iters;
    float hc_eps, rms_eps, expert_scale;
    const double *freq[2]; /* [rope_dim / 2] each: sliding layers, compressed layers */
    ds4_mat embedding, output, output_hc;
    const float *output_hc_scale, *output_hc_base, *output_norm;
    ds4_layer *layer;
    ds4_tables tables;
    int has_csa, has_hca;
} ds4_model;

typedef struct {
    uint8_t *slabs, *pages;
    size_t slab_bytes, page_bytes, row_item; /* row_item: bytes of a cache element, 4 or 2 */
    int ring;
    int roundings; /* the original engine's FP8 / F16 / FP4 cache roundings */
} ds4_cache;

/* The step: see ds4.plugin.StepPlan. */
typedef struct {
    int n_rows, n_items, n_logit_rows;
    const int32_t *tokens, *pos, *row_item, *item_row, *item_pos, *item_slab, *page_start, *page_ids, *logit_rows;
} ds4_plan;

/* Work buffers for max_rows rows; their sizes are in work.c and nowhere else. */
typedef struct {
    int score_rows, max_entries, max_visible;
    size_t decode_floats, thread_rows_floats; /* per thread */
    float *streams;            /* [rows, n_streams, hidden] */
    float *flat;               /* [rows, n_streams * hidden]: normalised streams */
    float *hc_z, *hc_coef;     /* [rows, (2 + n) * n]: before and after the constraints: pre, post, C */
    float *x, *xn, *y;         /* [rows, hidden]: sub-layer input before and after its norm, sub-layer output */
    float *qr_raw, *qr;        /* [rows, q_lora] */
    float *kv;                 /* [rows, head_dim] */
    float *q;                  /* [rows, n_heads, head_dim]: queries, then attention output in place */
    float *low;                /* [rows, o_groups * o_lora] */
    float *iq, *ia;            /* [rows, index_heads, index_dim], [rows, index_heads] */
    float *cos[2], *sin[2];    /* [rows, rope_dim / 2] for each frequency table */
    float *router;             /* [rows, n_experts] */
    float *route_weight;       /* [rows, n_used] */
    float *gate, *up, *expert_out; /* [pairs, ffn_width] twice, [pairs, hidden]; pairs = rows * (n_used + 1) */
    float *logits;             /* [rows, vocab] */
    float *index_scores;       /* [score_rows, max_entries] */
    float *thread_weights;     /* [threads, decode_floats]: decoded weight rows */
    float *thread_scores;      /* [threads, DS4_HEAD_GROUP, max_visible] */
    float *thread_rows;        /* [threads, thread_rows_floats]: decoded cache rows */
    float *thread_pool;        /* [threads, 3, head_dim or index_dim]: compressor sums */
    int32_t *route;            /* [rows, n_used] */
    int32_t *selected;         /* [rows, index_top_k] */
    int32_t *n_selected;       /* [rows]; -1 = all visible entries */
    int32_t *windows;          /* [rows, 2]: item, window completed in this step */
    int32_t *expert_start;     /* [n_experts + 1] */
    int32_t *pair_row, *pair_out; /* [rows * n_used], grouped by expert: its row, its row in expert_out */
    struct ds4_job *jobs;      /* [2 * n_experts + 2] or [o_groups] */
    int32_t *job_start;        /* [max(that, 8) + 1] */
} ds4_work;

/* What tests look at: copies of one row's intermediate values. NULL = off. */
typedef struct {
    int row;
    float *values;     /* [n_layers, 4 + n_streams, hidden]: attn_in, attn_out, ffn_in, ffn_out, streams after */
    int32_t *selected; /* [n_layers, 1 + index_top_k]: count (-1 = all), then CSA entries */
    int32_t *route;    /* [n_layers, n_used] */
    float *route_weight;
} ds4_tap;

struct ds4_run {
    const ds4_leaf *leaf;
    ds4_pool *pool;
    ds4_model model;
    ds4_cache cache;
    ds4_plan plan;
    ds4_work work;
    ds4_tap tap;
    int n_threads;
    int (*poll)(void *); /* non-zero: stop. Called between operations, outside parallel loops */
    void *poll_arg;
};

enum { DS4_OK = 0, DS4_STOPPED = 1 };

/* Multiply-adds between two polls: some ten milliseconds on two slow cores. */
#define DS4_POLL_WORK ((size_t)1 << 27)
/* Multiply-adds, and rows of cheap work, from which a loop is worth waking the other threads. */
#define DS4_SHARED_WORK ((size_t)1 << 15)
#define DS4_MANY_ROWS 4

#endif
