// The experts' products on float activations, one kernel per dtype.
#include "experts.cuh"
