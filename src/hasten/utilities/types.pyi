from hasten_lightning.utilities.types import *
