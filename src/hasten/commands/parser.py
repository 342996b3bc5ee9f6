"""An argument parser whose errors name the nearest option."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from hasten._lib.files import require_folder
from hasten._lib.names import did_you_mean, nearest

# (name, what stands for its value in the help, function that reads it or the allowed words, help); None: a flag
Option = tuple[str, str, Callable[[str], object] | tuple[str, ...] | None, str]


class Parser(argparse.ArgumentParser):
    """``argparse.ArgumentParser`` without abbreviations, and with the nearest name for an unknown option.

    Example::

        >>> parser = Parser(prog="hasten demo")
        >>> _ = parser.add_argument("--limit", type=whole(1), help="reviews to use")
        >>> parser.parse(["--limit", "20"]).limit
        20

    """

    def __init__(
        self,
        *,
        prog: str,
        description: str = "",
        epilog: str | None = None,
        elsewhere: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        texts = {"prog": prog, "description": description, "epilog": epilog}
        super().__init__(**texts, allow_abbrev=False, formatter_class=_Formatter)  # type: ignore[arg-type]
        # What other programs call an option of this one.
        self._elsewhere = elsewhere

    def add_options(self, options: Iterable[Option], *, group: str = "") -> None:
        """Add options, under the heading ``group`` if it is given."""
        to = self.add_argument_group(group) if group else self
        for name, metavar, read, text in options:
            if read is None:
                to.add_argument(name, action="store_true", help=text)
            elif isinstance(read, tuple):
                to.add_argument(name, choices=read, help=text)
            else:
                to.add_argument(name, metavar=metavar or None, type=read, help=text)

    def options_with_value(self) -> set[str]:
        """Return the names of the options that take the next word; those with ``nargs="?"`` do not."""
        return {name for action in self._actions if action.nargs not in (0, "?") for name in action.option_strings}

    def long_options(self) -> set[str]:
        """Return the names of the options, without ``--help``."""
        return {name for action in self._actions for name in action.option_strings if name.startswith("--")} - {
            "--help"
        }

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse all of ``arguments``; an unknown one ends the program with code 2 and names the nearest."""
        found, unknown = super().parse_known_args(arguments)
        if unknown:
            self._unknown(unknown[0])
        return found

    def error(self, message: str) -> NoReturn:
        """End the program with code 2 and one line; argparse's own texts do not say where the options are listed."""
        self.exit(2, f"{self.prog}: error: {message}{'' if message[-1] in '.?' else f'. See {self.prog} --help.'}\n")

    def _unknown(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}: see {self.prog} --help.")
        name = word.partition("=")[0]
        known = [name[2:] for action in self._actions for name in action.option_strings if name.startswith("--")]
        # Without the dashes, which all names have.
        bare = name.lstrip("-").replace("_", "-")
        longer = next((each for each in known if each.startswith(bare)), None)
        found = self._elsewhere.get(bare) or longer or nearest(bare, known)
        hint = f" Did you mean '--{found}'?" if found else ""
        self.error(f"unknown option {name}.{hint} See {self.prog} --help.")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        choices = [] if action.choices is None else [str(choice) for choice in action.choices]
        if choices and value not in choices and (hint := did_you_mean(str(value), choices)):
            given = action.metavar or "/".join(action.option_strings) or action.dest
            self.error(f"{given} {value!r} is unknown.{hint}")
        super()._check_value(action, value)


class _Formatter(argparse.HelpFormatter):
    """Help 100 columns wide; text that has line breaks, such as a list, keeps them."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def new_file(text: str) -> Path:
    """An argument that is a file to write, in a folder that exists."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {path.parent} does not exist.")
    return path


def folder(text: str) -> str:
    """An argument that is a folder, or can become one."""
    try:
        require_folder("", "", text)
    except NotADirectoryError:
        raise argparse.ArgumentTypeError(f"{text} is a file, or below one. Give a folder.") from None
    return text


def whole(smallest: int) -> Callable[[str], int]:
    """An argument that is a whole number of at least ``smallest``.

    Example::

        >>> whole(1)("12_000")
        12000

    """

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < smallest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {smallest}.")
        return number

    return parse


def positive(text: str) -> float:
    """An argument that is a number above 0.

    Example::

        >>> positive("1e-4")
        0.0001

    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0.")
    return number
