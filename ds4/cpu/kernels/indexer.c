/* The indexer (model description, "Indexer (CSA only)"): score_w = sum over heads of a_h * relu(iq_h . K_w).
 *
 * The published factor 1 / sqrt(dim * heads) is left out: scores are only compared with each other. */
#include "indexer.h"

#include <math.h>

#include "cache.h"

#define BLOCK (DS4_PAGE_TOKENS / DS4_CSA) /* entries of one page: one task */
#define HEADS 16                          /* heads per call of the leaf function */

static int visible(const ds4_run *run, int row) { return (run->plan.pos[row] + 1) / DS4_CSA; }

int ds4_index_needed(const ds4_run *run) {
    for (int row = 0; row < run->plan.n_rows; row++)
        if (visible(run, row) > run->model.index_top_k) return 1;
    return 0;
}

void ds4_index_all(ds4_run *run) {
    for (int row = 0; row < run->plan.n_rows; row++) run->work.n_selected[row] = -1;
}

/* Scores of the entries [first, first + n) of a row, n <= BLOCK. */
static void score(const ds4_run *run, const ds4_layer *layer, int row, int first, int n, float *out,
                  int thread) {
    const ds4_model *m = &run->model;
    const int dim = m->index_dim, item = run->plan.row_item[row];
    const float *queries = run->work.iq + (size_t)row * (size_t)m->index_heads * (size_t)dim;
    const float *weight = run->work.ia + (size_t)row * (size_t)m->index_heads;
    float *room = run->work.thread_rows + (size_t)thread * run->work.thread_rows_floats;
    const float *keys[BLOCK], *x[HEADS];
    float products[HEADS][BLOCK], *y[HEADS];
    for (int i = 0; i < n; i++) {
        keys[i] = ds4_load_row(run, ds4_key_at(run, layer, item, first + i), room + (size_t)i * (size_t)dim, dim);
        out[i] = 0.0f;
    }
    for (int h0 = 0; h0 < m->index_heads; h0 += HEADS) {
        const int n_h = m->index_heads - h0 < HEADS ? m->index_heads - h0 : HEADS;
        for (int h = 0; h < n_h; h++) {
            x[h] = queries + (size_t)(h0 + h) * (size_t)dim;
            y[h] = products[h];
        }
        run->leaf->dots(keys, n, x, n_h, dim, y);
        for (int h = 0; h < n_h; h++)
            for (int i = 0; i < n; i++) out[i] += weight[h0 + h] * (products[h][i] > 0.0f ? products[h][i] : 0.0f);
    }
}

/* Unsigned integers in the order of the scores; both zeros are equal, NaN counts as -infinity. */
static uint32_t rank(float score) {
    const uint32_t bits = ds4_float_to_bits(score == score ? score + 0.0f : -INFINITY);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The k best of n, ascending; a tie goes to the lower index. One histogram per byte finds the k-th rank. */
static void select_best(const float *scores, int n, int k, int32_t *out) {
    uint32_t found = 0, mask = 0;
    int need = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int count[256] = {0}, digit = 255;
        for (int i = 0; i < n; i++) {
            const uint32_t r = rank(scores[i]);
            if ((r & mask) == found) count[r >> shift & 255]++;
        }
        while (count[digit] < need) need -= count[digit--];
        found |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    for (int i = 0, taken = 0; taken < k; i++) {
        const uint32_t r = rank(scores[i]);
        if (r > found || (r == found && need-- > 0)) out[taken++] = i;
    }
}

typedef struct {
    const ds4_layer *layer;
    int32_t row[DS4_SCORE_ROWS];
    int n_rows, n_blocks;
} group;

static float *scores_of(const ds4_run *run, int j) {
    return run->work.index_scores + (size_t)j * (size_t)run->work.max_entries;
}

static void score_task(ds4_run *run, const void *arg, int task, int thread) {
    const group *g = arg;
    const int j = task / g->n_blocks, first = task % g->n_blocks * BLOCK, n = visible(run, g->row[j]) - first;
    if (n > 0) score(run, g->layer, g->row[j], first, n < BLOCK ? n : BLOCK, scores_of(run, j) + first, thread);
}

static void select_task(ds4_run *run, const void *arg, int task, int thread) {
    const group *g = arg;
    const int row = g->row[task], top_k = run->model.index_top_k;
    (void)thread;
    select_best(scores_of(run, task), visible(run, row), top_k, run->work.selected + (size_t)row * (size_t)top_k);
    run->work.n_selected[row] = top_k;
}

/* The next rows whose entries must be chosen, as many as a poll interval has room for; returns the row behind. */
static int next_group(const ds4_run *run, int row, group *g) {
    size_t work = 0;
    g->n_rows = g->n_blocks = 0;
    for (; row < run->plan.n_rows && g->n_rows < run->work.score_rows && work < DS4_POLL_WORK; row++) {
        const int n = visible(run, row), n_blocks = (n + BLOCK - 1) / BLOCK;
        if (n <= run->model.index_top_k) continue;
        g->row[g->n_rows++] = row;
        if (n_blocks > g->n_blocks) g->n_blocks = n_blocks;
        work += (size_t)n * (size_t)run->model.index_heads * (size_t)run->model.index_dim;
    }
    return row;
}

int ds4_index_select(ds4_run *run, const ds4_layer *layer) {
    group g = {.layer = layer};
    ds4_index_all(run);
    for (int row = 0; row < run->plan.n_rows;) {
        row = next_group(run, row, &g);
        if (run->poll(run->poll_arg)) return DS4_STOPPED;
        ds4_parallel(run, score_task, &g, g.n_rows * g.n_blocks, 1);
        ds4_parallel(run, select_task, &g, g.n_rows, 1);
    }
    return DS4_OK;
}
