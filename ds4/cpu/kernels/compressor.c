/* Compressors (model description, "Compressors"): a softmax over the tokens of a window, for every channel alone. */
#include "compressor.h"

#include <math.h>

#include "cache.h"
#include "rope.h"
#include "round.h"
#include "vec.h"

typedef const float *rows_at_fn(const ds4_run *, const ds4_layer *, int item, int pos);

static void add(float *g, const float *ape, int n) {
    for (int k = 0; k < n; k++) g[k] += ape[k];
}

void ds4_add_ape(ds4_run *run, const ds4_layer *layer) {
    const size_t n = (size_t)layer->comp_width, n_index = 2 * (size_t)run->model.index_dim;
    for (int row = 0; row < run->plan.n_rows; row++) {
        const size_t slot = (size_t)(run->plan.pos[row] % layer->ratio), at = 2 * (size_t)row + 1;
        add(layer->step_comp + at * n, layer->vec[V_COMP_APE] + slot * n, (int)n);
        if (layer->ratio == DS4_CSA)
            add(layer->step_index_comp + at * n_index, layer->vec[V_IX_COMP_APE] + slot * n_index, (int)n_index);
    }
}

/* out = softmax-weighted sum over the window's tokens; top and total are room for `dim` floats each. */
static void pool(const ds4_run *run, const ds4_layer *layer, int item, int w, rows_at_fn *rows_at, int width, int dim,
                 float *out, float *top, float *total) {
    const int ratio = layer->ratio, first = ds4_window_first(ratio, w), end = ratio * (w + 1);
    for (int c = 0; c < dim; c++) {
        top[c] = -INFINITY;
        total[c] = out[c] = 0.0f;
    }
    for (int pos = first; pos < end; pos++) {
        const float *g = rows_at(run, layer, item, pos) + width + ds4_window_half(ratio, w, pos, dim);
        for (int c = 0; c < dim; c++) top[c] = g[c] > top[c] ? g[c] : top[c];
    }
    for (int pos = first; pos < end; pos++) {
        const float *k = rows_at(run, layer, item, pos) + ds4_window_half(ratio, w, pos, dim), *g = k + width;
        for (int c = 0; c < dim; c++) {
            const float weight = expf(g[c] - top[c]);
            total[c] += weight;
            out[c] += weight * k[c];
        }
    }
    for (int c = 0; c < dim; c++) out[c] /= total[c];
}

/* Norm, then RoPE at the window's first position. */
static void finish(const ds4_run *run, float *entry, const float *norm, int dim, int pos) {
    const ds4_model *m = &run->model;
    const int n_pairs = m->rope_dim / 2;
    float c[DS4_MAX_PAIRS], s[DS4_MAX_PAIRS];
    ds4_rms_norm(run->leaf, entry, norm, dim, m->rms_eps, entry);
    ds4_rope_angles(m->freq[1], n_pairs, pos, c, s);
    ds4_rope(entry + dim - m->rope_dim, n_pairs, c, s, 1.0f);
}

static void complete(ds4_run *run, const void *arg, int task, int thread) {
    const ds4_model *m = &run->model;
    const ds4_layer *layer = arg;
    const int item = run->work.windows[2 * task], w = run->work.windows[2 * task + 1];
    const int most = m->head_dim > m->index_dim ? m->head_dim : m->index_dim, pos = layer->ratio * w;
    float *out = run->work.thread_pool + 3 * (size_t)thread * (size_t)most, *top = out + most;
    pool(run, layer, item, w, ds4_comp_at, layer->comp_width, m->head_dim, out, top, top + most);
    finish(run, out, layer->vec[V_COMP_NORM], m->head_dim, pos);
    if (run->cache.roundings) ds4_round_latent(out, m->head_dim, m->head_dim - m->rope_dim);
    ds4_store_row(run, ds4_entry_at(run, layer, item, w), out, m->head_dim);
    if (layer->ratio != DS4_CSA) return;
    pool(run, layer, item, w, ds4_index_comp_at, 2 * m->index_dim, m->index_dim, out, top, top + most);
    finish(run, out, layer->vec[V_IX_COMP_NORM], m->index_dim, pos);
    if (run->cache.roundings) {
        ds4_round_index(out, m->index_dim);
        ds4_round_half(out, m->index_dim);
    }
    ds4_store_row(run, ds4_key_at(run, layer, item, w), out, m->index_dim);
}

void ds4_complete_entries(ds4_run *run, const ds4_layer *layer) {
    const ds4_plan *plan = &run->plan;
    int32_t *windows = run->work.windows;
    int n = 0; /* at most one window ends at a row */
    for (int item = 0; item < plan->n_items; item++) {
        const int pos = plan->item_pos[item], end = pos + plan->item_row[item + 1] - plan->item_row[item];
        for (int w = pos / layer->ratio; w < end / layer->ratio; w++, n++) {
            windows[2 * n] = item;
            windows[2 * n + 1] = w;
        }
    }
    ds4_parallel(run, complete, layer, n, 1);
}
