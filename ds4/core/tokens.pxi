# Token ids as they come from users: a whole number, or any flat sequence of them.


cdef object about(object error, object session):
    """The error, saying whose it is."""
    error.session = session
    return error


cdef object checked_tokens(int vocab, object tokens, Py_ssize_t item, object session):
    """Token ids as a contiguous int32 array, or BatchError naming the first bad one."""
    try:
        ids = np.asarray(tokens)
    except (OverflowError, ValueError, TypeError):
        ids = np.empty(0, object)
    if ids.ndim == 1 and ids.size == 0 and ids.dtype != object:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise about(BatchError("tokens must be a flat sequence of token ids (whole numbers)", item=item,
                               found=f"{type(tokens).__name__} as {ids.dtype} {list(ids.shape)}"), session)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        at = int(np.argmax((ids < 0) | (ids >= vocab)))
        raise about(BatchError("token is out of range", item=item, at=at, token=int(ids[at]), vocab=vocab),
                    session)
    return np.ascontiguousarray(ids, np.int32)


cdef int checked_token(int vocab, object token, Py_ssize_t item, object session) except -1:
    cdef int64_t value = -1
    try:
        value = token.__index__()
    except AttributeError:
        raise about(BatchError("token is not a whole number", item=item, token=token), session) from None
    except OverflowError:
        pass
    if not 0 <= value < vocab:
        raise about(BatchError("token is out of range", item=item, token=token, vocab=vocab), session)
    return <int>value
