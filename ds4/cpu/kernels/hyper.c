/* Hyper-connections (model description, "Hyper-connections (mHC)"). */
#include "hyper.h"

#include <string.h>

#include "matmul.h"
#include "vec.h"

/* z -> pre | post | C in place of the order of the weights: n, n and n x n values. */
static void constrain(const float *z, const float *scale, const float *base, int n, int iters, float eps, float *out) {
    float *c = out + 2 * n;
    for (int i = 0; i < n; i++) {
        out[i] = ds4_sigmoid(z[i] * scale[0] + base[i]) + eps;
        out[n + i] = 2.0f * ds4_sigmoid(z[n + i] * scale[1] + base[n + i]);
    }
    for (int i = 0; i < n; i++) { /* softmax of every row */
        float *row = c + i * n, top, sum = 0.0f;
        for (int j = 0; j < n; j++) row[j] = z[2 * n + i * n + j] * scale[2] + base[2 * n + i * n + j];
        top = row[0];
        for (int j = 1; j < n; j++) top = row[j] > top ? row[j] : top;
        for (int j = 0; j < n; j++) sum += row[j] = expf(row[j] - top);
        for (int j = 0; j < n; j++) row[j] = row[j] / sum + eps;
    }
    for (int round = 0; round < iters; round++) { /* Sinkhorn; the first round has columns only */
        float sum[DS4_MAX_STREAMS];
        for (int i = 0; round && i < n; i++) {
            float total = 0.0f;
            for (int j = 0; j < n; j++) total += c[i * n + j];
            for (int j = 0; j < n; j++) c[i * n + j] /= total + eps;
        }
        for (int j = 0; j < n; j++) sum[j] = c[j];
        for (int i = 1; i < n; i++)
            for (int j = 0; j < n; j++) sum[j] += c[i * n + j];
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++) c[i * n + j] /= sum[j] + eps;
    }
}

/* out = sum_i weight[i] * streams[i], i ascending */
static void mix(const float *streams, const float *weight, int n, int hidden, float *out) {
    for (int k = 0; k < hidden; k++) out[k] = weight[0] * streams[k];
    for (int i = 1; i < n; i++) {
        const float *stream = streams + (size_t)i * (size_t)hidden;
        for (int k = 0; k < hidden; k++) out[k] += weight[i] * stream[k];
    }
}

/* Streams of a row (of a logit row in the head) -> work.flat, normed over all of them. */
static void flatten(const ds4_run *run, int row, int to) {
    const int all = run->model.n_streams * run->model.hidden;
    ds4_rms_norm(run->leaf, run->work.streams + (size_t)row * (size_t)all, NULL, all, run->model.rms_eps,
                 run->work.flat + (size_t)to * (size_t)all);
}

static void flatten_row(ds4_run *run, const void *arg, int row, int thread) {
    (void)arg;
    (void)thread;
    flatten(run, row, row);
}

typedef struct {
    const float *scale, *base, *norm;
} vectors;

static void mix_row(ds4_run *run, const void *arg, int row, int thread) {
    const ds4_model *m = &run->model;
    const ds4_work *work = &run->work;
    const vectors *v = arg;
    const int n = m->n_streams, n_z = (2 + n) * n;
    const size_t hidden = (size_t)m->hidden;
    float *coef = work->hc_coef + row * n_z, *x = work->x + (size_t)row * hidden;
    (void)thread;
    constrain(work->hc_z + row * n_z, v->scale, v->base, n, m->sinkhorn_iters, m->hc_eps, coef);
    mix(work->streams + (size_t)row * (size_t)n * hidden, coef, n, m->hidden, x);
    ds4_rms_norm(run->leaf, x, v->norm, m->hidden, m->rms_eps, work->xn + (size_t)row * hidden);
}

int ds4_hc_pre(ds4_run *run, const ds4_mat *fn, const float *scale, const float *base, const float *norm) {
    const int n_rows = run->plan.n_rows;
    const vectors v = {scale, base, norm};
    const ds4_job job = ds4_plain_job(*fn, run->work.flat, run->work.hc_z, n_rows);
    ds4_parallel(run, flatten_row, NULL, n_rows, n_rows >= DS4_MANY_ROWS);
    if (ds4_matmul(run, &job, 1)) return DS4_STOPPED;
    ds4_parallel(run, mix_row, &v, n_rows, n_rows >= DS4_MANY_ROWS);
    return DS4_OK;
}

#define CHANNELS 64 /* updated together, so that the old streams can stay where they are */

static void update(float *streams, const float *y, const float *post, const float *c, int n, int hidden) {
    float fresh[DS4_MAX_STREAMS][CHANNELS];
    for (int k0 = 0; k0 < hidden; k0 += CHANNELS) {
        const int n_k = hidden - k0 < CHANNELS ? hidden - k0 : CHANNELS;
        for (int i = 0; i < n; i++) {
            for (int k = 0; k < n_k; k++) fresh[i][k] = post[i] * y[k0 + k];
            for (int j = 0; j < n; j++) { /* the transpose: column i of C */
                const float *old = streams + (size_t)j * (size_t)hidden + k0, weight = c[j * n + i];
                for (int k = 0; k < n_k; k++) fresh[i][k] += weight * old[k];
            }
        }
        for (int i = 0; i < n; i++)
            memcpy(streams + (size_t)i * (size_t)hidden + k0, fresh[i], (size_t)n_k * sizeof(float));
    }
}

static void update_row(ds4_run *run, const void *arg, int row, int thread) {
    const int n = run->model.n_streams, hidden = run->model.hidden;
    const float *coef = run->work.hc_coef + row * (2 + n) * n;
    (void)arg;
    (void)thread;
    update(run->work.streams + (size_t)row * (size_t)n * (size_t)hidden, run->work.y + (size_t)row * (size_t)hidden,
           coef + n, coef + 2 * n, n, hidden);
}

void ds4_hc_post(ds4_run *run) {
    ds4_parallel(run, update_row, NULL, run->plan.n_rows, run->plan.n_rows >= DS4_MANY_ROWS);
}

static void flatten_logit_row(ds4_run *run, const void *arg, int j, int thread) {
    (void)arg;
    (void)thread;
    flatten(run, run->plan.logit_rows[j], j);
}

static void mix_logit_row(ds4_run *run, const void *arg, int j, int thread) {
    const ds4_model *m = &run->model;
    const int n = m->n_streams;
    const size_t hidden = (size_t)m->hidden, row = (size_t)run->plan.logit_rows[j];
    const float *z = run->work.hc_z + j * n;
    float weight[DS4_MAX_STREAMS], *x = run->work.x + (size_t)j * hidden;
    (void)arg;
    (void)thread;
    for (int i = 0; i < n; i++)
        weight[i] = ds4_sigmoid(z[i] * m->output_hc_scale[0] + m->output_hc_base[i]) + m->hc_eps;
    mix(run->work.streams + row * (size_t)n * hidden, weight, n, m->hidden, x);
    ds4_rms_norm(run->leaf, x, m->output_norm, m->hidden, m->rms_eps, run->work.xn + (size_t)j * hidden);
}

int ds4_hc_head(ds4_run *run) {
    const int n_rows = run->plan.n_logit_rows;
    const ds4_job job = ds4_plain_job(run->model.output_hc, run->work.flat, run->work.hc_z, n_rows);
    ds4_parallel(run, flatten_logit_row, NULL, n_rows, n_rows >= DS4_MANY_ROWS);
    if (ds4_matmul(run, &job, 1)) return DS4_STOPPED;
    ds4_parallel(run, mix_logit_row, NULL, n_rows, n_rows >= DS4_MANY_ROWS);
    return DS4_OK;
}
