# cython: autotestdict=False
"""The door to the C kernels: one Machine per opened model.

A Machine holds the C records (sizes, pointers, the running step) and keeps alive every array they point into. It
knows no file names, allocates no cache and decides nothing: `ds4.cpu.backend` does.
"""

cimport cython
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int32_t, uint8_t, uint16_t
from libc.string cimport memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from ds4.errors import BackendError

include "_kernels_h.pxi"

DTYPES = {
    "F32": DS4_F32, "F16": DS4_F16, "BF16": DS4_BF16, "Q8_0": DS4_Q8_0, "Q4_0": DS4_Q4_0, "Q4_K": DS4_Q4_K,
    "Q5_K": DS4_Q5_K, "Q6_K": DS4_Q6_K, "Q2_K": DS4_Q2_K, "IQ2_XXS": DS4_IQ2_XXS, "MXFP4": DS4_MXFP4,
}
LAYER_MATS = {
    "hc_attn_fn.weight": M_HC_ATTN, "hc_ffn_fn.weight": M_HC_FFN,
    "attn_q_a.weight": M_Q_A, "attn_q_b.weight": M_Q_B, "attn_kv.weight": M_KV,
    "attn_output_a.weight": M_O_A, "attn_output_b.weight": M_O_B,
    "attn_compressor_kv.weight": M_COMP_KV, "attn_compressor_gate.weight": M_COMP_GATE,
    "indexer_compressor_kv.weight": M_IX_COMP_KV, "indexer_compressor_gate.weight": M_IX_COMP_GATE,
    "indexer.attn_q_b.weight": M_IX_Q_B, "indexer.proj.weight": M_IX_PROJ,
    "ffn_gate_inp.weight": M_ROUTER,
    "ffn_gate_exps.weight": M_GATE_EXPS, "ffn_up_exps.weight": M_UP_EXPS, "ffn_down_exps.weight": M_DOWN_EXPS,
    "ffn_gate_shexp.weight": M_GATE_SH, "ffn_up_shexp.weight": M_UP_SH, "ffn_down_shexp.weight": M_DOWN_SH,
}
LAYER_VECS = {
    "hc_attn_scale.weight": V_HC_ATTN_SCALE, "hc_attn_base.weight": V_HC_ATTN_BASE,
    "hc_ffn_scale.weight": V_HC_FFN_SCALE, "hc_ffn_base.weight": V_HC_FFN_BASE,
    "attn_norm.weight": V_ATTN_NORM, "ffn_norm.weight": V_FFN_NORM,
    "attn_q_a_norm.weight": V_Q_A_NORM, "attn_kv_a_norm.weight": V_KV_NORM, "attn_sinks.weight": V_SINKS,
    "attn_compressor_ape.weight": V_COMP_APE, "attn_compressor_norm.weight": V_COMP_NORM,
    "indexer_compressor_ape.weight": V_IX_COMP_APE, "indexer_compressor_norm.weight": V_IX_COMP_NORM,
    "exp_probs_b.bias": V_ROUTER_BIAS,
}
MAX_STREAMS = DS4_MAX_STREAMS
MAX_PAIRS = DS4_MAX_PAIRS


cdef const ds4_leaf *find_level(str name) except NULL:
    cdef const ds4_leaf *const *level = ds4_leaf_levels()
    while level[0] != NULL:
        if name is None and level[1] == NULL:
            return level[0]
        if name is not None and level[0].name.decode() == name:
            return level[0]
        level += 1
    raise ValueError(f"no kernel level {name!r} on this machine")


cdef void fill_tables(ds4_tables *tables, const float[:, ::1] iq2_xxs) noexcept:
    memcpy(tables.iq2_xxs, &iq2_xxs[0, 0], sizeof(tables.iq2_xxs))
    ds4_fill_signs(tables)


def levels():
    """Names of the kernel versions that this machine can run, the plainest first."""
    cdef const ds4_leaf *const *level = ds4_leaf_levels()
    names = []
    while level[0] != NULL:
        names.append(level[0].name.decode())
        level += 1
    return tuple(names)


cdef double now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <double>t.tv_sec + 1e-9 * <double>t.tv_nsec


cdef int poll(void *arg) noexcept nogil:
    # Reads plain C fields without the GIL: the thread that runs the step is the only one that touches them.
    cdef poll_state *state = <poll_state *>arg
    if state.stopped or now() < state.next_check:
        return state.stopped
    with gil:
        (<Machine>state.machine)._check()
    state.next_check = now() + state.seconds
    return state.stopped


@cython.final
@cython.auto_pickle(False)
cdef class Machine:
    cdef ds4_run run
    cdef poll_state poll_state
    cdef list keep       # arrays that C pointers point into
    cdef list writable   # those of them that steps write to
    cdef object plan     # arrays of the running step
    cdef object checker  # plan.check of the running step
    cdef object failure  # what it raised
    cdef int max_rows, context, n_slabs, n_pages
    cdef readonly object work_bytes

    def __cinit__(self, shape, layout, *, int max_rows, int context, int threads, bint roundings, freqs):
        cdef ds4_model *m = &self.run.model
        self.keep, self.writable = [], []
        self.max_rows, self.context = max_rows, context
        m.n_layers, m.hidden, m.vocab = shape.n_layers, shape.hidden, shape.vocab
        m.n_heads, m.head_dim, m.rope_dim, m.q_lora = shape.n_heads, shape.head_dim, shape.rope_dim, shape.q_lora
        m.o_groups, m.o_lora, m.ffn_width = shape.o_groups, shape.o_lora, shape.ffn_width
        m.n_experts, m.n_used, m.window = shape.n_experts, shape.n_experts_used, shape.window
        m.index_heads, m.index_dim, m.index_top_k = shape.index_heads, shape.index_dim, shape.index_top_k
        m.n_streams, m.sinkhorn_iters, m.hc_eps = shape.n_streams, shape.sinkhorn_iters, shape.hc_eps
        m.rms_eps, m.expert_scale = shape.rms_eps, shape.expert_scale
        m.has_csa, m.has_hca = DS4_CSA in shape.ratios, DS4_HCA in shape.ratios
        m.layer = <ds4_layer *>PyMem_Calloc(shape.n_layers, sizeof(ds4_layer))
        if m.layer == NULL:
            raise MemoryError("no memory for the layer records")
        self._place_layers(shape, layout)
        for i in range(2):
            m.freq[i] = self._doubles(freqs[i])
        self.run.cache.slab_bytes, self.run.cache.page_bytes = layout.slab_bytes, layout.page_bytes
        self.run.cache.row_item = 4 if layout.cache_dtype == "float32" else 2
        self.run.cache.ring, self.run.cache.roundings = layout.ring, roundings
        self.run.leaf = find_level(None)
        self.run.n_threads = threads
        self.run.poll, self.run.poll_arg = poll, &self.poll_state
        self.poll_state.machine, self.poll_state.seconds = <void *>self, 0.05
        self.work_bytes = ds4_work_carve(&self.run, NULL, max_rows, context, threads)

    def __dealloc__(self):
        with nogil:  # helpers may be asleep or on their way there
            ds4_pool_free(self.run.pool)
        PyMem_Free(self.run.model.layer)

    cdef void _place_layers(self, shape, layout) except *:
        cdef ds4_layer *layer
        for i, place in enumerate(layout.layers):
            layer = self.run.model.layer + <int>i
            layer.ratio, layer.clamp = place.ratio, shape.swiglu_clamp[i]
            layer.comp_ring, layer.comp_width = place.comp_ring, place.comp_width
            layer.latent, layer.comp, layer.index_comp = place.latent, place.comp, place.index_comp
            layer.entries, layer.index_keys = place.entries, place.index_keys

    cdef const double *_doubles(self, const double[::1] values) except NULL:
        self.keep.append(values)
        return &values[0]

    # ------------------------------------------------------------ weights and memory

    cdef ds4_mat _mat(self, const uint8_t[::1] data, str dtype, int n_in, int n_out, size_t row_bytes):
        cdef ds4_mat mat
        self.keep.append(data)
        mat.data, mat.row_bytes, mat.dtype, mat.n_in, mat.n_out = &data[0], row_bytes, DTYPES[dtype], n_in, n_out
        return mat

    cdef const float *_vec(self, const float[::1] values) except NULL:
        self.keep.append(values)
        return &values[0]

    def set_layer_mat(self, int layer, str suffix, data, str dtype, int n_in, int n_out, size_t row_bytes):
        self.run.model.layer[layer].mat[<int>LAYER_MATS[suffix]] = self._mat(data, dtype, n_in, n_out, row_bytes)

    def set_layer_vec(self, int layer, str suffix, values):
        self.run.model.layer[layer].vec[<int>LAYER_VECS[suffix]] = self._vec(values)

    def set_layer_table(self, int layer, const uint8_t[::1] data):
        self.keep.append(data)
        self.run.model.layer[layer].tid2eid = &data[0]

    def set_mat(self, str name, data, str dtype, int n_in, int n_out, size_t row_bytes):
        cdef ds4_mat mat = self._mat(data, dtype, n_in, n_out, row_bytes)
        if name == "token_embd.weight":
            self.run.model.embedding = mat
        elif name == "output.weight":
            self.run.model.output = mat
        elif name == "output_hc_fn.weight":
            self.run.model.output_hc = mat
        else:
            raise KeyError(name)

    def set_vec(self, str name, values):
        cdef const float *vec = self._vec(values)
        if name == "output_hc_scale.weight":
            self.run.model.output_hc_scale = vec
        elif name == "output_hc_base.weight":
            self.run.model.output_hc_base = vec
        elif name == "output_norm.weight":
            self.run.model.output_norm = vec
        else:
            raise KeyError(name)

    def set_tables(self, const float[:, ::1] iq2_xxs):
        fill_tables(&self.run.model.tables, iq2_xxs)

    def set_cache(self, uint8_t[:, ::1] slabs, uint8_t[:, ::1] pages):
        self.writable += [slabs, pages]
        self.n_slabs, self.n_pages = slabs.shape[0], pages.shape[0]
        self.run.cache.slabs = &slabs[0, 0]
        self.run.cache.pages = &pages[0, 0] if pages.size else NULL

    def set_step_buffers(self, int layer, uint8_t[::1] latent, float[::1] comp, float[::1] index_comp):
        cdef ds4_layer *to = self.run.model.layer + layer
        self.writable += [latent, comp, index_comp]
        to.step_latent = &latent[0]
        to.step_comp = &comp[0] if comp.shape[0] else NULL
        to.step_index_comp = &index_comp[0] if index_comp.shape[0] else NULL

    def set_work(self, uint8_t[::1] memory):
        self.writable.append(memory)
        ds4_work_carve(&self.run, &memory[0], self.max_rows, self.context, self.run.n_threads)
        if self.run.pool == NULL:
            self.run.pool = ds4_pool_new(self.run.n_threads)
        if self.run.pool == NULL:
            raise MemoryError("no memory for the thread pool")

    def memory(self):
        """Every writable array behind the pointers: cache, step buffers, work buffers (tests fill them with junk)."""
        return list(self.writable)

    def set_level(self, str name):
        """Use a kernel version other than the best one (tests: every version gives the same bits)."""
        self.run.leaf = find_level(name)

    def set_poll_seconds(self, double seconds):
        """How often a running step asks plan.check whether to go on; 0 asks between all operations."""
        self.poll_state.seconds = seconds

    def set_tap(self, int row, float[:, :, ::1] values, int32_t[:, ::1] selected, int32_t[:, ::1] route,
                float[:, ::1] route_weight):
        """Copy intermediate values of a row of each coming step into these arrays; row -1 stops it."""
        if row >= self.max_rows:
            raise ValueError(f"row {row} is not below max_rows {self.max_rows}")
        self.keep += [values, selected, route, route_weight]
        self.run.tap.row = row
        self.run.tap.values = &values[0, 0, 0] if row >= 0 else NULL
        self.run.tap.selected = &selected[0, 0]
        self.run.tap.route = &route[0, 0]
        self.run.tap.route_weight = &route_weight[0, 0]

    # ------------------------------------------------------------ a step

    def begin(self, plan):
        """Take over the plan's arrays, having checked that no index in them can leave this machine's memory."""
        cdef const int32_t[::1] tokens = plan.tokens, pos = plan.pos, row_item = plan.row_item
        cdef const int32_t[::1] item_row = plan.item_row, item_pos = plan.item_pos, item_slab = plan.item_slab
        cdef const int32_t[::1] page_start = plan.page_start, page_ids = plan.page_ids, logit_rows = plan.logit_rows
        cdef ds4_plan *p = &self.run.plan
        cdef int n_rows = plan.n_rows, n_items = plan.n_items
        self.plan = None
        if not (0 < n_rows <= self.max_rows and 0 < n_items <= n_rows and logit_rows.shape[0] <= n_rows):
            raise BackendError("the plan has no rows or too many", backend="cpu", rows=n_rows, max_rows=self.max_rows)
        if (tokens.shape[0] < n_rows or pos.shape[0] < n_rows or row_item.shape[0] < n_rows
                or item_row.shape[0] < n_items + 1 or item_pos.shape[0] < n_items or item_slab.shape[0] < n_items
                or page_start.shape[0] < n_items + 1):
            raise BackendError("an array of the plan is too short", backend="cpu")
        p.n_rows, p.n_items, p.n_logit_rows = n_rows, n_items, logit_rows.shape[0]
        p.tokens, p.pos, p.row_item, p.item_row = &tokens[0], &pos[0], &row_item[0], &item_row[0]
        p.item_pos, p.item_slab, p.page_start = &item_pos[0], &item_slab[0], &page_start[0]
        p.page_ids = &page_ids[0] if page_ids.shape[0] else NULL
        p.logit_rows = &logit_rows[0] if logit_rows.shape[0] else NULL
        cdef int n_page_ids = page_ids.shape[0]
        if not self._is_plan_sound(n_page_ids):
            raise BackendError("the plan points outside the model, the cache or the step", backend="cpu")
        self.checker = plan.check
        self.plan = (tokens, pos, row_item, item_row, item_pos, item_slab, page_start, page_ids, logit_rows)

    cdef bint _is_plan_sound(self, int n_page_ids) noexcept:
        cdef ds4_plan *p = &self.run.plan
        cdef int item, row, i, end, n_pages
        if p.item_row[0] != 0 or p.item_row[p.n_items] != p.n_rows or p.page_start[0] < 0:
            return False
        for item in range(p.n_items):
            if p.item_row[item + 1] <= p.item_row[item] or not 0 <= p.item_slab[item] < self.n_slabs:
                return False
            end = p.item_pos[item] + p.item_row[item + 1] - p.item_row[item]
            n_pages = p.page_start[item + 1] - p.page_start[item]
            if p.item_pos[item] < 0 or end > self.context or n_pages < 0 or <long>n_pages * DS4_PAGE_TOKENS < end:
                return False
            for row in range(p.item_row[item], p.item_row[item + 1]):
                if (p.row_item[row] != item or p.pos[row] != p.item_pos[item] + row - p.item_row[item]
                        or not 0 <= p.tokens[row] < self.run.model.vocab):
                    return False
        if p.page_start[p.n_items] > n_page_ids:
            return False
        for i in range(p.page_start[p.n_items]):
            if not 0 <= p.page_ids[i] < self.n_pages:
                return False
        for i in range(p.n_logit_rows):
            if not (-1 if i == 0 else p.logit_rows[i - 1]) < p.logit_rows[i] < p.n_rows:
                return False
        return True

    def forward(self):
        """All rows of the step. Raises what plan.check raised."""
        cdef int status
        self._start_polling()
        with nogil:  # the step's arrays and this machine's memory are ours until `end` or `abort`
            status = ds4_forward(&self.run)
        self._finish(status)

    def forward_row(self, int row):
        """One row of the step on the reference path."""
        cdef int status
        self._start_polling()
        if not 0 <= row < self.run.plan.n_rows:
            raise BackendError("the step has no such row", backend="cpu", row=row)
        with nogil:
            status = ds4_forward_row(&self.run, row)
        self._finish(status)

    def publish(self):
        self._start_polling()
        with nogil:
            ds4_publish(&self.run)

    def read_logits(self, float[:, ::1] out):
        self._start_polling()
        if out.shape[0] != self.run.plan.n_logit_rows or out.shape[1] != self.run.model.vocab:
            raise BackendError("the logits buffer has the wrong shape", backend="cpu", found=(out.shape[0], out.shape[1]))
        if out.shape[0]:
            memcpy(&out[0, 0], self.run.work.logits,
                   <size_t>out.shape[0] * <size_t>out.shape[1] * sizeof(float))

    def forget(self):
        """The step is over or aborted."""
        self.plan = self.checker = self.failure = None

    cdef void _start_polling(self) except *:
        if self.plan is None:
            raise BackendError("no step has begun", backend="cpu")
        self.failure = None
        self.poll_state.stopped = False
        self.poll_state.next_check = now() + self.poll_state.seconds

    cdef void _check(self) noexcept:
        try:
            self.checker()
        except BaseException as exc:  # carried across the C code and raised by _finish
            self.failure = exc
            self.poll_state.stopped = True

    cdef void _finish(self, int status) except *:
        failure, self.failure = self.failure, None
        if status != DS4_OK:
            raise failure


include "_probes.pxi"
