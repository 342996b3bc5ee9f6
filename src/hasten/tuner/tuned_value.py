"""Find and set the attribute that a search tunes, in the module, the datamodule or their hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean

if TYPE_CHECKING:
    from hasten import LightningDataModule, LightningModule


class TunedValue:
    """A value by its name in the module, its hyper-parameters, the datamodule and its hyper-parameters."""

    def __init__(self, module: LightningModule, datamodule: LightningDataModule | None, name: str) -> None:
        self.name = name
        self._owners = [owner for owner in (module, datamodule) if owner is not None]

    def holders(self) -> list[Any]:
        """Return everything that has the attribute or hyper-parameter."""
        candidates = [each for owner in self._owners for each in (owner, getattr(owner, "hparams", {}))]
        return [
            each for each in candidates if (self.name in each if isinstance(each, dict) else hasattr(each, self.name))
        ]

    def get(self) -> Any:
        """Return the value."""
        found = self.holders()
        if found:
            return self._read(found[0])
        known = [key for owner in self._owners for key in vars(owner) if key[0] != "_"]
        known += [key for owner in self._owners for key in getattr(owner, "hparams", {})]
        raise MisconfigurationException(
            f"Field {self.name} not found in `model`, `datamodule`, nor their `hparams` attributes. The model is "
            f"{type(self._owners[0]).__name__}.",
            fix=f"{did_you_mean(self.name, known)} Set self.{self.name} in __init__ and use it.",
        )

    def set(self, value: object) -> None:
        """Set the value in all holders."""
        for holder in self.holders():
            self._write(holder, value)

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Restore the value of each holder if the block raises."""
        before = [(holder, self._read(holder)) for holder in self.holders()]
        try:
            yield
        except BaseException:
            for holder, value in before:
                self._write(holder, value)
            raise

    def _read(self, holder: Any) -> Any:
        return holder[self.name] if isinstance(holder, dict) else getattr(holder, self.name)

    def _write(self, holder: Any, value: object) -> None:
        if isinstance(holder, dict):
            holder[self.name] = value
            return
        try:
            setattr(holder, self.name, value)
        except AttributeError as error:
            raise MisconfigurationException(
                f"{type(holder).__name__}.{self.name} cannot be set ({error}).", fix="Make it a plain attribute."
            ) from error
