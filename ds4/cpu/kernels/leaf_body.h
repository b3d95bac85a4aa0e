/* One version of the leaf functions. leaf.c includes this file once per instruction set, with
 *   FN(name)   the version's function names      TARGET  the attribute that lets the compiler use the instructions
 *   VBYTES     bytes of a vector register         TILE_W, TILE_X  weight rows x activation rows held in registers */

#define VLANES (VBYTES / 4)
#define VPARTS (16 / VLANES) /* vectors that make the 16 lanes of a sum */
#define INLINE static inline __attribute__((always_inline)) TARGET

typedef float FN(vec) __attribute__((vector_size(VBYTES)));
typedef float FN(four) __attribute__((vector_size(16)));
typedef float FN(quad) __attribute__((vector_size(16), aligned(4), may_alias));
typedef float FN(loose) __attribute__((vector_size(VBYTES), aligned(4), may_alias));

/* The fixed tree: 16 lanes to 8, 4, 2, 1. */
INLINE float FN(sum16)(const float *lane) {
    FN(four) part[4];
    memcpy(part, lane, sizeof part);
    const FN(four) sum = (part[0] + part[2]) + (part[1] + part[3]);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* n_w x n_x dot products; both counts are constants at every call, so the loops unroll into registers. */
INLINE void FN(tile)(const float *const *w, const int n_w, const float *const *x, const int n_x, int n,
                     float *const *y, int y_at) {
    FN(vec) sum[TILE_W][TILE_X][VPARTS];
#pragma GCC unroll 4
    for (int i = 0; i < n_w; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n_x; j++)
#pragma GCC unroll 4
            for (int v = 0; v < VPARTS; v++) sum[i][j][v] = (FN(vec)){0};
    int k = 0;
    for (; k + 16 <= n; k += 16) {
#pragma GCC unroll 4
        for (int v = 0; v < VPARTS; v++) {
            FN(vec) xs[TILE_X];
#pragma GCC unroll 4
            for (int j = 0; j < n_x; j++) xs[j] = *(const FN(loose) *)(x[j] + k + v * VLANES);
#pragma GCC unroll 4
            for (int i = 0; i < n_w; i++) {
                const FN(vec) ws = *(const FN(loose) *)(w[i] + k + v * VLANES);
#pragma GCC unroll 4
                for (int j = 0; j < n_x; j++) sum[i][j][v] += ws * xs[j];
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < n_w; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n_x; j++) {
            float lane[16] __attribute__((aligned(64)));
            memcpy(lane, sum[i][j], sizeof lane);
            for (int t = k; t < n; t++) lane[t - k] += w[i][t] * x[j][t];
            y[j][y_at + i] = FN(sum16)(lane);
        }
}

TARGET static void FN(dots)(const float *const *w, int n_w, const float *const *x, int n_x, int n, float *const *y) {
    int j = 0;
    for (; j + TILE_X <= n_x; j += TILE_X) {
        int i = 0;
        for (; i + TILE_W <= n_w; i += TILE_W) FN(tile)(w + i, TILE_W, x + j, TILE_X, n, y + j, i);
        for (; i < n_w; i++) FN(tile)(w + i, 1, x + j, TILE_X, n, y + j, i);
    }
    for (; j < n_x; j++) {
        int i = 0;
        for (; i + TILE_W <= n_w; i += TILE_W) FN(tile)(w + i, TILE_W, x + j, 1, n, y + j, i);
        for (; i < n_w; i++) FN(tile)(w + i, 1, x + j, 1, n, y + j, i);
    }
}

/* One 16-channel block of n_y weighted sums, kept in registers while the rows pass by. */
INLINE void FN(weigh_block)(const float *const *row, int n_row, const float *const *weight, const int n_y,
                            float *const *y, int c) {
    FN(vec) sum[TILE_X][VPARTS];
#pragma GCC unroll 4
    for (int j = 0; j < n_y; j++)
#pragma GCC unroll 4
        for (int v = 0; v < VPARTS; v++) sum[j][v] = *(const FN(loose) *)(y[j] + c + v * VLANES);
    for (int i = 0; i < n_row; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < VPARTS; v++) {
            const FN(vec) r = *(const FN(loose) *)(row[i] + c + v * VLANES);
#pragma GCC unroll 4
            for (int j = 0; j < n_y; j++) sum[j][v] += r * weight[j][i];
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < n_y; j++)
#pragma GCC unroll 4
        for (int v = 0; v < VPARTS; v++) *(FN(loose) *)(y[j] + c + v * VLANES) = sum[j][v];
}

TARGET static void FN(weigh)(const float *const *row, int n_row, const float *const *weight, int n_y, int n,
                             float *const *y) {
    int c = 0;
    for (; c + 16 <= n; c += 16) {
        int j = 0;
        for (; j + TILE_X <= n_y; j += TILE_X) FN(weigh_block)(row, n_row, weight + j, TILE_X, y + j, c);
        for (; j < n_y; j++) FN(weigh_block)(row, n_row, weight + j, 1, y + j, c);
    }
    for (; c < n; c++)
        for (int j = 0; j < n_y; j++)
            for (int i = 0; i < n_row; i++) y[j][c] += row[i][c] * weight[j][i];
}

#include "decode_body.h"

static const ds4_leaf FN(leaf) = {
    LEAF_NAME,
    FN(dots),
    FN(weigh),
    {
        [DS4_F32] = FN(decode_f32),
        [DS4_F16] = FN(decode_f16),
        [DS4_BF16] = FN(decode_bf16),
        [DS4_Q8_0] = FN(decode_q8_0),
        [DS4_Q4_0] = FN(decode_q4_0),
        [DS4_Q4_K] = FN(decode_q4_k),
        [DS4_Q5_K] = FN(decode_q5_k),
        [DS4_Q6_K] = FN(decode_q6_k),
        [DS4_Q2_K] = FN(decode_q2_k),
        [DS4_IQ2_XXS] = FN(decode_iq2_xxs),
        [DS4_MXFP4] = FN(decode_mxfp4),
    },
};

#undef VLANES
#undef VPARTS
#undef INLINE
