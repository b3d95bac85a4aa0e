/* Attention of the reference path: see fallback.c. */
#include "fallback.h"

#include <math.h>

#include "cache.h"
#include "compressor.h"
#include "matmul.h"
#include "rope.h"
#include "round.h"
#include "vec.h"

static void rotate(const ds4_run *run, const ds4_layer *layer, float *x, int n, int pos, float sign) {
    const int n_pairs = run->model.rope_dim / 2;
    float c[DS4_MAX_PAIRS], s[DS4_MAX_PAIRS];
    ds4_rope_angles(run->model.freq[layer->ratio ? 1 : 0], n_pairs, pos, c, s);
    ds4_rope(x + n - 2 * n_pairs, n_pairs, c, s, sign);
}

/* ---------------------------------------------------------------- compressed entries */

typedef const float *rows_at_fn(const ds4_run *, const ds4_layer *, int item, int pos);

static void pool_window(const ds4_run *run, const ds4_layer *layer, int item, int w, rows_at_fn *rows_at, int width,
                        int dim, const float *norm, float *entry) {
    const int first = ds4_window_first(layer->ratio, w), end = layer->ratio * (w + 1);
    for (int c = 0; c < dim; c++) {
        float top = -INFINITY, total = 0.0f, sum = 0.0f;
        for (int pos = first; pos < end; pos++) {
            const float g = rows_at(run, layer, item, pos)[width + ds4_window_half(layer->ratio, w, pos, dim) + c];
            if (g > top) top = g;
        }
        for (int pos = first; pos < end; pos++) {
            const float *k = rows_at(run, layer, item, pos) + ds4_window_half(layer->ratio, w, pos, dim) + c;
            const float weight = expf(k[width] - top);
            total += weight;
            sum += weight * *k;
        }
        entry[c] = sum / total;
    }
    ds4_rms_norm(run->leaf, entry, norm, dim, run->model.rms_eps, entry);
    rotate(run, layer, entry, dim, layer->ratio * w, 1.0f);
}

/* Compressor rows of this row, and the entry that it completes, if any. */
static void compress(ds4_run *run, const ds4_layer *layer, int row) {
    const ds4_model *m = &run->model;
    const int pos = run->plan.pos[row], item = run->plan.row_item[row], n = layer->comp_width;
    const int w = pos / layer->ratio, is_last = (pos + 1) % layer->ratio == 0, slot = pos % layer->ratio;
    float *k = layer->step_comp + (size_t)row * 2 * (size_t)n, *entry = run->work.thread_pool;
    ds4_fallback_matvec(run, &layer->mat[M_COMP_KV], run->work.xn, k);
    ds4_fallback_matvec(run, &layer->mat[M_COMP_GATE], run->work.xn, k + n);
    for (int c = 0; c < n; c++) k[n + c] += layer->vec[V_COMP_APE][slot * n + c];
    if (is_last) {
        pool_window(run, layer, item, w, ds4_comp_at, n, m->head_dim, layer->vec[V_COMP_NORM], entry);
        if (run->cache.roundings) ds4_round_latent(entry, m->head_dim, m->head_dim - m->rope_dim);
        ds4_store_row(run, ds4_entry_at(run, layer, item, w), entry, m->head_dim);
    }
    if (layer->ratio != DS4_CSA) return;
    const int n_index = 2 * m->index_dim;
    k = layer->step_index_comp + (size_t)row * 2 * (size_t)n_index;
    ds4_fallback_matvec(run, &layer->mat[M_IX_COMP_KV], run->work.xn, k);
    ds4_fallback_matvec(run, &layer->mat[M_IX_COMP_GATE], run->work.xn, k + n_index);
    for (int c = 0; c < n_index; c++) k[n_index + c] += layer->vec[V_IX_COMP_APE][slot * n_index + c];
    if (is_last) {
        pool_window(run, layer, item, w, ds4_index_comp_at, n_index, m->index_dim, layer->vec[V_IX_COMP_NORM], entry);
        if (run->cache.roundings) {
            ds4_round_index(entry, m->index_dim);
            ds4_round_half(entry, m->index_dim);
        }
        ds4_store_row(run, ds4_key_at(run, layer, item, w), entry, m->index_dim);
    }
}

static float index_score(const ds4_run *run, const ds4_layer *layer, int item, int w) {
    const int dim = run->model.index_dim;
    const float *key = ds4_load_row(run, ds4_key_at(run, layer, item, w), run->work.thread_rows, dim);
    float score = 0.0f;
    for (int h = 0; h < run->model.index_heads; h++) {
        const float product = ds4_dot(run->leaf, key, run->work.iq + (size_t)h * (size_t)dim, dim);
        score += run->work.ia[h] * (product > 0.0f ? product : 0.0f);
    }
    return score == score ? score : -INFINITY;
}

/* Fills work.selected with the entries a row attends to, ascending; returns their number, or -1 for all. */
static int select_entries(ds4_run *run, const ds4_layer *layer, int row) {
    const ds4_model *m = &run->model;
    const int pos = run->plan.pos[row], n = (pos + 1) / DS4_CSA, top_k = m->index_top_k;
    float *best = run->work.index_scores; /* descending; of equal scores the lower entry first */
    int32_t *entry = run->work.selected;
    if (n <= top_k) return -1;
    ds4_fallback_matvec(run, &layer->mat[M_IX_Q_B], run->work.qr, run->work.iq);
    ds4_fallback_matvec(run, &layer->mat[M_IX_PROJ], run->work.xn, run->work.ia);
    for (int h = 0; h < m->index_heads; h++) {
        float *query = run->work.iq + (size_t)h * (size_t)m->index_dim;
        rotate(run, layer, query, m->index_dim, pos, 1.0f);
        if (run->cache.roundings) ds4_round_index(query, m->index_dim);
    }
    for (int w = 0, n_best = 0; w < n; w++) {
        const float score = index_score(run, layer, run->plan.row_item[row], w);
        int at = n_best < top_k ? n_best++ : top_k;
        if (at == top_k && !(score > best[--at])) continue;
        for (; at > 0 && score > best[at - 1]; at--) {
            best[at] = best[at - 1];
            entry[at] = entry[at - 1];
        }
        best[at] = score;
        entry[at] = w;
    }
    for (int i = 1; i < top_k; i++) {
        const int32_t moving = entry[i];
        int at = i;
        for (; at > 0 && entry[at - 1] > moving; at--) entry[at] = entry[at - 1];
        entry[at] = moving;
    }
    return top_k;
}

/* ---------------------------------------------------------------- attention */

static const float *row_seen(const ds4_run *run, const ds4_layer *layer, int item, int first, int n_raw,
                             const int32_t *selected, int t) {
    const uint8_t *at = t < n_raw ? ds4_latent_at(run, layer, item, first + t)
                                  : ds4_entry_at(run, layer, item, selected ? selected[t - n_raw] : t - n_raw);
    return ds4_load_row(run, at, run->work.thread_rows, run->model.head_dim);
}

static void attend_head(const ds4_run *run, const ds4_layer *layer, int row, int head, int n_selected) {
    const int dim = run->model.head_dim, pos = run->plan.pos[row], item = run->plan.row_item[row];
    const int n_raw = pos + 1 < run->model.window ? pos + 1 : run->model.window, first = pos + 1 - n_raw;
    const int n_all = layer->ratio ? (pos + 1) / layer->ratio : 0, n = n_raw + (n_selected < 0 ? n_all : n_selected);
    const int32_t *selected = n_selected < 0 ? NULL : run->work.selected;
    const float scale = (float)(1.0 / sqrt((double)dim)), sink = layer->vec[V_SINKS][head];
    float *q = run->work.q + (size_t)head * (size_t)dim, *weight = run->work.thread_scores, top = sink, total = 0.0f;
    for (int t = 0; t < n; t++) {
        weight[t] = ds4_dot(run->leaf, row_seen(run, layer, item, first, n_raw, selected, t), q, dim) * scale;
        if (weight[t] > top) top = weight[t];
    }
    for (int t = 0; t < n; t++) {
        weight[t] = expf(weight[t] - top);
        total += weight[t];
    }
    total += expf(sink - top);
    for (int c = 0; c < dim; c++) q[c] = 0.0f; /* from here on q is the output */
    for (int t = 0; t < n; t++) {
        const float *seen = row_seen(run, layer, item, first, n_raw, selected, t);
        for (int c = 0; c < dim; c++) q[c] += weight[t] * seen[c];
    }
    for (int c = 0; c < dim; c++) q[c] /= total;
    rotate(run, layer, q, dim, pos, -1.0f);
}

void ds4_fallback_attention(ds4_run *run, const ds4_layer *layer, int row) {
    const ds4_model *m = &run->model;
    const int pos = run->plan.pos[row], dim = m->head_dim, group_in = m->n_heads / m->o_groups * dim;
    float *kv = run->work.kv;
    ds4_fallback_matvec(run, &layer->mat[M_Q_A], run->work.xn, run->work.qr_raw);
    ds4_rms_norm(run->leaf, run->work.qr_raw, layer->vec[V_Q_A_NORM], m->q_lora, m->rms_eps, run->work.qr);
    ds4_fallback_matvec(run, &layer->mat[M_KV], run->work.xn, kv);
    ds4_rms_norm(run->leaf, kv, layer->vec[V_KV_NORM], dim, m->rms_eps, kv);
    rotate(run, layer, kv, dim, pos, 1.0f);
    if (run->cache.roundings) ds4_round_latent(kv, dim, dim - m->rope_dim);
    ds4_store_row(run, layer->step_latent + (size_t)row * (size_t)dim * run->cache.row_item, kv, dim);
    if (layer->ratio) compress(run, layer, row);
    const int n_selected = layer->ratio == DS4_CSA ? select_entries(run, layer, row) : -1;
    ds4_fallback_matvec(run, &layer->mat[M_Q_B], run->work.qr, run->work.q);
    for (int h = 0; h < m->n_heads; h++) {
        float *q = run->work.q + (size_t)h * (size_t)dim;
        ds4_rms_norm(run->leaf, q, NULL, dim, m->rms_eps, q);
        rotate(run, layer, q, dim, pos, 1.0f);
        attend_head(run, layer, row, h, n_selected);
    }
    for (int g = 0; g < m->o_groups; g++) {
        const ds4_mat part = ds4_mat_rows(&layer->mat[M_O_A], g * m->o_lora, m->o_lora);
        ds4_fallback_matvec(run, &part, run->work.q + (size_t)g * (size_t)group_in, run->work.low + g * m->o_lora);
    }
    ds4_fallback_matvec(run, &layer->mat[M_O_B], run->work.low, run->work.y);
}
