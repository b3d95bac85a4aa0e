// Blocks of a kernel on one CPU thread: every CUDA thread is a fiber that runs until it has to wait for others.
//
// Barriers wait for all threads of the block that have not ended; collectives of a warp wait for the living lanes of their
// mask, and the last one to arrive does the work for all. What cannot go on is reported with the kernel and the thread.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <vector>

struct SimLaunch {  // as Launch in sim_driver.py
    unsigned grid[3], block, shared_bytes, stack_bytes, argument_bytes, order;
    char *stacks, *shared;  // room for 1024 stacks, stack_bytes apart; dynamic shared memory
    const char *arguments;
    char *error;  // room for 512 characters
};

struct SimIndex {
    unsigned x, y, z;
};
static SimIndex threadIdx, blockIdx, blockDim, gridDim;

#if defined(__x86_64__)
// Saves the present stack pointer to *from and goes on at `to`.
extern "C" __attribute__((visibility("hidden"))) void sim_switch(void **from, void *to);
asm(".text\n.globl sim_switch\n.hidden sim_switch\n.type sim_switch,@function\nsim_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n.size sim_switch, .-sim_switch\n");
#else
#include <ucontext.h>
#endif

// Where static shared memory lies (see __shared__ in sim.h).
extern "C" __attribute__((weak, visibility("hidden"))) char __start_ds4_shared[], __stop_ds4_shared[];

namespace sim {

struct Copy {  // of copy_async
    void *to;
    const void *from;
    int bytes;
};

struct Thread {
    void *sp;
    unsigned stack;  // its number
#if !defined(__x86_64__)
    ucontext_t context;
#endif
    std::vector<Copy> copies;
    std::vector<size_t> groups;  // ends of committed groups in `copies`
};

using Finish = void (*)(void *const *lanes, uint32_t mask);

struct Warp {
    uint32_t alive, ready, fresh, waiting, at_barrier;  // fresh: not begun
    uint32_t mask[32];
    Finish finish[32];
    void *operation[32];
};

static Thread threads[1024], main_thread;
static Warp warps[32];
static unsigned n_alive, n_at_barrier, barrier_sum, barrier_result;
static unsigned free_stacks[1024], n_free;  // last in, first out: threads that never wait share one that is in the cache
static bool failed;
static const SimLaunch *launch;
static const char *kernel_name;
static void (*kernel_body)(const char *arguments);
static char *dynamic_shared;
static sigjmp_buf way_out;

static inline void change(Thread &from, Thread &to) {
#if defined(__x86_64__)
    sim_switch(&from.sp, to.sp);
#else
    swapcontext(&from.context, &to.context);
#endif
}

__attribute__((noinline)) static void say(const char *format, ...) {
    char text[256];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    snprintf(launch->error, 512, "%s, block (%u, %u, %u) of (%u, %u, %u), thread %u of %u: %s", kernel_name, blockIdx.x, blockIdx.y,
             blockIdx.z, gridDim.x, gridDim.y, gridDim.z, threadIdx.x, blockDim.x, text);
    failed = true;
}

// Ends the launch from within a thread; its stack is left as it is.
#define SIM_FAIL(...) (sim::say(__VA_ARGS__), sim::change(sim::threads[threadIdx.x], sim::main_thread), __builtin_unreachable())

__attribute__((noinline)) static void wait() {
    const unsigned me = threadIdx.x;
    change(threads[me], main_thread);
}

static inline Warp &warp() { return warps[threadIdx.x / 32]; }

static void release_barrier() {
    for (unsigned w = 0; w * 32 < blockDim.x; w++) {
        warps[w].ready |= warps[w].at_barrier;
        warps[w].at_barrier = 0;
    }
    n_at_barrier = 0;
    barrier_result = barrier_sum;
    barrier_sum = 0;
}

// All threads of the block; returns the sum of their values.
__attribute__((noinline)) static unsigned barrier(unsigned value) {
    warp().at_barrier |= 1u << threadIdx.x % 32;
    barrier_sum += value;
    if (++n_at_barrier == n_alive) {
        release_barrier();
        warp().ready &= ~(1u << threadIdx.x % 32);
    } else {
        wait();
    }
    return barrier_result;
}

// If all living lanes of lane's mask have arrived, does their operation and lets them go.
static bool complete(Warp &w, unsigned lane) {
    const uint32_t mask = w.mask[lane], need = mask & w.alive;
    if ((w.waiting & need) != need) return false;
    w.finish[lane](w.operation, need);
    w.waiting &= ~need;
    w.ready |= need;
    return true;
}

// One operation of the lanes in `mask`; `finish` works on all of them.
__attribute__((noinline)) static void meet(uint32_t mask, void *operation, Finish finish) {
    Warp &w = warp();
    const unsigned lane = threadIdx.x % 32;
    if (!(mask >> lane & 1)) SIM_FAIL("a lane calls a collective of mask %08x that leaves it out", mask);
    for (uint32_t others = w.waiting & mask; others; others &= others - 1) {
        const int other = __builtin_ctz(others);
        if (w.mask[other] == mask && w.finish[other] == finish) {
            if (mask == 0xffffffffu) break;  // it was compared with the others
        } else
            SIM_FAIL("lanes %u and %d are at different collectives (masks %08x, %08x)", lane, other, mask, w.mask[other]);
    }
    w.mask[lane] = mask, w.finish[lane] = finish, w.operation[lane] = operation;
    w.waiting |= 1u << lane;
    if (complete(w, lane)) w.ready &= ~(1u << lane);
    else wait();
}

static void leave() {  // the present thread has ended
    Warp &w = warp();
    w.alive &= ~(1u << threadIdx.x % 32);
    n_alive--;
    free_stacks[n_free++] = threads[threadIdx.x].stack;
    for (uint32_t rest = w.waiting; rest; rest &= rest - 1)
        if (complete(w, __builtin_ctz(rest))) break;
    if (n_alive && n_at_barrier == n_alive) release_barrier();
}

static void thread_main() {
    kernel_body(launch->arguments);
    leave();
    change(threads[threadIdx.x], main_thread);
    __builtin_unreachable();
}

static void begin(Thread &t) {
    t.copies.clear();
    t.groups.clear();
    t.stack = free_stacks[--n_free];
    char *bottom = launch->stacks + (size_t)t.stack * launch->stack_bytes, *top = bottom + launch->stack_bytes - 64 - t.stack % 32 * 128;
#if defined(__x86_64__)
    void **sp = (void **)top;  // a multiple of 16: after the return into thread_main it is what a call leaves behind
    *--sp = nullptr;
    *--sp = (void *)thread_main;
    for (int k = 0; k < 6; k++) *--sp = nullptr;
    t.sp = sp;
#else
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = bottom;
    t.context.uc_stack.ss_size = top - bottom;
    t.context.uc_link = nullptr;
    makecontext(&t.context, thread_main, 0);
#endif
}

__attribute__((noinline)) static void say_deadlock() {
    unsigned first = 0;
    while (!(warps[first / 32].alive >> first % 32 & 1)) first++;
    threadIdx.x = first;
    const Warp &w = warps[first / 32];
    say("deadlock; %u threads live and %u are at a barrier; of this warp %08x live, %08x are at a barrier, %08x at a collective", n_alive,
        n_at_barrier, w.alive, w.at_barrier, w.waiting);
}

// The lane that runs next. order 0: ascending, 1: descending, else a pseudo-random one.
static inline unsigned next_lane(uint32_t ready, uint32_t &random) {
    if (launch->order == 0) return __builtin_ctz(ready);
    if (launch->order == 1) return 31 - __builtin_clz(ready);
    random = random * 1664525u + 1013904223u;
    const uint32_t high = ready >> (random >> 27) << (random >> 27);
    return __builtin_ctz(high ? high : ready);
}

static void run_block() {
    const unsigned n = blockDim.x, n_warps = (n + 31) / 32;
    static uint32_t random;
    random = launch->order * 2654435761u + blockIdx.x * 97u + blockIdx.y * 13u;
    for (unsigned w = 0; w < n_warps; w++) {
        const unsigned lanes = n - w * 32 < 32 ? n - w * 32 : 32;
        warps[w].alive = warps[w].ready = warps[w].fresh = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
        warps[w].waiting = warps[w].at_barrier = 0;
    }
    n_alive = n, n_at_barrier = barrier_sum = 0;
    for (n_free = 0; n_free < n; n_free++) free_stacks[n_free] = n - 1 - n_free;
    while (n_alive) {
        bool moved = false;
        for (unsigned k = 0; k < n_warps; k++) {
            const unsigned at = launch->order == 1 ? n_warps - 1 - k : k;
            Warp &w = warps[at];
            while (w.ready) {
                const unsigned lane = next_lane(w.ready, random);
                w.ready &= ~(1u << lane);
                threadIdx.x = at * 32 + lane;
                if (w.fresh >> lane & 1) {
                    w.fresh &= ~(1u << lane);
                    begin(threads[threadIdx.x]);
                }
                change(main_thread, threads[threadIdx.x]);
                moved = true;
                if (failed) return;
            }
        }
        if (!moved) return say_deadlock();
    }
}

static void on_signal(int number, siginfo_t *info, void *) {
    say(number == SIGSEGV || number == SIGBUS ? "illegal address %p" : number == SIGFPE ? "division by zero" : "illegal instruction", info->si_addr);
    siglongjmp(way_out, 1);
}

static char signal_stack[1 << 16];
static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};

// Shared memory is garbage when a block starts. Of the static part, which is that of all kernels of a file, only what the
// first block wrote is wiped again.
struct Wipe {
    char *first = __start_ds4_shared, *end = __stop_ds4_shared;
    void before() const {
        if (first < end) memset(first, 0xff, end - first);
        memset(dynamic_shared, 0xff, launch->shared_bytes);
    }
    void learn() {
        while (first < end && *first == (char)0xff) first++;
        while (first < end && end[-1] == (char)0xff) end--;
    }
};

static int run(const SimLaunch *l, const char *name, void (*body)(const char *)) {
    launch = l, kernel_name = name, kernel_body = body, failed = false, dynamic_shared = l->shared;
    gridDim = {l->grid[0], l->grid[1], l->grid[2]}, blockDim = {l->block, 1, 1}, threadIdx = {0, 0, 0};
    struct sigaction action = {}, old[4];
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    stack_t stack = {}, old_stack;
    stack.ss_sp = signal_stack, stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &old_stack);
    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &action, &old[i]);
    if (!sigsetjmp(way_out, 0)) {
        Wipe wipe;
        for (blockIdx.z = 0; blockIdx.z < gridDim.z && !failed; blockIdx.z++)
            for (blockIdx.y = 0; blockIdx.y < gridDim.y && !failed; blockIdx.y++)
                for (blockIdx.x = 0; blockIdx.x < gridDim.x && !failed; blockIdx.x++) {
                    const bool is_first = !blockIdx.x && !blockIdx.y && !blockIdx.z;
                    wipe.before();
                    run_block();
                    if (is_first) wipe.learn();
                }
    }
    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &old[i], nullptr);
    sigaltstack(&old_stack, nullptr);
    return failed;
}

}  // namespace sim
