/* Inside the reference path. */
#ifndef DS4_FALLBACK_H
#define DS4_FALLBACK_H

#include "model.h"

/* y = mat @ x, one weight row after the other. */
void ds4_fallback_matvec(ds4_run *run, const ds4_mat *mat, const float *x, float *y);

/* The attention sub-layer of one row: work.xn -> work.y. */
void ds4_fallback_attention(ds4_run *run, const ds4_layer *layer, int row);

#endif
