#include "rope.h"

#include <math.h>

void ds4_rope_angles(const double *freq, int n_pairs, int pos, float *cos_out, float *sin_out) {
    for (int i = 0; i < n_pairs; i++) {
        const double angle = (double)pos * freq[i];
        cos_out[i] = (float)cos(angle);
        sin_out[i] = (float)sin(angle);
    }
}

void ds4_rope(float *tail, int n_pairs, const float *cos_in, const float *sin_in, float sign) {
    for (int i = 0; i < n_pairs; i++) {
        const float a = tail[2 * i], b = tail[2 * i + 1], c = cos_in[i], s = sign * sin_in[i];
        tail[2 * i] = a * c - b * s;
        tail[2 * i + 1] = a * s + b * c;
    }
}
