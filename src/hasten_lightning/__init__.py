"""Run programs and packages written for Lightning unchanged: its module names lead to hasten.

``hasten run program.py`` does it for a whole program; ``hasten_lightning.install()`` for the process that calls it. The
core (``hasten``) finds it by entry points and imports nothing from here. It must not import ``hasten_tools``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten_lightning.alias import install as install
    from hasten_lightning.alias import installed as installed
    from hasten_lightning.alias import uninstall as uninstall

# Type checkers know the names above alone.
if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = attach(__name__, {"hasten_lightning.alias": ("install", "installed", "uninstall")})
