"""The C++ kernels of the CPU backend: `library` finds and loads them, `calls` says what they take."""
