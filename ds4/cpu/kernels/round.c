#include "round.h"

#include <math.h>

#include "half.h"

/* 2^ceil(log2(v)), v > 0 and normal: exact, where a computed logarithm could land on the wrong side. */
static float power_of_two_above(float v) {
    int exponent;
    const float fraction = frexpf(v, &exponent); /* in [0.5, 1) */
    return ldexpf(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

static float largest(const float *row, int n, float floor) {
    float top = floor;
    for (int k = 0; k < n; k++) top = fabsf(row[k]) > top ? fabsf(row[k]) : top;
    return top;
}

/* Nearest E4M3 value: 3 mantissa bits, smallest step 2^-9, largest value 448, ties to even. */
static float nearest_e4m3(float v) {
    int exponent;
    v = v > 448.0f ? 448.0f : v < -448.0f ? -448.0f : v;
    frexpf(v, &exponent);
    const float step = ldexpf(1.0f, (exponent - 1 > -6 ? exponent - 1 : -6) - 3);
    return rintf(v / step) * step;
}

void ds4_round_half(float *row, int n) {
    for (int k = 0; k < n; k++) row[k] = ds4_f16_to_f32(ds4_f32_to_f16(row[k]));
}

void ds4_round_latent(float *row, int n, int n_plain) {
    for (int at = 0; at < n_plain; at += 64) {
        const float scale = power_of_two_above(largest(row + at, 64, 1e-4f) / 448.0f);
        for (int k = at; k < at + 64; k++) row[k] = nearest_e4m3(row[k] / scale) * scale;
    }
    ds4_round_half(row, n);
}

static void hadamard(float *row, int n) {
    for (int half = 1; half < n; half *= 2)
        for (int at = 0; at < n; at += 2 * half)
            for (int k = at; k < at + half; k++) {
                const float a = row[k], b = row[k + half];
                row[k] = a + b;
                row[k + half] = a - b;
            }
    const float scale = (float)(1.0 / sqrt((double)n));
    for (int k = 0; k < n; k++) row[k] *= scale;
}

/* Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6; a tie goes to the even code: 0, 1, 2, 4. */
static float nearest_e2m1(float v) {
    const float a = fabsf(v);
    const float q = a <= 0.25f   ? 0.0f
                    : a < 0.75f  ? 0.5f
                    : a <= 1.25f ? 1.0f
                    : a < 1.75f  ? 1.5f
                    : a <= 2.5f  ? 2.0f
                    : a < 3.5f   ? 3.0f
                    : a <= 5.0f  ? 4.0f
                                 : 6.0f;
    return copysignf(q, v);
}

void ds4_round_index(float *row, int n) {
    hadamard(row, n);
    for (int at = 0; at < n; at += 32) {
        const float scale = power_of_two_above(largest(row + at, 32, 7e-38f) / 6.0f);
        for (int k = at; k < at + 32; k++) row[k] = nearest_e2m1(row[k] / scale) * scale;
    }
}
