# StepPlan: one step as flat int32 arrays, allocated once per engine and refilled for every step.


cdef class _Int32Array:
    """An int32 array of fixed capacity: a C pointer for the core, read-only numpy views for backends."""

    cdef int32_t[::1] view
    cdef int32_t *at
    cdef object base

    def __cinit__(self, Py_ssize_t capacity):
        self.base = np.zeros(max(capacity, 1), np.int32)
        self.view = self.base
        self.at = &self.view[0]
        self.base.flags.writeable = False

    cdef object first(self, Py_ssize_t n):
        return self.base[:n]


@cython.final
cdef class StepPlan:
    """One validated step; see ds4.backend.contract.StepPlan for the meaning of every array."""

    cdef readonly int n_rows
    cdef readonly int n_items
    cdef readonly int n_logit_rows
    cdef _Int32Array _tokens, _pos, _row_item, _item_row, _item_pos, _item_slab, _page_start, _page_ids, _logit_rows
    cdef _Int32Array cow_page  # per item: the shared page that a private copy replaces, or -1
    cdef bint cancelled
    cdef readonly object logits

    def __cinit__(self, int max_rows, int max_items, Py_ssize_t max_pages):
        self._tokens = _Int32Array(max_rows)
        self._pos = _Int32Array(max_rows)
        self._row_item = _Int32Array(max_rows)
        self._item_row = _Int32Array(max_items + 1)
        self._item_pos = _Int32Array(max_items)
        self._item_slab = _Int32Array(max_items)
        self._page_start = _Int32Array(max_items + 1)
        self._page_ids = _Int32Array(max_pages)
        self._logit_rows = _Int32Array(max_rows)
        self.cow_page = _Int32Array(max_items)

    @property
    def tokens(self):
        return self._tokens.first(self.n_rows)

    @property
    def pos(self):
        return self._pos.first(self.n_rows)

    @property
    def row_item(self):
        return self._row_item.first(self.n_rows)

    @property
    def item_row(self):
        return self._item_row.first(self.n_items + 1)

    @property
    def item_pos(self):
        return self._item_pos.first(self.n_items)

    @property
    def item_slab(self):
        return self._item_slab.first(self.n_items)

    @property
    def page_start(self):
        return self._page_start.first(self.n_items + 1)

    @property
    def page_ids(self):
        return self._page_ids.first(self._page_start.at[self.n_items])

    @property
    def logit_rows(self):
        return self._logit_rows.first(self.n_logit_rows)

    def check(self):
        """Raise StepCancelledError if the step was cancelled, or whatever a pending signal raises (Ctrl-C)."""
        if self.cancelled:
            raise StepCancelledError("the step was cancelled; every session is where it was before it")
        PyErr_CheckSignals()

    cdef void clear(self) noexcept:
        self.n_rows = self.n_items = self.n_logit_rows = 0
        self.cancelled = False
        self._item_row.at[0] = 0
        self._page_start.at[0] = 0
