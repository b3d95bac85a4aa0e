/* Helpers look for an open loop, claim a chunk of its tasks, run it, and look again until the step ends. Their threads
 * come from OpenMP where the compiler has it (so that OMP_PLACES and the like work), else from POSIX threads. */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "model.h"

#define SPINS 2000 /* looks before giving up the processor: some tens of microseconds */

struct ds4_pool {
    /* Loop number (upper half) and number of unclaimed tasks (lower half), in one word. A claim replaces the word that
     * it was read from, so it succeeds only on a loop that still had tasks when its description was read; and the
     * description is not written again before every task of the loop is done. */
    _Alignas(64) _Atomic uint64_t claim;
    _Alignas(64) atomic_int n_done;
    _Alignas(64) atomic_int is_open; /* a step is running */
    atomic_int n_tasks, chunk;
    _Atomic(ds4_task *) fn;
    _Atomic(const void *) arg;
    _Atomic(ds4_run *) run;
    pthread_mutex_t lock; /* guards is_quitting and the sleep of helpers between steps */
    pthread_cond_t wake;
    int n_threads, is_quitting, n_hosts;
    pid_t pid; /* a forked child has the pool's memory but none of its threads */
    atomic_int n_seated;
    pthread_t *hosts;
};

static inline void relax(int *n_looks) {
    if (++*n_looks > SPINS) {
        sched_yield();
        return;
    }
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Run chunks until none is left to claim; false when there was none. */
static int help(ds4_pool *pool, int thread) {
    int has_worked = 0;
    uint64_t claim = atomic_load_explicit(&pool->claim, memory_order_acquire);
    while ((uint32_t)claim) {
        const int n_left = (int)(uint32_t)claim;
        const int first = atomic_load_explicit(&pool->n_tasks, memory_order_relaxed) - n_left;
        const int chunk = atomic_load_explicit(&pool->chunk, memory_order_relaxed);
        ds4_task *fn = atomic_load_explicit(&pool->fn, memory_order_relaxed);
        const void *arg = atomic_load_explicit(&pool->arg, memory_order_relaxed);
        ds4_run *run = atomic_load_explicit(&pool->run, memory_order_relaxed);
        const int n = n_left < chunk ? n_left : chunk;
        if (!atomic_compare_exchange_weak_explicit(&pool->claim, &claim, claim - (uint64_t)n, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue; /* somebody else was faster; `claim` is the new word */
        for (int task = first; task < first + n; task++) fn(run, arg, task, thread);
        has_worked = 1;
        atomic_fetch_add_explicit(&pool->n_done, n, memory_order_release);
        claim = atomic_load_explicit(&pool->claim, memory_order_acquire);
    }
    return has_worked;
}

static void serve(ds4_pool *pool, int thread) {
    int n_looks = 0;
    while (atomic_load_explicit(&pool->is_open, memory_order_acquire))
        if (help(pool, thread)) n_looks = 0;
        else relax(&n_looks);
}

void ds4_parallel(ds4_run *run, ds4_task *fn, const void *arg, int n_tasks, int is_worth_it) {
    ds4_pool *pool = run->pool;
    if (!is_worth_it || n_tasks < 2 || pool->n_hosts == 0) {
        for (int task = 0; task < n_tasks; task++) fn(run, arg, task, 0);
        return;
    }
    const int chunk = n_tasks / (8 * pool->n_threads);
    const uint64_t loop = atomic_load_explicit(&pool->claim, memory_order_relaxed) >> 32;
    /* The last loop's word says that nothing is left, so nobody acts on a half-written description. */
    atomic_store_explicit(&pool->n_done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->fn, fn, memory_order_relaxed);
    atomic_store_explicit(&pool->arg, arg, memory_order_relaxed);
    atomic_store_explicit(&pool->run, run, memory_order_relaxed);
    atomic_store_explicit(&pool->chunk, chunk > 1 ? chunk : 1, memory_order_relaxed);
    atomic_store_explicit(&pool->n_tasks, n_tasks, memory_order_relaxed);
    atomic_store_explicit(&pool->claim, (loop + 1) << 32 | (uint32_t)n_tasks, memory_order_release);
    help(pool, 0);
    int n_looks = 0;
    while (atomic_load_explicit(&pool->n_done, memory_order_acquire) < n_tasks) relax(&n_looks);
}

/* A helper's life: asleep between steps, looking for work during one. */
static void helper(ds4_pool *pool, int thread) {
    for (;;) {
        pthread_mutex_lock(&pool->lock);
        while (!pool->is_quitting && !atomic_load(&pool->is_open)) pthread_cond_wait(&pool->wake, &pool->lock);
        const int is_quitting = pool->is_quitting;
        pthread_mutex_unlock(&pool->lock);
        if (is_quitting) return;
        serve(pool, thread);
    }
}

#ifdef _OPENMP
/* One parallel region for the pool's whole life. A region per step, let alone per loop, would end by waiting for
 * every helper to be scheduled: milliseconds each time on a busy machine. */
static void *host(void *arg) {
    ds4_pool *pool = arg;
#pragma omp parallel num_threads(pool->n_threads - 1)
    helper(pool, omp_get_thread_num() + 1);
    return NULL;
}

static int n_hosts(const ds4_pool *pool) { return pool->n_threads > 1; }
#else
static void *host(void *arg) {
    ds4_pool *pool = arg;
    helper(pool, atomic_fetch_add(&pool->n_seated, 1) + 1);
    return NULL;
}

static int n_hosts(const ds4_pool *pool) { return pool->n_threads - 1; }
#endif

static void start_hosts(ds4_pool *pool) {
    sigset_t all, before; /* signals belong to Python's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pool->hosts = calloc((size_t)pool->n_threads, sizeof *pool->hosts);
    while (pool->hosts && pool->n_hosts < n_hosts(pool))
        if (pthread_create(&pool->hosts[pool->n_hosts], NULL, host, pool)) break;
        else pool->n_hosts++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

ds4_pool *ds4_pool_new(int n_threads) {
    void *memory;
    if (posix_memalign(&memory, 64, sizeof(ds4_pool))) return NULL;
    ds4_pool *pool = memory;
    memset(pool, 0, sizeof *pool);
    pool->n_threads = n_threads;
    pool->pid = getpid();
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    start_hosts(pool);
    return pool;
}

int ds4_pool_step(ds4_pool *pool, ds4_run *run, int (*body)(ds4_run *run, int arg), int arg) {
    if (pool->pid != getpid()) pool->n_hosts = 0;
    if (pool->n_hosts == 0) return body(run, arg);
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->is_open, 1);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    const int status = body(run, arg);
    atomic_store(&pool->is_open, 0);
    return status;
}

void ds4_pool_free(ds4_pool *pool) {
    if (!pool) return;
    if (pool->pid != getpid()) return; /* the lock may be held for ever, and nobody can be joined: let it go */
    pthread_mutex_lock(&pool->lock);
    pool->is_quitting = 1;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->n_hosts; i++) pthread_join(pool->hosts[i], NULL);
    free(pool->hosts);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}
