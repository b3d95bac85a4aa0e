# Single kernels, callable from Python: for tests and measurements, not part of a step.

def decode_row(str dtype, const uint8_t[::1] row, float[::1] out, const float[:, ::1] iq2_xxs, str level=None):
    """Decode one row of whole blocks, len(out) values."""
    cdef ds4_tables tables
    fill_tables(&tables, iq2_xxs)
    find_level(level).decode[<int>DTYPES[dtype]](&row[0], &out[0], out.shape[0], &tables)


def dots(const float[:, ::1] w, const float[:, ::1] x, float[:, ::1] y, str level=None):
    """y[j, i] = w[i] . x[j]"""
    cdef const float *wp[64]
    cdef const float *xp[64]
    cdef float *yp[64]
    cdef int i
    if w.shape[0] > 64 or x.shape[0] > 64 or x.shape[1] != w.shape[1] or y.shape[0] != x.shape[0] or y.shape[1] != w.shape[0]:
        raise ValueError("shapes do not fit, or more than 64 rows")
    for i in range(w.shape[0]):
        wp[i] = &w[i, 0]
    for i in range(x.shape[0]):
        xp[i], yp[i] = &x[i, 0], &y[i, 0]
    find_level(level).dots(wp, w.shape[0], xp, x.shape[0], w.shape[1], yp)


def weigh(const float[:, ::1] rows, const float[:, ::1] weight, float[:, ::1] y, str level=None):
    """y[j] += sum over i of weight[j, i] * rows[i]"""
    cdef const float *rp[64]
    cdef const float *wp[64]
    cdef float *yp[64]
    cdef int i
    if rows.shape[0] > 64 or y.shape[0] > 64 or weight.shape[0] != y.shape[0] or weight.shape[1] != rows.shape[0] or y.shape[1] != rows.shape[1]:
        raise ValueError("shapes do not fit, or more than 64 rows")
    for i in range(rows.shape[0]):
        rp[i] = &rows[i, 0]
    for i in range(y.shape[0]):
        wp[i], yp[i] = &weight[i, 0], &y[i, 0]
    find_level(level).weigh(rp, rows.shape[0], wp, y.shape[0], rows.shape[1], yp)


cdef int never(void *arg) noexcept nogil:
    return 0


def multiply(str dtype, const uint8_t[:, ::1] w, const float[:, ::1] x, float[:, ::1] y,
             const float[:, ::1] iq2_xxs, int threads=1, str level=None):
    """y = x @ w.T with w, uint8 [n_out, row bytes], in its file format: the product that a step uses."""
    cdef size_t decode_floats = 4 * ((x.shape[1] + 15) // 16 * 16)
    cdef int32_t[::1] job_start = memoryview(bytearray(8)).cast("i")
    cdef float[::1] room = memoryview(bytearray(4 * decode_floats * threads)).cast("f")
    cdef ds4_run *run = <ds4_run *>PyMem_Calloc(1, sizeof(ds4_run))
    cdef ds4_mat mat
    cdef ds4_job job
    if run == NULL:
        raise MemoryError("no memory for a run")
    try:
        fill_tables(&run.model.tables, iq2_xxs)
        mat.data, mat.row_bytes, mat.dtype, mat.n_in, mat.n_out = &w[0, 0], w.shape[1], DTYPES[dtype], x.shape[1], w.shape[0]
        run.leaf, run.poll, run.n_threads = find_level(level), never, threads
        run.work.decode_floats, run.work.thread_weights, run.work.job_start = decode_floats, &room[0], &job_start[0]
        run.pool = ds4_pool_new(threads)
        job = ds4_plain_job(mat, &x[0, 0], &y[0, 0], x.shape[0])
        ds4_matmul(run, &job, 1)
    finally:
        ds4_pool_free(run.pool)
        PyMem_Free(run)


def f16_to_f32(const uint16_t[::1] halves, float[::1] out):
    cdef Py_ssize_t i
    for i in range(halves.shape[0]):
        out[i] = ds4_f16_to_f32(halves[i])


def bf16_to_f32(const uint16_t[::1] halves, float[::1] out):
    cdef Py_ssize_t i
    for i in range(halves.shape[0]):
        out[i] = ds4_bf16_to_f32(halves[i])


def f32_to_f16(const float[::1] values, uint16_t[::1] out):
    cdef Py_ssize_t i
    for i in range(values.shape[0]):
        out[i] = ds4_f32_to_f16(values[i])


def rope_angles(const double[::1] freq, int pos, float[::1] cos_out, float[::1] sin_out):
    ds4_rope_angles(&freq[0], freq.shape[0], pos, &cos_out[0], &sin_out[0])


def sqrt_softplus(float v):
    return ds4_sqrt_softplus(v)


def swiglu(float gate, float up, float limit):
    return ds4_swiglu(gate, up, limit)


def round_latent(float[::1] row, int n_plain):
    ds4_round_latent(&row[0], row.shape[0], n_plain)


def round_index(float[::1] row):
    ds4_round_index(&row[0], row.shape[0])


def round_half(float[::1] row):
    ds4_round_half(&row[0], row.shape[0])


def pool_check(int n_threads, int n_loops):
    """0 when every task of n_loops short loops ran exactly once on n_threads threads."""
    cdef int wrong
    with nogil:
        wrong = ds4_pool_check(n_threads, n_loops)
    return wrong
