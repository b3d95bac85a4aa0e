/* The inner loops that have several compiled versions, one per instruction set, chosen at run time.
 *
 * Every version gives the same bits: products and sums are separate IEEE operations (no contraction), and the order
 * of every sum is part of the definition below, not of the version. A dot product of n terms is
 *
 *     lane[j] = ((0 + a[j]*b[j]) + a[j+16]*b[j+16]) + ...      16 lanes, k = j mod 16, ascending
 *     8 sums lane[j] + lane[j+8], then 4, then 2, then 1
 *
 * whatever the number of rows on either side and wherever a row lies in a tile. That is what makes a session's
 * logits independent of its neighbours. */
#ifndef DS4_LEAF_H
#define DS4_LEAF_H

#include <stdint.h>

enum ds4_dtype {
    DS4_F32,
    DS4_F16,
    DS4_BF16,
    DS4_Q8_0,
    DS4_Q4_0,
    DS4_Q4_K,
    DS4_Q5_K,
    DS4_Q6_K,
    DS4_Q2_K,
    DS4_IQ2_XXS,
    DS4_MXFP4,
    DS4_N_DTYPES
};

/* Tables that belong to a file format; the caller supplies them. */
typedef struct {
    float iq2_xxs[256][8];      /* magnitudes */
    float iq2_xxs_sign[128][8]; /* +1 or -1: the bits of a sign code and, eighth, their parity */
} ds4_tables;

typedef void ds4_decode_fn(const uint8_t *row, float *out, int n, const ds4_tables *tables);

typedef struct {
    const char *name;
    /* y[j][i] = w[i] . x[j] over n values, i < n_w, j < n_x */
    void (*dots)(const float *const *w, int n_w, const float *const *x, int n_x, int n, float *const *y);
    /* y[j][c] += weight[j][i] * row[i][c], i ascending, c < n: the second half of attention */
    void (*weigh)(const float *const *row, int n_row, const float *const *weight, int n_y, int n, float *const *y);
    ds4_decode_fn *decode[DS4_N_DTYPES];
} ds4_leaf;

/* Fill the sign table, which follows from its definition. */
void ds4_fill_signs(ds4_tables *tables);

/* The versions this machine can run, the plainest first, NULL-terminated; and the last of them. */
const ds4_leaf *const *ds4_leaf_levels(void);
const ds4_leaf *ds4_leaf_best(void);

static inline float ds4_dot(const ds4_leaf *leaf, const float *a, const float *b, int n) {
    float result, *y = &result;
    leaf->dots(&a, 1, &b, 1, n, &y);
    return result;
}

#endif
