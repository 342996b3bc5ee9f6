"""WandbLogger: values at Weights & Biases, or in its offline files."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.optional import need
from hasten._lib.rank_zero import rank_zero_only, rank_zero_warn
from hasten.loggers.base import SavedCheckpoint, UploadingLogger, as_dict, plain, with_prefix
from hasten.loggers.folders import local, make_writable

if TYPE_CHECKING:
    from torch.nn import Module

STEP = "trainer/global_step"


def _argument(key: str) -> property:
    """Return a property that is an argument of ``wandb.init``."""
    return property(lambda self: self._wandb_init[key], lambda self, value: self._wandb_init.update({key: value}))


class WandbLogger(UploadingLogger):
    """Log to Weights & Biases. Needs the package ``wandb``; another process sends the values.

    The run is started before training begins. It stays open after ``fit``, so that ``test`` logs to it too; end it
    with ``wandb.finish()`` where several runs follow each other in one program.

    Args:
        name: name of the run; W&B makes one up by default.
        save_dir: folder under which W&B keeps its files, and checkpoints are saved.
        version: id of the run; an existing run is continued.
        offline: write files only; ``wandb sync`` sends them later.
        dir: another name of ``save_dir``.
        id: another name of ``version``.
        anonymous: allow a run without an account, where W&B still does.
        project: name of the project; ``$WANDB_PROJECT`` or "lightning_logs" by default.
        log_model: checkpoints as artifacts: "all" when each is written; True those left when the fit has ended, or
            each if the callback keeps all; False none.
        experiment: a run that is already started.
        prefix: put before every name, with "-" between.
        checkpoint_name: name of the artifact; "model-<id>" by default.
        add_file_policy: "mutable" copies a checkpoint before it is sent; "immutable" sends the file itself, which must
            then not change.
        **kwargs: passed to ``wandb.init``, such as ``entity``, ``group``, ``tags``.

    Raises:
        ModuleNotFoundError: ``wandb`` is not installed.
        MisconfigurationException: ``log_model`` with ``offline=True``.
        ValueError: ``log_model`` or ``add_file_policy`` is not one of the above.
        OSError: when the run starts: ``save_dir`` cannot be written to.
        RuntimeError: when the run starts: W&B did not start it, for instance without an API key.

    Example::

        >>> import tempfile
        >>> logger = WandbLogger(project="digits", save_dir=tempfile.mkdtemp(), mode="disabled")
        >>> logger.log_metrics({"loss": 0.25}, step=0)
        >>> logger.experiment.finish()

    Source: https://docs.wandb.ai/ref/python/

    """

    LOGGER_JOIN_CHAR = "-"
    # Programs read and set them.
    _name, _project, _save_dir, _id = map(_argument, ("name", "project", "dir", "id"))
    # W&B copies what TensorBoard writes from its start on.
    starts_first: ClassVar[bool] = True

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] | None = ".",
        version: str | int | None = None,
        offline: bool | None = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: Literal["all"] | bool | None = False,
        experiment: object = None,
        prefix: str | None = "",
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
        **kwargs: object,
    ) -> None:
        check.declared(WandbLogger.__init__, locals())
        need("wandb", purpose="WandbLogger")
        if offline and log_model:
            what = (
                f"WandbLogger(log_model={log_model!r}, offline=True): checkpoints cannot be uploaded in offline mode."
            )
            raise MisconfigurationException(what, fix="Leave out one of the two.", argument="log_model")
        if version is not None and not isinstance(version, str):
            allowed = "a string, or a whole number of at least 0"
            version = str(check.whole("WandbLogger", "version", version, at_least=0, allowed=allowed))
        check.one_of("WandbLogger", "add_file_policy", add_file_policy, ("mutable", "immutable"))
        folder = save_dir if save_dir is not None else dir
        self._wandb_init: dict[str, Any] = {
            "name": name,
            "project": project or os.environ.get("WANDB_PROJECT", "lightning_logs"),
            "dir": None if folder is None else local(os.fspath(folder)),
            "id": version or id,
            "resume": "allow",
        }
        if anonymous:
            self._wandb_init["anonymous"] = "allow"
        self._wandb_init.update(kwargs)
        self._offline = bool(offline)
        super().__init__(False if log_model is None else log_model)
        self._prefix, self._checkpoint_name = prefix, checkpoint_name
        self.add_file_policy = add_file_policy
        self._experiment = experiment
        self._attach_id: str | None = None

    @property
    def name(self) -> str | None:
        """Name of the project; the run's own is ``logger.experiment.name``."""
        project: str | None = self._wandb_init["project"]
        return project

    @property
    def version(self) -> str | None:
        """Id of the run; None while none was given and the run has not started."""
        version: str | None = self._wandb_init["id"] if self._experiment is None else self._experiment.id
        return version

    @property
    def save_dir(self) -> str | None:
        """Folder under which W&B keeps its files, and checkpoints are saved."""
        folder: str | None = self._wandb_init["dir"]
        return folder

    def _start(self) -> Any:
        wandb = need("wandb", purpose="WandbLogger")
        if wandb.run is not None:
            rank_zero_warn(
                f"There is a wandb run already in progress, {wandb.run.id}, and this WandbLogger continues it.",
                fix="Call wandb.finish() before making the logger to start a new run.",
            )
            return wandb.run
        if self._attach_id is not None:
            return getattr(wandb, "attach", wandb._attach)(self._attach_id)
        if self._offline or self._wandb_init.get("mode") == "offline":
            # W&B reads it, and what else the program starts is offline, too.
            os.environ["WANDB_MODE"] = "dryrun"
        if self.save_dir is not None:
            make_writable("WandbLogger", f"save_dir={self.save_dir!r}", self.save_dir)
        try:
            run = wandb.init(**self._wandb_init)
        except wandb.Error as error:
            what = f"WandbLogger: W&B did not start a run: {error}."
            fix = "Log in with `wandb login`, or write files only with WandbLogger(offline=True)."
            raise make_error(RuntimeError, what, fix=fix) from error
        if getattr(run, "define_metric", None) is None:
            return run  # of an old version of W&B
        if self._wandb_init.get("sync_tensorboard"):
            run.define_metric("*", step_metric="global_step")
        else:
            run.define_metric(STEP)
            run.define_metric("*", step_metric=STEP, step_sync=True)
        return run

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values.

        Args:
            metrics: numbers, or any of W&B's media, by name.
            step: index of the optimizer step: the x axis, logged as "trainer/global_step".

        """
        row = dict(with_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR))
        if step is not None and not self._wandb_init.get("sync_tensorboard"):
            row[STEP] = step
        self.experiment.log(row)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Log hyper-parameters to the run's config; a value that was there is replaced."""
        self.experiment.config.update(plain(as_dict(params)), allow_val_change=True)

    @rank_zero_only
    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: object = None,
        step: int | None = None,
    ) -> None:
        """Log a table.

        Args:
            key: its name.
            columns: the names of its columns.
            data: rows of anything that W&B shows: numbers, text, images.
            dataframe: a pandas DataFrame, instead of ``columns`` and ``data``.
            step: index of the optimizer step.

        """
        table = need("wandb", purpose="WandbLogger").Table(columns=columns, data=data, dataframe=dataframe)
        self.log_metrics({key: table}, step)

    @rank_zero_only
    def log_text(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[str]] | None = None,
        dataframe: object = None,
        step: int | None = None,
    ) -> None:
        """Log text as a table; see ``log_table``."""
        self.log_table(key, columns, data, dataframe, step)

    @rank_zero_only
    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Log images.

        Args:
            key: their name.
            images: tensors, arrays, PIL images or paths.
            step: index of the optimizer step.
            **kwargs: for ``wandb.Image``, each a list with one item an image, such as ``caption=["a", "b"]``.

        Raises:
            TypeError: ``images`` is not a list.
            ValueError: a list is of another length.

        """
        self._log_media("Image", "images", key, images, step, kwargs)

    @rank_zero_only
    def log_audio(self, key: str, audios: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Log sounds: arrays or paths; options as for ``log_image``, such as ``sample_rate=[16000]``."""
        self._log_media("Audio", "audios", key, audios, step, kwargs)

    @rank_zero_only
    def log_video(self, key: str, videos: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Log videos: arrays (time, channels, height, width) or paths; options as for ``log_image``."""
        self._log_media("Video", "videos", key, videos, step, kwargs)

    def _log_media(
        self, kind: str, argument: str, key: str, items: Any, step: int | None, options: dict[str, list[Any]]
    ) -> None:
        owner = f"WandbLogger.log_{kind.lower()}"
        if not isinstance(items, list):
            what = f'{owner}: Expected a list as "{argument}", found {type(items)}.'
            raise make_error(TypeError, what, fix=f"Write {argument}=[...], also for one.", argument=argument)
        for name, values in options.items():
            if len(values) != len(items):
                what = f"{owner}: Expected {len(items)} items but only found {len(values)} for {name}."
                raise make_error(ValueError, what, fix=f"Give one for each of the {argument}.", argument=name)
        make = getattr(need("wandb", purpose="WandbLogger"), kind)
        media = [make(item, **{name: values[i] for name, values in options.items()}) for i, item in enumerate(items)]
        self.log_metrics({key: media}, step)

    @rank_zero_only
    def watch(
        self,
        model: Module,
        log: Literal["gradients", "parameters", "all"] | None = "gradients",
        log_freq: int = 100,
        log_graph: bool = True,
    ) -> None:
        """Log histograms of gradients or parameters during training; this reads them from the device.

        Args:
            model: the module.
            log: "gradients", "parameters", "all" or None.
            log_freq: batches between two.
            log_graph: also log the graph.

        """
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    @rank_zero_only
    def unwatch(self, model: Module | None = None) -> None:
        """Undo ``watch`` for one module or for all."""
        self.experiment.unwatch(model)

    @staticmethod
    @rank_zero_only
    def download_artifact(
        artifact: str,
        save_dir: str | os.PathLike[str] | None = None,
        artifact_type: str | None = None,
        use_artifact: bool | None = True,
    ) -> str:
        """Download an artifact; return the folder it is in.

        Args:
            artifact: its name, such as "entity/project/model-abc:best".
            save_dir: where to put it; W&B chooses by default.
            artifact_type: its type, where no run is open.
            use_artifact: record that the open run uses it.

        """
        wandb = need("wandb", purpose="WandbLogger")
        if wandb.run is not None and use_artifact:
            found = wandb.run.use_artifact(artifact)
        else:
            found = wandb.Api().artifact(artifact, type=artifact_type)
        folder: str = found.download(root=None if save_dir is None else os.fspath(save_dir))
        return folder

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Record that the run uses an artifact, and return it."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Upload the remaining checkpoints after a successful run. The W&B run stays open."""
        if status == "success" and self._experiment is not None:
            self._log_remaining_checkpoints()

    def _log_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        experiment = self.experiment
        if not self._checkpoint_name:
            self._checkpoint_name = f"model-{experiment.id}"
        artifact = need("wandb", purpose="WandbLogger").Artifact(
            name=self._checkpoint_name, type="model", metadata=plain(checkpoint.metadata)
        )
        add = artifact.add_dir if checkpoint.is_folder else artifact.add_file
        add(checkpoint.path, name="model.ckpt", policy=self.add_file_policy)
        experiment.log_artifact(artifact, aliases=checkpoint.aliases)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if rank_zero_only.rank == 0:
            # A run belongs to W&B's own process: another process of ours attaches to it there. It must have begun.
            run = self.experiment
            state["_attach_id"] = getattr(run, "_attach_id", None)
            state["_wandb_init"] = {**self._wandb_init, "id": run.id, "name": run.name}
        return state
