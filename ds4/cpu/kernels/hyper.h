/* Hyper-connections: n residual streams, mixed into one input before a sub-layer and updated with its output. */
#ifndef DS4_HYPER_H
#define DS4_HYPER_H

#include "model.h"

/* Streams of all rows -> work.x (one mixed row each), work.xn (x normed with `norm`), work.hc_coef (post and C). */
int ds4_hc_pre(ds4_run *run, const ds4_mat *fn, const float *scale, const float *base, const float *norm);

/* Streams <- post * work.y + transpose(C) streams. */
void ds4_hc_post(ds4_run *run);

/* Streams of the rows that want logits -> work.xn, normed for the output matrix: row j is logit row j. */
int ds4_hc_head(ds4_run *run);

#endif
