from hasten_lightning.demos.mnist import *
