from hasten_lightning.utilities.memory import *
