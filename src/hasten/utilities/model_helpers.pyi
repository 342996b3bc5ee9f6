from hasten_lightning.utilities.model_helpers import *
