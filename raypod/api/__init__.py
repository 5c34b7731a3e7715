"""The Python interface: `fit`, `stream`, `run` and `Trainable`, which `import raypod` exports."""
