/* Row decoders: the block formats of GGUF to float32, part of one leaf version (see leaf_body.h).
 *
 * Block layouts and the order of the multiplications are those of the GGUF formats as gguf-py decodes them, so that
 * every weight has exactly the value that the format defines. A row is whole blocks; blocks are unaligned. */

TARGET static void FN(decode_f32)(const uint8_t *restrict row, float *restrict out, int n,
                                  const ds4_tables *restrict tables) {
    (void)tables;
    memcpy(out, row, (size_t)n * sizeof(float));
}

TARGET static void FN(decode_f16)(const uint8_t *restrict row, float *restrict out, int n,
                                  const ds4_tables *restrict tables) {
    (void)tables;
    for (int k = 0; k < n; k++) out[k] = ds4_f16_to_f32(ds4_load16(row + 2 * (size_t)k));
}

TARGET static void FN(decode_bf16)(const uint8_t *restrict row, float *restrict out, int n,
                                   const ds4_tables *restrict tables) {
    (void)tables;
    for (int k = 0; k < n; k++) out[k] = ds4_bf16_to_f32(ds4_load16(row + 2 * (size_t)k));
}

/* 34 bytes: f16 d, 32 x i8 */
TARGET static void FN(decode_q8_0)(const uint8_t *restrict row, float *restrict out, int n,
                                   const ds4_tables *restrict tables) {
    (void)tables;
    for (; n > 0; n -= 32, row += 34, out += 32) {
        const float d = ds4_f16_to_f32(ds4_load16(row));
        const int8_t *q = (const int8_t *)(row + 2);
        for (int k = 0; k < 32; k++) out[k] = (float)q[k] * d;
    }
}

/* 18 bytes: f16 d, 16 x two nibbles (value - 8); low nibbles first */
TARGET static void FN(decode_q4_0)(const uint8_t *restrict row, float *restrict out, int n,
                                   const ds4_tables *restrict tables) {
    (void)tables;
    for (; n > 0; n -= 32, row += 18, out += 32) {
        const float d = ds4_f16_to_f32(ds4_load16(row));
        for (int k = 0; k < 16; k++) out[k] = d * (float)((row[2 + k] & 15) - 8);
        for (int k = 0; k < 16; k++) out[16 + k] = d * (float)((row[2 + k] >> 4) - 8);
    }
}

/* The 6-bit scale and minimum of sub-block j, packed into 12 bytes (Q4_K, Q5_K). */
INLINE void FN(scale_min)(const uint8_t *s, int j, int *scale, int *min) {
    if (j < 4) {
        *scale = s[j] & 63;
        *min = s[j + 4] & 63;
    } else {
        *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        *min = s[j + 4] >> 4 | (s[j] >> 6) << 4;
    }
}

/* 144 bytes: f16 d, f16 dmin, 12 scale bytes, 128 bytes of nibbles; sub-blocks 2g (low) and 2g+1 (high) share 32 */
TARGET static void FN(decode_q4_k)(const uint8_t *restrict row, float *restrict out, int n,
                                   const ds4_tables *restrict tables) {
    (void)tables;
    for (; n > 0; n -= 256, row += 144, out += 256) {
        const float d = ds4_f16_to_f32(ds4_load16(row)), dmin = ds4_f16_to_f32(ds4_load16(row + 2));
        for (int j = 0; j < 8; j++) {
            const uint8_t *q = row + 16 + j / 2 * 32;
            const int shift = j % 2 * 4;
            int scale, min;
            FN(scale_min)(row + 4, j, &scale, &min);
            const float a = d * (float)scale, b = dmin * (float)min;
            for (int k = 0; k < 32; k++) out[j * 32 + k] = a * (float)(q[k] >> shift & 15) - b;
        }
    }
}

/* 176 bytes: as Q4_K with 32 bytes of fifth bits between scales and nibbles; bit j of byte k belongs to sub-block j */
TARGET static void FN(decode_q5_k)(const uint8_t *restrict row, float *restrict out, int n,
                                   const ds4_tables *restrict tables) {
    (void)tables;
    for (; n > 0; n -= 256, row += 176, out += 256) {
        const float d = ds4_f16_to_f32(ds4_load16(row)), dmin = ds4_f16_to_f32(ds4_load16(row + 2));
        const uint8_t *high = row + 16;
        for (int j = 0; j < 8; j++) {
            const uint8_t *q = row + 48 + j / 2 * 32;
            const int shift = j % 2 * 4;
            int scale, min;
            FN(scale_min)(row + 4, j, &scale, &min);
            const float a = d * (float)scale, b = dmin * (float)min;
            for (int k = 0; k < 32; k++)
                out[j * 32 + k] = a * (float)((q[k] >> shift & 15) | (high[k] >> j & 1) << 4) - b;
        }
    }
}

/* 210 bytes: 128 low nibbles, 64 bytes of upper bit pairs, 16 x i8 scales (one per 16), f16 d; value - 32 */
TARGET static void FN(decode_q6_k)(const uint8_t *restrict row, float *restrict out, int n,
                                   const ds4_tables *restrict tables) {
    (void)tables;
    for (; n > 0; n -= 256, row += 210, out += 256) {
        const float d = ds4_f16_to_f32(ds4_load16(row + 208));
        const int8_t *scales = (const int8_t *)(row + 192);
        for (int j = 0; j < 8; j++) { /* 32 weights: half j/4, within it nibble part and bit pair */
            const uint8_t *low = row + j / 4 * 64 + j % 2 * 32, *high = row + 128 + j / 4 * 32;
            const int low_shift = j / 2 % 2 * 4, high_shift = j % 4 * 2;
            for (int s = 0; s < 2; s++) {
                const float a = d * (float)scales[j * 2 + s];
                for (int k = s * 16; k < s * 16 + 16; k++) {
                    const int q = (low[k] >> low_shift & 15) | (high[k] >> high_shift & 3) << 4;
                    out[j * 32 + k] = a * (float)(q - 32);
                }
            }
        }
    }
}

/* 84 bytes: 16 x (low nibble scale, high nibble minimum), 64 bytes of 2-bit values, f16 d, f16 dmin */
TARGET static void FN(decode_q2_k)(const uint8_t *restrict row, float *restrict out, int n,
                                   const ds4_tables *restrict tables) {
    (void)tables;
    for (; n > 0; n -= 256, row += 84, out += 256) {
        const float d = ds4_f16_to_f32(ds4_load16(row + 80)), dmin = ds4_f16_to_f32(ds4_load16(row + 82));
        for (int j = 0; j < 16; j++) {
            const uint8_t *q = row + 16 + j / 8 * 32 + j % 2 * 16;
            const int shift = j % 8 / 2 * 2;
            const float a = d * (float)(row[j] & 15), b = dmin * (float)(row[j] >> 4);
            for (int k = 0; k < 16; k++) out[j * 16 + k] = a * (float)(q[k] >> shift & 3) - b;
        }
    }
}

/* 66 bytes: f16 d, 8 x (four grid indices, four 7-bit sign codes and a 4-bit scale). The eighth sign is the parity. */
TARGET static void FN(decode_iq2_xxs)(const uint8_t *restrict row, float *restrict out, int n,
                                      const ds4_tables *restrict tables) {
    for (; n > 0; n -= 256, row += 66, out += 256) {
        const float d = ds4_f16_to_f32(ds4_load16(row));
        for (int j = 0; j < 8; j++) {
            const uint8_t *index = row + 2 + j * 8;
            const uint32_t code = ds4_load32(index + 4);
            const float a = d * (0.5f + (float)(code >> 28)) * 0.25f;
            for (int g = 0; g < 4; g++) {
                const FN(quad) *grid = (const FN(quad) *)tables->iq2_xxs[index[g]];
                const FN(quad) *sign = (const FN(quad) *)tables->iq2_xxs_sign[code >> 7 * g & 127];
                FN(quad) *to = (FN(quad) *)(out + j * 32 + g * 8);
                to[0] = a * grid[0] * sign[0];
                to[1] = a * grid[1] * sign[1];
            }
        }
    }
}

/* 17 bytes: E8M0 scale, 16 x two E2M1 codes, low nibbles first. Codes are read doubled and the scale halved. */
TARGET static void FN(decode_mxfp4)(const uint8_t *restrict row, float *restrict out, int n,
                                    const ds4_tables *restrict tables) {
    static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    (void)tables;
    for (; n > 0; n -= 32, row += 17, out += 32) {
        const uint32_t e = row[0];
        const float d = ds4_bits_to_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        for (int k = 0; k < 16; k++) out[k] = d * (float)doubled[row[1 + k] & 15];
        for (int k = 0; k < 16; k++) out[16 + k] = d * (float)doubled[row[1 + k] >> 4];
    }
}
