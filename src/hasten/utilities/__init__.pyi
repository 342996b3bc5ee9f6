from hasten_lightning.utilities import *
