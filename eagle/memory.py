"""Memory that the C library holds without using it.

glibc keeps freed blocks for later. Tensors of ever other sizes, as batches of ever other lengths make them, seldom fit the
holes of earlier ones, so a long CPU training grew by 6 MB a step, to 18 GB, of which 0.3 were in use.
"""

import ctypes


def release_free_memory() -> bool:
    """Hands the heap's unused pages back to the system; False where the C library cannot (any but glibc)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no library without a name
        return False
    return bool(trim(ctypes.c_size_t(0)))
