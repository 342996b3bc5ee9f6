"""Small tools that know nothing of hasten. Nothing here imports another hasten module outside this folder."""
