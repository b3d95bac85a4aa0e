/* The cache roundings of the original engine (model description, "Roundings that ds4 adds"), all off by default.
 * They reproduce the numeric formats of the published inference graph: FP8 latents, FP4 indexer. */
#ifndef DS4_ROUND_H
#define DS4_ROUND_H

/* Latent rows and main entries: FP8 E4M3 in groups of 64 over the first n_plain channels, then float16 over all n. */
void ds4_round_latent(float *row, int n, int n_plain);

/* Index entries and queries: Walsh-Hadamard transform (n a power of two), then FP4 E2M1 in groups of 32. */
void ds4_round_index(float *row, int n);

/* Index entries additionally: float16. */
void ds4_round_half(float *row, int n);

#endif
