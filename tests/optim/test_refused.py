"""Arguments that the optimizers of hasten refuse, with what to write instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hasten.optim import adamw, in_backward, muon, schedule_free, use_fused
from tests.models import quiet

LINEAR = nn.Linear(4, 2)
DEEP = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
WEIGHTS = [nn.Parameter(torch.zeros(2))]
COMPLEX = nn.Parameter(torch.zeros(2, dtype=torch.complex64))

REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: adamw(LINEAR.parameters()), TypeError, r"Pass the module itself, not its parameters\(\)"),  # type: ignore[arg-type]
    (lambda: adamw(LINEAR, no_decay=["emb"]), ValueError, "no parameter has 'emb' in its name. There are weight"),
    (lambda: adamw(nn.ReLU()), ValueError, "no parameters that need gradients"),
    (lambda: muon(LINEAR), ValueError, r"no hidden matrices.*Use hasten.optim.adamw"),
    (lambda: muon(LINEAR.parameters()), TypeError, "Pass the module itself"),  # type: ignore[arg-type]
    (lambda: muon(DEEP, adamw="head"), TypeError, r"use a list of parts of names, \['head'\]"),
    (lambda: in_backward(torch.optim.LBFGS, WEIGHTS), ValueError, r"in_backward\(LBFGS\).*Use one of torch.optim: SGD"),
    (lambda: in_backward(torch.optim.AdamW(WEIGHTS), WEIGHTS), TypeError,  # type: ignore[arg-type]
     r"use a class, such as torch.optim.AdamW, not AdamW"),
    (lambda: in_backward(torch.optim.SGD, LINEAR), TypeError,  # type: ignore[arg-type]
     r"not the module Linear. Pass its parameters\(\).*torch.optim.SGD, model.para"),
    (lambda: schedule_free(LINEAR, kind="adam"), ValueError, "'adam' is unknown. Did you mean 'radam'"),
    (lambda: use_fused(torch.optim.Adam([COMPLEX])), ValueError, "floating-point parameters, and one is torch.comp"),
    (lambda: use_fused(torch.optim.Adam(WEIGHTS, differentiable=True)), ValueError, "cannot be differentiated"),
    (lambda: quiet(fused_optimizer="yes"), TypeError, "use True, False or None"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_arguments_are_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
