#include "work.h"

#include "matmul.h"

/* Decoded weight rows per thread: a quarter of a megabyte stays in the second cache level. */
#define DECODE_FLOATS 65536

static size_t most(size_t a, size_t b) { return a > b ? a : b; }

/* Work buffers hold the longest possible weight row: padded like the rows that matmul.c decodes. */
static size_t longest_row(const ds4_model *m) {
    size_t n = (size_t)m->n_streams * (size_t)m->hidden;
    n = most(n, (size_t)m->q_lora);
    n = most(n, (size_t)(m->n_heads / m->o_groups) * (size_t)m->head_dim);
    n = most(n, (size_t)m->o_groups * (size_t)m->o_lora);
    n = most(n, (size_t)m->ffn_width);
    return (n + 15) / 16 * 16;
}

static void *take(uint8_t *memory, size_t *used, size_t n_bytes) {
    uint8_t *part = memory ? memory + *used : NULL;
    *used += (n_bytes + 63) / 64 * 64;
    return part;
}

#define FLOATS(field, count) work->field = take(memory, &used, (size_t)(count) * sizeof(float))
#define INTS(field, count) work->field = take(memory, &used, (size_t)(count) * sizeof(int32_t))

size_t ds4_work_carve(ds4_run *run, uint8_t *memory, int max_rows, int context, int n_threads) {
    const ds4_model *m = &run->model;
    ds4_work *work = &run->work;
    const size_t rows = (size_t)max_rows, threads = (size_t)n_threads, hidden = (size_t)m->hidden;
    const size_t n_streams = (size_t)m->n_streams, n_used = (size_t)m->n_used, n_experts = (size_t)m->n_experts;
    const size_t heads_dim = (size_t)m->n_heads * (size_t)m->head_dim, top_k = m->has_csa ? (size_t)m->index_top_k : 0;
    const size_t index_heads = m->has_csa ? (size_t)m->index_heads : 0;
    const size_t widest = most((size_t)m->head_dim, m->has_csa ? (size_t)m->index_dim : 0);
    const size_t n_jobs = most(2 * n_experts + 2, most((size_t)m->o_groups, 8));
    size_t used = 0;
    work->score_rows = max_rows < DS4_SCORE_ROWS ? max_rows : DS4_SCORE_ROWS;
    work->max_entries = m->has_csa ? context / DS4_CSA + 1 : 0;
    work->max_visible = m->window + (int)most(top_k, m->has_hca ? (size_t)context / DS4_HCA + 1 : 0);
    work->decode_floats = most(DECODE_FLOATS, longest_row(m));
    work->thread_rows_floats = DS4_ROW_BLOCK * widest;
    FLOATS(streams, rows * n_streams * hidden);
    FLOATS(flat, rows * n_streams * hidden);
    FLOATS(hc_z, rows * (2 + n_streams) * n_streams);
    FLOATS(hc_coef, rows * (2 + n_streams) * n_streams);
    FLOATS(x, rows * hidden);
    FLOATS(xn, rows * hidden);
    FLOATS(y, rows * hidden);
    FLOATS(qr_raw, rows * (size_t)m->q_lora);
    FLOATS(qr, rows * (size_t)m->q_lora);
    FLOATS(kv, rows * (size_t)m->head_dim);
    FLOATS(q, rows * heads_dim);
    FLOATS(low, rows * (size_t)m->o_groups * (size_t)m->o_lora);
    FLOATS(iq, rows * index_heads * (size_t)m->index_dim);
    FLOATS(ia, rows * index_heads);
    for (int kind = 0; kind < 2; kind++) {
        FLOATS(cos[kind], rows * (size_t)m->rope_dim / 2);
        FLOATS(sin[kind], rows * (size_t)m->rope_dim / 2);
    }
    FLOATS(router, rows * n_experts);
    FLOATS(route_weight, rows * n_used);
    FLOATS(gate, rows * (n_used + 1) * (size_t)m->ffn_width);
    FLOATS(up, rows * (n_used + 1) * (size_t)m->ffn_width);
    FLOATS(expert_out, rows * (n_used + 1) * hidden);
    FLOATS(logits, rows * (size_t)m->vocab);
    FLOATS(index_scores, (size_t)work->score_rows * (size_t)work->max_entries);
    FLOATS(thread_weights, threads * work->decode_floats);
    FLOATS(thread_scores, threads * DS4_HEAD_GROUP * (size_t)work->max_visible);
    FLOATS(thread_rows, threads * work->thread_rows_floats);
    FLOATS(thread_pool, threads * 3 * widest);
    INTS(route, rows * n_used);
    INTS(selected, rows * top_k);
    INTS(n_selected, rows);
    INTS(windows, rows * 2);
    INTS(expert_start, n_experts + 1);
    INTS(pair_row, rows * n_used);
    INTS(pair_out, rows * n_used);
    INTS(job_start, n_jobs + 1);
    work->jobs = take(memory, &used, n_jobs * sizeof(ds4_job));
    return used;
}
