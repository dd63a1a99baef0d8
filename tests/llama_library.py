"""llama.cpp by its C interface, for what compares with it: the functions of a shared library that has them."""

from __future__ import annotations

import ctypes

# More than any structure of parameters has. Such a structure is last on the stack, so that a larger one does no harm.
_ROOM = 1024
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int32
# Of the structure of a model's parameters: whether only its vocabulary is read.
_VOCABULARY_ONLY = 72


class Parameters(ctypes.Structure):
    """Of models, or of contexts: the first numbers of the latter, and what we leave at its default."""

    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * _ROOM),
    )

    def read_only_vocabulary(self) -> None:
        """Of models: leave out the weights."""
        self.rest[_VOCABULARY_ONLY - type(self).rest.offset] = 1


class Batch(ctypes.Structure):
    """What llama_decode takes."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


# name, result, arguments
_FUNCTIONS = (
    ("llama_model_default_params", Parameters, []),
    ("llama_context_default_params", Parameters, []),
    ("llama_model_load_from_file", _POINTER, [ctypes.c_char_p, Parameters]),
    ("llama_model_free", None, [_POINTER]),
    ("llama_init_from_model", _POINTER, [_POINTER, Parameters]),
    ("llama_free", None, [_POINTER]),
    ("llama_set_n_threads", None, [_POINTER, _INTEGER, _INTEGER]),
    ("llama_get_memory", _POINTER, [_POINTER]),
    ("llama_memory_clear", None, [_POINTER, ctypes.c_bool]),
    ("llama_model_get_vocab", _POINTER, [_POINTER]),
    ("llama_vocab_n_tokens", _INTEGER, [_POINTER]),
    (
        "llama_tokenize",
        _INTEGER,
        [
            _POINTER,
            ctypes.c_char_p,
            _INTEGER,
            ctypes.POINTER(_INTEGER),
            _INTEGER,
            ctypes.c_bool,  # adds special tokens
            ctypes.c_bool,  # reads those in the text
        ],
    ),
    ("llama_batch_init", Batch, [_INTEGER, _INTEGER, _INTEGER]),
    ("llama_batch_get_one", Batch, [ctypes.POINTER(_INTEGER), _INTEGER]),
    ("llama_decode", _INTEGER, [_POINTER, Batch]),
    ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [_POINTER, _INTEGER]),
    ("llama_log_set", None, [_POINTER, _POINTER]),
)


def silent_llama(library: ctypes.CDLL) -> ctypes.CDLL:
    """The same library: its functions have their types, and print nothing."""
    for name, result, arguments in _FUNCTIONS:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(ctypes.cast(_silent, _POINTER), None)
    return library


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _silent(_level: int, _text: bytes, _data: object) -> None:
    """What llama.cpp would print."""
