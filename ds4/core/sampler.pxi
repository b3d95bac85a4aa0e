# Drawing one token from a row of logits, as ds4.sampling documents. C code without the GIL; no state of its own.

cdef struct Draw:
    double temperature, top_p, min_p, repetition, presence, frequency
    int64_t top_k
    uint64_t seed, pos


cdef inline uint64_t mix64(uint64_t x) noexcept nogil:
    # SplitMix64: increment by the golden ratio, then the finaliser.
    x += <uint64_t>0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t>0x94D049BB133111EB
    return x ^ (x >> 31)


cdef inline double uniform(uint64_t seed, uint64_t pos) noexcept nogil:
    """A number in [0, 1) from (seed, position)."""
    return <double>(mix64(mix64(seed) ^ pos) >> 11) * (1.0 / 9007199254740992.0)


cdef enum Fault:
    FINE = 0
    BAD_VALUE = 1  # NaN or +inf at `bad`
    ALL_MASKED = 2


cdef Fault scan(const float *row, Py_ssize_t n, Py_ssize_t *best, Py_ssize_t *bad) noexcept nogil:
    """Index of the largest logit (lowest on ties), or the reason there is none. -inf entries are masked tokens."""
    cdef Py_ssize_t i, arg = -1
    cdef float top = -INFINITY
    for i in range(n):
        if row[i] > top:
            top, arg = row[i], i
        elif isnan(row[i]):
            bad[0] = i
            return BAD_VALUE
    best[0] = bad[0] = arg
    if arg < 0:
        return ALL_MASKED
    return BAD_VALUE if top == INFINITY else FINE


cdef inline bint before(const double *x, int32_t a, int32_t b) noexcept nogil:
    """Candidate order: falling logit, then rising id."""
    return x[a] > x[b] or (x[a] == x[b] and a < b)


cdef void sift(const double *x, int32_t *heap, Py_ssize_t n, Py_ssize_t i) noexcept nogil:
    cdef Py_ssize_t child
    cdef int32_t moving = heap[i]
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and before(x, heap[child + 1], heap[child]):
            child += 1
        if not before(x, heap[child], moving):
            break
        heap[i] = heap[child]
        i = child
    heap[i] = moving


cdef void heapify(const double *x, int32_t *heap, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        heap[i] = <int32_t>i
    for i in range(n // 2 - 1, -1, -1):
        sift(x, heap, n, i)


cdef inline int32_t pop(const double *x, int32_t *heap, Py_ssize_t *n) noexcept nogil:
    cdef int32_t top = heap[0]
    n[0] -= 1
    heap[0] = heap[n[0]]
    if n[0] > 0:
        sift(x, heap, n[0], 0)
    return top


cdef void penalise(double *x, Py_ssize_t n, const int32_t *seen, Py_ssize_t n_seen, int32_t *counts,
                   const Draw *draw) noexcept nogil:
    cdef Py_ssize_t i
    cdef int32_t token
    for i in range(n):
        counts[i] = 0
    for i in range(n_seen):
        counts[seen[i]] += 1
    for i in range(n_seen):
        token = seen[i]
        if counts[token] == 0:
            continue
        x[token] = x[token] / draw.repetition if x[token] > 0 else x[token] * draw.repetition
        x[token] -= draw.presence + counts[token] * draw.frequency
        counts[token] = 0  # once per distinct token


cdef Py_ssize_t keep_best(const double *x, int32_t *heap, Py_ssize_t n, Py_ssize_t k) noexcept nogil:
    """Reduce a heap of n candidates to its first k, sorted (a sorted array is a heap)."""
    cdef Py_ssize_t i, left = n
    cdef int32_t token
    for i in range(k):
        # The heap shrinks from the back, so the popped candidate is parked behind it: [heap | k-th .. 1st]
        token = pop(x, heap, &left)
        heap[left] = token
    for i in range(k // 2):
        token = heap[left + i]
        heap[left + i] = heap[n - 1 - i]
        heap[n - 1 - i] = token
    memmove(heap, heap + left, k * sizeof(int32_t))
    return k


cdef int32_t walk(const double *x, int32_t *heap, Py_ssize_t n, double goal) noexcept nogil:
    """The candidate at which the running mass first exceeds goal."""
    cdef int32_t token, last = heap[0]
    cdef double p, mass = 0.0
    while n > 0:
        token = pop(x, heap, &n)
        p = exp(x[token])
        if p == 0.0:
            break
        last = token
        mass += p
        if mass > goal:
            break
    return last


cdef int32_t pick(double *x, Py_ssize_t n, double top, int32_t *heap, const Draw *draw) noexcept nogil:
    """Draw from adjusted logits x (below +inf, largest `top` finite); x is overwritten."""
    cdef Py_ssize_t i, left = n, kept = 0
    cdef int32_t token = heap[0]
    cdef double mass = 0.0, total = 0.0, p
    for i in range(n):
        x[i] = (x[i] - top) / draw.temperature  # the best is 0, so exp cannot overflow
    heapify(x, heap, n)
    if 0 < draw.top_k < n:
        left = keep_best(x, heap, n, draw.top_k)
    for i in range(left):
        total += exp(x[heap[i]]) if left < n else exp(x[i])
    if draw.top_p == 1.0 and draw.min_p == 0.0:
        return walk(x, heap, left, uniform(draw.seed, draw.pos) * total)
    i = left
    while i > 0:
        token = heap[0]
        p = exp(x[token])
        if kept > 0 and (p < draw.min_p or p == 0.0):
            break
        pop(x, heap, &i)
        heap[i] = token  # parked behind the heap, as in keep_best
        mass += p
        kept += 1
        if mass >= draw.top_p * total:
            break
    total = uniform(draw.seed, draw.pos) * mass
    mass = 0.0
    for i in range(kept):
        token = heap[left - 1 - i]
        mass += exp(x[token])
        if mass > total:
            break
    return token


cdef double log_sum_exp(const float *row, Py_ssize_t n, double top) noexcept nogil:
    cdef Py_ssize_t i
    cdef double total = 0.0
    for i in range(n):
        total += exp(row[i] - top)
    return top + log(total)


@cython.final
cdef class _Scratch:
    """Working memory of one draw, freed with it."""

    cdef double *x
    cdef int32_t *heap
    cdef int32_t *counts

    def __cinit__(self, Py_ssize_t n):
        self.x = <double *>PyMem_Malloc(n * sizeof(double))
        self.heap = <int32_t *>PyMem_Malloc(n * sizeof(int32_t))
        self.counts = <int32_t *>PyMem_Malloc(n * sizeof(int32_t))
        if self.x == NULL or self.heap == NULL or self.counts == NULL:
            raise MemoryError("sampling")

    def __dealloc__(self):
        PyMem_Free(self.x)
        PyMem_Free(self.heap)
        PyMem_Free(self.counts)
