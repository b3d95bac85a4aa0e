/* The attention sub-layer: projections, cache rows, attention over window and entries, output projection. */
#ifndef DS4_ATTENTION_H
#define DS4_ATTENTION_H

#include "model.h"

/* work.xn -> work.y, for all rows of the step. Writes the layer's step buffers and completed entries. */
int ds4_attention(ds4_run *run, const ds4_layer *layer);

/* What a row sees: raw positions [first_raw, pos], then entries. */
typedef struct {
    int item, first_raw, n_raw, n_entries;
    const int32_t *selected; /* NULL: entries 0 .. n_entries - 1 */
} ds4_view;

ds4_view ds4_view_of(const ds4_run *run, const ds4_layer *layer, int row);

/* The t-th visible row in the cache dtype, t < n_raw + n_entries: raw rows first, both in ascending position. */
const uint8_t *ds4_visible_at(const ds4_run *run, const ds4_layer *layer, const ds4_view *view, int t);

#endif
