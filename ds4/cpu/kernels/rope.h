/* Rotary position embedding: adjacent pairs of the last rope_dim channels of a head, angle = position * frequency. */
#ifndef DS4_ROPE_H
#define DS4_ROPE_H

/* Angles are computed in double, so that positions up to 2^30 keep float accuracy, and rounded once. */
void ds4_rope_angles(const double *freq, int n_pairs, int pos, float *cos_out, float *sin_out);

/* Rotate the rope_dim values at `tail`; sign -1 rotates back. */
void ds4_rope(float *tail, int n_pairs, const float *cos_in, const float *sin_in, float sign);

#endif
