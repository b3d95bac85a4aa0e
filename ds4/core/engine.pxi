# EngineCore: one step from door to door. Validate, reserve, run, then commit or abort.
#
# Order of checks (each over all items, in this order; the error names the first item that fails it):
#   empty batch · no session · other engine · closed · numeric fault · busy · token out of range or no tokens ·
#   duplicate session · context limit · rows over max_rows · pages exhausted
# Up to "busy" without the engine's lock, marking the sessions as ours; the marks keep everything else still.


@cython.final
cdef class EngineCore:
    """The core's side of an engine: its sessions' memory, its step plan and its lock."""

    cdef readonly KVCache cache
    cdef readonly StepPlan plan
    cdef readonly object runner
    cdef readonly object owner  # the Engine
    cdef readonly object key  # StateKey, made when first needed
    cdef object make_key
    cdef readonly str backend_name
    cdef readonly int vocab
    cdef readonly int context
    cdef readonly int max_rows
    cdef readonly int rewind
    cdef list blocks  # of logits, see logits_block
    cdef readonly bint closed
    cdef readonly bint lost
    cdef readonly str last_path
    cdef readonly uint64_t n_steps
    cdef public object observer  # None, or called with a StepRecord after every step; falsy = nobody listens
    cdef str path  # of the running step, once it is decided
    cdef public bint force_fallback
    cdef object lock  # serialises whatever touches the runner
    cdef uint64_t last_stamp
    cdef int pid

    def __init__(self, owner, runner, *, backend_name, vocab, sessions, context, max_rows, pages, rewind, make_key,
                 force_fallback=False):
        self.owner, self.runner, self.backend_name, self.make_key = owner, runner, backend_name, make_key
        self.vocab, self.context, self.max_rows, self.rewind = vocab, context, max_rows, rewind
        self.force_fallback = force_fallback
        self.last_path = self.path = ""
        self.cache = KVCache(sessions, pages)
        self.plan = StepPlan(max_rows, sessions, sessions * pages_for(context))
        self.blocks = []
        self.lock = threading.Lock()
        self.pid = getpid()

    # ------------------------------------------------------------ claims and checks

    cdef int require_alive(self) except -1:
        if self.pid != getpid():
            raise ForkedProcessError(
                "this engine was opened before the process forked; open an engine in the child instead",
                opened_in=self.pid, process=getpid())
        if self.closed:
            raise SessionClosedError("the engine is closed")
        if self.lost:
            raise DeviceLostError("the device was lost and the sessions with it; close the engine and open it again",
                                  call="", backend=self.backend_name)
        return 0

    cdef int claim(self, list sessions, bint faulted_too) except -1:
        """Checks up to "busy", then marks the sessions as in use. The caller resets `stamp` in a finally block."""
        cdef Session session
        cdef Py_ssize_t i, n = len(sessions)
        if n == 0:
            raise BatchError("the batch is empty")
        for i in range(n):
            if not isinstance(sessions[i], Session):
                raise BatchError("item has no session", item=i, found=type(sessions[i]).__name__)
        for i in range(n):
            session = sessions[i]
            if session.core is not self:
                raise about(BatchError("session belongs to another engine", item=i), session)
        self.require_alive()
        for i in range(n):
            session = sessions[i]
            if session.closed:
                raise about(
                    SessionClosedError("session is closed; create another with engine.create_session()", item=i),
                    session)
        for i in range(n):
            session = sessions[i]
            if session.faulted and not faulted_too:
                raise NumericError(
                    "the session had unusable logits; rewind or invalidate it first",
                    item=i, pos=session.n_tokens, token=-1, value=float("nan"))
        for i in range(n):
            session = sessions[i]
            if session.stamp:
                raise about(
                    SessionBusyError("another call is using the session; wait until it has returned", item=i), session)
        self.last_stamp += 1
        for i in range(n):
            session = sessions[i]
            session.stamp = self.last_stamp
        return 0

    cdef void unclaim(self, list sessions) noexcept:
        cdef Session session
        for session in sessions:
            session.stamp = 0

    cdef int check_context(self, Session session, Py_ssize_t item, Py_ssize_t start, Py_ssize_t n) except -1:
        if start + n > self.context:
            raise about(ContextLimitError(
                f"the session would hold {start + n} tokens; its context is {self.context}. Shorten the text, or open "
                "the engine with a larger Limits(context=...)",
                item=item, pos=start, tokens=n, context=self.context), session)
        return 0

    cdef int check_room(self, Session session, Py_ssize_t start, Py_ssize_t n) except -1:
        """Context and pages for n more tokens from position `start` <= pos on (what is behind it being given up)."""
        cdef Py_ssize_t i, first = pages_for(start), free = self.cache.n_free_pages
        cdef Py_ssize_t need = pages_for(start + n) - first
        self.check_context(session, 0, start, n)
        for i in range(first, session.n_pages):
            if self.cache.page_refs[session.page_ids[i]] == 1:
                free += 1
        if n and start % PAGE and self.cache.page_refs[session.page_ids[first - 1]] > 1:
            need += 1
        if need > free:
            self.raise_exhausted(0, session, need, free)
        return 0

    cdef int raise_exhausted(self, Py_ssize_t item, object session, Py_ssize_t need, Py_ssize_t free) except -1:
        raise about(PagesExhaustedError(
            f"the step needs {need} more pages of {PAGE} tokens and {free} are free. Close or shorten a session, or "
            "open the engine with larger Limits(pages=...) or Limits(memory=...)",
            item=item, needed=need, free=free, pages=self.cache.n_pages), session)

    # ------------------------------------------------------------ the public steps

    def create_session(self, seed=None):
        """A new, empty session."""
        self.require_alive()
        return Session(self, seed)

    def step(self, items):
        """Advance several sessions at once: items = [(session, tokens), ...], 1..n tokens each (see Engine.step)."""
        cdef list sessions = [], tokens = []
        for i, item in enumerate(items):
            try:
                session, ids = item
            except (TypeError, ValueError):
                raise BatchError("item is not a (session, tokens) pair", item=i, found=type(item).__name__) from None
            sessions.append(session)
            tokens.append(ids)
        self.claim(sessions, False)
        try:
            for i in range(len(tokens)):
                tokens[i] = checked_tokens(self.vocab, tokens[i], i, sessions[i])
            self.run(sessions, tokens, False)
        finally:
            self.unclaim(sessions)

    def eval_batch(self, items, prefill_session=None, prompt=None):
        """One token for each DecodeItem, and optionally a prompt chunk for one more session, in one step."""
        cdef list sessions = [], tokens = []
        cdef DecodeItem decode
        cdef Py_ssize_t i
        for item in items:
            if not isinstance(item, DecodeItem):
                raise BatchError("item is not a DecodeItem", item=len(sessions), found=type(item).__name__)
            decode = item
            sessions.append(decode.session)
            tokens.append(decode.token)
        cdef Py_ssize_t n_decode = len(sessions)
        if prompt is not None:
            sessions.append(prefill_session)
            tokens.append(prompt)
        self.claim(sessions, False)
        try:
            for i in range(n_decode):
                tokens[i] = checked_token(self.vocab, tokens[i], i, sessions[i])
            if prompt is not None:
                tokens[n_decode] = checked_tokens(self.vocab, prompt, n_decode, prefill_session)
            self.run(sessions, tokens, False)
        finally:
            self.unclaim(sessions)

    def cancel(self):
        """Cancel the step that is running, if any: it ends soon with StepCancelledError, nothing having moved."""
        self.plan.cancelled = True

    # ------------------------------------------------------------ one step, claimed and with checked tokens

    cdef object run(self, list sessions, list tokens, bint want_all):
        """tokens: per item an int, or an int32 array. Returns the logits block, float32 [n_logit_rows, vocab]."""
        observer = self.observer or None
        record = None
        try:
            with self.lock:
                self.require_alive()
                self.fill_plan(sessions, tokens, want_all)
                cows = self.reserve(sessions)
                started = 0.0 if observer is None else perf_counter()
                try:
                    block, interrupt = self.drive(cows)
                except BaseException as exc:
                    self.give_back(sessions)
                    if observer is not None:
                        record = self.describe(self.n_steps + 1, perf_counter() - started, exc)
                    raise
                self.commit(sessions, block)
                if observer is not None:
                    record = self.describe(self.n_steps, perf_counter() - started, None)
        finally:
            # Without the lock: an observer may be slow, or ask the engine something.
            if record is not None:
                observer(record)
        if interrupt is not None:
            raise interrupt
        return block

    cdef object describe(self, uint64_t step, double seconds, object error):
        """The plan's step as a StepRecord, which outlives the plan."""
        cdef StepPlan plan = self.plan
        return StepRecord(
            engine_id=id(self.owner), backend=self.backend_name, step=step, n_rows=plan.n_rows, n_items=plan.n_items,
            n_logit_rows=plan.n_logit_rows, path=self.path, seconds=seconds,
            error=None if error is None else said(error))

    cdef int fill_plan(self, list sessions, list tokens, bint want_all) except -1:
        cdef StepPlan plan = self.plan
        cdef Session session
        cdef Py_ssize_t i, k, count, row = 0, n = len(sessions)
        cdef const int32_t[::1] view
        for i in range(n):
            if not isinstance(tokens[i], int) and len(tokens[i]) == 0:
                raise about(BatchError("item brings no tokens", item=i), sessions[i])
            session = sessions[i]
            session.item = -1
        for i in range(n):
            session = sessions[i]
            if session.item >= 0:
                raise about(BatchError("session is already in this batch", item=i, first=session.item), session)
            session.item = <int>i
        for i in range(n):
            session = sessions[i]
            count = 1 if isinstance(tokens[i], int) else len(tokens[i])
            self.check_context(session, i, session.n_tokens, count)
        for i in range(n):
            row += 1 if isinstance(tokens[i], int) else len(tokens[i])
            if row > self.max_rows:
                raise about(BatchError("the batch has more rows than one step takes; split it", item=i, rows=row,
                                       max_rows=self.max_rows), sessions[i])
        plan.clear()
        row = 0
        for i in range(n):
            session = sessions[i]
            plan._item_pos.at[i] = session.n_tokens
            plan._item_slab.at[i] = session.slab
            if isinstance(tokens[i], int):
                count = 1
                plan._tokens.at[row] = tokens[i]
            else:
                view = tokens[i]
                count = view.shape[0]
                memcpy(plan._tokens.at + row, &view[0], count * sizeof(int32_t))
            for k in range(count):
                plan._pos.at[row + k] = <int32_t>(session.n_tokens + k)
                plan._row_item.at[row + k] = <int32_t>i
                if want_all or k == count - 1:
                    plan._logit_rows.at[plan.n_logit_rows] = <int32_t>(row + k)
                    plan.n_logit_rows += 1
            row += count
            plan._item_row.at[i + 1] = <int32_t>row
        plan.n_rows, plan.n_items = <int>row, <int>n
        return 0

    cdef object reserve(self, list sessions):
        """Take the pages the step needs and write the page tables. Returns the page copies to make first."""
        cdef StepPlan plan = self.plan
        cdef KVCache cache = self.cache
        cdef Session session
        cdef Py_ssize_t i, k, end, need = 0, at = 0
        for i in range(plan.n_items):
            session = sessions[i]
            end = plan._item_pos.at[i] + plan._item_row.at[i + 1] - plan._item_row.at[i]
            plan.cow_page.at[i] = -1
            # The partial page will be written into; if it is shared, the step works on a private copy.
            if session.n_tokens % PAGE and cache.page_refs[session.page_ids[session.n_pages - 1]] > 1:
                plan.cow_page.at[i] = session.page_ids[session.n_pages - 1]
                need += 1
            need += pages_for(end) - session.n_pages
            if need > cache.n_free_pages:
                self.raise_exhausted(i, session, need, cache.n_free_pages)
        cdef list cows = []
        for i in range(plan.n_items):
            session = sessions[i]
            end = plan._item_pos.at[i] + plan._item_row.at[i + 1] - plan._item_row.at[i]
            for k in range(pages_for(end)):
                if k < session.n_pages and not (k == session.n_pages - 1 and plan.cow_page.at[i] >= 0):
                    plan._page_ids.at[at + k] = session.page_ids[k]
                else:
                    plan._page_ids.at[at + k] = cache.take_page()
            if plan.cow_page.at[i] >= 0:
                cows.append((plan.cow_page.at[i], plan._page_ids.at[at + session.n_pages - 1]))
            at += pages_for(end)
            plan._page_start.at[i + 1] = <int32_t>at
        return cows

    cdef object drive(self, list cows):
        """The runner's calls. Returns (logits block, interrupt to raise after the commit or None); raises after abort."""
        cdef StepPlan plan = self.plan
        runner = self.runner
        call = "why_not_shared"
        self.path = ""
        try:
            reason = "forced by DS4_FORCE_FALLBACK" if self.force_fallback else runner.why_not_shared(plan)
            self.path = "shared" if reason is None else f"fallback: {reason}"
            if cows:
                call = "copy_state"
                runner.copy_state((), cows)
            call = "make_logits"
            plan.logits = block = self.logits_block(plan.n_logit_rows)
            call = "begin"
            runner.begin(plan)
            if reason is None:
                call = "encode_batch_shared"
                runner.encode_batch_shared(plan)
            else:
                call = "encode_token_fallback"
                for row in range(plan.n_rows):
                    plan.check()
                    runner.encode_token_fallback(plan, row)
            call = "end"
            runner.end(plan)
            call = "read_logits"
            runner.read_logits(plan, block)
            call = "publish"
            interrupt = publish(runner, plan)
        except BaseException as exc:
            self.abort(exc, call)
            raise
        finally:
            plan.logits = None
        self.last_path = self.path
        return block, interrupt

    cdef object logits_block(self, int n):
        """float32 [n, vocab], not set. A block that nobody looks at any more is used again: fresh memory costs more than
        the copy into it."""
        cdef int i
        for i in range(len(self.blocks)):
            if self.blocks[i].shape[0] >= n and Py_REFCNT(PyList_GET_ITEM(self.blocks, i)) == 1:
                return self.blocks[i][:n]
        block = self.runner.make_logits(n, self.vocab)
        if 0 < block.nbytes <= KEPT_BLOCK_BYTES:
            self.blocks.append(block)
            del self.blocks[:-KEPT_BLOCKS]
        return block[:n]

    cdef int abort(self, object exc, str call) except -1:
        """Tell the runner, then raise the error as what it is to the caller (or return, to re-raise it)."""
        try:
            self.runner.abort(self.plan)
        except Exception as second:
            # A runner that cannot even abort has an unknown state: nothing may be computed on it any more.
            self.lost = True
            raise DeviceLostError(f"backend {self.backend_name!r} failed in {call} ({exc}) and again in abort "
                                  f"({second}); sessions are lost, open the engine again",
                                  call="abort", backend=self.backend_name) from exc
        if isinstance(exc, DeviceLostError):
            self.lost = True
            return 0
        if not isinstance(exc, Exception) or isinstance(exc, (StepCancelledError, StepError)):
            return 0
        raise StepError(f"backend {self.backend_name!r} failed in {call}: {type(exc).__name__}: {exc}. No session has "
                        "moved; the step may be tried again", call=call, backend=self.backend_name) from exc

    cdef void give_back(self, list sessions) noexcept:
        """Undo `reserve`: every page in the tables that is not the session's own goes back."""
        cdef StepPlan plan = self.plan
        cdef Session session
        cdef Py_ssize_t i, k, n
        cdef int32_t *table
        for i in range(plan.n_items):
            session = sessions[i]
            table = plan._page_ids.at + plan._page_start.at[i]
            n = plan._page_start.at[i + 1] - plan._page_start.at[i]
            # Backwards, so that the free stack is as it was.
            for k in range(n - 1, -1, -1):
                if k >= session.n_pages or table[k] != session.page_ids[k]:
                    self.cache.drop_page(table[k])

    cdef void commit(self, list sessions, object block) noexcept:
        cdef StepPlan plan = self.plan
        cdef Session session
        cdef Py_ssize_t i, count, logit_row = 0
        cdef int32_t *table
        for i in range(plan.n_items):
            session = sessions[i]
            count = plan._item_row.at[i + 1] - plan._item_row.at[i]
            memcpy(session._tokens + session.n_tokens, plan._tokens.at + plan._item_row.at[i], count * sizeof(int32_t))
            table = plan._page_ids.at + plan._page_start.at[i]
            session.n_pages = plan._page_start.at[i + 1] - plan._page_start.at[i]
            memcpy(session.page_ids, table, session.n_pages * sizeof(int32_t))
            if plan.cow_page.at[i] >= 0:
                self.cache.drop_page(plan.cow_page.at[i])
            session.n_tokens += <int>count
            session.high = max(session.high, session.n_tokens)
            logit_row += count if plan.n_logit_rows == plan.n_rows else 1
            session.block, session.block_row = block, logit_row - 1
        self.n_steps += 1

    # ------------------------------------------------------------ states and the end

    def import_state(self, state):
        """A new session that continues from an exported state (see Engine.import_state)."""
        return import_session(self, state)

    def check_integrity(self):
        """KVCache.check_integrity while no step runs."""
        with self.lock:
            self.cache.check_integrity()

    def close(self):
        """Wait for a running step, then free the device. Sessions raise SessionClosedError from now on."""
        if self.pid != getpid():
            self.closed = True  # the device belongs to the parent process
            return
        with self.lock:
            if self.closed:
                return
            self.closed = True
            try:
                self.runner.close()
            except Exception as exc:
                raise BackendError(f"backend {self.backend_name!r} failed in close: {said(exc)}. The engine is closed",
                                   backend=self.backend_name) from exc


cdef object publish(object runner, StepPlan plan):
    """Publish, whatever signals do: an interrupt is returned, to be raised once the step is committed."""
    interrupt = None
    for _ in range(3):
        try:
            runner.publish(plan)
            return interrupt
        except KeyboardInterrupt as exc:
            interrupt = exc  # it may have struck after the copy; publishing again is harmless, a half-commit is not
    raise interrupt
