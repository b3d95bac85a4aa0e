/* Attention (model description, "Attention"). */
#include "attention.h"

#include <math.h>

#include "cache.h"
#include "compressor.h"
#include "indexer.h"
#include "matmul.h"
#include "rope.h"
#include "round.h"
#include "vec.h"

ds4_view ds4_view_of(const ds4_run *run, const ds4_layer *layer, int row) {
    const int pos = run->plan.pos[row], window = run->model.window;
    ds4_view view = {run->plan.row_item[row], pos + 1 > window ? pos + 1 - window : 0, 0, 0, NULL};
    view.n_raw = pos + 1 - view.first_raw;
    if (layer->ratio) view.n_entries = (pos + 1) / layer->ratio;
    if (layer->ratio == DS4_CSA && run->work.n_selected[row] >= 0) {
        view.n_entries = run->work.n_selected[row];
        view.selected = run->work.selected + (size_t)row * (size_t)run->model.index_top_k;
    }
    return view;
}

const uint8_t *ds4_visible_at(const ds4_run *run, const ds4_layer *layer, const ds4_view *view, int t) {
    if (t < view->n_raw) return ds4_latent_at(run, layer, view->item, view->first_raw + t);
    t -= view->n_raw;
    return ds4_entry_at(run, layer, view->item, view->selected ? view->selected[t] : t);
}

/* Float pointers to the visible rows [first, first + n). */
static void gather(const ds4_run *run, const ds4_layer *layer, const ds4_view *view, int first, int n, float *room,
                   const float **rows) {
    const int dim = run->model.head_dim;
    for (int i = 0; i < n; i++)
        rows[i] = ds4_load_row(run, ds4_visible_at(run, layer, view, first + i), room + (size_t)i * (size_t)dim, dim);
}

/* Products -> exponentials of the scaled scores, in place; returns their sum with the sink's, which is not scaled. */
static float exponentials(float *scores, int n, float scale, float sink) {
    float top = sink, total = 0.0f;
    for (int t = 0; t < n; t++) {
        scores[t] *= scale;
        top = scores[t] > top ? scores[t] : top;
    }
    for (int t = 0; t < n; t++) total += scores[t] = expf(scores[t] - top);
    return total + expf(sink - top);
}

/* Heads [h0, h0 + n_h) of a row: queries in work.q become rotated-back outputs. */
static void attend(const ds4_run *run, const ds4_layer *layer, int row, int h0, int n_h, int thread) {
    const ds4_model *m = &run->model;
    const ds4_work *work = &run->work;
    const ds4_view view = ds4_view_of(run, layer, row);
    const int dim = m->head_dim, n = view.n_raw + view.n_entries, n_pairs = m->rope_dim / 2, kind = layer->ratio != 0;
    float *scores = work->thread_scores + (size_t)thread * DS4_HEAD_GROUP * (size_t)work->max_visible;
    float *room = work->thread_rows + (size_t)thread * work->thread_rows_floats;
    const float *rows[DS4_ROW_BLOCK], *in[DS4_HEAD_GROUP];
    float *out[DS4_HEAD_GROUP], total[DS4_HEAD_GROUP];
    for (int h = 0; h < n_h; h++)
        in[h] = out[h] = work->q + ((size_t)row * (size_t)m->n_heads + (size_t)(h0 + h)) * (size_t)dim;
    for (int t = 0; t < n; t += DS4_ROW_BLOCK) {
        const int n_t = n - t < DS4_ROW_BLOCK ? n - t : DS4_ROW_BLOCK;
        float *y[DS4_HEAD_GROUP];
        for (int h = 0; h < n_h; h++) y[h] = scores + (size_t)h * (size_t)work->max_visible + t;
        gather(run, layer, &view, t, n_t, room, rows);
        run->leaf->dots(rows, n_t, in, n_h, dim, y);
    }
    for (int h = 0; h < n_h; h++) {
        float *s = scores + (size_t)h * (size_t)work->max_visible;
        total[h] = exponentials(s, n, (float)(1.0 / sqrt((double)dim)), layer->vec[V_SINKS][h0 + h]);
        memset(out[h], 0, (size_t)dim * sizeof(float));
    }
    for (int t = 0; t < n; t += DS4_ROW_BLOCK) {
        const int n_t = n - t < DS4_ROW_BLOCK ? n - t : DS4_ROW_BLOCK;
        const float *weight[DS4_HEAD_GROUP];
        for (int h = 0; h < n_h; h++) weight[h] = scores + (size_t)h * (size_t)work->max_visible + t;
        if (n > DS4_ROW_BLOCK) /* else they are still there */
            gather(run, layer, &view, t, n_t, room, rows);
        run->leaf->weigh(rows, n_t, weight, n_h, dim, out);
    }
    for (int h = 0; h < n_h; h++) {
        for (int c = 0; c < dim; c++) out[h][c] /= total[h];
        ds4_rope(out[h] + dim - m->rope_dim, n_pairs, work->cos[kind] + (size_t)row * (size_t)n_pairs,
                 work->sin[kind] + (size_t)row * (size_t)n_pairs, -1.0f);
    }
}

static int n_head_groups(const ds4_run *run) { return (run->model.n_heads + DS4_HEAD_GROUP - 1) / DS4_HEAD_GROUP; }

typedef struct {
    const ds4_layer *layer;
    int first_row;
} slice;

static void attend_task(ds4_run *run, const void *arg, int task, int thread) {
    const slice *s = arg;
    const int n_heads = run->model.n_heads, n_groups = n_head_groups(run), h0 = task % n_groups * DS4_HEAD_GROUP;
    attend(run, s->layer, s->first_row + task / n_groups, h0,
           n_heads - h0 < DS4_HEAD_GROUP ? n_heads - h0 : DS4_HEAD_GROUP, thread);
}

static int attend_all(ds4_run *run, const ds4_layer *layer) {
    const ds4_model *m = &run->model;
    for (int row = 0, end; row < run->plan.n_rows; row = end) {
        const slice part = {layer, row};
        size_t work = 0;
        for (end = row; end < run->plan.n_rows && work < DS4_POLL_WORK; end++) {
            const ds4_view view = ds4_view_of(run, layer, end);
            work += 2 * (size_t)(view.n_raw + view.n_entries) * (size_t)m->n_heads * (size_t)m->head_dim;
        }
        if (run->poll(run->poll_arg)) return DS4_STOPPED;
        ds4_parallel(run, attend_task, &part, (end - row) * n_head_groups(run), work > DS4_SHARED_WORK);
    }
    return DS4_OK;
}

/* Everything that reads the normed input; compressor rows go straight into the step buffers. */
static int project_in(ds4_run *run, const ds4_layer *layer) {
    const ds4_work *work = &run->work;
    const int n_rows = run->plan.n_rows, width = layer->comp_width, index_width = 2 * run->model.index_dim;
    ds4_job jobs[7];
    int n = 0;
    jobs[n++] = ds4_plain_job(layer->mat[M_Q_A], work->xn, work->qr_raw, n_rows);
    jobs[n++] = ds4_plain_job(layer->mat[M_KV], work->xn, work->kv, n_rows);
    if (layer->ratio) {
        jobs[n++] = ds4_plain_job(layer->mat[M_COMP_KV], work->xn, layer->step_comp, n_rows);
        jobs[n++] = ds4_plain_job(layer->mat[M_COMP_GATE], work->xn, layer->step_comp + width, n_rows);
        jobs[n - 2].y_stride = jobs[n - 1].y_stride = 2 * (size_t)width;
    }
    if (layer->ratio == DS4_CSA) {
        jobs[n++] = ds4_plain_job(layer->mat[M_IX_PROJ], work->xn, work->ia, n_rows);
        jobs[n++] = ds4_plain_job(layer->mat[M_IX_COMP_KV], work->xn, layer->step_index_comp, n_rows);
        jobs[n++] = ds4_plain_job(layer->mat[M_IX_COMP_GATE], work->xn, layer->step_index_comp + index_width, n_rows);
        jobs[n - 2].y_stride = jobs[n - 1].y_stride = 2 * (size_t)index_width;
    }
    return ds4_matmul(run, jobs, n);
}

/* Norm, rotation and cache rounding of a row's latent; norm of its query input. */
static void store_latent(ds4_run *run, const void *arg, int row, int thread) {
    const ds4_model *m = &run->model;
    const ds4_work *work = &run->work;
    const ds4_layer *layer = arg;
    const int dim = m->head_dim, n_pairs = m->rope_dim / 2, kind = layer->ratio != 0;
    float *kv = work->kv + (size_t)row * (size_t)dim;
    (void)thread;
    ds4_rms_norm(run->leaf, work->qr_raw + (size_t)row * (size_t)m->q_lora, layer->vec[V_Q_A_NORM], m->q_lora,
                 m->rms_eps, work->qr + (size_t)row * (size_t)m->q_lora);
    ds4_rms_norm(run->leaf, kv, layer->vec[V_KV_NORM], dim, m->rms_eps, kv);
    ds4_rope(kv + dim - m->rope_dim, n_pairs, work->cos[kind] + (size_t)row * (size_t)n_pairs,
             work->sin[kind] + (size_t)row * (size_t)n_pairs, 1.0f);
    if (run->cache.roundings) ds4_round_latent(kv, dim, dim - m->rope_dim);
    ds4_store_row(run, layer->step_latent + (size_t)row * (size_t)dim * run->cache.row_item, kv, dim);
}

static void finish_queries(ds4_run *run, const void *arg, int row, int thread) {
    const ds4_model *m = &run->model;
    const ds4_layer *layer = arg;
    const int dim = m->head_dim, n_pairs = m->rope_dim / 2, kind = layer->ratio != 0;
    const float *c = run->work.cos[kind] + (size_t)row * (size_t)n_pairs;
    const float *s = run->work.sin[kind] + (size_t)row * (size_t)n_pairs;
    float *q = run->work.q + (size_t)row * (size_t)m->n_heads * (size_t)dim;
    (void)thread;
    for (int h = 0; h < m->n_heads; h++, q += dim) {
        ds4_rms_norm(run->leaf, q, NULL, dim, m->rms_eps, q);
        ds4_rope(q + dim - m->rope_dim, n_pairs, c, s, 1.0f);
    }
}

static void finish_index_queries(ds4_run *run, const void *arg, int row, int thread) {
    const ds4_model *m = &run->model;
    const int dim = m->index_dim, n_pairs = m->rope_dim / 2;
    float *query = run->work.iq + (size_t)row * (size_t)m->index_heads * (size_t)dim;
    (void)arg;
    (void)thread;
    for (int h = 0; h < m->index_heads; h++, query += dim) {
        ds4_rope(query + dim - m->rope_dim, n_pairs, run->work.cos[1] + (size_t)row * (size_t)n_pairs,
                 run->work.sin[1] + (size_t)row * (size_t)n_pairs, 1.0f);
        if (run->cache.roundings) ds4_round_index(query, dim);
    }
}

/* Queries, and index queries when some row needs them. */
static int project_queries(ds4_run *run, const ds4_layer *layer, int with_index) {
    const int n_rows = run->plan.n_rows;
    ds4_job jobs[2] = {ds4_plain_job(layer->mat[M_Q_B], run->work.qr, run->work.q, n_rows)};
    if (with_index) jobs[1] = ds4_plain_job(layer->mat[M_IX_Q_B], run->work.qr, run->work.iq, n_rows);
    if (ds4_matmul(run, jobs, 1 + with_index)) return DS4_STOPPED;
    ds4_parallel(run, finish_queries, layer, n_rows, n_rows >= DS4_MANY_ROWS);
    if (with_index) ds4_parallel(run, finish_index_queries, layer, n_rows, n_rows >= DS4_MANY_ROWS);
    return DS4_OK;
}

/* Heads are taken in order, n_heads / o_groups to a group; each group has its own rows of the first matrix. */
static int project_out(ds4_run *run, const ds4_layer *layer) {
    const ds4_model *m = &run->model;
    const ds4_work *work = &run->work;
    const int n_in = m->n_heads / m->o_groups * m->head_dim, n_low = m->o_groups * m->o_lora;
    for (int g = 0; g < m->o_groups; g++) {
        const ds4_mat part = ds4_mat_rows(&layer->mat[M_O_A], g * m->o_lora, m->o_lora);
        work->jobs[g] = ds4_plain_job(part, work->q + (size_t)g * (size_t)n_in, work->low + g * m->o_lora,
                                      run->plan.n_rows);
        work->jobs[g].x_stride = (size_t)m->n_heads * (size_t)m->head_dim;
        work->jobs[g].y_stride = (size_t)n_low;
    }
    if (ds4_matmul(run, work->jobs, m->o_groups)) return DS4_STOPPED;
    const ds4_job job = ds4_plain_job(layer->mat[M_O_B], work->low, work->y, run->plan.n_rows);
    return ds4_matmul(run, &job, 1);
}

int ds4_attention(ds4_run *run, const ds4_layer *layer) {
    const int with_index = layer->ratio == DS4_CSA && ds4_index_needed(run);
    if (project_in(run, layer)) return DS4_STOPPED;
    ds4_parallel(run, store_latent, layer, run->plan.n_rows, run->plan.n_rows >= DS4_MANY_ROWS);
    if (project_queries(run, layer, with_index)) return DS4_STOPPED;
    if (layer->ratio) {
        ds4_add_ape(run, layer);
        ds4_complete_entries(run, layer);
    }
    if (!with_index) ds4_index_all(run);
    else if (ds4_index_select(run, layer)) return DS4_STOPPED;
    if (attend_all(run, layer)) return DS4_STOPPED;
    return project_out(run, layer);
}
