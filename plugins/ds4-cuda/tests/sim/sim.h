// CUDA C++ for a C++ compiler: what the kernels use of the language, the built-in functions and the collectives.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <type_traits>
#include <utility>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__
#define __grid_constant__
// Blocks run one after the other, so one place for all of them does. The section lets it be wiped between blocks.
#define __shared__ static __attribute__((section("ds4_shared")))

// ---------------------------------------------------------------- vectors

#define SIM_VECTORS(T, NAME, A2, A4)                                                        \
    struct __align__(A2) NAME##2 { T x, y; };                                               \
    struct NAME##3 { T x, y, z; };                                                          \
    struct __align__(A4) NAME##4 { T x, y, z, w; };                                         \
    static inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                       \
    static inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }               \
    static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SIM_VECTORS(float, float, 8, 16)
SIM_VECTORS(int, int, 8, 16)
SIM_VECTORS(unsigned, uint, 8, 16)
SIM_VECTORS(double, double, 16, 16)
SIM_VECTORS(short, short, 4, 8)
SIM_VECTORS(unsigned short, ushort, 4, 8)
SIM_VECTORS(signed char, char, 2, 4)
SIM_VECTORS(unsigned char, uchar, 2, 4)
SIM_VECTORS(long long, longlong, 16, 16)
SIM_VECTORS(unsigned long long, ulonglong, 16, 16)

// ---------------------------------------------------------------- arithmetic

template <class A, class B> static inline std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return (T)a != (T)a || (T)b < (T)a ? (T)b : (T)a;
    else return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B> static inline std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return (T)a != (T)a || (T)b > (T)a ? (T)b : (T)a;
    else return (T)b > (T)a ? (T)b : (T)a;
}

template <class To, class From> static inline To sim_bits(From v) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &v, sizeof to);
    return to;
}
static inline uint32_t __float_as_uint(float v) { return sim_bits<uint32_t>(v); }
static inline int __float_as_int(float v) { return sim_bits<int>(v); }
static inline float __uint_as_float(uint32_t v) { return sim_bits<float>(v); }
static inline float __int_as_float(int v) { return sim_bits<float>(v); }
static inline long long __double_as_longlong(double v) { return sim_bits<long long>(v); }
static inline double __longlong_as_double(long long v) { return sim_bits<double>(v); }

static inline int sim_to_int(float v) { return v != v ? 0 : v >= 2147483648.0f ? INT32_MAX : v < -2147483648.0f ? INT32_MIN : (int)v; }
static inline int __float2int_rn(float v) { return sim_to_int(rintf(v)); }
static inline int __float2int_rz(float v) { return sim_to_int(truncf(v)); }
static inline int __float2int_rd(float v) { return sim_to_int(floorf(v)); }
static inline int __float2int_ru(float v) { return sim_to_int(ceilf(v)); }
static inline uint32_t __float2uint_rn(float v) { return v != v || v < 0 ? 0 : v >= 4294967296.0f ? UINT32_MAX : (uint32_t)rintf(v); }
static inline float __int2float_rn(int v) { return (float)v; }
static inline float __uint2float_rn(uint32_t v) { return (float)v; }

static inline float rsqrtf(float v) { return (float)(1.0 / sqrt((double)v)); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float v) { return 1.0f / v; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float v) { return sqrtf(v); }
static inline float __frsqrt_rn(float v) { return rsqrtf(v); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
#define __expf(v) expf(v)  // a name of the C library's own
#define __logf(v) logf(v)  // a name of the C library's own
#define __exp2f(v) exp2f(v)  // a name of the C library's own
static inline float __saturatef(float v) { return v > 0.0f ? v < 1.0f ? v : 1.0f : 0.0f; }
static inline int __mul24(int a, int b) { return a * b; }
static inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((unsigned long long)a * b >> 32); }

static inline int __popc(uint32_t v) { return __builtin_popcount(v); }
static inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline uint32_t __brev(uint32_t v) {
    uint32_t r = 0;
    for (int i = 0; i < 32; i++) r |= (v >> i & 1) << (31 - i);
    return r;
}
static inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t n) {
    return (uint32_t)((((unsigned long long)high << 32 | low) << (n & 31)) >> 32);
}
static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t n) {
    return (uint32_t)(((unsigned long long)high << 32 | low) >> (n & 31));
}

// PRMT: bits 0 .. 2 of a nibble choose one of eight bytes, bit 3 replaces it by eight copies of its top bit.
static inline uint32_t sim_prmt(uint32_t low, uint32_t high, uint32_t which) {
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t s = which >> 4 * i & 15, byte = (uint32_t)(bytes >> 8 * (s & 7)) & 255;
        r |= (s & 8 ? (byte >> 7) * 255u : byte) << 8 * i;
    }
    return r;
}
static inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t which) { return sim_prmt(low, high, which & 0x7777); }

static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(int8_t)((uint32_t)a >> 8 * i) * (int)(int8_t)((uint32_t)b >> 8 * i);
    return c;
}
static inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t c) {
    for (int i = 0; i < 4; i++) c += (a >> 8 * i & 255) * (b >> 8 * i & 255);
    return c;
}

// ---------------------------------------------------------------- memory

template <class T> static inline T __ldg(const T *p) { return *p; }
template <class T> static inline T __ldcg(const T *p) { return *p; }
template <class T> static inline T __ldcs(const T *p) { return *p; }
template <class T> static inline T __ldca(const T *p) { return *p; }
template <class T> static inline void __stcs(T *p, T v) { *p = v; }
template <class T> static inline void __stcg(T *p, T v) { *p = v; }
static inline size_t __cvta_generic_to_shared(const void *p) { return (size_t)p; }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __nanosleep(unsigned) {}

#define SIM_ATOMIC(NAME, EXPRESSION)                              \
    template <class T, class V> static inline T NAME(T *p, V v) { \
        const T old = *p;                                         \
        *p = (T)(EXPRESSION);                                     \
        return old;                                               \
    }
SIM_ATOMIC(atomicAdd, old + v)
SIM_ATOMIC(atomicSub, old - v)
SIM_ATOMIC(atomicMax, max(old, v))
SIM_ATOMIC(atomicMin, min(old, v))
SIM_ATOMIC(atomicOr, old | v)
SIM_ATOMIC(atomicAnd, old & v)
SIM_ATOMIC(atomicXor, old ^ v)
SIM_ATOMIC(atomicExch, v)
template <class T> static inline T atomicCAS(T *p, T expected, T v) {
    const T old = *p;
    if (old == expected) *p = v;
    return old;
}

// ---------------------------------------------------------------- collectives

static inline void __syncthreads() { sim::barrier(0); }
static inline int __syncthreads_count(int v) { return (int)sim::barrier(v != 0); }
static inline int __syncthreads_or(int v) { return sim::barrier(v != 0) != 0; }
static inline int __syncthreads_and(int v) { return sim::barrier(v == 0) == 0; }

// Calls fn(lane, operation) for every lane of a mask.
template <class Op, class Fn> static inline void sim_each(void *const *lanes, uint32_t mask, Fn fn) {
    for (; mask; mask &= mask - 1) {
        const int i = __builtin_ctz(mask);
        fn(i, *(Op *)lanes[i]);
    }
}

static inline void __syncwarp(uint32_t mask = 0xffffffffu) {
    sim::meet(mask, nullptr, [](void *const *, uint32_t) {});
}

enum SimFrom { SIM_INDEX, SIM_XOR, SIM_UP, SIM_DOWN };
template <class T, SimFrom FROM> struct SimShuffle {
    T in, out;
    int n, width;
    static void finish(void *const *lanes, uint32_t mask) {
        sim_each<SimShuffle>(lanes, mask, [&](int i, SimShuffle &op) {
            const int first = i & ~(op.width - 1), end = first + op.width;
            int at = FROM == SIM_INDEX ? first + (op.n & (op.width - 1)) : FROM == SIM_XOR ? i ^ op.n : FROM == SIM_UP ? i - op.n : i + op.n;
            if (at >= end || (FROM == SIM_UP && at < first)) at = i;
            if (mask >> at & 1) op.out = ((SimShuffle *)lanes[at])->in;
            else memset(&op.out, 0xff, sizeof op.out);  // nobody there: undefined
        });
    }
};
template <SimFrom FROM, class T> static inline T sim_shuffle(uint32_t mask, T v, int n, int width) {
    SimShuffle<T, FROM> op;
    op.in = v, op.n = n, op.width = width;
    sim::meet(mask, &op, SimShuffle<T, FROM>::finish);
    return op.out;
}
template <class T> static inline T __shfl_sync(uint32_t mask, T v, int n, int width = 32) { return sim_shuffle<SIM_INDEX>(mask, v, n, width); }
template <class T> static inline T __shfl_xor_sync(uint32_t mask, T v, int n, int width = 32) { return sim_shuffle<SIM_XOR>(mask, v, n, width); }
template <class T> static inline T __shfl_up_sync(uint32_t mask, T v, int n, int width = 32) { return sim_shuffle<SIM_UP>(mask, v, n, width); }
template <class T> static inline T __shfl_down_sync(uint32_t mask, T v, int n, int width = 32) { return sim_shuffle<SIM_DOWN>(mask, v, n, width); }

// All lanes get the same: the values of the mask, put together by Join.
template <class T, class Join> struct SimReduce {
    T v;
    static void finish(void *const *lanes, uint32_t mask) {
        T all = ((SimReduce *)lanes[__builtin_ctz(mask)])->v;
        sim_each<SimReduce>(lanes, mask & (mask - 1), [&](int, SimReduce &op) { all = Join()(all, op.v); });
        sim_each<SimReduce>(lanes, mask, [&](int, SimReduce &op) { op.v = all; });
    }
};
template <class Join, class T> static inline T sim_reduce(uint32_t mask, T v) {
    SimReduce<T, Join> op = {v};
    sim::meet(mask, &op, SimReduce<T, Join>::finish);
    return op.v;
}
struct SimOr { template <class T> T operator()(T a, T b) const { return a | b; } };
struct SimAnd { template <class T> T operator()(T a, T b) const { return a & b; } };
struct SimAdd { template <class T> T operator()(T a, T b) const { return a + b; } };
struct SimMax { template <class T> T operator()(T a, T b) const { return a > b ? a : b; } };
struct SimMin { template <class T> T operator()(T a, T b) const { return a < b ? a : b; } };
template <class T> static inline T __reduce_max_sync(uint32_t mask, T v) { return sim_reduce<SimMax>(mask, v); }
template <class T> static inline T __reduce_min_sync(uint32_t mask, T v) { return sim_reduce<SimMin>(mask, v); }
template <class T> static inline T __reduce_add_sync(uint32_t mask, T v) { return sim_reduce<SimAdd>(mask, v); }
template <class T> static inline T __reduce_or_sync(uint32_t mask, T v) { return sim_reduce<SimOr>(mask, v); }
template <class T> static inline T __reduce_and_sync(uint32_t mask, T v) { return sim_reduce<SimAnd>(mask, v); }
static inline uint32_t __ballot_sync(uint32_t mask, int v) { return sim_reduce<SimOr>(mask, (v ? 1u : 0u) << threadIdx.x % 32); }
static inline int __any_sync(uint32_t mask, int v) { return sim_reduce<SimOr>(mask, (int)(v != 0)); }
static inline int __all_sync(uint32_t mask, int v) { return sim_reduce<SimAnd>(mask, (int)(v != 0)); }

// ---------------------------------------------------------------- entries

// A kernel's parameters out of its packed arguments, each at its own alignment.
template <class... A> struct SimCall {
    template <size_t... I> static void call(void (*kernel)(A...), const char *arguments, std::index_sequence<I...>) {
        size_t offsets[sizeof...(A) + 1], at = 0, i = 0;
        ((offsets[i++] = at = (at + alignof(std::decay_t<A>) - 1) / alignof(std::decay_t<A>) * alignof(std::decay_t<A>), at += sizeof(std::decay_t<A>)), ...);
        kernel(*(const std::decay_t<A> *)(arguments + offsets[I])...);
    }
    static size_t size() {
        size_t at = 0;
        ((at = (at + alignof(std::decay_t<A>) - 1) / alignof(std::decay_t<A>) * alignof(std::decay_t<A>) + sizeof(std::decay_t<A>)), ...);
        return at;
    }
};
template <class... A> static void sim_call(void (*kernel)(A...), const char *arguments) {
    SimCall<A...>::call(kernel, arguments, std::index_sequence_for<A...>());
}
template <class... A> static size_t sim_size(void (*)(A...)) { return SimCall<A...>::size(); }

#define SIM_KERNEL(NAME)                                                                                            \
    extern "C" __attribute__((visibility("default"))) int sim_##NAME(const SimLaunch *l) {                          \
        if (l->argument_bytes != sim_size(NAME)) {                                                                  \
            snprintf(l->error, 512, #NAME " takes %zu bytes of arguments, not %u", sim_size(NAME), l->argument_bytes); \
            return 1;                                                                                               \
        }                                                                                                           \
        return sim::run(l, #NAME, [](const char *arguments) { sim_call(NAME, arguments); });                        \
    }
