/* Compressors: r consecutive tokens become one cache entry. */
#ifndef DS4_COMPRESSOR_H
#define DS4_COMPRESSOR_H

#include "model.h"

/* Add ape to the g rows that this step has put into the step buffers of a compressed layer. */
void ds4_add_ape(ds4_run *run, const ds4_layer *layer);

/* Compute every entry (and index key) whose window ends in this step and write it into its page slot. */
void ds4_complete_entries(ds4_run *run, const ds4_layer *layer);

/* The positions [first, end) whose rows entry w pools, and the channel offset of a position's half. CSA windows
 * overlap: first halves of window w - 1, second halves of window w; window 0 has no predecessor. */
static inline int ds4_window_first(int ratio, int w) { return ratio * (ratio == DS4_CSA && w > 0 ? w - 1 : w); }
static inline int ds4_window_half(int ratio, int w, int pos, int dim) {
    return ratio == DS4_CSA && pos >= ratio * w ? dim : 0;
}

#endif
