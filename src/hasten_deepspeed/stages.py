"""The stages of ZeRO under their names: ``Trainer(strategy="deepspeed_stage_2")``."""

from __future__ import annotations

from functools import partial

from hasten_deepspeed.strategy import DeepSpeedStrategy

stage_1 = partial(DeepSpeedStrategy, stage=1)
stage_1_offload = partial(DeepSpeedStrategy, stage=1, offload_optimizer=True)
stage_2 = partial(DeepSpeedStrategy, stage=2)
stage_2_offload = partial(DeepSpeedStrategy, stage=2, offload_optimizer=True)
stage_3 = partial(DeepSpeedStrategy, stage=3)
stage_3_offload = partial(stage_3, offload_optimizer=True, offload_parameters=True)
stage_3_offload_nvme = partial(
    stage_3_offload, remote_device="nvme", offload_params_device="nvme", offload_optimizer_device="nvme"
)
