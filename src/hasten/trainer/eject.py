"""``Trainer.eject``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.module.datamodule import LightningDataModule
    from hasten.trainer import Trainer
    from hasten.types import Dataloaders, PathLike


def eject(
    self: Trainer,
    model: LightningModule,
    train_dataloaders: Dataloaders = None,
    val_dataloaders: Dataloaders = None,
    datamodule: LightningDataModule | None = None,
    output: PathLike | None = None,
) -> str:
    """Return the plain PyTorch program that trains ``model`` as ``fit`` would, to the same bits, without hasten.

    In a script it is the whole script, with a training loop in place of the Trainer. In a notebook it has the classes,
    what they use, and a function ``train`` that takes a model and its data. Nothing is trained. The command
    ``hasten eject program.py`` does the same for a program; see docs/eject.md.

    Args:
        model: the module.
        train_dataloaders: the training data; or a datamodule.
        val_dataloaders: the validation data.
        datamodule: provides the data instead.
        output: a file to write the program to.

    Raises:
        EjectError: something has no short equivalent; the message names it, and the line where there is one.

    Example::

        >>> import hasten as L
        >>> from hasten.demos.boring_classes import BoringModel
        >>> trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> program = trainer.eject(BoringModel())
        >>> "L.LightningModule" in program, "loss.backward()" in program
        (False, True)

    """
    from hasten.eject.live import eject

    data = {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders, "datamodule": datamodule}
    return eject(self, model, data, output)
