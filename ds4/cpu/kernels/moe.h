/* Mixture of experts: the feed-forward sub-layer. */
#ifndef DS4_MOE_H
#define DS4_MOE_H

#include "model.h"

/* work.xn -> work.y, for all rows of the step; leaves the routing in work.route / work.route_weight. */
int ds4_moe(ds4_run *run, const ds4_layer *layer);

#endif
