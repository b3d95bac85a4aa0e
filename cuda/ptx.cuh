// The machine instructions that CUDA C++ has no name for, one function each. Nothing else holds assembly, so that a
// build without a GPU can put its own functions in their place (DS4_SIM).
//
// Fragments of the tensor-core products D = A B + C, for lane = 4 g + t (PTX ISA, "Matrix fragments for mma"):
//     C, D  16 x 8    c[0], c[1]: row g, columns 2 t and 2 t + 1;  c[2], c[3]: row g + 8
//     s8    16 x 32   a[0]: row g, k = 4 t .. 4 t + 3; a[1]: row g + 8; a[2], a[3]: the same rows, k + 16
//           32 x 8    b[0]: column g, k = 4 t .. 4 t + 3; b[1]: k + 16
//     f16   16 x 16   a[0]: row g, k = 2 t, 2 t + 1; a[1]: row g + 8; a[2], a[3]: the same rows, k + 8;  b alike
//     tf32  16 x 8    a[0]: row g, k = t; a[1]: row g + 8; a[2], a[3]: the same rows, k + 4;  b alike
#pragma once
#include "integers.cuh"

#ifdef DS4_SIM
#include "sim_ptx.h"
#else

// d = A B + c, where all elements of C are the same.
__device__ __forceinline__ void mma_s8(int *d, const uint32_t *a, const uint32_t *b, int c) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c));
}

// c += A B
__device__ __forceinline__ void add_mma_s8(int *c, const uint32_t *a, const uint32_t *b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_f16(float *c, const uint32_t *a, const uint32_t *b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The operands are float32 bits of which the low 13 are ignored; round with to_tf32 where that matters.
__device__ __forceinline__ void mma_tf32(float *c, const uint32_t *a, const uint32_t *b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ uint32_t to_tf32(float v) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
    return bits;
}

// Four bytes out of the eight of low and high; the low four nibbles of `which`, each below 8, say which. __byte_perm would
// mask the nibbles first.
__device__ __forceinline__ uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t which) {
    uint32_t v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(low), "r"(high), "r"(which));
    return v;
}

// 1 / v to a unit in the last place, for ordinary v: one instruction instead of ten.
__device__ __forceinline__ float reciprocal(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// Data that is read once: through the read-only path, not kept in L1.
__device__ __forceinline__ uint4 load_once(const void *p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ void prefetch_l2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// A place in shared memory, as an address that the compiler takes as it is: from a pointer it would find out anew, in every
// turn of a loop, where the block's shared memory begins. Copies are complete after copy_wait.
struct Shared {
    uint32_t at;
    Shared() = default;
    __device__ __forceinline__ explicit Shared(const void *p) : at((uint32_t)__cvta_generic_to_shared(p)) { asm volatile("" : "+r"(at)); }
    __device__ __forceinline__ Shared operator+(int bytes) const {
        Shared moved;
        moved.at = at + bytes;
        return moved;
    }
    template <class T> __device__ __forceinline__ T &as() const { return *(T *)__cvta_shared_to_generic(at); }
    __device__ __forceinline__ uint4 load16() const { return as<uint4>(); }
    __device__ __forceinline__ uint2 load8() const { return as<uint2>(); }
    __device__ __forceinline__ uint32_t load4() const { return as<uint32_t>(); }
    __device__ __forceinline__ void store16(uint4 v) const { as<uint4>() = v; }
    __device__ __forceinline__ void copy16(const void *global) const {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(global) : "memory");
    }
    __device__ __forceinline__ void copy8(const void *global) const {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(at), "l"(global) : "memory");
    }
    __device__ __forceinline__ void copy4(const void *global) const {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(global) : "memory");
    }
};

// 16 or 4 bytes from device memory to shared memory, both aligned; complete after copy_wait.
__device__ __forceinline__ void copy_async(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async4(void *shared, const void *global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Programmatic dependent launch: a kernel's blocks may start as soon as all blocks of the one before have called follow(),
// and wait in their own until that one has completed. Every block of every kernel calls it, before it reads or writes
// anything that another kernel of a step writes or reads. Weights and the step's arrays, which no kernel writes, may be
// read earlier. See ds4_cuda/graphs.py.
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
#define DS4_REHEARSE  // kernels wait in follow(), see rehearse.cuh
#endif
__device__ __forceinline__ int unknown_zero() {  // to the compiler
    int v;
    asm volatile("mov.s32 %0, 0;" : "=r"(v));
    return v;
}
#endif
