"""deeptab: a regressor, a classifier and a distribution of tables, with early stopping; models saved and loaded."""

import numpy as np
import pandas as pd
import record
from deeptab.configs import TrainerConfig
from deeptab.models import MLPLSS, FTTransformerRegressor, ResNetClassifier

generator = np.random.default_rng(0)
frame = pd.DataFrame({"x": generator.normal(size=96), "y": generator.normal(size=96), "kind": np.arange(96) % 3})
frame["kind"] = frame["kind"].map(str)
amount = (frame.x * 2 + frame.y).to_numpy()
quiet = {"accelerator": "cpu", "enable_progress_bar": False, "random_state": 0}
results = {}
for kind, target, options in (
    (FTTransformerRegressor, amount, {}),
    (ResNetClassifier, (amount > 0).astype(int), {}),
    (MLPLSS, amount, {"family": "normal"}),
):
    losses = record.KeepLosses()
    model = kind(trainer_config=TrainerConfig(max_epochs=3, batch_size=16, lr=1e-2, patience=1))
    model.fit(frame[:64], target[:64], X_val=frame[64:80], y_val=target[64:80], callbacks=[losses], **options, **quiet)
    model.save(f"{kind.__name__}.deeptab")
    again = kind.load(f"{kind.__name__}.deeptab")
    forecast = np.asarray(again.predict(frame[80:]), dtype=float)
    scores = {name: float(value) for name, value in model.evaluate(frame[80:], target[80:]).items()}
    results[kind.__name__] = [losses.losses, losses.epochs, scores, forecast.ravel().tolist()]
record.write(**results)
