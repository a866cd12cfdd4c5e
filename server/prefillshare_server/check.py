"""Validates a cluster before anything starts: models, how they fit together, the port."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.launch.decoders import weights_directory
from prefillshare_server.launch.plan import plan
from prefillshare_server.models import checkpoint, pooled_adapter, store
from prefillshare_server.models.geometry import Difference, Geometry, differences
from prefillshare_server.models.layout import Layout
from prefillshare_server.models.provenance import untrained

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prefillshare_server.config import Cluster, Router

_REMEDIES = {
    "tokenizer_sha256": "if its token ids are the base's, copy the base's tokenizer files over it",
    "template_sha256": "prompts are rendered with the base's template: if it was trained on that, "
    "remove its own (chat_template.jinja, or chat_template in tokenizer_config.json)",
}


def check(cluster: Cluster, *, progress: store.Progress | None = None) -> list[Problem]:
    """Everything that would keep `cluster` from serving; empty when it can start.

    Builds, downloads or merges models that are not there yet. Starts nothing.
    """
    found = list(_problems(cluster, progress))
    return found or list(_plan_problems(cluster))


def _problems(cluster: Cluster, progress: store.Progress | None) -> Iterator[Problem]:
    yield from _port_problems(cluster.router)
    try:
        base_dir = _weights(cluster.base.model, progress)
        base = Geometry.of(base_dir)
        layout = Layout.for_model(base_dir, cluster.layout)
    except ConfigError as error:
        yield from _located("base.model", error)
        return
    yield from _context_problems(cluster, base_dir)
    for name, role in cluster.roles.items():
        where = f"roles.{name}.{role.decoder.field}"
        misfits: list[Problem] = []
        try:
            if role.pooled:
                pooled_adapter.pooled(base_dir, store.resolve(role.decoder.ref, progress=progress))
            else:
                decoder_dir = weights_directory(role, base_dir, progress)
                checkpoint.require_weights(decoder_dir)
                found = differences(base, Geometry.of(decoder_dir))
                misfits = list(_misfits(f"{where}: {decoder_dir}", found))
        except ConfigError as error:
            yield from _located(where, error)
            continue
        yield from misfits
        if cluster.dtype == "auto" and not role.pooled:
            yield from _dtype_problems(where, base_dir, decoder_dir)
        # Of a decoder that does not fit the base it is no news that it was not trained for it.
        if not misfits and not cluster.allow_untrained:
            given = store.resolve(role.decoder.ref)
            yield from _located(where, ConfigError(*untrained(given, base_dir, layout)))


def _weights(ref: str, progress: store.Progress | None) -> Path:
    directory = store.resolve(ref, progress=progress)
    checkpoint.require_weights(directory)
    return directory


def _misfits(where: str, found: list[Difference]) -> Iterator[Problem]:
    shape = [each for each in found if not each.field.endswith("_sha256")]
    if shape:
        # Another model altogether; that its tokenizer differs too is no news.
        listed = ", ".join(f"{each.field} {each.decoder} (base {each.base})" for each in shape)
        yield Problem(
            where, f"does not fit the base: {listed}", "use a fine-tuned copy of the base"
        )
        return
    for field, _, decoder in found:
        part = "chat template" if field == "template_sha256" else "tokenizer"
        what = f"has no {part}" if decoder is None else f"its {part} is not the base's"
        yield Problem(where, what, _REMEDIES[field])


def _dtype_problems(where: str, base_dir: Path, decoder_dir: Path) -> Iterator[Problem]:
    """With ``dtype: auto`` each engine takes its checkpoint's own; the KV must be of one."""
    base, decoder = (checkpoint.dtype(directory) for directory in (base_dir, decoder_dir))
    if base and decoder and base != decoder:
        yield Problem(
            f"{where}: {decoder_dir}",
            f"its weights are {decoder}, the base's {base}",
            f"set dtype: {base} at the top of the cluster file",
        )


def _context_problems(cluster: Cluster, base_dir: Path) -> Iterator[Problem]:
    limit = checkpoint.config(base_dir).get("max_position_embeddings")
    wanted = cluster.max_model_len
    if wanted is not None and isinstance(limit, int) and wanted > limit:
        yield Problem(
            "max_model_len",
            f"{wanted} is more than the base's own context of {limit} tokens",
            f"set at most {limit}",
        )


def _plan_problems(cluster: Cluster) -> Iterator[Problem]:
    """What only shows when the workers' command lines are made."""
    try:
        plan(cluster, log_dir=Path())
    except ConfigError as error:
        yield from error.problems


def _port_problems(router: Router) -> Iterator[Problem]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            router.host, router.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # A port whose last connection is still closing can be listened on.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        yield Problem("router.host", f"{router.host!r} is unknown ({error.strerror})", "correct it")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        yield Problem(
            "router.port",
            f"cannot listen on {router.host}:{router.port} ({reason})",
            "stop what uses it, or choose another with --port",
        )


def _located(where: str, error: ConfigError) -> Iterator[Problem]:
    for problem in error.problems:
        yield Problem(f"{where}: {problem.where}", problem.what, problem.remedy)
