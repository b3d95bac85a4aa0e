/* Products of matrices in their file format with rows of activations. */
#ifndef DS4_MATMUL_H
#define DS4_MATMUL_H

#include "model.h"

/* y[row j] = mat @ x[row j] for j < n_rows. Rows may be picked through index lists (NULL: row j is row j). */
typedef struct ds4_job {
    ds4_mat mat;
    const float *x;
    size_t x_stride;
    const int32_t *x_rows;
    int n_rows;
    float *y;
    size_t y_stride;
    const int32_t *y_rows;
} ds4_job;

/* Rows [first, first + n_out) of a matrix, for example expert e: first = e * n_out. */
static inline ds4_mat ds4_mat_rows(const ds4_mat *mat, int first, int n_out) {
    ds4_mat part = *mat;
    part.data += (size_t)first * mat->row_bytes;
    part.n_out = n_out;
    return part;
}

/* A plain job over adjacent rows. */
static inline ds4_job ds4_plain_job(ds4_mat mat, const float *x, float *y, int n_rows) {
    const ds4_job job = {mat, x, (size_t)mat.n_in, NULL, n_rows, y, (size_t)mat.n_out, NULL};
    return job;
}

/* Run jobs that do not depend on each other. Each weight row is decoded once for all its activation rows.
 * Returns DS4_STOPPED when the poll said so. */
int ds4_matmul(ds4_run *run, const ds4_job *jobs, int n_jobs);

#endif
