# Declarations of kernels/*.h: only what Python fills in or calls.

cdef extern from "model.h" nogil:
    const int DS4_MAX_STREAMS, DS4_MAX_PAIRS, DS4_PAGE_TOKENS
    enum: DS4_CSA, DS4_HCA, DS4_OK
    enum: DS4_F32, DS4_F16, DS4_BF16, DS4_Q8_0, DS4_Q4_0, DS4_Q4_K, DS4_Q5_K, DS4_Q6_K, DS4_Q2_K, DS4_IQ2_XXS, DS4_MXFP4
    enum:
        M_HC_ATTN, M_HC_FFN, M_Q_A, M_Q_B, M_KV, M_O_A, M_O_B, M_COMP_KV, M_COMP_GATE
        M_IX_COMP_KV, M_IX_COMP_GATE, M_IX_Q_B, M_IX_PROJ, M_ROUTER
        M_GATE_EXPS, M_UP_EXPS, M_DOWN_EXPS, M_GATE_SH, M_UP_SH, M_DOWN_SH
    enum:
        V_HC_ATTN_SCALE, V_HC_ATTN_BASE, V_HC_FFN_SCALE, V_HC_FFN_BASE, V_ATTN_NORM, V_FFN_NORM, V_Q_A_NORM
        V_KV_NORM, V_SINKS, V_COMP_APE, V_COMP_NORM, V_IX_COMP_APE, V_IX_COMP_NORM, V_ROUTER_BIAS

    ctypedef struct ds4_tables:
        float iq2_xxs[256][8]
    ctypedef void ds4_decode_fn(const uint8_t *row, float *out, int n, const ds4_tables *tables)
    ctypedef struct ds4_leaf:
        const char *name
        void (*dots)(const float *const *w, int n_w, const float *const *x, int n_x, int n, float *const *y)
        void (*weigh)(const float *const *row, int n_row, const float *const *weight, int n_y, int n, float *const *y)
        ds4_decode_fn *decode[11]
    void ds4_fill_signs(ds4_tables *tables)
    const ds4_leaf *const *ds4_leaf_levels()

    ctypedef struct ds4_mat:
        const uint8_t *data
        size_t row_bytes
        int dtype, n_in, n_out
    ctypedef struct ds4_layer:
        int ratio
        float clamp
        ds4_mat mat[20]
        const float *vec[14]
        const uint8_t *tid2eid
        int comp_ring, comp_width
        ptrdiff_t latent, comp, index_comp, entries, index_keys
        uint8_t *step_latent
        float *step_comp
        float *step_index_comp
    ctypedef struct ds4_model:
        int n_layers, hidden, vocab, n_heads, head_dim, rope_dim, q_lora, o_groups, o_lora
        int n_experts, n_used, ffn_width, window, index_heads, index_dim, index_top_k
        int n_streams, sinkhorn_iters
        float hc_eps, rms_eps, expert_scale
        const double *freq[2]
        ds4_mat embedding, output, output_hc
        const float *output_hc_scale
        const float *output_hc_base
        const float *output_norm
        ds4_layer *layer
        ds4_tables tables
        int has_csa, has_hca
    ctypedef struct ds4_cache:
        uint8_t *slabs
        uint8_t *pages
        size_t slab_bytes, page_bytes, row_item
        int ring, roundings
    ctypedef struct ds4_plan:
        int n_rows, n_items, n_logit_rows
        const int32_t *tokens
        const int32_t *pos
        const int32_t *row_item
        const int32_t *item_row
        const int32_t *item_pos
        const int32_t *item_slab
        const int32_t *page_start
        const int32_t *page_ids
        const int32_t *logit_rows
    ctypedef struct ds4_work:
        float *logits
        float *thread_weights
        int32_t *job_start
        size_t decode_floats
    ctypedef struct ds4_tap:
        int row
        float *values
        int32_t *selected
        int32_t *route
        float *route_weight
    ctypedef struct ds4_pool:
        pass
    ds4_pool *ds4_pool_new(int n_threads)
    void ds4_pool_free(ds4_pool *pool)
    int ds4_pool_check(int n_threads, int n_loops)
    ctypedef struct ds4_run:
        const ds4_leaf *leaf
        ds4_pool *pool
        ds4_model model
        ds4_cache cache
        ds4_plan plan
        ds4_work work
        ds4_tap tap
        int n_threads
        int (*poll)(void *)
        void *poll_arg

cdef extern from "work.h" nogil:
    size_t ds4_work_carve(ds4_run *run, uint8_t *memory, int max_rows, int context, int n_threads)

cdef extern from "forward.h" nogil:
    int ds4_forward(ds4_run *run)
    int ds4_forward_row(ds4_run *run, int row)
    void ds4_publish(ds4_run *run)

cdef extern from "half.h" nogil:
    float ds4_f16_to_f32(uint16_t half)
    float ds4_bf16_to_f32(uint16_t half)
    uint16_t ds4_f32_to_f16(float value)

cdef extern from "matmul.h" nogil:
    ctypedef struct ds4_job:
        pass
    ds4_job ds4_plain_job(ds4_mat mat, const float *x, float *y, int n_rows)
    int ds4_matmul(ds4_run *run, const ds4_job *jobs, int n_jobs)

cdef extern from "rope.h" nogil:
    void ds4_rope_angles(const double *freq, int n_pairs, int pos, float *cos_out, float *sin_out)

cdef extern from "round.h" nogil:
    void ds4_round_latent(float *row, int n, int n_plain)
    void ds4_round_index(float *row, int n)
    void ds4_round_half(float *row, int n)

cdef extern from "vec.h" nogil:
    float ds4_sqrt_softplus(float v)
    float ds4_swiglu(float gate, float up, float limit)

cdef struct poll_state:
    void *machine
    double next_check, seconds
    int stopped
