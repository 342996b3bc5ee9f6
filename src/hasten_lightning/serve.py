"""Modules that can be served, and a callback that tries it before training."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.optional import need
from hasten._lib.rank_zero import rank_zero_info
from hasten.hooks import overrides
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer

Functions = dict[str, Callable[[Any], Any]]


class ServableModule(ABC, nn.Module):
    """A module that answers requests: subclass it together with ``LightningModule``.

    Example::

        >>> class Doubles(ServableModule):
        ...     def configure_payload(self):
        ...         return {"body": {"x": [1, 2]}}
        ...     def configure_serialization(self):
        ...         return {"x": torch.tensor}, {"y": torch.Tensor.tolist}
        ...     def serve_step(self, x):
        ...         return {"y": 2 * x}
        >>> answer(Doubles(), {"x": [1, 2]})
        {'y': [2, 4]}

    """

    @abstractmethod
    def configure_payload(self) -> dict[str, Any]:
        """Return an example of a request: a dict whose ``"body"`` has the arguments of ``serve_step`` as JSON."""

    @abstractmethod
    def configure_serialization(self) -> tuple[Functions, Functions]:
        """Return functions that make arguments of ``serve_step`` from JSON, and JSON of its outputs, by name."""

    @abstractmethod
    def serve_step(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the outputs for the arguments, by name."""

    def configure_response(self) -> dict[str, Any]:
        """Return the answer that is expected for ``configure_payload``; without it no answer is compared."""
        return {}


class ServableModuleValidator(Callback):
    """Serve a ``ServableModule`` before training, send it its own example, and stop the run if that fails.

    Args:
        optimization: None; other forms of the module are not served.
        server: "fastapi".
        host: where the server listens.
        port: its port.
        timeout: seconds to wait until the server listens.
        exit_on_failure: raise if the server answers with an error.

    Attributes:
        resp: the answer, with ``status_code`` and ``json()``; None before.

    Raises:
        ModuleNotFoundError: fastapi or uvicorn is not installed.
        NotImplementedError: ``optimization`` or ``server`` is something else, or the module lacks a method.
        TypeError: the module is not a ``ServableModule``.
        MisconfigurationException: the server answered with an error.
        RuntimeError: the server did not start, or its answer differs from ``configure_response``.

    Example::

        >>> ServableModuleValidator(port=8081).successful is None
        True

    """

    def __init__(
        self,
        optimization: Literal["trace", "script", "onnx", "tensorrt"] | None = None,
        server: Literal["fastapi", "ml_server", "torchserve", "sagemaker"] = "fastapi",
        host: str = "127.0.0.1",
        port: int = 8080,
        timeout: int = 20,
        exit_on_failure: bool = True,
    ) -> None:
        for package in ("fastapi", "uvicorn"):
            need(package, purpose="ServableModuleValidator()")
        if optimization is not None:
            what = f"ServableModuleValidator(optimization={optimization!r}):"
            raise make_error(NotImplementedError, what, fix="use None.", argument="optimization")
        if server != "fastapi":
            what = f"ServableModuleValidator(server={server!r}):"
            raise make_error(NotImplementedError, what, fix='use "fastapi".', argument="server")
        self.optimization, self.server = optimization, server
        self.host, self.exit_on_failure = host, exit_on_failure
        self.port = check.whole("ServableModuleValidator", "port", port, at_least=1, allowed="a free port")
        self.timeout = timeout
        self.resp: Response | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Serve the module in another process, and send it a request."""
        if not trainer.is_global_zero:
            return
        kind = type(trainer.strategy).__name__
        if kind in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"):
            raise RuntimeError(f"ServableModuleValidator: with {kind} no process holds the whole module to serve.")
        if not isinstance(pl_module, ServableModule):
            raise TypeError(f"ServableModuleValidator: {type(pl_module).__name__} is not a subclass of ServableModule.")
        for name in ("configure_payload", "configure_serialization", "serve_step"):
            if not overrides(pl_module, ServableModule, name):
                raise make_error(
                    NotImplementedError, "ServableModuleValidator:", fix=f"define {type(pl_module).__name__}.{name}()."
                )
        payload = pl_module.configure_payload()
        if "body" not in payload:
            raise ValueError(f'{type(pl_module).__name__}.configure_payload() has no entry "body": {payload!r}.')
        self.resp = self._asked(trainer, pl_module, payload)
        if overrides(pl_module, ServableModule, "configure_response"):
            expected = pl_module.configure_response()
            if self.successful and self.resp.json() != expected:
                raise RuntimeError(
                    f"ServableModuleValidator: the answer is {self.resp.json()!r}, but configure_response() says "
                    f"{expected!r}."
                )
        if self.exit_on_failure and not self.successful:
            raise MisconfigurationException(
                f"ServableModuleValidator: the server answered with status {self.resp.status_code}: {self.resp.text}. "
                "Its traceback is above."
            )
        if self.successful:
            rank_zero_info(f"The module can be served; its answer was {self.resp.json()}.")

    def _asked(self, trainer: Trainer, module: Any, payload: dict[str, Any]) -> Response:
        # Forked, as modules that are defined in functions cannot be sent.
        method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
        # The run is not sent to the other process.
        module.trainer = None
        process: Any = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
            target=_serve, args=(module, self.host, self.port), daemon=True
        )
        process.start()
        module.trainer = trainer
        try:
            self._wait(process)
            return _request(self.host, self.port, "POST", "/serve", payload)
        finally:
            process.kill()
            process.join()

    def _wait(self, process: Any) -> None:
        begin = time.monotonic()
        while True:
            try:
                if _request(self.host, self.port, "GET", "/ping").status_code == 200:
                    return
            except OSError:
                pass
            if not process.is_alive() or time.monotonic() - begin > self.timeout:
                raise RuntimeError(
                    f"ServableModuleValidator: no server listens at {self.host}:{self.port} after "
                    f"{time.monotonic() - begin:.0f} seconds."
                )
            time.sleep(0.05)

    @property
    def successful(self) -> bool | None:
        """Whether the server answered; None before."""
        return None if self.resp is None else self.resp.status_code == 200

    def state_dict(self) -> dict[str, Any]:
        """Return whether it succeeded, and with what."""
        return {"successful": self.successful, "optimization": self.optimization, "server": self.server}


class Response:
    """The answer of a server.

    Example::

        >>> Response(200, '{"y": 2}').json()
        {'y': 2}

    """

    def __init__(self, status_code: int, text: str) -> None:
        self.status_code, self.text = status_code, text

    def json(self) -> Any:
        """Return the answer as Python data."""
        return json.loads(self.text)


def answer(module: ServableModule, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a module to a request, as JSON data."""
    make, show = module.configure_serialization()
    arguments = {**body, **{name: function(body[name]) for name, function in make.items()}}
    with torch.no_grad():
        output = module.serve_step(**arguments)
    if not isinstance(output, dict):
        raise make_error(
            TypeError,
            f"{type(module).__name__}.serve_step() returned {output!r}.",
            fix="Return a dict of outputs by name.",
        )
    return {**output, **{name: function(output[name]) for name, function in show.items()}}


def _serve(module: Any, host: str, port: int) -> None:
    fastapi = need("fastapi", purpose="serving")
    app = fastapi.FastAPI()
    module.eval()

    def serve(payload: dict[str, Any] = fastapi.Body(...)) -> dict[str, Any]:  # noqa: B008
        return answer(module, payload["body"])

    # FastAPI reads annotations as objects.
    serve.__annotations__ = {"payload": dict, "return": dict}
    app.get("/ping")(lambda: True)
    app.post("/serve")(serve)
    need("uvicorn", purpose="serving").run(app, host=host, port=port, log_level="error")


def _request(host: str, port: int, method: str, path: str, payload: Any = None) -> Response:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        body = None if payload is None else json.dumps(payload)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        found = connection.getresponse()
        return Response(found.status, found.read().decode())
    finally:
        connection.close()
