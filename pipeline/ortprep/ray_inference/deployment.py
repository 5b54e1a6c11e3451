"""The replica of Ray Serve: the sessions of its models, behind a handle and HTTP; and applications of it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ray import serve

from ortprep.bundle.codec import decode, encode
from ortprep.errors import PoolError, RunError, require_known
from ortprep.ray_inference.config import DEPLOYMENT, ServeConfig, deployment_options
from ortprep.ray_inference.device import prepare_device, reserved_cpus
from ortprep.ray_inference.http_api import BodyBudget, HttpMethods, read_token
from ortprep.ray_inference.inference_protocol import ProtocolError, describe_inputs
from ortprep.ray_inference.pinning import PinnedBundle, follow_aliases, require_version
from ortprep.runtime.tensors.signatures import check_inputs

if TYPE_CHECKING:
    from ortprep.runtime.opened_model import OpenedModel
    from ortprep.runtime.tensors.element_types import Array

log = logging.getLogger(__name__)

T = TypeVar("T")

_SMALL_BYTES = 64 * 1024
"""What is larger is not converted on the event loop, where health checks and other requests would wait."""


async def run_in_turn(executor: ThreadPoolExecutor, call: Callable[..., T], *arguments: Any) -> T:
    """Returns what a call in a thread returns; nothing holds the arguments once this has ended.

    A client that leaves cancels this. Its budget is free then, so the body of its request must be too.
    """
    calls = [functools.partial(call, *arguments)]
    future = executor.submit(lambda: calls.pop()())
    result = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        if future.cancel():
            calls.clear()  # the executor keeps a cancelled call until its turn comes
        else:
            await asyncio.wait([result])
        raise


@dataclass(frozen=True)
class ServedBundle:
    """A model that a replica serves, and the bundle it was opened from."""

    name: str
    pinned: PinnedBundle
    opened: OpenedModel

    @property
    def version(self) -> str:
        """The bundle's version, short enough for people."""
        return self.pinned.version.removeprefix("sha256:")[:12]


class BundleDeployment(HttpMethods):
    """A Serve deployment of one or several bundles, on the device that Ray gave the replica.

    `user_config` names the bundles (`{"bundles": {NAME: {"bundle": …, "version": …}}}`). A new one is opened
    and checked beside the old one, which answers until then. So is what an alias among them comes to name.

    Args:
        config: A `ServeConfig` as JSON types.

    Raises:
        PipelineError: The device cannot be used, or there is no token where the configuration names one.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        settings = [field.name for field in dataclasses.fields(ServeConfig)]
        for name in config:  # one that is passed over, such as a token's, must not go unnoticed
            require_known("setting of a deployment", name, settings)
        self.config = decode(ServeConfig, config)
        self._on_gpu = prepare_device()
        self.token_digest = read_token(self.config)
        self.bodies = BodyBudget(self.config.max_inflight_bytes)
        self._models: dict[str, ServedBundle] = {}
        self._checked_at = 0.0
        self._checking: asyncio.Task[None] | None = None
        self._run_began_s = math.inf
        self._watching: asyncio.Task[None] | None = None
        # One at a time, in order: sessions are tuned and measured alone on their device.
        self._runner = ThreadPoolExecutor(1, thread_name_prefix="ortprep-run")
        # One at a time too: many large requests at once would take the memory of all.
        self._converter = ThreadPoolExecutor(1, thread_name_prefix="ortprep-convert")

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Opens the bundles that are named now; those that stay the same stay open.

        Raises:
            PipelineError: One cannot be opened, is another version, or answers its golden sample wrongly.
        """
        bundles = {name: decode(PinnedBundle, entry) for name, entry in user_config["bundles"].items()}
        if self._watching is not None:
            self._watching.cancel()
        await self._replace_models(await asyncio.to_thread(follow_aliases, bundles, self.config))
        if self.config.watch_s and any(pinned.alias for pinned in bundles.values()):
            self._watching = asyncio.create_task(self._watch())

    async def _replace_models(self, bundles: Mapping[str, PinnedBundle]) -> None:
        self._models = await asyncio.to_thread(self._open, bundles)
        self._checked_at = time.monotonic()

    async def _watch(self) -> None:
        """Follows the aliases; a version that cannot be opened is logged once, and the one before answers."""
        refused: Mapping[str, PinnedBundle] = {}
        while True:
            # Not all replicas at the same time: each has two versions in memory meanwhile.
            await asyncio.sleep(self.config.watch_s * random.uniform(0.5, 1.0))
            served = {name: model.pinned for name, model in self._models.items()}
            current = served
            try:
                current = await asyncio.to_thread(follow_aliases, served, self.config)
                if current not in (served, refused):
                    await self._replace_models(current)
            except Exception:  # whatever is wrong with a version or a registry, what is served goes on
                log.exception("cannot follow the aliases")
                refused = current

    def _open(self, bundles: Mapping[str, PinnedBundle]) -> dict[str, ServedBundle]:
        """Opens the bundles that are not open yet; runs in a thread."""
        from ortprep.runtime.opened_model import open_model  # imports ONNX Runtime

        load = self.config.load
        if load.threads is None:
            load = dataclasses.replace(load, threads=reserved_cpus())
        models: dict[str, ServedBundle] = {}
        for name, pinned in bundles.items():
            served = self._models.get(name)
            if served is None or served.pinned != pinned:
                opened = open_model(pinned.bundle, load, name=name, device_id=0 if self._on_gpu else None)
                require_version(pinned, opened.root)
                served = ServedBundle(name, pinned, opened)
            models[name] = served
        return models

    async def check_health(self) -> None:
        """Runs the golden samples, unless the bundles were opened, and so checked, a moment ago.

        They wait for their turn behind the requests. A wait of more than half of `run_timeout_s` goes on
        while the replica counts as healthy, as long as no run hangs; a later check has the result.

        Raises:
            PipelineError: A sample is not answered as recorded, or a run takes longer than `run_timeout_s`.
        """
        check = self._checking
        if check is None:
            if time.monotonic() - self._checked_at <= self.config.health_check_period_s / 2:
                return
            check = self._checking = asyncio.create_task(self._run(self._check))
        await asyncio.wait([check], timeout=self.config.run_timeout_s / 2)
        if check.done():
            self._checking = None
            check.result()
            self._checked_at = time.monotonic()
        elif time.monotonic() - self._run_began_s > self.config.run_timeout_s:
            raise PoolError(f"a run hangs\n  expected its end within {self.config.run_timeout_s:g} s")

    def _check(self) -> None:
        for served in self._models.values():
            served.opened.check()

    async def _run(self, call: Callable[..., T], *arguments: Any) -> T:
        return await run_in_turn(self._runner, self._run_timed, call, *arguments)

    def _run_timed(self, call: Callable[..., T], *arguments: Any) -> T:
        self._run_began_s = time.monotonic()
        try:
            return call(*arguments)
        finally:
            self._run_began_s = math.inf

    def find_model(self, name: str, version: str = "") -> ServedBundle:
        """Returns the model of a name, and of a version if one is given.

        Raises:
            ProtocolError: There is no such model, or it has another version.
        """
        served = self._models.get(name)
        if served is None or version not in ("", served.version):
            models = ", ".join(f"{model.name} {model.version}" for model in self._models.values())
            raise ProtocolError.of(
                404, f"no such model: {name[:80]!r} {version[:80]}\n  expected one of {models}"
            )
        return served

    async def run(self, inputs: Mapping[str, Any], model: str | None = None) -> dict[str, Array]:
        """Runs a model for a caller of a Serve handle, and returns its outputs by name, in its order.

        Args:
            inputs: Arrays by input name, of the model's types.
            model: Name of the model, if the replica has several.

        Raises:
            InvalidRequestError: There is no such model, or the inputs do not fit it.
            RunError: ONNX Runtime refused them.
        """
        name = next(iter(self._models)) if model is None and len(self._models) == 1 else model
        served = self.find_model(name or "")
        return await self._run(served.opened.run, check_inputs(served.opened.signature, inputs))

    async def infer(self, served: ServedBundle, arrays: Mapping[str, Array]) -> list[Array]:
        """Runs a model on arrays by name and returns its outputs in its order.

        Raises:
            ProtocolError: ONNX Runtime refused them.
        """
        try:
            return list((await self._run(served.opened.run, arrays)).values())
        except RunError as error:  # its text may name files of the server
            log.warning("%s", error)
            shapes = [list(array.shape) for array in arrays.values()]
            raise ProtocolError(
                f"cannot run {served.name} on these inputs\n  expected "
                f"{describe_inputs(served.opened.config)}, got {shapes}"
            ) from None

    async def convert(self, size_bytes: int, call: Callable[..., T], *arguments: Any) -> T:
        """Returns what a conversion of so many bytes returns; a large one is done beside the event loop."""
        if size_bytes <= _SMALL_BYTES:
            return call(*arguments)
        return await run_in_turn(self._converter, call, *arguments)


def build_application(config: ServeConfig, bundles: Mapping[str, PinnedBundle], *, on_gpu: bool) -> Any:
    """Returns the application that serves some bundles, by name."""
    options = deployment_options(config, on_gpu=on_gpu)
    deployment = serve.deployment(BundleDeployment).options(
        name=DEPLOYMENT,
        user_config={"bundles": encode(bundles)},
        max_constructor_retry_count=3,
        **options,
    )
    return deployment.bind(encode(config))


def build_app(args: Mapping[str, Any]) -> Any:
    """Returns the application that a Serve config file describes, whose `import_path` this is.

    Args:
        args: `config`: a `ServeConfig` as JSON types. The rest is in the file's `deployments`.
    """
    return serve.deployment(BundleDeployment).options(name=DEPLOYMENT).bind(dict(args["config"]))
