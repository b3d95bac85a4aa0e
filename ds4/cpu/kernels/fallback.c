/* The reference path: one row of one item through the whole model, in plain loops.
 *
 * It shares with the fast path only the leaf helpers (row decoders, dot product, norm, rotation, roundings), the
 * addresses of cached rows and the order of every sum, so that both must give the same bits. Where the fast path
 * groups, tiles and shares, this one does the next thing the model description says. Work buffers: row 0. */
#include "fallback.h"

#include <math.h>
#include <string.h>

#include "forward.h"
#include "matmul.h"
#include "vec.h"

typedef struct {
    const ds4_mat *mat;
    const float *x;
    float *y;
} product;

static void product_row(ds4_run *run, const void *arg, int i, int thread) {
    const product *p = arg;
    float *weights = run->work.thread_weights + (size_t)thread * run->work.decode_floats;
    run->leaf->decode[p->mat->dtype](p->mat->data + (size_t)i * p->mat->row_bytes, weights, p->mat->n_in,
                                     &run->model.tables);
    p->y[i] = ds4_dot(run->leaf, weights, p->x, p->mat->n_in);
}

void ds4_fallback_matvec(ds4_run *run, const ds4_mat *mat, const float *x, float *y) {
    const product p = {mat, x, y};
    ds4_parallel(run, product_row, &p, mat->n_out, (size_t)mat->n_in * (size_t)mat->n_out > DS4_SHARED_WORK);
}

/* ---------------------------------------------------------------- hyper-connections */

typedef struct {
    float pre[DS4_MAX_STREAMS], post[DS4_MAX_STREAMS], c[DS4_MAX_STREAMS][DS4_MAX_STREAMS];
} coefs;

static void sinkhorn(float c[DS4_MAX_STREAMS][DS4_MAX_STREAMS], int n, int iters, float eps) {
    for (int half = 0; half < 2 * iters - 1; half++) { /* columns, then (rows, columns) again and again */
        const int is_column = half % 2 == 0;
        for (int i = 0; i < n; i++) {
            float sum = 0.0f;
            for (int j = 0; j < n; j++) sum += is_column ? c[j][i] : c[i][j];
            for (int j = 0; j < n; j++) *(is_column ? &c[j][i] : &c[i][j]) /= sum + eps;
        }
    }
}

static void mix_streams(const ds4_run *run, const float *weight, float *x) {
    for (int k = 0; k < run->model.hidden; k++) {
        float sum = weight[0] * run->work.streams[k];
        for (int i = 1; i < run->model.n_streams; i++)
            sum += weight[i] * run->work.streams[(size_t)i * (size_t)run->model.hidden + (size_t)k];
        x[k] = sum;
    }
}

/* Coefficients of a sub-layer and its normed input, in work.xn. */
static void before(ds4_run *run, const ds4_mat *fn, const float *scale, const float *base, const float *norm,
                   coefs *out) {
    const ds4_model *m = &run->model;
    const int n = m->n_streams;
    float *z = run->work.hc_z;
    ds4_rms_norm(run->leaf, run->work.streams, NULL, n * m->hidden, m->rms_eps, run->work.flat);
    ds4_fallback_matvec(run, fn, run->work.flat, z);
    for (int i = 0; i < n; i++) {
        out->pre[i] = ds4_sigmoid(z[i] * scale[0] + base[i]) + m->hc_eps;
        out->post[i] = 2.0f * ds4_sigmoid(z[n + i] * scale[1] + base[n + i]);
    }
    for (int i = 0; i < n; i++) {
        float top = -INFINITY, sum = 0.0f;
        for (int j = 0; j < n; j++) {
            out->c[i][j] = z[2 * n + i * n + j] * scale[2] + base[2 * n + i * n + j];
            if (out->c[i][j] > top) top = out->c[i][j];
        }
        for (int j = 0; j < n; j++) {
            out->c[i][j] = expf(out->c[i][j] - top);
            sum += out->c[i][j];
        }
        for (int j = 0; j < n; j++) out->c[i][j] = out->c[i][j] / sum + m->hc_eps;
    }
    sinkhorn(out->c, n, m->sinkhorn_iters, m->hc_eps);
    mix_streams(run, out->pre, run->work.x);
    ds4_rms_norm(run->leaf, run->work.x, norm, m->hidden, m->rms_eps, run->work.xn);
}

static void after(const ds4_run *run, const coefs *coef) {
    const size_t hidden = (size_t)run->model.hidden;
    const int n = run->model.n_streams;
    for (size_t k = 0; k < hidden; k++) {
        float fresh[DS4_MAX_STREAMS];
        for (int i = 0; i < n; i++) {
            fresh[i] = coef->post[i] * run->work.y[k];
            for (int j = 0; j < n; j++) fresh[i] += coef->c[j][i] * run->work.streams[(size_t)j * hidden + k];
        }
        for (int i = 0; i < n; i++) run->work.streams[(size_t)i * hidden + k] = fresh[i];
    }
}

/* ---------------------------------------------------------------- experts and the row itself */

static void expert(ds4_run *run, const ds4_layer *layer, const ds4_mat *gate, const ds4_mat *up,
                   const ds4_mat *down) {
    ds4_fallback_matvec(run, gate, run->work.xn, run->work.gate);
    ds4_fallback_matvec(run, up, run->work.xn, run->work.up);
    for (int k = 0; k < gate->n_out; k++)
        run->work.gate[k] = ds4_swiglu(run->work.gate[k], run->work.up[k], layer->clamp);
    ds4_fallback_matvec(run, down, run->work.gate, run->work.expert_out);
}

static void route(ds4_run *run, const ds4_layer *layer, int token) {
    const ds4_model *m = &run->model;
    const float *bias = layer->vec[V_ROUTER_BIAS];
    float *prob = run->work.router, sum = 0.0f;
    int32_t *chosen = run->work.route;
    ds4_fallback_matvec(run, &layer->mat[M_ROUTER], run->work.xn, prob);
    for (int e = 0; e < m->n_experts; e++) prob[e] = ds4_sqrt_softplus(prob[e]);
    for (int slot = 0; slot < m->n_used; slot++) {
        if (layer->tid2eid) {
            memcpy(chosen + slot, layer->tid2eid + 4 * ((size_t)token * (size_t)m->n_used + (size_t)slot), 4);
        } else {
            int best = -1;
            for (int e = 0; e < m->n_experts; e++) {
                int is_taken = 0;
                for (int i = 0; i < slot; i++) is_taken |= chosen[i] == e;
                if (is_taken) continue;
                if (best < 0 || prob[e] + (bias ? bias[e] : 0.0f) > prob[best] + (bias ? bias[best] : 0.0f)) best = e;
            }
            chosen[slot] = best;
        }
        sum += prob[chosen[slot]];
    }
    for (int slot = 0; slot < m->n_used; slot++)
        run->work.route_weight[slot] = prob[chosen[slot]] / (sum + 1e-20f) * m->expert_scale;
}

static void experts(ds4_run *run, const ds4_layer *layer, int row) {
    const ds4_model *m = &run->model;
    route(run, layer, run->plan.tokens[row]);
    for (int slot = 0; slot < m->n_used; slot++) {
        const int e = run->work.route[slot];
        const ds4_mat gate = ds4_mat_rows(&layer->mat[M_GATE_EXPS], e * m->ffn_width, m->ffn_width);
        const ds4_mat up = ds4_mat_rows(&layer->mat[M_UP_EXPS], e * m->ffn_width, m->ffn_width);
        const ds4_mat down = ds4_mat_rows(&layer->mat[M_DOWN_EXPS], e * m->hidden, m->hidden);
        expert(run, layer, &gate, &up, &down);
        for (int k = 0; k < m->hidden; k++) {
            const float part = run->work.route_weight[slot] * run->work.expert_out[k];
            run->work.y[k] = slot ? run->work.y[k] + part : part;
        }
    }
    expert(run, layer, &layer->mat[M_GATE_SH], &layer->mat[M_UP_SH], &layer->mat[M_DOWN_SH]);
    for (int k = 0; k < m->hidden; k++) run->work.y[k] += run->work.expert_out[k];
}

static void logits(ds4_run *run, int row) {
    const ds4_model *m = &run->model;
    float weight[DS4_MAX_STREAMS];
    for (int j = 0; j < run->plan.n_logit_rows; j++) {
        if (run->plan.logit_rows[j] != row) continue;
        ds4_rms_norm(run->leaf, run->work.streams, NULL, m->n_streams * m->hidden, m->rms_eps, run->work.flat);
        ds4_fallback_matvec(run, &m->output_hc, run->work.flat, run->work.hc_z);
        for (int i = 0; i < m->n_streams; i++)
            weight[i] = ds4_sigmoid(run->work.hc_z[i] * m->output_hc_scale[0] + m->output_hc_base[i]) + m->hc_eps;
        mix_streams(run, weight, run->work.x);
        ds4_rms_norm(run->leaf, run->work.x, m->output_norm, m->hidden, m->rms_eps, run->work.xn);
        ds4_fallback_matvec(run, &m->output, run->work.xn, run->work.logits + (size_t)j * (size_t)m->vocab);
    }
}

static int forward_row(ds4_run *run, int row) {
    const ds4_model *m = &run->model;
    coefs coef;
    for (int i = 0; i < m->n_streams; i++)
        run->leaf->decode[m->embedding.dtype](
            m->embedding.data + (size_t)run->plan.tokens[row] * m->embedding.row_bytes,
            run->work.streams + (size_t)i * (size_t)m->hidden, m->hidden, &m->tables);
    for (int i = 0; i < m->n_layers; i++) {
        const ds4_layer *layer = m->layer + i;
        if (run->poll(run->poll_arg)) return DS4_STOPPED;
        before(run, &layer->mat[M_HC_ATTN], layer->vec[V_HC_ATTN_SCALE], layer->vec[V_HC_ATTN_BASE],
               layer->vec[V_ATTN_NORM], &coef);
        ds4_fallback_attention(run, layer, row);
        after(run, &coef);
        before(run, &layer->mat[M_HC_FFN], layer->vec[V_HC_FFN_SCALE], layer->vec[V_HC_FFN_BASE],
               layer->vec[V_FFN_NORM], &coef);
        experts(run, layer, row);
        after(run, &coef);
    }
    logits(run, row);
    return DS4_OK;
}

int ds4_forward_row(ds4_run *run, int row) { return ds4_pool_step(run->pool, run, forward_row, row); }
