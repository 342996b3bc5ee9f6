"""The decisions of ``hasten.elsewhere.conventions`` as Lightning makes them."""

from __future__ import annotations

from dataclasses import fields

from hasten.elsewhere.conventions import Conventions

LIGHTNING = Conventions(**{each.name: True for each in fields(Conventions)})
