# Session: one conversation. Its tokens, its slab and pages, its last logits, its seed.
#
#   positions:  [0, oldest) only by rebuild · [oldest, n_tokens] rewind for free · n_tokens = next position
#   oldest = max(0, high - rewind), high = the furthest the session has been since it was last empty


@cython.final
cdef class DecodeItem:
    """One session and the one token it brings to a step."""

    cdef readonly object session
    cdef readonly object token

    def __init__(self, session, token):
        self.session = session
        self.token = token

    def __repr__(self):
        return f"DecodeItem({self.session!r}, {self.token!r})"


@cython.final
cdef class SyncResult:
    """What Session.sync did: how = "unchanged", "extended", "rewound" or "rebuilt"; tokens reused and computed."""

    cdef readonly str how
    cdef readonly int reused
    cdef readonly int computed

    def __init__(self, how, reused, computed):
        self.how, self.reused, self.computed = how, reused, computed

    def __repr__(self):
        return f"SyncResult(how={self.how!r}, reused={self.reused}, computed={self.computed})"


# no_gc_clear, and a reference to the cache beside the core's: __dealloc__ gives slab and pages back even when session
# and engine are collected together.
@cython.final
@cython.no_gc_clear
cdef class Session:
    """One conversation on an engine. Made by Engine.create_session, fork or import_state; usable from any thread.

    Only one call at a time may change a session; a second one raises SessionBusyError. Closing it (or letting it be
    collected) returns its memory to the engine.
    """

    cdef EngineCore core
    cdef KVCache cache
    cdef int slab
    cdef int32_t *_tokens
    cdef int32_t *page_ids
    cdef int n_tokens, n_pages
    cdef int high
    cdef uint64_t stamp  # number of the call that is using the session; 0 = idle
    cdef bint closed
    cdef bint faulted
    cdef object block  # float32 [n, vocab] with our logits in block_row, or None
    cdef Py_ssize_t block_row
    cdef uint64_t _seed
    cdef int item  # scratch of the duplicate check: our index in the batch, or -1
    cdef readonly bint seed_given
    cdef object __weakref__

    def __cinit__(self, EngineCore core not None, seed=None):
        self.slab = -1
        self.core, self.cache = core, core.cache
        self.seed_given = seed is not None
        self._seed = checked_seed(seed) if self.seed_given else int.from_bytes(os.urandom(8), "little")
        # Virtual memory only: the kernel gives pages as the text grows.
        self._tokens = <int32_t *>PyMem_Malloc(max(core.context, 1) * sizeof(int32_t))
        self.page_ids = <int32_t *>PyMem_Malloc((pages_for(core.context) + 1) * sizeof(int32_t))
        if self._tokens == NULL or self.page_ids == NULL:
            raise MemoryError("session")
        self.slab = self.cache.take_slab(self)

    def __dealloc__(self):
        if not self.closed and self.slab >= 0:
            self.release()
        PyMem_Free(self._tokens)
        PyMem_Free(self.page_ids)

    def __init__(self, core, seed=None):
        pass

    def __repr__(self):
        state = "closed" if self.closed else f"pos={self.n_tokens}"
        return f"<ds4.Session {state} of {self.core.context}>"

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    # ------------------------------------------------------------ what it is

    @property
    def engine(self):
        """The Engine this session belongs to."""
        return self.core.owner

    @property
    def pos(self):
        """Tokens the session holds = position of the next token."""
        return self.n_tokens

    @property
    def tokens(self):
        """Its tokens, a new int32 array [pos]."""
        out = np.empty(self.n_tokens, np.int32)
        cdef int32_t[::1] view
        if self.n_tokens:
            view = out
            memcpy(&view[0], self._tokens, self.n_tokens * sizeof(int32_t))
        return out

    @property
    def context(self):
        """Tokens it may hold at most (Limits.context)."""
        return self.core.context

    @property
    def pages(self):
        """Numbers of the pages it holds, shared ones included, in token order: a tuple of int."""
        cdef int i
        return tuple([self.page_ids[i] for i in range(self.n_pages)])

    @property
    def is_closed(self):
        """Whether it was closed, itself or with its engine."""
        return self.closed or self.core.closed

    @property
    def seed(self):
        """Seed of `sample`: the one given to create_session, or a random one."""
        return self._seed

    @property
    def oldest_rewind(self):
        """The smallest position `rewind` can go to without a rebuild."""
        return max(0, self.high - self.core.rewind)

    # ------------------------------------------------------------ logits and choosing a token

    cdef const float *row(self) except NULL:
        cdef const float[:, ::1] view
        self.require_open()
        if self.block is None:
            raise NoLogitsError(
                "the session has no logits for its position; feed it at least one token"
                + (" (it was rewound)" if self.n_tokens else ""),
                pos=self.n_tokens,
            )
        view = self.block
        return &view[self.block_row, 0]

    @property
    def logits(self):
        """float32 [vocab], read-only, no copy: logits after the last token. Stays as it is when the session moves on."""
        self.row()
        view = self.block[self.block_row]
        view.flags.writeable = False
        return view

    def argmax(self):
        """The id of the largest logit, the lowest id among equals. Raises NumericError, NoLogitsError."""
        return self.best(self.row())

    cdef Py_ssize_t best(self, const float *row) except -1:
        """Argmax of a usable row; raises NumericError and marks the session for any other."""
        cdef Py_ssize_t top = 0, bad = 0, n = self.core.vocab
        cdef Fault fault
        block = self.block  # keeps the row alive while the GIL is away
        with nogil:
            fault = scan(row, n, &top, &bad)
        if fault == FINE:
            return top
        # The cache that produced such logits is not to be continued, copied or saved.
        self.faulted = True
        value = float("-inf") if fault == ALL_MASKED else row[bad]
        what = "all logits are -inf" if fault == ALL_MASKED else f"logit {bad} is {value}"
        raise NumericError(
            f"the session's logits are not usable: {what}. Other sessions are not affected. Rewind it, or invalidate "
            "it and feed it again; if it happens again, check the model file with `ds4 inspect`",
            pos=self.n_tokens, token=max(bad, 0), value=value)

    def sample(self, params=None):
        """Draw a token as ds4.SamplingParams says (default: temperature 1). Does not advance the session.

        The draw is a function of logits, parameters, seed and position: asking twice gives the same token.
        Raises SamplingError, NumericError, NoLogitsError.
        """
        if params is None:
            params = SamplingParams()
        elif not isinstance(params, SamplingParams):
            raise SamplingError("sample takes ds4.SamplingParams(...)", field="params", value=params)
        cdef const float *row = self.row()
        cdef Py_ssize_t i, best = self.best(row), n = self.core.vocab
        cdef Draw draw
        cdef double top = -INFINITY
        cdef int32_t token = -1
        cdef int start = min(<int64_t>params.penalty_start, self.n_tokens)
        cdef bint broken = False
        cdef bint penalties
        draw.temperature, draw.top_p, draw.min_p = params.temperature, params.top_p, params.min_p
        draw.repetition = params.repetition_penalty
        draw.presence, draw.frequency = params.presence_penalty, params.frequency_penalty
        draw.top_k = params.top_k
        draw.seed = self._seed if params.seed is None else params.seed
        draw.pos = self.n_tokens
        penalties = draw.repetition != 1.0 or draw.presence != 0.0 or draw.frequency != 0.0
        bias = params.logit_bias
        if bias:
            for key in bias:
                if key >= n:
                    raise SamplingError(f"logit_bias names token {key}; the vocabulary has {n}",
                                        field="logit_bias", value=key)
        if draw.temperature == 0.0 and not penalties and not bias:
            return best
        cdef _Scratch scratch = _Scratch(n)
        for i in range(n):
            scratch.x[i] = row[i]
        if bias:
            for key, value in bias.items():
                scratch.x[<Py_ssize_t>key] += <double>value
        with nogil:
            if penalties:
                penalise(scratch.x, n, self._tokens + start, self.n_tokens - start, scratch.counts, &draw)
            for i in range(n):
                if scratch.x[i] > top:
                    top, token = scratch.x[i], <int32_t>i
                elif isnan(scratch.x[i]):
                    broken = True
            broken = broken or top == INFINITY
            if token >= 0 and not broken and draw.temperature != 0.0:
                token = pick(scratch.x, n, top, scratch.heap, &draw)
        if broken:
            raise SamplingError("penalties or biases this large leave no finite logits; use smaller ones",
                                field="logit_bias", value=None)
        if token < 0:
            raise SamplingError("logit_bias masks every token; leave at least one", field="logit_bias", value=None)
        return token

    def top_logprobs(self, k):
        """The k likeliest tokens as [(token, log probability)], likeliest first, lowest id among equals."""
        if not isinstance(k, int) or k < 0:
            raise SamplingError("k must be a whole number, 0 or more", field="k", value=k)
        cdef const float *row = self.row()
        cdef Py_ssize_t i, best = self.best(row), n = self.core.vocab, n_top = min(k, n)
        cdef double lse
        block = self.block
        cdef _Scratch scratch = _Scratch(n)
        with nogil:
            lse = log_sum_exp(row, n, row[best])
            for i in range(n):
                scratch.x[i] = row[i]
            heapify(scratch.x, scratch.heap, n)
            keep_best(scratch.x, scratch.heap, n, n_top)
        return [(scratch.heap[i], row[scratch.heap[i]] - lse) for i in range(n_top)]

    def logprob(self, token):
        """Log probability (natural, at temperature 1) of a token under the session's logits."""
        cdef const float *row = self.row()
        cdef Py_ssize_t n = self.core.vocab, index
        cdef float top
        cdef double lse
        try:
            index = token.__index__()
        except (AttributeError, OverflowError):
            index = -1
        if not 0 <= index < n:
            raise SamplingError(f"token must be an id from 0 to {n - 1}", field="token", value=token)
        top = row[self.best(row)]
        block = self.block
        with nogil:
            lse = log_sum_exp(row, n, top)
        return row[index] - lse

    # ------------------------------------------------------------ moving

    def feed(self, tokens, logits="last", progress=None, cancel=None):
        """Advance by any number of tokens, in chunks of at most Limits.max_rows rows.

        tokens    token ids, a sequence or an integer array
        logits    "last": keep the last token's logits, return how many tokens were fed.
                  "all": also return float32 [n fed, vocab], the logits after every token.
        progress  progress(fed, total), called after each chunk
        cancel    cancel() -> bool, asked before each chunk but the first; True stops there

        A cancelled feed leaves a valid, shorter session with the logits of its last token. Everything that can be
        checked (token range, context, free pages) is checked before the first chunk: then nothing has moved.
        Raises BatchError and its kinds, StepError, StepCancelledError.
        """
        if logits not in ("last", "all"):
            raise BatchError('logits must be "last" or "all"', logits=logits)
        self.core.claim([self], False)
        try:
            ids = checked_tokens(self.core.vocab, tokens, 0, self)
            return self.feed_claimed(ids, logits == "all", progress, cancel)
        finally:
            self.stamp = 0

    cdef object feed_claimed(self, object ids, bint want_all, object progress, object cancel):
        cdef Py_ssize_t n = len(ids), done = 0, chunk
        self.core.check_room(self, self.n_tokens, n)
        out = np.empty((n, self.core.vocab), np.float32) if want_all else None
        while done < n:
            if done and cancel is not None and cancel():
                break
            chunk = min(n - done, self.core.max_rows)
            block = self.core.run([self], [ids[done : done + chunk]], want_all)
            if want_all:
                out[done : done + chunk] = block
            done += chunk
            if progress is not None:
                progress(done, n)
        return out[:done] if want_all else done

    def sync(self, tokens, progress=None, cancel=None):
        """Make the session hold exactly `tokens`, computing as little as possible; returns SyncResult.

        The common prefix is kept. Where the session must step back, it rewinds in place if it can
        (`oldest_rewind`), and is rebuilt from its first token otherwise. The last token is always computed when
        logits are missing. Progress and cancel as in `feed`. Checks come first, as in `feed`.
        """
        self.core.claim([self], True)
        cdef Py_ssize_t common = 0, n
        cdef int32_t[::1] view
        try:
            ids = checked_tokens(self.core.vocab, tokens, 0, self)
            n = len(ids)
            if n == 0:
                self.empty()
                return SyncResult("rewound", 0, 0)
            view = ids
            while common < n and common < self.n_tokens and view[common] == self._tokens[common]:
                common += 1
            if common == n == self.n_tokens and self.block is not None and not self.faulted:
                return SyncResult("unchanged", n, 0)
            common = min(common, n - 1)
            if common == self.n_tokens and not self.faulted:
                how = "extended"
            elif common >= max(0, self.high - self.core.rewind) and (common < self.n_tokens or not self.faulted):
                how = "rewound"
            else:
                how, common = "rebuilt", 0
            self.core.check_room(self, common, n - common)
            if how == "rewound":
                self.step_back(<int>common)
            elif how == "rebuilt":
                self.empty()
            return SyncResult(how, common, self.feed_claimed(ids[common:], False, progress, cancel))
        finally:
            self.stamp = 0

    def rewind(self, to):
        """Step back to position `to` for free. Logits are gone until the next token is fed (unless to == pos).

        Raises RewindError when `to` is not in [oldest_rewind, pos]; use `sync` to go further back.
        """
        self.core.claim([self], True)
        try:
            if not isinstance(to, int) or not 0 <= to <= self.n_tokens:
                raise RewindError(f"can only rewind to a position from 0 to {self.n_tokens}", to=to, pos=self.n_tokens,
                                  oldest=self.oldest_rewind)
            if to < self.oldest_rewind:
                raise RewindError(
                    f"cannot step back to {to}: the session keeps what position {self.oldest_rewind} and later need. "
                    "Use sync(tokens), which rebuilds, or open the engine with a larger Limits(rewind=...)",
                    to=to, pos=self.n_tokens, oldest=self.oldest_rewind)
            if to < self.n_tokens:
                self.step_back(to)
        finally:
            self.stamp = 0

    cdef void step_back(self, int to) noexcept:
        # Pages behind the new end go back; the partial one stays (its later entries will be written again).
        cdef int keep = <int>pages_for(to)
        while self.n_pages > keep:
            self.n_pages -= 1
            self.cache.drop_page(self.page_ids[self.n_pages])
        self.n_tokens = to
        self.block = None
        self.faulted = False
        if to == 0:
            self.high = 0

    cdef void empty(self) noexcept:
        self.step_back(0)

    def invalidate(self):
        """Forget everything: position 0, no pages. Also clears a numeric fault."""
        self.core.claim([self], True)
        self.empty()
        self.stamp = 0

    def fork(self, seed=None):
        """A new session that continues from here: full pages are shared, the slab is copied, logits too.

        A session with a seed of its own passes it on; otherwise the fork draws a new one (or takes `seed`).
        Raises SessionsExhaustedError, and BatchError's kinds for a closed, busy or faulted session.
        """
        self.core.claim([self], False)
        try:
            return fork_session(self.core, self, self._seed if seed is None and self.seed_given else seed)
        finally:
            self.stamp = 0

    def export_state(self):
        """Everything the session is, as a ds4.SessionState for Engine.import_state. The session is unchanged."""
        self.core.claim([self], False)
        try:
            return export_session(self.core, self)
        finally:
            self.stamp = 0

    def close(self):
        """Give slab and pages back to the engine. Closing twice is fine. Raises SessionBusyError during a step."""
        if self.closed:
            return
        if self.stamp:
            raise SessionBusyError("another call is using the session; close it when that has returned")
        self.release()

    cdef void release(self) noexcept:
        self.closed = True
        while self.n_pages > 0:
            self.n_pages -= 1
            self.cache.drop_page(self.page_ids[self.n_pages])
        self.cache.give_slab(self.slab)
        self.block = None

    cdef int require_open(self) except -1:
        if self.closed:
            raise SessionClosedError("the session is closed; create another with engine.create_session()")
        if self.core.closed:
            raise SessionClosedError("the session's engine is closed; open it again and create a new session")
        return 0


cdef uint64_t checked_seed(object seed) except? 0:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise SamplingError("seed must be a whole number from 0 to 2**64 - 1, or None", field="seed", value=seed)
    return seed
