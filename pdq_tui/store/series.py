"""The Parquet series of a snapshot: explicit schemas on writing, a tolerant reader.

requests  one row a request, in the order they ran.       tokens  one row a decode step.
sensors   one row a sample and GPU (one row without GPU). Missing is null, never NaN or 0.

A reader of another version adds nulls for columns that a file lacks, widens numbers, and keeps columns it does not
know, so that files of different versions can be read side by side in any order.
"""

from __future__ import annotations

import gc
import io
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from pdq_tui.core import protocol as p
from pdq_tui.errors import PdqError

#: Major version of snapshots: in the manifest and in the metadata of each Parquet file.
SCHEMA: Final = 1

Schema = Mapping[str, pl.DataType]

_I, _F, _S, _B = pl.Int64(), pl.Float64(), pl.String(), pl.Boolean()

REQUESTS: Final[Schema] = {
    "row": _I,
    "request": _I,
    "t_ns": _I,
    "arm": _S,
    "policy": _S,
    "policy_digest": _S,
    "kind": _S,
    "block": _I,
    "slot": _I,
    "control": _B,
    "warmup": _B,
    "first_use": _B,
    "prompt": _I,
    "batch": _I,
    "prompt_tokens": _I,
    "padded_tokens": _I,
    "output_tokens": pl.List(_I),
    "stop": _S,
    "stop_reasons": pl.List(_S),
    "queue_ms": _F,
    "tokenize_ms": _F,
    "prefill_ms": _F,
    "handoff_ms": _F,
    "ttft_ms": _F,
    "decode_ms": _F,
    "tpot_ms": _F,
    "e2e_ms": _F,
    "gap_ms": _F,
    "bytes_per_step": _I,
    "bytes_per_step_wasted": _I,
    "prefill_flops": pl.List(pl.Struct({"dtype": _S, "flops": _F})),
    "decode_flops": pl.List(pl.Struct({"dtype": _S, "flops": _F})),
    "prefill_bytes": _I,
    "prefill_pieces": _I,
    "prefill_bound_ms": _F,
    "decode_bound_ms": _F,
    "kv_bytes": _I,
    "prefill_peak_bytes": _I,
    "decode_peak_bytes": _I,
    "steady_bytes": _I,
    "memory_method": _S,
    "eager_launch_bound": _B,
    "cancelled": _B,
    "valid": _B,
    "invalid_reason": _S,
    "nonfinite_stage": _S,
    "nonfinite_step": _I,
    "text": _S,
    "token_ids": pl.List(_I),
    "tokens_sha256": _S,
    "host_start_ns": _I,
    "host_end_ns": _I,
}

#: ``row`` joins to the requests: request numbers start again with a new engine process.
TOKENS: Final[Schema] = {"row": _I, "request": _I, "arm": _S, "step": _I, "itl_ms": _F}

#: What of them a request's ``itl_ms`` is made from.
STEPS: Final = ("row", "request", "itl_ms")

_GPU: Final = {
    "name": _S,
    "uuid": _S,
    "bus_id": _S,
    "mig": _B,
    "engine": _B,
    "gpu_util": _F,
    "memory_util": _F,
    "memory_total_bytes": _I,
    "memory_used_bytes": _I,
    "memory_reserved_bytes": _I,
    "memory_version": _S,
    "unified": _B,
    "process_memory_bytes": _I,
    "other_processes": _I,
    "power_w": _F,
    "power_limit_w": _F,
    "power_average_w": _F,
    "power_instant_w": _F,
    "dram_util": _F,
    "sm_activity": _F,
    "tensor_activity": _F,
    "occupancy": _F,
    "nvlink_rx_bytes_s": _F,
    "nvlink_tx_bytes_s": _F,
    "pcie_rx_bytes_s": _F,
    "pcie_tx_bytes_s": _F,
    "ecc_uncorrected": _I,
    "energy_j": _F,
    "temperature_c": _F,
    "sm_mhz": _F,
    "memory_mhz": _F,
    "throttle": pl.List(_S),
    "throttle_raw": _I,
}
_CPU: Final = {
    "load": _F,
    "engine_load": _F,
    "engine_rss_bytes": _I,
    "memory_total_bytes": _I,
    "memory_available_bytes": _I,
    "mhz": _F,
    "temperature_c": _F,
    "energy_j": _F,
    "affinity": _I,
    "quota": _F,
}
SENSORS: Final[Schema] = {
    "t_ns": _I,
    "gpu": _I,
    **{f"gpu_{k}": v for k, v in _GPU.items()},
    **{f"cpu_{k}": v for k, v in _CPU.items()},
    "missing": _S,
}

SERIES: Final[Mapping[str, Schema]] = {"requests": REQUESTS, "tokens": TOKENS, "sensors": SENSORS}
#: Columns without which a file is no such series, of whatever version.
KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "requests": ("request", "t_ns"),
    "tokens": ("request", "itl_ms"),
    "sensors": ("t_ns",),
}


# -- writing -----------------------------------------------------------------------------------------------------------


def _clean(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def frame(rows: Sequence[Mapping[str, Any]], schema: Schema) -> pl.DataFrame:
    """Rows as a frame of exactly ``schema``; absent keys and non-finite numbers are null."""
    return pl.DataFrame(
        {c: [_clean(r.get(c)) for r in rows] for c in schema}, schema=dict(schema), strict=False
    )


def requests_frame(requests: Sequence[p.Request]) -> pl.DataFrame:
    """Token ids stay only with the first request of an answer: the others' ``tokens_sha256`` finds them, and a long run
    repeats few answers often."""
    rows = []
    written: set[str] = set()
    for number, r in enumerate(requests):
        row: dict[str, Any] = {"row": number} | {c: getattr(r, c) for c in REQUESTS if hasattr(r, c)}
        if not r.token_ids or r.tokens_sha256 in written:
            row["token_ids"] = None
        elif r.tokens_sha256 is not None:
            written.add(r.tokens_sha256)
        for stage in ("prefill_flops", "decode_flops"):
            row[stage] = [{"dtype": k, "flops": _clean(v)} for k, v in getattr(r, stage).items()]
        row["nonfinite_stage"] = r.nonfinite.stage if r.nonfinite else None
        row["nonfinite_step"] = r.nonfinite.step if r.nonfinite else None
        rows.append(row)
    return frame(rows, REQUESTS)


def tokens_frame(requests: Sequence[p.Request]) -> pl.DataFrame:
    """``step`` counts from 1: the first decode step makes the second token."""
    rows = [
        {"row": number, "request": r.request, "arm": r.arm, "step": i, "itl_ms": v}
        for number, r in enumerate(requests)
        for i, v in enumerate(r.itl_ms, 1)
    ]
    return frame(rows, TOKENS)


def sensors_frame(samples: Sequence[p.SensorSample]) -> pl.DataFrame:
    rows = []
    for s in samples:
        cpu = {f"cpu_{k}": getattr(s.cpu, k) for k in _CPU}
        gpus: list[p.GpuSample | None] = [*s.gpus] or [None]
        for gpu in gpus:
            missing = {f"cpu_{k}": v for k, v in s.cpu.missing.items()}
            row: dict[str, Any] = {"t_ns": s.t_ns, **cpu}
            if gpu is not None:
                row |= {"gpu": gpu.index, **{f"gpu_{k}": getattr(gpu, k) for k in _GPU}}
                missing |= {f"gpu_{k}": v for k, v in gpu.missing.items()}
            row["missing"] = "; ".join(f"{k}: {v}" for k, v in missing.items()) or None
            rows.append(row)
    return frame(rows, SENSORS)


def parquet_bytes(table: pl.DataFrame) -> bytes:
    """The file's bytes. Made in memory, so that a full disk is an OSError of one write, not an error of polars."""
    buffer = io.BytesIO()
    table.write_parquet(buffer, compression="zstd", metadata={"pdq_tui_schema": str(SCHEMA)})
    return buffer.getvalue()


# -- reading -----------------------------------------------------------------------------------------------------------


def read(
    path: Path, schema: Schema, keys: Sequence[str] = (), only: Sequence[str] | None = None
) -> pl.DataFrame:
    """One series file, made to fit ``schema``; ``only`` these of its columns, which a file of a million rows is read in
    half the time for. Raises PdqError where it is not Parquet, cannot be read, or lacks one of the columns ``keys``."""
    try:
        data = path.read_bytes()
        if only is None:
            table = pl.read_parquet(io.BytesIO(data))
        else:
            there = pl.read_parquet_schema(io.BytesIO(data))
            table = pl.read_parquet(io.BytesIO(data), columns=[c for c in there if c in {*only, *keys}])
            schema = {name: kind for name, kind in schema.items() if name in only}
    except (OSError, pl.exceptions.PolarsError) as error:
        raise PdqError(f"{path} cannot be read: {_first_line(error)}") from error
    lacks = [name for name in keys if name not in table.columns]
    if lacks:
        raise PdqError(f"{path} is no such series: it has no column {', '.join(lacks)}")
    return align(table, schema)


def align(table: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    """Known columns first and in the order of ``schema``: absent ones as nulls, integers widened to floats where
    either side holds floats; unknown columns are kept behind them."""
    columns = []
    for name, wanted in schema.items():
        if name not in table.columns:
            columns.append(pl.lit(None, dtype=wanted).alias(name))
            continue
        have = table.schema[name]
        target = wanted
        if have.is_float() and wanted.is_integer():
            target = pl.Float64()
        columns.append(pl.col(name).cast(target, strict=False) if have != target else pl.col(name))
    extra = [pl.col(c) for c in table.columns if c not in schema]
    return table.select([*columns, *extra])


def together(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Files of different versions in one frame: nulls for what one lacks, numbers widened, unknown columns kept."""
    return pl.concat(tables, how="diagonal_relaxed")


@contextmanager
def no_collecting() -> Iterator[None]:
    """Records are no garbage, and form no cycles: the collector, run again and again while tens of thousands of them
    are made and grouped, takes half as long as all the rest."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@no_collecting()
def requests_of(table: pl.DataFrame, tokens: pl.DataFrame, label: str) -> list[p.Request]:
    """Request records again, ``itl_ms`` from the token series. Nulls take the field's default; ``label`` stands for
    an arm that the file does not name. Raises PdqError where a row cannot be one."""
    join = "row" if tokens["row"].null_count() < tokens.height and "row" in table.columns else "request"
    steps = _steps(tokens, join)
    rows = _present(table.select([c for c in table.columns if c in REQUESTS]))
    needed = {"arm": label, "policy": "", "policy_digest": "", "kind": "loop"}
    for name in [c for c in needed if c in table.columns and table[c].null_count() == 0]:
        del needed[name]
    gaps = []
    for index, row in enumerate(rows):
        row_number = row.pop("row", index)
        stage, step = row.pop("nonfinite_stage", None), row.pop("nonfinite_step", None)
        if stage is not None:
            row["nonfinite"] = {"stage": stage, "step": step or 0}
        for stage in ("prefill_flops", "decode_flops"):
            row[stage] = {
                f["dtype"]: f["flops"]
                for f in row.get(stage) or ()
                if f["dtype"] is not None and f["flops"] is not None
            }
        number = row.setdefault("request", index)
        for name, value in needed.items():
            row.setdefault(name, value)
        gaps.append(steps.get(int(row_number if join == "row" else number), []))
    try:
        found = msgspec.convert(rows, list[p.Request], strict=False)
    except msgspec.ValidationError:
        for number, row in enumerate(rows, 1):
            try:
                msgspec.convert(row, p.Request, strict=False)
            except msgspec.ValidationError as error:
                raise PdqError(f"row {number} of the requests is damaged: {error}") from error
        raise
    for request, itl in zip(found, gaps, strict=True):
        request.itl_ms = itl  # floats already: a long run has a million, which need no second look
    return found


def _present(table: pl.DataFrame) -> list[dict[str, Any]]:
    """The rows without nulls, and without columns that hold nothing but the field's default. By column, since a long
    run has many rows and most columns are all the one or all the other."""
    whole = [s for s in table if s.null_count() == 0 and not _is_default(s)]
    partly = [s for s in table if 0 < s.null_count() < table.height]
    names = [s.name for s in whole]
    columns = zip(*(s.to_list() for s in whole), strict=True) if whole else [()] * table.height
    rows = [dict(zip(names, values, strict=True)) for values in columns]
    for s in partly:
        for row, value in zip(rows, s.to_list(), strict=True):
            if value is not None:
                row[s.name] = value
    return rows


_DEFAULTS: Final = {f.name: f.default for f in msgspec.structs.fields(p.Request)}


def _is_default(s: pl.Series) -> bool:
    default = _DEFAULTS.get(s.name)
    return (
        isinstance(default, (bool, int, float, str))
        and not s.dtype.is_nested()
        and bool((s == default).all())
    )


def _steps(tokens: pl.DataFrame, join: str) -> dict[int, list[float]]:
    """The gaps of each request by its number in the column ``join``, in the order of the file."""
    there = tokens.select(join, "itl_ms").drop_nulls()
    if not there[join].is_sorted():
        by_request = there.group_by(join, maintain_order=True).agg("itl_ms")
        return dict(zip(by_request[join].to_list(), by_request["itl_ms"].to_list(), strict=True))
    # As it is written: one list cut where the next request begins is a third of the time of a list a request.
    values = there["itl_ms"].to_list()
    runs = there[join].rle().struct.unnest()
    ends = itertools.accumulate(runs["len"].to_list(), initial=0)
    cuts = itertools.pairwise(ends)
    return {
        number: values[begin:end] for number, (begin, end) in zip(runs["value"].to_list(), cuts, strict=True)
    }


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
