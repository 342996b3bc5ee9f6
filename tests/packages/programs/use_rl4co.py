"""rl4co: a traveling salesman solved with REINFORCE and a rollout baseline, and with PPO under manual optimization."""

import lightning.pytorch as pl
import record
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rl4co.envs import TSPEnv
from rl4co.models import PPO, AttentionModel, AttentionModelPolicy
from rl4co.utils.trainer import RL4COTrainer

pl.seed_everything(0)
env = TSPEnv(generator_params={"num_loc": 6})
sizes = {"train_data_size": 32, "val_data_size": 16, "test_data_size": 16, "batch_size": 8}
common = {"accelerator": "cpu", "precision": "32-true", "logger": None, "enable_progress_bar": False}


def policy() -> AttentionModelPolicy:
    """Return a small policy."""
    return AttentionModelPolicy(env_name="tsp", embed_dim=16, num_encoder_layers=1, num_heads=2, feedforward_hidden=16)


losses, checkpoints = record.KeepLosses(), ModelCheckpoint("checkpoints", save_last=True, monitor="val/reward")
model = AttentionModel(env, policy=policy(), baseline="rollout", optimizer_kwargs={"lr": 1e-3}, **sizes)
trainer = RL4COTrainer(max_epochs=2, callbacks=[losses, checkpoints], **common)
trainer.fit(model)
(scores,) = trainer.test(model)
again = AttentionModel.load_from_checkpoint(checkpoints.last_model_path, weights_only=False, load_baseline=False)
states = env.reset(env.generator(batch_size=[4]))
torch.manual_seed(0)
tours = again.policy(states.clone(), env, phase="test", decode_type="greedy")

second_losses = record.KeepLosses()
second = PPO(env, policy(), critic_kwargs={"embed_dim": 16, "hidden_dim": 16}, ppo_epochs=1, mini_batch_size=4, **sizes)
second_trainer = RL4COTrainer(max_epochs=1, callbacks=[second_losses], enable_checkpointing=False, **common)
second_trainer.fit(second)
record.write(
    losses=losses.losses,
    epochs=losses.epochs,
    scores=scores,
    rewards=tours["reward"].tolist(),
    ppo_losses=second_losses.losses,
    ppo_epochs=second_losses.epochs,
)
