/* Matrix products: a list of jobs is cut into tasks of some weight rows each, shared out among the threads.
 *
 * A task decodes its weight rows into a buffer of its thread and multiplies them with every activation row of the
 * job, a few at a time. Where the cuts lie changes no bit: a result is one ds4_leaf dot product (see leaf.h). */
#include "matmul.h"

#define MAX_TASK_ROWS 64
#define X_CHUNK 64 /* activation rows per call of the leaf function */

static size_t padded(int n) { return ((size_t)n + 15) / 16 * 16; }

static int task_rows(const ds4_run *run, const ds4_job *job, int limit) {
    const size_t room = run->work.decode_floats / padded(job->mat.n_in);
    return room < (size_t)limit ? (int)room : limit;
}

/* First task of each job; returns their sum. */
static int count_tasks(ds4_run *run, const ds4_job *jobs, int n_jobs, int limit) {
    int32_t *start = run->work.job_start;
    start[0] = 0;
    for (int i = 0; i < n_jobs; i++) {
        const int rows = task_rows(run, jobs + i, limit);
        start[i + 1] = start[i] + (jobs[i].n_rows ? (jobs[i].mat.n_out + rows - 1) / rows : 0);
    }
    return start[n_jobs];
}

static int job_of_task(const int32_t *start, int n_jobs, int task) {
    int low = 0, high = n_jobs - 1; /* the last job whose start is not behind the task */
    while (low < high) {
        const int mid = (low + high + 1) / 2;
        if (start[mid] <= task) low = mid;
        else high = mid - 1;
    }
    return low;
}

/* Weight rows of one task, decoded and multiplied. */
static void run_part(ds4_run *run, const ds4_job *job, int part, int limit, int thread) {
    const ds4_mat *mat = &job->mat;
    const int n_rows = task_rows(run, job, limit), first = part * n_rows;
    const int n_w = mat->n_out - first < n_rows ? mat->n_out - first : n_rows;
    const size_t stride = padded(mat->n_in);
    float *decoded = run->work.thread_weights + (size_t)thread * run->work.decode_floats;
    const float *w[MAX_TASK_ROWS], *x[X_CHUNK];
    float *y[X_CHUNK];
    for (int i = 0; i < n_w; i++) {
        w[i] = decoded + (size_t)i * stride;
        run->leaf->decode[mat->dtype](mat->data + (size_t)(first + i) * mat->row_bytes, decoded + (size_t)i * stride,
                                      mat->n_in, &run->model.tables);
    }
    for (int j0 = 0; j0 < job->n_rows; j0 += X_CHUNK) {
        const int n_x = job->n_rows - j0 < X_CHUNK ? job->n_rows - j0 : X_CHUNK;
        for (int j = 0; j < n_x; j++) {
            x[j] = job->x + (size_t)(job->x_rows ? job->x_rows[j0 + j] : j0 + j) * job->x_stride;
            y[j] = job->y + (size_t)(job->y_rows ? job->y_rows[j0 + j] : j0 + j) * job->y_stride + first;
        }
        run->leaf->dots(w, n_w, x, n_x, mat->n_in, y);
    }
}

typedef struct {
    const ds4_job *jobs;
    int n_jobs, limit, first;
} slice;

static void run_task(ds4_run *run, const void *arg, int task, int thread) {
    const slice *s = arg;
    const int32_t *start = run->work.job_start;
    const int i = job_of_task(start, s->n_jobs, s->first + task);
    run_part(run, s->jobs + i, s->first + task - start[i], s->limit, thread);
}

/* The end of the tasks, from `task` on, that one poll interval has room for; *work is their multiply-adds. */
static int slice_end(ds4_run *run, const ds4_job *jobs, int n_jobs, int limit, int task, size_t *work) {
    const int32_t *start = run->work.job_start;
    int i = job_of_task(start, n_jobs, task);
    for (*work = 0; task < start[n_jobs] && *work < DS4_POLL_WORK; task++) {
        while (task >= start[i + 1]) i++;
        *work += (size_t)task_rows(run, jobs + i, limit) * (size_t)jobs[i].mat.n_in * (size_t)jobs[i].n_rows;
    }
    return task;
}

int ds4_matmul(ds4_run *run, const ds4_job *jobs, int n_jobs) {
    int limit = MAX_TASK_ROWS, n_tasks = count_tasks(run, jobs, n_jobs, limit);
    while (limit > 8 && n_tasks < 4 * run->n_threads && run->n_threads > 1) {
        limit /= 2;
        n_tasks = count_tasks(run, jobs, n_jobs, limit);
    }
    for (int task = 0; task < n_tasks;) {
        size_t work;
        const int end = slice_end(run, jobs, n_jobs, limit, task, &work);
        if (run->poll(run->poll_arg)) return DS4_STOPPED;
        const slice part = {jobs, n_jobs, limit, task};
        ds4_parallel(run, run_task, &part, end - task, work > DS4_SHARED_WORK);
        task = end;
    }
    return DS4_OK;
}
