from hasten_lightning.utilities.saving import *
