"""llama.cpp in its own environment, for ``llama_peer``.

serve: reads one JSON request a line, {"ids": [...], "new": m}, and answers with the times of one prefill and of the decode
steps after it, at the places where the engine's own marks stand. logits: the same request without "new", answered by the file
that holds the logits of one pass from position "first" on, float32 [positions, vocabulary]. quantize: makes one file of another
format.
"""

import ctypes
import json
import sys
import time

import llama_cpp as cpp
import numpy as np


def serve(path: str, threads: int, capacity: int) -> None:
    cpp.llama_backend_init()
    asked = cpp.llama_model_default_params()
    model = cpp.llama_model_load_from_file(path.encode(), asked)
    params = cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = capacity
    params.n_threads = params.n_threads_batch = threads
    context = cpp.llama_init_from_model(model, params)
    words = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(model))
    print(json.dumps({"system": cpp.llama_print_system_info().decode()}), flush=True)

    def step(ids: list[int]) -> int:
        array = (cpp.llama_token * len(ids))(*ids)
        if cpp.llama_decode(context, cpp.llama_batch_get_one(array, len(ids))):
            raise RuntimeError("llama_decode failed")
        last = cpp.llama_get_logits_ith(context, -1)
        return int(
            np.ctypeslib.as_array(ctypes.cast(last, ctypes.POINTER(ctypes.c_float)), (words,)).argmax()
        )

    for line in sys.stdin:
        request = json.loads(line)
        cpp.llama_memory_clear(cpp.llama_get_memory(context), True)
        begin = time.perf_counter()
        token = step(request["ids"])
        first = time.perf_counter()
        for _ in range(request["new"] - 1):
            token = step([token])
        end = time.perf_counter()
        tpot = (end - first) * 1e3 / (request["new"] - 1)
        print(
            json.dumps({"prefill_ms": (first - begin) * 1e3, "tpot_ms": tpot, "e2e_ms": (end - begin) * 1e3}),
            flush=True,
        )


def logits(path: str, threads: int, folder: str) -> None:
    cpp.llama_backend_init()
    model = cpp.llama_model_load_from_file(path.encode(), cpp.llama_model_default_params())
    words = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(model))
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        ids, first = request["ids"], request["first"]
        params = cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = len(ids)
        params.n_threads = params.n_threads_batch = threads
        context = cpp.llama_init_from_model(model, params)
        batch = cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, at, 1
            batch.seq_id[at][0], batch.logits[at] = 0, at >= first
        if cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        rows = len(ids) - first
        pointer = ctypes.cast(cpp.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        target = f"{folder}/{number}.npy"
        np.save(target, np.ctypeslib.as_array(pointer, (rows, words)))
        cpp.llama_batch_free(batch)
        cpp.llama_free(context)
        print(json.dumps({"file": target}), flush=True)


def quantize(source: str, target: str, ftype: int) -> None:
    params = cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = ftype, True
    if cpp.llama_model_quantize(source.encode(), target.encode(), params):
        raise SystemExit("llama_model_quantize failed")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", path, threads, capacity]:
            serve(path, int(threads), int(capacity))
        case ["logits", path, threads, folder]:
            logits(path, int(threads), folder)
        case ["quantize", source, target, ftype]:
            quantize(source, target, int(ftype))
        case other:
            raise SystemExit(f"unknown: {other}")
