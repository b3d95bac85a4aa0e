/* float16 and bfloat16 <-> float32, exact for every bit pattern: subnormals, infinities and NaNs included.
 *
 * Integer arithmetic without branches, so that compilers turn loops of it into vector code; float32 -> float16 rounds
 * to nearest, ties to even. Nothing here depends on flush-to-zero modes for normal inputs. */
#ifndef DS4_HALF_H
#define DS4_HALF_H

#include <stdint.h>
#include <string.h>

static inline float ds4_bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t ds4_float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* a ? b : c without a branch: compilers move a float operation that only one side needs into it, and then find no loop
 * to turn into vector code. */
static inline uint32_t ds4_choose(int a, uint32_t b, uint32_t c) {
    const uint32_t mask = 0u - (uint32_t)a;
    return (b & mask) | (c & ~mask);
}

static inline float ds4_f16_to_f32(uint16_t half) {
    const uint32_t magnitude = (uint32_t)(half & 0x7fffu) << 13, exponent = magnitude & 0x0f800000u;
    const uint32_t normal = magnitude + 0x38000000u;  /* exponent bias 15 -> 127 */
    const uint32_t special = magnitude + 0x70000000u; /* infinity and NaN */
    /* Subnormal m * 2^-24: as 2^-14 + m * 2^-24, which is a normal number, minus 2^-14; exact. */
    const float tiny = ds4_bits_to_float(magnitude + 0x38800000u) - ds4_bits_to_float(0x38800000u);
    uint32_t bits = ds4_choose(exponent == 0, ds4_float_to_bits(tiny), normal);
    bits = ds4_choose(exponent == 0x0f800000u, special, bits);
    return ds4_bits_to_float(bits | (uint32_t)(half & 0x8000u) << 16);
}

static inline uint16_t ds4_f32_to_f16(float value) {
    const uint32_t bits = ds4_float_to_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    /* Subnormal results: adding 0.5, whose last bit is worth 2^-24, lets the adder round. */
    const uint32_t tiny = ds4_float_to_bits(ds4_bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude + 0xc8000fffu + (magnitude >> 13 & 1u)) >> 13;
    uint32_t half = ds4_choose(magnitude < 0x38800000u, tiny, normal);
    half = ds4_choose(magnitude >= 0x477ff000u, 0x7c00u, half); /* 65520 and above round to infinity */
    half = ds4_choose(magnitude > 0x7f800000u, 0x7e00u, half);
    return (uint16_t)(sign | half);
}

static inline float ds4_bf16_to_f32(uint16_t bits) { return ds4_bits_to_float((uint32_t)bits << 16); }

/* Unaligned little-endian loads: blocks of 34, 66 or 17 bytes lie at any address. */
static inline uint16_t ds4_load16(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint32_t ds4_load32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "ds4 reads little-endian model files in place: a big-endian machine is not supported"
#endif
#ifdef __FAST_MATH__
#error "ds4 kernels must keep IEEE semantics: build without -ffast-math"
#endif

#endif
