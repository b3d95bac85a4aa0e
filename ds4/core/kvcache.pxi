# KVCache: who owns which slab and page of the runner's memory. Numbers only; the bytes are the runner's.
#
#   page refs:  0 free · 1 one session's own · n > 1 shared by n sessions (never written while shared)


# no_gc: it holds weak references only, so no cycle goes through it, and it must stay whole while sessions that are
# being collected give their memory back.
@cython.final
@cython.no_gc
cdef class KVCache:
    """The slabs and pages of one engine, with reference counts. Numbers only, no bytes."""

    cdef readonly int n_slabs
    cdef readonly int n_pages
    cdef int n_free_slabs
    cdef int n_free_pages
    cdef int *page_refs
    cdef int *page_stack  # [0, n_free_pages) free page numbers
    cdef int *slab_stack  # [0, n_free_slabs) free slab numbers
    cdef list owners  # per slab: weak reference to its session, or None

    def __cinit__(self, int n_slabs, int n_pages):
        cdef int i
        self.n_slabs, self.n_pages = n_slabs, n_pages
        self.page_refs = <int *>PyMem_Malloc(max(n_pages, 1) * sizeof(int))
        self.page_stack = <int *>PyMem_Malloc(max(n_pages, 1) * sizeof(int))
        self.slab_stack = <int *>PyMem_Malloc(max(n_slabs, 1) * sizeof(int))
        if self.page_refs == NULL or self.page_stack == NULL or self.slab_stack == NULL:
            raise MemoryError("page tables")
        # Stacks are filled downwards, so that the lowest numbers are handed out first.
        for i in range(n_pages):
            self.page_refs[i] = 0
            self.page_stack[i] = n_pages - 1 - i
        for i in range(n_slabs):
            self.slab_stack[i] = n_slabs - 1 - i
        self.n_free_pages, self.n_free_slabs = n_pages, n_slabs
        self.owners = [None] * n_slabs

    def __dealloc__(self):
        PyMem_Free(self.page_refs)
        PyMem_Free(self.page_stack)
        PyMem_Free(self.slab_stack)

    @property
    def free_pages(self):
        """Pages nobody owns."""
        return self.n_free_pages

    @property
    def free_slabs(self):
        """Sessions that can still be created."""
        return self.n_free_slabs

    cdef int take_slab(self, Session session) except -1:
        if self.n_free_slabs == 0:
            raise SessionsExhaustedError(
                f"all {self.n_slabs} sessions of this engine are in use; close one, or open the engine with a larger "
                "Limits(sessions=...)",
                sessions=self.n_slabs,
            )
        self.n_free_slabs -= 1
        cdef int slab = self.slab_stack[self.n_free_slabs]
        self.owners[slab] = weakref.ref(session)
        return slab

    cdef void give_slab(self, int slab) noexcept:
        self.owners[slab] = None
        self.slab_stack[self.n_free_slabs] = slab
        self.n_free_slabs += 1

    cdef int take_page(self) noexcept nogil:
        # The caller has compared its need with n_free_pages.
        self.n_free_pages -= 1
        cdef int page = self.page_stack[self.n_free_pages]
        self.page_refs[page] = 1
        return page

    cdef void drop_page(self, int page) noexcept nogil:
        self.page_refs[page] -= 1
        if self.page_refs[page] == 0:
            self.page_stack[self.n_free_pages] = page
            self.n_free_pages += 1

    def check_integrity(self):
        """Raise AssertionError unless every page is owned exactly as often as it is counted, and no slab is lost.

        Call it when no step is running; tests call it after every test.
        """
        cdef Session session
        cdef int i
        owned = [0] * self.n_pages
        live = 0
        for slab, ref in enumerate(self.owners):
            session = None if ref is None else ref()
            if session is None or session.closed:
                continue
            live += 1
            assert session.slab == slab, f"slab {slab} is listed for a session that has slab {session.slab}"
            assert session.n_pages == pages_for(session.n_tokens), (
                f"session at {session.n_tokens} tokens has {session.n_pages} pages"
            )
            for i in range(session.n_pages):
                owned[session.page_ids[i]] += 1
        counted = [self.page_refs[i] for i in range(self.n_pages)]
        assert owned == counted, f"pages owned {owned} but counted {counted}"
        free = sorted(self.page_stack[i] for i in range(self.n_free_pages))
        assert free == [i for i, n in enumerate(counted) if n == 0], "the free list differs from the unowned pages"
        free_slabs = {self.slab_stack[i] for i in range(self.n_free_slabs)}
        assert len(free_slabs) == self.n_free_slabs, "a slab is free twice"
        assert live + len(free_slabs) == self.n_slabs, f"{live} sessions + {len(free_slabs)} free of {self.n_slabs}"
