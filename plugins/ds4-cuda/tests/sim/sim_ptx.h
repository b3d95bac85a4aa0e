// Stands in for the functions of ptx.cuh. Tensor-core products are done for the whole warp by the lane that comes last;
// asynchronous copies are made when they are waited for, so that a missing wait is seen.
#pragma once
#include "cuda_fp16.h"

// ---------------------------------------------------------------- tensor cores

// D = A B + C of 16 x 8 with K inputs; fragments as in ptx.cuh. `Word` says how a register holds its elements.
template <class Word> struct SimMma {
    using Element = typename Word::Element;
    using Sum = typename Word::Sum;
    enum { PER = Word::PER, K = 8 * PER };
    const uint32_t *a, *b;
    Sum *d, c[4];

    static void finish(void *const *lanes, uint32_t mask) {
        static Element a[16][K], b[8][K];
        sim_each<SimMma>(lanes, mask, [&](int lane, SimMma &op) {
            const int g = lane / 4, t = lane % 4;
            for (int h = 0; h < 2; h++) {
                Word::split(op.a[2 * h], &a[g][4 * PER * h + t * PER]);
                Word::split(op.a[2 * h + 1], &a[g + 8][4 * PER * h + t * PER]);
                Word::split(op.b[h], &b[g][4 * PER * h + t * PER]);
            }
        });
        sim_each<SimMma>(lanes, mask, [&](int lane, SimMma &op) {
            for (int i = 0; i < 4; i++) {
                const Element *x = a[lane / 4 + i / 2 * 8], *y = b[lane % 4 * 2 + i % 2];
                typename Word::Wide sum = 0;
                for (int k = 0; k < K; k++) sum += (typename Word::Wide)x[k] * (typename Word::Wide)y[k];
                op.d[i] = Word::join(op.c[i], sum);
            }
        });
    }
    static void run(Sum *d, const uint32_t *a, const uint32_t *b, Sum c0, Sum c1, Sum c2, Sum c3) {
        SimMma op = {a, b, d, {c0, c1, c2, c3}};
        if (sim::warp().alive != 0xffffffffu) SIM_FAIL("lanes are missing from a tensor-core product");
        sim::meet(0xffffffffu, &op, finish);
    }
};

struct SimS8 {
    enum { PER = 4 };
    using Element = int8_t;
    using Sum = int;
    using Wide = int;
    static void split(uint32_t v, int8_t *to) { memcpy(to, &v, 4); }
    static int join(int c, int sum) { return (int)((uint32_t)c + (uint32_t)sum); }
};
struct SimF16 {
    enum { PER = 2 };
    using Element = float;
    using Sum = float;
    using Wide = double;
    static void split(uint32_t v, float *to) {
        to[0] = __half2float(__ushort_as_half((uint16_t)v));
        to[1] = __half2float(__ushort_as_half((uint16_t)(v >> 16)));
    }
    static float join(float c, double sum) { return (float)(c + sum); }
};
struct SimTf32 {
    enum { PER = 1 };
    using Element = float;
    using Sum = float;
    using Wide = double;
    static void split(uint32_t v, float *to) { *to = __uint_as_float(v & 0xffffe000u); }
    static float join(float c, double sum) { return (float)(c + sum); }
};

static inline void mma_s8(int *c, const uint32_t *a, const uint32_t *b) { SimMma<SimS8>::run(c, a, b, c[0], c[1], c[2], c[3]); }
static inline void add_mma_s8(int *c, const uint32_t *a, const uint32_t *b) { mma_s8(c, a, b); }
static inline void mma_s8(int *d, const uint32_t *a, const uint32_t *b, int c) { SimMma<SimS8>::run(d, a, b, c, c, c, c); }
static inline void mma_f16(float *c, const uint32_t *a, const uint32_t *b) { SimMma<SimF16>::run(c, a, b, c[0], c[1], c[2], c[3]); }
static inline void mma_tf32(float *c, const uint32_t *a, const uint32_t *b) { SimMma<SimTf32>::run(c, a, b, c[0], c[1], c[2], c[3]); }

// Round to 10 bits of mantissa, ties away from zero.
static inline uint32_t to_tf32(float v) {
    const uint32_t bits = __float_as_uint(v);
    return (bits & 0x7f800000u) == 0x7f800000u ? bits & 0xffffe000u : (bits + 0x1000u) & 0xffffe000u;
}

// ---------------------------------------------------------------- words

static inline uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t which) { return sim_prmt(low, high, which); }
static inline float reciprocal(float v) { return 1.0f / v; }

// ---------------------------------------------------------------- memory

static inline uint4 load_once(const void *p) {
    if ((size_t)p % 16) SIM_FAIL("misaligned address %p of load_once", p);
    return *(const uint4 *)p;
}
static inline void prefetch_l2(const void *) {}

static inline void sim_copy(void *to, const void *from, int bytes) {
    if ((size_t)to % bytes || (size_t)from % bytes) SIM_FAIL("misaligned copy of %d bytes from %p to %p", bytes, from, to);
    sim::threads[threadIdx.x].copies.push_back({to, from, bytes});
}
static inline void copy_async(void *shared, const void *global) { sim_copy(shared, global, 16); }
static inline void copy_async4(void *shared, const void *global) { sim_copy(shared, global, 4); }
struct Shared {
    uint8_t *at;
    Shared() = default;
    explicit Shared(const void *p) : at((uint8_t *)p) {}
    Shared operator+(int bytes) const { return Shared(at + bytes); }
    template <class T> T load() const {
        if ((size_t)at % sizeof(T)) SIM_FAIL("misaligned address %p of shared memory", at);
        return *(const T *)at;
    }
    uint4 load16() const { return load<uint4>(); }
    uint2 load8() const { return load<uint2>(); }
    uint32_t load4() const { return load<uint32_t>(); }
    void store16(uint4 v) const { *(uint4 *)at = v; }
    void copy16(const void *global) const { sim_copy(at, global, 16); }
    void copy8(const void *global) const { sim_copy(at, global, 8); }
    void copy4(const void *global) const { sim_copy(at, global, 4); }
};
static inline void copy_commit() {
    sim::Thread &t = sim::threads[threadIdx.x];
    t.groups.push_back(t.copies.size());
}
template <int PENDING> static inline void copy_wait() {
    sim::Thread &t = sim::threads[threadIdx.x];
    if (t.groups.size() <= PENDING) return;
    const size_t done = t.groups.size() - PENDING, end = t.groups[done - 1];
    for (size_t i = 0; i < end; i++) memcpy(t.copies[i].to, t.copies[i].from, t.copies[i].bytes);
    t.copies.erase(t.copies.begin(), t.copies.begin() + end);
    t.groups.erase(t.groups.begin(), t.groups.begin() + done);
    for (size_t &g : t.groups) g -= end;
}

static inline void follow() {}
#define DS4_REHEARSE
static inline int unknown_zero() { return 0; }
