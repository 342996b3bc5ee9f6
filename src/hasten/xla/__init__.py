"""What training on XLA devices needs beside a strategy: devices and their steps."""
