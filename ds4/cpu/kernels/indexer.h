/* The indexer of CSA layers: which compressed entries a row attends to. */
#ifndef DS4_INDEXER_H
#define DS4_INDEXER_H

#include "model.h"

/* True when some row of the step sees more entries than the indexer keeps. */
int ds4_index_needed(const ds4_run *run);

/* Fill work.selected / work.n_selected for all rows from the index queries (work.iq, rotated) and head weights
 * (work.ia). Entries come in ascending order; n_selected = -1 means all visible ones. */
int ds4_index_select(ds4_run *run, const ds4_layer *layer);

/* All visible entries for every row: layers and steps where nothing is dropped. */
void ds4_index_all(ds4_run *run);

#endif
