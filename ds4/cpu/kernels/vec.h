/* Small vector and scalar helpers that both paths share. */
#ifndef DS4_VEC_H
#define DS4_VEC_H

#include <math.h>

#include "leaf.h"

/* x / sqrt(mean(x^2) + eps) * weight; weight NULL = 1. out may be x. */
static inline void ds4_rms_norm(const ds4_leaf *leaf, const float *x, const float *weight, int n, float eps,
                                float *out) {
    const float inverse = 1.0f / sqrtf(ds4_dot(leaf, x, x, n) / (float)n + eps);
    if (weight)
        for (int k = 0; k < n; k++) out[k] = x[k] * inverse * weight[k];
    else
        for (int k = 0; k < n; k++) out[k] = x[k] * inverse;
}

static inline float ds4_sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

/* The router's activation. */
static inline float ds4_sqrt_softplus(float v) { return sqrtf(v > 20.0f ? v : log1pf(expf(v))); }

/* SwiGLU with the clamp on the pre-activations: gate from above only, up on both sides. */
static inline float ds4_swiglu(float gate, float up, float limit) {
    const float a = gate > limit ? limit : gate;
    const float b = up > limit ? limit : up < -limit ? -limit : up;
    return a * ds4_sigmoid(a) * b;
}

#endif
