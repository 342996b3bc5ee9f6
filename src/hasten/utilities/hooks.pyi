from hasten_lightning.utilities.hooks import *
