/* Mixture of experts (model description, "Mixture of experts").
 *
 * Rows are grouped by expert, so that each expert's weights are decoded once per step for all rows that chose it.
 * A row's outputs are added in its own router's order, the shared expert last: the grouping changes no bit. */
#include "moe.h"

#include "half.h"
#include "matmul.h"
#include "vec.h"

/* The n_used experts with the largest probability + bias, best first; a tie goes to the lower index. */
static void choose(const float *prob, const float *bias, int n_experts, int n_used, int32_t *out) {
    for (int slot = 0; slot < n_used; slot++) {
        float best_score = 0.0f;
        int best = -1; /* the first free expert is always taken, so that NaN scores cannot leave a slot empty */
        for (int e = 0; e < n_experts; e++) {
            const float score = bias ? prob[e] + bias[e] : prob[e];
            int is_free = 1;
            for (int i = 0; i < slot; i++) is_free &= out[i] != e;
            if (is_free && (best < 0 || score > best_score)) {
                best = e;
                best_score = score;
            }
        }
        out[slot] = best;
    }
}

static void route_row(ds4_run *run, const void *arg, int row, int thread) {
    const ds4_model *m = &run->model;
    const ds4_layer *layer = arg;
    float *prob = run->work.router + (size_t)row * (size_t)m->n_experts;
    int32_t *route = run->work.route + (size_t)row * (size_t)m->n_used;
    float *weight = run->work.route_weight + (size_t)row * (size_t)m->n_used, sum = 0.0f;
    (void)thread;
    for (int e = 0; e < m->n_experts; e++) prob[e] = ds4_sqrt_softplus(prob[e]);
    if (layer->tid2eid) /* hash layers: the token decides, the router only weighs */
        memcpy(route, layer->tid2eid + (size_t)run->plan.tokens[row] * (size_t)m->n_used * sizeof(int32_t),
               (size_t)m->n_used * sizeof(int32_t));
    else
        choose(prob, layer->vec[V_ROUTER_BIAS], m->n_experts, m->n_used, route);
    for (int i = 0; i < m->n_used; i++) sum += prob[route[i]];
    for (int i = 0; i < m->n_used; i++) weight[i] = prob[route[i]] / (sum + 1e-20f) * m->expert_scale;
}

static int route_rows(ds4_run *run, const ds4_layer *layer) {
    const int n_rows = run->plan.n_rows;
    const ds4_job job = ds4_plain_job(layer->mat[M_ROUTER], run->work.xn, run->work.router, n_rows);
    if (ds4_matmul(run, &job, 1)) return DS4_STOPPED;
    ds4_parallel(run, route_row, layer, n_rows, n_rows >= DS4_MANY_ROWS);
    return DS4_OK;
}

/* Counting sort of (row, slot) pairs by expert; rows stay in ascending order within an expert. */
static void group_by_expert(ds4_run *run) {
    const ds4_work *work = &run->work;
    const int n_experts = run->model.n_experts, n_used = run->model.n_used, n_pairs = run->plan.n_rows * n_used;
    int32_t *start = work->expert_start;
    memset(start, 0, (size_t)(n_experts + 1) * sizeof *start);
    for (int i = 0; i < n_pairs; i++) start[work->route[i] + 1]++;
    for (int e = 0; e < n_experts; e++) start[e + 1] += start[e];
    for (int i = 0; i < n_pairs; i++) { /* start[e] walks to the start of e + 1 ... */
        const int at = start[work->route[i]]++;
        work->pair_row[at] = i / n_used;
        work->pair_out[at] = i;
    }
    memmove(start + 1, start, (size_t)n_experts * sizeof *start); /* ... and is put back */
    start[0] = 0;
}

/* Gate and up of every chosen expert and of the shared one: hidden rows in pair order, the shared ones behind. */
static int project_up(ds4_run *run, const ds4_layer *layer) {
    const ds4_model *m = &run->model;
    const ds4_work *work = &run->work;
    const int n_rows = run->plan.n_rows, width = m->ffn_width;
    const size_t shared = (size_t)n_rows * (size_t)m->n_used * (size_t)width;
    int n = 0;
    for (int e = 0; e < m->n_experts; e++) {
        const int first = work->expert_start[e], n_pairs = work->expert_start[e + 1] - first;
        if (n_pairs == 0) continue;
        ds4_job job = ds4_plain_job(ds4_mat_rows(&layer->mat[M_GATE_EXPS], e * width, width), work->xn,
                                    work->gate + (size_t)first * (size_t)width, n_pairs);
        job.x_rows = work->pair_row + first;
        work->jobs[n++] = job;
        job.mat = ds4_mat_rows(&layer->mat[M_UP_EXPS], e * width, width);
        job.y = work->up + (size_t)first * (size_t)width;
        work->jobs[n++] = job;
    }
    work->jobs[n++] = ds4_plain_job(layer->mat[M_GATE_SH], work->xn, work->gate + shared, n_rows);
    work->jobs[n++] = ds4_plain_job(layer->mat[M_UP_SH], work->xn, work->up + shared, n_rows);
    return ds4_matmul(run, work->jobs, n);
}

static void activate(ds4_run *run, const void *arg, int i, int thread) {
    const int width = run->model.ffn_width;
    const ds4_layer *layer = arg;
    float *gate = run->work.gate + (size_t)i * (size_t)width;
    const float *up = run->work.up + (size_t)i * (size_t)width;
    (void)thread;
    for (int k = 0; k < width; k++) gate[k] = ds4_swiglu(gate[k], up[k], layer->clamp);
}

/* Outputs lie in (row, slot) order, the shared expert's behind them. */
static int project_down(ds4_run *run, const ds4_layer *layer) {
    const ds4_model *m = &run->model;
    const ds4_work *work = &run->work;
    const int n_rows = run->plan.n_rows, width = m->ffn_width, hidden = m->hidden;
    const size_t shared = (size_t)n_rows * (size_t)m->n_used;
    int n = 0;
    for (int e = 0; e < m->n_experts; e++) {
        const int first = work->expert_start[e], n_pairs = work->expert_start[e + 1] - first;
        if (n_pairs == 0) continue;
        work->jobs[n] = ds4_plain_job(ds4_mat_rows(&layer->mat[M_DOWN_EXPS], e * hidden, hidden),
                                      work->gate + (size_t)first * (size_t)width, work->expert_out, n_pairs);
        work->jobs[n++].y_rows = work->pair_out + first;
    }
    work->jobs[n++] = ds4_plain_job(layer->mat[M_DOWN_SH], work->gate + shared * (size_t)width,
                                    work->expert_out + shared * (size_t)hidden, n_rows);
    return ds4_matmul(run, work->jobs, n);
}

static void combine(ds4_run *run, const void *arg, int row, int thread) {
    const ds4_work *work = &run->work;
    const size_t hidden = (size_t)run->model.hidden, n_used = (size_t)run->model.n_used;
    float *y = work->y + (size_t)row * hidden;
    const float *out = work->expert_out + (size_t)row * n_used * hidden;
    const float *shared = work->expert_out + ((size_t)run->plan.n_rows * n_used + (size_t)row) * hidden;
    const float *weight = work->route_weight + (size_t)row * n_used;
    (void)arg;
    (void)thread;
    for (size_t k = 0; k < hidden; k++) y[k] = weight[0] * out[k];
    for (size_t i = 1; i < n_used; i++)
        for (size_t k = 0; k < hidden; k++) y[k] += weight[i] * out[i * hidden + k];
    for (size_t k = 0; k < hidden; k++) y[k] += shared[k];
}

int ds4_moe(ds4_run *run, const ds4_layer *layer) {
    const int n_rows = run->plan.n_rows, n_hidden = n_rows * (run->model.n_used + 1);
    if (route_rows(run, layer)) return DS4_STOPPED;
    group_by_expert(run);
    if (project_up(run, layer)) return DS4_STOPPED;
    ds4_parallel(run, activate, layer, n_hidden, n_hidden >= 2 * DS4_MANY_ROWS);
    if (project_down(run, layer)) return DS4_STOPPED;
    ds4_parallel(run, combine, NULL, n_rows, n_rows >= DS4_MANY_ROWS);
    return DS4_OK;
}
