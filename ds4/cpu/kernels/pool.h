/* Threads for the loops inside a step.
 *
 * A loop's tasks are claimed one chunk at a time by whoever is running: the thread that called, and helpers that the
 * operating system happens to have scheduled. The caller waits for claimed chunks only, never for a helper that has
 * not come, so that a busy machine slows a step down by its missing cores and not by its scheduler. Tasks of a loop
 * are independent and write to their own places: who runs what changes no bit. */
#ifndef DS4_POOL_H
#define DS4_POOL_H

typedef struct ds4_run ds4_run;
typedef struct ds4_pool ds4_pool;

/* thread: 0 .. n_threads - 1, to pick scratch memory. */
typedef void ds4_task(ds4_run *run, const void *arg, int task, int thread);

/* NULL when there is no memory. Fewer threads than asked for are not an error. */
ds4_pool *ds4_pool_new(int n_threads);
void ds4_pool_free(ds4_pool *pool);

/* body(run, arg) with the pool's helpers at hand; the only place where ds4_parallel may be called from. */
int ds4_pool_step(ds4_pool *pool, ds4_run *run, int (*body)(ds4_run *run, int arg), int arg);

/* fn for every task in [0, n_tasks), on the calling thread alone unless the loop is worth sharing. */
void ds4_parallel(ds4_run *run, ds4_task *fn, const void *arg, int n_tasks, int is_worth_it);

/* Self-test: 0 when every task of n_loops loops ran exactly once, else the number of the first wrong loop. */
int ds4_pool_check(int n_threads, int n_loops);

#endif
