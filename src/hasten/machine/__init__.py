"""Where this process is: its devices, its cluster, how the others are started, how they speak."""
