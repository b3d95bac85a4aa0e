// The experts' products on int8 activations.
#define DS4_EXPERTS8
#include "experts.cuh"
