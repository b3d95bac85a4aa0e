/* The forward pass of a step (model description, "Overall flow"): every operation for all rows at once. */
#include "forward.h"

#include "attention.h"
#include "half.h"
#include "hyper.h"
#include "matmul.h"
#include "moe.h"
#include "rope.h"

/* A row's embedding into every stream, and the rotation of its position. */
static void start_row(ds4_run *run, const void *arg, int row, int thread) {
    const ds4_model *m = &run->model;
    const size_t hidden = (size_t)m->hidden, n_pairs = (size_t)m->rope_dim / 2, at = (size_t)row;
    float *stream = run->work.streams + at * (size_t)m->n_streams * hidden;
    (void)arg;
    (void)thread;
    run->leaf->decode[m->embedding.dtype](
        m->embedding.data + (size_t)run->plan.tokens[row] * m->embedding.row_bytes, stream, m->hidden, &m->tables);
    for (int i = 1; i < m->n_streams; i++) memcpy(stream + (size_t)i * hidden, stream, hidden * sizeof(float));
    for (int kind = 0; kind < 2; kind++)
        ds4_rope_angles(m->freq[kind], (int)n_pairs, run->plan.pos[row], run->work.cos[kind] + at * n_pairs,
                        run->work.sin[kind] + at * n_pairs);
}

/* Copy one hidden-sized vector of the tapped row: part 0..3, or the streams from part 4 on. */
static void tap(const ds4_run *run, int layer, int part, const float *rows, int n_vectors) {
    const size_t hidden = (size_t)run->model.hidden, per_layer = 4 + (size_t)run->model.n_streams;
    if (!run->tap.values) return;
    memcpy(run->tap.values + ((size_t)layer * per_layer + (size_t)part) * hidden,
           rows + (size_t)run->tap.row * (size_t)n_vectors * hidden, (size_t)n_vectors * hidden * sizeof(float));
}

static void tap_choices(const ds4_run *run, int layer) {
    const size_t n_used = (size_t)run->model.n_used, top_k = (size_t)run->model.index_top_k;
    const size_t row = (size_t)run->tap.row;
    if (!run->tap.values) return;
    memcpy(run->tap.route + (size_t)layer * n_used, run->work.route + row * n_used, n_used * sizeof(int32_t));
    memcpy(run->tap.route_weight + (size_t)layer * n_used, run->work.route_weight + row * n_used,
           n_used * sizeof(float));
    if (run->model.layer[layer].ratio != DS4_CSA) return;
    int32_t *selected = run->tap.selected + (size_t)layer * (1 + top_k);
    selected[0] = run->work.n_selected[row];
    if (selected[0] > 0) memcpy(selected + 1, run->work.selected + row * top_k, top_k * sizeof(int32_t));
}

static int run_layer(ds4_run *run, int i) {
    const ds4_layer *layer = run->model.layer + i;
    if (ds4_hc_pre(run, &layer->mat[M_HC_ATTN], layer->vec[V_HC_ATTN_SCALE], layer->vec[V_HC_ATTN_BASE],
                   layer->vec[V_ATTN_NORM]))
        return DS4_STOPPED;
    if (ds4_attention(run, layer)) return DS4_STOPPED;
    tap(run, i, 0, run->work.x, 1);
    tap(run, i, 1, run->work.y, 1);
    ds4_hc_post(run);
    if (ds4_hc_pre(run, &layer->mat[M_HC_FFN], layer->vec[V_HC_FFN_SCALE], layer->vec[V_HC_FFN_BASE],
                   layer->vec[V_FFN_NORM]))
        return DS4_STOPPED;
    if (ds4_moe(run, layer)) return DS4_STOPPED;
    tap(run, i, 2, run->work.x, 1);
    tap(run, i, 3, run->work.y, 1);
    ds4_hc_post(run);
    tap(run, i, 4, run->work.streams, run->model.n_streams);
    tap_choices(run, i);
    return DS4_OK;
}

static int forward(ds4_run *run, int arg) {
    (void)arg;
    ds4_parallel(run, start_row, NULL, run->plan.n_rows, run->plan.n_rows >= DS4_MANY_ROWS);
    for (int i = 0; i < run->model.n_layers; i++)
        if (run_layer(run, i)) return DS4_STOPPED;
    if (run->plan.n_logit_rows == 0) return DS4_OK;
    if (ds4_hc_head(run)) return DS4_STOPPED;
    const ds4_job job = ds4_plain_job(run->model.output, run->work.xn, run->work.logits, run->plan.n_logit_rows);
    return ds4_matmul(run, &job, 1);
}

int ds4_forward(ds4_run *run) { return ds4_pool_step(run->pool, run, forward, 0); }
