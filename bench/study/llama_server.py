"""llama.cpp's own HTTP server, from the package xllamacpp: `python llama_server.py FILE.gguf --port PORT`.

It runs in an environment that has xllamacpp, which need not be that of headrace, so it imports nothing of it. Its flags
have the names that they have for llama-server.
"""

from __future__ import annotations

import argparse
import signal
import threading

import xllamacpp


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--parallel", type=int, required=True)
    parser.add_argument("--ctx-size", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.model_alias = args.alias
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.n_parallel = args.parallel
    params.n_ctx = args.ctx_size
    params.kv_unified = True
    params.cont_batching = True
    params.fit_params = False  # the size of the context is given
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.n_threads_http = args.parallel + 4  # one for each stream, or streams wait for each other
    server = xllamacpp.Server(params)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    del server


if __name__ == "__main__":
    main()
