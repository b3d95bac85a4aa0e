/* Sizes of the work buffers. */
#ifndef DS4_WORK_H
#define DS4_WORK_H

#include "model.h"

/* Cut `memory` (64-byte aligned) into the buffers of run->work for the sizes in run->model; returns the bytes needed.
 * With memory NULL only the sum is computed. */
size_t ds4_work_carve(ds4_run *run, uint8_t *memory, int max_rows, int context, int n_threads);

#endif
