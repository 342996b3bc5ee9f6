from hasten_lightning.utilities.rank_zero import *
