/* A self-test of the pool: many short loops, every task exactly once. Races show where threads outnumber cores. */
#include "pool.h"

#include <stdatomic.h>
#include <string.h>

#include "model.h"

#define MOST 97

typedef struct {
    atomic_int runs[MOST];
    int loop;
} tally;

static void count_task(ds4_run *run, const void *arg, int task, int thread) {
    tally *t = (tally *)arg;
    (void)run;
    (void)thread;
    /* A task of another loop, or one that runs twice, spoils the count. */
    atomic_fetch_add_explicit(&t->runs[task], t->loop, memory_order_relaxed);
}

static int run_loops(ds4_run *run, int n_loops) {
    static const int sizes[] = {2, MOST, 3, 40, 7, 64, 5};
    tally tallies[2]; /* two in turn, so that a late helper would find the wrong one */
    for (int i = 1; i <= n_loops; i++) {
        tally *t = &tallies[i % 2];
        const int n_tasks = sizes[i % 7];
        memset(t, 0, sizeof *t);
        t->loop = i;
        ds4_parallel(run, count_task, t, n_tasks, 1);
        for (int task = 0; task < MOST; task++)
            if (t->runs[task] != (task < n_tasks ? i : 0)) return i;
    }
    return 0;
}

int ds4_pool_check(int n_threads, int n_loops) {
    ds4_run run;
    memset(&run, 0, sizeof run);
    run.pool = ds4_pool_new(n_threads);
    if (!run.pool) return -1;
    int wrong = 0;
    for (int step = 0; step < 20 && !wrong; step++) wrong = ds4_pool_step(run.pool, &run, run_loops, n_loops / 20);
    ds4_pool_free(run.pool);
    return wrong;
}
