/* A whole step. */
#ifndef DS4_FORWARD_H
#define DS4_FORWARD_H

#include "model.h"

/* All rows of run->plan together: step buffers, page slots of completed entries, work.logits.
 * Returns DS4_STOPPED when the poll said so; committed cache bytes are then as before. */
int ds4_forward(ds4_run *run);

/* One row of run->plan, simply (fallback.c): the reference for ds4_forward. Rows must come in ascending order. */
int ds4_forward_row(ds4_run *run, int row);

/* Move what later steps need from the step buffers into the rings of the slabs. Cannot fail. */
void ds4_publish(ds4_run *run);

#endif
