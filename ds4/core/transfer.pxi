# Sessions made from others: forks, exported states and what becomes of them. All under the engine's lock.


cdef Session fork_session(EngineCore core, Session parent, object seed):
    cdef Session child
    cdef int i
    if not core.runner.capabilities.fork:
        raise StepError(f"backend {core.backend_name!r} cannot fork sessions", call="copy_state",
                        backend=core.backend_name)
    with core.lock:
        core.require_alive()
        child = Session(core, seed)
        try:
            core.runner.copy_state([(parent.slab, child.slab)], ())
        except Exception as exc:
            core.abort(exc, "copy_state")
            raise
        memcpy(child._tokens, parent._tokens, parent.n_tokens * sizeof(int32_t))
        memcpy(child.page_ids, parent.page_ids, parent.n_pages * sizeof(int32_t))
        for i in range(parent.n_pages):
            core.cache.page_refs[parent.page_ids[i]] += 1
        child.n_tokens, child.n_pages, child.high = parent.n_tokens, parent.n_pages, parent.high
        child.block, child.block_row = parent.block, parent.block_row
    return child


cdef object state_key(EngineCore core):
    if core.key is None:
        core.key = core.make_key()
    return core.key


cdef object export_session(EngineCore core, Session session):
    if not core.runner.capabilities.export:
        raise StepError(f"backend {core.backend_name!r} cannot export sessions", call="export_state",
                        backend=core.backend_name)
    key = state_key(core)
    with core.lock:
        core.require_alive()
        try:
            slab, pages = core.runner.export_state(session.slab, session.pages)
        except Exception as exc:
            core.abort(exc, "export_state")
            raise
    return SessionState(
        key=key, tokens=session.tokens, high=session.high, seed=session._seed, seed_given=session.seed_given,
        logits=None if session.block is None else np.array(session.block[session.block_row]),
        slab=slab, pages=pages)


cdef Session import_session(EngineCore core, object state):
    """A new session that continues from an exported state (see Engine.import_state)."""
    cdef Session session
    cdef const int32_t[::1] view
    cdef int i, n
    core.require_alive()
    if not isinstance(state, SessionState):
        raise StateError("not a ds4.SessionState", field="state", expected="SessionState", found=type(state).__name__)
    key = state_key(core)
    require_same(key, state.key)
    ids = checked_tokens(core.vocab, state.tokens, 0, None)
    n = <int>len(ids)
    if n > core.context:
        raise ContextLimitError(f"the state holds {n} tokens; this engine's context is {core.context}", item=0,
                                pos=0, tokens=n, context=core.context)
    for name, array, shape in (
        ("slab", state.slab, (key.layout.slab_bytes,)),
        ("pages", state.pages, (pages_for(n), key.layout.page_bytes)),
        ("logits", state.logits, (core.vocab,)),
    ):
        if array is not None and array.shape != shape:
            raise StateError(f"the state's {name} has the wrong size", field=name, expected=shape, found=array.shape)
    if not n <= state.high <= core.context:
        raise StateError("the state's highest position is impossible", field="high", expected=n, found=state.high)
    with core.lock:
        core.require_alive()
        if pages_for(n) > core.cache.n_free_pages:
            core.raise_exhausted(0, None, pages_for(n), core.cache.n_free_pages)
        session = Session(core, state.seed)
        session.seed_given = state.seed_given
        for i in range(<int>pages_for(n)):
            session.page_ids[i] = core.cache.take_page()
            session.n_pages += 1
        try:
            core.runner.import_state(session.slab, session.pages, state.slab, state.pages)
        except Exception as exc:
            session.release()
            core.abort(exc, "import_state")
            raise
        if n:
            view = ids
            memcpy(session._tokens, &view[0], n * sizeof(int32_t))
        session.n_tokens, session.high = n, state.high
        if state.logits is not None:
            session.block = np.array(state.logits, np.float32).reshape(1, -1)
    return session
