"""PolyBeast: environments in servers, batched inference in the learner's process."""
